"""Indexer scores on Hopper.

A warpgroup takes 64 keys at a time. They go from device memory to registers, are unpacked there and enter the first
product from registers; so does its positive part the second one. Shared memory holds the queries alone, and warpgroups
wait for each other only where one request's queries give way to the next one's.

A multiprocessor has work for its integer units (unpacking) and for its tensor cores, and both take about as long:

    in turn      unpack, multiply, store; several warpgroups, whose turns differ
    overlapped   the next tile is unpacked while the product of one runs: for long products, and fewer warpgroups
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Index, Value, select
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.scores.fp4 import FORMATS
from pallas_kernels.scores.keys import Keys
from pallas_kernels.scores.parts import HEADS, SUM_COLUMNS, Inputs, Queries, Share, store_scores

_BLOCKS = 132  # of a launch, at most: one per multiprocessor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    warpgroups: int  # per block
    stages: int = 1  # tiles on their way to a warpgroup, where they are taken in turn
    overlapped: bool = False
    blocks: int = _BLOCKS


def tuning_of(key_format: str, tokens: int, tiles: int) -> Tuning:
    """Measured on an H200. tiles: of all requests, at most."""
    is_short = tiles <= 8 * _BLOCKS
    if tokens > 1:
        return Tuning(warpgroups=2, overlapped=True)
    if key_format == "nvfp4":
        return Tuning(warpgroups=2 if is_short else 3, overlapped=True)
    if is_short:
        return Tuning(warpgroups=4)
    return Tuning(warpgroups=4 if tiles <= 64 * _BLOCKS else 5, stages=2)


def shared_bytes(key_format: str, tokens: int, tuning: Tuning) -> int:
    del tuning
    return Queries.shared_bytes(FORMATS[key_format], tokens)


def body(machine: TensorCores, inputs: Inputs, out: Buffer, *, key_format: str, tuning: Tuning, blocks: int) -> None:
    """Inputs -> out f32 [B, T, max_entries]. Grid (blocks,)."""
    share, fp4 = Share.of_block(machine, inputs, blocks), FORMATS[key_format](machine)
    queries, keys = Queries(machine, inputs, fp4, tuning.warpgroups), Keys(machine, inputs, fp4)

    def request(i: Value, carry: list[Value]) -> list[Value]:
        b, before = share.first + i, carry[0]
        count = inputs.num_tiles(b, True)
        first, last = share.of_request(before, count)
        with machine.when(first < last):
            tiles = _Tiles(keys, queries, out, b, first, last, tuning)
            (tiles.overlapped if tuning.overlapped else tiles.in_turn)()
            machine.barrier("block")
        return [before + share.cost(count)]

    machine.loop(share.requests, request, [share.before])


class _Tiles:
    """Tiles first .. last - 1 of a batch row, which warpgroups take in turn."""

    def __init__(self, keys: Keys, queries: Queries, out: Buffer, b: Value, first: Value, last: Value, tuning: Tuning):
        self.machine, self.keys, self.queries, self.out, self.b = queries.machine, keys, queries, out, b
        self.slot = keys.inputs.slots.load_int(b)
        self.first, self.last = first + self.machine.thread // WARPGROUP, last
        self.step, self.stages = tuning.warpgroups, tuning.stages
        self.count = (last - self.first + self.step - 1).maximum(0) // self.step

    def _number(self, i: Index) -> Value:
        return self.first + i * self.step

    def _block(self, i: Index) -> Value:
        return self.keys.block(self.slot, self._number(i), self._number(i) < self.last)

    def _start(self, loads: int, blocks: int) -> tuple[list[list[Value]], list[Value]]:
        """The first tiles' words, and the blocks of those that follow; the queries stand in shared memory."""
        loaded = self.queries.load(self.b)
        found = [self._block(i) for i in range(loads + blocks)]
        words = [self.keys.load(block) for block in found[:loads]]
        self.queries.store(loaded)
        return words, found[loads:]

    def in_turn(self) -> None:
        machine, keys, stages = self.machine, self.keys, self.stages

        def some(i: Value, flat: list[Value]) -> list[Value]:
            # A stage holds a tile on its way, and the block of the one that comes into it next. The body is as many
            # tiles long as there are stages: a word on its way must not move to another register.
            width, after = len(flat) // stages, []
            for j in range(stages):
                n = i * stages + j
                *words, block = flat[j * width : (j + 1) * width]
                parts, scale = keys.unpack(words)
                operand = self._operand(parts)
                after += [*keys.load(block), self._block(n + 2 * stages)]
                with machine.when(True if j == 0 else n < self.count):
                    for t in range(self.queries.tokens):
                        dots = machine.wgmma_wait(self._dots(operand, t))
                        sums = machine.wgmma_wait(self._sums(dots, t))
                        self._store(t, n, sums, scale)
            return after

        words, blocks = self._start(stages, stages)
        flat = [value for part, block in zip(words, blocks, strict=True) for value in (*part, block)]
        machine.loop((self.count + stages - 1) // stages, some, flat)

    def overlapped(self) -> None:
        machine, keys, tokens = self.machine, self.keys, self.queries.tokens
        (now, later), (following,) = self._start(2, 1)
        parts, scale = keys.unpack(now)
        operand = self._operand(parts)
        dots = self._dots(operand, 0)
        widths = [len(operand), len(scale), len(dots), len(later)]

        def one(i: Value, carry: list[Value]) -> list[Value]:
            operand, scale, dots, words, (block,) = _split(carry, widths)
            # Registers that enter a product must not be written while one runs: the last step of unpacking is left out.
            parts, next_scale = keys.unpack(words)
            words, block = keys.load(block), self._block(i + 3)
            parts = [machine.hold(row) for row in parts]
            machine.keep_order()
            for t in range(tokens):
                dots = machine.wgmma_wait(dots)
                if t + 1 == tokens:
                    machine.hold(operand)
                    operand = self._operand([machine.hold(row) for row in parts])
                sums = self._sums(dots, t)
                dots = self._dots(operand, (t + 1) % tokens)
                self._store(t, i, machine.wgmma_wait(sums, pending=1), scale)
            return [*operand, *next_scale, *dots, *words, block]

        carry = machine.loop(self.count, one, [*operand, *scale, *dots, *later, following])
        operand, _, dots, *_ = _split(carry, widths)
        machine.wgmma_wait(dots)  # of a tile that is not there
        machine.hold(operand)

    def _operand(self, parts: list[list[Value]]) -> list[Value]:
        one, other = (self.keys.fp4.finish(row) for row in parts)
        return [word for i in range(0, len(one), 2) for word in (one[i], other[i], one[i + 1], other[i + 1])]

    def _dots(self, operand: list[Value], t: int) -> list[Value]:
        """The first product for a token, to be waited for: pairs of f16."""
        heads = self.queries.operand.copy(self.machine.constant(t, "i32")).k_major()
        return self.machine.wgmma(None, operand, heads, columns=HEADS, dtype=self.keys.fp4.dtype, packed=True)

    def _sums(self, dots: list[Value], t: int) -> list[Value]:
        """The second one, f32."""
        positive = [self.machine.relu_f16(pair) for pair in dots]
        weights = self.queries.weights.copy(self.machine.constant(t, "i32")).k_major()
        return self.machine.wgmma(None, positive, weights, columns=SUM_COLUMNS)

    def _store(self, t: int, i: Value, sums: list[Value], row_scale: list[Value]) -> None:
        # Columns of the sums are alike: each lane has those of both of its rows.
        is_first = (self.machine.thread & 1).equals(0)
        total = select(is_first, sums[0] + sums[1], sums[2] + sums[3])
        store_scores(self.out, self.b, t, self._number(i), total, [self.queries.scale(t), *row_scale])


def _split(values: list[Value], widths: list[int]) -> list[list[Value]]:
    """Neighbouring parts of these lengths, and the rest."""
    parts = []
    for width in widths:
        parts.append(values[:width])
        values = values[width:]
    return [*parts, values]
