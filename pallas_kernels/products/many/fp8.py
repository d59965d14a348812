"""Products of many rows that are rounded to FP8, on Hopper.

    sums [rows of x, outputs] = sum over 128 inputs each of (x weight^T) times the scales of both

Each warpgroup multiplies 64 rows of x by 128 outputs at a time. The product of 128 inputs starts at zero; it is scaled
and added in f32, because tensor cores keep few bits of what they add.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.lanes import Buffer, packed_bytes
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy, product_row
from pallas_kernels.language.values import Condition, Index, Value
from pallas_kernels.products.epilogues.faces import Begun, Extras, Made, RowSums
from pallas_kernels.products.many.tiles import ManyInputs, Turns, for_each_tile, take_pipeline
from pallas_kernels.products.many.tiling import CHUNK_BYTES, OUTPUTS, Place, Tiling
from pallas_kernels.products.weights import scale_of

_ROWS = 64  # of a warpgroup


def body(machine: TensorCores, inputs: ManyInputs[Buffer], out: Made, *, tiling: Tiling) -> None:
    """Compute a block's tiles."""
    x = Tile.take(machine, tiling.tile_rows, CHUNK_BYTES, copies=tiling.stages)
    codes = Tile.take(machine, tiling.tile_outputs, CHUNK_BYTES, copies=tiling.stages)
    x_scales = Shared(
        machine,
        machine.take_shared(tiling.stages * tiling.tile_rows * 4, alignment=128),
        (tiling.stages, tiling.tile_rows),
        "f32",
    )
    turns = Turns.of(machine, tiling, inputs.needed, keeps=tiling.epilogue.keeps_needed)
    pipe, parts = take_pipeline(turns), tiling.tile_outputs // OUTPUTS

    def copies(chunk: Value, stage: Index) -> tuple[TileCopy, ...]:
        place, first = turns.chunk(chunk)
        row = turns.row(place)
        to = x.copy(stage).offset, codes.copy(stage).offset
        of_x, of_weight = turns.copies(inputs, (place, first), row, to)
        assert inputs.x_scales is not None
        of_scales = TileCopy(
            source=inputs.x_scales,
            row=(place.x + first) // tiling.chunk,
            column=row,
            to=x_scales.address_of(stage, 0),
            rows=1,
            row_bytes=tiling.tile_rows * 4,
            swizzle=0,
        )
        return of_x, of_scales, of_weight

    block = tiling.weight.block
    assert block is not None

    def scales_of(chunk: Value) -> list[Value]:
        """Load the bytes of a chunk's scales of the weight, for each 128 outputs."""
        assert inputs.scales is not None
        place, first = turns.chunk(chunk)
        return [
            inputs.scales.load_bytes(
                (place.output + part * OUTPUTS) // block[0], first // block[1], count=1, where=turns.exists(place)
            )
            for part in range(parts)
        ]

    def sums_of(begin: Value, of_first: Value) -> tuple[list[Value], Value]:
        warpgroup = machine.thread // WARPGROUP
        row = product_row(machine) + warpgroup * _ROWS

        def one(i: Value, carry: tuple[list[Value], Value]) -> tuple[list[Value], Value]:
            sums, scales = carry
            chunk = i + begin
            following = scales_of(chunk + 1)
            stage = pipe.wait(chunk)
            tile = x.copy(stage)
            left = dataclasses.replace(tile, offset=warpgroup * (_ROWS * CHUNK_BYTES) + tile.offset).k_major()
            of_x = [x_scales.load_floats(stage, row + further, count=1)[0] for further in (0, 8)]
            added = []
            for part in range(parts):
                tile = codes.copy(stage)
                right = dataclasses.replace(tile, offset=tile.offset + part * (OUTPUTS * CHUNK_BYTES)).k_major()
                product = machine.wgmma(None, left, right, columns=OUTPUTS, dtype="e4m3")
                factors = [scale * scale_of((scales >> 8 * part) & 0xFF) for scale in of_x]
                product = machine.wgmma_wait(product)
                if part == parts - 1:
                    pipe.release(chunk)
                before = sums[part * OUTPUTS // 2 : (part + 1) * OUTPUTS // 2]
                added += [
                    machine.fma(value, factors[n // 2 % 2], total)
                    for n, (value, total) in enumerate(zip(product, before, strict=True))
                ]
                if part < parts - 1:  # beside these sums there are no registers for another product
                    machine.keep_order()
            return added, packed_bytes(following)

        zeros = [machine.constant(0.0, "f32")] * (tiling.tile_outputs // 2)
        return machine.loop(tiling.chunks, one, (zeros, of_first))

    begun = tiling.epilogue.begin_many(machine, tiling.tile_shape, inputs.extras)
    store = functools.partial(_store, turns, inputs.extras, out, begun)
    for_each_tile(turns, pipe, x, copies, lambda chunk: packed_bytes(scales_of(chunk)), sums_of, store)


def _store(
    turns: Turns, extras: Extras, out: Made, begun: Begun, turn: Value, first: Value | int, sums: list[Value]
) -> None:
    """Give the epilogue fours [rows of x, outputs], the first of which is number ``first`` of the tile."""
    place = turns.place(turn)
    output = place.output + first * 8
    of_rows = RowSums(machine=turns.machine, turn=turn, rows=_rows(turns, place), output=output, sums=sums)
    turns.tiling.epilogue.many_rows(of_rows, extras, out, begun)


def _rows(turns: Turns, place: Place) -> list[tuple[Value, Value, Condition]]:
    """Return a lane's two rows: their numbers in the tile and in x, and whether they exist."""
    machine, tiling = turns.machine, turns.tiling
    row = product_row(machine) + machine.thread // WARPGROUP * _ROWS
    if not tiling.epilogue.keeps_rows or turns.needed is not None:
        row = machine.hold(row)  # no register is free to keep what follows from it from tile to tile
    is_whole = tiling.rows % tiling.tile_rows == 0
    first = turns.row(place)
    rows = [(at, at + first) for at in (row, row + 8)]
    return [(in_tile, at, True if is_whole else at < tiling.rows) for in_tile, at in rows]
