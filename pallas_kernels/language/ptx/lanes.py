"""The machine of ``lanes`` for NVIDIA GPUs. Tensor cores and tensor memory are in the other modules of this package.

It emits MLIR and inline PTX into the body of a Mosaic GPU kernel. PTX is used where MLIR has no operation: for packed
conversions, and for predicated vector loads, which need no branch, so that all loads of a body can be in flight at the
same time. Works on sm_90 and newer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm, scf
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike

from pallas_kernels.language.checks import check_access, check_barrier, check_moved, check_reduction, check_shuffle
from pallas_kernels.language.kinds import Kind
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine, Scope
from pallas_kernels.language.values import Condition, Index, Step, Value, expect, negate

_COMPARISONS = {
    "lt": (arith.CmpFPredicate.OLT, arith.CmpIPredicate.slt),
    "le": (arith.CmpFPredicate.OLE, arith.CmpIPredicate.sle),
    "gt": (arith.CmpFPredicate.OGT, arith.CmpIPredicate.sgt),
    "ge": (arith.CmpFPredicate.OGE, arith.CmpIPredicate.sge),
    "eq": (arith.CmpFPredicate.OEQ, arith.CmpIPredicate.eq),
    "ne": (arith.CmpFPredicate.UNE, arith.CmpIPredicate.ne),
}
_FLOAT_OPS = {
    "add": arith.addf,
    "sub": arith.subf,
    "mul": arith.mulf,
    "max": arith.maximumf,
    "min": arith.minimumf,
}
_INT_OPS = {
    "add": arith.addi,
    "sub": arith.subi,
    "mul": arith.muli,
    "div": arith.divui,
    "and": arith.andi,
    "or": arith.ori,
    "xor": arith.xori,
    "shr": arith.shrui,
    "shl": arith.shli,
    "max": arith.maxsi,
    "min": arith.minsi,
}
_KINDS: dict[str, Kind] = {"r": "i32", "l": "i64", "f": "f32"}  # by the letter of the register's constraint
_EXP = "{ .reg .f32 t; mul.rn.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }"
_TO_E4M3 = """{
 .reg .b16 low, high;
 cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
 cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
 mov.b32 $0, {low, high}; }"""
_FROM_E4M3 = """{
 .reg .b16 low, high, a, b; .reg .b32 pair;
 mov.b32 {low, high}, $4;
 cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {a, b}, pair; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
 cvt.rn.f16x2.e4m3x2 pair, high; mov.b32 {a, b}, pair; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }"""

# Whether this is the first block of the grid, and the number of blocks.
_BLOCKS = """ .reg .pred p; .reg .b32 count, x, y, z;
 mov.u32 x, %ctaid.x; mov.u32 y, %ctaid.y; mov.u32 z, %ctaid.z;
 or.b32 x, x, y; or.b32 x, x, z;
 setp.eq.u32 p, x, 0;
 mov.u32 x, %nctaid.x; mov.u32 y, %nctaid.y; mov.u32 z, %nctaid.z;
 mul.lo.u32 count, x, y; mul.lo.u32 count, count, z;"""
# One lane of each block adds to a counter. What all blocks add together flips its top bit, for which they wait. It
# stays as it is until the last of them has added, so that they may look at it before.
_GRID_PHASE = "ld.relaxed.gpu.global.u32 $0, [$1];"
_GRID_ARRIVE = f"""{{{_BLOCKS}
 sub.u32 count, 0x80000001, count;
 selp.u32 count, count, 1, p;
 red.release.gpu.global.add.u32 [$0], count; }}"""
_GRID_WAIT = """{
 .reg .pred p; .reg .b32 now;
 WAIT_${:uid}:
 ld.acquire.gpu.global.u32 now, [$0];
 xor.b32 now, now, $1;
 setp.ge.s32 p, now, 0;
 @p bra WAIT_${:uid}; }"""
_BLOCK_SIZE = """{
 .reg .b32 y, z;
 mov.u32 $0, %ntid.x; mov.u32 y, %ntid.y; mov.u32 z, %ntid.z;
 mul.lo.u32 y, y, z; mul.lo.u32 $0, $0, y; }"""
_GRID_COUNTER = "grid_counter"

# The upper half of a counter is the number of the launch. What all blocks add together is 1 there, and 0 below. So the
# upper half stays as it is until the last block has added.
_LAUNCH_NUMBER = """{
 .reg .b64 counter; .reg .b32 low;
 ld.relaxed.gpu.global.b64 counter, [$1];
 mov.b64 {low, $0}, counter; add.u32 $0, $0, 1; }"""
_COUNT_LAUNCH = f"""{{{_BLOCKS}
 .reg .b64 part;
 cvt.u64.u32 part, count;
 sub.u64 part, 0x100000001, part;
 selp.b64 part, part, 1, p;
 red.relaxed.gpu.global.add.u64 [$0], part; }}"""
_MAIL, _LAUNCHES = "mail", "launches"
# A word and the number of its launch are stored and loaded together, so that none is seen without the other.
_SEND = {
    1: """{ .reg .pred p; .reg .b64 x; setp.ne.s32 p, $3, 0;
 mov.b64 x, {$1, $2}; @p st.relaxed.gpu.global.b64 [$0], x; }""",
    2: """{ .reg .pred p; .reg .b64 x, y; setp.ne.s32 p, $4, 0;
 mov.b64 x, {$1, $3}; mov.b64 y, {$2, $3}; @p st.relaxed.gpu.global.v2.b64 [$0], {x, y}; }""",
}


def _receive(places: int, count: int) -> str:
    """Return what asks for ``count`` words of each place, and again for those that were not there, until all are.

    Its operands are the words, the addresses, whether a place is asked for, and the number of the launch. The lanes of
    a warp stay together: where each left the loop by itself, the router of 64 tokens took half as long again.
    """
    words = places * count
    launch = words + 2 * places
    text = [f"{{ .reg .pred any, other, missing<{places}>; .reg .b64 x<{words}>; .reg .b32 launch<{words}>;"]
    text += [f"mov.b32 ${n}, 0;" for n in range(words)]
    text += [f"setp.ne.s32 missing{n}, ${words + places + n}, 0;" for n in range(places)]
    text.append("AGAIN_${:uid}:")
    for n in range(places):
        loaded = ", ".join(f"x{n * count + i}" for i in range(count))
        vector, loaded = (".v2", "{" + loaded + "}") if count == 2 else ("", loaded)
        text.append(f"@missing{n} ld.relaxed.gpu.global{vector}.b64 {loaded}, [${words + n}];")
    text.append("setp.ne.b32 any, 0, 0;")
    for n in range(places):
        text.append("setp.ne.b32 other, 0, 0;")
        for word in range(n * count, (n + 1) * count):
            text.append(f"@missing{n} mov.b64 {{${word}, launch{word}}}, x{word};")
            text.append(f"setp.ne.or.b32 other, launch{word}, ${launch}, other;")
        text.append(f"and.pred missing{n}, missing{n}, other; or.pred any, any, missing{n};")
    text.append("vote.sync.any.pred any, any, 0xffffffff; @any bra.uni AGAIN_${:uid}; }")
    return "\n".join(text)


def _integer(width: int) -> ir.Type:
    return ir.IntegerType.get_signless(width)


def _type(kind: Kind) -> ir.Type:
    return ir.F32Type.get() if kind == "f32" else _integer({"i32": 32, "i64": 64, "bool": 1}[kind])


def _access(size: int) -> tuple[str, int]:
    """Return the PTX type of an access of ``size`` bytes, and the number of 32-bit words that it moves."""
    return (f"u{8 * size}", 1) if size <= 4 else (f"v{size // 4}.u32", size // 4)


def vector(first: int, count: int) -> str:
    """Return ``count`` registers of an instruction, from number ``first`` on: in braces if there are several."""
    registers = ", ".join(f"${first + i}" for i in range(count))
    return f"{{{registers}}}" if count > 1 else registers


class PTX(Machine):
    """Emits into the current MLIR insertion point, for one lane."""

    def __init__(self, blocks: Sequence[ir.Value], shared: ir.Value):
        """Prepare to emit.

        Args:
          blocks: the block's number along each grid axis, i32.
          shared: the block's shared memory, a memref.
        """
        super().__init__()
        self._blocks = [self._wrap("i32", number) for number in blocks]
        pointer = llvm.ptrtoint(_integer(32), mgpu.utils.memref_ptr(shared))
        self._shared = self._wrap("i32", pointer)
        self._thread = self._wrap("i32", mgpu.utils.thread_idx())
        self._memrefs: dict[int, ir.Value] = {}  # of buffers, by the identity of their addresses
        self._variables: set[str] = set()  # of the kernel's module

    def buffer(self, ref: ir.Value, shape: tuple[int, ...], dtype: DTypeLike, *, constant: bool) -> Buffer:
        """Return an array in device memory, from its memref."""
        address = self._wrap("i64", llvm.ptrtoint(_integer(64), mgpu.utils.memref_ptr(ref)))
        self._memrefs[id(address.raw)] = ref
        return Buffer(self, address, shape, jnp.dtype(dtype), constant)

    def _wrap(self, kind: Kind, raw: ir.Value) -> Value:
        return Value(self, kind, raw)

    @property
    def thread(self) -> Value:
        return self._thread

    def block(self, axis: int) -> Value:
        return self._blocks[axis]

    @property
    def rank(self) -> Value:
        return self._asm("mov.u32 $0, %cluster_ctarank;", "=r", ["i32"])[0]

    def _constant(self, number: float, kind: Kind) -> Value:
        kind_type = _type(kind)
        if kind == "f32":
            return self._wrap(kind, arith.constant(kind_type, ir.FloatAttr.get(kind_type, float(np.float32(number)))))
        return self._wrap(kind, arith.constant(kind_type, ir.IntegerAttr.get(kind_type, int(number))))

    def binary(self, op: str, a: Value, b: Value) -> Value:
        if op in _COMPARISONS:
            on_floats, on_integers = _COMPARISONS[op]
            if a.kind == "f32":
                return self._wrap("bool", arith.cmpf(on_floats, a.raw, b.raw))
            return self._wrap("bool", arith.cmpi(on_integers, a.raw, b.raw))
        return self._wrap(a.kind, (_FLOAT_OPS if a.kind == "f32" else _INT_OPS)[op](a.raw, b.raw))

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self._wrap(a.kind, arith.select(condition.raw, a.raw, b.raw))

    def widen(self, x: Value) -> Value:
        return self._wrap("i64", arith.extsi(_integer(64), expect("i32", x).raw))

    def bits(self, x: Value) -> Value:
        return self._wrap("i32", arith.bitcast(_integer(32), expect("f32", x).raw))

    def from_bits(self, x: Value) -> Value:
        return self._wrap("f32", arith.bitcast(ir.F32Type.get(), expect("i32", x).raw))

    def _asm(
        self, text: str, constraints: str, results: Sequence[Kind], *args: Value, effects: bool = False
    ) -> list[Value]:
        registers = [each.strip("=&") for each in constraints.split(",")] if constraints else []
        for register, arg in zip(registers[len(results) :], args, strict=True):
            expect(_KINDS[registers[int(register)] if register.isdigit() else register], arg)
        types = [_type(kind) for kind in results]
        if not types:
            returned = ir.Type.parse("!llvm.void")
        else:
            returned = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
        out = llvm.inline_asm(returned, [arg.raw for arg in args], text, constraints, has_side_effects=effects)
        if len(types) <= 1:
            return [self._wrap(kind, out) for kind in results]
        return [
            self._wrap(kind, llvm.extractvalue(one, out, [i]))
            for i, (kind, one) in enumerate(zip(results, types, strict=True))
        ]

    def exp(self, x: Value) -> Value:
        return self._asm(_EXP, "=f,f", ["f32"], x)[0]

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self._asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", ["f32"], a, b, c)[0]

    def reciprocal(self, x: Value) -> Value:
        return self._asm("rcp.rn.f32 $0, $1;", "=f,f", ["f32"], x)[0]

    def approximate_reciprocal(self, x: Value) -> Value:
        return self._asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", ["f32"], x)[0]

    def divide(self, a: Value, b: Value) -> Value:
        return self._asm("div.rn.f32 $0, $1, $2;", "=f,f,f", ["f32"], a, b)[0]

    def inverse_sqrt(self, x: Value) -> Value:
        return self._asm("{ .reg .f32 root; sqrt.rn.f32 root, $1; rcp.rn.f32 $0, root; }", "=f,f", ["f32"], x)[0]

    def to_e4m3(self, values: Step) -> Value:
        return self._asm(_TO_E4M3, "=r,f,f,f,f", ["i32"], *values)[0]

    def from_e4m3(self, word: Value) -> Step:
        return self._asm(_FROM_E4M3, "=f,=f,=f,=f,r", ("f32",) * 4, word)

    def to_bf16(self, low: Value, high: Value) -> Value:
        return self._asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", ["i32"], low, high)[0]

    def shuffle_xor(self, x: Value, distance: int) -> Value:
        check_shuffle(x, distance)
        return self._wrap(x.kind, mgpu.utils.shfl_bfly(x.raw, distance))

    def shuffle_up(self, x: Value, distance: int) -> Value:
        check_shuffle(x, distance)
        register = "f" if x.kind == "f32" else "r"
        text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
        return self._asm(text, f"={register},{register}", [x.kind], x, effects=True)[0]

    def shuffle(self, x: Value, lane: Value) -> Value:
        check_moved(x)
        register = "f" if x.kind == "f32" else "r"
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        return self._asm(text, f"={register},{register},r", [x.kind], x, expect("i32", lane), effects=True)[0]

    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        check_reduction(op)
        return self._asm(f"redux.sync.{op}.s32 $0, $1, 0xffffffff;", "=r,r", ["i32"], x, effects=True)[0]

    def leading_zeros(self, x: Value) -> Value:
        return self._asm("clz.b32 $0, $1;", "=r,r", ["i32"], x)[0]

    def population_count(self, x: Value) -> Value:
        return self._asm("popc.b32 $0, $1;", "=r,r", ["i32"], x)[0]

    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        if where is False:
            return self.constant(0, "i32")
        address, space = self._shared_address(address, rank)
        add = f"atom.{space}.add.u32 $0, [$1], $2;"
        if where is True:
            return self._asm(add, "=r,r,r", ["i32"], address, x, effects=True)[0]
        text = f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; @p {add} }}"
        return self._asm(text, "=&r,r,r,r", ["i32"], address, x, self._flag(where), effects=True)[0]

    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        check_barrier(scope, leave)
        if scope == "cluster":
            self._asm("barrier.cluster.arrive.release.aligned;", "", [], effects=True)
            with self.when(negate(leave)):
                self._asm("barrier.cluster.wait.acquire.aligned;", "", [], effects=True)
        elif scope == "block":
            gpu.barrier()
        elif scope == "grid":
            self.grid_arrive()
            with self.when(self._speaks):
                self._await_grid()
            gpu.barrier()
        elif scope == "warp":
            self._asm("bar.warp.sync 0xffffffff;", "", [], effects=True)
        else:
            mgpu.utils.warpgroup_barrier()

    def _variable(self, name: str, bits: int = 32, count: int = 1) -> Value:
        """Return the address of a variable of the kernel's module: so many integers, 0 when the module is loaded."""
        module = ir.InsertionPoint.current.block.owner
        while module.parent is not None:
            module = module.parent
        if name not in self._variables:
            self._variables.add(name)
            with ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0]):
                llvm.GlobalOp(
                    ir.Type.parse(f"!llvm.array<{count} x i{bits}>"),
                    name,
                    ir.Attribute.parse("#llvm.linkage<internal>"),
                    value=ir.Attribute.parse(f"dense<0> : tensor<{count}xi{bits}>"),
                    addr_space=ir.IntegerAttr.get(_integer(32), 1),  # device memory
                    alignment=16,
                )
        pointer = llvm.AddressOfOp(ir.Type.parse("!llvm.ptr<1>"), name).result
        return self._wrap("i64", llvm.ptrtoint(_integer(64), pointer))

    def open_mail(self, count: int) -> tuple[Value, Value]:
        if _MAIL in self._variables:
            raise TypeError("a launch has one mailbox")
        address = self._variable(_MAIL, 64, count)
        launch = self._asm(_LAUNCH_NUMBER, "=r,l", ["i32"], self._variable(_LAUNCHES, 64), effects=True)[0]
        return address, launch

    def close_mail(self) -> None:
        with self.when(self.thread == 0):
            self._asm(_COUNT_LAUNCH, "l", [], self._variable(_LAUNCHES, 64), effects=True)

    def send(self, address: Value, words: Sequence[Value], launch: Value, where: Condition) -> None:
        if where is False:
            return
        constraints = ",".join(["l", *["r"] * len(words), "r", "r"])
        self._asm(_SEND[len(words)], constraints, [], address, *words, launch, self._where(where), effects=True)

    def receive(
        self, addresses: Sequence[Value], count: int, launch: Value, where: Sequence[Condition]
    ) -> list[list[Value]]:
        flags = [self._where(condition) for condition in where]
        constraints = ["=&r"] * (count * len(addresses)) + ["l"] * len(addresses) + ["r"] * (len(flags) + 1)
        kinds: list[Kind] = ["i32"] * (count * len(addresses))
        text = _receive(len(addresses), count)
        found = self._asm(text, ",".join(constraints), kinds, *addresses, *flags, launch, effects=True)
        return [found[n : n + count] for n in range(0, len(found), count)]

    def _where(self, condition: Condition) -> Value:
        return self.constant(int(condition), "i32") if isinstance(condition, bool) else self._flag(condition)

    def grid_arrive(self) -> None:
        counter = self._variable(_GRID_COUNTER)
        self._grid_phase = self._asm(_GRID_PHASE, "=r,l", ["i32"], counter, effects=True)[0]
        gpu.barrier()
        with self.when(self._speaks):
            self._asm(_GRID_ARRIVE, "l", [], counter, effects=True)

    def grid_wait(self) -> None:
        with self.when(self.thread % WARPGROUP == 0):
            self._await_grid()
        mgpu.utils.warpgroup_barrier()

    @property
    def _speaks(self) -> Value:
        """Whether this is the lane that arrives for its block: in the last warp, which seldom has more to do."""
        return self.thread + WARP == self._asm(_BLOCK_SIZE, "=r", ["i32"])[0]

    def _await_grid(self) -> None:
        self._asm(_GRID_WAIT, "l,r", [], self._variable(_GRID_COUNTER), self._grid_phase, effects=True)

    def cluster_arrive(self) -> None:
        self._asm("barrier.cluster.arrive.relaxed.aligned;", "", [], effects=True)

    def cluster_wait(self) -> None:
        self._asm("barrier.cluster.wait.acquire.aligned;", "", [], effects=True)

    def _flag(self, condition: Value) -> Value:
        return self._wrap("i32", arith.extui(_integer(32), expect("bool", condition).raw))  # inline PTX has no i1

    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        check_access(size)
        ptx_type, words = _access(size)
        # Fastest as measured on an H200: inputs are not allocated in L1, and state has the default policy.
        cache = (".nc.L1::no_allocate" if size == 16 else ".nc") if constant else ""
        read = f"ld.global{cache}.{ptx_type} {vector(0, words)}, [${words}];"
        if where is True:
            return self._asm(read, ",".join(["=r"] * words + ["l"]), ("i32",) * words, address, effects=True)
        if where is False:
            return [self.constant(otherwise, "i32")] * words
        first = " ".join(f"mov.b32 ${i}, {otherwise};" for i in range(words))
        text = f"{{ .reg .pred p; setp.ne.s32 p, ${words + 1}, 0; {first} @p {read} }}"
        constraints = ",".join(["=&r"] * words + ["l", "r"])
        return self._asm(text, constraints, ("i32",) * words, address, self._flag(where), effects=True)

    def _hold(self, values: list[Value]) -> list[Value]:
        # Empty volatile assembly. It stays after the loads before it, because they are volatile too.
        letters = {"f32": "f", "i64": "l"}
        return [
            self._asm("", f"={letters.get(value.kind, 'r')},0", [value.kind], value, effects=True)[0]
            for value in values
        ]

    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None:
        self._store("global", "l", address, words, size, where)

    def _store(
        self, space: str, address_kind: str, address: Value, words: Sequence[Value], size: int, where: Condition
    ) -> None:
        if where is False:
            return
        check_access(size, words)
        ptx_type, count = _access(size)
        write = f"st.{space}.{ptx_type} [$0], {vector(1, count)};"
        constraints = [address_kind] + ["r"] * count
        if where is True:
            self._asm(write, ",".join(constraints), [], address, *words, effects=True)
            return
        text = f"{{ .reg .pred p; setp.ne.s32 p, ${1 + count}, 0; @p {write} }}"
        flag = self._flag(where)
        self._asm(text, ",".join([*constraints, "r"]), [], address, *words, flag, effects=True)

    def load_shared(self, address: Value, size: int) -> list[Value]:
        check_access(size)
        ptx_type, words = _access(size)
        text = f"ld.shared.{ptx_type} {vector(0, words)}, [${words}];"
        constraints = ",".join(["=r"] * words + ["r"])
        return self._asm(text, constraints, ("i32",) * words, self._shared + address, effects=True)

    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        address, space = self._shared_address(address, rank)
        self._store(space, "r", address, words, size, where)

    def _shared_address(self, address: Value, rank: int | None) -> tuple[Value, str]:
        """Return the address and state space of a byte offset in the shared memory of the block or another rank."""
        address = self._shared + address
        if rank is None:
            return address, "shared"
        remote = self._asm(f"mapa.shared::cluster.u32 $0, $1, {rank};", "=r,r", ["i32"], address)[0]
        return remote, "shared::cluster"

    def _when(self, condition: Condition) -> contextlib.AbstractContextManager[None]:
        if condition is True:
            return contextlib.nullcontext()
        known = condition if isinstance(condition, Value) else self.constant(False, "bool")
        return mgpu.utils.when(known.raw)

    def _branch(self, condition: Value, body: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        operation = scf.IfOp(condition.raw, [value.raw.type for value in carry], has_else=True)
        for region, result in zip(operation.regions, (body, lambda values: values), strict=True):
            with ir.InsertionPoint(region.blocks[0]):
                scf.yield_([value.raw for value in result(carry)])
        return [self._wrap(value.kind, raw) for value, raw in zip(carry, operation.results, strict=True)]

    def _loop(self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        bounds = [b if isinstance(b, Value) else self.constant(b, "i32") for b in (0, count, 1)]
        operation = scf.ForOp(bounds[0].raw, bounds[1].raw, bounds[2].raw, [value.raw for value in carry])
        with ir.InsertionPoint(operation.body):
            inner = [self._wrap(value.kind, raw) for value, raw in zip(carry, operation.inner_iter_args, strict=True)]
            result = body(self._wrap("i32", operation.induction_variable), inner)
            scf.yield_([value.raw for value in result])
        return [self._wrap(value.kind, raw) for value, raw in zip(carry, operation.results, strict=True)]

    def _keep_rolled(self) -> None:
        self._asm('.pragma "nounroll";', "", [], effects=True)

    def _repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]:
        types = [value.raw.type for value in carry]
        operation = scf.WhileOp(types, [value.raw for value in carry])
        block, other = (region.blocks.append(*types) for region in operation.regions)
        with ir.InsertionPoint(block):
            again, result = body([self._wrap(v.kind, raw) for v, raw in zip(carry, block.arguments, strict=True)])
            scf.condition(again.raw, [value.raw for value in result])
        with ir.InsertionPoint(other):
            scf.yield_(list(other.arguments))
        return [self._wrap(value.kind, raw) for value, raw in zip(carry, operation.results, strict=True)]
