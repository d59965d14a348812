"""CSA: entries of two overlapping streams, and their tails.

    entry i = norm(sum softmax(Z) * K) over 2m rows: the b-stream of group i - 1, then the a-stream of group i

A request's tail holds the a- and b-stream of its current group (``ka za kb_next zb_next``) and the b-stream of the
group before (``kb zb``). Each channel of a tail is read and written by only one lane, so the order of instructions in
that lane is enough: every load of an old row comes before the first store. The main compressor and the indexer's run
the same code, one on a warpgroup and the other on a warp.
"""

from __future__ import annotations

from typing import Protocol

from pallas_kernels.language.lanes import Buffer, Row, Shaped, add, fold, maximum
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Value, select
from pallas_kernels.update.batch import Block, Call, Jobs, Kept, NewTokens, Pair
from pallas_kernels.update.tail_update import KeyStore, TailUpdate

MAX_RATIO = 8  # because all rows of an entry are in registers at once
MIN_KEY_DIM, MAX_KEY_DIM = 32, VECTOR * WARP


def softmax_pool(row: Row, pairs: list[Pair]) -> Channels:
    """Return sum softmax(z) * k over the given rows, per channel."""

    def pool(*numbers: Value) -> Value:
        k, z = numbers[: len(pairs)], numbers[len(pairs) :]
        peak = fold(maximum, z)
        weight = [row.machine.exp(gate - peak) for gate in z]
        weighted = [w * key for w, key in zip(weight, k, strict=True)]
        return row.machine.divide(fold(add, weighted), fold(add, weight))

    return row.map(pool, *[k for k, _ in pairs], *[z for _, z in pairs])


class CSATail[Array: Shaped](Protocol):
    """The two streams of unfinished groups: [layers, requests, m, dim]."""

    @property
    def ka(self) -> Array: ...

    @property
    def za(self) -> Array: ...

    @property
    def kb_next(self) -> Array: ...

    @property
    def zb_next(self) -> Array: ...

    @property
    def kb(self) -> Array: ...

    @property
    def zb(self) -> Array: ...


class CSAUpdate(TailUpdate[CSATail[Buffer]]):
    """The update of a CSA compressor, whose tail has both streams."""

    __slots__ = ()
    leaves = "ka", "za", "kb_next", "zb_next", "kb", "zb"
    num_streams = 2
    has_keys = True

    @classmethod
    def of_keys(cls, block: Block, row: Row) -> CSAUpdate:
        """Return the indexer's compressor."""
        key = block.tokens.key
        assert key is not None
        assert block.stack.pool is not None
        assert block.stack.pool.indexer_keys is not None
        store = KeyStore(block, row, block.stack.pool.indexer_keys, key.norm)
        return cls(block, row, block.stack.state.indexer_tail, key, store)

    @classmethod
    def unsupported(cls, ratio: int, key_dim: int | None) -> str | None:
        if ratio > MAX_RATIO:
            return f"CSA ratio must be at most {MAX_RATIO}, got {ratio}"
        if key_dim is not None and (key_dim & (key_dim - 1) or not MIN_KEY_DIM <= key_dim <= MAX_KEY_DIM):
            return f"indexer_head_dim must be a power of two in [{MIN_KEY_DIM}, {MAX_KEY_DIM}], got {key_dim}"
        return None

    @classmethod
    def num_units(cls, call: Call) -> int:
        """Return the number of units. The first does two entries and the tails, the others one entry each."""
        return max(1, call.max_entries - 1)

    @classmethod
    def jobs[Array: Shaped](cls, call: Call, tokens: NewTokens[Array]) -> tuple[Jobs, ...]:
        """Return the units of the indexer's compressor, as jobs."""
        assert tokens.key is not None

        def run(block: Block, row: Row, i: Value) -> None:
            cls.of_keys(block, row).run(i)

        return (Jobs(count=cls.num_units(call), dim=tokens.key.norm.shape[0], run=run),)

    @classmethod
    def reset(cls, row: Row, tail: CSATail[Buffer], lead: tuple[Value, Value], j: Value, where: Condition) -> None:
        """Copy the current b-stream over the previous one."""
        where = where & (j < tail.kb.shape[2])
        for current, previous in ((tail.kb_next, tail.kb), (tail.zb_next, tail.zb)):
            row.store(previous, row.load(current, *lead, j, where=where), *lead, j, where=where)

    def run(self, unit: Value) -> None:
        if self.call.num_tokens == 1 and not self.call.keep_tails:
            self._step()
        else:
            self._chunk(unit)

    def _step(self) -> None:
        """Process one token. It completes a group if it is the group's last row."""
        request, tail, live, last = self.request, self.tail, self.request.live, self.call.ratio - 1
        phase = self.phase
        flush = live & (phase == last)
        a, b = (self._new(0, first=first, where=True) for first in (self.row.dim, 0))
        to = self.store.prepare(0, flush, known=True)
        before = [self._old(tail.kb, tail.zb, j, flush) for j in range(last + 1)]
        current = [self._old(tail.ka, tail.za, j, flush) for j in range(last)]
        self._write(a, tail.ka, tail.za, phase, live)
        self._write(b, tail.kb_next, tail.zb_next, phase, live)
        with request.machine.when(flush):
            pooled = softmax_pool(self.row, [*before, *current, a])
            # Loaded only here, because with these rows in registers earlier, one CTA less would fit on an SM.
            following = [self._old(tail.kb_next, tail.zb_next, j, True) for j in range(last)]
            self.store.finish(pooled, to)
            for j, pair in enumerate([*following, b]):
                self._write(pair, tail.kb, tail.zb, j, True)

    def _chunk(self, unit: Value) -> None:
        """Process several tokens.

        The first unit does entries 0 and 1, whose rows may be in the tails, the others one each.
        """
        machine, is_first = self.machine, unit == 0

        def entry(i: Value, carry: None) -> None:
            number = select(is_first, i, unit + 1)
            flush = self.request.live & (number < self.completed)
            to = self.store.prepare(number, flush)
            rows = self._before(number, flush) + self._group(number, self.tail.ka, self.tail.za, self.row.dim, flush)
            with machine.when(flush):
                self.store.finish(softmax_pool(self.row, rows), to)
                self.row.team.barrier()

        machine.loop(select(is_first, machine.constant(min(2, self.call.max_entries), "i32"), 1), entry)
        if not self.call.keep_tails:
            with machine.when(is_first):
                self._store_tails()

    def _store_tails(self) -> None:
        """Store the last complete group's b-stream as the previous one, and the newest tokens' rows as current."""
        request, tail, ratio = self.request, self.tail, self.call.ratio
        moved = request.live & (self.completed > 0)
        # The last complete group may be the one that was unfinished before. Its first rows are then still in the tail.
        for j, pair in enumerate(self._before(self.completed, moved)):
            self._write(pair, tail.kb, tail.zb, j, moved)
        width = min(self.call.num_tokens, ratio)
        for i in range(width):
            token = request.count - width + i
            there = request.live & (token >= 0)
            at = (request.start + token) % ratio
            for first, k, z in ((self.row.dim, tail.ka, tail.za), (0, tail.kb_next, tail.zb_next)):
                self._write(self._new(token, first=first, where=there), k, z, at, there)

    def _new(self, token: Index, *, first: int, where: Condition) -> Pair:
        """Load a new token's row of the stream that begins at channel ``first`` of k and z: 0 (b) or dim (a)."""
        return self.streams.load(self.row, self.request, token, first=first, where=where)

    def _old(self, k: Buffer, z: Buffer, j: int, where: Condition) -> Pair:
        """Load row j of a tail."""
        lead = self.request.layer, self.request.slot, j
        return self.row.load(k, *lead, where=where), self.row.load(z, *lead, where=where)

    def _before(self, number: Value, where: Condition) -> list[Pair]:
        """Load the b-stream rows of the group before the ``number``-th that this call touches."""
        is_older = number == 0  # the group before the unfinished one
        k = self.tail.kb_next.instead(is_older, self.tail.kb)
        z = self.tail.zb_next.instead(is_older, self.tail.zb)
        return self._group(number - 1, k, z, 0, where)

    def _group(self, n: Value, tail_k: Buffer, tail_z: Buffer, first: int, where: Condition) -> list[Pair]:
        """Load the rows of the n-th group that this call touches. Rows from before the call come from a tail."""
        request, ratio, rows = self.request, self.call.ratio, []
        for j in range(ratio):
            token, kept = (n * ratio + j) - self.phase, Kept((tail_k, tail_z), (request.layer, request.slot, j))
            rows.append(self.streams.load_or_kept(self.row, request, token, kept, first=first, where=where))
        return rows

    def _write(self, pair: Pair, k: Buffer, z: Buffer, j: Index, where: Condition) -> None:
        for buffer, values in zip((k, z), pair, strict=True):
            self.row.store(buffer, values, self.request.layer, self.request.slot, j, where=where)
