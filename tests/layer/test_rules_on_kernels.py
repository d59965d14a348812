"""The rules again, with the kernels of the cache update in place of its XLA form: those of attention need larger heads.

The rules that drive a cache through ``step`` run as they are, on a GPU and on the simulator. What chunked calls leave
is compared with one pass of whatever the device runs by default: on a CPU that is XLA.
"""

import pytest

import dsv4jax as d4
from tests.layer import test_rules
from tests.layer.test_rules import (  # noqa: F401  collected here as well
    test_rule_1_a_running_softmax_in_bfloat16_does_not_depend_on_the_split,
    test_rule_1_any_chunking_equals_one_pass,
    test_rule_1_token_by_token_equals_one_pass,
    test_rule_3_a_reused_slot_and_its_blocks_give_what_fresh_ones_give,
    test_rule_3_garbage_in_every_free_row_changes_nothing,
    test_rule_4_padding_rows_and_other_requests_change_nothing_and_are_not_touched,
    test_rule_4_permuting_the_rows_of_a_batch_permutes_its_outputs,
    test_rule_8_bad_numbers_in_one_request_stay_in_its_rows,
)
from tests.support import driver
from tests.support.machines import BACKENDS


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request):
    for name in test_rules.THREE_FORMATS:
        test_rules.expected(name)  # on the default backend, and kept for the tests of test_rules itself
    with driver.BACKEND(d4.OpBackends(cache_update=request.param)):
        yield
