"""The cache update and the gather at real sizes: kernel time, bandwidth, share of the ceiling, and XLA's time.

They are timed as the library calls them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from benchmarks.kernels.timing import Times, beside, ceilings, kernel_events, kernel_times, record
from dsv4jax.formats import row_bytes
from dsv4jax.indexing import Batch
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.update import store
from dsv4jax.tails import Streams

CONFIGS = {"flash": d4.DSV4Config.flash, "pro": d4.DSV4Config.pro}
BATCHES = (1, 8, 64, 256)
CHUNKS = (128, 512, 1024, 4096)
LAYERS = 2  # layers of the kind in the timed stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One cache update: the layer, the number of requests and tokens, and how many of them complete an entry."""

    model: str
    kind: str
    batch: int
    tokens: int = 1
    flushing: str = "all"  # all, none, mix (1 in m or m' requests) or chunk
    kv_format: str = "fp8_row"
    indexer_format: str = "nvfp4"
    hca_tail: str = "ring"

    @property
    def name(self) -> str:
        tail = f" {self.hca_tail}" if self.kind == "hca" else ""
        return f"{self.model} {self.kind}{tail} B{self.batch} T{self.tokens} {self.flushing} {self.kv_format}"

    @property
    def cfg(self) -> d4.DSV4Config:
        return CONFIGS[self.model]()

    @property
    def plan(self) -> d4.CachePlan:
        # Two layers of the kind, and a pool well above the size of L2.
        ratio = self.cfg.ratio(d4.AttentionType(self.kind))
        cfg = dataclasses.replace(self.cfg, compress_ratios=(ratio,) * LAYERS)
        return d4.plan_cache(
            cfg,
            max_requests=self.batch,
            max_context=max(8192, 2 * self.tokens),
            num_blocks=max(4096, 64 * self.batch, self.batch * self.tokens // 64),
            kv_format=self.kv_format,
            indexer_format=self.indexer_format,
            hca_tail=self.hca_tail,
        )

    def starts(self) -> np.ndarray:
        ratio = max(1, self.cfg.ratio(d4.AttentionType(self.kind)))
        if self.flushing == "chunk":
            return np.zeros(self.batch, np.int32)
        phase = {"all": np.full(self.batch, ratio - 1), "none": np.zeros(self.batch)}.get(self.flushing)
        phase = np.arange(self.batch) % ratio if phase is None else phase
        return (1024 + phase).astype(np.int32)

    def num_entries(self) -> int:
        """Number of entries that the call completes."""
        ratio = self.cfg.ratio(d4.AttentionType(self.kind))
        starts = self.starts()
        return int(np.sum((starts + self.tokens) // ratio - starts // ratio)) if ratio else 0

    def bytes_moved(self) -> int:
        """Return the fewest bytes that the update must move: each input, needed old row and new row once."""
        plan, cfg, batch, tokens = self.plan, self.cfg, self.batch, self.tokens
        kind, dim = d4.AttentionType(self.kind), cfg.head_dim
        row = row_bytes(plan.row_spec)
        window = min(tokens, cfg.sliding_window) * batch
        total = window * (4 * dim + row + 4)
        if kind == d4.AttentionType.SWA:
            return total
        entries, ratio = self.num_entries(), cfg.ratio(kind)
        kept = batch * min(tokens, ratio)
        if kind == d4.AttentionType.HCA:
            total += batch * tokens * 2 * 4 * dim + entries * row
            if self.hca_tail == "online":
                return total + batch * 2 * 3 * 4 * dim
            old = entries * (ratio - 1) if tokens == 1 else 0
            return total + (kept + old) * 2 * 4 * dim
        key = row_bytes(plan.key_spec)
        flushed = entries if tokens == 1 else min(entries, batch)  # requests whose previous b-stream changes
        old = (3 * ratio - 2) * flushed if tokens == 1 else ratio * flushed
        for width in (dim, cfg.indexer_head_dim):
            total += batch * tokens * 4 * 4 * width + kept * 4 * 4 * width  # streams, current rows
            total += (old + ratio * flushed) * 2 * 4 * width  # old rows, previous rows
        return total + entries * (row + key)


def decode_cases() -> list[Case]:
    cases = []
    for model in CONFIGS:
        for batch in BATCHES:
            cases += [
                Case(model=model, kind="csa", batch=batch, flushing=flushing) for flushing in ("all", "none", "mix")
            ]
            for tail in ("ring", "online"):
                cases += [
                    Case(model=model, kind="hca", batch=batch, flushing=flushing, hca_tail=tail)
                    for flushing in ("all", "none", "mix")
                ]
    cases += [
        Case(model="flash", kind="csa", batch=batch, kv_format="fp8_tile64", indexer_format="mxfp4")
        for batch in (64, 256)
    ]
    return cases + [Case(model="flash", kind="swa", batch=batch, flushing="none") for batch in (64, 256)]


def chunk_cases() -> list[Case]:
    cases = [
        Case(model="flash", kind=kind, batch=1, tokens=tokens, flushing="chunk", hca_tail=tail)
        for tokens in CHUNKS
        for kind, tail in (("csa", "ring"), ("hca", "ring"), ("hca", "online"), ("swa", "ring"))
    ]
    return cases + [Case(model="flash", kind="csa", batch=8, tokens=512, flushing="chunk")]


def new_rows(case: Case, seed: int) -> TokenRows:
    """Return what the tokens of a call contribute."""
    rng = np.random.default_rng(seed)
    is_csa, cfg = case.kind == "csa", case.cfg

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    def streams(dim: int) -> tuple[Streams, jax.Array]:
        width = dim * (1 + is_csa)
        return Streams(
            k=normal(case.batch, case.tokens, width), z=normal(case.batch, case.tokens, width), overlap=is_csa
        ), normal(dim)

    entry = None if case.kind == "swa" else streams(cfg.head_dim)
    key = streams(cfg.indexer_head_dim) if is_csa else None
    return TokenRows(kv=normal(case.batch, case.tokens, cfg.head_dim), entry=entry, key=key)


def arrays(case: Case, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return a stack of random tails, and the inputs of a call."""
    plan = case.plan
    rng = np.random.default_rng(seed)
    stack = d4.init_cache(plan).stack(case.kind)
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(stack.state)))
    keys = jax.tree.unflatten(jax.tree.structure(stack.state), list(keys))

    def noise(key: Any, leaf: jax.Array) -> jax.Array:
        return jax.random.normal(key, leaf.shape, leaf.dtype) if leaf.dtype == jnp.float32 else leaf

    stack = dataclasses.replace(stack, state=jax.tree.map(noise, keys, stack.state))
    table = rng.permutation(plan.num_blocks)[: case.batch * plan.max_blocks].reshape(case.batch, -1)
    batch = Batch(
        slots=jnp.asarray(rng.permutation(case.batch), jnp.int32),
        start=jnp.asarray(case.starts()),
        num_new=jnp.full(case.batch, case.tokens, jnp.int32),
    )
    return stack, {"rows": new_rows(case, seed), "block_table": jnp.asarray(table, jnp.int32), "batch": batch}


def update(case: Case, backend: str, stack: Any, inputs: dict[str, Any], layer: jax.Array) -> Any:
    """The timed call. ``layer`` is an int32 [1]."""
    rows, table, batch = (inputs[name] for name in ("rows", "block_table", "batch"))
    kind = d4.AttentionType(case.kind)
    call = LayerCall(stack=stack, index=layer[0], block_table=table, batch=batch, kind=kind, plan=case.plan)
    return store(call, rows, CACHE_UPDATE[backend])


def run_case(case: Case, ceiling: float, backends: tuple[str, ...], *, runs: int) -> dict[str, Any]:
    stack, inputs = arrays(case)
    found: dict[str, Any] = {"case": case.name, **dataclasses.asdict(case), "bytes": case.bytes_moved()}
    for backend in backends:
        times = kernel_times(functools.partial(update, case, backend), stack, inputs, runs=runs)
        found[backend] = dataclasses.asdict(times)
    speed = found["bytes"] / found["pallas"]["median"] / 1e3
    return found | {"GB/s": round(speed, 1), "share of copy ceiling": round(speed / ceiling, 3)}


def run_gather(ceiling: float, backends: tuple[str, ...], count: int = 8192) -> list[dict[str, Any]]:
    """Time the gather of one request's rows to bf16: all of them in order, and by a random list."""
    cfg = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(4,) * LAYERS)
    found = []
    for form in ("fp8_row", "fp8_tile64"):
        plan = d4.plan_cache(cfg, max_requests=2, max_context=count * 4, num_blocks=4096, kv_format=form)
        pool = d4.init_cache(plan).stack("csa").pool
        assert pool is not None
        rng = np.random.default_rng(0)
        noise = jnp.asarray(rng.integers(0, 120, pool.entries.nope.shape, np.uint8))
        pool = dataclasses.replace(pool, entries=dataclasses.replace(pool.entries, nope=noise))
        table = jnp.asarray(rng.permutation(plan.num_blocks)[: 2 * plan.max_blocks].reshape(2, -1), jnp.int32)
        slots, full = jnp.asarray([1], jnp.int32), jnp.asarray([count], jnp.int32)
        picks = jnp.asarray(rng.permutation(count)[None], jnp.int32)
        moved = count * (row_bytes(plan.row_spec) + 2 * cfg.head_dim)
        for what, argument in (("all of a request", full), ("a list", picks)):
            line: dict[str, Any] = {"case": f"gather {what} {form} {count}", "bytes": moved}
            for backend in backends:

                def gather(
                    _: Any, inputs: Any, layer: jax.Array, what: str = what, backend: str = backend, plan: Any = plan
                ) -> Any:
                    pool, table, slots, argument = inputs
                    function = (
                        d4.pieces.gather_all_compressed if what.startswith("all") else d4.pieces.gather_compressed
                    )
                    options = dict(plan=plan, dtype=jnp.bfloat16, backend=backend)
                    return function(pool, layer[0], table, slots, argument, **options)

                shape = (1, count, cfg.head_dim)
                inputs = (pool, table, slots, argument)
                line[backend] = dataclasses.asdict(kernel_times(gather, jnp.zeros(shape, jnp.bfloat16), inputs))
            speed = moved / line["pallas"]["median"] / 1e3
            found.append(line | {"GB/s": round(speed, 1), "share of copy ceiling": round(speed / ceiling, 3)})
    return found


def run_step(backend: str, batch: int, dump: Path, *, tokens: int, hca_tail: str = "ring") -> dict[str, Any]:
    """Time a decode loop: the cache updates of all 43 Flash layers, unrolled in a scan over tokens, at all phases.

    Returns the wall time per layer, the kernels' share of it, the number of kernels in a step, and the host's commands.
    """
    cfg = d4.DSV4Config.flash()
    plan = d4.plan_cache(cfg, max_requests=batch, max_context=4096, hca_tail=hca_tail)
    cache = d4.init_cache(plan)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(plan.num_blocks)[: batch * plan.max_blocks].reshape(batch, -1), jnp.int32)
    cases = [Case(model="flash", kind=str(spec.attn), batch=batch) for spec in d4.config.layer_schedule(cfg)]
    drawn = [new_rows(case, seed=layer) for layer, case in enumerate(cases)]
    begin = jnp.asarray(1024 + rng.permutation(max(batch, 128))[:batch] % 128, jnp.int32)
    slots, one = jnp.asarray(rng.permutation(batch), jnp.int32), jnp.ones(batch, jnp.int32)

    # An inner jit, so that one kernel is compiled once for all layers of its kind.
    @functools.partial(jax.jit, static_argnames="kind")
    def one_layer(stack: Any, index: jax.Array, inputs: Any, start: jax.Array, kind: d4.AttentionType) -> Any:
        batch = Batch(slots=slots, start=start, num_new=one)
        call = LayerCall(stack=stack, index=index, block_table=table, batch=batch, kind=kind, plan=plan)
        return store(call, inputs, CACHE_UPDATE[backend])

    def decode_loop(cache: Any, drawn: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            cache, start = carry
            for layer, inputs in enumerate(drawn):
                kind, index = cache.locate(layer)
                stack = one_layer(cache.stack(kind), jnp.asarray(index, jnp.int32), inputs, start, kind)
                cache = cache.with_stack(kind, stack)
            return (cache, start + 1), None

        return jax.lax.scan(step, (cache, begin), length=tokens)[0][0]

    events = kernel_events(jax.jit(decode_loop), cache, drawn)
    in_loop = [ms for name, ms in events if "copy" not in name.lower()]
    function = jax.jit(decode_loop, donate_argnums=0).lower(cache, drawn).compile()
    samples = []
    for _ in range(8):
        jax.block_until_ready(cache)
        begin_time = time.perf_counter()
        cache = jax.block_until_ready(function(cache, drawn))
        samples.append((time.perf_counter() - begin_time) * 1e6 / (tokens * cfg.num_layers))
    return {
        "case": f"43-layer step B{batch} {hca_tail} {backend}",
        "us of wall per layer": dataclasses.asdict(Times.of(samples[1:])),
        "us of kernels per layer": sum(in_loop) * 1e3 / (tokens * cfg.num_layers),
        "kernels per step": len(in_loop) / tokens,
        "thunks": thunks(dump),
    }


def thunks(dump: Path) -> dict[str, int]:
    """Return the kinds of commands in the newest compiled decode loop.

    Those in a command buffer are counted with it.
    """
    found = sorted(dump.glob("*decode_loop*thunk_sequence_after_thunk_passes*"), key=lambda path: path.stat().st_mtime)
    return dict(collections.Counter(re.findall(r"\bk[A-Z]\w+", found[-1].read_text()))) if found else {}


def show(line: dict[str, Any]) -> None:
    pallas = line.get("pallas")
    text = f"{line['case']:46}"
    if pallas:
        text += f" {pallas['median']:7.2f} us [{pallas['low']:.2f}, {pallas['high']:.2f}] {line['GB/s']:7.1f} GB/s"
        text += f" {line['share of copy ceiling']:6.1%}"
    print(text + beside(line), flush=True)


def main(out: Path | None, only: str, backends: tuple[str, ...], *, runs: int, dump: Path) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    limits = ceilings()
    print(limits)
    record(out, case="ceilings", **limits)
    ceiling = limits["copy GB/s"]
    for case in decode_cases() + chunk_cases():
        if re.search(only, case.name):
            line = run_case(case, ceiling, backends, runs=runs)
            show(line)
            record(out, **line)
    if re.search(only, "gather"):
        for line in run_gather(ceiling, backends):
            show(line)
            record(out, **line)
    if re.search(only, "43-layer step"):
        for batch, backend, tail in (
            (64, "pallas", "ring"),
            (64, "pallas", "online"),
            (64, "triton", "online"),
            (64, "xla", "ring"),
            (256, "pallas", "ring"),
            (256, "pallas", "online"),
        ):
            if backend in backends:
                line = run_step(backend, batch, dump, tokens=32, hca_tail=tail)
                wall = line["us of wall per layer"]
                text = f"{line['case']:46} {wall['median']:.2f} us of wall [{wall['low']:.2f}, {wall['high']:.2f}]"
                text += f", {line['us of kernels per layer']:.2f} of kernels per layer"
                print(f"{text}; {line['kernels per step']:.0f} kernels a step, {line['thunks']}", flush=True)
                record(out, **line)
