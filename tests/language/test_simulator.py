"""Faults that the simulator finds in a kernel, and correct kernels that it accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.values import select
from tests.support.lane_kernels import run


def simulated(
    body: Callable[..., None], size: int = 4 * WARPGROUP, warpgroups: int = 1, grid: Any = (1,), cluster: int = 1
) -> np.ndarray:
    """Run a body of (machine, constant input, state), both int32 [size]."""
    inputs, state = jnp.arange(size, dtype=jnp.int32), np.zeros(size, np.int32)
    return run(body, inputs, state, simulate=True, warpgroups=warpgroups, grid=grid, cluster=cluster)


def past_the_end(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread + (3 * WARPGROUP + 1))


def before_the_start(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(inputs.load_int(machine.thread - 1), machine.thread)


def across_the_end(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.load(inputs.address + machine.widen(machine.thread) * 16 + 8, 16, True, constant=True)


def far_away(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(dataclasses.replace(inputs, address=machine.widen(machine.thread)).load_int(0), machine.thread)


def reader_meets_writer_of_more(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 16, [machine.thread] * 4, 16, machine.thread < 64)
    machine.load_shared(machine.thread * 4, 1)


def past_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 16, [machine.thread], 4, True)


def misaligned_load(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.load(inputs.address + machine.widen(machine.thread) * 4, 8, True, constant=True)


def misaligned_store(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store(out.address + machine.widen(machine.thread) * 8, [machine.thread] * 4, 16, machine.thread == 3)


def misaligned_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 4 + 2, [machine.thread], 4, machine.thread < 9)


def two_writers(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread // 2)


def two_writers_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread // 2 * 4, [machine.thread], 4, True)


def two_writers_in_turn(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=machine.thread > 3)
    out.store_int(machine.thread, machine.thread + 1, where=machine.thread == 3)


def two_blocks_write(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.block(0), machine.thread)
    machine.barrier("block")  # orders nothing between blocks


def writer_meets_reader(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.load_int(machine.thread)
    out.store_int(machine.thread, machine.thread ^ 1)


def writer_meets_several_readers(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.load_int(machine.thread // 2)
    with machine.when(machine.thread < 1):
        out.store_int(machine.thread, machine.thread)


def reader_meets_writer(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)
    out.load_int(machine.thread ^ 1)


def reader_meets_writer_in_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.store_shared(machine.thread * 4, [machine.thread], 4, True)
    machine.load_shared((machine.thread ^ 1) * 4, 4)


def reader_meets_writer_of_another_warpgroup(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread)
    machine.barrier("warpgroup")
    out.load_int(machine.thread ^ WARPGROUP)


def barrier_in_some_lanes(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < WARP):
        machine.barrier("warpgroup")


def block_barrier_in_one_warpgroup(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < WARPGROUP):
        machine.barrier("block")


def shuffle_in_half_a_warp(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(machine.thread < 16):
        machine.shuffle_xor(machine.thread, 1)


def write_to_an_input(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    inputs.store_int(machine.thread, machine.thread)


def cached_load_of_state(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    dataclasses.replace(out, constant=True).load_int(machine.thread)


def too_much_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.take_shared(1025)


def store_after_leaving(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.barrier("cluster", leave=machine.rank == 1)
    out.store_int(machine.thread, machine.thread, where=machine.rank == 1)


def load_after_leaving(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.barrier("cluster", leave=machine.rank == 1)
    inputs.load_int(machine.thread)


def load_shared_after_leaving(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.barrier("cluster", leave=machine.rank == 1)
    machine.load_shared(machine.thread * 4, 4)


def arrive_after_leaving(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.barrier("cluster", leave=machine.rank == 1)
    machine.barrier("cluster")


# Those that need a cluster of two.
LEAVERS = store_after_leaving, load_after_leaving, load_shared_after_leaving, arrive_after_leaving
FAULTS: list[tuple[Callable[..., None], str]] = [
    (past_the_end, "access of 4 bytes at"),
    (before_the_start, "access of 4 bytes at -4|outside of all buffers"),
    (across_the_end, "access of 16 bytes at"),
    (far_away, "outside of all buffers"),
    (past_shared_memory, "past the block's shared memory"),
    (misaligned_load, "8 bytes is misaligned"),
    (misaligned_store, "16 bytes is misaligned"),
    (misaligned_in_shared_memory, "4 bytes is misaligned"),
    (two_writers, "two lanes write the same bytes"),
    (two_writers_in_shared_memory, "two lanes write the same bytes"),
    (two_writers_in_turn, "a lane writes what another one wrote"),
    (two_blocks_write, "two lanes write the same bytes"),
    (writer_meets_reader, "a lane writes what another one read"),
    (writer_meets_several_readers, "a lane writes what another one read"),
    (reader_meets_writer, "a lane reads what another one writes"),
    (reader_meets_writer_in_shared_memory, "a lane reads what another one writes"),
    (reader_meets_writer_of_more, "a lane reads what another one writes"),
    (reader_meets_writer_of_another_warpgroup, "a lane reads what another one writes"),
    (barrier_in_some_lanes, "a warpgroup barrier that only some of its lanes reach"),
    (block_barrier_in_one_warpgroup, "a block barrier that only some of its lanes reach"),
    (shuffle_in_half_a_warp, "a shuffle in a warp of which only some lanes are active"),
    (write_to_an_input, "a constant input is written"),
    (cached_load_of_state, "read-only cache of what the kernel may write"),
    *((body, "a lane that left at a barrier goes on") for body in LEAVERS),
    (too_much_shared_memory, "1040 bytes of shared memory are taken so far, and the launch has 1024"),
]


@pytest.mark.parametrize(("body", "message"), FAULTS, ids=[body.__name__ for body, _ in FAULTS])
def test_the_simulator_refuses(body, message):
    grid = (2,) if body is two_blocks_write else (1,)
    cluster = 2 if body in LEAVERS else 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(body, warpgroups=2 if body is not past_the_end else 1, grid=grid, cluster=cluster)


def orderly(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    """Do what some of the faults above do, with barriers in between, and what needs no barrier."""
    lane = machine.thread
    machine.store_shared(lane * 4, [lane], 4, True)
    out.store_int(lane, lane)
    machine.barrier("block")
    (other,) = machine.load_shared((lane ^ WARPGROUP) * 4, 4)
    far = out.load_int(lane ^ WARPGROUP)
    machine.barrier("warpgroup")
    near = out.load_int(lane ^ 1)
    first = out.load_int(0)
    machine.barrier("block")
    with machine.when(lane < WARPGROUP):  # a whole warpgroup
        machine.barrier("warpgroup")
    with machine.when(lane // WARP == 1):  # a whole warp
        machine.shuffle_xor(lane, 1)
    # What another lane has written and read, and (at 0) all lanes have read.
    out.store_int(other * 1000000 + far * 1000 + near + first, lane ^ 2)


def test_the_simulator_accepts_the_same_with_barriers():
    lane = np.arange(2 * WARPGROUP) ^ 2
    want = (lane ^ WARPGROUP) * 1001000 + (lane ^ 1)
    np.testing.assert_array_equal(simulated(orderly, warpgroups=2)[: 2 * WARPGROUP], want)


def test_lanes_may_store_to_parts_of_what_another_one_stored():
    """Accesses get smaller, and each byte keeps who accessed it: lanes store to theirs twice without a barrier."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        machine.store_shared(lane * 16, [lane] * 4, 16, lane < 16)
        machine.barrier("block")
        for number in (lane * 0, lane):
            machine.store_shared(lane, [number], 1, True)
        machine.barrier("block")
        out.store_int(machine.load_shared(lane * 4, 4)[0], lane, where=lane < 64)

    found = simulated(body, warpgroups=2)[:64].astype(np.int32).view(np.uint8)
    np.testing.assert_array_equal(found, np.arange(256))


def test_the_simulator_knows_which_array_a_lane_reads():
    """One load may read several arrays, and each is checked against its own bounds."""

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        short = inputs.address
        long = out.address
        words = machine.load(select(lane < 64, short, long) + machine.widen(lane) * 4, 4, True, constant=False)
        machine.barrier("block")
        out.store_int(words[0], lane)

    out = simulated(body, size=WARPGROUP)
    np.testing.assert_array_equal(out, np.where(np.arange(WARPGROUP) < 64, np.arange(WARPGROUP), 0))


def test_a_launch_of_no_elements_or_no_blocks_does_nothing():
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        raise AssertionError("not to be run")

    assert run(body, {}, np.zeros((0, 4), np.int32), simulate=True).shape == (0, 4)
    result = launch(body, name="nothing", grid=(1,), inputs={}, state=jax.ShapeDtypeStruct((0, 4), np.int32))
    assert isinstance(result, jax.Array)
    assert result.shape == (0, 4)
    kept = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(run(body, {}, kept, simulate=True, grid=(0,)), kept)
