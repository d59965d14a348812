"""Compressors: streams of tokens -> entries (paper eq. 9 to 12 for CSA, 9 to 10 for HCA).

A token contributes a key row k and a gate logit z per channel, both projections of its input. An entry is
the gate-weighted mean over its tokens, channel by channel, normed and roped at the position of its block's first token:

    CSA  entry i = sum softmax(Z) * K over 2m slots: the b-stream of block i - 1, then the a-stream of block i
    HCA  entry i = sum softmax(Z) * K over the m' tokens of block i

A forward pass brings T tokens of each request, anywhere in their blocks: a request's ``phase`` is its length modulo the
ratio. Tokens and tail are laid out on a grid of blocks, so that one code path serves decode, prefill and mixed batches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.state import EMPTY_GATE, CSATail, HCAOnlineTail, HCATail
from dsv4jax.config import AttentionType, DSV4Config
from dsv4jax.linear import linear, rms_norm
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.params import CompressorParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What T new tokens contribute, as the projections give it: CSA's a- and b-stream, HCA's a-stream alone.

    Checkpoint columns [0:dim] are CSA's b-stream and [dim:2 dim] its a-stream.
    """

    k: jax.Array  # f32 [B, T, dim], CSA: [B, T, 2 dim]
    z: jax.Array  # f32, as k
    overlap: bool = dataclasses.field(metadata={"static": True})  # CSA's two streams

    def _part(self, both: jax.Array, number: int) -> jax.Array:
        dim = both.shape[-1] // 2
        return both[..., number * dim : (number + 1) * dim] if self.overlap else both

    @property
    def ka(self) -> jax.Array:
        """K of the a-stream, which enters the entry of a token's own block; HCA's only one. f32 [B, T, dim]."""
        return self._part(self.k, 1)

    @property
    def za(self) -> jax.Array:
        """Gate logits of the a-stream."""
        return self._part(self.z, 1)

    @property
    def kb(self) -> jax.Array:
        """K of CSA's b-stream, which enters the entry of the next block."""
        return self._part(self.k, 0)

    @property
    def zb(self) -> jax.Array:
        """Gate logits of the b-stream."""
        return self._part(self.z, 0)


def project_streams(
    params: CompressorParams, x: jax.Array, start: jax.Array, ratio: int, dtype: Any, *, overlap: bool
) -> Streams:
    """k = x W_kv and z = x W_gate + ape[position mod ratio].

    Args:
      x: [B, T, hidden].
      start: int32 [B] position of each request's first new token.
      dtype: the tails'; every stream is rounded to it at once, so that an entry does not depend on how its tokens were
        split over calls.
      overlap: True for CSA, which has two streams.
    """

    def rounded(stream: jax.Array) -> jax.Array:
        # The barrier keeps XLA from dropping a round trip through a narrower dtype.
        return stream if dtype == jnp.float32 else lax.optimization_barrier(stream.astype(dtype)).astype(jnp.float32)

    slot = (start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]) % ratio
    k = rounded(linear(x, params.kv))
    z = rounded(linear(x, params.gate) + params.ape.astype(jnp.float32)[slot])
    return Streams(k=k, z=z, overlap=overlap)


def num_touched_blocks(num_tokens: int, ratio: int) -> int:
    """Most blocks that T consecutive tokens can touch."""
    return (num_tokens + 2 * ratio - 2) // ratio


def _on_grid(
    tokens: jax.Array,
    tail: jax.Array | None,
    phase: jax.Array,
    num_new: jax.Array,
    ratio: int,
    empty: float,
    width: int | None = None,
) -> jax.Array:
    """Lay tokens [B, T, dim] on their blocks: [B, N, ratio, dim]; block 0 begins with the tail's first ``phase`` rows.

    Slots without a token hold ``empty``. With ``width`` and no tail, a block's row holds only its first ``width`` new
    tokens: enough when T <= width, and far smaller.
    """
    num_tokens = tokens.shape[1]
    block = jnp.arange(num_touched_blocks(num_tokens, ratio), dtype=jnp.int32)
    begin = (block * ratio)[None] - phase[:, None]  # [B, N] token index of a block's first slot, negative in block 0
    if width is not None:
        token = jnp.maximum(begin, 0)[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None]
        inside = token < (begin + ratio)[..., None]
    else:
        token = begin[..., None] + jnp.arange(ratio, dtype=jnp.int32)[None, None]
        inside = token >= 0
    inside &= token < num_new[:, None, None]
    flat = jnp.clip(token, 0, num_tokens - 1).reshape(token.shape[0], -1, 1)
    rows = jnp.take_along_axis(tokens, flat, axis=1).reshape(*token.shape, -1)
    rows = jnp.where(inside[..., None], rows, empty)
    if tail is not None:
        from_tail = jnp.arange(ratio, dtype=jnp.int32)[None] < phase[:, None]
        first = jnp.where(from_tail[..., None], tail.astype(jnp.float32), rows[:, 0])
        rows = jnp.concatenate([first[:, None], rows[:, 1:]], axis=1)
    return rows


def _softmax_pool(k: jax.Array, z: jax.Array) -> jax.Array:
    """sum softmax(z) * k over axis -2, per channel."""
    weight = jnp.exp(z - jnp.max(z, axis=-2, keepdims=True))
    return jnp.sum(weight * k, axis=-2) / jnp.sum(weight, axis=-2)


def pool_csa(tail: CSATail, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
    """Pooled rows f32 [B, N, dim] of every block the tokens touch; those of incomplete blocks mean nothing.

    tail's leaves are one layer's rows of the batch, [B, ratio, dim].
    """
    ka = _on_grid(streams.ka, tail.ka, phase, num_new, ratio, 0.0)
    za = _on_grid(streams.za, tail.za, phase, num_new, ratio, EMPTY_GATE)
    kb = _on_grid(streams.kb, tail.kb_next, phase, num_new, ratio, 0.0)
    zb = _on_grid(streams.zb, tail.zb_next, phase, num_new, ratio, EMPTY_GATE)
    kb = jnp.concatenate([tail.kb.astype(jnp.float32)[:, None], kb[:, :-1]], axis=1)  # of the block before
    zb = jnp.concatenate([tail.zb.astype(jnp.float32)[:, None], zb[:, :-1]], axis=1)
    return _softmax_pool(jnp.concatenate([kb, ka], axis=2), jnp.concatenate([zb, za], axis=2))


def pool_hca(tail: HCATail, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int) -> jax.Array:
    """As ``pool_csa``, for the one stream of HCA."""
    return _softmax_pool(
        _on_grid(streams.ka, tail.ka, phase, num_new, ratio, 0.0),
        _on_grid(streams.za, tail.za, phase, num_new, ratio, EMPTY_GATE),
    )


def pool_hca_online(
    tail: HCAOnlineTail, streams: Streams, phase: jax.Array, num_new: jax.Array, ratio: int
) -> tuple[jax.Array, HCAOnlineTail]:
    """As ``pool_hca`` from a running softmax. Also returns the running softmax of the block of the last token.

    tail's leaves are [B, dim]. The returned tail is that of a full block where the last token completes one: reset it.
    """
    width = min(ratio, streams.ka.shape[1])
    k = _on_grid(streams.ka, None, phase, num_new, ratio, 0.0, width)
    z = _on_grid(streams.za, None, phase, num_new, ratio, EMPTY_GATE, width)
    peak = jnp.max(z, axis=2)  # [B, N, dim]
    peak = peak.at[:, 0].max(tail.peak)
    # An empty slot under an empty peak would weigh exp(0) = 1.
    weight = jnp.where(z == EMPTY_GATE, 0.0, jnp.exp(z - peak[:, :, None]))
    carried = jnp.exp(tail.peak - peak[:, 0])
    total = jnp.sum(weight, axis=2).at[:, 0].add(carried * tail.total)
    weighted = jnp.sum(weight * k, axis=2).at[:, 0].add(carried * tail.weighted)
    last = jnp.maximum(phase + num_new - 1, 0) // ratio
    at_last = jax.tree.map(
        lambda leaf: jnp.take_along_axis(leaf, last[:, None, None], axis=1)[:, 0],
        HCAOnlineTail(peak=peak, total=total, weighted=weighted),
    )
    return weighted / jnp.where(total > 0, total, 1.0), at_last


def finish_entries(
    pooled: jax.Array, norm: jax.Array, first: jax.Array, kind: AttentionType, cfg: DSV4Config
) -> jax.Array:
    """RMSNorm and rope of pooled rows [B, N, dim]; row n is entry first + n, at position ratio * (first + n)."""
    ratio, freqs = cfg.ratio(kind), rope_frequencies(cfg, kind)
    entry = first[:, None] + jnp.arange(pooled.shape[1], dtype=jnp.int32)[None]
    return apply_rope(rms_norm(pooled, norm, cfg.norm_eps), ratio * entry, freqs)
