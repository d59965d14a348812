"""The head of V4-Flash, and drawing tokens from its logits: python -m benchmarks.model_parts.head

L2 is cold before the product. Times are CUPTI's, of all launches together.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import Times, kernel_events, kernel_times, record
from dsv4jax.model import ModelConfig, Sampling
from dsv4jax.model.ops import HEAD

CFG = ModelConfig.flash()
TOKENS = 1, 8, 64


def head_times(tokens: int, head: jax.Array) -> Times:
    op = HEAD.of(None, CFG, head, head.dtype)
    x = jax.random.normal(jax.random.key(tokens), (tokens, CFG.hidden_size), head.dtype)

    def update(logits: jax.Array, inputs: Any, ticket: jax.Array) -> jax.Array:
        x, head = inputs
        with jax.named_scope("wait_for"):
            x = jax.lax.optimization_barrier(x * ticket.astype(x.dtype))
        return op.logits(x, head)

    state = jnp.zeros((tokens, CFG.vocab_size))
    return kernel_times(update, state, (x, head), named="gemm|nvjet|cutlass|cublas|dot|xmma|product|reduce")


def draw_us(tokens: int) -> tuple[float, int]:
    """Microseconds of a draw with top-p, and its launches."""
    logits = 3 * jax.random.normal(jax.random.key(tokens), (tokens, CFG.vocab_size))

    def draw(logits: jax.Array, sampling: Sampling) -> jax.Array:
        return sampling.draw(logits, jax.random.split(sampling.key, tokens))

    events = kernel_events(jax.jit(draw), logits, Sampling.of(1.0, 0.9))
    return sum(ms for _, ms in events) * 1e3, len(events)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    options = parser.parse_args(arguments)
    head = jax.random.normal(jax.random.key(0), (CFG.vocab_size, CFG.hidden_size), jnp.bfloat16)
    for tokens in map(int, options.tokens.split(",")):
        times = head_times(tokens, head)
        spread = f"({times.low:.1f}-{times.high:.1f}) in {times.kernels:g} launches"
        print(f"head, {tokens:5} tokens: {times.median:8.1f} us {spread}", flush=True)
        record(options.out, case=f"head {tokens} tokens", **dataclasses.asdict(times))
        us, launches = draw_us(tokens)
        print(f"draw, {tokens:5} tokens: {us:8.1f} us in {launches} launches", flush=True)
        record(options.out, case=f"draw {tokens} tokens", us=us, launches=launches)


if __name__ == "__main__":
    main()
