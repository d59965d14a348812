"""More requests than slots, and longer ones than the blocks allow: a server in one jitted loop.

    python examples/pressure.py

Rows of the batch are ordered by arrival, so ``prepare_rows`` serves the oldest request first. Rows that get no blocks
wait. If all wait, the youngest request that holds blocks is evicted: it gives its blocks back, and begins again later.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dsv4jax as d4

CHUNK = 32  # tokens that a request may store in one pass
Params = tuple[d4.AttentionParams, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """The state of the loop. ``requests`` is their number, and stands for "none" among request numbers."""

    cache: d4.KVCache
    slots: jax.Array  # int32 [B] slot of each row, -1 = none
    request: jax.Array  # int32 [B] request of each row, ascending
    waiting: jax.Array  # bool [requests]
    y: jax.Array  # f32 [requests, T, hidden] the model's output
    passes: jax.Array  # int32 []
    refused: jax.Array  # int32 [] passes in which a row had to wait
    evicted: jax.Array  # int32 [] requests that began again


def take_turns(server: Server, total: jax.Array) -> Server:
    """Release what has ended, admit what is waiting, and order the rows by arrival. ``total`` is int32 [requests]."""
    requests, rows = total.size, server.slots.size
    stored = server.cache.seq_lens.at[server.slots].get(mode="clip")
    ended = (server.slots >= 0) & (stored == total.at[server.request].get(mode="clip"))
    cache = d4.release(server.cache, jnp.where(ended, server.slots, -1))
    slots, request = jnp.where(ended, -1, server.slots), jnp.where(ended, requests, server.request)

    (first,) = jnp.nonzero(server.waiting, size=rows, fill_value=requests)
    empty = slots == -1
    arriving = jnp.where(empty, first.at[jnp.cumsum(empty) - 1].get(mode="clip"), requests).astype(jnp.int32)
    cache, new, _ = d4.admit(cache, rows, arriving < requests)  # there is a slot for each row
    slots, request = jnp.where(empty, new, slots), jnp.where(empty, arriving, request)
    order = jnp.argsort(request)
    return dataclasses.replace(
        server,
        cache=cache,
        slots=slots[order],
        request=request[order],
        waiting=server.waiting.at[arriving].set(False, mode="drop"),
    )


def evict(server: Server, when: jax.Array) -> Server:
    """Let the youngest request that holds blocks begin again, if ``when`` bool [] is True."""
    requests, rows = server.waiting.size, server.slots.size
    held = jnp.where(server.slots >= 0, server.cache.tables.block_lens.at[server.slots].get(mode="clip"), 0)
    row = jnp.arange(rows)
    victim = when & (row == jnp.max(jnp.where(held > 0, row, -1)))
    return dataclasses.replace(
        server,
        cache=d4.release(server.cache, jnp.where(victim, server.slots, -1)),
        slots=jnp.where(victim, -1, server.slots),
        request=jnp.where(victim, requests, server.request),
        waiting=server.waiting.at[jnp.where(victim, server.request, requests)].set(True, mode="drop"),
        evicted=server.evicted + when.astype(jnp.int32),
    )


def run_pass(params: Params, x: jax.Array, total: jax.Array, server: Server) -> Server:
    """Run one pass over the requests of x f32 [requests, T, hidden]."""
    server = take_turns(server, total)
    slots, request = server.slots, server.request
    start = jnp.where(slots >= 0, server.cache.seq_lens.at[slots].get(mode="clip"), 0)
    wanted = jnp.where(slots >= 0, jnp.minimum(total.at[request].get(mode="clip") - start, CHUNK), 0)
    cache, granted = d4.cache.prepare_rows(server.cache, slots, wanted)
    num_new = jnp.where(granted, wanted, 0)

    token = start[:, None] + jnp.arange(CHUNK)[None]
    h = x.at[request[:, None], token].get(mode="clip")
    for layer, of_layer in enumerate(params):
        y, cache = d4.attention_layer(of_layer, h, cache, layer, slots, num_new)
        h = h + y  # norms and MLP of a model go here
    real = jnp.arange(CHUNK)[None] < num_new[:, None]
    server = dataclasses.replace(
        server,
        cache=d4.advance(cache, slots, num_new),
        y=server.y.at[jnp.where(real, request[:, None], total.size), token].set(h, mode="drop"),
        passes=server.passes + 1,
        refused=server.refused + jnp.any(num_new < wanted).astype(jnp.int32),
    )
    return evict(server, ~jnp.any(granted) & jnp.any(wanted > 0))


@functools.partial(jax.jit, static_argnames="plan")
def serve(params: Params, x: jax.Array, total: jax.Array, *, plan: d4.CachePlan) -> Server:
    """Serve requests of ``total`` int32 [requests] tokens from x f32 [requests, T, hidden]. Each must fit by itself."""
    server = Server(
        cache=d4.init_cache(plan),
        slots=jnp.full(plan.max_requests, -1, jnp.int32),
        request=jnp.full(plan.max_requests, total.size, jnp.int32),
        waiting=jnp.ones(total.size, bool),
        y=jnp.zeros_like(x),
        **{name: jnp.int32(0) for name in ("passes", "refused", "evicted")},
    )
    is_serving = lambda server: jnp.any(server.waiting) | jnp.any(server.slots >= 0)  # noqa: E731
    return lax.while_loop(is_serving, functools.partial(run_pass, params, x, total), server)


def main() -> None:
    cfg = d4.DSV4Config.tiny()
    params = tuple(d4.init_attention_params(jax.random.key(i), cfg, i) for i in range(cfg.num_layers))
    total = jnp.asarray(np.random.default_rng(0).integers(20, 500, 12), jnp.int32)
    x = jax.random.normal(jax.random.key(9), (total.size, 512, cfg.hidden_size))

    scarce = serve(params, x, total, plan=d4.plan_cache(cfg, max_requests=4, max_context=512, num_blocks=5))
    plenty = serve(params, x, total, plan=d4.plan_cache(cfg, max_requests=4, max_context=512, num_blocks=16))
    for name, server in (("5 blocks", scarce), ("16 blocks", plenty)):
        counts = f"{server.passes} passes, {server.refused} with a row that waited, {server.evicted} evictions"
        print(f"{name}: {counts}; {d4.describe(server.cache).free_blocks} blocks are free at the end")
    print(f"largest difference between the two outputs: {jnp.max(jnp.abs(scarce.y - plenty.y)):.1e}")


if __name__ == "__main__":
    main()
