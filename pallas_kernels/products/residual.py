"""What a product of few rows is added to: rows of bf16, of which each lane loads what it will store."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.values import VECTOR, Condition, Step, Value, select
from pallas_kernels.products.split import ROWS
from pallas_kernels.rows import through_bf16


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
    if shape[0] > ROWS or dtype != jnp.bfloat16:
        raise ValueError(f"a residual is for at most {ROWS} rows of bf16, got {shape[0]} of {jnp.dtype(dtype)}")
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
