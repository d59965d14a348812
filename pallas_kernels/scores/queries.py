"""A request's queries and head weights as operands in shared memory, used by all warpgroups of a block.

For each token there are two products. The first multiplies keys [64, K] by queries [64 heads, K]. The second multiplies
the positive part of the result, in f16 [64, 64 heads], by the weights [8, 64 heads]. Row 2 i of the weights holds them
rounded down to f16, and row 2 i + 1 the remainder.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer, fold, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Condition, Index, Value
from pallas_kernels.rows import magnitude_bits
from pallas_kernels.scores.fp4 import DIM, QUARTER_BYTES, QUARTERS, Fp4
from pallas_kernels.scores.inputs import HEADS, ScoreInputs

SUM_COLUMNS = 8  # columns of the second product
_POWER = 0xFF << 23  # mask for the power of two in an f32
_LARGEST_POWER = 253 << 23  # the largest power whose inverse is a normal number
_F16_BITS = -1 << 13  # mask for the bits of an f32 that f16 has too


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """A lane's part of a request's queries, being loaded."""

    lane: Value
    codes: list[list[Value]]
    scales: list[list[Value]]
    weights: list[list[Value]]
    weight_scales: list[list[list[Value]]]


class Queries:
    """The operands in shared memory for a request's queries."""

    def __init__(self, inputs: ScoreInputs[Buffer], fp4: Fp4, warpgroups: int):
        self.machine, self.inputs, self.fp4 = fp4.machine, inputs, fp4
        self.tokens, self.lanes = inputs.visible.shape[1], warpgroups * WARPGROUP
        self.operand = TypedTile.take(self.machine, HEADS, DIM, fp4.dtype, copies=self.tokens)
        self.weights = TypedTile.take(self.machine, SUM_COLUMNS, HEADS, "f16", copies=self.tokens)
        self._scales = Shared.take(self.machine, (self.tokens,), "f32")

    @staticmethod
    def shared_bytes(fp4: type[Fp4], tokens: int) -> int:
        return tokens * (HEADS * fp4.row_bytes + SUM_COLUMNS * HEADS * 2 + 16) + 1024

    def scale(self, t: Index) -> Value:
        """Return the factor for a token's sums, besides the scale of the key's row."""
        return self._scales.load_floats(t, count=1)[0]

    # The work is divided in turn among all lanes or warps of the block.
    def _quarters(self, lane: Value) -> list[tuple[Value, Value, Condition]]:
        """Return token, head, and whether they exist, for each quarter of a query that this lane unpacks."""
        total = self.tokens * HEADS * QUARTERS
        numbers = [lane + first for first in range(0, total, self.lanes)]
        there = [True if total % self.lanes == 0 else n < total for n in numbers]
        return [
            (n // (HEADS * QUARTERS), n // QUARTERS % HEADS, inside) for n, inside in zip(numbers, there, strict=True)
        ]

    def _tokens(self, lane: Value) -> list[tuple[Value, Condition]]:
        """Return the tokens whose weights this warp prepares."""
        warps = self.lanes // WARP
        numbers = [lane // WARP + first for first in range(0, self.tokens, warps)]
        return [(t, True if self.tokens % warps == 0 else t < self.tokens) for t in numbers]

    def _heads(self, lane: Value) -> list[Value]:
        return [lane % WARP + first for first in range(0, HEADS, WARP)]

    def load(self, b: Value, lane: Value) -> _Loaded:
        """Start to load a batch row's queries. lane: ``machine.thread``, from which ``store`` computes addresses."""
        queries, quarter = self.inputs.queries, self.fp4.quarter * QUARTER_BYTES
        quarters, tokens, heads = self._quarters(lane), self._tokens(lane), self._heads(lane)

        def scales(t: Value, head: Value, where: Condition) -> list[Value]:
            assert queries.scale is not None
            return queries.scale.load_words(b, t, head, 0, count=self.fp4.scale_bytes, where=where)

        return _Loaded(
            lane,
            [queries.codes.load_words(b, t, h, quarter, count=QUARTER_BYTES, where=there) for t, h, there in quarters],
            [scales(*place) for place in quarters],
            [[self.inputs.weights.load_floats(b, t, h, count=1, where=there)[0] for h in heads] for t, there in tokens],
            [[scales(t, h, there) for h in heads] for t, there in tokens],
        )

    def store(self, loaded: _Loaded) -> None:
        """Unpack and store the operands. All lanes of the block must call this; it ends with a barrier."""
        machine, lane = self.machine, loaded.lane
        for (t, head, there), codes, scales in zip(self._quarters(lane), loaded.codes, loaded.scales, strict=True):
            tile = self.operand[t]
            for i, word in enumerate(self.fp4.query(codes, scales)):
                machine.store_shared(tile.unit(head, i) + self.fp4.quarter * 4, [word], 4, there)
        for (t, there), weights, scales in zip(self._tokens(lane), loaded.weights, loaded.weight_scales, strict=True):
            self._store_weights(lane, t, weights, scales, there)
        machine.fence_shared()
        machine.barrier("block")

    def _store_weights(
        self, lane: Value, t: Value, weights: list[Value], scales: list[list[Value]], there: Condition
    ) -> None:
        """Store weights relative to a power of two below the largest.

        If a weight is not finite, the token's sums become NaN.
        """
        machine, tile = self.machine, self.weights[t]
        weights = [w * self.fp4.query_scale(of_head) for w, of_head in zip(weights, scales, strict=True)]
        peak = machine.reduce_warp("max", fold(maximum, [magnitude_bits(w) for w in weights]))
        power = (peak & _POWER).minimum(_LARGEST_POWER)
        inverse = machine.from_bits((254 << 23) - power)
        scale = machine.from_bits(power) * self.fp4.unit
        self._scales.store_floats([scale], t, where=there & (lane % WARP == 0))
        for head, w in zip(self._heads(lane), weights, strict=True):
            relative = w * inverse
            high = machine.from_bits(machine.bits(relative) & _F16_BITS)
            parts = machine.to_f16(high, relative - high)
            for row in range(SUM_COLUMNS):
                at = tile.unit(machine.constant(row, "i32"), head // 8) + head % 8 * 2
                machine.store_shared(at, [parts >> 16 if row % 2 else parts], 2, there)
