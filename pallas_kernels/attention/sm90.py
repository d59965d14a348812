"""Decode attention on Hopper: two warpgroups multiply, and a third loads the keys.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

Each of the two multiplying warpgroups computes all logits and weights by itself, but only half of the output's
channels. This means half as many products again, but neither warpgroup waits for the other's results. One's softmax
overlaps with the other's products, and weights go directly from registers into the next product.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_kernels.attention.block import (
    CONSUMERS,
    HALF,
    HEADS,
    STAGES,
    WARPS,
    Block,
    BlockLayout,
    Memory,
    load_queries,
    load_tiles,
)
from pallas_kernels.attention.inputs import HEAD_DIM, NOPE_DIM, ROPE_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.attention.output import finish_output
from pallas_kernels.attention.softmax import Softmax, over_quad, row_of, scale_logits
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import add, fold_tree, maximum
from pallas_kernels.language.machine import WARPGROUP, Condition, Value, select
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile

# Registers per lane, for multiplying and for loading. Loading rows with several scales needs more. Using the second
# setting for all formats was 3 % slower.
_REGISTERS, _REGISTERS_OF_SCALES = (208, 88), (200, 104)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(BlockLayout):
    """The layout of the Hopper kernel. A block computes 64 heads of a query, over its share of the tiles."""

    gpu: ClassVar[GPU] = HOPPER

    @property
    def shared_bytes(self) -> int:
        alignment = 1024  # of the first tile, which follows the barriers
        return self.common_bytes + 8 * (2 * STAGES + 2 + CONSUMERS) + alignment

    def body(self, machine: TensorCores, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        memory = _Memory.take(machine)
        block = Block.of(machine, inputs, memory, self.cluster)
        init_barriers(memory.full, memory.free, memory.loaded_q, memory.begun, memory.turn)
        multiply, load = _REGISTERS if form.num_scales(NOPE_DIM) <= 1 else _REGISTERS_OF_SCALES
        machine.roles(
            Role(
                warpgroups=CONSUMERS,
                registers=multiply,
                body=lambda: _multiply(block, memory.turn, outputs, form),
            ),
            Role(warpgroups=1, registers=load, body=lambda: load_tiles(block, form)),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory(Memory):
    """Shared memory of a block: barriers, tiles and arrays, in this order."""

    turn: Barrier  # per multiplying warpgroup: it may start products

    @classmethod
    def take(cls, machine: TensorCores) -> _Memory:
        return cls(
            full=Barrier.take(machine, WARPS, copies=STAGES),
            free=Barrier.take(machine, CONSUMERS * WARPS, copies=STAGES),
            loaded_q=Barrier.take(machine, CONSUMERS * WARPS),
            begun=Barrier.take(machine, WARPS),
            turn=Barrier.take(machine, WARPS, copies=CONSUMERS),
            q=Tile.take(machine, HEADS, HEAD_DIM * 2),
            keys=Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES),
            staging=take_staging(machine),
            factor_and_bias=Shared.take(machine, (STAGES, KEYS, 2), "f32"),
            angles=Shared.take(machine, (2, ROPE_DIM // 2), "f32"),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What a warpgroup holds at the start of its turn for a tile."""

    logits: list[Value]  # logits of this tile, [HEADS, KEYS]
    softmax: Softmax  # softmax of the tiles before
    output: list[Value]  # sums of the tiles before, [HEADS, HALF]


def _multiply(block: Block, turn: Barrier, outputs: Outputs, form: AttendedFormat) -> None:
    machine, memory = block.machine, block.memory
    half = machine.thread // WARPGROUP  # which half of the channels
    load_queries(block)
    softmax = Softmax.of_sinks(block)
    output = [machine.constant(0.0, "f32")] * (HALF // 2)

    # The two warpgroups take turns in starting products, so that one's softmax overlaps with the other's products. A
    # turn consists of the product with one tile's weights, and the logits of the next tile.
    def take_turn(i: Value) -> None:
        turn.copy(half).wait((i ^ half ^ 1) & 1)

    def pass_turn(where: Condition = True) -> None:
        turn.copy(half ^ 1).arrive(where)

    def multiply_q(i: Value) -> list[Value]:
        memory.full.copy(i % STAGES).wait(i // STAGES & 1)
        return machine.wgmma(None, memory.q.k_major(), memory.keys.copy(i % STAGES).k_major(), columns=KEYS)

    def next_logits(i: Value) -> list[Value]:
        logits = multiply_q(i)
        pass_turn()
        return machine.wgmma_wait(logits)

    def step(i: Value, sums: _Sums) -> _Sums:
        stage, is_last = i % STAGES, i + 1 == block.tiles
        weights, softmax, carried = _fold(machine, sums, memory.factor_and_bias[stage], form)
        output = [value * carried[row_of(n)] for n, value in enumerate(sums.output)]
        keys = memory.keys.copy(stage)
        channels = dataclasses.replace(keys, offset=half * (HALF * 2 * 8) + keys.offset).transposed(0)
        take_turn(i)
        output = machine.wgmma(output, weights, channels, columns=HALF)
        pass_turn(is_last)
        output = machine.wgmma_wait(output)
        memory.free.copy(stage).arrive()
        # There is no next tile after the last one. A loop of 0 or 1 steps avoids a second copy of this code, which
        # would take long to fetch.
        more = select(is_last, machine.constant(0, "i32"), 1)
        none = [machine.constant(0.0, "f32")] * len(sums.logits)
        return _Sums(machine.loop(more, lambda _, __: next_logits(i + 1), none), softmax, output)

    logits = machine.wgmma_wait(multiply_q(machine.constant(0, "i32")))
    sums = machine.loop(block.tiles, step, _Sums(logits, softmax, output))
    finish_output(block, outputs, sums.output, sums.softmax.over_quads(machine), half)


def _fold(
    machine: TensorCores, sums: _Sums, factor_and_bias: Shared, form: AttendedFormat
) -> tuple[list[Value], Softmax, list[Value]]:
    """Add a tile's logits to the softmax.

    Returns:
      The weights as the left operand of the next product; the new softmax; the factors by which older sums must be
      scaled.
    """
    scaled, factors = scale_logits(machine, sums.logits, factor_and_bias)
    peaks, totals, carried = [], [], []
    weights = list(scaled)
    for i, (peak, total) in enumerate(zip(sums.softmax.peak, sums.softmax.total, strict=True)):
        row = [n for n in range(len(scaled)) if row_of(n) == i]
        top = over_quad(machine, maximum, fold_tree(maximum, [scaled[n] for n in row])).maximum(peak)
        scale = machine.exp2(peak - top)
        for n in row:
            weights[n] = machine.exp2(scaled[n] - top)
        peaks.append(top)
        totals.append(machine.fma(total, scale, fold_tree(add, [weights[n] for n in row])))
        carried.append(scale)
    if not form.scale_is_power_of_two:
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    packed = [machine.to_f16(*weights[n : n + 2]) for n in range(0, len(weights), 2)]
    return packed, Softmax(peaks, totals), carried
