"""The language that kernel bodies are written in: one number per lane, and rows spread over teams of lanes.

A body is a Python function of a ``Machine``. It is read by two of them: ``ptx.PTX`` emits it into a Mosaic GPU kernel,
``simulator.Simulator`` runs it in NumPy, with bounds, alignment and race checks. What differs between the two (a load,
a shuffle, a packed conversion) is the ``Machine``; everything above it is ordinary formulas over ``Value``.

    Value    one i32, i64, f32 or bool per lane; the usual operators
    Buffer   an array in device memory, addressed by indices
    Team     a warp or a warpgroup that holds a row between its lanes, and reduces over it
    Row      how the channels of a row lie over a team: lane t holds channels 4t .. 4t + 3 of every step
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

Kind = Literal["i32", "i64", "f32", "bool"]
Scope = Literal["warpgroup", "block", "cluster"]
WARP, WARPGROUP = 32, 128
VECTOR = 4  # channels a lane holds per step: 16 bytes of f32
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One number per lane. A Python number on the other side of an operator becomes a constant of the same kind.

    Integer ``//`` and ``%`` take a positive Python int and are for values that are not negative.
    """

    machine: Machine
    kind: Kind
    raw: Any

    def _with(self, op: str, other: Value | float, *, swap: bool = False) -> Value:
        other = other if isinstance(other, Value) else self.machine.constant(other, self.kind)
        return self.machine.binary(op, other, self) if swap else self.machine.binary(op, self, other)

    def __add__(self, other: Value | float) -> Value:
        return self._with("add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._with("mul", other)

    def __radd__(self, other: float) -> Value:
        return self._with("add", other, swap=True)

    def __rsub__(self, other: float) -> Value:
        return self._with("sub", other, swap=True)

    def __rmul__(self, other: float) -> Value:
        return self._with("mul", other, swap=True)

    def __floordiv__(self, other: int) -> Value:
        if other & (other - 1):
            return self._with("div", other)
        return self >> (other.bit_length() - 1)

    def __mod__(self, other: int) -> Value:
        if other & (other - 1):
            return self - self // other * other
        return self & (other - 1)

    def __and__(self, other: Value | int) -> Any:
        if isinstance(other, bool):  # known when the kernel is built
            return self if other else False
        return self._with("and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._with("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._with("xor", other)

    __rand__ = __and__

    def __rshift__(self, bits: int) -> Value:
        return self._with("shr", bits)

    def __lshift__(self, bits: Value | int) -> Value:
        return self._with("shl", bits)

    def __lt__(self, other: Value | float) -> Value:
        return self._with("lt", other)

    def __le__(self, other: Value | float) -> Value:
        return self._with("le", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._with("gt", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._with("ge", other)

    def equals(self, other: Value | float) -> Value:
        return self._with("eq", other)

    def maximum(self, other: Value | float) -> Value:
        """The larger one; NaN where either is."""
        return self._with("max", other)

    def minimum(self, other: Value | float) -> Value:
        """The smaller one; NaN where either is."""
        return self._with("min", other)


Condition = Value | bool  # a Python bool is a condition known when the kernel is built, and costs nothing
Index = Value | int
Step = list[Value]  # the VECTOR channels of one lane in one step
Channels = list[Step]  # a lane's part of a row: one Step per step


def select(condition: Condition, a: Value, b: Value | float) -> Value:
    """a where the condition holds, else b."""
    b = b if isinstance(b, Value) else a.machine.constant(b, a.kind)
    if isinstance(condition, bool):
        return a if condition else b
    return a.machine.select(condition, a, b)


def negate(condition: Condition) -> Condition:
    return not condition if isinstance(condition, bool) else condition.equals(False)


class Machine(abc.ABC):
    """What a lane can do that is not a formula. Addresses are in bytes; loads and stores move 32-bit words.

    A ``size`` of 1, 2 or 4 bytes is one word (zero-extended), 8 is two, 16 four; an address is a multiple of the size.
    """

    def __init__(self) -> None:
        self.shared_bytes = 0  # shared memory taken so far

    def take_shared(self, size: int) -> int:
        """Byte offset of ``size`` fresh bytes of the block's shared memory, 16-byte aligned."""
        offset = self.shared_bytes
        self.shared_bytes += -(-size // 16) * 16
        return offset

    # Where a lane is.
    @property
    @abc.abstractmethod
    def thread(self) -> Value:
        """i32 thread number in the block."""

    @abc.abstractmethod
    def block(self, axis: int) -> Value:
        """i32 block number along a grid axis."""

    @property
    @abc.abstractmethod
    def rank(self) -> Value:
        """i32 place of the block in its cluster: of blocks that run together and reach each other's shared memory."""

    # Arithmetic.
    @abc.abstractmethod
    def constant(self, number: float, kind: Kind) -> Value: ...

    @abc.abstractmethod
    def binary(self, op: str, a: Value, b: Value) -> Value:
        """add sub mul div and or xor shl shr lt le gt ge eq max min; max and min give NaN where either operand is."""

    @abc.abstractmethod
    def select(self, condition: Value, a: Value, b: Value) -> Value: ...

    @abc.abstractmethod
    def widen(self, x: Value) -> Value:
        """i32 -> i64."""

    @abc.abstractmethod
    def bits(self, x: Value) -> Value:
        """The i32 with the bits of an f32."""

    @abc.abstractmethod
    def from_bits(self, x: Value) -> Value:
        """The f32 with the bits of an i32."""

    @abc.abstractmethod
    def exp(self, x: Value) -> Value:
        """e^x as 2^(x log2 e): the product's rounding makes the relative error grow as |x| 2^-24.

        In a softmax, where x <= 0, what a weight is off by is then below |x| e^x 2^-24, less than half an ulp of 1.
        """

    @abc.abstractmethod
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""

    @abc.abstractmethod
    def reciprocal(self, x: Value) -> Value:
        """1 / x, correctly rounded."""

    @abc.abstractmethod
    def divide(self, a: Value, b: Value) -> Value:
        """a / b, correctly rounded."""

    @abc.abstractmethod
    def inverse_sqrt(self, x: Value) -> Value:
        """1 / sqrt(x), each correctly rounded."""

    # Packed conversions: element 0 in the low bits, rounding to nearest, ties to even.
    @abc.abstractmethod
    def to_e4m3(self, values: Step) -> Value:
        """Four f32 -> four E4M3 bytes in an i32; saturates at 448, keeps NaN."""

    @abc.abstractmethod
    def from_e4m3(self, word: Value) -> Step:
        """Four E4M3 bytes -> four f32."""

    @abc.abstractmethod
    def to_bf16(self, low: Value, high: Value) -> Value:
        """Two f32 -> two bf16 in an i32."""

    # Between lanes.
    @abc.abstractmethod
    def shuffle_xor(self, x: Value, distance: int) -> Value:
        """The value of the lane whose number differs in the bit ``distance`` (1 .. 16) of the lane's number."""

    @abc.abstractmethod
    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        """All lanes of the scope arrive, and see each other's shared and global memory.

        leave: of a cluster only, the same in all lanes of a warp: these arrive and do not wait. They are done: nothing
        more is to be loaded or stored by them.
        """

    # Memory.
    @abc.abstractmethod
    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        """Words at i64 addresses, each ``otherwise`` where not.

        ``constant``: nothing writes there while the kernel runs.
        """

    @abc.abstractmethod
    def hold(self, values: list[Value]) -> list[Value]:
        """The same values, to be used only after what has been issued so far.

        Without it, a compiler may wait for values that are on their way before it issues the next loads.
        """

    @abc.abstractmethod
    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None: ...

    @abc.abstractmethod
    def load_shared(self, address: Value, size: int) -> list[Value]:
        """Words at i32 byte offsets into the block's shared memory."""

    @abc.abstractmethod
    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        """Into the block's own shared memory, or that of the block of a rank in its cluster."""

    # Control.
    @abc.abstractmethod
    def when(self, condition: Condition) -> AbstractContextManager[None]:
        """Run what is inside in the lanes where the condition holds. Values made inside stay inside."""

    @abc.abstractmethod
    def loop(self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        """carry = body(i, carry) for i in range(count); count is the same in all lanes that share a barrier."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array in device memory: f32, bf16, int32 or uint8.

    Floats come and go as f32; bytes come and go packed, ``count`` of them in one i32. The last index is the first of
    ``count`` neighbours.
    """

    machine: Machine
    address: Value  # i64
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    constant: bool  # nothing writes it while the kernel runs

    def instead(self, condition: Value, other: Buffer) -> Buffer:
        """The other array, of the same shape, in the lanes where the condition holds."""
        assert (self.shape, self.dtype) == (other.shape, other.dtype), "arrays that stand in for each other are alike"
        return dataclasses.replace(self, address=select(condition, other.address, self.address))

    def _at(self, index: Sequence[Index]) -> Value:
        if len(index) != len(self.shape):
            raise TypeError(f"an array of shape {self.shape} takes {len(self.shape)} indices, got {len(index)}")
        address, known = self.address, 0
        for axis, i in enumerate(index):
            stride = math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize
            if isinstance(i, Value):
                address = address + self.machine.widen(i) * stride
            else:
                known += i * stride
        return address + known if known else address

    def _load(self, index: Sequence[Index], count: int, where: Condition, otherwise: int = 0) -> list[Value]:
        size = count * self.dtype.itemsize
        if where is False:
            return [self.machine.constant(otherwise, "i32")] * -(-size // 4)
        return self.machine.load(self._at(index), size, where, constant=self.constant, otherwise=otherwise)

    def load_floats(self, *index: Index, count: int = VECTOR, where: Condition = True, otherwise: float = 0.0) -> Step:
        """``otherwise`` (rounded to the array's dtype) where not: cheaper than a select, which waits for the load."""
        pattern = np.full(4 // self.dtype.itemsize, otherwise, self.dtype).view(np.int32)
        words = self._load(index, count, where, int(pattern[0]))
        if self.dtype.itemsize == 4:
            return [self.machine.from_bits(word) for word in words]
        halves = [half for word in words for half in (word << 16, word & -65536)]
        return [self.machine.from_bits(half) for half in halves]

    def store_floats(self, values: Step, *index: Index, where: Condition = True) -> None:
        if self.dtype.itemsize == 4:
            words = [self.machine.bits(value) for value in values]
        else:
            words = [self.machine.to_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)]
        self.machine.store(self._at(index), words, len(values) * self.dtype.itemsize, where)

    def load_int(self, *index: Index, where: Condition = True) -> Value:
        return self._load(index, 1, where)[0]

    def store_int(self, value: Value, *index: Index, where: Condition = True) -> None:
        self.machine.store(self._at(index), [value], 4, where)

    def load_bytes(self, *index: Index, count: int = VECTOR, where: Condition = True) -> Value:
        return self._load(index, count, where)[0]

    def store_bytes(self, word: Value, *index: Index, count: int = VECTOR, where: Condition = True) -> None:
        self.machine.store(self._at(index), [word], count, where)


def load_either(
    condition: Condition,
    a: tuple[Buffer, Sequence[Index]],
    b: tuple[Buffer, Sequence[Index]],
    *,
    where: Condition = True,
    otherwise: float = 0.0,
) -> Step:
    """VECTOR floats of one array where the condition holds, else of the other: one load if they are of one dtype."""
    if isinstance(condition, bool):
        buffer, index = a if condition else b
        return buffer.load_floats(*index, where=where, otherwise=otherwise)
    (one, at_one), (other, at_other) = a, b
    if one.dtype != other.dtype:
        from_one = one.load_floats(*at_one, where=where & condition, otherwise=otherwise)
        from_other = other.load_floats(*at_other, where=where & negate(condition), otherwise=otherwise)
        return [select(condition, x, y) for x, y in zip(from_one, from_other, strict=True)]
    address = select(condition, one._at(at_one), other._at(at_other))
    either = dataclasses.replace(one, address=address, shape=(), constant=False)
    return either.load_floats(where=where, otherwise=otherwise)


class Divisor:
    """Divides several numbers by one, correctly rounded: a reciprocal once, then three instructions for each.

    With r = 1 / d correctly rounded, q = x r is off by an ulp at most, the remainder x - q d is exact, and
    q + remainder r is the rounded quotient (Markstein), where nothing underflows. An infinite d gives 0, NaN gives NaN.
    """

    def __init__(self, d: Value):
        self.machine = d.machine
        self.inverse = d.machine.reciprocal(d)
        self.minus_d = d.minimum(_LARGEST) * -1.0  # finite: 0 * inf would be NaN

    def __rtruediv__(self, x: Value) -> Value:
        quotient = x * self.inverse
        remainder = self.machine.fma(quotient, self.minus_d, x)
        return self.machine.fma(remainder, self.inverse, quotient)


def add(a: Value, b: Value) -> Value:
    return a + b


def maximum(a: Value, b: Value) -> Value:
    return a.maximum(b)


Op = Callable[[Value, Value], Value]


def fold(op: Op, values: Sequence[Value]) -> Value:
    return functools.reduce(op, values)


class Team:
    """A warp or a warpgroup that works on one row at a time."""

    def __init__(self, machine: Machine, size: int):
        self.machine, self.size = machine, size
        self.lane = machine.thread % size

    def barrier(self) -> None:
        """All lanes of the team arrive. Needed between two uses of one reduction, as in a loop."""
        if self.size > WARP:
            self.machine.barrier("warpgroup")

    def neighbours(self, op: Op, x: Value, lanes: int) -> Value:
        """x reduced over groups of ``lanes`` neighbouring lanes of a warp; each lane gets its group's result."""
        distance = 1
        while distance < lanes:
            x = op(x, self.machine.shuffle_xor(x, distance))
            distance *= 2
        return x

    def reduce(self, *terms: tuple[Op, Value]) -> list[Value]:
        """Each (op, x) reduced over the team; all lanes get the results. One exchange for all terms.

        The exchange's shared memory is the block's: of a block's warpgroups, one at a time may reduce here.
        """
        partial = [self.neighbours(op, x, WARP) for op, x in terms]
        if self.size == WARP:
            return partial
        machine, warps = self.machine, self.size // WARP
        warp = self.lane // WARP
        results = []
        offsets = [machine.take_shared(4 * warps) for _ in terms]
        for offset, x in zip(offsets, partial, strict=True):
            word = machine.bits(x) if x.kind == "f32" else x
            machine.store_shared(warp * 4 + offset, [word], 4, (self.lane % WARP).equals(0))
        machine.barrier("warpgroup")
        for offset, (op, x) in zip(offsets, terms, strict=True):
            words = machine.load_shared(machine.constant(offset, "i32"), 4 * warps)
            results.append(fold(op, [machine.from_bits(word) if x.kind == "f32" else word for word in words]))
        return results


class Row:
    """How a row of ``dim`` channels lies over a team."""

    def __init__(self, team: Team, dim: int):
        self.team, self.dim, self.machine = team, dim, team.machine
        width = VECTOR * team.size
        self.steps = -(-dim // width)
        self.channel = [team.lane * VECTOR + step * width for step in range(self.steps)]

    def before(self, step: int, bound: int) -> Condition:
        """Whether a step's channels lie below ``bound``, a multiple of VECTOR."""
        width = VECTOR * self.team.size
        if (step + 1) * width <= bound:
            return True
        return False if step * width >= bound else self.channel[step] < bound

    def load(
        self, buffer: Buffer, *lead: Index, first: int = 0, where: Condition = True, otherwise: float = 0.0
    ) -> Channels:
        """Channels [first, first + dim) of the last axis, at the leading indices."""
        return [
            buffer.load_floats(*lead, channel + first, where=where & self.before(step, self.dim), otherwise=otherwise)
            for step, channel in enumerate(self.channel)
        ]

    def load_either(
        self,
        condition: Condition,
        a: tuple[Buffer, Sequence[Index]],
        b: tuple[Buffer, Sequence[Index]],
        *,
        first: tuple[int, int] = (0, 0),
        where: Condition = True,
        otherwise: float = 0.0,
    ) -> Channels:
        """As ``load``, of one array where the condition holds and of the other elsewhere."""
        return [
            load_either(
                condition,
                (a[0], (*a[1], channel + first[0])),
                (b[0], (*b[1], channel + first[1])),
                where=where & self.before(step, self.dim),
                otherwise=otherwise,
            )
            for step, channel in enumerate(self.channel)
        ]

    def store(self, buffer: Buffer, values: Channels, *lead: Index, where: Condition = True) -> None:
        for step, channel in enumerate(self.channel):
            buffer.store_floats(values[step], *lead, channel, where=where & self.before(step, self.dim))

    def map(self, function: Callable[..., Value], *rows: Channels) -> Channels:
        """function applied channel by channel."""
        return [[function(*values) for values in zip(*steps, strict=True)] for steps in zip(*rows, strict=True)]

    def constant(self, number: float) -> Channels:
        return [[self.machine.constant(number, "f32")] * VECTOR for _ in range(self.steps)]
