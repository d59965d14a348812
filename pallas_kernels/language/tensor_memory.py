"""Operations for kernels on Blackwell, besides ``tensor_cores``: products whose sums are kept in tensor memory.

    Accumulator    an f32 matrix of 64 rows in tensor memory
    TensorMemory   the machine

One lane starts a product, which then runs asynchronously. ``commit`` makes a barrier count its completion. Accesses to
the same tensor memory by different lanes must also be ordered by a barrier, together with fences for tensor memory:

    before      load_tensor, store_tensor, fence_tensor("before"), arrive
                mma, commit
    after       wait, fence_tensor("after"), then any of load_tensor, store_tensor, mma

Products that one lane starts into the same accumulator run in order without this.
"""

from __future__ import annotations

import abc
import dataclasses
from contextlib import AbstractContextManager
from typing import Literal

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.tensor_cores import DType, Operand, TensorCores
from pallas_kernels.language.values import Condition, Index, Value

ROWS = 64  # rows of an accumulator
MAX_COLUMNS = 512  # columns of a block's tensor memory, which has 128 rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """f32 [64, columns] in tensor memory. Row r is stored in its row 32 (r // 16) + 16 half + r % 16.

    Each warp can access 32 rows, of which a product uses 16. So a second accumulator, with the other ``half``, can use
    the same columns.
    """

    column: Index  # the first column, among those that ``tensor_memory`` allocated
    columns: int  # a multiple of 8; for loads and stores a power of two, or a multiple of 64
    half: Index = 0  # 0 or 1

    def part(self, first: Index, columns: int) -> Accumulator:
        """Return columns [first, first + columns) of the accumulator."""
        return dataclasses.replace(self, column=first + self.column, columns=columns)


class TensorMemory(TensorCores):
    """A machine with Blackwell's tensor cores. Everything but ``wgmma`` is as on Hopper."""

    @abc.abstractmethod
    def tensor_memory(self, columns: int) -> AbstractContextManager[None]:
        """Allocate columns of tensor memory for the block: a power of two from 32 to 512. They are freed on exit.

            with machine.tensor_memory(128):
                machine.roles(...)

        All lanes of the block must enter, outside of roles. The columns are uninitialised. Blocks that share a
        multiprocessor share its columns, and wait here until enough are free.
        """

    @abc.abstractmethod
    def one_lane(self) -> AbstractContextManager[None]:
        """Run what is inside in one lane of each warp, always the same: a ``when`` for ``mma`` and ``commit``."""

    @abc.abstractmethod
    def mma(self, into: Accumulator, a: Operand, b: Operand, *, accumulate: Condition, dtype: DType = "f16") -> None:
        """Start into = a b^T, or into += a b^T where ``accumulate`` holds.

        To be called inside ``one_lane``, by one warp.

        The product runs asynchronously. A barrier that ``commit`` arrives at signals its completion.

        Args:
          into: f32 [64, columns], with at most 256 columns.
          a: [64, K] in shared memory.
          b: [columns, K] in shared memory.
          accumulate: whether to add to ``into``.
          dtype: of both operands. Only those of 16 bits may be transposed.

        Raises:
          TypeError: the operands differ in K, or the instruction does not support them.
        """

    def commit(self, barrier: Barrier) -> None:
        """Let the barrier count one more warp when all products that this lane has started are complete.

        To be called inside ``one_lane``, which selects the same lane each time.
        """
        self._commit(barrier.address)

    @abc.abstractmethod
    def _commit(self, barrier: Value) -> None: ...

    @abc.abstractmethod
    def fence_tensor(self, side: Literal["before", "after"]) -> None:
        """Order accesses to tensor memory.

        "before" is used before an arrive, and orders this lane's earlier accesses. "after" is used after a wait, and
        orders its later ones.
        """

    # Called by all lanes of a warpgroup. Values are spread over them like the result of ``wgmma``.
    @abc.abstractmethod
    def load_tensor(self, source: Accumulator) -> list[Value]:
        """Load this lane's columns / 2 values of f32, in the order of ``wgmma``'s result. They can be used at once."""

    @abc.abstractmethod
    def store_tensor(self, into: Accumulator, values: list[Value]) -> None:
        """Store this lane's columns / 2 values of f32, in the order of ``wgmma``'s result."""
