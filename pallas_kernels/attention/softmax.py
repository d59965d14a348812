"""Softmax over keys, in powers of two, and its running form for products of heads (rows) and keys (columns).

A lane holds parts of two rows of such a product. A quad of four lanes together holds whole rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax

from pallas_kernels.attention.block import Block
from pallas_kernels.attention.inputs import HEAD_DIM
from pallas_kernels.language.lanes import Op, add, fold_tree, maximum
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.language.values import Value, select

LOG2E = 1 / math.log(2)
LOGIT_SCALE = HEAD_DIM**-0.5 * LOG2E
LOWEST = -1e30  # used instead of -inf, since -inf - -inf is NaN
GROWTH = 8.0  # powers of two by which logits must exceed a peak before it is raised, and sums are rescaled
_ROUNDS = 1.5 * 2**23  # added to an f32 and taken from it again, this leaves a whole number
QUAD = 4  # lanes that hold a row of a product: each has two adjacent columns of every eight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of a lane's two rows so far."""

    peak: list[Value]  # is subtracted from logits, which exceed it little; the same in the four lanes of a quad
    total: list[Value]  # sum of the weights: this lane's part of it

    @classmethod
    def of_sinks(cls, block: Block) -> Softmax:
        """Return the softmax before any key, which contains only the sinks.

        In a cluster only one block includes them.
        """
        machine, sinks = block.machine, block.query.inputs.sinks
        row = machine.hold(product_row(machine))  # for each query anew, because there are no registers to keep it in
        logits = [sinks.load_floats(block.first_head + row + 8 * i, count=1)[0] * LOG2E for i in range(2)]
        logits = [logit.maximum(LOWEST) for logit in logits]
        peak, counts = [whole(logit) for logit in logits], machine.thread % QUAD == 0
        if block.cluster > 1:
            peak = [select(block.rank == 0, value, LOWEST) for value in peak]
            counts = counts & (block.rank == 0)
        return cls(peak, [select(counts, machine.exp2(a - b), 0.0) for a, b in zip(logits, peak, strict=True)])

    def times(self, factors: list[Value]) -> Softmax:
        """Return this with totals that are multiplied by a factor for each row, and the peak as it is."""
        return Softmax(self.peak, [total * factor for total, factor in zip(self.total, factors, strict=True)])

    def over_quads(self, machine: TensorCores) -> Softmax:
        """Return this with the sums of whole rows in each lane."""
        return Softmax(self.peak, [over_quad(machine, add, value) for value in self.total])


def over_quad(machine: TensorCores, op: Op, value: Value) -> Value:
    """Reduce ``value`` over the lanes that hold a row. All of them get the result."""
    for distance in (1, 2):
        value = op(value, machine.shuffle_xor(value, distance))
    return value


def whole(peak: Value) -> Value:
    """Round a peak to a whole number: then sums and weights in f16 are rescaled by powers of two, which is exact."""
    return peak + _ROUNDS - _ROUNDS


def any_of_warp(machine: TensorCores, condition: Value) -> Value:
    """Return an i32: 1 if the condition holds in any lane of the warp, else 0."""
    return machine.reduce_warp("max", select(condition, machine.constant(1, "i32"), 0))


def row_of(n: int) -> int:
    """Return which of a lane's two rows element n of a product belongs to."""
    return n // 2 % 2


def column_of(n: int) -> int:
    """Return which of a lane's columns element n of a product belongs to: two of every eight columns are its own."""
    return n // 4 * 2 + n % 2


def load_of_keys(machine: TensorCores, numbers: Shared) -> list[Value]:
    """Load the numbers f32 [keys] of a lane's columns."""
    pairs = numbers.view((numbers.shape[0] // 8, QUAD, 2), "f32")
    return [x for j in range(pairs.shape[0]) for x in pairs.load_floats(j, machine.thread % QUAD, 0, count=2)]


def scale_logits(
    machine: TensorCores, logits: list[Value], factors: list[Value], key_of: Callable[[int], int] = column_of
) -> list[Value]:
    """Convert q . k to logits in powers of two, with the factors of a lane's keys, from ``KeyLoader.store``.

    ``key_of`` says which of them an element of the product belongs to. The logits of a missing key are -inf.
    """
    scaled = list(logits)
    for key, factor in enumerate(factors):  # one after the other, because there are few registers
        scale, bias = factor * LOGIT_SCALE, select(factor >= 0.0, machine.constant(0.0, "f32"), -math.inf)
        for n in (n for n in range(len(logits)) if key_of(n) == key):
            scaled[n] = machine.fma(logits[n], scale, bias)
    return scaled


def scale_without_factors(machine: TensorCores, logits: list[Value], biases: list[Value]) -> list[Value]:
    """Convert q . k to logits in powers of two, with the biases of a lane's columns, where all factors are 1."""
    scale = machine.constant(LOGIT_SCALE, "f32")
    return [machine.fma(x, scale, biases[column_of(n)]) for n, x in enumerate(logits)]


def raised(machine: TensorCores, peak: list[Value], logits: list[Value]) -> list[Value]:
    """Return the peaks of a lane's two rows, higher ones where logits of a tile exceed them by far."""
    tops = _over_rows(maximum, logits)

    def rise(_: Value, peak: list[Value]) -> list[Value]:
        of_rows = [over_quad(machine, maximum, top) for top in tops]
        return [select(top > old + GROWTH, whole(top), old) for top, old in zip(of_rows, peak, strict=True)]

    exceeds = (tops[0] > peak[0] + GROWTH) | (tops[1] > peak[1] + GROWTH)
    return machine.loop(any_of_warp(machine, exceeds), rise, peak)


def weigh(machine: TensorCores, logits: list[Value], peak: list[Value]) -> tuple[list[Value], Softmax]:
    """Return a tile's weights relative to a peak, and the softmax of this tile alone."""
    weights = [machine.exp2(logit - peak[row_of(n)]) for n, logit in enumerate(logits)]
    return weights, Softmax(peak, _over_rows(add, weights))


def _over_rows(op: Op, values: list[Value]) -> list[Value]:
    """Reduce a lane's elements of each of its two rows."""
    return [fold_tree(op, [value for n, value in enumerate(values) if row_of(n) == row]) for row in range(2)]
