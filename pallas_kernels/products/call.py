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
from pallas_kernels.products.block import Layout, ProductInputs, WeightForm
from pallas_kernels.products.split import ROWS, TILE, fastest_split
from pallas_kernels.products.weights import CHUNK_BYTES, SCALE_INPUTS, SCALE_ROWS

ACTIVATIONS = ("bf16", "fp8")
MOST_ROWS = 128  # of x, up to which this is faster than widening the weight first
_KERNELS: dict[target.Architecture, Any] = {"sm90": sm90, "sm100": sm100}


def unsupported_product(shape: tuple[int, ...], form: WeightForm, rows: int = 1) -> str | None:
    """Return why no kernel serves a weight of this shape [groups * outputs, inputs], or None if one does.

    For more than 128 rows of x the kernel is right, but slower than a product with the widened weight.
    """
    (outputs, inputs), block = shape, form.block
    if rows > MOST_ROWS:
        return f"for more than {MOST_ROWS} rows it is faster to widen the weight, got {rows}"
    chunk = CHUNK_BYTES if block is not None else CHUNK_BYTES // 2
    if outputs % (form.groups * TILE) or inputs % chunk:
        return f"each of {form.groups} groups must have a multiple of {TILE} outputs and {chunk} inputs, got {shape}"
    if form.activations not in ACTIVATIONS:
        return f"activations must be one of {ACTIVATIONS}, got {form.activations!r}"
    if block is None:
        return None if form.activations == "bf16" else "activations are rounded to FP8 only for FP8 weights"
    least = CHUNK_BYTES if form.activations == "fp8" else SCALE_INPUTS
    if block[0] % SCALE_ROWS or block[1] % least:
        return f"blocks must be multiples of {SCALE_ROWS} x {least} with activations={form.activations!r}, got {block}"
    return None


def product(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array | None,
    form: WeightForm,
    *,
    dtype: Any = jnp.float32,
    simulate: bool = False,
) -> jax.Array:
    """Multiply rows of x by a weight [groups * outputs, inputs].

    Args:
      x: bf16 [M, groups * inputs].
      weight: float8_e4m3fn with ``scales``, or bf16 without. FP8 codes hold no NaN.
      scales: float8_e8m0fnu [groups * outputs / block[0], inputs / block[1]], rounded up, at most 2^7. Larger ones give
        NaN.
      form: of the weight.
      dtype: f32 or bf16, of the result.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [M, groups * outputs].

    Raises:
      ValueError: no kernel serves this weight (``unsupported_product``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    chex.assert_rank([x, weight], 2)
    chex.assert_type(x, jnp.bfloat16)
    (rows, width), (outputs, inputs) = x.shape, weight.shape
    chex.assert_equal(width, form.groups * inputs)
    if form.block is None:
        chex.assert_type(weight, jnp.bfloat16)
        chex.assert_equal(scales, None)
    else:
        assert scales is not None, "a weight of FP8 has scales"
        chex.assert_type([weight, scales], [jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
        chex.assert_shape(scales, (-(-outputs // form.block[0]), -(-inputs // form.block[1])))
        weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    if (reason := unsupported_product(weight.shape, form)) is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    layout = fastest_layout(rows, weight.shape, form, target.gpu_or_first())
    return launch_product(layout, ProductInputs(x=x, weight=weight, scales=scales), dtype, simulate=simulate)


def fastest_layout(rows: int, shape: tuple[int, ...], form: WeightForm, gpu: target.GPU) -> Layout:
    """Return the layout that ``product`` launches for so many rows of x."""
    kernel, (outputs, inputs) = _KERNELS[gpu.architecture], shape
    chunk = CHUNK_BYTES if form.block is not None else CHUNK_BYTES // 2
    tiles, columns = outputs // form.groups // TILE, min(ROWS, -(-rows // 8) * 8)
    return Layout(
        gpu=gpu,
        split=fastest_split(tiles, form.groups, inputs // chunk, columns, kernel.MOST_WARPGROUPS, gpu),
        form=form,
        rows=rows,
        columns=columns,
        inputs=chunk,
        operand_bytes=kernel.OPERAND_BYTES,
    )


def launch_product(layout: Layout, inputs: ProductInputs, dtype: Any, *, simulate: bool = False) -> jax.Array:
    """Launch the kernel with a layout. ``inputs.weight`` and ``scales`` of FP8 are given as bytes."""
    return launch(
        functools.partial(_KERNELS[layout.gpu.architecture].body, layout=layout),
        name="product",
        grid=layout.grid,
        inputs=inputs,
        state=jax.ShapeDtypeStruct((layout.rows, inputs.weight.shape[0]), dtype),
        simulate=simulate,
    )
