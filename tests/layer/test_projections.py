"""Products with stored weights in plain JAX, against float64: every form, and what is in memory meanwhile."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.layer import stored_products
from dsv4jax.layer.ops import PROJECTIONS
from dsv4jax.weights.stored import StoredWeight, as_bytes
from tests.support.cases import first_of
from tests.support.driver import assert_same
from tests.support.in_place import memory_of
from tests.support.machines import no_gpu, simulated
from tests.support.second_derivatives import SAME, relative_error, with_second
from tests.support.stored import random_stored, values_of

# Sizes with several tiles of rows and several blocks; whole and partial blocks; groups within blocks of rows.
WIDTH = 1024
CASES = {
    "128 x 128": dict(shape=(512, WIDTH), block=(128, 128), groups=1),
    "32 x 32": dict(shape=(512, WIDTH), block=(32, 32), groups=1),
    "grouped": dict(shape=(512, WIDTH), block=(128, 128), groups=4),
    "groups within blocks": dict(shape=(96, 160), block=(128, 128), groups=6),
    "partial blocks": dict(shape=(330, 200), block=(128, 128), groups=1),
    "tiny": dict(shape=(3, 5), block=(128, 128), groups=1),
}
FORMS = {
    "in tiles": stored_products._in_tiles,
    "with scaled inputs": stored_products._with_scaled_inputs,
}
# Of FP8 on a GPU, relative likewise: an instruction cuts its 32 products and the sum before them to 13 bits below the
# largest one's first, and so errs by 33 times 2^-13 of that one, which is some sixth of the sum of their sizes.
TENSOR_CORE_SUMS = 2.0**-10
F32_SUMS = 2.0**-20  # error of f32 sums of up to 1024 products, relative to the sum of their sizes: some 2^-24 * 8


linear = jax.jit(d4.linear)  # each operation by itself takes as long to compile as all together


def inputs(seed: int, tokens: int, groups: int, width: int, dtype: Any) -> jax.Array:
    x = np.random.default_rng(seed).standard_normal((tokens, groups, width), np.float32)
    return jnp.asarray(x.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x)


def exact(x: np.ndarray, weight: StoredWeight, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """(x times the weight, the sum of the sizes of the products), float64 [tokens, groups, out / groups]."""
    wide, x = values_of(weight).reshape(groups, -1, weight.shape[1]), np.asarray(x).astype(np.float64)
    products = np.einsum("mgi,goi->mgo", x, wide), np.einsum("mgi,goi->mgo", np.abs(x), np.abs(wide))
    return products[0], products[1]


def assert_close(found: jax.Array, wanted: tuple[np.ndarray, np.ndarray], error: float = F32_SUMS) -> None:
    assert found.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(found) - wanted[0]) <= error * wanted[1])


@pytest.mark.parametrize(("case", "dtype"), first_of(itertools.product(CASES, ["bfloat16", "float32"]), count=3))
def test_products_are_exact_but_for_the_order_of_f32_sums(case, dtype):
    shape, block, groups = (CASES[case][name] for name in ("shape", "block", "groups"))
    weight = random_stored(1, shape, block)
    given = as_bytes(weight.codes), as_bytes(weight.scales)
    for tokens in (1, 5):
        x = inputs(tokens, tokens, groups, shape[1], dtype)
        wanted = exact(np.asarray(x), weight, groups)
        for form in FORMS.values():
            assert_close(jax.jit(functools.partial(form, block=block, groups=groups))(x, *given), wanted)
    # Few tokens and many, through the public function, which takes any leading axes.
    for tokens in (1, stored_products.FEW, stored_products.FEW + 1):
        x = inputs(tokens, tokens, groups, shape[1], dtype)
        rows = x[:, None] if groups > 1 else x
        found = jax.jit(lambda x: d4.linear(x, weight, groups=groups))(rows)
        assert found.shape == (*rows.shape[:-1], shape[0] // groups)
        assert_close(found.reshape(tokens, groups, -1), exact(np.asarray(x), weight, groups))


@pytest.mark.parametrize("groups", [1, 4])
def test_wide_weights_take_the_same_calls(groups):
    weight = random_stored(2, (512, WIDTH)).widened(jnp.bfloat16)
    x = inputs(0, 3, groups, WIDTH, "bfloat16")
    found = d4.linear(x if groups > 1 else x[:, 0], weight, groups=groups).reshape(3, groups, -1)
    wanted = np.einsum("mgi,goi->mgo", np.float64(x), np.asarray(weight).astype(np.float64).reshape(groups, -1, WIDTH))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=F32_SUMS * WIDTH * float(jnp.max(jnp.abs(weight))) * 4)
    narrow = d4.linear(x if groups > 1 else x[:, 0], weight, jnp.bfloat16, groups)
    assert_same(narrow.reshape(found.shape), found.astype(jnp.bfloat16))


def test_rows_that_are_nan_stay_by_themselves():
    weight = random_stored(3, (512, WIDTH))
    for activations in ("bf16", "fp8"):
        weight = StoredWeight(codes=weight.codes, scales=weight.scales, activations=activations)
        x = inputs(0, 4, 1, WIDTH, "bfloat16")[:, 0]
        bad = x.at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
        clean, dirty = linear(x, weight), linear(bad, weight)
        assert_same(clean[jnp.array([0, 3])], dirty[jnp.array([0, 3])])
        assert not np.isfinite(dirty[1]).any()
        assert not np.isfinite(dirty[2]).any()


# ---- activations rounded to FP8


def rounded_inputs(x: np.ndarray) -> np.ndarray:
    """x as DeepSeek's inference rounds it, float64: E4M3 with a power of two for each token and 128 inputs."""
    tokens, groups, width = x.shape
    padded = np.zeros((tokens, groups, -(-width // 128) * 128), np.float32)
    padded[..., :width] = x
    parts = padded.reshape(tokens, groups, -1, 128)
    amax = np.maximum(np.abs(parts).max(-1, keepdims=True), np.float32(1e-4))
    # log2 in float64 is exact for powers of two, and amax is no nearer to one than 2^-24.
    scale = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / 448)))
    codes = np.clip(parts / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(padded.shape)[..., :width]


@pytest.mark.parametrize(
    ("case", "dtype"), first_of(list(zip(CASES, itertools.cycle(["bfloat16", "float32"]))), count=3)
)
def test_activations_are_rounded_by_groups_of_128(case, dtype):
    shape, block, groups = (CASES[case][name] for name in ("shape", "block", "groups"))
    weight = random_stored(4, shape, block, "fp8")
    for tokens in (1, 7, 2 * stored_products.FEW):
        x = np.array(inputs(tokens, tokens, groups, shape[1], dtype))
        x[0] *= 2.0**-20  # below 1e-4
        wanted = exact(rounded_inputs(x.astype(np.float32)), weight, groups)
        rows = jnp.asarray(x) if groups > 1 else jnp.asarray(x[:, 0])
        found = jax.jit(lambda rows: d4.linear(rows, weight, groups=groups))(rows)
        on_gpu = no_gpu() is None and dtype == "bfloat16"
        assert_close(found.reshape(tokens, groups, -1), wanted, TENSOR_CORE_SUMS if on_gpu else F32_SUMS)


def test_a_power_of_two_times_448_is_not_scaled_down_further():
    weight = StoredWeight(
        codes=jnp.eye(128, dtype=jnp.float8_e4m3fn), scales=jnp.ones((1, 1), jnp.float8_e8m0fnu), activations="fp8"
    )
    for exponent in (-10, 0, 9):
        x = np.full((1, 128), 2.0**exponent, np.float32)
        x[0, 0] *= 448
        assert_same(linear(jnp.asarray(x), weight), jnp.asarray(x))  # both are codes times 2^exponent


def test_rounding_activations_costs_what_the_page_says():
    """The relative error of a product, by norm, of normally distributed inputs: docs/support.md gives it."""
    weight, x = random_stored(5, (512, WIDTH)), inputs(0, 64, 1, WIDTH, "bfloat16")[:, 0]
    rounds = StoredWeight(codes=weight.codes, scales=weight.scales, activations="fp8")
    plain, rounded = (np.asarray(linear(x, one)) for one in (weight, rounds))
    error = np.linalg.norm(rounded - plain) / np.linalg.norm(plain)
    # E4M3 rounds a number by at most 2^-4 of its size; the mean over a binade of the squares is 2.6 % of its size.
    assert 0.015 < error < 0.035


# ---- memory

LARGE = (4096, 1024)  # a weight of 4 MiB in FP8


def temporaries(weight: Any, tokens: int, dtype: Any) -> tuple[int, str]:
    """(bytes of temporaries, HLO) of a product with a weight that is an argument."""
    x = jax.ShapeDtypeStruct((tokens, weight.shape[1]), dtype)
    compiled = jax.jit(lambda x, weight: d4.linear(x, weight, backend="xla")).lower(x, weight).compile()
    return memory_of(compiled).temp_size_in_bytes, compiled.as_text() or ""


def shapes_in(hlo: str) -> set[tuple[str, int]]:
    """(dtype, numbers) of every array in a module."""
    found = re.findall(r"\b(pred|[a-z]+\d+\w*)\[([\d,]+)\]", hlo)
    return {(dtype, math.prod(int(size) for size in sizes.split(","))) for dtype, sizes in found}


@simulated  # tests.audits.test_weights_in_steps compiles whole steps for a GPU
@pytest.mark.parametrize(("tokens", "dtype"), [(1, jnp.bfloat16), (8, jnp.float32), (64, jnp.bfloat16)])
def test_no_wide_copy_of_a_weight_is_made_in_decode(tokens, dtype):
    weight = jax.eval_shape(lambda: random_stored(0, LARGE))
    numbers = math.prod(LARGE)
    memory, hlo = temporaries(weight, tokens, dtype)
    wide = {name for name, size in shapes_in(hlo) if size >= numbers}
    assert wide <= {"f8e4m3fn", "u8"}, wide
    # The codes as bytes, a tile in f32 and in bf16, and products in f32, twice as their axes are exchanged.
    assert memory < numbers + 6 * stored_products.TILE + 3 * 4 * tokens * LARGE[0] + (1 << 20)
    _, many = temporaries(weight, 65, dtype)
    assert {name for name, size in shapes_in(many) if size >= numbers} & {"f32", "bf16"}  # the test would notice one


def test_rounded_activations_widen_a_part_of_the_weight_at_a_time():
    weight = jax.eval_shape(lambda: random_stored(0, LARGE, activations="fp8"))
    for tokens in (1, 256):
        _, hlo = temporaries(weight, tokens, jnp.bfloat16)
        assert {name for name, size in shapes_in(hlo) if size >= math.prod(LARGE)} <= {"f8e4m3fn", "u8"}


# ---- derivatives, and what is refused


@pytest.mark.parametrize(("tokens", "activations"), [(3, "fp8"), (65, "bf16")])
def test_the_derivative_by_x_is_that_of_the_exact_product(tokens, activations):
    weight = random_stored(6, (512, WIDTH), activations=activations)
    x, direction = (jnp.asarray(inputs(seed, tokens, 4, WIDTH, "float32")) for seed in (0, 1))
    by_y = np.random.default_rng(2).standard_normal((tokens, 4, 128), np.float32)
    product = jax.jit(lambda x: d4.linear(x, weight, groups=4))
    (back,) = jax.vjp(product, x)[1](jnp.asarray(by_y))
    wide = values_of(weight).reshape(4, 128, WIDTH)
    scale = np.einsum("mgo,goi->mgi", np.abs(by_y), np.abs(wide))
    assert np.all(np.abs(back - np.einsum("mgo,goi->mgi", by_y, wide)) <= F32_SUMS * scale)
    assert_close(jax.jvp(product, (x,), (direction,))[1], exact(np.asarray(direction), weight, 4))


def test_the_second_derivative_by_x_is_that_of_a_linear_function_at_the_rounded_product():
    """Of the sum of sin(y) by_y, where y is the product of x rounded to FP8, and dy the exact one."""
    weight = random_stored(6, (512, WIDTH), activations="fp8")
    x, direction = (jnp.asarray(inputs(seed, 3, 4, WIDTH, "float32")) for seed in (0, 1))
    by_y = np.random.default_rng(2).standard_normal((3, 4, 128), np.float32)
    product = jax.jit(lambda x: d4.linear(x, weight, groups=4))
    _, second = with_second(lambda x: jnp.sum(jnp.sin(product(x)) * by_y))(x, direction)
    along, _ = exact(np.asarray(direction), weight, 4)
    of_y = -np.sin(np.asarray(product(x), np.float64)) * by_y * along
    assert relative_error(second, np.einsum("mgo,goi->mgi", of_y, values_of(weight).reshape(4, 128, WIDTH))) < SAME


@pytest.mark.parametrize(
    ("rows", "outputs", "has_kernel"),
    [
        *[(1, 1024, True), (1, 2624, False), (2, 2624, True), (128, 2624, True), (129, 2624, False)],
        *[(1, 32768, False), (2, 32768, False), (129, 1024, False)],
    ],
)
def test_wide_weights_have_a_kernel_where_it_is_faster(rows, outputs, has_kernel):
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((outputs, 4096), jnp.bfloat16)
    project = functools.partial(d4.linear, backend="pallas_simulated")
    assert ("pure_callback" in str(jax.make_jaxpr(project)(x, weight))) == has_kernel


def test_a_derivative_by_a_stored_weight_is_refused():
    weight = random_stored(7, (128, 128))
    with pytest.raises(ValueError, match="a weight stored as FP8 has no derivative: differentiate by the inputs"):
        jax.grad(lambda weight: jnp.sum(d4.linear(jnp.ones((2, 128)), weight)))(weight)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 3, 128), dict(groups=3), "groups must divide the 256 rows of the weight, got 3"),
        ((2, 128), dict(groups=0), "groups must be an integer of at least 1, got 0"),
        ((2, 128), dict(dtype=jnp.float16), "dtype must be one of .*, got 'float16'"),
        ((2, 128), dict(backend="cuda"), "backend must be None or one of"),
    ],
)
def test_what_does_not_fit_is_refused(shape, options, message):
    for weight in (random_stored(0, (256, 128)), jnp.ones((256, 128))):
        with pytest.raises(ValueError, match=message):
            d4.linear(jnp.ones(shape), weight, **options)


@pytest.mark.parametrize(
    ("x", "groups", "message"),
    [
        (jnp.ones((2, 100)), 1, r"\[\.\.\., in=128\], got float32\[2, 100\]"),
        (jnp.ones((2, 3, 128)), 4, r"\[\.\.\., groups=4, in=128\], got float32\[2, 3, 128\]"),
        (jnp.ones((128,)), 2, r"\[\.\.\., groups=2, in=128\], got float32\[128\]"),
        (jnp.ones((2, 128), jnp.int32), 1, r"\[\.\.\., in=128\], got int32\[2, 128\]"),
        ([[1.0] * 128], 1, r"\[\.\.\., in=128\], got list"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(x, groups, message):
    for weight in (random_stored(0, (256, 128)), jnp.ones((256, 128))):
        with pytest.raises(AssertionError, match=f"x: expected float32 or bfloat16 {message}"):
            d4.linear(x, weight, groups=groups)


@simulated
def test_operand_rows_of_groups_give_what_an_array_of_them_gives():
    """Bit for bit, with an axis of groups."""
    weight = random_stored(2, (4 * 64, 256))
    x = jax.random.normal(jax.random.key(1), (3, 4, 256), jnp.bfloat16)
    projections = PROJECTIONS["pallas_simulated"]
    project = jax.jit(lambda x: projections.linear(x, weight, groups=4))
    found, want = project(pk.OperandRows.of(x.reshape(3, -1))), project(x)
    assert found.shape == want.shape == (3, 4, 64)
    np.testing.assert_array_equal(found, want)
