"""Decode attention on Hopper: two warpgroups multiply, and one or two others load the keys.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

The multiplying warpgroups share pairs of tiles. The first one computes the logits and weights of a pair's first tile,
the second one those of the second. Each hands its weights to the other, because each holds half of the output's
channels, to which both tiles are added:

    first                              second
    logits and weights of tile a       logits and weights of tile b, if it is there as early as a
    give weights of a          ->      take weights of a
    add a to channels 0 .. 255         add a to channels 256 .. 511
                                       logits and weights of tile b, if it comes after a
    take weights of b          <-      give weights of b
    add b to channels 0 .. 255         add b to channels 256 .. 511

So every logit is computed once, and one warpgroup's softmax overlaps with the other's products. Rows that only have to
be copied are there early. Those that are converted come one tile after the other, and so that the first tile's memory
is free for the next pair before the second tile has come, it is added first. The last pair may lack its second tile.

Each warpgroup subtracts a peak from its logits, which it raises only where they exceed it by far. So sums and weights
seldom have different peaks when they are added, and warps skip rescaling them. Peaks are whole numbers, of powers of
two, which makes rescaling exact. After each pair both warpgroups have the same peak: the higher one of its tiles.

Shared memory admits one block per multiprocessor. If there are more queries than that, a block computes several, one
after the other: the hardware copies the next query, and the loading warpgroups load its first keys, while the output of
the last one is stored.

Rows are converted when they are loaded, by two warpgroups (``block.load_tiles``), or were widened before for all
queries of a chunk (``wide``) and are only copied. Each half of such a tile's channels has barriers of its own. The
multiplying warpgroup that adds the half to its output gives it back as soon as that is done, so that the next tile's
half is under way while the other half is still in use.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax

from pallas_kernels.attention.block import (
    CONSUMERS,
    HALF,
    HEADS,
    STAGES,
    WARPS,
    Before,
    Block,
    BlockLayout,
    Memory,
    Softmax,
    finish_output,
    load_tiles,
    raised,
    scale_logits,
    weigh,
)
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs, QueryOrder, with_flat_queries
from pallas_kernels.attention.keys import KEYS, Query, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.attention.query_tile import QueryTile, part_of
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language import target
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import Fragment, LeftOperand, PerColumn, PerRow
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline, Use
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import (
    ATOM_BYTES,
    UNIT,
    Operand,
    Role,
    TensorCores,
    Tile,
)
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Condition, Index, Value, negate, select

_LOADERS = 2  # warpgroups, unless the hardware loads
# Registers per lane for each number of loading warpgroups: of those that multiply, and of those that load.
_REGISTERS = {1: (224, 56), 2: (208, 48)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(BlockLayout):
    """The layout of the Hopper kernel. A block computes 64 heads of a query, over its share of the tiles."""

    blocks: int | None = None  # the most that run at once without clusters; None = one per multiprocessor
    is_wide: bool = False  # whether rows are widened before, and only copied
    is_picked: bool = True  # whether there are picks, so that widened rows do not lie one after the other

    gpu: ClassVar[GPU] = HOPPER

    @property
    def loaders(self) -> int:
        return 1 if self.is_wide and not self.is_picked else _LOADERS

    @property
    def staged_loads(self) -> int:
        return 0 if self.is_wide else 6  # what fits beside the handover

    def check(self, heads: int, tiles: int) -> None:
        BlockLayout.check(self, heads, tiles)
        if self.is_wide and self.cluster > 1:
            raise ValueError(f"{self}: with rows that are widened before, a cluster has 1 block")

    def arguments(self, inputs: AttentionInputs[jax.Array]) -> AttentionInputs[jax.Array]:
        return with_flat_queries(inputs)

    def order(self, inputs: AttentionInputs[jax.Array]) -> QueryOrder[jax.Array] | None:
        queries = math.prod(inputs.positions.shape)
        has_turns = queries > self._at_once(queries, self.groups(inputs.sinks.shape[0]))
        return QueryOrder.of(inputs.needed) if inputs.needed is not None and has_turns else None

    def grid(self, queries: int, groups: int) -> Grid:
        """Return a grid in which blocks without a cluster have several queries, one after the other."""
        return BlockLayout.grid(self, self._at_once(queries, groups), groups)

    def _at_once(self, queries: int, groups: int) -> int:
        """Return how many queries are computed at the same time."""
        blocks = target.multiprocessors() if self.blocks is None else self.blocks
        return queries if self.cluster > 1 else min(queries, max(1, blocks // groups))

    @property
    def shared_bytes(self) -> int:
        return self.common_bytes + _HANDED_BYTES + 8 * (2 * STAGES * _PARTS + 1)

    def body(
        self, machine: TensorCores, inputs: AttentionInputs[Buffer], outputs: Outputs[Buffer], *, form: AttendedFormat
    ) -> None:
        memory = HopperMemory.take(machine, is_wide=self.is_wide, staged_loads=self.staged_loads, loaders=self.loaders)
        init_barriers(memory.pipe.full, memory.pipe.free, memory.query.loaded, memory.handover.given)
        queries, heads = math.prod(inputs.positions.shape), inputs.sinks.shape[0]
        at_once = self._at_once(queries, self.groups(heads))
        turns = Turns(machine=machine, order=inputs.order, queries=queries, at_once=at_once)

        def load_query(number: Value) -> None:
            with machine.when(machine.thread % WARPGROUP < WARP):
                memory.query.load(inputs, number)

        def for_each_query(work: Callable[[Block, LoadNext | None], None]) -> None:
            if queries == at_once:
                query = Query.of(machine, inputs, machine.block(0))
                work(Block.of(machine, memory, query, self.cluster, Before.none(machine)), None)
                return

            def one(number: Value, state: tuple[Before, Value, list[Value]]) -> tuple[Before, Value, list[Value]]:
                before, tiles, known = state
                before, turn = dataclasses.replace(before, queries=number), turns.turn(number, count, known)

                def load_next() -> None:
                    with machine.when(turn.has_following):
                        load_query(turn.following)

                # Loaded while this query is computed, so that the next one need not wait.
                of_next = Query.of(machine, inputs, turn.following).tiles.maximum(1)
                query = Query.of(machine, inputs, turn.query)
                block = Block.of(machine, memory, query, self.cluster, before, tiles)
                work(block, load_next)
                return block.after, of_next, turn.known

            (first, known), count = turns.begin(), turns.count
            tiles = Query.of(machine, inputs, first).tiles.maximum(1)
            machine.loop(count, one, (Before.none(machine), tiles, known))

        def multiply(multiplier: type[Multiplier]) -> None:
            if multiplier is First:
                with machine.when(turns.has_any):
                    load_query(turns.begin()[0])
            for_each_query(lambda block, load_next: multiplier(block, memory, form).run(outputs, load_next))

        def loader(load: Callable[[Block], None], warpgroups: int = 1) -> Role:
            return Role(warpgroups=warpgroups, registers=few, body=lambda: for_each_query(lambda block, _: load(block)))

        many, few = _REGISTERS[self.loaders]
        if not self.is_wide:
            loading = [loader(lambda block: load_tiles(block, form, self.loaders), self.loaders)]
        elif self.is_picked:
            loading = [loader(lambda block, n=n: copy_picked(block, memory, n)) for n in range(STAGES)]
        else:
            loading = [loader(lambda block: copy_runs(block, memory))]
        machine.roles(
            Role(warpgroups=1, registers=many, body=lambda: multiply(First)),
            Role(warpgroups=1, registers=many, body=lambda: multiply(Second)),
            *loading,
        )


# The queries of a block, one after the other.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A query of a block, by its number, and what follows it."""

    query: Value
    following: Value  # the next one; any, if there is none
    has_following: Value
    known: list[Value]  # what the loop over turns carries to the next one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """Every ``at_once``-th query from the block's number on, of all or of those that are needed."""

    machine: TensorCores
    order: QueryOrder[Buffer] | None  # None: all queries, as they are
    queries: int  # of the launch
    at_once: int

    @property
    def count(self) -> Value:
        total = self.queries if self.order is None else self.order.count.load_int(0)
        return (self.machine.block(0) * -1 + (self.at_once - 1) + total) // self.at_once

    @property
    def _has_list(self) -> bool:
        return self.order is not None and self.order.numbers is not None

    @property
    def has_any(self) -> Condition:
        return True if self.order is None else self.count > 0

    def _load(self, turn: Value) -> Value:
        """Return the number of a turn's query. Past the last turn it is that of any query."""
        assert self.order is not None
        assert self.order.numbers is not None
        place = turn * self.at_once + self.machine.block(0)
        return self.order.numbers.load_int(place.minimum(self.queries - 1))

    def begin(self) -> tuple[Value, list[Value]]:
        """Return the first query, and what a loop over turns carries: numbers that must be loaded, of two turns."""
        if not self._has_list:
            return self.machine.block(0), []
        start = self.machine.constant(0, "i32")
        first = self._load(start)
        return first, [first, self._load(start + 1)]

    def turn(self, number: Value, count: Value, known: list[Value]) -> Turn:
        """Return a turn of ``count`` by its number.

        Queries are loaded two turns ahead, so that nothing waits for them.
        """
        if not self._has_list:
            query = number * self.at_once + self.machine.block(0)
            following = query + self.at_once
            last = self.queries - 1
            has_following = following <= last if self.order is None else number + 1 < count
            return Turn(query=query, following=following.minimum(last), has_following=has_following, known=[])
        query, following = known
        after = [following, self._load(number + 2)]
        return Turn(query=query, following=following, has_following=number + 1 < count, known=after)


# Shared memory.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopperMemory(Memory):
    """Shared memory of a block. Tiles come first, because they must be aligned.

    A tile of rows that were widened before is ``_PIECES`` copies of ``keys``, and has barriers for each part of
    its channels.
    """

    is_wide: bool
    query: QueryTile
    handover: Handover

    @classmethod
    def take(cls, machine: TensorCores, *, is_wide: bool, staged_loads: int, loaders: int) -> HopperMemory:
        """Allocate the memory, for a number of loading warpgroups and of loads that each of their lanes stages."""
        pieces = QueryTile.take_pieces(machine)
        if is_wide:
            keys = Tile.take(machine, KEYS, ATOM_BYTES, copies=STAGES * _PIECES)
        else:
            keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES)
        parts = STAGES * (_PARTS if is_wide else 1)
        return cls(
            is_wide=is_wide,
            keys=keys,
            staging=None if is_wide else take_staging(machine, staged_loads, loaders),
            factors=Shared.take(machine, (STAGES, KEYS), "f32"),
            handover=Handover.take(machine),
            pipe=Pipeline(
                full=Barrier.take(machine, WARPS if is_wide else loaders * WARPS, copies=parts),
                free=Barrier.take(machine, WARPS if is_wide else CONSUMERS * WARPS, copies=parts),
            ),
            query=QueryTile(pieces=pieces, loaded=Barrier.take(machine, 1)),
        )

    @property
    def pieces(self) -> int:
        """Number of copies of ``keys`` that make a tile."""
        return HEAD_DIM * 2 // self.keys.row_bytes

    @property
    def parts(self) -> int:
        """Number of parts of a tile's channels that have barriers of their own."""
        return self.pipe.stages // STAGES

    def part_of_half(self, half: int) -> int:
        """Return the part of a tile that has one half of its channels."""
        return half * self.parts // CONSUMERS

    def use(self, stage: int, part: int, number: Value) -> Use:
        """Return the use of a part of a stage with this number."""
        return self.pipe.use_of(stage * self.parts + part, number)

    def k_major(self, stage: int, part: int) -> Operand:
        """Return a part of a tile's channels as K."""
        return part_of(self.keys.copy(stage * self.pieces), self.pieces, part, self.parts)

    def columns(self, stage: int, first: int) -> Operand:
        """Return a tile's channels from ``first`` on as columns, with its keys as K."""
        piece, byte = divmod(first * 2, self.keys.row_bytes)
        found = self.keys.copy(stage * self.pieces + piece).transposed(byte)
        return dataclasses.replace(found, leading=self.keys.size) if self.pieces > 1 else found


# What one multiplying warpgroup gives the other.
_WORDS = KEYS // 4  # words of two f16 weights that a lane holds
_LOADS, _LOAD_WORDS = _WORDS // 4, 4
_HANDED_BYTES = WARPGROUP * 4 * _WORDS + HEADS * 4 + 8 * CONSUMERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """Shared memory for what one warpgroup gives the other, and barriers to wait for it."""

    weights: Shared  # i32 [loads, lanes, 4], words of two f16
    of_heads: Shared  # f32 [HEADS]: the peak that the weights are relative to, or their sum
    given: Barrier  # per warpgroup: it has given

    @classmethod
    def take(cls, machine: TensorCores) -> Handover:
        """Allocate the memory."""
        return cls(
            weights=Shared.take(machine, (_LOADS, WARPGROUP, _LOAD_WORDS), "i32"),
            of_heads=Shared.take(machine, (HEADS,), "f32"),
            given=Barrier.take(machine, WARPS, copies=CONSUMERS),
        )

    def give(self, source: int, of_heads: PerRow, weights: LeftOperand | None = None) -> None:
        """Give as warpgroup ``source``: a number for each head, and weights or the numbers alone."""
        machine = self.given.machine
        lane, words = machine.thread % WARPGROUP, [] if weights is None else weights.words
        machine.barrier("warp")  # one lane of a quad overwrites a number that all four have read
        for n in range(0, len(words), _LOAD_WORDS):
            self.weights.store_words(words[n : n + _LOAD_WORDS], n // _LOAD_WORDS, lane, 0)
        of_heads.store(self.of_heads, 0)
        self.given.copy(source).arrive()

    def wait(self, source: int, count: Index) -> None:
        """Wait until warpgroup ``source`` has given ``count`` + 1 times."""
        self.given.copy(source).wait(count & 1)

    def found_weights(self) -> LeftOperand:
        """Return the weights that were given."""
        lane, loads = self.given.machine.thread % WARPGROUP, range(_LOADS)
        words = [word for n in loads for word in self.weights.load_words(n, lane, 0, count=_LOAD_WORDS)]
        return LeftOperand(words, "f16")

    def found_of_heads(self) -> PerRow:
        """Return the numbers that were given for the heads."""
        return PerRow.load(self.given.machine, self.of_heads, 0)


# Loading rows that were widened before.
_PARTS = 2  # of a tile's channels, with barriers of their own
_PIECES = HEAD_DIM * 2 // ATOM_BYTES  # copies of ``Memory.keys`` that make a tile: 128 bytes of each row
_TEAM = ATOM_BYTES // UNIT  # lanes that copy a row
_OF_PART = _PIECES // _PARTS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """What a lane knows about its rows of the next two tiles when it is about to copy the first of them."""

    numbers: list[Value]  # of the first tile
    factors: list[Value]  # of the first tile
    later_numbers: list[Value]  # of the second tile


def _oldest(query: Query) -> Value:
    """Return the number of the row of a query's first position. Positions of queries are not below ``start``."""
    return query.first_position - query.start + query.inputs.pos.shape[2]


class _Copier:
    """A warpgroup that copies tiles. Each lane takes part in four rows of a tile."""

    def __init__(self, query: Query):
        self.query, self.machine = query, query.machine
        assert query.inputs.wide is not None
        self.wide = query.inputs.wide
        lane = self.machine.thread % WARPGROUP
        self._unit, row = lane % _TEAM, lane // _TEAM
        self._rows = [row + first for first in range(0, KEYS, WARPGROUP // _TEAM)]  # of a tile

    def find(self, tile: Value) -> list[Value]:
        """Return the number of each key's row among those of the request, -1 = none."""
        query, picks, of_window = self.query, self.query.inputs.picks, self.wide.of_window
        assert picks is not None
        found = []
        for row in self._rows:
            place = tile * KEYS + row
            entry = place - query.window_tiles * KEYS
            inside = (entry >= 0) & (entry < picks.shape[2])
            address = picks.address_of((query.batch, query.token, entry))
            (entry,) = self.machine.load(address, 4, inside, constant=True, otherwise=-1)
            there = (entry >= 0) & (entry < query.visible) & (entry < self.wide.of_request - of_window)
            entry = select(there, entry + of_window, -1)
            known = place + _oldest(query)
            there = (place < query.window_keys) & (known >= 0) & (known < of_window)
            found.append(select(tile < query.window_tiles, select(there, known, -1), entry))
        return found

    def load_factors(self, numbers: list[Value]) -> list[Value]:
        """Load the factor of each key, which is negative if there is none."""
        factors, batch = self.wide.factors, self.query.batch
        return [factors.load_floats(batch, number, count=1, where=number >= 0, otherwise=-1.0)[0] for number in numbers]

    def store_factors(self, factors: list[Value], to: Shared) -> None:
        """Store the factors of a tile's keys to f32 [KEYS]."""
        for row, factor in zip(self._rows, factors, strict=True):
            to.store_floats([factor], row, where=self._unit == 0)

    def copy(self, numbers: list[Value], keys: Tile, part: int) -> None:
        """Start to copy a part of the channels of each key. Rows of a tile without a key become zero."""
        for number, row in zip(numbers, self._rows, strict=True):
            to, in_all = keys.unit(row, self._unit), self.query.batch * self.wide.of_request + number
            source = self.wide.rows.address_of((in_all, self._unit * (UNIT // 2)))
            for piece in range(part * _OF_PART, (part + 1) * _OF_PART):
                self.machine.copy_async(to + piece * keys.size, source + piece * ATOM_BYTES, number >= 0)


def copy_runs(block: Block, memory: HopperMemory) -> None:
    """Let the hardware copy the tiles of queries without picks, as one warpgroup.

    A tile's rows lie one after the other. Those that are no keys of the query have negative factors.
    """
    machine, query = block.machine, block.query
    wide = query.inputs.wide
    assert wide is not None
    lane = machine.thread % WARPGROUP
    row = lane // (WARPGROUP // KEYS)

    def step(i: Value, _: None) -> None:
        stage = i % STAGES
        keys, factors = TypedTile(tile=memory.keys.copy(stage * _PIECES), dtype="f16"), memory.factors[stage]
        in_window, place = i < query.window_tiles, i * KEYS
        entry = place - query.window_tiles * KEYS
        first = select(in_window, place + _oldest(query), entry + wide.of_window)
        count = select(in_window, query.window_keys - place, query.visible - entry)  # of keys from the first on
        end = select(in_window, machine.constant(wide.of_window, "i32"), wide.of_request)
        there = (row < count) & (first + row >= 0) & (first + row < end)
        (found,) = wide.factors.load_floats(query.batch, first + row, count=1, where=there, otherwise=-1.0)
        number, fills = block.uses(stage) + i // STAGES, lane < WARP
        for part in range(_PARTS):
            use = memory.pipe.use_of(stage * _PARTS + part, number)
            use.acquire()
            if part == _PARTS - 1:  # both warpgroups have read the factors of the tile before
                factors.store_floats([found], row, where=lane % (WARPGROUP // KEYS) == 0)
            with machine.when(fills):
                row_of_all = query.batch * wide.of_request + first.maximum(0)
                pieces = range(part * _OF_PART, (part + 1) * _OF_PART)
                use.commit(*(keys[piece].copy_from(wide.rows, row_of_all, piece * keys.columns) for piece in pieces))
            use.commit(where=negate(fills))

    machine.loop(block.tiles, step)


def copy_picked(block: Block, memory: HopperMemory, stage: int) -> None:
    """Copy those of a query's tiles that have the same stage, as one warpgroup."""
    machine, copier, factors = block.machine, _Copier(block.query), memory.factors[stage]
    keys, used = memory.keys.copy(stage * _PIECES), block.before.seconds if stage else block.before.firsts

    def find(i: Index) -> list[Value]:
        return copier.find(machine.constant(stage, "i32") + i * STAGES)

    def step(i: Value, ahead: _Ahead) -> _Ahead:
        numbers = [
            select(factor > 0.0, number, -1) for number, factor in zip(ahead.numbers, ahead.factors, strict=True)
        ]
        for part in range(_PARTS):
            memory.use(stage, part, used + i).acquire()
            if part == _PARTS - 1:  # both warpgroups have read the factors of the tile before
                copier.store_factors(ahead.factors, factors)
            copier.copy(numbers, keys, part)
            machine.close_copies()
        of_later, later_numbers = copier.load_factors(ahead.later_numbers), find(i + 2)
        for part in range(_PARTS):
            machine.wait_copies(pending=_PARTS - 1 - part)
            machine.fence_shared()
            memory.use(stage, part, used + i).commit()
        return _Ahead(numbers=ahead.later_numbers, factors=of_later, later_numbers=later_numbers)

    first, second = find(0), find(1)
    ahead = _Ahead(numbers=first, factors=copier.load_factors(first), later_numbers=second)
    machine.loop((block.tiles + (STAGES - 1 - stage)) // STAGES, step, ahead)


# Multiplying.
FIRST, SECOND = 0, 1  # the multiplying warpgroups; also the stages of a pair's tiles, and the halves of the channels
# Channels of one product. In a launch of four warpgroups, which begins with 128 registers per lane, ptxas refuses 256.
_COLUMNS = 128

LoadNext = Callable[[], None]  # starts to load a block's next query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What a warpgroup holds between pairs."""

    softmax: Softmax  # the total is of the sink and of this warpgroup's own tiles
    output: Fragment  # [HEADS, HALF] sums of all tiles so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """A warpgroup's weights of a tile, times the factors of its keys."""

    softmax: Softmax  # the total is of this tile; 0 if the other warpgroup counts it
    operand: LeftOperand  # f16 [HEADS, KEYS]


class Multiplier(abc.ABC):
    """What both multiplying warpgroups do. Each has half of the channels, and computes the logits of its own tiles."""

    own: ClassVar[int]

    def __init__(self, block: Block, memory: HopperMemory, form: AttendedFormat):
        self.block, self.memory, self.form, self.machine = block, memory, form, block.machine
        self.before = block.before
        self.given_before = block.before.firsts + block.before.queries  # by each warpgroup
        self.no_total = PerRow([self.machine.constant(0.0, "f32")] * 2)

    def run(self, outputs: Outputs[Buffer], load_next: LoadNext | None) -> None:
        """Compute and store the output of the block's query."""
        machine, tiles = self.machine, self.block.tiles
        self.memory.query.loaded.wait(self.before.queries & 1)
        softmax = Softmax.of_sinks(self.block)
        if self.own != FIRST:  # sinks count once
            softmax = Softmax(softmax.peak, self.no_total)
        pairs = (tiles + 1) // 2
        sums = machine.loop(pairs, self.pair, _Sums(softmax, Fragment.zeros(machine, HALF)))
        if load_next is not None and self.own == FIRST:
            # Both warpgroups have computed their last logits: the second one's weights came after them.
            load_next()
        softmax = sums.softmax.over_quads()
        softmax = Softmax(softmax.peak, self.total_of_both(softmax.total, pairs))
        finish_output(self.block, outputs, sums.output, softmax, machine.constant(self.own, "i32"))

    @abc.abstractmethod
    def pair(self, i: Value, sums: _Sums) -> _Sums:
        """Process the i-th pair of tiles."""

    @abc.abstractmethod
    def total_of_both(self, own: PerRow, pairs: Value) -> PerRow:
        """Return the sums of the weights of all tiles, given those of the own tiles, after all pairs."""

    def has_second(self, i: Value) -> Value:
        """Return whether the i-th pair has a second tile."""
        return self.block.tiles - i * 2 - 1 > 0

    def give(self, weights: _Weights) -> None:
        """Give weights to the other warpgroup."""
        self.memory.handover.give(self.own, weights.softmax.peak, weights.operand)

    def found(self) -> _Weights:
        """Return the weights that the other warpgroup has given."""
        handed = self.memory.handover
        return _Weights(Softmax(handed.found_of_heads(), self.no_total), handed.found_weights())

    def weighed(self, i: Value, peak: PerRow) -> _Weights:
        """Compute the weights of the warpgroup's own tile of a pair, relative to a peak or a higher one."""
        logits = self.logits(i)
        weights, softmax = weigh(self.machine, logits, raised(self.machine, peak, logits))
        if not self.form.scale_is_power_of_two:
            # Loaded again, because there are no registers to keep them in.
            weights = weights.map(lambda weight, factor: weight * factor, self.factors())
        return _Weights(softmax, weights.operand("f16"))

    def logits(self, i: Value) -> Fragment:
        """Compute the logits of the warpgroup's own tile of a pair, [HEADS, KEYS], in powers of two."""
        machine, values = self.machine, None
        for part in range(self.memory.parts):
            self.use(self.own, i, part).wait()
            query = self.memory.query.k_major(part, self.memory.parts)
            keys = self.memory.k_major(self.own, part)
            values = machine.wgmma(values, query, keys, columns=KEYS)
        assert values is not None
        factors = self.factors()  # while the product runs
        return scale_logits(machine, Fragment(values).wait(), factors)

    def factors(self) -> PerColumn:
        """Return the factors of the keys of the warpgroup's own tile."""
        return PerColumn.load(self.machine, KEYS, self.memory.factors, self.own, 0)

    def use(self, stage: int, i: Value, part: int) -> Use:
        """Return the use of a part of a stage by the tile of a pair."""
        used = self.before.firsts if stage == FIRST else self.before.seconds
        return self.memory.use(stage, part, used + i)

    def own_half(self, stage: int, i: Value) -> Use:
        """Return the use of the part of a stage that has this warpgroup's half of the channels."""
        return self.use(stage, i, self.memory.part_of_half(self.own))

    def wait_given(self, source: int, count: Value) -> None:
        """Wait until a warpgroup has given ``count`` + 1 times for this query."""
        self.memory.handover.wait(source, self.given_before + count)

    def added(self, i: Value, sums: _Sums, weights: _Weights, stage: int) -> _Sums:
        """Add the weighted keys of a tile of a pair, and give the warpgroup's half of its memory back."""
        sums, weights = self.with_one_peak(sums, weights)
        machine, parts = self.machine, []
        for n, part in enumerate(sums.output.parts(_COLUMNS)):
            keys = self.memory.columns(stage, self.own * HALF + n * _COLUMNS)
            parts.append(Fragment(machine.wgmma(part.values, weights.operand.words, keys, columns=_COLUMNS)))
        output = Fragment.joined(parts).wait(weights.operand)
        self.own_half(stage, i).release()
        total = sums.softmax.total.map(lambda a, b: a + b, weights.softmax.total)
        return _Sums(Softmax(sums.softmax.peak, total), output)

    def with_one_peak(self, sums: _Sums, weights: _Weights) -> tuple[_Sums, _Weights]:
        """Return sums and weights relative to the higher one of their peaks."""
        machine, each = self.machine, (sums.softmax.peak, weights.softmax.peak)
        peak = each[0].map(lambda a, b: a.maximum(b), each[1])

        def rescale(state: tuple[_Sums, _Weights]) -> tuple[_Sums, _Weights]:
            sums, weights = state
            before, given = (old.map(lambda a, b: machine.exp2(a - b), peak) for old in each)
            output = sums.output.scale_rows(before)
            operand = weights.operand.map(
                machine.multiply_f16, given.map(lambda factor: machine.to_f16(factor, factor))
            )
            return _Sums(sums.softmax.times(before), output), _Weights(weights.softmax.times(given), operand)

        one, other = each[0].map(lambda a, b: a != b, each[1]).values
        sums, weights = machine.branch_warp(one | other, rescale, (sums, weights))
        return dataclasses.replace(sums, softmax=Softmax(peak, sums.softmax.total)), weights


class First(Multiplier):
    """The warpgroup with the first tile of each pair."""

    own = FIRST

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        own = self.weighed(i, sums.softmax.peak)
        self.give(own)
        self.machine.keep_order()
        sums = self.added(i, sums, own, FIRST)
        self.wait_given(SECOND, i)

        def add_second(sums: _Sums) -> _Sums:
            given = self.found()
            self.own_half(SECOND, i).wait()
            return self.added(i, sums, given, SECOND)

        return self.machine.branch(self.has_second(i), add_second, sums)

    def total_of_both(self, own: PerRow, pairs: Value) -> PerRow:
        handed = self.memory.handover
        handed.give(FIRST, own)
        self.wait_given(SECOND, pairs)
        return own.map(lambda a, b: a + b, handed.found_of_heads())


class Second(Multiplier):
    """The warpgroup with the second tile of each pair."""

    own = SECOND

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        peak = sums.softmax.peak
        own = self.weighed_if_there(i, peak) if self.memory.is_wide else None
        self.wait_given(FIRST, i)
        given = self.found()
        if own is not None:
            self.give(own)
        self.own_half(FIRST, i).wait()
        sums = self.added(i, sums, given, FIRST)
        if own is None:
            own = self.weighed_if_there(i, peak)
            self.give(own)
        return self.machine.branch(self.has_second(i), lambda sums: self.added(i, sums, own, SECOND), sums)

    def weighed_if_there(self, i: Value, peak: PerRow) -> _Weights:
        """Return the weights of the pair's second tile. Without one they are 0, and nobody uses them.

        They are relative to the peak from before the pair, or a higher one, whether the first tile is added by now or
        not. So their bits do not depend on which tile was there first.
        """
        machine = self.machine
        nothing = LeftOperand([machine.constant(0, "i32")] * (KEYS // 4), "f16")
        none = _Weights(Softmax(peak, self.no_total), nothing)
        return machine.branch(self.has_second(i), lambda before: self.weighed(i, before.softmax.peak), none)

    def total_of_both(self, own: PerRow, pairs: Value) -> PerRow:
        handed = self.memory.handover
        self.wait_given(FIRST, pairs)
        other = handed.found_of_heads()
        handed.give(SECOND, own)
        return own.map(lambda a, b: a + b, other)
