"""The update kernels, compared with the XLA form: stacks full of garbage are compared leaf by leaf after an update."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.cache.cache import LayerStack
from dsv4jax.config import AttentionType
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.tails import num_touched_blocks
from tests.support.cases import first_of, in_turns
from tests.support.driver import CFG, THREE_FORMATS, moved_values, random_params, sequence, small_plan
from tests.support.kernel_cases import (
    BAD,
    BF16_TAIL,
    FLASH,
    LAYER,
    LONG,
    ODD,
    Batch,
    Case,
    assert_updated_alike,
    csa,
    hca,
    make_batch,
    make_inputs,
    make_stack,
    rows_at,
    same_bytes,
    store,
    swa,
    written_entries,
    written_window,
)
from tests.support.machines import BACKENDS, requires_gpu

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
backends = pytest.mark.parametrize("backend", BACKENDS)
LONG_BLOCKS: dict[str, Any] = dict(cfg=LONG, max_context=500)


# Each number of tokens with each kind, and each format, tail and tail dtype at some of them: a decode step; a few
# tokens within or across a block; a block and more; more tokens than the window has rows.
CASES = [
    *(swa(1, "f32"), swa(2, "bf16"), swa(5, "fp8_row"), swa(8, "fp8_tile64"), swa(33, "f32"), swa(40, "fp8_row")),
    *(swa(1, "fp8_tile64", cfg=ODD), swa(40, "bf16", cfg=ODD)),
    *(csa(1, "f32", "f32"), csa(1, "fp8_row", "nvfp4", **BF16_TAIL), csa(1, "fp8_tile64", "mxfp4", cfg=ODD)),
    *(csa(2, "fp8_tile64", "mxfp4"), csa(5, "bf16", "bf16", **BF16_TAIL), csa(8, "f32", "nvfp4")),
    *(csa(33, "fp8_tile64", "mxfp4", **BF16_TAIL), csa(40, "fp8_row", "f32"), csa(8, "bf16", "f32", cfg=ODD)),
    csa(33, "fp8_row", "nvfp4", cfg=ODD, **BF16_TAIL),
    *(hca("ring", 1, "f32"), hca("ring", 1, "fp8_tile64", **BF16_TAIL), hca("ring", 2, "bf16")),
    *(hca("ring", 5, "fp8_row", **BF16_TAIL), hca("ring", 8, "fp8_tile64"), hca("ring", 33, "f32")),
    *(hca("ring", 40, "fp8_row", **BF16_TAIL), hca("ring", 1, "bf16", cfg=ODD), hca("ring", 33, "fp8_tile64", cfg=ODD)),
    *(hca("online", 1, "f32"), hca("online", 1, "fp8_row", cfg=ODD), hca("online", 2, "fp8_tile64", **BF16_TAIL)),
    *(hca("online", 5, "bf16"), hca("online", 8, "f32", **BF16_TAIL), hca("online", 33, "fp8_row")),
    *(hca("online", 40, "fp8_tile64"), hca("online", 40, "f32", cfg=ODD, **BF16_TAIL)),
    *(hca("ring", 1, "f32", **LONG_BLOCKS), hca("ring", 33, "fp8_row", **BF16_TAIL, **LONG_BLOCKS)),
    *(hca("online", 1, "bf16", **LONG_BLOCKS), hca("online", 150, "f32", **LONG_BLOCKS)),
]


def short_ones_first(kind: AttentionType) -> list[Case]:
    return sorted((case for case in CASES if case.kind == kind), key=lambda case: case.tokens > 8)


FULL_SIZE = [
    *(swa(1, "fp8_tile64"), csa(1, "fp8_tile64", "mxfp4"), csa(1, "fp8_row", "nvfp4", **BF16_TAIL)),
    *(hca("ring", 1, "fp8_tile64"), hca("ring", 1, "fp8_row", **BF16_TAIL), hca("online", 1, "fp8_tile64")),
    *(swa(512, "fp8_row"), csa(512, "fp8_tile64", "mxfp4"), hca("ring", 512, "fp8_row"), hca("online", 512, "bf16")),
]
FULL_SIZE = [
    dataclasses.replace(case, cfg=FLASH, batch=64 if case.tokens == 1 else 12, requests=70, max_context=2048)
    for case in FULL_SIZE
]


def check(case: Case, backend: str) -> tuple[Batch, LayerStack, LayerStack]:
    """Run a case on a backend and in XLA and compare all bytes. Returns the batch, and the stack before and after."""
    batch = make_batch(case)
    before, (x, kv) = make_stack(case, batch), make_inputs(case)
    got, want = (store(case, batch, before, x, kv, name) for name in (backend, "xla"))
    assert_updated_alike(case, batch, before, got, want)
    return batch, jax.tree.map(np.asarray, before), got


@backends
# The long chunks of each kind last, as they take longest to compile.
@pytest.mark.parametrize("case", first_of(in_turns(*map(short_ones_first, AttentionType)), count=4), ids=str)
def test_an_update_leaves_what_the_xla_form_leaves(case, backend):
    batch, before, got = check(case, backend)
    # Not for want of anything to do: tokens, and entries, are there.
    assert np.count_nonzero(written_window(case, batch) >= 0) >= 7
    if got.pool is not None:
        assert before.pool is not None
        written = written_entries(case, batch)
        assert np.count_nonzero(written) >= (3 if case.tokens < case.ratio else 7)
        old, new = rows_at(before.pool.entries, written), rows_at(got.pool.entries, written)
        assert not np.any(np.all(old.nope == new.nope, axis=-1)), "a row was not written"


@requires_gpu
@pytest.mark.parametrize("case", FULL_SIZE, ids=str)
def test_an_update_at_full_size_leaves_what_the_xla_form_leaves(case):
    check(case, "pallas")


@backends
@pytest.mark.parametrize(
    "case", first_of([csa(5, "bf16", "bf16", **BF16_TAIL), hca("ring", 33, "f32"), hca("online", 1, "f32")]), ids=str
)
def test_without_window_rows_the_window_stays(case, backend):
    """A handle updates the window and the compressor's part in two separate calls."""
    _, before, got = check_without_window(case, backend)
    for old, new in zip(
        jax.tree.leaves((before.state.window, before.state.pos)),
        jax.tree.leaves((got.state.window, got.state.pos)),
        strict=True,
    ):
        same_bytes("window", new, old)


def check_without_window(case: Case, backend: str) -> tuple[Batch, LayerStack, LayerStack]:
    batch = make_batch(case)
    before, (x, kv) = make_stack(case, batch), make_inputs(case)
    got, want = (store(case, batch, before, x, kv, name, window=False) for name in (backend, "xla"))
    whole = store(case, batch, before, x, kv, "xla")
    # The rest is compared as ever, with a window that the update would have written in both.
    got_whole, want_whole = (
        dataclasses.replace(
            stack, state=dataclasses.replace(stack.state, window=whole.state.window, pos=whole.state.pos)
        )
        for stack in (got, want)
    )
    assert_updated_alike(case, batch, before, got_whole, want_whole)
    return batch, jax.tree.map(np.asarray, before), got


# ---- bad numbers ----------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("bad", first_of([np.nan, np.inf]))
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            *(swa(5, "fp8_row"), csa(2, "fp8_tile64", "mxfp4"), hca("ring", 1, "f32")),
            *(csa(1, "fp8_row", "nvfp4", **BF16_TAIL), csa(5, "bf16", "bf16", **BF16_TAIL)),
            *(hca("ring", 40, "fp8_row", **BF16_TAIL), hca("online", 40, "fp8_tile64"), hca("online", 1, "f32")),
        ],
        count=2,
    ),
    ids=str,
)
def test_bad_numbers_of_one_request_stay_in_its_rows(case, bad, backend):
    """One token's input is bad, and one channel of another's window row. The bytes of other requests do not change."""
    batch = make_batch(case)
    if case.kind != SWA:
        batch.start[BAD] = max(batch.start[BAD] // case.ratio, 1) * case.ratio - min(case.tokens, 2) + case.ratio
    before, (x, kv) = make_stack(case, batch), make_inputs(case)
    clean = store(case, batch, before, x, kv, backend)
    x[BAD, case.tokens // 3, 7], kv[BAD, case.tokens - 1, 3] = bad, bad
    got, want = (store(case, batch, before, x, kv, name) for name in (backend, "xla"))

    slot = batch.slots[BAD]
    for old, new in zip(jax.tree.leaves(clean.state), jax.tree.leaves(got.state), strict=True):
        same_bytes("state of other requests", np.delete(new, slot, 1), np.delete(old, slot, 1))
    own = written_window(case, batch)[slot] >= 0
    decode = case.plan.rows.decode
    rows = [jax.tree.map(lambda leaf: leaf[LAYER, slot][own], stack.state.window) for stack in (clean, got, want)]
    of_clean, of_got, of_want = (np.asarray(decode(jax.tree.map(jnp.asarray, encoded))) for encoded in rows)
    assert np.isfinite(of_clean).all()
    np.testing.assert_array_equal(of_got, of_want)
    assert np.count_nonzero(~np.isfinite(of_got).all(-1)) == 1
    if case.kind == SWA:
        return

    for part in ("tail", "indexer_tail"):
        tails = [getattr(stack.state, part) for stack in (got, want)]
        for field in dataclasses.fields(tails[0]) if tails[0] is not None else ():
            a, b = (getattr(tail, field.name)[LAYER, slot] for tail in tails)
            if field.name in ("peak", "total", "weighted"):
                # A float maximum of XLA on CPU may lose NaN: the peak is then another number, the sums are NaN anyhow.
                assert field.name == "peak" or np.array_equal(np.isnan(a), np.isnan(b)), field.name
            else:
                same_bytes(f"{part}.{field.name}", a, b, nan_bits=False)

    assert clean.pool is not None
    assert got.pool is not None
    assert want.pool is not None
    written = written_entries(case, batch)
    alone = dataclasses.replace(batch, slots=np.where(np.arange(case.batch) == BAD, batch.slots, -1))
    own = written_entries(case, alone)
    assert own.any()
    for old, new in zip(jax.tree.leaves(clean.pool), jax.tree.leaves(got.pool), strict=True):
        same_bytes("entries of other requests", new[LAYER][~own], old[LAYER][~own])
    assert np.count_nonzero(written & ~own) > 0
    for part, form in (("entries", case.plan.rows), ("indexer_keys", case.plan.keys)):
        stores = [getattr(stack.pool, part) for stack in (got, want)]
        if stores[0] is None:
            continue
        a, b = (np.asarray(form.decode(jax.tree.map(jnp.asarray, rows_at(rows, own)))) for rows in stores)
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        assert not finite.all()


# ---- which kernels serve what ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(rope_dim=6, head_dim=134), "must be divisible by 4"),
        (dict(head_dim=520), "head_dim must be at most 512"),
        (dict(csa_compression_ratio=9, compress_ratios=(0, 9, 128)), "CSA ratio must be at most 8"),
        (dict(indexer_head_dim=16), r"power of two in \[32, 128\]"),
        (dict(indexer_head_dim=256), r"power of two in \[32, 128\]"),
    ],
)
def test_a_named_backend_refuses_sizes_that_its_kernels_do_not_serve(sizes, reason):
    cfg = d4.DSV4Config.tiny(**sizes)
    plan = d4.plan_cache(cfg, max_requests=1, max_context=128, kv_format="f32", indexer_format="f32")
    for backend in ("pallas", "pallas_simulated"):
        with pytest.raises(ValueError, match=reason):
            CACHE_UPDATE.choose(backend, plan, CSA)
    assert CACHE_UPDATE.choose(None, plan, CSA) == "xla"
    assert CACHE_UPDATE.choose("xla", plan, CSA) == "xla"


def new_tokens(case: Case) -> Any:
    """Return a call's arrays, of which only the shapes matter."""
    cfg, plan, batch, is_csa = case.cfg, case.plan, case.batch, case.kind == CSA

    def streams(dim: int) -> pk.Streams:
        rows = jnp.zeros((batch, case.tokens, dim * (2 if is_csa else 1)))
        return pk.Streams(k=rows, z=rows, norm=jnp.zeros(dim))

    row = jnp.zeros(batch, jnp.int32)
    return pk.NewTokens(
        layer=row[:1],
        slots=row,
        start=row,
        num_new=row,
        block_table=jnp.zeros((case.requests, plan.max_blocks), jnp.int32),
        kv=jnp.zeros((batch, case.tokens, cfg.head_dim)),
        entry=streams(cfg.head_dim),
        key=streams(cfg.indexer_head_dim) if is_csa else None,
        rope=jnp.zeros((batch, num_touched_blocks(case.tokens, case.ratio), cfg.rope_dim)),
    )


def test_arrays_that_do_not_fit_each_other_are_refused():
    case = csa(5, "fp8_row", "nvfp4")
    stack = jax.eval_shape(functools.partial(make_stack, case, make_batch(case)))
    tokens = new_tokens(case)
    assert tokens.entry is not None
    update = functools.partial(pk.append_chunk, kv_format="fp8_row", key_format="nvfp4", eps=1e-6, simulate=True)

    def refused(message: str, error: type[Exception], stack: Any = stack, ratio: int | None = 4, **changes: Any):
        with pytest.raises(error, match=message):
            update(stack, dataclasses.replace(tokens, **changes), ratio=ratio)

    def with_tail(**leaves: Any) -> Any:
        return dataclasses.replace(stack, state=dataclasses.replace(stack.state, **leaves))

    jax.eval_shape(functools.partial(update, ratio=4), stack, tokens)
    refused("this one has no tail or no ratio", ValueError, with_tail(tail=None))
    refused("this one has no tail or no ratio", ValueError, ratio=None)
    refused("tokens.key is for CSA layers, and only for them", ValueError, key=None)
    refused(
        r"a tail must have the leaves .* got \('pos', 'window'\)", ValueError, with_tail(tail=dict(window=1, pos=2))
    )
    refused("CSA ratio must be at most 8, got 16", ValueError, ratio=16)
    refused("assert_shape failed", AssertionError, ratio=3)  # than the tail has rows
    refused("assert_shape failed", AssertionError, slots=tokens.slots[1:])
    refused("assert_shape failed", AssertionError, kv=tokens.kv[..., 1:])
    refused("assert_shape failed", AssertionError, entry=dataclasses.replace(tokens.entry, z=tokens.entry.z[..., 1:]))
    refused("assert_shape failed", AssertionError, rope=tokens.rope[:, 1:])


# ---- a decode loop --------------------------------------------------------------------------------------------------

# Entries and outputs in f32 differ by the order of sums: see test_rules.
TOLERANCE = 2e-5
# Rounded values and picks of entries move where a sum lies on a boundary; a moved one shows in what reads it.
MOVED = 1e-3


@functools.partial(jax.jit, static_argnames="backend")
def decode(params: Any, cache: Any, slots: Any, xs: Any, active: Any, *, backend: Backend) -> Any:
    """Decode a token per step for the requests that are active: xs [steps, B, 1, hidden] -> (outputs, cache)."""

    def body(cache: Any, given: Any) -> Any:
        x, active = given
        num_new = active.astype(jnp.int32)
        cache, ok = d4.prepare_forward(cache, slots, num_new)
        outputs = []
        for layer in range(len(params)):
            y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, backend=backend)
            outputs.append(y)
        return d4.advance(cache, slots, num_new), (jnp.stack(outputs), ok)

    cache, (ys, ok) = lax.scan(body, cache, (xs, active))
    return ys, cache, ok


def decode_on(backend: Backend, steps: int, batch: int, options: dict[str, Any]) -> tuple[Any, Any, np.ndarray]:
    sizes = dict(max_requests=batch + 1, max_context=steps + 16, num_blocks=(batch + 1) * (steps // 16 + 1))
    plan = small_plan(**sizes, **options)
    cache, slots, ok = d4.admit(d4.init_cache(plan), batch)
    assert ok
    slots = slots[jnp.asarray(np.random.default_rng(1).permutation(batch))]
    xs = jnp.asarray(sequence(2, steps * batch, CFG.hidden_size).reshape(steps, batch, 1, -1))
    # Ragged: requests begin at different steps and pause now and then.
    rng = np.random.default_rng(3)
    active = (rng.random((steps, batch)) < 0.9) & (np.arange(steps)[:, None] >= rng.permutation(batch) * steps // 20)
    ys, cache, ok = decode(random_params(), cache, slots, xs, jnp.asarray(active), backend=backend)
    assert np.asarray(ok).all()
    assert cache.seq_lens[slots].tolist() == active.sum(0).tolist()
    return np.asarray(ys), cache, active


def assert_decodes_alike(backend: Backend, steps: int, batch: int, options: dict[str, Any]) -> None:
    """Feed both backends the same inputs at every step, so that differences in outputs do not propagate."""
    ys, cache, active = decode_on(backend, steps, batch, options)
    want_ys, want, _ = decode_on("xla", steps, batch, options)
    for i, layer in enumerate(np.moveaxis(ys, 1, 0)):
        assert not layer[~active].any(), i
        assert np.abs(layer[active]).max(-1).min() > 0, i
    assert jax.tree.structure(cache) == jax.tree.structure(want)
    moved, total = moved_values(cache, want, TOLERANCE)
    assert moved <= MOVED * total, f"{moved} of {total} stored values differ"
    if options["kv_format"] == "f32":
        assert moved == 0
    moved, total = moved_values(ys, want_ys, TOLERANCE)
    assert moved <= 0.02 * total, f"{moved} of {total} outputs differ"


@pytest.mark.sweep(guard="test_an_update_leaves_what_the_xla_form_leaves")
@pytest.mark.parametrize("name", first_of(["fp8_tile64, mxfp4, online", "f32"], count=0))
def test_forty_decode_steps_inside_a_scan(name):
    assert_decodes_alike(d4.OpBackends(cache_update="pallas_simulated"), 40, 3, THREE_FORMATS[name])


@requires_gpu
@pytest.mark.parametrize("options", THREE_FORMATS.values(), ids=THREE_FORMATS)
def test_three_hundred_decode_steps_inside_a_scan(options):
    plan = small_plan(**options)
    assert all(CACHE_UPDATE.choose(None, plan, kind) == "pallas" for kind in d4.AttentionType)
    assert_decodes_alike(None, 300, 8, options)
