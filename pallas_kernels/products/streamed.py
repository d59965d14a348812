"""Rows of x as they are, in shared memory, copied chunk by chunk beside the weight.

They are the right operand of products, in the order in which lanes hold the weight (``activations``). There, adjacent
words of x belong to different units of 16 bytes. So each lane copies words of 4 bytes: a warp copies 128 bytes of a
row, and writes each word to another bank of shared memory.
"""

from __future__ import annotations

import dataclasses
import itertools

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Index, Value
from pallas_kernels.language.tensor_cores import ATOM_BYTES, ATOM_ROWS, TensorCores, Tile
from pallas_kernels.products.weights import HALVES, QUAD

_WORD = 4  # bytes
_ATOM = ATOM_ROWS * ATOM_BYTES


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
    to: tuple[Value, ...]  # where it stores that in a tile, and the same for rows four further if it copies them too
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
        atoms = tiles.row_bytes // ATOM_BYTES
        warps = min(warpgroups * (WARPGROUP // WARP), ATOM_ROWS * atoms)
        warps = 1 << warps.bit_length() - 1
        warp, lane = machine.thread // WARP, machine.thread % WARP
        in_atom, atom = warp % min(warps, ATOM_ROWS), warp // ATOM_ROWS
        # The word's half of a chunk, the lane of a quad that holds the weight beside it, and which of that lane's.
        per_half = tiles.row_bytes // _WORD // HALVES
        of_lane = per_half // QUAD
        half, quad_lane, word = lane // per_half, lane % per_half // of_lane, lane % of_lane
        unit = half * of_lane + word
        row = at[0] + in_atom
        to = tuple(
            atom * _ATOM + (in_atom + further) * ATOM_BYTES + (unit ^ (in_atom + further)) * 16 + quad_lane * _WORD
            for further in range(0, ATOM_ROWS, min(warps, ATOM_ROWS))
        )
        return cls(
            machine=machine,
            tiles=tiles,
            columns=columns,
            of_row=x.shape[1] * size,
            total=x.shape[0],
            row=row,
            address=x.address_of((row, at[1])) + machine.widen(atom * ATOM_BYTES + lane * _WORD),
            to=to,
            warps=warps,
        )

    def copy(self, chunk: Index, slot: Index, where: Value | bool) -> None:
        """Start to copy a chunk to a slot. To be followed by ``close_copies``."""
        machine, tile = self.machine, self.tiles
        number = machine.constant(chunk, "i32") if isinstance(chunk, int) else chunk
        address = self.address + machine.widen(number) * tile.row_bytes
        to = [self.tiles.copy(slot).offset + offset for offset in self.to]
        stride = ATOM_ROWS // len(self.to)
        atoms = tile.row_bytes // ATOM_BYTES
        per_warp = range(0, atoms, max(1, self.warps // ATOM_ROWS))
        with machine.when(machine.thread < self.warps * WARP):
            for eight, atom in itertools.product(range(self.columns // ATOM_ROWS), per_warp):
                for n, first in enumerate(to):
                    further = eight * ATOM_ROWS + n * stride
                    source = address + (further * self.of_row + atom * ATOM_BYTES)
                    at = first + (eight * ATOM_ROWS * tile.row_bytes + atom * _ATOM)
                    there = where if self.total % self.columns == 0 else where & (self.row + further < self.total)
                    machine.copy_async(at, source, there, size=_WORD)

    def tile(self, slot: Index) -> Tile:
        """Return the tile in a slot."""
        return self.tiles.copy(slot)
