"""Barriers in shared memory (mbarriers), at which warps wait for other warps, for copies and for products.

    full = Barrier.take(machine, warps=4, copies=stages)
    free = Barrier.take(machine, warps=8, copies=stages)
    init_barriers(full, free)                                 # all lanes of the block, before any role

    full.copy(stage).arrive()                                 # the warps that fill a stage
    full.copy(i % stages).wait(i // stages & 1)               # the warps that read it

A barrier goes through phases, numbered from 0. A phase ends, and the next begins, when a given number of warps have
arrived. They are warps of the barrier's own block, or with the scope "cluster" of all blocks of its cluster. Before the
first of those arrives, there is to be a barrier of the cluster after ``init_barriers``.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.machine import Scope
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, TileCopy
from pallas_kernels.language.values import Condition, Index, Step, Value

_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Barrier:
    """A barrier, or several adjacent ones, of which ``copy`` selects one."""

    machine: TensorCores
    offset: Index  # bytes from the beginning of the block's shared memory
    warps: int  # number of warps that arrive in a phase; each commit of a product counts as one
    copies: int
    scope: Scope = "block"  # or "cluster": those that have these warps

    @classmethod
    def take(cls, machine: TensorCores, warps: int, copies: int = 1, scope: Scope = "block") -> Barrier:
        """Allocate shared memory for ``copies`` barriers whose phases end when ``warps`` warps have arrived."""
        offset = machine.take_shared(_BYTES * copies, alignment=_BYTES)
        return cls(machine=machine, offset=offset, warps=warps, copies=copies, scope=scope)

    def copy(self, number: Index) -> Barrier:
        """Return the ``number``-th of the copies. Raises IndexError for an int that is out of range."""
        if isinstance(number, int) and not 0 <= number < self.copies:
            raise IndexError(f"copy {number} of {self.copies} barriers")
        return dataclasses.replace(self, offset=number * _BYTES + self.offset, copies=1)

    @property
    def address(self) -> Value:
        """The barrier's i32 byte offset in the block's shared memory."""
        if self.copies != 1:
            raise TypeError(f"one of {self.copies} barriers is meant: write barrier.copy(number)")
        return self.offset if isinstance(self.offset, Value) else self.machine.constant(self.offset, "i32")

    def arrive(self, where: Condition = True) -> None:
        """Arrive, as all lanes of a warp together. What they did before is visible to those who wait for this phase.

        ``where`` must be the same in all lanes of a warp. The barrier's scope is "block".
        """
        if self.scope != "block":
            raise TypeError(f"a barrier of scope {self.scope!r}: write barrier.arrive_in_cluster(blocks)")
        self.machine.arrive(self.address, where)

    def arrive_in_cluster(self, blocks: int) -> None:
        """Arrive at this barrier of all ``blocks`` of the cluster, as all lanes of a warp. Its scope is "cluster"."""
        if self.scope != "cluster":
            raise TypeError(f"a barrier of scope {self.scope!r}: write barrier.arrive()")
        self.machine.arrive_in_cluster(self.address, blocks)

    def expect(self, size: Index) -> None:
        """Arrive, as all lanes of a warp together. The phase does not end before ``size`` bytes have been sent to it.

        Other blocks send them (``send_floats``), before or after that.
        """
        self.machine.expect(self.address, self.machine.constant(size, "i32") if isinstance(size, int) else size)

    def send_floats(self, values: Step, to: Shared, *index: Index, rank: int, where: Condition = True) -> None:
        """Store one, two or four values in an f32 array of the block with that rank in the cluster.

        ``to`` and this barrier are meant in that block: their places in shared memory are the same in all blocks. Who
        waits there for the phase that expects the values sees them. That is faster than a store with ``rank`` and a
        barrier of the cluster, at which each lane first waits until all that it stored has arrived.
        """
        if to.dtype != "f32" or self.scope != "cluster":
            raise TypeError(f"f32 and a barrier of the cluster are meant, got {to.dtype} and one of a {self.scope}")
        words = [self.machine.bits(value) for value in values]
        self.machine.send_shared(to.address_of(*index), words, self.address, where, rank=rank)

    def fill(self, *copies: TileCopy) -> None:
        """Start copies from device memory, and arrive, as all lanes of a warp together.

        The phase does not end before they are complete. Who waits for the phase sees the copies, and so do products
        that it starts.
        """
        self.machine.fill(self.address, copies)

    def wait(self, parity: Index) -> None:
        """Wait until the phase with this parity (0 for the first, 1 for the second, 0 for the third, ...) has ended.

        Before the first phase has ended, a wait for parity 1 returns at once. Thus a role that waits for room which is
        free at the start begins with parity 1.

        Raises:
          ValueError: an int that is not 0 or 1. The simulator raises SimulationError for such an i32.
        """
        if isinstance(parity, int) and parity not in (0, 1):
            raise ValueError(f"a phase has the parity 0 or 1, got {parity}: write barrier.wait(count & 1)")
        parity = self.machine.constant(parity, "i32") if isinstance(parity, int) else parity
        self.machine.wait(self.address, parity, self.scope)


def init_barriers(*barriers: Barrier) -> None:
    """Initialise barriers, with all their copies. All lanes of the block call it once, before any role."""
    counts = []
    for barrier in barriers:
        if not isinstance(barrier.offset, int):
            raise TypeError("init_barriers takes what Barrier.take returned, all copies at once")
        counts += [(barrier.offset + _BYTES * i, barrier.warps) for i in range(barrier.copies)]
    barriers[0].machine.init_barriers(counts)
