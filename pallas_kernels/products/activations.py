"""x in shared memory as the right operand of products, in the order in which lanes hold the weight's inputs.

A lane has 16 adjacent bytes of a row of the weight, because that is what device memory is fastest for, and they enter
several steps of a product. So the inputs of a step are not adjacent ones, and rows of x are stored in the same order:
of the inputs that a quad holds, step i takes numbers i e to (i + 1) e - 1 of each of its lanes, with e = 4.

Chunks of x are staged in a ring, by all lanes of the block together, two chunks ahead of the products. A chunk is
complete when all warps have arrived at its barrier. A warp arrives for chunk i + 2 when its products with chunk i are
complete. So whoever has waited for chunk i knows that chunk i - 2 is free, and may store chunk i + 2 in its place.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Index, Value
from pallas_kernels.language.tensor_cores import TensorCores, Tile

RING, AHEAD = 4, 2  # chunks that have room; chunks that are staged before they are multiplied
_UNIT = 8  # bf16 that a lane loads at once


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Rows of x, bf16, in tiles [columns, inputs of a chunk]."""

    machine: TensorCores
    x: Buffer  # bf16 [M, inputs of all groups]
    tiles: Tile
    staged: Barrier  # per place of the ring
    columns: int  # rows of x in a product, a multiple of 8
    inputs: int  # of a chunk: 64 or 128
    chunks: int
    lanes: int  # of the block
    row: Value  # first row of x
    first: Value  # first input

    @classmethod
    def take(
        cls, x: Buffer, row: Value, first: Value, *, columns: int, inputs: int, chunks: int, warpgroups: int
    ) -> Activations:
        machine = x.machine
        staged = Barrier.take(machine, warpgroups * WARPGROUP // WARP, copies=RING)
        tiles = Tile.take(machine, columns, inputs * 2, copies=RING)
        return cls(machine, x, tiles, staged, columns, inputs, chunks, warpgroups * WARPGROUP, row, first)

    @staticmethod
    def shared_bytes(columns: int, inputs: int) -> int:
        return RING * columns * inputs * 2 + RING * 8

    def _places(self) -> list[tuple[Value, Value, Condition]]:
        """Return the row and the unit of each load of this lane, and whether there is one.

        Eight lanes read 128 adjacent bytes. They and three more rows are in different banks of shared memory.
        """
        units = self.inputs // _UNIT
        total, places = self.columns * units, []
        for start in range(0, total, self.lanes):
            n = self.machine.thread + start
            inside: Condition = True if start + self.lanes <= total else n < total
            rest = n // 8
            places.append((rest % self.columns, n % 8 + rest // self.columns * 8, inside))
        return places

    def load(self, chunk: Index) -> list[list[Value]]:
        """Start to load this lane's part of a chunk; zeros past the last one."""
        loaded = []
        for line, unit, inside in self._places():
            m = line + self.row
            where = inside & (m < self.x.shape[0]) & (chunk < self.chunks)
            loaded.append(self.x.load_words(m, self.first + chunk * self.inputs + unit * _UNIT, count=_UNIT, where=where))
        return loaded

    def store(self, chunk: Index, loaded: list[list[Value]]) -> None:
        """Store what ``load`` returned, and arrive."""
        machine, tile = self.machine, self.tiles.copy(chunk % RING)
        for (line, unit, inside), words in zip(self._places(), loaded, strict=True):
            for e, word in enumerate(words):
                if self.inputs == 128:
                    half, lane, step = unit // 8, unit % 8 // 2, unit % 2 * 2
                    place = half * 8 + step * 2 + e
                else:
                    half, lane = unit // 4, unit % 4
                    place = half * 4 + e
                machine.store_shared(tile.unit(line, place) + lane * 4, [word], 4, inside)
        machine.fence_shared()
        self.staged.copy(chunk % RING).arrive()

    def wait(self, chunk: Index) -> Tile:
        """Wait until a chunk is there. Return its tile."""
        self.staged.copy(chunk % RING).wait(chunk // RING & 1)
        return self.tiles.copy(chunk % RING)
