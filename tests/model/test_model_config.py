"""Sizes of whole models: those of the published ones, both forms of config.json, what is refused; random models."""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import ModelConfig, StoredExperts, load_model, random_model
from dsv4jax.weights.stored import StoredWeight
from tests.support import stored
from tests.support.cases import first_of
from tests.support.driver import assert_same
from tests.support.model_folders import E2M1, MODELS, per_number, published_config, random_tensors, write_folder

# What both published models have in their config.json, and in what they differ.
BOTH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "expert_dtype": "fp4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
FLASH: dict[str, Any] = BOTH | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "index_topk": 512,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
}
PRO: dict[str, Any] = BOTH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
}
WIDE = 128  # the expert_width at which the halves of gate and up begin a block of 128 rows each


# ---- configurations


@pytest.mark.parametrize(
    ("published", "cfg"), [(FLASH, ModelConfig.flash()), (PRO, ModelConfig.pro())], ids=["flash", "pro"]
)
def test_published_configurations(published, cfg):
    assert ModelConfig.from_hf(published) == cfg
    # Those for drafts with DSpark end in three ratios more, one for each of its layers.
    assert ModelConfig.from_hf(published | {"compress_ratios": published["compress_ratios"] + [0, 0]}) == cfg
    assert cfg.num_layers == published["num_hidden_layers"]
    assert [cfg.picks_by_id(layer) for layer in (0, 2, 3, None)] == [True, True, False, False]
    assert cfg.draft_attention.compress_ratios == (0,)
    assert dataclasses.replace(cfg.draft_attention, compress_ratios=cfg.attention.compress_ratios) == cfg.attention


@pytest.mark.parametrize("file", ["hf", "hf_modules"])
def test_both_forms_give_the_same(tmp_path, file):
    """transformers has no num_hash_layers and no compress_ratios, and names the kinds of layers one by one."""
    given = json.loads((MODELS / "a" / f"{file}.json").read_text())["config"]
    assert not {"num_hash_layers", "compress_ratios", "rope_scaling", "topk_method"} & set(given)
    cfg = ModelConfig.from_hf(MODELS / "a")
    assert ModelConfig.from_hf(given) == cfg
    path = tmp_path / "other.json"
    path.write_text(json.dumps(given))
    assert ModelConfig.from_hf(path) == ModelConfig.from_hf(str(path)) == cfg
    assert (cfg.num_layers, cfg.num_hash_layers, cfg.swiglu_limit) == (5, 3, 2.0)


@pytest.mark.parametrize("cfg", [ModelConfig.flash(), ModelConfig.pro(), ModelConfig.tiny()])
def test_the_form_that_tests_write_gives_the_same(cfg):
    assert ModelConfig.from_hf(published_config(cfg)) == cfg


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"eos_token_id": None}, "stop_tokens", ()),
        ({"eos_token_id": [1, 7]}, "stop_tokens", (1, 7)),
        ({"swiglu_limit": None}, "swiglu_limit", 0.0),
        ({"num_hash_layers": 0}, "num_hash_layers", 0),
        ({"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 41}, "num_hash_layers", 2),
        ({"mlp_layer_types": ["moe"] * 43}, "num_hash_layers", 0),
    ],
)
def test_keys_that_may_be_absent_or_have_another_form(change, field, value):
    assert ModelConfig.from_hf(FLASH | change) == dataclasses.replace(ModelConfig.flash(), **{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts=2; only 1 is known"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'; only 'sqrtsoftplus' is known"),
        ({"topk_method": "greedy"}, "topk_method='greedy'; only 'noaux_tc' is known"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is known"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True; only False is known"),
        ({"attention_bias": True}, "attention_bias=True; only False is known"),
        ({"hc_mult": None, "n_routed_experts": None}, r"lacks \['n_routed_experts', 'hc_mult'\]"),
        ({"num_hidden_layers": None}, r"lacks \['num_hidden_layers'\]"),
        ({"num_hash_layers": None}, r"lacks num_hash_layers \(or mlp_layer_types\)"),
        ({"index_topk": None}, r"lacks \['index_topk'\]"),
        ({"mlp_layer_types": ["moe"] + ["hash_moe"] * 42}, "mlp_layer_types must be hash_moe for the first layers"),
        ({"mlp_layer_types": ["moe"] * 42}, "mlp_layer_types must be hash_moe for the first layers"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types must be hash_moe for the first layers"),
        ({"compress_ratios": [0, 4]}, "layer schedule has 2 entries, num_hidden_layers is 43"),
        # Values of other types, under the names that they have in the file.
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer of at least 0, got '</s>'"),
        ({"eos_token_id": [1, 1.5]}, "eos_token_id must be an integer of at least 0, got 1.5"),
        ({"eos_token_id": 1.5}, "eos_token_id must be an integer of at least 0, got 1.5"),
        ({"vocab_size": "129280"}, "vocab_size must be an integer of at least 1, got '129280'"),
        ({"hc_mult": 1.5}, "hc_mult must be an integer of at least 1, got 1.5"),
        ({"routed_scaling_factor": "1.5"}, "routed_scaling_factor must be a number, got '1.5'"),
        ({"hc_eps": []}, r"hc_eps must be a number, got \[\]"),
        ({"swiglu_limit": "x"}, "swiglu_limit must be a number, got 'x'"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers must be an integer of at least 1, got '5'"),
        ({"num_hash_layers": "3"}, "num_hash_layers must be an integer of at least 0, got '3'"),
        ({"mlp_layer_types": 5}, "mlp_layer_types must be hash_moe for the first layers and moe for the rest, got 5"),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(FLASH | change)


@pytest.mark.parametrize("read", [ModelConfig.from_hf, load_model])
@pytest.mark.parametrize("content", [b"", b'{"hc_mult": 4', b"\xff"], ids=["empty", "cut short", "no UTF-8"])
def test_a_file_that_is_no_json_is_named(tmp_path, content, read):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^cannot read {re.escape(str(file))}: "):
        read(tmp_path)


SIZES = ["vocab_size", "expert_width", "num_experts", "experts_per_token", "num_streams", "sinkhorn_iterations"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got "):
        ModelConfig.tiny(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer of at least 0, got -1"),
        ({"num_hash_layers": 4}, "num_hash_layers=4 exceeds the model's 3 layers"),
        ({"experts_per_token": 9}, "experts_per_token=9 exceeds num_experts=8"),
        ({"routed_scale": 0.0}, "routed_scale must be positive, got 0.0"),
        ({"routed_scale": "1"}, "routed_scale must be a number, got '1'"),
        ({"hyper_eps": -1e-6}, "hyper_eps must be positive, got -1e-06"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be positive, got -1.0"),
        ({"stop_tokens": (1, -1)}, r"stop_tokens\[1\] must be an integer of at least 0, got -1"),
        ({"stop_tokens": 5}, "stop_tokens must be token ids, got 5"),
        ({"stop_tokens": "5"}, "stop_tokens must be token ids, got '5'"),
        ({"routed_scale": math.nan}, "routed_scale must be positive, got nan"),
        ({"hyper_eps": math.inf}, "hyper_eps must be positive, got inf"),
        ({"swiglu_limit": math.nan}, "swiglu_limit must be positive, got nan"),
    ],
)
def test_fields_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**fields)


def test_numbers_of_numpy_are_kept_as_python_s():
    cfg = ModelConfig.tiny(num_experts=np.int32(8), routed_scale=np.float32(1.5), stop_tokens=[np.int64(3)])
    assert cfg == ModelConfig.tiny(stop_tokens=(3,))
    assert hash(cfg) == hash(ModelConfig.tiny(stop_tokens=(3,)))
    assert [type(value) for value in (cfg.num_experts, cfg.routed_scale, cfg.stop_tokens[0])] == [int, float, int]


# ---- random models


def shapes(cfg: ModelConfig, weights: str, drafts: int = 1, activations: str = "bf16") -> Any:
    return jax.eval_shape(lambda key: random_model(cfg, key, weights, activations, drafts), jax.random.key(0))


def sizes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def dtypes(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf.dtype for path, leaf in leaves}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each expert_width a folder of random tensors, and its configuration."""
    found = {}
    for width in (WIDE, 32):
        cfg = ModelConfig.tiny(expert_width=width)
        folder = tmp_path_factory.mktemp("folder")
        found[width] = write_folder(folder, random_tensors(cfg, 0), published_config(cfg)), cfg
    return found


@pytest.mark.parametrize(
    ("width", "weights"),
    first_of([(32, "f32"), (WIDE, "stored"), (WIDE, "bf16"), (WIDE, "f32"), (32, "stored")]),
)
def test_random_models_have_the_form_of_loaded_ones(folders, width, weights):
    folder, cfg = folders[width]
    loaded, drawn = load_model(folder, weights), shapes(cfg, weights)
    assert jax.tree.structure(drawn) == jax.tree.structure(loaded)
    assert sizes(drawn) == sizes(loaded)
    assert drawn.cfg == loaded.cfg


@pytest.mark.parametrize("weights", first_of(["stored", "bf16", "f32"]))
def test_random_models_have_the_dtypes_of_loaded_ones(folders, weights):
    folder, cfg = folders[WIDE]
    assert dtypes(shapes(cfg, weights)) == dtypes(load_model(folder, weights))


@pytest.mark.parametrize("activations", ["fp8", "fp8_all"])
def test_random_models_with_rounded_activations(folders, activations):
    folder, cfg = folders[WIDE]
    loaded = load_model(folder, activations=activations)
    assert jax.tree.structure(shapes(cfg, "stored", activations=activations)) == jax.tree.structure(loaded)
    leaves = jax.tree.leaves(loaded, is_leaf=lambda leaf: isinstance(leaf, StoredWeight | StoredExperts))
    found = {leaf.activations for leaf in leaves if isinstance(leaf, StoredWeight | StoredExperts)}
    assert found == ({"bf16", "fp8"} if activations == "fp8" else {"fp8"})


def test_random_models_without_drafts():
    with_drafts, without = shapes(ModelConfig.tiny(), "stored"), shapes(ModelConfig.tiny(), "stored", drafts=0)
    assert without.drafts is None
    assert jax.tree.structure(without) == jax.tree.structure(dataclasses.replace(with_drafts, drafts=None))


def numbers(weight: Any) -> np.ndarray:
    """The numbers of a weight [out, in], or those of the weights of all experts [E, out, in]."""
    if isinstance(weight, StoredWeight):
        return stored.values_of(weight)
    if isinstance(weight, StoredExperts):
        codes = np.asarray(weight.in_order(weight.codes))
        values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(weight.shape)]
        return values * per_number(np.asarray(weight.scales).astype(np.float64), weight.shape)
    return np.asarray(weight).astype(np.float64)


@pytest.mark.parametrize("weights", first_of(["stored", "f32"], count=0))
def test_random_weights_have_variance_1_by_in(weights):
    attention = d4.DSV4Config.tiny(hidden_size=512, head_dim=72, compress_ratios=(0, 0))
    cfg = ModelConfig.tiny(attention=attention, expert_width=384, num_experts=4, experts_per_token=2)
    params: Any = random_model(cfg, jax.random.key(1), weights, drafts=0)
    first, second = params.blocks
    for block in (first, second):
        for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
            weight = getattr(block.experts, name)
            found = numbers(weight)
            # The mean of n squares is off by up to 4 times sqrt(2 / n). Scales are s or 2 s, so that a block's square
            # has a deviation of at most 3/4 of the mean; that of all blocks is off by up to 3 * 3/4 / sqrt(blocks).
            blocks = math.prod(weight.scales.shape) if weights == "stored" else math.inf
            most = 4 * math.sqrt(2 / found.size) + 3 * 0.75 / math.sqrt(blocks)
            assert abs(np.mean(found**2) * found.shape[-1] - 1) < most, name
            assert abs(np.mean(found)) < 4 * math.sqrt(np.mean(found**2) / found.size), name
        gate = numbers(block.router.gate)
        assert abs(np.mean(gate**2) * 512 - 1) < 4 * math.sqrt(2 / gate.size)
        assert abs(np.mean(numbers(block.experts_norm)) - 1) < 4 * 0.1 / math.sqrt(512)
    head = numbers(params.head)
    assert abs(np.mean(head**2) * 512 - 1) < 4 * math.sqrt(2 / head.size)
    # Which experts: the first layer's are all different, and any may be there; the second has a bias in place of ids.
    table = np.asarray(first.router.table)
    assert (table.shape, table.dtype, first.router.bias) == ((256, 2), np.int32, None)
    assert np.all(table[:, 0] != table[:, 1])
    assert set(table.ravel()) == {0, 1, 2, 3}
    assert second.router.table is None
    assert second.router.bias.dtype == jnp.float32
    # Layers differ, and a key gives the same model again.
    assert np.mean(numbers(first.experts.down) == numbers(second.experts.down)) < 0.1  # of FP4, by chance: 7 %
    assert_same(params, random_model(cfg, jax.random.key(1), weights, drafts=0))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"weights": "narrow"}, "weights must be one of .*, got 'narrow'"),
        ({}, {"activations": "int8"}, r"activations must be one of \['bf16', 'fp8', 'fp8_all'\], got 'int8'"),
        ({}, {"weights": "f32", "activations": "fp8"}, "activations='fp8' is for weights='stored'"),
        ({"expert_width": 24}, {}, "hidden_size=64 and expert_width=24 must be divisible by 32"),
    ],
)
def test_random_models_that_are_refused(fields, options, message):
    with pytest.raises(ValueError, match=message):
        random_model(ModelConfig.tiny(**fields), jax.random.key(0), **options)


def test_wide_random_models_take_any_width():
    assert shapes(ModelConfig.tiny(expert_width=24), "bf16").blocks[0].experts.down.shape == (8, 64, 24)
