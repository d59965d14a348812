"""What the kernels in Triton are compiled to for GPUs that are not here: shared memory, spills, updates in place."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.audits.test_in_place import check
from tests.support.paths import ROOT
from tests.support.triton import requires_extra
from tests.support.triton_kernels import CAPABILITIES, LARGE, SHARED_BYTES

pytestmark = [requires_extra, pytest.mark.slow]

# On Hopper a block holds 64 heads, whose sums take 128 registers of a thread, of 255. What is spilled there are a few
# addresses. It is faster all the same: with half the heads attention of 128 requests took 198 us on an H200, not 69.
SPILLED = dict.fromkeys(CAPABILITIES, 0) | {"9.0": 64}


def report_of(module: str) -> Any:
    """Return what ``python -m module`` prints last, in a process that compiles kernels in Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment | {"JAX_PLATFORMS": "cpu"}
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_kernels_fit_every_gpu():
    report = report_of("tests.support.triton_kernels")
    assert tuple(report) == CAPABILITIES
    for capability, kernels in report.items():
        names = {name.split()[2] for name in kernels}
        assert set(LARGE) <= names
        for name, found in kernels.items():
            assert found["shared"] <= SHARED_BYTES[capability], f"{capability}: {name} takes {found}"
            assert found["spilled"] <= SPILLED[capability], f"{capability}: {name} spills {found}"
            assert found["registers"] >= 16, f"{capability}: {name} was replaced by a trap"
    assert len({name.split()[2] for name in report["8.0"]}) == 11, "a kernel was not compiled"


@pytest.mark.sweep(guard="test_kernels_fit_every_gpu")
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="compiling for a GPU without one needs 'cross'"
)
def test_updates_are_in_place_by_default_on_a_gpu_that_other_kernels_do_not_serve():
    for name, found in report_of("tests.support.triton_in_place").items():
        # A step of four layers: one launch for the window, twice two for the rest, scores, attention with its merge.
        assert found.pop("launches") >= 15, "kernels in Triton are not what runs there"
        check(name, found)
