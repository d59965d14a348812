"""Softmax over keys, in powers of two, and its running form for products of heads (rows) and keys (columns).

A lane holds parts of two rows of such a product. A quad of four lanes together holds whole rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.attention.block import Block
from pallas_kernels.attention.inputs import HEAD_DIM
from pallas_kernels.language.lanes import Op, add
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.language.values import Value, select

LOG2E = 1 / math.log(2)
LOGIT_SCALE = HEAD_DIM**-0.5 * LOG2E
LOWEST = -1e30  # used instead of -inf, since -inf - -inf is NaN
QUAD = 4  # lanes that hold a row of a product: each has two adjacent columns of every eight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of a lane's two rows so far."""

    peak: list[Value]  # the exponent that is subtracted from logits; the same in the four lanes of a quad
    total: list[Value]  # sum of the weights: this lane's part of it

    @classmethod
    def of_sinks(cls, block: Block) -> Softmax:
        """Return the softmax before any key, which contains only the sinks.

        In a cluster only one block includes them.
        """
        machine, sinks, row = block.machine, block.query.inputs.sinks, product_row(block.machine)
        peak = [sinks.load_floats(block.first_head + row + 8 * i, count=1)[0] * LOG2E for i in range(2)]
        peak = [value.maximum(LOWEST) for value in peak]
        total = select(machine.thread % QUAD == 0, machine.constant(1.0, "f32"), 0.0)
        if block.cluster > 1:
            counts = block.rank == 0
            peak = [select(counts, value, LOWEST) for value in peak]
            total = select(counts, total, 0.0)
        return cls(peak, [total, total])

    def over_quads(self, machine: TensorCores) -> Softmax:
        """Return this with the sums of whole rows in each lane."""
        return Softmax(self.peak, [over_quad(machine, add, value) for value in self.total])


def over_quad(machine: TensorCores, op: Op, value: Value) -> Value:
    """Reduce ``value`` over the lanes that hold a row. All of them get the result."""
    for distance in (1, 2):
        value = op(value, machine.shuffle_xor(value, distance))
    return value


def row_of(n: int) -> int:
    """Return which of a lane's two rows element n of a product belongs to."""
    return n // 2 % 2


def scale_logits(machine: TensorCores, logits: list[Value], factor_and_bias: Shared) -> tuple[list[Value], list[Value]]:
    """Convert q . k to logits in powers of two. Also returns the factor of each logit's key.

    Args:
      logits: a product, of which a lane holds two rows.
      factor_and_bias: f32 [keys, 2], written by ``KeyLoader.store``.
    """
    # A lane reads the factors and biases of its two adjacent keys of every eight in one load.
    pairs = factor_and_bias.view((factor_and_bias.shape[0] // 8, QUAD, 4), "f32")
    scaled, factors = [], []
    for j in range(0, len(logits), 4):
        a, a_bias, b, b_bias = pairs.load_floats(j // 4, machine.thread % QUAD, 0)
        factors += [a, b, a, b]
        for n, bias in enumerate((a_bias, b_bias, a_bias, b_bias), j):
            scaled.append(machine.fma(logits[n], factors[n] * LOGIT_SCALE, bias))
    return scaled, factors


def scale_without_factors(machine: TensorCores, logits: list[Value], biases: Shared) -> list[Value]:
    """Convert q . k to logits in powers of two, with the biases f32 [keys] of keys whose factors are 1."""
    pairs = biases.view((biases.shape[0] // 8, QUAD, 2), "f32")
    scaled, scale = [], machine.constant(LOGIT_SCALE, "f32")
    for j in range(0, len(logits), 4):
        found = pairs.load_floats(j // 4, machine.thread % QUAD, 0, count=2)
        scaled += [machine.fma(logits[j + n], scale, found[n % 2]) for n in range(4)]
    return scaled


def load_factors(machine: TensorCores, factor_and_bias: Shared) -> list[Value]:
    """Return the factor of each logit's key, as ``scale_logits`` does."""
    pairs = factor_and_bias.view((factor_and_bias.shape[0] // 8, QUAD, 4), "f32")
    factors = []
    for j in range(pairs.shape[0]):
        a, _, b, _ = pairs.load_floats(j, machine.thread % QUAD, 0)
        factors += [a, b, a, b]
    return factors
