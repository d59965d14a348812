"""Queries of the indexer from the sums of a product whose outputs are heads: rope, Hadamard transform and rounding.

    q = round(hadamard(rope(sums)))       in the keys' format, over the outputs of a head, for each row of x

A warpgroup has whole heads of its rows, so that nobody waits for other warps. The four lanes of a quad share a row, and
have two adjacent outputs of each eight. Everything is computed in the order of ``queries.indexer_queries``, which so
gives the same bytes for the same sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.formats import Fp4Keys
from pallas_kernels.language.lanes import Team, fold, maximum, quad_transposed
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Index, Value, select
from pallas_kernels.rows import magnitude

DIM = 128  # outputs of a head
_QUAD, _EIGHT = 4, 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyHeads:
    """The heads of a product's outputs that become queries of the indexer."""

    keys: Fp4Keys

    @property
    def scale_bytes(self) -> int:
        """Bytes of a head's scales."""
        return DIM // self.keys.per_scale


def hadamard(machine: TensorCores, pairs: list[list[Value]]) -> list[list[Value]]:
    """Apply the normalised Walsh-Hadamard transform to a head, of which a lane has a pair of each eight.

    A butterfly per bit of an output's number, from the lowest on: bit 0 is the place in the pair, bits 1 and 2 are the
    lane, and the others the number of the eight.
    """
    pairs = [[a + b, a - b] for a, b in pairs]
    for distance in (1, 2):
        sign = select((machine.thread & distance) > 0, machine.constant(-1.0, "f32"), 1.0)
        pairs = [[machine.fma(x, sign, machine.shuffle_xor(x, distance)) for x in pair] for pair in pairs]
    distance = 1
    while distance < len(pairs):
        for low in range(len(pairs)):
            if not low & distance:
                first, second = pairs[low], pairs[low | distance]
                pairs[low] = [a + b for a, b in zip(first, second, strict=True)]
                pairs[low | distance] = [a - b for a, b in zip(first, second, strict=True)]
        distance *= 2
    return [[x * DIM**-0.5 for x in pair] for pair in pairs]


def store_head(
    machine: TensorCores,
    heads: KeyHeads,
    pairs: list[list[Value]],
    out: Any,
    place: tuple[Index, Index],
    where: Condition,
) -> None:
    """Round a head and store it in ``out``, rows [M, all heads].

    Args:
      machine: of the values.
      heads: the format.
      pairs: after the Hadamard transform, of which a lane has a pair of each eight.
      out: pytree ``codes scale`` of buffers.
      place: row, and number of the head.
      where: whether the row exists.
    """
    (row, head), quarter, team = place, machine.thread % _QUAD, Team(machine, _QUAD)
    scales, codes, of_group = [], [], heads.keys.per_scale // _EIGHT
    for first in range(0, len(pairs), of_group):
        values = [x for pair in pairs[first : first + of_group] for x in pair]
        amax = machine.bits(fold(maximum, [magnitude(x) for x in values]))
        scale, words = heads.keys.packed(team.neighbours(maximum, amax, _QUAD), values)
        scales.append(scale)
        codes += words
    if of_group < VECTOR:  # words of four codes
        codes = [low | (high << 16) for low, high in zip(codes[::2], codes[1::2], strict=True)]
    words = quad_rows(machine, codes)
    out.codes.store_words(words, row, head * (DIM // 2) + quarter * 16, where=where)
    of_head = [packed(scales[n : n + VECTOR]) for n in range(0, len(scales), VECTOR)]
    out.scale.store_words(of_head, row, head * heads.scale_bytes, where=where & (quarter == 0))


def packed(bytes: list[Value]) -> Value:
    """Return up to four bytes in a word, the first in its low bits."""
    return fold(lambda a, b: a | b, [byte << 8 * i if i else byte for i, byte in enumerate(bytes)])


def quad_rows(machine: TensorCores, words: list[Value]) -> list[Value]:
    """Transpose bytes of a quad: byte n of a lane's 16 becomes byte 4 n + lane of the quad's 64.

    A lane gets 16 adjacent ones of these.
    """
    a, b, c, d = quad_transposed(machine, words)
    halves = [[machine.permute_bytes(*pair, selector) for pair in ((a, b), (c, d))] for selector in (0x5140, 0x7362)]
    return [machine.permute_bytes(low, high, selector) for low, high in halves for selector in (0x5410, 0x7632)]
