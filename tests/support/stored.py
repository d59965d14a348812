"""Weights rounded to FP8 in blocks, as checkpoints store them, by NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import dsv4jax as d4
from dsv4jax.weights.params import QUANTISED
from dsv4jax.weights.stored import StoredWeight, is_stored


def rounded_to_blocks(
    weight: np.ndarray, block: tuple[int, int] = (128, 128), activations: str = "bf16"
) -> StoredWeight:
    """Round [out, in] to E4M3 with the smallest power of two per block that lets all its numbers fit."""
    out, inner = weight.shape
    rows, columns = -(-out // block[0]), -(-inner // block[1])
    padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
    padded[:out, :inner] = weight
    blocks = padded.reshape(rows, block[0], columns, block[1])
    scale = np.exp2(np.ceil(np.log2(np.abs(blocks).max((1, 3), keepdims=True) / 448)))
    codes = (blocks / scale).reshape(padded.shape)[:out, :inner].astype(ml_dtypes.float8_e4m3fn)
    codes, scales = jax.device_put((codes, scale[:, 0, :, 0].astype(ml_dtypes.float8_e8m0fnu)))
    return StoredWeight(codes=codes, scales=scales, block=block, activations=activations)


def stored_parts(
    params: d4.AttentionParams, block: tuple[int, int] = (128, 128), activations: str = "bf16"
) -> dict[str, Any]:
    """Round the weights of a layer that checkpoints store as FP8; all weights one by one."""
    parts: dict[str, Any] = params.split()
    for name in parts.keys() & set(QUANTISED):
        parts[name] = rounded_to_blocks(np.asarray(parts[name], np.float32), block, activations)
    return parts


def stored_params(
    params: d4.AttentionParams, block: tuple[int, int] = (128, 128), activations: str = "bf16"
) -> d4.AttentionParams:
    """``stored_parts`` side by side."""
    return d4.AttentionParams.join(stored_parts(params, block, activations))


def widened_params(params: d4.AttentionParams, dtype: Any = jnp.float32) -> d4.AttentionParams:
    """The same weights as wide arrays."""
    return jax.tree.map(lambda leaf: leaf.widened(dtype) if is_stored(leaf) else leaf, params, is_leaf=is_stored)


def values_of(weight: StoredWeight) -> np.ndarray:
    """The numbers of a weight, float64, by its definition."""
    codes, scales = (np.asarray(part).astype(np.float64) for part in (weight.codes, weight.scales))
    row, column = (np.arange(size) // length for size, length in zip(codes.shape, weight.block, strict=True))
    return codes * scales[row][:, column]


def random_stored(
    seed: int, shape: tuple[int, int], block: tuple[int, int] = (128, 128), activations: str = "bf16"
) -> StoredWeight:
    """Codes of all exponents, and scales of a few; each block's differs from its neighbours'."""
    rng = np.random.default_rng(seed)
    codes = rng.normal(0, 40, shape) * np.exp2(-rng.integers(0, 12, shape))
    counts = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    exponents = 119 - (np.arange(counts[0])[:, None] + np.arange(counts[1])) % 3
    return StoredWeight(
        codes=jax.device_put(codes.astype(ml_dtypes.float8_e4m3fn)),
        scales=jax.device_put(exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)),
        block=block,
        activations=activations,
    )
