"""A branch that has a result, on both machines."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import Value
from tests.support.lane_kernels import LANE, machines, run, spec


@machines
def test_lanes_outside_of_a_branch_keep_their_carry(simulate):
    """Also where a loop is inside, and where no lane or every lane takes it."""

    def body(machine: Machine, x: Buffer, out: Buffer) -> None:
        lane, block = machine.thread, machine.block(0)
        (found,) = x.load_floats(lane, count=1)

        def then(carry: tuple[Value, Value]) -> tuple[Value, Value]:
            value, number = carry
            out.store_int(lane, block, 1, lane)
            return value * 2.0, machine.loop(3, lambda i, n: n + i + block, number)

        value, number = machine.branch(lane < block * 64, then, (found, lane))  # no lane, half of them, all
        out.store_int(number + machine.bits(value) // (1 << 23), block, 0, lane)

    x = np.exp2(LANE % 8).astype(np.float32)
    found = run(body, jnp.asarray(x), np.full((3, 2, WARPGROUP), -1, np.int32), grid=(3,), simulate=simulate)
    block = np.arange(3)[:, None]
    taken = block * 64 > LANE
    exponents = 127 + LANE % 8
    want = np.where(taken, LANE + 3 + 3 * block + exponents + 1, LANE + exponents)
    np.testing.assert_array_equal(found[:, 0], want)
    np.testing.assert_array_equal(found[:, 1], np.where(taken, LANE, -1))


@machines
@pytest.mark.parametrize("known", [True, False])
def test_a_condition_that_is_known_when_the_kernel_is_built_costs_nothing(simulate, known):
    def body(machine: Machine, _: Any, out: Buffer) -> None:
        out.store_int(machine.branch(known, lambda n: n + 1000, machine.thread), machine.thread)

    found = run(body, (), spec((WARPGROUP,), jnp.int32), simulate=simulate)
    np.testing.assert_array_equal(found, LANE + 1000 * known)


@machines
def test_a_warp_takes_a_branch_together(simulate):
    """Lanes 5 and 70 ask, and warps 0 and 2 shuffle inside."""

    def body(machine: Machine, _: Any, out: Buffer) -> None:
        lane = machine.thread
        asks = (lane == 5) | (lane == 70)
        out.store_int(machine.branch_warp(asks, lambda n: machine.shuffle_xor(n, 1) + 1000, lane), lane)

    found = run(body, (), spec((WARPGROUP,), jnp.int32), simulate=simulate)
    np.testing.assert_array_equal(found, np.where(LANE // 32 % 2 == 0, (LANE ^ 1) + 1000, LANE))
