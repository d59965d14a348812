"""Rotary embedding against NumPy: frequencies, YaRN's interpolation, pairs, and angles up to a million positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.rope import apply_rope, rope_frequencies
from tests.support import recorded

SWA, CSA, HCA = d4.AttentionType.SWA, d4.AttentionType.CSA, d4.AttentionType.HCA
FLASH = d4.DSV4Config.flash()

# A frequency is four or five f32 operations (exponent, power, reciprocal, blend) of 2^-24 relative each, and the power
# multiplies the exponent's error by up to ln(160000) = 12.
FREQUENCY_RTOL = 1e-6


def plain_frequencies(base: float, rope_dim: int) -> np.ndarray:
    """Return base^(-2i / rope_dim), float64."""
    return np.array([base ** (-2 * i / rope_dim) for i in range(rope_dim // 2)])


def yarn_frequencies(cfg: d4.DSV4Config, low: float, high: float) -> np.ndarray:
    """Return YaRN's frequencies pair by pair, float64: kept below low, divided above high, interpolated between."""
    freqs = plain_frequencies(cfg.compress_rope_theta, cfg.rope_dim)
    for i, f in enumerate(freqs):
        share = 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
        freqs[i] = (1 - share) * f + share * f / cfg.yarn_factor
    return freqs


def test_layers_without_compression_turn_by_plain_frequencies():
    freqs = rope_frequencies(FLASH, SWA)
    assert freqs.dtype == np.float32
    assert freqs[0] == 1
    np.testing.assert_allclose(freqs, plain_frequencies(10000.0, 64), rtol=FREQUENCY_RTOL)


@pytest.mark.parametrize("kind", [CSA, HCA])
@pytest.mark.parametrize(
    ("cfg", "low", "high"),
    [
        (FLASH, 15, 25),
        (d4.DSV4Config.pro(), 15, 25),
        (recorded.load("csa").cfg, 0, 1),
        # An original context of 1 puts both bounds below 0; clamped, they meet, and only pair 0 keeps its frequency.
        (d4.DSV4Config.tiny(yarn_original_max_position=1), 0, 0),
    ],
    ids=["flash", "pro", "recorded", "bounds meet"],
)
def test_compressed_layers_turn_by_yarn_frequencies(kind, cfg, low, high):
    freqs = rope_frequencies(cfg, kind)
    assert freqs.dtype == np.float32
    np.testing.assert_allclose(freqs, yarn_frequencies(cfg, low, high), rtol=FREQUENCY_RTOL)


def test_yarn_bounds_of_the_real_models_by_hand():
    """c(r) = 64 ln(65536 / (2 pi r)) / (2 ln 160000): 15.48 at 32 turns and 24.71 at one, then floor and ceil."""

    def corrected(turns: float) -> float:
        return 64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(160000))

    assert (math.floor(corrected(32)), math.ceil(corrected(1))) == (15, 25)
    # 16th and 24th pair are the first and last between: 1/10 and 9/10 of the way to a sixteenth.
    share = rope_frequencies(FLASH, CSA) / plain_frequencies(160000.0, 64)
    np.testing.assert_allclose(share[[15, 16, 24, 25]], [1, 1 - 0.1 * 15 / 16, 1 - 0.9 * 15 / 16, 1 / 16], rtol=1e-6)


@pytest.fixture(scope="module")
def turned():
    """Return apply_rope under one jit, for the shapes of most tests: x [6, 5, 72], 64 RoPE dims, positions [6, 5]."""
    freqs = rope_frequencies(FLASH, CSA)
    return (
        jax.jit(lambda x, positions: apply_rope(x, positions, freqs)),
        jax.jit(lambda x, positions: apply_rope(x, positions, freqs, inverse=True)),
    )


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((6, 5, 72), np.float32), rng.integers(0, 1 << 20, (6, 5)).astype(np.int32)


def test_pairs_are_interleaved_and_turn_as_complex_numbers(turned):
    x, positions = rows(0)
    got = np.asarray(turned[0](jnp.asarray(x), jnp.asarray(positions)))
    angle = positions.astype(np.float32)[..., None] * rope_frequencies(FLASH, CSA)  # fp32, as the model's code has it
    pairs = x[..., 8::2].astype(np.float64) + 1j * x[..., 9::2]
    want = pairs * np.exp(1j * angle.astype(np.float64))
    np.testing.assert_array_equal(got[..., :8], x[..., :8])
    # Two products and a sum of values up to about 4, rounded to f32: a few 2^-24 * 4.
    np.testing.assert_allclose(got[..., 8::2], want.real, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[..., 9::2], want.imag, rtol=0, atol=1e-6)


def test_the_inverse_undoes_the_rotation(turned):
    x, positions = rows(1)
    forth = turned[0](jnp.asarray(x), jnp.asarray(positions))
    back = np.asarray(turned[1](forth, jnp.asarray(positions)))
    assert np.abs(np.asarray(forth) - x)[..., 8:].max() > 1
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)  # twice the error of one rotation


def test_position_0_turns_nothing(turned):
    x, positions = rows(2)
    got = np.asarray(turned[0](jnp.asarray(x), jnp.zeros_like(jnp.asarray(positions))))
    np.testing.assert_array_equal(got, x)


def test_products_depend_on_the_distance_alone(turned):
    """This is the purpose of rope: q at p + s and k at p have the same product for every p."""
    x, positions = rows(3)
    positions %= 1000  # fp32 angles: their error grows with the position
    at_p = np.asarray(turned[0](jnp.asarray(x), jnp.asarray(positions)))
    at_p_plus_37 = np.asarray(turned[0](jnp.asarray(x), jnp.asarray(positions + np.int32(37))))
    at_37 = np.asarray(turned[0](jnp.asarray(x), jnp.full((6, 5), 37, jnp.int32)))
    # Angles of about 1000 are off by 2^-15 = 3e-5 at most; products of 72 values of unit variance are about 8.
    np.testing.assert_allclose((at_p * at_p_plus_37).sum(-1), (x * at_37).sum(-1), rtol=0, atol=2e-3)


def test_heads_share_the_position_of_their_token(turned):
    x, positions = rows(4)
    with_heads = np.stack([x, 2 * x, -x], axis=2)
    freqs = rope_frequencies(FLASH, CSA)
    got = np.asarray(apply_rope(jnp.asarray(with_heads), jnp.asarray(positions)[..., None], freqs))
    one = np.asarray(turned[0](jnp.asarray(x), jnp.asarray(positions)))
    # Compiled apart, multiplications and additions may be fused differently: an ulp of values up to 8.
    for head, factor in enumerate((1, 2, -1)):
        np.testing.assert_allclose(got[:, :, head], factor * one, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [SWA, CSA])
def test_cosines_and_sines_are_those_of_the_fp32_angle_up_to_a_million_positions(kind):
    """The angle is an f32 product, as in the model's code. Its cosine is correct to f32 rounding at every position.

    A backend that reduces large arguments in f32, or fuses the product into the reduction, fails this test.
    """
    rng = np.random.default_rng(5)
    special = [0, 1, 127, 128, 65535, 65536, (1 << 20) - 1, 1 << 20]
    positions = np.concatenate([special, rng.integers(0, 1 << 20, 4096 - len(special))]).astype(np.int32)
    freqs = rope_frequencies(FLASH, kind)
    ones = np.zeros((len(positions), 64), np.float32)
    ones[:, 0::2] = 1  # (1, 0) turns into (cos, sin)
    got = np.asarray(jax.jit(lambda x, p: apply_rope(x, p, freqs))(jnp.asarray(ones), jnp.asarray(positions)))
    angle = (positions.astype(np.float32)[:, None] * freqs[None]).astype(np.float64)
    # Within 2 ulp of values near 1 (2^-24 each side); measured on CPU: half an ulp, 3.3e-8.
    np.testing.assert_allclose(got[:, 0::2], np.cos(angle), rtol=0, atol=2**-22)
    np.testing.assert_allclose(got[:, 1::2], np.sin(angle), rtol=0, atol=2**-22)
