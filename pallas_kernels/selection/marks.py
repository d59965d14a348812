"""Positions of a row that the lanes of a block mark in any order, and where each comes among those marked.

A bit for each position. Counted over the block, every word of 32 bits knows how many marks come before it.
"""

from __future__ import annotations

import itertools

from pallas_kernels.language.machine import VECTOR, WARP, Condition, Machine, Value, negate, select
from pallas_kernels.selection.kth_key import running_sum

_OF_ONE_WARP = 4  # vectors of words that its lanes count one after another, where otherwise the block had to wait


class Marks:
    """Of positions below ``size``, fewer than 2^16 of them. Between the steps, barriers over the block.

    In shared memory from an offset on: words of marks, an u16 count for each, counts of warps.
    """

    def __init__(self, machine: Machine, threads: int, size: int, offset: int):
        self.machine = machine
        self.lanes, self.of_lane = self._split(size, threads)
        words = VECTOR * self.of_lane * self.lanes
        self.words, self.before, self.of_warps = offset, offset + 4 * words, offset + 6 * words
        # Computed anew, so that nothing that follows from it is kept in registers from the kernel's beginning on.
        (self.thread,) = machine.hold([machine.thread])
        self.has_words: Condition = True if self.lanes == threads else self.thread < self.lanes

    @staticmethod
    def _split(size: int, threads: int) -> tuple[int, int]:
        """How many lanes have words, and how many vectors each."""
        vectors = -(-size // (VECTOR * WARP))
        lanes = WARP if vectors <= _OF_ONE_WARP * WARP else threads
        return lanes, -(-vectors // lanes)

    @classmethod
    def shared_bytes(cls, size: int, threads: int) -> int:
        lanes, of_lane = cls._split(size, threads)
        return 6 * VECTOR * of_lane * lanes + 4 * WARP

    def _vectors(self) -> list[Value]:
        """A lane's neighbouring words, by vectors."""
        return [self.thread * self.of_lane + i for i in range(self.of_lane)]

    def clear(self) -> None:
        zeros = [self.machine.constant(0, "i32")] * VECTOR
        for vector in self._vectors():
            self.machine.store_shared(vector * 16 + self.words, zeros, 16, self.has_words)

    def _bit(self, position: Value) -> Value:
        return self.machine.constant(1, "i32") << (position % WARP)

    def mark(self, position: Value, where: Condition) -> None:
        """No position twice: to add its bit is to set it."""
        self.machine.add_shared(position // WARP * 4 + self.words, self._bit(position), where)

    def count(self) -> None:
        machine = self.machine
        with machine.when(self.has_words):  # all lanes, where it takes a barrier
            vectors = self._vectors()
            words = [word for vector in vectors for word in machine.load_shared(vector * 16 + self.words, 16)]
            through = list(itertools.accumulate(machine.population_count(word) for word in words))
            before = self._before_lane(through[-1])
            counts = [before, *(before + count for count in through[:-1])]
            for vector, (a, b, c, d) in zip(vectors, itertools.batched(counts, VECTOR), strict=True):
                machine.store_shared(vector * 8 + self.before, [a | (b << 16), c | (d << 16)], 8, True)

    def _before_lane(self, count: Value) -> Value:
        """The sum of the counts of all lanes before."""
        machine, warps = self.machine, self.lanes // WARP
        of_warp = running_sum(machine, count)
        if warps == 1:
            return of_warp - count
        warp, lane = self.thread // WARP, self.thread % WARP
        machine.store_shared(warp * 4 + self.of_warps, [of_warp], 4, lane.equals(WARP - 1))
        machine.barrier("block")
        (others,) = machine.load_shared(lane % warps * 4 + self.of_warps, 4)
        return machine.reduce_warp("add", select(lane < warp, others, 0)) + (of_warp - count)

    def find(self, position: Value, there: Condition) -> tuple[Value, Condition]:
        """How many marks come before a position, and whether it is marked."""
        word, bit = select(there, position, 0) // WARP, self._bit(position)
        (marks,) = self.machine.load_shared(word * 4 + self.words, 4)
        (before,) = self.machine.load_shared(word * 2 + self.before, 2)
        is_marked = there & negate((marks & bit).equals(0))
        return before + self.machine.population_count(marks & (bit - 1)), is_marked
