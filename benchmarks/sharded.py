"""Decode throughput over the GPUs of one host: python -m benchmarks.sharded

Layers of V4-Flash's size in bf16 (1 SWA, 2 CSA, 2 HCA) decode for 64 requests per GPU with 32K tokens each, over a data
axis of the first 1, 2, 4, ... GPUs. The meshes are timed in turns, so that drift affects all of them equally. Prints
medians with their spread, and the efficiency, which is the throughput per GPU divided by that of one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsv4jax as d4
from benchmarks.kernels.reads import with_random_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    cfg: d4.DSV4Config
    dtype: Any
    requests: int  # per device
    context: int  # tokens that each request holds
    steps: int  # decode steps per timed call


FULL = Load(
    cfg=dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(0, 4, 128, 4, 128)),
    dtype=jnp.bfloat16,
    requests=64,
    context=32768,
    steps=64,
)
TINY = Load(cfg=d4.DSV4Config.tiny(), dtype=jnp.float32, requests=4, context=256, steps=8)


def fill(cache: d4.KVCache, load: Load) -> tuple[d4.KVCache, jax.Array]:
    """Admit the requests of one shard, at all phases of a block, and fill the cache with random rows."""
    cache, slots, _ = d4.admit(cache, load.requests)
    length = load.context - jnp.arange(load.requests, dtype=jnp.int32) % cache.plan.cfg.block_tokens
    cache, _ = d4.prepare_forward(cache, slots, length)
    return with_random_rows(d4.advance(cache, slots, length)), slots


def decode(params: Any, x: jax.Array, cache: d4.KVCache, slots: jax.Array, steps: int) -> Any:
    """Decode several tokens, each from the output of the one before."""
    one = jnp.ones_like(slots)

    def step(carry: Any, _: None) -> Any:
        x, cache = carry
        cache, ok = d4.prepare_forward(cache, slots, one)
        total = x.astype(jnp.float32)
        for layer, weights in enumerate(params):
            y, cache = d4.attention_layer(weights, x, cache, layer, slots, one)
            total += y.astype(jnp.float32)
        x = (total * jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True))).astype(x.dtype)
        return (x, d4.advance(cache, slots, one)), ok

    (x, cache), ok = jax.lax.scan(step, (x, cache), length=steps)
    return x, cache, jnp.all(ok)[None]


class Server:
    """A cache over the first devices, and the function that decodes with it."""

    def __init__(self, load: Load, devices: list[Any], calls: int) -> None:
        mesh, rows = jax.make_mesh((len(devices),), ("data",), devices=devices), P("data")
        requests, tokens = load.requests * len(devices), load.context + load.steps * calls
        per_request = -(-tokens // load.cfg.block_tokens)
        plan = d4.plan_cache(load.cfg, requests, tokens, num_blocks=requests * per_request)
        specs = d4.sharding.partition_specs(plan, mesh)
        over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        filled = over(functools.partial(fill, load=load), in_specs=(specs,), out_specs=(specs, rows))
        self.cache, self.slots = jax.jit(filled, donate_argnums=0)(d4.init_cache(plan, mesh))
        run = functools.partial(decode, steps=load.steps)
        run = over(run, in_specs=(P(), rows, specs, rows), out_specs=(rows, specs, rows))
        self.run = jax.jit(run, donate_argnums=2)
        layers = range(load.cfg.num_layers)
        params = [d4.init_attention_params(jax.random.key(i), load.cfg, i, load.dtype) for i in layers]
        self.params = jax.device_put(params, NamedSharding(mesh, P()))
        x = jax.random.normal(jax.random.key(7), (requests, 1, load.cfg.hidden_size), load.dtype)
        self.x = jax.device_put(x, NamedSharding(mesh, rows))
        self.tokens = requests * load.steps

    def time(self) -> float:
        """Return the tokens per second of one call."""
        jax.block_until_ready(self.cache)
        begin = time.perf_counter()
        self.x, self.cache, ok = jax.block_until_ready(self.run(self.params, self.x, self.cache, self.slots))
        rate = self.tokens / (time.perf_counter() - begin)
        assert ok.all()
        assert jnp.isfinite(self.x.astype(jnp.float32)).all()
        return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a look at the program on any device")
    options = parser.parse_args()
    load, devices = TINY if options.tiny else FULL, jax.devices()

    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
    servers = {n: Server(load, devices[:n], options.rounds + 1) for n in counts}
    for server in servers.values():
        server.time()  # compiles
    rates: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(options.rounds):
        for n, server in servers.items():
            rates[n].append(server.time())

    print(
        f"{devices[0].device_kind}, jax {jax.__version__}: decode of {load.requests} requests per device at "
        f"{load.context:,} tokens, {load.cfg.num_layers} layers"
    )
    one = statistics.median(rates[1])
    for n, samples in rates.items():
        middle, (low, high) = statistics.median(samples), np.percentile(samples, [10, 90])
        print(
            f"{n} devices: {middle:>10,.0f} tokens/s (10-90 %: {low:,.0f} to {high:,.0f}), "
            f"{1e3 * load.requests * n / middle:.3f} ms a step, efficiency {middle / n / one:.1%}"
        )


if __name__ == "__main__":
    main()
