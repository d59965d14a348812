"""Rows that experts multiply in FP8: rounded to E4M3 with a scale for each 128 inputs, in the order of the product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import GROUP, PADDED, ExpertRows, PlainRows, rounded
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores

_LOADED = 16  # numbers of a group that a lane loads
_TEAM = GROUP // _LOADED
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_AT_ONCE = 4  # groups of a row that a team loads together
_QUARTERS, _QUARTER = 4, GROUP // 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedExpertRows:
    """Rows of activations in FP8 in the order in which experts in FP4 are multiplied, or their buffers.

    Of each 128 numbers of a row, four quarters of eight words of four, word w of quarter q is stored as word 4 w + q.
    """

    codes: Any  # uint8 [M, width], E4M3
    scales: Any  # f32 [width / 128, M rounded up to a multiple of 128]; past the last row they are those of zeros

    @classmethod
    def shapes(cls, rows: int, width: int) -> RoundedExpertRows:
        return cls(
            codes=jax.ShapeDtypeStruct((rows, width), jnp.uint8),
            scales=jax.ShapeDtypeStruct((width // GROUP, -(-rows // PADDED) * PADDED), jnp.float32),
        )

    def taken(self, numbers: jax.Array) -> RoundedExpertRows:
        """Return the rows with these numbers, int32 [P]. Codes are taken in words, as XLA moves bytes one by one."""
        (rows, width), count = self.codes.shape, numbers.shape[0]
        words = lax.bitcast_convert_type(self.codes.reshape(rows, -1, 4), jnp.uint32)[numbers]
        codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(count, width)
        scales = jnp.pad(self.scales[:, numbers], ((0, 0), (0, -count % PADDED)))
        return RoundedExpertRows(codes=codes, scales=scales)


def round_expert_rows(rows: PlainRows | ExpertRows, *, simulate: bool) -> RoundedExpertRows:
    """Round rows of bf16 [M, width], with a width that is a multiple of 128, as ``activations.round_rows`` does."""
    (count, width), is_plain = rows.shape, isinstance(rows, PlainRows)
    groups, state = width // GROUP, RoundedExpertRows.shapes(count, width)

    def body(machine: TensorCores, x: Buffer, out: RoundedExpertRows) -> None:
        row, lane = machine.block(0) * _TEAMS + machine.thread // _TEAM, machine.thread % _TEAM
        numbers = [machine.block(1) * _AT_ONCE + i for i in range(_AT_ONCE)]
        inside = [True if groups % _AT_ONCE == 0 else number < groups for number in numbers]
        there, loaded = row < count, []
        for number, is_group in zip(numbers, inside, strict=True):
            first, where = number * GROUP, there & is_group
            if is_plain:
                places = [first + quarter * _QUARTER + lane * 4 for quarter in range(_QUARTERS)]
                loaded.append([word for at in places for word in x.load_words(row, at, count=4, where=where)])
            else:
                at = first + lane * _LOADED
                one, other = (x.load_words(row, at + further, count=8, where=where) for further in (0, 8))
                loaded.append([word for pair in zip(one, other, strict=True) for word in pair])
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
