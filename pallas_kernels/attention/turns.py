"""The queries that a block computes one after the other, where there are more than run at once.

Those of padding are left out, if the launch says which queries are needed. The others are divided evenly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Value
from pallas_kernels.needed import needed_first, past_last_needed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryOrder:
    """The queries of a launch, those that are needed first, or their buffers."""

    count: Any  # int32 [1], of those that are needed
    numbers: Any  # int32 [B T]; None: as they are

    @classmethod
    def of(cls, needed: jax.Array) -> QueryOrder:
        """The order for bool [B, T]; of one request, without a list."""
        if needed.shape[0] == 1:
            return cls(count=past_last_needed(needed), numbers=None)
        count, numbers = needed_first(needed.reshape(-1))
        return cls(count=count.reshape(1), numbers=numbers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A query of a block, by its number, and what follows it."""

    query: Value
    following: Value  # the next one; any, if there is none
    has_following: Value
    known: list[Value]  # what the loop over turns carries to the next one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """Every ``at_once``-th query from the block's number on, of all or of those that are needed."""

    machine: TensorCores
    order: QueryOrder | None  # of buffers; None: all queries, as they are
    queries: int  # of the launch
    at_once: int

    @property
    def count(self) -> Value:
        total = self.queries if self.order is None else self.order.count.load_int(0)
        return (self.machine.block(0) * -1 + (self.at_once - 1) + total) // self.at_once

    @property
    def _has_list(self) -> bool:
        return self.order is not None and self.order.numbers is not None

    @property
    def has_any(self) -> Condition:
        return True if self.order is None else self.count > 0

    def _load(self, turn: Value) -> Value:
        """Return the number of a turn's query. Past the last turn it is that of any query."""
        assert self.order is not None
        place = turn * self.at_once + self.machine.block(0)
        return self.order.numbers.load_int(place.minimum(self.queries - 1))

    def begin(self) -> tuple[Value, list[Value]]:
        """Return the first query, and what a loop over turns carries: numbers that must be loaded, of two turns."""
        if not self._has_list:
            return self.machine.block(0), []
        start = self.machine.constant(0, "i32")
        first = self._load(start)
        return first, [first, self._load(start + 1)]

    def turn(self, number: Value, count: Value, known: list[Value]) -> Turn:
        """Return a turn of ``count`` by its number.

        Queries are loaded two turns ahead, so that nothing waits for them.
        """
        if not self._has_list:
            query = number * self.at_once + self.machine.block(0)
            following = query + self.at_once
            last = self.queries - 1
            has_following = following <= last if self.order is None else number + 1 < count
            return Turn(query=query, following=following.minimum(last), has_following=has_following, known=[])
        query, following = known
        after = [following, self._load(number + 2)]
        return Turn(query=query, following=following, has_following=number + 1 < count, known=after)
