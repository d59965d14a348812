"""The machine of ``tensor_cores`` on Hopper, in PTX."""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import gpu, llvm  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.language.checks import check_copy, check_send, check_wgmma
from pallas_kernels.language.kinds import Kind
from pallas_kernels.language.machine import WARP, Scope
from pallas_kernels.language.ptx.lanes import PTX, vector
from pallas_kernels.language.tensor_cores import HALVES, DType, Operand, Role, TensorCores, TileCopy
from pallas_kernels.language.values import Condition, Index, Value

_SWIZZLE_128 = 1 << 30  # in the high half of a descriptor of shared memory
_E4M3_TO_F16 = """{
 .reg .b16 low, high;
 mov.b32 {low, high}, $2;
 cvt.rn.f16x2.e4m3x2 $0, low;
 cvt.rn.f16x2.e4m3x2 $1, high; }"""
_FROM_F16 = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
_HIGH_F16 = """{
 .reg .b16 low, high; .reg .b32 both;
 mov.b32 {low, high}, $1;
 mov.b32 both, {high, high};
 add.rn.f16x2 $0, both, $2; }"""
_WAIT = """{
 .reg .pred done;
 WAIT_${:uid}:
 mbarrier.try_wait.parity{order}.shared::cta.b64 done, [$0], $1;
 @!done bra WAIT_${:uid}; }"""
# A loop that runs once. ptxas does not move arithmetic between basic blocks, and cannot know that the loop ends at
# once.
_KEEP_ORDER = """{
 .reg .pred again; .reg .b32 blocks;
 AGAIN_${:uid}:
 bar.warp.sync 0xffffffff;
 mov.u32 blocks, %nctaid.x;
 setp.eq.u32 again, blocks, 0x7ffffffe;
 @again bra.uni AGAIN_${:uid}; }"""
# What rcp.rn does with such numbers, but without its call for the others.
_NORMAL_RECIPROCAL = """{
 .reg .f32 guess, minus, error;
 rcp.approx.ftz.f32 guess, $1;
 neg.f32 minus, $1;
 fma.rn.f32 error, minus, guess, 0f3F800000;
 fma.rn.f32 $0, guess, error, guess; }"""
# One step of Newton's method from an approximation.
_NORMAL_INVERSE_SQRT = """{
 .reg .f32 guess, minus, error, half;
 rsqrt.approx.ftz.f32 guess, $1;
 mul.rn.f32 minus, $1, guess;
 neg.f32 minus, minus;
 fma.rn.f32 error, minus, guess, 0f3F800000;
 mul.rn.f32 half, guess, 0f3F000000;
 fma.rn.f32 $0, error, half, guess; }"""
_COPY_TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_FAMILY = {
    "f16": ("k16", "f16.f16"),
    "bf16": ("k16", "bf16.bf16"),
    "e4m3": ("k32", "e4m3.e4m3"),
    "e5m2": ("k32", "e5m2.e5m2"),
}


class TensorCorePTX(PTX, TensorCores):
    """Emits for one lane. Products run on sm_90a."""

    context: mgpu.LaunchContext
    changes_registers = False  # until roles with registers of their own are emitted

    def exp2(self, x: Value) -> Value:
        return self._asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", ["f32"], x)[0]

    def normal_reciprocal(self, x: Value) -> Value:
        return self._asm(_NORMAL_RECIPROCAL, "=f,f", ["f32"], x)[0]

    def normal_inverse_sqrt(self, x: Value) -> Value:
        return self._asm(_NORMAL_INVERSE_SQRT, "=f,f", ["f32"], x)[0]

    def to_f16(self, low: Value, high: Value) -> Value:
        return self._asm("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", ["i32"], low, high)[0]

    def from_f16(self, word: Value) -> tuple[Value, Value]:
        low, high = self._asm(_FROM_F16, "=f,=f,r", ("f32", "f32"), word)
        return low, high

    def e4m3_to_f16(self, word: Value) -> tuple[Value, Value]:
        low, high = self._asm(_E4M3_TO_F16, "=&r,=r,r", ("i32", "i32"), word)
        return low, high

    def multiply_f16(self, a: Value, b: Value) -> Value:
        return self._asm("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", ["i32"], a, b)[0]

    def multiply_bf16(self, a: Value, b: Value) -> Value:
        return self._asm("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", ["i32"], a, b)[0]

    def relu_f16(self, x: Value) -> Value:
        # Written as a multiply-add, because that uses a pipe which integer instructions leave idle.
        one, zero = self.constant(0x3C003C00, "i32"), self.constant(0, "i32")
        return self._asm("fma.rn.relu.f16x2 $0, $1, $2, $3;", "=r,r,r,r", ["i32"], x, one, zero)[0]

    def high_f16(self, word: Value) -> Value:
        # An addition of -0, as for ``relu_f16``: a shift uses the pipe of integer instructions.
        return self._asm(_HIGH_F16, "=r,r,r", ["i32"], word, self.constant(0x80008000 - (1 << 32), "i32"))[0]

    def maximum_u16(self, a: Value, b: Value) -> Value:
        return self._asm("max.u16x2 $0, $1, $2;", "=r,r,r", ["i32"], a, b)[0]

    def permute_bytes(self, a: Value, b: Value, selector: Index) -> Value:
        if isinstance(selector, int):
            return self._asm(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", ["i32"], a, b)[0]
        return self._asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", ["i32"], a, b, selector)[0]

    def copy_async(self, to: Value, address: Value, where: Condition, *, size: int = 16) -> None:
        check_copy(size)
        to = self._shared + to
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}"  # past L1 only 16 bytes go
        if where is True:
            self._asm(f"{text};", "r,l", [], to, address, effects=True)
            return
        copied = self._flag(where) * size if isinstance(where, Value) else self.constant(0, "i32")
        self._asm(f"{text}, $2;", "r,l,r", [], to, address, copied, effects=True)

    def close_copies(self) -> None:
        self._asm("cp.async.commit_group;", "", [], effects=True)

    def wait_copies(self, *, pending: int = 0) -> None:
        self._asm(f"cp.async.wait_group {pending};" if pending else "cp.async.wait_all;", "", [], effects=True)

    def keep_order(self) -> None:
        self._asm(_KEEP_ORDER, "", [], effects=True)

    def roles(self, *roles: Role) -> None:
        warpgroup = self._wrap("i32", mgpu.utils.warpgroup_idx(sync=True))
        at_launch, first = self.registers_at_launch(roles), 0
        self.changes_registers = True
        for number, role in enumerate(roles):
            if number == 1 and len(roles) == 2:
                # Found anew, so that the first role need not keep it. With more roles, this made attention spill.
                warpgroup = self._wrap("i32", mgpu.utils.warpgroup_idx(sync=True))
            inside = warpgroup >= first
            first += role.warpgroups
            with self.when(inside & (warpgroup < first)):
                change = "inc" if role.registers > at_launch else "dec"
                self._asm(f"setmaxnreg.{change}.sync.aligned.u32 {role.registers};", "", [], effects=True)
                self._play(role.body)

    def init_barriers(self, counts: Sequence[tuple[int, int]]) -> None:
        with self.when(self.thread == 0):
            for address, count in counts:
                self._asm(
                    f"mbarrier.init.shared::cta.b64 [$0], {count};", "r", [], self._shared + address, effects=True
                )
            self._asm("fence.mbarrier_init.release.cluster;", "", [], effects=True)  # for asynchronous arrivals too
        gpu.barrier()

    def arrive(self, barrier: Value, where: Condition = True) -> None:
        first = self.thread % WARP == 0
        self._asm("bar.warp.sync 0xffffffff;", "", [], effects=True)
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
        self._asm(text, "r,r", [], self._shared + barrier, self._flag(where & first), effects=True)

    def arrive_in_cluster(self, barrier: Value, blocks: int) -> None:
        self._asm("bar.warp.sync 0xffffffff;", "", [], effects=True)
        # One fence for all of them, as it takes long: it waits for all that was stored.
        lines = ["{ .reg .pred p; .reg .b32 remote; setp.ne.s32 p, $1, 0;", "@p fence.acq_rel.cluster;"]
        for rank in range(blocks):
            lines.append(f"mapa.shared::cluster.u32 remote, $0, {rank};")
            lines.append("@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];")
        first = self._flag(self.thread % WARP == 0)
        self._asm("\n".join([*lines, "}"]), "r,r", [], self._shared + barrier, first, effects=True)

    def expect(self, barrier: Value, size: Value) -> None:
        text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }"
        self._asm(text, "r,r", [], self._shared + barrier, size, effects=True)

    def send_shared(
        self, address: Value, words: Sequence[Value], barrier: Value, where: Condition, *, rank: int
    ) -> None:
        check_send(words)
        if where is False:
            return
        count = len(words)
        remote, _ = self._shared_address(address, rank)
        remote_barrier, _ = self._shared_address(barrier, rank)
        send = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{f'.v{count}' if count > 1 else ''}"
        text = f"@p {send}.b32 [$0], {vector(1, count)}, [${count + 1}];"
        text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 2}, 0; {text} }}"
        flag = self._flag(where if isinstance(where, Value) else self.constant(True, "bool"))
        self._asm(text, ",".join(["r"] * (count + 3)), [], remote, *words, remote_barrier, flag, effects=True)

    def fill(self, barrier: Value, copies: Sequence[TileCopy]) -> None:
        lines = [
            "{ .reg .pred p; elect.sync _|p, 0xffffffff;",
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {sum(copy.size for copy in copies)};",
        ]
        operands, constraints = [self._shared + barrier], ["r"]
        for copy in copies:
            to, column, row = (
                index if isinstance(index, Value) else self.constant(index, "i32")
                for index in (copy.to, copy.column, copy.row)
            )
            first = len(operands)
            operands += [self._shared + to, self._describe(copy), column, row]
            constraints += ["r", "l", "r", "r"]
            place = f"[${first}], [${first + 1}, {{${first + 2}, ${first + 3}}}], [$0]"
            lines.append(f"@p {_COPY_TILE} {place};")
        self._asm("\n".join([*lines, "}"]), ",".join(constraints), [], *operands, effects=True)

    def _describe(self, copy: TileCopy) -> Value:
        """Return the i64 address of what the hardware needs to know of an array for such a copy."""
        memref = self._memrefs.get(id(copy.source.address.raw))
        if memref is None:
            raise TypeError("a copy is made of an input of the launch as it is, not of a choice or a part of one")
        box = copy.rows, copy.row_bytes // copy.source.dtype.itemsize
        pointer = self.context._get_tma_desc(memref, (), None, box, copy.swizzle or None, None)
        return self._wrap("i64", llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer))

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        text = _WAIT.replace("{order}", ".acquire.cluster" if scope == "cluster" else "")
        self._asm(text, "r,r", [], self._shared + barrier, parity, effects=True)

    def fence_shared(self) -> None:
        self._asm("fence.proxy.async.shared::cta;", "", [], effects=True)

    def _descriptor(self, operand: Operand) -> Value:
        """Return the low half of the descriptor of an operand's first step, an i32."""
        return ((self._shared + operand.address) & 0x3FFFF) >> 4 | operand.leading >> 4 << 16

    @staticmethod
    def _step(name: str, low: str, operand: Operand, step: int, version: int = 0) -> list[str]:
        """Return PTX that makes a register the descriptor of a step, given the low half of the first step's.

        Only this half is added to: ptxas keeps it in uniform registers, which it does not do with a sum of 64 bits.
        """
        high = _SWIZZLE_128 | version | operand.stride >> 4
        return [f"add.s32 low, {low}, {operand.steps[step] >> 4};", f"mov.b64 {name}, {{low, {high}}};"]

    def wgmma(
        self,
        start: list[Value] | None,
        a: Operand | list[Value],
        b: Operand,
        *,
        columns: int,
        dtype: DType = "f16",
        packed: bool = False,
    ) -> list[Value]:
        check_wgmma(start, a, b, columns, dtype, packed)
        count, steps = columns // (4 if packed else 2), len(b.steps)
        depth, operands = _FAMILY[dtype]
        shape = f"m64n{columns}{depth}.{'f16' if packed else 'f32'}.{operands}"
        held = 0 if start is None else count  # number of inputs that share registers with the results
        first = count + held  # number of the next operand in the text
        if isinstance(a, Operand):
            left, left_constraints = [self._descriptor(a)], ["r"]
        else:
            left, left_constraints = a, ["r"] * len(a)
        right = f"${first + len(left)}"
        # One block of text, because nothing may come between the instructions of a group.
        lines = ["{ .reg .b64 a, b; .reg .b32 low; .reg .pred more;", "wgmma.fence.sync.aligned;"]
        for step in range(steps):
            if isinstance(a, Operand):
                lines += self._step("a", f"${first}", a, step)
                operand = "a"
            else:
                operand = vector(first + 4 * step, 4)
            lines += self._step("b", right, b, step)
            lines.append(f"setp.ne.s32 more, {int(start is not None or step > 0)}, 0;")
            flags = "1, 1"
            if dtype in HALVES:
                flags += f", {int(a.transposed)}" if isinstance(a, Operand) else ""
                flags += f", {int(b.transposed)}"
            lines.append(f"wgmma.mma_async.sync.aligned.{shape} {vector(0, count)}, {operand}, b, more, {flags};")
        lines.append("wgmma.commit_group.sync.aligned; }")
        # Early clobber, because the results' registers are written while those of a and the descriptors are still read.
        constraints = ["=&r" if packed else "=&f"] * count + [str(i) for i in range(held)] + left_constraints + ["r"]
        inputs = [*(start or []), *left, self._descriptor(b)]
        kinds: list[Kind] = ["i32" if packed else "f32"] * count
        return self._asm("\n".join(lines), ",".join(constraints), kinds, *inputs, effects=True)

    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        # Two separate pieces, because a copy of a register, as a constraint makes it, must not come before the wait.
        self._asm(f"wgmma.wait_group.sync.aligned {pending};", "", [], effects=True)
        return self._hold(values)
