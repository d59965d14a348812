"""The cache update and the gathers in Triton, compared with the XLA forms: the tests of the other kernels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.formats import KV_FORMATS
from tests.kernels import test_kernels as updates
from tests.kernels import test_pieces as pieces
from tests.support.cases import first_of
from tests.support.kernel_cases import BF16_TAIL, EVEN, ODD, csa, hca, swa
from tests.support.machines import requires_gpu
from tests.support.triton import runs_here

pytestmark = runs_here()

CASES = [
    *(csa(1, "fp8_row", "nvfp4", **BF16_TAIL), hca("online", 1, "f32"), hca("ring", 2, "bf16")),
    *(swa(8, "fp8_tile64"), csa(5, "bf16", "bf16", **BF16_TAIL)),
    *(csa(1, "fp8_tile64", "mxfp4", cfg=ODD), csa(2, "fp8_tile64", "mxfp4"), csa(33, "fp8_row", "f32")),
    *(hca("ring", 1, "fp8_tile64", **BF16_TAIL), hca("ring", 40, "fp8_row", **BF16_TAIL)),
    *(hca("online", 2, "fp8_tile64", **BF16_TAIL), hca("online", 40, "f32", cfg=ODD, **BF16_TAIL)),
    *(swa(1, "f32"), swa(40, "bf16", cfg=ODD)),
]


@pytest.mark.parametrize("case", first_of(CASES, count=3), ids=str)
def test_an_update_leaves_what_the_xla_form_leaves(case):
    updates.test_an_update_leaves_what_the_xla_form_leaves(case, "triton")


@requires_gpu
@pytest.mark.parametrize("case", updates.FULL_SIZE, ids=str)
def test_an_update_at_full_size_leaves_what_the_xla_form_leaves(case):
    updates.check(case, "triton")


@pytest.mark.parametrize(
    "case", first_of([csa(5, "bf16", "bf16", **BF16_TAIL), hca("online", 1, "f32")], count=0), ids=str
)
def test_without_window_rows_the_window_stays(case):
    updates.check_without_window(case, "triton")


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # from the interpreter, of a row that is all NaN
@pytest.mark.parametrize("bad", first_of([np.nan, np.inf], count=0))
@pytest.mark.parametrize("case", [csa(1, "fp8_row", "nvfp4", **BF16_TAIL), hca("online", 1, "f32")], ids=str)
def test_bad_numbers_of_one_request_stay_in_its_rows(case, bad):
    updates.test_bad_numbers_of_one_request_stay_in_its_rows(case, bad, "triton")


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_append_swa(kv_format):
    pieces.test_append_swa(1, kv_format, ODD, "triton")


def test_all_layers_at_once_are_stored_as_one_after_another():
    pieces.test_all_layers_at_once_are_stored_as_one_after_another(6, ODD, "triton")


@pytest.mark.parametrize(
    "case",
    first_of(
        [
            *(csa(17, "fp8_row", "nvfp4"), csa(17, "fp8_tile64", "mxfp4", cfg=ODD), csa(17, "f32", "f32")),
            *(csa(17, "bf16", "bf16", cfg=ODD), hca("ring", 17, "fp8_row", cfg=ODD)),
        ],
    ),
    ids=str,
)
def test_flush(case):
    pieces.test_flush(case, "triton")


@pytest.mark.sweep(guard="test_an_update_leaves_what_the_xla_form_leaves")
@pytest.mark.parametrize(
    ("kv_format", "cfg", "dtype"),
    first_of(
        [
            *(("fp8_tile64", ODD, jnp.float32), ("fp8_row", EVEN, jnp.bfloat16)),
            *(("f32", ODD, jnp.float32), ("bf16", EVEN, jnp.float32)),
        ],
        count=0,
    ),
)
def test_gathering_gives_what_the_xla_form_gives(kv_format, cfg, dtype):
    pieces.test_gathering_gives_what_the_xla_form_gives(kv_format, cfg, dtype, "triton")


def test_gathering_nothing_gives_nothing():
    pieces.test_gathering_nothing_gives_nothing("triton")
