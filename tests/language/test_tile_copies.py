"""Copies that the hardware makes from device memory to shared memory, on both machines."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.tensor_cores import TensorCores, TileCopy
from tests.support.lane_kernels import emit, run
from tests.support.machines import HOPPER_MACHINES

on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


def copied(source: np.ndarray, row: int, column: int, rows: int, row_bytes: int, swizzle: int, simulate: bool) -> Any:
    """Return the bytes of shared memory after a copy, as they lie, [rows, row_bytes]."""
    size = rows * row_bytes

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        place, full = machine.take_shared(size, alignment=1024), Barrier.take(machine, 1)
        init_barriers(full)
        with machine.when(machine.thread < WARP):
            one = machine.constant(row, "i32")  # the one index as a value, the other as a number
            full.fill(
                TileCopy(
                    source=source, row=one, column=column, to=place, rows=rows, row_bytes=row_bytes, swizzle=swizzle
                )
            )
        full.wait(0)
        for first in range(0, size // 4, 128):
            at = machine.thread + first
            where = at < size // 4
            out.store_words(machine.load_shared((at * where_or_zero(machine, where)) * 4 + place, 4), at, where=where)

    def where_or_zero(machine: TensorCores, where: Any) -> Any:
        return machine.select(where, machine.constant(1, "i32"), machine.constant(0, "i32"))

    out = jax.ShapeDtypeStruct((size // 4,), jnp.int32)
    words = run(body, jnp.asarray(source), out, simulate=simulate, shared_bytes=size + 2048)
    return np.ascontiguousarray(words).view(np.uint8).reshape(rows, row_bytes)


CASES = [
    # source, its dtype, first row and column, rows, bytes of a row, swizzle
    ((40, 128), np.uint8, 0, 0, 40, 128, 128),
    ((40, 256), np.uint8, 24, 128, 32, 128, 128),  # past the last row
    ((40, 192), np.uint8, 3, 128, 16, 128, 128),  # past the last column
    ((256, 64), ml_dtypes.bfloat16, 0, 0, 256, 128, 128),
    ((24, 128), np.uint8, 1, 64, 16, 64, 64),
    ((5, 136), np.float32, 2, 128, 1, 512, 0),
]


@on_hopper
@pytest.mark.parametrize(("shape", "dtype", "row", "column", "rows", "row_bytes", "swizzle"), CASES)
def test_a_copy_is_swizzled_and_ends_with_zeros(shape, dtype, row, column, rows, row_bytes, swizzle, simulate):
    numbers = np.random.default_rng(0).integers(1, 120, shape, np.uint8)
    source = numbers if dtype == np.uint8 else numbers.astype(dtype)
    found = copied(source, row, column, rows, row_bytes, swizzle, simulate)
    data = source.view(np.uint8)
    first = column * source.dtype.itemsize
    want = np.zeros((rows, row_bytes), np.uint8)
    part = data[row : row + rows, first : first + row_bytes]
    want[: part.shape[0], : part.shape[1]] = part
    units = want.reshape(rows, -1, 16)
    for number in range(rows):
        permuted = np.arange(units.shape[1]) ^ {128: number % 8, 64: number // 2 % 4, 0: 0}[swizzle]
        np.testing.assert_array_equal(found[number].reshape(-1, 16)[permuted], units[number])


def attempt(body: Any, **sizes: Any) -> None:
    source, out = jnp.zeros((8, 128), jnp.uint8), jax.ShapeDtypeStruct((1,), jnp.int32)
    run(body, source, out, simulate=True, shared_bytes=8192, **sizes)


def probe(
    machine: TensorCores, source: Any, out: Any, *, offset: int = 0, fills: bool = True, waits: bool = True
) -> None:
    place, full = machine.take_shared(2048, alignment=1024), Barrier.take(machine, 1)
    init_barriers(full)
    with machine.when((machine.thread < WARP) & fills):
        full.fill(TileCopy(source=source, row=0, column=0, to=place + offset, rows=8, row_bytes=128))
    if waits:
        full.wait(0)
    out.store_words(machine.load_shared(machine.thread * 4 + place, 4), 0, where=machine.thread == 0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (dict(fills=False), "a wait for a phase that can never end"),
        (dict(offset=512), "a copy to a misaligned place"),
        (dict(waits=False), "a lane reads what a running copy writes: a wait for it is missing"),
    ],
)
def test_mistakes_are_found_by_the_simulator(fault, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        attempt(lambda machine, source, out: probe(machine, source, out, **fault))


def test_an_array_that_the_kernel_may_write_is_no_source():
    with pytest.raises(jax.errors.JaxRuntimeError, match="not of what the kernel may write"):
        run(
            lambda machine, source, out: probe(machine, out, out),
            jnp.zeros((8, 128), jnp.uint8),
            np.zeros((8, 128), np.uint8),
            simulate=True,
            shared_bytes=8192,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(row_bytes=64), "rows of 64 bytes cannot have a swizzle of 128"),
        (dict(rows=257), "at most 256 rows and 256 columns"),
        (dict(row_bytes=272, swizzle=0), "at most 256 rows and 256 columns"),
        (dict(swizzle=32), "cannot have a swizzle of 32"),
    ],
)
def test_copies_that_the_hardware_cannot_make_are_refused(given, message):
    def body(machine: TensorCores, source: Any, out: Any) -> None:
        TileCopy(**(dict(source=source, row=0, column=0, to=0, rows=8, row_bytes=128) | given))

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        attempt(body)


def test_rows_of_the_source_are_whole_units():
    def body(machine: TensorCores, source: Any, out: Any) -> None:
        TileCopy(source=source, row=0, column=0, to=0, rows=8, row_bytes=128)

    with pytest.raises(jax.errors.JaxRuntimeError, match="whole times 16 bytes a row"):
        run(
            functools.partial(body),
            jnp.zeros((8, 130), jnp.uint8),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            simulate=True,
        )


def test_a_choice_of_arrays_is_no_source():
    """The hardware knows the arrays of a launch by descriptions that are made before it."""

    def body(machine: TensorCores, sources: Any, out: Any) -> None:
        either = sources[0].instead(machine.thread < 64, sources[1])
        probe(machine, either, out)

    sources = (jnp.zeros((8, 128), jnp.uint8),) * 2
    with pytest.raises(TypeError, match="an input of the launch as it is"):
        emit(body, sources, jax.ShapeDtypeStruct((1,), jnp.int32), shared_bytes=8192)
