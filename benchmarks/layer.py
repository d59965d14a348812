"""What does a layer cost, and what do its parts? python -m benchmarks.layer

    products   every matrix product of a CSA layer by the number of rows, weights cold and inputs in L2. Each run has a
               copy of the weight to itself: L2 keeps lines that are read again and again, whatever is read in between
    layers     what one more layer adds to a decode step: kernel time and launches, every layer with weights of its own
    step       wall time of a decode step of all layers of V4-Flash, and the bytes of their weights
    drafts     wall time of a draft of four tokens for each request, staged and committed, beside a decode step
    prefill    kernel time of a layer's chunk of 4096 tokens of one request, with 28K tokens (``--before``) before it
    mixed      kernel time of a layer's batch of ragged chunks and decode rows, and of both in batches of their own;
               and of a short chunk, padded to 4096 tokens and alone

Kernel times are sums of CUPTI's, from programs of two sizes: the difference is what the layers between them add. Caches
hold random bytes, in ``mxfp4`` and with online tails; with ``--invariant`` they are invariant. Programs are timed
undonated, so that a profile can repeat them; the copies of the cache that this costs are left out. On a CPU
(``--tiny``) everything is wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
import pallas_kernels as pk
from benchmarks.kernels.reads import long_cache
from benchmarks.kernels.timing import FLUSH_NAME, Times, flush_buffer, kernel_events, read_all, record
from benchmarks.speculate import compile_all, decode, forward, speculate, us_per_step
from dsv4jax.layer.kernels.products import ProjectionsKernels
from dsv4jax.layer.ops import PROJECTIONS
from dsv4jax.weights.stored import LAYER_ACTIVATIONS
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP, Machine

PARTS = ("products", "layers", "step", "drafts", "prefill", "mixed")
RATIOS = {"swa": 0, "csa": 4, "hca": 128}
LAYERS = 2, 4  # of the two programs whose difference is taken
INPUT_NAME = "input_of_product"
OF_INPUT = "q_a and kv", "compressors"  # products of a layer's input
ROOM = 1024  # tokens that a request can grow by
DRAFT = 4
IN_A_ROW = 20  # steps that are timed together, so that what the host does first counts little
CHUNK = 4096  # tokens of a prompt's chunk
MIXED = 1024, 768, 600, 257, 1, 1, 1, 1  # new tokens of the requests of a mixed batch
SHORT = 1000  # tokens of a chunk that is padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How weights are kept, and what products do with their inputs."""

    weights: str  # "stored" or "wide"
    activations: str = "bf16"  # of stored weights

    @property
    def name(self) -> str:
        return f"stored {self.activations}" if self.weights == "stored" else "wide"

    def params(self, cfg: d4.DSV4Config, layer: int, dtype: Any) -> d4.AttentionParams:
        key = jax.random.key(layer)
        return d4.init_attention_params(key, cfg, layer, dtype, weights=self.weights, activations=self.activations)


FORMS = (*(Form(weights="stored", activations=each) for each in LAYER_ACTIVATIONS), Form(weights="wide"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes and options of a run of this program."""

    cfg: d4.DSV4Config
    dtype: Any
    requests: tuple[int, ...]
    kinds: tuple[str, ...]
    forms: tuple[Form, ...]
    before: tuple[int, ...]  # tokens before a chunk
    rounds: int
    out: Path | None
    is_tiny: bool
    invariant: bool  # caches

    def context(self, requests: int) -> int:
        """The tokens that each request has."""
        if self.is_tiny:
            return 256
        return 16384 if requests > 64 else 32768

    def with_layers(self, ratios: Sequence[int]) -> d4.DSV4Config:
        return dataclasses.replace(self.cfg, compress_ratios=tuple(ratios))

    def plan(self, cfg: d4.DSV4Config, requests: int, tokens: int | None = None) -> d4.CachePlan:
        """A cache for so many tokens of each request; without a number, for those that it has and some more."""
        return d4.plan_cache(
            cfg,
            max_requests=requests,
            max_context=self.context(requests) + ROOM if tokens is None else tokens,
            headroom=1.0,
            indexer_format="mxfp4",
            hca_tail="online",
            invariant=self.invariant,
        )

    def batch(self, cfg: d4.DSV4Config, requests: int, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inputs, slots, and the number of tokens of each request."""
        slots = jnp.asarray(np.random.default_rng(1).permutation(requests), jnp.int32)
        x = jax.random.normal(jax.random.key(9), (requests, tokens, cfg.hidden_size), self.dtype)
        return x, slots, jnp.full(requests, tokens, jnp.int32)

    def note(self, case: str, text: str, **fields: Any) -> None:
        case += ", invariant" if self.invariant else ""
        print(f"{case:52} {text}", flush=True)
        record(self.out, case=case, **fields)


def events_of(function: Any, *args: Any) -> list[tuple[str, float]]:
    """(name, us) of the kernels of one call, without copies of what is not donated; on a CPU its wall time."""
    if jax.default_backend() == "cpu":
        jax.block_until_ready(function(*args))
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        return [("wall", (time.perf_counter() - begin) * 1e6)]
    return [
        (name, ms * 1e3) for name, ms in kernel_events(function, *args) if not re.search("copy|memcpy", name.lower())
    ]


def total(events: list[tuple[str, float]]) -> float:
    return sum(us for _, us in events)


# ---- products -------------------------------------------------------------------------------------------------------


def products_of(params: d4.AttentionParams, cfg: d4.DSV4Config) -> dict[str, tuple[Any, int]]:
    """The products of a CSA layer: (weight, groups) by name."""
    return {
        "q_a and kv": (params.q_a_kv, 1),
        "compressors": (params.compress, 1),
        "q_b": (params.q_b, 1),
        "q_b of the indexer": (params.index_q_b, 1),
        "o_a": (params.o_a, cfg.o_groups),
        "o_b": (params.o_b, 1),
    }


def pass_on(x: jax.Array, ticket: jax.Array) -> jax.Array:
    """x, written once more after ``ticket`` is there: the input of a product as another kernel leaves it in L2."""
    per_block = WARPGROUP * 16 // x.dtype.itemsize
    flat = x.reshape(-1)

    def body(machine: Machine, inputs: Any, out: Any) -> None:
        count = 16 // x.dtype.itemsize
        at = machine.block(0) * per_block + machine.thread * count
        there = at < flat.size
        out.store_words(inputs[0].load_words(at, count=count, where=there), at, where=there)

    shape = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    grid = (-(-flat.size // per_block),)
    return launch(body, name=INPUT_NAME, grid=grid, inputs=(flat, ticket), state=shape).reshape(x.shape)


def product_program(weights: list[Any], x: jax.Array, groups: int, dtype: Any, *, of_layer: bool) -> Any:
    """A lowered program of a run of a product with each weight, with L2 flushed before it, so that weights are cold.

    ``of_layer`` says that ``x`` is a layer's input. What other products multiply is written by kernels, in the order in
    which they read it. Here ``x`` is random, in whichever order.
    """
    projections = PROJECTIONS.of(None, None, d4.AttentionType.SWA)
    rows = x.size // (groups * x.shape[-1])
    takes = projections.row_form(weights[0], rows, groups) if isinstance(projections, ProjectionsKernels) else "plain"
    is_ordered = not of_layer and takes == "operand"

    def multiply(x: jax.Array, weight: Any) -> jax.Array:
        given = pk.OperandRows(values=x.reshape(rows, -1)) if is_ordered else x
        return projections.linear(given, weight, groups=groups, dtype=dtype)

    if jax.default_backend() == "cpu":
        return jax.jit(multiply).lower(x, weights[0])

    def timed(x: jax.Array, weights: list[Any], buffer: jax.Array, ticket: jax.Array) -> Any:
        out = x
        for weight in weights:
            ticket = read_all(buffer, ticket, out)
            out = multiply(pass_on(x, ticket), weight)
        return out, read_all(buffer, ticket, out)

    return jax.jit(timed).lower(x, weights, _spec(flush_buffer()), jnp.ones(1, jnp.int32))


def _spec(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def product_times(program: Any, x: jax.Array, weights: list[Any]) -> Times:
    """Microseconds of a product: all of its launches."""
    runs = len(weights)
    if jax.default_backend() == "cpu":
        return Times.of([total(events_of(program, x, weights[0])) for _ in range(runs)])
    events = kernel_events(program, x, weights, flush_buffer(), jnp.ones(1, jnp.int32))
    marks = [i for i, (name, _) in enumerate(events) if FLUSH_NAME in name]
    assert len(marks) == runs + 1, f"{len(marks)} reads of L2 where {runs + 1} were asked for"
    found = [[us for name, us in events[a + 1 : b] if INPUT_NAME not in name] for a, b in itertools.pairwise(marks)]
    return Times.of([sum(one) * 1e3 for one in found], statistics.median(map(len, found)))


def time_products(bench: Bench) -> None:
    cfg, runs = bench.with_layers([RATIOS["csa"]]), bench.rounds
    for form in bench.forms:
        params = form.params(cfg, 0, bench.dtype)
        cases = []
        for name, (weight, groups) in products_of(params, cfg).items():
            if name == "compressors" and form != bench.forms[0]:
                continue  # they are wide in every form
            copies = [jax.tree.map(jnp.copy, weight) for _ in range(runs)]
            for rows in bench.requests:
                lead = (rows, 1) if groups == 1 else (rows, 1, groups)
                x = jax.random.normal(jax.random.key(3), (*lead, weight.shape[1]), bench.dtype)
                dtype = bench.dtype if name == "o_a" else jnp.float32
                program = product_program(copies, x, groups, dtype, of_layer=name in OF_INPUT)
                cases.append((name, rows, groups, copies, x, program))
        programs = compile_all([case[-1] for case in cases])
        for (name, rows, groups, copies, x, _), program in zip(cases, programs, strict=True):
            out, width = copies[0].shape
            times, size = product_times(program, x, copies), d4.cache.tree_bytes(copies[0])
            shape = f"{f'{groups} x ' if groups > 1 else ''}{width} -> {out // groups}"
            text = f"{times.median:8.2f} us [{times.low:.2f}, {times.high:.2f}] in {times.kernels:g} launches"
            text += f", {size / times.median / 1e6:.2f} TB/s of weights"
            case = f"product {name} {shape} M{rows} {form.name}"
            bench.note(case, text, us=dataclasses.asdict(times), bytes=size)


# ---- layers ---------------------------------------------------------------------------------------------------------


def events_of_steps(program: Any, *given: Any, rounds: int) -> list[list[tuple[str, float]]]:
    """``events_of`` for several runs of ``forward``, whose requests must all be granted their tokens.

    Tokens of a request that is refused are padding, which takes less time.
    """
    assert bool(jnp.all(program(*given)[2])), "a request was refused"
    return [events_of(program, *given) for _ in range(rounds)]


def without_number(name: str) -> str:
    """A kernel's name without what XLA counts equal ones by."""
    return re.sub(r"[._0-9]+$", "", name)


def time_layers(bench: Bench) -> None:
    for form, kind in itertools.product(bench.forms, bench.kinds):
        ratio = RATIOS[kind]
        all_params = None
        lowered = []
        for requests, layers in itertools.product(bench.requests, LAYERS):
            cfg = bench.with_layers([ratio] * layers)
            if all_params is None:
                longest = bench.with_layers([ratio] * max(LAYERS))
                all_params = [form.params(longest, layer, bench.dtype) for layer in range(max(LAYERS))]
            batch, cache = bench.batch(cfg, requests, 1), d4.cache.abstract_cache(bench.plan(cfg, requests))
            x, slots, count = _spec(batch)
            lowered.append(jax.jit(forward).lower(_spec(all_params[:layers]), x, cache, slots, count))
        assert all_params is not None
        programs = dict(zip(itertools.product(bench.requests, LAYERS), compile_all(lowered), strict=True))
        for requests in bench.requests:
            time_layer(bench, form, kind, requests, all_params, {n: programs[requests, n] for n in LAYERS})


def time_layer(
    bench: Bench, form: Form, kind: str, requests: int, params: list[d4.AttentionParams], programs: dict[int, Any]
) -> None:
    """Note what one more layer adds to a step."""
    found: dict[int, list[list[tuple[str, float]]]] = {}
    for layers, program in programs.items():
        cfg = bench.with_layers([RATIOS[kind]] * layers)
        x, slots, count = bench.batch(cfg, requests, 1)
        cache = long_cache(bench.plan(cfg, requests), bench.context(requests))
        found[layers] = events_of_steps(program, params[:layers], x, cache, slots, count, rounds=bench.rounds)
        del cache
    few, many = (found[n] for n in LAYERS)
    more = LAYERS[1] - LAYERS[0]
    times = Times.of([(total(b) - total(a)) / more for a, b in zip(few, many, strict=True)])
    launches = (len(many[0]) - len(few[0])) / more
    once = len(few[0]) - LAYERS[0] * launches
    by_kernel = {name: us / more for name, us in difference(few, many).items()}
    case = f"layer {kind} B{requests} {bench.context(requests)} {form.name}"
    text = f"{times.median:8.1f} us [{times.low:.1f}, {times.high:.1f}] in {launches:g} launches; {once:g} once"
    bench.note(
        case,
        text,
        us=dataclasses.asdict(times),
        launches=launches,
        once=once,
        by_kernel={name: round(us, 2) for name, us in by_kernel.items()},
    )
    for name, us in sorted(by_kernel.items(), key=lambda item: -item[1])[:20]:
        print(f"        {us:8.2f} us {name[:100]}")


def difference(few: list[list[tuple[str, float]]], many: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Microseconds by kernel that the longer program has more, as a mean of all rounds."""
    sums: dict[str, float] = defaultdict(float)
    for sign, rounds in ((-1, few), (1, many)):
        for name, us in itertools.chain(*rounds):
            sums[without_number(name)] += sign * us / len(rounds)
    return sums


# ---- steps and drafts -----------------------------------------------------------------------------------------------


class Whole:
    """A model's weights, one cache that programs are given in turn, and the programs."""

    def __init__(self, bench: Bench, form: Form, requests: int, tokens: int, programs: dict[str, Callable[..., Any]]):
        cfg = bench.cfg
        begin = time.perf_counter()
        self.params = [form.params(cfg, layer, bench.dtype) for layer in range(cfg.num_layers)]
        self.x, self.slots, self.count = bench.batch(cfg, requests, tokens)
        self.cache = long_cache(bench.plan(cfg, requests), bench.context(requests))
        lowered = [jax.jit(program, donate_argnums=2).lower(*self.given) for program in programs.values()]
        self.programs = dict(zip(programs, compile_all(lowered), strict=True))
        print(f"    traced and compiled in {time.perf_counter() - begin:.0f} s", flush=True)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.params, self.x, self.cache, self.slots, self.count

    @property
    def weight_bytes(self) -> int:
        return d4.cache.tree_bytes(self.params)

    def time(self, name: str, steps: int) -> float:
        """Microseconds per step, over several in a row."""
        us, self.cache = us_per_step(self.programs[name], *self.given, steps=steps)
        return us

    def samples(self, rounds: int, steps: int) -> dict[str, list[float]]:
        """Times of all programs, taken in turns, so that drift affects them equally."""
        for name in self.programs:
            self.time(name, 1)  # warms up
        found: dict[str, list[float]] = {name: [] for name in self.programs}
        for _ in range(rounds):
            for name, times in found.items():
                times.append(self.time(name, steps))
        return found


def time_steps(bench: Bench) -> None:
    for form, requests in itertools.product(bench.forms, (64, 1) if not bench.is_tiny else (2,)):
        whole = Whole(bench, form, requests, 1, {"decode": decode})
        times = Times.of(whole.samples(bench.rounds, IN_A_ROW)["decode"])
        layers, size = bench.cfg.num_layers, whole.weight_bytes
        case = f"step of {layers} layers B{requests} {bench.context(requests)} {form.name}"
        text = f"{times.median:8.0f} us of wall [{times.low:.0f}, {times.high:.0f}]; weights {size / 1e9:.2f} GB"
        bench.note(case, text, us_of_wall=dataclasses.asdict(times), bytes_of_weights=size)
        del whole


def time_drafts(bench: Bench) -> None:
    requests = 2 if bench.is_tiny else 64
    for form in bench.forms:
        whole = Whole(bench, form, requests, DRAFT, {"decode": decode, "draft": speculate})
        found = whole.samples(bench.rounds, IN_A_ROW)
        times, steps = Times.of(found["draft"]), statistics.median(found["decode"])
        case = f"draft of {DRAFT} B{requests} {bench.context(requests)} {form.name}"
        text = f"{times.median:8.0f} us of wall [{times.low:.0f}, {times.high:.0f}]: {times.median / steps:.2f} steps"
        bench.note(case, text, us_of_wall=dataclasses.asdict(times), decode_steps=times.median / steps)
        del whole


def time_prefill(bench: Bench) -> None:
    chunk = 64 if bench.is_tiny else CHUNK
    for form, kind, before in itertools.product(bench.forms, bench.kinds, bench.before):
        cfg = bench.with_layers([RATIOS[kind]])
        plan = bench.plan(cfg, 1, before + chunk)
        params, batch = [form.params(cfg, 0, bench.dtype)], bench.batch(cfg, 1, chunk)
        x, slots, count = batch
        cache = long_cache(plan, before)
        program = jax.jit(forward).lower(params, x, cache, slots, count).compile()
        found = events_of_steps(program, params, x, cache, slots, count, rounds=bench.rounds)
        times = Times.of([total(events) for events in found])
        case = f"chunk of {chunk} {kind} after {before} {form.name}"
        by_kernel = difference([[]], found)
        bench.note(
            case,
            f"{times.median:8.1f} us [{times.low:.1f}, {times.high:.1f}] in {len(found[0])} launches",
            us=dataclasses.asdict(times),
            launches=len(found[0]),
            by_kernel={name: round(us, 2) for name, us in by_kernel.items()},
        )
        for name, us in sorted(by_kernel.items(), key=lambda item: -item[1])[:20]:
            print(f"        {us:8.2f} us {name[:100]}")


def time_mixed(bench: Bench) -> None:
    smaller = 64 if bench.is_tiny else 1
    counts, short, padded = tuple(-(-n // smaller) for n in MIXED), SHORT // smaller, CHUNK // smaller
    chunks, rows = tuple(n for n in counts if n > 1), (1,) * counts.count(1)
    batches = {"mixed": counts, "its chunks": chunks, "its rows": rows, "padded": (short,), "alone": (short,)}
    for form, kind in itertools.product(bench.forms, bench.kinds):
        cfg = bench.with_layers([RATIOS[kind]])
        params = [form.params(cfg, 0, bench.dtype)]
        for name, count in batches.items():
            tokens, before = padded if name == "padded" else max(count), bench.context(len(count))
            x, slots, _ = bench.batch(cfg, len(count), tokens)
            given = params, x, long_cache(bench.plan(cfg, len(count)), before), slots, jnp.asarray(count, jnp.int32)
            program = jax.jit(forward).lower(*given).compile()
            events = events_of_steps(program, *given, rounds=bench.rounds)
            times, by_kernel = Times.of([total(each) for each in events]), difference([[]], events)
            bench.note(
                f"{name} {'+'.join(map(str, count))} of {tokens} {kind} after {before} {form.name}",
                f"{times.median:8.1f} us [{times.low:.1f}, {times.high:.1f}]",
                us=dataclasses.asdict(times),
                by_kernel={kernel: round(us, 2) for kernel, us in by_kernel.items()},
            )
            for kernel, us in sorted(by_kernel.items(), key=lambda item: -item[1])[:12]:
                print(f"        {us:8.2f} us {kernel[:100]}")


RUN = {
    "products": time_products,
    "layers": time_layers,
    "step": time_steps,
    "drafts": time_drafts,
    "prefill": time_prefill,
    "mixed": time_mixed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="what to time; may be repeated; default all")
    parser.add_argument("--requests", default="1,8,64,256", help="of products and layers")
    parser.add_argument("--kinds", default="csa,hca", help="of layers")
    parser.add_argument("--weights", default="stored,wide")
    parser.add_argument("--activations", default=",".join(LAYER_ACTIVATIONS), help="of stored weights")
    parser.add_argument("--before", default="28672", help="tokens before a chunk")
    parser.add_argument("--invariant", action="store_true", help="caches that are invariant")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each program")
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines here")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    options = parser.parse_args()
    cfg = d4.DSV4Config.tiny() if options.tiny else d4.DSV4Config.flash()
    forms = [
        form
        for form in FORMS
        if form.weights in options.weights.split(",")
        and (form.weights == "wide" or form.activations in options.activations.split(","))
    ]
    bench = Bench(
        cfg=cfg,
        dtype=jnp.float32 if options.tiny else jnp.bfloat16,
        requests=(2,) if options.tiny else tuple(map(int, options.requests.split(","))),
        kinds=tuple(options.kinds.split(",")),
        forms=tuple(forms),
        before=(192,) if options.tiny else tuple(map(int, options.before.split(","))),
        rounds=2 if options.tiny else options.rounds,
        out=options.out,
        is_tiny=options.tiny,
        invariant=options.invariant,
    )
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for part in options.part or PARTS:
        begin = time.perf_counter()
        RUN[part](bench)
        print(f"    {part}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
