"""Gathers of stored entries into dense rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.checks import FLOATS, check_array, check_batch, check_dtype
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.ops import GATHER_ROWS
from dsv4jax.plan import CachePlan

_ANY_KIND = AttentionType.SWA  # entries of all kinds have the same row format


def gather_compressed(
    pool: PagedPool,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    picks: jax.Array,
    *,
    plan: CachePlan,
    dtype: DTypeLike = jnp.float32,
    backend: Backend = None,
) -> jax.Array:
    """Gather chosen entries as dense rows, which serve as both K and V.

    Args:
      pool: the entries of all layers of a kind.
      index: the layer's index in its stack, an int or int32 [].
      block_table: int32 [requests, max_blocks], -1 = none.
      slots: int32 [B], -1 = none.
      picks: int32 [B, ...], entry numbers, -1 = none.
      plan: the cache's plan.
      dtype: of the result, f32 or bf16.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      dtype [B, ..., head_dim], zero where there is no entry.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the backend is unknown, or cannot serve this plan.
    """
    check_batch(slots=slots)
    check_array("block_table", block_table, {"requests": None, "max_blocks": None}, jnp.int32)
    layer = PooledLayer(pool=pool, index=index, block_table=block_table, slots=slots, plan=plan)
    return picked_rows(layer, picks, dtype, backend)


def picked_rows(layer: PooledLayer, picks: jax.Array, dtype: DTypeLike, backend: Backend) -> jax.Array:
    """``gather_compressed`` of a layer as a batch sees it."""
    axes: dict[str, int | None] = {f"axis {i}": None for i in range(1, getattr(picks, "ndim", 1))}
    check_array("picks", picks, {"B": layer.slots.shape[0]} | axes, jnp.int32)
    check_dtype("dtype", dtype, FLOATS)
    return GATHER_ROWS.of(backend, layer.plan, _ANY_KIND).picked(layer, picks, dtype)


def gather_all_compressed(
    pool: PagedPool,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    *,
    plan: CachePlan,
    dtype: DTypeLike = jnp.float32,
    backend: Backend = None,
) -> jax.Array:
    """Gather the first num_entries[b] entries of each request as dense rows, which serve as both K and V.

    Args:
      num_entries: int32 [B], number of entries to gather for each request.
      pool, index, block_table, slots, plan, dtype, backend: as for ``gather_compressed``.

    Returns:
      dtype [B, max_blocks * entries_per_block, head_dim], zero past num_entries.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the backend is unknown, or cannot serve this plan.
    """
    layer = PooledLayer(pool=pool, index=index, block_table=block_table, slots=slots, plan=plan)
    return complete_rows(layer, num_entries, dtype, backend)


def complete_rows(layer: PooledLayer, num_entries: jax.Array, dtype: DTypeLike, backend: Backend) -> jax.Array:
    """``gather_all_compressed`` of a layer as a batch sees it."""
    check_batch(slots=layer.slots, num_entries=num_entries)
    check_dtype("dtype", dtype, FLOATS)
    return GATHER_ROWS.of(backend, layer.plan, _ANY_KIND).complete(layer, num_entries, dtype)


class XLAGatherRows(Anywhere):
    """Both gathers in plain JAX."""

    def picked(self, layer: PooledLayer, picks: jax.Array, dtype: DTypeLike) -> jax.Array:
        return layer.rows(picks).astype(dtype)

    def complete(self, layer: PooledLayer, num_entries: jax.Array, dtype: DTypeLike) -> jax.Array:
        entry = jnp.arange(layer.max_entries, dtype=jnp.int32)[None]
        return self.picked(layer, jnp.where(entry < num_entries[:, None], entry, -1), dtype)


GATHER_ROWS.register(XLA, XLAGatherRows())
