"""The kernels' number formats, compared with the library's of the same names: sizes, and bytes of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax import formats as xla
from pallas_kernels.formats import KEY_FORMATS, KV_FORMATS
from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from tests.support.kernel_cases import same_bytes
from tests.support.lane_kernels import F32, machines, run, spec

NOPE_DIM, ROPE_DIM, KEY_DIM = 448, 64, 128
ROWS = 8
kv_formats = pytest.mark.parametrize("name", KV_FORMATS)
key_formats = pytest.mark.parametrize("name", KEY_FORMATS)
teams = pytest.mark.parametrize("team", [WARP, WARPGROUP])


def draw(dim: int) -> np.ndarray:
    """Return rows of all magnitudes, one of zeros, and one of ones and minus ones."""
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((ROWS, dim)) * 2.0 ** rng.integers(-20, 20, (ROWS, 1))
    x[0], x[1] = 0, 1
    x[1, ::2] = -1
    return x.astype(F32)


def place(machine: Machine, team: int) -> Any:
    """Return the number of the row that a lane's team has."""
    return machine.block(0) * (WARPGROUP // team) + machine.thread // team


def grid(team: int) -> tuple[int]:
    return (ROWS * team // WARPGROUP,)


def specs(row: Any) -> Any:
    return jax.tree.map(lambda leaf: spec((ROWS, *leaf.shape), leaf.dtype), row)


def assert_same_rows(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        same_bytes(jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))


def test_both_have_the_same_formats():
    assert list(KV_FORMATS) == list(xla.KV_FORMATS)
    assert list(KEY_FORMATS) == list(xla.INDEXER_FORMATS)


@kv_formats
def test_sizes_of_key_rows(name):
    form, row = KV_FORMATS[name], xla.KV_FORMATS[name].row(NOPE_DIM, ROPE_DIM)
    assert form.itemsize == row.nope.dtype.itemsize
    assert form.num_scales(NOPE_DIM) == (0 if row.scale is None else row.scale.size)
    assert form.scale_is_power_of_two == (row.scale is None or row.scale.dtype == jnp.uint8)
    assert form.unsupported(NOPE_DIM, ROPE_DIM) is None
    for dims in ((NOPE_DIM - 2, ROPE_DIM), (NOPE_DIM, ROPE_DIM - 2)):
        assert "divisible by" in str(form.unsupported(*dims))


def test_tiles_are_whole():
    assert KV_FORMATS["fp8_tile64"].unsupported(100, 8) == "the NoPE dim must be divisible by 64, got 100"
    assert KEY_FORMATS["nvfp4"].unsupported(40) == "the key dim must be divisible by 16, got 40"
    assert KEY_FORMATS["mxfp4"].unsupported(48) == "the key dim must be divisible by 32, got 48"
    assert KEY_FORMATS["bf16"].unsupported(6) == "the key dim must be divisible by 4, got 6"


@key_formats
def test_queries_are_rounded_as_the_library_says(name):
    assert KEY_FORMATS[name].rounds_queries == xla.INDEXER_FORMATS[name].rounds_queries
    assert KEY_FORMATS[name].unsupported(KEY_DIM) is None


@machines
@teams
@kv_formats
def test_key_rows(name, team, simulate):
    """Encoding and decoding are defined exactly, so no bit may differ."""
    form, theirs, x = KV_FORMATS[name], xla.KV_FORMATS[name], draw(NOPE_DIM + ROPE_DIM)
    want = theirs.encode(jnp.asarray(x), ROPE_DIM)

    def encode(machine: Machine, x: Any, rows: Any) -> None:
        row, n = Row(Team(machine, team), NOPE_DIM + ROPE_DIM), place(machine, team)
        form.store(row, row.load(x, n), rows, n, where=True)

    def decode(machine: Machine, rows: Any, out: Any) -> None:
        row, n = Row(Team(machine, team), NOPE_DIM + ROPE_DIM), place(machine, team)
        row.store(out, form.load(row, rows, n, where=True), n)

    options: Any = dict(simulate=simulate, grid=grid(team))
    assert_same_rows(run(encode, jnp.asarray(x), specs(theirs.row(NOPE_DIM, ROPE_DIM)), **options), want)
    same_bytes("decoded", run(decode, want, spec(x.shape, F32), **options), np.asarray(theirs.decode(want)))


@machines
@teams
@key_formats
def test_keys(name, team, simulate):
    form, theirs, x = KEY_FORMATS[name], xla.INDEXER_FORMATS[name], draw(KEY_DIM)

    def encode(machine: Machine, x: Any, rows: Any) -> None:
        row, n = Row(Team(machine, team), KEY_DIM), place(machine, team)
        form.store(row, row.load(x, n), rows, n, where=True)

    got = run(encode, jnp.asarray(x), specs(theirs.row(KEY_DIM)), simulate=simulate, grid=grid(team))
    assert_same_rows(got, theirs.encode(jnp.asarray(x)))
