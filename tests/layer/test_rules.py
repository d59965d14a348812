"""The rules that hold for every cache, whatever the model and the batch.

    1  any split of a sequence into calls gives the same cache and outputs       here, test_recorded_outputs
    2  allocation is all or nothing, and what was not granted is a no-op         here, cache/test_tables
    3  nothing shows of what a free row, slot or block held before               here, requests/test_fork
    4  permuting the rows of a batch permutes its outputs; requests are apart    here
    5  a whole generation runs inside ``scan`` and ``while_loop``                here, docs/test_generate
    6  with the cache donated every public function updates in place             here, audits/test_in_place
    7  one trace per shape: stepping never recompiles                            here
    8  bad input is refused by name; bad numbers stay in their request           here, test_bad_input

Those that drive a cache through ``step`` run on the device's default backend and again with the kernels of the cache
update in place of its XLA form, on the simulator and on a GPU; the kernels of attention need larger heads than these.
What chunked calls leave is then compared with one pass of the default backend.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("hypothesis", reason="its inputs are drawn by hypothesis, of the extra 'dev'")
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4jax as d4
from dsv4jax.cache.cache import _admit
from tests.support import driver
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    CFG,
    LAYERS,
    THREE_FORMATS,
    TOKENS,
    TRAINED,
    assert_same,
    contents,
    even_split,
    feed,
    ids,
    moved_values,
    poisoned,
    random_params,
    random_split,
    sequence,
    step,
)
from tests.support.machines import BACKENDS
from tests.support.splits import LENGTHS, MOVED, TOLERANCE, admitted, assert_equal_up_to_rounding, inputs, run

NAMES = [name for name in THREE_FORMATS if name != "f32"]  # in which recorded outputs and some rules below are
formats = pytest.mark.parametrize("options", first_of(pytest.param(THREE_FORMATS[name], id=name) for name in NAMES))


# ``tests.kernels`` compares what kernels store with the default's bytes.
KERNELS = [pytest.param(*one.values, id=one.id, marks=(*one.marks, pytest.mark.sweep)) for one in BACKENDS]


@pytest.fixture(params=[pytest.param(None, id="default"), *KERNELS])
def cache_update(request):
    """The backend of the cache update in ``step``."""
    if request.param is None:
        yield
        return
    with driver.BACKEND(d4.OpBackends(cache_update=request.param)):
        yield


on_the_kernels_too = pytest.mark.usefixtures("cache_update")


# ---- 1: any split of a sequence into calls gives the same cache and outputs -----------------------------------------


@on_the_kernels_too
@pytest.mark.parametrize("name", first_of(NAMES, slow=1))
def test_rule_1_any_chunking_equals_one_pass(name):
    @settings(max_examples=2)
    @given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(BATCH)))
    def check(seed, order):
        rng = np.random.default_rng(seed)
        splits = [random_split(rng, length, TOKENS) for length in LENGTHS]
        for split in splits:  # idle steps: rows of one batch come to be at unrelated phases
            for _ in range(int(rng.integers(0, 5))):
                split.insert(int(rng.integers(0, len(split) + 1)), 0)
        assert_equal_up_to_rounding(name, *run(splits, order=order, **THREE_FORMATS[name]))

    check()


@on_the_kernels_too
def test_rule_1_token_by_token_equals_one_pass():
    splits = [even_split(length, 1) for length in LENGTHS]
    assert_equal_up_to_rounding("f32", *run(splits, width=1))


@on_the_kernels_too
def test_rule_1_a_running_softmax_in_bfloat16_does_not_depend_on_the_split():
    """The online HCA tail adds tokens call by call, and its sums must not be rounded in between."""
    hca = CFG.compress_ratios.index(CFG.hca_compression_ratio)
    xs, results = inputs((32, 48, 16, 16)), []
    for chunk in (8, 1, 3):
        cache, slots = admitted(tail_dtype=jnp.bfloat16, hca_tail="online")
        splits = [even_split(len(x), chunk) for x in xs]
        outputs, cache = feed(random_params(), xs, cache, slots, splits, layers=(hca,), width=TOKENS)
        results.append((outputs, [contents(cache, int(slot)) for slot in slots]))
    for result in results[1:]:
        moved, total = moved_values(result, results[0], TOLERANCE)
        assert moved <= MOVED * total, f"{moved} of {total} values differ"


# ---- 2: allocation is all or nothing --------------------------------------------------------------------------------


def test_rule_2_a_failed_prepare_changes_nothing_and_going_on_regardless_is_a_no_op():
    cache, slots = admitted()
    xs = inputs((76, 76, 64, 3))
    splits = [even_split(len(x), TOKENS) for x in xs]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    assert int(cache.tables.num_free[0]) == 0  # 5 + 5 + 4 + 0 blocks
    x = jnp.asarray(sequence(9, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1))
    for num_new in (
        ids(0, 0, 0, 1),  # completes the last request's first entry: a block too many
        ids(4, 3, 3, 1),  # rows that fit share the batch with one that does not
        ids(8, 8, 8, 8),
        ids(5, 0, 0, 0),  # past the longest context
    ):
        after, ok = d4.prepare_forward(cache, slots, num_new)
        assert not ok
        assert_same(after, cache)
        ys, after, ok = step(random_params(), x, cache, slots, num_new, layers=LAYERS)  # under jit, going on regardless
        assert not ok
        assert_same(after, cache)
        for y in ys:
            assert not np.asarray(y).any()
        y, after = d4.attention_layer(random_params()[0], x, cache, 0, slots, num_new)  # and without an outer jit
        assert_same(after, cache)
        assert not np.asarray(y).any()
        assert_same(d4.advance(cache, slots, num_new), cache)
    ys, _, ok = step(random_params(), x, cache, slots, ids(2, 2, 3, 0), layers=LAYERS)
    assert ok
    assert all(np.asarray(y)[row, :2].any() for y in ys for row in (0, 1, 2))


def test_rule_2_a_layer_takes_no_more_than_was_granted():
    cache, slots = admitted()
    x = jnp.asarray(sequence(9, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1))
    cache, ok = d4.prepare_forward(cache, slots, ids(4, 4, 4, 4))
    assert ok
    # Rows 1 and 3 name more than they were granted: they are left alone, their neighbours are served.
    y, after = d4.attention_layer(random_params()[0], x, cache, 0, slots, ids(4, 5, 3, 8))
    assert [bool(np.asarray(y)[row].any()) for row in range(BATCH)] == [True, False, True, False]
    for row in (1, 3):
        assert_same(contents(after, int(slots[row])), contents(cache, int(slots[row])))
    after = d4.advance(cache, slots, ids(4, 5, 3, 8))
    assert after.seq_lens[slots].tolist() == [4, 0, 3, 0]
    # Counting the same tokens twice counts them once.
    assert_same(d4.advance(after, slots, ids(4, 0, 4, 0)), after)


def test_rule_2_in_a_refused_batch_a_row_goes_on_as_far_as_an_earlier_grant_reaches():
    cache, slots = admitted(2)
    full = [np.zeros((0, CFG.hidden_size), np.float32), sequence(1, driver.CONTEXT, CFG.hidden_size)]
    splits = [[0], even_split(driver.CONTEXT, TOKENS)]
    _, cache = feed(random_params(), full, cache, slots[:2], splits, layers=LAYERS, width=TOKENS)
    cache, ok = d4.prepare_forward(cache, slots[:1], ids(12))
    assert ok
    x = jnp.asarray(sequence(2, 2 * TOKENS, CFG.hidden_size).reshape(2, TOKENS, -1))
    ys, cache, ok = step(random_params(), x, cache, slots[:2], ids(4, 1), layers=LAYERS)
    assert not ok  # the second request has reached the longest context
    assert cache.tables.seq_lens[slots[:2]].tolist() == [4, driver.CONTEXT]
    assert [bool(np.asarray(y)[row].any()) for y in ys for row in (0, 1)] == [True, False] * len(LAYERS)


# ---- 3: nothing shows of what a free row held -----------------------------------------------------------------------


@on_the_kernels_too
@formats
def test_rule_3_garbage_in_every_free_row_changes_nothing(options):
    """Requests arrive, leave and arrive again.

    In one of two caches, all free rows are filled with garbage before each step.
    """
    rng = np.random.default_rng(7)
    clean, slots = admitted(**options)
    foul = clean
    rounds = 0
    for lengths in ((37, 20, 3, 41), (18, 50, 33, 2)):
        splits = [random_split(rng, length, TOKENS) for length in lengths]
        xs, done = inputs(lengths, seed=int(rng.integers(1000))), [0] * BATCH
        for i in range(max(map(len, splits))):
            num_new = [split[i] if i < len(split) else 0 for split in splits]
            x = np.full((BATCH, TOKENS, CFG.hidden_size), np.nan, np.float32)
            for b, n in enumerate(num_new):
                x[b, :n] = xs[b][done[b] : done[b] + n]
                done[b] += n
            foul = poisoned(foul)
            ys, clean, ok = step(random_params(), jnp.asarray(x), clean, slots, ids(*num_new), layers=LAYERS)
            ys_foul, foul, ok_foul = step(random_params(), jnp.asarray(x), foul, slots, ids(*num_new), layers=LAYERS)
            assert ok
            assert ok_foul
            assert_same(ys_foul, ys)
            rounds += 1
        assert_same(poisoned(foul), poisoned(clean))  # all that a request holds
        clean, foul = d4.release(clean, slots), d4.release(poisoned(foul), slots)
        assert_same(poisoned(foul), poisoned(clean))
        clean, slots, ok = d4.admit(clean, BATCH)
        foul, foul_slots, ok_foul = d4.admit(poisoned(foul), BATCH)
        assert ok
        assert ok_foul
        assert_same(foul_slots, slots)
    assert rounds > 10


@on_the_kernels_too
def test_rule_3_a_reused_slot_and_its_blocks_give_what_fresh_ones_give():
    """The outputs of the second request in a slot equal those of a cache that never held the first."""
    xs = inputs((29, 3, 1, 34), seed=50)
    splits = [even_split(len(x), 5) for x in xs]
    fresh, slots = admitted()
    want, fresh = feed(random_params(), xs, fresh, slots, splits, layers=LAYERS, width=TOKENS)
    used, slots = admitted()
    first = inputs((47, 31, 32, 45), seed=90)
    _, used = feed(
        random_params(), first, used, slots, [even_split(len(x), 8) for x in first], layers=LAYERS, width=TOKENS
    )
    used = d4.release(used, slots)
    used, slots, ok = d4.admit(used, BATCH)
    assert ok
    got, used = feed(random_params(), xs, used, slots, splits, layers=LAYERS, width=TOKENS)
    assert_same(got, want)


# ---- 4: requests are apart ------------------------------------------------------------------------------------------


@on_the_kernels_too
@formats
def test_rule_4_permuting_the_rows_of_a_batch_permutes_its_outputs(options):
    cache, slots = admitted(**options)
    splits = [even_split(length, 7) for length in LENGTHS[:2] + (13, 50)]
    xs = inputs((63, 37, 13, 50))
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    x = sequence(3, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1)
    num_new = np.array([8, 0, 4, 5])
    want, cache_after, ok = step(
        random_params(), jnp.asarray(x), cache, slots, jnp.asarray(num_new, jnp.int32), layers=LAYERS
    )
    assert ok
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        got, permuted_after, ok = step(
            random_params(),
            jnp.asarray(x[order]),
            cache,
            slots[jnp.asarray(order)],
            jnp.asarray(num_new[order], jnp.int32),
            layers=LAYERS,
        )
        assert ok
        for y, y_permuted in zip(want, got, strict=True):
            np.testing.assert_array_equal(np.asarray(y)[order], np.asarray(y_permuted))
        for slot in slots.tolist():
            assert_same(contents(permuted_after, slot), contents(cache_after, slot))


@on_the_kernels_too
@formats
def test_rule_4_padding_rows_and_other_requests_change_nothing_and_are_not_touched(options):
    cache, slots = admitted(**options)
    xs = inputs((47, 30, 13, 43))
    _, cache = feed(random_params(), xs, cache, slots, [even_split(len(x), 8) for x in xs], layers=LAYERS, width=TOKENS)
    x = sequence(4, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1)
    full, _, ok = step(random_params(), jnp.asarray(x), cache, slots, ids(3, 5, 3, 8), layers=LAYERS)
    assert ok
    alone = np.full_like(x, np.nan)
    alone[1, :5] = x[1, :5]
    before = {slot: contents(cache, slot) for slot in slots.tolist()}
    for others in (-1, None):  # the other rows: padding, or their own slots with no token
        row_slots = ids(others, int(slots[1]), others, others) if others else slots
        got, after, ok = step(random_params(), jnp.asarray(alone), cache, row_slots, ids(0, 5, 0, 0), layers=LAYERS)
        assert ok
        for y, y_alone in zip(full, got, strict=True):
            np.testing.assert_array_equal(np.asarray(y)[1], np.asarray(y_alone)[1])
            assert not np.asarray(y_alone)[[0, 2, 3]].any()
        for slot in slots.tolist():
            if slot != int(slots[1]):
                assert_same(contents(after, slot), before[slot])
        # Every byte that changed belongs to the one request: its slot, or its blocks.
        own_slot = np.arange(driver.REQUESTS) == int(slots[1])
        table = np.asarray(after.tables.block_table)[int(slots[1])]
        own_blocks = np.isin(np.arange(driver.BLOCKS), table[table >= 0])
        for kind in d4.AttentionType:
            stack, old = after.stack(kind), cache.stack(kind)
            for new, was, own in [
                *((a, b, own_slot) for a, b in zip(*map(jax.tree.leaves, (stack.state, old.state)), strict=True)),
                *((a, b, own_blocks) for a, b in zip(*map(jax.tree.leaves, (stack.pool, old.pool)), strict=True)),
            ]:
                assert np.asarray(new)[:, ~own].tobytes() == np.asarray(was)[:, ~own].tobytes()


# ---- 5: a whole generation inside a loop of the compiler ------------------------------------------------------------


def generation_step(params, cache, slots, x, i):
    """Run one decode step of a model with residual connections.

    Request 1 leaves at step 9, and another arrives at step 11.
    """
    cache = d4.release(cache, jnp.where(i == 9, slots[1:2], -1))
    slots = jnp.where((i == 9) & (jnp.arange(BATCH) == 1), -1, slots)
    cache, new, _ = d4.admit(cache, 1, where=(i == 11)[None])
    slots = jnp.where((jnp.arange(BATCH) == 1) & (i == 11), new[0], slots)
    num_new = jnp.where(slots >= 0, 1, 0).astype(jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    for layer in LAYERS:
        y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new)
        x = x + y
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))
    return d4.advance(cache, slots, num_new), slots, x, ok


def test_rule_5_a_generation_inside_scan_and_while_loop_equals_the_python_loop():
    steps = 36
    params = random_params()
    cache, slots = admitted()
    slots = slots.at[3].set(-1)  # a padding row
    x = jnp.asarray(sequence(1, BATCH, CFG.hidden_size)[:, None])

    looped, loop_slots, last, outputs = cache, slots, x, []
    for i in range(steps):
        looped, loop_slots, last, ok = generation_step(params, looped, loop_slots, last, jnp.int32(i))
        assert ok
        outputs.append(np.asarray(last))
    assert looped.seq_lens[slots[:3]].tolist() == [steps, steps - 11, steps]

    @jax.jit
    def scanned(params, cache, slots, x):
        def body(carry, i):
            cache, slots, x, ok = generation_step(params, carry[0], carry[1], carry[2], i)
            return (cache, slots, x), (x, ok)

        return lax.scan(body, (cache, slots, x), jnp.arange(steps, dtype=jnp.int32))

    (scan_cache, scan_slots, _), (ys, oks) = scanned(params, cache, slots, x)
    assert np.asarray(oks).all()
    # The loop's body is compiled apart from the single step: fp32 sums may run in another order, and each output is the
    # next input, so differences grow over the steps.
    np.testing.assert_allclose(np.asarray(ys), np.stack(outputs), rtol=0, atol=10 * TOLERANCE)
    assert_same(scan_slots, loop_slots)
    assert_same(scan_cache.tables, looped.tables)
    assert moved_values(scan_cache, looped, 10 * TOLERANCE)[0] == 0

    @jax.jit
    def whiled(params, cache, slots, x):
        def body(carry):
            i, cache, slots, x = carry
            cache, slots, x, _ = generation_step(params, cache, slots, x, i)
            return i + 1, cache, slots, x

        return lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), cache, slots, x))

    _, while_cache, while_slots, y = whiled(params, cache, slots, x)
    np.testing.assert_allclose(np.asarray(y), outputs[-1], rtol=0, atol=10 * TOLERANCE)
    assert_same(while_slots, loop_slots)
    assert_same(while_cache.tables, looped.tables)
    assert moved_values(while_cache, looped, 10 * TOLERANCE)[0] == 0


# ---- 6: a donated cache is updated in place -------------------------------------------------------------------------


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def own_buffers(cache):
    """Return a copy that no other test uses, which may be donated."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, cache))


DRIVING_CALLS = {
    "admit": lambda params, cache, x, slots, num_new: d4.admit(cache, 1)[0],
    "prepare_forward": lambda params, cache, x, slots, num_new: d4.prepare_forward(cache, slots, num_new)[0],
    "attention_layer": lambda params, cache, x, slots, num_new: functools.reduce(
        lambda cache, layer: d4.attention_layer(params[layer], x, cache, layer, slots, num_new)[1], LAYERS, cache
    ),
    "advance": lambda params, cache, x, slots, num_new: d4.advance(cache, slots, num_new),
    "release": lambda params, cache, x, slots, num_new: d4.release(cache, slots),
}


@pytest.mark.parametrize("call", DRIVING_CALLS.values(), ids=DRIVING_CALLS)
def test_rule_6_every_leaf_of_a_donated_cache_keeps_its_buffer(call):
    cache, slots = admitted(**TRAINED)
    num_new = ids(1, 1, 1, 1)
    cache, _ = d4.prepare_forward(cache, slots, num_new)
    cache = own_buffers(cache)
    before = pointers(cache)
    x = jnp.asarray(sequence(1, BATCH, CFG.hidden_size)[:, None])
    after = jax.block_until_ready(jax.jit(call, donate_argnums=1)(random_params(), cache, x, slots, num_new))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert pointers(after) == before


# ---- 7: one trace per shape -----------------------------------------------------------------------------------------


def test_rule_7_three_hundred_steps_with_arrivals_and_departures_trace_once():
    cache, slots = admitted()
    x = jnp.asarray(sequence(1, BATCH, CFG.hidden_size)[:, None])
    calls: tuple[Any, ...] = (step, _admit, d4.release)
    sizes = None
    rng = np.random.default_rng(0)
    lengths = np.zeros(BATCH, int)
    for i in range(300):
        num_new = (rng.random(BATCH) < 0.8) & (lengths < driver.CONTEXT)
        _, cache, ok = step(random_params(), x, cache, slots, jnp.asarray(num_new, jnp.int32), layers=LAYERS)
        assert ok
        lengths += num_new
        leaving = (lengths >= driver.CONTEXT) | (rng.random(BATCH) < 0.02)
        cache = d4.release(cache, jnp.where(jnp.asarray(leaving), slots, -1))
        cache, new, ok = d4.admit(cache, BATCH, where=jnp.asarray(leaving))
        slots = jnp.where(jnp.asarray(leaving), new, slots)
        lengths[leaving] = 0
        assert cache.seq_lens[slots].tolist() == lengths.tolist()
        traced = driver.TRACES["step"], *(call._cache_size() for call in calls)
        sizes = sizes or traced  # after the first step
        assert traced == sizes, f"step {i} traced again"


# ---- 8: bad numbers stay in their request ---------------------------------------------------------------------------


@on_the_kernels_too
@formats
@pytest.mark.parametrize("bad", first_of([np.nan, -np.inf]))
def test_rule_8_bad_numbers_in_one_request_stay_in_its_rows(options, bad):
    cache, slots = admitted(**options)
    xs = inputs((29, 33, 13, 40))
    spoilt = [x.copy() for x in xs]
    spoilt[1][[8, 17]] = bad
    splits = [even_split(len(x), 6) for x in xs]
    want, clean = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    got, foul = feed(random_params(), spoilt, cache, slots, splits, layers=LAYERS, width=TOKENS)
    for layer in LAYERS:
        for row in (0, 2, 3):
            np.testing.assert_array_equal(got[layer][row], want[layer][row])
        # Queries before the chunk that brings the bad token are as they were, and the bad token's own is bad.
        np.testing.assert_array_equal(got[layer][1][:6], want[layer][1][:6])
        assert not np.isfinite(got[layer][1][8]).all()
    for row in (0, 2, 3):
        assert_same(contents(foul, int(slots[row])), contents(clean, int(slots[row])))
    assert_same(foul.tables, clean.tables)
    # The next occupant of the slot and its blocks sees nothing of it.
    foul = d4.release(foul, slots)
    foul, slots, ok = d4.admit(foul, BATCH)
    assert ok
    again, _ = feed(random_params(), xs, foul, slots, splits, layers=LAYERS, width=TOKENS)
    assert_same(again, want)
