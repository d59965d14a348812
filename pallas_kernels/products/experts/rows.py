"""Rows as experts multiply them: tokens in that order, sorted and rounded by a launch; gated rows, rounded in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from pallas_kernels.activations import GROUP, ExpertRows, PlainRows, RoundedExpertRows, rounded
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


def expert_rows[Rows: ExpertRows | RoundedExpertRows](
    x: PlainRows, kind: type[Rows], numbers: jax.Array | None = None, *, simulate: bool
) -> Rows:
    """Return rows of bf16 [M, width] as experts multiply them: all of them, or those with these numbers int32 [P].

    The width is a multiple of 128. Rounding is that of ``activations.round_rows``.
    """
    count, width = x.shape[0] if numbers is None else numbers.shape[0], x.shape[1]
    groups, state = width // GROUP, kind.shapes(count, width)

    def body(machine: TensorCores, inputs: tuple[Buffer, Buffer | None], out: Rows) -> None:
        x, numbers = inputs
        row, lane = machine.block(0) * _TEAMS + machine.thread // _TEAM, machine.thread % _TEAM
        there, loaded = row < count, []
        source = row if numbers is None else numbers.load_int(row, where=there)
        of_team = [machine.block(1) * _AT_ONCE + i for i in range(_AT_ONCE)]
        inside = [True if groups % _AT_ONCE == 0 else group < groups for group in of_team]
        for group, is_group in zip(of_team, inside, strict=True):
            columns = [group * GROUP + place for place in _places(lane)]
            where = there & is_group
            loaded.append([x.load_words(source, column, count=4, where=where) for column in columns])
        for group, is_group, quarters in zip(of_team, inside, loaded, strict=True):
            column, where = group * GROUP + lane * _LOADED, there & is_group
            if isinstance(out, ExpertRows):
                for i, pairs in enumerate(zip(*quarters, strict=True)):
                    out.values.store_words(pairs, row, column + 2 * _QUARTERS * i, where=where)
            else:
                codes, scale = rounded(machine, _TEAM, [word for quarter in quarters for word in quarter])
                out.codes.store_words(codes, row, column, where=where)
                out.scales.store_floats([scale], group, row, where=(lane == 0) & is_group)

    rows = count if isinstance(state, ExpertRows) else state.scales.shape[1]
    return launch(
        body,
        name="experts_rows",
        grid=(-(-rows // _TEAMS), -(-groups // _AT_ONCE)),
        inputs=(x.values, numbers),
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
