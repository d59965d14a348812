"""SwiGLU in products of few rows: what it makes of the sums, whatever the split, and what has no kernel."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language.target import BLACKWELL, HOPPER
from tests.support.cases import first_of
from tests.support.machines import MACHINES, no_gpu
from tests.support.product_cases import Product

machines = pytest.mark.parametrize("simulate", MACHINES)
# One row, and as many as a block has, with x copied chunk by chunk; tiles that do not fill the last block; parts of the
# inputs in several blocks, and in one; scales for fewer outputs than a warp's gates and ups are apart; rounded rows; no
# scales.
CASES = [
    (Product(rows=1, outputs=128, inputs=256), OperandRows),
    (Product(rows=9, outputs=256, inputs=512, activations="fp8", parts=(4, 1)), OperandRows),
    (Product(rows=13, outputs=320, inputs=256, block=(32, 128), parts=(1, 1), tiles=3), PlainRows),
    (Product(rows=21, outputs=256, inputs=1024, block=(16, 64), parts=(2, 2), tiles=2), OperandRows),
    (Product(rows=64, outputs=128, inputs=512, parts=(1, 1), tiles=2, streams=True), PlainRows),
    (Product(rows=5, outputs=128, inputs=256, block=None), PlainRows),
]


def gated(case: Product, kind: type[ActivationRows], limit: float, x: jax.Array, gpu: Any, *, simulate: bool) -> Any:
    """Return the gated rows, f32 in order, and the sums in bf16 that they are made of."""
    made = pk.SwiGLU(limit=limit, kind=kind)
    found = case.made(case.plan(case.problem(made), gpu), x, simulate=simulate)
    sums = case.made(case.plan(case.problem(pk.Store(dtype=jnp.bfloat16)), gpu), x, simulate=simulate)
    assert (type(found) is OperandRows) is (kind is OperandRows)
    in_order = found.in_order() if kind is OperandRows else found
    assert in_order.dtype == jnp.bfloat16
    return np.asarray(in_order, np.float32), np.asarray(sums).astype(np.float64)


def expected(sums: np.ndarray, limit: float) -> np.ndarray:
    gate, up = np.split(sums, 2, 1)
    gate, up = np.minimum(gate, limit or np.inf), np.clip(up, -(limit or np.inf), limit or np.inf)
    return gate * np.exp(-np.logaddexp(0, -gate)) * up


def check(result: tuple[np.ndarray, np.ndarray], limit: float) -> None:
    """A result is rounded to bf16. A gate below -80 counts as e^-80 times itself."""
    found, sums = result
    want = expected(sums, limit)
    gate, up = np.split(np.abs(sums), 2, 1)
    assert found.shape == want.shape
    assert np.all(np.abs(found - want) <= 2.0**-8 * np.abs(want) + 2 * np.exp(-80) * gate * up)


@machines
@pytest.mark.parametrize(("case", "kind"), first_of(CASES, count=2), ids=str)
def test_gated_rows_are_made_of_the_sums(case, kind, simulate):
    gpu = BLACKWELL if not simulate and no_gpu(10) is None else HOPPER
    for limit in (10.0, 0.0):
        check(gated(case, kind, limit, case.x, gpu, simulate=simulate), limit)


@pytest.mark.simulated
@pytest.mark.parametrize(("case", "kind"), [CASES[0], CASES[3]], ids=str)
def test_gated_rows_of_the_blackwell_kernel(case, kind):
    check(gated(case, kind, 10.0, case.x, BLACKWELL, simulate=True), 10.0)


@machines
def test_nan_stays_in_its_row(simulate):
    """Clamps keep it."""
    case = Product(rows=3, outputs=128, inputs=256)
    found, sums = gated(case, PlainRows, 10.0, case.x.at[1].set(jnp.nan), HOPPER, simulate=simulate)
    assert np.isnan(sums[1]).all()
    assert np.isnan(found[1]).all()
    check((found[::2], sums[::2]), 10.0)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Product(rows=129, outputs=128, inputs=256), "few rows and one group, got 129 and 1"),
        (Product(rows=2, outputs=128, inputs=256, groups=2), "got 2 and 2"),
        (Product(rows=2, outputs=96, inputs=256), "a multiple of 64 outputs"),
        (Product(rows=2, outputs=128, inputs=256, block=None), "timed only where its sums are stored"),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_named(case, message):
    found = pk.plan(case.problem(pk.SwiGLU(limit=10.0)), HOPPER)
    assert isinstance(found, pk.Unsupported)
    assert re.search(message, found.reason)
