"""Staged drafts are not visible anywhere, and a commit leaves what the accepted tokens alone would have left."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dsv4jax as d4
from dsv4jax.indexing import Batch
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.compressor import project_tokens
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.update import store
from dsv4jax.requests.speculate import StagedLayer
from tests.support import kernel_cases
from tests.support.cases import first_of
from tests.support.driver import (
    BACKEND,
    BATCH,
    BF16_TAILS,
    CFG,
    F32,
    LAYERS,
    TOKENS,
    TRAINED,
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
from tests.support.kernel_cases import Case, make_batch, make_inputs, make_params, make_stack, same_bytes
from tests.support.machines import BACKENDS
from tests.support.splits import MOVED, TOLERANCE

DRAFT = 8
DRAFTS = [(drafted, accepted) for drafted in range(1, DRAFT + 1) for accepted in range(drafted + 1)]
# Requests of one batch: their first tokens, a window that begins to wrap, each phase around the ends of blocks.
STARTS = (*range(6), 15, 16, 61, 62, *range(118, 134), *range(250, 256))
DEEP = d4.DSV4Config.tiny(compress_ratios=(4, 128))
PLANS = {"f32, ring": F32, "fp8_tile64, mxfp4, online": TRAINED}
layers = tuple(range(DEEP.num_layers))


@functools.partial(jax.jit, static_argnames="backend")
def stage_all(params, x, cache, slots, num_new, *, backend=None):
    """Stage all layers on the same input. Returns ([y per layer], cache, staged)."""
    backend = backend or BACKEND.value
    outputs, staged = [], []
    for layer in range(len(params)):
        y, cache, rows = d4.stage(params[layer], x, cache, layer, slots, num_new, backend=backend)
        outputs.append(y)
        staged.append(rows)
    return outputs, cache, staged


@functools.cache
def prefilled(name: str):
    """Return a cache of requests at ``STARTS`` that are granted a draft, slots, and the draft's inputs [B, DRAFT,
    hidden].
    """
    rows, longest = len(STARTS), max(STARTS)
    plan = d4.plan_cache(DEEP, max_requests=rows + 1, max_context=longest + 2 * DRAFT, **PLANS[name])
    cache, slots, ok = d4.admit(d4.init_cache(plan), rows)
    assert ok
    slots = slots[jnp.asarray(np.random.default_rng(0).permutation(rows))]
    chunks = sequence(1, (longest // DRAFT + 1) * rows * DRAFT, DEEP.hidden_size).reshape(-1, rows, DRAFT, 64)
    for i, x in enumerate(chunks):
        num_new = np.clip(np.array(STARTS) - i * DRAFT, 0, DRAFT)
        _, cache, ok = step(random_params(DEEP), x, cache, slots, ids(*num_new), layers=layers)
        assert ok
    assert cache.seq_lens[slots].tolist() == list(STARTS)
    cache, ok = d4.prepare_forward(cache, slots, ids(*[DRAFT] * rows))
    assert ok
    return cache, slots, sequence(2, rows * DRAFT, DEEP.hidden_size).reshape(rows, DRAFT, -1)


def in_one_call(name: str) -> tuple[list[np.ndarray], list[d4.KVCache]]:
    """Feed the draft's first 0, 1, .. DRAFT tokens in one call. Returns (outputs [layer][DRAFT + 1, B, ..], caches)."""
    cache, slots, x = prefilled(name)
    outputs, caches = [], []
    for n in range(DRAFT + 1):
        ys, after, ok = step(random_params(DEEP), x, cache, slots, ids(*[n] * len(STARTS)), layers=layers)
        assert ok
        outputs.append(ys)
        caches.append(after)
    return [np.stack([np.asarray(ys[layer]) for ys in outputs]) for layer in layers], caches


def one_by_one(name: str, *, width: int) -> list[d4.KVCache]:
    """Return the cache after the draft's first 0, 1, ..

    DRAFT tokens, with one call each, padded to ``width`` tokens.
    """
    cache, slots, x = prefilled(name)
    caches = [cache]
    for i in range(DRAFT):
        token = np.full((len(STARTS), width, DEEP.hidden_size), np.nan, np.float32)
        token[:, 0] = x[:, i]
        _, cache, ok = step(random_params(DEEP), token, cache, slots, ids(*[1] * len(STARTS)), layers=layers)
        assert ok
        caches.append(cache)
    return caches


def row_by_row(caches: list[Any], chosen: np.ndarray, slots: Any, tables: Any) -> d4.KVCache:
    """Return a cache that holds request b as ``caches[chosen[b]]`` does. All have the same block tables."""
    blocks, slots = np.asarray(tables.block_table), np.asarray(slots)

    def pick(axis_1: list[np.ndarray], *leaves: Any) -> np.ndarray:
        mixed = np.array(leaves[0])
        for at, number in zip(axis_1, chosen, strict=True):
            mixed[:, at] = np.asarray(leaves[number])[:, at]
        return mixed

    cache = dataclasses.replace(caches[0], tables=tables)
    for kind in (d4.AttentionType.CSA, d4.AttentionType.HCA):
        stacks = [one.stack(kind) for one in caches]
        state = jax.tree.map(functools.partial(pick, list(slots)), *[stack.state for stack in stacks])
        held = [row[row >= 0] for row in blocks[slots]]
        pool = jax.tree.map(functools.partial(pick, held), *[stack.pool for stack in stacks])
        cache = cache.with_stack(kind, dataclasses.replace(stacks[0], state=state, pool=pool))
    return cache


@pytest.mark.two_programs
@pytest.mark.parametrize("name", first_of(PLANS, count=0))
def test_a_commit_leaves_what_the_accepted_tokens_leave(name):
    """Covers every phase of ``STARTS`` with every length of draft and every number of accepted tokens."""
    cache, slots, x = prefilled(name)
    outputs, fed = in_one_call(name)
    for n, after in enumerate(one_by_one(name, width=DRAFT)):
        assert_fed_alike(fed[n], after, exact=True)
    if name == "f32, ring":
        for n, after in enumerate(one_by_one(name, width=1)):
            assert_fed_alike(fed[n], after, exact=False)
    row = np.arange(len(STARTS))
    for i in range(len(DRAFTS)):
        drafted, accepted = np.array([DRAFTS[(i + 7 * b) % len(DRAFTS)] for b in row]).T
        given = np.where(np.arange(DRAFT)[None, :, None] < drafted[:, None, None], x, np.float32(np.nan))
        ys, staged_cache, staged = stage_all(random_params(DEEP), given, cache, slots, ids(*drafted))
        for layer, y in enumerate(ys):
            same_bytes(f"y of layer {layer}", np.asarray(y), outputs[layer][drafted, row])
        got, ok = d4.commit(staged_cache, staged, ids(*accepted))
        assert ok
        assert got.seq_lens[slots].tolist() == (np.array(STARTS) + accepted).tolist()
        assert_same(poisoned(got), poisoned(row_by_row(fed, accepted, slots, got.tables)))


def assert_fed_alike(got: d4.KVCache, want: d4.KVCache, *, exact: bool) -> None:
    """Compare two caches that were fed the same tokens in different chunks."""
    got, want = poisoned(got), poisoned(want)
    is_online = got.plan.hca_tail == "online"  # the sums of a running softmax are then taken in another order
    if exact:
        assert_same(got.csa, want.csa)
    if exact and not is_online:
        assert_same(got.hca, want.hca)
    # What holds nothing is NaN, also in bf16.
    got, want = (jax.tree.map(lambda leaf: np.where(np.isnan(leaf), np.zeros_like(leaf), leaf), x) for x in (got, want))
    moved, total = moved_values((got.csa, got.hca), (want.csa, want.hca), TOLERANCE)
    assert moved <= (MOVED * total if is_online else 0)


@pytest.mark.two_programs
@pytest.mark.parametrize("name", first_of(PLANS, count=0))
def test_a_draft_that_is_not_committed_shows_nowhere(name):
    cache, slots, x = prefilled(name)
    drafted = ids(*[b % DRAFT + 1 for b in range(len(STARTS))])
    _, staged_cache, staged = stage_all(random_params(DEEP), x, cache, slots, drafted)
    assert_same(poisoned(staged_cache), poisoned(cache))
    assert d4.verify(staged_cache) == []
    got, ok = d4.commit(staged_cache, staged, jnp.zeros_like(drafted))
    assert ok
    assert_same(got.tables.prepared, cache.seq_lens)  # what was granted for it is withdrawn
    tables = dataclasses.replace(got.tables, prepared=cache.tables.prepared)
    assert_same(dataclasses.replace(got, tables=tables), staged_cache)
    # What another call makes of it, with garbage where the draft's entries lay; and of a draft staged over the first.
    another, everything = x[::-1].copy(), ids(*[DRAFT] * len(STARTS))
    want, after, _ = step(random_params(DEEP), another, cache, slots, everything, layers=layers)
    got, got_after, _ = step(random_params(DEEP), another, poisoned(staged_cache), slots, everything, layers=layers)
    assert_same(got, want)
    assert_same(poisoned(got_after), poisoned(after))
    ys, staged_cache, staged = stage_all(random_params(DEEP), another, staged_cache, slots, everything)
    assert_same(ys, want)
    got_after, ok = d4.commit(staged_cache, staged, everything)
    assert ok
    assert_same(poisoned(got_after), poisoned(after))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_commit_refuses_what_is_no_list_of_staged_layers():
    cache, one = d4.init_cache(small_plan()), ids(0)
    layer = StagedLayer(kv=jnp.zeros((1, 1, 1)), entry=None, key=None, slots=one, start=one, num_new=one, layer=0)
    for staged, message in (
        (None, "staged must be what stage returned for every layer, in a list, got NoneType"),
        (layer, "staged must be what stage returned for every layer, in a list, got StagedLayer"),
        ([layer, one], r"staged\[1\]: expected a StagedLayer, got .*Tracer"),
    ):
        wrong: Any = staged
        with pytest.raises(ValueError, match=message):
            d4.commit(cache, wrong, one)


@pytest.mark.slow
def test_commit_refuses_what_it_cannot_store_and_changes_nothing():
    cache, slots, x = prefilled("f32, ring")
    rows = len(STARTS)
    drafted = np.array([b % DRAFT + 1 for b in range(rows)])
    _, cache, staged = stage_all(random_params(DEEP), x, cache, slots, ids(*drafted))

    def refuse(cache, staged, num_accepted):
        got, ok = d4.commit(cache, staged, ids(*num_accepted))
        assert not ok
        assert_same(got, cache)

    for wrong in (-1, -(2**31), drafted[9] + 1, 2**31 - 1):
        accepted = drafted.copy()
        accepted[9] = wrong
        refuse(cache, staged, accepted)
    # The length that the draft began at is past: the same draft again, and none of it again.
    after, ok = d4.commit(cache, staged, ids(*np.where(np.arange(rows) == 9, 1, 0)))
    assert ok
    refuse(after, staged, drafted)
    refuse(after, staged, 0 * drafted)
    refuse(d4.release(cache, slots[:1]), staged, 0 * drafted)  # of length 0, as its draft was
    less, ok = d4.prepare_forward(cache, slots, ids(*np.maximum(drafted - 1, 1)))  # takes back what was granted
    assert ok
    assert d4.verify(less) == []
    refuse(less, staged, drafted)
    other = {
        "slots": jnp.roll(slots, 1),
        "start": staged[0].start + 1,
        "num_new": jnp.maximum(staged[0].num_new - 1, 1),
    }
    for field, value in other.items():
        refuse(cache, [staged[0], dataclasses.replace(staged[1], **{field: value})], 0 * drafted)

    for some in (staged[:1], [*staged, staged[0]], [staged[0]] * 2, []):
        with pytest.raises(ValueError, match="each of the model's 2 layers once"):
            d4.commit(cache, some, ids(*drafted))
    with pytest.raises(AssertionError, match="num_accepted"):
        d4.commit(cache, staged, ids(*drafted[1:]))
    shorter = dataclasses.replace(staged[1], kv=staged[1].kv[:, 1:])
    with pytest.raises(AssertionError, match="kv of layer 1"):
        d4.commit(cache, [staged[0], shorter], ids(*drafted))
    entry, key = staged[0].entry, staged[0].key
    assert entry is not None
    half = jax.tree.map(lambda leaf: leaf[:, :4], entry[0]), entry[1]
    for change, message in (
        (dict(start=staged[0].start[:1]), r"start of layer 0: expected int32 \[B=32\], got int32\[1\]"),
        (dict(num_new=staged[0].num_new[:1]), "num_new of layer 0"),
        (dict(slots=slots[:1]), "slots of layer 0"),
        (dict(entry=half), r"entry.k of layer 0: expected float32 \[B=32, T=8, width=272\]"),
        (dict(key=half), "key.k of layer 0"),
        (dict(entry=(entry[0], entry[1][1:])), "norm of entry of layer 0"),
        (dict(entry=None), "entry and key of layer 0 are not those of a CSA layer"),
        (dict(key=None), "entry and key of layer 0 are not those of a CSA layer"),
    ):
        with pytest.raises((AssertionError, ValueError), match=message):
            d4.commit(cache, [staged[1], dataclasses.replace(staged[0], **change)], ids(*drafted))
    with pytest.raises(ValueError, match="entry and key of layer 1 are not those of a HCA layer"):
        d4.commit(cache, [staged[0], dataclasses.replace(staged[1], key=key)], ids(*drafted))
    with pytest.raises(ValueError, match="a draft must have rows and tokens"):
        d4.stage(random_params(DEEP)[0], jnp.asarray(x[:, :0]), cache, 0, slots, ids(*drafted))


@pytest.mark.slow
def test_a_row_that_may_not_bring_tokens_stages_none():
    """These are padding, no token, more than was granted, and more than there are. Their outputs are 0."""
    cache, slots, x = prefilled("f32, ring")
    cache, ok = d4.prepare_forward(cache, slots[2:4], ids(3, DRAFT + 1))
    assert ok
    rows, idle = len(STARTS), [0, 1, 2, 3]
    slots = slots.at[0].set(-1)
    drafted = np.array([4, 0, 4, DRAFT + 1] + [5] * (rows - 4))
    given = x.copy()
    given[idle] = np.nan
    ys, cache, staged = stage_all(random_params(DEEP), given, cache, slots, ids(*drafted))
    assert not np.asarray(ys)[:, idle].any()
    assert staged[0].num_new.tolist() == [0] * 4 + [5] * (rows - 4)
    assert d4.verify(cache) == []
    assert cache.tables.prepared[slots[3]] == cache.seq_lens[slots[3]], "a grant of more than there are is withdrawn"
    before = [contents(cache, int(slots[b])) for b in idle[1:]]
    after, ok = d4.commit(cache, staged, ids(*[0] * 4 + [5] * (rows - 4)))
    assert ok
    for b, held in zip(idle[1:], before, strict=True):
        assert_same(contents(after, int(slots[b])), held)
    for b in idle:
        _, ok = d4.commit(cache, staged, ids(*np.arange(rows) == b))
        assert not ok


@pytest.mark.slow
def test_a_pass_that_is_refused_after_a_draft_that_was_not_accepted_leaves_all_rows_alone():
    """A grant for the rest of a draft does not let anything run later."""
    cache, slots, x = prefilled("f32, ring")
    rows = len(STARTS)
    _, cache, staged = stage_all(random_params(DEEP), x, cache, slots, ids(*[DRAFT] * rows))
    accepted = np.arange(rows) % (DRAFT + 1)
    cache, ok = d4.commit(cache, staged, ids(*accepted.tolist()))
    assert ok
    assert_same(cache.tables.prepared, cache.seq_lens)
    assert d4.verify(cache) == []
    num_new = ids(*np.where(np.arange(rows) == 5, -1, np.maximum(DRAFT - accepted, 1)).tolist())
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert not ok
    ys, _, staged = stage_all(random_params(DEEP), x, cache, slots, num_new)
    assert not any(np.asarray(y).any() for y in ys)
    assert not staged[0].num_new.any()
    assert_same(d4.advance(cache, slots, num_new).seq_lens, cache.seq_lens)


# ---- inside a loop of the compiler ----------------------------------------------------------------------------------


@pytest.mark.sweep(guard="test_a_commit_leaves_what_the_accepted_tokens_leave")
def test_a_speculative_generation_inside_scan_equals_feeding_what_was_accepted():
    """Each step drafts eight tokens, of which some first ones are right."""
    rng, params, steps = np.random.default_rng(5), random_params(), 12
    accepted = rng.integers(0, 6, (steps, BATCH)).astype(np.int32)
    xs = [sequence(20 + b, int(n), CFG.hidden_size) for b, n in enumerate(accepted.sum(0))]
    drafts = rng.standard_normal((steps, BATCH, TOKENS, CFG.hidden_size), np.float32)
    done = np.zeros(BATCH, int)
    for draft, row in zip(drafts, accepted, strict=True):
        for b, n in enumerate(row):
            draft[b, :n] = xs[b][done[b] : done[b] + n]
        done += row
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**BF16_TAILS)), BATCH)
    assert ok

    @jax.jit
    def generate(params, cache, slots, drafts, accepted):
        def body(cache, given):
            x, num_accepted = given
            num_new = jnp.full_like(num_accepted, TOKENS)
            cache, granted = d4.prepare_forward(cache, slots, num_new)
            _, cache, staged = stage_all(params, x, cache, slots, num_new)
            cache, ok = d4.commit(cache, staged, num_accepted)
            return cache, granted & ok

        return lax.scan(body, cache, (drafts, accepted))

    got, ok = generate(params, cache, slots, drafts, accepted)
    assert ok.all()
    splits = accepted.T.tolist()
    _, want = feed(params, xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    assert_same(got.seq_lens, want.seq_lens)
    for slot in slots.tolist():
        a, b = (contents(poisoned(each), slot) for each in (got, want))
        # The last draft may have been granted a block that its tokens did not come to.
        blocks = min(a.pop("blocks"), b.pop("blocks"))
        assert a.pop("seq_len") == b.pop("seq_len")
        a, b = ({name: live(part, blocks if "pool" in name else None) for name, part in x.items()} for x in (a, b))
        # The loop's body is compiled apart: sums may be taken in another order, and the streams are rounded to bf16.
        moved, total = moved_values(a, b, TOLERANCE)
        assert moved <= MOVED * total


def live(part: Any, blocks: int | None) -> Any:
    """Return the first blocks of a pool, or all of another part, with zeros where nothing is held."""
    return jax.tree.map(lambda leaf: np.where(np.isnan(leaf), np.zeros_like(leaf), leaf)[:, :blocks], part)


# ---- on the kernels -------------------------------------------------------------------------------------------------

SWA, CSA, HCA = d4.AttentionType.SWA, d4.AttentionType.CSA, d4.AttentionType.HCA
KERNEL_CASES = [
    Case(kind=CSA, tokens=1, kv_format="fp8_row", indexer_format="nvfp4"),
    Case(kind=CSA, tokens=5, kv_format="fp8_tile64", indexer_format="mxfp4", cfg=kernel_cases.ODD),
    Case(kind=HCA, tokens=1, kv_format="fp8_row"),
    Case(kind=HCA, tokens=5, kv_format="f32", tail_dtype="bfloat16"),
    Case(kind=HCA, tokens=1, kv_format="fp8_tile64", hca_tail="online"),
    Case(kind=HCA, tokens=33, kv_format="fp8_row", hca_tail="online"),
]


@functools.partial(jax.jit, static_argnames=("case", "backend", "keep_tails"))
def store_entries(params, x, stack, table, slots, start, num_new, *, case, backend, keep_tails):
    plan, kind, index = case.plan, case.kind, jnp.int32(kernel_cases.LAYER)
    batch = Batch(slots=slots, start=start, num_new=num_new).fitting(case.tokens)
    call = LayerCall(stack=stack, index=index, block_table=table, batch=batch, kind=kind, plan=plan)
    rows = project_tokens(params[0], params[1], x, start, plan, kind)
    return store(call, rows, CACHE_UPDATE[backend], keep_tails=keep_tails)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", first_of(KERNEL_CASES, count=3), ids=str)
def test_the_kernel_writes_the_entries_of_a_whole_update_and_nothing_else(case, backend):
    batch = make_batch(case)
    before, x = make_stack(case, batch), make_inputs(case)[0]
    rows = [jnp.asarray(array) for array in (batch.block_table, batch.slots, batch.start, batch.num_new)]
    staged, whole = (
        store_entries(
            make_params(case.cfg, case.kind), x, before, *rows, case=case, backend=backend, keep_tails=keep_tails
        )
        for keep_tails in (True, False)
    )
    assert_same(staged.state, before.state)
    assert_same(staged.pool, whole.pool)
    assert kernel_cases.written_entries(case, batch).any()
    # With ``test_kernels``, which compares whole updates with XLA's, this leaves nothing to compare.


@pytest.mark.sweep(guard="test_the_kernel_writes_the_entries_of_a_whole_update_and_nothing_else")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_on_the_kernels(backend):
    """The draft is staged and committed by kernels, and by XLA."""
    cache, slots, x = prefilled("f32, ring")
    drafted = np.array([b % DRAFT + 1 for b in range(len(STARTS))])
    accepted = ids(*drafted * 2 // 3)
    found = []
    # By default a CPU runs XLA, in programs that other tests have compiled.
    other = None if backend == "pallas_simulated" else d4.OpBackends(cache_update="xla")
    for options in (d4.OpBackends(cache_update=backend), other):
        ys, after, staged = stage_all(random_params(DEEP), x, cache, slots, ids(*drafted), backend=options)
        assert_same(poisoned(after), poisoned(cache))
        after, ok = d4.commit(after, staged, accepted, backend=options)
        assert ok
        found.append((ys, poisoned(after)))
    assert_same(found[0][1].tables, found[1][1].tables)
    # Sums of an entry are taken in another order, and a few are among what a query reads.
    assert moved_values(found[0], found[1], TOLERANCE)[0] == 0
