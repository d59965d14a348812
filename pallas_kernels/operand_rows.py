"""Rows of bf16 in the order in which products of few rows with FP8 weights take them.

A product's lane holds 16 adjacent bytes of a weight's row, so that its right operand needs pairs of numbers in another
order than they have in x (``products.activations``). Of each 64 numbers of a row, four quarters of eight pairs,

    pair p of quarter q      is stored as pair 4 p + q.

Products copy such rows 16 bytes at a time. Rows of x as they are they copy 4 bytes at a time, or put in order
themselves. Kernels whose results enter a product write operand rows where ``takes_operand`` says that it takes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Condition, Index, Value

SEGMENT = 64  # numbers of a row that change places with one another
_QUARTERS, _PAIRS = 4, 8
_QUARTER = 2 * _PAIRS
_HALF = SEGMENT // 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandRows:
    """Rows of activations in the order of a product's operand, or their buffer."""

    values: Any  # bf16 [..., width]

    @classmethod
    def shapes(cls, *shape: int) -> OperandRows:
        """Return the shapes for rows [..., width]. Raises ValueError for a width that is no multiple of 64."""
        if shape[-1] % SEGMENT:
            raise ValueError(f"operand rows must have a multiple of {SEGMENT} numbers, got {shape[-1]}")
        return cls(values=jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    @classmethod
    def of(cls, x: jax.Array) -> OperandRows:
        """Return rows of bf16 [..., width] in this order. Raises ValueError as ``shapes`` does."""
        shape = cls.shapes(*x.shape).shape
        return cls(values=x.reshape(-1, _QUARTERS, _PAIRS, 2).swapaxes(1, 2).reshape(shape))

    def in_order(self) -> jax.Array:
        """Return the rows bf16 [..., width] in the order that they had."""
        return self.values.reshape(-1, _PAIRS, _QUARTERS, 2).swapaxes(1, 2).reshape(self.values.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype


def sources_of_unit(unit: Value) -> list[Value]:
    """Return where the numbers of a unit of 16 bytes come from: of each of its four pairs, the first number's place.

    ``unit`` and the places count in a segment.
    """
    return [unit * 2 + quarter * _QUARTER for quarter in range(_QUARTERS)]


def store_pairs(
    machine: Machine,
    out: OperandRows,
    values: Sequence[Value],
    row: Value,
    column: Value,
    where: Condition = True,
) -> None:
    """Store adjacent numbers of a row, f32 and an even number of them, from an even column on."""
    for i in range(0, len(values), 2):
        number = column % SEGMENT + i
        pair = number % _QUARTER // 2 * _QUARTERS + number // _QUARTER
        word = machine.to_bf16(*values[i : i + 2])
        out.values.store_words([word], row, column // SEGMENT * SEGMENT + pair * 2, where=where)


def store_product(machine: Machine, out: OperandRows, words: list[Value], row: Value, column: Index) -> None:
    """Store numbers of a row as they are spread over a quad of lanes after a product (``wgmma``).

    Args:
      machine: of the values.
      out: buffer.
      words: of bf16, the two adjacent numbers of each eight that the lane has: of 64 numbers, or of 32.
      row: of the result.
      column: the first of the numbers, in order.
    """
    # A lane has the pairs 4 n + lane. Of 64 numbers, those of even n are adjacent in the result, and so are the others.
    first = machine.thread % _QUARTERS * _PAIRS + column
    if len(words) * _PAIRS == _HALF:
        first = first - column % SEGMENT // _HALF * (_HALF - len(words))
    for odd in range(2):
        out.values.store_words(words[odd::2], row, first + _HALF * odd)
