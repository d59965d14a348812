"""The last steps: find the k largest of the listed scores, and store their positions in ascending order.

This is done by the first block of each row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.values import VECTOR, Condition, Value, negate, select
from pallas_kernels.selection.kth_largest import LARGEST, OrdinalRange
from pallas_kernels.selection.lists import Listed
from pallas_kernels.selection.marks import Marks
from pallas_kernels.selection.memory import RANKED, TIED, Memory
from pallas_kernels.selection.part import Part


def store_all(part: Part, out: Buffer) -> None:
    """Store all positions of a row that has at most k scores."""
    k, threads = out.shape[1], part.split.threads
    for first in range(0, k, threads):
        position = part.thread + first
        inside: Condition = True if first + threads <= k else position < k
        number = select(position < part.visible, position, -1)
        out.store_int(number, part.row, position, where=inside & part.is_first)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The choice of the k largest among the listed scores."""

    part: Part
    memory: Memory
    listed: Listed
    out: Buffer  # i32 [rows, k]

    def store(self, bound: Value, low: Value, top: Value) -> None:
        """Store the result. The ordinals of listed scores are from bound to top, and most are from low on.

        A search finds a range of ordinals that contains the k-th largest. Either all scores in the range are among the
        k largest; or they are few, and are ranked one by one; or they are many equal ones, of which the first positions
        are chosen.
        """
        machine, memory, listed = self.part.machine, self.memory, self.listed
        marks = Marks(machine, self.part.split.threads, self.part.size, memory.bundles)
        marks.clear()
        kth, last = self._find_kth(bound, low, top)
        is_few = negate(self._is_whole(kth)) & (kth.count <= RANKED)

        def choose(ordinal: Value, position: Value, there: Condition) -> None:
            is_above, is_in_range = there & (ordinal > kth.high), there & (ordinal >= kth.low) & (ordinal <= kth.high)
            is_ranked = is_in_range & is_few
            marks.mark(position, is_above | (is_in_range & negate(is_few) & (position <= last)))
            at = memory.counters.add_int(machine.constant(1, "i32"), TIED, where=is_ranked)
            memory.tied_ordinals.store_int(ordinal, at, where=is_ranked)
            memory.tied_positions.store_int(position, at, where=is_ranked)

        def put(_: Value, position: Value, there: Condition) -> None:
            place, is_marked = marks.find(position, there)
            self.out.store_int(position, self.part.row, place, where=is_marked)

        listed.visit(choose)
        with machine.when(is_few):
            machine.barrier("block")
            self._mark_ranked(kth, marks)
        machine.barrier("block")
        marks.count()
        machine.barrier("block")
        listed.visit(put)

    def _is_whole(self, kth: OrdinalRange) -> Value:
        """Return whether all scores in the range are among the k largest."""
        return kth.count == self.memory.kth.k - kth.above

    def _find_kth(self, bound: Value, low: Value, top: Value) -> tuple[OrdinalRange, Value]:
        """Find the range of the k-th largest, and the last position in it that is chosen.

        The position matters only if the scores in the range are not ranked one by one. The search is by ordinal first.
        If too many scores have the ordinal of the k-th, a second search is by position, with the first position ranking
        highest.
        """
        machine, listed = self.part.machine, self.listed
        zero, one = machine.constant(0, "i32"), machine.constant(1, "i32")

        def search(carry: tuple[Value, OrdinalRange, Value]) -> tuple[Value, tuple[Value, OrdinalRange, Value]]:
            is_second, kth, _ = carry
            by_position, first = is_second > 0, 1 - self.part.visible

            def visit(action: Callable[[Value, Condition], None]) -> None:
                def act(ordinal: Value, position: Value, there: Condition) -> None:
                    looked_for = select(by_position, 0 - position, ordinal)
                    action(looked_for, there & ((ordinal == kth.low) | negate(by_position)))

                listed.visit(act)

            low, high = select(by_position, first, kth.low), select(by_position, zero, kth.high)
            limit, lowest = select(by_position, one, RANKED), select(by_position, first, bound)
            found = self.memory.kth.find(visit, low, high, limit, lowest=lowest, above=kth.above)
            tie = negate(by_position | self._is_whole(found)) & (found.count > RANKED)
            kth = jax.tree.map(functools.partial(select, by_position), kth, found)
            return tie, (one, kth, select(by_position, 0 - found.low, LARGEST))

        _, kth, last = machine.repeat(search, (zero, OrdinalRange(low.minimum(top), top, zero, zero), zero))
        return kth, last

    def _mark_ranked(self, kth: OrdinalRange, marks: Marks) -> None:
        """Mark those of the few scores in the range that have less than k scores before them. Each lane has one."""
        machine, thread = self.part.machine, self.part.thread
        ordinals, positions = self.memory.tied_ordinals, self.memory.tied_positions
        with machine.when(thread < kth.count):
            mine, position = ordinals.load_int(thread), positions.load_int(thread)

            def add_before(i: Value, place: Value) -> Value:
                others = [array.load_words(i * VECTOR, count=VECTOR) for array in (ordinals, positions)]
                for j, (other, at) in enumerate(zip(*others, strict=True)):
                    is_before = (other > mine) | ((other == mine) & (at < position))
                    place = place + select(is_before & (i * VECTOR + j < kth.count), machine.constant(1, "i32"), 0)
                return place

            place = machine.loop((kth.count + (VECTOR - 1)) // VECTOR, add_before, kth.above)
            marks.mark(position, place < self.memory.kth.k)
