"""Low-rank deltas in files, under PEFT's names."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.model import (
    load_deltas,
    load_model,
    merge_deltas,
    partition,
    save_deltas,
    save_model,
    with_deltas,
    without_deltas,
)
from dsv4jax.model.deltas import deltas_of
from dsv4jax.weights.files import NewTensor, read_header, write_file
from tests.model.test_deltas import CFG, model, tuned
from tests.support.driver import assert_same

PREFIX = "base_model.model.model.layers"


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    tensors = read_header(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, {name: tensor.read() for name, tensor in tensors.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    given = {
        name: NewTensor(dtype=array.dtype, shape=array.shape, make=lambda array=array: array)
        for name, array in tensors.items()
    }
    write_file(folder / "adapter_model.safetensors", given)
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_deltas_come_back_bit_for_bit(dtype, tmp_path):
    deltas, rest = partition(tuned("stored"), "deltas")
    params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, dtype)), deltas)
    params = jax.tree.map(lambda a, b: b if a is None else a, params, rest, is_leaf=lambda node: node is None)
    save_deltas(params, tmp_path / "tuned")
    assert_same(load_deltas(model("stored"), tmp_path / "tuned"), params)


def test_ranks_and_factors_of_each_weight_come_back(tmp_path):
    params = with_deltas(model("f32"), {"q_b": 3, "experts.down": 2}, jax.random.key(0))
    params = with_deltas(params, {"q_a": 5, "router": 1}, jax.random.key(1), alpha=7.0)
    only_one = dataclasses.replace(params, blocks=(params.blocks[0], *without_deltas(params.blocks[1:])))
    for number, given in enumerate((params, only_one)):
        save_deltas(given, tmp_path / str(number))
        assert_same(load_deltas(model("f32"), tmp_path / str(number)), given)
    config, _ = read(tmp_path / "0")
    assert set(config["target_modules"]) == {"self_attn.q_a_proj", "self_attn.q_b_proj"}
    assert set(config["target_parameters"]) == {"mlp.experts.down_proj", "mlp.gate.weight"}
    config, _ = read(tmp_path / "1")
    assert set(config["target_modules"]) == {f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "q_b_proj")}


def test_names_and_shapes_are_those_of_peft(tmp_path):
    """Its formulas: W + alpha / r * B A; of experts, einsum("o r e, e r i -> e o i") of B and A reshaped."""
    save_deltas(tuned("f32"), tmp_path / "tuned")
    config, tensors = read(tmp_path / "tuned")
    assert (config["peft_type"], config["bias"], config["lora_alpha"]) == ("LORA", "none", 4.0)
    base: Any = model("f32").blocks[1]
    merged: Any = jax.jit(merge_deltas)(tuned("f32").blocks[1])
    attention, rank = CFG.attention, 3

    def product(module: str, rank: int) -> np.ndarray:
        down, up = (tensors[f"{PREFIX}.1.{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        return 4.0 / rank * (up @ down)

    q_a_kv = np.concatenate([product("self_attn.q_a_proj", rank), product("self_attn.kv_proj", rank)])
    compressor, indexer = "self_attn.compressor", "self_attn.compressor.indexer"
    modules = [f"{compressor}.kv_proj", f"{compressor}.gate_proj", f"{indexer}.kv_proj", f"{indexer}.gate_proj"]
    compress = np.concatenate([product(name, 2) for name in (*modules, f"{indexer}.scorer.weights_proj")])
    shared = np.concatenate([product(f"mlp.shared_experts.{name}_proj", 2) for name in ("gate", "up")])
    found = {
        "q_a_kv": (q_a_kv, merged.attention.q_a_kv - base.attention.q_a_kv),
        "compress": (compress, merged.attention.compress - base.attention.compress),
        "index_q_b": (product(f"{indexer}.q_b_proj", 2), merged.attention.index_q_b - base.attention.index_q_b),
        "shared": (shared, merged.experts.shared_gate_up - base.experts.shared_gate_up),
        "router": (product("mlp.gate", 2), merged.router.gate - base.router.gate),
    }
    for part, inputs, rows in (
        ("mlp.experts.base_layer", attention.hidden_size, 2 * CFG.expert_width),
        ("mlp.experts", CFG.expert_width, attention.hidden_size),
    ):
        down, up = (np.float64(tensors[f"{PREFIX}.1.{part}.lora_{half}.weight"]) for half in "AB")
        down, up = down.reshape(CFG.num_experts, 2, inputs), up.reshape(rows, 2, CFG.num_experts)
        field = "gate_up" if part.endswith("base_layer") else "down"
        change = getattr(merged.experts, field) - getattr(base.experts, field)
        found[field] = 4.0 / 2 * np.einsum("ore,eri->eoi", up, down), change
    assert "base_model.model.lm_head.lora_A.weight" in tensors
    for name, (wanted, change) in found.items():
        np.testing.assert_allclose(change, wanted, rtol=0, atol=2e-6, err_msg=name)  # f32 sums of numbers of size 1


def test_what_peft_writes_besides_is_understood(tmp_path):
    """Factors by the square root of the rank, patterns that match the ends of names, one delta of experts alone."""
    params = with_deltas(model("f32"), {"q_b": 4, "experts.gate_up": 2}, jax.random.key(0), alpha=1.0)
    save_deltas(params, tmp_path / "ours")
    config, tensors = read(tmp_path / "ours")
    config |= {"use_rslora": True, "lora_alpha": 3.0, "alpha_pattern": {"q_b_proj": 5.0}, "eva_config": None}
    write(tmp_path / "theirs", config, tensors)
    found = deltas_of(load_deltas(model("f32"), tmp_path / "theirs"))
    assert {(target.name, round(delta.scale, 6)) for target, delta in found.items()} == {
        ("q_b", round(5 / 4**0.5, 6)),
        ("experts.gate_up", round(3 / 2**0.5, 6)),
    }


def test_what_is_not_served_is_named(tmp_path):
    params = with_deltas(model("f32"), {"q_b": 2, "experts": 1}, jax.random.key(0))
    save_deltas(params, tmp_path / "ours")
    config, tensors = read(tmp_path / "ours")
    name = f"{PREFIX}.0.self_attn.q_b_proj.lora_A.weight"
    experts = f"{PREFIX}.0.mlp.experts.lora_A.weight"
    bad: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
        "dora": ({"use_dora": True}, {}, "use_dora=True, which is not served"),
        "another": ({"peft_type": "IA3"}, {}, "peft_type='IA3', which is not served"),
        "unknown": (
            {},
            {f"{PREFIX}.0.q.lora_{half}.weight": tensors[name] for half in "AB"},
            "takes 'model.layers.0.q'",
        ),
        "shape": ({}, {name: tensors[name][:, :-1]}, "takes 'model.layers.0.self_attn.q_b_proj' with lora_A"),
        "swapped": ({}, {experts: np.ascontiguousarray(tensors[experts].T)}, "takes 'model.layers.0.mlp.experts' with"),
        "magnitude": ({}, {f"{PREFIX}.0.self_attn.q_b_proj.lora_magnitude": tensors[name][0]}, "is no factor"),
    }
    for case, (more, other, message) in bad.items():
        write(tmp_path / case, config | more, tensors | other)
        with pytest.raises(ValueError, match=message):
            load_deltas(model("f32"), tmp_path / case)
    write(tmp_path / "null", config | {"lora_alpha": None}, tensors)
    with pytest.raises(ValueError, match=r"the alpha of model\.layers\.0\..* must be a number, got None"):
        load_deltas(model("f32"), tmp_path / "null")
    without_alpha = {key: value for key, value in config.items() if key != "lora_alpha"}
    unread = {
        "lacks": (json.dumps(without_alpha), r"lacks.adapter_config\.json lacks 'lora_alpha'"),
        "list": ("[]", r"cannot read .*adapter_config\.json: expected a JSON object, got \[\]"),
        "broken": ('{"r": ', r"cannot read .*adapter_config\.json: Expecting value"),
    }
    for case, (text, message) in unread.items():
        write(tmp_path / case, {}, tensors)
        (tmp_path / case / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_deltas(model("f32"), tmp_path / case)
    for call in (load_deltas, save_deltas):
        swapped: Any = tmp_path / "ours", params
        with pytest.raises(ValueError, match=r"params: expected a ModelParams, got .*Path"):
            call(*swapped)
    write(tmp_path / "half", config, {name: tensors[name]})
    with pytest.raises(ValueError, match=r"q_b_proj' has 'lora_A\.weight' alone"):
        load_deltas(model("f32"), tmp_path / "half")
    with pytest.raises(ValueError, match="has a delta already"):
        load_deltas(params, tmp_path / "ours")
    with pytest.raises(ValueError, match="params have no low-rank deltas"):
        save_deltas(model("f32"), tmp_path / "none")
    with pytest.raises(FileExistsError):
        save_deltas(tuned("f32"), tmp_path / "ours")
    assert not list(tmp_path.glob("*.partial"))


def test_a_merged_model_is_saved_as_any_other(tmp_path):
    """Weights that were stored are wide in its file, as loading says; the others stay FP8 and FP4."""
    params = with_deltas(model("stored"), {"q_b": 3, "experts.down": 2}, jax.random.key(0))
    merged = jax.jit(merge_deltas, static_argnames="widen")(params, widen=jnp.bfloat16)
    save_model(merged, tmp_path / "merged")
    assert_same(load_model(tmp_path / "merged"), merged)
