"""Products of some rows with a weight that is stored as FP8 with a scale per block, or as bf16.

    y[m, o] = sum over i of x[m, i] weight[o, i] scales[o // block, i // block]

Sums are f32. A row's sums do not depend on how many rows there are, nor on the others.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.products import sm90, sm100
from pallas_kernels.products.activations import Rounding
from pallas_kernels.products.block import Layout, ProductInputs
from pallas_kernels.products.split import ROWS, TILE, fastest_split
from pallas_kernels.products.weights import CHUNK_BYTES, SCALE_INPUTS, SCALE_ROWS

_KERNELS: dict[target.Architecture, Any] = {"sm90": sm90, "sm100": sm100}


def unsupported_product(
    *, outputs: int, inputs: int, groups: int = 1, block: tuple[int, int] | None, activations: Rounding = "bf16"
) -> str | None:
    """Return why no kernel serves a weight [outputs, inputs], or None if one does.

    Args:
      outputs: of all groups.
      inputs: of each group.
      groups: of outputs, each with its own inputs.
      block: outputs and inputs of a scale; None for a weight of bf16.
      activations: as for ``product``.
    """
    chunk = CHUNK_BYTES if block is not None else CHUNK_BYTES // 2
    if outputs % (groups * TILE) or inputs % chunk:
        return f"{groups} groups have a multiple of {TILE} outputs and of {chunk} inputs, got {outputs} and {inputs}"
    if block is None:
        return None if activations == "bf16" else "activations are rounded to FP8 only for FP8 weights"
    least = CHUNK_BYTES if activations == "fp8" else SCALE_INPUTS
    if block[0] % SCALE_ROWS or block[1] % least:
        return f"blocks are multiples of {SCALE_ROWS} x {least} with activations={activations!r}, got {block}"
    return None


def product(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array | None = None,
    *,
    block: tuple[int, int] = (128, 128),
    groups: int = 1,
    activations: Rounding = "bf16",
    dtype: Any = jnp.float32,
    simulate: bool = False,
) -> jax.Array:
    """Multiply rows of x by a weight [groups * outputs, inputs].

    Args:
      x: bf16 [M, groups * inputs].
      weight: float8_e4m3fn with ``scales``, or bf16 without. FP8 codes hold no NaN.
      scales: float8_e8m0fnu [groups * outputs / block[0], inputs / block[1]], rounded up, at most 2^7. Larger ones give
        NaN.
      block: outputs and inputs of a scale.
      groups: the outputs of group g are products with inputs [g * inputs, (g + 1) * inputs) of x.
      activations: "bf16" takes x as it is. "fp8" first rounds each 128 inputs of a row to E4M3, with a power of two as
        scale, at most 448 times which is their largest magnitude, or 1e-4; partial sums over 128 inputs are added in
        f32.
      dtype: f32 or bf16, of the result.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [M, groups * outputs].

    Raises:
      ValueError: no kernel serves these sizes (``unsupported_product``).
    """
    chex.assert_rank([x, weight], 2)
    chex.assert_type(x, jnp.bfloat16)
    rows, (outputs, inputs) = x.shape[0], weight.shape
    chex.assert_shape(x, (rows, groups * inputs))
    if scales is None:
        chex.assert_type(weight, jnp.bfloat16)
    else:
        chex.assert_type([weight, scales], [jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
        chex.assert_shape(scales, (-(-outputs // block[0]), -(-inputs // block[1])))
        weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    scale_block = None if scales is None else block
    reason = unsupported_product(
        outputs=outputs, inputs=inputs, groups=groups, block=scale_block, activations=activations
    )
    if reason is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    gpu, chunk = target.gpu_or_first(), CHUNK_BYTES // weight.dtype.itemsize
    kernel = _KERNELS[gpu.architecture]
    layout = Layout(
        gpu=gpu,
        split=fastest_split(outputs // groups // TILE, groups, inputs // chunk, kernel.MOST_WARPGROUPS, gpu),
        groups=groups,
        rows=rows,
        columns=min(ROWS, -(-rows // 8) * 8),
        inputs=chunk,
        scale_block=scale_block,
        rounding=activations,
        operand_bytes=kernel.OPERAND_BYTES,
    )
    return launch_product(layout, ProductInputs(x=x, weight=weight, scales=scales), outputs, dtype, simulate=simulate)


def launch_product(
    layout: Layout, inputs: ProductInputs, outputs: int, dtype: Any, *, simulate: bool = False
) -> jax.Array:
    """Launch the kernel with a layout, as ``product`` does with the fastest."""
    return launch(
        functools.partial(_KERNELS[layout.gpu.architecture].body, layout=layout),
        name="product",
        grid=layout.grid,
        inputs=inputs,
        state=jax.ShapeDtypeStruct((layout.rows, outputs), dtype),
        simulate=simulate,
    )
