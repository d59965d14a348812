"""A decode step of V4-Flash's layers compiled for four GPUs: python -m tests.support.compile_sharded h200

Requests are split over two shards, and heads over two. Prints what the program does as one JSON line. Needs the extra
``cross``.
"""

import collections
import dataclasses
import functools
import json
import re
import sys

from tests.support.compile_for_gpu import meshes, prepare_environment


def main(target: str) -> None:
    prepare_environment()
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import dsv4jax as d4
    from dsv4jax.cache.sharding import shard_plan
    from dsv4jax.weights.params import param_shapes
    from tests.support.in_place import memory_of

    mesh, described = meshes(target, (2, 2), ("data", "model"))
    cfg = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128))
    plan = d4.plan_cache(cfg, max_requests=8, max_context=8192)
    weights, specs = (
        [d4.sharding.params_specs(cfg, layer, mesh) for layer in range(3)],
        d4.sharding.partition_specs(plan, mesh),
    )
    rows = P("data")

    @functools.partial(
        jax.shard_map,
        mesh=described,
        in_specs=(weights, rows, specs, rows, rows),
        out_specs=(rows, specs, rows),
        check_vma=False,
    )
    def step(params, x, cache, slots, num_new):
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        for layer in range(3):
            y, cache = d4.attention_layer(
                params[layer], x, cache, layer, slots, num_new, backend="pallas", model_axis="model"
            )
            x = x + y
        return x, d4.advance(cache, slots, num_new), ok[None]

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = [param_shapes(cfg, layer.attn) for layer in d4.config.layer_schedule(cfg)]
    params = jax.tree.map(lambda leaf, spec: array(leaf.shape, jnp.bfloat16, spec), shapes, weights)
    x, row = array((8, 1, cfg.hidden_size), jnp.bfloat16, rows), array((8,), jnp.int32, rows)
    cache = d4.cache.abstract_cache(plan, mesh)
    with jax.sharding.use_abstract_mesh(described):
        program = jax.jit(step, donate_argnums=2).lower(params, x, cache, row, row).compile()
    text = program.as_text()
    assert text is not None
    collectives = re.findall(r" (all-\w+|collective-\w+|ragged-[\w-]+|reduce-scatter)(?:-start)?\(", text)
    report = {
        "cache of a shard": shard_plan(plan, mesh, "data").memory_bytes(),
        "aliased": memory_of(program).alias_size_in_bytes,
        "collectives": collections.Counter(collectives),
        "kernels": text.count('custom_call_target="mosaic_gpu'),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
