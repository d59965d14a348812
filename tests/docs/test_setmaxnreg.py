"""The reproduction for upstream shows what the report and docs/support.md say of the installed CUDA plugin."""

import importlib.util
import subprocess
import sys

import pytest

from pallas_kernels.plugin import compiles_relocatable_code
from tests.support.paths import ROOT


@pytest.mark.slow
def test_the_kernel_loses_its_registers_where_code_is_relocatable():
    """When jaxlib heeds ``setmaxnreg`` again this fails: then ``plugin``, the report and docs/support.md change."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for a GPU without one needs the extra 'cross'")
    command = [sys.executable, "-m", "benchmarks.setmaxnreg", "--compile"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    said = finished.stdout + finished.stderr
    assert "Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'" in said
    assert ("'setmaxnreg' ignored" in said) == compiles_relocatable_code()
    assert ("Used 232 registers" in said) != compiles_relocatable_code()
