"""Does the time of a fork grow with the request's length? python -m benchmarks.fork

Requests of 4K, 32K and 128K tokens are forked, one at a time, into four others in a donated cache of V4-Flash's sizes.
The lengths are timed in turns, so that drift affects all of them equally. Prints medians with their spread, and the
ratio of the longest request to the shortest; any copy of the entries would show as a ratio near 32. Nothing is
prefilled: the tables say that the tokens are there, and what a fork copies does not depend on their values. Each fork
is followed by a release of its targets.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dsv4jax as d4

LENGTHS = (4096, 32768, 131072)
REMAINDER = 68  # tokens in the block that each request is filling
TARGETS = 4


def build(cfg: d4.DSV4Config) -> tuple[d4.KVCache, jax.Array, jax.Array]:
    """Return the cache, sources int32 [lengths] and targets int32 [TARGETS]."""
    lengths = jnp.asarray(LENGTHS, jnp.int32) + REMAINDER
    num_blocks = sum(length // cfg.block_tokens + 1 for length in LENGTHS) + TARGETS
    requests = len(LENGTHS) + TARGETS
    plan = d4.plan_cache(cfg, requests, max(LENGTHS) + cfg.block_tokens, num_blocks=num_blocks)
    cache, slots, _ = d4.admit(d4.init_cache(plan), requests)
    sources, targets = slots[: len(LENGTHS)], slots[len(LENGTHS) :]
    cache, ok = d4.prepare_forward(cache, sources, lengths)
    assert ok
    return d4.advance(cache, sources, lengths), sources, targets


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="repeats")
def fork_again_and_again(
    cache: d4.KVCache, source: jax.Array, targets: jax.Array, repeats: int
) -> tuple[d4.KVCache, jax.Array]:
    def body(_, carry: tuple[d4.KVCache, jax.Array]) -> tuple[d4.KVCache, jax.Array]:
        cache, all_ok = carry
        cache, ok = d4.fork(cache, source, targets)
        cache = d4.release(cache, targets)
        # The targets are admitted again, but not reset in all layers as ``admit`` would do, because that would be timed
        # too.
        tables = dataclasses.replace(cache.tables, admitted=cache.tables.admitted.at[targets].set(True))
        return dataclasses.replace(cache, tables=tables), all_ok & ok

    return lax.fori_loop(0, repeats, body, (cache, jnp.asarray(True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=50, help="forks per round, in one program")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one layer of each kind")
    options = parser.parse_args()

    cfg = d4.DSV4Config.tiny() if options.tiny else d4.DSV4Config.flash()
    cache, sources, targets = build(cfg)
    plan, size = cache.plan, d4.cache.tree_bytes(cache)
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for round_number in range(options.rounds + 1):
        for length, source in zip(LENGTHS, sources, strict=True):
            jax.block_until_ready(cache)
            begin = time.perf_counter()
            cache, ok = jax.block_until_ready(fork_again_and_again(cache, source, targets, options.repeats))
            if round_number:  # the first round compiles
                times[length].append((time.perf_counter() - begin) / options.repeats)
            assert ok

    print(f"fork into {TARGETS} targets on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    moved = TARGETS * (plan.bytes_per_request + plan.bytes_per_block)
    print(f"{cfg.num_layers} layers, cache {size / 2**20:,.1f} MiB, of which a fork writes {moved / 2**20:,.2f} MiB")
    for length, samples in times.items():
        low, high = np.percentile(samples, [10, 90]) * 1e6
        print(f"{length:>7} tokens: {statistics.median(samples) * 1e6:8.1f} us (10-90 %: {low:.1f} to {high:.1f})")
    ratio = statistics.median(times[LENGTHS[-1]]) / statistics.median(times[LENGTHS[0]])
    print(f"ratio of {LENGTHS[-1]:,} to {LENGTHS[0]:,} tokens: {ratio:.3f}")


if __name__ == "__main__":
    main()
