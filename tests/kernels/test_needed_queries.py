"""Attention of which only some queries are needed: those are the same bits, and the others are left out."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import round_rows
from pallas_kernels.attention import sm90, sm90_few
from pallas_kernels.attention.layout import AttentionLayout
from pallas_kernels.attention.sm90 import QueryOrder
from tests.support.attention_cases import Case, make, run
from tests.support.cases import first_of
from tests.support.machines import MACHINES

TURNS = sm90.Layout(blocks=3)
WIDE_TURNS = sm90.Layout(is_wide=True, blocks=3)
CASE = Case(lengths=(300, 0, -1, 130), tokens=3)
ALL_ENTRIES = dataclasses.replace(CASE, entries="all", ratio=128, per_block=1)

# Blocks with different numbers of needed queries, and one without any; one query of all; none; all, those that have no
# keys too.
NEEDED = {
    "some": (0, 1, 5, 6, 9, 10, 11),
    "fewer than blocks": (1, 10),
    "one": (11,),
    "none": (),
    "all": tuple(range(12)),
}
machines = pytest.mark.parametrize("simulate", MACHINES)


@functools.cache
def everything(case: Case, *, simulate: bool) -> np.ndarray:
    """Return what attention gives for all queries, which several tests of a case compare with."""
    return run(case, make(case)[0], simulate=simulate)


def mask(case: Case, numbers: tuple[int, ...]) -> np.ndarray:
    needed = np.zeros(len(case.lengths) * case.tokens, bool)
    needed[list(numbers)] = True
    return needed.reshape(-1, case.tokens)


@machines
@pytest.mark.parametrize(
    ("case", "which"),
    first_of(
        [
            (dataclasses.replace(CASE, layout=TURNS), "some"),
            (dataclasses.replace(CASE, layout=TURNS), "none"),
            (dataclasses.replace(CASE, layout=WIDE_TURNS), "some"),
            (dataclasses.replace(CASE, layout=WIDE_TURNS), "fewer than blocks"),
            (dataclasses.replace(ALL_ENTRIES, layout=WIDE_TURNS), "one"),
            (dataclasses.replace(CASE, layout=TURNS), "all"),
            (dataclasses.replace(ALL_ENTRIES, layout=WIDE_TURNS), "some"),
            (dataclasses.replace(CASE, heads=128, layout=sm90.Layout(blocks=6)), "fewer than blocks"),
            (dataclasses.replace(CASE, heads=16, layout=WIDE_TURNS), "some"),
            (dataclasses.replace(CASE, heads=8, layout=TURNS), "some"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else f"{value.entries} {value.heads} {value.layout.is_wide}",
)
def test_needed_queries_are_the_same_bits_and_others_are_left_out(simulate, case, which):
    inputs, _ = make(case)
    needed = mask(case, NEEDED[which])
    q = jnp.where(needed[..., None, None], inputs.q, jnp.nan)
    found = run(case, dataclasses.replace(inputs, q=q, needed=jnp.asarray(needed)), simulate=simulate)
    np.testing.assert_array_equal(found[needed], everything(case, simulate=simulate)[needed])
    if simulate:  # what a kernel does not write is NaN there
        assert np.isnan(found[~needed]).all()


@pytest.mark.slow
@machines
def test_rounded_results_of_needed_queries(simulate):
    case = Case(lengths=(200, 5), tokens=64, entries=None, n_win=64, layout=TURNS, dtype=jnp.bfloat16)
    inputs, _ = make(case)
    needed = mask(case, (0, 3, 64, 70, 127))
    given = dataclasses.replace(inputs, needed=jnp.asarray(needed))
    rounded = run_rounded(given, simulate=simulate)
    wide = jnp.asarray(run(case, given, simulate=simulate)[needed], jnp.bfloat16)
    want = round_rows(wide.reshape(len(wide), -1), simulate=simulate)
    codes = jax.lax.bitcast_convert_type(rounded.codes, jnp.uint8)[needed.reshape(-1)]
    np.testing.assert_array_equal(codes, jax.lax.bitcast_convert_type(want.codes, jnp.uint8))
    np.testing.assert_array_equal(rounded.scales[:, needed.reshape(-1)], want.scales[:, : len(wide)])


def run_rounded(inputs: pk.AttentionInputs, *, simulate: bool) -> pk.RoundedRows:
    attend = jax.jit(
        lambda inputs: pk.decode_attention(
            inputs, kv_format="fp8_row", dtype=jnp.float8_e4m3fn, layout=TURNS, simulate=simulate
        )
    )
    return attend(inputs)


@machines
@pytest.mark.parametrize(
    "layout", first_of([sm90.Layout(cluster=2), sm90_few.Layout(heads=16, cluster=2, tiles=2), sm90.Layout(blocks=2)])
)
def test_kernels_without_turns_compute_all(simulate, layout: AttentionLayout):
    case = Case(lengths=(70, -1), layout=layout)
    inputs, _ = make(case)
    given = dataclasses.replace(inputs, needed=jnp.asarray([[False], [True]]))
    np.testing.assert_array_equal(run(case, given, simulate=simulate), everything(case, simulate=simulate))


@machines
@pytest.mark.parametrize(("layout", "count"), first_of([(TURNS, 5), (WIDE_TURNS, 1), (TURNS, 0), (WIDE_TURNS, 7)]))
def test_of_one_request_all_queries_up_to_the_last_needed_one_are_computed(simulate, layout, count):
    case = dataclasses.replace(CASE, lengths=(200,), tokens=7, layout=layout)
    inputs, _ = make(case)
    needed = mask(case, tuple({0, count - 1}) if count else ())
    found = run(case, dataclasses.replace(inputs, needed=jnp.asarray(needed)), simulate=simulate)
    np.testing.assert_array_equal(found[:, :count], everything(case, simulate=simulate)[:, :count])
    if simulate:
        assert np.isnan(found[:, count:]).all()


@pytest.mark.parametrize("shape", [(2, 1), (5, 7), (2, 64), (3, 129)])
@pytest.mark.parametrize("share", [0, 0.4, 1])
def test_order_of_queries(shape, share):
    needed = np.random.default_rng(0).random(shape) < share
    order = QueryOrder.of(jnp.asarray(needed))
    np.testing.assert_array_equal(order.count, [needed.sum()])
    np.testing.assert_array_equal(order.numbers, [*np.flatnonzero(needed), *np.flatnonzero(~needed)])


@pytest.mark.parametrize("needed", [np.ones((4, 2), bool), np.ones(12, bool), np.ones((4, 3), np.int32)])
def test_needed_queries_are_one_bool_for_each(needed):
    inputs, _ = make(CASE)
    with pytest.raises(AssertionError):
        run(CASE, dataclasses.replace(inputs, needed=jnp.asarray(needed)), simulate=True)
