"""Attention and scores on Hopper as the newest CUDA plugin compiles them: what is known to be slow there, and no more.

Plugins from 0.12 on ignore the register counts of a block's roles. ``make check-newest`` runs this in an environment
that has the newest of all; older plugins are audited by ``test_compiled_kernels``, and must have no fault at all.
"""

import pytest

from pallas_kernels.plugin import compiles_relocatable_code
from tests.audits.test_compiled_kernels import check
from tests.support.compile_for_gpu import report_of

# Requests and tokens of each that the kernel for few queries serves, at V4-Flash's sizes.
FEW = "[1, 1]", "[2, 1]", "[4, 1]"
WINDOW_ALONE = "[8, 1]"  # is short enough for the kernel for few queries, too


def is_of_few_queries(name: str) -> bool:
    queries = name.split(" of ")[0]  # before a number of heads
    return queries.endswith(FEW) or (" swa " in name and queries.endswith(WINDOW_ALONE))


@pytest.mark.slow
@pytest.mark.skipif(not compiles_relocatable_code(), reason="test_compiled_kernels audits all kernels for this plugin")
def test_products_on_hopper():
    only = r"^flash (decode_attention (csa|swa)|indexer_scores) "
    reports = report_of("tests.support.compiled_kernels", "h200", "--only", only)["kernels"]
    for name, report in reports.items():
        check(name, report, "sm_90a", ignored=True)
    attention = [name for name in reports if "decode_attention" in name]
    scores = [name for name in reports if "indexer_scores" in name]
    assert len(attention) > 20
    assert len(scores) > 8
    # The kernel for many queries loses its registers, and with them its speed: a plugin that heeds them again is to be
    # had without the bound on its version in pyproject.toml. The kernel for few queries has nothing to lose.
    many = {name for name in attention if not is_of_few_queries(name)}
    assert {name for name, report in reports.items() if report["setmaxnreg ignored"]} == many
    assert {name for name, report in reports.items() if report["products serialized"]} == many
