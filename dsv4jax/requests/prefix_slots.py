"""What a store of prefixes reads of a cache's tables, and the forks and releases that it makes.

The host checks first what it asks for here, so that none of it can be refused.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, release
from dsv4jax.cache.tables import Tables, admit_slots
from dsv4jax.checks import Tree
from dsv4jax.requests.fork import fork


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the host reads of the tables before it decides."""

    lengths: jax.Array  # int32 [capacity] tokens in the prefixes' slots; -1 = not admitted
    is_used: Tree  # bool [capacity] whether another request than the slot's reads the prefix's last block
    shares: jax.Array  # bool [capacity] whether the slot's request does
    is_admitted: jax.Array  # bool [] of the slot
    length: jax.Array  # int32 []
    prepared: jax.Array  # int32 []
    held: jax.Array  # int32 [] blocks
    free_slots: jax.Array  # int32 []
    free_blocks: jax.Array  # int32 []


@jax.jit
def look(tables: Tables, slots: jax.Array, last: jax.Array, slot: jax.Array) -> Seen:
    """Return what the host must know of the prefixes' slots, and of one slot.

    Args:
      tables: of the cache.
      slots: int32 [capacity], of the prefixes; -1 = none.
      last: int32 [capacity], number of the last block of each in its request's row of the block table.
      slot: int32 [], which does not count among those that use a prefix; -1 = none.
    """
    requests = tables.admitted.size
    nowhere = jnp.where(slots >= 0, slots, requests)
    kept = jnp.zeros(requests, jnp.bool).at[nowhere].set(True, mode="drop")
    own = jnp.where(slots >= 0, tables.block_table.at[slots, last].get(mode="clip"), -1)
    reads = (tables.block_table[:, last] == own[None]) & (own >= 0)[None] & (tables.admitted & ~kept)[:, None]
    is_slot = jnp.arange(requests, dtype=jnp.int32) == slot
    lengths = jnp.where(tables.admitted, tables.seq_lens, -1)
    return Seen(
        lengths=lengths.at[slots].get(mode="clip"),
        is_used=jnp.any(reads & ~is_slot[:, None], axis=0),
        shares=reads[slot],
        is_admitted=tables.admitted[slot],
        length=tables.seq_lens[slot],
        prepared=tables.prepared[slot],
        held=tables.block_lens[slot],
        free_slots=jnp.sum(~tables.admitted, dtype=jnp.int32),
        free_blocks=tables.num_free[0],
    )


@jax.jit
def blocks_of(tables: Tables, slots: jax.Array) -> jax.Array:
    """The blocks of slots, int32 [n, max_blocks]; -1 = none."""
    return jnp.where(slots[:, None] >= 0, tables.block_table.at[slots].get(mode="clip"), -1)


@functools.partial(jax.jit, donate_argnums=0)
def go_on[Cache](cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Fork a slot int32 [] into others int32 [n]. The cache is donated."""
    return _in_each(lambda one: fork(one, source, target)[0], cache)


@functools.partial(jax.jit, donate_argnums=0)
def exchange[Cache](cache: Cache, leaving: jax.Array, source: jax.Array) -> tuple[Cache, jax.Array]:
    """Release slots int32 [n], and fork ``source`` int32 [] into a new one, which is returned. The cache is donated."""
    slots: list[jax.Array] = []

    def exchanged(one: KVCache) -> KVCache:
        # Not ``admit``, which empties the slot: XLA would keep a copy of the cache for the fork to read.
        tables, slot, _ = admit_slots(release(one, leaving).tables, 1)
        slots.append(slot[0])
        return fork(dataclasses.replace(one, tables=tables), source, slot)[0]

    cache = _in_each(exchanged, cache)
    return cache, slots[0]


@functools.partial(jax.jit, donate_argnums=0)
def released[Cache](cache: Cache, slots: jax.Array) -> Cache:
    """Release slots int32 [n]; -1 = none. The cache is donated."""
    return _in_each(lambda one: release(one, slots), cache)


def _is_cache(tree: object) -> bool:
    return isinstance(tree, KVCache)


def _in_each(change: Tree, cache: Tree) -> Tree:
    """Change each cache of a pytree."""
    return jax.tree.map(change, cache, is_leaf=_is_cache)


def first_cache(cache: Tree) -> Tree:
    """Return the first cache of a pytree, whose blocks are those of all; what is none is returned as it is."""
    return next(iter(jax.tree.leaves(cache, is_leaf=_is_cache)), cache)
