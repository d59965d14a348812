"""Compressors: the streams of new tokens, and the steps from pooled rows to finished entries.

Each token contributes a key row k and a gate logit z per channel, both projections of its input. ``tails`` pools them.
A pooled row then gets a norm, and a rope at the position of its block's first token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.config import DSV4Config
from dsv4jax.derivatives import straight_through
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.call import Normed, TokenRows
from dsv4jax.linear import linear, rms_norm
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.tails import Streams
from dsv4jax.weights.params import CompressorParams, IndexerParams


def project_streams(
    params: CompressorParams, x: jax.Array, start: jax.Array, ratio: int, dtype: Any, *, overlap: bool
) -> Streams:
    """Compute k = x W_kv and z = x W_gate + ape[position mod ratio].

    Args:
      params: the compressor's weights.
      x: [B, T, hidden].
      start: int32 [B], position of each request's first new token.
      ratio: tokens per entry.
      dtype: dtype of the tails. Streams are rounded to it at once, so that an entry does not depend on how its tokens
        were split over calls.
      overlap: True for CSA, which has two streams.
    """

    def rounded(stream: jax.Array) -> jax.Array:
        if dtype == jnp.float32:
            return stream
        # The barrier keeps XLA from removing the conversion to a narrower dtype and back.
        stored = lax.optimization_barrier(lax.stop_gradient(stream).astype(dtype)).astype(jnp.float32)
        return straight_through(stored, stream)

    slot = (start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]) % ratio
    k = rounded(linear(x, params.kv))
    z = rounded(linear(x, params.gate) + params.ape.astype(jnp.float32)[slot])
    return Streams(k=k, z=z, overlap=overlap)


def project_tokens(
    compressor: CompressorParams | None,
    indexer: IndexerParams | None,
    x: jax.Array,
    start: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
) -> TokenRows:
    """Compute what tokens x [B, T, hidden] at positions from start int32 [B] contribute to entries and indexer keys.

    x must be finite even past a row's own tokens, because the projections of all T tokens are computed.
    """

    def normed(params: CompressorParams | None) -> Normed | None:
        if params is None:
            return None
        ratio = plan.cfg.ratio(kind)
        return project_streams(params, x, start, ratio, plan.tail_dtype, overlap=kind.overlaps), params.norm

    return TokenRows(kv=None, entry=normed(compressor), key=normed(indexer and indexer.compressor))


def finish_entries(
    pooled: jax.Array, norm: jax.Array, first: jax.Array, kind: AttentionType, cfg: DSV4Config
) -> jax.Array:
    """Apply RMSNorm and rope to pooled rows [B, N, dim].

    Row n of request b is entry first[b] + n, whose rope position is ratio * (first[b] + n).
    """
    ratio, freqs = cfg.ratio(kind), rope_frequencies(cfg, kind)
    entry = first[:, None] + jnp.arange(pooled.shape[1], dtype=jnp.int32)[None]
    return apply_rope(rms_norm(pooled, norm, cfg.norm_eps), ratio * entry, freqs)
