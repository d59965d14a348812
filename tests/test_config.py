"""Presets have the published sizes; configurations are read, or refused with a message that says what was found."""

import copy
import dataclasses
import json
import re

import pytest

import dsv4jax as d4
from tests.support import recorded

CSA, HCA, SWA = d4.AttentionType.CSA, d4.AttentionType.HCA, d4.AttentionType.SWA

FLASH_RATIOS = (0, 0) + (4, 128) * 20 + (4,)
PRO_RATIOS = (128, 128) + (4, 128) * 29 + (4,)


def deepseek_json(**changes):
    """Return V4-Flash's attention as in DeepSeek's config.json, with the ratio of its MTP layer at the end."""
    fields = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 129280,
        "num_hidden_layers": 43,
        "num_nextn_predict_layers": 1,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [*FLASH_RATIOS, 0],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def transformers_json(kind: str):
    """Return the configuration that transformers wrote for a recorded layer."""
    return copy.deepcopy(json.loads(bytes(recorded.load(kind).arrays["hf_config"])))


# ---- presets


def test_flash_has_the_published_sizes():
    assert dataclasses.asdict(d4.DSV4Config.flash()) == {
        "hidden_size": 4096,
        "num_heads": 64,
        "head_dim": 512,
        "rope_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": FLASH_RATIOS,
        "csa_compression_ratio": 4,
        "hca_compression_ratio": 128,
        "indexer_heads": 64,
        "indexer_head_dim": 128,
        "indexer_top_k": 512,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "yarn_factor": 16.0,
        "yarn_original_max_position": 65536,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "norm_eps": 1e-6,
    }
    assert d4.DSV4Config.flash().num_layers == 43


def test_pro_differs_from_flash_in_the_published_sizes_alone():
    pro = d4.DSV4Config.pro()
    differing = {
        "hidden_size": 7168,
        "num_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "indexer_top_k": 1024,
        "compress_ratios": PRO_RATIOS,
    }
    assert pro == dataclasses.replace(d4.DSV4Config.flash(), **differing)
    assert pro.num_layers == 61


@pytest.mark.parametrize(
    ("cfg", "counts", "first", "last"),
    [
        (d4.DSV4Config.flash(), {SWA: 2, CSA: 21, HCA: 20}, [SWA, SWA, CSA, HCA], [HCA, CSA]),
        (d4.DSV4Config.pro(), {SWA: 0, CSA: 30, HCA: 31}, [HCA, HCA, CSA, HCA], [HCA, CSA]),
        (d4.DSV4Config.tiny(), {SWA: 1, CSA: 1, HCA: 1}, [SWA, CSA, HCA], [CSA, HCA]),
    ],
    ids=["flash", "pro", "tiny"],
)
def test_schedule_of_the_presets(cfg, counts, first, last):
    schedule = d4.config.layer_schedule(cfg)
    kinds = [spec.attn for spec in schedule]
    assert [spec.layer_idx for spec in schedule] == list(range(cfg.num_layers))
    assert {kind: kinds.count(kind) for kind in d4.AttentionType} == counts
    assert kinds[: len(first)] == first
    assert kinds[-len(last) :] == last


def test_a_block_is_128_tokens_and_in_general_the_least_common_multiple():
    assert d4.DSV4Config.flash().block_tokens == 128
    odd = d4.DSV4Config.tiny(csa_compression_ratio=4, hca_compression_ratio=6, compress_ratios=(0, 4, 6))
    assert odd.block_tokens == 12
    assert [odd.ratio(kind) for kind in (SWA, CSA, HCA)] == [0, 4, 6]


def test_a_config_is_hashable_and_replaceable():
    cfg = d4.DSV4Config.tiny()
    assert hash(cfg) == hash(d4.DSV4Config.tiny())
    changed = dataclasses.replace(cfg, num_heads=8, compress_ratios=[4, 4])
    assert (changed.num_heads, changed.compress_ratios) == (8, (4, 4))  # a list becomes a tuple, which hashes
    assert hash(changed) != hash(cfg)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.num_heads = 8  # pyright: ignore[reportAttributeAccessIssue]
    assert d4.DSV4Config.tiny(indexer_top_k=3).indexer_top_k == 3


# ---- sizes that break a rule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads must be positive, got 0"),
        ({"sliding_window": -1}, "sliding_window must be positive, got -1"),
        ({"norm_eps": 0.0}, r"norm_eps must be positive, got 0\.0"),
        ({"yarn_factor": float("nan")}, "yarn_factor must be positive, got nan"),
        ({"compress_ratios": ()}, "compress_ratios is empty"),
        ({"compress_ratios": (0, 4, 16, 128, 7)}, r"compress_ratios holds \[7, 16\]; each must be one of .*128"),
        ({"csa_compression_ratio": 128}, "csa_compression_ratio=128 and hca_compression_ratio=128 must differ"),
        ({"num_heads": 5}, "num_heads=5 must be divisible by o_groups=2"),
        ({"rope_dim": 7}, "rope_dim=7 must be even and below head_dim=136"),
        ({"rope_dim": 136}, "rope_dim=136 must be even and below head_dim=136"),
        ({"indexer_head_dim": 4}, "rope_dim=8 must not exceed indexer_head_dim=4"),
        ({"indexer_head_dim": 96}, "indexer_head_dim=96 must be a power of two"),
    ],
)
def test_a_broken_rule_is_named_with_its_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        d4.DSV4Config.tiny(**changes)


# ---- DeepSeek's config.json


def test_deepseek_json_gives_flash():
    assert d4.DSV4Config.from_hf(deepseek_json()) == d4.DSV4Config.flash()


@pytest.mark.parametrize("extra", [[], [0], [0, 0, 0]], ids=["no MTP", "one MTP", "three MTP"])
def test_ratios_of_mtp_layers_are_dropped(extra):
    assert d4.DSV4Config.from_hf(deepseek_json(compress_ratios=[*FLASH_RATIOS, *extra])) == d4.DSV4Config.flash()


def test_every_key_of_deepseek_json_reaches_its_field():
    """Each key in turn gets a different value, and exactly its field must change."""
    reaches = {
        "hidden_size": ("hidden_size", 4097),
        "num_attention_heads": ("num_heads", 32),
        "head_dim": ("head_dim", 520),
        "qk_rope_head_dim": ("rope_dim", 32),
        "q_lora_rank": ("q_lora_rank", 3),
        "o_groups": ("o_groups", 4),
        "o_lora_rank": ("o_lora_rank", 5),
        "sliding_window": ("sliding_window", 100),
        "index_n_heads": ("indexer_heads", 7),
        "index_head_dim": ("indexer_head_dim", 64),
        "index_topk": ("indexer_top_k", 9),
        "rms_norm_eps": ("norm_eps", 1e-5),
        "rope_theta": ("rope_theta", 11.0),
        "compress_rope_theta": ("compress_rope_theta", 12.0),
    }
    in_scaling = {
        "factor": ("yarn_factor", 13),
        "original_max_position_embeddings": ("yarn_original_max_position", 14),
        "beta_fast": ("yarn_beta_fast", 15),
        "beta_slow": ("yarn_beta_slow", 16),
    }
    flash, scaling = d4.DSV4Config.flash(), deepseek_json()["rope_scaling"]
    for key, (field, value) in reaches.items():
        assert d4.DSV4Config.from_hf(deepseek_json(**{key: value})) == dataclasses.replace(flash, **{field: value}), key
    for key, (field, value) in in_scaling.items():
        changed = deepseek_json(rope_scaling=scaling | {key: value})
        assert d4.DSV4Config.from_hf(changed) == dataclasses.replace(flash, **{field: value}), key


@pytest.mark.parametrize("as_text", [str, lambda path: path], ids=["str", "path"])
def test_a_file_and_its_folder_are_read(tmp_path, as_text):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(deepseek_json()))
    assert d4.DSV4Config.from_hf(as_text(file)) == d4.DSV4Config.flash()
    assert d4.DSV4Config.from_hf(as_text(tmp_path)) == d4.DSV4Config.flash()
    renamed = file.rename(tmp_path / "flash.json")
    assert d4.DSV4Config.from_hf(as_text(renamed)) == d4.DSV4Config.flash()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        d4.DSV4Config.from_hf(as_text(tmp_path))


# ---- the form transformers writes


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_recorded_transformers_config_agrees_with_the_plain_sizes_beside_it(kind):
    arrays = recorded.load(kind).arrays
    plain = json.loads(bytes(arrays["config"]))
    yarn = plain.pop("yarn")
    ratio = plain.pop("compress_ratio")
    del plain["seed"], plain["tokens"]
    want = d4.DSV4Config(
        **plain,
        compress_ratios=(ratio,),
        yarn_factor=yarn["factor"],
        yarn_original_max_position=yarn["original_max_position_embeddings"],
        yarn_beta_fast=yarn["beta_fast"],
        yarn_beta_slow=yarn["beta_slow"],
    )
    assert d4.DSV4Config.from_hf(transformers_json(kind)) == want


def test_layer_types_follow_their_compress_rates():
    hf = transformers_json("csa")
    hf["num_hidden_layers"] = 4
    hf["layer_types"] = [
        "heavily_compressed_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",  # past num_hidden_layers
    ]
    hf["compress_rates"] = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    cfg = d4.DSV4Config.from_hf(hf)
    assert cfg.compress_ratios == (64, 0, 8, 64)
    assert (cfg.csa_compression_ratio, cfg.hca_compression_ratio) == (8, 64)


def test_rope_parameters_are_read_flat_and_by_layer_group():
    """The same sizes are given in three spellings."""
    keyed = transformers_json("csa")
    want = d4.DSV4Config.from_hf(keyed)
    assert keyed["rope_parameters"].keys() == {"main", "compress"}
    assert (want.yarn_factor, want.yarn_original_max_position) == (16, 64)
    flat = keyed | {"rope_parameters": keyed["rope_parameters"]["compress"]}
    assert d4.DSV4Config.from_hf(flat) == want
    scaled = {name: value for name, value in keyed.items() if name != "rope_parameters"}
    scaled["rope_scaling"] = keyed["rope_parameters"]["compress"]
    assert d4.DSV4Config.from_hf(scaled) == want


def test_thetas_are_found_inside_keyed_rope_parameters():
    hf = transformers_json("csa")
    del hf["rope_theta"], hf["compress_rope_theta"]
    hf["rope_parameters"]["main"]["rope_theta"] = 123.0
    hf["rope_parameters"]["compress"]["rope_theta"] = 456.0
    cfg = d4.DSV4Config.from_hf(hf)
    assert (cfg.rope_theta, cfg.compress_rope_theta) == (123.0, 456.0)


def test_rope_dim_is_found_as_a_fraction_of_the_head():
    hf = transformers_json("csa")
    del hf["qk_rope_head_dim"]
    assert hf["partial_rotary_factor"] == 8 / 136
    assert d4.DSV4Config.from_hf(hf).rope_dim == 8


# ---- configurations that are refused


def test_an_unknown_layer_type_is_named():
    hf = transformers_json("csa") | {"layer_types": ["full_attention"]}
    with pytest.raises(ValueError, match=r"layer_types holds \['full_attention'\]; known are .*sliding_attention"):
        d4.DSV4Config.from_hf(hf)


def test_a_missing_schedule_is_never_made_up():
    with pytest.raises(ValueError, match=r"no layer schedule: neither compress_ratios nor layer_types.*'head_dim'"):
        d4.DSV4Config.from_hf(deepseek_json(compress_ratios=None))


def test_a_schedule_shorter_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"schedule has 3 entries, num_hidden_layers is 43: \[0, 0, 4\]"):
        d4.DSV4Config.from_hf(deepseek_json(compress_ratios=[0, 0, 4]))
    hf = transformers_json("csa") | {"num_hidden_layers": 2}
    with pytest.raises(ValueError, match="schedule has 1 entries, num_hidden_layers is 2"):
        d4.DSV4Config.from_hf(hf)


def test_an_unknown_ratio_is_named():
    with pytest.raises(ValueError, match=r"compress_ratios holds \[16\]"):
        d4.DSV4Config.from_hf(deepseek_json(compress_ratios=[16] * 43))


REQUIRED = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_each_missing_key_is_named(key):
    with pytest.raises(ValueError, match=rf"configuration lacks .*\b{key}\b"):
        d4.DSV4Config.from_hf(deepseek_json(**{key: None}))


def test_missing_keys_are_named_together():
    with pytest.raises(ValueError, match=r"lacks \['o_groups', 'index_topk'\]"):
        d4.DSV4Config.from_hf(deepseek_json(o_groups=None, index_topk=None))


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
def test_each_missing_yarn_key_is_named_with_what_was_found(key):
    scaling = {name: value for name, value in deepseek_json()["rope_scaling"].items() if name != key}
    with pytest.raises(ValueError, match=rf"lacks \['{key}'\]; found .*'type': 'yarn'"):
        d4.DSV4Config.from_hf(deepseek_json(rope_scaling=scaling))
    with pytest.raises(ValueError, match=rf"lacks .*'{key}'"):
        d4.DSV4Config.from_hf(deepseek_json(rope_scaling=None))


@pytest.mark.parametrize("value", [[4], "yarn", 3.5, True])
def test_a_part_that_is_no_object_is_named(value):
    """Whether DeepSeek's file has it or transformers', and however deep it is."""
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=rf"^{key} must be a JSON object, got {re.escape(repr(value))}$"):
            d4.DSV4Config.from_hf(deepseek_json(**{key: value}))
    for key in ("main", "compress"):
        hf = transformers_json("csa")
        hf["rope_parameters"][key] = value
        with pytest.raises(ValueError, match=rf"^rope_parameters\.{key} must be a JSON object, got "):
            d4.DSV4Config.from_hf(hf)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        ("0.5", "must be a number, got '0.5'"),
        ([0.5], r"must be a number, got \[0.5\]"),
        (float("nan"), "must be between 0 and 1, got nan"),
        (8, "must be between 0 and 1, got 8.0"),
    ],
)
def test_a_fraction_of_the_head_that_is_none_is_named(factor, message):
    hf = transformers_json("csa") | {"partial_rotary_factor": factor}
    del hf["qk_rope_head_dim"]
    with pytest.raises(ValueError, match=f"^partial_rotary_factor {message}$"):
        d4.DSV4Config.from_hf(hf)
