"""Scores, picks and attention by kernels, in layers of the published head sizes, against XLA and the recompute."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.indexing import Batch
from dsv4jax.layer import indexer
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.ops import DECODE_ATTENTION, TOP_K, AttentionInputs
from dsv4jax.layer.reference import reference_layer
from dsv4jax.layer.stages.compose import Stages
from dsv4jax.plan import split_heads
from dsv4jax.rope import rope_frequencies
from pallas_kernels.language.target import GPUS
from pallas_kernels.scores.call import MAX_TOKENS
from tests.support import driver
from tests.support.cases import first_of
from tests.support.driver import DEFAULT, TRAINED, even_split, ids, moved_values, random_params, random_split, sequence
from tests.support.lane_kernels import mesh_of
from tests.support.machines import BACKENDS, requires_gpu

SWA, CSA, HCA = d4.AttentionType.SWA, d4.AttentionType.CSA, d4.AttentionType.HCA
# Heads, key heads and blocks are those of the published models; what no kernel sees is small.
CFG = d4.DSV4Config(
    hidden_size=64,
    q_lora_rank=32,
    o_lora_rank=8,
    compress_ratios=(0, 4, 128),
    sliding_window=64,
    indexer_top_k=32,
    yarn_original_max_position=64,
)

# The kernel rounds queries, rows and softmax weights to f16, a relative 2^-11: measured 4e-4 on outputs of rms 0.4.
TOLERANCE = 1.5e-3
# Stored values move across a rounding boundary where fp32 sums run in another order: see test_rules.
STORED, MOVED = 2e-5, 1e-3

backends = pytest.mark.parametrize("backend", BACKENDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Requests with different lengths, and a call that brings them more tokens."""

    lengths: tuple[int, ...]  # tokens held
    num_new: tuple[int, ...]  # of the call, at most T; the last rows are padding
    max_context: int = 256
    cfg: d4.DSV4Config = CFG
    chunk: int = 64

    @property
    def plan(self) -> d4.CachePlan:
        return d4.plan_cache(self.cfg, max_requests=len(self.lengths) + 2, max_context=self.max_context)


# A request's first tokens; a token that completes entries of both ratios; few tokens after many; a padding row.
SMALL = Size(lengths=(0, 126, 190), num_new=(3, 3, 1, 2))
_RNG = np.random.default_rng(0)
LARGE = Size(
    lengths=(0, 127, *_RNG.integers(100, 4000, 20).tolist(), 4000),
    num_new=(40, 2, *_RNG.integers(1, 41, 21).tolist(), 7, 0),
    max_context=4096,
    cfg=dataclasses.replace(CFG, sliding_window=128, indexer_top_k=512),
    chunk=512,
)


step = jax.jit(driver.step, static_argnames=("layers", "backend"), donate_argnames="cache")


@functools.cache
def filled(size: Size, formats: tuple[tuple[str, Any], ...]) -> Any:
    """Return a cache filled by XLA to the lengths of a size, and the slots of its rows, -1 for padding."""
    cache, slots, ok = d4.admit(d4.init_cache(dataclasses.replace(size.plan, **dict(formats))), len(size.lengths))
    assert ok
    slots = slots[jnp.asarray(np.random.default_rng(1).permutation(len(size.lengths)))]
    batch, done = len(size.lengths), np.zeros(len(size.lengths), int)
    while (done < size.lengths).any():
        count = np.minimum(size.chunk, size.lengths - done)
        x = sequence(int(done.sum()), batch * size.chunk, size.cfg.hidden_size).reshape(batch, size.chunk, -1)
        params = random_params(size.cfg)
        _, cache, ok = step(params, jnp.asarray(x), cache, slots, ids(*count), layers=(0, 1, 2), backend="xla")
        assert ok
        done += count
    return cache, jnp.pad(slots, (0, len(size.num_new) - batch), constant_values=-1)


def given(size: Size, tokens: int, options: dict[str, Any]) -> Any:
    """Return a cache that may be donated, slots, num_new, and x with NaN in its padding."""
    cache, slots = filled(size, tuple(options.items()))
    num_new = np.minimum(size.num_new, tokens)
    x = sequence(9, len(num_new) * tokens, size.cfg.hidden_size).reshape(len(num_new), tokens, -1)
    x[np.arange(tokens)[None] >= num_new[:, None]] = np.nan
    return jax.tree.map(jnp.copy, cache), slots, ids(*num_new), jnp.asarray(x)


def run(size: Size, kind: d4.AttentionType, tokens: int, options: dict[str, Any], backend: Backend) -> Any:
    """Run one layer. Returns (outputs of the call, bool [B, T] which are of real tokens, cache)."""
    cache, slots, num_new, x = given(size, tokens, options)
    number = list(d4.AttentionType).index(kind)
    (y,), cache, ok = step(random_params(size.cfg), x, cache, slots, num_new, layers=(number,), backend=backend)
    assert ok
    real = (np.arange(tokens)[None] < np.asarray(num_new)[:, None]) & (np.asarray(slots) >= 0)[:, None]
    return np.asarray(y), real, cache


def assert_alike(got: Any, want: Any, outliers: float = 0.0) -> None:
    (got_y, real, got_cache), (want_y, _, want_cache) = got, want
    assert not got_y[~real].any(), "padding must give 0"
    off = ~(np.abs(got_y - want_y)[real].max(-1) <= TOLERANCE)
    assert off.sum() <= outliers * len(off), f"{off.sum()} of {len(off)} tokens are off"
    moved, total = moved_values(got_cache, want_cache, STORED)
    assert moved <= MOVED * total, f"{moved} of {total} stored values differ"


@backends
@pytest.mark.parametrize(("kind", "tokens"), first_of([(HCA, 1), (CSA, 1), (CSA, 3), (SWA, 1), (HCA, 3)], count=0))
def test_a_layer_gives_what_it_gives_in_xla(kind, tokens, backend):
    case = SMALL, kind, tokens, TRAINED
    assert_alike(run(*case, backend), run(*case, "xla"))


@requires_gpu
@pytest.mark.parametrize(("tokens", "options"), [(1, TRAINED), (40, DEFAULT), (1, DEFAULT), (5, TRAINED)])
@pytest.mark.parametrize("kind", d4.AttentionType)
def test_a_layer_of_many_requests_gives_what_it_gives_in_xla(kind, tokens, options):
    assert DECODE_ATTENTION.choose(None, LARGE.plan, kind) == "pallas"
    case = LARGE, kind, tokens, options
    # With scores of the kernel, which agree to 1e-5, many a query would pick another one of two like entries. A moved
    # code of a key, or of a query of the indexer, shows in what reads it.
    mix = d4.OpBackends(indexer_scores="xla")
    assert_alike(run(*case, mix), run(*case, "xla"), outliers=0.03)


@pytest.mark.sweep(guard="test_a_layer_gives_what_it_gives_in_xla")
def test_a_chunk_in_tiles_of_queries_is_one_chunk(monkeypatch):
    """A tile of queries reads the fresh rows of earlier tiles."""
    case = SMALL, HCA, 3, TRAINED
    want = run(*case, "xla")
    monkeypatch.setattr(Stages, "tile", lambda *_: 1)
    # A mix that no other test has traced with the usual tiles.
    mix = d4.OpBackends(cache_update="xla", decode_attention="pallas_simulated")
    assert_alike(run(*case, mix), want)


@pytest.mark.sweep(guard="test_a_layer_gives_what_it_gives_in_xla")
@pytest.mark.parametrize(
    ("size", "backend"),
    [
        pytest.param(SMALL, "pallas_simulated", id="simulated"),
        pytest.param(SMALL, "pallas", id="gpu", marks=requires_gpu),
        pytest.param(LARGE, "pallas", id="gpu, many requests", marks=requires_gpu),
    ],
)
def test_picks_are_the_largest_scores_by_kernel_or_not_in_any_mix(size, backend):
    tokens = MAX_TOKENS + 1
    cache, slots, num_new, _ = given(size, tokens, TRAINED)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert ok
    cfg, handle, rng = size.cfg, d4.acquire(cache, 1, slots, num_new), np.random.default_rng(2)
    queries = rng.standard_normal((len(num_new), tokens, cfg.indexer_heads, cfg.indexer_head_dim), np.float32)
    weights = rng.standard_normal((len(num_new), tokens, cfg.indexer_heads), np.float32)
    weights[2, 0] = np.nan  # its query picks something that is there; no other notices
    visible, entries = handle.visible(tokens), handle.entries

    rounded = cache.plan.keys.decode(cache.plan.keys.encode(jnp.asarray(queries)))
    score = np.asarray(indexer.scores(rounded, jnp.asarray(weights), entries, visible))
    keys = entries.keys(jnp.broadcast_to(jnp.arange(entries.max_entries), (len(num_new), entries.max_entries)))
    largest_key = np.linalg.norm(np.asarray(keys), axis=-1).max()
    # The kernel's scores are off by 1e-5 of this, and XLA's by the rounding of fp32 sums.
    norm = np.sum(np.abs(weights) * np.linalg.norm(np.asarray(rounded), axis=-1), axis=-1) * largest_key
    seen = np.asarray(visible)
    assert seen.max() > cfg.indexer_top_k
    assert seen.min() == 0
    picks_of_same_scores = []
    for scores, top_k in itertools.product((backend, "xla"), repeat=2):
        mix = d4.OpBackends(indexer_scores=scores, top_k=top_k)
        picks = np.asarray(
            d4.pieces.select_entries(jnp.asarray(queries), jnp.asarray(weights), entries, visible, backend=mix)
        )
        for b, t in np.ndindex(seen.shape):
            picked = np.isin(np.arange(entries.max_entries), picks[b, t])
            assert picked.sum() == min(seen[b, t], cfg.indexer_top_k), mix
            np.testing.assert_array_equal(picks[b, t, : picked.sum()], np.flatnonzero(picked))
            assert (picks[b, t, picked.sum() :] == -1).all(), mix
            assert not picked[seen[b, t] :].any(), mix
            rest = ~picked & (np.arange(entries.max_entries) < seen[b, t])
            if np.isfinite(norm[b, t]) and picked.any() and rest.any():
                slack = (1e-6 if scores == "xla" else 3e-5) * norm[b, t]
                assert score[b, t, picked].min() >= score[b, t, rest].max() - slack, mix
        if scores == backend:
            picks_of_same_scores.append(np.where(np.isfinite(norm)[..., None], picks, 0))
    np.testing.assert_array_equal(*picks_of_same_scores)


def test_rows_too_long_for_the_kernel_are_picked_in_xla():
    def plan(max_context):
        return d4.plan_cache(SMALL.cfg, max_requests=1, max_context=max_context, num_blocks=1)

    assert TOP_K.choose("pallas_simulated", plan(1 << 21), CSA) == "pallas_simulated"
    for backend in ("pallas", "pallas_simulated"):
        with pytest.raises(ValueError, match="at most 524288 scores"):
            TOP_K.choose(backend, plan((1 << 21) + 1), CSA)
    assert TOP_K.choose(None, plan((1 << 21) + 1), CSA) == "xla"


@requires_gpu
@pytest.mark.parametrize("options", [DEFAULT, TRAINED], ids=["fp8_row, nvfp4", "fp8_tile64, mxfp4, online"])
def test_chunks_and_decode_steps_give_the_full_recompute(options):
    # Scores are computed, for the pool has room for 256 entries, but every query picks all that it sees.
    cfg, length = dataclasses.replace(LARGE.cfg, indexer_top_k=200), 700
    plan = d4.plan_cache(cfg, max_requests=2, max_context=1024, **options)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 2)
    xs = [sequence(seed, length, cfg.hidden_size) for seed in (1, 2)]
    params = random_params(cfg)
    splits = even_split(length - 40, 200) + [1] * 40, random_split(np.random.default_rng(3), length, 60)
    outputs = []
    for b, split in enumerate(splits):
        done, found = 0, []
        for count in split:
            width = 200 if b == 0 and count > 1 else 60 if count > 1 else 1
            x = np.zeros((1, width, cfg.hidden_size), np.float32)
            x[0, :count] = xs[b][done : done + count]
            ys, cache, ok = step(
                params, jnp.asarray(x), cache, slots[b : b + 1], ids(count), layers=(0, 1, 2), backend=None
            )
            assert ok
            found.append(np.stack([np.asarray(y)[0, :count] for y in ys]))
            done += count
        outputs.append(np.concatenate(found, axis=1))
    for b, x in enumerate(xs):
        for i in range(3):
            want = np.asarray(reference_layer(params[i], jnp.asarray(x), cfg, i, *list(options.values())[:2]).out)
            off = ~(np.abs(outputs[b][i] - want).max(-1) <= TOLERANCE)
            # A stored value that rounding moves shows in each query that reads it.
            assert off.mean() <= 0.02, f"row {b}, layer {i}: {off.sum()} of {length} tokens are off"


# ---- who serves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "change", "options", "reason"),
    first_of(
        [
            ("decode_attention", dict(num_heads=4, o_groups=4), DEFAULT, "num_heads must be a multiple of 8, got 4"),
            ("decode_attention", dict(head_dim=256), DEFAULT, "448 NoPE and 64 RoPE channels, got 192 and 64"),
            ("decode_attention", {}, dict(kv_format="f32"), "kv_format must be one of .*got 'f32'"),
            ("indexer_scores", {}, dict(indexer_format="f32"), "f32"),
            ("indexer_scores", dict(indexer_heads=32), DEFAULT, "32"),
        ],
        count=2,
    ),
)
def test_a_named_backend_refuses_what_its_kernels_do_not_serve(op, change, options, reason):
    cfg = dataclasses.replace(CFG, **change)
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=1, max_context=512, **options))
    x, row = jax.ShapeDtypeStruct((1, 1, cfg.hidden_size), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(backend: Backend) -> Any:
        return jax.eval_shape(
            lambda x, cache, row: d4.attention_layer(random_params(cfg)[1], x, cache, 1, row, row, backend=backend),
            *(x, cache, row),
        )

    alone: dict[str, Any] = {op: "pallas_simulated"}
    for backend in ("pallas_simulated", d4.OpBackends(**alone)):
        with pytest.raises(ValueError, match=f"backend='pallas_simulated' cannot serve {op}: .*{reason}"):
            run(backend)
    for backend in (None, "xla", d4.OpBackends(cache_update="pallas_simulated", top_k="pallas_simulated")):
        y, _ = run(backend)
        assert y.shape == x.shape


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.architecture)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_kernels_serve_a_shards_heads_of_v4_flash(shards, gpu):
    cfg = split_heads(d4.DSV4Config.flash(), shards, "model")
    plan = d4.plan_cache(cfg, max_requests=1, max_context=512)
    with jax.sharding.use_abstract_mesh(mesh_of(gpu.capability, "NVIDIA")):
        assert {DECODE_ATTENTION.choose(None, plan, kind) for kind in d4.AttentionType} == {"pallas"}


def test_a_backend_op_by_op_names_ops_and_backends_that_there_are():
    ops = {"projections", "cache_update", "indexer_scores", "top_k", "decode_attention", "gather_rows"}
    ops |= {"router", "experts", "hyper_connections", "head"}
    assert d4.backends().keys() == ops
    assert {field.name for field in dataclasses.fields(d4.OpBackends)} == ops | {"invariant"}
    with pytest.raises(ValueError, match=r"top_k must be None or one of .*got 'cuda'"):
        d4.OpBackends(top_k="cuda")
    named = d4.OpBackends(top_k="xla")
    tiny = d4.plan_cache(d4.DSV4Config.tiny(), max_requests=1, max_context=128)
    assert TOP_K.choose(named, SMALL.plan, CSA) == "xla"
    assert DECODE_ATTENTION.choose(named, tiny, CSA) == "xla"
    assert hash(named) == hash(d4.OpBackends(top_k="xla"))


@pytest.mark.sweep(guard="test_a_layer_gives_what_it_gives_in_xla")
@backends
@pytest.mark.parametrize(("count", "options"), first_of([(5, TRAINED), (3, DEFAULT)], count=0))
def test_all_queries_of_a_block_see_its_rows_and_the_window_before_it(count, options, backend):
    """Requests of one token, of two and of many; one that is left out, and padding, both with bytes of NaN."""
    lengths = 1, 64, 190, 126
    size = Size(lengths=lengths, num_new=(0, 0, 0, 0, 0))
    cache, slots = filled(size, tuple(options.items()))
    rng, plan = np.random.default_rng(count), cache.plan
    there = np.arange(5) < 3
    start = np.asarray([*lengths, 0], np.int32)
    positions = jnp.asarray(np.where(there[:, None], start[:, None] + np.arange(count), -1), jnp.int32)
    rows = jnp.asarray(rng.standard_normal((len(slots), count, CFG.head_dim), np.float32))
    block = plan.rows.encode(rows, CFG.rope_dim)
    bad = jax.tree.map(lambda leaf: np.full(leaf.nbytes, 0xFF, np.uint8).view(leaf.dtype).reshape(leaf.shape), block)
    block = jax.tree.map(lambda leaf, bad: leaf.at[~there].set(bad[~there]), block, bad)
    q = jnp.asarray(rng.standard_normal((len(slots), count, CFG.num_heads, CFG.head_dim), np.float32))
    num_new = jnp.where(jnp.asarray(there), count, 0)
    batch = Batch(slots=jnp.where(there, slots, -1), start=jnp.asarray(start), num_new=num_new)
    inputs = AttentionInputs(
        q=q.astype(jnp.float16),
        positions=positions,
        sinks=jnp.asarray(rng.standard_normal(CFG.num_heads, np.float32)),
        window=LayerCall.of(cache, SWA, 0, batch).window(None),
        entries=None,
        picks=None,
        visible=None,
        block=block,
    )
    freqs = rope_frequencies(CFG, SWA)
    got, want = (np.asarray(DECODE_ATTENTION[name].attend(inputs, freqs, jnp.float32)) for name in (backend, "xla"))
    assert not got[~there].any(), "padding must give 0"
    # With few keys, outputs are as large as these.
    np.testing.assert_allclose(got[there], want[there], rtol=2**-10, atol=TOLERANCE)
    # An early query sees the last row, and a late one the oldest of the window.
    others = jax.tree.map(lambda leaf: leaf.at[:, -1].set(leaf[:, 0]), block)
    changed = DECODE_ATTENTION[backend].attend(dataclasses.replace(inputs, block=others), freqs, jnp.float32)
    assert (np.abs(np.asarray(changed) - got)[there].max((1, 2, 3)) > 0.01).all()
