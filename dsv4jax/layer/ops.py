"""The ops that have more than one implementation: what each must do, and where they are registered."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow, StateCache
from dsv4jax.formats import KeyRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import Backend, Implementation, Op, OpBackends, declare
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewEntries:
    """Finished entries on their way into a pool: row e of request b is its entry first[b] + e."""

    entries: jax.Array  # f32 [B, E, head_dim], normed and roped
    keys: jax.Array | None  # f32 [B, E, indexer_head_dim], normed, roped and rotated; CSA only
    block_table: jax.Array  # int32 [requests, max_blocks], -1 = none: such an entry is dropped
    slots: jax.Array  # int32 [B], -1 = no-op
    first: jax.Array  # int32 [B]
    count: jax.Array  # int32 [B] entries that are real, at most E


class CacheUpdate(Implementation, Protocol):
    """What new tokens do to a layer's cache: all of it, and its parts alone."""

    def store(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        """Write window rows, complete entries and bring the tails up to date; the tails not with ``keep_tails``."""
        ...

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        """``update.append_swa``."""
        ...

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        """``update.flush_hca``, and with keys ``update.flush_csa``."""
        ...

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        """``update.rotate_csa``."""
        ...

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        """``update.reset_hca``."""
        ...


class IndexerScores(Implementation, Protocol):
    """The score of every entry for every query of a CSA layer."""

    def queries(
        self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | KeyRows:
        """Products f32 [B, T, H, indexer_head_dim] roped and rotated: f32, or rounded as the keys are."""
        ...

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        """f32 [B, T, max_entries]; what stands at and past ``visible`` [B, T] means nothing."""
        ...


class TopK(Implementation, Protocol):
    """The entries of the largest scores."""

    def pick(self, score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
        """``indexer.pick``."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """What attention reads: queries, and where their keys are."""

    q: jax.Array  # f32 or f16 [B, T, H, head_dim], normed and roped
    positions: jax.Array  # int32 [B, T], -1 = padding
    sinks: jax.Array  # [H]
    window: SlidingWindow
    entries: PooledLayer | None
    picks: jax.Array | None  # int32 [B, T, K], -1 = none; None: all visible ones
    visible: jax.Array | None  # int32 [B, T] entries that each query may see; None without entries


class DecodeAttention(Implementation, Protocol):
    """Attention over window and entries."""

    @property
    def tile_bytes(self) -> int:
        """Temporaries of one tile of queries, which set how many tokens a tile holds."""
        ...

    @property
    def gathers_picks(self) -> bool:
        """Whether each query's picked entries exist as rows in memory."""
        ...

    def queries(self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan) -> jax.Array:
        """Products f32 [B, T, H, head_dim] normed and roped, in the dtype in which ``attend`` takes them."""
        ...

    def attend(self, inputs: AttentionInputs, freqs: np.ndarray, dtype: Any) -> jax.Array:
        """dtype [B, T, H, head_dim], turned back by the inverse rope; 0 on padding."""
        ...


class GatherRows(Implementation, Protocol):
    """Stored rows as dense ones."""

    def picked(self, layer: PooledLayer, picks: jax.Array, dtype: Any) -> jax.Array:
        """``gather.gather_compressed``."""
        ...

    def complete(self, layer: PooledLayer, num_entries: jax.Array, dtype: Any) -> jax.Array:
        """``gather.gather_all_compressed``."""
        ...


CACHE_UPDATE: Op[CacheUpdate] = declare("cache_update")
INDEXER_SCORES: Op[IndexerScores] = declare("indexer_scores")
TOP_K: Op[TopK] = declare("top_k")
DECODE_ATTENTION: Op[DecodeAttention] = declare("decode_attention")
GATHER_ROWS: Op[GatherRows] = declare("gather_rows")


def choose_backends(backend: Backend, plan: CachePlan, kind: AttentionType) -> OpBackends:
    """The backend of each op that a layer of a kind runs; the others stay None."""
    ops: list[Op] = [CACHE_UPDATE, DECODE_ATTENTION]
    if kind.is_indexed:
        ops += [INDEXER_SCORES, TOP_K]
    return OpBackends(**{op.name: op.choose(backend, plan, kind) for op in ops})
