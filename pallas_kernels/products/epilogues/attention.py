"""Queries of attention: norm, rope and rounding to f16 of the sums of a product whose outputs are heads.

    q = f16(rope(sums / rms(sums)))       over the outputs of a head, for each row of x

A head has more outputs than a block or a tile. The blocks of a cluster compute its parts at the same time, and tell
each other their sums of squares. Nobody waits for long: the blocks multiply as many inputs, and in products of many
rows one warpgroup of a block multiplies while the other one waits.

Products in memory are converted by a launch of their own (``attention_queries``). There a head's row is spread over at
most one warp, so that each lane has several 16-byte loads in flight. The indexer's queries share its parts.

Where the CUDA plugin compiles relocatable code (``plugin``), the reciprocals are calls, beside which all products of a
kernel wait for each other. With few rows these take little time. The kernel was not timed so.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.activations import fours_of_pairs, is_needed, store_words
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer, Row, Team, add, fold
from pallas_kernels.language.launch import Body, launch
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Channels, Condition, Value, negate, select
from pallas_kernels.products.epilogues.faces import (
    BlockSums,
    Extras,
    Finish,
    LastSteps,
    Line,
    Lines,
    Made,
    RowSums,
    TileShape,
)
from pallas_kernels.products.problem import Epilogue, Spec, Unsupported, WeightSpec
from pallas_kernels.products.weights import TILE
from pallas_kernels.rows import Angles, load_angles, rope, unit_norm
from pallas_kernels.trees import Tree

HEAD_DIM = 512  # outputs of a head
HALVES = 2  # blocks of few rows that share a head
_TURNS = 2  # whose sums are in shared memory: a block may be a turn ahead of the one that reads them
_CONVERTING = 32  # lanes that hold a head's row where a product is converted that is in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(Epilogue):
    """Outputs that are heads, of which the last channels are rotated."""

    rope_dim: int  # channels that are rotated, the last ones of each head

    name: ClassVar[str] = "product_of_queries"
    keeps_rows: ClassVar[bool] = False

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        """Cosines and then sines of the angles by which the last channels of each head are rotated."""
        return {"angles": Spec((rows, self.rope_dim), jnp.float32)}

    def few(self, block: BlockSums, extras: Extras, out: Made) -> LastSteps:
        return block.with_lines(self.begin(block.machine, block.lines, extras["angles"], out))

    @abc.abstractmethod
    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: Made) -> Finish:
        """Load angles, so that they are there when the queries are made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionQueries(Heads):
    """Heads of 512 that are normed, rotated, and stored as f16 [M, heads, 512]."""

    eps: float  # of the norm
    head_dim: int = HEAD_DIM

    name_of_many: ClassVar[str] = "product_of_queries"
    blocks: ClassVar[int] = HALVES

    def state(self, rows: int, outputs: int) -> Spec:
        return Spec((rows, outputs), jnp.float16)

    def finished(self, made: jax.Array, rows: int) -> jax.Array:
        return made.reshape(rows, -1, self.head_dim)

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        outputs = weight.shape[0]
        if self.head_dim != HEAD_DIM or outputs % HEAD_DIM or weight.groups != 1:
            reason = f"outputs must be heads of {HEAD_DIM}, got {outputs} outputs and heads of {self.head_dim}"
            return Unsupported(kind="no kernel", reason=reason)
        if self.rope_dim % 16 or not 0 < self.rope_dim <= HEAD_DIM // 2:
            reason = f"rope_dim must be a multiple of 16 up to {HEAD_DIM // 2}, got {self.rope_dim}"
            return Unsupported(kind="no kernel", reason=reason)
        return None

    # Few rows: a block has half of each head, in a line for each row.
    @property
    def tiles(self) -> int:
        return self.head_dim // HALVES // TILE

    def shared_bytes(self, lines: int) -> int:
        return HALVES * lines * 4

    def sent_bytes(self, lines: int) -> int:
        return HALVES * lines * 4

    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: Buffer) -> Finish:
        squares = Shared.take(machine, (HALVES, lines.count), "f32")
        row = Row(Team(machine, WARP), self.head_dim // HALVES)
        mine = list(lines.each(WARP))
        angles = [self._angles(machine, row, table, line) for line in mine]

        def load(sums: Shared) -> list[Channels]:
            return [[sums.load_floats(line.loaded, channel) for channel in row.channel] for line in mine]

        def share(sums: Shared, sent: Barrier) -> None:
            for line, channels in zip(mine, load(sums), strict=True):
                (total,) = row.team.reduce((add, fold(add, [value * value for step in channels for value in step])))
                first = line.here & (row.team.lane == 0)
                for rank in range(HALVES):
                    sent.send_floats([total], squares, machine.rank, line.number, rank=rank, where=first)

        def make(sums: Shared) -> None:
            for line, channels, turns in zip(mine, load(sums), angles, strict=True):
                total = fold(add, [squares.load_floats(rank, line.loaded, count=1)[0] for rank in range(HALVES)])
                inverse_rms = machine.inverse_sqrt(total * (1 / self.head_dim) + self.eps)
                turned = rope(row.map(lambda value, by=inverse_rms: value * by, channels), turns)
                for channel, (a, b, c, d) in zip(row.channel, turned, strict=True):
                    words = [machine.to_f16(a, b), machine.to_f16(c, d)]
                    out.store_words(words, line.row, lines.output + channel, where=line.there)

        return Finish(share, make)

    def _angles(self, machine: TensorCores, row: Row, table: Buffer, line: Line) -> Angles:
        """Load the angles of this block's half of a head."""
        pairs = table.shape[1] // 2
        nope_dim = self.head_dim - table.shape[1]
        angles: Angles = []
        for step, channel in enumerate(row.channel):
            number = channel + machine.rank * row.dim
            if row.dim + (step + 1) * VECTOR * WARP <= nope_dim:
                angles.append((False, [machine.constant(0.0, "f32")] * VECTOR))
                continue
            turns = negate(number < nope_dim)
            pair = (number - nope_dim) >> 1
            load = [table.load_floats(line.row, pair + n, count=2, where=line.there & turns) for n in (0, pairs)]
            angles.append((turns, load[0] + load[1]))
        return angles

    # Many rows: the blocks of a cluster have the adjacent tiles of a head, and lanes pairs of its outputs.
    def neighbours(self, tile_outputs: int) -> int:
        return self.head_dim // tile_outputs

    def shared_bytes_of_many(self, tile: TileShape) -> int:
        return _TURNS * tile.neighbours * tile.rows * 4 + tile.warpgroups * 8

    def begin_many(self, machine: TensorCores, tile: TileShape, extras: Extras) -> _Squares:
        return _Squares.take(machine, tile)

    def many_rows(self, sums: RowSums, extras: Extras, out: Buffer, begun: _Squares) -> None:
        machine, blocks = sums.machine, begun.blocks
        last = machine.rank == blocks - 1
        turns = PairAngles.load(machine, extras["angles"], sums.rows, len(sums.sums) // VECTOR, last)
        halves = [sums.pairs(half) for half in range(2)]
        of_lane = [_sum_of_squares(machine, pairs) for pairs in halves]
        of_tile = [Team(machine, 4).reduce((add, total))[0] for total in of_lane]
        totals = begun.totals(sums.turn, [in_tile for in_tile, *_ in sums.rows], of_tile)
        for half, (pairs, total, (_, at, where)) in enumerate(zip(halves, totals, sums.rows, strict=True)):
            inverse_rms = machine.inverse_sqrt(total * (1 / self.head_dim) + self.eps)
            normed = [[value * inverse_rms for value in pair] for pair in pairs]
            words = [machine.to_f16(*turns.rotate(half, n, pair)) for n, pair in enumerate(normed)]
            store_words(out, fours_of_pairs(machine, words, at, sums.output, where))


def _sum_of_squares(machine: TensorCores, pairs: list[list[Value]]) -> Value:
    sums = [machine.constant(0.0, "f32")] * 2
    for pair in pairs:
        sums = [machine.fma(value, value, total) for value, total in zip(pair, sums, strict=True)]
    return fold(add, sums)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Squares:
    """Sums of squares of a tile's rows, which the blocks of a cluster exchange. Each warpgroup has its own rows."""

    machine: TensorCores
    sums: Shared  # f32 [turns, blocks, rows]
    there: Barrier  # per warpgroup: the sums of all blocks

    @classmethod
    def take(cls, machine: TensorCores, tile: TileShape) -> _Squares:
        """Take shared memory, and initialise the barriers. All lanes of the cluster call it."""
        blocks = tile.neighbours
        sums = Shared.take(machine, (_TURNS, blocks, tile.rows), "f32")
        there = Barrier.take(machine, blocks * WARPGROUP // WARP, copies=tile.warpgroups, scope="cluster")
        init_barriers(there)
        machine.barrier("cluster")
        return cls(machine=machine, sums=sums, there=there)

    @property
    def blocks(self) -> int:
        return self.sums.shape[1]

    def totals(self, turn: Value, rows: list[Value], squares: list[Value]) -> list[Value]:
        """Add what all blocks have of some rows of the tile. The four lanes of a quad have the same rows."""
        machine, blocks = self.machine, self.blocks
        slot, barrier = self.sums[turn % _TURNS], self.there.copy(machine.thread // WARPGROUP)
        for rank in range(blocks):
            for row, square in zip(rows, squares, strict=True):
                slot.store_floats([square], machine.rank, row, where=machine.thread % 4 == 0, rank=rank)
        barrier.arrive_in_cluster(blocks)
        barrier.wait(turn & 1)
        return [fold(add, [slot.load_floats(rank, row, count=1)[0] for rank in range(blocks)]) for row in rows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairAngles:
    """Angles of a lane's rows, for the pairs of outputs that the lane has among the last ones of a head."""

    first: int  # of the lane's fours that is rotated
    here: Condition  # whether this block has the last outputs
    pairs: list[list[list[Value]]]  # cosine and sine for each row and four

    @classmethod
    def load(
        cls,
        machine: TensorCores,
        table: Buffer,
        rows: list[tuple[Value, Value, Condition]],
        fours: int,
        here: Condition,
    ) -> PairAngles:
        """Load angles of rows as ``RowSums`` has them, from a table f32 [rows, cosines and then sines]."""
        pairs = table.shape[1] // 2
        first = fours - pairs // 4
        column = machine.thread % 4
        loaded = [
            [
                [
                    table.load_floats(row, column + (4 * n + start), count=1, where=here & there)[0]
                    for start in (0, pairs)
                ]
                for n in range(fours - first)
            ]
            for _, row, there in rows
        ]
        return cls(first=first, here=here, pairs=loaded)

    def rotate(self, row: int, four: int, pair: list[Value]) -> list[Value]:
        """Rotate two adjacent outputs of a row, given the number of their four."""
        if four < self.first:
            return pair
        (a, b), (cos, sin) = pair, self.pairs[row][four - self.first]
        return [select(self.here, x, old) for x, old in zip((a * cos - b * sin, b * cos + a * sin), pair, strict=True)]


type Converted[Array] = tuple[Array, Array, Array | None]  # products, angles, and which tokens are needed


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One head of one token: the row that a team of lanes works on."""

    row: Row
    number: Value  # its number among the heads of all tokens
    there: Condition
    values: Channels
    angles: Angles

    @classmethod
    def load(cls, machine: TensorCores, inputs: Converted[Buffer], heads: int, lanes: int) -> Head:
        """Load this team's head.

        ``inputs`` are products [rows, dim], angles [rows / heads, rope_dim], and which tokens are needed.
        """
        product, angles, needed = inputs
        (count, dim), per_block = product.shape, WARPGROUP // lanes
        number = machine.block(0) * per_block + machine.thread // lanes
        there = is_needed(needed, number // heads, True if count % per_block == 0 else number < count)
        row = Row(Team(machine, lanes), dim)
        values = row.load(product, number, where=there)
        return cls(row, number, there, values, load_angles(row, angles, number // heads, where=there))

    def turned(self, values: Channels) -> Channels:
        return rope(values, self.angles)


def launch_conversion(
    name: str,
    body: Body,
    given: Converted[jax.Array],
    out_row: Tree,
    lanes: int,
    *,
    simulate: bool,
) -> Tree:
    """Launch a conversion of products f32 [B, T, H, dim] with angles f32 [B, T, rope_dim], and which tokens are needed.

    ``lanes`` hold a head's row, of which the result is like ``out_row``.
    """
    product, angles, needed = given
    chex.assert_rank([product, angles], [4, 3])
    *lead, dim = product.shape
    rope_dim = angles.shape[-1]
    chex.assert_shape(angles, (*lead[:2], rope_dim))
    chex.assert_type([product, angles], jnp.float32)
    if needed is not None:
        chex.assert_shape(needed, lead[:2])
        chex.assert_type(needed, bool)
        needed = needed.reshape(-1)
    if dim % VECTOR or rope_dim % VECTOR or rope_dim > dim:
        raise ValueError(f"dims of a head and of its rope must be multiples of {VECTOR}, got {dim} and {rope_dim}")
    rows = product.reshape(-1, dim)
    out = launch(
        body,
        name=name,
        grid=(-(-len(rows) * lanes // WARPGROUP),),
        inputs=(rows, angles.reshape(-1, rope_dim), needed),
        state=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(rows), *leaf.shape), leaf.dtype), out_row),
        simulate=simulate,
    )
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), out)


def attention_queries(
    product: jax.Array,
    angles: jax.Array,
    *,
    eps: float,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Apply RMSNorm without a weight and rope, and convert to f16.

    Args:
      product: f32 [B, T, H, head_dim].
      angles: f32 [B, T, rope_dim], cosines and then sines of the angles by which the last channels of each head are
        rotated.
      eps: of the norm.
      needed: bool [B, T], tokens whose queries anyone reads; None for all. Those of others may be anything.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      f16 [B, T, H, head_dim].
    """
    heads, dim = product.shape[2:]

    def body(machine: TensorCores, inputs: Converted[Buffer], out: Buffer) -> None:
        head = Head.load(machine, inputs, heads, _CONVERTING)
        row = head.row
        for step, (a, b, c, d) in enumerate(head.turned(unit_norm(row, head.values, eps))):
            words = [machine.to_f16(a, b), machine.to_f16(c, d)]
            out.store_words(words, head.number, row.channel[step], where=head.there & row.before(step, dim))

    given = product, angles, needed
    return launch_conversion(
        "attention_queries", body, given, Spec((dim,), jnp.float16), _CONVERTING, simulate=simulate
    )
