"""What new tokens do to a layer's cache: append, flush, rotate, reset; and all of it in one step.

    append_swa   rounded rows of the new tokens -> window
    append_tail  streams of the new tokens -> tails
    flush_*      finished entries -> rounded rows of the pool
    rotate_csa   a block is complete: its b-stream becomes the previous block's
    reset_hca    a block is complete: the running softmax starts again
    store        window, entries, tails and pool, from what the projections gave: one launch where a kernel serves

The first five are public. They take one layer's index into the stack (static or traced) and any batch: row b brings
``num_new[b]`` of T tokens to request ``slots[b]``, which holds ``start[b]`` already; slot -1 or num_new 0 is a no-op,
and so is a count above what there is. ``pieces`` has them jitted, donating what they update.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.pool import ExactEntries, PagedPool, scatter_entries
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import StateCache
from dsv4jax.checks import check_array, check_batch
from dsv4jax.derivatives import storable
from dsv4jax.indexing import Batch, fitting, put_newest, read_slots
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.compressor import finish_entries
from dsv4jax.layer.ops import CACHE_UPDATE, NewEntries
from dsv4jax.linear import hadamard
from dsv4jax.plan import CachePlan
from dsv4jax.tails import CSATail, HCAOnlineTail, HCATail, Streams, Tail, emptied

# The pieces know no kind of layer: what they move or encode is served for all kinds where it is for the simplest.
_ANY_KIND = AttentionType.SWA


def append_swa(
    state: StateCache,
    index: jax.Array | int,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    plan: CachePlan,
    backend: Backend = None,
) -> StateCache:
    """Round key rows in the plan's format and write the newest n_win of each request into its window.

    Args:
      kv: f32 [B, T, head_dim], normed and roped.
      slots, start, num_new: int32 [B]; request, tokens it holds, tokens it gets.
    """
    check_batch(slots=slots, start=start, num_new=num_new)
    check_array("kv", kv, {"B": slots.shape[0], "T": None, "head_dim": plan.cfg.head_dim}, jnp.float32)
    batch = Batch(slots=slots, start=start, num_new=num_new).fitting(kv.shape[1])
    return CACHE_UPDATE.of(backend, plan, _ANY_KIND).append_swa(state, index, kv, batch, plan)


def append_tail(
    state: StateCache,
    index: jax.Array | int,
    streams: Streams,
    indexer_streams: Streams | None,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    *,
    plan: CachePlan,
) -> StateCache:
    """Write the new tokens' streams into the tails, as if one by one with a rotation or reset after each full block.

    Where the last token completes a block, that block's own rotation or reset is left to ``rotate_csa`` and
    ``reset_hca``, so that its entry can still be read from the tail in between.

    Args:
      streams, indexer_streams: from ``compressor.project_streams``; the indexer's for CSA only.
      slots, start, num_new: int32 [B].
    """
    check_batch(slots=slots, start=start, num_new=num_new)
    if (state.indexer_tail is None) != (indexer_streams is None):
        raise ValueError("append_tail: indexer_streams is for CSA layers, and only for them")
    if state.tail is None:
        raise ValueError("append_tail: SWA layers have no tail")
    batch = Batch(slots=slots, start=start, num_new=num_new).fitting(streams.ka.shape[1])
    cfg, indexer_tail = plan.cfg, state.indexer_tail
    ratio = cfg.hca_compression_ratio if indexer_streams is None else cfg.csa_compression_ratio
    if indexer_tail is not None and indexer_streams is not None:
        indexer_tail = indexer_tail.append(index, indexer_streams, batch, ratio)
    return dataclasses.replace(state, tail=state.tail.append(index, streams, batch, ratio), indexer_tail=indexer_tail)


def rotate_csa(
    state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array, *, backend: Backend = None
) -> StateCache:
    """previous b-stream <- current b-stream, where the newest token completed its block; main and indexer tails alike.

    The current streams are not cleared: each of their rows is overwritten before the next entry reads it.

    Args:
      slots: int32 [B].
      complete: bool [B].
    """
    check_batch(slots=slots)
    check_array("complete", complete, {"B": slots.shape[0]}, jnp.bool)
    if not isinstance(state.tail, CSATail) or state.indexer_tail is None:
        raise ValueError(f"rotate_csa: expected the state of CSA layers, got a tail of {type(state.tail).__name__}")
    return CACHE_UPDATE.of(backend, None, _ANY_KIND).rotate_csa(state, index, slots, complete)


def reset_hca(
    state: StateCache,
    index: jax.Array | int,
    slots: jax.Array,
    complete: jax.Array,
    *,
    plan: CachePlan,
    backend: Backend = None,
) -> StateCache:
    """Empty the tail of a layer's requests whose block is complete.

    The online form needs it after every entry. The ring form does not, and the layer does not call it there: all of a
    block's rows are overwritten before its entry reads them, and clearing 512 KiB would double a flush's traffic.

    Args:
      slots: int32 [B].
      complete: bool [B].
    """
    del plan  # of the signature: an empty tail follows from its own shapes
    check_batch(slots=slots)
    check_array("complete", complete, {"B": slots.shape[0]}, jnp.bool)
    if not isinstance(state.tail, HCATail | HCAOnlineTail):
        raise ValueError(f"reset_hca: expected the state of HCA layers, got a tail of {type(state.tail).__name__}")
    return CACHE_UPDATE.of(backend, None, _ANY_KIND).reset_hca(state, index, slots, complete)


def flush_hca(
    pool: PagedPool,
    index: jax.Array | int,
    entries: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    *,
    plan: CachePlan,
    backend: Backend = None,
) -> PagedPool:
    """Round finished entries and write them into the pool.

    Args:
      entries: f32 [B, E, head_dim], normed and roped; row e of request b is its entry first[b] + e.
      block_table: int32 [requests, max_blocks].
      slots, first, count: int32 [B]; count[b] <= E entries are real. An entry without a block is dropped.
    """
    new = _new_entries(entries, None, block_table, slots, first, count, plan)
    return CACHE_UPDATE.of(backend, plan, _ANY_KIND).flush_entries(pool, index, new, plan)


def flush_csa(
    pool: PagedPool,
    index: jax.Array | int,
    entries: jax.Array,
    indexer_entries: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    *,
    plan: CachePlan,
    backend: Backend = None,
) -> PagedPool:
    """As ``flush_hca``, and the same for indexer_entries f32 [B, E, indexer_head_dim]: normed, roped and rotated."""
    new = _new_entries(entries, indexer_entries, block_table, slots, first, count, plan)
    axes: dict[str, int | None] = {"B": slots.shape[0], "E": entries.shape[1], "dim": plan.cfg.indexer_head_dim}
    check_array("indexer_entries", indexer_entries, axes, jnp.float32)
    if pool.indexer_keys is None:
        raise ValueError("flush_csa: expected the pool of CSA layers, this one has no indexer keys")
    return CACHE_UPDATE.of(backend, plan, _ANY_KIND).flush_entries(pool, index, new, plan)


def _new_entries(
    entries: jax.Array,
    keys: jax.Array | None,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    plan: CachePlan,
) -> NewEntries:
    """The arguments of a flush, checked but for the keys."""
    check_batch(slots=slots, first=first, count=count)
    check_array("entries", entries, {"B": slots.shape[0], "E": None, "dim": plan.cfg.head_dim}, jnp.float32)
    count = fitting(count, entries.shape[1])
    return NewEntries(entries=entries, keys=keys, block_table=block_table, slots=slots, first=first, count=count)


def store(call: LayerCall, rows: TokenRows, backend: str, *, keep_tails: bool = False) -> LayerStack:
    """Write new tokens' window rows, complete the entries that they fill, and bring the tails up to date.

    Args:
      rows: of the call's tokens. What is None leaves the window, or tails and pool, as they are.
      backend: from ``CACHE_UPDATE.choose``.
      keep_tails: write window rows and entries alone, and leave the tails as they are.
    """
    if rows.kv is None and rows.entry is None:
        return call.stack
    return CACHE_UPDATE[backend].store(call, rows, keep_tails=keep_tails)


def completed_entries(call: LayerCall, normed: Normed, tail: Tail) -> ExactEntries:
    """The entries that a call's tokens complete, from a tail as it was before the call."""
    (streams, norm), phase, num_new = normed, call.phase, call.batch.num_new
    pooled = read_slots(tail, call.index, call.batch.slots).pool(streams, phase, num_new, call.ratio)
    rows = finish_entries(pooled, norm, call.first_entry, call.kind, call.plan.cfg)
    return ExactEntries(rows=rows, first=call.first_entry, count=(phase + num_new) // call.ratio)


def exact_entries(call: LayerCall, rows: TokenRows) -> ExactEntries | None:
    """``completed_entries`` of the layer; None where nothing is compressed. Without derivatives it is dead code."""
    tail = call.stack.state.tail
    return None if rows.entry is None or tail is None else completed_entries(call, rows.entry, tail)


class XLACacheUpdate(Anywhere):
    """The update in plain JAX: the reference of the kernels."""

    def store(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        stack = call.stack
        if rows.entry is not None:
            stack = self._compress(call, rows, keep_tails=keep_tails)
        if rows.kv is not None:
            kv = storable(rows.kv, call.plan.row_spec)
            state = self.append_swa(stack.state, call.index, kv, call.batch, call.plan)
            stack = LayerStack(state=state, pool=stack.pool)
        return stack

    def _compress(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        """Tails and pool; with ``keep_tails`` the pool alone."""
        state, pool, batch, index, plan = call.stack.state, call.stack.pool, call.batch, call.index, call.plan
        assert pool is not None
        assert state.tail is not None
        assert rows.entry is not None
        complete = completed_entries(call, rows.entry, state.tail)
        entries, keys = storable(complete.rows, plan.row_spec), None
        if rows.key is not None:
            assert state.indexer_tail is not None
            keys = storable(hadamard(completed_entries(call, rows.key, state.indexer_tail).rows), plan.key_spec)
        (entries, keys), state = lax.optimization_barrier(((entries, keys), state))  # tails are read, then written
        new = NewEntries(
            entries=entries,
            keys=keys,
            block_table=call.block_table,
            slots=batch.slots,
            first=complete.first,
            count=complete.count,
        )
        pool = self.flush_entries(pool, index, new, plan)
        if keep_tails:
            return LayerStack(state=state, pool=pool)
        full = (batch.num_new > 0) & ((call.phase + batch.num_new) % call.ratio == 0)
        tail = state.tail.append(index, rows.entry[0], batch, call.ratio).end_block(index, batch.slots, full)
        indexer_tail = state.indexer_tail
        if rows.key is not None and indexer_tail is not None:
            indexer_tail = indexer_tail.append(index, rows.key[0], batch, call.ratio)
            indexer_tail = indexer_tail.end_block(index, batch.slots, full)
        return LayerStack(state=dataclasses.replace(state, tail=tail, indexer_tail=indexer_tail), pool=pool)

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        position = batch.start[:, None] + jnp.arange(kv.shape[1], dtype=jnp.int32)[None]
        window, pos = jax.tree.map(
            lambda leaf, row: put_newest(leaf, index, batch, row),
            (state.window, state.pos),
            (plan.rows.encode(kv, plan.cfg.rope_dim), position),
        )
        return dataclasses.replace(state, window=window, pos=pos)

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        rows = plan.rows.encode(new.entries, plan.cfg.rope_dim)
        place = index, new.block_table, new.slots, new.first, new.count
        pool = dataclasses.replace(pool, entries=scatter_entries(pool.entries, *place, rows))
        if new.keys is None:
            return pool
        return dataclasses.replace(
            pool, indexer_keys=scatter_entries(pool.indexer_keys, *place, plan.keys.encode(new.keys))
        )

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        assert isinstance(state.tail, CSATail)
        assert state.indexer_tail is not None
        tail, indexer_tail = (one.end_block(index, slots, complete) for one in (state.tail, state.indexer_tail))
        return dataclasses.replace(state, tail=tail, indexer_tail=indexer_tail)

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        assert state.tail is not None
        return dataclasses.replace(state, tail=emptied(state.tail, index, slots, complete))


CACHE_UPDATE.register(XLA, XLACacheUpdate())
