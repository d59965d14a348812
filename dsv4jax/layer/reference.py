"""One attention layer over one whole sequence, recomputed without a cache. For tests and debugging.

Written entry by entry as in the paper, and slow. The only code it shares with the rest of the library is the number
formats. Its parts are jitted one by one, because each operation alone takes about 20 ms to compile.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv4jax.config import AttentionType, DSV4Config, layer_schedule
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, rounded, rounded_keys
from dsv4jax.weights.deltas import WeightWithDelta
from dsv4jax.weights.params import AttentionParams, CompressorParams
from dsv4jax.weights.stored import StoredWeight, Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What one layer computes for a sequence of T tokens."""

    out: jax.Array  # f32 [T, hidden]
    rows: jax.Array  # f32 [T, head_dim] key row of every token, rounded as stored
    entries: jax.Array | None  # f32 [T // ratio, head_dim], rounded as stored
    indexer_entries: jax.Array | None  # f32 [T // ratio, indexer_head_dim], rounded as stored
    scores: jax.Array | None  # f32 [T, T // ratio] indexer scores, -inf where not visible
    seen: np.ndarray | None  # bool [T, T // ratio] which entries each query reads


def _wide(weight: Weight) -> jax.Array:
    if isinstance(weight, WeightWithDelta):
        return weight.merged(_wide(weight.base))
    return weight.widened(jnp.float32) if isinstance(weight, StoredWeight) else weight.astype(jnp.float32)


@jax.jit
def _matmul(x: jax.Array, weight: Weight) -> jax.Array:
    return jnp.matmul(x, _wide(weight).T, precision=lax.Precision.HIGHEST)


_rounded = jax.jit(rounded, static_argnames=("rows", "rope_dim"))
_rounded_keys = jax.jit(rounded_keys, static_argnames="keys")


@functools.partial(jax.jit, static_argnames="cfg")
def _norm(x: jax.Array, cfg: DSV4Config, weight: jax.Array | None = None) -> jax.Array:
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + cfg.norm_eps)
    return x if weight is None else x * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)


def _rope(x: jax.Array, positions: np.ndarray, cfg: DSV4Config, kind: AttentionType, sign: float = 1.0) -> jax.Array:
    """Rotate x [n, ..., dim] at positions [n].

    Pairs of the last rope_dim dims are multiplied, as complex numbers, by exp(i p f).
    """
    dim = cfg.rope_dim
    base = cfg.compress_rope_theta if kind.compresses else cfg.rope_theta
    freqs = []
    for i in range(dim // 2):
        f = np.float32(1) / np.float32(base) ** np.float32(2 * i / dim)
        if kind.compresses:
            low, high = (
                rounded(dim * math.log(cfg.yarn_original_max_position / (beta * 2 * math.pi)) / (2 * math.log(base)))
                for rounded, beta in ((math.floor, cfg.yarn_beta_fast), (math.ceil, cfg.yarn_beta_slow))
            )
            low, high = min(max(low, 0), dim - 1), min(max(high, 0), dim - 1)
            ramp = np.float32(min(max((i - low) / ((high - low) or 0.001), 0), 1))
            f = f / np.float32(cfg.yarn_factor) * ramp + f * (1 - ramp)
        freqs.append(f)
    angle = positions.astype(np.float32)[:, None] * np.asarray(freqs, np.float32)[None]
    return _turned(x, np.exp(1j * sign * angle).astype(np.complex64))


@jax.jit
def _turned(x: jax.Array, turn: jax.Array) -> jax.Array:
    """Multiply pairs of the last dims of x [n, ..., dim] by turn [n, pairs]."""
    dim = 2 * turn.shape[1]
    turn = turn.reshape(-1, *(1,) * (x.ndim - 2), dim // 2)
    tail = x[..., -dim:]
    turned = lax.complex(tail[..., 0::2], tail[..., 1::2]) * turn
    tail = jnp.stack([turned.real, turned.imag], -1).reshape(tail.shape)
    return jnp.concatenate([x[..., :-dim], tail], -1)


def _entries(params: CompressorParams, x: jax.Array, ratio: int, cfg: DSV4Config, kind: AttentionType) -> jax.Array:
    """Compute the entries of all complete blocks by equations 9 to 12, then norm and rope."""
    k, z = _matmul(x, params.kv), _matmul(x, params.gate)
    entries = []
    for i in range(x.shape[0] // ratio):
        pooled = _pooled(k, z, params.ape, i, ratio, overlaps=kind.overlaps, is_first=i == 0)
        entries.append(_rope(_norm(pooled, cfg, params.norm), np.array([i * ratio]), cfg, kind))
    return jnp.concatenate(entries) if entries else jnp.zeros((0, params.norm.shape[0]))


@functools.partial(jax.jit, static_argnames=("ratio", "overlaps", "is_first"))
def _pooled(
    k: jax.Array, z: jax.Array, ape: jax.Array, i: int, ratio: int, *, overlaps: bool, is_first: bool
) -> jax.Array:
    """Return the mean of the keys of block ``i``, and of those before it if blocks overlap, weighted by their gates."""
    k, z = (lax.dynamic_slice_in_dim(jnp.pad(x, ((ratio, 0), (0, 0))), i * ratio, 2 * ratio) for x in (k, z))
    ape = ape.astype(jnp.float32)
    own, before = slice(ratio, 2 * ratio), slice(ratio)
    if overlaps:  # columns [d:2d] are for the token's own block, [0:d] for the next block
        dim = k.shape[1] // 2
        parts = [(k[own, dim:], z[own, dim:] + ape[:, dim:])]
        if not is_first:
            parts.append((k[before, :dim], z[before, :dim] + ape[:, :dim]))
    else:
        parts = [(k[own], z[own] + ape)]
    gates = jax.nn.softmax(jnp.concatenate([z for _, z in parts]), axis=0)
    return jnp.sum(gates * jnp.concatenate([k for k, _ in parts]), axis=0, keepdims=True)


def _rotate(x: jax.Array) -> jax.Array:
    """Return x H / sqrt(n), where H is Sylvester's Hadamard matrix: H_2n = [[H, H], [H, -H]]."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < x.shape[-1]:
        h = np.block([[h, h], [h, -h]])
    return jnp.matmul(x, jnp.asarray(h * h.shape[0] ** -0.5), precision=lax.Precision.HIGHEST)


@jax.jit
def _attend(q: jax.Array, keys: jax.Array, mask: np.ndarray, sinks: jax.Array) -> jax.Array:
    """Return attention of q [t, h, d] over keys [k, d], which are the values, too, where mask [t, k] is set."""
    logits = jnp.einsum("thd,kd->thk", q, keys, precision=lax.Precision.HIGHEST) * q.shape[-1] ** -0.5
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (*logits.shape[:2], 1))
    weight = jax.nn.softmax(jnp.concatenate([logits, sinks], -1), axis=-1)[..., :-1]
    return jnp.einsum("thk,kd->thd", weight, keys, precision=lax.Precision.HIGHEST)


def reference_layer(
    params: AttentionParams,
    x: jax.Array,
    cfg: DSV4Config,
    layer: int,
    kv_format: str = "f32",
    indexer_format: str = "f32",
) -> Reference:
    """Run one layer over x f32 [T, hidden], positions 0 .. T - 1.

    Weights that are stored as FP8 are widened, and activations are not rounded, whatever the weights say.

    Derivatives go straight through the rounding of rows, as those of ``attention_layer`` do. Not under jit: picks are
    made on the host.
    """
    kind = layer_schedule(cfg)[layer].attn
    ratio = cfg.ratio(kind)
    rows_as, keys_as = KV_FORMATS[kv_format], INDEXER_FORMATS[indexer_format]
    length = x.shape[0]
    positions = np.arange(length)

    stored = functools.partial(_rounded, rows=rows_as, rope_dim=cfg.rope_dim)
    stored_keys = functools.partial(_rounded_keys, keys=keys_as)

    q_latent = _norm(_matmul(x, params.q_a), cfg, params.q_norm)
    q = _norm(_matmul(q_latent, params.q_b).reshape(length, cfg.num_heads, cfg.head_dim), cfg)
    q = _rope(q, positions, cfg, kind)
    rows = stored(_rope(_norm(_matmul(x, params.kv), cfg, params.kv_norm), positions, cfg, kind))

    in_window = (positions[:, None] >= positions) & (positions[:, None] - positions < cfg.sliding_window)
    keys, mask = rows, in_window
    entries = indexer_entries = scores = seen = None
    if params.compressor is not None:
        entries = stored(_entries(params.compressor, x, ratio, cfg, kind))
        visible = np.arange(len(entries)) < ((positions + 1) // ratio)[:, None]
        seen = visible
        if params.indexer is not None:
            indexer_entries = _rotate(_entries(params.indexer.compressor, x, ratio, cfg, kind))
            indexer_entries = stored_keys(indexer_entries)
            qi = _matmul(q_latent, params.indexer.q_b).reshape(length, cfg.indexer_heads, cfg.indexer_head_dim)
            qi = _rotate(_rope(qi, positions, cfg, kind))
            if keys_as.rounds_queries:
                qi = stored_keys(qi)
            w = _matmul(x, params.indexer.head_weights) * cfg.indexer_head_dim**-0.5 * cfg.indexer_heads**-0.5
            dots = jnp.einsum("thd,sd->ths", qi, indexer_entries, precision=lax.Precision.HIGHEST)
            scores = jnp.einsum("th,ths->ts", w, jnp.maximum(dots, 0), precision=lax.Precision.HIGHEST)
            scores = jnp.where(visible, scores, -jnp.inf)
            best = np.argsort(-np.asarray(lax.stop_gradient(scores)), axis=1, kind="stable")[:, : cfg.indexer_top_k]
            seen = np.zeros_like(visible)
            np.put_along_axis(seen, best, True, axis=1)
            seen &= visible
        keys, mask = jnp.concatenate([rows, entries]), np.concatenate([in_window, seen], axis=1)

    out = _rope(_attend(q, keys, mask, params.sinks), positions, cfg, kind, sign=-1.0)

    groups = out.reshape(length, cfg.o_groups, -1)
    weight_a = _wide(params.o_a).reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    latent = jnp.einsum("tgi,goi->tgo", groups, weight_a, precision=lax.Precision.HIGHEST).reshape(length, -1)
    return Reference(
        out=_matmul(latent, params.o_b),
        rows=rows,
        entries=entries,
        indexer_entries=indexer_entries,
        scores=scores,
        seen=seen,
    )
