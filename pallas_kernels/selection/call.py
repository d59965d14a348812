"""The k largest scores of each row: their positions, in ascending order.

    1  every lane reads its part of the row in vectors of four scores, and keeps a few maxima of them
    2  a bound: a key that at least k group maxima reach, groups being a few of a lane's vectors
    3  what reaches the bound, a few percent, is listed
    4  the k-th largest of the list; what is above it is marked in a bitmap of the row, and of its equals the first
    5  what is marked goes to the place in the result that the bitmap gives it

A row is read by a cluster of blocks, of which the first does steps 4 and 5. If the list overflows (a row of ties), the
whole row stands in for it. A list is in the order of atomic additions, and nothing of that is left in the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, fold, maximum
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import VECTOR, WARP, WARPGROUP, Condition, Machine, Step, Value, negate, select
from pallas_kernels.selection.kth_key import (
    INFINITY,
    LARGEST,
    SMALLEST,
    KeyRange,
    KthKey,
    key_of,
    number_of,
    running_sum,
)
from pallas_kernels.selection.marks import Marks

MAX_K = 2048
MAX_SIZE = 1 << 19  # of a row: the marks of its positions fit in shared memory beside the lists of MAX_K
MAX_CLUSTER = 8  # what every card allows
_BATCH = 4  # vectors that a lane waits for at a time in a row of several trips: registers for two blocks on an SM
_RANKED = 64  # keys in the k-th one's range that are ranked one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a row lies over lanes.

    A trip is one vector for each of a lane's maxima. The n-th vectors of all trips are a bundle, and share a maximum.
    """

    warpgroups: int  # per block
    cluster: int  # blocks per row
    bundles: int  # per lane
    keep: bool = False  # a row of one trip stays in registers; else what may be among the largest is read again

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def trip(self) -> int:
        """Vectors."""
        return self.threads * self.cluster * self.bundles

    def is_single(self, size: int) -> bool:
        """Whether one trip is a whole row."""
        return size <= self.trip * VECTOR

    def groups(self, k: int) -> int:
        """Per lane. With twice as many in a row as are to be found, little more than those reaches the bound."""
        groups = 1
        while groups < self.bundles and groups * self.threads * self.cluster < 2 * k:
            groups *= 2
        return groups


def split_of(rows: int, size: int) -> Split:
    """What measured best on an H200."""
    cluster = 1
    # Clusters that fill the card are placed slowly: pairs of blocks are worth it for long rows only, more never.
    while cluster < MAX_CLUSTER and size > 8192 * cluster:
        if 2 * cluster * rows > (128 if cluster == 1 and size > 65536 else 64):
            break
        cluster *= 2
    share = -(-size // cluster)
    if share <= 8192:
        return Split(warpgroups=4, cluster=cluster, bundles=4, keep=True)
    # Of blocks with 16 bundles a lane only one fits on an SM.
    return Split(warpgroups=4, cluster=cluster, bundles=8 if share <= 16384 or rows * cluster > 128 else 16)


def unsupported_top_k(k: int, size: int) -> str | None:
    """Why this kernel does not find the k largest of ``size`` scores, or None where it does."""
    if not 1 <= k <= MAX_K:
        return f"top-k takes a k from 1 to {MAX_K}, got {k}"
    return None if size <= MAX_SIZE else f"top-k takes rows of at most {MAX_SIZE} scores, got {size}"


def top_k(
    scores: jax.Array, visible: jax.Array, *, k: int, simulate: bool = False, split: Split | None = None
) -> jax.Array:
    """Positions of the k largest visible scores of each row, in ascending order.

    Of scores that tie for the last places, the first ones of the row, as of ``lax.top_k``. NaN ranks first, -0 is 0.

    Args:
      scores: f32 [R, N], N at most MAX_SIZE. What lies past ``visible`` has no influence.
      visible: int32 [R].
      k: at most MAX_K.
      simulate: as of ``launch``.
      split: how a row is read, if not as its size suggests.

    Returns:
      int32 [R, k]: min(k, visible) positions, then -1. The same scores give the same bits.
    """
    chex.assert_rank([scores, visible], [2, 1])
    chex.assert_equal_shape_prefix([scores, visible], 1)
    chex.assert_type([scores, visible], [jnp.float32, jnp.int32])
    rows, size = scores.shape
    if (reason := unsupported_top_k(k, size)) is not None:
        raise ValueError(reason)
    if size == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    split = split_of(rows, size) if split is None else split
    if split.keep and not split.is_single(size):
        raise ValueError(f"a row of {size} scores does not stay in the registers of {split}")

    def body(machine: Machine, inputs: Any, out: Any) -> None:
        _Selection(machine, inputs["scores"], inputs["visible"], out, split).run()

    return launch(
        body,
        name="top_k",
        grid=(rows,),
        inputs={"scores": scores, "visible": visible},
        state=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        warpgroups=split.warpgroups,
        cluster=split.cluster,
        shared_bytes=_Lists(k, size, split).size + 2 * KthKey.SHARED_BYTES,
        simulate=simulate,
    )


class _Lists:
    """Byte offsets in the block's shared memory, from its first byte."""

    def __init__(self, k: int, size: int, split: Split):
        # Sorted rows take a bundle and four scores per place, random ones 1.3 of each.
        self.max_bundles, self.max_scores = 0 if split.keep else 4 * k + 256, 6 * k + 512
        self.size = 0
        # Counters: bytes of the listed scores; blocks that lost bundles; bytes of the listed bundles; scores in the
        # k-th one's range.
        self.counters = self._take(16)
        self.score_bytes, self.lost, self.bundle_bytes, self.tied = (self.counters + 4 * i for i in range(4))
        self.extremes = self._take(16 * WARP)  # of each warp
        self.bounds = self._take(8 * MAX_CLUSTER)  # of each block of the cluster
        # A lane that finds a list not full adds all that it has.
        self.scores = self._take(8 * (self.max_scores + VECTOR * max(2, split.bundles) + 1))  # bits, position
        self.tied_keys, self.tied_positions = self._take(4 * _RANKED), self._take(4 * _RANKED)
        # When the scores are listed, the marks take the place of the bundles.
        bundle_bytes = 4 * (self.max_bundles + split.bundles)
        self.bundles = self.marks = self._take(max(bundle_bytes, Marks.shared_bytes(size, split.threads)))

    def _take(self, size: int) -> int:
        offset = self.size
        self.size += -(-size // 16) * 16
        return offset


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A score of each lane."""

    score: Value
    position: Value
    there: Condition

    def reaches(self, level: Value) -> Condition:
        """Whether it is there and not below a level, which NaN is not."""
        return self.there & negate(self.score < level)


@dataclasses.dataclass(frozen=True)
class _Extremes:
    """Keys of a block's part of a row: of its finite group maxima, and the largest of all."""

    lowest: Value
    low: Value  # the highest of the warps' lowest: most are above it
    high: Value
    top: Value


class _Selection:
    """One block's part of a row."""

    def __init__(self, machine: Machine, scores: Buffer, visible: Buffer, out: Buffer, split: Split):
        self.machine, self.out, self.split = machine, out, split
        self.scores = dataclasses.replace(scores, constant=False)  # has a place in L1: some are read again
        (_, self.size), self.k = scores.shape, out.shape[1]
        self.is_single = split.is_single(self.size)

        self.lists = _Lists(self.k, self.size, split)
        base = machine.take_shared(self.lists.size)
        assert base == 0, "the lists begin at the first byte"
        self.bound = KthKey(machine, split.threads, -(-self.k // split.cluster))
        self.kth = KthKey(machine, split.threads, self.k)

        self.zero, self.one = machine.constant(0, "i32"), machine.constant(1, "i32")
        self.thread, self.row = machine.thread, machine.block(0)
        self.warp, self.lane = self.thread // WARP, self.thread % WARP
        self.rank = machine.rank if split.cluster > 1 else self.zero
        self.is_first: Condition = self.rank.equals(0) if split.cluster > 1 else True
        self.first_rank = 0 if split.cluster > 1 else None

        # Vectors begin at the row's first position with a 16-byte aligned address.
        self.first: Any = (0 - (self.row & 3) * (self.size & 3)) & 3 if self.size % VECTOR else 0
        self.visible = visible.load_int(self.row).minimum(self.size)
        self.count = (self.visible - self.first).maximum(0) // VECTOR  # whole vectors that are visible
        self.trips = (self.count + (split.trip - 1)) // split.trip
        # Neighbouring warps of a block are a cluster apart, so that its blocks share a run of high scores.
        begin = (self.warp * split.cluster + self.rank) * WARP + self.lane
        self.vectors = [begin + i * (split.threads * split.cluster) for i in range(split.bundles)]

    def run(self) -> None:
        machine, lists = self.machine, self.lists
        machine.store_shared(self.zero + lists.counters, [self.zero] * VECTOR, 16, self.thread.equals(0))
        self.bound.clear()
        self.kth.clear()
        edge = self._load_edge()
        steps, maxima = self._read()
        groups = self.split.groups(self.k)
        keys = [key_of(fold(maximum, maxima[i::groups])) for i in range(groups)]
        extremes = self._extremes(keys, edge)  # ends the clearing, too
        few = self.visible <= self.k
        with machine.when(few):
            self._put_all()
        with machine.when(negate(few)):
            bound, top = self._find_bound(keys, extremes)
            if self.split.keep:
                kept = itertools.chain(*map(self._candidates, self.vectors, steps))
                self._list_scores([*kept, edge], number_of(bound))
            else:
                self._list_bundles(maxima, number_of(bound))
                self._list_scores_of_bundles(edge, number_of(bound))
            if self.split.cluster > 1:
                machine.barrier("cluster", leave=negate(self.is_first))
            else:
                machine.barrier("block")
            with machine.when(self.is_first):
                self._put_largest(bound, select(bound > -INFINITY, bound, extremes.lowest), top)

    # ---- reading ----

    def _load(self, vector: Value) -> Step:
        position, there = vector * VECTOR + self.first, vector < self.count
        return self.scores.load_floats(self.row, position, where=there, otherwise=-math.inf)

    def _candidates(self, vector: Value, scores: Step) -> list[_Candidate]:
        position, there = vector * VECTOR + self.first, vector < self.count
        return [_Candidate(score, position + i, there) for i, score in enumerate(scores)]

    def _load_edge(self) -> _Candidate:
        """What is visible outside of the whole vectors."""
        lane, end = self.thread & 3, self.visible
        position, lanes = lane + (self.count * VECTOR + self.first), VECTOR
        if isinstance(self.first, Value):  # before the first of them, too
            is_head, lanes = self.thread < VECTOR, 2 * VECTOR
            position = select(is_head, lane, position)
            end = select(is_head, self.first.minimum(end), end)
        there = (self.thread < lanes) & (position < end) & self.is_first
        return _Candidate(self.scores.load_floats(self.row, position, count=1, where=there)[0], position, there)

    def _read(self) -> tuple[list[Step], list[Value]]:
        """The vectors of an only trip, and the bundles' maxima, -inf where there is nothing."""
        if self.is_single:
            steps = [self._load(vector) for vector in self.vectors]
            return steps, [fold(maximum, step) for step in steps]

        def trip(i: Value, maxima: list[Value]) -> list[Value]:
            for batch in itertools.batched(range(self.split.bundles), _BATCH):
                steps = [self._load(self.vectors[n] + i * self.split.trip) for n in batch]
                for n, step in zip(batch, steps, strict=True):
                    maxima[n] = fold(maximum, [maxima[n], *step])
                maxima = self.machine.hold(maxima)
            return maxima

        lowest = self.machine.constant(-math.inf, "f32")
        return [], self.machine.loop(self.trips, trip, [lowest] * self.split.bundles)

    # ---- a bound ----

    def _extremes(self, keys: list[Value], edge: _Candidate) -> _Extremes:
        machine, warps = self.machine, self.split.threads // WARP
        finite = [(key < INFINITY) & (key > -INFINITY) for key in keys]
        low = fold(Value.minimum, [select(f, key, LARGEST) for f, key in zip(finite, keys, strict=True)])
        high = fold(maximum, [select(f, key, SMALLEST) for f, key in zip(finite, keys, strict=True)])
        top = fold(maximum, [*keys, select(edge.there, key_of(edge.score), SMALLEST)])
        of_warp = [machine.reduce_warp("min", low), machine.reduce_warp("max", high), machine.reduce_warp("max", top)]
        machine.store_shared(self.warp * 16 + self.lists.extremes, [*of_warp, top], 16, self.lane.equals(0))
        machine.barrier("block")
        low, high, top, _ = machine.load_shared(self.lane % warps * 16 + self.lists.extremes, 16)
        return _Extremes(
            lowest=machine.reduce_warp("min", low),
            low=machine.reduce_warp("max", select(low <= high, low, SMALLEST)),
            high=machine.reduce_warp("max", high),
            top=machine.reduce_warp("max", top),
        )

    def _find_bound(self, keys: list[Value], extremes: _Extremes) -> tuple[Value, Value]:
        """Keys: one that at least k scores of the row reach, and the largest of the row."""
        machine, cluster = self.machine, self.split.cluster
        limit = max(16, self.bound.k // 4)

        def visit(action: Callable[[Value, Condition], None]) -> None:
            for key in keys:
                action(key.minimum(extremes.high), True)

        def search(_: Value, carry: list[Value]) -> list[Value]:
            low, high, lowest = extremes.low, extremes.high, extremes.lowest
            found = self.bound.find(visit, low, high, limit, lowest=lowest)
            return [select(found.count > 0, found.low, SMALLEST).maximum(carry[0])]

        # With fewer vectors than k there are not so many groups.
        times = select(self.count >= self.k, self.one, 0)
        (bound,) = machine.loop(times, search, [self.zero - INFINITY])
        top = extremes.top
        if cluster == 1:
            return bound, top
        # Every block has its share of scores that reach its own bound, so that k reach the lowest.
        place = self.rank * 8 + self.lists.bounds
        for rank in range(cluster):
            machine.store_shared(place, [bound, top], 8, self.thread.equals(rank), rank=rank)
        machine.barrier("cluster")
        of_blocks = [machine.load_shared(self.zero + (self.lists.bounds + 8 * rank), 8) for rank in range(cluster)]
        bounds, tops = zip(*of_blocks, strict=True)
        return fold(Value.minimum, bounds), fold(maximum, tops)

    # ---- lists ----

    def _reserve(
        self, counter: int, flags: Sequence[Condition], size: int, rank: int | None = None
    ) -> tuple[list[Value], Value]:
        """A list's byte offsets for what each flag stands for, and a lane's first. All lanes of a warp take part."""
        machine = self.machine
        through = list(itertools.accumulate(select(flag, self.zero + size, 0) for flag in flags))
        of_warp = running_sum(machine, through[-1])
        # One lane adds for its warp, at an address of its own: at a common one ptxas would add up over the warp again.
        is_last = self.lane.equals(WARP - 1) & (of_warp > 0)
        base = machine.add_shared((self.lane ^ (WARP - 1)) * 4 + counter, of_warp, is_last, rank=rank)
        begin = machine.reduce_warp("add", base) + (of_warp - through[-1])
        return [begin, *(begin + before for before in through[:-1])], begin

    def _list_bundles(self, maxima: list[Value], level: Value) -> None:
        flags = [
            _Candidate(peak, vector, vector < self.count).reaches(level)
            for peak, vector in zip(maxima, self.vectors, strict=True)
        ]
        places, begin = self._reserve(self.lists.bundle_bytes, flags, 4)
        has_room = begin < 4 * self.lists.max_bundles
        for vector, flag, place in zip(self.vectors, flags, places, strict=True):
            self.machine.store_shared(place + self.lists.bundles, [vector], 4, flag & has_room)
        self.machine.barrier("block")

    def _list_scores(self, candidates: Sequence[_Candidate], level: Value) -> None:
        """In the first block of the cluster."""
        flags = [candidate.reaches(level) for candidate in candidates]
        places, begin = self._reserve(self.lists.score_bytes, flags, 8, self.first_rank)
        has_room = begin < 8 * self.lists.max_scores
        for candidate, flag, place in zip(candidates, flags, places, strict=True):
            words = [self.machine.bits(candidate.score), candidate.position]
            self.machine.store_shared(place + self.lists.scores, words, 8, flag & has_room, rank=self.first_rank)

    def _list_scores_of_bundles(self, edge: _Candidate, level: Value) -> None:
        """Read the listed bundles again, two vectors a lane at a time."""
        machine, lists, pairs = self.machine, self.lists, 2 * self.split.threads
        (size,) = machine.load_shared(self.zero + lists.bundle_bytes, 4)
        has_lost = self.thread.equals(0) & (size > 4 * lists.max_bundles)
        machine.add_shared(self.zero + lists.lost, self.one, has_lost, rank=self.first_rank)
        count = size.minimum(4 * lists.max_bundles) // 4

        def read_trip(trip: Value, carry: list[Value]) -> list[Value]:
            def read_pair(i: Value, carry: list[Value]) -> list[Value]:
                candidates = [dataclasses.replace(edge, there=edge.there & (i | trip).equals(0))]
                for half in range(2):
                    number = i * pairs + half * self.split.threads + self.thread
                    there = number < count
                    (vector,) = machine.load_shared(select(there, number, 0) * 4 + lists.bundles, 4)
                    vector = select(there, vector + trip * self.split.trip, self.count)
                    candidates += self._candidates(vector, self._load(vector))
                self._list_scores(candidates, level)
                return carry

            # The edge is there even if there are no bundles.
            return machine.loop(((count + (pairs - 1)) // pairs).maximum(1), read_pair, carry)

        if self.is_single:
            read_trip(self.zero, [])
        else:
            machine.loop(self.trips.maximum(1), read_trip, [])

    # ---- the result ----

    def _put_all(self) -> None:
        for first in range(0, self.k, self.split.threads):
            position = self.thread + first
            inside: Condition = True if first + self.split.threads <= self.k else position < self.k
            number = select(position < self.visible, position, -1)
            self.out.store_int(number, self.row, position, where=inside & self.is_first)

    def _put_largest(self, bound: Value, low: Value, top: Value) -> None:
        """Store the positions of the k largest listed scores. Their keys are from bound to top, most from low.

        The k-th one's range goes out whole; or few are ranked one by one; or, of many equals, the first positions.
        """
        machine, lists = self.machine, self.lists
        size, lost = machine.load_shared(self.zero + lists.score_bytes, 8)
        listed = size.minimum(8 * lists.max_scores) // 8
        is_lost = (size > 8 * lists.max_scores) | (lost > 0)
        visit = functools.partial(self._visit, listed, is_lost)

        def is_whole(kth: KeyRange) -> Value:
            return kth.count.equals(self.k - kth.above)

        def search(carry: list[Value]) -> tuple[Value, list[Value]]:
            """By key; then, of many that have the k-th one's, by position, the first being the largest."""
            by_position, kth, first = carry[0] > 0, KeyRange(*carry[1:5]), 1 - self.visible

            def visit_keys(action: Callable[[Value, Condition], None]) -> None:
                def act(key: Value, position: Value, there: Condition) -> None:
                    action(select(by_position, 0 - position, key), there & (key.equals(kth.low) | negate(by_position)))

                visit(act)

            low, high = select(by_position, first, kth.low), select(by_position, self.zero, kth.high)
            limit, lowest = select(by_position, self.one, _RANKED), select(by_position, first, bound)
            found = self.kth.find(visit_keys, low, high, limit, lowest=lowest, above=kth.above)
            tie = negate(by_position | is_whole(found)) & (found.count > _RANKED)
            words = [select(by_position, old, new) for old, new in zip(kth.words(), found.words(), strict=True)]
            return tie, [self.one, *words, select(by_position, 0 - found.low, LARGEST)]

        marks = Marks(machine, self.split.threads, self.size, lists.marks)
        marks.clear()
        start = [self.zero, low.minimum(top), top, self.zero, self.zero, self.zero]
        _, *words, last = machine.repeat(search, start)  # the last position of those that are chosen for their key
        kth = KeyRange(*words)
        is_few = negate(is_whole(kth)) & (kth.count <= _RANKED)

        def choose(key: Value, position: Value, there: Condition) -> None:
            is_above, is_in_range = there & (key > kth.high), there & (key >= kth.low) & (key <= kth.high)
            is_ranked = is_in_range & is_few
            marks.mark(position, is_above | (is_in_range & negate(is_few) & (position <= last)))
            at = machine.add_shared(self.zero + lists.tied, self.one, is_ranked) * 4
            machine.store_shared(at + lists.tied_keys, [key], 4, is_ranked)
            machine.store_shared(at + lists.tied_positions, [position], 4, is_ranked)

        def put(_: Value, position: Value, there: Condition) -> None:
            place, is_marked = marks.find(position, there)
            self.out.store_int(position, self.row, place, where=is_marked)

        visit(choose)
        with machine.when(is_few):
            machine.barrier("block")
            self._mark_ranked(kth, marks)
        machine.barrier("block")
        marks.count()
        machine.barrier("block")
        visit(put)

    def _visit(self, listed: Value, is_lost: Value, action: Callable[[Value, Value, Condition], None]) -> None:
        """Key, position, and whether there is one, of the listed scores, or of the row's if some are lost."""
        machine, pairs = self.machine, 2 * self.split.threads
        count = select(is_lost, self.visible, listed)

        def visit_pair(i: Value, carry: list[Value]) -> list[Value]:
            found = []
            for half in range(2):
                number = i * pairs + half * self.split.threads + self.thread
                there = number < count
                again = self.scores.load_floats(self.row, number, count=1, where=there & is_lost)[0]
                bits, position = machine.load_shared(select(number < listed, number, 0) * 8 + self.lists.scores, 8)
                score = select(is_lost, again, machine.from_bits(bits))
                found.append((key_of(score), select(is_lost, number, position), there))
            for each in found:
                action(*each)
            return carry

        machine.loop((count + (pairs - 1)) // pairs, visit_pair, [])

    def _mark_ranked(self, kth: KeyRange, marks: Marks) -> None:
        """Of the few scores in the k-th one's range, each in a lane: those with less than k before them."""
        machine, lists = self.machine, self.lists
        with machine.when(self.thread < kth.count):
            (mine,) = machine.load_shared(self.thread * 4 + lists.tied_keys, 4)
            (position,) = machine.load_shared(self.thread * 4 + lists.tied_positions, 4)

            def add_before(i: Value, carry: list[Value]) -> list[Value]:
                place = carry[0]
                others = [machine.load_shared(i * 16 + each, 16) for each in (lists.tied_keys, lists.tied_positions)]
                for j, (other, at) in enumerate(zip(*others, strict=True)):
                    is_before = (other > mine) | (other.equals(mine) & (at < position))
                    place = place + select(is_before & (i * VECTOR + j < kth.count), self.one, 0)
                return [place]

            (place,) = machine.loop((kth.count + (VECTOR - 1)) // VECTOR, add_before, [kth.above])
            marks.mark(position, place < self.k)
