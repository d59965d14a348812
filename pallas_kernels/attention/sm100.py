"""Decode attention on Blackwell: one warp asks for all products, which sum up in tensor memory.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

A block serves 64 heads of one query, with a loader and a merge of the blocks of a cluster as on Hopper. Per tile of 64
keys, one warp asks for the logits [64 heads, 64 keys]; a warpgroup takes them from tensor memory and hands weights
back through shared memory, 16 keys at a time; the same warp asks for their product with the keys, which is added to
the output [64 heads, 512] in tensor memory. The output takes the columns of 256 channels: the other 256 lie in the rows
that a product of 64 rows leaves free.

The output is scaled down only where a peak grows by more than 2^8: weights are then relative to one that may be so
much lower than the largest so far. They stay below 2^9, which f16 holds as exactly as those below 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.attention import sm90
from pallas_kernels.attention.keys import HEAD_DIM, KEYS, LOG2E, LOWEST, ROOM, ROPE_DIM, SCALED_ROWS, Inputs, Query
from pallas_kernels.attention.sm90 import HEADS, Softmax
from pallas_kernels.language.lanes import Buffer, add, fold_tree, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP, Index, Value, select
from pallas_kernels.language.tensor_cores import Role, Tile, product_row
from pallas_kernels.language.tensor_memory import MAX_COLUMNS, Accumulator, TensorMemory

_HALF = HEAD_DIM // 2  # channels of the output per half of tensor memory's rows
_STAGES = 2  # tiles of keys
_PIECE = 16  # keys whose weights are handed over at once: what an instruction takes
_SLOTS = 2  # pieces
_GROWTH = 8.0  # of a peak that the output is scaled for, in powers of two
_SCALED = 64  # columns of the output that are scaled at once
_REGISTERS = {"multiply": 184, "load": 136}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(sm90.Layout):
    """As on Hopper."""

    @property
    def shared_bytes(self) -> int:
        tiles = (HEADS + _STAGES * KEYS) * HEAD_DIM * 2 + _SLOTS * _PIECE * HEADS * 2
        barriers = 16 * _STAGES + 16 * _SLOTS + 4 * 16
        return tiles + ROOM + _STAGES * KEYS * 8 + ROPE_DIM * 4 + HEADS * 8 + barriers + 16

    def body(self, machine: Any, inputs: Inputs, state: tuple[Buffer, Any], *, kv_format: str) -> None:
        out, scratch = state
        block = Block.of(machine, inputs, self.cluster)
        with machine.tensor_memory(MAX_COLUMNS):  # of 320: shared memory lets no other block in anyway
            machine.roles(
                Role(
                    warpgroups=self.warpgroups - 1,
                    registers=_REGISTERS["multiply"],
                    body=lambda: _multiply(block, out, scratch, kv_format),
                ),
                Role(
                    warpgroups=1,
                    registers=_REGISTERS["load"],
                    body=lambda: sm90.load_tiles(block.common(), kv_format),
                ),
            )


@dataclasses.dataclass(eq=False, kw_only=True)
class Block:
    """A block's shared memory."""

    machine: TensorMemory
    inputs: Inputs
    cluster: int
    q: Tile
    keys: Tile  # copies: stages
    weights: Tile  # [keys of a piece, heads]; copies: slots
    room: int  # where stored rows wait
    key: int  # f32 [stages, KEYS, 2]: what a key's logits are multiplied by, and what is added
    angles: int  # f32 [ROPE_DIM]
    stats: int  # f32 [HEADS, 2]: peak and total, at the end
    full: int  # barriers, per stage: the keys are there
    free: int  # products with them are done
    weighed: int  # per slot: the weights are there
    weights_free: int  # their product is done
    begun: int  # the loader's first loads were issued
    loaded_q: int
    scored: int  # the logits are there, and all older products are done
    done: int  # the output and the stats are there

    logits = Accumulator(column=_HALF, columns=KEYS)

    @staticmethod
    def output(half: Index) -> Accumulator:
        return Accumulator(column=0, columns=_HALF, half=half)

    @classmethod
    def of(cls, machine: TensorMemory, inputs: Inputs, cluster: int) -> Block:
        warps, product = WARPGROUP // WARP, 1
        arrivals = dict(full=[warps] * _STAGES, free=[product] * _STAGES)
        arrivals |= dict(weighed=[warps] * _SLOTS, weights_free=[product] * _SLOTS)
        arrivals |= dict(begun=[warps], loaded_q=[2 * warps], scored=[product], done=[warps + product])
        block = cls(
            machine=machine,
            inputs=inputs,
            cluster=cluster,
            q=Tile.take(machine, HEADS, HEAD_DIM * 2),
            keys=Tile.take(machine, KEYS, HEAD_DIM * 2, copies=_STAGES),
            weights=Tile.take(machine, _PIECE, HEADS * 2, copies=_SLOTS),
            room=machine.take_shared(ROOM),
            key=machine.take_shared(_STAGES * KEYS * 8),
            angles=machine.take_shared(ROPE_DIM * 4),
            stats=machine.take_shared(HEADS * 8),
            **{name: machine.take_barriers(len(counts)) for name, counts in arrivals.items()},
        )
        machine.init_barriers(
            [(getattr(block, name) + 8 * i, n) for name, counts in arrivals.items() for i, n in enumerate(counts)]
        )
        return block

    def common(self) -> sm90.Block:
        """As on Hopper. Each role asks for its own, and holds no registers through the code of another one."""
        machine, cluster = self.machine, self.cluster
        query = Query.of_block(machine, self.inputs)
        rank, tiles = query.share(cluster)
        return sm90.Block(
            machine=machine,
            query=query,
            heads=machine.block(1) * HEADS,
            cluster=cluster,
            rank=rank,
            tiles=tiles,
            q=self.q,
            keys=self.keys,
            room=self.room,
            key=self.key,
            angles=self.angles,
            full=self.full,
            free=self.free,
            begun=self.begun,
            loaded_q=self.loaded_q,
            turn=0,  # none
        )


def _multiply(block: Block, out: Buffer, scratch: Any, kv_format: str) -> None:
    """One warpgroup weighs, a warp of the other one asks for products; then each takes half of the channels."""
    machine, common = block.machine, block.common()
    sm90.load_queries(common)
    warp, half = machine.thread // WARP, machine.thread // WARPGROUP
    with machine.when(half.equals(0)):
        _weigh(block, common, kv_format)
    with machine.when(warp.equals(WARPGROUP // WARP)):
        _ask(block, common.tiles)
    machine.wait(machine.constant(block.done, "i32"), machine.constant(0, "i32"))
    machine.fence_tensor("after")
    row = product_row(machine) * 8 + block.stats
    stats = [[machine.from_bits(word) for word in machine.load_shared(row + 64 * i, 8)] for i in range(2)]
    peak, total = [pair[0] for pair in stats], [pair[1] for pair in stats]
    output = machine.load_tensor(block.output(half))
    if block.cluster == 1:
        inverse = [machine.reciprocal(value) for value in total]
        output, first = [value * inverse[n // 2 % 2] for n, value in enumerate(output)], 0
    else:
        output = sm90.merge_parts(common, scratch, output, peak, total)
        first = common.rank * (_HALF // block.cluster)
    sm90.store_output(common, out, output, half, first)


# Asking for products.
def _ask(block: Block, tiles: Value) -> None:
    """Of a tile: its logits; then, as weights come, their products with the keys. One warp, of which one lane asks."""
    machine = block.machine

    def barrier(address: int) -> Value:
        return machine.constant(address, "i32")

    def step(i: Value, carry: list[Value]) -> list[Value]:
        stage = i % _STAGES
        keys = block.keys.copy(stage)
        machine.wait(stage * 8 + block.full, i // _STAGES & 1)
        with machine.one_lane():
            machine.mma(block.logits, block.q.k_major(), keys.k_major(), accumulate=False)
            machine.commit(barrier(block.scored))
        for piece in range(KEYS // _PIECE):
            slot, use = piece % _SLOTS, piece // _SLOTS  # uses of a slot per tile are even in number
            machine.wait(barrier(block.weighed + 8 * slot), machine.constant(use % 2, "i32"))
            machine.fence_tensor("after")
            weights = block.weights.copy(machine.constant(slot, "i32")).transposed(0)
            with machine.one_lane():
                for half in range(2):
                    channels = keys.transposed(half * _HALF * 2)
                    channels = dataclasses.replace(channels, steps=channels.steps[piece : piece + 1])
                    machine.mma(block.output(half), weights, channels, accumulate=i > 0 if piece == 0 else True)
                machine.commit(barrier(block.weights_free + 8 * slot))
        with machine.one_lane():
            machine.commit(stage * 8 + block.free)
        return carry

    machine.loop(tiles, step, [])
    with machine.one_lane():
        machine.commit(barrier(block.done))


# Weighing.
def _weigh(block: Block, common: sm90.Block, kv_format: str) -> None:
    """Logits -> weights, tile after tile, and the output scaled where a peak grew much."""
    machine = block.machine
    row = product_row(machine)
    sinks = common.query.inputs.sinks
    peak = [sinks.load_floats(common.heads + row + 8 * i, count=1)[0] * LOG2E for i in range(2)]
    peak = [value.maximum(LOWEST) for value in peak]
    total = select((machine.thread % 4).equals(0), machine.constant(1.0, "f32"), 0.0)
    if block.cluster > 1:  # one block of the cluster counts the sink
        counts = common.rank.equals(0)
        peak = [select(counts, value, LOWEST) for value in peak]
        total = select(counts, total, 0.0)

    def step(i: Value, carry: list[Value]) -> list[Value]:
        machine.wait(machine.constant(block.scored, "i32"), i & 1)
        machine.fence_tensor("after")
        logits = machine.load_tensor(block.logits)
        keys = i % _STAGES * (KEYS * 8) + block.key
        weights, softmax, carried, grew = _fold(machine, logits, Softmax(carry), keys, kv_format)
        # The logits' barrier is for older products too: the output is at rest.
        with machine.when(_in_warp(machine, grew) & (i > 0)):
            _scale(block, carried)
        machine.fence_tensor("before")
        for piece in range(KEYS // _PIECE):
            _hand_over(block, piece, weights[_PIECE // 2 * piece : _PIECE // 2 * (piece + 1)])
        return softmax.values

    softmax = Softmax(machine.loop(common.tiles, step, [*peak, total, total]))
    for i, (peak, total) in enumerate(zip(softmax.peak, softmax.total, strict=True)):
        pair = [machine.bits(peak), machine.bits(sm90.over_quad(machine, add, total))]
        machine.store_shared((row + 8 * i) * 8 + block.stats, pair, 8, (machine.thread % 4).equals(0))
    machine.arrive(machine.constant(block.done, "i32"))


def _fold(
    machine: TensorMemory, logits: list[Value], softmax: Softmax, keys: Value, kv_format: str
) -> tuple[list[Value], Softmax, list[Value], Value]:
    """Fold a tile's logits in: f32 weights, what older sums are scaled by per row, and whether that is not 1."""
    unit = HEAD_DIM**-0.5 * LOG2E
    column = machine.thread % 4 * 16
    weights, factors, peaks, totals, carried = list(logits), list(logits), [], [], []
    for j in range(0, len(logits), 4):
        words = [machine.from_bits(word) for word in machine.load_shared(keys + column + j * 16, 16)]
        for n in range(j, j + 4):
            factors[n], added = words[n % 2 * 2 : n % 2 * 2 + 2]
            weights[n] = machine.fma(logits[n], factors[n] * unit, added)
    grew = machine.constant(False, "bool")
    for i, (peak, total) in enumerate(zip(softmax.peak, softmax.total, strict=True)):
        row = [n for n in range(len(weights)) if n // 2 % 2 == i]
        top = sm90.over_quad(machine, maximum, fold_tree(maximum, [weights[n] for n in row]))
        grows = top > peak + _GROWTH
        new = select(grows, top, peak)
        for n in row:
            weights[n] = machine.exp2(weights[n] - new)
        carried.append(machine.exp2(peak - new))
        totals.append(machine.fma(total, carried[i], fold_tree(add, [weights[n] for n in row])))
        peaks.append(new)
        grew = grew | grows
    if kv_format in SCALED_ROWS:
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    return weights, Softmax([*peaks, *totals]), carried, grew


def _in_warp(machine: TensorMemory, condition: Value) -> Value:
    """Whether it holds in some lane of the warp; it is the same in the lanes of a quad."""
    some = select(condition, machine.constant(1, "i32"), 0)
    for distance in (4, 8, 16):
        some = some | machine.shuffle_xor(some, distance)
    return some > 0


def _scale(block: Block, factors: list[Value]) -> None:
    machine = block.machine

    def part(i: Value, carry: list[Value]) -> list[Value]:
        for half in range(2):
            place = block.output(half).part(i * _SCALED, _SCALED)
            values = machine.load_tensor(place)
            machine.store_tensor(place, [value * factors[n // 2 % 2] for n, value in enumerate(values)])
        return carry

    machine.loop(_HALF // _SCALED, part, [])


def _hand_over(block: Block, piece: int, weights: list[Value]) -> None:
    """A piece's weights as f16 to its slot, keys as rows, when the product with what was there is done."""
    machine, slot = block.machine, piece % _SLOTS
    machine.wait(
        machine.constant(block.weights_free + 8 * slot, "i32"), machine.constant(piece // _SLOTS % 2 ^ 1, "i32")
    )
    tile = block.weights.copy(machine.constant(slot, "i32"))
    lane, warp = machine.thread % WARP, machine.thread // WARP
    for n in range(0, len(weights), 2):
        pair = machine.to_f16(*weights[n : n + 2])
        for i, word in enumerate((pair, pair >> 16)):
            key = lane % 4 * 2 + (n // 4 * 8 + i)
            at = tile.unit(key, warp * 2 + n // 2 % 2) + lane // 4 * 2
            machine.store_shared(at, [word], 2, True)
    machine.fence_shared()
    machine.arrive(machine.constant(block.weighed + 8 * slot, "i32"))


assert KEYS // _PIECE % (2 * _SLOTS) == 0, "a slot's barriers begin each tile with the same parity"
