"""Dividing a cache anew over another number of shards, on the host, when it is restored."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.sharding import shardings
from dsv4jax.cache.shards import DATA, automatic
from dsv4jax.cache.stack import LayerStack
from dsv4jax.kinds import AttentionType


def over_mesh(cache: KVCache, mesh: Mesh) -> KVCache:
    """Lay a cache of NumPy arrays over a mesh; each process makes the parts of its own devices.

    Raises:
      ValueError: the axes are others than "data" and "model", requests or blocks do not divide, or as ``divided``.
    """
    mesh = automatic(mesh)
    places = shardings(cache.plan, mesh)
    cache = dataclasses.replace(divided(cache, mesh.shape[DATA]), mesh=None)

    def place(leaf: np.ndarray, sharding: jax.sharding.NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return dataclasses.replace(jax.tree.map(place, cache, places), mesh=mesh)


def divided(cache: KVCache, shards: int) -> KVCache:
    """Return a cache of NumPy arrays with another number of shards, whose requests keep their order, rows and grants.

    Slots are counted through all shards: number ``slot`` of a shard of ``n`` is ``shard * n + slot``, before and after.
    A block that requests of several new shards share is copied to each.

    Raises:
      ValueError: requests of a shard hold more blocks than its share.
    """
    plan, before = cache.plan, cache.tables.num_free.size
    if before == shards:
        return cache
    first = np.repeat(np.arange(before) * (plan.num_blocks // before), plan.max_requests // before)
    held = cache.tables.block_table
    # Blocks, too, are counted through all shards; -1 is none.
    tables, source = _divided_blocks(np.where(held >= 0, held + first[:, None], -1), plan.num_blocks, shards)

    def moved(_: AttentionType, stack: LayerStack) -> LayerStack:
        return dataclasses.replace(stack, pool=jax.tree.map(lambda leaf: leaf[:, source], stack.pool))

    return dataclasses.replace(cache.map_stacks(moved), tables=dataclasses.replace(cache.tables, **tables))


def _divided_blocks(held: np.ndarray, num_blocks: int, shards: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Give each shard the blocks that its requests hold.

    Args:
      held: int32 [requests, max_blocks], by their number among all; -1 = none.
      num_blocks: of all shards.
      shards: number of them.

    Returns:
      (fields of tables, the old number of each block int [num_blocks]; that of a free one means nothing).
    """
    requests, share = held.shape[0] // shards, num_blocks // shards
    table, refs = np.full_like(held, -1), np.zeros(num_blocks, np.int32)
    free, num_free = np.zeros(num_blocks, np.int32), np.zeros(shards, np.int32)
    source = np.arange(num_blocks)
    for shard in range(shards):
        rows, blocks = (slice(shard * size, (shard + 1) * size) for size in (requests, share))
        own = np.unique(held[rows][held[rows] >= 0])
        if own.size > share:
            raise ValueError(
                f"of {shards} shards, number {shard} would hold {own.size} blocks, and its share is {share}: "
                f"restore the cache over fewer shards, or save snapshots of its requests"
            )
        table[rows] = np.where(held[rows] >= 0, np.searchsorted(own, held[rows]), -1)
        refs[blocks] = np.bincount(table[rows][held[rows] >= 0], minlength=share)
        free[blocks] = np.roll(np.arange(share), -own.size)  # a stack whose first ones are free
        num_free[shard] = share - own.size
        source[blocks][: own.size] = own
    return {"block_table": table, "block_refs": refs, "free_blocks": free, "num_free": num_free}, source
