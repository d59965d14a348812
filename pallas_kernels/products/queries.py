"""Queries made of the sums of a product of few rows, whose outputs are heads, instead of storing these sums.

    AttentionHeads   f16(rope(sums / rms(sums)))                   as ``attention_queries`` does
    IndexerHeads     round(hadamard(rope(sums))) in the keys' format  as ``indexer_queries`` does
    BothHeads        a head of each

The outputs of a block are gathered in shared memory, a line for each row of x. Then the lanes are divided over the
heads of these lines as in ``pallas_kernels.queries``. A head of attention has more outputs than a block. So the two
blocks of a cluster compute half a head each, and tell each other their sums of squares.

Where the CUDA plugin compiles relocatable code (``plugin``), the reciprocals are calls, beside which all products of a
kernel wait for each other. With so few rows these take little time. The kernel was not timed so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.formats import Fp4Keys
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer, Row, Team, add, fold
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Channels, Condition, Value, negate, select
from pallas_kernels.products.split import ROWS, TILE
from pallas_kernels.queries import INDEXER_LANES
from pallas_kernels.rows import Angles, hadamard, load_angles, rope

HALVES = 2  # blocks that share a head of attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """Whole warpgroups of a block."""

    number: Value  # of this lane among them
    count: int
    here: Condition = True  # whether a lane is one of them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """What the lines are whose outputs a block gathers."""

    count: int
    rows: int  # of x
    first: Value  # row of x of the first line
    past: Value  # the first row of x that is another block's
    output: Value  # the first one of the block
    lanes: Lanes  # that make queries of them

    def each(self, size: int) -> Iterator[Line]:
        """Yield the lines of a team of so many lanes."""
        teams, team = self.lanes.count // size, self.lanes.number // size
        for start in range(0, self.count, teams):
            number, row = team + start, self.first + (team + start)
            inside: Condition = True if start + teams <= self.count else number < self.count
            here = inside & self.lanes.here
            there = here & (row < self.past) & (row < self.rows)
            yield Line(number if inside is True else select(inside, number, 0), number, row, here, there)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line of a team."""

    loaded: Value  # its number, or that of another line if it does not exist
    number: Value
    row: Value  # of x
    here: Condition  # whether it is one of the block's lines
    there: Condition  # whether there is such a row, too


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """How the queries are made when the lines are stored, f32 [lines, outputs and padding]."""

    # Sends all blocks of the cluster what they need, its own one too: ``sent_bytes`` of the heads to each.
    share: Callable[[Shared, Barrier], None]
    make: Callable[[Shared], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Heads that are normed, rotated, and stored as f16 [rows, outputs]."""

    dim: int  # outputs of a head, in two blocks
    eps: float  # of the norm
    blocks = HALVES  # of a cluster, which share a head

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.dim // HALVES // TILE

    @property
    def shared_bytes(self) -> int:
        return HALVES * ROWS * 4

    @staticmethod
    def sent_bytes(lines: int) -> int:
        """Return the bytes that the blocks of a cluster send to each of them."""
        return HALVES * lines * 4

    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: Buffer) -> Finish:
        """Load angles, so that they are there when the queries are made."""
        squares, row = Shared.take(machine, (HALVES, ROWS), "f32"), Row(Team(machine, WARP), self.dim // HALVES)
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
                inverse_rms = machine.inverse_sqrt(total * (1 / self.dim) + self.eps)
                turned = rope(row.map(lambda value, by=inverse_rms: value * by, channels), turns)
                for channel, (a, b, c, d) in zip(row.channel, turned, strict=True):
                    words = [machine.to_f16(a, b), machine.to_f16(c, d)]
                    out.store_words(words, line.row, lines.output + channel, where=line.there)

        return Finish(share, make)

    def _angles(self, machine: TensorCores, row: Row, table: Buffer, line: Line) -> Angles:
        """Load the angles of this block's half of a head."""
        pairs = table.shape[1] // 2
        nope_dim = self.dim - table.shape[1]
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexerHeads:
    """Heads that are rotated, transformed, and rounded in the format of the indexer's keys."""

    dim: int  # outputs of a head
    keys: Fp4Keys
    blocks = 1

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.dim // TILE

    @property
    def shared_bytes(self) -> int:
        return 0

    @staticmethod
    def sent_bytes(lines: int) -> int:
        """Return 0: a block has whole heads, and needs nothing of others."""
        del lines
        return 0

    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: Any) -> Finish:
        """Load angles, so that they are there when the queries are made."""
        row, mine = Row(Team(machine, INDEXER_LANES), self.dim), list(lines.each(INDEXER_LANES))
        angles = [load_angles(row, table, line.row, where=line.there) for line in mine]
        heads = out.codes.shape[0] // lines.rows

        def make(sums: Shared) -> None:
            for line, turns in zip(mine, angles, strict=True):
                values = rope([sums.load_floats(line.loaded, channel) for channel in row.channel], turns)
                head = line.row * heads + lines.output // self.dim
                self.keys.store(row, hadamard(row, values), out, head, where=line.there)

        return Finish(lambda sums, sent: None, make)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BothHeads:
    """A head of attention and one of the indexer, of two weights: each of the two blocks computes half of both.

    A block stores the lines of all rows of its half of the indexer's head. Then it gets the other half of half of the
    rows, of which it makes queries, and gives its own half of the others. The warpgroups that multiplied for the
    indexer do this while the others make queries of attention.
    """

    attention: AttentionHeads
    indexer: IndexerHeads
    blocks = HALVES  # of a cluster, which share the heads

    @property
    def beside(self) -> int:
        """Tiles of a block that are of the indexer's weight."""
        return self.indexer.tiles // HALVES

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return self.attention.tiles + self.beside

    @property
    def shared_bytes(self) -> int:
        return self.attention.shared_bytes + ROWS // HALVES * (self.indexer.dim + PADDING) * 4

    def sent_bytes(self, lines: int) -> int:
        """Return the bytes that the blocks of a cluster send to each of them."""
        return self.attention.sent_bytes(lines) + lines // HALVES * self.indexer.dim * 4

    def begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: Any) -> Finish:
        """Load angles, so that they are there when the queries are made."""
        queries, key_queries = out
        width, count, first = self.beside * TILE, lines.count // HALVES, self.attention.tiles * WARPGROUP
        is_attention, is_indexer = machine.thread < first, machine.thread >= first
        mine = dataclasses.replace(
            lines,
            count=count,
            first=lines.first + machine.rank * count,
            output=machine.block(0) * self.indexer.dim,
            lanes=Lanes(number=machine.thread - first, count=lines.lanes.count - first, here=is_indexer),
        )
        heads = Shared.take(machine, (count, self.indexer.dim + PADDING), "f32")
        lines = dataclasses.replace(lines, lanes=Lanes(number=machine.thread, count=first, here=is_attention))
        of_attention = self.attention.begin(machine, lines, table, queries)
        of_indexer = self.indexer.begin(machine, mine, table, key_queries)

        def exchange(sums: Shared, sent: Barrier) -> None:
            units = width // VECTOR
            for rank, start in itertools.product(range(HALVES), range(0, count * units, mine.lanes.count)):
                n = mine.lanes.number + start
                inside: Condition = True if start + mine.lanes.count <= count * units else n < count * units
                line, channel = (n if inside is True else select(inside, n, 0)) // units, n % units * VECTOR
                values = sums.load_floats(line + rank * count, channel + self.attention.tiles * TILE)
                sent.send_floats(values, heads, line, channel + machine.rank * width, rank=rank, where=inside)

        def share(sums: Shared, sent: Barrier) -> None:
            with machine.when(is_attention):
                of_attention.share(sums, sent)
            with machine.when(is_indexer):
                exchange(sums, sent)

        def make(sums: Shared) -> None:
            with machine.when(is_attention):
                of_attention.make(sums)
            with machine.when(is_indexer):
                of_indexer.make(heads)

        return Finish(share, make)


QueryHeads = AttentionHeads | IndexerHeads | BothHeads
PADDING = VECTOR  # numbers after each line, so that lines begin in other banks
