"""The kernel of the indexer's scores, compared with its XLA form, on both machines."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.scores import fp4, sm90, sm100
from pallas_kernels.scores.call import unsupported_scores
from tests.support.cases import first_of
from tests.support.lane_kernels import mesh_of
from tests.support.machines import MACHINES
from tests.support.score_cases import FORMATS, PAGE_ENTRIES, Case, visible

machines = pytest.mark.parametrize("simulate", MACHINES)
formats = pytest.mark.parametrize("key_format", FORMATS)
LOWEST = np.finfo(np.float32).min
# Of sum_h |w_h| |q_h| |k_s|. A head's dot is summed in f16, in up to 8 steps of 2^-12 each, and is mostly a tenth of
# |q_h| |k_s|; over 64 heads such errors mostly cancel.
TOLERANCE = 1e-4


def test_every_format_is_tested():
    assert set(FORMATS) == set(fp4.FORMATS)


@machines
@formats
@pytest.mark.parametrize(("batch", "tokens", "max_blocks"), [(1, 1, 4), (3, 1, 5), (2, 3, 5)])
def test_scores(key_format, batch, tokens, max_blocks, simulate):
    seen = visible(batch, batch, tokens, max_blocks * PAGE_ENTRIES)
    seen[0, -1] = max_blocks * PAGE_ENTRIES
    case = Case(key_format=key_format, visible=seen, max_blocks=max_blocks, seed=tokens)
    case.check(case.run(simulate), TOLERANCE)


@machines
@formats
@pytest.mark.parametrize(
    "tuning",
    first_of(
        [
            sm90.Tuning(warpgroups=1, stages=2, blocks=7),
            sm90.Tuning(warpgroups=3, stages=1, blocks=2),
            sm90.Tuning(warpgroups=2, overlapped=True, blocks=3),
        ],
        count=2,
    ),
    ids=["1x7", "3x2", "2x3 overlapped"],
)
def test_any_split(key_format, tuning, simulate):
    """Blocks take tiles of several requests, several blocks share a request, and there are more rows than lanes."""
    seen = visible(0, 37, 1, 3 * PAGE_ENTRIES)
    seen[::3], seen[5:11] = 0, 0
    case = Case(key_format=key_format, visible=seen, max_blocks=3)
    case.check(case.run(simulate, tuning=tuning), TOLERANCE)


@machines
def test_many_tokens(simulate):
    case = Case(key_format="mxfp4", visible=visible(1, 2, 9, 64), max_blocks=2)
    case.check(case.run(simulate), TOLERANCE)


@machines
@pytest.mark.parametrize("batch", first_of([5, 64, 100, 129], count=2))
def test_rows_of_several_tokens_that_see_nothing(batch, simulate):
    """Between rows that do, for each number of rows that a lane adds up: one, two, four and five."""
    seen = np.zeros((batch, 2), np.int32)
    seen[[0, batch // 2, batch - 1]] = [[0, 64], [3, 0], [64, 33]]
    case = Case(key_format="mxfp4", visible=seen, max_blocks=2)
    case.check(case.run(simulate, tuning=sm90.Tuning(warpgroups=2, overlapped=True, blocks=3)), TOLERANCE)


@machines
@formats
def test_groups_of_all_magnitudes(key_format, simulate):
    """Scales of groups in keys and queries differ by up to 2^24 (for nvfp4, as far as its scales reach)."""
    case = Case(key_format=key_format, visible=np.full((2, 1), 64, np.int32), max_blocks=2, spread=12)
    case.check(case.run(simulate), TOLERANCE)


@machines
def test_the_ends_of_ue8m0(simulate):
    """Rows are near both ends of f32's range. Overflow gives +inf, and never -inf."""
    case = Case(key_format="mxfp4", visible=np.full((1, 1), 32, np.int32), max_blocks=1, spread=0)
    rows = case.keys.scale[1, case.block_table[case.slots[0], 0]]
    rows[:16] = 3
    rows[16:] = 253
    case.weights[:] = -4.0
    got = case.run(simulate)[0, 0]
    assert np.all(got[16:] == LOWEST)
    error, magnitude = np.abs(got - case.xla()[0, 0])[:16], case.magnitude()[0, 0, :16]
    np.testing.assert_array_less(error, TOLERANCE * magnitude + 1e-37)  # either may flush what is subnormal


@machines
@formats
def test_nan_stays_where_it_is(key_format, simulate):
    case = Case(key_format=key_format, visible=np.full((3, 2), 96, np.int32), max_blocks=3)
    want, magnitude = case.xla(), case.magnitude()
    bad = [0, 13, 31, 32, 77, 95]
    for n, entry in enumerate(bad):
        block = case.block_table[case.slots[0], entry // PAGE_ENTRIES]
        case.keys.scale[1, block, entry % PAGE_ENTRIES, n % case.keys.scale.shape[-1]] = case.scale_bytes.nan
    want[0][:, bad] = np.inf
    case.queries.scale[1, 0, 5, -1] = case.scale_bytes.nan
    case.weights[1, 1, 63] = np.nan
    case.weights[2, 0, 0] = -np.inf
    want[1], want[2, 0] = np.inf, np.inf
    got = case.run(simulate)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    assert np.all(got[np.isinf(want)] > 0)
    finite = np.isfinite(want)
    assert np.max(np.abs(got[finite] - want[finite]) / magnitude[finite]) < TOLERANCE


@machines
@formats
def test_blocks_that_are_not_there(key_format, simulate):
    """Blocks are missing or have invalid numbers. Their entries score 0, and other scores are not affected."""
    case = Case(key_format=key_format, visible=np.full((2, 1), 160, np.int32), max_blocks=5)
    want, magnitude = case.xla(), case.magnitude()
    for b, block, number in ((0, 1, -1), (0, 4, 1 << 30), (1, 0, -(1 << 30)), (1, 2, case.keys.codes.shape[1])):
        case.block_table[case.slots[b], block] = number
        want[b, 0, block * PAGE_ENTRIES : (block + 1) * PAGE_ENTRIES] = 0.0
    got = case.run(simulate)
    np.testing.assert_array_equal(got[want == 0], 0.0)
    assert np.max(np.abs(got - want) / magnitude) < TOLERANCE


@machines
@formats
def test_nothing_is_written_elsewhere(key_format, simulate):
    """Nothing is written for padding, or past the last tile of a request's visible entries."""
    seen = np.array([[70], [90], [96], [0], [-5]], np.int32)
    case = Case(key_format=key_format, visible=seen, max_blocks=3)
    case.slots[1], case.slots[2] = -1, len(case.block_table)
    tuning = sm90.Tuning(warpgroups=1, stages=2, blocks=3)
    poisoned = np.full((5, 1, 96), np.nan, np.float32)
    call = functools.partial(
        launch,
        functools.partial(tuning.body, fp4=fp4.FORMATS[key_format], blocks=3),
        name="indexer_scores",
        grid=Grid(blocks=(3,), shared_bytes=tuning.shared_bytes(fp4.FORMATS[key_format], 1)),
        simulate=simulate,
    )
    run = jax.jit(lambda inputs, out: call(inputs=inputs, state=out))
    got = np.asarray(run(case.inputs(), jnp.asarray(poisoned)))
    assert np.all(np.isfinite(got[0, 0, :70]))
    assert np.all(np.isnan(got[1:]))


@machines
def test_no_entries(simulate):
    case = Case(key_format="mxfp4", visible=np.zeros((2, 1), np.int32), max_blocks=2)
    assert case.run(simulate).shape == (2, 1, 64)


def test_sizes_it_cannot_serve():
    sizes = dict(heads=64, key_dim=128, entries_per_block=32)
    assert all(unsupported_scores(key_format=name, **sizes) is None for name in FORMATS)
    for name, size in dict(heads=32, key_dim=64, entries_per_block=128).items():
        reason = unsupported_scores(key_format="mxfp4", **sizes | {name: size})
        assert name in (reason or "")
    assert "key_format" in (unsupported_scores(key_format="bf16", **sizes) or "")
    case = Case(key_format="mxfp4", visible=np.zeros((1, 1), np.int32), max_blocks=1)
    with pytest.raises(ValueError, match="key_format"):
        pk.indexer_scores(case.inputs(), key_format="bf16")
    case.key_format = "nvfp4"
    with pytest.raises(AssertionError, match="shape"):
        case.run(True)


def test_a_tuning_belongs_to_an_architecture():
    case = Case(key_format="mxfp4", visible=np.zeros((1, 1), np.int32), max_blocks=1)
    for architecture, tuning in ("sm100", sm90.Tuning(warpgroups=1)), ("sm90", sm100.Tuning(warpgroups=1)):
        with pytest.raises(ValueError, match=f"{architecture} kernel"):
            case.run(True, architecture=architecture, tuning=tuning)
    with pytest.raises(ValueError, match="architecture must be one of"):
        case.run(True, architecture="sm80")


def test_a_target_without_a_kernel():
    case = Case(key_format="mxfp4", visible=np.zeros((1, 1), np.int32), max_blocks=1)
    reason = r"indexer_scores has no kernel .* 9\.0 or 10\.0, NVIDIA L40S has 8\.9"
    with jax.sharding.use_abstract_mesh(mesh_of("8.9", "NVIDIA L40S")), pytest.raises(ValueError, match=reason):
        case.run(False)
