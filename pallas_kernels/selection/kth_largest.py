"""A search for the k-th largest of many numbers, by the lanes of one block.

Numbers are represented by ordinals: i32 with the same order, so that ranges can be split by their bits. A range is
split into 256 bins, and the bin that contains the k-th largest becomes the next range. The caller stores the ordinals,
and visits all of them once per split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax

from pallas_kernels.language.lanes import add, fold, maximum, running_sum
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR, Condition, Value, negate, select

SMALLEST, LARGEST = -(1 << 31), (1 << 31) - 1
INFINITY = 0x7F800000  # the bits of infinity as an f32, and also its ordinal
_BINS = 256
_PER_LANE = _BINS // WARP  # bins per lane of the warp that searches them
_GAP = 5 << 23  # number of ordinals in five powers of two


def ordinal_of(x: Value) -> Value:
    """Return the ordinal of an f32: an i32 with the same order. That of -0 is 0, and that of NaN is the largest."""
    bits = x.machine.bits(x)
    return select(x == x, select(bits < 0, SMALLEST - bits, bits), LARGEST)


def number_of(ordinal: Value) -> Value:
    """Return the f32 of an ordinal."""
    return ordinal.machine.from_bits(select(ordinal < 0, SMALLEST - ordinal, ordinal))


@dataclasses.dataclass(frozen=True)
class Bins:
    """A division of the ordinals up to ``top`` into bins of 2^shift ordinals, counted from the top.

    Half of all ordinals belong to numbers of magnitude below 1. If there are numbers of both signs, magnitudes far
    below the largest, with ordinals from -gap to gap, are therefore treated as one. All fields are i32 and the same in
    all lanes.
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
        """Return the number of an ordinal's bin."""
        return (self._closed(self.top) - self._closed(ordinal)) >> self.shift

    def range_of(self, number: Value, low: Value) -> tuple[Value, Value]:
        """Return the lowest and highest ordinal of a bin, but none below ``low``, the lowest of all bins."""
        high = self._closed(self.top) - (number << self.shift)
        rest, most = high - self._closed(low), (low.machine.constant(1, "i32") << self.shift) - 1
        lowest = high - select(rest >> self.shift == 0, rest, most)
        lowest = select(lowest > 0, lowest + self.gap, lowest - self.gap)
        highest = select(high < 0, high - self.gap, high + self.gap)
        return lowest.maximum(low), highest.minimum(self.top)

    def _closed(self, ordinal: Value) -> Value:
        """Return the ordinal's index when the gap is closed."""
        return ordinal - ordinal.minimum(self.gap).maximum(0 - self.gap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrdinalRange:
    """The ordinals from low to high. All fields are i32 and the same in all lanes."""

    low: Value
    high: Value
    above: Value  # how many ordinals are higher
    count: Value  # how many are in the range; 0 if there is no k-th


Visit = Callable[[Callable[[Value, Condition], None]], None]  # calls its argument with ordinals, and where they exist


class KthLargest:
    """A search for the k-th largest ordinal. Before it begins, its histogram must be cleared and a barrier passed."""

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
        """Find a range that contains the k-th largest of the visited ordinals in [lowest, high].

        [low, high] is searched first.

        The range contains at most ``limit`` of the ordinals, or only ones that are among the k largest, or only equal
        ones. ``above`` (default 0) is the number of additional ordinals, not visited, that are higher than all visited
        ones. The histogram is cleared again at the end.
        """

        def split(carry: tuple[Value, OrdinalRange]) -> tuple[Value, tuple[Value, OrdinalRange]]:
            """Split the range once. At most one split finds a gap or nothing, and at most four resolve eight bits each.

            All of them run the same code. A second copy would take 0.2 us to jump over, because of the instructions to
            fetch.
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
        """Return the bin of a range that contains the k-th largest ordinal.

        If the k-th largest is below the range, return the ordinals from ``lowest`` up to the range, with a count of
        LARGEST.
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
        """Return the number of the k-th largest's bin, how many ordinals are above it, and how many are in it.

        Run by one warp, which also clears the histogram.
        """
        machine = self.machine
        bins = self._histogram.view((WARP, _PER_LANE), "i32")[self._lane]
        counts = [count for i in range(0, _PER_LANE, VECTOR) for count in bins.load_words(i, count=VECTOR)]
        for i in range(0, _PER_LANE, VECTOR):
            bins.store_words([self._zero] * VECTOR, i)
        of_lane = list(itertools.accumulate(counts))
        before = running_sum(machine, of_lane[-1]) - of_lane[-1] + above
        through = [before + count for count in of_lane]
        # Bins whose cumulative count is below k end above the k-th largest. Their number is the number of its bin, and
        # the largest of their counts is how many are above it. The smallest count of the other bins includes its bin.
        is_above = [number < self.k for number in through]
        number = fold(add, [select(ends, self._one, 0) for ends in is_above])
        less = fold(maximum, [select(ends, n, above) for ends, n in zip(is_above, through, strict=True)])
        more = fold(Value.minimum, [select(ends, self._largest, n) for ends, n in zip(is_above, through, strict=True)])
        less = machine.reduce_warp("max", less)
        return machine.reduce_warp("add", number), less, machine.reduce_warp("min", more) - less
