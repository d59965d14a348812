"""The kernels of passes that are captured or given choices: python -m tests.support.pass_kernels h200

Lowers decode steps of V4-Flash's sizes where there is no GPU, and prints one JSON line: how often each kernel is called
in a plain step, in one that captures all there is, and in one that is given its choices. One target per process. Needs
the extra ``cross``.
"""

import dataclasses
import json
import re
import sys
from collections import Counter
from typing import Any

from tests.support.compile_for_gpu import lower_for, prepare_environment


def kernels_of(text: str) -> Counter[str]:
    """The kernels that a lowered program calls, by the names of the functions that launch them."""
    places = dict(re.findall(r'^(#loc\d+) = loc\("([^"/]*)', text, re.MULTILINE))
    return Counter(
        places[place] for place in re.findall(r"custom_call @mosaic_gpu\w*\(.*loc\((#loc\d+)\)$", text, re.M)
    )


def main(target: str) -> None:
    prepare_environment()
    import jax
    import jax.numpy as jnp

    from dsv4jax.model import Choices, ModelConfig, forward, init_caches, random_model
    from dsv4jax.model.inside.captures import NAMES

    flash = ModelConfig.flash()
    attention = dataclasses.replace(flash.attention, compress_ratios=(0, 4, 128))
    cfg = dataclasses.replace(flash, attention=attention, num_hash_layers=1)
    batch = 4
    params = jax.eval_shape(lambda: random_model(cfg, jax.random.key(0), drafts=0))
    cache = jax.eval_shape(lambda: init_caches(cfg, batch, 4096).model)
    ids, row = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, 1), (batch,)))
    choices = jax.eval_shape(
        lambda: Choices(
            experts=jnp.zeros((cfg.num_layers, batch, 1, cfg.experts_per_token), jnp.int16),
            entries=jnp.zeros((1, batch, 1, attention.indexer_top_k), jnp.int16),
        )
    )

    def kernels(choices: Choices | None = None, **looking: Any) -> Counter[str]:
        def step(params, ids, cache, slots, num_new, choices):
            return forward(params, ids, cache, slots, num_new, choices=choices, **looking)

        lowered = lower_for(target, step, params, ids, cache, row, row, choices)
        return kernels_of(lowered.as_text(debug_info=True))

    print(json.dumps({"plain": kernels(), "captures": kernels(capture=NAMES), "choices": kernels(choices)}))


if __name__ == "__main__":
    main(sys.argv[1])
