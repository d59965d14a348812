"""Queries made of the sums of a product of few rows, whose outputs are heads, instead of storing these sums.

    AttentionHeads   f16(rope(sums / rms(sums)))                   as ``attention_queries`` does
    IndexerHeads     round(hadamard(rope(sums))) in the keys' format  as ``indexer_queries`` does

The outputs of a block are gathered in shared memory, a line for each row of x. Then the lanes are divided over the
heads of these lines as in ``pallas_kernels.queries``. A head of attention has more outputs than a block. So the two
blocks of a cluster compute half a head each, and tell each other their sums of squares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.formats import Fp4Keys
from pallas_kernels.language.lanes import Buffer, Row, Team, add, fold
from pallas_kernels.language.machine import VECTOR, WARP, Channels, Condition, Value, negate, select
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.split import ROWS, TILE
from pallas_kernels.queries import INDEXER_LANES
from pallas_kernels.rows import Angles, hadamard, load_angles, rope

HALVES = 2  # blocks that share a head of attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """The gathered outputs of a block."""

    sums: Shared  # f32 [lines, outputs and padding]
    count: int
    rows: int  # of x
    first: Value  # row of x of the first line
    past: Value  # the first row of x that is another block's
    output: Value  # the first one of the block

    def of(self, number: Value, *, is_there: Condition) -> tuple[Value, Value, Condition]:
        """Return a line that may be loaded, its row of x, and whether that is to be stored."""
        row = self.first + number
        line = number if is_there is True else select(is_there, number, 0)
        return line, row, is_there & (row < self.past) & (row < self.rows)


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

    def finish(self, machine: TensorCores, lanes: int, angles: Buffer, out: Buffer) -> Callable[[Lines], None]:
        """Take shared memory. The result makes the queries, when the block's lines are stored, of so many lanes."""
        squares = Shared.take(machine, (HALVES, ROWS), "f32")
        return lambda lines: self._store(machine, lanes // WARP, lines, squares, angles, out)

    def _store(
        self, machine: TensorCores, warps: int, lines: Lines, squares: Shared, table: Buffer, out: Buffer
    ) -> None:
        row, warp = Row(Team(machine, WARP), self.dim // HALVES), machine.thread // WARP
        held: list[tuple[Value, Value, Condition, Channels, Angles]] = []
        for start in range(0, lines.count, warps):
            number = warp + start
            line, at, there = lines.of(number, is_there=start + warps <= lines.count or number < lines.count)
            held.append((line, at, there, [], self._angles(machine, row, table, at, there)))
        for n, (line, _, there, values, _) in enumerate(held):
            values += [lines.sums.load_floats(line, channel) for channel in row.channel]
            (total,) = row.team.reduce((add, fold(add, [value * value for step in values for value in step])))
            first = row.team.lane == 0
            for rank in range(HALVES):
                squares.store_floats([total], machine.rank, warp + n * warps, where=there & first, rank=rank)
        machine.barrier("cluster")
        for line, at, there, values, angles in held:
            total = fold(add, [squares.load_floats(rank, line, count=1)[0] for rank in range(HALVES)])
            inverse_rms = machine.inverse_sqrt(total * (1 / self.dim) + self.eps)
            turned = rope(row.map(lambda value, by=inverse_rms: value * by, values), angles)
            for channel, (a, b, c, d) in zip(row.channel, turned, strict=True):
                words = [machine.to_f16(a, b), machine.to_f16(c, d)]
                out.store_words(words, at, lines.output + channel, where=there)

    def _angles(self, machine: TensorCores, row: Row, table: Buffer, at: Value, there: Condition) -> Angles:
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
            load = [table.load_floats(at, pair + n, count=2, where=there & turns) for n in (0, pairs)]
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

    def finish(self, machine: TensorCores, lanes: int, angles: Buffer, out: Any) -> Callable[[Lines], None]:
        """Return what makes the queries, when the block's lines are stored, with so many lanes."""
        return lambda lines: self._store(machine, lanes // INDEXER_LANES, lines, angles, out)

    def _store(self, machine: TensorCores, teams: int, lines: Lines, table: Buffer, out: Any) -> None:
        row, team = Row(Team(machine, INDEXER_LANES), self.dim), machine.thread // INDEXER_LANES
        heads = out.codes.shape[0] // lines.rows
        for start in range(0, lines.count, teams):
            number = team + start
            line, at, there = lines.of(number, is_there=start + teams <= lines.count or number < lines.count)
            angles = load_angles(row, table, at, where=there)
            values = [lines.sums.load_floats(line, channel) for channel in row.channel]
            head = at * heads + lines.output // self.dim
            self.keys.store(row, hadamard(row, rope(values, angles)), out, head, where=there)


QueryHeads = AttentionHeads | IndexerHeads
PADDING = VECTOR  # numbers after each line, so that lines begin in other banks
