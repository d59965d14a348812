"""The layers of a forward pass: embedding, layers, head.

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
from typing import Literal

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.checks import Named, check_array, check_batch
from dsv4jax.config import DSV4Config
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.call import granted_batch
from dsv4jax.layer.stages.probe import Probe, Seen
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.captures import IN_ATTENTION, NOTHING, ModelProbe, Taps
from dsv4jax.model.inside.choices import check_choices
from dsv4jax.model.inside.devices import ONE, Devices, gathers_outputs
from dsv4jax.model.inside.host_memory import fetched
from dsv4jax.model.ops import (
    EXPERTS,
    HEAD,
    HYPER_CONNECTIONS,
    ROUTER,
    ExpertOutputs,
    ExpertsOp,
    Gains,
    HeadInput,
    HyperConnectionsOp,
    Picks,
    RouterOp,
    SublayerOutput,
    sum_of_picks,
)
from dsv4jax.model.params import Block, Experts, ModelParams, Router, StreamMix, check_model
from dsv4jax.model.plain.experts import mixed, of_shared, projections_of
from dsv4jax.model.plain.hyper_connections import head_input, mix_out, mixing, sublayer_input
from dsv4jax.model.plain.router import chosen_experts
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import Weight

Logits = Literal["last", "all", "none"]
# Cache may be anything that goes from layer to layer, or comes from one.
type Attend[Cache] = Callable[[AttentionParams, jax.Array, Cache, int, Probe], tuple[jax.Array, Cache, Seen]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a forward pass."""

    ids: jax.Array  # int32 [B, T]
    real: jax.Array  # bool [B, T] False on padding, and in rows that were not granted
    count: jax.Array  # int32 [B] number of real tokens
    devices: Devices = ONE  # that compute the pass together, each of them its own requests, or a share of their tokens

    @functools.cached_property
    def of_all(self) -> Tokens:
        """The tokens of all devices' requests."""
        if self.devices.data == 1:
            return self
        ids, count = self.devices.gather_tokens(self.ids, self.count)
        return Tokens(ids=ids, real=jnp.arange(ids.shape[1])[None] < count[:, None], count=count)

    def divided(self) -> Tokens:
        """Return these as devices with the same requests compute them: each a share of a long chunk."""
        return dataclasses.replace(self, devices=self.devices.of_chunk(self.ids.shape[1]))

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
        """Return those of a forward pass over the layers of ``cfg``, whose arguments ``check_pass`` has seen.

        Raises:
          ValueError: the cache is for attention layers of other sizes.
        """
        check_cache("a model's forward pass", cache)
        if cache.plan.invariant and params.mesh is not None:
            raise ValueError("a cache with invariant=True is for a model on one device")
        if cache.plan.cfg != cfg:
            raise ValueError(f"the cache was planned for {cache.plan.cfg}, the model has {cfg}")
        _, batch = granted_batch(cache, slots, num_new, ids.shape[1])
        real = jnp.arange(ids.shape[1])[None] < batch.num_new[:, None]
        return cls(ids=ids, real=real, count=batch.num_new, devices=params.devices)


def check_pass(params: ModelParams, name: str, ids: jax.Array, slots: jax.Array, num_new: jax.Array) -> None:
    """Check the weights and rows of a forward pass, whose ids have a name.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the weights are for another model, or there are no tokens.
    """
    check_model(params)
    check_batch(slots=slots, num_new=num_new)
    check_array(name, ids, {"B": slots.shape[0], "T": None}, jnp.int32)
    if ids.shape[1] == 0:
        raise ValueError(f"{name} has no tokens: give num_new = 0 for rows that have none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """A sublayer that is about to run."""

    name: str  # "attention", "experts" or "head"
    mix: StreamMix
    norm: jax.Array
    taps: Taps  # of its layer

    @classmethod
    def attention(cls, block: Block, taps: Taps) -> Sublayer:
        return cls(name="attention", mix=block.attention_mix, norm=block.attention_norm, taps=taps)

    @classmethod
    def experts(cls, block: Block, taps: Taps) -> Sublayer:
        return cls(name="experts", mix=block.experts_mix, norm=block.experts_norm, taps=taps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way[Cache]:
    """What stays the same in all layers of a forward pass.

    Kernels run as if nothing was captured. What they do not show is computed beside them in plain JAX, and so is a step
    in which something is patched.
    """

    tokens: Tokens
    attend: Attend[Cache]
    cfg: ModelConfig
    backend: Backend
    probe: ModelProbe = NOTHING

    def taps(self, layer: int) -> Taps:
        """Return the taps of a layer; those of the head have the number after the last one."""
        return Taps(self.probe.of_layer(layer, self.cfg))

    def begin(self, streams: jax.Array, into: Sublayer) -> tuple[jax.Array, Gains]:
        """Return (x of a sublayer, gains) from streams [B, T, num_streams, hidden]."""
        if self._patches_mixing(into):
            mixing = into.taps.tap(f"mixing.{into.name}", _mixing(streams, into.mix, self.cfg))
            x, gains = sublayer_input(streams, mixing, into.norm, self.cfg), mixing.gains
        else:
            op = self._connections(into.mix, streams)
            x, gains = _begin(streams, into.mix, into.norm, op=op, cfg=self.cfg)
            self._show_mixing(streams, into)
        return into.taps.tap(f"inputs.{into.name}", x), gains

    def attention(self, x: jax.Array, cache: Cache, block: Block, layer: int, taps: Taps) -> tuple[jax.Array, Cache]:
        """Return (what a layer's attention makes of x, cache)."""
        probe, x = taps.probe.within(*IN_ATTENTION), self.tokens.devices.gather_chunk(x)
        y, cache, seen = self.attend(
            block.attention, x, cache, layer, dataclasses.replace(probe, entries=taps.probe.entries)
        )
        taps.seen.update(seen)
        return taps.tap("outputs.attention", y), cache

    def between(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, into: Sublayer, ended: Taps | None = None
    ) -> tuple[jax.Array, jax.Array, Gains]:
        """Return (streams with a sublayer's output y, x of the next one, gains). ``ended`` is a layer that is over."""
        if self._patches_mixing(into) or (ended is not None and ended.patched("streams")):
            streams = _mix_out(y, streams, gains)
            streams = streams if ended is None else ended.tap("streams", streams)
            return streams, *self.begin(streams, into)
        op = self._connections(into.mix, streams)
        streams, x, gains = _between(y, streams, gains, into.mix, into.norm, op=op, cfg=self.cfg)
        if ended is not None:
            ended.tap("streams", streams)
        self._show_mixing(streams, into)
        return streams, into.taps.tap(f"inputs.{into.name}", x), gains

    def end(
        self, y: SublayerOutput, streams: jax.Array, gains: Gains, head: Sublayer, ended: Taps
    ) -> tuple[jax.Array, HeadInput]:
        """Return (streams with the last sublayer's output y, input of the head)."""
        if ended.patched("streams"):
            streams = ended.tap("streams", _mix_out(y, streams, gains))
            of_head = head_input(streams, head.mix, head.norm, self.cfg)
        else:
            op = self._connections(head.mix, streams)
            streams, of_head = _end(y, streams, gains, head.mix, head.norm, op=op, cfg=self.cfg)
            ended.tap("streams", streams)
        return streams, dataclasses.replace(of_head, x=head.taps.tap("head", of_head.x))

    def experts(self, x: jax.Array, block: Block, taps: Taps) -> SublayerOutput:
        """Return what a layer's experts make of x."""
        devices, tokens = self.tokens.devices, self.tokens.of_all
        given = devices.gather_inputs(devices.gather_chunk(x))
        if taps.probe.experts is None:
            router = ROUTER.of(self.backend, self.cfg, block.router, x.dtype)
            picks = _pick(given, tokens.ids, tokens.real, block.router, op=router, cfg=self.cfg, devices=devices)
        else:
            chosen = devices.gather_inputs(taps.probe.experts)
            picks = chosen_experts(given, chosen, tokens.real, block.router, self.cfg)
        if taps.sees("experts"):
            shown = taps.tap("experts", devices.own_rows(dataclasses.replace(picks, tiles=None)))
            if taps.patched("experts"):
                numbers = jnp.where(shown.experts < 0, self.cfg.num_experts, shown.experts)
                picks = devices.gather_inputs(dataclasses.replace(shown, experts=numbers))
        experts, picks, cfg = fetched(block.experts, picks, self.cfg)
        op = EXPERTS.of(self.backend, cfg, experts, x.dtype)
        y = _mix(x, given, picks, experts, op=op, cfg=cfg, devices=devices, backend=self.backend)
        if not taps.sees("outputs.experts"):
            return y
        summed = taps.tap("outputs.experts", y.sum() if isinstance(y, ExpertOutputs) else y)
        return summed if taps.patched("outputs.experts") else y

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        """Return logits f32 [..., V] of x [..., hidden]."""
        devices = self.tokens.devices
        op = HEAD.of(self.backend, self.cfg, head, x.dtype)
        return devices.gather_logits(op.logits(devices.gather_inputs(x), head))

    def _connections(self, mix: StreamMix, streams: jax.Array) -> HyperConnectionsOp:
        return HYPER_CONNECTIONS.of(self.backend, self.cfg, mix, streams.dtype)

    def _patches_mixing(self, into: Sublayer) -> bool:
        return into.taps.patched(f"mixing.{into.name}")

    def _show_mixing(self, streams: jax.Array, into: Sublayer) -> None:
        if into.taps.sees(site := f"mixing.{into.name}"):
            into.taps.tap(site, _mixing(streams, into.mix, self.cfg))


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
) -> tuple[jax.Array, HeadInput]:
    return op.end(y, streams, gains, mix, norm, cfg)


@functools.partial(jax.jit, static_argnames=("op", "cfg", "devices"))
def _pick(
    x: jax.Array,
    ids: jax.Array,
    real: jax.Array,
    router: Router,
    *,
    op: RouterOp,
    cfg: ModelConfig,
    devices: Devices,
) -> Picks:
    return op.pick(x, ids, real, router, cfg, devices.own_experts(cfg.num_experts))


@functools.partial(jax.jit, static_argnames=("op", "cfg", "devices", "backend"))
def _mix(
    x: jax.Array,
    given: jax.Array,
    picks: Picks,
    experts: Experts,
    *,
    op: ExpertsOp,
    cfg: ModelConfig,
    devices: Devices,
    backend: Backend,
) -> SublayerOutput:
    """Return what the experts of all devices make of ``given``, of which x are this device's rows."""
    if (own := devices.own_experts(cfg.num_experts)) is None:
        return mixed(op, x, picks, experts, cfg, backend)
    here, projections = picks.among(own), projections_of(backend)
    if given.shape == x.shape:  # they are the same tokens
        routed, shared = op.outputs(x, here, experts, cfg, projections)
    else:
        routed, shared = op.routed(given, here, experts, cfg), of_shared(x, experts, cfg, projections)
    if not devices.has_share and gathers_outputs(devices.data, devices.model, routed.nbytes):
        routed = devices.gather_outputs(routed)
        return ExpertOutputs(routed=routed, shared=shared, experts=picks.experts, num_experts=cfg.num_experts)
    routed = devices.sum_of_experts(sum_of_picks(routed, here.experts, own.count))
    return (routed + shared.astype(jnp.float32)).astype(x.dtype)


_mixing = jax.jit(mixing, static_argnames="cfg")
_mix_out = jax.jit(mix_out)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What layers have made."""

    after: list[jax.Array]  # streams [B, T, num_streams, hidden] after each layer, of this device's own tokens
    mixed: jax.Array  # [B, T, hidden] the sum of the last ones before the head's norm, of the same tokens
    x: jax.Array  # [B, T, hidden] of the head, of all tokens
    cache: KVCache
    seen: list[Seen]  # what was captured of each layer, and of the head

    @property
    def streams(self) -> jax.Array:
        """The streams after the last layer."""
        return self.after[-1]

    def captured(self, way: Way[KVCache]) -> Named:
        """Return what was captured by name."""
        plan = self.cache.plan
        return way.probe.captured(self.seen, way.cfg, plan.max_blocks * plan.entries_per_block(AttentionType.CSA))


def run_model(params: ModelParams, cache: KVCache, way: Way[KVCache]) -> Ran:
    """Run all layers of a model on a pass's tokens."""
    if way.probe.choices is not None:
        check_choices(way.probe.choices, way.cfg, *way.tokens.ids.shape)
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
    taps = [way.taps(layer) for layer in range(len(blocks) + 1)]
    x, gains = way.begin(streams, Sublayer.attention(blocks[0], taps[0]))
    head = Sublayer(name="head", mix=final_mix, norm=final_norm, taps=taps[-1])
    after: list[jax.Array] = []
    of_head: HeadInput | None = None
    for layer, block in enumerate(blocks):
        own, following = taps[layer], taps[layer + 1]
        y, cache = way.attention(x, cache, block, layer, own)
        streams, x, gains = way.between(y, streams, gains, Sublayer.experts(block, own))
        y = way.experts(x, block, own)
        if layer + 1 < len(blocks):
            into = Sublayer.attention(blocks[layer + 1], following)
            streams, x, gains = way.between(y, streams, gains, into, own)
        else:
            streams, of_head = way.end(y, streams, gains, head, own)
        after.append(streams)
    assert of_head is not None
    x = way.tokens.devices.gather_chunk(of_head.x)
    return Ran(after=after, mixed=of_head.mixed, x=x, cache=cache, seen=[each.seen for each in taps])


def first_streams(params: ModelParams, tokens: Tokens) -> jax.Array:
    """Return the streams before the first layer [B, T, num_streams, hidden]."""
    rows = embedded(params, tokens)
    return jnp.repeat(rows[..., None, :], params.cfg.num_streams, axis=-2)


def embedded(params: ModelParams, tokens: Tokens) -> jax.Array:
    """Return rows of the embedding [B, T, hidden]: NaN for an id outside the vocabulary, 0 on padding.

    Those are of this device's own tokens, as all that layers make of them, but for what their attention stores.
    """
    ids, embedding, size = tokens.of_all.ids, params.embedding, params.cfg.vocab_size
    rows = _rows(embedding, ids - tokens.devices.first(size))
    is_token = ((ids >= 0) & (ids < size))[..., None]
    rows = tokens.devices.sum_of_embedding(jnp.where(is_token, rows, jnp.nan))
    real = tokens.devices.own_tokens(tokens.real)
    return jnp.where(real[..., None], rows, jnp.zeros((), rows.dtype))


def _rows(embedding: jax.Array, ids: jax.Array) -> jax.Array:
    """Return rows of an embedding, or of a device's share of one: 0 for ids that are not in it."""
    ids = jnp.where(ids < 0, embedding.shape[0], ids)  # a negative index would count from the end
    return embedding.at[ids].get(mode="fill", fill_value=0)


def read_logits(x: jax.Array, head: Weight, which: Logits, way: Way) -> jax.Array | None:
    """Return logits f32 of the "last" tokens [B, V], of "all" [B, T, V], or None for "none"."""
    if which == "none":
        return None
    if which == "all":
        return all_logits(x, head, way)
    count = way.tokens.count
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, way.logits(last, head), 0.0)


def all_logits(x: jax.Array, head: Weight, way: Way) -> jax.Array:
    """Return the logits of all tokens, f32 [B, T, V]."""
    return jnp.where(way.tokens.real[..., None], way.logits(x, head), 0.0)
