"""Failures seen in other implementations of such caches, by number.

 1. One row of a batch completes an entry, its neighbours are in the middle of a block.
 2. The first entry comes with the fourth token exactly; a prompt may be shorter than that.
 3. Prompts end, and decoding goes on, at the edges of the window and of a block: 127 to 130, 255 to 257 and so on.
 4. A slot's next occupant must not see what the last one left of the overlap half.
 5. The token that completes an entry sees it: floor((p + 1) / ratio) are visible, not floor(p / ratio).
 6. Padding is not pooled; a sequence shorter than the window has its entries.
 7. NaN or infinite scores of one row give no pick out of range, and other rows nothing at all.
 8. Flat indices into a large pool are beyond an int32.
 9. A chunk is longer than the window's ring: the newest tokens stay.
10. Decoding token by token keeps the overlap half that prefill has.
11. State is addressed by slot, not by the row of the batch, whose order may change.
12. Releasing or resetting one sequence leaves the others alone; window and pool are as large as what they hold.
13. A part of a stored row is never written: every byte is, and no other.
14. An allocation that fails changes nothing, and no block is free while it is held.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.layer.reference import reference_layer
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    BLOCKS,
    CFG,
    LAYERS,
    THREE_FORMATS,
    TOKENS,
    assert_same,
    contents,
    feed,
    ids,
    moved_values,
    poisoned,
    random_params,
    sequence,
    small_plan,
    step,
)

# fp32 sums in another order: values of rms about 1 differ by a few 1e-7, entries and outputs by a few 1e-6.
TOLERANCE = 2e-5
LENGTH = 44
CSA, HCA = d4.AttentionType.CSA, d4.AttentionType.HCA


def tokens(row, length=LENGTH):
    return sequence(100 + row, LENGTH, CFG.hidden_size)[:length]


@functools.cache
def reference(row) -> Any:
    """Recompute every layer over a row's tokens without a cache. A prefix of the row gives a prefix of the result."""
    x = jnp.asarray(tokens(row))
    return [reference_layer(params, x, CFG, layer) for layer, params in enumerate(random_params())]


def start(n=BATCH, **options) -> Any:
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**options)), n)
    assert ok
    return cache, slots


def play(cache, slots, splits, rows: Sequence[int] = range(BATCH), width=TOKENS) -> Any:
    """Feed the tokens of ``rows`` from the first on, and compare every output with the reference. Returns the cache."""
    xs = [tokens(row, sum(split)) for row, split in zip(rows, splits, strict=True)]
    outputs, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=width)
    for layer in LAYERS:
        for row, output in zip(rows, outputs[layer], strict=True):
            want = np.asarray(reference(row)[layer].out)[: len(output)]
            np.testing.assert_allclose(output, want, rtol=0, atol=TOLERANCE, err_msg=f"layer {layer}, row {row}")
    return cache


def entries(cache, kind, slots):
    """Return the entries of the kind's layer, f32 [B, all, dim], and how many each request has completed."""
    counts = cache.seq_lens[slots] // CFG.ratio(kind)
    pool = cache.stack(kind).pool
    rows = d4.pieces.gather_all_compressed(pool, 0, cache.tables.block_table, slots, counts, plan=cache.plan)
    return np.asarray(rows), counts.tolist()


def check_entries(cache, slots, rows: Sequence[int] = range(BATCH)):
    """Check that every completed entry equals the reference's, and that there is nothing after the last."""
    for layer, kind in ((1, CSA), (2, HCA)):
        got, counts = entries(cache, kind, slots)
        for b, row in enumerate(rows):
            want = np.asarray(reference(row)[layer].entries)[: counts[b]]
            np.testing.assert_allclose(got[b, : counts[b]], want, rtol=0, atol=TOLERANCE)
            assert not got[b, counts[b] :].any()


@pytest.mark.slow
def test_case_1_one_row_flushes_while_its_neighbours_are_in_the_middle_of_a_block():
    cache, slots = start()
    splits = [[8, 7, 1, 8], [6, 8, 8, 1], [1, 3, 8, 8], [8, 8, 8, 8]]  # phases of 4 and of 16 differ at every step
    cache = play(cache, slots, splits)
    assert [length % 4 for length in (24, 23, 20, 32)] == [0, 3, 0, 0]
    check_entries(cache, slots)
    # One decode step in which exactly one row completes an entry.
    before = [contents(cache, int(slot)) for slot in slots]
    x = np.stack([tokens(b)[n : n + 1] for b, n in enumerate((24, 23, 20, 32))])
    _, cache, ok = step(random_params(), jnp.asarray(x), cache, slots, ids(1, 1, 1, 1), layers=LAYERS)
    assert ok
    flushed = [
        moved_values(contents(cache, int(slot))["csa pool"], old["csa pool"], 0.0)[0] > 0
        if contents(cache, int(slot))["blocks"] == old["blocks"]
        else True
        for slot, old in zip(slots, before, strict=True)
    ]
    assert flushed == [False, True, False, False]


@pytest.mark.slow
def test_case_2_the_first_entry_comes_with_the_fourth_token_and_prompts_may_be_shorter():
    cache, slots = start()
    cache = play(cache, slots, [[1], [2], [3], [4]])
    _, counts = entries(cache, CSA, slots)
    assert counts == [0, 0, 0, 1]
    assert cache.tables.block_lens[slots].tolist() == [0, 0, 0, 1]
    check_entries(cache, slots)
    cache, slots = start()
    cache = play(cache, slots, [[1, *[1] * 8], [2, *[1] * 8], [3, *[1] * 8], [4, *[1] * 8]])  # and on from there
    check_entries(cache, slots)


# Real ratios and the real window; widths are small, so that thirteen prompts and their reference take seconds.
REAL = d4.DSV4Config.tiny(
    compress_ratios=(0, 4, 128),
    sliding_window=128,
    hidden_size=24,
    num_heads=2,
    head_dim=24,
    q_lora_rank=12,
    o_groups=1,
    o_lora_rank=12,
    indexer_heads=2,
    indexer_head_dim=32,
    indexer_top_k=24,
)
EDGES = (127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513)


@functools.cache
def real_reference():
    x = sequence(3, max(EDGES) + 3, REAL.hidden_size)
    params = random_params(REAL)
    return x, [reference_layer(params[layer], jnp.asarray(x), REAL, layer) for layer in LAYERS]


@functools.cache
def real_prefill(short):
    """Feed prompts ``short`` tokens below each edge, in one padded batch. Returns (outputs, cache, slots)."""
    x, _ = real_reference()
    plan = d4.plan_cache(REAL, max_requests=len(EDGES), max_context=520, kv_format="f32", indexer_format="f32")
    cache, slots, ok = d4.admit(d4.init_cache(plan), len(EDGES))
    assert ok
    lengths = [edge - short for edge in EDGES]
    outputs, cache = feed(
        random_params(REAL), [x[:n] for n in lengths], cache, slots, [[n] for n in lengths], layers=LAYERS,
        width=max(EDGES),
    )  # fmt: skip
    return outputs, cache, slots


@pytest.mark.slow
def test_case_3_prompts_that_end_at_the_edges_of_window_and_block():
    _, want = real_reference()
    for short in (0, 3):
        outputs, _, _ = real_prefill(short)
        for layer in LAYERS:
            for output in outputs[layer]:
                expected = np.asarray(want[layer].out)[: len(output)]
                np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_case_3_decoding_across_the_edges_of_window_and_block():
    x, want = real_reference()
    _, cache, slots = real_prefill(3)
    for i in range(6):
        at = np.asarray(EDGES) - 3 + i
        ys, cache, ok = step(
            random_params(REAL), jnp.asarray(x[at][:, None]), cache, slots, ids(*[1] * len(EDGES)), layers=LAYERS
        )
        assert ok
        for layer in LAYERS:
            expected = np.asarray(want[layer].out)[at]
            np.testing.assert_allclose(np.asarray(ys[layer])[:, 0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_case_4_the_next_occupant_of_a_slot_does_not_see_the_last_ones_overlap_half():
    cache, slots = start()
    cache = play(cache, slots, [[8, 3], [8], [8, 8, 8], [7]])
    for first in (1, 2, 3, 4):  # prompts no longer than a block leave the previous block's stream as the reset left it
        cache = d4.release(cache, slots)
        cache, slots, ok = d4.admit(cache, BATCH)
        assert ok
        cache = play(cache, slots, [[first, 5, 4], [first, 1, 1, 1], [first, 8], [first]], rows=(3, 2, 1, 0))
        check_entries(cache, slots, rows=(3, 2, 1, 0))


@pytest.mark.slow
def test_case_5_an_entry_is_visible_to_the_token_that_completes_it():
    cache, slots = start()
    cache = play(cache, slots, [[8, 8], [8, 7], [4], [3]])  # the last query of rows 0 and 2 completes an entry
    for layer, ratio in ((1, 4), (2, 16)):
        for position in (2, 3, 4, 7, 14, 15, 16, 31):
            seen = np.flatnonzero(reference(0)[layer].seen[position])
            assert len(seen) == min((position + 1) // ratio, CFG.indexer_top_k)
    # Not only allowed but used: without its rows in the pool the completing token's output is another one.
    x = np.stack([tokens(0)[15:16]] * BATCH)
    one, slots = start()
    one = play(one, slots, [[8, 7]] * BATCH, rows=(0,) * BATCH)
    one, ok = d4.prepare_forward(one, slots, ids(1, 1, 1, 1))
    assert ok
    for layer in (1, 2):
        unlinked = dataclasses.replace(
            one, tables=dataclasses.replace(one.tables, block_table=jnp.full_like(one.tables.block_table, -1))
        )
        with_entry, _ = d4.attention_layer(random_params()[layer], jnp.asarray(x), one, layer, slots, ids(1, 1, 1, 1))
        without, _ = d4.attention_layer(random_params()[layer], jnp.asarray(x), unlinked, layer, slots, ids(1, 1, 1, 1))
        assert np.abs(np.asarray(with_entry) - np.asarray(without)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30, -3.0])
def test_case_6_padding_tokens_are_not_pooled(padding):
    cache, slots = start()
    done = [0] * BATCH
    for num_new in ([3, 1, 8, 0], [2, 8, 1, 5], [7, 3, 7, 3]):
        x = np.full((BATCH, TOKENS, CFG.hidden_size), padding, np.float32)
        for b, n in enumerate(num_new):
            x[b, :n] = tokens(b)[done[b] : done[b] + n]
        ys, cache, ok = step(random_params(), jnp.asarray(x), cache, slots, ids(*num_new), layers=LAYERS)
        assert ok
        for layer in LAYERS:
            for b, n in enumerate(num_new):
                want = np.asarray(reference(b)[layer].out)[done[b] : done[b] + n]
                np.testing.assert_allclose(np.asarray(ys[layer])[b, :n], want, rtol=0, atol=TOLERANCE)
                assert not np.asarray(ys[layer])[b, n:].any()
        done = [d + n for d, n in zip(done, num_new, strict=True)]
    check_entries(cache, slots)


def test_case_6_a_sequence_shorter_than_the_window_has_its_entries():
    cache, slots = start()
    cache = play(cache, slots, [[4], [8], [8, 4], [8, 7]])
    _, counts = entries(cache, CSA, slots)
    assert max(cache.seq_lens.tolist()) < CFG.sliding_window
    assert counts == [1, 2, 3, 3]
    check_entries(cache, slots)


def test_case_7_bad_scores_of_one_row_give_no_pick_out_of_range_and_none_to_others():
    cache, slots = start()
    cache = play(cache, slots, [[8] * 4, [8, 2], [3], [8] * 5])
    layer = PooledLayer(
        pool=cache.csa.pool, index=jnp.int32(0), block_table=cache.tables.block_table, slots=slots, plan=cache.plan
    )
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((BATCH, 1, CFG.indexer_heads, CFG.indexer_head_dim), np.float32)
    weights = rng.standard_normal((BATCH, 1, CFG.indexer_heads), np.float32)
    visible = cache.seq_lens[slots][:, None] // 4
    assert visible[:, 0].tolist() == [8, 2, 0, 10]

    want = np.asarray(d4.pieces.select_entries(jnp.asarray(queries), jnp.asarray(weights), layer, visible))
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = weights.copy()
        spoilt[0] = bad  # scores NaN, or +-inf and NaN where relu gives 0
        got = np.asarray(d4.pieces.select_entries(jnp.asarray(queries), jnp.asarray(spoilt), layer, visible))
        np.testing.assert_array_equal(got[1:], want[1:])
        # Fewer entries than picks: all of them are picked, each once, whatever their scores; -inf does not lose to
        # what is not there.
        assert sorted(got[0, 0][got[0, 0] >= 0]) == list(range(8))
    for row, count in ((1, 2), (2, 0), (3, 10)):
        assert sorted(want[row, 0][want[row, 0] >= 0]) == list(range(count))


@pytest.mark.sweep(guard="test_every_kernel_compiled_for")
def test_case_8_a_pool_of_more_than_two_to_the_31_elements():
    """Uses blocks at both ends of a pool whose flat index does not fit into int32."""
    cfg = d4.DSV4Config.tiny(
        compress_ratios=(4,), hidden_size=16, num_heads=2, head_dim=130, rope_dim=2, q_lora_rank=8, o_groups=1,
        o_lora_rank=8, indexer_heads=2, indexer_head_dim=32, indexer_top_k=40,
    )  # fmt: skip
    params, x = random_params(cfg), sequence(1, 200, cfg.hidden_size)

    @functools.partial(jax.jit, donate_argnums=0)
    def forward(cache, x, slots, num_new):
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        y, cache = d4.attention_layer(params[0], x, cache, 0, slots, num_new)
        return y, d4.advance(cache, slots, num_new), ok

    def run(num_blocks):
        plan = d4.plan_cache(
            cfg, max_requests=1, max_context=256, kv_format="fp8_tile64", indexer_format="mxfp4", num_blocks=num_blocks
        )
        admitted: Any = d4.admit(d4.init_cache(plan), 1)
        cache, slots, _ = admitted
        # The free list is a stack: the last block is taken first; block 0 shall be the second.
        free = cache.tables.free_blocks.at[num_blocks - 2].set(0).at[0].set(num_blocks - 2)
        cache = dataclasses.replace(cache, tables=dataclasses.replace(cache.tables, free_blocks=free))
        outputs = []
        for at in range(0, len(x), 50):
            y, cache, ok = forward(cache, jnp.asarray(x[None, at : at + 50]), slots, ids(50))
            assert ok
            outputs.append(np.asarray(y)[0])
        assert cache.tables.block_table[slots[0]].tolist() == [num_blocks - 1, 0]
        rows = d4.pieces.gather_all_compressed(cache.csa.pool, 0, cache.tables.block_table, slots, ids(50), plan=plan)
        return np.concatenate(outputs), np.asarray(rows), cache

    small, small_rows, _ = run(3)
    large, large_rows, cache = run(530_000)
    nope = cache.csa.pool.entries.nope
    assert nope.size > 2**31
    np.testing.assert_array_equal(large, small)
    np.testing.assert_array_equal(large_rows, small_rows)
    stored = np.asarray(nope)[0]
    assert stored[-1].any(axis=-1).tolist() == [True] * 32
    assert stored[0].any(axis=-1).tolist() == [True] * 18 + [False] * 14
    # No other byte was written; the places that a wrapped index would hit are among those looked at.
    assert not any(stored[i : i + 50_000].any() for i in range(1, len(stored) - 1, 50_000) if i + 50_000 < len(stored))


@pytest.mark.slow
def test_case_9_of_a_chunk_longer_than_the_ring_the_newest_tokens_stay():
    x, want = real_reference()
    _, cache, slots = real_prefill(0)
    n_win = REAL.sliding_window
    for layer in LAYERS:
        kind, _ = cache.locate(layer)
        state = cache.stack(kind).state
        pos = np.asarray(state.pos)[0]
        rows = np.asarray(cache.plan.rows.decode(jax.tree.map(lambda leaf: leaf[0], state.window)))
        for slot, length in zip(slots.tolist(), EDGES, strict=True):
            newest = np.arange(max(0, length - n_win), length)
            np.testing.assert_array_equal(pos[slot, newest % n_win], newest)
            expected = np.asarray(want[layer].rows)[newest]
            np.testing.assert_allclose(rows[slot, newest % n_win], expected, rtol=0, atol=TOLERANCE)
            if length < n_win:
                assert (pos[slot, length:] == -1).all()
    assert len(x) > 4 * n_win


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_case_10_token_by_token_decode_keeps_the_overlap_half_that_prefill_has():
    cache, slots = start()
    cache = play(cache, slots, [[1] * 13, [1] * 18, [1] * 9, [1] * 33], width=1)
    check_entries(cache, slots)
    # The half matters: entry 1 pooled without block 0's b-stream is another one.
    x, params = jnp.asarray(tokens(0, 8)), random_params()[1]
    late = reference_layer(params, x[4:], CFG, 1).entries
    assert late is not None
    assert np.abs(np.asarray(late)[0, :-8] - np.asarray(reference(0)[1].entries)[1, :-8]).max() > 0.01


def test_case_11_state_belongs_to_the_slot_and_not_to_the_row_of_the_batch():
    cache, slots = start()
    rng, done = np.random.default_rng(5), np.zeros(BATCH, int)
    while (done < LENGTH - TOKENS).any():
        order = rng.permutation(BATCH)
        num_new = rng.integers(0, TOKENS + 1, BATCH) * (done < LENGTH - TOKENS)
        x = np.full((BATCH, TOKENS, CFG.hidden_size), np.nan, np.float32)
        for row, request in enumerate(order):
            n = num_new[request]
            x[row, :n] = tokens(request)[done[request] : done[request] + n]
        ys, cache, ok = step(
            random_params(), jnp.asarray(x), cache, slots[jnp.asarray(order)], ids(*num_new[order]), layers=LAYERS
        )
        assert ok
        for layer in LAYERS:
            for row, request in enumerate(order):
                n = num_new[request]
                want = np.asarray(reference(request)[layer].out)[done[request] : done[request] + n]
                np.testing.assert_allclose(np.asarray(ys[layer])[row, :n], want, rtol=0, atol=TOLERANCE)
        done += num_new
    check_entries(cache, slots)


def test_case_12_releasing_and_resetting_one_sequence_leaves_the_others_as_they_are():
    cache, slots = start()
    cache = play(cache, slots, [[8, 5], [8] * 3, [2], [8, 8]])
    others = [int(slot) for slot in slots if int(slot) != int(slots[1])]
    before = {slot: contents(cache, slot) for slot in others}
    cache = d4.release(cache, slots[1:2])
    cache, new, ok = d4.admit(cache, 1)
    assert ok
    for slot in others:
        assert_same(contents(cache, slot), before[slot])
    cache = play(cache, jnp.concatenate([new, ids(-1, -1, -1)]), [[8, 8, 8], [], [], []], rows=(3, 0, 0, 0))
    for slot in others:
        assert_same(contents(cache, slot), before[slot])


def test_case_12_window_and_pool_are_each_as_large_as_what_they_hold():
    plan = small_plan()
    cache: Any = d4.init_cache(plan)
    assert cache.swa.pool is None
    for kind, per_block in ((CSA, 4), (HCA, 1)):
        stack = cache.stack(kind)
        assert stack.pool.entries.nope.shape == (1, BLOCKS, per_block, CFG.head_dim - CFG.rope_dim)
        assert stack.state.window.nope.shape == (1, plan.max_requests, CFG.sliding_window, CFG.head_dim - CFG.rope_dim)
    assert d4.cache.tree_bytes(cache) == plan.memory_bytes()


@pytest.mark.parametrize("options", first_of(THREE_FORMATS.values()), ids=THREE_FORMATS)
def test_case_13_every_byte_of_every_part_is_written_and_no_other(options):
    cache = poisoned(d4.init_cache(small_plan(**options)))
    garbage = jax.tree.map(np.asarray, cache)
    cache, slots, ok = d4.admit(cache, BATCH)
    assert ok
    x = np.full((BATCH, TOKENS, CFG.hidden_size), np.nan, np.float32)
    x[0] = tokens(0, 8)
    x[2] = tokens(2, 8)
    counts = [8, 0, 8, 0]
    for i in range(2):
        _, cache, ok = step(random_params(), jnp.asarray(x), cache, slots, ids(*counts), layers=LAYERS)
        assert ok
        for row in (0, 2):
            x[row] = tokens(row)[8 * (i + 1) : 8 * (i + 2)]
    plan, table = cache.plan, np.asarray(cache.tables.block_table)
    for layer, kind in enumerate(d4.AttentionType):
        stack, was = cache.stack(kind), getattr(garbage, kind)
        for row in (0, 2):
            stored = plan.rows.decode(
                jax.tree.map(lambda leaf, slot=int(slots[row]): leaf[0, slot], stack.state.window)
            )
            written = np.asarray(stored)
            want = np.asarray(reference(row)[layer].rows)[:16]
            assert (np.linalg.norm(written - want, axis=1) < 0.05 * np.linalg.norm(want, axis=1)).all()
        if stack.pool is None:
            continue
        written = np.zeros(stack.pool.entries.nope.shape[:3], bool)
        for row in (0, 2):
            count = 16 // CFG.ratio(kind)
            block = table[int(slots[row]), 0]
            written[:, block, :count] = True
            stored = plan.rows.decode(jax.tree.map(lambda leaf, block=block: leaf[0, block], stack.pool.entries))
            want = np.asarray(reference(row)[layer].entries)[:count]
            # A row of E4M3 is off by 3 % (rms); a part that was not written is NaN or off by all of it.
            error = np.linalg.norm(np.asarray(stored)[:count] - want, axis=1)
            assert (error < 0.05 * np.linalg.norm(want, axis=1)).all()
            if kind == CSA:
                keys = plan.keys.decode(jax.tree.map(lambda leaf, block=block: leaf[0, block], stack.pool.indexer_keys))
                want = np.asarray(reference(row)[layer].indexer_entries)[:count]
                error = np.linalg.norm(np.asarray(keys)[:count] - want, axis=1)
                assert (error < 0.2 * np.linalg.norm(want, axis=1)).all()  # FP4: 12 % (rms)
        for new, old in zip(jax.tree.leaves(stack.pool), jax.tree.leaves(was.pool), strict=True):
            assert np.asarray(new)[~written].tobytes() == old[~written].tobytes()


def test_case_14_a_failed_allocation_leaves_no_partial_change_and_a_retry_goes_on():
    cache, slots = start()
    splits = [[8] * 5, [8] * 5, [8] * 5, [8, 8]]
    cache = play(cache, slots, splits)
    assert int(cache.tables.num_free[0]) == BLOCKS - 3 * 3 - 1
    # The first three rows would fit into the four free blocks, all four do not: no row gets anything.
    after, ok = d4.prepare_forward(cache, slots, ids(40, 24, 24, 4))
    assert not ok
    assert_same(after, cache)
    before = {int(slot): contents(cache, int(slot)) for slot in slots[1:]}
    cache = d4.release(cache, slots[:1])
    table = np.asarray(cache.tables.block_table)
    owned = table[table >= 0].tolist()
    free = np.asarray(cache.tables.free_blocks)[: int(cache.tables.num_free[0])].tolist()
    assert sorted(owned + free) == list(range(BLOCKS)), "no block is free while it is held"
    for slot, held in before.items():
        assert_same(contents(cache, slot), held)
    cache, new, ok = d4.admit(cache, 1)
    assert ok
    cache = play(cache, jnp.concatenate([new, ids(-1, -1, -1)]), [[8] * 5, [], [], []], rows=(3, 0, 0, 0))
    for slot, held in before.items():
        assert_same(contents(cache, slot), held)
    check_entries(cache, jnp.concatenate([new, slots[1:]]), rows=(3, 1, 2, 3))
