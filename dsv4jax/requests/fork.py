"""Several continuations of one request: what it has stored is shared, not copied."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.tables import fork_slots
from dsv4jax.checks import check_array, check_batch
from dsv4jax.indexing import copy_rows
from dsv4jax.kinds import AttentionType


@jax.jit
def fork(cache: KVCache, source_slot: jax.Array, target_slots: jax.Array) -> tuple[KVCache, jax.Array]:
    """Make each target a request that holds what the source holds, and goes its own way from there.

    Blocks that the source has filled are shared, and freed with their last reader; the block that it is filling and its
    state are copied. So the cost does not depend on the request's length. Call it between forward passes. Source and
    targets are then equals: each may be released, extended and forked in any order.

    Nobody writes to a shared block. A forward pass writes entries from number length // ratio on, which lie in blocks
    from number length // block_tokens on. A block is shared only if all its readers' lengths were past its end, and
    lengths do not shrink.

    Args:
      source_slot: int32 [], or int32 [B] with a source for each target (beam search).
      target_slots: int32 [B], distinct slots fresh from ``admit``, without tokens or grants; -1 = padding row.

    Returns:
      (cache, ok bool []). ``ok`` is False, and the cache unchanged, where a source or target is not admitted or out of
      range, a target holds something, is named twice or is its own source, or blocks run out.
    """
    check_batch(target_slots=target_slots)
    check_array("source_slot", source_slot, {"B": target_slots.shape[0]} if jnp.ndim(source_slot) else {}, jnp.int32)
    sources = jnp.broadcast_to(source_slot, target_slots.shape)
    tables, ok, filling, own = fork_slots(cache.tables, sources, target_slots, cache.plan)
    targets = jnp.where(ok, target_slots, -1)

    def forked(_: AttentionType, stack: LayerStack) -> LayerStack:
        return LayerStack(state=copy_rows(stack.state, sources, targets), pool=copy_rows(stack.pool, filling, own))

    return dataclasses.replace(cache.map_stacks(forked), tables=tables), ok
