"""Inspect a cache from the host: ``describe`` reports what it holds, ``verify`` checks that it is consistent.

Both are meant for people, tests and watchdogs, and are called between forward passes. They copy the tables to the host,
which are small. ``verify`` also checks every stored value, but does so on the device and copies back only one bool per
row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.sharding import local_shards, shard_of
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import StateCache, empty_state
from dsv4jax.cache.tables import Tables, blocks_for
from dsv4jax.checks import Tree, check_concrete, check_one_shard
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan
from dsv4jax.tails import Tail

# ---- describe -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """What one slot holds. Requests hold memory in whole slots and whole blocks, so bytes are counted that way."""

    slot: int
    admitted: bool
    length: int  # tokens stored
    prepared: int  # tokens granted by prepare_forward, including those already stored
    own_blocks: int
    shared_blocks: int  # blocks that other requests read too; each request counts their bytes
    live_bytes: int  # bytes of its state in all layers, its row of the tables and its blocks; 0 for a free slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """Bytes in all layers of a kind.

    ``live_bytes`` is what requests hold, with each shared block counted once; ``reserved_bytes`` is what all slots and
    blocks take.
    """

    kind: AttentionType
    layers: int
    live_bytes: int
    reserved_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What a cache holds. ``print`` shows it as a table."""

    plan: CachePlan
    slots: tuple[SlotReport, ...]
    kinds: tuple[KindReport, ...]
    free_slots: int
    free_blocks: int

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"KV cache: {plan.max_requests - self.free_slots} of {plan.max_requests} slots held, "
            f"{plan.num_blocks - self.free_blocks:,} of {plan.num_blocks:,} blocks held",
            "",
            f"{'slot':>4}{'length':>12}{'prepared':>12}{'own blocks':>12}{'shared':>8}{'bytes live':>20}",
        ]
        for row in self.slots:
            if row.admitted:
                lines.append(
                    f"{row.slot:>4}{row.length:>12,}{row.prepared:>12,}{row.own_blocks:>12,}{row.shared_blocks:>8,}"
                    f"{row.live_bytes:>18,} B"
                )
        lines += [f"free{self.free_slots:>12,} slots{self.free_blocks:>18,} blocks", ""]
        lines.append(f"{'layers':<16}{'bytes live':>26}{'bytes reserved':>26}")
        for row in self.kinds:
            label = f"{row.layers} {row.kind.upper()}"
            lines.append(f"{label:<16}{row.live_bytes:>24,} B{row.reserved_bytes:>24,} B")
        return "\n".join([*lines, f"{'tables':<42}{plan.table_bytes:>24,} B"])


def describe(cache: KVCache) -> CacheReport:
    """Read a cache's tables into a report, on the host.

    Raises:
      ValueError: the cache has several shards, of which ``sharding.shard_of`` gives one; or it is traced: return
        ``cache.tables`` from the jitted function instead.
    """
    check_cache("describe", cache)
    check_concrete("describe", cache, "call it on a cache that has come back, or return cache.tables from the function")
    check_one_shard(cache.tables.num_free, "describe", on_host=True)
    plan, tables = cache.plan, _on_host(cache.tables)
    admitted, readers = tables.admitted, tables.block_refs
    slots = []
    for slot in range(plan.max_requests):
        held = tables.block_table[slot]
        held = held[(held >= 0) & (held < plan.num_blocks)]  # ids that are no blocks are for ``verify`` to report
        shared = int(np.sum(readers[held] > 1))
        slots.append(
            SlotReport(
                slot=slot,
                admitted=bool(admitted[slot]),
                length=int(tables.seq_lens[slot]),
                prepared=int(tables.prepared[slot]),
                own_blocks=held.size - shared,
                shared_blocks=shared,
                live_bytes=int(admitted[slot]) * (plan.bytes_per_request + held.size * plan.bytes_per_block),
            )
        )
    used_slots, used_blocks = int(np.sum(admitted)), int(np.sum(readers > 0))
    kinds = []
    for kind in AttentionType:
        if layers := len(plan.layers(kind)):
            state, block = (layers * sum(size(kind).values()) for size in (plan.state_bytes, plan.block_bytes))
            kinds.append(
                KindReport(
                    kind=kind,
                    layers=layers,
                    live_bytes=used_slots * state + used_blocks * block,
                    reserved_bytes=plan.max_requests * state + plan.num_blocks * block,
                )
            )
    return CacheReport(
        plan=plan,
        slots=tuple(slots),
        kinds=tuple(kinds),
        free_slots=plan.max_requests - used_slots,
        free_blocks=int(tables.num_free[0]),
    )


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(cache: KVCache) -> list[str]:
    """Check what must hold of a cache between forward passes: a sentence for each offender, none where it is sound.

    Slots and blocks: every block is free once or held as often as its reference count says, and shared only when full;
    every request has the blocks that its tokens need; free slots are cleared. Windows: each row holds the position that
    the length puts there. Tails: nothing is left of a former owner, or of a block that is complete. Values: what a
    request can see is finite, in every layer; a request that was fed NaN or infinity is an offender too.

    A row that ran without a grant is not found: it stored nothing, so the cache is that of a program without the row.
    ``checked`` finds it where it runs.

    Of a cache of several shards, each sentence names its shard. A process checks those that its own devices hold.

    Raises:
      ValueError: the cache is traced: return it from the jitted function, and check it then.
    """
    check_cache("verify", cache)
    check_concrete("verify", cache, "call it on a cache that has come back, or on a copy of one between two steps")
    if cache.tables.num_free.shape[0] > 1:
        each = ((number, verify(shard_of(cache, number))) for number in local_shards(cache))
        return [f"shard {number}: {fault}" for number, faults in each for fault in faults]
    plan, tables = cache.plan, _on_host(cache.tables)
    holders = _holders(tables)
    found = [
        *_slot_faults(tables, plan),
        *_block_faults(tables, holders, plan),
        *_free_list_faults(tables, holders),
    ]
    for kind in AttentionType:
        if plan.layers(kind):
            found += _window_faults(cache, tables, kind)
            found += _tail_faults(cache, tables, kind)
            found += _value_faults(cache, tables, holders, kind)
    return found


def _on_host(tables: Tables) -> Tables:
    return jax.tree.map(np.asarray, tables)


def _slot_faults(tables: Tables, plan: CachePlan) -> Iterator[str]:
    """Check the lengths, and each slot's row of the block table."""
    for slot, row in enumerate(tables.block_table):
        length, prepared, held = (int(t[slot]) for t in (tables.seq_lens, tables.prepared, tables.block_lens))
        if not tables.admitted[slot]:
            for name, value in (("seq_lens", length), ("prepared", prepared), ("block_lens", held)):
                if value:
                    yield f"slot {slot} is free, but its {name} is {value}"
            if (row != -1).any():
                yield f"slot {slot} is free, but its block_table names {row[row != -1].tolist()}"
            continue
        if length < 0:
            yield f"slot {slot}: seq_lens is {length}"
        if length > prepared:
            yield f"slot {slot}: seq_lens {length} exceeds prepared {prepared}"
        if max(length, prepared) > plan.max_context:
            yield f"slot {slot}: {max(length, prepared)} tokens exceed max_context {plan.max_context}"
        if not 0 <= held <= row.size:
            yield f"slot {slot}: block_lens {held} is outside 0 to {row.size}"
        for column, block in enumerate(row.tolist()):
            if column < held and not 0 <= block < plan.num_blocks:
                yield f"slot {slot}: block_table holds {block} in column {column}, which is no block; it holds {held}"
            if column >= held and block != -1:
                yield f"slot {slot}: block_table holds {block} in column {column}, past its {held} blocks"
        if (needed := blocks_for(plan, max(length, prepared))) > held:
            yield f"slot {slot}: {max(length, prepared)} tokens need {needed} blocks, it holds {held}"


Holders = list[list[tuple[int, int]]]  # for each block, the places where the block table names it: (slot, column)


def _holders(tables: Tables) -> Holders:
    holders: Holders = [[] for _ in tables.block_refs]
    for slot, column in np.argwhere((tables.block_table >= 0) & (tables.block_table < len(holders))).tolist():
        holders[tables.block_table[slot, column]].append((slot, column))
    return holders


def _block_faults(tables: Tables, holders: Holders, plan: CachePlan) -> Iterator[str]:
    """Check the reference counts, and that only full blocks are shared."""
    for block, (readers, places) in enumerate(zip(tables.block_refs.tolist(), holders, strict=True)):
        slots = [slot for slot, _ in places]
        if readers != len(places):
            yield f"block {block}: block_refs is {readers}, but block_table names it in slots {slots}"
        for slot in sorted(set(slots)):
            if slots.count(slot) > 1:
                yield f"block {block}: slot {slot} names it {slots.count(slot)} times"
        for slot, column in places:
            if len(set(slots)) > 1 and tables.seq_lens[slot] < (column + 1) * plan.cfg.block_tokens:
                yield f"block {block}: slots {slots} share it, but slot {slot} has not filled it and will write to it"


def _free_list_faults(tables: Tables, holders: Holders) -> Iterator[str]:
    num_free = int(tables.num_free[0])
    unheld = sum(not held for held in holders)
    if num_free != unheld:
        yield f"num_free is {num_free}, but the tables leave {unheld} blocks free"
    free = collections.Counter(tables.free_blocks[: max(0, num_free)].tolist())
    for block, times in sorted(free.items()):
        if not 0 <= block < len(holders):
            yield f"free_blocks names {block}, which is no block"
            continue
        if times > 1:
            yield f"block {block}: free_blocks names it {times} times"
        if holders[block]:
            yield f"block {block} is free by free_blocks, and held by slots {[slot for slot, _ in holders[block]]}"
    for block, held in enumerate(holders):
        if not held and block not in free:
            yield f"block {block} is lost: neither held nor in free_blocks"


def _positions(tables: Tables, n_win: int) -> np.ndarray:
    """Return the position that each window row must hold, int [requests, n_win]; -1 = none."""
    length, row = tables.seq_lens[:, None], np.arange(n_win)[None]
    newest = length - 1 - (length - 1 - row) % n_win
    return np.where((newest >= 0) & tables.admitted[:, None], newest, -1)


def _window_faults(cache: KVCache, tables: Tables, kind: AttentionType) -> Iterator[str]:
    pos = np.asarray(cache.stack(kind).state.pos)
    wanted = _positions(tables, pos.shape[2])
    wrong = (pos != wanted) & tables.admitted[:, None]
    for index, slot in np.argwhere(wrong.any(-1)).tolist():
        row = int(np.argmax(wrong[index, slot]))
        yield (
            f"layer {cache.plan.layers(kind)[index]}, slot {slot}: pos of window row {row} is "
            f"{pos[index, slot, row]}, expected {wanted[slot, row]} at length {tables.seq_lens[slot]}"
        )


def _tails(state: StateCache) -> Iterator[tuple[str, Tail]]:
    """Yield the tails that a state has, with their names."""
    for name in ("tail", "indexer_tail"):
        if (tail := getattr(state, name)) is not None:
            yield name, tail


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A leaf of a tail, and which tokens its rows belong to."""

    name: str  # the name in messages, such as tail.kb
    is_previous: bool  # holds rows of the block before the unfinished one
    is_running: bool  # holds a running sum, without an axis of rows

    @classmethod
    def of(cls, tail_name: str, tail: Tail, leaf: str) -> _Part:
        return cls(f"{tail_name}.{leaf}", leaf in tail.PREVIOUS, leaf in tail.RUNNING)


def _tail_parts(state: StateCache) -> dict[str, _Part]:
    """Return every leaf of every tail, by name."""
    parts = [
        _Part.of(name, tail, leaf)
        for name, tail in _tails(state)
        for leaf in tail.CURRENT + tail.PREVIOUS + tail.RUNNING
    ]
    return {part.name: part for part in parts}


@functools.partial(jax.jit, static_argnames=("plan", "kind"))
def _is_empty(state: StateCache, *, plan: CachePlan, kind: AttentionType) -> dict[str, jax.Array]:
    """Return where the leaves that are reset at the end of a block are empty, bool [layers, slots] each."""
    empty, found = dict(_tails(empty_state(plan, kind, (1, 1)))), {}
    for name, tail in _tails(state):
        for leaf in tail.PREVIOUS + tail.RUNNING:
            same = getattr(tail, leaf) == getattr(empty[name], leaf)
            found[f"{name}.{leaf}"] = jnp.all(same, axis=tuple(range(2, same.ndim)))
    return found


def _tail_faults(cache: KVCache, tables: Tables, kind: AttentionType) -> Iterator[str]:
    """Find leaves with data of the slot's former request or of a complete block that are about to be read."""
    plan, ratio = cache.plan, cache.plan.cfg.ratio(kind)
    state = cache.stack(kind).state
    parts = _tail_parts(state)
    for part, empty in _is_empty(state, plan=plan, kind=kind).items():
        # A running softmax is reset after every block. The previous b-streams are empty only during the first block.
        begins = tables.seq_lens % ratio == 0 if parts[part].is_running else tables.seq_lens < ratio
        for index, slot in np.argwhere(~np.asarray(empty) & tables.admitted & begins).tolist():
            yield (
                f"layer {plan.layers(kind)[index]}, slot {slot}: {part} is not empty at length {tables.seq_lens[slot]}"
            )


@functools.partial(jax.jit, static_argnames="plan")
def _finite_rows(stack: LayerStack, *, plan: CachePlan) -> dict[str, jax.Array]:
    """Return for each part which rows decode to finite numbers only, bool [layers, slots or blocks, rows]."""

    def finite(values: jax.Array) -> jax.Array:
        return jnp.all(jnp.isfinite(values), axis=-1)

    def finite_in_layer(layer: LayerStack) -> dict[str, jax.Array]:
        found = {"window": finite(plan.rows.decode(layer.state.window))}
        for name, tail in _tails(layer.state):
            for leaf in tail.CURRENT + tail.PREVIOUS:
                found[f"{name}.{leaf}"] = finite(getattr(tail, leaf))
            for leaf in tail.RUNNING:
                found[f"{name}.{leaf}"] = finite(getattr(tail, leaf))[:, None]
        if layer.pool is not None:
            found["entries"] = finite(plan.rows.decode(layer.pool.entries))
            if layer.pool.indexer_keys is not None:
                found["indexer_keys"] = finite(plan.keys.decode(layer.pool.indexer_keys))
        return found

    # One layer at a time, because XLA on CPU would otherwise keep the decoded values of all layers in memory.
    return lax.map(finite_in_layer, stack)


def _value_faults(cache: KVCache, tables: Tables, holders: Holders, kind: AttentionType) -> Iterator[str]:
    plan, stack = cache.plan, cache.stack(kind)
    tail_parts = _tail_parts(stack.state)
    for part, finite in _finite_rows(stack, plan=plan).items():
        of_tail = tail_parts.get(part)
        if of_tail is not None:
            live = _live_tail_rows(of_tail, tables, plan.cfg.ratio(kind))
        else:
            live = _live_rows(part, tables, holders, plan, kind)
        bad = ~np.asarray(finite) & live
        for index, owner in np.argwhere(bad.any(-1)).tolist():
            row = int(np.argmax(bad[index, owner]))
            if part in ("entries", "indexer_keys"):
                slots = " and ".join(str(slot) for slot, _ in holders[owner])
                where, store = f"slot {slots}, block {owner}", getattr(stack.pool, part)
            else:
                where, store = f"slot {owner}", stack.state.window
            leaves = [part] if of_tail else _culprits(part, store, (index, owner, row), plan)
            names = " and ".join(leaves) + ("" if of_tail and of_tail.is_running else f" of row {row}")
            verb = "is" if len(leaves) == 1 else "are"
            yield f"layer {plan.layers(kind)[index]}, {where}: {names} {verb} NaN or infinite"


def _live_rows(part: str, tables: Tables, holders: Holders, plan: CachePlan, kind: AttentionType) -> np.ndarray:
    """Return which rows of the window or pool a request can still see, bool [slots or blocks, rows]."""
    if part == "window":
        return _positions(tables, plan.cfg.sliding_window) >= 0
    live = np.zeros((plan.num_blocks, plan.entries_per_block(kind)), bool)
    for block, places in enumerate(holders):
        for slot, column in places:
            complete = int(tables.seq_lens[slot]) // plan.cfg.ratio(kind)
            live[block, : max(0, complete - column * live.shape[1])] = True
    return live


def _live_tail_rows(part: _Part, tables: Tables, ratio: int) -> np.ndarray:
    """Return which rows of a tail's leaf a request can still see: bool, broadcastable to [slots, rows]."""
    admitted, lengths = np.asarray(tables.admitted)[:, None], np.asarray(tables.seq_lens)[:, None]
    if part.is_previous or part.is_running:
        return admitted
    return admitted & (np.arange(ratio)[None] < lengths % ratio)


def _culprits(part: str, store: KVRows | KeyRows, at: tuple[int, int, int], plan: CachePlan) -> list[str]:
    """Name the leaves that make a row non-finite.

    These are the leaves which, when replaced by zeros, make the row finite. If no single leaf does, all are named.
    """
    cfg = plan.cfg
    zero: Tree
    decode: Callable[[Tree], jax.Array]
    if part == "indexer_keys":
        zero, decode = plan.keys.encode(jnp.zeros(cfg.indexer_head_dim, jnp.float32)), plan.keys.decode
    else:
        zero, decode = plan.rows.encode(jnp.zeros(cfg.head_dim, jnp.float32), cfg.rope_dim), plan.rows.decode
    names = [field.name for field in dataclasses.fields(store) if getattr(store, field.name) is not None]
    row = jax.tree.map(lambda leaf: leaf[at], store)

    def cures(name: str) -> bool:
        return bool(jnp.all(jnp.isfinite(decode(dataclasses.replace(row, **{name: getattr(zero, name)})))))

    return [f"{part}.{name}" for name in names if cures(name)] or [f"{part}.{name}" for name in names]
