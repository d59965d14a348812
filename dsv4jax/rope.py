"""Rotary position embedding on interleaved pairs, with YaRN's frequencies.

Positions are absolute. Pair i of the last ``rope_dim`` dims is rotated by the angle p * f_i. Frequencies and angles are
fp32, as in DeepSeek's code. This matters: at p = 1M, fp64 frequencies would change a cosine by 3e-2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.config import DSV4Config
from dsv4jax.kinds import AttentionType


def rope_frequencies(cfg: DSV4Config, kind: AttentionType) -> np.ndarray:
    """Return the frequencies of every rope in a layer of this kind, f32 [rope_dim / 2].

    For SWA layers f_i = base^(-2i / rope_dim) with base ``rope_theta``. CSA and HCA layers use ``compress_rope_theta``
    and YaRN: with c(r) = rope_dim * ln(original / (2 pi r)) / (2 ln base), low = floor(c(beta_fast)) and high =
    ceil(c(beta_slow)), pairs below low keep their frequency, pairs above high have it divided by ``yarn_factor``, and
    pairs between are interpolated linearly.
    """
    dim = cfg.rope_dim
    compresses = AttentionType(kind).compresses
    base = cfg.compress_rope_theta if compresses else cfg.rope_theta
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    freqs = np.float32(1.0) / np.float32(base) ** exponent
    if not compresses:
        return freqs

    def corrected_dim(rotations: float) -> float:
        return dim * math.log(cfg.yarn_original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = min(max(math.floor(corrected_dim(cfg.yarn_beta_fast)), 0), dim - 1)
    high = min(max(math.ceil(corrected_dim(cfg.yarn_beta_slow)), 0), dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0.0, 1.0)
    return freqs / np.float32(cfg.yarn_factor) * ramp + freqs * (np.float32(1.0) - ramp)


def rope_angles(positions: jax.Array, freqs: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of every pair's angle, f32 [..., rope_dim / 2] each, at int32 positions [...]."""
    angle = positions[..., None].astype(jnp.float32) * freqs.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angle), jnp.sin(angle)


def packed_angles(positions: jax.Array, freqs: np.ndarray) -> jax.Array:
    """Return the cosines of ``rope_angles`` followed by the sines, f32 [..., rope_dim], as the kernels expect them.

    Each number is chosen from a cosine and a sine, and the two halves are not concatenated: XLA then computes the
    angles of all layers of a step in one launch.
    """
    both, half = np.concatenate([freqs, freqs]), len(freqs)
    cos, sin = rope_angles(positions, both)
    is_cos = jnp.arange(2 * half, dtype=jnp.int32).reshape((1,) * positions.ndim + (-1,)) < half
    return jnp.where(jnp.broadcast_to(is_cos, cos.shape), cos, sin)


def apply_rope(x: jax.Array, positions: jax.Array, freqs: np.ndarray, *, inverse: bool = False) -> jax.Array:
    """Rotate the last 2 * len(freqs) dims of x: (e, o) -> (e cos - o sin, o cos + e sin). The inverse flips the sine.

    Args:
      x: f32 [..., dim].
      positions: int32, broadcastable to x's leading axes.
      freqs: f32 [rope_dim / 2], from ``rope_frequencies``.
      inverse: rotate back.
    """
    rope_dim = 2 * len(freqs)
    cos, sin = rope_angles(positions, freqs)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2], x[..., 1 - rope_dim :: 2]
    # The angles may have size 1 on x's head axis. They are broadcast explicitly, because implicit rank promotion is
    # off.
    cos, sin = jnp.broadcast_to(cos, even.shape), jnp.broadcast_to(sin, even.shape)
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(*x.shape[:-1], rope_dim)
    return jnp.concatenate([x[..., :-rope_dim], turned], -1)
