"""What runs a kernel in a test: the simulator on any device, and a GPU if there is one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from pallas_kernels.language import target

# conftest leaves out tests with this mark if ``no_gpu`` gives a reason.
requires_gpu = pytest.mark.gpu
simulated = pytest.mark.simulated  # has a twin that runs on a GPU


@functools.cache
def no_gpu(major: int | None = None) -> str | None:
    """Say why a test cannot run on this machine's own device; None if it can.

    Args:
        major: the GPU's compute capability that the test needs; None for any that has kernels.
    """
    reason = target.unsupported()
    if reason is not None:
        return f"tests on a GPU are left out: {reason}"
    here = str(getattr(jax.devices()[0], "compute_capability", ""))
    if major is not None and not here.startswith(f"{major}."):
        return f"tests on a GPU of compute capability {major}.x are left out: this one's is {here}"
    return None


def _machines(simulated_value: Any, gpu_value: Any, **needs: int) -> list[Any]:
    return [
        pytest.param(simulated_value, id="simulated", marks=simulated),
        pytest.param(gpu_value, id="gpu", marks=pytest.mark.gpu(**needs)),
    ]


# Values of the argument ``simulate`` of ``launch``, and the backends that they correspond to.
MACHINES = _machines(True, False)
BACKENDS = _machines("pallas_simulated", "pallas")
HOPPER_MACHINES = _machines(True, False, major=9)  # wgmma
BLACKWELL_MACHINES = _machines(True, False, major=10)  # tensor memory
