"""Products whose sums are in tensor memory, on both machines."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.simulator.lanes import SimulationError
from pallas_kernels.language.tensor_cores import Operand, Role, Tile
from pallas_kernels.language.tensor_memory import Accumulator, TensorMemory
from pallas_kernels.language.values import Index, Value
from tests.language.test_tensor_cores import SPEC, fill, store_product, tile_bytes
from tests.support import lane_kernels
from tests.support.machines import BLACKWELL_MACHINES

F32 = np.float32


def multiply(machine: Any, into: Accumulator, a: Operand, b: Operand, **options: Any) -> None:
    """Run one product, started by the first warp after all lanes have written its operands, and wait for it."""
    barrier = Barrier.take(machine, warps=1)
    init_barriers(barrier)
    with machine.when(machine.thread < WARP), machine.one_lane():
        machine.mma(into, a, b, **({"accumulate": False} | options))
        machine.commit(barrier)
    barrier.wait(0)
    machine.fence_tensor("after")


def run(body: Any, inputs: Any, columns: int, **options: Any) -> np.ndarray:
    """Return a body's f32 [64, columns]."""
    shapes = [(x.shape[0], x.shape[1] * x.dtype.itemsize) for x in jax.tree.leaves(inputs)]
    state = SPEC((64, columns), jnp.float32)
    return lane_kernels.run(body, inputs, state, shared_bytes=tile_bytes(*shapes) + 256, **options)


def tiles(machine: TensorMemory, inputs: Any) -> list[Tile]:
    """Copy the inputs to shared memory."""
    tiles = [Tile.take(machine, x.shape[0], x.shape[1] * x.dtype.itemsize) for x in inputs]
    for tile, source in zip(tiles, inputs, strict=True):
        fill(machine, tile, source, WARPGROUP)
    machine.fence_shared()
    machine.barrier("block")
    return tiles


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return f16 whose sums of products are exact."""
    return rng.integers(-8, 9, shape).astype(np.float16)


@pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
@pytest.mark.parametrize("columns", [8, 64, 256])
@pytest.mark.parametrize("half", [0, 1])
def test_rows_by_rows(simulate, columns, half):
    rng = np.random.default_rng(0)
    a, b = (integers(rng, n, 192) for n in (64, columns))

    def body(machine: TensorMemory, inputs: Any, out: Any) -> None:
        left, right = tiles(machine, inputs)
        with machine.tensor_memory(512):
            into = Accumulator(column=512 - columns, columns=columns, half=half)
            multiply(machine, into, left.k_major(), right.k_major())
            store_product(machine, out, machine.load_tensor(into))

    found = run(body, (jnp.asarray(a), jnp.asarray(b)), columns, simulate=simulate)
    np.testing.assert_array_equal(found, a.astype(F32) @ b.astype(F32).T)


@pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_bytes(simulate, dtype):
    rng = np.random.default_rng(1)
    numpy_dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[dtype]
    a, b = (rng.integers(-4, 5, (64, 128)).astype(numpy_dtype) for _ in range(2))

    def body(machine: TensorMemory, inputs: Any, out: Any) -> None:
        left, right = tiles(machine, inputs)
        with machine.tensor_memory(64):
            into = Accumulator(column=0, columns=64)
            multiply(machine, into, left.k_major(), right.k_major(), dtype=dtype)
            store_product(machine, out, machine.load_tensor(into))

    found = run(body, tuple(jnp.asarray(x.view(np.uint8)) for x in (a, b)), 64, simulate=simulate)
    np.testing.assert_array_equal(found, a.astype(F32) @ b.astype(F32).T)


@pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
def test_columns_by_columns_into_both_halves(simulate):
    """a^T b is added to twice what lanes had stored there. The second half of the columns uses the other rows."""
    rng = np.random.default_rng(2)
    a, b, c = integers(rng, 64, 64), integers(rng, 64, 256), integers(rng, 64, 64)

    def body(machine: TensorMemory, inputs: Any, out: Any) -> None:
        left, right, first = tiles(machine, inputs)
        with machine.tensor_memory(128):
            halves = [Accumulator(column=0, columns=128, half=half) for half in range(2)]
            parts = [half.part(start, 64) for half in halves for start in (0, 64)]
            multiply(machine, parts[0], first.k_major(), first.k_major())
            twice = [value * 2.0 for value in machine.load_tensor(parts[0])]
            for part in parts:
                machine.store_tensor(part, twice)
            machine.fence_tensor("before")
            machine.barrier("block")
            machine.fence_tensor("after")
            for half, into in enumerate(halves):
                multiply(machine, into, left.transposed(0), right.transposed(256 * half), accumulate=True)
            for i, part in enumerate(parts):
                store_product(machine, out, machine.load_tensor(part), 64 * i)

    found = run(body, tuple(map(jnp.asarray, (a, b, c))), 256, simulate=simulate)
    a, b, c = (x.astype(F32) for x in (a, b, c))
    np.testing.assert_array_equal(found, a.T @ b + np.tile(2 * (c @ c.T), 4))


STEPS = ("shared", "full", "free", "before", "after", "scored", "started", "last")


def pipeline(machine: TensorMemory, inputs: Any, out: Any, *, without: str | None) -> None:
    """Compute the sum over i of f16(a b_i^T) c.

    One warp starts the products, and others pass results back as operands.
    """
    a, b, c = inputs
    left, right = (Tile.take(machine, 64, 128) for _ in range(2))
    ring, handed = Tile.take(machine, 64, 128, copies=2), Tile.take(machine, 64, 128)
    full, free = (Barrier.take(machine, warps=warps, copies=2) for warps in (4, 1))
    scored, ready, done = (Barrier.take(machine, warps=warps) for warps in (1, 4, 1))
    init_barriers(full, free)
    init_barriers(scored, ready, done)
    scores, sums = Accumulator(column=64, columns=64), Accumulator(column=0, columns=64, half=1)

    def wait(name: str, barrier: Barrier, parity: Index) -> None:
        if name != without:
            barrier.wait(parity)

    def fence(side: Any) -> None:
        if side != without:
            machine.fence_tensor(side)

    def load() -> None:
        for tile, source in ((left, a), (right, c)):
            fill(machine, tile, source, WARPGROUP)

        def one(i: Value, _: None) -> None:
            wait("free", free.copy(i % 2), i // 2 % 2 ^ 1)
            for step in range(4):
                n = machine.thread % WARPGROUP + step * WARPGROUP
                words = b.load_words(i, n // 8, n % 8 * 8, count=8)
                machine.store_shared(ring.copy(i % 2).unit(n // 8, n % 8), words, 16, where=True)
            if without != "shared":
                machine.fence_shared()
            full.copy(i % 2).arrive()

        machine.loop(b.shape[0], one)

    def ask() -> None:
        def one(i: Value, _: None) -> None:
            wait("full", full.copy(i % 2), i // 2 % 2)
            with machine.one_lane():
                machine.mma(scores, left.k_major(), ring.copy(i % 2).k_major(), accumulate=False)
                machine.commit(free.copy(i % 2))
                machine.commit(scored)
            wait("started", ready, i % 2)
            fence("after")
            with machine.one_lane():
                machine.mma(sums, handed.k_major(), right.transposed(0), accumulate=i > 0)

        machine.loop(b.shape[0], one)
        with machine.one_lane():
            machine.commit(done)

    def hand() -> None:
        def one(i: Value, _: None) -> None:
            wait("scored", scored, i % 2)
            fence("after")
            values = machine.load_tensor(scores)
            lane, warp = machine.thread % WARP, machine.thread % WARPGROUP // WARP
            for n in range(0, len(values), 2):
                row = warp * 16 + lane // 4 + n // 2 % 2 * 8
                at = handed.unit(row, n // 4) + lane % 4 * 4
                machine.store_shared(at, [machine.to_f16(*values[n : n + 2])], 4, True)
            machine.fence_shared()
            fence("before")
            ready.arrive()

        machine.loop(b.shape[0], one)
        wait("last", done, 0)
        machine.fence_tensor("after")
        store_product(machine, out, machine.load_tensor(sums))

    def multiply_or_hand() -> None:
        warp = machine.thread // WARP
        with machine.when(warp < 4):
            hand()
        with machine.when(warp == 4):
            ask()

    with machine.tensor_memory(128):
        machine.roles(
            Role(warpgroups=2, registers=168, body=multiply_or_hand), Role(warpgroups=1, registers=104, body=load)
        )


def run_pipeline(simulate: bool, rounds: int, without: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rounds)
    a, c = (rng.integers(-2, 3, (64, 64)).astype(np.float16) for _ in range(2))
    b = rng.integers(-2, 3, (rounds, 64, 64)).astype(np.float16)
    body = functools.partial(pipeline, without=without)
    state, room = SPEC((64, 64), jnp.float32), 5 * 8192 + 256
    found = lane_kernels.run(body, (a, b, c), state, warpgroups=3, shared_bytes=room, simulate=simulate)
    a, b, c = (x.astype(F32) for x in (a, b, c))
    return found, a @ b.sum(0).T @ c  # integers below 2^11 on the way: exact in f16


@pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_products_and_roles_hand_results_to_each_other(simulate, rounds):
    found, expected = run_pipeline(simulate, rounds)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("missing", STEPS)
def test_the_simulator_notices_what_is_missing(missing):
    with pytest.raises((SimulationError, jax.errors.JaxRuntimeError)):
        run_pipeline(True, 5, without=missing)


MISTAKES = {
    "more than one lane": lambda machine, into, operand: machine.mma(into, operand, operand, accumulate=False),
    "columns 96 .. 159 of 128": lambda machine, into, operand: machine.load_tensor(into.part(96, 64)),
    "allocated twice": lambda machine, into, operand: machine.tensor_memory(32).__enter__(),
    "a power of two": lambda machine, into, operand: machine.tensor_memory(96).__enter__(),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_refused(message):
    def body(machine: TensorMemory, inputs: Any, out: Any) -> None:
        (tile,) = tiles(machine, inputs)
        if message == "a power of two":
            MISTAKES[message](machine, None, None)
        with machine.tensor_memory(128):
            MISTAKES[message](machine, Accumulator(column=0, columns=64), tile.k_major())

    with pytest.raises((SimulationError, jax.errors.JaxRuntimeError), match=message):
        run(body, (jnp.zeros((64, 64), jnp.float16),), 64, simulate=True)


def test_a_product_must_end_before_its_memory_is_freed():
    def body(machine: TensorMemory, inputs: Any, out: Any) -> None:
        (tile,) = tiles(machine, inputs)
        with machine.tensor_memory(64), machine.when(machine.thread < WARP), machine.one_lane():
            into = Accumulator(column=0, columns=64)
            machine.mma(into, tile.k_major(), tile.k_major(), accumulate=False)

    with pytest.raises((SimulationError, jax.errors.JaxRuntimeError), match="freed while a product runs"):
        run(body, (jnp.zeros((64, 64), jnp.float16),), 64, simulate=True)
