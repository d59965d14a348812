"""What the kernels of products give an epilogue: the sums of a block, as lines of shared memory or in registers.

Products of few rows gather the sums of a block in shared memory, in a line for each row of x (``BlockSums``). Those of
many rows leave them in registers as a product does (``wgmma``): with rows of x along its rows where x is rounded to FP8
(``RowSums``), and with outputs along its rows where x is bf16 (``ColumnSums``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Value, select

PADDING = VECTOR  # numbers after each line of a block, so that lines begin in other banks
TILE_PITCH = 64 * 4 + 16  # bytes from one line of a warpgroup's tile to the next: in other banks

type Extras = dict[str, Buffer]  # what an epilogue takes beside the sums
type Made = Any  # what an epilogue makes: arrays or classes of rows, their shapes, or their buffers
type Begun = Any  # what an epilogue has taken of a block before its sums are there
LastSteps = Callable[[list[list[Value]]], None]  # takes a lane's sums of each eight rows of x, and stores what is made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Some outputs of a row, which one lane stores."""

    line: Value  # in shared memory, where they are gathered
    unit: Value  # which ``count`` outputs of the line
    count: int
    row: Value  # of x
    output: Value  # the first of them
    there: Condition  # whether there are such outputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """Whole warpgroups of a block."""

    number: Value  # of this lane among them
    count: int
    here: Condition = True  # whether a lane is one of them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line of a team."""

    loaded: Value  # its number, or that of another line if it does not exist
    number: Value
    row: Value  # of x
    here: Condition  # whether it is one of the block's lines
    there: Condition  # whether there is such a row, too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """What the lines are whose outputs a block gathers."""

    count: int
    rows: int  # of x
    first: Value  # row of x of the first line
    past: Value  # the first row of x that is another block's
    output: Value  # the first one of the block
    lanes: Lanes  # that make something of them

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
class Finish:
    """What is made of the lines of a block when they are stored, f32 [lines, outputs and padding]."""

    # Sends all blocks of the cluster what they need, its own one too: ``sent_bytes`` of the epilogue to each.
    share: Callable[[Shared, Barrier], None]
    make: Callable[[Shared], None]


class BlockSums(Protocol):
    """A block of a product of few rows."""

    @property
    def machine(self) -> TensorCores: ...

    @property
    def lines(self) -> Lines:
        """The lines whose outputs the block gathers: those of the rows of x of its parts of the inputs."""
        ...

    def places(self, rows_of_x: int, count: int) -> Iterator[Place]:
        """Yield what this lane stores of its warpgroup's tile, so many outputs of a row at once."""
        ...

    def gather_tile(self, eights: list[list[Value]]) -> Value:
        """Store the warpgroup's sums in lines of its own, ``TILE_PITCH`` apart. Return where they begin."""
        ...

    def with_lines(self, finish: Finish) -> LastSteps:
        """Return the last steps that gather the sums of the whole block, share, and make."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """The tiles of a product of many rows whose rows are rounded."""

    neighbours: int  # blocks of a cluster, with adjacent outputs
    rows: int  # of x
    warpgroups: int  # that multiply


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSums:
    """Sums of a tile in registers: a lane has two rows of x, and of each two adjacent outputs of every eight."""

    machine: TensorCores
    turn: Value  # the block's tile
    rows: list[tuple[Value, Value, Condition]]  # a lane's two rows: number in the tile and in x, and whether it exists
    output: Value  # first one of the sums
    sums: list[Value]  # a four for each eight outputs: two of one row, two of the other

    def pairs(self, row: int) -> list[list[Value]]:
        """Return the pairs of one of the two rows."""
        return [self.sums[n : n + 2] for n in range(2 * row, len(self.sums), 4)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnSums:
    """Sums of a tile in registers: a lane has two outputs, and of each two adjacent rows of x of every eight."""

    machine: TensorCores
    output: Value  # the first of the 16 of a warp
    column: Value  # this lane's first row of x
    there: Callable[[Value], Condition]  # whether outputs and a row of x exist
    sums: list[Value]  # a four for each eight rows
