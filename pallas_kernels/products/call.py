"""Products of some rows with a weight that is stored as FP8 with a scale per block, or as bf16.

    y[m, o] = sum over i of x[m, i] weight[o, i] scales[o // block, i // block]

Sums are f32. A row's sums do not depend on other rows. Up to 64 rows they do not depend on how many there are either.
With more, there is another kernel on Hopper, which adds in another order. Its order depends on the number of rows only
where blocks share the inputs of a tile (``tiling``), as they do for a few hundred rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.products import keys, many_bf16, many_fp8, sm90, sm100
from pallas_kernels.products.block import Layout, ProductInputs, WeightForm
from pallas_kernels.products.many import ManyInputs
from pallas_kernels.products.rounding import round_rows
from pallas_kernels.products.split import ROWS, TILE, fastest_split
from pallas_kernels.products.tiling import OUTPUTS, Tiling, fastest_tiling
from pallas_kernels.products.weights import CHUNK_BYTES, SCALE_INPUTS, SCALE_ROWS

ACTIVATIONS = ("bf16", "fp8")
MOST_ROWS = 128  # of x, up to which the kernel of few rows is faster than widening the weight first
_KERNELS: dict[target.Architecture, Any] = {"sm90": sm90, "sm100": sm100}
_MANY: dict[str, Any] = {"bf16": many_bf16, "fp8": many_fp8}


def unsupported_product(shape: tuple[int, ...], form: WeightForm, rows: int = 1) -> str | None:
    """Return why no kernel serves a weight of this shape [groups * outputs, inputs], or None if one does.

    The kernel of few rows is right for any number of them, but above 128 it is slower than a product with the widened
    weight. A weight that only this kernel serves has none there.
    """
    (outputs, inputs), block = shape, form.block
    chunk = CHUNK_BYTES if block is not None else CHUNK_BYTES // 2
    if outputs % (form.groups * TILE) or inputs % chunk:
        return f"each of {form.groups} groups must have a multiple of {TILE} outputs and {chunk} inputs, got {shape}"
    if form.activations not in ACTIVATIONS:
        return f"activations must be one of {ACTIVATIONS}, got {form.activations!r}"
    if block is None and form.activations != "bf16":
        return "activations are rounded to FP8 only for FP8 weights"
    least = CHUNK_BYTES if form.activations == "fp8" else SCALE_INPUTS
    if block is not None and (block[0] % SCALE_ROWS or block[1] % least):
        return f"blocks must be multiples of {SCALE_ROWS} x {least} with activations={form.activations!r}, got {block}"
    if rows > MOST_ROWS and (reason := unsupported_many(shape, form)) is not None:
        return f"for more than {MOST_ROWS} rows, got {rows}, it is faster to widen the weight where {reason}"
    return None


def unsupported_many(shape: tuple[int, ...], form: WeightForm) -> str | None:
    """Return why the kernel of many rows does not serve a weight that the kernel of few rows serves, or None."""
    if target.architecture() != "sm90":
        return "the GPU is no Hopper"
    if form.block is None:
        return "it is bf16 already"
    if shape[0] % (form.groups * OUTPUTS):
        return f"a group does not have a multiple of {OUTPUTS} outputs"
    if form.activations == "fp8" and form.block[0] % OUTPUTS:
        return f"blocks of a scale do not have a multiple of {OUTPUTS} outputs with activations='fp8'"
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
    inputs = checked(x, weight, scales, form)
    if (reason := unsupported_product(weight.shape, form)) is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    (rows, _), (outputs, width_of_group) = x.shape, weight.shape
    gpu = target.gpu_or_first()
    if rows > ROWS and unsupported_many(weight.shape, form) is None:
        tiling = fastest_tiling(rows, outputs // form.groups, width_of_group, form, gpu)
        return launch_many(tiling, inputs, dtype, simulate=simulate)
    return launch_product(fastest_layout(rows, weight.shape, form, gpu), inputs, dtype, simulate=simulate)


def checked(x: jax.Array, weight: jax.Array, scales: jax.Array | None, form: WeightForm) -> ProductInputs:
    """Return the arrays as kernels take them. AssertionError (chex) if a shape or dtype is wrong."""
    chex.assert_rank([x, weight], 2)
    chex.assert_type(x, jnp.bfloat16)
    chex.assert_equal(x.shape[1], form.groups * weight.shape[1])
    if form.block is None:
        chex.assert_type(weight, jnp.bfloat16)
        chex.assert_equal(scales, None)
    else:
        assert scales is not None, "a weight of FP8 has scales"
        chex.assert_type([weight, scales], [jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
        chex.assert_shape(scales, [-(-size // by) for size, by in zip(weight.shape, form.block, strict=True)])
        weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    return ProductInputs(x=x, weight=weight, scales=scales)


def fastest_layout(rows: int, shape: tuple[int, ...], form: WeightForm, gpu: target.GPU) -> Layout:
    """Return the layout that ``product`` launches for so many rows of x."""
    kernel, (outputs, inputs) = _KERNELS[gpu.architecture], shape
    chunk = CHUNK_BYTES if form.block is not None else CHUNK_BYTES // 2
    tiles, columns = outputs // form.groups // TILE, min(ROWS, -(-rows // 8) * 8)
    layout = Layout(
        gpu=gpu,
        split=fastest_split(tiles, form.groups, inputs // chunk, columns, kernel.MOST_WARPGROUPS, gpu),
        form=form,
        rows=rows,
        columns=columns,
        inputs=chunk,
        operand_bytes=kernel.OPERAND_BYTES,
    )
    return dataclasses.replace(layout, streams=layout.should_stream(kernel.STREAMED_WARPGROUPS))


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


def launch_many(
    tiling: Tiling,
    inputs: ProductInputs,
    dtype: Any = None,
    angles: jax.Array | None = None,
    key_row: Any = None,
    *,
    simulate: bool = False,
) -> Any:
    """Launch the kernel of many rows with a tiling, after rounding x where the form asks for it.

    ``angles`` are for queries. ``key_row``, in place of a dtype, is for those of the indexer: a pytree ``codes scale``
    of ``jax.ShapeDtypeStruct``, one encoded row.
    """
    codes, of_x = round_rows(inputs.x, simulate=simulate) if tiling.is_rounded else (inputs.x, None)
    many = ManyInputs(x=codes, x_scales=of_x, weight=inputs.weight, scales=inputs.scales, angles=angles)
    return launch_tiles(tiling, many, dtype, key_row, simulate=simulate)


def launch_tiles(
    tiling: Tiling, inputs: ManyInputs, dtype: Any = None, key_row: Any = None, *, simulate: bool = False
) -> Any:
    """Launch the kernel of many rows."""
    outputs = inputs.weight.shape[0]
    if tiling.key_heads is None:
        name = "product_of_many" if tiling.heads is None else "product_of_queries"
        state = jax.ShapeDtypeStruct((tiling.rows, outputs), dtype)
    else:
        name, heads = "product_of_indexer_queries", outputs // keys.DIM
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((tiling.rows, heads * leaf.shape[0]), leaf.dtype), key_row
        )
    return launch(
        functools.partial(_MANY[tiling.form.activations].body, tiling=tiling),
        name=name,
        grid=tiling.grid,
        inputs=inputs,
        state=state,
        simulate=simulate,
    )
