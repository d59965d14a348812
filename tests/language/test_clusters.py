"""What blocks of a cluster send to each other's barriers, and the barrier of a cluster in two steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Value
from tests.support.lane_kernels import run, spec
from tests.support.machines import HOPPER_MACHINES

BLOCKS = 4


def sums_of_all(
    machine: TensorCores,
    x: Any,
    out: Any,
    *,
    count: int,
    waits: bool = True,
    bytes_more: int = 0,
    early: bool = True,
    warps: int = 1,
) -> None:
    """Every block gets ``count`` numbers of each lane of all blocks, and adds up those of each lane, in each turn.

    Each of some warps expects a part of them.
    """
    turns = x.shape[1]
    received = Shared.take(machine, (2, BLOCKS, WARPGROUP, count), "f32")
    sent = Barrier.take(machine, warps, copies=2, scope="cluster")
    init_barriers(sent)
    machine.cluster_arrive()
    machine.cluster_wait()

    def expect(turn: Value) -> None:
        with machine.when(machine.thread < WARP * warps):
            sent.copy(turn % 2).expect(BLOCKS * WARPGROUP * count * 4 // warps + bytes_more)

    def one(turn: Value, carry: None) -> None:
        mine = x.load_floats(machine.rank, turn, machine.thread, 0, count=count)
        if early:
            expect(turn)
        for rank in range(BLOCKS):
            place = turn % 2, machine.rank, machine.thread, 0
            sent.copy(turn % 2).send_floats(mine, received, *place, rank=rank)
        if not early:
            expect(turn)
        if waits:
            sent.copy(turn % 2).wait(turn // 2 & 1)
        # A neighbour's, so that a lane reads what other lanes sent.
        parts = [received.load_floats(turn % 2, rank, machine.thread ^ 1, 0, count=count) for rank in range(BLOCKS)]
        totals = [sum(values[1:], values[0]) for values in zip(*parts, strict=True)]
        out.store_floats(totals, machine.rank, turn, machine.thread, 0)
        machine.cluster_arrive()  # before others send to this place again
        machine.cluster_wait()

    machine.loop(turns, one)


def run_sums(simulate: bool, count: int = 4, **how: Any) -> None:
    x = np.random.default_rng(count).integers(0, 99, (BLOCKS, 5, WARPGROUP, count)).astype(np.float32)

    def body(machine: TensorCores, x: Any, out: Any) -> None:
        sums_of_all(machine, x, out, count=count, **how)

    room = 2 * BLOCKS * WARPGROUP * count * 4 + 16
    found = run(body, x, spec(x.shape, jnp.float32), simulate=simulate, cluster=BLOCKS, shared_bytes=room)
    swapped = x.reshape(BLOCKS, 5, WARPGROUP // 2, 2, count)[:, :, :, ::-1].reshape(x.shape)
    np.testing.assert_array_equal(found, np.broadcast_to(swapped.sum(0), x.shape))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("count", "warps"), [(1, 1), (2, 4), (4, 1)])
def test_what_blocks_send_is_there_after_the_wait(count, warps, early, simulate):
    run_sums(simulate, count, early=early, warps=warps)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(waits=False), "a lane reads what a running copy writes|nobody waits for what was sent"),
        (dict(bytes_more=4), "a wait for a phase that can never end"),
        (dict(bytes_more=-4 * WARPGROUP), "a wait for a phase that can never end"),
    ],
)
def test_mistakes_with_what_is_sent_are_found(how, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run_sums(True, **how)


def test_products_do_not_see_what_was_sent_without_a_fence():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        tile, sent = Tile.take(machine, 64, 128), Barrier.take(machine, 1, scope="cluster")
        row, zero = machine.thread % 64, machine.constant(0, "i32")
        for unit in range(8):
            machine.store_shared(tile.unit(row, unit), [zero] * 4, 16, machine.thread < 64)
        machine.fence_shared()
        init_barriers(sent)
        with machine.when(machine.thread < WARP):
            sent.expect(4)
        machine.cluster_arrive()
        machine.cluster_wait()
        to = Shared(machine, tile.unit(zero, 0), (1,), "f32")
        first = (machine.rank == 0) & (machine.thread == 0)
        for rank in range(2):
            sent.send_floats([machine.constant(1.0, "f32")], to, 0, rank=rank, where=first)
        sent.wait(0)
        machine.wgmma_wait(machine.wgmma(None, tile.k_major(), tile.k_major(), columns=64))

    with pytest.raises(jax.errors.JaxRuntimeError, match="was not fenced since it was written"):
        run(body, {}, spec((4,), jnp.float32), simulate=True, cluster=2, shared_bytes=16384)


@pytest.mark.parametrize(
    ("scope", "dtype", "count", "message"),
    [
        ("block", "f32", 1, "f32 and a barrier of the cluster are meant"),
        ("cluster", "i32", 1, "f32 and a barrier of the cluster are meant"),
        ("cluster", "f32", 3, "3 words at once: 1, 2 or 4 are sent together"),
    ],
)
def test_only_one_two_or_four_floats_are_sent_and_only_in_a_cluster(scope, dtype, count, message):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        sent, to = Barrier.take(machine, 1, scope=scope), Shared.take(machine, (WARPGROUP, 4), dtype)
        init_barriers(sent)
        sent.send_floats([machine.constant(1.0, "f32")] * count, to, machine.thread, 0, rank=0)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(body, {}, spec((4,), jnp.float32), simulate=True, cluster=2, shared_bytes=4096)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_a_relaxed_barrier_lets_lanes_overwrite_what_others_read(simulate):
    """Each block reads its numbers; after the barrier the other one replaces them."""

    def body(machine: TensorCores, x: Any, out: Any) -> None:
        numbers, lane = Shared.take(machine, (WARPGROUP,), "i32"), machine.thread
        numbers.store_int(lane, lane)
        machine.barrier("block")
        mine = numbers.load_int(lane ^ 1)
        machine.cluster_arrive()
        machine.cluster_wait()
        for rank in range(2):
            numbers.store_int(lane * 2 + rank, lane, where=machine.rank == 1 - rank, rank=rank)
        machine.barrier("cluster")
        out.store_int(mine + numbers.load_int(lane), machine.rank, lane)

    found = run(body, {}, spec((2, WARPGROUP), jnp.int32), simulate=simulate, cluster=2, shared_bytes=1024)
    lane = np.arange(WARPGROUP)
    np.testing.assert_array_equal(found, [(lane ^ 1) + lane * 2 + rank for rank in range(2)])


def reads_what_was_stored(machine: TensorCores, numbers: Shared) -> None:
    numbers.store_int(machine.thread, machine.thread)
    machine.cluster_arrive()
    machine.cluster_wait()
    numbers.load_int(machine.thread ^ 1)


def does_not_arrive(machine: TensorCores, numbers: Shared) -> None:
    machine.cluster_wait()


def arrives_twice(machine: TensorCores, numbers: Shared) -> None:
    machine.cluster_arrive()
    machine.cluster_arrive()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (reads_what_was_stored, "a lane reads what another one writes"),
        (does_not_arrive, "waits for its cluster and has not arrived"),
        (arrives_twice, "arrives again before it has waited"),
    ],
)
def test_mistakes_with_a_relaxed_barrier_are_found(mistake, message):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        mistake(machine, Shared.take(machine, (WARPGROUP,), "i32"))

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(body, {}, spec((4,), jnp.float32), simulate=True, cluster=2, shared_bytes=1024)


def test_a_barrier_of_another_block_is_initialised_before_it_is_used():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        barrier = Barrier.take(machine, 8, scope="cluster")
        init_barriers(barrier)  # and the cluster does not meet
        barrier.arrive_in_cluster(2)

    with pytest.raises(jax.errors.JaxRuntimeError, match="a barrier of another block that may not be initialised"):
        run(body, {}, spec((4,), jnp.float32), simulate=True, cluster=2, shared_bytes=64)
