"""Experts' products on Hopper: codes of the weights are copied as they are, and widened in registers.

    sums [outputs, rows of x] = weight [outputs, inputs] x^T

A lane holds 16 adjacent bytes of each output's half of a chunk, which have the same scale. They enter eight steps of a
product 4 numbers at a time: two in the first half of the step's inputs and two in the second. So rows of x are stored
in that order: of each 128 numbers, four quarters of 16 pairs, pair p of quarter q is pair 4 p + q.

One warpgroup loads. One of its warps starts the copies of the weights, and of rows of x that lie one after another.
Others copy rows of x that are anywhere, pair by pair, and leave in a table what is known of them. The other warpgroups
multiply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile, TileCopy
from pallas_kernels.language.values import Condition, Index, Value, select
from pallas_kernels.products.experts.codes import KEPT, MERGED, SHIFTS
from pallas_kernels.products.experts.epilogues import PairSums
from pallas_kernels.products.experts.layout import (
    BOX,
    BOXES,
    GATED_NUMBERS,
    GATHERERS,
    HALF,
    OUTPUTS,
    PART,
    SCALE_BYTES,
    SCALE_INPUTS,
    TILE_BYTES,
    Layout,
)

_QUAD, _EIGHT = 4, 8
_WARPS = WARPGROUP // WARP
REGISTERS = {4: (104, 64), 2: (232, 40)}  # of a lane that multiplies, and that loads, by the warpgroups that multiply
_UNIT = 16  # bytes
_PART_ROWS = PART // BOXES  # rows of a box that a warpgroup multiplies at once
_STEP_WORDS = 4  # of a left operand
# E2M1 moved into the bits of a bf16 means the number times 2^-126. Weights are times 2^-8 beside that until they are
# summed, so that scales up to 2^9 can be served.
_LESS = 8
_MOVED = 126 - _LESS
_KEPT = 0x81C081C0 - (1 << 32)  # of two such bf16: the sign, and the three bits of exponent and fraction
_PLACE = 6  # of the lowest bit that is kept
_TWICE = 0x00800080  # puts an exponent in its place in two bf16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInputs:
    """The arrays of a product, or their buffers."""

    x: Any  # bf16 [rows, inputs]; uint8 of rows in FP8
    codes: Any  # uint8 [experts * outputs, inputs / 2]
    scales: Any  # uint8 [experts * outputs, inputs / 32]
    pairs: Any  # as ``RoutedTiles``
    tiles: Any
    count: Any
    weights: Any = None  # f32 [pairs], where the epilogue takes them
    x_scales: Any = None  # f32 [inputs / 128, rows or more] of rows in FP8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A tile of rows."""

    expert: Value
    first: Value  # its first place among the sorted pairs
    count: Value

    @classmethod
    def load(cls, inputs: ExpertInputs, tile: Value) -> _Entry:
        """Load a tile's entry, if there is such a tile."""
        return cls(*(inputs.tiles.load_int(tile, n, where=tile < inputs.tiles.shape[0]) for n in range(3)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The units of a block."""

    units: Value  # their number: every ``blocks``-th from the block's number on
    start: Index  # the launch's first tile
    first: _Entry  # the tile of the first one

    @classmethod
    def of(cls, machine: TensorCores, inputs: ExpertInputs, layout: Layout) -> _Work:
        """Load it."""
        tiles, start = inputs.count.load_int(1 if layout.is_small else 0), 0
        if layout.is_small and layout.epilogue.routing.has_large:
            start = inputs.count.load_int(0)
            tiles = tiles - start
        first = _Entry.load(inputs, machine.block(0) // layout.units + start)
        total = tiles * layout.units
        return cls((total + (layout.blocks - 1) - machine.block(0)) // layout.blocks, start, first)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """Which codes a lane multiplies."""

    place: Value  # of its 16 bytes among the four of a half of a chunk
    of_warp: Value  # the output, among the eight of a warp
    distance: int  # from the lane that has the adjacent output
    row: Value  # of a box, for the first part: the output
    at: Value  # byte offset of the first half's codes from the first box of a stage


def body(machine: TensorCores, inputs: ExpertInputs, out: Buffer, *, layout: Layout) -> None:
    """Compute a block's units."""
    Block.take(machine, inputs, layout).run(out)


def widen(machine: TensorCores, words: list[Value], factor: Value, *, interleaved: bool) -> list[Value]:
    """Widen 16 codes of FP4 to eight words of two adjacent bf16.

    Args:
      machine: of the values.
      words: the codes, two words.
      factor: two equal bf16, 2^(126 - 8) times the scale: see ``factor_of``.
      interleaved: whether codes are in the order of ``codes``. Otherwise the first one is in the low bits.

    Returns:
      The numbers times scale and 2^-8.
    """
    moved = _interleaved(words) if interleaved else [pair for word in words for pair in _in_order(machine, word)]
    return [machine.multiply_bf16(pair & _KEPT, factor) for pair in moved]


def _in_order(machine: TensorCores, word: Value) -> list[Value]:
    # Of each byte the low code comes from a word in which it is where the high one is. Both get a byte of their sign.
    low = word << 4
    selectors = [i | (8 | i) << 4 | (4 | i) << 8 | (12 | i) << 12 for i in range(4)]
    return [machine.permute_bytes(low, word, selector) << 2 for selector in selectors]


def _interleaved(words: list[Value]) -> list[Value]:
    first, second = words
    both = (first & KEPT) | (second << MERGED & ~KEPT)

    def rotated(word: Value, shift: int) -> Value:
        if shift <= _PLACE:  # nothing that is kept comes from the high bits
            return word << shift if shift else word
        return word << shift | word >> (32 - shift)

    of_words = zip((first, second, both), SHIFTS, strict=True)
    return [rotated(word, shift) for word, shifts in of_words for shift in shifts]


def factor_of(byte: Value) -> Value:
    """Return what ``widen`` multiplies by for a scale in E8M0. For one above 2^9 it is infinite, and 0 gives NaN."""
    return byte.minimum(255 - _MOVED) * _TWICE + _MOVED * _TWICE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A block, from the view of one of its lanes."""

    machine: TensorCores
    inputs: ExpertInputs
    layout: Layout
    codes: Shared  # u8 [stages, boxes, outputs of a box, bytes]
    x: Tile  # of a quarter of a chunk, or in FP8 of a half; copies for each stage
    x_scales: Shared | None  # f32 [stages, halves of a chunk, rows], with what aligns stages
    scales: Shared  # u8 [slots, boxes, outputs of a box, bytes]
    sources: Shared  # i32 [slots, rows] of a unit: the row of x, -1 for none; where warps copy what belongs to it
    targets: Shared  # i32 [slots, rows] the row that is stored to, -1 for none
    weights: Shared  # f32 [slots, rows]
    gated: Shared | None  # bf16 [rows, GATED_NUMBERS] of a unit, before they are rounded
    gated_by: Barrier | None  # of the warps that store them, two phases for each unit
    pipe: Pipeline
    early: _Work | None  # None: each role loads it

    @classmethod
    def take(cls, machine: TensorCores, inputs: ExpertInputs, layout: Layout) -> Block:
        """Take shared memory, and initialise the barriers."""
        # Loaded first of all, because everything waits for it.
        early = _Work.of(machine, inputs, layout) if layout.loads_early else None
        size = layout.stages * OUTPUTS * layout.row_bytes
        shape = layout.stages, BOXES, BOX, layout.row_bytes
        codes = Shared(machine, machine.take_shared(size, alignment=1024), shape, "u8")
        x = Tile.take(machine, layout.rows, TILE_BYTES, copies=layout.stages * layout.quarters)
        scales = layout.scale_slots, BOXES, BOX, SCALE_BYTES
        at = machine.take_shared(layout.scale_slots * OUTPUTS * SCALE_BYTES, alignment=128)
        table = layout.table_slots, layout.rows
        x_scales = None
        if layout.is_rounded:
            of_x = machine.take_shared(layout.stages * layout.x_scale_bytes, alignment=128)
            x_scales = Shared(machine, of_x, (layout.stages, layout.x_scale_bytes // 4), "f32")
        full = Barrier.take(machine, 1 + GATHERERS, copies=layout.stages)
        free = Barrier.take(machine, layout.warps, copies=layout.stages)
        gated, gated_by = None, None
        if layout.rounds:
            gated = Shared.take(machine, (layout.rows, GATED_NUMBERS), "u16")
            gated_by = Barrier.take(machine, layout.warps)
        init_barriers(full, free, *([] if gated_by is None else [gated_by]))
        return cls(
            machine=machine,
            inputs=inputs,
            layout=layout,
            codes=codes,
            x=x,
            x_scales=x_scales,
            scales=Shared(machine, at, scales, "u8"),
            sources=Shared.take(machine, table, "i32"),
            targets=Shared.take(machine, table, "i32"),
            weights=Shared.take(machine, table, "f32"),
            gated=gated,
            gated_by=gated_by,
            pipe=Pipeline(full=full, free=free),
            early=early,
        )

    def run(self, out: Buffer) -> None:
        """Compute the block's units."""
        multiplying, loading = REGISTERS[self.layout.warpgroups]
        self.machine.roles(
            Role(warpgroups=self.layout.warpgroups, registers=multiplying, body=lambda: self.multiply(out)),
            Role(warpgroups=1, registers=loading, body=self.load),
        )

    def work(self) -> _Work:
        """Return the units of the block. A role asks once."""
        return _Work.of(self.machine, self.inputs, self.layout) if self.early is None else self.early

    def place(self, unit: Value) -> tuple[Value, Value]:
        """Return the number of a unit's tile among those of the launch, and the unit's among those of the tile."""
        number = unit * self.layout.blocks + self.machine.block(0)
        return number // self.layout.units, number % self.layout.units

    # The warpgroup that loads.
    def load(self) -> None:
        """Copy all chunks of all units."""
        machine, layout, pipe, work = self.machine, self.layout, self.pipe, self.work()
        warp = machine.thread % WARPGROUP // WARP
        gatherer = warp - (_WARPS - GATHERERS)
        # What warps copy themselves is shown a chunk later.
        late = 1 if layout.copies_itself else 0

        def one(unit: Value, entry: _Entry) -> _Entry:
            part, following = self.place(unit)[1], _Entry.load(self.inputs, self.place(unit + 1)[0] + work.start)
            with machine.when(gatherer >= 0):
                self._find_rows(unit, entry, gatherer)
            output = entry.expert * layout.weight.outputs + part * layout.unit_outputs

            def of_chunk(chunk: Value, _: None) -> None:
                number = unit * layout.chunks + chunk
                stage = pipe.acquire(number)
                with machine.when(warp == 0):
                    self._copy_tiles(number, chunk, output, entry.first)
                with machine.when(gatherer >= 0):
                    if layout.copies_itself:
                        self.copy_rows(unit, chunk, stage, gatherer)
                        machine.close_copies()
                        machine.wait_copies(pending=late)
                        self._fence()
                    self._show(number - late, number >= late)

            machine.loop(layout.chunks, of_chunk)
            return following

        machine.loop(work.units, one, work.first)
        if late:
            with machine.when(gatherer >= 0):
                machine.wait_copies()
                self._fence()
                self._show(work.units * layout.chunks - 1, work.units > 0)

    def _fence(self) -> None:
        """Show products the rows that warps copied."""
        if self.layout.gathers:
            self.machine.fence_shared()

    def _show(self, number: Value, where: Value) -> None:
        """Say that this warp has filled its part of a chunk's stage."""
        self.pipe.full.copy(number.maximum(0) % self.layout.stages).arrive(where)

    def _copy_tiles(self, number: Value, chunk: Value, output: Value, first: Value) -> None:
        """Start the copies of a chunk's codes, of adjacent rows of x, and with the first chunk that has them of scales.

        Args:
          number: of the chunk, among all of the block.
          chunk: its number in the unit.
          output: the unit's first, among those of all experts.
          first: row of x, if rows are adjacent.
        """
        machine, layout = self.machine, self.layout
        stage, full = number % layout.stages, self.pipe.full
        slot = number // layout.scaled_chunks % layout.scale_slots
        copies, of_scales = [], []
        for box in range(BOXES):
            row = output + box * layout.second
            copies.append(
                TileCopy(
                    source=self.inputs.codes,
                    row=row,
                    column=chunk * layout.row_bytes,
                    to=self.codes.address_of(stage, box, 0, 0),
                    rows=BOX,
                    row_bytes=layout.row_bytes,
                    swizzle=layout.row_bytes,
                )
            )
            of_scales.append(
                TileCopy(
                    source=self.inputs.scales,
                    row=row,
                    column=chunk // layout.scaled_chunks * SCALE_BYTES,
                    to=self.scales.address_of(slot, box, 0, 0),
                    rows=BOX,
                    row_bytes=SCALE_BYTES,
                    swizzle=0,
                )
            )
        for quarter in range(0 if layout.gathers else layout.quarters):
            copies.append(
                TileCopy(
                    source=self.inputs.x,
                    row=first,
                    column=chunk * layout.inputs + quarter * layout.tile_inputs,
                    to=self.x.copy(stage * layout.quarters + quarter).offset,
                    rows=layout.rows,
                    row_bytes=TILE_BYTES,
                )
            )
        with machine.when(chunk % layout.scaled_chunks == 0):
            full.copy(stage).fill(*of_scales, *copies)
        with machine.when(chunk % layout.scaled_chunks != 0):
            full.copy(stage).fill(*copies)

    def _find_rows(self, unit: Value, entry: _Entry, gatherer: Value) -> None:
        """Leave in the table what is known of this warp's rows of a unit."""
        machine, layout, inputs, epilogue = self.machine, self.layout, self.inputs, self.layout.epilogue
        slot, mine = unit % layout.table_slots, layout.rows // GATHERERS
        none = machine.constant(-1, "i32")
        for start in range(0, mine, WARP):
            n = machine.thread % WARP + start
            here: Condition = True if start + WARP <= mine else n < mine
            row = gatherer * mine + n
            place, there = entry.first + row, (row < entry.count) & here
            pair = inputs.pairs.load_int(place, where=there)
            if layout.copies_itself:
                source = pair // epilogue.routing.picks if layout.gathers else place
                self.sources.store_int(select(there, source, none), slot, row, where=here)
            self.targets.store_int(select(there, epilogue.target(place, pair), none), slot, row, where=here)
            if inputs.weights is not None:
                weight = inputs.weights.load_floats(pair, count=1, where=there)
                self.weights.store_floats(weight, slot, row, where=here)
        if layout.copies_itself:
            machine.barrier("warp")

    def copy_rows(self, unit: Value, chunk: Value, stage: Index, gatherer: Value) -> None:
        """Start to copy a chunk of this warp's rows of x, in words of 4 bytes.

        Eight lanes read adjacent words of a quarter. So a warp reads whole sectors, and writes to all banks.
        """
        machine, layout, x = self.machine, self.layout, self.inputs.x
        quarter, number = machine.thread % WARP // _EIGHT, machine.thread % _EIGHT
        mine, tile = layout.rows // GATHERERS, self.x.copy(stage * layout.quarters)
        first = x.address + machine.widen(chunk * (layout.inputs * 2) + quarter * 64 + number * 4)

        def some(start: Index, count: int) -> None:
            rows = [gatherer * mine + start * _EIGHT + n for n in range(count)]
            sources = [self.sources.load_int(unit % layout.table_slots, row) for row in rows]
            for row, source in zip(rows, sources, strict=True):
                address = first + machine.widen(source) * (x.shape[1] * x.dtype.itemsize)
                to = row * TILE_BYTES + (number ^ row % _EIGHT) * _UNIT + quarter * 4 + tile.offset
                for n in range(layout.quarters):
                    at = address + (n // 2 * (2 * HALF) + n % 2 * 32)
                    machine.copy_async(to + n * tile.size, at, source >= 0, size=4)

        if mine <= _EIGHT:
            some(0, mine)
        else:
            machine.loop(mine // _EIGHT, lambda start, _: some(start, _EIGHT))

    # Those that multiply.
    def lane(self, thread: Value) -> Lane:
        """Return which codes a lane multiplies, by its number in the block."""
        layout = self.layout
        warpgroup, warp = thread // WARPGROUP, thread % WARPGROUP // WARP
        eighth, place = thread % WARP // _QUAD, thread % _QUAD
        # Adjacent lanes of a product's column of lanes read rows of codes that are in other banks.
        if layout.row_bytes == 128:
            of_warp, distance = eighth % 2 * 4 + eighth // 2, 8
            swizzled = place ^ of_warp
        else:
            of_warp, distance = eighth, 4
            swizzled = place ^ of_warp // 2
        row = warpgroup * (layout.parts * _PART_ROWS) + warp * _EIGHT + of_warp
        at = row * layout.row_bytes + swizzled * _UNIT
        return Lane(place=place, of_warp=of_warp, distance=distance, row=row, at=at)

    def multiply(self, out: Buffer) -> None:
        """Multiply all units of the block."""
        machine, layout, pipe = self.machine, self.layout, self.pipe
        mine = self.lane(machine.thread)
        place, row, at = mine.place, mine.row, mine.at

        def codes_of(stage: Index, half: int) -> list[list[list[Value]]]:
            """Load the codes of a half of a chunk: of each part the words of both outputs."""
            start = self.codes.address_of(stage, 0, 0, 0) + (at ^ half * 64 if half else at)
            return [
                [
                    machine.load_shared(start + (box * BOX + part * _PART_ROWS) * layout.row_bytes, _UNIT)
                    for box in range(BOXES)
                ]
                for part in range(layout.parts)
            ]

        def factors_of(number: Value, half: int) -> list[list[Value]]:
            slot = number // layout.scaled_chunks % layout.scale_slots
            byte = number % layout.scaled_chunks * (layout.inputs // SCALE_INPUTS) + place + half * _QUAD
            return [
                [factor_of(self.scales.load_int(slot, box, row + part * _PART_ROWS, byte)) for box in range(BOXES)]
                for part in range(layout.parts)
            ]

        def one(unit: Value, _: None) -> None:
            def of_chunk(chunk: Value, carry: tuple[list[list[Value]], list[Value]]) -> Any:
                sums, held = carry
                number = unit * layout.chunks + chunk
                stage = pipe.wait(number)
                is_first = True
                for half in range(layout.halves):
                    codes, factors = codes_of(stage, half), factors_of(number, half)
                    for quarter in range(2):
                        right = self.x.copy(stage * layout.quarters + (2 * half + quarter)).k_major()
                        for part in range(layout.parts):
                            words = self._operand(codes[part], factors[part], quarter)
                            sums = list(sums)
                            sums[part] = machine.wgmma(sums[part], words, right, columns=layout.rows, dtype="bf16")
                            machine.wgmma_wait([], pending=1)
                            machine.hold(held)  # no register of an operand is used again before
                            held = words
                            if is_first:
                                pipe.release((number - 1).maximum(0), where=chunk > 0)
                                is_first = False
                return sums, held

            zero, nothing = machine.constant(0.0, "f32"), machine.constant(0, "i32")
            sums = [[zero] * (layout.rows // 2)] * layout.parts
            sums, held = machine.loop(layout.chunks, of_chunk, (sums, [nothing] * (4 * _STEP_WORDS)))
            sums = [machine.wgmma_wait(each) for each in sums]
            machine.hold(held)
            pipe.release(unit * layout.chunks + (layout.chunks - 1))
            sums = [[value * 2.0**_LESS for value in of_part] for of_part in sums]
            self.store(unit, mine, sums, out)

        machine.loop(self.work().units, one)

    def _operand(self, codes: list[list[Value]], factors: list[Value], quarter: int) -> list[Value]:
        """Return a quarter of two outputs' words as the left operand of four steps."""
        machine, of_quarter = self.machine, slice(2 * quarter, 2 * quarter + 2)
        one, other = (
            widen(machine, words[of_quarter], factor, interleaved=self.layout.weight.interleaved)
            for words, factor in zip(codes, factors, strict=True)
        )
        return [word for n in range(0, len(one), 2) for word in (one[n], other[n], one[n + 1], other[n + 1])]

    def store(self, unit: Value, mine: Lane, sums: list[list[Value]], out: Any) -> None:
        """Store what is made of a unit's sums."""
        slot, (_, number) = unit % self.layout.table_slots, self.place(unit)
        self.store_at(slot, number * self.layout.unit_outputs, mine, sums, self.targets[slot].load_int, out)

    def store_at(
        self,
        slot: Value,
        output: Value,
        mine: Lane,
        sums: list[list[Value]],
        row_of: Callable[[Value], Value],
        out: Any,
    ) -> None:
        """Store what is made of a unit's sums anywhere.

        Args:
          slot: of what is known of the unit's rows.
          output: where the unit's first output is in a row of ``out``.
          mine: the outputs of this lane.
          sums: of each part.
          row_of: returns the row of ``out`` for a row of the tile, below 0 for none.
          out: as for ``ExpertEpilogue.store``.
        """
        machine, layout = self.machine, self.layout
        column, is_odd = machine.thread % _QUAD * 2, mine.of_warp % 2 == 1
        odd = machine.select(is_odd, machine.constant(1, "i32"), machine.constant(0, "i32"))
        rows = []
        for first in range(0, layout.rows, _EIGHT):
            target = row_of(column + odd + first)
            weights = [] if self.inputs.weights is None else self.weights.load_floats(slot, column + first, count=2)
            rows.append((target, weights))
        for part, of_part in enumerate(sums):
            pairs = PairSums(
                machine,
                of_part,
                output + mine.row + part * _PART_ROWS,
                layout.second,
                is_odd,
                mine.distance,
            )
            layout.epilogue.store(pairs, rows, out)
