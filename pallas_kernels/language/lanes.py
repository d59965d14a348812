"""The words that kernel bodies use on top of ``machine``: arrays in device memory, and rows spread over teams of lanes.

Buffer   an array in device memory, addressed by indices
Team     a part of a warp, a warp or a warpgroup that holds a row between its lanes, and reduces over it
Row      how the channels of a row lie over a team: lane t holds channels 4t .. 4t + 3 of every step
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.language.machine import (
    VECTOR,
    WARP,
    Channels,
    Condition,
    Index,
    Machine,
    Step,
    Value,
    negate,
    select,
)

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array in device memory: f32, bf16, int32 or uint8.

    Floats come and go as f32 (f16 as packed words only); bytes come and go packed, ``count`` of them in one i32. The
    last index is the first of ``count`` neighbours.
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

    def address_of(self, index: Sequence[Index]) -> Value:
        """i64 address of an element."""
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
        return self.machine.load(self.address_of(index), size, where, constant=self.constant, otherwise=otherwise)

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
        self.machine.store(self.address_of(index), words, len(values) * self.dtype.itemsize, where)

    def load_int(self, *index: Index, where: Condition = True, otherwise: int = 0) -> Value:
        return self._load(index, 1, where, otherwise)[0]

    def store_int(self, value: Value, *index: Index, where: Condition = True) -> None:
        self.machine.store(self.address_of(index), [value], 4, where)

    def load_words(self, *index: Index, count: int, where: Condition = True) -> list[Value]:
        """``count`` elements of any dtype as they lie, packed into i32."""
        return self._load(index, count, where)

    def store_words(self, words: Sequence[Value], *index: Index, where: Condition = True) -> None:
        self.machine.store(self.address_of(index), words, 4 * len(words), where)

    def load_bytes(self, *index: Index, count: int = VECTOR, where: Condition = True) -> Value:
        return self._load(index, count, where)[0]

    def store_bytes(self, word: Value, *index: Index, count: int = VECTOR, where: Condition = True) -> None:
        self.machine.store(self.address_of(index), [word], count, where)


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
    address = select(condition, one.address_of(at_one), other.address_of(at_other))
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


def fold_tree(op: Op, values: Sequence[Value]) -> Value:
    """As ``fold``, by pairs: a shorter chain of operations that wait for each other, another order of sums."""
    while len(values) > 1:
        pairs = [op(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = [*pairs, values[-1]] if len(values) % 2 else pairs
    return values[0]


class Team:
    """A part of a warp (a power of two of lanes), a warp or a warpgroup that works on one row at a time."""

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
        partial = [self.neighbours(op, x, min(self.size, WARP)) for op, x in terms]
        if self.size <= WARP:
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
