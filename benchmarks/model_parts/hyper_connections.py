"""What stands between two sublayers of V4-Flash: python -m benchmarks.model_parts.hyper_connections

L2 is cold, and times are CUPTI's, of all launches together. "attention" ends with an output, "experts" with outputs of
six picks and the shared expert, which are summed here.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import Times, kernel_times, record
from dsv4jax.layer.backend import PALLAS
from dsv4jax.model import ModelConfig
from dsv4jax.model.ops import HYPER_CONNECTIONS, ExpertOutputs, Gains
from dsv4jax.model.params import StreamMix

CFG = ModelConfig.flash()
TOKENS = 1, 8, 64, 256, 4096
AFTER = "attention", "experts"


def inputs(tokens: int, after: str) -> tuple[Any, ...]:
    """Return y, streams, gains, mix and norm."""
    keys = iter(jax.random.split(jax.random.key(tokens), 9))
    n, hidden, picks = CFG.num_streams, CFG.hidden_size, CFG.experts_per_token
    numbers = (2 + n) * n

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    y: Any = normal(tokens, hidden)
    if after == "experts":
        experts = jax.random.randint(next(keys), (tokens, picks), 0, CFG.num_experts)
        y = ExpertOutputs(
            routed=normal(1, tokens, picks, hidden), shared=y, experts=experts, num_experts=CFG.num_experts
        )
    gains = Gains(post=jnp.abs(normal(tokens, n, dtype=jnp.float32)), carry=jnp.full((tokens, n, n), 1 / n))
    mix = StreamMix(
        weight=normal(numbers, n * hidden, dtype=jnp.float32) * (n * hidden) ** -0.5,
        base=normal(numbers, dtype=jnp.float32),
        scale=jnp.ones(3),
    )
    return y, normal(tokens, n, hidden), gains, mix, jnp.ones(hidden, jnp.bfloat16)


def timed(tokens: int, after: str) -> Times:
    op = HYPER_CONNECTIONS[PALLAS]

    def update(before: Any, given: Any, ticket: jax.Array) -> Any:
        y, streams, gains, mix, norm = given
        base = jax.lax.optimization_barrier(mix.base * ticket.astype(jnp.float32))
        streams, x, gains = op.between(y, streams, gains, dataclasses.replace(mix, base=base), norm, CFG)
        return x, streams, gains.post, gains.carry

    return kernel_times(update, jnp.zeros(1), inputs(tokens, after), runs=12, named="mix_streams")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--after", default=",".join(AFTER))
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    options = parser.parse_args(arguments)
    for after in options.after.split(","):
        for tokens in map(int, options.tokens.split(",")):
            times = timed(tokens, after)
            spread = f"({times.low:.2f}-{times.high:.2f}) in {times.kernels:.0f} launches"
            print(f"after {after:9}, {tokens:5} tokens: {times.median:8.2f} us {spread}", flush=True)
            record(options.out, case=f"{PALLAS} after {after} {tokens} tokens", **dataclasses.asdict(times))


if __name__ == "__main__":
    main()
