"""A cache that is restored over another number of shards: every request is what it was, and the cache is sound."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="files are written by orbax, of the extra 'ckpt'")

import dsv4jax as d4
from dsv4jax.model import init_caches
from dsv4jax.model.caches import Caches, restore_caches, save_caches
from tests.support.driver import assert_same, garbage, ids, small_plan
from tests.support.models import FULL, SMALL

REQUESTS = 8  # slots
LENGTHS = (33, 3, 16, 20, 40, 0, 7)  # of their requests; the last slot is free


def mesh_of(data: int, model: int = 1) -> jax.sharding.Mesh:
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices("cpu")[: data * model])


@pytest.fixture(scope="module")
def cache() -> d4.KVCache:
    """Random bytes, and requests of which the sixth shares blocks with the fifth, and the first has a further grant."""
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(max_requests=REQUESTS, num_blocks=40)), len(LENGTHS))
    cache, ok = d4.prepare_forward(cache, slots, ids(*LENGTHS))
    assert ok
    cache = d4.advance(garbage(cache), slots, ids(*LENGTHS))
    cache, ok = d4.fork(cache, ids(4)[0], ids(5))
    assert ok
    cache, ok = d4.prepare_forward(cache, ids(0), ids(20))
    assert ok
    assert (np.asarray(cache.tables.block_refs) == 2).any()
    return cache


def requests_of(cache: d4.KVCache) -> list[d4.requests.Snapshot | None]:
    """The request of each slot, counted through all shards."""
    shards = [d4.sharding.shard_of(cache, number) for number in d4.sharding.local_shards(cache)]
    return [
        jax.device_get(d4.extract(shard, [slot])) if held else None
        for shard in shards
        for slot, held in enumerate(np.asarray(shard.tables.admitted))
    ]


def restored(path: Path, mesh: jax.sharding.Mesh, cache: d4.KVCache) -> d4.KVCache:
    found = d4.requests.restore(path, cache.plan, mesh=mesh)
    assert isinstance(found, d4.KVCache)
    assert found.tables.num_free.size == mesh.shape["data"]
    # Random bytes are no window; of slots and blocks there is nothing to say.
    assert [fault for fault in d4.verify(found) if "layer" not in fault] == []
    return found


def both(caches: Caches) -> tuple[d4.KVCache, d4.KVCache]:
    assert caches.drafts is not None
    return caches.model, caches.drafts


@pytest.mark.sweep(guard="test_caches_with_drafts_fork_and_move_while_a_shard_refuses")
def test_requests_are_the_same_on_any_mesh(cache, tmp_path):
    """From one shard over four to two, and back. Shared blocks are copied where their readers part."""
    wanted, path, found = requests_of(cache), tmp_path / "one", cache
    d4.requests.save(path, cache)
    for number, sizes in enumerate(((4, 2), (2, 1), (1, 2))):
        found = restored(path, mesh_of(*sizes), cache)
        for one, other in zip(requests_of(found), wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or assert_same(one, other) is None
        assert_same(found.tables.prepared, cache.tables.prepared)
        d4.requests.save(path := tmp_path / str(number), found)
    assert found.tables.num_free.sum() == cache.tables.num_free.sum()
    # A fork's readers are the fifth and sixth request: of eight shards, the fifth and the sixth have a copy each.
    apart = restored(path, mesh_of(8), cache)
    assert not (np.asarray(apart.tables.block_refs) > 1).any()
    assert apart.tables.num_free.sum() < cache.tables.num_free.sum()
    for one, other in zip(requests_of(apart), wanted, strict=True):
        assert one is None or assert_same(one, other) is None


@pytest.mark.slow
def test_the_same_number_of_shards_comes_back_bit_for_bit(cache, tmp_path):
    d4.requests.save(tmp_path / "one", cache)
    two = restored(tmp_path / "one", mesh_of(2), cache)
    d4.requests.save(tmp_path / "two", two)
    assert_same(dataclasses.replace(restored(tmp_path / "two", mesh_of(2, 2), cache), mesh=two.mesh), two)


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(cache, tmp_path):
    d4.requests.save(tmp_path / "cache", cache)
    d4.requests.save(tmp_path / "request", d4.extract(cache, [0]))
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("cache", dict(mesh=mesh_of(3)), "max_requests=8 must be divisible by the 3 shards"),
        ("cache", dict(mesh=mesh_of(2), device=jax.devices()[0]), "give device or mesh, and not both"),
        ("request", dict(mesh=mesh_of(2)), "has a snapshot, which lies over no mesh"),
    ]
    for name, options, message in cases:
        with pytest.raises(ValueError, match=message):
            d4.requests.restore(tmp_path / name, **options)
    full, slots, _ = d4.admit(d4.init_cache(small_plan(max_requests=2, num_blocks=6)), 1)
    full, ok = d4.prepare_forward(full, slots, ids(4 * full.plan.cfg.block_tokens))
    assert ok
    d4.requests.save(tmp_path / "full", full)
    with pytest.raises(ValueError, match="of 2 shards, number 0 would hold 4 blocks, and its share is 3"):
        d4.requests.restore(tmp_path / "full", mesh=mesh_of(2))


@pytest.mark.slow
def test_caches_with_drafts_fork_and_move_while_a_shard_refuses(tmp_path):
    """The first shard has no blocks left: it refuses, the second goes on, and both caches agree."""
    mesh = mesh_of(2)
    caches = init_caches(SMALL, 8, 512, 2, mesh=mesh, num_blocks=12, **FULL)  # of each shard four slots and six blocks
    block = caches.model.plan.cfg.block_tokens
    caches, slots, _ = caches.admit(6)  # three of each shard
    lengths = ids(4 * block - 1, block + 5, 0, block + 5, 0, 0)

    def grown(cache: d4.KVCache) -> d4.KVCache:
        cache, ok = d4.prepare_forward(cache, slots, lengths)
        assert ok.tolist() == [True, True]
        return d4.advance(cache, slots, lengths)

    caches = Caches(model=grown(caches.model), drafts=grown(both(caches)[1]))
    caches, ok = caches.fork(ids(0, 0), ids(2, 1))
    assert ok.tolist() == [False, True]
    lengths_of_all = [4 * block - 1, block + 5, 0, 0, block + 5, block + 5, 0, 0]
    assert [one.seq_lens.tolist() for one in both(caches)] == [lengths_of_all] * 2
    save_caches(tmp_path / "caches", caches)
    assert_same(restore_caches(tmp_path / "caches", mesh=mesh), caches)
    of_model, of_drafts = (d4.sharding.shard_of(one, 1) for one in both(caches))
    second = Caches(model=of_model, drafts=of_drafts)
    caches, slots, ok = caches.insert(jax.device_get(second.extract([0, 1])))  # one of the two for each shard
    assert (ok.tolist(), slots.tolist()) == ([False, True], [-1, 3])
    assert [one.seq_lens.tolist() for one in both(caches)] == [[*lengths_of_all[:7], block + 5]] * 2
