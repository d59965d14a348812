"""Decode attention on Hopper: two warpgroups multiply, a third brings the keys.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

A block serves 64 heads of one query. Its loader turns stored rows into f16 tiles of 64 keys, two tiles of room. Each
of the two other warpgroups computes all logits and weights for itself, and half of the output's channels: half as many
products again, yet neither waits for the other, so that one's softmax runs under the other's products, and weights go
from registers straight to the next product.

Few queries do not fill the chip: then a cluster of blocks shares the tiles of one query, and adds its parts up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.keys import (
    HEAD_DIM,
    KEYS,
    LOG2E,
    LOWEST,
    NOPE_DIM,
    ROOM,
    ROPE_DIM,
    SCALED_ROWS,
    Inputs,
    KeyLoader,
    Query,
    StoredRow,
)
from pallas_kernels.language.lanes import Buffer, add, fold, fold_tree, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Index, Value, negate, select
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile, product_row

HEADS = 64  # of a block
_HALF = HEAD_DIM // 2  # channels of a warpgroup
_STAGES = 2
_CONSUMERS = 2
_LOGITS = KEYS // 2  # of a lane
# Of a lane, to multiply and to load. Tile scales take more to load; all formats that way would be 3 % slower.
_REGISTERS = {"fp8_row": (208, 88), "fp8_tile64": (200, 104), "bf16": (208, 88)}
_STORED_BYTES = 256  # of a row, at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Where the blocks of a cluster leave their parts of an output."""

    stats: Any  # f32 [queries, groups of heads, cluster, HEADS, 2] peak and total of each block
    parts: Any  # f16 [queries, groups of heads, cluster, cluster, loads, lanes, 8] to, from, as lanes hold them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a query is shared: its heads by groups of 64, its tiles of keys by the blocks of a cluster."""

    cluster: int = 1

    heads: ClassVar[int] = HEADS
    warpgroups: ClassVar[int] = _CONSUMERS + 1

    @property
    def shared_bytes(self) -> int:
        tiles = (HEADS + _STAGES * KEYS) * HEAD_DIM * 2
        return tiles + ROOM + _STAGES * KEYS * 8 + ROPE_DIM * 4 + 8 * (2 * _STAGES + 2 + _CONSUMERS) + 1024

    def check(self, heads: int, tiles: int) -> None:
        """ValueError where it does not share a query of so many heads and tiles, of which any number will do."""
        if self.cluster not in (1, 2, 4, 8):
            raise ValueError(f"{self} does not share {HEAD_DIM} channels")

    def scratch(self, queries: int, groups: int) -> Scratch | None:
        if self.cluster == 1:
            return None
        lanes, lead = _CONSUMERS * WARPGROUP, (queries, groups, self.cluster)
        loads = HEADS * HEAD_DIM // (self.cluster * lanes * 8)
        return Scratch(
            stats=jax.ShapeDtypeStruct((*lead, HEADS, 2), jnp.float32),
            parts=jax.ShapeDtypeStruct((*lead, self.cluster, loads, lanes, 8), jnp.float16),
        )

    def body(self, machine: TensorCores, inputs: Inputs, state: tuple[Buffer, Any], *, kv_format: str) -> None:
        """Inputs -> out bf16 or f32 [B, T, H, 512], and scratch. Grid (B * T, H / 64)."""
        out, scratch = state
        block = Block.of(machine, inputs, self.cluster)
        multiply, load = _REGISTERS[kv_format]
        machine.roles(
            Role(
                warpgroups=_CONSUMERS,
                registers=multiply,
                body=lambda: _multiply(block, out, scratch, kv_format),
            ),
            Role(warpgroups=1, registers=load, body=lambda: load_tiles(block, kv_format)),
        )


@dataclasses.dataclass(eq=False)
class Block:
    """What the roles of a block share."""

    machine: TensorCores
    query: Query
    heads: Value  # number of the first head
    cluster: int
    rank: Value  # of the block in its cluster
    tiles: Value  # that this block of the cluster serves, one at least: it may have no key
    q: Tile
    keys: Tile  # copies: stages
    room: int  # where stored rows wait
    key: int  # f32 [stages, KEYS, 2]: what a key's logits are multiplied by, and what is added
    angles: int  # f32 [ROPE_DIM]
    full: int  # barriers, per stage
    free: int
    begun: int  # the loader's first loads were issued
    loaded_q: int
    turn: int  # per multiplying warpgroup

    @classmethod
    def of(cls, machine: TensorCores, inputs: Inputs, cluster: int) -> Block:
        query = Query.of_block(machine, inputs)
        rank, tiles = query.share(cluster)
        barriers = machine.take_barriers(2 * _STAGES + 2 + _CONSUMERS)
        block = cls(
            machine=machine,
            query=query,
            heads=machine.block(1) * HEADS,
            cluster=cluster,
            rank=rank,
            tiles=tiles,
            q=Tile.take(machine, HEADS, HEAD_DIM * 2),
            keys=Tile.take(machine, KEYS, HEAD_DIM * 2, copies=_STAGES),
            room=machine.take_shared(ROOM),
            key=machine.take_shared(_STAGES * KEYS * 8),
            angles=machine.take_shared(ROPE_DIM * 4),
            full=barriers,
            free=barriers + 8 * _STAGES,
            loaded_q=barriers + 16 * _STAGES,
            begun=barriers + 16 * _STAGES + 8,
            turn=barriers + 16 * _STAGES + 16,
        )
        warps = WARPGROUP // WARP
        machine.init_barriers(
            [(block.full + 8 * i, warps) for i in range(_STAGES)]
            + [(block.free + 8 * i, _CONSUMERS * warps) for i in range(_STAGES)]
            + [(block.loaded_q, _CONSUMERS * warps), (block.begun, warps)]
            + [(block.turn + 8 * i, warps) for i in range(_CONSUMERS)]
        )
        return block


# Loading.
def load_tiles(block: Block, kv_format: str) -> None:
    """Tile after tile: bytes are on their way one tile ahead, their addresses are found two and three."""
    machine, loader = block.machine, KeyLoader(block.query, kv_format)
    ahead = kv_format != "bf16"  # of which there is room for one row only

    def tile(i: Index) -> Value:
        """The blocks of a cluster take tiles in turn: those with two of ten then begin with the window's."""
        return block.rank + i * block.cluster

    def find(tile: Value) -> list[Value]:
        return [select(tile < block.query.tiles, number, -1) for number in loader.find(tile)]

    def room(which: int) -> int:
        return block.room + (which * ROOM // 2 if ahead else 0)

    def load(tile: Value, places: list[Value]) -> list[StoredRow]:
        return [loader.load(tile, which, places[which], room(which)) for which in range(2)]

    def flat(rows: list[StoredRow]) -> list[Value]:
        return [value for row in rows for value in row.flat()]

    # Nothing that waits for a load stands before the first tile's. The queries, which take longer, are asked for behind
    # a window's rows, but before picked ones, whose places are still to be found.
    in_window = tile(machine.constant(0, "i32")) < block.query.window_tiles
    machine.arrive(machine.constant(block.begun, "i32"), negate(in_window))
    numbers = [find(tile(i)) for i in range(3)]
    places = loader.resolve(tile(0), numbers[0], loader.find_blocks(tile(0), numbers[0]))
    rows = load(tile(0), places) if ahead else []
    machine.arrive(machine.constant(block.begun, "i32"), in_window)
    blocks = loader.find_blocks(tile(1), numbers[1])

    def step(i: Value, carry: list[Value]) -> list[Value]:
        stage = i % _STAGES
        numbers, blocks, next_numbers, there = carry[:2], carry[2:4], carry[4:6], carry[6:]
        keys, key = block.keys.copy(stage), stage * (KEYS * 8) + block.key
        machine.wait(stage * 8 + block.free, (i // _STAGES & 1) ^ 1)
        if ahead:
            machine.wait_copies()
        for which in range(2):
            if ahead:
                row = rows[which].like(there[which * len(there) // 2 :][: len(there) // 2])
            else:
                row = loader.load(tile(i), which, there[which], room(which))
                machine.wait_copies()
            loader.store(tile(i), which, row, room(which), keys, key)
        machine.fence_shared()
        machine.arrive(stage * 8 + block.full)
        places = loader.resolve(tile(i + 1), numbers, blocks)
        coming = flat(load(tile(i + 1), places)) if ahead else places
        blocks = loader.find_blocks(tile(i + 2), next_numbers)
        return [*next_numbers, *blocks, *find(tile(i + 3)), *coming]

    coming = flat(rows) if ahead else places
    machine.loop(block.tiles, step, [*numbers[1], *blocks, *numbers[2], *coming])
    if block.cluster > 1:  # the barrier of ``merge_parts`` is for all lanes of the cluster
        machine.barrier("cluster")


# Multiplying.
@dataclasses.dataclass(eq=False)
class Softmax:
    """A running softmax over the two rows of a product that a lane holds, in powers of two."""

    values: list[Value]  # two peaks, the same in the four lanes of a quad; this lane's two parts of the sums of weights

    @property
    def peak(self) -> list[Value]:
        return self.values[:2]

    @property
    def total(self) -> list[Value]:
        return self.values[2:]


def _multiply(block: Block, out: Buffer, scratch: Any, kv_format: str) -> None:
    machine, query = block.machine, block.query
    half = machine.thread // WARPGROUP  # of the channels
    load_queries(block)
    row = product_row(machine)
    sink = [query.inputs.sinks.load_floats(block.heads + row + 8 * i, count=1)[0] * LOG2E for i in range(2)]
    sink = [value.maximum(LOWEST) for value in sink]
    lane_total = select((machine.thread % 4).equals(0), machine.constant(1.0, "f32"), 0.0)
    if block.cluster > 1:  # one block of the cluster counts the sink
        counts = block.rank.equals(0)
        sink = [select(counts, value, LOWEST) for value in sink]
        lane_total = select(counts, lane_total, 0.0)
    values = _HALF // 2  # of the output, per lane
    start = [*sink, lane_total, lane_total, *[machine.constant(0.0, "f32")] * values]

    # The two warpgroups ask for products in turn: then one's softmax runs under the other's. A turn is the product with
    # a tile's weights and the logits of the next tile.
    def take_turn(i: Value) -> None:
        machine.wait(half * 8 + block.turn, (i ^ half ^ 1) & 1)

    def pass_turn(where: Condition = True) -> None:
        machine.arrive((half ^ 1) * 8 + block.turn, where)

    def multiply_q(i: Value) -> list[Value]:
        machine.wait(i % _STAGES * 8 + block.full, i // _STAGES & 1)
        return machine.wgmma(None, block.q.k_major(), block.keys.copy(i % _STAGES).k_major(), columns=KEYS)

    def next_logits(i: Value) -> list[Value]:
        logits = multiply_q(i)
        pass_turn()
        return machine.wgmma_wait(logits)

    def step(i: Value, carry: list[Value]) -> list[Value]:
        stage, is_last = i % _STAGES, (i + 1).equals(block.tiles)
        logits, softmax, output = carry[:_LOGITS], Softmax(carry[_LOGITS : _LOGITS + 4]), carry[_LOGITS + 4 :]
        weights, softmax, carried = _fold(machine, logits, softmax, stage * (KEYS * 8) + block.key, kv_format)
        output = [value * carried[n // 2 % 2] for n, value in enumerate(output)]
        keys = block.keys.copy(stage)
        channels = dataclasses.replace(keys, offset=half * (_HALF * 2 * 8) + keys.offset).transposed(0)
        take_turn(i)
        output = machine.wgmma(output, weights, channels, columns=_HALF)
        pass_turn(is_last)
        output = machine.wgmma_wait(output)
        machine.arrive(stage * 8 + block.free)
        # After the last tile there are no logits; a loop, for a second copy of all this would be long to fetch.
        more = select(is_last, machine.constant(0, "i32"), 1)
        none = [machine.constant(0.0, "f32")] * _LOGITS
        return [*machine.loop(more, lambda _, __: next_logits(i + 1), none), *softmax.values, *output]

    logits = machine.wgmma_wait(multiply_q(machine.constant(0, "i32")))
    carry = machine.loop(block.tiles, step, [*logits, *start])
    softmax, output = Softmax(carry[_LOGITS : _LOGITS + 4]), carry[_LOGITS + 4 :]
    total = [over_quad(machine, add, value) for value in softmax.total]
    if block.cluster == 1:
        inverse = [machine.reciprocal(value) for value in total]
        output, first = [value * inverse[n // 2 % 2] for n, value in enumerate(output)], 0
    else:
        output = merge_parts(block, scratch, output, softmax.peak, total)
        first = block.rank * (_HALF // block.cluster)
    store_output(block, out, output, half, first)


def load_queries(block: Block) -> None:
    """The queries of the block's heads, as f16."""
    machine, none = block.machine, block.machine.constant(0, "i32")
    machine.wait(machine.constant(block.begun, "i32"), none)
    units, lanes = HEAD_DIM * 2 // 16, _CONSUMERS * WARPGROUP
    for i in range(HEADS * units // lanes):
        n = machine.thread + i * lanes
        head, unit = n // units, n % units
        machine.store_shared(block.q.unit(head, unit), block.query.head_words(block.heads + head, unit), 16, True)
    if block.query.inputs.angles is not None:
        lane, query = machine.thread, block.query
        (angle,) = query.inputs.angles.load_floats(query.batch, query.token, lane, count=1, where=lane < ROPE_DIM)
        machine.store_shared(lane * 4 + block.angles, [machine.bits(angle)], 4, lane < ROPE_DIM)
    machine.fence_shared()
    barrier = machine.constant(block.loaded_q, "i32")
    machine.arrive(barrier)
    machine.wait(barrier, none)


def over_quad(machine: TensorCores, op: Any, value: Value) -> Value:
    for distance in (1, 2):
        value = op(value, machine.shuffle_xor(value, distance))
    return value


def _fold(
    machine: TensorCores, logits: list[Value], softmax: Softmax, keys: Value, kv_format: str
) -> tuple[list[Value], Softmax, list[Value]]:
    """Fold a tile's logits in: weights as the left operand of the next product, and what older sums are scaled by."""
    unit = HEAD_DIM**-0.5 * LOG2E
    column = machine.thread % 4 * 16
    scaled, factors = list(logits), []
    for j in range(0, len(logits), 4):
        words = [machine.from_bits(word) for word in machine.load_shared(keys + column + j * 16, 16)]
        factors += [*words[::2], *words[::2]]
        for n in range(j, j + 4):
            scaled[n] = machine.fma(logits[n], factors[n] * unit, words[n % 2 * 2 + 1])
    peaks, totals, carried = [], [], []
    weights = list(scaled)
    for i in range(2):
        row = [n for n in range(len(scaled)) if n // 2 % 2 == i]
        peak = over_quad(machine, maximum, fold_tree(maximum, [scaled[n] for n in row])).maximum(softmax.peak[i])
        scale = machine.exp2(softmax.peak[i] - peak)
        for n in row:
            weights[n] = machine.exp2(scaled[n] - peak)
        peaks.append(peak)
        totals.append(machine.fma(softmax.total[i], scale, fold_tree(add, [weights[n] for n in row])))
        carried.append(scale)
    if kv_format in SCALED_ROWS:
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    return [machine.to_f16(*weights[n : n + 2]) for n in range(0, len(weights), 2)], Softmax([*peaks, *totals]), carried


def merge_parts(block: Block, scratch: Any, output: list[Value], peak: list[Value], total: list[Value]) -> list[Value]:
    """What the blocks of a cluster have, put together: each gets 1 / cluster of the channels.

    Through device memory, which stays in L2: twice as fast as through the blocks' shared memory. Parts are means, in
    f16 like the weights that they were made with.
    """
    machine, cluster, row = block.machine, block.cluster, product_row(block.machine)
    rank, lane, query = block.rank, machine.thread, machine.block(0)
    unit = machine.block(1)
    for i in range(2):
        pair = [peak[i], total[i]]
        where = (lane % 4).equals(0) & (lane < WARPGROUP)
        scratch.stats.store_floats(pair, query, unit, rank, row + 8 * i, 0, where=where)
    inverse = [machine.reciprocal(value.maximum(2.0**-126)) for value in total]  # 0 where there was no key
    means = [value * inverse[n // 2 % 2] for n, value in enumerate(output)]
    part = len(output) // cluster  # values of a lane that go to one block
    for to in range(cluster):
        mine = [machine.to_f16(*means[n : n + 2]) for n in range(to * part, (to + 1) * part, 2)]
        for n in range(0, len(mine), 4):
            scratch.parts.store_words(mine[n : n + 4], query, unit, to, rank, n // 4, lane, 0)
    machine.barrier("cluster")
    found = [
        [scratch.stats.load_floats(query, unit, source, row + 8 * i, 0, count=2) for source in range(cluster)]
        for i in range(2)
    ]
    words = [
        [
            word
            for n in range(part // 8)
            for word in scratch.parts.load_words(query, unit, rank, source, n, lane, 0, count=8)
        ]
        for source in range(cluster)
    ]
    shares = []
    for pairs in found:
        top = fold(maximum, [peak for peak, _ in pairs])
        weights = [total * machine.exp2(peak - top) for peak, total in pairs]
        inverse_sum = machine.reciprocal(fold(add, weights))
        shares.append([weight * inverse_sum for weight in weights])
    merged = [machine.constant(0.0, "f32")] * part
    for source in range(cluster):
        for n, word in enumerate(words[source]):
            for i, value in enumerate(machine.from_f16(word)):
                merged[2 * n + i] = machine.fma(value, shares[n % 2][source], merged[2 * n + i])
    return merged


def store_output(block: Block, out: Buffer, output: list[Value], half: Value, first: Value | int) -> None:
    """Channels [first, ...) of each warpgroup's half, turned back where they are RoPE channels.

    Each warp's rows go through shared memory, so that they leave in whole sectors: through the stage that holds the
    last tile but one, which nobody reads any more.
    """
    machine, query = block.machine, block.query
    next_stage = block.tiles % _STAGES
    machine.wait(next_stage * 8 + block.free, (block.tiles // _STAGES & 1) ^ 1)
    lane, warp = machine.thread % WARP, machine.thread // WARP
    columns, size = len(output) * 2, out.dtype.itemsize  # of a warp's 16 rows
    width = min(columns, _STORED_BYTES // size)  # columns that go at once
    stride = width * size + 16  # bytes of a row: the 16 spread rows over the banks
    room = warp * (16 * stride) + block.keys.copy(next_stage).offset
    turned_from = NOPE_DIM - _HALF
    for start in range(0, columns, width):
        for column in range(start, start + width, 8):
            pairs = [output[column // 2 : column // 2 + 2], output[column // 2 + 2 : column // 2 + 4]]
            if query.inputs.angles is not None and column + _HALF - columns >= turned_from:
                channel = (lane % 4 * 2 + column + first) - turned_from  # of the RoPE channels
                pairs = _turn_back(block, pairs, channel, half.equals(1) & (channel >= 0))
            for i, values in enumerate(pairs):
                words = [machine.to_bf16(*values)] if size == 2 else [machine.bits(value) for value in values]
                at = (lane // 4 + 8 * i) * stride + lane % 4 * (2 * size) + (room + (column - start) * size)
                machine.store_shared(at, words, 2 * size, True)
        machine.barrier("warp")
        units = width * size // 16  # of a row
        for n in range(16 * units // WARP):
            row, unit = (lane + n * WARP) // units, (lane + n * WARP) % units
            words = machine.load_shared(row * stride + unit * 16 + room, 16)
            head = block.heads + warp % 4 * 16 + row
            channel = half * _HALF + unit * (16 // size) + (first + start)
            out.store_words(words, query.batch, query.token, head, channel)
        machine.barrier("warp")


def _turn_back(block: Block, pairs: list[list[Value]], channel: Value, turns: Value) -> list[list[Value]]:
    """Pairs of two rows, turned by minus the angle of the RoPE channels from ``channel``, where they turn."""
    machine = block.machine
    at = select(turns, channel, 0) * 2 + block.angles
    cos, sin = (machine.from_bits(machine.load_shared(at + n, 4)[0]) for n in (0, ROPE_DIM * 2))
    return [[select(turns, a * cos + b * sin, a), select(turns, b * cos - a * sin, b)] for a, b in pairs]
