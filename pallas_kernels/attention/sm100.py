"""Decode attention on Blackwell: one warp starts all products, whose sums are kept in tensor memory.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

For each tile of 64 keys, one warp starts the product for the logits [64 heads, 64 keys]. A warpgroup reads them from
tensor memory, and passes weights back through shared memory, 16 keys at a time. The same warp then starts the product
of weights and keys, which is added to the output [64 heads, 512] in tensor memory. The output takes only as many
columns as 256 channels, because a product of 64 rows leaves half of the rows of tensor memory free, and the other 256
channels are stored there.

The output is rescaled only if a peak grows by a factor of more than 2^8. Weights may thus be relative to a peak that is
lower than the largest logit so far by up to that factor. They stay below 2^9, and f16 is as precise there as below 1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_kernels.attention.block import (
    CONSUMERS,
    HALF,
    HEADS,
    QUAD,
    STAGES,
    WARPS,
    Before,
    Block,
    BlockLayout,
    Memory,
    Softmax,
    any_of_warp,
    column_of,
    finish_output,
    load_of_keys,
    load_tiles,
    over_quad,
    raised,
    row_of,
    scale_logits,
    weigh,
)
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, Query, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import add
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import BLACKWELL, GPU
from pallas_kernels.language.tensor_cores import Role, Tile, product_row
from pallas_kernels.language.tensor_memory import MAX_COLUMNS, Accumulator, TensorMemory
from pallas_kernels.language.values import Index, Value

_PIECE = 16  # keys whose weights are passed at once, which is what one instruction takes
_PIECES = KEYS // _PIECE  # pieces per tile
_HELD = 2  # number of pieces in shared memory
_SCALED = 64  # columns of the output that are rescaled at once
_MULTIPLY_REGISTERS, _LOAD_REGISTERS = 184, 136  # registers per lane

_LOGITS = Accumulator(column=HALF, columns=KEYS)  # [HEADS, KEYS]


def _output(half: Index) -> Accumulator:
    """Return the accumulator [HEADS, HALF] for half of the channels."""
    return Accumulator(column=0, columns=HALF, half=half)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(BlockLayout):
    """The layout of the Blackwell kernel. A block computes 64 heads of a query, over its share of the tiles."""

    gpu: ClassVar[GPU] = BLACKWELL

    @property
    def shared_bytes(self) -> int:
        barriers = 8 * (2 * STAGES + 2 * _HELD + 3)
        return self.common_bytes + _HELD * _PIECE * HEADS * 2 + HEADS * 8 + barriers + 16

    def body(self, machine: TensorMemory, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        memory = _Memory.take(machine)
        init_barriers(
            *(memory.full, memory.free, memory.weighed, memory.weights_free),
            *(memory.loaded_q, memory.scored, memory.done),
        )

        def block() -> Block:
            """Return the block as one role sees it.

            Each role makes its own, so that its registers are not held while another role's code runs.
            """
            query = Query.of(machine, inputs, machine.block(0))
            return Block.of(machine, memory, query, self.cluster, Before.none(machine))

        with machine.tensor_memory(MAX_COLUMNS):  # 320 are used; shared memory admits only one block per SM anyway
            machine.roles(
                Role(
                    warpgroups=CONSUMERS,
                    registers=_MULTIPLY_REGISTERS,
                    body=lambda: _multiply(machine, block(), memory, outputs, form),
                ),
                Role(warpgroups=1, registers=_LOAD_REGISTERS, body=lambda: load_tiles(block(), form)),
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory(Memory):
    """Shared memory: tiles, arrays and barriers, in this order.

    With the barriers first, the alignment of the tiles would waste too much memory.
    """

    q: Tile  # [HEADS, HEAD_DIM]
    weights: Tile  # [_PIECE, HEADS]; copies: pieces in shared memory
    stats: Shared  # f32 [HEADS, 2]: peak and total, at the end
    weighed: Barrier  # per piece in shared memory: its weights are stored
    weights_free: Barrier  # per piece in shared memory: its product is complete
    loaded_q: Barrier
    scored: Barrier  # the logits are computed, and all older products are complete
    done: Barrier  # the output and the stats are complete

    @classmethod
    def take(cls, machine: TensorMemory) -> _Memory:
        product = 1  # number of warps that arrive
        return cls(
            q=Tile.take(machine, HEADS, HEAD_DIM * 2),
            keys=Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES),
            weights=Tile.take(machine, _PIECE, HEADS * 2, copies=_HELD),
            staging=take_staging(machine),
            of_keys=Shared.take(machine, (STAGES, KEYS), "f32"),
            stats=Shared.take(machine, (HEADS, 2), "f32"),
            full=Barrier.take(machine, WARPS, copies=STAGES),
            free=Barrier.take(machine, product, copies=STAGES),
            weighed=Barrier.take(machine, WARPS, copies=_HELD),
            weights_free=Barrier.take(machine, product, copies=_HELD),
            loaded_q=Barrier.take(machine, CONSUMERS * WARPS),
            scored=Barrier.take(machine, product),
            done=Barrier.take(machine, WARPS + product),
        )


def _multiply(machine: TensorMemory, block: Block, memory: _Memory, outputs: Outputs, form: AttendedFormat) -> None:
    """Run the two multiplying warpgroups: one computes weights, and a warp of the other starts products.

    At the end each takes half of the channels.
    """
    _load_queries(block, memory)
    warp, half = machine.thread // WARP, machine.thread // WARPGROUP
    with machine.when(half == 0):
        _weigh(machine, block, memory, form)
    with machine.when(warp == WARPS):
        _ask(machine, memory, block.tiles)
    memory.done.wait(0)
    machine.fence_tensor("after")
    from_row = dataclasses.replace(memory.stats, offset=memory.stats.address_of(product_row(machine), 0))
    stats = [from_row.load_floats(8 * i, 0, count=2) for i in range(2)]
    softmax = Softmax([peak for peak, _ in stats], [total for _, total in stats])
    finish_output(block, outputs, machine.load_tensor(_output(half)), softmax, half)


def _load_queries(block: Block, memory: _Memory) -> None:
    """Load the queries of the block's heads as f16."""
    machine, query, lane = block.machine, block.query, block.machine.thread
    units, lanes = HEAD_DIM * 2 // 16, CONSUMERS * WARPGROUP
    for i in range(HEADS * units // lanes):
        n = lane + i * lanes
        head, unit = n // units, n % units
        machine.store_shared(memory.q.unit(head, unit), query.head_words(block.first_head + head, unit), 16, True)
    machine.fence_shared()
    memory.loaded_q.arrive()
    memory.loaded_q.wait(0)


# Starting products.
def _ask(machine: TensorMemory, memory: _Memory, tiles: Value) -> None:
    """Start the products of all tiles: a tile's logits, then, as weights arrive, their products with the keys.

    This runs on one warp, of which one lane issues the instructions.
    """

    def step(i: Value, _: None) -> None:
        stage = i % STAGES
        keys = memory.keys.copy(stage)
        memory.full.copy(stage).wait(i // STAGES & 1)
        with machine.one_lane():
            machine.mma(_LOGITS, memory.q.k_major(), keys.k_major(), accumulate=False)
            machine.commit(memory.scored)
        for piece in range(_PIECES):
            held, use = piece % _HELD, piece // _HELD  # the number of uses per tile is even
            memory.weighed.copy(held).wait(use % 2)
            machine.fence_tensor("after")
            weights = memory.weights.copy(machine.constant(held, "i32")).transposed(0)
            with machine.one_lane():
                for half in range(2):
                    channels = keys.transposed(half * HALF * 2)
                    channels = dataclasses.replace(channels, steps=channels.steps[piece : piece + 1])
                    machine.mma(_output(half), weights, channels, accumulate=i > 0 if piece == 0 else True)
                machine.commit(memory.weights_free.copy(held))
        with machine.one_lane():
            machine.commit(memory.free.copy(stage))

    machine.loop(tiles, step)
    with machine.one_lane():
        machine.commit(memory.done)


# Computing weights.
def _weigh(machine: TensorMemory, block: Block, memory: _Memory, form: AttendedFormat) -> None:
    """Compute weights from logits, tile after tile, and rescale the output if a peak has grown much."""
    softmax = Softmax.of_sinks(block)

    def step(i: Value, softmax: Softmax) -> Softmax:
        memory.scored.wait(i & 1)
        machine.fence_tensor("after")
        logits, factors = machine.load_tensor(_LOGITS), load_of_keys(machine, memory.of_keys[i % STAGES])
        weights, softmax, carried, grew = _fold(machine, logits, softmax, factors, form)
        # The barrier of the logits also covers older products, so no product is writing to the output.
        with machine.when((any_of_warp(machine, grew) > 0) & (i > 0)):
            _scale_output(machine, carried)
        machine.fence_tensor("before")
        for piece in range(_PIECES):
            _hand_over(machine, memory, piece, weights[_PIECE // 2 * piece : _PIECE // 2 * (piece + 1)])
        return softmax

    softmax, row = machine.loop(block.tiles, step, softmax), product_row(machine)
    for i, (peak, total) in enumerate(zip(softmax.peak, softmax.total, strict=True)):
        pair = [peak, over_quad(machine, add, total)]
        memory.stats.store_floats(pair, row + 8 * i, 0, where=machine.thread % QUAD == 0)
    memory.done.arrive()


def _fold(
    machine: TensorMemory, logits: list[Value], softmax: Softmax, factors: list[Value], form: AttendedFormat
) -> tuple[list[Value], Softmax, list[Value], Value]:
    """Add a tile's logits to the softmax.

    Returns:
      The weights, f32; the new softmax; the factor per row by which older sums must be scaled; whether any is not 1.
    """
    logits = scale_logits(machine, logits, factors)
    before, peak = softmax.peak, raised(machine, softmax.peak, logits)
    weights, of_tile = weigh(machine, logits, peak)
    carried = [machine.exp2(old - new) for old, new in zip(before, peak, strict=True)]
    parts = zip(softmax.total, carried, of_tile.total, strict=True)
    softmax = Softmax(peak, [machine.fma(total, factor, more) for total, factor, more in parts])
    if not form.scale_is_power_of_two:
        weights = [weight * factors[column_of(n)] for n, weight in enumerate(weights)]
    return weights, softmax, carried, (before[0] != peak[0]) | (before[1] != peak[1])


def _scale_output(machine: TensorMemory, factors: list[Value]) -> None:
    """Multiply the whole output by a factor for each of a lane's rows."""

    def part(i: Value, _: None) -> None:
        for half in range(2):
            place = _output(half).part(i * _SCALED, _SCALED)
            values = machine.load_tensor(place)
            machine.store_tensor(place, [value * factors[row_of(n)] for n, value in enumerate(values)])

    machine.loop(HALF // _SCALED, part)


def _hand_over(machine: TensorMemory, memory: _Memory, piece: int, weights: list[Value]) -> None:
    """Store a piece's weights as f16 in shared memory, keys as rows, once the previous ones are used."""
    held = piece % _HELD
    memory.weights_free.copy(held).wait(piece // _HELD % 2 ^ 1)
    tile = memory.weights.copy(machine.constant(held, "i32"))
    lane, warp = machine.thread % WARP, machine.thread // WARP
    for n in range(0, len(weights), 2):
        pair = machine.to_f16(*weights[n : n + 2])
        for i, word in enumerate((pair, pair >> 16)):
            key = lane % QUAD * 2 + (n // 4 * 8 + i)
            at = tile.unit(key, warp * 2 + row_of(n)) + lane // QUAD * 2
            machine.store_shared(at, [word], 2, True)
    machine.fence_shared()
    memory.weighed.copy(held).arrive()


assert _PIECES % (2 * _HELD) == 0, "the barriers of a piece held begin each tile with the same parity"
