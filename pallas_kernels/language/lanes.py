"""Types that kernel bodies use on top of ``machine``: arrays in device memory, and rows spread over teams of lanes.

Shaped      what a leaf of a tree is, inside of a kernel and outside
Buffer      an array in device memory, addressed by indices
Mailbox     an array in device memory through which the blocks of a grid send each other floats
Team        part of a warp, a warp, or a warpgroup, which together hold a row and reduce over it
Row         how a row is spread over a team: lane t holds channels 4t .. 4t + 3 of every step
Divisor     divides several numbers by the same one
fold        reduces a Python list of values
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Step, Value, negate, select

_LARGEST = float(np.finfo(np.float32).max)


class Shaped(Protocol):
    """A leaf of the trees that kernels take: an array, the shape and dtype of one, or its buffer in a body.

    The classes of such trees are generic in it. ``KVRows[jax.Array]`` are rows outside of a kernel,
    ``KVRows[jax.ShapeDtypeStruct]`` are asked for as a result, and a body works with ``KVRows[Buffer]``.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array in device memory: f32, bf16, int32 or uint8 (others as packed words), in row-major order.

    A kernel's body gets one for each array of its launch. Floats are loaded and stored as f32, and whole numbers as
    i32. One access moves ``count`` adjacent elements along the last axis, 1, 2, 4, 8 or 16 bytes in all, at an offset
    that is a multiple of their size. The last index is that of the first element. Each index is an i32 Value or an int,
    and there is one for each axis. Offsets are computed in 64 bits. In lanes where ``where`` is False an access does
    nothing, whatever the indices are. This is a predicate and not a branch, so all loads of a body can be in flight at
    the same time.

    Raises:
      TypeError: the number of indices is wrong, the method does not support this dtype, or no access has this size.
    """

    machine: Machine
    address: Value  # i64 address of the first element
    shape: tuple[int, ...]
    dtype: np.dtype
    constant: bool  # whether nothing writes it while the kernel runs

    def instead(self, condition: Value, other: Buffer) -> Buffer:
        """Return another array of this shape and dtype in lanes where the condition holds, and this one elsewhere."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            raise TypeError(f"expected an array like {self.dtype} {self.shape}, got {other.dtype} {other.shape}")
        return dataclasses.replace(self, address=select(condition, other.address, self.address))

    def address_of(self, index: Sequence[Index]) -> Value:
        """Return the i64 address of an element."""
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
        """Load ``count`` adjacent elements of an f32 or bf16 array as f32.

        ``a, b = x.load_floats(row, 2 * pair, count=2)`` for example loads two.

        Lanes where ``where`` is False get ``otherwise``, rounded to the array's dtype. This is cheaper than a select,
        which must wait for the load. For a bf16 array ``count`` must be even, or 1.
        """
        self._expect_floats(count if count > 1 else 2)
        pattern = np.full(4 // self.dtype.itemsize, otherwise, self.dtype).view(np.int32)
        words = self._load(index, count, where, int(pattern[0]))
        if self.dtype.itemsize == 4:
            return [self.machine.from_bits(word) for word in words]
        halves = [half for word in words for half in (word << 16, word & -65536)]
        return [self.machine.from_bits(half) for half in halves[:count]]

    def store_floats(self, values: Step, *index: Index, where: Condition = True) -> None:
        """Store f32 values to adjacent elements of an f32 or bf16 array, rounded to nearest even.

        For a bf16 array their number must be even.
        """
        self._expect_floats(len(values))
        if self.dtype.itemsize == 4:
            words = [self.machine.bits(value) for value in values]
        else:
            words = [self.machine.to_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)]
        self.machine.store(self.address_of(index), words, len(values) * self.dtype.itemsize, where)

    # Whole numbers.
    def load_int(self, *index: Index, where: Condition = True, otherwise: int = 0) -> Value:
        """Load an element of an int32 array; ``otherwise`` where ``where`` is False."""
        self._expect("int32")
        return self._load(index, 1, where, otherwise)[0]

    def store_int(self, value: Value, *index: Index, where: Condition = True) -> None:
        """Store an i32 to an element of an int32 array."""
        self._expect("int32")
        self.machine.store(self.address_of(index), [value], 4, where)

    # Elements without conversion.
    def load_bytes(self, *index: Index, count: int = VECTOR, where: Condition = True) -> Value:
        """Load 1, 2 or 4 adjacent elements of a uint8 or bool array into an i32, the first in the low byte.

        It is 0 where ``where`` is False.
        """
        self._expect("uint8", "bool")
        if count > 4:
            raise TypeError(f"{count} bytes in one i32: load_words takes up to 16")
        return self._load(index, count, where)[0]

    def store_bytes(self, word: Value, *index: Index, count: int = VECTOR, where: Condition = True) -> None:
        """Store the low 1, 2 or 4 bytes of an i32 to adjacent elements of a uint8 or bool array, of bools 0 or 1."""
        self._expect("uint8", "bool")
        self.machine.store(self.address_of(index), [word], count, where)

    def load_words(self, *index: Index, count: int, where: Condition = True) -> list[Value]:
        """Load ``count`` elements of any dtype without conversion, packed into i32 with the first one in the low bits.

        They are 0 where ``where`` is False.
        """
        return self._load(index, count, where)

    def store_words(self, words: Sequence[Value], *index: Index, where: Condition = True) -> None:
        """Store 1, 2 or 4 i32 to elements of any dtype, packed as ``load_words`` returns them."""
        self.machine.store(self.address_of(index), words, 4 * len(words), where)


_MAIL = np.dtype("uint64")  # a float and the number of its launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mailbox:
    """An array of f32 in device memory, through which the blocks of a grid send each other floats without a barrier.

        mail = Mailbox.open(machine, (blocks, 4))
        mail.send_floats([a, b], block, 0)
        machine.barrier("block")
        mail.close()
        one, other = mail.receive_floats([(block - 1, 0), (block - 1, 2)], count=2)

    Each float travels in one access together with the number of its launch, for which its receiver waits. So it is
    there as soon as it arrives. At a barrier of the grid, a block first waits until others see all that it stored, then
    until all have said so, and then loads.

    An element is sent at most once in a launch: alone, or with its neighbour along the last axis, the first of both at
    an even index. All blocks of the launch must run at once, and a device must not run two launches of one kernel at
    once, as for ``machine.barrier("grid")``. The memory is the kernel's own, for as long as it is loaded.
    """

    machine: Machine
    sent: Buffer
    launch: Value  # i32, the number of this launch

    @classmethod
    def open(cls, machine: Machine, shape: tuple[int, ...]) -> Mailbox:
        """Return the launch's mailbox, of which it has one. All lanes of all blocks call it, and ``close`` later."""
        if shape[-1] % 2:
            raise TypeError(f"{shape[-1]} floats along the last axis of a mailbox: write an even number")
        address, launch = machine.open_mail(math.prod(shape))
        return cls(machine=machine, sent=Buffer(machine, address, shape, _MAIL, False), launch=launch)

    def close(self) -> None:
        """Say that this block knows the number of the launch: all its lanes, after a barrier of the block.

        It may send and receive afterwards.
        """
        self.machine.close_mail()

    def send_floats(self, values: Step, *index: Index, where: Condition = True) -> None:
        """Send one float or two, of which the index is that of the first."""
        words = [self.machine.bits(value) for value in values]
        self.machine.send(self.sent.address_of(index), words, self.launch, where)

    def receive_floats(
        self, places: Sequence[Sequence[Index]], *, count: int, where: Sequence[Condition] | None = None
    ) -> list[Step]:
        """Return one float or two of each place, which has an index, once they have arrived.

        All are asked for before any is waited for. Where the condition of a place does not hold, they are 0. All lanes
        of a warp call it.
        """
        addresses = [self.sent.address_of(index) for index in places]
        conditions = [True] * len(places) if where is None else where
        found = self.machine.receive(addresses, count, self.launch, conditions)
        return [[self.machine.from_bits(word) for word in words] for words in found]


class Divisor:
    """Divides several f32 by the same one, correctly rounded: one reciprocal, then three instructions for each.

        divisor = Divisor(scale)
        codes = machine.to_e4m3([value / divisor for value in values])

    With r = 1 / d correctly rounded, q = x r is off by at most one ulp, the remainder x - q d is exact, and q +
    remainder r is the correctly rounded quotient if nothing underflows (Markstein). An infinite d gives 0, and NaN
    gives NaN.
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
    """Return a + b, as an operation to reduce by."""
    return a + b


def maximum(a: Value, b: Value) -> Value:
    """Return the larger value, or NaN if either is, as an operation to reduce by."""
    return a.maximum(b)


Op = Callable[[Value, Value], Value]


def fold(op: Op, values: Sequence[Value]) -> Value:
    """Reduce a nonempty list of a lane's values from left to right: ``fold(add, squares)``."""
    return functools.reduce(op, values)


def fold_tree(op: Op, values: Sequence[Value]) -> Value:
    """Reduce as ``fold`` does, but pairwise. Fewer operations wait for each other, and sums are in another order."""
    while len(values) > 1:
        pairs = [op(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = [*pairs, values[-1]] if len(values) % 2 else pairs
    return values[0]


def packed_bytes(bytes: list[Value]) -> Value:
    """Return up to four i32 below 256 as the bytes of one, the first in its low bits."""
    return fold(lambda a, b: a | b, [byte << 8 * i if i else byte for i, byte in enumerate(bytes)])


def running_sum(machine: Machine, x: Value) -> Value:
    """Return the sum of an i32 over the lanes of a warp up to and including each lane."""
    for distance in (1, 2, 4, 8, 16):
        before = machine.shuffle_up(x, distance)
        x = x + select(machine.thread % WARP >= distance, before, 0)
    return x


def swapped(machine: Machine, is_odd: Value, pair: tuple[Value, Value], distance: int) -> tuple[Value, Value]:
    """Exchange words between two lanes: the even one gets both first words, the odd one both second ones.

    Both get them in the order of the lanes. So 2 x 2 words are transposed; larger squares take several exchanges.

    Args:
      machine: of the words.
      is_odd: whether the lane is the later one of the two.
      pair: the lane's two words.
      distance: between the two lanes, a power of two below 32, as for ``shuffle_xor``.
    """
    first, second = pair
    got = machine.shuffle_xor(machine.select(is_odd, first, second), distance)
    return machine.select(is_odd, got, first), machine.select(is_odd, second, got)


def quad_transposed(machine: Machine, words: list[Value]) -> tuple[Value, Value, Value, Value]:
    """Exchange four words in a quad: its n-th lane gets the n-th words of all four, in the order of the lanes."""
    lane, (a, b, c, d) = machine.thread % 4, words
    (a, c), (b, d) = (swapped(machine, lane >= 2, pair, 2) for pair in ((a, c), (b, d)))
    (a, b), (c, d) = (swapped(machine, lane % 2 == 1, pair, 1) for pair in ((a, b), (c, d)))
    return a, b, c, d


class Team:
    """Part of a warp (a power of two of lanes), a warp, or a warpgroup, which works on one row at a time.

        team = Team(machine, WARP)
        (total,) = team.reduce((add, x))  # the sum of x over the warp's 32 lanes, in all of them

    Attributes:
      size: number of lanes, a power of two up to 32, or 128.
      lane: i32, the lane's number in its team.
    """

    def __init__(self, machine: Machine, size: int):
        if size not in (1, 2, 4, 8, 16, WARP, WARPGROUP):
            raise TypeError(f"a team of {size} lanes: write a power of two up to {WARP}, or {WARPGROUP}")
        self.machine, self.size = machine, size
        self.lane = machine.thread % size

    def barrier(self) -> None:
        """Wait for all lanes of the team. Needed between two executions of one ``reduce``, as in a loop."""
        if self.size > WARP:
            self.machine.barrier("warpgroup")

    def neighbours(self, op: Op, x: Value, lanes: int) -> Value:
        """Reduce x over groups of ``lanes`` adjacent lanes of a warp, a power of two.

        Each lane gets the result of its group.
        """
        distance = 1
        while distance < lanes:
            x = op(x, self.machine.shuffle_xor(x, distance))
            distance *= 2
        return x

    def reduce(self, *terms: tuple[Op, Value]) -> list[Value]:
        """Reduce each (op, x), with x an i32 or f32, over the team. All lanes get the results.

        All terms share one exchange between warps. It uses shared memory of the block, so only one warpgroup of a block
        may reduce here at a time.
        """
        partial = [self.neighbours(op, x, min(self.size, WARP)) for op, x in terms]
        if self.size <= WARP:
            return partial
        machine, warps = self.machine, self.size // WARP
        warp = self.lane // WARP
        results = []
        before = machine.shared_bytes
        rooms = [Shared.take(machine, (warps,), "i32") for _ in terms]
        machine.scratch_bytes += machine.shared_bytes - before
        for room, x in zip(rooms, partial, strict=True):
            room.store_int(machine.bits(x) if x.kind == "f32" else x, warp, where=self.lane % WARP == 0)
        machine.barrier("warpgroup")
        for room, (op, x) in zip(rooms, terms, strict=True):
            words = room.load_words(0, count=warps)
            results.append(fold(op, [machine.from_bits(word) if x.kind == "f32" else word for word in words]))
        return results


class Row:
    """How a row of ``dim`` f32 channels is spread over a team: each lane has VECTOR adjacent channels of every step.

        row = Row(Team(machine, WARP), 512)  # 4 steps of 32 x 4 channels
        y = row.load(x, n)
        row.store(out, row.map(lambda a: a * 2.0, y), n)

    Attributes:
      steps: the row's length in steps. The last step may end before the last lane.
      channel: per step, i32, the first of the lane's channels.
    """

    def __init__(self, team: Team, dim: int):
        self.team, self.dim, self.machine = team, dim, team.machine
        width = VECTOR * team.size
        self.steps = -(-dim // width)
        self.channel = [team.lane * VECTOR + step * width for step in range(self.steps)]

    def before(self, step: int, bound: int) -> Condition:
        """Return whether a step's channels are below ``bound``, a multiple of VECTOR.

        A Python bool if that is so for all or none.
        """
        width = VECTOR * self.team.size
        if (step + 1) * width <= bound:
            return True
        return False if step * width >= bound else self.channel[step] < bound

    def load(
        self, buffer: Buffer, *lead: Index, first: int = 0, where: Condition = True, otherwise: float = 0.0
    ) -> Channels:
        """Load channels [first, first + dim) of the last axis at the leading indices.

        They are ``otherwise`` where ``where`` is False.
        """
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
        """Load as ``load`` does, from one array where the condition holds and from another elsewhere.

        It is one load for each step if both have the same dtype.

        Args:
          condition: which of the arrays to load from.
          a, b: each an array and its leading indices, which may be out of bounds in lanes that do not read it.
          first: the first channel in either.
          where, otherwise: as for ``load``.
        """
        (one, at_one), (other, at_other) = a, b
        if isinstance(condition, bool):
            buffer, lead, begin = (one, at_one, first[0]) if condition else (other, at_other, first[1])
            return self.load(buffer, *lead, first=begin, where=where, otherwise=otherwise)
        if one.dtype != other.dtype:
            from_one = self.load(one, *at_one, first=first[0], where=where & condition, otherwise=otherwise)
            but = where & negate(condition)
            from_other = self.load(other, *at_other, first=first[1], where=but, otherwise=otherwise)
            return self.map(lambda x, y: select(condition, x, y), from_one, from_other)
        loaded = []
        for step, channel in enumerate(self.channel):
            at = one.address_of((*at_one, channel + first[0])), other.address_of((*at_other, channel + first[1]))
            either = dataclasses.replace(one, address=select(condition, *at), shape=(), constant=False)
            loaded.append(either.load_floats(where=where & self.before(step, self.dim), otherwise=otherwise))
        return loaded

    def store(self, buffer: Buffer, values: Channels, *lead: Index, where: Condition = True) -> None:
        """Store to channels [0, dim) of the last axis at the leading indices."""
        for step, channel in enumerate(self.channel):
            buffer.store_floats(values[step], *lead, channel, where=where & self.before(step, self.dim))

    def map(self, function: Callable[..., Value], *rows: Channels) -> Channels:
        """Apply a function channel by channel: ``row.map(lambda a, b: a * b, y, weight)``."""
        return [[function(*values) for values in zip(*steps, strict=True)] for steps in zip(*rows, strict=True)]

    def constant(self, number: float) -> Channels:
        """Return a row in which every channel is this number."""
        return [[self.machine.constant(number, "f32")] * VECTOR for _ in range(self.steps)]
