"""The weights of a whole model, as frozen pytrees.

Linear weights are [out, in], as in checkpoints. What one input feeds stands side by side. Below, h is hidden_size, n
num_streams, E num_experts, I expert_width and V vocab_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.checks import FLOATS, check_array, check_type
from dsv4jax.formats import e2m1_values
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.devices import Devices
from dsv4jax.reprs import print_compactly
from dsv4jax.weights.deltas import WeightWithDelta, checked_base
from dsv4jax.weights.params import AttentionParams
from dsv4jax.weights.stored import (
    CODES,
    SCALES,
    StoredWeight,
    Weight,
    as_bytes,
    check_activations,
    check_block,
    check_weight,
    num_blocks,
    per_number,
)

INTERLEAVED_BYTES = 8  # of codes, 16 numbers, which are interleaved with one another


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """One linear weight of all experts as checkpoints store it, with a scale per block of numbers.

    Codes are FP8 (float8_e4m3fn [E, out, in]) or pairs of FP4 (uint8 [E, out, in / 2]: E2M1, the even input in the low
    nibble). Those of FP4 may be interleaved, which the kernels widen faster: the same bytes, whose bits are in another
    order within each 16 numbers (``pallas_kernels.interleaved_codes``), one for each kind of activations.
    """

    codes: jax.Array
    scales: jax.Array  # float8_e8m0fnu or f32 [E, ceil(out / block[0]), ceil(in / block[1])]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})  # (1, 32) for FP4, (128, 128) for FP8
    activations: str = dataclasses.field(default="bf16", metadata={"static": True})  # as of StoredWeight
    interleaved_for: str | None = dataclasses.field(default=None, metadata={"static": True})  # activations, or none

    @property
    def is_fp4(self) -> bool:
        return self.codes.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        experts, rows, columns = self.codes.shape
        return experts, rows, columns * (2 if self.is_fp4 else 1)

    def for_kernels(self) -> StoredExperts:
        """Return the same weight with its codes in the order that the kernels for its activations widen fastest.

        That is interleaved for FP4, if an output has whole times 16 inputs, and as in checkpoints for all else.
        """
        can = self.is_fp4 and self.codes.shape[-1] % INTERLEAVED_BYTES == 0
        if not can or self.interleaved_for == self.activations:
            return self
        codes = pk.interleaved_codes(self.in_order(self.codes), self.activations)
        return dataclasses.replace(self, codes=codes, interleaved_for=self.activations)

    def with_activations(self, activations: str) -> StoredExperts:
        """Return the same weight for other inputs, ``for_kernels``."""
        return dataclasses.replace(self, activations=activations).for_kernels()

    def in_order(self, codes: jax.Array) -> jax.Array:
        """Return some of the codes, whole rows, as checkpoints have them."""
        return codes if self.interleaved_for is None else pk.codes_in_order(codes, self.interleaved_for)

    def widened(self, experts: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the weights of experts int32 [G]: dtype [G, out, in], of which bf16 and f32 are exact."""
        _, rows, columns = self.shape
        if self.is_fp4:
            values = e2m1_values(self.in_order(self.codes[experts]))
        else:  # cut as bytes, because XLA on CPU would widen all of them first
            values = lax.bitcast_convert_type(as_bytes(self.codes)[experts], self.codes.dtype).astype(jnp.float32)
        if self.scales.dtype.itemsize == 1:
            scales = lax.bitcast_convert_type(as_bytes(self.scales)[experts], self.scales.dtype).astype(jnp.float32)
        else:
            scales = self.scales[experts]
        of_numbers = jax.vmap(lambda of_one: per_number(of_one, self.block, (rows, columns)))(scales)
        return (values * of_numbers).astype(dtype)


ExpertWeight = jax.Array | StoredExperts | WeightWithDelta


def is_any_stored(node: object) -> bool:
    """Whether a weight is stored as FP8 or FP4, of experts too; for ``is_leaf`` of tree functions."""
    return isinstance(node, StoredWeight | StoredExperts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamMix:
    """How a token's streams give the weights by which they are mixed: sigmoid or softmax of numbers * scale + base."""

    weight: jax.Array  # f32 [m, n h]; m = (2 + n) n around a sublayer, n at a model's end
    base: jax.Array  # f32 [m]
    scale: jax.Array  # f32 [3], or [1] at a model's end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a layer picks experts: by the token's id (``table``), or by score (``bias``)."""

    gate: Weight  # [E, h], not stored as FP8
    bias: jax.Array | None  # f32 [E], added to scores to pick, not to weigh
    table: jax.Array | None  # int32 [V, k]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, and the one that every token goes to."""

    gate_up: ExpertWeight  # [E, 2 I, h], rows of W_1, then rows of W_3
    down: ExpertWeight  # [E, h, I], W_2
    shared_gate_up: Weight  # [2 I, h]
    shared_down: Weight  # [h, I]

    @property
    def count(self) -> int:
        """Number of experts whose weights these are: all E, or one device's share of them."""
        return self.gate_up.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The weights of one layer."""

    attention: AttentionParams
    attention_mix: StreamMix
    attention_norm: jax.Array  # [h]
    router: Router
    experts: Experts
    experts_mix: StreamMix
    experts_norm: jax.Array  # [h]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftParams:
    """The block that makes drafts (multi-token prediction). Embedding and head are the model's."""

    token_norm: jax.Array  # [h] of the next token's embedding (enorm)
    stream_norm: jax.Array  # [h] of each stream (hnorm)
    token_proj: Weight  # [h, h] (e_proj)
    stream_proj: Weight  # [h, h] (h_proj)
    block: Block
    final_mix: StreamMix
    final_norm: jax.Array  # [h]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The layers of the block."""
        return (self.block,)

    def made_of(self, streams: Sequence[jax.Array], cfg: ModelConfig) -> jax.Array:
        """Return what drafts are made of, from a model's streams [B, T, n, h] after each layer: the last ones."""
        del cfg
        return streams[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DSparkParams:
    """The block that makes several drafts at once (DSpark). Embedding and head are the model's; r is its rank."""

    taps_proj: Weight  # [h, taps h] (main_proj)
    taps_norm: jax.Array  # [h] (main_norm)
    blocks: tuple[Block, ...]  # its stages
    final_mix: StreamMix
    final_norm: jax.Array  # [h]
    markov_in: jax.Array  # [V, r], a row for the token before (markov_w1)
    markov_out: jax.Array  # [V, r] (markov_w2)
    confidence: jax.Array  # [1, h + r]

    def made_of(self, streams: Sequence[jax.Array], cfg: ModelConfig) -> jax.Array:
        """Return what drafts are made of, from a model's streams [B, T, n, h] after each layer.

        That is the mean over streams after each tapped layer, side by side: [B, T, taps h], in the streams' dtype.
        """
        assert cfg.dspark is not None
        means = [jnp.mean(streams[layer].astype(jnp.float32), axis=-2) for layer in cfg.dspark.taps]
        return jnp.concatenate(means, axis=-1).astype(streams[0].dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """The weights of a model."""

    embedding: jax.Array  # [V, h]
    blocks: tuple[Block, ...]
    final_mix: StreamMix
    final_norm: jax.Array  # [h]
    head: Weight  # [V, h], not stored as FP8
    drafts: DraftParams | DSparkParams | None  # None where the checkpoint has none
    cfg: ModelConfig = dataclasses.field(metadata={"static": True})
    # The mesh that the weights lie over, as ``dsv4jax.model.inside.devices`` says; None = one device.
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def devices(self) -> Devices:
        """The devices that the caller is one of."""
        return Devices.of(self.mesh)


print_compactly(StoredExperts, StreamMix, Router, Experts, Block, DraftParams, DSparkParams, ModelParams)


def check_model(params: ModelParams) -> None:
    """Check the shapes and dtypes of all weights but those of attention, which each layer checks.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: there are more or fewer layers than the configuration has, a layer picks experts in another way, or
        these are but a part of the weights.
    """
    check_type("params", params, ModelParams)
    cfg = params.cfg
    stored = (node for node in jax.tree.leaves(params, is_leaf=is_any_stored) if is_any_stored(node))
    routers = (block.router for block in params.blocks)
    is_part = params.embedding is None or any(node.codes is None for node in stored)
    if is_part or any(router.table is None and router.bias is None for router in routers):
        raise ValueError("params: one of the two trees of a partition: give combine(trainable, rest)")
    if len(params.blocks) != cfg.num_layers:
        raise ValueError(f"params.blocks: expected {cfg.num_layers} layers, got {len(params.blocks)}")
    devices = params.devices.count
    table = {"vocabulary": cfg.vocab_size // devices, "hidden": cfg.hidden_size}
    check_array("params.embedding", params.embedding, table, FLOATS)
    _check_wide("params.head", params.head, table)
    _check_norm("params.final_norm", params.final_norm, cfg)
    _check_mix("params.final_mix", params.final_mix, cfg.num_streams, 1, cfg)
    for layer, block in enumerate(params.blocks):
        _check_block(f"params.blocks[{layer}]", block, layer, cfg, devices)
    if (params.drafts is not None) and isinstance(params.drafts, DSparkParams) != (cfg.dspark is not None):
        raise ValueError(f"params.drafts: expected those of dspark={cfg.dspark}, got {type(params.drafts).__name__}")
    if isinstance(params.drafts, DSparkParams):
        _check_dspark("params.drafts", params.drafts, cfg, devices)
    elif params.drafts is not None:
        square = cfg.hidden_size, cfg.hidden_size
        for name in ("token_proj", "stream_proj"):
            check_weight(f"params.drafts.{name}", getattr(params.drafts, name), square)
        for name in ("token_norm", "stream_norm", "final_norm"):
            _check_norm(f"params.drafts.{name}", getattr(params.drafts, name), cfg)
        _check_mix("params.drafts.final_mix", params.drafts.final_mix, cfg.num_streams, 1, cfg)
        _check_block("params.drafts.block", params.drafts.block, None, cfg, devices)


def _check_dspark(name: str, drafts: DSparkParams, cfg: ModelConfig, devices: int) -> None:
    assert cfg.dspark is not None
    hidden, rank = cfg.hidden_size, cfg.dspark.rank
    if len(drafts.blocks) != cfg.dspark.stages:
        raise ValueError(f"{name}.blocks: expected {cfg.dspark.stages} stages, got {len(drafts.blocks)}")
    check_weight(f"{name}.taps_proj", drafts.taps_proj, (hidden, len(cfg.dspark.taps) * hidden))
    for norm in ("taps_norm", "final_norm"):
        _check_norm(f"{name}.{norm}", getattr(drafts, norm), cfg)
    _check_mix(f"{name}.final_mix", drafts.final_mix, cfg.num_streams, 1, cfg)
    for table in ("markov_in", "markov_out"):
        check_array(f"{name}.{table}", getattr(drafts, table), {"vocabulary": cfg.vocab_size, "rank": rank}, FLOATS)
    check_array(f"{name}.confidence", drafts.confidence, {"out": 1, "in": hidden + rank}, FLOATS)
    for stage, block in enumerate(drafts.blocks):
        _check_block(f"{name}.blocks[{stage}]", block, None, cfg, devices)


def _check_block(name: str, block: Block, layer: int | None, cfg: ModelConfig, devices: int) -> None:
    hidden, wide = cfg.hidden_size, cfg.expert_width
    experts = {"experts": cfg.num_experts}
    for sublayer in ("attention", "experts"):
        numbers = (2 + cfg.num_streams) * cfg.num_streams
        _check_mix(f"{name}.{sublayer}_mix", getattr(block, f"{sublayer}_mix"), numbers, 3, cfg)
        _check_norm(f"{name}.{sublayer}_norm", getattr(block, f"{sublayer}_norm"), cfg)
    router, by_id = block.router, cfg.picks_by_id(layer)
    if (router.table is not None) != by_id or (router.bias is None) != by_id:
        raise ValueError(f"{name}.router: expected {'a table' if by_id else 'a bias'}, and not the other")
    _check_wide(f"{name}.router.gate", router.gate, experts | {"hidden": hidden})
    if router.table is not None:
        axes = {"vocabulary": cfg.vocab_size, "picks": cfg.experts_per_token}
        check_array(f"{name}.router.table", router.table, axes, jnp.int32)
    if router.bias is not None:
        check_array(f"{name}.router.bias", router.bias, experts, FLOATS)
    of_device = cfg.num_experts // devices
    _check_experts(f"{name}.experts.gate_up", block.experts.gate_up, (of_device, 2 * wide, hidden))
    _check_experts(f"{name}.experts.down", block.experts.down, (of_device, hidden, wide))
    check_weight(f"{name}.experts.shared_gate_up", block.experts.shared_gate_up, (2 * wide, hidden))
    check_weight(f"{name}.experts.shared_down", block.experts.shared_down, (hidden, wide))


def _check_norm(name: str, norm: jax.Array, cfg: ModelConfig) -> None:
    check_array(name, norm, {"hidden": cfg.hidden_size}, FLOATS)


def _check_mix(name: str, mix: StreamMix, numbers: int, scales: int, cfg: ModelConfig) -> None:
    check_array(f"{name}.weight", mix.weight, {"m": numbers, "width": cfg.num_streams * cfg.hidden_size}, FLOATS)
    check_array(f"{name}.base", mix.base, {"m": numbers}, FLOATS)
    check_array(f"{name}.scale", mix.scale, {"scales": scales}, FLOATS)


def _check_wide(name: str, weight: Weight, axes: Mapping[str, int]) -> None:
    check_array(*checked_base(name, weight, tuple(axes.values())), axes, FLOATS)


def _check_experts(name: str, weight: ExpertWeight, shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    name, weight = checked_base(name, weight, shape)
    if not isinstance(weight, StoredExperts):
        check_array(name, weight, {"experts": experts, "out": rows, "in": columns}, FLOATS)
        return
    check_block(f"{name}.block", weight.block)
    check_activations(f"{name}.activations", weight.activations)
    width = columns // 2 if weight.is_fp4 else columns
    check_array(f"{name}.codes", weight.codes, {"experts": experts, "out": rows, "in": width}, (jnp.uint8, CODES))
    blocks = num_blocks((rows, columns), weight.block)
    axes = {"experts": experts, "rows": blocks[0], "columns": blocks[1]}
    check_array(f"{name}.scales", weight.scales, axes, (SCALES, jnp.float32))
    if weight.interleaved_for is None:
        return
    check_activations(f"{name}.interleaved_for", weight.interleaved_for)
    if not weight.is_fp4 or width % INTERLEAVED_BYTES:
        unit = 2 * INTERLEAVED_BYTES
        raise ValueError(f"{name}: interleaved codes are FP4 with a multiple of {unit} inputs, got {weight.shape}")
