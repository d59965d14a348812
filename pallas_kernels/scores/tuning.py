"""The interface between ``indexer_scores`` and the kernel of an architecture."""

from __future__ import annotations

import abc
import dataclasses
from typing import Self

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.tensor_memory import TensorMemory
from pallas_kernels.scores.fp4 import Fp4
from pallas_kernels.scores.inputs import ScoreInputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(abc.ABC):
    """A kernel, and how it divides the work of a call. Each architecture has a subclass in a module of its own."""

    warpgroups: int  # warpgroups per block
    blocks: int  # the largest number of blocks in a launch

    @classmethod
    @abc.abstractmethod
    def fastest(cls, fp4: type[Fp4], tokens: int, tiles: int) -> Self:
        """Return the fastest tuning for so many tokens per request, and at most so many tiles of all requests."""

    @abc.abstractmethod
    def shared_bytes(self, fp4: type[Fp4], tokens: int) -> int:
        """Return the shared memory that a block needs."""

    @abc.abstractmethod
    def body(
        self, machine: TensorMemory, inputs: ScoreInputs[Buffer], out: Buffer, *, fp4: type[Fp4], blocks: int
    ) -> None:
        """Score a block's share of the tiles. The grid is (blocks,).

        Args:
          machine: one with the tensor cores of the architecture.
          inputs: buffers.
          out: f32 [B, T, max_entries].
          fp4: the format of queries and keys.
          blocks: number of blocks in the launch.
        """
