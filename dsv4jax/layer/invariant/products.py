"""Products with a layer's weights, and what new tokens contribute, in tiles of ``ROWS`` tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import LayerCall, Normed
from dsv4jax.layer.ops import PROJECTIONS, InputProducts, TokenParts
from dsv4jax.layer.projections import XLAProjections
from dsv4jax.layer.tiles import map_rows
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import Weight

ROWS = 16  # of a tile: a vector of f32 on most CPUs, and few enough that one row alone costs little more


class InvariantProjections(XLAProjections):
    """Products whose sums do not depend on the number of rows."""

    def linear(
        self,
        x: jax.Array | pk.OperandRows,
        weight: Weight,
        dtype: DTypeLike = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        assert isinstance(x, jax.Array), "other rows are for kernels"
        plain, of_row = super().linear, 1 if groups == 1 else 2  # axes
        return map_rows(lambda tile: plain(tile, weight, dtype, groups), x, ROWS, axes=x.ndim - of_row)

    def swiglu(self, x: jax.Array, gate_up: Weight, down: Weight, limit: float) -> jax.Array:
        plain = XLAProjections()
        return map_rows(lambda tile: plain.swiglu(tile, gate_up, down, limit), x, ROWS, axes=x.ndim - 1)

    def parts(
        self, products: InputProducts, params: AttentionParams, call: LayerCall, dtype: DTypeLike, *, encode: bool
    ) -> TokenParts:
        plain, tokens = super().parts, products.positions.shape[1]
        of_tokens = InputProducts(
            q_a_kv=products.q_a_kv,
            compress=products.compress,
            start=products.start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None],
            positions=products.positions,
        )

        def of_tile(tile: InputProducts) -> TokenParts:
            """Of tokens as if each was the only one of a request."""
            alone = dataclasses.replace(jax.tree.map(lambda leaf: leaf[:, None], tile), start=tile.start)
            parts = plain(alone, params, call, dtype, encode=encode)
            # Norm weights are of no token.
            rows = dataclasses.replace(parts.rows, entry=_streams(parts.rows.entry), key=_streams(parts.rows.key))
            return jax.tree.map(lambda leaf: leaf[:, 0], dataclasses.replace(parts, rows=rows))

        parts = map_rows(of_tile, of_tokens, ROWS, axes=2)
        rows, of_entry, of_key = parts.rows, params.entry_pool, params.key_pool
        entry = rows.entry and of_entry and (rows.entry[0], of_entry.norm)
        key = rows.key and of_key and (rows.key[0], of_key.norm)
        return dataclasses.replace(parts, rows=dataclasses.replace(parts.rows, entry=entry, key=key))


def _streams(normed: Normed | None) -> tuple | None:
    return normed and (normed[0], ())


PROJECTIONS.register_invariant(XLA, InvariantProjections())
