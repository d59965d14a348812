"""Experts that multiply rows of FP8: how rows are rounded, and which scales of weights are exact."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.formats import fp8_rounded
from pallas_kernels.activations import PlainRows
from pallas_kernels.products.experts.rows import expert_rows
from tests.support.cases import first_of
from tests.support.expert_cases import E2M1, Experts
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)
GROUP, SCALED = 128, 32  # inputs that are rounded together, and that share a scale of a weight
BYTE = 100  # an ordinary scale


@machines
@pytest.mark.parametrize("count", first_of([None, 35, 3]))
@pytest.mark.parametrize("kind", [pk.RoundedExpertRows, pk.ExpertRows])
def test_rows_are_sorted_rounded_and_permuted_as_documented(kind: Any, count: int | None, simulate: bool):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((19, 1408)) * 2.0 ** rng.integers(-30, 30, (19, 1408))).astype(ml_dtypes.bfloat16)
    x[3], x[4, 200] = 0, np.nan
    picks, pairs, want = 3, None, jnp.asarray(x)
    if count is not None:
        pairs = jnp.asarray(rng.integers(0, 19 * picks, count), jnp.int32)
        want = want[pairs // picks]
    found = expert_rows(PlainRows(values=jnp.asarray(x)), kind, pairs, picks, simulate=simulate)
    want = want if kind is pk.ExpertRows else fp8_rounded(want, GROUP)
    np.testing.assert_array_equal(found.in_order().astype(jnp.float32), want.astype(jnp.float32))


@machines
@pytest.mark.parametrize(("tokens", "rows"), first_of([(11, 8), (230, 112), (70, 64)]))
def test_gated_rows_are_rounded_as_others(tokens: int, rows: int, simulate: bool):
    """Gates so large that their sigmoid is 1: before it is rounded, a row is what float32 says, bit by bit."""
    case = Experts(tokens=tokens, picks=1, experts=2, hidden=512, width=256, rows=rows, limit=0.0, activations="fp8")
    rng, experts, width = np.random.default_rng(0), case.experts, case.width
    x = np.zeros((tokens, case.hidden), np.float32)
    x[:, 0] = 2.0 ** rng.integers(0, 20, tokens)
    x[3], x[4, 0] = 0, np.nan
    x = x.astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 256, (experts, 2 * width, case.hidden // 2), np.uint8)
    codes[:, :width, 0] = 0x07  # 6
    scales = np.repeat(rng.integers(107, 127, (experts, 2 * width, 1), np.uint8), case.hidden // SCALED, 2)
    scales[:, :width] = 130
    weight = codes, scales.view(ml_dtypes.float8_e8m0fnu)
    found = case.run_gate_up(x, gate_up=weight, simulate=simulate)

    expert = case.picked[:, 0]
    up = E2M1[codes[expert, width:, 0] & 15] * 2.0 ** (scales[expert, width:, 0].astype(np.float64) - 127)
    first = x[:, :1].astype(np.float32)
    gated = np.float32(6 * 8) * first * (first * up.astype(np.float32)) * case.gains
    want = np.asarray(fp8_rounded(jnp.asarray(gated.astype(ml_dtypes.bfloat16)), GROUP), np.float32)
    np.testing.assert_array_equal(found, want[case.order])
    assert np.isnan(want[4]).all()
    assert np.isfinite(np.delete(want, 4, 0)).all()


def one_weight(places: list[list[tuple[int, int, int]]], at: list[int], simulate: bool) -> np.ndarray:
    """Return what a row that is 1 at one place and 0 elsewhere gives: f32 [outputs], for 256 of them.

    Args:
      places: of each output (place, code, scale of it and its 31 neighbours) of what is not 0 with scale 127.
      at: of each output the place. All are the same input to one another: the row is 1 at all of them.
    """
    case = Experts(tokens=1, picks=1, experts=1, hidden=256, activations="fp8")
    inner = np.zeros((1, case.width), ml_dtypes.bfloat16)
    inner[0, at] = 1.0
    nibbles = np.zeros((case.hidden, case.width), np.uint8)
    scales = np.full((case.hidden, case.width // SCALED), BYTE, np.uint8)
    for output, of_output in enumerate(places):
        for place, code, scale in of_output:
            nibbles[output, place] = code
            scales[output, place // SCALED] = scale
    codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4)[None]
    down = codes, scales[None].view(ml_dtypes.float8_e8m0fnu)
    return case.run_down(inner, down, simulate=simulate)[0, 0]


@machines
def test_scales_of_a_block_that_span_2_to_the_14_are_exact(simulate: bool):
    """Output n: 0.5 (and with a sign 1.5) with a scale, beside 6 with a scale 2^n times that, at an input that is 0."""
    spans = range(0, 31)
    outputs = [[(33, code, BYTE), (1, 7, BYTE + span)] for span in spans for code in (1, 11, 6)]
    found = one_weight(outputs, [33], simulate)[: len(outputs)].reshape(-1, 3)
    want = np.array([0.5, -1.5, 4.0], np.float32) * np.float32(2.0 ** (BYTE - 127))
    np.testing.assert_array_equal(found[:15], np.broadcast_to(want, (15, 3)))
    for span in spans[15:]:  # off by at most 2^-10 where the largest scale counts as 2^6
        assert np.all(np.abs(found[span] - want) <= 2.0 ** (BYTE + span - 127 - 16))
    assert np.any(found[20] != want), "a wider span would be exact too"


@machines
def test_a_scale_of_zeros_costs_nothing(simulate: bool):
    """Whatever the scale of 32 numbers is that are all 0, of either sign, the others are exact; a NaN is none."""
    outputs = [[(33, 5, BYTE), (1, zero, scale)] for scale in (0, 60, 140, 200, 254) for zero in (0, 8)]
    outputs.append([(33, 5, BYTE), (1, 0, 255)])
    found = one_weight(outputs, [33], simulate)
    np.testing.assert_array_equal(found[:10], np.float32(3.0 * 2.0 ** (BYTE - 127)))
    assert np.isnan(found[10])
    np.testing.assert_array_equal(found[11:], 0.0)


@machines
def test_the_exponent_follows_scales_that_grow_and_fall(simulate: bool):
    """Output n has 3 in the first 128 inputs, and in the next ones 2 with a scale that is larger or smaller by much."""
    steps = np.array([-20, -14, -7, -6, -5, -1, 0, 1, 4, 6, 7, 14, 20])
    outputs = [[(5, 5, BYTE), (GROUP + 5, 4, BYTE + int(step)), (2 * GROUP + 5, 1, BYTE)] for step in steps]
    found = one_weight(outputs, [5, GROUP + 5, 2 * GROUP + 5], simulate)[: len(steps)]
    want = (3.5 + 2.0 * 2.0**steps) * 2.0 ** (BYTE - 127)
    np.testing.assert_array_equal(found, want.astype(ml_dtypes.bfloat16).astype(np.float32))


@machines
def test_what_is_far_below_an_earlier_scale_is_lost(simulate: bool):
    """Output n has 6 at an input that is 0, then 2 with a scale that is smaller by so much."""
    falls = np.array([10, 30, 40, 45, 60, 70, 90])
    outputs = [[(5, 7, BYTE), (GROUP + 5, 4, BYTE - int(fall))] for fall in falls]
    found = one_weight(outputs, [GROUP + 5], simulate)[: len(falls)]
    want = 2.0 * 2.0 ** (BYTE - 127.0 - falls)
    np.testing.assert_array_equal(found[:4], want[:4].astype(np.float32))
    np.testing.assert_array_equal(found[4:], 0.0)


@machines
def test_scales_from_the_smallest_to_the_largest(simulate: bool):
    bytes = np.array([0, 1, 2, 3, 4, 12, 60, 127, 200, 247, 248, 249, 252, 255])
    found = one_weight([[(40, 5, int(byte))] for byte in bytes], [40], simulate)[: len(bytes)]
    np.testing.assert_array_equal(found[:-1], (3.0 * 2.0 ** (bytes[:-1] - 127.0)).astype(np.float32))
    assert np.isnan(found[-1])
