"""What does a store of prefixes save? python -m benchmarks.prefixes

Eight requests ask about one document of 32K tokens, each with 128 tokens of its own. Prints the time to the last token
of their prompts, with a store and without; the time of a hit and of keeping a prefix, for several lengths; and the
bytes of a prefix, as the plan says and as the cache has them.

Prompts run in chunks of 4096 tokens through attention layers of V4-Flash alone, of which there are a few (``--layers``,
in the order of the model from its third layer on), on random inputs. Hits and keeps are those of all 43 layers. What
they move does not depend on what is stored: the tables say that the tokens are there.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from benchmarks.fork import fork_again_and_again
from dsv4jax.requests import PrefixStore

DOCUMENT, QUESTION, CHUNK, REQUESTS = 32_768, 128, 4096, 8
LENGTHS = 4096, 32_768, 131_072
say = functools.partial(print, flush=True)  # a run that is cut off has said what it found
FORMATS: dict[str, Any] = {"kv_format": "fp8_tile64", "indexer_format": "mxfp4", "hca_tail": "online"}


@functools.partial(jax.jit, donate_argnames="cache")
def feed(params, x, cache, slots):
    num_new = jnp.full(slots.shape, x.shape[1], jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    for layer, weights in enumerate(params):
        y, cache = d4.attention_layer(weights, x, cache, layer, slots, num_new)
        x = x + y
    return x[:, -1], d4.advance(cache, slots, num_new), ok


def prompts_of(options) -> None:
    """Time the prompts of all requests, with a store and without."""
    document, question, chunk = (size // (32 if options.tiny else 1) for size in (DOCUMENT, QUESTION, CHUNK))
    cfg = d4.DSV4Config.tiny() if options.tiny else d4.DSV4Config.flash()
    first = 0 if options.tiny else 2  # Flash's first two layers have a window alone
    cfg = dataclasses.replace(cfg, compress_ratios=cfg.compress_ratios[first : first + options.layers])
    length = document + question
    weights = "wide" if options.tiny else "stored"
    params = [d4.init_attention_params(jax.random.key(i), cfg, i, weights=weights) for i in range(cfg.num_layers)]
    plan = d4.plan_cache(cfg, REQUESTS + 1, length, num_blocks=REQUESTS * (-(-length // cfg.block_tokens)), **FORMATS)
    words = jax.random.normal(jax.random.key(0), (256, cfg.hidden_size), jnp.bfloat16)
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 256, document)
    prompts = [np.concatenate([beginning, rng.integers(0, 256, question)]) for _ in range(REQUESTS)]

    def run(store: PrefixStore | None) -> tuple[float, list[np.ndarray], int]:
        cache = jax.block_until_ready(d4.init_cache(plan))
        last, oks, begin = [], [], time.perf_counter()
        cuts = store.cuts(prompts) if store else [[]] * REQUESTS
        for prompt, places in zip(prompts, cuts, strict=True):
            cache, slots, _ = d4.admit(cache, 1)
            stored, y = 0, None
            if store:
                store, cache, stored = store.start(cache, int(slots[0]), prompt)
            while stored < length:
                size = min(chunk, length - stored if stored >= document else document - stored)
                x = words[jnp.asarray(prompt[stored : stored + size])][None]
                y, cache, ok = feed(params, x, cache, slots)
                oks.append(ok)
                stored += size
                if store and stored in places:
                    store, cache, _ = store.keep(cache, int(slots[0]), prompt[:stored])
            last.append(y)
        last = [np.asarray(y, np.float32) for y in last]
        assert all(map(bool, oks))
        seconds = time.perf_counter() - begin
        return seconds, last, plan.num_blocks - int(cache.tables.num_free[0])

    found = {}
    for name, store in (("without", None), ("with", PrefixStore(plan, 1))):
        run(store)  # compiles
        found[name] = min((run(store) for _ in range(options.rounds)), key=lambda one: one[0])
    kinds = ", ".join(f"{len(plan.layers(kind))} {kind.upper()}" for kind in d4.AttentionType if plan.layers(kind))
    say(f"{REQUESTS} requests with one document of {document:,} tokens and {question} of their own; layers: {kinds}")
    for name, (seconds, _, blocks) in found.items():
        say(f"  {name:<8} a store: {seconds * 1e3:9.1f} ms to the last token of the prompts, {blocks:,} blocks")
    same = all(np.array_equal(a, b) for a, b in zip(found["with"][1], found["without"][1], strict=True))
    most = max(np.max(np.abs(a - b)) for a, b in zip(found["with"][1], found["without"][1], strict=True))
    say(f"  outputs of the last tokens: {'equal bit for bit' if same else f'largest difference {most:.3g}'}")
    say(f"  {found['without'][0] / found['with'][0]:.2f} times as fast")


def hits_of(options) -> None:
    """Time hits and keeps, in all layers, by the length of the prefix."""
    cfg = d4.DSV4Config.tiny() if options.tiny else d4.DSV4Config.flash()
    lengths = LENGTHS[:1] if options.tiny else LENGTHS
    blocks = sum(length // cfg.block_tokens for length in lengths)
    plan = d4.plan_cache(cfg, 2 * len(lengths) + 2, max(lengths) + 1, num_blocks=blocks + 1, **FORMATS)
    cache, slots, _ = d4.admit(d4.init_cache(plan), len(lengths))
    sizes = jnp.asarray(lengths, jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, sizes)
    assert ok
    cache = d4.advance(cache, slots, sizes)
    prefixes = [np.full(length + 1, i) for i, length in enumerate(lengths)]
    release = jax.jit(lambda cache, slots: d4.release(cache, slots), donate_argnums=0)
    admit = jax.jit(lambda cache: d4.admit(cache, 1), donate_argnums=0)
    times: dict[tuple[str, int], list[float]] = {}
    store = PrefixStore(plan, len(lengths))
    for turn in range(options.rounds + 2):
        store, cache = store.drop(cache, *store.prefixes)
        for slot, tokens in zip(slots.tolist(), prefixes, strict=True):
            jax.block_until_ready(cache)
            begin = time.perf_counter()
            store, cache, ok = store.keep(cache, slot, tokens[:-1])
            jax.block_until_ready(cache)
            kept = time.perf_counter()
            assert ok
            cache, target, _ = admit(cache)
            jax.block_until_ready(cache)
            admitted = time.perf_counter()
            store, cache, stored = store.start(cache, int(target[0]), tokens)
            jax.block_until_ready(cache)
            started = time.perf_counter()
            assert stored == tokens.size - 1
            cache = release(cache, target)
            if turn > 1:
                times.setdefault(("keep", stored), []).append(kept - begin)
                times.setdefault(("hit", stored), []).append(started - admitted)
    say(f"{cfg.num_layers} layers; a prefix is {plan.bytes_per_request:,} B and takes no block; wall time of a call:")
    for (name, length), samples in sorted(times.items()):
        say(f"  {name:<5}{length:>8,} tokens: {statistics.median(samples) * 1e6:8.1f} us, host and checks included")
    # The fork alone, many in one program.
    cache, target, _ = admit(cache)
    for slot, length in zip(slots, lengths, strict=True):
        samples = []
        for _ in range(options.rounds + 1):
            jax.block_until_ready(cache)
            begin = time.perf_counter()
            cache, ok = jax.block_until_ready(fork_again_and_again(cache, slot, target, 50))
            samples.append((time.perf_counter() - begin) / 50)
        assert ok
        say(f"  hit  {length:>8,} tokens: {statistics.median(samples[1:]) * 1e6:8.1f} us on the device")
    state = jax.tree.map(lambda leaf: leaf[:, :1], [cache.stack(kind).state for kind in cache.kinds])
    row = plan.bytes_per_request - d4.cache.tree_bytes(state)
    say(f"  state of a slot in the cache: {d4.cache.tree_bytes(state):,} B, and {row:,} B of the tables")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="attention layers that prompts run through")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    options = parser.parse_args()
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    hits_of(options)
    prompts_of(options)


if __name__ == "__main__":
    main()
