"""Arrays and barriers in shared memory, and what loops carry, on both machines, compared with NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.simulator.lanes import Simulator
from pallas_kernels.language.simulator.tensor_memory import TensorMemorySimulator
from pallas_kernels.language.tensor_cores import Role, TensorCores
from pallas_kernels.language.values import Value
from tests.support.lane_kernels import elementwise, machines, random_floats, run, spec
from tests.support.machines import HOPPER_MACHINES

# ---- arrays ---------------------------------------------------------------------------------------------------------


@machines
@pytest.mark.parametrize("count", [1, 2, 4])
def test_floats_come_back_from_where_they_were_stored(count, simulate):
    """Each lane stores its own row, in one of two stages, and loads another lane's."""
    x = random_floats(count, 2 * WARPGROUP * 4).reshape(2, WARPGROUP, 4)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane, rows = machine.thread, Shared.take(machine, (2, WARPGROUP, 4), "f32")
        for first in range(0, 4, count):
            values = inputs.load_floats(0, lane, first, count=count)
            rows.store_floats(values, 0, lane, first)
            values = inputs.load_floats(1, lane, first, count=count)
            rows[machine.constant(1, "i32")].store_floats(values, lane, first, where=lane > 0)
            rows[1].store_floats(values, lane, first, where=lane == 0)
        machine.barrier("block")
        for stage in range(2):
            for first in range(0, 4, count):
                out.store_floats(rows.load_floats(stage, lane ^ 5, first, count=count), stage, lane, first)

    out = run(body, jnp.asarray(x), spec(x.shape, np.float32), simulate=simulate, shared_bytes=x.nbytes)
    np.testing.assert_array_equal(out, x[:, np.arange(WARPGROUP) ^ 5])


@machines
@pytest.mark.parametrize("dtype", ["i32", "u16", "u8"])
def test_whole_numbers_keep_the_bits_that_there_is_room_for(dtype, simulate):
    x = np.random.default_rng(1).integers(-(2**31), 2**31, WARPGROUP).astype(np.int32)

    def function(machine: Machine, x: Value) -> list[Value]:
        lane, numbers = machine.thread, Shared.take(machine, (WARPGROUP,), dtype)
        numbers.store_int(x, lane)
        machine.barrier("block")
        packed = numbers.load_words(lane // 4 * 4, count=4 // numbers.itemsize)[0]
        return [numbers.load_int(lane), packed]

    got, packed = elementwise(function, x, simulate=simulate, outputs=2, dtype=np.int32)
    stored = x.astype({"i32": np.int32, "u16": np.uint16, "u8": np.uint8}[dtype])
    np.testing.assert_array_equal(got, stored.astype(np.int32))
    first = np.arange(WARPGROUP) // 4 * 4
    per_word = 4 // stored.itemsize
    np.testing.assert_array_equal(packed, stored.view(np.int32)[first // per_word])


@machines
def test_words_of_any_dtype_lie_as_they_were_stored(simulate):
    x = np.random.default_rng(2).integers(-(2**31), 2**31, WARPGROUP).astype(np.int32)

    def function(machine: Machine, x: Value) -> list[Value]:
        halves = Shared.take(machine, (WARPGROUP, 2), "u16")
        halves.store_words([x], machine.thread, 0)
        machine.barrier("block")
        other = machine.thread ^ 1
        return [halves.load_int(other, 0), halves.load_int(other, 1), halves.load_words(other, 0, count=2)[0]]

    low, high, word = elementwise(function, x, simulate=simulate, outputs=3, dtype=np.int32)
    other = x[np.arange(WARPGROUP) ^ 1]
    np.testing.assert_array_equal(low, other & 0xFFFF)
    np.testing.assert_array_equal(high, other.view(np.uint32) >> 16)
    np.testing.assert_array_equal(word, other)


@machines
def test_additions_in_an_array(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, counters = machine.thread, Shared.take(machine, (4,), "i32")
        counters.store_int(lane * 100, lane, where=lane < 4)
        machine.barrier("block")
        counters.add_int(lane, lane % 4, where=lane >= 64)
        machine.barrier("block")
        out.store_int(counters.load_int(lane), lane, where=lane < 4)

    out = run(body, {}, spec((4,), np.int32), simulate=simulate, shared_bytes=16)
    lane = np.arange(64, 128)
    np.testing.assert_array_equal(out, [100 * i + lane[lane % 4 == i].sum() for i in range(4)])


@machines
def test_an_array_of_another_blocks_shared_memory(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        lane, rank = machine.thread, machine.rank
        numbers, total = Shared.take(machine, (2, WARPGROUP), "i32"), Shared.take(machine, (1,), "i32")
        total.store_int(rank, 0, where=lane == 0)
        machine.barrier("cluster")
        numbers.store_int(rank * 1000 + lane, rank, lane, rank=0)
        total.add_int(rank + 1, 0, where=lane == 0, rank=0)
        machine.barrier("cluster")
        with machine.when(rank == 0):
            out.store_int(numbers.load_int(1, lane) + total.load_int(0), lane)

    out = run(body, {}, spec((WARPGROUP,), np.int32), simulate=simulate, cluster=2, shared_bytes=2048)
    np.testing.assert_array_equal(out, 1003 + np.arange(WARPGROUP))


def simulator() -> TensorMemorySimulator:
    return TensorMemorySimulator((1,), WARPGROUP, 4096)


def number(machine: Simulator, x: Value) -> int:
    del machine
    return int(x.raw.reshape(-1)[0])


def test_where_elements_lie():
    machine = simulator()
    first, second = Shared.take(machine, (5,), "u8"), Shared.take(machine, (2, 3, 4), "u16")
    assert (first.offset, second.offset, machine.shared_bytes) == (0, 16, 64)
    assert (second.itemsize, second.size) == (2, 48)
    at = machine.constant(2, "i32")
    for i in range(2):
        for j in (2, at):
            for k in (3, machine.constant(3, "i32")):
                for place in (
                    second.address_of(i, j, k),
                    second[i].address_of(j, k),
                    second[i][j].address_of(k),
                    second[machine.constant(i, "i32")].address_of(j, k),
                    second[i][j][k].address_of(),
                ):
                    assert place.kind == "i32"
                    assert number(machine, place) == 16 + 2 * (i * 12 + 2 * 4 + 3)
    other = second.view((6, 8), "u8")
    assert number(machine, other.address_of(5, at)) == 16 + 42


def test_an_array_refuses_what_is_not_in_it():
    machine = simulator()
    numbers = Shared.take(machine, (2, 4), "i32")
    with pytest.raises(TypeError, match="shared memory holds f32, i32, u16, u8, got 'f16'"):
        Shared.take(machine, (4,), cast(Any, "f16"))
    with pytest.raises(TypeError, match="takes 2 indices, got 1"):
        numbers.load_int(machine.thread)
    with pytest.raises(IndexError, match="index 4 along an axis of 4"):
        numbers.load_int(machine.thread % 2, 4)
    with pytest.raises(IndexError, match="index -1 along an axis of 2"):
        numbers[-1]
    with pytest.raises(TypeError, match="an array of f32 is meant, this one is of i32"):
        numbers.load_floats(0, 0, count=1)
    with pytest.raises(TypeError, match="an array of i32 or u16 or u8 is meant, this one is of f32"):
        numbers.view((8,), "f32").load_int(0)
    with pytest.raises(ValueError, match=r"i32 \(9,\) takes 36 bytes, i32 \(2, 4\) has 32"):
        numbers.view((9,), "i32")


# ---- barriers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_roles_hand_rows_to_each_other(simulate, rounds):
    """One role fills two stages in turn, and another adds up what it finds there."""
    stages = 2

    def body(machine: TensorCores, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread % WARPGROUP
        ring = Shared.take(machine, (stages, WARPGROUP), "i32")
        full, free = (Barrier.take(machine, warps=4, copies=stages) for _ in range(2))
        done = Barrier.take(machine, warps=8)
        init_barriers(full, free, done)

        def load() -> None:
            def one(i: Value, _: None) -> None:
                stage = i % stages
                free.copy(stage).wait(i // stages & 1 ^ 1)
                ring[stage].store_int(inputs.load_int(i, lane), lane)
                full.copy(stage).arrive()

            machine.loop(rounds, one)
            done.arrive()

        def add() -> None:
            def one(i: Value, total: Value) -> Value:
                stage = i % stages
                full.copy(stage).wait(i // stages & 1)
                total = total + ring[stage].load_int(lane ^ 77)
                free.copy(stage).arrive()
                return total

            total = machine.loop(rounds, one, machine.constant(0, "i32"))
            done.arrive()
            done.wait(0)
            out.store_int(total, lane)

        machine.roles(Role(warpgroups=1, registers=168, body=load), Role(warpgroups=1, registers=168, body=add))

    x = np.random.default_rng(rounds).integers(-1000, 1000, (rounds, WARPGROUP)).astype(np.int32)
    result = spec((WARPGROUP,), np.int32)
    out = run(body, jnp.asarray(x), result, simulate=simulate, warpgroups=2, shared_bytes=2048)
    np.testing.assert_array_equal(out, x.sum(0)[np.arange(WARPGROUP) ^ 77])


def test_where_barriers_lie():
    machine = simulator()
    one, several = Barrier.take(machine, warps=4), Barrier.take(machine, warps=2, copies=3)
    assert (one.offset, several.offset, machine.shared_bytes) == (0, 8, 32)
    assert number(machine, one.address) == 0
    assert number(machine, several.copy(2).address) == 24
    assert number(machine, several.copy(machine.constant(1, "i32")).address) == 16
    assert Shared.take(machine, (4,), "i32").offset == 32


def test_one_of_several_barriers_must_be_named():
    machine = simulator()
    barrier = Barrier.take(machine, warps=4, copies=2)
    with pytest.raises(TypeError, match=r"one of 2 barriers is meant: write barrier\.copy\(number\)"):
        barrier.arrive()
    with pytest.raises(IndexError, match="copy 2 of 2 barriers"):
        barrier.copy(2)
    with pytest.raises(TypeError, match="all copies at once"):
        init_barriers(barrier.copy(machine.constant(0, "i32")))


# ---- carries --------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a test's loops carry."""

    count: Value
    peak: Value


@machines
def test_loops_carry_pytrees(simulate):
    """Tuples, dicts, dataclasses and None are carried by ``loop`` and ``repeat``, and held."""
    x = random_floats(3, 200)

    def function(machine: Machine, x: Value) -> list[Value]:
        def body(i: Value, carry: Any) -> Any:
            running, (extra, nothing) = carry
            assert nothing is None
            running, extra = machine.hold((running, extra))
            peak = running.peak.maximum(x * 0.5)
            return Running(count=running.count + i, peak=peak), ({"total": extra["total"] + 1.0}, None)

        start = Running(count=machine.constant(5, "i32"), peak=machine.constant(-1e30, "f32"))
        carry = machine.loop(3, body, (start, ({"total": machine.constant(0.0, "f32")}, None)))
        running, (extra, nothing) = carry
        assert isinstance(running, Running)
        assert nothing is None

        def halve(running: Running) -> tuple[Value, Running]:
            count = running.count >> 1
            return count > 0, dataclasses.replace(running, count=count)

        last = machine.repeat(halve, running)
        return [machine.from_bits(running.count), running.peak, extra["total"], machine.from_bits(last.count)]

    count, peak, total, last = elementwise(function, x, simulate=simulate, outputs=4)
    np.testing.assert_array_equal(count.view(np.int32), np.full(len(x), 8))
    np.testing.assert_array_equal(peak, np.maximum(x * np.float32(0.5), np.float32(-1e30)))
    np.testing.assert_array_equal(total, np.full(len(x), 3))
    np.testing.assert_array_equal(last.view(np.int32), np.zeros(len(x)))


@machines
def test_a_loop_may_carry_one_value_or_none(simulate):
    def body(machine: Machine, inputs: Any, out: Buffer) -> None:
        def write(i: Value, carry: None) -> None:
            assert carry is None
            out.store_int(i, i, machine.thread)

        assert machine.loop(3, write) is None
        total = machine.loop(4, lambda i, total: total + i, machine.constant(10, "i32"))
        out.store_int(total, 3, machine.thread)

    out = run(body, {}, spec((4, WARPGROUP), np.int32), simulate=simulate)
    np.testing.assert_array_equal(out, np.broadcast_to(np.array([[0], [1], [2], [16]]), out.shape))
