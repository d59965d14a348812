"""The weights that heads give to keys, which attention itself never holds: for chosen queries, in plain JAX.

A layer's input and the cache before its call are enough to compute them again.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.checks import FLOATS, check_array, check_batch
from dsv4jax.indexing import read_slots
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.indexer import PICKS
from dsv4jax.layer.ops import choose_backends
from dsv4jax.layer.stages.compose import Stages
from dsv4jax.layer.stages.probe import Probe
from dsv4jax.weights.params import AttentionParams, check_params, frozen_where_stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The weights of the keys that queries read. For each query and head they sum to 1, that of the sink included."""

    window: jax.Array  # f32 [B, Q, H, n_win] of the sliding window's keys, 0 where there is none
    window_positions: jax.Array  # int32 [B, Q, n_win] of those keys, -1 = none
    entries: jax.Array | None  # f32 [B, Q, H, K] of entries, 0 where there is none; None in a layer that has none
    entry_numbers: jax.Array | None  # int32 [B, Q, K] of those entries, -1 = none
    sink: jax.Array  # f32 [B, Q, H]
    ratio: int = dataclasses.field(metadata={"static": True})  # tokens per entry; 0 in a layer that has none

    @property
    def entry_positions(self) -> jax.Array | None:
        """The first token that each entry stands for, int32 [B, Q, K], -1 = none; ``ratio - 1`` others follow it."""
        number = self.entry_numbers
        return None if number is None else jnp.where(number >= 0, number * self.ratio, -1)


@functools.partial(jax.jit, static_argnames="layer")
def attention_weights(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    queries: jax.Array,
    picks: jax.Array | None = None,
) -> AttentionWeights:
    """Compute the weights that heads give to keys in a call of ``attention_layer``, for some of its tokens.

    Args:
      params, x, cache, layer, slots, num_new: as ``attention_layer`` was given them. The cache is that before the call.
      queries: int32 [B, Q], numbers of tokens among those of x; -1 = none, as is one past its row's num_new. On the way
        one query takes up to 2 MB, at V4's sizes.
      picks: int [B, T, K], the entries that the tokens of x read, -1 = none, if the indexer did not choose them. CSA
        only.

    Returns:
      The weights, 0 for a query that is none. They are NaN for a number of no token of x, and for all tokens of a row
      if the cache is not that before the call: the row has no grant of its tokens there, or its window in this layer
      holds them already.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer, or weights or picks of another kind of layer.
    """
    check_cache("attention_weights", cache)
    (kind, index), plan = cache.locate(layer), cache.plan
    check_batch(slots=slots, num_new=num_new)
    axes = {"B": slots.shape[0], "T": None, "hidden_size": plan.cfg.hidden_size}
    check_array("x", x, axes, FLOATS)
    check_array("queries", queries, {"B": slots.shape[0], "Q": None}, jnp.int32)
    check_params(params, plan.cfg, kind)
    if picks is not None:
        check_array("picks", picks, {"B": slots.shape[0], "T": x.shape[1], "K": None}, PICKS)
        if not kind.is_indexed:
            raise ValueError(f"picks are for layers with an indexer, layer {layer} is {kind.upper()}")
    stages = Stages.of(choose_backends(XLA, plan, kind), plan, kind)
    params, number = frozen_where_stored(params), jnp.asarray(index, jnp.int32)
    _, call = LayerCall.begin(cache, kind, number, slots, num_new, x.shape[1])
    taken = stages.intake.take(params, x, call, is_draft=True)
    is_query = (queries >= 0) & (queries < call.batch.num_new[:, None])
    is_token = (queries >= 0) & (queries < num_new[:, None]) & (slots >= 0)[:, None]
    stored = read_slots(call.stack.state.pos, call.index, call.batch.slots)
    is_before = jnp.all(stored < call.batch.start[:, None], axis=1, keepdims=True)
    unknown = (queries < -1) | (queries >= x.shape[1]) | (is_token & ~(is_query & is_before))

    def chosen(leaf: jax.Array) -> jax.Array:
        at = jnp.clip(queries, 0, x.shape[1] - 1)
        return jnp.take_along_axis(leaf, at.reshape(at.shape + (1,) * (leaf.ndim - 2)), axis=1)

    latents, picks = jax.tree.map(chosen, (taken.latents, picks))
    positions = jnp.where(is_query, latents.positions, -1)
    latents = dataclasses.replace(latents, positions=positions)
    q, keys = stages.queries.make(params, latents)

    n_win = plan.cfg.sliding_window
    near = jnp.maximum(positions[..., None] + jnp.arange(1 - n_win, 1, dtype=jnp.int32)[None, None], -1)
    rows, held = taken.window.rows(near.reshape(near.shape[0], -1))
    rows, held = rows.reshape(*near.shape, -1), held.reshape(near.shape)
    logits = [_logits(q, rows, held)]
    entries, numbers = taken.entries, None
    if entries is not None:
        picked = stages.pick(keys, latents, entries, Probe(entries=picks), {})
        if picked is None:
            visible, shape = (positions + 1) // call.ratio, (len(x), entries.max_entries)
            far = jnp.broadcast_to(jnp.arange(entries.max_entries, dtype=jnp.int32)[None], shape)
            rows = entries.rows(jnp.where(far < jnp.max(visible, axis=1, keepdims=True), far, -1))
            numbers = jnp.where(far[:, None] < visible[..., None], far[:, None], -1)
        else:
            rows, numbers = entries.rows(picked), picked
        logits.append(_logits(q, rows, numbers >= 0))

    sink = jnp.broadcast_to(params.sinks.astype(jnp.float32)[None, None], q.shape[:3])[..., None]
    shares = jax.nn.softmax(jnp.concatenate([*logits, sink], axis=-1), axis=-1)
    shares = jnp.where(is_query[..., None, None], shares, 0.0)
    shares = jnp.where(unknown[..., None, None], jnp.nan, shares)
    window, of_entries, of_sink = jnp.split(shares, [n_win, shares.shape[-1] - 1], axis=-1)
    return AttentionWeights(
        window=window,
        window_positions=jnp.where(held, near, -1),
        entries=None if numbers is None else of_entries,
        entry_numbers=numbers,
        sink=of_sink[..., 0],
        ratio=0 if numbers is None else call.ratio,
    )


def _logits(q: jax.Array, rows: jax.Array, seen: jax.Array) -> jax.Array:
    """Logits f32 [B, Q, H, K] of queries [B, Q, H, dim] and keys [B, K, dim] or [B, Q, K, dim], -inf where not seen."""
    own = "q" if rows.ndim == 4 else ""
    logits = jnp.einsum(f"bqhd,b{own}kd->bqhk", q, rows, precision=lax.Precision.HIGHEST) * q.shape[-1] ** -0.5
    return jnp.where(seen[:, :, None], logits, -jnp.inf)
