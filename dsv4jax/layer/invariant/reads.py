"""Scores of the indexer, and attention, for each token alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dsv4jax.cache.pool import PooledLayer
from dsv4jax.checks import Tree
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.layer.attention import RunningSoftmax, XLADecodeAttention, attend, start_at_sinks
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.gather import XLAGatherRows
from dsv4jax.layer.indexer import XLAIndexerScores, XLATopK
from dsv4jax.layer.invariant.products import ROWS
from dsv4jax.layer.ops import DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, TOP_K, AttentionInputs, RowForm
from dsv4jax.layer.tiles import apart, map_alone, map_rows
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope


class InvariantIndexerScores(XLAIndexerScores):
    """Scores in which a token's do not depend on the others."""

    def queries(self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan) -> jax.Array:
        plain = super().queries
        return _by_tokens(lambda product, positions: plain(product, positions, freqs, plan), product, positions)

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        plain = super().scores

        def of_token(token: Tree, slots: jax.Array) -> jax.Array:
            queries, weights, visible = token
            return plain(queries, weights, dataclasses.replace(layer, slots=slots, exact=None), visible)

        return map_alone(of_token, (queries, weights, visible), layer.slots)


class InvariantDecodeAttention(XLADecodeAttention):
    """Attention in which each query adds its keys in the order of one token in decode."""

    def queries(
        self,
        product: jax.Array,
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        plain = super().queries
        return _by_tokens(lambda product, positions: plain(product, positions, freqs, plan), product, positions)

    def attend(
        self,
        inputs: AttentionInputs,
        freqs: np.ndarray,
        dtype: DTypeLike,
        needed: jax.Array | None = None,
        form: RowForm = "plain",
    ) -> jax.Array:
        plain, window, entries = super().attend, inputs.window, inputs.entries

        def part(tokens: Tree, requests: Tree, block: KVRows | None = None) -> AttentionInputs:
            (q, positions, picks, visible), (slots, start, fresh) = tokens, requests
            return dataclasses.replace(
                inputs,
                q=q,
                positions=positions,
                window=dataclasses.replace(window, slots=slots, start=start, fresh=fresh, exact=None),
                entries=entries and dataclasses.replace(entries, slots=slots, exact=None),
                picks=picks,
                visible=visible,
                block=block,
            )

        of_tokens = inputs.q, inputs.positions, inputs.picks, inputs.visible
        of_requests = window.slots, window.start, window.fresh
        if inputs.block is None:
            return map_alone(lambda *given: _of_token(part(*given), freqs), of_tokens, of_requests).astype(dtype)
        # The tokens of a block are all of a request, always as many, and see each other.
        given = of_tokens, of_requests, inputs.block
        return map_rows(lambda given: plain(part(*given), freqs, dtype, form=form), given, 1)


def _of_token(inputs: AttentionInputs, freqs: np.ndarray) -> jax.Array:
    """The attention of one token, f32 [1, 1, H, head_dim].

    What reads rows depends on where they are, in the cache or beside it; it is kept apart from what adds them up.
    """
    q, positions, window, entries = inputs.q.astype(jnp.float32), inputs.positions, inputs.window, inputs.entries

    def add(running: RunningSoftmax, keys: jax.Array, mask: jax.Array) -> RunningSoftmax:
        return apart(lambda given: attend(*given), (running, q, keys, mask))

    near = positions + jnp.arange(1 - window.plan.cfg.sliding_window, 1, dtype=jnp.int32)[None]
    rows, held = window.rows(jnp.where(positions >= 0, near, -1))
    running = add(start_at_sinks(inputs.sinks, q), rows, held[:, None])
    if entries is not None and inputs.picks is not None:
        running = add(running, entries.rows(inputs.picks[:, 0]), inputs.picks >= 0)
    elif entries is not None:
        assert inputs.visible is not None

        def fold(running: RunningSoftmax, _: jax.Array | int, entry: jax.Array, seen: jax.Array) -> RunningSoftmax:
            return add(running, entries.rows(entry), seen)

        running = entries.fold_tiles(inputs.visible, entries.tile_size(q.shape[2] * 4), fold, running)
    return apply_rope(running.output, positions[..., None], freqs, inverse=True)


def _by_tokens(
    function: Callable[[jax.Array, jax.Array], jax.Array], product: jax.Array, positions: jax.Array
) -> jax.Array:
    """Make queries of products [B, T, ...] at positions [B, T] by a function, in tiles of ``ROWS`` tokens."""

    def of_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Of tokens as if each was the only one of a request."""
        return function(*(leaf[:, None] for leaf in tile))[:, 0]

    return map_rows(of_tile, (product, positions), ROWS, axes=2)


DECODE_ATTENTION.register_invariant(XLA, InvariantDecodeAttention())
INDEXER_SCORES.register_invariant(XLA, InvariantIndexerScores())
# Nothing is added up; and of equal scores that of the lowest entry is picked.
TOP_K.register_invariant(XLA, XLATopK())
GATHER_ROWS.register_invariant(XLA, XLAGatherRows())
