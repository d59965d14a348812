"""Barriers in shared memory, at which warps wait for other warps, for copies and for products.

    full = Barrier.take(machine, warps=4, copies=stages)
    free = Barrier.take(machine, warps=8, copies=stages)
    init_barriers(full, free)                                 # all lanes of the block, before any role

    full.copy(stage).arrive()                                 # who fills a stage
    full.copy(i % stages).wait(i // stages & 1)               # who reads it

A barrier goes through phases, numbered from 0: one ends when so many warps have arrived, and the next one begins.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.machine import Condition, Index, Value
from pallas_kernels.language.tensor_cores import TensorCores

_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Barrier:
    """A barrier, or several neighbouring ones of which ``copy`` picks one."""

    machine: TensorCores
    offset: Index  # bytes from the beginning of the block's shared memory
    warps: int  # that arrive in a phase; each commit of a product counts as one
    copies: int

    @classmethod
    def take(cls, machine: TensorCores, warps: int, copies: int = 1) -> Barrier:
        """Fresh shared memory for ``copies`` barriers, whose phases end when so many warps have arrived."""
        offset = machine.take_shared(_BYTES * copies, alignment=_BYTES)
        return cls(machine=machine, offset=offset, warps=warps, copies=copies)

    def copy(self, number: Index) -> Barrier:
        """The ``number``-th of the copies. IndexError for an int that is none of theirs."""
        if isinstance(number, int) and not 0 <= number < self.copies:
            raise IndexError(f"copy {number} of {self.copies} barriers")
        return dataclasses.replace(self, offset=number * _BYTES + self.offset, copies=1)

    @property
    def address(self) -> Value:
        """i32 byte offset in the block's shared memory."""
        if self.copies != 1:
            raise TypeError(f"one of {self.copies} barriers is meant: write barrier.copy(number)")
        return self.offset if isinstance(self.offset, Value) else self.machine.constant(self.offset, "i32")

    def arrive(self, where: Condition = True) -> None:
        """All lanes of a warp arrive as one: what they did before is seen by those who then wait.

        ``where`` is the same in all lanes of a warp.
        """
        self.machine.arrive(self.address, where)

    def wait(self, parity: Index) -> None:
        """Until the phase of this parity (0 for the first, 1 for the second, ...) has ended.

        Before the first phase has ended, that of parity 1 counts as ended: who waits for room that is free at first
        begins with 1.
        """
        self.machine.wait(self.address, self.machine.constant(parity, "i32") if isinstance(parity, int) else parity)


def init_barriers(*barriers: Barrier) -> None:
    """Make barriers ready, with all their copies. All lanes of the block call it once, before any role."""
    counts = []
    for barrier in barriers:
        if not isinstance(barrier.offset, int):
            raise TypeError("barriers are made ready as they were taken, all copies at once")
        counts += [(barrier.offset + _BYTES * i, barrier.warps) for i in range(barrier.copies)]
    barriers[0].machine.init_barriers(counts)
