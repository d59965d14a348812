"""What a reader passes from ``attention_layer`` to a launch, without a GPU."""

import pytest

from tests.support.compile_for_gpu import report_of

MOST = 14  # functions on the way, both ends included


@pytest.mark.slow
def test_the_way_to_a_launch_is_short():
    functions = report_of("tests.support.walk", "h200")
    assert functions.keys() >= {"product_of_many", "token_step", "top_k", "decode_attention"}
    assert not {name: passed for name, passed in functions.items() if len(passed) > MOST}
