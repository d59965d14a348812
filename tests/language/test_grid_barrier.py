"""The barrier at which all blocks of a launch meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Role, TensorCores
from tests.support.lane_kernels import run, spec
from tests.support.machines import MACHINES

ROWS, COLUMNS, CLUSTER, TURNS = 3, 2, 2, 5
BLOCKS = ROWS * COLUMNS * CLUSTER


def number_of(machine: TensorCores) -> Any:
    return (machine.block(0) * COLUMNS + machine.block(1)) * CLUSTER + machine.rank


def in_halves(machine: TensorCores) -> None:
    machine.grid_arrive()
    machine.grid_wait()


@pytest.mark.parametrize("meet", [lambda machine: machine.barrier("grid"), in_halves])
@pytest.mark.parametrize("simulate", MACHINES)
def test_all_blocks_see_what_all_others_stored(meet, simulate):
    """Each block adds what its successor had, in each turn; each launch meets an odd number of times."""

    def body(machine: TensorCores, x: Any, state: Any) -> None:
        first, second = state
        block, lane = number_of(machine), machine.thread
        (value,) = x.load_floats(block, lane, count=1)
        first.store_floats([value], block, lane)
        for turn in range(TURNS):
            read, written = (first, second) if turn % 2 == 0 else (second, first)
            meet(machine)
            (other,) = read.load_floats((block + 1) % BLOCKS, lane ^ 1, count=1)
            value = value + other
            written.store_floats([value], block, lane)

    x = np.random.default_rng(0).integers(0, 99, (BLOCKS, WARPGROUP)).astype(np.float32)
    shapes = (spec(x.shape, jnp.float32),) * 2
    want = [x]
    for _ in range(TURNS):
        want.append(want[-1] + np.roll(want[-1], -1, axis=0)[:, np.arange(WARPGROUP) ^ 1])
    for _ in range(3):  # launches: the counter goes on from where the last one left it
        found = run(body, x, shapes, simulate=simulate, grid=(ROWS, COLUMNS), cluster=CLUSTER)
        np.testing.assert_array_equal(found[TURNS % 2], want[TURNS])
        np.testing.assert_array_equal(found[1 - TURNS % 2], want[TURNS - 1])


def test_without_it_the_simulator_finds_the_race():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        machine.barrier("grid")
        block, lane = number_of(machine), machine.thread
        out.store_int(lane, block, lane)
        machine.barrier("cluster")
        out.load_int((block + CLUSTER) % BLOCKS, lane)

    with pytest.raises(jax.errors.JaxRuntimeError, match="a lane reads what another one writes"):
        run(body, {}, spec((BLOCKS, WARPGROUP), jnp.int32), simulate=True, grid=(ROWS, COLUMNS), cluster=CLUSTER)


def test_it_orders_shared_memory_too():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        numbers, lane = Shared.take(machine, (WARPGROUP,), "i32"), machine.thread
        numbers.store_int(lane, lane)
        machine.barrier("grid")
        out.store_int(numbers.load_int(lane ^ 64), number_of(machine), lane)

    found = run(
        body,
        {},
        spec((BLOCKS, WARPGROUP), jnp.int32),
        simulate=True,
        grid=(ROWS, COLUMNS),
        cluster=CLUSTER,
        shared_bytes=512,
    )
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(WARPGROUP) ^ 64, found.shape))


def some_blocks(machine: TensorCores) -> None:
    with machine.when(machine.block(0) > 0):
        machine.barrier("grid")


def in_a_role(machine: TensorCores) -> None:
    machine.roles(Role(warpgroups=1, registers=128, body=lambda: machine.barrier("grid")))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (some_blocks, "a grid barrier that only some of its lanes reach"),
        (in_a_role, "a barrier of the grid in a role"),
    ],
)
def test_mistakes_are_found(mistake, message):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        mistake(machine)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(body, {}, spec((4,), jnp.float32), simulate=True, grid=(2,))
