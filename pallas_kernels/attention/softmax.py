"""Softmax over keys, in powers of two, and its running form for products of heads (rows) and keys (columns).

A lane holds two rows of such a product, and a quad of lanes a whole row.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.attention.block import Block
from pallas_kernels.attention.inputs import HEAD_DIM
from pallas_kernels.language.lanes import Op, add
from pallas_kernels.language.machine import Value, select
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, product_row

LOG2E = 1 / math.log(2)
LOGIT_SCALE = HEAD_DIM**-0.5 * LOG2E
LOWEST = -1e30  # in place of -inf, of which a difference would be NaN
QUAD = 4  # lanes that hold a row of a product, each two neighbouring columns of every eight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of a lane's two rows so far."""

    peak: list[Value]  # what weights are relative to, the same in the four lanes of a quad
    total: list[Value]  # of the weights: this lane's part of the sum

    @classmethod
    def of_sinks(cls, block: Block) -> Softmax:
        """Before any key: what the sinks add to the sum. One block of a cluster counts them."""
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
        """With sums of the whole row in each lane."""
        return Softmax(self.peak, [over_quad(machine, add, value) for value in self.total])


def over_quad(machine: TensorCores, op: Op, value: Value) -> Value:
    """value reduced over the lanes that hold a row, in all of them."""
    for distance in (1, 2):
        value = op(value, machine.shuffle_xor(value, distance))
    return value


def row_of(n: int) -> int:
    """Which of a lane's two rows its number n of a product is in."""
    return n // 2 % 2


def scale_logits(machine: TensorCores, logits: list[Value], factor_and_bias: Shared) -> tuple[list[Value], list[Value]]:
    """Logits in powers of two, from q . k, and the factor of each one's key.

    Args:
      logits: a product, of which a lane holds two rows.
      factor_and_bias: f32 [keys, 2], as ``KeyLoader.store`` leaves them.
    """
    # What a lane reads at once: factor and bias of its two neighbouring keys of every eight.
    pairs = factor_and_bias.view((factor_and_bias.shape[0] // 8, QUAD, 4), "f32")
    scaled, factors = [], []
    for j in range(0, len(logits), 4):
        a, a_bias, b, b_bias = pairs.load_floats(j // 4, machine.thread % QUAD, 0)
        factors += [a, b, a, b]
        for n, bias in enumerate((a_bias, b_bias, a_bias, b_bias), j):
            scaled.append(machine.fma(logits[n], factors[n] * LOGIT_SCALE, bias))
    return scaled, factors
