"""HCA: entries of one stream over long blocks, and their two tails.

    entry i = norm(sum softmax(Z) * K) over the m' rows of block i

The ring tail holds a block's rows (``ka za``). The online tail holds their running softmax: with peak p, total s and
weighted sum a of the rows so far, a row (k, z) makes

    p' = max(p, z);  s' = e^(p - p') s + e^(z - p');  a' = e^(p - p') a + e^(z - p') k;  entry = a / s

Both are pooled in this form: a block's rows are split over the warpgroups of a CTA and their running softmaxes merged
through shared memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.batch import EntryStore, Request, Streams
from pallas_kernels.lanes import (
    MAX_UNROLLED,
    VECTOR,
    WARPGROUP,
    Channels,
    Condition,
    Index,
    Machine,
    Row,
    Value,
    add,
    fold,
    maximum,
    select,
)

EMPTY_GATE = -1e9  # a gate logit that vanishes in the softmax; finite, so that an all-empty softmax is no NaN
MAX_WARPGROUPS = 4

Softmax = tuple[Channels, Channels, Channels]  # peak, total, weighted


def num_warpgroups(rows: int) -> int:
    """Warpgroups that share a block of so many rows."""
    return max(1, min(MAX_WARPGROUPS, rows // MAX_UNROLLED))


def shared_bytes(warpgroups: int, num_tokens: int, kind: str) -> int:
    """Shared memory that merging takes: per pooling, all warpgroups but the first leave their running softmax there."""
    poolings = 2 if kind == "online" and num_tokens > 1 else 1
    poolings += kind == "online" and num_tokens > 1  # the units between the first and the last
    return poolings * (warpgroups - 1) * 3 * 4 * VECTOR * WARPGROUP


def empty_softmax(row: Row) -> Softmax:
    return row.constant(EMPTY_GATE), row.constant(0.0), row.constant(0.0)


def add_rows(row: Row, softmax: Softmax, rows: list[tuple[Channels, Channels, Condition]]) -> Softmax:
    """The running softmax with rows (k, z, whether it is there) added."""
    machine = row.machine

    def update(*numbers: Value) -> tuple[Value, Value, Value]:
        peak, total, weighted, *rest = numbers
        k, z = rest[: len(rows)], rest[len(rows) :]
        z = [select(there, gate, EMPTY_GATE) for gate, (_, _, there) in zip(z, rows, strict=True)]
        new_peak = fold(maximum, [*z, peak])
        kept = machine.exp(peak - new_peak)
        weight = [select(there, machine.exp(gate - new_peak), 0.0) for gate, (_, _, there) in zip(z, rows, strict=True)]
        products = [w * key for w, key in zip(weight, k, strict=True)]
        return new_peak, fold(add, weight) + kept * total, fold(add, products) + kept * weighted

    results = [
        [update(*channels) for channels in zip(*steps, strict=True)]
        for steps in zip(*softmax, *[k for k, _, _ in rows], *[z for _, z, _ in rows], strict=True)
    ]
    peak, total, weighted = ([[channel[i] for channel in step] for step in results] for i in range(3))
    return peak, total, weighted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HCAUpdate:
    """The compressor of one request, on all warpgroups of a CTA."""

    request: Request
    row: Row  # over a warpgroup
    tail: Any  # buffers ka za [layers, requests, m', dim], or peak total weighted [layers, requests, dim]
    streams: Streams  # of buffers
    entries: EntryStore
    num_tokens: int
    ratio: int
    warpgroups: int

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
    def _warpgroup(self) -> Value:
        return self.machine.thread // WARPGROUP

    def _pool(self, width: int, load: Any, start: Softmax, where: Condition) -> Softmax:
        """The running softmax of ``width`` rows, ``load(j)`` -> (k, z, there), split over the warpgroups.

        Only the first warpgroup's result is whole, and only it begins from ``start``. All lanes of the CTA take part.
        """
        machine, row = self.machine, self.row
        share = -(-width // self.warpgroups)
        unrolled = min(share, MAX_UNROLLED)
        is_first = self._warpgroup.equals(0)
        empty = empty_softmax(row)
        if self.warpgroups > 1:
            start = tuple(row.map(lambda a, b: select(is_first, a, b), s, e) for s, e in zip(start, empty, strict=True))

        def body(i: Value, carry: list[Value]) -> list[Value]:
            rows = []
            for j in range(unrolled):
                place = (i * unrolled + j) + self._warpgroup * share
                k, z, there = load(place, where & ((i * unrolled + j) < share) & (place < width))
                rows.append((k, z, there))
            return _flat(add_rows(row, _nested(row, carry), rows))

        trips = -(-share // unrolled)
        flat = _flat(start)
        flat = machine.loop(trips, body, flat) if trips > 1 else body(machine.constant(0, "i32"), flat)
        softmax = _nested(row, flat)
        if self.warpgroups == 1:
            return softmax
        # [warpgroup - 1][peak, total, weighted][lane of the team][channels of the step]
        size = 4 * VECTOR * WARPGROUP
        per_warpgroup = 3 * row.steps * size
        base = machine.take_shared((self.warpgroups - 1) * per_warpgroup)
        lane = row.team.lane * (4 * VECTOR)
        mine = lane + (self._warpgroup - 1) * per_warpgroup
        for i, step in enumerate([step for part in softmax for step in part]):
            words = [machine.bits(value) for value in step]
            machine.store_shared(mine + (base + i * size), words, 4 * VECTOR, self._warpgroup > 0)
        machine.barrier("block")
        for other in range(self.warpgroups - 1):
            parts = []
            for i in range(3 * row.steps):
                words = machine.load_shared(lane + (base + other * per_warpgroup + i * size), 4 * VECTOR)
                parts += [machine.from_bits(word) for word in words]
            softmax = _merge(row, softmax, _nested(row, parts))
        return softmax

    def _finish(self, softmax: Softmax, number: Index, where: Condition) -> None:
        machine, row = self.machine, self.row
        weight = row.load(self.streams.norm, where=where)
        place = self.entries.locate(self.request.start // self.ratio + number, where)
        _, total, weighted = softmax
        # A total of 0 is a block without rows.
        pooled = row.map(lambda a, s: machine.divide(a, select(s > 0, s, 1.0)), weighted, total)
        with machine.when(where):
            self.entries.finish(pooled, weight, number, place)


class HCARingUpdate(HCAUpdate):
    """With the ring tail."""

    __slots__ = ()

    @staticmethod
    def num_units(num_tokens: int, ratio: int) -> int:
        """CTAs per request: one per block that T tokens can complete."""
        return (num_tokens + ratio - 1) // ratio

    @staticmethod
    def num_jobs(num_tokens: int, ratio: int) -> int:
        """Jobs for single warps: tail rows that new tokens fill."""
        return min(num_tokens, ratio)

    def run(self, unit: Value) -> None:
        """The unit-th entry. All lanes of the CTA."""
        request, row, tail = self.request, self.row, self.tail
        flush = request.live & (unit < self._completed)

        def load(j: Value, where: Condition) -> tuple[Channels, Channels, Condition]:
            token = (unit * self.ratio + j) - self._phase
            at = request.layer, request.slot, j
            k, z = (
                row.load_either(token < 0, (old, at), (new, (request.batch, token)), where=where)
                for old, new in ((tail.ka, self.streams.k), (tail.za, self.streams.z))
            )
            return k, z, where

        with self.machine.when(flush):
            softmax = self._pool(self.ratio, load, empty_softmax(row), flush)
            with self.machine.when(self._warpgroup.equals(0)):
                self._finish(softmax, unit, flush)
        if self.num_tokens > 1:
            # Rows that the first entry has read: whoever writes them must come after. Its pooling ends in a barrier.
            width = self.num_jobs(self.num_tokens, self.ratio)
            with self.machine.when(request.live & unit.equals(0) & (self._phase > 0)):

                def write(i: Value, carry: list[Value]) -> list[Value]:
                    self._write_row(row, i * self.warpgroups + self._warpgroup, width, below_phase=True)
                    return carry

                self.machine.loop(-(-width // self.warpgroups), write, [])

    def write_tail_row(self, row: Row, job: Value) -> None:
        """A warp's job: write the ``job``-th of the newest rows, unless the first entry may be reading it."""
        self._write_row(row, job, self.num_jobs(self.num_tokens, self.ratio), below_phase=False)

    def _write_row(self, row: Row, i: Value, width: int, *, below_phase: bool) -> None:
        request = self.request
        token = request.count - width + i
        at = (request.start + token) % self.ratio
        there = request.live & (token >= 0) & (i < width)
        if self.num_tokens > 1:
            there = there & (at < self._phase if below_phase else at >= self._phase)
        for new, old in ((self.streams.k, self.tail.ka), (self.streams.z, self.tail.za)):
            values = row.load(new, request.batch, token, where=there)
            row.store(old, values, request.layer, request.slot, at, where=there)


class HCAOnlineUpdate(HCAUpdate):
    """With the online tail."""

    __slots__ = ()

    @staticmethod
    def num_units(num_tokens: int, ratio: int) -> int:
        """CTAs per request: one for the first and the last block that T tokens touch, one for each other block."""
        return max(1, (num_tokens + 2 * ratio - 2) // ratio - 1)

    def run(self, unit: Value) -> None:
        """A unit's blocks. All lanes of the CTA."""
        request, row = self.request, self.row
        last = (self._phase + request.count - 1) // self.ratio
        first_unit = request.live & unit.equals(0)
        with self.machine.when(first_unit):
            lead = request.layer, request.slot
            leaves = self.tail.peak, self.tail.total, self.tail.weighted
            carried = [row.load(leaf, *lead, where=self._warpgroup.equals(0)) for leaf in leaves]
            self._block(0, (carried[0], carried[1], carried[2]), first_unit, is_last=last.equals(0))
        if self.num_tokens == 1:
            return
        with self.machine.when(first_unit & (last > 0)):
            self._block(last, empty_softmax(row), first_unit, is_last=True)
        if self.num_units(self.num_tokens, self.ratio) > 1:
            middle = request.live & (unit > 0) & (unit < last)
            with self.machine.when(middle):
                self._block(unit, empty_softmax(row), middle, is_last=False)

    def _block(self, n: Index, start: Softmax, where: Condition, *, is_last: Condition) -> None:
        """Pool the new tokens of the n-th touched block; finish it if it is full, keep it if it is the last."""
        request, row, streams = self.request, self.row, self.streams
        begin = self.machine.constant(0, "i32") if n == 0 else n * self.ratio - self._phase
        end = ((n + 1) * self.ratio - self._phase).minimum(request.count)

        def load(j: Value, inside: Condition) -> tuple[Channels, Channels, Condition]:
            token = begin + j
            there = inside & (token < end)
            k, z = (row.load(buffer, request.batch, token, where=there) for buffer in (streams.k, streams.z))
            return k, z, there

        softmax = self._pool(min(self.num_tokens, self.ratio), load, start, where)
        flush = where & (self._completed > n)
        with self.machine.when(self._warpgroup.equals(0)):
            if is_last is not False:
                leaves = self.tail.peak, self.tail.total, self.tail.weighted
                for leaf, values, empty in zip(leaves, softmax, (EMPTY_GATE, 0.0, 0.0), strict=True):
                    kept = row.map(
                        lambda value, empty=empty: select(flush, row.machine.constant(empty, "f32"), value), values
                    )
                    row.store(leaf, kept, request.layer, request.slot, where=where & is_last)
            self._finish(softmax, n, flush)


def _flat(softmax: Softmax) -> list[Value]:
    return [value for part in softmax for step in part for value in step]


def _nested(row: Row, flat: list[Value]) -> Softmax:
    steps = [flat[i : i + VECTOR] for i in range(0, len(flat), VECTOR)]
    return steps[: row.steps], steps[row.steps : 2 * row.steps], steps[2 * row.steps :]


def _merge(row: Row, a: Softmax, b: Softmax) -> Softmax:
    """The running softmax of all rows of both."""
    peak = row.map(maximum, a[0], b[0])
    weights = [row.map(lambda own, new: row.machine.exp(own - new), part[0], peak) for part in (a, b)]

    def total(i: int) -> Channels:
        return row.map(lambda x, wx, y, wy: x * wx + y * wy, a[i], weights[0], b[i], weights[1])

    return peak, total(1), total(2)
