"""The picks of a token, by one warp: the experts of the largest scores, or those of a table, and their weights.

Each lane has adjacent experts. In a round the warp finds the largest score, and the lowest number of an expert that has
it. Then lane n has the n-th pick, and finds its place by the numbers of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a warp loads for a token before there are scores, which the loads would otherwise delay."""

    real: Value
    shifts: list[Value]  # the bias of the lane's experts; without a bias all picks of the token


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

    @property
    def _experts(self) -> int:
        return self.scores.shape[1]

    @property
    def _count(self) -> int:
        """Experts of a lane."""
        return -(-self._experts // (WARP * VECTOR)) * VECTOR

    def know(self, token: Value, where: Condition = True) -> Known:
        """Load what there is for a token, which exists if the condition holds."""
        inputs = self.inputs
        real = inputs.real.load_bytes(token, count=1, where=where)
        if inputs.table is not None:
            row = inputs.ids.load_int(token, where=where).maximum(0).minimum(inputs.table.shape[0] - 1)
            return Known(real=real, shifts=[inputs.table.load_int(row, n, where=where) for n in range(self.picks)])
        shifts = [x for first, there, n in self._fours() for x in inputs.bias.load_floats(first, count=n, where=there)]
        return Known(real=real, shifts=shifts)

    def _fours(self) -> Iterator[tuple[Value, Condition, int]]:
        """Yield the first of some adjacent experts of this lane, whether they exist, and their number."""
        count, together = self._count, VECTOR if self._experts % VECTOR == 0 else 1
        for i in range(0, count, together):
            first = self.lane * count + i
            yield first, True if (WARP - 1) * count + i < self._experts else first < self._experts, together

    def pick(self, token: Value, known: Known) -> tuple[Value, Value]:
        """Store the picks of a token that exists. Returns this lane's pick, and its place among the token's."""
        mine, place = self._largest(token, known) if self.inputs.table is None else self._listed(known)
        expert = select(known.real != 0, mine, self._experts)
        self.out.experts.store_int(expert, token, place, where=self.lane < self.picks)
        return mine, place

    def weigh(self, token: Value, known: Known, mine: Value, place: Value) -> None:
        """Store the weights of a token's picks."""
        machine, has_pick = self.machine, self.lane < self.picks
        exists = has_pick & (mine >= 0) & (mine < self._experts)  # a table may name others, whose weights are NaN
        (value,) = self.scores.load_floats(token, mine, count=1, where=exists, otherwise=float("nan"))
        weight = select(has_pick, self.score(value), 0.0)
        total = Team(machine, WARP).neighbours(add, weight, MAX_PICKS)
        weight = select(known.real != 0, machine.divide(weight, total) * self.scale, 0.0)
        self.out.weights.store_floats([weight], token, place, where=has_pick)

    def _listed(self, known: Known) -> tuple[Value, Value]:
        """Return this lane's pick by the table, and its place among the token's."""
        mine = place = self.machine.constant(0, "i32")
        for n, other in enumerate(known.shifts):
            mine = select(self.lane == n, other, mine)
        for n, other in enumerate(known.shifts):
            place = place + self._one((other < mine) | ((other == mine) & (self.lane > n)))
        return mine, place

    def _one(self, condition: Value) -> Value:
        return select(condition, self.machine.constant(1, "i32"), 0)

    def _largest(self, token: Value, known: Known) -> tuple[Value, Value]:
        """Return this lane's pick, and its place: its rank among equal and larger ones is the lane's number.

        Of equal sums of score and bias the lower number comes first, and NaN comes before all.
        """
        machine, first = self.machine, self.lane * self._count
        ranks: list[Value] = []
        for number, there, count in self._fours():
            for value in self.scores.load_floats(token, number, count=count, where=there):
                shift = known.shifts[len(ranks)]
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
