"""Stored rows of the pool as dense rows. A block decodes one row; rows that do not exist are 0."""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from pallas_kernels.formats import KVRows
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.operands import Formats, Paging, Rows
from pallas_kernels.triton_gpu.rows import load_row


@triton.jit
def _decode(rows: Rows, number, there, out, n, formats: tl.constexpr):
    """Decode row ``number``, or 0 where it is not there, into row n of ``out``."""
    y = load_row(rows, number, there, formats)
    channel = tl.arange(0, formats.size)
    tl.store(out + n * formats.dim + channel, y.to(out.dtype.element_ty), mask=channel < formats.dim)


@triton.jit
def gather_rows_kernel(
    rows: Rows,  # [layers, num_blocks, per_block, ...]
    layer,  # i32 [1]
    blocks,  # i32 [N], -1 = none
    places,  # i32 [N]
    out,  # [N, dim]
    formats: tl.constexpr,
    paging: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    block, place = tl.load(blocks + n), tl.load(places + n)
    there = (block >= 0) & (block < paging.num_blocks) & (place >= 0) & (place < paging.per_block)
    number = (tl.load(layer).to(tl.int64) * paging.num_blocks + block) * paging.per_block + place
    _decode(rows, number, there, out, n, formats)


@triton.jit
def gather_request_rows_kernel(
    rows: Rows,  # [layers, num_blocks, per_block, ...]
    layer,  # i32 [1]
    block_table,  # i32 [requests, max_blocks]
    slots,  # i32 [B]
    num_entries,  # i32 [B]
    out,  # [B, max_blocks * per_block, dim]
    formats: tl.constexpr,
    paging: tl.constexpr,
):
    per_block: tl.constexpr = paging.per_block
    most: tl.constexpr = paging.max_blocks * per_block
    n = tl.program_id(0).to(tl.int64)
    batch, entry = n // most, n % most
    slot = tl.load(slots + batch)
    there = (slot >= 0) & (slot < paging.requests) & (entry < tl.load(num_entries + batch))
    block = tl.load(block_table + slot * paging.max_blocks + entry // per_block, mask=there, other=-1)
    there = there & (block >= 0) & (block < paging.num_blocks)
    number = (tl.load(layer).to(tl.int64) * paging.num_blocks + block) * per_block + entry % per_block
    _decode(rows, number, there, out, n, formats)


def _formats(rows: KVRows[jax.Array], kv_format: str) -> Formats:
    return Formats(nope_dim=rows.nope.shape[-1], rope_dim=rows.rope.shape[-1], kv_format=kv_format)


def gather_rows(
    rows: KVRows[jax.Array],
    layer: jax.Array,
    blocks: jax.Array,
    row: jax.Array,
    *,
    kv_format: str,
    dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Gather any rows of one layer.

    Args:
      rows: pytree ``nope rope scale``, leaves [layers, num_blocks, entries_per_block, ...].
      layer: int32 [1].
      blocks, row: int32 [N], the block of each row and its place in the block; block -1 = none.
      kv_format: of the stored rows.
      dtype: of the result, bf16 or f32.

    Returns:
      dtype [N, head_dim].
    """
    chex.assert_equal_shape([blocks, row])
    chex.assert_rank(blocks, 1)
    chex.assert_type([layer, blocks, row], jnp.int32)
    formats, paging = _formats(rows, kv_format), Paging.of(rows.nope, None)
    out = jax.ShapeDtypeStruct((blocks.shape[0], formats.dim), dtype)
    if not out.size:
        return jnp.zeros(out.shape, dtype)
    config = Config(grid=(blocks.shape[0],), constants=dict(formats=formats, paging=paging), warps=2)
    return launch(gather_rows_kernel, config, [Rows.of(rows), layer, blocks, row], [out])[0]


def gather_request_rows(
    rows: KVRows[jax.Array],
    layer: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    *,
    kv_format: str,
    dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Gather all entries of requests.

    Args:
      rows, layer, kv_format, dtype: as for ``gather_rows``.
      block_table: int32 [requests, max_blocks].
      slots, num_entries: int32 [B].

    Returns:
      dtype [B, max_blocks * entries_per_block, head_dim], zero past num_entries.
    """
    chex.assert_equal_shape([slots, num_entries])
    chex.assert_type([layer, block_table, slots, num_entries], jnp.int32)
    formats, paging = _formats(rows, kv_format), Paging.of(rows.nope, block_table)
    batch, capacity = slots.shape[0], paging.max_blocks * paging.per_block
    out = jax.ShapeDtypeStruct((batch, capacity, formats.dim), dtype)
    if not out.size:
        return jnp.zeros(out.shape, dtype)
    config = Config(grid=(batch * capacity,), constants=dict(formats=formats, paging=paging), warps=2)
    given = [Rows.of(rows), layer, block_table, slots, num_entries]
    return launch(gather_request_rows_kernel, config, given, [out])[0]
