"""Indexer scores through tensor memory: the kernel of Blackwell."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.scores.sm100 import Tuning
from tests.support.cases import first_of
from tests.support.machines import BLACKWELL_MACHINES
from tests.support.score_cases import FORMATS, PAGE_ENTRIES, Case, visible

machines = pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
formats = pytest.mark.parametrize("key_format", FORMATS)
# Of sum_h |w_h| |q_h| |k_s|. Sums are f32: 64 heads of 128 dims, and the two products that a weight and the scales are.
TOLERANCE = 1e-6


@machines
@formats
@pytest.mark.parametrize(("batch", "tokens", "warpgroups"), first_of([(2, 3, 2), (3, 1, 3), (1, 2, 1)]))
def test_scores(key_format, batch, tokens, warpgroups, simulate):
    """Several requests per block, and several blocks per request."""
    seen = visible(batch, batch, tokens, 5 * PAGE_ENTRIES)
    seen[0, -1] = 5 * PAGE_ENTRIES
    case = Case(key_format=key_format, visible=seen, max_blocks=5, seed=tokens)
    got = case.run(simulate, architecture="sm100", tuning=Tuning(warpgroups=warpgroups, blocks=2))
    case.check(got, TOLERANCE)


@machines
@formats
def test_scores_of_nan(key_format, simulate):
    case = Case(key_format=key_format, visible=np.full((1, 1), 64, np.int32), max_blocks=2)
    block = case.block_table[case.slots[0], 1]
    case.keys.scale[1, block, 7] = case.scale_bytes.nan
    got = case.run(simulate, architecture="sm100")[0, 0]
    assert np.flatnonzero(np.isinf(got)).tolist() == [32 + 7]
    assert np.isfinite(np.delete(got, 32 + 7)).all()
