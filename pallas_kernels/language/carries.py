"""The pytrees of values that loops carry from one iteration to the next, and branches from before to after."""

from __future__ import annotations

import jax

from pallas_kernels.trees import Structure, Tree


def flatten[Leaf](tree: Tree, leaf_type: type[Leaf]) -> tuple[list[Leaf], Structure]:
    """Return the leaves of a pytree and its structure. Raises TypeError if a leaf has another type."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, leaf_type):
            raise TypeError(
                f"{leaf!r} is carried or held, and is no Value: write machine.constant(number, kind) for a number, "
                "and let a loop's body close over what stays the same"
            )
    return leaves, structure


def alike[Leaf](result: Tree, carry: Tree, leaf_type: type[Leaf]) -> list[Leaf]:
    """Return the leaves of what a body returned. Raises TypeError if its structure is not that of the carry."""
    leaves, structure = flatten(result, leaf_type)
    if structure != jax.tree.structure(carry) or _kinds(result) != _kinds(carry):
        raise TypeError(
            f"the body of a loop or branch returns a carry of the same structure and kinds: it got {_shown(carry)}, "
            f"and returned {_shown(result)}"
        )
    return leaves


def _kinds(tree: Tree) -> list[str]:
    return [leaf.kind for leaf in jax.tree.leaves(tree)]


def _shown(tree: Tree) -> str:
    return str(jax.tree.map(lambda leaf: leaf.kind, tree))
