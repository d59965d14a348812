"""Queries of attention from the sums of a product whose outputs are heads: norm, rope and rounding to f16.

    q = f16(rope(sums / rms(sums)))       over the outputs of a head, for each row of x

A head has more outputs than a tile. The blocks of a cluster compute its parts at the same time, and tell each other
their sums of squares. Nobody waits for long: the blocks multiply as many inputs, and while one warpgroup of a block
waits, the other one multiplies.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer, add, fold
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Value, select

_TURNS = 2  # whose sums are in shared memory: a block may be a turn ahead of the one that reads them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a product's outputs, and what is done with them."""

    dim: int  # outputs of a head
    eps: float  # of the norm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Squares:
    """Sums of squares of a tile's rows, which the blocks of a cluster exchange. Each warpgroup has its own rows."""

    machine: TensorCores
    sums: Shared  # f32 [turns, blocks, rows]
    there: Barrier  # per warpgroup: the sums of all blocks

    @classmethod
    def take(cls, machine: TensorCores, blocks: int, rows: int, warpgroups: int) -> Squares:
        """Take shared memory, and initialise the barriers. All lanes of the cluster call it."""
        sums = Shared.take(machine, (_TURNS, blocks, rows), "f32")
        there = Barrier.take(machine, blocks * WARPGROUP // WARP, copies=warpgroups, scope="cluster")
        init_barriers(there)
        machine.barrier("cluster")
        return cls(machine=machine, sums=sums, there=there)

    @staticmethod
    def shared_bytes(blocks: int, rows: int, warpgroups: int) -> int:
        return _TURNS * blocks * rows * 4 + warpgroups * 8

    def totals(self, turn: Value, rows: list[Value], squares: list[Value]) -> list[Value]:
        """Add what all blocks have of some rows of the tile. The four lanes of a quad have the same rows."""
        machine, blocks = self.machine, self.sums.shape[1]
        slot, barrier = self.sums[turn % _TURNS], self.there.copy(machine.thread // WARPGROUP)
        for rank in range(blocks):
            for row, square in zip(rows, squares, strict=True):
                slot.store_floats([square], machine.rank, row, where=machine.thread % 4 == 0, rank=rank)
        barrier.arrive_in_cluster(blocks)
        barrier.wait(turn & 1)
        return [fold(add, [slot.load_floats(rank, row, count=1)[0] for rank in range(blocks)]) for row in rows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Angles:
    """Angles of a lane's rows, for the pairs of outputs that the lane has among the last ones of a head."""

    first: int  # of the lane's fours that is rotated
    here: Condition  # whether this block has the last outputs
    pairs: list[list[list[Value]]]  # cosine and sine for each row and four

    @classmethod
    def load(
        cls, machine: TensorCores, table: Buffer, rows: list[tuple[Value, Condition]], fours: int, here: Condition
    ) -> Angles:
        """Load angles of rows, each with whether it exists, from a table f32 [rows, cosines and then sines]."""
        pairs = table.shape[1] // 2
        first = fours - pairs // 4
        column = machine.thread % 4
        loaded = [
            [
                [
                    table.load_floats(row, column + (4 * n + start), count=1, where=here & there)[0]
                    for start in (0, pairs)
                ]
                for n in range(fours - first)
            ]
            for row, there in rows
        ]
        return cls(first=first, here=here, pairs=loaded)

    def rotate(self, row: int, four: int, pair: list[Value]) -> list[Value]:
        """Rotate two adjacent outputs of a row, given the number of their four."""
        if four < self.first:
            return pair
        (a, b), (cos, sin) = pair, self.pairs[row][four - self.first]
        return [select(self.here, x, old) for x, old in zip((a * cos - b * sin, b * cos + a * sin), pair, strict=True)]
