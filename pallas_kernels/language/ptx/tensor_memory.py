"""The machine of ``tensor_memory`` on Blackwell, in PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from jax._src.lib.mlir.dialects import gpu, nvvm  # pyright: ignore[reportPrivateImportUsage]

from pallas_kernels.language.checks import check_product
from pallas_kernels.language.kinds import Kind
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.ptx.lanes import vector
from pallas_kernels.language.ptx.tensor_cores import TensorCorePTX
from pallas_kernels.language.tensor_cores import DType, Operand
from pallas_kernels.language.tensor_memory import ROWS, Accumulator, TensorMemory
from pallas_kernels.language.values import Condition, Value

_VERSION = 1 << 14  # in the high half of a descriptor of shared memory
# The kind of an instruction, and its number for the dtype.
_KIND = {"f16": ("f16", 0), "bf16": ("f16", 1), "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1)}
_TRANSFER = 64  # the most columns per instruction


def instruction_descriptor(a_transposed: bool, b_transposed: bool, columns: int, dtype: DType) -> int:
    """Return the instruction descriptor of a product of 64 rows with f32 sums."""
    number = _KIND[dtype][1]
    operands = number << 7 | number << 10 | a_transposed << 15 | b_transposed << 16
    return 1 << 4 | operands | columns >> 3 << 17 | ROWS >> 4 << 24


class TensorMemoryPTX(TensorCorePTX, TensorMemory):
    """Emits for one lane. Products in tensor memory run on sm_100a."""

    @contextlib.contextmanager
    def tensor_memory(self, columns: int) -> Iterator[None]:
        place = self.constant(self.take_shared(4), "i32")
        first, count = self.thread < WARP, self.constant(columns, "i32")
        with self.when(first):
            text = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], $1;"
            self._asm(text, "r,r", [], self._shared + place, count, effects=True)
            self._asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "", [], effects=True)
        gpu.barrier()
        (self._tensor,) = self.load_shared(place, 4)
        yield
        self.fence_tensor("before")
        gpu.barrier()
        self.fence_tensor("after")
        with self.when(first):
            (address,) = self.load_shared(place, 4)  # loaded again, so that no register holds it in the roles
            text = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;"
            self._asm(text, "r,r", [], address, count, effects=True)

    def _place(self, accumulator: Accumulator) -> Value:
        """Return the address of an accumulator's first cell: the column in the low bits, the row from bit 16 on."""
        half = accumulator.half
        row = half * 16 << 16 if isinstance(half, Value) else self.constant(half * 16 << 16, "i32")
        return self._tensor + accumulator.column + row

    def one_lane(self) -> contextlib.AbstractContextManager[None]:
        # With any other condition, the compiler emits a loop over the operands of all lanes that might be active.
        return self.when(self._wrap("bool", nvvm.elect_sync()))

    def mma(self, into: Accumulator, a: Operand, b: Operand, *, accumulate: Condition, dtype: DType = "f16") -> None:
        check_product(a, b, into.columns, dtype)
        sums = self._where(accumulate)
        lines = [
            "{ .reg .b64 a, b; .reg .b32 shape, low; .reg .pred sums;",
            f"mov.b32 shape, {instruction_descriptor(a.transposed, b.transposed, into.columns, dtype)};",
            "setp.ne.s32 sums, $3, 0;",
        ]
        for step in range(len(a.steps)):
            if step == 1:
                lines.append("setp.eq.s32 sums, 0, 0;")
            for name, low, operand in (("a", "$1", a), ("b", "$2", b)):
                lines += self._step(name, low, operand, step, _VERSION)
            lines.append(f"tcgen05.mma.cta_group::1.kind::{_KIND[dtype][0]} [$0], a, b, shape, sums;")
        operands = [self._descriptor(operand) for operand in (a, b)]
        self._asm("\n".join([*lines, "}"]), "r,r,r,r", [], self._place(into), *operands, sums, effects=True)

    def _commit(self, barrier: Value) -> None:
        text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
        self._asm(text, "r", [], self._shared + barrier, effects=True)

    def fence_tensor(self, side: Literal["before", "after"]) -> None:
        self._asm(f"tcgen05.fence::{side}_thread_sync;", "", [], effects=True)

    def _transfers(self, accumulator: Accumulator, first: int, address: int, instruction: str) -> str:
        """Return PTX that moves a warp's 16 rows.

        Args:
          accumulator: what to move.
          first: number of the first register, in ``$first``.
          address: number of the address, in ``$address``.
          instruction: text with places for the shape and the registers.
        """
        columns = min(accumulator.columns, _TRANSFER)
        assert accumulator.columns % columns == 0, "columns are a multiple of those of an instruction"
        assert columns % 8 == 0, "columns go by eight"
        assert columns & (columns - 1) == 0, "an instruction's columns are a power of two"
        lines = ["{ .reg .b32 place;"]
        for start in range(0, accumulator.columns, columns):
            registers = vector(first + start // 2, columns // 2)
            lines.append(f"add.s32 place, ${address}, {start};")
            lines.append(instruction.format(shape=f"16x256b.x{columns // 8}.b32", registers=registers))
        return "\n".join(lines)

    def _warp_place(self, accumulator: Accumulator) -> Value:
        """Return ``_place`` for the rows that this lane's warp can access."""
        return self._place(accumulator) + (self.thread % WARPGROUP // WARP << 21)

    def load_tensor(self, source: Accumulator) -> list[Value]:
        count = source.columns // 2
        text = self._transfers(source, 0, count, "tcgen05.ld.sync.aligned.{shape} {registers}, [place];")
        # In one piece with the wait, because nothing may read a register in between.
        text += "\ntcgen05.wait::ld.sync.aligned; }"
        kinds: list[Kind] = ["i32"] * count
        words = self._asm(text, ",".join(["=&r"] * count + ["r"]), kinds, self._warp_place(source), effects=True)
        return [self.from_bits(word) for word in words]

    def store_tensor(self, into: Accumulator, values: list[Value]) -> None:
        count = into.columns // 2
        assert len(values) == count, (len(values), count)
        text = self._transfers(into, 1, 0, "tcgen05.st.sync.aligned.{shape} [place], {registers};")
        text += "\ntcgen05.wait::st.sync.aligned; }"
        words = [self.bits(value) for value in values]
        self._asm(text, ",".join(["r"] * (1 + count)), [], self._warp_place(into), *words, effects=True)
