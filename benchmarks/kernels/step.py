"""A whole decode step: cache update, indexer scores, top-k and attention of all layers, as one captured loop.

In a real model, matrix products come in between. Here the output of a layer is the query of the next.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dsv4jax as d4
import pallas_kernels as pk
from benchmarks.kernels.reads import long_cache
from benchmarks.kernels.timing import Times, kernel_events, record
from benchmarks.kernels.update import Case, new_rows, thunks
from dsv4jax.indexing import Batch
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.kernels.base import layer_number
from dsv4jax.layer.ops import CACHE_UPDATE, DECODE_ATTENTION, INDEXER_SCORES, TOP_K, AttentionInputs
from dsv4jax.layer.update import store
from dsv4jax.rope import packed_angles, rope_frequencies

OPS = ("cache_step", "indexer_scores", "top_k", "decode_attention")


def run(
    batch: int, context: int, dump: Path, *, tokens: int, indexer_format: str, hca_tail: str, backend: str = "pallas"
) -> dict[str, Any]:
    cfg = d4.DSV4Config.flash()
    plan = d4.plan_cache(
        cfg, max_requests=batch, max_context=context + 128, indexer_format=indexer_format, hca_tail=hca_tail
    )
    rng = np.random.default_rng(1)
    slots, one = jnp.asarray(rng.permutation(batch), jnp.int32), jnp.ones(batch, jnp.int32)
    cache = long_cache(plan, context)
    begin, table = cache.seq_lens[slots], jnp.copy(cache.tables.block_table)  # the cache is donated, the table is not
    kinds = [str(spec.attn) for spec in d4.config.layer_schedule(cfg)]
    cases = [Case(model="flash", kind=kind, batch=batch) for kind in kinds]
    streams = [new_rows(case, seed=layer) for layer, case in enumerate(cases)]
    heads = batch, 1, cfg.indexer_heads
    key_queries = plan.keys.encode(jnp.asarray(rng.standard_normal((*heads, cfg.indexer_head_dim), np.float32)))
    weights = jnp.asarray(rng.standard_normal(heads, np.float32))
    sinks = jnp.asarray(rng.standard_normal(cfg.num_heads, np.float32))
    queries = jnp.asarray(rng.standard_normal((batch, 1, cfg.num_heads, cfg.head_dim), np.float32))

    # An inner jit, so that one kernel is compiled once for all layers of its kind.
    @functools.partial(jax.jit, static_argnames="kind")
    def one_layer(
        stack: Any, index: jax.Array, inputs: Any, start: jax.Array, q: jax.Array, kind: d4.AttentionType
    ) -> Any:
        batch = Batch(slots=slots, start=start, num_new=one)
        call = LayerCall(stack=stack, index=index, block_table=table, batch=batch, kind=kind, plan=plan)
        call = call.with_stack(store(call, inputs, CACHE_UPDATE[backend]))
        positions, entries = start[:, None], call.entries
        visible: Any = None
        picks = None
        if entries is not None:
            visible = (positions + 1) // call.ratio
            if kind.is_indexed:
                scores = INDEXER_SCORES[backend].scores(key_queries, weights, entries, visible)
                picks = TOP_K.of(backend, plan, kind).pick(scores, visible, cfg.indexer_top_k)
        if backend != "pallas":
            window = call.window(None)
            given = AttentionInputs(
                q=q, positions=positions, sinks=sinks, window=window, entries=entries, picks=picks, visible=visible
            )
            rows = DECODE_ATTENTION[backend].attend(given, rope_frequencies(cfg, kind), jnp.bfloat16)
            return lax.optimization_barrier((rows, call.stack))
        reads = pk.AttentionInputs(
            q=q,
            window=call.stack.state.window,
            pos=call.stack.state.pos,
            fresh=None,
            entries=None if entries is None else entries.pool.entries,
            picks=picks,
            block_table=table,
            slots=slots,
            start=start,
            positions=positions,
            visible=visible,
            sinks=sinks,
            angles=packed_angles(positions, rope_frequencies(cfg, kind)),
            layer=layer_number(index),
        )
        q = pk.decode_attention(reads, kv_format=plan.kv_format)
        # The next layer's writes must wait for this layer's reads. Otherwise XLA would keep a copy of the cache for
        # them.
        return lax.optimization_barrier((q, call.stack))

    def decode_loop(cache: Any, streams: Any, q: jax.Array) -> Any:
        def step(carry: Any, _: None) -> Any:
            cache, start, q = carry
            for layer, inputs in enumerate(streams):
                kind, index = cache.locate(layer)
                q, stack = one_layer(cache.stack(kind), jnp.asarray(index, jnp.int32), inputs, start, q, kind)
                cache = cache.with_stack(kind, stack)
            return (cache, start + 1, q), None

        (cache, _, q), _ = jax.lax.scan(step, (cache, begin, q), length=tokens)
        return cache, q

    q = queries.astype(jnp.bfloat16)
    events = kernel_events(jax.jit(decode_loop), cache, streams, q)
    shares = {op: sum(ms for name, ms in events if op in name) * 1e3 / tokens for op in OPS}
    counts = {op: sum(op in name for name, _ in events) / tokens for op in OPS}
    function = jax.jit(decode_loop, donate_argnums=0).lower(cache, streams, q).compile()
    samples = []
    for _ in range(6):
        jax.block_until_ready(cache)
        before = time.perf_counter()
        cache, _ = jax.block_until_ready(function(cache, streams, q))
        samples.append((time.perf_counter() - before) * 1e6 / tokens)
    return {
        "case": f"decode step B{batch} {context} {indexer_format} {hca_tail}" + (f" {backend}" * (backend != "pallas")),
        "us of wall": dataclasses.asdict(Times.of(samples[1:])),
        "us of kernels": shares,
        "kernels per step": counts | {"all": len(events) / tokens},
        "thunks": thunks(dump),
    }


def main(out: Path | None, dump: Path, backends: tuple[str, ...], *, tokens: int) -> None:
    pallas = ((64, "mxfp4", "online"), (64, "nvfp4", "ring"), (1, "mxfp4", "online"))
    cases = [(*case, "pallas") for case in pallas]
    if len(backends) > 1:  # and XLA, which they are compared with
        cases += [(*pallas[0], backend) for backend in (*backends[1:], "xla")]
    for batch, form, tail, backend in cases:
        line = run(batch, 32768, dump, tokens=tokens, indexer_format=form, hca_tail=tail, backend=backend)
        wall = line["us of wall"]
        shares = ", ".join(f"{op} {us:.0f}" for op, us in line["us of kernels"].items())
        print(f"{line['case']:40} {wall['median']:.0f} us of wall [{wall['low']:.0f}, {wall['high']:.0f}]; {shares}")
        print(f"    {line['kernels per step']}, {line['thunks']}", flush=True)
        record(out, **line)
