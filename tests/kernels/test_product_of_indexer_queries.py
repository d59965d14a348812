"""Queries of the indexer that are made in their product, compared with the product and its conversion."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS, KeyRows
from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.keys import DIM, KeyHeads
from pallas_kernels.products.launches import launch_many
from pallas_kernels.products.many.tiling import Tiling, tiling_of_key_heads
from tests.support.cases import first_of
from tests.support.kernel_cases import same_bytes
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product, random_angles

on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """A product whose outputs are heads of the indexer."""

    rows: int
    heads: int
    inputs: int
    key_format: str
    rope_dim: int = 64
    multiprocessors: int = HOPPER.multiprocessors

    def __str__(self) -> str:
        at_once = "" if self.multiprocessors == HOPPER.multiprocessors else f", {self.multiprocessors} multiprocessors"
        sizes = f"{self.rows} rows {self.inputs} to {self.heads} heads"
        return f"{sizes}, rope of {self.rope_dim}, {self.key_format}{at_once}"

    @property
    def product(self) -> Product:
        return Product(rows=self.rows, outputs=DIM * self.heads, inputs=self.inputs, activations="fp8")

    @functools.cached_property
    def angles(self) -> np.ndarray:
        return random_angles(self.rows, self.rope_dim)

    @property
    def key_row(self) -> Any:
        return INDEXER_FORMATS[self.key_format].row(DIM)

    @property
    def tiling(self) -> Tiling:
        keys = KEY_FORMATS[self.key_format]
        assert isinstance(keys, Fp4Keys)
        gpu = dataclasses.replace(HOPPER, multiprocessors=self.multiprocessors)
        sizes = self.rows, DIM * self.heads, self.inputs
        return tiling_of_key_heads(*sizes, self.product.form, KeyHeads(keys=keys), gpu)

    def given(self, x: jax.Array) -> ProductInputs:
        weight, scales = self.product.weight
        assert scales is not None
        return ProductInputs(x=x, weight=weight.view(jnp.uint8), scales=scales.view(jnp.uint8))

    def run(self, x: jax.Array | None = None, *, simulate: bool) -> KeyRows:
        x = self.product.x if x is None else x
        given = dataclasses.replace(self.given(x), angles=jnp.asarray(self.angles))
        rows = jax.jit(functools.partial(launch_many, self.tiling, key_row=self.key_row, simulate=simulate))(given)
        return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(self.rows, self.heads, -1), rows)

    def expected(self, *, simulate: bool) -> KeyRows:
        """The same sums, converted by the kernel that takes products."""
        tiling = dataclasses.replace(self.tiling, key_heads=None)

        def two_launches(x: jax.Array) -> Any:
            product = launch_many(tiling, self.given(x), jnp.float32, simulate=simulate)
            given = product.reshape(1, self.rows, self.heads, DIM), jnp.asarray(self.angles)[None], self.key_row
            return pk.indexer_queries(*given, key_format=self.key_format, simulate=simulate)

        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], jax.jit(two_launches)(self.product.x))


# Rows that do not fill a tile; tiles of one head and of two; blocks with several tiles; several chunks; other ropes.
CASES = [
    Queries(rows=200, heads=2, inputs=256, key_format="mxfp4", multiprocessors=1),
    Queries(rows=65, heads=3, inputs=128, key_format="nvfp4"),
    Queries(rows=130, heads=4, inputs=128, key_format="nvfp4", rope_dim=128, multiprocessors=2),
    Queries(rows=128, heads=1, inputs=128, key_format="mxfp4", rope_dim=16),
]


@on_hopper
@pytest.mark.parametrize("case", first_of(CASES, count=2), ids=str)
def test_queries_have_the_bytes_of_two_launches(case, simulate):
    got, want = case.run(simulate=simulate), case.expected(simulate=simulate)
    for name in ("codes", "scale"):
        same_bytes(name, getattr(got, name), getattr(want, name))


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [100, 4096])
def test_queries_of_a_model_have_the_bytes_of_two_launches(rows, key_format):
    case = Queries(rows=rows, heads=64, inputs=1024, key_format=key_format)
    got, want = case.run(simulate=False), case.expected(simulate=False)
    for name in ("codes", "scale"):
        same_bytes(name, getattr(got, name), getattr(want, name))


@on_hopper
def test_a_row_that_is_not_finite_spoils_no_other(simulate):
    case = CASES[1]
    keys = INDEXER_FORMATS[case.key_format]
    spoilt = np.asarray(keys.decode(case.run(case.product.x.at[1].set(jnp.nan), simulate=simulate)))
    assert np.isnan(spoilt[1]).all()
    want = np.asarray(keys.decode(case.run(simulate=simulate)))
    np.testing.assert_array_equal(np.delete(spoilt, 1, 0), np.delete(want, 1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key_dim=64), "heads of 128 and a rope_dim that is a multiple of 16, got 64 and 64"),
        (dict(rope_dim=24), "heads of 128 and a rope_dim that is a multiple of 16, got 128 and 24"),
        (dict(rope_dim=132), "a multiple of 4 up to 128, got 132"),
        (dict(key_format="bf16"), "a 4-bit format, got 'bf16'"),
        (dict(form=pk.WeightForm(block=(128, 128))), "activations='fp8'"),
        (dict(shape=(64, 128)), "got 64 outputs and heads of 128"),
        (dict(form=pk.WeightForm(block=(64, 128), activations="fp8")), "blocks of a scale"),
    ],
)
def test_what_no_kernel_serves_is_named(change, message):
    form = pk.WeightForm(block=(128, 128), activations="fp8")
    sizes: dict[str, Any] = dict(shape=(256, 128), form=form, rows=65, key_dim=128, rope_dim=64, key_format="mxfp4")
    assert pk.unsupported_product_of_indexer_queries(**sizes) is None
    reason = pk.unsupported_product_of_indexer_queries(**(sizes | change))
    assert reason is not None
    assert message in reason
