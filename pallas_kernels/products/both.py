"""Queries of attention and of the indexer, made in one launch of both of their products with few rows of the same x.

V4-Flash has as many heads of the one as of the other. Two blocks that compute a head of attention compute one of the
indexer beside it, so that x is copied once for both, and the second launch does not take its time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language import target
from pallas_kernels.operand_rows import OperandRows
from pallas_kernels.products import sm90
from pallas_kernels.products.block import Layout, WeightForm
from pallas_kernels.products.call import (
    HEAD_DIM,
    checked_for_queries,
    unsupported_product_of_indexer_queries,
    unsupported_product_of_queries,
)
from pallas_kernels.products.launches import launch_few, layout_of_heads
from pallas_kernels.products.queries import HALVES, AttentionHeads, BothHeads, IndexerHeads
from pallas_kernels.products.split import ROWS, TILE

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryForm:
    """What queries are made of two products: how both weights are stored, and how their outputs are converted."""

    weight: WeightForm
    eps: float  # of the norm of attention's heads
    key_row: Any  # pytree ``codes scale`` of ``jax.ShapeDtypeStruct``, one encoded row of the indexer
    key_format: str  # a 4-bit format

    @property
    def key_dim(self) -> int:
        """Outputs of a head of the indexer: two codes in a byte."""
        return 2 * self.key_row.codes.shape[0]


def unsupported_product_of_both_queries(
    shapes: tuple[Shape, Shape], form: QueryForm, rows: int, rope_dim: int
) -> str | None:
    """Return why one launch does not make the queries of attention and of the indexer, or None if it does.

    Args:
      shapes: of the weights, the indexer's second.
      form: of the weights and the queries.
      rows: of x.
      rope_dim: channels that are rotated.
    """
    if rows > ROWS:
        return f"both are one launch for at most {ROWS} rows, got {rows}"
    first, second = shapes
    if (reason := unsupported_product_of_queries(first, form.weight, rows, HEAD_DIM, rope_dim)) is not None:
        return reason
    if second[1] != first[1] or second[0] // form.key_dim != first[0] // HEAD_DIM:
        return f"attention and the indexer must have as many heads and inputs, got weights {shapes}"
    of_indexer = second, form.weight, rows, form.key_dim, rope_dim, form.key_format
    if (reason := unsupported_product_of_indexer_queries(*of_indexer)) is not None:
        return reason
    if form.key_dim != HALVES * TILE:
        return f"heads of the indexer must have {HALVES * TILE} outputs, got {form.key_dim}"
    layout = layout_of_both(rows, shapes, form, target.gpu_or_first())
    if layout is None or layout.split.warpgroups > sm90.MOST_WARPGROUPS:
        return f"weights of these shapes, {shapes}, are divided over the blocks in another way"
    return None


def layout_of_both(rows: int, shapes: tuple[Shape, Shape], form: QueryForm, gpu: target.GPU) -> Layout | None:
    """Return the layout of attention's product with a tile of the indexer in each block."""
    of_format = KEY_FORMATS[form.key_format]
    assert isinstance(of_format, Fp4Keys)
    heads = BothHeads(
        attention=AttentionHeads(dim=HEAD_DIM, eps=form.eps), indexer=IndexerHeads(dim=form.key_dim, keys=of_format)
    )
    alone = layout_of_heads(rows, shapes[0], form.weight, heads.attention, gpu)
    if alone is None:
        return None
    split = dataclasses.replace(alone.split, tiles=heads.tiles)
    layout = dataclasses.replace(alone, split=split, streams=False, heads=heads, beside=heads.beside)
    return dataclasses.replace(layout, streams=layout.should_stream(sm90.STREAMED_WARPGROUPS))


def product_of_both_queries(
    x: jax.Array | OperandRows,
    first: tuple[jax.Array, jax.Array],
    second: tuple[jax.Array, jax.Array],
    form: QueryForm,
    angles: jax.Array,
    *,
    simulate: bool = False,
) -> tuple[jax.Array, Any]:
    """Multiply rows of x by two weights whose outputs are heads, and convert these to queries, in one launch.

    A query does not depend on how many rows there are. Attention's are bit for bit those of ``product_of_queries``.
    Sums of the indexer's have one part, where ``product_of_indexer_queries`` may add several.

    Args:
      x: bf16 [M, inputs], at most 64 rows; or operand rows, if ``takes_operand`` says so.
      first: weight float8_e4m3fn [heads * 512, inputs] of attention's queries and its scales, as for ``product``.
      second: those of the indexer's, as many heads.
      form: of the weights and the queries.
      angles: f32 [M, rope_dim], cosines and then sines, as for ``product_of_queries``.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      f16 [M, heads, 512], and a pytree like ``form.key_row`` with leaves [M, heads, ...].

    Raises:
      ValueError: no kernel serves this (``unsupported_product_of_both_queries``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs, beside = (checked_for_queries(x, *weight, form.weight, angles) for weight in (first, second))
    rows, shapes = x.shape[0], (first[0].shape, second[0].shape)
    chex.assert_rank([first[0], second[0]], 2)
    if (reason := unsupported_product_of_both_queries(shapes, form, rows, angles.shape[1])) is not None:
        raise ValueError(f"no kernel serves these products: {reason}")
    layout = layout_of_both(rows, shapes, form, target.gpu_or_first())
    assert layout is not None
    inputs = dataclasses.replace(inputs, beside=(beside.weight, beside.scales))
    key_rows = rows * (shapes[1][0] // form.key_dim)
    state = (
        jax.ShapeDtypeStruct((rows, shapes[0][0]), jnp.float16),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((key_rows, *leaf.shape), leaf.dtype), form.key_row),
    )
    queries, key_queries = launch_few(layout, inputs, state, simulate=simulate)
    of_rows = jax.tree.map(lambda leaf, row: leaf.reshape(rows, -1, *row.shape), key_queries, form.key_row)
    return queries.reshape(rows, -1, HEAD_DIM), of_rows
