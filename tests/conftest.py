"""Settings for every test: strict JAX, one compilation cache for all processes, and only tests that can run here."""

import gc
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import COMPILED

if shutil.which("nvidia-smi") is None:
    # The cross-compilation wheels make JAX look for a GPU, which it must not do on a machine without one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Kernels in Triton are then interpreted, which is decided when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# There is a process for each core. With a thread for each core in every process, NumPy, which computes what is expected
# and runs the simulator, would spend as long on waiting for its threads as on products.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Several test processes share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What one process has compiled the others load: pytest's workers, and the programs and notebooks that tests start.
# In the environment, because JAX reads it there in all of them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
# But for those of single operations, which take as long to find as to compile.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # the tests that need it are skipped and say so
    hypothesis = None

# Folders, and single files, whose slow tests compile with all optimizations.
COMPILED_AS_BY_USERS = ("audits", "test_rules.py", "test_recorded_outputs.py", "test_precision.py")
# Files about gradients, captures, deltas and sentences, which are of XLA's form alone whatever the device.
OF_ANY_DEVICE = (
    "test_captures.py", "test_deltas.py", "test_derivatives.py", "test_indexer_loss.py", "test_indexers_of_models.py",
    "test_layers_with_deltas.py", "test_partition.py", "test_replay.py", "test_reprs.py", "test_save_deltas.py",
)  # fmt: skip
HAS_GPU = shutil.which("nvidia-smi") is not None
MAPPINGS = Path("/proc/self/maps")  # a line each; only Linux has it
MOST_MAPPINGS = 40_000  # Linux allows 65,530 by default; ten tests compile fewer than 2,000 programs
COUNTED = 10  # tests from one count of mappings to the next: a count takes up to 24 ms

jax.config.update("jax_num_cpu_devices", 8)  # for test_sharding; everything else uses the first one
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# On a GPU the default is TF32. Ops that need fp32 say so themselves, so tests run under the default.

if hypothesis is not None:
    # In CI, the same examples every time, and no deadline, because the first example compiles.
    hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=20)
    hypothesis.settings.register_profile("dev", deadline=None, max_examples=20)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _cannot_run(item: pytest.Item) -> bool:
    from tests.support.machines import no_gpu  # imported here because it uses devices, whose number must be set before

    return any(no_gpu(**mark.kwargs) is not None for mark in item.iter_markers("gpu"))


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        if {item.path.parent.name, item.path.name} & set(COMPILED_AS_BY_USERS):
            item.add_marker("optimized")
        # On a GPU, where a kernel takes no time, all cases of kernels belong to the tests that are not slow.
        if item.get_closest_marker("sweep") is not None and not (HAS_GPU and item.path.parent.name == "kernels"):
            item.add_marker("slow")
        if item.path.name in OF_ANY_DEVICE:
            item.add_marker("any_device")
        (left_out if _cannot_run(item) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    # What is imported stays: the garbage collector need not look through it again and again while JAX traces.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # tracing makes many objects that live on: 4 s of 54 were spent on looking for others


_ended = itertools.count(1)  # tests


def pytest_runtest_teardown() -> None:
    if next(_ended) % COUNTED:
        return
    # A compiled program holds some ten memory mappings, and a process that has as many as Linux allows dies in the
    # compiler. What is dropped here is loaded again from the files of the compilation cache.
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def quick_compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tell XLA on a CPU to optimize little, in this process and those that a test starts, as ``make test`` does."""
    if jax.default_backend() != "cpu":
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _compiled_quickly(request: pytest.FixtureRequest) -> None:
    """Optimize little in most tests, slow ones too: XLA on a CPU takes up to a minute for a whole model otherwise.

    What a step computes when it is compiled as users compile it is checked by the rules, the recordings and the audits.
    """
    if request.node.get_closest_marker("optimized") is None:
        request.getfixturevalue("quick_compilation")


def pytest_report_header() -> list[str]:
    from tests.support.machines import no_gpu

    return sorted(reason for reason in {no_gpu(), no_gpu(major=9), no_gpu(major=10)} if reason is not None)
