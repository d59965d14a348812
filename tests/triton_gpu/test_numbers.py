"""Conversions of E4M3 on their bits, for every code and for numbers around every boundary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.formats import E4M3
from tests.support.triton import runs_here

pytestmark = runs_here()


def rows_through(kv_format: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode rows f32 [n, 64] as entries of a pool, in Triton and in XLA: the stored NoPE bytes of both."""
    import dsv4jax as d4

    cfg = d4.DSV4Config.tiny(head_dim=72, rope_dim=8)
    plan = d4.plan_cache(cfg, max_requests=1, max_context=128 * len(values), kv_format=kv_format)
    pool = d4.init_cache(plan).stack("hca").pool
    entries = np.zeros((1, len(values), 72), np.float32)
    entries[0, :, :64] = values
    table = jnp.arange(plan.max_blocks, dtype=jnp.int32)[None]
    zero, count = jnp.zeros(1, jnp.int32), jnp.asarray([len(values)], jnp.int32)
    places = dict(block_table=table, slots=zero, first=zero, count=count)
    new = d4.pieces.NewEntries(entries=jnp.asarray(entries), keys=None, **places)
    stored = [
        d4.pieces.flush_entries(jax.tree.map(jnp.copy, pool), 0, new, plan=plan, backend=name)
        for name in ("triton", "xla")
    ]
    got, want = (np.asarray(one.entries.nope[0, : len(values), 0]) for one in stored)
    return got, want


def test_e4m3_of_all_neighbourhoods():
    """With a largest magnitude of 448 the scale is 1, so that the codes are those of the numbers themselves."""
    codes = np.arange(127, dtype=np.uint8)
    exact = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(codes), E4M3).astype(jnp.float32))
    middle = (exact[1:] + exact[:-1]) / 2
    around = np.concatenate([exact, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(448))])
    numbers = np.concatenate([around, -around]).astype(np.float32)
    rows = np.zeros((-(-len(numbers) // 63), 64), np.float32)
    rows[:, 0] = 448
    rows[:, 1:].flat[: len(numbers)] = numbers
    got, want = rows_through("fp8_tile64", rows)
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(want & 0x7F)) == 127, "not every code is there"


def test_every_code_is_decoded_as_in_xla():
    """By a gather of rows of scale 1."""
    import dsv4jax as d4

    cfg = d4.DSV4Config.tiny(head_dim=264, rope_dim=8)
    plan = d4.plan_cache(cfg, max_requests=1, max_context=128, kv_format="fp8_row")
    pool = d4.init_cache(plan).stack("hca").pool
    assert pool is not None
    assert pool.entries.scale is not None
    nope = jnp.broadcast_to(jnp.arange(256, dtype=jnp.uint8), pool.entries.nope.shape)
    entries = d4.PagedPool(
        entries=type(pool.entries)(nope=nope, rope=pool.entries.rope, scale=jnp.ones_like(pool.entries.scale)),
        indexer_keys=None,
    )
    place = entries, 0, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    got, want = (np.asarray(d4.pieces.gather_compressed(*place, plan=plan, backend=name)) for name in ("triton", "xla"))
    np.testing.assert_array_equal(got, want)
    assert np.isnan(want).sum() == 2
