"""Rows that experts multiply in FP8: tokens, rounded by a launch, and gated rows, which their own launch rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels.activations import GROUP, PlainRows, RoundedExpertRows, rounded
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Value

_LOADED = 16  # numbers of a group that a lane loads
_TEAM = GROUP // _LOADED
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_AT_ONCE = 4  # groups of a row that a team loads together
_QUARTERS, _QUARTER = 4, GROUP // 4
_APART = 8  # numbers between rows in shared memory, so that lanes that store those of adjacent rows use all banks


def _places(lane: Value) -> list[Value]:
    """Return where a lane of a team finds its numbers of a group, four at each place."""
    return [lane * 4 + quarter * _QUARTER for quarter in range(_QUARTERS)]


def round_expert_rows(rows: PlainRows, *, simulate: bool) -> RoundedExpertRows:
    """Round rows of bf16 [M, width], with a width that is a multiple of 128, as ``activations.round_rows`` does."""
    count, width = rows.shape
    groups, state = width // GROUP, RoundedExpertRows.shapes(count, width)

    def body(machine: TensorCores, x: Buffer, out: RoundedExpertRows) -> None:
        row, lane = machine.block(0) * _TEAMS + machine.thread // _TEAM, machine.thread % _TEAM
        numbers = [machine.block(1) * _AT_ONCE + i for i in range(_AT_ONCE)]
        inside = [True if groups % _AT_ONCE == 0 else number < groups for number in numbers]
        there, loaded = row < count, []
        for number, is_group in zip(numbers, inside, strict=True):
            columns = [number * GROUP + place for place in _places(lane)]
            where = there & is_group
            loaded.append([word for column in columns for word in x.load_words(row, column, count=4, where=where)])
        for number, is_group, words in zip(numbers, inside, loaded, strict=True):
            codes, scale = rounded(machine, _TEAM, words)
            out.codes.store_words(codes, row, number * GROUP + lane * _LOADED, where=there & is_group)
            out.scales.store_floats([scale], number, row, where=(lane == 0) & is_group)

    return launch(
        body,
        name="experts_round",
        grid=(state.scales.shape[1] // _TEAMS, -(-groups // _AT_ONCE)),
        inputs=rows.values,
        state=state,
        simulate=simulate,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedTile:
    """Gated rows of a unit in shared memory, where each row is 128 numbers: a group, which has a scale.

    For each unit, the warps that multiply ``open`` the tile, store their numbers in it, and round it together.
    """

    values: Shared  # bf16 [rows, 128 and more]
    arrived: Barrier  # of these warps, two phases for each unit

    @staticmethod
    def shared_bytes(rows: int) -> int:
        return rows * (GROUP + _APART) * 2

    @classmethod
    def take(cls, machine: TensorCores, rows: int, warps: int) -> GatedTile:
        values = Shared.take(machine, (rows, GROUP + _APART), "u16")
        return cls(values=values, arrived=Barrier.take(machine, warps))

    @staticmethod
    def column(number: Value) -> Value:
        """Return where a number of a row is stored, as of other classes of rows."""
        return number

    def open(self) -> None:
        """Wait until all warps have read what is in the tile."""
        self.arrived.arrive()
        self.arrived.wait(0)

    def round(self, row_of: Callable[[Value], Value], group: Value, out: RoundedExpertRows) -> None:
        """Round all rows when they are complete, and store each as a group of the row that it is of ``out``, if any."""
        machine, rows = self.arrived.machine, self.values.shape[0]
        self.arrived.arrive()
        self.arrived.wait(1)
        teams = self.arrived.warps * WARP // _TEAM
        team, lane = machine.thread // _TEAM % teams, machine.thread % _TEAM
        for first in range(0, rows, teams):
            is_row: Condition = True if first + teams <= rows else team + first < rows
            row = (team + first).minimum(rows - 1)
            target = row_of(row)
            words = [word for place in _places(lane) for word in self.values.load_words(row, place, count=4)]
            codes, scale = rounded(machine, _TEAM, words)
            where = (target >= 0) & is_row
            out.codes.store_words(codes, target, group * GROUP + lane * _LOADED, where=where)
            out.scales.store_floats([scale], group, target, where=(lane == 0) & where)
