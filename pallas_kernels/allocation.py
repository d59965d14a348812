"""Pages for the next tokens of a batch of requests, in one launch: all of them, or nothing where they do not suffice.

    missing[b]   pages that row b's new length needs beyond those that its request holds
    before[b]    sum of missing over the rows before b
    ok           every row is granted, and all missing pages are there
    page i of row b comes from place before[b] + i of the stack of free pages, counted from its top

One block does it all, because all rows decide together. A lane has a row, and then each lane hands out a page in turn:
it finds the page's row by bisection of ``before``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import add, fold
from pallas_kernels.language.launch import MAX_WARPGROUPS, Grid, launch
from pallas_kernels.language.machine import VECTOR, WARP, WARPGROUP, Machine, Value, negate, select
from pallas_kernels.language.shared import Shared

MAX_GRANTED_ROWS = 4096  # of a batch; three numbers for each are kept in shared memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The tables that a grant changes."""

    prepared: Any  # int32 [requests] length that is granted
    block_table: Any  # int32 [requests, max_pages] pages of each request, -1 = none
    block_lens: Any  # int32 [requests] number of pages held
    block_refs: Any  # int32 [num_pages] number of requests that hold the page
    num_free: Any  # int32 [1] number of free pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a batch asks for, and what is known of its requests."""

    slots: Any  # int32 [B] request of each row
    num_new: Any  # int32 [B] tokens
    asking: Any  # bool [B] whether the row asks for tokens
    legal: Any  # bool [B] whether it does, and for more than none, for an existing request that no other row names
    seq_lens: Any  # int32 [requests] tokens stored
    free_blocks: Any  # int32 [num_pages] the first num_free are free


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageSizes:
    """How many tokens requests may have, and how many pages they need."""

    max_context: int  # tokens of a request
    ratio: int  # tokens per entry; 0 if there are no pages
    per_page: int  # entries per page

    def pages(self, length: Value) -> Value:
        """The number of pages that a length needs, those of the entries that are complete."""
        if not self.ratio:
            return length * 0
        return (length // self.ratio + (self.per_page - 1)) // self.per_page


def grant_tokens(asked: Asked, tables: Grants, sizes: PageSizes, *, simulate: bool = False) -> tuple[Grants, jax.Array]:
    """Grant a batch the tokens that it asks for, and allocate their pages.

    Args:
      asked: the batch.
      tables: updated in place if the caller's jit donates them.
      sizes: the bounds.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      (tables, ok bool [1]). If a row is illegal, a request would become longer than ``max_context``, or there are not
      enough free pages, then ``ok`` is False and the tables are unchanged.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the batch has more than MAX_GRANTED_ROWS rows.
    """
    (rows,) = asked.slots.shape
    if rows > MAX_GRANTED_ROWS:
        raise ValueError(f"a batch may have {MAX_GRANTED_ROWS} rows, got {rows}")
    chex.assert_type([asked.slots, asked.num_new, asked.seq_lens, asked.free_blocks], jnp.int32)
    chex.assert_type([asked.asking, asked.legal], jnp.bool)
    chex.assert_type(jax.tree.leaves(tables), jnp.int32)
    chex.assert_shape([asked.slots, asked.num_new, asked.asking, asked.legal], (rows,))
    chex.assert_equal_shape([asked.seq_lens, tables.prepared, tables.block_lens])
    chex.assert_equal_shape([asked.free_blocks, tables.block_refs])
    chex.assert_shape([tables.block_table, tables.num_free], [(*tables.prepared.shape, None), (1,)])
    warpgroups = max(1, min(MAX_WARPGROUPS, -(-rows // WARPGROUP)))

    def body(machine: Machine, asked: Asked, state: tuple[Grants, Any]) -> None:
        _Grant(machine, asked, state[0], sizes, warpgroups * WARPGROUP).run(state[1])

    grid = Grid(blocks=(1,), warpgroups=warpgroups, shared_bytes=16 * (rows + 2 * WARPGROUP))
    ok = jax.ShapeDtypeStruct((1,), jnp.bool)
    return launch(body, name="grant_tokens", grid=grid, inputs=asked, state=(tables, ok), simulate=simulate)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A row of the batch, as the lane that it belongs to sees it."""

    number: Value
    there: Value
    slot: Value
    granted: Value  # whether it gets tokens, if all rows do
    length: Value
    held: Value
    missing: Value
    up_to: Value  # the sum of missing over the rows of this warp, this one included


class _Grant:
    """The work of the block."""

    def __init__(self, machine: Machine, asked: Asked, tables: Grants, sizes: PageSizes, lanes: int):
        self.machine, self.asked, self.tables, self.sizes, self.lanes = machine, asked, tables, sizes, lanes
        self.rows = asked.slots.shape[0]
        self.parts = -(-self.rows // lanes)  # rows of a lane
        warps = self.parts * (lanes // WARP)
        self.before, self.held, self.slots = (Shared.take(machine, (self.rows,), "i32") for _ in range(3))
        self.totals = Shared.take(machine, (warps,), "i32")  # missing pages of each warp's rows
        self.refused = Shared.take(machine, (lanes // WARP,), "i32")

    def run(self, ok: Any) -> None:
        machine = self.machine
        lane, warp = machine.thread % WARP, machine.thread // WARP
        num_free = self.tables.num_free.load_int(0)
        rows, refused = [], machine.constant(0, "i32")
        for part in range(self.parts):
            row, is_refused = self._look_at(part)
            rows.append(row)
            refused = refused | select(is_refused, machine.constant(1, "i32"), 0)
            self.totals.store_int(row.up_to, warp + part * (self.lanes // WARP), where=lane == WARP - 1)
        self.refused.store_int(machine.reduce_warp("max", refused), warp, where=lane == 0)
        machine.barrier("block")
        totals = self._all(self.totals)
        taken, any_refused = fold(add, totals), fold(lambda a, b: a | b, self._all(self.refused))
        is_ok = (any_refused == 0) & (taken <= num_free)
        for part, row in enumerate(rows):
            earlier = warp + part * (self.lanes // WARP)
            before = row.up_to - row.missing
            for i, of_warp in enumerate(totals):
                before = before + select(earlier > i, of_warp, 0)
            self.before.store_int(before, row.number, where=row.there)
            self.held.store_int(row.held, row.number, where=row.there)
            self.slots.store_int(row.slot, row.number, where=row.there)
            changed = row.granted & is_ok
            self.tables.prepared.store_int(row.length, row.slot, where=changed)
            self.tables.block_lens.store_int(row.held + row.missing, row.slot, where=changed)
        machine.barrier("block")
        first = machine.thread == 0
        self.tables.num_free.store_int(num_free - select(is_ok, taken, 0), 0, where=first)
        ok.store_bytes(select(is_ok, machine.constant(1, "i32"), 0), 0, count=1, where=first)
        trips = select(is_ok, (taken + (self.lanes - 1)) // self.lanes, 0)
        machine.loop(trips, lambda i, _: self._hand_out(i * self.lanes + machine.thread, taken, num_free))

    def _look_at(self, part: int) -> tuple[_Row, Value]:
        """Load a row of this lane. Also returns whether it must be refused."""
        machine, asked, tables = self.machine, self.asked, self.tables
        number = machine.thread + part * self.lanes
        there = number < self.rows
        is_asking, is_legal = (
            flags.load_bytes(number, count=1, where=there) != 0 for flags in (asked.asking, asked.legal)
        )
        slot, num_new = asked.slots.load_int(number, where=there), asked.num_new.load_int(number, where=there)
        start, held = (table.load_int(slot, where=is_legal) for table in (asked.seq_lens, tables.block_lens))
        # Subtracted, because start + num_new could overflow.
        granted = is_legal & (num_new <= self.sizes.max_context - start)
        length = select(granted, start + num_new, 0)
        missing = select(granted, (self.sizes.pages(length) - held).maximum(0), 0)
        up_to, lane = missing, machine.thread % WARP
        distance = 1
        while distance < WARP:
            lower = machine.shuffle_up(up_to, distance)
            up_to = up_to + select(lane >= distance, lower, 0)
            distance *= 2
        refused = is_asking & negate(granted)
        return _Row(number, there, slot, granted, length, held, missing, up_to), refused

    def _all(self, numbers: Shared) -> list[Value]:
        count = numbers.shape[0]
        return [word for i in range(0, count, VECTOR) for word in numbers.load_words(i, count=min(VECTOR, count - i))]

    def _hand_out(self, place: Value, taken: Value, num_free: Value) -> None:
        """Give the page at a place of the stack, counted from its top, to its row."""
        machine, there = self.machine, place < taken
        low, high = machine.constant(0, "i32"), machine.constant(self.rows, "i32")
        for _ in range(self.rows.bit_length()):  # the last row whose pages begin at this place or before
            middle = (low + high) >> 1
            is_right = self.before.load_int(middle.minimum(self.rows - 1)) <= place
            is_open = (high - low) > 1
            low = select(is_open & is_right, middle, low)
            high = select(is_open & negate(is_right), middle, high)
        page = self.asked.free_blocks.load_int((num_free - 1) - place, where=there)
        column = self.held.load_int(low) + (place - self.before.load_int(low))
        self.tables.block_table.store_int(page, self.slots.load_int(low), column, where=there)
        self.tables.block_refs.store_int(machine.constant(1, "i32"), page, where=there)
