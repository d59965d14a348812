"""What a kernel of one architecture is to the call that launches it."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.scores.fp4 import Fp4
from pallas_kernels.scores.inputs import ScoreInputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(abc.ABC):
    """A kernel, and how it shares the work of a call. Each architecture has a subclass, in a module of its own."""

    warpgroups: int  # per block
    blocks: int  # of a launch, at most

    @classmethod
    @abc.abstractmethod
    def fastest(cls, fp4: type[Fp4], tokens: int, tiles: int) -> Self:
        """For a call of so many tokens per request and tiles of all requests, at most."""

    @abc.abstractmethod
    def shared_bytes(self, fp4: type[Fp4], tokens: int) -> int:
        """Shared memory that a block takes."""

    @abc.abstractmethod
    def body(self, machine: Any, inputs: ScoreInputs, out: Buffer, *, fp4: type[Fp4], blocks: int) -> None:
        """Score a block's share. Grid (blocks,).

        Args:
          machine: one with the tensor cores of the architecture.
          inputs: buffers.
          out: f32 [B, T, max_entries].
        """
