"""Empty caches: on one device, over a mesh, or as shapes alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from dsv4jax.cache.cache import KVCache, empty_cache
from dsv4jax.cache.sharding import partition_specs, shardings
from dsv4jax.checks import check_type
from dsv4jax.plan import CachePlan, shard_plan


def init_cache(plan: CachePlan, mesh: Mesh | None = None, axis: str = "data") -> KVCache:
    """Return an empty cache, on the default device or split over an axis of a mesh as ``sharding`` describes.

    Args:
      plan: the plan of the whole cache.
      mesh: the devices. None means the default device.
      axis: the mesh axis over which requests and blocks are split.

    Raises:
      ValueError: the mesh does not have the axis, or requests or blocks do not divide by its size.
    """
    check_type("plan", plan, CachePlan)
    if mesh is None:
        return _empty_cache(plan)
    local = shard_plan(plan, mesh, axis)

    def one_shard() -> KVCache:
        return dataclasses.replace(empty_cache(local), plan=plan)

    specs = partition_specs(plan, mesh, axis)
    return jax.jit(jax.shard_map(one_shard, mesh=mesh, in_specs=(), out_specs=specs))()


# Jitted: leaf by leaf, each shape would be a program of its own to compile.
_empty_cache = jax.jit(empty_cache, static_argnums=0)


def abstract_cache(plan: CachePlan, mesh: Mesh | None = None, axis: str = "data") -> KVCache:
    """Return the shapes, dtypes and shardings of ``init_cache`` without allocating it, for lowering and restoring.

    The arguments and errors are those of ``init_cache``. Leaves are ``jax.ShapeDtypeStruct``.
    """
    cache = jax.eval_shape(functools.partial(init_cache, plan, mesh, axis))
    if mesh is None:
        return cache
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        cache,
        shardings(plan, mesh, axis),
    )
