"""The per-lane language, primitive by primitive, on both of its machines against NumPy; and the simulator's checks."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.lanes import (
    VECTOR,
    WARP,
    WARPGROUP,
    Buffer,
    Divisor,
    Machine,
    Row,
    Team,
    Value,
    add,
    load_either,
    maximum,
    negate,
    select,
)
from pallas_kernels.launch import launch
from tests.machines import MACHINES, requires_gpu

machines = pytest.mark.parametrize("simulate", MACHINES)
F32 = np.float32
TINY = F32(2.0**-126)  # the smallest normal f32

# What arithmetic is known to go wrong at, besides ordinary numbers.
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1 / 3, 88.7, -87.4, -104.0, 1e30, -1e30, 3.4e38, -3.4e38, 2.0**-126, 1e-30, 16777217.0]
    + [np.nan, np.inf, -np.inf],
    F32,
)


def spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def run(body: Callable[..., None], inputs: Any, state: Any, *, simulate: bool, **options: Any) -> Any:
    """Launch a body on one block, unless told otherwise, and return its state as NumPy arrays."""
    options = dict(name="probe", grid=(1,), simulate=simulate) | options
    call = jax.jit(lambda inputs, state: launch(body, inputs=inputs, state=state, **options))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        out = jax.jit(lambda inputs: launch(body, inputs=inputs, state=state, **options))(inputs)
    else:
        out = call(inputs, jax.tree.map(jnp.asarray, state))
    return jax.tree.map(np.asarray, out)


def load_value(buffer: Buffer, at: Value) -> Value:
    return buffer.load_floats(at, count=1)[0] if buffer.dtype == jnp.float32 else buffer.load_int(at)


def store_value(buffer: Buffer, at: Value, value: Value) -> None:
    if value.kind == "bool":
        value = select(value, value.machine.constant(1, "i32"), 0)
    if value.kind == "f32":
        buffer.store_floats([value], at)
    else:
        buffer.store_int(value, at)


def elementwise(
    function: Callable[..., Value | Sequence[Value]],
    *operands: np.ndarray,
    simulate: bool,
    outputs: int = 1,
    dtype: Any = F32,
) -> list[np.ndarray]:
    """function of a machine and one element of each operand per lane, over as many blocks as that takes."""
    size = len(operands[0])
    padded = [np.concatenate([x, np.ones(-size % WARPGROUP, x.dtype)]) for x in operands]

    def body(machine: Machine, inputs: list[Buffer], out: list[Buffer]) -> None:
        n = machine.block(0) * WARPGROUP + machine.thread
        results = function(machine, *[load_value(buffer, n) for buffer in inputs])
        for buffer, value in zip(out, [results] if isinstance(results, Value) else results, strict=True):
            store_value(buffer, n, value)

    inputs = [jnp.asarray(x) for x in padded]
    state = [spec(padded[0].shape, dtype)] * outputs
    out = run(body, inputs, state, simulate=simulate, grid=(len(padded[0]) // WARPGROUP,))
    return [x[:size] for x in out]


def pairs_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every value with every other."""
    a, b = np.meshgrid(values, values, indexing="ij")
    return a.ravel(), b.ravel()


def random_floats(seed: int, size: int) -> np.ndarray:
    """Finite f32 of all magnitudes from 1e-30 to 1e30, none of them subnormal."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.uniform(-30, 30, size)).astype(F32)


def random_bits(seed: int, size: int) -> np.ndarray:
    """f32 of any bits whatever: NaN, infinity and subnormals among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32).view(F32)


def assert_same_floats(got: np.ndarray, want: np.ndarray) -> None:
    """The same bits, but for those of NaN: no machine promises which NaN comes of an operation."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


# ---- arithmetic -----------------------------------------------------------------------------------------------------

FLOAT_OPS: dict[str, Any] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
COMPARISONS: dict[str, Any] = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
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
@pytest.mark.parametrize("name", [*COMPARISONS, "equals"])
def test_comparisons(name, simulate):
    """All false with NaN."""
    compare = COMPARISONS.get(name, Value.equals)
    want = COMPARISONS.get(name, operator.eq)
    for values in (SPECIAL, np.array([0, 1, -1, 5, 2**31 - 1, -(2**31)], np.int32)):
        a, b = pairs_of(values)
        (got,) = elementwise(lambda _, x, y: compare(x, y), a, b, simulate=simulate, dtype=np.int32)
        np.testing.assert_array_equal(got, want(a, b))
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
            select((y >= 5) & (y < 9) | y.equals(100), x, 0.0),
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
def test_a_divisor_divides_as_division_does(simulate):
    """Where nothing underflows. By the scales that rows have, and by infinity and NaN."""
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
    """The 127 values from 0 to 448, by code: 4 exponent bits with bias 7, 3 bits of fraction; 0x7F is NaN."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    return np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0)).astype(F32)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Nearest codes, ties to the even one, saturating. x has no NaN."""
    values = e4m3_values().astype(np.float64)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448)
    distance = np.abs(magnitude[:, None] - values)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(127) % 2 == 0)
    code = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
    return (code | np.signbit(x).astype(int) << 7).astype(np.uint8)


def to_e4m3(x: np.ndarray, simulate: bool) -> np.ndarray:
    """Codes of x, four to a lane: each byte's place is covered, and each byte's neighbours differ."""
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


# ---- between lanes --------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16])
def test_shuffle_xor(distance, simulate):
    lane = np.arange(3 * WARPGROUP)
    integers = np.random.default_rng(distance).integers(-(2**31), 2**31, len(lane)).astype(np.int32)
    floats = random_floats(distance, len(lane))
    (got,) = elementwise(lambda m, x: m.shuffle_xor(x, distance), integers, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, integers[lane ^ distance])
    (got,) = elementwise(lambda m, x: m.shuffle_xor(x, distance), floats, simulate=simulate)
    np.testing.assert_array_equal(got, floats[lane ^ distance])


@machines
@pytest.mark.parametrize("size", [WARP, WARPGROUP])
def test_a_team_reduces_several_terms_at_once_and_again(size, simulate):
    """Sums of small whole numbers are exact in any order."""
    rng = np.random.default_rng(size)
    x = rng.integers(-1000, 1000, 2 * WARPGROUP).astype(F32)
    y = rng.integers(-(2**31), 2**31, len(x)).astype(np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        team = Team(machine, size)
        total, peak, integer_peak = team.reduce((add, x), (maximum, x), (maximum, y))
        (again,) = team.reduce((add, total + x))
        return [total, peak, machine.from_bits(integer_peak), again]

    total, peak, integer_peak, again = elementwise(function, x, y, simulate=simulate, outputs=4)
    of_team = x.reshape(-1, size)
    sums = of_team.sum(-1, keepdims=True)
    for got, want in [
        (total, sums),
        (peak, of_team.max(-1, keepdims=True)),
        (integer_peak.view(np.int32), y.reshape(-1, size).max(-1, keepdims=True)),
        (again, (of_team + sums).sum(-1, keepdims=True)),
    ]:
        np.testing.assert_array_equal(got.reshape(-1, size), np.broadcast_to(want, of_team.shape))


@machines
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_neighbouring_lanes_reduce_among_themselves(lanes, simulate):
    x = np.random.default_rng(lanes).integers(-(2**31), 2**31, WARPGROUP).astype(np.int32)
    (got,) = elementwise(lambda m, x: Team(m, WARP).neighbours(maximum, x, lanes), x, simulate=simulate, dtype=np.int32)
    want = np.broadcast_to(x.reshape(-1, lanes).max(-1, keepdims=True), (WARPGROUP // lanes, lanes))
    np.testing.assert_array_equal(got, want.ravel())


# ---- memory ---------------------------------------------------------------------------------------------------------

CONDITIONS = ("all", "some", "none")


def condition_of(name: str, machine: Machine, which: int) -> Any:
    """The condition and, below, its lanes."""
    return {"all": True, "none": machine.thread < 0, "some": ((machine.thread + which) % 3).equals(0)}[name]


def lanes_of(name: str, which: int) -> np.ndarray:
    lane = np.arange(WARPGROUP)
    return {"all": lane >= 0, "none": lane < 0, "some": (lane + which) % 3 == 0}[name]


@machines
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "state"])
@pytest.mark.parametrize("load_where", CONDITIONS)
@pytest.mark.parametrize("store_where", CONDITIONS)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_loads_and_stores(size, store_where, load_where, constant, simulate):
    """Lane t reads word 37 t + 5 of its size, and writes what it got at 3 t + 1: 0 where it did not read."""
    rng = np.random.default_rng(size)
    words = max(1, size // 4)
    source, kept = (rng.integers(1, 256, (WARPGROUP + 2) * size, np.uint8) for _ in range(2))
    full = np.full(WARPGROUP * words, 7, np.int32)  # all words as they come, not only the bytes that are stored

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        lane = machine.thread
        read_from = inputs["source"] if constant else state["source"]
        loaded = machine.load(
            read_from.address + machine.widen((lane * 37 + 5) % WARPGROUP) * size,
            size,
            condition_of(load_where, machine, 0),
            constant=constant,
        )
        assert len(loaded) == words
        for i, word in enumerate(loaded):
            state["full"].store_int(word, lane * words + i)
        at = state["kept"].address + (machine.widen((lane * 3 + 1) % WARPGROUP) + 1) * size
        machine.store(at, loaded, size, condition_of(store_where, machine, 1))

    array = {"source": jnp.asarray(source)}
    state = {"kept": kept, "full": full}
    out = run(body, array if constant else {}, state if constant else state | {"source": source}, simulate=simulate)

    lane = np.arange(WARPGROUP)
    loaded = source.reshape(-1, size)[(lane * 37 + 5) % WARPGROUP] * lanes_of(load_where, 0)[:, None].astype(np.uint8)
    want = kept.copy().reshape(-1, size)
    storing = lanes_of(store_where, 1)
    want[((lane * 3 + 1) % WARPGROUP + 1)[storing]] = loaded[storing]
    np.testing.assert_array_equal(out["kept"], want.ravel())
    wide = np.zeros((WARPGROUP, 4 * words), np.uint8)  # a word is zero-extended
    wide[:, :size] = loaded
    np.testing.assert_array_equal(out["full"].view(np.uint8), wide.ravel())


@machines
def test_a_buffer_converts_what_it_loads_and_stores(simulate):
    """Each dtype with each number of neighbours, at the leading indices of a lane and at a number known beforehand."""
    rng = np.random.default_rng(13)
    shape = 2, 3, WARPGROUP, 8
    f32 = random_floats(14, math.prod(shape)).reshape(shape)
    bf16 = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    u8 = rng.integers(0, 256, shape, np.uint8)
    source = {"f32": f32, "bf16": bf16, "u8": u8}
    cases = [("f32", 1), ("f32", 2), ("f32", 4), ("bf16", 2), ("bf16", 4), ("bf16", 8), ("u8", 1), ("u8", 2), ("u8", 4)]

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        lane = machine.thread
        row = lane % 3
        for name, count in cases:
            there, target = inputs[name], state[f"{name} {count}"]
            first = select((lane & 1) > 0, lane * 0 + 8 - count, 0)  # the last neighbours, or the first ones
            if name == "u8":
                word = there.load_bytes(1, row, lane, first, count=count)
                target.store_bytes(word, 0, row, lane, first, count=count)
            else:
                target.store_floats(there.load_floats(1, row, lane, first, count=count), 0, row, lane, first)

    state = {f"{name} {count}": np.zeros_like(source[name]) for name, count in cases}
    out = run(body, jax.tree.map(jnp.asarray, source), state, simulate=simulate)
    for name, count in cases:
        want = np.zeros_like(source[name])
        for lane in range(WARPGROUP):
            first = slice(8 - count, 8) if lane % 2 else slice(0, count)
            want[0, lane % 3, lane, first] = source[name][1, lane % 3, lane, first]
        assert out[f"{name} {count}"].tobytes() == want.tobytes(), (name, count)


@machines
def test_a_load_that_is_known_not_to_happen_gives_zero(simulate):
    def body(machine: Machine, source: Buffer, out: Buffer) -> None:
        # The index is far out of bounds.
        a, b, c, d = source.load_floats(machine.thread * 1000, where=False)
        out.store_floats([(a + b) + (c + d)], machine.thread)
        out.store_floats([a], machine.thread * 1000, where=False)

    out = run(body, jnp.ones(4), spec((WARPGROUP,), F32), simulate=simulate)
    assert not out.any()


@machines
@pytest.mark.parametrize("dtypes", [(F32, F32), (ml_dtypes.bfloat16,) * 2, (ml_dtypes.bfloat16, F32)])
@pytest.mark.parametrize("condition", ["some", True, False])
@pytest.mark.parametrize("where", [True, "some"])
def test_load_either(where, condition, dtypes, simulate):
    """Where the condition picks the one array, the other's index may be out of bounds."""
    rng = np.random.default_rng(15)
    a, b = (rng.standard_normal((40, VECTOR)).astype(dtype) for dtype in dtypes)

    def body(machine: Machine, inputs: list[Buffer], out: Buffer) -> None:
        lane = machine.thread
        first = condition if isinstance(condition, bool) else lane < 40
        index_a = lane % 40 if isinstance(condition, bool) else lane
        got = load_either(
            first,
            (inputs[0], (index_a, 0)),
            (inputs[1], (lane % 40, 0)),
            where=(lane % 5) > 0 if where == "some" else True,
        )
        out.store_floats(got, lane, 0)

    got = run(body, [jnp.asarray(a), jnp.asarray(b)], spec((WARPGROUP, VECTOR), F32), simulate=simulate)
    lane = np.arange(WARPGROUP)
    first = np.full(WARPGROUP, condition) if isinstance(condition, bool) else lane < 40
    want = np.where(first[:, None], a.astype(F32)[lane % 40], b.astype(F32)[lane % 40])
    if where == "some":
        want[lane % 5 == 0] = 0
    np.testing.assert_array_equal(got, want)


@machines
def test_addresses_are_computed_in_64_bits(simulate):
    """Products and differences that would come out otherwise in 32 bits, as byte offsets into a small array."""
    source = np.arange(WARPGROUP, dtype=np.int32) * 3

    def body(machine: Machine, source: Buffer, out: Buffer) -> None:
        lane = machine.widen(machine.thread)
        far = (lane * (3 << 33)) // (3 << 31)  # 4 lane; the product's low 32 bits are all 0
        back = source.address + 4 * (WARPGROUP - 1) + machine.widen(machine.thread * -4)  # negative in 64 bits too
        for column, address in enumerate((source.address + far, back)):
            (word,) = machine.load(address, 4, True, constant=True)
            out.store_int(word, machine.thread, column)

    out = run(body, jnp.asarray(source), spec((WARPGROUP, 2), np.int32), simulate=simulate)
    np.testing.assert_array_equal(out, np.stack([source, source[::-1]], 1))


@requires_gpu
def test_an_array_of_more_than_four_gib():
    """The first and the last rows, 5 GiB apart."""
    rows = (5 << 30) // 1024

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        half = machine.thread % 64
        row = select(machine.thread < 64, half, half + (rows - 64))
        word = inputs.load_bytes(row, 1020)
        out.store_bytes(word + 1, row, 1020)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(state: jax.Array, inputs: jax.Array) -> jax.Array:
        return launch(body, name="probe", grid=(1,), inputs=inputs, state=state)

    marks = jnp.zeros((rows, 1024), jnp.uint8).at[:64].set(1).at[-64:].set(9)
    state = call(jnp.zeros((rows, 1024), jnp.uint8), marks)
    assert np.all(np.asarray(state[:64, 1020]) == 2)
    assert np.all(np.asarray(state[-64:, 1020]) == 10)
    assert int(jnp.count_nonzero(state)) == WARPGROUP * 4


@machines
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("where", CONDITIONS)
def test_shared_memory_belongs_to_a_block(size, where, simulate):
    """Lanes write their block's number and their own, and read it back permuted; where not, what was there before."""
    words, threads, blocks = max(1, size // 4), 2 * WARPGROUP, 3
    rng = np.random.default_rng(size)
    given = rng.integers(-(2**31), 2**31, (blocks, threads, words)).astype(np.int32)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        base = machine.take_shared(3)  # the next offset is aligned all the same
        base = machine.take_shared(threads * size)
        assert base == 16
        block, lane = machine.block(0), machine.thread
        machine.store_shared(lane * size + base, [machine.constant(-1, "i32")] * words, size, True)
        machine.barrier("block")
        values = [inputs.load_int(block, lane, i) for i in range(words)]
        machine.store_shared(((lane * 77 + 5) % threads) * size + base, values, size, condition_of(where, machine, 0))
        machine.barrier("block")
        for i, word in enumerate(machine.load_shared(lane * size + base, size)):
            out.store_int(word, block, lane, i)

    out = run(
        body,
        jnp.asarray(given),
        spec(given.shape, np.int32),
        simulate=simulate,
        grid=(blocks,),
        warpgroups=2,
        shared_bytes=threads * size,
    )
    lane = np.arange(threads)
    storing = {"all": lane >= 0, "none": lane < 0, "some": lane % 3 == 0}[where]
    want = np.full_like(given, -1)
    want[:, ((lane * 77 + 5) % threads)[storing]] = given[:, storing]
    mask = (1 << 8 * size) - 1 if size < 4 else -1
    np.testing.assert_array_equal(out, want & np.int32(mask))


@machines
def test_a_warpgroup_barrier_orders_what_its_lanes_do_in_device_memory_too(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane = machine.thread % WARPGROUP
        group = machine.thread // WARPGROUP
        out.store_int(machine.thread * 5, group, lane)
        machine.barrier("warpgroup")
        other = out.load_int(group, (lane + 50) % WARPGROUP)
        machine.barrier("warpgroup")
        out.store_int(other, group, lane)

    out = run(body, {}, np.zeros((3, WARPGROUP), np.int32), simulate=simulate, warpgroups=3)
    np.testing.assert_array_equal(out, np.roll(np.arange(3 * WARPGROUP).reshape(3, -1) * 5, -50, axis=1))


# ---- control --------------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_loop_carries_values_of_any_kind(count, simulate):
    x, y = random_floats(16, 200), np.arange(200, dtype=np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        def body(i: Value, carry: list[Value]) -> list[Value]:
            a, b, c = carry
            return [a.maximum(x) * 0.5, b + i * i + y, c]

        a, b, c = machine.loop(count, body, [machine.constant(1.0, "f32"), machine.constant(3, "i32"), x])
        return [a, machine.from_bits(b), c]

    a, b, c = elementwise(function, x, y, simulate=simulate, outputs=3)
    want, number = np.ones_like(x), np.full_like(y, 3)
    for i in range(count):
        want, number = np.maximum(want, x) * F32(0.5), number + i * i + y
    normal = np.abs(want) >= TINY  # see test_float_arithmetic
    np.testing.assert_array_equal(a[normal], want[normal])
    np.testing.assert_array_equal(b.view(np.int32), number)
    np.testing.assert_array_equal(c, x)


@machines
def test_a_loop_may_end_at_a_number_that_is_known_only_then(simulate):
    """The same in all lanes of a block here; carried values stay as they were where there is no turn at all."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        block = machine.block(0)

        def turn(i: Value, carry: list[Value]) -> list[Value]:
            return [carry[0] + i * 10 + machine.thread]

        (total,) = machine.loop(inputs.load_int(block), turn, [machine.constant(3, "i32")])
        out.store_int(total, block, machine.thread)

    counts = np.array([0, 1, 5, 2, 0, 9], np.int32)
    out = run(body, jnp.asarray(counts), spec((6, WARPGROUP), np.int32), simulate=simulate, grid=(6,))
    turns = counts[:, None]
    np.testing.assert_array_equal(out, 3 + 10 * (turns * (turns - 1) // 2) + turns * np.arange(WARPGROUP))


@machines
def test_a_loop_may_carry_nothing_and_store(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        def write(i: Value, carry: list[Value]) -> list[Value]:
            out.store_int(machine.thread + i * 1000, i, machine.thread)
            return carry

        assert machine.loop(4, write, []) == []

    out = run(body, {}, spec((4, WARPGROUP), np.int32), simulate=simulate)
    np.testing.assert_array_equal(out, np.arange(4)[:, None] * 1000 + np.arange(WARPGROUP))


@machines
def test_when_nests_and_takes_a_condition_known_when_the_kernel_is_built(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, block = machine.thread, machine.block(1)
        with machine.when(lane < 100):
            out.store_int(lane, block, 0, lane)
            with machine.when((lane % 2).equals(0)), machine.when(True), machine.when(block > 0):
                out.store_int(lane, block, 1, lane)
            out.store_int(lane, block, 2, lane)
        with machine.when(lane < 0):
            out.store_int(lane, block, 3, lane * 1000)
        with machine.when(False):
            out.store_int(lane, block, 3, lane)
        out.store_int(lane, block, 4, lane)

    shape = 3, 5, WARPGROUP
    out = run(body, {}, np.full(shape, -1, np.int32), simulate=simulate, grid=(1, 3))
    lane = np.arange(WARPGROUP)
    want = np.full(shape, -1, np.int32)
    want[:, [0, 2]] = np.where(lane < 100, lane, -1)
    want[1:, 1] = np.where((lane < 100) & (lane % 2 == 0), lane, -1)
    want[:, 4] = lane
    np.testing.assert_array_equal(out, want)


@machines
def test_a_grid_of_two_axes_and_several_warpgroups(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        i, j, lane = machine.block(0), machine.block(1), machine.thread
        out.store_int((i * 1000 + j) * 1000 + lane, i, j, lane)

    shape = 5, 3, 2 * WARPGROUP
    out = run(body, {}, spec(shape, np.int32), simulate=simulate, grid=shape[:2], warpgroups=2)
    i, j, lane = np.indices(shape)
    np.testing.assert_array_equal(out, (i * 1000 + j) * 1000 + lane)


@machines
@pytest.mark.parametrize("cluster", [2, 4])
def test_blocks_of_a_cluster_reach_each_others_shared_memory(cluster, simulate):
    """Every block leaves its numbers with the first of its cluster, which adds them up."""

    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, rank, block = machine.thread, machine.rank, machine.block(0)
        base = machine.take_shared(4 * cluster * WARPGROUP)
        number = block * 1000 + rank * 100 + lane
        machine.store_shared((rank * WARPGROUP + lane) * 4 + base, [number], 4, True, rank=0)
        machine.barrier("cluster")
        with machine.when(rank.equals(0)):
            total = machine.constant(0, "i32")
            for other in range(cluster):
                (word,) = machine.load_shared((lane ^ 3) * 4 + (base + 4 * other * WARPGROUP), 4)
                total = total + word
            out.store_int(total, block, lane)
        with machine.when(rank.equals(cluster - 1)):
            out.store_int(rank, block + 3, lane)

    out = run(
        body,
        {},
        np.zeros((6, WARPGROUP), np.int32),
        simulate=simulate,
        grid=(3,),
        cluster=cluster,
        shared_bytes=4 * cluster * WARPGROUP,
    )
    lane, block, rank = np.arange(WARPGROUP) ^ 3, np.arange(3)[:, None], np.arange(cluster)
    np.testing.assert_array_equal(out[:3], cluster * (block * 1000 + lane) + 100 * rank.sum())
    assert np.all(out[3:] == cluster - 1)


@machines
def test_one_array_may_stand_in_for_another(simulate):
    a, b = (np.random.default_rng(seed).standard_normal((WARPGROUP, 4)).astype(F32) for seed in (23, 24))

    def body(machine: Machine, inputs: list[Buffer], out: Buffer) -> None:
        lane = machine.thread
        out.store_floats(inputs[0].instead((lane & 1) > 0, inputs[1]).load_floats(lane, 0), lane, 0)

    out = run(body, [jnp.asarray(a), jnp.asarray(b)], spec(a.shape, F32), simulate=simulate)
    np.testing.assert_array_equal(out, np.where(np.arange(WARPGROUP)[:, None] % 2 == 1, b, a))


# ---- rows -----------------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("team", [WARP, WARPGROUP])
@pytest.mark.parametrize("dim", [4, 8, 128, 136, 204, 512, 516])
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16])
def test_a_row_of_any_size(dtype, dim, team, simulate):
    """Channels [first, first + dim) of one array go to [0, dim) of another's rows; what lies past them stays."""
    first, rows, teams = 12, 7, WARPGROUP // team
    rng = np.random.default_rng(dim)
    source = rng.standard_normal((rows, first + dim + 4)).astype(dtype)
    other = rng.standard_normal((rows, dim)).astype(dtype)
    kept = rng.standard_normal((rows, dim + 8)).astype(dtype)

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        row = Row(Team(machine, team), dim)
        n = machine.block(0) * teams + machine.thread // team
        inside = n < rows
        x = row.load(inputs["source"], n, first=first, where=inside)
        row.store(state["kept"], row.map(lambda a, b: a * 2.0 - b, x, row.constant(1.0)), n, where=inside)
        # Odd rows of the one array, even rows of the other.
        picked = row.load_either(
            (n & 1) > 0, (inputs["source"], (n,)), (inputs["other"], (n,)), first=(first, 0), where=inside
        )
        row.store(state["picked"], picked, n, where=inside)
        bound = dim // 8 * VECTOR
        below = [select(row.before(i, bound), machine.constant(1.0, "f32"), 0.0) for i in range(row.steps)]
        row.store(state["below"], [[flag] * VECTOR for flag in below], n, where=inside)

    out = run(
        body,
        {"source": jnp.asarray(source), "other": jnp.asarray(other)},
        {"kept": kept, "picked": np.zeros((rows, dim), dtype), "below": np.zeros((rows, dim), dtype)},
        simulate=simulate,
        grid=(-(-rows // teams),),
    )
    part = source[:, first : first + dim]
    want = kept.copy()
    want[:, :dim] = (part.astype(F32) * 2 - 1).astype(dtype)
    assert out["kept"].tobytes() == want.tobytes()
    odd = (np.arange(rows) % 2 == 1)[:, None]
    assert out["picked"].tobytes() == np.where(odd, part, other).tobytes()
    below = np.broadcast_to(np.arange(dim) < dim // 8 * VECTOR, (rows, dim))
    np.testing.assert_array_equal(out["below"].astype(bool), below)


# ---- what the simulator catches -------------------------------------------------------------------------------------


def simulated(
    body: Callable[..., None], size: int = 4 * WARPGROUP, warpgroups: int = 1, grid: Any = (1,)
) -> np.ndarray:
    """Run a body of (machine, constant input, state), both int32 [size]."""
    inputs, state = jnp.arange(size, dtype=jnp.int32), np.zeros(size, np.int32)
    return run(body, inputs, state, simulate=True, warpgroups=warpgroups, grid=grid)


def past_the_end(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread + (3 * WARPGROUP + 1))


def before_the_start(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(inputs.load_int(machine.thread - 1), machine.thread)


def across_the_end(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.load(inputs.address + machine.widen(machine.thread) * 16 + 8, 16, True, constant=True)


def far_away(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(dataclasses.replace(inputs, address=machine.widen(machine.thread)).load_int(0), machine.thread)


def past_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 16, [machine.thread], 4, True)


def misaligned_load(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.load(inputs.address + machine.widen(machine.thread) * 4, 8, True, constant=True)


def misaligned_store(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store(out.address + machine.widen(machine.thread) * 8, [machine.thread] * 4, 16, machine.thread.equals(3))


def misaligned_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 4 + 2, [machine.thread], 4, machine.thread < 9)


def two_writers(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread // 2)


def two_writers_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread // 2 * 4, [machine.thread], 4, True)


def two_writers_in_turn(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=machine.thread > 3)
    out.store_int(machine.thread, machine.thread + 1, where=machine.thread.equals(3))


def two_blocks_write(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.block(0), machine.thread)
    machine.barrier("block")  # orders nothing between blocks


def writer_meets_reader(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.load_int(machine.thread)
    out.store_int(machine.thread, machine.thread ^ 1)


def writer_meets_several_readers(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.load_int(machine.thread // 2)
    with machine.when(machine.thread < 1):
        out.store_int(machine.thread, machine.thread)


def reader_meets_writer(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)
    out.load_int(machine.thread ^ 1)


def reader_meets_writer_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 4, [machine.thread], 4, True)
    machine.load_shared((machine.thread ^ 1) * 4, 4)


def reader_meets_writer_of_another_warpgroup(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)
    machine.barrier("warpgroup")
    out.load_int(machine.thread ^ WARPGROUP)


def barrier_in_some_lanes(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < WARP):
        machine.barrier("warpgroup")


def block_barrier_in_one_warpgroup(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < WARPGROUP):
        machine.barrier("block")


def shuffle_in_half_a_warp(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < 16):
        machine.shuffle_xor(machine.thread, 1)


def write_to_an_input(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    inputs.store_int(machine.thread, machine.thread)


def cached_load_of_state(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    dataclasses.replace(out, constant=True).load_int(machine.thread)


def too_much_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.take_shared(1025)


FAULTS: list[tuple[Callable[..., None], str]] = [
    (past_the_end, "access of 4 bytes at"),
    (before_the_start, "access of 4 bytes at -4|outside of all buffers"),
    (across_the_end, "access of 16 bytes at"),
    (far_away, "outside of all buffers"),
    (past_shared_memory, "past the block's shared memory"),
    (misaligned_load, "8 bytes is misaligned"),
    (misaligned_store, "16 bytes is misaligned"),
    (misaligned_in_shared_memory, "4 bytes is misaligned"),
    (two_writers, "two lanes write the same bytes"),
    (two_writers_in_shared_memory, "two lanes write the same bytes"),
    (two_writers_in_turn, "a lane writes what another one wrote"),
    (two_blocks_write, "two lanes write the same bytes"),
    (writer_meets_reader, "a lane writes what another one read"),
    (writer_meets_several_readers, "a lane writes what another one read"),
    (reader_meets_writer, "a lane reads what another one writes"),
    (reader_meets_writer_in_shared_memory, "a lane reads what another one writes"),
    (reader_meets_writer_of_another_warpgroup, "a lane reads what another one writes"),
    (barrier_in_some_lanes, "a warpgroup barrier that only some of its lanes reach"),
    (block_barrier_in_one_warpgroup, "a block barrier that only some of its lanes reach"),
    (shuffle_in_half_a_warp, "a shuffle in a warp of which only some lanes are active"),
    (write_to_an_input, "a constant input is written"),
    (cached_load_of_state, "read-only cache of what the kernel may write"),
    (too_much_shared_memory, "takes 1040 bytes of shared memory, its launch has 1024"),
]


@pytest.mark.parametrize(("body", "message"), FAULTS, ids=[body.__name__ for body, _ in FAULTS])
def test_the_simulator_refuses(body, message):
    grid = (2,) if body is two_blocks_write else (1,)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(body, warpgroups=2 if body is not past_the_end else 1, grid=grid)


def orderly(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    """What some of the faults above do, with barriers in between; and what needs none."""
    lane = machine.thread
    machine.store_shared(lane * 4, [lane], 4, True)
    out.store_int(lane, lane)
    machine.barrier("block")
    (other,) = machine.load_shared((lane ^ WARPGROUP) * 4, 4)
    far = out.load_int(lane ^ WARPGROUP)
    machine.barrier("warpgroup")
    near = out.load_int(lane ^ 1)
    first = out.load_int(0)
    machine.barrier("block")
    with machine.when(lane < WARPGROUP):  # a whole warpgroup
        machine.barrier("warpgroup")
    with machine.when((lane // WARP).equals(1)):  # a whole warp
        machine.shuffle_xor(lane, 1)
    # What another lane has written and read, and (at 0) all lanes have read.
    out.store_int(other * 1000000 + far * 1000 + near + first, lane ^ 2)


def test_the_simulator_accepts_the_same_with_barriers():
    lane = np.arange(2 * WARPGROUP) ^ 2
    want = (lane ^ WARPGROUP) * 1001000 + (lane ^ 1)
    np.testing.assert_array_equal(simulated(orderly, warpgroups=2)[: 2 * WARPGROUP], want)


def test_the_simulator_knows_which_array_a_lane_reads():
    """One load may read several arrays, and each is checked by its own bounds."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        short = inputs.address
        long = out.address
        words = machine.load(select(lane < 64, short, long) + machine.widen(lane) * 4, 4, True, constant=False)
        machine.barrier("block")
        out.store_int(words[0], lane)

    out = simulated(body, size=WARPGROUP)
    np.testing.assert_array_equal(out, np.where(np.arange(WARPGROUP) < 64, np.arange(WARPGROUP), 0))


def test_a_launch_of_no_elements_or_no_blocks_does_nothing():
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        raise AssertionError("not to be run")

    assert run(body, {}, np.zeros((0, 4), np.int32), simulate=True).shape == (0, 4)
    kept = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(run(body, {}, kept, simulate=True, grid=(0,)), kept)
