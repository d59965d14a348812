"""The reproduction for upstream shows that XLA reads a donated array after it was overwritten."""

import importlib.util
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
def test_a_donated_array_is_read_after_an_output_has_its_memory():
    """When XLA mends it this fails: then the report and docs/troubleshooting.md change."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for a GPU without one needs the extra 'cross'")
    command = [sys.executable, "-m", "benchmarks.rematerialization", "--compile"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    *read, last = finished.stdout.splitlines()[1:]
    written = next(number for number, line in enumerate(read) if f"tuple({line.split(' = ')[0]}," in last)
    assert any("remat" in line for line in read[written + 1 :])
    assert not any("remat" in line for line in read[:written])
