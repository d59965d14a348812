"""Stored rows of the pool as dense rows. A block decodes one row; rows that do not exist are 0."""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.rows import load_row


@triton.jit
def _decode(
    nope,
    rope,
    scale,
    at,
    there,
    out,
    n,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    kv_format: tl.constexpr,
):
    """Decode the row at ``at``, or 0 where it is not there, into row n of ``out``."""
    y = load_row(nope, rope, scale, at, there, nope_dim, rope_dim, size, kv_format)
    channel, dim = tl.arange(0, size), nope_dim + rope_dim
    tl.store(out + n * dim + channel, y.to(out.dtype.element_ty), mask=channel < dim)


@triton.jit
def gather_rows_kernel(
    nope,  # [layers, num_blocks, per_block, nope_dim]
    rope,
    scale,
    layer,  # i32 [1]
    blocks,  # i32 [N], -1 = none
    rows,  # i32 [N]
    out,  # [N, nope_dim + rope_dim]
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    kv_format: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    block, row = tl.load(blocks + n), tl.load(rows + n)
    there = (block >= 0) & (block < num_blocks) & (row >= 0) & (row < per_block)
    at = (tl.load(layer).to(tl.int64) * num_blocks + block) * per_block + row
    _decode(nope, rope, scale, at, there, out, n, nope_dim, rope_dim, size, kv_format)


@triton.jit
def gather_request_rows_kernel(
    nope,  # [layers, num_blocks, per_block, nope_dim]
    rope,
    scale,
    layer,  # i32 [1]
    block_table,  # i32 [requests, max_blocks]
    slots,  # i32 [B]
    num_entries,  # i32 [B]
    out,  # [B, max_blocks * per_block, nope_dim + rope_dim]
    requests: tl.constexpr,
    max_blocks: tl.constexpr,
    num_blocks: tl.constexpr,
    per_block: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    size: tl.constexpr,
    kv_format: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    batch, entry = n // (max_blocks * per_block), n % (max_blocks * per_block)
    slot = tl.load(slots + batch)
    there = (slot >= 0) & (slot < requests) & (entry < tl.load(num_entries + batch))
    block = tl.load(block_table + slot * max_blocks + entry // per_block, mask=there, other=-1)
    there = there & (block >= 0) & (block < num_blocks)
    at = (tl.load(layer).to(tl.int64) * num_blocks + block) * per_block + entry % per_block
    _decode(nope, rope, scale, at, there, out, n, nope_dim, rope_dim, size, kv_format)


def _sizes(rows: Any, kv_format: str) -> dict[str, Any]:
    _, num_blocks, per_block, nope_dim = rows.nope.shape
    rope_dim = rows.rope.shape[-1]
    size = triton.next_power_of_2(nope_dim + rope_dim)
    sizes = dict(num_blocks=num_blocks, per_block=per_block, nope_dim=nope_dim, rope_dim=rope_dim)
    return sizes | dict(size=size, kv_format=kv_format)


def gather_rows(
    rows: Any, layer: jax.Array, blocks: jax.Array, row: jax.Array, *, kv_format: str, dtype: Any = jnp.bfloat16
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
    out = jax.ShapeDtypeStruct((blocks.shape[0], rows.nope.shape[-1] + rows.rope.shape[-1]), dtype)
    if not out.size:
        return jnp.zeros(out.shape, dtype)
    config = Config(grid=(blocks.shape[0],), constants=_sizes(rows, kv_format), warps=2)
    scale = layer if rows.scale is None else rows.scale
    return launch(gather_rows_kernel, config, [rows.nope, rows.rope, scale, layer, blocks, row], [out])[0]


def gather_request_rows(
    rows: Any,
    layer: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    *,
    kv_format: str,
    dtype: Any = jnp.bfloat16,
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
    (requests, max_blocks), batch = block_table.shape, slots.shape[0]
    capacity = max_blocks * rows.nope.shape[2]
    out = jax.ShapeDtypeStruct((batch, capacity, rows.nope.shape[-1] + rows.rope.shape[-1]), dtype)
    if not out.size:
        return jnp.zeros(out.shape, dtype)
    constants = _sizes(rows, kv_format) | dict(requests=requests, max_blocks=max_blocks)
    config = Config(grid=(batch * capacity,), constants=constants, warps=2)
    scale = layer if rows.scale is None else rows.scale
    given = [rows.nope, rows.rope, scale, layer, block_table, slots, num_entries]
    return launch(gather_request_rows_kernel, config, given, [out])[0]
