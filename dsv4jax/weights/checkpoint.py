"""Reading one layer's attention weights from a checkpoint folder, opening only the files that contain them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.weights.params import NAMINGS, AttentionParams, load_attention_params

# Prefix of a layer's attention in the names of a checkpoint's tensors.
_PREFIXES = {
    "deepseek": "layers.{layer}.attn.",
    "hf": "model.layers.{layer}.self_attn.",
    "hf_saved": "model.layers.{layer}.attn.",
}

FP8_BLOCK = 128  # DeepSeek's FP8 linear weights have one scale per block of 128 x 128


def dequantise_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiply an FP8 weight [out, in] by its block scales [ceil(out/128), ceil(in/128)], in f32."""
    out, inner = weight.shape
    if scale.shape != (-(-out // FP8_BLOCK), -(-inner // FP8_BLOCK)):
        raise ValueError(f"block scales of shape {scale.shape} do not fit a weight of shape {weight.shape}")
    full = np.repeat(np.repeat(scale.astype(np.float32), FP8_BLOCK, 0), FP8_BLOCK, 1)[:out, :inner]
    return weight.astype(np.float32) * full


def load_safetensors(path: str | os.PathLike[str], cfg: DSV4Config, layer: int) -> AttentionParams:
    """Read one layer's attention from a checkpoint folder, opening only the shards that hold it.

    The folder may be DeepSeek's, or one that transformers' ``save_pretrained`` wrote, by default or with
    ``save_original_format=False``: the names of the tensors tell which.

    Weights with a ``.scale`` beside them are dequantised: E4M3 by powers of two to bfloat16, which holds the product
    exactly, others to float32.

    Args:
      path: folder with ``*.safetensors`` and, where sharded, ``model.safetensors.index.json``.

    Raises:
      ValueError: a tensor is missing, misshapen or unreadable, naming it and its file.
      FileNotFoundError: the folder holds no safetensors file.
    """
    from safetensors import SafetensorError

    folder = Path(path)
    layer_kind(cfg, layer)  # raises if the model has no such layer
    where = _tensor_files(folder)
    prefixes = {pattern.format(layer=layer): naming for naming, pattern in _PREFIXES.items()}
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in where)), None)
    if prefix is None:
        raise ValueError(f"{folder} holds no tensors of layer {layer}: looked for {list(prefixes)}")
    weights = set(NAMINGS[prefixes[prefix]].values())
    names = weights | {_scale_of(name) for name in weights}
    wanted = {name: where[prefix + name] for name in names if prefix + name in where}
    raw: dict[str, np.ndarray] = {}
    for file in sorted(set(wanted.values())):
        try:
            stored = _read_tensors(folder / file, [prefix + name for name, home in wanted.items() if home == file])
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"layer {layer}: cannot read {folder / file}: {error}") from error
        raw |= {name.removeprefix(prefix): value for name, value in stored.items()}
    tensors: dict[str, Any] = {}
    for name in raw.keys() & weights:
        tensors[name], scale = raw[name], raw.get(_scale_of(name))
        if scale is not None:
            try:
                full = dequantise_blocks(raw[name], scale)
            except ValueError as error:
                raise ValueError(f"layer {layer}: tensor {name!r}: {error}") from error
            exact = raw[name].dtype == jnp.float8_e4m3fn and scale.dtype == jnp.float8_e8m0fnu
            tensors[name] = jnp.asarray(full, jnp.bfloat16 if exact else jnp.float32)
    return load_attention_params(tensors, cfg, layer, prefixes[prefix])


def _scale_of(name: str) -> str:
    """Return the name of a weight's block scales."""
    return name.removesuffix(".weight") + ".scale"


# Names of dtypes in a safetensors header, for those that attention weights may have.
_STORED_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
}


def _read_tensors(file: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read some tensors of one file, whose layout is: 8 bytes of header length | JSON header | data.

    ``safe_open`` checks the header and the file length. The tensors are read here, because its NumPy interface does not
    support 8-bit floats.
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
    """Return the file of each tensor, from the index if there is one, otherwise from the headers of all files."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"cannot read {index}: expected JSON with a 'weight_map' of tensor names") from error
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
