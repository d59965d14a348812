"""Several continuations of one request, which share its stored blocks instead of copying them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.shards import is_spread, on_shards
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.tables import fork_slots
from dsv4jax.checks import check_array, check_batch
from dsv4jax.indexing import copy_rows
from dsv4jax.kinds import AttentionType


@jax.jit
def fork(cache: KVCache, source_slot: jax.Array, target_slots: jax.Array) -> tuple[KVCache, jax.Array]:
    """Make each target slot a request with the same contents as the source. The requests are independent from then on.

    Blocks that the source has filled are shared, and freed when their last reader is released. The block that it is
    filling and its state are copied, so the cost does not depend on the request's length. Call this between forward
    passes. Afterwards source and targets have equal status: each can be released, extended or forked in any order.

    Sharing is safe because nobody writes to a shared block. A forward pass writes entries from number length // ratio
    on, which are in blocks from number length // block_tokens on. A block is shared only if the lengths of all its
    readers are past its end, and lengths never shrink.

    Args:
      cache: the cache. It is not donated here; the caller's jit decides.
      source_slot: int32 [], or int32 [B] with a source for each target (beam search).
      target_slots: int32 [B], distinct slots fresh from ``admit``, without tokens or grants; -1 = padding row.

    Returns:
      (cache, ok bool []). If a source or target is not admitted or out of range, a target is not empty, is named twice
      or is its own source, or blocks run out, then ``ok`` is False and the cache is unchanged.

    Raises:
      AssertionError: (chex) an argument's shape or dtype is wrong.
      ValueError: the cache has several shards and the call is outside ``jax.shard_map``.
    """
    check_cache("fork", cache)
    check_batch(target_slots=target_slots)
    check_array("source_slot", source_slot, {"B": target_slots.shape[0]} if jnp.ndim(source_slot) else {}, jnp.int32)
    sources = jnp.broadcast_to(source_slot, target_slots.shape)
    if is_spread(cache):
        return on_shards(fork, cache, (sources, target_slots), 1)
    tables, ok, filling, own = fork_slots(cache.tables, sources, target_slots, cache.plan)
    targets = jnp.where(ok, target_slots, -1)

    def forked(_: AttentionType, stack: LayerStack) -> LayerStack:
        return LayerStack(state=copy_rows(stack.state, sources, targets), pool=copy_rows(stack.pool, filling, own))

    return dataclasses.replace(cache.map_stacks(forked), tables=tables), ok
