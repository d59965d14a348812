"""Strict settings for every test, and the devices that they run on."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    # The cross-compilation wheels make JAX look for a GPU, which it must not do on a machine without one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for test_sharding; everything else uses the first one
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# On a GPU the default is TF32. Ops that need fp32 say so themselves, so tests run under the default.

# In CI, the same examples every time, and no deadline, because the first example compiles.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=20)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.machines import no_gpu  # imported here because it uses devices, whose number must be set before

    reason = no_gpu()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
