"""The launch that makes the rows which experts multiply: those of tokens in their order, sorted and rounded."""

from __future__ import annotations

import jax

from pallas_kernels.activations import GROUP, ExpertRows, PlainRows, RoundedExpertRows
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR

_TEAM = RoundedExpertRows.TEAM
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_AT_ONCE = 4  # groups of a row that a team loads together


def expert_rows[Rows: ExpertRows | RoundedExpertRows](
    x: PlainRows, kind: type[Rows], pairs: jax.Array | None = None, picks: int = 1, *, simulate: bool
) -> Rows:
    """Return rows of bf16 [M, width] as experts multiply them.

    Args:
      x: of tokens. The width is a multiple of 128.
      kind: the class of the result. Rounding is that of ``activations.round_rows``.
      pairs: int32 [P] numbers of pairs of a token and a pick, whose tokens' rows are the result; None for all rows.
      picks: of a token.
      simulate: as for ``launch``.
    """
    count, width = x.shape[0] if pairs is None else pairs.shape[0], x.shape[1]
    groups = width // GROUP

    def body(machine: TensorCores, inputs: tuple[Buffer, Buffer | None], out: Rows) -> None:
        x, pairs = inputs
        row, lane = machine.block(0) * _TEAMS + machine.thread // _TEAM, machine.thread % _TEAM
        there, loaded = row < count, []
        token = row if pairs is None else pairs.load_int(row, where=there) // picks
        of_team = [machine.block(1) * _AT_ONCE + i for i in range(_AT_ONCE)]
        wheres = [there if groups % _AT_ONCE == 0 else there & (group < groups) for group in of_team]
        for group, where in zip(of_team, wheres, strict=True):
            columns = [group * GROUP + place for place in RoundedExpertRows.places(lane)]
            loaded.append([x.load_words(token, column, count=VECTOR, where=where) for column in columns])
        for group, where, quarters in zip(of_team, wheres, loaded, strict=True):
            out.store_group(machine, [word for quarter in quarters for word in quarter], row, group, where)

    return launch(
        body,
        name="experts_rows",
        grid=(-(-count // _TEAMS), -(-groups // _AT_ONCE)),
        inputs=(x.values, pairs),
        state=kind.shapes(count, width),
        simulate=simulate,
    )
