"""Slots, blocks and lengths: the tables that say which request holds what, and pure functions that update them.

Every function takes the tables and returns new ones. None of them needs a decision on the host, so a whole generation
can run in ``lax.scan``. Allocation is all or nothing: if ``ok`` is False, the tables are returned unchanged.

    admit            marks free slots as admitted
    prepare_forward  allocates blocks for the entries that the next tokens complete; records the length granted
    advance          adds num_new to the lengths, up to the length granted
    fork             shares the full blocks of another request; allocates a new block for the one it is filling
    release          frees slots, and returns blocks that nobody else reads to the free list
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import check_array, check_batch, check_one_shard
from dsv4jax.indexing import unique_or_dropped
from dsv4jax.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Which request holds which slots and blocks.

    Every leaf has rank >= 1 and all ids are local to a shard, so that requests can be sharded.
    """

    admitted: jax.Array  # bool [requests] whether a request holds the slot
    seq_lens: jax.Array  # int32 [requests] tokens stored; 0 for a free slot
    prepared: jax.Array  # int32 [requests] length that prepare_forward has granted; 0 for a free slot
    block_table: jax.Array  # int32 [requests, max_blocks] block ids, -1 = none
    block_lens: jax.Array  # int32 [requests] blocks held
    block_refs: jax.Array  # int32 [num_blocks] number of requests that read the block, 0 = free
    free_blocks: jax.Array  # int32 [num_blocks] a stack of ids: the first num_free are free, the others are stale
    num_free: jax.Array  # int32 [1], or [shards] in a cache of several shards


def init_tables(plan: CachePlan) -> Tables:
    """Return tables in which all slots and blocks are free."""
    requests = plan.max_requests
    return Tables(
        admitted=jnp.zeros(requests, jnp.bool),
        seq_lens=jnp.zeros(requests, jnp.int32),
        prepared=jnp.zeros(requests, jnp.int32),
        block_table=jnp.full((requests, plan.max_blocks), -1, jnp.int32),
        block_lens=jnp.zeros(requests, jnp.int32),
        block_refs=jnp.zeros(plan.num_blocks, jnp.int32),
        free_blocks=jnp.arange(plan.num_blocks, dtype=jnp.int32),
        num_free=jnp.full(1, plan.num_blocks, jnp.int32),
    )


def is_asking(slots: jax.Array, num_new: jax.Array) -> jax.Array:
    """Return which rows ask for tokens, bool [B]."""
    return (slots != -1) & (num_new != 0)


def has_twin(slots: jax.Array, active: jax.Array) -> jax.Array:
    """Return whether another active row of the batch names the same slot, bool [B]."""
    row = jnp.arange(slots.size, dtype=jnp.int32)
    other = (row[:, None] != row[None]) & active[:, None] & active[None]
    return jnp.any((slots[:, None] == slots[None]) & other, axis=1)


def _read(table: jax.Array, slots: jax.Array) -> jax.Array:
    return table.at[slots].get(mode="clip", wrap_negative_indices=False)


def _put(table: jax.Array, slots: jax.Array, value: jax.Array) -> jax.Array:
    """Set table[slots] = value, for slots from ``unique_or_dropped``."""
    return table.at[slots].set(value, mode="drop", unique_indices=True, wrap_negative_indices=False)


def is_admitted(tables: Tables, slots: jax.Array) -> jax.Array:
    """Return whether each slot exists and is held by a request, bool [B]."""
    return (slots >= 0) & (slots < tables.admitted.shape[0]) & _read(tables.admitted, slots)


def active_rows(tables: Tables, slots: jax.Array, num_new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which rows ask for tokens, and which of those are valid, bool [B] each.

    A row asks for tokens if its slot is not -1 and num_new is not 0. It is valid if num_new > 0, the slot is admitted,
    and no other asking row names the same slot.
    """
    asking = is_asking(slots, num_new)
    return asking, asking & (num_new > 0) & is_admitted(tables, slots) & ~has_twin(slots, asking)


def granted_tokens(tables: Tables, slots: jax.Array, num_new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what a forward pass may do with each row: (tokens stored so far, tokens to take), int32 [B] each.

    Both are 0 for a row that must be skipped because it is padding, not valid, or not granted by ``prepare_forward``.
    """
    check_one_shard(tables.num_free, "a forward pass")
    _, legal = active_rows(tables, slots, num_new)
    start = _read(tables.seq_lens, slots)
    # Subtract instead of adding: start + num_new could overflow int32 if num_new is garbage.
    legal &= num_new <= _read(tables.prepared, slots) - start
    return jnp.where(legal, start, 0), jnp.where(legal, num_new, 0)


def withdraw_grants(tables: Tables, slots: jax.Array, where: jax.Array) -> Tables:
    """Take back granted tokens that are not stored yet, for slots int32 [B] where ``where`` bool [B] is True.

    Every layer of a forward pass calls this with the same rows. It is written as a minimum because XLA simplifies
    min(min(p, limit), limit) to min(p, limit), so that the work is done once for all layers.
    """
    check_one_shard(tables.num_free, "a forward pass")
    # Compared with all slots and not scattered: XLA then does it in one launch, together with the minimum.
    slot = jnp.arange(tables.prepared.size, dtype=jnp.int32)
    named = jnp.any((slots[None] == slot[:, None]) & where[None], axis=1)
    limit = jnp.where(named, tables.seq_lens, jnp.iinfo(jnp.int32).max)
    return dataclasses.replace(tables, prepared=jnp.minimum(tables.prepared, limit))


def admit_slots(tables: Tables, n: int, where: jax.Array | None = None) -> tuple[Tables, jax.Array, jax.Array]:
    """Take up to n free slots. Returns (tables, slots int32 [n], ok bool []); slots are -1 if masked out or not ok."""
    check_one_shard(tables.num_free, "admit")
    wanted = jnp.ones(n, jnp.bool) if where is None else where
    check_array("where", wanted, {"n": n}, jnp.bool)
    requests = tables.admitted.shape[0]
    rank = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    free = jnp.nonzero(~tables.admitted, size=requests, fill_value=-1)[0].astype(jnp.int32)
    slots = jnp.where(wanted, free.at[rank].get(mode="fill", fill_value=-1), -1)
    ok = jnp.all(~wanted | (slots >= 0))
    slots = jnp.where(ok, slots, -1)
    target = unique_or_dropped(slots, slots >= 0, requests)
    admitted = tables.admitted.at[target].set(True, mode="drop", unique_indices=True)
    return dataclasses.replace(tables, admitted=admitted), slots, ok


def blocks_for[Length: (jax.Array, int)](plan: CachePlan, length: Length) -> Length:
    """Return the blocks that ``length`` tokens need: those for the entries they complete at the smallest ratio."""
    if not plan.min_ratio:
        return length * 0
    per_block = plan.cfg.block_tokens // plan.min_ratio
    return (length // plan.min_ratio + per_block - 1) // per_block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What each row of a batch asks for, and the blocks that it needs for that."""

    asking: jax.Array  # bool [B] as ``active_rows`` says
    legal: jax.Array  # bool [B] as ``active_rows`` says
    fits: jax.Array  # bool [B] whether the request stays within the longest context
    length: jax.Array  # int32 [B] tokens after the call; 0 unless the row is legal and fits
    held: jax.Array  # int32 [B] blocks that the request holds
    missing: jax.Array  # int32 [B] blocks that it lacks

    @classmethod
    def of(cls, tables: Tables, slots: jax.Array, num_new: jax.Array, plan: CachePlan) -> Needs:
        """Read them from the tables, for num_new int32 [B] more tokens of slots int32 [B]."""
        asking, legal = active_rows(tables, slots, num_new)
        start, held = _read(tables.seq_lens, slots), _read(tables.block_lens, slots)
        fits = num_new <= plan.max_context - start
        length = jnp.where(legal & fits, start + num_new, 0)
        missing = jnp.maximum(blocks_for(plan, length) - held, 0)
        return cls(asking=asking, legal=legal, fits=fits, length=length, held=held, missing=missing)


def grow(tables: Tables, slots: jax.Array, num_new: jax.Array, plan: CachePlan) -> tuple[Tables, jax.Array]:
    """Grant num_new int32 [B] more tokens to slots int32 [B], and allocate their blocks.

    Returns (tables, ok bool []).
    """
    check_one_shard(tables.num_free, "prepare_forward")
    requests, max_blocks = tables.block_table.shape
    needs = Needs.of(tables, slots, num_new, plan)
    legal, length, held, missing = needs.legal, needs.length, needs.held, needs.missing
    before = jnp.cumsum(missing, dtype=jnp.int32) - missing  # blocks taken by earlier rows of the batch
    taken = jnp.sum(missing, dtype=jnp.int32)
    ok = jnp.all(~needs.asking | (legal & needs.fits)) & (taken <= tables.num_free[0])

    slot = unique_or_dropped(slots, legal & ok, requests)
    # Row b takes its missing blocks from the top of the stack of free blocks, in order.
    j = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    new = (j >= held[:, None]) & (j < (held + missing)[:, None]) & ok
    from_top = before[:, None] + j - held[:, None]
    ids = tables.free_blocks.at[tables.num_free[0] - 1 - from_top].get(mode="clip")
    rows = jnp.where(new, ids, _read(tables.block_table, slots))
    num_blocks = tables.block_refs.shape[0]
    refs = tables.block_refs.at[unique_or_dropped(ids, new, num_blocks)].set(1, mode="drop", unique_indices=True)

    return dataclasses.replace(
        tables,
        prepared=_put(tables.prepared, slot, length),
        block_table=_put(tables.block_table, slot, rows),
        block_lens=_put(tables.block_lens, slot, held + missing),
        block_refs=refs,
        num_free=tables.num_free - jnp.where(ok, taken, 0),
    ), ok


def advance_lengths(tables: Tables, slots: jax.Array, num_new: jax.Array) -> Tables:
    """Add num_new int32 [B] to the lengths of slots int32 [B] for which these tokens were granted."""
    check_batch(slots=slots, num_new=num_new)
    start, count = granted_tokens(tables, slots, num_new)
    target = unique_or_dropped(slots, count > 0, tables.seq_lens.shape[0])
    seq_lens = _put(tables.seq_lens, target, start + count)
    return dataclasses.replace(tables, seq_lens=seq_lens)


def fork_slots(
    tables: Tables, sources: jax.Array, targets: jax.Array, plan: CachePlan
) -> tuple[Tables, jax.Array, jax.Array, jax.Array]:
    """Give the empty requests in targets [B] the length and blocks of the requests in sources [B]; -1 = padding.

    Blocks that the source has filled are shared. If the source is filling a block, the target gets a new block for it,
    and the caller must copy the contents. Blocks granted past the stored length are not passed on.

    Returns:
      (tables, ok bool [], filling int32 [B], own int32 [B]). The caller copies block filling[b] to block own[b] where
      own[b] >= 0.
    """
    check_one_shard(tables.num_free, "fork")
    requests, max_blocks = tables.block_table.shape
    num_blocks = tables.block_refs.shape[0]
    asking = targets != -1
    empty = (_read(tables.block_lens, targets) == 0) & (_read(tables.prepared, targets) == 0)
    legal = is_admitted(tables, sources) & is_admitted(tables, targets) & empty & (sources != targets)
    legal &= asking & ~has_twin(targets, asking)
    length = jnp.where(legal, _read(tables.seq_lens, sources), 0)
    held = blocks_for(plan, length)
    full = jnp.minimum(length // plan.cfg.block_tokens, held)  # held is 0 if no layer is compressed
    takes = held > full
    ok = jnp.all(~asking | legal) & (jnp.sum(takes, dtype=jnp.int32) <= tables.num_free[0])
    takes &= ok
    from_top = jnp.cumsum(takes, dtype=jnp.int32)
    own = jnp.where(takes, tables.free_blocks.at[tables.num_free[0] - from_top].get(mode="clip"), -1)
    # Without the barrier XLA may write the table first and keep a copy of it for this read.
    row, table = lax.optimization_barrier((_read(tables.block_table, sources), tables.block_table))
    filling = jnp.take_along_axis(row, full[:, None], axis=1, mode="clip")[:, 0]
    j = jnp.arange(max_blocks, dtype=jnp.int32)[None]
    row = jnp.where(j < full[:, None], row, jnp.where(j == full[:, None], own[:, None], -1))
    row = jnp.where(ok, row, -1)
    refs = tables.block_refs.at[jnp.where(row >= 0, row, num_blocks)].add(1, mode="drop")
    slot = unique_or_dropped(targets, legal & ok, requests)

    tables = dataclasses.replace(
        tables,
        seq_lens=_put(tables.seq_lens, slot, length),
        prepared=_put(tables.prepared, slot, length),
        block_table=_put(table, slot, row),
        block_lens=_put(tables.block_lens, slot, held),
        block_refs=refs,
        num_free=tables.num_free - jnp.sum(takes, dtype=jnp.int32),
    )
    return tables, ok, filling, own


def release_slots(tables: Tables, slots: jax.Array) -> Tables:
    """Free slots int32 [B], and blocks that no other request reads. Free, repeated or negative slots are ignored."""
    check_one_shard(tables.num_free, "release")
    check_batch(slots=slots)
    requests, num_blocks = tables.admitted.shape[0], tables.block_refs.shape[0]
    named = jnp.zeros(requests, jnp.bool).at[jnp.where(slots >= 0, slots, requests)].set(True, mode="drop")
    leaving = named & tables.admitted
    held = leaving[:, None] & (tables.block_table >= 0)
    refs = tables.block_refs.at[jnp.where(held, tables.block_table, num_blocks)].add(-1, mode="drop")
    freed = (tables.block_refs > 0) & (refs == 0)
    place = tables.num_free[0] + jnp.cumsum(freed, dtype=jnp.int32) - 1
    free_blocks = tables.free_blocks.at[unique_or_dropped(place, freed, num_blocks)].set(
        jnp.arange(num_blocks, dtype=jnp.int32), mode="drop", unique_indices=True
    )

    def cleared(table: jax.Array, value: int | bool = 0) -> jax.Array:
        mask = leaving.reshape(leaving.shape + (1,) * (table.ndim - 1))
        return jnp.where(mask, jnp.asarray(value, table.dtype), table)

    return Tables(
        admitted=cleared(tables.admitted, False),
        seq_lens=cleared(tables.seq_lens),
        prepared=cleared(tables.prepared),
        block_table=cleared(tables.block_table, -1),
        block_lens=cleared(tables.block_lens),
        block_refs=refs,
        free_blocks=free_blocks,
        num_free=tables.num_free + jnp.sum(freed, dtype=jnp.int32),
    )
