"""The router's kernels against XLA's form of it, in one launch and in several: picks, weights and tiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels as pk
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.router import call, product
from pallas_kernels.router.scores import sqrt_softplus
from pallas_kernels.router.tiles import SMALL
from tests.kernels.test_routed_tiles import tiles_of
from tests.support.cases import first_of
from tests.support.lane_kernels import run, spec
from tests.support.machines import MACHINES, requires_gpu, simulated

SCALE = 1.5
# Logits are sums in f32 in another order: some 1e-6 of each. Weights are quotients of their smooth functions.
CLOSE: dict[str, Any] = dict(rtol=2e-5, atol=1e-6)
machines = pytest.mark.parametrize("simulate", MACHINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    experts: int
    hidden: int
    picks: int
    by_id: bool = False
    rows: int = 8
    real: float = 0.8

    def arrays(self, seed: int = 0) -> tuple[jax.Array, jax.Array, pk.PickInputs]:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.tokens, self.hidden))
        real = rng.random(self.tokens) < self.real
        x[~real] = np.nan  # whatever padding holds reaches nobody
        gate = rng.standard_normal((self.experts, self.hidden)) * self.hidden**-0.5
        others: dict[str, Any] = dict(bias=jnp.asarray(rng.standard_normal(self.experts) * 0.1, jnp.float32))
        if self.by_id:
            table = np.stack([rng.permutation(self.experts)[: self.picks] for _ in range(50)])
            ids = rng.integers(0, 53, self.tokens)  # those past the table's end count as its last
            others = dict(table=jnp.asarray(table, jnp.int32), ids=jnp.asarray(ids, jnp.int32))
        return (
            jnp.asarray(x, jnp.bfloat16),
            jnp.asarray(gate, jnp.bfloat16),
            pk.PickInputs(real=jnp.asarray(real), **others),
        )


CASES = {
    "V4-Flash's experts": Case(tokens=9, experts=256, hidden=512, picks=6),
    "one token": Case(tokens=1, experts=256, hidden=512, picks=6, real=1.0),
    "one token of padding": Case(tokens=1, experts=64, hidden=128, picks=4, real=0.0),
    "one token and a table": Case(tokens=1, experts=64, hidden=128, picks=4, by_id=True, real=1.0),
    "two tokens of a warp": Case(tokens=14, experts=64, hidden=128, picks=4),
    "100 experts": Case(tokens=13, experts=100, hidden=192, picks=6),
    "160 experts": Case(tokens=5, experts=160, hidden=320, picks=8, by_id=True),
    "384 experts, 64 tokens a block": Case(tokens=70, experts=384, hidden=128, picks=6),
    "not whole times four": Case(tokens=6, experts=37, hidden=64, picks=3),
    "all experts": Case(tokens=7, experts=16, hidden=64, picks=16),
    "one expert": Case(tokens=3, experts=1, hidden=64, picks=1),
    "a table": Case(tokens=33, experts=256, hidden=1024, picks=6, by_id=True, rows=16),
    "all is padding": Case(tokens=10, experts=64, hidden=64, picks=4, real=0.0),
    "XLA multiplies": Case(tokens=300, experts=256, hidden=64, picks=6, rows=32),
    "XLA multiplies by a table": Case(tokens=400, experts=64, hidden=40, picks=6, by_id=True, rows=64),
    "XLA multiplies for large and small tiles": Case(tokens=400, experts=16, hidden=40, picks=4, rows=96),
    "XLA multiplies few": Case(tokens=3, experts=20, hidden=40, picks=2),
}


@functools.partial(jax.jit, static_argnames="picks")
def reference(scores: jax.Array, inputs: pk.PickInputs, picks: int) -> tuple[jax.Array, jax.Array]:
    if inputs.table is None:
        picked = lax.top_k(scores + inputs.bias[None], picks)[1]
    else:
        picked = inputs.table.at[inputs.ids].get(mode="clip")
    picked = jnp.sort(picked, -1)
    weights = jnp.take_along_axis(scores, picked, -1)
    weights = weights / jnp.sum(weights, -1, keepdims=True) * SCALE
    real = inputs.real[:, None]
    return jnp.where(real, picked, scores.shape[1]), jnp.where(real, weights, 0.0)


def scores_of(x: jax.Array, gate: jax.Array) -> np.ndarray:
    logits = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    with np.errstate(invalid="ignore"):  # NaN of padding
        return np.sqrt(np.logaddexp(logits, 0.0)).astype(np.float32)


def check_tiles(found: pk.Routed, experts: int, own: range | None = None) -> None:
    """The tiles are those of plain JAX, of a device's own experts those of all without the others."""
    own = range(experts) if own is None else own
    want = tiles_of(found.experts, experts, found.tiles.rows)
    tiles = np.asarray(want.tiles[: int(want.count[1])])
    tiles = tiles[(tiles[:, 0] >= own.start) & (tiles[:, 0] < own.stop)] - [own.start, 0, 0]
    assert np.asarray(found.tiles.count).tolist() == [np.sum(tiles[:, 2] > SMALL), len(tiles)]
    np.testing.assert_array_equal(found.tiles.pairs, want.pairs)
    np.testing.assert_array_equal(found.tiles.tiles[: len(tiles)], tiles)
    assert found.tiles.tiles.shape == pk.RoutedTiles.shapes(found.experts.size, len(own), found.tiles.rows).tiles.shape


@machines
@pytest.mark.parametrize("name", first_of(CASES, count=3))
def test_picks_weights_and_tiles(name, simulate):
    case = CASES[name]
    x, gate, inputs = case.arrays()
    found = pk.route(x, gate, inputs, picks=case.picks, scale=SCALE, rows=case.rows, simulate=simulate)
    experts, weights = reference(jnp.asarray(scores_of(x, gate)), inputs, case.picks)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, **CLOSE)
    check_tiles(found, case.experts)


@machines
@pytest.mark.parametrize("has_room", [True, False])
def test_pairs_are_ordered_before_they_are_stored_or_not(monkeypatch, has_room, simulate):
    if not has_room:
        monkeypatch.setattr(call, "_ORDERING_BYTES", 0)
    case = CASES["XLA multiplies for large and small tiles"]
    x, gate, inputs = case.arrays()
    found = pk.route(x, gate, inputs, picks=case.picks, scale=SCALE, rows=case.rows, simulate=simulate)
    check_tiles(found, case.experts)


@machines
@pytest.mark.parametrize(
    "name", first_of([name for name, case in CASES.items() if case.experts % 4 == 0 and case.experts >= 16], count=2)
)
def test_a_devices_own_experts_have_the_tiles_of_all_without_the_others(name, simulate):
    """Picks and weights are those of all experts, whoever has them."""
    case = CASES[name]
    x, gate, inputs = case.arrays()
    options: dict[str, Any] = dict(picks=case.picks, scale=SCALE, rows=case.rows, simulate=simulate)
    whole, count = pk.route(x, gate, inputs, **options), case.experts // 4
    made = np.zeros(2, np.int32)
    for first in range(0, case.experts, count):
        own = pk.OwnExperts(first=jnp.asarray([first], jnp.int32), count=count)
        found = pk.route(x, gate, inputs, own=own, **options)
        np.testing.assert_array_equal(found.experts, whole.experts)
        np.testing.assert_array_equal(found.weights, whole.weights)
        check_tiles(found, case.experts, range(first, first + count))
        made += np.asarray(found.tiles.count)
    np.testing.assert_array_equal(made, whole.tiles.count)


def test_which_cases_are_one_launch():
    several = [name for name, c in CASES.items() if call._one_launch(c.hidden, c.experts, c.tokens, c.picks) is None]
    assert several == [name for name in CASES if name.startswith("XLA")]


@pytest.mark.parametrize(
    ("tokens", "simulate"),
    [*(pytest.param(tokens, True, marks=simulated) for tokens in (2, 9))]
    + [pytest.param(tokens, False, marks=requires_gpu(major=9)) for tokens in (2, 9, 64, 100)],
)
def test_a_token_does_not_depend_on_the_others(tokens, simulate):
    case = Case(tokens=tokens, experts=256, hidden=1024, picks=6, real=1.0)
    x, gate, inputs = case.arrays()
    together = pk.route(x, gate, inputs, picks=6, simulate=simulate)
    for token in (0, tokens - 1):
        one = dataclasses.replace(inputs, real=inputs.real[token : token + 1])
        alone = pk.route(x[token : token + 1], gate, one, picks=6, simulate=simulate)
        np.testing.assert_array_equal(alone.experts[0], together.experts[token])
        np.testing.assert_array_equal(alone.weights[0], together.weights[token])


def test_how_inputs_are_divided_does_not_depend_on_the_tokens():
    layouts = [product.Layout.of(4096, 256, tokens, 0) for tokens in (1, 8, 64, 65, 170)]
    assert {(layout.cluster, layout.chunks) for layout in layouts if layout is not None} == {(8, 8)}


@machines
@pytest.mark.parametrize("by_id", [False, True])
def test_parts_of_the_tokens_are_routed_as_they_are_alone(by_id, simulate, monkeypatch):
    """In launches of six tokens each, of which the last one has fewer. The tiles are those of all tokens."""
    case = Case(tokens=20, experts=64, hidden=512, picks=6, by_id=by_id)
    monkeypatch.setattr(call, "_SORTED_ALONE", 36)
    assert pk.most_of_a_part(hidden=512, experts=64, picks=6) == 6
    x, gate, inputs = case.arrays()
    found = pk.route_in_parts(x, gate, inputs, picks=6, scale=SCALE, simulate=simulate)
    check_tiles(found, case.experts)
    assert found.tiles.rows == pk.tile_rows(20, 6, 64)
    for first, count in ((0, 1), (5, 2), (19, 1), (7, 6)):
        those = slice(first, first + count)
        ids = None if inputs.ids is None else inputs.ids[those]
        few = dataclasses.replace(inputs, real=inputs.real[those], ids=ids)
        alone = pk.route_in_parts(x[those], gate, few, picks=6, scale=SCALE, simulate=simulate)
        np.testing.assert_array_equal(alone.experts, found.experts[those])
        np.testing.assert_array_equal(alone.weights, found.weights[those])


def test_what_one_launch_never_routes_has_no_parts():
    assert pk.most_of_a_part(hidden=4096, experts=256, picks=6) == 170  # V4-Flash
    assert pk.most_of_a_part(hidden=40, experts=64, picks=6) == 0
    x, gate, inputs = Case(tokens=2, experts=64, hidden=40, picks=6).arrays()
    with pytest.raises(ValueError, match="no launch routes tokens of 40 numbers to 64 experts by itself"):
        pk.route_in_parts(x, gate, inputs, picks=6, simulate=True)


def picked_from(logits: np.ndarray, bias: np.ndarray, picks: int, simulate: bool) -> pk.Routed:
    """Route tokens whose logits are given, numbers of bf16: x is the identity."""
    tokens, experts = logits.shape
    hidden = -(-tokens // 64) * 64
    gate = np.zeros((experts, hidden), np.float32)
    gate[:, :tokens] = logits.T
    x = jnp.asarray(np.eye(tokens, hidden), jnp.bfloat16)
    inputs = pk.PickInputs(real=jnp.ones(tokens, bool), bias=jnp.asarray(bias, jnp.float32))
    return pk.route(x, jnp.asarray(gate, jnp.bfloat16), inputs, picks=picks, scale=SCALE, simulate=simulate)


@machines
def test_of_equal_scores_the_lower_numbers_are_picked(simulate):
    logits = np.tile(np.array([1.0, 2.0, 2.0, 0.5, 2.0] * 13, np.float32), (2, 1))
    logits[1] = 1.0
    found = picked_from(logits, np.zeros(65), 4, simulate)
    np.testing.assert_array_equal(found.experts, [[1, 2, 4, 6], [0, 1, 2, 3]])
    np.testing.assert_allclose(found.weights, np.full((2, 4), SCALE / 4), rtol=2e-7)  # two roundings


@machines
def test_bias_decides_and_does_not_weigh(simulate):
    bias = np.zeros(64)
    bias[[7, 9, 40]] = 5.0, -5.0, 4.0
    logits = np.zeros((1, 64), np.float32)
    logits[0, 9] = 2.0
    found = picked_from(logits, bias, 3, simulate)
    np.testing.assert_array_equal(found.experts, [[0, 7, 40]])
    np.testing.assert_allclose(found.weights, np.full((1, 3), SCALE / 3), rtol=2e-7)  # two roundings


@machines
def test_a_nan_score_is_above_all_others_and_makes_its_tokens_weights_nan(simulate):
    case = Case(tokens=12, experts=64, hidden=64, picks=4, real=1.0)
    x, gate, inputs = case.arrays()
    spoiled = dataclasses.replace(inputs, bias=inputs.bias.at[20].set(jnp.nan))
    found = pk.route(x, gate, spoiled, picks=4, scale=SCALE, simulate=simulate)
    assert (np.asarray(found.experts) == 20).any(1).all()
    assert np.isfinite(found.weights).all(), "the bias does not weigh"
    check_tiles(found, 64)
    # A logit of one token: the others are as they were.
    want = pk.route(x, gate, inputs, picks=4, scale=SCALE, simulate=simulate)
    found = pk.route(x.at[5].set(jnp.nan), gate, inputs, picks=4, scale=SCALE, simulate=simulate)
    others = np.arange(12) != 5
    np.testing.assert_array_equal(np.asarray(found.experts)[others], np.asarray(want.experts)[others])
    np.testing.assert_array_equal(np.asarray(found.weights)[others], np.asarray(want.weights)[others])
    np.testing.assert_array_equal(found.experts[5], [0, 1, 2, 3])
    assert np.isnan(found.weights[5]).all()
    check_tiles(found, 64)


@machines
def test_scores_of_0_give_weights_of_nan_and_those_far_below_0_do_not(simulate):
    logits = np.full((2, 64), -400.0, np.float32)
    logits[1] = -128.0
    logits[1, 40] = -120.0
    found = picked_from(logits, np.zeros(64), 2, simulate)
    np.testing.assert_array_equal(found.experts, [[0, 1], [0, 40]])
    assert np.isnan(found.weights[0]).all(), "0 / 0, as in XLA's form"
    share = 1 / (1 + np.exp(-4.0))
    np.testing.assert_allclose(found.weights[1], [SCALE * (1 - share), SCALE * share], rtol=2e-5)  # |x| 2^-24 each


@machines
def test_infinite_sums_are_ordered(simulate):
    bias = np.zeros(64)
    bias[[3, 30]], bias[[4, 50]] = np.inf, -np.inf
    found = picked_from(np.zeros((1, 64), np.float32), bias, 4, simulate)
    np.testing.assert_array_equal(found.experts, [[0, 1, 3, 30]])
    few = picked_from(np.zeros((1, 5), np.float32), bias[:5], 5, simulate)
    np.testing.assert_array_equal(few.experts, [[0, 1, 2, 3, 4]])


@machines
def test_a_table_may_name_an_expert_twice_and_one_that_is_none(simulate):
    table = jnp.asarray([[5, 2, 2], [70, 1, 0]], jnp.int32)
    inputs = pk.PickInputs(real=jnp.ones(2, bool), table=table, ids=jnp.arange(2, dtype=jnp.int32))
    x, gate, _ = Case(tokens=2, experts=64, hidden=64, picks=3, real=1.0).arrays()
    found = pk.route(x, gate, inputs, picks=3, simulate=simulate)
    np.testing.assert_array_equal(found.experts, [[2, 2, 5], [0, 1, 70]])
    score = scores_of(x, gate)[0]
    np.testing.assert_allclose(found.weights[0], score[[2, 2, 5]] / score[[2, 2, 5]].sum(), **CLOSE)
    assert np.isnan(found.weights[1]).all()
    check_tiles(found, 64)


@machines
@pytest.mark.parametrize(
    ("tokens", "picks", "experts"), first_of([(4096, 6, 256), (700, 2, 8), (1, 1, 512), (513, 16, 512)], count=2)
)
def test_many_pairs_are_sorted(tokens, picks, experts, simulate):
    rng = np.random.default_rng(tokens)
    picked = np.sort(rng.integers(0, experts + 1, (tokens, picks)).astype(np.int32), axis=1)
    router = call.Router(tokens=tokens, experts=experts, picks=picks, scale=1.0, rows=32, simulate=simulate)
    tiles = router.sort(jnp.asarray(picked))
    check_tiles(pk.Routed(experts=picked, weights=None, tiles=tiles), experts)


@machines
def test_scores(simulate):
    x = np.concatenate([np.linspace(-170, 170, 4001), np.linspace(-2, 2, 2000), np.linspace(-17, -15, 200)])
    x = np.pad(x, (0, -x.size % WARPGROUP)).astype(np.float32)

    def body(machine: Any, x: Any, out: Any) -> None:
        at = machine.block(0) * WARPGROUP + machine.thread
        out.store_floats([sqrt_softplus(machine, x.load_floats(at, count=1)[0])], at)

    found = run(body, x, spec(x.shape, jnp.float32), simulate=simulate, grid=(x.size // WARPGROUP,))
    want = np.sqrt(np.logaddexp(x.astype(np.float64), 0.0))
    error = np.abs(found - want) / want
    assert np.all(error <= 2.0**-21 + np.abs(x) * 2.0**-24), error.max()  # as its docstring says


def test_refusals():
    x, gate, inputs = Case(tokens=3, experts=16, hidden=64, picks=2).arrays()
    with pytest.raises(ValueError, match="picks 1 to 16 of 16 experts, got 17"):
        pk.route(x, gate, inputs, picks=17, simulate=True)
    with pytest.raises(ValueError, match="takes 1 to 512 experts, got 600"):
        pk.route(x, jnp.zeros((600, 64), jnp.bfloat16), inputs, picks=2, simulate=True)
    with pytest.raises(ValueError, match="expected a bias, or a table and ids"):
        pk.route(x, gate, pk.PickInputs(real=inputs.real), picks=2, simulate=True)
    with pytest.raises(AssertionError):
        pk.route(x.astype(jnp.float32), gate, inputs, picks=2, simulate=True)
    own = pk.OwnExperts(first=jnp.zeros(1, jnp.int32), count=17)
    with pytest.raises(AssertionError):
        pk.route(x, gate, inputs, picks=2, own=own, simulate=True)
