"""Weights of one attention layer: the pytree the layer reads, and how a checkpoint fills it.

Linear weights keep the checkpoint's orientation, [out, in].
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.config import AttentionType, DSV4Config, layer_schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompressorParams:
    """A compressor; width = 2 * dim for CSA (two streams), dim for HCA."""

    ape: jax.Array  # [ratio, width] gate bias by position within the block
    kv: jax.Array  # [width, hidden]
    gate: jax.Array  # [width, hidden]
    norm: jax.Array  # [dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexerParams:
    """The lightning indexer of a CSA layer."""

    q_b: jax.Array  # [indexer_heads * indexer_head_dim, q_lora_rank]
    head_weights: jax.Array  # [indexer_heads, hidden]
    compressor: CompressorParams  # dim = indexer_head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """One attention layer."""

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
    """Shapes of a layer's weights, as float32 ``ShapeDtypeStruct`` leaves."""

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def compressor(ratio: int, dim: int, width: int) -> CompressorParams:
        return CompressorParams(
            ape=of(ratio, width), kv=of(width, cfg.hidden_size), gate=of(width, cfg.hidden_size), norm=of(dim)
        )

    main = indexer = None
    if kind == AttentionType.CSA:
        m, dim = cfg.csa_compression_ratio, cfg.indexer_head_dim
        main = compressor(m, cfg.head_dim, 2 * cfg.head_dim)
        indexer = IndexerParams(
            q_b=of(cfg.indexer_heads * dim, cfg.q_lora_rank),
            head_weights=of(cfg.indexer_heads, cfg.hidden_size),
            compressor=compressor(m, dim, 2 * dim),
        )
    elif kind == AttentionType.HCA:
        main = compressor(cfg.hca_compression_ratio, cfg.head_dim, cfg.head_dim)
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


def init_attention_params(key: jax.Array, cfg: DSV4Config, layer: int, dtype: Any = jnp.float32) -> AttentionParams:
    """Random weights, for tests and demos: linear weights of variance 1 / in, norms and sinks near 1 and 0."""
    shapes = param_shapes(cfg, layer_schedule(cfg)[layer].attn)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = []
    for i, (path, leaf) in enumerate(paths):
        noise = jax.random.normal(jax.random.fold_in(key, i), leaf.shape, jnp.float32)
        if len(leaf.shape) == 1:
            value = 0.1 * noise + (0.0 if "sinks" in jax.tree_util.keystr(path) else 1.0)
        else:
            value = noise * (0.1 if "ape" in jax.tree_util.keystr(path) else leaf.shape[-1] ** -0.5)
        leaves.append(value.astype(dtype))
    return jax.tree.unflatten(tree, leaves)


# Field of AttentionParams, name in DeepSeek's checkpoints, name in transformers'; both inside the layer's attention.
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
NAMINGS = {"deepseek": {field: name for field, name, _ in _NAMES}, "hf": {field: name for field, _, name in _NAMES}}

# Where a checkpoint keeps a layer's attention.
_PREFIXES = {"deepseek": "layers.{layer}.attn.", "hf": "model.layers.{layer}.self_attn."}


def load_attention_params(
    tensors: Mapping[str, Any], cfg: DSV4Config, layer: int, naming: str = "hf"
) -> AttentionParams:
    """Arrange a layer's tensors. Traceable.

    Args:
      tensors: name inside the layer's attention module -> f32 or bf16 array.
      naming: "hf" (transformers) or "deepseek".

    Raises:
      ValueError: a tensor is missing, misshapen or of another dtype; the message names it.
    """
    if naming not in NAMINGS:
        raise ValueError(f"naming must be one of {list(NAMINGS)}, got {naming!r}")
    if not 0 <= layer < cfg.num_layers:
        raise ValueError(f"layer must be in [0, {cfg.num_layers}), got {layer}")
    shapes = param_shapes(cfg, layer_schedule(cfg)[layer].attn)
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = []
    for path, leaf in paths:
        name = NAMINGS[naming][jax.tree_util.keystr(path, simple=True, separator=".")]
        if name not in tensors:
            raise ValueError(f"layer {layer}: tensor {name!r} is missing; there are {sorted(tensors)}")
        given = tensors[name]
        value = jnp.asarray(given)
        dtype = given.dtype if isinstance(given, np.ndarray) else value.dtype  # asarray narrows f64 without a word
        if value.shape != leaf.shape:
            raise ValueError(f"layer {layer}: tensor {name!r} has shape {value.shape}, expected {leaf.shape}")
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"layer {layer}: tensor {name!r} is {dtype}, expected float32 or bfloat16")
        leaves.append(value)
    return jax.tree.unflatten(tree, leaves)


FP8_BLOCK = 128  # DeepSeek scales its FP8 linear weights by blocks of 128 x 128


def dequantise_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """FP8 weight [out, in] times its block scales [ceil(out/128), ceil(in/128)] -> f32."""
    out, inner = weight.shape
    if scale.shape != (-(-out // FP8_BLOCK), -(-inner // FP8_BLOCK)):
        raise ValueError(f"block scales of shape {scale.shape} do not fit a weight of shape {weight.shape}")
    full = np.repeat(np.repeat(scale.astype(np.float32), FP8_BLOCK, 0), FP8_BLOCK, 1)[:out, :inner]
    return weight.astype(np.float32) * full


def load_safetensors(path: str | os.PathLike[str], cfg: DSV4Config, layer: int) -> AttentionParams:
    """Read one layer's attention from a checkpoint folder, in either naming, opening only the shards that hold it.

    FP8 weights (those with a ``.scale`` beside them) are dequantised to bfloat16, which holds E4M3 times a power of
    two exactly.

    Args:
      path: folder with ``*.safetensors`` and, where sharded, ``model.safetensors.index.json``.

    Raises:
      ValueError: a tensor is missing, misshapen or unreadable, naming it and its file.
      FileNotFoundError: the folder holds no safetensors file.
    """
    from safetensors import SafetensorError

    folder = Path(path)
    where = _tensor_files(folder)
    prefixes = {pattern.format(layer=layer): naming for naming, pattern in _PREFIXES.items()}
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in where)), None)
    if prefix is None:
        raise ValueError(f"{folder} holds no tensors of layer {layer}: looked for {list(prefixes)}")
    wanted = {name.removeprefix(prefix): file for name, file in where.items() if name.startswith(prefix)}
    raw: dict[str, np.ndarray] = {}
    for file in sorted(set(wanted.values())):
        try:
            stored = _read_tensors(folder / file, [prefix + name for name, home in wanted.items() if home == file])
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"layer {layer}: cannot read {folder / file}: {error}") from error
        raw |= {name.removeprefix(prefix): value for name, value in stored.items()}
    tensors: dict[str, Any] = {}
    for name, value in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix(".weight") + ".scale")
        try:
            tensors[name] = value if scale is None else jnp.asarray(dequantise_blocks(value, scale), jnp.bfloat16)
        except ValueError as error:
            raise ValueError(f"layer {layer}: tensor {name!r}: {error}") from error
    return load_attention_params(tensors, cfg, layer, prefixes[prefix])


# dtypes of a safetensors header that attention weights come in.
_STORED_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
}


def _read_tensors(file: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Some tensors of one file: 8 bytes of header length | JSON header | data.

    ``safe_open`` checks header and file length. The tensors are read here, because its numpy form has no 8-bit floats.
    """
    from safetensors import safe_open

    with safe_open(file, framework="numpy"):
        pass
    tensors: dict[str, np.ndarray] = {}
    with file.open("rb") as stream:
        data = 8 + int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(data - 8))
        for name in names:
            if name not in header:
                raise ValueError(f"tensor {name!r} is not in the file")
            dtype = _STORED_DTYPES.get(header[name]["dtype"])
            if dtype is None:
                raise ValueError(f"tensor {name!r} is {header[name]['dtype']}; known are {list(_STORED_DTYPES)}")
            begin, end = header[name]["data_offsets"]
            stream.seek(data + begin)
            tensors[name] = np.frombuffer(stream.read(end - begin), dtype).reshape(header[name]["shape"])
    return tensors


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index where there is one, else from the files' headers."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    found: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as shard:
                found |= dict.fromkeys(shard.keys(), file.name)
        except SafetensorError as error:
            raise ValueError(f"cannot read {file}: {error}") from error
    return found
