"""A block's part of a row, and how its lanes read it."""

from __future__ import annotations

import dataclasses
import itertools
import math

from pallas_kernels.language.lanes import Buffer, fold, maximum
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.values import VECTOR, Condition, Index, Step, Value, negate, select
from pallas_kernels.selection.split import Split

_BATCH = 4  # vectors that a lane loads at once in a row of several trips, so that two blocks fit on an SM


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A score in each lane."""

    score: Value
    position: Value
    there: Condition

    def reaches(self, level: Value) -> Condition:
        """Return whether there is a score and it is not below ``level``. NaN is not below any level."""
        return self.there & negate(self.score < level)


class Part:
    """The vectors of a row that a block's lanes read.

    The first block also reads the scores outside of whole vectors.
    """

    def __init__(self, machine: Machine, scores: Buffer, visible: Buffer, split: Split):
        self.machine, self.split = machine, split
        self.scores = dataclasses.replace(scores, constant=False)  # allow caching in L1, since some are read again
        _, self.size = scores.shape
        self.is_single = split.is_single(self.size)

        self.thread, self.row = machine.thread, machine.block(0)
        self.warp, self.lane = self.thread // WARP, self.thread % WARP
        self.rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
        self.is_first: Condition = self.rank == 0 if split.cluster > 1 else True
        self.first_rank = 0 if split.cluster > 1 else None  # rank of the block that lists, as stores expect it

        # Vectors begin at the first position of the row whose address is a multiple of 16 bytes.
        self.first: Index = (0 - (self.row & 3) * (self.size & 3)) & 3 if self.size % VECTOR else 0
        self.visible = visible.load_int(self.row).minimum(self.size)
        self.count = (self.visible - self.first).maximum(0) // VECTOR  # number of whole vectors that are visible
        self.trips = (self.count + (split.trip - 1)) // split.trip
        # Adjacent warps of a block are a cluster's width apart, so that a run of high scores is shared by all blocks.
        begin = (self.warp * split.cluster + self.rank) * WARP + self.lane
        self.vectors = [begin + i * (split.threads * split.cluster) for i in range(split.bundles)]  # of the first trip

    def load(self, vector: Value) -> Step:
        """Load the scores of a vector, -inf if it does not exist."""
        position, there = vector * VECTOR + self.first, vector < self.count
        return self.scores.load_floats(self.row, position, where=there, otherwise=-math.inf)

    def load_score(self, position: Value, where: Condition) -> Value:
        return self.scores.load_floats(self.row, position, count=1, where=where)[0]

    def candidates(self, vector: Value, scores: Step) -> list[Candidate]:
        position, there = vector * VECTOR + self.first, vector < self.count
        return [Candidate(score, position + i, there) for i, score in enumerate(scores)]

    def load_edge(self) -> Candidate:
        """Load the visible scores outside of whole vectors."""
        lane, end = self.thread & 3, self.visible
        position, lanes = lane + (self.count * VECTOR + self.first), VECTOR
        if isinstance(self.first, Value):  # scores before the first vector
            is_head, lanes = self.thread < VECTOR, 2 * VECTOR
            position = select(is_head, lane, position)
            end = select(is_head, self.first.minimum(end), end)
        there = (self.thread < lanes) & (position < end) & self.is_first
        return Candidate(self.load_score(position, there), position, there)

    def read(self) -> tuple[list[Step], list[Value]]:
        """Read all vectors of this lane.

        Returns the scores if there is only one trip, else an empty list; and the bundles' maxima, -inf for empty
        bundles.
        """
        if self.is_single:
            steps = [self.load(vector) for vector in self.vectors]
            return steps, [fold(maximum, step) for step in steps]

        def trip(i: Value, maxima: list[Value]) -> list[Value]:
            for batch in itertools.batched(range(self.split.bundles), _BATCH):
                steps = [self.load(self.vectors[n] + i * self.split.trip) for n in batch]
                for n, step in zip(batch, steps, strict=True):
                    maxima[n] = fold(maximum, [maxima[n], *step])
                maxima = self.machine.hold(maxima)
            return maxima

        lowest = self.machine.constant(-math.inf, "f32")
        return [], self.machine.loop(self.trips, trip, [lowest] * self.split.bundles)
