"""The layer over the cache gives the recorded numbers, however a sequence is cut into calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.reference import reference_layer
from tests import recorded
from tests.driver import even_split, feed, ids, random_split

KINDS = ("swa", "csa", "hca")
# fp32 sums in another order: values of rms 0.4 agree to a few 1e-7; the recordings among themselves to 6e-7.
TOLERANCE = 2e-5


def run(kind, splits, seed=0, slots=None, **plan_options):
    recording = recorded.load(kind)
    plan = d4.plan_cache(
        recording.cfg, max_requests=5, max_context=512, **({"kv_format": "f32", "indexer_format": "f32"} | plan_options)
    )
    cache, given, ok = d4.admit(d4.init_cache(plan), 5)
    assert ok
    slots = given[: len(splits)] if slots is None else slots
    xs = [recording.x[: sum(split)] for split in splits]
    outputs, cache = feed({0: recording.params}, xs, cache, slots, splits)
    return recording, outputs[0], cache, slots


def entries_of(cache, kind, slots, count):
    pool = cache.stack(kind).pool
    numbers = jnp.full(slots.shape, count, jnp.int32)
    return np.asarray(d4.gather_all_compressed(pool, 0, cache.tables.block_table, slots, numbers, plan=cache.plan))[
        :, :count
    ]


@pytest.mark.parametrize(("kind", "hca_tail"), [("swa", "ring"), ("csa", "ring"), ("hca", "ring"), ("hca", "online")])
@pytest.mark.parametrize("chunk", [1, 3, 64, 400], ids=["token by token", "chunks of 3", "chunks of 64", "one shot"])
def test_outputs_equal_the_recorded_ones(kind, chunk, hca_tail):
    length = len(recorded.load(kind).x)
    recording, outputs, cache, slots = run(kind, [even_split(length, min(chunk, length))], hca_tail=hca_tail)
    np.testing.assert_allclose(outputs[0], recording.arrays["out"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(outputs[0], recording.arrays["out_hf"], rtol=0, atol=TOLERANCE)
    if kind != "swa":
        want = recording.arrays["entries"]
        got = entries_of(cache, kind, slots, len(want))[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
