"""The body that mixes streams: new streams and their numbers, a meeting of blocks, and the next sublayer's input.

A block has 64 columns of all streams, its part, for all tokens of its group. It reads its part of the weight once. For
up to 64 tokens at a time it makes the new streams, and a warpgroup multiplies them by the weight on the tensor cores.
The weight is there as three bf16 numbers whose sum is the f32, so products are exact, and sums are f32. The parts' sums
go through device memory. Then each token belongs to one block, which adds them up in order: four warps compute gains
there, while the other warpgroups compute inputs, each one of a token. Of many tokens a block makes the next new streams
while other blocks arrive at the meeting.

Where no block has more than one token then, its first warpgroup receives the parts' sums by mail. Meanwhile the others
wait at a barrier of the grid for the new streams. Otherwise all wait at the barrier: a mailbox for the tokens of a
prompt would take 16 KB for each.

How a token's sums are divided depends on the sizes of the model alone, so its results do not depend on the batch.

    part   64 columns of all streams, which are a block's; axis 0 of the grid
    group  of tokens, which are those of all blocks of one place along axis 1
    tile   up to 64 tokens of a group, which a block multiplies at once
    turn   the tiles of all groups between two meetings of the blocks
    slot   a token that belongs to one block after a meeting
    eight  adjacent columns of a stream, or adjacent numbers of a token
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import product
from pallas_kernels.language.lanes import Buffer, Mailbox, Team, add, fold, fold_tree
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import VECTOR, Condition, Index, Step, Value, select
from pallas_kernels.rows import from_bf16
from pallas_kernels.streams.shares import sigmoid, sinkhorn, softmax

STREAMS = 4
PART = 64  # columns of a block, of each stream
TILE = 64  # tokens of a product
WARPGROUPS = 4
EIGHT = 8  # columns of a stream that a lane has together after the meeting, and numbers of a product
_THIRDS = 3  # bf16 numbers that a weight is the sum of
_LANES, _WARPS = WARPGROUPS * WARPGROUP, WARPGROUPS * WARPGROUP // WARP
_UNITS = PART // EIGHT  # eights of a part
_MIXERS = WARPGROUPS - 1  # warpgroups that compute inputs
_ALIGNMENT = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamWeights:
    """By what streams are mixed into the input of the sublayer that follows, or of the head."""

    weight: Any  # f32 [m, n h]; m = (2 + n) n before a sublayer, n before the head
    base: Any  # f32 [m]
    scale: Any  # f32 [3], or [1] before the head
    norm: Any  # f32 or bf16 [h]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedSublayer:
    """What a sublayer that is over adds to the streams: its output, or outputs of experts that are not yet summed."""

    post: Any  # f32 [M, n]
    carry: Any  # f32 [M, n, n], from old streams to new ones
    output: Any  # bf16 [M, h], of attention or of the shared expert
    # bf16 [d, M, k, h] of routed experts, or None. Each of d devices has as many experts as the others, in order, and
    # gives anything for a pick that is none of them.
    routed: Any = None
    experts: Any = None  # int32 [M, k] of the picks; from num_experts on they are none
    num_experts: int = dataclasses.field(default=0, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedStreams:
    """What is between two sublayers. None stands for what was not asked for."""

    streams: Any  # bf16 [M, n, h] with the output of the sublayer that is over, or None if none is
    mixed: Any  # bf16 [M, h], x before its norm, or None before a sublayer
    x: Any  # bf16 [M, h], the input of what follows, after its norm
    post: Any  # f32 [M, n] as in ``EndedSublayer``, or None before the head
    carry: Any  # f32 [M, n, n] the same


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixRules:
    """The constants of a model's hyper-connections."""

    rounds: int  # of Sinkhorn's algorithm
    eps: float  # added to shares, and to its sums
    norm_eps: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the work is divided."""

    tokens: int
    hidden: int
    numbers: int  # of a token
    groups: int  # of tokens, which are different blocks'
    rows: int  # tokens of a block's tile
    tiles: int  # of a block between two meetings

    @classmethod
    def of(cls, tokens: int, hidden: int, numbers: int, multiprocessors: int) -> Layout:
        """Return how to divide it over blocks that run at once, each on a multiprocessor."""
        parts = hidden // PART
        groups = max(1, min(multiprocessors // parts, -(-tokens // _FEWEST)))
        rows = min(TILE, -(-tokens // groups))
        most = max(1, min(_TILES, _TILES * parts // TILE))
        return cls(
            tokens=tokens,
            hidden=hidden,
            numbers=numbers,
            groups=groups,
            rows=rows,
            tiles=min(most, -(-tokens // (groups * rows))),
        )

    @property
    def parts(self) -> int:
        return self.hidden // PART

    @property
    def eights(self) -> int:
        """Eights of numbers."""
        return -(-self.numbers // EIGHT)

    @property
    def width(self) -> int:
        """Numbers of a token and part: those that are multiplied, then the sum of squares, in whole eights."""
        return (self.eights + 1) * EIGHT

    @property
    def columns(self) -> int:
        """Adjacent columns of each stream that a lane has before the meeting. All lanes have some of few tokens."""
        return 2 if self.rows * PART // 2 <= _LANES else EIGHT

    @property
    def lanes(self) -> int:
        """Lanes of a token before the meeting."""
        return PART // self.columns

    @property
    def turn(self) -> int:
        """Tokens between two meetings."""
        return self.groups * self.rows * self.tiles

    @property
    def turns(self) -> int:
        return -(-self.tokens // self.turn)

    @property
    def has_several(self) -> bool:
        """Whether a block has several tiles, of which the next are copied while one is computed."""
        return self.turns * self.tiles > 1

    @property
    def stages(self) -> int:
        """Tiles that a block has room for."""
        return _STAGES if self.has_several else 1

    @property
    def slots(self) -> int:
        """Tokens of a block after a meeting."""
        return -(-self.turn // (self.parts * self.groups))

    @property
    def has_mail(self) -> bool:
        """Whether the parts' sums are sent to the block of their token, which has no other one."""
        return self.turns == self.slots == 1 and self.columns < EIGHT

    @property
    def mail(self) -> tuple[int, int, int]:
        """The shape of the parts' sums that are sent."""
        return self.turn, self.parts, self.width

    @property
    def sums(self) -> tuple[int, ...]:
        """The shape of the parts' sums that are stored.

        A block makes those of turn i + 1 before it waits for others in turn i, while they may read those of turn i - 1.
        """
        return min(self.turns, 3), self.turn, self.parts, self.width

    @property
    def shared_bytes(self) -> int:
        columns = STREAMS * PART
        tiles = self.stages * TILE * columns * 2 + self.eights * _THIRDS * EIGHT * columns * 2
        tiles += self.stages * (_LANES + (STREAMS + 1) * TILE) * 16 * self.has_several
        constants = (self.numbers + VECTOR + self.hidden) * 4
        tiles += self.parts * self.width * 4 * self.has_mail
        return tiles + constants + self.slots * (self.width + VECTOR) * 4 + 2 * _MIXERS * VECTOR * 4 + _ALIGNMENT


_FEWEST = 16  # tokens of a group, from which on there are more groups
_TILES = 4  # of a block between two meetings, at most
_STAGES = 3  # of a block that has several tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """What a lane has loaded of routed experts' outputs for a token."""

    experts: list[Value]  # of the picks
    rows: list[list[Value]]  # words of each pick


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What a lane has loaded of a token: some columns, and the token's gains."""

    streams: list[list[Value]]  # words of each stream
    output: list[Value] | None = None  # words
    post: Step | None = None
    carry: list[Step] | None = None
    routed: Routed | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Shared memory for several tiles of a block: for what is copied of the next ones, and for one's new streams."""

    rows: TypedTile  # bf16 [tokens, 4 * 64] of each stage. A lane stores new streams where it has read the old ones.
    output: Shared  # words [stages, lanes, 4]
    gains: Shared  # f32 [stages, tokens, 5, 4]: post, then carry

    @classmethod
    def take(cls, machine: TensorCores, rows: TypedTile) -> Stages:
        return cls(
            rows=rows,
            output=Shared.take(machine, (_STAGES, _LANES, VECTOR), "i32"),
            gains=Shared.take(machine, (_STAGES, TILE, STREAMS + 1, VECTOR), "f32"),
        )

    def places(self, stage: Value) -> list[Value]:
        """Return the byte offset of a lane's columns of each stream."""
        row, unit = self.output.machine.thread // _UNITS, self.output.machine.thread % _UNITS
        return [self.rows[stage].unit(row, unit + n * _UNITS) for n in range(STREAMS)]

    def given(self, stage: Value, has_output: bool, routed: Routed | None) -> Given:
        """Return what was copied for this lane, and what it has loaded of routed experts."""
        machine = self.output.machine
        streams = [machine.load_shared(place, 16) for place in self.places(stage)]
        if not has_output:
            return Given(streams=streams)
        output = self.output.load_words(stage, machine.thread, 0, count=VECTOR)
        post, *carry = (self.gains.load_floats(stage, machine.thread // _UNITS, n, 0) for n in range(STREAMS + 1))
        return Given(streams=streams, output=output, post=post, carry=carry, routed=routed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """What the block reads of the weights after the meeting."""

    base: Shared  # f32: the base, then the scale
    norm: Shared  # [h]

    def norm_of(self, column: Value) -> Step:
        """Return eight of the norm's weights."""
        if self.norm.dtype == "f32":
            return [*self.norm.load_floats(column), *self.norm.load_floats(column + VECTOR)]
        return _floats(self.norm.load_words(column, count=EIGHT))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedNumbers:
    """Shared memory that is used after the meeting."""

    numbers: Shared  # f32 [slots, ...] of each token of the block
    squares: Shared  # f32 [2, mixers, 4], the parts of a sum
    received: Shared | None  # f32 [parts, width], the parts' sums of the block's only token
    constants: Constants


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """A block at its work."""

    machine: TensorCores
    layout: Layout
    rules: MixRules
    streams: Buffer  # [M, n, h] before
    weights: StreamWeights
    ended: EndedSublayer | None
    out: MixedStreams
    sums: Buffer | Mailbox  # f32 [turns at once, tokens of a turn, parts, width]; or without the first axis

    @property
    def part(self) -> Value:
        return self.machine.block(0)

    @property
    def group(self) -> Value:
        return self.machine.block(1)

    def run(self) -> None:
        machine, layout = self.machine, self.layout
        columns = STREAMS * PART
        weight = TypedTile.take(machine, _THIRDS * layout.eights * EIGHT, columns, "bf16")
        rows = TypedTile.take(machine, TILE, columns, "bf16", copies=layout.stages)
        numbers = Shared.take(machine, (layout.slots, layout.width + VECTOR), "f32")
        squares = Shared.take(machine, (2, _MIXERS, VECTOR), "f32")
        received = Shared.take(machine, layout.mail[1:], "f32") if layout.has_mail else None
        added = Barrier.take(machine, WARPGROUP // WARP if layout.has_mail else _WARPS)
        init_barriers(added)
        zero = machine.constant(0, "i32")
        loaded = self._load_weight()
        stages = Stages.take(machine, rows) if layout.has_several else None
        constants = self._copy_constants()
        if stages is None:
            machine.close_copies()
            self._put_tile(rows[0], zero, zero, self._load)
        else:
            for tile in range(_STAGES - 1):
                self._start(stages, zero + tile)
                machine.close_copies()
        self._widen_weight(weight, loaded)

        def multiply(first: Value, n: Value, buffer: Value, routed: Routed | None) -> Routed | None:
            """Make and multiply tile n of a turn. Return what is loaded of the next one: zeros after the last."""
            assert stages is not None
            tile = first + n
            stage = tile % _STAGES
            machine.wait_copies(pending=_STAGES - 2)
            machine.barrier("warp")  # lanes copy gains for each other
            given = functools.partial(stages.given, stage, self.ended is not None, routed)
            self._put_tile(rows[stage], tile, buffer, given)
            following = self._load_routed(tile + 1, where=n + 1 < layout.tiles)
            self._meet()  # after which nothing reads the tile before
            self._start(stages, tile + (_STAGES - 1))
            machine.close_copies()
            self._multiply(weight, rows[stage], tile, buffer)
            return following

        def make(i: Value) -> None:
            """Make the new streams of a turn, and the part's sums of them."""
            if stages is None:
                machine.wait_copies()
                self._meet()
                self._multiply(weight, rows[0], zero, zero)
            else:
                first, buffer = i * layout.tiles, i % layout.sums[0]
                routed = self._load_routed(first)
                machine.loop(layout.tiles, lambda n, routed: multiply(first, n, buffer, routed), routed, rolled=True)

        def turn(i: Value, _: None) -> None:
            first, buffer = i * layout.turn, i % layout.sums[0]
            shared = SharedNumbers(numbers=numbers, squares=squares, received=received, constants=constants)
            # The same for a whole warp, which compilers see: they copy what lanes exchange for warps that are divided.
            warpgroup = machine.reduce_warp("max", machine.thread // WARPGROUP)

            def gain() -> None:
                if self.out.post is not None:
                    added.wait(i & 1)
                    self._gain(shared, first)

            def mix() -> None:
                mine = (warpgroup * -1 + (layout.slots + _MIXERS)) // _MIXERS
                machine.loop(mine, lambda n, _: self._mix(shared, (first, n), (added, i & 1)), rolled=True)

            if received is not None:
                assert isinstance(self.sums, Mailbox)
                self.sums.close()
                machine.grid_arrive()
                with machine.when(self._exists(zero, first)):
                    with machine.when(warpgroup == 0):
                        self._receive(received)
                        self._add_up(shared, first, buffer)
                        added.arrive()
                        gain()
                    with machine.when(warpgroup > 0):
                        mix()
            else:
                machine.grid_arrive()
                if layout.turns > 1:  # while others arrive
                    with machine.when(i + 1 < layout.turns):
                        make(i + 1)
                machine.grid_wait()
                self._add_up(shared, first, buffer)
                added.arrive()
                with machine.when(warpgroup == 0):
                    gain()
                with machine.when(warpgroup > 0):
                    mix()

        make(zero)
        if layout.turns == 1:
            turn(zero, None)
        else:
            machine.loop(layout.turns, turn, rolled=True)

    # Before the meeting. All that few tokens need is loaded before any of it is waited for.
    def _load_weight(self) -> list[Step]:
        """Load the block's part of the weight: of each eight of numbers, four columns of one number."""
        machine, layout = self.machine, self.layout
        row, stream, column = self._place
        address = self.weights.weight.address_of((row, stream * layout.hidden + self.part * PART + column))
        eight, loaded = EIGHT * STREAMS * layout.hidden * 4, []
        for n in range(layout.eights):
            there = True if layout.numbers % EIGHT == 0 else row + n * EIGHT < layout.numbers
            words = machine.load(address + n * eight, 16, there, constant=True)
            loaded.append([machine.from_bits(word) for word in words])
        return loaded

    @property
    def _place(self) -> tuple[Value, Value, Value]:
        """Return (number of an eight, stream, column in the part) of a lane's four numbers of the weight."""
        quads, n = PART // VECTOR, self.machine.thread
        return n // (STREAMS * quads), n // quads % STREAMS, n % quads * VECTOR

    def _widen_weight(self, tile: TypedTile, loaded: list[Step]) -> None:
        """Store the weight as three numbers of bf16: the first of all rows, then their second ones, then their last."""
        row, stream, column = self._place
        at = stream * PART + column
        address, eight = tile.unit(row, at // EIGHT) + at % EIGHT * 2, EIGHT * STREAMS * PART * 2
        for n, values in enumerate(loaded):
            for third in range(_THIRDS):
                words = _words(values)
                # Eight rows further on, bytes have the same place in an atom.
                self.machine.store_shared(address + (third * self.layout.eights + n) * eight, words, 8, True)
                values = [value - near for value, near in zip(values, _floats(words), strict=True)]

    def _copy_constants(self) -> Constants:
        """Copy what is needed after the meeting to shared memory, where it waits for no device memory."""
        machine, weights, lane = self.machine, self.weights, self.machine.thread
        (count,), (scales,) = weights.base.shape, weights.scale.shape
        (hidden,) = weights.norm.shape
        base = Shared.take(machine, (count + VECTOR,), "f32")
        norm = Shared.take(machine, (hidden,), "f32" if weights.norm.dtype.itemsize == 4 else "u16")
        for array, size, first in ((weights.base, count, 0), (weights.scale, scales, count)):
            with machine.when(lane < size):
                machine.copy_async(base.address_of(lane + first), array.address_of((lane,)), True, size=4)
        each = 16 // norm.itemsize
        for first in range(0, hidden, _LANES * each):
            at = lane * each + first
            with machine.when(True if first + _LANES * each <= hidden else at < hidden):
                machine.copy_async(norm.address_of(at), weights.norm.address_of((at,)), True)
        return Constants(base=base, norm=norm)

    def _place_of(self, tile: Value) -> tuple[Value, Value, Value]:
        """Return (token, column, whether they exist) of a lane in one of the block's tiles, counted over all turns."""
        row = self.machine.thread // self.layout.lanes
        token = self._firsts(tile)[0] + row
        return token, self._column, (row < self.layout.rows) & (token < self.layout.tokens)

    @property
    def _column(self) -> Value:
        """The first column that a lane has before the meeting."""
        return self.part * PART + self.machine.thread % self.layout.lanes * self.layout.columns

    def _load(self) -> Given:
        """Load what a lane has of the only tile: some columns of a token. Zeros where there is no token."""
        only = self.machine.constant(0, "i32")
        token, column, exists = self._place_of(only)
        count = self.layout.columns
        streams = [self.streams.load_words(token, j, column, count=count, where=exists) for j in range(STREAMS)]
        if (ended := self.ended) is None:
            return Given(streams=streams)
        return Given(
            streams=streams,
            output=ended.output.load_words(token, column, count=count, where=exists),
            post=ended.post.load_floats(token, 0, where=exists),
            carry=[ended.carry.load_floats(token, j, 0, where=exists) for j in range(STREAMS)],
            routed=self._load_routed(only),
        )

    def _start(self, stages: Stages, tile: Value) -> None:
        """Start to copy what ``_load`` loads, of one of several tiles, but for the outputs of routed experts."""
        machine, row, unit = self.machine, self.machine.thread // _UNITS, self.machine.thread % _UNITS
        (token, column, exists), stage = self._place_of(tile), tile % _STAGES
        for j, place in enumerate(stages.places(stage)):
            machine.copy_async(place, self.streams.address_of((token, j, column)), exists)
        if (ended := self.ended) is not None:
            to = stages.output.address_of(stage, machine.thread, 0)
            machine.copy_async(to, ended.output.address_of((token, column)), exists)
            old = (unit - 1).maximum(0)
            source = select(unit == 0, ended.post.address_of((token, 0)), ended.carry.address_of((token, old, 0)))
            with machine.when(unit <= STREAMS):
                machine.copy_async(stages.gains.address_of(stage, row, unit, 0), source, exists)

    def _load_routed(self, tile: Value, where: Condition = True) -> Routed | None:
        """Load what routed experts give a tile, if they do: the lane's columns of each pick. Zeros if not ``where``."""
        if (ended := self.ended) is None or ended.routed is None:
            return None
        devices, (token, column, exists) = ended.routed.shape[0], self._place_of(tile)
        exists &= where
        experts = [ended.experts.load_int(token, pick, where=exists) for pick in range(ended.experts.shape[1])]
        rows = []
        for pick, expert in enumerate(experts):
            device = 0 if devices == 1 else (expert // (ended.num_experts // devices)).minimum(devices - 1)
            words = ended.routed.load_words(device, token, pick, column, count=self.layout.columns, where=exists)
            rows.append(words)
        return Routed(experts=experts, rows=rows)

    def _firsts(self, tile: Value) -> tuple[Value, Value]:
        """Return the number of the first token of one of the block's tiles among all tokens, and in the turn."""
        layout = self.layout
        first = (tile * layout.groups + self.group) * layout.rows
        return first, (tile % layout.tiles * layout.groups + self.group) * layout.rows

    def _put_tile(self, rows: TypedTile, tile: Value, buffer: Value, given: Callable[[], Given]) -> None:
        """Make the new streams of a tile's tokens, of which ``given`` loads what there is."""
        machine, layout = self.machine, self.layout
        at = self._firsts(tile)[1] + machine.thread // layout.lanes
        busy = -(-layout.rows * layout.lanes // WARP) * WARP  # lanes whose warps have tokens
        with machine.when(machine.thread < busy if busy < _LANES else True):
            self._put_streams(rows, tile, (buffer, at), given())
        if (put := busy // layout.lanes) < TILE:
            row, unit = machine.thread // _UNITS, machine.thread % _UNITS
            with machine.when(row >= put):  # a product reads all rows
                for stream in range(STREAMS):
                    nothing = [machine.constant(0, "i32")] * VECTOR
                    machine.store_shared(rows.unit(row, unit + stream * _UNITS), nothing, 16, True)

    def _meet(self) -> None:
        """Show a tile to the product that follows. The product before has been waited for then."""
        self.machine.fence_shared()
        self.machine.barrier("block")

    def _multiply(self, weight: TypedTile, rows: TypedTile, tile: Value, buffer: Value) -> None:
        """Multiply the block's part of the new streams of a tile by the weight."""
        machine, layout = self.machine, self.layout
        first, at = self._firsts(tile)
        # One warpgroup, because a product of few columns takes as long as one of all.
        with machine.when(machine.thread < WARPGROUP):
            thirds = product(None, rows, weight).wait().parts(layout.eights * EIGHT)
            sums = thirds[0].map(lambda a, b, c: a + (b + c), *thirds[1:])
            for row, column, pair in sums.pairs():
                exists = (row < layout.rows) & (first + row < layout.tokens)
                self._put_sums(pair, (buffer, at + row), column, exists)

    def _put_sums(self, pair: Step, place: tuple[Value, Value], column: Index, where: Condition) -> None:
        """Store or send two of the part's sums of a token, which has a buffer and a number in the turn."""
        if isinstance(self.sums, Mailbox):
            self.sums.send_floats(pair, place[1], self.part, column, where=where)
        else:
            self.sums.store_floats(pair, *place, self.part, column, where=where)

    def _put_streams(self, rows: TypedTile, tile: Value, place: tuple[Value, Value], given: Given) -> None:
        """Put a lane's columns of a token's new streams, and the sum of their squares, where they belong."""
        machine, layout = self.machine, self.layout
        token, column, exists = self._place_of(tile)
        row, lane = machine.thread // layout.lanes, machine.thread % layout.lanes
        unit, beside = lane * layout.columns // EIGHT, lane * layout.columns % EIGHT
        new = given.streams if given.post is None else self._with_output(given)
        # In an order that does not depend on how many columns a lane has: of each column, then of all of them.
        squares = [machine.constant(0.0, "f32")] * layout.columns
        for stream, words in enumerate(new):
            if self.out.streams is not None:
                self.out.streams.store_words(words, token, stream, column, where=exists)
            address = rows.unit(row, unit + stream * _UNITS) + beside * 2
            machine.store_shared(address, words, layout.columns * 2, True)
            squares = [machine.fma(x, x, total) for x, total in zip(_floats(words), squares, strict=True)]
        total = Team(machine, WARP).neighbours(add, fold_tree(add, squares), layout.lanes)
        pair = [total, machine.constant(0.0, "f32")]
        self._put_sums(pair, place, layout.eights * EIGHT, exists & (lane == 0))

    def _with_output(self, given: Given) -> list[list[Value]]:
        """Return the words of the new streams."""
        assert self.ended is not None
        assert given.output is not None
        assert given.post is not None
        assert given.carry is not None
        machine, y = self.machine, _floats(given.output)
        if given.routed is not None:
            y = self._sum_of_experts(given.routed, y, self.ended.num_experts)
        streams = [_floats(words) for words in given.streams]
        new = []
        for into in range(STREAMS):
            values = []
            for d in range(self.layout.columns):
                value = given.carry[0][into] * streams[0][d]
                for j in range(1, STREAMS):
                    value = machine.fma(given.carry[j][into], streams[j][d], value)
                values.append(machine.fma(given.post[into], y[d], value))
            new.append(_words(values))
        return new

    def _sum_of_experts(self, routed: Routed, shared: Step, num_experts: int) -> Step:
        """Return the sum of experts' outputs: f32, in the order of the picks, the shared one last, rounded to bf16."""
        totals = [self.machine.constant(0.0, "f32")] * self.layout.columns
        for expert, words in zip(routed.experts, routed.rows, strict=True):
            is_pick = expert < num_experts
            totals = [total + select(is_pick, x, 0.0) for total, x in zip(totals, _floats(words), strict=True)]
        return _floats(_words([total + x for total, x in zip(totals, shared, strict=True)]))

    # After the meeting.
    def _token(self, slot: Value) -> Value:
        """Return the number in the turn of a block's token."""
        blocks = self.layout.parts * self.layout.groups
        return slot * blocks + (self.group * self.layout.parts + self.part)

    def _exists(self, slot: Value, first: Value) -> Value:
        at = self._token(slot)
        return (slot < self.layout.slots) & (at < self.layout.turn) & (first + at < self.layout.tokens)

    def _receive(self, received: Shared) -> None:
        """Receive the parts' sums of the block's only token, as the first warpgroup."""
        assert isinstance(self.sums, Mailbox)
        machine, layout = self.machine, self.layout
        pairs, needed = layout.width // 2, layout.eights * EIGHT // 2 + 1
        token, count = self._token(machine.constant(0, "i32")), layout.parts * pairs
        numbers = [machine.thread + begin for begin in range(0, count, WARPGROUP)]
        for begin in range(0, len(numbers), _PAIRS_AT_ONCE):
            some = numbers[begin : begin + _PAIRS_AT_ONCE]
            places = [(token, number // pairs, number % pairs * 2) for number in some]
            wanted = [(number < count) & (number % pairs < needed) for number in some]
            values = self.sums.receive_floats(places, count=2, where=wanted)
            for pair, (_, part, column), number in zip(values, places, some, strict=True):
                received.store_floats(pair, part, column, where=number < count)
        machine.barrier("warpgroup")

    def _add_up(self, shared: SharedNumbers, first: Value, buffer: Value) -> None:
        """Add up the parts' sums of the block's tokens, a warp those of a token, and make shares of them."""
        machine, layout = self.machine, self.layout
        quads = layout.width // VECTOR  # lanes of a part
        lane, warp = machine.thread % WARP, machine.thread // WARP
        quad = lane % quads
        for begin in range(0, layout.slots, _WARPS):
            slot = warp + begin
            with machine.when(slot < layout.slots):
                exists = self._exists(slot, first)
                at = select(exists, self._token(slot), 0)
                totals = self._totals(shared.received, (buffer, at), exists)
                shares = self._shares(totals, quad, shared.constants)
                named = (lane < quads) & (quad < layout.numbers // VECTOR)
                shared.numbers.store_floats(shares, slot, quad * VECTOR, where=named)
                if self.out.post is not None:
                    self.out.post.store_floats(shares, first + at, 0, where=named & exists & (quad == 1))

    def _totals(self, received: Shared | None, place: tuple[Value, Value], exists: Value) -> Step:
        """Return the sums over the parts of a token's numbers, four of them in each lane of a warp."""
        machine, layout = self.machine, self.layout
        quads = layout.width // VECTOR
        together, lane = WARP // quads, machine.thread % WARP
        part, column = lane // quads, lane % quads * VECTOR
        stored = None if isinstance(self.sums, Mailbox) else self.sums.address_of((*place, part, column))

        def load(first: int) -> Step:
            is_part = True if first + together <= layout.parts else part + first < layout.parts
            if received is not None:
                values = received.load_floats(select(is_part, part + first, 0), column)
                return values if is_part is True else [select(is_part, value, 0.0) for value in values]
            assert stored is not None
            words = machine.load(stored + first * (layout.width * 4), 16, exists & is_part, constant=False)
            return [machine.from_bits(word) for word in words]

        totals: Step = []
        for begin in range(0, layout.parts, together * _SUMS_AT_ONCE):
            end = min(begin + together * _SUMS_AT_ONCE, layout.parts)
            loaded = [load(first) for first in range(begin, end, together)]
            loaded = [totals, *loaded] if totals else loaded
            totals = [fold(add, values) for values in zip(*loaded, strict=True)]
        distance = quads
        while distance < WARP:
            totals = [total + machine.shuffle_xor(total, distance) for total in totals]
            distance *= 2
        return totals

    def _shares(self, totals: Step, quad: Value, constants: Constants) -> Step:
        """Return what four of a token's numbers become: ``pre``, ``post``, or a line of what Sinkhorn divides.

        ``totals`` are those of the parts, the four of each lane by its ``quad``. All lanes compute all three.
        """
        machine, layout, eps = self.machine, self.layout, self.rules.eps
        of_squares = layout.eights * EIGHT // VECTOR
        squares = select(quad == of_squares, totals[0], 0.0)
        squares = Team(machine, WARP).neighbours(add, squares, layout.width // VECTOR)
        inverse_rms = machine.normal_inverse_sqrt(squares * (1 / (STREAMS * layout.hidden)) + self.rules.norm_eps)
        near = quad.minimum(layout.numbers // VECTOR - 1)
        (scale,) = constants.base.load_floats(near.minimum(2) + layout.numbers, count=1)
        base = constants.base.load_floats(near * VECTOR)
        logits = [machine.fma(x * inverse_rms, scale, b) for x, b in zip(totals, base, strict=True)]
        between_0_and_1 = [sigmoid(machine, x) for x in logits]
        if layout.numbers == STREAMS:
            return [x + eps for x in between_0_and_1]
        gains = [select(quad == 0, x + eps, x * 2.0) for x in between_0_and_1]
        return [select(quad < 2, x, y + eps) for x, y in zip(gains, softmax(machine, logits), strict=True)]

    def _gain(self, shared: SharedNumbers, first: Value) -> None:
        """Compute the gains of the block's tokens, a lane those of a token."""
        machine, rules = self.machine, self.rules
        slot = machine.thread % WARPGROUP
        with machine.when(self._exists(slot, first)):
            token = first + self._token(slot)
            matrix = [shared.numbers.load_floats(slot, (2 + j) * STREAMS) for j in range(STREAMS)]
            for j, line in enumerate(sinkhorn(machine, matrix, rules.rounds, rules.eps)):
                self.out.carry.store_floats(line, token, j, 0)

    def _mix(self, shared: SharedNumbers, tile: tuple[Value, Value], added: tuple[Barrier, Value]) -> None:
        """Compute the input of one of the block's tokens, as a warpgroup."""
        machine, layout = self.machine, self.layout
        first, n = tile
        mixer = machine.thread // WARPGROUP - 1
        slot = mixer + n * _MIXERS
        exists = self._exists(slot, first)
        token = first + self._token(slot)
        source = self.streams if self.out.streams is None else self.out.streams
        columns = self._columns()
        address = machine.hold(source.address_of((token, 0, columns[0][0])))

        def load(i: int) -> list[list[Value]]:
            """Return eight columns of each stream."""
            offsets = [2 * (j * layout.hidden + i * WARPGROUP * EIGHT) for j in range(STREAMS)]
            return [machine.load(address + at, 16, exists & columns[i][1], constant=source.constant) for at in offsets]

        if layout.has_mail:
            machine.grid_wait()
        streams = [load(i) for i in range(len(columns) if len(columns) <= _AT_ONCE else _AT_ONCE // 2)]
        added[0].wait(added[1])
        pre = shared.numbers.load_floats(slot, 0)
        mixed: list[list[Value]] = []
        for i in range(len(columns)):
            values = [_floats(of_stream) for of_stream in (streams[i] if i < len(streams) else load(i))]
            totals = [pre[0] * value for value in values[0]]
            for share, others in zip(pre[1:], values[1:], strict=True):
                totals = [machine.fma(share, value, total) for value, total in zip(others, totals, strict=True)]
            mixed.append(_words(totals))
        total = _sum_of_squares([word for words in mixed for word in words])
        total = Team(machine, WARP).neighbours(add, total, WARP)
        lane = machine.thread % WARPGROUP
        shared.squares.store_floats([total], n % 2, mixer, lane // WARP, where=lane % WARP == 0)
        machine.barrier("warpgroup")
        total = fold(add, shared.squares.load_floats(n % 2, mixer, 0))
        machine.keep_order()  # where words are widened before the root is known, there are too few registers
        inverse_rms = machine.normal_inverse_sqrt(total * (1 / layout.hidden) + self.rules.norm_eps)
        for words, (column, there) in zip(mixed, columns, strict=True):
            if self.out.mixed is not None:
                self.out.mixed.store_words(words, token, column, where=exists & there)
            norm = shared.constants.norm_of(select(there, column, 0))
            values = [value * weight * inverse_rms for value, weight in zip(_floats(words), norm, strict=True)]
            self.out.x.store_words(_words(values), token, column, where=exists & there)

    def _columns(self) -> list[tuple[Value, Condition]]:
        """Return the first of each eight columns that a lane of a warpgroup has of a token, and whether they exist."""
        lane, hidden, width = self.machine.thread % WARPGROUP, self.layout.hidden, WARPGROUP * EIGHT
        return [
            (lane * EIGHT + first, True if first + width <= hidden else lane * EIGHT + first < hidden)
            for first in range(0, hidden, width)
        ]


_PAIRS_AT_ONCE = 8  # pairs of parts' sums that a lane receives together
_SUMS_AT_ONCE = 16  # loads of parts' sums that run at the same time
_AT_ONCE = 4  # eights of columns whose streams are loaded before the numbers are known


def _sum_of_squares(words: list[Value]) -> Value:
    """Return the sum of squares of packed bf16, as four sums that do not wait for each other."""
    machine, values = words[0].machine, _floats(words)
    totals = [value * value for value in values[:VECTOR]]
    for i, value in enumerate(values[VECTOR:]):
        totals[i % VECTOR] = machine.fma(value, value, totals[i % VECTOR])
    return fold_tree(add, totals)


def _floats(words: list[Value]) -> Step:
    return [value for word in words for value in from_bf16(word)]


def _words(values: Step) -> list[Value]:
    machine = values[0].machine
    return [machine.to_bf16(*values[i : i + 2]) for i in range(0, len(values), 2)]
