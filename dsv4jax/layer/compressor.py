"""Compressors: the streams of new tokens, and the steps from pooled rows to finished entries.

Each token contributes a key row k and a gate logit z per channel, both projections of its input. ``tails`` pools them.
A pooled row then gets a norm, and a rope at the position of its block's first token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.config import DSV4Config
from dsv4jax.derivatives import straight_through
from dsv4jax.indexing import remainder
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Backend
from dsv4jax.layer.call import Normed, TokenRows
from dsv4jax.layer.dense import rms_norm
from dsv4jax.layer.ops import PROJECTIONS
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.tails import Streams
from dsv4jax.weights.params import CompressorParams, IndexerParams, PoolParams
from dsv4jax.weights.stored import join


def streams_of(
    k: jax.Array, z: jax.Array, ape: jax.Array, start: jax.Array, dtype: DTypeLike, *, overlap: bool
) -> Streams:
    """Make the streams of new tokens from their products: k as it is, and z + ape[position mod ratio].

    Args:
      k, z: f32 [B, T, width], the products of x with W_kv and W_gate.
      ape: [ratio, width], ratio tokens per entry.
      start: int32 [B], position of each request's first new token.
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

    slot = remainder(start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None], ape.shape[0])
    ape = ape.astype(jnp.float32).at[slot].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return Streams(k=rounded(k), z=rounded(z + ape), overlap=overlap)


def project_streams(
    params: CompressorParams, x: jax.Array, start: jax.Array, ratio: int, dtype: DTypeLike, *, overlap: bool
) -> Streams:
    """Compute k = x W_kv and z = x W_gate + ape[position mod ratio].

    Args:
      params: the compressor's weights.
      x: [B, T, hidden].
      start: int32 [B], position of each request's first new token.
      ratio: tokens per entry.
      dtype: dtype of the tails, to which streams are rounded.
      overlap: True for CSA, which has two streams.
    """
    if params.ape.shape[0] != ratio:
        raise ValueError(f"ratio must be the {params.ape.shape[0]} rows of ape, got {ratio}")
    k, z = (PROJECTIONS[XLA].linear(x, weight) for weight in (params.kv, params.gate))
    return streams_of(k, z, params.ape, start, dtype, overlap=overlap)


def token_streams(
    product: jax.Array,
    entry: PoolParams | None,
    key: PoolParams | None,
    start: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
) -> tuple[Normed | None, Normed | None, jax.Array]:
    """Divide the product of x with ``AttentionParams.compress``, f32 [B, T, rows].

    Args:
      product: f32 [B, T, rows].
      entry, key: of the compressor and of the indexer's compressor; None where there is none.
      start: int32 [B], position of each request's first new token.

    Returns:
      (what the tokens contribute to entries; to indexer keys; the rest of the product, of the head weights). The first
      two are None where there is no such compressor.
    """

    def take(pool: PoolParams | None) -> Normed | None:
        nonlocal product
        if pool is None:
            return None
        k, z, product = jnp.split(product, [pool.width, 2 * pool.width], axis=-1)
        return streams_of(k, z, pool.ape, start, plan.tail_dtype, overlap=kind.overlaps), pool.norm

    return take(entry), take(key), product


def project_tokens(
    compressor: CompressorParams | None,
    indexer: IndexerParams | None,
    x: jax.Array,
    start: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
    backend: Backend = XLA,
) -> TokenRows:
    """Compute what tokens x [B, T, hidden] at positions from start int32 [B] contribute to entries and indexer keys.

    x must be finite even past a row's own tokens, because the projections of all T tokens are computed.
    """
    if compressor is None:
        return TokenRows(kv=None, entry=None, key=None)
    parts, key = [compressor.kv, compressor.gate], None
    if indexer is not None:
        # All rows of AttentionParams.compress, in order: XLA then sees that the parts are one array.
        parts += [indexer.compressor.kv, indexer.compressor.gate, indexer.head_weights]
        key = indexer.compressor.pool
    product = PROJECTIONS.of(backend, plan, kind).linear(x, join(*parts))
    entry_rows, key_rows, _ = token_streams(product, compressor.pool, key, start, plan, kind)
    return TokenRows(kv=None, entry=entry_rows, key=key_rows)


def finish_entries(
    pooled: jax.Array, norm: jax.Array, first: jax.Array, kind: AttentionType, cfg: DSV4Config
) -> jax.Array:
    """Apply RMSNorm and rope to pooled rows [B, N, dim].

    Row n of request b is entry first[b] + n, whose rope position is ratio * (first[b] + n).
    """
    ratio, freqs = cfg.ratio(kind), rope_frequencies(cfg, kind)
    entry = first[:, None] + jnp.arange(pooled.shape[1], dtype=jnp.int32)[None]
    return apply_rope(rms_norm(pooled, norm, cfg.norm_eps), ratio * entry, freqs)
