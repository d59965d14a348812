"""What a decode step is lowered to: python -m tests.support.lowered_programs h200

Compilation caches look it up by that. Prints a JSON line. The step is lowered twice in one process, with another
program in between. What ``jax.vmap`` makes of ``prepare_forward`` and of a layer is told too.
"""

import hashlib
import json
import re
import sys

from tests.support.compile_for_gpu import lower_for, prepare_environment


def main(target: str) -> None:
    prepare_environment()
    import jax

    import dsv4jax as d4
    from tests.support import in_place

    cfg, (x, slots, num_new) = in_place.PUBLISHED, in_place.batch_specs(1)
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=8, max_context=4096))

    def lowered(function, *given) -> str:
        jax.clear_caches()  # so that kernels are made anew
        params = in_place.abstract_params(cfg)
        return lower_for(target, function, params, *given, donate_argnums=2).as_text()

    step = in_place.whole_step, x, cache, slots, num_new
    first = lowered(*step)
    chunk, *_ = in_place.batch_specs(5)
    lowered(in_place.whole_step, chunk, cache, slots, num_new)

    def mapped(function, *given, in_axes) -> str:
        args = [
            arg if axis is None else jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), arg)
            for arg, axis in zip(given, in_axes, strict=True)
        ]
        return lower_for(target, jax.vmap(function, in_axes=in_axes), *args).as_text()

    try:
        refusal = mapped(
            in_place.whole_step, in_place.abstract_params(cfg), *step[1:], in_axes=(None, 0, None, None, None)
        )
    except ValueError as error:
        refusal = str(error)
    kernels = re.findall(r'custom_call @mosaic_gpu_v2.*?kernel_hash = "([^"]*)"', first)
    report = {
        "first": hashlib.sha256(first.encode()).hexdigest(),
        "again": hashlib.sha256(lowered(*step).encode()).hexdigest(),
        "mapped grants": "mosaic_gpu" in mapped(d4.prepare_forward, cache, slots, num_new, in_axes=(0, None, 0)),
        "mapped layer": refusal,
        "launches": len(kernels),
        "kernels": len(set(kernels)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
