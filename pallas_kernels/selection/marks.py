"""A bitmap of positions of a row, which lanes mark in any order, and the rank of each position among those marked.

There is one bit per position. After a count over the block, each word of 32 bits has the number of marks before it.
"""

from __future__ import annotations

import itertools

from pallas_kernels.language.lanes import running_sum
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR, Condition, Value, select

_OF_ONE_WARP = 4  # up to so many vectors per lane, one warp counts alone, which saves a barrier over the block


class Marks:
    """Marks of positions below ``size``; fewer than 2^16 may be marked. The caller puts barriers between the steps.

    Shared memory holds the words of marks, a u16 count for each word, and the counts of warps.
    """

    def __init__(self, machine: Machine, threads: int, size: int, shared: Shared):
        """Use the memory of ``shared``, which must have at least ``shared_bytes``."""
        self.machine = machine
        self.lanes, self.of_lane = self._split(size, threads)
        words = VECTOR * self.of_lane * self.lanes
        self.words = Shared(machine, shared.offset, (words,), "i32")
        self.before = Shared(machine, self.words.offset + self.words.size, (words,), "u16")
        self.of_warps = Shared(machine, self.before.offset + self.before.size, (WARP,), "i32")
        # Computed again here, so that values derived from it need not stay in registers since the start of the kernel.
        (self.thread,) = machine.hold([machine.thread])
        self.has_words: Condition = True if self.lanes == threads else self.thread < self.lanes

    @staticmethod
    def _split(size: int, threads: int) -> tuple[int, int]:
        """Return the number of lanes that have words, and the number of vectors of each."""
        vectors = -(-size // (VECTOR * WARP))
        lanes = WARP if vectors <= _OF_ONE_WARP * WARP else threads
        return lanes, -(-vectors // lanes)

    @classmethod
    def shared_bytes(cls, size: int, threads: int) -> int:
        lanes, of_lane = cls._split(size, threads)
        return 6 * VECTOR * of_lane * lanes + 4 * WARP

    def _vectors(self) -> list[Value]:
        """Return the index of the first word of each of a lane's vectors, which are adjacent."""
        return [(self.thread * self.of_lane + i) * VECTOR for i in range(self.of_lane)]

    def clear(self) -> None:
        zeros = [self.machine.constant(0, "i32")] * VECTOR
        for vector in self._vectors():
            self.words.store_words(zeros, vector, where=self.has_words)

    def _bit(self, position: Value) -> Value:
        return self.machine.constant(1, "i32") << (position % WARP)

    def mark(self, position: Value, where: Condition) -> None:
        """Mark a position. Each position may be marked only once, because its bit is set by adding it."""
        self.words[position // WARP].add_int(self._bit(position), where=where)

    def count(self) -> None:
        machine = self.machine
        with machine.when(self.has_words):  # this includes all lanes if a barrier is needed
            vectors = self._vectors()
            words = [word for vector in vectors for word in self.words.load_words(vector, count=VECTOR)]
            through = list(itertools.accumulate(machine.population_count(word) for word in words))
            before = self._before_lane(through[-1])
            counts = [before, *(before + count for count in through[:-1])]
            for vector, (a, b, c, d) in zip(vectors, itertools.batched(counts, VECTOR), strict=True):
                self.before.store_words([a | (b << 16), c | (d << 16)], vector)

    def _before_lane(self, count: Value) -> Value:
        """Return the sum of the counts of all lanes before this one."""
        machine, warps = self.machine, self.lanes // WARP
        of_warp = running_sum(machine, count)
        if warps == 1:
            return of_warp - count
        warp, lane = self.thread // WARP, self.thread % WARP
        self.of_warps[warp].store_int(of_warp, where=lane == WARP - 1)
        machine.barrier("block")
        others = self.of_warps.load_int(lane % warps)
        return machine.reduce_warp("add", select(lane < warp, others, 0)) + (of_warp - count)

    def find(self, position: Value, there: Condition) -> tuple[Value, Condition]:
        """Return how many marks come before a position, and whether it is marked."""
        word, bit = select(there, position, 0) // WARP, self._bit(position)
        marks, before = self.words.load_int(word), self.before.load_int(word)
        is_marked = there & (marks & bit != 0)
        return before + self.machine.population_count(marks & (bit - 1)), is_marked
