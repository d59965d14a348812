"""Layers whose weights are stored as FP8 do what layers with the same weights widened do."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from dsv4jax.weights.params import param_shapes
from dsv4jax.weights.stored import Stored
from tests.support import recorded
from tests.support.cases import first_of
from tests.support.driver import (
    CFG,
    DEFAULT,
    F32,
    LAYERS,
    assert_same,
    even_split,
    feed,
    ids,
    random_params,
    sequence,
    small_plan,
)
from tests.support.stored import stored_params, widened_params

KINDS = ("swa", "csa", "hca")
# f32 sums of the same numbers in another order, on outputs of rms 0.3 to 1, and a few products and a softmax deep.
SAME = 5e-6


@functools.cache
def weights(block: tuple[int, int] = (128, 128), activations: str = "bf16") -> tuple[Any, Any]:
    """(every layer's weights as FP8, the same widened)."""
    stored = tuple(stored_params(params, block, activations) for params in random_params())
    return stored, tuple(widened_params(params) for params in stored)


@functools.cache
def generate(number: int, block: tuple[int, int] = (128, 128), activations: str = "bf16") -> list[Any]:
    """Feed two requests to stored (0) or wide (1) weights: a prompt in chunks of 8, then tokens one by one."""
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 2)
    xs = [sequence(seed, 37, CFG.hidden_size) for seed in (1, 2)]
    splits = [even_split(33, 8) + [1] * 4, even_split(30, 8) + [1] * 7]
    return feed(weights(block, activations)[number], xs, cache, slots, splits, layers=LAYERS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("block", [(32, 32)], ids=["32 x 32"])  # of which these weights have several
def test_stored_weights_give_what_their_widened_twins_give(block):
    for kind, ours, theirs in zip(KINDS, generate(0, block), generate(1, block), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=SAME, err_msg=kind)


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_a_recorded_layer_stored_as_fp8_is_that_layer_widened(kind):
    """Weights of a real layer's form, in one pass of 150 or 400 tokens, and against the reference without a cache."""
    recording = recorded.load(kind)
    stored = stored_params(recording.params)
    wide = widened_params(stored)
    x = recording.x
    plan = d4.plan_cache(recording.cfg, max_requests=1, max_context=512, kv_format="f32", indexer_format="f32")

    def run(params):
        cache, slots, _ = d4.admit(d4.init_cache(plan), 1)
        outputs, _ = feed((params,), [x], cache, slots, [[len(x) - 1, 1]])
        return outputs[0][0]

    found = run(stored)
    np.testing.assert_allclose(found, run(wide), rtol=0, atol=SAME)
    reference = reference_layer(stored, jnp.asarray(x), recording.cfg, 0)
    np.testing.assert_allclose(found, reference.out, rtol=0, atol=2 * SAME)
    # It is another layer than the recorded one, by the rounding of its weights: 2^-4 at most, several products deep.
    off = np.linalg.norm(found - recording.arrays["out"]) / np.linalg.norm(recording.arrays["out"])
    assert 0.01 < off < 0.2


@pytest.mark.sweep(guard="test_stored_weights_give_what_their_widened_twins_give")
def test_bf16_activations_are_not_rounded_further():
    """x in bf16: the products of bf16 by codes are exact, so both differ by the order of f32 sums and its rounding."""
    stored, wide = weights()
    bf16 = [widened_params(params, jnp.bfloat16) for params in stored]
    xs = [sequence(3, 9, CFG.hidden_size).astype(jnp.bfloat16)]

    def run(params):
        cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 1)
        return [row[0] for row in feed(params, xs, cache, slots, [[8, 1]], layers=LAYERS)[0]]

    for kind, a, b, c in zip(KINDS, run(stored), run(bf16), run(wide), strict=True):
        error, scale = np.abs(np.float32(a) - np.float32(b)), np.abs(np.float32(b)).max()
        # Where a sum lies near a tie, its bf16 rounding (2^-8) goes the other way, and attention spreads the step.
        assert error.max() <= 2**-6 * scale, kind
        assert np.mean(error) <= 2**-10 * scale, kind
        assert np.abs(np.float32(a) - np.float32(c)).max() <= 2**-5 * scale, kind


@pytest.mark.sweep(guard="test_rounding_activations_costs_what_the_page_says")
def test_rounded_activations_cost_what_the_page_says():
    """docs/support.md gives the error of FP8 activations against unrounded ones, by norm."""
    assert [params.o_a.activations for params in weights(activations="fp8")[0]] == ["fp8"] * 3
    for layer, kind in enumerate(KINDS):
        a, b = (np.concatenate(generate(0, activations=form)[layer]) for form in ("fp8", "bf16"))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        # Four products in a row with inputs off by 2.6 % each; in CSA some picks change besides.
        assert 0.02 < error < (0.4 if kind == "csa" else 0.1), (kind, error)


@pytest.mark.sweep(guard="test_it_is_the_cached_layer_for_each_length_of_a_batch")
@pytest.mark.parametrize("activations", ["fp8"])
def test_splits_of_a_sequence_give_the_same(activations):
    """Rule 1: chunks of 8, and token by token. f32 rows, so that nothing but the order of sums differs."""
    params = weights(activations=activations)[0]
    x = [sequence(4, 21, CFG.hidden_size)]

    def run(split):
        cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 1)
        return [row[0] for row in feed(params, x, cache, slots, [split], layers=LAYERS)[0]]

    # With FP8, a value that a sum in another order moves over a rounding boundary moves by 2^-4 of its size: the bound
    # by norm is on the few of these.
    for a, b in zip(run(even_split(21, 8)), run([1] * 21), strict=True):
        if activations == "bf16":
            np.testing.assert_allclose(a, b, rtol=0, atol=SAME)
        else:
            assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


@pytest.mark.sweep(guard="test_needed_rows_are_the_same_bits_and_tiles_of_others_are_left_out")
@pytest.mark.simulated
def test_kernels_take_what_the_products_of_stored_weights_give():
    """Cache update and the reading ops in simulated kernels; sizes are those that kernels serve."""
    cfg = d4.DSV4Config(
        hidden_size=64, q_lora_rank=32, o_lora_rank=8, compress_ratios=(0, 4, 128), indexer_top_k=16
    )  # 64 heads of 512 dims, as kernels take them
    plan = d4.plan_cache(cfg, max_requests=1, max_context=256, **DEFAULT)
    x = jnp.asarray(sequence(0, 1, cfg.hidden_size))[None]
    for layer in range(3):
        stored = d4.init_attention_params(jax.random.key(layer), cfg, layer, weights="stored", block=(32, 32))

        def run(params, backend, layer=layer):
            cache, slots, _ = d4.admit(d4.init_cache(plan), 1)
            cache, _ = d4.prepare_forward(cache, slots, ids(1))
            return d4.attention_layer(params, x, cache, layer, slots, ids(1), backend=backend)[0]

        found = run(stored, "pallas_simulated")
        # f16 queries and rows of FP8: the same in both, but for values that another sum moves over a boundary.
        scale = float(jnp.max(jnp.abs(found)))
        np.testing.assert_allclose(found, run(widened_params(stored), "pallas_simulated"), rtol=0, atol=2e-3 * scale)
        np.testing.assert_allclose(found, run(stored, "xla"), rtol=0, atol=1e-2 * scale)


@pytest.mark.sweep(guard="test_stored_weights_give_what_their_widened_twins_give")
def test_drafts_and_handles_read_stored_weights():
    stored, wide = weights()
    x = jnp.asarray(sequence(5, 2 * 5, CFG.hidden_size)).reshape(2, 5, -1)
    results = []
    for params in (stored, wide):
        cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 2)
        cache, _ = d4.prepare_forward(cache, slots, ids(5, 5))
        ys, staged = [], []
        for layer in LAYERS:
            y, cache, rows = d4.stage(params[layer], x, cache, layer, slots, ids(5, 5))
            ys, staged = [*ys, y], [*staged, rows]
        cache, ok = d4.commit(cache, staged, ids(4, 2))
        assert bool(ok)
        cache, _ = d4.prepare_forward(cache, slots, ids(4, 4))
        handle = d4.acquire(cache, 1, slots, ids(4, 4))
        handle = handle.flush_compression(params[1].compressor, x[:, :4], params[1].indexer)
        results.append((ys, handle.gather_all_compressed()))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=SAME)


@pytest.mark.sweep(guard="test_stored_weights_give_what_their_widened_twins_give")
@pytest.mark.parametrize("layer", [1])
def test_shards_of_stored_weights_sum_up_to_the_whole(layer):
    """Two shards of heads: codes and scales are split alike, and the blocks of each shard are its own."""
    cfg = dataclasses.replace(CFG, o_lora_rank=32)  # 4 heads in 2 groups
    block = (16, 16)
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    plan = d4.plan_cache(cfg, max_requests=2, max_context=80, **F32)
    x = jnp.asarray(sequence(6, 2 * 6, cfg.hidden_size)).reshape(2, 6, -1)

    def run(params, x, cache, slots, axis=None):
        cache, _ = d4.prepare_forward(cache, slots, ids(6, 6))
        return d4.attention_layer(params, x, cache, layer, slots, ids(6, 6), backend="xla", model_axis=axis)[0]

    params = d4.init_attention_params(jax.random.key(layer), cfg, layer, weights="stored", block=block)
    specs: Any = d4.sharding.params_specs(cfg, layer, mesh, weights="stored", block=block)
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    split = P("model")
    assert (specs.q_b.codes, specs.q_b.scales, specs.o_a.scales, specs.sinks) == (split,) * 4
    assert specs.o_b.codes == specs.o_b.scales == P(None, "model")
    cache, slots, _ = d4.admit(d4.init_cache(plan), 2)
    alone = jax.jit(run)(params, x, cache, slots)
    over_heads = functools.partial(run, axis="model")
    mapped = jax.shard_map(over_heads, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(mapped)(params, x, cache, slots), alone, rtol=0, atol=SAME)


@pytest.mark.sweep(guard="test_the_derivative_by_x_is_that_of_the_exact_product")
@pytest.mark.parametrize("layer", [1])
def test_derivatives_by_x_are_those_of_widened_weights_and_by_stored_ones_are_refused(layer):
    stored, wide = weights()
    x = jnp.asarray(sequence(8, 6, CFG.hidden_size))[None]

    def loss(params, x):
        cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 1)
        cache, _ = d4.prepare_forward(cache, slots, ids(6))
        y, _ = d4.attention_layer(params, x, cache, layer, slots, ids(6), backend="xla")
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    found, wanted = (jax.jit(jax.grad(loss, 1))(params[layer], x) for params in (stored, wide))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4 * SAME * float(jnp.max(jnp.abs(wanted))))
    with pytest.raises(ValueError, match=r"params\.\w+ is stored as FP8 and has no derivative: differentiate by x"):
        jax.grad(loss)(stored[layer], x)


@pytest.mark.slow
def test_a_step_of_stored_weights_can_be_exported():
    params = param_shapes(CFG, d4.AttentionType.CSA, Stored())
    cache = d4.cache.abstract_cache(small_plan(**F32))

    def step(params, x, cache, slots, num_new):
        return d4.attention_layer(params, x, cache, 1, slots, num_new, backend="xla")

    (batch,) = jax.export.symbolic_shape("b")
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    x = jax.ShapeDtypeStruct((batch, 1, CFG.hidden_size), jnp.float32)
    exported = jax.export.deserialize(jax.export.export(jax.jit(step))(params, x, cache, row, row).serialize())
    stored = weights()[0][1]
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(**F32)), 3)
    cache, _ = d4.prepare_forward(cache, slots, ids(1, 1, 1))
    x = jnp.asarray(sequence(9, 3, CFG.hidden_size))[:, None]
    given = stored, x, cache, slots, ids(1, 1, 1)
    assert_same(exported.call(*given)[0], jax.jit(step)(*given)[0])
