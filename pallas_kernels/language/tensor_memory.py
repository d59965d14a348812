"""What a kernel on Blackwell needs besides ``tensor_cores``: products whose sums stay in tensor memory.

    Accumulator    an f32 matrix of 64 rows in tensor memory
    TensorMemory   the machine

One lane asks for a product, which runs beside all lanes; ``commit`` makes a barrier count its end. Lanes that use the
same tensor memory order themselves by a barrier too, with fences of its own:

    before      load_tensor, store_tensor, fence_tensor("before"), arrive
                mma, commit
    after       wait, fence_tensor("after"), then any of load_tensor, store_tensor, mma

Products of one lane with one accumulator run in turn without this.
"""

from __future__ import annotations

import abc
import dataclasses
from contextlib import AbstractContextManager
from typing import Literal

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.machine import Condition, Index, Value
from pallas_kernels.language.tensor_cores import DType, Operand, TensorCores

ROWS = 64  # of an accumulator
MAX_COLUMNS = 512  # of a block's tensor memory; it has 128 rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """f32 [64, columns] in tensor memory. Row r lies in its row 32 (r // 16) + 16 half + r % 16.

    A warp can reach 32 rows, of which a product uses 16: another one, of the other half, may have the same columns.
    """

    column: Index  # the first one, of the columns that ``tensor_memory`` gave the block
    columns: int  # a multiple of 8; of a transfer a power of two, or a multiple of 64
    half: Index = 0  # 0 or 1

    def part(self, first: Index, columns: int) -> Accumulator:
        """Columns [first, first + columns) of it."""
        return dataclasses.replace(self, column=first + self.column, columns=columns)


class TensorMemory(TensorCores):
    """A machine with Blackwell's tensor cores: all but ``wgmma`` is as on Hopper."""

    @abc.abstractmethod
    def tensor_memory(self, columns: int) -> AbstractContextManager[None]:
        """Inside, the block has so many columns: a power of two from 32 to 512. All lanes of the block, in no role.

            with machine.tensor_memory(128):
                machine.roles(...)

        Nothing is in them at first. Blocks that share a multiprocessor share its columns, and wait here for each other.
        """

    @abc.abstractmethod
    def one_lane(self) -> AbstractContextManager[None]:
        """What is inside runs in one lane of each warp, always the same: a ``when`` for ``mma`` and ``commit``."""

    @abc.abstractmethod
    def mma(self, into: Accumulator, a: Operand, b: Operand, *, accumulate: Condition, dtype: DType = "f16") -> None:
        """into = a b^T, or into += a b^T where ``accumulate`` holds. Inside ``one_lane``, of one warp.

        It runs beside all lanes: its end is known by a barrier at which ``commit`` arrives.

        Args:
          into: f32 [64, columns], at most 256.
          a: [64, K] in shared memory.
          b: [columns, K] in shared memory.
          dtype: of both operands. Only f16 may be transposed.

        Raises:
          TypeError: operands of different depth, or such as the instruction does not take.
        """

    def commit(self, barrier: Barrier) -> None:
        """The barrier counts one more warp when all products are done that its lane has asked for.

        Inside ``one_lane``, which chooses the same lane each time.
        """
        self._commit(barrier.address)

    @abc.abstractmethod
    def _commit(self, barrier: Value) -> None: ...

    @abc.abstractmethod
    def fence_tensor(self, side: Literal["before", "after"]) -> None:
        """Before an arrive: what this lane did in tensor memory comes first. After a wait: what it does comes then."""

    # By all lanes of a warpgroup, spread over them as the result of ``wgmma``.
    @abc.abstractmethod
    def load_tensor(self, source: Accumulator) -> list[Value]:
        """This lane's columns / 2 values of f32, in the order of ``wgmma``'s result; they are there at once."""

    @abc.abstractmethod
    def store_tensor(self, into: Accumulator, values: list[Value]) -> None:
        """This lane's columns / 2 values of f32, in the order of ``wgmma``'s result."""
