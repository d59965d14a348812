"""Sizes of DeepSeek-V4's attention layers, and which kind of attention each layer uses.

A layer's kind follows from its compress ratio. Ratio 0 means sliding window only (SWA). The small ratio, 4 in the
published models, means compressed sparse attention (CSA), where an indexer picks the entries that a query reads. The
large ratio, 128, means heavily compressed attention (HCA), where a query reads every entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dsv4jax.checks import check_type, integer, integers, real
from dsv4jax.kinds import AttentionType

type Json = Any  # a value that JSON holds: of a config.json, or of what is written beside arrays


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of the schedule: its number in the model, and its kind."""

    layer_idx: int
    attn: AttentionType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DSV4Config:
    """Sizes of the attention layers. Frozen and hashable; change one with ``dataclasses.replace``.

    Whole numbers of any kind are taken, NumPy's too, and kept as ``int``.

    The defaults are V4-Flash's. Any sizes are legal that divide as they must: ``num_heads`` by ``o_groups``,
    ``rope_dim`` by two, and ``indexer_head_dim`` a power of two.

    Raises:
      ValueError: a size breaks one of those rules; the message names it.
    """

    hidden_size: int = 4096
    num_heads: int = 64
    head_dim: int = 512  # the last rope_dim of these dimensions carry the rotary embedding
    rope_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128  # number of keys that a query sees in the window, its own included
    compress_ratios: tuple[int, ...] = (0, 0) + (4, 128) * 20 + (4,)  # one ratio per layer; 0 = sliding window only
    csa_compression_ratio: int = 4
    hca_compression_ratio: int = 128
    indexer_heads: int = 64
    indexer_head_dim: int = 128
    indexer_top_k: int = 512
    rope_theta: float = 10000.0  # used by layers of ratio 0, without YaRN
    compress_rope_theta: float = 160000.0  # used by every rope of a compressed layer, with YaRN
    yarn_factor: float = 16.0
    yarn_original_max_position: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # whatever kinds of numbers came, Python's are kept
            object.__setattr__(self, field.name, _checked(field.name, field.type, getattr(self, field.name)))
        legal = {self.ratio(kind): kind.upper() for kind in AttentionType}
        if len(legal) != len(AttentionType):
            names = (_ratio_field(kind) for kind in AttentionType if kind.compresses)
            raise ValueError(f"{' and '.join(f'{name}={getattr(self, name)}' for name in names)} must differ")
        if not self.compress_ratios:
            raise ValueError("compress_ratios is empty: it holds one ratio per layer")
        if unknown := sorted(set(self.compress_ratios) - set(legal)):
            raise ValueError(f"compress_ratios holds {unknown}; each must be one of {legal}")
        if self.num_heads % self.o_groups:
            raise ValueError(f"num_heads={self.num_heads} must be divisible by o_groups={self.o_groups}")
        if self.rope_dim % 2 or not self.rope_dim < self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must be even and below head_dim={self.head_dim}")
        if self.rope_dim > self.indexer_head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must not exceed indexer_head_dim={self.indexer_head_dim}")
        if self.indexer_head_dim & (self.indexer_head_dim - 1):
            raise ValueError(f"indexer_head_dim={self.indexer_head_dim} must be a power of two (Hadamard rotation)")

    @property
    def num_layers(self) -> int:
        """Number of layers in the model."""
        return len(self.compress_ratios)

    @property
    def block_tokens(self) -> int:
        """Number of tokens that one block of the paged pool covers, in every layer: the lcm of all ratios (128)."""
        return math.lcm(*(self.ratio(kind) for kind in AttentionType if kind.compresses))

    def ratio(self, kind: AttentionType | str) -> int:
        """Return the number of tokens per compressed entry in layers of this kind; 0 for SWA."""
        kind = AttentionType(kind)  # a string will do, too
        return getattr(self, _ratio_field(kind)) if kind.compresses else 0

    @classmethod
    def flash(cls) -> Self:
        """Return the configuration of DeepSeek-V4-Flash: 43 layers, 64 heads, top-512."""
        return cls()

    @classmethod
    def pro(cls) -> Self:
        """Return the configuration of DeepSeek-V4-Pro: 61 layers, 128 heads, top-1024."""
        return cls(
            hidden_size=7168,
            num_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            indexer_top_k=1024,
            compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
        )

    @classmethod
    def tiny(cls, **overrides: Json) -> Self:
        """Return a configuration of three layers, one of each kind, small enough to step through by hand on a CPU.

        Args:
          overrides: fields to set to other values.
        """
        sizes: dict[str, Json] = dict(
            hidden_size=64,
            num_heads=4,
            head_dim=136,
            rope_dim=8,
            q_lora_rank=24,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=16,
            compress_ratios=(0, 4, 128),
            indexer_heads=16,
            indexer_top_k=12,
            yarn_original_max_position=64,
        )
        return cls(**(sizes | overrides))

    @classmethod
    def from_hf(cls, source: Mapping[str, Json] | str | os.PathLike[str]) -> Self:
        """Read a published configuration: DeepSeek's ``config.json``, or the one that transformers writes.

        DeepSeek appends the ratios of its MTP layers to the schedule. Ratios past ``num_hidden_layers`` are dropped.

        Args:
          source: the parsed configuration, the path of a ``config.json``, or the folder that contains one.

        Raises:
          ValueError: a key is missing, or the layer schedule is missing, too short or unknown. There is no default
            schedule, because a wrong one would give plausible but wrong outputs.
        """
        return cls(**_fields_from_hf(read_config(source)))

    def to_hf(self) -> dict[str, Json]:
        """Return the sizes under the names of DeepSeek's ``config.json``: what ``from_hf`` reads."""
        ours = {theirs: getattr(self, name) for name, theirs in _HF_KEYS.items()}
        rates = {kind.hf_name: self.ratio(kind) for kind in AttentionType if kind.compresses}
        return ours | {
            "num_hidden_layers": self.num_layers,
            "qk_rope_head_dim": self.rope_dim,
            "compress_ratios": list(self.compress_ratios),
            "compress_rates": rates,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.compress_rope_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.yarn_original_max_position,
                "beta_fast": self.yarn_beta_fast,
                "beta_slow": self.yarn_beta_slow,
            },
        }


def read_config(source: Mapping[str, Json] | str | os.PathLike[str]) -> Mapping[str, Json]:
    """Return a parsed configuration: what is given, or the content of a ``config.json``, or of the one in a folder.

    Raises ValueError if it cannot be parsed, and FileNotFoundError if there is none.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"cannot read {file}: expected a JSON object, got {found!r:.40}")
    return found


def _checked(name: str, kind: object, value: object) -> tuple[int, ...] | int | float:
    """A field's value as Python's own numbers. ValueError, naming the field, for what is none or not positive."""
    if name == "compress_ratios":
        return integers(name, value, "integers, one per layer")
    number = integer(name, value) if kind == "int" else real(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be positive, got {number}")
    return number


def layer_schedule(cfg: DSV4Config) -> tuple[LayerSpec, ...]:
    """Return the number and kind of every layer, in order."""
    kinds = {cfg.ratio(kind): kind for kind in AttentionType}
    return tuple(LayerSpec(i, kinds[ratio]) for i, ratio in enumerate(cfg.compress_ratios))


def _ratio_field(kind: AttentionType) -> str:
    """Return the name of the field that holds the ratio of a kind that compresses."""
    return f"{kind}_compression_ratio"


def layer_kind(cfg: DSV4Config, layer: int) -> AttentionType:
    """Return the kind of layer number ``layer``. Raises ValueError if the model has no such layer."""
    check_type("cfg", cfg, DSV4Config)
    layer = integer("layer", layer)
    if not 0 <= layer < cfg.num_layers:
        raise ValueError(f"layer must be in [0, {cfg.num_layers}), got {layer}")
    return layer_schedule(cfg)[layer].attn


_HF_KEYS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "indexer_heads": "index_n_heads",
    "indexer_head_dim": "index_head_dim",
    "indexer_top_k": "index_topk",
}


def _fields_from_hf(hf: Mapping[str, Json]) -> dict[str, Json]:
    if missing := [key for key in _HF_KEYS.values() if hf.get(key) is None]:
        raise ValueError(f"configuration lacks {missing}")
    fields = {ours: hf[theirs] for ours, theirs in _HF_KEYS.items()}
    fields |= _schedule_from_hf(hf) | _rope_from_hf(hf)
    if hf.get("qk_rope_head_dim") is not None:
        fields["rope_dim"] = hf["qk_rope_head_dim"]
    elif hf.get("partial_rotary_factor") is not None:
        factor = real("partial_rotary_factor", hf["partial_rotary_factor"])
        if not 0 < factor < 1:
            raise ValueError(f"partial_rotary_factor must be between 0 and 1, got {factor}")
        fields["rope_dim"] = round(integer("head_dim", hf["head_dim"], 1) * factor)
    else:
        raise ValueError("configuration lacks qk_rope_head_dim (or partial_rotary_factor)")
    return fields


def _schedule_from_hf(hf: Mapping[str, Json]) -> dict[str, Json]:
    """Read the layer schedule from DeepSeek's ``compress_ratios`` or transformers' ``layer_types``."""
    layers = hf.get("num_hidden_layers")
    if layers is None:
        raise ValueError("configuration lacks num_hidden_layers")
    types, ratios = hf.get("layer_types"), hf.get("compress_ratios")
    for key, kind in (("layer_types", list), ("compress_ratios", list), ("compress_rates", Mapping)):
        if not isinstance(hf.get(key), (kind, tuple, type(None))):
            raise ValueError(f"{key} must be a JSON {'list' if kind is list else 'object'}, got {hf[key]!r}")
    rates = hf.get("compress_rates") or {}
    published = DSV4Config.flash()
    by_kind = {kind: rates.get(kind.hf_name, published.ratio(kind)) if kind.compresses else 0 for kind in AttentionType}
    if types is not None:
        by_name = {kind.hf_name: ratio for kind, ratio in by_kind.items()}
        if unknown := sorted(set(types) - set(by_name)):
            raise ValueError(f"layer_types holds {unknown}; known are {sorted(by_name)}")
        ratios = [by_name[name] for name in types]
    if ratios is None:
        raise ValueError(
            f"configuration has no layer schedule: neither compress_ratios nor layer_types; its keys are {sorted(hf)}"
        )
    if len(ratios) < layers:
        raise ValueError(f"layer schedule has {len(ratios)} entries, num_hidden_layers is {layers}: {list(ratios)}")
    of_kinds = {_ratio_field(kind): ratio for kind, ratio in by_kind.items() if kind.compresses}
    return {"compress_ratios": tuple(ratios[:layers])} | of_kinds


def _json_object(name: str, value: object) -> Mapping[str, Json]:
    """A part of a configuration that must be an object, empty where it is null. ValueError, naming it, otherwise."""
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return value or {}


def _rope_from_hf(hf: Mapping[str, Json]) -> dict[str, Json]:
    """Read the rotary parameters from ``rope_scaling`` (DeepSeek) or ``rope_parameters`` (transformers).

    ``rope_parameters`` may be flat or keyed by "main" and "compress".
    """
    nested = _json_object("rope_parameters", hf.get("rope_parameters"))
    main = _json_object("rope_parameters.main", nested.get("main", nested))
    compress = _json_object("rope_parameters.compress", nested.get("compress", nested))
    scaling = _json_object("rope_scaling", hf.get("rope_scaling")) or compress
    wanted = {
        "yarn_factor": "factor",
        "yarn_original_max_position": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if missing := [key for key in wanted.values() if scaling.get(key) is None]:
        raise ValueError(f"rope_scaling / rope_parameters lacks {missing}; found {dict(scaling)}")
    inner = compress.get("rope_theta") if "compress" in nested else None
    thetas = {
        "rope_theta": hf.get("rope_theta", main.get("rope_theta")),
        "compress_rope_theta": hf.get("compress_rope_theta", inner),
    }
    if missing := [key for key, value in thetas.items() if value is None]:
        raise ValueError(f"configuration lacks {missing}")
    return thetas | {ours: scaling[theirs] for ours, theirs in wanted.items()}
