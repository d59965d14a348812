"""HCA: entries of one stream over long groups, and their two tails.

    entry i = norm(sum softmax(Z) * K) over the m' rows of group i

The ring tail holds the rows of a group (``ka za``). The online tail holds their running softmax: from peak p, total s
and weighted sum a of the rows so far, a row (k, z) makes

    p' = max(p, z);  s' = e^(p - p') s + e^(z - p');  a' = e^(p - p') a + e^(z - p') k;  entry = a / s

Both tails are pooled in this form. The rows of a group are split over the warpgroups of a cluster of CTAs, whose
running softmaxes are then merged through shared memory. One CTA would be too slow: a group in a ring tail is 512 KiB,
which one SM takes 8 us to read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import jax

from pallas_kernels.language.lanes import Buffer, Row, Shaped, add, fold, maximum
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Value, select
from pallas_kernels.tuned import h200
from pallas_kernels.update.batch import Block, Call, Jobs, Kept, NewTokens, Pair, Split
from pallas_kernels.update.tail_update import TailUpdate

EMPTY_GATE = -1e9  # gate of an empty slot: its weight is 0; finite, so that a softmax of empty slots alone is not NaN

BATCH = 4  # rows that a warpgroup loads at once, while it adds the ones before
_SCRATCH = 3, WARPGROUP, VECTOR  # f32 array for a warpgroup's running softmax; the longest row fits in one step

# (row of the group, whether it is in the warpgroup's share) -> its k and z; z is EMPTY_GATE if there is no row.
LoadRow = Callable[[Value, Condition], Pair]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """The running softmax of rows, per channel."""

    peak: Channels
    total: Channels
    weighted: Channels

    @classmethod
    def empty(cls, row: Row) -> Softmax:
        return cls(row.constant(EMPTY_GATE), row.constant(0.0), row.constant(0.0))

    @classmethod
    def select(cls, condition: Condition, a: Softmax, b: Softmax) -> Softmax:
        """Return a where the condition holds, else b."""
        return jax.tree.map(lambda x, y: select(condition, x, y), a, b)

    def add(self, row: Row, rows: list[Pair]) -> Softmax:
        """Return this with rows (k, z) added. A z of ``EMPTY_GATE``, or what that rounds to in bf16, means no row."""
        machine = row.machine

        def update(*numbers: Value) -> tuple[Value, Value, Value]:
            peak, total, weighted, *rest = numbers
            k, z = rest[: len(rows)], rest[len(rows) :]
            new_peak = fold(maximum, [*z, peak])
            kept = machine.exp(peak - new_peak)
            # If the peak is empty too, exp would give an empty row the weight 1.
            weight = [
                select(gate <= EMPTY_GATE / 2, machine.constant(0.0, "f32"), machine.exp(gate - new_peak)) for gate in z
            ]
            products = [w * key for w, key in zip(weight, k, strict=True)]
            return new_peak, fold(add, weight) + kept * total, fold(add, products) + kept * weighted

        results = [
            [update(*channels) for channels in zip(*steps, strict=True)]
            for steps in zip(
                self.peak, self.total, self.weighted, *[k for k, _ in rows], *[z for _, z in rows], strict=True
            )
        ]
        return Softmax(*([[channel[i] for channel in step] for step in results] for i in range(3)))

    def add_one_by_one(self, row: Row, rows: list[Pair]) -> Softmax:
        """Return what ``add`` gives, with one row after the other. One that is none changes no bit."""
        found = self
        for k, z in rows:
            added, before = found.add(row, [(k, z)]), found

            def chosen(gate: Value, new: Value, old: Value) -> Value:
                return select(gate <= EMPTY_GATE / 2, old, new)

            found = Softmax(
                row.map(chosen, z, added.peak, before.peak),
                row.map(chosen, z, added.total, before.total),
                row.map(chosen, z, added.weighted, before.weighted),
            )
        return found

    def merge(self, row: Row, other: Softmax) -> Softmax:
        """Return the running softmax of the rows of both."""
        peak = row.map(maximum, self.peak, other.peak)
        own, new = (row.map(lambda old, p: row.machine.exp(old - p), part.peak, peak) for part in (self, other))

        def total(x: Channels, y: Channels) -> Channels:
            return row.map(lambda x, wx, y, wy: x * wx + y * wy, x, own, y, new)

        return Softmax(peak, total(self.total, other.total), total(self.weighted, other.weighted))

    def pooled(self, row: Row) -> Channels:
        """Return the weighted mean. It is 0 for a group without rows, whose total is 0."""
        return row.map(lambda a, s: row.machine.divide(a, select(s > 0, s, 1.0)), self.weighted, self.total)


class RingTail[Array: Shaped](Protocol):
    """The tokens of unfinished groups: [layers, requests, m', dim]."""

    @property
    def ka(self) -> Array: ...

    @property
    def za(self) -> Array: ...


class OnlineTail[Array: Shaped](Protocol):
    """The running softmax of unfinished groups: [layers, requests, dim]."""

    @property
    def peak(self) -> Array: ...

    @property
    def total(self) -> Array: ...

    @property
    def weighted(self) -> Array: ...


class HCAUpdate[Tail](TailUpdate[Tail]):
    """The compressor of one request, which runs on all warpgroups of a cluster."""

    __slots__ = ()
    empty: ClassVar[dict[str, float]]
    """The value that fills each leaf of an empty tail."""

    IN_ORDER: ClassVar[tuple[int, int]]
    """CTAs of a unit, and warpgroups of each, where the order of sums must not depend on the call."""

    @classmethod
    @abc.abstractmethod
    def _pooled_rows(cls, call: Call) -> int:
        """Return the largest number of rows of a group that are read and can be split over warpgroups."""

    @classmethod
    def split(cls, call: Call) -> Split:
        """Return the CTAs of a unit. Each warpgroup gets at least two batches of rows."""
        of_step = h200.HCA_STEP if call.requests <= h200.HCA_MANY_REQUESTS else h200.HCA_STEP_OF_MANY
        cluster, warpgroups = h200.HCA_CHUNK if call.num_tokens > 1 else of_step
        if call.in_order:
            cluster, warpgroups = cls.IN_ORDER
        parts = max(1, min(cluster * warpgroups, cls._pooled_rows(call) // (2 * BATCH)))
        parts = 1 << (parts.bit_length() - 1)
        warpgroups = min(warpgroups, parts)
        # The first warpgroup reads the running softmaxes of the others from shared memory.
        scratch = (parts - 1) * math.prod(_SCRATCH) * 4
        return Split(cluster=parts // warpgroups, warpgroups=warpgroups, shared_bytes=scratch)

    @classmethod
    def reset(cls, row: Row, tail: Tail, lead: tuple[Value, Value], j: Value, where: Condition) -> None:
        """Set the tail to the state without rows."""
        for name, number in cls.empty.items():
            leaf = getattr(tail, name)
            at = (*lead, j)[: len(leaf.shape) - 1]
            row.store(leaf, row.constant(number), *at, where=where)

    @property
    def _split(self) -> Split:
        return self.split(self.call)

    @property
    def _part(self) -> Value:
        """The warpgroup's number in the cluster."""
        warpgroup, split = self.machine.thread // WARPGROUP, self._split
        return warpgroup if split.cluster == 1 else self.machine.rank * split.warpgroups + warpgroup

    def _barrier(self, *, leave: Condition = False) -> None:
        if self._split.cluster > 1:
            self.machine.barrier("cluster", leave=leave)
        elif self._split.warpgroups > 1:
            self.machine.barrier("block")
        else:
            self.row.team.barrier()

    def _pool(self, load: LoadRow, start: Softmax) -> Softmax:
        """Return the running softmax of ``start`` and a group's rows.

        Every warpgroup of the cluster must call this. Only the first begins with ``start``, and only it gets the full
        result.
        """
        row, part, parts = self.row, self._part, self._split.parts
        share = -(-self._pooled_rows(self.call) // parts)
        if parts > 1:
            start = Softmax.select(part == 0, start, Softmax.empty(row))
        batch = min(share, BATCH)

        def fetch(i: Index) -> list[Pair]:
            places = [i * batch + j for j in range(batch)]
            return [load(part * share + place, place < share) for place in places]

        def add_and_fetch(i: Value, carry: tuple[Softmax, list[Pair]]) -> tuple[Softmax, list[Pair]]:
            """Add the rows that have been loaded, while the next ones are being loaded."""
            later = fetch(i + 1)
            softmax, rows = self.machine.hold(carry)
            return self._add(softmax, rows), later

        softmax, rows = self.machine.loop(-(-share // batch) - 1, add_and_fetch, (start, fetch(0)))
        return self._merged(self._add(softmax, rows))

    def _add(self, softmax: Softmax, rows: list[Pair]) -> Softmax:
        return softmax.add(self.row, rows)

    def _merged(self, softmax: Softmax) -> Softmax:
        """Merge the warpgroups' running softmaxes, in the first warpgroup."""
        machine, row, part, split = self.machine, self.row, self._part, self._split
        if split.parts == 1:
            return softmax
        others = Shared.take(machine, (split.parts - 1, *_SCRATCH), "f32")
        lane, rank = row.team.lane, 0 if split.cluster > 1 else None
        for i, (values,) in enumerate((softmax.peak, softmax.total, softmax.weighted)):
            others[part - 1][i].store_floats(values, lane, 0, where=part > 0, rank=rank)
        self._barrier(leave=part > 0 if self.call.num_tokens == 1 else False)

        def add_one(other: Value, softmax: Softmax) -> Softmax:
            return softmax.merge(row, Softmax(*([others[other][i].load_floats(lane, 0)] for i in range(3))))

        count = select(part == 0, machine.constant(split.parts - 1, "i32"), 0)
        return machine.loop(count, add_one, softmax)


class HCARingUpdate(HCAUpdate[RingTail[Buffer]]):
    """The update of a compressor with the ring tail."""

    __slots__ = ()
    empty: ClassVar[dict[str, float]] = {"ka": 0.0, "za": EMPTY_GATE}
    leaves = tuple(empty)
    is_one_warpgroup = False
    IN_ORDER = h200.HCA_STEP  # all rows of a group are there, whatever call completes it

    @classmethod
    def num_units(cls, call: Call) -> int:
        """Return the number of entries that the tokens can complete, each of which gets a cluster."""
        return call.max_entries

    @classmethod
    def jobs[Array: Shaped](cls, call: Call, tokens: NewTokens[Array]) -> tuple[Jobs, ...]:
        """Return a job for each tail row that the new tokens fill."""
        if call.keep_tails:
            return ()
        assert tokens.entry is not None

        def run(block: Block, row: Row, i: Value) -> None:
            cls.of_block(block)._write_row(row, i, was_read=False)

        return (Jobs(count=_num_tail_rows(call), dim=tokens.entry.norm.shape[0], run=run),)

    @classmethod
    def _pooled_rows(cls, call: Call) -> int:
        return call.ratio

    def run(self, unit: Value) -> None:
        """Make the unit-th entry."""
        request, row, tail, ratio = self.request, self.row, self.tail, self.call.ratio
        flush = request.live & (unit < self.completed)

        def load(j: Value, inside: Condition) -> Pair:
            there = inside & (j < ratio)
            token, kept = (unit * ratio + j) - self.phase, Kept((tail.ka, tail.za), (request.layer, request.slot, j))
            return self.streams.load_or_kept(row, request, token, kept, where=there, empty_gate=EMPTY_GATE)

        with self.machine.when(flush):
            to = self.store.prepare(unit, self._part == 0)
            softmax = self._pool(load, Softmax.empty(row))
            with self.machine.when(self._part == 0):
                self.store.finish(softmax.pooled(row), to)
        if self.call.num_tokens > 1 and not self.call.keep_tails:
            self._write_read_rows(unit)

    def _write_read_rows(self, unit: Value) -> None:
        """Write the tail rows that the first entry has read.

        Its pooling ends with a barrier, and the same cluster writes them, so they are not overwritten too early.
        """
        parts = self._split.parts
        with self.machine.when(self.request.live & (unit == 0) & (self.phase > 0)):

            def write(i: Value, carry: None) -> None:
                self._write_row(self.row, i * parts + self._part, was_read=True)

            self.machine.loop(-(-_num_tail_rows(self.call) // parts), write)

    def _write_row(self, row: Row, i: Value, *, was_read: bool) -> None:
        """Write the ``i``-th of the newest rows: of several tokens only if the first entry reads its place, or not."""
        request, width = self.request, _num_tail_rows(self.call)
        token = request.count - width + i
        at = (request.start + token) % self.call.ratio
        there = request.live & (token >= 0) & (i < width)
        if self.call.num_tokens > 1:
            there = there & (at < self.phase if was_read else at >= self.phase)
        pair = self.streams.load(row, request, token, where=there)
        for values, old in zip(pair, (self.tail.ka, self.tail.za), strict=True):
            row.store(old, values, request.layer, request.slot, at, where=there)


def _num_tail_rows(call: Call) -> int:
    """Return how many rows of a ring tail the new tokens fill."""
    return min(call.num_tokens, call.ratio)


class HCAOnlineUpdate(HCAUpdate[OnlineTail[Buffer]]):
    """The update of a compressor with the online tail."""

    __slots__ = ()
    empty: ClassVar[dict[str, float]] = {"peak": EMPTY_GATE, "total": 0.0, "weighted": 0.0}
    leaves = tuple(empty)
    IN_ORDER = 1, 1  # a call may end after any row

    @classmethod
    def tail_shape(cls, ratio: int, dim: int) -> tuple[int, ...]:
        return (dim,)

    @classmethod
    def num_units(cls, call: Call) -> int:
        """Return the clusters per request: one for the first and the last touched group, one for each other group."""
        return max(1, call.max_groups - 1)

    @classmethod
    def _pooled_rows(cls, call: Call) -> int:
        return min(call.num_tokens, call.ratio)

    def _add(self, softmax: Softmax, rows: list[Pair]) -> Softmax:
        return softmax.add_one_by_one(self.row, rows) if self.call.in_order else softmax.add(self.row, rows)

    def run(self, unit: Value) -> None:
        """Do the groups of a unit."""
        request, machine = self.request, self.machine
        if self.call.num_tokens == 1:
            only = machine.constant(0, "i32")
            with machine.when(self._needed(only)):
                self._group(only, True)
            return
        last = (self.phase + request.count - 1) // self.call.ratio
        is_first = unit == 0

        def group(i: Value, carry: None) -> None:
            n = select(is_first, i * last, unit)
            with machine.when(self._needed(n) & (is_first | (unit < last))):
                self._group(n, n == last)
                self._barrier()

        more = is_first & request.live & (last > 0)  # ``last`` is meaningless for a request without new tokens
        machine.loop(select(more, machine.constant(2, "i32"), 1), group)

    def _needed(self, n: Value) -> Value:
        """Return whether the n-th touched group must be pooled, for its entry or for the tail."""
        live = self.request.live
        return live & (self.completed > n) if self.call.keep_tails else live

    def _group(self, n: Value, is_last: Condition) -> None:
        """Pool the new tokens of the n-th touched group.

        Store its entry if it is full, and its softmax if it is the last.
        """
        request, row, streams, machine, ratio = self.request, self.row, self.streams, self.machine, self.call.ratio
        begin = (n * ratio - self.phase).maximum(0)
        end = ((n + 1) * ratio - self.phase).minimum(request.count)

        def load(j: Value, inside: Condition) -> Pair:
            token = begin + j
            return streams.load(row, request, token, where=inside & (token < end), empty_gate=EMPTY_GATE)

        is_holder, continues, at = self._part == 0, n == 0, (request.layer, request.slot)
        leaves = [getattr(self.tail, name) for name in self.leaves]
        kept = Softmax(*(row.load(leaf, *at, where=continues & is_holder) for leaf in leaves))
        kept = Softmax.select(continues, kept, Softmax.empty(row))
        is_full = self.completed > n
        to = self.store.prepare(n, is_holder & is_full)
        softmax = self._pool(load, kept)
        with machine.when(is_holder):
            if not self.call.keep_tails:
                left = Softmax.select(is_full, Softmax.empty(row), softmax)
                for leaf, values in zip(leaves, (left.peak, left.total, left.weighted), strict=True):
                    row.store(leaf, values, *at, where=is_last)
            with machine.when(is_full):
                self.store.finish(softmax.pooled(row), to)
