"""A store of a cache over a mesh does on each shard what a store of its own does with a plain cache, byte for byte."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.shards import automatic
from dsv4jax.requests import PrefixStore, prefix_slots
from dsv4jax.requests.dividing import over_mesh
from tests.support.cases import first_of
from tests.support.driver import assert_same, ids
from tests.support.prefix_cases import BLOCK, CAPACITY, PLAN, SLOTS, admit, blocks, chunk, empty

ODDS = np.array([6, 6, 2, 4, 1, 2]) / 21


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


class Twins:
    """A cache over a mesh with its store, and for each shard a plain cache with a store of its own."""

    def __init__(self, shape):
        self.count = shape[0]
        devices = jax.devices("cpu")[: shape[0] * shape[1]]
        self.mesh = automatic(jax.make_mesh(shape, ("data", "model"), devices=devices))
        sizes = dict(max_requests=SLOTS * self.count, num_blocks=PLAN.num_blocks * self.count)
        self.plan = dataclasses.replace(PLAN, **sizes)
        self.store = PrefixStore(self.plan, CAPACITY, shards=self.count)
        self.alone = [empty(plan=PLAN) for _ in range(self.count)]
        self.prompts: dict[tuple[int, int], np.ndarray] = {}  # of each request that runs, by shard and slot
        self.stored: dict[tuple[int, int], int] = {}
        self.counts = collections.Counter()
        self.join()

    def join(self):
        """Make the cache over the mesh one of the shards' bytes."""

        def joined(path, *parts):
            return np.concatenate(parts, axis=0 if path[0].name == "tables" else 1)

        whole = jax.tree_util.tree_map_with_path(joined, *(as_numpy(cache) for _, cache in self.alone))
        whole = dataclasses.replace(whole, plan=self.plan)
        whole = jax.device_put(whole, d4.sharding.shardings(self.plan, self.mesh))
        self.cache = dataclasses.replace(whole, mesh=self.mesh)

    def both(self, call, shard, of_mesh, of_shard):
        """Make a call of both stores, with arguments for each. Return what both say."""
        store, cache = self.alone[shard]
        self.store, self.cache, found = getattr(self.store, call)(self.cache, *of_mesh)
        store, cache, wanted = getattr(store, call)(cache, *of_shard)
        self.alone[shard] = store, cache
        assert found == wanted
        return found

    def admitted(self, shard, prompt):
        store, cache = self.alone[shard]
        if np.all(cache.tables.admitted):
            return
        self.alone[shard] = store, admit(cache)[0]
        where = np.arange(self.count) == shard
        self.cache, slots, _ = d4.admit(self.cache, self.count, jnp.asarray(where))
        slot = int(slots[shard])
        of_shard, of_any = (
            found and found.length for found in (self.store.find(prompt, shard), self.store.find(prompt))
        )
        assert of_any == max((found.length for one, _ in self.alone if (found := one.find(prompt))), default=None)
        stored = self.both("start", shard, (shard * SLOTS + slot, prompt), (slot, prompt))
        assert stored == (of_shard or 0)
        self.prompts[shard, slot], self.stored[shard, slot] = prompt, stored
        self.counts["hit" if stored else "miss"] += 1

    def fed(self, shard, slot):
        """Feed whole blocks of the prompt, as far as there are blocks left for them, and keep what each ends."""
        prompt = self.prompts[shard, slot]
        for end in range(self.stored[shard, slot] + BLOCK, prompt.size + 1, BLOCK):
            store, cache = self.alone[shard]
            if not int(cache.tables.num_free[0]):
                return
            _, cache, ok = chunk(cache, slot, prompt[end - BLOCK : end])
            assert ok
            self.alone[shard], self.stored[shard, slot] = (store, cache), end
            self.join()
            ok = self.both("keep", shard, (shard * SLOTS + slot, prompt[:end]), (slot, prompt[:end]))
            gone = set(store.prefixes) - set(self.alone[shard][0].prefixes)
            self.counts["gave way" if gone else "kept" if ok else "not kept"] += 1

    def made_room(self, shard, number):
        before = int(self.alone[shard][1].tables.num_free[0])
        ok = self.both("make_room", shard, (number, shard), (number,))
        self.counts["room" if before >= number else "made room" if ok else "no room"] += 1

    def adopted(self, shard, slot):
        store, cache = self.alone[shard]
        tokens = self.prompts[shard, slot][: self.stored[shard, slot]]
        if not tokens.size or len(store.prefixes) == CAPACITY or store.find([*tokens, 0]):
            return
        self.alone[shard] = store.adopt(cache, slot, tokens), cache
        self.store = self.store.adopt(self.cache, shard * SLOTS + slot, tokens)
        del self.prompts[shard, slot]
        self.counts["adopted"] += 1

    def released(self, shard, slot):
        store, cache = self.alone[shard]
        self.alone[shard] = store, d4.release(cache, ids(slot))
        slots = np.where(np.arange(self.count) == shard, slot, -1)
        self.cache = d4.release(self.cache, jnp.asarray(slots, jnp.int32))
        del self.prompts[shard, slot]

    def dropped(self, shard):
        store, cache = self.alone[shard]
        if not store.prefixes:
            return
        (first,) = [one for one in self.store.prefixes if one.slot == shard * SLOTS + store.prefixes[0].slot]
        self.alone[shard] = store.drop(cache, store.prefixes[0])
        self.store, self.cache = self.store.drop(self.cache, first)
        self.counts["dropped"] += 1

    def turn(self, rng):
        what = rng.choice(["admit", "feed and keep", "adopt", "release", "drop", "make room"], p=ODDS)
        shard = int(rng.integers(self.count))
        running = [slot for one, slot in self.prompts if one == shard]
        if what == "make room":
            self.made_room(shard, int(rng.integers(PLAN.num_blocks)))
        elif what == "admit" or not running:
            prompt = np.concatenate([blocks(*rng.integers(0, 2, rng.integers(1, 5))), np.arange(rng.integers(1, 5))])
            self.admitted(shard, prompt)
        elif what == "drop":
            self.dropped(shard)
        else:
            slot = int(rng.choice(running))
            {"feed and keep": self.fed, "adopt": self.adopted, "release": self.released}[what](shard, slot)
        self.check()

    def check(self):
        """Check that each shard is what it is alone, so that nothing else has touched it."""
        reports, whole = [], self.store.describe(self.cache)
        for shard, (store, cache) in enumerate(self.alone):
            assert_same(as_numpy(d4.sharding.shard_of(self.cache, shard)), as_numpy(cache))
            found = [one for one in self.store.prefixes if one.slot // SLOTS == shard]
            assert [(one.slot % SLOTS, one.tokens.tolist()) for one in found] == [
                (one.slot, one.tokens.tolist()) for one in store.prefixes
            ]
            reports.append(store.describe(cache))
            used = [used for one, used in zip(whole.prefixes, whole.is_used, strict=True) if one in found]
            assert used == list(reports[-1].is_used)
        assert (whole.blocks, whole.own_blocks, whole.capacity, whole.state_bytes) == tuple(
            sum(getattr(report, name) for report in reports)
            for name in ("blocks", "own_blocks", "capacity", "state_bytes")
        )


def shapes(*cases):
    return first_of([pytest.param(shape, id=f"{shape[0]}x{shape[1]}") for shape in cases], count=0)


@pytest.mark.parametrize("shape", shapes((2, 2), (1, 2), (4, 1), (2, 1)))
def test_each_shard_is_what_it_is_alone(shape, tmp_path):
    rng, twins = np.random.default_rng(3), Twins(shape)
    turn = 0
    while turn < 100 or len(twins.counts) < 10:  # until all that can happen has
        twins.turn(rng)
        turn += 1
    assert twins.store.verify(twins.cache) == []
    twins.store.save(tmp_path / "store")
    again = PrefixStore.restore(tmp_path / "store", twins.plan)
    assert [(one.slot, one.tokens.tolist()) for one in again.prefixes] == [
        (one.slot, one.tokens.tolist()) for one in twins.store.prefixes
    ]
    assert (again.shards, again.capacity, again.verify(twins.cache)) == (twins.count, CAPACITY, [])
    # Of all shards at once, as much as the fullest can free.
    for shard, slot in list(twins.prompts):
        twins.released(shard, slot)
    assert not twins.store.make_room(twins.cache, PLAN.num_blocks + 1)[2]
    store, cache, ok = twins.store.make_room(twins.cache, PLAN.num_blocks)
    assert ok
    assert cache.tables.num_free.tolist() == [PLAN.num_blocks] * twins.count
    assert store.verify(cache) == []


@pytest.mark.parametrize(("before", "after"), first_of([(4, 2), (2, 1), (4, 1), (3, 1)]))
def test_a_store_goes_with_its_cache_to_fewer_shards(before, after, tmp_path):
    rng, twins, each = np.random.default_rng(before), Twins((before, 1)), SLOTS * before // after

    def by_shard():
        return {(one.slot // each, one.tokens.tobytes()): one.slot for one in twins.store.prefixes}

    turn = 0
    while turn < 60 or len(by_shard()) == len(twins.store.prefixes):  # until a shard will get a prefix twice
        twins.turn(rng)
        turn += 1
    for shard, slot in list(twins.prompts):
        twins.released(shard, slot)
    twins.store.save(tmp_path / "store")
    old, cache = twins.store.prefixes, over_mesh(as_numpy(twins.cache), mesh_of(after))
    admitted = np.asarray(cache.tables.admitted)
    store, cache = PrefixStore.restore_beside(tmp_path / "store", cache)
    assert (store.shards, store.capacity, store.plan) == (after, CAPACITY * before // after, twins.plan)
    assert store.verify(cache) == []
    # Of equal ones on a shard that which was used last is left.
    left = set(by_shard().values())
    assert [one.slot for one in store.prefixes] == [one.slot for one in old if one.slot in left]
    gone = {one.slot for one in old} - left
    assert set(np.flatnonzero(admitted & ~np.asarray(cache.tables.admitted))) == gone
    # A request goes on from each prefix.
    for prefix in store.prefixes:
        shard = prefix.slot // each
        cache, slots, ok = d4.admit(cache, after, jnp.arange(after) == shard)
        assert ok[shard]
        store, cache, held = store.start(cache, shard * each + int(slots[shard]), [*prefix.tokens, 0])
        assert held == prefix.length
    assert store.verify(cache) == []


def test_a_store_goes_with_its_cache_to_more_shards(tmp_path):
    store, cache = empty()
    for letter in range(4):  # in slots 1, 2, 3 and 4
        tokens = blocks(letter)
        cache, slot = admit(cache)
        _, cache, ok = chunk(cache, slot, tokens)
        assert ok
        if letter:
            store = store.adopt(cache, slot, tokens)
    store.save(tmp_path / "store")
    store, cache = PrefixStore.restore_beside(tmp_path / "store", over_mesh(as_numpy(cache), mesh_of(2)))
    assert (store.shards, store.capacity) == (2, 2)  # two of three slots are a prefix's on the first shard
    assert [(one.slot, one.tokens.tolist()) for one in store.prefixes] == [(n, blocks(n).tolist()) for n in (1, 2, 3)]
    assert store.verify(cache) == []
    assert store.find([*blocks(3), 0], 0) is None
    found = store.find([*blocks(3), 0], 1)
    assert found is not None
    assert found.slot == 3


def test_a_store_is_refused_beside_a_cache_without_its_prefixes(tmp_path):
    store, cache = empty()
    cache, slot = admit(cache)
    _, cache, _ = chunk(cache, slot, blocks(0))
    store.adopt(cache, slot, blocks(0)).save(tmp_path / "store")
    _, other, _ = chunk(jax.tree.map(jnp.copy, cache), slot, blocks(1))
    for wrong in (d4.release(jax.tree.map(jnp.copy, cache), ids(slot)), other):
        with pytest.raises(ValueError, match=f"slot {slot} of this cache does not hold the 16 tokens of"):
            PrefixStore.restore_beside(tmp_path / "store", wrong)
        assert not wrong.tables.admitted.is_deleted()
    # All six slots of one shard would be prefixes'.
    crowded = PrefixStore(PLAN, 5)
    for letter in range(1, 4):
        cache, slot = admit(cache)
        _, cache, _ = chunk(cache, slot, blocks(letter))
        crowded = crowded.adopt(cache, slot, blocks(letter))
    cache = d4.release(cache, ids(0))
    cache, slot = admit(cache)
    _, cache, _ = chunk(cache, slot, blocks(4))
    crowded.adopt(cache, slot, blocks(4)).save(tmp_path / "crowded")
    divided = over_mesh(as_numpy(cache), mesh_of(2))
    with pytest.raises(ValueError, match=r"capacity must be in \[1, 2\], got 3: .* slots of its shard"):
        PrefixStore.restore_beside(tmp_path / "crowded", divided)
    assert not divided.tables.admitted.is_deleted()


def mesh_of(shards):
    return jax.make_mesh((shards, 1), ("data", "model"), devices=jax.devices("cpu")[:shards])


def test_a_file_without_a_number_of_shards_is_of_one(tmp_path):
    tokens = blocks(0, 1).astype(np.int32)
    np.savez(tmp_path / "store.npz", sizes=np.array([[3, tokens.size]]), tokens=tokens, policy=np.array([2, 0]))
    found = PrefixStore.restore(tmp_path / "store.npz", PLAN)
    assert (found.shards, found.capacity, found.every) == (1, 2, None)
    assert [(one.slot, one.tokens.tolist()) for one in found.prefixes] == [(3, tokens.tolist())]


def test_bad_use_is_refused_by_name_with_the_cache_unchanged():
    twins = Twins((2, 2))
    twins.admitted(1, blocks(0))
    twins.fed(1, 0)
    twins.admitted(0, blocks(0, 1))  # nothing of this is on its shard
    assert twins.counts == {"miss": 2, "kept": 1}
    store, cache, plan = twins.store, twins.cache, twins.plan
    unknown = dataclasses.replace(cache, mesh=None)
    (prefix,) = store.prefixes
    assert prefix.slot == SLOTS + 1
    released = d4.release(cache, ids(-1, 1))
    before = as_numpy((cache, released))
    for said, refused in {
        "start: slot 6 must be from admit": lambda: store.start(cache, SLOTS, blocks(0, 1)),
        "start: slot 12 is out of range, the cache has 12": lambda: store.start(cache, 2 * SLOTS, blocks(0, 1)),
        "start: slot 7 no longer holds the prefix of 16 tokens": lambda: store.start(released, 0, blocks(0, 1)),
        "keep: slot 0 holds 0 tokens, got 16": lambda: store.keep(cache, 0, blocks(0)),
        "keep: slot 7 is a prefix's": lambda: store.keep(cache, SLOTS + 1, blocks(0)),
        "keep: slot 6 goes on from the prefix in slot 7": lambda: store.keep(cache, SLOTS, blocks(1)),
        "adopt: slot 5 holds no request": lambda: store.adopt(cache, 5, blocks(0)),
        "noting: no place for a prefix of 16 tokens": lambda: store.adopt(cache, SLOTS, blocks(0)),
        "make_room: shard must be in [0, 2), got 2": lambda: store.make_room(cache, 1, 2),
        "find: shard must be in [0, 2), got 2": lambda: store.find(blocks(0, 1), 2),
        "with shards=1, the cache of": lambda: PrefixStore(plan, CAPACITY).make_room(cache, 1),
        "make_room: this cache of 2 shards does not know its mesh": lambda: store.make_room(unknown, 1),
        "capacity must be in [1, 5], got 6: each prefix takes one of 6 slots of its shard": lambda: PrefixStore(
            plan, 6, shards=2
        ),
        "(12, 24), must be divisible by shards=5": lambda: PrefixStore(plan, 1, shards=5),
        "shards must be an integer of at least 1, got 0": lambda: PrefixStore(plan, 1, shards=0),
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            refused()
        assert_same(as_numpy((cache, released)), before)
    # The other shard has a place for the same prefix.
    assert len(store.noting(0, blocks(0)).prefixes) == 2


@pytest.mark.slow
def test_no_part_of_a_cache_is_sent_between_devices():
    twins, slot = Twins((2, 2)), np.int32(0)
    sent = []
    for program, args in {
        prefix_slots.exchange: (slot, slot),
        prefix_slots.go_on: (slot, slot),
        prefix_slots.released: (np.zeros(6, np.int32),),
    }.items():
        text = program.lower(twins.cache, *args).compile().as_text() or ""
        sent += re.findall(r"= (.*?) (?:all-|collective-|ragged-|reduce-scatter)[\w-]*\(", text)
    assert set(re.findall(r"\w+\[[\d,]*\]", " ".join(sent))) <= {"s32[]"}  # a slot
