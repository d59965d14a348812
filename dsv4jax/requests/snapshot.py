"""Requests as values: taken out of one cache, kept or sent elsewhere, and inserted into another.

A snapshot contains what a request's next token can see, but not which slots and blocks held it. It can therefore be
inserted into a cache of another capacity, or in another process. Extract and insert requests between forward passes,
not between ``prepare_forward`` and ``advance``, when a request is only partly updated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.create import abstract_cache
from dsv4jax.cache.shards import DATA, OF_ROWS, check_rows, is_spread, on_shards
from dsv4jax.cache.stack import LayerStack, Stacks
from dsv4jax.cache.tables import Tables, admit_slots, advance_lengths, blocks_for, grow
from dsv4jax.checks import check_batch, check_concrete, check_one_shard, check_type
from dsv4jax.config import DSV4Config
from dsv4jax.indexing import put_in_all_layers, unique_or_dropped
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import MAX_CONTEXT, CachePlan, plan_cache

# The fields of a plan that determine the meaning of a request's bytes. The others say how many requests fit.
LAYOUT = ("cfg", "kv_format", "indexer_format", "tail_dtype", "hca_tail")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Stacks):
    """n requests outside of any cache. The stack of a kind that the model does not have is None.

    Leaves of ``state`` are [layers, n, ...], as in a cache. Leaves of ``pool`` are [layers, n, blocks,
    entries_per_block, ...], zero past a request's complete entries, where ``blocks`` is the number that the longest
    request needs.
    """

    seq_lens: jax.Array  # int32 [n] tokens of each request
    cfg: DSV4Config = dataclasses.field(metadata={"static": True})
    kv_format: str = dataclasses.field(metadata={"static": True})
    indexer_format: str = dataclasses.field(metadata={"static": True})
    tail_dtype: np.dtype = dataclasses.field(metadata={"static": True})
    hca_tail: str = dataclasses.field(metadata={"static": True})

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def blocks(self) -> int:
        """Number of blocks stored for each request."""
        entries = jax.tree.leaves([self.stack(kind).pool for kind in self.kinds])
        return entries[0].shape[2] if entries else 0


def extract(cache: KVCache, slots: Sequence[int] | np.ndarray | jax.Array) -> Snapshot:
    """Copy requests out of a cache, which is not changed. Runs on the host, because lengths determine shapes.

    Only stored tokens are copied, not grants beyond them. A block that several requests share is copied for each of
    them. One program is compiled for each combination of numbers of requests and blocks.

    Args:
      slots: int [n], admitted slots.

    Raises:
      ValueError: a slot is out of range or holds no request (this includes -1, because a snapshot has no padding rows),
        the cache has several shards, or the call is under jit.
    """
    check_cache("extract", cache)
    check_one_shard(cache.tables.num_free, "extract", on_host=True)
    check_concrete("extract", cache, "lengths decide shapes, so call it on a cache that has come back")
    try:
        rows = np.asarray(slots)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"extract: slots must be integers [n] with n >= 1, got {slots!r}") from error
    if rows.ndim != 1 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"extract: slots must be integers [n] with n >= 1, got {rows.dtype.name}{list(rows.shape)}")
    admitted, seq_lens = (np.asarray(table) for table in (cache.tables.admitted, cache.tables.seq_lens))
    for slot in rows.tolist():
        if not 0 <= slot < admitted.size:
            raise ValueError(f"extract: slot {slot} is out of range, the cache has slots 0 to {admitted.size - 1}")
        if not admitted[slot]:
            raise ValueError(f"extract: slot {slot} holds no request; admitted are {np.flatnonzero(admitted).tolist()}")
    blocks = int(blocks_for(cache.plan, int(seq_lens[rows].max())))
    return _gather(cache, jnp.asarray(rows, jnp.int32), blocks=blocks)


@functools.partial(jax.jit, static_argnames="blocks")
def _gather(cache: KVCache, slots: jax.Array, *, blocks: int) -> Snapshot:
    """Copy the requests of slots int32 [n], which are admitted and need at most ``blocks`` blocks each."""
    plan, lengths = cache.plan, cache.seq_lens[slots]
    table = cache.tables.block_table[slots, :blocks]

    def requests_of(kind: AttentionType) -> LayerStack | None:
        if not plan.layers(kind):
            return None
        stack = cache.stack(kind)
        state = jax.tree.map(lambda leaf: leaf[:, slots], stack.state)
        if stack.pool is None:
            return LayerStack(state=state, pool=None)
        per_block = plan.entries_per_block(kind)
        entry = jnp.arange(blocks * per_block, dtype=jnp.int32).reshape(blocks, per_block)
        complete = entry[None] < (lengths // plan.cfg.ratio(kind))[:, None, None]

        # Rows past the last complete entry may still hold data of the block's former request.
        def rows(leaf: jax.Array) -> jax.Array:
            mask = complete.reshape(1, *complete.shape, *(1,) * (leaf.ndim - 3))
            return jnp.where(mask, leaf.at[:, table].get(mode="clip"), jnp.zeros((), leaf.dtype))

        return LayerStack(state=state, pool=jax.tree.map(rows, stack.pool))

    return Snapshot(
        seq_lens=lengths,
        **{kind.value: requests_of(kind) for kind in AttentionType},
        **{name: getattr(plan, name) for name in LAYOUT},
    )


def abstract_snapshot(plan: CachePlan, num_requests: int, blocks: int) -> Snapshot:
    """Return the shapes and dtypes of a snapshot. Only the ``LAYOUT`` fields of the plan matter."""
    context = min(max(1, blocks * plan.cfg.block_tokens), MAX_CONTEXT)
    layout = {name: getattr(plan, name) for name in LAYOUT}
    holder = plan_cache(max_requests=1, max_context=context, num_blocks=1, **layout)
    slots = jax.ShapeDtypeStruct((num_requests,), jnp.int32)
    return jax.eval_shape(functools.partial(_gather, blocks=blocks), abstract_cache(holder), slots)


@jax.jit
def insert(cache: KVCache, snapshot: Snapshot) -> tuple[KVCache, jax.Array, jax.Array]:
    """Admit the requests of a snapshot with blocks of their own. They continue where they were when extracted.

    This is a pure function that donates nothing; the caller's jit decides. Other requests are not changed.

    Args:
      cache: any capacity, with the configuration, formats and tails of the snapshot.
      snapshot: on the cache's device; ``jax.device_put`` moves it there. For a cache with a ``mesh``, on the host
        (``jax.device_get``), and of as many requests for each shard; a shard none of whose requests is inserted is
        given lengths of -1, and its ``ok`` is False.

    Returns:
      (cache, slots int32 [n], ok bool []). If slots or blocks run out, or a request is longer than the plan's
      ``max_context``, then ``ok`` is False, all slots are -1 and the cache is unchanged.

    Raises:
      ValueError: configuration, formats or tails differ, and the message names each differing field; or the cache has
        several shards and the call is outside ``jax.shard_map``.
      AssertionError: (chex) a leaf of the snapshot has another shape or dtype.
    """
    check_cache("insert", cache)
    check_type("snapshot", snapshot, Snapshot)
    plan, lengths = cache.plan, snapshot.seq_lens
    if found := differing_fields(snapshot, plan, LAYOUT):
        raise ValueError("insert: snapshot and cache differ in " + "; ".join(found))
    if is_spread(cache):
        stacks = {kind.value: P(None, DATA) for kind in snapshot.kinds}
        specs: Any = dataclasses.replace(snapshot, seq_lens=OF_ROWS, **stacks)
        assert cache.mesh is not None
        check_rows(snapshot.num_requests, cache.mesh)
        return on_shards(insert, cache, (snapshot,), 2, (specs,))
    check_one_shard(cache.tables.num_free, "insert")
    check_batch(seq_lens=lengths)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        snapshot, abstract_snapshot(plan, snapshot.num_requests, snapshot.blocks)
    )
    tables, slots, ok = _take_room(cache.tables, lengths, snapshot.blocks, plan)
    slot = unique_or_dropped(slots, ok[None], tables.admitted.shape[0])
    column = jnp.arange(snapshot.blocks, dtype=jnp.int32)[None]
    block = tables.block_table.at[slots[:, None], column].get(mode="fill", fill_value=-1)
    block = unique_or_dropped(block, (block >= 0) & ok, tables.block_refs.shape[0])

    def with_requests(kind: AttentionType, stack: LayerStack) -> LayerStack:
        rows = snapshot.stack(kind)
        return LayerStack(
            state=put_in_all_layers(stack.state, slot, rows.state), pool=put_in_all_layers(stack.pool, block, rows.pool)
        )

    return dataclasses.replace(cache.map_stacks(with_requests), tables=tables), slots, ok


def _take_room(tables: Tables, lengths: jax.Array, blocks: int, plan: CachePlan) -> tuple[Tables, jax.Array, jax.Array]:
    """Allocate slots and blocks for requests of lengths int32 [n], or none at all.

    Returns (tables, slots int32 [n], ok).
    """
    taken, slots, ok = admit_slots(tables, lengths.shape[0])
    taken, granted = grow(taken, slots, lengths, plan)
    # A snapshot made by hand may claim more tokens than it has entries for.
    ok &= granted & jnp.all((lengths >= 0) & (blocks_for(plan, lengths) <= blocks))
    taken = advance_lengths(taken, slots, lengths)
    tables = jax.tree.map(lambda new, old: jnp.where(ok, new, old), taken, tables)
    return tables, jnp.where(ok, slots, -1), ok


def differing_fields(found: object, wanted: object, names: Sequence[str]) -> list[str]:
    """Describe each field that differs between two plans or snapshots.

    Fields of a configuration are listed individually.
    """
    differing = []
    for name in names:
        a, b = getattr(found, name), getattr(wanted, name)
        if dataclasses.is_dataclass(a):
            inner = [field.name for field in dataclasses.fields(a)]
            differing += [f"{name}.{phrase}" for phrase in differing_fields(a, b, inner)]
        elif a != b:
            differing.append(f"{name}: {a} against {b}")
    return differing
