"""Gather rows of the paged pool as dense rows, decoding them in the same pass.

    gather_rows           out[n] = decode(rows[layer, page[n], row[n]])
    gather_request_rows   out[n] = decode of a request's n-th entry, found through its row of the block table

Each row is processed by one warp. Rows that do not exist (negative page, or entry past the end) are zero.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats import KV_FORMATS, KVRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.values import Condition, Value, select

_WARPS = WARPGROUP // WARP


def gather_rows(
    rows: KVRows[jax.Array],
    layer: jax.Array,
    blocks: jax.Array,
    row: jax.Array,
    *,
    kv_format: str,
    dtype: DTypeLike = jnp.bfloat16,
    simulate: bool = False,
) -> jax.Array:
    """Gather any rows of one layer.

    Args:
      rows: pytree ``nope rope scale``, leaves [layers, num_pages, entries_per_page, ...].
      layer: int32 [1].
      blocks, row: int32 [N], the page of each row and its place in the page; page -1 = none.
      kv_format: of the stored rows, from ``formats.KV_FORMATS``.
      dtype: of the result, bf16 or f32.
      simulate: run in NumPy on the host, with checks, on any device.

    Returns:
      dtype [N, head_dim].
    """
    chex.assert_equal_shape([blocks, row])
    chex.assert_rank(blocks, 1)
    chex.assert_type([layer, blocks, row], jnp.int32)

    places = _Places(rows=rows, layer=layer, pages=blocks, row=row)
    return _gather(places, blocks.shape[0], kv_format, dtype, simulate)


def gather_request_rows(
    rows: KVRows[jax.Array],
    layer: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    *,
    kv_format: str,
    dtype: DTypeLike = jnp.bfloat16,
    simulate: bool = False,
) -> jax.Array:
    """Gather all entries of requests.

    Args:
      rows, layer, kv_format, dtype, simulate: as for ``gather_rows``.
      block_table: int32 [requests, max_blocks].
      slots, num_entries: int32 [B].

    Returns:
      dtype [B, max_blocks * entries_per_page, head_dim], zero past num_entries.
    """
    chex.assert_equal_shape([slots, num_entries])
    chex.assert_type([layer, block_table, slots, num_entries], jnp.int32)
    requests = _Requests(rows=rows, layer=layer, block_table=block_table, slots=slots, num_entries=num_entries)
    count, capacity = slots.shape[0], requests.capacity
    out = _gather(requests, count * capacity, kv_format, dtype, simulate)
    return out.reshape(count, capacity, out.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Places[Array: Shaped]:
    """Rows of a layer, given by page and place in the page."""

    pages: Array  # int32 [N]
    layer: Array  # int32 [1]
    row: Array  # int32 [N]
    rows: KVRows[Array]  # [layers, num_pages, entries_per_page, ...]

    def locate(self: _Places[Buffer], n: Value, inside: Condition) -> tuple[Value, Value]:
        """Return the page of the n-th result (-1 = none) and the row in the page."""
        return self.pages.load_int(n, where=inside), self.row.load_int(n, where=inside)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Requests[Array: Shaped]:
    """All entries of requests, given by request and number of the entry."""

    block_table: Array  # int32 [requests, max_blocks]
    layer: Array  # int32 [1]
    num_entries: Array  # int32 [B]
    rows: KVRows[Array]  # [layers, num_pages, entries_per_page, ...]
    slots: Array  # int32 [B]

    @property
    def capacity(self) -> int:
        """Number of entries that a request has pages for."""
        return self.block_table.shape[1] * self.rows.nope.shape[2]

    def locate(self: _Requests[Buffer], n: Value, inside: Condition) -> tuple[Value, Value]:
        """Return the page of the n-th result (-1 = none) and the row in the page."""
        b, entry = n // self.capacity, n % self.capacity
        slot = self.slots.load_int(b, where=inside)
        held = self.num_entries.load_int(b, where=inside)
        there = inside & (slot >= 0) & (slot < self.block_table.shape[0]) & (entry < held)
        per_page = self.rows.nope.shape[2]
        page = self.block_table.load_int(slot, entry // per_page, where=there)
        return select(there, page, -1), entry % per_page


def _gather(
    inputs: _Places[jax.Array] | _Requests[jax.Array], count: int, kv_format: str, dtype: DTypeLike, simulate: bool
) -> jax.Array:
    """Gather the rows that ``inputs.locate`` finds: dtype [count, head_dim]."""
    stored, form = inputs.rows.nope, KV_FORMATS[kv_format]
    head_dim = stored.shape[-1] + inputs.rows.rope.shape[-1]

    def body(machine: Machine, inputs: _Places[Buffer] | _Requests[Buffer], out: Buffer) -> None:
        n = machine.block(0) * _WARPS + machine.thread // WARP
        inside = n < count
        page, at = inputs.locate(n, inside)
        there = inside & (page >= 0) & (page < stored.shape[1]) & (at >= 0) & (at < stored.shape[2])
        row = Row(Team(machine, WARP), head_dim)
        values = form.load(row, inputs.rows, inputs.layer.load_int(0), page, at, where=there)
        row.store(out, values, n, where=inside)

    out = jax.ShapeDtypeStruct((count, head_dim), dtype)
    grid = (-(-count // _WARPS),)
    return launch(body, name="gather_rows", grid=grid, inputs=inputs, state=out, simulate=simulate)
