"""Texts from the compiled loop: the recorded ones, whatever the batch, the drafts, the queue and the blocks."""

import dataclasses
import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import (
    Caches,
    Generator,
    ModelConfig,
    Sampling,
    draft_forward,
    forward,
    forward_sequences,
    generate,
    init_caches,
    random_model,
)
from dsv4jax.model.generation import generator as generator_module
from dsv4jax.model.generation.loop import run
from dsv4jax.model.generation.prompts import Asked, caches_for, queued, read_prompts, read_stop_tokens
from tests.model.test_sampling import check_counts
from tests.support.cases import first_of
from tests.support.models import FULL, SMALL, model_a, pair_chances, recorded, small_model

LONGEST = 256  # of texts, with which programs are shared
PROMPTS = [[1, 2, 3], [4], [5, 0, 2, 1, 4, 3, 3, 1] * 5, [2, 2], [0, 1, 5, 5, 5, 2, 0]]


def caches(cfg: ModelConfig, rows: int, drafts: int, **options) -> Caches:
    return init_caches(cfg, rows, LONGEST, drafts, **(FULL | options))


@pytest.mark.sweep(guard="test_greedy_tokens_are_the_recorded_ones")
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
    return generator(rows, drafts).generate([PROMPTS[i] for i in prompts], max_new, stop_tokens=stop_tokens)


def generator(rows: int, drafts: int) -> Generator:
    return Generator(small_model(), caches=caches(SMALL, rows, drafts), drafts=drafts)


ALL = tuple(range(len(PROMPTS)))


@pytest.mark.sweep(guard="test_prefixes_give_way_to_texts_and_texts_still_share_them")
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


@pytest.mark.sweep(guard="test_a_text_ends_at_its_limit_whatever_is_accepted")
@pytest.mark.parametrize("drafts", first_of([2, 0], count=0))
def test_a_stop_token_ends_a_text_also_among_accepted_drafts(drafts):
    whole = greedy(2, drafts, ALL, 30).tokens
    for stop in range(SMALL.vocab_size):
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
        assert greedy(2, drafts, ALL, 30, (stop,)).tokens == expected


@pytest.mark.parametrize("max_new", first_of([1, 2, 3], count=0))
def test_a_text_ends_at_its_limit_whatever_is_accepted(max_new):
    """Also with more drafts than it could use."""
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


SAMPLINGS = [
    Sampling.of(1.0, 0.9, 3),
    Sampling.of(),
    Sampling.of(0.5, 1.0, 4),
    Sampling.of(1.0, 0.9, 3),
    Sampling.of(2),
]


@pytest.mark.parametrize("drafts", first_of([0, 2]))
def test_prompts_with_samplings_and_numbers_of_tokens_of_their_own(drafts):
    """Each draws what it would alone; a text's log-probabilities are those of a pass over all of it."""
    one, counts = generator(2, drafts), [12, 9, 5, 12, 3]
    found = one.generate(PROMPTS, counts, SAMPLINGS, stop_tokens=())
    assert [len(tokens) for tokens in found.tokens] == counts
    for i, (prompt, count, sampling) in enumerate(zip(PROMPTS, counts, SAMPLINGS, strict=True)):
        alone = one.generate([prompt], count, sampling, stop_tokens=())
        assert alone.tokens == [found.tokens[i]]
        logits = of_whole(jnp.asarray([(prompt + found.tokens[i] + [0] * 99)[:60]]))[0, len(prompt) - 1 :][:count]
        for log_probs, of_all in (
            (found.log_probs[i], jax.nn.log_softmax(logits)),
            (found.sampled_log_probs[i], jnp.log(sampling.probabilities(logits))),
        ):
            expected = np.asarray(of_all)[np.arange(count), found.tokens[i]]
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)  # f32, summed in another order


@jax.jit
def of_whole(ids: jax.Array) -> jax.Array:
    return forward_sequences(small_model(), ids)


def test_queues_and_stop_tokens_of_usual_numbers_have_one_size():
    """Each size is a program of its own."""
    sizes = set()
    for count in (1, 31, 32):
        asked = Asked([np.asarray([1])] * count, [1] * count, [Sampling.of()])
        sizes.add(queued(asked, [list(range(count))], 8)[0].lengths.shape)
    assert len(sizes) == 1
    assert len({read_stop_tokens(list(range(count)), SMALL).shape for count in range(6)}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new": [1, 2]}, "max_new must be one for all prompts, or one for each of 5, got 2"),
        ({"max_new": [1, 2, 3, 4, 0]}, r"max_new\[4\] must be an integer of at least 1, got 0"),
        ({"sampling": [Sampling.of()] * 6}, "sampling must be one for all prompts, or one for each of 5, got 6"),
        ({"sampling": [Sampling.of()] * 4 + [0.5]}, r"sampling\[4\] must be a Sampling, such as .*, got 0.5"),
    ],
)
def test_what_is_not_for_each_prompt_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generator(2, 0).generate(PROMPTS, **({"max_new": 2} | options))


def test_fields_of_a_sampling_that_would_compile_anew_are_named():
    for field, value, message in (
        ("temperature", 0.5, r"sampling.temperature: expected float32 \[\], got float"),
        ("top_p", jnp.ones(2), r"sampling.top_p: expected float32 \[\], got float32\[2\]"),
        ("key", jax.random.PRNGKey(0), r"sampling.key: expected \[\] of jax.random.key, got uint32\[2\]"),
    ):
        sampling = dataclasses.replace(Sampling.of(1.0), **{field: value})
        with pytest.raises(AssertionError, match=message):
            generator(2, 0).generate(PROMPTS, 2, sampling)


def test_an_array_of_prompts_has_a_prompt_per_row():
    for given in (np.asarray([[1, 2], [3, 4]]), jnp.asarray([[1, 2], [3, 4]]), [jnp.asarray([1, 2]), (3, 4)]):
        assert [prompt.tolist() for prompt in read_prompts(given, 6)] == [[1, 2], [3, 4]]


def test_caches_in_place_of_a_cache_are_named():
    both: Any = caches(SMALL, 1, 0)
    one = jnp.asarray([0], jnp.int32)
    with pytest.raises(ValueError, match=r"a model's forward pass: expected a KVCache, got Caches: give it \.model"):
        forward(small_model(), one[None], both, one, one)


@pytest.mark.slow
def test_64_bits_change_nothing():
    """Sums of integers and random numbers have 64 bits then, unless they are told not to."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = generator(2, 2).generate(PROMPTS, 12, SAMPLINGS, stop_tokens=())
        ids = jnp.asarray([PROMPTS[2]], jnp.int32)
        wide = jax.grad(lambda params: forward_sequences(params, ids).sum(), allow_int=True)(small_model())
        made = random_model(SMALL, jax.random.key(0), weights="f32")
    assert found.tokens == generator(2, 2).generate(PROMPTS, 12, SAMPLINGS, stop_tokens=()).tokens
    assert {leaf.dtype for leaf in jax.tree.leaves((wide, made))} <= {
        jnp.dtype(jnp.float32),
        jnp.dtype(jnp.int32),
        jax.dtypes.float0,
    }


@pytest.mark.slow
def test_progress_is_shown_as_it_is_made():
    seen: list[list[list[int]]] = []
    both = caches(SMALL, 2, 0)
    found = generate(small_model(), PROMPTS, 30, stop_tokens=(), caches=both, on_progress=seen.append)
    assert found.tokens == greedy(2, 0, ALL, 30).tokens == seen[-1]
    assert len(seen) > 3
    for before, after in itertools.pairwise(seen):
        assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))


@pytest.mark.sweep(guard="test_accepted_and_replaced_drafts_have_the_models_distribution")
def test_samples_have_the_models_distribution_with_drafts():
    """4000 pairs of tokens after one prompt, against the probabilities of all pairs."""
    params, prompt, drafts, sampling = small_model(), PROMPTS[0], 2, Sampling.of(0.8, seed=2)
    size, samples, rows = SMALL.vocab_size, 4000, 400
    both = init_caches(SMALL, rows, 16, drafts, **FULL)
    # Three tokens, so that the second one may be a draft.
    found = generate(params, [prompt] * samples, 3, sampling, drafts, caches=both)
    assert 0 < found.accepted < found.drafted
    counts = np.bincount([size * a + b for a, b, _ in found.tokens], minlength=size**2)
    check_counts(counts, pair_chances(params, prompt, sampling))


@pytest.mark.sweep(guard="test_prefixes_give_way_to_texts_and_texts_still_share_them")
@pytest.mark.parametrize("drafts", first_of([0, 2], count=0))
def test_with_too_few_blocks_texts_wait_and_their_tokens_stay_the_same(drafts):
    """Three blocks hold one of the texts and half of another, and each row wants two."""
    plenty, few = greedy(2, 0, ALL, 200), caches(SMALL, 2, drafts, num_blocks=3)
    found = generate(small_model(), PROMPTS, 200, drafts=drafts, stop_tokens=(), caches=few)
    assert found.tokens == plenty.tokens
    assert plenty.stored == sum(map(len, PROMPTS)) - len(PROMPTS), "all tokens but the last of each"
    assert found.stored > plenty.stored + 100, "no text was set back"


@pytest.mark.parametrize("drafts", first_of([0, 2], count=0))
def test_a_chat_that_grows_is_not_computed_again(drafts):
    """Also the cache of the drafts goes on: as many of them are right as in one that was filled at once."""
    chat, text, right = generator(2, drafts), [], 0
    for turn, said in enumerate([PROMPTS[2], [3], [1, 2], PROMPTS[4], [5, 5]]):
        text += said
        answer = list(chat.stream(text, 20))
        assert chat.result.tokens == [answer]
        # The last token of the turn before was not stored, nor is the last one of this.
        assert chat.result.stored == (len(said) if turn else len(said) - 1)
        at_once = generator(2, drafts).generate([text], 20)
        assert at_once.tokens == [answer]
        counts = [(one.passes, one.drafted, one.accepted) for one in (chat.result, at_once)]
        assert counts[0] == counts[1]
        text += answer
        right += chat.result.accepted
    assert bool(right) == bool(drafts)


@pytest.mark.sweep(guard="test_a_text_ends_at_its_limit_whatever_is_accepted")
def test_a_text_goes_on_from_a_stop_token_among_accepted_drafts():
    """Drafts after it were accepted, too, and must not be stored."""
    whole = greedy(2, 2, ALL, 30).tokens
    went_on = 0
    for stop in range(SMALL.vocab_size):
        chat = generator(2, 2)
        for prompt, expected in zip(PROMPTS, whole, strict=True):
            answer = list(chat.stream(prompt, 30, stop_tokens=[stop]))
            assert answer == expected[: len(answer)]
            if len(answer) < 30:
                assert list(chat.stream(prompt + answer, 30 - len(answer))) == expected[len(answer) :]
                assert chat.result.stored == 0
                went_on += 1
    assert went_on > 5


@pytest.mark.slow
def test_conversations_that_were_not_used_for_longest_are_given_up():
    chats, (a, b, c) = generator(2, 2), PROMPTS[2:5]

    def stored(prompt: list[int]) -> int:
        answer = list(chats.stream(prompt, 5))
        assert answer == generator(2, 2).generate([prompt], 5).tokens[0]
        prompt += answer
        return chats.result.stored

    a, b, c = list(a), list(b), list(c)
    assert [stored(a), stored(b)] == [len(PROMPTS[2]) - 1, len(PROMPTS[3]) - 1]
    assert [stored(a), stored(b), stored(a)] == [0, 0, 0]
    assert stored(c) == len(PROMPTS[4]) - 1
    before = len(b)
    assert [stored(a), stored(b)] == [0, before - 1], "c took the row of b"
    both = chats.generate([a, b, [4]], 5)
    assert both.tokens == generator(2, 2).generate([a, b, [4]], 5).tokens
    assert both.stored == 0


@pytest.mark.sweep(guard="test_conversations_that_were_not_used_for_longest_are_given_up")
def test_conversations_are_given_up_when_their_blocks_are_needed():
    """Of three blocks, a text of more than 128 tokens takes two."""
    chats = Generator(small_model(), caches=caches(SMALL, 2, 2, num_blocks=3), drafts=2)
    a, b = list(PROMPTS[2]), list(PROMPTS[3])

    def stored(text: list[int], max_new: int) -> int:
        """Also grows the text."""
        expected = generator(2, 2).generate([text], max_new).tokens[0]
        assert list(chats.stream(text, max_new)) == expected
        text += expected
        return chats.result.stored

    assert stored(a, 150) == len(PROMPTS[2]) - 1
    assert stored(b, 50) == len(PROMPTS[3]) - 1
    assert [stored(a, 5), stored(b, 5)] == [0, 0], "one block and two"
    assert stored(b, 100) == 0
    whole = len(a)
    assert stored(a, 5) == whole - 1, "a had to give its blocks up"


@pytest.mark.slow
def test_a_stream_that_is_left_early_keeps_what_it_has():
    chat, expected = generator(2, 2), greedy(2, 0, (2,), 30).tokens[0]
    for number, token in enumerate(chat.stream(PROMPTS[2], 30)):
        assert token == expected[number]
        if number == 10:
            break
    made = chat.result.tokens[0]
    assert expected[: len(made)] == made
    assert 11 <= len(made) < 11 + generator_module.STREAMED * (1 + 2)
    assert list(chat.stream(PROMPTS[2] + made, 10)) == expected[len(made) : len(made) + 10]
    assert chat.result.stored == 0

    stream = chat.stream(PROMPTS[0])
    next(stream)
    with pytest.raises(RuntimeError, match=r"last stream is not over: exhaust it, or call its close\(\)"):
        next(chat.stream(PROMPTS[1]))
    assert len(list(stream)) == LONGEST - len(PROMPTS[0]) - 1, "as many tokens as fit"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "loops"), [(2, 0), (129, 1), (130, 0)])
def test_the_pass_that_stores_a_prompts_end_draws_the_token_after_it(size, loops, monkeypatch):
    """But a prompt of a token more than a pass of 128 takes the loop. Drafts, with which all do, change no token."""
    chat, prompt, calls = generator(2, 0), (PROMPTS[2] * 4)[:size], []
    expected = generator(2, 2).generate([prompt], 3, stop_tokens=()).tokens[0]
    chat.generate(PROMPTS[:1], 2)  # compiles

    def counted(*arguments):
        calls.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(generator_module, "run", counted)
    stream = chat.stream(prompt, 3, stop_tokens=())
    assert (next(stream), len(calls)) == (expected[0], loops)
    assert list(stream) == expected[1:]
    assert (chat.result.stored, chat.result.passes) == (size - 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["run", "look"])
def test_a_generator_whose_pass_was_interrupted_goes_on(where, monkeypatch):
    """In a pass its caches are lost, and it starts anew; after a pass it holds tokens that nobody has seen."""
    chat, expected = generator(2, 2), greedy(2, 0, (2,), 30).tokens[0]
    whole = getattr(generator_module, where)

    def interrupted(*arguments, **options):
        whole(*arguments, **options)
        raise KeyboardInterrupt

    stream = chat.stream(PROMPTS[2], 30)
    assert next(stream) == expected[0]
    stream.close()
    with monkeypatch.context() as patch:
        patch.setattr(generator_module, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(chat.stream(PROMPTS[2] + expected[:1], 29))
    assert list(chat.stream(PROMPTS[2] + expected[:1], 29)) == expected[1:]

    def stop(tokens):
        raise KeyError(len(tokens))

    with pytest.raises(KeyError) as error:  # holds the frames of the call
        chat.generate(PROMPTS, 30, on_progress=stop)
    assert chat.generate(PROMPTS[2:3], 30).tokens == [expected], error


@pytest.mark.slow
def test_one_program_serves_any_prompts():
    """Of 3 and 4 prompts, of few and many tokens, of several generators, streamed or not."""
    params, program, formats = small_model(), cast(Any, run), FULL
    chat = Generator(params, 3, 1000, **formats)
    assert (chat.rows, chat.context) == (4, 1024)
    first = chat.generate(PROMPTS[:3], 20)
    programs = program._cache_size()
    assert chat.generate(PROMPTS, 20).tokens[:3] == first.tokens
    assert len(list(chat.stream(PROMPTS[2] * 20, 10, Sampling.of(0.5)))) == 10
    again = Generator(params, 4, **formats)
    assert again.generate([PROMPTS[0], *PROMPTS[1:3], [1]], 20, stop_tokens=[]).tokens[:3] == first.tokens
    assert program._cache_size() == programs
    sizes = caches_for(params.cfg, read_prompts(PROMPTS[:3], 6), 500).model.plan
    assert (sizes.max_requests, sizes.max_context) == (4, 1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
        (dict(prompts=[[1, 6]]), r"prompts\[0\] must be token ids in \[0, 6\), got \[1, 6\]"),
        (dict(prompts=[[1.5]]), r"prompts\[0\] must be token ids"),
        (dict(max_new=0), "max_new must be an integer of at least 1, got 0"),
        (dict(drafts=-1), "drafts must be an integer of at least 0, got -1"),
        (dict(max_new=300), r"prompts\[0\] of 3 tokens and max_new=300 are a text of 303 tokens, and .* room for 256"),
        (
            dict(prompts=[[1], [2] * 200], max_new=100, caches=lambda: caches(SMALL, 2, 0, num_blocks=2)),
            r"prompts\[1\] .* 256",
        ),
        (dict(prompts=[5, 1, 3]), r"prompts\[0\] is the number 5, not a prompt: one prompt alone is \[\[5, 17, 3\]\]"),
        (dict(prompts=np.asarray([5, 1])), r"prompts\[0\] is the number 5"),
        (dict(prompts=5), "prompts must be sequences of token ids, got 5"),
        (dict(prompts="Hi"), "prompts must be sequences of token ids, got 'Hi'"),
        (dict(prompts=[[[1], [2]]]), r"prompts\[0\] must be token ids"),
        (dict(prompts=[[[1], [2, 3]]]), r"prompts\[0\] must be token ids"),
        (dict(sampling=0.7), r"sampling must be a Sampling, such as Sampling.of\(temperature=0.7\), got 0.7"),
        (dict(stop_tokens=5), "stop_tokens must be token ids, got 5"),
        (dict(stop_tokens=[1, 256, 2**40]), r"stop_tokens must be token ids in \[0, .*, got \[256, 1099511627776\]"),
        (
            dict(caches=lambda: caches(SMALL, 1, 0).model),
            "caches must be Caches, .* got KVCache: make both by init_caches",
        ),
        (dict(drafts=4), "drafts=4 are more than can be used: of max_new=4 tokens, 3"),
        (dict(drafts=17, max_new=20, caches=lambda: None), "drafts must be at most 16, got 17"),
        (dict(drafts=3, max_new=253), r"caches cannot hold drafts=3 tokens: make them by init_caches\(..., drafts=3\)"),
    ],
)
def test_bad_arguments_are_named(options, message):
    given = dict(prompts=PROMPTS[:1], max_new=4, caches=lambda: caches(SMALL, 1, 2)) | options
    given["caches"] = given["caches"]()
    with pytest.raises(ValueError, match=message):
        generate(small_model(), **given)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_logits_that_are_nan_are_no_tokens(drafts):
    """Token 5 makes everything after it NaN: the second prompt has it, and the first one does not."""
    params = small_model()
    broken = dataclasses.replace(params, embedding=params.embedding.at[5].set(jnp.nan))
    chat = Generator(broken, caches=caches(SMALL, 2, drafts), drafts=drafts)
    first = chat.generate(PROMPTS[:1], 1).tokens
    with pytest.raises(FloatingPointError, match=r"logits for new token 0 of prompts\[1\] have NaN"):
        chat.generate([PROMPTS[0], PROMPTS[4]], 1)
    with pytest.raises(FloatingPointError, match=r"logits for new token 0 of prompts\[0\] have NaN"):
        list(chat.stream(PROMPTS[4], 4))
    assert chat.generate(PROMPTS[:1], 1).tokens == first


def test_arguments_in_another_order_are_named():
    swapped: Any = ([[5]], small_model())
    for call in (lambda: generate(swapped[0], swapped[1], 4), lambda: Generator(swapped[0])):
        with pytest.raises(ValueError, match=r"^params: expected a ModelParams, got list$"):
            call()


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


@pytest.mark.sweep(guard="test_what_drafts_are_made_of_is_forked_in_any_order_of_slots")
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
