"""Lanes, memory and control flow of the kernel language, one primitive at a time, on both machines."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer, Row, Team, add, maximum
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, Value, select
from tests.support.lane_kernels import (
    F32,
    SPECIAL,
    TINY,
    assert_same_floats,
    elementwise,
    machines,
    random_bits,
    random_floats,
    run,
    spec,
)
from tests.support.machines import requires_gpu

# ---- between lanes --------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16])
def test_shuffle_xor(distance, simulate):
    lane = np.arange(3 * WARPGROUP)
    integers = np.random.default_rng(distance).integers(-(2**31), 2**31, len(lane)).astype(np.int32)
    floats = random_floats(distance, len(lane))
    (got,) = elementwise(lambda m, x: m.shuffle_xor(x, distance), integers, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, integers[lane ^ distance])
    (got,) = elementwise(lambda m, x: m.shuffle_xor(x, distance), floats, simulate=simulate)
    np.testing.assert_array_equal(got, floats[lane ^ distance])


@machines
@pytest.mark.parametrize("size", [8, WARP, WARPGROUP])
def test_a_team_reduces_several_terms_at_once_and_again(size, simulate):
    """Sums of small whole numbers are exact in any order."""
    rng = np.random.default_rng(size)
    x = rng.integers(-1000, 1000, 2 * WARPGROUP).astype(F32)
    y = rng.integers(-(2**31), 2**31, len(x)).astype(np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        team = Team(machine, size)
        total, peak, integer_peak = team.reduce((add, x), (maximum, x), (maximum, y))
        (again,) = team.reduce((add, total + x))
        return [total, peak, machine.from_bits(integer_peak), again]

    total, peak, integer_peak, again = elementwise(function, x, y, simulate=simulate, outputs=4)
    of_team = x.reshape(-1, size)
    sums = of_team.sum(-1, keepdims=True)
    for got, want in [
        (total, sums),
        (peak, of_team.max(-1, keepdims=True)),
        (integer_peak.view(np.int32), y.reshape(-1, size).max(-1, keepdims=True)),
        (again, (of_team + sums).sum(-1, keepdims=True)),
    ]:
        np.testing.assert_array_equal(got.reshape(-1, size), np.broadcast_to(want, of_team.shape))


@machines
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_neighbouring_lanes_reduce_among_themselves(lanes, simulate):
    x = np.random.default_rng(lanes).integers(-(2**31), 2**31, WARPGROUP).astype(np.int32)
    (got,) = elementwise(lambda m, x: Team(m, WARP).neighbours(maximum, x, lanes), x, simulate=simulate, dtype=np.int32)
    want = np.broadcast_to(x.reshape(-1, lanes).max(-1, keepdims=True), (WARPGROUP // lanes, lanes))
    np.testing.assert_array_equal(got, want.ravel())


@machines
def test_what_is_held_stays_the_same(simulate):
    """Holds values as they were loaded, and values that a loop carries."""
    x = np.concatenate([SPECIAL, random_bits(25, 500)])
    y = np.random.default_rng(26).integers(-(2**31), 2**31, len(x)).astype(np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        def body(i: Value, carry: list[Value]) -> list[Value]:
            a, b = machine.hold(carry)
            return [a, b + i]

        held = machine.hold([x, y, machine.constant(7, "i32")])
        assert [value.kind for value in held] == ["f32", "i32", "i32"]
        a, b, seven = held
        c, d = machine.loop(4, body, [a, b])
        return [a, machine.from_bits(b), machine.from_bits(seven), c, machine.from_bits(d)]

    a, b, seven, c, d = elementwise(function, x, y, simulate=simulate, outputs=5)
    assert_same_floats(a, x)
    assert_same_floats(c, x)
    for got, want in [(b, y), (seven, np.full_like(y, 7)), (d, y + np.int32(6))]:
        np.testing.assert_array_equal(got.view(np.int32), want)


# ---- memory ---------------------------------------------------------------------------------------------------------

CONDITIONS = ("all", "some", "none")


def condition_of(name: str, machine: Machine, which: int) -> Any:
    """Return the condition and, below, its lanes."""
    return {"all": True, "none": machine.thread < 0, "some": (machine.thread + which) % 3 == 0}[name]


def lanes_of(name: str, which: int) -> np.ndarray:
    lane = np.arange(WARPGROUP)
    return {"all": lane >= 0, "none": lane < 0, "some": (lane + which) % 3 == 0}[name]


@machines
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "state"])
@pytest.mark.parametrize("load_where", CONDITIONS)
@pytest.mark.parametrize("store_where", CONDITIONS)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_loads_and_stores(size, store_where, load_where, constant, simulate):
    """Lane t reads word 37 t + 5 of its size and writes it at 3 t + 1. It writes 0 if it did not read."""
    rng = np.random.default_rng(size)
    words = max(1, size // 4)
    source, kept = (rng.integers(1, 256, (WARPGROUP + 2) * size, np.uint8) for _ in range(2))
    full = np.full(WARPGROUP * words, 7, np.int32)  # all words as they come, not only the bytes that are stored

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        lane = machine.thread
        read_from = inputs["source"] if constant else state["source"]
        loaded = machine.load(
            read_from.address + machine.widen((lane * 37 + 5) % WARPGROUP) * size,
            size,
            condition_of(load_where, machine, 0),
            constant=constant,
        )
        assert len(loaded) == words
        for i, word in enumerate(loaded):
            state["full"].store_int(word, lane * words + i)
        at = state["kept"].address + (machine.widen((lane * 3 + 1) % WARPGROUP) + 1) * size
        machine.store(at, loaded, size, condition_of(store_where, machine, 1))

    array = {"source": jnp.asarray(source)}
    state = {"kept": kept, "full": full}
    out = run(body, array if constant else {}, state if constant else state | {"source": source}, simulate=simulate)

    lane = np.arange(WARPGROUP)
    loaded = source.reshape(-1, size)[(lane * 37 + 5) % WARPGROUP] * lanes_of(load_where, 0)[:, None].astype(np.uint8)
    want = kept.copy().reshape(-1, size)
    storing = lanes_of(store_where, 1)
    want[((lane * 3 + 1) % WARPGROUP + 1)[storing]] = loaded[storing]
    np.testing.assert_array_equal(out["kept"], want.ravel())
    wide = np.zeros((WARPGROUP, 4 * words), np.uint8)  # a word is zero-extended
    wide[:, :size] = loaded
    np.testing.assert_array_equal(out["full"].view(np.uint8), wide.ravel())


@machines
def test_a_buffer_converts_what_it_loads_and_stores(simulate):
    """Covers each dtype with each number of neighbours, at indices that are values and at constant ones."""
    rng = np.random.default_rng(13)
    shape = 2, 3, WARPGROUP, 8
    f32 = random_floats(14, math.prod(shape)).reshape(shape)
    bf16 = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    u8 = rng.integers(0, 256, shape, np.uint8)
    source = {"f32": f32, "bf16": bf16, "u8": u8}
    cases = [("f32", 1), ("f32", 2), ("f32", 4), ("bf16", 2), ("bf16", 4), ("bf16", 8), ("u8", 1), ("u8", 2), ("u8", 4)]

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        lane = machine.thread
        row = lane % 3
        for name, count in cases:
            there, target = inputs[name], state[f"{name} {count}"]
            first = select((lane & 1) > 0, lane * 0 + 8 - count, 0)  # the last neighbours, or the first ones
            if name == "u8":
                word = there.load_bytes(1, row, lane, first, count=count)
                target.store_bytes(word, 0, row, lane, first, count=count)
            else:
                target.store_floats(there.load_floats(1, row, lane, first, count=count), 0, row, lane, first)

    state = {f"{name} {count}": np.zeros_like(source[name]) for name, count in cases}
    out = run(body, jax.tree.map(jnp.asarray, source), state, simulate=simulate)
    for name, count in cases:
        want = np.zeros_like(source[name])
        for lane in range(WARPGROUP):
            first = slice(8 - count, 8) if lane % 2 else slice(0, count)
            want[0, lane % 3, lane, first] = source[name][1, lane % 3, lane, first]
        assert out[f"{name} {count}"].tobytes() == want.tobytes(), (name, count)


@machines
def test_a_load_that_is_known_not_to_happen_gives_zero(simulate):
    def body(machine: Machine, source: Buffer, out: Buffer) -> None:
        # The index is far out of bounds.
        a, b, c, d = source.load_floats(machine.thread * 1000, where=False)
        out.store_floats([(a + b) + (c + d)], machine.thread)
        out.store_floats([a], machine.thread * 1000, where=False)

    out = run(body, jnp.ones(4), spec((WARPGROUP,), F32), simulate=simulate)
    assert not out.any()


@machines
@pytest.mark.parametrize("dtypes", [(F32, F32), (ml_dtypes.bfloat16,) * 2, (ml_dtypes.bfloat16, F32)])
@pytest.mark.parametrize("condition", ["some", True, False])
@pytest.mark.parametrize("where", [True, "some"])
def test_load_either(where, condition, dtypes, simulate):
    """Where the condition selects one array, the index of the other may be out of bounds."""
    rng = np.random.default_rng(15)
    a, b = (rng.standard_normal((40, VECTOR)).astype(dtype) for dtype in dtypes)

    def body(machine: Machine, inputs: list[Buffer], out: Buffer) -> None:
        lane = machine.thread
        first = condition if isinstance(condition, bool) else lane < 40
        index_a = lane % 40 if isinstance(condition, bool) else lane
        there = (lane % 5) > 0 if where == "some" else True
        row = Row(Team(machine, 1), VECTOR)
        got = row.load_either(first, (inputs[0], (index_a,)), (inputs[1], (lane % 40,)), where=there)
        row.store(out, got, lane)

    got = run(body, [jnp.asarray(a), jnp.asarray(b)], spec((WARPGROUP, VECTOR), F32), simulate=simulate)
    lane = np.arange(WARPGROUP)
    first = np.full(WARPGROUP, condition) if isinstance(condition, bool) else lane < 40
    want = np.where(first[:, None], a.astype(F32)[lane % 40], b.astype(F32)[lane % 40])
    if where == "some":
        want[lane % 5 == 0] = 0
    np.testing.assert_array_equal(got, want)


@machines
def test_addresses_are_computed_in_64_bits(simulate):
    """Uses products and differences that would be different in 32 bits, as byte offsets into a small array."""
    source = np.arange(WARPGROUP, dtype=np.int32) * 3

    def body(machine: Machine, source: Buffer, out: Buffer) -> None:
        lane = machine.widen(machine.thread)
        far = (lane * (3 << 33)) // (3 << 31)  # 4 lane; the product's low 32 bits are all 0
        back = source.address + 4 * (WARPGROUP - 1) + machine.widen(machine.thread * -4)  # negative in 64 bits too
        for column, address in enumerate((source.address + far, back)):
            (word,) = machine.load(address, 4, True, constant=True)
            out.store_int(word, machine.thread, column)

    out = run(body, jnp.asarray(source), spec((WARPGROUP, 2), np.int32), simulate=simulate)
    np.testing.assert_array_equal(out, np.stack([source, source[::-1]], 1))


@requires_gpu
def test_an_array_of_more_than_four_gib():
    """Accesses the first and the last rows, which are 5 GiB apart."""
    rows = (5 << 30) // 1024

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        half = machine.thread % 64
        row = select(machine.thread < 64, half, half + (rows - 64))
        word = inputs.load_bytes(row, 1020)
        out.store_bytes(word + 1, row, 1020)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(state: jax.Array, inputs: jax.Array) -> jax.Array:
        return launch(body, name="probe", grid=(1,), inputs=inputs, state=state)

    marks = jnp.zeros((rows, 1024), jnp.uint8).at[:64].set(1).at[-64:].set(9)
    state = call(jnp.zeros((rows, 1024), jnp.uint8), marks)
    assert np.all(np.asarray(state[:64, 1020]) == 2)
    assert np.all(np.asarray(state[-64:, 1020]) == 10)
    assert int(jnp.count_nonzero(state)) == WARPGROUP * 4


@machines
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("where", CONDITIONS)
def test_shared_memory_belongs_to_a_block(size, where, simulate):
    """Lanes write their block's number and their own, and read them permuted. Other lanes see the previous contents."""
    words, threads, blocks = max(1, size // 4), 2 * WARPGROUP, 3
    rng = np.random.default_rng(size)
    given = rng.integers(-(2**31), 2**31, (blocks, threads, words)).astype(np.int32)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        base = machine.take_shared(3)  # the next offset is aligned all the same
        base = machine.take_shared(threads * size)
        assert base == 16
        block, lane = machine.block(0), machine.thread
        machine.store_shared(lane * size + base, [machine.constant(-1, "i32")] * words, size, True)
        machine.barrier("block")
        values = [inputs.load_int(block, lane, i) for i in range(words)]
        machine.store_shared(((lane * 77 + 5) % threads) * size + base, values, size, condition_of(where, machine, 0))
        machine.barrier("block")
        for i, word in enumerate(machine.load_shared(lane * size + base, size)):
            out.store_int(word, block, lane, i)

    out = run(
        body,
        jnp.asarray(given),
        spec(given.shape, np.int32),
        simulate=simulate,
        grid=(blocks,),
        warpgroups=2,
        shared_bytes=16 + threads * size,
    )
    lane = np.arange(threads)
    storing = {"all": lane >= 0, "none": lane < 0, "some": lane % 3 == 0}[where]
    want = np.full_like(given, -1)
    want[:, ((lane * 77 + 5) % threads)[storing]] = given[:, storing]
    mask = (1 << 8 * size) - 1 if size < 4 else -1
    np.testing.assert_array_equal(out, want & np.int32(mask))


@machines
def test_a_warpgroup_barrier_orders_what_its_lanes_do_in_device_memory_too(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane = machine.thread % WARPGROUP
        group = machine.thread // WARPGROUP
        out.store_int(machine.thread * 5, group, lane)
        machine.barrier("warpgroup")
        other = out.load_int(group, (lane + 50) % WARPGROUP)
        machine.barrier("warpgroup")
        out.store_int(other, group, lane)

    out = run(body, {}, np.zeros((3, WARPGROUP), np.int32), simulate=simulate, warpgroups=3)
    np.testing.assert_array_equal(out, np.roll(np.arange(3 * WARPGROUP).reshape(3, -1) * 5, -50, axis=1))


# ---- control --------------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_loop_carries_values_of_any_kind(count, simulate):
    x, y = random_floats(16, 200), np.arange(200, dtype=np.int32)

    def function(machine: Machine, x: Value, y: Value) -> list[Value]:
        def body(i: Value, carry: list[Value]) -> list[Value]:
            a, b, c = carry
            return [a.maximum(x) * 0.5, b + i * i + y, c]

        a, b, c = machine.loop(count, body, [machine.constant(1.0, "f32"), machine.constant(3, "i32"), x])
        return [a, machine.from_bits(b), c]

    a, b, c = elementwise(function, x, y, simulate=simulate, outputs=3)
    want, number = np.ones_like(x), np.full_like(y, 3)
    for i in range(count):
        want, number = np.maximum(want, x) * F32(0.5), number + i * i + y
    normal = np.abs(want) >= TINY  # see test_float_arithmetic
    np.testing.assert_array_equal(a[normal], want[normal])
    np.testing.assert_array_equal(b.view(np.int32), number)
    np.testing.assert_array_equal(c, x)


@machines
def test_a_loop_may_end_at_a_number_that_is_known_only_then(simulate):
    """The number is the same in all lanes of a block. If there is no iteration, carried values do not change."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        block = machine.block(0)

        def turn(i: Value, carry: list[Value]) -> list[Value]:
            return [carry[0] + i * 10 + machine.thread]

        (total,) = machine.loop(inputs.load_int(block), turn, [machine.constant(3, "i32")])
        out.store_int(total, block, machine.thread)

    counts = np.array([0, 1, 5, 2, 0, 9], np.int32)
    out = run(body, jnp.asarray(counts), spec((6, WARPGROUP), np.int32), simulate=simulate, grid=(6,))
    turns = counts[:, None]
    np.testing.assert_array_equal(out, 3 + 10 * (turns * (turns - 1) // 2) + turns * np.arange(WARPGROUP))


@machines
def test_a_loop_may_carry_nothing_and_store(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        def write(i: Value, carry: list[Value]) -> list[Value]:
            out.store_int(machine.thread + i * 1000, i, machine.thread)
            return carry

        assert machine.loop(4, write, []) == []

    out = run(body, {}, spec((4, WARPGROUP), np.int32), simulate=simulate)
    np.testing.assert_array_equal(out, np.arange(4)[:, None] * 1000 + np.arange(WARPGROUP))


@machines
def test_each_lane_repeats_as_long_as_it_says(simulate):
    def function(machine: Machine, x: Value) -> list[Value]:
        turns = machine.constant(0.0, "f32")
        return machine.repeat(lambda carry: (carry[0] > 1, [carry[0] >> 1, carry[1] + 1.0]), [x, turns])[1:]

    numbers = np.array([0, 1, 2, 3, 1000, 1 << 30], np.int32)
    (turns,) = elementwise(function, numbers, simulate=simulate)
    np.testing.assert_array_equal(turns, [1, 1, 2, 2, 10, 31])


@machines
def test_when_nests_and_takes_a_condition_known_when_the_kernel_is_built(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, block = machine.thread, machine.block(1)
        with machine.when(lane < 100):
            out.store_int(lane, block, 0, lane)
            with machine.when(lane % 2 == 0), machine.when(True), machine.when(block > 0):
                out.store_int(lane, block, 1, lane)
            out.store_int(lane, block, 2, lane)
        with machine.when(lane < 0):
            out.store_int(lane, block, 3, lane * 1000)
        with machine.when(False):
            out.store_int(lane, block, 3, lane)
        out.store_int(lane, block, 4, lane)

    shape = 3, 5, WARPGROUP
    out = run(body, {}, np.full(shape, -1, np.int32), simulate=simulate, grid=(1, 3))
    lane = np.arange(WARPGROUP)
    want = np.full(shape, -1, np.int32)
    want[:, [0, 2]] = np.where(lane < 100, lane, -1)
    want[1:, 1] = np.where((lane < 100) & (lane % 2 == 0), lane, -1)
    want[:, 4] = lane
    np.testing.assert_array_equal(out, want)


@machines
def test_a_grid_of_two_axes_and_several_warpgroups(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        i, j, lane = machine.block(0), machine.block(1), machine.thread
        out.store_int((i * 1000 + j) * 1000 + lane, i, j, lane)

    shape = 5, 3, 2 * WARPGROUP
    out = run(body, {}, spec(shape, np.int32), simulate=simulate, grid=shape[:2], warpgroups=2)
    i, j, lane = np.indices(shape)
    np.testing.assert_array_equal(out, (i * 1000 + j) * 1000 + lane)


@machines
@pytest.mark.parametrize("cluster", [2, 4])
def test_blocks_of_a_cluster_reach_each_others_shared_memory(cluster, simulate):
    """Every block stores its numbers in the first block of its cluster, which adds them up."""

    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, rank, block = machine.thread, machine.rank, machine.block(0)
        base = machine.take_shared(4 * cluster * WARPGROUP)
        number = block * 1000 + rank * 100 + lane
        machine.store_shared((rank * WARPGROUP + lane) * 4 + base, [number], 4, True, rank=0)
        machine.barrier("cluster")
        with machine.when(rank == 0):
            total = machine.constant(0, "i32")
            for other in range(cluster):
                (word,) = machine.load_shared((lane ^ 3) * 4 + (base + 4 * other * WARPGROUP), 4)
                total = total + word
            out.store_int(total, block, lane)
        with machine.when(rank == cluster - 1):
            out.store_int(rank, block + 3, lane)

    out = run(
        body,
        {},
        np.zeros((6, WARPGROUP), np.int32),
        simulate=simulate,
        grid=(3,),
        cluster=cluster,
        shared_bytes=4 * cluster * WARPGROUP,
    )
    lane, block, rank = np.arange(WARPGROUP) ^ 3, np.arange(3)[:, None], np.arange(cluster)
    np.testing.assert_array_equal(out[:3], cluster * (block * 1000 + lane) + 100 * rank.sum())
    assert np.all(out[3:] == cluster - 1)


@machines
def test_a_block_may_leave_its_cluster_at_a_barrier(simulate):
    """What it has stored in the other block's shared memory is visible there."""

    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, rank, block = machine.thread, machine.rank, machine.block(0)
        base = machine.take_shared(4 * WARPGROUP)
        machine.store_shared(lane * 4 + base, [block * 1000 + lane], 4, rank == 1, rank=0)
        machine.barrier("cluster", leave=rank == 1)
        with machine.when(rank == 0):
            (word,) = machine.load_shared((lane ^ 3) * 4 + base, 4)
            out.store_int(word, block, lane)

    options: Any = dict(grid=(3,), cluster=2, shared_bytes=4 * WARPGROUP)
    out = run(body, {}, spec((3, WARPGROUP), np.int32), simulate=simulate, **options)
    np.testing.assert_array_equal(out, np.arange(3)[:, None] * 1000 + (np.arange(WARPGROUP) ^ 3))


@machines
def test_one_array_may_stand_in_for_another(simulate):
    a, b = (np.random.default_rng(seed).standard_normal((WARPGROUP, 4)).astype(F32) for seed in (23, 24))

    def body(machine: Machine, inputs: list[Buffer], out: Buffer) -> None:
        lane = machine.thread
        out.store_floats(inputs[0].instead((lane & 1) > 0, inputs[1]).load_floats(lane, 0), lane, 0)

    out = run(body, [jnp.asarray(a), jnp.asarray(b)], spec(a.shape, F32), simulate=simulate)
    np.testing.assert_array_equal(out, np.where(np.arange(WARPGROUP)[:, None] % 2 == 1, b, a))
