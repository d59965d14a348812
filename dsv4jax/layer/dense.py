"""The dense operations of a layer: matrix product, SwiGLU, norm and Hadamard transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def product_dtype(x: jax.Array, weight: jax.Array) -> DTypeLike:
    """Return bf16 if both are bf16, so that the product runs on the tensor cores; otherwise f32."""
    return x.dtype if x.dtype == weight.dtype else jnp.float32


def swiglu(product: jax.Array, limit: float) -> jax.Array:
    """Return silu(gate) * up, f32 [..., I], of products [..., 2 I], the gates first.

    The gate is clamped to ``limit`` from above alone, before silu, and ups from both sides; not if it is 0.
    """
    gate, up = jnp.split(product.astype(jnp.float32), 2, axis=-1)
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def wide_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply x [..., in] by weight [out, in]: f32 [..., out].

    A product of bf16 by bf16 runs on the tensor cores and accumulates in f32. Anything else is computed in full f32,
    not in TF32.
    """
    dtype = product_dtype(x, weight)
    return lax.dot_general(
        x.astype(dtype),
        weight.astype(dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """Return x * weight / rms(x) over the last axis, in f32. If ``weight`` is None it counts as ones.

    x is multiplied by the weight before it is divided by the rms. A kernel can then find the row's largest magnitude
    and its rms in one reduction, and still give exactly the same bits.
    """
    x = x.astype(jnp.float32)
    inverse_rms = 1.0 / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x if weight is None else x * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)) * inverse_rms


def hadamard(x: jax.Array) -> jax.Array:
    """Multiply x by the normalised Walsh-Hadamard matrix in Sylvester order. The last axis must be a power of two."""
    n = x.shape[-1]
    shape = x.shape
    half = 1
    while half < n:
        first, second = jnp.split(x.reshape(*shape[:-1], n // (2 * half), 2, half), 2, -2)
        x = jnp.concatenate([first + second, first - second], -2)
        half *= 2
    return x.reshape(shape) * n**-0.5
