"""Reading one layer's attention weights from a checkpoint folder, opening only the files that contain them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np

from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.weights.files import block_size, read_header, tensor_files
from dsv4jax.weights.load import NAMINGS, load_attention_params, scale_names
from dsv4jax.weights.params import AttentionParams

# Prefix of a layer's attention in the names of a checkpoint's tensors.
_PREFIXES = {
    "deepseek": "layers.{layer}.attn.",
    "hf": "model.layers.{layer}.self_attn.",
    "hf_saved": "model.layers.{layer}.attn.",
}


def load_safetensors(
    path: str | os.PathLike[str],
    cfg: DSV4Config,
    layer: int,
    weights: str | None = "stored",
    activations: str = "bf16",
) -> AttentionParams:
    """Read one layer's attention from a checkpoint folder, opening only the shards that hold it.

    The folder may be DeepSeek's, or one that transformers' ``save_pretrained`` wrote, by default or with
    ``save_original_format=False``: the names of the tensors tell which.

    Args:
      path: folder with ``*.safetensors`` and, where sharded, ``model.safetensors.index.json``.
      cfg: the model's sizes.
      layer: number of the layer in the model.
      weights: "stored", "wide", "bf16" or "f32", as for ``load_attention_params``. None is an old word for "stored".
      activations: for stored weights, "bf16", "fp8" or "fp8_all", as for ``load_attention_params``.

    Raises:
      ValueError: a tensor is missing, misshapen or unreadable, naming it and its file; or has scales that cannot be
        stored (some are no power of two, or above 2^7), which ``weights="wide"`` reads.
      FileNotFoundError: the folder holds no safetensors file.
    """
    if weights is None:
        message = "load_safetensors: weights=None is now weights='stored', the default"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        weights = "stored"
    folder = Path(path)
    layer_kind(cfg, layer)  # raises if the model has no such layer
    where = tensor_files(folder)
    prefixes = {pattern.format(layer=layer): naming for naming, pattern in _PREFIXES.items()}
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in where)), None)
    if prefix is None:
        raise ValueError(f"{folder} holds no tensors of layer {layer}: looked for {list(prefixes)}")
    naming = NAMINGS[prefixes[prefix]]
    names = {name for weight in naming.values() for name in (weight, *scale_names(weight))}
    wanted = {name: where[prefix + name] for name in names if prefix + name in where}
    raw: dict[str, np.ndarray] = {}
    for file in sorted(set(wanted.values())):
        try:
            header = read_header(folder / file)
            for name in (name for name, home in wanted.items() if home == file):
                if prefix + name not in header:
                    raise ValueError(f"cannot read {folder / file}: tensor {prefix + name!r} is not in it")
                raw[name] = header[prefix + name].read()
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
    return load_attention_params(raw, cfg, layer, prefixes[prefix], weights, activations, _block_size(folder))


def _block_size(folder: Path) -> tuple[int, int] | None:
    """Return rows and columns per scale as the folder's config.json has them; None if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return block_size(config)
