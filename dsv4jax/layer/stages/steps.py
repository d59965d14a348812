"""The stages of a layer step by step: one op after another, in whatever backends these have.

In plain JAX these are the formulas of the layer, and what derivatives are taken from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.cache.stack import LayerStack
from dsv4jax.derivatives import storable
from dsv4jax.formats import KeyRows
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.dense import product_dtype
from dsv4jax.layer.indexer import project_queries
from dsv4jax.layer.ops import CacheUpdate, DecodeAttention, IndexerScores, InputProducts, Projections, RowForm, Rows
from dsv4jax.layer.stages.interface import Ending, Latents, Queries, Taken
from dsv4jax.layer.update import exact_entries, store
from dsv4jax.plan import CachePlan
from dsv4jax.rope import rope_frequencies
from dsv4jax.weights.deltas import split_delta
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import StoredWeight


@dataclasses.dataclass(frozen=True, slots=True)
class IntakeSteps:
    """Products, what they contribute, and the cache update."""

    projections: Projections
    cache_update: CacheUpdate

    def take(self, params: AttentionParams, x: jax.Array, call: LayerCall, *, is_draft: bool) -> Taken:
        positions = call.positions(x.shape[1])
        real = positions >= 0
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))  # NaN in padding would reach derivatives
        products = self.multiply(params, x, call)
        return self.take_products(params, products, call, x.dtype, is_draft=is_draft)

    def multiply(self, params: AttentionParams, x: jax.Array, call: LayerCall) -> InputProducts:
        """Multiply x by the weights that it feeds."""
        positions, compress = call.positions(x.shape[1]), None
        q_a_kv = self.projections.linear(x, params.q_a_kv, needed=positions >= 0)
        if params.compress is not None:
            # The barrier keeps the products separate: XLA would concatenate the weights of both in every step.
            x = lax.optimization_barrier(x)
            compress = self.projections.linear(x, params.compress, needed=positions >= 0)
        return InputProducts(q_a_kv=q_a_kv, compress=compress, start=call.batch.start, positions=positions)

    def take_products(
        self, params: AttentionParams, products: InputProducts, call: LayerCall, dtype: DTypeLike, *, is_draft: bool
    ) -> Taken:
        """Do what ``take`` does, with the products of an x of ``dtype``."""
        stores_window = products.positions.shape[1] == 1 and not is_draft
        parts = self.projections.parts(products, params, call, dtype, encode=not stores_window)
        rows = parts.rows if stores_window else dataclasses.replace(parts.rows, kv=None)
        exact = exact_entries(call, rows)
        stack = store(call, rows, self.cache_update, keep_tails=is_draft)
        return Taken(
            call=call.with_stack(stack),
            latents=Latents(rows=parts.latent, positions=products.positions, head_weights=parts.head_weights),
            kv=parts.rows.kv,
            fresh=parts.encoded,
            rows=parts.rows,
            exact=exact,
        )

    def close(self, taken: Taken, stack: LayerStack) -> LayerStack:
        call = taken.call
        if taken.fresh is None or taken.kv is None:
            return stack
        kv = storable(taken.kv, call.plan.row_spec)
        state = self.cache_update.append_swa(stack.state, call.index, kv, call.batch, call.plan)
        return dataclasses.replace(stack, state=state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuerySteps:
    """A product for each kind of queries, and its conversion."""

    projections: Projections
    attention: DecodeAttention
    scores: IndexerScores | None  # of a layer with an indexer
    plan: CachePlan
    kind: AttentionType

    def make(self, params: AttentionParams, latents: Latents) -> Queries:
        q = self.of_attention(params, latents)
        return Queries(q, self.of_indexer(params, latents) if self.kind.is_indexed else None)

    def of_attention(self, params: AttentionParams, latents: Latents) -> jax.Array:
        cfg, positions = self.plan.cfg, latents.positions
        product = self.projections.linear(latents.rows, params.q_b, needed=positions >= 0)
        product = product.reshape(*positions.shape, cfg.num_heads, cfg.head_dim)
        return self.attention.queries(product, positions, rope_frequencies(cfg, self.kind), self.plan, positions >= 0)

    def of_indexer(self, params: AttentionParams, latents: Latents) -> jax.Array | KeyRows:
        assert self.scores is not None
        assert params.index_q_b is not None
        q_b, rows = lax.stop_gradient((params.index_q_b, latents.rows))  # picks have no derivative
        freqs = rope_frequencies(self.plan.cfg, self.kind)
        return project_queries(q_b, rows, latents.positions, freqs, self.plan, self.projections, self.scores)

    def token_bytes(self, params: AttentionParams, tokens: int) -> int:
        del params, tokens
        cfg = self.plan.cfg
        return (4 + jnp.dtype(self.attention.query_dtype).itemsize) * cfg.num_heads * cfg.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSteps:
    """A product with W_oa, one with W_ob, and what ends the layer."""

    projections: Projections
    plan: CachePlan

    def takes(self, params: AttentionParams, latents: Latents) -> RowForm:
        del params, latents
        return "plain"

    def narrow(self, params: AttentionParams, rows: Rows, positions: jax.Array, tokens: int) -> jax.Array:
        del tokens
        assert isinstance(rows, jax.Array), "in the form that takes() names"
        count = self.plan.cfg.o_groups
        groups = rows.reshape(*positions.shape, count, -1)
        # bf16 if W_ob takes bf16, which saves a pass over an f32 result.
        o_a, _ = split_delta(params.o_a)
        dtype = groups.dtype if isinstance(o_a, StoredWeight) else product_dtype(groups, o_a)
        narrow = self.projections.linear(groups, params.o_a, dtype=dtype, groups=count, needed=positions >= 0)
        return narrow.reshape(*positions.shape, -1)

    def finish(self, params: AttentionParams, rows: Rows, ending: Ending) -> jax.Array:
        assert isinstance(rows, jax.Array), "from narrow()"
        dtype = ending.dtype if ending.axis is None else jnp.float32
        needed = ending.positions >= 0
        return ending.end(self.projections.linear(rows.astype(ending.dtype), params.o_b, dtype=dtype, needed=needed))
