"""What a decode step does to weights beside multiplying by them: python -m tests.support.weights_in_steps h200

XLA may copy weights side by side to multiply them by the same input, or widen stored ones. Prints a JSON line: for each
step the shapes of such arrays in its optimised HLO.
"""

import dataclasses
import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp

import dsv4jax as d4
from dsv4jax.weights.params import param_shapes
from dsv4jax.weights.stored import Stored

Spec = jax.ShapeDtypeStruct


def decode_step(cfg: d4.DSV4Config, kind: str, weights: str, batch: int, dtype: Any) -> tuple[Any, tuple[Any, ...]]:
    """(a step of one layer, its arguments as shapes)."""
    cfg = dataclasses.replace(cfg, compress_ratios=({"swa": 0, "csa": 4, "hca": 128}[kind],))
    shapes = param_shapes(cfg, d4.AttentionType(kind), Stored() if weights == "stored" else None)
    params = jax.tree.map(lambda leaf: Spec(leaf.shape, dtype if leaf.dtype == jnp.float32 else leaf.dtype), shapes)
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=batch, max_context=2048))
    row = Spec((batch,), jnp.int32)

    def step(params, x, cache, slots, num_new):
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        y, cache = d4.attention_layer(params, x, cache, 0, slots, num_new)
        return y, d4.advance(cache, slots, num_new), ok

    return step, (params, Spec((batch, 1, cfg.hidden_size), dtype), cache, row, row)


def joined(hlo: str, numbers: int) -> list[str]:
    """The shapes of concatenations of so many numbers or more, in any computation."""
    return _large(re.findall(r"= (\w+\[[\d,]+\])\S* concatenate\(", hlo), numbers)


def widened(hlo: str, numbers: int) -> list[str]:
    """The shapes of arrays in memory of so many numbers or more, of more than a byte each, that the step makes.

    Inside a fusion an array is not in memory.
    """
    computations = re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", hlo)
    made = [
        shape
        for computation in computations
        if not re.match(r"%?(?:\w*fused|\w*fusion|wrapped_)", computation)
        for shape, op in re.findall(r"= \(?(\w+\[[\d,]+\])\S* ([\w-]+)\(", computation)
        if op not in ("parameter", "bitcast", "get-tuple-element", "tuple")
    ]
    return [shape for shape in _large(made, numbers) if not re.match(r"u8|s8|pred|f8", shape)]


def _large(shapes: list[str], numbers: int) -> list[str]:
    return [shape for shape in shapes if math.prod(map(int, shape[shape.index("[") + 1 : -1].split(","))) >= numbers]


def main(target: str) -> None:
    from tests.support.compile_for_gpu import compile_for, prepare_environment

    prepare_environment()
    cfg, report = d4.DSV4Config.flash(), {}
    smallest = (cfg.q_lora_rank + cfg.head_dim) * cfg.hidden_size
    for kind, weights, batch in (
        *(("csa", "wide", batch) for batch in (1, 8, 64)),
        *(("csa", "stored", batch) for batch in (1, 8)),
        *(("hca", weights, 8) for weights in ("wide", "stored")),
    ):
        step, given = decode_step(cfg, kind, weights, batch, jnp.bfloat16)
        hlo = compile_for(target, step, *given, donate_argnums=2).as_text() or ""
        report[f"{kind} {weights} {batch}"] = {"joined": joined(hlo, smallest), "widened": widened(hlo, smallest)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
