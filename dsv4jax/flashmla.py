"""Conversion of ``fp8_tile64`` rows to and from FlashMLA's pages, the byte order that vLLM and SGLang use too.

    a page of bs rows, NoPE 448, RoPE 64, tile 64
      0          row 0         448 B E4M3 NoPE | 128 B bf16 RoPE, little-endian
      576        row 1
      ...
      576 * bs   scales of row 0    7 B UE8M0, one per tile | 1 B of padding
      +8         scales of row 1
      ...
      584 * bs   zeros up to the next multiple of 576

The cache keeps these three parts in separate arrays, because rows of 584 bytes are not 16-byte aligned. Conversion in
either direction only moves bytes. Nothing is rounded, and a NaN keeps its bits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import check_array
from dsv4jax.formats import KVRows

__all__ = ["from_flashmla_pages", "to_flashmla_pages"]

NOPE_DIM, ROPE_DIM, TILES = 448, 64, 7
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576 per row
SCALE_BYTES = TILES + 1  # 8 per row, of which the last is padding


def page_bytes(rows_per_page: int) -> int:
    """Return the bytes of a page: 584 per row, rounded up to a multiple of 576.

    Raises:
      ValueError: there is less than one row.
    """
    if rows_per_page < 1:
        raise ValueError(f"rows_per_page must be at least 1, got {rows_per_page}")
    return -(-rows_per_page * (DATA_BYTES + SCALE_BYTES) // DATA_BYTES) * DATA_BYTES


@jax.jit
def to_flashmla_pages(rows: KVRows) -> jax.Array:
    """Convert rows to FlashMLA pages. Padding bytes are 0.

    Args:
      rows: ``fp8_tile64`` rows of one layer's blocks: nope u8 [P, bs, 448], rope bf16 [P, bs, 64], scale u8 [P, bs, 7].

    Returns:
      Pages, u8 [P, page_bytes(bs)].

    Raises:
      AssertionError: (chex) the rank, shape or dtype of a part is not that of ``fp8_tile64`` rows.
    """
    check_array("rows.nope", rows.nope, {"P": None, "bs": None, "nope_dim": NOPE_DIM}, jnp.uint8)
    pages, count, _ = rows.nope.shape
    check_array("rows.rope", rows.rope, {"P": pages, "bs": count, "rope_dim": ROPE_DIM}, jnp.bfloat16)
    check_array("rows.scale", rows.scale, {"P": pages, "bs": count, "tiles": TILES}, jnp.uint8)
    assert rows.scale is not None
    rope = lax.bitcast_convert_type(rows.rope, jnp.uint8).reshape(pages, count, 2 * ROPE_DIM)
    data = jnp.concatenate([rows.nope, rope], axis=-1).reshape(pages, -1)
    scales = jnp.pad(rows.scale, ((0, 0), (0, 0), (0, SCALE_BYTES - TILES))).reshape(pages, -1)
    padding = page_bytes(count) - count * (DATA_BYTES + SCALE_BYTES)
    return jnp.pad(jnp.concatenate([data, scales], axis=-1), ((0, 0), (0, padding)))


@functools.partial(jax.jit, static_argnames="rows_per_page")
def from_flashmla_pages(pages: jax.Array, rows_per_page: int) -> KVRows:
    """Convert FlashMLA pages to rows. Padding bytes are ignored. Inverse of ``to_flashmla_pages``.

    Args:
      pages: u8 [P, page_bytes(rows_per_page)].
      rows_per_page: rows in each page; a static int.

    Returns:
      ``fp8_tile64`` rows with nope u8 [P, bs, 448], rope bf16 [P, bs, 64] and scale u8 [P, bs, 7].

    Raises:
      AssertionError: (chex) the pages have a wrong rank, size or dtype.
      ValueError: ``rows_per_page`` is below one.
    """
    check_array("pages", pages, {"P": None, "page_bytes": page_bytes(rows_per_page)}, jnp.uint8)
    count, end = pages.shape[0], rows_per_page * DATA_BYTES
    data = pages[:, :end].reshape(count, rows_per_page, DATA_BYTES)
    scales = pages[:, end : end + rows_per_page * SCALE_BYTES].reshape(count, rows_per_page, SCALE_BYTES)
    rope = data[..., NOPE_DIM:].reshape(count, rows_per_page, ROPE_DIM, 2)
    return KVRows(
        nope=data[..., :NOPE_DIM],
        rope=lax.bitcast_convert_type(rope, jnp.bfloat16),
        scale=scales[..., :TILES],
    )
