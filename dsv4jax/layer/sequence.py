"""One attention layer over whole sequences, without a cache: what training needs.

It is the layer that ``attention_layer`` runs on a prompt that comes in one call, with nothing kept of it. Queries are
processed in tiles, each with the keys of its window and all entries; picks are a mask. In reverse mode a tile is
computed again, so that no more than one tile's heads and scores are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.checks import FLOATS, check_array
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, KeyFormat, KVFormat, rounded, rounded_keys
from dsv4jax.indexing import quotient
from dsv4jax.kinds import AttentionType
from dsv4jax.layer import indexer
from dsv4jax.layer.attention import attend, start_at_sinks
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.dense import hadamard, product_dtype, rms_norm
from dsv4jax.layer.indexer import PICKS, Over, check_over, divergence, weights_of_entries
from dsv4jax.layer.projections import linear
from dsv4jax.layer.tiles import map_tokens
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.deltas import split_delta
from dsv4jax.weights.params import AttentionParams, PoolParams, check_params
from dsv4jax.weights.stored import StoredWeight, Weight, rows_of

TILE_BYTES = 64 << 20  # of a tile's queries, logits and scores


def attention(
    params: AttentionParams,
    x: jax.Array,
    cfg: DSV4Config,
    layer: int,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    picks: jax.Array | None = None,
) -> jax.Array:
    """Run one attention layer over whole sequences that begin at position 0, without a cache. For training.

    The result is that of ``attention_layer`` on an empty cache that takes each sequence in one call, up to the order of
    sums. Plain JAX on every device: it can be jitted, differentiated, vmapped.

    Args:
      params: the layer's weights, f32 or bf16, or FP8 as checkpoints store them.
      x: f32 or bf16 [B, T, hidden], already input-normed; what is past a row's length is ignored, NaN included.
      cfg: the model's sizes.
      layer: static number of the layer in the model.
      lengths: int32 [B], tokens of each sequence that are real, of which there are at most T; None = all T.
      kv_format, indexer_format: how a cache would round rows and entries, and indexer keys, as for ``plan_cache``.
        "f32" rounds nothing. Derivatives go straight through the rounding.
      picks: int32, int16 or int8 [B, T, K], the entries that each token reads in place of those that the indexer would
        pick, -1 = none; those that it cannot see are left out. CSA only.

    Returns:
      y in x's dtype [B, T, hidden], 0 past the lengths. Picks have no derivative, so that y's derivative by the
      indexer's weights is 0.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer or format, weights or picks of another kind of layer, or a derivative by weights that
        are stored as FP8.
    """
    form = _Form.of(cfg, layer, kv_format, indexer_format)
    if picks is not None and not form.kind.is_indexed:
        raise ValueError(f"picks are for layers with an indexer, layer {layer} is {form.kind.upper()}")
    return _run(params, x, lengths, form, picks)[0]


def attention_with_indexer_loss(
    params: AttentionParams,
    x: jax.Array,
    cfg: DSV4Config,
    layer: int,
    lengths: jax.Array | None = None,
    kv_format: str = "f32",
    indexer_format: str = "f32",
    over: Over = "picked",
) -> tuple[jax.Array, jax.Array]:
    """Run ``attention`` in a CSA layer, and return what its indexer has to learn from.

    Args:
      params, x, cfg, layer, lengths, kv_format, indexer_format: as for ``attention``.
      over: "picked" for the entries that the indexer picks, which are what attention reads; "all" for all that a query
        sees, which attention then reads, too.

    Returns:
      (y in x's dtype [B, T, hidden], 0 past the lengths; f32 [B, T], the divergence of the softmax of the indexer's
      scores from attention's weights over these entries, 0 where there are none and past the lengths). The latter has a
      derivative by the indexer's weights, and by nothing else.

    Raises:
      AssertionError, ValueError: as ``attention``; or the layer has no indexer, or ``over`` is unknown.
    """
    check_over(over)
    form = dataclasses.replace(_Form.of(cfg, layer, kv_format, indexer_format), over=over)
    if not form.kind.is_indexed:
        raise ValueError(f"layer {layer} is a {form.kind.upper()} layer, which has no indexer")
    y, loss = _run(params, x, lengths, form)
    assert loss is not None
    return y, loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What is known of a layer before any number is."""

    cfg: DSV4Config
    kind: AttentionType
    rows: KVFormat
    keys: KeyFormat
    over: Over | None = None  # the entries of the indexer's loss, if that is asked for

    @classmethod
    def of(cls, cfg: DSV4Config, layer: int, kv_format: str, indexer_format: str) -> _Form:
        """Check what is static. Raises ValueError if a format is unknown, or there is no such layer."""
        kind = layer_kind(cfg, layer)
        if kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format must be one of {list(KV_FORMATS)}, got {kv_format!r}")
        if indexer_format not in INDEXER_FORMATS:
            raise ValueError(f"indexer_format must be one of {list(INDEXER_FORMATS)}, got {indexer_format!r}")
        return cls(cfg=cfg, kind=kind, rows=KV_FORMATS[kv_format], keys=INDEXER_FORMATS[indexer_format])

    @property
    def freqs(self) -> np.ndarray:
        return rope_frequencies(self.cfg, self.kind)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the queries of a sequence may read. f32."""

    rows: jax.Array  # [B, window - 1 + T, head_dim] of all tokens, after rows for those before the first
    entries: jax.Array | None  # [B, entries, head_dim]; None if there are none
    keys: jax.Array | None  # [B, entries, indexer_head_dim]; None if all visible entries are read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Queries:
    """What queries are computed from."""

    latent: jax.Array  # [B, t, q_lora_rank]
    positions: jax.Array  # int32 [B, t], the same in every row, consecutive
    head_weights: jax.Array | None  # f32 [B, t, indexer_heads]; None if the indexer does not pick
    picks: jax.Array | None  # int [B, t, K] entries to read; None if the indexer picks, or all are read


def _run(
    params: AttentionParams, x: jax.Array, lengths: jax.Array | None, form: _Form, picks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Check the arrays and run the layer. Returns (y, the indexer's loss f32 [B, T] if the form asks for it)."""
    check_array("x", x, {"B": None, "T": None, "hidden_size": form.cfg.hidden_size}, FLOATS)
    if lengths is not None:
        check_array("lengths", lengths, {"B": x.shape[0]}, jnp.int32)
    check_params(params, form.cfg, form.kind)
    if picks is not None:
        check_array("picks", picks, {"B": x.shape[0], "T": x.shape[1], "K": None}, PICKS)
    if x.size == 0:
        return x, None if form.over is None else jnp.zeros(x.shape[:2])
    if lengths is None:
        lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    return _attention(params, x, lengths, picks, form=form)


# Jitted so that all layers of a kind are traced once.
@functools.partial(jax.jit, static_argnames="form")
def _attention(
    params: AttentionParams, x: jax.Array, lengths: jax.Array, picks: jax.Array | None, *, form: _Form
) -> tuple[jax.Array, jax.Array | None]:
    batch, tokens, _ = x.shape
    real = (jnp.arange(tokens, dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    x = jnp.where(real, x, jnp.zeros((), x.dtype))  # NaN in padding would reach derivatives
    tile = _tile_size(batch, tokens, form)
    x, picks = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, -tokens % tile), (0, 0))), (x, picks))
    queries, seen = _project(params, x, picks, tokens, form)

    @jax.checkpoint
    def attend_tile(queries: _Queries) -> tuple[jax.Array, jax.Array | None]:
        return _attend_tile(params, queries, seen, form)

    found = map_tokens(attend_tile, queries, tile)
    y, loss = jax.tree.map(lambda leaf: jnp.where(real, leaf[:, :tokens], jnp.zeros((), leaf.dtype)), found)
    return y, None if loss is None else loss[..., 0]


def _tile_size(batch: int, tokens: int, form: _Form) -> int:
    """The tokens per tile of queries: at most a window, so that few of the keys beside a tile are masked."""
    cfg, window = form.cfg, form.cfg.sliding_window
    entries = tokens // cfg.ratio(form.kind) if form.kind.compresses else 0
    numbers = cfg.num_heads * (3 * cfg.head_dim + 2 * window + entries)
    if form.kind.is_indexed:
        numbers += cfg.indexer_heads * (cfg.indexer_head_dim + entries)
    most = max(1, min(window, TILE_BYTES // (4 * batch * numbers)))
    return -(-tokens // -(-tokens // most))  # tiles of one size, with as little padding as can be


def _project(
    params: AttentionParams, x: jax.Array, picks: jax.Array | None, tokens: int, form: _Form
) -> tuple[_Queries, _Seen]:
    """Multiply x [B, T, hidden], of which the first ``tokens`` are no padding, by the weights that it feeds."""
    cfg, kind = form.cfg, form.kind
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    latent, kv = jnp.split(linear(x, params.q_a_kv, backend=XLA), [cfg.q_lora_rank], axis=-1)
    latent = rms_norm(latent, params.q_norm, cfg.norm_eps).astype(x.dtype)
    kv = apply_rope(rms_norm(kv, params.kv_norm, cfg.norm_eps), positions, form.freqs)
    rows = jnp.pad(rounded(kv, form.rows, cfg.rope_dim), ((0, 0), (cfg.sliding_window - 1, 0), (0, 0)))
    count = tokens // cfg.ratio(kind) if kind.compresses else 0
    entries = keys = head_weights = None
    if count:
        assert params.compress is not None
        product = linear(x, params.compress, backend=XLA)
        entries, product = _entries(product, params.entry_pool, count, form)
        entries = rounded(entries, form.rows, cfg.rope_dim)
        if form.over is not None:  # x is a constant for the indexer, and its weights are none
            own = rows_of(params.compress, params.compress.shape[0] - product.shape[-1], params.compress.shape[0])
            product = linear(lax.stop_gradient(x), own, backend=XLA)
        is_scored = (count > cfg.indexer_top_k and picks is None) or form.over is not None
        if kind.is_indexed and is_scored:
            of_indexer = product, params.key_pool
            of_indexer = lax.stop_gradient(of_indexer) if form.over is None else of_indexer
            keys, head_weights = _entries(*of_indexer, count, form)
            keys = rounded_keys(hadamard(keys), form.keys)
            head_weights *= cfg.indexer_head_dim**-0.5 * cfg.indexer_heads**-0.5
    queries = _Queries(latent=latent, positions=positions, head_weights=head_weights, picks=picks)
    return queries, _Seen(rows=rows, entries=entries, keys=keys)


def _entries(product: jax.Array, pool: PoolParams | None, count: int, form: _Form) -> tuple[jax.Array, jax.Array]:
    """Take a compressor's columns off the product of x with ``compress``, f32 [B, T, rows].

    Returns (the first ``count`` entries f32 [B, count, dim], not yet rounded; the other columns).
    """
    assert pool is not None
    ratio = form.cfg.ratio(form.kind)
    k, z, others = jnp.split(product, [pool.width, 2 * pool.width], axis=-1)
    k, z = (part[:, : count * ratio].reshape(part.shape[0], count, ratio, -1) for part in (k, z))
    z += jnp.broadcast_to(pool.ape.astype(jnp.float32)[None, None], z.shape)
    if form.kind.overlaps:  # the first half of a token's columns goes into the next block's entry
        (kb, ka), (zb, za) = jnp.split(k, 2, axis=-1), jnp.split(z, 2, axis=-1)
        after = ((0, 0), (1, 0), (0, 0), (0, 0))
        kb, zb = jnp.pad(kb[:, :-1], after), jnp.pad(zb[:, :-1], after, constant_values=-jnp.inf)
        k, z = jnp.concatenate([kb, ka], axis=2), jnp.concatenate([zb, za], axis=2)
    pooled = rms_norm(jnp.sum(jax.nn.softmax(z, axis=2) * k, axis=2), pool.norm, form.cfg.norm_eps)
    return apply_rope(pooled, ratio * jnp.arange(count, dtype=jnp.int32)[None], form.freqs), others


def _attend_tile(
    params: AttentionParams, queries: _Queries, seen: _Seen, form: _Form
) -> tuple[jax.Array, jax.Array | None]:
    """Process one tile of queries, from W_qb to W_ob: [B, t, hidden]; and the indexer's loss f32 [B, t, 1]."""
    cfg, latent, positions = form.cfg, queries.latent, queries.positions
    q = linear(latent, params.q_b, backend=XLA).reshape(*positions.shape, cfg.num_heads, cfg.head_dim)
    q = apply_rope(rms_norm(q, None, cfg.norm_eps), positions[..., None], form.freqs)

    first, size = positions[:, :1] - (cfg.sliding_window - 1), positions.shape[1] + cfg.sliding_window - 1
    key = first + jnp.arange(size, dtype=jnp.int32)[None]
    age = positions[:, :, None] - key[:, None]
    window = lax.dynamic_slice_in_dim(seen.rows, positions[0, 0], size, axis=1)
    in_window = (key >= 0)[:, None] & (age >= 0) & (age < cfg.sliding_window)
    running = attend(start_at_sinks(params.sinks, q), q, window, in_window)
    loss = None if form.over is None else jnp.zeros((*positions.shape, 1))
    if seen.entries is not None:
        visible = quotient(positions + 1, cfg.ratio(form.kind))
        read = jnp.arange(seen.entries.shape[1], dtype=jnp.int32)[None, None] < visible[..., None]
        scores = None
        if queries.picks is not None:
            read &= _mask(queries.picks, seen.entries.shape[1])
        elif seen.keys is not None:
            assert params.index_q_b is not None
            latents = dataclasses.replace(queries, latent=lax.stop_gradient(latent))
            given = params.index_q_b, latents, seen.keys
            scores = _scores(*(lax.stop_gradient(given) if form.over is None else given), form)
            if form.over != "all":
                read &= _picked(lax.stop_gradient(scores), visible, form)
        running = attend(running, q, seen.entries, read)
        if form.over is not None:
            assert scores is not None
            loss = divergence(weights_of_entries(running, q, seen.entries, read), scores, read)[..., None]

    out = apply_rope(running.output, positions[..., None], form.freqs, inverse=True).astype(latent.dtype)
    groups = out.reshape(*positions.shape, cfg.o_groups, -1)
    o_a, _ = split_delta(params.o_a)
    dtype = groups.dtype if isinstance(o_a, StoredWeight) else product_dtype(groups, o_a)
    narrow = linear(groups, params.o_a, dtype, cfg.o_groups, backend=XLA).reshape(*positions.shape, -1)
    return linear(narrow.astype(latent.dtype), params.o_b, latent.dtype, backend=XLA), loss


def _scores(q_b: Weight, queries: _Queries, keys: jax.Array, form: _Form) -> jax.Array:
    """The indexer's scores of all entries for the queries of a tile, f32 [B, t, entries]."""
    cfg, positions = form.cfg, queries.positions
    q = linear(queries.latent, q_b, backend=XLA)
    q = q.reshape(*positions.shape, cfg.indexer_heads, cfg.indexer_head_dim)
    q = hadamard(apply_rope(q, positions[..., None], form.freqs))
    q = rounded_keys(q, form.keys) if form.keys.rounds_queries else q
    dots = jnp.einsum("bthd,bkd->bthk", q, keys, precision=lax.Precision.HIGHEST)
    return jnp.einsum("bth,bthk->btk", queries.head_weights, jnp.maximum(dots, 0), precision=lax.Precision.HIGHEST)


def _picked(scores: jax.Array, visible: jax.Array, form: _Form) -> jax.Array:
    """Which of all entries the indexer picks for the queries of a tile, bool [B, t, entries]."""
    return _mask(indexer.pick(scores, visible, form.cfg.indexer_top_k), scores.shape[-1])


def _mask(picks: jax.Array, count: int) -> jax.Array:
    """Which of so many entries are among picks int [B, t, K], -1 = none: bool [B, t, count]."""
    picks = picks.astype(jnp.int32)
    row, token = (of_axis[..., None] for of_axis in jnp.indices(picks.shape[:2], dtype=jnp.int32))
    none = jnp.zeros((*picks.shape[:2], count), bool)
    return none.at[row, token, jnp.where(picks < 0, count, picks)].set(True, mode="drop")
