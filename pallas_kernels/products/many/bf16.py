"""Products of many rows of bf16 on Hopper.

    sums [outputs, rows of x] = weight [outputs, inputs] x^T

Each warpgroup multiplies 64 outputs by all rows of x in the tile. Codes of the weight are copied as they are, widened
in registers, and enter products from there: a wide weight is in no memory.
"""

from __future__ import annotations

import functools

from pallas_kernels.activations import OperandRows
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy, product_row
from pallas_kernels.language.values import Index, Value
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.many.codes import CHUNK_CODES, HALVES, OperandOrder, PlainOrder
from pallas_kernels.products.many.tiles import ManyInputs, Turns, for_each_tile, store_columns, take_pipeline
from pallas_kernels.products.many.tiling import CHUNK_BYTES, OUTPUTS, Tiling
from pallas_kernels.products.weights import factor_of

_OPERAND_WORDS = 8  # of half a chunk

# From chunk to chunk: sums, registers of the last product, and codes and scales that are loaded.
type _Carry = tuple[list[Value], list[Value], list[list[Value]], list[Value]]


def body(machine: TensorCores, inputs: ManyInputs[Buffer], out: Made, *, tiling: Tiling) -> None:
    """Compute a block's tiles."""
    x = Tile.take(machine, tiling.tile_rows, CHUNK_BYTES, copies=tiling.stages)
    codes = Shared(
        machine,
        machine.take_shared(tiling.stages * OUTPUTS * CHUNK_CODES, alignment=1024),
        (tiling.stages, OUTPUTS, CHUNK_CODES),
        "u8",
    )
    turns = Turns.of(machine, tiling, inputs.needed)
    pipe = take_pipeline(turns)

    def copies(chunk: Value, stage: Index) -> tuple[TileCopy, TileCopy]:
        of_chunk = turns.chunk(chunk)
        to = x.copy(stage).offset, codes.address_of(stage, 0, 0)
        return turns.copies(inputs, of_chunk, turns.row(of_chunk[0]), to)

    block = tiling.weight.block
    assert block is not None
    row = product_row(machine) + machine.thread // WARPGROUP * 64
    outputs = row, row + 8
    if isinstance(out, OperandRows):  # then outputs are computed in the order in which they are stored
        assert tiling.kind is OperandRows, "products that take rows in order store such rows"
        outputs = OperandRows.number(row), OperandRows.number(row + 8)
    order = (OperandOrder if tiling.kind is OperandRows else PlainOrder).of(machine, outputs)
    of_scales = order.scale_inputs(block[1])

    def scales_of(chunk: Value) -> list[Value]:
        """Load the bytes of a chunk's scales for this lane's outputs."""
        assert inputs.scales is not None
        place, first = turns.chunk(chunk)
        # The second output is among the 16 of the first one, which share scales.
        of_row, there = (place.output + outputs[0]) // block[0], turns.exists(place)
        return [
            inputs.scales.load_bytes(of_row, (first + further) // block[1], count=1, where=there)
            for further in of_scales
        ]

    def load(chunk: Value) -> list[list[Value]]:
        """Wait for a chunk, and load this lane's codes."""
        return order.load(codes.address_of(pipe.wait(chunk), 0, 0))

    # Codes are loaded a chunk ahead, because a load takes long beside products, which read shared memory too. While
    # half a chunk is multiplied, the next half is widened, that of the next chunk too.
    def sums_of(begin: Value, of_first: list[Value]) -> tuple[list[Value], list[Value]]:
        def one(i: Value, carry: _Carry) -> _Carry:
            sums, held, loaded, scales = carry
            chunk = i + begin
            following = scales_of(chunk + 1)
            tile, upcoming = x.copy(chunk % tiling.stages), loaded
            for half in range(HALVES):
                words = order.operand(loaded, half, factor_of(scales[half % len(scales)]))
                right = tile.k_major(half * 64, 64)
                sums = machine.wgmma(sums, words, right, columns=tiling.tile_rows, dtype="bf16")
                if half == 0:
                    upcoming = load((i + 1).minimum(tiling.of_part - 1) + begin)
                machine.wgmma_wait([], pending=1)
                machine.hold(held)  # no register of an operand is used again before
                held = words
                if half == 0:
                    pipe.release((chunk - 1).maximum(0), i > 0)
            return sums, held, upcoming, following

        zeros = [machine.constant(0.0, "f32")] * (tiling.tile_rows // 2)
        nothing = [machine.constant(0, "i32")] * _OPERAND_WORDS
        sums, held, _, following = machine.loop(tiling.of_part, one, (zeros, nothing, load(begin), of_first))
        sums = machine.wgmma_wait(sums)
        machine.hold(held)
        pipe.release(begin + (tiling.of_part - 1))
        return sums, following

    store = functools.partial(store_columns, turns, inputs.extras, out)
    for_each_tile(turns, pipe, x, copies, scales_of, sums_of, store)
