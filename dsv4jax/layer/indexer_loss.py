"""What a lightning indexer learns from: attention's own weights over the entries.

Which entries are picked has no derivative, so an indexer learns nothing from a model's loss. DeepSeek trains it to give
what attention gives: for each query, with p the weights of attention over the entries, summed over the heads and
divided by their sum, and I the indexer's scores of the same entries,

    loss = KL(p || softmax(I)) = sum over entries s of p_s (log p_s - log softmax(I)_s)

p is a constant, and so are the inputs of the indexer: no other weight learns from this loss.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.layer.attention import RunningSoftmax

# The entries that the loss is over, and which attention reads: those that the indexer picks; or all that a query sees,
# as in DeepSeek's warm-up, when attention is dense and nothing but the indexer is trained.
Over = Literal["picked", "all"]
OVER: tuple[Over, ...] = ("picked", "all")


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
