"""Stored rows of the paged pool as dense rows: gather and dequantise in one pass.

    gather_rows           out[n] = decode(rows[layer, block[n], row[n]])
    gather_request_rows   out[n] = decode of a request's n-th entry, through its row of the block table

One warp per row. What is not there (a negative block, an entry past the end) is zero.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Machine, Value, select
from pallas_kernels.rows import load_kv

_WARPS = WARPGROUP // WARP


def gather_rows(
    rows: Any,
    layer: jax.Array,
    blocks: jax.Array,
    row: jax.Array,
    *,
    kv_format: str,
    dtype: Any = jnp.bfloat16,
    simulate: bool = False,
) -> jax.Array:
    """Any rows of one layer.

    Args:
      rows: pytree ``nope rope scale``, leaves [layers, num_blocks, entries_per_block, ...].
      layer: int32 [1].
      blocks, row: int32 [N]; block -1 = none.
      dtype: of the result, bf16 or f32.

    Returns:
      dtype [N, head_dim].
    """
    chex.assert_equal_shape([blocks, row])
    chex.assert_rank(blocks, 1)
    chex.assert_type([layer, blocks, row], jnp.int32)

    def locate(machine: Machine, inputs: Any, n: Value, inside: Condition) -> tuple[Value, Value]:
        return inputs["blocks"].load_int(n, where=inside), inputs["row"].load_int(n, where=inside)

    inputs = {"rows": rows, "layer": layer, "blocks": blocks, "row": row}
    return _gather(locate, inputs, blocks.shape[0], kv_format, dtype, simulate)


def gather_request_rows(
    rows: Any,
    layer: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    *,
    kv_format: str,
    dtype: Any = jnp.bfloat16,
    simulate: bool = False,
) -> jax.Array:
    """All entries of requests.

    Args:
      rows, layer, dtype: as of ``gather_rows``.
      block_table: int32 [requests, max_blocks].
      slots, num_entries: int32 [B].

    Returns:
      dtype [B, max_blocks * entries_per_block, head_dim], zero past num_entries.
    """
    chex.assert_equal_shape([slots, num_entries])
    chex.assert_type([layer, block_table, slots, num_entries], jnp.int32)
    (requests, max_blocks), (batch,) = block_table.shape, slots.shape
    per_block = rows.nope.shape[2]
    capacity = max_blocks * per_block

    def locate(machine: Machine, inputs: Any, n: Value, inside: Condition) -> tuple[Value, Value]:
        b, entry = n // capacity, n % capacity
        slot = inputs["slots"].load_int(b, where=inside)
        held = inputs["num_entries"].load_int(b, where=inside)
        there = inside & (slot >= 0) & (slot < requests) & (entry < held)
        block = inputs["block_table"].load_int(slot, entry // per_block, where=there)
        return select(there, block, -1), entry % per_block

    inputs = {
        "rows": rows,
        "layer": layer,
        "block_table": block_table,
        "slots": slots,
        "num_entries": num_entries,
    }
    out = _gather(locate, inputs, batch * capacity, kv_format, dtype, simulate)
    return out.reshape(batch, capacity, out.shape[-1])


def _gather(locate: Any, inputs: dict[str, Any], count: int, kv_format: str, dtype: Any, simulate: bool) -> jax.Array:
    stored = inputs["rows"].nope
    head_dim = stored.shape[-1] + inputs["rows"].rope.shape[-1]

    def body(machine: Machine, inputs: Any, out: Any) -> None:
        n = machine.block(0) * _WARPS + machine.thread // WARP
        inside = n < count
        block, at = locate(machine, inputs, n, inside)
        there = inside & (block >= 0) & (block < stored.shape[1]) & (at >= 0) & (at < stored.shape[2])
        row = Row(Team(machine, WARP), head_dim)
        values = load_kv(row, inputs["rows"], inputs["layer"].load_int(0), block, at, kv_format=kv_format, where=there)
        row.store(out, values, n, where=inside)

    out = jax.ShapeDtypeStruct((count, head_dim), dtype)
    grid = (-(-count // _WARPS),)
    return launch(body, name="gather_rows", grid=grid, inputs=inputs, state=out, simulate=simulate)
