"""The entries that a call has completed, read from the pool and, where they are patched, written again.

A kernel stores them in the launch that makes them, so they are read from where all backends store them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.pool import ExactEntries, PagedPool, PooledLayer, gather_entries, scatter_entries
from dsv4jax.derivatives import storable
from dsv4jax.indexing import quotient
from dsv4jax.layer.stages.interface import Taken
from dsv4jax.layer.stages.probe import Probe, Seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletedEntries:
    """The entries of a layer that the tokens of a call complete, as they are stored."""

    number: jax.Array  # int32 [B, E] of each entry in its request, -1 = none
    rows: jax.Array  # f32 [B, E, head_dim], 0 where there is none


def tap_entries(taken: Taken, tokens: int, probe: Probe, seen: Seen) -> Taken:
    """Show a probe the entries that a call with so many tokens has completed, and store what it changes.

    A row that is not changed keeps its bytes. Indexer keys stay those of the tokens.
    """
    call, entries = taken.call, taken.entries
    assert entries is not None
    count = quotient(call.phase + call.batch.num_new, call.ratio)
    place = jnp.arange((call.ratio - 1 + tokens) // call.ratio, dtype=jnp.int32)[None]
    is_new = (place < count[:, None]) & (call.batch.slots >= 0)[:, None]
    number = jnp.where(is_new, call.first_entry[:, None] + place, -1)
    old = CompletedEntries(number=number, rows=entries.rows(number))
    new = probe.tap("entries", old, seen)
    if not probe.patched("entries"):
        return taken
    pool = _stored(entries, number, count, (old.rows, new.rows))
    exact = taken.exact and ExactEntries(rows=new.rows, first=call.first_entry, count=count)
    stack = dataclasses.replace(call.stack, pool=pool)
    return dataclasses.replace(taken, call=call.with_stack(stack), exact=exact)


def _stored(layer: PooledLayer, number: jax.Array, count: jax.Array, rows: tuple[jax.Array, jax.Array]) -> PagedPool:
    """Return the pool with new rows f32 [B, E, head_dim] where they differ from the old ones, both as ``rows``."""
    plan, store = layer.plan, layer.pool.entries
    old, new = storable(rows, plan.row_spec)
    kept, _ = gather_entries(store, layer.index, layer.block_table, layer.slots, number)
    changed = jnp.any(new != old, axis=-1)

    def chosen(new: jax.Array, kept: jax.Array) -> jax.Array:
        return jnp.where(changed.reshape(changed.shape + (1,) * (new.ndim - 2)), new, kept)

    encoded = jax.tree.map(chosen, plan.rows.encode(new, plan.cfg.rope_dim), kept)
    first = number[:, 0]
    store = scatter_entries(store, layer.index, layer.block_table, layer.slots, first, count, encoded)
    return dataclasses.replace(layer.pool, entries=store)
