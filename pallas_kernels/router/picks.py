"""The picks of a token, by one warp: the experts of the largest scores, or those of a table, and their weights.

Each lane has adjacent experts. In a round the warp finds the largest score, and the lowest number of an expert that has
it. Then lane n has the n-th pick, and finds its place by the numbers of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels.language.lanes import Team, add, fold_tree, maximum
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Step, Value, select

MAX_PICKS = 16
type Place = tuple[Value, Value, Condition]  # a token, the first of some adjacent experts, and whether they exist
# Returns scores of so many adjacent experts at each place, 0 where there are none.
type LoadScores = Callable[[Sequence[Place], int], list[Step]]
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
class Token:
    """A token that a warp picks for, with what it loads before there are scores, which the loads would delay."""

    number: Value
    here: Condition  # whether it exists
    real: Value
    shifts: list[Value]  # the bias of the lane's experts; without a bias all picks of the token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pick:
    """What a lane has of a token: the first lanes have a pick each."""

    mine: Value  # its expert
    place: Value  # its place among the token's
    score: Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picker:
    """Picks for one token at a time, as all lanes of a warp."""

    machine: TensorCores
    load_scores: LoadScores
    experts: int
    inputs: PickInputs
    out: Picked
    scale: float  # of the weights

    @property
    def lane(self) -> Value:
        return self.machine.thread % WARP

    @property
    def picks(self) -> int:
        return self.out.experts.shape[1]

    @property
    def _count(self) -> int:
        """Experts of a lane."""
        return -(-self.experts // (WARP * VECTOR)) * VECTOR

    @property
    def _together(self) -> int:
        """Adjacent experts that are loaded together."""
        return VECTOR if self.experts % VECTOR == 0 else 1

    def token(self, number: Value, here: Condition) -> Token:
        """Load what there is for a token, which exists if the condition holds."""
        inputs = self.inputs
        real = inputs.real.load_bytes(number, count=1, where=here)
        if inputs.table is not None:
            row = inputs.ids.load_int(number, where=here).maximum(0).minimum(inputs.table.shape[0] - 1)
            shifts = [inputs.table.load_int(row, n, where=here) for n in range(self.picks)]
        else:
            # All warps load the same numbers, and loads of 16 bytes would go past L1.
            width = min(self._together, 2)
            places = ((x + i, there) for x, there in self._fours() for i in range(0, self._together, width))
            loaded = (inputs.bias.load_floats(x, count=width, where=there) for x, there in places)
            shifts = [shift for some in loaded for shift in some]
        return Token(number=number, here=here, real=real, shifts=shifts)

    def _fours(self) -> Iterator[tuple[Value, Condition]]:
        """Yield the first of each few adjacent experts of this lane, and whether they exist."""
        for i in range(0, self._count, self._together):
            first = self.lane * self._count + i
            yield first, True if (WARP - 1) * self._count + i < self.experts else first < self.experts

    def pick(self, tokens: list[Token]) -> list[Pick]:
        """Return this lane's pick of each token. What those that do not exist pick has no meaning."""
        if self.inputs.table is None:
            return self._largest(tokens)
        return self._listed(tokens)

    def expert(self, token: Token, pick: Pick) -> Value:
        """Return the expert of a pick, the number of none on padding."""
        return select(token.real != 0, pick.mine, self.experts)

    def store(self, token: Token, pick: Pick) -> None:
        """Store a token's picks and their weights, if it exists."""
        machine, where = self.machine, self.has_pick & token.here
        self.out.experts.store_int(self.expert(token, pick), token.number, pick.place, where=where)
        weight = select(self.has_pick, pick.score, 0.0)
        total = Team(machine, WARP).neighbours(add, weight, MAX_PICKS)
        weight = select(token.real != 0, weight * machine.normal_reciprocal(total) * self.scale, 0.0)
        self.out.weights.store_floats([weight], token.number, pick.place, where=where)

    @property
    def has_pick(self) -> Value:
        """Whether a lane has one."""
        return self.lane < self.picks

    def _listed(self, tokens: list[Token]) -> list[Pick]:
        """Return this lane's picks by the table."""
        found, places = [], []
        for token in tokens:
            mine = place = self.machine.constant(0, "i32")
            for n, other in enumerate(token.shifts):
                mine = select(self.lane == n, other, mine)
            for n, other in enumerate(token.shifts):
                place = place + self._one((other < mine) | ((other == mine) & (self.lane > n)))
            found.append((mine, place))
            places.append((token.number, mine, self.has_pick & token.here & (mine >= 0) & (mine < self.experts)))
        picks = []
        for (mine, place), (*_, exists), (score,) in zip(found, places, self.load_scores(places, 1), strict=True):
            # A table may name others, whose weights are NaN.
            picks.append(Pick(mine=mine, place=place, score=select(exists, score, float("nan"))))
        return picks

    def _one(self, condition: Value) -> Value:
        return select(condition, self.machine.constant(1, "i32"), 0)

    def _largest(self, tokens: list[Token]) -> list[Pick]:
        """Return this lane's picks: of a token the rank among equal and larger ones is the lane's number.

        Of equal sums of score and bias the lower number comes first, and NaN comes before all. The tokens go through
        each round together, so that one does not wait for another one's reductions.
        """
        machine, first, fours = self.machine, self.lane * self._count, list(self._fours())
        loaded = self.load_scores([(t.number, x, there & t.here) for t in tokens for x, there in fours], self._together)
        all_ranks: list[list[Value]] = []
        all_scores: list[Step] = []
        for n, token in enumerate(tokens):
            ranks: list[Value] = []
            scores: Step = []
            for (_, there), of_four in zip(fours, loaded[n * len(fours) : (n + 1) * len(fours)], strict=True):
                for score in of_four:
                    ranks.append(select(there, self._rank(score + token.shifts[len(ranks)]), _LEAST))
                    scores.append(score)
            all_ranks.append(ranks)
            all_scores.append(scores)

        def find(n: Value, carry: list[tuple[list[Value], Value]]) -> list[tuple[list[Value], Value]]:
            bests = [machine.reduce_warp("max", fold_tree(maximum, ranks)) for ranks, _ in carry]
            owned = []
            for best, (ranks, _) in zip(bests, carry, strict=True):
                own = [select(rank == best, first + i, _LARGEST) for i, rank in enumerate(ranks)]
                owned.append(machine.reduce_warp("min", fold_tree(lambda a, b: a.minimum(b), own)))
            following = []
            for found, (ranks, mine) in zip(owned, carry, strict=True):
                left = [select(first + i == found, _LEAST, rank) for i, rank in enumerate(ranks)]
                following.append((left, select(self.lane == n, found, mine)))
            return following

        begun = [(ranks, machine.constant(0, "i32")) for ranks in all_ranks]
        ended = machine.loop(self.picks, find, begun, rolled=True)
        return [self._found(mine, scores) for (_, mine), scores in zip(ended, all_scores, strict=True)]

    def _found(self, mine: Value, scores: Step) -> Pick:
        """Return what this lane has found, by the scores of its own experts and by what other lanes have found."""
        machine, owner, number = self.machine, mine // self._count, mine % self._count
        places = [self._one(machine.shuffle(mine, machine.constant(n, "i32")) < mine) for n in range(self.picks)]
        score = machine.shuffle(scores[0], owner)
        for i, own in enumerate(scores[1:], 1):
            score = select(number == i, machine.shuffle(own, owner), score)
        return Pick(mine=mine, place=fold_tree(add, places), score=score)

    def _rank(self, x: Value) -> Value:
        """Return an i32 above ``_LEAST`` with the order of an f32, and NaN above all others."""
        bits = self.machine.bits(x)
        return select(x == x, select(bits < 0, bits ^ _LARGEST, bits), _LARGEST)
