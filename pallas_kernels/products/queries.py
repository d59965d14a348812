"""Products of many rows whose outputs are heads, and become queries of attention or of the indexer.

They do in one launch, after the rounding of x, what ``product`` and ``attention_queries`` or ``indexer_queries`` do in
two, and do not write the product to device memory.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language import target
from pallas_kernels.products import keys
from pallas_kernels.products.block import WeightForm
from pallas_kernels.products.call import checked, launch_many, unsupported_many, unsupported_product
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.keys import KeyHeads
from pallas_kernels.products.split import ROWS
from pallas_kernels.products.tiling import tiling_of_heads, tiling_of_key_heads

HEAD_DIM = 512  # outputs of a head of attention: two tiles


def unsupported_product_of_queries(
    shape: tuple[int, ...], form: WeightForm, rows: int, head_dim: int, rope_dim: int
) -> str | None:
    """Return why no kernel makes queries of so many rows in their product, or None if one does.

    Their product and their conversion (``attention_queries``) are then two launches.
    """
    if (reason := _unsupported(shape, form, rows)) is not None:
        return reason
    if head_dim != HEAD_DIM or shape[0] % HEAD_DIM:
        return f"outputs must be heads of {HEAD_DIM}, got {shape[0]} outputs and heads of {head_dim}"
    if rope_dim % 16 or not 0 < rope_dim <= HEAD_DIM // 2:
        return f"rope_dim must be a multiple of 16 up to {HEAD_DIM // 2}, got {rope_dim}"
    return None


def product_of_queries(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    form: WeightForm,
    angles: jax.Array,
    *,
    eps: float,
    simulate: bool = False,
) -> jax.Array:
    """Multiply rows of x by a weight whose outputs are heads, and convert them as ``attention_queries`` does.

    Args:
      x, weight, scales, form: as for ``product``.
      angles: f32 [M, rope_dim], cosines and then sines of the angles by which the last channels of each head are
        rotated.
      eps: of the norm.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      f16 [M, heads, 512].

    Raises:
      ValueError: no kernel serves this (``unsupported_product_of_queries``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = checked(x, weight, scales, form)
    chex.assert_shape(angles, (len(x), None))
    chex.assert_type(angles, jnp.float32)
    reason = unsupported_product_of_queries(weight.shape, form, len(x), HEAD_DIM, angles.shape[1])
    if reason is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    heads = Heads(dim=HEAD_DIM, eps=eps)
    tiling = tiling_of_heads(len(x), *weight.shape, form, heads, target.gpu_or_first())
    queries = launch_many(tiling, inputs, jnp.float16, angles, simulate=simulate)
    return queries.reshape(len(x), -1, HEAD_DIM)


def unsupported_product_of_indexer_queries(
    shape: tuple[int, ...], form: WeightForm, rows: int, key_dim: int, rope_dim: int, key_format: str
) -> str | None:
    """Return why no kernel makes the indexer's queries of so many rows in their product, or None if one does.

    Their product and their conversion (``indexer_queries``) are then two launches.
    """
    if (reason := _unsupported(shape, form, rows)) is not None:
        return reason
    if key_dim != keys.DIM:
        return f"outputs must be heads of {keys.DIM}, got {key_dim}"
    if rope_dim % 16 or not 0 < rope_dim <= keys.DIM:
        return f"rope_dim must be a multiple of 16 up to {keys.DIM}, got {rope_dim}"
    if not isinstance(KEY_FORMATS.get(key_format), Fp4Keys):
        return f"key_format must be a 4-bit format, got {key_format!r}"
    return None


def product_of_indexer_queries(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    form: WeightForm,
    angles: jax.Array,
    key_row: Any,
    *,
    key_format: str,
    simulate: bool = False,
) -> Any:
    """Multiply rows of x by a weight whose outputs are heads, and convert them as ``indexer_queries`` does.

    Args:
      x, weight, scales, form: as for ``product``.
      angles: f32 [M, rope_dim], cosines and then sines of the angles by which the last channels of each head are
        rotated.
      key_row: pytree ``codes scale`` of ``jax.ShapeDtypeStruct``, one encoded row.
      key_format: a 4-bit format.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      A pytree like key_row, with leaves [M, heads, ...].

    Raises:
      ValueError: no kernel serves this (``unsupported_product_of_indexer_queries``).
      AssertionError: (chex) a shape or dtype is wrong.
    """
    inputs = checked(x, weight, scales, form)
    chex.assert_shape(angles, (len(x), None))
    chex.assert_type(angles, jnp.float32)
    reason = unsupported_product_of_indexer_queries(
        weight.shape, form, len(x), 2 * key_row.codes.shape[0], angles.shape[1], key_format
    )
    if reason is not None:
        raise ValueError(f"no kernel serves this product: {reason}")
    of_format = KEY_FORMATS[key_format]
    assert isinstance(of_format, Fp4Keys)
    tiling = tiling_of_key_heads(len(x), *weight.shape, form, KeyHeads(keys=of_format), target.gpu_or_first())
    rows = launch_many(tiling, inputs, None, angles, key_row, simulate=simulate)
    return jax.tree.map(lambda leaf, row: leaf.reshape(len(x), -1, *row.shape), rows, key_row)


def _unsupported(shape: tuple[int, ...], form: WeightForm, rows: int) -> str | None:
    """Return why no kernel makes queries of any kind in such a product, or None."""
    if (reason := unsupported_product(shape, form, rows)) is not None:
        return reason
    if rows <= ROWS:
        return f"queries are made in products of more than {ROWS} rows, got {rows}"
    if (reason := unsupported_many(shape, form)) is not None:
        return f"products of more than {ROWS} rows have no kernel where {reason}"
    if form.activations != "fp8" or form.groups != 1:
        return "queries are made in products of one group, with activations='fp8'"
    return None
