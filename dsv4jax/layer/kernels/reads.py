"""The kernels that read the cache: scores of the indexer, top-k and attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.checks import Named
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import unique_or_dropped
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.kernels.base import Kernels, layer_number, of_chunk, register, register_invariant
from dsv4jax.layer.ops import (
    DECODE_ATTENTION,
    INDEXER_SCORES,
    TOP_K,
    AttentionInputs,
    RowForm,
    Rows,
)
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles
from dsv4jax.weights.stored import CODES


class IndexerScoresKernels(Kernels):
    """The kernels of ``pallas_kernels.scores``, and the kernel that makes their queries."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        cfg = plan.cfg
        return self.kernels.unsupported_scores(
            key_format=plan.indexer_format,
            heads=cfg.indexer_heads,
            key_dim=cfg.indexer_head_dim,
            entries_per_block=plan.entries_per_block(kind),
        )

    def queries(
        self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | KeyRows:
        product = self.without_derivative(INDEXER_SCORES, product)
        angles, row = packed_angles(positions, freqs), plan.keys.row(product.shape[-1])
        needed, key_format = of_chunk(positions >= 0), plan.indexer_format
        return pk.indexer_queries(product, angles, row, key_format=key_format, needed=needed, **self.options)

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        weights, layer = self.without_derivative(INDEXER_SCORES, (weights, layer))
        assert layer.pool.indexer_keys is not None
        inputs = pk.ScoreInputs(
            queries=cast(Any, queries),  # an array where keys are floats, which the kernels in Triton serve, too
            weights=weights,
            keys=layer.pool.indexer_keys,
            layer=layer_number(layer.index),
            block_table=layer.block_table,
            slots=layer.slots,
            visible=visible,
        )
        return self.kernels.indexer_scores(inputs, key_format=layer.plan.indexer_format, **self.options)


class TopKKernels(Kernels):
    """The kernels of ``pallas_kernels.selection``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        return self.kernels.unsupported_top_k(plan.cfg.indexer_top_k, plan.max_blocks * plan.entries_per_block(kind))

    def pick(self, score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
        k = min(top_k, score.shape[-1])
        rows = score.reshape(-1, score.shape[-1]), visible.reshape(-1)
        picks = self.kernels.top_k(*rows, k=k, **self.options)
        return picks.reshape(*visible.shape, k)


class DecodeAttentionKernels(Kernels):
    """The kernels of ``pallas_kernels.attention``, and the kernel that makes their queries."""

    # A chunk of 4096 tokens is one tile at V4-Flash's sizes. Several tiles read the heads' weights again, and their
    # slices and results are copied.
    tile_bytes = 1 << 30
    forms: tuple[RowForm, ...] = ("plain", "rounded", "operand")
    query_dtype = jnp.float16

    def token_bytes(self, plan: CachePlan, kind: AttentionType) -> int:
        """Queries in f16, and the result in bf16."""
        del kind
        return (2 + 2) * plan.cfg.num_heads * plan.cfg.head_dim

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        del kind
        cfg = plan.cfg
        return self.kernels.unsupported_attention(
            kv_format=plan.kv_format,
            num_heads=cfg.num_heads,
            nope_dim=cfg.head_dim - cfg.rope_dim,
            rope_dim=cfg.rope_dim,
        )

    def queries(
        self,
        product: jax.Array,
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        product = self.without_derivative(DECODE_ATTENTION, product)
        angles, eps = packed_angles(positions, freqs), plan.cfg.norm_eps
        return pk.attention_queries(product, angles, eps=eps, needed=of_chunk(needed), **self.options)

    def attend(
        self,
        inputs: AttentionInputs,
        freqs: np.ndarray,
        dtype: DTypeLike,
        needed: jax.Array | None = None,
        form: RowForm = "plain",
    ) -> Rows:
        inputs = self.without_derivative(DECODE_ATTENTION, inputs)
        given = _reads(inputs, freqs)
        options = _form_options(form, dtype) | self.options | ({"invariant": True} if self.invariant else {})
        options["kv_format"] = inputs.window.plan.kv_format
        if inputs.block is None:
            return self.kernels.decode_attention(dataclasses.replace(given, needed=of_chunk(needed)), **options)
        return self.kernels.decode_attention(_of_block(given, inputs.block), **options)


def _reads(inputs: AttentionInputs, freqs: np.ndarray) -> pk.AttentionInputs[jax.Array]:
    window, entries = inputs.window, inputs.entries
    return pk.AttentionInputs(
        q=inputs.q.astype(jnp.float16) if inputs.q.dtype == jnp.float32 else inputs.q,
        window=window.state.window,
        pos=window.state.pos,
        fresh=window.fresh,
        entries=None if entries is None else entries.pool.entries,
        picks=inputs.picks,
        block_table=None if entries is None else entries.block_table,
        slots=window.slots,
        start=window.start,
        positions=inputs.positions,
        visible=inputs.visible,
        sinks=inputs.sinks,
        angles=packed_angles(inputs.positions, freqs),
        layer=layer_number(window.index),
    )


def _of_block(reads: pk.AttentionInputs[jax.Array], block: KVRows) -> pk.AttentionInputs[jax.Array]:
    """The rows of a block are entries, of a page for each request, and all queries stand before it.

    Their own positions are in the angles alone.
    """
    layers, requests, _ = reads.pos.shape
    batch, count = block.nope.shape[:2]
    real, page = reads.positions >= 0, jnp.arange(batch, dtype=jnp.int32)
    table = jnp.full((requests, 1), -1, jnp.int32)
    return dataclasses.replace(
        reads,
        # A kernel finds the pages of a layer by its number among those of the windows.
        entries=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (layers, *leaf.shape)), block),
        block_table=table.at[unique_or_dropped(reads.slots, reads.slots >= 0, requests), 0].set(page, mode="drop"),
        visible=jnp.where(real, count, 0),
        positions=jnp.where(real, reads.start[:, None] - 1, -1),
    )


def _form_options(form: RowForm, dtype: DTypeLike) -> Named:
    """Return how kernels are told to give rows in a form, or in the plain one as ``dtype``."""
    if form == "plain":
        return {"dtype": dtype}
    return {"dtype": CODES} if form == "rounded" else {"dtype": jnp.bfloat16, "is_operand": True}


register(INDEXER_SCORES, IndexerScoresKernels)
register(TOP_K, TopKKernels)
register(DECODE_ATTENTION, DecodeAttentionKernels)
# A score is added up in one tile, in an order that does not depend on which tokens share it.
register_invariant(INDEXER_SCORES, functools.partial(IndexerScoresKernels, invariant=True))
register_invariant(TOP_K, TopKKernels)  # nothing is added up
register_invariant(DECODE_ATTENTION, functools.partial(DecodeAttentionKernels, invariant=True))
