"""Rows of x as they are, in shared memory, copied chunk by chunk beside the weight.

They are the right operand of products, in the order in which lanes hold the weight (``activations``). There, adjacent
words of x belong to different units of 16 bytes. So each lane copies words of 4 bytes: a warp copies 128 bytes of a
row, and writes each word to another bank of shared memory.
"""

from __future__ import annotations

import dataclasses
import itertools

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Index, Value
from pallas_kernels.products.weights import HALVES, QUAD

_WORD = 4  # bytes
_LINE = WARP * _WORD  # bytes of a row that a warp copies at once
_UNIT = 16
_ROWS = 8  # after which a tile's units are permuted in the same way again
_FURTHER = _ROWS * _LINE  # bytes of a tile from a line to the next one of the same row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedRows:
    """Some rows of x for some chunks of a block's inputs: a tile [columns, inputs of a chunk] for each."""

    machine: TensorCores
    tiles: Tile  # a copy per slot
    columns: int  # rows of x in the block
    of_row: int  # bytes of a row of all of x
    total: int  # rows of all of x
    row: Value  # this lane's first row of x
    address: Value  # of its first word
    to: tuple[Value, ...]  # where it stores that in the first slot, and, if it copies them too, that of four rows on
    warps: int  # that copy

    @classmethod
    def take(
        cls,
        machine: TensorCores,
        x: Buffer,
        at: tuple[Value, Value],
        *,
        columns: int,
        inputs: int,
        slots: int,
        warpgroups: int,
    ) -> StreamedRows:
        """Take shared memory for ``slots`` chunks of ``inputs`` each. ``at`` is the first row and the first input."""
        size = x.dtype.itemsize
        tiles = Tile.take(machine, columns, inputs * size, copies=slots)
        warps = min(warpgroups * (WARPGROUP // WARP), _ROWS * (tiles.row_bytes // _LINE))
        warps = 1 << warps.bit_length() - 1
        warp, lane = machine.thread // WARP, machine.thread % WARP
        of_eight, line = warp % min(warps, _ROWS), warp // _ROWS
        # The word's half of a chunk, the lane of a quad that holds the weight beside it, and which of that lane's.
        per_half = tiles.row_bytes // _WORD // HALVES
        of_lane = per_half // QUAD
        half, quad_lane, word = lane // per_half, lane % per_half // of_lane, lane % of_lane
        unit = half * of_lane + word + line * (_LINE // _UNIT)
        row = at[0] + of_eight
        further = range(0, _ROWS, min(warps, _ROWS))
        return cls(
            machine=machine,
            tiles=tiles,
            columns=columns,
            of_row=x.shape[1] * size,
            total=x.shape[0],
            row=row,
            address=x.address_of((row, at[1])) + machine.widen(line * _LINE + lane * _WORD),
            to=tuple(tiles.unit(of_eight + rows, unit) + quad_lane * _WORD for rows in further),
            warps=warps,
        )

    def copy(self, chunk: Index, slot: Index, where: Value | bool) -> None:
        """Start to copy a chunk to a slot. To be followed by ``close_copies``."""
        machine, tile = self.machine, self.tiles
        number = machine.constant(chunk, "i32") if isinstance(chunk, int) else chunk
        address = self.address + machine.widen(number) * tile.row_bytes
        to = [offset + slot * tile.size for offset in self.to]
        lines = range(0, tile.row_bytes // _LINE, max(1, self.warps // _ROWS))
        with machine.when(machine.thread < self.warps * WARP):
            for eight, line in itertools.product(range(self.columns // _ROWS), lines):
                for n, first in enumerate(to):
                    further = eight * _ROWS + n * (_ROWS // len(to))
                    source = address + (further * self.of_row + line * _LINE)
                    at = first + (eight * _ROWS * tile.row_bytes + line * _FURTHER)
                    there = where if self.total % self.columns == 0 else where & (self.row + further < self.total)
                    machine.copy_async(at, source, there, size=_WORD)

    def tile(self, slot: Index) -> Tile:
        """Return the tile in a slot."""
        return self.tiles.copy(slot)
