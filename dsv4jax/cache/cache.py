"""KVCache, the one pytree that a user holds, and the five calls that drive it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv4jax.cache.allocation import allocate
from dsv4jax.cache.checked import check_advance
from dsv4jax.cache.pool import init_pool
from dsv4jax.cache.shards import is_spread, on_shards
from dsv4jax.cache.stack import LayerStack, Stacks
from dsv4jax.cache.state import init_state, reset_slots
from dsv4jax.cache.tables import Tables, admit_slots, advance_lengths, init_tables, release_slots
from dsv4jax.checks import Named, check_batch, check_type, integer
from dsv4jax.config import layer_kind
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan
from dsv4jax.reprs import compact, values_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KVCache(Stacks):
    """The cache of a whole model, a frozen pytree. The stack of a kind that the model does not have is None."""

    tables: Tables
    plan: CachePlan = dataclasses.field(metadata={"static": True})
    # The mesh over whose axis "data" the library's calls map themselves; None for one device, and for a cache of
    # ``init_cache(plan, mesh)``, whose steps the caller maps.
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        lengths = values_of(seq_lens=self.tables.seq_lens)
        return compact(self, plan=repr(self.plan), **lengths)

    @property
    def seq_lens(self) -> jax.Array:
        """Number of tokens stored in each slot, int32 [requests]."""
        return self.tables.seq_lens

    @property
    def swa_head(self) -> jax.Array:
        """The window row that each slot's next token will be written to, int32 [requests]."""
        return self.seq_lens % self.plan.cfg.sliding_window

    def tail_len(self, kind: AttentionType | str) -> jax.Array:
        """Return how many tokens of its unfinished block each slot has, in layers of a kind. int32 [requests]."""
        return self.seq_lens % max(1, self.plan.cfg.ratio(AttentionType(kind)))

    def locate(self, layer: int) -> tuple[AttentionType, int]:
        """Return a layer's kind and its index in that kind's stack.

        Raises ValueError if the model has no such layer.
        """
        kind = layer_kind(self.plan.cfg, layer)
        return kind, self.plan.layers(kind).index(int(layer))


def check_cache(name: str, cache: object) -> None:
    """Require a KVCache in the call that is named.

    Raises:
      ValueError: it is something else. If that holds a cache, the message says in which field.
    """
    check_type(name, cache, KVCache)


def empty_cache(plan: CachePlan) -> KVCache:
    """Return an empty cache of one shard."""

    def stack(kind: AttentionType) -> LayerStack | None:
        return LayerStack(state=init_state(plan, kind), pool=init_pool(plan, kind)) if plan.layers(kind) else None

    stacks: Named = {kind.value: stack(kind) for kind in AttentionType}
    return KVCache(**stacks, tables=init_tables(plan), plan=plan)


def admit(cache: KVCache, n: int, where: jax.Array | None = None) -> tuple[KVCache, jax.Array, jax.Array]:
    """Take slots for new requests and empty them in all layers.

    Args:
      n: static number of requests.
      where: bool [n]; admit only these, so that a data-dependent number can be admitted.

    Returns:
      (cache, slots int32 [n], ok bool []). A slot is -1 where masked out; all are -1 and the cache is unchanged when
      too few slots are free (``ok`` False). Of a cache with a ``mesh``, each shard admits its share of the n, and
      ``ok`` is bool [shards], here and in all calls.

    Raises:
      AssertionError: (chex) ``where`` has another shape or dtype.
      ValueError: n is no integer, or negative.
    """
    check_cache("admit", cache)
    return _admit(cache, integer("n", n, least=0), where)


@functools.partial(jax.jit, static_argnames="n")
def _admit(cache: KVCache, n: int, where: jax.Array | None) -> tuple[KVCache, jax.Array, jax.Array]:
    if is_spread(cache):
        asked = jnp.ones(n, jnp.bool) if where is None else where
        return on_shards(lambda cache, where: _admit(cache, where.shape[0], where), cache, (asked,), 2)
    tables, slots, ok = admit_slots(cache.tables, n, where)

    def emptied(kind: AttentionType, stack: LayerStack) -> LayerStack:
        return dataclasses.replace(stack, state=reset_slots(stack.state, slots, plan=cache.plan, kind=kind))

    return dataclasses.replace(cache.map_stacks(emptied), tables=tables), slots, ok


@jax.jit
def prepare_forward(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> tuple[KVCache, jax.Array]:
    """Allocate the blocks that the entries of the next tokens need. Call it before each forward pass.

    Args:
      slots: int32 [B]; -1 = padding row.
      num_new: int32 [B], number of tokens that each row is about to store; rows with 0 are skipped.

    Returns:
      (cache, ok bool []). If blocks run out, if a sequence would become longer than the plan's ``max_context``, if a
      slot is not admitted, out of range or named twice, or if num_new is negative, then ``ok`` is False and the cache
      is unchanged. Layers and ``advance`` skip rows whose tokens were not granted, so it is safe to continue. However,
      an earlier grant that ``advance`` has not used yet stays valid, and rows that it covers do run. To skip all rows
      when a call is refused, continue with ``num_new = jnp.where(ok, num_new, 0)``.

    Raises:
      AssertionError: (chex) an argument's shape or dtype is wrong.
      ValueError: the cache has several shards and the call is outside ``jax.shard_map``.
    """
    check_cache("prepare_forward", cache)
    check_batch(slots=slots, num_new=num_new)
    if is_spread(cache):
        return on_shards(prepare_forward, cache, (slots, num_new), 1)
    tables, ok = allocate(cache.tables, slots, num_new, cache.plan)
    return dataclasses.replace(cache, tables=tables), ok


@jax.jit
def advance(cache: KVCache, slots: jax.Array, num_new: jax.Array) -> KVCache:
    """Add the tokens that all layers have just stored to the lengths.

    Call it once per forward pass, after the last layer.

    Args:
      slots, num_new: int32 [B], as given to ``prepare_forward`` and the layers. Tokens that were not granted are not
        added.
    """
    check_cache("advance", cache)
    if is_spread(cache):
        return on_shards(advance, cache, (slots, num_new), 0)
    tables = advance_lengths(cache.tables, slots, num_new)
    check_advance(cache.tables, cache, slots, num_new)
    return dataclasses.replace(cache, tables=tables)


@jax.jit
def release(cache: KVCache, slots: jax.Array) -> KVCache:
    """Free slots int32 [B] and their blocks. Slots that are free, repeated or negative are ignored."""
    check_cache("release", cache)
    if is_spread(cache):
        return on_shards(release, cache, (slots,), 0)
    return dataclasses.replace(cache, tables=release_slots(cache.tables, slots))


def tree_bytes(tree: object) -> int:
    """Return the bytes of a pytree's leaves."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
