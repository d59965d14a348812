"""The whole model, of V4-Flash's sizes: python -m benchmarks.model_parts.whole

    layer     what one more layer of each kind adds to a step: kernel time, by CUPTI, and launches
    step      wall time of a decode step of all layers, several in a row
    generate  wall time of a token of one text, over that of the step
    prompt    wall time of a prompt of 4,096 tokens to the first new one

All layers take more memory than a GPU has. So ``LAYERS`` of them are made, and the others have their weights once more,
in turn: before a step comes to the same ones again, it reads far more than L2 holds. Caches hold random rows of 4,096
tokens. Weights are as stored.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from benchmarks.kernels.reads import long_cache
from benchmarks.kernels.timing import Times, kernel_events, record
from benchmarks.model_parts.sizes import first_layers, model_of, parser_of, with_layers
from benchmarks.model_parts.texts import time_texts
from benchmarks.speculate import compile_all
from dsv4jax.config import layer_kind
from dsv4jax.model import ModelConfig, ModelParams, forward, init_caches, random_model
from dsv4jax.model.params import Block, StoredExperts, is_any_stored
from dsv4jax.weights.stored import LAYER_ACTIVATIONS

PARTS = "layer", "step", "generate", "prompt"
LAYERS = 8  # whose weights are made
RATIOS = {"csa": 4, "hca": 128}
CONTEXT, ROOM = 4096, 512  # tokens that each request has, and can grow by
IN_A_ROW, ROUNDS = 20, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes and options of a run."""

    cfg: ModelConfig
    requests: tuple[int, ...]
    context: int
    out: Path | None
    invariant: bool = False  # caches of layers and steps

    def note(self, case: str, text: str, **fields: Any) -> None:
        print(f"{case:44} {text}", flush=True)
        record(self.out, case=case, **fields)

    def case(self, name: str, requests: int) -> str:
        return f"{name} B{requests} {self.context}" + (", invariant" if self.invariant else "")

    def plan(self, cfg: ModelConfig, requests: int) -> d4.CachePlan:
        options = {"headroom": 1.0, "invariant": self.invariant}
        caches = jax.eval_shape(lambda: init_caches(cfg, requests, self.context + ROOM, **options))
        return caches.model.plan


def whole_model(cfg: ModelConfig, made: ModelParams) -> ModelParams:
    """A model of all layers, whose weights are those of a model of its first ones, in turn."""

    def kind(layer: int) -> Any:
        return layer_kind(cfg.attention, layer), cfg.picks_by_id(layer)

    blocks: list[Block] = []
    for layer in range(cfg.num_layers):
        alike = [number for number in range(len(made.blocks)) if kind(number) == kind(layer)]
        blocks.append(made.blocks[layer if layer < len(made.blocks) else alike[layer % len(alike)]])
    return dataclasses.replace(made, cfg=cfg, blocks=tuple(blocks))


def with_activations(params: ModelParams, activations: str) -> ModelParams:
    """The same weights, of products that round their inputs to FP8, or do not. The codes of experts are copied."""

    def changed(node: Any) -> Any:
        if isinstance(node, StoredExperts):
            return node.with_activations(activations)
        return dataclasses.replace(node, activations=activations) if is_any_stored(node) else node

    return jax.tree.map(changed, params, is_leaf=is_any_stored)


def step(
    params: ModelParams, ids: jax.Array, cache: d4.KVCache, slots: jax.Array
) -> tuple[jax.Array, d4.KVCache, jax.Array]:
    """Feed tokens [B, T]. Returns (the likeliest next ones int32 [B, 1], the cache, ok; [shards] on a mesh)."""
    count = jnp.full_like(slots, ids.shape[1])
    cache, ok = d4.prepare_forward(cache, slots, count)
    logits, _, cache = forward(params, ids, cache, slots, count)
    assert logits is not None
    return jnp.argmax(logits, -1).astype(jnp.int32)[:, None], d4.advance(cache, slots, count), ok


def batch(cfg: ModelConfig, requests: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and slots."""
    ids = np.random.default_rng(1).integers(0, min(1000, cfg.vocab_size), (requests, 1))
    return jnp.asarray(ids, jnp.int32), jnp.arange(requests, dtype=jnp.int32)


def time_layers(bench: Bench, made: ModelParams) -> None:
    """Take the difference of steps of one layer and of two, whose weights are different."""
    last = {kind: [i for i, r in enumerate(made.cfg.attention.compress_ratios) if r == RATIOS[kind]] for kind in RATIOS}
    cases = [(kind, requests, n) for kind in RATIOS for requests in bench.requests for n in (1, 2)]
    given = []
    for kind, requests, n in cases:
        cfg = with_layers(bench.cfg, (RATIOS[kind],) * n, 0)
        params = dataclasses.replace(made, cfg=cfg, blocks=tuple(made.blocks[i] for i in last[kind][-n:]))
        ids, slots = batch(cfg, requests)
        given.append((params, ids, long_cache(bench.plan(cfg, requests), bench.context), slots))
    programs = compile_all([jax.jit(step).lower(*each) for each in given])
    found = {}
    for case, program, each in zip(cases, programs, given, strict=True):
        rounds = [events_of(program, *each) for _ in range(ROUNDS)]
        found[case] = [sum(us for _, us in events) for events in rounds], rounds[-1]
    for kind, requests, n in cases:
        if n == 1:
            (few, one), (many, two) = found[kind, requests, 1], found[kind, requests, 2]
            times = Times.of([b - a for a, b in zip(few, many, strict=True)], len(two) - len(one))
            text = f"{times.median:9.1f} us [{times.low:.1f}, {times.high:.1f}] in {times.kernels:g} launches"
            bench.note(bench.case(f"layer {kind}", requests), text, us=dataclasses.asdict(times))
            for name, us in sorted(added(one, two).items(), key=lambda item: -item[1])[:16]:
                print(f"        {us:9.2f} us {name[:100]}")


def events_of(program: Any, *given: Any) -> list[tuple[str, float]]:
    """(name, us) of the kernels of one call, without the copies of what is not donated; on a CPU its wall time."""
    if jax.default_backend() == "cpu":
        began = time.perf_counter()
        jax.block_until_ready(program(*given))
        return [("wall", (time.perf_counter() - began) * 1e6)]
    return [(name, ms * 1e3) for name, ms in kernel_events(program, *given) if "memcpy" not in name.lower()]


def added(one: list[tuple[str, float]], two: list[tuple[str, float]]) -> dict[str, float]:
    """What of its times the second has more, by kernel."""
    sums: dict[str, float] = {}
    for sign, events in ((-1, one), (1, two)):
        for name, us in events:
            name = name.rstrip("0123456789_.")
            sums[name] = sums.get(name, 0.0) + sign * us
    return sums


def time_steps(bench: Bench, params: ModelParams) -> dict[int, float]:
    """Return milliseconds of a step by the number of requests."""
    given = {}
    for requests in bench.requests:
        ids, slots = batch(params.cfg, requests)
        given[requests] = ids, long_cache(bench.plan(params.cfg, requests), bench.context), slots
    began = time.perf_counter()
    lowered = [jax.jit(step, donate_argnums=2).lower(params, *each) for each in given.values()]
    programs = compile_all(lowered)
    print(f"    steps traced and compiled in {time.perf_counter() - began:.0f} s", flush=True)
    found = {}
    for (requests, (ids, cache, slots)), program in zip(given.items(), programs, strict=True):
        samples = []
        for _ in range(1 + ROUNDS):
            jax.block_until_ready(cache)
            began, oks = time.perf_counter(), []
            for _ in range(IN_A_ROW):
                ids, cache, ok = program(params, ids, cache, slots)
                oks.append(ok)
            jax.block_until_ready((ids, cache))
            samples.append((time.perf_counter() - began) / IN_A_ROW * 1e3)
            assert all(map(bool, oks)), "a request was refused"
            assert np.any(ids), "logits of tokens that were not taken are 0"
        times = Times.of(samples[1:])  # the first includes what is done once
        found[requests] = times.median
        text = f"{times.median:9.3f} ms of wall [{times.low:.3f}, {times.high:.3f}]"
        case = bench.case(f"step of {params.cfg.num_layers} layers", requests)
        bench.note(case, text, ms_of_wall=dataclasses.asdict(times))
        del cache
    return found


def time_tokens(bench: Bench, params: ModelParams, of_step: float) -> None:
    """Time tokens of one text, beside a step of one request."""
    per_token = min(text.again / text.passes for text in time_texts(params, bench.context, 129))
    text = f"{per_token:9.3f} ms a token, {per_token / of_step:.3f} of a step"
    case = f"generate {params.cfg.num_layers} layers B1 {bench.context}"
    bench.note(case, text, ms=per_token, steps=per_token / of_step)


def time_prompts(bench: Bench, params: ModelParams, activations: str) -> None:
    times = Times.of([text.first for text in time_texts(params, bench.context, 1)])
    case = f"prompt of {bench.context} tokens, {params.cfg.num_layers} layers, {activations}"
    text = f"{times.median:9.1f} ms of wall [{times.low:.1f}, {times.high:.1f}]"
    bench.note(case, text, ms=dataclasses.asdict(times))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default all")
    parser.add_argument("--requests", default="1,64")
    parser.add_argument("--activations", choices=LAYER_ACTIVATIONS, default="fp8", help="of the prompt")
    parser.add_argument("--invariant", action="store_true", help="caches that are invariant, of layers and steps")
    options = parser.parse_args(arguments)
    cfg = model_of(options)
    first = first_layers(cfg, LAYERS)
    requests = (1, 2) if options.tiny else tuple(map(int, options.requests.split(",")))
    context = 512 if options.tiny else CONTEXT
    bench = Bench(cfg=cfg, requests=requests, context=context, invariant=options.invariant, out=options.out)
    parts = options.part or PARTS[: 2 if options.invariant else None]
    began = time.perf_counter()
    made = jax.block_until_ready(random_model(first, jax.random.key(0), drafts=0))
    size, seconds = d4.cache.tree_bytes(made), time.perf_counter() - began
    print(f"{first.num_layers} layers, {size / 1e9:.1f} GB, made in {seconds:.0f} s", flush=True)
    params = whole_model(cfg, made)
    if "layer" in parts:
        time_layers(bench, made)
    if "step" in parts or "generate" in parts:
        steps = time_steps(bench, params)
        if "generate" in parts:
            time_tokens(bench, params, steps[1])
    if "prompt" in parts:
        rounded = with_activations(made, options.activations)
        time_prompts(bench, whole_model(cfg, rounded), options.activations)


if __name__ == "__main__":
    main()
