"""Hyper-connections' kernel against the same in float64, on streams of awkward numbers of tokens and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language import target
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.target import HOPPER
from pallas_kernels.streams import shares
from pallas_kernels.streams.mixer import PART, STREAMS, Layout
from tests.support.cases import first_of
from tests.support.lane_kernels import run, spec
from tests.support.machines import HOPPER_MACHINES, requires_gpu, simulated

machines = pytest.mark.parametrize("simulate", HOPPER_MACHINES)
RULES = pk.MixRules(rounds=20, eps=1e-6, norm_eps=1e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int
    hidden: int
    ended: str = "attention"  # or "experts", or "none"
    is_head: bool = False
    picks: int = 3
    devices: int = 1  # that the experts are divided over
    padding: tuple[int, ...] = ()  # tokens that are NaN all over
    multiprocessors: int = 0  # for which the work is divided, in place of those that there are

    @property
    def numbers(self) -> int:
        return STREAMS if self.is_head else (2 + STREAMS) * STREAMS

    def arrays(self, seed: int = 0) -> tuple[jax.Array, pk.StreamWeights, pk.EndedSublayer | None]:
        rng = np.random.default_rng(seed)
        tokens, hidden, numbers = self.tokens, self.hidden, self.numbers

        def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
            values = rng.standard_normal(shape)
            if shape[0] == tokens:
                values[list(self.padding)] = np.nan
            return jnp.asarray(values, dtype)

        weights = pk.StreamWeights(
            weight=jnp.asarray(
                rng.standard_normal((numbers, STREAMS * hidden)) * (STREAMS * hidden) ** -0.5, jnp.float32
            ),
            base=jnp.asarray(rng.standard_normal(numbers), jnp.float32),
            scale=jnp.asarray(rng.uniform(0.5, 2, 1 if self.is_head else 3), jnp.float32),
            norm=jnp.asarray(rng.uniform(0.5, 2, hidden), jnp.bfloat16),
        )
        streams = normal(tokens, STREAMS, hidden)
        if self.ended == "none":
            return streams, weights, None
        post = jnp.asarray(rng.uniform(0, 2, (tokens, STREAMS)), jnp.float32)
        carry = jnp.asarray(rng.dirichlet([0.5] * STREAMS, (tokens, STREAMS)), jnp.float32)
        experts: dict[str, Any] = {}
        if self.ended == "experts":
            picked = np.sort(rng.integers(0, 10, (tokens, self.picks)), -1)  # from 8 on none
            owner = np.arange(self.devices)[:, None, None] * 8 // self.devices
            is_own = (picked[None] >= owner) & (picked[None] < owner + 8 // self.devices)
            routed = np.where(
                is_own[..., None], rng.standard_normal((self.devices, tokens, self.picks, hidden)), np.nan
            )
            experts = dict(
                routed=jnp.asarray(routed, jnp.bfloat16), experts=jnp.asarray(picked, jnp.int32), num_experts=8
            )
        return streams, weights, pk.EndedSublayer(post=post, carry=carry, output=normal(tokens, hidden), **experts)

    def run(self, simulate: bool, seed: int = 0) -> pk.MixedStreams:
        return self.mix(*self.arrays(seed), simulate)

    def mix(self, streams: Any, weights: Any, ended: Any, simulate: bool) -> pk.MixedStreams:
        count = self.multiprocessors or target.multiprocessors()
        with mock.patch.object(target, "multiprocessors", return_value=count):
            return mix(streams, weights, ended, simulate)


def mix(streams: Any, weights: Any, ended: Any, simulate: bool) -> pk.MixedStreams:
    found = jax.jit(lambda *args: pk.mix_streams(*args, rules=RULES, simulate=simulate))(streams, weights, ended)
    return jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.float32)), found)


def sinkhorn(matrix: np.ndarray, rounds: int) -> np.ndarray:
    matrix = matrix / (matrix.sum(-2, keepdims=True) + RULES.eps)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdims=True) + RULES.eps)
        matrix = matrix / (matrix.sum(-2, keepdims=True) + RULES.eps)
    return matrix


def bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def new_streams(streams: Any, ended: pk.EndedSublayer | None) -> np.ndarray:
    """In float64, not rounded if a sublayer is over."""
    streams = np.asarray(streams, np.float64)
    if ended is None:
        return streams
    y = np.asarray(ended.output, np.float64)
    if ended.routed is not None:
        is_pick = (np.asarray(ended.experts) < ended.num_experts)[..., None]
        routed = np.nan_to_num(np.asarray(ended.routed, np.float64)).sum(0)  # one device has what is no NaN
        y = bf16(np.where(is_pick, routed, 0).sum(-2) + y)
    carry = np.asarray(ended.carry, np.float64)
    return np.asarray(ended.post, np.float64)[..., None] * y[:, None] + np.einsum("tjl,tjd->tld", carry, streams)


def reference(streams: np.ndarray, weights: pk.StreamWeights) -> dict[str, np.ndarray]:
    """What is mixed of new streams, in float64 but for the rounding of the sum."""
    base, norm, scale, weight = (
        np.asarray(x, np.float64) for x in (weights.base, weights.norm, weights.scale, weights.weight)
    )
    flat = streams.reshape(len(streams), -1)
    numbers = flat @ weight.T / np.sqrt((flat**2).mean(-1, keepdims=True) + RULES.norm_eps)
    n = STREAMS
    pre = sigmoid(numbers[:, :n] * scale[0] + base[:n]) + RULES.eps
    x = bf16(np.einsum("tj,tjd->td", pre, streams))
    found = {"mixed": x, "x": x * norm / np.sqrt((x**2).mean(-1, keepdims=True) + RULES.norm_eps)}
    if len(base) > n:
        found["post"] = 2 * sigmoid(numbers[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        matrix = (numbers[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        matrix = np.exp(matrix - matrix.max(-1, keepdims=True))
        matrix = matrix / matrix.sum(-1, keepdims=True) + RULES.eps
        found["carry"] = sinkhorn(matrix, RULES.rounds)
    return found


CASES = {
    "one token": Case(tokens=1, hidden=256),
    "experts": Case(tokens=5, hidden=256, ended="experts", picks=6),
    "experts of two devices": Case(tokens=5, hidden=256, ended="experts", picks=6, devices=2),
    "7 tokens": Case(tokens=7, hidden=192),
    "one part": Case(tokens=70, hidden=64),
    "several parts": Case(tokens=201, hidden=1088),
    "several turns": Case(tokens=150, hidden=128, ended="experts", multiprocessors=2),
    "turns of two tiles": Case(tokens=300, hidden=2048, multiprocessors=32),
    "experts of many": Case(tokens=70, hidden=2048, ended="experts"),
    "experts of eight": Case(tokens=2, hidden=128, ended="experts", devices=8),
    "the first sublayer": Case(tokens=3, hidden=320, ended="none"),
    "the head": Case(tokens=3, hidden=256, ended="experts", is_head=True),
    "a head alone": Case(tokens=19, hidden=128, ended="none", is_head=True),
    "a head of many": Case(tokens=70, hidden=1088, ended="experts", is_head=True, padding=(1, 69)),
    "padding": Case(tokens=35, hidden=256, padding=(0, 3, 34)),
}


@machines
@pytest.mark.parametrize("name", first_of(CASES, count=3))
def test_streams_gains_and_input(name, simulate):
    case = CASES[name]
    streams, weights, ended = case.arrays()
    found = case.mix(streams, weights, ended, simulate)
    real = np.setdiff1d(np.arange(case.tokens), case.padding)
    exact = new_streams(streams, ended)[real]
    if ended is None:
        assert found.streams is None
        new = exact
    else:
        # One rounding to bf16 of sums in f32: half an ulp, or the neighbour where f32 is just beside the middle.
        new = found.streams[real].astype(np.float64)
        np.testing.assert_allclose(new, exact, rtol=2.0**-8, atol=1e-6)
        assert (new == bf16(exact)).mean() > 0.999
    want = reference(new, weights)
    assert (found.post is None) == (found.carry is None) == case.is_head
    assert (found.mixed is not None) == case.is_head
    for key in want.keys() - {"mixed", "x"}:
        # Logits are sums in f32, some 1e-6 off; so are their smooth functions. Sinkhorn keeps relative errors small.
        np.testing.assert_allclose(getattr(found, key)[real], want[key], rtol=2e-5, atol=1e-7)
    if case.is_head:  # a sum rounded to the other of two neighbours, which are up to 2^-7 apart
        np.testing.assert_allclose(found.mixed[real], want["mixed"], rtol=2.0**-7, atol=1e-6)
        assert (found.mixed[real] == want["mixed"]).mean() > 0.98
    # x is off by as much as the sum, and by half of that through another rounding.
    np.testing.assert_allclose(found.x[real], want["x"], rtol=3 * 2.0**-8, atol=1e-6)
    assert (found.x[real] == bf16(want["x"])).mean() > 0.98


@machines
@pytest.mark.parametrize("rounds", [1, 2, 20, 60])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0, 60.0])
def test_sinkhorn(sharpness, rounds, simulate):
    """With large logits there are rows of which a number is 1 and the others eps, and columns that are eps all over."""
    logits = np.random.default_rng(rounds).standard_normal((WARPGROUP, STREAMS, STREAMS)) * sharpness
    logits[0] = [[60, 0, 0, 0]] * STREAMS
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    matrix = (weights / weights.sum(-1, keepdims=True) + RULES.eps).astype(np.float32)

    def body(machine: Any, matrix: Any, out: Any) -> None:
        lane = machine.thread
        lines = [matrix.load_floats(lane, j, 0) for j in range(STREAMS)]
        for j, line in enumerate(shares.sinkhorn(machine, lines, rounds, RULES.eps)):
            out.store_floats(line, lane, j, 0)

    found = run(body, jnp.asarray(matrix), spec(matrix.shape, jnp.float32), simulate=simulate)
    # A division moves each number by some ulps, and what a round is off the next one corrects in part.
    np.testing.assert_allclose(found, sinkhorn(matrix.astype(np.float64), rounds), rtol=1e-5, atol=1e-9)


def some(tree: Any, tokens: slice, count: int) -> Any:
    """What belongs to some of ``count`` tokens."""
    return jax.tree.map(
        lambda leaf: leaf[tokens] if leaf.shape[0] == count else leaf[:, tokens] if leaf.ndim == 4 else leaf, tree
    )


@pytest.mark.parametrize(
    ("tokens", "hidden", "multiprocessors", "simulate"),
    [*(pytest.param(tokens, 192, count, True, marks=simulated) for tokens, count in ((2, 0), (70, 0), (201, 3)))]
    + [pytest.param(tokens, 4096, 0, False, marks=requires_gpu(major=9)) for tokens in (2, 65, 256, 1500)],
)
def test_a_token_does_not_depend_on_the_others(tokens, hidden, multiprocessors, simulate):
    case = Case(tokens=tokens, hidden=hidden, ended="experts", multiprocessors=multiprocessors)
    streams, weights, ended = case.arrays()
    together = case.mix(streams, weights, ended, simulate)
    for first, count in ((0, 1), (tokens - 1, 1), (tokens // 3, min(9, tokens - tokens // 3))):
        those = slice(first, first + count)
        found = mix(streams[those], weights, some(ended, those, tokens), simulate)
        for key in ("streams", "x", "post", "carry"):
            np.testing.assert_array_equal(getattr(found, key), getattr(together, key)[those], err_msg=key)


def test_how_sums_are_divided_does_not_depend_on_the_tokens():
    layouts = [Layout.of(tokens, 4096, 24, 132) for tokens in (1, 8, 64, 256, 4096)]
    assert {(layout.parts, layout.width) for layout in layouts} == {(64, 32)}
    assert all(layout.groups * layout.parts <= 132 for layout in layouts)


def test_every_block_has_room():
    most = HOPPER.multiprocessors * PART
    layouts = [
        Layout.of(n, hidden, 24, HOPPER.multiprocessors) for n in (1, 4096) for hidden in range(PART, most + 1, PART)
    ]
    assert max(layout.shared_bytes for layout in layouts) <= HOPPER.shared_bytes
    assert all(layout.turn * layout.turns >= layout.tokens for layout in layouts)
    assert all(layout.slots * layout.groups * layout.parts >= layout.turn for layout in layouts)


def test_refusals():
    streams, weights, ended = Case(tokens=3, hidden=128, ended="experts").arrays()
    assert ended is not None

    def refused(error: type[Exception], message: str, *arguments: Any) -> None:
        with pytest.raises(error, match=message):
            pk.mix_streams(*arguments, rules=RULES, simulate=True)

    refused(ValueError, "mixed in fours, got 3", streams[:, :3], weights, ended)
    refused(ValueError, "multiple of 64, .* got 100", streams[..., :100], weights, ended)
    refused(AssertionError, "float32", streams.astype(jnp.float32), weights, ended)
    refused(ValueError, "24 rows before a sublayer and 4 .*, got 8", streams, some(weights, slice(8), 24), ended)
    refused(AssertionError, "shape", streams, dataclasses.replace(weights, scale=weights.scale[:1]), ended)
    refused(AssertionError, "shape", streams, weights, dataclasses.replace(ended, post=ended.post[:2]))
    refused(ValueError, "or neither", streams, weights, dataclasses.replace(ended, experts=None))
