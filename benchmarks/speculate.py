"""What does a draft cost? python -m benchmarks.speculate

Times stage and commit of four tokens in one program, against one decode step, for 64 requests at all phases with 32K
tokens each, in all layers of V4-Flash with their matrix products in bf16. The layers of a kind share one set of
weights, which is too large for L2, and cached rows are random bytes. Both programs advance the same cache and are timed
in turns, so that drift affects both equally. Prints medians with their spread.
"""

import argparse
import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from benchmarks.kernels.reads import long_cache
from benchmarks.kernels.timing import kernel_events

OPS = (
    *("cache_step", "append_chunk", "append_swa", "stage_entries"),
    *("indexer_queries", "indexer_scores", "top_k", "attention_queries", "decode_attention"),
)
ROOM = 1024  # tokens that a request can grow by


def forward(
    params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array, num_new: jax.Array
) -> tuple[jax.Array, d4.KVCache, jax.Array]:
    """Store new tokens of each request, with a layer's weights in ``params[layer]``. Returns x, the cache, and ok."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    for layer in range(cache.plan.cfg.num_layers):
        x, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, residual=x)
    return x, d4.advance(cache, slots, num_new), ok


def decode(
    params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array, count: jax.Array
) -> tuple[jax.Array, d4.KVCache]:
    """Decode one token of each request. ``count`` is not used."""
    x, cache, ok = forward(params, x[:, :1], cache, slots, jnp.ones_like(count))
    return ok & jnp.isfinite(x[0, 0, 0]), cache


def speculate(
    params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array, count: jax.Array
) -> tuple[jax.Array, d4.KVCache]:
    """Stage all of x as drafts, and commit the first ``count`` [B] tokens of each request."""
    num_new = jnp.full_like(count, x.shape[1])
    cache, granted = d4.prepare_forward(cache, slots, num_new)
    staged = []
    for layer in range(cache.plan.cfg.num_layers):
        x, cache, rows = d4.stage(params[layer], x, cache, layer, slots, num_new, residual=x)
        staged.append(rows)
    cache, stored = d4.commit(cache, staged, count)
    return granted & stored & jnp.isfinite(x[0, 0, 0]), cache


def compile_all(programs: list[Any]) -> list[Any]:
    """Compile lowered programs at the same time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda program: program.compile(), programs))


def us_per_step(
    program: Any, params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array, count: jax.Array, *, steps: int
) -> tuple[float, d4.KVCache]:
    """Return microseconds per step over several in a row, and the cache, which is donated to each."""
    jax.block_until_ready(cache)
    oks = []
    begin = time.perf_counter()
    for _ in range(steps):
        ok, cache = program(params, x, cache, slots, count)
        oks.append(ok)
    jax.block_until_ready((oks, cache))
    elapsed = time.perf_counter() - begin
    assert all(bool(ok) for ok in oks), "a step was refused"
    return elapsed * 1e6 / steps, cache


STEPS = {"decode step": decode, "stage and commit": speculate}


class Programs:
    """The compiled steps and one cache, which is donated to each step and returned by it."""

    def __init__(self, plan: d4.CachePlan, context: int, tokens: int, dtype: Any):
        cfg = plan.cfg
        schedule = d4.config.layer_schedule(cfg)
        first = {spec.attn: spec.layer_idx for spec in reversed(schedule)}
        params = {kind: d4.init_attention_params(jax.random.key(i), cfg, i, dtype) for kind, i in first.items()}
        self.params = [params[spec.attn] for spec in schedule]
        self.slots = jnp.asarray(np.random.default_rng(1).permutation(plan.max_requests), jnp.int32)
        self.x = jax.random.normal(jax.random.key(9), (plan.max_requests, tokens, cfg.hidden_size), dtype)
        self.count = jnp.full(plan.max_requests, tokens, jnp.int32)
        self.cache = long_cache(plan, context)
        begin = time.perf_counter()
        lowered = [jax.jit(step, donate_argnums=2).lower(*self.given) for step in STEPS.values()]
        self._compiled = dict(zip(STEPS, compile_all(lowered), strict=True))
        print(f"traced and compiled in {time.perf_counter() - begin:.0f} s", flush=True)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.params, self.x, self.cache, self.slots, self.count

    def time(self, name: str, steps: int) -> float:
        """Return the microseconds per step, over several steps in a row."""
        us, self.cache = us_per_step(self._compiled[name], *self.given, steps=steps)
        return us


def print_parts(programs: Programs) -> None:
    """Print the microseconds of each kernel.

    The program is compiled again without donation, because a profiled program runs twice.
    """
    for name, step in STEPS.items():
        events = [(kernel, ms) for kernel, ms in kernel_events(jax.jit(step), *programs.given) if "copy" not in kernel]
        parts = {op: sum(ms for kernel, ms in events if op in kernel) * 1e3 for op in OPS}
        rest = sum(ms for _, ms in events) * 1e3 - sum(parts.values())
        listed = ", ".join(f"{op} {us:.0f}" for op, us in (parts | {"products and the rest": rest}).items() if us)
        print(f"{name:16} {len(events):>4} kernels, us: {listed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model in f32, for a CPU")
    parser.add_argument("--layers", type=int, default=43, help="of V4-Flash, the first ones")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4, help="of a draft")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="calls in a row that are timed together")
    parser.add_argument("--parts", action="store_true", help="microseconds by kernel too, on a GPU")
    options = parser.parse_args()

    cfg, dtype = d4.DSV4Config.flash(), jnp.bfloat16
    requests, context = options.requests, options.context
    if options.tiny:
        cfg, dtype, requests, context = d4.DSV4Config.tiny(), jnp.float32, 4, 512
    cfg = dataclasses.replace(cfg, compress_ratios=cfg.compress_ratios[: options.layers])
    room = (options.rounds * options.steps + 1) * (1 + options.tokens) + options.tokens  # 1: warming up
    plan = d4.plan_cache(cfg, max_requests=requests, max_context=context + max(ROOM, room), headroom=1.0)
    programs = Programs(plan, context, options.tokens, dtype)

    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for name in STEPS:
        programs.time(name, 1)  # warms up
    for _ in range(options.rounds):
        for name in STEPS:
            times[name].append(programs.time(name, options.steps))

    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}: {cfg.num_layers} layers, {requests} requests of {context:,} "
        f"tokens, drafts of {options.tokens}, {plan.kv_format} + {plan.indexer_format}, {plan.hca_tail} tails"
    )
    for name, samples in times.items():
        low, high = np.percentile(samples, [10, 90])
        print(f"{name:16} {statistics.median(samples):9.0f} us of wall (10-90 %: {low:.0f} to {high:.0f})")
    ratios = [b / a for a, b in zip(times["decode step"], times["stage and commit"], strict=True)]
    print(f"stage and commit of {options.tokens} tokens takes {statistics.median(ratios):.2f} decode steps")
    if options.parts:
        print_parts(programs)


if __name__ == "__main__":
    main()
