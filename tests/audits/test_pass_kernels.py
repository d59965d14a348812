"""A pass that is looked at runs the kernels of one that is not; one that is given its choices runs none that choose."""

from collections import Counter

import pytest

from tests.support.compile_for_gpu import report_of

CHOOSING = {"router", "indexer_scores", "top_k"}


@pytest.mark.sweep(guard="test_captured_quantities_equal_the_recorded_ones")
def test_kernels_of_passes_with_captures_and_choices():
    plain, captures, choices = map(Counter, report_of("tests.support.pass_kernels", "h200").values())
    assert set(plain) > CHOOSING | {"experts_gate_up_and_shared", "experts_down_and_shared", "decode_attention"}
    assert not plain - captures
    assert set(plain - choices) == CHOOSING
    assert not CHOOSING & set(choices)
    assert not choices - plain
