"""Floats that the blocks of a grid send each other through device memory, without a barrier of the grid.

    mail = Mailbox.open(machine, (blocks, 4))
    mail.send_floats([a, b], block, 0)
    machine.barrier("block")
    mail.close()
    one, other = mail.receive_floats([(block - 1, 0), (block - 1, 2)], count=2)

Each float travels in one access together with the number of its launch, for which its receiver waits. So a float is
there as soon as it arrives. At a barrier of the grid, a block first waits until others see all that it stored, then
until all have said so, and then loads; that takes two to three times as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Condition, Index, Step, Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mailbox:
    """An array of f32 in device memory, of which each element is sent at most once in a launch.

    It is sent and received alone, or with its neighbour along the last axis, the first of both at an even index.

    All blocks of the launch must run at once, and a device must not run two launches of one kernel at once, as for
    ``machine.barrier("grid")``. The memory is the kernel's own: 8 bytes for each float, for as long as it is loaded.
    """

    machine: Machine
    shape: tuple[int, ...]
    address: Value  # i64, of the first float
    launch: Value  # i32, the number of this launch

    @classmethod
    def open(cls, machine: Machine, shape: tuple[int, ...]) -> Mailbox:
        """Return the launch's mailbox, of which it has one. All lanes of all blocks call it, and ``close`` later."""
        if shape[-1] % 2:
            raise TypeError(f"{shape[-1]} floats along the last axis of a mailbox: write an even number")
        address, launch = machine.open_mail(math.prod(shape))
        return cls(machine=machine, shape=shape, address=address, launch=launch)

    def close(self) -> None:
        """Say that this block knows the number of the launch: all its lanes, after a barrier of the block.

        It may send and receive afterwards.
        """
        self.machine.close_mail()

    def send_floats(self, values: Step, *index: Index, where: Condition = True) -> None:
        """Send one float or two, of which the index is that of the first."""
        self.machine.send(self._at(index), [self.machine.bits(value) for value in values], self.launch, where)

    def receive_floats(
        self, places: Sequence[Sequence[Index]], *, count: int, where: Sequence[Condition] | None = None
    ) -> list[Step]:
        """Return one float or two of each place, which has an index, once they have arrived.

        All are asked for before any is waited for. Where the condition of a place does not hold, they are 0. All lanes
        of a warp call it.
        """
        addresses, conditions = [self._at(index) for index in places], [True] * len(places) if where is None else where
        found = self.machine.receive(addresses, count, self.launch, conditions)
        return [[self.machine.from_bits(word) for word in words] for words in found]

    def _at(self, index: Sequence[Index]) -> Value:
        if len(index) != len(self.shape):
            raise TypeError(f"a mailbox of shape {self.shape} takes {len(self.shape)} indices, got {len(index)}")
        address, known = self.address, 0
        for axis, i in enumerate(index):
            stride = math.prod(self.shape[axis + 1 :]) * MAIL_BYTES
            if isinstance(i, Value):
                address = address + self.machine.widen(i) * stride
            else:
                known += i * stride
        return address + known if known else address


MAIL_BYTES = 8  # of a float, with the number of its launch
