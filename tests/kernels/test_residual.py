"""Products that are added to a residual by their own kernel, compared with the sum of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language import target
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.launches import fastest_layout
from tests.support.cases import first_of
from tests.support.machines import MACHINES
from tests.support.product_cases import Product

machines = pytest.mark.parametrize("simulate", MACHINES)

# One row; rows and outputs that do not fill the last stores; as many as a block has, with x copied chunk by chunk; FP8
# activations; groups; parts of the inputs in several blocks, as the output projection of a layer has them.
CASES = [
    Product(rows=1, outputs=128, inputs=256),
    Product(rows=17, outputs=192, inputs=384, activations="fp8"),
    Product(rows=64, outputs=128, inputs=512, groups=2),
    Product(rows=40, outputs=64, inputs=256, block=None),
    Product(rows=9, outputs=128, inputs=2048),
]
# More rows than that kernel takes, to which the product is added in place: tiles that rows do not fill, blocks that
# share a tile, and rows that are rounded.
MANY = [
    Product(rows=150, outputs=256, inputs=128, activations="fp8"),
    Product(rows=130, outputs=128, inputs=512),
    Product(rows=80, outputs=128, inputs=1024, activations="fp8"),
    Product(rows=600, outputs=128, inputs=128, activations="fp8"),
    Product(rows=600, outputs=128, inputs=128),
]


def make_residual(case: Product) -> pk.Residual:
    """Rows of all magnitudes, of which the second and every seventh are padding."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((case.rows, case.groups * case.outputs)) * 2.0 ** rng.integers(-12, 12, (case.rows, 1))
    positions = rng.integers(0, 1 << 20, case.rows)
    positions[1::7] = -1
    return pk.Residual(rows=jnp.asarray(rows, jnp.bfloat16), positions=jnp.asarray(positions, jnp.int32))


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_a_case_has_parts_in_several_blocks(gpu):
    case = CASES[-1]
    assert fastest_layout(case.rows, (case.outputs, case.inputs), case.form, gpu).split.cluster > 1


@machines
@pytest.mark.parametrize("case", [*first_of(CASES, count=5), *first_of(MANY, count=5)], ids=str)
def test_it_is_the_sum_of_the_residual_and_the_rounded_product(case, simulate):
    """Bit for bit; x's rows of padding are NaN."""
    residual = make_residual(case)
    is_real = residual.positions >= 0
    x, (weight, scales) = jnp.where(is_real[:, None], case.x, jnp.nan), case.weight

    def run(x: jax.Array, residual: pk.Residual | None) -> Any:
        options: dict[str, Any] = dict(dtype=jnp.bfloat16, residual=residual, needed=is_real, simulate=simulate)
        return pk.product(x, weight, scales, case.form, **options)

    got, product = jax.jit(run)(x, residual), jax.jit(run)(x, None)
    want = residual.rows + jnp.where(is_real[:, None], product, jnp.zeros((), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


def test_what_takes_no_residual_is_named():
    case = Product(rows=200, outputs=128, inputs=256, block=None)
    if target.gpu_or_first() is HOPPER:
        with pytest.raises(ValueError, match="more than 64 rows are added to a residual by products with FP8 weights"):
            pk.product(case.x, *case.weight, case.form, dtype=jnp.bfloat16, residual=make_residual(case))
    case = CASES[1]
    with pytest.raises(ValueError, match="a residual is for a product of bf16, got float32"):
        pk.product(case.x, *case.weight, case.form, residual=make_residual(case))
    one = make_residual(CASES[0])
    with pytest.raises(AssertionError, match="17"):
        pk.product(case.x, *case.weight, case.form, dtype=jnp.bfloat16, residual=one)
