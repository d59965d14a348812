"""How new tokens change a layer's cache: append, flush, rotate and reset, separately and all in one step.

    append_swa     rounds the new tokens' rows and writes them to the window
    append_tail    writes the new tokens' streams to the tails
    flush_entries  rounds finished entries and writes them to the pool
    rotate_csa     at the end of a block: its b-stream becomes the previous block's
    reset_hca      at the end of a block: resets the running softmax
    store          does all of this from what the projections gave, in one launch if a kernel can

All but ``store`` are public. They take the layer's index in its stack (static or traced) and any batch: row b brings
``num_new[b]`` of T tokens to request ``slots[b]``, which already has ``start[b]`` tokens. A row is a no-op if its slot
is -1, its num_new is 0, or its num_new exceeds T. ``pieces`` has the same functions jitted, donating what they update.
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
from dsv4jax.indexing import Batch, fitting, put_newest, quotient, read_slots, remainder
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.compressor import finish_entries
from dsv4jax.layer.dense import hadamard
from dsv4jax.layer.ops import CACHE_UPDATE, CacheUpdate, NewEntries
from dsv4jax.plan import CachePlan
from dsv4jax.tails import CSATail, HCAOnlineTail, HCATail, Streams, Tail, emptied

# These functions do not know the kind of their layer. Any kind will do to choose an implementation, because moving and
# encoding rows is supported for all kinds if it is for the simplest.
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
    """Round key rows in the plan's format, and write the newest n_win of each request into its window.

    Args:
      state: the state of all layers of a kind.
      index: the layer's index in its stack, an int or int32 [].
      kv: f32 [B, T, head_dim], after norm and rope.
      slots, start, num_new: int32 [B]; the slot of each row, its stored tokens, and its new tokens.
      plan: the cache's plan.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      The updated state.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the backend is unknown, or cannot serve this plan.
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
    """Write the new tokens' streams into the tails, with the result of storing them one by one.

    Each full block among them is followed by its rotation or reset, except one that the last token completes. That one
    is left to ``rotate_csa`` and ``reset_hca``, so that its entry can still be pooled from the tail before.

    Args:
      state: the state of all layers of a kind.
      index: the layer's index in its stack, an int or int32 [].
      streams, indexer_streams: from ``compressor.project_streams``; the indexer's for CSA only, else None.
      slots, start, num_new: int32 [B]; the slot of each row, its stored tokens, and its new tokens.
      plan: the cache's plan.

    Returns:
      The updated state.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the layers are SWA, or ``indexer_streams`` is missing or not allowed.
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
    """Copy the current b-stream over the previous one where the newest token completed its block, in both tails.

    The current streams are not cleared, because each of their rows is overwritten before the next entry reads it.

    Args:
      state: the state of all CSA layers.
      index: the layer's index in its stack, an int or int32 [].
      slots: int32 [B], -1 = no-op.
      complete: bool [B], whether the block of each row is complete.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      The updated state.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the state is not that of CSA layers, or the backend is unknown.
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
    """Empty the tail of those requests of a layer whose block is complete.

    The online form needs this after every entry. The ring form does not, and the layer does not call it for that form:
    all rows of a block are overwritten before its entry reads them, and clearing 512 KiB would double the memory
    traffic of a flush.

    Args:
      state: the state of all HCA layers.
      index: the layer's index in its stack, an int or int32 [].
      slots: int32 [B], -1 = no-op.
      complete: bool [B], whether the block of each row is complete.
      plan: the cache's plan.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      The updated state.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the state is not that of HCA layers, or the backend is unknown.
    """
    del plan  # kept in the signature, but an empty tail follows from its own shapes
    check_batch(slots=slots)
    check_array("complete", complete, {"B": slots.shape[0]}, jnp.bool)
    if not isinstance(state.tail, HCATail | HCAOnlineTail):
        raise ValueError(f"reset_hca: expected the state of HCA layers, got a tail of {type(state.tail).__name__}")
    return CACHE_UPDATE.of(backend, None, _ANY_KIND).reset_hca(state, index, slots, complete)


def flush_entries(
    pool: PagedPool, index: jax.Array | int, new: NewEntries, *, plan: CachePlan, backend: Backend = None
) -> PagedPool:
    """Round finished entries, and of CSA layers their indexer keys, and write them into the pool.

    Args:
      pool: the entries of all layers of a kind.
      index: the layer's index in its stack, an int or int32 [].
      new: the entries, and where they go; with keys for CSA layers, and only for them.
      plan: the cache's plan.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      The updated pool.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: keys are missing or not allowed, or the backend is unknown or cannot serve this plan.
    """
    if (pool.indexer_keys is None) != (new.keys is None):
        raise ValueError("flush_entries: new.keys are for the pool of CSA layers, and only for it")
    check_batch(**{f"new.{name}": getattr(new, name) for name in ("slots", "first", "count")})
    axes: dict[str, int | None] = {"B": new.slots.shape[0], "E": None, "dim": plan.cfg.head_dim}
    check_array("new.entries", new.entries, axes, jnp.float32)
    if new.keys is not None:
        axes |= {"E": new.entries.shape[1], "dim": plan.cfg.indexer_head_dim}
        check_array("new.keys", new.keys, axes, jnp.float32)
    new = dataclasses.replace(new, count=fitting(new.count, new.entries.shape[1]))
    return CACHE_UPDATE.of(backend, plan, _ANY_KIND).flush_entries(pool, index, new, plan)


def store(call: LayerCall, rows: TokenRows, cache_update: CacheUpdate, *, keep_tails: bool = False) -> LayerStack:
    """Write the new tokens' window rows, complete the entries that they fill, and update the tails.

    Args:
      rows: what the call's tokens contribute. If ``rows.kv`` is None the window is unchanged; if ``rows.entry`` is None
        tails and pool are.
      cache_update: what writes them.
      keep_tails: write only window rows and entries, and leave the tails unchanged.
    """
    if rows.kv is None and rows.entry is None:
        return call.stack
    return cache_update.store(call, rows, keep_tails=keep_tails)


def append_to_all_layers(call: LayerCall, kv: jax.Array, cache_update: CacheUpdate) -> StateCache:
    """Do what ``append_swa`` does, in all layers of the call's kind in one write: rows f32 [layers, B, T, head_dim].

    The layers are written as a single one, which has the slots of each of them, one layer after the other. The call's
    slots must be those of requests, or -1, as ``granted_batch`` gives them.
    """
    state, size = call.stack.state, call.batch.slots.size
    layers, requests, _ = state.pos.shape
    rows = jax.tree.map(lambda each: jnp.tile(each, layers), call.batch)
    first = jnp.repeat(requests * jnp.arange(layers, dtype=jnp.int32), size)
    live = rows.slots >= 0  # asked for all three numbers, so that XLA computes them in one launch
    batch = Batch(
        slots=jnp.where(live, rows.slots + first, -1),
        start=jnp.where(live, rows.start, 0),
        num_new=jnp.where(live, rows.num_new, 0),
    )
    as_one = jax.tree.map(lambda leaf: leaf.reshape(1, layers * requests, *leaf.shape[2:]), state)
    as_one = cache_update.append_swa(as_one, 0, kv.reshape(-1, *kv.shape[2:]), batch, call.plan)
    return jax.tree.map(lambda leaf, stored: stored.reshape(leaf.shape), state, as_one)


# Jitted because a layer asks twice where ``exact_entries`` does: it is traced once.
@jax.jit
def completed_entries(call: LayerCall, normed: Normed, tail: Tail) -> ExactEntries:
    """The entries that a call's tokens complete, from a tail as it was before the call."""
    (streams, norm), phase, num_new = normed, call.phase, call.batch.num_new
    pooled = read_slots(tail, call.index, call.batch.slots).pool(streams, phase, num_new, call.ratio)
    rows = finish_entries(pooled, norm, call.first_entry, call.kind, call.plan.cfg)
    return ExactEntries(rows=rows, first=call.first_entry, count=quotient(phase + num_new, call.ratio))


def exact_entries(call: LayerCall, rows: TokenRows) -> ExactEntries | None:
    """``completed_entries`` of the layer; None where nothing is compressed. Without derivatives it is dead code."""
    tail = call.stack.state.tail
    return None if rows.entry is None or tail is None else completed_entries(call, rows.entry, tail)


class XLACacheUpdate(Anywhere):
    """The update in plain JAX: the reference for the kernels."""

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
        """Update tails and pool; with ``keep_tails`` only the pool."""
        state, pool, batch, index, plan = call.stack.state, call.stack.pool, call.batch, call.index, call.plan
        assert pool is not None
        assert state.tail is not None
        assert rows.entry is not None
        complete = self.completed(call, rows.entry, state.tail)
        entries, keys = storable(complete.rows, plan.row_spec), None
        if rows.key is not None:
            assert state.indexer_tail is not None
            keys = storable(hadamard(self.completed(call, rows.key, state.indexer_tail).rows), plan.key_spec)
        (entries, keys), state = lax.optimization_barrier(((entries, keys), state))  # reads come before writes
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
        full = (batch.num_new > 0) & (remainder(call.phase + batch.num_new, call.ratio) == 0)
        tail = self.appended(state.tail, index, rows.entry[0], batch, call.ratio)
        tail = tail.end_block(index, batch.slots, full)
        indexer_tail = state.indexer_tail
        if rows.key is not None and indexer_tail is not None:
            indexer_tail = indexer_tail.append(index, rows.key[0], batch, call.ratio)
            indexer_tail = indexer_tail.end_block(index, batch.slots, full)
        return LayerStack(state=dataclasses.replace(state, tail=tail, indexer_tail=indexer_tail), pool=pool)

    def completed(self, call: LayerCall, normed: Normed, tail: Tail) -> ExactEntries:
        """The entries that a call's tokens complete, as ``completed_entries`` gives them."""
        return completed_entries(call, normed, tail)

    def appended(self, tail: Tail, index: jax.Array | int, streams: Streams, batch: Batch, ratio: int) -> Tail:
        """A layer's tails after the new tokens, but for what ends a block."""
        return tail.append(index, streams, batch, ratio)

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        position = batch.start[:, None] + jnp.arange(kv.shape[1], dtype=jnp.int32)[None]
        rows = plan.rows.encode(kv, plan.cfg.rope_dim), position
        window, pos = put_newest((state.window, state.pos), index, batch, rows)
        return dataclasses.replace(state, window=window, pos=pos)

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        rows = plan.rows.encode(new.entries, plan.cfg.rope_dim)
        place = index, new.block_table, new.slots, new.first, new.count
        pool = dataclasses.replace(pool, entries=scatter_entries(pool.entries, *place, rows))
        if new.keys is None:
            return pool
        assert pool.indexer_keys is not None
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
