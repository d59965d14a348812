"""A layer that adds its output to a residual, compared with the sum of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.layer.backend import OpBackends
from tests.support.cases import first_of
from tests.support.driver import DEFAULT, ids, sequence
from tests.support.machines import BACKENDS

CFG = d4.DSV4Config(
    hidden_size=128, q_lora_rank=128, o_lora_rank=128, o_groups=1, indexer_heads=8, num_heads=2, compress_ratios=(4,)
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("weights", "num_new"), first_of([("stored", (1, 0, 1)), ("stored", (30, 1, 0)), ("wide", (1, 0, 1))], count=0)
)
def test_a_residual_is_added(weights, num_new, backend, monkeypatch):
    """To rows of few and of many, with stored weights by the kernel of the last product."""
    check(weights, num_new, backend, monkeypatch)


@pytest.mark.sweep(guard="test_a_residual_is_added")
def test_a_residual_is_added_in_xla(monkeypatch):
    check("stored", (3, 1, 0), "xla", monkeypatch)


def check(weights: str, num_new: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, on padding too."""
    slots, tokens = ids(2, 0, 1), max(num_new)
    params = d4.init_attention_params(jax.random.key(0), CFG, 0, jnp.bfloat16, weights=weights)
    x, residual = (
        jnp.asarray(sequence(seed, 3 * tokens, CFG.hidden_size), jnp.bfloat16).reshape(3, tokens, -1) for seed in (0, 1)
    )
    ops = OpBackends(projections=backend, cache_update="xla", decode_attention="xla", indexer_scores="xla", top_k="xla")
    empty = d4.init_cache(d4.plan_cache(CFG, max_requests=3, max_context=256, **DEFAULT))
    cache, _, _ = d4.admit(empty, 3)
    added, solve = [], pk.run

    def noted(plan: pk.Plan, *args: Any, **options: Any) -> Any:
        added.append(isinstance(plan.problem.epilogues[0], pk.AddTo))
        return solve(plan, *args, **options)

    monkeypatch.setattr(pk, "run", noted)

    def run(x: jax.Array, residual: jax.Array | None) -> Any:
        count = ids(*num_new)
        granted, _ = d4.prepare_forward(cache, slots, count)
        return d4.attention_layer(params, x, granted, 0, slots, count, backend=ops, residual=residual)

    jax.clear_caches()  # what was traced before is not noted
    got, of_got = jax.jit(run)(x, residual)
    assert any(added) == (backend != "xla" and weights == "stored")

    # Added under the same jit: between an XLA product and a sum XLA may leave out that y is rounded to bf16.
    def in_two(x: jax.Array, residual: jax.Array) -> Any:
        y, after = run(x, None)
        return residual + y, after

    want, of_y = jax.jit(in_two)(x, residual)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))
    for one, other in zip(jax.tree.leaves(of_got), jax.tree.leaves(of_y), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.sweep(guard="test_a_residual_is_added")
def test_the_output_of_a_draft_is_added():
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(CFG, max_requests=3, max_context=256, **DEFAULT)), 3)
    params, count = d4.init_attention_params(jax.random.key(0), CFG, 0, jnp.bfloat16), ids(2, 1, 0)
    cache, _ = d4.prepare_forward(cache, slots, count)
    x, residual = (jnp.asarray(sequence(seed, 6, CFG.hidden_size), jnp.bfloat16).reshape(3, 2, -1) for seed in (0, 1))

    def run(x: jax.Array, residual: jax.Array, *, is_given: bool) -> jax.Array:
        y, _, _ = d4.stage(params, x, cache, 0, slots, count, residual=residual if is_given else None)
        return y if is_given else residual + y

    got, want = (jax.jit(run, static_argnames="is_given")(x, residual, is_given=is_given) for is_given in (True, False))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


def test_nothing_is_added_to_the_residual_of_no_tokens():
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(CFG, max_requests=3, max_context=256, **DEFAULT)), 3)
    params = d4.init_attention_params(jax.random.key(0), CFG, 0, jnp.bfloat16)
    none = jnp.zeros((3, 0, CFG.hidden_size), jnp.bfloat16)
    run = jax.jit(lambda cache: d4.attention_layer(params, none, cache, 0, slots, ids(0, 0, 0), residual=none))
    y, _ = run(cache)
    assert y.shape == none.shape


@pytest.mark.parametrize("shape", [(3, 1, 64), (1, 1, 128), (3, 128)], ids=str)
def test_a_residual_of_another_shape_is_refused(shape):
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(CFG, max_requests=3, max_context=256, **DEFAULT)), 3)
    params = d4.init_attention_params(jax.random.key(0), CFG, 0, jnp.bfloat16)
    x = jnp.zeros((3, 1, CFG.hidden_size), jnp.bfloat16)
    with pytest.raises(AssertionError, match="residual"):
        d4.attention_layer(params, x, cache, 0, slots, ids(1, 1, 1), residual=jnp.zeros(shape, jnp.bfloat16))
