"""Which devices have kernels, and the messages for those that have none."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.ops import PROJECTIONS, TOP_K
from dsv4jax.weights.params import param_shapes
from pallas_kernels.attention import sm90
from pallas_kernels.language import target
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARPGROUP, Machine
from tests.support.lane_kernels import mesh_of, run, spec

KNOWN = {"9.0": ("NVIDIA H200", "sm90"), "10.0": ("NVIDIA B200", "sm100")}
UNKNOWN = {
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.9": "NVIDIA L40S",
    "10.3": "NVIDIA B300",
    "12.0": "NVIDIA RTX PRO 6000",
    "13.7": "a GPU of the future",
    "gfx942": "AMD Instinct MI300X",
}
CSA = d4.AttentionType.CSA
PLAN = d4.plan_cache(d4.DSV4Config.flash(), max_requests=1, max_context=4096)
NEEDED = "it needs compute capability 9.0 or 10.0, {} has {}"


def fill(machine: Machine, inputs: None, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)


def result(*, simulate: bool = False) -> jax.Array:
    return launch(fill, name="fill", grid=(1,), inputs=None, state=spec((WARPGROUP,), np.int32), simulate=simulate)


@pytest.mark.parametrize("capability", KNOWN)
def test_a_gpu_of_the_table_has_kernels(capability):
    name, architecture = KNOWN[capability]
    with jax.sharding.use_abstract_mesh(mesh_of(capability, name)):
        row = target.gpu()
        assert row is not None
        assert (row.capability, row.architecture) == (capability, architecture)
        assert row is target.gpu_or_first()
        assert (target.unsupported(), target.architecture()) == (None, architecture)
        assert TOP_K.choose(None, PLAN, CSA) == TOP_K.choose("pallas", PLAN, CSA) == "pallas"
        module = jax.jit(result).trace().lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in module


@pytest.mark.parametrize("capability", UNKNOWN)
def test_a_gpu_that_is_not_in_the_table_has_none(capability):
    name = UNKNOWN[capability]
    reason = NEEDED.format(name, capability)
    with jax.sharding.use_abstract_mesh(mesh_of(capability, name)):
        assert (target.gpu(), target.unsupported()) == (None, reason)
        assert target.gpu_or_first() is target.GPUS[0]
        assert PROJECTIONS.choose(None, PLAN, CSA) == "xla"  # which have no kernel in Triton either
        with pytest.raises(ValueError, match=f"backend='pallas' cannot serve projections: {reason}"):
            PROJECTIONS.choose("pallas", PLAN, CSA)
        with pytest.raises(ValueError, match=f"fill has no kernel for this target: {reason}"):
            jax.jit(result).trace()


def test_a_device_may_have_fewer_multiprocessors_than_its_row(monkeypatch):
    with jax.sharding.use_abstract_mesh(mesh_of("9.0", "NVIDIA H200")):
        assert target.multiprocessors() == target.HOPPER.multiprocessors
    card = types.SimpleNamespace(compute_capability="9.0", core_count=114)
    monkeypatch.setattr(target, "device", lambda: card)
    assert target.multiprocessors() == 114
    assert sm90.Layout(cluster=1).grid(4096, 2).blocks == (57, 2)


def test_a_device_that_is_no_gpu_has_none():
    with jax.sharding.use_abstract_mesh(mesh_of(None, "TPU v6e", "tpu")):
        assert target.unsupported() == "it needs an NVIDIA GPU, the target is tpu"
        with pytest.raises(ValueError, match=r"fill has no kernel .*: it needs an NVIDIA GPU, .* is tpu"):
            result()


def test_the_simulator_needs_no_gpu():
    """Whatever the target is, the kernel of the first row of the table runs."""
    with jax.sharding.use_abstract_mesh(mesh_of("8.0", UNKNOWN["8.0"])):
        assert target.architecture() == "sm90"
        jax.jit(lambda: result(simulate=True)).trace()
        assert TOP_K.choose("pallas_simulated", PLAN, CSA) == "pallas_simulated"
    np.testing.assert_array_equal(result(simulate=True), np.arange(WARPGROUP))


def traced_layer(backend: str | None) -> str:
    """Return the jaxpr of one decode step of a CSA layer of V4-Flash."""
    cfg = dataclasses.replace(d4.DSV4Config.flash(), compress_ratios=(4,))
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=2, max_context=4096))
    params, row = param_shapes(cfg, d4.AttentionType.CSA), spec((2,), np.int32)
    function = functools.partial(d4.attention_layer, layer=0, backend=backend)
    x = spec((2, 1, cfg.hidden_size), np.float32)
    return str(jax.make_jaxpr(function)(params, x, cache, slots=row, num_new=row))


@pytest.mark.slow
def test_a_layer_runs_without_these_kernels_where_there_are_none():
    """There backend=None uses others or XLA, and ``"pallas"`` raises an error that names the device."""
    kernels = [
        f"name={name}\n" for name in ("token_step", "indexer_queries", "indexer_scores", "top_k", "attention_queries")
    ]
    with jax.sharding.use_abstract_mesh(mesh_of("9.0", "NVIDIA H200")):
        program = traced_layer(None)
        assert all(kernel in program for kernel in kernels)
    for capability in ("8.0", "8.9", "12.0"):
        with jax.sharding.use_abstract_mesh(mesh_of(capability, UNKNOWN[capability])):
            program = traced_layer(None)
            assert not any(kernel in program for kernel in kernels)
            reason = NEEDED.format(UNKNOWN[capability], capability)
            with pytest.raises(ValueError, match=f"backend='pallas' cannot serve .*: {reason}"):
                traced_layer("pallas")


def test_rows_of_the_table_differ():
    assert len({row.capability for row in target.GPUS}) == len({row.architecture for row in target.GPUS}) == 2
    for row in target.GPUS:
        for size, most in row.clusters.items():
            assert 0 < size * most <= row.multiprocessors


def test_a_launch_takes_no_more_than_a_block_has():
    most = target.GPUS[0].shared_bytes - 1024
    for simulate in (True, False):
        message = f"fill asks for {most + 1040} bytes of shared memory, a block has at most {most + 1024}"
        with pytest.raises(ValueError, match=message):
            run(fill, None, spec((WARPGROUP,), np.int32), simulate=simulate, name="fill", shared_bytes=most + 16)
    with pytest.raises(ValueError, match=r"a grid has one axis or two, got \(1, 1, 1\)"):
        Grid(blocks=(1, 1, 1))
    with pytest.raises(ValueError, match="a block has 1 to 8 warpgroups, got 9"):
        Grid(blocks=(1,), warpgroups=9)
    with pytest.raises(ValueError, match="a cluster has 1 to 8 blocks, got 16"):
        Grid(blocks=(1,), cluster=16)


def test_the_shape_of_a_launch_may_be_told_as_one():
    def body(machine: Machine, inputs: None, out: Buffer) -> None:
        out.store_int(
            machine.rank * 1000 + machine.thread, machine.block(0), machine.block(1), machine.rank, machine.thread
        )

    grid = Grid(blocks=(2, 3), warpgroups=2, cluster=2, shared_bytes=16)
    state = spec((2, 3, 2, 2 * WARPGROUP), np.int32)
    out = launch(body, name="fill", grid=grid, inputs=None, state=state, simulate=True)
    want = np.arange(2)[:, None] * 1000 + np.arange(2 * WARPGROUP)
    np.testing.assert_array_equal(out, np.broadcast_to(want, state.shape))
