"""The kernel of hyper-connections: everything between two sublayers in one launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.layer.kernels.base import register, register_invariant
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.kernels.base import ModelKernels
from dsv4jax.model.ops import HYPER_CONNECTIONS, ExpertOutputs, Gains, HeadInput, SublayerOutput
from dsv4jax.model.params import StreamMix


class HyperConnectionsKernels(ModelKernels):
    """``pallas_kernels.mix_streams``."""

    def unserved(self, cfg: ModelConfig, weights: Any, dtype: Any) -> str | None:
        if jnp.dtype(dtype) != jnp.bfloat16:
            return f"streams must be bfloat16, got {jnp.dtype(dtype)}"
        return pk.unsupported_mix(streams=cfg.num_streams, hidden=cfg.hidden_size)

    def begin(self, streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Gains]:
        _, x, gains = self._mixed(streams, None, mix, norm, cfg)
        assert isinstance(gains, Gains)
        return x, gains

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, jax.Array, Gains]:
        streams, x, following = self._mixed(streams, (y, gains), mix, norm, cfg)
        assert isinstance(following, Gains)
        return streams, x, following

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, HeadInput]:
        streams, x, mixed = self._mixed(streams, (y, gains), mix, norm, cfg)
        assert isinstance(mixed, jax.Array)
        return streams, HeadInput(mixed=mixed, x=x)

    def _mixed(
        self,
        streams: jax.Array,
        ended: tuple[SublayerOutput, Gains] | None,
        mix: StreamMix,
        norm: jax.Array,
        cfg: ModelConfig,
    ) -> tuple[jax.Array, jax.Array, Gains | jax.Array]:
        """Return (streams, x, gains), or x before its norm in place of gains before the head.

        Streams stay where nothing has ended.
        """
        streams, ended, mix, norm = self.without_derivative(HYPER_CONNECTIONS, (streams, ended, mix, norm))
        *lead, count, hidden = streams.shape
        found = self.kernels.mix_streams(
            streams.reshape(-1, count, hidden),
            pk.StreamWeights(
                weight=mix.weight.astype(jnp.float32),
                base=mix.base.astype(jnp.float32),
                scale=mix.scale.astype(jnp.float32),
                norm=norm if norm.dtype == jnp.bfloat16 else norm.astype(jnp.float32),
            ),
            None if ended is None else _ended(*ended),
            rules=pk.MixRules(rounds=cfg.sinkhorn_iterations, eps=cfg.hyper_eps, norm_eps=cfg.norm_eps),
            **self.options,
        )
        new = streams if ended is None else found.streams.reshape(streams.shape)
        x = found.x.reshape(*lead, hidden)
        if found.mixed is not None:
            return new, x, found.mixed.reshape(x.shape)
        return new, x, Gains(post=found.post.reshape(*lead, count), carry=found.carry.reshape(*lead, count, count))


def _ended(y: SublayerOutput, gains: Gains) -> pk.EndedSublayer:
    count = gains.post.shape[-1]
    post, carry = gains.post.reshape(-1, count), gains.carry.reshape(-1, count, count)
    if not isinstance(y, ExpertOutputs):
        return pk.EndedSublayer(post=post, carry=carry, output=y.reshape(-1, y.shape[-1]))
    devices, *_, picks, hidden = y.routed.shape
    return pk.EndedSublayer(
        post=post,
        carry=carry,
        output=y.shared.reshape(-1, hidden),
        routed=y.routed.reshape(devices, -1, picks, hidden),
        experts=y.experts.reshape(-1, picks),
        num_experts=y.num_experts,
    )


register(HYPER_CONNECTIONS, HyperConnectionsKernels)
register_invariant(HYPER_CONNECTIONS, HyperConnectionsKernels)  # hidden size alone divides the sums of a token
