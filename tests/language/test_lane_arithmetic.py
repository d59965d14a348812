"""Arithmetic and packed conversions of the kernel language, on both machines, compared with NumPy."""

from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.lanes import Divisor
from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Value, negate, select
from tests.support.lane_kernels import (
    F32,
    SPECIAL,
    TINY,
    assert_same_floats,
    elementwise,
    machines,
    pairs_of,
    random_bits,
    random_floats,
)

# ---- arithmetic -----------------------------------------------------------------------------------------------------

FLOAT_OPS: dict[str, Any] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
COMPARISONS: dict[str, Any] = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
INT_OPS: dict[str, Any] = FLOAT_OPS | {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@machines
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_float_arithmetic(name, simulate):
    a, b = pairs_of(np.concatenate([SPECIAL, random_floats(0, 20)]))
    (got,) = elementwise(lambda _, x, y: FLOAT_OPS[name](x, y), a, b, simulate=simulate)
    with np.errstate(all="ignore"):
        want = FLOAT_OPS[name](a, b)
    normal = ~(np.abs(want) < TINY) | (want == 0)  # XLA may set the processor to flush subnormal results
    assert normal.mean() > 0.8
    assert_same_floats(got[normal], want[normal])


@machines
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name, simulate):
    """With NaN all of them are False, except for ``!=``."""
    compare = COMPARISONS[name]
    for values in (SPECIAL, np.array([0, 1, -1, 5, 2**31 - 1, -(2**31)], np.int32)):
        a, b = pairs_of(values)
        (got,) = elementwise(lambda _, x, y: compare(x, y), a, b, simulate=simulate, dtype=np.int32)
        np.testing.assert_array_equal(got, compare(a, b))
        assert 0 < got.sum() < len(got)


@machines
@pytest.mark.parametrize(("name", "want"), [("maximum", np.maximum), ("minimum", np.minimum)])
def test_maximum_and_minimum_keep_nan(name, want, simulate):
    a, b = pairs_of(np.concatenate([SPECIAL, random_floats(1, 20)]))
    (got,) = elementwise(lambda _, x, y: getattr(x, name)(y), a, b, simulate=simulate)
    np.testing.assert_array_equal(got, want(a, b))  # the sign of a zero is left open
    assert np.isnan(got[np.isnan(a) | np.isnan(b)]).all()


@machines
@pytest.mark.parametrize("name", [*INT_OPS, "maximum", "minimum"])
def test_integer_arithmetic_wraps_around(name, simulate):
    rng = np.random.default_rng(2)
    values = np.concatenate([[0, 1, -1, 2**31 - 1, -(2**31)], rng.integers(-(2**31), 2**31, 20)]).astype(np.int32)
    a, b = pairs_of(values)
    function: Any = INT_OPS.get(name) or getattr(Value, name)
    want: Any = INT_OPS.get(name) or getattr(np, name)
    (got,) = elementwise(lambda _, x, y: function(x, y), a, b, simulate=simulate, dtype=np.int32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, want(a, b))


@machines
@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 10, 16, 100, 128, 136, 4096, 2**30, 2**31 - 1])
def test_integer_division_of_what_is_not_negative(divisor, simulate):
    rng = np.random.default_rng(divisor)
    edges = [0, 1, divisor - 1, divisor, min(2 * divisor, 2**31 - 1), 2**31 - 2, 2**31 - 1]
    x = np.concatenate([edges, rng.integers(0, 2**31, 200), rng.integers(0, 600, 60)]).astype(np.int32)
    quotient, rest = elementwise(
        lambda _, x: [x // divisor, x % divisor], x, simulate=simulate, outputs=2, dtype=np.int32
    )
    np.testing.assert_array_equal(quotient, x // divisor)
    np.testing.assert_array_equal(rest, x % divisor)


@machines
def test_shifts_are_logical_and_may_differ_from_lane_to_lane(simulate):
    rng = np.random.default_rng(3)
    x = rng.integers(-(2**31), 2**31, 256).astype(np.int32)
    by = rng.integers(0, 32, 256).astype(np.int32)
    out = elementwise(
        lambda _, x, by: [x >> 5, x >> 31, x << 3, x << by], x, by, simulate=simulate, outputs=4, dtype=np.int32
    )
    bits = x.view(np.uint32)
    for got, want in zip(out, [bits >> 5, bits >> 31, bits << 3, bits << by.view(np.uint32)], strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), want.astype(np.uint32))


@machines
def test_numbers_on_either_side_of_an_operator_and_conditions_known_when_the_kernel_is_built(simulate):
    x = random_floats(4, 200)
    y = np.arange(200, dtype=np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        odd = (y & 1) > 0
        return [
            2.5 - x,
            1.5 * x + 3.0,
            select(odd & True, x, -1.0),
            select(True & odd, x, -1.0),
            select(negate(odd), x, machine.constant(-1.0, "f32")),
            select(negate(False), x, 0.0),
            select(negate(True), x, 7.0),
            select((y >= 5) & (y < 9) | (y == 100), x, 0.0),
            machine.from_bits(machine.bits(x) ^ -(2**31)),
        ]

    out = elementwise(function, x, y, simulate=simulate, outputs=9)
    odd, some = y % 2 == 1, (y >= 5) & (y < 9) | (y == 100)
    either = np.where(odd, x, F32(-1))
    want = [F32(2.5) - x, F32(1.5) * x + F32(3), either, either, np.where(odd, F32(-1), x), x, np.full_like(x, 7)]
    for got, expected in zip(out, [*want, np.where(some, x, F32(0)), -x], strict=True):
        assert_same_floats(got, expected.astype(F32))


@machines
def test_a_product_and_a_sum_are_rounded_apart(simulate):
    """Stored bytes agree with XLA's only if the compiler does not fuse a * b + c."""
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(512).astype(F32) for _ in range(2))
    c = -(a * b)
    (got,) = elementwise(lambda _, a, b, c: a * b + c, a, b, c, simulate=simulate)
    assert np.count_nonzero(a.astype(np.float64) * b + c) > 400  # what a fused operation would leave
    np.testing.assert_array_equal(got, np.zeros_like(a))


@machines
def test_exp(simulate):
    # A softmax's arguments are at most 0; the others are for completeness.
    x = np.concatenate([SPECIAL, -np.geomspace(1e-8, 200, 2000), np.linspace(0, 88, 200)]).astype(F32)
    (got,) = elementwise(lambda m, x: m.exp(x), x, simulate=simulate)
    with np.errstate(all="ignore"):
        exact = np.exp(x.astype(np.float64))
        want = np.where(exact > np.finfo(F32).max, np.inf, exact)
    # As announced: |x| 2^-24 for the product x log2 e, a quarter of that for the constant, two ulp of 2^-23 for 2^t.
    # Results below the normal numbers may be flushed.
    special = ~np.isfinite(x) | ~np.isfinite(want)
    np.testing.assert_array_equal(got[special], want[special])
    x, got, want = (array[~special].astype(np.float64) for array in (x, got, want))
    assert np.all(np.abs(got - want) <= (1.25 * np.abs(x) + 4) * 2.0**-24 * want + TINY)
    assert len(x) > 2000
    assert np.all(got[x == 0] == 1)


@machines
def test_divide_rounds_correctly(simulate):
    special = pairs_of(SPECIAL)
    a = np.concatenate([special[0], random_floats(6, 3000), np.linspace(1, 2, 500, dtype=F32)])
    b = np.concatenate([special[1], random_floats(7, 3000), np.full(500, 3, F32)])
    (got,) = elementwise(lambda m, a, b: m.divide(a, b), a, b, simulate=simulate)
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) / b).astype(F32)  # 53 bits are enough that rounding twice is rounding once
    normal = ~(np.abs(want) < TINY) | (want == 0)  # XLA may set the processor to flush subnormal results
    assert normal.mean() > 0.8
    assert_same_floats(got[normal], want[normal])


@machines
def test_inverse_sqrt_rounds_twice(simulate):
    x = np.concatenate([SPECIAL, np.abs(random_floats(8, 3000)), np.linspace(1e-6, 4, 1000)]).astype(F32)
    (got,) = elementwise(lambda m, x: m.inverse_sqrt(x), x, simulate=simulate)
    with np.errstate(all="ignore"):
        root = np.sqrt(x.astype(np.float64)).astype(F32)
        want = (1 / root.astype(np.float64)).astype(F32)
    assert_same_floats(got, want)


@machines
def test_fma_rounds_once(simulate):
    rng = np.random.default_rng(20)
    a, b = (rng.standard_normal(2000).astype(F32) for _ in range(2))
    # Half of them cancel to what the product alone would have lost.
    c = np.where(np.arange(2000) % 2 == 0, -(a * b), rng.standard_normal(2000)).astype(F32)
    (got,) = elementwise(lambda m, a, b, c: m.fma(a, b, c), a, b, c, simulate=simulate)
    exact = a.astype(np.longdouble) * b + c  # 64 bits: the product is exact, and so is nearly every sum
    np.testing.assert_array_equal(got, exact.astype(F32))
    assert np.count_nonzero(got != a * b + c) > 500


@machines
def test_reciprocal_rounds_correctly(simulate):
    x = np.concatenate([SPECIAL, random_floats(21, 3000), np.linspace(1, 2, 1000)]).astype(F32)
    x = x[~((np.abs(x) > 8e37) & np.isfinite(x))]  # whose reciprocal is subnormal
    (got,) = elementwise(lambda m, x: m.reciprocal(x), x, simulate=simulate)
    with np.errstate(all="ignore"):
        assert_same_floats(got, (1 / x.astype(np.float64)).astype(F32))


@machines
def test_approximate_reciprocal_is_within_an_ulp(simulate):
    x = np.concatenate([SPECIAL, random_floats(22, 3000), np.linspace(1, 2, 1000), [1e-39, -1e-42, 3e38]]).astype(F32)
    (got,) = elementwise(lambda m, x: m.approximate_reciprocal(x), x, simulate=simulate)
    with np.errstate(all="ignore"):
        want = 1 / np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x).astype(np.float64)
    want = np.where(np.abs(want) < TINY, np.copysign(0, want), want)
    usual = np.isfinite(want) & (want != 0)
    assert_same_floats(got[~usual], want[~usual].astype(F32))
    # An ulp, and half of one by which float64 may differ from its own rounding to f32.
    assert np.all(np.abs(got[usual] - want[usual]) <= 1.5 * np.spacing(np.abs(want[usual]).astype(F32)))


def fractions_of_reciprocals() -> tuple[np.ndarray, np.ndarray]:
    """m of every x = m 2^-23 in [1, 2), and k of its correctly rounded reciprocal k 2^-24."""
    m = np.arange(1 << 23, 1 << 24)
    return m, np.rint(2.0**47 / m).astype(np.int64)  # f64 is exact enough: no quotient is that close to a tie


@pytest.mark.slow
def test_a_newton_step_from_within_an_ulp_ends_within_an_ulp():
    """For every fraction, in integers: what ``normal_reciprocal`` announces of a GPU, whatever the GPU's approximation.

    error = 1 - x guess and guess + guess error are each rounded once, as fma does.
    """
    m, rounded = fractions_of_reciprocals()
    differ = np.zeros(len(m), bool)
    for ulps in (-1, 0, 1):
        guess = np.minimum(rounded + ulps, 1 << 24)  # of 2^-24; at 1 the next number is further, and no better
        error = ((1 << 47) - m * guess).astype(F32).astype(np.int64)  # of 2^-47
        result = guess + np.rint(guess * error / 2.0**47).astype(np.int64)
        assert np.abs(result - rounded).max() <= 1
        assert np.abs(result * m - (1 << 47)).max() < 0.501 * m.max()  # of 2^-24 / x: half an ulp, and a little
        differ |= result != rounded
    assert 0 < differ.sum() < 40


@machines
def test_reciprocal_of_normal_numbers(simulate):
    """Within 1 ulp of the correctly rounded one; bits of a GPU's approximation are not to be had elsewhere."""
    ends = np.array([2.0**-126, np.nextafter(F32(2.0**-126), F32(1)), 2.0**126, np.nextafter(F32(2.0**126), F32(0))])
    x = np.concatenate([ends, random_floats(23, 3000), np.linspace(1, 2, 3000)]).astype(F32)
    x = np.concatenate([x, -x])
    (got,) = elementwise(lambda m, x: m.normal_reciprocal(x), x, simulate=simulate)
    want = (1 / x.astype(np.float64)).astype(F32)
    ulps = got.view(np.int32) - want.view(np.int32)
    assert np.abs(ulps).max() <= (0 if simulate else 1)


@machines
def test_inverse_roots_of_normal_numbers(simulate):
    """Within 2 ulp of the correctly rounded one: an approximation, a step from it, and its roundings."""
    ends = np.array([2.0**-126, np.nextafter(F32(2.0**-126), F32(1)), np.finfo(F32).max])
    x = np.concatenate([ends, np.abs(random_floats(24, 3000)), np.linspace(1, 4, 3000)]).astype(F32)
    (got,) = elementwise(lambda m, x: m.normal_inverse_sqrt(x), x, simulate=simulate)
    want = (1 / np.sqrt(x.astype(np.float64))).astype(F32)
    assert np.abs(got.view(np.int32) - want.view(np.int32)).max() <= (0 if simulate else 2)


def test_the_simulator_gives_no_reciprocal_of_numbers_that_are_not_normal():
    x = np.array([0.0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, 1e38, -3e38], F32)
    (got,) = elementwise(lambda m, x: m.normal_reciprocal(x), x, simulate=True)
    np.testing.assert_array_equal(got, [np.nan] * 7 + [0.0, 0.0])
    (got,) = elementwise(lambda m, x: m.normal_inverse_sqrt(x), x, simulate=True)
    np.testing.assert_array_equal(got[[0, 1, 2, 3, 4, 5, 6, 8]], np.full(8, np.nan))
    assert np.isfinite(got[7])


@machines
def test_a_divisor_divides_as_division_does(simulate):
    """Divides by the scales that rows have, and by infinity and NaN, where nothing underflows."""
    rng = np.random.default_rng(22)
    x = (rng.standard_normal(4000) * 10.0 ** rng.uniform(-6, 6, 4000)).astype(F32)
    scale = np.abs(rng.standard_normal(4000) * 10.0 ** rng.uniform(-6, 6, 4000)).astype(F32)
    scale[::7] = 2.0 ** rng.integers(-20, 20, len(scale[::7]))
    scale[5], scale[6] = np.inf, np.nan
    (got,) = elementwise(lambda _, x, scale: x / Divisor(scale), x, scale, simulate=simulate)
    want = (x.astype(np.float64) / scale).astype(F32)
    np.testing.assert_array_equal(got, want)  # of infinity's zero the sign is left open
    assert np.isnan(got[6])


# ---- packed conversions ---------------------------------------------------------------------------------------------


def e4m3_values() -> np.ndarray:
    """Return the 127 values from 0 to 448, by code: 4 exponent bits with bias 7, 3 bits of fraction; 0x7F is NaN."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0)).astype(F32)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Return the nearest codes, ties to the even one, saturating. x has no NaN."""
    values = e4m3_values().astype(np.float64)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448)
    distance = np.abs(magnitude[:, None] - values)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(127) % 2 == 0)
    code = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
    return (code | np.signbit(x).astype(int) << 7).astype(np.uint8)


def to_e4m3(x: np.ndarray, simulate: bool) -> np.ndarray:
    """Return the codes of x. Each lane converts four, so that each byte's place is used and adjacent bytes differ."""
    quads = np.concatenate([x, np.zeros(-len(x) % 4, F32)]).reshape(-1, 4)
    (words,) = elementwise(lambda m, *quad: m.to_e4m3(list(quad)), *quads.T.copy(), simulate=simulate, dtype=np.int32)
    return words.view(np.uint8)[: len(x)]


@machines
def test_to_e4m3_rounds_to_nearest_even_and_saturates(simulate):
    values = e4m3_values()
    middle = (values[1:] + values[:-1]) / 2  # exact in f32: a tie
    big = np.array([448, 449, 463, 464, 465, 480, 512, 1e9, 3.4e38, np.inf], F32)
    near = [np.nextafter(x, towards) for x in (middle, values[1:]) for towards in (F32(0), F32(1e9))]
    small = np.array([0, 1e-30, 2**-11, 2**-10, 2**-9], F32)
    x = np.concatenate([values, middle, *near, big, small, np.geomspace(1e-4, 500, 3000)]).astype(F32)
    x = np.random.default_rng(9).permutation(np.concatenate([x, -x]))
    np.testing.assert_array_equal(to_e4m3(x, simulate), e4m3_codes(x))


@machines
def test_to_e4m3_keeps_nan_to_itself(simulate):
    x = np.ones((64, 4), F32)
    x[np.arange(64), np.arange(64) % 4] = np.nan
    codes = to_e4m3(x.ravel(), simulate).reshape(-1, 4)
    nan = np.isnan(x)
    assert np.all(codes[nan] & 0x7F == 0x7F)  # of either sign
    assert np.all(codes[~nan] == 0x38)


@machines
def test_from_e4m3_of_all_256_codes_in_every_place_of_a_word(simulate):
    codes = np.stack([np.random.default_rng(place).permutation(256) for place in range(4)], 1).astype(np.uint8)
    out = elementwise(lambda m, word: m.from_e4m3(word), codes.view(np.int32)[:, 0], simulate=simulate, outputs=4)
    values = np.append(e4m3_values(), F32(np.nan))
    table = np.concatenate([values, -values])
    for place, got in enumerate(out):
        assert_same_floats(got, table[codes[:, place]])


@machines
def test_to_bf16_rounds_to_nearest_even(simulate):
    ties = (np.arange(0x3F00, 0x4100, dtype=np.uint32) << 16 | 0x8000).view(F32)
    x = np.concatenate([ties, np.nextafter(ties, F32(0)), SPECIAL, random_bits(10, 3000), random_floats(11, 500)])
    x = np.random.default_rng(12).permutation(x)[: len(x) // 2 * 2]
    low, high = x[0::2].copy(), x[1::2].copy()
    (words,) = elementwise(lambda m, low, high: m.to_bf16(low, high), low, high, simulate=simulate, dtype=np.int32)
    got = words.view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    want = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    assert nan.any()
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(ml_dtypes.bfloat16)).all()
