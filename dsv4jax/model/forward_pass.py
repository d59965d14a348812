"""The model's forward pass over the cache: embedding, layers, head.

    streams            = embedding of the ids, in every stream
    x, gains           = begin(streams)
    per layer:
    y                  = attention(x)
    streams, x, gains  = between(y, streams, gains)
    y                  = experts(x, picks(x, ids))
    streams, x, gains  = between(y, streams, gains)     after the last layer: streams, x = end(y, streams, gains)
    logits             = x W_head

Each x is a weighted sum of the streams after the norm of the sublayer that takes it. What stands between two sublayers
is one step, so that it can be one kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.checks import check_array, check_batch
from dsv4jax.config import DSV4Config, layer_schedule
from dsv4jax.layer.backend import XLA, Backend
from dsv4jax.layer.call import granted_batch
from dsv4jax.layer.indexer import Over
from dsv4jax.layer.layer import attention_layer
from dsv4jax.layer.sequence import attention as attend_sequences
from dsv4jax.layer.sequence import attention_with_indexer_loss
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import (
    EXPERTS,
    HEAD,
    HYPER_CONNECTIONS,
    ROUTER,
    ExpertOutputs,
    ExpertsOp,
    Gains,
    HyperConnectionsOp,
    Picks,
    RouterOp,
    SublayerOutput,
)
from dsv4jax.model.params import Block, Experts, ModelParams, Router, StreamMix, check_model
from dsv4jax.model.plain.hyper_connections import head_input, mix_out
from dsv4jax.requests.speculate import StagedLayer, stage
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import Weight

Logits = Literal["last", "all", "none"]
type Attend[Cache] = Callable[[AttentionParams, jax.Array, Cache, int], tuple[jax.Array, Cache]]


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
    *,
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
      (logits f32 [B, V], [B, T, V] or None; what drafts are made of; the updated cache, its lengths not yet advanced).
      Drafts are made of the streams after the last layer [B, T, num_streams, hidden]; those of DSpark of the means of
      the streams after its taps [B, T, taps * hidden]. Rows and tokens that were not taken have 0.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the cache is for another model, there are no tokens, ``logits`` or the backend is unknown.
    """
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    way = Way(tokens=tokens, attend=attention(slots, num_new, backend), cfg=params.cfg, backend=backend)
    ran = run_model(params, cache, way)
    return read_logits(ran.x, params.head, logits, way), _for_drafts(params, ran), ran.cache


@functools.partial(jax.jit, static_argnames="backend")
def stage_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    backend: Backend = None,
) -> tuple[jax.Array, jax.Array, KVCache, tuple[StagedLayer, ...]]:
    """Run the model on drafts without changing what the requests hold; see ``stage``.

    The arguments are those of ``forward``.

    Returns:
      (logits f32 [B, T, V]; what drafts are made of; cache; what ``commit`` takes to store tokens that are accepted).

    Raises:
      AssertionError, ValueError: as ``forward``.
    """
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    staged: list[StagedLayer] = []

    def attend(weights: AttentionParams, x: jax.Array, cache: KVCache, layer: int) -> tuple[jax.Array, KVCache]:
        y, cache, rows = stage(weights, x, cache, layer, slots, num_new, backend=backend)
        staged.append(rows)
        return y, cache

    way = Way(tokens=tokens, attend=attend, cfg=params.cfg, backend=backend)
    ran = run_model(params, cache, way)
    return all_logits(ran.x, params.head, way), _for_drafts(params, ran), ran.cache, tuple(staged)


def _for_drafts(params: ModelParams, ran: Ran) -> jax.Array:
    streams = [streams for streams, _ in ran.seen]
    return ran.streams if params.drafts is None else params.drafts.made_of(streams, params.cfg)


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
    *,
    backend: Backend = None,
) -> tuple[Inspection, KVCache]:
    """Run ``forward`` and return all logits, the streams after every layer, and the experts that it picked."""
    tokens = Tokens.of(params, ids, cache, slots, num_new, params.cfg.attention)
    way = Way(tokens=tokens, attend=attention(slots, num_new, backend), cfg=params.cfg, backend=backend)
    ran = run_model(params, cache, way)
    after, picks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ran.seen)
    return Inspection(logits=all_logits(ran.x, params.head, way), streams=after, picks=picks), ran.cache


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

    def attend(weights: AttentionParams, x: jax.Array, found: None, layer: int) -> tuple[jax.Array, None]:
        return attend_sequences(weights, x, params.cfg.attention, layer, lengths, kv_format, indexer_format), found

    return _run_sequences(params, ids, lengths, attend)[0]


@functools.partial(jax.jit, static_argnames=("kv_format", "indexer_format", "over"))
def forward_with_indexer_loss(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    over: Over = "picked",
) -> tuple[jax.Array, jax.Array]:
    """Run ``forward_sequences``, and return what the indexers have to learn from.

    Args:
      params, ids, lengths, kv_format, indexer_format: as for ``forward_sequences``.
      over: "picked" for training with the entries that the indexers pick; "all" for the warm-up, in which attention
        reads all entries that a query sees. See ``dsv4jax.layer.sequence.attention_with_indexer_loss``.

    Returns:
      (logits f32 [B, T, V]; f32 [L, B, T], for each CSA layer in order the divergence of its indexer's scores from its
      attention, 0 where a token sees no entry and past the lengths). The latter has a derivative by the indexers'
      weights, and by nothing else; the former by all but these. So both can be added up in one loss.

    Raises:
      AssertionError, ValueError: as ``forward_sequences``; or the model has no CSA layer, or ``over`` is unknown.
    """
    cfg = params.cfg.attention
    if not any(spec.attn.is_indexed for spec in layer_schedule(cfg)):
        raise ValueError("the model has no CSA layer, and so no indexer")

    def attend(
        weights: AttentionParams, x: jax.Array, found: jax.Array | None, layer: int
    ) -> tuple[jax.Array, jax.Array | None]:
        given = weights, x, cfg, layer, lengths, kv_format, indexer_format
        if layer_schedule(cfg)[layer].attn.is_indexed:
            return attention_with_indexer_loss(*given, over=over)
        return attend_sequences(*given), found

    logits, losses = _run_sequences(params, ids, lengths, attend)
    return logits, jnp.stack([loss for loss in losses if loss is not None])


def _run_sequences(
    params: ModelParams, ids: jax.Array, lengths: jax.Array | None, attend: Attend[Any]
) -> tuple[jax.Array, list[jax.Array | None]]:
    """Run whole sequences. Returns (logits f32 [B, T, V], what ``attend`` found besides y in each layer, or None)."""
    check_model(params)
    check_array("ids", ids, {"B": None, "T": None}, jnp.int32)
    if lengths is None:
        lengths = jnp.full(ids.shape[:1], ids.shape[1], jnp.int32)
    check_array("lengths", lengths, {"B": ids.shape[0]}, jnp.int32)
    real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    way = Way(tokens=Tokens(ids=ids, real=real, count=lengths), attend=attend, cfg=params.cfg, backend=XLA)
    streams = first_streams(params, way.tokens)
    found: list[jax.Array | None] = []
    for layer, block in enumerate(params.blocks):

        @jax.checkpoint
        def run(block: Block, streams: jax.Array, layer: int = layer) -> tuple[jax.Array, jax.Array | None]:
            x, gains = way.begin(streams, block)
            y, found = way.attend(block.attention, x, None, layer)
            streams, x, gains = way.between(y, streams, gains, block.experts_mix, block.experts_norm)
            return mix_out(way.experts(x, block)[0], streams, gains), found

        streams, of_layer = run(block, streams)
        found.append(of_layer)
    return all_logits(head_input(streams, params.final_mix, params.final_norm, params.cfg), params.head, way), found


def attention(slots: jax.Array, num_new: jax.Array, backend: Backend) -> Attend[KVCache]:
    """Return how the layers of an ordinary pass attend: they store what is new."""

    def attend(weights: AttentionParams, x: jax.Array, cache: KVCache, layer: int) -> tuple[jax.Array, KVCache]:
        return attention_layer(weights, x, cache, layer, slots, num_new, backend=backend)

    return attend


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way[Cache]:
    """What stays the same in all layers of a forward pass."""

    tokens: Tokens
    attend: Attend[Cache]
    cfg: ModelConfig
    backend: Backend

    def begin(self, streams: jax.Array, block: Block) -> tuple[jax.Array, Gains]:
        """Return (x of a layer's attention, gains) from streams [B, T, num_streams, hidden]."""
        mix = block.attention_mix
        return _begin(streams, mix, block.attention_norm, op=self._connections(mix, streams), cfg=self.cfg)

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array
    ) -> tuple[jax.Array, jax.Array, Gains]:
        """Return (streams with a sublayer's output y, x of the next one, gains)."""
        return _between(y, streams, gains, mix, norm, op=self._connections(mix, streams), cfg=self.cfg)

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (streams with the last sublayer's output y, x of the head)."""
        return _end(y, streams, gains, mix, norm, op=self._connections(mix, streams), cfg=self.cfg)

    def experts(self, x: jax.Array, block: Block) -> tuple[ExpertOutputs, Picks]:
        """Return what a layer's experts make of x, and which they are."""
        router = ROUTER.of(self.backend, self.cfg, block.router, x.dtype)
        picks = _pick(x, self.tokens.ids, self.tokens.real, block.router, op=router, cfg=self.cfg)
        experts = EXPERTS.of(self.backend, self.cfg, block.experts, x.dtype)
        outputs = _mix(x, picks, block.experts, op=experts, cfg=self.cfg, backend=self.backend)
        return outputs, dataclasses.replace(picks, tiles=None)

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        """Return logits f32 [..., V] of x [..., hidden]."""
        return HEAD.of(self.backend, self.cfg, head, x.dtype).logits(x, head)

    def _connections(self, mix: StreamMix, streams: jax.Array) -> HyperConnectionsOp:
        return HYPER_CONNECTIONS.of(self.backend, self.cfg, mix, streams.dtype)


# Jitted so that they are traced once for all layers.
@functools.partial(jax.jit, static_argnames=("op", "cfg"))
def _begin(
    streams: jax.Array, mix: StreamMix, norm: jax.Array, *, op: HyperConnectionsOp, cfg: ModelConfig
) -> tuple[jax.Array, Gains]:
    return op.begin(streams, mix, norm, cfg)


@functools.partial(jax.jit, static_argnames=("op", "cfg"))
def _between(
    y: SublayerOutput,
    streams: jax.Array,
    gains: Gains,
    mix: StreamMix,
    norm: jax.Array,
    *,
    op: HyperConnectionsOp,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array, Gains]:
    return op.between(y, streams, gains, mix, norm, cfg)


@functools.partial(jax.jit, static_argnames=("op", "cfg"))
def _end(
    y: SublayerOutput,
    streams: jax.Array,
    gains: Gains,
    mix: StreamMix,
    norm: jax.Array,
    *,
    op: HyperConnectionsOp,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    return op.end(y, streams, gains, mix, norm, cfg)


@functools.partial(jax.jit, static_argnames=("op", "cfg"))
def _pick(x: jax.Array, ids: jax.Array, real: jax.Array, router: Router, *, op: RouterOp, cfg: ModelConfig) -> Picks:
    return op.pick(x, ids, real, router, cfg)


@functools.partial(jax.jit, static_argnames=("op", "cfg", "backend"))
def _mix(
    x: jax.Array, picks: Picks, experts: Experts, *, op: ExpertsOp, cfg: ModelConfig, backend: Backend
) -> ExpertOutputs:
    return op.mix(x, picks, experts, cfg, backend)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What layers have made."""

    streams: jax.Array  # [B, T, num_streams, hidden] after the last layer
    x: jax.Array  # [B, T, hidden] of the head
    cache: KVCache
    seen: list[tuple[jax.Array, Picks]]  # the streams after each layer, and its picks


def run_model(params: ModelParams, cache: KVCache, way: Way[KVCache]) -> Ran:
    """Run all layers of a model on a pass's tokens."""
    return run_blocks(params.blocks, params.final_mix, params.final_norm, first_streams(params, way.tokens), cache, way)


def run_blocks(
    blocks: Sequence[Block],
    final_mix: StreamMix,
    final_norm: jax.Array,
    streams: jax.Array,
    cache: KVCache,
    way: Way[KVCache],
) -> Ran:
    """Run layers, of which the last is followed by a head with this mix and norm, on streams."""
    x, gains = way.begin(streams, blocks[0])
    seen: list[tuple[jax.Array, Picks]] = []
    for layer, block in enumerate(blocks):
        y, cache = way.attend(block.attention, x, cache, layer)
        streams, x, gains = way.between(y, streams, gains, block.experts_mix, block.experts_norm)
        outputs, picks = way.experts(x, block)
        if layer + 1 < len(blocks):
            following = blocks[layer + 1]
            streams, x, gains = way.between(outputs, streams, gains, following.attention_mix, following.attention_norm)
        else:
            streams, x = way.end(outputs, streams, gains, final_mix, final_norm)
        seen.append((streams, picks))
    return Ran(streams=streams, x=x, cache=cache, seen=seen)


def first_streams(params: ModelParams, tokens: Tokens) -> jax.Array:
    """Return the streams before the first layer [B, T, num_streams, hidden]."""
    rows = embedded(params.embedding, tokens.ids, tokens.real)
    return jnp.repeat(rows[..., None, :], params.cfg.num_streams, axis=-2)


def embedded(embedding: jax.Array, ids: jax.Array, real: jax.Array) -> jax.Array:
    """Return rows of the embedding [..., hidden]: NaN for an id outside the vocabulary, 0 on padding."""
    ids = jnp.where(ids < 0, embedding.shape[0], ids)  # a negative index would count from the end
    rows = embedding.at[ids].get(mode="fill", fill_value=jnp.nan)
    return jnp.where(real[..., None], rows, jnp.zeros((), rows.dtype))


def read_logits(x: jax.Array, head: Weight, which: Logits, way: Way) -> jax.Array | None:
    """Return logits f32 of the "last" tokens [B, V], of "all" [B, T, V], or None for "none"."""
    if which == "none":
        return None
    if which == "all":
        return all_logits(x, head, way)
    if which != "last":
        raise ValueError(f"logits must be 'last', 'all' or 'none', got {which!r}")
    count = way.tokens.count
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, way.logits(last, head), 0.0)


def all_logits(x: jax.Array, head: Weight, way: Way) -> jax.Array:
    """Return the logits of all tokens, f32 [B, T, V]."""
    return jnp.where(way.tokens.real[..., None], way.logits(x, head), 0.0)
