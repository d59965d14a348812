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
    STAGES,
    WARPS,
    Before,
    Block,
    BlockLayout,
    Memory,
    Softmax,
    finish_output,
    load_tiles,
    raised,
    scale_logits,
    weigh,
)
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, Query, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import QUAD, Fragment, PerColumn, PerRow
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline, Use
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import BLACKWELL, GPU
from pallas_kernels.language.tensor_cores import Role, Tile, product_row
from pallas_kernels.language.tensor_memory import MAX_COLUMNS, Accumulator, TensorMemory
from pallas_kernels.language.values import Index, Value, select

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

    def body(
        self, machine: TensorMemory, inputs: AttentionInputs[Buffer], outputs: Outputs[Buffer], *, form: AttendedFormat
    ) -> None:
        memory = _Memory.take(machine)
        init_barriers(
            *(memory.pipe.full, memory.pipe.free, memory.weights_pipe.full, memory.weights_pipe.free),
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
    weights_pipe: Pipeline  # a piece in shared memory is full when its weights are stored, free after its product
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
            factors=Shared.take(machine, (STAGES, KEYS), "f32"),
            stats=Shared.take(machine, (HEADS, 2), "f32"),
            pipe=Pipeline(
                full=Barrier.take(machine, WARPS, copies=STAGES),
                free=Barrier.take(machine, product, copies=STAGES),
            ),
            weights_pipe=Pipeline(
                full=Barrier.take(machine, WARPS, copies=_HELD),
                free=Barrier.take(machine, product, copies=_HELD),
            ),
            loaded_q=Barrier.take(machine, CONSUMERS * WARPS),
            scored=Barrier.take(machine, product),
            done=Barrier.take(machine, WARPS + product),
        )

    def use_of_piece(self, piece: int) -> Use:
        """Return the use of shared memory by a piece of a tile. Each tile has an even number of uses."""
        return self.weights_pipe.use_of(piece % _HELD, piece // _HELD)


def _multiply(
    machine: TensorMemory, block: Block, memory: _Memory, outputs: Outputs[Buffer], form: AttendedFormat
) -> None:
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
    peak, total = zip(*(from_row.load_floats(8 * i, 0, count=2) for i in range(2)), strict=True)
    softmax = Softmax(PerRow([*peak]), PerRow([*total]))
    finish_output(block, outputs, Fragment(machine.load_tensor(_output(half))), softmax, half)


def _load_queries(block: Block, memory: _Memory) -> None:
    """Load the queries of the block's heads as f16, and zeros in rows past the last head."""
    machine, query, lane = block.machine, block.query, block.machine.thread
    units, lanes = HEAD_DIM * 2 // 16, CONSUMERS * WARPGROUP
    for i in range(HEADS * units // lanes):
        n = lane + i * lanes
        row, unit = n // units, n % units
        at, head = memory.q.unit(row, unit), block.first_head + row
        machine.store_shared(at, query.head_words(head, unit, block.has_head(head)), 16, True)
    machine.fence_shared()
    memory.loaded_q.arrive()
    memory.loaded_q.wait(0)


# Starting products.
def _ask(machine: TensorMemory, memory: _Memory, tiles: Value) -> None:
    """Start the products of all tiles: a tile's logits, then, as weights arrive, their products with the keys.

    This runs on one warp, of which one lane issues the instructions.
    """

    def step(i: Value, _: None) -> None:
        use = memory.pipe.use(i)
        keys = memory.keys.copy(use.stage)
        use.wait()
        with machine.one_lane():
            machine.mma(_LOGITS, memory.q.k_major(), keys.k_major(), accumulate=False)
            machine.commit(memory.scored)
        for piece in range(_PIECES):
            passed = memory.use_of_piece(piece)
            passed.wait()
            machine.fence_tensor("after")
            weights = memory.weights.copy(machine.constant(piece % _HELD, "i32")).transposed(0)
            with machine.one_lane():
                for half in range(2):
                    channels = keys.transposed(half * HALF * 2)
                    channels = dataclasses.replace(channels, steps=channels.steps[piece : piece + 1])
                    machine.mma(_output(half), weights, channels, accumulate=i > 0 if piece == 0 else True)
                machine.commit(passed.free)
        with machine.one_lane():
            machine.commit(use.free)

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
        logits = Fragment(machine.load_tensor(_LOGITS))
        factors = PerColumn.load(machine, KEYS, memory.factors, i % STAGES, 0)
        weights, softmax, carried, grew = _fold(machine, logits, softmax, factors, form)
        # The barrier of the logits also covers older products, so no product is writing to the output.
        any_grew = machine.reduce_warp("max", select(grew, machine.constant(1, "i32"), 0)) > 0
        with machine.when(any_grew & (i > 0)):
            _scale_output(machine, carried)
        machine.fence_tensor("before")
        for piece, part in enumerate(weights.parts(_PIECE)):
            _hand_over(machine, memory, piece, part)
        return softmax

    softmax, row = machine.loop(block.tiles, step, softmax).over_quads(), product_row(machine)
    for i, pair in enumerate(zip(softmax.peak.values, softmax.total.values, strict=True)):
        memory.stats.store_floats([*pair], row + 8 * i, 0, where=machine.thread % QUAD == 0)
    memory.done.arrive()


def _fold(
    machine: TensorMemory, logits: Fragment, softmax: Softmax, factors: PerColumn, form: AttendedFormat
) -> tuple[Fragment, Softmax, PerRow, Value]:
    """Add a tile's logits to the softmax.

    Returns:
      The weights, f32; the new softmax; the factor per row by which older sums must be scaled; whether any is not 1.
    """
    logits = scale_logits(machine, logits, factors)
    before, peak = softmax.peak, raised(machine, softmax.peak, logits)
    weights, of_tile = weigh(machine, logits, peak)
    carried = before.map(lambda old, new: machine.exp2(old - new), peak)
    softmax = Softmax(peak, softmax.total.map(machine.fma, carried, of_tile.total))
    if not form.scale_is_power_of_two:
        weights = weights.map(lambda weight, factor: weight * factor, factors)
    one, other = before.map(lambda old, new: old != new, peak).values
    return weights, softmax, carried, one | other


def _scale_output(machine: TensorMemory, factors: PerRow) -> None:
    """Multiply the whole output by a factor for each row."""

    def part(i: Value, _: None) -> None:
        for half in range(2):
            place = _output(half).part(i * _SCALED, _SCALED)
            machine.store_tensor(place, Fragment(machine.load_tensor(place)).scale_rows(factors).values)

    machine.loop(HALF // _SCALED, part)


def _hand_over(machine: TensorMemory, memory: _Memory, piece: int, weights: Fragment) -> None:
    """Store a piece's weights as f16 in shared memory, keys as rows, once the previous ones are used."""
    passed = memory.use_of_piece(piece)
    passed.acquire()
    tile = memory.weights.copy(machine.constant(piece % _HELD, "i32"))
    lane, warp = machine.thread % WARP, machine.thread // WARP
    for n, pair in enumerate(weights.operand("f16").words):
        for i, word in enumerate((pair, pair >> 16)):
            key = lane % QUAD * 2 + (n // 2 * 8 + i)
            at = tile.unit(key, warp * 2 + n % 2) + lane // QUAD * 2
            machine.store_shared(at, [word], 2, True)
    machine.fence_shared()
    passed.commit()


assert _PIECES % (2 * _HELD) == 0, "the barriers of a piece held begin each tile with the same parity"
