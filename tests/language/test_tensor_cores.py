"""Products, roles and barriers, on both machines."""

import contextlib
import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.simulator.lanes import SimulationError
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile, product_row
from pallas_kernels.language.values import Index, Value
from tests.support.lane_kernels import elementwise, run
from tests.support.machines import HOPPER_MACHINES

SPEC = jax.ShapeDtypeStruct


def fill(machine: TensorCores, tile: Tile, source: Any, lanes: int) -> None:
    """Copy a matrix into a tile, 16 bytes at a time, by the block's first lanes."""
    per_unit = 16 // source.dtype.itemsize
    units = source.shape[1] // per_unit
    total = source.shape[0] * units
    for first in range(0, total, lanes):
        n = machine.thread % lanes + first
        there = n < total
        words = source.load_words(n // units, n % units * per_unit, count=per_unit, where=there)
        machine.store_shared(tile.unit(n // units, n % units), words, 16, where=there)


def store_product(machine: TensorCores, out: Any, values: list[Value], first: Index = 0) -> None:
    """Store a product's values to out[:, first:]."""
    row, column = product_row(machine), machine.thread % 4 * 2 + first
    for i in range(0, len(values), 2):
        out.store_floats(values[i : i + 2], row + i // 2 % 2 * 8, column + i // 4 * 8)


def tile_bytes(*shapes: tuple[int, int]) -> int:
    return sum(rows * max(128, columns) for rows, columns in shapes) + 1024


def product(
    a: np.ndarray, b: np.ndarray, *, transposed: bool, left_transposed: bool = False, times: int = 1, simulate: bool
) -> np.ndarray:
    """Return times * a b^T; or times * a b if b is transposed, and times * a^T b^T if a is."""
    columns = b.shape[1] if transposed else b.shape[0]
    size = a.dtype.itemsize
    dtype = "f16" if size == 2 else "e5m2" if a.dtype == jnp.float8_e5m2 else "e4m3"

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        left, right = (Tile.take(machine, x.shape[0], x.shape[1] * size) for x in inputs)
        fill(machine, left, inputs[0], 128)
        fill(machine, right, inputs[1], 128)
        machine.fence_shared()
        machine.barrier("block")
        operand = right.transposed(0) if transposed else right.k_major()
        other = left.transposed(0) if left_transposed else left.k_major()
        result = None
        for _ in range(times):
            result = machine.wgmma(result, other, operand, columns=columns, dtype=dtype)
        assert result is not None
        store_product(machine, out, machine.wgmma_wait(result))

    shapes = [(x.shape[0], x.shape[1] * size) for x in (a, b)]
    inputs = tuple(jnp.asarray(x if size == 2 else x.view(np.uint8)) for x in (a, b))
    return run(body, inputs, SPEC((64, columns), jnp.float32), shared_bytes=tile_bytes(*shapes), simulate=simulate)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("columns", [8, 64, 256])
@pytest.mark.parametrize("depth", [64, 192])
def test_rows_by_rows(simulate, columns, depth):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (n, depth)).astype(np.float16) for n in (64, columns))
    found = product(a, b, transposed=False, simulate=simulate)
    np.testing.assert_array_equal(found, a.astype(np.float32) @ b.astype(np.float32).T)  # small integers: exact


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("columns", [64, 256])
def test_rows_by_columns(simulate, columns):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (64, 64)).astype(np.float16), rng.integers(-8, 9, (64, columns)).astype(np.float16)
    found = product(a, b, transposed=True, times=3, simulate=simulate)
    np.testing.assert_array_equal(found, 3 * (a.astype(np.float32) @ b.astype(np.float32)))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_rows_by_columns_of_half_an_atom(simulate):
    """Each half by a warpgroup."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (64, 64)).astype(np.float16) for _ in range(2))

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        left, right = (Tile.take(machine, 64, 128) for _ in inputs)
        fill(machine, left, inputs[0], 256)
        fill(machine, right, inputs[1], 256)
        machine.fence_shared()
        machine.barrier("block")
        half = machine.thread // 128
        found = machine.wgmma(None, left.k_major(), right.transposed(half * 64), columns=32)
        store_product(machine, out, machine.wgmma_wait(found), half * 32)

    found = run(
        body,
        (jnp.asarray(a), jnp.asarray(b)),
        SPEC((64, 64), jnp.float32),
        warpgroups=2,
        shared_bytes=tile_bytes((64, 128), (64, 128)),
        simulate=simulate,
    )
    np.testing.assert_array_equal(found, a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_columns_by_rows(simulate):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (64, 64)).astype(np.float16), rng.integers(-8, 9, (16, 64)).astype(np.float16)
    found = product(a, b, transposed=False, left_transposed=True, simulate=simulate)
    np.testing.assert_array_equal(found, a.T.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_bytes_of_e4m3(simulate):
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, (64, 128)).astype(jnp.float8_e4m3fn) for _ in range(2))
    found = product(a, b, transposed=False, simulate=simulate)
    np.testing.assert_array_equal(found, a.astype(np.float32) @ b.astype(np.float32).T)


def test_operands_are_aligned():
    """To the units of 16 bytes that tensor cores read."""

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        tile = Tile.take(machine, 64, 128)
        fill(machine, tile, inputs, 128)
        machine.fence_shared()
        machine.barrier("block")
        moved = dataclasses.replace(tile, offset=tile.offset + 4)
        machine.wgmma_wait(machine.wgmma(None, tile.k_major(), moved.k_major(), columns=8))

    room = tile_bytes((64, 128))
    with pytest.raises(jax.errors.JaxRuntimeError, match="an operand at a misaligned address"):
        run(body, np.zeros((64, 64), np.float16), SPEC((64, 8), jnp.float32), shared_bytes=room, simulate=True)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_a_left_operand_in_registers(simulate):
    """What one product leaves in registers enters the next: (a b^T) c."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(-2, 3, (64, n)).astype(np.float16) for n in (64, 64, 128))

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        tiles = [Tile.take(machine, x.shape[0], x.shape[1] * 2) for x in inputs]
        for tile, source in zip(tiles, inputs, strict=True):
            fill(machine, tile, source, 128)
        machine.fence_shared()
        machine.barrier("block")
        first = machine.wgmma_wait(machine.wgmma(None, tiles[0].k_major(), tiles[1].k_major(), columns=64))
        words = [machine.to_f16(first[i], first[i + 1]) for i in range(0, len(first), 2)]
        store_product(machine, out, machine.wgmma_wait(machine.wgmma(None, words, tiles[2].transposed(0), columns=128)))

    room = tile_bytes((64, 128), (64, 128), (64, 256))
    found = run(body, (a, b, c), SPEC((64, 128), jnp.float32), shared_bytes=room, simulate=simulate)
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    np.testing.assert_array_equal(found, a @ b.T @ c)  # integers below 2^11: exact in f16


def pipeline(machine: TensorCores, inputs: Any, out: Any, *, fenced=True, full=True, free=True) -> None:
    """One role loads tiles of b in turn, with room for two, and another adds up a b_i^T."""
    a, b = inputs
    left, ring = Tile.take(machine, 64, 128), Tile.take(machine, 64, 128, copies=2)
    is_full, is_free = (Barrier.take(machine, warps=4, copies=2) for _ in range(2))
    init_barriers(is_full, is_free)
    rounds = b.shape[0]

    def load() -> None:
        fill(machine, left, a, 128)

        def one(i: Value, carry: None) -> None:
            slot = i % 2
            if free:
                is_free.copy(slot).wait((i >> 1) & 1 ^ 1)
            for step in range(4):
                n = machine.thread % 128 + step * 128
                words = b.load_words(i, n // 8, n % 8 * 8, count=8)
                machine.store_shared(ring.copy(slot).unit(n // 8, n % 8), words, 16, where=True)
            if fenced:
                machine.fence_shared()
            is_full.copy(slot).arrive()

        machine.loop(rounds, one)

    def multiply() -> None:
        def one(i: Value, carry: list[Value]) -> list[Value]:
            slot = i % 2
            if full:
                is_full.copy(slot).wait((i >> 1) & 1)
            new = machine.wgmma(carry, left.k_major(), ring.copy(slot).k_major(), columns=64)
            new = machine.wgmma_wait(new)
            is_free.copy(slot).arrive()
            return new

        total = machine.loop(rounds, one, [machine.constant(0.0, "f32")] * 32)
        store_product(machine, out, total)

    machine.roles(Role(warpgroups=1, registers=168, body=load), Role(warpgroups=1, registers=168, body=multiply))


def run_pipeline(simulate: bool, rounds: int, **without: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rounds)
    a, b = rng.integers(-4, 5, (64, 64)).astype(np.float16), rng.integers(-4, 5, (rounds, 64, 64)).astype(np.float16)
    body, room = functools.partial(pipeline, **without), tile_bytes((64, 128), (64, 256)) + 64
    found = run(body, (a, b), SPEC((64, 64), jnp.float32), warpgroups=2, shared_bytes=room, simulate=simulate)
    return found, a.astype(np.float32) @ b.astype(np.float32).sum(0).T


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_roles_hand_tiles_to_each_other(simulate, rounds):
    found, expected = run_pipeline(simulate, rounds)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("missing", ["fenced", "full", "free"])
def test_the_simulator_notices_what_is_missing(missing):
    try:
        found, expected = run_pipeline(True, 7, **{missing: False})
    except (SimulationError, jax.errors.JaxRuntimeError):
        return
    assert not np.array_equal(found, expected), "a missing wait must not go unnoticed"


@pytest.mark.parametrize("missing", ["fenced", "full", "free"])
def test_no_thread_of_a_role_outlives_its_launch(missing):
    before = set(threading.enumerate())
    with contextlib.suppress(SimulationError, jax.errors.JaxRuntimeError):
        run_pipeline(True, 7, **{missing: False})
    assert not [thread for thread in set(threading.enumerate()) - before if thread.daemon]


def relay(machine: TensorCores, x: Any, out: Any, *, meets=True) -> None:
    """The two blocks of a cluster tell each other a number per lane, in each of several turns."""
    told = Shared.take(machine, (2, 2, 128), "f32")
    there = Barrier.take(machine, 8, scope="cluster")
    init_barriers(there)
    machine.barrier("cluster")

    def one(turn: Value, carry: None) -> None:
        (mine,) = x.load_floats(machine.rank, turn, machine.thread, count=1)
        for rank in range(2):
            told.store_floats([mine], turn % 2, machine.rank, machine.thread, rank=rank)
        if meets:
            there.arrive_in_cluster(2)
            there.wait(turn & 1)
        a, b = (told.load_floats(turn % 2, rank, machine.thread ^ 1, count=1)[0] for rank in range(2))
        out.store_floats([a + b], machine.rank, turn, machine.thread)

    machine.loop(x.shape[1], one)


def run_relay(simulate: bool, **without: bool) -> None:
    x = np.random.default_rng(0).integers(0, 99, (2, 5, 128)).astype(np.float32)
    body = functools.partial(relay, **without)
    found = run(body, x, SPEC((2, 5, 128), jnp.float32), cluster=2, shared_bytes=4096, simulate=simulate)
    swapped = x.reshape(2, 5, 64, 2)[..., ::-1].reshape(x.shape)
    np.testing.assert_array_equal(found, np.broadcast_to(swapped.sum(0), x.shape))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_blocks_of_a_cluster_tell_each_other(simulate):
    run_relay(simulate)


def test_the_simulator_notices_that_the_blocks_of_a_cluster_do_not_meet():
    with pytest.raises(jax.errors.JaxRuntimeError, match="a lane reads what another one writes"):
        run_relay(True, meets=False)


@pytest.mark.parametrize("scope", ["block", "cluster"])
def test_a_barrier_of_a_block_is_not_one_of_a_cluster(scope):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        barrier = Barrier.take(machine, 4, scope=scope)
        init_barriers(barrier)
        if scope == "block":
            barrier.arrive_in_cluster(2)
        else:
            barrier.arrive()

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"a barrier of scope '{scope}': write barrier.arrive"):
        run(body, np.zeros(4, np.float32), SPEC((4,), jnp.float32), cluster=2, shared_bytes=64, simulate=True)


def test_arriving_in_a_cluster_of_another_size_is_found_by_the_simulator():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        barrier = Barrier.take(machine, 4, scope="cluster")
        init_barriers(barrier)
        barrier.arrive_in_cluster(4)

    with pytest.raises(jax.errors.JaxRuntimeError, match="4 blocks of a cluster that has 2"):
        run(body, np.zeros(4, np.float32), SPEC((4,), jnp.float32), cluster=2, shared_bytes=64, simulate=True)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_bytes_of_e5m2(simulate):
    """Covers all values of a byte, including subnormal ones."""
    rng = np.random.default_rng(7)
    a = rng.permutation(np.repeat(np.arange(256, dtype=np.uint8), 32)).reshape(64, 128)
    a = np.where(a & 0x7F > 0x5C, a & 0xBF, a).astype(np.uint8)  # none infinite, none above 256
    b = rng.integers(-1, 2, (8, 128)).astype(jnp.float8_e5m2)
    found = product(a.view(jnp.float8_e5m2), b, transposed=False, simulate=simulate)
    want = a.view(jnp.float8_e5m2).astype(np.float64) @ b.astype(np.float64).T
    # What tensor cores keep of a product of bytes: 13 bits below the largest of 32.
    np.testing.assert_allclose(found, want, rtol=0, atol=4 * 256 * 32 * 2.0**-13)


def test_roles_cannot_ask_for_more_registers_than_there_are():
    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        machine.roles(
            Role(warpgroups=2, registers=208, body=lambda: None), Role(warpgroups=1, registers=96, body=lambda: None)
        )

    state = SPEC((1,), jnp.float32)
    with pytest.raises(Exception, match="roles ask for 512 registers per lane in all, a launch has 504"):
        run(body, (), state, warpgroups=3, simulate=True)
    for registers in (100, 16, 264):
        with pytest.raises(ValueError, match=f"a multiple of 8 registers from 24 to 256, got {registers}"):
            Role(warpgroups=1, registers=registers, body=lambda: None)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_sums_in_f16(simulate):
    """A word holds a pair of columns."""
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-4, 5, (64, 128)).astype(np.float16) for _ in range(2))

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        left, right = (Tile.take(machine, 64, 256) for _ in inputs)
        fill(machine, left, inputs[0], 128)
        fill(machine, right, inputs[1], 128)
        machine.fence_shared()
        machine.barrier("block")
        words = machine.wgmma(None, left.k_major(), right.k_major(), columns=64, packed=True)
        machine.keep_order()
        words = machine.wgmma_wait(words)
        store_product(machine, out[0], [half for word in words for half in machine.from_f16(word)])
        store_product(machine, out[1], [half for word in words for half in machine.from_f16(machine.relu_f16(word))])

    room = tile_bytes((64, 256), (64, 256))
    found = run(body, (a, b), [SPEC((64, 64), jnp.float32)] * 2, shared_bytes=room, simulate=simulate)
    want = a.astype(np.float32) @ b.astype(np.float32).T  # integers below 2^11: exact in f16
    np.testing.assert_array_equal(found[0], want)
    np.testing.assert_array_equal(found[1], np.maximum(want, 0))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_relu_keeps_nan(simulate):
    numbers = [1, -1, 0, -0.0, 65504, -65504, 2.0**-24, -(2.0**-24), np.inf, -np.inf, np.nan, 3]
    x = np.array(numbers, np.float16)

    def relu(machine: Any, word: Value) -> Value:
        return machine.relu_f16(word)

    (got,) = elementwise(relu, x.view(np.int32), simulate=simulate, dtype=np.int32)
    np.testing.assert_array_equal(got.view(np.float16), np.where(np.isnan(x), x, np.maximum(x, np.float16(0))))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_bytes_and_halves_of_words(simulate):
    rng = np.random.default_rng(9)
    a, b, selector = (rng.integers(-(2**31), 2**31, 256).astype(np.int32) for _ in range(3))

    def both(machine: Any, a: Value, b: Value, selector: Value) -> list[Value]:
        permuted = machine.permute_bytes(a, b, selector), machine.permute_bytes(a, b, 0x7A10)
        return [*permuted, machine.maximum_u16(a, b), machine.high_f16(a)]

    got = elementwise(both, a, b, selector, simulate=simulate, outputs=4, dtype=np.int32)
    source = np.stack([a, b], -1).view(np.int8).reshape(-1, 8)
    for found, chosen in ((got[0], selector[:, None] >> np.arange(0, 16, 4)), (got[1], np.array([[0, 1, 10, 7]]))):
        taken = np.take_along_axis(source, chosen & 7, -1)
        want = np.where(chosen & 8, taken >> 7, taken)
        np.testing.assert_array_equal(found.view(np.int8).reshape(-1, 4), want)
    want = np.maximum(a.view(np.uint16), b.view(np.uint16))
    np.testing.assert_array_equal(got[2].view(np.uint16), want)
    halves, high = got[3].view(np.uint16).reshape(-1, 2), a.view(np.uint16).reshape(-1, 2)[:, 1:]
    is_nan = (high & 0x7FFF) > 0x7C00
    np.testing.assert_array_equal((halves & 0x7FFF) > 0x7C00, np.repeat(is_nan, 2, 1))
    np.testing.assert_array_equal(np.where(is_nan, 0, halves), np.where(is_nan, 0, np.repeat(high, 2, 1)))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_products_of_bf16_halves_keep_subnormal_numbers(simulate):
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 1 << 16, (2, 4096)).astype(np.uint16)
    bits[:, :8] = [0, 1, 0x7F, 0x80, 0x8001, 0x7F80, 0xFF80, 0x7FC0]  # 0, subnormal, smallest normal, inf, NaN
    bits[1, 256:2048] = 0x3F80 >> 7 << 7  # times powers of two around 1, which subnormal numbers survive
    bits[1, 256:2048] += (rng.integers(-8, 9, 1792) << 7).astype(np.uint16)

    def multiply(machine: Any, a: Value, b: Value) -> Value:
        return machine.multiply_bf16(a, b)

    (got,) = elementwise(multiply, *(x.view(np.int32) for x in bits), simulate=simulate, dtype=np.int32)
    with np.errstate(all="ignore"):
        a, b = (x.view(ml_dtypes.bfloat16).astype(np.float64) for x in bits)
        want = (a * b).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.view(ml_dtypes.bfloat16).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_copies_in_groups(simulate):
    """Waiting for all but the last groups: what they copy arrives later, or already; what came before is there."""
    source = np.random.default_rng(12).integers(0, 256, (8, 128, 16)).astype(np.uint8)

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        lane = machine.thread
        room = lane * 16 + machine.take_shared(8 * 128 * 16)
        for i in range(8):
            machine.copy_async(room + i * 128 * 16, source.address_of((i, lane, 0)), True)
            machine.close_copies()
        for i in range(8):
            machine.wait_copies(pending=7 - i)
            out.store_words(machine.load_shared(room + i * 128 * 16, 16), i, lane, 0)

    state = SPEC((8, 128, 4), jnp.int32)
    got = run(body, source, state, shared_bytes=8 * 128 * 16, simulate=simulate)
    np.testing.assert_array_equal(got, source.view(np.int32))


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("size", [4, 8])
def test_copies_of_fewer_bytes(size, simulate):
    """Each lane copies words of another lane's row, and zeros in some lanes; the rest of the memory stays."""
    source = np.random.default_rng(13).integers(0, 256, (128, 16)).astype(np.uint8)

    def body(machine: TensorCores, source: Any, out: Any) -> None:
        lane, count = machine.thread, 16 // size
        room = lane * 16 + machine.take_shared(128 * 16)
        machine.store_shared(room, [machine.constant(-1, "i32")] * 4, 16, True)
        for i in range(count - 1):
            machine.copy_async(
                room + i * size, source.address_of((lane * -1 + 127, i * size)), lane % 3 != i, size=size
            )
        machine.wait_copies()
        out.store_words(machine.load_shared(room, 16), lane, 0)

    got = run(body, source, SPEC((128, 4), jnp.int32), shared_bytes=128 * 16, simulate=simulate)
    want = source[::-1].copy()
    for i in range(16 // size - 1):
        want[i::3, i * size : (i + 1) * size] = 0
    want[:, 16 - size :] = 255
    np.testing.assert_array_equal(got, want.view(np.int32))


def test_sizes_of_copies_are_checked():
    def body(machine: TensorCores, source: Any, out: Any) -> None:
        machine.copy_async(machine.thread * 16, source.address_of((machine.thread, 0)), True, size=2)

    with pytest.raises(jax.errors.JaxRuntimeError, match="2 bytes at once: an asynchronous copy moves 4, 8 or 16"):
        run(body, np.zeros((128, 16), np.uint8), SPEC((128, 4), jnp.int32), shared_bytes=128 * 16, simulate=True)


def copies(machine: TensorCores, source: Any, out: Any, *, waits: bool) -> None:
    """Each lane copies 16 bytes of each row, with room for three rows."""
    lane, rows = machine.thread, source.shape[0]
    room = lane * 16 + machine.take_shared(3 * 128 * 16)
    for i in range(rows):
        machine.copy_async(room + i % 3 * 128 * 16, source.address_of((i, lane, 0)), lane < 128 - i)
        if i % 3 == 2:
            if waits:
                machine.wait_copies()
            for n in range(3):
                out.store_words(machine.load_shared(room + n * 128 * 16, 16), i - 2 + n, lane, 0)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_copies(simulate):
    source = np.random.default_rng(10).integers(0, 256, (6, 128, 16)).astype(np.uint8)

    def copied(waits: bool) -> np.ndarray:
        body, state = functools.partial(copies, waits=waits), SPEC((6, 128, 4), jnp.int32)
        return run(body, source, state, shared_bytes=3 * 128 * 16, simulate=simulate)

    there = np.arange(128) < 128 - np.arange(6)[:, None]
    want = np.where(there[..., None], source, 0).astype(np.uint8).view(np.int32)
    np.testing.assert_array_equal(copied(True), want)
    if simulate:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a lane reads what a running copy writes: a wait for"):
            copied(False)  # nobody waits
