"""Weights as FP8 codes and block scales: their values, rows, joins, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.weights.params import check_params
from dsv4jax.weights.stored import StoredWeight, find_block, join, rows_of, to_e8m0
from tests.support import recorded
from tests.support.driver import assert_same
from tests.support.stored import random_stored, stored_params, values_of

BLOCKS = [(128, 128), (32, 32), (128, 32)]
E8M0 = ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (40, 24)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_widened_values_are_codes_times_scales(block, shape, dtype):
    weight = random_stored(0, shape, block)
    wide = weight.widened(dtype)
    assert wide.dtype == dtype
    # Exactly: a code has 4 significant bits, and a power of two takes none.
    np.testing.assert_array_equal(np.asarray(wide).astype(np.float64), values_of(weight))
    assert weight.shape == shape
    assert weight.nbytes == weight.codes.nbytes + weight.scales.nbytes


def test_every_code_is_widened_exactly():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[None]
    for exponent in (13, 127, 134):  # the smallest scale is 2^-117
        scales = np.array([[exponent, exponent - 3]], np.uint8).view(E8M0)
        weight = StoredWeight(codes=jnp.asarray(codes), scales=jnp.asarray(scales))
        for dtype in ("float32", "bfloat16"):
            np.testing.assert_array_equal(np.asarray(weight.widened(dtype)).astype(np.float64), values_of(weight))


@pytest.mark.parametrize(
    ("heights", "block", "joined"),
    [
        ((256, 128), 128, 128),  # whole blocks
        ((256, 100), 128, 128),  # the last weight alone may end within a block
        ((160, 136), 128, 32),  # as in the tiny model: lower blocks
        ((24, 136), 128, 8),
        ((64, 64, 30), 32, 32),
        ((100, 3), 128, 4),
    ],
)
def test_joined_weights_keep_their_values_and_are_cut_again(heights, block, joined):
    weights = [random_stored(i, (height, 200), (block, 64)) for i, height in enumerate(heights)]
    whole, cut = jax.jit(join)(*weights), jax.jit(rows_of, static_argnums=(1, 2))
    assert whole.block == (joined, 64)
    assert whole.shape == (sum(heights), 200)
    np.testing.assert_array_equal(values_of(whole), np.concatenate([values_of(weight) for weight in weights]))
    first = 0
    for weight in weights:
        part = cut(whole, first, first + weight.shape[0])
        np.testing.assert_array_equal(values_of(part), values_of(weight))
        first += weight.shape[0]


def test_rows_and_joins_are_the_same_on_the_host_and_in_a_trace():
    weights = [random_stored(i, (height, 64)) for i, height in enumerate((160, 136))]
    on_host: list[Any] = [jax.tree.map(np.asarray, weight) for weight in weights]
    joined = join(*on_host)
    assert isinstance(joined.codes, np.ndarray)
    assert_same(joined, join(*weights))
    assert_same(joined, jax.jit(join)(*weights))
    assert_same(rows_of(joined, 160, 296), jax.jit(rows_of, static_argnums=(1, 2))(join(*weights), 160, 296))
    shapes = jax.eval_shape(join, *weights)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), joined
    )


def test_rows_within_a_block_are_refused():
    weight = random_stored(0, (256, 64))
    with pytest.raises(ValueError, match="rows 64 to 256 of a stored weight begin within a block of 128 rows"):
        rows_of(weight, 64, 256)


def test_what_is_not_stored_alike_is_not_joined():
    weight = random_stored(0, (128, 64))
    with pytest.raises(ValueError, match="must all be stored as FP8, or none of them"):
        join(weight, jnp.ones((128, 64)))
    for other in (dataclasses.replace(weight, activations="fp8"), random_stored(0, (128, 64), (128, 32))):
        with pytest.raises(ValueError, match=r"must be stored alike, got \(block, activations\)"):
            join(weight, other)


def test_arrays_of_two_dtypes_are_joined_in_float32():
    narrow, wide = jnp.full((2, 3), 0.1, jnp.bfloat16), jnp.full((1, 3), 0.1)
    joined = join(narrow, wide)
    assert joined.dtype == jnp.float32
    np.testing.assert_array_equal(joined[:2], narrow.astype(jnp.float32))
    assert_same(join(*map(np.asarray, (narrow, wide))), np.asarray(joined))
    assert join(narrow, narrow).dtype == jnp.bfloat16


# ---- blocks and scales of checkpoints


@pytest.mark.parametrize(
    ("shape", "scales", "given", "found"),
    [
        ((256, 384), (2, 3), None, (128, 128)),
        ((250, 300), (2, 3), None, (128, 128)),
        ((256, 384), (8, 12), None, (32, 32)),
        ((256, 384), (8, 12), (32, 32), (32, 32)),
        ((16, 16), (2, 2), None, (8, 8)),
        ((32, 32), (1, 1), None, (128, 128)),  # both fit
        ((32, 32), (1, 1), (32, 32), (32, 32)),
        ((256, 384), (2, 12), (128, 32), (128, 32)),
        ((5, 256, 384), (5, 8, 12), None, (32, 32)),  # of five experts
    ],
)
def test_a_block_is_found_by_shapes_where_none_is_given(shape, scales, given, found):
    assert find_block(shape, scales, given) == found


@pytest.mark.parametrize(
    ("shape", "scales", "given", "message"),
    [
        ((256, 384), (3, 2), None, r"block scales of shape \(3, 2\) do not fit a weight of shape \(256, 384\)$"),
        ((256, 384), (2,), None, r"block scales of shape \(2,\) do not fit"),
        ((544, 160), (2, 5), None, "do not fit"),  # 512 x 32 would
        ((5, 256, 384), (4, 2, 3), None, "do not fit"),
        ((5, 256, 384), (4, 2, 3), (128, 128), "do not fit"),
        ((256, 384), (2, 3), (32, 32), "do not fit a weight .* in blocks of 32 x 32"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(shape, scales, given, message):
    with pytest.raises(ValueError, match=message):
        find_block(shape, scales, given)


def test_f32_powers_of_two_become_e8m0_exactly():
    exponents = np.arange(-127, 8)
    scales = np.exp2(exponents.astype(np.float64)).astype(np.float32)[None]
    narrow = to_e8m0(scales)
    assert narrow.dtype == E8M0
    np.testing.assert_array_equal(narrow.view(np.uint8), exponents[None] + 127)
    assert to_e8m0(narrow) is narrow


@pytest.mark.parametrize("value", [0.75, -1.0, 0.0, 2.0**-128, 1 + 2.0**-23])
def test_f32_scales_that_are_no_powers_of_two_are_refused(value):
    with pytest.raises(ValueError, match="block scales are not all powers of two"):
        to_e8m0(np.array([[1, value]], np.float32))


@pytest.mark.parametrize("dtype", [np.float32, E8M0])
@pytest.mark.parametrize("value", [2.0**8, 2.0**100, np.nan])
def test_scales_that_kernels_do_not_serve_are_refused(dtype, value):
    with pytest.raises(ValueError, match=r"block scales go up to .*, and 2\^7 is the largest that is served"):
        to_e8m0(np.array([[1, value]], np.float32).astype(dtype))


def test_traced_scales_must_be_e8m0():
    with pytest.raises(ValueError, match="block scales are float32, and traced ones must be float8_e8m0fnu"):
        jax.jit(to_e8m0)(jnp.ones((1, 1)))
    scales = jnp.ones((1, 1), jnp.float8_e8m0fnu)
    assert_same(jax.jit(to_e8m0)(scales), scales)
    with pytest.raises(ValueError, match="block scales are float16, expected float8_e8m0fnu or float32"):
        to_e8m0(np.ones((1, 1), np.float16))


# ---- a layer's weights


def test_parts_are_those_that_were_joined():
    for kind in ("swa", "csa", "hca"):
        params = recorded.load(kind).params
        assert_same(d4.AttentionParams.join(params.split()), params)
        stored = stored_params(params, (32, 32))
        for name, part in stored.split().items():
            if isinstance(part, StoredWeight):
                given = np.asarray(params.split()[name])
                # E4M3 has 4 significant bits; its subnormal numbers are 2^-9 of a scale, which the block's largest
                # number sets.
                np.testing.assert_allclose(values_of(part), given, rtol=2**-4, atol=np.abs(given).max() * 2**-17)
            else:
                assert_same(part, params.split()[name])


def test_malformed_stored_weights_are_named():
    recording = recorded.load("csa")
    good = stored_params(recording.params)
    assert isinstance(good.q_b, StoredWeight)
    check_params(good, recording.cfg, recording.kind)
    q_b = good.q_b
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(codes=q_b.codes[1:]), AssertionError, r"params\.q_b\.codes: expected float8_e4m3fn \[axis 0=544"),
        (dict(codes=q_b.codes.astype(jnp.bfloat16)), AssertionError, r"params\.q_b\.codes: .*got bfloat16"),
        (dict(scales=q_b.scales[1:]), AssertionError, r"params\.q_b\.scales: expected float8_e8m0fnu \[axis 0=5"),
        (dict(scales=q_b.scales.astype(jnp.float32)), AssertionError, r"params\.q_b\.scales: .*got float32"),
        (dict(block=(32, 32)), AssertionError, r"params\.q_b\.scales: expected .*\[axis 0=17, axis 1=1\]"),
        (dict(block=(0, 128)), ValueError, r"params\.q_b\.block must be a pair of positive integers"),
        (
            dict(activations="int8"),
            ValueError,
            r"params\.q_b\.activations must be one of \['bf16', 'fp8'\], got 'int8'",
        ),
    ]
    for change, error, message in bad:
        with pytest.raises(error, match=message):
            check_params(
                dataclasses.replace(good, q_b=dataclasses.replace(q_b, **change)), recording.cfg, recording.kind
            )
    with pytest.raises(AssertionError, match=r"params\.compress: expected float32 or bfloat16"):
        check_params(
            dataclasses.replace(good, compress=random_stored(0, good.compress.shape)),  # type: ignore[union-attr]
            recording.cfg,
            recording.kind,
        )
