"""The indexer's scores in Triton, compared with the XLA form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.layer.ops import INDEXER_SCORES
from tests.support.cases import first_of
from tests.support.score_cases import FORMATS, PAGE_ENTRIES, Case, visible
from tests.support.triton import runs_here

pytestmark = runs_here()

# Of sum_h |w_h| |q_h| |k_s|. Products are exact, and a sum of 128 numbers in f32, and one over 64 heads, are rounded by
# 2^-24 in each step, mostly in both directions.
TOLERANCE = 1e-6
LOWEST = np.finfo(np.float32).min


def run(case: Case) -> np.ndarray:
    from pallas_kernels.triton_gpu import indexer_scores

    return np.array(jax.jit(functools.partial(indexer_scores, key_format=case.key_format))(case.inputs()))


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize(("batch", "tokens", "max_blocks"), first_of([(3, 1, 5), (1, 1, 4), (2, 3, 5)]))
def test_scores(key_format, batch, tokens, max_blocks):
    seen = visible(batch, batch, tokens, max_blocks * PAGE_ENTRIES)
    seen[0, -1] = max_blocks * PAGE_ENTRIES
    case = Case(key_format=key_format, visible=seen, max_blocks=max_blocks, seed=tokens)
    case.check(run(case), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("key_format", FORMATS)
def test_groups_of_all_magnitudes(key_format):
    """Scales over 60 binades: bf16 has the exponents of f32."""
    case = Case(key_format=key_format, visible=visible(1, 4, 1, 96), max_blocks=3, spread=30)
    case.check(run(case), TOLERANCE)


@pytest.mark.parametrize("key_format", FORMATS)
def test_nan_stays_where_it_is(key_format):
    case = Case(key_format=key_format, visible=np.full((2, 1), 64, np.int32), max_blocks=2)
    block = case.block_table[case.slots[0], 1]
    clean = run(case)
    case.keys.scale[1, block, 5, 1] = case.scale_bytes.nan
    found = run(case)
    assert found[0, 0, PAGE_ENTRIES + 5] == np.inf
    found[0, 0, PAGE_ENTRIES + 5] = clean[0, 0, PAGE_ENTRIES + 5]
    np.testing.assert_array_equal(found, clean)
    case.weights[1] = -np.inf
    assert np.all((run(case)[1] >= LOWEST) & (found[1] < np.inf))


def test_slots_and_blocks_that_are_not_there():
    case = Case(key_format="mxfp4", visible=np.full((2, 1), 64, np.int32), max_blocks=2)
    case.slots[0] = -1
    case.block_table[case.slots[1], 0] = -1
    found = run(case)
    np.testing.assert_array_equal(found[1, 0, :PAGE_ENTRIES], 0.0)  # as rows of zeros
    assert np.all(found[1, 0, PAGE_ENTRIES:] != 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("key_format", ["f32", "bf16"])
def test_keys_of_floats(key_format):
    rng = np.random.default_rng(0)
    cfg = d4.DSV4Config.tiny()
    plan = d4.plan_cache(cfg, max_requests=2, max_context=1024, indexer_format=key_format)
    pool = d4.init_cache(plan).stack("csa").pool
    assert pool is not None
    assert pool.indexer_keys is not None
    codes = rng.standard_normal(pool.indexer_keys.codes.shape).astype(np.float32)
    keys = plan.keys.encode(jnp.asarray(codes))
    table = rng.permutation(plan.num_blocks)[: 2 * plan.max_blocks].reshape(2, -1).astype(np.int32)
    layer = PooledLayer(
        pool=d4.PagedPool(entries=pool.entries, indexer_keys=keys),
        index=0,
        block_table=jnp.asarray(table),
        slots=jnp.asarray([1, 0], jnp.int32),
        plan=plan,
    )
    heads = 2, 3, cfg.indexer_heads
    queries = jnp.asarray(rng.standard_normal((*heads, cfg.indexer_head_dim)), jnp.float32)
    weights, seen = (
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
        jnp.asarray([[9, 10, 70], [0, 256, 1]], jnp.int32),
    )
    got, want = (np.asarray(INDEXER_SCORES[name].scores(queries, weights, layer, seen)) for name in ("triton", "xla"))
    there = np.isfinite(want)
    assert there.sum() == 346
    # Three products of TF32 miss a product of f32 by some 2^-21 of it; a score sums 128 x 16 of them, up to 300.
    np.testing.assert_allclose(got[there], want[there], atol=2e-3)
