"""Random models of any size, made on the device in the formats of checkpoints, for tests, demos and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv4jax.checks import Named, Tree, check_key, check_type
from dsv4jax.config import layer_kind
from dsv4jax.formats import E2M1_VALUES
from dsv4jax.model.checkpoint.tensors import FP4_BLOCK
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.inside.devices import model_mesh, weight_specs
from dsv4jax.model.inside.host_memory import check_host_experts, placed
from dsv4jax.model.params import (
    Block,
    DraftParams,
    DSparkParams,
    Experts,
    ExpertWeight,
    ModelParams,
    Router,
    StoredExperts,
    StreamMix,
)
from dsv4jax.weights.initial import random_params, random_scales, random_stored, with_f32
from dsv4jax.weights.stored import Stored, Weight, join, num_blocks

_E2M1_VARIANCE = float(np.mean(np.square(E2M1_VALUES)))


def random_model(
    cfg: ModelConfig,
    key: jax.Array,
    weights: str = "stored",
    activations: str = "bf16",
    drafts: int = 1,
    mesh: Mesh | None = None,
    host_experts: int = 0,
) -> ModelParams:
    """Return a model with random weights: linear weights of variance 1 / in, norms near 1.

    Args:
      cfg: the model's sizes.
      key: a random key.
      weights: "stored" makes FP8 and FP4 weights as published checkpoints have them, and bfloat16 for the rest; "bf16",
        which is also what "wide" makes, and "f32" make all weights in one dtype, but for those that are always float32.
      activations: for stored weights, "bf16", "fp8" or "fp8_all", as for ``load_model``.
      drafts: the most tokens that are to be guessed at a time; 0 leaves out the block that guesses them.
      mesh: as for ``load_model``. The numbers do not depend on it, and each device draws its own.
      host_experts: as for ``load_model``.

    Raises:
      ValueError: an option is unknown, the key is none, a size does not divide into blocks of FP4, or as ``load_model``
        for the mesh and ``host_experts``.
    """
    check_type("cfg", cfg, ModelConfig)
    check_host_experts(host_experts, cfg, mesh)
    mesh = None if mesh is None else model_mesh(mesh, cfg)
    stored = Stored.choose(weights, activations)
    if stored is not None and (cfg.hidden_size % FP4_BLOCK[1] or cfg.expert_width % FP4_BLOCK[1]):
        sizes = f"hidden_size={cfg.hidden_size} and expert_width={cfg.expert_width}"
        raise ValueError(f"{sizes} must be divisible by {FP4_BLOCK[1]}, the block of FP4 weights")
    dtype = jnp.dtype(jnp.float32 if weights == "f32" else jnp.bfloat16)
    check_key(key)
    outer, draft_key, *layers = jax.random.split(key, 2 + cfg.num_layers)
    if not isinstance(key, Tracer):
        _compile(outer, cfg, dtype, stored, mesh, with_drafts=bool(drafts))
    return ModelParams(
        **_outer(outer, cfg, dtype, mesh=mesh),
        blocks=tuple(
            placed(_block(key, cfg, layer, dtype, stored, mesh), on_host=layer < host_experts)
            for layer, key in enumerate(layers)
        ),
        drafts=(_drafts if cfg.dspark is None else _dspark)(draft_key, cfg, dtype, stored, mesh) if drafts else None,
        cfg=cfg,
        mesh=mesh,
    )


def _placed(draw: Callable[..., Tree]) -> Tree:
    """Compile a function that draws weights: (key, *sizes, mesh) -> the weights, where a mesh keeps them."""
    sizes = range(1, len(inspect.signature(draw).parameters))

    @functools.partial(jax.jit, static_argnums=tuple(sizes), static_argnames="mesh")
    def placed(key: jax.Array, *sizes: Tree, mesh: Mesh | None) -> Tree:
        drawn = draw(key, *sizes)
        return drawn if mesh is None else lax.with_sharding_constraint(drawn, weight_specs(drawn, mesh))

    return placed


def _compile(
    key: jax.Array,
    cfg: ModelConfig,
    dtype: DTypeLike,
    stored: Stored | None,
    mesh: Mesh | None,
    *,
    with_drafts: bool,
) -> None:
    """Compile all programs that draw weights, side by side: one after the other, they take half a minute."""
    layers = range(cfg.num_layers)
    kinds = {(cfg.attention, layer_kind(cfg.attention, layer)) for layer in layers}
    ways = {cfg.picks_by_id(layer) for layer in layers}
    programs = [_outer.lower(key, cfg, dtype, mesh=mesh)]
    if with_drafts:
        kinds.add((cfg.draft_attention, layer_kind(cfg.draft_attention, 0)))
        ways.add(cfg.picks_by_id(None))
        around = _around_block if cfg.dspark is None else _around_stages
        programs.append(around.lower(key, cfg, dtype, stored, mesh=mesh))
    programs += [_attention.lower(key, sizes, kind, dtype, stored, mesh=mesh) for sizes, kind in kinds]
    programs.append(_around_attention.lower(key, cfg, dtype, stored, mesh=mesh))
    programs += [_choice.lower(key, cfg, by_id, mesh=mesh) for by_id in ways]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda program: program.compile(), programs))


@_placed
def _outer(key: jax.Array, cfg: ModelConfig, dtype: DTypeLike) -> Named:
    embedding, head, norm, mix = jax.random.split(key, 4)
    shape = cfg.vocab_size, cfg.hidden_size
    return {
        "embedding": jax.random.normal(embedding, shape, dtype),
        "head": jax.random.normal(head, shape, dtype) * jnp.asarray(cfg.hidden_size**-0.5, dtype),
        "final_norm": _norm(norm, cfg, dtype),
        "final_mix": _mix(mix, cfg.num_streams, 1, cfg),
    }


def _norm(key: jax.Array, cfg: ModelConfig, dtype: DTypeLike) -> jax.Array:
    return (1 + 0.1 * jax.random.normal(key, (cfg.hidden_size,), jnp.float32)).astype(dtype)


def _mix(key: jax.Array, numbers: int, scales: int, cfg: ModelConfig) -> StreamMix:
    weight, base, scale = jax.random.split(key, 3)
    width = cfg.num_streams * cfg.hidden_size
    return StreamMix(
        weight=jax.random.normal(weight, (numbers, width), jnp.float32) * width**-0.5,
        base=0.5 * jax.random.normal(base, (numbers,), jnp.float32),
        scale=1 + 0.1 * jax.random.normal(scale, (scales,), jnp.float32),
    )


def _block(
    key: jax.Array, cfg: ModelConfig, layer: int | None, dtype: DTypeLike, stored: Stored | None, mesh: Mesh | None
) -> Block:
    """A layer; None means the draft block."""
    attention, rest = jax.random.split(key)
    sizes = cfg.draft_attention if layer is None else cfg.attention
    around = _around_attention(rest, cfg, dtype, stored, mesh=mesh)
    choice = _choice(rest, cfg, cfg.picks_by_id(layer), mesh=mesh)
    return Block(
        attention=with_f32(_attention(attention, sizes, layer_kind(sizes, layer or 0), dtype, stored, mesh=mesh)),
        **around | {"router": dataclasses.replace(around["router"], **choice)},
    )


_attention = _placed(random_params)


# Apart from the rest of a layer, so that all layers share the program of that, which takes longest to compile.
@_placed
def _choice(key: jax.Array, cfg: ModelConfig, by_id: bool) -> Named:
    key = jax.random.split(key, 16)[0]
    if not by_id:
        return {"bias": 0.1 * jax.random.normal(key, (cfg.num_experts,), jnp.float32)}
    chances = jax.random.uniform(key, (cfg.vocab_size, cfg.num_experts), jnp.float32)
    return {"table": lax.top_k(chances, cfg.experts_per_token)[1]}  # distinct experts


@_placed
def _around_attention(key: jax.Array, cfg: ModelConfig, dtype: DTypeLike, stored: Stored | None) -> Named:
    keys = iter(jax.random.split(key, 16)[1:])  # the first is that of ``_choice``
    h, wide, experts = cfg.hidden_size, cfg.expert_width, cfg.num_experts
    numbers = (2 + cfg.num_streams) * cfg.num_streams
    return {
        "attention_mix": _mix(next(keys), numbers, 3, cfg),
        "attention_norm": _norm(next(keys), cfg, dtype),
        "router": Router(gate=_wide(next(keys), (experts, h), dtype), bias=None, table=None),
        "experts": Experts(
            gate_up=_experts(next(keys), (experts, 2 * wide, h), dtype, stored),
            down=_experts(next(keys), (experts, h, wide), dtype, stored),
            shared_gate_up=join(*(_linear(key, (wide, h), dtype, stored) for key in jax.random.split(next(keys)))),
            shared_down=_linear(next(keys), (h, wide), dtype, stored),
        ),
        "experts_mix": _mix(next(keys), numbers, 3, cfg),
        "experts_norm": _norm(next(keys), cfg, dtype),
    }


def _drafts(
    key: jax.Array, cfg: ModelConfig, dtype: DTypeLike, stored: Stored | None, mesh: Mesh | None
) -> DraftParams:
    block, rest = jax.random.split(key)
    around = _around_block(rest, cfg, dtype, stored, mesh=mesh)
    return DraftParams(block=_block(block, cfg, None, dtype, stored, mesh), **around)


@_placed
def _around_block(key: jax.Array, cfg: ModelConfig, dtype: DTypeLike, stored: Stored | None) -> Named:
    keys = iter(jax.random.split(key, 6))
    square = cfg.hidden_size, cfg.hidden_size
    return {
        "token_norm": _norm(next(keys), cfg, dtype),
        "stream_norm": _norm(next(keys), cfg, dtype),
        "final_norm": _norm(next(keys), cfg, dtype),
        "token_proj": _linear(next(keys), square, dtype, stored),
        "stream_proj": _linear(next(keys), square, dtype, stored),
        "final_mix": _mix(next(keys), cfg.num_streams, 1, cfg),
    }


def _dspark(
    key: jax.Array, cfg: ModelConfig, dtype: DTypeLike, stored: Stored | None, mesh: Mesh | None
) -> DSparkParams:
    assert cfg.dspark is not None
    rest, *stages = jax.random.split(key, 1 + cfg.dspark.stages)
    blocks = tuple(_block(stage, cfg, None, dtype, stored, mesh) for stage in stages)
    return DSparkParams(blocks=blocks, **_around_stages(rest, cfg, dtype, stored, mesh=mesh))


@_placed
def _around_stages(key: jax.Array, cfg: ModelConfig, dtype: DTypeLike, stored: Stored | None) -> Named:
    assert cfg.dspark is not None
    keys = iter(jax.random.split(key, 7))
    h, table = cfg.hidden_size, (cfg.vocab_size, cfg.dspark.rank)
    return {
        "taps_proj": _linear(next(keys), (h, len(cfg.dspark.taps) * h), dtype, stored),
        "taps_norm": _norm(next(keys), cfg, dtype),
        "final_norm": _norm(next(keys), cfg, dtype),
        "final_mix": _mix(next(keys), cfg.num_streams, 1, cfg),
        "markov_in": jax.random.normal(next(keys), table, dtype),
        "markov_out": _wide(next(keys), table, dtype),
        "confidence": _wide(next(keys), (1, h + cfg.dspark.rank), dtype),
    }


def _wide(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


def _linear(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike, stored: Stored | None) -> Weight:
    if stored is None:
        return _wide(key, shape, dtype)
    codes, scales = jax.random.split(key)
    return random_stored(codes, scales, {"weight": shape}, stored)["weight"]


def _experts(key: jax.Array, shape: tuple[int, int, int], dtype: DTypeLike, stored: Stored | None) -> ExpertWeight:
    """One linear weight [E, out, in] of all experts, in FP4 if weights are stored."""
    if stored is None:
        return _wide(key, shape, dtype)
    count, rows, columns = shape
    codes, scales = jax.random.split(key)
    blocks = count, *num_blocks((rows, columns), FP4_BLOCK)
    weight = StoredExperts(
        codes=jax.random.bits(codes, (count, rows, columns // 2), jnp.uint8),
        scales=random_scales(jax.random.uniform(scales, blocks), 1 / (columns * _E2M1_VARIANCE)),
        block=FP4_BLOCK,
        activations=stored.of("experts"),
    )
    return weight.for_kernels()
