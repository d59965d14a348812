"""Chunks with padding: kernels leave it out, and what is left in its place reaches nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.backend import OpBackends
from dsv4jax.layer.kernels import base
from pallas_kernels.language import target
from pallas_kernels.products import plan
from pallas_kernels.products.many import launch
from pallas_kernels.products.many import tiles as many
from tests.support.driver import DEFAULT, ids, sequence
from tests.support.machines import BACKENDS

SIZES = dict(hidden_size=128, q_lora_rank=128, o_lora_rank=128, o_groups=1, indexer_heads=8)


@pytest.fixture
def few_rows(monkeypatch):
    """So few rows and queries are many."""
    monkeypatch.setattr(many, "_LEAST_TILES", 2)
    monkeypatch.setattr(plan, "THRESHOLDS", dataclasses.replace(plan.THRESHOLDS, many_rows=65))
    monkeypatch.setattr(base, "_FEW_TOKENS", 1)
    monkeypatch.setattr(target, "multiprocessors", lambda: 2)


def run(backend: OpBackends | str, activations: str, num_new: tuple[int, ...], heads: int) -> tuple[np.ndarray, Any]:
    """Run a layer. Return its output, and its cache after the step."""
    tokens, requests = max(num_new), len(num_new)
    cfg = d4.DSV4Config(**SIZES, num_heads=heads, compress_ratios=(4,))
    cache, slots, _ = d4.admit(
        d4.init_cache(d4.plan_cache(cfg, max_requests=requests, max_context=256, **DEFAULT)), requests
    )
    params = d4.init_attention_params(
        jax.random.key(0), cfg, 0, jnp.bfloat16, weights="stored", activations=activations
    )
    x = jnp.asarray(sequence(0, requests * tokens, cfg.hidden_size), jnp.bfloat16).reshape(requests, tokens, -1)

    @jax.jit
    def step(params: Any, x: jax.Array, cache: d4.KVCache) -> tuple[jax.Array, d4.KVCache]:
        count = ids(*num_new)
        cache, _ = d4.prepare_forward(cache, slots, count)
        y, cache = d4.attention_layer(params, x, cache, 0, slots, count, backend=backend)
        return y, d4.advance(cache, slots, count)

    y, cache = step(params, x, cache)
    return np.asarray(y, np.float32), cache


def same(some: Any, everything: Any) -> None:
    """Byte for byte, and finite. On the simulator what is left out is NaN."""
    assert np.isfinite(some[0]).all()
    for found, want in zip(jax.tree.leaves(some), jax.tree.leaves(everything), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


@pytest.mark.sweep(guard="test_needed_rows_are_the_same_bits_and_tiles_of_others_are_left_out")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", ["bf16", pytest.param("fp8_all", marks=pytest.mark.sweep)])
def test_tiles_of_padding_reach_neither_the_output_nor_the_cache(backend, activations, few_rows):
    """Of two tiles of 128 rows the last one has only padding."""
    ops = OpBackends(projections=backend, cache_update="xla", decode_attention="xla", indexer_scores="xla", top_k="xla")
    given: Any = ops, activations, (65, 1, 0), 2
    tiles = []

    def noted(rows: jax.Array, *args: Any) -> jax.Array | None:
        found = many.needed_tiles(rows, *args)
        tiles.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "needed_tiles", noted)
        some = run(*given)
        assert any(tiles)
        patch.setattr(launch, "needed_tiles", lambda *args: None)
        jax.clear_caches()
        same(some, run(*given))


@pytest.mark.sweep(guard="test_queries_of_padding_are_left_out")
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_padding_reach_neither_the_output_nor_the_cache(backend, few_rows, monkeypatch):
    ops = OpBackends(projections="xla", cache_update="xla", decode_attention=backend, indexer_scores="xla", top_k="xla")
    given: Any = ops, "bf16", (3, 1, 0), 64
    some = run(*given)
    monkeypatch.setattr(base, "_FEW_TOKENS", 3)  # so that nobody looks for padding
    jax.clear_caches()
    same(some, run(*given))
