"""The products of a layer's inputs with its weights, and what new tokens contribute to a layer, from the products of x.

This is the XLA form of the op ``projections``: the reference for its kernels.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.checks import FLOATS, check_array, check_dtype, integer
from dsv4jax.derivatives import storable
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.layer.compressor import token_streams
from dsv4jax.layer.dense import product_dtype, rms_norm, swiglu, wide_product
from dsv4jax.layer.indexer import head_factor
from dsv4jax.layer.ops import PROJECTIONS, InputProducts, TokenParts
from dsv4jax.layer.stored_products import stored_product
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.deltas import WeightWithDelta
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import StoredWeight, Weight


class XLAProjections(Anywhere):
    """Products in plain JAX."""

    def linear(
        self,
        x: jax.Array | pk.OperandRows,
        weight: Weight,
        dtype: DTypeLike = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        assert not isinstance(x, pk.OperandRows), "other rows are for kernels"
        if isinstance(weight, WeightWithDelta):
            product = self.linear(x, weight.base, groups=groups, needed=needed)
            return weight.add_to(product, x, groups).astype(dtype)
        if isinstance(weight, StoredWeight):
            lead = x.shape[:-1] if groups == 1 else x.shape[:-2]
            product = stored_product(x.reshape(math.prod(lead), groups, x.shape[-1]), weight, groups).astype(dtype)
            return product.reshape(*x.shape[:-1], weight.shape[0] // groups)
        if groups == 1:
            return wide_product(x, weight).astype(dtype)
        product = product_dtype(x, weight)
        return jnp.einsum(
            "...gi,goi->...go",
            x.astype(product),
            weight.reshape(groups, -1, weight.shape[1]).astype(product),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=dtype if product == dtype else jnp.float32,
        ).astype(dtype)

    def swiglu(self, x: jax.Array, gate_up: Weight, down: Weight, limit: float) -> jax.Array:
        return self.linear(swiglu(self.linear(x, gate_up, x.dtype), limit).astype(x.dtype), down, x.dtype)

    def parts(
        self, products: InputProducts, params: AttentionParams, call: LayerCall, dtype: DTypeLike, *, encode: bool
    ) -> TokenParts:
        plan, kind, positions = call.plan, call.kind, products.positions
        cfg = plan.cfg
        latent, kv = jnp.split(products.q_a_kv, [cfg.q_lora_rank], axis=-1)
        latent = rms_norm(latent, params.q_norm, cfg.norm_eps).astype(dtype)
        kv = apply_rope(rms_norm(kv, params.kv_norm, cfg.norm_eps), positions, rope_frequencies(cfg, kind))
        entry = key = head_weights = None
        if products.compress is not None:
            pools = params.entry_pool, params.key_pool
            entry, key, rest = token_streams(products.compress, *pools, products.start, plan, kind)
            head_weights = rest * head_factor(plan) if kind.is_indexed else None
        encoded = plan.rows.encode(storable(kv, plan.row_spec), cfg.rope_dim) if encode else None
        rows = TokenRows(kv=kv, entry=entry, key=key)
        return TokenParts(latent=latent, rows=rows, encoded=encoded, head_weights=head_weights)


def linear(
    x: jax.Array, weight: Weight, dtype: DTypeLike = jnp.float32, groups: int = 1, *, backend: Backend = None
) -> jax.Array:
    """Multiply x by a weight of a layer, wide or stored, as ``attention_layer`` does; for layers of your own.

    Args:
      x: f32 or bf16 [..., in]; with ``groups`` [..., groups, in].
      weight: [out, in], an array or a ``StoredWeight``, or either with deltas.
      dtype: of the result, f32 or bf16. Sums are in f32.
      groups: the rows of the weight are divided over so many groups, each with its own part of x (W_oa).
      backend: of ``projections``: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      dtype [..., out]; with ``groups`` [..., groups, out / groups].

    Raises:
      AssertionError: (chex) x has other sizes than weight and groups ask for, or is neither f32 nor bf16.
      ValueError: groups do not divide the rows of the weight, ``dtype`` is neither f32 nor bf16, or the backend is
        unknown.
    """
    check_dtype("dtype", dtype, FLOATS)
    rows, width = weight.shape
    groups = integer("groups", groups, least=1)
    if rows % groups:
        raise ValueError(f"groups must divide the {rows} rows of the weight, got {groups}")
    check_array("x", x, {"...": ..., **({"groups": groups} if groups > 1 else {}), "in": width}, FLOATS)
    # Products do not depend on the kind of the layer.
    return PROJECTIONS.of(backend, None, AttentionType.SWA).linear(x, weight, groups=groups, dtype=dtype)


PROJECTIONS.register(XLA, XLAProjections())
