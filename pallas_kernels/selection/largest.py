"""The result: the positions of the k largest of the listed scores, in ascending order, by the first block of a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import VECTOR, Condition, Value, negate, select
from pallas_kernels.selection.kth_largest import LARGEST, OrdinalRange
from pallas_kernels.selection.lists import Listed
from pallas_kernels.selection.marks import Marks
from pallas_kernels.selection.memory import RANKED, TIED, Memory
from pallas_kernels.selection.part import Part


def store_all(part: Part, out: Buffer) -> None:
    """Of a row that has no more than k scores."""
    k, threads = out.shape[1], part.split.threads
    for first in range(0, k, threads):
        position = part.thread + first
        inside: Condition = True if first + threads <= k else position < k
        number = select(position < part.visible, position, -1)
        out.store_int(number, part.row, position, where=inside & part.is_first)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The choice of the k largest."""

    part: Part
    memory: Memory
    listed: Listed
    out: Buffer  # i32 [rows, k]

    def store(self, bound: Value, low: Value, top: Value) -> None:
        """Their ordinals are from bound to top, most from low.

        The k-th one's range goes out whole; or few are ranked one by one; or, of many equals, the first positions.
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
        """Whether all that is in the range is among the k largest."""
        return kth.count == self.memory.kth.k - kth.above

    def _find_kth(self, bound: Value, low: Value, top: Value) -> tuple[OrdinalRange, Value]:
        """The k-th largest one's range, and the last position of those in it that are chosen, if few are not ranked.

        By their ordinals; then, of many that have the k-th one's, by position, the first being the largest.
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
        """Of the few scores in the k-th one's range, each in a lane: those with less than k before them."""
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
