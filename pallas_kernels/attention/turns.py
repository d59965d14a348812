"""The queries that a block computes one after the other, where there are more than run at once.

Those of padding are left out, if the launch says which queries are needed. The others are divided evenly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.attention.inputs import AttentionInputs
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Value
from pallas_kernels.needed import needed_first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryOrder:
    """The queries of a launch, those that are needed first, or their buffers."""

    count: Any  # int32 [1], of those that are needed
    numbers: Any  # int32 [B T]

    @classmethod
    def of(cls, needed: jax.Array) -> QueryOrder:
        """The order for bool [B, T]."""
        count, numbers = needed_first(needed.reshape(-1))
        return cls(count=count.reshape(1), numbers=numbers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """Every ``at_once``-th query from the block's number on, of all or of those that are needed."""

    machine: TensorCores
    inputs: AttentionInputs  # of buffers
    queries: int  # of the launch
    at_once: int

    @property
    def count(self) -> Value:
        total = self.queries if self.inputs.order is None else self.inputs.order.count.load_int(0)
        return (self.machine.block(0) * -1 + (self.at_once - 1) + total) // self.at_once

    def query(self, turn: Value) -> Value:
        """Return the number of a turn's query. Past the last turn it is that of any query."""
        place = (turn * self.at_once + self.machine.block(0)).minimum(self.queries - 1)
        return place if self.inputs.order is None else self.inputs.order.numbers.load_int(place)

    def begin(self) -> list[Value]:
        """Return the numbers of queries that a loop over turns carries: those that must be loaded, of two turns."""
        first = self.machine.constant(0, "i32")
        return [] if self.inputs.order is None else [self.query(first), self.query(first + 1)]

    def step(self, turn: Value, known: list[Value]) -> tuple[Value, Value, list[Value]]:
        """Return the query of a turn, that of the next one, and what the next turn carries.

        Numbers are loaded two turns ahead, so that nothing waits for them.
        """
        if self.inputs.order is None:
            return self.query(turn), self.query(turn + 1), []
        query, following = known
        return query, following, [following, self.query(turn + 2)]
