"""Which experts each token goes to, and with what weight.

The score of an expert is sqrt(softplus(x W_gate)). The first layers pick experts by the token's id, from a table; the
others pick those with the largest score plus bias. The weights are the picked experts' scores, without bias, divided by
their sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dsv4jax.layer.backend import XLA, Anywhere
from dsv4jax.layer.projections import linear
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import ROUTER, Picks
from dsv4jax.model.params import Router


class XLARouter(Anywhere):
    """The router in plain JAX."""

    def pick(
        self,
        x: jax.Array,
        ids: jax.Array,
        real: jax.Array,
        router: Router,
        cfg: ModelConfig,
        own: pk.OwnExperts | None = None,
    ) -> Picks:
        scores = _scores(x, router)
        if router.table is not None:
            picked = router.table.at[ids].get(mode="clip")
        else:
            assert router.bias is not None
            biased = scores + jnp.broadcast_to(router.bias.astype(jnp.float32), scores.shape)
            picked = lax.top_k(lax.stop_gradient(biased), cfg.experts_per_token)[1]
        picked = jnp.sort(picked, -1)
        weights = jnp.take_along_axis(scores, picked, -1)
        weights = weights / jnp.sum(weights, -1, keepdims=True) * cfg.routed_scale
        return Picks(
            experts=jnp.where(real[..., None], picked, cfg.num_experts),
            weights=jnp.where(real[..., None], weights, 0.0),
        )


def _scores(x: jax.Array, router: Router) -> jax.Array:
    """The scores of all experts, f32 [..., E]."""
    return jnp.sqrt(jax.nn.softplus(linear(x, router.gate, backend=XLA)))


def chosen_experts(x: jax.Array, chosen: jax.Array, real: jax.Array, router: Router, cfg: ModelConfig) -> Picks:
    """Return what ``pick`` would if it picked the experts int [..., k]; numbers of none are left out, such as -1."""
    picked = chosen.astype(jnp.int32)
    is_expert = (picked >= 0) & (picked < cfg.num_experts) & real[..., None]
    picked = jnp.sort(jnp.where(is_expert, picked, cfg.num_experts), -1)
    weights = jnp.take_along_axis(_scores(x, router), jnp.minimum(picked, cfg.num_experts - 1), -1)
    weights = jnp.where(picked < cfg.num_experts, weights, 0.0)
    total = jnp.sum(weights, -1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0) * cfg.routed_scale
    return Picks(experts=picked, weights=weights)


ROUTER.register(XLA, XLARouter())
