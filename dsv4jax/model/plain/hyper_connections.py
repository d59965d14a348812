"""Hyper-connections: several residual streams per token, mixed before and after each sublayer (mHC).

A sublayer, attention or experts, reads a weighted sum of the streams and its output is added to each of them, with
weights that depend on the token:

    pre, post, carry = mixing(streams)     x = sum_j pre_j S_j
    streams = mix_out(f(norm(x)), streams) S'_l = post_l f(norm(x)) + sum_j carry[j, l] S_j

The columns of ``carry`` sum to 1, and its rows nearly do: some rounds of Sinkhorn's algorithm normalise both in turn.
All of this is f32; streams are in the dtype of the model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.layer.backend import XLA, Anywhere
from dsv4jax.layer.dense import rms_norm, wide_product
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import HYPER_CONNECTIONS, ExpertOutputs, Gains, HeadInput, Mixing, SublayerOutput
from dsv4jax.model.params import StreamMix


class XLAHyperConnections(Anywhere):
    """Hyper-connections in plain JAX."""

    def begin(self, streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Gains]:
        shares = mixing(streams, mix, cfg)
        return sublayer_input(streams, shares, norm, cfg), shares.gains

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, jax.Array, Gains]:
        streams = mix_out(y, streams, gains)
        return streams, *self.begin(streams, mix, norm, cfg)

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, HeadInput]:
        streams = mix_out(y, streams, gains)
        return streams, head_input(streams, mix, norm, cfg)


def mixing(streams: jax.Array, mix: StreamMix, cfg: ModelConfig) -> Mixing:
    """Return how a sublayer mixes streams [..., n, hidden]; ``mix`` has the weights of (2 + n) n numbers per token."""
    n = cfg.num_streams
    pre, post, carry = jnp.split(_numbers(streams, mix, cfg), [n, 2 * n], axis=-1)
    base = jnp.split(mix.base.astype(jnp.float32), [n, 2 * n])
    scale = mix.scale.astype(jnp.float32)
    post = 2 * jax.nn.sigmoid(post * scale[1] + _like(base[1], post))
    carry = (carry * scale[2] + _like(base[2], carry)).reshape(*carry.shape[:-1], n, n)
    carry = _sinkhorn(jax.nn.softmax(carry, -1) + cfg.hyper_eps, cfg)
    pre = jax.nn.sigmoid(pre * scale[0] + _like(base[0], pre)) + cfg.hyper_eps
    return Mixing(pre=pre, post=post, carry=carry)


def sublayer_input(streams: jax.Array, mixing: Mixing, norm: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Return the input x of a sublayer that mixes streams [..., n, hidden] so, in their dtype [..., hidden]."""
    return _normed(_sum(streams, mixing.pre), norm, cfg)


def mix_out(y: SublayerOutput, streams: jax.Array, gains: Gains) -> jax.Array:
    """Return the streams [..., n, hidden] after a sublayer whose output is y [..., hidden]."""
    y = y.sum() if isinstance(y, ExpertOutputs) else y
    given = gains.post[..., None] * y.astype(jnp.float32)[..., None, :]
    kept = jnp.sum(gains.carry[..., None] * streams.astype(jnp.float32)[..., None, :], -3)
    return (given + kept).astype(streams.dtype)


def head_input(streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> HeadInput:
    """Return the sum of streams [..., n, hidden] that the head takes, before its norm [hidden] and after it.

    ``mix`` has the weights of n numbers per token.
    """
    numbers = _numbers(streams, mix, cfg)
    weights = jax.nn.sigmoid(numbers * mix.scale.astype(jnp.float32)[0] + _like(mix.base, numbers)) + cfg.hyper_eps
    total = _sum(streams, weights)
    return HeadInput(mixed=total, x=_normed(total, norm, cfg))


def _numbers(streams: jax.Array, mix: StreamMix, cfg: ModelConfig) -> jax.Array:
    """The numbers that mixing weights are made of, f32 [..., rows of mix.weight]. One rms is over all streams."""
    *lead, count, hidden = streams.shape
    flat = streams.reshape(*lead, count * hidden).astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(flat * flat, -1, keepdims=True) + cfg.norm_eps)
    return wide_product(flat, mix.weight.astype(jnp.float32)) * inverse_rms


def _like(vector: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(vector.astype(jnp.float32), x.shape)


def _sum(streams: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of streams, in their dtype."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), -2).astype(streams.dtype)


def _normed(x: jax.Array, norm: jax.Array, cfg: ModelConfig) -> jax.Array:
    return rms_norm(x, norm, cfg.norm_eps).astype(x.dtype)


def _sinkhorn(matrix: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Divide positive matrices [..., n, n] by their column sums, then by row and column sums in turn.

    Sums are written as sums of slices, because XLA on GPU makes one kernel of a round that way, where reductions would
    be kernels of their own. The rounds stay a loop: unrolled, XLA takes minutes to compile them.
    """

    def divided(matrix: jax.Array, axis: int) -> jax.Array:
        parts = [lax.slice_in_dim(matrix, i, i + 1, axis=axis) for i in range(cfg.num_streams)]
        return matrix / (sum(parts[1:], parts[0]) + cfg.hyper_eps)

    old, new = matrix.ndim - 2, matrix.ndim - 1
    matrix = divided(matrix, old)
    return lax.fori_loop(0, cfg.sinkhorn_iterations - 1, lambda _, matrix: divided(divided(matrix, new), old), matrix)


HYPER_CONNECTIONS.register(XLA, XLAHyperConnections())
