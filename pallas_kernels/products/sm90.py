"""Products on Hopper: a warpgroup widens its tile of the weight in registers, which enters products from there."""

from __future__ import annotations

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import Index, Value
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.products.activations import Activations
from pallas_kernels.products.block import Block, Layout, ProductInputs
from pallas_kernels.products.weights import HALVES

OPERAND_BYTES = 0  # shared memory of a warpgroup for its left operand
MOST_WARPGROUPS = 5
STREAMS = True  # whether x can be copied chunk by chunk
_HELD, _HELD_OF_BF16 = 16, 8  # words of half a chunk of the weight, as an operand

_Carry = tuple[list[Value], list[Value]]  # sums, and the operand of a product that still runs


def body(machine: TensorCores, inputs: ProductInputs, out: Buffer, *, layout: Layout) -> None:
    """Compute one block's part of the product."""
    block = Block.of(machine, inputs, layout)
    zeros = [machine.constant(0.0, "f32")] * (layout.columns // 2)
    if layout.form.activations == "fp8" or not layout.streams:
        sums = block.multiply(inputs.scales, _rounded_step(machine, block, layout), zeros)
    else:
        sums = _sums_of_streamed(machine, block, inputs, layout, zeros)
    block.finish(out, sums)


def _sums_of_streamed(machine, block, inputs, layout, zeros):
    # While half a chunk is multiplied, the next half is widened, if there are registers for both.
    widens_beside = layout.widens == 2 and (layout.split.warpgroups <= 4 or layout.columns <= 32)
    half_beside = layout.widens == 1 and (layout.split.warpgroups <= 4 or layout.columns <= 32)

    def step(chunk: Value, x: Tile, stage: Index, carry: _Carry) -> _Carry:
        (sums, held), half_bytes = carry, x.row_bytes // HALVES
        for half in range(HALVES):
            words = block.operand(chunk, stage, half)
            sums = machine.wgmma(
                sums, words, x.k_major(half * half_bytes, half_bytes), columns=layout.columns, dtype="bf16"
            )
            if half_beside:
                if half == 0:
                    block.advance(chunk)
                    held = words
                else:
                    sums = machine.wgmma_wait(sums)
                    machine.hold([held, words])
                continue
            if widens_beside:
                machine.wgmma_wait([], pending=1)
                machine.hold(held)  # no register of an operand is used again before
                held = words
                if half == 0:
                    block.advance(chunk)
            else:
                if half == 0:
                    block.advance(chunk)
                sums = machine.wgmma_wait(sums)
                machine.hold(words)
        return sums, (held if widens_beside else [])

    held = [machine.constant(0, "i32")] * (_HELD_OF_BF16 if inputs.scales is None else _HELD) if widens_beside else []
    sums, held = block.stream(inputs.scales, step, (zeros, held))
    sums = machine.wgmma_wait(sums)
    machine.hold(held)
    return sums


def _rounded_step(machine, block, layout):
    is_rounded, columns = layout.form.activations == "fp8", layout.columns
    # While one half of a chunk is multiplied, the other is widened, if there are registers for both.
    widens_beside = layout.split.warpgroups <= 4 or columns <= 32

    def step(chunk: Value, i: Value, stage: Index, sums: list[Value]) -> list[Value]:
        assert isinstance(block.activations, Activations)
        x = block.activations.tile(i)
        half_bytes = x.row_bytes // HALVES
        product, held = None if is_rounded else sums, []
        for half in range(HALVES):
            words = block.operand(chunk, stage, half)
            held.append(words)
            dtype = "e4m3" if is_rounded else "bf16"
            right = x.k_major(half * half_bytes, half_bytes)
            product = machine.wgmma(product, words, right, columns=columns, dtype=dtype)
            if half == 0:
                block.advance(chunk)
            if half == HALVES - 1 or not widens_beside:
                product = machine.wgmma_wait(product)
                machine.hold(held)  # no register of an operand is used again before
                held.clear()
        assert product is not None
        if not is_rounded:
            return product
        return block.scaled_sum(chunk, i, lambda n: product[4 * n : 4 * n + 4], sums)

    return step
