"""Matrix product, norm and Hadamard transform: the dense pieces that the layer is made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def product_dtype(x: jax.Array, weight: jax.Array) -> Any:
    """bf16 where both are, so that the product runs on the tensor cores; else f32."""
    return x.dtype if x.dtype == weight.dtype else jnp.float32


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] -> f32 [..., out].

    bf16 by bf16 runs on the tensor cores and accumulates in f32; anything else is computed in full f32 (not TF32).
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
    """x * weight / rms(x) over the last axis, in f32; weight None is all ones.

    The weight goes in first: a row's largest magnitude is then known before its rms is, which lets a kernel find both
    in one reduction and still agree to the bit.
    """
    x = x.astype(jnp.float32)
    inverse_rms = 1.0 / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x if weight is None else x * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)) * inverse_rms


def hadamard(x: jax.Array) -> jax.Array:
    """x times the normalised Walsh-Hadamard matrix in Sylvester order, over a last axis of power-of-two size n."""
    n = x.shape[-1]
    shape = x.shape
    half = 1
    while half < n:
        pairs = x.reshape(*shape[:-1], n // (2 * half), 2, half)
        x = jnp.concatenate([pairs[..., :1, :] + pairs[..., 1:, :], pairs[..., :1, :] - pairs[..., 1:, :]], -2)
        half *= 2
    return x.reshape(shape) * n**-0.5
