"""The lightning indexer, which decides which entries a query of a CSA layer reads.

    I_s = sum over heads h of w_h * relu(q_h . k_s)      for visible entries s; the top_k largest are read

Queries and keys are multiplied by a Hadamard matrix after their rope. With 4-bit key formats, both are then rounded.

Which entries are picked has no derivative, so an indexer learns nothing from a model's loss. DeepSeek trains it to give
what attention gives: for each query, with p the weights of attention over the entries, summed over the heads and
divided by their sum,

    loss = KL(p || softmax(I)) = sum over entries s of p_s (log p_s - log softmax(I)_s)

p is a constant, and so are the inputs of the indexer: no other weight learns from this loss.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as pk
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.checks import check_array, known_size
from dsv4jax.formats import KeyRows
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.attention import RunningSoftmax
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.dense import hadamard
from dsv4jax.layer.ops import INDEXER_SCORES, PROJECTIONS, TOP_K, IndexerScores, Projections, TopK
from dsv4jax.layer.tiles import map_tokens
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope
from dsv4jax.weights.params import IndexerParams
from dsv4jax.weights.stored import Weight

# The entries that the loss is over, and which attention reads: those that the indexer picks; or all that a query sees,
# as in DeepSeek's warm-up, when attention is dense and nothing but the indexer is trained.
Over = Literal["picked", "all"]
OVER: tuple[Over, ...] = ("picked", "all")

PICKS = (jnp.int32, jnp.int16, jnp.int8)  # dtypes of picks that are given, and not made here
SCORE_BYTES = 192 << 20  # of scores at a time; those of more tokens are computed and picked from group by group


def indexer_queries(
    params: IndexerParams,
    q_latent: jax.Array,
    positions: jax.Array,
    freqs: np.ndarray,
    plan: CachePlan,
    backend: Backend = XLA,
) -> jax.Array | KeyRows:
    """Compute the indexer's queries: project ``q_latent`` [B, T, q_lora_rank], then apply rope and Hadamard transform.

    Args:
      backend: of ``projections`` and of ``indexer_scores``: None for the fastest available, a name from ``backends()``,
        or ``OpBackends``.

    Returns:
      f32 [B, T, indexer_heads, indexer_head_dim], which the caller rounds as the keys are; or, if the backend is a
      kernel, queries already rounded by it.
    """
    kind = AttentionType.CSA
    projections, scores = PROJECTIONS.of(backend, plan, kind), INDEXER_SCORES.of(backend, plan, kind)
    return project_queries(params.q_b, q_latent, positions, freqs, plan, projections, scores)


def project_queries(
    q_b: Weight,
    q_latent: jax.Array | pk.OperandRows,
    positions: jax.Array,
    freqs: np.ndarray,
    plan: CachePlan,
    projections: Projections,
    scores: IndexerScores,
) -> jax.Array | KeyRows:
    """Do what ``indexer_queries`` describes, with W_qb of the indexer alone."""
    cfg = plan.cfg
    # The barrier keeps this product separate from that of the main queries. XLA would otherwise concatenate the weights
    # of both, 84 MB, in every step.
    product = projections.linear(lax.optimization_barrier(q_latent), q_b, needed=positions >= 0)
    q = product.reshape(*q_latent.shape[:2], cfg.indexer_heads, cfg.indexer_head_dim)
    return scores.queries(q, positions, freqs, plan)


def head_weights(params: IndexerParams, x: jax.Array, plan: CachePlan) -> jax.Array:
    """Compute the signed weights w of the heads, f32 [B, T, indexer_heads].

    Both scale factors of the indexer are included.
    """
    return PROJECTIONS[XLA].linear(x, params.head_weights) * head_factor(plan)


def head_factor(plan: CachePlan) -> float:
    """The indexer's scale factors, by which the product of x with the rows of the head weights is multiplied."""
    return plan.cfg.indexer_head_dim**-0.5 * plan.cfg.indexer_heads**-0.5


def masked(score: jax.Array, seen: jax.Array) -> jax.Array:
    """Return ``score``, but -inf where not ``seen``, and only there.

    A visible entry with score -inf is raised to the smallest finite number, so that it still ranks above invisible
    ones.
    """
    return jnp.where(seen, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)


def scores(queries: jax.Array, weights: jax.Array, layer: PooledLayer, visible: jax.Array) -> jax.Array:
    """Compute the scores of all entries, f32 [B, T, max_entries].

    Scores from ``visible`` int32 [B, T] on are -inf, and only these. Computed in tiles of entries, so that the scores
    of the individual heads never exist for the whole context at once.
    """

    def fold(out: jax.Array, first: jax.Array | int, entry: jax.Array, seen: jax.Array) -> jax.Array:
        dots = jnp.einsum("bthd,bkd->bthk", queries, layer.keys(entry), precision=lax.Precision.HIGHEST)
        total = jnp.einsum("bth,bthk->btk", weights, jnp.maximum(dots, 0.0), precision=lax.Precision.HIGHEST)
        # NaN ranks first. Left as NaN it would rank first or last depending on its sign bit, which differs between
        # machines.
        total = masked(jnp.where(jnp.isnan(total), jnp.inf, total), seen)
        return lax.dynamic_update_slice_in_dim(out, total, first, axis=2)

    batch, tokens, heads, _ = queries.shape
    tile = layer.tile_size(known_size(batch, layer.plan.max_requests) * tokens * heads * 4)
    padded = -(-layer.max_entries // tile) * tile
    out = jnp.full((batch, tokens, padded), -jnp.inf, jnp.float32)
    return layer.fold_tiles(visible, tile, fold, out)[..., : layer.max_entries]


def pick(score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    """Return the numbers of the entries with the largest scores, int32 [B, T, min(top_k, entries)], ascending, then -1.

    Among equal scores the lowest entry is picked. A NaN score ranks first in its own row and does not affect other
    rows. Scores from ``visible`` int32 [B, T] on are ignored.
    """
    entry = jnp.arange(score.shape[-1], dtype=jnp.int32)
    # Rank and order exactly as the kernel does, so that attention sums in the same order for both. For XLA -0 would
    # rank below 0, and the sign of a NaN would matter.
    score = jnp.where(score == 0, 0.0, jnp.where(jnp.isnan(score), jnp.nan, score))
    _, picks = lax.top_k(masked(score, entry[None, None] < visible[..., None]), min(top_k, score.shape[-1]))
    picks = jnp.sort(picks, axis=-1)
    return jnp.where(picks < visible[..., None], picks, -1)


def ordered_picks(picks: jax.Array, visible: jax.Array) -> jax.Array:
    """Return picks int [B, T, K] of any origin as those of an indexer: int32, ascending, then -1.

    Those that are not visible to their query, or were there before, are left out. ``visible`` is int32 [B, T].
    """
    picks = picks.astype(jnp.int32)
    none = jnp.int32(2**31 - 1)
    picks = jnp.sort(jnp.where((picks >= 0) & (picks < visible[..., None]), picks, none), axis=-1)
    again = jnp.pad(picks[..., 1:] == picks[..., :-1], ((0, 0), (0, 0), (1, 0)))
    picks = jnp.sort(jnp.where(again, none, picks), axis=-1)
    return jnp.where(picks == none, -1, picks)


def select_entries(
    queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array, *, backend: Backend = None
) -> jax.Array:
    """The entries each query reads.

    Args:
      queries: f32 [B, T, indexer_heads, indexer_head_dim], roped and rotated; rounded here as the keys are. Or
        rounded already: rows [B, T, indexer_heads, ...] of the keys' format.
      weights: f32 [B, T, indexer_heads], with the indexer's scale factors.
      layer: of kind CSA.
      visible: int32 [B, T] entries complete at each query: floor((p + 1) / ratio).
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Returns:
      int32 [B, T, k], k = min(indexer_top_k, max_entries); the visible ones ascending, then -1.
      They have no derivative.
    """
    return Selection.of(backend, layer.plan).pick(queries, weights, layer, visible)


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The stage of a layer that decides which entries its queries read."""

    scores: IndexerScores
    top_k: TopK

    @classmethod
    def of(cls, backend: Backend, plan: CachePlan) -> Selection:
        return cls(INDEXER_SCORES.of(backend, plan, AttentionType.CSA), TOP_K.of(backend, plan, AttentionType.CSA))

    def pick(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        """Do what ``select_entries`` describes."""
        # Whole numbers have no derivative: without this, one would be sought through the loop over a context.
        queries, weights, layer = lax.stop_gradient((queries, weights, layer))
        plan, lead = layer.plan, visible.shape
        cfg, keys = plan.cfg, plan.keys
        heads: dict[str, int | None] = {"B": lead[0], "T": lead[1], "indexer_heads": cfg.indexer_heads}
        check_array("visible", visible, {"B": None, "T": None}, jnp.int32)
        if isinstance(queries, KeyRows):
            row = plan.key_spec
            jax.tree.map(lambda x, of: check_array("queries", x, heads | {"row": of.shape[0]}, of.dtype), queries, row)
        else:
            check_array("queries", queries, heads | {"indexer_head_dim": cfg.indexer_head_dim}, jnp.float32)
        check_array("weights", weights, heads, jnp.float32)
        entry = jnp.arange(layer.max_entries, dtype=jnp.int32)[None, None]
        if layer.max_entries <= cfg.indexer_top_k:  # all visible entries are read, so there is no need to score them
            return jnp.where(entry < visible[..., None], entry, -1)
        if not isinstance(queries, KeyRows) and keys.rounds_queries:
            queries = keys.encode(queries)

        def picks(given: tuple[jax.Array | KeyRows, jax.Array, jax.Array]) -> jax.Array:
            queries, weights, visible = given
            scores = self.scores.scores(queries, weights, layer, visible)
            return self.top_k.pick(scores, visible, cfg.indexer_top_k)

        batch, tokens = known_size(lead[0], plan.max_requests), known_size(lead[1], 1)
        most = max(1, SCORE_BYTES // (4 * batch * layer.max_entries))
        if tokens <= most:
            return picks((queries, weights, visible))
        size = 1 << (most.bit_length() - 1)
        more = -tokens % size  # of tokens that see no entries
        given = jax.tree.map(
            lambda leaf: jnp.pad(leaf, ((0, 0), (0, more), *[(0, 0)] * (leaf.ndim - 2))), (queries, weights, visible)
        )
        return map_tokens(picks, given, size)[:, :tokens]


def check_over(over: str) -> None:
    """Require one of ``OVER``. ValueError otherwise."""
    if over not in OVER:
        raise ValueError(f"over must be one of {list(OVER)}, got {over!r}")


def divergence(weights: jax.Array, scores: jax.Array, read: jax.Array) -> jax.Array:
    """Return KL(p || softmax(scores)) of each query, f32 [B, T]; 0 where it reads no entry.

    Args:
      weights: f32 [B, T, K], attention's weights of entries, summed over the heads. A constant.
      scores: f32 [B, T, K], the indexer's.
      read: bool [B, T, K], the entries that both are over.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    weights = jnp.where(read, lax.stop_gradient(weights), 0.0)
    p = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), tiny)
    log_q = jax.nn.log_softmax(jnp.where(read, scores, jnp.finfo(jnp.float32).min), axis=-1)
    terms = p * (jnp.log(jnp.maximum(p, tiny)) - jnp.where(read, log_q, 0.0))
    return jnp.sum(terms, axis=-1)


def weights_of_entries(running: RunningSoftmax, queries: jax.Array, entries: jax.Array, read: jax.Array) -> jax.Array:
    """Return the weights that attention gives entries, summed over the heads: f32 [B, T, K], without a derivative.

    Args:
      running: the softmax after all keys.
      queries: f32 [B, T, H, dim].
      entries: f32 [B, K, dim].
      read: bool [B, T, K], the entries that are read.
    """
    running, queries, entries = lax.stop_gradient((running, queries, entries))
    logits = jnp.einsum("bthd,bkd->bthk", queries, entries, precision=lax.Precision.HIGHEST) * queries.shape[-1] ** -0.5
    logits = jnp.where(read[:, :, None], logits, -jnp.inf)
    weights = jnp.exp(logits - running.peak[..., None]) / running.total[..., None]
    return jnp.sum(weights, axis=2)


class XLAIndexerScores(Anywhere):
    """Scores in plain JAX: the reference for the kernel."""

    def queries(self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan) -> jax.Array:
        del plan
        return hadamard(apply_rope(product, positions[..., None], freqs))

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        values = layer.plan.keys.decode(queries) if isinstance(queries, KeyRows) else queries
        return scores(values, weights, layer, visible)


class XLATopK(Anywhere):
    """Top-k in plain JAX: the reference for the kernel."""

    def pick(self, score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
        return pick(score, visible, top_k)


INDEXER_SCORES.register(XLA, XLAIndexerScores())
TOP_K.register(XLA, XLATopK())
