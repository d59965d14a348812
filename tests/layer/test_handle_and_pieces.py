"""A layer that is run through a handle, or piece by piece, stores the same bytes as ``attention_layer``."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dsv4jax as d4
from dsv4jax.indexing import read_slots
from dsv4jax.layer import indexer
from dsv4jax.layer.compressor import finish_entries, project_streams
from dsv4jax.layer.dense import hadamard, rms_norm, wide_product
from dsv4jax.rope import apply_rope, rope_frequencies
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    CFG,
    CSA_FIRST,
    LAYERS,
    TOKENS,
    TRAINED,
    assert_same,
    feed,
    ids,
    moved_values,
    random_params,
    sequence,
    small_plan,
)

# The same arithmetic in another compilation unit: fp32 sums may run in another order.
TOLERANCE = 2e-5
KINDS = tuple(d4.AttentionType)
COMPRESSED = (d4.AttentionType.CSA, d4.AttentionType.HCA)


@functools.cache
def started(online=False) -> Any:
    """Return a cache with four requests at unrelated phases, each granted up to 8 more tokens, and those tokens."""
    plan = small_plan(**(TRAINED if online else {}))
    cache, slots, ok = d4.admit(d4.init_cache(plan), BATCH)
    assert ok
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((21, 12, 3, 30))]
    splits = [[8, 8, 5], [8, 4], [3], [8, 8, 8, 6]]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    slots = jnp.asarray([3, 0, -1, 2], jnp.int32)
    num_new = ids(8, 4, 0, 2)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert ok
    x = jnp.asarray(sequence(5, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1))
    return cache, slots, num_new, x


def give(tree):
    """Return a copy with separate buffers, which may be donated."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@functools.partial(jax.jit, static_argnames="kind")
def key_rows(params, x, start, kind):
    positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    rows = rms_norm(wide_product(x, params.kv), params.kv_norm, CFG.norm_eps)
    return apply_rope(rows, positions, rope_frequencies(CFG, kind))


@functools.partial(jax.jit, static_argnames=("plan", "kind"))
def compress(params, tail, x, start, num_new, *, plan, kind):
    """Return the streams of new tokens, and the entries that they complete."""
    ratio = CFG.ratio(kind)
    streams = project_streams(params, x, start, ratio, plan.tail_dtype, overlap=kind == "csa")
    entries = tail.pool(streams, start % ratio, num_new, ratio)
    return streams, finish_entries(entries, params.norm, start // ratio, kind, CFG)


def through_the_handle(params, cache, layer, slots, num_new, x):
    handle = d4.acquire(cache, layer, slots, num_new)
    handle = handle.write_swa(key_rows(params, x, handle.start, handle.kind))
    if handle.kind != "swa":
        handle = handle.flush_compression(params.compressor, x, params.indexer)
    return handle


def through_the_pieces(params, cache, layer, slots, num_new, x):
    """Run every public piece under its own jit. Each donates what it updates."""
    plan, tables = cache.plan, cache.tables
    kind, index = cache.locate(layer)
    stack = give(cache.stack(kind))
    start = jnp.where(slots >= 0, tables.seq_lens[slots], 0)
    state = d4.pieces.append_swa(stack.state, index, key_rows(params, x, start, kind), slots, start, num_new, plan=plan)
    pool, ratio = stack.pool, CFG.ratio(kind)
    if kind == "swa":
        return dataclasses.replace(stack, state=state)
    phase, first = start % ratio, start // ratio
    count, full = (phase + num_new) // ratio, (num_new > 0) & ((phase + num_new) % ratio == 0)
    new = functools.partial(compress, x=x, start=start, num_new=num_new, plan=plan, kind=kind)
    streams, entries = new(params.compressor, read_slots(state.tail, index, slots))
    key_streams = keys = None
    if kind == "csa":
        key_streams, keys = new(params.indexer.compressor, read_slots(state.indexer_tail, index, slots))
        keys = jax.jit(hadamard)(keys)
    flushed = d4.pieces.NewEntries(
        entries=entries, keys=keys, block_table=tables.block_table, slots=slots, first=first, count=count
    )
    pool = d4.pieces.flush_entries(pool, index, flushed, plan=plan)
    state = d4.pieces.append_tail(state, index, streams, key_streams, slots, start, num_new, plan=plan)
    if kind == "csa":
        state = d4.pieces.rotate_csa(state, index, slots, full)
    return dataclasses.replace(stack, state=state, pool=pool)


@pytest.fixture(scope="module")
def layer_result():
    """Return (y, cache) of ``attention_layer`` for each layer."""
    cache, slots, num_new, x = started()
    return [d4.attention_layer(random_params()[i], x, cache, i, slots, num_new) for i in LAYERS]


@pytest.mark.parametrize("layer", first_of(CSA_FIRST))
def test_a_handle_leaves_the_bytes_of_the_layer(layer, layer_result):
    cache, slots, num_new, x = started()
    hand = jax.jit(lambda params, cache, x: through_the_handle(params, cache, layer, slots, num_new, x).cache)
    after = hand(
        random_params()[layer], cache, jnp.where((jnp.arange(TOKENS)[None] < num_new[:, None])[..., None], x, 0)
    )
    assert moved_values(after, layer_result[layer][1], TOLERANCE)[0] == 0
    kind, _ = cache.locate(layer)
    assert moved_values(after.stack(kind), cache.stack(kind), TOLERANCE)[0] > 0  # something was written


@pytest.mark.parametrize("layer", LAYERS, ids=KINDS)
def test_the_pieces_leave_the_bytes_of_the_layer(layer, layer_result):
    cache, slots, num_new, x = started()
    kind, _ = cache.locate(layer)
    x = jnp.where((jnp.arange(TOKENS)[None] < num_new[:, None])[..., None], x, 0)
    after = through_the_pieces(random_params()[layer], cache, layer, slots, num_new, x)
    assert moved_values(after, layer_result[layer][1].stack(kind), TOLERANCE)[0] == 0


def outputs_through_the_handle(params, handle, x):
    """Return the layer's output and cache, from a handle that has not written anything yet."""
    tokens, (freqs, eps) = x.shape[1], (rope_frequencies(CFG, handle.kind), CFG.norm_eps)
    positions, q_latent = handle.positions(tokens), rms_norm(wide_product(x, params.q_a), params.q_norm, eps)
    q = wide_product(q_latent, params.q_b).reshape(*positions.shape, CFG.num_heads, CFG.head_dim)
    q = apply_rope(rms_norm(q, None, eps), positions[..., None], freqs)
    kv = key_rows(params, x, handle.start, handle.kind)
    entries = picks = None
    if handle.kind != "swa":
        handle = handle.flush_compression(params.compressor, x, params.indexer)
        entries = handle.entries
    if params.indexer is not None:
        queries = indexer.indexer_queries(params.indexer, q_latent, positions, freqs, handle.cache.plan)
        weights = indexer.head_weights(params.indexer, x, handle.cache.plan)
        picks = d4.pieces.select_entries(queries, weights, handle.entries, handle.visible(tokens))
    window = handle.write_swa(kv).window() if tokens == 1 else handle.window(kv)
    out = d4.pieces.decode_attention(q, positions, params.sinks, window, entries, picks, kind=handle.kind)
    groups = out.reshape(*positions.shape, CFG.o_groups, -1)
    weight = params.o_a.reshape(CFG.o_groups, CFG.o_lora_rank, -1)
    projected = jnp.einsum("btgi,goi->btgo", groups, weight, precision=lax.Precision.HIGHEST)
    return wide_product(projected.reshape(*positions.shape, -1), params.o_b), handle.write_swa(kv).cache


@pytest.mark.parametrize("tokens", first_of([TOKENS, 1]))
@pytest.mark.parametrize("layer", first_of(CSA_FIRST))
def test_attention_through_a_handle_gives_the_output_of_the_layer(layer, tokens):
    cache, slots, num_new, x = started()
    num_new, params = jnp.minimum(num_new, tokens), random_params()[layer]
    real = jnp.arange(tokens)[None] < num_new[:, None]
    x = jnp.where(real[..., None], x[:, :tokens], 0)
    want, after = d4.attention_layer(params, x, cache, layer, slots, num_new)
    hand = jax.jit(lambda params, handle, x: outputs_through_the_handle(params, handle, x))
    got, got_cache = hand(params, d4.acquire(cache, layer, slots, num_new), x)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE)
    assert moved_values(got_cache, after, TOLERANCE)[0] == 0


@pytest.mark.slow
def test_what_a_handle_gathers_is_what_it_shows_as_bytes():
    cache, slots, num_new, _ = started()
    plan = cache.plan
    for layer, kind in zip(LAYERS, KINDS, strict=True):
        handle = d4.acquire(cache, layer, slots, num_new)
        assert handle.slots.tolist() == [3, 0, -1, 2]
        assert handle.start.tolist() == [30, 21, 0, 3]
        assert handle.num_new.tolist() == [8, 4, 0, 2]
        assert (handle.num_query_heads, handle.head_dim) == (CFG.num_heads, CFG.head_dim)
        # The window, oldest first: before this call's tokens are written its newest rows are missing.
        stored = dataclasses.replace(handle, batch=dataclasses.replace(handle.batch, num_new=jnp.zeros_like(num_new)))
        rows, positions = stored.gather_swa()
        view = stored.read_swa_view()
        decoded = np.asarray(plan.rows.decode(view.rows))
        assert rows.shape == (BATCH, CFG.sliding_window, CFG.head_dim)
        for b, start in enumerate((30, 21, 0, 3)):
            want = [p if p >= 0 and start else -1 for p in range(start - CFG.sliding_window, start)]
            assert positions[b].tolist() == want
            assert int(view.head[b]) == start % CFG.sliding_window
            for row, position in zip(np.asarray(rows[b]), want, strict=True):
                expected = decoded[b, position % CFG.sliding_window] if position >= 0 else np.zeros_like(row)
                np.testing.assert_array_equal(row, expected)
                assert position < 0 or int(view.positions[b, position % CFG.sliding_window]) == position
        if kind == "swa":
            continue
        entries = np.asarray(stored.gather_all_compressed())
        classical = stored.read_classical_view()
        pool = np.asarray(plan.rows.decode(classical.rows))
        per_block = pool.shape[1]
        counts = [start // CFG.ratio(kind) for start in (30, 21, 0, 3)]
        assert stored.num_entries.tolist() == counts
        for b, count in enumerate(counts):
            blocks = np.asarray(classical.block_table)[b]
            assert (blocks >= 0).sum() == int(classical.block_lens[b])
            for e in range(entries.shape[1]):
                want = pool[blocks[e // per_block], e % per_block] if e < count else 0 * pool[0, 0]
                np.testing.assert_array_equal(entries[b, e], want)
        picks = jnp.asarray([[[1, -1], [0, 1]], [[-1, -1], [0, 0]], [[0, 1], [2, 3]], [[-1, -1], [-1, -1]]], jnp.int32)
        chosen = np.asarray(stored.gather_compressed(picks))
        want = np.where((np.asarray(picks) >= 0)[..., None], entries[np.arange(BATCH)[:, None, None], picks], 0)
        want[2] = 0  # a padding row has nothing, whatever it picks
        live = np.asarray(picks) < np.asarray(counts)[:, None, None]
        np.testing.assert_array_equal(chosen[live], want[live])
        if kind == "csa":
            keys = stored.read_indexer_view()
            assert_same((keys.block_table, keys.block_lens), (classical.block_table, classical.block_lens))
            assert_same(keys.keys, jax.tree.map(lambda leaf: leaf[0], cache.csa.pool.indexer_keys))
        else:
            with pytest.raises(ValueError, match="only CSA layers have indexer keys"):
                stored.read_indexer_view()


def test_a_handle_refuses_what_its_layer_has_not():
    cache, slots, num_new, x = started()
    params = random_params()
    with pytest.raises(ValueError, match="no compressed entries"):
        d4.acquire(cache, 0, slots, num_new).gather_all_compressed()
    with pytest.raises(ValueError, match="no compressed entries"):
        d4.acquire(cache, 0, slots, num_new).flush_compression(params[2].compressor, x)
    for read in (lambda handle: handle.entries, lambda handle: handle.visible(1)):
        with pytest.raises(ValueError, match="no compressed entries"):
            read(d4.acquire(cache, 0, slots, num_new))
    with pytest.raises(ValueError, match="indexer is for CSA layers"):
        d4.acquire(cache, 1, slots, num_new).flush_compression(params[1].compressor, x)
    with pytest.raises(ValueError, match="indexer is for CSA layers"):
        d4.acquire(cache, 2, slots, num_new).flush_compression(params[2].compressor, x, params[1].indexer)


def test_what_a_handle_writes_has_one_number_of_tokens():
    cache, slots, num_new, x = started()
    params, kv = random_params()[1], jnp.ones((BATCH, TOKENS, CFG.head_dim))
    handle = d4.acquire(cache, 1, slots, num_new)
    with pytest.raises(ValueError, match="expected T = 8 tokens as in what was written, got 4"):
        handle.write_swa(kv).flush_compression(params.compressor, x[:, :4], params.indexer)
    with pytest.raises(ValueError, match="expected T = 8 tokens as in what was written, got 4"):
        handle.write_swa(kv).visible(4)
    with pytest.raises(AssertionError, match=r"kv: expected .*T=8"):
        handle.write_swa(kv).window(kv[:, :4])


def test_decode_attention_refuses_what_is_of_another_batch_or_layer():
    cache, slots, num_new, x = started()
    csa, hca = (d4.acquire(cache, layer, slots, num_new) for layer in (1, 2))
    q, kv, sinks = jnp.ones((*x.shape[:2], CFG.num_heads, CFG.head_dim)), x[..., :1].repeat(CFG.head_dim, -1), x[0, 0]
    window, entries = csa.window(kv), csa.entries
    shorter = jax.tree.map(lambda leaf: leaf[:, 1:], window.fresh)
    given: dict[str, Any] = dict(sinks=sinks[: CFG.num_heads], window=window, entries=entries, kind="csa")
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(sinks=sinks[:1]), r"sinks: expected float32 or bfloat16 \[num_heads=4\], got float32\[1\]"),
        (dict(window=csa.window()), "window: 8 tokens need fresh rows"),
        (dict(window=dataclasses.replace(window, fresh=shorter)), "expected at least 8 fresh rows .* got 7"),
        (dict(window=dataclasses.replace(window, slots=slots[1:])), r"window.slots: expected int32 \[B=4\]"),
        (dict(window=dataclasses.replace(window, start=slots[1:])), r"window.start: expected int32 \[B=4\]"),
        (
            dict(window=dataclasses.replace(window, fresh=jax.tree.map(lambda leaf: leaf[1:], window.fresh))),
            r"window.fresh.nope: expected float32 \[B=4, F=8, axis 0=128\]",
        ),
        (dict(entries=dataclasses.replace(entries, slots=slots[1:])), r"entries.slots: expected int32 \[B=4\]"),
        (dict(entries=hca.entries), "entries: expected those of CSA layers"),
        (dict(kind="hca"), "entries: expected those of HCA layers"),
    )
    for change, message in changes:
        with pytest.raises((AssertionError, ValueError), match=message):
            d4.pieces.decode_attention(q, csa.positions(TOKENS), **(given | change))


def test_a_row_without_new_tokens_reads():
    cache, slots, num_new, _ = started()
    reader = d4.acquire(cache, 1, slots, jnp.zeros_like(num_new))
    assert reader.slots.tolist() == [3, 0, -1, 2]
    assert reader.start.tolist() == [30, 21, 0, 3]
    assert reader.num_entries.tolist() == [7, 5, 0, 0]
    writer = d4.acquire(cache, 1, slots, num_new)
    before = dataclasses.replace(writer, batch=dataclasses.replace(writer.batch, num_new=jnp.zeros_like(num_new)))
    read = jax.jit(lambda handle: (handle.gather_swa(), handle.gather_all_compressed()))
    assert_same(read(reader), read(before))


def test_a_handle_of_a_row_that_was_not_granted_does_nothing():
    cache, slots, _, _ = started()
    handle = d4.acquire(cache, 1, slots, ids(8, 5, 0, 2))  # row 1 was granted 4
    assert handle.slots.tolist() == [3, -1, -1, 2]
    assert handle.num_new.tolist() == [8, 0, 0, 2]


# ---- each piece by itself -------------------------------------------------------------------------------------------


def pieces(online=False):
    """Return name -> (the state that a piece updates, the piece as a function of that state and of slots)."""
    cache, _, num_new, x = started(online)
    plan, table = cache.plan, cache.tables.block_table
    start = ids(30, 21, 0, 3)
    kv = jnp.asarray(sequence(1, BATCH * TOKENS, CFG.head_dim).reshape(BATCH, TOKENS, -1))
    keys = jnp.asarray(sequence(2, BATCH * 2, CFG.indexer_head_dim).reshape(BATCH, 2, -1))
    full = jnp.asarray([True, True, True, False])
    csa, hca = random_params()[1], random_params()[2]
    main = project_streams(csa.compressor, x, start, 4, plan.tail_dtype, overlap=True)
    key = project_streams(csa.indexer.compressor, x, start, 4, plan.tail_dtype, overlap=True)
    one = project_streams(hca.compressor, x, start, 16, plan.tail_dtype, overlap=False)
    first, count = ids(7, 5, 0, 0), ids(2, 1, 0, 0)
    c, h, s = cache.csa, cache.hca, cache.swa
    new = d4.pieces.NewEntries(entries=kv[:, :2], keys=keys, block_table=table, slots=first, first=first, count=count)
    one_each = dataclasses.replace(new, keys=None, first=ids(2, 1, 0, 0), count=ids(1, 1, 0, 0))
    return {
        "append_swa": (s.state, lambda t, z: d4.pieces.append_swa(t, 0, kv, z, start, num_new, plan=plan)),
        "append_tail of CSA": (
            c.state,
            lambda t, z: d4.pieces.append_tail(t, 0, main, key, z, start, num_new, plan=plan),
        ),
        "append_tail of HCA": (
            h.state,
            lambda t, z: d4.pieces.append_tail(t, 0, one, None, z, start, num_new, plan=plan),
        ),
        "rotate_csa": (c.state, lambda t, z: d4.pieces.rotate_csa(t, 0, z, full)),
        "reset_hca": (h.state, lambda t, z: d4.pieces.reset_hca(t, 0, z, full, plan=plan)),
        "flush_entries of CSA": (
            c.pool,
            lambda t, z: d4.pieces.flush_entries(t, 0, dataclasses.replace(new, slots=z), plan=plan),
        ),
        "flush_entries of HCA": (
            h.pool,
            lambda t, z: d4.pieces.flush_entries(t, 0, dataclasses.replace(one_each, slots=z), plan=plan),
        ),
        "reset_slots": (c.state, lambda t, z: d4.pieces.reset_slots(t, z, plan=plan, kind=d4.AttentionType.CSA)),
    }


NAMES = [
    *("append_swa", "append_tail of CSA", "append_tail of HCA", "rotate_csa"),
    *("reset_hca", "flush_entries of CSA", "flush_entries of HCA", "reset_slots"),
]


# The form of the HCA tail matters to HCA alone.
@pytest.mark.parametrize(
    ("name", "online"),
    first_of(
        [(name, False) for name in NAMES]
        + [(name, True) for name in ("append_tail of HCA", "reset_hca", "flush_entries of HCA")],
        count=3,
    ),
)
def test_a_piece_updates_in_place_what_it_is_given_and_slot_minus_one_is_a_no_op(name, online):
    state, call = pieces(online)[name]
    _, slots, _, _ = started(online)
    before = give(state)
    expected = pointers(before)
    after = jax.block_until_ready(call(before, slots))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "its argument is given away"
    assert pointers(after) == expected, "each leaf keeps its buffer"
    assert moved_values(after, state, 0.0)[0] > 0, "it did something"
    assert_same(call(give(state), jnp.full_like(slots, -1)), state)
    # Only the rows of the named requests change: for a pool those are blocks, covered where requests are compared.
    if not name.startswith("flush"):
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            others = [slot for slot in range(new.shape[1]) if slot not in slots.tolist()]
            assert np.asarray(new)[:, others].tobytes() == np.asarray(old)[:, others].tobytes()


def test_the_flushes_of_before_say_what_they_are_now():
    cache, slots, _, _ = started()
    kv, keys = (jnp.ones((BATCH, 2, dim)) for dim in (CFG.head_dim, CFG.indexer_head_dim))
    places = dict(block_table=cache.tables.block_table, slots=slots, first=ids(0, 0, 0, 0), count=ids(1, 1, 1, 1))
    for old, pool, given in (
        (d4.pieces.flush_csa, cache.csa.pool, (kv, keys)),
        (d4.pieces.flush_hca, cache.hca.pool, (kv,)),
    ):
        new = d4.pieces.NewEntries(entries=kv, keys=given[1] if len(given) == 2 else None, **places)
        expected = d4.pieces.flush_entries(give(pool), 0, new, plan=cache.plan)
        assert moved_values(expected, pool, 0.0)[0] > 0, "it did something"
        with pytest.deprecated_call(match=rf"pieces\.{old.__name__} is now dsv4jax\.pieces\.flush_entries"):
            assert_same(old(give(pool), 0, *given, *places.values(), plan=cache.plan), expected)
        with pytest.deprecated_call():
            assert_same(old(give(pool), 0, *given, **places, plan=cache.plan), expected)


def test_the_function_under_the_jit_leaves_its_input_alive():
    cache, slots, _, _ = started()
    state = give(cache.csa.state)
    kept = jax.tree.map(np.asarray, state)
    undonated = d4.pieces.reset_slots.__wrapped__(state, slots, plan=cache.plan, kind=d4.AttentionType.CSA)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_same(state, kept)
    assert_same(d4.pieces.reset_slots(state, slots, plan=cache.plan, kind=d4.AttentionType.CSA), undonated)
    for piece in (
        d4.pieces.append_swa,
        d4.pieces.append_tail,
        d4.pieces.flush_entries,
        d4.pieces.rotate_csa,
        d4.pieces.reset_hca,
    ):
        assert callable(piece.__wrapped__)


def test_pieces_refuse_the_state_and_the_pool_of_another_kind():
    cache, slots, _, _ = started()
    full = jnp.ones(BATCH, jnp.bool)
    with pytest.raises(ValueError, match="rotate_csa: expected the state of CSA layers"):
        d4.pieces.rotate_csa(cache.hca.state, 0, slots, full)
    with pytest.raises(ValueError, match="reset_hca: expected the state of HCA layers"):
        d4.pieces.reset_hca(cache.csa.state, 0, slots, full, plan=cache.plan)
    kv, table = jnp.ones((BATCH, 1, CFG.head_dim)), cache.tables.block_table
    new = d4.pieces.NewEntries(entries=kv, keys=None, block_table=table, slots=slots, first=slots, count=slots)
    with pytest.raises(ValueError, match=r"flush_entries: new\.keys are for the pool of CSA layers, and only for it"):
        d4.pieces.flush_entries(cache.csa.pool, 0, new, plan=cache.plan)


# ---- a scan over layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", first_of(COMPRESSED, count=0))
def test_a_scan_over_layers_equals_the_unrolled_loop(kind):
    depth = 3
    cfg = dataclasses.replace(CFG, compress_ratios=(CFG.ratio(kind),) * depth)
    params = [random_params(cfg, seed=i)[0] for i in range(depth)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    plan = d4.plan_cache(cfg, max_requests=3, max_context=32, **TRAINED)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 3)
    num_new = ids(17, 3, 8)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert ok
    x = jnp.asarray(sequence(3, 3 * 17, cfg.hidden_size).reshape(3, 17, -1))

    @jax.jit
    def scanned(params, x, cache):
        def body(carry, layer):
            x, cache = carry
            weights, index = layer
            y, cache = d4.attention_layer_at(weights, x, cache, kind, index, slots, num_new)
            return (x + y, cache), None

        return lax.scan(body, (x, cache), (params, jnp.arange(depth, dtype=jnp.int32)))[0]

    y, scan_cache = scanned(stacked, x, cache)
    for i in range(depth):
        out, cache = d4.attention_layer(params[i], x, cache, i, slots, num_new)
        x = x + out
    np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=0, atol=TOLERANCE)
    moved, total = moved_values(scan_cache, cache, TOLERANCE)
    # Rounded rows: a value on a rounding boundary may move where fp32 sums run in another order.
    assert moved <= 1e-3 * total
    assert all(np.asarray(cache.stack(kind).state.pos)[layer].max() == 16 for layer in range(depth))
