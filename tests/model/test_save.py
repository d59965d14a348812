"""A saved model is a folder in DeepSeek's names, and loaded again it is the same bit for bit."""

import dataclasses
import json
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import ModelConfig, ModelParams, load_model, random_model, save_model
from dsv4jax.weights.stored import StoredWeight
from tests.support.cases import first_of
from tests.support.driver import assert_same
from tests.support.model_folders import (
    MODELS,
    published_config,
    random_tensors,
    read_folder,
    recorded,
    with_fp8_experts,
    write_folder,
)

ODD = ModelConfig.tiny(  # no size is a multiple of 128: blocks are cut short, and become lower where weights are joined
    attention=d4.DSV4Config.tiny(hidden_size=96, head_dim=72, q_lora_rank=56, o_lora_rank=24, compress_ratios=(128, 4)),
    expert_width=160,
    num_hash_layers=0,
    swiglu_limit=0.0,
    stop_tokens=(1, 7),
)


def saved_and_loaded(params: ModelParams, folder: Any, **options: Any) -> ModelParams:
    save_model(params, folder, **options)
    return load_model(folder)


@pytest.mark.parametrize("model", first_of(["q", "a"]))
def test_the_tensors_of_a_folder_are_written_as_they_were(tmp_path, model):
    """Read by the tests' own reader. Model a is bf16 and f32; q is FP8 with E8M0 scales, and FP4 experts."""
    save_model(load_model(MODELS / model), tmp_path / "saved")
    (found, config), (wanted, published) = read_folder(tmp_path / "saved"), recorded(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name
    for key in ("model_type", "compress_ratios", "num_nextn_predict_layers", "eos_token_id", "rope_scaling"):
        assert config[key] == published[key], key
    assert ("expert_dtype" in config, "quantization_config" in config) == (model == "q", model == "q")


def test_weights_in_numpy_are_saved(tmp_path):
    params = load_model(MODELS / "q")
    assert_same(saved_and_loaded(jax.device_get(params), tmp_path / "saved"), params)


FORMS: dict[str, Any] = {
    "a, bf16": lambda: load_model(MODELS / "a", "bf16"),
    "q, f32": lambda: load_model(MODELS / "q", "f32"),
    "q, others in f32": lambda: load_model(MODELS / "q", dtype=jnp.float32),
    "random, stored": lambda: random_model(ODD, jax.random.key(0)),
    "random, stored, without drafts": lambda: random_model(ODD, jax.random.key(0), drafts=0),
    "random, f32": lambda: random_model(ODD, jax.random.key(0), "f32"),
}


@pytest.mark.parametrize("form", first_of(FORMS))
def test_a_saved_model_is_loaded_bit_for_bit(tmp_path, form):
    params = FORMS[form]()
    assert_same(saved_and_loaded(params, tmp_path / "saved"), params)


@pytest.mark.parametrize("scales", first_of(["F8_E8M0", "F32"]))
def test_fp8_experts(tmp_path, scales):
    (tmp_path / "given").mkdir()
    params = load_model(write_folder(tmp_path / "given", with_fp8_experts(scales), recorded("q")[1]))
    assert_same(saved_and_loaded(params, tmp_path / "saved"), params)


def test_activations_are_an_option_of_loading(tmp_path):
    params = load_model(MODELS / "q", activations="fp8")
    save_model(params, tmp_path / "saved")
    assert_same(load_model(tmp_path / "saved", activations="fp8"), params)


def test_large_models_have_several_files_and_an_index(tmp_path):
    params, most = load_model(MODELS / "q"), 300_000
    folder = tmp_path / "new" / "saved"
    assert_same(saved_and_loaded(params, folder, max_file_bytes=most), params)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(names) > 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = recorded("q")[0]
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for name in names:
        held = [key for key, file in index["weight_map"].items() if file == name]
        assert len(held) == 1 or sum(tensors[key].nbytes for key in held) <= most


def test_numbers_begin_at_multiples_of_their_width(tmp_path):
    """As other readers, which map files into memory, expect."""
    save_model(load_model(MODELS / "q"), tmp_path / "saved")
    raw = (tmp_path / "saved" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    widths = {"I64": 8, "F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {entry["dtype"] for entry in header.values()} == widths.keys()
    for entry in header.values():
        assert (begin + entry["data_offsets"][0]) % widths[entry["dtype"]] == 0


@pytest.mark.parametrize("cfg", [ModelConfig.flash(), ModelConfig.pro(), ModelConfig.tiny(), ODD], ids=range(4))
def test_a_configuration_is_read_as_it_was_written(cfg):
    attention = dataclasses.replace(cfg.attention, hca_compression_ratio=16, compress_ratios=(0, 16, 4), rope_theta=1e3)
    for each in (cfg, dataclasses.replace(cfg, attention=attention, num_hash_layers=0)):
        assert ModelConfig.from_hf(json.loads(json.dumps(each.to_hf()))) == each


def test_a_folder_that_holds_something_is_refused_by_name(tmp_path):
    params = load_model(MODELS / "a")
    folder = tmp_path / "full"
    folder.mkdir()
    save_model(params, folder)  # an empty one
    (tmp_path / "killed.partial").mkdir()
    (tmp_path / "file").write_text("text")
    for name, message in (
        ("full", "full exists and is not empty"),
        ("file", "file exists and is not empty"),
        ("killed", r"killed\.partial was left by a save that was killed"),
    ):
        with pytest.raises(FileExistsError, match=message):
            save_model(params, tmp_path / name)
    assert_same(load_model(folder), params)


@pytest.mark.sweep(guard="test_a_folder_that_holds_something_is_refused_by_name")
def test_weights_that_no_checkpoint_can_hold_are_refused_and_leave_nothing(tmp_path):
    params = random_model(ODD, jax.random.key(0), drafts=0)
    block, *others = params.blocks
    q_b, joined = block.attention.q_b, block.attention.q_a_kv
    assert isinstance(q_b, StoredWeight)
    assert isinstance(joined, StoredWeight)

    def with_attention(**weights: Any) -> ModelParams:
        changed = dataclasses.replace(block, attention=dataclasses.replace(block.attention, **weights))
        return dataclasses.replace(params, blocks=(changed, *others))

    small = d4.init_attention_params(jax.random.key(0), ODD.attention, 0, jnp.bfloat16, "stored", block=(128, 32)).q_b
    numbers = np.arange(joined.scales.size, dtype=np.uint8).reshape(joined.scales.shape) + np.uint8(110)
    uneven = dataclasses.replace(joined, scales=jax.lax.bitcast_convert_type(jnp.asarray(numbers), joined.scales.dtype))
    for bad, message in (
        (with_attention(q_b=small), r"FP8 weights are stored in blocks of .*\(128, 32\).*: a checkpoint has"),
        (with_attention(q_a_kv=uneven), r"layers\.0\.attn\.wkv\.weight: 8 rows share scales, and 128 do in the"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(bad, tmp_path / "saved")
        assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="save_model reads values on the host"):
        jax.jit(lambda params: save_model(params, tmp_path / "saved"))(params)


def test_what_is_no_model_is_named(tmp_path):
    no_model: Any = [1]
    with pytest.raises(ValueError, match=r"^params: expected a ModelParams, got list$"):
        save_model(no_model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep(guard="test_a_saved_model_is_loaded_bit_for_bit")
def test_the_host_holds_one_tensor_or_one_layers_attention(tmp_path):
    """Measured: 0.57 times a layer's attention, where the file is 18 times as large."""
    attention = d4.DSV4Config.tiny(hidden_size=1024, head_dim=72, compress_ratios=(0, 4))
    cfg = ModelConfig.tiny(attention=attention, expert_width=512, num_experts=16)
    tensors = random_tensors(cfg, 0, drafts=0)
    held = sum(value.nbytes for name, value in tensors.items() if name.startswith("layers.1.attn."))
    (tmp_path / "given").mkdir()
    params = load_model(write_folder(tmp_path / "given", tensors, published_config(cfg)))
    del tensors
    save_model(params, tmp_path / "first")  # what is imported and compiled on first use is not counted
    tracemalloc.start()
    save_model(params, tmp_path / "saved")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < held, peak / held
