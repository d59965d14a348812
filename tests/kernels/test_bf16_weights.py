"""Kernels load sinks and norms in the dtype of the weights: bf16 ones give the bits of the same f32 ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.tails import num_touched_blocks
from pallas_kernels.attention import sm90_few
from tests.support.attention_cases import ONE_BLOCK, make, run
from tests.support.attention_cases import Case as AttentionCase
from tests.support.cases import first_of
from tests.support.kernel_cases import csa, hca, make_batch, make_stack, same_bytes
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)


@machines
@pytest.mark.parametrize("layout", first_of([ONE_BLOCK, sm90_few.Layout(heads=16, cluster=2, tiles=2)]))
def test_sinks(layout, simulate):
    case = AttentionCase(lengths=(130,), layout=layout)
    inputs, _ = make(case)
    sinks = inputs.sinks.astype(jnp.bfloat16)
    assert sinks.astype(jnp.float32).tolist() != inputs.sinks.tolist()
    run_with = functools.partial(dataclasses.replace, inputs)
    got, want = (run(case, run_with(sinks=x), simulate=simulate) for x in (sinks, sinks.astype(jnp.float32)))
    np.testing.assert_array_equal(got, want)


@machines
@pytest.mark.parametrize("case", [csa(5, "f32", "f32"), csa(1, "f32", "f32"), hca("online", 33, "f32")], ids=str)
def test_norms(case, simulate):
    stack, batch = make_stack(case, make_batch(case)), make_batch(case)
    rng, cfg, streams = np.random.default_rng(7), case.cfg, 2 if case.kind.overlaps else 1

    def draw(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def compressor(dim: int) -> pk.Streams:
        lead = case.batch, case.tokens, streams * dim
        return pk.Streams(k=draw(*lead), z=draw(*lead), norm=draw(dim, dtype=jnp.bfloat16))

    tokens = pk.NewTokens(
        layer=jnp.zeros(1, jnp.int32),
        slots=jnp.asarray(batch.slots),
        start=jnp.asarray(batch.start),
        num_new=jnp.asarray(batch.num_new),
        block_table=jnp.asarray(batch.block_table),
        kv=None,
        entry=compressor(cfg.head_dim),
        key=compressor(cfg.indexer_head_dim) if case.kind.is_indexed else None,
        rope=draw(case.batch, num_touched_blocks(case.tokens, case.ratio), cfg.rope_dim),
    )
    update = functools.partial(
        pk.append_chunk, kv_format="f32", key_format="f32", ratio=case.ratio, eps=1e-6, simulate=simulate
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tokens)
    got, want = (jax.tree.map(np.asarray, jax.jit(update)(stack, given)) for given in (tokens, wide))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        same_bytes(jax.tree_util.keystr(path), a, b)
    assert stack.pool is not None
    before = np.asarray(stack.pool.entries.nope)
    assert not np.array_equal(got.pool.entries.nope, before, equal_nan=True), "no entry was written"
