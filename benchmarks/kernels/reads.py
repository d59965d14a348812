"""Decode attention, indexer scores and top-k at real sizes: kernel time, share of the roofline, and XLA's time.

They are timed as the library calls them, on a cache of random bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
import pallas_kernels as pk
from benchmarks.kernels.timing import beside, ceilings, kernel_events, kernel_times, library, record
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.formats import row_bytes
from dsv4jax.layer import attention, indexer
from dsv4jax.rope import packed_angles, rope_frequencies
from pallas_kernels.attention import sm90, sm90_few, sm90_spread
from pallas_kernels.attention.block import HEADS
from pallas_kernels.attention.inputs import NOPE_DIM
from pallas_kernels.attention.keys import KEYS
from pallas_kernels.attention.layout import AttentionLayout
from pallas_kernels.scores.sm90 import Tuning
from pallas_kernels.selection.split import Split

LAYERS = 2  # layers of the kind in the timed cache, of which the second is read
CHUNK = 4096  # tokens of a prompt's chunk
XLA_BYTES = 8 << 30  # limit for XLA's temporaries; if it needs more it is not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One read: the op, the layer, the number of requests, and how much each reads."""

    op: str  # attention, indexer, topk
    kind: str = "csa"
    batch: int
    tokens: int = 1
    heads: int = 64
    entries: int = 0  # entries that each request has
    picks: int = 0
    kv_format: str = "fp8_row"
    indexer_format: str = "mxfp4"

    @property
    def name(self) -> str:
        tokens = f" x {self.tokens} tokens" if self.tokens > 1 else ""
        if self.op == "attention":
            keys = {"csa": f"128 + {self.picks}", "hca": f"128 + {self.entries}", "swa": "128"}[self.kind]
            return f"attention {self.kind} B{self.batch}{tokens} {self.heads} heads {keys} {self.kv_format}"
        if self.op == "indexer":
            return f"indexer {self.indexer_format} B{self.batch}{tokens} x {self.entries}"
        return f"topk B{self.batch} {self.entries} to {self.picks}"

    @functools.cached_property
    def plan(self) -> d4.CachePlan:
        base = d4.DSV4Config.flash()
        ratio = {"csa": 4, "hca": 128, "swa": 0}[self.kind]
        cfg = dataclasses.replace(
            base, compress_ratios=(ratio,) * LAYERS, num_heads=self.heads, indexer_top_k=self.picks or 512
        )
        context = max(self.entries * max(ratio, 1), 256)
        options: Any = dict(kv_format=self.kv_format, indexer_format=self.indexer_format)
        return d4.plan_cache(cfg, max_requests=self.batch, max_context=context, **options)

    @property
    def entries_read(self) -> int:
        """Number of entries that a query of attention reads."""
        return {"csa": self.picks, "hca": self.entries, "swa": 0}[self.kind]

    def work(self) -> tuple[int, int]:
        """Return the fewest bytes to move, and the operations (two per multiply-add)."""
        queries = self.batch * self.tokens
        cfg, plan = self.plan.cfg, self.plan
        if self.op == "topk":
            return queries * 4 * (self.entries + self.picks), 0
        if self.op == "indexer":
            key = row_bytes(plan.key_spec)
            query = cfg.indexer_heads * (key + 4)
            moved = self.batch * self.entries * (key + 4 * self.tokens) + queries * query
            return moved, 2 * queries * self.entries * cfg.indexer_heads * (cfg.indexer_head_dim + 1)
        keys = 128 + self.entries_read
        row = row_bytes(plan.row_spec)
        moved = queries * (keys * row + 2 * 2 * self.heads * cfg.head_dim + 4 * self.picks)
        return moved, 2 * 2 * queries * self.heads * keys * cfg.head_dim


def cases() -> list[Case]:
    attend = functools.partial(Case, op="attention")
    found = [attend(batch=batch, picks=512, entries=8192) for batch in (1, 8, 64, 128, 256)]
    # Those of V4-Flash over 8, 4 and 2 devices.
    found += [attend(batch=batch, heads=few, picks=512, entries=8192) for few in (8, 16, 32) for batch in (1, 64)]
    wide: Any = dict(heads=128, picks=1024, entries=8192)
    found += [attend(batch=batch, **wide) for batch in (8, 128)]
    found += [attend(batch=batch, kind="hca", entries=1024) for batch in (1, 128)]
    found += [attend(batch=batch, kind="swa") for batch in (1, 256)]
    found += [attend(batch=128, picks=512, entries=8192, kv_format=form) for form in ("fp8_tile64", "bf16")]
    found += [attend(batch=64, tokens=4, picks=512, entries=8192)]
    found += [attend(batch=1, tokens=CHUNK, picks=512, entries=8192), attend(batch=1, tokens=CHUNK, **wide)]
    found += [attend(batch=1, tokens=CHUNK, kind="hca", entries=entries) for entries in (256, 1024)]
    for form in ("mxfp4", "nvfp4"):
        score = functools.partial(Case, op="indexer", indexer_format=form)
        found += [score(batch=batch, entries=32768) for batch in (1, 8, 64)] + [score(batch=64, entries=8192)]
        found += [score(batch=8, tokens=4, entries=32768)]
    pick = functools.partial(Case, op="topk")
    found += [pick(batch=batch, entries=8192, picks=512) for batch in (1, 64, 256)]
    found += [pick(batch=batch, entries=32768, picks=1024) for batch in (1, 64, 256)]
    return [*found, pick(batch=1, entries=262144, picks=1024)]


_CODES_SIZE = 56.0  # root of the mean square of E4M3 numbers whose codes are uniform below 120


def _random_stored(name: str, key: Any, leaf: Any) -> jax.Array:
    """Return a random leaf of rows whose channels are about 1 in size, like those of normalised keys.

    So logits are about as large as in a model. Keys of the indexer are only finite: no time depends on them.
    """
    if name == "scale" and leaf.dtype == jnp.uint8:
        of_tiles = leaf.shape[-1] == NOPE_DIM // 64  # UE8M0; those of 4-bit keys are near 1 in E4M3
        return jax.random.randint(key, leaf.shape, *((120, 123) if of_tiles else (56, 72)), jnp.uint8)
    if name == "scale":
        return jax.random.uniform(key, leaf.shape, leaf.dtype, 0.9, 1.1) / _CODES_SIZE
    if leaf.dtype == jnp.uint8:
        code, sign = jax.random.split(key)
        negative = jax.random.bernoulli(sign, shape=leaf.shape).astype(jnp.uint8)
        return jax.random.randint(code, leaf.shape, 0, 120, jnp.uint8) | negative << 7
    return jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)


def randomise(tree: Any) -> Any:
    """Return random stored numbers of the same shapes."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    found = [_random_stored(path[-1].name, key, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, found)


def with_random_rows(cache: d4.KVCache) -> d4.KVCache:
    """Fill windows, at the positions that the slots' lengths imply, and all blocks with random rows."""
    n_win, last = cache.plan.cfg.sliding_window, cache.seq_lens[:, None] - 1
    position = last - (last - jnp.arange(n_win, dtype=jnp.int32)[None]) % n_win
    for kind in filter(cache.plan.layers, d4.AttentionType):
        stack = cache.stack(kind)
        pos = jnp.broadcast_to(position, stack.state.pos.shape)
        state = dataclasses.replace(stack.state, window=randomise(stack.state.window), pos=pos)
        pool = None if stack.pool is None else randomise(stack.pool)
        cache = cache.with_stack(kind, dataclasses.replace(stack, state=state, pool=pool))
    return cache


def long_cache(plan: d4.CachePlan, context: int) -> d4.KVCache:
    """Return a cache in which every slot holds about ``context`` random tokens, at all phases of a block.

    Blocks come from all over the pool. Requests already hold all blocks that they can grow into.
    """
    rng, requests, cache = np.random.default_rng(0), plan.max_requests, d4.init_cache(plan)
    length = context - rng.permutation(max(requests, 128))[:requests] % 128
    if not any(plan.cfg.compress_ratios):  # there are no blocks
        lens = {"seq_lens": jnp.asarray(length, jnp.int32), "prepared": jnp.asarray(length, jnp.int32)}
        tables = dataclasses.replace(cache.tables, admitted=jnp.ones(requests, jnp.bool), **lens)
        return with_random_rows(dataclasses.replace(cache, tables=tables))
    blocks, held = rng.permutation(plan.num_blocks), requests * plan.max_blocks
    table = blocks[:held].reshape(requests, -1)
    tables = dataclasses.replace(
        cache.tables,
        admitted=jnp.ones(requests, jnp.bool),
        seq_lens=jnp.asarray(length, jnp.int32),
        prepared=jnp.asarray(length, jnp.int32),
        block_table=jnp.asarray(table, jnp.int32),
        block_lens=jnp.full(requests, plan.max_blocks, jnp.int32),
        block_refs=cache.tables.block_refs.at[blocks[:held]].set(1),
        free_blocks=jnp.asarray(np.roll(blocks, -held), jnp.int32),
        num_free=jnp.full(1, plan.num_blocks - held, jnp.int32),
    )
    return with_random_rows(dataclasses.replace(cache, tables=tables))


def _cache(case: Case) -> dict[str, Any]:
    plan, rng = case.plan, np.random.default_rng(0)
    stack = d4.init_cache(plan).stack(case.kind)
    length = case.entries * max(1, plan.cfg.ratio(d4.AttentionType(case.kind))) or 4096
    held = length - (case.tokens if case.tokens > 1 else 0)  # tokens in the ring; several new ones are beside it
    row = np.arange(128)
    pos = np.broadcast_to(held - 128 + (row - held) % 128, stack.state.pos.shape).astype(np.int32)
    state = dataclasses.replace(stack.state, window=randomise(stack.state.window), pos=jnp.asarray(pos))
    pool = None
    if stack.pool is not None:
        pool = dataclasses.replace(stack.pool, entries=randomise(stack.pool.entries))
        if pool.indexer_keys is not None:
            pool = dataclasses.replace(pool, indexer_keys=randomise(pool.indexer_keys))
    shape = case.batch, plan.max_blocks if case.entries else 1
    table = np.resize(rng.permutation(plan.num_blocks), shape)
    positions = np.broadcast_to(np.arange(length - case.tokens, length), (case.batch, case.tokens))
    return {
        "state": state,
        "pool": pool,
        "fresh": _fresh(case, stack.state) if case.tokens > 1 else None,
        "table": jnp.asarray(table, jnp.int32),
        "slots": jnp.asarray(rng.permutation(case.batch), jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
    }


def _fresh(case: Case, state: Any) -> Any:
    """Return the rows of the new tokens, as stored."""
    lead = case.batch, case.tokens
    return randomise(jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape[3:]), leaf.dtype), state.window))


def _layer(case: Case, cache: dict[str, Any], index: jax.Array) -> PooledLayer | None:
    if cache["pool"] is None:
        return None
    names = dict(block_table=cache["table"], slots=cache["slots"], plan=case.plan)
    return PooledLayer(pool=cache["pool"], index=index, **names)


Call = Callable[..., Any]  # backend, last result, inputs, ticket -> result


def attention_call(case: Case) -> tuple[Call, Any, Any]:
    rng, cfg = np.random.default_rng(1), case.plan.cfg
    shape = case.batch, case.tokens, case.heads, cfg.head_dim
    cache, picks = _cache(case), None
    if case.kind == "csa":
        seen = case.entries - case.tokens // cfg.ratio(d4.AttentionType.CSA)  # by every token
        picks = np.argsort(rng.random((*shape[:2], seen), np.float32))[..., : case.picks]
    inputs = cache | {
        "q": jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.float16),
        "sinks": jnp.asarray(rng.standard_normal(case.heads, np.float32)),
        "picks": None if picks is None else jnp.asarray(picks, jnp.int32),
    }

    def call(backend: str, _: Any, inputs: Any, ticket: jax.Array, **options: Any) -> Any:
        state, slots, positions, fresh = (inputs[name] for name in ("state", "slots", "positions", "fresh"))
        start, layer = positions[:, -1] + 1 if fresh is None else positions[:, 0], _layer(case, inputs, ticket[0])
        if backend == "xla":
            window = SlidingWindow(state=state, index=ticket[0], slots=slots, start=start, fresh=fresh, plan=case.plan)
            arguments = inputs["q"].astype(jnp.float32), positions, inputs["sinks"], window, layer, inputs["picks"]
            return attention.decode_attention(*arguments, kind=case.kind, dtype=jnp.bfloat16, backend=backend)
        freqs, ratio = rope_frequencies(cfg, d4.AttentionType(case.kind)), cfg.ratio(d4.AttentionType(case.kind))
        reads = pk.AttentionInputs(
            q=inputs["q"],
            window=state.window,
            pos=state.pos,
            fresh=fresh,
            entries=None if layer is None else layer.pool.entries,
            picks=inputs["picks"],
            block_table=inputs["table"],
            slots=slots,
            start=start,
            positions=positions,
            visible=None if layer is None else (positions + 1) // ratio,
            sinks=inputs["sinks"],
            angles=packed_angles(positions, freqs),
            layer=ticket,
        )
        return library(backend).decode_attention(reads, kv_format=case.kv_format, **options)

    return call, jnp.zeros(shape, jnp.bfloat16), inputs


def indexer_call(case: Case) -> tuple[Call, Any, Any]:
    rng, cfg = np.random.default_rng(1), case.plan.cfg
    lead, keys = (case.batch, case.tokens, cfg.indexer_heads), case.plan.keys
    queries = keys.encode(jnp.asarray(rng.standard_normal((*lead, cfg.indexer_head_dim), np.float32)))
    weights = jnp.asarray(rng.standard_normal(lead, np.float32))
    inputs = _cache(case) | {"queries": queries, "weights": weights}

    def call(backend: str, _: Any, inputs: Any, ticket: jax.Array, **options: Any) -> Any:
        layer, visible = _layer(case, inputs, ticket[0]), jnp.full(lead[:2], case.entries, jnp.int32)
        assert layer is not None
        if backend == "xla":
            return indexer.scores(keys.decode(inputs["queries"]), inputs["weights"], layer, visible)
        assert layer.pool.indexer_keys is not None
        arrays = pk.ScoreInputs(
            queries=inputs["queries"],
            weights=inputs["weights"],
            keys=layer.pool.indexer_keys,
            layer=ticket,
            block_table=layer.block_table,
            slots=layer.slots,
            visible=visible,
        )
        return library(backend).indexer_scores(arrays, key_format=case.indexer_format, **options)

    return call, jnp.zeros((*lead[:2], case.entries), jnp.float32), inputs


def topk_call(case: Case) -> tuple[Call, Any, Any]:
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.standard_normal((case.batch, case.entries), np.float32))

    def call(backend: str, _: Any, inputs: Any, ticket: jax.Array, **options: Any) -> Any:
        visible = jnp.full(case.batch, case.entries, jnp.int32) * ticket
        if backend == "xla":
            return indexer.pick(inputs + (ticket - 1).astype(jnp.float32), visible, case.picks)
        return library(backend).top_k(inputs, visible, k=case.picks, **options)

    return call, jnp.zeros((case.batch, case.picks), jnp.int32), scores


NAMES = {"attention": "decode_attention|widen_rows", "indexer": "indexer_scores", "topk": "top_k"}
CALLS = {"attention": attention_call, "indexer": indexer_call, "topk": topk_call}


def matmul_ceiling(size: int = 8192) -> float:
    """Return the TFLOP/s of XLA's bf16 matrix product."""
    x = jnp.ones((size, size), jnp.bfloat16)
    multiply = jax.jit(lambda a, b: a @ b)
    times = [sum(ms for _, ms in kernel_events(multiply, x, x)) for _ in range(5)]
    return round(2 * size**3 / statistics.median(times) / 1e9, 1)


def run_case(case: Case, limits: dict[str, float], backends: tuple[str, ...], *, runs: int) -> dict[str, Any]:
    call, result, inputs = CALLS[case.op](case)
    moved, operations = case.work()
    found: dict[str, Any] = {"case": case.name, **dataclasses.asdict(case), "bytes": moved, "flops": operations}
    for backend in backends:
        timed = functools.partial(call, backend)
        if backend == "xla":
            needed: Any = jax.jit(timed).lower(result, inputs, jnp.ones(1, jnp.int32)).compile().memory_analysis()
            if needed.temp_size_in_bytes > XLA_BYTES:
                found["xla skipped"] = f"{needed.temp_size_in_bytes} bytes of temporaries"
                continue
        # For the kernels only the launch itself is counted, because this benchmark prepares the ticket's argument.
        named = "" if backend == "xla" else NAMES[case.op]
        times = kernel_times(timed, result, inputs, runs=3 if backend == "xla" else runs, named=named)
        found[backend] = dataclasses.asdict(times)
    us = found["pallas"]["median"]
    floor = max(moved / limits["read GB/s"] / 1e3, operations / limits["matmul TFLOP/s"] / 1e6)
    return found | {
        "GB/s": round(moved / us / 1e3, 1),
        "TFLOP/s": round(operations / us / 1e6, 1),
        "share of roofline": round(floor / us, 3),
    }


def show(line: dict[str, Any]) -> None:
    pallas = line["pallas"]
    text = f"{line['case']:50} {pallas['median']:7.2f} us [{pallas['low']:.2f}, {pallas['high']:.2f}]"
    text += f" {line['GB/s']:7.1f} GB/s {line['TFLOP/s']:6.1f} TFLOP/s {line['share of roofline']:6.1%}"
    text += beside(line)
    print(text, flush=True)


def main(op: str, out: Path | None, only: str, backends: tuple[str, ...], *, runs: int) -> None:
    limits = ceilings() | {"matmul TFLOP/s": matmul_ceiling()}
    print(limits)
    record(out, case="ceilings", **limits)
    for case in cases():
        if case.op == op and re.search(only, case.name):
            line = run_case(case, limits, backends, runs=runs)
            show(line)
            record(out, **line)


def tune(out: Path | None, only: str, *, runs: int) -> None:
    """Time each op with each way to divide its work.

    ``choose_layout``, ``Tuning.fastest`` and ``split_of`` are based on it.
    """
    for case in cases():
        if not re.search(only, case.name):
            continue
        call, result, inputs = CALLS[case.op](case)
        for options in CHOICES[case.op](case):
            choice = next(iter(options.values()))
            timed = functools.partial(call, "pallas", **options)
            times = kernel_times(timed, result, inputs, runs=runs, named=NAMES[case.op])
            print(f"{case.name:50} {choice} {times.median:7.2f} us", flush=True)
            record(out, case=f"tune {case.name}", choice=str(choice), pallas=dataclasses.asdict(times))


def _layouts(case: Case) -> Iterator[dict[str, AttentionLayout]]:
    """Yield the layouts whose blocks have at least one tile each, and run at once or nearly so."""
    tiles = -(-case.plan.cfg.sliding_window // KEYS) - (-case.entries_read // KEYS)
    queries = case.batch * case.tokens
    for cluster in (8, 4, 2, 1):
        if cluster > tiles:
            continue
        if queries * -(-case.heads // HEADS) * cluster <= 160 or cluster == 1:
            yield dict(layout=sm90.Layout(cluster=cluster))
        if cluster == 8 and case.tokens == 1:
            yield dict(layout=sm90_spread.Layout(tiles=tiles))
        for some in (8, 16, 32):
            few = sm90_few.Layout(heads=some, cluster=cluster, tiles=-(-tiles // cluster))
            at_once = case.heads % some == 0 and queries * case.heads // some * cluster <= 160
            if cluster > 1 and few.fits and at_once:
                yield dict(layout=few)


def _tunings(case: Case) -> Iterator[dict[str, Tuning]]:
    if case.tokens == 1:
        for warpgroups, stages in itertools.product((2, 3, 4, 5), (1, 2)):
            yield dict(tuning=Tuning(warpgroups=warpgroups, stages=stages))
    for warpgroups in (1, 2, 3):
        yield dict(tuning=Tuning(warpgroups=warpgroups, overlapped=True))


def _splits(case: Case) -> Iterator[dict[str, Split]]:
    for cluster, bundles in itertools.product((1, 2, 4, 8), (4, 8, 16)):
        split = Split(warpgroups=4, cluster=cluster, bundles=bundles)
        if cluster == 1 or cluster * case.batch <= 256:
            yield dict(split=dataclasses.replace(split, keep=bundles == 4 and split.is_single(case.entries)))


CHOICES: dict[str, Callable[[Case], Iterator[dict[str, Any]]]] = {
    "attention": _layouts,
    "indexer": _tunings,
    "topk": _splits,
}
