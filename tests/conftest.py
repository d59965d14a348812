"""What every test runs under: strict JAX, one compilation cache for all processes, no test that cannot run here."""

import os
import shutil

from tests.support.paths import COMPILED

if shutil.which("nvidia-smi") is None:
    # The cross-compilation wheels make JAX look for a GPU; on a machine without one it must not try.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What one process has compiled the others load: pytest's workers, and the programs and notebooks that tests start.
# In the environment, because JAX reads it there in all of them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # the tests that draw their inputs then say that they are skipped
    hypothesis = None

jax.config.update("jax_num_cpu_devices", 8)  # for test_sharding; all else stays on the first
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# On a GPU the default is TF32; an op that means fp32 says so itself, so tests run under the default.

if hypothesis is not None:
    # Derandomised in CI: the same examples every time, and no deadline, because the first example compiles.
    hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=20)
    hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _cannot_run(item: pytest.Item) -> bool:
    from tests.support.machines import no_gpu  # asks for devices: not before their number is set

    return any(no_gpu(**mark.kwargs) is not None for mark in item.iter_markers("gpu"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _cannot_run(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_report_header() -> list[str]:
    from tests.support.machines import no_gpu

    reasons = {no_gpu(), no_gpu(major=9), no_gpu(major=10)} - {None}
    return [f"tests left out: {reason}" for reason in sorted(map(str, reasons))]
