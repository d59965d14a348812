"""Bad input changes nothing.

A wrong shape or dtype is an error that says what was given. Bad data gives ``ok`` False.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from tests.support.driver import (
    BATCH,
    CFG,
    CONTEXT,
    LAYERS,
    REQUESTS,
    TOKENS,
    assert_same,
    feed,
    ids,
    random_params,
    sequence,
    small_plan,
    step,
)

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.fixture(scope="module")
def filled():
    """Return a cache with four requests of a few tokens, and their slots."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan()), BATCH)
    assert ok
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((8, 5, 3, 4))]
    _, cache = feed(random_params(), xs, cache, slots, [[len(x)] for x in xs], layers=LAYERS, width=TOKENS)
    return cache, slots


def tokens():
    return jnp.asarray(sequence(1, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1))


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, -1, np.int64(1), np.int32(-1), jnp.int32(1)], ids=repr)
def test_an_index_past_the_stack_is_an_error(filled, index):
    cache, slots = filled
    with pytest.raises(ValueError, match=rf"index must be in \[0, 1\) for CSA layers, got {int(index)}"):
        d4.attention_layer_at(random_params()[1], tokens(), cache, "csa", index, slots, ids(1, 1, 1, 1))


@pytest.mark.slow
def test_a_traced_index_past_the_stack_leaves_every_row_alone(filled):
    cache, slots = filled
    counts = ids(2, TOKENS, 1, 0)
    granted, ok = d4.prepare_forward(cache, slots, counts)
    assert ok
    run = jax.jit(
        lambda index: d4.attention_layer_at(random_params()[1], tokens(), granted, "csa", index, slots, counts)
    )
    y, after = run(jnp.int32(0))
    assert np.asarray(y)[:3].any(axis=(1, 2)).all()
    assert (d4.advance(after, slots, counts).seq_lens - cache.seq_lens)[slots].tolist() == counts.tolist()
    for index in (1, -1, INT_MAX, INT_MIN):
        y, after = run(jnp.int32(index))
        assert not np.asarray(y).any()
        assert_same(d4.advance(after, slots, counts).seq_lens, cache.seq_lens)
        assert_same(dataclasses.replace(after, tables=granted.tables), granted)


@pytest.mark.parametrize(("batch", "width"), [(0, 3), (BATCH, 0)], ids=["no rows", "no tokens"])
def test_an_empty_batch_is_a_no_op(filled, batch, width):
    cache, slots = filled
    x = jnp.zeros((batch, width, CFG.hidden_size), jnp.float32)
    run = jax.jit(lambda x, cache, slots: d4.attention_layer(random_params()[1], x, cache, 1, slots, 0 * slots))
    y, after = run(x, cache, slots[:batch])
    assert y.shape == x.shape
    assert_same(after, cache)


# ---- shapes and dtypes ----------------------------------------------------------------------------------------------

ONES = np.ones(BATCH, np.int32)
BAD_BATCHES = {  # slots, num_new, what the message says
    "float slots": (np.ones(BATCH, np.float32), ONES, "slots: expected int32 [B], got float32[4]"),
    "matrix of slots": (np.ones((BATCH, 1), np.int32), ONES, "slots: expected int32 [B], got int32[4, 1]"),
    "one slot": (np.int32(1), ONES, "slots: expected int32 [B], got int32[]"),
    "a list": ([0, 1, 2, 3], ONES, "slots: expected int32 [B], got list"),
    "int16 counts": (ONES, np.ones(BATCH, np.int16), "num_new: expected int32 [B=4], got int16[4]"),
    "too few counts": (ONES, np.ones(BATCH - 1, np.int32), "num_new: expected int32 [B=4], got int32[3]"),
    "counts of rank 0": (ONES, np.int32(1), "num_new: expected int32 [B=4], got int32[]"),
}


@pytest.mark.parametrize(("slots", "num_new", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_malformed_batch_is_an_error_that_names_it(filled, slots, num_new, message):
    cache, _ = filled
    calls = [
        lambda: d4.prepare_forward(cache, slots, num_new),
        lambda: d4.advance(cache, slots, num_new),
        lambda: d4.acquire(cache, 0, slots, num_new),
        lambda: d4.attention_layer(random_params()[0], tokens(), cache, 0, slots, num_new),
    ]
    if message.startswith("slots"):
        calls.append(lambda: d4.release(cache, slots))
        calls.append(lambda: d4.pieces.reset_slots(cache.swa.state, slots, plan=cache.plan, kind=d4.AttentionType.SWA))
    for call in calls:
        with pytest.raises((AssertionError, TypeError)) as error:
            call()
        if not isinstance(slots, list):  # jax itself refuses a list where an array is due
            assert error.type is AssertionError
            assert message in str(error.value)


BAD_X = {
    "rank 2": (
        (BATCH, CFG.hidden_size),
        jnp.float32,
        "x: expected float32 or bfloat16 [B=4, T, hidden_size=64], got float32[4, 64]",
    ),
    "batch": ((BATCH + 1, 2, CFG.hidden_size), jnp.float32, "got float32[5, 2, 64]"),
    "width": ((BATCH, 2, CFG.hidden_size + 1), jnp.float32, "got float32[4, 2, 65]"),
    "dtype": ((BATCH, 2, CFG.hidden_size), jnp.int32, "got int32[4, 2, 64]"),
}


@pytest.mark.parametrize(("shape", "dtype", "message"), BAD_X.values(), ids=BAD_X)
def test_malformed_tokens_are_an_error_that_names_them(filled, shape, dtype, message):
    cache, slots = filled
    x = jnp.zeros(shape, dtype)
    compressor, indexer = random_params()[1].compressor, random_params()[1].indexer
    for call in (
        lambda: d4.attention_layer(random_params()[0], x, cache, 0, slots, ids(1, 1, 1, 1)),
        lambda: d4.attention_layer_at(random_params()[0], x, cache, "swa", 0, slots, ids(1, 1, 1, 1)),
        lambda: d4.acquire(cache, 1, slots, ids(1, 1, 1, 1)).flush_compression(compressor, x, indexer),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)) as error:
            call()
        assert "x: expected float32 or bfloat16 [B=4, T, hidden_size=64]" in str(error.value)


def test_malformed_weights_are_an_error_that_names_them(filled):
    cache, slots = filled
    params = random_params()[1]
    for bad, message in (
        (
            dataclasses.replace(params, sinks=params.sinks[1:]),
            "params.sinks: expected float32 or bfloat16 [axis 0=4], got float32[3]",
        ),
        (
            dataclasses.replace(
                params, entry_pool=dataclasses.replace(params.entry_pool, norm=jnp.ones(136, jnp.int32))
            ),
            "params.entry_pool.norm: expected float32 or bfloat16 [axis 0=136], got int32[136]",
        ),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            d4.attention_layer(bad, tokens(), cache, 1, slots, ids(1, 1, 1, 1))


def test_weights_of_another_kind_are_an_error(filled):
    cache, slots = filled
    for layer, other in ((0, 1), (1, 2), (2, 0), (1, 0)):
        with pytest.raises((AssertionError, ValueError)):
            d4.attention_layer(random_params()[other], tokens(), cache, layer, slots, ids(1, 1, 1, 1))


def test_a_malformed_mask_of_admissions_is_an_error(filled):
    cache, _ = filled
    for where, message in (
        (jnp.ones(3, jnp.bool), "where: expected bool [n=2], got bool[3]"),
        (jnp.ones(2, jnp.int32), "where: expected bool [n=2], got int32[2]"),
        (jnp.ones((2, 1), jnp.bool), "where: expected bool [n=2], got bool[2, 1]"),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            d4.admit(cache, 2, where=where)


def test_malformed_rows_are_errors_in_every_piece(filled):
    cache, slots = filled
    plan, table, zero = cache.plan, cache.tables.block_table, ids(0, 0, 0, 0)
    rows = jnp.zeros((BATCH, 2, CFG.head_dim))
    keys = jnp.zeros((BATCH, 2, CFG.indexer_head_dim))
    swa, csa, hca = cache.swa, cache.csa, cache.hca
    sound = d4.pieces.NewEntries(entries=rows, keys=keys, block_table=table, slots=slots, first=zero, count=zero)

    def flush(pool: d4.PagedPool, backend: str = "xla", **changed: jax.Array | None) -> d4.PagedPool:
        new = dataclasses.replace(sound, **changed)
        return d4.pieces.flush_entries(pool, 0, new, plan=plan, backend=backend)

    for call, message in (
        (
            lambda: d4.pieces.append_swa(swa.state, 0, rows[..., 1:], slots, zero, zero, plan=plan),
            "kv: expected float32 [B=4, T, head_dim=136], got float32[4, 2, 135]",
        ),
        (
            lambda: d4.pieces.append_swa(swa.state, 0, rows.astype(jnp.bfloat16), slots, zero, zero, plan=plan),
            "kv: expected float32 [B=4, T, head_dim=136], got bfloat16[4, 2, 136]",
        ),
        (
            lambda: d4.pieces.append_swa(swa.state, 0, rows, slots, zero[1:], zero, plan=plan),
            "start: expected int32 [B=4], got int32[3]",
        ),
        (
            lambda: flush(hca.pool, entries=rows[0], keys=None),
            "new.entries: expected float32 [B=4, E, dim=136], got float32[2, 136]",
        ),
        (
            lambda: flush(csa.pool, keys=rows),
            "new.keys: expected float32 [B=4, E=2, dim=128], got float32[4, 2, 136]",
        ),
        (
            lambda: flush(csa.pool, entries=rows[:, :1]),
            "new.keys: expected float32 [B=4, E=1, dim=128], got float32[4, 2, 128]",
        ),
        (
            lambda: flush(csa.pool, "pallas_simulated", entries=rows[..., 1:]),
            "new.entries: expected float32 [B=4, E, dim=136], got float32[4, 2, 135]",
        ),
        (
            lambda: flush(csa.pool, count=zero[1:]),
            "new.count: expected int32 [B=4], got int32[3]",
        ),
        (
            lambda: d4.pieces.rotate_csa(csa.state, 0, slots, zero),
            "complete: expected bool [B=4], got int32[4]",
        ),
        (
            lambda: d4.pieces.reset_hca(hca.state, 0, slots, jnp.ones(3, jnp.bool), plan=plan),
            "complete: expected bool [B=4], got bool[3]",
        ),
        (
            lambda: d4.pieces.gather_swa(swa.state, 0, slots, zero.astype(jnp.float32), plan=plan),
            "seq_lens: expected int32 [B=4], got float32[4]",
        ),
        (
            lambda: d4.pieces.gather_compressed(csa.pool, 0, table[0], slots, zero, plan=plan),
            "block_table: expected int32 [requests, max_blocks], got int32[5]",
        ),
        (
            lambda: d4.pieces.gather_all_compressed(csa.pool, 0, table, slots, zero[1:], plan=plan),
            "num_entries: expected int32 [B=4], got int32[3]",
        ),
    ):
        with pytest.raises(AssertionError, match=re.escape(message)):
            call()


def test_picks_that_are_no_whole_numbers_or_of_another_batch_are_an_error(filled):
    cache, slots = filled
    for picks in (jnp.zeros((BATCH, 2), jnp.float32), jnp.zeros((BATCH - 1, 2), jnp.int32)):
        with pytest.raises(AssertionError, match="picks"):
            d4.pieces.gather_compressed(cache.csa.pool, 0, cache.tables.block_table, slots, picks, plan=cache.plan)


# ---- bad data -------------------------------------------------------------------------------------------------------

FREE = REQUESTS - 1  # the one slot that nobody holds
BAD_DATA = {  # slots, num_new
    "slot -2": ([0, 1, -2, 3], [1, 1, 1, 1]),
    "slot below int16": ([0, 1, -70000, 3], [1, 1, 1, 1]),
    "smallest slot": ([INT_MIN, 1, 2, 3], [1, 1, 1, 1]),
    "slot one past the last": ([0, 1, 2, REQUESTS], [1, 1, 1, 1]),
    "largest slot": ([0, 1, 2, INT_MAX], [1, 1, 1, 1]),
    "repeated slot": ([0, 1, 1, 3], [1, 1, 1, 1]),
    "repeated slot at unequal counts": ([3, 1, 2, 3], [1, 1, 1, 2]),
    "slot not admitted": ([0, FREE, 2, 3], [1, 1, 1, 1]),
    "context past the plan": ([0, 1, 2, 3], [CONTEXT - 8 + 1, 0, 0, 0]),
    "no blocks left": ([0, 1, 2, 3], [72, 75, 77, 76]),
    "negative count": ([0, 1, 2, 3], [1, -1, 1, 1]),
    "smallest count": ([0, 1, 2, 3], [1, INT_MIN, 1, 1]),
    "largest count": ([0, 1, 2, 3], [1, INT_MAX, 1, 1]),
}


@pytest.mark.parametrize(("rows", "counts"), BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data_comes_back_as_not_ok_and_changes_nothing(filled, rows, counts):
    cache, _ = filled
    rows, counts = ids(*rows), ids(*counts)
    after, ok = d4.prepare_forward(cache, rows, counts)
    assert not ok
    assert_same(after, cache)
    ys, after, ok = step(random_params(), tokens(), cache, rows, counts, layers=LAYERS)
    assert not ok
    assert_same(after, cache)
    assert not any(np.asarray(y).any() for y in ys)
    assert_same(d4.advance(cache, rows, counts), cache)
    handle = d4.acquire(cache, 0, rows, counts)
    assert not handle.num_new.any()
    assert ((handle.slots == -1) | (counts == 0)).all(), "a row without tokens may read, the others are no-ops"


def test_a_repeated_slot_or_a_bad_one_without_tokens_is_skipped(filled):
    cache, _ = filled
    _, ok = d4.prepare_forward(cache, ids(0, 0, -9, 99), ids(1, 0, 0, 0))
    assert ok


def test_more_tokens_than_the_input_holds_leave_the_row_alone(filled):
    """prepare_forward does not know T, so the layer refuses a count above it."""
    cache, slots = filled
    ys, after, ok = step(random_params(), tokens(), cache, slots, ids(2, TOKENS + 1, 2, 2), layers=LAYERS)
    assert ok
    assert not any(np.asarray(y)[1].any() for y in ys)
    assert all(np.asarray(y)[0, :2].any() for y in ys)
    for kind in d4.AttentionType:
        for new, old in zip(
            jax.tree.leaves(after.stack(kind).state), jax.tree.leaves(cache.stack(kind).state), strict=True
        ):
            assert np.asarray(new)[:, 1].tobytes() == np.asarray(old)[:, 1].tobytes()
    # The grant is withdrawn, so advance has counted the others' tokens and none of this row.
    assert (after.seq_lens - cache.seq_lens)[slots].tolist() == [2, 0, 2, 2]
    assert after.tables.prepared[slots[1]] == after.seq_lens[slots[1]]


def test_an_input_without_tokens_stores_none(filled):
    cache, slots = filled
    cache, ok = d4.prepare_forward(cache, slots, ids(2, 0, 0, 0))
    assert ok
    y, after = d4.attention_layer(random_params()[0], tokens()[:, :0], cache, 0, slots, ids(2, 0, 0, 0))
    assert y.shape == (BATCH, 0, CFG.hidden_size)
    assert_same(d4.advance(after, slots, ids(2, 0, 0, 0)).seq_lens, cache.seq_lens)


@pytest.mark.sweep(guard="test_an_index_past_the_stack_is_an_error")
def test_pieces_and_handles_leave_alone_a_row_that_names_more_than_there_is(filled):
    cache, slots = filled
    plan, counts = cache.plan, ids(TOKENS + 1, 0, TOKENS + 2, INT_MAX)
    cache, _ = d4.prepare_forward(cache, slots, ids(TOKENS + 1, 0, TOKENS + 2, 0))
    kv = jnp.ones((BATCH, TOKENS, CFG.head_dim), jnp.float32)
    start = cache.seq_lens[slots]
    after = d4.pieces.append_swa.__wrapped__(cache.swa.state, 0, kv, slots, start, counts, plan=plan)
    assert_same(after, cache.swa.state)
    pool = cache.hca.pool
    new = d4.pieces.NewEntries(
        entries=kv, keys=None, block_table=cache.tables.block_table, slots=slots, first=start // 16, count=counts
    )
    after = d4.pieces.flush_entries.__wrapped__(pool, 0, new, plan=plan)
    assert_same(after, pool)
    for layer, params in enumerate(random_params()):
        handle = d4.acquire(cache, layer, slots, counts)
        assert handle.num_new.tolist() == [TOKENS + 1, 0, TOKENS + 2, 0]
        assert not (handle.positions(TOKENS) >= 0).any()
        written = [handle.write_swa(kv)]
        if params.compressor is not None:
            written.append(handle.flush_compression(params.compressor, tokens(), params.indexer))
        for after in written:
            assert_same(dataclasses.replace(after.cache, tables=cache.tables), cache)
            # The grants are withdrawn, so that no token is counted that was not stored.
            assert_same(d4.advance(after.cache, slots, counts).seq_lens, cache.seq_lens)
            assert not after.num_new.any()
            assert (after.slots == d4.acquire(after.cache, layer, slots, counts).slots).all()


def test_nothing_at_all_is_ok_and_changes_nothing(filled):
    cache, slots = filled
    for rows, counts in ((slots, ids(0, 0, 0, 0)), (ids(-1, -1, -1, -1), ids(1, 2, 3, INT_MAX))):
        ys, after, ok = step(random_params(), jnp.full_like(tokens(), jnp.nan), cache, rows, counts, layers=LAYERS)
        assert ok
        assert_same(after, cache)
        assert not any(np.asarray(y).any() for y in ys)


def test_releasing_what_is_not_held_changes_nothing(filled):
    cache, _ = filled
    assert_same(d4.release(cache, ids(FREE, -1, -2, REQUESTS)), cache)
    assert_same(d4.release(cache, ids(INT_MAX, INT_MIN, -REQUESTS, FREE)), cache)


def test_admitting_more_than_there_are_slots_changes_nothing(filled):
    cache, _ = filled
    after, slots, ok = d4.admit(cache, 2)
    assert not ok
    assert slots.tolist() == [-1, -1]
    assert_same(after, cache)


# ---- names and configurations ---------------------------------------------------------------------------------------


def test_unknown_layers_kinds_and_backends_are_errors(filled):
    cache, slots = filled
    params, x, counts = random_params()[0], tokens(), ids(1, 1, 1, 1)
    for layer in (-1, len(LAYERS)):
        for call in (
            lambda layer=layer: d4.attention_layer(params, x, cache, layer, slots, counts),
            lambda layer=layer: d4.acquire(cache, layer, slots, counts),
            lambda layer=layer: d4.porting.build_schema(CFG, layer),
        ):
            with pytest.raises(ValueError, match=re.escape(f"layer must be in [0, 3), got {layer}")):
                call()
    with pytest.raises(ValueError, match=r"backend must be None or one of .*got 'cuda'"):
        d4.attention_layer(params, x, cache, 0, slots, counts, backend="cuda")
    for backend in ({"top_k": "xla"}, ("xla",), d4.AttentionType.CSA, 3, False):
        with pytest.raises(ValueError, match=r"backend must be None or one of .*, or an OpBackends; got"):
            d4.attention_layer(params, x, cache, 0, slots, counts, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kind must be one of \['swa', 'csa', 'hca'\], got 'mla'"):
        d4.attention_layer_at(params, x, cache, "mla", 0, slots, counts)
    swa_only = d4.plan_cache(dataclasses.replace(CFG, compress_ratios=(0, 0)), max_requests=1, max_context=16)
    with pytest.raises(ValueError, match="the model has no CSA layer"):
        d4.init_cache(swa_only).stack("csa")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6, "o_groups": 4}, "num_heads=6 must be divisible by o_groups=4"),
        ({"rope_dim": 7}, "rope_dim=7 must be even"),
        ({"rope_dim": 136}, "below head_dim=136"),
        ({"indexer_head_dim": 4}, "rope_dim=8 must not exceed indexer_head_dim=4"),
        ({"indexer_head_dim": 96}, "indexer_head_dim=96 must be a power of two"),
        ({"compress_ratios": ()}, "compress_ratios is empty"),
        ({"compress_ratios": (0, 8)}, "compress_ratios holds [8]"),
        ({"hca_compression_ratio": 4}, "must differ"),
        ({"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ({"norm_eps": -1e-6}, "norm_eps must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive, got nan"),
    ],
)
def test_a_configuration_that_breaks_a_rule_says_which(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        d4.DSV4Config.tiny(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_format": "fp8"}, "kv_format must be one of"),
        ({"indexer_format": "fp4"}, "indexer_format must be one of"),
        ({"hca_tail": "none"}, "hca_tail must be one of"),
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"max_context": 0}, "max_context must be in [1, "),
        ({"max_context": (1 << 24) + 1}, "max_context must be in [1, 16777216]"),
        ({"headroom": 0.9}, "at least 1, got 0.9"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"tail_dtype": jnp.int32}, "tail_dtype must be one of"),
        ({"tail_dtype": jnp.float16}, "tail_dtype must be one of"),
    ],
)
def test_a_plan_that_breaks_a_rule_says_which(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        d4.plan_cache(CFG, **change)


def test_a_plan_where_sizes_are_expected_and_sizes_for_a_plan_are_named():
    plan, kind = d4.plan_cache(CFG), "expected a DSV4Config, got CachePlan: give it .cfg"
    sizes: Any = plan
    for call in (
        lambda: d4.plan_cache(sizes),
        lambda: d4.init_attention_params(jax.random.key(0), sizes, 0),
        lambda: d4.load_attention_params({}, sizes, 0),
        lambda: d4.porting.build_schema(sizes, 0),
    ):
        with pytest.raises(ValueError, match=f"^cfg: {re.escape(kind)}$"):
            call()
    no_plan: Any = CFG
    with pytest.raises(ValueError, match=r"^plan: expected a CachePlan, got DSV4Config$"):
        d4.init_cache(no_plan)


def test_a_format_that_does_not_fit_the_sizes_is_refused_by_the_plan():
    with pytest.raises(ValueError, match="head_dim - rope_dim = 120 must be divisible by 64"):
        d4.plan_cache(dataclasses.replace(CFG, head_dim=128), kv_format="fp8_tile64")
    with pytest.raises(ValueError, match="indexer_head_dim=16 must be divisible by the group of 32"):
        d4.plan_cache(dataclasses.replace(CFG, indexer_head_dim=16), indexer_format="mxfp4")
