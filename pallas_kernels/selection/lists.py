"""Lists in shared memory of what may be among the largest: the bundles of a block, and the scores of a whole row.

Lanes append in the order of atomic additions. If a list is full, further elements are lost, and this is recorded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from pallas_kernels.language.lanes import running_sum
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.selection.kth_largest import ordinal_of
from pallas_kernels.selection.memory import LISTED_BUNDLES, LISTED_SCORES, LOST, SCORE_BYTES, VECTOR_BYTES, Memory
from pallas_kernels.selection.part import Candidate, Part

Visit = Callable[[Value, Value, Condition], None]  # takes an ordinal, its position, and whether there is one


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list of the block's bundles and, in the first block of a cluster, of the row's scores."""

    part: Part
    memory: Memory

    def _reserve(self, counter: int, flags: Sequence[Condition], size: int, rank: int | None = None) -> list[Value]:
        """Reserve room in a list for each flag that is set.

        Returns their byte offsets. All lanes of a warp must call this.
        """
        part, machine = self.part, self.part.machine
        taken = machine.constant(size, "i32")
        through = list(itertools.accumulate(select(flag, taken, 0) for flag in flags))
        of_warp = running_sum(machine, through[-1])
        # One lane adds for its whole warp. Each lane gets a different address, because for a common address ptxas would
        # generate another reduction over the warp.
        is_last = (part.lane == WARP - 1) & (of_warp > 0)
        own = (part.lane ^ (WARP - 1)) + counter
        base = self.memory.counters.add_int(of_warp, own, where=is_last, rank=rank)
        begin = machine.reduce_warp("add", base) + (of_warp - through[-1])
        return [begin, *(begin + before for before in through[:-1])]

    def add_bundles(self, maxima: Sequence[Value], level: Value) -> None:
        """List the bundles whose maximum reaches ``level``, by their vector in the first trip. Contains a barrier."""
        part, memory = self.part, self.memory
        flags = [
            Candidate(peak, vector, vector < part.count).reaches(level)
            for peak, vector in zip(maxima, part.vectors, strict=True)
        ]
        places = self._reserve(LISTED_BUNDLES, flags, VECTOR_BYTES)
        has_room = places[0] < VECTOR_BYTES * memory.room.bundles
        for vector, flag, place in zip(part.vectors, flags, places, strict=True):
            memory.bundles.store_words([vector], place, where=flag & has_room)
        part.machine.barrier("block")

    def add_scores(self, candidates: Sequence[Candidate], level: Value) -> None:
        """List the scores that reach ``level``."""
        rank = self.part.first_rank
        flags = [candidate.reaches(level) for candidate in candidates]
        places = self._reserve(LISTED_SCORES, flags, SCORE_BYTES, rank)
        has_room = places[0] < SCORE_BYTES * self.memory.room.scores
        for candidate, flag, place in zip(candidates, flags, places, strict=True):
            words = [self.part.machine.bits(candidate.score), candidate.position]
            self.memory.scores.store_words(words, place, where=flag & has_room, rank=rank)

    def add_scores_of_bundles(self, edge: Candidate, level: Value) -> None:
        """Read the listed bundles again, two vectors per lane at a time, and list their scores that reach ``level``."""
        part, memory, machine = self.part, self.memory, self.part.machine
        most, pairs = VECTOR_BYTES * memory.room.bundles, 2 * part.split.threads
        size = memory.counters.load_int(LISTED_BUNDLES)
        has_lost = (part.thread == 0) & (size > most)
        memory.counters.add_int(machine.constant(1, "i32"), LOST, where=has_lost, rank=part.first_rank)
        count = size.minimum(most) // VECTOR_BYTES

        def read_trip(trip: Value) -> None:
            def read_pair(i: Value, _: None) -> None:
                candidates = [dataclasses.replace(edge, there=edge.there & ((i | trip) == 0))]
                for half in range(2):
                    number = i * pairs + half * part.split.threads + part.thread
                    there = number < count
                    (vector,) = memory.bundles.load_words(select(there, number, 0) * VECTOR_BYTES, count=VECTOR_BYTES)
                    vector = select(there, vector + trip * part.split.trip, part.count)
                    candidates += part.candidates(vector, part.load(vector))
                self.add_scores(candidates, level)

            # The loop runs at least once, because the edge must be listed even if there are no bundles.
            machine.loop(((count + (pairs - 1)) // pairs).maximum(1), read_pair)

        if part.is_single:
            read_trip(machine.constant(0, "i32"))
        else:
            machine.loop(part.trips.maximum(1), lambda trip, _: read_trip(trip))

    def listed(self) -> Listed:
        """Return the listed scores. To be called in the first block, after all blocks have added theirs."""
        size, lost = self.memory.counters.load_words(LISTED_SCORES, count=2)
        most = SCORE_BYTES * self.memory.room.scores
        return Listed(self.part, self.memory, size.minimum(most) // SCORE_BYTES, (size > most) | (lost > 0))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The listed scores, or all scores of the row if some were lost."""

    part: Part
    memory: Memory
    count: Value
    is_lost: Value

    def visit(self, action: Visit) -> None:
        """Call ``action`` for all scores, two per lane at a time."""
        part, machine, pairs = self.part, self.part.machine, 2 * self.part.split.threads
        count = select(self.is_lost, part.visible, self.count)

        def visit_pair(i: Value, _: None) -> None:
            found = []
            for half in range(2):
                number = i * pairs + half * part.split.threads + part.thread
                there = number < count
                again = part.load_score(number, there & self.is_lost)
                place = select(number < self.count, number, 0) * SCORE_BYTES
                bits, position = self.memory.scores.load_words(place, count=SCORE_BYTES)
                score = select(self.is_lost, again, machine.from_bits(bits))
                found.append((ordinal_of(score), select(self.is_lost, number, position), there))
            for each in found:
                action(*each)

        machine.loop((count + (pairs - 1)) // pairs, visit_pair)
