"""Rows of bf16, rounded to E4M3 with a scale for each row and 128 inputs, as products of many rows take them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.products.activations import LOADED, rounded

GROUP = 128  # inputs that share a scale
_TEAM = GROUP // LOADED  # lanes that hold them
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_AT_ONCE = 4  # groups of a row that a team loads together
PADDED = 128  # rows of scales are padded to a multiple of this


def round_rows(x: jax.Array, *, simulate: bool = False) -> tuple[jax.Array, jax.Array]:
    """Round rows of bf16 [M, inputs], inputs a multiple of 128.

    Returns:
      Codes, uint8 [M, inputs], and scales, f32 [inputs / 128, M rounded up to a multiple of 128]. Those of rows past
      the last one are those of rows of zeros.
    """
    rows, width = x.shape
    groups, padded = width // GROUP, -(-rows // PADDED) * PADDED

    def body(machine: Machine, x: Buffer, out: Any) -> None:
        codes, scales = out
        team = Team(machine, _TEAM)
        row = machine.block(0) * _TEAMS + machine.thread // _TEAM
        there, unit = row < rows, machine.thread % _TEAM * LOADED
        numbers = [machine.block(1) * _AT_ONCE + i for i in range(_AT_ONCE)]
        inside = [True if groups % _AT_ONCE == 0 else number < groups for number in numbers]
        loaded = [
            x.load_words(row, number * GROUP + unit, count=LOADED, where=there & is_group)
            for number, is_group in zip(numbers, inside, strict=True)
        ]
        for number, is_group, words in zip(numbers, inside, loaded, strict=True):
            of_lane, scale = rounded(team, words)
            codes.store_words(of_lane, row, number * GROUP + unit, where=there & is_group)
            scales.store_floats([scale], number, row, where=(machine.thread % _TEAM == 0) & is_group)

    return launch(
        body,
        name="round_rows",
        grid=(padded // _TEAMS, -(-groups // _AT_ONCE)),
        inputs=x,
        state=(
            jax.ShapeDtypeStruct((rows, width), jnp.uint8),
            jax.ShapeDtypeStruct((groups, padded), jnp.float32),
        ),
        simulate=simulate,
    )
