"""A layer whose weights have low-rank deltas is that of the merged weights, for kernels too, and in pieces."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.layer.reference import reference_layer
from dsv4jax.model import merge_deltas
from dsv4jax.weights.deltas import Delta, WeightWithDelta
from dsv4jax.weights.stored import StoredWeight
from tests.support.cases import first_of
from tests.support.driver import CFG, CSA_FIRST, DEFAULT, assert_same, ids, random_params, sequence, small_plan

# f32 sums in another order, on outputs of rms 0.4.
SAME = 2e-5
LINEAR = ("q_a_kv", "q_b", "o_a", "o_b", "compress", "index_q_b")


def with_random_deltas(params: d4.AttentionParams, rank: int = 3, names: tuple[str, ...] = LINEAR) -> Any:
    """Deltas of about a third of the weights' size; on what stands side by side two, one of them in the middle."""
    rng = np.random.default_rng(5)

    def delta(weight: Any, first: int, rows: int) -> Delta:
        down, up = (rng.standard_normal(shape, np.float32) for shape in ((rank, weight.shape[1]), (rows, rank)))
        return Delta(down=jnp.asarray(0.3 * down * weight.shape[1] ** -0.5), up=jnp.asarray(up), first=first, alpha=1.5)

    fields = {}
    for name in names:
        if (weight := getattr(params, name)) is not None:
            out = weight.shape[0]
            parts = [(0, out)] if name not in ("q_a_kv", "compress") else [(0, 24), (out - 40, 32)]
            fields[name] = WeightWithDelta(base=weight, deltas=tuple(delta(weight, *part) for part in parts))
    return dataclasses.replace(params, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("layer", first_of(CSA_FIRST))
def test_a_layer_is_that_of_the_merged_weights(layer):
    """Over whole sequences, over a cache, and the reference."""
    params = with_random_deltas(random_params()[layer])
    merged, x = merge_deltas(params), jnp.asarray(sequence(3, 77, CFG.hidden_size))
    wanted = reference_layer(merged, x, CFG, layer).out
    np.testing.assert_allclose(reference_layer(params, x, CFG, layer).out, wanted, rtol=0, atol=SAME)
    np.testing.assert_allclose(d4.attention(params, x[None], CFG, layer)[0], wanted, rtol=0, atol=SAME)
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
    cache, _ = d4.prepare_forward(cache, slots, ids(77))
    found, _ = d4.attention_layer(params, x[None], cache, layer, slots, ids(77), backend="xla")
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=SAME)


def test_deltas_are_cut_and_joined_with_their_weights():
    params, merge = with_random_deltas(random_params()[1]), jax.jit(merge_deltas)
    assert_same(merge(d4.AttentionParams.join(params.split())), merge(params))
    parts, merged = params.split(), merge(params).split()
    assert {name for name, part in parts.items() if isinstance(part, WeightWithDelta)} == {
        *("q_a", "kv", "q_b", "o_a", "o_b", "indexer.q_b"),
        *("compressor.kv", "indexer.compressor.gate", "indexer.head_weights"),
    }
    # Cutting comes before or after adding; each number is rounded once in both.
    assert_same(merge(parts), merged)


@pytest.mark.sweep(guard="test_a_layer_is_that_of_the_merged_weights")
def test_pieces_take_deltas():
    params, x = with_random_deltas(random_params()[1]), jnp.asarray(sequence(3, 8, CFG.hidden_size))[None]
    results = []
    for weights in (params, merge_deltas(params)):
        cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
        cache, _ = d4.prepare_forward(cache, slots, ids(8))
        handle = d4.acquire(cache, 1, slots, ids(8)).flush_compression(weights.compressor, x, weights.indexer)
        results.append(handle.gather_all_compressed())
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=SAME)


# 64 heads of 512 dims, as kernels take them.
KERNELS = d4.DSV4Config(
    hidden_size=128, q_lora_rank=128, o_lora_rank=128, compress_ratios=(4,), indexer_top_k=16, indexer_heads=64
)


def layer_of_kernels(params: d4.AttentionParams, backend: str, tokens: int = 1) -> jax.Array:
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(KERNELS, max_requests=1, max_context=256, **DEFAULT)), 1)
    cache, _ = d4.prepare_forward(cache, slots, ids(tokens))
    x = jnp.asarray(sequence(0, tokens, KERNELS.hidden_size), jnp.bfloat16)[None]
    return d4.attention_layer(params, x, cache, 0, slots, ids(tokens), backend=backend)[0]


def stored_layer() -> d4.AttentionParams:
    return d4.init_attention_params(jax.random.key(0), KERNELS, 0, jnp.bfloat16, weights="stored")


@pytest.mark.parametrize("tokens", first_of([1, 70], count=0))
def test_kernels_still_multiply_by_the_weights(tokens, monkeypatch):
    """Each product by itself, plain rows in and out, so that what deltas add can stand beside it."""
    made, run = [], pk.run

    def noted(plan: pk.Plan, *args: Any, **options: Any) -> Any:
        made.append((plan.problem.weights[0].shape, plan.problem.epilogues))
        return run(plan, *args, **options)

    monkeypatch.setattr(pk, "run", noted)
    params = with_random_deltas(stored_layer())
    jax.eval_shape(lambda params: layer_of_kernels(params, "pallas_simulated", tokens), params)
    shapes = {shape for shape, _ in made}
    stored = {field: getattr(stored_layer(), field).shape for field in ("q_a_kv", "q_b", "o_a", "o_b", "index_q_b")}
    assert all(isinstance(getattr(stored_layer(), field), StoredWeight) for field in stored)
    assert {field for field, shape in stored.items() if shape in shapes} >= {"q_b", "index_q_b"}
    assert all(epilogues == (pk.Store(dtype=jnp.float32),) for _, epilogues in made), made


@pytest.mark.sweep(guard="test_kernels_still_multiply_by_the_weights")
@pytest.mark.simulated
def test_kernels_with_deltas_give_what_xla_gives():
    params = with_random_deltas(stored_layer())
    found, wanted, without = (
        np.asarray(layer_of_kernels(weights, backend), np.float32)
        for weights, backend in ((params, "pallas_simulated"), (params, "xla"), (stored_layer(), "xla"))
    )
    scale = np.abs(wanted).max()
    # bf16 outputs, f16 queries and rows of FP8: values that a sum in another order moves over a boundary.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-2 * scale)
    assert np.abs(wanted - without).max() > 0.2 * scale, "the deltas add next to nothing"
