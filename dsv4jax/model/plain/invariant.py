"""Forms of the model's ops in plain JAX in which a token's results do not depend on the others, bit for bit.

``dsv4jax.layer.invariant`` says why, and has those of layers. Here each is the plain form in tiles of ``ROWS`` tokens;
experts have tiles of as many tokens that picked the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.derivatives import refuse_of_invariant
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.invariant.products import ROWS
from dsv4jax.layer.tiles import map_rows
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import (
    EXPERTS,
    HEAD,
    HYPER_CONNECTIONS,
    ROUTER,
    ExpertOutputs,
    Gains,
    HeadInput,
    Picks,
    SublayerOutput,
)
from dsv4jax.model.params import Experts, Router, StreamMix
from dsv4jax.model.plain.experts import XLAExperts, routed_in_tiles
from dsv4jax.model.plain.head import XLAHead
from dsv4jax.model.plain.hyper_connections import XLAHyperConnections
from dsv4jax.model.plain.router import XLARouter
from dsv4jax.weights.stored import Weight


class InvariantRouter(XLARouter):
    """The router in tiles of tokens."""

    def pick(
        self,
        x: jax.Array,
        ids: jax.Array,
        real: jax.Array,
        router: Router,
        cfg: ModelConfig,
        own: pk.OwnExperts | None = None,
    ) -> Picks:
        plain = super().pick

        def of_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> Picks:
            x, ids, real = tile
            return plain(x, ids, real, router, cfg)

        return map_rows(of_tile, (x, ids, real), ROWS, axes=real.ndim)


class InvariantExperts(XLAExperts):
    """Experts in tiles of as many tokens, whatever the number of all."""

    def routed(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
        return refuse_of_invariant(routed_in_tiles(x, picks, experts, cfg, rows=ROWS))


class InvariantHyperConnections(XLAHyperConnections):
    """Hyper-connections in tiles of tokens."""

    def begin(self, streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Gains]:
        plain = XLAHyperConnections()
        return map_rows(lambda streams: plain.begin(streams, mix, norm, cfg), streams, ROWS, axes=streams.ndim - 2)

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, jax.Array, Gains]:
        def call(y: SublayerOutput, streams: jax.Array, gains: Gains) -> tuple[jax.Array, jax.Array, Gains]:
            return XLAHyperConnections().between(y, streams, gains, mix, norm, cfg)

        return _in_tiles(call, y, streams, gains)

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, HeadInput]:
        def call(y: SublayerOutput, streams: jax.Array, gains: Gains) -> tuple[jax.Array, HeadInput]:
            return XLAHyperConnections().end(y, streams, gains, mix, norm, cfg)

        return _in_tiles(call, y, streams, gains)


def _in_tiles[Made](
    call: Callable[[SublayerOutput, jax.Array, Gains], Made], y: SublayerOutput, streams: jax.Array, gains: Gains
) -> Made:
    """Return ``call(y, streams, gains)`` in tiles of tokens. The axis of devices is behind theirs meanwhile."""

    def moved(y: SublayerOutput, source: int, to: int) -> SublayerOutput:
        if not isinstance(y, ExpertOutputs):
            return y
        return dataclasses.replace(y, routed=jnp.moveaxis(y.routed, source, to))

    def of_tile(tile: tuple[SublayerOutput, jax.Array, Gains]) -> Made:
        y, streams, gains = tile
        return call(moved(y, -3, 0), streams, gains)

    return map_rows(of_tile, (moved(y, 0, -3), streams, gains), ROWS, axes=streams.ndim - 2)


class InvariantHead(XLAHead):
    """Logits in tiles of tokens."""

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        plain = super().logits
        return map_rows(lambda tile: plain(tile, head), x, ROWS, axes=x.ndim - 1)


ROUTER.register_invariant(XLA, InvariantRouter())
EXPERTS.register_invariant(XLA, InvariantExperts())
HYPER_CONNECTIONS.register_invariant(XLA, InvariantHyperConnections())
HEAD.register_invariant(XLA, InvariantHead())
