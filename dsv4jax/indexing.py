"""Reads and writes of stacked leaves [layers, requests, ...]: by layer, by request, by row of a ring.

Whatever a row must not touch is given an index past the end and dropped. Such indices stay distinct, so that every
scatter may promise XLA that its indices are unique.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of a call: which request each of them is, the tokens it holds, and the tokens it brings."""

    slots: jax.Array  # int32 [B], -1 = no-op
    start: jax.Array  # int32 [B] tokens stored before the call
    num_new: jax.Array  # int32 [B] tokens of the call; 0 = no-op

    def fitting(self, num_tokens: int) -> Batch:
        """The same rows in a call of T tokens: a row that names more than T brings nothing."""
        return dataclasses.replace(self, num_new=fitting(self.num_new, num_tokens))

    @property
    def storing(self) -> jax.Array:
        """bool [B]: the rows that store anything."""
        return (self.slots >= 0) & (self.num_new > 0)


def fitting(count: jax.Array, available: int) -> jax.Array:
    """count, and 0 where it names more than there is: such a row is left alone, not done in part."""
    return jnp.where(count <= available, count, 0)


def unique_or_dropped(slots: jax.Array, valid: jax.Array, size: int) -> jax.Array:
    """Scatter indices: ``slots`` where valid, else distinct ones past ``size`` (dropped, and still unique)."""
    return jnp.where(valid, slots, size + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape))


def read_slots(tree: Any, index: jax.Array | int, slots: jax.Array) -> Any:
    """Leaves [layers, requests, ...] -> [B, ...] of one layer; a slot out of range reads some row in range."""
    return jax.tree.map(lambda leaf: leaf.at[index, slots].get(mode="clip"), tree)


def put(
    leaf: jax.Array, index: jax.Array | int, slots: jax.Array, valid: jax.Array, value: jax.Array, *row: jax.Array
) -> jax.Array:
    """leaf[index, slots, *row] = value where valid."""
    target = unique_or_dropped(slots, valid, leaf.shape[1])
    return leaf.at[index, target, *row].set(value.astype(leaf.dtype), mode="drop", unique_indices=True)


def put_in_all_layers(tree: Any, targets: jax.Array, rows: Any) -> Any:
    """Leaves [layers, size, ...]: leaf[:, targets] = rows, for targets from ``unique_or_dropped``."""
    return jax.tree.map(
        lambda leaf, value: leaf.at[:, targets].set(value, mode="drop", unique_indices=True), tree, rows
    )


def put_newest(leaf: jax.Array, index: jax.Array | int, batch: Batch, rows: jax.Array) -> jax.Array:
    """Write tokens' rows [B, T, ...] into a ring leaf [layers, requests, ring, ...]; of several writers, the last."""
    ring, width = leaf.shape[2], min(rows.shape[1], leaf.shape[2])
    token = batch.num_new[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None]
    position = batch.start[:, None] + token
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    slot = jnp.broadcast_to(batch.slots[:, None], token.shape)
    value = rows[row, jnp.maximum(token, 0)]
    return put(leaf, index, slot, (token >= 0) & (slot >= 0), value, position % ring)


def copy_rows(tree: Any, sources: jax.Array, targets: jax.Array) -> Any:
    """Leaves [layers, size, ...]: row sources[b] to row targets[b] in all layers; target -1 is a no-op.

    A row is a slot's state or a block's entries. All rows are read before any is written.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        target = unique_or_dropped(targets, targets >= 0, leaf.shape[1])
        return put_in_all_layers(leaf, target, leaf.at[:, sources].get(mode="clip"))

    return jax.tree.map(copy, tree)
