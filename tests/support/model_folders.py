"""Folders of whole models: the recorded ones in ``tests/data/model``, and others that tests write.

Files are written and read here without the library's reader, and without the NumPy interface of the safetensors
package, which does not support 8-bit floats.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsv4jax.model import ModelConfig
from dsv4jax.model.checkpoint.tensors import Place, model_tensors, place_of
from tests.support.paths import DATA

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu

MODELS = DATA / "model"  # "a" in bfloat16 and float32, "q" in FP8 and FP4
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(E4M3),
    "F8_E8M0": np.dtype(E8M0),
    "I64": np.dtype(np.int64),
    "I8": np.dtype(np.int8),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # values of the 16 codes

Tensors = dict[str, np.ndarray]


def read_folder(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a folder with one file, and its configuration."""
    raw = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        data = np.frombuffer(raw[begin + first : begin + end], DTYPES[entry["dtype"]])
        tensors[name] = data.reshape(entry["shape"])
    return tensors, json.loads((folder / "config.json").read_text())


def write_folder(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None, shards: int = 1) -> Path:
    """Write a model's folder.

    Args:
      folder: an existing folder.
      tensors: by name. They are stored in the order of the mapping, in turn into each of the files.
      config: the content of config.json; None = no such file.
      shards: number of files. Where there are several, there is an index, too.
    """
    names = list(tensors)
    files = {"model.safetensors": names}
    if shards > 1:
        files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, held in files.items():
        (folder / file).write_bytes(file_bytes({name: tensors[name] for name in held}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def file_bytes(tensors: Tensors) -> bytes:
    """Return a safetensors file: 8 bytes with the length of the header | JSON header | data."""
    header, parts, end = {}, [], 0
    for name, value in tensors.items():
        first, end = end, end + value.nbytes
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [first, end]}
        parts.append(value.tobytes())
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def checksum(value: np.ndarray) -> float:
    """Return a sum that depends on the order of numbers."""
    numbers = value.astype(np.float64).reshape(-1)
    return float(np.sum(numbers * np.cos(np.arange(numbers.size))))


def sums_of(value: np.ndarray) -> list[float]:
    """Return the norm of numbers, and sums of them along four waves, by which they are told apart from others."""
    numbers = value.astype(np.float64).reshape(-1)
    places = np.arange(numbers.size)
    return [float(np.linalg.norm(numbers)), *(float(np.sum(numbers * np.cos(k * places))) for k in (1, 2, 3, 4))]


def renamed(tensors: Tensors, naming: str, cfg: ModelConfig, widen: bool = True) -> Tensors:
    """Return the tensors of a model without drafts as transformers writes them, from DeepSeek's.

    In float32, or, without ``widen``, as they are, with block scales as ``X_scale_inv`` beside ``X``.
    """
    found: Tensors = {}
    fused: dict[str, dict[int, dict[int, np.ndarray]]] = {}

    def put(value: np.ndarray, place: Place, suffix: str) -> None:
        if place.expert is None:
            found[place.name + suffix] = value
        else:
            assert place.rows is not None
            fused.setdefault(place.name + suffix, {}).setdefault(place.expert, {})[place.rows[0]] = value

    for name in model_tensors(cfg, drafts=0):
        value, scale, place = tensors[name], tensors.get(scale_of(name)), place_of(name, naming, cfg)
        put(value.astype(np.float32) if widen and value.dtype != np.int64 else value, place, "")
        if scale is not None:
            assert not widen, "values_of multiplies by scales"
            put(scale, place, "_scale_inv")
    for name, experts in fused.items():
        rows = [[part for _, part in sorted(experts[e].items())] for e in range(cfg.num_experts)]
        found[name] = np.stack([np.concatenate(parts) for parts in rows])
    return found


def scale_of(name: str) -> str:
    """Return DeepSeek's name of the block scales of a tensor."""
    return name.removesuffix(".weight") + ".scale"


def per_number(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat block scales, of equal blocks that fill the weight, for each number of it."""
    for axis, size in enumerate(shape):
        scales = np.repeat(scales, size // scales.shape[axis], axis)
    return scales


def values_of(name: str, tensors: Tensors) -> np.ndarray:
    """Return the numbers of a tensor, in float32: codes times scales where it has scales."""
    codes, scales = tensors[name], tensors.get(scale_of(name))
    if scales is None:
        return codes.astype(np.float32)
    if codes.dtype == np.int8:
        pairs = codes.view(np.uint8)
        codes = E2M1[np.stack([pairs & 15, pairs >> 4], -1).reshape(codes.shape[0], -1)]
    return codes.astype(np.float32) * per_number(scales.astype(np.float32), codes.shape)


def random_tensors(cfg: ModelConfig, seed: int, drafts: int = 1) -> Tensors:
    """Return random tensors in the forms of published checkpoints."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, spec in model_tensors(cfg, drafts).items():
        if spec.form == "int64":
            tensors[name] = rng.integers(0, cfg.num_experts, spec.shape)
        elif spec.form == "fp4":
            tensors[name] = rng.integers(-128, 128, spec.codes, np.int8)
        elif spec.form == "fp8":
            tensors[name] = rng.normal(0, 40, spec.shape).astype(DTYPES["F8_E4M3"])
        else:
            tensors[name] = rng.normal(0, 1, spec.shape).astype(DTYPES[spec.form.upper()])
        if spec.scales is not None:
            exponents = rng.integers(117, 121, spec.scales, np.uint8)
            tensors[scale_of(name)] = exponents.view(DTYPES["F8_E8M0"])
    return tensors


def published_config(cfg: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model in the form that DeepSeek publishes, FP8 in blocks of 128 x 128 included."""
    attention = cfg.attention
    return {
        "model_type": "deepseek_v4",
        "vocab_size": cfg.vocab_size,
        "hidden_size": attention.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "moe_intermediate_size": cfg.expert_width,
        "n_routed_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "n_shared_experts": 1,
        "routed_scaling_factor": cfg.routed_scale,
        "swiglu_limit": cfg.swiglu_limit,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_hash_layers": cfg.num_hash_layers,
        "hc_mult": cfg.num_streams,
        "hc_sinkhorn_iters": cfg.sinkhorn_iterations,
        "hc_eps": cfg.hyper_eps,
        "rms_norm_eps": attention.norm_eps,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": 1,
        "head_dim": attention.head_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "q_lora_rank": attention.q_lora_rank,
        "o_groups": attention.o_groups,
        "o_lora_rank": attention.o_lora_rank,
        "sliding_window": attention.sliding_window,
        "index_n_heads": attention.indexer_heads,
        "index_head_dim": attention.indexer_head_dim,
        "index_topk": attention.indexer_top_k,
        "compress_ratios": [*attention.compress_ratios, 0],
        "rope_theta": attention.rope_theta,
        "compress_rope_theta": attention.compress_rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": attention.yarn_factor,
            "original_max_position_embeddings": attention.yarn_original_max_position,
            "beta_fast": attention.yarn_beta_fast,
            "beta_slow": attention.yarn_beta_slow,
        },
        "eos_token_id": cfg.stop_tokens[0],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }


# ---- which tensors each weight of a model is made of

_MIX = {"weight": "fn", "base": "base", "scale": "scale"}
_BLOCK = {
    "attention.q_a_kv": ("attn.wq_a.weight", "attn.wkv.weight"),
    "attention.q_norm": ("attn.q_norm.weight",),
    "attention.kv_norm": ("attn.kv_norm.weight",),
    "attention.q_b": ("attn.wq_b.weight",),
    "attention.o_a": ("attn.wo_a.weight",),
    "attention.o_b": ("attn.wo_b.weight",),
    "attention.sinks": ("attn.attn_sink",),
    "attention.compress": (
        "attn.compressor.wkv.weight",
        "attn.compressor.wgate.weight",
        "attn.indexer.compressor.wkv.weight",
        "attn.indexer.compressor.wgate.weight",
        "attn.indexer.weights_proj.weight",
    ),
    "attention.entry_pool.ape": ("attn.compressor.ape",),
    "attention.entry_pool.norm": ("attn.compressor.norm.weight",),
    "attention.key_pool.ape": ("attn.indexer.compressor.ape",),
    "attention.key_pool.norm": ("attn.indexer.compressor.norm.weight",),
    "attention.index_q_b": ("attn.indexer.wq_b.weight",),
    "attention_norm": ("attn_norm.weight",),
    "experts_norm": ("ffn_norm.weight",),
    **{f"attention_mix.{ours}": (f"hc_attn_{theirs}",) for ours, theirs in _MIX.items()},
    **{f"experts_mix.{ours}": (f"hc_ffn_{theirs}",) for ours, theirs in _MIX.items()},
    "router.gate": ("ffn.gate.weight",),
    "router.bias": ("ffn.gate.bias",),
    "router.table": ("ffn.gate.tid2eid",),
    "experts.gate_up": ("ffn.experts.*.w1.weight", "ffn.experts.*.w3.weight"),
    "experts.down": ("ffn.experts.*.w2.weight",),
    "experts.shared_gate_up": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
    "experts.shared_down": ("ffn.shared_experts.w2.weight",),
}
_END = {"final_norm": ("norm.weight",)} | {f"final_mix.{ours}": (f"hc_head_{theirs}",) for ours, theirs in _MIX.items()}
_OUTER = _END | {"embedding": ("embed.weight",), "head": ("head.weight",)}
_DRAFTS = _END | {
    "token_norm": ("enorm.weight",),
    "stream_norm": ("hnorm.weight",),
    "token_proj": ("e_proj.weight",),
    "stream_proj": ("h_proj.weight",),
    **{f"block.{path}": names for path, names in _BLOCK.items()},
}


def sources(path: str, cfg: ModelConfig) -> list[list[str]]:
    """Return the tensors whose rows, in order, make the weight at a path such as "blocks[0].experts.down".

    There is a list for each expert, and one for what has no experts.
    """
    if layer := re.match(r"blocks\[(\d+)\]\.", path):
        prefix, names = f"layers.{layer[1]}.", _BLOCK[path[layer.end() :]]
    elif path.startswith("drafts."):
        prefix, names = "mtp.0.", _DRAFTS[path.removeprefix("drafts.")]
    else:
        prefix, names = "", _OUTER[path]
    known = model_tensors(cfg)
    count = cfg.num_experts if "*" in names[0] else 1
    groups = [[prefix + name.replace("*", str(expert)) for name in names] for expert in range(count)]
    return [[name for name in group if name in known] for group in groups]


@functools.cache
def recorded(model: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration of a recorded folder. Do not change them."""
    return read_folder(MODELS / model)


def with_fp8_experts(scales: str) -> Tensors:
    """Model q with experts in blocks of 128 x 128."""
    rng = np.random.default_rng(3)
    tensors = dict(recorded("q")[0])
    for name in [name for name in tensors if ".ffn.experts." in name and name.endswith(".weight")]:
        rows, columns = tensors[name].shape[0], 2 * tensors[name].shape[1]
        tensors[name] = rng.normal(0, 40, (rows, columns)).astype(E4M3)
        blocks = rows // 128, columns // 128
        if scales == "F8_E8M0":
            tensors[scale_of(name)] = rng.integers(110, 125, blocks, np.uint8).view(E8M0)
        else:  # no powers of two
            tensors[scale_of(name)] = rng.uniform(0.001, 0.1, blocks).astype(np.float32)
    return tensors
