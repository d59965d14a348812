"""Decode attention on Hopper for few queries, where latency matters more than throughput.

    logits^T [keys, heads] = K q^T,      out^T [channels, heads] = K^T weights^T

Heads are the columns of both products, so a block can work with as few as 8 heads. The heads of a query are divided
among clusters, and its keys among the blocks of each cluster. A block loads all its tiles at once, one warpgroup per
tile, and processes them in one pass. Then each block of a cluster merges the parts for its share of the channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from pallas_kernels.attention.block import LOG2E, LOWEST, column_of, row_of, scale_logits
from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, KeyLoader, Query
from pallas_kernels.attention.layout import AttentionLayout, Outputs, Scratch
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.lanes import Op, add, fold, maximum
from pallas_kernels.language.launch import SCRATCH_BYTES
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.operand_rows import OperandRows, store_pairs

_ROWS = 64  # channels per product
_PRODUCTS = HEAD_DIM // _ROWS
_WARPS = WARPGROUP // WARP
_ALIGNMENT = 1024  # alignment of the first tile
_UNITS = HEAD_DIM * 2 // 16  # 16-byte units in a head's f16 row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(AttentionLayout):
    """The layout for few queries. A block computes a multiple of 8 heads, over as many tiles as it has warpgroups."""

    tiles: int  # the largest number of tiles per block

    gpu: ClassVar[GPU] = HOPPER

    @property
    def warpgroups(self) -> int:
        return self.tiles

    @property
    def shared_bytes(self) -> int:
        tiles = (self.heads + self.tiles * KEYS) * HEAD_DIM * 2 + self.tiles * self.heads * KEYS * 2
        return tiles + self.tiles * (KEYS * 4 + _WARPS * self.heads * 8) + _ALIGNMENT

    @property
    def fits(self) -> bool:
        """Whether the tiles fit into the shared memory of a block."""
        return self.shared_bytes + SCRATCH_BYTES <= self.gpu.shared_bytes

    def check(self, heads: int, tiles: int) -> None:
        if tiles > self.cluster * self.tiles or not self.fits:
            raise ValueError(f"{self} does not serve queries of {tiles} tiles")
        if self.heads % 8:
            raise ValueError(f"{self} does not share {heads} heads: a product has a multiple of 8 columns")
        AttentionLayout.check(self, heads, tiles)  # super() fails: slots=True makes a new class

    @property
    def channels(self) -> int:
        """Number of channels for which a block merges the parts."""
        return HEAD_DIM // self.cluster

    def scratch(self, queries: int, groups: int) -> Scratch:
        return Scratch.of(self, queries, groups, part=(self.heads, self.channels))

    def body(self, machine: TensorCores, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        _Block(machine, inputs, self, form).run(outputs)


class _Block:
    """A block's share of a query, and its shared memory."""

    def __init__(self, machine: TensorCores, inputs: AttentionInputs, layout: Layout, form: AttendedFormat):
        self.machine, self.layout, self.form = machine, layout, form
        self.query = Query.of(machine, inputs, machine.block(0))
        self.first_head = machine.block(1) * layout.heads
        self.lanes = layout.tiles * WARPGROUP
        self.warpgroup = machine.thread // WARPGROUP
        self.column = machine.thread % 4 * 2  # in a product, the first of two adjacent columns that a lane holds
        self.q = Tile.take(machine, layout.heads, HEAD_DIM * 2)
        self.keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=layout.tiles)
        self.weights = Tile.take(machine, layout.heads, KEYS * 2, copies=layout.tiles)
        self.factors = Shared.take(machine, (layout.tiles, KEYS), "f32")  # from ``KeyLoader.store``
        warps = layout.tiles * _WARPS
        self.peaks, self.totals = (Shared.take(machine, (warps * layout.heads,), "f32") for _ in range(2))

    def run(self, outputs: Outputs) -> None:
        assert outputs.scratch is not None
        machine = self.machine
        self._load()
        machine.fence_shared()
        machine.barrier("block")
        peak = self._weigh()
        machine.fence_shared()
        machine.barrier("block")
        parts = self._multiply_values()
        total = self._over_warps(add, self.totals)
        self._leave(outputs.scratch, machine.wgmma_wait(parts), peak, total)
        ends = [self._prepare(n) for n in range(0, self.layout.heads * self.layout.channels // 8, self.lanes)]
        machine.barrier("cluster")
        for end in ends:
            end.finish(outputs)

    def _load(self) -> None:
        """Load the queries of the block's heads, and a tile of keys per warpgroup."""
        machine, query = self.machine, self.query
        loader = KeyLoader(query, self.form)
        tile = self.warpgroup * self.layout.cluster + machine.rank
        # These loads are issued first, because they do not depend on other loads.
        places = [machine.thread + n for n in range(0, self.layout.heads * _UNITS, self.lanes)]
        there = [place < self.layout.heads * _UNITS for place in places]
        numbers = loader.find(tile)
        words = [
            query.head_words(self.first_head + place // _UNITS, place % _UNITS, where)
            for place, where in zip(places, there, strict=True)
        ]
        indices = loader.resolve(tile, numbers, loader.look_up(tile, numbers))
        rows = [loader.load(tile, which, index) for which, index in enumerate(indices)]
        for place, where, unit in zip(places, there, words, strict=True):
            machine.store_shared(self.q.unit(place // _UNITS, place % _UNITS), unit, 16, where)
        keys, factors = self.keys.copy(self.warpgroup), self.factors[self.warpgroup]
        for which, row in enumerate(rows):
            loader.store(which, row, keys, factors)

    def _weigh(self) -> list[Value]:
        """Compute the weights of the block's keys and store them in shared memory.

        Returns the peaks of this lane's heads.
        """
        machine, keys = self.machine, self.keys.copy(self.warpgroup)
        scaled = machine.wgmma_wait(machine.wgmma(None, keys.k_major(), self.q.k_major(), columns=self.layout.heads))
        row = product_row(machine)
        factors = [self.factors.load_floats(self.warpgroup, row + 8 * i, count=1)[0] for i in range(2)]
        scaled = scale_logits(machine, scaled, factors, row_of)
        self._leave_warps(maximum, scaled, self.peaks)
        machine.barrier("block")
        peak = [value.maximum(LOWEST) for value in self._over_warps(maximum, self.peaks)]
        weights = [machine.exp2(value - peak[column_of(n)]) for n, value in enumerate(scaled)]
        self._leave_warps(add, weights, self.totals)
        if not self.form.scale_is_power_of_two:
            weights = [weight * factors[row_of(n)] for n, weight in enumerate(weights)]
        tile = self.weights.copy(self.warpgroup)
        for n in range(0, len(weights), 2):
            head, key, word = self._pair_rows(weights[n : n + 2], n)
            at = tile.unit(head, key // 8) + key % 8 * 2
            machine.store_shared(at, [word], 4, True)
        return peak

    def _multiply_values(self) -> list[Value]:
        """Start this warpgroup's products, of 64 channels each.

        Returns the sums of one product after another. They are still being computed.
        """
        values = []
        for number in self._products():
            offset = number.minimum(_PRODUCTS - 1) * (_ROWS * 2 * 8) + self.keys.offset
            tile = dataclasses.replace(self.keys, offset=offset)
            a, b = tile.transposed(0), self.weights.k_major()
            tiles = range(self.layout.tiles)
            a = dataclasses.replace(a, steps=tuple(self.keys.size * i + step for i in tiles for step in a.steps))
            b = dataclasses.replace(b, steps=tuple(self.weights.size * i + step for i in tiles for step in b.steps))
            values += self.machine.wgmma(None, a, b, columns=self.layout.heads)
        return values

    def _products(self) -> list[Value]:
        """Return the numbers of this warpgroup's products.

        If the products do not divide evenly among the warpgroups, the last number may be out of range.
        """
        return [self.warpgroup + n for n in range(0, _PRODUCTS, self.layout.tiles)]

    def _leave(self, scratch: Scratch, values: list[Value], peak: list[Value], total: list[Value]) -> None:
        """Store this block's part of the output, each share of channels for the block that merges it.

        Parts are means, in f16, which is the precision of the weights they were computed with.
        """
        machine, layout = self.machine, self.layout
        lane, query, group = machine.thread, machine.block(0), machine.block(1)
        for n, pair in enumerate(zip(peak, total, strict=True)):
            head = self.column + (n // 2 * 8 + n % 2)
            scratch.stats.store_floats(list(pair), query, group, machine.rank, head, 0, where=lane < 4)
        inverse = [machine.normal_reciprocal(value.maximum(2.0**-126)) for value in total]  # 0 if there was no key
        each = layout.heads // 2
        for i, number in enumerate(self._products()):
            where = True if (i + 1) * layout.tiles <= _PRODUCTS else number < _PRODUCTS
            for n in range(0, each, 2):
                pair = [values[i * each + n + c] * inverse[column_of(n + c)] for c in range(2)]
                head, row, word = self._pair_rows(pair, n)
                channel = number * _ROWS + row
                place = query, group, channel // layout.channels, machine.rank
                scratch.parts.store_words([word], *place, head, channel % layout.channels, where=where)

    def _prepare(self, first: int) -> _End:
        """Load what a piece of the output needs, besides the parts."""
        layout, query = self.layout, self.query
        units = layout.channels // 8
        number = self.machine.thread + first
        where = True if first + self.lanes <= layout.heads * units else number < layout.heads * units
        head, channel = number // units, number % units * 8
        (sink,) = query.inputs.sinks.load_floats(self.first_head + head, count=1, where=where)
        angles: list[list[Value]] = []
        turns = (self.machine.rank * layout.channels + channel) >= NOPE_DIM
        if query.inputs.angles is not None:
            pair = (self.machine.rank * layout.channels + channel - NOPE_DIM) // 2
            angles = [
                query.inputs.angles.load_floats(query.batch, query.token, pair + at, where=turns & where)
                for at in (0, ROPE_DIM // 2)
            ]
        return _End(self, head, channel, where, turns, (sink * LOG2E).maximum(LOWEST), angles)

    # Reductions over the lanes that share a head.
    def _leave_warps(self, op: Op, values: list[Value], to: Shared) -> None:
        """Reduce a product over the rows of the warp, and store the result in f32 [warps * heads]."""
        machine, warp = self.machine, self.machine.thread // WARP
        for j in range(0, len(values), 4):
            pair = [op(values[j + c], values[j + 2 + c]) for c in range(2)]
            for distance in (4, 8, 16):
                pair = [op(value, machine.shuffle_xor(value, distance)) for value in pair]
            to.store_floats(pair, warp * self.layout.heads + self.column + 2 * j, where=machine.thread % WARP < 4)

    def _over_warps(self, op: Op, of_warps: Shared) -> list[Value]:
        """Reduce f32 [warps * heads] over warps. Returns the values of this lane's heads, in order."""
        heads, values = self.layout.heads, []
        for j in range(0, heads, 8):
            first = [self.column + (warp * heads + j) for warp in range(self.lanes // WARP)]
            pairs = [of_warps.load_floats(at, count=2) for at in first]
            values += [fold(op, [pair[c] for pair in pairs]) for c in range(2)]
        return values

    def _pair_rows(self, pair: list[Value], n: int) -> tuple[Value, Value, Value]:
        """Convert two columns of a row, elements n and n + 1 of a product, to two rows of one column.

        A lane of an even row exchanges values with the lane of the next row: one gets the first column, the other the
        second.

        Returns:
          (column, row, pair of f16).
        """
        machine = self.machine
        odd = machine.thread // 4 % 2 == 1
        other = machine.shuffle_xor(select(odd, pair[0], pair[1]), 4)
        word = machine.to_f16(select(odd, other, pair[0]), select(odd, pair[1], other))
        row = (product_row(machine) & -2) + n // 2 % 2 * 8
        return self.column + machine.thread // 4 % 2 + n // 4 * 8, row, word


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _End:
    """Eight channels of a head, for which the parts of a cluster are merged into the output."""

    block: _Block
    head: Value
    channel: Value  # number among the block's channels
    where: Condition
    turns: Value  # whether the channels have rope
    sink: Value
    angles: Sequence[list[Value]]  # cosines and sines of four pairs

    def finish(self, outputs: Outputs) -> None:
        """Merge all blocks' parts, apply the inverse rope, and store the output."""
        machine, layout, query = self.block.machine, self.block.layout, self.block.query
        out, scratch = outputs.out, outputs.scratch
        assert scratch is not None
        of_query = machine.block(0), machine.block(1)
        sources = range(layout.cluster)
        stats = [
            scratch.stats.load_floats(*of_query, source, self.head, 0, count=2, where=self.where) for source in sources
        ]
        words = [
            scratch.parts.load_words(
                *of_query, machine.rank, source, self.head, self.channel, count=8, where=self.where
            )
            for source in sources
        ]
        top = fold(maximum, [self.sink, *(peak for peak, _ in stats)])
        weights = [total * machine.exp2(peak - top) for peak, total in stats]
        inverse = machine.normal_reciprocal(fold(add, [machine.exp2(self.sink - top), *weights]))  # of 1 or more
        merged = [machine.constant(0.0, "f32")] * 8
        for source in sources:
            share = weights[source] * inverse
            halves = [half for word in words[source] for half in machine.from_f16(word)]
            merged = [machine.fma(half, share, value) for half, value in zip(halves, merged, strict=True)]
        if self.angles:
            for n, (cos, sin) in enumerate(zip(*self.angles, strict=True)):
                a, b = merged[2 * n : 2 * n + 2]
                merged[2 * n] = select(self.turns, a * cos + b * sin, a)
                merged[2 * n + 1] = select(self.turns, b * cos - a * sin, b)
        channel = machine.rank * layout.channels + self.channel
        if isinstance(out, OperandRows):
            head = self.block.first_head + self.head
            store_pairs(machine, out, merged, query.number, head * HEAD_DIM + channel, self.where)
            return
        place = query.batch, query.token, self.block.first_head + self.head
        for n in range(0, 8, 16 // out.dtype.itemsize):
            out.store_floats(merged[n : n + 16 // out.dtype.itemsize], *place, channel + n, where=self.where)
