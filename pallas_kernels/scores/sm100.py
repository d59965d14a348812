"""Indexer scores on Blackwell.

A warpgroup processes 64 keys at a time. They are loaded and unpacked as on Hopper, but stored in shared memory. One of
its lanes starts their product with a token's queries, [64 keys, 64 heads] in tensor memory. While it runs, the
warpgroup reads the previous product from there, multiplies its positive part by the heads' weights and sums over heads.
"""

from __future__ import annotations

import dataclasses
from typing import Self

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import Fragment, PerColumn
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.target import BLACKWELL
from pallas_kernels.language.tensor_cores import product_row
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.scores import tuning
from pallas_kernels.scores.fp4 import DIM, Fp4
from pallas_kernels.scores.inputs import HEADS, ScoreInputs
from pallas_kernels.scores.keys import StoredKeys
from pallas_kernels.scores.queries import Queries
from pallas_kernels.scores.share import TILE_ENTRIES, Share
from pallas_kernels.scores.tiles import Block, Tiles

_COPIES = 2  # copies of a warpgroup's operand and sums: one for the running product, one for the lanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(tuning.Tuning):
    """The tuning of the Blackwell kernel."""

    blocks: int = BLACKWELL.multiprocessors

    @classmethod
    def fastest(cls, fp4: type[Fp4], tokens: int, tiles: int) -> Self:
        """Return as many warpgroups as registers and shared memory allow. This has not been measured."""
        return cls(warpgroups=3 if tokens == 1 else 2)

    def shared_bytes(self, fp4: type[Fp4], tokens: int) -> int:
        operands = self.warpgroups * _COPIES * (TILE_ENTRIES * fp4.row_bytes + 8)
        return Queries.shared_bytes(fp4, tokens) + operands + 32

    def body(
        self, machine: TensorMemory, inputs: ScoreInputs[Buffer], out: Buffer, *, fp4: type[Fp4], blocks: int
    ) -> None:
        share, form = Share.of_block(machine, inputs, blocks), fp4(machine)
        own = _Own.of(machine, form, self.warpgroups)
        block = Block.of(inputs, out, form, self.warpgroups)

        def request(b: Value, first: Value, end: Value, used: Value) -> Value:
            _, count = block.of_warpgroup(first, end)
            with machine.when(first < end):
                _Tiles.of(block, b, first, end).score(own, used)
                machine.barrier("block")
            return used + count * block.queries.tokens

        with machine.tensor_memory(1 << (self.warpgroups * HEADS - 1).bit_length()):
            share.loop(request, machine.constant(0, "i32"))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """What belongs to one warpgroup."""

    machine: TensorMemory
    fp4: Fp4
    number: Value  # of the warpgroup
    operand: TypedTile  # keys, in ``_COPIES`` copies
    scored: Barrier  # one per copy: its product is complete

    @classmethod
    def of(cls, machine: TensorMemory, fp4: Fp4, warpgroups: int) -> _Own:
        number, count = machine.thread // WARPGROUP, warpgroups * _COPIES
        operand = TypedTile.take(machine, TILE_ENTRIES, DIM, fp4.dtype, copies=count)[number * _COPIES]
        scored = Barrier.take(machine, warps=1, copies=count)
        init_barriers(scored)
        return cls(machine, fp4, number, operand, scored.copy(number * _COPIES))

    def sums(self, use: Value) -> Accumulator:
        return Accumulator(column=self.number * HEADS, columns=HEADS, half=use % _COPIES)

    def store(self, copy: Value, parts: list[list[Value]]) -> None:
        """Store unpacked keys. To be followed by ``meet``."""
        machine, tile = self.machine, self.operand[copy]
        row = product_row(machine)
        for n, part in enumerate(parts):
            for i, word in enumerate(self.fp4.finish(part)):
                machine.store_shared(tile.unit(row + 8 * n, i) + self.fp4.quarter * 4, [word], 4, True)
        machine.fence_shared()

    def meet(self) -> None:
        """Make what the whole warpgroup did so far come before the product that is started next."""
        self.machine.fence_tensor("before")
        self.machine.barrier("warpgroup")
        self.machine.fence_tensor("after")

    def ask(self, use: Value, copy: Value, queries: TypedTile, where: Condition) -> None:
        machine, is_first = self.machine, self.machine.thread % WARPGROUP // WARP == 0
        with machine.when(is_first & where), machine.one_lane():
            operands = self.operand[copy].k_major(), queries.k_major()
            machine.mma(self.sums(use), *operands, accumulate=False, dtype=self.fp4.dtype)
            machine.commit(self.scored.copy(use % _COPIES))

    def take(self, use: Value) -> Fragment:
        """Wait for a product and return its sums."""
        self.scored.copy(use % _COPIES).wait(use // _COPIES & 1)
        self.machine.fence_tensor("after")
        return Fragment(self.machine.load_tensor(self.sums(use)))


_OnTheWay = tuple[list[Value], StoredKeys, Value]  # scale of a tile's rows, the next tile, the page of the one after


class _Tiles(Tiles):
    """How a warpgroup scores its tiles on Blackwell."""

    __slots__ = ()

    def _page(self, i: Value) -> Value:
        return self.page(i, i < self.count)

    def score(self, own: _Own, used: Value) -> None:
        """Score all tiles. ``used`` is the number of products that the warpgroup has started before."""
        machine, queries, keys, count = own.machine, self.block.queries, self.block.keys, self.count
        tokens = queries.tokens

        def operand(t: int) -> TypedTile:
            return queries.operand[machine.constant(t, "i32")]

        # Held, so that the addresses of the queries' operand are found for each request: kept over all requests, they
        # would take registers that the tiles need, and were spilled.
        loaded = queries.load(self.b, machine.hold(machine.thread))
        start = [machine.constant(i, "i32") for i in range(3)]
        pages = [self._page(i) for i in start]
        now, later = keys.load(pages[0]), keys.load(pages[1])
        queries.store(loaded)
        weights = _weights(queries, 0) if tokens == 1 else None
        parts, scale = keys.unpack(now)
        own.store(start[0], parts)
        own.meet()
        own.ask(used, start[0], operand(0), count > 0)

        def tile(i: Value, carry: _OnTheWay) -> _OnTheWay:
            scale, stored, following = carry
            next_scale = scale
            for t in range(tokens):
                use, is_last = used + i * tokens + t, t + 1 == tokens
                if is_last:
                    parts, next_scale = keys.unpack(stored)
                    own.store(i + 1 & 1, parts)
                    stored, following = keys.load(following), self._page(i + 3)
                own.meet()
                if is_last:
                    own.ask(use + 1, i + 1 & 1, operand(0), i + 1 < count)
                else:
                    own.ask(use + 1, i & 1, operand(t + 1), True)
                total = _weigh(machine, own.take(use), weights or _weights(queries, t))
                self.store(t, i, total, scale)
            return next_scale, stored, following

        machine.loop(count, tile, (scale, later, pages[2]))


def _weights(queries: Queries, t: int) -> PerColumn:
    """Return the f32 weights of the heads, which are the columns of a product."""
    machine, weights = queries.machine, []
    tile, byte = queries.weights[machine.constant(t, "i32")], machine.thread % 4 * 4
    for unit in range(HEADS // 8):
        high, low = (
            machine.from_f16(machine.load_shared(tile.unit(machine.constant(row, "i32"), unit) + byte, 4)[0])
            for row in range(2)
        )
        weights += [a + b for a, b in zip(high, low, strict=True)]
    return PerColumn(weights)


def _weigh(machine: TensorMemory, dots: Fragment, weights: PerColumn) -> Value:
    """Sum over heads. Even lanes get the sum of the first row, and odd lanes that of the second."""
    one, other = [machine.constant(0.0, "f32")] * 2
    for a, b, weight in zip(dots.of_row(0), dots.of_row(1), weights.values, strict=True):
        one, other = machine.fma(a.maximum(0.0), weight, one), machine.fma(b.maximum(0.0), weight, other)
    is_first = machine.thread & 1 == 0
    total = select(is_first, one, other) + machine.shuffle_xor(select(is_first, other, one), 1)
    return total + machine.shuffle_xor(total, 2)
