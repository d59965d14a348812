"""Slots and blocks, compared with a model of a few lines in plain Python."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="its inputs are drawn by hypothesis, of the extra 'dev'")
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4jax as d4
from dsv4jax.cache.grants import Refusal
from dsv4jax.cache.tables import admit_slots, advance_lengths, blocks_for, grow, init_tables, release_slots
from tests.support.driver import CFG, ids

import jax  # isort: skip

REQUESTS, CONTEXT, BLOCKS, BATCH = 4, 80, 9, 3
PLAN = d4.plan_cache(CFG, max_requests=REQUESTS, max_context=CONTEXT, num_blocks=BLOCKS)

CACHE = d4.init_cache(PLAN)

admit_jit = jax.jit(admit_slots, static_argnums=1)
grow_jit = jax.jit(grow, static_argnums=3)
advance_jit = jax.jit(advance_lengths)
release_jit = jax.jit(release_slots)


class Model:
    """The allocator in plain Python: lengths, grants, and how many blocks each request holds."""

    def __init__(self):
        self.seq_lens: dict[int, int] = {}
        self.prepared: dict[int, int] = {}
        self.held: dict[int, int] = {}

    @staticmethod
    def blocks(length):
        return -(-(length // 4) // 4)  # an entry every 4 tokens, 4 entries a block

    @property
    def num_free(self):
        return BLOCKS - sum(self.held.values())

    def admit(self, wanted):
        free = [slot for slot in range(REQUESTS) if slot not in self.seq_lens]
        if sum(wanted) > len(free):
            return [-1] * len(wanted), False
        slots = [free.pop(0) if want else -1 for want in wanted]
        for slot in slots:
            if slot >= 0:
                self.seq_lens[slot] = self.prepared[slot] = self.held[slot] = 0
        return slots, True

    def legal(self, slots, num_new):
        """Return for each asking row whether it is valid."""
        asking = [(slot, n) for slot, n in zip(slots, num_new, strict=True) if slot != -1 and n != 0]
        names = [slot for slot, _ in asking]
        return [(slot, n, n > 0 and slot in self.seq_lens and names.count(slot) == 1) for slot, n in asking]

    def prepare(self, slots, num_new):
        rows = self.legal(slots, num_new)
        if not all(legal and self.seq_lens[slot] + n <= CONTEXT for slot, n, legal in rows):
            return False
        want = {slot: max(self.held[slot], self.blocks(self.seq_lens[slot] + n)) for slot, n, _ in rows}
        if sum(want.values()) - sum(self.held[slot] for slot in want) > self.num_free:
            return False
        self.held |= want
        self.prepared |= {slot: self.seq_lens[slot] + n for slot, n, _ in rows}
        return True

    def refusals(self, slots, num_new):
        """Return why each row is refused, and its missing blocks, where rows take blocks in order."""
        names = [slot for slot, n in zip(slots, num_new, strict=True) if slot != -1 and n != 0]
        left, found = self.num_free, []
        for slot, n in zip(slots, num_new, strict=True):
            if slot == -1 or n == 0:
                found.append((Refusal.PADDING, 0))
            elif n < 0:
                found.append((Refusal.NEGATIVE, 0))
            elif slot not in self.seq_lens:
                found.append((Refusal.NOT_ADMITTED, 0))
            elif names.count(slot) > 1:
                found.append((Refusal.TWIN, 0))
            elif self.seq_lens[slot] + n > CONTEXT:
                found.append((Refusal.TOO_LONG, 0))
            else:
                missing = max(0, self.blocks(self.seq_lens[slot] + n) - self.held[slot])
                found.append((Refusal.NO_BLOCKS if missing > left else Refusal.NONE, missing))
                left -= missing * (missing <= left)
        return found

    def prepare_rows(self, slots, num_new):
        granted = [reason == Refusal.NONE for reason, _ in self.refusals(slots, num_new)]
        served = [n if grant else 0 for n, grant in zip(num_new, granted, strict=True)]
        assert self.prepare(slots, served)
        return granted

    def advance(self, slots, num_new):
        for slot, n, legal in self.legal(slots, num_new):
            if legal and self.seq_lens[slot] + n <= self.prepared[slot]:
                self.seq_lens[slot] += n

    def release(self, slots):
        for slot in set(slots) & set(self.seq_lens):
            del self.seq_lens[slot], self.prepared[slot], self.held[slot]


def check_against(tables, model):
    tables = jax.tree.map(np.asarray, tables)
    for slot in range(REQUESTS):
        assert tables.admitted[slot] == (slot in model.seq_lens)
        assert tables.seq_lens[slot] == model.seq_lens.get(slot, 0)
        assert tables.prepared[slot] == model.prepared.get(slot, 0)
        assert tables.block_lens[slot] == model.held.get(slot, 0)
        # Blocks held stand at the row's front, nothing behind them.
        assert (tables.block_table[slot] >= 0).tolist() == [j < tables.block_lens[slot] for j in range(PLAN.max_blocks)]
    owned = tables.block_table[tables.block_table >= 0].tolist()
    free = tables.free_blocks[: tables.num_free[0]].tolist()
    assert tables.num_free.tolist() == [model.num_free]
    assert sorted(owned + free) == list(range(BLOCKS)), "every block is owned once or free once"
    assert tables.block_refs.tolist() == [int(block in owned) for block in range(BLOCKS)]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


SLOTS = st.lists(st.integers(-2, REQUESTS), min_size=BATCH, max_size=BATCH)
COUNTS = st.lists(
    st.one_of(st.integers(0, 24), st.sampled_from([-1, 16, 17, CONTEXT, CONTEXT + 1, 2**31 - 1, -(2**31)])),
    min_size=BATCH,
    max_size=BATCH,
)
CALLS = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.booleans(), min_size=BATCH, max_size=BATCH), st.none()),
    st.tuples(st.just("prepare"), SLOTS, COUNTS),
    st.tuples(st.just("rows"), SLOTS, COUNTS),
    st.tuples(st.just("step"), SLOTS, COUNTS),
    st.tuples(st.just("row by row"), st.permutations(range(REQUESTS)).map(lambda order: order[:BATCH]), COUNTS),
    st.tuples(st.just("step"), st.permutations(range(REQUESTS)).map(lambda order: order[:BATCH]), COUNTS),
    st.tuples(st.just("advance"), SLOTS, COUNTS),
    st.tuples(st.just("release"), SLOTS, st.none()),
)


@settings(max_examples=60)
@given(calls=st.lists(CALLS, min_size=8, max_size=30))
def test_any_sequence_of_calls_does_what_the_model_does(calls):
    tables, model = init_tables(PLAN), Model()
    for call, rows, counts in calls:
        if call == "admit":
            tables_after, slots, ok = admit_jit(tables, BATCH, jnp.asarray(rows))
            want_slots, want = model.admit(rows)
            assert slots.tolist() == want_slots
        elif call == "release":
            tables_after, ok, want = release_jit(tables, ids(*rows)), True, True
            model.release(rows)
        elif call == "advance":
            tables_after, ok, want = advance_jit(tables, ids(*rows), ids(*counts)), True, True
            model.advance(rows, counts)
        elif call in ("rows", "row by row"):
            want_reasons = model.refusals(rows, counts)
            free, want = model.num_free, all(reason <= Refusal.PADDING for reason, _ in want_reasons)
            cache = dataclasses.replace(CACHE, tables=tables)
            grants = d4.cache.explain_forward(cache, ids(*rows), ids(*counts))
            assert list(zip(grants.refusal.tolist(), grants.missing_blocks.tolist(), strict=True)) == want_reasons
            assert int(grants.free_blocks) == free
            ok = grants.ok
            cache, granted = d4.cache.prepare_rows(cache, ids(*rows), ids(*counts))
            assert granted.tolist() == model.prepare_rows(rows, counts)
            assert grants.granted.tolist() == granted.tolist()
            tables_after = cache.tables
            counts = jnp.where(granted, ids(*counts), 0).tolist()
        else:
            tables_after, ok = grow_jit(tables, ids(*rows), ids(*counts), PLAN)
            want = model.prepare(rows, counts)
        assert bool(ok) == want
        if not want and call not in ("rows", "row by row"):
            assert equal(tables_after, tables)
        tables = tables_after
        if call in ("step", "row by row"):  # going on, granted or not
            tables = advance_jit(tables, ids(*rows), ids(*counts))
            model.advance(rows, counts)
        check_against(tables, model)


def prepared(tables, slots, num_new):
    tables, ok = grow_jit(tables, slots, num_new, PLAN)
    return advance_jit(tables, slots, num_new), bool(ok)


def full_house():
    tables, slots, ok = admit_jit(init_tables(PLAN), BATCH)
    assert ok
    return tables, slots


def test_the_last_block_is_given_and_one_more_refused():
    tables, slots = full_house()
    tables, ok = prepared(tables, slots, ids(48, 48, 32))  # 3 + 3 + 2 blocks of 9
    assert ok
    assert tables.num_free.tolist() == [1]
    after, ok = prepared(tables, slots, ids(4, 4, 0))  # two more
    assert not ok
    assert equal(after, tables)
    tables, ok = prepared(tables, slots, ids(3, 4, 0))  # three tokens complete no entry: one more
    assert ok
    assert tables.num_free.tolist() == [0]
    after, ok = prepared(tables, slots, ids(0, 0, 4))
    assert not ok
    assert equal(after, tables)
    tables, ok = prepared(tables, slots, ids(0, 12, 3))  # inside the blocks held, nothing is needed
    assert ok
    tables = release_jit(tables, slots[2:].repeat(BATCH, total_repeat_length=BATCH))
    assert tables.num_free.tolist() == [2]
    tables, ok = prepared(tables, slots, ids(1, 0, 0))
    assert ok
    assert tables.num_free.tolist() == [1]


def test_a_sequence_may_reach_the_longest_context_and_not_pass_it():
    tables, slots = full_house()
    tables, ok = prepared(tables, slots, ids(CONTEXT, 0, 0))
    assert ok
    assert tables.block_lens.tolist()[0] == PLAN.max_blocks
    after, ok = prepared(tables, slots, ids(1, 0, 0))
    assert not ok
    assert equal(after, tables)


def test_rows_are_served_in_order_and_a_small_one_passes_one_that_does_not_fit():
    cache, slots, ok = d4.admit(CACHE, BATCH)
    assert ok
    cache, granted = d4.cache.prepare_rows(cache, slots, ids(64, 80, 64))  # 4 + 5 + 4 blocks of 9
    assert granted.tolist() == [True, True, False]
    cache = d4.release(cache, slots[1:2])
    cache, _, _ = d4.admit(cache, 1)
    grants = d4.cache.explain_forward(cache, slots, ids(65, 128, 3))
    assert grants.refusal.tolist() == [Refusal.NONE, Refusal.TOO_LONG, Refusal.NONE]
    cache, granted = d4.cache.prepare_rows(cache, slots[1:], ids(70, 80))
    assert granted.tolist() == [True, False], "the first takes all five"
    cache, granted = d4.cache.prepare_rows(cache, slots, ids(80, -1, 3))
    assert granted.tolist() == [False, False, True], "three tokens complete no entry"
    grants = d4.cache.explain_forward(cache, slots, ids(80, -1, 3))
    assert grants.refusal.tolist() == [Refusal.NO_BLOCKS, Refusal.NEGATIVE, Refusal.NONE]
    assert grants.missing_blocks.tolist() == [1, 0, 0]
    assert grants.free_blocks.tolist() == 0
    assert not grants.ok
    assert d4.cache.explain_forward(cache, slots, ids(0, 0, 3)).ok


def test_rows_of_a_large_batch_are_served_as_if_one_by_one():
    """Many rows contend for few blocks: the loop that settles them takes several turns."""
    plan = d4.plan_cache(CFG, max_requests=64, max_context=CONTEXT, num_blocks=70)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 64)
    rng = np.random.default_rng(0)
    for _ in range(5):
        num_new = jnp.asarray(rng.integers(0, CONTEXT + 1, 64), jnp.int32)
        got, granted = d4.cache.prepare_rows(cache, slots, num_new)
        one_by_one, each = cache, []
        for b in range(64):
            one_by_one, ok = d4.prepare_forward(one_by_one, slots[b : b + 1], num_new[b : b + 1])
            each.append(bool(ok) and int(num_new[b]) > 0)
        assert granted.tolist() == each
        assert any(each)
        assert not all(each)
        assert got.tables.block_lens.tolist() == one_by_one.tables.block_lens.tolist()
        assert got.tables.prepared.tolist() == one_by_one.tables.prepared.tolist()


def test_grants_of_no_rows_and_of_mapped_caches():
    none = jnp.zeros(0, jnp.int32)
    assert d4.cache.explain_forward(CACHE, none, none).ok
    cache, granted = d4.cache.prepare_rows(CACHE, none, none)
    assert granted.shape == (0,)
    cache, slots, _ = d4.admit(CACHE, BATCH)
    several = jax.tree.map(lambda leaf: np.stack([leaf] * 2), cache)
    wanted = jnp.stack([ids(80, 80, 1), ids(1, 2, 3)])
    _, granted = jax.vmap(d4.cache.prepare_rows, in_axes=(0, None, 0))(several, slots, wanted)
    assert granted.tolist() == [[True, False, True], [True, True, True]]


def test_a_smaller_second_grant_keeps_the_blocks_and_takes_back_the_length():
    tables, slots = full_house()
    tables, ok = grow_jit(tables, slots, ids(40, 0, 0), PLAN)
    assert ok
    tables, ok = grow_jit(tables, slots, ids(4, 0, 0), PLAN)
    assert ok
    assert tables.block_lens.tolist()[:1] == [3]
    assert tables.prepared.tolist()[:1] == [4]
    assert advance_jit(tables, slots, ids(5, 0, 0)).seq_lens.tolist()[:1] == [0]


@pytest.mark.parametrize(
    ("where", "expected"),
    [([True, False, True], [0, -1, 1]), ([False] * 3, [-1] * 3), ([False, False, True], [-1, -1, 0])],
)
def test_admit_takes_slots_only_where_asked(where, expected):
    tables, slots, ok = admit_jit(init_tables(PLAN), BATCH, jnp.asarray(where))
    assert ok
    assert slots.tolist() == expected
    assert int(tables.admitted.sum()) == sum(where)


def test_admit_counts_only_the_requests_asked_for():
    tables, _ = full_house()  # one slot is left
    after, slots, ok = admit_jit(tables, BATCH, jnp.asarray([False, True, False]))
    assert ok
    assert slots.tolist() == [-1, 3, -1]
    refused, slots, ok = admit_jit(tables, BATCH, jnp.asarray([True, True, False]))
    assert not ok
    assert slots.tolist() == [-1] * 3
    assert equal(refused, tables)
    _, slots, ok = admit_jit(after, BATCH, jnp.asarray([False] * 3))
    assert ok


def test_admit_zero_requests_is_legal_and_more_than_there_are_slots_is_refused():
    tables, slots, ok = admit_jit(init_tables(PLAN), 0)
    assert ok
    assert slots.shape == (0,)
    after, slots, ok = admit_jit(tables, REQUESTS + 1)
    assert not ok
    assert slots.tolist() == [-1] * (REQUESTS + 1)
    assert equal(after, tables)


def test_releasing_a_slot_named_twice_frees_its_blocks_once():
    tables, slots = full_house()
    tables, ok = prepared(tables, slots, ids(40, 20, 4))
    assert ok
    once = release_jit(tables, ids(int(slots[1]), -1, -1))
    assert equal(release_jit(tables, ids(int(slots[1]), int(slots[1]), int(slots[1]))), once)
    assert equal(release_jit(once, ids(int(slots[1]), -5, 99)), once)
    assert once.num_free.tolist() == [BLOCKS - 3 - 1]


def shared_blocks():
    """Requests 0 and 1 read the same first two blocks, request 0 one more of its own."""
    tables, slots = full_house()
    tables, ok = prepared(tables, slots, ids(40, 0, 8))
    assert ok
    shared = tables.block_table[slots[0], :2]
    return dataclasses.replace(
        tables,
        block_table=tables.block_table.at[slots[1], :2].set(shared),
        block_lens=tables.block_lens.at[slots[1]].set(2),
        block_refs=tables.block_refs.at[shared].set(2),
        seq_lens=tables.seq_lens.at[slots[1]].set(32),
        prepared=tables.prepared.at[slots[1]].set(32),
    ), slots


def test_a_shared_block_is_freed_with_its_last_reader():
    tables, slots = shared_blocks()
    assert tables.num_free.tolist() == [BLOCKS - 4]
    one = release_jit(tables, ids(int(slots[0]), -1, -1))
    assert one.num_free.tolist() == [BLOCKS - 3]  # its own third block alone
    assert int(jnp.max(one.block_refs)) == 1
    both = release_jit(one, ids(int(slots[1]), -1, -1))
    assert both.num_free.tolist() == [BLOCKS - 1]
    assert sorted(both.free_blocks[: BLOCKS - 1].tolist() + both.block_table[slots[2], :1].tolist()) == list(
        range(BLOCKS)
    )


def test_two_readers_leaving_in_one_call_free_their_shared_blocks_once():
    tables, slots = shared_blocks()
    after = release_jit(tables, ids(int(slots[0]), int(slots[1]), int(slots[0])))
    assert after.num_free.tolist() == [BLOCKS - 1]
    free = after.free_blocks[: BLOCKS - 1].tolist()
    assert len(set(free)) == BLOCKS - 1
    assert after.block_refs.tolist() == [int(block not in free) for block in range(BLOCKS)]


@pytest.mark.parametrize(("ratios", "per_entry"), [((0,), None), ((0, 4), 4), ((16,), 16), ((16, 0, 4), 4)])
def test_blocks_follow_the_smallest_ratio_in_the_model(ratios, per_entry):
    cfg = dataclasses.replace(CFG, compress_ratios=ratios)
    plan = d4.plan_cache(cfg, max_requests=1, max_context=CONTEXT)
    for length in range(CONTEXT + 1):
        blocks = 0 if per_entry is None else -(-(length // per_entry) // (16 // per_entry))
        assert blocks_for(plan, length) == blocks
        assert blocks <= plan.max_blocks


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (3, 0), (4, 1), (128, 1), (131, 1), (132, 2), (512, 4)])
def test_blocks_of_the_real_sizes(length, blocks):
    assert blocks_for(d4.plan_cache(d4.DSV4Config.flash()), length) == blocks
