"""Indexer scores on Blackwell.

A warpgroup takes 64 keys at a time, loaded and unpacked as on Hopper, but into shared memory: one of its lanes asks for
their product with a token's queries, [64 keys, 64 heads] in tensor memory. While it runs, the warpgroup takes the one
before from there, multiplies its positive part with the heads' weights and adds up.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Value, select
from pallas_kernels.language.tensor_cores import Tile, product_row
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.scores.fp4 import FORMATS, Fp4
from pallas_kernels.scores.keys import Keys
from pallas_kernels.scores.parts import ENTRIES, HEADS, Inputs, Queries, Share, score_of

_COPIES = 2  # of a warpgroup's operand and sums: what a product uses, and what lanes use


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    warpgroups: int  # per block
    blocks: int = 148  # of a launch, at most: one per multiprocessor


def tuning_of(key_format: str, tokens: int, tiles: int) -> Tuning:
    """Not measured: what registers and shared memory have room for."""
    return Tuning(warpgroups=3 if tokens == 1 else 2)


def shared_bytes(key_format: str, tokens: int, tuning: Tuning) -> int:
    operands = tuning.warpgroups * _COPIES * (ENTRIES * FORMATS[key_format].row_bytes + 8)
    return Queries.shared_bytes(FORMATS[key_format], tokens) + operands + 32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """What a warpgroup has for itself."""

    machine: TensorMemory
    fp4: Fp4
    number: Value  # of the warpgroup
    operand: Tile  # keys; copies
    scored: Value  # barriers of the copies: a product is done

    @classmethod
    def of(cls, machine: TensorMemory, fp4: Fp4, tuning: Tuning) -> _Own:
        number, count = machine.thread // WARPGROUP, tuning.warpgroups * _COPIES
        operand = Tile.take(machine, ENTRIES, fp4.row_bytes, copies=count).copy(number * _COPIES)
        barriers = machine.take_barriers(count)
        machine.init_barriers([(barriers + 8 * i, 1) for i in range(count)])
        return cls(machine, fp4, number, operand, number * (8 * _COPIES) + barriers)

    def sums(self, use: Value) -> Accumulator:
        return Accumulator(column=self.number * HEADS, columns=HEADS, half=use % _COPIES)

    def store(self, copy: Value, parts: list[list[Value]]) -> None:
        """Unpacked keys, before ``meet``."""
        machine, tile = self.machine, self.operand.copy(copy)
        row = product_row(machine)
        for n, part in enumerate(parts):
            for i, word in enumerate(self.fp4.finish(part)):
                machine.store_shared(tile.unit(row + 8 * n, i) + self.fp4.quarter * 4, [word], 4, True)
        machine.fence_shared()

    def meet(self) -> None:
        """What the warpgroup did comes before the product that is asked for next."""
        self.machine.fence_tensor("before")
        self.machine.barrier("warpgroup")
        self.machine.fence_tensor("after")

    def ask(self, use: Value, copy: Value, queries: Tile, where: Condition) -> None:
        machine, is_first = self.machine, (self.machine.thread % WARPGROUP // WARP).equals(0)
        with machine.when(is_first & where), machine.one_lane():
            operands = self.operand.copy(copy).k_major(), queries.k_major()
            machine.mma(self.sums(use), *operands, accumulate=False, dtype=self.fp4.dtype)
            machine.commit(use % _COPIES * 8 + self.scored)

    def take(self, use: Value) -> list[Value]:
        """A product's values."""
        self.machine.wait(use % _COPIES * 8 + self.scored, use // _COPIES & 1)
        self.machine.fence_tensor("after")
        return self.machine.load_tensor(self.sums(use))


def body(machine: TensorMemory, inputs: Inputs, out: Buffer, *, key_format: str, tuning: Tuning, blocks: int) -> None:
    """Inputs -> out f32 [B, T, max_entries]. Grid (blocks,)."""
    share, fp4 = Share.of_block(machine, inputs, blocks), FORMATS[key_format](machine)
    own = _Own.of(machine, fp4, tuning)
    queries, keys = Queries(machine, inputs, fp4, tuning.warpgroups), Keys(machine, inputs, fp4)

    def request(i: Value, carry: list[Value]) -> list[Value]:
        b, (before, used) = share.first + i, carry
        tiles = inputs.num_tiles(b, True)
        first, last = share.of_request(before, tiles)
        mine = first + own.number
        count = (last - mine + tuning.warpgroups - 1).maximum(0) // tuning.warpgroups
        with machine.when(first < last):
            _score(own, keys, queries, out, b, mine, count, used, tuning.warpgroups)
            machine.barrier("block")
        return [before + share.cost(tiles), used + count * queries.tokens]

    with machine.tensor_memory(1 << (tuning.warpgroups * HEADS - 1).bit_length()):
        machine.loop(share.requests, request, [share.before, machine.constant(0, "i32")])


def _score(
    own: _Own,
    keys: Keys,
    queries: Queries,
    out: Buffer,
    b: Value,
    first: Value,
    count: Value,
    used: Value,
    step: int,
) -> None:
    """``count`` tiles of a batch row, every ``step``-th one from ``first`` on, after ``used`` products."""
    machine, tokens = own.machine, queries.tokens
    slot = keys.inputs.slots.load_int(b)

    def block(i: Value) -> Value:
        return keys.block(slot, first + i * step, i < count)

    def operand(t: int) -> Tile:
        return queries.operand.copy(machine.constant(t, "i32"))

    loaded = queries.load(b)
    start = [machine.constant(i, "i32") for i in range(3)]
    blocks = [block(i) for i in start]
    now, later = keys.load(blocks[0]), keys.load(blocks[1])
    queries.store(loaded)
    weights = _weights(queries, 0) if tokens == 1 else None
    parts, scale = keys.unpack(now)
    own.store(start[0], parts)
    own.meet()
    own.ask(used, start[0], operand(0), count > 0)

    def tile(i: Value, carry: list[Value]) -> list[Value]:
        """The words of the next tile are on their way; so is the block of the one after it."""
        scale, words, following = carry[: len(carry) - len(later) - 1], carry[-len(later) - 1 : -1], carry[-1]
        next_scale = scale
        for t in range(tokens):
            use, is_last = used + i * tokens + t, t + 1 == tokens
            if is_last:
                parts, next_scale = keys.unpack(words)
                own.store(i + 1 & 1, parts)
                words, following = keys.load(following), block(i + 3)
            own.meet()
            if is_last:
                own.ask(use + 1, i + 1 & 1, operand(0), i + 1 < count)
            else:
                own.ask(use + 1, i & 1, operand(t + 1), True)
            total = _weigh(own.take(use), weights or _weights(queries, t))
            _store(out, b, t, first + i * step, total, [queries.scale(t), *scale])
        return [*next_scale, *words, following]

    machine.loop(count, tile, [*scale, *later, blocks[2]])


def _weights(queries: Queries, t: int) -> list[Value]:
    """f32 weights of the heads that a lane holds of a product, two by two."""
    machine, weights = queries.machine, []
    tile, byte = queries.weights.copy(machine.constant(t, "i32")), machine.thread % 4 * 4
    for unit in range(HEADS // 8):
        high, low = (
            machine.from_f16(machine.load_shared(tile.unit(machine.constant(row, "i32"), unit) + byte, 4)[0])
            for row in range(2)
        )
        weights += [a + b for a, b in zip(high, low, strict=True)]
    return weights


def _weigh(dots: list[Value], weights: list[Value]) -> Value:
    """Sum over heads; in even lanes that of the first row, in odd ones that of the second."""
    machine = dots[0].machine
    sums = [machine.constant(0.0, "f32")] * 2
    for n, dot in enumerate(dots):
        sums[n // 2 % 2] = machine.fma(dot.maximum(0.0), weights[n // 4 * 2 + n % 2], sums[n // 2 % 2])
    is_first = (machine.thread & 1).equals(0)
    total = select(is_first, sums[0], sums[1]) + machine.shuffle_xor(select(is_first, sums[1], sums[0]), 1)
    return total + machine.shuffle_xor(total, 2)


def _store(out: Buffer, b: Value, t: int, tile: Value, total: Value, factors: list[Value]) -> None:
    machine = b.machine
    is_first = (machine.thread & 1).equals(0)
    entry = tile * ENTRIES + product_row(machine) + select(is_first, machine.constant(0, "i32"), 8)
    where = (machine.thread & 3) < 2
    if out.shape[2] % ENTRIES:
        where = where & (entry < out.shape[2])
    for factor in factors:
        total = total * factor
    out.store_floats([score_of(total)], b, t, entry, where=where)
