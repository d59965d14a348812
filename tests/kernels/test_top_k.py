"""The exact top-k kernel, compared with a stable sort in NumPy: which positions it picks, and their order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.layer.indexer import pick
from pallas_kernels.language import target
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.values import select
from pallas_kernels.selection.call import MAX_K, MAX_SIZE, top_k
from pallas_kernels.selection.kth_largest import INFINITY, KthLargest, number_of, ordinal_of
from pallas_kernels.selection.marks import Marks
from pallas_kernels.selection.memory import Memory, Room
from pallas_kernels.selection.split import Split, split_of
from tests.support.cases import first_of
from tests.support.lane_kernels import F32, SPECIAL, elementwise, machines, random_bits, random_floats, run, spec
from tests.support.machines import requires_gpu

# Rows of a trip and of several; in registers or read again; by blocks and by clusters.
SPLITS = [
    Split(warpgroups=1, cluster=1, bundles=8),
    Split(warpgroups=2, cluster=1, bundles=2),
    Split(warpgroups=1, cluster=2, bundles=4),
    Split(warpgroups=1, cluster=4, bundles=8),
    Split(warpgroups=2, cluster=1, bundles=8, keep=True),
    Split(warpgroups=1, cluster=2, bundles=8, keep=True),
]
splits = pytest.mark.parametrize(
    "split",
    first_of(SPLITS, count=3),
    ids=lambda s: f"{s.warpgroups}x{s.cluster}x{s.bundles}{' kept' if s.keep else ''}",
)
SIZE = 5000  # of which 4999, 4998 and 4997 leave no row, or not every row, on a 16-byte address


def wanted(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """Rank NaN above infinity, and among equal scores the first. Then sort by position."""
    ranked = np.where(np.isnan(scores), np.inf, scores).astype(np.float64)
    ranked[np.isposinf(scores)] = 1e300  # between the largest f32 and what stands for NaN
    out = np.full((len(scores), k), -1, np.int32)
    for picks, row, bound in zip(out, ranked, visible, strict=True):
        first = np.sort(np.argsort(-row[: max(bound, 0)], kind="stable")[:k])
        picks[: len(first)] = first
    return out


def run_and_check(scores: np.ndarray, visible: Any, k: int, *, simulate: bool, split: Split | None = None) -> None:
    """Compare with NumPy. Invisible scores are NaN and infinity."""
    visible = np.broadcast_to(np.asarray(visible, np.int32), len(scores))
    position = np.arange(scores.shape[1])
    poison = np.where(position % 2, F32(np.nan), F32(np.inf))
    poisoned = np.where(position < visible[:, None], scores, poison)
    call = jax.jit(functools.partial(top_k, k=k, simulate=simulate, split=split))
    got = np.asarray(call(jnp.asarray(poisoned), jnp.asarray(visible)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, wanted(scores, visible, k))


def normal(rows: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, size), F32)


def rows_of_every_kind(size: int) -> np.ndarray:
    x = normal(16, size)
    lane = np.arange(size)
    x[1] = np.sort(x[1])
    x[2] = np.sort(x[2])[::-1]
    x[3] = np.round(2 * x[3]) / 2  # ties everywhere
    x[4] = np.where(x[4] > 2.5, x[4], 0)  # the k-th of a great many ties, which overflow every list
    x[5] = 7
    x[6] = -np.inf
    x[7] = np.where(lane % 300 == 5, x[7], -np.inf)  # fewer finite ones than are picked
    x[8, lane % 3 == 0] = np.inf
    x[9, 40:80] = np.nan
    x[9, 60:90] = np.array(0xFFC00001, np.uint32).view(F32)  # NaN with its sign bit set, below -inf as an integer
    x[9, 100:200] = np.inf
    x[10] = np.where(lane % 2 == 0, F32(0.0), F32(-0.0))
    x[10, ::9] = -1
    x[11] = x[11] - 1000  # all in a few bins of the ordinals
    x[11, 17] = 3e38
    x[12] = random_bits(12, size)
    x[13] = np.array(0xFF800001, np.uint32).view(F32)
    x[14] = -np.abs(x[14])
    x[15] = np.repeat(x[15, : -(-size // 64)], 64)[:size]  # runs of ties
    return x


@machines
@splits
def test_rows_of_every_kind(split, simulate):
    run_and_check(rows_of_every_kind(4096), 4096, 64, simulate=simulate, split=split)


@machines
@splits
@pytest.mark.parametrize("size", first_of([SIZE, SIZE - 1, SIZE - 2, SIZE - 3], count=2))
def test_any_number_of_scores_is_visible(size, split, simulate):
    k = 70
    visible = [0, 1, 3, k - 1, k, k + 1, k + 2, k + 3, 500, 1023, size // 2 + 1, size - 1, size, size + 1, -5]
    scores = normal(len(visible), size, seed=size)
    scores[::5] = np.round(scores[::5] * 4) / 4
    run_and_check(scores, visible, k, simulate=simulate, split=split)


@machines
@pytest.mark.parametrize("k", [1, 2, 5, 129, 600])
def test_any_number_of_picks(k, simulate):
    for split in SPLITS[1], SPLITS[3], SPLITS[4]:
        visible = [4000, 3999, k + 1, 2 * k]
        run_and_check(normal(4, 4000, seed=k), visible, k, simulate=simulate, split=split)


@machines
@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_fewer_scores_than_picks(size, simulate):
    run_and_check(normal(3, size), [size, size - 1, 0], 128, simulate=simulate)


@machines
@pytest.mark.parametrize(("rows", "size", "k"), [(1, 20000, 300), (3, 9000, 512), (40, 1000, 64)])
def test_the_split_that_is_chosen(rows, size, k, simulate):
    run_and_check(normal(rows, size), size, k, simulate=simulate)


@machines
def test_no_rows_and_no_scores(simulate):
    assert top_k(jnp.zeros((0, 8)), jnp.zeros(0, jnp.int32), k=4, simulate=simulate).shape == (0, 4)
    picks = top_k(jnp.zeros((3, 0)), jnp.zeros(3, jnp.int32), k=4, simulate=simulate)
    np.testing.assert_array_equal(picks, np.full((3, 4), -1))


def test_what_xla_picks():
    """XLA picks the same, also among equal scores.

    Zeros of both signs are equal, and NaN of either sign ranks first.
    """
    scores, visible = normal(5, 3000, seed=3), np.array([3000, 2999, 700, 64, 65], np.int32)
    scores[1:3] = np.round(scores[1:3] * 2) / 2
    scores[3, ::40], scores[3, 7::40] = np.nan, -F32(np.nan)
    seen = np.where(np.arange(3000) < visible[:, None], scores, -np.inf)
    want = pick(jnp.asarray(seen[:, None]), jnp.asarray(visible[:, None]), 64)[:, 0]
    got = top_k(jnp.asarray(scores), jnp.asarray(visible), k=64, simulate=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 129, 256, 5000])
@pytest.mark.parametrize("size", [1, 8192, 8193, 32768, 100_000, 262_144, MAX_SIZE])
def test_a_split_fits_the_card(size, rows):
    split = split_of(rows, size)
    shared = Room(k=MAX_K, size=size, split=split).shared_bytes
    assert all(shared <= gpu.shared_bytes - 1024 for gpu in target.GPUS)  # but for what every launch takes
    assert split.is_single(size) or not split.keep
    assert split.cluster in (1, 2, 4, 8)


@splits
def test_a_launch_has_the_shared_memory_that_is_taken(split):
    room = Room(k=70, size=SIZE, split=split)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        Memory(machine, room)
        assert machine.shared_bytes == room.shared_bytes

    run(body, jnp.zeros(1), spec((1,), F32), simulate=True, shared_bytes=room.shared_bytes)


def test_what_is_refused():
    scores, visible = jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32)
    for k in (0, MAX_K + 1):
        with pytest.raises(ValueError, match="takes a k from 1 to"):
            top_k(scores, visible, k=k, simulate=True)
    split = Split(warpgroups=1, cluster=1, bundles=1, keep=True)
    with pytest.raises(ValueError, match="does not stay in the registers"):
        top_k(jnp.zeros((2, 513)), visible, k=1, simulate=True, split=split)
    with pytest.raises(ValueError, match="takes rows of at most"):
        top_k(jnp.zeros((1, MAX_SIZE + 1)), visible[:1], k=1, simulate=True)
    with pytest.raises(AssertionError):
        top_k(scores, visible.astype(jnp.float32), k=1, simulate=True)
    with pytest.raises(AssertionError):
        top_k(scores, visible[:1], k=1, simulate=True)


@requires_gpu
@pytest.mark.parametrize(
    ("rows", "size", "k"),
    [
        (64, 8192, 512),
        (256, 8192, 512),
        (1, 32768, 1024),
        (64, 32768, 1024),
        (256, 32768, 1024),
        (1, 262_144, 1024),
        (2, 262_143, 2048),
        (40, 50_001, 1024),
    ],
)
def test_real_sizes(rows, size, k):
    scores = normal(rows, size, seed=size)
    visible = np.random.default_rng(rows).integers(0, size + 1, rows)
    visible[: rows // 2 + 1] = size
    run_and_check(scores, visible, k, simulate=False)
    kinds = rows_of_every_kind(size)
    kinds = kinds[:rows] if rows < len(kinds) else np.tile(kinds, (-(-rows // len(kinds)), 1))[:rows]
    run_and_check(kinds, size, k, simulate=False)


# ---- where marked positions go ---------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("size", [50, 40_000])
def test_places_of_marked_positions(size, simulate):
    """Positions are marked by lanes in random order, and looked up together with others that are not marked."""
    rng, threads = np.random.default_rng(size), 2 * WARPGROUP
    count = min(size, 4 * threads)
    positions = np.full(4 * threads, -1, np.int32)
    positions[:count] = rng.choice(size, count, replace=False)
    is_marked = (positions >= 0) & (rng.random(len(positions)) < 0.7)

    def body(machine: Machine, inputs: dict[str, Buffer], out: Buffer) -> None:
        marks = Marks(machine, threads, size, Shared.take(machine, (Marks.shared_bytes(size, threads),), "u8"))
        marks.clear()
        machine.barrier("block")
        mine = [inputs["positions"].load_int(machine.thread + i * threads) for i in range(4)]
        for i, position in enumerate(mine):
            marks.mark(position, inputs["is_marked"].load_int(machine.thread + i * threads) > 0)
        machine.barrier("block")
        marks.count()
        machine.barrier("block")
        for i, position in enumerate(mine):
            place, found = marks.find(position, position >= 0)
            out.store_int(select(found, place, -1), machine.thread + i * threads)

    places = run(
        body,
        {"positions": jnp.asarray(positions), "is_marked": jnp.asarray(is_marked.astype(np.int32))},
        spec(positions.shape, np.int32),
        simulate=simulate,
        warpgroups=2,
        shared_bytes=Marks.shared_bytes(size, threads),
    )
    marked = np.sort(positions[is_marked])
    np.testing.assert_array_equal(places, np.where(is_marked, np.searchsorted(marked, positions), -1))


# ---- the k-th largest ordinal ---------------------------------------------------------------------------------------


@machines
def test_ordinals_are_in_the_order_of_their_numbers(simulate):
    x = np.concatenate([SPECIAL, random_floats(1, 300), random_bits(2, 300)])
    (ordinals,) = elementwise(lambda _, x: ordinal_of(x), x, simulate=simulate, dtype=np.int32)
    (back,) = elementwise(lambda _, x: number_of(ordinal_of(x)), x, simulate=simulate)
    nan = np.isnan(x)
    assert np.all(ordinals[nan] == 2**31 - 1)
    ordered = x[~nan].argsort(kind="stable")
    steps = np.sign(np.diff(x[~nan][ordered].astype(np.float64)))
    np.testing.assert_array_equal(np.sign(np.diff(ordinals[~nan][ordered].astype(np.int64))), steps)
    np.testing.assert_array_equal(back[~nan], x[~nan])
    assert np.isnan(back[nan]).all()


def ordinals_of_normal(rng: np.random.Generator) -> np.ndarray:
    """Return the ordinals of numbers of both signs, some of them tiny."""
    bits = (rng.standard_normal(512) * 10.0 ** rng.choice([0, -30], 512)).astype(F32).view(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@machines
@pytest.mark.parametrize("kind", first_of(["any", "close", "normal", "few", "equal"], count=2))
@pytest.mark.parametrize("k", [1, 100, 512, 600])
@pytest.mark.parametrize(("begin", "limit"), [("low", 1), ("half", 20), ("high", 1)])
def test_the_range_of_the_kth_largest(begin, limit, k, kind, simulate):
    """There are 512 ordinals. The search begins among the upper ones, and there is no 600th."""
    rng = np.random.default_rng(k)
    ordinals = {
        "any": rng.integers(-INFINITY, 2**31, 512),
        "normal": ordinals_of_normal(rng),
        "few": rng.integers(0, 5, 512) * 2**28,
        "equal": np.full(512, -7),
        "close": rng.integers(2**20, 2**20 + 3000, 512),
    }[kind].astype(np.int32)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        search = KthLargest(machine, 2 * WARPGROUP, k)
        search.clear()
        mine = [inputs.load_int(machine.thread + half * (2 * WARPGROUP)) for half in range(2)]
        machine.barrier("block")

        def visit(action: Any) -> None:
            for ordinal in mine:
                action(ordinal, True)

        lowest, high = ordinals.min(), ordinals.max()
        first = {"low": lowest, "half": np.sort(ordinals)[256], "high": high}[begin]
        lowest, first, high = (machine.constant(int(ordinal), "i32") for ordinal in (lowest, first, high))
        found = search.find(visit, first, high, limit, lowest=lowest)
        out.store_words([found.low, found.high, found.above, found.count], machine.thread, 0)

    out = run(
        body,
        jnp.asarray(ordinals),
        spec((2 * WARPGROUP, 4), np.int32),
        simulate=simulate,
        warpgroups=2,
        shared_bytes=KthLargest.SHARED_BYTES,
    )
    assert np.all(out == out[0])
    low, high, above, count = out[0].tolist()
    if k > len(ordinals):
        assert count == 0
        return
    assert above == np.sum(ordinals > high) < k <= above + count
    assert count == np.sum((ordinals >= low) & (ordinals <= high))
    assert low <= np.sort(ordinals)[-k] <= high
    assert count <= limit or low == high or above + count == k
