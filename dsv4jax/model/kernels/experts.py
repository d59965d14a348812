"""The kernels of experts that are stored in FP4: two launches over tiles of tokens that picked the same expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.layer.kernels.base import register, register_invariant
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.kernels.base import ModelKernels
from dsv4jax.model.ops import EXPERTS, Picks
from dsv4jax.model.params import Experts, ExpertWeight, StoredExperts
from dsv4jax.weights.stored import SCALES


class ExpertsKernels(ModelKernels):
    """``pallas_kernels.products`` with the weights of experts."""

    def unserved(self, cfg: ModelConfig, weights: Any, dtype: Any) -> str | None:
        routing = _routing(1, weights, cfg)
        for weight, epilogue in ((weights.gate_up, pk.Gated), (weights.down, pk.OfPicks)):
            if not isinstance(weight, StoredExperts) or not weight.is_fp4 or weight.scales.dtype != SCALES:
                return "experts must be stored in FP4, with scales in E8M0"
            found = _plan(weight, epilogue(routing=routing), dtype)
            if isinstance(found, pk.Unsupported):
                return found.reason
        return None

    def routed(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
        rows, numbers = x.reshape(-1, x.shape[-1]), picks.experts.reshape(-1, cfg.experts_per_token)
        gains = picks.weights.reshape(-1).astype(jnp.float32)
        weights = experts.gate_up, experts.down
        rows, gains, (gate_up, down) = self.without_derivative(EXPERTS, (rows, gains, weights))
        routing = _routing(rows.shape[0], experts, cfg)
        routed = picks.tiles
        if routed is None or routed.rows != routing.rows:
            routed = pk.routed_tiles(numbers, experts.count, routing.rows)
        lists = routed.pairs, routed.tiles, routed.count
        gated = pk.Gated(routing=routing, limit=cfg.swiglu_limit)
        inner = self._product(routing.rows_of(rows, routed.pairs), gate_up, gated, *lists, gains)
        outputs = self._product(inner, down, pk.OfPicks(routing=routing), *lists)
        return outputs.reshape(*picks.experts.shape, x.shape[-1])

    def _product(self, x: jax.Array | pk.ExpertRows, weight: Any, epilogue: Any, *extras: jax.Array) -> Any:
        plan = _plan(weight, epilogue, x.dtype)
        if isinstance(plan, pk.Unsupported):
            raise ValueError(f"no kernel serves this product: {plan.reason}")
        (made,) = self.kernels.run(plan, x, [(weight.codes, weight.scales)], *extras, **self.options)
        return made


def _routing(tokens: int, experts: Experts, cfg: ModelConfig) -> pk.Routing:
    picks, weight = cfg.experts_per_token, experts.gate_up
    return pk.Routing(
        tokens=tokens,
        picks=picks,
        experts=experts.count,
        rows=pk.tile_rows(tokens, picks, cfg.num_experts),  # an expert has as many tokens if others are elsewhere
        activations=weight.activations if isinstance(weight, StoredExperts) else "bf16",
    )


def _plan(weight: ExpertWeight, epilogue: Any, dtype: Any) -> pk.Plan | pk.Unsupported:
    assert isinstance(weight, StoredExperts)
    experts, *shape = weight.shape
    spec = pk.ExpertsSpec(
        experts=experts,
        shape=tuple(shape),
        block=weight.block,
        activations=weight.activations,
        interleaved=weight.interleaved,
    )
    rows = pk.RowsSpec(count=epilogue.x_rows, width=spec.inputs, dtype=dtype)
    problem = pk.Problem(rows=rows, weights=(spec,), epilogues=(epilogue,))
    if jnp.dtype(dtype) == jnp.bfloat16:
        problem = dataclasses.replace(problem, rows=pk.rows_taken(problem))
    return pk.plan(problem)


register(EXPERTS, ExpertsKernels)
register_invariant(EXPERTS, ExpertsKernels)  # a token is added up in the same order in tiles of every size
