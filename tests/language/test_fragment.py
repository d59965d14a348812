"""Fragments, typed tiles and pipelines, on both machines against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.language.fragment import Fragment, LeftOperand, PerColumn, PerRow, packed, product
from pallas_kernels.language.lanes import add, maximum
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Role, TensorCores
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Value
from tests.support.lane_kernels import run, spec
from tests.support.machines import HOPPER_MACHINES

machines = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


def load(machine: TensorCores, source: Any) -> Fragment:
    """Load f32 [64, columns], element by element."""
    values = []
    for row, column, _ in Fragment.zeros(machine, source.shape[1]).pairs():
        values += source.load_floats(row, column, count=2)
    return Fragment(values)


def matrix(seed: int, columns: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, (64, columns)).astype(np.float32)


@machines
@pytest.mark.parametrize("columns", [8, 40, 128])
def test_numbers_of_rows_and_of_columns_meet_the_elements_of_theirs(simulate, columns):
    x, of_rows = matrix(0, columns), np.arange(64, dtype=np.float32) * 7
    of_columns = np.arange(columns, dtype=np.float32) * 3 + 1

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        x, of_rows, of_columns = inputs
        rows, some = PerRow.load(machine, of_rows, 0), PerColumn.load(machine, columns, of_columns, 0)
        found = load(machine, x)
        found = found.map(lambda a, b, row, column: a * column + row + b, found, rows, some)
        found.scale_rows(rows).store(out, 0, 0)

    inputs = tuple(map(jnp.asarray, (x, of_rows, of_columns)))
    found = run(body, inputs, spec((64, columns), jnp.float32), simulate=simulate)
    np.testing.assert_array_equal(found, (x * of_columns + of_rows[:, None] + x) * of_rows[:, None])  # whole numbers


@machines
def test_a_fragment_knows_the_numbers_of_its_rows_and_columns(simulate):
    def body(machine: TensorCores, _: Any, out: Any) -> None:
        rows, columns = PerRow.numbers(machine), PerColumn.numbers(machine, 24)
        for n, (row, column, _pair) in enumerate(Fragment.zeros(machine, 24).pairs()):
            out.store_int(rows.values[n % 2] * 100 + columns.values[n // 2 * 2], row, column)
            out.store_int(row * 100 + column + 1, row, column + 1)

    found = run(body, (), spec((64, 24), jnp.int32), simulate=simulate)
    np.testing.assert_array_equal(found, np.arange(64)[:, None] * 100 + np.arange(24))


@machines
def test_reductions_over_rows_and_over_the_columns_of_a_warp(simulate):
    x = matrix(1, 32)

    def body(machine: TensorCores, x: Any, out: Any) -> None:
        found = load(machine, x)
        found.over_rows(maximum).store(out, 0, 0)
        found.over_rows(add).store(out, 1, 0)
        of_lane = found.lane_over_rows(add)
        of_lane.map(lambda a, b: a - b, found.over_rows(add)).over_quad(add).store(out, 2, 0)
        sums, warp = found.warp_over_columns(add), machine.thread // WARP
        for n, (_, column, _) in enumerate(Fragment.zeros(machine, 32).pairs()):
            if n % 2 == 0:
                first = sums.values[n : n + 2]
                out.store_floats(first, warp + 3, column, where=machine.thread % WARP < 4)

    found = run(body, jnp.asarray(x), spec((7, 64), jnp.float32), simulate=simulate)
    np.testing.assert_array_equal(found[:2], [x.max(1), x.sum(1)])
    np.testing.assert_array_equal(found[2], -3 * x.sum(1))  # the sum of the lanes' parts, less four whole sums
    np.testing.assert_array_equal(found[3:, :32], x.reshape(4, 16, 32).sum(1))


@machines
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_fragment_is_the_left_operand_of_the_next_product(simulate, dtype):
    """(a b^T) c^T, with integers that both types represent exactly."""
    rng = np.random.default_rng(2)
    wide = jnp.float16 if dtype == "f16" else jnp.bfloat16
    a, b = rng.integers(-1, 2, (64, 64)), rng.integers(-1, 2, (32, 64))
    c = rng.integers(-4, 5, (16, 64)) * (np.arange(64) < 32)  # K is a whole row of 128 bytes

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        tiles = [TypedTile.take(machine, x.shape[0], 64, dtype) for x in inputs]
        pipe = Pipeline.take(machine, 1, consumers=4)
        use = pipe.use(machine.constant(0, "i32"))
        with machine.when(machine.thread < WARP):
            use.commit(*(tile.copy_from(x, 0, 0) for tile, x in zip(tiles, inputs, strict=True)))
        use.wait()
        first = product(None, tiles[0], tiles[1]).wait()
        zeros = Fragment.zeros(machine, 32)
        operand = Fragment(first.values + zeros.values).operand(dtype)
        product(None, operand, tiles[2]).wait(operand).store(out, 0, 0)

    inputs = tuple(jnp.asarray(x, wide) for x in (a, b, c))
    found = run(body, inputs, spec((64, 16), jnp.float32), shared_bytes=16384, simulate=simulate)
    np.testing.assert_array_equal(found, (a @ b.T) @ c[:, :32].T)


@machines
def test_sums_in_f16_are_the_left_operand_of_the_next_product(simulate):
    """max(a b^T, 0) c^T."""
    rng = np.random.default_rng(6)
    a, b, c = (rng.integers(-2, 3, (rows, 64)) for rows in (64, 64, 8))

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        tiles = [TypedTile.take(machine, x.shape[0], 64, "f16") for x in inputs]
        use = Pipeline.take(machine, 1, consumers=4).use(machine.constant(0, "i32"))
        with machine.when(machine.thread < WARP):
            use.commit(*(tile.copy_from(x, 0, 0) for tile, x in zip(tiles, inputs, strict=True)))
        use.wait()
        positive = packed(tiles[0], tiles[1]).wait().map(machine.relu_f16)
        product(None, positive, tiles[2]).wait(positive).store(out, 0, 0)

    inputs = tuple(jnp.asarray(x, jnp.float16) for x in (a, b, c))
    found = run(body, inputs, spec((64, 8), jnp.float32), shared_bytes=20480, simulate=simulate)
    np.testing.assert_array_equal(found, np.maximum(a @ b.T, 0) @ c.T)  # whole numbers below 2^11 and 2^24


@machines
@pytest.mark.parametrize(("stages", "chunks", "pending"), [(1, 5, 0), (2, 5, 0), (3, 7, 1), (4, 3, 1)])
def test_a_product_through_a_pipeline(simulate, stages, chunks, pending):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-4, 5, (64, chunks * 64)) for _ in range(2))

    def body(machine: TensorCores, inputs: Any, out: Any) -> None:
        left, right = (TypedTile.take(machine, 64, 64, "bf16", copies=stages) for _ in inputs)
        pipe = Pipeline.take(machine, stages, consumers=WARPGROUP // WARP)

        def fill() -> None:
            def one(i: Value, _: None) -> None:
                stage, (a, b) = pipe.acquire(i), inputs
                pipe.commit(i, left[stage].copy_from(a, 0, i * 64), right[stage].copy_from(b, 0, i * 64))

            with machine.when(machine.thread % WARPGROUP < WARP):
                machine.loop(chunks, one)

        def multiply() -> None:
            def one(i: Value, total: Fragment) -> Fragment:
                stage = pipe.wait(i)
                total = product(total, left[stage], right[stage])
                if pending:
                    machine.wgmma_wait([], pending=1)
                    pipe.release_before(i)
                else:
                    total = total.wait()
                    pipe.release(i)
                return total

            machine.loop(chunks, one, Fragment.zeros(machine, 64)).wait().store(out, 0, 0)

        machine.roles(Role(warpgroups=1, registers=128, body=multiply), Role(warpgroups=1, registers=24, body=fill))

    found = run(
        body,
        tuple(jnp.asarray(x, jnp.bfloat16) for x in (a, b)),
        spec((64, 64), jnp.float32),
        warpgroups=2,
        shared_bytes=stages * (16384 + 16) + 1024,
        simulate=simulate,
    )
    np.testing.assert_array_equal(found, a @ b.T)  # whole numbers below 2^24


@machines
def test_stages_that_are_used_out_of_turn(simulate):
    """Lanes fill stage 0 twice and stage 1 once, and each use is seen by the other warpgroup."""
    uses = [(0, 0), (1, 0), (0, 1)]

    def body(machine: TensorCores, _: Any, out: Any) -> None:
        room = Shared.take(machine, (2, WARPGROUP), "i32")
        pipe = Pipeline.take(machine, 2, consumers=4, producers=4)
        lane = machine.thread % WARPGROUP

        def use_of(stage: int, number: int) -> Any:
            return pipe.use_of(stage, machine.constant(number, "i32"))

        def fill() -> None:
            for n, (stage, number) in enumerate(uses):
                use_of(stage, number).acquire()
                room.store_int(lane * 10 + n, stage, lane)
                use_of(stage, number).commit()

        def read() -> None:
            for n, (stage, number) in enumerate(uses):
                use_of(stage, number).wait()
                out.store_int(room.load_int(stage, 127 - lane), n, lane)
                use_of(stage, number).release()

        machine.roles(Role(warpgroups=1, registers=128, body=fill), Role(warpgroups=1, registers=128, body=read))

    state = spec((3, WARPGROUP), jnp.int32)
    found = run(body, (), state, warpgroups=2, shared_bytes=2048, simulate=simulate)
    np.testing.assert_array_equal(found, [(127 - np.arange(128)) * 10 + n for n in range(3)])


@machines
def test_rows_outside_of_an_array_are_not_stored(simulate):
    x = matrix(4, 16)

    def body(machine: TensorCores, x: Any, out: Any) -> None:
        inside = PerRow.numbers(machine).map(lambda row: row + 3 < 50)
        load(machine, x).store(out, 1, 3, 8, where=inside)

    state = jnp.full((2, 50, 24), -1.0)
    found = run(body, jnp.asarray(x), state, simulate=simulate)
    want = np.full((2, 50, 24), -1.0, np.float32)
    want[1, 3:, 8:] = x[:47]
    np.testing.assert_array_equal(found, want)


@machines
def test_words_of_rows_are_an_operand(simulate):
    """E4M3 [64, 128], of which a lane loads words of its two rows, by itself transposed."""
    a = np.random.default_rng(5).integers(-4, 5, (64, 128)).astype(jnp.float8_e4m3fn)

    def body(machine: TensorCores, a: Any, out: Any) -> None:
        tile = TypedTile.take(machine, 64, 128, "e4m3")
        full = Pipeline.take(machine, 1, consumers=4)
        with machine.when(machine.thread < WARP):
            full.commit(machine.constant(0, "i32"), tile.copy_from(a, 0, 0))
        full.wait(machine.constant(0, "i32"))
        column = machine.thread % 4 * 4
        one, other = ([a.load_bytes(row, column + 16 * i) for i in range(8)] for row in PerRow.numbers(machine).values)
        operand = LeftOperand.of_rows(one, other, "e4m3")
        product(None, operand, tile).wait(operand).store(out, 0, 0)

    found = run(body, jnp.asarray(a.view(np.uint8)), spec((64, 64), jnp.float32), shared_bytes=9300, simulate=simulate)
    wide = a.astype(np.float32)
    np.testing.assert_array_equal(found, wide @ wide.T)


def refused(body: Any, message: str, source: Any = None) -> None:
    inputs = jnp.zeros((64, 64), jnp.bfloat16) if source is None else source
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"TypeError: .*{message}"):
        run(body, inputs, spec((64, 64), jnp.float32), shared_bytes=1 << 16, simulate=True)


def test_a_tile_is_copied_from_an_array_of_its_dtype():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        TypedTile.take(machine, 64, 64, "f16").copy_from(x, 0, 0)

    refused(body, "a tile of f16 is copied from an array of bfloat16")


def test_a_copy_fills_rows_of_128_bytes():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        TypedTile.take(machine, 64, 128, "bf16").copy_from(x, 0, 0)

    refused(body, "a copy fills rows of 128 bytes, these have 256")


@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (60, 64)])
def test_a_tile_is_made_of_whole_atoms(rows, columns):
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        TypedTile.take(machine, rows, columns, "bf16")

    refused(body, f"a tile of {rows} rows of {columns} bf16: write rows in eights, and columns in 64s")


def test_both_operands_of_a_product_have_one_dtype():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        one, other = (TypedTile.take(machine, 64, 64, dtype) for dtype in ("f16", "bf16"))
        product(None, one, other)

    refused(body, "a product of f16 and bf16")


def test_a_left_operand_has_64_rows():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        one, other = (TypedTile.take(machine, rows, 64, "bf16") for rows in (128, 64))
        product(None, one, other)

    refused(body, "a left operand of 128 rows: a warpgroup multiplies 64")


def test_numbers_of_other_columns_are_refused():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        Fragment.zeros(machine, 32).map(lambda a, b: a + b, PerColumn.load(machine, 64, x, 0, 0))

    refused(body, "numbers of other columns than a fragment's 32")


def test_a_fragment_does_not_become_an_operand_of_eight_bits():
    def body(machine: TensorCores, x: Any, out: Any) -> None:
        Fragment.zeros(machine, 32).operand("e4m3")

    refused(body, "a fragment becomes an operand of f16 or bf16, got 'e4m3'")
