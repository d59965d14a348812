"""Drafts by DSpark, of V4-Flash's sizes: python -m benchmarks.model_parts.drafts

    part   kernel time of what a pass with drafts does beside the model's own layers, by CUPTI, and launches
    pass   wall time of a pass of the loop that generates texts, with drafts and without, several in a row

The parts are: storing keys of the tokens of a pass, a run of the block, its logits, the drafts drawn of them one after
the other, and judging them. Beside the run of the block stands how often its bytes could be read at ``READ``. L2 is not
made cold: a part reads more than it holds.

``whole`` says how a model of all layers is made of ``LAYERS``. Caches hold random rows of 4,096 tokens. In a random
model all rows of noise are alike, and would pick the same experts; here each row of the block has streams of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from benchmarks.kernels.reads import long_cache
from benchmarks.kernels.timing import Times
from benchmarks.model_parts.sizes import first_layers, model_of, parser_of
from benchmarks.model_parts.whole import CONTEXT, LAYERS, ROOM, ROUNDS, Bench, events_of, whole_model
from benchmarks.speculate import compile_all
from dsv4jax.model import Caches, DSparkConfig, ModelConfig, ModelParams, Sampling, dspark, init_caches, random_model
from dsv4jax.model.generation.drafting import Fed, drafter
from dsv4jax.model.generation.loop import run
from dsv4jax.model.generation.sampling import Chances, accept, of_texts
from dsv4jax.model.generation.state import Loop, Texts, begin
from dsv4jax.model.params import DSparkParams

PARTS = "part", "pass"
BLOCK = "run of the block"
PASSES = 16  # in a row
READ = {"H200": 4.5e6, "H100": 3.15e6}  # bytes a microsecond, as measured
SAMPLINGS = {"greedy": Sampling.of(0.0), "top-p 0.9": Sampling.of(1.0, 0.9)}

type Parts = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]  # a function and its arguments, by its name


@contextlib.contextmanager
def unlike_rows() -> Iterator[None]:
    """Give each row of the block streams of its own."""
    real = dspark.first_streams

    def unlike(params: ModelParams, tokens: Any) -> jax.Array:
        shape = *tokens.ids.shape, params.cfg.num_streams, params.cfg.hidden_size
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(tokens.ids))  # no constant of the program
        return jax.random.normal(key, shape, params.embedding.dtype)

    dspark.first_streams = cast(Any, unlike)
    try:
        yield
    finally:
        dspark.first_streams = real


def with_block(cfg: ModelConfig) -> ModelConfig:
    """The model with a DSpark block, whose taps are its last layers."""
    taps = tuple(range(cfg.num_layers))[-3:]
    return dataclasses.replace(cfg, dspark=DSparkConfig(taps=taps, noise_token=cfg.vocab_size - 1))


def caches_of(bench: Bench, cfg: ModelConfig, requests: int, drafts: int) -> Caches:
    """Caches whose requests hold random rows."""
    made = jax.eval_shape(lambda: init_caches(cfg, requests, bench.context + ROOM, drafts, headroom=1.0))
    model = long_cache(made.model.plan, bench.context)
    return Caches(model=model, drafts=made.drafts and long_cache(made.drafts.plan, bench.context))


def block_megabytes(params: ModelParams, requests: int) -> float:
    """The weights that a run of the block reads, in MB. Of experts they are those that unlike rows pick."""
    cfg, drafts = params.cfg, params.drafts
    assert isinstance(drafts, DSparkParams)
    assert cfg.dspark is not None
    rows, total = requests * cfg.dspark.block_size, 0.0
    for block in drafts.blocks:
        routed = d4.cache.tree_bytes((block.experts.gate_up, block.experts.down))
        untouched = (1 - cfg.experts_per_token / cfg.num_experts) ** rows
        total += d4.cache.tree_bytes(block) - routed * untouched
    return total / 1e6


def parts_of(bench: Bench, params: ModelParams, requests: int) -> Parts:
    """The parts of a pass with as many drafts as the block has rows."""
    cfg, kind = params.cfg, params.drafts
    assert isinstance(kind, DSparkParams)
    assert cfg.dspark is not None
    drafts, hidden, vocabulary = cfg.dspark.block_size, cfg.hidden_size, cfg.vocab_size
    cache = caches_of(bench, cfg, requests, drafts).drafts
    assert cache is not None
    keys = jax.random.split(jax.random.key(requests), 5)
    ids = jax.random.randint(keys[0], (requests, 1 + drafts), 0, vocabulary, jnp.int32)
    seen = jax.random.normal(keys[1], (requests, 1 + drafts, len(cfg.dspark.taps) * hidden), jnp.bfloat16)
    count = jnp.full(requests, 1 + drafts, jnp.int32)
    fed = Fed(seen=seen, following=ids, slots=jnp.arange(requests, dtype=jnp.int32), count=count)
    x = jax.random.normal(keys[2], (requests, drafts, hidden), jnp.bfloat16)
    logits = 3 * jax.random.normal(keys[3], (requests, 1 + drafts, vocabulary))
    of_rows = jax.random.split(keys[4], requests)

    def store(params: ModelParams, fed: Fed, cache: d4.KVCache) -> d4.KVCache:
        return drafter(params).store(params, fed, cache, None)

    def block(params: ModelParams, fed: Fed, cache: d4.KVCache) -> tuple[jax.Array, jax.Array]:
        rows = dspark.run_block(params, fed.following[:, 0], cache, fed.slots, fed.count > 0)
        return rows.x, rows.normed

    def drawn(kind: DSparkParams, base: jax.Array, x: jax.Array, token: jax.Array, sampling: Sampling) -> Any:
        made = []
        for i in range(drafts):
            logits, confidence = dspark.token_head(kind, base[:, i], x[:, i], token)
            chances = sampling.chances(logits)
            token = chances.draw(of_rows)
            made.append((token, chances, confidence))
        return made

    def judged(logits: jax.Array, guessed: Chances, tokens: jax.Array, sampling: Sampling) -> Any:
        return accept(sampling.chances(logits), guessed, tokens, jnp.full(requests, drafts, jnp.int32), of_rows)

    parts: Parts = {
        "store keys": (store, (params, fed, cache)),
        BLOCK: (block, (params, fed, cache)),
        "logits": (dspark.base_logits, (params, x)),
    }
    for name, sampling in SAMPLINGS.items():
        guessed = jax.jit(sampling.chances)(logits[:, 1:])
        parts[f"draw drafts, {name}"] = drawn, (kind, logits[:, 1:], x, ids[:, 0], sampling)
        parts[f"judge drafts, {name}"] = judged, (logits, guessed, ids[:, 1:], sampling)
    return parts


def time_parts(bench: Bench, params: ModelParams) -> None:
    """Time each part alone."""
    for requests in bench.requests:
        parts = parts_of(bench, params, requests)
        compiled = compile_all([jax.jit(function).lower(*given) for function, given in parts.values()])
        for (name, (_, given)), program in zip(parts.items(), compiled, strict=True):
            rounds = [events_of(program, *given) for _ in range(ROUNDS)]
            times = Times.of([sum(us for _, us in events) for events in rounds], len(rounds[-1]))
            text = f"{times.median:9.1f} us [{times.low:.1f}, {times.high:.1f}] in {times.kernels:g} launches"
            fields: dict[str, Any] = {"us": dataclasses.asdict(times)}
            if name == BLOCK:
                fields["megabytes"] = size = block_megabytes(params, requests)
                card = next((card for card in READ if card in jax.devices()[0].device_kind), "H200")
                text += f", {times.median * READ[card] / size / 1e6:.2f} times its {size:.0f} MB on an {card}"
            bench.note(f"{name} B{requests} {bench.context}", text, **fields)
            if name == BLOCK:
                by_name: dict[str, list[float]] = {}
                for kernel, us in rounds[-1]:
                    by_name.setdefault(kernel.rstrip("0123456789_."), []).append(us)
                for kernel, all_us in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]:
                    print(f"        {sum(all_us):9.2f} us in {len(all_us):3} {kernel[:90]}")


def loop_of(bench: Bench, cfg: ModelConfig, requests: int, drafts: int) -> Loop:
    """The loop that generates, at work on texts of random tokens with so many drafts of each."""
    caches, rng = caches_of(bench, cfg, requests, drafts), np.random.default_rng(5)
    lengths = caches.model.seq_lens + 1
    # Sampled drafts of a random model are hardly ever accepted, so that no text comes to its end.
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (requests, bench.context + ROOM)), jnp.int32)
    rows, limits = jnp.arange(requests, dtype=jnp.int32), jnp.full_like(lengths, bench.context + ROOM)
    texts = Texts.of(tokens, lengths, limits, of_texts(Sampling.of(1.0), rows))
    return dataclasses.replace(begin(caches, texts, cfg.vocab_size, drafts), slots=rows, text=rows + 0)


def ways_of_passes() -> tuple[jax.Array, jax.Array]:
    """The stop tokens, and how many passes the loop makes in a call."""
    return jnp.asarray([-1], jnp.int32), jnp.int32(PASSES)


def lowered_passes(bench: Bench, params: ModelParams, requests: int, drafts: int) -> Any:
    """Trace and lower such a loop."""
    loop = jax.eval_shape(functools.partial(loop_of, bench, params.cfg, requests, drafts))
    return run.lower(params, loop, *ways_of_passes())


def time_passes(bench: Bench, params: ModelParams, numbers: tuple[int, ...]) -> None:
    """Time passes of the loop with so many drafts, beside those without any."""
    cases, began = [(requests, drafts) for requests in bench.requests for drafts in numbers], time.perf_counter()
    compiled = compile_all([lowered_passes(bench, params, *case) for case in cases])
    programs = dict(zip(cases, compiled, strict=True))
    print(f"    loops traced and compiled in {time.perf_counter() - began:.0f} s", flush=True)
    ways = ways_of_passes()  # on the device before anything is timed
    for requests in bench.requests:
        plain = 0.0
        for drafts in numbers:
            program = programs[requests, drafts]
            loop, samples = loop_of(bench, params.cfg, requests, drafts), []
            for _ in range(1 + ROUNDS):
                jax.block_until_ready(loop)
                began = time.perf_counter()
                loop = jax.block_until_ready(program(params, loop, *ways))
                samples.append((time.perf_counter() - began) / PASSES * 1e3)
            assert bool(loop.ok), "a request was refused"
            assert int(loop.passes) == PASSES * (1 + ROUNDS), "a text came to its end"
            times = Times.of(samples[1:])  # the first includes what is done once
            plain = plain or times.median
            text = (
                f"{times.median:9.3f} ms of wall [{times.low:.3f}, {times.high:.3f}], {times.median / plain:.2f} of one"
            )
            text += f" without drafts; {int(loop.accepted)} of {int(loop.drafted)} accepted"
            case = f"pass of {params.cfg.num_layers} layers, {drafts} drafts, B{requests} {bench.context}"
            bench.note(case, text, ms_of_wall=dataclasses.asdict(times), plain=times.median / plain)
            del loop


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default all")
    parser.add_argument("--made", type=int, default=LAYERS, help="layers whose weights are made")
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--drafts", default="2,5", help="of a pass, beside one without")
    options = parser.parse_args(arguments)
    layers = model_of(options)
    cfg, first = with_block(layers), with_block(first_layers(layers, options.made))
    requests = (1, 2) if options.tiny else tuple(map(int, options.requests.split(",")))
    bench = Bench(cfg=cfg, requests=requests, context=512 if options.tiny else CONTEXT, out=options.out)
    began = time.perf_counter()
    made = jax.block_until_ready(random_model(first, jax.random.key(0)))
    size, seconds = d4.cache.tree_bytes(made), time.perf_counter() - began
    print(f"{first.num_layers} layers and the block, {size / 1e9:.1f} GB, made in {seconds:.0f} s", flush=True)
    parts = options.part or PARTS
    with unlike_rows():
        if "part" in parts:
            time_parts(bench, made)
        if "pass" in parts:
            time_passes(bench, whole_model(cfg, made), (0, *map(int, options.drafts.split(","))))


if __name__ == "__main__":
    main()
