"""Top-k in Triton, compared with a stable sort in NumPy: the cases of the other kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.layer.ops import TOP_K
from tests.kernels.test_top_k import F32, normal, rows_of_every_kind, wanted
from tests.support.cases import first_of
from tests.support.machines import requires_gpu
from tests.support.triton import runs_here

pytestmark = runs_here()

# Scores of a block: a row is several parts, a part and a rest, or one part of the size that is chosen.
SIZES = first_of([4096, 512, None])


def run(scores: np.ndarray, visible: Any, k: int, size: int | None) -> np.ndarray:
    from pallas_kernels.triton_gpu.top_k import Parts, top_k

    parts = None if size is None else Parts(size=size)
    visible = np.broadcast_to(np.asarray(visible, np.int32), len(scores))
    return np.asarray(jax.jit(lambda *rows: top_k(*rows, k=k, parts=parts))(scores, visible))


def run_and_check(scores: np.ndarray, visible: Any, k: int, size: int | None = None) -> None:
    """Compare with NumPy. Invisible scores are NaN and infinity."""
    visible = np.broadcast_to(np.asarray(visible, np.int32), len(scores))
    position = np.arange(scores.shape[1])
    poisoned = np.where(position < visible[:, None], scores, np.where(position % 2, F32(np.nan), F32(np.inf)))
    got = run(poisoned, visible, k, size)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, wanted(scores, visible, k))


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_every_kind(size):
    run_and_check(rows_of_every_kind(5000), 5000, 64, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scores", first_of([4999, 4997, 5000]))
def test_any_number_of_scores_is_visible(scores, size):
    k = 70
    visible = [
        0,
        1,
        3,
        k - 1,
        k,
        k + 1,
        k + 3,
        511,
        512,
        513,
        1023,
        scores // 2 + 1,
        scores - 1,
        scores,
        scores + 1,
        -5,
    ]
    rows = normal(len(visible), scores, seed=scores)
    rows[::5] = np.round(rows[::5] * 4) / 4
    run_and_check(rows, visible, k, size)


@pytest.mark.parametrize("k", first_of([600, 1, 2, 129, 2048]))
def test_any_number_of_picks(k):
    """Lists of a part are shorter than it, however small a part is asked for."""
    run_and_check(normal(3, 5000, seed=k), [5000, k + 1, 2 * k], k, size=128)


@pytest.mark.parametrize("size", [1, 100])
def test_fewer_scores_than_picks(size):
    run_and_check(normal(3, size), [size, size - 1, 0], 128)


def test_no_rows_and_no_scores():
    assert run(np.zeros((0, 8), F32), 0, 4, None).shape == (0, 4)
    np.testing.assert_array_equal(run(np.zeros((3, 0), F32), 0, 4, None), np.full((3, 4), -1))


def test_what_xla_picks():
    """Through the op. Zeros of both signs are equal, and NaN of either sign ranks first."""
    scores, visible = normal(4, 3000, seed=3), np.array([[3000, 2999], [700, 64]], np.int32)
    scores[1:3] = np.round(scores[1:3] * 2) / 2
    scores[3, ::40], scores[3, 7::40] = np.nan, -F32(np.nan)
    given = jnp.asarray(scores.reshape(2, 2, 3000)), jnp.asarray(visible), 64
    got, want = (TOP_K[name].pick(*given) for name in ("triton", "xla"))
    np.testing.assert_array_equal(got, want)


def test_what_is_refused():
    from pallas_kernels.triton_gpu import top_k

    scores, visible = jnp.zeros((2, 8)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="takes a k from 1 to"):
        top_k(scores, visible, k=0)
    with pytest.raises(ValueError, match="size must be a power of two from 128 to 16384, got 500"):
        run(normal(2, 8), 8, 1, 500)
    with pytest.raises(AssertionError):
        top_k(scores, visible.astype(jnp.float32), k=1)


@requires_gpu
@pytest.mark.parametrize(
    ("rows", "size", "k"),
    [(64, 8192, 512), (64, 8224, 512), (1, 32768, 1024), (17, 32768, 1024), (2, 262_143, 2048), (40, 50_001, 1024)],
)
def test_real_sizes(rows, size, k):
    scores = normal(rows, size, seed=size)
    visible = np.random.default_rng(rows).integers(0, size + 1, rows)
    visible[: rows // 2 + 1] = size
    run_and_check(scores, visible, k)
    kinds = rows_of_every_kind(size)
    kinds = kinds[:rows] if rows < len(kinds) else np.tile(kinds, (-(-rows // len(kinds)), 1))[:rows]
    run_and_check(kinds, size, k)
