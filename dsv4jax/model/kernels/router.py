"""The kernels of the router, which put the pairs of tokens and experts in tiles beside what they pick."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.checks import Tree
from dsv4jax.layer.kernels.base import register, register_invariant
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.kernels.base import ModelKernels
from dsv4jax.model.ops import ROUTER, Picks
from dsv4jax.model.params import Router


class RouterKernels(ModelKernels):
    """``pallas_kernels.route``."""

    def unserved(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        if not jnp.dtype(dtype) == jnp.dtype(weights.gate.dtype) == jnp.bfloat16:
            return f"x and the gate must be bfloat16, got {jnp.dtype(dtype)} and {weights.gate.dtype}"
        return pk.unsupported_route(experts=cfg.num_experts, picks=cfg.experts_per_token)

    def pick(
        self,
        x: jax.Array,
        ids: jax.Array,
        real: jax.Array,
        router: Router,
        cfg: ModelConfig,
        own: pk.OwnExperts | None = None,
    ) -> Picks:
        x, router = self.without_derivative(ROUTER, (x, router))
        bias = None if router.bias is None else router.bias.astype(jnp.float32)
        inputs = pk.PickInputs(
            real=real.reshape(-1),
            bias=bias,
            table=router.table,
            ids=None if router.table is None else ids.reshape(-1),
        )
        rows, options = x.reshape(-1, x.shape[-1]), dict(picks=cfg.experts_per_token, scale=cfg.routed_scale)
        found = self._route(rows, router.gate, inputs, own, **options, **self.options)
        shape = *real.shape, cfg.experts_per_token
        return Picks(experts=found.experts.reshape(shape), weights=found.weights.reshape(shape), tiles=found.tiles)

    def _route(
        self, x: jax.Array, gate: Tree, inputs: pk.PickInputs, own: pk.OwnExperts | None, **options: Tree
    ) -> pk.Routed:
        return self.kernels.route(x, gate, inputs, own=own, **options)


class InvariantRouterKernels(RouterKernels):
    """The same in one launch for each part of the tokens, so that XLA never multiplies."""

    def unserved(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        if (reason := super().unserved(cfg, weights, dtype)) is not None:
            return reason
        hidden, picks = weights.gate.shape[1], cfg.experts_per_token
        if not self.kernels.most_of_a_part(hidden=hidden, experts=cfg.num_experts, picks=picks):
            return f"no launch routes tokens of {hidden} numbers to {cfg.num_experts} experts by itself"
        return None

    def _route(
        self, x: jax.Array, gate: Tree, inputs: pk.PickInputs, own: pk.OwnExperts | None, **options: Tree
    ) -> pk.Routed:
        assert own is None, "an invariant cache is on one device"
        return self.kernels.route_in_parts(x, gate, inputs, **options)


register(ROUTER, RouterKernels)
register_invariant(ROUTER, InvariantRouterKernels)
