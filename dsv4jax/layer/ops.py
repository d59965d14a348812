"""The ops that have several implementations: the interface of each, and where to register implementations."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow, StateCache
from dsv4jax.checks import Named
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import (
    XLA,
    Anywhere,
    Backend,
    Implementation,
    Op,
    OpBackends,
    backends,
    declare,
    is_invariant,
)
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.plan import CachePlan
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import Weight

# How rows are handed from one product or stage to the next: as an array, rounded to FP8, or in the order in
# which a product's kernel reads them.
Rows = jax.Array | pk.RoundedRows | pk.OperandRows
RowForm = Literal["plain", "rounded", "operand"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputProducts:
    """The products of T new tokens' inputs x with the weights that x feeds, and where the tokens stand."""

    q_a_kv: jax.Array  # f32 [B, T, q_lora_rank + head_dim]
    compress: jax.Array | None  # f32 [B, T, rows of ``AttentionParams.compress``]; None for SWA
    start: jax.Array  # int32 [B] tokens stored before the call
    positions: jax.Array  # int32 [B, T], -1 = padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenParts:
    """What T new tokens contribute to a layer."""

    # [B, T, q_lora_rank], which queries are made of; in the dtype of x, after norm. In the form "operand" where all
    # products of it take that.
    latent: jax.Array | pk.OperandRows
    rows: TokenRows  # what the cache keeps
    encoded: KVRows | None  # rows [B, T, ...]: ``rows.kv`` as it is stored, if that was asked for
    head_weights: jax.Array | None  # f32 [B, T, indexer_heads], with the indexer's scale factors; CSA only


class Projections(Implementation, Protocol):
    """Products with a layer's weights, and what follows from those of its input."""

    def linear(
        self,
        x: jax.Array | pk.OperandRows,
        weight: Weight,
        dtype: DTypeLike = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        """Multiply x [..., in] by weight [out, in]: dtype [..., out], with sums in f32.

        With ``groups``, x is [..., groups, in], the rows of the weight are divided over the groups in order, and the
        result is [..., groups, out / groups]. x is f32 or bf16, or latents from ``parts``. A product of bf16 by bf16 or
        FP8 runs on the tensor cores. Anything else is computed in full f32. Of x [B, T, ...], ``needed`` [B, T] says
        which tokens' results anyone reads; those of the others may be anything, NaN too.
        """
        ...

    def swiglu(self, x: jax.Array, gate_up: Weight, down: Weight, limit: float) -> jax.Array:
        """Multiply x [..., in] by a weight [2 I, in], make ``dense.swiglu`` of it, and multiply by another [out, I].

        The result is [..., out], in x's dtype, as is what is multiplied.
        """
        ...

    def parts(
        self, products: InputProducts, params: AttentionParams, call: LayerCall, dtype: DTypeLike, *, encode: bool
    ) -> TokenParts:
        """Compute what new tokens contribute.

        What padding contributes does not matter, as long as it is finite.

        Args:
          products: of x.
          params: the layer's weights.
          call: of the layer.
          dtype: of x.
          encode: whether to encode the window rows, too.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewEntries:
    """Finished entries that are to be written to a pool, and where. Row e of request b is its entry first[b] + e."""

    entries: jax.Array  # f32 [B, E, head_dim], after norm and rope
    keys: jax.Array | None  # f32 [B, E, indexer_head_dim], after norm, rope and Hadamard transform; CSA only
    block_table: jax.Array  # int32 [requests, max_blocks], -1 = none; entries without a block are dropped
    slots: jax.Array  # int32 [B], -1 = no-op
    first: jax.Array  # int32 [B]
    count: jax.Array  # int32 [B] number of entries that are real, at most E


class CacheUpdate(Implementation, Protocol):
    """Storing new tokens in a layer's cache, in one call or step by step."""

    def store(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        """Write window rows and completed entries, and update the tails, except with ``keep_tails``.

        See ``update.store``.
        """
        ...

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        """Do what ``update.append_swa`` describes."""
        ...

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        """Do what ``update.flush_entries`` describes."""
        ...

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        """Do what ``update.rotate_csa`` describes."""
        ...

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        """Do what ``update.reset_hca`` describes."""
        ...


class IndexerScores(Implementation, Protocol):
    """The score of every entry for every query of a CSA layer."""

    def queries(
        self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | KeyRows:
        """Apply rope and Hadamard transform to products f32 [B, T, H, indexer_head_dim].

        The result is f32, or rounded in the keys' format.
        """
        ...

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        """Return scores f32 [B, T, max_entries]. Those from ``visible`` int32 [B, T] on are meaningless."""
        ...


class TopK(Implementation, Protocol):
    """Selection of the entries with the largest scores."""

    def pick(self, score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
        """Do what ``indexer.pick`` describes."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The inputs of attention: queries, and where to find their keys.

    The rows of a ``block`` are keys of all queries of their request, also of those at earlier positions. Beside them
    each query sees the window of the last token before them; ``window`` has no fresh rows, and there are no entries.
    """

    q: jax.Array  # f32 or f16 [B, T, H, head_dim], after norm and rope
    positions: jax.Array  # int32 [B, T], -1 = padding
    sinks: jax.Array  # [H]
    window: SlidingWindow
    entries: PooledLayer | None
    picks: jax.Array | None  # int32 [B, T, K], -1 = none; None means all visible entries
    visible: jax.Array | None  # int32 [B, T] number of entries that each query may see; None without entries
    block: KVRows | None = None  # [B, F, ...] of positions window.start .. window.start + F - 1


class DecodeAttention(Implementation, Protocol):
    """Attention over window and entries."""

    @property
    def forms(self) -> tuple[RowForm, ...]:
        """The forms in which ``attend`` can give its rows; "plain" is one of them."""
        ...

    @property
    def query_dtype(self) -> DTypeLike:
        """The dtype that ``queries`` gives."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Memory for the temporaries of one tile of queries, which limits how many tokens a tile holds."""
        ...

    def token_bytes(self, plan: CachePlan, kind: AttentionType) -> int:
        """Return the memory that the queries of one token take, with what attention makes of them."""
        ...

    def queries(
        self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan, needed: jax.Array | None
    ) -> jax.Array:
        """Apply norm and rope to products f32 [B, T, H, head_dim], and convert them to the dtype ``attend`` takes.

        ``needed`` is as for ``attend``.
        """
        ...

    def attend(
        self,
        inputs: AttentionInputs,
        freqs: np.ndarray,
        dtype: DTypeLike,
        needed: jax.Array | None = None,
        form: RowForm = "plain",
    ) -> Rows:
        """Compute attention and apply the inverse rope: dtype [B, T, H, head_dim], 0 on padding.

        ``needed`` bool [B, T] says which queries' results anyone reads, None for all; others may be anything. With
        another form than "plain", which is one of ``forms``: rows [B T, H head_dim] in that form, of values in bf16.
        """
        ...


class GatherRows(Implementation, Protocol):
    """Gathers of stored rows into dense ones."""

    def picked(self, layer: PooledLayer, picks: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Do what ``gather.gather_compressed`` describes."""
        ...

    def complete(self, layer: PooledLayer, num_entries: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Do what ``gather.gather_all_compressed`` describes."""
        ...


PROJECTIONS: Op[Projections] = declare("projections")
CACHE_UPDATE: Op[CacheUpdate] = declare("cache_update")
INDEXER_SCORES: Op[IndexerScores] = declare("indexer_scores")
TOP_K: Op[TopK] = declare("top_k")
DECODE_ATTENTION: Op[DecodeAttention] = declare("decode_attention")
GATHER_ROWS: Op[GatherRows] = declare("gather_rows")


def choose_backends(backend: Backend, plan: CachePlan, kind: AttentionType) -> OpBackends:
    """Choose a backend for each op that a layer of this kind uses. The others stay None."""
    chosen: Named = {op.name: op.choose(backend, plan, kind) for op in ops_of(kind)}
    return OpBackends(**chosen, invariant=plan.invariant or is_invariant(backend))


def choose_for_any_batch(backend: Backend, plan: CachePlan, kind: AttentionType) -> OpBackends:
    """Choose backends for a batch of symbolic size: XLA where none is named, as a kernel needs a size.

    Raises:
      ValueError: another backend is named, or the plan is invariant.
    """
    if plan.invariant:
        raise ValueError("x: a batch of symbolic size is not divided into tiles of one size, as invariant=True needs")
    if isinstance(backend, OpBackends):
        named: Named = {op: getattr(backend, op) or XLA for op in backends()}
        backend = OpBackends(**named)
    chosen = choose_backends(backend or XLA, plan, kind)
    for op in ops_of(kind):
        if not isinstance(op[name := getattr(chosen, op.name)], Anywhere):
            raise ValueError(f"x: a batch of symbolic size needs backend='xla', {op.name} would run {name!r}")
    return chosen


def ops_of(kind: AttentionType) -> tuple[Op, ...]:
    """Return the ops that a layer of this kind uses."""
    indexed: tuple[Op, ...] = (INDEXER_SCORES, TOP_K) if kind.is_indexed else ()
    return PROJECTIONS, CACHE_UPDATE, DECODE_ATTENTION, *indexed
