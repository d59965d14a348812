"""The reproduction for upstream shows that XLA reads a donated array after it was overwritten."""

import pytest

from tests.support.compile_for_gpu import run_module


@pytest.mark.sweep(guard="test_what_is_computed_again_reads_nothing_that_may_be_overwritten")
def test_a_donated_array_is_read_after_an_output_has_its_memory():
    """When XLA mends it this fails: then the report and docs/troubleshooting.md change."""
    finished = run_module("benchmarks.rematerialization", "--compile")
    *read, last = finished.stdout.splitlines()[1:]
    written = next(number for number, line in enumerate(read) if f"tuple({line.split(' = ')[0]}," in last)
    assert any("remat" in line for line in read[written + 1 :])
    assert not any("remat" in line for line in read[:written])
