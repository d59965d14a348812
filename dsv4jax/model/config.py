"""Sizes of a whole DeepSeek-V4 model: those of its attention layers, and those of everything around them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from typing import Self

from dsv4jax.checks import integer, integers, real
from dsv4jax.config import DSV4Config, Json, read_config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """Sizes of a DSpark block, which guesses several tokens at a time. The defaults are V4-Flash-0731's.

    Raises:
      ValueError: a size is not positive, or the taps are not ascending layer numbers; the message names it.
    """

    block_size: int = 5  # tokens that one run guesses
    noise_token: int = 128799  # stands in the block for tokens that are not known yet
    taps: tuple[int, ...] = (40, 41, 42)  # the model's layers, from 0, whose streams the block is made from
    rank: int = 256  # of the head by which a token depends on the one before it
    stages: int = 3  # layers of the block

    def __post_init__(self) -> None:
        for name in ("block_size", "rank", "stages"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        object.__setattr__(self, "noise_token", integer("noise_token", self.noise_token, 0))
        taps = integers("taps", self.taps, "layer numbers", 0)
        if not taps or list(taps) != sorted(set(taps)):
            raise ValueError(f"taps must be ascending layer numbers, at least one, got {taps}")
        object.__setattr__(self, "taps", taps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a model. Frozen and hashable; change one with ``dataclasses.replace``. The defaults are V4-Flash's.

    Raises:
      ValueError: a size is not positive, or more experts are picked than there are; the message names it.
    """

    attention: DSV4Config = dataclasses.field(default_factory=DSV4Config)
    vocab_size: int = 129280
    expert_width: int = 2048  # moe_intermediate_size, of routed experts and of the shared one
    num_experts: int = 256
    experts_per_token: int = 6
    num_hash_layers: int = 3  # the first layers, which pick experts by the token's id
    routed_scale: float = 1.5  # the picked experts' weights add up to this
    swiglu_limit: float = 10.0  # clamp inside experts; 0 = none
    num_streams: int = 4  # residual streams per token, hc_mult
    sinkhorn_iterations: int = 20
    hyper_eps: float = 1e-6
    stop_tokens: tuple[int, ...] = (1,)  # eos
    dspark: DSparkConfig | None = None  # of a block for drafts of that kind; None for one by multi-token prediction

    def __post_init__(self) -> None:
        least = {"num_hash_layers": 0, "sinkhorn_iterations": 1}
        for field in dataclasses.fields(self):
            if field.type == "int":
                value = integer(field.name, getattr(self, field.name), least.get(field.name, 1))
                object.__setattr__(self, field.name, value)
        for name in ("routed_scale", "swiglu_limit", "hyper_eps"):
            number = real(name, getattr(self, name))
            if not 0 <= number < math.inf or (number == 0 and name != "swiglu_limit"):
                raise ValueError(f"{name} must be positive, got {number}")
            object.__setattr__(self, name, number)
        object.__setattr__(self, "stop_tokens", integers("stop_tokens", self.stop_tokens, "token ids", 0))
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        if self.num_hash_layers > self.num_layers:
            raise ValueError(f"num_hash_layers={self.num_hash_layers} exceeds the model's {self.num_layers} layers")
        if self.dspark is not None:
            if self.dspark.noise_token >= self.vocab_size:
                raise ValueError(f"dspark: noise_token={self.dspark.noise_token} is not in [0, {self.vocab_size})")
            if self.dspark.taps[-1] >= self.num_layers:
                raise ValueError(f"dspark: taps={self.dspark.taps} exceed the model's {self.num_layers} layers")

    @property
    def hidden_size(self) -> int:
        return self.attention.hidden_size

    @property
    def num_layers(self) -> int:
        """Layers of the model, without those for drafts."""
        return self.attention.num_layers

    @property
    def norm_eps(self) -> float:
        return self.attention.norm_eps

    @property
    def draft_attention(self) -> DSV4Config:
        """Sizes of the attention of the block that makes drafts: layers with a window alone."""
        return dataclasses.replace(self.attention, compress_ratios=(0,) * self.draft_layers)

    @property
    def draft_layers(self) -> int:
        """Layers of the block that makes drafts."""
        return 1 if self.dspark is None else self.dspark.stages

    def picks_by_id(self, layer: int | None) -> bool:
        """Whether a layer picks experts by token id, and not by score. The draft block, None, never does."""
        return layer is not None and layer < self.num_hash_layers

    @classmethod
    def flash(cls) -> Self:
        """Return the configuration of DeepSeek-V4-Flash: 43 layers, 256 experts."""
        return cls()

    @classmethod
    def pro(cls) -> Self:
        """Return the configuration of DeepSeek-V4-Pro: 61 layers, 384 experts."""
        return cls(attention=DSV4Config.pro(), expert_width=3072, num_experts=384, routed_scale=2.5)

    @classmethod
    def tiny(cls, **overrides: Json) -> Self:
        """Return a configuration of three layers, one of each kind of attention, that runs anywhere.

        Args:
          overrides: fields to set to other values.
        """
        sizes: dict[str, Json] = dict(
            attention=DSV4Config.tiny(head_dim=72),  # with the formats of trained models, 64 dims without rope
            vocab_size=256,
            expert_width=32,
            num_experts=8,
            experts_per_token=3,
            num_hash_layers=1,
            swiglu_limit=2.0,
        )
        return cls(**(sizes | overrides))

    @classmethod
    def from_hf(cls, source: Mapping[str, Json] | str | os.PathLike[str]) -> Self:
        """Read a published configuration: DeepSeek's ``config.json``, or the one that transformers writes.

        Args:
          source: the parsed configuration, the path of a ``config.json``, or the folder that contains one.

        Raises:
          ValueError: a key is missing, is of another type, or names a model of another architecture.
        """
        fields = read_config(source)
        kind = fields.get("model_type")
        what = "configuration" if kind in (None, "deepseek_v4") else f"configuration of a {kind!r} model"
        if missing := [key for key in (*_SIZES.values(), "num_hidden_layers") if fields.get(key) is None]:
            raise ValueError(f"{what} lacks {missing}")
        for key, value in _FIXED.items():
            if fields.get(key, value) != value:
                raise ValueError(f"{what} has {key}={fields[key]!r}; only {value!r} is known")
        layers, limit, eos = fields["num_hidden_layers"], fields.get("swiglu_limit"), fields.get("eos_token_id")
        integer("num_hidden_layers", layers, 1)
        limit = 0.0 if limit is None else real("swiglu_limit", limit)
        ends = () if eos is None else eos if isinstance(eos, list | tuple) else (eos,)
        sizes: dict[str, Json] = {  # checked under the names that they have in the file
            ours: real(key, fields[key]) if key in _REAL else integer(key, fields[key], 1)
            for ours, key in _SIZES.items()
        }
        return cls(
            attention=DSV4Config.from_hf(fields),
            num_hash_layers=_hash_layers(fields),
            swiglu_limit=0.0 if limit < 0 else limit,  # none, as 0 is
            stop_tokens=tuple(integer("eos_token_id", token, 0) for token in ends),
            dspark=_dspark(fields),
            **sizes,
        )

    def to_hf(self) -> dict[str, Json]:
        """Return the configuration under the names of DeepSeek's ``config.json``: what ``from_hf`` reads."""
        ends = self.stop_tokens
        attention = self.attention.to_hf()
        if self.dspark is not None:  # the block's stages follow the model's layers
            attention["compress_ratios"] = [*attention["compress_ratios"], *[0] * self.dspark.stages]
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **attention,
            **{theirs: getattr(self, name) for name, theirs in _SIZES.items()},
            "num_hash_layers": self.num_hash_layers,
            "swiglu_limit": self.swiglu_limit,
            "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
            **_FIXED,
            **({} if self.dspark is None else {key: getattr(self.dspark, ours) for ours, key in _DSPARK.items()}),
        }


_SIZES = {
    "vocab_size": "vocab_size",
    "expert_width": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "routed_scale": "routed_scaling_factor",
    "num_streams": "hc_mult",
    "sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_eps": "hc_eps",
}
_DSPARK = {
    "block_size": "dspark_block_size",
    "noise_token": "dspark_noise_token_id",
    "taps": "dspark_target_layer_ids",
    "rank": "dspark_markov_rank",
}
_REAL = ("routed_scaling_factor", "hc_eps")
# What every published model has. norm_topk_prob is read by no one: the weights of picks are always normalised.
_FIXED = {
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def _hash_layers(source: Mapping[str, Json]) -> int:
    """Read DeepSeek's ``num_hash_layers``, or count the first entries of transformers' ``mlp_layer_types``."""
    kinds = source.get("mlp_layer_types")
    if kinds is None:
        if source.get("num_hash_layers") is None:
            raise ValueError("configuration lacks num_hash_layers (or mlp_layer_types)")
        return source["num_hash_layers"]
    kinds = list(kinds) if isinstance(kinds, Iterable) else kinds
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * count + ["moe"] * (source["num_hidden_layers"] - count):
        raise ValueError(f"mlp_layer_types must be hash_moe for the first layers and moe for the rest, got {kinds}")
    return count


def _dspark(source: Mapping[str, Json]) -> DSparkConfig | None:
    """Read the sizes of a DSpark block; None if the configuration has none."""
    given = {ours: source[key] for ours, key in _DSPARK.items() if source.get(key) is not None}
    if not given:
        return None
    if missing := [key for ours, key in _DSPARK.items() if ours not in given]:
        raise ValueError(f"configuration has a DSpark block and lacks {missing}")
    ratios, layers = source.get("compress_ratios"), source["num_hidden_layers"]
    stages = len(ratios) - layers if isinstance(ratios, list | tuple) else 0
    if stages < 1:
        raise ValueError("configuration has a DSpark block: compress_ratios must end with a 0 for each of its stages")
    return DSparkConfig(**given, stages=stages)
