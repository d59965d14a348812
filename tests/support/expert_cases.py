"""Products with experts for tests: random routing and weights, the exact result, and a run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import pallas_kernels as pk
from dsv4jax.formats import fp8_rounded
from pallas_kernels.activations import PlainRows
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.products.experts.epilogues import ExpertEpilogue
from pallas_kernels.products.experts.launch import OfExperts
from pallas_kernels.products.experts.rows import expert_rows

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of random numbers, and the tokens that pick them."""

    tokens: int
    picks: int = 2
    experts: int = 3
    hidden: int = 512
    width: int = 512
    rows: int = 8  # of a tile
    limit: float = 10.0
    blocks: int = 2  # of a launch
    stages: int = 0  # 0 for the most that fit
    padding: int = 0  # tokens, the last ones
    interleaved: bool = True  # whether codes are
    one: bool = False  # whether all tokens pick the last experts
    activations: str = "bf16"

    @property
    def stored(self) -> dict[str, Any]:
        return {"interleaved": self.interleaved, "activations": self.activations}

    @property
    def routing(self) -> pk.Routing:
        return pk.Routing(
            tokens=self.tokens,
            picks=self.picks,
            experts=self.experts,
            rows=self.rows,
            activations=self.activations,
        )

    @functools.cached_property
    def picked(self) -> np.ndarray:
        """int32 [tokens, picks], ascending; the number of no expert on padding."""
        rng = np.random.default_rng(self.tokens)
        each = [np.sort(rng.permutation(self.experts)[: self.picks]) for _ in range(self.tokens)]
        picked = np.stack(each).astype(np.int32)
        if self.one:
            picked[:] = np.arange(self.experts - self.picks, self.experts)
        picked[self.tokens - self.padding :] = self.experts
        return picked

    @functools.cached_property
    def gains(self) -> np.ndarray:
        """f32 [tokens, picks], the weights of picks."""
        return np.random.default_rng(2).uniform(0.1, 1.5, (self.tokens, self.picks)).astype(np.float32)

    def weight(self, outputs: int, inputs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and scales as ``ExpertsSpec.arrays`` says."""
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (self.experts, outputs, inputs // 2), np.uint8)
        scales = rng.integers(117, 123, (self.experts, outputs, inputs // 32), np.uint8)
        return codes, scales.view(ml_dtypes.float8_e8m0fnu)

    @functools.cached_property
    def gate_up(self) -> tuple[np.ndarray, np.ndarray]:
        return self.weight(2 * self.width, self.hidden, 3)

    @functools.cached_property
    def down(self) -> tuple[np.ndarray, np.ndarray]:
        return self.weight(self.hidden, self.width, 4)

    @functools.cached_property
    def x(self) -> np.ndarray:
        """bf16 [tokens, hidden]; NaN on padding."""
        x = np.random.default_rng(5).standard_normal((self.tokens, self.hidden))
        x[self.tokens - self.padding :] = np.nan
        return x.astype(ml_dtypes.bfloat16)

    @functools.cached_property
    def inner(self) -> np.ndarray:
        """bf16 [pairs, width], rows of the second product; NaN on padding."""
        inner = np.random.default_rng(6).standard_normal((self.tokens * self.picks, self.width))
        inner[(self.tokens - self.padding) * self.picks :] = np.nan
        return inner.astype(ml_dtypes.bfloat16)

    def plan(self, spec: pk.ExpertsSpec, epilogue: ExpertEpilogue, gpu: GPU = HOPPER) -> pk.Plan:
        rows = pk.RowsSpec(count=epilogue.x_rows, width=spec.inputs)
        problem = pk.Problem(rows=rows, weights=(spec,), epilogues=(epilogue,))
        plan = pk.plan(dataclasses.replace(problem, rows=pk.rows_taken(problem, gpu)), gpu)
        assert isinstance(plan, pk.Plan), plan
        assert isinstance(plan.kernel, OfExperts)
        layouts = tuple(
            dataclasses.replace(layout, blocks=self.blocks, stages=self.stages or layout.stages)
            for layout in plan.kernel.layouts
        )
        return dataclasses.replace(plan, kernel=dataclasses.replace(plan.kernel, layouts=layouts))

    def run_gate_up(
        self, x: np.ndarray | None = None, gains: np.ndarray | None = None, gate_up: Any = None, *, simulate: bool
    ) -> np.ndarray:
        """Return the gated rows of sorted pairs, f32 [pairs, width]. Arguments replace the case's own."""
        made = self.make_gate_up(x, gains, gate_up, simulate=simulate)
        return np.asarray(made.in_order().astype(jnp.float32))

    def make_gate_up(
        self, x: np.ndarray | None = None, gains: np.ndarray | None = None, gate_up: Any = None, *, simulate: bool
    ) -> Any:
        """Return them as the kernel stores them."""
        spec = pk.ExpertsSpec(experts=self.experts, shape=(2 * self.width, self.hidden), **self.stored)
        plan = self.plan(spec, pk.Gated(routing=self.routing, limit=self.limit))
        x, gains = self.x if x is None else x, self.gains if gains is None else gains
        gate_up = self.gate_up if gate_up is None else gate_up
        return self._run(plan, x, gate_up, (gains.reshape(-1),), simulate)

    def run_down(self, inner: np.ndarray | None = None, down: Any = None, *, simulate: bool) -> np.ndarray:
        """Return the outputs of picks, f32 [tokens, picks, hidden]. Arguments replace the case's own."""
        spec = pk.ExpertsSpec(experts=self.experts, shape=(self.hidden, self.width), **self.stored)
        plan = self.plan(spec, pk.OfPicks(routing=self.routing))
        inner, down = self.inner if inner is None else inner, self.down if down is None else down
        return np.asarray(self._run(plan, inner, down, (), simulate).astype(jnp.float32))

    def _run(self, plan: pk.Plan, x: Any, weight: Any, extras: tuple[Any, ...], simulate: bool) -> Any:
        def run(x: Any, weight: Any, picked: Any, extras: Any) -> Any:
            routed = pk.routed_tiles(picked, self.experts, self.rows)
            codes, scales = weight
            codes = pk.interleaved_codes(codes, self.activations) if self.interleaved else codes
            is_first = plan.problem.epilogues[0].name == pk.Gated.name
            rows = x if is_first else self.gated(x)
            lists = routed.pairs, routed.tiles, routed.count
            (made,) = pk.run(plan, rows, [(codes, scales)], *lists, *extras, simulate=simulate)
            return made

        return jax.jit(run)(x, weight, self.picked, extras)

    def gated(self, x: jax.Array) -> Any:
        """Return rows of bf16 [pairs, width] as the second product takes them."""
        return expert_rows(PlainRows(values=x), self.routing.row_kind, simulate=True)

    def relative(self, *, simulate: bool) -> float:
        """Return how far sums may be off, relative to their magnitudes.

        Products of operands are exact in f32, and their sums are off by far less than 2^-17. Of FP8, tensor cores keep
        fewer bits: ``product_cases`` has the reason and the bound.
        """
        return 2.0**-10 if self.activations == "fp8" and not simulate else 2.0**-17

    def multiplied(self, x: np.ndarray) -> np.ndarray:
        """Return rows of bf16 as they enter products, in f64: rounded, if they are."""
        if self.activations == "fp8":
            x = np.asarray(fp8_rounded(jnp.asarray(x), 128))
        return x.astype(np.float64)

    @property
    def order(self) -> np.ndarray:
        """The sorted pairs, without padding."""
        picked = self.picked.reshape(-1)
        return np.argsort(picked, kind="stable")[: np.sum(picked < self.experts)]

    def sums(self, x: np.ndarray, weight: tuple[np.ndarray, np.ndarray], expert: Any) -> np.ndarray:
        """Return a product with an expert in f64, and the same of magnitudes: [2, rows, outputs]."""
        codes, scales = weight[0][expert], np.repeat(weight[1][expert].astype(np.float64), 32, -1)
        wide = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(scales.shape) * scales
        x = self.multiplied(x)
        return np.stack([x @ wide.T, np.abs(x) @ np.abs(wide).T])
