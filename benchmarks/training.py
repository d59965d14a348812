"""A training step of low-rank deltas: its time, and its memory against what ``plan_memory`` says.

    python -m benchmarks.training                # two layers of V4-Flash, 4,096 tokens
    python -m benchmarks.training --size tiny    # anywhere

The model is random and in the published forms, FP8 and FP4. The step is ``forward_sequences``, a cross entropy, its
derivative by the deltas, and Adam. All of it is plain JAX, compiled by XLA.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.model import (
    ModelConfig,
    TrainingStep,
    combine,
    forward_sequences,
    partition,
    plan_memory,
    random_model,
    with_deltas,
)

RANKS = {"q_a": 16, "q_b": 16, "kv": 16, "o_a": 16, "o_b": 16, "experts": 8}
FORMATS = "fp8_tile64", "mxfp4"  # of rows, and of indexer keys


def sizes(name: str, ratios: tuple[int, ...]) -> ModelConfig:
    cfg = ModelConfig.flash() if name == "flash" else ModelConfig.tiny()
    attention = dataclasses.replace(cfg.attention, compress_ratios=ratios)
    return dataclasses.replace(cfg, attention=attention, num_hash_layers=0)


def loss(deltas: Any, rest: Any, ids: jax.Array) -> jax.Array:
    likely = jax.nn.log_softmax(forward_sequences(combine(deltas, rest), ids[:, :-1], None, *FORMATS))
    return -jnp.mean(jnp.take_along_axis(likely, ids[:, 1:, None], -1))


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, rest: Any, ids: jax.Array, number: jax.Array) -> tuple[Any, jax.Array]:
    deltas, mean, square = state
    value, grads = jax.value_and_grad(loss)(deltas, rest, ids)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, grads)

    def moved(leaf: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return leaf - 1e-3 * (m / (1 - 0.9**number)) / (jnp.sqrt(s / (1 - 0.99**number)) + 1e-8)

    return (jax.tree.map(moved, deltas, mean, square), mean, square), value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=["flash", "tiny"], default="flash")
    parser.add_argument("--ratios", type=int, nargs="+", default=[4, 128], help="of the layers, which are so many")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    cfg, ids = sizes(args.size, tuple(args.ratios)), jax.ShapeDtypeStruct((1, args.tokens + 1), jnp.int32)

    def make() -> Any:
        return with_deltas(random_model(cfg, jax.random.key(0), drafts=0), RANKS, jax.random.key(1))

    params = jax.eval_shape(make) if args.compile_only else make()
    deltas, rest = partition(params, "deltas")
    zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
    state = deltas, zeros(deltas), zeros(deltas)
    start = time.perf_counter()
    compiled = step.lower(state, rest, ids, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    memory: Any = compiled.memory_analysis()
    plan = plan_memory(cfg, drafts=0, training=TrainingStep(tokens=args.tokens, ranks=RANKS)).training
    assert plan is not None
    gib = 1 / (1 << 30)
    device = jax.devices()[0]
    print(f"{device.device_kind}: {args.size}, ratios {args.ratios}, {args.tokens} tokens, ranks {RANKS}")
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    print(f"planned {plan}")
    print(f"temporaries: planned {plan.temporaries * gib:.2f} GiB, compiled {memory.temp_size_in_bytes * gib:.2f} GiB")
    print(f"arguments {memory.argument_size_in_bytes * gib:.2f} GiB")
    if args.compile_only:
        return
    given = jax.random.randint(jax.random.key(2), ids.shape, 0, cfg.vocab_size, jnp.int32)
    for number in range(1, args.steps + 1):
        start = time.perf_counter()
        state, value = jax.block_until_ready(compiled(state, rest, given, jnp.float32(number)))
        print(f"step {number}: {time.perf_counter() - start:.3f} s, loss {float(value):.4f}")
    stats = device.memory_stats() or {}
    print(f"peak of the process {stats.get('peak_bytes_in_use', 0) * gib:.2f} GiB")


if __name__ == "__main__":
    main()
