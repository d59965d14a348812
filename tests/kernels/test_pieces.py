"""Each piece of an update, and the gathers, compared separately with their XLA forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.config import AttentionType
from dsv4jax.formats import KV_FORMATS
from dsv4jax.indexing import Batch as Rows
from dsv4jax.layer import update
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.ops import CACHE_UPDATE
from tests.support.cases import first_of
from tests.support.kernel_cases import (
    BAD,
    BF16,
    EVEN,
    F32,
    LAYER,
    ODD,
    Batch,
    Case,
    csa,
    hca,
    make_batch,
    make_inputs,
    make_stack,
    same_bytes,
    swa,
)
from tests.support.machines import BACKENDS

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
backends = pytest.mark.parametrize("backend", BACKENDS)


def rows_of(batch: Batch) -> list[jax.Array]:
    return [jnp.asarray(x) for x in (batch.slots, batch.start, batch.num_new)]


def assert_same_leaves(got: Any, want: Any, before: Any) -> None:
    """Check that results are equal byte for byte, and differ from what was there before."""
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want, before)]
    for i, (a, b, _) in enumerate(zip(*leaves, strict=True)):
        same_bytes(f"leaf {i}", a, b)
    assert any(b.tobytes() != old.tobytes() for _, b, old in zip(*leaves, strict=True))


def give(tree: Any) -> Any:
    """Return a copy with separate buffers, which may be donated."""
    return jax.tree.map(jnp.copy, tree)


@backends
@pytest.mark.parametrize(("tokens", "cfg"), [(1, ODD), (40, EVEN)], ids=["T1 odd", "T40 even"])
@pytest.mark.parametrize("kv_format", first_of(KV_FORMATS, count=2))
def test_append_swa(tokens, kv_format, cfg, backend):
    case = swa(tokens, kv_format, cfg=cfg)
    batch = make_batch(case)
    state, kv = make_stack(case, batch).state, jnp.asarray(make_inputs(case)[1])
    kv = kv.at[BAD, 0, 3].set(jnp.nan)  # its row is NaN in both
    rows = rows_of(batch)
    got, want = (
        d4.pieces.append_swa(give(state), LAYER, kv, *rows, plan=case.plan, backend=name) for name in (backend, "xla")
    )
    assert_same_leaves(without_nan_bits(got), without_nan_bits(want), without_nan_bits(state))


@backends
@pytest.mark.parametrize(("tokens", "cfg"), [(1, ODD), (40, EVEN), (6, ODD)], ids=["T1 odd", "T40 even", "T6 odd"])
def test_all_layers_at_once_are_stored_as_one_after_another(tokens, cfg, backend):
    case = swa(tokens, "fp8_tile64", cfg=dataclasses.replace(cfg, compress_ratios=(0, 0, 0)))
    batch = make_batch(case)
    stack, rows = make_stack(case, batch), rows_of(batch)
    shape = 3, case.batch, tokens, cfg.head_dim
    kv = jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32).at[1, BAD, 0, 3].set(jnp.nan)

    @jax.jit
    def at_once(stack: Any, kv: jax.Array, slots: jax.Array, start: jax.Array, num_new: jax.Array) -> Any:
        given = Rows(slots=slots, start=start, num_new=num_new).fitting(tokens)
        table = jnp.asarray(batch.block_table)
        call = LayerCall(stack=stack, index=0, block_table=table, batch=given, kind=SWA, plan=case.plan)
        return update.append_to_all_layers(call, kv, CACHE_UPDATE[backend])

    want = give(stack.state)
    for layer in range(3):
        want = d4.pieces.append_swa(want, layer, kv[layer], *rows, plan=case.plan, backend="xla")
    got = at_once(stack, kv, *rows)
    assert_same_leaves(without_nan_bits(got), without_nan_bits(want), without_nan_bits(stack.state))


def without_nan_bits(tree: Any) -> Any:
    """Replace every NaN, in floats and E4M3 codes, by the same one, because its bits and sign are not defined."""

    def unify(path: Any, leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        if leaf.dtype in (F32, BF16):
            return np.where(np.isnan(leaf), np.full_like(leaf, np.nan), leaf)
        if leaf.dtype == np.uint8 and jax.tree_util.keystr(path).endswith("nope"):
            return np.where(leaf & 0x7F == 0x7F, np.uint8(0x7F), leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(unify, tree)


@backends
@pytest.mark.parametrize(
    "case",
    [
        *(csa(17, "f32", "f32"), csa(17, "bf16", "bf16", cfg=ODD), csa(17, "fp8_row", "nvfp4")),
        *(csa(17, "fp8_tile64", "mxfp4", cfg=ODD), csa(17, "f32", "nvfp4", cfg=ODD)),
        *(hca("ring", 17, "f32", cfg=ODD), hca("ring", 17, "fp8_tile64"), hca("ring", 17, "fp8_row", cfg=ODD)),
    ],
    ids=str,
)
def test_flush(case, backend):
    """Finished entries are only rounded, so no byte may differ."""
    batch, rng = make_batch(case), np.random.default_rng(3)
    pool = make_stack(case, batch).pool
    entries = rng.standard_normal((case.batch, 5, case.cfg.head_dim)).astype(F32)
    entries *= F32(10) ** rng.integers(-3, 3, (case.batch, 5, 1)).astype(F32)
    keys = rng.standard_normal((case.batch, 5, case.cfg.indexer_head_dim)).astype(F32)
    for values, largest in ((entries, 448), (keys, 6)):  # a scale of 1, and ties between neighbouring codes
        values[:4] = rng.integers(-16 * largest, 16 * largest + 1, values[:4].shape) / 16
        values[:4, :, ::16] = largest
    entries[BAD, 1, 3] = np.inf
    keys[BAD, 2, 9] = np.nan
    first = batch.start // case.ratio
    count = np.minimum(rng.integers(1, 6, case.batch), case.plan.max_blocks * case.plan.entries_per_block(case.kind))
    count[[5, 6, BAD]] = 0, 6, 5  # nothing; more than there are; the bad ones too
    places = dict(block_table=batch.block_table, slots=batch.slots, first=first, count=count)
    new = d4.pieces.NewEntries(
        entries=jnp.asarray(entries),
        keys=jnp.asarray(keys) if case.kind == CSA else None,
        **{name: jnp.asarray(x, jnp.int32) for name, x in places.items()},
    )
    got, want = (
        d4.pieces.flush_entries(give(pool), LAYER, new, plan=case.plan, backend=name) for name in (backend, "xla")
    )
    assert_same_leaves(without_nan_bits(got), without_nan_bits(want), without_nan_bits(pool))


@backends
@pytest.mark.parametrize("cfg", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("tail_dtype", first_of(["float32", "bfloat16"]))
@pytest.mark.parametrize("tail", ["csa", "ring", "online"])
def test_rotate_and_reset(tail, tail_dtype, cfg, backend):
    options: Any = dict(cfg=cfg, tail_dtype=tail_dtype)
    case = csa(1, "f32", "f32", **options) if tail == "csa" else hca(tail, 1, "f32", **options)
    batch = make_batch(case)
    # Complete blocks: all of their rows are there.
    batch = dataclasses.replace(batch, start=batch.start // case.ratio * case.ratio + case.ratio - 1)
    rng = np.random.default_rng(5)
    state: Any = make_stack(case, batch).state
    last = {name: getattr(state.tail, name) for name in ("kb_next", "zb_next") if tail == "csa"}
    fresh = {name: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) for name, leaf in last.items()}
    state = dataclasses.replace(state, tail=dataclasses.replace(state.tail, **fresh))
    if tail == "csa":
        keys = {name: getattr(state.indexer_tail, name) for name in fresh}
        keys = {name: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) for name, leaf in keys.items()}
        state = dataclasses.replace(state, indexer_tail=dataclasses.replace(state.indexer_tail, **keys))
    complete = jnp.asarray(rng.random(case.batch) < 0.7)
    assert 0 < complete.sum() < case.batch

    def call(state: Any, name: str) -> Any:
        slots = jnp.asarray(batch.slots)
        if tail == "csa":
            return d4.pieces.rotate_csa(state, LAYER, slots, complete, backend=name)
        return d4.pieces.reset_hca(state, LAYER, slots, complete, plan=case.plan, backend=name)

    assert_same_leaves(call(give(state), backend), call(give(state), "xla"), state)


# ---- gathering ------------------------------------------------------------------------------------------------------


def readable_pool(case: Case) -> Any:
    """Return random bytes as entries. Scales avoid subnormal products, which XLA may flush to 0 and kernels do not."""
    rng = np.random.default_rng(7)
    pool = make_stack(case, make_batch(case)).pool
    assert pool is not None
    scale = pool.entries.scale
    if scale is not None and scale.dtype == jnp.uint8:
        scale = rng.integers(60, 190, scale.shape).astype(np.uint8)
        scale[rng.random(scale.shape) < 0.02] = 255  # NaN
    return dataclasses.replace(pool, entries=dataclasses.replace(pool.entries, scale=scale))


@backends
def test_gathering_nothing_gives_nothing(backend):
    case = csa(5, "f32", "f32", cfg=ODD)
    batch, pool = make_batch(case), jax.tree.map(jnp.asarray, readable_pool(case))
    table, slots = jnp.asarray(batch.block_table), jnp.asarray(batch.slots)
    picks = jnp.zeros((case.batch, 0), jnp.int32)
    rows = d4.pieces.gather_compressed(pool, LAYER, table, slots, picks, plan=case.plan, backend=backend)
    assert rows.shape == (case.batch, 0, ODD.head_dim)
    none = jnp.zeros(0, jnp.int32)
    rows = d4.pieces.gather_all_compressed(pool, LAYER, table, none, none, plan=case.plan, backend=backend)
    assert rows.shape == (0, case.plan.max_blocks * case.plan.entries_per_block(CSA), ODD.head_dim)


@backends
@pytest.mark.parametrize(("dtype", "cfg"), [(jnp.float32, ODD), (jnp.bfloat16, EVEN)], ids=["f32 odd", "bf16 even"])
@pytest.mark.parametrize("kv_format", first_of(KV_FORMATS, count=2))
def test_gathering_gives_what_the_xla_form_gives(kv_format, cfg, dtype, backend):
    """Values are decoded by one product and rounded once, so no bit may differ, except in NaN."""
    case = csa(5, kv_format, "f32", cfg=cfg)
    plan, batch, rng = case.plan, make_batch(case), np.random.default_rng(8)
    pool = jax.tree.map(jnp.asarray, readable_pool(case))
    table, slots = jnp.asarray(batch.block_table), jnp.asarray(batch.slots)
    capacity = plan.max_blocks * plan.entries_per_block(CSA)
    picks = rng.integers(-1, capacity, (case.batch, 3, 7)).astype(np.int32)
    picks[0, :, ::2] = -1
    held = np.minimum(rng.integers(0, capacity + 1, case.batch), capacity)
    held[[0, 1, 2]] = 0, 1, capacity
    options: dict[str, Any] = dict(plan=plan, dtype=dtype)
    chosen = [
        d4.pieces.gather_compressed(pool, LAYER, table, slots, jnp.asarray(picks), backend=name, **options)
        for name in (backend, "xla")
    ]
    everything = [
        d4.pieces.gather_all_compressed(
            pool, LAYER, table, slots, jnp.asarray(held, jnp.int32), backend=name, **options
        )
        for name in (backend, "xla")
    ]
    for got, want in (chosen, everything):
        got, want = np.asarray(got), np.asarray(want)
        same_bytes("gathered rows", got, want, nan_bits=False)
        assert np.isnan(got).any()
        assert np.count_nonzero(np.nan_to_num(got.astype(F32))) > got.size // 10
    assert chosen[0].shape == (case.batch, 3, 7, cfg.head_dim)
    there = (picks >= 0) & (batch.slots >= 0)[:, None, None]
    assert not np.asarray(chosen[0])[~there].any()
    past = np.arange(capacity) >= held[:, None]
    assert not np.asarray(everything[0])[past].any()
