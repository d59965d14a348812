"""Decode attention over stored rows, compared with NumPy on the decoded rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax import formats as xla
from pallas_kernels.attention import block, call, sm90, sm90_few, sm90_spread, sm100
from pallas_kernels.attention.call import choose_layout
from pallas_kernels.attention.inputs import AttentionInputs
from pallas_kernels.attention.keys import KEYS
from pallas_kernels.attention.layout import AttentionLayout
from pallas_kernels.attention.wide import widen, worth_widening
from pallas_kernels.formats import ATTENDED_FORMATS, Fp8TileRows
from pallas_kernels.language.target import BLACKWELL, GPU, HOPPER
from tests.support.attention_cases import ONE_BLOCK, Case, check, make, run
from tests.support.cases import first_of
from tests.support.lane_kernels import mesh_of
from tests.support.machines import MACHINES, requires_gpu

WIDE = sm90.Layout(is_wide=True)
FEW, SPREAD = sm90_few.Layout(heads=16, cluster=2, tiles=2), sm90_spread.Layout(tiles=3)
machines = pytest.mark.parametrize("simulate", MACHINES)


@machines
@pytest.mark.parametrize(
    ("entries", "cluster"),
    first_of([("picked", 1), ("all", 2), (None, 1), ("picked", 2), ("all", 1), (None, 2)], count=2),
)
def test_one_token_of_ragged_requests(simulate, entries, cluster):
    check(Case(lengths=(300, 0, -1, 130), entries=entries, layout=sm90.Layout(cluster=cluster)), simulate=simulate)


@machines
@pytest.mark.parametrize(("entries", "heads", "blocks"), first_of([("all", 64, 3), ("picked", 128, 4)]))
def test_a_block_computes_several_queries(simulate, entries, heads, blocks):
    """Queries with an even number of tiles, with an odd one, and without keys follow one another in a block."""
    layout = sm90.Layout(cluster=1, blocks=blocks)
    check(Case(lengths=(300, 0, -1, 130, 520, 64), heads=heads, entries=entries, layout=layout), simulate=simulate)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            pytest.param(Case(lengths=(300, 126, -1), tokens=3, heads=128, layout=WIDE), id="picked"),
            pytest.param(
                Case(
                    lengths=(520, 0, 130),
                    tokens=2,
                    entries="all",
                    layout=sm90.Layout(is_wide=True, blocks=2),
                    dtype=jnp.bfloat16,
                ),
                id="several queries of a block",
            ),
            pytest.param(
                Case(lengths=(9000, 127), tokens=2, entries="all", ratio=128, per_block=1, layout=WIDE), id="hca"
            ),
            pytest.param(
                Case(lengths=(200, 5), n_win=64, tokens=3, entries=None, kv_format="bf16", layout=WIDE), id="window"
            ),
            pytest.param(Case(lengths=(200,), n_win=100, kv_format="fp8_tile64", layout=WIDE), id="one token"),
        ],
        count=2,
    ),
)
def test_rows_that_are_widened_before(simulate, case):
    check(case, simulate=simulate)


@machines
@pytest.mark.parametrize(
    ("layout", "entries"),
    first_of([(ONE_BLOCK, "picked"), (WIDE, "all"), (WIDE, "picked"), (ONE_BLOCK, "all")]),
)
def test_sums_may_be_rescaled_for_every_growth(simulate, layout, entries, monkeypatch):
    """Tiles of either warpgroup then raise the peak, in an order of their own for each head."""
    monkeypatch.setattr(block, "GROWTH", 0.0)
    check(Case(lengths=(300, 520, 64), entries=entries, layout=layout), simulate=simulate)


@machines
@pytest.mark.parametrize("kv_format", ATTENDED_FORMATS)
@pytest.mark.parametrize("picked", first_of([False, True]))
def test_widened_rows_are_those_of_tiles(simulate, kv_format, picked):
    """Bit for bit; rows that are not finite, as those that nobody has stored, are 0 and have a factor of NaN."""
    case = Case(lengths=(150, 37, -1), tokens=2, entries="picked" if picked else "all", kv_format=kv_format)
    inputs, _ = make(case)
    layer = int(inputs.layer[0])
    wide = jax.jit(lambda inputs: widen(inputs, ATTENDED_FORMATS[kv_format], simulate=simulate).wide)(inputs)
    factors = np.asarray(wide.factors)
    rows = np.asarray(wide.rows).reshape(*factors.shape, -1)
    of_window = case.n_win + case.tokens
    assert wide.of_window == of_window
    assert wide.of_request == of_window + inputs.block_table.shape[1] * case.per_block

    for b, length in enumerate(case.lengths[:2]):
        slot = int(inputs.slots[b])
        window = in_tiles(kv_format, jax.tree.map(lambda leaf, slot=slot: leaf[layer, slot], inputs.window))
        fresh = in_tiles(kv_format, jax.tree.map(lambda leaf, b=b: leaf[b], inputs.fresh))
        for n in range(of_window):
            position = length - case.n_win + n
            of, at = (fresh, n - case.n_win) if n >= case.n_win else (window, position % case.n_win)
            assert factors[b, n] == (of[1][at] if position >= 0 else -1)
            np.testing.assert_array_equal(rows[b, n], of[0][at] if position >= 0 else np.zeros_like(rows[b, n]))
        entries, of_entries = in_tiles(kv_format, jax.tree.map(lambda leaf: leaf[layer], inputs.entries))
        for n in range((length + case.tokens) // case.ratio):
            page = int(inputs.block_table[slot, n // case.per_block])
            assert factors[b, of_window + n] == of_entries[page, n % case.per_block]
            np.testing.assert_array_equal(rows[b, of_window + n], entries[page, n % case.per_block])
        blocks = np.repeat(np.asarray(inputs.block_table[slot]) >= 0, case.per_block)
        unstored = np.arange(len(blocks)) >= (length + case.tokens) // case.ratio
        np.testing.assert_array_equal(factors[b, of_window:][~blocks], -1)
        assert np.isnan(factors[b, of_window:][blocks & unstored]).all()
        np.testing.assert_array_equal(rows[b, of_window:][blocks & unstored], 0)
        if not picked:
            np.testing.assert_array_equal(rows[b, of_window:][~blocks], 0)
    np.testing.assert_array_equal(factors[2], -1)


def in_tiles(kv_format: str, stored: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the f16 and the factors of stored rows: of a row with one f32 scale, the fraction is its factor."""
    decoded = np.asarray(xla.KV_FORMATS[kv_format].decode(stored))
    if ATTENDED_FORMATS[kv_format].scale_is_power_of_two:
        return decoded.astype(np.float16), np.ones(decoded.shape[:-1], np.float32)
    scale = np.asarray(stored.scale).reshape(decoded.shape[:-1]).view(np.int32)
    power = (scale & 0x7F800000).view(np.float32)[..., None]
    factor = (scale & 0x007FFFFF | 0x3F800000).view(np.float32)
    nope = np.asarray(stored.nope).view(jnp.float8_e4m3fn).astype(np.float32) * power
    rope = np.asarray(stored.rope).astype(np.float32) * (np.float32(1) / factor)[..., None]
    return np.concatenate([nope, rope], -1).astype(np.float16), factor


@machines
@pytest.mark.parametrize("kv_format", ATTENDED_FORMATS)
@pytest.mark.parametrize("entries", first_of(["picked", "all"]))
def test_widening_does_not_change_a_bit(simulate, kv_format, entries, monkeypatch):
    """Not even where most tiles raise the peak."""
    monkeypatch.setattr(block, "GROWTH", 1.0)
    case = Case(lengths=(300, 520, -1, 64), tokens=2, entries=entries, kv_format=kv_format)
    inputs, _ = make(case)
    one, other = (run(dataclasses.replace(case, layout=each), inputs, simulate=simulate) for each in (ONE_BLOCK, WIDE))
    np.testing.assert_array_equal(one, other)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            pytest.param(Case(lengths=(300, 0, -1, 60), dtype=jnp.bfloat16), id="picked"),
            pytest.param(Case(lengths=(4500, 520), entries="all", kv_format="fp8_tile64"), id="two rounds"),
            pytest.param(Case(lengths=(200, 5), n_win=100, heads=8, entries=None, turned=False), id="window"),
            pytest.param(Case(lengths=(300, 126, -1), tokens=3, heads=72, kv_format="bf16"), id="two groups of heads"),
            pytest.param(Case(lengths=(9000,), entries="all"), id="three rounds"),
        ],
        count=3,
    ),
)
def test_a_cluster_gives_the_bits_of_one_block(simulate, case, monkeypatch):
    monkeypatch.setattr(block, "GROWTH", 1.0)  # so that most tiles raise the peak
    inputs, _ = make(case)
    tiles = -(-case.n_win // KEYS) - (-inputs.max_entries // KEYS)
    layouts = ONE_BLOCK, sm90_spread.Layout(tiles=tiles)
    one, other = (run(dataclasses.replace(case, layout=each), inputs, simulate=simulate) for each in layouts)
    assert np.isfinite(other).all()
    np.testing.assert_array_equal(one, other)


def test_rows_are_widened_where_many_queries_read_them_and_there_is_memory():
    def is_widened(batch: int, tokens: int, context: int, ratio: int, picks: int | None) -> bool:
        def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def rows(*lead: int) -> Any:
            row = xla.KV_FORMATS["fp8_row"].row(448, 64)
            return jax.tree.map(lambda leaf: of(*lead, *leaf.shape, dtype=leaf.dtype), row)

        each, every = of(batch), of(batch, tokens)
        inputs = AttentionInputs(
            **cast(Any, dict.fromkeys(("q", "window", "sinks", "angles"))),  # which are not asked about
            pos=of(2, 9, 128),
            fresh=rows(batch, tokens),
            entries=rows(2, 99, 128 // ratio),
            picks=None if picks is None else of(batch, tokens, picks),
            block_table=of(9, context // 128),
            slots=each,
            start=each,
            positions=every,
            visible=every,
            layer=of(1),
        )
        return worth_widening(inputs)

    assert is_widened(1, 4096, 131072, 4, 512)
    assert is_widened(4, 1024, 32768, 4, 512)
    assert is_widened(1, 4096, 1 << 20, 128, None)
    assert not is_widened(1, 4096, 1 << 20, 4, 512)  # 257 MiB
    assert not is_widened(8, 4096, 131072, 4, 512)  # 289 MiB
    assert not is_widened(64, 4, 32768, 4, 512)  # too few queries
    assert not is_widened(8, 16, 131072, 128, None)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("tokens", "is_widened"), [(70, True), (20, False)])
def test_a_chunk_is_widened_without_being_asked_to(tokens, is_widened, invariant, monkeypatch):
    seen = []

    def noted(inputs: Any, form: Any, *, simulate: bool) -> AttentionInputs:
        seen.append(inputs)
        return widen(inputs, form, simulate=simulate)

    monkeypatch.setattr(call, "widen", noted)
    case = Case(lengths=(900,), tokens=tokens, entries="all", ratio=128, per_block=1, layout=None)
    inputs, _ = make(case)
    with jax.sharding.use_abstract_mesh(mesh_of(HOPPER.capability, "NVIDIA")):
        attend = functools.partial(call.decode_attention, kv_format="fp8_row", invariant=invariant, simulate=True)
        out = jax.eval_shape(attend, inputs)
    assert out.shape == inputs.q.shape
    assert bool(seen) == is_widened


@machines
@pytest.mark.parametrize("kv_format", ATTENDED_FORMATS)
def test_formats(simulate, kv_format):
    check(Case(lengths=(150, 37), kv_format=kv_format, entries="all", per_block=8), simulate=simulate)


@machines
@pytest.mark.parametrize("layout", first_of([ONE_BLOCK, FEW, SPREAD]))
def test_a_format_needs_to_be_known_to_formats_alone(simulate, layout, monkeypatch):
    """One power-of-two scale for a whole row."""
    monkeypatch.setitem(xla.KV_FORMATS, "fp8_tile448", xla.Fp8TileRows(448))
    monkeypatch.setitem(ATTENDED_FORMATS, "fp8_tile448", Fp8TileRows(448))
    check(Case(lengths=(150,), kv_format="fp8_tile448", layout=layout), simulate=simulate)


@machines
@pytest.mark.parametrize(("tokens", "lengths"), first_of([(2, (140, 126, 0)), (8, (124,))]))
def test_several_tokens_that_the_ring_does_not_hold_yet(simulate, tokens, lengths):
    check(Case(lengths=lengths, tokens=tokens, layout=sm90.Layout(cluster=2)), simulate=simulate)


@machines
@pytest.mark.parametrize("cluster", first_of([4, 8]))
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
    first_of(
        [
            pytest.param(Case(lengths=(300, 0, -1)), 16, 2, 2, id="ragged"),
            pytest.param(
                Case(lengths=(130,), entries=None, dtype=jnp.bfloat16, q_dtype=jnp.bfloat16), 16, 2, 1, id="window"
            ),
            pytest.param(
                Case(lengths=(500, 129), entries="all", kv_format="fp8_tile64", turned=False),
                32,
                4,
                2,
                id="all entries",
            ),
            pytest.param(Case(lengths=(900,), entries="all", kv_format="bf16"), 8, 2, 3, id="three tiles"),
            pytest.param(Case(lengths=(300,), tokens=2, top_k=384, heads=128), 32, 8, 1, id="several tokens"),
            pytest.param(Case(lengths=(200, 5), n_win=100, top_k=16), 8, 2, 2, id="another window"),
        ],
        count=2,
    ),
)
def test_few_queries(simulate, case, heads, cluster, tiles):
    layout = sm90_few.Layout(heads=heads, cluster=cluster, tiles=tiles)
    check(dataclasses.replace(case, layout=layout), simulate=simulate)


def few_heads(name: str, heads: int, layout: AttentionLayout, **options: Any) -> Any:
    """A case in which the queries before and after one that is NaN are checked, and the last one."""
    case = Case(lengths=(150, 60, 200, 5), broken=1, n_win=64, heads=heads, layout=layout, **options)
    return pytest.param(case, id=f"{heads} heads, {name}")


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            few_heads("several queries of a block", 16, sm90.Layout(blocks=3), top_k=16),
            few_heads("clusters", 8, sm90.Layout(cluster=2), top_k=16, dtype=jnp.bfloat16),
            few_heads("widened", 32, sm90.Layout(is_wide=True, blocks=3), entries="all"),
            few_heads("few queries", 8, sm90_few.Layout(heads=8, cluster=2, tiles=1), top_k=16),
            few_heads("window", 8, sm90.Layout(blocks=2), tokens=3, entries=None, dtype=jnp.bfloat16),
            few_heads("widened picks", 16, WIDE, tokens=3),
            few_heads("two groups", 32, sm90_few.Layout(heads=16, cluster=4, tiles=1), entries="all"),
            few_heads("clusters of four", 32, sm90.Layout(cluster=4), entries="all", kv_format="fp8_tile64"),
            few_heads("a group and a half", 96, sm90.Layout(blocks=3), entries=None),
            few_heads("clusters of eight", 24, sm90.Layout(cluster=8), kv_format="bf16"),
        ],
        count=4,
    ),
)
def test_blocks_with_more_rows_than_a_query_has_heads(simulate, case):
    """Rows past the last head are those of the next query, which may be NaN, and store nothing."""
    check(case, simulate=simulate)


@machines
@pytest.mark.parametrize("layout", first_of([ONE_BLOCK, WIDE, FEW, SPREAD]))
def test_no_pick_and_no_table(simulate, layout):
    """Picks of -1, blocks that do not exist, and ring rows with other positions do not count as keys."""
    case = Case(lengths=(200, 200, 200), seed=3, layout=layout)
    inputs, _ = make(case)
    no_entries = dataclasses.replace(inputs, entries=None, picks=None, block_table=None, visible=None)
    alone = run(case, no_entries, simulate=simulate)
    no_picks = dataclasses.replace(inputs, picks=jnp.full_like(inputs.picks, -1))
    np.testing.assert_array_equal(run(case, no_picks, simulate=simulate), alone)
    no_blocks = dataclasses.replace(inputs, block_table=jnp.full_like(inputs.block_table, -1))
    np.testing.assert_array_equal(run(case, no_blocks, simulate=simulate), alone)
    empty = dataclasses.replace(no_picks, pos=jnp.full_like(inputs.pos, -1))
    np.testing.assert_array_equal(run(case, empty, simulate=simulate), 0.0)


@machines
@pytest.mark.parametrize("layout", first_of([ONE_BLOCK, WIDE, sm90_few.Layout(heads=16, cluster=4, tiles=1), SPREAD]))
def test_nan_is_loud_and_stays_in_its_request(simulate, layout):
    case = Case(lengths=(150, 150), entries="all", layout=layout)
    inputs, _ = make(case)
    slot, layer = int(inputs.slots[1]), int(inputs.layer[0])
    rope = inputs.window.rope.at[layer, slot, 9, 0].set(jnp.nan)
    broken = dataclasses.replace(inputs, window=dataclasses.replace(inputs.window, rope=rope))
    found, before = run(case, broken, simulate=simulate), run(case, inputs, simulate=simulate)
    np.testing.assert_array_equal(found[0], before[0])
    assert np.isnan(found[1]).all()


def test_few_queries_of_an_invariant_cache_are_spread_over_clusters():
    def chosen(queries: int, heads: int = 64, tiles: int = 10, gpu: GPU = HOPPER) -> AttentionLayout:
        return choose_layout(gpu, queries, heads, tiles, invariant=True)

    spread, most = sm90_spread.Layout(tiles=10), HOPPER.clusters[8]
    assert chosen(1) == chosen(most) == chosen(1, heads=8) == chosen(most // 2, heads=128) == spread
    assert chosen(most + 1) == chosen(4096) == chosen(most // 2 + 1, heads=128) == ONE_BLOCK
    assert chosen(1, tiles=130) == sm90_spread.Layout(tiles=130)
    assert chosen(1, tiles=2) == ONE_BLOCK  # of a window alone
    assert chosen(1, gpu=BLACKWELL) == chosen(4096, gpu=BLACKWELL) == sm100.Layout()


@machines
def test_an_invariant_call_gives_the_bits_of_one_block(simulate):
    case = Case(lengths=(300,), top_k=256)
    inputs, _ = make(case)
    assert choose_layout(HOPPER, 1, case.heads, 6, invariant=True) == sm90_spread.Layout(tiles=6)  # as is chosen here
    attend = functools.partial(call.decode_attention, kv_format=case.kv_format, dtype=case.dtype, simulate=simulate)
    with jax.sharding.use_abstract_mesh(mesh_of(HOPPER.capability, "NVIDIA")) if simulate else contextlib.nullcontext():
        found = jax.jit(functools.partial(attend, invariant=True))(inputs)
    np.testing.assert_array_equal(found, run(case, inputs, simulate=simulate))


def test_one_query_shares_among_blocks_what_fits():
    def clusters(gpu: GPU, heads: int, tiles: int, *queries: int) -> list[int]:
        return [choose_layout(gpu, n, heads, tiles).cluster for n in queries]

    for gpu in (HOPPER, BLACKWELL):
        assert clusters(gpu, 64, 10, 1, 13, 14, 30, 31, 66, 67) == [8, 8, 4, 4, 2, 2, 1]
        assert [choose_layout(gpu, 1, 128, tiles).cluster for tiles in (1, 2, 4, 8)] == [1, 2, 4, 8]
    few = sm90_few.Layout
    assert choose_layout(HOPPER, 1, 64, 10) == few(heads=8, cluster=8, tiles=2)
    assert choose_layout(HOPPER, 3, 64, 18) == few(heads=16, cluster=8, tiles=3)
    assert choose_layout(HOPPER, 6, 64, 10) == few(heads=32, cluster=8, tiles=2)
    assert choose_layout(HOPPER, 8, 64, 2) == few(heads=8, cluster=2, tiles=1)
    assert choose_layout(HOPPER, 4, 64, 18) == sm90.Layout(cluster=8)  # three tiles and 32 heads do not fit
    assert choose_layout(HOPPER, 17, 64, 2) == sm90.Layout(cluster=2)
    assert choose_layout(HOPPER, 1, 64, 25) == sm90.Layout(cluster=8)
    assert choose_layout(BLACKWELL, 1, 64, 10) == sm100.Layout(cluster=8)
    # A query takes a block at least. None has more heads than the query in the kernel for few queries.
    for gpu in (HOPPER, BLACKWELL):
        for heads in (8, 16, 32):
            assert clusters(gpu, heads, 10, 1, 13, 14, 30, 31, 66, 67) == [8, 8, 4, 4, 2, 2, 1]
        assert clusters(gpu, 96, 10, 1, 6, 7, 15, 16, 33, 34) == [8, 8, 4, 4, 2, 2, 1]
    assert choose_layout(HOPPER, 13, 8, 10) == few(heads=8, cluster=8, tiles=2)
    assert choose_layout(HOPPER, 13, 16, 10) == few(heads=16, cluster=8, tiles=2)
    assert choose_layout(HOPPER, 13, 24, 10) == sm90.Layout(cluster=8)
    assert choose_layout(HOPPER, 67, 8, 10) == sm90.Layout(cluster=1)


@requires_gpu
@pytest.mark.parametrize("kv_format", ATTENDED_FORMATS)
@pytest.mark.parametrize(("entries", "heads"), [("picked", 128), ("all", 64)])
def test_a_full_chip(kv_format, entries, heads):
    lengths = tuple(int(n) for n in np.random.default_rng(0).integers(0, 3000, 40))
    case = Case(lengths=lengths, entries=entries, top_k=512, heads=heads, kv_format=kv_format, dtype=jnp.bfloat16)
    check(case, simulate=False)
    check(dataclasses.replace(case, lengths=lengths[:9], tokens=4, layout=None), simulate=False)
    check(dataclasses.replace(case, lengths=lengths[:3], tokens=100, layout=WIDE), simulate=False)


@pytest.mark.parametrize(("stored", "read"), [*itertools.permutations(ATTENDED_FORMATS, 2)])
def test_rows_of_another_format_are_refused(stored, read):
    inputs, _ = make(Case(lengths=(3,), kv_format=stored))
    with pytest.raises(AssertionError):
        run(Case(lengths=(3,), kv_format=read), inputs, simulate=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_format="f32"), "kv_format must be one of"),
        (dict(heads=12), "num_heads must be a multiple of 8, got 12"),
        (dict(heads=8, layout=sm90_few.Layout(heads=16, cluster=2, tiles=2)), "does not share 8 heads"),
        (dict(layout=sm90_few.Layout(heads=16, cluster=2, tiles=1)), "does not serve queries of 3 tiles"),
        (dict(layout=sm90_few.Layout(heads=24, cluster=2, tiles=2)), "does not share 64 heads"),
        (dict(layout=sm90.Layout(cluster=3)), "does not share 512 channels"),
        (dict(layout=sm90_spread.Layout(tiles=2)), "does not serve queries of 3 tiles"),
        (dict(layout=sm90.Layout(cluster=2, is_wide=True)), "a cluster has 1 block"),
    ],
)
def test_what_it_does_not_serve(change, message):
    case = dataclasses.replace(Case(lengths=(3,)), **change)
    inputs, _ = make(case)
    with pytest.raises(ValueError, match=message):
        run(case, inputs, simulate=True)


def test_a_layout_is_of_one_architecture():
    for gpu, layout in (HOPPER, sm100.Layout()), (BLACKWELL, ONE_BLOCK):
        case = Case(lengths=(3,), layout=layout)
        with (
            jax.sharding.use_abstract_mesh(mesh_of(gpu.capability, "NVIDIA")),
            pytest.raises(ValueError, match=f"for {layout.gpu.architecture}, the target is {gpu.architecture}"),
        ):
            run(case, make(case)[0], simulate=False)
