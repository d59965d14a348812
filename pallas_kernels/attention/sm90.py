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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.block import (
    CONSUMERS,
    HALF,
    HEADS,
    QUAD,
    STAGES,
    WARPS,
    Before,
    Block,
    BlockLayout,
    Memory,
    Softmax,
    any_of_warp,
    column_of,
    finish_output,
    load_of_keys,
    load_tiles,
    raised,
    row_of,
    scale_logits,
    scale_without_factors,
    weigh,
)
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs, WideRows
from pallas_kernels.attention.keys import KEYS, Query, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language import target
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import (
    ATOM_BYTES,
    UNIT,
    Operand,
    Role,
    TensorCores,
    Tile,
    TileCopy,
    product_row,
)
from pallas_kernels.language.values import Condition, Index, Value, negate, select
from pallas_kernels.needed import needed_first, past_last_needed

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

    def arguments(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return queries as f16 [B * T * H, 512], because the hardware copies parts of arrays with two axes."""
        return dataclasses.replace(inputs, q=inputs.q.astype(jnp.float16).reshape(-1, HEAD_DIM))

    def order(self, inputs: AttentionInputs) -> QueryOrder | None:
        queries = math.prod(inputs.positions.shape)
        has_turns = queries > self._at_once(queries, inputs.sinks.shape[0] // HEADS)
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

    def body(self, machine: TensorCores, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        memory = HopperMemory.take(machine, is_wide=self.is_wide, staged_loads=self.staged_loads, loaders=self.loaders)
        init_barriers(memory.full, memory.free, memory.loaded_q, memory.handover.given)
        queries, heads = math.prod(inputs.positions.shape), inputs.sinks.shape[0]
        at_once = self._at_once(queries, heads // HEADS)
        turns = Turns(machine=machine, order=inputs.order, queries=queries, at_once=at_once)

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
                        memory.load_query(inputs, turn.following)

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
                    memory.load_query(inputs, turns.begin()[0])
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
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryOrder:
    """The queries of a launch, those that are needed first, or their buffers."""

    count: Any  # int32 [1], of those that are needed
    numbers: Any  # int32 [B T]; None: as they are

    @classmethod
    def of(cls, needed: jax.Array) -> QueryOrder:
        """The order for bool [B, T]; of one request, without a list."""
        if needed.shape[0] == 1:
            return cls(count=past_last_needed(needed), numbers=None)
        count, numbers = needed_first(needed.reshape(-1))
        return cls(count=count.reshape(1), numbers=numbers)


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
    order: QueryOrder | None  # of buffers; None: all queries, as they are
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
_Q_BYTES = 128  # of a row of the query that one copy takes
_Q_PARTS = HEAD_DIM * 2 // _Q_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopperMemory(Memory):
    """Shared memory of a block. Tiles come first, because they must be aligned.

    A tile of rows that were widened before is ``_PIECES`` copies of ``keys``, and has barriers for each part of
    its channels.
    """

    is_wide: bool
    q: Tile  # [HEADS, 64 channels]; copies: the parts of a query's channels
    loaded_q: Barrier
    handover: Handover

    @classmethod
    def take(cls, machine: TensorCores, *, is_wide: bool, staged_loads: int, loaders: int) -> HopperMemory:
        """Allocate the memory, for a number of loading warpgroups and of loads that each of their lanes stages."""
        q = Tile.take(machine, HEADS, _Q_BYTES, copies=_Q_PARTS)
        if is_wide:
            keys = Tile.take(machine, KEYS, ATOM_BYTES, copies=STAGES * _PIECES)
        else:
            keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES)
        parts = STAGES * (_PARTS if is_wide else 1)
        return cls(
            is_wide=is_wide,
            q=q,
            keys=keys,
            staging=None if is_wide else take_staging(machine, staged_loads, loaders),
            of_keys=Shared.take(machine, (STAGES, KEYS), "f32"),
            handover=Handover.take(machine),
            full=Barrier.take(machine, WARPS if is_wide else loaders * WARPS, copies=parts),
            free=Barrier.take(machine, WARPS if is_wide else CONSUMERS * WARPS, copies=parts),
            loaded_q=Barrier.take(machine, 1),
        )

    @property
    def pieces(self) -> int:
        """Number of copies of ``keys`` that make a tile."""
        return HEAD_DIM * 2 // self.keys.row_bytes

    @property
    def parts(self) -> int:
        """Number of parts of a tile's channels that have barriers of their own."""
        return self.full.copies // STAGES

    def parts_of(self, half: int) -> range:
        """Return the parts of a tile that have one half of its channels."""
        count = max(1, self.parts // CONSUMERS)
        first = half * self.parts // CONSUMERS
        return range(first, first + count)

    def k_major(self, stage: int, part: int) -> Operand:
        """Return a part of a tile's channels as K."""
        return self._part_of(self.keys.copy(stage * self.pieces), self.pieces, part)

    def columns(self, stage: int, first: int) -> Operand:
        """Return a tile's channels from ``first`` on as columns, with its keys as K."""
        piece, byte = divmod(first * 2, self.keys.row_bytes)
        found = self.keys.copy(stage * self.pieces + piece).transposed(byte)
        return dataclasses.replace(found, leading=self.keys.size) if self.pieces > 1 else found

    def load_query(self, inputs: AttentionInputs, number: Value) -> None:
        """Start to load the heads of a query, as a warpgroup together."""
        machine, heads = self.loaded_q.machine, inputs.sinks.shape[0]
        with machine.when(machine.thread % WARPGROUP < WARP):
            row = number * heads + machine.block(1) * HEADS
            self.loaded_q.fill(
                *(
                    TileCopy(
                        source=inputs.q,
                        row=row,
                        column=part * (_Q_BYTES // 2),
                        to=self.q.copy(part).offset,
                        rows=HEADS,
                        row_bytes=_Q_BYTES,
                    )
                    for part in range(_Q_PARTS)
                )
            )

    def query(self, part: int) -> Operand:
        """Return the heads of the query, [HEADS, channels], with the channels of a part of a tile."""
        return self._part_of(self.q, _Q_PARTS, part)

    def _part_of(self, piece: Tile, pieces: int, part: int) -> Operand:
        """Return a part of the channels as K, where adjacent pieces have some channels each."""
        first, count = piece.k_major(), pieces // self.parts
        each = range(part * count, (part + 1) * count)
        return dataclasses.replace(first, steps=tuple(n * piece.size + step for n in each for step in first.steps))


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

    def give(self, source: int, of_rows: list[Value], weights: list[Value]) -> None:
        """Give as warpgroup ``source``.

        Args:
          source: the warpgroup.
          of_rows: a number for each of a lane's two rows, the same in the four lanes of a quad.
          weights: words of two f16. Without them only the numbers are given.
        """
        machine = self.given.machine
        lane, row = machine.thread % WARPGROUP, product_row(machine)
        machine.barrier("warp")  # one lane of a quad overwrites a number that all four have read
        for n in range(0, len(weights), _LOAD_WORDS):
            self.weights.store_words(weights[n : n + _LOAD_WORDS], n // _LOAD_WORDS, lane, 0)
        for i, value in enumerate(of_rows):
            self.of_heads.store_floats([value], row + 8 * i, where=lane % QUAD == 0)
        self.given.copy(source).arrive()

    def wait(self, source: int, count: Index) -> None:
        """Wait until warpgroup ``source`` has given ``count`` + 1 times."""
        self.given.copy(source).wait(count & 1)

    def found_weights(self) -> list[Value]:
        """Return the weights that were given."""
        lane = self.given.machine.thread % WARPGROUP
        return [word for n in range(_LOADS) for word in self.weights.load_words(n, lane, 0, count=_LOAD_WORDS)]

    def found_of_rows(self) -> list[Value]:
        """Return the numbers that were given for the lane's two rows."""
        row = product_row(self.given.machine)
        return [self.of_heads.load_floats(row + 8 * i, count=1)[0] for i in range(2)]


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
    biases: list[Value]  # of the first tile
    later_numbers: list[Value]  # of the second tile


def _oldest(query: Query) -> Value:
    """Return the number of the row of a query's first position. Positions of queries are not below ``start``."""
    return query.first_position - query.start + query.inputs.pos.shape[2]


class _Copier:
    """A warpgroup that copies tiles. Each lane takes part in four rows of a tile."""

    def __init__(self, query: Query):
        self.query, self.machine = query, query.machine
        self.wide: WideRows = query.inputs.wide
        lane = self.machine.thread % WARPGROUP
        self._unit, row = lane % _TEAM, lane // _TEAM
        self._rows = [row + first for first in range(0, KEYS, WARPGROUP // _TEAM)]  # of a tile

    def find(self, tile: Value) -> list[Value]:
        """Return the number of each key's row among those of the request, -1 = none."""
        query, inputs, of_window = self.query, self.query.inputs, self.wide.of_window
        found = []
        for row in self._rows:
            place = tile * KEYS + row
            entry = place - query.window_tiles * KEYS
            inside = (entry >= 0) & (entry < inputs.picks.shape[2])
            address = inputs.picks.address_of((query.batch, query.token, entry))
            (entry,) = self.machine.load(address, 4, inside, constant=True, otherwise=-1)
            there = (entry >= 0) & (entry < query.visible) & (entry < self.wide.of_request - of_window)
            entry = select(there, entry + of_window, -1)
            known = place + _oldest(query)
            there = (place < query.window_keys) & (known >= 0) & (known < of_window)
            found.append(select(tile < query.window_tiles, select(there, known, -1), entry))
        return found

    def load_biases(self, numbers: list[Value]) -> list[Value]:
        """Load what is added to the logits of each key."""
        bias, batch = self.wide.bias, self.query.batch
        return [
            bias.load_floats(batch, number, count=1, where=number >= 0, otherwise=-math.inf)[0] for number in numbers
        ]

    def store_biases(self, biases: list[Value], to: Shared) -> None:
        """Store what is added to the logits of a tile's keys to f32 [KEYS]."""
        for row, bias in zip(self._rows, biases, strict=True):
            to.store_floats([bias], row, where=self._unit == 0)

    def copy(self, numbers: list[Value], keys: Tile, part: int) -> None:
        """Start to copy a part of the channels of each key. Rows of a tile without a key become zero."""
        for number, row in zip(numbers, self._rows, strict=True):
            to, in_all = keys.unit(row, self._unit), self.query.batch * self.wide.of_request + number
            source = self.wide.rows.address_of((in_all, self._unit * (UNIT // 2)))
            for piece in range(part * _OF_PART, (part + 1) * _OF_PART):
                self.machine.copy_async(to + piece * keys.size, source + piece * ATOM_BYTES, number >= 0)


def copy_runs(block: Block, memory: Memory) -> None:
    """Let the hardware copy the tiles of queries without picks, as one warpgroup.

    A tile's rows lie one after the other. Those that are no keys of the query have biases of -inf.
    """
    machine, query = block.machine, block.query
    wide: WideRows = query.inputs.wide
    lane = machine.thread % WARPGROUP
    row = lane // (WARPGROUP // KEYS)

    def step(i: Value, carry: Value) -> Value:
        stage = i % STAGES
        keys, bias = memory.keys.copy(stage * _PIECES), memory.of_keys[stage]
        in_window, place = i < query.window_tiles, i * KEYS
        entry = place - query.window_tiles * KEYS
        first = select(in_window, place + _oldest(query), entry + wide.of_window)
        count = select(in_window, query.window_keys - place, query.visible - entry)  # of keys from the first on
        end = select(in_window, machine.constant(wide.of_window, "i32"), wide.of_request)
        there = (row < count) & (first + row >= 0) & (first + row < end)
        (found,) = wide.bias.load_floats(query.batch, first + row, count=1, where=there, otherwise=-math.inf)
        parity, fills = (block.uses(stage) + i // STAGES & 1) ^ 1, lane < WARP
        for part in range(_PARTS):
            full = memory.full.copy(stage * _PARTS + part)
            memory.free.copy(stage * _PARTS + part).wait(parity)
            if part == _PARTS - 1:  # both warpgroups have read the biases of the tile before
                bias.store_floats([found], row, where=lane % (WARPGROUP // KEYS) == 0)
            with machine.when(fills):
                full.fill(
                    *(
                        TileCopy(
                            source=wide.rows,
                            row=query.batch * wide.of_request + first.maximum(0),
                            column=piece * (ATOM_BYTES // 2),
                            to=keys.copy(piece).offset,
                            rows=KEYS,
                            row_bytes=ATOM_BYTES,
                        )
                        for piece in range(part * _OF_PART, (part + 1) * _OF_PART)
                    )
                )
            full.arrive(negate(fills))
        return carry

    machine.loop(block.tiles, step, machine.constant(0, "i32"))


def copy_picked(block: Block, memory: Memory, stage: int) -> None:
    """Copy those of a query's tiles that have the same stage, as one warpgroup."""
    machine, copier, bias = block.machine, _Copier(block.query), memory.of_keys[stage]
    keys, used = memory.keys.copy(stage * _PIECES), block.before.seconds if stage else block.before.firsts

    def find(i: Index) -> list[Value]:
        return copier.find(machine.constant(stage, "i32") + i * STAGES)

    def step(i: Value, ahead: _Ahead) -> _Ahead:
        numbers = [select(bias == 0.0, number, -1) for number, bias in zip(ahead.numbers, ahead.biases, strict=True)]
        for part in range(_PARTS):
            memory.free.copy(stage * _PARTS + part).wait((used + i & 1) ^ 1)
            if part == _PARTS - 1:  # both warpgroups have read the biases of the tile before
                copier.store_biases(ahead.biases, bias)
            copier.copy(numbers, keys, part)
            machine.close_copies()
        biases, later_numbers = copier.load_biases(ahead.later_numbers), find(i + 2)
        for part in range(_PARTS):
            machine.wait_copies(pending=_PARTS - 1 - part)
            machine.fence_shared()
            memory.full.copy(stage * _PARTS + part).arrive()
        return _Ahead(numbers=ahead.later_numbers, biases=biases, later_numbers=later_numbers)

    first, second = find(0), find(1)
    ahead = _Ahead(numbers=first, biases=copier.load_biases(first), later_numbers=second)
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
    output: list[Value]  # [HEADS, HALF] sums of all tiles so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """A warpgroup's weights of a tile, times the factors of its keys."""

    softmax: Softmax  # the total is of this tile; 0 if the other warpgroup counts it
    words: list[Value]  # pairs of f16: the left operand of a product


class Multiplier(abc.ABC):
    """What both multiplying warpgroups do. Each has half of the channels, and computes the logits of its own tiles."""

    own: ClassVar[int]

    def __init__(self, block: Block, memory: HopperMemory, form: AttendedFormat):
        self.block, self.memory, self.form, self.machine = block, memory, form, block.machine
        self.before = block.before
        self.given_before = block.before.firsts + block.before.queries  # by each warpgroup

    def run(self, outputs: Outputs, load_next: LoadNext | None) -> None:
        """Compute and store the output of the block's query."""
        machine, tiles = self.machine, self.block.tiles
        self.memory.loaded_q.wait(self.before.queries & 1)
        softmax = Softmax.of_sinks(self.block)
        if self.own != FIRST:  # sinks count once
            softmax = Softmax(softmax.peak, [machine.constant(0.0, "f32")] * 2)
        output = [machine.constant(0.0, "f32")] * (HALF // 2)
        pairs = (tiles + 1) // 2
        sums = machine.loop(pairs, self.pair, _Sums(softmax, output))
        if load_next is not None and self.own == FIRST:
            # Both warpgroups have computed their last logits: the second one's weights came after them.
            load_next()
        softmax = sums.softmax.over_quads(machine)
        softmax = Softmax(softmax.peak, self.total_of_both(softmax.total, pairs))
        half = machine.constant(self.own, "i32")
        finish_output(self.block, outputs, sums.output, softmax, half)

    @abc.abstractmethod
    def pair(self, i: Value, sums: _Sums) -> _Sums:
        """Process the i-th pair of tiles."""

    @abc.abstractmethod
    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        """Return the sums of the weights of all tiles, given those of the own tiles, after all pairs."""

    def seconds(self, i: Value) -> Value:
        """Return 1 if the i-th pair has a second tile, else 0."""
        return (self.block.tiles - i * 2 - 1).minimum(1)

    def give(self, weights: _Weights) -> None:
        """Give weights to the other warpgroup."""
        self.memory.handover.give(self.own, weights.softmax.peak, weights.words)

    def found(self) -> _Weights:
        """Return the weights that the other warpgroup has given."""
        handed, none = self.memory.handover, [self.machine.constant(0.0, "f32")] * 2
        return _Weights(Softmax(handed.found_of_rows(), none), handed.found_weights())

    def weighed(self, i: Value, peak: list[Value]) -> _Weights:
        """Compute the weights of the warpgroup's own tile of a pair, relative to a peak or a higher one."""
        machine = self.machine
        logits, of_keys = self.logits(i)
        weights, softmax = weigh(machine, logits, raised(machine, peak, logits))
        if not (self.memory.is_wide or self.form.scale_is_power_of_two):
            weights = [weight * of_keys[column_of(n)] for n, weight in enumerate(weights)]
        return _Weights(softmax, [machine.to_f16(*weights[n : n + 2]) for n in range(0, len(weights), 2)])

    def logits(self, i: Value) -> tuple[list[Value], list[Value]]:
        """Compute the logits of the warpgroup's own tile of a pair, [HEADS, KEYS], in powers of two.

        Also returns the factors of a lane's columns; of widened rows, which have none, the biases.
        """
        sums = None
        for part in range(self.memory.parts):
            self.wait_full(self.own, i, part)
            query, keys = self.memory.query(part), self.memory.k_major(self.own, part)
            sums = self.machine.wgmma(sums, query, keys, columns=KEYS)
        assert sums is not None
        of_keys = load_of_keys(self.machine, self.memory.of_keys[self.own])  # while the product runs
        scale = scale_without_factors if self.memory.is_wide else scale_logits
        return scale(self.machine, self.machine.wgmma_wait(sums), of_keys), of_keys

    def wait_full(self, stage: int, i: Value, part: int) -> None:
        """Wait for a part of a tile of a pair."""
        used = self.before.firsts if stage == FIRST else self.before.seconds
        self.memory.full.copy(stage * self.memory.parts + part).wait(used + i & 1)

    def wait_half(self, stage: int, i: Value) -> None:
        """Wait for the warpgroup's half of a tile of a pair."""
        for part in self.memory.parts_of(self.own):
            self.wait_full(stage, i, part)

    def wait_given(self, source: int, count: Value) -> None:
        """Wait until a warpgroup has given ``count`` + 1 times for this query."""
        self.memory.handover.wait(source, self.given_before + count)

    def added(self, sums: _Sums, weights: _Weights, stage: int) -> _Sums:
        """Add the weighted keys of a tile, and give the warpgroup's half of its memory back."""
        sums, weights = self.with_one_peak(sums, weights)
        output = self.finish_adding(self.start_adding(sums.output, weights.words, stage), weights.words, stage)
        totals = zip(sums.softmax.total, weights.softmax.total, strict=True)
        return _Sums(Softmax(sums.softmax.peak, [a + b for a, b in totals]), output)

    def with_one_peak(self, sums: _Sums, weights: _Weights) -> tuple[_Sums, _Weights]:
        """Return sums and weights relative to the higher one of their peaks."""
        machine, each = self.machine, (sums.softmax.peak, weights.softmax.peak)
        peak = [a.maximum(b) for a, b in zip(*each, strict=True)]

        def rescale(_: Value, state: tuple[_Sums, _Weights]) -> tuple[_Sums, _Weights]:
            sums, weights = state
            before, given = ([machine.exp2(a - b) for a, b in zip(old, peak, strict=True)] for old in each)
            output = [value * before[row_of(n)] for n, value in enumerate(sums.output)]
            pairs = [machine.to_f16(factor, factor) for factor in given]
            words = [machine.multiply_f16(word, pairs[n % 2]) for n, word in enumerate(weights.words)]
            return _Sums(sums.softmax.times(before), output), _Weights(weights.softmax.times(given), words)

        differs = (each[0][0] != each[1][0]) | (each[0][1] != each[1][1])
        sums, weights = machine.loop(any_of_warp(machine, differs), rescale, (sums, weights))
        return dataclasses.replace(sums, softmax=Softmax(peak, sums.softmax.total)), weights

    def start_adding(self, output: list[Value], words: list[Value], stage: int) -> list[Value]:
        """Start to add the weighted keys of a tile."""
        sums = []
        for n in range(0, HALF, _COLUMNS):
            part, keys = output[n // 2 : (n + _COLUMNS) // 2], self.channels(stage, n)
            sums += self.machine.wgmma(part, words, keys, columns=_COLUMNS)
        return sums

    def finish_adding(self, output: list[Value], words: list[Value], stage: int) -> list[Value]:
        """Wait for the sums, and give the tile's memory back."""
        parts, sums = self.memory.parts_of(self.own), []
        each = len(output) // len(parts)
        for n, part in enumerate(parts):
            sums += self.machine.wgmma_wait(output[n * each : (n + 1) * each], pending=len(parts) - 1 - n)
            if part == parts[-1]:
                self.machine.hold(words)  # no register of the operand is used again before
            self.memory.free.copy(stage * self.memory.parts + part).arrive()
        return sums

    def channels(self, stage: int, first: int) -> Operand:
        """Return a tile's keys with the channels from ``first`` on of this warpgroup's half."""
        return self.memory.columns(stage, self.own * HALF + first)


class First(Multiplier):
    """The warpgroup with the first tile of each pair."""

    own = FIRST

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        own = self.weighed(i, sums.softmax.peak)
        self.give(own)
        self.machine.keep_order()
        sums = self.added(sums, own, FIRST)
        self.wait_given(SECOND, i)

        def add_second(_: Value, sums: _Sums) -> _Sums:
            given = self.found()
            self.wait_half(SECOND, i)
            return self.added(sums, given, SECOND)

        return self.machine.loop(self.seconds(i), add_second, sums)

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        handed.give(FIRST, own, [])
        self.wait_given(SECOND, pairs)
        return [a + b for a, b in zip(own, handed.found_of_rows(), strict=True)]


class Second(Multiplier):
    """The warpgroup with the second tile of each pair."""

    own = SECOND

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        own = self.weighed_if_there(i, sums) if self.memory.is_wide else None
        self.wait_given(FIRST, i)
        given = self.found()
        if own is not None:
            self.give(own)
        self.wait_half(FIRST, i)
        sums = self.added(sums, given, FIRST)
        if own is None:
            own = self.weighed_if_there(i, sums)
            self.give(own)
        return self.machine.loop(self.seconds(i), lambda _, sums: self.added(sums, own, SECOND), sums)

    def weighed_if_there(self, i: Value, sums: _Sums) -> _Weights:
        """Return the weights of the pair's second tile. Without one they are 0, and nobody uses them."""
        machine, peak = self.machine, sums.softmax.peak
        nothing = [machine.constant(0.0, "f32")] * 2, [machine.constant(0, "i32")] * (KEYS // 4)
        none = _Weights(Softmax(peak, nothing[0]), nothing[1])
        return machine.loop(self.seconds(i), lambda _, before: self.weighed(i, before.softmax.peak), none)

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        self.wait_given(FIRST, pairs)
        other = handed.found_of_rows()
        handed.give(SECOND, own, [])
        return [a + b for a, b in zip(own, other, strict=True)]
