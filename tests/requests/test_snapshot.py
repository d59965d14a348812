"""A request that is extracted from one cache and inserted into another is the same, and no other request changes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.requests.snapshot import abstract_snapshot
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    BLOCKS,
    CFG,
    CONTEXT,
    FORMATS,
    LAYERS,
    REQUESTS,
    TOKENS,
    assert_same,
    contents,
    even_split,
    feed,
    garbage,
    ids,
    poisoned,
    random_params,
    sequence,
    small_plan,
    step,
)

formats = pytest.mark.parametrize(
    "options", first_of([pytest.param(options, id=name) for name, options in FORMATS.items()])
)

# Blocks, HCA entries and the window end at multiples of 128, as in the published models.
LONG = d4.DSV4Config.tiny(sliding_window=128)
EDGES = (*range(127, 131), *range(255, 258), *range(383, 386), *range(511, 514))


def holding(lengths, plan, seed=0) -> tuple[d4.KVCache, jax.Array]:
    """Return a cache full of random bytes with requests of these lengths. Blocks and slots are in random order."""
    cache, slots, ok = d4.admit(d4.init_cache(plan), len(lengths) + 1)
    assert ok
    cache, ok = d4.prepare_forward(cache, slots[:1], ids(1 + plan.min_ratio))
    assert ok
    slots = jnp.flip(slots)[:-1]
    counts = jnp.asarray(lengths, jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, counts)
    assert ok
    return garbage(d4.advance(cache, slots, counts), seed), slots


def visible(cache: d4.KVCache, slot: int) -> dict[str, Any]:
    """Return a request's contents, with zeros past its last complete entry."""
    held = contents(cache, slot)
    for kind in d4.AttentionType:
        if held.get(f"{kind} pool") is not None:
            complete = int(held["seq_len"]) // cache.plan.cfg.ratio(kind)

            def cut(leaf: np.ndarray, complete: int = complete) -> np.ndarray:
                rows = leaf.copy().reshape(leaf.shape[0], -1, *leaf.shape[3:])
                rows[:, complete:] = np.zeros((), leaf.dtype)
                return rows.reshape(leaf.shape)

            held[f"{kind} pool"] = jax.tree.map(cut, held[f"{kind} pool"])
    return held


@formats
def test_every_byte_arrives_and_no_other_is_touched(options):
    """Lengths are around the edges of window, blocks and entries; the other cache has more slots and fewer blocks."""
    source, slots = holding(EDGES, d4.plan_cache(LONG, max_requests=14, max_context=640, num_blocks=60, **options))
    snapshot = d4.extract(source, slots)
    assert (snapshot.num_requests, snapshot.blocks) == (len(EDGES), 4)
    target, residents = holding((130, 7), d4.plan_cache(LONG, 16, 1024, num_blocks=44, **options), seed=1)
    after, got, ok = d4.insert(target, snapshot)
    assert ok
    assert not set(got.tolist()) & set(residents.tolist())
    for old, new in zip(slots.tolist(), got.tolist(), strict=True):
        assert_same(visible(after, new), visible(source, old))
    # Nothing but the new requests' slots and blocks has changed.
    table = np.asarray(after.tables.block_table)[np.asarray(got)]
    slot_kept = ~np.isin(np.arange(16), got)
    block_kept = ~np.isin(np.arange(44), table)
    for kind in d4.AttentionType:
        for part, kept in (("state", slot_kept), ("pool", block_kept)):
            new, was = (jax.tree.leaves(getattr(cache.stack(kind), part)) for cache in (after, target))
            for a, b in zip(new, was, strict=True):
                assert np.asarray(a)[:, kept].tobytes() == np.asarray(b)[:, kept].tobytes()
    for slot in residents.tolist():
        assert_same(contents(after, slot), contents(target, slot))


@functools.cache
def served(name):
    """Return four requests around the edges of blocks and windows of 16 tokens, fed through the layers."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**FORMATS[name])), BATCH)
    assert ok
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((15, 33, 3, 48))]
    splits = [even_split(len(x), TOKENS) for x in xs]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    return cache, slots


@pytest.mark.parametrize("name", first_of(["fp8_tile64, mxfp4, online", "fp8_row, nvfp4, bf16 tails"]))
def test_decoding_goes_on_as_if_nothing_had_happened(name):
    """The requests go into other slots and blocks of a cache with garbage in unused rows.

    Outputs and bytes are the same.
    """
    cache, slots = served(name)
    chosen = slots[jnp.array([3, 0])]
    target, other, ok = d4.admit(d4.init_cache(cache.plan), 1)
    assert ok
    xs = [sequence(9, 20, CFG.hidden_size)]
    rows = jnp.concatenate([other, ids(-1, -1, -1)])
    _, target = feed(
        random_params(),
        [*xs, *[sequence(0, 0, CFG.hidden_size)] * 3],
        target,
        rows,
        [[8, 8, 4], [], [], []],
        layers=LAYERS,
        width=TOKENS,
    )
    target = poisoned(target)
    before = contents(target, int(other[0]))
    target, got, ok = d4.insert(target, d4.extract(poisoned(cache), chosen))
    assert ok
    assert d4.verify(target) == []
    assert got.tolist() != chosen.tolist()
    rows, got_rows = (jnp.concatenate([ids(-1, -1), some]) for some in (chosen, got))
    x = sequence(5, 10 * BATCH * TOKENS, CFG.hidden_size).reshape(10, BATCH, TOKENS, -1)
    for i in range(10):  # past the ends of entries, blocks and windows
        num_new = ids(0, 0, 1 + i % 3, 1)
        ys, cache, ok = step(random_params(), jnp.asarray(x[i]), cache, rows, num_new, layers=LAYERS)
        ys_moved, target, ok_moved = step(random_params(), jnp.asarray(x[i]), target, got_rows, num_new, layers=LAYERS)
        assert ok
        assert ok_moved
        assert any(np.asarray(y).any() for y in ys)
        assert_same(ys_moved, ys)
    assert_same(d4.extract(poisoned(target), got), d4.extract(poisoned(cache), chosen))
    assert_same(contents(target, int(other[0])), before)


def test_former_owners_and_grants_leave_no_trace():
    plan = small_plan()
    cache, slots = holding((13, 18), plan)
    snapshot = d4.extract(cache, slots)
    spoiled, ok = d4.prepare_forward(poisoned(cache), slots, ids(30, 0))
    assert ok
    for kind in ("csa", "hca"):
        assert_same(getattr(d4.extract(spoiled, slots), kind).pool, getattr(snapshot, kind).pool)
    after, slots, ok = d4.insert(d4.init_cache(plan), d4.extract(spoiled, slots))
    assert ok
    tables = after.tables
    assert [table[slots].tolist() for table in (tables.seq_lens, tables.prepared)] == [[13, 18], [13, 18]]
    assert tables.block_lens[slots].tolist() == [1, 1]


def test_shared_blocks_become_each_requests_own():
    cache, slots = holding((40,), small_plan())
    cache, (child,), ok = d4.admit(cache, 1)
    assert ok
    cache, ok = d4.fork(cache, slots[0], child[None])
    assert ok
    assert np.sum(np.asarray(cache.tables.block_refs) == 2) == 2
    both = [int(slots[0]), int(child)]
    after, got, ok = d4.insert(d4.init_cache(small_plan()), d4.extract(cache, both))
    assert ok
    assert sorted(after.tables.block_refs.tolist()) == [0] * (BLOCKS - 6) + [1] * 6
    for old, new in zip(both, got.tolist(), strict=True):
        assert_same(visible(after, new), visible(cache, old))


@pytest.mark.parametrize("lengths", [(0, 3), (0,)])
def test_requests_without_entries_have_no_blocks(lengths):
    cache, slots = holding(lengths, small_plan())
    snapshot = d4.extract(cache, slots)
    assert snapshot.blocks == 0
    after, got, ok = d4.insert(d4.init_cache(small_plan()), snapshot)
    assert ok
    for old, new in zip(slots.tolist(), got.tolist(), strict=True):
        assert_same(contents(after, new), contents(cache, old))


def test_a_model_without_compressed_layers():
    plan = d4.plan_cache(d4.DSV4Config.tiny(compress_ratios=(0, 0)), max_requests=3, max_context=64)
    cache, slots = holding((20, 5), plan)
    after, got, ok = d4.insert(d4.init_cache(plan), d4.extract(cache, slots))
    assert ok
    assert_same(contents(after, int(got[0])), contents(cache, int(slots[0])))


def crowded(free_slots: int, free_blocks: int) -> d4.KVCache:
    """Return a cache full of random bytes with this many slots and blocks left."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan()), REQUESTS - free_slots)
    assert ok
    taken = BLOCKS - free_blocks
    counts = [16 * min(CONTEXT // 16, max(0, taken - 5 * i)) for i in range(len(slots))]
    cache, ok = d4.prepare_forward(cache, slots, ids(*counts))
    assert ok
    assert cache.tables.num_free.tolist() == [free_blocks]
    return garbage(cache)


def test_where_there_is_no_room_nothing_changes():
    source, slots = holding((40, 32), small_plan())
    snapshot = d4.extract(source, slots)  # 2 slots, 3 + 2 blocks
    shorter = d4.init_cache(small_plan(max_context=39))
    longer_than_kept = dataclasses.replace(snapshot, seq_lens=ids(52, 32))
    negative = dataclasses.replace(snapshot, seq_lens=ids(40, -1))
    for cache, wanted, fits in (
        (crowded(2, 5), snapshot, True),
        (crowded(1, 9), snapshot, False),
        (crowded(2, 4), snapshot, False),
        (shorter, snapshot, False),
        (d4.init_cache(small_plan()), longer_than_kept, False),
        (d4.init_cache(small_plan()), negative, False),
    ):
        after, got, ok = d4.insert(cache, wanted)
        assert bool(ok) == fits
        if not fits:
            assert_same(after, cache)
            assert got.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kv_format="bf16"), "differ in kv_format: f32 against bf16\n"),
        (dict(indexer_format="nvfp4"), "differ in indexer_format: f32 against nvfp4\n"),
        (dict(tail_dtype=jnp.bfloat16), "differ in tail_dtype: float32 against bfloat16\n"),
        (dict(hca_tail="online"), "differ in hca_tail: ring against online\n"),
        (dict(hca_tail="online", kv_format="bf16"), "kv_format: f32 against bf16; hca_tail: ring against online\n"),
        (
            dict(cfg=dataclasses.replace(CFG, rope_theta=5e5)),
            r"differ in cfg\.rope_theta: 10000\.0 against 500000\.0\n",
        ),
    ],
)
def test_another_layout_is_refused_by_name(options, message):
    plan = small_plan()
    other = d4.plan_cache(**(dict(cfg=CFG, kv_format="f32", indexer_format="f32") | options))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(d4.insert, d4.cache.abstract_cache(other), abstract_snapshot(plan, 1, 1))


def test_extract_cannot_be_traced_and_says_so():
    with pytest.raises(ValueError, match="extract reads values on the host, so it cannot be traced by jit"):
        jax.eval_shape(lambda cache: d4.extract(cache, [0]), d4.cache.abstract_cache(small_plan()))


def test_a_snapshot_of_another_shape_is_refused():
    plan = small_plan()
    snapshot, cache = abstract_snapshot(plan, 2, 1), d4.cache.abstract_cache(plan)
    shorter = dataclasses.replace(snapshot, seq_lens=jax.ShapeDtypeStruct((1,), jnp.int32))
    with pytest.raises(AssertionError, match="shapes"):
        jax.eval_shape(d4.insert, cache, shorter)
    floats = dataclasses.replace(snapshot, seq_lens=jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(AssertionError, match="seq_lens: expected int32"):
        jax.eval_shape(d4.insert, cache, floats)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, -1], "slot -1 is out of range, the cache has slots 0 to 4"),
        ([REQUESTS], "slot 5 is out of range"),
        ([0, 3], r"slot 3 holds no request; admitted are \[0, 1\]"),
        ([], r"slots must be integers \[n\] with n >= 1, got float64\[0\]"),
        ([[0]], r"got int64\[1, 1\]"),
        ([0.0], r"got float64\[1\]"),
        ([[0], [1, 2]], r"slots must be integers \[n\] with n >= 1, got \[\[0\], \[1, 2\]\]"),
    ],
)
def test_slots_that_cannot_be_extracted(slots, message):
    cache, _, _ = d4.admit(d4.init_cache(small_plan()), 2)
    with pytest.raises(ValueError, match=message):
        d4.extract(cache, slots)
