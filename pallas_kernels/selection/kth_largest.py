"""The k-th largest of many numbers, by the lanes of one block.

Numbers are looked for by their ordinals: i32 in the same order, which their bits cut into ranges. A range is split into
256 bins; the bin with the k-th largest is the next range. How ordinals are held is the caller's: it visits them, once
for every split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax

from pallas_kernels.language.lanes import add, fold, maximum
from pallas_kernels.language.machine import VECTOR, WARP, Condition, Machine, Value, negate, select
from pallas_kernels.language.shared import Shared

SMALLEST, LARGEST = -(1 << 31), (1 << 31) - 1
INFINITY = 0x7F800000  # the bits of an f32, and its ordinal
_BINS = 256
_PER_LANE = _BINS // WARP  # of the warp that searches them
_GAP = 5 << 23  # ordinals of five powers of two


def ordinal_of(x: Value) -> Value:
    """i32 whose order is that of f32 numbers: -0 is 0, NaN the largest."""
    bits = x.machine.bits(x)
    return select(x == x, select(bits < 0, SMALLEST - bits, bits), LARGEST)


def number_of(ordinal: Value) -> Value:
    """The f32 of an ordinal."""
    return ordinal.machine.from_bits(select(ordinal < 0, SMALLEST - ordinal, ordinal))


@dataclasses.dataclass(frozen=True)
class Bins:
    """How the ordinals up to ``top`` lie over bins: 2^shift each, counted from the top. i32, the same in all lanes.

    Half of all ordinals are those of numbers below 1. Where numbers of both signs are looked through, those of
    magnitudes far below the largest, ordinals from -gap to gap, count as one.
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

    def number(self, ordinal: Value) -> Value:
        """Of its bin."""
        return (self._closed(self.top) - self._closed(ordinal)) >> self.shift

    def range_of(self, number: Value, low: Value) -> tuple[Value, Value]:
        """The lowest and the highest ordinal of a bin, not below ``low``, the lowest of all bins."""
        high = self._closed(self.top) - (number << self.shift)
        rest, most = high - self._closed(low), (low.machine.constant(1, "i32") << self.shift) - 1
        lowest = high - select(rest >> self.shift == 0, rest, most)
        lowest = select(lowest > 0, lowest + self.gap, lowest - self.gap)
        highest = select(high < 0, high - self.gap, high + self.gap)
        return lowest.maximum(low), highest.minimum(self.top)

    def _closed(self, ordinal: Value) -> Value:
        """The ordinal where there is no gap."""
        return ordinal - ordinal.minimum(self.gap).maximum(0 - self.gap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrdinalRange:
    """The ordinals from low to high. i32 each, the same in all lanes."""

    low: Value
    high: Value
    above: Value  # how many are higher
    count: Value  # how many are in it; 0 if there is no k-th


Visit = Callable[[Callable[[Value, Condition], None]], None]  # calls it with ordinals, and where there are any


class KthLargest:
    """A search for the k-th largest ordinal. Its histogram must be cleared, and a barrier passed, before it begins."""

    SHARED_BYTES = 4 * _BINS + 16

    def __init__(self, machine: Machine, threads: int, k: int):
        self.machine, self.threads, self.k = machine, threads, k
        self._histogram = Shared.take(machine, (_BINS,), "i32")
        self._found = Shared.take(machine, (4,), "i32")
        self._zero, self._one, self._largest = (machine.constant(number, "i32") for number in (0, 1, LARGEST))
        self._lane = machine.thread % WARP

    def clear(self) -> None:
        vectors, thread = _BINS // VECTOR, self.machine.thread
        assert vectors <= self.threads, (vectors, self.threads)
        self._histogram.store_words([self._zero] * VECTOR, thread * VECTOR, where=thread < vectors)

    def find(
        self, visit: Visit, low: Value, high: Value, limit: Value | int, *, lowest: Value, above: Value | None = None
    ) -> OrdinalRange:
        """A range with the k-th largest of the visited ordinals in [lowest, high]: in [low, high] first.

        It holds at most ``limit`` of them, or only such as are among the k largest, or only equal ones. ``above``
        (default none) more ordinals are higher than all that are visited. The histogram is clear again afterwards.
        """

        def split(carry: tuple[Value, OrdinalRange]) -> tuple[Value, tuple[Value, OrdinalRange]]:
            """One that finds a gap, or nothing, and four of eight bits each, at most.

            All are one piece of code: to jump over a second one, and fetch what lies behind it, takes 0.2 us.
            """
            is_first, ordinals = carry
            found = self._split(visit, ordinals, lowest=lowest, has_gap=is_first > 0)
            is_enough = (found.count == self.k - found.above) | (found.low == found.high)
            again = (found.count > limit) & negate(is_enough) & (found.low <= found.high)
            return again, (self._zero, found)

        start = OrdinalRange(low, high, above=self._zero if above is None else above, count=self._zero)
        _, found = self.machine.repeat(split, (self._one, start))
        return dataclasses.replace(found, count=select(found.count == LARGEST, self._zero, found.count))

    def _split(self, visit: Visit, ordinals: OrdinalRange, *, lowest: Value, has_gap: Value) -> OrdinalRange:
        """The bin of a range with the k-th largest ordinal.

        If it is not there, the ordinals from lowest that are below the range, LARGEST in number.
        """
        machine, low, high = self.machine, ordinals.low, ordinals.high
        bins = Bins.over(low, high, has_gap=has_gap)

        def count(ordinal: Value, where: Condition) -> None:
            counter = self._histogram[bins.number(ordinal)]
            counter.add_int(self._one, where=where & (ordinal >= low) & (ordinal <= high))

        visit(count)
        machine.barrier("block")
        with machine.when(machine.thread < WARP):
            number, above, count_in_bin = self._search(ordinals.above)
            is_there = number < _BINS
            first, last = bins.range_of(number, low)
            first, last = select(is_there, first, lowest), select(is_there, last, low - 1)
            words = [first, last, above, select(is_there, count_in_bin, self._largest)]
            self._found.store_words(words, 0, where=machine.thread == 0)
        machine.barrier("block")
        return OrdinalRange(*self._found.load_words(0, count=4))

    def _search(self, above: Value) -> tuple[Value, Value, Value]:
        """By one warp, which clears the histogram: the number of the k-th largest one's bin, how many are above it,
        and how many in it."""
        machine = self.machine
        bins = self._histogram.view((WARP, _PER_LANE), "i32")[self._lane]
        counts = [count for i in range(0, _PER_LANE, VECTOR) for count in bins.load_words(i, count=VECTOR)]
        for i in range(0, _PER_LANE, VECTOR):
            bins.store_words([self._zero] * VECTOR, i)
        of_lane = list(itertools.accumulate(counts))
        before = running_sum(machine, of_lane[-1]) - of_lane[-1] + above
        through = [before + count for count in of_lane]
        # Of the bins that end above the k-th: their number and what is in them; and what is through the next one.
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
