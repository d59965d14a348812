"""DSpark: what the block makes of a recorded text, how its rows are stored, and the texts that come of its drafts."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.state import gather_swa
from dsv4jax.model import (
    DSparkConfig,
    JudgedDraft,
    ModelConfig,
    ModelParams,
    Sampling,
    dspark,
    forward,
    generate,
    init_caches,
    load_model,
)
from dsv4jax.model.generation import drafting, loop, seats
from dsv4jax.model.generation.drafting import Drafts
from dsv4jax.model.generation.sampling import of_texts
from dsv4jax.model.generation.state import Texts, begin
from dsv4jax.model.params import DSparkParams
from tests.model.test_sampling import check_counts
from tests.support.cases import first_of
from tests.support.models import FULL, MODELS, SMALL, drawn_model, pair_chances, recorded

CLOSE = 5e-5  # f32, whose sums have another order than in the recording


@functools.cache
def model_d() -> ModelParams:
    return load_model(MODELS / "d", weights="f32")


@functools.cache
def taps() -> np.ndarray:
    """Of the recorded text, run in one pass: [269, taps h]."""
    ids = recorded("d")["ids"]
    cache, slots, _ = d4.admit(init_caches(model_d().cfg, 1, 512, **FULL).model, 1)
    count = jnp.asarray([ids.size], jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, count)
    _, seen, _ = forward(model_d(), jnp.asarray(ids)[None], cache, slots, count, "none")
    return np.asarray(seen[0])


@functools.partial(jax.jit, static_argnames="chunk")
def stored(cache: d4.KVCache, seen: jax.Array, first: jax.Array, count: jax.Array, chunk: int) -> d4.KVCache:
    """Store up to ``chunk`` rows of taps in slot 0."""
    slots, count = jnp.zeros(1, jnp.int32), count[None]
    cache, _ = d4.prepare_forward(cache, slots, count)
    rows = jax.lax.dynamic_slice_in_dim(seen, first, chunk)[None]
    return d4.advance(dspark.store_keys(model_d(), rows, cache, slots, count), slots, count)


def empty(rows: int = 1) -> d4.KVCache:
    cache = init_caches(model_d().cfg, rows, 512, drafts=5, **FULL).drafts
    assert cache is not None
    return d4.admit(cache, rows)[0]


def after(tokens: int, chunk: int) -> d4.KVCache:
    """The cache for drafts when the model has run so many tokens of the recorded text."""
    seen, cache = jnp.pad(jnp.asarray(taps()), ((0, chunk), (0, 0))), empty()
    for first in range(0, tokens, chunk):
        cache = stored(cache, seen, jnp.int32(first), jnp.int32(min(chunk, tokens - first)), chunk)
    return cache


def keys(cache: d4.KVCache, stage: int) -> tuple[np.ndarray, np.ndarray]:
    state = cache.stack(d4.AttentionType.SWA).state
    rows, at = gather_swa(state, stage, jnp.zeros(1, jnp.int32), cache.seq_lens[:1], plan=cache.plan)
    return np.asarray(rows[0]), np.asarray(at[0])


@pytest.mark.sweep(guard="test_drafts_are_the_recorded_ones")
def test_taps_are_means_of_streams_after_layers():
    np.testing.assert_allclose(taps(), recorded("d")["taps"], rtol=0, atol=CLOSE)
    drafts = model_d().drafts
    assert isinstance(drafts, DSparkParams)
    found = dspark.main_rows(drafts, jnp.asarray(taps())[None], model_d().cfg.norm_eps)[0]
    np.testing.assert_allclose(found, recorded("d")["main_x"], rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 37, 128])
@pytest.mark.parametrize("tokens", first_of([269, 15, 1, 16, 17], count=2))
def test_key_rows_are_the_recorded_ones_whatever_the_chunks(chunk, tokens):
    cache = after(tokens, chunk)
    for stage in range(3):
        rows, at = keys(cache, stage)
        assert at.tolist() == [p if p >= 0 else -1 for p in range(tokens - 16, tokens)]
        wanted = recorded("d")["context_keys"][stage, at[at >= 0]]
        np.testing.assert_allclose(rows[at >= 0], wanted, rtol=0, atol=CLOSE)


@functools.partial(jax.jit, static_argnames="number")
def drafted(cache: d4.KVCache, token: jax.Array, number: int):
    """Greedy drafts of slot 0: (logits [number, V], tokens, confidence before the sigmoid, base logits, streams)."""
    params, slots = model_d(), jnp.zeros(1, jnp.int32)
    assert isinstance(params.drafts, DSparkParams)
    rows = dspark.run_block(params, token[None], cache, slots, jnp.ones(1, bool))
    base = dspark.base_logits(params, rows.normed)
    made, before = [], token[None]
    for i in range(number):
        logits, confidence = dspark.token_head(params.drafts, base[:, i], rows.x[:, i], before)
        before = jnp.argmax(logits, -1).astype(jnp.int32)
        made.append((logits[0], before[0], confidence[0]))
    return *(jnp.stack(each) for each in zip(*made, strict=True)), base[0], rows.streams[:, 0]


def test_drafts_are_the_recorded_ones():
    """Rows of the beginning have less than a window behind them. The last shown row checks streams of all stages."""
    wanted = recorded("d")
    rows, shown = wanted["draft_rows"].tolist(), wanted["shown"].tolist()
    cache, seen = empty(), jnp.asarray(taps())
    for t in range(max(rows + shown) + 1):
        cache = stored(cache, seen, jnp.int32(t), jnp.int32(1), 1)
        if t not in rows and t not in shown:
            continue
        logits, tokens, confidence, base, streams = drafted(cache, jnp.int32(wanted["ids"][t + 1]), 5)
        assert tokens.tolist() == wanted["draft_tokens"][t].tolist(), t
        np.testing.assert_allclose(confidence, wanted["draft_confidence"][t], rtol=0, atol=CLOSE)
        if t in rows:
            np.testing.assert_allclose(logits, wanted["draft_logits"][rows.index(t)], rtol=0, atol=CLOSE)
        if t in shown:
            at = shown.index(t)
            np.testing.assert_allclose(base, wanted["shown_base_logits"][at], rtol=0, atol=CLOSE)
            np.testing.assert_allclose(streams, wanted["shown_streams"][at], rtol=0, atol=CLOSE)


@pytest.mark.sweep(guard="test_drafts_are_the_recorded_ones")
def test_rows_that_are_left_out_do_not_matter():
    """A free row, and one that is not active, beside the one that is recorded, in other slots."""
    wanted, t = recorded("d"), 204
    cache = empty(3)
    seen = jnp.asarray(taps())[: t + 1]
    count = jnp.asarray([t + 1, 0, 9], jnp.int32)
    slots = jnp.asarray([2, -1, 0], jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, count)
    given = jnp.stack([seen, jnp.full_like(seen, jnp.nan), jnp.where(jnp.arange(t + 1)[:, None] < 9, seen, jnp.nan)])
    cache = d4.advance(dspark.store_keys(model_d(), given, cache, slots, count), slots, count)
    newest = jnp.asarray([wanted["ids"][t + 1], 3, 7], jnp.int32)
    rows = dspark.run_block(model_d(), newest, cache, slots, jnp.asarray([True, True, False]))
    alone = dspark.run_block(model_d(), newest[:1], after(t + 1, 128), jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    for found, expected in ((rows.x, alone.x), (rows.normed, alone.normed)):
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=CLOSE)
        assert np.isfinite(found).all()


# ---- texts


def recorded_text(drafts: int, sampling: Sampling | None = None):
    wanted, params = recorded("d"), model_d()
    first = int(wanted["prompt_len"])
    prompt, expected = wanted["ids"][:first].tolist(), wanted["ids"][first:].tolist()
    both = init_caches(params.cfg, 1, 512, drafts, **FULL)
    return generate(params, [prompt], len(expected), sampling, drafts, stop_tokens=(), caches=both), expected


@pytest.mark.parametrize("drafts", first_of([5, 1, 2, 3, 4], count=0))
def test_greedy_tokens_are_the_recorded_ones(drafts):
    """5 drafts cross the ends of CSA entries, and the one of an HCA entry at token 255."""
    found, expected = recorded_text(drafts)
    assert found.tokens == [expected]
    assert found.accepted > 0
    if drafts == 5:
        passes = recorded("d")["passes"]
        assert (found.passes, found.drafted, found.accepted) == (len(passes), *passes[:, 1:].sum(0))
        check_judged(found.drafts, passes)


def check_judged(found: list[list[JudgedDraft | None]] | None, passes: np.ndarray) -> None:
    """Each pass tells of the drafts that it accepts, and of the first one that it does not."""
    assert found is not None
    first, logits = int(recorded("d")["prompt_len"]), recorded("d")["draft_confidence"]
    expected: list[Any] = [None] * len(found[0])
    for known, judged, accepted in passes.tolist():
        for i in range(min(judged, accepted + 1)):
            confidence = 1 / (1 + math.exp(-logits[known - 2, i]))
            expected[known - first + i] = (pytest.approx(confidence, abs=CLOSE), i < accepted)
    assert found[0] == expected


@pytest.mark.sweep(guard="test_greedy_tokens_are_the_recorded_ones")
def test_texts_depend_neither_on_drafts_nor_on_the_chunks_of_their_prompts():
    """Prompts of one token, of nearly a window, of one, of more and of many, and a row that stays free."""
    ids, params, new = recorded("d")["ids"], model_d(), 12
    lengths = np.asarray([1, 15, 16, 17, int(recorded("d")["prompt_len"]), 0, 0, 0], np.int32)

    def texts(drafts: int, chunk: int) -> list[list[int]]:
        tokens = np.zeros((lengths.size, 512), np.int32)
        for row, length in zip(tokens, lengths, strict=True):
            row[:length] = ids[:length]
        limits = np.where(lengths > 0, lengths + new, 0).astype(np.int32)
        sampling = of_texts(Sampling.of(), jnp.arange(lengths.size, dtype=jnp.int32))
        given = Texts.of(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(limits), sampling)
        both = init_caches(params.cfg, 6, 512, drafts, **FULL)
        looped = seats.seat(begin(both, given, params.cfg.vocab_size, drafts))
        stops = jnp.asarray([-1])
        for _ in range(0, lengths.max() - 1, chunk):
            looped = loop.store(params, looped, stops, jnp.arange(6), chunk=chunk)
        looped = loop.run(params, looped, stops, jnp.int32(new))
        assert bool(looped.ok)
        assert not bool(looped.unfinished)
        assert bool(looped.accepted) == bool(drafts)
        made = np.asarray(looped.texts.tokens)
        return [made[i, n : n + new].tolist() for i, n in enumerate(lengths) if n]

    whole = texts(0, 128)
    assert whole[-1] == ids[lengths.max() :][:new].tolist()
    for chunk in (7, 37, 128):
        assert texts(5, chunk) == whole


@pytest.mark.slow
def test_drafts_of_little_confidence_are_not_judged():
    """The tokens stay the same, and fewer drafts are refused."""
    all_judged, expected = recorded_text(5)
    some, _ = recorded_text(5, Sampling.of(least_confidence=0.5))
    assert some.tokens == all_judged.tokens == [expected]
    assert all_judged.drafted == 101
    assert some.drafted - some.accepted < all_judged.drafted - all_judged.accepted


def test_the_first_draft_below_the_limit_ends_what_is_judged():
    confidence = jnp.asarray([[0.9, 0.4, 0.8], [0.2, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9]])
    made = jnp.asarray([True, True, True, False])
    drafts = dataclasses.replace(Drafts.none(4, 3, 1), confidence=confidence, made=made)
    assert drafts.judged(jnp.full(4, 0.5)).tolist() == [1, 0, 3, 0]
    assert drafts.judged(jnp.zeros(4)).tolist() == [3, 3, 3, 0]


SPARK = dataclasses.replace(SMALL, dspark=DSparkConfig(block_size=3, noise_token=5, taps=(0, 1), rank=4, stages=2))


@functools.cache
def small_model() -> ModelParams:
    return drawn_model(SPARK, 1, "f32")


PROMPTS = [[1, 2, 3], [4], [5, 0, 2, 1, 4, 3, 3, 1] * 5, [2, 2], [0, 1, 5, 5, 5, 2, 0]]


@functools.cache
def greedy(drafts: int, stop_tokens: tuple[int, ...] = ()) -> list[list[int]]:
    both = init_caches(SPARK, 2, 256, drafts, **FULL)
    return generate(small_model(), PROMPTS, 24, drafts=drafts, caches=both, stop_tokens=stop_tokens).tokens


@pytest.mark.sweep(guard="test_greedy_tokens_are_the_recorded_ones")
def test_texts_of_a_shared_batch_equal_those_without_drafts():
    """Two rows serve five prompts, one of a single token; a stop token ends a text among accepted drafts."""
    whole = greedy(0)
    assert greedy(1) == greedy(3) == whole
    for stop in (1, 4):
        assert greedy(3, (stop,)) == [one[: one.index(stop) + 1] if stop in one else one for one in whole]


def sampled_pairs() -> np.ndarray:
    """How often each pair of tokens follows a prompt in 4,000 texts, of which the second may be a draft."""
    both = init_caches(SPARK, 400, 16, 2, **FULL)
    found = generate(small_model(), [PROMPTS[0]] * 4000, 3, Sampling.of(0.8, seed=2), 2, caches=both)
    assert 0 < found.accepted < found.drafted
    size = SPARK.vocab_size
    return np.bincount([size * a + b for a, b, _ in found.tokens], minlength=size**2)


@pytest.mark.sweep(guard="test_accepted_and_replaced_drafts_have_the_models_distribution")
def test_samples_have_the_models_distribution():
    check_counts(sampled_pairs(), pair_chances(small_model(), PROMPTS[0], Sampling.of(0.8)))


@pytest.mark.sweep(guard="test_accepted_and_replaced_drafts_have_the_models_distribution")
def test_drafts_judged_by_another_distribution_than_they_were_drawn_from_are_found(monkeypatch):
    """That of the logits without the term of the token before."""
    bases: list[jax.Array] = []
    real, kind = dspark.token_head, drafting.drafter(small_model())

    def noted(drafts: Any, base: jax.Array, x: jax.Array, before: jax.Array):
        bases.append(base)
        return real(drafts, base, x, before)

    def guess(params: Any, fed: Any, cache: Any, number: int, draw: Any, backend: Any):
        def wrong(logits: jax.Array, i: Any):
            return draw(logits, i)[0], draw(bases[-1], i)[1]

        return kind.guess(params, fed, cache, number, wrong, backend)

    monkeypatch.setattr(dspark, "token_head", noted)
    monkeypatch.setitem(drafting._DRAFTERS, DSparkParams, SimpleNamespace(guess=guess, store=kind.store))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        check_counts(sampled_pairs(), pair_chances(small_model(), PROMPTS[0], Sampling.of(0.8)))
    jax.clear_caches()


# ---- configurations and checkpoints


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(noise_token=6), r"dspark: noise_token=6 is not in \[0, 6\)"),
        (dict(taps=(0, 2)), r"dspark: taps=\(0, 2\) exceed the model's 2 layers"),
        (dict(taps=(1, 0)), r"taps must be ascending layer numbers"),
        (dict(taps=()), r"taps must be ascending layer numbers, at least one"),
        (dict(block_size=0), r"block_size must be an integer of at least 1, got 0"),
        (dict(stages=0), r"stages must be an integer of at least 1, got 0"),
    ],
)
def test_bad_sizes_are_named(changed, message):
    sizes = dict(block_size=3, noise_token=5, taps=(0, 1), rank=4, stages=2)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, dspark=DSparkConfig(**(sizes | changed)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(dspark_markov_rank=None), r"has a DSpark block and lacks \['dspark_markov_rank'\]"),
        (dict(compress_ratios=[0, 4]), "must end with a 0 for each of its stages"),
    ],
)
def test_bad_configurations_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(SPARK.to_hf() | changed)


def test_a_configuration_is_read_as_it_was_written():
    assert ModelConfig.from_hf(SPARK.to_hf()) == SPARK
    assert SPARK.draft_attention.compress_ratios == (0, 0)


@pytest.mark.parametrize("drafts", [4, 5])
def test_more_drafts_than_the_block_has_rows_are_refused(drafts):
    message = f"drafts must be at most 3, the rows of the model's DSpark block, got {drafts}"
    with pytest.raises(ValueError, match=message):
        init_caches(SPARK, 1, 256, drafts)
