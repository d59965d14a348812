"""The shard that takes a new request: the one with most free blocks, as a plain loop chooses it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.tables import blocks_for
from dsv4jax.model import init_caches
from tests.support.driver import ids, small_plan
from tests.support.models import FULL, SMALL

SHARDS, SLOTS = 3, 4  # slots of each
BLOCKS = 12  # of each shard


def chosen(free_blocks: list[int], free_slots: list[int], needed: list[int]) -> list[int]:
    """The shards of requests, by a loop in Python."""
    shards = []
    for blocks in needed:
        fitting = [s for s in range(len(free_blocks)) if free_slots[s] and free_blocks[s] >= blocks]
        shards.append(max(fitting, key=lambda s: (free_blocks[s], free_slots[s], -s), default=-1))
        if shards[-1] >= 0:
            free_blocks[shards[-1]] -= blocks
            free_slots[shards[-1]] -= 1
    return shards


def test_shards_are_chosen_as_by_a_plain_loop():
    """Of any state: nothing free, requests that fit nowhere, and shards that are equal."""
    rng = np.random.default_rng(5)
    plan = small_plan(max_requests=SHARDS * SLOTS, num_blocks=SHARDS * BLOCKS)
    empty, choose = d4.init_cache(plan), jax.jit(d4.requests.choose_shards)
    refused = 0
    for _ in range(40):
        free = rng.integers(0, BLOCKS + 1, SHARDS).astype(np.int32)
        admitted = rng.random(SHARDS * SLOTS) < rng.random()
        tokens = rng.integers(0, plan.max_context, 7).astype(np.int32)
        tables = dataclasses.replace(empty.tables, num_free=jnp.asarray(free), admitted=jnp.asarray(admitted))
        slots = (~admitted).reshape(SHARDS, SLOTS).sum(axis=1).tolist()
        wanted = chosen(free.tolist(), slots, [int(blocks_for(plan, int(count))) for count in tokens])
        assert choose(dataclasses.replace(empty, tables=tables), jnp.asarray(tokens)).tolist() == wanted
        refused += wanted.count(-1)
    assert 0 < refused < 40 * 7


@pytest.mark.slow
def test_requests_of_one_device_are_admitted_while_there_is_room():
    cache = d4.init_cache(small_plan(max_requests=4, num_blocks=4))
    long = 3 * cache.plan.cfg.block_tokens
    cache, shards, slots = d4.requests.admit_anywhere(cache, ids(long, long, 1, 0))
    assert shards.tolist() == [0, -1, 0, 0]
    assert slots.tolist() == [0, -1, 1, 2]
    assert d4.verify(cache) == []


@pytest.mark.slow
def test_a_mesh_takes_requests_where_blocks_are_free():
    """One shard is full while the other goes on; and the cache for drafts has the same slots."""
    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices("cpu")[:2])
    caches = init_caches(SMALL, 4, 512, 2, mesh=mesh, num_blocks=8, **FULL)  # four blocks of each shard
    block = caches.model.plan.cfg.block_tokens
    caches, shards, slots = caches.admit_anywhere(ids(3 * block, block, block))
    assert (shards.tolist(), slots.tolist()) == ([0, 1, 1], [0, 0, 1])
    # Row b of the batch is of shard b // 2.
    cache, ok = d4.prepare_forward(caches.model, ids(0, -1, 0, 1), ids(3 * block, 0, block, block))
    assert ok.tolist() == [True, True]
    caches = dataclasses.replace(caches, model=cache)
    caches, shards, slots = caches.admit_anywhere(ids(2 * block, block, block))
    assert (shards.tolist(), slots.tolist()) == ([-1, 0, -1], [-1, 1, -1]), "the second shard has no slot"
    for one in (caches.model, caches.drafts):
        assert one is not None
        assert one.tables.admitted.all()
        assert d4.verify(one) == []


def test_tokens_of_another_dtype_are_refused():
    with pytest.raises(AssertionError, match=r"tokens: expected int32 \[B\], got float32\[2\]"):
        d4.requests.choose_shards(d4.init_cache(small_plan()), jnp.ones(2))
