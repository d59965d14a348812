"""What a product is added to: rows of bf16, of which each lane loads what it will store.

A product of few rows has another array as its result. That of many rows is added in place, so that the tiles of padding
need not be computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.values import VECTOR, Condition, Step, Value, select
from pallas_kernels.rows import from_bf16, through_bf16

_TOGETHER = 8  # places for which a lane loads together what it adds to


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Some outputs of a row, which one lane stores."""

    line: Value  # in shared memory, where they are gathered
    unit: Value  # the first of them in the line
    count: int
    row: Value  # of x
    output: Value  # the first of them
    there: Condition  # whether there are such outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What a product is added to. The rows of padding stay as they are, whatever their product is."""

    rows: Any  # bf16 [M, outputs]
    positions: Any  # int32 [M], below 0 on padding

    def load(self, place: Place) -> LoadedResidual:
        rows: Buffer = self.rows
        values = [
            value
            for first in range(0, place.count, VECTOR)
            for value in rows.load_floats(place.row, place.output + first, where=place.there)
        ]
        return LoadedResidual(values, self.positions.load_int(place.row, where=place.there) >= 0)


def check_residual(residual: Residual, shape: tuple[int, int], dtype: Any) -> None:
    """Raise an error if this is no residual of a product of such a shape and dtype."""
    if dtype != jnp.bfloat16:
        raise ValueError(f"a residual is for a product of bf16, got {jnp.dtype(dtype)}")
    chex.assert_shape([residual.rows, residual.positions], [shape, shape[:1]])
    chex.assert_type([residual.rows, residual.positions], [jnp.bfloat16, jnp.int32])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadedResidual:
    """The residual of some outputs."""

    values: Step
    is_real: Value

    def plus(self, product: Step) -> Step:
        """Add a product, after rounding it to bf16, as a sum of two arrays of bf16 does."""
        rounded = [select(self.is_real, value, 0.0) for value in through_bf16(product)]
        return [one + other for one, other in zip(self.values, rounded, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Onto:
    """Rows that a product of many rows is stored to, or added to if there are positions."""

    rows: Buffer
    positions: Buffer | None  # int32 [M], below 0 on padding, which stays as it is

    def store(self, places: Iterable[Words]) -> None:
        """Store what a lane has, some at a time."""
        for some in itertools.batched(places, _TOGETHER):
            self._store(some)

    def _store(self, places: Sequence[Words]) -> None:
        if self.positions is None:
            for place in places:
                self.rows.store_words(place.words, place.row, place.output, where=place.where)
            return
        rows = {id(place.row): place for place in places}  # each position is loaded once
        positions = {
            key: self.positions.load_int(place.row, where=place.where, otherwise=-1) for key, place in rows.items()
        }
        there = [positions[id(place.row)] >= 0 for place in places]
        before = [
            self.rows.load_floats(place.row, place.output, count=2 * len(place.words), where=where)
            for place, where in zip(places, there, strict=True)
        ]
        for place, where, old in zip(places, there, before, strict=True):
            product = [value for word in place.words for value in from_bf16(word)]
            added = [a + b for a, b in zip(product, old, strict=True)]
            self.rows.store_floats(added, place.row, place.output, where=where)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Adjacent outputs of a row of a product, as words of bf16."""

    words: list[Value]
    row: Value
    output: Value  # the first of them
    where: Condition  # whether the row and the outputs exist
