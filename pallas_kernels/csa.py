"""CSA: entries of two overlapping streams, and their tails.

    entry i = norm(sum softmax(Z) * K) over 2m rows: the b-stream of block i - 1, then the a-stream of block i

A request's tail holds the a- and b-stream of its current block (``ka za kb_next zb_next``) and the b-stream of the
block before (``kb zb``). A tail's channel is read and written by one lane only, so its program order is all the order
that is needed: every load of an old row stands before the first store. The main compressor and the indexer's run the
same code, on a warpgroup and on a warp.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.batch import EntryStore, Place, Request, Streams
from pallas_kernels.lanes import Buffer, Channels, Condition, Index, Row, Value, add, fold, maximum

Pair = tuple[Channels, Channels]  # a row of keys and the row of its gate logits


def max_entries(num_tokens: int, ratio: int) -> int:
    """Most entries that T tokens can complete."""
    return (num_tokens + ratio - 1) // ratio


def num_units(num_tokens: int, ratio: int) -> int:
    """Units of work per request: the first takes two entries and the tails, each other one an entry."""
    return max(1, max_entries(num_tokens, ratio) - 1)


def softmax_pool(row: Row, pairs: list[Pair]) -> Channels:
    """sum softmax(z) * k over the given rows, per channel."""

    def pool(*numbers: Value) -> Value:
        k, z = numbers[: len(pairs)], numbers[len(pairs) :]
        peak = fold(maximum, z)
        weight = [row.machine.exp(gate - peak) for gate in z]
        weighted = [w * key for w, key in zip(weight, k, strict=True)]
        return row.machine.divide(fold(add, weighted), fold(add, weight))

    return row.map(pool, *[k for k, _ in pairs], *[z for _, z in pairs])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CSAUpdate:
    """One compressor of one request."""

    request: Request
    row: Row
    tail: Any  # buffers ka za kb_next zb_next kb zb, [layers, requests, m, dim]
    streams: Streams  # of buffers
    entries: EntryStore
    num_tokens: int

    def run(self, unit: Value) -> None:
        """Do a unit's share; units count from 0 to ``num_units``."""
        machine = self.request.machine
        if self.num_tokens == 1:
            self._step()
            return
        with machine.when(unit.equals(0)):
            self._first_entries_and_tails()
        if num_units(self.num_tokens, self._ratio) > 1:
            with machine.when(unit > 0):
                self._entry(unit + 1)

    def _step(self) -> None:
        """One token: it completes a block exactly from the block's last row."""
        request, tail, live, last = self.request, self.tail, self.request.live, self._ratio - 1
        phase = request.start % self._ratio
        flush = live & phase.equals(last)
        a, b = (self._new(0, first=first, where=live) for first in (self.row.dim, 0))
        before = [self._old(tail.kb, tail.zb, j, flush) for j in range(last + 1)]
        current = [self._old(tail.ka, tail.za, j, flush) for j in range(last)]
        following = [self._old(tail.kb_next, tail.zb_next, j, flush) for j in range(last)]
        weight, place = self.row.load(self.streams.norm, where=flush), self._place(0, flush)
        self._store(a, tail.ka, tail.za, phase, live)
        self._store(b, tail.kb_next, tail.zb_next, phase, live)
        with request.machine.when(flush):
            for j, pair in enumerate([*following, b]):
                self._store(pair, tail.kb, tail.zb, j, True)
            self._finish([*before, *current, a], weight, 0, place)

    def _first_entries_and_tails(self) -> None:
        """Entries 0 and 1 of several tokens' call, whose rows may lie in the tails, then the tails themselves."""
        request, tail = self.request, self.tail
        flushes = [
            request.live & (self._completed > n) for n in range(min(2, max_entries(self.num_tokens, self._ratio)))
        ]
        weight = self.row.load(self.streams.norm, where=flushes[0])
        for n, flush in enumerate(flushes):
            place = self._place(n, flush)
            if n == 0:
                pairs = [self._old(tail.kb, tail.zb, j, flush) for j in range(self._ratio)]
            else:
                pairs = self._block(n - 1, tail.kb_next, tail.zb_next, first=0, where=flush)
            pairs += self._block(n, tail.ka if n == 0 else None, tail.za, first=self.row.dim, where=flush)
            with request.machine.when(flush):
                self._finish(pairs, weight, n, place)
        # The last complete block's b-stream becomes the previous one; of several tokens for a row the newest lands.
        previous = self._block(self._completed - 1, tail.kb_next, tail.zb_next, first=0, where=flushes[0])
        for j, pair in enumerate(previous):
            self._store(pair, tail.kb, tail.zb, j, flushes[0])
        width = min(self.num_tokens, self._ratio)
        for i in range(width):
            token = request.count - width + i
            there = request.live & (token >= 0)
            at = (request.start + token) % self._ratio
            for first, k, z in ((self.row.dim, tail.ka, tail.za), (0, tail.kb_next, tail.zb_next)):
                self._store(self._new(token, first=first, where=there), k, z, at, there)

    def _entry(self, number: Value) -> None:
        """A later entry: all its rows are new tokens."""
        flush = self.request.live & (number < self._completed)
        weight, place = self.row.load(self.streams.norm, where=flush), self._place(number, flush)
        pairs = self._block(number - 1, None, None, first=0, where=flush)
        pairs += self._block(number, None, None, first=self.row.dim, where=flush)
        with self.request.machine.when(flush):
            self._finish(pairs, weight, number, place)

    @property
    def _ratio(self) -> int:
        return self.tail.ka.shape[2]

    @property
    def _completed(self) -> Value:
        return (self.request.start % self._ratio + self.request.count) // self._ratio

    def _new(self, token: Index, *, first: int, where: Condition) -> Pair:
        """A new token's row; its stream begins at channel ``first`` of k and z: 0 (b) or dim (a)."""
        k, z = (
            self.row.load(buffer, self.request.batch, token, first=first, where=where)
            for buffer in (self.streams.k, self.streams.z)
        )
        return k, z

    def _old(self, k: Buffer, z: Buffer, j: int, where: Condition) -> Pair:
        """Row j of a tail."""
        lead = self.request.layer, self.request.slot, j
        return self.row.load(k, *lead, where=where), self.row.load(z, *lead, where=where)

    def _block(
        self, n: Index, tail_k: Buffer | None, tail_z: Buffer | None, *, first: int, where: Condition
    ) -> list[Pair]:
        """The rows of the n-th block that this call touches: of a tail before the first new token, then new tokens."""
        phase, batch = self.request.start % self._ratio, self.request.batch
        rows = []
        for j in range(self._ratio):
            token = (n * self._ratio + j) - phase
            if tail_k is None or tail_z is None or j == self._ratio - 1:  # a block's last row completes it: it is new
                rows.append(self._new(token, first=first, where=where))
                continue
            at = self.request.layer, self.request.slot, j
            k, z = (
                self.row.load_either(token < 0, (old, at), (new, (batch, token)), first=(0, first), where=where)
                for old, new in ((tail_k, self.streams.k), (tail_z, self.streams.z))
            )
            rows.append((k, z))
        return rows

    def _store(self, pair: Pair, k: Buffer, z: Buffer, j: Index, where: Condition) -> None:
        for buffer, values in zip((k, z), pair, strict=True):
            self.row.store(buffer, values, self.request.layer, self.request.slot, j, where=where)

    def _place(self, number: Index, where: Condition) -> Place:
        return self.entries.locate(self.request.start // self._ratio + number, where)

    def _finish(self, pairs: list[Pair], weight: Channels, number: Index, place: Place) -> None:
        self.entries.finish(softmax_pool(self.row, pairs), weight, number, place)
