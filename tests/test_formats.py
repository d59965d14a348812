"""Number formats, compared with independent implementations in NumPy and ml_dtypes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, KeyRows, KVRows, rounded, rounded_keys, row_bytes
from tests.support import recorded
from tests.support.cases import first_of
from tests.support.driver import assert_same

ROPE_DIM, HEAD_DIM, KEY_DIM = 64, 512, 128
KV, KEYS = list(KV_FORMATS), list(INDEXER_FORMATS)
F32 = np.float32


# ---- independent implementations: f32 numpy in, dict of numpy leaves out


def power_of_two_at_least(ratio: np.ndarray) -> np.ndarray:
    """Return the exponent k of the smallest 2^k >= ratio. Exact, because frexp reads the bits."""
    fraction, exponent = np.frexp(ratio)
    return exponent - (fraction == 0.5)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, F32(-448), F32(448)).astype(F32).astype(ml_dtypes.float8_e4m3fn)


def e2m1_bytes(x: np.ndarray) -> np.ndarray:
    """Return the codes of the clipped values, two to a byte, with the even index in the low nibble."""
    codes = np.clip(x, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e2m1_values(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(F32)


def numpy_kv(name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (stored leaves, decoded rows) of finite rows f32 [..., 512]."""
    nope, rope = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:]
    if name in ("f32", "bf16"):
        stored = x.astype({"f32": F32, "bf16": ml_dtypes.bfloat16}[name])
        leaves = {"nope": stored[..., :-ROPE_DIM], "rope": stored[..., -ROPE_DIM:]}
        return leaves, stored.astype(F32)
    rope = rope.astype(ml_dtypes.bfloat16)
    if name == "fp8_row":
        amax = np.maximum(np.abs(nope).max(-1), F32(1e-4))
        scale = amax * F32(1 / 448)  # a product, the library's choice: within one ulp of amax / 448, checked below
        codes = e4m3(nope / scale[..., None])
        decoded = codes.astype(F32) * scale[..., None]
        leaves = {"nope": codes.view(np.uint8), "rope": rope, "scale": scale}
    else:
        tiles = nope.reshape(*nope.shape[:-1], 7, 64)
        # float64 holds amax / 448 closely enough that only an exact power of two looks like one
        exponent = power_of_two_at_least(np.maximum(np.abs(tiles).max(-1), F32(1e-4)).astype(np.float64) / 448)
        scale = np.ldexp(F32(1), exponent).astype(F32)[..., None]
        codes = e4m3(tiles / scale)
        decoded = (codes.astype(F32) * scale).reshape(nope.shape)
        leaves = {"nope": codes.view(np.uint8).reshape(nope.shape), "rope": rope}
        leaves["scale"] = (exponent + 127).astype(np.uint8)
    return leaves, np.concatenate([decoded, rope.astype(F32)], -1)


def numpy_keys(name: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (stored leaves, decoded rows) of finite keys f32 [..., 128]."""
    if name in ("f32", "bf16"):
        stored = x.astype({"f32": F32, "bf16": ml_dtypes.bfloat16}[name])
        return {"codes": stored}, stored.astype(F32)
    groups = x.reshape(*x.shape[:-1], -1, {"mxfp4": 32, "nvfp4": 16}[name])
    amax = np.abs(groups).max(-1)
    if name == "mxfp4":
        exponent = power_of_two_at_least(np.maximum(amax, F32(6 * 2.0**-126)).astype(np.float64) / 6)
        scale, byte = np.ldexp(F32(1), exponent).astype(F32), (exponent + 127).astype(np.uint8)
    else:
        stored = np.clip(amax * F32(1 / 6), F32(2**-9), F32(448)).astype(ml_dtypes.float8_e4m3fn)
        scale, byte = stored.astype(F32), stored.view(np.uint8)
    packed = e2m1_bytes((groups / scale[..., None]).reshape(x.shape))
    decoded = (e2m1_values(packed).reshape(groups.shape) * scale[..., None]).reshape(x.shape)
    return {"codes": packed, "scale": byte}, decoded


# ---- the library, one compilation per format: every test encodes batches of one shape

ROWS = 512


@functools.cache
def coder(name: str, keys: bool) -> tuple[Any, Any, Any]:
    """Return encode, decode, and both in one, each under jit."""
    rounding: Any = (INDEXER_FORMATS if keys else KV_FORMATS)[name]
    encode = rounding.encode if keys else functools.partial(rounding.encode, rope_dim=ROPE_DIM)
    decode = rounding.decode
    return jax.jit(encode), jax.jit(decode), jax.jit(lambda x: decode(encode(x)))


def padded(x: np.ndarray) -> jax.Array:
    """Pad rows with zero rows to the one batch size that is compiled."""
    assert len(x) <= ROWS
    return jnp.asarray(np.concatenate([x, np.zeros((ROWS - len(x), x.shape[1]), F32)]))


def leaves_of(rows: KVRows | KeyRows, count: int) -> dict[str, np.ndarray]:
    names = ("nope", "rope", "scale") if isinstance(rows, KVRows) else ("codes", "scale")
    return {name: np.asarray(leaf)[:count] for name in names if (leaf := getattr(rows, name)) is not None}


def through(name: str, x: np.ndarray, *, keys: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (stored leaves, decoded rows) of rows x."""
    encode, decode, _ = coder(name, keys)
    rows = encode(padded(x))
    return leaves_of(rows, len(x)), np.asarray(decode(rows))[: len(x)]


def battery(dim: int) -> np.ndarray:
    """Return finite rows f32 [ROWS, dim] of sorts that have gone wrong in some implementation."""
    rng = np.random.default_rng(dim)
    parts = [np.zeros((1, dim)), -np.zeros((1, dim))]
    # Rows of one magnitude each, 1e-30 .. 1e4, and rows whose dims differ by as much among themselves.
    parts.append(rng.standard_normal((140, dim)) * 10.0 ** np.linspace(-30, 4, 140)[:, None])
    parts.append(rng.standard_normal((60, dim)) * 10.0 ** rng.uniform(-30, 4, (60, dim)))
    # Exact powers of two, alone in a row and all over it.
    powers = 2.0 ** np.arange(-40, 14)
    parts += [powers[:, None] * np.eye(len(powers), dim, k=1), powers[:, None] * np.ones((1, dim))]
    # Multiples of 1/16 up to the format's largest: every midpoint between neighbours of both small floats is hit.
    for largest in (6, 448):
        ties = rng.integers(-16 * largest, 16 * largest + 1, (60, dim)) / 16
        ties[:, ::16] = largest
        parts.append(ties)
    x = np.concatenate(parts).astype(F32)
    return np.concatenate([x, rng.standard_normal((ROWS - len(x), dim)).astype(F32)])


@pytest.mark.parametrize("name", KV)
def test_kv_rows_equal_the_independent_ones(name):
    x = battery(HEAD_DIM)
    stored, decoded = through(name, x, keys=False)
    want, want_decoded = numpy_kv(name, x)
    assert stored.keys() == want.keys()
    for part, leaf in want.items():
        np.testing.assert_array_equal(stored[part], leaf, err_msg=part)
    np.testing.assert_array_equal(decoded, want_decoded)


@pytest.mark.parametrize("name", KEYS)
def test_indexer_keys_equal_the_independent_ones(name):
    x = battery(KEY_DIM)
    stored, decoded = through(name, x, keys=True)
    want, want_decoded = numpy_keys(name, x)
    assert stored.keys() == want.keys()
    for part, leaf in want.items():
        np.testing.assert_array_equal(stored[part], leaf, err_msg=part)
    np.testing.assert_array_equal(decoded, want_decoded)


def test_fp8_row_scale_is_one_448th_of_the_largest_magnitude():
    x = battery(HEAD_DIM)
    stored, _ = through("fp8_row", x, keys=False)
    amax = np.maximum(np.abs(x[:, :-ROPE_DIM]).max(-1), F32(1e-4)).astype(np.float64)
    # The product with an f32 reciprocal: two roundings, 2^-24 each.
    np.testing.assert_allclose(stored["scale"], amax / 448, rtol=2**-23, atol=0)


def test_tile64_scale_does_not_double_at_exact_powers_of_two():
    """amax = 448 * 2^k fits scale 2^k exactly. One ulp more needs 2^(k + 1), and one ulp less still needs 2^k."""
    exponents = np.arange(-22, 120)  # below: the floor of 1e-4; above: 448 * 2^k is no f32
    exact = np.ldexp(F32(448), exponents).astype(F32)
    for amax, step in [(exact, 0), (np.nextafter(exact, F32(np.inf)), 1), (np.nextafter(exact, F32(0)), 0)]:
        x = np.zeros((len(exponents), HEAD_DIM), F32)
        x[:, 64 * 3 + 5] = -amax
        want = np.full((len(exponents), 7), 105)  # 1e-4 / 448 = 2^-22.1 -> 2^-22
        want[:, 3] = np.maximum(exponents + step, -22) + 127
        np.testing.assert_array_equal(through("fp8_tile64", x, keys=False)[0]["scale"], want)


def test_mxfp4_scale_does_not_double_at_exact_powers_of_two():
    exponents = np.arange(-126, 126)  # 6 * 2^-126 is the floor; 6 * 2^126 is no f32
    exact = np.ldexp(F32(6), exponents).astype(F32)
    for amax, step in [(exact, 0), (np.nextafter(exact, F32(np.inf)), 1), (np.nextafter(exact, F32(0)), 0)]:
        x = np.zeros((len(exponents), KEY_DIM), F32)
        x[:, 32 * 2 + 7] = amax
        want = np.full((len(exponents), 4), 1)  # 6 * 2^-126 / 6 -> 2^-126
        want[:, 2] = exponents + step + 127
        np.testing.assert_array_equal(through("mxfp4", x, keys=True)[0]["scale"], want)


@pytest.mark.parametrize("name", KV)
def test_zero_rows_decode_to_zero(name):
    _, decoded = through(name, np.zeros((3, HEAD_DIM), F32), keys=False)
    assert not decoded.any()


@pytest.mark.parametrize("name", KEYS)
def test_zero_keys_decode_to_zero(name):
    _, decoded = through(name, np.zeros((3, KEY_DIM), F32), keys=True)
    assert not decoded.any()


def test_e4m3_rounds_ties_to_even_and_saturates():
    """Worked out by hand.

    448 in each row fixes the scale at 1; adjacent E4M3 values differ by 2 from 16, and by 32 from 256.
    """
    by_hand = {17: 16, 19: 20, 21: 20, 23: 24, 272: 256, 304: 320, 2**-10: 0, 3 * 2**-10: 2**-8, 5 * 2**-10: 2**-8}
    values = np.array(list(by_hand), F32)
    x = np.zeros((2, HEAD_DIM), F32)
    x[:, 0] = 448
    x[0, 1 : 1 + len(values)], x[1, 1 : 1 + len(values)] = values, -values
    want = np.array(list(by_hand.values()), F32)
    for name in ("fp8_row", "fp8_tile64"):
        stored, decoded = through(name, x, keys=False)
        np.testing.assert_array_equal(stored["scale"].ravel()[0], {"fp8_row": 1.0, "fp8_tile64": 127}[name])
        np.testing.assert_array_equal(decoded[0, 1 : 1 + len(values)], want)
        np.testing.assert_array_equal(decoded[1, 1 : 1 + len(values)], -want)
        assert decoded[0, 0] == 448


def test_e2m1_rounds_ties_to_even():
    """Worked out by hand. 6 in each group fixes the scale at 1."""
    by_hand = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 0.26: 0.5, 0.74: 0.5, 2.51: 3, 5.01: 6}
    values = np.array(list(by_hand), F32)
    x = np.zeros((2, KEY_DIM), F32)
    x[:, ::16] = 6
    x[0, 1 : 1 + len(values)], x[1, 1 : 1 + len(values)] = values, -values
    want = np.array(list(by_hand.values()), F32)
    for name in ("mxfp4", "nvfp4"):
        stored, decoded = through(name, x, keys=True)
        assert np.all(stored["scale"] == {"mxfp4": 127, "nvfp4": 0x38}[name])  # 1.0 as UE8M0 and as E4M3
        np.testing.assert_array_equal(decoded[0, 1 : 1 + len(values)], want)
        np.testing.assert_array_equal(decoded[1, 1 : 1 + len(values)], -want)


def test_the_even_dim_lies_in_the_low_nibble():
    x = np.zeros((1, KEY_DIM), F32)
    x[0, :4] = 6, -1.5, 0.5, 2  # codes 7, 8 | 3, 1, 4
    for name in ("mxfp4", "nvfp4"):
        stored, _ = through(name, x, keys=True)
        assert stored["codes"][0, :3].tolist() == [0xB7, 0x41, 0x00]


def test_nvfp4_saturates_at_its_largest_scale():
    x = np.full((2, KEY_DIM), 1.0, F32)
    x[0, 0], x[1, 0] = 1e4, -3e38
    stored, decoded = through("nvfp4", x, keys=True)
    assert np.all(stored["scale"][:, 0] == 0x7E)  # 448, the largest finite E4M3
    assert decoded[:, 0].tolist() == [6 * 448, -6 * 448]
    assert np.all(decoded[:, 16:] == 6 * 11 / 64)  # other groups keep their own scale, 1 / 6 rounded to 11 / 64


def share_a_scale(at: tuple[np.ndarray, np.ndarray], shape: tuple[int, ...], group: int) -> np.ndarray:
    """Return the values at ``at``, and those that share a scale with them, as bool.

    RoPE dims, past 448, have no scale.
    """
    found = np.zeros(shape, bool)
    found[at] = True
    scaled = found[:, : HEAD_DIM - ROPE_DIM]
    groups = scaled.reshape(len(found), -1, group)
    scaled[:] = np.broadcast_to(groups.any(-1, keepdims=True), groups.shape).reshape(scaled.shape)
    return found


@pytest.mark.parametrize("name", KV)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_stays_alone_and_decodes_to_it(name, bad):
    """Each row has one bad value, at every place, because a vectorised maximum may lose NaN in some lanes only."""
    x = battery(HEAD_DIM)
    row = np.arange(0, ROWS, 2)
    at = row, row + row // 2 % 2  # even and odd dims, RoPE dims too
    x[at] = bad
    stored, decoded = through(name, x, keys=False)
    assert not np.isfinite(decoded[share_a_scale(at, x.shape, {"fp8_row": 448, "fp8_tile64": 64}.get(name, 1))]).any()
    clean = np.ones(len(x), bool)
    clean[at[0]] = False
    want, want_decoded = numpy_kv(name, x[clean])
    np.testing.assert_array_equal(decoded[clean], want_decoded)
    for part, leaf in want.items():
        np.testing.assert_array_equal(stored[part][clean], leaf, err_msg=part)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_key_with_nan_or_infinity_stays_alone_and_decodes_to_it(name, bad):
    x = battery(KEY_DIM)
    at = np.arange(200, 200 + KEY_DIM), np.arange(KEY_DIM)
    x[at] = bad
    stored, decoded = through(name, x, keys=True)
    assert not np.isfinite(decoded[share_a_scale(at, x.shape, {"mxfp4": 32, "nvfp4": 16}.get(name, 1))]).any()
    clean = np.ones(len(x), bool)
    clean[at[0]] = False
    want, want_decoded = numpy_keys(name, x[clean])
    np.testing.assert_array_equal(decoded[clean], want_decoded)
    for part, leaf in want.items():
        np.testing.assert_array_equal(stored[part][clean], leaf, err_msg=part)


def test_bytes_of_a_row():
    kv = {name: row_bytes(KV_FORMATS[name].row(448, ROPE_DIM)) for name in KV}
    # 448 + 64 * 2 + 4; 448 + 64 * 2 + 7 (FlashMLA pads this to 584)
    assert kv == {"f32": 2048, "bf16": 1024, "fp8_row": 580, "fp8_tile64": 583}
    keys = {name: row_bytes(INDEXER_FORMATS[name].row(KEY_DIM)) for name in KEYS}
    assert keys == {"f32": 512, "bf16": 256, "nvfp4": 64 + 8, "mxfp4": 64 + 4}


@pytest.mark.parametrize("name", KV)
def test_kv_rows_have_the_shapes_and_dtypes_they_announce(name):
    rows = jax.eval_shape(coder(name, False)[0], jax.ShapeDtypeStruct((3, 5, HEAD_DIM), jnp.float32))
    announced = KV_FORMATS[name].row(HEAD_DIM - ROPE_DIM, ROPE_DIM)
    assert rows == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, 5, *leaf.shape), leaf.dtype), announced)


@pytest.mark.parametrize("name", KEYS)
def test_indexer_keys_have_the_shapes_and_dtypes_they_announce(name):
    rows = jax.eval_shape(coder(name, True)[0], jax.ShapeDtypeStruct((3, 5, KEY_DIM), jnp.float32))
    announced = INDEXER_FORMATS[name].row(KEY_DIM)
    assert rows == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, 5, *leaf.shape), leaf.dtype), announced)


def test_sizes_that_do_not_fill_whole_tiles_are_refused():
    with pytest.raises(ValueError, match="fp8_tile64: head_dim - rope_dim = 100 must be divisible by 64"):
        KV_FORMATS["fp8_tile64"].row(100, 8)
    for name, group in (("nvfp4", 16), ("mxfp4", 32)):
        with pytest.raises(ValueError, match=f"indexer_head_dim=8 must be divisible by the group of {group}"):
            INDEXER_FORMATS[name].row(8)


def relative_rms(x: np.ndarray, decoded: np.ndarray) -> float:
    return float(np.sqrt(np.mean((decoded - x) ** 2) / np.mean(x**2)))


# Within 4 %: 2^17 or more values give an rms to a few tenths of a per cent, and the figures have two or three digits.
@pytest.mark.parametrize(("name", "error"), [("fp8_tile64", 0.027), ("fp8_row", 0.026)])
def test_rounding_error_of_gaussian_rows(name, error):
    x = np.random.default_rng(1).standard_normal((ROWS, HEAD_DIM), F32)
    _, decoded = through(name, x, keys=False)
    nope = slice(None), slice(0, HEAD_DIM - ROPE_DIM)
    assert relative_rms(x[nope], decoded[nope]) == pytest.approx(error, rel=0.04)


@pytest.mark.parametrize(("name", "error"), [("mxfp4", 0.115), ("nvfp4", 0.095)])
def test_rounding_error_of_gaussian_keys(name, error):
    x = np.random.default_rng(2).standard_normal((ROWS, KEY_DIM), F32)
    _, decoded = through(name, x, keys=True)
    assert relative_rms(x, decoded) == pytest.approx(error, rel=0.04)


CASES = [(name, False) for name in KV] + [(name, True) for name in KEYS]
CASE_IDS = [f"{'keys' if keys else 'rows'} {name}" for name, keys in CASES]


@pytest.mark.parametrize(("name", "keys"), first_of(CASES, count=3), ids=CASE_IDS)
def test_jit_stores_the_bytes_that_eager_execution_stores(name, keys):
    x = jnp.asarray(battery(KEY_DIM if keys else HEAD_DIM))
    if keys:
        eager: KVRows | KeyRows = INDEXER_FORMATS[name].encode(x)
    else:
        eager = KV_FORMATS[name].encode(x, ROPE_DIM)
    assert_same(coder(name, keys)[0](x), eager)


@pytest.mark.parametrize(("name", "keys"), CASES, ids=CASE_IDS)
def test_a_reader_fused_with_the_rounding_sees_the_rounded_row(name, keys):
    """XLA may remove a round trip through a narrower float, but must not do so here."""
    x = jnp.asarray(battery(KEY_DIM if keys else HEAD_DIM))
    encode, decode, fused = coder(name, keys)
    on_host = jax.tree.map(np.asarray, encode(x))
    assert_same(fused(x), decode(jax.tree.map(jnp.asarray, on_host)))


# ---- recorded rounding of DeepSeek's code


@pytest.mark.parametrize(("kind", "field"), [(k, "window") for k in ("swa", "csa", "hca")] + [("csa", "entries")])
def test_rounding_recorded_rows_gives_the_recorded_rounded_rows(kind, field):
    """NoPE dims agree exactly. The recordings kept RoPE dims in f32, but they are stored as bf16."""
    recording = recorded.load(kind)
    rope_dim, x, want = recording.cfg.rope_dim, recording.arrays[field], recording.arrays[f"{field}_q"]
    decoded = np.asarray(jax.jit(rounded, static_argnums=(1, 2))(x, KV_FORMATS["fp8_tile64"], rope_dim))
    assert not np.array_equal(x[:, :-rope_dim], want[:, :-rope_dim])
    np.testing.assert_array_equal(decoded[:, :-rope_dim], want[:, :-rope_dim])
    np.testing.assert_array_equal(decoded[:, -rope_dim:], want[:, -rope_dim:].astype(ml_dtypes.bfloat16).astype(F32))


def test_rounding_recorded_hca_entries_gives_the_recorded_rounded_entries():
    recording = recorded.load("hca")
    rope_dim, x, want = recording.cfg.rope_dim, recording.arrays["entries"], recording.arrays["entries_q"]
    decoded = np.asarray(jax.jit(rounded, static_argnums=(1, 2))(x, KV_FORMATS["fp8_tile64"], rope_dim))
    np.testing.assert_array_equal(decoded[:, :-rope_dim], want[:, :-rope_dim])


def test_rounding_recorded_indexer_keys_gives_the_recorded_rounded_keys():
    arrays = recorded.load("csa").arrays
    decoded = jax.jit(rounded_keys, static_argnums=1)(arrays["indexer_entries"], INDEXER_FORMATS["mxfp4"])
    assert not np.array_equal(arrays["indexer_entries"], arrays["indexer_entries_q"])
    np.testing.assert_array_equal(np.asarray(decoded), arrays["indexer_entries_q"])
