"""Products on Blackwell: a warpgroup widens its tile of the weight into shared memory; sums are in tensor memory."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import Tile, product_row
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.language.values import Index, Value
from pallas_kernels.products.few.block import Block, FewInputs
from pallas_kernels.products.few.layout import Layout
from pallas_kernels.products.few.split import Room
from pallas_kernels.products.few.staging import AsGiven, ByLanes
from pallas_kernels.products.weights import CHUNK_BYTES, HALVES, QUAD, ROWS, TILE

_COPIES = 2  # of the operand: one is multiplied while the other is written
OPERAND_BYTES = _COPIES * TILE * CHUNK_BYTES + _COPIES * 8 + 1024  # shared memory of a warpgroup for it
ROOM = dict.fromkeys((ByLanes, AsGiven), Room(warpgroups={ROWS // 2: 4}))
STREAMED_WARPGROUPS = 0  # no block copies x chunk by chunk: sums in tensor memory are waited for in another way


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """What belongs to one warpgroup."""

    machine: TensorMemory
    operand: Tile  # half a chunk of bf16, or a whole one of FP8, in ``_COPIES`` copies
    done: Barrier  # per copy: its product is complete
    sums: Accumulator

    @classmethod
    def take(cls, machine: TensorMemory, layout: Layout) -> _Own:
        number, count = machine.thread // WARPGROUP, layout.split.warpgroups * _COPIES
        operand = Tile.take(machine, TILE, CHUNK_BYTES, copies=count).copy(number * _COPIES)
        done = Barrier.take(machine, warps=1, copies=count)
        init_barriers(done)
        sums = Accumulator(column=number * ROWS, columns=layout.columns)
        return cls(machine, operand, done.copy(number * _COPIES), sums)

    def free(self, use: Value) -> None:
        """Wait until the copy that the ``use``-th product takes is no longer read."""
        self.done.copy(use % _COPIES).wait((use // _COPIES & 1) ^ 1)

    def store(self, use: Value, words: list[Value], first_step: int) -> None:
        """Write a left operand, steps from ``first_step`` on."""
        machine, tile = self.machine, self.operand.copy(use % _COPIES)
        row, lane = product_row(machine), machine.thread % QUAD
        for n, word in enumerate(words):
            step, part = divmod(n, QUAD)
            unit = (first_step + step) * 2 + part // 2
            machine.store_shared(tile.unit(row + part % 2 * 8, unit) + lane * 4, [word], 4, True)

    def ask(self, use: Value, x: Tile, first: int, count: int, *, is_rounded: bool, accumulate: Value | bool) -> None:
        """Start the product of the operand and bytes [first, first + count) of x, when the warpgroup has written it."""
        machine = self.machine
        machine.fence_shared()
        machine.fence_tensor("before")
        machine.barrier("warpgroup")
        machine.fence_tensor("after")
        with machine.when(machine.thread % WARPGROUP // WARP == 0), machine.one_lane():
            left, right = self.operand.copy(use % _COPIES).k_major(0, count), x.k_major(first, count)
            machine.mma(self.sums, left, right, accumulate=accumulate, dtype="e4m3" if is_rounded else "bf16")
            machine.commit(self.done.copy(use % _COPIES))

    def wait(self, use: Value) -> None:
        """Wait for the ``use``-th product, and so for those before it."""
        self.done.copy(use % _COPIES).wait(use // _COPIES & 1)
        self.machine.fence_tensor("after")

    def eight(self, n: int) -> list[Value]:
        """Return this lane's sums of the ``n``-th eight columns."""
        return self.machine.load_tensor(self.sums.part(8 * n, 8))


def body(machine: TensorMemory, inputs: FewInputs[Buffer], out: Buffer, *, layout: Layout) -> None:
    """Compute one block's part of the product."""
    own = _Own.take(machine, layout)
    block = Block.of(machine, inputs, layout)
    is_rounded = layout.weight.activations == "fp8"

    def rounded_step(chunk: Value, i: Value, stage: Index, sums: list[Value]) -> list[Value]:
        own.free(chunk)
        for half in range(HALVES):
            words = block.operand(chunk, half, block.tile.load(stage, half))
            own.store(chunk, words, half * len(words) // QUAD)
        block.advance(chunk)
        x = block.staged.tile(i)
        own.ask(chunk, x, 0, x.row_bytes, is_rounded=True, accumulate=False)
        own.wait(chunk)
        return block.scaled_sum(chunk, i, own.eight, sums)

    def step(chunk: Value, i: Value, stage: Index, _: None) -> None:
        x = block.staged.tile(i)
        half_bytes = x.row_bytes // HALVES
        for half in range(HALVES):
            use = chunk * HALVES + half
            own.free(use)
            own.store(use, block.operand(chunk, half, block.tile.load(stage, half)), 0)
            if half == 0:
                block.advance(chunk)
            own.ask(use, x, half * half_bytes, half_bytes, is_rounded=False, accumulate=use > 0)

    def last(chunks: int) -> Value:
        return machine.constant(chunks * HALVES - 1, "i32")

    with machine.tensor_memory(max(32, 1 << (layout.split.warpgroups * ROWS - 1).bit_length())):
        if is_rounded:
            zeros = [machine.constant(0.0, "f32")] * (layout.columns // 2)
            sums = block.multiply(rounded_step, zeros)
        else:
            block.multiply(step, None, lambda chunks: own.wait(last(chunks)))
            own.wait(last(layout.split.chunks))
            sums = [value for n in range(layout.columns // 8) for value in own.eight(n)]
        block.finish(out, sums, inputs)
