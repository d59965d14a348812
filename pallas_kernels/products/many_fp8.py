"""Products of many rows that are rounded to FP8, on Hopper.

    sums [rows of x, outputs] = sum over 128 inputs each of (x weight^T) times the scales of both

Each warpgroup multiplies 64 rows of x by 128 outputs at a time. The product of 128 inputs starts at zero; it is scaled
and added in f32, because tensor cores keep few bits of what they add.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Value
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy, product_row
from pallas_kernels.products.many import ManyInputs, Turns, for_each_tile, swapped
from pallas_kernels.products.ring import Ring
from pallas_kernels.products.tiling import CHUNK_BYTES, OUTPUTS, Place, Tiling
from pallas_kernels.products.weights import scale_of

_ROWS = 64  # of a warpgroup


def body(machine: TensorCores, inputs: ManyInputs, out: Buffer, *, tiling: Tiling) -> None:
    """Compute a block's tiles."""
    x = Tile.take(machine, tiling.tile_rows, CHUNK_BYTES, copies=tiling.stages)
    codes = Tile.take(machine, tiling.tile_outputs, CHUNK_BYTES, copies=tiling.stages)
    x_scales = Shared(
        machine,
        machine.take_shared(tiling.stages * tiling.tile_rows * 4, alignment=128),
        (tiling.stages, tiling.tile_rows),
        "f32",
    )
    turns = Turns.of(machine, tiling)
    assert isinstance(x.offset, int)
    arena, parts = x.offset, tiling.tile_outputs // OUTPUTS

    def fill(chunk: Value, stage: Value, barrier: Barrier) -> None:
        place, first = turns.chunk(chunk)
        of_x = TileCopy(
            source=inputs.x,
            row=place.row,
            column=place.x + first,
            to=x.copy(stage).offset,
            rows=tiling.tile_rows,
            row_bytes=CHUNK_BYTES,
        )
        of_scales = TileCopy(
            source=inputs.x_scales,
            row=(place.x + first) // tiling.chunk,
            column=place.row,
            to=x_scales.address_of(stage, 0),
            rows=1,
            row_bytes=tiling.tile_rows * 4,
            swizzle=0,
        )
        of_weight = TileCopy(
            source=inputs.weight,
            row=place.output,
            column=first,
            to=codes.copy(stage).offset,
            rows=tiling.tile_outputs,
            row_bytes=CHUNK_BYTES,
        )
        barrier.fill(of_x, of_scales, of_weight)

    ring = Ring.take(machine, tiling, turns.total, fill)
    block = tiling.form.block
    assert block is not None
    row, warpgroup = product_row(machine) + machine.thread // WARPGROUP * _ROWS, machine.thread // WARPGROUP

    def scales_of(chunk: Value) -> list[Value]:
        """Load the bytes of a chunk's scales of the weight, for each 128 outputs."""
        place, first = turns.chunk(chunk)
        return [
            inputs.scales.load_bytes(
                (place.output + part * OUTPUTS) // block[0], first // block[1], count=1, where=chunk < ring.total
            )
            for part in range(parts)
        ]

    def sums_of(begin: Value) -> list[Value]:
        def one(i: Value, carry: tuple[list[Value], list[Value]]) -> tuple[list[Value], list[Value]]:
            sums, scales = carry
            chunk = i + begin
            following = scales_of(chunk + 1)
            stage = ring.wait(chunk)
            tile = x.copy(stage)
            left = dataclasses.replace(tile, offset=warpgroup * (_ROWS * CHUNK_BYTES) + tile.offset).k_major()
            of_x = [x_scales.load_floats(stage, row + further, count=1)[0] for further in (0, 8)]
            added = []
            for part in range(parts):
                tile = codes.copy(stage)
                right = dataclasses.replace(tile, offset=tile.offset + part * (OUTPUTS * CHUNK_BYTES)).k_major()
                product = machine.wgmma(None, left, right, columns=OUTPUTS, dtype="e4m3")
                if parts == 1:
                    ring.advance(chunk)
                factors = [scale * scale_of(scales[part]) for scale in of_x]
                product = machine.wgmma_wait(product)
                if part == parts - 1:
                    ring.leave(stage)
                before = sums[part * OUTPUTS // 2 : (part + 1) * OUTPUTS // 2]
                added += [
                    machine.fma(value, factors[n // 2 % 2], total)
                    for n, (value, total) in enumerate(zip(product, before, strict=True))
                ]
                if part == 0 and parts > 1:  # beside a product there are no registers for it
                    ring.advance(chunk)
            return added, following

        zeros = [machine.constant(0.0, "f32")] * (tiling.tile_outputs // 2)
        return machine.loop(tiling.chunks, one, (zeros, scales_of(begin)))[0]

    for_each_tile(turns, ring, arena, sums_of, functools.partial(_store, machine, tiling, out))


def _store(
    machine: TensorCores, tiling: Tiling, out: Buffer, place: Place, first: Value | int, sums: list[Value]
) -> None:
    """Store fours, the first of which is number ``first`` of the tile. Every store writes whole sectors of 32 bytes."""
    lane, rows = machine.thread % WARP, tiling.rows
    row = place.row + machine.thread // WARPGROUP * _ROWS + machine.thread % WARPGROUP // WARP * 16 + lane // 4
    output = place.output + first * 8
    is_odd = lane % 2 == 1
    for half in range(2):
        at = row + half * 8
        where = True if rows % tiling.tile_rows == 0 else at < rows
        if out.dtype.itemsize == 4:
            for n in range(2 * half, len(sums), 4):
                out.store_floats(sums[n : n + 2], at, output + lane % 4 * 2 + n // 4 * 8, where=where)
            continue
        # Two adjacent lanes have four adjacent outputs of each eight. The even one takes those of the first of two
        # eights, and the odd one those of the second.
        words = [machine.to_bf16(*sums[n : n + 2]) for n in range(2 * half, len(sums), 4)]
        for n in range(0, len(words), 2):
            pair = swapped(machine, is_odd, (words[n], words[n + 1]), 1)
            out.store_words(list(pair), at, lane // 2 % 2 * 4 + lane % 2 * 8 + output + n * 8, where=where)
