"""Does a decode step's time grow with the pool? python -m benchmarks.pool_size

The same step runs for the same requests with a pool of 1,024 and one of 16,384 blocks, timed in turns so that drift
affects both equally. Prints medians with their spread, and the ratio; any copy of the pool in the step would show as a
ratio near 16.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4

BLOCKS = (1024, 16384)
BATCH = 8


def build(blocks: int, full_size: bool, backend: str | None):
    if full_size:
        cfg, dtype = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128)), jnp.bfloat16
    else:
        cfg, dtype = d4.DSV4Config.tiny(), jnp.float32
    plan = d4.plan_cache(cfg, max_requests=BATCH, max_context=4096, num_blocks=blocks)
    params = [d4.init_attention_params(jax.random.key(i), cfg, i, dtype) for i in range(cfg.num_layers)]

    def step(params, x, cache, slots):
        num_new = jnp.ones(BATCH, jnp.int32)
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        for layer in range(cfg.num_layers):
            y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, backend=backend)
            x = x + y
        return ok, d4.advance(cache, slots, num_new)

    cache, slots, _ = d4.admit(d4.init_cache(plan), BATCH)
    x = jax.random.normal(jax.random.key(9), (BATCH, 1, cfg.hidden_size), dtype)
    compiled = jax.jit(step, donate_argnums=2).lower(params, x, cache, slots).compile()
    return compiled, (params, x, cache, slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--full-size", action="store_true", help="V4-Flash sizes in bf16, one layer of each kind")
    parser.add_argument("--backend", help="xla or pallas; the default takes the kernels where they serve")
    options = parser.parse_args()

    programs = {blocks: build(blocks, options.full_size, options.backend) for blocks in BLOCKS}
    times: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    for round_number in range(options.rounds + 1):
        for blocks, (step, (params, x, cache, slots)) in programs.items():
            jax.block_until_ready(cache)
            begin = time.perf_counter()
            ok = None
            for _ in range(options.steps):
                ok, cache = step(params, x, cache, slots)
            jax.block_until_ready((ok, cache))
            if round_number:  # the first round warms up
                times[blocks].append((time.perf_counter() - begin) / options.steps)
            programs[blocks] = step, (params, x, cache, slots)
            assert bool(ok)

    device = jax.devices()[0]
    backend = options.backend or "the default"
    print(f"decode step of {BATCH} requests on {device.device_kind}, jax {jax.__version__}, backend {backend}")
    medians = {}
    for blocks, samples in times.items():
        step, (_, _, cache, _) = programs[blocks]
        memory = step.memory_analysis()
        low, high = np.percentile(samples, [10, 90])
        medians[blocks] = statistics.median(samples)
        print(
            f"{blocks:>6} blocks, cache {d4.cache.tree_bytes(cache) / 2**20:>8.1f} MiB: "
            f"{medians[blocks] * 1e6:8.1f} us (10-90 %: {low * 1e6:.1f} to {high * 1e6:.1f}), "
            f"temporaries {memory.temp_size_in_bytes if memory else -1:,} B"
        )
    print(f"ratio {medians[BLOCKS[1]] / medians[BLOCKS[0]]:.3f}")


if __name__ == "__main__":
    main()
