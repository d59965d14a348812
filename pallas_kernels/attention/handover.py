"""Weights of a tile, handed from one multiplying warpgroup to the other.

A lane with the same number in either warpgroup holds the same part of a product of [64 heads, 64 keys]. So each pair of
lanes has a place in shared memory of its own, and what is read from it is the left operand of a product as it is. With
the weights goes a number for each head.

The warpgroups take turns in giving, and each takes what the other gave before it gives again. Thus one place is enough.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention.block import CONSUMERS, HEADS, WARPS
from pallas_kernels.attention.keys import KEYS
from pallas_kernels.attention.softmax import QUAD
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.language.values import Index, Value

_WORDS = KEYS // 4  # words of two f16 weights that a lane holds
_LOADS, _LOAD_WORDS = _WORDS // 4, 4
BYTES = WARPGROUP * 4 * _WORDS + HEADS * 4 + 8 * CONSUMERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """Shared memory for what one warpgroup gives the other, and barriers to wait for it."""

    weights: Shared  # i32 [loads, lanes, 4], words of two f16
    of_heads: Shared  # f32 [HEADS]: the peak that the weights are relative to, or their sum
    given: Barrier  # per warpgroup: it has given

    @classmethod
    def take(cls, machine: TensorCores) -> Handover:
        """Allocate the memory."""
        return cls(
            weights=Shared.take(machine, (_LOADS, WARPGROUP, _LOAD_WORDS), "i32"),
            of_heads=Shared.take(machine, (HEADS,), "f32"),
            given=Barrier.take(machine, WARPS, copies=CONSUMERS),
        )

    def give(self, source: int, of_rows: list[Value], weights: list[Value]) -> None:
        """Give as warpgroup ``source``.

        Args:
          source: the warpgroup.
          of_rows: a number for each of a lane's two rows, the same in the four lanes of a quad.
          weights: words of two f16. Without them only the numbers are given.
        """
        machine = self.given.machine
        lane, row = machine.thread % WARPGROUP, product_row(machine)
        machine.barrier("warp")  # one lane of a quad overwrites a number that all four have read
        for n in range(0, len(weights), _LOAD_WORDS):
            self.weights.store_words(weights[n : n + _LOAD_WORDS], n // _LOAD_WORDS, lane, 0)
        for i, value in enumerate(of_rows):
            self.of_heads.store_floats([value], row + 8 * i, where=lane % QUAD == 0)
        self.given.copy(source).arrive()

    def wait(self, source: int, count: Index) -> None:
        """Wait until warpgroup ``source`` has given ``count`` + 1 times."""
        self.given.copy(source).wait(count & 1)

    def found_weights(self) -> list[Value]:
        """Return the weights that were given."""
        lane = self.given.machine.thread % WARPGROUP
        return [word for n in range(_LOADS) for word in self.weights.load_words(n, lane, 0, count=_LOAD_WORDS)]

    def found_of_rows(self) -> list[Value]:
        """Return the numbers that were given for the lane's two rows."""
        row = product_row(self.given.machine)
        return [self.of_heads.load_floats(row + 8 * i, count=1)[0] for i in range(2)]
