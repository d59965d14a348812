"""Several devices: requests and their blocks over a data axis, attention heads over a model axis.

A step runs in ``jax.shard_map``. Each shard of the data axis is a cache of its own, with slots, blocks and an allocator
that no other shard touches: slots and block ids are local to it, row b of a batch [B] is served by shard
b // (B / shards), and a batch that does not divide is padded with slot -1. The plan stays that of the whole.

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
        return x, advance(cache, slots, num_new), ok[None]    # bool [shards]: each speaks for itself

There is one key-value head, so every shard of the model axis holds the same cache and writes the same rows to it; each
computes its own heads, and a layer's one collective is the sum of its output. No step moves a part of the cache.
``check_vma`` must be off where kernels run: JAX's types do not cover what they update in place.
A cache on a mesh of one shard may be used outside ``shard_map`` too, where the mesh's axes are automatic
(``axis_types=(AxisType.Auto,)``): explicit ones, the default of ``jax.make_mesh``, ask every gather where its result
belongs.
The attention kernel needs a multiple of 64 heads on each shard; with fewer, ``backend=None`` attends in XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4jax.cache.cache import KVCache, empty_cache
from dsv4jax.plan import CachePlan, shard_plan


def partition_specs(plan: CachePlan, mesh: Mesh, axis: str = "data") -> KVCache:
    """A ``PartitionSpec`` for each leaf of a cache, for ``jax.shard_map``: the whole of it over one mesh axis.

    Raises:
      ValueError: the mesh lacks the axis, or requests or blocks do not divide by it.
    """
    shard_plan(plan, mesh, axis)

    def spec(path: Any, _: Any) -> P:
        return P(axis) if path[0].name == "tables" else P(None, axis)  # stacks have their layers first

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(functools.partial(empty_cache, plan)))


def shardings(plan: CachePlan, mesh: Mesh, axis: str = "data") -> KVCache:
    """A ``NamedSharding`` for each leaf of ``init_cache(plan, mesh)``, for ``device_put``, jit and restoring."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(plan, mesh, axis))
