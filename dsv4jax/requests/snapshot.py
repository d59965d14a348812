"""Requests as values: taken out of one cache, kept or sent elsewhere, put into another.

A snapshot holds what a request's next token can see, and nothing of where it lay: caches of other capacity take it, and
so does another process. Between a pass's ``prepare_forward`` and ``advance`` a request is in two states at once; take
and put requests between passes.
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

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.create import abstract_cache
from dsv4jax.cache.stack import LayerStack, Stacks
from dsv4jax.cache.tables import Tables, admit_slots, advance_lengths, blocks_for, grow
from dsv4jax.checks import check_batch, check_concrete, check_one_shard
from dsv4jax.config import DSV4Config
from dsv4jax.indexing import put_in_all_layers, unique_or_dropped
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import MAX_CONTEXT, CachePlan, plan_cache

# What decides the meaning of a request's bytes. The other fields of a plan say how many requests fit.
LAYOUT = ("cfg", "kv_format", "indexer_format", "tail_dtype", "hca_tail")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Stacks):
    """n requests apart from any cache. A kind that the model lacks is None.

    ``state`` leaves are [layers, n, ...], as in a cache; ``pool`` leaves [layers, n, blocks, entries_per_block, ...],
    zero past a request's complete entries. ``blocks`` is what the longest of the requests needs.
    """

    seq_lens: jax.Array  # int32 [n] tokens of each request
    cfg: DSV4Config = dataclasses.field(metadata={"static": True})
    kv_format: str = dataclasses.field(metadata={"static": True})
    indexer_format: str = dataclasses.field(metadata={"static": True})
    tail_dtype: np.dtype[Any] = dataclasses.field(metadata={"static": True})
    hca_tail: str = dataclasses.field(metadata={"static": True})

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks kept of each request."""
        entries = jax.tree.leaves([self.stack(kind).pool for kind in self.kinds])
        return entries[0].shape[2] if entries else 0


def extract(cache: KVCache, slots: Sequence[int] | np.ndarray | jax.Array) -> Snapshot:
    """Copy requests out of a cache, which stays as it is. On the host: lengths decide shapes.

    Tokens stored are taken, grants beyond them are not. A block that several requests share is copied for each of them.
    One program is compiled per number of requests and of blocks.

    Args:
      slots: int [n], admitted.

    Raises:
      ValueError: a slot is out of range or holds no request, -1 too, because a snapshot has no padding rows; or the
        cache has several shards; or it is called under jit.
    """
    check_one_shard(cache.tables.num_free, "extract", on_host=True)
    check_concrete("extract", cache, "lengths decide shapes, so call it on a cache that has come back")
    rows = np.asarray(slots)
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
    """slots int32 [n], admitted and of at most ``blocks`` blocks each."""
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

        # What lies past the last complete entry may be a former owner's.
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
    """Shapes and dtypes of a snapshot; of the plan only its layout counts."""
    context = min(max(1, blocks * plan.cfg.block_tokens), MAX_CONTEXT)
    layout = {name: getattr(plan, name) for name in LAYOUT}
    holder = plan_cache(max_requests=1, max_context=context, num_blocks=1, **layout)
    slots = jax.ShapeDtypeStruct((num_requests,), jnp.int32)
    return jax.eval_shape(functools.partial(_gather, blocks=blocks), abstract_cache(holder), slots)


@jax.jit
def insert(cache: KVCache, snapshot: Snapshot) -> tuple[KVCache, jax.Array, jax.Array]:
    """Admit the requests of a snapshot, with blocks of their own: they go on where they were taken out.

    Pure, and not donating: the caller's jit decides. No byte of another request is touched.

    Args:
      cache: of the snapshot's configuration, formats and tails, and of any capacity.
      snapshot: on the cache's device; ``jax.device_put`` brings it there.

    Returns:
      (cache, slots int32 [n], ok bool []). Where slots or blocks run out, or a request is longer than the plan's
      ``max_context``, ``ok`` is False, all slots are -1 and the cache is unchanged.

    Raises:
      ValueError: configuration, formats or tails differ, and the message names each field that does; or the cache has
        several shards. In ``jax.shard_map`` each has one.
      AssertionError: (chex) a leaf of the snapshot has another shape or dtype.
    """
    plan, lengths = cache.plan, snapshot.seq_lens
    if found := differing_fields(snapshot, plan, LAYOUT):
        raise ValueError("insert: snapshot and cache differ in " + "; ".join(found))
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
    """Slots and blocks for requests of lengths [n], all or nothing. Returns (tables, slots int32 [n], ok bool [])."""
    taken, slots, ok = admit_slots(tables, lengths.shape[0])
    taken, granted = grow(taken, slots, lengths, plan)
    # A snapshot put together by hand may claim more tokens than it holds entries of.
    ok &= granted & jnp.all((lengths >= 0) & (blocks_for(plan, lengths) <= blocks))
    taken = advance_lengths(taken, slots, lengths)
    tables = jax.tree.map(lambda new, old: jnp.where(ok, new, old), taken, tables)
    return tables, jnp.where(ok, slots, -1), ok


def differing_fields(found: Any, wanted: Any, names: Sequence[str]) -> list[str]:
    """One phrase per field that differs between two plans or snapshots; a configuration's fields are named singly."""
    differing = []
    for name in names:
        a, b = getattr(found, name), getattr(wanted, name)
        if dataclasses.is_dataclass(a):
            inner = [field.name for field in dataclasses.fields(a)]
            differing += [f"{name}.{phrase}" for phrase in differing_fields(a, b, inner)]
        elif a != b:
            differing.append(f"{name}: {a} against {b}")
    return differing
