"""Products of many rows of bf16 on Hopper.

    sums [outputs, rows of x] = weight [outputs, inputs] x^T

Each warpgroup multiplies 64 outputs by all rows of x in the tile. Codes of the weight are copied as they are, widened
in registers, and enter products from there: a wide weight is in no memory.
"""

from __future__ import annotations

import functools

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy, product_row
from pallas_kernels.language.values import Condition, Index, Value, select
from pallas_kernels.products.epilogues.faces import ColumnSums, Extras, Made
from pallas_kernels.products.many.tiles import ManyInputs, Turns, for_each_tile, take_pipeline, warp_rows
from pallas_kernels.products.many.tiling import CHUNK_BYTES, OUTPUTS, Tiling
from pallas_kernels.products.weights import SPREAD, code_pair, factor_of

CHUNK_CODES = CHUNK_BYTES // 2
_OPERAND_WORDS = 8  # of half a chunk
_HALVES, _HALF_INPUTS = 2, 32
_STEPS = 2  # of a product with half a chunk: 16 inputs each
_UNITS = 4  # 16 codes each, of an output's part of a chunk; they are swizzled by pairs of outputs

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
    row, first_row = product_row(machine) + machine.thread // WARPGROUP * 64, warp_rows(machine)
    # Adjacent lanes load the same word, of which each has two codes.
    lane = machine.thread % 4
    at = row * CHUNK_CODES + row // 2 % _UNITS * 16 + lane // 2 * 4
    selector = select(lane % 2 == 0, machine.constant(SPREAD[0], "i32"), SPREAD[1])
    scaled_halves = 1 if block[1] % (_HALVES * _HALF_INPUTS) == 0 else _HALVES

    def scales_of(chunk: Value) -> list[Value]:
        """Load the bytes of a chunk's scales for this warp's 16 outputs."""
        assert inputs.scales is not None
        place, first = turns.chunk(chunk)
        of_row, there = (place.output + first_row) // block[0], turns.exists(place)
        return [
            inputs.scales.load_bytes(of_row, (first + half * _HALF_INPUTS) // block[1], count=1, where=there)
            for half in range(scaled_halves)
        ]

    def load(chunk: Value) -> list[list[Value]]:
        """Wait for a chunk, and load its codes for a left operand, those of each half."""
        start = codes.address_of(pipe.wait(chunk), 0, 0) + at
        places = [
            [
                (start ^ unit * 16) + (further * CHUNK_CODES + place)
                for unit in range(half * _STEPS, (half + 1) * _STEPS)
                for place in (0, 8)
                for further in (0, 8)  # outputs
            ]
            for half in range(_HALVES)
        ]
        return [[machine.load_shared(place, 4)[0] for place in of_half] for of_half in places]

    # Codes are loaded a chunk ahead, because a load takes long beside products, which read shared memory too. While
    # half a chunk is multiplied, the next half is widened, that of the next chunk too.
    def sums_of(begin: Value, of_first: list[Value]) -> tuple[list[Value], list[Value]]:
        def one(i: Value, carry: _Carry) -> _Carry:
            sums, held, loaded, scales = carry
            chunk = i + begin
            following = scales_of(chunk + 1)
            tile, upcoming = x.copy(chunk % tiling.stages), loaded
            for half in range(_HALVES):
                factor = factor_of(scales[half % scaled_halves])
                words = [code_pair(machine, word, selector, factor) for word in loaded[half]]
                right = tile.k_major(half * 64, 64)
                sums = machine.wgmma(sums, words, right, columns=tiling.tile_rows, dtype="bf16")
                if half == 0:
                    upcoming = load((i + 1).minimum(tiling.chunks - 1) + begin)
                machine.wgmma_wait([], pending=1)
                machine.hold(held)  # no register of an operand is used again before
                held = words
                if half == 0:
                    pipe.release((chunk - 1).maximum(0), i > 0)
            return sums, held, upcoming, following

        zeros = [machine.constant(0.0, "f32")] * (tiling.tile_rows // 2)
        nothing = [machine.constant(0, "i32")] * _OPERAND_WORDS
        sums, held, _, following = machine.loop(tiling.chunks, one, (zeros, nothing, load(begin), of_first))
        sums = machine.wgmma_wait(sums)
        machine.hold(held)
        pipe.release(begin + (tiling.chunks - 1))
        return sums, following

    store = functools.partial(store_columns, turns, inputs.extras, out)
    for_each_tile(turns, pipe, x, copies, scales_of, sums_of, store)


def store_columns(turns: Turns, extras: Extras, out: Made, turn: Value, first: Value | int, sums: list[Value]) -> None:
    """Give the epilogue fours [outputs, rows of x], the first of which is number ``first`` of the tile."""
    machine, tiling, place = turns.machine, turns.tiling, turns.place(turn)
    lane = machine.thread % WARP
    output = place.output + warp_rows(machine)
    rows, all_outputs = tiling.rows, tiling.weight.groups * tiling.weight.outputs
    is_whole = rows % tiling.tile_rows == 0
    # A warp's 16 outputs exist, or none of them does.
    exists: Condition = True if tiling.weight.outputs % tiling.tile_outputs == 0 else output < all_outputs
    column = lane % 4 * 2 + turns.row(place) + first * 8

    def there(at: Value) -> Condition:
        return exists if is_whole else exists & (at < rows)

    columns = ColumnSums(machine=machine, output=output, column=column, there=there, sums=sums)
    tiling.epilogue.many_columns(columns, extras, out)
