"""The launches of a layer of a model, read in what XLA makes of a step: python -m tests.support.model_launches h200

Compiles decode steps of V4-Flash's sizes where there is no GPU, and prints one JSON line: how many launches one more
layer of each kind adds to a step, of kernels beside those between two sublayers, and of XLA. ``--list`` prints first
what they are. With ``--devices 2`` they are those of each of two GPUs that share a model. With ``--stages 3`` it prints
instead how many launches store the keys of a DSpark block of three stages in a pass, and how many of them the third one
adds. One target per process. Needs the extra ``cross``.
"""

import argparse
import dataclasses
import json
from collections import Counter

from tests.support.compile_for_gpu import TARGETS, compile_for, meshes, prepare_environment
from tests.support.step_launches import launches

_BETWEEN = "mix_streams"  # the kernel between two sublayers
RATIOS = {"csa": 4, "hca": 128}


def step_of(ratios: tuple[int, ...], requests: int, *, drafts: int = 0, invariant: bool = False):
    """A decode step of a model whose layers have these ratios, or one with so many drafts, and its arguments.

    The third of them, the cache, is donated.
    """
    import jax
    import jax.numpy as jnp

    import dsv4jax as d4
    from dsv4jax.model import ModelConfig, forward, init_caches, random_model, stage_forward

    flash = ModelConfig.flash()
    attention = dataclasses.replace(flash.attention, compress_ratios=ratios)
    cfg = dataclasses.replace(flash, attention=attention, num_hash_layers=0)
    params = jax.eval_shape(lambda: random_model(cfg, jax.random.key(0), drafts=0))
    caches = jax.eval_shape(lambda: init_caches(cfg, requests, 4352, invariant=invariant))

    def step(params, ids, cache, slots):
        one = jnp.ones_like(slots)
        cache, _ = d4.prepare_forward(cache, slots, one)
        logits, _, cache = forward(params, ids, cache, slots, one)
        return logits, d4.advance(cache, slots, one)

    def draft(params, ids, cache, slots):
        count = jnp.full_like(slots, 1 + drafts)
        cache, _ = d4.prepare_forward(cache, slots, count)
        logits, _, cache, staged = stage_forward(params, ids, cache, slots, count)
        accepted = 1 + jnp.argmax(logits[:, :, 0], axis=1).astype(jnp.int32)
        return logits, d4.commit(cache, staged, accepted)

    row = jax.ShapeDtypeStruct((requests,), jnp.int32)
    ids = jax.ShapeDtypeStruct((requests, 1 + drafts), jnp.int32)
    return draft if drafts else step, (params, ids, caches.model, row)


def keys_launches(stages: int, options: argparse.Namespace) -> Counter[str]:
    """The launches that store the keys of a DSpark block of so many stages in a pass with 5 drafts, by what they do."""
    import jax
    import jax.numpy as jnp

    from dsv4jax.model import DSparkConfig, ModelConfig, init_caches, random_model
    from dsv4jax.model.generation.drafting import Fed, drafter

    flash, drafts = ModelConfig.flash(), 5
    attention = dataclasses.replace(flash.attention, compress_ratios=(RATIOS["csa"],))
    spark = DSparkConfig(taps=(0,), noise_token=0, stages=stages)
    cfg = dataclasses.replace(flash, attention=attention, num_hash_layers=0, dspark=spark)
    params = jax.eval_shape(lambda: random_model(cfg, jax.random.key(0)))
    cache = jax.eval_shape(lambda: init_caches(cfg, options.batch, 4352, drafts)).drafts

    def step(params, fed, cache):
        return drafter(params).store(params, fed, cache, None)

    def given() -> Fed:
        row = jnp.zeros(options.batch, jnp.int32)
        ids = jnp.zeros((options.batch, 1 + drafts), jnp.int32)
        seen = jnp.zeros((*ids.shape, cfg.hidden_size), jnp.bfloat16)
        return Fed(seen=seen, following=ids, slots=row, count=row)

    fed = jax.eval_shape(given)
    program = compile_for(options.target, step, params, fed, cache, donate_argnums=2)
    return Counter(one.what for one in launches(program.as_text() or ""))


def on_devices(target: str, count: int, args):
    """The arguments of a step of ``step_of`` as they lie over GPUs that share a model, and their abstract mesh."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import dsv4jax as d4
    from dsv4jax.model.inside.devices import weight_specs

    mesh, described = meshes(target, (1, count), ("data", "model"))

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params, ids, cache, slots = args
    params = dataclasses.replace(params, mesh=described)
    params = jax.tree.map(placed, params, weight_specs(params))
    cache = dataclasses.replace(d4.cache.abstract_cache(cache.plan, mesh), mesh=described)
    ids, slots = (placed(each, PartitionSpec()) for each in (ids, slots))
    return (params, ids, cache, slots), described


def launches_of(kinds: tuple[str, ...], options: argparse.Namespace) -> Counter[str]:
    """The launches of a step of a model whose layers are of these kinds, by what they do."""
    import jax

    step, args = step_of(tuple(RATIOS[kind] for kind in kinds), options.batch, invariant=options.invariant)
    if options.devices == 1:
        program = compile_for(options.target, step, *args, donate_argnums=2)
    else:
        args, described = on_devices(options.target, options.devices, args)
        with jax.sharding.use_abstract_mesh(described):
            program = jax.jit(step, donate_argnums=2).lower(*args).compile()
    return Counter(one.what for one in launches(program.as_text() or ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--invariant", action="store_true", help="of caches that are invariant")
    parser.add_argument("--devices", type=int, default=1, help="that share the model's experts")
    parser.add_argument("--stages", type=int, help="at least 2, of a DSpark block whose keys are stored")
    parser.add_argument("--list", action="store_true", help="print every launch that is counted")
    options = parser.parse_args()
    prepare_environment()
    if options.stages:
        less, found = (keys_launches(stages, options) for stages in (options.stages - 1, options.stages))
        for what, count in sorted(found.items()) if options.list else ():
            print(f"    keys {count:3} {what}")
        print(json.dumps({"all": found.total(), "last stage": found.total() - less.total()}))
        return
    report = {}
    for kind in RATIOS:
        one, two = (launches_of((kind,) * n, options) for n in (1, 2))
        added = two - one
        for what, count in sorted(added.items()) if options.list else ():
            print(f"    {kind} {count:3} {what}")
        kernels = sum(count for what, count in added.items() if "mosaic" in what and _BETWEEN not in what)
        others = sum(count for what, count in added.items() if "mosaic" not in what)
        report[kind] = {"kernels": kernels, "others": others}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
