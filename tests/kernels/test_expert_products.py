"""Products with experts that are stored in FP4: against float64, whatever else is in the batch, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.experts.layout import TILE_ROWS
from pallas_kernels.router.tiles import SMALL
from tests.support.cases import first_of
from tests.support.expert_cases import Experts
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)
CASES = {
    "few tokens": Experts(tokens=5, padding=1),
    "full tiles": Experts(tokens=16, one=True, hidden=1024, width=1024, stages=3),
    "FP8, large and small tiles": Experts(tokens=280, picks=1, rows=96, blocks=3, activations="fp8"),
    "FP8, few tokens": Experts(tokens=5, padding=1, activations="fp8"),
    "FP8, tiles of 64": Experts(tokens=30, rows=64, limit=0.0, activations="fp8"),
    "many stages": Experts(tokens=3, hidden=1024, blocks=1, stages=3),
    "one expert": Experts(tokens=21, picks=1, one=True, rows=16),
    "empty experts": Experts(tokens=2, picks=1, experts=9, blocks=7),
    "tiles of 32": Experts(tokens=40, picks=1, rows=32, padding=3),
    "codes in order": Experts(tokens=5, interleaved=False),
    "tiles of 64": Experts(tokens=30, rows=64, limit=0.0),
    "tiles of 112": Experts(tokens=150, rows=112, blocks=3),
    "padding alone": Experts(tokens=2, padding=2),
    "FP8, full tiles": Experts(tokens=16, one=True, hidden=1024, width=1024, stages=3, activations="fp8"),
    "FP8, tiles of 32": Experts(tokens=40, picks=1, rows=32, padding=3, activations="fp8"),
    "FP8, tiles of 112": Experts(tokens=150, rows=112, blocks=3, activations="fp8"),
    "large and small tiles": Experts(tokens=190, picks=1, rows=112, padding=2),
    "FP8, codes in order": Experts(tokens=5, interleaved=False, activations="fp8"),
}
cases = pytest.mark.parametrize("case", first_of(list(CASES.values()), count=3), ids=list(CASES))


def test_rows_for_experts_are_permuted_as_documented():
    x = jnp.arange(2 * 256, dtype=jnp.float32).reshape(2, 256).astype(jnp.bfloat16)
    rows = pk.ExpertRows.of(x)
    pairs, stored = (np.asarray(a).reshape(2, 2, 64, 2) for a in (x, rows.values))
    for quarter in range(4):
        for pair in range(16):
            np.testing.assert_array_equal(stored[:, :, 4 * pair + quarter], pairs[:, :, 16 * quarter + pair])
    np.testing.assert_array_equal(rows.in_order(), x)
    with pytest.raises(ValueError, match="multiple of 128 numbers, got 192"):
        pk.ExpertRows.of(x[:, :192])


def test_interleaved_codes_are_where_the_formula_says():
    """A pair is a word that was rotated and masked, of two words or of both."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (3, 5, 16), np.uint8)
    made = pk.interleaved_codes(jnp.asarray(codes))
    np.testing.assert_array_equal(pk.codes_in_order(made), codes)
    numbers = np.stack([codes & 15, codes >> 4], -1).reshape(3, 5, 2, 16).astype(np.uint32)
    first, second = np.moveaxis(np.asarray(made).view(np.uint32).reshape(3, 5, 2, 2), -1, 0)
    words = first, second, first & 0x06030603 | second << 2 & ~np.uint32(0x06030603)
    pair = 0
    for word, shifts in zip(words, ((0, 4, 10), (0, 4, 10), (6, 12)), strict=True):
        for shift in shifts:
            bits = (word << shift | word >> (32 - shift) % 32) & 0x81C081C0
            for half in (0, 16):
                found = (bits >> half >> 15 & 1) << 3 | bits >> half >> 6 & 7
                np.testing.assert_array_equal(found, numbers[..., 2 * pair + half // 16])
            pair += 1
    with pytest.raises(ValueError, match="a multiple of 8"):
        pk.interleaved_codes(jnp.zeros((1, 12), jnp.uint8))


def _through_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_interleaved_signs_are_where_the_formula_says():
    """Of each word, beside rows in FP8: magnitudes stay, and signs are the top bits of bytes, or four bits lower."""
    codes = np.random.default_rng(0).integers(0, 256, (3, 5, 16), np.uint8)
    made = pk.interleaved_codes(jnp.asarray(codes), "fp8")
    np.testing.assert_array_equal(pk.codes_in_order(made, "fp8"), codes)
    np.testing.assert_array_equal(made & 0x77, codes & 0x77)
    numbers = np.stack([codes & 15, codes >> 4], -1).reshape(3, 5, 4, 8)
    words = np.asarray(made).view(np.uint32)
    for number in range(8):
        place = 8 * (number % 4 + 1) - (1 if number < 4 else 5)
        np.testing.assert_array_equal(words >> place & 1, numbers[..., number] >> 3)
    with pytest.raises(ValueError, match=r"activations must be one of \('bf16', 'fp8'\), got 'fp8_all'"):
        pk.interleaved_codes(jnp.zeros((1, 8), jnp.uint8), "fp8_all")


@machines
@cases
def test_outputs_of_picks(case: Experts, simulate: bool):
    """Sums are as exact as ``Experts.relative`` says; results are rounded to bf16."""
    case = dataclasses.replace(case, hidden=512)
    relative = case.relative(simulate=simulate)
    found = case.run_down(simulate=simulate).reshape(-1, case.hidden)
    for place, pair in enumerate(case.order):
        want, magnitude = case.sums(case.inner[place : place + 1], case.down, case.picked.reshape(-1)[pair])[:, 0]
        assert np.all(np.abs(found[pair] - want) <= relative * magnitude + 2.0**-8 * np.abs(want))
    padding = np.setdiff1d(np.arange(found.shape[0]), case.order)
    assert not simulate or np.isnan(found[padding]).all()  # nobody wrote there


@machines
@cases
def test_gated_rows(case: Experts, simulate: bool):
    """Gate and up are rounded to bf16, perhaps to a neighbour of what float64 gives if that is nearly between two."""
    case = dataclasses.replace(case, width=256)
    made = case.make_gate_up(simulate=simulate)
    found = np.asarray(made.in_order().astype(jnp.float32))
    gains, limit = case.gains.reshape(-1).astype(np.float64), case.limit or np.inf
    relative = case.relative(simulate=simulate)
    for place, pair in enumerate(case.order):
        row = case.x[pair // case.picks][None]
        sums, magnitude = case.sums(row, case.gate_up, case.picked.reshape(-1)[pair])[:, 0]
        bounds = [np.split(_through_bf16(sums + sign * relative * magnitude), 2) for sign in (-1, 1)]
        gated = []  # of every combination of the roundings that there can be
        for gate, up in itertools.product(*zip(*bounds, strict=True)):
            gate = np.minimum(gate, limit)
            gated.append(gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit) * gains[pair])
        low, high = np.min(gated, 0), np.max(gated, 0)
        largest = np.maximum(np.abs(low), np.abs(high))
        slack = 2.0**-8 * largest
        if case.activations == "fp8":  # half of a step of E4M3, of its subnormal numbers too
            scales = np.exp2(np.ceil(np.log2(largest.reshape(-1, 128).max(1) * (1 + 2.0**-8) / 448)))
            slack += 2.0**-4 * (largest + slack) + 2.0**-10 * np.repeat(scales, 128)
        assert np.all((found[place] >= low - slack) & (found[place] <= high + slack))
    if simulate:  # nobody wrote there
        rest = slice(len(case.order), len(found))
        leaves = [made.values[rest]] if isinstance(made, pk.ExpertRows) else [made.codes[rest], made.scales[:, rest].T]
        for leaf in map(np.asarray, leaves):
            floats = leaf.view(ml_dtypes.float8_e4m3fn) if leaf.dtype == np.uint8 else leaf
            assert np.isnan(floats.astype(np.float32)).all()


@machines
@pytest.mark.parametrize("activations", first_of(["bf16", "fp8"]))
@pytest.mark.parametrize("rows", first_of(TILE_ROWS))
def test_a_token_has_the_same_bits_alone_and_among_others(rows: int, activations: str, simulate: bool):
    """In tiles of every size, at every place, and beside tokens with NaN."""
    tokens = 37 if rows <= SMALL else rows - 3  # of a tile that is not small
    many = Experts(tokens=tokens, picks=1, experts=2, one=True, width=128, rows=rows, activations=activations)
    x = many.x.copy()
    x[1::2] = np.nan
    found = many.run_gate_up(x, simulate=simulate)
    assert np.isnan(found[1::2]).all()
    alone = dataclasses.replace(many, tokens=1, rows=8)
    for token in (0, 10, tokens - 1):
        of_token = slice(token, token + 1)
        (one,) = alone.run_gate_up(x[of_token], many.gains[of_token], simulate=simulate)
        np.testing.assert_array_equal(found[token], one)


@machines
def test_scales_from_the_smallest_to_the_largest(simulate: bool):
    """Sums of one number each are exact. A scale above 2^9 gives NaN or infinity, and no number."""
    case = Experts(tokens=1, picks=1, experts=1, hidden=256)
    inner = np.zeros((1, case.width), ml_dtypes.bfloat16)
    inner[0, ::32] = 1.0  # the first of each that have a scale
    codes = np.zeros((1, case.hidden, case.width // 2), np.uint8)
    scales = np.zeros((1, case.hidden, case.width // 32), np.uint8)
    output = np.arange(case.hidden)
    exponents = np.array([10, 60, 127, 136], np.uint8)[output % 4]
    codes[0, output, output % 16 * 16] = 0x05  # 3
    scales[0, output, output % 16] = exponents
    scales[0, 1, 1] = 137
    (found,) = case.run_down(inner, (codes, scales.view(ml_dtypes.float8_e8m0fnu)), simulate=simulate)[0]
    assert not np.isfinite(found[1])
    want = 3.0 * 2.0 ** (exponents.astype(np.float64) - 127)
    np.testing.assert_array_equal(np.delete(found, 1), np.delete(want, 1).astype(np.float32))


def _unserved(gpu=HOPPER, *, spec: dict | None = None, rows: dict | None = None, routing: dict | None = None) -> str:
    sizes: dict[str, Any] = {"tokens": 3, "picks": 2, "experts": 4, "rows": 8}
    of = pk.Routing(**(sizes | (routing or {})))
    weight = pk.ExpertsSpec(**({"experts": 4, "shape": (1024, 512)} | (spec or {})))
    of_rows: dict[str, Any] = {"count": 3, "width": weight.inputs} | (rows or {})
    given = pk.RowsSpec(**of_rows)
    found = pk.plan(pk.Problem(rows=given, weights=(weight,), epilogues=(pk.Gated(routing=of),)), gpu)
    assert isinstance(found, pk.Unsupported)
    return found.reason


def test_what_has_no_kernel_is_refused_by_name():
    assert "multiple of 256 outputs and 512 inputs, got (1024, 256)" in _unserved(spec={"shape": (1024, 256)})
    assert "multiple of 256 outputs and 512 inputs, got (896, 512)" in _unserved(spec={"shape": (896, 512)})
    assert "blocks of (1, 32), got (128, 128)" in _unserved(spec={"block": (128, 128)})
    assert "for activations='bf16', the weight has 'fp8'" in _unserved(spec={"activations": "fp8"})
    assert "rows must be bfloat16, got float32" in _unserved(rows={"dtype": jnp.float32})
    assert "rows must be PlainRows, got ExpertRows" in _unserved(rows={"kind": pk.ExpertRows})
    assert "got 12" in _unserved(routing={"rows": 12})
    assert "tiles are of 5 experts, the weight has 4" in _unserved(routing={"experts": 5})
    assert "expected 3 rows" in _unserved(rows={"count": 4})
    assert "no Hopper" in _unserved(BLACKWELL)
    routing = pk.Routing(tokens=3, picks=2, experts=4, rows=8, activations="fp8")
    down = pk.Problem(
        rows=pk.RowsSpec(count=6, width=512, kind=pk.ExpertRows),
        weights=(pk.ExpertsSpec(experts=4, shape=(512, 512), activations="fp8"),),
        epilogues=(pk.OfPicks(routing=routing),),
    )
    found = pk.plan(down, HOPPER)
    assert isinstance(found, pk.Unsupported)
    assert "rows must be RoundedExpertRows, got ExpertRows" in found.reason
    store = pk.Problem(
        rows=pk.RowsSpec(count=3, width=512),
        weights=(pk.ExpertsSpec(experts=4, shape=(1024, 512)),),
        epilogues=(pk.Store(),),
    )
    found = pk.plan(store, HOPPER)
    assert isinstance(found, pk.Unsupported)
    assert "an epilogue for experts" in found.reason
