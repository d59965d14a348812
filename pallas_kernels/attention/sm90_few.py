"""Decode attention on Hopper for few queries, where latency matters more than throughput.

    logits^T [keys, heads] = K q^T,      out^T [channels, heads] = K^T weights^T

Heads are the columns of both products, so a block can work with as few as 8 heads. The heads of a query are divided
among clusters, and its keys among the blocks of each cluster. A block loads all its tiles at once, one warpgroup per
tile, and processes them in one pass. Then each block of a cluster merges the parts for its share of the channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax

from pallas_kernels.activations import OperandRows
from pallas_kernels.attention.block import LOG2E, LOWEST, scale_logits
from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, KeyLoader, Query
from pallas_kernels.attention.layout import AttentionLayout, Outputs, Scratch
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.fragment import QUAD, Fragment, PerColumn, PerRow
from pallas_kernels.language.lanes import Buffer, Op, add, fold, maximum
from pallas_kernels.language.launch import SCRATCH_BYTES
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import Condition, Value, select

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
        if heads % self.heads:
            raise ValueError(f"{self} does not share {heads} heads")
        AttentionLayout.check(self, heads, tiles)  # super() fails: slots=True makes a new class

    @property
    def channels(self) -> int:
        """Number of channels for which a block merges the parts."""
        return HEAD_DIM // self.cluster

    def scratch(self, queries: int, groups: int) -> Scratch[jax.ShapeDtypeStruct]:
        return Scratch.of(self, queries, groups, part=(self.heads, self.channels))

    def body(
        self, machine: TensorCores, inputs: AttentionInputs[Buffer], outputs: Outputs[Buffer], *, form: AttendedFormat
    ) -> None:
        _Block(machine, inputs, self, form).run(outputs)


class _Block:
    """A block's share of a query, and its shared memory."""

    def __init__(self, machine: TensorCores, inputs: AttentionInputs[Buffer], layout: Layout, form: AttendedFormat):
        self.machine, self.layout, self.form = machine, layout, form
        self.query = Query.of(machine, inputs, machine.block(0))
        self.first_head = machine.block(1) * layout.heads
        self.lanes = layout.tiles * WARPGROUP
        self.warpgroup = machine.thread // WARPGROUP
        self.heads = PerColumn.numbers(machine, layout.heads)  # of the products' columns
        self.q = Tile.take(machine, layout.heads, HEAD_DIM * 2)
        self.keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=layout.tiles)
        self.weights = Tile.take(machine, layout.heads, KEYS * 2, copies=layout.tiles)
        self.factors = Shared.take(machine, (layout.tiles, KEYS), "f32")  # from ``KeyLoader.store``
        warps = layout.tiles * _WARPS
        self.peaks, self.totals = (Shared.take(machine, (warps, layout.heads), "f32") for _ in range(2))

    def run(self, outputs: Outputs[Buffer]) -> None:
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
        self._leave(outputs.scratch, parts.wait(), peak, total)
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

    def _weigh(self) -> PerColumn:
        """Compute the weights of the block's keys and store them in shared memory.

        Returns the peaks of the heads.
        """
        machine, keys, heads = self.machine, self.keys.copy(self.warpgroup), self.layout.heads
        logits = Fragment(machine.wgmma(None, keys.k_major(), self.q.k_major(), columns=heads)).wait()
        factors = PerRow.load(machine, self.factors, self.warpgroup, 0)
        logits = scale_logits(machine, logits, factors)
        self._leave_warps(logits.warp_over_columns(maximum), self.peaks)
        machine.barrier("block")
        peak = self._over_warps(maximum, self.peaks).map(lambda value: value.maximum(LOWEST))
        weights = logits.map(lambda logit, top: machine.exp2(logit - top), peak)
        self._leave_warps(weights.warp_over_columns(add), self.totals)
        if not self.form.scale_is_power_of_two:
            weights = weights.scale_rows(factors)
        tile = self.weights.copy(self.warpgroup)
        for head, key, word in self._pairs_of_rows(weights):
            at = tile.unit(head, key // 8) + key % 8 * 2
            machine.store_shared(at, [word], 4, True)
        return peak

    def _multiply_values(self) -> Fragment:
        """Start this warpgroup's products, of 64 channels each.

        Returns their sums beside each other. They are still being computed.
        """
        parts = []
        for number in self._products():
            offset = number.minimum(_PRODUCTS - 1) * (_ROWS * 2 * 8) + self.keys.offset
            tile = dataclasses.replace(self.keys, offset=offset)
            a, b = tile.transposed(0), self.weights.k_major()
            tiles = range(self.layout.tiles)
            a = dataclasses.replace(a, steps=tuple(self.keys.size * i + step for i in tiles for step in a.steps))
            b = dataclasses.replace(b, steps=tuple(self.weights.size * i + step for i in tiles for step in b.steps))
            parts.append(Fragment(self.machine.wgmma(None, a, b, columns=self.layout.heads)))
        return Fragment.joined(parts)

    def _products(self) -> list[Value]:
        """Return the numbers of this warpgroup's products.

        If the products do not divide evenly among the warpgroups, the last number may be out of range.
        """
        return [self.warpgroup + n for n in range(0, _PRODUCTS, self.layout.tiles)]

    def _leave(self, scratch: Scratch[Buffer], sums: Fragment, peak: PerColumn, total: PerColumn) -> None:
        """Store this block's part of the output, each share of channels for the block that merges it.

        Parts are means, in f16, which is the precision of the weights they were computed with.
        """
        machine, layout = self.machine, self.layout
        lane, query, group = machine.thread, machine.block(0), machine.block(1)
        for head, *pair in zip(self.heads.values, peak.values, total.values, strict=True):
            scratch.stats.store_floats(pair, query, group, machine.rank, head, 0, where=lane < QUAD)
        inverse = total.map(lambda value: machine.normal_reciprocal(value.maximum(2.0**-126)))  # 0 if there was no key
        for i, (number, part) in enumerate(zip(self._products(), sums.parts(layout.heads), strict=True)):
            where = True if (i + 1) * layout.tiles <= _PRODUCTS else number < _PRODUCTS
            means = part.map(lambda value, factor: value * factor, inverse)
            for head, row, word in self._pairs_of_rows(means):
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
    def _leave_warps(self, of_warp: PerColumn, to: Shared) -> None:
        """Store what a warp has reduced over its rows in f32 [warps, heads]."""
        warp, lane = self.machine.thread // WARP, self.machine.thread % WARP
        for n in range(0, len(of_warp.values), 2):
            to.store_floats(of_warp.values[n : n + 2], warp, self.heads.values[n], where=lane < QUAD)

    def _over_warps(self, op: Op, of_warps: Shared) -> PerColumn:
        """Reduce f32 [warps, heads] over warps."""
        warps, heads = of_warps.shape
        first, *others = (PerColumn.load(self.machine, heads, of_warps, warp, 0) for warp in range(warps))
        return first.map(lambda *values: fold(op, values), *others)

    def _pairs_of_rows(self, fragment: Fragment) -> Iterator[tuple[Value, Value, Value]]:
        """Yield two rows of one column for each two columns of a row that a lane has.

        A lane of an even row exchanges values with the lane of the next row: one gets the first column, the other the
        second.

        Yields:
          (column, row, pair of f16).
        """
        machine, row = self.machine, product_row(self.machine) & -2
        odd = machine.thread // QUAD % 2 == 1
        for n, (_, column, (a, b)) in enumerate(fragment.pairs()):
            other = machine.shuffle_xor(select(odd, a, b), QUAD)
            word = machine.to_f16(select(odd, other, a), select(odd, b, other))
            yield column + machine.thread // QUAD % 2, row + n % 2 * 8, word


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

    def finish(self, outputs: Outputs[Buffer]) -> None:
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
            out.store_line(merged, query.number, head * HEAD_DIM + channel, self.where)
            return
        assert isinstance(out, Buffer), "blocks that share a query do not round"
        place = query.batch, query.token, self.block.first_head + self.head
        for n in range(0, 8, 16 // out.dtype.itemsize):
            out.store_floats(merged[n : n + 16 // out.dtype.itemsize], *place, channel + n, where=self.where)
