"""Communication between the lanes of a warp, and atomic additions in shared memory, on both machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from tests.support.lane_kernels import elementwise, machines, random_floats, run, spec


def integers(seed: int, size: int = 2 * WARPGROUP) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, size).astype(np.int32)


@machines
@pytest.mark.parametrize("distance", [1, 2, 5, 16, 31])
def test_shuffle_up(distance, simulate):
    lane = np.arange(2 * WARPGROUP)
    source = np.where(lane % WARP < distance, lane, lane - distance)
    (got,) = elementwise(lambda m, x: m.shuffle_up(x, distance), integers(0), simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, integers(0)[source])
    floats = random_floats(1, 2 * WARPGROUP)
    (got,) = elementwise(lambda m, x: m.shuffle_up(x, distance), floats, simulate=simulate)
    np.testing.assert_array_equal(got, floats[source])


@machines
def test_shuffle_from_any_lane(simulate):
    source = np.random.default_rng(4).integers(0, WARP, 2 * WARPGROUP).astype(np.int32)
    at = np.arange(2 * WARPGROUP) // WARP * WARP + source
    (got,) = elementwise(lambda m, x, lane: m.shuffle(x, lane), integers(0), source, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, integers(0)[at])
    floats = random_floats(1, 2 * WARPGROUP)
    (got,) = elementwise(lambda m, x: m.shuffle(x, m.thread * 7 % WARP), floats, simulate=simulate)
    lane = np.arange(2 * WARPGROUP)
    np.testing.assert_array_equal(got, floats[lane // WARP * WARP + lane % WARPGROUP * 7 % WARP])


@machines
def test_warps_that_do_not_shuffle_name_any_lane(simulate):
    def body(machine: Machine, x: Buffer, out: Buffer) -> None:
        lane = machine.thread
        with machine.when(lane < WARP):
            out.store_int(machine.shuffle(x.load_int(lane), lane), lane)

    got = run(body, integers(0, WARP), spec((WARP,), np.int32), simulate=simulate)
    np.testing.assert_array_equal(got, integers(0, WARP))


@machines
@pytest.mark.parametrize(("op", "reduce"), [("add", np.sum), ("max", np.max), ("min", np.min)])
def test_reduce_warp(op, reduce, simulate):
    x = integers(2)
    (got,) = elementwise(lambda m, x: m.reduce_warp(op, x), x, simulate=simulate, dtype=np.int32)
    want = reduce(x.reshape(-1, WARP).astype(np.int64), axis=-1, keepdims=True).astype(np.int32)
    np.testing.assert_array_equal(got.reshape(-1, WARP), np.broadcast_to(want, (len(x) // WARP, WARP)))


@machines
def test_counts_of_bits_and_shifts_by_values(simulate):
    bits = np.arange(32)
    x = np.concatenate([[0, -1], 1 << bits, (1 << bits) - 1, integers(3)]).astype(np.int32)
    (got,) = elementwise(lambda m, x: m.leading_zeros(x), x, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, [32 - int(number).bit_length() for number in x.view(np.uint32)])
    (got,) = elementwise(lambda m, x: m.population_count(x), x, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, [int(number).bit_count() for number in x.view(np.uint32)])
    by = np.arange(len(x), dtype=np.int32) % 32
    (got,) = elementwise(lambda _, x, n: x >> n, x, by, simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got, (x.view(np.uint32) >> by.astype(np.uint32)).view(np.int32))


@machines
@pytest.mark.parametrize("where", ["all", "some", "none", "never"])
def test_additions_in_shared_memory(where, simulate):
    """Lanes add their numbers to a few words. What each finds there is the sum of some others' numbers."""
    threads, blocks, words = 2 * WARPGROUP, 3, 5
    numbers = np.random.default_rng(4).integers(1, 100, (blocks, threads)).astype(np.int32)

    def body(machine: Machine, inputs: Buffer, out: dict[str, Buffer]) -> None:
        lane, block = machine.thread, machine.block(0)
        base = machine.take_shared(4 * words)
        machine.store_shared(lane * 4 + base, [lane * 1000], 4, lane < words)
        machine.barrier("block")
        condition: Any = {"all": True, "never": False, "none": lane < 0, "some": lane % 3 == 1}[where]
        before = machine.add_shared(lane % words * 4 + base, inputs.load_int(block, lane), condition)
        out["before"].store_int(before, block, lane)
        machine.barrier("block")
        (after,) = machine.load_shared(lane % words * 4 + base, 4)
        out["after"].store_int(after, block, lane)

    shape = spec(numbers.shape, np.int32)
    state = {"before": shape, "after": shape}
    out = run(body, jnp.asarray(numbers), state, simulate=simulate, grid=(blocks,), warpgroups=2, shared_bytes=32)

    lane = np.arange(threads)
    adds = {"all": lane >= 0, "some": lane % 3 == 1}.get(where, lane < 0)
    assert not out["before"][:, ~adds].any()
    for block in range(blocks):
        for word in range(words):
            here = lane % words == word
            steps = sorted(zip(out["before"][block, here & adds], numbers[block, here & adds], strict=True))
            total = word * 1000
            for before, number in steps:
                assert before == total
                total += number
            assert np.all(out["after"][block, here] == total)


@machines
def test_blocks_of_a_cluster_add_in_the_shared_memory_of_one(simulate):
    cluster = 4

    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, block, zero = machine.thread, machine.block(0), machine.constant(0, "i32")
        base = machine.take_shared(16)
        machine.store_shared(zero + base, [block], 4, lane == 0)
        machine.barrier("cluster")
        place = machine.add_shared(zero + base, machine.constant(1, "i32"), True, rank=2)
        out.store_int(machine.rank * 1000 + lane, block, place - block)
        machine.barrier("cluster", leave=machine.rank > 2)
        with machine.when(machine.rank == 2):
            (total,) = machine.load_shared(zero + base, 4)
            with machine.when(lane == 0):
                out.store_int(total, block, cluster * WARPGROUP)

    shape = 3, cluster * WARPGROUP + 1
    out = run(body, {}, np.full(shape, -1, np.int32), simulate=simulate, grid=(3,), cluster=cluster, shared_bytes=16)
    who = np.add.outer(np.arange(cluster) * 1000, np.arange(WARPGROUP)).ravel()
    for block in range(3):
        np.testing.assert_array_equal(np.sort(out[block, :-1]), who)
        assert out[block, -1] == block + cluster * WARPGROUP


# ---- what the simulator catches -------------------------------------------------------------------------------------


def add_one(machine: Machine) -> None:
    machine.add_shared(machine.thread % 4 * 4, machine.constant(1, "i32"), True)


def addition_meets_writer(machine: Machine) -> None:
    machine.store_shared(machine.thread * 4, [machine.thread], 4, machine.thread < 4)
    add_one(machine)


def addition_meets_reader(machine: Machine) -> None:
    machine.load_shared(machine.thread % 4 * 4, 4)
    add_one(machine)


def reader_meets_addition(machine: Machine) -> None:
    add_one(machine)
    machine.load_shared(machine.thread % 4 * 4, 4)


def writer_meets_addition(machine: Machine) -> None:
    add_one(machine)
    machine.store_shared(machine.thread * 4, [machine.thread], 4, machine.thread < 4)


def addition_of_another_warpgroup(machine: Machine) -> None:
    add_one(machine)
    machine.barrier("warpgroup")
    machine.load_shared(machine.thread % 4 * 4, 4)


def addition_past_the_end(machine: Machine) -> None:
    machine.add_shared(machine.thread * 16, machine.thread, True)


def misaligned_addition(machine: Machine) -> None:
    machine.add_shared(machine.thread * 4 + 2, machine.thread, machine.thread < 4)


def shuffle_in_half_a_warp(machine: Machine) -> None:
    with machine.when(machine.thread < 16):
        machine.shuffle_up(machine.thread, 1)


def reduction_in_half_a_warp(machine: Machine) -> None:
    with machine.when(machine.thread < 16):
        machine.reduce_warp("add", machine.thread)


def shuffle_from_no_lane(machine: Machine) -> None:
    machine.shuffle(machine.thread, machine.thread)


def simulated(fault: Callable[[Machine], None]) -> None:
    """Run a body on shared memory that has been written."""

    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        machine.store_shared(machine.thread * 4, [machine.constant(0, "i32")], 4, True)
        machine.barrier("block")
        fault(machine)

    run(body, {}, np.zeros(4, np.int32), simulate=True, warpgroups=2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (addition_meets_writer, "adds to what another one wrote"),
        (addition_meets_reader, "adds to what another one read"),
        (reader_meets_addition, "reads what another one adds to"),
        (writer_meets_addition, "writes what another one added to"),
        (addition_of_another_warpgroup, "reads what another one adds to"),
        (addition_past_the_end, "past the block's shared memory"),
        (misaligned_addition, "misaligned"),
        (shuffle_in_half_a_warp, "only some lanes are active"),
        (reduction_in_half_a_warp, "only some lanes are active"),
        (shuffle_from_no_lane, "a shuffle from lane 32 of a warp"),
    ],
)
def test_a_fault_is_caught(fault, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(fault)


def test_additions_and_barriers_are_no_fault():
    def accepted(machine: Machine) -> None:
        for _ in range(2):
            machine.store_shared(machine.thread * 4, [machine.thread], 4, machine.thread < 4)
            machine.barrier("block")
            add_one(machine)
            add_one(machine)
            machine.barrier("block")
            machine.load_shared(machine.thread % 4 * 4, 4)
            machine.barrier("block")

    simulated(accepted)
