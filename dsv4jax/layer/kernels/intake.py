"""The stage of a layer that takes its input, with kernels that fuse it.

decode   both products of x in a launch, then norms, rounding and the cache update in another one
chunks   the products, what tokens contribute, and the entries that they complete; window rows are stored last
drafts   as in chunks, step by step
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.cache.stack import LayerStack
from dsv4jax.checks import Named
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.kernels.base import of_chunk
from dsv4jax.layer.kernels.cache import CacheUpdateKernels
from dsv4jax.layer.kernels.products import ProjectionsKernels, of_kernels, token_products
from dsv4jax.layer.ops import CACHE_UPDATE, InputProducts
from dsv4jax.layer.stages.interface import Latents, Taken
from dsv4jax.layer.stages.steps import IntakeSteps
from dsv4jax.weights.params import AttentionParams, PoolParams


@dataclasses.dataclass(frozen=True, slots=True)
class IntakeKernels:
    """Products, what they contribute, and the cache update, in two launches for one token of each request."""

    steps: IntakeSteps

    @property
    def products(self) -> ProjectionsKernels:
        return of_kernels(self.steps.projections)

    @property
    def kernels(self) -> CacheUpdateKernels:
        assert isinstance(self.steps.cache_update, CacheUpdateKernels), "of the products' backend"
        return self.steps.cache_update

    def take(self, params: AttentionParams, x: jax.Array, call: LayerCall, *, is_draft: bool) -> Taken:
        plan, products, num_tokens = call.plan, self._multiply(params, x, call), x.shape[1]
        given = token_products(products, params, plan, call.kind)
        is_fused = given.has_aligned_streams and not is_draft
        if num_tokens == 1 and pk.unsupported_token_step(call.stack.state.tail, given) is not None:
            is_fused = False
        if not is_fused:
            return self.steps.take_products(params, products, call, x.dtype, is_draft=is_draft)
        rounding = self.products.rounding(params, products, plan, x.dtype, encode=True)
        call, given, params = self.kernels.without_derivative(CACHE_UPDATE, (call, given, params))
        tokens = self.kernels.new_tokens(call, num_tokens, None, _product_streams(given, params, rounding))
        store = self._store_token if num_tokens == 1 else self._store_chunk
        return store(call, tokens, given, rounding)

    def close(self, taken: Taken, stack: LayerStack) -> LayerStack:
        return self.steps.close(taken, stack)

    def _multiply(self, params: AttentionParams, x: jax.Array, call: LayerCall) -> InputProducts:
        """Multiply x by the weights that it feeds, in one launch where that is faster."""
        if params.compress is None:
            return self.steps.multiply(params, x, call)
        weights = params.compress, params.q_a_kv
        plan = self.products.plan(x, weights, (pk.Store(), pk.Store()))
        if isinstance(plan, pk.Unsupported):
            return self.steps.multiply(params, x, call)
        made = self.products.run(plan, x, weights)
        compress, q_a_kv = (product.reshape(*x.shape[:-1], -1) for product in made)
        positions = call.positions(x.shape[1])
        return InputProducts(q_a_kv=q_a_kv, compress=compress, start=call.batch.start, positions=positions)

    def _store_token(
        self, call: LayerCall, tokens: pk.NewTokens, given: pk.TokenProducts, rounding: pk.TokenRounding
    ) -> Taken:
        """Compute what a token of each request contributes, and store all of it, in one launch."""
        stack, parts = pk.token_step(call.stack, tokens, given, rounding, **self._options(call, tokens))
        return Taken(call=call.with_stack(stack), latents=_latents(given, parts))

    def _store_chunk(
        self, call: LayerCall, tokens: pk.NewTokens, given: pk.TokenProducts, rounding: pk.TokenRounding
    ) -> Taken:
        """Compute what tokens contribute but for the streams, and store the entries that they complete."""
        plan, stack = call.plan, call.stack
        parts = pk.token_parts(
            given,
            rounding,
            row_spec=plan.row_spec,
            has_streams=False,
            reads_padding=of_chunk(given.positions >= 0) is None,
            **self.kernels.options,
        )
        if tokens.entry is not None:
            formats = dict(kv_format=plan.kv_format, eps=plan.cfg.norm_eps)
            stack = pk.append_chunk(stack, tokens, **formats, **self._options(call, tokens))
        return Taken(call=call.with_stack(stack), latents=_latents(given, parts), kv=parts.kv, fresh=parts.stored)

    def _options(self, call: LayerCall, tokens: pk.NewTokens) -> Named:
        ratio = None if tokens.entry is None else call.ratio
        return dict(key_format=call.plan.indexer_format, ratio=ratio, **self.kernels.options)


def _latents(given: pk.TokenProducts, parts: pk.TokenParts) -> Latents:
    return Latents(rows=parts.latent, positions=given.positions, head_weights=parts.head_weights)


def _product_streams(
    products: pk.TokenProducts, params: AttentionParams, rounding: pk.TokenRounding
) -> tuple[pk.ProductStreams | None, pk.ProductStreams | None]:
    """Return the streams of both compressors, as columns of the product with their weights."""

    def streams(pool: PoolParams | None, ape: jax.Array | None, first: int) -> pk.ProductStreams | None:
        if pool is None:
            return None
        assert products.compress is not None
        assert ape is not None
        is_bf16 = rounding.stream_dtype == jnp.bfloat16
        return pk.ProductStreams(product=products.compress, ape=ape, norm=pool.norm, first=first, is_bf16=is_bf16)

    entry = streams(params.entry_pool, products.entry_ape, 0)
    return entry, streams(params.key_pool, products.key_ape, 2 * products.widths[0])
