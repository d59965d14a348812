"""KVCache: the one pytree a user holds, and the five calls that drive it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.cache.pool import init_pool
from dsv4jax.cache.stack import LayerStack, Stacks
from dsv4jax.cache.state import init_state, reset_slots
from dsv4jax.cache.tables import Tables, admit_slots, advance_lengths, grow, init_tables, release_slots
from dsv4jax.checks import check_batch, integer
from dsv4jax.config import layer_kind
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCache(Stacks):
    """The cache of a whole model, a frozen pytree. A kind that the model lacks is None."""

    tables: Tables
    plan: CachePlan = dataclasses.field(metadata={"static": True})

    @property
    def seq_lens(self) -> jax.Array:
        """int32 [requests]: tokens stored per slot."""
        return self.tables.seq_lens

    @property
    def swa_head(self) -> jax.Array:
        """int32 [requests]: window row the next token goes to."""
        return self.seq_lens % self.plan.cfg.sliding_window

    def tail_len(self, kind: AttentionType | str) -> jax.Array:
        """int32 [requests]: tokens of the unfinished block in the tails of a kind."""
        return self.seq_lens % max(1, self.plan.cfg.ratio(AttentionType(kind)))

    def locate(self, layer: int) -> tuple[AttentionType, int]:
        """Kind of a layer and its place in that kind's stack. ValueError where the model has no such layer."""
        kind = layer_kind(self.plan.cfg, layer)
        return kind, self.plan.layers(kind).index(int(layer))


def empty_cache(plan: CachePlan) -> KVCache:
    """A cache that holds nothing, of one shard."""

    def stack(kind: AttentionType) -> LayerStack | None:
        return LayerStack(state=init_state(plan, kind), pool=init_pool(plan, kind)) if plan.layers(kind) else None

    stacks: dict[str, Any] = {kind.value: stack(kind) for kind in AttentionType}
    return KVCache(**stacks, tables=init_tables(plan), plan=plan)


@functools.partial(jax.jit, static_argnames="n")
def admit(cache: KVCache, n: int, where: jax.Array | None = None) -> tuple[KVCache, jax.Array, jax.Array]:
    """Take slots for new requests and empty them in all layers.

    Args:
      n: static number of requests.
      where: bool [n]; admit only these, so that a data-dependent number can be admitted.

    Returns:
      (cache, slots int32 [n], ok bool []). A slot is -1 where masked out; all are -1 and the cache is unchanged when
      too few slots are free (``ok`` False).

    Raises:
      AssertionError: (chex) ``where`` has another shape or dtype.
      ValueError: n is no integer, or negative.
    """
    n = integer("n", n, least=0)
    tables, slots, ok = admit_slots(cache.tables, n, where)

    def emptied(kind: AttentionType, stack: LayerStack) -> LayerStack:
        return dataclasses.replace(stack, state=reset_slots(stack.state, slots, plan=cache.plan, kind=kind))

    return dataclasses.replace(cache.map_stacks(emptied), tables=tables), slots, ok


@jax.jit
def prepare_forward(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> tuple[KVCache, jax.Array]:
    """Allocate the blocks that the next tokens' entries need, before the forward pass.

    Args:
      slots: int32 [B]; -1 = padding row.
      num_new: int32 [B] tokens that each row is about to store; a row with 0 is skipped.

    Returns:
      (cache, ok bool []). ``ok`` is False, and the cache unchanged, where blocks run out, a sequence would pass the
      plan's ``max_context``, a slot is not admitted, out of range or named twice, or num_new is negative. Layers and
      ``advance`` then leave alone whatever was not granted. But a grant that ``advance`` has not used up stays, and
      rows that it covers run. For a pass that leaves all rows alone where it is refused, continue with
      ``num_new = jnp.where(ok, num_new, 0)``.
    """
    check_batch(slots=slots, num_new=num_new)
    tables, ok = grow(cache.tables, slots, num_new, cache.plan)
    return dataclasses.replace(cache, tables=tables), ok


@jax.jit
def advance(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> KVCache:
    """Count the tokens that all layers have just stored: once per forward pass, after the last layer.

    Args:
      slots, num_new: int32 [B], as given to ``prepare_forward`` and the layers. What was not granted is not counted.
    """
    return dataclasses.replace(cache, tables=advance_lengths(cache.tables, slots, num_new))


@jax.jit
def release(cache: KVCache, slots: jax.Array) -> KVCache:
    """Give back slots int32 [B] and their blocks. Free, repeated and negative slots are no-ops."""
    return dataclasses.replace(cache, tables=release_slots(cache.tables, slots))


def memory_bytes(tree: Any) -> int:
    """Bytes of a pytree's leaves."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
