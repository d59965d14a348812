"""Which experts each token goes to, and with what weight.

The score of an expert is sqrt(softplus(x W_gate)). The first layers pick experts by the token's id, from a table; the
others pick those with the largest score plus bias. The weights are the picked experts' scores, without bias, divided by
their sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.layer.backend import XLA, Anywhere
from dsv4jax.layer.projections import linear
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import ROUTER, Picks
from dsv4jax.model.params import Router


class XLARouter(Anywhere):
    """The router in plain JAX."""

    def pick(self, x: jax.Array, ids: jax.Array, real: jax.Array, router: Router, cfg: ModelConfig) -> Picks:
        scores = jnp.sqrt(jax.nn.softplus(linear(x, router.gate, backend=XLA)))
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


ROUTER.register(XLA, XLARouter())
