"""Batches cut into tiles: to take less memory, or to be computed the same way whatever their size."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import Tree
from dsv4jax.derivatives import refuse_of_invariant


def map_tokens[Inputs](function: Callable[[Inputs], Tree], inputs: Inputs, size: int) -> Tree:
    """Apply a function to ``size`` tokens of its inputs at a time.

    Args:
      function: makes an array [B, size, ...], or a tree of such, of a tree like ``inputs`` with that many tokens.
      inputs: tree of arrays [B, T, ...], where T is a multiple of ``size``.
      size: tokens.

    Returns:
      The same of all tokens, [B, T, ...]. If one call takes all, what the function returns may be anything.
    """
    batch, tokens = jax.tree.leaves(inputs)[0].shape[:2]
    if tokens == size:
        return function(inputs)

    def part(first: jax.Array) -> jax.Array:
        return function(jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, size, axis=1), inputs))

    found = lax.map(part, jnp.arange(0, tokens, size, dtype=jnp.int32))
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(batch, tokens, *leaf.shape[3:]), found)


def own_share[Inputs](inputs: Inputs, mesh_axis: str | None, axis: int) -> Inputs:
    """Cut this device's share of an axis from arrays of all: its size divides by the devices of the mesh axis.

    They have adjacent shares, in order. Without a mesh axis one device has all.
    """
    if mesh_axis is None:
        return inputs

    def cut(leaf: jax.Array) -> jax.Array:
        share = leaf.shape[axis] // lax.axis_size(mesh_axis)
        return lax.dynamic_slice_in_dim(leaf, lax.axis_index(mesh_axis) * share, share, axis)

    return jax.tree.map(cut, inputs)


def pad_tokens[Inputs](inputs: Inputs, count: int, value: int = 0) -> Inputs:
    """Append so many tokens of padding, all of one value, to arrays [B, T, ...]."""

    def pad(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf, ((0, 0), (0, count), *[(0, 0)] * (leaf.ndim - 2)), constant_values=value)

    return jax.tree.map(pad, inputs)


def apart[Inputs](function: Callable[[Inputs], Tree], inputs: Inputs) -> Tree:
    """Apply a function so that XLA merges nothing of it with what makes its inputs and with what takes its result."""
    return lax.optimization_barrier(function(lax.optimization_barrier(inputs)))


def each[Inputs](function: Callable[[Inputs], Tree], inputs: Inputs) -> Tree:
    """Apply a function to one row of its inputs after the other, like ``lax.map``, by one program for any number.

    XLA merges operations, and adds in another order for that. So barriers keep the function apart from where its row is
    taken from and put to, which depends on the number of rows; and another hides that number, as XLA would dissolve a
    loop of one turn. With that there is no derivative in reverse mode, and asking for one in any is a ValueError.

    Args:
      function: makes a tree of arrays of a tree like ``inputs`` without the first axes.
      inputs: tree of arrays [M, ...].

    Returns:
      The same of all rows, [M, ...].
    """
    count = jax.tree.leaves(inputs)[0].shape[0]
    made = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], inputs))
    out = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), made)

    def turn(i: jax.Array | int, out: Tree) -> Tree:
        made = apart(function, jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), inputs))
        return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, i, 0), out, made)

    out = lax.fori_loop(0, lax.optimization_barrier(jnp.int32(count)), turn, out)
    # Of what is made, because the function may close over weights that have a tangent, too. One by one, so that JAX
    # removes those that nobody uses, as it does without.
    return jax.tree.map(refuse_of_invariant, out)


def map_rows[Inputs](function: Callable[[Inputs], Tree], inputs: Inputs, size: int, axes: int = 1) -> Tree:
    """Apply a function to ``size`` rows of its inputs at a time, of which the last ones may be filled up with zeros.

    A row's result does not depend on how many rows there are, as long as the function treats the rows of a tile alike.

    Args:
      function: makes an array [size, ...], or a tree of such, of a tree like ``inputs`` with that many rows.
      inputs: tree of arrays [*lead, ...].
      size: rows.
      axes: number of axes of ``lead``, whose elements are the rows.

    Returns:
      The same of all rows, [*lead, ...].
    """
    lead = jax.tree.leaves(inputs)[0].shape[:axes]
    count = math.prod(lead)

    def cut(leaf: jax.Array) -> jax.Array:
        rows = leaf.reshape(count, *leaf.shape[axes:])
        padded = jnp.pad(rows, ((0, -count % size), *[(0, 0)] * (rows.ndim - 1)))
        return padded.reshape(-1, size, *rows.shape[1:])

    found = each(function, jax.tree.map(cut, inputs))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count].reshape(*lead, *leaf.shape[2:]), found)


def map_alone[Inputs, Requests](
    function: Callable[[Inputs, Requests], Tree], inputs: Inputs, requests: Requests
) -> Tree:
    """Apply a function to each token alone, for the reason of ``map_rows``.

    Args:
      function: makes an array [1, 1, ...], or a tree of such, of a tree like ``inputs`` [1, 1, ...] and one like
        ``requests`` [1, ...].
      inputs: tree of arrays [B, T, ...].
      requests: tree of arrays [B, ...].

    Returns:
      The same of all tokens, [B, T, ...].
    """

    def of_request(given: tuple[Inputs, Requests]) -> Tree:
        tokens, request = given
        request = jax.tree.map(lambda leaf: leaf[None], request)

        def of_token(token: Inputs) -> Tree:
            token = jax.tree.map(lambda leaf: leaf[None, None], token)
            made = apart(lambda given: function(*given), (token, request))
            return jax.tree.map(lambda leaf: leaf[0, 0], made)

        return each(of_token, tokens)

    return each(of_request, (inputs, requests))
