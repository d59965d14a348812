"""append, flush, rotate, reset: the functions that move data between tokens, state and pool.

    append_swa   rounded rows of the new tokens -> window
    append_tail  streams of the new tokens -> tails
    flush_*      finished entries -> rounded rows of the pool
    rotate_csa   a block is complete: its b-stream becomes the previous block's
    reset_hca    a block is complete: the running softmax starts again

All take one layer's index into the stack (static or traced) and any batch: row b brings ``num_new[b]`` of T tokens to
request ``slots[b]``, which holds ``start[b]`` already; slot -1 or num_new 0 is a no-op,
and so is a count above what there is. Each donates what it updates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.pool import PagedPool, scatter_entries
from dsv4jax.cache.state import (
    CSATail,
    HCAOnlineTail,
    HCATail,
    StateCache,
    empty_state,
    read_slots,
    unique_or_dropped,
)
from dsv4jax.checks import check_array, check_batch, donating, fitting
from dsv4jax.config import AttentionType
from dsv4jax.formats import KVRows
from dsv4jax.layer import kernels
from dsv4jax.layer.backend import Backend, choose
from dsv4jax.layer.compressor import Streams, pool_hca_online
from dsv4jax.plan import CachePlan


def _choose(backend: Backend, plan: CachePlan | None = None) -> str:
    """The backend of a piece; one that encodes no row serves any plan."""
    return choose("cache_update", backend, None if plan is None else kernels.unsupported_rows(plan))


def _put(
    leaf: jax.Array, index: jax.Array | int, slots: jax.Array, valid: jax.Array, value: jax.Array, *row: jax.Array
) -> jax.Array:
    """leaf[index, slots, *row] = value where valid."""
    target = unique_or_dropped(slots, valid, leaf.shape[1])
    return leaf.at[index, target, *row].set(value.astype(leaf.dtype), mode="drop", unique_indices=True)


def _newest(num_tokens: int, ring: int, start: jax.Array, num_new: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens that survive in a ring, (token, position, valid) [B, W]: of several writers of a row, the last."""
    width = min(num_tokens, ring)
    token = num_new[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.maximum(token, 0), start[:, None] + token, token >= 0


def _put_newest(
    leaf: jax.Array, index: jax.Array | int, slots: jax.Array, start: jax.Array, num_new: jax.Array, rows: jax.Array
) -> jax.Array:
    """Write tokens' rows [B, T, ...] into a ring leaf [layers, requests, ring, ...]."""
    ring = leaf.shape[2]
    token, position, valid = _newest(rows.shape[1], ring, start, num_new)
    batch = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(slots[:, None], token.shape)
    return _put(leaf, index, slot, valid & (slot >= 0), rows[batch, token], position % ring)


def store_window(
    state: StateCache, index: jax.Array | int, rows: KVRows, slots: jax.Array, start: jax.Array, num_new: jax.Array
) -> StateCache:
    """Write encoded rows [B, T, ...] into the window, with their positions."""
    num_tokens = rows.nope.shape[1]
    position = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    window, pos = jax.tree.map(
        lambda leaf, row: _put_newest(leaf, index, slots, start, num_new, row),
        (state.window, state.pos),
        (rows, position),
    )
    return dataclasses.replace(state, window=window, pos=pos)


@donating("state")
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
    num_new = fitting(num_new, kv.shape[1])
    if (chosen := _choose(backend, plan)) != "xla":
        return kernels.append_swa(state, index, kv, slots, start, num_new, plan, chosen)
    return store_window(state, index, plan.rows.encode(kv, plan.cfg.rope_dim), slots, start, num_new)


def _append_csa(
    tail: CSATail, index: jax.Array | int, streams: Streams, slots: jax.Array, start: jax.Array, num_new: jax.Array
) -> CSATail:
    num_tokens, ratio = streams.ka.shape[1], tail.ka.shape[2]
    tokens = {"ka": streams.ka, "za": streams.za, "kb_next": streams.kb, "zb_next": streams.zb}
    previous: dict[str, Any] = {}
    if num_tokens > 1:
        # The last token may lie in a later block than the first one: the block before the last token's is then the
        # previous one. Its rows are new tokens, or still those of kb_next where it is the block the request was in.
        phase = start % ratio
        block = (phase + num_new - 1) // ratio - 1
        token = (block * ratio - phase)[:, None] + jnp.arange(ratio, dtype=jnp.int32)[None]
        moved = (slots >= 0) & (num_new > 0) & (block >= 0)
        for name, source in (("kb", "kb_next"), ("zb", "zb_next")):
            old = read_slots(getattr(tail, source), index, slots).astype(jnp.float32)
            new = jnp.take_along_axis(tokens[source], jnp.clip(token, 0, num_tokens - 1)[..., None], axis=1)
            previous[name] = jnp.where((token >= 0)[..., None], new, old)
        previous, tail = lax.optimization_barrier((previous, tail))  # every read before the first write
        previous = {name: _put(getattr(tail, name), index, slots, moved, rows) for name, rows in previous.items()}
    current = {
        name: _put_newest(getattr(tail, name), index, slots, start, num_new, rows) for name, rows in tokens.items()
    }
    return dataclasses.replace(tail, **current, **previous)


@donating("state")
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
    num_new = fitting(num_new, streams.ka.shape[1])
    if isinstance(state.tail, CSATail):
        assert state.indexer_tail is not None
        assert indexer_streams is not None
        return dataclasses.replace(
            state,
            tail=_append_csa(state.tail, index, streams, slots, start, num_new),
            indexer_tail=_append_csa(state.indexer_tail, index, indexer_streams, slots, start, num_new),
        )
    if isinstance(state.tail, HCATail):
        tail: Any = jax.tree.map(
            lambda leaf, rows: _put_newest(leaf, index, slots, start, num_new, rows),
            state.tail,
            HCATail(ka=streams.ka, za=streams.za),
        )
        return dataclasses.replace(state, tail=tail)
    if not isinstance(state.tail, HCAOnlineTail):
        raise ValueError("append_tail: SWA layers have no tail")
    ratio = plan.cfg.hca_compression_ratio
    old = read_slots(state.tail, index, slots)
    _, new = pool_hca_online(old, streams, start % ratio, num_new, ratio)
    new, tail = lax.optimization_barrier((new, state.tail))
    valid = (slots >= 0) & (num_new > 0)
    return dataclasses.replace(
        state, tail=jax.tree.map(lambda leaf, value: _put(leaf, index, slots, valid, value), tail, new)
    )


@donating("state")
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

    def rotate(tail: CSATail) -> CSATail:
        rows = read_slots({"kb": tail.kb_next, "zb": tail.zb_next}, index, slots)
        moved = complete & (slots >= 0)
        return dataclasses.replace(
            tail, **{name: _put(getattr(tail, name), index, slots, moved, value) for name, value in rows.items()}
        )

    if not isinstance(state.tail, CSATail) or state.indexer_tail is None:
        raise ValueError(f"rotate_csa: expected the state of CSA layers, got a tail of {type(state.tail).__name__}")
    if (chosen := _choose(backend)) != "xla":
        return kernels.rotate_csa(state, index, slots, complete, chosen)
    return dataclasses.replace(state, tail=rotate(state.tail), indexer_tail=rotate(state.indexer_tail))


@donating("state")
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
    check_batch(slots=slots)
    check_array("complete", complete, {"B": slots.shape[0]}, jnp.bool)
    if not isinstance(state.tail, HCATail | HCAOnlineTail):
        raise ValueError(f"reset_hca: expected the state of HCA layers, got a tail of {type(state.tail).__name__}")
    if (chosen := _choose(backend)) != "xla":
        return kernels.reset_hca(state, index, slots, complete, chosen)
    empty = empty_state(plan, AttentionType.HCA, slots.shape).tail
    tail = jax.tree.map(lambda leaf, value: _put(leaf, index, slots, complete & (slots >= 0), value), state.tail, empty)
    return dataclasses.replace(state, tail=tail)


def _check_entries(entries: jax.Array, slots: jax.Array, first: jax.Array, count: jax.Array, plan: CachePlan) -> None:
    check_batch(slots=slots, first=first, count=count)
    check_array("entries", entries, {"B": slots.shape[0], "E": None, "dim": plan.cfg.head_dim}, jnp.float32)


@donating("pool")
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
    _check_entries(entries, slots, first, count, plan)
    count = fitting(count, entries.shape[1])
    if (chosen := _choose(backend, plan)) != "xla":
        return kernels.flush_entries(pool, index, entries, None, block_table, slots, first, count, plan, chosen)
    rows = plan.rows.encode(entries, plan.cfg.rope_dim)
    return dataclasses.replace(
        pool, entries=scatter_entries(pool.entries, index, block_table, slots, first, count, rows)
    )


@donating("pool")
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
    _check_entries(entries, slots, first, count, plan)
    axes: dict[str, int | None] = {"B": slots.shape[0], "E": entries.shape[1], "dim": plan.cfg.indexer_head_dim}
    check_array("indexer_entries", indexer_entries, axes, jnp.float32)
    if pool.indexer_keys is None:
        raise ValueError("flush_csa: expected the pool of CSA layers, this one has no indexer keys")
    count = fitting(count, entries.shape[1])
    if (chosen := _choose(backend, plan)) != "xla":
        return kernels.flush_entries(
            pool, index, entries, indexer_entries, block_table, slots, first, count, plan, chosen
        )
    pool = flush_hca.__wrapped__(pool, index, entries, block_table, slots, first, count, plan=plan, backend="xla")
    keys = scatter_entries(
        pool.indexer_keys, index, block_table, slots, first, count, plan.keys.encode(indexer_entries)
    )
    return dataclasses.replace(pool, indexer_keys=keys)
