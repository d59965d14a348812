"""Requests that go on from a store's prefixes hold the bits, and give the outputs, of those that are computed whole."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="its inputs are drawn by hypothesis, of the extra 'dev'")
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4jax as d4
from dsv4jax.requests import PrefixStore, prefixes
from tests.support.driver import CFG, LAYERS, TRAINED, assert_same, ids, random_params, small_plan, step

BLOCK = CFG.block_tokens  # 16
SLOTS, CAPACITY = 6, 3
PLAN = small_plan(max_requests=SLOTS, num_blocks=12, **TRAINED)
SCARCE = small_plan(max_requests=SLOTS, num_blocks=8, **TRAINED)  # fewer blocks than the requests ask for
WORDS = np.random.default_rng(0).standard_normal((8, CFG.hidden_size), np.float32)


def length(store: PrefixStore, tokens: np.ndarray) -> int:
    """Tokens of the prefix that the store finds."""
    found = store.find(tokens)
    assert found is not None
    return found.length


def empty(capacity=CAPACITY, plan=PLAN, **options):
    return PrefixStore(plan, capacity, **options), d4.init_cache(plan)


def admit(cache):
    cache, slots, ok = d4.admit(cache, 1)
    assert ok
    return cache, int(slots[0])


def chunk(cache, slot, tokens):
    """Feed up to a block of tokens to a slot: (outputs, cache, ok)."""
    x = np.zeros((1, BLOCK, CFG.hidden_size), np.float32)
    x[0, : len(tokens)] = WORDS[list(tokens)]
    return step(random_params(), jnp.asarray(x), cache, ids(slot), ids(len(tokens)), layers=LAYERS)


def feed(cache, slot, tokens):
    """Feed tokens in chunks that end where blocks do, as far as the slot is at such an end."""
    for first in range(0, len(tokens), BLOCK):
        _, cache, ok = chunk(cache, slot, tokens[first : first + BLOCK])
        assert ok
    return cache


@jax.jit
def speculate(cache, slots, x, accepted):
    cache, ok = d4.prepare_forward(cache, slots, jnp.where(slots >= 0, x.shape[1], 0))
    ys, staged = [], []
    for layer in LAYERS:
        y, cache, rows = d4.stage(random_params()[layer], x, cache, layer, slots, jnp.full(1, x.shape[1], jnp.int32))
        ys.append(y)
        staged.append(rows)
    cache, committed = d4.commit(cache, staged, jnp.where(ok, accepted, 0))
    return ys, cache, ok & committed


def draft(cache, slot, tokens, accepted):
    """Draft three tokens, of which the first are accepted: (outputs, cache, ok)."""
    return speculate(cache, ids(slot), jnp.asarray(WORDS[list(tokens)][None]), ids(accepted))


def held(cache, slot):
    snapshot = d4.extract(cache, [slot])
    return snapshot.seq_lens, [snapshot.stack(kind) for kind in snapshot.kinds]


def blocks(*letters):
    """Tokens of whole blocks, each named by a number."""
    return np.concatenate([(np.arange(BLOCK) * (letter + 2) + letter) % len(WORDS) for letter in letters]).astype(int)


# ---- what a hit holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [1, 5, BLOCK, BLOCK + 3])
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
    monkeypatch.setattr(prefixes, "_hashes", lambda tokens, block: (7,) * (len(tokens) // block))
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
        "every must be at least 1 block, got 0": lambda: PrefixStore(PLAN, 1, every=0),
        "start reads values on the host": lambda: jax.jit(lambda cache: store.start(cache, 0, [1])[1])(cache),
    }.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            refused()
        assert_same(jax.tree.map(np.asarray, (cache, released)), before)
    assert "it holds no request" in " ".join(store.verify(released))


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


# ---- everything in any order -----------------------------------------------------------------------------------------

# A request's past: its admission, then chunks of tokens, and drafts with how many of their tokens were accepted.
Past = tuple[tuple, ...]


@functools.cache
def alone(past: Past):
    """Return the outputs of the last thing in a request's past, and its cache, in a cache without a store."""
    if not past:
        cache, slot = admit(d4.init_cache(PLAN))
        assert slot == 0
        return None, cache
    _, cache = alone(past[:-1])
    ys, cache, ok = apply(cache, 0, past[-1])
    assert ok
    return ys, cache


def apply(cache, slot, done):
    what, tokens, *accepted = done
    return chunk(cache, slot, tokens) if what == "chunk" else draft(cache, slot, tokens, *accepted)


class Server:
    """Requests in a cache with a store, and what each would hold without."""

    def __init__(self):
        self.store, self.cache = empty(plan=SCARCE)
        self.past: dict[int, Past] = {}  # of each slot, a prefix's too
        self.text: dict[int, list[int]] = {}  # stored tokens of each slot
        self.prompt: dict[int, list[int]] = {}  # of each request that runs
        self.away = []  # prefixes in host memory
        self.counts = collections.Counter()

    def admitted(self, prompt):
        kept = {prefix.slot for prefix in self.store.prefixes}
        if len(self.prompt) + len(kept) == SLOTS:
            return
        self.cache, slot = admit(self.cache)
        found = self.store.find(prompt)
        self.store, self.cache, stored = self.store.start(self.cache, slot, prompt)
        assert stored == (found.length if found else 0)
        assert list(prompt[:stored]) == (self.text[found.slot] if found else [])
        self.past[slot] = self.past[found.slot] if found else ()
        self.text[slot], self.prompt[slot] = list(prompt[:stored]), list(prompt)
        self.counts["hits" if found else "misses"] += 1

    def fed(self, slot):
        """Feed up to the next end of a block, and keep what ends there."""
        length = len(self.text[slot])
        tokens = self.prompt[slot][length : length - length % BLOCK + BLOCK]
        if tokens:
            self.applied(slot, ("chunk", tuple(tokens)), tokens)

    def drafted(self, slot, accepted):
        tokens = tuple((self.text[slot] or [0])[-1:] * 3)
        if len(self.text[slot]) + 3 <= PLAN.max_context and len(self.text[slot]) >= len(self.prompt[slot]):
            self.applied(slot, ("draft", tokens, accepted), tokens[:accepted])
            if slot in self.prompt:
                self.prompt[slot] = self.text[slot][:]

    def applied(self, slot, done, stored):
        before, free = self.cache, int(self.cache.tables.num_free[0])
        ys, self.cache, ok = apply(self.cache, slot, done)
        if not ok:  # blocks are lacking: prefixes give way, if that helps
            known = self.store.prefixes
            self.store, self.cache, ok = self.store.make_room(before, 1)
            self.counts["made room" if ok else "no room"] += 1
            self.forget_those_that_gave_way(known)
            assert free == 0
            if not ok:
                assert all(self.store.describe(self.cache).is_used)
                self.released(slot)
                return
            ys, self.cache, ok = apply(self.cache, slot, done)
            assert ok
        self.past[slot] += (done,)
        self.text[slot] += list(map(int, stored))
        self.counts[done[0]] += 1
        assert_same(ys, alone(self.past[slot])[0])

    def kept(self, slot):
        if not self.text[slot] or len(self.text[slot]) % BLOCK:
            return
        known = self.store.prefixes
        self.store, self.cache, ok = self.store.keep(self.cache, slot, self.text[slot])
        self.counts["kept" if ok else "not kept"] += 1
        self.forget_those_that_gave_way(known)
        for new in set(self.store.prefixes) - set(known):
            self.past[new.slot], self.text[new.slot] = self.past[slot], self.text[slot][:]

    def forget_those_that_gave_way(self, known):
        for gone in set(known) - set(self.store.prefixes):
            del self.past[gone.slot], self.text[gone.slot]
            self.counts["gave way"] += 1

    def released(self, slot):
        self.cache = d4.release(self.cache, ids(slot))
        del self.past[slot], self.text[slot], self.prompt[slot]

    def forked(self, slot):
        if len(self.prompt) + len(self.store.prefixes) == SLOTS or not int(self.cache.tables.num_free[0]):
            return
        self.cache, new = admit(self.cache)
        self.cache, ok = d4.fork(self.cache, jnp.int32(slot), ids(new))
        assert ok
        self.past[new], self.text[new], self.prompt[new] = self.past[slot], self.text[slot][:], self.prompt[slot][:]
        self.counts["forked"] += 1

    def moved_out(self, prefix):
        snapshot = jax.device_get(d4.extract(self.cache, [prefix.slot]))
        self.store, self.cache = self.store.drop(self.cache, prefix)
        self.away.append((prefix.tokens, snapshot, self.past.pop(prefix.slot), self.text.pop(prefix.slot)))
        self.counts["moved out"] += 1

    def moved_in(self):
        tokens, snapshot, past, text = self.away.pop()
        cache, slots, ok = d4.insert(self.cache, snapshot)
        if not ok or len(self.store.prefixes) == CAPACITY or self.store.find([*tokens, 0]) is not None:
            return
        slot = int(slots[0])
        self.store, self.cache = self.store.adopt(cache, slot, tokens), cache
        self.past[slot], self.text[slot] = past, text
        self.counts["moved in"] += 1

    def check(self):
        there = {prefix.slot for prefix in self.store.prefixes} | set(self.prompt)
        assert {prefix.slot: list(prefix.tokens) for prefix in self.store.prefixes} == {
            slot: text for slot, text in self.text.items() if slot not in self.prompt
        }
        admitted = np.flatnonzero(np.asarray(self.cache.tables.admitted))
        assert set(admitted.tolist()) == there
        tables = jax.tree.map(np.asarray, self.cache.tables)
        assert tables.num_free[0] + np.sum(tables.block_refs > 0) == SCARCE.num_blocks

    def check_bits(self):
        assert self.store.verify(self.cache) == []
        for slot, past in self.past.items():
            assert_same(held(self.cache, slot), held(alone(past)[1], 0))


# Prompts of few words, so that many begin alike; then what is done, and to which request.
PROMPTS = st.builds(
    lambda letters, more: np.concatenate([blocks(*letters), np.arange(more)]).tolist(),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.integers(1, 7),
)
ACTIONS = st.one_of(
    st.tuples(st.just("admit"), PROMPTS),
    st.tuples(st.just("feed"), st.integers(0, 5)),
    st.tuples(st.just("draft"), st.integers(0, 5), st.integers(1, 3)),
    st.tuples(st.sampled_from(("keep", "feed and keep", "keep", "release", "fork", "out", "in")), st.integers(0, 5)),
)


def one_turn(server, what, *args):
    running, kept = sorted(server.prompt), server.store.prefixes
    if what == "admit":
        server.admitted(*args)
    elif what == "in" and server.away:
        server.moved_in()
    elif what == "out" and kept:
        server.moved_out(kept[args[0] % len(kept)])
    elif running and what not in ("in", "out"):
        slot = running[args[0] % len(running)]
        if what == "draft":
            server.drafted(slot, args[1])
        elif what == "feed and keep":
            while slot in server.prompt and len(server.text[slot]) < len(server.prompt[slot]):
                server.fed(slot)
                if slot in server.prompt:
                    server.kept(slot)
        else:
            {"feed": server.fed, "keep": server.kept, "release": server.released, "fork": server.forked}[what](slot)
    server.check()


def serve(actions, server):
    for what, *args in actions:
        one_turn(server, what, *args)
    server.check_bits()
    # Whatever happened, all blocks are free once everything is released.
    store, cache = server.store.drop(server.cache, *server.store.prefixes)
    cache = d4.release(cache, jnp.arange(SLOTS, dtype=jnp.int32))
    assert not store.prefixes
    assert int(cache.tables.num_free[0]) == SCARCE.num_blocks


@settings(max_examples=3)
@given(st.lists(ACTIONS, min_size=20, max_size=40))
def test_any_order_of_calls_gives_what_a_cache_without_a_store_gives(actions):
    serve(actions, Server())


@pytest.mark.slow
def test_thousands_of_calls_do_all_that_there_is():
    rng, server = np.random.default_rng(1), Server()
    names = ["admit", "feed and keep", "feed", "draft", "keep", "release", "fork", "out", "in"]
    odds = np.array([6, 6, 4, 3, 2, 5, 1, 1, 1]) / 29
    for turn in range(3000):
        what, slot = str(rng.choice(names, p=odds)), int(rng.integers(6))
        prompt = np.concatenate([blocks(*rng.integers(0, 2, rng.integers(1, 4))), np.arange(rng.integers(1, 8))])
        args = {"admit": (prompt.tolist(),), "draft": (slot, int(rng.integers(1, 4)))}.get(what, (slot,))
        one_turn(server, what, *args)
        if turn % 100 == 0:
            server.check_bits()
    server.check_bits()
    done = "hits", "misses", "chunk", "draft", "forked", "kept", "not kept", "gave way", "made room", "no room"
    assert min(server.counts[name] for name in (*done, "moved out", "moved in")) >= 5, server.counts
