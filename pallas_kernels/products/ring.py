"""Chunks of a block's tiles in shared memory: copying them ahead of time, and who may read or overwrite them.

The chunks of all tiles of a block are numbered in the order in which they are multiplied. Chunk n is in stage n %
stages. A warp of the second warpgroup starts the copies, when both warpgroups have left the stage. So the first
warpgroup may be ahead of the second by nearly all stages, and one can multiply while the other stores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP, WARPGROUP, Value
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.tiling import LANES, Tiling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """The stages of a block."""

    machine: TensorCores
    full: Barrier  # per stage: the chunk is there
    free: Barrier  # per stage: nobody reads it any more
    stages: int
    total: Value  # chunks of all tiles
    fill: Callable[[Value, Value, Barrier], None]  # starts the copies of a chunk, by its number and its stage

    @classmethod
    def take(
        cls,
        machine: TensorCores,
        tiling: Tiling,
        total: Value,
        fill: Callable[[Value, Value, Barrier], None],
    ) -> Ring:
        """Take and initialise the barriers."""
        full = Barrier.take(machine, 1, copies=tiling.stages)
        free = Barrier.take(machine, LANES // WARP, copies=tiling.stages)
        init_barriers(full, free)
        return cls(machine=machine, full=full, free=free, stages=tiling.stages, total=total, fill=fill)

    def begin(self) -> None:
        """Start to copy the first chunks."""
        for n in range(self.stages - 1):
            self._fill(self.machine.constant(n, "i32"))

    def wait(self, chunk: Value) -> Value:
        """Wait for a chunk, and return its stage."""
        stage = chunk % self.stages
        self.full.copy(stage).wait(chunk // self.stages & 1)
        return stage

    def advance(self, chunk: Value) -> None:
        """Start to copy the chunk that takes the stage of the one before this."""
        self._fill(chunk + (self.stages - 1))

    def leave(self, stage: Value) -> None:
        """Say that this warp no longer reads a stage."""
        self.free.copy(stage).arrive()

    def _fill(self, chunk: Value) -> None:
        mine = self.machine.thread // WARP == WARPGROUP // WARP
        with self.machine.when(mine & (chunk < self.total)):
            stage = chunk % self.stages
            self.free.copy(stage).wait((chunk // self.stages & 1) ^ 1)
            self.fill(chunk, stage, self.full.copy(stage))
