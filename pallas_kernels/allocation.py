"""Pages for the next tokens of a batch of requests, in one launch: all of them, or nothing where they do not suffice.

    missing[b]   pages that row b's new length needs beyond those that its request holds
    before[b]    sum of missing over the rows before b
    ok           every row is granted, and all missing pages are there
    page i of row b comes from place before[b] + i of the stack of free pages, counted from its top

One block does it all, because all rows decide together. Each row has a lane. Then the lanes hand out the pages, one
each in turn: a lane finds the row that its page goes to by bisection of ``before``.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, Shaped, add, fold, running_sum
from pallas_kernels.language.launch import MAX_WARPGROUPS, Grid, launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR, Value, negate, select

MAX_ROWS = MAX_WARPGROUPS * WARPGROUP  # of a batch: a lane for each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grants[Array: Shaped]:
    """The tables that a grant changes."""

    prepared: Array  # int32 [requests] length that is granted
    block_table: Array  # int32 [requests, max_pages] pages of each request, -1 = none
    block_lens: Array  # int32 [requests] number of pages held
    block_refs: Array  # int32 [num_pages] number of requests that hold the page
    num_free: Array  # int32 [1] number of free pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked[Array: Shaped]:
    """What a batch asks for, and what is known of its requests."""

    slots: Array  # int32 [B] request of each row, -1 = padding
    num_new: Array  # int32 [B] tokens; a row that asks for none is skipped
    shared: Array  # bool [B] whether another row that asks for tokens names the same slot
    admitted: Array  # bool [requests] whether a request holds the slot
    seq_lens: Array  # int32 [requests] tokens stored
    free_blocks: Array  # int32 [num_pages] the first num_free are free


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


def unsupported_grants(*, rows: int) -> str | None:
    """Return why the kernel does not support a batch of this size, or None if it does."""
    return None if 0 < rows <= MAX_ROWS else f"a batch may have 1 to {MAX_ROWS} rows, got {rows}"


def grant_tokens(
    asked: Asked[jax.Array], tables: Grants[jax.Array], sizes: PageSizes, *, simulate: bool = False
) -> tuple[Grants[jax.Array], jax.Array]:
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
      ValueError: the kernel does not support this number of rows.
    """
    (rows,) = asked.slots.shape
    if (reason := unsupported_grants(rows=rows)) is not None:
        raise ValueError(reason)
    chex.assert_type([asked.slots, asked.num_new, asked.seq_lens, asked.free_blocks], jnp.int32)
    chex.assert_type([asked.shared, asked.admitted], jnp.bool)
    chex.assert_type(jax.tree.leaves(tables), jnp.int32)
    chex.assert_shape([asked.slots, asked.num_new, asked.shared], (rows,))
    chex.assert_equal_shape([asked.seq_lens, asked.admitted, tables.prepared, tables.block_lens])
    chex.assert_equal_shape([asked.free_blocks, tables.block_refs])
    chex.assert_shape([tables.block_table, tables.num_free], [(*tables.prepared.shape, None), (1,)])
    warpgroups = 1
    while warpgroups * WARPGROUP < rows:
        warpgroups *= 2

    def body(machine: Machine, asked: Asked[Buffer], state: tuple[Grants[Buffer], Buffer]) -> None:
        _Grant(machine, asked, state[0], sizes, warpgroups * WARPGROUP).run(state[1])

    grid = Grid(blocks=(1,), warpgroups=warpgroups, shared_bytes=4 * WARPGROUP * 4 * warpgroups)
    ok = jax.ShapeDtypeStruct((1,), jnp.bool)
    return launch(body, name="grant_tokens", grid=grid, inputs=asked, state=(tables, ok), simulate=simulate)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A row of the batch, as its lane sees it."""

    slot: Value
    granted: Value  # whether it gets tokens, if all rows do
    refused: Value  # whether it asks for tokens and cannot have them
    length: Value
    held: Value
    missing: Value

    @classmethod
    def load(cls, machine: Machine, asked: Asked[Buffer], tables: Grants[Buffer], sizes: PageSizes) -> _Row:
        number = machine.thread
        there = number < asked.slots.shape[0]
        slot = asked.slots.load_int(number, where=there, otherwise=-1)
        num_new = asked.num_new.load_int(number, where=there)
        is_shared = asked.shared.load_bytes(number, count=1, where=there) != 0
        is_slot = (slot >= 0) & (slot < asked.admitted.shape[0])
        is_admitted = asked.admitted.load_bytes(slot, count=1, where=is_slot) != 0
        start, held = (table.load_int(slot, where=is_slot) for table in (asked.seq_lens, tables.block_lens))
        # Subtracted, because start + num_new could overflow.
        fits = (num_new > 0) & (num_new <= sizes.max_context - start)
        granted = fits & is_admitted & negate(is_shared)
        length = select(granted, start + num_new, 0)
        missing = select(granted, (sizes.pages(length) - held).maximum(0), 0)
        return cls(slot, granted, (slot != -1) & (num_new != 0) & negate(granted), length, held, missing)


class _Grant:
    """The work of the block."""

    def __init__(self, machine: Machine, asked: Asked[Buffer], tables: Grants[Buffer], sizes: PageSizes, lanes: int):
        self.machine, self.asked, self.tables, self.sizes, self.lanes = machine, asked, tables, sizes, lanes
        self.before, self.held, self.slots = (Shared.take(machine, (lanes,), "i32") for _ in range(3))
        self.totals, self.refused = (Shared.take(machine, (lanes // WARP,), "i32") for _ in range(2))  # of warps

    def run(self, ok: Buffer) -> None:
        machine, tables = self.machine, self.tables
        number, lane, warp = machine.thread, machine.thread % WARP, machine.thread // WARP
        num_free = tables.num_free.load_int(0)
        row = _Row.load(machine, self.asked, tables, self.sizes)
        up_to = running_sum(machine, row.missing)  # by this row and those before it in its warp
        refused = machine.reduce_warp("max", select(row.refused, machine.constant(1, "i32"), 0))
        self.totals.store_int(up_to, warp, where=lane == WARP - 1)
        self.refused.store_int(refused, warp, where=lane == 0)
        machine.barrier("block")
        totals = self._all(self.totals)
        taken = fold(add, totals)
        is_ok = (fold(lambda a, b: a | b, self._all(self.refused)) == 0) & (taken <= num_free)
        before = up_to - row.missing
        for i, of_warp in enumerate(totals):
            before = before + select(warp > i, of_warp, 0)
        for shared, value in ((self.before, before), (self.held, row.held), (self.slots, row.slot)):
            shared.store_int(value, number)
        changed = row.granted & is_ok
        tables.prepared.store_int(row.length, row.slot, where=changed)
        tables.block_lens.store_int(row.held + row.missing, row.slot, where=changed)
        machine.barrier("block")
        tables.num_free.store_int(num_free - select(is_ok, taken, 0), 0, where=number == 0)
        ok.store_bytes(select(is_ok, machine.constant(1, "i32"), 0), 0, count=1, where=number == 0)
        trips = select(is_ok, (taken + (self.lanes - 1)) // self.lanes, 0)
        machine.loop(trips, lambda i, _: self._hand_out(i * self.lanes + number, taken, num_free))

    def _all(self, numbers: Shared) -> list[Value]:
        return [word for i in range(0, numbers.shape[0], VECTOR) for word in numbers.load_words(i, count=VECTOR)]

    def _hand_out(self, place: Value, taken: Value, num_free: Value) -> None:
        """Give the page at a place of the stack, counted from its top, to its row."""
        machine, there = self.machine, place < taken
        row, distance = machine.constant(0, "i32"), self.lanes // 2
        while distance:  # to the last row whose pages begin at this place or before; lanes are a power of two
            row = select(self.before.load_int(row + distance) <= place, row + distance, row)
            distance //= 2
        page = self.asked.free_blocks.load_int((num_free - 1) - place, where=there)
        column = self.held.load_int(row) + (place - self.before.load_int(row))
        self.tables.block_table.store_int(page, self.slots.load_int(row), column, where=there)
        self.tables.block_refs.store_int(machine.constant(1, "i32"), page, where=there)
