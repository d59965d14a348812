"""What the indexer scores of every architecture have in common.

Inputs         the arrays of a call
Share          the tiles that one block scores: consecutive ones of all requests' tiles, so that all blocks have as much
Queries        a request's queries and head weights as operands of two products
store_scores   the scores of a tile

Per token, first product: operands of keys [64, K] and of queries [64 heads, K]. Second: its positive part in f16
[64, 64 heads] and the weights [8, 64 heads], where row 2 i holds them rounded down to f16 and row 2 i + 1 the rest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_kernels.language.lanes import Buffer, add, fold, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Value, select
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.rows import magnitude_bits
from pallas_kernels.scores.fp4 import QUARTER_BYTES, QUARTERS, Fp4

HEADS = 64
ENTRIES = 64  # of a tile
PER_BLOCK = 32
SUM_COLUMNS = 8  # of the second product
_LOWEST = float(np.finfo(np.float32).min)
_POWER = 0xFF << 23  # the bits of an f32 that are a power of two
_LARGEST_POWER = 253 << 23  # whose inverse is normal too
_F16_BITS = -1 << 13  # the bits of an f32 that f16 has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arrays of a call, or their buffers in a kernel."""

    queries: Any  # codes u8 [B, T, heads, dim / 2], scale u8 [B, T, heads, groups]
    weights: Any  # f32 [B, T, heads]
    keys: Any  # codes u8 [layers, num_blocks, per_block, dim / 2], scale u8 [layers, num_blocks, per_block, groups]
    layer: Any  # int32 [1]
    block_table: Any  # int32 [requests, max_blocks]
    slots: Any  # int32 [B]
    visible: Any  # int32 [B, T]

    def of_tokens(self, first: int, last: int) -> Inputs:
        """Of tokens first .. last - 1."""
        queries = jax.tree.map(lambda leaf: leaf[:, first:last], self.queries)
        some = {name: getattr(self, name)[:, first:last] for name in ("weights", "visible")}
        return dataclasses.replace(self, queries=queries, **some)

    def num_tiles(self, b: Value, where: Condition) -> Value:
        """Tiles that any query of a batch row sees; 0 for padding."""
        requests, max_blocks = self.block_table.shape
        slot = self.slots.load_int(b, where=where)
        seen = [self.visible.load_int(b, t, where=where) for t in range(self.visible.shape[1])]
        entries = fold(maximum, seen).maximum(0).minimum(max_blocks * PER_BLOCK)
        there = (slot >= 0) & (slot < requests) & where
        return select(there, (entries + ENTRIES - 1) // ENTRIES, 0)


_START = 8  # tiles that could be scored while a block takes up a request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A block's part of all requests' work, in tiles, each request's behind ``_START`` that stand for taking it up."""

    begin: Value
    end: Value
    first: Value
    requests: Value  # that the part belongs to, from the first one on
    before: Value  # of the first request

    @classmethod
    def of_block(cls, machine: TensorCores, inputs: Inputs, blocks: int) -> Share:
        """That of this one of so many blocks. Every warp finds it for itself: lanes count neighbouring requests."""
        batch = inputs.slots.shape[0]
        lanes = min(WARP, 1 << (batch - 1).bit_length())
        each = -(-batch // lanes)
        lane = machine.thread % lanes
        rows = [lane * each + i for i in range(each)]
        counts = [cls.cost(inputs.num_tiles(b, True if batch == lanes * each else b < batch)) for b in rows]
        zero, nobody = machine.constant(0, "i32"), machine.constant(-1, "i32")
        total, before, distance = fold(add, counts), zero, 1
        while distance < lanes:
            other = machine.shuffle_xor(total, distance)
            before, total = before + select((lane & distance) > 0, other, 0), total + other
            distance *= 2
        number, quota = machine.block(0), total // blocks
        more = total - quota * blocks  # the first blocks take one more
        begin = number * quota + number.minimum(more)
        end = begin + quota + select(number < more, machine.constant(1, "i32"), 0)
        first, last, found = nobody, nobody, nobody
        for b, count in zip(rows, counts, strict=True):
            after = before + count
            holds_first = (before <= begin) & (begin < after)
            first, found = select(holds_first, b, first), select(holds_first, before, found)
            last = select((before < end) & (end <= after), b, last)
            before = after
        if lanes > 1:
            first, last, found = (machine.reduce_warp("max", x) for x in (first, last, found))
        return cls(begin=begin, end=end, first=first, requests=select(begin < end, last - first + 1, 0), before=found)

    @staticmethod
    def cost(tiles: Value) -> Value:
        """Of a request of so many tiles."""
        return select(tiles > 0, tiles + _START, 0)

    def of_request(self, before: Value, tiles: Value) -> tuple[Value, Value]:
        """This block's tiles of a request, first and end; before: the cost of those before it."""
        first = (self.begin - before - _START).maximum(0)
        return first, (self.end - before - _START).minimum(tiles)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """A lane's part of a request's queries, on its way."""

    codes: list[list[Value]]
    scales: list[list[Value]]
    weights: list[list[Value]]
    weight_scales: list[list[list[Value]]]


class Queries:
    """The operands of a request's queries in shared memory."""

    def __init__(self, machine: TensorCores, inputs: Inputs, fp4: Fp4, warpgroups: int):
        self.machine, self.inputs, self.fp4 = machine, inputs, fp4
        self.tokens, self.lanes = inputs.visible.shape[1], warpgroups * WARPGROUP
        self.operand = Tile.take(machine, HEADS, fp4.row_bytes, copies=self.tokens)
        self.weights = Tile.take(machine, SUM_COLUMNS, HEADS * 2, copies=self.tokens)
        self._scale = machine.take_shared(4 * self.tokens)

    @staticmethod
    def shared_bytes(fp4: type[Fp4], tokens: int) -> int:
        return tokens * (HEADS * fp4.row_bytes + SUM_COLUMNS * HEADS * 2 + 16) + 1024

    def scale(self, t: int) -> Value:
        """What a token's sums are multiplied by, besides the scale of the keys' row."""
        return self.machine.from_bits(self.machine.load_shared(self.machine.constant(t * 4 + self._scale, "i32"), 4)[0])

    # Lanes and warps take turns, all of a block's.
    def _quarters(self) -> list[tuple[Value, Value, Condition]]:
        """Token, head and whether it is there, of the quarters of queries that this lane unpacks."""
        total = self.tokens * HEADS * QUARTERS
        numbers = [self.machine.thread + first for first in range(0, total, self.lanes)]
        there = [True if total % self.lanes == 0 else n < total for n in numbers]
        return [
            (n // (HEADS * QUARTERS), n // QUARTERS % HEADS, inside) for n, inside in zip(numbers, there, strict=True)
        ]

    def _tokens(self) -> list[tuple[Value, Condition]]:
        """The tokens whose weights this warp prepares."""
        warps = self.lanes // WARP
        numbers = [self.machine.thread // WARP + first for first in range(0, self.tokens, warps)]
        return [(t, True if self.tokens % warps == 0 else t < self.tokens) for t in numbers]

    def _heads(self) -> list[Value]:
        return [self.machine.thread % WARP + first for first in range(0, HEADS, WARP)]

    def load(self, b: Value) -> _Loaded:
        queries, quarter = self.inputs.queries, self.fp4.quarter * QUARTER_BYTES
        quarters, tokens, heads = self._quarters(), self._tokens(), self._heads()

        def scales(t: Value, head: Value, where: Condition) -> list[Value]:
            return queries.scale.load_words(b, t, head, 0, count=self.fp4.scale_bytes, where=where)

        return _Loaded(
            [queries.codes.load_words(b, t, h, quarter, count=QUARTER_BYTES, where=there) for t, h, there in quarters],
            [scales(*place) for place in quarters],
            [[self.inputs.weights.load_floats(b, t, h, count=1, where=there)[0] for h in heads] for t, there in tokens],
            [[scales(t, h, there) for h in heads] for t, there in tokens],
        )

    def store(self, loaded: _Loaded) -> None:
        """All lanes of the block; ``barrier`` before the first use."""
        machine = self.machine
        for (t, head, there), codes, scales in zip(self._quarters(), loaded.codes, loaded.scales, strict=True):
            tile = self.operand.copy(t)
            for i, word in enumerate(self.fp4.query(codes, scales)):
                machine.store_shared(tile.unit(head, i) + self.fp4.quarter * 4, [word], 4, there)
        for (t, there), weights, scales in zip(self._tokens(), loaded.weights, loaded.weight_scales, strict=True):
            self._store_weights(t, weights, scales, there)
        machine.fence_shared()
        machine.barrier("block")

    def _store_weights(self, t: Value, weights: list[Value], scales: list[list[Value]], there: Condition) -> None:
        """Relative to a power of two below the largest. One that is not finite makes the token's sums NaN."""
        machine, tile = self.machine, self.weights.copy(t)
        weights = [w * self.fp4.query_scale(of_head) for w, of_head in zip(weights, scales, strict=True)]
        peak = machine.reduce_warp("max", fold(maximum, [magnitude_bits(w) for w in weights]))
        power = (peak & _POWER).minimum(_LARGEST_POWER)
        inverse = machine.from_bits((254 << 23) - power)
        scale = machine.bits(machine.from_bits(power) * self.fp4.unit)
        machine.store_shared(t * 4 + self._scale, [scale], 4, there & (machine.thread % WARP).equals(0))
        for head, w in zip(self._heads(), weights, strict=True):
            relative = w * inverse
            high = machine.from_bits(machine.bits(relative) & _F16_BITS)
            parts = machine.to_f16(high, relative - high)
            for row in range(SUM_COLUMNS):
                at = tile.unit(machine.constant(row, "i32"), head // 8) + head % 8 * 2
                machine.store_shared(at, [parts >> 16 if row % 2 else parts], 2, there)


def store_scores(out: Buffer, b: Value, t: int, tile: Value, total: Value, factors: list[Value]) -> None:
    """A tile's scores: total times the factors, in even lanes of a quarter's first row, in odd ones of the second."""
    machine = total.machine
    row = product_row(machine) + (machine.thread & 1) * 8
    entry, where = tile * ENTRIES + row, (machine.thread & 3) < 2
    if out.shape[2] % ENTRIES:
        where = where & (entry < out.shape[2])
    for factor in factors:
        total = total * factor
    out.store_floats([score_of(total)], b, t, entry, where=where)


def score_of(total: Value) -> Value:
    """Finite or +inf, which stands for NaN too."""
    return select(total.equals(total), total, float("inf")).maximum(_LOWEST)
