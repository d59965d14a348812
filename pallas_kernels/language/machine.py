"""What a kernel body is written in terms of: numbers, one per lane, and the machine that computes with them.

    Value              one number per lane, with Python's operators
    select, negate     a choice between two of them, and the opposite of a condition
    Machine            what a lane can do that is no operator: loads, stores, shuffles, barriers, branches, loops

A body is a Python function of a ``Machine``. Two machines read it: ``ptx.PTX`` emits it into a Mosaic GPU kernel,
``simulator.Simulator`` runs it in NumPy, with bounds, alignment and race checks. A mistake that a machine can see is a
TypeError that says what to write instead. The simulator raises SimulationError for what would be undefined on a GPU.
"""

from __future__ import annotations

import abc
import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import jax

from pallas_kernels.language import carries
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
from pallas_kernels.language.regions import Part, Region

Scope = Literal["warp", "warpgroup", "block", "cluster"]
WARP, WARPGROUP = 32, 128


class Value:
    """One number per lane: an i32, an i64, an f32 or a bool.

    Operators work lane by lane. The other operand is a Value of the same kind, or a Python number, which becomes a
    constant of that kind: an i32 takes whole numbers only, a bool takes True and False. Kinds do not mix.

        + - *             i32 and i64 wrap around; f32 round to nearest, and no product is fused with a sum
        // %              i32 and i64 by a positive int, of what is not negative (a GPU divides unsigned numbers)
        & | ^             bits of i32 and i64; of bools "and", "or" and "exclusive or"
        << >>             by 0 .. 31 bits (i64: 63), a number or a Value; >> shifts zeros in
        < <= > >= == !=   a bool; with NaN != holds, and nothing else. They bind less tightly than & and |: write
                          (a == b) & (c < d)

    What was made inside a ``when``, in a turn of a loop or in a role ends there.

    Raises:
      TypeError: where kinds mix, where a number does not fit, where Python asks a Value for one truth value, and where
        a value is used after its part of the body.
    """

    __slots__ = ("_raw", "_region", "fault", "kind", "machine")
    machine: Machine
    kind: Kind
    __array_ufunc__ = None  # of NumPy's numbers, too, the operators here are meant

    def __init__(self, machine: Machine, kind: Kind, raw: Any, fault: Any = None, region: Region | None = None):
        self.machine, self.kind = machine, kind
        self._raw = raw  # as the machine holds it
        self.fault = fault  # what the simulator knows to be wrong with it
        self._region = machine.region if region is None else region

    @property
    def raw(self) -> Any:
        """What the machine computes with. TypeError outside of the part of the body that it was made in."""
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

    def _division(self, sign: str, divisor: Any) -> tuple[int, Value]:
        """The divisor, and the dividend as the machine wants it."""
        if self.kind not in INTEGER_BITS:
            raise TypeError(f"{self.kind} {sign} {divisor!r}: {instead_of_operator(self.kind)}")
        if isinstance(divisor, bool) or not isinstance(divisor, numbers.Integral) or int(divisor) <= 0:
            raise TypeError(
                f"{self.kind} {sign} {divisor!r}: the divisor is a positive int, known when the kernel is built"
            )
        return int(divisor), self.machine._bounded(self, None, f"a number below 0 on the left of {sign}")

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Value | numbers.Number):
            raise TypeError("a / b: write machine.divide(a, b), x * (1 / n) for a number n, or a // n for an integer a")
        return NotImplemented  # ``lanes.Divisor`` divides

    def __and__(self, other: Value | int) -> Any:
        if self.kind == "bool" and isinstance(other, bool):  # known when the kernel is built
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

    # A class that compares has no hash, and its values are no keys of a dict: Python sees to that.
    def __eq__(self, other: Value | float) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._with("eq", other)

    def __ne__(self, other: Value | float) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._with("ne", other)

    def maximum(self, other: Value | float) -> Value:
        """The larger one; NaN where either is. Of two zeros of f32, either."""
        return self._with("max", other)

    def minimum(self, other: Value | float) -> Value:
        """The smaller one; NaN where either is. Of two zeros of f32, either."""
        return self._with("min", other)


Condition = Value | bool  # a Python bool is a condition known when the kernel is built, and costs nothing
Index = Value | int
VECTOR = 4  # channels a lane holds per step: 16 bytes of f32
Step = list[Value]  # the VECTOR channels of one lane in one step
Channels = list[Step]  # a lane's part of a row: one Step per step


def select(condition: Condition, a: Value | float, b: Value | float) -> Value:
    """a where the condition holds, else b: ``select(x > 0, x, 0)``.

    Both are computed in all lanes, so that nothing inside may be forbidden where it is not chosen: a load has a
    ``where`` for that. One of the two may be a number. A condition known when the kernel is built costs nothing.

    Raises:
      TypeError: two numbers, two kinds, or a condition that is no bool.
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
    """True where the condition is False: ``negate(a & b)``. A condition known when the kernel is built stays one.

    Raises:
      TypeError: of what is no bool.
    """
    return not condition if isinstance(condition, bool) else expect("bool", condition) == False  # noqa: E712


def expect(kind: Kind, x: Any) -> Value:
    """x, if it is a Value of this kind, else TypeError with what to write."""
    if not isinstance(x, Value):
        raise TypeError(f'{x!r} is no Value: write machine.constant({x!r}, "{kind}") for a number')
    if x.kind == kind:
        return x
    if kind == "bool":
        raise TypeError(f"a condition is meant, this is an {x.kind}: write x != 0 or another comparison")
    raise TypeError(
        f"an {kind} is meant, this is {'a' if x.kind == 'bool' else 'an'} {x.kind}: {instead_of_mixing(kind, x.kind)}"
    )


class Machine(abc.ABC):
    """What a lane can do that is no operator.

    Where a word takes ``where``, it does nothing in the lanes where the condition does not hold, and may be given an
    address there that is none. Addresses are in bytes: an i64 in device memory, an i32 byte offset in the block's
    shared memory. Loads and stores move 32-bit words: a ``size`` of 1, 2 or 4 bytes is one word (zero-extended), 8
    is two, 16 four; an address is a multiple of the size. ``lanes.Buffer`` and ``shared.Shared`` compute addresses
    from indices.
    """

    def __init__(self) -> None:
        self.shared_bytes = 0  # shared memory taken so far
        self.region = Region("body")  # that values are made in now

    def take_shared(self, size: int, alignment: int = 16) -> int:
        """Byte offset of ``size`` fresh bytes of the block's shared memory; ``shared.Shared.take`` makes an array.

        Each call takes more, at most what the launch has (``shared_bytes``); a turn of a loop uses that of the turn
        before again. Nothing is in it: the simulator refuses what depends on bytes that nobody has written.
        """
        offset = -(-self.shared_bytes // alignment) * alignment
        granule = min(alignment, 16)
        self.shared_bytes = offset + -(-size // granule) * granule
        return offset

    # Where a lane is.
    @property
    @abc.abstractmethod
    def thread(self) -> Value:
        """i32 number of the lane in its block, from 0: ``machine.thread % WARP`` is its number in its warp."""

    @abc.abstractmethod
    def block(self, axis: int) -> Value:
        """i32 number of the block along an axis of the launch's grid, 0 or 1; the same for all blocks of a cluster."""

    @property
    @abc.abstractmethod
    def rank(self) -> Value:
        """i32 number of the block in its cluster: of blocks that run together and reach each other's shared memory."""

    # Arithmetic.
    def constant(self, number: float, kind: Kind) -> Value:
        """A number, the same in all lanes: ``machine.constant(0, "i32")``. An f32 is rounded to nearest.

        Raises:
          TypeError: a number that the kind does not have: one with a fraction or too large for an i32, a bool for a
            number, a number for a bool.
        """
        return self._constant(fitting(number, kind), kind)

    @abc.abstractmethod
    def _constant(self, number: Any, kind: Kind) -> Value: ...

    @abc.abstractmethod
    def binary(self, op: str, a: Value, b: Value) -> Value:
        """What ``Value``'s operators are made of; write ``a + b``.

        op: add sub mul div and or xor shl shr max min lt le gt ge eq ne.
        """

    def _bounded(self, x: Value, most: int | None, otherwise: str) -> Value:
        """x, which is to lie in [0, most]; ``otherwise`` says what it is where it does not."""
        del most, otherwise
        return x

    @abc.abstractmethod
    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """What the function ``select`` is made of, which takes numbers and known conditions too."""

    @abc.abstractmethod
    def widen(self, x: Value) -> Value:
        """The i64 of an i32, with its sign: ``machine.widen(row) * row_bytes`` does not wrap around at 2 GiB."""

    @abc.abstractmethod
    def bits(self, x: Value) -> Value:
        """The i32 with the bits of an f32."""

    @abc.abstractmethod
    def from_bits(self, x: Value) -> Value:
        """The f32 with the bits of an i32."""

    @abc.abstractmethod
    def exp(self, x: Value) -> Value:
        """e^x of an f32, as 2^(x log2 e): the product's rounding makes the relative error grow as |x| 2^-24.

        In a softmax, where x <= 0, what a weight is off by is then below |x| e^x 2^-24, less than half an ulp of 1.
        """

    @abc.abstractmethod
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c of three f32, rounded once."""

    @abc.abstractmethod
    def reciprocal(self, x: Value) -> Value:
        """1 / x of an f32, correctly rounded."""

    @abc.abstractmethod
    def divide(self, a: Value, b: Value) -> Value:
        """a / b of two f32, correctly rounded. ``lanes.Divisor`` divides several numbers by one."""

    @abc.abstractmethod
    def inverse_sqrt(self, x: Value) -> Value:
        """1 / sqrt(x) of an f32, each of the two correctly rounded."""

    @abc.abstractmethod
    def leading_zeros(self, x: Value) -> Value:
        """Zero bits above an i32's highest one, 0 .. 32; 32 of 0."""

    @abc.abstractmethod
    def population_count(self, x: Value) -> Value:
        """One bits of an i32, 0 .. 32."""

    # Packed conversions: element 0 in the low bits, rounding to nearest, ties to even.
    @abc.abstractmethod
    def to_e4m3(self, values: Step) -> Value:
        """Four f32 -> four E4M3 bytes in an i32, the first in the low byte; saturates at 448, keeps NaN."""

    @abc.abstractmethod
    def from_e4m3(self, word: Value) -> Step:
        """Four E4M3 bytes in an i32 -> four f32, exactly."""

    @abc.abstractmethod
    def to_bf16(self, low: Value, high: Value) -> Value:
        """Two f32 -> two bf16 in an i32. (Back: ``from_bits(word << 16)`` and ``from_bits(word & -65536)``.)"""

    # Between lanes: all lanes of the warp are active.
    @abc.abstractmethod
    def shuffle_xor(self, x: Value, distance: int) -> Value:
        """The i32 or f32 of the lane of this warp whose number is this lane's ``^ distance``, 1 .. 31."""

    @abc.abstractmethod
    def shuffle_up(self, x: Value, distance: int) -> Value:
        """The i32 or f32 of the lane ``distance`` (1 .. 31) before it in the warp; the first lanes keep their own."""

    @abc.abstractmethod
    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        """An i32 reduced over the warp, in all its lanes: one instruction. ``lanes.Team`` reduces floats too."""

    @abc.abstractmethod
    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        """All lanes of the scope arrive, and then see what the others did in shared and device memory.

        No lane of the scope may miss it, as in a ``when`` that only some of them enter: SimulationError, on a GPU a
        hang.

        Args:
          scope: "warp", "warpgroup", "block" or "cluster".
          leave: of a cluster only, the same in all lanes of a warp: these arrive and do not wait. They are done:
            nothing more is to be loaded or stored by them.
        """

    # Memory.
    @abc.abstractmethod
    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        """Words of device memory; ``lanes.Buffer`` loads by indices.

        Args:
          address: i64, a multiple of ``size``.
          size: bytes, 1, 2, 4, 8 or 16.
          where: lanes that load; the others get ``otherwise`` in each word.
          constant: nothing writes there while the kernel runs (an input): a cache may be used that sees no writes.

        Returns:
          i32 words: one (zero-extended), two or four.
        """

    @abc.abstractmethod
    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None:
        """Words to device memory: ``size`` bytes at an i64 address, a multiple of it; ``lanes.Buffer`` by indices."""

    @abc.abstractmethod
    def load_shared(self, address: Value, size: int) -> list[Value]:
        """i32 words of the block's own shared memory: ``size`` bytes at an i32 byte offset, a multiple of it.

        All active lanes load: where one has nothing to load, give it an address that is safe.
        """

    @abc.abstractmethod
    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        """i32 words to the block's own shared memory, or that of the block of a rank in its cluster."""

    @abc.abstractmethod
    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        """Add to an i32 in shared memory, atomically: what it held before, 0 where not.

        In the block's own shared memory, or in that of the block of a rank in its cluster.
        """

    def hold[Tree](self, values: Tree) -> Tree:
        """The same values, any pytree of them, to be used only after what has been issued so far.

        Without it, a compiler may wait for values that are on their way before it issues the next loads.
        """
        leaves, structure = carries.flatten(values, Value)
        return jax.tree.unflatten(structure, self._hold(leaves))

    @abc.abstractmethod
    def _hold(self, values: list[Value]) -> list[Value]: ...

    # Control.
    @contextlib.contextmanager
    def when(self, condition: Condition) -> Iterator[None]:
        """Run what is inside in the lanes where the condition holds: ``with machine.when(lane < 4): ...``

        A branch, unlike ``where`` and ``select``. What a whole warp or block does together (a shuffle, a barrier) may
        stand inside only if all its lanes go there. Values made inside end with it (TypeError).
        """
        known = condition if isinstance(condition, bool) else expect("bool", condition)
        with self._when(known), self._part("when"):
            yield

    @abc.abstractmethod
    def _when(self, condition: Condition) -> AbstractContextManager[None]: ...

    @overload
    def loop(self, count: Index, body: Callable[[Value, None], None]) -> None: ...

    @overload
    def loop[Carry](self, count: Index, body: Callable[[Value, Carry], Carry], carry: Carry) -> Carry: ...

    def loop(self, count: Index, body: Callable[[Value, Any], Any], carry: Any = None) -> Any:
        """``carry = body(i, carry)`` for i in range(count), and the last carry.

            total = machine.loop(count, lambda i, total: total + values.load_int(i), machine.constant(0, "i32"))

        A GPU's machine calls the body once, the simulator for every turn: nothing but the carry may be different from
        one turn to the next. A Python ``for`` over a range of ints is unrolled.

        Args:
          count: i32, the same in all lanes that share a barrier; none for 0 and less.
          body: gets an i32 and the carry, and returns the next one, of the same structure and kinds.
          carry: any pytree of Values: tuples, lists, dicts, dataclasses registered with JAX, None.

        Raises:
          TypeError: a leaf that is no Value; a body that returns another structure or other kinds.
        """
        leaves, structure = carries.flatten(carry, Value)

        def turn(i: Value, values: list[Value]) -> list[Value]:
            outer = self.region
            with self._part("turn"):
                i, *values = self._made_in(self.region, [i, *values])
                result = carries.alike(body(i, jax.tree.unflatten(structure, values)), carry, Value)
                return self._made_in(outer, result)

        count = count if isinstance(count, int) else expect("i32", count)
        return jax.tree.unflatten(structure, self._loop(count, turn, leaves))

    def repeat[Carry](self, body: Callable[[Carry], tuple[Value, Carry]], carry: Carry) -> Carry:
        """``again, carry = body(carry)``, while again, and the last carry. The body runs once at least.

            half = machine.repeat(lambda x: ((x >> 1) > 10, x >> 1), x)

        Args:
          body: returns a bool, the same in all lanes that share a barrier, and the next carry.
          carry: as of ``loop``.

        Raises:
          TypeError: as of ``loop``; an ``again`` that is no bool.
        """
        leaves, structure = carries.flatten(carry, Value)

        def turn(values: list[Value]) -> tuple[Value, list[Value]]:
            outer = self.region
            with self._part("turn"):
                again, result = body(jax.tree.unflatten(structure, self._made_in(self.region, values)))
                result = [expect("bool", again), *carries.alike(result, carry, Value)]
                again, *values = self._made_in(outer, result)
            return again, values

        return jax.tree.unflatten(structure, self._repeat(turn, leaves))

    @abc.abstractmethod
    def _loop(
        self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]
    ) -> list[Value]: ...

    @abc.abstractmethod
    def _repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]: ...

    @contextlib.contextmanager
    def _part(self, part: Part) -> Iterator[None]:
        """What is made inside ends with it."""
        outer = self.region
        inside = Region(part, outer)
        self.region = inside
        try:
            yield
        finally:
            inside.is_left = True
            self.region = outer

    def _play(self, role: Any) -> None:
        """A role, as a part of the body of its own."""
        with self._part("role"):
            role.body()

    def _made_in(self, region: Region, values: Sequence[Value]) -> list[Value]:
        """The same values, as if they were made in another part of the body."""
        return [Value(self, value.kind, value.raw, value.fault, region) for value in values]
