"""Folders that are refused: every error names what is wrong, before a weight is placed."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4jax.model import load_model
from tests.support.model_folders import (
    E4M3,
    E8M0,
    MODELS,
    Tensors,
    file_bytes,
    recorded,
    scale_of,
    with_fp8_experts,
    write_folder,
)


def without(tensors: Tensors, pattern: str) -> Tensors:
    kept = {name: value for name, value in tensors.items() if not re.search(pattern, name)}
    assert len(kept) < len(tensors)
    return kept


def with_nvfp4_experts() -> Tensors:
    """Model q with scales per 16 numbers, and one per tensor, for its experts."""
    tensors, _ = recorded("q")
    found = without(tensors, r"\.ffn\.experts\..*\.scale")
    for name in tensors.keys() - found.keys():
        rows, pairs = tensors[name.removesuffix("scale") + "weight"].shape
        found[name.removesuffix("scale") + "weight_scale"] = np.ones((rows, pairs // 8), E4M3)
        found[name.removesuffix("scale") + "weight_scale_2"] = np.ones((), np.float32)
    return found


def refused(folder: Path, error: type[Exception] = ValueError, **options: Any) -> str:
    """Load a folder that is refused, and return the message. No weight may have been read, so none was placed."""
    calls: list[tuple[int, int]] = []
    with pytest.raises(error) as caught:
        load_model(folder, on_progress=lambda *call: calls.append(call), **options)
    assert calls == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "a",
            lambda tensors: without(tensors, r"layers\.3\.ffn\.experts"),
            "missing (24): layers.3.ffn.experts.0.w1.weight, layers.3.ffn.experts.0.w2.weight, "
            "layers.3.ffn.experts.0.w3.weight, layers.3.ffn.experts.1.w1.weight, layers.3.ffn.experts.1.w2.weight, "
            "and 19 more",
        ),
        ("a", lambda tensors: without(tensors, r"mtp\.0\.hnorm"), "missing (1): mtp.0.hnorm.weight"),
        ("a", lambda tensors: tensors | {"layers.9.x": np.zeros(2, np.float32)}, "unknown (1): layers.9.x"),
        (
            "q",
            lambda tensors: without(tensors, r"layers\.0\.attn\.wq_a\.scale|layers\.1\.ffn\.experts\.2\.w2\.scale"),
            "misshapen (2): layers.0.attn.wq_a.weight is F8_E4M3 [128, 128], and has no block scales, "
            "layers.1.ffn.experts.2.w2.weight is I8 [128, 128], and has no block scales",
        ),
        (
            "q",
            lambda _: with_fp8_experts("F32") | {"layers.1.ffn.experts.2.w2.scale": np.ones((2, 1), E8M0)},
            "misshapen (1): layers.1.ffn.experts.2.w2.weight is F8_E4M3 [128, 256], and block scales of shape (2, 1) "
            "do not fit a weight of shape (128, 256)",
        ),
        (
            "q",
            lambda tensors: tensors | {"layers.1.attn.wq_b.scale": np.full((2, 1), 0.3, np.float32)},
            "for weights='wide', 'bf16' or 'f32' alone (1): layers.1.attn.wq_b.weight, "
            "whose block scales are not all powers of two",
        ),
        ("q", lambda _: with_nvfp4_experts(), "unknown (96): layers.0.ffn.experts.0.w1.weight_scale, "),
    ],
    ids=["missing", "missing of drafts", "unknown", "no scales", "FP8 experts", "no powers of two", "NVFP4"],
)
def test_what_does_not_fit_is_named_before_anything_is_placed(tmp_path, model, change, message):
    tensors, config = recorded(model)
    found = refused(write_folder(tmp_path, change(tensors), config))
    assert f"{tmp_path} is no checkpoint of this configuration:" in found
    assert message in found


F8, FP4_EXPERT = "F8_E4M3 [256, 128]", "layers.0.ffn.experts.2.w2"


@pytest.mark.parametrize(
    ("model", "name", "value", "problem"),
    [
        ("a", "norm.weight", np.zeros(63, np.float32), "F32 [63], expected BF16 or F32 [64]"),
        ("a", "norm.weight", np.zeros(64, np.float16), "F16 [64], expected BF16 or F32 [64]"),
        ("a", "layers.0.ffn.gate.tid2eid", np.zeros(9, np.float32), "F32 [9], expected I64 or I32 [256, 3]"),
        ("a", "layers.0.attn.wq_a.scale", np.ones((1, 1), np.float32), "BF16 [24, 64], and has block scales"),
        (
            *("q", "layers.1.attn.wq_b.scale", np.ones((3, 1), E8M0)),
            f"{F8}, and block scales of shape (3, 1) do not fit a weight of shape (256, 128) in blocks of 128 x 128",
        ),
        (
            *("q", "layers.1.attn.wq_b.scale", np.ones((2, 1), ml_dtypes.bfloat16)),
            f"{F8}, with scales that are BF16, expected F8_E8M0 or F32",
        ),
        (
            *("q", f"{FP4_EXPERT}.scale", np.ones((128, 4), E8M0)),
            "I8 [128, 128], and block scales of shape (128, 4) do not fit a weight of shape (128, 256) "
            "in blocks of 1 x 32",
        ),
        (
            *("q", f"{FP4_EXPERT}.weight", np.ones((128, 64), np.int8)),
            "I8 [128, 64], expected BF16 or F32 or F8_E4M3 [128, 256], or I8 [128, 128]",
        ),
    ],
)
def test_a_misshapen_tensor_is_named(tmp_path, model, name, value, problem):
    tensors, config = recorded(model)
    found = refused(write_folder(tmp_path, tensors | {name: value}, config))
    assert found.splitlines()[1:] == [f"  misshapen (1): {name.replace('.scale', '.weight')} is {problem}"]


def test_one_error_names_everything(tmp_path):
    tensors, config = recorded("a")
    wrong = without(tensors, r"^head\.weight|layers\.4\.attn\.wo_a")
    wrong |= {"norm.weight": np.zeros(3, np.float32), "embed.weight": np.zeros((256, 1), np.float32)}
    found = refused(write_folder(tmp_path, wrong | {"more": np.zeros(1, np.float32)}, config, shards=2))
    assert found.splitlines()[1:] == [
        "  misshapen (2): embed.weight is F32 [256, 1], expected BF16 or F32 [256, 64], "
        "norm.weight is F32 [3], expected BF16 or F32 [64]",
        "  missing (2): head.weight, layers.4.attn.wo_a.weight",
        "  unknown (1): more",
    ]


def with_nan(name: str) -> Tensors:
    return {f"{name}.weight": np.full((256, 128), np.nan, E4M3), f"{name}.scale": np.ones((2, 1), E8M0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan("layers.1.attn.wq_b"), "layer 1: tensor 'wq_b.weight': 32768 of its FP8 codes are NaN"),
        (with_nan("mtp.0.attn.wq_b"), "draft block, layer 0: tensor 'wq_b.weight': 32768 of its FP8 codes are NaN"),
        *[
            (with_nan(f"layers.1.ffn.{w}"), f"tensor 'layers.1.ffn.{w}.weight': 32768 of its FP8 codes are NaN")
            for w in ("shared_experts.w1", "experts.0.w1")
        ],
        *[
            (
                {"layers.0.ffn.gate.tid2eid": np.repeat([[0, 3], [expert, 1]], [255, 1], 0)},
                "tensor 'layers.0.ffn.gate.tid2eid' names experts that are not in [0, 4)",
            )
            for expert in (4, -1)
        ],
        (
            {"layers.1.ffn.shared_experts.w3.weight": np.ones((256, 128), np.float32)},
            "tensor 'layers.1.ffn.shared_experts.w1.weight' and tensor 'layers.1.ffn.shared_experts.w3.weight': "
            "weights that one input feeds must all be stored as FP8, or none of them",
        ),
    ],
)
def test_values_that_cannot_be_stored_are_named(tmp_path, change, message):
    """Values, unlike shapes, are known only when a tensor is read."""
    tensors, config = recorded("q")
    tensors = {name: value for name, value in tensors.items() if name not in {scale_of(new) for new in change}}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_model(write_folder(tmp_path, tensors | change, config))


def test_tensors_in_two_files_and_in_none(tmp_path):
    tensors, config = recorded("a")
    write_folder(tmp_path, tensors, config, shards=2)
    (tmp_path / "more.safetensors").write_bytes(file_bytes({"norm.weight": tensors["norm.weight"]}))
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": files | {"a": "more.safetensors", "b": files["head.weight"]}}))
    assert refused(tmp_path).splitlines()[1:] == ["  in two files (1): norm.weight", "  missing (2): a, b"]


@pytest.mark.parametrize("size", [0, 7, 500, -1], ids=["empty", "no length", "within the header", "a byte short"])
def test_truncated_files_are_named(tmp_path, size):
    write_folder(tmp_path, *recorded("a"), shards=3)
    for number in (1, 3):
        file = tmp_path / f"model-0000{number}-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:size])
    found = refused(tmp_path)
    assert "files that cannot be read (2): cannot read " in found
    assert "model-00001-of-00003.safetensors" in found
    assert "model-00003-of-00003.safetensors" in found
    assert "model-00002-of-00003.safetensors" not in found


def test_files_that_the_index_names_must_be_there(tmp_path):
    write_folder(tmp_path, *recorded("a"), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    found = refused(tmp_path)
    assert re.search(r"files that cannot be read \(1\): cannot read .*model-00002-of-00003.safetensors: No such", found)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    write_folder(tmp_path, *recorded("a"), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    assert f"cannot read {index}: expected JSON with a 'weight_map' of tensor names" in refused(tmp_path)


def test_folders_without_a_model(tmp_path):
    assert "config.json" in refused(tmp_path, FileNotFoundError)
    write_folder(tmp_path, recorded("a")[0], None)
    assert "config.json" in refused(tmp_path, FileNotFoundError)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(recorded("a")[1]))
    assert refused(tmp_path, FileNotFoundError) == f"no *.safetensors in {tmp_path}"
    write_folder(tmp_path, {"transformer.wte": np.zeros(2, np.float32)}, None)
    message = f"{tmp_path} holds no embedding under a known name; its tensors begin ['transformer.wte']"
    assert refused(tmp_path) == message


def test_a_configuration_of_another_model_is_refused(tmp_path):
    tensors, config = recorded("a")
    folder = write_folder(tmp_path, tensors, config | {"scoring_func": "softmax"})
    assert refused(folder) == "configuration has scoring_func='softmax'; only 'sqrtsoftplus' is known"
    # Missing: of 6 blocks 8 experts with 3 weights, and of layer 5 the other 69 tensors. Misshapen: 6 gates, 3 biases.
    folder = write_folder(tmp_path, tensors, config | {"num_hidden_layers": 6, "n_routed_experts": 16})
    found = refused(folder)
    assert "missing (213): layers.0.ffn.experts.8.w1.weight, " in found
    assert "misshapen (9): layers.0.ffn.gate.weight is BF16 [8, 64], expected BF16 or F32 [16, 64], " in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(weights="narrow"), "weights must be one of ['stored', 'wide', 'bf16', 'f32'], got 'narrow'"),
        (dict(activations="int8"), "activations must be one of ['bf16', 'fp8', 'fp8_all'], got 'int8'"),
        (dict(dtype=jnp.float16), "dtype must be one of ['float32', 'bfloat16'], got 'float16'"),
        (dict(weights="f32", dtype=jnp.float32), "activations and dtype are for weights='stored', got weights='f32'"),
        (dict(weights="bf16", activations="fp8"), "activations and dtype are for weights='stored', got weights='bf16'"),
    ],
)
def test_unknown_options_are_named(options, message):
    assert refused(MODELS / "a", **options) == message
