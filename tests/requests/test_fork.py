"""Forks hold the same bits as separate requests in batches of one shape; blocks are freed with their last reader."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("hypothesis", reason="its inputs are drawn by hypothesis, of the extra 'dev'")
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4jax as d4
from dsv4jax.cache.tables import (
    admit_slots,
    advance_lengths,
    blocks_for,
    fork_slots,
    grow,
    init_tables,
    withdraw_grants,
)
from tests.support.driver import (
    BATCH,
    BLOCKS,
    CFG,
    CONTEXT,
    DEFAULT,
    LAYERS,
    REQUESTS,
    TOKENS,
    TRAINED,
    assert_same,
    contents,
    even_split,
    feed,
    ids,
    poisoned,
    random_params,
    sequence,
    small_plan,
    step,
)

PLAN = small_plan(**TRAINED)  # blocks of 16 tokens
PUBLISHED_RATIOS = d4.plan_cache(  # blocks of 128
    d4.DSV4Config.tiny(), max_requests=REQUESTS, max_context=256, num_blocks=2 * BATCH, **DEFAULT
)


def admitted(n=BATCH, plan=PLAN):
    cache, slots, ok = d4.admit(d4.init_cache(plan), BATCH, jnp.arange(BATCH, dtype=jnp.int32) < n)
    assert ok
    return cache, slots


# Batches are padded to one size, so that each function is compiled once.
def padded(slots, size=BATCH):
    return ids(*slots, *[-1] * (size - len(slots)))


def fork(cache, source, *targets):
    """Fork ``source``, which is one slot, or a list with one slot for each target."""
    source = padded(source) if isinstance(source, list) else jnp.int32(source)
    return d4.fork(cache, source, padded(targets))


def release(cache, *slots):
    return d4.release(cache, padded(slots, REQUESTS))


def held(cache, *slots):
    """Return what requests hold: ``contents`` without blocks granted ahead, and with unused rows made equal."""
    cache, found = poisoned(cache), []
    for slot in slots:
        parts = contents(cache, slot)
        blocks = parts["blocks"] = blocks_for(cache.plan, parts["seq_len"])
        for name in parts:
            if name.endswith("pool"):
                parts[name] = jax.tree.map(lambda leaf, blocks=blocks: leaf[:, :blocks], parts[name])
        found.append(parts)
    return found


def assert_consistent(cache):
    """Check that block tables name every block as often as it has readers, and the free list names the others once."""
    tables = jax.tree.map(np.asarray, cache.tables)
    named = tables.block_table[tables.block_table >= 0]
    assert tables.block_refs.tolist() == np.bincount(named, minlength=len(tables.block_refs)).tolist()
    free = tables.free_blocks[: tables.num_free[0]].tolist()
    assert sorted(free) == np.flatnonzero(tables.block_refs == 0).tolist()
    assert (np.sum(tables.block_table >= 0, axis=1) == tables.block_lens).all()
    assert (tables.block_table[~tables.admitted] == -1).all()


def all_free(cache):
    return int(cache.tables.num_free[0]) == cache.plan.num_blocks and not np.asarray(cache.tables.block_refs).any()


# ---- forks equal requests of their own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "width", "lengths"),
    [
        pytest.param(PLAN, TOKENS, (3, 15, 16, 19, 20, 33), id="fp8_tile64, mxfp4, online"),
        pytest.param(
            *(PUBLISHED_RATIOS, 33, (0, 3, 4, 5, 127, 128, 129, 131, 132)),
            id="fp8_row, nvfp4, ring",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_forks_equal_requests_that_were_prefilled_each(plan, width, lengths):
    """Lengths are around the end of an entry, of a block and of both. Then all four continue with different tokens."""
    cfg = plan.cfg
    params = random_params(cfg)
    after = [sequence(10 + b, 6, cfg.hidden_size) for b in range(BATCH)]
    more = [[1, 1, 4], [4, 1, 1], [6], [0, 1, 5]]
    nothing = np.zeros((0, cfg.hidden_size), np.float32)
    for length in lengths:
        prompt, splits = sequence(length, length, cfg.hidden_size), even_split(length, width) or [0]
        cache, slots = admitted(plan=plan)
        _, cache = feed(params, [prompt] * BATCH, cache, slots, [splits] * BATCH, layers=LAYERS, width=width)
        want, apart = feed(params, after, cache, slots, more, layers=LAYERS, width=width)

        cache, slots = admitted(plan=plan)
        xs, of_one = [prompt] + [nothing] * (BATCH - 1), [splits] + [[0]] * (BATCH - 1)
        _, cache = feed(params, xs, cache, slots, of_one, layers=LAYERS, width=width)
        cache, ok = fork(poisoned(cache), 0, 1, 2, 3)
        assert ok
        blocks, full = blocks_for(plan, length), length // cfg.block_tokens
        assert cache.tables.block_lens[slots].tolist() == [blocks] * BATCH
        assert int(cache.tables.num_free[0]) == plan.num_blocks - full - BATCH * (blocks - full)
        got, forked = feed(params, after, poisoned(cache), slots, more, layers=LAYERS, width=width)
        assert_same(got, want)
        assert_same(held(forked, *slots.tolist()), held(apart, *slots.tolist()))
        assert_consistent(forked)
        assert all_free(release(forked, *slots.tolist()))


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.lists(st.integers(0, TOKENS), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("step"), st.lists(st.sampled_from([4, TOKENS]), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("fork"), st.lists(st.integers(-1, REQUESTS - 1), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("admit"), st.lists(st.integers(0, 1), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("grant"), st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("release"), st.lists(st.integers(-1, REQUESTS), max_size=3)),
)


@settings(max_examples=6)
@given(operations=st.lists(OPERATIONS, min_size=15, max_size=35), seed=st.integers(0, 2**32 - 1))
def test_any_interleaving_of_forks_steps_and_releases(operations, seed):
    """The model keeps each slot's whole history, as chunks. A fork copies it. At the end each is run again, alone."""
    rng = np.random.default_rng(seed)
    params, (cache, _) = random_params(), admitted(2)
    history: dict[int, list[tuple[np.ndarray, list[np.ndarray]]]] = {0: [], 1: []}

    def lengths():
        return {slot: sum(len(x) for x, _ in chunks) for slot, chunks in history.items()}

    for operation, numbers in operations:
        rows = [*rng.permutation(list(history)), *[-1] * BATCH][:BATCH]
        if operation == "release":
            cache = release(cache, *numbers)
            history = {slot: chunks for slot, chunks in history.items() if slot not in numbers}
        elif operation == "admit":
            cache, new, ok = d4.admit(cache, BATCH, jnp.asarray(numbers, bool))
            assert bool(ok) == (sum(numbers) + len(history) <= REQUESTS)
            history |= {slot: [] for slot in new.tolist() if slot >= 0}
        elif operation == "grant":  # and then not used: blocks stay behind
            num_new = [n if row >= 0 else 0 for row, n in zip(rows, numbers, strict=True)]
            cache, _ = d4.prepare_forward(cache, ids(*rows), ids(*num_new))
        elif operation == "fork":
            wanted = [source in history for source in numbers]
            admitting, targets, ok = d4.admit(cache, BATCH, jnp.asarray(wanted))
            if not ok:
                continue
            forked, ok = fork(admitting, numbers, *targets.tolist())
            sources = dict(zip(targets.tolist(), numbers, strict=True))
            sources = {target: source for target, source in sources.items() if target >= 0}
            partly = [source for source in sources.values() if lengths()[source] % CFG.block_tokens >= 4]
            assert bool(ok) == (len(partly) <= int(cache.tables.num_free[0]))
            if not ok:
                assert_same(forked, admitting)
                continue
            cache = forked
            history |= {target: list(history[source]) for target, source in sources.items()}
        else:
            num_new = [
                min(n, CONTEXT - lengths()[row]) if row >= 0 else 0 for row, n in zip(rows, numbers, strict=True)
            ]
            x = rng.standard_normal((BATCH, TOKENS, CFG.hidden_size), np.float32)
            prepared = cache.tables.prepared.tolist()
            ys, cache, ok = step(params, jnp.asarray(x), poisoned(cache), ids(*rows), ids(*num_new), layers=LAYERS)
            for b, n in enumerate(num_new):
                # In a batch that is refused, a row still goes on as far as an earlier grant reaches.
                if n and (ok or lengths()[rows[b]] + n <= prepared[rows[b]]):
                    history[rows[b]].append((x[b, :n], [np.asarray(y)[b, :n] for y in ys]))
        assert_consistent(cache)

    assert cache.seq_lens.tolist() == [lengths().get(slot, 0) for slot in range(REQUESTS)]
    for slot, chunks in history.items():
        alone, own = admitted()
        if chunks:
            xs = [np.concatenate([x for x, _ in chunks])] + [np.zeros((0, CFG.hidden_size), np.float32)] * (BATCH - 1)
            splits = [[len(x) for x, _ in chunks]] + [[0]] * (BATCH - 1)
            outputs, alone = feed(params, xs, alone, own, splits, layers=LAYERS, width=TOKENS)
            for layer in LAYERS:
                assert_same(outputs[layer][0], np.concatenate([ys[layer] for _, ys in chunks]))
        assert_same(held(cache, slot), held(alone, int(own[0])))
    assert all_free(release(cache, *range(REQUESTS)))


# ---- blocks -----------------------------------------------------------------------------------------------------


def family():
    """Return a cache and a request, its fork and the fork's fork, of 40, 41 and 42 tokens. They share the first 32."""
    cache, slots = admitted(3)
    for row, length in ((0, 37), (1, 4), (2, 1), (0, 3)):
        if row:
            cache, ok = fork(cache, row - 1, row)
            assert ok
        xs = [sequence(length, length if b == row else 0, CFG.hidden_size) for b in range(BATCH)]
        splits = [even_split(len(x), TOKENS) or [0] for x in xs]
        _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    return cache, slots[:3]


def test_relatives_leave_in_any_order_and_each_takes_only_its_own_blocks_along():
    cache, slots = family()
    assert cache.seq_lens[slots].tolist() == [40, 41, 42]
    assert_consistent(cache)
    table = np.asarray(cache.tables.block_table)[np.asarray(slots), :3]
    assert (table[:, :2] == table[0, :2]).all()
    assert len(set(table[:, 2].tolist())) == 3
    assert cache.tables.block_refs[table[0, :2]].tolist() == [3, 3]
    before = dict(zip(slots.tolist(), held(cache, *slots.tolist()), strict=True))
    for order in itertools.permutations(slots.tolist()):
        left = cache
        for i, slot in enumerate(order):
            left = release(poisoned(left), slot, slot)
            assert_consistent(left)
            staying = order[i + 1 :]
            assert_same(held(left, *staying), [before[other] for other in staying])
        assert all_free(left)


def test_a_shared_block_that_leaves_with_several_rows_of_one_release_is_freed_once():
    cache, slots = family()
    first, second, third = slots.tolist()
    two = release(cache, first, third, first)
    assert_consistent(two)
    assert int(two.tables.num_free[0]) == BLOCKS - 3
    everyone = release(cache, third, first, second)
    assert_consistent(everyone)
    assert all_free(everyone)
    assert sorted(everyone.tables.free_blocks.tolist()) == list(range(BLOCKS))


def test_blocks_granted_ahead_are_not_given():
    cache, slots = admitted()
    cache, ok = d4.prepare_forward(cache, slots, ids(40, 0, 0, 0))
    assert ok
    cache = d4.advance(cache, slots, ids(20, 0, 0, 0))  # 2 of 3 blocks are in use
    forked, ok = fork(cache, 0, 1)
    assert ok
    assert forked.tables.block_lens[slots].tolist() == [3, 2, 0, 0]
    assert forked.tables.prepared[slots].tolist() == [40, 20, 0, 0]
    assert_consistent(forked)


@pytest.mark.parametrize(("ratios", "shared", "own"), [((0,), 0, 0), ((0, 16), 2, 0), ((4, 16), 2, 1)])
def test_blocks_of_models_without_some_kind_of_layer(ratios, shared, own):
    """Without CSA layers a block holds one entry, so it is either full or not allocated, and nothing needs copying."""
    cfg = dataclasses.replace(CFG, compress_ratios=ratios)
    plan = d4.plan_cache(cfg, max_requests=2, max_context=CONTEXT, num_blocks=BLOCKS)

    @jax.jit
    def forked(tables):
        tables, slots, _ = admit_slots(tables, 2)
        tables, _ = grow(tables, slots, ids(39, 0), plan)
        tables = advance_lengths(tables, slots, ids(39, 0))
        return fork_slots(tables, slots[:1], slots[1:], plan)

    tables, ok, filling, copy = forked(init_tables(plan))
    assert ok
    assert tables.seq_lens.tolist() == [39, 39]
    assert tables.block_lens.tolist() == [shared + own] * 2
    assert int(tables.num_free[0]) == BLOCKS - shared - 2 * own
    assert (tables.block_table[0, :shared] == tables.block_table[1, :shared]).all()
    if own:
        assert tables.block_table[:, shared].tolist() == [*filling.tolist(), *copy.tolist()]
    else:
        assert copy.tolist() == [-1]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowd():
    """Slot 0 holds 20 tokens, slot 1 holds 3 and no block, slot 2 was granted a block, slot 3 is empty, and slot 4 is
    free.
    """
    cache, slots = admitted()
    assert slots.tolist() == [0, 1, 2, 3]
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((20, 3, 0, 0))]
    splits = [even_split(20, TOKENS), [3], [0], [0]]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    cache, ok = d4.prepare_forward(cache, slots, ids(0, 0, 4, 0))
    assert ok
    return cache


REFUSED = {
    "the source is free": (4, [3]),
    "the source is out of range": (REQUESTS, [3]),
    "the source is negative": (-1, [3]),
    "a target is free": (0, [3, 4]),
    "a target is out of range": (0, [3, REQUESTS]),
    "a target is below -1": (0, [3, -2]),
    "a target is named twice": (0, [3, 3]),
    "a target holds tokens": (0, [3, 1]),
    "a target was granted tokens": (0, [2, 3]),
    "a target is the source": (0, [0]),
    "a target is its empty source": (3, [3]),
    "one source of several is free": ([4, 0], [3, -1]),
    "one target of several holds tokens": ([0, 0], [3, 1]),
}


@pytest.mark.parametrize(("source", "targets"), REFUSED.values(), ids=REFUSED)
def test_a_refused_fork_changes_nothing(crowd, source, targets):
    foul = poisoned(crowd)
    after, ok = fork(foul, source, *targets)
    assert not ok
    assert_same(after, foul)


def test_a_target_whose_grant_was_withdrawn_holds_its_block_still(crowd):
    tables = withdraw_grants(crowd.tables, ids(2), jnp.asarray([True]))
    assert (int(tables.prepared[2]), int(tables.block_lens[2])) == (0, 1)
    cache = dataclasses.replace(crowd, tables=tables)
    after, ok = fork(cache, 0, 2)
    assert not ok
    assert_same(after, cache)


def test_a_fork_that_needs_more_blocks_than_are_free_changes_nothing(crowd):
    tables = crowd.tables
    full = dataclasses.replace(crowd, tables=dataclasses.replace(tables, num_free=jnp.zeros_like(tables.num_free)))
    after, ok = fork(full, 0, 3)
    assert not ok
    assert_same(after, full)
    after, ok = fork(full, 1, 3)  # three tokens hold no block
    assert ok
    assert after.seq_lens.tolist() == [20, 3, 0, 3, 0]


def test_padding_alone_and_an_empty_batch_are_no_ops(crowd):
    foul = poisoned(crowd)
    for after, ok in (fork(foul, -1), fork(foul, [0, 4, 9]), d4.fork(foul, jnp.int32(0), jnp.zeros(0, jnp.int32))):
        assert ok
        assert_same(after, foul)


def test_a_malformed_fork_is_an_error_that_names_the_argument(crowd):
    for source, targets, message in (
        (jnp.float32(0), ids(3), "source_slot: expected int32 [], got float32[]"),
        (ids(0, 0), ids(3), "source_slot: expected int32 [B=1], got int32[2]"),
        (jnp.int32(0), jnp.int32(3), "target_slots: expected int32 [B], got int32[]"),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            d4.fork(crowd, source, targets)


# ---- inside programs ------------------------------------------------------------------------------------------------


def test_forks_inside_scan_are_those_outside():
    """The oldest of three related requests leaves, a fork of the youngest takes its slot, and all grow."""

    def turn(carry, num_new):
        cache, (oldest, middle, youngest) = carry
        cache = d4.release(cache, jnp.full(REQUESTS, oldest))
        cache, new, admitted = d4.admit(cache, BATCH, jnp.arange(BATCH, dtype=jnp.int32) == 0)
        cache, forked = d4.fork(cache, youngest, new)
        slots = jnp.stack([middle, youngest, new[0]])
        batch = jnp.append(slots, -1)
        cache, granted = d4.prepare_forward(cache, batch, num_new)
        return (d4.advance(cache, batch, num_new), slots), admitted & forked & granted

    start = family()
    counts = jnp.asarray([[1, 2, 3, 0], [0, 1, 1, 0], [4, 0, 5, 0], [1, 1, 1, 0], [0, 7, 9, 0]], jnp.int32)
    carry = start
    for num_new in counts:
        carry, ok = turn(carry, num_new)
        assert ok
        assert_consistent(carry[0])
    scanned, oks = jax.jit(lambda carry: lax.scan(turn, carry, counts))(start)
    assert oks.all()
    assert_same(scanned, carry)


def test_a_donated_cache_keeps_its_buffers(crowd):
    cache, slots, ok = d4.admit(crowd, BATCH, jnp.arange(BATCH, dtype=jnp.int32) == 2)
    assert ok
    targets = slots.at[0].set(3)  # and one of a source of its own
    sources = ids(0, -1, 1, -1)
    want, ok = d4.fork(cache, sources, targets)
    assert ok
    assert want.seq_lens.tolist() == [20, 3, 0, 20, 3]
    cache = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    after, ok = jax.block_until_ready(jax.jit(d4.fork, donate_argnums=0)(cache, sources, targets))
    assert ok
    assert_same(after, want)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
