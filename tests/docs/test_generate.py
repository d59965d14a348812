"""examples/generate.py: texts that share a batch come out as each does alone, from one program that the host starts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from examples.generate import Model, Texts, generate
from tests.support.driver import CFG, random_params, small_plan

VOCABULARY, LONGEST, ROWS = 29, 48, 3
PROMPTS = (5, 33, 17, 1, 40, 9, 46, 20)
NEVER = -1  # a stop token that no model samples
# Too few blocks for all texts at once, enough for any three: a row must get the blocks of the one before.
PLAN = small_plan(kv_format="fp8_row", indexer_format="nvfp4", max_requests=ROWS, num_blocks=ROWS * 3)


@functools.cache
def model() -> Model:
    rng = np.random.default_rng(0)
    embedding, unembedding = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((VOCABULARY, CFG.hidden_size), (CFG.hidden_size, VOCABULARY))
    )
    return Model(embedding=embedding, layers=random_params(), unembedding=unembedding)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()


def run(prompts: list[list[int]], stop_token=NEVER, temperature=0.0, blocks=PLAN.num_blocks):
    """Returns (texts as lists, the loop). The queue has one length, and so there is one program."""
    tokens = np.full((len(PROMPTS), LONGEST), 7, np.int32)
    for row, known in zip(tokens, prompts, strict=False):
        row[: len(known)] = known
    lengths = [len(known) for known in prompts] + [0] * (len(PROMPTS) - len(prompts))
    texts = Texts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths, jnp.int32))
    cache = d4.init_cache(PLAN)
    tables = dataclasses.replace(cache.tables, num_free=jnp.full(1, blocks, jnp.int32))
    cache = dataclasses.replace(cache, tables=tables)
    loop = generate(model(), cache, texts, jnp.int32(stop_token), jnp.float32(temperature), jax.random.key(5))
    lengths = loop.texts.lengths.tolist()
    return [row[:length] for row, length in zip(loop.texts.tokens.tolist(), lengths, strict=True)], loop


def assert_all_given_back(loop):
    tables = loop.cache.tables
    assert not np.asarray(tables.admitted).any()
    assert not np.asarray(tables.block_refs).any()
    assert sorted(tables.free_blocks.tolist()) == list(range(PLAN.num_blocks))
    assert tables.num_free.tolist() == [PLAN.num_blocks]


def test_texts_of_a_shared_batch_equal_each_alone():
    prompts = [prompt(length) for length in PROMPTS]
    together, loop = run(prompts)
    assert loop.ok
    assert_all_given_back(loop)
    assert [len(text) for text in together] == [LONGEST] * len(PROMPTS)
    for known, text in zip(prompts, together, strict=True):
        assert text[: len(known)] == known
        (alone, *nothing), single = run([known])
        assert alone == text
        assert not any(nothing)
        assert int(single.passes) == LONGEST - 1
        assert_all_given_back(single)
    assert len({tuple(text[-8:]) for text in together}) > len(PROMPTS) // 2, "texts that say nothing"

    # Three slots have served eight texts of equal lengths: in three rounds, in which a text's last token is not fed.
    assert int(loop.passes) == 3 * (LONGEST - 1)

    # A stop token ends rows at different steps; what comes before is unchanged.
    stop = together[0][10]
    stopped, loop = run(prompts, stop_token=stop)
    assert loop.ok
    assert_all_given_back(loop)
    ends = []
    for known, text, whole in zip(prompts, stopped, together, strict=True):
        generated = whole[len(known) :]
        ends.append(len(known) + generated.index(stop) + 1 if stop in generated else LONGEST)
        assert text == whole[: ends[-1]]
    assert len(set(ends)) > 2
    assert int(loop.passes) < 3 * (LONGEST - 1)
    program: Any = generate
    assert program._cache_size() == 1, "one program for any queue, stop token and temperature"


def test_a_draw_depends_on_the_text_and_its_place_in_the_queue_alone():
    prompts = [prompt(length) for length in PROMPTS]
    first, _ = run(prompts, temperature=1.0)
    again, _ = run(prompts, temperature=1.0)
    greedy, _ = run(prompts)
    assert first == again
    assert first != greedy
    fewer, _ = run(prompts[:4], temperature=1.0)  # other neighbours
    assert fewer[:4] == first[:4]


def test_a_text_that_fills_its_row_comes_back_as_it_is():
    full, short = [prompt(LONGEST)] * (ROWS + 1), [prompt(46), prompt(40)]
    texts, loop = run([full[0], short[0], *full[1:], short[1]])
    assert loop.ok
    assert_all_given_back(loop)
    (first, second, *_), alone = run(short)
    assert texts[: len(full) + 2] == [full[0], first, *full[1:], second]
    assert int(loop.passes) <= int(alone.passes) + 2, "a full text takes its row for one pass"


def test_without_enough_blocks_the_loop_ends_and_says_so():
    prompts = [prompt(length) for length in PROMPTS]
    whole, _ = run(prompts)
    texts, loop = run(prompts, blocks=4)
    assert not loop.ok
    for text, complete in zip(texts, whole, strict=True):
        assert text == complete[: len(text)]


def test_the_host_is_not_asked_on_the_way():
    tokens, lengths = jnp.zeros((len(PROMPTS), LONGEST), jnp.int32), jnp.zeros(len(PROMPTS), jnp.int32)
    arguments = d4.abstract_cache(PLAN), Texts(tokens=tokens, lengths=lengths), jnp.int32(0), jnp.float32(0)
    lowered = generate.lower(model(), *arguments, jax.random.key(0)).as_text()
    assert "callback" not in lowered
    assert "infeed" not in lowered
