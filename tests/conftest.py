"""Strictness for every test, and the devices they run on."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    # The cross-compilation wheels make JAX look for a GPU; on a machine without one it must not try.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for test_sharding; all else stays on the first
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# On a GPU the default is TF32; an op that means fp32 says so itself, so tests run under the default.

# Derandomised in CI: the same examples every time, and no deadline, because the first example compiles.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=20)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.machines import no_gpu  # asks for devices: not before their number is set

    reason = no_gpu()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
