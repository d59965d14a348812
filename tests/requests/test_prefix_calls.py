"""Calls of a store of prefixes in any order give what a cache without a store gives."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="its inputs are drawn by hypothesis, of the extra 'dev'")
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4jax as d4
from tests.support.driver import TRAINED, assert_same, ids, small_plan
from tests.support.prefix_cases import BLOCK, CAPACITY, PLAN, SLOTS, admit, blocks, chunk, draft, empty, held

SCARCE = small_plan(max_requests=SLOTS, num_blocks=8, **TRAINED)  # fewer blocks than the requests ask for

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


@settings(max_examples=1)
@given(st.lists(ACTIONS, min_size=20, max_size=40))
def test_any_order_of_calls_gives_what_a_cache_without_a_store_gives(actions):
    serve(actions, Server())


@pytest.mark.sweep(guard="test_any_order_of_calls_gives_what_a_cache_without_a_store_gives")
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
