"""What programs are lowered to: the same text in every process, so that the persistent compilation cache finds it."""

import pytest

from tests.support.compile_for_gpu import report_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports():
    """Of two processes that hash strings differently: what is ordered by a set would be in another order."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for seed in ("1", "2"):
            patch.setenv("PYTHONHASHSEED", seed)
            found.append(report_of("tests.support.lowered_programs", "h200"))
    return found


def test_a_program_is_lowered_alike_in_two_processes(reports):
    assert reports[0] == reports[1]


def test_a_program_is_lowered_alike_whatever_was_lowered_before(reports):
    """jax 0.11 numbers the kernels of a process, and the numbers were part of what is looked up."""
    assert reports[0]["again"] == reports[0]["first"]


def test_layers_of_all_kinds_share_the_kernel_of_their_queries(reports):
    """SWA layers launch three kernels, CSA layers six, and HCA layers with a ring tail four.

    Norm and rope of the queries are the same in all. ``prepare_forward`` launches one more.
    """
    assert reports[0]["launches"] == 3 + 6 + 4 + 1
    assert reports[0]["kernels"] == 3 + 6 + 4 + 1 - 2


def test_kernels_are_never_mapped(reports):
    """A launch that is mapped would run once, on arrays with an axis more than its body knows."""
    assert not reports[0]["mapped grants"]  # XLA computes them
    assert "token_step is a kernel, which jax.vmap cannot map" in reports[0]["mapped layer"]
