"""The router as an op of a model: what XLA and the kernels pick, and what kernels do not serve."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.model import ModelConfig
from dsv4jax.model.ops import ROUTER, Picks
from dsv4jax.model.params import Router
from tests.support.machines import BACKENDS

CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(hidden_size=256), num_experts=24)


def router(by_id: bool, dtype=jnp.bfloat16) -> Router:
    rng = np.random.default_rng(by_id)
    gate = rng.standard_normal((CFG.num_experts, CFG.hidden_size)) * CFG.hidden_size**-0.5
    table = np.stack([rng.permutation(CFG.num_experts)[: CFG.experts_per_token] for _ in range(CFG.vocab_size)])
    return Router(
        gate=jnp.asarray(gate, dtype),
        bias=None if by_id else jnp.asarray(rng.standard_normal(CFG.num_experts), jnp.float32),
        table=jnp.asarray(table, jnp.int32) if by_id else None,
    )


def picked(backend: str, by_id: bool, dtype=jnp.bfloat16) -> Picks:
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((2, 5, CFG.hidden_size)), dtype)
    ids = jnp.asarray(rng.integers(0, CFG.vocab_size, (2, 5)), jnp.int32)
    real = jnp.ones((2, 5), bool).at[1, 3:].set(False)
    x = x.at[1, 3:].set(jnp.nan)
    run = jax.jit(lambda x, ids, real, router: ROUTER[backend].pick(x, ids, real, router, CFG))
    return run(x, ids, real, router(by_id, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_id", [False, True], ids=["by score", "by id"])
def test_kernels_pick_what_xla_picks(backend, by_id):
    found, want = picked(backend, by_id), picked("xla", by_id)
    np.testing.assert_array_equal(found.experts, want.experts)
    # Sums in f32 in another order: some 2^-22 of each logit.
    np.testing.assert_allclose(found.weights, want.weights, rtol=2e-6)
    assert want.tiles is None
    assert found.tiles is not None
    tiles_of = jax.jit(pk.routed_tiles, static_argnums=(1, 2))
    tiles = tiles_of(found.experts.reshape(-1, CFG.experts_per_token), CFG.num_experts, found.tiles.rows)
    np.testing.assert_array_equal(found.tiles.pairs, tiles.pairs)


def test_what_kernels_do_not_serve():
    unsupported = ROUTER["pallas_simulated"].unsupported
    assert unsupported(CFG, router(False), jnp.bfloat16) is None
    assert "must be bfloat16, got float32 and bfloat16" in str(unsupported(CFG, router(False), jnp.float32))
    assert "got bfloat16 and float32" in str(unsupported(CFG, router(False, jnp.float32), jnp.bfloat16))
    many = dataclasses.replace(CFG, num_experts=600)
    assert "takes 1 to 512 experts, got 600" in str(unsupported(many, router(False), jnp.bfloat16))
    with pytest.raises(ValueError, match="cannot serve router: x and the gate must be bfloat16"):
        ROUTER.choose("pallas_simulated", CFG, router(False), jnp.float32)


def test_kernels_have_no_derivative():
    rng = np.random.default_rng(3)
    x, ids = jnp.asarray(rng.standard_normal((1, CFG.hidden_size)), jnp.bfloat16), jnp.zeros(1, jnp.int32)

    @functools.partial(jax.jit, static_argnames="backend")
    def loss(x: jax.Array, backend: str) -> jax.Array:
        return ROUTER[backend].pick(x, ids, ids == 0, router(False), CFG).weights[0, 0]

    assert np.any(np.asarray(jax.grad(loss)(x, "xla"), np.float32))
    with pytest.raises(ValueError, match="cannot serve a derivative of router"):
        jax.grad(loss)(x, "pallas_simulated")
