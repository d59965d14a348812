"""Checkpoints become parameters: all namings, shards, FP8 weights, and errors that name the tensor at fault."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import dsv4jax as d4
from dsv4jax.weights.initial import random_params
from dsv4jax.weights.params import check_compressors, check_params, named_shapes, param_shapes
from dsv4jax.weights.stored import per_number
from tests.support import recorded
from tests.support.driver import assert_same

KINDS = ("swa", "csa", "hca")
PREFIXES = {"deepseek": "layers.{}.attn.", "hf": "model.layers.{}.self_attn.", "hf_saved": "model.layers.{}.attn."}

# Sizes above and off the 128 x 128 scale blocks: wq_b is [544, 160], so its scales are [5, 2] with both edges partial.
FP8_CFG = d4.DSV4Config.tiny(q_lora_rank=160, hidden_size=192)


def in_checkpoint(tensors: dict[str, np.ndarray], naming: str, layer: int) -> dict[str, np.ndarray]:
    """Return the tensors under the names that they have in a checkpoint of the whole model."""
    return {PREFIXES[naming].format(layer) + name: value for name, value in tensors.items()}


def tensors_of(recording: recorded.Recording, naming: str) -> dict[str, np.ndarray]:
    """A recorded layer's tensors; as transformers saves them by default, all names but one are DeepSeek's."""
    if naming != "hf_saved":
        return recording.tensors(naming)
    tensors = recording.tensors("deepseek")
    return tensors | {"norm.weight": tensors.pop("kv_norm.weight")}


def write_sharded(folder: Path, shards: list[dict[str, np.ndarray]], *, index: bool) -> list[Path]:
    """Write a checkpoint folder of several files, with or without an index."""
    files = [folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, file)
    if index:
        weight_map = {name: file.name for file, tensors in zip(files, shards, strict=True) for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def halves(tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return two shards, each with every other tensor."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[i::2]} for i in range(2)]


# ---- tensors in memory


@pytest.mark.parametrize("kind", KINDS)
def test_all_namings_give_the_same_parameters(kind):
    recording = recorded.load(kind)
    deepseek = d4.load_attention_params(recording.tensors("deepseek"), recording.cfg, 0, "deepseek")
    assert_same(deepseek, d4.load_attention_params(recording.tensors("hf"), recording.cfg, 0, naming="hf"))
    assert_same(deepseek, d4.load_attention_params(recording.tensors("hf"), recording.cfg, 0))
    saved = tensors_of(recording, "hf_saved")
    assert "kv_norm.weight" not in saved
    assert_same(deepseek, d4.load_attention_params(saved, recording.cfg, 0, naming="hf_saved"))


@pytest.mark.parametrize("naming", ["deepseek", "hf"])
def test_every_tensor_of_a_csa_layer_lands_in_the_field_of_its_name(naming):
    """Shapes alone cannot distinguish kv from gate, so each tensor is filled with a different number."""
    fields = {
        "deepseek": {
            "wq_a.weight": lambda p: p.q_a,
            "wq_b.weight": lambda p: p.q_b,
            "wkv.weight": lambda p: p.kv,
            "wo_a.weight": lambda p: p.o_a,
            "wo_b.weight": lambda p: p.o_b,
            "q_norm.weight": lambda p: p.q_norm,
            "kv_norm.weight": lambda p: p.kv_norm,
            "attn_sink": lambda p: p.sinks,
            "compressor.ape": lambda p: p.compressor.ape,
            "compressor.wkv.weight": lambda p: p.compressor.kv,
            "compressor.wgate.weight": lambda p: p.compressor.gate,
            "compressor.norm.weight": lambda p: p.compressor.norm,
            "indexer.wq_b.weight": lambda p: p.indexer.q_b,
            "indexer.weights_proj.weight": lambda p: p.indexer.head_weights,
            "indexer.compressor.ape": lambda p: p.indexer.compressor.ape,
            "indexer.compressor.wkv.weight": lambda p: p.indexer.compressor.kv,
            "indexer.compressor.wgate.weight": lambda p: p.indexer.compressor.gate,
            "indexer.compressor.norm.weight": lambda p: p.indexer.compressor.norm,
        },
        "hf": {
            "q_a_proj.weight": lambda p: p.q_a,
            "q_b_proj.weight": lambda p: p.q_b,
            "kv_proj.weight": lambda p: p.kv,
            "o_a_proj.weight": lambda p: p.o_a,
            "o_b_proj.weight": lambda p: p.o_b,
            "q_a_norm.weight": lambda p: p.q_norm,
            "kv_norm.weight": lambda p: p.kv_norm,
            "sinks": lambda p: p.sinks,
            "compressor.position_bias": lambda p: p.compressor.ape,
            "compressor.kv_proj.weight": lambda p: p.compressor.kv,
            "compressor.gate_proj.weight": lambda p: p.compressor.gate,
            "compressor.kv_norm.weight": lambda p: p.compressor.norm,
            "compressor.indexer.q_b_proj.weight": lambda p: p.indexer.q_b,
            "compressor.indexer.scorer.weights_proj.weight": lambda p: p.indexer.head_weights,
            "compressor.indexer.position_bias": lambda p: p.indexer.compressor.ape,
            "compressor.indexer.kv_proj.weight": lambda p: p.indexer.compressor.kv,
            "compressor.indexer.gate_proj.weight": lambda p: p.indexer.compressor.gate,
            "compressor.indexer.kv_norm.weight": lambda p: p.indexer.compressor.norm,
        },
    }[naming]
    cfg = recorded.load("csa").cfg
    shapes = param_shapes(cfg, d4.AttentionType.CSA)
    tensors = {name: np.full(of(shapes).shape, i, np.float32) for i, (name, of) in enumerate(fields.items())}
    params = d4.load_attention_params(tensors, cfg, 0, naming)
    for i, (name, of) in enumerate(fields.items()):
        assert np.all(np.asarray(of(params)) == i), name
    numbers = sum(value.size for value in tensors.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == numbers  # and nothing else


def test_loading_is_traceable_and_keeps_bf16():
    recording = recorded.load("csa")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in recording.tensors("hf").items()}
    load = jax.jit(lambda tensors: d4.load_attention_params(tensors, recording.cfg, 0))
    params = load(tensors)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(params, d4.load_attention_params(tensors, recording.cfg, 0))
    assert_same(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), recording.params))


@pytest.mark.parametrize("naming", PREFIXES)
def test_each_missing_tensor_is_named(naming):
    recording = recorded.load("csa")
    tensors = tensors_of(recording, naming)
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"tensor '{name}' is missing; there are"):
            d4.load_attention_params(rest, recording.cfg, 0, naming)


def test_each_misshapen_tensor_is_named_with_both_shapes():
    recording = recorded.load("csa")
    tensors = recording.tensors("hf")
    for name, value in tensors.items():
        want, got = str(value.shape), str((value.shape[0] + 1, *value.shape[1:]))
        wrong = np.concatenate([value, value[:1]])
        with pytest.raises(ValueError, match=f"tensor '{name}' has shape ") as caught:
            d4.load_attention_params(tensors | {name: wrong}, recording.cfg, 0)
        assert f"has shape {got}, expected {want}" in str(caught.value)


# float64 is refused too: JAX would narrow it to float32 without a word.
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "float8_e4m3fn"])
def test_a_tensor_of_another_dtype_is_named(dtype):
    recording = recorded.load("swa")
    tensors = recording.tensors("hf")
    tensors["kv_proj.weight"] = tensors["kv_proj.weight"].astype(dtype)
    with pytest.raises(ValueError, match=rf"'kv_proj\.weight' is {dtype}, expected float32 or bfloat16"):
        d4.load_attention_params(tensors, recording.cfg, 0)


def test_unknown_naming_and_unknown_layer_are_refused():
    recording = recorded.load("swa")
    with pytest.raises(ValueError, match=r"naming must be one of .*, got 'torch'"):
        d4.load_attention_params(recording.tensors("hf"), recording.cfg, 0, "torch")
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=rf"layer must be in \[0, 1\), got {layer}"):
            d4.load_attention_params(recording.tensors("hf"), recording.cfg, layer)
        with pytest.raises(ValueError, match=rf"layer must be in \[0, 1\), got {layer}"):
            d4.init_attention_params(jax.random.key(0), recording.cfg, layer)


def test_weights_of_another_form_are_told_in_a_sentence():
    cfg = d4.DSV4Config.tiny()
    of_layers: Any = (d4.init_attention_params(jax.random.key(0), cfg, layer) for layer in range(3))
    swa, csa, hca = of_layers
    bare = dataclasses.replace(hca, entry_pool=None, sinks=None)
    cases: list[Any] = [
        (csa, d4.AttentionType.SWA, "SWA layer, got those of a CSA layer"),
        (swa, d4.AttentionType.HCA, "HCA layer, got those of a SWA layer"),
        ([swa, csa], d4.AttentionType.SWA, "SWA layer, got a list"),
        (None, d4.AttentionType.SWA, "SWA layer, got a NoneType"),
        (bare, d4.AttentionType.SWA, "SWA layer, got AttentionParams without ['sinks'] and with ['compress']"),
    ]
    for params, kind, said in cases:
        with pytest.raises(ValueError, match=re.escape(f"params: expected the weights of a {said}") + "$"):
            check_params(params, cfg, kind)
    with pytest.raises(ValueError, match=r"params: expected the weights of a CSA layer, got none$"):
        check_compressors(swa.compressor, None, cfg, d4.AttentionType.CSA)
    with pytest.raises(ValueError, match=r"indexer: expected the weights of a HCA layer, got those of a CSA layer$"):
        check_compressors(hca.compressor, csa.indexer, cfg, d4.AttentionType.HCA)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_random_parameters_have_the_shapes_of_loaded_ones(layer):
    cfg = d4.DSV4Config.tiny()
    params = d4.init_attention_params(jax.random.key(0), cfg, layer)
    kind = d4.config.layer_schedule(cfg)[layer].attn
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(
        lambda leaf: leaf.shape, param_shapes(cfg, kind)
    )
    recording = recorded.load(kind)  # the recordings have tiny's sizes
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, recording.params)


def drawn_one_by_one(key: jax.Array, cfg: d4.DSV4Config, kind: d4.AttentionType) -> Any:
    """Random weights as ``init_attention_params`` defines them, each part with a key of its own."""
    parts = {}
    for i, (name, shape) in enumerate(named_shapes(cfg, kind).items()):
        noise = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
        if len(shape) == 1:
            parts[name] = noise * 0.1 + (0.0 if "sinks" in name else 1.0)
        else:
            parts[name] = noise * (0.1 if "ape" in name else shape[-1] ** -0.5)
    return d4.AttentionParams.join(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_random_parameters_are_what_each_leaf_would_draw_alone(dtype):
    """Leaves of similar size are drawn together, as rows of the longest one; here a layer has two such groups."""
    cfg, key = d4.DSV4Config.tiny(hidden_size=2048), jax.random.key(3)
    for layer, spec in enumerate(d4.config.layer_schedule(cfg)):
        params = d4.init_attention_params(key, cfg, layer, dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        # In f32 XLA may round a product and a sum once, or scale by one factor in place of two: two units in the last
        # place of numbers below 2. bf16 has 8 bits: a number that close to a tie goes the other way.
        error = 2**-22 if dtype == "float32" else 2**-7
        for got, wanted in zip(
            jax.tree.leaves(params), jax.tree.leaves(drawn_one_by_one(key, cfg, spec.attn)), strict=True
        ):
            np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0, atol=error)


def test_layers_of_a_kind_draw_their_parameters_with_one_program():
    cfg = d4.DSV4Config.tiny(compress_ratios=(4, 4, 4), hidden_size=72)
    program: Any = random_params
    before = program._cache_size()
    for layer in range(cfg.num_layers):
        d4.init_attention_params(jax.random.key(layer), cfg, layer)
    assert program._cache_size() == before + 1


# ---- checkpoint folders


@pytest.mark.parametrize("naming", PREFIXES)
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_layer_is_read_from_a_sharded_checkpoint(tmp_path, naming, index):
    """Three layers of three kinds are in two shards, along with tensors that do not belong to attention."""
    cfg = d4.DSV4Config.tiny()
    tensors = {"embed.weight": np.ones((3, 4), np.float32), "layers.1.ffn.gate.weight": np.ones(3, np.float32)}
    for layer, kind in enumerate(KINDS):
        tensors |= in_checkpoint(tensors_of(recorded.load(kind), naming), naming, layer)
    # Beside attention in the same layer, and one letter away from it.
    tensors["model.layers.1.attn_norm.weight"] = np.ones(3, np.float32)
    write_sharded(tmp_path, halves(tensors), index=index)
    for layer, kind in enumerate(KINDS):
        assert_same(d4.weights.load_safetensors(tmp_path, cfg, layer), recorded.load(kind).params)
    assert_same(d4.weights.load_safetensors(str(tmp_path), cfg, 1), recorded.load("csa").params)


def test_layer_1_is_not_taken_for_layer_11(tmp_path):
    recording = recorded.load("swa")
    cfg = d4.DSV4Config.tiny(compress_ratios=(0,) * 12)
    other = {name: value + 1 for name, value in recording.tensors("deepseek").items()}
    save_file(
        in_checkpoint(other, "deepseek", 11) | in_checkpoint(recording.tensors("deepseek"), "deepseek", 1),
        tmp_path / "model.safetensors",
    )
    assert_same(d4.weights.load_safetensors(tmp_path, cfg, 1), recording.params)


def test_bf16_tensors_stay_bf16(tmp_path):
    recording = recorded.load("hca")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in recording.tensors("hf").items()}
    save_file(in_checkpoint(tensors, "hf", 0), tmp_path / "model.safetensors")
    params = d4.weights.load_safetensors(tmp_path, recording.cfg, 0)
    assert_same(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), recording.params))


@pytest.mark.parametrize("damage", ["deleted", "corrupt"])
def test_only_the_shards_that_hold_the_layer_are_opened(tmp_path, damage):
    cfg = d4.DSV4Config.tiny()
    layers = [in_checkpoint(recorded.load(kind).tensors("hf"), "hf", layer) for layer, kind in enumerate(KINDS)]
    files = write_sharded(tmp_path, layers, index=True)
    if damage == "deleted":
        files[0].unlink()
    else:
        files[0].write_bytes(b"not a checkpoint")
    assert_same(d4.weights.load_safetensors(tmp_path, cfg, 1), recorded.load("csa").params)
    with pytest.raises(ValueError, match=f"layer 0: cannot read .*{files[0].name}"):
        d4.weights.load_safetensors(tmp_path, cfg, 0)


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_truncated_file_is_named(tmp_path, index):
    recording = recorded.load("swa")
    (file,) = write_sharded(tmp_path, [in_checkpoint(recording.tensors("hf"), "hf", 0)], index=index)
    whole = file.read_bytes()
    # in the data, in the header, in the header's length, nothing left
    for length in (len(whole) - 1, 30, 5, 0):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"cannot read .*{file.name}"):
            d4.weights.load_safetensors(tmp_path, recording.cfg, 0)


def test_missing_and_misshapen_tensors_of_a_checkpoint_are_named(tmp_path):
    recording = recorded.load("csa")
    tensors = in_checkpoint(recording.tensors("deepseek"), "deepseek", 0)
    name = "layers.0.attn.indexer.compressor.ape"
    file = tmp_path / "model.safetensors"
    save_file({other: value for other, value in tensors.items() if other != name}, file)
    with pytest.raises(ValueError, match=r"layer 0: tensor 'indexer\.compressor\.ape' is missing"):
        d4.weights.load_safetensors(tmp_path, recording.cfg, 0)
    save_file(tensors | {name: np.ones((4, 255), np.float32)}, file)
    with pytest.raises(ValueError, match=r"'indexer\.compressor\.ape' has shape \(4, 255\), expected \(4, 256\)"):
        d4.weights.load_safetensors(tmp_path, recording.cfg, 0)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(tmp_path):
    recording = recorded.load("swa")
    tensors = in_checkpoint(recording.tensors("hf"), "hf", 0)
    (file,) = write_sharded(tmp_path, [tensors], index=True)
    save_file({name: value for name, value in tensors.items() if not name.endswith("sinks")}, file)
    with pytest.raises(ValueError, match=rf"cannot read .*{file.name}.*model\.layers\.0\.self_attn\.sinks"):
        d4.weights.load_safetensors(tmp_path, recording.cfg, 0)


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"weight_map": 3}'])
def test_an_index_without_a_map_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors\.index\.json: expected JSON"):
        d4.weights.load_safetensors(tmp_path, d4.DSV4Config.tiny(), 0)


def test_folders_without_the_layer_or_without_any_checkpoint_are_refused(tmp_path):
    recording = recorded.load("swa")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in"):
        d4.weights.load_safetensors(tmp_path, recording.cfg, 0)
    save_file(in_checkpoint(recording.tensors("hf"), "hf", 0), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layer must be in \[0, 1\), got 7"):
        d4.weights.load_safetensors(tmp_path, recording.cfg, 7)
    deeper = dataclasses.replace(recording.cfg, compress_ratios=(0,) * 8)
    with pytest.raises(ValueError, match=r"holds no tensors of layer 7: looked for .*layers\.7\.attn\."):
        d4.weights.load_safetensors(tmp_path, deeper, 7)


# ---- DeepSeek's FP8 linear weights


def fp8_checkpoint(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a CSA layer with five large FP8 projections: tensors as stored, and dequantised in float64."""
    rng = np.random.default_rng(seed)
    stored, dense = {}, {}
    shapes = param_shapes(FP8_CFG, d4.AttentionType.CSA)
    assert shapes.compressor is not None
    assert shapes.indexer is not None
    fp8 = {"wq_a": shapes.q_a, "wq_b": shapes.q_b, "wkv": shapes.kv, "wo_a": shapes.o_a, "wo_b": shapes.o_b}
    for name, leaf in fp8.items():
        out, inner = leaf.shape
        weight = rng.normal(0, 30, leaf.shape).astype(ml_dtypes.float8_e4m3fn)
        exponent = rng.integers(110, 130, (-(-out // 128), -(-inner // 128)), np.uint8)
        stored |= {f"{name}.weight": weight, f"{name}.scale": exponent.view(ml_dtypes.float8_e8m0fnu)}
        full = np.empty(leaf.shape)
        for row in range(out):
            for column in range(inner):
                full[row, column] = float(weight[row, column]) * 2.0 ** (int(exponent[row // 128, column // 128]) - 127)
        dense[f"{name}.weight"] = full
    rest = {
        "q_norm.weight": shapes.q_norm,
        "kv_norm.weight": shapes.kv_norm,
        "attn_sink": shapes.sinks,
        "compressor.ape": shapes.compressor.ape,
        "compressor.wkv.weight": shapes.compressor.kv,
        "compressor.wgate.weight": shapes.compressor.gate,
        "compressor.norm.weight": shapes.compressor.norm,
        "indexer.wq_b.weight": shapes.indexer.q_b,
        "indexer.weights_proj.weight": shapes.indexer.head_weights,
        "indexer.compressor.ape": shapes.indexer.compressor.ape,
        "indexer.compressor.wkv.weight": shapes.indexer.compressor.kv,
        "indexer.compressor.wgate.weight": shapes.indexer.compressor.gate,
        "indexer.compressor.norm.weight": shapes.indexer.compressor.norm,
    }
    for i, (name, leaf) in enumerate(rest.items()):
        stored[name] = rng.standard_normal(leaf.shape, np.float32)
        if i % 2 and name.endswith(".weight"):
            stored[name] = stored[name].astype(ml_dtypes.bfloat16)
        dense[name] = stored[name].astype(np.float64)
    return stored, dense


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_fp8_weights_are_dequantised_exactly_to_bf16(tmp_path, index):
    stored, dense = fp8_checkpoint(0)
    # Every other name in one shard: weights and their scales are apart.
    write_sharded(tmp_path, halves(in_checkpoint(stored, "deepseek", 1)), index=index)
    params = d4.weights.load_safetensors(tmp_path, FP8_CFG, 1, "wide")
    read = {
        "wq_a": params.q_a,
        "wq_b": params.q_b,
        "wkv": params.kv,
        "wo_a": params.o_a,
        "wo_b": params.o_b,
    }
    for name, value in read.items():
        assert value.dtype == jnp.bfloat16, name
        # Exactly: E4M3 has 4 significant bits, bf16 has 8, and a power of two takes none.
        np.testing.assert_array_equal(np.asarray(value).astype(np.float64), dense[f"{name}.weight"], err_msg=name)
    # float64 of an f32 or bf16 value is exact, so the tensors that are not FP8 must agree to the bit as well.
    np.testing.assert_array_equal(np.asarray(params.sinks).astype(np.float64), dense["attn_sink"])
    assert params.indexer is not None
    q_b = params.indexer.q_b
    assert q_b.dtype == stored["indexer.wq_b.weight"].dtype
    np.testing.assert_array_equal(np.asarray(q_b).astype(np.float64), dense["indexer.wq_b.weight"])


def test_fp8_weights_without_a_scale_or_with_a_misshapen_one_are_named(tmp_path):
    stored, _ = fp8_checkpoint(1)
    file = tmp_path / "model.safetensors"
    scale = stored.pop("wq_b.scale")
    assert scale.shape == (5, 2)
    save_file(in_checkpoint(stored, "deepseek", 1), file)
    with pytest.raises(ValueError, match=r"layer 1: tensor 'wq_b\.weight' is float8_e4m3fn"):
        d4.weights.load_safetensors(tmp_path, FP8_CFG, 1)
    for wrong in (scale[:4], scale[:, :1], scale.reshape(2, 5)):
        save_file(in_checkpoint(stored | {"wq_b.scale": np.ascontiguousarray(wrong)}, "deepseek", 1), file)
        with pytest.raises(ValueError, match=r"layer 1: tensor 'wq_b\.weight': block scales of shape"):
            d4.weights.load_safetensors(tmp_path, FP8_CFG, 1)


def test_fp8_weights_with_other_scales_become_f32(tmp_path):
    """The scales are not powers of two, so bf16 would round the products."""
    stored, _ = fp8_checkpoint(2)
    scale = np.random.default_rng(0).uniform(0.5, 1, stored["wq_b.scale"].shape).astype(np.float32)
    save_file(in_checkpoint(stored | {"wq_b.scale": scale}, "deepseek", 1), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'wq_b\.weight': block scales are not all powers of two; use weights='wide'"):
        d4.weights.load_safetensors(tmp_path, FP8_CFG, 1)
    params = d4.weights.load_safetensors(tmp_path, FP8_CFG, 1, "wide")
    assert params.q_b.dtype == jnp.float32
    wide = stored["wq_b.weight"].astype(np.float32)
    assert_same(np.asarray(params.q_b), wide * per_number(scale, (128, 128), wide.shape))
    assert params.q_a.dtype == jnp.bfloat16


def test_block_scales_meet_the_block_they_belong_to():
    """Each block has a distinct scale; the last blocks are partial."""
    scale = np.exp2(np.arange(6.0)).reshape(2, 3).astype(np.float32)
    full = per_number(scale, (128, 128), (130, 257))
    assert full.shape == (130, 257)
    for row, column, want in [(0, 0, 1), (127, 127, 1), (127, 128, 2), (0, 256, 4), (128, 0, 8), (129, 256, 32)]:
        assert full[row, column] == want
