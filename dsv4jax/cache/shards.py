"""Calls on a cache that lies over a mesh: each shard of the data axis makes the call with its own rows.

A cache with a ``mesh`` is given to the library's calls as a plain one is. They map themselves over the mesh, or do
nothing about it where the caller is inside ``jax.shard_map`` already. Caches are ``KVCache``, which is made with these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4jax.checks import Tree

DATA, MODEL = "data", "model"  # axes of a mesh: requests are divided over the first
OF_ROWS = P(DATA)  # of arrays whose first axis is the rows of a batch
EVERYWHERE = P()  # of arrays that every device has whole


def automatic(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices on which JAX takes arrays from anywhere: its axes are automatic.

    Raises:
      ValueError: the axes are others than "data" and "model".
    """
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {DATA, MODEL}:
        axes = dict(mesh.shape) if isinstance(mesh, Mesh) else mesh
        raise ValueError(
            f'mesh must have the axes "data" and "model", as jax.make_mesh((2, 4), ("data", "model")); {axes=}'
        )
    return Mesh(mesh.devices, mesh.axis_names)


def is_inside(mesh: Mesh) -> bool:
    """Whether the caller is inside ``jax.shard_map`` over all axes of a mesh, so that arrays are one device's parts."""
    return set(mesh.axis_names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def is_spread(cache: Tree) -> bool:
    """Whether these are all shards of a cache over a mesh, so that a call on it has to be mapped."""
    return cache.mesh is not None and not is_inside(cache.mesh)


def over_mesh[**A, R](mesh: Mesh, function: Callable[A, R], in_specs: Tree, out_specs: Tree) -> Callable[A, R]:
    """Map a function of one device's parts over a mesh.

    JAX's types for values that vary over a mesh do not cover what kernels update in place, so they are not checked.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def cache_specs(cache: Tree) -> Tree:
    """Return the specs of a cache's leaves, as a prefix of its tree. The first axis of stacks is the layer."""
    of_stacks = cache.map_stacks(lambda *_: P(None, DATA))
    return dataclasses.replace(of_stacks, tables=OF_ROWS)


def on_shards(
    call: Callable[..., Tree], cache: Tree, rows: tuple[Tree, ...], others: int, specs: tuple[Tree, ...] | None = None
) -> Tree:
    """Make a call on each shard of a cache.

    Args:
      call: function(cache, *rows) -> (cache, *others), or the cache alone if there are no others.
      cache: one that ``is_spread``.
      rows: arrays whose first axis is the rows of a batch, a share of which is each shard's.
      others: number of other results, arrays or trees of them: of rows, or a number for each shard, which becomes
        [shards].
      specs: of the rows, where they are trees of other arrays.

    Raises:
      ValueError: the rows do not divide by the shards.
    """
    if isinstance(rows[-1], jax.Array):
        check_rows(rows[-1].shape[0], cache.mesh)

    def of_shard(cache: Tree, *rows: Tree) -> Tree:
        made = call(cache, *rows)
        return (made[0], *jax.tree.map(jnp.atleast_1d, made[1:])) if others else made

    of_cache = cache_specs(cache)
    out_specs = (of_cache, *[OF_ROWS] * others) if others else of_cache
    in_specs = of_cache, *([OF_ROWS] * len(rows) if specs is None else specs)
    return over_mesh(cache.mesh, of_shard, in_specs, out_specs)(cache, *rows)


def of_rows(ok: jax.Array, rows: int) -> jax.Array:
    """Return for each row of a batch what a call said of its shard, bool [] or [shards]: bool [rows]."""
    return jnp.repeat(ok, rows // ok.size)


def is_held_here(tree: Tree) -> bool:
    """Whether this process holds all parts of arrays, which may be NumPy's."""
    return all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree))


def on_host(tree: Tree) -> Tree:
    """Copy arrays to the host, as ``jax.device_get`` does, and also those of which other processes hold parts.

    Of those each process gets the whole, so that all must make this call. They lie over one mesh.
    """
    elsewhere = [leaf.sharding for leaf in jax.tree.leaves(tree) if not is_held_here(leaf)]
    if elsewhere:
        tree = placed(tree, elsewhere[0].mesh)
    return jax.device_get(tree)


def placed(tree: Tree, mesh: Mesh | None, spec: P = EVERYWHERE) -> Tree:
    """Lay arrays over a mesh, or on the device if there is none: its own, or some that every process has whole.

    A call of a program looks at all of its arguments again if one lies elsewhere, and weights are thousands.
    """
    return jax.device_put(tree) if mesh is None else _placing(mesh, spec)(tree)


@functools.cache
def _placing(mesh: Mesh, spec: P) -> Callable[[Tree], Tree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, spec))  # also over other processes' devices


def check_rows(rows: int, mesh: Mesh) -> None:
    """Require that the rows of a batch divide by the shards of requests. Raises ValueError."""
    if rows % (shards := mesh.shape[DATA]):
        raise ValueError(
            f"a batch of {rows} rows does not divide by the {shards} shards of mesh axis 'data': "
            f"pad it with rows of slot -1 to {-(-rows // shards) * shards}"
        )
