"""The weights that can be trained, and all that cannot: ``jax.grad`` and optimisers take the first of the two.

trainable, rest = partition(params)
grads = jax.grad(lambda trainable: loss(combine(trainable, rest)))(trainable)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.model.params import is_any_stored


def partition[T](params: T) -> tuple[T, T]:
    """Divide weights into those that have a derivative and the rest.

    Args:
      params: a model's weights, one layer's, or any tree that holds such, of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      (trainable, rest), both of the form of params. A leaf that is in one of them is None in the other. Trainable are
      arrays of floats, whatever their dtype. The rest are weights stored as FP8 or FP4 with their scales, and tables
      of integers.
    """

    def trains(node: Any) -> object:
        if is_any_stored(node):
            return jax.tree.map(lambda _: False, node)
        return bool(jnp.issubdtype(node.dtype, jnp.floating))

    which = jax.tree.map(trains, params, is_leaf=is_any_stored)

    def part(wanted: bool) -> T:
        return jax.tree.map(lambda leaf, trains: leaf if trains is wanted else None, params, which)

    return part(True), part(False)


def combine[T](trainable: T, rest: T) -> T:
    """Return the weights that ``partition`` divided, or what has become of them since.

    Raises:
      ValueError: the two are of different models, or a leaf is in both.
    """

    def either[Leaf](path: jax.tree_util.KeyPath, a: Leaf, b: Leaf) -> Leaf:
        if a is not None and b is not None:
            raise ValueError(f"combine: {jax.tree_util.keystr(path)} is in both: give the two trees of one partition")
        return b if a is None else a

    forms = [jax.tree.structure(tree, is_leaf=_is_none) for tree in (trainable, rest)]
    if forms[0] != forms[1]:
        raise ValueError("combine: the two are trees of different forms: give the two trees of one partition")
    return jax.tree_util.tree_map_with_path(either, trainable, rest, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None
