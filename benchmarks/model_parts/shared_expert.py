"""The shared expert of a layer of V4-Flash, stored in FP8: python -m benchmarks.model_parts.shared_expert

L2 is cold, and times are CUPTI's, of all launches of products together.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels.timing import Times, kernel_times, record
from dsv4jax.model import ModelConfig
from dsv4jax.model.params import Experts
from dsv4jax.model.plain.experts import of_shared, projections_of
from dsv4jax.weights.stored import StoredWeight

CFG = ModelConfig.flash()
TOKENS = 1, 8, 64, 256


def random_weight(key: jax.Array, outputs: int, inputs: int) -> StoredWeight:
    codes = jax.random.bits(key, (outputs, inputs), jnp.uint8) & 0xBF  # numbers below 2
    scales = jnp.full((outputs // 128, inputs // 128), 121, jnp.uint8)
    return StoredWeight(
        codes=lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
        scales=lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu),
    )


def times_of(tokens: int, weights: tuple[StoredWeight, StoredWeight]) -> Times:
    x = jax.random.normal(jax.random.key(tokens), (tokens, CFG.hidden_size), jnp.bfloat16)

    def update(before: jax.Array, inputs: Any, ticket: jax.Array) -> jax.Array:
        x, (gate_up, down) = inputs
        with jax.named_scope("wait_for"):
            x = lax.optimization_barrier(x * ticket.astype(x.dtype))
        experts = Experts(gate_up=gate_up, down=down, shared_gate_up=gate_up, shared_down=down)  # only shared ones
        return of_shared(x, experts, CFG, projections_of(None))

    return kernel_times(update, jnp.zeros_like(x), (x, weights), runs=12, named="product|silu|logistic|select|clamp")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    options = parser.parse_args(arguments)
    keys, width, hidden = jax.random.split(jax.random.key(0)), CFG.expert_width, CFG.hidden_size
    weights = random_weight(keys[0], 2 * width, hidden), random_weight(keys[1], hidden, width)
    for tokens in map(int, options.tokens.split(",")):
        times = times_of(tokens, weights)
        spread = f"({times.low:.2f}-{times.high:.2f}) in {times.kernels:g} launches"
        print(f"{tokens:5} tokens: {times.median:8.2f} us {spread}", flush=True)
        record(options.out, case=f"shared expert {tokens} tokens", **dataclasses.asdict(times))


if __name__ == "__main__":
    main()
