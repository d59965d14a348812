"""Requests in both caches at once: what drafts are made of is forked, extracted, saved and released with a request."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import (
    Caches,
    ModelParams,
    Sampling,
    Snapshots,
    forward,
    init_caches,
    random_model,
    restore_caches,
    save_caches,
)
from dsv4jax.model.generation.drafting import Fed, drafter
from tests.model.test_dspark import SPARK
from tests.support.cases import first_of
from tests.support.driver import garbage
from tests.support.models import FULL, SMALL, drawn_model

DRAFTS = 3
PROMPTS = [[1, 2, 3, 0, 5, 4] * 5, [4, 4, 1], [2]]
kinds = pytest.mark.parametrize("cfg", first_of([pytest.param(SPARK, id="DSpark"), pytest.param(SMALL, id="MTP")]))


@functools.cache
def params_of(cfg) -> ModelParams:
    return drawn_model(cfg, 1, "f32")


@jax.jit
def fed(params: ModelParams, ids: jax.Array, caches: Caches, slots: jax.Array, count: jax.Array, after: jax.Array):
    """Run tokens, and guess at what follows token ``after`` of each row. Returns (caches, logits, drafts)."""
    assert caches.drafts is not None
    cache, _ = d4.prepare_forward(caches.model, slots, count)
    logits, seen, cache = forward(params, ids, cache, slots, count)
    following = jnp.concatenate([ids[:, 1:], after[:, None]], axis=1)
    following = jnp.where(jnp.arange(ids.shape[1])[None] == count[:, None] - 1, after[:, None], following)
    of = Fed(seen=seen, following=following, slots=slots, count=count)

    def draw(logits: jax.Array, i: Any):
        return jnp.argmax(logits, -1).astype(jnp.int32), Sampling.of().chances(logits)

    drafts, rows = drafter(params).guess(params, of, caches.drafts, DRAFTS, draw, None)
    return Caches(model=d4.advance(cache, slots, count), drafts=rows), logits, drafts


def ragged(texts: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    ids = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = text
    return jnp.asarray(ids), jnp.asarray([len(text) for text in texts], jnp.int32)


SLOTS = 4, 0, 2


@functools.cache
def admitted(cfg) -> Caches:
    """Caches of six slots, with three requests in another order than that of their slots."""
    caches, slots, _ = init_caches(cfg, 6, 256, DRAFTS, **FULL).admit(5)
    assert slots.tolist() == [0, 1, 2, 3, 4]
    return caches.release(jnp.asarray([1, 3], jnp.int32))


@functools.cache
def filled(cfg) -> Caches:
    """The requests have so many tokens as the prompts, and anything as contents."""

    def grown(cache: d4.KVCache, seed: int) -> d4.KVCache:
        slots, count = jnp.asarray(SLOTS, jnp.int32), jnp.asarray(list(map(len, PROMPTS)), jnp.int32)
        cache, ok = d4.prepare_forward(cache, slots, count)
        assert ok
        return garbage(d4.advance(cache, slots, count), seed)

    caches = admitted(cfg)
    assert caches.drafts is not None
    return Caches(model=grown(caches.model, 0), drafts=grown(caches.drafts, 1))


@functools.cache
def holding(cfg) -> tuple[Caches, tuple[int, ...]]:
    """The requests hold the prompts."""
    ids, count = ragged(PROMPTS, len(PROMPTS[0]))
    slots = jnp.asarray(SLOTS, jnp.int32)
    return fed(params_of(cfg), ids, admitted(cfg), slots, count, jnp.zeros(3, jnp.int32))[0], SLOTS


def continued(cfg, caches: Caches, slots) -> Any:
    """What follows two further tokens of each of the three requests: (logits, drafts)."""
    ids, count = ragged([[3, 1], [5, 2], [0, 0]], len(PROMPTS[0]))  # as wide as the prompts, for the same program
    _, logits, drafts = fed(params_of(cfg), ids, caches, jnp.asarray(slots, jnp.int32), count, ids[:, 0])
    return jax.tree.map(np.asarray, (logits, drafts))


def assert_equal(found: Any, wanted: Any) -> None:
    """All bits: rows have the same places in the batch of one program."""
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@kinds
def test_what_drafts_are_made_of_is_forked_in_any_order_of_slots(cfg):
    caches, slots = holding(cfg)
    wanted = continued(cfg, caches, slots)
    assert len({tuple(tokens) for tokens in wanted[1].tokens.tolist()}) > 1, "drafts that say nothing"
    room, free, _ = caches.admit(3)
    assert free.tolist() == [1, 3, 5]
    for source, targets in ((0, (5,)), (1, (3, 1))):
        after, ok = room.fork(jnp.int32(slots[source]), jnp.asarray(targets, jnp.int32))
        assert ok
        for target in targets:
            others = list(slots)
            others[source] = target
            assert_equal(continued(cfg, after, others), wanted)
        assert_equal(continued(cfg, after, slots), wanted)


@kinds
@pytest.mark.parametrize("stored", first_of([False, True], count=0))
def test_snapshots_have_what_drafts_are_made_of(cfg, stored, tmp_path):
    """Inserted into caches of other sizes, in which other slots are free, directly or by way of a folder."""
    caches, slots = holding(cfg)
    wanted, snapshots = continued(cfg, caches, slots), caches.extract(slots)
    if stored:
        pytest.importorskip("orbax.checkpoint", reason="files need orbax-checkpoint, of the extra 'ckpt'")
        save_caches(tmp_path / "requests", snapshots)
        snapshots = restore_caches(tmp_path / "requests")
        assert isinstance(snapshots, Snapshots)
    other, _, _ = init_caches(cfg, 7, 512, DRAFTS, **FULL).admit(3)
    other = other.release(jnp.asarray([1], jnp.int32))
    after, taken, ok = other.insert(snapshots)
    assert ok
    assert taken.tolist() == [1, 3, 4]
    assert after.drafts is not None
    assert after.drafts.seq_lens.tolist() == after.model.seq_lens.tolist()
    found = continued(cfg, after, taken)
    assert_equal(found[1].tokens, wanted[1].tokens)
    # Caches of other sizes make another program, whose sums may have another order.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), found, wanted)


@kinds
def test_whole_caches_are_stored_with_what_drafts_are_made_of(cfg, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="files need orbax-checkpoint, of the extra 'ckpt'")
    caches = filled(cfg)
    assert caches.drafts is not None
    save_caches(tmp_path / "caches", caches)
    after = restore_caches(tmp_path / "caches", (caches.model.plan, caches.drafts.plan))
    assert_equal(after, caches)
    with pytest.raises(ValueError, match="has rows for drafts, unlike the plans"):
        restore_caches(tmp_path / "caches", (caches.model.plan, None))
    with pytest.raises(FileExistsError, match="save to a new folder"):
        save_caches(tmp_path / "caches", caches)


def test_a_model_without_drafts_is_stored_alone(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="files need orbax-checkpoint, of the extra 'ckpt'")
    caches = init_caches(SMALL, 1, 256, **FULL)
    (tmp_path / "caches.partial" / "model.partial").mkdir(parents=True)  # what an interrupted save has left
    save_caches(tmp_path / "caches", caches)
    assert_equal(restore_caches(tmp_path / "caches"), caches)
    assert [entry.name for entry in tmp_path.iterdir()] == ["caches"]
    save_caches(tmp_path / "new" / "caches", caches)  # the folder around it is made, as by ``save``
    assert_equal(restore_caches(tmp_path / "new" / "caches"), caches)
    unlike: Any = caches.model
    with pytest.raises(ValueError, match="save_caches: expected Caches or Snapshots, got KVCache"):
        save_caches(tmp_path / "cache", unlike)


@kinds
def test_released_requests_leave_both_caches(cfg):
    after = filled(cfg).release(jnp.asarray([SLOTS[0], -1], jnp.int32))
    assert after.drafts is not None
    for cache in (after.model, after.drafts):
        assert cache.tables.admitted.tolist() == [slot in SLOTS[1:] for slot in range(6)]


@kinds
def test_requests_without_room_are_inserted_into_neither(cfg):
    """There are slots for them, but only one block, which the first request of a snapshot needs."""
    snapshots = filled(cfg).extract(SLOTS)
    full, _, ok = init_caches(cfg, 6, 256, DRAFTS, num_blocks=1, **FULL).insert(snapshots)
    assert ok
    after, taken, ok = full.insert(snapshots)
    assert not ok
    assert taken.tolist() == [-1, -1, -1]
    assert_equal(after, full)


def test_rows_for_drafts_that_only_one_has_are_named():
    snapshots, without = filled(SPARK).extract(SLOTS), init_caches(SPARK, 6, 256, **FULL)
    with pytest.raises(ValueError, match="the snapshots have rows for drafts, and the caches do not"):
        without.insert(snapshots)
    only = dataclasses.replace(snapshots, drafts=None)
    with pytest.raises(ValueError, match="the caches have rows for drafts, and the snapshots do not"):
        init_caches(SPARK, 6, 256, DRAFTS, **FULL).insert(only)


def test_arguments_of_another_kind_are_named():
    attention: Any = SPARK.attention
    with pytest.raises(ValueError, match="cfg: expected a ModelConfig, got DSV4Config"):
        init_caches(attention, 6, 256)
    with pytest.raises(ValueError, match="cfg: expected a ModelConfig, got DSV4Config"):
        random_model(attention, jax.random.key(0))
    key: Any = 0
    with pytest.raises(ValueError, match=r"key must be a random key, such as jax\.random\.key\(0\), got 0"):
        random_model(SPARK, key)
    both: Any = filled(SPARK).extract(SLOTS)
    with pytest.raises(ValueError, match=r"snapshot: expected a Snapshot, got Snapshots: give it \.model or \.drafts"):
        d4.insert(init_caches(SPARK, 6, 256, **FULL).model, both)
