"""Requests that go on from a store's prefixes hold the bits, and give the outputs, of those that are computed whole."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.requests import PrefixStore, prefixes
from tests.support.cases import first_of
from tests.support.driver import TRAINED, assert_same, ids, small_plan
from tests.support.prefix_cases import BLOCK, CAPACITY, PLAN, SLOTS, admit, blocks, chunk, empty, feed, held


def length(store: PrefixStore, tokens: np.ndarray) -> int:
    """Tokens of the prefix that the store finds."""
    found = store.find(tokens)
    assert found is not None
    return found.length


# ---- what a hit holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", first_of([1, 5, BLOCK, BLOCK + 3]))
def test_a_hit_is_the_longest_prefix_that_leaves_a_token(more):
    store, cache = empty()
    prompt = np.concatenate([blocks(0, 1, 2), blocks(3, 4)[:more]])
    cache, first = admit(cache)
    cache = feed(cache, first, prompt[:BLOCK])
    store, cache, ok = store.keep(cache, first, prompt[:BLOCK])
    assert ok
    cache = feed(cache, first, prompt[BLOCK : 3 * BLOCK])
    store, cache, ok = store.keep(cache, first, prompt[: 3 * BLOCK])
    assert ok
    assert length(store, prompt) == 3 * BLOCK
    assert length(store, prompt[: 3 * BLOCK]) == BLOCK  # its last token must run
    assert store.find(prompt[:BLOCK]) is None
    cache, second = admit(cache)
    free = int(cache.tables.num_free[0])
    store, cache, stored = store.start(cache, second, prompt)
    assert stored == 3 * BLOCK
    assert int(cache.tables.num_free[0]) == free  # no block is taken, whatever the length
    assert store.verify(cache) == []


def test_whoever_goes_on_from_a_prefix_gives_the_outputs_of_one_that_does_not():
    store, cache = empty()
    document = blocks(0, 1)
    cache, slot = admit(cache)
    cache = feed(cache, slot, document)
    store, cache, _ = store.keep(cache, slot, document)
    cache = d4.release(cache, ids(slot))
    for question in ([1, 2, 3], [3, 1], [7]):
        prompt = np.concatenate([document, question])
        cache, slot = admit(cache)
        store, cache, stored = store.start(cache, slot, prompt)
        assert stored == document.size
        ys, cache, ok = chunk(cache, slot, question)
        alone, slot_alone = admit(d4.init_cache(PLAN))
        wanted, alone, _ = chunk(feed(alone, slot_alone, document), slot_alone, question)
        assert ok
        assert_same(ys, wanted)
        assert_same(held(cache, slot), held(alone, slot_alone))
    assert store.verify(cache) == []


def test_a_collision_of_hashes_is_not_a_hit(monkeypatch):
    monkeypatch.setattr(prefixes, "hashes_of", lambda tokens, block: (7,) * (len(tokens) // block))
    store, cache = empty()
    cache, slot = admit(cache)
    cache = feed(cache, slot, blocks(0))
    store, cache, ok = store.keep(cache, slot, blocks(0))
    assert ok
    assert store.find(blocks(1, 1)) is None
    assert length(store, blocks(0, 1)) == BLOCK
    cache, other = admit(cache)
    cache = feed(cache, other, blocks(1))
    store, unchanged, ok = store.keep(cache, other, blocks(1))  # the one with its hash is in use
    assert not ok
    assert unchanged is cache
    assert store.find(blocks(0, 1))
    cache = d4.release(cache, ids(slot))
    store, cache, ok = store.keep(cache, other, blocks(1))
    assert ok
    assert store.find(blocks(0, 1)) is None
    assert length(store, blocks(1, 1)) == BLOCK
    assert d4.verify(cache) == []
    assert len(store.prefixes) == 1


def test_cuts_are_ends_steps_and_partings():
    store, cache = empty()
    document = blocks(0, 1, 2)
    prompts = [np.concatenate([document, blocks(letter)[:9]]) for letter in (3, 4)]
    alone = blocks(5, 5, 5, 5)
    assert store.cuts([*prompts, alone, [1]]) == [[48], [48], [48], []]
    assert store.cuts([np.concatenate([document, blocks(3, 3)]), prompts[0]]) == [[48, 64], [48]]
    assert dataclasses.replace(store, every=1).cuts([alone]) == [[16, 32, 48]]
    assert dataclasses.replace(store, every=2).cuts([alone]) == [[32, 48]]
    # What parts from a prefix that is stored already is noticed, too.
    cache, slot = admit(cache)
    cache = feed(cache, slot, document)
    store, cache, _ = store.keep(cache, slot, document)
    assert store.cuts([blocks(0, 1, 5, 6, 7)]) == [[32, 64]]


# ---- what gives way --------------------------------------------------------------------------------------------------


def kept(store, cache, *letters, release=True):
    """Feed a request whole blocks and keep them; release it."""
    cache, slot = admit(cache)
    tokens = blocks(*letters)
    store, cache, stored = store.start(cache, slot, tokens)
    store, cache, ok = store.make_room(cache, len(letters) - stored // BLOCK)
    assert ok
    cache = feed(cache, slot, tokens[stored:])
    store, cache, ok = store.keep(cache, slot, tokens)
    return store, d4.release(cache, ids(slot)) if release else cache, ok


def test_the_least_recently_used_gives_its_slot():
    store, cache = empty()
    for letter in range(3):
        store, cache, _ = kept(store, cache, letter)
    cache, slot = admit(cache)
    store, cache, stored = store.start(cache, slot, blocks(0, 9))  # uses the oldest, so that another is
    assert stored == BLOCK
    store, cache, ok = kept(store, cache, 3)
    assert ok
    assert {letter for letter in range(4) if store.find(blocks(letter, 9))} == {0, 2, 3}
    cache, slot = admit(cache)
    store, cache, _ = store.start(cache, slot, blocks(2, 9))
    store, cache, ok = kept(store, cache, 4)  # only this one is not in use
    assert ok
    assert {letter for letter in range(5) if store.find(blocks(letter, 9))} == {0, 2, 4}
    assert store.verify(cache) == []
    used = [
        prefix.tokens.tolist()
        for prefix, used in zip(store.prefixes, store.describe(cache).is_used, strict=True)
        if used
    ]
    assert used == [blocks(0).tolist(), blocks(2).tolist()]


def test_blocks_come_free_of_those_that_give_way_and_of_no_more():
    store, cache = empty()
    for letters in ((0, 1), (0, 1, 2, 3, 4), (5, 6, 7)):
        store, cache, _ = kept(store, cache, *letters)
    assert int(cache.tables.num_free[0]) == 4
    assert len(store.prefixes) == 3
    report = store.describe(cache)
    assert (report.blocks, report.own_blocks) == (8, 8)
    assert "3 of 3" in str(report)
    assert report.state_bytes == 3 * PLAN.bytes_per_request
    store, cache, ok = store.make_room(cache, 6)  # the oldest frees nothing, because the second reads all of it
    assert ok
    assert int(cache.tables.num_free[0]) == 7
    assert [prefix.length // BLOCK for prefix in store.prefixes] == [2, 3]
    cache, slot = admit(cache)
    store, cache, _ = store.start(cache, slot, blocks(5, 6, 7, 8))  # in use from now on
    before = jax.tree.map(np.asarray, cache)
    same, cache, ok = store.make_room(cache, 10)
    assert not ok
    assert same is store
    assert_same(jax.tree.map(np.asarray, cache), before)
    store, cache, ok = store.make_room(cache, 9)
    assert ok
    assert int(cache.tables.num_free[0]) == 9
    assert len(store.prefixes) == 1
    assert store.verify(cache) == []


@pytest.mark.slow
def test_a_prefix_in_use_never_gives_way_and_full_slots_are_refused_in_data():
    store, cache = empty(capacity=2)
    store, cache, _ = kept(store, cache, 0)
    store, cache, _ = kept(store, cache, 1)
    for letter in (0, 1):
        cache, slot = admit(cache)
        store, cache, _ = store.start(cache, slot, blocks(letter, 9))
    cache, slot = admit(cache)
    cache = feed(cache, slot, blocks(2))
    before = jax.tree.map(np.asarray, cache)
    same, after, ok = store.keep(cache, slot, blocks(2))
    assert not ok
    assert same is store
    assert_same(jax.tree.map(np.asarray, after), before)


# ---- what is refused by name -----------------------------------------------------------------------------------------


def test_bad_use_is_refused_by_name_with_the_cache_unchanged():
    store, cache = empty()
    store, cache, _ = kept(store, cache, 0, 1)
    (prefix,) = store.prefixes
    cache, slot = admit(cache)
    store, cache, _ = store.start(cache, slot, blocks(0, 1, 2))
    cache, fresh = admit(cache)
    assert (prefix.slot, slot, fresh) == (1, 0, 2)
    elsewhere = PrefixStore(small_plan(max_requests=SLOTS, num_blocks=13, **TRAINED), CAPACITY)
    wrong = np.concatenate([blocks(0), blocks(3)])
    released = d4.release(cache, ids(prefix.slot))
    before = jax.tree.map(np.asarray, (cache, released))
    for said, refused in {
        "keep: slot 5 holds no request": lambda: store.keep(cache, 5, blocks(0)),
        "keep: slot 2 holds 0 tokens, got 16": lambda: store.keep(cache, fresh, blocks(0)),
        "keep: slot 0 holds 32 tokens, got 16": lambda: store.keep(cache, slot, blocks(0)),
        "keep: a prefix is whole blocks of 16 tokens, got 17 tokens": lambda: store.keep(cache, slot, [1] * 17),
        "keep: slot 0 goes on from the prefix in slot 1, whose 32 tokens": lambda: store.keep(cache, slot, wrong),
        "keep: slot 1 is a prefix's": lambda: store.keep(cache, prefix.slot, blocks(0, 1)),
        "keep: slot 6 is out of range": lambda: store.keep(cache, 6, blocks(0)),
        "keep: tokens must be integers [n], got float": lambda: store.keep(cache, slot, np.zeros(16)),
        "adopt: slot 5 holds no request": lambda: store.adopt(cache, 5, blocks(0)),
        "noting: no place for a prefix of 32 tokens": lambda: store.adopt(cache, slot, blocks(0, 1)),  # there already
        "start: slot 0 must be from admit": lambda: store.start(cache, slot, blocks(0, 1, 2)),
        "start: slot 5 must be from admit": lambda: store.start(cache, 5, blocks(0, 1, 2)),
        "start: slot 1 no longer holds the prefix of 32 tokens": lambda: store.start(released, fresh, blocks(0, 1, 2)),
        "start: the store is of CachePlan": lambda: elsewhere.start(cache, fresh, blocks(0)),
        "start: expected a KVCache": lambda: store.start(cache.tables, fresh, blocks(0)),
        "capacity must be in [1, 5], got 6": lambda: PrefixStore(PLAN, 6),
        "capacity must be in [1, 5], got 0": lambda: PrefixStore(PLAN, 0),
        "every must be at least 1 block, got 0": lambda: PrefixStore(PLAN, 1, every=0),
        "start reads values on the host": lambda: jax.jit(lambda cache: store.start(cache, 0, [1])[1])(cache),
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            refused()
        assert_same(jax.tree.map(np.asarray, (cache, released)), before)
    assert "it holds no request" in " ".join(store.verify(released))


def test_tokens_that_are_no_ids_are_refused_by_name():
    """As int32, the first of them would be those of a prefix."""
    store = PrefixStore(PLAN, CAPACITY).noting(0, blocks(0))
    assert store.find(blocks(0, 1)) is not None
    wrong: Any = (
        (blocks(0, 1) + (1 << 32), r"tokens must be in \[0, 2147483648\), got 42949\d+"),
        ([*blocks(0), -1], r"tokens must be in \[0, 2147483648\), got -1"),
        ([*blocks(0), 1 << 31], r"tokens must be in \[0, 2147483648\), got 2147483648"),
        ([[1], [1, 2]], r"tokens must be integers \[n\], got \[\[1\], \[1, 2\]\]"),
    )
    for tokens, said in wrong:
        with pytest.raises(ValueError, match=f"^find: {said}$"):
            store.find(tokens)
        with pytest.raises(ValueError, match=rf"^cuts: prompts\[1\]: {said}$"):
            store.cuts([blocks(0), tokens])


@pytest.mark.slow
def test_what_gave_way_is_refused_by_name():
    store, cache = empty(capacity=1)
    store, cache, _ = kept(store, cache, 0)
    (prefix,) = store.prefixes
    store, cache, _ = kept(store, cache, 1)
    before = jax.tree.map(np.asarray, cache)
    with pytest.raises(ValueError, match=r"without: Prefix\(slot=\d\) of 16 tokens is not in the store: it gave way"):
        store.drop(cache, prefix)
    assert_same(jax.tree.map(np.asarray, cache), before)
    store, cache = store.drop(cache, *store.prefixes)
    assert not store.prefixes
    assert int(cache.tables.num_free[0]) == PLAN.num_blocks


def test_what_is_saved_comes_back(tmp_path):
    store, cache = empty(every=2)
    for letter in (0, 1):
        store, cache, _ = kept(store, cache, letter)
    store.save(tmp_path / "store")
    found = PrefixStore.restore(tmp_path / "store", PLAN)
    assert [(p.slot, p.tokens.tolist()) for p in found.prefixes] == [
        (p.slot, p.tokens.tolist()) for p in store.prefixes
    ]
    assert (found.capacity, found.every) == (CAPACITY, 2)
    assert found.verify(cache) == []
    with pytest.raises(FileExistsError):
        store.save(tmp_path / "store")
    whole = (tmp_path / "store").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(whole[80:84], b"abcd"), b""):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match="is no file of a PrefixStore, or a damaged one"):
            PrefixStore.restore(tmp_path / "damaged", PLAN)
    with pytest.raises(ValueError, match="is no file of a PrefixStore"):
        PrefixStore.restore(tmp_path, PLAN)  # a folder, as a cache is saved


def test_a_file_that_no_store_wrote_or_of_another_plan_is_refused_by_its_path(tmp_path):
    arrays: Any = dict(sizes=np.zeros((0, 2), np.int64), tokens=np.zeros(0, np.int32), policy=np.array([3, 0, 1]))
    (tmp_path / "a.txt").write_text("no archive")
    np.save(tmp_path / "a.npy", arrays["sizes"])
    np.savez(tmp_path / "sizes.npz", **arrays | {"sizes": np.arange(3)})
    np.savez(tmp_path / "policy.npz", **arrays | {"policy": np.arange(1)})
    for name in ("a.txt", "a.npy", "sizes.npz", "policy.npz"):
        with pytest.raises(ValueError, match=f"^{tmp_path / name} is no file of a PrefixStore, or a damaged one$"):
            PrefixStore.restore(tmp_path / name, PLAN)
    path = tmp_path / "store"
    PrefixStore(PLAN, CAPACITY).noting(5, blocks(0)).save(path)
    for slots, said in ((CAPACITY, "capacity must be in"), (5, "noting: slot 5 is out of range, the plan has 5")):
        with pytest.raises(ValueError, match=f"^restore: {path} does not fit the plan: {said}"):
            PrefixStore.restore(path, dataclasses.replace(PLAN, max_requests=slots))
