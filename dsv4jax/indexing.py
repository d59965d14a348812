"""Reads and writes of stacked leaves [layers, requests, ...]: by layer, by request, and by row of a ring.

A write that must not happen is given an index past the end of the leaf, where JAX drops it. These indices are all
different, so every scatter can promise XLA that its indices are unique.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


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


def quotient(number: jax.Array, size: int) -> jax.Array:
    """Return ``number // size`` of whole numbers that are not negative: one operation, with care for signs a dozen."""
    if size & (size - 1):
        return lax.div(number, np.int32(size))
    return lax.shift_right_arithmetic(number, np.int32(size.bit_length() - 1))


def remainder(number: jax.Array, size: int) -> jax.Array:
    """Return ``number % size`` of whole numbers that are not negative."""
    return lax.rem(number, np.int32(size)) if size & (size - 1) else lax.bitwise_and(number, np.int32(size - 1))


def from_start(index: jax.Array | int, size: int) -> jax.Array | int:
    """Return an index that counts from the start of an axis; a negative one counts from its end.

    JAX does this again for each leaf that it indexes, unless it is told not to.
    """
    if isinstance(index, int | np.integer):
        return index + size if index < 0 else index
    return lax.select(index < 0, index + size, index)


def _places(tree: object, index: jax.Array | int, *rows: jax.Array) -> jax.Array:
    """Return the indices of leaf[index, *rows] for all leaves: to index each of them would make the indices again."""
    index = from_start(index, jax.tree.leaves(tree)[0].shape[0])
    shape = jnp.broadcast_shapes(*(row.shape for row in rows))
    return jnp.stack([jnp.broadcast_to(part, shape) for part in (index, *rows)], -1)


def read_slots[Tree](tree: Tree, index: jax.Array | int, slots: jax.Array, *row: jax.Array) -> Tree:
    """Read leaf[index, slots, *row] of every leaf [layers, requests, ...]: leaves [B, ...].

    A slot or row out of range reads an arbitrary one in range.
    """
    at = _places(tree, index, slots, *row)
    axes = tuple(range(at.shape[-1]))

    def read(leaf: jax.Array) -> jax.Array:
        row = leaf.shape[len(axes) :]
        offset = tuple(range(at.ndim - 1, at.ndim - 1 + len(row)))
        numbers = lax.GatherDimensionNumbers(offset, collapsed_slice_dims=axes, start_index_map=axes)
        return lax.gather(leaf, at, numbers, (1,) * len(axes) + row, mode="clip")

    return jax.tree.map(read, tree)


def take_tokens(tokens: jax.Array, at: jax.Array) -> jax.Array:
    """Read tokens [B, T, ...] of each row of a batch at int32 [B, ...], which must be in range: [B, ..., ...].

    Written as one gather, because indexing by row and token takes a dozen operations more.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(at.ndim, at.ndim + tokens.ndim - 2)),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    sizes = 1, 1, *tokens.shape[2:]
    return lax.gather(tokens, lax.expand_dims(at, (at.ndim,)), numbers, sizes, mode="promise_in_bounds")


def put[Tree](
    tree: Tree, index: jax.Array | int, slots: jax.Array, valid: jax.Array, values: Tree, *row: jax.Array
) -> Tree:
    """Set leaf[index, slots, *row] = value where ``valid`` is True, for every leaf [layers, requests, ...]."""
    at = _places(tree, index, unique_or_dropped(slots, valid, jax.tree.leaves(tree)[0].shape[1]), *row)
    axes = tuple(range(at.shape[-1]))

    def put_in(leaf: jax.Array, value: jax.Array) -> jax.Array:
        numbers = lax.ScatterDimensionNumbers(tuple(range(at.ndim - 1, value.ndim)), axes, axes)
        return lax.scatter(leaf, at, value.astype(leaf.dtype), numbers, unique_indices=True, mode="drop")

    return jax.tree.map(put_in, tree, values)


def put_in_all_layers[Tree](tree: Tree, targets: jax.Array, rows: Tree) -> Tree:
    """Set leaf[:, targets] = rows for every leaf [layers, size, ...]. ``targets`` come from ``unique_or_dropped``."""

    def put_in(leaf: jax.Array, value: jax.Array) -> jax.Array:
        return leaf.at[:, targets].set(value, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(put_in, tree, rows)


def put_newest[Tree](tree: Tree, index: jax.Array | int, batch: Batch, rows: Tree) -> Tree:
    """Write rows [B, T, ...] of new tokens into ring leaves [layers, requests, ring, ...], of one size each.

    If several tokens map to one row of the ring, the last of them is written.
    """
    ring, num_tokens = jax.tree.leaves(tree)[0].shape[2], jax.tree.leaves(rows)[0].shape[1]
    width = min(num_tokens, ring)
    token = batch.num_new[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None]
    position = batch.start[:, None] + token
    slot, at = jnp.broadcast_to(batch.slots[:, None], token.shape), jnp.clip(token, 0, num_tokens - 1)
    values = jax.tree.map(lambda leaf: take_tokens(leaf, at), rows)
    return put(tree, index, slot, (token >= 0) & (slot >= 0), values, remainder(position, ring))


def copy_rows[Tree](tree: Tree, sources: jax.Array, targets: jax.Array) -> Tree:
    """Copy row sources[b] to row targets[b] in all layers of leaves [layers, size, ...]; target -1 is a no-op.

    A row is the state of a slot, or the entries of a block. All rows are read before any is written.
    """

    if not jax.tree.leaves(tree):
        return tree
    size = jax.tree.leaves(tree)[0].shape[1]
    source, target = from_start(sources, size), unique_or_dropped(targets, targets >= 0, size)

    def copy(leaf: jax.Array) -> jax.Array:
        return put_in_all_layers(leaf, target, leaf.at[:, source].get(mode="clip", wrap_negative_indices=False))

    return jax.tree.map(copy, tree)
