"""Who runs a kernel in a test: the simulator on any device, and a GPU where there is one."""

from __future__ import annotations

import jax
import pytest

from dsv4jax.backend import CAPABILITIES

requires_gpu = pytest.mark.gpu  # conftest skips what is marked so where ``no_gpu`` has a reason


def no_gpu() -> str | None:
    """Why kernels do not run on this machine's own device, or None where they do."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) in CAPABILITIES:
        return None
    return f"needs an NVIDIA GPU of compute capability {' or '.join(CAPABILITIES)}, this is {device.device_kind}"


# Values of ``launch``'s simulate, and the backends that they stand for.
MACHINES = [pytest.param(True, id="simulated"), pytest.param(False, id="gpu", marks=requires_gpu)]
BACKENDS = [pytest.param("pallas_simulated", id="simulated"), pytest.param("pallas", id="gpu", marks=requires_gpu)]
