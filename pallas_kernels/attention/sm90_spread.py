"""Decode attention on Hopper for few queries with the bits of one block of ``sm90``, whose work a cluster does.

A block of ``sm90`` adds the keys of a query tile by tile, so one query takes it as long as its tiles do. Here eight
blocks share both halves of that work, and each sum keeps its order:

    logits and weights of a tile               a warpgroup each, of the two that a block has
    32 channels of the output, over all tiles  a warpgroup each

A block reads all channels of its own tiles' keys, and its own 64 channels of all keys. Logits and weights go through
device memory. For every sixteen tiles, a round:

    compute logits; give the largest one of each head
    meet
    give weights, relative to the peak that the tiles before leave
    meet
    take all weights, and add the weighted keys to the own channels

Each lane does most of this once, so that every instruction counts. Loads of tiles that no query of the launch has are
left out: with those of all sixteen a query of ten tiles takes 13.8 us and not 12.9 (H200).

The peak that a tile's weights are relative to follows from the largest logits of the tiles before (``sm90``), and the
totals of its weights are added lane by lane, those of even and of odd tiles apart, as two warpgroups of ``sm90`` do.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.block import (
    HEADS,
    Rows,
    Softmax,
    scale_logits,
    store_output,
    turns_of,
    weigh,
    whole_if_raised,
)
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs, with_flat_queries
from pallas_kernels.attention.keys import KEYS, KeyFinder, KeyLoader, Query, StoredPart
from pallas_kernels.attention.layout import AttentionLayout, Outputs
from pallas_kernels.attention.query_tile import QueryTile
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import Fragment, LeftOperand, PerColumn, PerRow
from pallas_kernels.language.lanes import Buffer, Shaped, add, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import ATOM_BYTES, TensorCores, Tile
from pallas_kernels.language.values import VECTOR, Condition, Index, Value

CLUSTER = 8
_WARPGROUPS = 2  # of a block, with a tile each
_TILES = CLUSTER * _WARPGROUPS  # of a round
_CHANNELS = HEAD_DIM // CLUSTER  # of a block's output
_ADDED = _CHANNELS // _WARPGROUPS  # of a warpgroup's output
_WORDS, _WORDS_AT_ONCE = KEYS // 4, 4  # of two weights that a lane has of a tile
_EARLY = 10  # tiles whose channels are under way while logits are computed
_AHEAD = 2  # tiles whose weights are loaded before they are needed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange[Array: Shaped]:
    """Device memory, which stays in L2, for what the blocks of a cluster exchange.

    The lead is [queries, groups of heads, 1 or 2 rounds, tiles].
    """

    tops: Array  # f32 [..., HEADS], the largest logits
    weights: Array  # i32 [..., loads, lanes, 4], words of two f16
    totals: Array  # f32 [..., lanes, 2], of the weights that a lane has of its two heads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(AttentionLayout):
    """The layout for few queries whose bits are those of ``sm90``."""

    heads: int = dataclasses.field(default=HEADS, init=False)
    cluster: int = dataclasses.field(default=CLUSTER, init=False)
    tiles: int  # the largest number of a query

    gpu: ClassVar[GPU] = HOPPER
    reduces: ClassVar[bool] = False

    @property
    def warpgroups(self) -> int:
        return _WARPGROUPS

    @property
    def shared_bytes(self) -> int:
        tiles = (HEADS + _WARPGROUPS * KEYS) * HEAD_DIM * 2
        return tiles + (_WARPGROUPS * KEYS + _TILES * (KEYS + HEADS)) * 4 + 1024 + 8

    @property
    def rounds(self) -> int:
        """The most rounds of a query."""
        return -(-self.tiles // _TILES)

    def check(self, heads: int, tiles: int) -> None:
        if tiles > self.tiles:
            raise ValueError(f"{self} does not serve queries of {tiles} tiles")
        AttentionLayout.check(self, heads, tiles)  # super() fails: slots=True makes a new class

    def arguments(self, inputs: AttentionInputs[jax.Array]) -> AttentionInputs[jax.Array]:
        return with_flat_queries(inputs)

    def scratch(self, queries: int, groups: int) -> Exchange[jax.ShapeDtypeStruct]:
        lead = queries, groups, min(self.rounds, 2), _TILES
        loads = _WORDS // _WORDS_AT_ONCE
        return Exchange(
            tops=jax.ShapeDtypeStruct((*lead, HEADS), jnp.float32),
            weights=jax.ShapeDtypeStruct((*lead, loads, WARPGROUP, _WORDS_AT_ONCE), jnp.int32),
            totals=jax.ShapeDtypeStruct((*lead, WARPGROUP, 2), jnp.float32),
        )

    def body(
        self, machine: TensorCores, inputs: AttentionInputs[Buffer], outputs: Outputs[Buffer], *, form: AttendedFormat
    ) -> None:
        _Block(machine, inputs, self, form, outputs.scratch).run(outputs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What a warpgroup holds between tiles."""

    output: Fragment  # [HEADS, channels] sums of all tiles so far
    totals: list[PerRow]  # of even tiles with the sink, and of odd ones


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Peaks:
    """The peaks that matter to a tile."""

    before: PerRow  # of the sums
    of_pair: PerRow  # of the sums before the tile's pair
    own: PerRow  # that its weights are relative to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What a lane has loaded of a tile's weights."""

    operand: LeftOperand
    total: PerRow


class _Block:
    """A block's share of a query, and its shared memory."""

    def __init__(
        self,
        machine: TensorCores,
        inputs: AttentionInputs[Buffer],
        layout: Layout,
        form: AttendedFormat,
        exchange: Exchange[Buffer],
    ):
        self.machine, self.layout, self.form, self.exchange = machine, layout, form, exchange
        self.query = Query.of(machine, inputs, machine.block(0))
        self.rows = Rows(machine=machine, query=self.query, first_head=machine.block(1) * HEADS)
        self.tiles = self.query.tiles.maximum(1)  # as of a block of ``sm90``
        self.most = min(layout.tiles, _TILES)  # of a round
        self.warpgroup, self.lane = machine.thread // WARPGROUP, machine.thread % WARPGROUP
        self.loader = KeyLoader(self.query, form, loaders=_WARPGROUPS)  # of the block's channels
        pieces = QueryTile.take_pieces(machine)
        self.keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=_WARPGROUPS)
        self.channels = dataclasses.replace(self.keys, row_bytes=ATOM_BYTES)  # in the same place: of all tiles
        self.indices = Shared.take(machine, (_TILES, KEYS), "i32")  # of the keys' rows
        self.factors = Shared.take(machine, (_WARPGROUPS, KEYS), "f32")
        self.tops = Shared.take(machine, (_TILES, HEADS), "f32")
        self.heads = QueryTile(pieces=pieces, loaded=Barrier.take(machine, 1))

    def run(self, outputs: Outputs[Buffer]) -> None:
        machine = self.machine
        init_barriers(self.heads.loaded)
        with machine.when(machine.thread < WARP):
            self.heads.load(self.query.inputs, self.query.number)
        half, first = machine.rank // (CLUSTER // 2), machine.rank % (CLUSTER // 2) * _CHANNELS
        first = self.warpgroup * _ADDED + first
        turns = turns_of(self.rows, _ADDED, half, first)  # before anything is waited for
        softmax, none = Softmax.of_sinks(self.rows), PerRow([machine.constant(0.0, "f32")] * 2)
        state = _Sums(Fragment.zeros(machine, _ADDED), [softmax.total, none]), softmax.peak
        if self.layout.rounds == 1:
            sums, _ = self._round(machine.constant(0, "i32"), state)
        else:
            sums, _ = machine.loop((self.tiles + (_TILES - 1)) // _TILES, self._round, state)
        even, odd = (total.over_quad(add) for total in sums.totals)
        means = sums.output.scale_rows(even.map(lambda a, b: machine.reciprocal(a + b), odd))
        store_output(self.rows, outputs.out, means, half, first, turns)

    def _round(self, i: Value, state: tuple[_Sums, PerRow]) -> tuple[_Sums, PerRow]:
        """Add the i-th sixteen tiles, given the sums and the peak before them."""
        sums, peak = state
        machine, own, place = self.machine, self.warpgroup * CLUSTER + self.machine.rank, self._place(i)
        tiles = (self.tiles - i * _TILES).minimum(_TILES)
        self._find_keys(i * _TILES)
        machine.barrier("block")
        values, factors = self._multiply(i * _TILES + own, own)
        # Most of the own channels are under way while the product runs, and the others while weights are made.
        early = self._load_channels(i * _TILES, range(min(_EARLY, self.most)))
        logits = scale_logits(machine, Fragment(values).wait(), factors)
        logits.over_rows(maximum).store(self.exchange.tops, *place, own, 0)
        machine.barrier("cluster")
        tops = self._take_tops(place)
        self._store_channels(range(len(early)), early)
        late = self._load_channels(i * _TILES, range(len(early), self.most))
        self._keep_tops(tops)
        machine.barrier("block")
        self._weigh(logits, factors, self._raised(self._after_pairs(peak, own // 2), own), (*place, own))
        self._store_channels(range(len(early), self.most), late)
        machine.fence_shared()
        machine.barrier("cluster")
        sums = self._added(place, tiles, sums, peak)
        # The next keys take the place of these after the next barrier of the block.
        return sums, peak if self.layout.rounds == 1 else self._after_pairs(peak, _TILES // 2)

    def _place(self, i: Value) -> tuple[Index, ...]:
        """Return where the tiles of a round are in the exchange.

        What was there before is of two rounds ago. Nobody reads that any more, as all blocks have met since.
        """
        return self.query.number, self.machine.block(1), 0 if self.layout.rounds == 1 else i & 1

    def _find_keys(self, first: Value) -> None:
        """Find where the keys of a round are, whose first tile has this number. Each lane finds some of them."""
        machine, at_once = self.machine, _WARPGROUPS * WARPGROUP // KEYS
        row, of_lane = machine.thread % KEYS, machine.thread // KEYS
        places = [of_lane + n for n in range(0, _TILES, at_once)]
        some = -(-self.most // at_once)
        finder, tiles = KeyFinder(self.query, [row]), [first + place for place in places[:some]]
        # Step by step for all tiles, so that their loads run at the same time.
        numbers = [finder.find(tile) for tile in tiles]
        looked_up = [finder.look_up(tile, number) for tile, number in zip(tiles, numbers, strict=True)]
        found = [finder.resolve(*each) for each in zip(tiles, numbers, looked_up, strict=True)]
        nothing = [[machine.constant(-1, "i32")]] * (len(places) - some)  # for tiles that no query has
        for place, index in zip(places, found + nothing, strict=True):
            self.indices.store_words(index, place, row)

    # A warpgroup's own tile.
    def _multiply(self, tile: Value, own: Value) -> tuple[list[Value], PerColumn]:
        """Load a tile's keys, and start the product that makes its logits. Also returns the factors of keys."""
        machine, loader = self.machine, KeyLoader(self.query, self.form)
        keys, factors = self.keys.copy(self.warpgroup), self.factors
        rows = [loader.load(tile, n, self._index(own, row)) for n, row in enumerate(loader.rows)]
        for which, row in enumerate(rows):
            loader.store(which, row, keys, factors[self.warpgroup])
        machine.fence_shared()
        machine.barrier("warpgroup")
        self.heads.loaded.wait(0)
        values = machine.wgmma(None, self.heads.k_major(), keys.k_major(), columns=KEYS)
        return values, PerColumn.load(machine, KEYS, factors, self.warpgroup, 0)

    def _index(self, place: Index, row: Value) -> Value:
        """Return the index of a key's row, given its tile's place in the round."""
        return self.indices.load_words(place, row, count=1)[0]

    def _weigh(self, logits: Fragment, factors: PerColumn, peak: PerRow, place: tuple[Index, ...]) -> None:
        """Give a tile's weights relative to a peak, and their totals."""
        machine = self.machine
        weights, softmax = weigh(machine, logits, peak)
        if not self.form.scale_is_power_of_two:
            weights = weights.map(lambda weight, factor: weight * factor, factors)
        words = weights.operand("f16").words
        for n in range(0, _WORDS, _WORDS_AT_ONCE):
            at = *place, n // _WORDS_AT_ONCE, self.lane, 0
            self.exchange.weights.store_words(words[n : n + _WORDS_AT_ONCE], *at)
        self.exchange.totals.store_floats(softmax.total.values, *place, self.lane, 0)

    def _after_pairs(self, peak: PerRow, pairs: Index) -> PerRow:
        """Return the peak after so many pairs of a round's tiles, given the one before."""

        def after(n: Value, peak: PerRow) -> PerRow:
            one, other = (self._raised(peak, n * 2 + which) for which in range(2))
            return one.map(lambda a, b: a.maximum(b), other)

        return self.machine.loop(pairs, after, peak, rolled=True)

    def _raised(self, peak: PerRow, tile: Index) -> PerRow:
        """Return the peak that the weights of a tile are relative to, given the one before its pair."""
        return PerRow.load(self.machine, self.tops, tile, 0).map(whole_if_raised, peak)

    # What all blocks need.
    def _take_tops(self, place: tuple[Index, ...]) -> list[Value]:
        """Load some of the largest logits of all tiles. Those of tiles without keys are -inf."""
        return self.exchange.tops.load_floats(*place, *self._some_heads)

    def _keep_tops(self, tops: list[Value]) -> None:
        """Store what ``_take_tops`` has loaded, for all lanes of the block."""
        self.tops.store_floats(tops, *self._some_heads)

    @property
    def _some_heads(self) -> tuple[Value, Value]:
        """The tile, and the first of four heads of it, whose largest logits a lane takes."""
        lanes = HEADS // VECTOR
        return self.machine.thread // lanes, self.machine.thread % lanes * VECTOR

    def _load_channels(self, first: Value, some: range) -> list[StoredPart]:
        """Load this block's channels of the keys of some of a round's tiles."""
        (row,) = self.loader.rows
        return [self.loader.load_part(first + n, self._index(n, row), self.machine.rank) for n in some]

    def _store_channels(self, some: range, loaded: list[StoredPart]) -> None:
        """Store what ``_load_channels`` has loaded, where the products read it."""
        for tile, part in zip(some, loaded, strict=True):
            self.loader.store_part(part, self.machine.rank, self.channels.copy(tile))

    def _take_weights(self, place: tuple[Index, ...], tile: Index, where: Condition) -> _Given:
        words: list[Value] = []
        for n in range(_WORDS // _WORDS_AT_ONCE):
            at = *place, tile, n, self.lane, 0
            words += self.exchange.weights.load_words(*at, count=_WORDS_AT_ONCE, where=where)
        total = self.exchange.totals.load_floats(*place, tile, self.lane, 0, count=2, where=where)
        return _Given(LeftOperand(words, "f16"), PerRow(total))

    # The output.
    def _added(self, place: tuple[Index, ...], tiles: Value, sums: _Sums, peak: PerRow) -> _Sums:
        """Add the tiles of a round to a warpgroup's channels, given the peak before them."""
        machine = self.machine

        def some(n: Value, state: tuple[_Sums, _Peaks, list[_Given]]) -> tuple[_Sums, _Peaks, list[_Given]]:
            sums, peaks, ahead = state[0], state[1], list(state[2])
            for which in range(_AHEAD):
                tile, given = n * _AHEAD + which, ahead[which]
                sums, peaks = machine.branch(
                    tile < tiles,
                    lambda state, tile=tile, which=which, given=given: self._with_tile(*state, tile, which % 2, given),
                    (sums, peaks),
                )
                ahead[which] = self._take_weights(place, tile + _AHEAD, tile + _AHEAD < tiles)
            return sums, peaks, ahead

        first = [self._take_weights(place, which, tiles > which) for which in range(_AHEAD)]
        peaks = _Peaks(before=peak, of_pair=peak, own=self._raised(peak, 0))
        sums, *_ = machine.loop((tiles + (_AHEAD - 1)) // _AHEAD, some, (sums, peaks, first), rolled=True)
        return sums

    def _with_tile(self, sums: _Sums, peaks: _Peaks, tile: Value, which: int, given: _Given) -> tuple[_Sums, _Peaks]:
        """Add the weighted keys of a tile, the first or second one of its pair."""
        machine = self.machine
        after = peaks.before.map(lambda a, b: a.maximum(b), peaks.own)

        def rescale(state: tuple[_Sums, _Given]) -> tuple[_Sums, _Given]:
            sums, given = state
            before, relative = (old.map(lambda a, b: machine.exp2(a - b), after) for old in (peaks.before, peaks.own))
            factors = relative.map(lambda factor: machine.to_f16(factor, factor))
            totals = [total.map(lambda a, b: a * b, before) for total in sums.totals]
            operand = given.operand.map(machine.multiply_f16, factors)
            total = given.total.map(lambda a, b: a * b, relative)
            return _Sums(sums.output.scale_rows(before), totals), _Given(operand, total)

        one, other = peaks.before.map(lambda a, b: a != b, peaks.own).values
        sums, given = machine.branch_warp(one | other, rescale, (sums, given))
        keys, totals = self.channels.copy(tile).transposed(self.warpgroup * (_ADDED * 2)), list(sums.totals)
        values = machine.wgmma(sums.output.values, given.operand.words, keys, columns=_ADDED)
        # While the product runs.
        totals[which] = totals[which].map(lambda a, b: a + b, given.total)
        of_pair = peaks.of_pair if which == 0 else after
        following = _Peaks(before=after, of_pair=of_pair, own=self._raised(of_pair, (tile + 1).minimum(_TILES - 1)))
        return _Sums(Fragment(values).wait(given.operand), totals), following
