"""Long chunks, some tokens at a time, so that what is computed on the way takes less memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import Tree


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
