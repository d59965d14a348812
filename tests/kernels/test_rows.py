"""Rows that are spread over the lanes of a team, and the results of loads in lanes that do not load."""

from __future__ import annotations

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.language.lanes import Buffer, Row, Team
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, select
from pallas_kernels.rows import packed_e2m1
from tests.support.cases import first_of
from tests.support.lane_kernels import F32, machines, run, spec


@machines
@pytest.mark.parametrize("team", [8, WARP, WARPGROUP])
@pytest.mark.parametrize("dim", first_of([4, 136, 516, 8, 128, 204, 512], count=3))
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16])
def test_a_row_of_any_size(dtype, dim, team, simulate):
    """Channels [first, first + dim) of one array are copied to [0, dim) of another.

    What follows them does not change.
    """
    first, rows, teams = 12, 7, WARPGROUP // team
    rng = np.random.default_rng(dim)
    source = rng.standard_normal((rows, first + dim + 4)).astype(dtype)
    other = rng.standard_normal((rows, dim)).astype(dtype)
    kept = rng.standard_normal((rows, dim + 8)).astype(dtype)

    def body(machine: Machine, inputs: dict[str, Buffer], state: dict[str, Buffer]) -> None:
        row = Row(Team(machine, team), dim)
        n = machine.block(0) * teams + machine.thread // team
        inside = n < rows
        x = row.load(inputs["source"], n, first=first, where=inside)
        row.store(state["kept"], row.map(lambda a, b: a * 2.0 - b, x, row.constant(1.0)), n, where=inside)
        # Odd rows of the one array, even rows of the other.
        picked = row.load_either(
            (n & 1) > 0, (inputs["source"], (n,)), (inputs["other"], (n,)), first=(first, 0), where=inside
        )
        row.store(state["picked"], picked, n, where=inside)
        bound = dim // 8 * VECTOR
        below = [select(row.before(i, bound), machine.constant(1.0, "f32"), 0.0) for i in range(row.steps)]
        row.store(state["below"], [[flag] * VECTOR for flag in below], n, where=inside)

    out = run(
        body,
        {"source": jnp.asarray(source), "other": jnp.asarray(other)},
        {"kept": kept, "picked": np.zeros((rows, dim), dtype), "below": np.zeros((rows, dim), dtype)},
        simulate=simulate,
        grid=(-(-rows // teams),),
    )
    part = source[:, first : first + dim]
    want = kept.copy()
    want[:, :dim] = (part.astype(F32) * 2 - 1).astype(dtype)
    assert out["kept"].tobytes() == want.tobytes()
    odd = (np.arange(rows) % 2 == 1)[:, None]
    assert out["picked"].tobytes() == np.where(odd, part, other).tobytes()
    below = np.broadcast_to(np.arange(dim) < dim // 8 * VECTOR, (rows, dim))
    np.testing.assert_array_equal(out["below"].astype(bool), below)


@machines
@pytest.mark.parametrize("otherwise", [1 / 3, -1e9, -math.inf])
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("where", ["some", False])
def test_what_a_load_gives_otherwise(where, dtype, otherwise, simulate):
    """Lanes that do not load get ``otherwise``, rounded to the array's dtype. Their index is far out of bounds."""
    source = np.random.default_rng(27).standard_normal((WARPGROUP, VECTOR)).astype(dtype)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        there = (lane % 5) > 0
        index = select(there, lane, lane + 1000000)
        got = inputs.load_floats(index, 0, where=there if where == "some" else False, otherwise=otherwise)
        out.store_floats(got, lane, 0)

    got = run(body, jnp.asarray(source), spec(source.shape, F32), simulate=simulate)
    there = (np.arange(WARPGROUP) % 5 > 0) & (where == "some")
    np.testing.assert_array_equal(got, np.where(there[:, None], source, dtype(otherwise)).astype(F32))


@machines
@pytest.mark.parametrize("dtypes", [(F32, F32), (ml_dtypes.bfloat16,) * 2, (ml_dtypes.bfloat16, F32)])
@pytest.mark.parametrize("where", ["some", False])
def test_what_a_row_is_otherwise(where, dtypes, simulate):
    """``otherwise`` is rounded to the dtype of the array that would have been read, also past the end of the row."""
    rows, dim, otherwise = 7, 136, -1 / 3
    rng = np.random.default_rng(28)
    a, b = (rng.standard_normal((rows, dim)).astype(dtype) for dtype in dtypes)

    def body(machine: Machine, inputs: list[Buffer], out: list[Buffer]) -> None:
        row = Row(Team(machine, WARP), dim)
        n = machine.block(0)
        there = (n % 3) > 0 if where == "some" else False
        at_a, at_b = (inputs[0], (n,)), (inputs[1], (n,))
        every = [
            row.load(inputs[0], n, where=there, otherwise=otherwise),
            row.load_either((n & 1) > 0, at_a, at_b, where=there, otherwise=otherwise),
            row.load_either(True, at_a, at_b, where=there, otherwise=otherwise),
            row.load_either(False, at_a, at_b, where=there, otherwise=otherwise),
        ]
        with machine.when(machine.thread < WARP):
            for buffer, values in zip(out, every, strict=True):
                for step, channel in enumerate(row.channel):
                    buffer.store_floats(values[step], n, channel)

    width = 2 * VECTOR * WARP  # of two steps, the second one mostly past the end
    out = run(body, [jnp.asarray(a), jnp.asarray(b)], [spec((rows, width), F32)] * 4, simulate=simulate, grid=(rows,))
    n = np.arange(rows)[:, None]
    there = np.broadcast_to((n % 3 > 0) & (where == "some"), (rows, dim))

    def loaded(source: np.ndarray) -> np.ndarray:
        want = np.full((rows, width), source.dtype.type(otherwise), F32)
        want[:, :dim][there] = source.astype(F32)[there]
        return want

    either = np.where(n % 2 == 1, loaded(a), loaded(b))
    for got, want in zip(out, [loaded(a), either, loaded(a), loaded(b)], strict=True):
        np.testing.assert_array_equal(got, want)


@machines
def test_one_element_of_a_bf16_array(simulate):
    """A word holds two, so that a single one is loaded by itself, at odd places too."""
    source = np.random.default_rng(29).standard_normal(WARPGROUP + 1).astype(ml_dtypes.bfloat16)

    def body(machine: Machine, inputs: Buffer, out: Buffer) -> None:
        lane = machine.thread
        (value,) = inputs.load_floats(lane + 1, count=1, where=lane != 5, otherwise=-0.5)
        out.store_floats([value], lane)

    got = run(body, jnp.asarray(source), spec((WARPGROUP,), F32), simulate=simulate)
    want = source[1:].astype(F32)
    want[5] = -0.5
    np.testing.assert_array_equal(got, want)


@machines
@pytest.mark.parametrize("is_clipped", [False, True])
def test_e2m1_codes_are_the_nearest_and_of_two_the_even_one(is_clipped, simulate):
    """At every tie, beside it, at the ends, and at random; by fours and by eights, with signs at every place."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)
    ends = np.array([0.0, 1e-45, 1.0, 2.0, 4.0, 6.0, 6.5, 7.5, 3e38, np.inf], F32)
    some = np.random.default_rng(31).uniform(0, 7, 133).astype(F32)
    x = np.concatenate([ties, np.nextafter(ties, F32(0)), np.nextafter(ties, F32(8)), ends, some])
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, -len(x) % WARPGROUP))
    x = np.stack([np.roll(x, 11 * n) for n in range(8)], 1)
    limited = np.clip(x, F32(-6), F32(6))

    def body(machine: Machine, inputs: Buffer, out: dict[str, Buffer]) -> None:
        lane = machine.block(0) * WARPGROUP + machine.thread
        values = [x for first in (0, 4) for x in inputs.load_floats(lane, first)]
        out["fours"].store_int(packed_e2m1(values[:4], is_clipped=is_clipped), lane)
        out["eights"].store_int(packed_e2m1(values, is_clipped=is_clipped), lane)

    outs = {name: spec((len(x),), np.int32) for name in ("fours", "eights")}
    given = jnp.asarray(x if is_clipped else limited)
    got = run(body, given, outs, simulate=simulate, grid=(len(x) // WARPGROUP,))
    codes = limited.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    want = (codes.astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(1, dtype=np.uint32)
    np.testing.assert_array_equal(got["fours"], (want & 0xFFFF).view(np.int32))
    np.testing.assert_array_equal(got["eights"], want.view(np.int32))
