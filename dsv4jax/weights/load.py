"""Arranging a layer's tensors, under the names that they have in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.checks import FLOATS, Named, Tree
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.weights.params import ALWAYS_F32, QUANTISED, AttentionParams, named_shapes
from dsv4jax.weights.stored import (
    CODES,
    SCALES,
    Stored,
    StoredWeight,
    check_codes,
    dtype_of,
    find_block,
    per_number,
    to_e8m0,
)

# Part of AttentionParams, name in DeepSeek's checkpoints, name in transformers'. Both names are relative to the layer's
# attention module.
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


def scale_names(name: str) -> tuple[str, str]:
    """Return the names that the block scales of tensor ``X.weight`` may have: ``X.scale``, ``X.weight_scale_inv``.

    Despite its name the second one multiplies, too.
    """
    return name.removesuffix(".weight") + ".scale", name + "_scale_inv"


def scale_of(name: str, tensors: Mapping[str, Tree]) -> Tree:
    """Return the block scales of a tensor, or None."""
    return next((tensors[scale] for scale in scale_names(name) if scale in tensors), None)


def load_attention_params(
    tensors: Mapping[str, Tree],
    cfg: DSV4Config,
    layer: int,
    naming: str = "hf",
    weights: str = "wide",
    activations: str = "bf16",
    block: tuple[int, int] | None = None,
) -> AttentionParams:
    """Arrange a layer's tensors. Traceable.

    Args:
      tensors: name inside the layer's attention module -> f32 or bf16 array, or E4M3 array with its block scales beside
        it, ``X.scale`` or ``X.weight_scale_inv`` for ``X.weight``.
      cfg: the model's sizes.
      layer: number of the layer in the model.
      naming: "hf" (the names of transformers' modules), "deepseek", or "hf_saved" (the names in the files that
        transformers' ``save_pretrained`` writes by default).
      weights: "stored" keeps weights as they are: floats, and FP8 (``StoredWeight``) of W_qa and W_kv, W_qb, W_oa, W_ob
        and the indexer's W_qb. "wide" multiplies FP8 weights by their scales: to bfloat16, which holds the product
        exactly, if the scales are E8M0, to float32 otherwise. "bf16" and "f32" then convert all weights, but for sinks
        and position biases, which are float32.
      activations: for stored weights, "bf16"; or "fp8", which W_oa does not have, as in DeepSeek's own inference; or
        "fp8_all" for "fp8" of W_oa too. See ``StoredWeight``.
      block: rows and columns per scale. If None, 128 x 128, or what the shapes of scales and weights say.

    Raises:
      ValueError: a tensor is missing, misshapen or of another dtype, or has scales that cannot be stored, and the
        message names it; unknown naming, layer or option.
    """
    if not isinstance(naming, str) or naming not in NAMINGS:
        raise ValueError(f"naming must be one of {list(NAMINGS)}, got {naming!r}")
    stored, dtype = Stored.choose(weights, activations, block), dtype_of(weights)
    parts: Named = {}
    for part, shape in named_shapes(cfg, layer_kind(cfg, layer)).items():
        name = NAMINGS[naming][part]
        if name not in tensors:
            raise ValueError(f"layer {layer}: tensor {name!r} is missing; there are {sorted(tensors)}")
        given, scale = tensors[name], scale_of(name, tensors)
        # jnp.asarray would silently convert f64 to f32; NumPy's arrays stay on the host until they are arranged.
        given = given if hasattr(given, "dtype") else jnp.asarray(given)
        if given.shape != shape:
            raise ValueError(f"layer {layer}: tensor {name!r} has shape {given.shape}, expected {shape}")
        try:
            if stored is not None and part in QUANTISED and scale is not None:
                parts[part] = as_stored(given, scale, stored, stored.of(part))
            else:
                parts[part] = as_wide(given, scale, block)
                if dtype is not None:
                    parts[part] = parts[part].astype(jnp.float32 if part.split(".")[-1] in ALWAYS_F32 else dtype)
        except ValueError as error:
            raise ValueError(f"layer {layer}: tensor {name!r}{error}") from error
    try:
        return jax.tree.map(jnp.asarray, AttentionParams.join(parts))
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}; use weights='wide'") from error


def as_stored(given: Tree, scale: Tree, stored: Stored, activations: str) -> StoredWeight:
    """Keep a weight as FP8. The message of a ValueError continues one that names the tensor."""
    if given.dtype != CODES:
        raise ValueError(f" is {given.dtype} and has block scales: weights='stored' needs {CODES}; use 'wide'")
    try:
        check_codes(given)
    except ValueError as error:
        raise ValueError(f": {error}") from error
    try:
        block = find_block(given.shape, scale.shape, stored.block)
        scales: Tree = to_e8m0(scale)
    except ValueError as error:
        raise ValueError(f": {error}; use weights='wide'") from error
    return StoredWeight(codes=given, scales=scales, block=block, activations=activations)


def as_wide(given: Tree, scale: Tree, block: tuple[int, int] | None) -> Tree:
    """Multiply a tensor by its scales, if it has any. The message of a ValueError continues one that names it."""
    if scale is None:
        if given.dtype not in FLOATS:
            beside = f", or {CODES} with block scales beside it" if given.dtype == CODES else ""
            raise ValueError(f" is {given.dtype}, expected float32 or bfloat16{beside}")
        return given
    try:
        block = find_block(given.shape, scale.shape, block)
    except ValueError as error:
        raise ValueError(f": {error}") from error
    full = given.astype(np.float32) * per_number(scale.astype(np.float32), block, given.shape)
    return full.astype(jnp.bfloat16 if given.dtype == CODES and scale.dtype == SCALES else np.float32)
