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

from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language import target
from pallas_kernels.language.values import VECTOR
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products import keys
from pallas_kernels.products.block import Layout, ProductInputs, WeightForm
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.keys import KeyHeads
from pallas_kernels.products.launches import (
    fastest_layout,
    launch_few,
    launch_many,
    launch_product,
    layout_of_heads,
)
from pallas_kernels.products.many.tiling import OUTPUTS, fastest_tiling, tiling_of_heads, tiling_of_key_heads
from pallas_kernels.products.pair import fastest_pair, launch_pair
from pallas_kernels.products.queries import AttentionHeads, IndexerHeads, QueryHeads
from pallas_kernels.products.residual import Residual, check_residual
from pallas_kernels.products.split import ROWS, TILE
from pallas_kernels.products.weights import CHUNK_BYTES, SCALE_INPUTS, SCALE_ROWS
from pallas_kernels.rounding import RoundedRows, round_rows

ACTIVATIONS = ("bf16", "fp8")
HEAD_DIM = 512  # outputs of a head of attention, where they become queries
KEY_DIMS = 64, 128, 256  # outputs of a head of the indexer, where they become queries: they fit in a block
MOST_ROWS = 128  # of x, up to which the kernel of few rows is faster than widening the weight first


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
    if rows > MOST_ROWS and (reason := _unsupported_many(shape, form)) is not None:
        return f"for more than {MOST_ROWS} rows, got {rows}, it is faster to widen the weight where {reason}"
    return None


def _unsupported_many(shape: tuple[int, ...], form: WeightForm) -> str | None:
    """Return why the kernel of many rows does not serve a weight that the kernel of few rows serves, or None."""
    if target.architecture() != "sm90":
        return "the GPU is no Hopper"
    if form.block is None and form.groups == 1:
        return None
    if shape[0] % (form.groups * OUTPUTS):
        return f"a group does not have a multiple of {OUTPUTS} outputs"
    if form.activations == "fp8" and form.block is not None and form.block[0] % OUTPUTS:
        return f"blocks of a scale do not have a multiple of {OUTPUTS} outputs with activations='fp8'"
    return None


def product(
    x: jax.Array | RoundedRows | OperandRows,
    weight: jax.Array,
    scales: jax.Array | None,
    form: WeightForm,
    *,
    dtype: Any = jnp.float32,
    is_operand: bool = False,
    needed: jax.Array | None = None,
    residual: Residual | None = None,
    simulate: bool = False,
) -> Any:
    """Multiply rows of x by a weight [groups * outputs, inputs].

    Args:
      x: bf16 [M, groups * inputs]; or rounded rows or operand rows, if ``takes_rounded`` or ``takes_operand`` says so.
      weight: float8_e4m3fn with ``scales``, or bf16 without. FP8 codes hold no NaN.
      scales: float8_e8m0fnu [groups * outputs / block[0], inputs / block[1]], rounded up, at most 2^7. Larger ones give
        NaN.
      form: of the weight.
      dtype: of the result: f32, bf16, or float8_e4m3fn for bf16 that is then rounded (``rounding``). Rounding is a
        launch of its own where the weight's activations are bf16, up to 64 rows, and where blocks share a tile.
      is_operand: give operand rows, of bf16. Up to 64 rows, and without a residual.
      needed: bool [M], rows whose product anyone reads; None for all. Products of others may be anything, NaN too: of
        many rows, tiles without a needed row are left out. Bool [1, M] says the same of one request, whose rows up to
        the last needed one then count as needed.
      residual: rows that the product is added to, after it was rounded to bf16 itself, for a result of bf16. Of more
        than 64 rows, for FP8 weights, in place if the caller's jit donates them or does not use them again.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [M, groups * outputs], or ``RoundedRows`` or ``OperandRows`` of that shape.

    Raises:
      ValueError: no kernel serves this weight (``unsupported_product``), or none takes such rows or a residual.
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = _checked(x, weight, scales, form)
    _check_needed(needed, x)
    if residual is not None:
        check_residual(residual, (x.shape[0], len(weight)), dtype)
        inputs = dataclasses.replace(inputs, residual=residual)
    if (reason := unsupported_product(weight.shape, form)) is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    (rows, _), (outputs, width_of_group) = x.shape, weight.shape
    gpu = target.gpu_or_first()
    if is_operand and (rows > ROWS or dtype != jnp.bfloat16 or residual is not None):
        raise ValueError(f"operand rows are at most {ROWS} of bf16 without residual, got {rows} of {jnp.dtype(dtype)}")
    few = MOST_ROWS if form.block is None else ROWS
    if rows <= few or _unsupported_many(weight.shape, form) is not None:
        layout = fastest_layout(rows, weight.shape, form, gpu)
        launch_rows = functools.partial(launch_product, layout, inputs, is_operand=is_operand)
    else:
        tiling = fastest_tiling(rows, outputs // form.groups, width_of_group, form, gpu)
        if residual is not None and form.block is None:
            raise ValueError(f"more than {ROWS} rows are added to a residual by products with FP8 weights")
        launch_rows = functools.partial(launch_many, tiling, inputs, needed=needed)
        if dtype == jnp.float8_e4m3fn and tiling.is_rounded and tiling.parts == 1:
            return launch_rows(dtype, simulate=simulate)
    if dtype == jnp.float8_e4m3fn:
        return round_rows(launch_rows(jnp.bfloat16, simulate=simulate), simulate=simulate)
    return launch_rows(dtype, simulate=simulate)


def takes_rounded(shape: tuple[int, ...], form: WeightForm, rows: int) -> bool:
    """Return whether ``product`` takes so many rounded rows for a weight of this shape [groups * outputs, inputs]."""
    return form.activations == "fp8" and rows > ROWS and unsupported_product(shape, form, MOST_ROWS + 1) is None


def takes_operand(shape: tuple[int, ...], form: WeightForm, rows: int) -> bool:
    """Return whether ``product`` takes so many operand rows for a weight of this shape [groups * outputs, inputs]."""
    if form.block is None or form.activations != "bf16":
        return False
    return rows <= ROWS and unsupported_product(shape, form) is None


def unsupported_product_pair(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], forms: tuple[WeightForm, WeightForm], rows: int
) -> str | None:
    """Return why two products with the same rows are better two launches, or None if one launch serves them."""
    for shape, form in zip(shapes, forms, strict=True):
        if (reason := unsupported_product(shape, form)) is not None:
            return reason
    if rows > ROWS:
        return f"two products are one launch for at most {ROWS} rows, got {rows}"
    if _layouts_of_pair(shapes, forms, rows) is None:
        return f"one launch of both, {shapes}, is not expected to be faster than two"
    return None


def _layouts_of_pair(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], forms: tuple[WeightForm, WeightForm], rows: int
) -> tuple[Layout, Layout] | None:
    first, second = (
        fastest_layout(rows, shape, form, target.gpu_or_first()) for shape, form in zip(shapes, forms, strict=True)
    )
    return fastest_pair((first, second), (shapes[0][0], shapes[1][0]))


def product_pair(
    x: jax.Array,
    first: tuple[jax.Array, jax.Array | None, WeightForm],
    second: tuple[jax.Array, jax.Array | None, WeightForm],
    *,
    dtype: Any = jnp.float32,
    simulate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Multiply rows of x by two weights, in one launch.

    Args:
      x: bf16 [M, inputs], at most 64 rows.
      first, second: weight, scales and form of each, of one group, as for ``product``. The larger one comes first.
      dtype: f32 or bf16, of the results.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [M, outputs] of each. They are bit for bit what ``product`` returns.

    Raises:
      ValueError: no kernel serves these (``unsupported_product_pair``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = _checked(x, *first), _checked(x, *second)
    shapes, forms = (first[0].shape, second[0].shape), (first[2], second[2])
    if (reason := unsupported_product_pair(shapes, forms, x.shape[0])) is not None:
        raise ValueError(f"no kernel serves these products: {reason}")
    layouts = _layouts_of_pair(shapes, forms, x.shape[0])
    assert layouts is not None
    return launch_pair(layouts, inputs, dtype, simulate=simulate)


def _checked(
    x: jax.Array | RoundedRows | OperandRows, weight: jax.Array, scales: jax.Array | None, form: WeightForm
) -> ProductInputs:
    """Return the arrays as kernels take them.

    Raises:
      ValueError: products with such a weight take no rows of this kind.
      AssertionError: (chex) a shape or dtype is wrong.
    """
    chex.assert_rank(weight, 2)
    if isinstance(x, RoundedRows | OperandRows):
        chex.assert_trees_all_equal_shapes_and_dtypes(x, type(x).shapes(*x.shape))
    else:
        chex.assert_rank(x, 2)
        chex.assert_type(x, jnp.bfloat16)
    chex.assert_equal(x.shape[1], form.groups * weight.shape[1])
    if form.block is None:
        chex.assert_type(weight, jnp.bfloat16)
        chex.assert_equal(scales, None)
    else:
        assert scales is not None, "a weight of FP8 has scales"
        chex.assert_type([weight, scales], [jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
        chex.assert_shape(scales, [-(-size // by) for size, by in zip(weight.shape, form.block, strict=True)])
    takes = {RoundedRows: takes_rounded, OperandRows: takes_operand}.get(type(x))
    if takes is not None and not takes(weight.shape, form, x.shape[0]):
        kind = type(x).__name__
        raise ValueError(f"no kernel takes {x.shape[0]} rows of {kind} for a weight {weight.shape} of {form}")
    if scales is not None:
        weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    return ProductInputs(x=x, weight=weight, scales=scales)


def _check_needed(needed: jax.Array | None, x: jax.Array | RoundedRows | OperandRows) -> None:
    if needed is not None:
        chex.assert_shape(needed, x.shape[:1] if needed.ndim == 1 else (1, *x.shape[:1]))
        chex.assert_type(needed, bool)


def checked_for_queries(
    x: jax.Array | OperandRows, weight: jax.Array, scales: jax.Array | None, form: WeightForm, angles: jax.Array
) -> ProductInputs:
    """Do what ``_checked`` does, with angles f32 [M, rope_dim]."""
    chex.assert_shape(angles, (x.shape[0], None))
    chex.assert_type(angles, jnp.float32)
    return dataclasses.replace(_checked(x, weight, scales, form), angles=angles)


def unsupported_product_of_queries(
    shape: tuple[int, ...], form: WeightForm, rows: int, head_dim: int, rope_dim: int
) -> str | None:
    """Return why no kernel makes queries of so many rows in their product, or None if one does.

    Their product and their conversion (``attention_queries``) are then two launches.
    """
    if (reason := unsupported_product(shape, form, rows)) is not None:
        return reason
    if head_dim != HEAD_DIM or shape[0] % HEAD_DIM or form.groups != 1:
        return f"outputs must be heads of {HEAD_DIM}, got {shape[0]} outputs and heads of {head_dim}"
    if rope_dim % 16 or not 0 < rope_dim <= HEAD_DIM // 2:
        return f"rope_dim must be a multiple of 16 up to {HEAD_DIM // 2}, got {rope_dim}"
    if rows <= ROWS:
        return _unsupported_heads(rows, shape, form, AttentionHeads(dim=head_dim, eps=0.0))
    return _unsupported_many_queries(shape, form)


def unsupported_product_of_indexer_queries(
    shape: tuple[int, ...], form: WeightForm, rows: int, key_dim: int, rope_dim: int, key_format: str
) -> str | None:
    """Return why no kernel makes the indexer's queries in their product, or None if one does.

    Their product and their conversion (``indexer_queries``) are then two launches.
    """
    if (reason := unsupported_product(shape, form, rows)) is not None:
        return reason
    of_format = KEY_FORMATS.get(key_format)
    if not isinstance(of_format, Fp4Keys):
        return f"key_format must be a 4-bit format, got {key_format!r}"
    if key_dim not in KEY_DIMS or shape[0] % key_dim or form.groups != 1:
        return f"outputs must be heads of {KEY_DIMS}, got {shape[0]} outputs and heads of {key_dim}"
    if rope_dim % VECTOR or not 0 < rope_dim <= key_dim:
        return f"rope_dim must be a multiple of {VECTOR} up to {key_dim}, got {rope_dim}"
    if rows <= ROWS:
        return _unsupported_heads(rows, shape, form, IndexerHeads(dim=key_dim, keys=of_format))
    if key_dim != keys.DIM or rope_dim % 16:
        sizes = f"heads of {keys.DIM} and a rope_dim that is a multiple of 16"
        return f"more than {ROWS} rows must have {sizes}, got {key_dim} and {rope_dim}"
    return _unsupported_many_queries(shape, form)


def _unsupported_many_queries(shape: tuple[int, ...], form: WeightForm) -> str | None:
    if (reason := _unsupported_many(shape, form)) is not None:
        return f"products of more than {ROWS} rows have no kernel where {reason}"
    if form.activations != "fp8":
        return f"queries of more than {ROWS} rows are made in products with activations='fp8'"
    return None


def _unsupported_heads(rows: int, shape: tuple[int, ...], form: WeightForm, heads: QueryHeads) -> str | None:
    gpu = target.gpu_or_first()
    if gpu.architecture != "sm90":
        return "the GPU is no Hopper"
    if layout_of_heads(rows, shape, form, heads, gpu) is None:
        return f"a weight of this shape, {shape}, gives too few blocks of whole heads"
    return None


def product_of_queries(
    x: jax.Array | OperandRows,
    weight: jax.Array,
    scales: jax.Array,
    form: WeightForm,
    angles: jax.Array,
    *,
    eps: float,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Multiply rows of x by a weight whose outputs are heads, and convert them as ``attention_queries`` does.

    Args:
      x, weight, scales, form: as for ``product``. Up to 64 rows a query does not depend on how many rows there are.
      angles: f32 [M, rope_dim], cosines and then sines of the angles by which the last channels of each head are
        rotated.
      eps: of the norm.
      needed: as for ``product``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      f16 [M, heads, 512].

    Raises:
      ValueError: no kernel serves this (``unsupported_product_of_queries``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = checked_for_queries(x, weight, scales, form, angles)
    _check_needed(needed, x)
    reason = unsupported_product_of_queries(weight.shape, form, x.shape[0], HEAD_DIM, angles.shape[1])
    if reason is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    gpu = target.gpu_or_first()
    if x.shape[0] <= ROWS:
        layout = layout_of_heads(x.shape[0], weight.shape, form, AttentionHeads(dim=HEAD_DIM, eps=eps), gpu)
        assert layout is not None
        state = jax.ShapeDtypeStruct((x.shape[0], len(weight)), jnp.float16)
        queries = launch_few(layout, inputs, state, simulate=simulate)
    else:
        tiling = tiling_of_heads(x.shape[0], *weight.shape, form, Heads(dim=HEAD_DIM, eps=eps), gpu)
        queries = launch_many(tiling, inputs, jnp.float16, needed=needed, simulate=simulate)
    return queries.reshape(x.shape[0], -1, HEAD_DIM)


def product_of_indexer_queries(
    x: jax.Array | OperandRows,
    weight: jax.Array,
    scales: jax.Array | None,
    form: WeightForm,
    angles: jax.Array,
    key_row: Any,
    *,
    key_format: str,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> Any:
    """Multiply rows of x by a weight whose outputs are heads, and convert them as ``indexer_queries`` does.

    Args:
      x, weight, scales, form: as for ``product``. Up to 64 rows a query does not depend on how many rows there are.
      angles: f32 [M, rope_dim], as for ``indexer_queries``.
      key_row: pytree ``codes scale`` of ``jax.ShapeDtypeStruct``, one encoded row.
      key_format: a 4-bit format.
      needed: as for ``product``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      A pytree like key_row, with leaves [M, heads, ...].

    Raises:
      ValueError: no kernel serves this (``unsupported_product_of_indexer_queries``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = checked_for_queries(x, weight, scales, form, angles)
    _check_needed(needed, x)
    key_dim = 2 * key_row.codes.shape[0]  # two codes in a byte
    asked = weight.shape, form, x.shape[0], key_dim, angles.shape[1], key_format
    if (reason := unsupported_product_of_indexer_queries(*asked)) is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    of_format, gpu = KEY_FORMATS[key_format], target.gpu_or_first()
    assert isinstance(of_format, Fp4Keys)
    if x.shape[0] <= ROWS:
        layout = layout_of_heads(x.shape[0], weight.shape, form, IndexerHeads(dim=key_dim, keys=of_format), gpu)
        assert layout is not None
        rows = x.shape[0] * (len(weight) // key_dim)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), key_row)
        queries = launch_few(layout, inputs, state, simulate=simulate)
    else:
        tiling = tiling_of_key_heads(x.shape[0], *weight.shape, form, KeyHeads(keys=of_format), gpu)
        queries = launch_many(tiling, inputs, key_row=key_row, needed=needed, simulate=simulate)
    return jax.tree.map(lambda leaf, row: leaf.reshape(x.shape[0], -1, *row.shape), queries, key_row)
