"""Checkpoints whose weights stay FP8: namings, blocks, scales, what is refused, and how much memory it takes."""

import dataclasses
import functools
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import dsv4jax as d4
from dsv4jax.model import ModelConfig, load_model, random_model
from dsv4jax.weights.load import NAMINGS, scale_names
from dsv4jax.weights.params import QUANTISED
from dsv4jax.weights.stored import StoredWeight, is_stored
from tests.support import recorded
from tests.support.driver import assert_same
from tests.support.paths import DATA
from tests.support.stored import stored_parts, widened_params

PREFIXES = {"deepseek": "layers.0.attn.", "hf": "model.layers.0.self_attn.", "hf_saved": "model.layers.0.attn."}
CSA = recorded.load("csa")
PARTS = stored_parts(CSA.params)
STORED = d4.AttentionParams.join(PARTS)


def checkpoint(parts: dict[str, Any], naming: str, scale: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a layer of stored weights. ``scale`` says by which of their two names scales go."""
    tensors = {}
    for part, value in parts.items():
        name = NAMINGS[naming][part]
        if isinstance(value, StoredWeight):
            tensors |= {name: np.asarray(value.codes), scale_names(name)[scale]: np.asarray(value.scales)}
        else:
            tensors[name] = np.asarray(value)
    return tensors


def saved(folder: Path, tensors: dict[str, np.ndarray], naming: str = "deepseek", **config: Any) -> Path:
    save_file({PREFIXES[naming] + name: value for name, value in tensors.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("naming", "scale"), [("deepseek", 0), ("hf", 1), ("hf_saved", 0)])
def test_weights_with_scales_beside_them_stay_as_they_are(naming, scale):
    tensors = checkpoint(PARTS, naming, scale)
    found = d4.load_attention_params(tensors, CSA.cfg, 0, naming, weights="stored")
    assert_same(found, STORED)
    assert_same(found, jax.jit(lambda t: d4.load_attention_params(t, CSA.cfg, 0, naming, weights="stored"))(tensors))
    widen = functools.partial(d4.load_attention_params, cfg=CSA.cfg, layer=0, naming=naming, weights="wide")
    for load in (widen, jax.jit(lambda tensors: widen(tensors))):
        assert_same(load(tensors), widened_params(STORED, jnp.bfloat16))


@pytest.mark.parametrize("naming", PREFIXES)
def test_a_checkpoint_with_scales_is_stored_by_default(tmp_path, naming):
    folder = saved(tmp_path, checkpoint(PARTS, naming, naming == "hf"), naming)
    assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0), STORED)
    with pytest.deprecated_call(match="weights=None is now weights='stored'"):
        assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0, None), STORED)
    assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0, weights="wide"), widened_params(STORED, jnp.bfloat16))


def test_floats_of_a_checkpoint_without_scales_are_kept_or_converted(tmp_path):
    """All in one dtype but for sinks and position biases, which checkpoints store as float32."""
    folder = saved(tmp_path, CSA.tensors("deepseek"))
    for weights in ("stored", "wide", "f32"):
        assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0, weights), CSA.params)
    narrow = d4.weights.load_safetensors(folder, CSA.cfg, 0, "bf16").split()
    for name, part in CSA.params.split().items():
        is_f32 = name.endswith(("sinks", "ape"))
        assert_same(narrow[name], part if is_f32 else jnp.asarray(part, jnp.bfloat16))


@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_stored_weights_are_widened_to_one_dtype(tmp_path, weights):
    dtype = dict(bf16=jnp.bfloat16, f32=jnp.float32)[weights]
    found = d4.weights.load_safetensors(saved(tmp_path, checkpoint(PARTS, "deepseek")), CSA.cfg, 0, weights)
    for name, part in found.split().items():
        assert part.dtype == (jnp.float32 if name.endswith(("sinks", "ape")) else dtype), name
    assert_same(found.q_b, widened_params(STORED, dtype).q_b)


def test_a_published_layout_is_read_as_it_is():
    """Layer 2 of a model that another program wrote in DeepSeek's layout: E4M3, E8M0 and bf16 tensors."""
    folder = DATA / "fp8"
    cfg = d4.DSV4Config.from_hf(json.loads((folder / "config.json").read_text()))
    stored, wide = (d4.weights.load_safetensors(folder, cfg, 2, weights) for weights in ("stored", "wide"))
    assert_same(widened_params(stored, jnp.bfloat16), wide)
    assert isinstance(stored.q_b, StoredWeight)
    assert (stored.q_b.block, stored.q_b.shape, stored.q_b.scales.shape) == ((128, 128), (256, 128), (2, 1))
    # Two rows as they are in the file, by hand.
    raw = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])

    def bytes_of(name: str) -> np.ndarray:
        first, end = header[f"layers.2.attn.{name}"]["data_offsets"]
        return np.frombuffer(raw[begin + first : begin + end], np.uint8)

    codes = bytes_of("wq_b.weight").view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(256, 128)
    for row in (3, 200):
        scale = np.exp2(np.float32(bytes_of("wq_b.scale")[row // 128]) - 127)
        np.testing.assert_array_equal(np.asarray(wide.q_b)[row].astype(np.float32), codes[row] * scale)


# ---- blocks


def test_blocks_of_32_are_found_by_shapes_and_by_the_configuration(tmp_path):
    parts = stored_parts(CSA.params, (32, 32))
    tensors, wanted = checkpoint(parts, "deepseek"), d4.AttentionParams.join(parts)
    folder = saved(tmp_path, tensors, quantization_config=dict(weight_block_size=[32, 32]))
    assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0), wanted)
    assert_same(d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "stored", block=(32, 32)), wanted)
    wide = widened_params(wanted, jnp.bfloat16)
    assert_same(d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "wide", block=(32, 32)), wide)
    # By shapes, W_qa [24, 64] is in blocks of 32, too: by 128 its 2 scales would be 1.
    assert_same(d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "stored"), wanted)
    for weights in ("stored", "wide"):
        with pytest.raises(ValueError, match=r"tensor 'wq_a\.weight': block scales of .* in blocks of 128 x 128"):
            d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", weights, block=(128, 128))


def test_the_configuration_decides_where_shapes_do_not(tmp_path):
    """W_kv [64, 64] with one scale is one block of 64 x 64, or a part of one of 128 x 128."""
    cfg = d4.DSV4Config.tiny(compress_ratios=(0,), q_lora_rank=64, head_dim=64, o_lora_rank=32)
    params = d4.init_attention_params(jax.random.key(0), cfg, 0, weights="stored", block=(64, 64))
    tensors = checkpoint(params.split(), "deepseek")
    assert tensors["wkv.scale"].shape == (1, 1)
    folder = saved(tmp_path, tensors)
    saved(tmp_path, tensors, quantization_config=dict(weight_block_size=[64, 64]))
    assert_same(d4.weights.load_safetensors(folder, cfg, 0), params)
    saved(tmp_path, tensors, quantization_config=dict(weight_block_size=[128, 128]))
    with pytest.raises(ValueError, match=r"do not fit a weight .* in blocks of 128 x 128"):
        d4.weights.load_safetensors(folder, cfg, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"quantization_config": null}', '{"quantization_config": {}}'])
def test_a_configuration_that_does_not_say_is_no_error(tmp_path, text):
    folder = saved(tmp_path, checkpoint(PARTS, "deepseek"))
    (folder / "config.json").write_text(text)
    assert_same(d4.weights.load_safetensors(folder, CSA.cfg, 0), STORED)


# ---- scales


def test_f32_scales_that_are_powers_of_two_are_stored_exactly(tmp_path):
    tensors = checkpoint(PARTS, "hf", 1)
    f32 = {name: value.astype(np.float32) if "scale" in name else value for name, value in tensors.items()}
    assert_same(d4.weights.load_safetensors(saved(tmp_path, f32, "hf"), CSA.cfg, 0), STORED)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.75, "block scales are not all powers of two"),
        (512.0, r"block scales go up to 512\.0, and 2\^7 is the largest that is served"),
    ],
)
def test_scales_that_cannot_be_stored_are_refused_by_the_tensors_name(tmp_path, scale, message):
    tensors = checkpoint(PARTS, "deepseek")
    tensors["wo_b.scale"] = np.full(tensors["wo_b.scale"].shape, scale, np.float32)
    folder = saved(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"layer 0: tensor 'wo_b\.weight': {message}; use weights='wide'"):
        d4.weights.load_safetensors(folder, CSA.cfg, 0)
    wide = d4.weights.load_safetensors(folder, CSA.cfg, 0, "wide")
    assert wide.o_b.dtype == jnp.float32
    np.testing.assert_array_equal(wide.o_b, tensors["wo_b.weight"].astype(np.float32) * np.float32(scale))


def test_codes_that_are_nan_are_refused_by_the_tensors_name(tmp_path):
    tensors = checkpoint(PARTS, "hf", 1)
    name = next(name for name, value in tensors.items() if value.dtype == jnp.float8_e4m3fn)
    tensors[name] = tensors[name].copy()
    tensors[name][1, 2] = np.nan
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*1 of its FP8 codes are NaN"):
        d4.weights.load_safetensors(saved(tmp_path, tensors, "hf"), CSA.cfg, 0)


def test_tensors_that_are_no_fp8_or_lack_scales_are_named():
    tensors = checkpoint(PARTS, "deepseek")
    del tensors["wo_a.scale"]
    with pytest.raises(ValueError, match=r"layer 0: tensor 'wo_a\.weight' is float8_e4m3fn, expected .* block scales"):
        d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "stored")
    tensors = checkpoint(PARTS, "deepseek")
    tensors["indexer.wq_b.weight"] = tensors["indexer.wq_b.weight"].astype(ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match=r"tensor 'indexer\.wq_b\.weight' is bfloat16 and has block scales.* 'wide'"):
        d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "stored")


def test_each_weight_is_kept_as_it_is():
    """Weights in bf16 among FP8 ones. Those that one input feeds must be alike."""
    tensors, values = checkpoint(PARTS, "deepseek"), widened_params(STORED, jnp.bfloat16)

    def load_with(name: str, part: Any) -> d4.AttentionParams:
        others = {key: value for key, value in tensors.items() if key != f"{name}.scale"}
        return d4.load_attention_params(others | {f"{name}.weight": part}, CSA.cfg, 0, "deepseek", "stored")

    assert_same(load_with("wo_a", values.o_a), dataclasses.replace(STORED, o_a=values.o_a))
    with pytest.raises(ValueError, match=r"layer 0: weights that one input feeds must all .*; use weights='wide'"):
        load_with("wkv", values.kv)


def test_options_that_there_are_not_are_refused(tmp_path):
    """The same words and the same messages wherever weights come from."""
    tensors, key, folder = CSA.tensors("hf"), jax.random.key(0), saved(tmp_path, CSA.tensors("deepseek"))
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices("cpu")[:2])
    words = r"weights must be one of \['stored', 'wide', 'bf16', 'f32'\], got 'narrow'"
    calls: dict[str, Callable[..., Any]] = {
        "tensors": lambda **options: d4.load_attention_params(tensors, CSA.cfg, 0, **options),
        "folder": lambda **options: d4.weights.load_safetensors(folder, CSA.cfg, 0, **options),
        "random": lambda **options: d4.init_attention_params(key, CSA.cfg, 0, **options),
        "shards": lambda **options: d4.sharding.params_specs(CSA.cfg, 0, mesh, **options),
        "random model": lambda **options: random_model(ModelConfig.tiny(), key, **options),
        "model": lambda **options: load_model(folder, **options),
    }
    for name, call in calls.items():
        bad: list[tuple[dict[str, Any], str]] = [
            (dict(weights="narrow"), words),
            (dict(activations="fp4"), "activations must be one of .*'fp8_all'.*, got 'fp4'"),
            (dict(weights="wide", activations="fp8"), "for weights='stored', got weights='wide'"),
            (dict(weights="f32", activations="fp8"), "for weights='stored', got weights='f32'"),
        ]
        if name in ("tensors", "random", "shards"):
            bad.append((dict(weights="stored", block=128), "block must be a pair of positive integers"))
        for options, message in bad:
            with pytest.raises(ValueError, match=message):
                call(**options)


@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_random_weights_are_drawn_in_one_dtype(weights):
    dtype = dict(bf16=jnp.bfloat16, f32=jnp.float32)[weights]
    wide = d4.init_attention_params(jax.random.key(0), CSA.cfg, 0)
    found = d4.init_attention_params(jax.random.key(0), CSA.cfg, 0, weights=weights)
    for name, part in found.split().items():
        of = jnp.float32 if name.endswith(("sinks", "ape")) else dtype
        assert_same(part, jnp.asarray(wide.split()[name], dtype).astype(of))


@pytest.mark.parametrize(("activations", "of_o_a"), [("fp8", "bf16"), ("fp8_all", "fp8")])
@pytest.mark.parametrize("load", ["tensors", "folder", "random"])
def test_fp8_activations_are_those_of_all_weights_or_of_all_but_w_oa(tmp_path, load, activations, of_o_a):
    """DeepSeek's own inference does not round the input of W_oa."""
    tensors = checkpoint(PARTS, "deepseek")
    if load == "tensors":
        params = d4.load_attention_params(tensors, CSA.cfg, 0, "deepseek", "stored", activations)
    elif load == "folder":
        params = d4.weights.load_safetensors(saved(tmp_path, tensors), CSA.cfg, 0, activations=activations)
    else:
        params = d4.init_attention_params(jax.random.key(0), CSA.cfg, 0, weights="stored", activations=activations)
    found = {name: part.activations for name, part in params.split().items() if isinstance(part, StoredWeight)}
    assert found == dict.fromkeys(QUANTISED, "fp8") | {"o_a": of_o_a}


# ---- memory


def test_no_wider_copy_of_a_weight_exists_on_the_host(tmp_path):
    cfg = d4.DSV4Config.tiny(compress_ratios=(0,), hidden_size=1024, q_lora_rank=1024, o_lora_rank=512)
    params = d4.init_attention_params(jax.random.key(0), cfg, 0, jnp.bfloat16, "stored")
    folder = saved(tmp_path, checkpoint(params.split(), "deepseek"))
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(params, is_leaf=is_stored))
    d4.weights.load_safetensors(folder, cfg, 0)  # what is imported and compiled on first use is not counted

    def peak(weights: str) -> int:
        tracemalloc.start()
        jax.block_until_ready(jax.tree.leaves(d4.weights.load_safetensors(folder, cfg, 0, weights)))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # NumPy's arrays are what tracemalloc sees: the tensors as read, and q_a and kv once more, joined.
    assert peak("stored") < 1.5 * stored < peak("wide")
    assert stored < 1.02 * sum(param.codes.size for param in params.split().values() if isinstance(param, StoredWeight))


# ---- shards


def test_shards_that_cut_a_block_are_named():
    cfg = d4.DSV4Config.tiny(o_lora_rank=128)  # 4 heads of 136 dims, 2 groups
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices("cpu")[:2])
    message = r"q_b: a shard of mesh axis 'model' would have 272 of 544 rows, which cuts blocks of 128"
    with pytest.raises(ValueError, match=message):
        d4.sharding.params_specs(cfg, 0, mesh, weights="stored")
    cfg = d4.DSV4Config.tiny(o_lora_rank=100)
    message = r"o_a: a shard of mesh axis 'model' would have 100 of 200 rows, which cuts blocks of 16"
    with pytest.raises(ValueError, match=message):
        d4.sharding.params_specs(cfg, 0, mesh, weights="stored", block=(16, 16))
    with pytest.raises(ValueError, match=r"o_b: a shard .* would have 100 of 200 columns, which cuts blocks of 16"):
        d4.sharding.params_specs(cfg, 0, mesh, weights="stored", block=(4, 16))
    one = jax.make_mesh((1,), ("model",), devices=jax.devices("cpu")[:1])
    specs: Any = d4.sharding.params_specs(cfg, 0, one, weights="stored", activations="fp8")
    assert specs.q_a_kv.codes == specs.q_a_kv.scales == specs.q_norm == P()
    assert jax.tree.structure(specs) == jax.tree.structure(
        d4.init_attention_params(jax.random.key(0), cfg, 0, weights="stored", activations="fp8")
    )


def test_published_models_split_into_whole_blocks():
    for cfg, most in ((d4.DSV4Config.flash(), 8), (d4.DSV4Config.pro(), 8)):
        mesh = jax.make_mesh((most,), ("model",), devices=jax.devices("cpu")[:most])
        for layer in (0, 2, 3):
            specs: Any = d4.sharding.params_specs(cfg, layer, mesh, weights="stored")
            assert specs.q_a_kv.block == (128, 128)
