"""Rows of x in shared memory, as the right operand of products, in the order in which lanes hold the weight.

A lane holds 16 adjacent bytes of each half of a chunk (``weights``). They enter the steps of a product 8 bytes of the
operand at a time: 4 in the first half of the step's inputs and 4 in the second. So the inputs of a step are not
adjacent ones, and rows of x are stored in that order. Operand rows have it already.

Where products round x to E4M3, those of few rows do it while they store it here. Those of many rows, which read x again
for each tile of outputs, take rows that were rounded before (``rounding``).
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Condition, Index, Value
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products.split import Split
from pallas_kernels.products.weights import HALVES, QUAD
from pallas_kernels.rounding import rounded

LOADED = 8  # bf16 that a lane loads at once
# Loads that are in flight together: of a block, and of a lane; of that, the share where rounding takes registers too.
# Beside the sums there are fewer registers for them in blocks of many lanes.
_AT_ONCE, _MOST_AT_ONCE, _SHARE_OF_ROUNDED, _BESIDE_SUMS = 8192, 16, 4, 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """What a lane loads at once."""

    line: Value  # row, among those of the block
    unit: Value  # which ``LOADED`` inputs of a chunk
    chunk: Value  # among those that are stored
    inside: Condition


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activations:
    """Some rows of x for some chunks of the inputs: a tile [columns, inputs of a chunk] for each."""

    machine: TensorCores
    x: Buffer  # bf16 [M, inputs of all groups]
    is_ordered: bool  # whether x are operand rows
    tiles: Tile  # a copy per chunk
    scales: Shared | None  # f32 [chunks, columns], of rows that are rounded to FP8
    columns: int  # rows of x, a multiple of 8
    inputs: int  # of a chunk
    parts: int  # of the block's inputs
    part_inputs: int
    lanes: int  # of the block
    row: Value  # first row of x
    first: Value  # first input

    @classmethod
    def take(
        cls,
        machine: TensorCores,
        rows: Buffer | OperandRows,
        at: tuple[Value, Value],
        *,
        columns: int,
        inputs: int,
        segment: int,
        split: Split,
        rounding: str,
    ) -> Activations:
        """Take shared memory for ``segment`` chunks of each part of a block's inputs.

        ``at`` is the first row and the first input.
        """
        is_rounded = rounding == "fp8"
        return cls(
            machine=machine,
            x=rows.values if isinstance(rows, OperandRows) else rows,
            is_ordered=isinstance(rows, OperandRows),
            tiles=Tile.take(machine, columns, inputs if is_rounded else 2 * inputs, copies=split.parts * segment),
            scales=Shared.take(machine, (split.parts * segment, columns), "f32") if is_rounded else None,
            columns=columns,
            inputs=inputs,
            parts=split.parts,
            part_inputs=split.chunks * inputs,
            lanes=split.warpgroups * WARPGROUP,
            row=at[0],
            first=at[1],
        )

    @staticmethod
    def shared_bytes(columns: int, inputs: int, chunks: int, rounding: str) -> int:
        return chunks * columns * (inputs + 4 if rounding == "fp8" else 2 * inputs)

    def stage(self, start: int, chunks: int) -> None:
        """Load ``chunks`` chunks of each part, from number ``start`` on, and store them.

        To be followed by a barrier of the block.
        """
        total = self.parts * chunks * self.columns * (self.inputs // LOADED)
        at_once = min(_AT_ONCE // self.lanes, _MOST_AT_ONCE)
        if self.scales is not None:
            at_once //= _SHARE_OF_ROUNDED
        if start and self.lanes > 2 * WARPGROUP:
            at_once = _BESIDE_SUMS
        rounds = -(-total // (at_once * self.lanes))
        at_once = -(-total // (rounds * self.lanes))

        def some(i: Value, _: None) -> None:
            numbers = [(i * at_once + j) * self.lanes + self.machine.thread for j in range(at_once)]
            is_full = total == rounds * at_once * self.lanes
            places = [self._place(n, True if is_full else n < total) for n in numbers]
            loaded = []
            for place in places:
                line = place.line + self.row
                part, chunk = place.chunk // chunks, place.chunk % chunks
                at = self.first + part * self.part_inputs + (chunk + start) * self.inputs + place.unit * LOADED
                where = place.inside & (line < self.x.shape[0])
                loaded.append(self.x.load_words(line, at, count=LOADED, where=where))
            for place, words in zip(places, loaded, strict=True):
                codes = words if self.scales is None else self._rounded(words, self.scales[place.chunk], place)
                self._put(self.tiles.copy(place.chunk), place, codes)

        self.machine.loop(rounds, some)
        self.machine.fence_shared()

    def _place(self, n: Value, inside: Condition) -> _Place:
        """Return what load number n of the block loads."""
        units = self.inputs // LOADED
        # Adjacent lanes that load adjacent parts of a row. Rounding needs a whole chunk of the row in them. Otherwise
        # they are eight, because then all words that a warp stores are in different banks of shared memory.
        together = 8 if self.scales is None else units
        part = n // (together * self.columns)
        unit = n % together + part % (units // together) * together
        return _Place(n // together % self.columns, unit, part // (units // together), inside)

    def _put(self, tile: Tile, place: _Place, words: list[Value]) -> None:
        """Store what a lane has loaded, in words of bf16 or FP8."""
        if self.is_ordered:
            self.machine.store_shared(tile.unit(place.line, place.unit), words, 16, place.inside)
            return
        # Of the words of half a chunk, each lane of a quad holds four adjacent ones. Word j of the four enters step
        # j // 2, in the first or second half of the step's inputs.
        per_half = tile.row_bytes // 4 // HALVES
        of_lane = per_half // QUAD
        for e, word in enumerate(words):
            number = place.unit * len(words) + e
            half, lane, j = number // per_half, number % per_half // of_lane, number % of_lane
            self.machine.store_shared(tile.unit(place.line, half * of_lane + j) + lane * 4, [word], 4, place.inside)

    def _rounded(self, words: list[Value], scales: Shared, place: _Place) -> list[Value]:
        """Round to E4M3 with a scale per row and chunk, which is stored."""
        codes, scale = rounded(self.machine, self.inputs // LOADED, words)
        scales.store_floats([scale], place.line, where=place.inside & (place.unit == 0))
        return codes

    def tile(self, number: Index) -> Tile:
        """Return the tile of a chunk, by its number among those of all parts that are stored."""
        return self.tiles.copy(number)
