"""Products of many rows that are rounded to FP8, on Hopper.

    sums [rows of x, outputs] = sum over 128 inputs each of (x weight^T) times the scales of both

Each warpgroup multiplies 64 rows of x by 128 outputs at a time. The product of 128 inputs starts at zero; it is scaled
and added in f32, because tensor cores keep few bits of what they add.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer, Team, add, fold, swapped
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy, product_row
from pallas_kernels.language.values import Condition, Value
from pallas_kernels.products import keys
from pallas_kernels.products.heads import Angles, Squares
from pallas_kernels.products.many.tiles import ManyInputs, Ring, Turns, for_each_tile
from pallas_kernels.products.many.tiling import CHUNK_BYTES, OUTPUTS, WARPGROUPS, Place, Tiling
from pallas_kernels.products.residual import Onto, Words
from pallas_kernels.products.weights import scale_of
from pallas_kernels.rounding import GROUP, RoundedRows, store_group

_ROWS = 64  # of a warpgroup


def body(machine: TensorCores, inputs: ManyInputs, out: Any, *, tiling: Tiling) -> None:
    """Compute a block's tiles."""
    x = Tile.take(machine, tiling.tile_rows, CHUNK_BYTES, copies=tiling.stages)
    codes = Tile.take(machine, tiling.tile_outputs, CHUNK_BYTES, copies=tiling.stages)
    x_scales = Shared(
        machine,
        machine.take_shared(tiling.stages * tiling.tile_rows * 4, alignment=128),
        (tiling.stages, tiling.tile_rows),
        "f32",
    )
    is_f32 = isinstance(out, Buffer) and out.dtype.itemsize == 4
    turns = Turns.of(machine, tiling, inputs.needed, keeps=not is_f32)
    assert isinstance(x.offset, int)
    arena, parts = x.offset, tiling.tile_outputs // OUTPUTS

    def fill(chunk: Value, stage: Value, barrier: Barrier) -> None:
        place, first = turns.chunk(chunk)
        row = turns.row(place)
        to = x.copy(stage).offset, codes.copy(stage).offset
        of_x, of_weight = turns.copies(inputs, (place, first), row, to)
        of_scales = TileCopy(
            source=inputs.x_scales,
            row=(place.x + first) // tiling.chunk,
            column=row,
            to=x_scales.address_of(stage, 0),
            rows=1,
            row_bytes=tiling.tile_rows * 4,
            swizzle=0,
        )
        barrier.fill(of_x, of_scales, of_weight)

    ring = Ring.take(turns, fill)
    block = tiling.form.block
    assert block is not None

    def scales_of(chunk: Value) -> list[Value]:
        """Load the bytes of a chunk's scales of the weight, for each 128 outputs."""
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
            stage = ring.wait(chunk)
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
                    ring.leave(chunk)
                before = sums[part * OUTPUTS // 2 : (part + 1) * OUTPUTS // 2]
                added += [
                    machine.fma(value, factors[n // 2 % 2], total)
                    for n, (value, total) in enumerate(zip(product, before, strict=True))
                ]
                if part < parts - 1:  # beside these sums there are no registers for another product
                    machine.keep_order()
            return added, keys.packed(following)

        zeros = [machine.constant(0.0, "f32")] * (tiling.tile_outputs // 2)
        return machine.loop(tiling.chunks, one, (zeros, of_first))

    store = functools.partial(_store, turns, out, inputs.positions)
    if tiling.heads is not None:
        squares = Squares.take(machine, tiling.neighbours, tiling.tile_rows, WARPGROUPS)
        store = functools.partial(_store_queries, turns, inputs.angles, squares, out)
    if tiling.key_heads is not None:
        store = functools.partial(_store_keys, turns, inputs.angles, out)
    for_each_tile(turns, ring, arena, lambda chunk: keys.packed(scales_of(chunk)), sums_of, store)


def _store(
    turns: Turns, out: Any, positions: Buffer | None, turn: Value, first: Value | int, sums: list[Value]
) -> None:
    """Store fours, the first of which is number ``first`` of the tile. Every store writes whole sectors of 32 bytes."""
    machine, place = turns.machine, turns.place(turn)
    output = place.output + first * 8
    for half, (_, at, where) in enumerate(_rows(turns, place)):
        pairs = [sums[n : n + 2] for n in range(2 * half, len(sums), 4)]
        if isinstance(out, RoundedRows):
            for n in range(0, len(pairs), GROUP // 8):
                store_group(machine, out, pairs[n : n + GROUP // 8], at, (output + n * 8) // GROUP, where)
        elif out.dtype.itemsize == 4:
            for n, pair in enumerate(pairs):
                out.store_floats(pair, at, output + machine.thread % 4 * 2 + n * 8, where=where)
        else:
            words = [machine.to_bf16(*pair) for pair in pairs]
            _store_words(machine, Onto(out, positions), at, output, words, where)


def _store_queries(
    turns: Turns, angles: Buffer, squares: Squares, out: Buffer, turn: Value, first: Value | int, sums: list[Value]
) -> None:
    """Store a tile of queries: the sums, normed over their heads, rotated and rounded to f16."""
    del first  # a block has all fours of its tile
    machine, tiling, place = turns.machine, turns.tiling, turns.place(turn)
    heads = tiling.heads
    assert heads is not None
    rows = _rows(turns, place)
    last = machine.rank == tiling.neighbours - 1
    rope = Angles.load(machine, angles, [row[1:] for row in rows], tiling.fours, last)
    halves = [[sums[n : n + 2] for n in range(2 * half, len(sums), 4)] for half in range(2)]
    of_lane = [_sum_of_squares(machine, pairs) for pairs in halves]
    of_tile = [Team(machine, 4).reduce((add, total))[0] for total in of_lane]
    totals = squares.totals(turn, [in_tile for in_tile, *_ in rows], of_tile)
    for half, (pairs, total, (_, at, where)) in enumerate(zip(halves, totals, rows, strict=True)):
        inverse_rms = machine.inverse_sqrt(total * (1 / heads.dim) + heads.eps)
        normed = [[value * inverse_rms for value in pair] for pair in pairs]
        words = [machine.to_f16(*rope.rotate(half, n, pair)) for n, pair in enumerate(normed)]
        _store_words(machine, Onto(out, None), at, place.output, words, where)


def _sum_of_squares(machine: TensorCores, pairs: list[list[Value]]) -> Value:
    sums = [machine.constant(0.0, "f32")] * 2
    for pair in pairs:
        sums = [machine.fma(value, value, total) for value, total in zip(pair, sums, strict=True)]
    return fold(add, sums)


def _store_keys(turns: Turns, angles: Buffer, out: Any, turn: Value, first: Value | int, sums: list[Value]) -> None:
    """Store a tile of the indexer's queries, of which each 128 outputs are a head."""
    del first  # a block has all fours of its tile
    machine, tiling, place = turns.machine, turns.tiling, turns.place(turn)
    heads = tiling.key_heads
    assert heads is not None
    rows, fours = _rows(turns, place), keys.DIM // 8
    rope = Angles.load(machine, angles, [row[1:] for row in rows], fours, True)
    for half, (_, at, where) in enumerate(rows):
        for head in range(tiling.tile_outputs // keys.DIM):
            of_head = sums[head * keys.DIM // 2 : (head + 1) * keys.DIM // 2]
            pairs = [of_head[n : n + 2] for n in range(2 * half, len(of_head), 4)]
            turned = keys.hadamard(machine, [rope.rotate(half, n, pair) for n, pair in enumerate(pairs)])
            keys.store_head(machine, heads, turned, out, (at, place.output // keys.DIM + head), where)


def _rows(turns: Turns, place: Place) -> list[tuple[Value, Value, Condition]]:
    """Return a lane's two rows: their numbers in the tile and in x, and whether they exist."""
    machine, tiling = turns.machine, turns.tiling
    row = product_row(machine) + machine.thread // WARPGROUP * _ROWS
    if tiling.heads is not None or tiling.key_heads is not None or turns.needed is not None:
        row = machine.hold(row)  # no register is free to keep what follows from it from tile to tile
    is_whole = tiling.rows % tiling.tile_rows == 0
    first = turns.row(place)
    rows = [(at, at + first) for at in (row, row + 8)]
    return [(in_tile, at, True if is_whole else at < tiling.rows) for in_tile, at in rows]


def _store_words(
    machine: TensorCores, onto: Onto, at: Value, output: Value, words: list[Value], where: Condition
) -> None:
    """Store a row of a tile, each word with two adjacent outputs of each eight from ``output`` on."""
    # Two adjacent lanes have four adjacent outputs of each eight. The even one takes those of the first of two eights,
    # and the odd one those of the second.
    lane = machine.thread % WARP

    def place_of(n: int) -> Words:
        pair = swapped(machine, lane % 2 == 1, (words[n], words[n + 1]), 1)
        return Words(list(pair), at, lane // 2 % 2 * 4 + lane % 2 * 8 + output + n * 8, where)

    onto.store(place_of(n) for n in range(0, len(words), 2))
