"""Layouts and launches of products, whose arguments were checked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products import keys, sm90, sm100
from pallas_kernels.products.block import Layout, ProductInputs, WeightForm
from pallas_kernels.products.many import bf16, fp8, wide
from pallas_kernels.products.many.tiles import ManyInputs, needed_tiles
from pallas_kernels.products.many.tiling import Tiling
from pallas_kernels.products.queries import QueryHeads
from pallas_kernels.products.split import ROWS, TILE, Split, fastest_split
from pallas_kernels.products.weights import CHUNK_BYTES
from pallas_kernels.rounding import RoundedRows, round_rows

_KERNELS: dict[target.Architecture, Any] = {"sm90": sm90, "sm100": sm100}
_MANY: dict[str, Any] = {"bf16": bf16, "fp8": fp8}  # by the activations of FP8 weights


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


def launch_product(
    layout: Layout, inputs: ProductInputs, dtype: Any, *, is_operand: bool = False, simulate: bool = False
) -> Any:
    """Launch the kernel with a layout. ``inputs.weight`` and ``scales`` of FP8 are given as bytes."""
    shape = layout.rows, inputs.weight.shape[0]
    state = OperandRows.shapes(*shape) if is_operand else jax.ShapeDtypeStruct(shape, dtype)
    return launch_few(layout, inputs, state, simulate=simulate)


def launch_few(layout: Layout, inputs: ProductInputs, state: Any, *, simulate: bool) -> Any:
    """Launch the kernel of few rows for results like ``state``."""
    kernel = _KERNELS[layout.gpu.architecture]
    if isinstance(inputs.x, OperandRows):
        streams = layout.streams or layout.should_stream(kernel.STREAMED_WARPGROUPS, is_operand=True)
        layout = dataclasses.replace(layout, streams=streams)
    return launch(
        functools.partial(kernel.body, layout=layout),
        name="product" if layout.heads is None else "product_of_queries",
        grid=layout.grid,
        inputs=inputs,
        state=state,
        simulate=simulate,
    )


def layout_of_heads(
    rows: int, shape: tuple[int, ...], form: WeightForm, heads: QueryHeads, gpu: target.GPU
) -> Layout | None:
    """Return the layout for at most 64 rows of x and outputs that are heads, or None if there are too few blocks.

    Sums have the same parts as those of ``product``, as its blocks of a cluster. So the result, and whether there is
    one, depend on the number of rows no more than they do there.
    """
    layout = fastest_layout(rows, shape, form, gpu)
    kernel, split = _KERNELS[gpu.architecture], layout.split
    parts, blocks = split.all_parts, shape[0] // (heads.blocks * heads.tiles * TILE)
    cluster = parts * heads.blocks
    is_possible = (parts == 1 or heads.blocks == 1) and (cluster == 1 or cluster in gpu.clusters)
    if not is_possible or blocks * cluster <= gpu.multiprocessors // 2:
        return None
    split = Split(cluster=parts, parts=1, tiles=heads.tiles, blocks=blocks, chunks=shape[1] // layout.inputs // parts)
    layout = dataclasses.replace(layout, split=split, streams=False, heads=heads)
    return dataclasses.replace(layout, streams=layout.should_stream(kernel.STREAMED_WARPGROUPS))


def launch_many(
    tiling: Tiling,
    inputs: ProductInputs,
    dtype: Any = None,
    key_row: Any = None,
    *,
    needed: jax.Array | None = None,
    simulate: bool = False,
) -> Any:
    """Launch the kernel of many rows with a tiling, after rounding x where the form asks for it.

    The product is added to ``inputs.residual`` in place, if there is one.

    ``key_row``, in place of a dtype, is for queries of the indexer: a pytree ``codes scale`` of
    ``jax.ShapeDtypeStruct``, one encoded row. ``needed`` are rows, as for ``product``.
    """
    x, of_x = inputs.x, None
    if tiling.is_rounded:
        rounded = x if isinstance(x, RoundedRows) else round_rows(x, needed=needed, simulate=simulate)
        x, of_x = rounded.codes, rounded.scales
    many = ManyInputs(
        x=x,
        x_scales=of_x,
        weight=inputs.weight,
        scales=inputs.scales,
        angles=inputs.angles,
        positions=None if inputs.residual is None else inputs.residual.positions,
        needed=None if tiling.parts > 1 else needed_tiles(needed, tiling.tile_rows, tiling.output_tiles),
    )
    rows = None if inputs.residual is None else inputs.residual.rows
    return launch_tiles(tiling, many, dtype, key_row, onto=rows, simulate=simulate)


def launch_tiles(
    tiling: Tiling,
    inputs: ManyInputs,
    dtype: Any = None,
    key_row: Any = None,
    *,
    onto: jax.Array | None = None,
    simulate: bool = False,
) -> Any:
    """Launch the kernel of many rows. With positions in its inputs, the product is added to ``onto`` in place."""
    outputs = inputs.weight.shape[0]
    if tiling.key_heads is None:
        name = "product_of_many" if tiling.heads is None else "product_of_queries"
        is_rounded = dtype == jnp.float8_e4m3fn
        shape = tiling.rows, outputs
        state: Any = RoundedRows.shapes(*shape) if is_rounded else jax.ShapeDtypeStruct(shape, dtype)
        state = state if onto is None else onto
    else:
        name, heads = "product_of_indexer_queries", outputs // keys.DIM
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((tiling.rows, heads * leaf.shape[0]), leaf.dtype), key_row
        )
    return launch(
        functools.partial((wide if tiling.is_wide else _MANY[tiling.form.activations]).body, tiling=tiling),
        name=name,
        grid=tiling.grid,
        inputs=inputs,
        state=state,
        simulate=simulate,
    )
