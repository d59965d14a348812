"""Results that depend on undefined numbers are errors in the simulator. On a GPU each would be a wrong result."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Tile
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.language.values import Value, negate, select
from tests.support.lane_kernels import LANE, Body, elementwise, machines, simulated


@pytest.mark.parametrize("divisor", [3, 4])
@pytest.mark.parametrize("sign", ["//", "%"])
def test_what_is_divided_is_not_negative(divisor, sign):
    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        x = machine.thread - 100
        out.store_int(x // divisor if sign == "//" else x % divisor, machine.thread)

    message = rf"what is stored comes of a number below 0 on the left of {sign} \(.*test_undefined\.py:\d+\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(body)


@pytest.mark.parametrize("bits", [-1, 32])
def test_a_shift_goes_as_far_as_a_number_has_bits(bits):
    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        amount = select(machine.thread == 77, machine.constant(bits, "i32"), 31)
        out.store_int(machine.thread << amount, machine.thread, where=machine.thread != 77)
        out.store_int(machine.thread >> amount, machine.thread)

    message = r"what is stored comes of a shift by less than 0 or more than 31 bits \(.*test_undefined\.py:\d+\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(body)


@machines
def test_a_quotient_that_nobody_looks_at_may_be_of_a_negative_number(simulate):
    def function(machine: Machine, x: Value) -> list[Value]:
        quotient = x // 3
        some = select(x >= 0, quotient, -1)
        with machine.when(x >= 0):
            inside = x // 5
            assert inside.kind == "i32"
        few = (x >= 0) & (quotient < 4)
        return [some, select(few, machine.constant(1, "i32"), 0)]

    x = LANE - 50
    some, few = elementwise(function, x, simulate=simulate, outputs=2, dtype=np.int32)
    np.testing.assert_array_equal(some, np.where(x >= 0, x // 3, -1))
    np.testing.assert_array_equal(few, (x >= 0) & (x // 3 < 4))


# ---- shared memory that nobody has written --------------------------------------------------------------------------


def unwritten(machine: Machine, other: int = 0) -> Value:
    """Return an i32 that was never written, and a number in ``other`` lanes that have one."""
    words = Shared.take(machine, (WARPGROUP,), "i32")
    words.store_int(machine.thread, machine.thread, where=machine.thread < other)
    machine.barrier("block")
    return words.load_int(machine.thread)


def stored(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(unwritten(machine, 100), machine.thread)


def stored_after_arithmetic(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    x = machine.from_bits(unwritten(machine, 127))
    codes = machine.to_e4m3([machine.exp(x * 2.0).maximum(1.0)] * 4)
    out.store_int(machine.population_count(codes + 1), machine.thread)


def stored_by_a_neighbour(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.shuffle_xor(unwritten(machine, 127), 1), machine.thread, where=machine.thread == 126)


def stored_by_a_lane_with_a_number(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.shuffle(unwritten(machine, 127), machine.thread % 32), machine.thread)


def stored_after_a_reduction(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.reduce_warp("max", unwritten(machine, 127)), machine.thread, where=machine.thread == 96)


def stored_by_way_of_shared_memory(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    bytes_of = Shared.take(machine, (WARPGROUP,), "u8")
    bytes_of.store_int(unwritten(machine, 127), machine.thread)
    machine.barrier("block")
    out.store_int(bytes_of.load_int(machine.thread), machine.thread)


def half_of_a_word(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    halves = Shared.take(machine, (WARPGROUP, 2), "u16")
    halves.store_int(machine.thread, machine.thread, 0)
    out.store_int(halves.load_words(machine.thread, 0, count=2)[0], machine.thread)


def carried(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.loop(2, lambda i, x: x + i, unwritten(machine)), machine.thread)


def chosen(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(select(machine.thread >= 126, unwritten(machine, 127), 0), machine.thread)


def condition_of_a_choice(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(select(unwritten(machine, 127) > 3, machine.thread, 0), machine.thread)


STORED = [
    stored,
    stored_after_arithmetic,
    stored_by_a_neighbour,
    stored_by_a_lane_with_a_number,
    stored_after_a_reduction,
    stored_by_way_of_shared_memory,
    half_of_a_word,
    carried,
    chosen,
    condition_of_a_choice,
]


def address(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    inputs.load_int(unwritten(machine, 127))


def shared_address(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.load_shared(unwritten(machine, 127) * 4, 4)


def where(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    out.store_int(machine.thread, machine.thread, where=unwritten(machine, 127) == 5)


def where_of_a_load(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    inputs.load_int(machine.thread, where=(machine.thread > 5) & (unwritten(machine, 127) == 5))


def branch(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    with machine.when(unwritten(machine, 127) == 5):
        pass


def count_of_a_loop(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.loop(unwritten(machine, 127), lambda i, carry: None)


def end_of_a_loop(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    machine.repeat(lambda x: (x > 1000, x), unwritten(machine, 127))


def added(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    total = Shared.take(machine, (1,), "i32")
    total.store_int(machine.thread, 0, where=machine.thread == 0)
    machine.barrier("block")
    total.add_int(unwritten(machine, 127), 0)


def added_to(machine: Machine, inputs: Buffer, out: Buffer) -> None:
    Shared.take(machine, (1,), "i32").add_int(machine.thread, 0)


def tile_of_a_product(machine: Any, inputs: Buffer, out: Buffer) -> None:
    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 8, 128)
    machine.wgmma_wait(machine.wgmma(None, left.k_major(), right.k_major(), columns=8))


def registers_of_a_product(machine: Any, inputs: Buffer, out: Buffer) -> None:
    right = Tile.take(machine, 8, 128)
    machine.wgmma(None, [unwritten(machine, 127)] * 16, right.k_major(), columns=8)


def tile_of_a_product_in_tensor_memory(machine: TensorMemory, inputs: Buffer, out: Buffer) -> None:
    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 8, 128)
    with machine.tensor_memory(32), machine.when(machine.thread < 32), machine.one_lane():
        machine.mma(Accumulator(column=0, columns=8), left.k_major(), right.k_major(), accumulate=False)


def into_tensor_memory(machine: TensorMemory, inputs: Buffer, out: Buffer) -> None:
    x = machine.from_bits(unwritten(machine, 127))
    with machine.tensor_memory(32):
        machine.store_tensor(Accumulator(column=0, columns=8), [x] * 4)


def parity_of_a_barrier(machine: TensorMemory, inputs: Buffer, out: Buffer) -> None:
    barrier = Barrier.take(machine, warps=4)
    init_barriers(barrier)
    barrier.wait(unwritten(machine))


def arrival_at_a_barrier(machine: TensorMemory, inputs: Buffer, out: Buffer) -> None:
    barrier = Barrier.take(machine, warps=4)
    init_barriers(barrier)
    barrier.arrive(where=unwritten(machine) == 3)


NOBODY = r"shared memory that nobody has written"
PLACE = rf"{NOBODY} \(.*test_undefined\.py:\d+\)"
USED: list[tuple[Body, str]] = [
    (address, f"an address comes of {PLACE}"),
    (shared_address, f"an address comes of {PLACE}"),
    (where, f"a condition comes of {PLACE}"),
    (where_of_a_load, f"a condition comes of {PLACE}"),
    (branch, f"a condition comes of {PLACE}"),
    (count_of_a_loop, f"the count of a loop comes of {PLACE}"),
    (end_of_a_loop, f"the end of a loop comes of {PLACE}"),
    (added, f"what is added comes of {PLACE}"),
    (added_to, "a lane adds to what nobody has written"),
    (tile_of_a_product, f"a product reads {NOBODY}"),
    (tile_of_a_product_in_tensor_memory, f"a product reads {NOBODY}"),
    (registers_of_a_product, f"what enters a product comes of {PLACE}"),
    (into_tensor_memory, f"what is stored in tensor memory comes of {PLACE}"),
    (parity_of_a_barrier, f"the parity of a barrier comes of {PLACE}"),
    (arrival_at_a_barrier, f"a condition comes of {PLACE}"),
]


@pytest.mark.parametrize("body", STORED, ids=lambda body: body.__name__)
def test_what_is_stored_comes_of_shared_memory_that_was_written(body):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"what is stored comes of {PLACE}"):
        simulated(body)


@pytest.mark.parametrize(("body", "message"), USED, ids=[body.__name__ for body, _ in USED])
def test_nothing_depends_on_shared_memory_that_nobody_has_written(body, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        simulated(body)


def test_what_nobody_looks_at_may_be_unwritten():
    """This is the case in lanes that do not store, on a side that is not chosen, and next to a condition that decides
    alone.
    """

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane, few = machine.thread, machine.thread < 100
        x = unwritten(machine, 100)
        small = x < 50  # in some lanes nobody knows
        out.store_int(x + 1, lane, where=few)
        with machine.when(few):
            out.store_int(select(small, x, 50), lane)
        with machine.when(few & small):
            out.store_int(x + 2, lane)
        y = select(few, x, machine.loop(select(few, x, 3), lambda i, total: total + i, lane))
        out.store_int(select(negate(few) | small, y, 7), lane)
        out.store_int(machine.shuffle_xor(x, 16), lane, where=(lane >= 64) & (lane < 96))
        out.store_int(select(lane < 64, machine.shuffle_up(x, 1), 0), lane, where=lane < 64)

    simulated(body)
