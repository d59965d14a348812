"""HCA: entries of one stream over long blocks, and their two tails.

    entry i = norm(sum softmax(Z) * K) over the m' rows of block i

The ring tail holds a block's rows (``ka za``). The online tail holds their running softmax: with peak p, total s and
weighted sum a of the rows so far, a row (k, z) makes

    p' = max(p, z);  s' = e^(p - p') s + e^(z - p');  a' = e^(p - p') a + e^(z - p') k;  entry = a / s

Both are pooled in this form: a block's rows are split over the warpgroups of a cluster of CTAs, whose running softmaxes
are merged through shared memory. One CTA could not do it: a ring's block is 512 KiB, which takes one SM 8 us to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.language.lanes import Row, add, fold, maximum
from pallas_kernels.language.machine import VECTOR, WARPGROUP, Channels, Condition, Index, Machine, Value, select
from pallas_kernels.update.batch import Destination, EntryStore, Request, Streams, max_blocks, max_entries

EMPTY_GATE = -1e9  # a gate logit that vanishes in the softmax; finite, so that an all-empty softmax is no NaN

BATCH = 4  # rows in flight per warpgroup, besides those being added

Softmax = tuple[Channels, Channels, Channels]  # peak, total, weighted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the rows of one block are shared: ``cluster`` CTAs of ``warpgroups`` each."""

    rows: int
    cluster: int
    warpgroups: int

    @classmethod
    def of(cls, rows: int, requests: int, num_tokens: int) -> Split:
        """At least two batches of rows for each warpgroup. Chosen by measuring on an H200:

        A decode step of few requests wants a block on many SMs. One of many has CTAs enough, and pays for each that
        finds nothing to do; all of them should be resident at once.
        """
        cluster, warpgroups = (4, 2) if num_tokens > 1 else (8, 1) if requests <= 64 else (2, 1)
        parts = max(1, min(cluster * warpgroups, rows // (2 * BATCH)))
        parts = 1 << (parts.bit_length() - 1)
        warpgroups = min(warpgroups, parts)
        return cls(rows=rows, cluster=parts // warpgroups, warpgroups=warpgroups)

    @property
    def parts(self) -> int:
        return self.cluster * self.warpgroups

    @property
    def share(self) -> int:
        """Rows of a warpgroup."""
        return -(-self.rows // self.parts)

    @property
    def shared_bytes(self) -> int:
        """Shared memory in which the first warpgroup finds the running softmaxes of the others."""
        return (self.parts - 1) * 3 * 4 * VECTOR * WARPGROUP


def empty_softmax(row: Row) -> Softmax:
    return row.constant(EMPTY_GATE), row.constant(0.0), row.constant(0.0)


def add_rows(row: Row, softmax: Softmax, rows: list[tuple[Channels, Channels]]) -> Softmax:
    """The running softmax with rows (k, z) added; a z of ``EMPTY_GATE``, or what it rounds to in bf16, is no row."""
    machine = row.machine

    def update(*numbers: Value) -> tuple[Value, Value, Value]:
        peak, total, weighted, *rest = numbers
        k, z = rest[: len(rows)], rest[len(rows) :]
        new_peak = fold(maximum, [*z, peak])
        kept = machine.exp(peak - new_peak)
        # Under an empty peak, an empty row would weigh e^0.
        weight = [
            select(gate <= EMPTY_GATE / 2, machine.constant(0.0, "f32"), machine.exp(gate - new_peak)) for gate in z
        ]
        products = [w * key for w, key in zip(weight, k, strict=True)]
        return new_peak, fold(add, weight) + kept * total, fold(add, products) + kept * weighted

    results = [
        [update(*channels) for channels in zip(*steps, strict=True)]
        for steps in zip(*softmax, *[k for k, _ in rows], *[z for _, z in rows], strict=True)
    ]
    peak, total, weighted = ([[channel[i] for channel in step] for step in results] for i in range(3))
    return peak, total, weighted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HCAUpdate:
    """The compressor of one request, on all warpgroups of a cluster."""

    request: Request
    row: Row  # over a warpgroup
    tail: Any  # buffers ka za [layers, requests, m', dim], or peak total weighted [layers, requests, dim]
    streams: Streams  # of buffers
    entries: EntryStore
    num_tokens: int
    ratio: int
    split: Split
    keep_tails: bool  # write entries alone

    @property
    def machine(self) -> Machine:
        return self.request.machine

    @property
    def _phase(self) -> Value:
        return self.request.start % self.ratio

    @property
    def _completed(self) -> Value:
        return (self._phase + self.request.count) // self.ratio

    @property
    def _part(self) -> Value:
        """The warpgroup's number in the cluster."""
        warpgroup = self.machine.thread // WARPGROUP
        return warpgroup if self.split.cluster == 1 else self.machine.rank * self.split.warpgroups + warpgroup

    def _barrier(self, *, leave: Condition = False) -> None:
        if self.split.cluster > 1:
            self.machine.barrier("cluster", leave=leave)
        elif self.split.warpgroups > 1:
            self.machine.barrier("block")
        else:
            self.row.team.barrier()

    def _pool(self, load: LoadRow, start: Softmax) -> Softmax:
        """The running softmax of a block's rows added to ``start``.

        Every warpgroup of the cluster takes part; the first one alone begins from ``start`` and has the whole result.
        """
        row, part, share = self.row, self._part, self.split.share
        if self.split.parts > 1:
            is_first = part.equals(0)
            peak, total, weighted = (
                row.map(lambda a, b: select(is_first, a, b), s, e)
                for s, e in zip(start, empty_softmax(row), strict=True)
            )
            start = peak, total, weighted
        batch = min(share, BATCH)

        def fetch(i: Index) -> list[Channels]:
            rows = []
            for j in range(batch):
                place = i * batch + j
                rows += load(part * share + place, place < share)
            return rows

        def add_and_fetch(i: Value, carry: list[Value]) -> list[Value]:
            """Add the rows that have come while the next ones are on their way."""
            later = fetch(i + 1)
            return _flat([*add_carried(self.machine.hold(carry)), *later])

        def add_carried(carry: list[Value]) -> Softmax:
            peak, total, weighted, *rows = _nested(row, carry)
            return add_rows(row, (peak, total, weighted), list(zip(rows[::2], rows[1::2], strict=True)))

        carry = _flat([*start, *fetch(0)])
        carry = self.machine.loop(-(-share // batch) - 1, add_and_fetch, carry)
        return self._merged(add_carried(carry))

    def _merged(self, softmax: Softmax) -> Softmax:
        """The warpgroups' running softmaxes as one, in the first warpgroup."""
        if self.split.parts == 1:
            return softmax
        machine, row, part = self.machine, self.row, self._part
        # [part - 1][peak, total, weighted][lane], a vector each: a warpgroup holds the longest row in one step
        vector = 4 * VECTOR
        size = vector * WARPGROUP
        base, lane = machine.take_shared(self.split.shared_bytes), row.team.lane * vector
        rank = 0 if self.split.cluster > 1 else None
        for i, values in enumerate(step for quantity in softmax for step in quantity):
            words = [machine.bits(value) for value in values]
            place = lane + ((part - 1) * (3 * size) + (base + i * size))
            machine.store_shared(place, words, vector, part > 0, rank=rank)
        self._barrier(leave=part > 0 if self.num_tokens == 1 else False)

        def add_one(other: Value, carry: list[Value]) -> list[Value]:
            numbers: list[Value] = []
            for i in range(3):
                words = machine.load_shared(lane + (other * (3 * size) + (base + i * size)), vector)
                numbers += [machine.from_bits(word) for word in words]
            return _flat(_merge(row, _nested(row, carry), _nested(row, numbers)))

        others = select(part.equals(0), machine.constant(self.split.parts - 1, "i32"), 0)
        peak, total, weighted = _nested(row, machine.loop(others, add_one, _flat(softmax)))
        return peak, total, weighted

    def _finish(self, softmax: Softmax, to: Destination) -> None:
        _, total, weighted = softmax
        # A total of 0 is a block without rows.
        self.entries.finish(
            self.row.map(lambda a, s: self.machine.divide(a, select(s > 0, s, 1.0)), weighted, total), to
        )


# (row of the block, whether it is in the warpgroup's share) -> its k and z; z is EMPTY_GATE where there is no row.
LoadRow = Callable[[Value, Condition], tuple[Channels, Channels]]


class HCARingUpdate(HCAUpdate):
    """With the ring tail."""

    __slots__ = ()

    @staticmethod
    def num_units(num_tokens: int, ratio: int) -> int:
        """Clusters per request: one per block that T tokens can complete."""
        return max_entries(num_tokens, ratio)

    @staticmethod
    def num_jobs(num_tokens: int, ratio: int) -> int:
        """Jobs for single warps: tail rows that new tokens fill."""
        return min(num_tokens, ratio)

    def run(self, unit: Value) -> None:
        """The unit-th entry."""
        request, row, tail = self.request, self.row, self.tail
        flush = request.live & (unit < self._completed)

        def load(j: Value, inside: Condition) -> tuple[Channels, Channels]:
            there = inside & (j < self.ratio)
            token = (unit * self.ratio + j) - self._phase
            at = request.layer, request.slot, j
            k, z = (
                row.load_either(token < 0, (old, at), (new, (request.batch, token)), where=there, otherwise=empty)
                for old, new, empty in ((tail.ka, self.streams.k, 0.0), (tail.za, self.streams.z, EMPTY_GATE))
            )
            return k, z

        with self.machine.when(flush):
            to = self.entries.prepare(unit, self.ratio, self._part.equals(0))
            softmax = self._pool(load, empty_softmax(row))
            with self.machine.when(self._part.equals(0)):
                self._finish(softmax, to)
        if self.num_tokens > 1 and not self.keep_tails:
            self._write_read_rows(unit)

    def _write_read_rows(self, unit: Value) -> None:
        """Tail rows that the first entry has read; its pooling ends in a barrier, and the same cluster writes them."""
        width = self.num_jobs(self.num_tokens, self.ratio)
        with self.machine.when(self.request.live & unit.equals(0) & (self._phase > 0)):

            def write(i: Value, carry: list[Value]) -> list[Value]:
                self._write_row(self.row, i * self.split.parts + self._part, width, was_read=True)
                return carry

            self.machine.loop(-(-width // self.split.parts), write, [])

    def write_tail_row(self, row: Row, job: Value) -> None:
        """A warp's job: write the ``job``-th of the newest rows, unless the first entry may be reading it."""
        self._write_row(row, job, self.num_jobs(self.num_tokens, self.ratio), was_read=False)

    def _write_row(self, row: Row, i: Value, width: int, *, was_read: bool) -> None:
        request = self.request
        token = request.count - width + i
        at = (request.start + token) % self.ratio
        there = request.live & (token >= 0) & (i < width)
        if self.num_tokens > 1:
            there = there & (at < self._phase if was_read else at >= self._phase)
        for new, old in ((self.streams.k, self.tail.ka), (self.streams.z, self.tail.za)):
            values = row.load(new, request.batch, token, where=there)
            row.store(old, values, request.layer, request.slot, at, where=there)


class HCAOnlineUpdate(HCAUpdate):
    """With the online tail."""

    __slots__ = ()

    @staticmethod
    def num_units(num_tokens: int, ratio: int) -> int:
        """Clusters per request: one for the first and the last block that T tokens touch, one for each other block."""
        return max(1, max_blocks(num_tokens, ratio) - 1)

    def run(self, unit: Value) -> None:
        """A unit's blocks."""
        request, machine = self.request, self.machine
        if self.num_tokens == 1:
            only = machine.constant(0, "i32")
            with machine.when(self._needed(only)):
                self._block(only, True)
            return
        last = (self._phase + request.count - 1) // self.ratio
        is_first = unit.equals(0)

        def block(i: Value, carry: list[Value]) -> list[Value]:
            n = select(is_first, i * last, unit)
            with machine.when(self._needed(n) & (is_first | (unit < last))):
                self._block(n, n.equals(last))
                self._barrier()
            return carry

        machine.loop(select(is_first & (last > 0), machine.constant(2, "i32"), 1), block, [])

    def _needed(self, n: Value) -> Value:
        """Whether the n-th touched block has to be pooled: for its entry, or for the tail."""
        live = self.request.live
        return live & (self._completed > n) if self.keep_tails else live

    def _block(self, n: Value, is_last: Condition) -> None:
        """Pool the new tokens of the n-th touched block; finish it if it is full, keep it if it is the last."""
        request, row, streams, machine = self.request, self.row, self.streams, self.machine
        begin = (n * self.ratio - self._phase).maximum(0)
        end = ((n + 1) * self.ratio - self._phase).minimum(request.count)

        def load(j: Value, inside: Condition) -> tuple[Channels, Channels]:
            token = begin + j
            there = inside & (token < end)
            k = row.load(streams.k, request.batch, token, where=there)
            return k, row.load(streams.z, request.batch, token, where=there, otherwise=EMPTY_GATE)

        is_holder, continues = self._part.equals(0), n.equals(0)
        leaves = self.tail.peak, self.tail.total, self.tail.weighted
        peak, total, weighted = (
            row.map(
                lambda old, empty: select(continues, old, empty),
                row.load(leaf, request.layer, request.slot, where=continues & is_holder),
                empty,
            )
            for leaf, empty in zip(leaves, empty_softmax(row), strict=True)
        )
        is_full = self._completed > n
        to = self.entries.prepare(n, self.ratio, is_holder & is_full)
        softmax = self._pool(load, (peak, total, weighted))
        with machine.when(is_holder):
            if not self.keep_tails:
                for leaf, values, empty in zip(leaves, softmax, empty_softmax(row), strict=True):
                    kept = row.map(lambda value, reset: select(is_full, reset, value), values, empty)
                    row.store(leaf, kept, request.layer, request.slot, where=is_last)
            with machine.when(is_full):
                self._finish(softmax, to)


def _flat(rows: Sequence[Channels]) -> list[Value]:
    return [value for channels in rows for step in channels for value in step]


def _nested(row: Row, flat: list[Value]) -> list[Channels]:
    steps = [flat[i : i + VECTOR] for i in range(0, len(flat), VECTOR)]
    return [steps[i : i + row.steps] for i in range(0, len(steps), row.steps)]


def _merge(row: Row, a: Sequence[Channels], b: Sequence[Channels]) -> Softmax:
    """The running softmax of all rows of both."""
    peak = row.map(maximum, a[0], b[0])
    weights = [row.map(lambda own, new: row.machine.exp(own - new), part[0], peak) for part in (a, b)]

    def total(i: int) -> Channels:
        return row.map(lambda x, wx, y, wy: x * wx + y * wy, a[i], weights[0], b[i], weights[1])

    return peak, total(1), total(2)
