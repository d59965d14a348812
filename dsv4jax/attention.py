"""Attention of one shared key-value head (K = V) over window and entries, with a sink per head.

    out_h = sum over keys of exp(l) k / (sum of exp(l) + exp(sink_h)),      l = q_h . k / sqrt(head_dim)

Parts (window, picked entries, tiles of all entries) are folded in one after another as a running softmax that starts at
the sink: a logit without key or value. So no part is ever joined with another in memory, and a query without any key
gives zero.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.paged_pool import PooledLayer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunningSoftmax:
    """Attention over the keys seen so far."""

    peak: jax.Array  # f32 [B, T, H] largest logit
    total: jax.Array  # f32 [B, T, H] sum of exp(l - peak)
    weighted: jax.Array  # f32 [B, T, H, dim] sum of exp(l - peak) * k

    @property
    def output(self) -> jax.Array:
        return self.weighted / self.total[..., None]


def start_at_sinks(sinks: jax.Array, queries: jax.Array) -> RunningSoftmax:
    """No keys yet: sinks [H] count in the denominator alone."""
    peak = jnp.broadcast_to(sinks.astype(jnp.float32), queries.shape[:3])
    return RunningSoftmax(peak=peak, total=jnp.ones_like(peak), weighted=jnp.zeros_like(queries))


def attend(running: RunningSoftmax, queries: jax.Array, keys: jax.Array, mask: jax.Array) -> RunningSoftmax:
    """Fold keys in.

    Args:
      queries: f32 [B, T, H, dim].
      keys: f32 [B, K, dim], shared by a request's queries, or [B, T, K, dim], each query's own. Masked keys must be
        finite: they are multiplied by zero.
      mask: bool [B, T, K], which keys a query sees.
    """
    own = "t" if keys.ndim == 4 else ""
    logits = (
        jnp.einsum(f"bthd,b{own}kd->bthk", queries, keys, precision=lax.Precision.HIGHEST) * queries.shape[-1] ** -0.5
    )
    logits = jnp.where(mask[:, :, None], logits, -jnp.inf)
    peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1))
    weight, carried = jnp.exp(logits - peak[..., None]), jnp.exp(running.peak - peak)
    values = jnp.einsum(f"bthk,b{own}kd->bthd", weight, keys, precision=lax.Precision.HIGHEST)
    return RunningSoftmax(
        peak=peak,
        total=running.total * carried + jnp.sum(weight, axis=-1),
        weighted=running.weighted * carried[..., None] + values,
    )


def attend_window(running: RunningSoftmax, queries: jax.Array, keys: jax.Array, valid: jax.Array) -> RunningSoftmax:
    """Fold in the sliding window: keys [B, n_win - 1 + T, dim] in order of position, query t's own at n_win - 1 + t.

    valid: bool [B, n_win - 1 + T], False where there is no key.
    """
    tokens, span = queries.shape[1], keys.shape[1]
    age = (jnp.arange(tokens, dtype=jnp.int32)[:, None] + (span - tokens)) - jnp.arange(span, dtype=jnp.int32)[None]
    in_window = (age >= 0) & (age <= span - tokens)
    return attend(running, queries, keys, in_window[None] & valid[:, None])


def attend_picked(running: RunningSoftmax, queries: jax.Array, layer: PooledLayer, picks: jax.Array) -> RunningSoftmax:
    """Fold in each query's picked entries int32 [B, T, k]; -1 = none."""
    return attend(running, queries, layer.rows(picks), picks >= 0)


def attend_all(running: RunningSoftmax, queries: jax.Array, layer: PooledLayer, visible: jax.Array) -> RunningSoftmax:
    """Fold in every entry below visible [B, T]."""

    def fold(running: RunningSoftmax, _: jax.Array | int, entry: jax.Array, seen: jax.Array) -> RunningSoftmax:
        return attend(running, queries, layer.rows(entry), seen)

    batch, tokens, heads, _ = queries.shape
    return layer.fold_tiles(visible, layer.tile_size(batch * tokens * heads * 4), fold, running)
