"""Queries that are made in their product, compared with the product and its conversion one after the other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.launches import launch_many
from pallas_kernels.products.many.tiling import tiling_of_heads
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product, random_angles

EPS = 1e-6
on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """A product whose outputs are heads."""

    rows: int
    heads: int
    inputs: int
    rope_dim: int = 64
    multiprocessors: int = 0  # in clusters of two, which run at once; 0 for those of the GPU

    def __str__(self) -> str:
        at_once = f", {self.multiprocessors} multiprocessors" if self.multiprocessors else ""
        return f"{self.rows} rows {self.inputs} to {self.heads} heads, rope of {self.rope_dim}{at_once}"

    @property
    def product(self) -> Product:
        return Product(rows=self.rows, outputs=512 * self.heads, inputs=self.inputs, activations="fp8")

    @functools.cached_property
    def angles(self) -> np.ndarray:
        return random_angles(self.rows, self.rope_dim)

    def run(self, x: jax.Array | None = None, *, simulate: bool) -> np.ndarray:
        form, (weight, scales), x = self.product.form, self.product.weight, self.product.x if x is None else x
        assert scales is not None
        if not self.multiprocessors:
            run = functools.partial(pk.product_of_queries, eps=EPS, simulate=simulate)
            return np.asarray(jax.jit(lambda x: run(x, weight, scales, form, jnp.asarray(self.angles)))(x))
        gpu = dataclasses.replace(HOPPER, clusters={2: self.multiprocessors // 2})
        weight, scales = weight.view(jnp.uint8), scales.view(jnp.uint8)
        given = ProductInputs(x=x, weight=weight, scales=scales, angles=jnp.asarray(self.angles))
        tiling = tiling_of_heads(self.rows, *weight.shape, form, Heads(dim=512, eps=EPS), gpu)
        launch = functools.partial(launch_many, tiling, dtype=jnp.float16, simulate=simulate)
        return np.asarray(jax.jit(launch)(given)).reshape(self.rows, self.heads, 512)

    def expected(self, *, simulate: bool) -> np.ndarray:
        form, (weight, scales) = self.product.form, self.product.weight
        assert scales is not None

        def two_launches(x: jax.Array) -> jax.Array:
            product = pk.product(x, weight, scales, form, simulate=simulate).reshape(1, self.rows, self.heads, 512)
            return pk.attention_queries(product, jnp.asarray(self.angles)[None], eps=EPS, simulate=simulate)[0]

        return np.asarray(jax.jit(two_launches)(self.product.x))


# Rows that do not fill a tile; blocks with several tiles, with fewer in the last turn; several chunks; other ropes.
CASES = [
    Queries(rows=200, heads=3, inputs=128, multiprocessors=4),
    Queries(rows=65, heads=1, inputs=256),
    Queries(rows=128, heads=2, inputs=128, rope_dim=256),
    Queries(rows=256, heads=2, inputs=384, rope_dim=16, multiprocessors=2),
]


def check(got: np.ndarray, want: np.ndarray) -> None:
    """Compare what has the same products, but sums of squares in another order.

    They are off by a few 2^-24, so that an element may round to the f16 beside it. One that its rope nearly cancels is
    off by as much of its pair, which is below 23.
    """
    assert got.dtype == np.float16
    ulp = np.spacing(np.abs(want)).astype(np.float32)
    assert np.all(np.abs(got.astype(np.float32) - want.astype(np.float32)) <= np.maximum(ulp, 2.0**-19))
    assert np.mean(got != want) < 2e-3  # some 2^-22 of an element over its f16's 2^-11


@on_hopper
@pytest.mark.parametrize("case", first_of(CASES, count=2), ids=str)
def test_queries_are_those_of_two_launches(case, simulate):
    got = case.run(simulate=simulate)
    check(got, case.expected(simulate=simulate))
    assert not got[-1].any()  # a row of zeros


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("rows", [100, 4096])
def test_queries_of_a_model_are_those_of_two_launches(rows):
    case = Queries(rows=rows, heads=64, inputs=1024)
    check(case.run(simulate=False), case.expected(simulate=False))


@on_hopper
def test_a_row_that_is_not_finite_spoils_no_other(simulate):
    case = CASES[1]
    spoilt = case.run(case.product.x.at[1].set(jnp.nan), simulate=simulate)
    assert np.isnan(spoilt[1]).all()
    want = case.run(simulate=simulate)
    np.testing.assert_array_equal(np.delete(spoilt, 1, 0), np.delete(want, 1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=64), "too few blocks of whole heads"),
        (dict(shape=(768, 128)), "heads of 512, got 768 outputs and heads of 512"),
        (dict(head_dim=256), "heads of 512, got 512 outputs and heads of 256"),
        (dict(rope_dim=24), "a multiple of 16 up to 256, got 24"),
        (dict(form=pk.WeightForm(block=(128, 128))), "activations='fp8'"),
        (dict(form=pk.WeightForm(block=(64, 128), activations="fp8")), "blocks of a scale"),
        (dict(shape=(32, 128)), "a multiple of 64 outputs"),
    ],
)
def test_what_no_kernel_serves_is_named(change, message):
    form = pk.WeightForm(block=(128, 128), activations="fp8")
    sizes: dict[str, Any] = dict(shape=(512, 128), form=form, rows=65, head_dim=512, rope_dim=64)
    assert pk.unsupported_product_of_queries(**sizes) is None
    reason = pk.unsupported_product_of_queries(**(sizes | change))
    assert reason is not None
    assert message in reason
    if change.keys() == {"rope_dim"}:
        case = Queries(rows=65, heads=1, inputs=128, rope_dim=24)
        with pytest.raises(ValueError, match=message):
            case.run(simulate=True)
