"""Reading one layer's attention weights from a checkpoint folder, opening only the files that contain them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.weights.load import NAMINGS, load_attention_params, scale_names, scale_of
from dsv4jax.weights.params import QUANTISED, AttentionParams

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
    weights: str | None = None,
    activations: str = "bf16",
) -> AttentionParams:
    """Read one layer's attention from a checkpoint folder, opening only the shards that hold it.

    The folder may be DeepSeek's, or one that transformers' ``save_pretrained`` wrote, by default or with
    ``save_original_format=False``: the names of the tensors tell which.

    Args:
      path: folder with ``*.safetensors`` and, where sharded, ``model.safetensors.index.json``.
      cfg: the model's sizes.
      layer: number of the layer in the model.
      weights: "stored" or "wide", as for ``load_attention_params``. None = "stored" if all weights of the layer that
        can be stored as FP8 have block scales beside them, otherwise "wide".
      activations: for stored weights, "bf16" or "fp8"; see ``StoredWeight``.

    Raises:
      ValueError: a tensor is missing, misshapen or unreadable, naming it and its file; or has scales that cannot be
        stored (some are no power of two, or above 2^7), which ``weights="wide"`` reads.
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
    naming = NAMINGS[prefixes[prefix]]
    names = {name for weight in naming.values() for name in (weight, *scale_names(weight))}
    wanted = {name: where[prefix + name] for name in names if prefix + name in where}
    raw: dict[str, np.ndarray] = {}
    for file in sorted(set(wanted.values())):
        try:
            stored = _read_tensors(folder / file, [prefix + name for name, home in wanted.items() if home == file])
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"layer {layer}: cannot read {folder / file}: {error}") from error
        raw |= {name.removeprefix(prefix): value for name, value in stored.items()}
    if weights is None:
        quantised = [name for part, name in naming.items() if part in QUANTISED and name in raw]
        weights = "stored" if quantised and all(scale_of(name, raw) is not None for name in quantised) else "wide"
    return load_attention_params(raw, cfg, layer, prefixes[prefix], weights, activations, _block_size(folder))


def _block_size(folder: Path) -> tuple[int, int] | None:
    """Return rows and columns per scale as the folder's config.json has them; None if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rows, columns = config["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(rows), int(columns)


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
