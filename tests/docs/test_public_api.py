"""What the package promises: names, signatures, and an import that touches no device."""

import dataclasses
import importlib.metadata
import inspect
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

import dsv4jax as d4

REQUIRED = inspect.Parameter.empty

WIDE = {"weights": "wide", "activations": "bf16", "block": None}  # how the weights of a single layer are held
FUNCTIONS = {
    "plan_cache": {
        "cfg": REQUIRED,
        "max_requests": 8,
        "max_context": 131072,
        "kv_format": "fp8_row",
        "indexer_format": "nvfp4",
        "tail_dtype": jnp.float32,
        "hca_tail": "ring",
        "num_blocks": None,
        "headroom": 1.10,
    },
    "init_cache": {"plan": REQUIRED, "mesh": None, "axis": "data"},
    "abstract_cache": {"plan": REQUIRED, "mesh": None, "axis": "data"},
    "partition_specs": {"plan": REQUIRED, "mesh": REQUIRED, "axis": "data"},
    "shardings": {"plan": REQUIRED, "mesh": REQUIRED, "axis": "data"},
    "params_specs": {"cfg": REQUIRED, "layer": REQUIRED, "mesh": REQUIRED, "axis": "model", **WIDE},
    "admit": {"cache": REQUIRED, "n": REQUIRED, "where": None},
    "prepare_forward": {"cache": REQUIRED, "slots": REQUIRED, "num_new": REQUIRED},
    "prepare_rows": {"cache": REQUIRED, "slots": REQUIRED, "num_new": REQUIRED},
    "explain_forward": {"cache": REQUIRED, "slots": REQUIRED, "num_new": REQUIRED},
    "attention_layer": {
        "params": REQUIRED,
        "x": REQUIRED,
        "cache": REQUIRED,
        "layer": REQUIRED,
        "slots": REQUIRED,
        "num_new": REQUIRED,
        "backend": None,
        "model_axis": None,
        "residual": None,
    },
    "attention": {
        "params": REQUIRED,
        "x": REQUIRED,
        "cfg": REQUIRED,
        "layer": REQUIRED,
        "lengths": None,
        "kv_format": "f32",
        "indexer_format": "f32",
    },
    "attention_layer_at": {
        "params": REQUIRED,
        "x": REQUIRED,
        "cache": REQUIRED,
        "kind": REQUIRED,
        "index": REQUIRED,
        "slots": REQUIRED,
        "num_new": REQUIRED,
        "backend": None,
        "model_axis": None,
        "residual": None,
    },
    "stage": {
        "params": REQUIRED,
        "x": REQUIRED,
        "cache": REQUIRED,
        "layer": REQUIRED,
        "slots": REQUIRED,
        "num_new": REQUIRED,
        "backend": None,
        "model_axis": None,
        "residual": None,
    },
    "commit": {"cache": REQUIRED, "staged": REQUIRED, "num_accepted": REQUIRED, "backend": None},
    "advance": {"cache": REQUIRED, "slots": REQUIRED, "num_new": REQUIRED},
    "release": {"cache": REQUIRED, "slots": REQUIRED},
    "fork": {"cache": REQUIRED, "source_slot": REQUIRED, "target_slots": REQUIRED},
    "init_attention_params": {
        "key": REQUIRED,
        "cfg": REQUIRED,
        "layer": REQUIRED,
        "dtype": jnp.float32,
        **WIDE,
    },
    "load_attention_params": {"tensors": REQUIRED, "cfg": REQUIRED, "layer": REQUIRED, "naming": "hf", **WIDE},
    "load_safetensors": {
        "path": REQUIRED,
        "cfg": REQUIRED,
        "layer": REQUIRED,
        "weights": "stored",
        "activations": "bf16",
    },
    "project": {"x": REQUIRED, "weight": REQUIRED, "dtype": jnp.float32, "groups": 1, "backend": None},
    "acquire": {"cache": REQUIRED, "layer": REQUIRED, "slots": REQUIRED, "num_new": REQUIRED, "backend": None},
    "layer_schedule": {"cfg": REQUIRED},
    "build_schema": {"cfg": REQUIRED, "layer": REQUIRED},
    "compute_block_budget": {"cfg": REQUIRED, "max_context": REQUIRED, "max_requests": REQUIRED, "headroom": 1.10},
    "backends": {},
    "extract": {"cache": REQUIRED, "slots": REQUIRED},
    "insert": {"cache": REQUIRED, "snapshot": REQUIRED},
    "save": {"path": REQUIRED, "value": REQUIRED},
    "restore": {"path": REQUIRED, "plan": None, "device": None},
    "describe": {"cache": REQUIRED},
    "verify": {"cache": REQUIRED},
    "checked": {"function": REQUIRED},
}

# The functions under the facade, and the argument that each updates in place.
UPDATES = {
    "append_swa": "state",
    "append_tail": "state",
    "flush_csa": "pool",
    "flush_hca": "pool",
    "rotate_csa": "state",
    "reset_hca": "state",
    "reset_slots": "state",
}
READS = ("gather_compressed", "gather_all_compressed", "gather_swa", "select_entries", "decode_attention")

CONFIG_FIELDS = {
    "hidden_size",
    "num_heads",
    "head_dim",
    "rope_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "compress_ratios",
    "csa_compression_ratio",
    "hca_compression_ratio",
    "indexer_heads",
    "indexer_head_dim",
    "indexer_top_k",
    "rope_theta",
    "compress_rope_theta",
    "yarn_factor",
    "yarn_original_max_position",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "norm_eps",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures(name):
    """Names, order and defaults; any argument can be given by position or by name."""
    parameters = inspect.signature(getattr(d4, name)).parameters
    assert {key: parameter.default for key, parameter in parameters.items()} == FUNCTIONS[name]
    assert list(parameters) == list(FUNCTIONS[name])
    assert {parameter.kind for parameter in parameters.values()} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", [*UPDATES, *READS])
def test_pieces_are_jitted_and_expose_the_function_under_the_jit(name):
    piece = getattr(d4, name)
    assert hasattr(piece, "lower"), "not under jit"
    assert inspect.isfunction(piece.__wrapped__)
    assert not hasattr(piece.__wrapped__, "lower"), "the twin under the jit must not donate"
    if name in UPDATES:
        assert next(iter(inspect.signature(piece).parameters)) == UPDATES[name]


def test_config_fields_and_constructors():
    assert {field.name for field in dataclasses.fields(d4.DSV4Config)} == CONFIG_FIELDS
    for constructor in ("flash", "pro", "tiny", "from_hf"):
        assert inspect.ismethod(getattr(d4.DSV4Config, constructor)), constructor


def test_types_of_the_contract():
    assert [kind.value for kind in d4.AttentionType] == ["swa", "csa", "hca"]
    assert [field.name for field in dataclasses.fields(d4.LayerSpec)] == ["layer_idx", "attn"]
    for name in ("CachePlan", "LayerCacheSchema", "KVCache", "LayerStack", "StateCache", "PagedPool", "Tables"):
        parameters = getattr(d4, name).__dataclass_params__
        assert parameters.frozen, name
    plan = d4.plan_cache(d4.DSV4Config.tiny())
    assert plan.memory_bytes() > plan.bytes_per_request > plan.bytes_per_token > 0
    assert isinstance(d4.KVCache.seq_lens, property)


def test_methods_of_a_handle():
    methods = {
        "write_swa",
        "flush_compression",
        "gather_swa",
        "gather_compressed",
        "gather_all_compressed",
        "read_swa_view",
        "read_classical_view",
        "read_indexer_view",
        "positions",
        "visible",
        "entries",
        "window",
    }
    assert methods <= set(dir(d4.LayerCacheHandle))
    assert "cache" in {field.name for field in dataclasses.fields(d4.LayerCacheHandle)}


def test_formats_of_the_contract():
    from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS

    assert list(KV_FORMATS) == ["f32", "bf16", "fp8_row", "fp8_tile64"]
    assert set(INDEXER_FORMATS) == {"f32", "bf16", "nvfp4", "mxfp4"}


def test_backends_lists_ops_and_is_the_callers_own():
    ops = d4.backends()
    assert ops
    assert all("xla" in names for names in ops.values()), "XLA is the reference of every op"
    ops.clear()
    assert d4.backends()


def test_the_model_and_the_version_are_attributes(monkeypatch):
    """Also of a folder that is on the path, but not installed."""
    assert d4.model is sys.modules["dsv4jax.model"]
    assert d4.__version__ == importlib.metadata.version("dsv4jax")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        assert importlib.reload(d4).__version__ == "unknown"
    assert importlib.reload(d4).__version__ != "unknown"


def test_importing_touches_no_device():
    """Starting a backend takes GPU memory and fixes the platform before the user's program has a say.

    In a fresh process, every module of the package; the last lines show that the probe would have noticed.
    """
    program = """
import importlib, pkgutil
import dsv4jax
for module in pkgutil.walk_packages(dsv4jax.__path__, "dsv4jax."):
    importlib.import_module(module.name)
from dsv4jax import DSV4Config, plan_cache
str(plan_cache(DSV4Config.flash()))  # host arithmetic alone
from jax._src import xla_bridge  # no public function tells
assert not xla_bridge.backends_are_initialized(), "import or planning started a backend"
import jax
jax.devices()
assert xla_bridge.backends_are_initialized()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
