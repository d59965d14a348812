"""Rows rounded to FP8: attention and products write the bytes that ``round_rows`` makes of their results in bf16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import rounding
from pallas_kernels.attention import sm90
from pallas_kernels.attention.call import decode_attention
from pallas_kernels.rounding import GROUP, RoundedRows, round_rows
from tests.support.attention_cases import ONE_BLOCK, Case, make
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES, MACHINES
from tests.support.product_cases import Product

CODES = jnp.float8_e4m3fn
machines = pytest.mark.parametrize("simulate", MACHINES)


def assert_same(found: RoundedRows, want: RoundedRows) -> None:
    assert isinstance(found, RoundedRows)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@machines
@pytest.mark.parametrize("rows", [1, 130])
def test_rows_are_rounded_by_groups(rows, simulate):
    x = np.array(Product(rows=rows, outputs=1, inputs=3 * GROUP).x)
    x[0, :GROUP] = 1e-6  # below the least peak
    found = round_rows(jnp.asarray(x), simulate=simulate)
    groups = np.zeros((found.scales.shape[1], 3, GROUP))
    groups[:rows] = x.astype(np.float64).reshape(rows, 3, GROUP)
    scales = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), np.float32(1e-4)) / 448))
    codes = (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.scales, scales.T)
    np.testing.assert_array_equal(found.codes, codes.view(np.uint8).reshape(-1, 3 * GROUP)[:rows])


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            # More rows than a tile has, and two groups of a tile's outputs; parts that add their sums.
            Product(rows=130, outputs=256, inputs=256, activations="fp8"),
            Product(rows=70, outputs=128, inputs=1024, groups=2, activations="fp8"),
            Product(rows=67, outputs=128, inputs=128, activations="bf16"),
            Product(rows=3, outputs=128, inputs=128, activations="fp8"),
        ],
        count=4,
    ),
    ids=str,
)
def test_products_round_their_result(case, simulate):
    weight, scales = case.weight
    want = round_rows(
        pk.product(case.x, weight, scales, case.form, dtype=jnp.bfloat16, simulate=simulate), simulate=simulate
    )
    assert_same(pk.product(case.x, weight, scales, case.form, dtype=CODES, simulate=simulate), want)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_products_take_rounded_rows(simulate):
    case = Product(rows=130, outputs=128, inputs=256, groups=2, activations="fp8")
    weight, scales = case.weight
    assert pk.takes_rounded(weight.shape, case.form, case.rows)
    rounded = round_rows(case.x, simulate=simulate)
    found = pk.product(rounded, weight, scales, case.form, simulate=simulate)
    np.testing.assert_array_equal(found, pk.product(case.x, weight, scales, case.form, simulate=simulate))


def test_products_that_do_not_take_rounded_rows_say_so():
    case = Product(rows=64, outputs=128, inputs=256, activations="fp8")
    weight, scales = case.weight
    x = round_rows(case.x, simulate=True)
    for rows, form in (
        (64, case.form),
        (130, dataclasses.replace(case.form, activations="bf16")),
        (130, dataclasses.replace(case.form, block=(64, 128))),
    ):
        assert not pk.takes_rounded(weight.shape, form, rows)
    with pytest.raises(ValueError, match="no kernel takes 64 rows of RoundedRows"):
        pk.product(x, weight, scales, case.form, simulate=True)
    with pytest.raises(AssertionError, match=r"\(2, 64\).*\(2, 128\)"):
        pk.product(dataclasses.replace(x, scales=x.scales[:, :64]), weight, scales, case.form, simulate=True)
    with pytest.raises(ValueError, match="multiple of 128 numbers, got 64"):
        round_rows(jnp.zeros((2, 64), jnp.bfloat16), simulate=True)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            # What attention rounds itself, with queries that are padding; then what it does not.
            Case(lengths=(70, 3), tokens=4, top_k=16, n_win=64, layout=sm90.Layout(is_wide=True, blocks=3)),
            Case(lengths=(5, -1), tokens=4, entries=None, n_win=64, heads=128, layout=ONE_BLOCK),
            Case(lengths=(5, -1), tokens=3, entries=None, layout=ONE_BLOCK),
            Case(lengths=(300,), layout=sm90.Layout(cluster=2)),
        ],
        count=4,
    ),
    ids=["widened", "window", "few queries", "cluster"],
)
def test_attention_rounds_its_output(case, simulate, monkeypatch):
    monkeypatch.setattr(rounding, "PADDED", 8)  # in place of 128: so few queries fill the scales
    inputs, _ = make(case)

    def attend(dtype):
        call = jax.jit(
            lambda x: decode_attention(x, kv_format=case.kv_format, dtype=dtype, layout=case.layout, simulate=simulate)
        )
        return call(inputs)

    in_bf16 = attend(jnp.bfloat16)
    assert np.isfinite(np.asarray(in_bf16, np.float32)).all()
    queries = in_bf16.shape[0] * in_bf16.shape[1]
    want = round_rows(in_bf16.reshape(queries, -1), simulate=simulate)
    assert_same(attend(CODES), want)
