"""The shared memory of a block that finds the largest scores of a row."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.launch import MAX_CLUSTER
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR
from pallas_kernels.selection.kth_largest import KthLargest
from pallas_kernels.selection.marks import Marks
from pallas_kernels.selection.split import Split

SCORE_BYTES, VECTOR_BYTES = 8, 4  # bytes per element of a list: a score's bits and position, or a vector's number
RANKED = 64  # the largest number of scores in the k-th largest's range that are ranked one by one
# Indices of counters: bytes of listed scores; blocks whose list of bundles overflowed; bytes of listed bundles; scores
# in the range of the k-th largest.
LISTED_SCORES, LOST, LISTED_BUNDLES, TIED = range(4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Lengths of the lists for a row."""

    k: int
    size: int  # of the row
    split: Split

    # A sorted row needs one bundle and four scores per score to be found, and a random row 1.3 of each.
    @property
    def bundles(self) -> int:
        return 0 if self.split.keep else 4 * self.k + 256

    @property
    def scores(self) -> int:
        return 6 * self.k + 512

    # A lane that finds a list not full adds all that it has, so lists need room beyond their nominal length.
    @property
    def bytes_of_bundles(self) -> int:
        """Bytes for the list of bundles.

        Once scores are listed, the marks take its place, so it must have room for them.
        """
        bundles = VECTOR_BYTES * (self.bundles + self.split.bundles)
        return max(bundles, Marks.shared_bytes(self.size, self.split.threads))

    @property
    def bytes_of_scores(self) -> int:
        return SCORE_BYTES * (self.scores + VECTOR * max(2, self.split.bundles) + 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the whole ``Memory``."""
        arrays = 4 * 4, 16 * WARP, 8 * MAX_CLUSTER, self.bytes_of_scores, 4 * RANKED, 4 * RANKED, self.bytes_of_bundles
        return sum(-(-size // 16) * 16 for size in arrays) + 2 * KthLargest.SHARED_BYTES


class Memory:
    """Arrays, lists and searches in shared memory.

    Lists are arrays of bytes, and lanes count in bytes what they add.
    """

    def __init__(self, machine: Machine, room: Room):
        self.room = room
        self.counters = Shared.take(machine, (4,), "i32")
        self.extremes = Shared.take(machine, (WARP, 4), "i32")  # of each warp
        self.bounds = Shared.take(machine, (MAX_CLUSTER, 2), "i32")  # of each block of the cluster
        self.scores = Shared.take(machine, (room.bytes_of_scores,), "u8")
        self.tied_ordinals = Shared.take(machine, (RANKED,), "i32")
        self.tied_positions = Shared.take(machine, (RANKED,), "i32")
        self.bundles = Shared.take(machine, (room.bytes_of_bundles,), "u8")
        threads = room.split.threads
        self.bound = KthLargest(machine, threads, -(-room.k // room.split.cluster))
        self.kth = KthLargest(machine, threads, room.k)

    def clear(self) -> None:
        """Clear everything. All lanes of the block must call this, and a barrier must follow before the first use."""
        machine = self.counters.machine
        zeros = [machine.constant(0, "i32")] * VECTOR
        self.counters.store_words(zeros, 0, where=machine.thread == 0)
        self.bound.clear()
        self.kth.clear()
