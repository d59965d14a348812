"""The stage of a layer that makes queries, with kernels that make them of the sums of their product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.formats import KeyRows
from dsv4jax.layer.kernels.products import ProjectionsKernels, flat, needed_rows, row_form, weight_form
from dsv4jax.layer.ops import PROJECTIONS
from dsv4jax.layer.stages.interface import Latents, Queries
from dsv4jax.layer.stages.steps import QuerySteps
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import StoredWeight


@dataclasses.dataclass(frozen=True, slots=True)
class QueryKernels:
    """Queries of attention and of the indexer in one launch, or in one each, where a kernel makes them.

    Others are made step by step.
    """

    steps: QuerySteps
    kernels: ProjectionsKernels

    def make(self, params: AttentionParams, latents: Latents) -> Queries:
        q_b, index_q_b = params.q_b, params.index_q_b
        if not isinstance(q_b, StoredWeight) or latents.rows.dtype != jnp.bfloat16:
            return self.steps.make(params, latents)
        if isinstance(index_q_b, StoredWeight) and self._makes_both(q_b, index_q_b, latents):
            return self._both(q_b, index_q_b, latents)
        if self._makes_attentions(q_b, latents):
            q = self._of_attention(q_b, latents)
        else:
            q = self.steps.of_attention(params, latents)
        if index_q_b is None:
            return Queries(q, None)
        if isinstance(index_q_b, StoredWeight) and self._makes_indexers(index_q_b, latents):
            return Queries(q, self._of_indexer(index_q_b, latents))
        return Queries(q, self.steps.of_indexer(params, latents))

    def token_bytes(self, params: AttentionParams, tokens: int) -> int:
        """Products of many rounded rows make queries of their sums themselves."""
        plan = self.steps.plan
        if row_form(params.q_b, tokens) == "rounded":
            return 2 * plan.cfg.num_heads * plan.cfg.head_dim
        return self.steps.token_bytes(params, tokens)

    def _makes_attentions(self, weight: StoredWeight, latents: Latents) -> bool:
        cfg, asked = self.steps.plan.cfg, (weight.shape, weight_form(weight), latents.positions.size)
        return pk.unsupported_product_of_queries(*asked, cfg.head_dim, cfg.rope_dim) is None

    def _makes_indexers(self, weight: StoredWeight, latents: Latents) -> bool:
        plan, asked = self.steps.plan, (weight.shape, weight_form(weight), latents.positions.size)
        sizes, key_format = (plan.cfg.indexer_head_dim, plan.cfg.rope_dim), plan.indexer_format
        return pk.unsupported_product_of_indexer_queries(*asked, *sizes, key_format=key_format) is None

    def _makes_both(self, first: StoredWeight, second: StoredWeight, latents: Latents) -> bool:
        if weight_form(first) != weight_form(second):
            return False
        asked = (first.shape, second.shape), self._query_form(first), latents.positions.size
        return pk.unsupported_product_of_both_queries(*asked, self.steps.plan.cfg.rope_dim) is None

    def _of_attention(self, weight: StoredWeight, latents: Latents) -> jax.Array:
        """Multiply latents by W_qb, apply norm and rope, and round: f16 [B, T, H, head_dim]."""
        rows, weight = self.kernels.without_derivative(PROJECTIONS, (latents.rows, weight))
        positions, cfg = latents.positions, self.steps.plan.cfg
        given = flat(rows), weight.codes, weight.scales, weight_form(weight), self._angles(positions)
        queries = pk.product_of_queries(*given, eps=cfg.norm_eps, **self._options(positions))
        return queries.reshape(*positions.shape, -1, cfg.head_dim)

    def _of_indexer(self, weight: StoredWeight, latents: Latents) -> KeyRows:
        """Multiply latents by W_qb of the indexer, apply rope and Hadamard transform, and round: [B, T, H, ...]."""
        rows, weight = self.kernels.without_derivative(PROJECTIONS, (latents.rows, weight))
        positions, plan = latents.positions, self.steps.plan
        given = flat(rows), weight.codes, weight.scales, weight_form(weight), self._angles(positions)
        options: dict[str, Any] = dict(key_format=plan.indexer_format, **self._options(positions))
        queries = pk.product_of_indexer_queries(*given, plan.keys.row(plan.cfg.indexer_head_dim), **options)
        return _of_tokens(queries, positions)

    def _both(self, first: StoredWeight, second: StoredWeight, latents: Latents) -> Queries:
        """Do what the two above do, with a weight each, in one launch."""
        rows, first, second = self.kernels.without_derivative(PROJECTIONS, (latents.rows, first, second))
        form, positions = self._query_form(first), latents.positions
        weights = (first.codes, first.scales), (second.codes, second.scales)
        given = flat(rows), *weights, form, self._angles(positions)
        return Queries(*_of_tokens(pk.product_of_both_queries(*given, simulate=self.kernels.simulate), positions))

    def _query_form(self, weight: StoredWeight) -> pk.QueryForm:
        plan, cfg = self.steps.plan, self.steps.plan.cfg
        row, key_format = plan.keys.row(cfg.indexer_head_dim), plan.indexer_format
        return pk.QueryForm(weight=weight_form(weight), eps=cfg.norm_eps, key_row=row, key_format=key_format)

    def _angles(self, positions: jax.Array) -> jax.Array:
        freqs = rope_frequencies(self.steps.plan.cfg, self.steps.kind)
        return packed_angles(positions, freqs).reshape(positions.size, -1)

    def _options(self, positions: jax.Array) -> dict[str, Any]:
        return dict(needed=needed_rows(positions >= 0), simulate=self.kernels.simulate)


def _of_tokens[T](rows: T, positions: jax.Array) -> T:
    """Return rows [B T, ...] as [B, T, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(*positions.shape, *leaf.shape[1:]), rows)
