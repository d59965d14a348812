"""``verify`` finds no fault in a sound cache, and names each kind of damage; the report's numbers are right."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.plots import FREE, SHARED, ownership, plot_ownership
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    BLOCKS,
    CFG,
    FORMATS,
    LAYERS,
    REQUESTS,
    THREE_FORMATS,
    TOKENS,
    feed,
    ids,
    poisoned,
    random_params,
    random_split,
    sequence,
    small_plan,
)


@functools.cache
def served(name: str = "f32", seed: int = 0) -> tuple[tuple[d4.KVCache, ...], d4.cache.Tables]:
    """Return caches between the steps of a random schedule of requests, and the tables after each step."""
    rng = np.random.default_rng(seed)
    cache = d4.init_cache(small_plan(**FORMATS[name]))
    caches, history = [cache], [cache.tables]
    for _ in range(3):
        cache, slots, ok = d4.admit(cache, BATCH)
        assert ok
        lengths = rng.integers(1, 50, BATCH).tolist()
        xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate(lengths)]
        splits = [random_split(rng, length, TOKENS) for length in lengths]
        for i in range(max(map(len, splits))):
            chunk = [split[i] if i < len(split) else 0 for split in splits]
            part = [x[sum(s[:i]) : sum(s[: i + 1])] for x, s in zip(xs, splits, strict=True)]
            _, cache = feed(random_params(), part, cache, slots, [[n] for n in chunk], layers=LAYERS, width=TOKENS)
            history.append(cache.tables)
        caches.append(cache)
        cache = d4.release(cache, jnp.asarray(rng.permutation(slots)[: int(rng.integers(2, 4))]))
        caches.append(cache)
        cache = d4.release(cache, slots)
        history.append(cache.tables)
    caches.append(cache)
    return tuple(caches), jax.tree.map(lambda *leaves: np.stack(leaves), *history)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(THREE_FORMATS))
def test_nothing_is_wrong_along_a_random_schedule(name):
    caches, _ = served(name)
    for cache in caches:
        assert d4.verify(cache) == []
        assert d4.verify(poisoned(cache)) == [], "what nobody can see may hold anything"
    cache = caches[1]
    held = jnp.flatnonzero(cache.tables.admitted)[:1].astype(jnp.int32)
    granted, ok = d4.prepare_forward(cache, held, ids(9))
    assert ok
    assert d4.verify(granted) == []
    assert d4.verify(d4.init_cache(cache.plan)) == []


# ---- damage ---------------------------------------------------------------------------------------------------------


@functools.cache
def sound(name: str = "f32") -> d4.KVCache:
    """Slots 0 to 3 hold 37, 18, 3 and 32 tokens in 3, 1, 0 and 2 blocks; slot 4 and 8 blocks are free."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan(**FORMATS[name])), BATCH)
    assert ok
    xs = [sequence(b, length, CFG.hidden_size) for b, length in enumerate((37, 18, 3, 32))]
    splits = [[8] * (len(x) // 8) + [len(x) % 8] for x in xs]
    _, cache = feed(random_params(), xs, cache, slots, splits, layers=LAYERS, width=TOKENS)
    return cache


def with_tables(cache: d4.KVCache, **edits: Any) -> d4.KVCache:
    """edits: table -> (index, value)."""
    tables = cache.tables
    edited = {name: getattr(tables, name).at[index].set(value) for name, (index, value) in edits.items()}
    return dataclasses.replace(cache, tables=dataclasses.replace(tables, **edited))


def block_of(slot: int, column: int) -> int:
    return int(sound().tables.block_table[slot, column])


# What is damaged -> edits of the tables and the sentence that must come. Block ids are known once there is a cache.
DAMAGE = {
    "length above the grant": lambda: (dict(seq_lens=(2, 7)), "slot 2: seq_lens 7 exceeds prepared 3"),
    "negative length": lambda: (dict(seq_lens=(2, -1)), "slot 2: seq_lens is -1"),
    "longer than the context": lambda: (dict(prepared=(0, 81)), "slot 0: 81 tokens exceed max_context 80"),
    "too few blocks": lambda: (dict(prepared=(1, 33)), "slot 1: 33 tokens need 2 blocks, it holds 1"),
    "count above the width": lambda: (dict(block_lens=(0, 6)), "slot 0: block_lens 6 is outside 0 to 5"),
    "count above the ids": lambda: (
        dict(block_lens=(1, 2)),
        "slot 1: block_table holds -1 in column 1, which is no block; it holds 2",
    ),
    "count below the ids": lambda: (
        dict(block_lens=(3, 1)),
        f"slot 3: block_table holds {block_of(3, 1)} in column 1, past its 1 blocks",
    ),
    "no such block": lambda: (
        dict(block_table=((1, 0), BLOCKS)),
        f"slot 1: block_table holds {BLOCKS} in column 0, which is no block; it holds 1",
    ),
    "free slot with a length": lambda: (dict(seq_lens=(4, 2)), "slot 4 is free, but its seq_lens is 2"),
    "free slot with a grant": lambda: (dict(prepared=(4, 2)), "slot 4 is free, but its prepared is 2"),
    "free slot with a count": lambda: (dict(block_lens=(4, 1)), "slot 4 is free, but its block_lens is 1"),
    "free slot with a block": lambda: (dict(block_table=((4, 1), 2)), "slot 4 is free, but its block_table names [2]"),
    "owned twice": lambda: (
        dict(block_table=((1, 0), block_of(0, 0))),
        f"block {block_of(0, 0)}: block_refs is 1, but block_table names it in slots [0, 1]",
    ),
    "twice in a row": lambda: (
        dict(block_table=((3, 1), block_of(3, 0)), block_refs=(block_of(3, 0), 2)),
        f"block {block_of(3, 0)}: slot 3 names it 2 times",
    ),
    "a reader too many": lambda: (
        dict(block_refs=(block_of(1, 0), 2)),
        f"block {block_of(1, 0)}: block_refs is 2, but block_table names it in slots [1]",
    ),
    "readers of a free block": lambda: (
        dict(block_refs=(0, 1)),
        "block 0: block_refs is 1, but block_table names it in slots []",
    ),
    "shared before it is full": lambda: (
        dict(block_table=((1, 0), block_of(0, 2)), block_refs=(block_of(0, 2), 2)),
        f"block {block_of(0, 2)}: slots [0, 1] share it, but slot 0 has not filled it and will write to it",
    ),
    "free and held": lambda: (
        dict(free_blocks=(1, block_of(1, 0))),
        f"block {block_of(1, 0)} is free by free_blocks, and held by slots [1]",
    ),
    "free twice": lambda: (dict(free_blocks=(1, 0)), "block 0: free_blocks names it 2 times"),
    "free and no block": lambda: (dict(free_blocks=(1, -3)), "free_blocks names -3, which is no block"),
    "lost": lambda: (dict(free_blocks=(1, 0)), "block 1 is lost: neither held nor in free_blocks"),
    "wrong count of free ones": lambda: (dict(num_free=(0, 7)), "num_free is 7, but the tables leave 8 blocks free"),
    "negative count of free ones": lambda: (
        dict(num_free=(0, -1)),
        "num_free is -1, but the tables leave 8 blocks free",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tables_are_found_and_named(damage):
    edits, sentence = damage()
    assert d4.verify(sound()) == []
    damaged = with_tables(sound(), **edits)
    assert sentence in d4.verify(damaged)
    assert d4.describe(damaged).slots[3].length == 32, "it reports on any tables"


@pytest.mark.parametrize(
    ("kind", "at", "value", "sentence"),
    [
        ("swa", (0, 0, 5), -1, "layer 0, slot 0: pos of window row 5 is -1, expected 21 at length 37"),
        ("csa", (0, 1, 1), 1, "layer 1, slot 1: pos of window row 1 is 1, expected 17 at length 18"),
        ("hca", (0, 2, 9), 9, "layer 2, slot 2: pos of window row 9 is 9, expected -1 at length 3"),
    ],
)
def test_wrong_positions_are_found_and_named(kind, at, value, sentence):
    cache = sound()
    stack = cache.stack(kind)
    state = dataclasses.replace(stack.state, pos=stack.state.pos.at[at].set(value))
    assert d4.verify(cache.with_stack(kind, dataclasses.replace(stack, state=state))) == [sentence]


def spoil(cache: d4.KVCache, kind: str, path: str, at: tuple[int, ...], value: Any) -> d4.KVCache:
    """Set one element of a stack's leaf, such as "state.window.nope"."""

    def replaced(node: Any, names: list[str]) -> Any:
        if not names:
            return node.at[at].set(jnp.asarray(value, node.dtype))
        return dataclasses.replace(node, **{names[0]: replaced(getattr(node, names[0]), names[1:])})

    return cache.with_stack(kind, replaced(cache.stack(kind), path.split(".")))


NAN, INF = float("nan"), float("inf")


NOT_FINITE = [
    ("f32", "swa", "state.window.nope", (0, 1, 3, 7), NAN, "layer 0, slot 1: window.nope of row 3"),
    ("f32", "hca", "pool.entries.rope", (0, (1, 0), 0, 7), INF, "layer 2, slot 1, block {}: entries.rope of row 0"),
    (
        "f32",
        "csa",
        "pool.indexer_keys.codes",
        (0, (0, 2), 0, 1),
        NAN,
        "layer 1, slot 0, block {}: indexer_keys.codes",
    ),
    ("f32", "csa", "state.tail.za", (0, 0, 0, 5), NAN, "layer 1, slot 0: tail.za of row 0"),
    ("f32", "csa", "state.indexer_tail.kb", (0, 3, 2, 5), -INF, "layer 1, slot 3: indexer_tail.kb of row 2"),
    ("f32", "hca", "state.tail.ka", (0, 1, 1, 5), NAN, "layer 2, slot 1: tail.ka of row 1"),
    (
        "fp8_row, nvfp4, bf16 tails",
        "csa",
        "state.window.scale",
        (0, 2, 1),
        INF,
        "layer 1, slot 2: window.scale of row 1",
    ),
    (
        "fp8_row, nvfp4, bf16 tails",
        "csa",
        "pool.entries.scale",
        (0, (3, 1), 2),
        NAN,
        "block {}: entries.scale of row 2",
    ),
    (
        "fp8_row, nvfp4, bf16 tails",
        "csa",
        "pool.entries.nope",
        (0, (3, 1), 2, 9),
        0x7F,
        "block {}: entries.nope of row 2",
    ),
    (
        "fp8_row, nvfp4, bf16 tails",
        "csa",
        "pool.indexer_keys.scale",
        (0, (3, 1), 2, 1),
        0xFF,
        "block {}: indexer_keys.scale",
    ),
    (
        "fp8_tile64, mxfp4, online",
        "hca",
        "pool.entries.scale",
        (0, (3, 0), 0, 1),
        0xFF,
        "layer 2, slot 3, block {}: entries.scale",
    ),
    (
        "fp8_tile64, mxfp4, online",
        "csa",
        "pool.indexer_keys.scale",
        (0, (3, 0), 0, 1),
        0xFF,
        "block {}: indexer_keys.scale",
    ),
    (
        "fp8_tile64, mxfp4, online",
        "hca",
        "state.tail.total",
        (0, 1, 8),
        NAN,
        "layer 2, slot 1: tail.total is NaN",
    ),
]


@pytest.mark.parametrize(("name", "kind", "path", "at", "value", "sentence"), first_of(NOT_FINITE, count=0))
def test_values_that_are_not_finite_are_found_and_named(name, kind, path, at, value, sentence):
    cache = sound(name)
    assert d4.verify(cache) == []
    if path.startswith("pool"):  # (slot, column) stands for the block there
        layer, (slot, column), *rest = at
        block = int(cache.tables.block_table[slot, column])
        at, sentence = (layer, block, *rest), sentence.format(block)
    found = d4.verify(spoil(cache, kind, path, at, value))
    assert len(found) == 1
    assert sentence in found[0]
    assert found[0].endswith("is NaN or infinite")


LEFT_BEHIND = [
    ("f32", "csa", "state.tail.kb", (0, 2, 1, 5), "layer 1, slot 2: tail.kb is not empty at length 3"),
    ("f32", "csa", "state.indexer_tail.zb", (0, 2, 1, 5), "layer 1, slot 2: indexer_tail.zb is not empty"),
    ("fp8_row, nvfp4, bf16 tails", "csa", "state.tail.zb", (0, 2, 0, 0), "slot 2: tail.zb is not empty"),
    ("fp8_tile64, mxfp4, online", "hca", "state.tail.total", (0, 3, 5), "layer 2, slot 3: tail.total is not empty"),
    ("fp8_tile64, mxfp4, online", "hca", "state.tail.weighted", (0, 3, 5), "slot 3: tail.weighted is not empty"),
]


@pytest.mark.parametrize(("name", "kind", "path", "at", "sentence"), first_of(LEFT_BEHIND))
def test_a_former_owners_tail_is_found_and_named(name, kind, path, at, sentence):
    """The values are finite and plausible. The request has no complete block, or has just completed one."""
    (found,) = d4.verify(spoil(sound(name), kind, path, at, 0.5))
    assert sentence in found


def test_a_value_that_two_leaves_spoil_together_names_both():
    """The multiplier and the codes are finite, but their product is not."""
    cache = sound("fp8_row, nvfp4, bf16 tails")
    cache = spoil(cache, "swa", "state.window.scale", (0, 2, 1), 3e38)
    assert d4.verify(cache) == ["layer 0, slot 2: window.nope and window.scale of row 1 are NaN or infinite"]


def test_forked_requests_are_sound_and_count_their_blocks_once():
    cache, slots, ok = d4.admit(sound(), 1)
    assert ok
    forked, ok = d4.fork(cache, jnp.int32(0), slots)
    assert ok
    assert d4.verify(forked) == []
    plan, report = cache.plan, d4.describe(forked)
    assert [(row.own_blocks, row.shared_blocks) for row in (report.slots[0], report.slots[4])] == [(1, 2), (1, 2)]
    assert report.slots[4].live_bytes == plan.bytes_per_request + 3 * plan.bytes_per_block
    for row, before in zip(report.kinds, d4.describe(cache).kinds, strict=True):
        assert row.live_bytes - before.live_bytes == sum(plan.block_bytes(row.kind).values())  # the block being filled
    shared = int(forked.tables.block_table[0, 0])
    fault = f"block {shared}: slots [0, 4] share it, but slot 4 has not filled it and will write to it"
    assert fault in d4.verify(with_tables(forked, seq_lens=(4, 15)))


# ---- report and picture ---------------------------------------------------------------------------------------------


def test_the_report_is_plan_arithmetic():
    cache, ok = d4.prepare_forward(sound(), ids(1), ids(13))
    assert ok
    plan, report = cache.plan, d4.describe(cache)
    rows = [(row.length, row.prepared, row.own_blocks, row.shared_blocks) for row in report.slots]
    assert rows == [(37, 37, 3, 0), (18, 31, 2, 0), (3, 3, 0, 0), (32, 32, 2, 0), (0, 0, 0, 0)]
    assert [row.admitted for row in report.slots] == [True] * 4 + [False]
    for row, blocks in zip(report.slots, (3, 2, 0, 2), strict=False):
        assert row.live_bytes == plan.bytes_per_request + blocks * plan.bytes_per_block
    assert report.slots[4].live_bytes == 0
    assert (report.free_slots, report.free_blocks) == (1, BLOCKS - 7)
    assert sum(row.reserved_bytes for row in report.kinds) + plan.table_bytes == plan.memory_bytes()
    assert plan.memory_bytes() == d4.cache.tree_bytes(cache)
    # A table row's bytes are counted to the slot and to no kind.
    in_slots = sum(row.live_bytes for row in report.slots)
    assert in_slots - sum(row.live_bytes for row in report.kinds) == 4 * (4 * plan.max_blocks + 3 * 4 + 1)


def test_the_report_prints_as_a_table():
    lines = str(d4.describe(sound())).splitlines()
    plan = sound().plan
    assert lines[0] == "KV cache: 4 of 5 slots held, 6 of 14 blocks held"
    assert lines[2].split("  ")[-1].strip() == "bytes live"
    assert lines[3].split() == [
        "0",
        "37",
        "37",
        "3",
        "0",
        f"{plan.bytes_per_request + 3 * plan.bytes_per_block:,}",
        "B",
    ]
    assert re.search(r"free\s+1 slots\s+8 blocks", lines[7])
    assert [line.split()[:2] for line in lines[10:13]] == [["1", "SWA"], ["1", "CSA"], ["1", "HCA"]]
    assert lines[13].split() == ["tables", f"{plan.table_bytes:,}", "B"]


def test_ownership_is_what_the_tables_say():
    _, history = served()
    owner = ownership(history)
    assert owner.shape == (history.num_free.shape[0], BLOCKS)
    for step, row in enumerate(owner):
        assert np.sum(row == FREE) == history.num_free[step, 0]
        for slot in range(REQUESTS):
            assert np.sum(row == slot) == history.block_lens[step, slot]
    steps = [jax.tree.map(lambda leaf, i=i: leaf[i], history) for i in range(len(owner))]
    np.testing.assert_array_equal(ownership(steps), owner)
    tables = with_tables(sound(), block_table=((1, 0), block_of(0, 0))).tables
    assert ownership([tables])[0, block_of(0, 0)] == SHARED
    with pytest.raises(ValueError, match=r"ownership: expected the Tables of one step at least, got .*\[\]"):
        ownership([])
    with pytest.raises(ValueError, match=r"ownership: expected the Tables of one step at least, got .*\['KVCache'\]"):
        ownership([sound()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="ownership: these are the tables of one step"):
        ownership(tables)
    with pytest.raises(ValueError, match=r"ownership: this cache has 2 shards .* one of them: sharding.shard_of"):
        ownership([dataclasses.replace(tables, num_free=ids(4, 4))])


def test_the_plot_draws_every_block_in_its_owners_colour(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is drawn by matplotlib, of the extra 'demo'")
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgba

    from dsv4jax.cache import plots

    tables = with_tables(sound(), block_table=((1, 0), block_of(0, 0))).tables
    ax = plot_ownership([d4.init_cache(small_plan()).tables, tables])
    assert isinstance(ax, Axes)
    (image,) = ax.images
    colours = np.asarray(image.cmap(image.norm(np.asarray(image.get_array()))))  # [blocks, steps, rgba]
    assert colours.shape[:2] == (BLOCKS, 2)
    for block, who in (
        (block_of(3, 0), plots.COLOURS[3]),
        (0, plots.FREE_COLOUR),
        (block_of(0, 0), plots.SHARED_COLOUR),
    ):
        np.testing.assert_allclose(colours[block, 1], to_rgba(who))
        np.testing.assert_allclose(colours[block, 0], to_rgba(plots.FREE_COLOUR))
    legend, figure = ax.get_legend(), ax.get_figure(root=True)
    assert legend is not None
    assert figure is not None
    assert [text.get_text() for text in legend.get_texts()] == ["slot 0", "slot 3", "shared"]
    assert plot_ownership(served()[1], ax) is ax
    figure.savefig(tmp_path / "owners.png")
    assert (tmp_path / "owners.png").stat().st_size > 5_000
