"""The model's ops that have several implementations: the interface of each, and what they hand to one another.

Around attention, whose ops are in ``dsv4jax.layer.ops``:

    router             which experts each token goes to
    experts            the outputs of those experts, and of the shared one
    hyper_connections  what stands between two sublayers: their sum into the streams, and the next one's input
    head               logits

All of them take tokens in any number of leading axes. What they return for padding may be anything finite, except
where it says otherwise. A token's result does not depend on the other tokens, nor on how many there are.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.checks import Tree
from dsv4jax.layer.backend import Op, declare
from dsv4jax.layer.ops import Projections
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.params import Experts, Router, StreamMix
from dsv4jax.weights.stored import Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """The experts of each token, in ascending order of their numbers. Padding has the number of no expert."""

    experts: jax.Array  # int32 [..., k]; num_experts on padding
    weights: jax.Array  # f32 [..., k]; 0 on padding
    tiles: pk.RoutedTiles | None = None  # those of this device's own experts, where the router made them

    def among(self, own: pk.OwnExperts) -> Picks:
        """Return the picks among a device's own experts, by its numbers of them.

        Others have the expert of padding, wherever they stand. Their weights stay, because no tile has them.
        """
        experts = self.experts - jnp.reshape(own.first, ())
        is_own = (experts >= 0) & (experts < own.count)
        return dataclasses.replace(self, experts=jnp.where(is_own, experts, own.count))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOutputs:
    """What the experts of each token give, not yet summed.

    Each of d devices has as many of the routed experts as the others, in order.
    """

    # [d, ..., k, h] of each pick, times its weight, in the order of ``Picks``; anything where the expert is elsewhere
    routed: jax.Array
    shared: jax.Array  # [..., h] of the shared expert, in the dtype of ``routed``
    experts: jax.Array  # int32 [..., k] of the picks; num_experts on padding
    num_experts: int = dataclasses.field(metadata={"static": True})

    def sum(self) -> jax.Array:
        """Return the sum [..., h] in their dtype: f32, in order, the shared one last. Padding has the shared one's."""
        devices, routed = self.routed.shape[0], self.routed[0]
        if devices > 1:
            owner = jnp.minimum(self.experts // (self.num_experts // devices), devices - 1)
            routed = jnp.take_along_axis(self.routed, owner[None, ..., None], axis=0)[0]
        total = sum_of_picks(routed, self.experts, self.num_experts)
        return (total + self.shared.astype(jnp.float32)).astype(self.routed.dtype)


def sum_of_picks(routed: jax.Array, experts: jax.Array, num_experts: int) -> jax.Array:
    """Add up what picked experts int32 [..., k] gave, [..., k, h], in order: f32 [..., h]. Padding gives 0."""
    is_pick = (experts < num_experts)[..., None]
    return jnp.sum(jnp.where(is_pick, routed, jnp.zeros((), routed.dtype)).astype(jnp.float32), axis=-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """How a sublayer's output and the old streams make the new streams."""

    post: jax.Array  # f32 [..., n] share of the output in each new stream
    carry: jax.Array  # f32 [..., n, n] share of old stream j in new stream l; not symmetric


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How a sublayer mixes the streams: what it takes of them, and its gains. f32."""

    pre: jax.Array  # [..., n] share of each stream in the sublayer's input
    post: jax.Array  # [..., n] as in ``Gains``
    carry: jax.Array  # [..., n, n] as in ``Gains``

    @property
    def gains(self) -> Gains:
        return Gains(post=self.post, carry=self.carry)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadInput:
    """The sum of the streams at a model's end, in their dtype."""

    mixed: jax.Array  # [..., h] before the norm
    x: jax.Array  # [..., h] after it, which the head takes


SublayerOutput = jax.Array | ExpertOutputs  # of attention [..., h], or of experts


class ModelOp(Protocol):
    """The method that implementations of all of these ops share."""

    def unsupported(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        """Return why this implementation cannot serve these weights of a model on the target device, or None.

        Args:
          cfg: the model's sizes.
          weights: those that the op's methods take: a Router, Experts, StreamMix, or the head [V, h].
          dtype: of x and the streams.
        """
        ...


class RouterOp(ModelOp, Protocol):
    """Which experts each token goes to."""

    def pick(
        self,
        x: jax.Array,
        ids: jax.Array,
        real: jax.Array,
        router: Router,
        cfg: ModelConfig,
        own: pk.OwnExperts | None = None,
    ) -> Picks:
        """Pick experts.

        Args:
          x: [..., h], after the norm.
          ids: int32 [...] the tokens.
          real: bool [...], False on padding.
          router: the layer's weights for this.
          cfg: the model's sizes.
          own: the experts that this device has; None for all.
        """
        ...


class ExpertsOp(ModelOp, Protocol):
    """The outputs of experts. The shared one's products are the op ``projections``."""

    def outputs(
        self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, projections: Projections
    ) -> tuple[jax.Array, jax.Array]:
        """Return ``routed``, and what the shared expert makes of x, in x's dtype [..., h].

        The latter is what ``projections.swiglu`` gives, bit for bit, in whichever launch it is made.
        """
        ...

    def routed(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
        """Return what the picked experts alone make of x [..., h], times their weights: x's dtype [..., k, h].

        ``experts`` may be a device's own ones; picks are numbers among them, and those of others are as padding:
        ``experts.count``, wherever they stand.
        """
        ...


class HyperConnectionsOp(ModelOp, Protocol):
    """What stands between two sublayers. Streams are [..., n, h]; x [..., h] is after the norm, in their dtype."""

    def begin(self, streams: jax.Array, mix: StreamMix, norm: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, Gains]:
        """Return (x of the first sublayer, gains)."""
        ...

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, jax.Array, Gains]:
        """Return (streams with a sublayer's output y, x of the next sublayer, gains).

        ``gains`` are those of the sublayer that is over; ``mix`` and ``norm`` are the next one's.
        """
        ...

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, mix: StreamMix, norm: jax.Array, cfg: ModelConfig
    ) -> tuple[jax.Array, HeadInput]:
        """Return (streams with the last sublayer's output y, input of the head). All are 0 on padding whose input is 0.

        ``mix`` and ``norm`` are those of the model's end.
        """
        ...


class HeadOp(ModelOp, Protocol):
    """Logits."""

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        """Multiply x [..., h], after the norm, by head [V, h]: f32 [..., V]."""
        ...


ROUTER: Op[RouterOp] = declare("router")
EXPERTS: Op[ExpertsOp] = declare("experts")
HYPER_CONNECTIONS: Op[HyperConnectionsOp] = declare("hyper_connections")
HEAD: Op[HeadOp] = declare("head")
