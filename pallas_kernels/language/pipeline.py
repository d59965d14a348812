"""Pipelines: stages in shared memory that some warps fill while others read those that were filled before.

    pipe = Pipeline.take(machine, stages=3, consumers=4)     # four warps read

    stage = pipe.acquire(i)                                  # the warp that fills: wait until stage i % 3 is free
    pipe.commit(i, a[stage].copy_from(x, row, i * 64))       # and start the copies

    stage = pipe.wait(i)                                     # the warps that read: wait for the copies
    total = product(total, a[stage], b[stage]).wait()
    pipe.release(i)                                          # and give the stage back

Uses are numbered from 0, in the order in which both sides go through them. Which stage a use has, and which phase of
the stage's barriers it waits for, follows from its number.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.tensor_cores import TensorCores, TileCopy
from pallas_kernels.language.values import Condition, Index, Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """One use of a stage: it is acquired, committed, waited for and released, in this order.

    The first two are called by the warps that fill the stage, the others by those that read it.
    """

    stage: Index
    full: Barrier
    free: Barrier
    parity: Index  # of the phase of ``full`` that this use ends

    def acquire(self) -> None:
        """Wait until all warps that read the stage have released its use before this one."""
        self.free.wait(self.parity ^ 1)

    def commit(self, *copies: TileCopy, where: Condition = True) -> None:
        """Start copies to the stage, or without any say that it is filled, as all lanes of a warp together.

        What lanes have stored themselves must be followed by ``fence_shared`` if a product reads it. With ``where``,
        the same in all lanes of a warp, only some warps say that it is filled.
        """
        if copies:
            assert where is True, "copies are started by the warps that are in a `when`"
            self.full.fill(*copies)
        else:
            self.full.arrive(where)

    def wait(self) -> None:
        """Wait until the stage is filled."""
        self.full.wait(self.parity)

    def release(self, where: Condition = True) -> None:
        """Say that this warp no longer reads the stage. A product that reads it must have been waited for."""
        self.free.arrive(where)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """Stages, and for each of them the barriers at which it is filled and free."""

    full: Barrier  # copies: stages
    free: Barrier  # copies: stages

    @classmethod
    def take(cls, machine: TensorCores, stages: int, *, consumers: int, producers: int = 1) -> Pipeline:
        """Allocate and initialise barriers, 16 bytes of shared memory for each stage.

        All lanes of the block call this, before any role. A body with further barriers can instead make
        ``Pipeline(full=, free=)`` of barriers that it initialises all at once.

        Args:
          machine: the machine.
          stages: number of stages.
          consumers: number of warps that release each use.
          producers: number of warps that commit each use. One is enough to start copies.
        """
        full = Barrier.take(machine, producers, copies=stages)
        free = Barrier.take(machine, consumers, copies=stages)
        init_barriers(full, free)
        return cls(full=full, free=free)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.full.copies

    def use(self, i: Value) -> Use:
        """Return the i-th use of all, of stages in turn."""
        return self.use_of(i % self.stages, i // self.stages)

    def use_of(self, stage: Index, number: Index) -> Use:
        """Return the use of a stage with this number among those of that stage, for stages that are not in turn."""
        return Use(stage=stage, full=self.full.copy(stage), free=self.free.copy(stage), parity=number & 1)

    def acquire(self, i: Value) -> Index:
        """Wait until the stage of the i-th use is free, and return its number."""
        use = self.use(i)
        use.acquire()
        return use.stage

    def commit(self, i: Value, *copies: TileCopy) -> None:
        """Start copies to the stage of the i-th use, or without any say that it is filled."""
        self.use(i).commit(*copies)

    def wait(self, i: Value) -> Index:
        """Wait until the stage of the i-th use is filled, and return its number."""
        use = self.use(i)
        use.wait()
        return use.stage

    def release(self, i: Value, where: Condition = True) -> None:
        """Say that this warp no longer reads the stage of the i-th use."""
        self.use(i).release(where)

    def release_before(self, i: Value) -> None:
        """Release the use before the i-th, if there is one: after a wait with ``pending=1`` its product is complete."""
        self.release((i - 1).maximum(0), where=i > 0)
