"""Several devices: requests and their blocks split over a data axis, attention heads over a model axis.

A step runs in ``jax.shard_map``. Each shard of the data axis is a complete cache with its own slots, blocks and
allocator. Slots and block ids are local to their shard. Row b of a batch [B] is served by shard b // (B / shards); pad
a batch that does not divide with slot -1. The plan remains that of the whole cache.

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    cache, specs = init_cache(plan, mesh), partition_specs(plan, mesh)
    weights, rows = [params_specs(cfg, layer, mesh) for layer in range(cfg.num_layers)], P("data")

    @functools.partial(jax.jit, donate_argnames="cache")
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(weights, rows, specs, rows, rows),
        out_specs=(rows, specs, rows),
        check_vma=False,
    )
    def forward(params, x, cache, slots, num_new):
        cache, ok = prepare_forward(cache, slots, num_new)
        for layer in range(cfg.num_layers):
            y, cache = attention_layer(params[layer], x, cache, layer, slots, num_new, model_axis="model")
            x = x + y
        return x, advance(cache, slots, num_new), ok[None]    # bool [shards]: one ok per shard

There is only one key-value head, so all shards of the model axis hold the same cache and write the same rows to it.
Each computes its own heads. The only collective of a layer is the sum of its output over the model axis, and no step
moves any part of the cache between devices.

``check_vma`` must be off where kernels run, because JAX's types for values that vary over a mesh do not cover what the
kernels update in place.

A cache on a mesh of one shard can be used outside ``shard_map`` too, if the mesh's axes are automatic
(``axis_types=(AxisType.Auto,)``). With explicit axes, the default of ``jax.make_mesh``, JAX requires an output sharding
for every gather.

The attention kernels need a multiple of 8 heads on each shard. Else ``backend=None`` computes attention in XLA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4jax.cache.cache import KVCache, empty_cache
from dsv4jax.checks import check_concrete, integer
from dsv4jax.plan import CachePlan, shard_plan


def partition_specs(plan: CachePlan, mesh: Mesh, axis: str = "data") -> KVCache:
    """Return a ``PartitionSpec`` for each leaf of a cache split over one mesh axis, for ``jax.shard_map``.

    Args:
      plan: the plan of the whole cache.
      mesh: the devices.
      axis: the mesh axis over which requests and blocks are split.

    Raises:
      ValueError: the mesh does not have the axis, or requests or blocks do not divide by its size.
    """
    shard_plan(plan, mesh, axis)

    def spec(path: jax.tree_util.KeyPath, _: object) -> P:
        return P(axis) if path[0].name == "tables" else P(None, axis)  # the first axis of stacks is the layer

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(functools.partial(empty_cache, plan)))


def shardings(plan: CachePlan, mesh: Mesh, axis: str = "data") -> KVCache:
    """Return a ``NamedSharding`` for each leaf of ``init_cache(plan, mesh)``, for ``device_put``, jit and restoring.

    The arguments and errors are those of ``partition_specs``.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(plan, mesh, axis))


def local_shards(cache: KVCache) -> list[int]:
    """Return the numbers of the shards that this process's devices hold: all of them, where there is one process.

    Raises:
      ValueError: the cache is traced.
    """
    check_concrete("local_shards", cache, "call it on a cache that has come back")
    parts = cache.tables.num_free.addressable_shards  # int32 [shards]
    return sorted({part.index[0].start or 0 for part in parts})


def shard_of(cache: KVCache, number: int) -> KVCache:
    """Return one shard of a cache over a mesh as a cache of its own, on its device, for what runs on the host.

    Nothing is copied between devices. ``describe``, ``verify`` and ``extract`` take the result, with the shard's slots.

    Raises:
      ValueError: there is no such shard, none of this process's devices holds it, or the cache is traced.
    """
    check_concrete("shard_of", cache, "call it on a cache that has come back")
    shards, number = cache.tables.num_free.shape[0], integer("number", number, 0)
    if number >= shards:
        raise ValueError(f"number must be in [0, {shards}), the shards of the cache, got {number}")

    def part(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        axis = 0 if path[0].name == "tables" else 1
        first = number * (leaf.shape[axis] // shards)
        held = [one.data for one in leaf.addressable_shards if (one.index[axis].start or 0) == first]
        if not held:
            raise ValueError(f"shard {number} is held by devices of another process")
        return held[0]

    plan = cache.plan
    plan = dataclasses.replace(plan, max_requests=plan.max_requests // shards, num_blocks=plan.num_blocks // shards)
    return dataclasses.replace(jax.tree_util.tree_map_with_path(part, cache), plan=plan, mesh=None)
