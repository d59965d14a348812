"""The model's forward pass over the cache: embedding, layers, head.

streams = embedding of the ids, in every stream
per layer:  x, gains = mix_in(streams);  streams = mix_out(attention(norm(x)), streams, gains)
            x, gains = mix_in(streams);  streams = mix_out(experts(norm(x), ids), streams, gains)
logits  = norm(collapse(streams)) W_head
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.checks import check_array, check_batch
from dsv4jax.config import DSV4Config
from dsv4jax.layer.backend import XLA, Backend
from dsv4jax.layer.call import granted_batch
from dsv4jax.layer.layer import attention_layer
from dsv4jax.layer.sequence import attention as attend_sequences
from dsv4jax.linear import linear, rms_norm
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.experts import mix_experts
from dsv4jax.model.hyper_connections import Gains, collapse, mix_in, mix_out
from dsv4jax.model.params import Block, ModelParams, StreamMix, check_model
from dsv4jax.model.routing import Picks, pick_experts
from dsv4jax.requests.speculate import StagedLayer, stage
from dsv4jax.weights.params import AttentionParams

Logits = Literal["last", "all", "none"]
Attend = Callable[[AttentionParams, jax.Array, KVCache, int], tuple[jax.Array, KVCache]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a forward pass."""

    ids: jax.Array  # int32 [B, T]
    real: jax.Array  # bool [B, T] False on padding, and in rows that were not granted
    count: jax.Array  # int32 [B] number of real tokens

    @classmethod
    def of(
        cls,
        params: ModelParams,
        ids: jax.Array,
        cache: KVCache,
        slots: jax.Array,
        num_new: jax.Array,
        cfg: DSV4Config,
    ) -> Tokens:
        """Check the arguments of a forward pass over the layers of ``cfg``.

        Raises:
          AssertionError: (chex) an argument's rank, shape or dtype is wrong.
          ValueError: the cache is for attention layers of other sizes, the weights are for another model, or there are
            no tokens.
        """
        check_model(params)
        check_batch(slots=slots, num_new=num_new)
        check_array("ids", ids, {"B": slots.shape[0], "T": None}, jnp.int32)
        if ids.shape[1] == 0:
            raise ValueError("ids has no tokens: give num_new = 0 for rows that have none")
        check_cache("a model's forward pass", cache)
        if cache.plan.cfg != cfg:
            raise ValueError(f"the cache was planned for {cache.plan.cfg}, the model has {cfg}")
        _, batch = granted_batch(cache, slots, num_new, ids.shape[1])
        return cls(ids=ids, real=jnp.arange(ids.shape[1])[None] < batch.num_new[:, None], count=batch.num_new)


@functools.partial(jax.jit, static_argnames=("logits", "backend"))
def forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    logits: Logits = "last",
    backend: Backend = None,
) -> tuple[jax.Array | None, jax.Array, KVCache]:
    """Run the model on new tokens and store what the cache keeps of them.

    Call it between ``prepare_forward`` and ``advance``. T = 1 is decode, T > 1 a chunk of a prompt; rows of one batch
    may do either. The cache is not donated here: the caller's jit decides.

    Args:
      params: the model's weights.
      ids: int32 [B, T]. What is past a row's num_new is ignored. An id outside the vocabulary gives NaN.
      cache: a cache for ``params.cfg.attention``.
      slots: int32 [B], distinct; -1 = padding row.
      num_new: int32 [B], tokens of each row that are real. A row that ``prepare_forward`` did not grant so many, or
        that names more than T, is left alone.
      logits: of each row's "last" token, of "all" tokens, or "none".
      backend: of the attention layers and products; see ``attention_layer``.

    Returns:
      (logits f32 [B, V], [B, T, V] or None; the streams after the last layer [B, T, num_streams, hidden], which drafts
      are made of; the updated cache, its lengths not yet advanced). Rows and tokens that were not taken have 0.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the cache is for another model, there are no tokens, ``logits`` or the backend is unknown.
    """
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    streams, cache, _ = _run_blocks(params, tokens, cache, attention(slots, num_new, backend), backend)
    return read_logits(params, streams, tokens, logits), streams, cache


@functools.partial(jax.jit, static_argnames="backend")
def stage_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
) -> tuple[jax.Array, jax.Array, KVCache, tuple[StagedLayer, ...]]:
    """Run the model on drafts without changing what the requests hold; see ``stage``.

    The arguments are those of ``forward``.

    Returns:
      (logits f32 [B, T, V]; streams; cache; what ``commit`` takes to store the tokens that are accepted).

    Raises:
      AssertionError, ValueError: as ``forward``.
    """
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    staged: list[StagedLayer] = []

    def attend(weights: AttentionParams, x: jax.Array, cache: KVCache, layer: int) -> tuple[jax.Array, KVCache]:
        y, cache, rows = stage(weights, x, cache, layer, slots, num_new, backend)
        staged.append(rows)
        return y, cache

    streams, cache, _ = _run_blocks(params, tokens, cache, attend, backend)
    return all_logits(params, streams, tokens), streams, cache, tuple(staged)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a forward pass computes on its way."""

    logits: jax.Array  # f32 [B, T, V]
    streams: jax.Array  # [L, B, T, num_streams, hidden] after each layer
    picks: Picks  # [L, B, T, k] of each layer


@functools.partial(jax.jit, static_argnames="backend")
def inspect_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
) -> tuple[Inspection, KVCache]:
    """Run ``forward`` and return all logits, the streams after every layer, and the experts that it picked."""
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    streams, cache, seen = _run_blocks(params, tokens, cache, attention(slots, num_new, backend), backend)
    after, picks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
    return Inspection(logits=all_logits(params, streams, tokens), streams=after, picks=picks), cache


@functools.partial(jax.jit, static_argnames=("kv_format", "indexer_format"))
def forward_sequences(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
) -> jax.Array:
    """Run the model on whole sequences that begin at position 0, without a cache. For training.

    The logits are those of ``forward`` on an empty cache, up to the order of sums. Plain JAX on every device. Reverse
    mode keeps the streams between layers and computes each layer again.

    Args:
      params: the model's weights.
      ids: int32 [B, T]. What is past a row's length is ignored. An id outside the vocabulary gives NaN.
      lengths: int32 [B], tokens of each sequence that are real; None = all T.
      kv_format, indexer_format: how a cache would round what it stores; see ``dsv4jax.attention``.

    Returns:
      logits f32 [B, T, V] of the tokens after each, 0 past the lengths.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: an unknown format, or a derivative by weights that are stored as FP8 or FP4.
    """
    check_model(params)
    check_array("ids", ids, {"B": None, "T": None}, jnp.int32)
    if lengths is None:
        lengths = jnp.full(ids.shape[:1], ids.shape[1], jnp.int32)
    check_array("lengths", lengths, {"B": ids.shape[0]}, jnp.int32)
    real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    tokens, cfg = Tokens(ids=ids, real=real, count=lengths), params.cfg

    def attend(weights: AttentionParams, x: jax.Array, cache: None, layer: int) -> tuple[jax.Array, None]:
        return attend_sequences(weights, x, cfg.attention, layer, lengths, kv_format, indexer_format), cache

    streams = first_streams(params, tokens)
    for layer, block in enumerate(params.blocks):

        @jax.checkpoint
        def run(block: Block, streams: jax.Array, layer: int = layer) -> jax.Array:
            return run_block(block, streams, tokens, None, layer, attend, cfg, XLA)[0]

        streams = run(block, streams)
    return all_logits(params, streams, tokens)


def attention(slots: jax.Array, num_new: jax.Array, backend: Backend) -> Attend:
    """Return how the layers of an ordinary pass attend: they store what is new."""

    def attend(weights: AttentionParams, x: jax.Array, cache: KVCache, layer: int) -> tuple[jax.Array, KVCache]:
        return attention_layer(weights, x, cache, layer, slots, num_new, backend)

    return attend


def _run_blocks(
    params: ModelParams, tokens: Tokens, cache: KVCache, attend: Attend, backend: Backend
) -> tuple[jax.Array, KVCache, list[tuple[jax.Array, Picks]]]:
    """Run all layers. Returns (streams [B, T, num_streams, hidden], cache, streams and picks of each layer)."""
    streams = first_streams(params, tokens)
    seen: list[tuple[jax.Array, Picks]] = []
    for layer, block in enumerate(params.blocks):
        streams, cache, picks = run_block(block, streams, tokens, cache, layer, attend, params.cfg, backend)
        seen.append((streams, picks))
    return streams, cache, seen


def first_streams(params: ModelParams, tokens: Tokens) -> jax.Array:
    """Return the streams before the first layer [B, T, num_streams, hidden]."""
    rows = embedded(params.embedding, tokens.ids, tokens.real)
    return jnp.repeat(rows[..., None, :], params.cfg.num_streams, axis=-2)


def embedded(embedding: jax.Array, ids: jax.Array, real: jax.Array) -> jax.Array:
    """Return rows of the embedding [..., hidden]: NaN for an id outside the vocabulary, 0 on padding."""
    ids = jnp.where(ids < 0, embedding.shape[0], ids)  # a negative index would count from the end
    rows = embedding.at[ids].get(mode="fill", fill_value=jnp.nan)
    return jnp.where(real[..., None], rows, jnp.zeros((), rows.dtype))


def run_block[Cache: KVCache | None](
    block: Block,
    streams: jax.Array,
    tokens: Tokens,
    cache: Cache,
    layer: int,
    attend: Callable[[AttentionParams, jax.Array, Cache, int], tuple[jax.Array, Cache]],
    cfg: ModelConfig,
    backend: Backend,
) -> tuple[jax.Array, Cache, Picks]:
    """Run one layer on streams [B, T, num_streams, hidden]. Returns (streams, cache, the experts that were picked)."""
    x, gains = _attention_input(streams, block.attention_mix, block.attention_norm, cfg)
    y, cache = attend(block.attention, x, cache, layer)
    streams, picks = _after_attention(block, y, streams, gains, tokens.ids, tokens.real, cfg=cfg, backend=backend)
    return streams, cache, picks


# Jitted so that they are traced once for all layers.
@functools.partial(jax.jit, static_argnames="cfg")
def _attention_input(streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Gains]:
    x, gains = mix_in(streams, mix, cfg)
    return rms_norm(x, norm, cfg.norm_eps).astype(x.dtype), gains


@functools.partial(jax.jit, static_argnames=("cfg", "backend"))
def _after_attention(
    block: Block,
    y: jax.Array,
    streams: jax.Array,
    gains: Gains,
    ids: jax.Array,
    real: jax.Array,
    *,
    cfg: ModelConfig,
    backend: Backend,
) -> tuple[jax.Array, Picks]:
    streams = mix_out(y, streams, gains)
    x, gains = mix_in(streams, block.experts_mix, cfg)
    x = rms_norm(x, block.experts_norm, cfg.norm_eps).astype(x.dtype)
    picks = pick_experts(x, ids, real, block.router, cfg)
    return mix_out(mix_experts(x, picks, block.experts, cfg, backend), streams, gains), picks


def read_logits(params: ModelParams, streams: jax.Array, tokens: Tokens, which: Logits) -> jax.Array | None:
    """Return logits f32 of the "last" tokens [B, V], of "all" [B, T, V], or None for "none"."""
    if which == "none":
        return None
    if which == "all":
        return all_logits(params, streams, tokens)
    if which != "last":
        raise ValueError(f"logits must be 'last', 'all' or 'none', got {which!r}")
    last = jnp.maximum(tokens.count - 1, 0)[:, None, None, None]
    row = jnp.take_along_axis(streams, last, axis=1)[:, 0]
    logits = head_logits(row, params.final_mix, params.final_norm, params.head, params.cfg)
    return jnp.where(tokens.count[:, None] > 0, logits, 0.0)


def all_logits(params: ModelParams, streams: jax.Array, tokens: Tokens) -> jax.Array:
    """Return the logits of all tokens, f32 [B, T, V]."""
    logits = head_logits(streams, params.final_mix, params.final_norm, params.head, params.cfg)
    return jnp.where(tokens.real[..., None], logits, 0.0)


def head_logits(streams: jax.Array, mix: StreamMix, norm: jax.Array, head: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Return logits f32 [..., V] of streams [..., num_streams, hidden]."""
    x = collapse(streams, mix, cfg)
    return linear(rms_norm(x, norm, cfg.norm_eps).astype(x.dtype), head)
