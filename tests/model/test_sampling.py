"""Tokens are drawn with the probabilities that they must have, with drafts as without."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.model import Sampling
from dsv4jax.model.generation.sampling import Chances, accept

VOCABULARY, SAMPLES = 6, 4000
# Bound on sum((found - expected)^2 / expected) over cells, by degrees of freedom: all but one in 10^6 of right samplers
# stay below it. The keys are fixed, so that a test always passes or always fails.
CHI_SQUARE = {5: 35.9, 35: 92.7}


def check_counts(counts: np.ndarray, probabilities: np.ndarray) -> None:
    expected = probabilities * counts.sum()
    cells = expected > 0
    assert not counts[~cells].any()
    assert np.sum((counts - expected)[cells] ** 2 / expected[cells]) < CHI_SQUARE[counts.size - 1]


def random_distributions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.dirichlet(np.full(VOCABULARY, 0.7), shape).astype(np.float32)


def keys(seed: int, count: int = SAMPLES) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


# Each operation by itself takes as long to compile as all together.
probabilities_of, chances_of, draw_of = map(jax.jit, (Sampling.probabilities, Sampling.chances, Sampling.draw))
judged = jax.jit(accept)


@jax.jit
def chances(probabilities: Any) -> Chances:
    return Sampling.of(1.0).chances(jnp.log(probabilities))


@jax.jit
def draw(probabilities: Any, keys: jax.Array) -> jax.Array:
    return chances(probabilities).draw(keys)


def test_draws_have_the_given_probabilities():
    probabilities = random_distributions(np.random.default_rng(0))
    tokens = draw(jnp.broadcast_to(probabilities, (SAMPLES, VOCABULARY)), keys(0))
    check_counts(np.bincount(tokens, minlength=VOCABULARY), probabilities)


@pytest.mark.parametrize("seed", [1, 2])
def test_accepted_and_replaced_drafts_have_the_models_distribution(seed):
    """Two drafts from q; the model's p after each token. Whatever q is, the tokens are distributed as from p alone."""
    rng = np.random.default_rng(seed)
    p_first, p_second = random_distributions(rng), random_distributions(rng, VOCABULARY)
    q_first, q_second = random_distributions(rng), random_distributions(rng, VOCABULARY)
    batch = (SAMPLES, VOCABULARY)
    first = draw(jnp.broadcast_to(q_first, batch), keys(seed + 10))
    second = draw(jnp.asarray(q_second)[first], keys(seed + 20))
    drafts = jnp.stack([first, second], 1)
    guessed = jnp.stack([jnp.broadcast_to(q_first, batch), jnp.asarray(q_second)[first]], 1)
    anything = jnp.full(batch, 1 / VOCABULARY)
    wanted = jnp.stack([jnp.broadcast_to(p_first, batch), jnp.asarray(p_second)[first], anything], 1)
    count = jnp.full(SAMPLES, 2, jnp.int32)
    accepted, following = judged(chances(wanted), chances(guessed), drafts, count, keys(seed + 30))
    tokens = np.asarray(jnp.where(accepted > 0, first, following))
    check_counts(np.bincount(tokens, minlength=VOCABULARY), p_first)
    # A text whose first draft was refused draws its second token in the next pass.
    later = draw(jnp.asarray(p_second)[tokens], keys(seed + 40))
    after = np.asarray(jnp.where(accepted == 0, later, jnp.where(accepted == 1, following, second)))
    pairs = np.bincount(tokens * VOCABULARY + after, minlength=VOCABULARY**2)
    check_counts(pairs, (p_first[:, None] * p_second).ravel())
    overlap = np.minimum(p_first, q_first).sum()  # the chance that the first draft is accepted
    assert abs(np.mean(accepted > 0) - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / SAMPLES)


@pytest.mark.slow
def test_only_drafts_that_count_are_accepted():
    same = jnp.full((4, 3, VOCABULARY), 1 / VOCABULARY)
    drafts, count = jnp.zeros((4, 2), jnp.int32), jnp.asarray([0, 1, 2, 2], jnp.int32)
    accepted, _ = judged(chances(same), chances(same[:, :2]), drafts, count, keys(3, 4))
    assert accepted.tolist() == [0, 1, 2, 2]  # p = q accepts all


def test_greedy_drafts_are_accepted_while_they_are_the_models_own():
    sampling, rng = Sampling.of(), np.random.default_rng(4)
    logits = jnp.asarray(rng.standard_normal((3, 3, VOCABULARY)), jnp.float32)
    own = np.asarray(jnp.argmax(logits, -1))
    drafts = own[:, :2].copy()
    drafts[0, 0] = (drafts[0, 0] + 1) % VOCABULARY
    drafts[1, 1] = (drafts[1, 1] + 1) % VOCABULARY
    guessed = chances_of(sampling, jax.nn.one_hot(drafts, VOCABULARY))
    given = chances_of(sampling, logits), guessed, jnp.asarray(drafts, jnp.int32), jnp.full(3, 2, jnp.int32)
    accepted, following = judged(*given, keys(5, 3))
    assert accepted.tolist() == [0, 1, 2]
    assert following.tolist() == [own[0, 0], own[1, 1], own[2, 2]]


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 6), (0.95, 5), (0.9, 4), (0.5, 2), (0.3, 1), (1e-6, 1)])
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(top_p, kept):
    probabilities = np.asarray([0.05, 0.4, 0.2, 0.25, 0.08, 0.02], np.float32)
    found = np.asarray(probabilities_of(Sampling.of(1.0, top_p), jnp.log(probabilities)))
    order = np.argsort(-probabilities)
    expected = np.zeros(6)
    expected[order[:kept]] = probabilities[order[:kept]] / probabilities[order[:kept]].sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # f32


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_a_token_if_those_that_are_likelier_have_less(top_p):
    """Over a vocabulary of awkward size, with ties, a token that has nearly all, and tokens that have nothing."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 3, (4, 1237)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2, 77] = 30
    logits[3, ::2] = -np.inf
    found = np.asarray(probabilities_of(Sampling.of(1.0, top_p), logits), np.float64)
    for row, kept in zip(np.asarray(jax.nn.softmax(logits), np.float64), found, strict=True):
        likelier = np.sum(row[None] * (row[None] > row[:, None]), 1)
        is_clear = abs(likelier - top_p) > 1e-5  # sums of a thousand numbers in f32
        assert ((kept > 0) == ((likelier < top_p) & (row > 0)))[is_clear].all()
        assert abs(kept.sum() - 1) < 1e-5


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_draws_of_logits_have_their_probabilities(temperature, top_p):
    sampling, logits = Sampling.of(temperature, top_p), jnp.log(random_distributions(np.random.default_rng(8)))
    tokens = draw_of(sampling, jnp.broadcast_to(logits, (SAMPLES, VOCABULARY)), keys(9))
    check_counts(np.bincount(tokens, minlength=VOCABULARY), np.asarray(probabilities_of(sampling, logits)))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (0.0, 1.0), (0.0, 0.8)])
def test_probabilities_of_some_tokens_are_those_of_all(temperature, top_p):
    rng = np.random.default_rng(11)
    logits = jnp.asarray(np.round(rng.standard_normal((5, 3, VOCABULARY)) * 4) / 4, jnp.float32)  # with ties
    sampling = Sampling.of(temperature, top_p)
    found, whole = chances_of(sampling, logits), probabilities_of(sampling, logits)
    tokens, rows = rng.integers(0, VOCABULARY, (5, 3)), jnp.asarray(rng.integers(0, 3, 5), jnp.int32)
    expected = np.take_along_axis(np.asarray(whole), tokens[..., None], -1)[..., 0]
    # exp of other vectors may have another last bit.
    of_tokens = jax.jit(Chances.of)(found, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(of_tokens, expected, rtol=1e-6)
    of_rows = jax.jit(lambda found, rows: found.row(rows).all())(found, rows)
    np.testing.assert_allclose(of_rows, np.asarray(whole)[np.arange(5), rows], rtol=1e-6)


def test_without_temperature_the_first_of_the_largest_logits_is_drawn():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [jnp.inf, 0.0, 0.0, 0.0], [-5.0, -6.0, -7.0, -5.0]])
    assert draw_of(Sampling.of(), logits, keys(10, 3)).tolist() == [1, 0, 0]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.5)])
def test_nothing_is_drawn_from_nan(temperature, top_p):
    """No draft is judged by NaN. Rows beside it are drawn as ever."""
    good = np.asarray([0.0, 2.0, -9.0, 1.0, 9.0, 3.0], np.float32)
    logits = np.stack([np.where(np.arange(VOCABULARY) == 2, np.nan, good), np.full(VOCABULARY, np.nan), good])
    sampling, some_keys = Sampling.of(temperature, top_p), keys(12, 3)
    drawn = np.asarray(draw_of(sampling, jnp.asarray(logits), some_keys))
    assert drawn[:2].tolist() == [-1, -1]
    assert drawn[2] == draw_of(sampling, jnp.asarray(np.stack([good] * 3)), some_keys)[2] >= 0
    found = chances_of(sampling, jnp.asarray(logits))
    np.testing.assert_array_equal(jax.jit(Chances.draw)(found, some_keys), drawn)

    wanted = chances_of(sampling, jnp.asarray(logits)[:, None].repeat(2, 1))
    guessed = chances_of(sampling, jnp.asarray(good)[None, None].repeat(3, 0))
    accepted, following = judged(wanted, guessed, jnp.full((3, 1), 4, jnp.int32), jnp.ones(3, jnp.int32), some_keys)
    assert accepted.tolist() == [0, 0, 1]
    assert following[:2].tolist() == [-1, -1]
    assert following[2] >= 0
    unsure = chances_of(sampling, jnp.asarray(logits)[:, None])
    wanted = chances_of(sampling, jnp.asarray(good)[None, None].repeat(3, 0).repeat(2, 1))
    _, following = judged(wanted, unsure, jnp.full((3, 1), 4, jnp.int32), jnp.ones(3, jnp.int32), some_keys)
    assert (np.asarray(following) >= 0).all()


@pytest.mark.parametrize("top_p", [0.0, 1e-46])
def test_a_top_p_of_no_size_keeps_the_likeliest(top_p):
    """Traced, it is not checked; and f32 has no number as small as that."""
    sampling = dataclasses.replace(Sampling.of(1.0), top_p=jnp.float32(top_p))
    logits = jnp.asarray([[0.5, -1.0, 2.0, 0.0, 3.0, 1.0]] * 9, jnp.float32)
    assert draw_of(sampling, logits, keys(13, 9)).tolist() == [4] * 9


def test_temperature_divides_logits():
    logits = jnp.asarray([0.5, -1.0, 2.0, 0.0, 3.0, 1.0], jnp.float32)
    found = probabilities_of(Sampling.of(0.5), logits)
    np.testing.assert_allclose(found, jax.nn.softmax(2 * logits), rtol=1e-5)  # f32
    assert probabilities_of(Sampling.of(0.0), logits).tolist() == [0, 0, 0, 0, 1, 0]


WAYS = [(0.0, 1.0, 3), (1.0, 1.0, 3), (0.7, 0.8, 5), (2.0, 0.3, 7), (0.0, 0.5, 3)]  # temperature, top-p, seed


def test_rows_may_draw_each_in_its_own_way():
    rng = np.random.default_rng(14)
    logits = jnp.asarray(rng.standard_normal((len(WAYS), 3, VOCABULARY)), jnp.float32)
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(Sampling.of(*way) for way in WAYS))
    some_keys = keys(15, len(WAYS))
    found, drawn = chances_of(rows, logits), draw_of(rows, logits[:, 0], some_keys)
    for i, way in enumerate(WAYS):
        one, alone = slice(i, i + 1), Sampling.of(*way)
        for row, expected in zip(jax.tree.leaves(found), jax.tree.leaves(chances_of(alone, logits[one])), strict=True):
            np.testing.assert_array_equal(row[one], expected)
        assert drawn[one].tolist() == draw_of(alone, logits[one, 0], some_keys[one]).tolist()


@pytest.mark.parametrize(("temperature", "top_p", "seed"), WAYS)
def test_log_probabilities_are_those_of_the_model_and_of_the_draw(temperature, top_p, seed):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(np.round(rng.standard_normal((5, 3, VOCABULARY)) * 4) / 4, jnp.bfloat16)  # with ties
    sampling, tokens = Sampling.of(temperature, top_p), jnp.asarray(rng.integers(0, VOCABULARY, (5, 3)), jnp.int32)
    found = jax.jit(Chances.log_probs)(chances_of(sampling, logits), tokens)
    for of_tokens, of_all in (
        (found.model, jax.nn.log_softmax(logits.astype(jnp.float32))),
        (found.sampled, jnp.log(probabilities_of(sampling, logits))),  # -inf where nothing is drawn
    ):
        expected = np.take_along_axis(np.asarray(of_all), np.asarray(tokens)[..., None], -1)[..., 0]
        np.testing.assert_allclose(of_tokens, expected, rtol=1e-5, atol=1e-6)  # f32


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_seeds_of_64_bits_differ(implementation):
    """Keys are of the implementation that JAX is set to, whichever it was before."""
    seeds = 0, 7, 7 + (1 << 32), 7 + (1 << 40), (1 << 32) - 1, (1 << 64) - 1
    with jax.default_prng_impl(implementation):
        found = {tuple(jax.random.key_data(Sampling.of(seed=seed).key).tolist()) for seed in seeds}
        assert len(found) == len(seeds)
        one, other = Sampling.of(seed=7).key, jax.random.key(7)
    assert one.dtype == other.dtype
    assert jax.random.key_data(one).tolist() == jax.random.key_data(other).tolist()


def test_logits_and_keys_of_another_kind_are_named():
    sampling, logits = Sampling.of(1.0), jnp.zeros((4, VOCABULARY))
    with pytest.raises(AssertionError, match=r"keys: expected \[4\] of jax.random.key, got key<fry>\[\]"):
        sampling.draw(logits, jax.random.key(0))
    with pytest.raises(AssertionError, match=r"keys: expected \[4\] of jax.random.key, got uint32\[4, 2\]"):
        sampling.draw(logits, jnp.zeros((4, 2), jnp.uint32))
    with pytest.raises(AssertionError, match=r"logits: expected float32 or bfloat16 \[..., V\], got int32\[4, 6\]"):
        sampling.probabilities(logits.astype(jnp.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0 and finite, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite, got inf"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 1 << 64}, r"seed must be in \[0, 2\*\*64\), got 18446744073709551616"),
        ({"seed": 1.5}, "seed must be an integer of at least 0, got 1.5"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling.of(**options)
