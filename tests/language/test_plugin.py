"""Which CUDA plugins make slow kernels, and who is told of it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
import warnings

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import plugin
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import Role, TensorCores
from tests.support.lane_kernels import mesh_of, spec
from tests.support.paths import ROOT

H200, B200 = ("9.0", "NVIDIA H200"), ("10.0", "NVIDIA B200")
FAST, SLOW = "0.11.2", "0.12.0.1"


@pytest.fixture
def install(monkeypatch):
    """install(**versions): these distributions and no other CUDA plugin, in a process that has not been warned yet."""

    def these(**versions: str) -> None:
        installed = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(plugin.importlib.metadata, "version", version)
        monkeypatch.setattr(plugin, "_installed", plugin._installed.__wrapped__)  # not cached
        monkeypatch.setattr(plugin, "_warned", set())

    return these


def fill(machine: TensorCores, inputs: None, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)


def fill_in_roles(machine: TensorCores, inputs: None, out: Buffer) -> None:
    body = lambda: fill(machine, None, out)  # noqa: E731
    machine.roles(
        Role(warpgroups=1, registers=240, body=body),
        Role(warpgroups=2, registers=128, body=body),
    )


def emit(body, device: tuple[str, str], name: str = "fill") -> str:
    """A launch made for a GPU that is not there: the module with the kernel in it."""
    grid, state = Grid(blocks=(1,), warpgroups=3), spec((3 * WARPGROUP,), np.int32)
    call = jax.jit(lambda: launch(body, name=name, grid=grid, inputs=None, state=state))
    with jax.sharding.use_abstract_mesh(mesh_of(*device)):
        text = call.trace().lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, False),
        ({"jax_cuda13_plugin": FAST}, False),
        ({"jax_cuda13_plugin": "0.11.10"}, False),
        ({"jax_cuda13_plugin": "0.12.0"}, True),
        ({"jax_cuda13_plugin": SLOW}, True),
        ({"jax_cuda13_plugin": "0.12.0.dev20260901"}, True),
        ({"jax_cuda13_plugin": "1.0"}, True),
        ({"jax_cuda12_plugin": SLOW}, True),
        ({"jax_cuda13_plugin": FAST, "jax_cuda12_plugin": SLOW}, False),  # JAX takes the first of these
    ],
)
def test_versions_that_ignore_register_counts(install, versions, expected):
    install(**versions)
    assert plugin.compiles_relocatable_code() is expected


def test_a_slow_plugin_is_named_once_with_what_to_install(install):
    install(jax_cuda13_plugin=SLOW)
    with pytest.warns(pk.SlowKernelsWarning) as caught:
        texts = [emit(fill_in_roles, H200, name) for name in ("one", "another")]
    assert len(set(texts)) == 2, "the second kernel was not made"
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith("jax-cuda13-plugin 0.12.0.1 compiles the kernel one to slower code")
    assert 'pip install "jaxlib>=0.11.2,<0.12" "jax-cuda13-plugin[with-cuda]>=0.11.2,<0.12"' in message


def test_what_is_to_be_installed_is_what_the_extra_installs(install):
    install(jax_cuda13_plugin=SLOW)
    with pytest.warns(pk.SlowKernelsWarning) as caught:
        plugin.warn_if_slow("one")
    wanted = set(re.findall(r'"(.*?)"', str(caught[0].message)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert wanted == set(extras["gpu"])
    assert {requirement.replace("[with-cuda]", "") for requirement in wanted} <= set(extras["cross"])


def test_the_plugin_of_cuda_12_is_named_too(install):
    install(jax_cuda12_plugin=SLOW)
    with pytest.warns(pk.SlowKernelsWarning, match=r'^jax-cuda12-plugin .* "jax-cuda12-plugin\[with-cuda\]>=0.11.2'):
        emit(fill_in_roles, H200)


@pytest.mark.parametrize(
    ("version", "body", "device"),
    [
        pytest.param(FAST, fill_in_roles, H200, id="plugin that heeds them"),
        pytest.param(SLOW, fill_in_roles, B200, id="Blackwell, where nothing spills"),
        pytest.param(SLOW, fill, H200, id="kernel that asks for none"),
    ],
)
def test_nobody_is_warned_without_need(install, version, body, device):
    install(jax_cuda13_plugin=version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emit(body, device)


def test_the_warning_can_be_silenced_by_its_class(install):
    install(jax_cuda13_plugin=SLOW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=pk.SlowKernelsWarning)
        emit(fill_in_roles, H200)
    assert issubclass(pk.SlowKernelsWarning, UserWarning)


def test_the_simulator_needs_no_plugin(install):
    install(jax_cuda13_plugin=SLOW)
    grid, state = Grid(blocks=(1,), warpgroups=3), spec((3 * WARPGROUP,), np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = launch(fill_in_roles, name="fill", grid=grid, inputs=None, state=state, simulate=True)
    np.testing.assert_array_equal(out, np.arange(3 * WARPGROUP))
