"""The model's forward pass: over a cache, on drafts, and over whole sequences without a cache.

``inside.blocks`` has the layers of a pass, ``inside.captures`` what can be captured of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack, overload

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.shards import OF_ROWS, cache_specs
from dsv4jax.checks import Named, Tree, check_array, check_type
from dsv4jax.config import layer_schedule
from dsv4jax.layer.backend import XLA, Backend, for_plan
from dsv4jax.layer.call import Given, RunOptions
from dsv4jax.layer.indexer import Over
from dsv4jax.layer.layer import run_layer
from dsv4jax.layer.sequence import attention as attend_sequences
from dsv4jax.layer.sequence import attention_with_indexer_loss
from dsv4jax.layer.stages.probe import Probe, Seen
from dsv4jax.model.inside.blocks import (
    Attend,
    Logits,
    Ran,
    Sublayer,
    Tokens,
    Way,
    all_logits,
    check_pass,
    first_streams,
    read_logits,
    run_model,
)
from dsv4jax.model.inside.captures import CHOICES_SPEC, NOTHING, Looking, ModelProbe, Patching
from dsv4jax.model.inside.choices import check_choices
from dsv4jax.model.inside.devices import run_on_devices, weight_specs
from dsv4jax.model.ops import Picks
from dsv4jax.model.params import Block, ModelParams, check_model
from dsv4jax.model.plain.hyper_connections import head_input, mix_out
from dsv4jax.requests.speculate import StagedLayer, staged_layer, staged_specs
from dsv4jax.weights.params import AttentionParams


@overload
def forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    logits: Logits = "last",
    *,
    backend: Backend = None,
    **looking: Unpack[Patching],
) -> tuple[jax.Array | None, jax.Array, KVCache]: ...


@overload
def forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    logits: Logits = "last",
    *,
    backend: Backend = None,
    **looking: Unpack[Looking],
) -> tuple[jax.Array | None, jax.Array, KVCache, Named]: ...


def forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    logits: Logits = "last",
    *,
    backend: Backend = None,
    **looking: Tree,
) -> Tree:
    """Run the model on new tokens and store what the cache keeps of them.

    Call it between ``prepare_forward`` and ``advance``. T = 1 is decode, T > 1 a chunk of a prompt; rows of one batch
    may do either. The cache is not donated here: the caller's jit decides.

    Args:
      params: the model's weights.
      ids: int32 [B, T]. What is past a row's num_new is ignored. An id outside the vocabulary gives its row NaN, also
        for tokens before it in the same call, whose products with what they do not see are 0 times NaN.
      cache: a cache for ``params.cfg.attention``.
      slots: int32 [B], distinct; -1 = padding row.
      num_new: int32 [B], tokens of each row that are real. A row that ``prepare_forward`` did not grant so many, or
        that names more than T, is left alone.
      logits: of each row's "last" token, of "all" tokens, or "none".
      backend: of the attention layers and products; see ``attention_layer``.
      looking: ``capture``, names of what is returned beside, such as ("streams", "picks"); ``intervene``, functions
        (value, layer) -> value by such a name, which change it inside jit; ``choices``, the ``Choices`` to use in
        place of choosing. ``dsv4jax.model.inside.captures`` lists the names. What is not named costs nothing.

    Returns:
      (logits f32 [B, V], [B, T, V] or None; what drafts are made of; the updated cache, its lengths not yet advanced).
      Drafts are made of the streams after the last layer [B, T, num_streams, hidden]; those of DSpark of the means of
      the streams after its taps [B, T, taps * hidden]. Rows and tokens that were not taken have 0. With ``capture``, a
      dict by its names is the fourth; in it, what belongs to tokens that were not taken means nothing.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the cache is for another model, there are no tokens, ``logits``, the backend or a name is unknown, or
        a function returns something of another form than it was given.
    """
    if logits not in ("last", "all", "none"):
        raise ValueError(f"logits must be 'last', 'all' or 'none', got {logits!r}")
    probe = ModelProbe.of(**looking)
    made, captured, _ = _forward(params, cache, (ids, slots, num_new), probe, logits=logits, backend=backend)
    return (*made, captured) if "capture" in looking else made


Staged = tuple[StagedLayer, ...]
Rows = tuple[jax.Array, jax.Array, jax.Array]  # ids, slots and num_new of a pass


@overload
def stage_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    backend: Backend = None,
    **looking: Unpack[Patching],
) -> tuple[jax.Array, jax.Array, KVCache, Staged]: ...


@overload
def stage_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    backend: Backend = None,
    **looking: Unpack[Looking],
) -> tuple[jax.Array, jax.Array, KVCache, Staged, Named]: ...


def stage_forward(
    params: ModelParams,
    ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    backend: Backend = None,
    **looking: Tree,
) -> Tree:
    """Run the model on drafts without changing what the requests hold; see ``stage``.

    The arguments are those of ``forward``.

    Returns:
      (logits f32 [B, T, V]; what drafts are made of; cache; what ``commit`` takes to store tokens that are accepted).
      With ``capture``, what it names is the fifth.

    Raises:
      AssertionError, ValueError: as ``forward``; or there are no rows.
    """
    probe = ModelProbe.of(**looking)
    rows = ids, slots, num_new
    made, captured, staged = _forward(params, cache, rows, probe, logits="all", backend=backend, is_draft=True)
    return (*made, staged, captured) if "capture" in looking else (*made, staged)


@functools.partial(jax.jit, static_argnames=("logits", "backend", "is_draft"))
def _forward(
    params: ModelParams,
    cache: KVCache,
    rows: Rows,
    probe: ModelProbe,
    *,
    logits: Logits,
    backend: Backend,
    is_draft: bool = False,
) -> tuple[tuple[jax.Array | None, jax.Array, KVCache], Named, Staged]:
    """Return (what ``forward`` does, what was captured, what ``commit`` takes if the tokens are drafts)."""
    check_pass(params, "ids", *rows)
    sizes = params.cfg.attention

    def step(params: ModelParams, cache: KVCache, rows: Rows, probe: ModelProbe) -> Tree:
        ids, slots, num_new = rows
        tokens = Tokens.of(params, ids, cache, slots, num_new, sizes)
        tokens = tokens if probe.looks or is_draft else tokens.divided()
        staged: list[StagedLayer] = []
        options = RunOptions(backend=backend, token_axis=tokens.devices.token_axis, is_draft=is_draft)
        attend = attention(slots, num_new, options, staged)
        way = Way(tokens=tokens, attend=attend, cfg=params.cfg, backend=for_plan(backend, cache.plan), probe=probe)
        ran = run_model(params, cache, way)
        of_drafts = tokens.devices.gather_chunk(_for_drafts(params, ran))
        made = read_logits(ran.x, params.head, logits, way), of_drafts, ran.cache
        return made, ran.captured(way), tuple(staged)

    def specs() -> tuple[Tree, Tree]:
        of_cache = cache_specs(cache)
        of_staged = tuple(staged_specs(sizes, layer) for layer in range(sizes.num_layers)) if is_draft else ()
        given = weight_specs(params), of_cache, OF_ROWS, CHOICES_SPEC
        return given, ((OF_ROWS, OF_ROWS, of_cache), probe.specs, of_staged)

    run = run_on_devices(step, params.mesh, cache, rows[0].shape[0], specs)
    return run(params, cache, rows, probe)


def _for_drafts(params: ModelParams, ran: Ran) -> jax.Array:
    return ran.streams if params.drafts is None else params.drafts.made_of(ran.after, params.cfg)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a forward pass computes on its way."""

    logits: jax.Array  # f32 [B, T, V]
    streams: jax.Array  # [L, B, T, num_streams, hidden] after each layer
    picks: Picks  # [L, B, T, k] of each layer


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
    capture = "streams", "experts"
    logits, _, cache, seen = forward(params, ids, cache, slots, num_new, "all", backend=backend, capture=capture)
    assert logits is not None
    return Inspection(logits=logits, streams=seen["streams"], picks=seen["experts"]), cache


@overload
def forward_sequences(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    **looking: Unpack[Patching],
) -> jax.Array: ...


@overload
def forward_sequences(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    **looking: Unpack[Looking],
) -> tuple[jax.Array, Named]: ...


def forward_sequences(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    **looking: Tree,
) -> Tree:
    """Run the model on whole sequences that begin at position 0, without a cache. For training.

    The logits are those of ``forward`` on an empty cache, up to the order of sums. Plain JAX on every device. Reverse
    mode keeps the streams between layers and computes each layer again.

    Args:
      params: the model's weights.
      ids: int32 [B, T]. What is past a row's length is ignored. An id outside the vocabulary gives its row NaN, also
        for tokens before it.
      lengths: int32 [B], tokens of each sequence that are real, of which there are at most T; None = all T.
      kv_format, indexer_format: how a cache would round what it stores; see ``dsv4jax.attention``. Unless told, nothing
        is rounded: ``init_caches`` and ``Generator`` make caches of other formats.
      looking: ``capture``, ``intervene`` and ``choices``, as for ``forward``; but "entries", "picks", "attention" and
        "choices" are of passes over a cache alone.

    Returns:
      logits f32 [B, T, V] of the tokens after each, 0 past the lengths; with ``capture``, a dict by its names, too.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: an unknown format or name, T = 0, or a derivative by weights that are stored as FP8 or FP4.
    """
    probe = ModelProbe.of(**looking).without_cache()
    logits, captured = _forward_sequences(params, ids, lengths, probe, kv_format, indexer_format)
    return (logits, captured) if "capture" in looking else logits


@functools.partial(jax.jit, static_argnames=("kv_format", "indexer_format"))
def _forward_sequences(
    params: ModelParams,
    ids: jax.Array,
    lengths: jax.Array | None,
    probe: ModelProbe,
    kv_format: str,
    indexer_format: str,
) -> tuple[jax.Array, Named]:
    def attend(
        weights: AttentionParams, x: jax.Array, found: None, layer: int, probe: Probe
    ) -> tuple[jax.Array, None, Seen]:
        given = weights, x, params.cfg.attention, layer, lengths, kv_format, indexer_format
        return attend_sequences(*given, picks=probe.entries), found, {}

    logits, captured, _ = _run_sequences(params, ids, lengths, attend, probe)
    return logits, captured


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
    check_type("params", params, ModelParams)
    cfg = params.cfg.attention
    if not any(spec.attn.is_indexed for spec in layer_schedule(cfg)):
        raise ValueError("the model has no CSA layer, and so no indexer")

    def attend(
        weights: AttentionParams, x: jax.Array, found: jax.Array | None, layer: int, probe: Probe
    ) -> tuple[jax.Array, jax.Array | None, Seen]:
        del probe
        given = weights, x, cfg, layer, lengths, kv_format, indexer_format
        if layer_schedule(cfg)[layer].attn.is_indexed:
            return *attention_with_indexer_loss(*given, over=over), {}
        return attend_sequences(*given), found, {}

    logits, _, losses = _run_sequences(params, ids, lengths, attend, NOTHING)
    return logits, jnp.stack([loss for loss in losses if loss is not None])


def _run_sequences(
    params: ModelParams, ids: jax.Array, lengths: jax.Array | None, attend: Attend[Tree], probe: ModelProbe
) -> tuple[jax.Array, Named, list[jax.Array | None]]:
    """Run whole sequences.

    Returns (logits f32 [B, T, V], what is captured, what ``attend`` found besides y in each layer, or None).
    """
    check_model(params)
    check_array("ids", ids, {"B": None, "T": None}, jnp.int32)
    if not ids.shape[1]:
        raise ValueError(f"ids: expected at least one token of each sequence, got shape {ids.shape}")
    if lengths is None:
        lengths = jnp.full(ids.shape[:1], ids.shape[1], jnp.int32)
    check_array("lengths", lengths, {"B": ids.shape[0]}, jnp.int32)
    real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    if probe.choices is not None:
        check_choices(probe.choices, params.cfg, *ids.shape)
    tokens = Tokens(ids=ids, real=real, count=lengths)
    way = Way(tokens=tokens, attend=attend, cfg=params.cfg, backend=XLA, probe=probe)
    streams, seen = first_streams(params, tokens), []
    found: list[jax.Array | None] = []
    for layer, block in enumerate(params.blocks):

        @jax.checkpoint
        def run(block: Block, streams: jax.Array, layer: int = layer) -> tuple[jax.Array, jax.Array | None, Seen]:
            taps = way.taps(layer)
            x, gains = way.begin(streams, Sublayer.attention(block, taps))
            y, found = way.attention(x, None, block, layer, taps)
            streams, x, gains = way.between(y, streams, gains, Sublayer.experts(block, taps))
            streams = taps.tap("streams", mix_out(way.experts(x, block, taps), streams, gains))
            return streams, found, taps.seen

        streams, of_layer, seen_there = run(block, streams)
        found.append(of_layer)
        seen.append(seen_there)
    taps = way.taps(len(seen))
    x = taps.tap("head", head_input(streams, params.final_mix, params.final_norm, params.cfg).x)
    captured = probe.captured([*seen, taps.seen], params.cfg, 0)
    return all_logits(x, params.head, way), captured, found


def attention(
    slots: jax.Array, num_new: jax.Array, options: RunOptions, staged: list[StagedLayer] | None = None
) -> Attend[KVCache]:
    """Return how the layers of a pass over a cache attend: they store what is new.

    Those of a pass on drafts leave that to ``commit``, and append what it takes to ``staged``.
    """

    def attend(
        weights: AttentionParams, x: jax.Array, cache: KVCache, layer: int, probe: Probe
    ) -> tuple[jax.Array, KVCache, Seen]:
        kind, index = cache.locate(layer)
        given = Given(x=x, slots=slots, num_new=num_new)
        y, cache, draft, seen = run_layer(weights, given, cache, kind, index, options, probe)
        if draft is not None:
            assert staged is not None
            staged.append(staged_layer(draft, layer))
        return y, cache, seen

    return attend
