"""Texts from the compiled loop: the recorded ones, whatever the batch, the drafts and the queue."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import Caches, ModelConfig, Sampling, draft_forward, forward, generate, init_caches
from tests.model.test_sampling import check_counts
from tests.support.models import FULL, SMALL, model_a, recorded, small_model

LONGEST = 256  # of texts, with which programs are shared
PROMPTS = [[1, 2, 3], [4], [5, 0, 2, 1, 4, 3, 3, 1] * 5, [2, 2], [0, 1, 5, 5, 5, 2, 0]]


def caches(cfg: ModelConfig, rows: int, drafts: int, **options) -> Caches:
    return init_caches(cfg, rows, LONGEST, drafts, **(FULL | options))


@pytest.mark.slow
def test_greedy_tokens_are_the_recorded_ones_with_drafts():
    """Without drafts they are compared in the test of the command. The page on generation runs the same program."""
    drafts = 2
    wanted, params = recorded("a"), model_a()
    first = int(wanted["prompt_len"])
    prompt, expected = wanted["ids"][:first].tolist(), wanted["ids"][first:].tolist()
    both = init_caches(params.cfg, 1, 512, drafts, **FULL)
    found = generate(params, [prompt], len(expected), drafts=drafts, stop_tokens=(), caches=both)
    assert found.tokens == [expected]
    assert found.drafted > 0


@functools.cache
def greedy(rows: int, drafts: int, prompts: tuple[int, ...], max_new: int, stop_tokens: tuple[int, ...] = ()):
    both = caches(SMALL, rows, drafts)
    queue = [PROMPTS[i] for i in prompts]
    return generate(small_model(), queue, max_new, drafts=drafts, stop_tokens=stop_tokens, caches=both)


ALL = tuple(range(len(PROMPTS)))


@pytest.mark.slow
def test_texts_of_a_shared_batch_equal_each_alone_with_and_without_drafts():
    """Two rows serve five prompts, so rows are at different places, and texts wait for their turn."""
    together = greedy(2, 0, ALL, 30)
    assert [len(tokens) for tokens in together.tokens] == [30] * len(PROMPTS)
    assert len(set(map(tuple, together.tokens))) == len(PROMPTS), "texts that say nothing"
    for i in ALL:
        assert greedy(2, 0, (i,), 30).tokens == [together.tokens[i]]
    drafted = greedy(2, 2, ALL, 30)
    assert drafted.tokens == together.tokens
    assert 0 < drafted.accepted < drafted.drafted
    assert drafted.passes < together.passes


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_stop_token_ends_a_text_also_among_accepted_drafts(drafts):
    whole = greedy(2, drafts, ALL, 30).tokens
    for stop in range(SMALL.vocab_size):
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
        assert greedy(2, drafts, ALL, 30, (stop,)).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("max_new", [1, 2, 3])
def test_a_text_ends_at_its_limit_whatever_is_accepted(max_new):
    whole = greedy(2, 0, ALL, 30).tokens
    assert greedy(2, 2, ALL, max_new).tokens == [tokens[:max_new] for tokens in whole]


@pytest.mark.slow
def test_what_is_sampled_depends_on_the_text_and_its_place_in_the_queue_alone():
    def sample(queue: list[list[int]], seed: int = 0) -> list[list[int]]:
        sampling = Sampling.of(1.0, 0.9, seed)
        return generate(small_model(), queue, 12, sampling, drafts=2, caches=caches(SMALL, 2, 2)).tokens

    first = sample(PROMPTS)
    assert first == sample(PROMPTS)
    assert first != sample(PROMPTS, seed=1)
    assert sample(PROMPTS[:2]) == first[:2]  # other neighbours


@pytest.mark.slow
def test_progress_is_shown_as_it_is_made():
    seen: list[list[list[int]]] = []
    both = caches(SMALL, 2, 0)
    found = generate(small_model(), PROMPTS, 30, stop_tokens=(), caches=both, on_progress=seen.append)
    assert found.tokens == greedy(2, 0, ALL, 30).tokens == seen[-1]
    assert len(seen) > 3
    for before, after in itertools.pairwise(seen):
        assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))


@pytest.mark.slow
def test_samples_have_the_models_distribution_with_drafts():
    """4000 pairs of tokens after one prompt, against the probabilities of all pairs."""
    params, prompt, drafts, sampling = small_model(), PROMPTS[0], 2, Sampling.of(0.8, seed=2)
    size, samples, rows = SMALL.vocab_size, 4000, 400
    cache, slots, _ = d4.admit(caches(SMALL, size, 0).model, size)
    texts = jnp.asarray([[*prompt, token] for token in range(size)], jnp.int32)
    count = jnp.full(size, texts.shape[1], jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, count)
    logits, _, _ = forward(params, texts, cache, slots, count, logits="all")
    assert logits is not None
    chances = np.asarray(sampling.probabilities(logits), np.float64)
    pairs = chances[0, len(prompt) - 1][:, None] * chances[:, len(prompt)]

    both = init_caches(SMALL, rows, 16, drafts, **FULL)
    # Three tokens, so that the second one may be a draft.
    found = generate(params, [prompt] * samples, 3, sampling, drafts, caches=both)
    assert 0 < found.accepted < found.drafted
    counts = np.bincount([size * a + b for a, b, _ in found.tokens], minlength=size**2)
    check_counts(counts, pairs.ravel())


@pytest.mark.slow
def test_without_enough_blocks_it_says_so():
    with pytest.raises(RuntimeError, match="ran out of blocks"):
        generate(small_model(), PROMPTS, 200, caches=caches(SMALL, 2, 0, num_blocks=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
        (dict(prompts=[[1, 6]]), r"prompts\[0\] must be token ids in \[0, 6\), got \[1, 6\]"),
        (dict(prompts=[[1.5]]), r"prompts\[0\] must be token ids"),
        (dict(max_new=0), "max_new must be an integer of at least 1, got 0"),
        (dict(drafts=-1), "drafts must be an integer of at least 0, got -1"),
        (dict(max_new=300), "texts of 303 tokens need caches with max_context >= 303, got 256"),
        (dict(drafts=3, max_new=253), r"caches cannot hold drafts=3 tokens: make them by init_caches\(..., drafts=3\)"),
    ],
)
def test_bad_arguments_are_named(options, message):
    given = dict(prompts=PROMPTS[:1], max_new=4, caches=caches(SMALL, 1, 2)) | options
    with pytest.raises(ValueError, match=message):
        generate(small_model(), **given)


def test_caches_that_are_not_empty_are_refused():
    both, _, _ = caches(SMALL, 1, 0).admit(1)
    with pytest.raises(ValueError, match="caches must be empty"):
        generate(small_model(), PROMPTS[:1], 4, caches=both)


def test_caches_agree_on_slots():
    both = caches(SMALL, 4, 1)
    both, slots, ok = both.admit(3)
    assert ok
    both = both.release(slots[1:2])
    both, again, ok = both.admit(2, jnp.asarray([False, True]))
    assert ok
    assert again.tolist() == [-1, 1]
    assert both.drafts is not None
    np.testing.assert_array_equal(both.model.tables.admitted, both.drafts.tables.admitted)


@pytest.mark.slow
def test_a_fork_goes_on_as_its_source_with_drafts_too():
    params = small_model()
    both, slots, _ = caches(SMALL, 3, 1).admit(3)
    one = jnp.asarray([5], jnp.int32)
    ids = jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32)
    model, _ = d4.prepare_forward(both.model, slots[:1], one)
    _, streams, model = forward(params, ids, model, slots[:1], one)
    assert both.drafts is not None
    drafts, _ = d4.prepare_forward(both.drafts, slots[:1], one)
    _, _, drafts = draft_forward(params, streams, ids, drafts, slots[:1], one)
    both = Caches(model=d4.advance(model, slots[:1], one), drafts=d4.advance(drafts, slots[:1], one))
    forked, ok = both.fork(slots[0], slots[1:])
    assert ok
    assert forked.drafts is not None
    assert forked.model.seq_lens.tolist() == forked.drafts.seq_lens.tolist() == [5, 5, 5]
    again, ok = forked.fork(slots[0], slots[1:])  # the targets are not empty
    assert not ok
    for one_leaf, other in zip(jax.tree.leaves(again), jax.tree.leaves(forked), strict=True):
        np.testing.assert_array_equal(one_leaf, other)
    window = forked.drafts.stack("swa").state.window.nope
    np.testing.assert_array_equal(window[0, 0], window[0, 2])
