"""What runs a kernel in a test: the simulator on any device, and a GPU if there is one."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from pallas_kernels.language import target

requires_gpu = pytest.mark.gpu  # conftest skips tests with this mark if ``no_gpu`` gives a reason


def no_gpu() -> str | None:
    """Return why kernels do not run on this machine's own device, or None if they do."""
    return target.unsupported()


def _lacks(major: int) -> bool:
    return not str(getattr(jax.devices()[0], "compute_capability", "")).startswith(f"{major}.")


# Values of the argument ``simulate`` of ``launch``, and the backends that they correspond to.
MACHINES = [pytest.param(True, id="simulated"), pytest.param(False, id="gpu", marks=requires_gpu)]
BACKENDS = [pytest.param("pallas_simulated", id="simulated"), pytest.param("pallas", id="gpu", marks=requires_gpu)]


def _machines_of(major: int, what: str) -> list[Any]:
    reason = f"{what} needs an NVIDIA GPU of compute capability {major}"
    marks = [requires_gpu, pytest.mark.skipif(_lacks(major), reason=reason)]
    return [MACHINES[0], pytest.param(False, id="gpu", marks=marks)]


HOPPER_MACHINES = _machines_of(9, "wgmma")
BLACKWELL_MACHINES = _machines_of(10, "tensor memory")
