"""The reproduction for upstream shows what the report and docs/support.md say of the installed CUDA plugin."""

import pytest

from pallas_kernels.plugin import compiles_relocatable_code
from tests.support.compile_for_gpu import run_module


@pytest.mark.slow
def test_the_kernel_loses_its_registers_where_code_is_relocatable():
    """When jaxlib heeds ``setmaxnreg`` again this fails: then ``plugin``, the report and docs/support.md change."""
    finished = run_module("benchmarks.setmaxnreg", "--compile")
    said = finished.stdout + finished.stderr
    assert "Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'" in said
    assert ("'setmaxnreg' ignored" in said) == compiles_relocatable_code()
    assert ("Used 232 registers" in said) != compiles_relocatable_code()
