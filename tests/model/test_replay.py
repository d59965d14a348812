"""A generator records what its passes have chosen, and one pass over the whole text uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import Generator, Sampling, forward, init_caches
from tests.support.cases import first_of
from tests.support.models import FULL, small_model

TOLERANCE = 5e-5  # f32 sums in another order


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
@pytest.mark.parametrize("drafts", first_of([0, 2], count=0))
def test_the_choices_of_a_rollout_are_those_of_one_pass_over_its_text(drafts):
    """Two prompts and a row for one of them, so that the second waits; the first has been in the cache before."""
    params, rng = small_model(), np.random.default_rng(2)
    prompts = [rng.integers(0, params.cfg.vocab_size, size).tolist() for size in (150, 9)]
    caches = init_caches(params.cfg, 1, 256, drafts=drafts, **FULL)
    generator = Generator(params, caches=caches, drafts=drafts)
    generator.generate(prompts[:1], 3, stop_tokens=[])
    assert generator.result.choices is None
    made = generator.generate(prompts, 40, Sampling.of(1.0, seed=3), stop_tokens=[], choices=True)
    assert made.accepted > 0 or not drafts
    assert made.choices is not None
    for prompt, new, choices in zip(prompts, made.tokens, made.choices, strict=True):
        text = jnp.asarray([prompt + new[:-1]], jnp.int32)
        count = jnp.asarray([text.shape[1]], jnp.int32)
        cache, slots, _ = d4.admit(init_caches(params.cfg, 1, 256, **FULL).model, 1)
        cache, _ = d4.prepare_forward(cache, slots, count)
        own, _, _, seen = forward(params, text, cache, slots, count, "all", capture=("choices",))
        jax.tree.map(np.testing.assert_array_equal, choices, seen["choices"])
        given = jax.tree.map(jnp.asarray, choices)
        replayed, _, _, seen = forward(params, text, cache, slots, count, "all", capture=("choices",), choices=given)
        jax.tree.map(np.testing.assert_array_equal, choices, seen["choices"])
        assert own is not None
        assert replayed is not None
        np.testing.assert_allclose(replayed, own, rtol=0, atol=TOLERANCE)
