"""Long chunks and contexts are processed in tiles. Tiny models would not need several, so tiles are made tiny here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache import pool as paged_pool
from dsv4jax.layer import indexer
from dsv4jax.layer.ops import DECODE_ATTENTION, choose_backends
from dsv4jax.layer.stages.compose import Stages
from tests.support import recorded
from tests.support.cases import first_of
from tests.support.driver import even_split, feed

TOLERANCE = 2e-5  # fp32 sums in another order


@pytest.mark.parametrize("chunk", first_of([64, 1]))
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_tiles_of_queries_and_entries_give_the_recorded_outputs(kind, chunk, monkeypatch):
    recording = recorded.load(kind)
    length = len(recording.x)
    # A plan of its own (6 requests), so that nothing traced with the usual tiles is used again.
    plan = d4.plan_cache(recording.cfg, max_requests=6, max_context=640, kv_format="f32", indexer_format="f32")
    batch, heads = 2, recording.cfg.num_heads
    monkeypatch.setattr(type(DECODE_ATTENTION["xla"]), "tile_bytes", 1 << 18)
    stages = Stages.of(choose_backends("xla", plan, recording.kind), plan, recording.kind)
    tile = stages.tile(recording.params, batch, chunk)
    # Two blocks per tile of entries: five blocks make three tiles, the last one half empty.
    queries_heads = recording.cfg.indexer_heads if kind == "csa" else heads
    per_block = plan.entries_per_block(recording.kind)
    monkeypatch.setattr(paged_pool, "TILE_BYTES", 2 * max(per_block, 1) * batch * tile * queries_heads * 4)
    if chunk > 1:
        assert 1 < tile < chunk, "the chunk takes several tiles of several queries"

    cache, slots, _ = d4.admit(d4.init_cache(plan), 6)
    shorter = length - 37
    splits = [even_split(length, chunk), even_split(shorter, chunk)]
    outputs, _ = feed({0: recording.params}, [recording.x, recording.x[:shorter]], cache, slots[2:4], splits)
    for got in outputs[0]:
        np.testing.assert_allclose(got, recording.arrays["out"][: len(got)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "context", "batch", "activations", "tokens"),
    [
        ("csa", 32768, 1, "bf16", 4096),
        ("hca", 1 << 20, 1, "bf16", 4096),
        ("swa", 1 << 20, 1, "bf16", 4096),
        ("csa", 1 << 20, 1, "bf16", 4096),
        ("csa", 32768, 8, "bf16", 512),
        ("csa", 32768, 8, "fp8", 1024),  # queries are made in their product, whose sums are not in memory
        ("csa", 32768, 256, "bf16", 16),
    ],
)
def test_a_chunk_of_4096_tokens_is_one_tile_of_the_kernels(kind, context, batch, activations, tokens):
    """And a draft of a few tokens for many requests is one, too."""
    cfg, kind = d4.DSV4Config.flash(), d4.AttentionType(kind)
    plan = d4.plan_cache(cfg, max_requests=256, max_context=context)
    layer = next(i for i, ratio in enumerate(cfg.compress_ratios) if ratio == cfg.ratio(kind))
    init = functools.partial(d4.init_attention_params, cfg=cfg, layer=layer, weights="stored", activations=activations)
    params = jax.eval_shape(init, jax.random.key(0))

    def tile(backend: str) -> int:
        return Stages.of(choose_backends(backend, plan, kind), plan, kind).tile(params, batch, 4096)

    assert tile("pallas_simulated") == tokens
    assert tile("xla") < tokens


@pytest.mark.parametrize("key_format", first_of(["mxfp4", "f32"], count=2))
def test_scores_of_many_tokens_are_picked_from_group_by_group(key_format, monkeypatch):
    cfg = d4.DSV4Config.tiny(indexer_top_k=8)
    plan = d4.plan_cache(cfg, max_requests=2, max_context=256, indexer_format=key_format)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 2)
    rng = np.random.default_rng(0)
    tokens, heads = 11, cfg.indexer_heads
    num_new = jnp.full(2, 200, jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, num_new)
    entries = d4.acquire(cache, cfg.compress_ratios.index(4), slots, num_new).entries
    random = jax.tree.map(
        lambda leaf: (
            jnp.asarray(rng.integers(0, 120, leaf.shape, np.uint8)).view(leaf.dtype)
            if leaf.dtype.itemsize == 1
            else jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        ),
        entries.pool.indexer_keys,
    )
    entries = dataclasses.replace(entries, pool=dataclasses.replace(entries.pool, indexer_keys=random))
    queries = jnp.asarray(rng.standard_normal((2, tokens, heads, cfg.indexer_head_dim)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((2, tokens, heads)), jnp.float32)
    visible = jnp.asarray(rng.integers(0, 50, (2, tokens)), jnp.int32)

    def select(score_bytes: int) -> tuple[np.ndarray, int]:
        monkeypatch.setattr(indexer, "SCORE_BYTES", score_bytes)
        call = jax.jit(functools.partial(d4.pieces.select_entries.__wrapped__, backend="xla"))
        program = call.lower(queries, weights, entries, visible)
        return np.asarray(program.compile()(queries, weights, entries, visible)), program.as_text().count("while")

    want, loops = select(1 << 20)
    found, more_loops = select(4 * 2 * entries.max_entries * 5)  # room for 5 tokens: groups of 4
    assert more_loops == loops + 1
    np.testing.assert_array_equal(found, want)
    assert (want >= 0).any()


def test_a_short_context_reads_few_tiles():
    """The loop over entries ends at the longest row, so garbage after it in the pool is never read."""
    recording = recorded.load("csa")
    plan = d4.plan_cache(recording.cfg, max_requests=1, max_context=640)
    seen = []
    pool = d4.init_cache(plan).stack("csa").pool
    assert pool is not None
    pooled = paged_pool.PooledLayer(
        pool=pool,
        index=jnp.int32(0),
        block_table=jnp.zeros((1, 5), jnp.int32),
        slots=jnp.zeros(1, jnp.int32),
        plan=plan,
    )

    def fold(carry, first, entry, mask):
        jax.debug.callback(lambda first: seen.append(int(first)), first)
        return carry + jnp.sum(mask, dtype=jnp.int32)

    total = pooled.fold_tiles(jnp.asarray([[33, 40]], jnp.int32), 32, fold, jnp.int32(0))
    jax.effects_barrier()
    assert int(total) == 73
    assert sorted(seen) == [0, 32]
