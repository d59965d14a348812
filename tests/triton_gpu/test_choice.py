"""When kernels in Triton are chosen, and what is said where they cannot be."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

import dsv4jax as d4
from dsv4jax.layer.kernels import triton
from dsv4jax.layer.ops import CACHE_UPDATE, DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, PROJECTIONS, TOP_K
from tests.layer import test_read_kernels as layers
from tests.support.cases import first_of
from tests.support.lane_kernels import mesh_of
from tests.support.paths import ROOT
from tests.support.triton import EXTRA, requires_extra, runs_here

SWA, CSA, HCA = d4.AttentionType.SWA, d4.AttentionType.CSA, d4.AttentionType.HCA
OPS = (CACHE_UPDATE, DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, TOP_K)
PLAN = d4.plan_cache(d4.DSV4Config.flash(), max_requests=1, max_context=1024)
A100, H200 = mesh_of("8.0", "NVIDIA A100"), mesh_of("9.0", "NVIDIA H200")


@pytest.fixture
def compiling(monkeypatch):
    """As in a process that compiles kernels."""
    if all(map(importlib.util.find_spec, EXTRA)):  # before the variable is gone, which their modules read
        importlib.import_module("pallas_kernels.triton_gpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "_warned", set())


@pytest.mark.usefixtures("compiling")
@requires_extra
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "12.0", "12.1"])
def test_gpus_that_other_kernels_do_not_serve_run_triton(capability):
    with jax.sharding.use_abstract_mesh(mesh_of(capability, "NVIDIA")), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {op.choose(None, PLAN, CSA) for op in OPS} == {"triton"}
        assert {op.choose("triton", PLAN, CSA) for op in OPS} == {"triton"}
        assert {PROJECTIONS.choose(backend, PLAN, CSA) for backend in (None, "triton")} == {"xla"}


@pytest.mark.usefixtures("compiling")
@requires_extra
def test_others_run_what_they_ran():
    with jax.sharding.use_abstract_mesh(H200):
        assert {op.choose(None, PLAN, CSA) for op in OPS} == {"pallas"}
        assert {op.choose("triton", PLAN, CSA) for op in OPS} == {"triton"}
        plain = d4.plan_cache(d4.DSV4Config.flash(), max_requests=1, max_context=1024, kv_format="f32")
        assert DECODE_ATTENTION.choose(None, plain, CSA) == "xla"
    for mesh in (mesh_of("7.5", "NVIDIA T4"), mesh_of(None, "TPU v6e", "tpu")):
        with jax.sharding.use_abstract_mesh(mesh):
            assert {op.choose(None, PLAN, CSA) for op in OPS} == {"xla"}


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (mesh_of("7.5", "NVIDIA T4"), "it needs compute capability 8.0 or newer, NVIDIA T4 has 7.5"),
        (mesh_of(None, "TPU v6e", "tpu"), "it needs an NVIDIA GPU, the target is tpu"),
    ],
)
@requires_extra
def test_a_named_backend_says_why_it_cannot_serve(mesh, reason):
    for op in OPS:
        with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=f"cannot serve {op.name}: {reason}"):
            op.choose("triton", PLAN, CSA)


@pytest.mark.usefixtures("compiling")
def test_without_the_extra_xla_runs_and_one_warning_names_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax_triton" else found(name))
    with jax.sharding.use_abstract_mesh(A100):
        with pytest.warns(triton.MissingExtraWarning, match=r"on NVIDIA A100 .* lacks the extra \"triton\""):
            assert CACHE_UPDATE.choose(None, PLAN, CSA) == "xla"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert {op.choose(None, PLAN, kind) for op in OPS for kind in d4.AttentionType} == {"xla"}
        with pytest.raises(ValueError, match=r"cannot serve cache_update: it needs the extra"):
            CACHE_UPDATE.choose("triton", PLAN, CSA)
    with jax.sharding.use_abstract_mesh(H200), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CACHE_UPDATE.choose(None, PLAN, CSA) == "pallas"


@requires_extra
@pytest.mark.parametrize(
    ("op", "change", "options", "reason"),
    [
        (DECODE_ATTENTION, {}, dict(kv_format="f32"), "kv_format must be one of"),
        (DECODE_ATTENTION, dict(num_heads=24, o_groups=8), {}, "num_heads must be a multiple of 16, got 24"),
        (INDEXER_SCORES, dict(indexer_head_dim=256), {}, "key_dim must be 32, 64 or 128, got 256"),
        (CACHE_UPDATE, dict(csa_compression_ratio=32, compress_ratios=(0, 32, 128)), {}, "CSA ratio must be at most"),
    ],
)
def test_sizes_that_its_kernels_do_not_serve(op, change, options, reason):
    cfg = d4.DSV4Config(**(dict(compress_ratios=(0, 4, 128)) | change))
    plan = d4.plan_cache(cfg, max_requests=1, max_context=1024, **options)
    with jax.sharding.use_abstract_mesh(A100), pytest.raises(ValueError, match=reason):
        op.choose("triton", plan, CSA)


def test_the_extra_has_the_versions_that_messages_name():
    (pinned,) = re.findall(r"^triton = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert triton.EXTRA.endswith("pip install " + pinned.replace(",", ""))


def test_it_is_listed_for_the_ops_that_it_implements():
    assert {name for name, backends in d4.backends().items() if "triton" in backends} == {op.name for op in OPS}


@pytest.mark.slow
def test_triton_is_imported_only_when_it_is_used():
    program = "import sys, dsv4jax; assert not {'triton', 'jax_triton'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(("kind", "tokens"), first_of([(CSA, 1), (HCA, 3)], count=0))
@runs_here()
def test_a_layer_gives_what_it_gives_in_xla(kind, tokens):
    case = layers.SMALL, kind, tokens, layers.TRAINED
    layers.assert_alike(layers.run(*case, "triton"), layers.run(*case, "xla"))


@runs_here()
def test_a_derivative_is_refused():
    pool = d4.init_cache(PLAN).stack("csa").pool
    assert pool is not None
    entries, place = pool.entries, (0, jnp.zeros((1, 8), jnp.int32), jnp.zeros(1, jnp.int32))

    def total(rope: jax.Array) -> jax.Array:
        given = d4.PagedPool(entries=dataclasses.replace(entries, rope=rope), indexer_keys=None)
        picks = jnp.zeros((1, 1), jnp.int32)
        return d4.pieces.gather_compressed(given, *place, picks, plan=PLAN, backend="triton").sum()

    derivative = jax.grad(total)
    with pytest.raises(ValueError, match="backend='triton' cannot serve a derivative of gather_rows"):
        derivative(entries.rope)
