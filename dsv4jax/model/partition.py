"""The weights that can be trained, and all that cannot: ``jax.grad`` and optimisers take the first of the two.

trainable, rest = partition(params)
grads = jax.grad(lambda trainable: loss(combine(trainable, rest)))(trainable)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsv4jax.checks import Tree
from dsv4jax.model.params import is_any_stored


def partition[T](params: T, trains: str | Callable[[str], bool] = "floats") -> tuple[T, T]:
    """Divide weights into those to be trained and the rest.

    Args:
      params: a model's weights, one layer's, or any tree that holds such, of arrays or ``jax.ShapeDtypeStruct``.
      trains: "floats" for all that has a derivative; "deltas" for the low-rank deltas alone (``with_deltas``); or a
        function that is asked, of all that has a derivative, by a name such as ".blocks[0].attention.q_b.deltas[0].up".

    Returns:
      (trainable, rest), both of the form of params. A leaf that is in one of them is None in the other. Only arrays of
      floats have a derivative, whatever their dtype: weights stored as FP8 or FP4, with their scales, and tables of
      integers are always among the rest.

    Raises:
      ValueError: ``trains`` is another word, or nothing is left to be trained.
    """
    if isinstance(trains, str) and trains not in _WORDS:
        raise ValueError(f"trains must be one of {list(_WORDS)}, or a function of a name; got {trains!r}")
    is_wanted = _WORDS[trains] if isinstance(trains, str) else trains

    def of_node(path: jax.tree_util.KeyPath, node: Tree) -> Tree:
        if is_any_stored(node):
            return jax.tree.map(lambda _: False, node)
        return bool(jnp.issubdtype(node.dtype, jnp.floating)) and bool(is_wanted(jax.tree_util.keystr(path)))

    which = jax.tree_util.tree_map_with_path(of_node, params, is_leaf=is_any_stored)
    if trains != "floats" and not any(jax.tree.leaves(which)):
        raise ValueError(f"trains={trains!r}: nothing of these weights would be trained")

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


# What may be trained, by name.
_WORDS: dict[str, Callable[[str], bool]] = {"floats": lambda name: True, "deltas": lambda name: ".deltas[" in name}


def _is_none(node: object) -> bool:
    return node is None
