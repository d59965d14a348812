"""The k-th largest of many keys, by the lanes of one block.

A range of keys is split into 256 bins; the bin with the k-th is the next range. How the keys are held is the caller's:
it visits them, once for every split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from pallas_kernels.language.lanes import add, fold, maximum
from pallas_kernels.language.machine import VECTOR, WARP, Condition, Machine, Value, negate, select

SMALLEST, LARGEST = -(1 << 31), (1 << 31) - 1
INFINITY = 0x7F800000  # the bits of an f32, and its key
_BINS = 256
_PER_LANE = _BINS // WARP  # of the warp that searches them
_GAP = 5 << 23  # keys of five powers of two


def key_of(x: Value) -> Value:
    """i32 whose order is that of f32 numbers: -0 is 0, NaN the largest."""
    bits = x.machine.bits(x)
    return select(x.equals(x), select(bits < 0, SMALLEST - bits, bits), LARGEST)


def number_of(key: Value) -> Value:
    """The f32 of a key."""
    return key.machine.from_bits(select(key < 0, SMALLEST - key, key))


@dataclasses.dataclass(frozen=True)
class Bins:
    """How the keys up to ``top`` lie over bins: 2^shift keys each, counted from the top. i32, the same in all lanes.

    Half of all keys are those of numbers below 1. Where numbers of both signs are looked through, those of magnitudes
    far below the largest, keys from -gap to gap, count as one key.
    """

    top: Value
    shift: Value
    gap: Value

    @classmethod
    def over(cls, low: Value, high: Value, *, has_gap: Value) -> Bins:
        machine = low.machine
        zero = machine.constant(0, "i32")
        gap = select((low < 0) & (high > 0) & has_gap, (high - _GAP).maximum(0), 0)
        bins = cls(high, zero, gap)
        size = bins._closed(high) - bins._closed(low)
        return dataclasses.replace(bins, shift=(24 - machine.leading_zeros(size)).maximum(0))

    def number(self, key: Value) -> Value:
        return (self._closed(self.top) - self._closed(key)) >> self.shift

    def range_of(self, number: Value, low: Value) -> tuple[Value, Value]:
        """The lowest and the highest key of a bin, not below ``low``, the lowest key of all bins."""
        high = self._closed(self.top) - (number << self.shift)
        rest, most = high - self._closed(low), (low.machine.constant(1, "i32") << self.shift) - 1
        lowest = high - select((rest >> self.shift).equals(0), rest, most)
        lowest = select(lowest > 0, lowest + self.gap, lowest - self.gap)
        highest = select(high < 0, high - self.gap, high + self.gap)
        return lowest.maximum(low), highest.minimum(self.top)

    def _closed(self, key: Value) -> Value:
        """The key where there is no gap."""
        return key - key.minimum(self.gap).maximum(0 - self.gap)


@dataclasses.dataclass(frozen=True)
class KeyRange:
    """The keys from low to high. i32 each, the same in all lanes."""

    low: Value
    high: Value
    above: Value  # how many are higher
    count: Value  # how many are in it; 0 if there is no k-th

    def words(self) -> list[Value]:
        return [self.low, self.high, self.above, self.count]


Visit = Callable[[Callable[[Value, Condition], None]], None]  # calls it with keys, and where there are any


class KthKey:
    """A search for the k-th largest key. Its histogram must be cleared, and a barrier passed, before it begins."""

    SHARED_BYTES = 4 * _BINS + 16

    def __init__(self, machine: Machine, threads: int, k: int):
        self.machine, self.threads, self.k = machine, threads, k
        self._histogram, self._found = machine.take_shared(4 * _BINS), machine.take_shared(16)
        self._zero, self._one, self._largest = (machine.constant(number, "i32") for number in (0, 1, LARGEST))
        self._lane = machine.thread % WARP

    def clear(self) -> None:
        vectors = _BINS // VECTOR
        assert vectors <= self.threads, (vectors, self.threads)
        place = self.machine.thread * 16 + self._histogram
        self.machine.store_shared(place, [self._zero] * VECTOR, 16, self.machine.thread < vectors)

    def find(
        self, visit: Visit, low: Value, high: Value, limit: Value | int, *, lowest: Value, above: Value | None = None
    ) -> KeyRange:
        """A range with the k-th largest of the visited keys in [lowest, high]: in [low, high] first.

        It holds at most ``limit`` of them, or only such as are among the k largest, or only equal ones. ``above``
        (default none) more keys are higher than all that are visited. The histogram is clear again afterwards.
        """

        def split(carry: list[Value]) -> tuple[Value, list[Value]]:
            """One that finds a gap, or nothing, and four of eight bits each, at most.

            All are one piece of code: to jump over a second one, and fetch what lies behind it, takes 0.2 us.
            """
            is_first, *words = carry
            found = self._split(visit, KeyRange(*words), lowest=lowest, has_gap=is_first > 0)
            is_enough = found.count.equals(self.k - found.above) | found.low.equals(found.high)
            again = (found.count > limit) & negate(is_enough) & (found.low <= found.high)
            return again, [self._zero, *found.words()]

        none = self._zero
        _, *words = self.machine.repeat(split, [self._one, low, high, none if above is None else above, none])
        found = KeyRange(*words)
        return dataclasses.replace(found, count=select(found.count.equals(LARGEST), self._zero, found.count))

    def _split(self, visit: Visit, keys: KeyRange, *, lowest: Value, has_gap: Value) -> KeyRange:
        """The bin of a range with the k-th largest key.

        If it is not there, the keys from lowest that are below the range, LARGEST in number.
        """
        machine, low, high = self.machine, keys.low, keys.high
        bins = Bins.over(low, high, has_gap=has_gap)

        def count(key: Value, where: Condition) -> None:
            place = bins.number(key) * 4 + self._histogram
            machine.add_shared(place, self._one, where & (key >= low) & (key <= high))

        visit(count)
        machine.barrier("block")
        with machine.when(machine.thread < WARP):
            number, above, count_in_bin = self._search(keys.above)
            is_there = number < _BINS
            from_to = zip(bins.range_of(number, low), (lowest, low - 1), strict=True)
            words = [select(is_there, a, b) for a, b in from_to]
            words += [above, select(is_there, count_in_bin, self._largest)]
            machine.store_shared(self._zero + self._found, words, 16, machine.thread.equals(0))
        machine.barrier("block")
        return KeyRange(*machine.load_shared(self._zero + self._found, 16))

    def _search(self, above: Value) -> tuple[Value, Value, Value]:
        """By one warp, which clears the histogram: the number of the k-th key's bin, how many keys are above it, and
        how many in it."""
        machine = self.machine
        places = [self._lane * (4 * _PER_LANE) + (self._histogram + 16 * i) for i in range(_PER_LANE // VECTOR)]
        counts = [count for place in places for count in machine.load_shared(place, 16)]
        for place in places:
            machine.store_shared(place, [self._zero] * VECTOR, 16, True)
        of_lane = list(itertools.accumulate(counts))
        before = running_sum(machine, of_lane[-1]) - of_lane[-1] + above
        through = [before + count for count in of_lane]
        # Of the bins that end above the k-th: their number and their keys; and the keys through the next one.
        is_above = [number < self.k for number in through]
        number = fold(add, [select(ends, self._one, 0) for ends in is_above])
        less = fold(maximum, [select(ends, n, above) for ends, n in zip(is_above, through, strict=True)])
        more = fold(Value.minimum, [select(ends, self._largest, n) for ends, n in zip(is_above, through, strict=True)])
        less = machine.reduce_warp("max", less)
        return machine.reduce_warp("add", number), less, machine.reduce_warp("min", more) - less


def running_sum(machine: Machine, x: Value) -> Value:
    """Over the lanes of a warp up to and with each."""
    for distance in (1, 2, 4, 8, 16):
        before = machine.shuffle_up(x, distance)
        x = x + select(machine.thread % WARP >= distance, before, 0)
    return x
