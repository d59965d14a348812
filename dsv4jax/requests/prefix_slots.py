"""What a store of prefixes reads of a cache's tables, and the forks and releases that it makes.

The host checks first what it asks for here, so that none of it can be refused. Slots and blocks are numbers among those
of all shards of the cache. A fork stays within a shard.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, release
from dsv4jax.cache.shards import is_spread, on_shards
from dsv4jax.cache.tables import Tables, admit_slots
from dsv4jax.checks import Tree
from dsv4jax.requests.fork import fork


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the host reads of the tables before it decides."""

    lengths: jax.Array  # int32 [n] tokens in the prefixes' slots; -1 = not admitted
    is_used: Tree  # bool [n] whether another request than the slot's reads the prefix's last block
    shares: jax.Array  # bool [n] whether the slot's request does
    is_admitted: jax.Array  # bool [] of the slot
    length: jax.Array  # int32 []
    prepared: jax.Array  # int32 []
    held: jax.Array  # int32 [] blocks
    free_slots: jax.Array  # int32 [shards]
    free_blocks: jax.Array  # int32 [shards]


@jax.jit
def look(tables: Tables, slots: jax.Array, last: jax.Array, slot: jax.Array) -> Seen:
    """Return what the host must know of the prefixes' slots, and of one slot.

    Args:
      tables: of the cache.
      slots: int32 [n], of the prefixes; -1 = none.
      last: int32 [n], number of the last block of each in its request's row of the block table.
      slot: int32 [], which does not count among those that use a prefix; -1 = none.
    """
    shards, requests = tables.num_free.size, tables.admitted.size
    request, each = jnp.arange(requests, dtype=jnp.int32), requests // shards
    nowhere = jnp.where(slots >= 0, slots, requests)
    kept = jnp.zeros(requests, jnp.bool).at[nowhere].set(True, mode="drop")
    own = jnp.where(slots >= 0, tables.block_table.at[slots, last].get(mode="clip"), -1)
    reads = (tables.block_table[:, last] == own[None]) & (own >= 0)[None] & (tables.admitted & ~kept)[:, None]
    reads &= (request // each)[:, None] == (slots // each)[None]  # in the table, blocks are numbers within a shard
    is_slot = request == slot
    lengths = jnp.where(tables.admitted, tables.seq_lens, -1)
    return Seen(
        lengths=lengths.at[slots].get(mode="clip"),
        is_used=jnp.any(reads & ~is_slot[:, None], axis=0),
        shares=reads[slot],
        is_admitted=tables.admitted[slot],
        length=tables.seq_lens[slot],
        prepared=tables.prepared[slot],
        held=tables.block_lens[slot],
        free_slots=jnp.sum(~tables.admitted.reshape(shards, each), axis=1, dtype=jnp.int32),
        free_blocks=tables.num_free,
    )


@jax.jit
def blocks_of(tables: Tables, slots: jax.Array) -> jax.Array:
    """The blocks of slots int32 [n], int32 [n, max_blocks]; -1 = none."""
    requests, blocks = (leaf.size // tables.num_free.size for leaf in (tables.admitted, tables.block_refs))
    found = tables.block_table.at[slots].get(mode="clip")
    of_shard = slots // requests * blocks  # the first block of the slot's shard
    return jnp.where((slots[:, None] >= 0) & (found >= 0), found + of_shard[:, None], -1)


@functools.partial(jax.jit, donate_argnums=0)
def go_on[Cache](cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Fork a slot into another, int32 [] each. The cache is donated."""
    return _in_each(lambda one: fork(one, _rows(one, source[None]), _rows(one, target[None]))[0], cache)


@functools.partial(jax.jit, donate_argnums=0)
def exchange[Cache](cache: Cache, leaving: jax.Array, source: jax.Array) -> tuple[Cache, jax.Array]:
    """Release a slot, and fork ``source`` into a new one, which is returned: int32 [] each, -1 = none to release.

    The cache is donated.
    """
    found: list[jax.Array] = []

    def of_shard(one: KVCache, leaving: jax.Array, source: jax.Array) -> tuple[KVCache, jax.Array]:
        # Not ``admit``, which empties the slot: XLA would keep a copy of the cache for the fork to read.
        tables, slot, _ = admit_slots(release(one, leaving).tables, 1, source >= 0)
        return fork(dataclasses.replace(one, tables=tables), source, slot)[0], slot

    def exchanged(one: KVCache) -> KVCache:
        rows = _rows(one, leaving[None]), _rows(one, source[None])
        one, new = on_shards(of_shard, one, rows, 1) if is_spread(one) else of_shard(one, *rows)
        found.append(jnp.max(new) + source // _slots_of_shard(one) * _slots_of_shard(one))
        return one

    cache = _in_each(exchanged, cache)
    return cache, found[0]


@functools.partial(jax.jit, donate_argnums=0)
def released[Cache](cache: Cache, slots: jax.Array) -> Cache:
    """Release slots int32 [n]; -1 = none. The cache is donated."""
    return _in_each(lambda one: release(one, _rows(one, slots)), cache)


def _slots_of_shard(cache: KVCache) -> int:
    return cache.tables.admitted.size // cache.tables.num_free.size


def _rows(cache: KVCache, slots: jax.Array) -> jax.Array:
    """Return the batch that names slots int32 [n], of n rows for each shard, which has -1 for slots of the others."""
    shard = jnp.arange(cache.tables.num_free.size, dtype=jnp.int32)[:, None]
    is_own = slots[None] // _slots_of_shard(cache) == shard
    return jnp.where(is_own, slots[None] % _slots_of_shard(cache), -1).reshape(-1)


def _is_cache(tree: object) -> bool:
    return isinstance(tree, KVCache)


def _in_each(change: Tree, cache: Tree) -> Tree:
    """Change each cache of a pytree."""
    return jax.tree.map(change, cache, is_leaf=_is_cache)


def first_cache(cache: Tree) -> Tree:
    """Return the first cache of a pytree, whose blocks are those of all; what is none is returned as it is."""
    return next(iter(jax.tree.leaves(cache, is_leaf=_is_cache)), cache)
