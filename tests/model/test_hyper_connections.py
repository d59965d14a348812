"""Hyper-connections as an op of a model: XLA and the kernel give the same, and what the kernel does not serve."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import ModelConfig
from dsv4jax.model.ops import HYPER_CONNECTIONS, ExpertOutputs, Gains
from dsv4jax.model.params import StreamMix
from dsv4jax.model.plain.invariant import InvariantHyperConnections
from tests.support.machines import requires_gpu, simulated
from tests.support.second_derivatives import check_second_derivative

BACKENDS = [
    pytest.param("pallas_simulated", id="simulated", marks=simulated),
    pytest.param("pallas", id="gpu", marks=requires_gpu(major=9)),
]
CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(hidden_size=128))
LEAD, N, HIDDEN = (2, 3), CFG.num_streams, CFG.hidden_size


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def mix(is_head: bool = False) -> StreamMix:
    numbers = N if is_head else (2 + N) * N
    return StreamMix(
        weight=normal(1, numbers, N * HIDDEN, dtype=jnp.float32) * 0.1,
        base=normal(2, numbers, dtype=jnp.float32),
        scale=normal(3, 1 if is_head else 3, dtype=jnp.float32),
    )


STREAMS, NORM = normal(4, *LEAD, N, HIDDEN), normal(5, HIDDEN)
GAINS = Gains(post=jnp.abs(normal(6, *LEAD, N, dtype=jnp.float32)), carry=normal(7, *LEAD, N, N, dtype=jnp.float32))
OUTPUT = normal(8, *LEAD, HIDDEN)
PICKED = np.random.default_rng(9).integers(0, 7, (*LEAD, 3))  # from 5 on none
EXPERTS = ExpertOutputs(
    routed=jnp.where((PICKED < 5)[..., None], normal(10, *LEAD, 3, HIDDEN), jnp.nan)[None],
    shared=OUTPUT,
    experts=jnp.asarray(PICKED, jnp.int32),
    num_experts=5,
)
CALLS = {
    "begin": lambda op: op.begin(STREAMS, mix(), NORM, CFG),
    "between, attention": lambda op: op.between(OUTPUT, STREAMS, GAINS, mix(), NORM, CFG),
    "between, experts": lambda op: op.between(EXPERTS, STREAMS, GAINS, mix(), NORM, CFG),
    "end": lambda op: op.end(EXPERTS, STREAMS, GAINS, mix(is_head=True), NORM.astype(jnp.float32), CFG),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_gives_what_xla_gives(name, backend):
    found = jax.jit(lambda: CALLS[name](HYPER_CONNECTIONS[backend]))()
    want = CALLS[name](HYPER_CONNECTIONS["xla"])  # not in one jit, in which a GPU does not round the streams it uses
    check_alike(found, want)


@pytest.mark.any_device  # where XLA fuses a loop's body for a GPU, it does not round the streams that it uses
@pytest.mark.parametrize("name", CALLS)
def test_tiles_of_tokens_give_what_all_tokens_give(name):
    """Of an invariant cache: with experts whose outputs are not yet summed, too."""
    check_alike(CALLS[name](InvariantHyperConnections()), CALLS[name](HYPER_CONNECTIONS["xla"]))


def check_alike(found: Any, want: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        # bf16: a number rounded to the other of two neighbours, then another rounding. f32: sums in another order.
        is_bf16 = got.dtype == jnp.bfloat16
        got, expected = (np.asarray(leaf, np.float32) for leaf in (got, expected))
        rtol, atol = (3 * 2.0**-8, 1e-3) if is_bf16 else (2e-5, 1e-6)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)
        assert not is_bf16 or (got == expected).mean() > 0.99


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_whose_input_is_0_ends_as_0(backend):
    y, streams = jnp.zeros_like(OUTPUT), jnp.zeros_like(STREAMS)
    found = HYPER_CONNECTIONS[backend].end(y, streams, GAINS, mix(is_head=True), NORM, CFG)
    assert not any(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(found))


def test_no_tokens():
    x, gains = HYPER_CONNECTIONS["pallas_simulated"].begin(STREAMS[:0], mix(), NORM, CFG)
    assert x.shape == (0, *LEAD[1:], HIDDEN)
    assert gains.carry.shape == (0, *LEAD[1:], N, N)


def test_what_the_kernel_does_not_serve():
    unsupported = HYPER_CONNECTIONS["pallas_simulated"].unsupported
    assert unsupported(CFG, mix(), jnp.bfloat16) is None
    assert "streams must be bfloat16, got float32" in str(unsupported(CFG, mix(), jnp.float32))
    assert "mixed in fours, got 2" in str(unsupported(dataclasses.replace(CFG, num_streams=2), mix(), jnp.bfloat16))
    narrow = ModelConfig.tiny(attention=d4.DSV4Config.tiny(hidden_size=96))
    with pytest.raises(ValueError, match=r"cannot serve hyper_connections: hidden must be a multiple of 64, .* got 96"):
        HYPER_CONNECTIONS.choose("pallas_simulated", narrow, mix(), jnp.bfloat16)


@pytest.mark.slow
def test_second_derivatives_are_differences_of_the_gradient_and_symmetric():
    """Of the streams before and after a sublayer and the sum for the head, in f32, by streams and through y."""
    op, cfg = HYPER_CONNECTIONS["xla"], CFG

    def loss(streams: jax.Array) -> jax.Array:
        x, gains = op.begin(streams, mix(), NORM, cfg)
        streams, x, gains = op.between(jnp.sin(x), streams, gains, mix(), NORM, cfg)
        streams, found = op.end(jnp.sin(x), streams, gains, mix(is_head=True), NORM, cfg)
        return jnp.sum(jnp.sin(streams)) + jnp.sum(jnp.sin(found.x))

    check_second_derivative(loss, normal(4, 1, 2, N, HIDDEN, dtype=jnp.float32))


def test_the_kernel_has_no_derivative():
    @functools.partial(jax.jit, static_argnames="backend")
    def loss(streams: jax.Array, backend: str) -> jax.Array:
        x, _ = HYPER_CONNECTIONS[backend].begin(streams, mix(), NORM, CFG)
        return x.astype(jnp.float32).sum()

    assert np.any(np.asarray(jax.grad(loss)(STREAMS, "xla"), np.float32))
    with pytest.raises(ValueError, match="cannot serve a derivative of hyper_connections"):
        jax.grad(loss)(STREAMS, "pallas_simulated")
