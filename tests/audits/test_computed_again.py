"""Where memory is short, XLA computes small things again, and reads no donated array for that."""

import pytest

from tests.support.compile_for_gpu import report_of


@pytest.mark.slow
def test_what_is_computed_again_reads_nothing_that_may_be_overwritten():
    """It happens after XLA has decided what is updated in place, so that nothing else would protect the old value."""
    report = report_of("tests.support.computed_again", "full")
    for step, found in report.items():
        assert found["again"] > 0, f"memory is not short in {step}"
        assert not found["donated"], step
