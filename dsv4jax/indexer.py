"""Lightning indexer: which entries a query of a CSA layer reads.

    I_s = sum over heads h of w_h * relu(q_h . k_s)      for visible entries s; the top_k largest are read

Queries and keys are rotated by the Hadamard matrix after their rope, then rounded in the keys' format (4-bit formats).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.config import AttentionType
from dsv4jax.linear import hadamard, linear
from dsv4jax.paged_pool import PagedPool, gather_entries
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope
from dsv4jax.weights import IndexerParams

SCORE_TILE_BYTES = 32 << 20  # per-head scores of one tile of keys; bounds the temporaries of a long context


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


def scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: PagedPool,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    visible: jax.Array,
    plan: CachePlan,
) -> jax.Array:
    """f32 [B, T, max_blocks * entries_per_block]; -inf at and past ``visible`` [B, T], and only there.

    Runs over tiles of blocks up to the longest row, so that a short context costs little in a cache planned for a long
    one and no per-head score of the whole context ever exists.
    """
    batch, tokens, heads, _ = queries.shape
    max_blocks, per_block = block_table.shape[1], jax.tree.leaves(pool.indexer_keys)[0].shape[2]
    tile_blocks = min(max_blocks, max(1, SCORE_TILE_BYTES // (batch * tokens * heads * per_block * 4)))
    tile = tile_blocks * per_block
    num_tiles = -(-max_blocks // tile_blocks)

    def score_tile(i: jax.Array | int) -> jax.Array:
        entry = (i * tile + jnp.arange(tile, dtype=jnp.int32))[None]
        seen = entry[None] < visible[..., None]  # [B, T, tile]
        wanted = jnp.where(jnp.any(seen, axis=1), entry, -1)
        keys, valid = gather_entries(pool.indexer_keys, index, block_table, slots, wanted)
        keys = jnp.where(valid[..., None], plan.keys.decode(keys), 0.0)
        dots = jnp.einsum("bthd,bkd->bthk", queries, keys, precision=lax.Precision.HIGHEST)
        total = jnp.einsum("bth,bthk->btk", weights, jnp.maximum(dots, 0.0), precision=lax.Precision.HIGHEST)
        # A visible entry may score -inf; it must still beat those that are not visible.
        # NaN goes first: left as it is, its sign bit, which differs between machines, would place it first or last.
        total = jnp.where(jnp.isnan(total), jnp.inf, jnp.maximum(total, jnp.finfo(jnp.float32).min))
        return jnp.where(seen, total, -jnp.inf)

    if num_tiles == 1:
        return score_tile(0)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, score_tile(i), i * tile, axis=2)

    out = jnp.full((batch, tokens, num_tiles * tile), -jnp.inf, jnp.float32)
    out = lax.fori_loop(0, (jnp.max(visible) + tile - 1) // tile, body, out)
    return out[..., : max_blocks * per_block]


def pick(score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    """Entry numbers of the largest scores, int32 [B, T, min(top_k, entries)]; -1 past the visible ones.

    A NaN score ranks first in its own row and disturbs no other.
    """
    _, picks = lax.top_k(score, min(top_k, score.shape[-1]))
    return jnp.where(picks < visible[..., None], picks, -1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="plan")
def select_entries(
    queries: jax.Array,
    weights: jax.Array,
    pool: PagedPool,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    visible: jax.Array,
    *,
    plan: CachePlan,
) -> jax.Array:
    """The entries each query reads.

    Args:
      queries: f32 [B, T, indexer_heads, indexer_head_dim], from ``indexer_queries``.
      weights: f32 [B, T, indexer_heads], from ``head_weights``.
      visible: int32 [B, T] entries complete at each query: floor((p + 1) / ratio).

    Returns:
      int32 [B, T, k], k = min(indexer_top_k, entries the plan can hold); -1 past the visible ones. Order is free.
    """
    total = block_table.shape[1] * plan.entries_per_block(AttentionType.CSA)
    if total <= plan.cfg.indexer_top_k:  # everything visible is read: no need to score
        entry = jnp.arange(total, dtype=jnp.int32)[None, None]
        return jnp.where(entry < visible[..., None], entry, -1)
    score = scores(queries, weights, pool, index, block_table, slots, visible, plan)
    return pick(score, visible, plan.cfg.indexer_top_k)
