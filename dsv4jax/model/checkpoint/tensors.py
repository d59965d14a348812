"""The tensors of a checkpoint: names, shapes, how each is stored, and the three namings that exist.

Names are DeepSeek's here. Files that transformers wrote are translated: "hf" has the names of its modules
(``save_pretrained(save_original_format=False)``), "hf_saved" what ``save_pretrained`` writes by default.
"""

from __future__ import annotations

import dataclasses
import math

from dsv4jax.config import layer_kind
from dsv4jax.model.config import DSparkConfig, ModelConfig
from dsv4jax.weights.load import NAMINGS
from dsv4jax.weights.params import QUANTISED, named_shapes
from dsv4jax.weights.stored import BLOCK, num_blocks

FP4_BLOCK = (1, 32)  # rows and columns per scale of an FP4 weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a published checkpoint."""

    shape: tuple[int, ...]
    form: str  # "fp8", "fp4", "bf16", "f32" or "int64"

    @property
    def codes(self) -> tuple[int, ...]:
        """The shape as it is in the file: FP4 has two numbers per byte."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.form == "fp4" else self.shape

    @property
    def scales(self) -> tuple[int, int] | None:
        """The shape of the block scales; None for tensors without."""
        if self.form not in ("fp8", "fp4"):
            return None
        rows, columns = self.shape
        return num_blocks((rows, columns), BLOCK if self.form == "fp8" else FP4_BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""
        size = {"fp8": 1, "fp4": 1, "bf16": 2, "f32": 4, "int64": 8}[self.form]
        return math.prod(self.codes) * size + math.prod(self.scales or (0,))


def block_tensors(cfg: ModelConfig, layer: int | None) -> dict[str, TensorSpec]:
    """Return the tensors of a layer by their names in it, such as "attn.wq_a.weight". None means the draft block."""
    attention = cfg.draft_attention if layer is None else cfg.attention
    kind = layer_kind(attention, layer or 0)
    h, wide = cfg.hidden_size, cfg.expert_width
    specs: dict[str, TensorSpec] = {}
    for part, shape in named_shapes(attention, kind).items():
        form = "fp8" if part in QUANTISED else "f32" if part == "sinks" or part.endswith(".ape") else "bf16"
        specs[f"attn.{NAMINGS['deepseek'][part]}"] = TensorSpec(shape=shape, form=form)
    specs |= {name: TensorSpec(shape=(h,), form="bf16") for name in ("attn_norm.weight", "ffn_norm.weight")}
    numbers = (2 + cfg.num_streams) * cfg.num_streams
    for sublayer in ("hc_attn", "hc_ffn"):
        specs |= _mix(sublayer, numbers, 3, cfg)
    specs["ffn.gate.weight"] = TensorSpec(shape=(cfg.num_experts, h), form="bf16")
    if cfg.picks_by_id(layer):
        specs["ffn.gate.tid2eid"] = TensorSpec(shape=(cfg.vocab_size, cfg.experts_per_token), form="int64")
    else:
        specs["ffn.gate.bias"] = TensorSpec(shape=(cfg.num_experts,), form="f32")
    for group, form in [*((f"experts.{e}", "fp4") for e in range(cfg.num_experts)), ("shared_experts", "fp8")]:
        for weight, shape in (("w1", (wide, h)), ("w2", (h, wide)), ("w3", (wide, h))):
            specs[f"ffn.{group}.{weight}.weight"] = TensorSpec(shape=shape, form=form)
    return specs


def outer_tensors(cfg: ModelConfig) -> dict[str, TensorSpec]:
    """Return the tensors outside layers."""
    table = TensorSpec(shape=(cfg.vocab_size, cfg.hidden_size), form="bf16")
    norm = TensorSpec(shape=(cfg.hidden_size,), form="bf16")
    return {"embed.weight": table, "norm.weight": norm, "head.weight": table} | _mix("hc_head", cfg.num_streams, 1, cfg)


def draft_tensors(cfg: ModelConfig) -> dict[str, TensorSpec]:
    """Return the tensors of the block for drafts, whose names begin with "mtp.", a stage and a dot."""
    named = [_mtp_tensors(cfg)] if cfg.dspark is None else _dspark_tensors(cfg, cfg.dspark)
    return {f"mtp.{stage}.{name}": spec for stage, specs in enumerate(named) for name, spec in specs.items()}


def _mtp_tensors(cfg: ModelConfig) -> dict[str, TensorSpec]:
    square = TensorSpec(shape=(cfg.hidden_size, cfg.hidden_size), form="fp8")
    norm = TensorSpec(shape=(cfg.hidden_size,), form="bf16")
    specs = {"e_proj.weight": square, "h_proj.weight": square}
    specs |= dict.fromkeys(("enorm.weight", "hnorm.weight", "norm.weight"), norm)
    return block_tensors(cfg, None) | specs | _mix("hc_head", cfg.num_streams, 1, cfg)


def _dspark_tensors(cfg: ModelConfig, sizes: DSparkConfig) -> list[dict[str, TensorSpec]]:
    """Return the tensors of each stage. Its input belongs to the first, and its heads belong to the last."""
    h, table = cfg.hidden_size, TensorSpec(shape=(cfg.vocab_size, sizes.rank), form="bf16")
    norm = TensorSpec(shape=(h,), form="bf16")
    stages = [block_tensors(cfg, None) for _ in range(sizes.stages)]
    stages[0] |= {"main_proj.weight": TensorSpec(shape=(h, len(sizes.taps) * h), form="fp8"), "main_norm.weight": norm}
    stages[-1] |= {
        "norm.weight": norm,
        **_mix("hc_head", cfg.num_streams, 1, cfg),
        "markov_head.markov_w1.weight": table,
        "markov_head.markov_w2.weight": table,
        "confidence_head.proj.weight": TensorSpec(shape=(1, h + sizes.rank), form="bf16"),
    }
    return stages


def model_tensors(cfg: ModelConfig, drafts: int = 1) -> dict[str, TensorSpec]:
    """Return all tensors of a checkpoint by DeepSeek's names, without those of the draft block if ``drafts`` is 0."""
    specs = outer_tensors(cfg)
    for layer in range(cfg.num_layers):
        specs |= {f"layers.{layer}.{name}": spec for name, spec in block_tensors(cfg, layer).items()}
    return specs | (draft_tensors(cfg) if drafts else {})


def _mix(name: str, numbers: int, scales: int, cfg: ModelConfig) -> dict[str, TensorSpec]:
    shapes = {"fn": (numbers, cfg.num_streams * cfg.hidden_size), "base": (numbers,), "scale": (scales,)}
    return {f"{name}_{part}": TensorSpec(shape=shape, form="f32") for part, shape in shapes.items()}


# Names outside attention, as DeepSeek and transformers' modules have them.
_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{ours}_{part}": f"{ours}_hc.{part}" for ours in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **{f"attn.{name}": f"self_attn.{NAMINGS['hf'][part]}" for part, name in NAMINGS["deepseek"].items()},
}
_SAVED_IN_LAYER = {f"attn.{NAMINGS['deepseek'][part]}": f"attn.{name}" for part, name in NAMINGS["hf_saved"].items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is in a checkpoint: one of its tensors, or rows of one expert of a tensor that holds them all."""

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def place_of(name: str, naming: str, cfg: ModelConfig) -> Place:
    """Return where the tensor that DeepSeek calls ``name`` is in a checkpoint of a naming, a key of ``NAMINGS``."""
    if naming == "deepseek":
        return Place(name=name)
    if name in _OUTER:
        return Place(name="head.weight" if (naming, name) == ("hf_saved", "head.weight") else _OUTER[name])
    _, layer, inner = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if naming == "hf_saved":
        return Place(name=prefix + _SAVED_IN_LAYER.get(inner, inner))
    if inner.startswith("ffn.experts."):
        _, _, expert, weight, _ = inner.split(".")
        wide = cfg.expert_width
        if weight == "w2":
            return Place(name=prefix + "mlp.experts.down_proj", expert=int(expert), rows=(0, cfg.hidden_size))
        rows = (0, wide) if weight == "w1" else (wide, 2 * wide)
        return Place(name=prefix + "mlp.experts.gate_up_proj", expert=int(expert), rows=rows)
    return Place(name=prefix + _IN_LAYER[inner])


def naming_of(names: set[str]) -> str | None:
    """Return the naming of a checkpoint with tensors of these names, or None if it has none that is known."""
    marks = {"embed.weight": "deepseek", "lm_head.weight": "hf", "model.embed_tokens.weight": "hf_saved"}
    return next((naming for mark, naming in marks.items() if mark in names), None)
