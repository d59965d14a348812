"""Products on Hopper: a warpgroup widens its tile of the weight in registers, which enters products from there."""

from __future__ import annotations

from collections.abc import Callable

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Index, Value
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.few.block import Block, FewInputs
from pallas_kernels.products.few.layout import Layout
from pallas_kernels.products.few.split import Room
from pallas_kernels.products.few.staging import AsGiven, ByLanes, Order
from pallas_kernels.products.weights import HALVES, OPERAND_WORDS, add_in_turns
from pallas_kernels.tuned import h200

OPERAND_BYTES = 0  # shared memory of a warpgroup for its left operand
ROOM: dict[type[Order], Room] = {
    ByLanes: Room(warpgroups={32: 5, 64: 3, 128: 2}),
    AsGiven: Room(warpgroups={32: 5, 64: 4, 128: 2}),  # whose places are fewer
}
STREAMED_WARPGROUPS = 5  # the most of a block that copies x chunk by chunk, for which there are registers

_Carry = tuple[list[Value], list[Value]]  # sums, and the left operand of a product that still runs


def body(machine: TensorCores, inputs: FewInputs[Buffer], out: Made, *, layout: Layout) -> None:
    """Compute one block's part of the product."""
    compute(machine, Block.of(machine, inputs, layout), inputs, out)


def compute(machine: TensorCores, block: Block, inputs: FewInputs[Buffer], out: Made) -> None:
    """Compute the part of a block that has its shared memory, in the warpgroups of its split."""
    sums = _streamed(machine, block) if block.layout.streams else _staged(machine, block)
    block.finish(out, sums, inputs)


def _zeros(machine: TensorCores, layout: Layout) -> list[Value]:
    return [machine.constant(0.0, "f32")] * (layout.columns // 2)


def _codes(block: Block, stage: Index) -> Callable[[int], list[list[Value]]]:
    """Return what gives the codes of a half of the chunk in a stage.

    Both halves are loaded at once where there are many columns and codes are widened: a load takes long beside
    products, which read shared memory too.
    """
    layout = block.layout
    if (
        layout.columns < h200.COLUMNS_TO_LOAD_AT_ONCE
        or layout.weight.block is None
        or layout.weight.activations == "fp8"
    ):
        return lambda half: block.tile.load(stage, half)
    loaded = [block.tile.load(stage, half) for half in range(HALVES)]
    return lambda half: loaded[half]


def _staged(machine: TensorCores, block: Block) -> list[Value]:
    """Return the sums of a block that stores x before it multiplies."""
    layout, activations = block.layout, block.staged
    is_rounded, columns = layout.weight.activations == "fp8", layout.columns
    # While one half of a chunk is multiplied, the other is widened, if there are registers for both.
    widens_beside = layout.split.warpgroups <= 4 or columns <= 32

    def step(chunk: Value, i: Value, stage: Index, sums: list[Value]) -> list[Value]:
        x = activations.tile(i)
        half_bytes = x.row_bytes // HALVES
        product, held = None if is_rounded else sums, []
        codes = _codes(block, stage)
        block.advance(chunk)
        for half in range(HALVES):
            words = block.operand(chunk, half, codes(half))
            held.append(words)
            dtype = "e4m3" if is_rounded else "bf16"
            right = x.k_major(half * half_bytes, half_bytes)
            product = machine.wgmma(product, words, right, columns=columns, dtype=dtype)
            if half == HALVES - 1 or not widens_beside:
                product = machine.wgmma_wait(product)
                machine.hold(held)  # no register of an operand is used again before
                held.clear()
        assert product is not None
        if not is_rounded:
            return product
        return block.scaled_sum(chunk, i, lambda n: product[4 * n : 4 * n + 4], sums)

    return block.multiply(step, _zeros(machine, layout))


def _streamed(machine: TensorCores, block: Block) -> list[Value]:
    """Return the sums of a block that copies x chunk by chunk."""

    layout = block.layout
    nothing = [machine.constant(0, "i32")] * (OPERAND_WORDS // (1 if block.scales is not None else 2))

    # While half a chunk is multiplied, the next half is widened, that of the next chunk too.
    def step(chunk: Value, x: Tile, stage: Index, carry: _Carry) -> _Carry:
        (sums, held), half_bytes, codes = carry, x.row_bytes // HALVES, _codes(block, stage)
        for half in range(HALVES):
            words = block.operand(chunk, half, codes(half))
            right = x.k_major(half * half_bytes, half_bytes)
            sums = machine.wgmma(sums, words, right, columns=block.layout.columns, dtype="bf16")
            machine.wgmma_wait([], pending=1)
            machine.hold(held)  # no register of an operand is used again before
            held = words
            if half == 0:
                block.advance(chunk)
        return sums, held

    def turn(number: Index, _: None) -> tuple[list[Value], None]:
        sums, held = block.stream(number, step, (_zeros(machine, layout), nothing))
        sums = machine.wgmma_wait(sums)
        machine.hold(held)
        return sums, None

    block.begin()
    return add_in_turns(machine, layout.split.turns, turn, layout.columns // 2, None)[0]
