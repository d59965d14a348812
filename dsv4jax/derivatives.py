"""Derivatives where values are rounded, or where something has none.

Rounding is a staircase: its own derivative is 0 almost everywhere, and integers have none at all. So a derivative goes
straight through it, as if the rounded value were the exact one (the straight-through estimator). Where that cannot be
had, because bytes lie between two calls or a kernel has no derivative, differentiation is an error: a zero would look
like a result.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import Tree
from dsv4jax.indexing import take_tokens


@jax.custom_jvp
def straight_through(rounded: jax.Array, exact: jax.Array) -> jax.Array:
    """``rounded``, with the derivative of ``exact``, of which it is a rounding. Equal shapes and dtypes."""
    del exact
    return rounded


@straight_through.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Itself again, not its first argument: a second derivative differentiates this rule, and would take that for a
    # constant.
    return straight_through(*primals), tangents[1]


def through_new_rows(values: jax.Array, exact: jax.Array, number: jax.Array, count: jax.Array | int) -> jax.Array:
    """Give stored rows, as they are read, the derivative that they had before rounding.

    Args:
      values: f32 [B, ..., dim], the rows as decoded.
      exact: f32 [B, N, dim], rows of this call before rounding. Rows of earlier calls have no derivative here.
      number: int32 [B, ...], which of the N rows a value is; another number if it is none of them.
      count: how many of the N are real, for all or for each of number.

    Returns:
      ``values``, unchanged but for the derivative.
    """
    rows = take_tokens(exact, jnp.clip(number, 0, exact.shape[1] - 1))
    is_new = (number >= 0) & (number < count)
    return jnp.where(is_new[..., None], straight_through(values, rows), values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_derivative[T](message: str, tree: T) -> T:
    """The tree as it is. Differentiating with respect to a part of it is a ValueError with this message."""
    del message
    return tree


@refuse_derivative.defjvp
def _(message: str, primals: tuple[Tree], tangents: tuple[Tree]) -> Tree:
    del primals, tangents
    raise ValueError(message)


def refuse_of_invariant[T](tree: T) -> T:
    """The tree as it is, where it belongs to a cache that is invariant: such a program has no reverse mode."""
    return refuse_derivative("a cache with invariant=True has no derivative: take it over one without", tree)


def carries_derivative(row: object) -> bool:
    """Whether rows of a spec are floats in all their leaves, so that a derivative passes through what is stored."""
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(row))


def storable[T](tree: T, row: object) -> T:
    """The tree, without its derivative where rows of this spec hold bytes.

    A part of such a row may be a float still (rope dims, a scale), and would carry a part of the derivative.
    """
    return tree if carries_derivative(row) else lax.stop_gradient(tree)
