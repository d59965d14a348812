"""Floats that blocks send each other by mail, and a barrier of the grid at which they arrive before they wait."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.lanes import Mailbox
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores
from tests.language.test_grid_barrier import BLOCKS, CLUSTER, COLUMNS, ROWS, number_of
from tests.support.lane_kernels import run, spec
from tests.support.machines import MACHINES


@pytest.mark.parametrize("simulate", MACHINES)
def test_mail_arrives(simulate):
    """Each block receives what its successor and its predecessor sent, alone and in pairs, and adds it up."""

    def body(machine: TensorCores, x: Any, out: Any) -> None:
        mail = Mailbox.open(machine, (BLOCKS, 2, 2 * WARPGROUP))
        block, lane = number_of(machine), machine.thread
        pair = x.load_floats(block, 2 * lane, count=2)
        mail.send_floats(pair, block, 0, 2 * lane)
        mail.send_floats(pair[:1], block, 1, lane, where=lane % 3 == 0)
        machine.barrier("block")
        mail.close()
        after, before = (block + 1) % BLOCKS, (block + (BLOCKS - 1)) % BLOCKS
        other = lane ^ 33
        received = mail.receive_floats([(after, 0, 2 * other), (before, 0, 2 * lane)], count=2)
        (single,) = mail.receive_floats([(after, 1, lane)], count=1, where=[lane % 3 == 0])
        totals = [a + b for a, b in zip(*received, strict=True)]
        out.store_floats([totals[0] + single[0], totals[1]], block, 2 * lane)

    for seed in range(4):  # launches, of which each has its own number
        x = np.random.default_rng(seed).integers(0, 999, (BLOCKS, WARPGROUP, 2)).astype(np.float32)
        lane = np.arange(WARPGROUP)
        after, before = np.roll(x, -1, axis=0), np.roll(x, 1, axis=0)
        want = after[:, lane ^ 33] + before
        want[:, :, 0] += np.where(lane % 3 == 0, after[:, :, 0], 0)
        flat = x.reshape(BLOCKS, -1)
        found = run(body, flat, spec(flat.shape, jnp.float32), simulate=simulate, grid=(ROWS, COLUMNS), cluster=CLUSTER)
        np.testing.assert_array_equal(found, want.reshape(flat.shape))


@pytest.mark.parametrize("simulate", MACHINES)
def test_a_warpgroup_waits_for_the_grid_while_another_receives(simulate):
    """One warpgroup of each block reads what another block stored, and the other one what it sent."""

    def body(machine: TensorCores, x: Any, state: Any) -> None:
        stored, out = state
        mail = Mailbox.open(machine, (BLOCKS, 2 * WARPGROUP))
        block, lane = number_of(machine), machine.thread
        (value,) = x.load_floats(block, lane, count=1)
        stored.store_floats([value], block, lane)
        mail.send_floats([value * 2.0], block, lane)
        machine.grid_arrive()
        mail.close()
        next_block, other = (block + 1) % BLOCKS, lane ^ WARPGROUP ^ 5
        with machine.when(lane < WARPGROUP):
            ((received,),) = mail.receive_floats([(next_block, other)], count=1)
            out.store_floats([received], block, lane)
        with machine.when(lane >= WARPGROUP):
            machine.grid_wait()
            out.store_floats(stored.load_floats(next_block, other, count=1), block, lane)

    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((BLOCKS, 2 * WARPGROUP)).astype(np.float32)
        shapes = (spec(x.shape, jnp.float32),) * 2
        found = run(body, x, shapes, simulate=simulate, grid=(ROWS, COLUMNS), cluster=CLUSTER, warpgroups=2)
        want = np.roll(x, -1, axis=0)[:, np.arange(2 * WARPGROUP) ^ WARPGROUP ^ 5]
        want[:, :WARPGROUP] *= 2
        np.testing.assert_array_equal(found[1], want)


def opened(machine: TensorCores) -> Mailbox:
    mail = Mailbox.open(machine, (2, WARPGROUP))
    machine.barrier("block")
    mail.close()
    return mail


def never_sent(machine: TensorCores, out: Any) -> None:
    mail = opened(machine)
    mail.send_floats([machine.constant(1.0, "f32")], machine.block(0), machine.thread, where=machine.thread > 0)
    mail.receive_floats([(machine.block(0) ^ 1, machine.thread)], count=1)


def sent_twice(machine: TensorCores, out: Any) -> None:
    opened(machine).send_floats([machine.constant(1.0, "f32")], 0, machine.thread)


def never_closed(machine: TensorCores, out: Any) -> None:
    Mailbox.open(machine, (2, WARPGROUP))


def closed_twice(machine: TensorCores, out: Any) -> None:
    mail = opened(machine)
    machine.barrier("block")
    mail.close()


def closed_too_early(machine: TensorCores, out: Any) -> None:
    Mailbox.open(machine, (2, WARPGROUP)).close()


def in_part_of_a_warp(machine: TensorCores, out: Any) -> None:
    mail = opened(machine)
    mail.send_floats([machine.constant(1.0, "f32")], machine.block(0), machine.thread)
    with machine.when(machine.thread < WARP // 2):
        mail.receive_floats([(0, machine.thread)], count=1)


def outside(machine: TensorCores, out: Any) -> None:
    opened(machine).send_floats([machine.constant(1.0, "f32")], machine.block(0) + 1, machine.thread)


def not_waited(machine: TensorCores, out: Any) -> None:
    out.store_int(machine.thread, machine.block(0), machine.thread)
    machine.grid_arrive()
    out.load_int(machine.block(0) ^ 1, machine.thread)


def stored_after_it_arrived(machine: TensorCores, out: Any) -> None:
    machine.grid_arrive()
    out.store_int(machine.thread, machine.block(0), machine.thread)
    machine.grid_wait()
    out.load_int(machine.block(0) ^ 1, machine.thread)


def waits_without_arriving(machine: TensorCores, out: Any) -> None:
    machine.grid_wait()


def arrives_twice(machine: TensorCores, out: Any) -> None:
    machine.grid_arrive()
    machine.grid_arrive()


def arrives_in_part(machine: TensorCores, out: Any) -> None:
    with machine.when(machine.block(0) == 0):
        machine.grid_arrive()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (never_sent, "a word that nobody has sent"),
        (sent_twice, "a word that is sent twice"),
        (never_closed, "a block that did not close its mailbox"),
        (closed_twice, "a block that closes its mailbox twice"),
        (closed_too_early, "launches: a lane writes what another one read"),
        (in_part_of_a_warp, "mail that only some lanes of a warp receive"),
        (outside, "access of 8 bytes"),
        (not_waited, "a lane reads what another one writes"),
        (stored_after_it_arrived, "a lane reads what another one writes"),
        (waits_without_arriving, "waits for the grid and has not arrived"),
        (arrives_twice, "arrives again before it has waited for the grid"),
        (arrives_in_part, "a grid barrier that only some of its lanes reach"),
    ],
)
def test_mistakes_are_found(mistake, message):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        mistake(machine, out)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(body, {}, spec((2, WARPGROUP), jnp.int32), simulate=True, grid=(2,))


@pytest.mark.parametrize(
    ("shape", "index", "message"),
    [
        ((2, 3), (0, 0), "3 floats along the last axis"),
        ((2, 4), (0,), "takes 2 indices, got 1"),
    ],
)
def test_shapes_are_checked(shape, index, message):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        Mailbox.open(machine, shape).send_floats([machine.constant(1.0, "f32")], *index)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(body, {}, spec((4,), jnp.int32), simulate=True, grid=(2,))
