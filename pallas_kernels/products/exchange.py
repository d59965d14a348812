"""Adding up the sums of all parts of the inputs, in the order of the parts.

The parts of a tile are warpgroups of a block, or of the blocks of a cluster. The warpgroup of each part adds up some
eights of the columns, and gets the sums of these from the others. Blocks send theirs to each other's barriers.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Value
from pallas_kernels.products.split import Split

_EIGHT_BYTES = WARPGROUP * VECTOR * 4  # of a warpgroup's sums of eight columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """The sums that a block receives, for all of its tiles."""

    machine: TensorCores
    split: Split
    eights: int  # of columns
    received: Shared  # f32 [parts, warpgroups, eights, lanes, 4]
    sent: Barrier | None  # by other blocks of the cluster, if there are any

    @classmethod
    def at(cls, machine: TensorCores, split: Split, eights: int, arena: int, sent: Barrier | None) -> Exchange:
        """The exchange of so many eights of columns in shared memory from ``arena`` on."""
        shape = split.all_parts, split.warpgroups, owned_eights(split, eights), WARPGROUP, VECTOR
        return cls(
            machine=machine, split=split, eights=eights, received=Shared(machine, arena, shape, "f32"), sent=sent
        )

    def expected_bytes(self) -> Value:
        """Return how much the other blocks send to this one."""
        split, of_block = self.split, self.received.shape[2] * self.split.parts
        mine = (self.machine.rank * -of_block + self.eights).maximum(0).minimum(of_block)
        return mine * ((split.cluster - 1) * split.warpgroups * _EIGHT_BYTES)

    def add(self, sums: list[list[Value]], part: Value) -> list[list[Value]]:
        """Return the sums of all parts for the eights of this warpgroup, which has those of a part of its block."""
        machine, split, (_, _, owned, *_) = self.machine, self.split, self.received.shape
        warpgroup, lane = machine.thread // WARPGROUP, machine.thread % WARPGROUP
        number = part_number(machine, split, part)

        def give(to_rank: int, *, is_mine: bool) -> None:
            of_rank = owned * split.parts
            for n, values in enumerate(sums[to_rank * of_rank : (to_rank + 1) * of_rank]):
                place = number, warpgroup - part + n // owned, n % owned, lane, 0
                if is_mine or self.sent is None:
                    self.received.store_floats(values, *place)
                else:
                    self.sent.send_floats(values, self.received, *place, rank=to_rank)

        # Every block begins with its successor, so that no block gets the sums of all others at once.
        for mine in range(split.cluster):
            with machine.when(True if split.cluster == 1 else machine.rank == mine):
                for further in range(1, split.cluster + 1):
                    to_rank = (mine + further) % split.cluster
                    give(to_rank, is_mine=to_rank == mine)
        if split.parts > 1 or self.eights < owned * split.all_parts:
            machine.barrier("block")  # for sums of other warpgroups, or for whatever is there where there are none
        if self.sent is not None:
            self.sent.wait(0)
        added = []
        for n in range(owned):
            parts = [self.received.load_floats(each, warpgroup, n, lane, 0) for each in range(split.all_parts)]
            added.append(functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], parts))
        return added


def owned_eights(split: Split, eights: int) -> int:
    """Return how many eights of columns the warpgroup of each part adds up and stores."""
    return -(-eights // split.all_parts)


def received_bytes(split: Split, eights: int) -> int:
    """Return the bytes of the sums of all parts that a block adds up."""
    return (
        0 if split.all_parts == 1 else split.all_parts * split.warpgroups * owned_eights(split, eights) * _EIGHT_BYTES
    )


def part_number(machine: TensorCores, split: Split, part: Value) -> Value:
    """Return the number of a block's part of the inputs among those of the cluster."""
    rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
    return rank * split.parts + part
