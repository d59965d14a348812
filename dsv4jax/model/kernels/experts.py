"""The kernels of experts that are stored in FP4: two products over tiles of tokens that picked the same expert.

For few tokens their launches have the shared expert's products, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.layer.kernels.base import register, register_invariant
from dsv4jax.layer.kernels.products import ProjectionsKernels, weight_arrays
from dsv4jax.layer.ops import Projections
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.kernels.base import ModelKernels
from dsv4jax.model.ops import EXPERTS, Picks
from dsv4jax.model.params import Experts, ExpertWeight, StoredExperts
from dsv4jax.model.plain.experts import of_shared
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

    def outputs(
        self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, projections: Projections
    ) -> tuple[jax.Array, jax.Array]:
        plans: tuple[pk.Plan, pk.Plan] | pk.Unsupported | None = None
        weights = experts.shared_gate_up, experts.shared_down
        if isinstance(projections, ProjectionsKernels):
            plans = projections.swiglu_plans(x, *weights, cfg.swiglu_limit)
        if plans is None or isinstance(plans, pk.Unsupported):
            return self.routed(x, picks, experts, cfg), of_shared(x, experts, cfg, projections)
        x, (gate_up, down) = self.without_derivative(EXPERTS, (x, tuple(map(weight_arrays, weights))))
        work = self._work(x, picks, experts, cfg)
        first = _Call(plan=plans[0], x=x.reshape(-1, x.shape[-1]), weight=gate_up)
        inner, inner_shared = self._run_both(work.gate_up(), first)
        second = _Call(plan=plans[1], x=inner_shared, weight=down)
        routed, shared = self._run_both(work.down(inner), second)
        return routed.reshape(*picks.experts.shape, x.shape[-1]), shared.reshape(x.shape)

    def routed(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
        work = self._work(x, picks, experts, cfg)
        return self._run(work.down(self._run(work.gate_up()))).reshape(*picks.experts.shape, x.shape[-1])

    def _run(self, call: _Call) -> Any:
        (made,) = self.kernels.run(call.plan, call.x, [call.weight], *call.extras, **self.options)
        return made

    def _run_both(self, experts: _Call, shared: _Call) -> tuple[Any, Any]:
        """Run a product with experts and one with the shared expert, in one launch if that is faster."""
        plan = self.kernels.together(experts.plan, shared.plan)
        if isinstance(plan, pk.Unsupported):
            return self._run(experts), self._run(shared)
        return self.kernels.run_together(plan, experts.operands, shared.operands, **self.options)

    def _work(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> _Work:
        rows, numbers = x.reshape(-1, x.shape[-1]), picks.experts.reshape(-1, cfg.experts_per_token)
        gains = picks.weights.reshape(-1).astype(jnp.float32)
        weights = experts.gate_up, experts.down
        rows, gains, weights = self.without_derivative(EXPERTS, (rows, gains, weights))
        routing = _routing(rows.shape[0], experts, cfg)
        routed = picks.tiles
        if routed is None or routed.rows != routing.rows:
            routed = pk.routed_tiles(numbers, experts.count, routing.rows)
        return _Work(rows=rows, gains=gains, weights=weights, routing=routing, routed=routed, limit=cfg.swiglu_limit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A product that is to be launched."""

    plan: pk.Plan
    x: Any
    weight: tuple[jax.Array, ...]
    extras: tuple[jax.Array, ...] = ()

    @property
    def operands(self) -> pk.Operands:
        return pk.Operands(x=self.x, weights=[self.weight], extras=self.extras)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The products with the experts that tokens picked."""

    rows: jax.Array  # [M, h]
    gains: jax.Array  # f32 [M k]
    weights: tuple[Any, Any]
    routing: pk.Routing
    routed: pk.RoutedTiles
    limit: float

    @property
    def lists(self) -> tuple[jax.Array, ...]:
        return self.routed.pairs, self.routed.tiles, self.routed.count

    def gate_up(self) -> _Call:
        return self._call(self.rows, self.weights[0], pk.Gated(routing=self.routing, limit=self.limit), self.gains)

    def down(self, inner: Any) -> _Call:
        return self._call(inner, self.weights[1], pk.OfPicks(routing=self.routing))

    def _call(self, x: Any, weight: Any, epilogue: Any, *extras: jax.Array) -> _Call:
        plan = _plan(weight, epilogue, self.rows.dtype)
        if isinstance(plan, pk.Unsupported):
            raise ValueError(f"no kernel serves this product: {plan.reason}")
        return _Call(plan=plan, x=x, weight=(weight.codes, weight.scales), extras=(*self.lists, *extras))


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
    if weight.interleaved_for not in (None, weight.activations):
        reason = f"codes are interleaved for {weight.interleaved_for!r}, not for activations={weight.activations!r}"
        return pk.Unsupported(kind="no kernel", reason=reason)
    experts, *shape = weight.shape
    spec = pk.ExpertsSpec(
        experts=experts,
        shape=tuple(shape),
        block=weight.block,
        activations=weight.activations,
        interleaved=weight.interleaved_for is not None,
    )
    rows = pk.RowsSpec(count=epilogue.x_rows, width=spec.inputs, dtype=dtype)
    problem = pk.Problem(rows=rows, weights=(spec,), epilogues=(epilogue,))
    if jnp.dtype(dtype) == jnp.bfloat16:
        problem = dataclasses.replace(problem, rows=pk.rows_taken(problem))
    return pk.plan(problem)


register(EXPERTS, ExpertsKernels)
register_invariant(EXPERTS, ExpertsKernels)  # a token is added up in the same order in tiles of every size
