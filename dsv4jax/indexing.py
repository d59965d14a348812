"""Reads and writes of stacked leaves [layers, requests, ...]: by layer, by request, and by row of a ring.

A write that must not happen is given an index past the end of the leaf, where JAX drops it. These indices are all
different, so every scatter can promise XLA that its indices are unique.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of a call: the request of each row, the tokens that it has stored, and the tokens that are new."""

    slots: jax.Array  # int32 [B] slot of each row's request; -1 = no-op
    start: jax.Array  # int32 [B] tokens stored before the call
    num_new: jax.Array  # int32 [B] new tokens of each row; 0 = no-op

    def fitting(self, num_tokens: int) -> Batch:
        """Return the same rows for a call with T tokens. A row whose num_new exceeds T gets num_new 0."""
        return dataclasses.replace(self, num_new=fitting(self.num_new, num_tokens))

    @property
    def storing(self) -> jax.Array:
        """Which rows store anything, bool [B]."""
        return (self.slots >= 0) & (self.num_new > 0)


def fitting(count: jax.Array, available: int) -> jax.Array:
    """Return ``count``, but 0 where it exceeds ``available``. Such a row is skipped rather than done in part."""
    return jnp.where(count <= available, count, 0)


def unique_or_dropped(slots: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Return scatter indices: ``slots`` where valid, elsewhere distinct indices past ``size``, which are dropped."""
    return jnp.where(valid, slots, size + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape))


def read_slots[Tree](tree: Tree, index: jax.Array | int, slots: jax.Array) -> Tree:
    """Read the slots of one layer from leaves [layers, requests, ...]: leaves [B, ...].

    A slot out of range reads an arbitrary row in range.
    """
    return jax.tree.map(lambda leaf: leaf.at[index, slots].get(mode="clip"), tree)


def put(
    leaf: jax.Array, index: jax.Array | int, slots: jax.Array, valid: jax.Array, value: jax.Array, *row: jax.Array
) -> jax.Array:
    """Set leaf[index, slots, *row] = value where ``valid`` is True."""
    target = unique_or_dropped(slots, valid, leaf.shape[1])
    return leaf.at[index, target, *row].set(value.astype(leaf.dtype), mode="drop", unique_indices=True)


def put_in_all_layers[Tree](tree: Tree, targets: jax.Array, rows: Tree) -> Tree:
    """Set leaf[:, targets] = rows for every leaf [layers, size, ...]. ``targets`` come from ``unique_or_dropped``."""
    return jax.tree.map(
        lambda leaf, value: leaf.at[:, targets].set(value, mode="drop", unique_indices=True), tree, rows
    )


def put_newest(leaf: jax.Array, index: jax.Array | int, batch: Batch, rows: jax.Array) -> jax.Array:
    """Write rows [B, T, ...] of new tokens into a ring leaf [layers, requests, ring, ...].

    If several tokens map to one row of the ring, the last of them is written.
    """
    ring, width = leaf.shape[2], min(rows.shape[1], leaf.shape[2])
    token = batch.num_new[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None]
    position = batch.start[:, None] + token
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(batch.slots[:, None], token.shape)
    value = rows[row, jnp.maximum(token, 0)]
    return put(leaf, index, slot, (token >= 0) & (slot >= 0), value, position % ring)


def copy_rows[Tree](tree: Tree, sources: jax.Array, targets: jax.Array) -> Tree:
    """Copy row sources[b] to row targets[b] in all layers of leaves [layers, size, ...]; target -1 is a no-op.

    A row is the state of a slot, or the entries of a block. All rows are read before any is written.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        target = unique_or_dropped(targets, targets >= 0, leaf.shape[1])
        return put_in_all_layers(leaf, target, leaf.at[:, sources].get(mode="clip"))

    return jax.tree.map(copy, tree)
