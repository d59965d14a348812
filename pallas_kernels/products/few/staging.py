"""Rows of x in shared memory, as the right operand of products, in the order in which lanes hold the weight.

A lane holds 16 adjacent codes of each half of a chunk (``weights``). They enter the steps of a product 8 bytes of the
operand at a time: 4 in the first half of the step's inputs and 4 in the second. So the inputs of a step are not
adjacent ones, and rows of x are stored in that order (``ByLanes``). Operand rows have it already. A weight without
scales needs no widening, and lanes hold it in the order of its inputs (``AsGiven``).

A block stores several chunks of x before it multiplies (``StagedRows``), or copies chunk by chunk beside the weight
(``StreamedRows``), as many bytes at a time as that ``Order`` says. A warp writes each of its words to another bank of
shared memory.

Where products round x to E4M3, those of few rows do it while they store it here. Those of many rows, which read x again
for each tile of outputs, take rows that were rounded before.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from pallas_kernels.activations import OperandRows, PlainRows, rounded
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import UNIT, TensorCores, Tile
from pallas_kernels.language.values import Condition, Index, Value
from pallas_kernels.products.problem import RowsSpec, WeightSpec
from pallas_kernels.products.weights import HALVES, QUAD

_ROWS = 8  # after which a tile's units are permuted in the same way again
_MOST_LANES = 512  # that copy chunk by chunk
LOADED = 8  # bf16 that a lane loads at once
_WORD = 4  # bytes
# Loads that are in flight together: of a block, and of a lane; of that, the share where rounding takes registers too.
# Beside the sums there are fewer registers for them in blocks of many lanes.
_AT_ONCE, _MOST_AT_ONCE, _SHARE_OF_ROUNDED, _BESIDE_SUMS = 8192, 16, 4, 4


class Order(abc.ABC):
    """An order of the numbers of a chunk of a row."""

    copied_bytes: ClassVar[int]  # that a lane copies to a tile at once

    @staticmethod
    @abc.abstractmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        """Return where a tile has the ``number``-th ``copied_bytes`` of a row's chunk."""

    @staticmethod
    @abc.abstractmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        """Store adjacent words of a row's chunk, by the number of such a unit. They may be of codes."""


class AsGiven(Order):
    """The order that the row has."""

    copied_bytes = UNIT

    @staticmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        return tile.unit(line, number)

    @staticmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        assert len(words) * _WORD == UNIT
        tile.machine.store_shared(tile.unit(line, unit), words, UNIT, where)


class ByLanes(Order):
    """The order for rows that have their own one, beside codes of which lanes hold 16 adjacent ones."""

    copied_bytes = _WORD  # adjacent words belong to different units of 16 bytes

    @staticmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        # It is in one half of the chunk. There, each lane of a quad holds several adjacent words of the weight.
        per_half = tile.row_bytes // _WORD // HALVES
        of_lane = per_half // QUAD
        half, lane, j = number // per_half, number % per_half // of_lane, number % of_lane
        return tile.unit(line, half * of_lane + j) + lane * _WORD

    @staticmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        for e, word in enumerate(words):
            place = ByLanes.place(tile, line, unit * len(words) + e)
            tile.machine.store_shared(place, [word], _WORD, where)


def order_of(rows: RowsSpec, weight: WeightSpec) -> type[Order]:
    """Return the order of rows beside a weight."""
    return AsGiven if rows.kind is OperandRows or weight.block is None else ByLanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """What a block has of a chunk: [columns, inputs]."""

    columns: int  # rows of x, a multiple of 8
    inputs: int  # of the chunk
    order: type[Order]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """What a lane loads at once."""

    line: Value  # row, among those of the block
    unit: Value  # which ``LOADED`` inputs of a chunk
    chunk: Value  # among those that are stored
    inside: Condition


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedRows:
    """Some rows of x for some chunks of the inputs: a tile [columns, inputs of a chunk] for each."""

    machine: TensorCores
    x: PlainRows | OperandRows  # bf16 [M, inputs of all groups]
    of_chunk: RowTile
    tiles: Tile  # a copy per chunk
    scales: Shared | None  # f32 [chunks, columns], of rows that are rounded to FP8
    parts: int  # of the block's inputs
    part_inputs: int
    lanes: int  # of the block
    row: Value  # first row of x
    first: Value  # first input

    @classmethod
    def take(
        cls,
        machine: TensorCores,
        x: PlainRows | OperandRows,
        at: tuple[Value, Value],
        *,
        tile: RowTile,
        segment: int,
        parts: tuple[int, int],
        warpgroups: int,
        rounding: str,
    ) -> StagedRows:
        """Take shared memory for ``segment`` chunks of each part of a block's inputs.

        ``at`` is the first row and the first input, and ``parts`` how many there are, and the chunks of each.
        """
        columns, inputs, is_rounded, (count, chunks) = tile.columns, tile.inputs, rounding == "fp8", parts
        return cls(
            machine=machine,
            x=x,
            of_chunk=tile,
            tiles=Tile.take(machine, columns, inputs if is_rounded else 2 * inputs, copies=count * segment),
            scales=Shared.take(machine, (count * segment, columns), "f32") if is_rounded else None,
            parts=count,
            part_inputs=chunks * inputs,
            lanes=warpgroups * WARPGROUP,
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
        total = self.parts * chunks * self.of_chunk.columns * (self.of_chunk.inputs // LOADED)
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
                at = self.first + part * self.part_inputs + (chunk + start) * self.of_chunk.inputs + place.unit * LOADED
                where = place.inside & (line < self.x.shape[0])
                loaded.append(self.x.values.load_words(line, at, count=LOADED, where=where))
            for place, words in zip(places, loaded, strict=True):
                codes = words if self.scales is None else self._rounded(words, self.scales[place.chunk], place)
                self.of_chunk.order.put(self.tiles.copy(place.chunk), place.line, place.unit, codes, place.inside)

        self.machine.loop(rounds, some)
        self.machine.fence_shared()

    def _place(self, n: Value, inside: Condition) -> _Place:
        """Return what load number n of the block loads."""
        units = self.of_chunk.inputs // LOADED
        # Adjacent lanes that load adjacent parts of a row. Rounding needs a whole chunk of the row in them. Otherwise
        # they are eight, because then all words that a warp stores are in different banks of shared memory.
        together = 8 if self.scales is None else units
        part = n // (together * self.of_chunk.columns)
        unit = n % together + part % (units // together) * together
        return _Place(n // together % self.of_chunk.columns, unit, part // (units // together), inside)

    def _rounded(self, words: list[Value], scales: Shared, place: _Place) -> list[Value]:
        """Round to E4M3 with a scale per row and chunk, which is stored."""
        codes, scale = rounded(self.machine, self.of_chunk.inputs // LOADED, words)
        scales.store_floats([scale], place.line, where=place.inside & (place.unit == 0))
        return codes

    def tile(self, number: Index) -> Tile:
        """Return the tile of a chunk, by its number among those of all parts that are stored."""
        return self.tiles.copy(number)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedRows:
    """Some rows of x for some chunks of a block's inputs: a tile [columns, inputs of a chunk] for each."""

    machine: TensorCores
    tiles: Tile  # a copy per slot
    size: int  # bytes that a lane copies at once
    lanes: int  # that copy
    together: int  # rows that they copy at once
    columns: int  # rows of x in the block
    of_row: int  # bytes of a row of all of x
    total: int  # rows of all of x
    row: Value  # this lane's first row of x
    address: Value  # of what it copies of that row
    to: tuple[Value, ...]  # where that goes in the first slot; then the same of its next rows, up to eight

    @classmethod
    def take(
        cls,
        machine: TensorCores,
        rows: PlainRows | OperandRows,
        at: tuple[Value, Value],
        *,
        tile: RowTile,
        slots: int,
        warpgroups: int,
    ) -> StreamedRows:
        """Take shared memory for ``slots`` chunks. Arguments are as for ``StagedRows``."""
        x, columns, size = rows.values, tile.columns, tile.order.copied_bytes
        tiles = Tile.take(machine, columns, tile.inputs * x.dtype.itemsize, copies=slots)
        of_row = tiles.row_bytes // size  # lanes that copy a row
        lanes = 1 << min(warpgroups * WARPGROUP, _MOST_LANES).bit_length() - 1
        while columns % (lanes // of_row):
            lanes //= 2
        line, number, together = machine.thread // of_row, machine.thread % of_row, lanes // of_row
        lines = [line + further for further in range(0, _ROWS, together)]
        return cls(
            machine=machine,
            tiles=tiles,
            size=size,
            lanes=lanes,
            together=together,
            columns=columns,
            of_row=x.shape[1] * x.dtype.itemsize,
            total=x.shape[0],
            row=at[0] + line,
            address=x.address_of((at[0] + line, at[1])) + machine.widen(number * size),
            to=tuple(tile.order.place(tiles, line, number) for line in lines),
        )

    def copy(self, chunk: Index, slot: Index, where: Value | bool) -> None:
        """Start to copy a chunk to a slot. To be followed by ``close_copies``."""
        machine, tile = self.machine, self.tiles
        number = machine.constant(chunk, "i32") if isinstance(chunk, int) else chunk
        address = self.address + machine.widen(number) * tile.row_bytes
        to = [offset + slot * tile.size for offset in self.to]
        with machine.when(machine.thread < self.lanes):
            for n, first in enumerate(range(0, self.columns, self.together)):
                atoms = first // _ROWS * _ROWS
                there = where if self.total % self.columns == 0 else where & (self.row + first < self.total)
                source = address + first * self.of_row
                machine.copy_async(to[n % len(to)] + atoms * tile.row_bytes, source, there, size=self.size)

    def tile(self, slot: Index) -> Tile:
        """Return the tile in a slot."""
        return self.tiles.copy(slot)
