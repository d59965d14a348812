"""Arithmetic in NumPy, for all blocks and lanes at once, which also keeps track of undefined numbers.

In each lane a value may have a fault. Faults come from shared memory that was never written, and from ``//`` with a
negative left side. A fault alone is not an error, because a lane may compute something that is never used. Arithmetic
passes faults on, ``select`` takes the fault of the side that it chooses, and ``&`` of a faulty condition and False is
False without a fault. SimulationError is raised where a fault would have an effect: in an address, a condition, a
matrix product, or a store to device memory.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.language.kinds import COMPARISONS, Kind
from pallas_kernels.language.machine import Machine
from pallas_kernels.language.simulator.memory import UNWRITTEN, SimulationError
from pallas_kernels.language.values import Condition, Step, Value, expect

_DTYPES = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "bool": np.bool_}
_OPS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.floordiv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "max": np.maximum,
    "min": np.minimum,
}
_INFINITY = 0xFF << 7  # the bits of a bf16
_LANGUAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def elementwise[Results: Value | Sequence[Value]](
    *kinds: Kind,
) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Decorate an operation on operands of these kinds that works lane by lane.

    Results get the faults of their operands.
    """

    def decorate(word: Callable[..., Results]) -> Callable[..., Results]:
        @functools.wraps(word)
        def checked(self: Machine, *operands: Value) -> Results:
            is_faulty = False
            for kind, operand in zip(kinds, operands, strict=True):
                is_faulty |= expect(kind, operand).fault is not None
            results = word(self, *operands)
            if is_faulty:
                fault = joined(operands)
                for result in [results] if isinstance(results, Value) else results:
                    result.fault = fault
            return results

        return checked

    return decorate


@functools.cache
def _whole(number: float, kind: Kind) -> np.ndarray:
    """Return a whole number, or a bool, of all lanes: bodies ask for the same few again and again."""
    array = np.full((1, 1), number, _DTYPES[kind])
    array.flags.writeable = False
    return array


def joined(values: Sequence[Value]) -> np.ndarray | None:
    """Return the fault of a result that depends on all of these."""
    faults = [value.fault for value in values if value.fault is not None]
    return functools.reduce(np.maximum, faults) if faults else None


def _if_any(fault: np.ndarray) -> np.ndarray | None:
    return fault if fault.any() else None


class Word(Value):
    """An i32 of which is known what it holds: the name of a NumPy dtype."""

    __slots__ = ("dtype",)

    def __init__(self, value: Value, dtype: str):
        super().__init__(value.machine, value.kind, value.raw, value.fault)
        self.dtype = dtype


def typed(dtype: str) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Decorate an operation that returns a word of this dtype."""

    def decorate(word: Callable[..., Value]) -> Callable[..., Value]:
        return functools.wraps(word)(lambda *operands: Word(word(*operands), dtype))

    return decorate


def dtype_of(words: Sequence[Value]) -> str:
    """Return the dtype of words that are known to have the same one, else an empty string."""
    dtypes = {word.dtype if isinstance(word, Word) else "" for word in words}
    return dtypes.pop() if len(dtypes) == 1 else ""


class NumPyArithmetic(Machine):
    """Values are arrays that broadcast to [blocks, threads]. So are their faults: numbers of reasons, 0 for none."""

    def __init__(self, blocks: int, threads: int) -> None:
        super().__init__()
        self._shape = blocks, threads
        self._mask = np.ones(self._shape, bool)  # lanes that are active
        self._made = 0  # values so far
        self._reasons = {"shared memory that nobody has written": UNWRITTEN}

    def _wrap(self, kind: Kind, raw: ArrayLike) -> Value:
        self._made += 1
        return Value(self, kind, np.asarray(raw, _DTYPES[kind]))

    def _caller(self) -> str:
        """Return file:line of the kernel code that called the language."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_LANGUAGE, "<")):
            frame = frame.f_back
        return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"

    # Faults.
    def _reason(self, reason: str) -> int:
        """Return the number of a reason. The reason is recorded with the place in the kernel."""
        return self._reasons.setdefault(f"{reason} ({self._caller()})", len(self._reasons) + 1)

    def _suspect(self, x: Value, wrong: np.ndarray, reason: str) -> Value:
        """Return x with a fault in the active lanes where ``wrong`` is True."""
        wrong = wrong & self._mask
        if not wrong.any():
            return x
        fault = np.where(wrong, self._reason(reason), 0).astype(np.int16)
        return Value(self, x.kind, x.raw, fault if x.fault is None else np.maximum(x.fault, fault))

    def _trust(self, x: Value, active: np.ndarray, use: str) -> None:
        """Raise SimulationError if x has a fault in an active lane."""
        if x.fault is None:
            return
        fault = np.broadcast_to(x.fault, self._shape)[active]
        if fault.any():
            number = int(fault[fault > 0][0])
            reason = next(reason for reason, each in self._reasons.items() if each == number)
            raise SimulationError(f"{use} comes of {reason}")

    def _active(self, where: Condition) -> np.ndarray:
        """Return the active lanes where a condition holds."""
        if isinstance(where, bool):
            return self._mask & where
        self._trust(expect("bool", where), self._mask, "a condition")
        return self._mask & where.raw

    # Operations.
    def _constant(self, number: float, kind: Kind) -> Value:
        return self._wrap(kind, np.full((1, 1), number, _DTYPES[kind]) if kind == "f32" else _whole(number, kind))

    def _bounded(self, x: Value, most: int | None, otherwise: str) -> Value:
        wrong = x.raw < 0 if most is None else (x.raw < 0) | (x.raw > most)
        return self._suspect(x, wrong, otherwise) if wrong.any() else x

    def binary(self, op: str, a: Value, b: Value) -> Value:
        assert a.kind == b.kind, (op, a.kind, b.kind)
        x, y = a.raw, b.raw
        if op == "shr":  # logical
            unsigned = np.uint32 if a.kind == "i32" else np.uint64
            raw = (x.view(unsigned) >> y.view(unsigned)).view(x.dtype)
        elif a.kind == "f32":
            with np.errstate(all="ignore"):
                raw = _OPS[op](x, y)
        else:
            raw = _OPS[op](x, y)
        value = self._wrap("bool" if op in COMPARISONS else a.kind, raw)
        if a.fault is not None or b.fault is not None:
            value.fault = self._fault_of_both(op, a, b)
        return value

    def _fault_of_both(self, op: str, a: Value, b: Value) -> np.ndarray | None:
        fault = joined((a, b))
        assert fault is not None
        if a.kind != "bool" or op not in ("and", "or"):
            return fault
        # One side alone may determine the result: False for "and", True for "or".
        one, other = ((x.raw == (op == "or")) & (True if x.fault is None else x.fault == 0) for x in (a, b))
        return _if_any(np.where(one | other, 0, fault))

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        assert a.kind == b.kind, (a.kind, b.kind)
        value = self._wrap(a.kind, np.where(condition.raw, a.raw, b.raw))
        if a.fault is not None or b.fault is not None or condition.fault is not None:
            of_a, of_b = (0 if x.fault is None else x.fault for x in (a, b))
            fault = np.where(condition.raw, of_a, of_b).astype(np.int16)
            value.fault = _if_any(fault if condition.fault is None else np.maximum(fault, condition.fault))
        return value

    @elementwise("i32")
    def widen(self, x: Value) -> Value:
        return self._wrap("i64", x.raw)

    @elementwise("f32")
    def bits(self, x: Value) -> Value:
        return self._wrap("i32", x.raw.view(np.int32))

    @elementwise("i32")
    def from_bits(self, x: Value) -> Value:
        return self._wrap("f32", x.raw.view(np.float32))

    @elementwise("f32")
    def exp(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.exp2(x.raw * np.float32(1 / np.log(2))))

    @elementwise("f32", "f32", "f32")
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        # The product of two f32 is exact in f64. The sum is rounded twice, which differs from one rounding in 1 of 2^29
        # cases.
        with np.errstate(all="ignore"):
            return self._wrap("f32", a.raw.astype(np.float64) * b.raw + c.raw)

    @elementwise("f32")
    def reciprocal(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.float32(1) / x.raw)

    @elementwise("f32")
    def approximate_reciprocal(self, x: Value) -> Value:
        tiny = np.finfo(np.float32).tiny
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / np.where(np.abs(x.raw) < tiny, np.copysign(np.float32(0), x.raw), x.raw)
            return self._wrap("f32", np.where(np.abs(inverse) < tiny, np.copysign(np.float32(0), inverse), inverse))

    @elementwise("f32", "f32")
    def divide(self, a: Value, b: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", a.raw / b.raw)

    @elementwise("f32")
    def inverse_sqrt(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.float32(1) / np.sqrt(x.raw))

    @elementwise("i32")
    def leading_zeros(self, x: Value) -> Value:
        return self._wrap("i32", 32 - np.frexp(x.raw.view(np.uint32).astype(np.float64))[1])  # exact in f64

    @elementwise("i32")
    def population_count(self, x: Value) -> Value:
        return self._wrap("i32", np.bitwise_count(x.raw.view(np.uint32)))

    @typed("float8_e4m3fn")
    def to_e4m3(self, values: Step) -> Value:
        return self._to_e4m3(*values)

    @elementwise("f32", "f32", "f32", "f32")
    def _to_e4m3(self, *values: Value) -> Value:
        stacked = np.stack(np.broadcast_arrays(*[value.raw for value in values]), -1)
        with np.errstate(all="ignore"):
            codes = np.clip(stacked, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes = np.where(np.isnan(stacked), 0x7F, codes).astype(np.uint8)
        return self._wrap("i32", np.ascontiguousarray(codes).view(np.int32)[..., 0])

    @elementwise("i32")
    def from_e4m3(self, word: Value) -> Step:
        codes = np.ascontiguousarray(word.raw)[..., None].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return [self._wrap("f32", codes[..., i]) for i in range(4)]

    @typed("bfloat16")
    @elementwise("f32", "f32")
    def to_bf16(self, low: Value, high: Value) -> Value:
        pair = np.stack(np.broadcast_arrays(low.raw, high.raw), -1)
        with np.errstate(all="ignore"):
            rounded = np.ascontiguousarray(pair.astype(ml_dtypes.bfloat16)).view(np.uint16)
        rounded = np.where(np.isnan(pair), np.uint16(0x7FFF), rounded)  # PTX's canonical NaN
        return self._wrap("i32", np.ascontiguousarray(rounded).view(np.int32)[..., 0])


def multiply_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply bf16 given as uint16 bits, rounding to nearest even.

    Written with whole numbers, because XLA's threads, on which the simulator runs, take subnormal numbers for 0.
    """
    numbers = _numbers_of_bf16()
    with np.errstate(all="ignore"):
        exact = numbers[a] * numbers[b]
        # A product has 16 bits, and an f32 holds 24.
        bits = exact.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    magnitude = np.abs(exact)
    special = ~(magnitude >= 2.0**-126)
    if special.any():
        signs = (exact.view(np.int64) >> 48 & 1 << 15).astype(np.uint16)
        # A zero, or a subnormal number, in steps of 2^-133.
        small = np.rint(np.where(magnitude < 2.0**-126, magnitude, 0.0) * 2.0**133).astype(np.uint16)
        bits = np.where(special, signs | np.where(np.isnan(exact), np.uint16(_INFINITY | 1 << 6), small), bits)
    return bits


@functools.cache
def _numbers_of_bf16() -> np.ndarray:
    """All bf16 by their bits, f64 [65536]."""
    bits = np.arange(1 << 16)
    exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
    steps = np.where(exponent > 0, fraction | 1 << 7, fraction).astype(np.float64)
    magnitude = np.ldexp(steps, np.maximum(exponent, 1) - 134)
    special = np.where(fraction > 0, np.nan, np.inf)
    return np.where(exponent == 0xFF, special, magnitude) * np.where(bits >> 15, -1.0, 1.0)
