"""Which shard of a cache takes a new request, where the caller names none: the one with most free blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.cache import KVCache, admit, check_cache
from dsv4jax.cache.tables import blocks_for
from dsv4jax.checks import check_batch


def choose_shards(cache: KVCache, tokens: jax.Array) -> jax.Array:
    """Choose a shard for each of n new requests, one after the other: that with most free blocks beside those chosen.

    Of shards with equally many, the one with most free slots takes the request, and of those the first one.

    Args:
      cache: of all shards, outside of ``jax.shard_map``.
      tokens: int32 [n] that each request is to have blocks for.

    Returns:
      int32 [n], or -1 for a request that no shard has a slot and enough blocks for. Nothing is taken.

    Raises:
      AssertionError: (chex) ``tokens`` has another shape or dtype.
    """
    check_cache("choose_shards", cache)
    check_batch(tokens=tokens)
    blocks = cache.tables.num_free
    slots = jnp.sum(~cache.tables.admitted.reshape(blocks.size, -1), axis=1, dtype=jnp.int32)

    def choose(free: tuple[jax.Array, jax.Array], needed: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        blocks, slots = free
        fits = (slots > 0) & (blocks >= needed)
        most = fits & (blocks == jnp.max(jnp.where(fits, blocks, -1)))
        shard = jnp.where(jnp.any(fits), jnp.argmax(jnp.where(most, slots, -1)).astype(jnp.int32), -1)
        taken = (jnp.arange(blocks.size, dtype=jnp.int32) == shard).astype(jnp.int32)
        return (blocks - taken * needed, slots - taken), shard

    return lax.scan(choose, (blocks, slots), blocks_for(cache.plan, tokens))[1]


def rows_of_shards(cache: KVCache, shards: jax.Array) -> jax.Array:
    """Return which rows admit requests to these shards int32 [n], of a batch with n rows for each shard: bool."""
    every = jnp.arange(cache.tables.num_free.size, dtype=jnp.int32)
    return (shards[None] == every[:, None]).reshape(-1)


def slots_of_shards(slots: jax.Array, shards: jax.Array) -> jax.Array:
    """Return the slots int32 [n] of requests from those of the batch of ``rows_of_shards``."""
    each = slots.reshape(-1, shards.size)
    return jnp.where(shards >= 0, jnp.take_along_axis(each, jnp.maximum(shards, 0)[None], axis=0)[0], -1)


@jax.jit
def admit_anywhere(cache: KVCache, tokens: jax.Array) -> tuple[KVCache, jax.Array, jax.Array]:
    """Take slots for new requests on the shards that ``choose_shards`` names.

    The requests get their blocks by ``prepare_forward``, as after ``admit``; until then others may take them.

    Args:
      cache: of all shards, outside of ``jax.shard_map``; or of one.
      tokens: int32 [n] that each request is to have blocks for.

    Returns:
      (cache, shards int32 [n], slots int32 [n] within them). Both are -1 for a request that was not admitted.

    Raises:
      AssertionError: (chex) ``tokens`` has another shape or dtype.
    """
    shards = choose_shards(cache, tokens)
    where = rows_of_shards(cache, shards)
    cache, slots, _ = admit(cache, where.size, where)
    return cache, shards, slots_of_shards(slots, shards)
