"""Lightning indexer: which entries a query of a CSA layer reads.

    I_s = sum over heads h of w_h * relu(q_h . k_s)      for visible entries s; the top_k largest are read

Queries and keys are rotated by the Hadamard matrix after their rope, then rounded in the keys' format (4-bit formats).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.linear import hadamard, linear
from dsv4jax.paged_pool import PooledLayer
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope
from dsv4jax.weights import IndexerParams


def indexer_queries(
    params: IndexerParams, q_latent: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
) -> jax.Array:
    """f32 [B, T, indexer_heads, indexer_head_dim]: projected, roped, rotated, rounded as the keys are."""
    cfg = plan.cfg
    q = linear(q_latent, params.q_b).reshape(*q_latent.shape[:2], cfg.indexer_heads, cfg.indexer_head_dim)
    q = hadamard(apply_rope(q, positions[..., None], freqs))
    return plan.keys.decode(plan.keys.encode(q)) if plan.keys.rounds_queries else q


def head_weights(params: IndexerParams, x: jax.Array, plan: CachePlan) -> jax.Array:
    """w, f32 [B, T, indexer_heads], signed; carries both of the indexer's scale factors."""
    return linear(x, params.head_weights) * (plan.cfg.indexer_head_dim**-0.5 * plan.cfg.indexer_heads**-0.5)


def scores(queries: jax.Array, weights: jax.Array, layer: PooledLayer, visible: jax.Array) -> jax.Array:
    """f32 [B, T, max_entries]; -inf at and past ``visible`` [B, T], and only there.

    By tiles of entries: no per-head score of a whole context ever exists.
    """

    def fold(out: jax.Array, first: jax.Array | int, entry: jax.Array, seen: jax.Array) -> jax.Array:
        dots = jnp.einsum("bthd,bkd->bthk", queries, layer.keys(entry), precision=lax.Precision.HIGHEST)
        total = jnp.einsum("bth,bthk->btk", weights, jnp.maximum(dots, 0.0), precision=lax.Precision.HIGHEST)
        # A visible entry may score -inf; it must still beat those that are not visible. NaN goes first: left as it is,
        # its sign bit, which differs between machines, would place it first or last.
        total = jnp.where(jnp.isnan(total), jnp.inf, jnp.maximum(total, jnp.finfo(jnp.float32).min))
        return lax.dynamic_update_slice_in_dim(out, jnp.where(seen, total, -jnp.inf), first, axis=2)

    batch, tokens, heads, _ = queries.shape
    tile = layer.tile_size(batch * tokens * heads * 4)
    padded = -(-layer.max_entries // tile) * tile
    out = jnp.full((batch, tokens, padded), -jnp.inf, jnp.float32)
    return layer.fold_tiles(visible, tile, fold, out)[..., : layer.max_entries]


def pick(score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    """Entry numbers of the largest scores, int32 [B, T, min(top_k, entries)]; -1 past the visible ones.

    A NaN score ranks first in its own row and disturbs no other.
    """
    _, picks = lax.top_k(score, min(top_k, score.shape[-1]))
    return jnp.where(picks < visible[..., None], picks, -1).astype(jnp.int32)


def select_entries(queries: jax.Array, weights: jax.Array, layer: PooledLayer, visible: jax.Array) -> jax.Array:
    """The entries each query reads.

    Args:
      queries: f32 [B, T, indexer_heads, indexer_head_dim], from ``indexer_queries``.
      weights: f32 [B, T, indexer_heads], from ``head_weights``.
      visible: int32 [B, T] entries complete at each query: floor((p + 1) / ratio).

    Returns:
      int32 [B, T, k], k = min(indexer_top_k, max_entries); -1 past the visible ones. Order is free.
    """
    top_k = layer.plan.cfg.indexer_top_k
    if layer.max_entries <= top_k:  # everything visible is read: no need to score
        entry = jnp.arange(layer.max_entries, dtype=jnp.int32)[None, None]
        return jnp.where(entry < visible[..., None], entry, -1)
    return pick(scores(queries, weights, layer, visible), visible, top_k)
