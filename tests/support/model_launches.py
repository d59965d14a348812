"""The launches of a layer of a model, read in what XLA makes of a step: python -m tests.support.model_launches h200

Compiles decode steps of V4-Flash's sizes where there is no GPU, and prints one JSON line: how many launches one more
layer of each kind adds to a step, of kernels beside those between two sublayers, and of XLA. ``--list`` prints first
what they are. One target per process. Needs the extra ``cross``.
"""

import argparse
import dataclasses
import json
from collections import Counter

from tests.support.compile_for_gpu import TARGETS, compile_for, prepare_environment
from tests.support.step_launches import launches

_BETWEEN = "mix_streams"  # the kernel between two sublayers
RATIOS = {"csa": 4, "hca": 128}


def launches_of(kinds: tuple[str, ...], target: str, requests: int) -> Counter[str]:
    """The launches of a step of a model whose layers are of these kinds, by what they do."""
    import jax
    import jax.numpy as jnp

    import dsv4jax as d4
    from dsv4jax.model import ModelConfig, forward, init_caches, random_model

    flash = ModelConfig.flash()
    attention = dataclasses.replace(flash.attention, compress_ratios=tuple(RATIOS[kind] for kind in kinds))
    cfg = dataclasses.replace(flash, attention=attention, num_hash_layers=0)
    params = jax.eval_shape(lambda: random_model(cfg, jax.random.key(0), drafts=0))
    caches = jax.eval_shape(lambda: init_caches(cfg, requests, 4352))

    def step(params, ids, cache, slots):
        one = jnp.ones_like(slots)
        cache, _ = d4.prepare_forward(cache, slots, one)
        logits, _, cache = forward(params, ids, cache, slots, one)
        return logits, d4.advance(cache, slots, one)

    row = jax.ShapeDtypeStruct((requests,), jnp.int32)
    ids = jax.ShapeDtypeStruct((requests, 1), jnp.int32)
    args = params, ids, caches.model, row
    return Counter(one.what for one in launches(compile_for(target, step, *args, donate_argnums=2).as_text() or ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print every launch of one more layer")
    options = parser.parse_args()
    prepare_environment()
    report = {}
    for kind in RATIOS:
        one, two = (launches_of((kind,) * n, options.target, options.batch) for n in (1, 2))
        added = two - one
        for what, count in sorted(added.items()) if options.list else ():
            print(f"    {kind} {count:3} {what}")
        kernels = sum(count for what, count in added.items() if "mosaic" in what and _BETWEEN not in what)
        others = sum(count for what, count in added.items() if "mosaic" not in what)
        report[kind] = {"kernels": kernels, "others": others}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
