"""The layer is correct for ratios, windows and schedules other than those of the published models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from tests.support.cases import first_of
from tests.support.driver import feed, ids, random_params, sequence

TOLERANCE = 2e-5  # fp32 sums in another order
LENGTH, WIDTH = 41, 16


@pytest.mark.parametrize(
    ("csa", "hca", "window", "tail"),
    first_of(
        [(1, 7, 1, "online"), (2, 6, 16, "ring"), (3, 5, 4, "online"), (6, 4, 3, "ring"), (4, 8, 40, "ring")], count=0
    ),
)
def test_odd_ratios_and_windows_equal_the_full_recompute(csa, hca, window, tail):
    cfg = d4.DSV4Config.tiny(
        compress_ratios=(csa, hca), csa_compression_ratio=csa, hca_compression_ratio=hca, sliding_window=window,
        indexer_top_k=5,
    )  # fmt: skip
    plan = d4.plan_cache(cfg, max_requests=3, max_context=LENGTH, kv_format="f32", indexer_format="f32", hca_tail=tail)
    params = random_params(cfg)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 3)
    full = [sequence(seed, LENGTH, cfg.hidden_size) for seed in (1, 2)]
    xs = [full[0], full[1][:23]]
    # One long chunk, one token, odd ones; the second request is out of phase with the first.
    splits = [[WIDTH, 1, 7, 15, 1, 1], [3, 5, 1, 0, 13, 1]]
    outputs, cache = feed(params, xs, cache, slots[jnp.asarray([2, 0])], splits, layers=(0, 1), width=WIDTH)
    for layer in (0, 1):
        for got, x in zip(outputs[layer], full, strict=True):  # of one length, so that it is compiled once
            want = reference_layer(params[layer], jnp.asarray(x), cfg, layer).out[: len(got)]
            np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=TOLERANCE)


ONE_KIND = [pytest.param((ratio,), id=f"{kind} only") for kind, ratio in (("HCA", 128), ("CSA", 4), ("window", 0))]


@pytest.mark.slow
@pytest.mark.parametrize("ratios", first_of(ONE_KIND))
def test_a_model_may_lack_kinds(ratios):
    cfg = d4.DSV4Config.tiny(compress_ratios=ratios)
    plan = d4.plan_cache(cfg, max_requests=2, max_context=50, kv_format="f32", indexer_format="f32")
    x = sequence(3, 50, cfg.hidden_size)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 1)
    outputs, cache = feed(random_params(cfg), [x], cache, slots, [[50]])
    want = reference_layer(random_params(cfg)[0], jnp.asarray(x), cfg, 0).out
    np.testing.assert_allclose(outputs[0][0], np.asarray(want), rtol=0, atol=TOLERANCE)
    _, ok = d4.prepare_forward(cache, slots, ids(1))
    assert not ok, "the context is full, with or without blocks"


def test_admission_empties_a_slot_in_every_layer():
    cfg = d4.DSV4Config.tiny(compress_ratios=(0, 4, 128, 4, 128, 0))
    plan = d4.plan_cache(cfg, max_requests=3, max_context=256)
    fresh = d4.init_cache(plan)
    for kind in d4.AttentionType:
        stack = fresh.stack(kind)
        used = dataclasses.replace(stack, state=jax.tree.map(lambda leaf: jnp.full_like(leaf, 7), stack.state))
        cache, slots, ok = d4.admit(fresh.with_stack(kind, used), 2)
        assert ok
        slots = np.asarray(slots)
        for got, empty in zip(*map(jax.tree.leaves, (cache.stack(kind).state, stack.state)), strict=True):
            got, empty = np.asarray(got), np.asarray(empty)
            assert got[:, slots].tobytes() == empty[:, slots].tobytes()
            assert (got[:, 2] == 7).all(), "a slot that was not taken is not touched"
