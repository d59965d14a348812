"""Rows rounded to FP8, and attention, which writes the bytes that ``round_rows`` makes of its results in bf16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import activations
from pallas_kernels.activations import GROUP, RoundedRows, round_rows
from pallas_kernels.attention import sm90
from pallas_kernels.attention.call import decode_attention
from tests.support.attention_cases import ONE_BLOCK, Case, make
from tests.support.cases import first_of
from tests.support.machines import MACHINES
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


def test_rows_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match="multiple of 128 numbers, got 64"):
        round_rows(jnp.zeros((2, 64), jnp.bfloat16), simulate=True)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            # What attention rounds itself, with queries that are padding; then what it does not.
            Case(lengths=(70, 3), tokens=4, top_k=16, n_win=64, layout=sm90.Layout(is_wide=True, blocks=3)),
            Case(lengths=(5, -1), tokens=4, entries=None, n_win=64, heads=8, layout=sm90.Layout(blocks=3)),
            Case(lengths=(5, -1), tokens=4, entries=None, n_win=64, heads=128, layout=ONE_BLOCK),
            Case(lengths=(5, -1), tokens=4, entries=None, n_win=64, heads=16, layout=ONE_BLOCK),
            Case(lengths=(5, -1), tokens=3, entries=None, layout=ONE_BLOCK),
            Case(lengths=(300,), layout=sm90.Layout(cluster=2)),
        ]
    ),
    ids=["widened", "8 heads", "window", "16 heads", "few queries", "cluster"],
)
def test_attention_rounds_its_output(case, simulate, monkeypatch):
    monkeypatch.setattr(activations, "PADDED", 8)  # in place of 128: so few queries fill the scales
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
