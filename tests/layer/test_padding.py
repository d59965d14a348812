"""Chunks with padding: products leave out tiles of it, and what is left in its place reaches nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.backend import OpBackends
from pallas_kernels.products import call, many
from tests.support.driver import DEFAULT, ids, sequence
from tests.support.machines import BACKENDS

TOKENS = 65
NUM_NEW = 65, 1, 0  # of two tiles of 128 rows the last one has only padding
SIZES = dict(hidden_size=128, q_lora_rank=128, o_lora_rank=128, num_heads=2, o_groups=1, indexer_heads=8)


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(many, "_LEAST_TILES", 2)


def run(backend: OpBackends | str, activations: str) -> tuple[np.ndarray, Any]:
    """Run a layer. Return its output, and its cache after the step."""
    cfg = d4.DSV4Config(**SIZES, compress_ratios=(4,))
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(cfg, max_requests=3, max_context=256, **DEFAULT)), 3)
    params = d4.init_attention_params(
        jax.random.key(0), cfg, 0, jnp.bfloat16, weights="stored", activations=activations
    )
    x = jnp.asarray(sequence(0, 3 * TOKENS, cfg.hidden_size), jnp.bfloat16).reshape(3, TOKENS, -1)

    @jax.jit
    def step(params: Any, x: jax.Array, cache: d4.KVCache) -> tuple[jax.Array, d4.KVCache]:
        num_new = ids(*NUM_NEW)
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        y, cache = d4.attention_layer(params, x, cache, 0, slots, num_new, backend=backend)
        return y, d4.advance(cache, slots, num_new)

    y, cache = step(params, x, cache)
    return np.asarray(y, np.float32), cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", ["bf16", "fp8_all"])
def test_tiles_of_padding_reach_neither_the_output_nor_the_cache(backend, activations, few_rows):
    """The same as with all rows computed, byte for byte. On the simulator what is left out is NaN."""
    ops = OpBackends(projections=backend, cache_update="xla", decode_attention="xla", indexer_scores="xla", top_k="xla")
    tiles = []

    def noted(rows: jax.Array | None, *args: int) -> jax.Array | None:
        found = many.needed_tiles(rows, *args)
        tiles.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "needed_tiles", noted)
        some = run(ops, activations)
        assert any(tiles)
        patch.setattr(call, "needed_tiles", lambda *args: None)
        jax.clear_caches()
        everything = run(ops, activations)
    assert np.isfinite(some[0]).all()
    for found, want in zip(jax.tree.leaves(some), jax.tree.leaves(everything), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
