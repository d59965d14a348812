"""What a kernel body is written in terms of: one number per lane, and the machine that computes with it.

A body is a Python function of a ``Machine``. It is read by two of them: ``ptx.PTX`` emits it into a Mosaic GPU kernel,
``simulator.Simulator`` runs it in NumPy, with bounds, alignment and race checks. What differs between the two (a load,
a shuffle, a packed conversion) is the ``Machine``; everything above it is ordinary formulas over ``Value``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

Kind = Literal["i32", "i64", "f32", "bool"]
Scope = Literal["warp", "warpgroup", "block", "cluster"]
WARP, WARPGROUP = 32, 128
VECTOR = 4  # channels a lane holds per step: 16 bytes of f32


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

    def __rshift__(self, bits: Value | int) -> Value:
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

    def take_shared(self, size: int, alignment: int = 16) -> int:
        """Byte offset of ``size`` fresh bytes of the block's shared memory."""
        offset = -(-self.shared_bytes // alignment) * alignment
        self.shared_bytes = offset + -(-size // 16) * 16
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
    def shuffle_up(self, x: Value, distance: int) -> Value:
        """The value of the lane ``distance`` (1 .. 31) before it in the warp; the first lanes keep their own."""

    @abc.abstractmethod
    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        """An i32 reduced over the warp, in all its lanes: one instruction."""

    @abc.abstractmethod
    def leading_zeros(self, x: Value) -> Value:
        """Zero bits above an i32's highest one; 32 of 0."""

    @abc.abstractmethod
    def population_count(self, x: Value) -> Value:
        """One bits of an i32."""

    @abc.abstractmethod
    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        """Add to an i32 in shared memory, atomically: what it held before, 0 where not.

        In the block's own shared memory, or in that of the block of a rank in its cluster.
        """

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

    @abc.abstractmethod
    def repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]:
        """again, carry = body(carry), while again: a bool, the same in all lanes that share a barrier."""
