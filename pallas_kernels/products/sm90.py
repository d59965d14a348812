"""Products on Hopper: a warpgroup widens its tile of the weight in registers, which enters products from there."""

from __future__ import annotations

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import Index, Value
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.block import Block, Layout, ProductInputs
from pallas_kernels.products.weights import HALVES

OPERAND_BYTES = 0  # shared memory of a warpgroup for its left operand
MOST_WARPGROUPS = 5


def body(machine: TensorCores, inputs: ProductInputs, out: Buffer, *, layout: Layout) -> None:
    """Compute one block's part of the product."""
    block = Block.of(machine, inputs, layout)
    is_rounded, columns = layout.form.activations == "fp8", layout.columns
    # While one half of a chunk is multiplied, the other is widened, if there are registers for both.
    widens_beside = layout.split.warpgroups <= 4 or columns <= 32

    def step(chunk: Value, i: Value, stage: Index, sums: list[Value]) -> list[Value]:
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

    zeros = [machine.constant(0.0, "f32")] * (columns // 2)
    block.finish(out, block.multiply(inputs.scales, step, zeros))
