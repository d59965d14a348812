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

from pallas_kernels.language.lanes import Buffer, Row, add, fold, maximum
from pallas_kernels.language.machine import Channels, Condition, Index, Value, select
from pallas_kernels.update.batch import EntryStore, Request, Streams, max_entries

Pair = tuple[Channels, Channels]  # a row of keys and the row of its gate logits


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
    keep_tails: bool  # write entries alone

    def run(self, unit: Value) -> None:
        """Do a unit's share; units count from 0 to ``num_units``."""
        if self.num_tokens == 1 and not self.keep_tails:
            self._step()
        else:
            self._chunk(unit)

    def _step(self) -> None:
        """One token: it completes a block exactly from the block's last row."""
        request, tail, live, last = self.request, self.tail, self.request.live, self._ratio - 1
        phase = request.start % self._ratio
        flush = live & phase.equals(last)
        a, b = (self._new(0, first=first, where=True) for first in (self.row.dim, 0))
        to = self.entries.prepare(0, self._ratio, flush, known=True)
        before = [self._old(tail.kb, tail.zb, j, flush) for j in range(last + 1)]
        current = [self._old(tail.ka, tail.za, j, flush) for j in range(last)]
        self._store(a, tail.ka, tail.za, phase, live)
        self._store(b, tail.kb_next, tail.zb_next, phase, live)
        with request.machine.when(flush):
            pooled = softmax_pool(self.row, [*before, *current, a])
            # Loaded only now: with these rows in flight too, the registers would hold one CTA less per SM.
            following = [self._old(tail.kb_next, tail.zb_next, j, True) for j in range(last)]
            self.entries.finish(pooled, to)
            for j, pair in enumerate([*following, b]):
                self._store(pair, tail.kb, tail.zb, j, True)

    def _chunk(self, unit: Value) -> None:
        """Several tokens: the first unit takes entries 0 and 1, whose rows may be in the tails; the others one each."""
        machine, is_first = self.request.machine, unit.equals(0)

        def entry(i: Value, carry: list[Value]) -> list[Value]:
            number = select(is_first, i, unit + 1)
            flush = self.request.live & (number < self._completed)
            to = self.entries.prepare(number, self._ratio, flush)
            rows = self._before(number, flush) + self._block(number, self.tail.ka, self.tail.za, self.row.dim, flush)
            with machine.when(flush):
                self.entries.finish(softmax_pool(self.row, rows), to)
                self.row.team.barrier()
            return carry

        most = min(2, max_entries(self.num_tokens, self._ratio))
        machine.loop(select(is_first, machine.constant(most, "i32"), 1), entry, [])
        if not self.keep_tails:
            with machine.when(is_first):
                self._store_tails()

    def _store_tails(self) -> None:
        """The last complete block's b-stream becomes the previous one; the newest tokens' rows become current."""
        request, tail = self.request, self.tail
        moved = request.live & (self._completed > 0)
        # The last complete block may be the one that was unfinished: its first rows are in the tail still.
        for j, pair in enumerate(self._before(self._completed, moved)):
            self._store(pair, tail.kb, tail.zb, j, moved)
        width = min(self.num_tokens, self._ratio)
        for i in range(width):
            token = request.count - width + i
            there = request.live & (token >= 0)
            at = (request.start + token) % self._ratio
            for first, k, z in ((self.row.dim, tail.ka, tail.za), (0, tail.kb_next, tail.zb_next)):
                self._store(self._new(token, first=first, where=there), k, z, at, there)

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

    def _before(self, number: Value, where: Condition) -> list[Pair]:
        """b-stream rows of the block before the ``number``-th that this call touches."""
        is_older = number.equals(0)  # than the block that was unfinished
        k = self.tail.kb_next.instead(is_older, self.tail.kb)
        z = self.tail.zb_next.instead(is_older, self.tail.zb)
        return self._block(number - 1, k, z, 0, where)

    def _block(self, n: Value, tail_k: Buffer, tail_z: Buffer, first: int, where: Condition) -> list[Pair]:
        """The rows of the n-th block that this call touches: of a tail before the first new token, then new tokens."""
        at, batch = (self.request.layer, self.request.slot), self.request.batch
        rows = []
        for j in range(self._ratio):
            token = (n * self._ratio + j) - self.request.start % self._ratio
            k, z = (
                self.row.load_either(token < 0, (old, (*at, j)), (new, (batch, token)), first=(0, first), where=where)
                for old, new in ((tail_k, self.streams.k), (tail_z, self.streams.z))
            )
            rows.append((k, z))
        return rows

    def _store(self, pair: Pair, k: Buffer, z: Buffer, j: Index, where: Condition) -> None:
        for buffer, values in zip((k, z), pair, strict=True):
            self.row.store(buffer, values, self.request.layer, self.request.slot, j, where=where)
