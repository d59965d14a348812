"""The stage of a layer that makes queries, with kernels that make them of the sums of their product."""

from __future__ import annotations

import dataclasses

import jax

import pallas_kernels as pk
from dsv4jax.checks import Tree
from dsv4jax.formats import KeyRows
from dsv4jax.layer.kernels.products import ProjectionsKernels, of_kernels
from dsv4jax.layer.stages.interface import Latents, Queries
from dsv4jax.layer.stages.steps import QuerySteps
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import Weight


@dataclasses.dataclass(frozen=True, slots=True)
class QueryKernels:
    """Queries of attention and of the indexer in one launch, or in one each, where a kernel makes them.

    Others are made step by step.
    """

    steps: QuerySteps

    @property
    def products(self) -> ProjectionsKernels:
        return of_kernels(self.steps.projections)

    def make(self, params: AttentionParams, latents: Latents) -> Queries:
        q_b, index_q_b = params.q_b, params.index_q_b
        if index_q_b is None:
            return Queries(self._of_attention(params, latents), None)
        weights = q_b, index_q_b
        both = self.products.plan(latents.rows, weights, (self._attention, self._indexer))
        if isinstance(both, pk.Plan):
            return Queries(*self._run(both, weights, latents))
        return Queries(self._of_attention(params, latents), self._of_indexer(params, index_q_b, latents))

    def token_bytes(self, params: AttentionParams, tokens: int) -> int:
        """Products of many rounded rows make queries of their sums themselves."""
        plan = self.steps.plan
        if self.products.row_form(params.q_b, tokens) == "rounded":
            return 2 * plan.cfg.num_heads * plan.cfg.head_dim
        return self.steps.token_bytes(params, tokens)

    @property
    def _attention(self) -> pk.AttentionQueries:
        cfg = self.steps.plan.cfg
        return pk.AttentionQueries(eps=cfg.norm_eps, rope_dim=cfg.rope_dim, head_dim=cfg.head_dim)

    @property
    def _indexer(self) -> pk.IndexerQueries:
        plan = self.steps.plan
        row = plan.keys.row(plan.cfg.indexer_head_dim)
        return pk.IndexerQueries(key_format=plan.indexer_format, key_row=row, rope_dim=plan.cfg.rope_dim)

    def _of_attention(self, params: AttentionParams, latents: Latents) -> jax.Array:
        """Multiply latents by W_qb, apply norm and rope, and round: [B, T, H, head_dim]."""
        real, weights = latents.positions >= 0, (params.q_b,)
        plan = self.products.plan(latents.rows, weights, (self._attention,), needed=real)
        if isinstance(plan, pk.Unsupported):
            return self.steps.of_attention(params, latents)
        (queries,) = self._run(plan, weights, latents, needed=real)
        return queries

    def _of_indexer(self, params: AttentionParams, weight: Weight, latents: Latents) -> jax.Array | KeyRows:
        """Multiply latents by W_qb of the indexer, apply rope and Hadamard transform, and round: [B, T, H, ...]."""
        real = latents.positions >= 0
        plan = self.products.plan(latents.rows, (weight,), (self._indexer,), needed=real)
        if isinstance(plan, pk.Unsupported):
            return self.steps.of_indexer(params, latents)
        (queries,) = self._run(plan, (weight,), latents, needed=real)
        return queries

    def _run(
        self, plan: pk.Plan, weights: tuple[Weight, ...], latents: Latents, needed: jax.Array | None = None
    ) -> tuple[Tree, ...]:
        """Return the queries that a plan makes, [B, T, ...]."""
        positions = latents.positions
        freqs = rope_frequencies(self.steps.plan.cfg, self.steps.kind)
        angles = packed_angles(positions, freqs).reshape(positions.size, -1)
        made = self.products.run(plan, latents.rows, weights, angles, needed=needed)
        return jax.tree.map(lambda leaf: leaf.reshape(*positions.shape, *leaf.shape[1:]), made)
