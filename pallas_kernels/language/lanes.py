"""The words that kernel bodies use on top of ``machine``: arrays in device memory, and rows spread over teams of lanes.

Buffer      an array in device memory, addressed by indices
Team        a part of a warp, a warp or a warpgroup that holds a row between its lanes, and reduces over it
Row         how the channels of a row lie over a team: lane t holds channels 4t .. 4t + 3 of every step
Divisor     divides several numbers by one
fold        a reduction over a Python list of values
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
    WARPGROUP,
    Channels,
    Condition,
    Index,
    Machine,
    Step,
    Value,
    negate,
    select,
)
from pallas_kernels.language.shared import Shared

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array in device memory: f32, bf16, int32 or uint8 (others as packed words), in row-major order.

    A kernel's body gets one for each array of its launch. Floats come and go as f32, whole numbers as i32. What is
    loaded or stored at once are ``count`` neighbours along the last axis, 1, 2, 4, 8 or 16 bytes in all, at a multiple
    of their size; the last index is the first of them. An index is an i32 Value or an int, one for each axis; offsets
    are computed in 64 bits. A load or store does nothing in the lanes where ``where`` does not hold, whatever their
    indices are: a predicate and no branch, so that all loads of a body are in flight at once.

    Raises:
      TypeError: another number of indices, another dtype than the word is for, or a size that no access has.
    """

    machine: Machine
    address: Value  # i64, of the first element
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    constant: bool  # nothing writes it while the kernel runs

    def instead(self, condition: Value, other: Buffer) -> Buffer:
        """The other array, of the same shape and dtype, in the lanes where the condition holds."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            raise TypeError(f"{other.dtype} {other.shape} does not stand in for {self.dtype} {self.shape}")
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

    def _expect(self, *dtypes: str) -> None:
        if self.dtype.name not in dtypes:
            raise TypeError(f"an array of {' or '.join(dtypes)} is meant, this one is of {self.dtype.name}")

    def _expect_floats(self, count: int) -> None:
        self._expect("float32", "bfloat16")
        if self.dtype.itemsize == 2 and count % 2:
            raise TypeError(f"{count} neighbours of a bfloat16 array: write an even number")

    def _load(self, index: Sequence[Index], count: int, where: Condition, otherwise: int = 0) -> list[Value]:
        size = count * self.dtype.itemsize
        if where is False:
            return [self.machine.constant(otherwise, "i32")] * -(-size // 4)
        return self.machine.load(self.address_of(index), size, where, constant=self.constant, otherwise=otherwise)

    # Floats.
    def load_floats(self, *index: Index, count: int = VECTOR, where: Condition = True, otherwise: float = 0.0) -> Step:
        """``count`` neighbours of an f32 or bf16 array, as f32: ``a, b = x.load_floats(row, 2 * pair, count=2)``.

        ``otherwise`` (rounded to the array's dtype) where not: cheaper than a select, which waits for the load. Of a
        bf16 array they are even in number.
        """
        self._expect_floats(count)
        pattern = np.full(4 // self.dtype.itemsize, otherwise, self.dtype).view(np.int32)
        words = self._load(index, count, where, int(pattern[0]))
        if self.dtype.itemsize == 4:
            return [self.machine.from_bits(word) for word in words]
        halves = [half for word in words for half in (word << 16, word & -65536)]
        return [self.machine.from_bits(half) for half in halves]

    def store_floats(self, values: Step, *index: Index, where: Condition = True) -> None:
        """f32 values to neighbours of an f32 or bf16 array, rounded to nearest even; an even number to bf16."""
        self._expect_floats(len(values))
        if self.dtype.itemsize == 4:
            words = [self.machine.bits(value) for value in values]
        else:
            words = [self.machine.to_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)]
        self.machine.store(self.address_of(index), words, len(values) * self.dtype.itemsize, where)

    # Whole numbers.
    def load_int(self, *index: Index, where: Condition = True, otherwise: int = 0) -> Value:
        """An element of an int32 array; ``otherwise`` where not."""
        self._expect("int32")
        return self._load(index, 1, where, otherwise)[0]

    def store_int(self, value: Value, *index: Index, where: Condition = True) -> None:
        """An i32 to an element of an int32 array."""
        self._expect("int32")
        self.machine.store(self.address_of(index), [value], 4, where)

    # Elements as they lie.
    def load_bytes(self, *index: Index, count: int = VECTOR, where: Condition = True) -> Value:
        """1, 2 or 4 neighbours of a uint8 array in one i32, the first one in the low byte; 0 where not."""
        self._expect("uint8")
        if count > 4:
            raise TypeError(f"{count} bytes in one i32: load_words takes up to 16")
        return self._load(index, count, where)[0]

    def store_bytes(self, word: Value, *index: Index, count: int = VECTOR, where: Condition = True) -> None:
        """The low 1, 2 or 4 bytes of an i32 to neighbours of a uint8 array."""
        self._expect("uint8")
        self.machine.store(self.address_of(index), [word], count, where)

    def load_words(self, *index: Index, count: int, where: Condition = True) -> list[Value]:
        """``count`` elements of any dtype as they lie, packed into i32, the first one in the low bits; 0 where not."""
        return self._load(index, count, where)

    def store_words(self, words: Sequence[Value], *index: Index, where: Condition = True) -> None:
        """1, 2 or 4 i32 to elements of any dtype, packed as ``load_words`` gives them."""
        self.machine.store(self.address_of(index), words, 4 * len(words), where)


def load_either(
    condition: Condition,
    a: tuple[Buffer, Sequence[Index]],
    b: tuple[Buffer, Sequence[Index]],
    *,
    where: Condition = True,
    otherwise: float = 0.0,
) -> Step:
    """VECTOR floats of one array where the condition holds, else of another: one load if they are of one dtype.

    Args:
      a, b: an array and the indices in it; those of the array that a lane does not read may be out of bounds.
      where, otherwise: as of ``Buffer.load_floats``.
    """
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
    """Divides several f32 by one, correctly rounded: a reciprocal once, then three instructions for each.

        divisor = Divisor(scale)
        codes = machine.to_e4m3([value / divisor for value in values])

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
    """a + b, as an operation to reduce by."""
    return a + b


def maximum(a: Value, b: Value) -> Value:
    """The larger one, as an operation to reduce by; NaN where either is."""
    return a.maximum(b)


Op = Callable[[Value, Value], Value]


def fold(op: Op, values: Sequence[Value]) -> Value:
    """One value of a list of values of a lane, from left to right: ``fold(add, squares)``. The list is not empty."""
    return functools.reduce(op, values)


def fold_tree(op: Op, values: Sequence[Value]) -> Value:
    """As ``fold``, by pairs: a shorter chain of operations that wait for each other, another order of sums."""
    while len(values) > 1:
        pairs = [op(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = [*pairs, values[-1]] if len(values) % 2 else pairs
    return values[0]


class Team:
    """A part of a warp (a power of two of lanes), a warp or a warpgroup that works on one row at a time.

        team = Team(machine, WARP)
        (total,) = team.reduce((add, x))  # the sum of the warp's 32 x, in all its lanes

    Attributes:
      size: lanes, a power of two up to 32, or 128.
      lane: i32, the lane's number in its team.
    """

    def __init__(self, machine: Machine, size: int):
        if size not in (1, 2, 4, 8, 16, WARP, WARPGROUP):
            raise TypeError(f"a team of {size} lanes: write a power of two up to {WARP}, or {WARPGROUP}")
        self.machine, self.size = machine, size
        self.lane = machine.thread % size

    def barrier(self) -> None:
        """All lanes of the team arrive. Needed between two uses of one reduction, as in a loop."""
        if self.size > WARP:
            self.machine.barrier("warpgroup")

    def neighbours(self, op: Op, x: Value, lanes: int) -> Value:
        """x reduced over groups of ``lanes`` neighbouring lanes of a warp, a power of two: each gets its group's."""
        distance = 1
        while distance < lanes:
            x = op(x, self.machine.shuffle_xor(x, distance))
            distance *= 2
        return x

    def reduce(self, *terms: tuple[Op, Value]) -> list[Value]:
        """Each (op, x), x an i32 or f32, reduced over the team; all lanes get the results. One exchange for all terms.

        The exchange's shared memory is the block's: of a block's warpgroups, one at a time may reduce here.
        """
        partial = [self.neighbours(op, x, min(self.size, WARP)) for op, x in terms]
        if self.size <= WARP:
            return partial
        machine, warps = self.machine, self.size // WARP
        warp = self.lane // WARP
        results = []
        rooms = [Shared.take(machine, (warps,), "i32") for _ in terms]
        for room, x in zip(rooms, partial, strict=True):
            room.store_int(machine.bits(x) if x.kind == "f32" else x, warp, where=self.lane % WARP == 0)
        machine.barrier("warpgroup")
        for room, (op, x) in zip(rooms, terms, strict=True):
            words = room.load_words(0, count=warps)
            results.append(fold(op, [machine.from_bits(word) if x.kind == "f32" else word for word in words]))
        return results


class Row:
    """How a row of ``dim`` f32 channels lies over a team: a lane has VECTOR neighbouring channels of every step.

        row = Row(Team(machine, WARP), 512)  # 4 steps of 32 x 4 channels
        y = row.load(x, n)
        row.store(out, row.map(lambda a: a * 2.0, y), n)

    Attributes:
      steps: the row's length in steps; the last one may end within the team.
      channel: per step, i32, the first of the lane's channels.
    """

    def __init__(self, team: Team, dim: int):
        self.team, self.dim, self.machine = team, dim, team.machine
        width = VECTOR * team.size
        self.steps = -(-dim // width)
        self.channel = [team.lane * VECTOR + step * width for step in range(self.steps)]

    def before(self, step: int, bound: int) -> Condition:
        """Whether a step's channels lie below ``bound``, a multiple of VECTOR; a Python bool where all do or none."""
        width = VECTOR * self.team.size
        if (step + 1) * width <= bound:
            return True
        return False if step * width >= bound else self.channel[step] < bound

    def load(
        self, buffer: Buffer, *lead: Index, first: int = 0, where: Condition = True, otherwise: float = 0.0
    ) -> Channels:
        """Channels [first, first + dim) of the last axis, at the leading indices; ``otherwise`` where not."""
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
        """As ``load``, of one array where the condition holds and of the other elsewhere: (array, leading indices)."""
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
        """To channels [0, dim) of the last axis, at the leading indices."""
        for step, channel in enumerate(self.channel):
            buffer.store_floats(values[step], *lead, channel, where=where & self.before(step, self.dim))

    def map(self, function: Callable[..., Value], *rows: Channels) -> Channels:
        """function applied channel by channel: ``row.map(lambda a, b: a * b, y, weight)``."""
        return [[function(*values) for values in zip(*steps, strict=True)] for steps in zip(*rows, strict=True)]

    def constant(self, number: float) -> Channels:
        """A row of one number."""
        return [[self.machine.constant(number, "f32")] * VECTOR for _ in range(self.steps)]
