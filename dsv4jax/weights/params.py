"""Weights of one attention layer: their pytree, and the names that they have in checkpoints.

Linear weights have the orientation of the checkpoint, [out, in].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dsv4jax.checks import FLOATS, check_array, check_dtype
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import axis_size, split_heads

_SMALL = 1 << 18  # leaves of at most so many numbers are drawn together, however their sizes differ


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompressorParams:
    """Weights of a compressor. width is 2 * dim for CSA, which has two streams, and dim for HCA."""

    ape: jax.Array  # [ratio, width] bias of the gate, by position within the block
    kv: jax.Array  # [width, hidden]
    gate: jax.Array  # [width, hidden]
    norm: jax.Array  # [dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexerParams:
    """Weights of the lightning indexer of a CSA layer."""

    q_b: jax.Array  # [indexer_heads * indexer_head_dim, q_lora_rank]
    head_weights: jax.Array  # [indexer_heads, hidden]
    compressor: CompressorParams  # dim = indexer_head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Weights of one attention layer."""

    q_a: jax.Array  # [q_lora_rank, hidden]
    q_norm: jax.Array  # [q_lora_rank]
    q_b: jax.Array  # [num_heads * head_dim, q_lora_rank]
    kv: jax.Array  # [head_dim, hidden]
    kv_norm: jax.Array  # [head_dim]
    o_a: jax.Array  # [o_groups * o_lora_rank, num_heads * head_dim / o_groups]
    o_b: jax.Array  # [hidden, o_groups * o_lora_rank]
    sinks: jax.Array  # [num_heads]
    compressor: CompressorParams | None  # None for SWA
    indexer: IndexerParams | None  # CSA only


def param_shapes(cfg: DSV4Config, kind: AttentionType) -> AttentionParams:
    """Return the shapes of a layer's weights, as float32 ``ShapeDtypeStruct`` leaves."""
    kind = AttentionType(kind)

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def compressor(dim: int) -> CompressorParams:
        ratio, width = cfg.ratio(kind), dim * (2 if kind.overlaps else 1)  # dim per stream
        return CompressorParams(
            ape=of(ratio, width), kv=of(width, cfg.hidden_size), gate=of(width, cfg.hidden_size), norm=of(dim)
        )

    main = compressor(cfg.head_dim) if kind.compresses else None
    indexer = None
    if kind.is_indexed:
        indexer = IndexerParams(
            q_b=of(cfg.indexer_heads * cfg.indexer_head_dim, cfg.q_lora_rank),
            head_weights=of(cfg.indexer_heads, cfg.hidden_size),
            compressor=compressor(cfg.indexer_head_dim),
        )
    heads = cfg.num_heads * cfg.head_dim
    return AttentionParams(
        q_a=of(cfg.q_lora_rank, cfg.hidden_size),
        q_norm=of(cfg.q_lora_rank),
        q_b=of(heads, cfg.q_lora_rank),
        kv=of(cfg.head_dim, cfg.hidden_size),
        kv_norm=of(cfg.head_dim),
        o_a=of(cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups),
        o_b=of(cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank),
        sinks=of(cfg.num_heads),
        compressor=main,
        indexer=indexer,
    )


def layer_shapes(cfg: DSV4Config, layer: int) -> AttentionParams:
    """Return ``param_shapes`` for layer number ``layer``. Raises ValueError if the model has no such layer."""
    return param_shapes(cfg, layer_kind(cfg, layer))


def params_specs(cfg: DSV4Config, layer: int, mesh: Mesh, axis: str = "model") -> AttentionParams:
    """Return a ``PartitionSpec`` for each weight of a layer whose heads are split over a mesh axis.

    Args:
      cfg: the model's sizes.
      layer: number of the layer in the model.
      mesh: the devices.
      axis: the mesh axis over which heads are split.

    Raises:
      ValueError: the mesh does not have the axis, the heads do not divide by its size, or there is no such layer.
    """
    split_heads(cfg, axis_size(mesh, axis), axis)
    whole = jax.tree.map(lambda _: P(), layer_shapes(cfg, layer))
    return dataclasses.replace(whole, q_b=P(axis), sinks=P(axis), o_a=P(axis), o_b=P(None, axis))


def check_params(params: AttentionParams, cfg: DSV4Config, kind: AttentionType) -> None:
    """Check that these are the weights of a layer of this kind.

    Raises:
      ValueError: they belong to another kind of layer.
      AssertionError: (chex) an array's shape or dtype is wrong.
    """
    _check_weights("params", params, param_shapes(cfg, kind), kind)


def check_compressors(
    params: CompressorParams, indexer: IndexerParams | None, cfg: DSV4Config, kind: AttentionType
) -> None:
    """As ``check_params``, for the compressor and the indexer of a layer."""
    shapes = param_shapes(cfg, kind)
    _check_weights("params", params, shapes.compressor, kind)
    _check_weights("indexer", indexer, shapes.indexer, kind)


def _check_weights(name: str, weights: Any, shapes: Any, kind: AttentionType) -> None:
    expected, tree = jax.tree_util.tree_flatten_with_path(shapes)
    if jax.tree.structure(weights) != tree:
        raise ValueError(
            f"{name}: expected the weights of a {kind.upper()} layer, {tree}; got {jax.tree.structure(weights)}"
        )
    for (path, spec), leaf in zip(expected, jax.tree.leaves(weights), strict=True):
        axes: dict[str, int | None] = {f"axis {i}": size for i, size in enumerate(spec.shape)}
        check_array(f"{name}{jax.tree_util.keystr(path)}", leaf, axes, FLOATS)


def init_attention_params(key: jax.Array, cfg: DSV4Config, layer: int, dtype: Any = jnp.float32) -> AttentionParams:
    """Random weights, for tests and demos: linear weights of variance 1 / in, norms and sinks near 1 and 0.

    The layers of a kind share one compiled program.

    Raises:
      ValueError: the model has no such layer, or dtype is neither float32 nor bfloat16.
    """
    check_dtype("dtype", dtype, FLOATS)
    return _random_params(key, cfg, layer_kind(cfg, layer), jnp.dtype(dtype))


# Jitted whole: run op by op, the layers of a model would compile some 50 programs, each in up to half a second.
@functools.partial(jax.jit, static_argnames=("cfg", "kind", "dtype"))
def _random_params(key: jax.Array, cfg: DSV4Config, kind: AttentionType, dtype: Any) -> AttentionParams:
    paths, tree = jax.tree_util.tree_flatten_with_path(param_shapes(cfg, kind))
    sizes = [math.prod(leaf.shape) for _, leaf in paths]
    scales, offsets = zip(*(_distribution(jax.tree_util.keystr(path), leaf.shape) for path, leaf in paths), strict=True)
    leaves: dict[int, jax.Array] = {}
    for group in _of_similar_size(sizes):
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.asarray(group, jnp.uint32))
        noise = jax.vmap(functools.partial(jax.random.normal, shape=(sizes[group[0]],), dtype=jnp.float32))(keys)
        noise *= jnp.asarray([scales[i] for i in group], jnp.float32)[:, None]
        # Else XLA compiles the generator, which is long, into every leaf once more.
        noise = lax.optimization_barrier(noise)
        for row, i in zip(noise, group, strict=True):
            shape = paths[i][1].shape
            leaves[i] = (row[: sizes[i]].reshape(shape) + offsets[i]).astype(dtype)
    return jax.tree.unflatten(tree, [leaves[i] for i in range(len(paths))])


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Scale and offset of a leaf's random numbers."""
    if len(shape) == 1:
        return 0.1, 0.0 if "sinks" in name else 1.0
    return (0.1 if "ape" in name else shape[-1] ** -0.5), 0.0


def _of_similar_size(sizes: list[int]) -> list[list[int]]:
    """Numbers of leaves, the largest first, in groups that draw rows of the same length and cut them to size.

    A leaf is at least a quarter of its group's first, or both are small.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        longest = sizes[groups[-1][0]] if groups else None
        if longest is not None and (longest <= _SMALL or 4 * sizes[i] >= longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# Field of AttentionParams, name in DeepSeek's checkpoints, name in transformers'. Both names are relative to the
# layer's attention module.
_NAMES = (
    ("q_a", "wq_a.weight", "q_a_proj.weight"),
    ("q_norm", "q_norm.weight", "q_a_norm.weight"),
    ("q_b", "wq_b.weight", "q_b_proj.weight"),
    ("kv", "wkv.weight", "kv_proj.weight"),
    ("kv_norm", "kv_norm.weight", "kv_norm.weight"),
    ("o_a", "wo_a.weight", "o_a_proj.weight"),
    ("o_b", "wo_b.weight", "o_b_proj.weight"),
    ("sinks", "attn_sink", "sinks"),
    ("compressor.ape", "compressor.ape", "compressor.position_bias"),
    ("compressor.kv", "compressor.wkv.weight", "compressor.kv_proj.weight"),
    ("compressor.gate", "compressor.wgate.weight", "compressor.gate_proj.weight"),
    ("compressor.norm", "compressor.norm.weight", "compressor.kv_norm.weight"),
    ("indexer.q_b", "indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight"),
    ("indexer.head_weights", "indexer.weights_proj.weight", "compressor.indexer.scorer.weights_proj.weight"),
    ("indexer.compressor.ape", "indexer.compressor.ape", "compressor.indexer.position_bias"),
    ("indexer.compressor.kv", "indexer.compressor.wkv.weight", "compressor.indexer.kv_proj.weight"),
    ("indexer.compressor.gate", "indexer.compressor.wgate.weight", "compressor.indexer.gate_proj.weight"),
    ("indexer.compressor.norm", "indexer.compressor.norm.weight", "compressor.indexer.kv_norm.weight"),
)
_DEEPSEEK = {field: name for field, name, _ in _NAMES}
NAMINGS = {
    "deepseek": _DEEPSEEK,
    "hf": {field: name for field, _, name in _NAMES},
    # What transformers' save_pretrained writes by default: it turns its own names back into DeepSeek's, all but one.
    "hf_saved": _DEEPSEEK | {"kv_norm": "norm.weight"},
}


def load_attention_params(
    tensors: Mapping[str, Any], cfg: DSV4Config, layer: int, naming: str = "hf"
) -> AttentionParams:
    """Arrange a layer's tensors. Traceable.

    Args:
      tensors: name inside the layer's attention module -> f32 or bf16 array.
      naming: "hf" (the names of transformers' modules), "deepseek", or "hf_saved" (the names in the files that
        transformers' ``save_pretrained`` writes by default).

    Raises:
      ValueError: a tensor is missing, misshapen or of another dtype, and the message names it; unknown naming or layer.
    """
    if not isinstance(naming, str) or naming not in NAMINGS:
        raise ValueError(f"naming must be one of {list(NAMINGS)}, got {naming!r}")
    paths, tree = jax.tree_util.tree_flatten_with_path(layer_shapes(cfg, layer))
    leaves = []
    for path, leaf in paths:
        name = NAMINGS[naming][jax.tree_util.keystr(path, simple=True, separator=".")]
        if name not in tensors:
            raise ValueError(f"layer {layer}: tensor {name!r} is missing; there are {sorted(tensors)}")
        given = tensors[name]
        value = jnp.asarray(given)
        dtype = given.dtype if isinstance(given, np.ndarray) else value.dtype  # asarray silently converts f64 to f32
        if value.shape != leaf.shape:
            raise ValueError(f"layer {layer}: tensor {name!r} has shape {value.shape}, expected {leaf.shape}")
        if dtype not in FLOATS:
            raise ValueError(f"layer {layer}: tensor {name!r} is {dtype}, expected float32 or bfloat16")
        leaves.append(value)
    return jax.tree.unflatten(tree, leaves)
