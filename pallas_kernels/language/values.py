"""Numbers, one per lane, and arithmetic with them.

Value              one number per lane, with Python's operators
select, negate     a choice between two values, and the opposite of a condition
Arithmetic         the operations on numbers that are not operators; a machine is one
"""

from __future__ import annotations

import abc
import numbers
from typing import Any

import numpy as np

from pallas_kernels.language.kinds import (
    INSTEAD_OF_TRUTH,
    INTEGER_BITS,
    OPERATORS,
    SIGNS,
    Kind,
    fitting,
    instead_of_mixing,
    instead_of_operator,
)
from pallas_kernels.language.regions import Region

type Raw = Any  # a number as a machine has it: an array of all lanes' in the simulator, a value in MLIR in PTX


class Value:
    """One number per lane: an i32, an i64, an f32 or a bool.

    Operators work lane by lane. The other operand is a Value of the same kind, or a Python number, which becomes a
    constant of that kind. An i32 accepts only whole numbers, and a bool only True and False. Kinds do not mix.

        + - *             i32 and i64 wrap around; f32 rounds to nearest, and a product is never fused with a sum
        // %              i32 and i64 by a positive int; the left side must not be negative (a GPU divides as unsigned)
        & | ^             bits of i32 and i64; for bools "and", "or" and "exclusive or"
        << >>             by 0 .. 31 bits (i64: 63), a number or a Value; >> shifts zeros in
        < <= > >= == !=   a bool; if either side is NaN only != holds. They bind less tightly than & and |, so write
                          (a == b) & (c < d)

    A value that is made inside a ``when``, an iteration of a loop or a role cannot be used outside of it.

    Raises:
      TypeError: kinds are mixed, a number does not fit, Python asks for the truth value of a Value, or a value is used
        outside of the part of the body that made it.
    """

    __slots__ = ("_raw", "_region", "fault", "kind", "machine")
    machine: Arithmetic
    kind: Kind
    __array_ufunc__ = None  # makes NumPy's numbers on the left use the operators below

    def __init__(
        self,
        machine: Arithmetic,
        kind: Kind,
        raw: Raw,
        fault: np.ndarray | None = None,
        region: Region | None = None,
    ):
        self.machine, self.kind = machine, kind
        self._raw = raw  # the machine's representation
        self.fault = fault  # faults of the number, recorded by the simulator
        self._region = machine.region if region is None else region

    @property
    def raw(self) -> Raw:
        """The machine's representation. Raises TypeError outside of the part of the body that made the value."""
        if self._region.is_left:
            self._region.refuse()
        return self._raw

    def __repr__(self) -> str:
        return f"<{self.kind} value>"

    def __bool__(self) -> bool:
        raise TypeError(INSTEAD_OF_TRUTH)

    def _with(self, op: str, other: Value | float, *, swap: bool = False) -> Value:
        if not isinstance(other, Value):
            other = self.machine.constant(other, self.kind)
        elif other.kind != self.kind:
            raise TypeError(f"{self.kind} {SIGNS[op]} {other.kind}: {instead_of_mixing(self.kind, other.kind)}")
        if op not in OPERATORS[self.kind]:
            raise TypeError(f"{self.kind} {SIGNS[op]} {other.kind}: {instead_of_operator(self.kind)}")
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
        divisor, dividend = self._division("//", other)
        if divisor & (divisor - 1):
            return dividend._with("div", divisor)
        return dividend >> (divisor.bit_length() - 1)

    def __mod__(self, other: int) -> Value:
        divisor, dividend = self._division("%", other)
        if divisor & (divisor - 1):
            return dividend - dividend._with("div", divisor) * divisor
        return dividend & (divisor - 1)

    def _division(self, sign: str, divisor: object) -> tuple[int, Value]:
        """Return the divisor, and the dividend after the machine's check."""
        if self.kind not in INTEGER_BITS:
            raise TypeError(f"{self.kind} {sign} {divisor!r}: {instead_of_operator(self.kind)}")
        if isinstance(divisor, bool) or not isinstance(divisor, numbers.Integral) or int(divisor) <= 0:
            raise TypeError(
                f"{self.kind} {sign} {divisor!r}: the divisor is a positive int, known when the kernel is built"
            )
        return int(divisor), self.machine._bounded(self, None, f"a number below 0 on the left of {sign}")

    def __truediv__(self, other: object) -> Any:
        if isinstance(other, Value | numbers.Number):
            raise TypeError("a / b: write machine.divide(a, b), x * (1 / n) for a number n, or a // n for an integer a")
        return NotImplemented  # ``lanes.Divisor`` divides

    def __and__(self, other: Value | int) -> Any:
        if self.kind == "bool" and isinstance(other, bool):  # this case is known when the kernel is built
            return self if other else False
        return self._with("and", other)

    def __or__(self, other: Value | int) -> Any:
        if self.kind == "bool" and isinstance(other, bool):
            return True if other else self
        return self._with("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._with("xor", other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __rshift__(self, bits: Value | int) -> Value:
        return self._shift("shr", bits)

    def __lshift__(self, bits: Value | int) -> Value:
        return self._shift("shl", bits)

    def _shift(self, op: str, bits: Value | int) -> Value:
        most = INTEGER_BITS.get(self.kind, 0) - 1
        if isinstance(bits, Value):
            bits = self.machine._bounded(bits, most, f"a shift by less than 0 or more than {most} bits")
        elif most > 0 and not 0 <= bits <= most:
            raise TypeError(f"{self.kind} {SIGNS[op]} {bits!r}: write 0 .. {most} bits")
        return self._with(op, bits)

    def __lt__(self, other: Value | float) -> Value:
        return self._with("lt", other)

    def __le__(self, other: Value | float) -> Value:
        return self._with("le", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._with("gt", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._with("ge", other)

    # A class that defines == has no hash, so its values cannot be keys of a dict.
    def __eq__(self, other: Value | float) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._with("eq", other)

    def __ne__(self, other: Value | float) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._with("ne", other)

    def maximum(self, other: Value | float) -> Value:
        """Return the larger value; NaN if either is. Of +0 and -0 in f32 it may return either."""
        return self._with("max", other)

    def minimum(self, other: Value | float) -> Value:
        """Return the smaller value; NaN if either is. Of +0 and -0 in f32 it may return either."""
        return self._with("min", other)


Condition = Value | bool  # a Python bool is a condition known when the kernel is built, and costs nothing
Index = Value | int
VECTOR = 4  # channels that a lane holds per step: 16 bytes of f32
Step = list[Value]  # the VECTOR channels of one lane in one step
Channels = list[Step]  # a lane's part of a row: one Step per step


def select(condition: Condition, a: Value | float, b: Value | float) -> Value:
    """Return a where the condition holds, else b: ``select(x > 0, x, 0)``.

    Both sides are computed in all lanes, so neither may do anything illegal in lanes where it is not chosen; loads have
    a ``where`` for this. One of a and b may be a Python number. A condition known when the kernel is built costs
    nothing.

    Raises:
      TypeError: both are Python numbers, the kinds differ, or the condition is not a bool.
    """
    if not isinstance(a, Value):
        if not isinstance(b, Value):
            raise TypeError(f'select({a!r}, {b!r}): write machine.constant({a!r}, "i32") or "f32" for one of the two')
        a = b.machine.constant(a, b.kind)
    elif not isinstance(b, Value):
        b = a.machine.constant(b, a.kind)
    if a.kind != b.kind:
        raise TypeError(f"select of {a.kind} and {b.kind}: {instead_of_mixing(a.kind, b.kind)}")
    if isinstance(condition, bool):
        return a if condition else b
    return a.machine.select(expect("bool", condition), a, b)


def negate(condition: Condition) -> Condition:
    """Return True where the condition is False: ``negate(a & b)``. A Python bool gives a Python bool.

    Raises:
      TypeError: the condition is not a bool.
    """
    return not condition if isinstance(condition, bool) else expect("bool", condition) == False  # noqa: E712


def expect(kind: Kind, x: object) -> Value:
    """Return x if it is a Value of this kind. Raises TypeError otherwise, with what to write."""
    if not isinstance(x, Value):
        raise TypeError(f'{x!r} is no Value: write machine.constant({x!r}, "{kind}") for a number')
    if x.kind == kind:
        return x
    if kind == "bool":
        raise TypeError(f"a condition is meant, this is an {x.kind}: write x != 0 or another comparison")
    raise TypeError(
        f"an {kind} is meant, this is {'a' if x.kind == 'bool' else 'an'} {x.kind}: {instead_of_mixing(kind, x.kind)}"
    )


class Arithmetic(abc.ABC):
    """The operations on a lane's numbers that are not operators."""

    def __init__(self) -> None:
        self.region = Region("body")  # the part of the body in which values are made now

    def constant(self, number: float, kind: Kind) -> Value:
        """Return a number that is the same in all lanes: ``machine.constant(0, "i32")``. An f32 is rounded to nearest.

        Raises:
          TypeError: the kind cannot represent the number: a fraction or a number too large for an i32, a bool for a
            number, or a number for a bool.
        """
        return self._constant(fitting(number, kind), kind)

    @abc.abstractmethod
    def _constant(self, number: float, kind: Kind) -> Value: ...

    @abc.abstractmethod
    def binary(self, op: str, a: Value, b: Value) -> Value:
        """Apply an operator. Bodies write ``a + b`` instead.

        ``op`` is one of add sub mul div and or xor shl shr max min lt le gt ge eq ne.
        """

    def _bounded(self, x: Value, most: int | None, otherwise: str) -> Value:
        """Return x, which must be in [0, most]. ``otherwise`` describes the fault if it is not."""
        del most, otherwise
        return x

    @abc.abstractmethod
    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Choose between two values.

        Bodies use the function ``select``, which also takes numbers and known conditions.
        """

    @abc.abstractmethod
    def widen(self, x: Value) -> Value:
        """Convert an i32 to i64, keeping its sign. ``machine.widen(row) * row_bytes`` does not wrap around at 2 GiB."""

    @abc.abstractmethod
    def bits(self, x: Value) -> Value:
        """Reinterpret the bits of an f32 as an i32."""

    @abc.abstractmethod
    def from_bits(self, x: Value) -> Value:
        """Reinterpret the bits of an i32 as an f32."""

    @abc.abstractmethod
    def exp(self, x: Value) -> Value:
        """Return e^x of an f32, computed as 2^(x log2 e).

        The product's rounding gives a relative error of about |x| 2^-24. In a softmax x <= 0, so the absolute error of
        a weight is below |x| e^x 2^-24, which is less than half an ulp of 1.
        """

    @abc.abstractmethod
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c of three f32, rounded once."""

    @abc.abstractmethod
    def reciprocal(self, x: Value) -> Value:
        """Return 1 / x of an f32, correctly rounded."""

    @abc.abstractmethod
    def approximate_reciprocal(self, x: Value) -> Value:
        """Return 1 / x of an f32 within 1 ulp, in one instruction. Numbers below 2^-126, given or returned, become 0.

        On the simulator it is correctly rounded.
        """

    @abc.abstractmethod
    def divide(self, a: Value, b: Value) -> Value:
        """Return a / b of two f32, correctly rounded.

        ``lanes.Divisor`` is faster for several numbers with the same divisor.
        """

    @abc.abstractmethod
    def inverse_sqrt(self, x: Value) -> Value:
        """Return 1 / sqrt(x) of an f32. Root and reciprocal are both correctly rounded."""

    @abc.abstractmethod
    def leading_zeros(self, x: Value) -> Value:
        """Return the number of zero bits above the highest one of an i32, 0 .. 32; 32 for 0."""

    @abc.abstractmethod
    def population_count(self, x: Value) -> Value:
        """Return the number of one bits in an i32, 0 .. 32."""

    # Packed conversions: element 0 in the low bits, rounding to nearest, ties to even.
    @abc.abstractmethod
    def to_e4m3(self, values: Step) -> Value:
        """Convert four f32 to E4M3 bytes packed into an i32, the first in the low byte.

        Saturates at 448 and keeps NaN.
        """

    @abc.abstractmethod
    def from_e4m3(self, word: Value) -> Step:
        """Convert four E4M3 bytes packed into an i32 to four f32, exactly."""

    @abc.abstractmethod
    def to_bf16(self, low: Value, high: Value) -> Value:
        """Convert two f32 to two bf16 packed into an i32.

        ``from_bits(word << 16)`` and ``from_bits(word & -65536)`` convert back.
        """
