"""A training step of low-rank deltas: its time, and its memory against what ``plan_memory`` says.

    python -m benchmarks.training                # two layers of V4-Flash, 4,096 tokens
    python -m benchmarks.training --size tiny    # anywhere

The model is random and in the published forms, FP8 and FP4. The step is ``forward_sequences``, a cross entropy, its
derivative by the deltas, and Adam. All of it is plain JAX, compiled by XLA. The plan's gradients are temporaries here,
because Adam is part of the compiled step.

The peak is that of the device's allocator, with XLA_PYTHON_CLIENT_PREALLOCATE=false. Weights and the state of Adam are
part of it. It is that of the steps where it is above the peak before them, when the weights were made.

XLA tries many variants of each product on a GPU, which takes minutes. That is left out, and products are cuBLAS's, with
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
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
GIB = 1 << 30


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
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after a first one")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    cfg, ids = sizes(args.size, tuple(args.ratios)), jax.ShapeDtypeStruct((1, args.tokens + 1), jnp.int32)

    def make() -> Any:
        return with_deltas(random_model(cfg, jax.random.key(0), drafts=0), RANKS, jax.random.key(1))

    device, start = jax.devices()[0], time.perf_counter()
    print(f"{device.device_kind}: {args.size}, ratios {args.ratios}, {args.tokens} tokens, ranks {RANKS}", flush=True)
    deltas, rest = partition(jax.eval_shape(make), "deltas")
    lowered = step.lower((deltas, deltas, deltas), rest, ids, jax.ShapeDtypeStruct((), jnp.float32))
    with ThreadPoolExecutor() as threads:
        compiling = threads.submit(lowered.compile)
        if not args.compile_only:  # weights are made meanwhile
            deltas, rest = jax.block_until_ready(partition(make(), "deltas"))
            print(f"weights made after {time.perf_counter() - start:.1f} s", flush=True)
        compiled = compiling.result()
    memory: Any = compiled.memory_analysis()
    plan = plan_memory(cfg, drafts=0, training=TrainingStep(tokens=args.tokens, ranks=RANKS)).training
    assert plan is not None
    seconds = time.perf_counter() - start
    print(f"compiled after {seconds:.1f} s by jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}")
    print(plan)
    arguments, planned = memory.argument_size_in_bytes, plan.temporaries + plan.gradients
    show("weights and state", arguments)
    show("temporaries, planned", planned)
    show("temporaries, compiled", memory.temp_size_in_bytes)
    sys.stdout.flush()
    if args.compile_only:
        return
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = deltas, zeros(deltas), zeros(deltas)
    given = jax.random.randint(jax.random.key(2), ids.shape, 0, cfg.vocab_size, jnp.int32)
    show("in use before", bytes_of(device, "bytes_in_use"))
    show("peak before", bytes_of(device, "peak_bytes_in_use"))
    times, losses = [], []
    for number in range(1, args.steps + 2):
        start = time.perf_counter()
        state, value = jax.block_until_ready(compiled(state, rest, given, jnp.float32(number)))
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(f"{float(value):.4f}")
    show("peak, planned", arguments + planned)
    show("peak, seen", bytes_of(device, "peak_bytes_in_use"))
    first, *times = times
    spread = f"{min(times):.1f} to {max(times):.1f}"
    print(f"a step: median {statistics.median(times):.1f} ms of {args.steps}, {spread}; the first took {first:.0f} ms")
    print(f"losses: {', '.join(losses)}")


def show(name: str, count: int) -> None:
    print(f"{name:<22} {count / GIB:7.2f} GiB")


def bytes_of(device: Any, name: str) -> int:
    """Return a number of the device's allocator; 0 on a CPU, which has none."""
    return (device.memory_stats() or {}).get(name, 0)


if __name__ == "__main__":
    main()
