"""Mistakes of units, dtypes and sizes, which a GPU would not notice: each is refused in a sentence."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Team, add
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, TileCopy
from tests.language.test_tensor_cores import SPEC, fill
from tests.support.lane_kernels import emit, run

attempt = functools.partial(run, state=SPEC((64, 64), jnp.float32), simulate=True)
WRONG = jax.errors.JaxRuntimeError


@pytest.mark.parametrize("known", [True, False])
def test_a_parity_is_0_or_1(known):
    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        barrier = Barrier.take(machine, 4)
        init_barriers(barrier)
        barrier.arrive()
        barrier.wait(2 if known else machine.constant(2, "i32"))

    error = "ValueError" if known else "SimulationError"
    with pytest.raises(WRONG, match=rf"{error}: a phase has the parity 0 or 1, got 2: write barrier.wait\(count & 1\)"):
        attempt(body, (), shared_bytes=16)


@pytest.mark.parametrize("known", [True, False])
def test_a_column_counts_elements(known):
    """The second half of rows of 128 bf16 begins at column 64, and not at byte 128."""

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        tile, full = Tile.take(machine, 8, 128), Barrier.take(machine, 1)
        init_barriers(full)
        column = 128 if known else machine.constant(128, "i32")
        with machine.when(machine.thread < WARP):
            full.fill(TileCopy(source=source, row=0, column=column, to=tile.offset, rows=8, row_bytes=128))
        full.wait(0)

    error = "ValueError" if known else "SimulationError"
    with pytest.raises(WRONG, match=f"{error}: a copy from column 128 of 128: a column counts elements"):
        attempt(body, jnp.zeros((8, 128), jnp.bfloat16), shared_bytes=1024 + 16)


@pytest.mark.parametrize("known", [True, False])
def test_a_column_begins_at_a_multiple_of_16_bytes(known):
    """Where a GPU stops with an illegal instruction, as an H100 does from columns 1 and 2 of f32, but not from 4."""

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        place, full = machine.take_shared(64, alignment=128), Barrier.take(machine, 1)
        init_barriers(full)
        column = 2 if known else machine.constant(2, "i32")
        with machine.when(machine.thread < WARP):
            full.fill(TileCopy(source=source, row=0, column=column, to=place, rows=2, row_bytes=32, swizzle=0))
        full.wait(0)

    error = "ValueError" if known else "SimulationError"
    with pytest.raises(WRONG, match=f"{error}: a copy from column 2: it must begin at a multiple of 16 bytes"):
        attempt(body, jnp.zeros((2, 256), jnp.float32), shared_bytes=1024)


def multiply(machine: TensorCores, source: Any, out: Any, *, way: str) -> None:
    """Multiply a tile of bf16 as f16."""
    tile, full = Tile.take(machine, 64, 128), Barrier.take(machine, 1)
    init_barriers(full)
    words = [machine.constant(0, "i32")] * 16
    if way == "hardware":
        with machine.when(machine.thread < WARP):
            full.fill(TileCopy(source=source, row=0, column=0, to=tile.offset, rows=64, row_bytes=128))
        full.wait(0)
    elif way == "lanes":
        for n in range(0, 512, WARPGROUP):
            place = (machine.thread + n) // 8, (machine.thread + n) % 8
            machine.copy_async(tile.unit(*place), source.address_of((place[0], place[1] * 8)), True)
        machine.wait_copies()
    else:
        fill(machine, tile, source, WARPGROUP)
    if way == "registers":
        zero = machine.constant(0.0, "f32")
        words = [machine.to_bf16(zero, zero)] * 16
    machine.fence_shared()
    machine.barrier("block")
    left = words if way == "registers" else tile.k_major()
    sums = machine.wgmma_wait(machine.wgmma(None, left, tile.k_major(), columns=64))
    out.store_floats(sums[:1], 0, machine.thread % 64, where=machine.thread < 64)


@pytest.mark.parametrize("way", ["hardware", "lanes", "stores", "registers"])
def test_bf16_is_not_multiplied_as_f16(way):
    body = functools.partial(multiply, way=way)
    dtype = jnp.float16 if way == "registers" else jnp.bfloat16
    with pytest.raises(WRONG, match="a product of f16 has an operand that was written as bfloat16"):
        attempt(body, jnp.zeros((64, 64), dtype), shared_bytes=64 * 128 + 16)
    if way != "registers":
        attempt(body, jnp.zeros((64, 64), jnp.float16), shared_bytes=64 * 128 + 16)


def takes(machine: Machine, inputs: Any, out: Any, *, size: int, reduces: int = 0) -> None:
    Shared.take(machine, (size,), "u8")
    for _ in range(reduces):
        Team(machine, WARPGROUP).reduce((add, machine.thread))


def test_the_scratch_of_reductions_is_not_lent():
    for size, reduces in ((512, 0), (512, 64)):
        attempt(functools.partial(takes, size=size, reduces=reduces), (), shared_bytes=512)
    for machine in (attempt, functools.partial(emit, state=SPEC((64, 64), jnp.float32))):
        with pytest.raises(Exception, match=r"takes 528 bytes of shared memory, its Grid has shared_bytes=512"):
            machine(functools.partial(takes, size=513, reduces=2), (), shared_bytes=512)
        with pytest.raises(Exception, match=r"takes 1040 bytes of shared memory for reductions, a launch has 1024"):
            machine(functools.partial(takes, size=16, reduces=65), (), shared_bytes=512)


def test_far_too_little_shared_memory_is_a_value_error():
    """Also where the first thing beyond it is a barrier."""

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        Tile.take(machine, 64, 128)
        init_barriers(Barrier.take(machine, 4))

    with pytest.raises(WRONG, match="8192 bytes of shared memory are taken so far, and the launch has 2048"):
        attempt(body, (), shared_bytes=1024)


def test_a_warp_reduces_by_what_it_can():
    def body(machine: Machine, inputs: Any, out: Any) -> None:
        machine.reduce_warp("or", machine.thread)  # pyright: ignore[reportArgumentType]

    message = "a warp reduces by one of 'add', 'max', 'min', got 'or'"
    with pytest.raises(WRONG, match=f"ValueError: {message}"):
        attempt(body, ())
    with pytest.raises(ValueError, match=message):
        emit(body, (), SPEC((64, 64), jnp.float32))


def test_codes_and_halves_are_told_apart():
    def body(machine: TensorCores, source: Any, out: Any) -> None:
        tile = Tile.take(machine, 64, 128)
        fill(machine, tile, source, WARPGROUP)
        machine.fence_shared()
        machine.barrier("block")
        machine.wgmma_wait(machine.wgmma(None, tile.k_major(), tile.k_major(), columns=64, dtype="e5m2"))

    source = np.zeros((64, 128), ml_dtypes.float8_e4m3fn)
    with pytest.raises(WRONG, match="a product of e5m2 has an operand that was written as float8_e4m3fn"):
        attempt(body, source, shared_bytes=64 * 128)


def test_bytes_may_be_any_float():
    """Of an array of uint8 the simulator does not know what its bytes are, in a tile or in registers."""

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        tile = Tile.take(machine, 64, 128)
        fill(machine, tile, source, WARPGROUP)
        words = source.load_words(machine.thread % 64, 0, count=16)
        machine.fence_shared()
        machine.barrier("block")
        for left in (tile.k_major(), words * 4):
            machine.wgmma_wait(machine.wgmma(None, left, tile.k_major(), columns=64, dtype="e4m3"))

    attempt(body, np.zeros((64, 128), np.uint8), shared_bytes=64 * 128)
