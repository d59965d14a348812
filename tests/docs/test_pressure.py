"""The example of a server under pressure: every request is served, whatever had to wait or begin again."""

import runpy

import jax.numpy as jnp
import pytest

import dsv4jax as d4
from tests.support.driver import CFG, LAYERS, random_params, sequence
from tests.support.paths import ROOT


@pytest.mark.sweep(guard="test_prefixes_give_way_to_texts_and_texts_still_share_them")
def test_requests_that_wait_or_begin_again_get_what_they_get_alone():
    example = runpy.run_path(str(ROOT / "examples" / "pressure.py"))
    lengths = [70, 3, 64, 33, 80, 16, 50]
    x = jnp.stack([jnp.asarray(sequence(i, 80, CFG.hidden_size)) for i in range(len(lengths))])
    total = jnp.asarray(lengths, jnp.int32)

    def plan(blocks):
        return d4.plan_cache(CFG, 4, 80, "f32", "f32", num_blocks=blocks)

    params = tuple(random_params()[layer] for layer in LAYERS)
    server = example["serve"](params, x, total, plan=plan(6))  # the longest request takes five
    assert d4.verify(server.cache) == []
    assert server.cache.tables.num_free.tolist() == [6]
    assert int(server.refused) > 0
    assert int(server.evicted) > 0
    plenty = example["serve"](params, x, total, plan=plan(20))
    assert (int(plenty.refused), int(plenty.evicted)) == (0, 0)
    assert int(plenty.passes) < int(server.passes)
    real = jnp.arange(80)[None] < total[:, None]
    assert jnp.all(jnp.any(plenty.y != 0, axis=-1), where=real)
    assert not jnp.any(jnp.where(real[..., None], 0.0, server.y))
    # The same chunks of the same request, in programs that differ in the pool's size alone: fp32 rounding at most.
    assert jnp.max(jnp.abs(server.y - plenty.y)) < 2e-5
