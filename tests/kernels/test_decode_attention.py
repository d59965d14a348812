"""Decode attention over stored rows, against NumPy on the same rows decoded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.formats import KV_FORMATS
from pallas_kernels.attention import sm90, sm90_few, sm100
from pallas_kernels.attention.call import Layout, choose_layout, decode_attention
from tests.support.machines import MACHINES, requires_gpu

DIM, ROPE = 512, 64
ONE_BLOCK = sm90.Layout()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch over a permuted, poisoned cache."""

    lengths: tuple[int, ...]  # tokens that each request holds before the call; -1 = a padding row
    tokens: int = 1
    entries: str | None = "picked"  # or "all"
    top_k: int = 64
    ratio: int = 4
    per_block: int = 32
    n_win: int = 128
    heads: int = 64
    kv_format: str = "fp8_row"
    q_dtype: Any = jnp.float16
    dtype: Any = jnp.float32
    turned: bool = True
    layout: Layout | None = ONE_BLOCK
    seed: int = 0


def poisoned(leaf: np.ndarray) -> np.ndarray:
    """NaN in every dtype: bytes of 0xFF are NaN in E4M3, UE8M0, bf16 and f32."""
    return np.full(leaf.shape, 0xFF, np.uint8).repeat(leaf.dtype.itemsize, -1).view(leaf.dtype).reshape(leaf.shape)


def encode(rng: np.random.Generator, kv_format: str, count: int) -> tuple[Any, np.ndarray]:
    """Random rows: stored, and what they decode to."""
    shape = (-(-count // 512) * 512,)  # few shapes to compile for
    x = rng.standard_normal((*shape, DIM)).astype(np.float32) * np.exp(rng.uniform(-3, 1, (*shape, 1))).astype(
        np.float32
    )
    form = KV_FORMATS[kv_format]
    rows = form.encode(jnp.asarray(x), ROPE)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], rows), np.asarray(form.decode(rows))[:count]


def place(store: Any, at: tuple[Any, ...], rows: Any) -> None:
    for leaf, value in zip(jax.tree.leaves(store), jax.tree.leaves(rows), strict=True):
        leaf[at] = value


def make(case: Case) -> tuple[dict[str, Any], np.ndarray]:
    """The kernel's arguments and the expected output, f64."""
    rng = np.random.default_rng(case.seed)
    batch, tokens, layers, requests = len(case.lengths), case.tokens, 2, len(case.lengths) + 2
    layer, slots = 1, rng.permutation(requests)[:batch].astype(np.int32)
    row, _ = encode(rng, case.kv_format, 1)

    def store(*lead: int) -> Any:
        return jax.tree.map(lambda leaf: poisoned(np.empty((*lead, *leaf.shape[1:]), leaf.dtype)), row)

    most = max(case.lengths) + tokens
    max_blocks = max(1, -(-most // (case.ratio * case.per_block)))
    num_blocks = batch * max_blocks + 3
    table = np.full((requests, max_blocks), -1, np.int32)
    free = list(rng.permutation(num_blocks))
    window, pos = store(layers, requests, case.n_win), np.full((layers, requests, case.n_win), -1, np.int32)
    pool = store(layers, num_blocks, case.per_block)
    fresh = store(batch, tokens) if tokens > 1 else None
    q = rng.standard_normal((batch, tokens, case.heads, DIM)).astype(np.float32) * 2
    q = np.asarray(jnp.asarray(q).astype(case.q_dtype))
    sinks = rng.standard_normal(case.heads).astype(np.float32)
    positions = np.full((batch, tokens), -1, np.int32)
    visible, start = np.zeros((batch, tokens), np.int32), np.zeros(batch, np.int32)
    picks = np.full((batch, tokens, case.top_k), -1, np.int32)
    angles = rng.uniform(-3, 3, (batch, tokens, ROPE // 2))
    expected = np.zeros((batch, tokens, case.heads, DIM))
    for b, length in enumerate(case.lengths):
        if length < 0:
            slots[b] = -1
            continue
        held = length + 1 if tokens == 1 else length  # one token is stored before it attends
        start[b] = held
        tokens_here = encode(rng, case.kv_format, length + tokens)
        for p in range(max(0, held - case.n_win), held):
            one = jax.tree.map(lambda leaf, p=p: leaf[p], tokens_here[0])
            place(window, (layer, slots[b], p % case.n_win), one)
            pos[layer, slots[b], p % case.n_win] = p
        if fresh is not None:
            place(fresh, (b,), jax.tree.map(lambda leaf, first=length: leaf[first:], tokens_here[0]))
        count = (length + tokens) // case.ratio
        rows, decoded = encode(rng, case.kv_format, max(count, 1))
        for first in range(0, count, case.per_block):
            block = free.pop()
            table[slots[b], first // case.per_block] = block
            some = slice(first, min(first + case.per_block, count))
            held = slice(0, some.stop - first)
            place(pool, (layer, block, held), jax.tree.map(lambda leaf, some=some: leaf[some], rows))
        real = tokens if b % 2 == 0 else max(1, tokens - 1)
        for t in range(real):
            p = length + t
            positions[b, t], visible[b, t] = p, (p + 1) // case.ratio
            chosen = rng.permutation(visible[b, t])[: case.top_k]
            if case.entries == "picked":
                at = rng.permutation(case.top_k)[: len(chosen)]
                picks[b, t, at] = chosen
            else:
                chosen = np.arange(visible[b, t])
            keys = tokens_here[1][max(0, p - case.n_win + 1) : p + 1]
            if case.entries is not None:
                keys = np.concatenate([keys, decoded[chosen]])
            keys = keys.astype(np.float64)
            logits = q[b, t].astype(np.float64) @ keys.T * DIM**-0.5
            top = np.maximum(logits.max(-1), sinks)
            weights = np.exp(logits - top[:, None])
            out = weights @ keys / (weights.sum(-1) + np.exp(sinks - top))[:, None]
            if case.turned:
                even, odd = out[:, -ROPE::2].copy(), out[:, -ROPE + 1 :: 2].copy()
                cos, sin = np.cos(angles[b, t]), np.sin(angles[b, t])
                out[:, -ROPE::2], out[:, -ROPE + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
            expected[b, t] = out
    has_entries = case.entries is not None
    arguments = dict(
        q=q,
        window=window,
        pos=pos,
        fresh=fresh,
        entries=pool if has_entries else None,
        picks=picks if case.entries == "picked" else None,
        block_table=table if has_entries else None,
        slots=slots,
        start=start,
        positions=positions,
        visible=visible if has_entries else None,
        sinks=sinks,
        angles=np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32) if case.turned else None,
        layer=np.full(1, layer, np.int32),
    )
    return jax.tree.map(jnp.asarray, arguments), expected


def run(case: Case, arguments: dict[str, Any], *, simulate: bool) -> np.ndarray:
    options = dict(kv_format=case.kv_format, dtype=case.dtype, layout=case.layout, simulate=simulate)
    call = jax.jit(lambda arguments: decode_attention(**(arguments | options)))
    return np.asarray(call(arguments)).astype(np.float64)


def check(case: Case, *, simulate: bool) -> None:
    arguments, expected = make(case)
    found = run(case, arguments, simulate=simulate)
    # Queries, weights and rows are rounded to f16, 2^-11 each: what they are off by is below 2^-9 of a row's largest
    # value. bf16 rounds the result by 2^-9 of itself.
    scale = np.abs(expected).max(-1, keepdims=True)
    limit = 2.0**-9 * scale + (2.0**-8 * np.abs(expected) if case.dtype == jnp.bfloat16 else 0)
    assert np.isfinite(found).all()
    assert np.max(np.abs(found - expected) - limit) <= 0
    real = scale[..., 0] > 0
    a, b = found[real], expected[real]
    cosine = np.sum(a * b, -1) / np.sqrt(np.sum(a * a, -1) * np.sum(b * b, -1))
    assert np.max(1 - cosine, initial=0) < 1e-5


machines = pytest.mark.parametrize("simulate", MACHINES)


@machines
@pytest.mark.parametrize("entries", ["picked", "all", None])
@pytest.mark.parametrize("cluster", [1, 2])
def test_one_token_of_ragged_requests(simulate, entries, cluster):
    check(Case(lengths=(300, 0, -1, 130), entries=entries, layout=sm90.Layout(cluster=cluster)), simulate=simulate)


@machines
@pytest.mark.parametrize("kv_format", ["fp8_tile64", "bf16"])
def test_formats(simulate, kv_format):
    check(Case(lengths=(150, 37), kv_format=kv_format, entries="all", per_block=8), simulate=simulate)


@machines
@pytest.mark.parametrize(("tokens", "lengths"), [(2, (140, 126, 0)), (8, (124,))])
def test_several_tokens_that_the_ring_does_not_hold_yet(simulate, tokens, lengths):
    check(Case(lengths=lengths, tokens=tokens, layout=sm90.Layout(cluster=2)), simulate=simulate)


@machines
@pytest.mark.parametrize("cluster", [4, 8])
def test_more_blocks_than_tiles(simulate, cluster):
    check(Case(lengths=(257, 3), entries="all", layout=sm90.Layout(cluster=cluster)), simulate=simulate)


@machines
def test_two_groups_of_heads_and_bf16(simulate):
    case = Case(
        lengths=(129, 64),
        heads=128,
        q_dtype=jnp.bfloat16,
        dtype=jnp.bfloat16,
        turned=False,
        layout=sm90.Layout(cluster=2),
    )
    check(case, simulate=simulate)


@machines
def test_hca_entries_one_per_block(simulate):
    check(Case(lengths=(900, 127, 128), entries="all", ratio=128, per_block=1), simulate=simulate)


@machines
def test_another_window(simulate):
    check(Case(lengths=(200, 5), n_win=64, tokens=3, entries=None), simulate=simulate)


@machines
@pytest.mark.parametrize(
    ("case", "heads", "cluster", "tiles"),
    [
        (Case(lengths=(300, 0, -1)), 16, 2, 2),
        (Case(lengths=(130,), entries=None, dtype=jnp.bfloat16, q_dtype=jnp.bfloat16), 16, 2, 1),
        (Case(lengths=(500, 129), entries="all", kv_format="fp8_tile64", turned=False), 32, 4, 2),
        (Case(lengths=(900,), entries="all", kv_format="bf16"), 8, 2, 3),
        (Case(lengths=(300,), tokens=2, top_k=384, heads=128), 32, 8, 1),
        (Case(lengths=(200, 5), n_win=100, top_k=16), 8, 2, 2),
    ],
    ids=["ragged", "window", "all entries", "three tiles", "several tokens", "another window"],
)
def test_few_queries(simulate, case, heads, cluster, tiles):
    layout = sm90_few.Layout(heads=heads, cluster=cluster, tiles=tiles)
    check(dataclasses.replace(case, layout=layout), simulate=simulate)


@machines
@pytest.mark.parametrize("layout", [ONE_BLOCK, sm90_few.Layout(heads=16, cluster=2, tiles=2)])
def test_no_pick_and_no_table(simulate, layout):
    """Picks that are all -1, blocks that are not there, and a ring that holds other positions are no keys."""
    case = Case(lengths=(200, 200, 200), seed=3, layout=layout)
    arguments, _ = make(case)
    no_entries = dict.fromkeys(("entries", "picks", "block_table", "visible"))
    alone = run(case, arguments | no_entries, simulate=simulate)
    window_alone = arguments | dict(picks=jnp.full_like(arguments["picks"], -1))
    np.testing.assert_array_equal(run(case, window_alone, simulate=simulate), alone)
    no_blocks = arguments | dict(block_table=jnp.full_like(arguments["block_table"], -1))
    np.testing.assert_array_equal(run(case, no_blocks, simulate=simulate), alone)
    empty = window_alone | dict(pos=jnp.full_like(arguments["pos"], -1))
    np.testing.assert_array_equal(run(case, empty, simulate=simulate), 0.0)


@machines
@pytest.mark.parametrize("layout", [ONE_BLOCK, sm90_few.Layout(heads=16, cluster=4, tiles=1)])
def test_nan_is_loud_and_stays_in_its_request(simulate, layout):
    case = Case(lengths=(150, 150), entries="all", layout=layout)
    arguments, _ = make(case)
    slot, layer = int(arguments["slots"][1]), int(arguments["layer"][0])
    rope = arguments["window"].rope.at[layer, slot, 9, 0].set(jnp.nan)
    broken = arguments | dict(window=dataclasses.replace(arguments["window"], rope=rope))
    found, before = run(case, broken, simulate=simulate), run(case, arguments, simulate=simulate)
    np.testing.assert_array_equal(found[0], before[0])
    assert np.isnan(found[1]).all()


def test_one_query_shares_among_blocks_what_fits():
    def clusters(architecture: str, heads: int, tiles: int, *queries: int) -> list[int]:
        return [choose_layout(architecture, n, heads, tiles).cluster for n in queries]

    for architecture in ("sm90", "sm100"):
        assert clusters(architecture, 64, 10, 1, 13, 14, 32, 33, 66, 67) == [8, 8, 4, 4, 2, 2, 1]
        assert [choose_layout(architecture, 1, 128, tiles).cluster for tiles in (1, 2, 4, 8)] == [1, 2, 4, 8]
    few = sm90_few.Layout
    assert choose_layout("sm90", 1, 64, 10) == few(heads=8, cluster=8, tiles=2)
    assert choose_layout("sm90", 3, 64, 18) == few(heads=16, cluster=8, tiles=3)
    assert choose_layout("sm90", 6, 64, 10) == few(heads=32, cluster=8, tiles=2)
    assert choose_layout("sm90", 8, 64, 2) == few(heads=8, cluster=2, tiles=1)
    assert choose_layout("sm90", 4, 64, 18) == sm90.Layout(cluster=8)  # three tiles and 32 heads do not fit
    assert choose_layout("sm90", 17, 64, 2) == sm90.Layout(cluster=2)
    assert choose_layout("sm90", 1, 64, 25) == sm90.Layout(cluster=8)
    assert choose_layout("sm100", 1, 64, 10) == sm100.Layout(cluster=8)


@requires_gpu
@pytest.mark.parametrize("kv_format", ["fp8_row", "fp8_tile64", "bf16"])
@pytest.mark.parametrize("entries", ["picked", "all"])
@pytest.mark.parametrize("heads", [64, 128])
def test_a_full_chip(kv_format, entries, heads):
    lengths = tuple(int(n) for n in np.random.default_rng(0).integers(0, 3000, 40))
    case = Case(lengths=lengths, entries=entries, top_k=512, heads=heads, kv_format=kv_format, dtype=jnp.bfloat16)
    check(case, simulate=False)
    check(dataclasses.replace(case, lengths=lengths[:9], tokens=4, layout=None), simulate=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_format="f32"), "kv_format must be one of"),
        (dict(heads=32), "num_heads must be a multiple of 64, got 32"),
        (dict(layout=sm90_few.Layout(heads=16, cluster=2, tiles=1)), "does not serve queries of 3 tiles"),
        (dict(layout=sm90_few.Layout(heads=24, cluster=2, tiles=2)), "does not share 64 heads"),
        (dict(layout=sm90.Layout(cluster=3)), "does not share 512 channels"),
    ],
)
def test_what_it_does_not_serve(change, message):
    case = dataclasses.replace(Case(lengths=(3,)), **change)
    arguments, _ = make(case)
    with pytest.raises(ValueError, match=message):
        run(case, arguments, simulate=True)
