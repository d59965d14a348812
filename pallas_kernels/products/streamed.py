"""Rows of x as they are, in shared memory, copied chunk by chunk beside the weight.

They are the right operand of products, in the order in which lanes hold the weight (``activations``). Operand rows have
that order already, and are copied 16 bytes at a time. Of others, adjacent words belong to different units of 16 bytes.
So each lane copies words of 4 bytes, and a warp writes each of its words to another bank of shared memory.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import UNIT, TensorCores, Tile
from pallas_kernels.language.values import Index, Value
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products.weights import HALVES, QUAD

_WORD = 4  # bytes
_ROWS = 8  # after which a tile's units are permuted in the same way again
_MOST_LANES = 512  # that copy


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
        rows: Buffer | OperandRows,
        at: tuple[Value, Value],
        *,
        columns: int,
        inputs: int,
        slots: int,
        warpgroups: int,
    ) -> StreamedRows:
        """Take shared memory for ``slots`` chunks of ``inputs`` each. ``at`` is the first row and the first input."""
        is_ordered = isinstance(rows, OperandRows)
        x, size = (rows.values, UNIT) if isinstance(rows, OperandRows) else (rows, _WORD)
        tiles = Tile.take(machine, columns, inputs * x.dtype.itemsize, copies=slots)
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
            to=tuple(tiles.unit(line, number) if is_ordered else _place(tiles, line, number) for line in lines),
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


def _place(tile: Tile, line: Value, word: Value) -> Value:
    """Return the place of a word of a row's chunk."""
    # It is in one half of the chunk. There, each lane of a quad holds several adjacent words of the weight.
    per_half = tile.row_bytes // _WORD // HALVES
    of_lane = per_half // QUAD
    half, lane, j = word // per_half, word % per_half // of_lane, word % of_lane
    return tile.unit(line, half * of_lane + j) + lane * _WORD
