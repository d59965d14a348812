"""Attention without a cache gives what the cached layer and the reference give, in value and in derivative."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer import sequence
from dsv4jax.layer.reference import reference_layer
from dsv4jax.weights.stored import is_stored
from tests.support.cases import first_of
from tests.support.driver import CFG, DEFAULT, F32, LAYERS, TRAINED, feed, ids, random_params, small_plan
from tests.support.driver import sequence as tokens_of
from tests.support.second_derivatives import (
    assert_symmetric,
    check_second_derivative,
    relative_error,
    round_plainly,
    with_second,
)

LENGTH = 77  # 19 entries of CSA, of which the indexer picks 12; 4 of HCA; windows hold 16, and tiles of 16 leave 3 over
# f32 sums in another order; values of rms 0.4 agree to a few 1e-7.
TOLERANCE = 2e-5
# The same of derivatives, relative to their norm, as in test_derivatives.
SAME = 5e-5


def tokens(length: int = LENGTH) -> jax.Array:
    return jnp.asarray(tokens_of(3, length, CFG.hidden_size))


@functools.cache
def reference(layer: int) -> np.ndarray:
    """What follows a token has no part in its output."""
    return np.asarray(reference_layer(random_params()[layer], tokens(), CFG, layer).out)


def formats_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("kv_format", "indexer_format")}


@pytest.mark.parametrize("length", first_of([1, 4, 16, LENGTH], count=2))
@pytest.mark.parametrize("layer", LAYERS)
def test_it_is_the_reference(layer, length):
    found = d4.attention(random_params()[layer], tokens(length)[None], CFG, layer)
    np.testing.assert_allclose(found[0], reference(layer)[:length], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_it_is_the_cached_layer_for_each_length_of_a_batch():
    """Padding is NaN. A row has no tokens, another fewer than an entry, another ends within a tile."""
    lengths = [LENGTH, 0, 3, 40]
    xs = [tokens_of(seed, length, CFG.hidden_size) for seed, length in enumerate(lengths)]
    x = np.full((len(xs), LENGTH, CFG.hidden_size), np.nan, np.float32)
    for row, given in zip(x, xs, strict=True):
        row[: len(given)] = given
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(num_blocks=40)), len(xs))
    want, _ = feed(random_params(), xs, cache, slots, [[length] for length in lengths], layers=LAYERS, width=LENGTH)
    for layer in LAYERS:
        y = d4.attention(random_params()[layer], jnp.asarray(x), CFG, layer, ids(*lengths))
        for row, of_row in zip(y, want[layer], strict=True):
            np.testing.assert_allclose(row[: len(of_row)], of_row, rtol=0, atol=TOLERANCE)
            assert not np.asarray(row)[len(of_row) :].any()


@pytest.mark.parametrize("options", first_of([DEFAULT, TRAINED]), ids=["fp8_row, nvfp4", "fp8_tile64, mxfp4"])
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_and_keys_are_rounded_as_the_reference_rounds_them(layer, options):
    params, x, formats = random_params()[layer], tokens(), formats_of(options)
    want = reference_layer(params, x, CFG, layer, **formats).out
    found, exact = (d4.attention(params, x[None], CFG, layer, **how)[0] for how in (formats, {}))
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE)
    assert np.abs(np.asarray(found - exact)).max() > 100 * TOLERANCE, "nothing was rounded"


def weighted(y: jax.Array) -> jax.Array:
    """A scalar that looks at every output with a weight of its own."""
    return jnp.sum(y * jnp.asarray(tokens_of(4, y.size // CFG.hidden_size, CFG.hidden_size)).reshape(y.shape))


@pytest.mark.parametrize(
    ("layer", "options"),
    first_of([pytest.param(1, TRAINED, id="csa, rounded"), (0, F32), (2, F32)]),
)
def test_gradients_are_those_of_the_reference(layer, options):
    """Straight through the rounding; 0 for the indexer. The reference picks on the host, so CSA's is not jitted."""
    formats = formats_of(options)
    found = jax.jit(jax.grad(lambda p, x: weighted(d4.attention(p, x[None], CFG, layer, **formats)), (0, 1)))
    want = jax.grad(lambda p, x: weighted(reference_layer(p, x, CFG, layer, **formats).out), (0, 1))
    want = want if layer == 1 else jax.jit(want)
    (of_params, of_x), (params_wanted, x_wanted) = (f(random_params()[layer], tokens()) for f in (found, want))
    pairs = {name: (part, params_wanted.split()[name]) for name, part in of_params.split().items()}
    for name, (a, b) in (pairs | {"x": (of_x, x_wanted)}).items():
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if "indexer" in name:
            assert not a.any(), name
        else:
            assert np.linalg.norm(a - b) < SAME * np.linalg.norm(b), name


@pytest.mark.parametrize("layer", first_of(LAYERS, count=1, slow=2))
def test_second_derivatives_are_differences_of_the_gradient_and_symmetric(layer):
    """24 tokens have entries of both kinds, all of which are read: nothing jumps from one pick to another."""
    params = random_params()[layer]
    check_second_derivative(lambda x: weighted(jnp.sin(d4.attention(params, x[None], CFG, layer))), tokens(24))


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "options"), first_of([(1, TRAINED), (2, DEFAULT), (0, TRAINED)]))
def test_second_derivatives_go_straight_through_rounding(layer, options, monkeypatch):
    """As the reference's do, which rounds without ``straight_through``; it picks on the host."""
    round_plainly(monkeypatch)
    params, formats, along = random_params()[layer], formats_of(options), jnp.asarray(tokens_of(5, 60, CFG.hidden_size))
    found = with_second(lambda x: weighted(jnp.sin(d4.attention(params, x[None], CFG, layer, **formats))))
    _, second = found(tokens(60), along)
    gradient = jax.grad(lambda x: weighted(jnp.sin(reference_layer(params, x, CFG, layer, **formats).out)))
    _, wanted = jax.jvp(gradient, (tokens(60),), (along,))
    assert relative_error(second, wanted) < SAME
    other = jnp.asarray(tokens_of(6, 60, CFG.hidden_size))
    assert_symmetric(along, second, other, found(tokens(60), other)[1])


def test_padding_reaches_no_derivative():
    x = jnp.full((2, 24, CFG.hidden_size), jnp.nan).at[0, :20].set(tokens(20)).at[1, :7].set(tokens(7))
    lengths = ids(20, 7)

    def loss(params, x):
        return weighted(d4.attention(params, x, CFG, 1, lengths))

    of_params, of_x = jax.jit(jax.grad(loss, (0, 1)))(random_params()[1], x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_params))
    for row, length in zip(np.asarray(of_x), (20, 7), strict=True):
        assert row[:length].any(axis=1).all()
        assert not row[length:].any()


@pytest.mark.parametrize("layer", LAYERS)
def test_tiles_of_one_token_give_the_same(layer, monkeypatch):
    """A length of its own, which no other test has compiled with larger tiles."""
    monkeypatch.setattr(sequence, "TILE_BYTES", 1)
    found = d4.attention(random_params()[layer], tokens(LENGTH - 2)[None], CFG, layer)
    np.testing.assert_allclose(found[0], reference(layer)[:-2], rtol=0, atol=TOLERANCE)


def test_it_can_be_vmapped_over_weights():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(random_params(CFG, seed)[1] for seed in (0, 1)))
    x = tokens(20)[None]
    found = jax.vmap(lambda params: d4.attention(params, x, CFG, 1))(stacked)
    for seed in (0, 1):
        want = d4.attention(random_params(CFG, seed)[1], x, CFG, 1)
        np.testing.assert_allclose(found[seed], want, rtol=0, atol=TOLERANCE)


def test_bf16_gives_bf16_that_is_the_cached_layers():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params()[2])
    x = tokens().astype(jnp.bfloat16)
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
    cache, _ = d4.prepare_forward(cache, slots, ids(LENGTH))
    want, _ = d4.attention_layer(params, x[None], cache, 2, slots, ids(LENGTH), backend="xla")
    found = d4.attention(params, x[None], CFG, 2)
    assert found.dtype == jnp.bfloat16
    # Both round at the same places, to 2^-9 of a value; another order of sums moves some by one such step.
    error = np.asarray(found - want, np.float32)
    assert np.sqrt(np.mean(error**2)) < 2**-9 * np.sqrt(np.mean(np.asarray(want, np.float32) ** 2))


@pytest.mark.sweep(guard="test_gradients_are_those_of_the_reference")
def test_stored_weights_are_multiplied_and_let_derivatives_by_others_through():
    """FP8 codes times scales are exact in f32, so that the wide form of the same weights is the reference."""
    params = d4.init_attention_params(jax.random.key(5), CFG, 1, weights="stored", block=(16, 16))
    wide = jax.tree.map(lambda w: w.widened(jnp.float32) if is_stored(w) else w, params, is_leaf=is_stored)

    def loss(x, norm, params):
        return weighted(d4.attention(dataclasses.replace(params, q_norm=norm), x[None], CFG, 1))

    found, want = (jax.jit(jax.grad(loss, (0, 1)))(tokens(), params.q_norm, each) for each in (params, wide))
    for one, other in zip(found, want, strict=True):
        assert np.linalg.norm(one - other) < SAME * np.linalg.norm(other)
    with pytest.raises(ValueError, match=r"stored as FP8 has no derivative.*weights='wide'"):
        jax.grad(loss, 2, allow_int=True)(tokens(), params.q_norm, params)


@pytest.mark.slow
def test_reverse_mode_keeps_one_tile_in_memory():
    length = 2048
    cfg = d4.DSV4Config.tiny(compress_ratios=(4,))
    params = d4.init_attention_params(jax.random.key(0), cfg, 0)
    x = jax.ShapeDtypeStruct((1, length, cfg.hidden_size), jnp.float32)
    grad = jax.jit(jax.grad(lambda params, x: jnp.sum(d4.attention(params, x, cfg, 0))))
    memory: Any = grad.lower(params, x).compile().memory_analysis()
    scores = 4 * length * (length // 4) * cfg.indexer_heads  # of all heads of the indexer, 64 MiB; 25 MiB were held
    logits = 4 * length * (length // 4 + cfg.sliding_window) * cfg.num_heads
    assert memory.temp_size_in_bytes < (scores + logits) / 2


def test_wrong_arguments_are_named():
    params, x = random_params(), tokens(8)[None]
    plan: Any = small_plan()
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: d4.attention(params[0], x, CFG, 1), ValueError, "params: expected the weights of a CSA layer"),
        (lambda: d4.attention(params[0], x, plan, 1), ValueError, "cfg: expected .* give it .cfg"),
        (lambda: d4.attention(params[0], x, CFG, 3), ValueError, r"layer must be in \[0, 3\), got 3"),
        (lambda: d4.attention(params[0], x, CFG, 0, kv_format="fp8"), ValueError, "kv_format must be one of"),
        (lambda: d4.attention(params[0], x, CFG, 0, indexer_format="x"), ValueError, "indexer_format must be one of"),
        (lambda: d4.attention(params[0], x[0], CFG, 0), AssertionError, "x: expected float32 or bfloat16"),
        (lambda: d4.attention(params[0], x, CFG, 0, ids(1, 2)), AssertionError, r"lengths: expected int32 \[B=1\]"),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=["no rows", "no tokens"])
def test_nothing_gives_nothing(shape):
    x = jnp.zeros((*shape, CFG.hidden_size))
    assert functools.partial(d4.attention, random_params()[1], cfg=CFG, layer=1)(x).shape == x.shape
