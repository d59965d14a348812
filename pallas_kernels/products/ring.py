"""Chunks of a block's tiles in shared memory: copying them ahead of time, and who may read or overwrite them.

The chunks of all tiles of a block are numbered in the order in which they are multiplied. Chunk n is in stage n %
stages. Every lane copies a part of each chunk. When its own part of a chunk has arrived, it says so, ``lead`` chunks
before it reads the chunk itself. So no warpgroup waits for the other one's present products, and while one converts or
stores, the other multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP, Value
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.tiling import LANES, Tiling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """The stages of a block."""

    machine: TensorCores
    full: Barrier  # per stage: all lanes' copies are there
    free: Barrier  # per stage: nobody reads it any more
    stages: int
    lead: int
    total: Value  # chunks of all tiles
    copy: Callable[[Value, Value], None]  # starts this lane's copies of a chunk, by its number and its stage

    @classmethod
    def take(cls, machine: TensorCores, tiling: Tiling, total: Value, copy: Callable[[Value, Value], None]) -> Ring:
        """Take and initialise the barriers."""
        full, free = (Barrier.take(machine, LANES // WARP, copies=tiling.stages) for _ in range(2))
        init_barriers(full, free)
        return cls(
            machine=machine,
            full=full,
            free=free,
            stages=tiling.stages,
            lead=min(tiling.lead, tiling.stages - 2),
            total=total,
            copy=copy,
        )

    def begin(self) -> None:
        """Start to copy the first chunks."""
        for n in range(self.stages - 1):
            self._copy(self.machine.constant(n, "i32"))
        for n in range(self.lead):
            self._announce(self.machine.constant(n, "i32"), pending=self.stages - 2 - n)

    def wait(self, chunk: Value) -> Value:
        """Wait for a chunk, and return its stage."""
        stage = chunk % self.stages
        self.full.copy(stage).wait(chunk // self.stages & 1)
        return stage

    def advance(self, chunk: Value) -> None:
        """Say which copies have arrived, and start to copy the chunk that takes the stage of the one before this."""
        self._announce(chunk + self.lead, pending=self.stages - 2 - self.lead)
        self._copy(chunk + (self.stages - 1))

    def leave(self, stage: Value) -> None:
        """Say that this warp no longer reads a stage."""
        self.free.copy(stage).arrive()

    def _copy(self, chunk: Value) -> None:
        with self.machine.when(chunk < self.total):
            stage = chunk % self.stages
            self.free.copy(stage).wait((chunk // self.stages & 1) ^ 1)
            self.copy(chunk, stage)
        self.machine.close_copies()

    def _announce(self, chunk: Value, pending: int) -> None:
        self.machine.wait_copies(pending=pending)
        self.machine.fence_shared()
        self.full.copy(chunk % self.stages).arrive(chunk < self.total)
