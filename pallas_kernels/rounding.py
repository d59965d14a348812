"""Rows of activations that are rounded to FP8, as inputs of products: E4M3, with a scale for each 128 of a row.

    scale = the power of two from max(amax, 1e-4) / 448 up,      code = e4m3(x / scale)

``round_rows`` does it in a launch of its own. Kernels whose results enter such a product write them like this
themselves, from what they hold after their own products (``round_group``). Both give the same bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, Team, fold, maximum, quad_transposed
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Index, Value
from pallas_kernels.needed import is_needed
from pallas_kernels.rows import from_bf16, from_ue8m0, power_of_two_scale

GROUP = 128  # numbers of a row that share a scale
PADDED = 128  # rows of scales are padded to a multiple of this
_SMALLEST_AMAX = 0x38D1B717  # 1e-4, the bits of an f32
_LARGEST_E4M3 = 448.0
_LOADED = 8  # bf16 that a lane loads at once
_TEAM = GROUP // _LOADED  # lanes that hold a group
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_GROUPS_AT_ONCE = 4  # groups of a row that a team loads together
_QUAD = 4  # lanes that share a row of a product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """M rows of activations in FP8, or their buffers."""

    codes: Any  # uint8 [M, width], E4M3
    scales: Any  # f32 [width / 128, M rounded up to a multiple of 128]; past the last row they are those of zeros

    @classmethod
    def shapes(cls, rows: int, width: int) -> RoundedRows:
        """Return the shapes for so many rows. Raises ValueError for a width that is no multiple of 128."""
        if width % GROUP:
            raise ValueError(f"rounded rows must have a multiple of {GROUP} numbers, got {width}")
        return cls(
            codes=jax.ShapeDtypeStruct((rows, width), jnp.uint8),
            scales=jax.ShapeDtypeStruct((width // GROUP, -(-rows // PADDED) * PADDED), jnp.float32),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape


def rounded(machine: TensorCores, lanes: int, words: list[Value]) -> tuple[list[Value], Value]:
    """Round bf16 that a team of lanes holds to E4M3, with one scale.

    Returns this lane's codes, four to a word, and the scale.
    """
    # Magnitudes of bf16 have the order of their bits, and NaN is above all others.
    both = fold(machine.maximum_u16, [word & 0x7FFF7FFF for word in words])
    (peak,) = Team(machine, lanes).reduce((maximum, (both << 16).maximum(both & -65536)))
    byte = power_of_two_scale(peak.maximum(_SMALLEST_AMAX), _LARGEST_E4M3)
    inverse = machine.bits(from_ue8m0((254 - byte).maximum(0)))  # a power of two, which bf16 holds
    twice = (inverse >> 16) | inverse
    # Exact where the result is not subnormal, and those have the code 0.
    scaled = [machine.multiply_bf16(word, twice) for word in words]
    values = [value for word in scaled for value in from_bf16(word)]
    codes = [machine.to_e4m3(values[i : i + 4]) for i in range(0, len(values), 4)]
    return codes, from_ue8m0(byte)


def round_group(machine: TensorCores, pairs: list[list[Value]]) -> tuple[list[list[Value]], Value]:
    """Round 128 adjacent numbers of a row, as they are spread over a quad of lanes after a product (``wgmma``).

    Args:
      machine: of the values.
      pairs: f32, the two adjacent numbers of each eight that the lane has. They are rounded to bf16 first.

    Returns:
      For each half of the group four words: the codes of a quarter of it, of which the quad's n-th lane has the n-th.
      And the scale.
    """
    codes, scale = rounded(machine, _QUAD, [machine.to_bf16(*pair) for pair in pairs])
    halves = []
    for half in (codes[:4], codes[4:]):
        # A word has a lane's pairs of two eights. Now each lane gets those of two eights from all lanes.
        a, b, c, d = quad_transposed(machine, half)
        eights = (0x5410, 0x7632)  # the bytes of two words that belong to the first eight, or to the second
        halves.append([machine.permute_bytes(*two, eight) for eight in eights for two in ((a, b), (c, d))])
    return halves, scale


def store_group(
    machine: TensorCores,
    out: RoundedRows,
    pairs: list[list[Value]],
    row: Value,
    group: Index,
    where: Condition = True,
) -> None:
    """Round and store a group of a row, by its number in the row. For ``pairs`` see ``round_group``.

    The scale is also stored where the row does not exist, as ``where`` says.
    """
    halves, scale = round_group(machine, pairs)
    quarter = machine.thread % _QUAD
    for n, words in enumerate(halves):
        out.codes.store_words(words, row, group * GROUP + (quarter * 16 + GROUP // 2 * n), where=where)
    out.scales.store_floats([scale], group, row, where=quarter == 0)


def round_rows(x: jax.Array, *, needed: jax.Array | None = None, simulate: bool = False) -> RoundedRows:
    """Round rows of bf16 [M, width], with a width that is a multiple of 128.

    ``needed`` bool [M] or [1, M] says which rows anyone reads, None for all; others may be anything.
    """
    rows, width = x.shape
    needed = None if needed is None else needed.reshape(-1)
    groups, state = width // GROUP, RoundedRows.shapes(rows, width)

    def body(machine: TensorCores, inputs: tuple[Buffer, Buffer | None], out: RoundedRows) -> None:
        x, needed = inputs
        row = machine.block(0) * _TEAMS + machine.thread // _TEAM
        there, unit = is_needed(needed, row, row < rows), machine.thread % _TEAM * _LOADED
        numbers = [machine.block(1) * _GROUPS_AT_ONCE + i for i in range(_GROUPS_AT_ONCE)]
        inside = [True if groups % _GROUPS_AT_ONCE == 0 else number < groups for number in numbers]
        loaded = [
            x.load_words(row, number * GROUP + unit, count=_LOADED, where=there & is_group)
            for number, is_group in zip(numbers, inside, strict=True)
        ]
        for number, is_group, words in zip(numbers, inside, loaded, strict=True):
            of_lane, scale = rounded(machine, _TEAM, words)
            out.codes.store_words(of_lane, row, number * GROUP + unit, where=there & is_group)
            out.scales.store_floats([scale], number, row, where=(machine.thread % _TEAM == 0) & is_group)

    return launch(
        body,
        name="round_rows",
        grid=(state.scales.shape[1] // _TEAMS, -(-groups // _GROUPS_AT_ONCE)),
        inputs=(x, needed),
        state=state,
        simulate=simulate,
    )
