"""The picks of a token, by one warp: the experts of the largest scores, or those of a table, and their weights.

Each lane has adjacent experts. In a round the warp finds the largest score, and the lowest number of an expert that has
it. Then lane n has the n-th pick, and finds its place by the numbers of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.language.lanes import Buffer, Team, add, fold, maximum
from pallas_kernels.language.machine import WARP, Machine
from pallas_kernels.language.values import VECTOR, Condition, Value, select

MAX_PICKS = 16
_LEAST, _LARGEST = -(1 << 31), (1 << 31) - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PickInputs:
    """What decides beside the scores. Either ``bias`` is there, or ``table`` and ``ids``."""

    real: Any  # bool [M], False on padding
    bias: Any = None  # f32 [E], added to scores to pick, not to weigh
    table: Any = None  # int32 [V, k], the experts of each token of the vocabulary
    ids: Any = None  # int32 [M], the tokens; a number outside of the table counts as its first or last one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """The experts of each token, in ascending order of their numbers."""

    experts: Any  # int32 [M, k]; E on padding
    weights: Any  # f32 [M, k]; 0 on padding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picker:
    """Picks for one token at a time, as all lanes of a warp."""

    machine: Machine
    scores: Buffer  # f32 [M, E], of which ``score`` makes scores
    inputs: PickInputs
    out: Picked
    scale: float  # of the weights
    score: Callable[[Value], Value]

    @property
    def lane(self) -> Value:
        return self.machine.thread % WARP

    @property
    def picks(self) -> int:
        return self.out.experts.shape[1]

    def pick(self, token: Value) -> None:
        """Store the picks of a token that exists."""
        machine, experts = self.machine, self.scores.shape[1]
        is_real = self.inputs.real.load_bytes(token, count=1) != 0
        mine, place = self._largest(token) if self.inputs.table is None else self._listed(token)
        has_pick = self.lane < self.picks
        exists = has_pick & (mine >= 0) & (mine < experts)  # a table may name others, whose weights are NaN
        (value,) = self.scores.load_floats(token, mine, count=1, where=exists, otherwise=float("nan"))
        weight = select(has_pick, self.score(value), 0.0)
        total = Team(machine, WARP).neighbours(add, weight, MAX_PICKS)
        weight = machine.divide(weight, total) * self.scale
        self.out.experts.store_int(select(is_real, mine, experts), token, place, where=has_pick)
        self.out.weights.store_floats([select(is_real, weight, 0.0)], token, place, where=has_pick)

    def _listed(self, token: Value) -> tuple[Value, Value]:
        """Return this lane's pick by the table, and its place among the token's."""
        table, ids = self.inputs.table, self.inputs.ids
        row = ids.load_int(token).maximum(0).minimum(table.shape[0] - 1)
        mine = table.load_int(row, self.lane, where=self.lane < self.picks)
        place = self.machine.constant(0, "i32")
        for n in range(self.picks):
            other = table.load_int(row, n)
            place = place + self._one((other < mine) | ((other == mine) & (self.lane > n)))
        return mine, place

    def _one(self, condition: Value) -> Value:
        return select(condition, self.machine.constant(1, "i32"), 0)

    def _largest(self, token: Value) -> tuple[Value, Value]:
        """Return this lane's pick, and its place: its rank among equal and larger ones is the lane's number.

        Of equal sums of score and bias the lower number comes first, and NaN comes before all.
        """
        machine, experts = self.machine, self.scores.shape[1]
        count = -(-experts // (WARP * VECTOR)) * VECTOR  # of a lane
        together = VECTOR if experts % VECTOR == 0 else 1
        ranks: list[Value] = []
        first = self.lane * count
        for i in range(0, count, together):
            there: Condition = True if (WARP - 1) * count + i < experts else first + i < experts
            values = self.scores.load_floats(token, first + i, count=together, where=there)
            shifts = self.inputs.bias.load_floats(first + i, count=together, where=there)
            for value, shift in zip(values, shifts, strict=True):
                ranks.append(select(there, self._rank(self.score(value) + shift), _LEAST))

        def find(n: Value, carry: tuple[list[Value], Value, Value]) -> tuple[list[Value], Value, Value]:
            ranks, mine, place = carry
            best = machine.reduce_warp("max", fold(maximum, ranks))
            own = machine.constant(_LARGEST, "i32")
            for i, rank in reversed(list(enumerate(ranks))):
                own = select(rank == best, first + i, own)
            found = machine.reduce_warp("min", own)
            ranks = [select(first + i == found, _LEAST, rank) for i, rank in enumerate(ranks)]
            # Earlier picks with a higher number move up, and this one comes after those with a lower one.
            lower = machine.reduce_warp("add", self._one((self.lane < n) & (mine < found)))
            place = place + self._one((self.lane < n) & (mine > found))
            return ranks, select(self.lane == n, found, mine), select(self.lane == n, lower, place)

        zero = machine.constant(0, "i32")
        return machine.loop(self.picks, find, (ranks, zero, zero), rolled=True)[1:]

    def _rank(self, x: Value) -> Value:
        """Return an i32 above ``_LEAST`` with the order of an f32, and NaN above all others."""
        bits = self.machine.bits(x)
        return select(x == x, select(bits < 0, bits ^ _LARGEST, bits), _LARGEST)
