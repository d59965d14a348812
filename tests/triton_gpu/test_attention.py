"""Decode attention in Triton, compared with NumPy on the decoded rows: the cases of the other kernels of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import attention_cases
from tests.support.attention_cases import Case, make
from tests.support.cases import first_of
from tests.support.triton import runs_here

pytestmark = runs_here()


def run(case: Case, inputs: Any, *, simulate: bool = False) -> np.ndarray:
    from pallas_kernels.triton_gpu.attention import Tiles, decode_attention

    del simulate
    given = getattr(case.layout, "sizes", None)
    tiles = None if given is None else Tiles(**dict(zip(("heads", "keys", "warps", "parts"), given, strict=True)))

    @jax.jit
    def attend(inputs: Any) -> jax.Array:
        return decode_attention(inputs, kv_format=case.kv_format, dtype=case.dtype, tiles=tiles)

    return np.asarray(attend(inputs)).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Shape:
    """``Tiles``, which cannot be imported where the extra is missing: heads, keys, warps, parts."""

    sizes: tuple[int, int, int, int]


def shaped(*sizes: int, **options: Any) -> Case:
    shape: Any = Shape(sizes)  # type: ignore[arg-type]
    return Case(layout=shape, **options)


FRESH = dict(tokens=8, n_win=100, kv_format="bf16", dtype=jnp.bfloat16)
HCA = dict(entries="all", ratio=128, per_block=1, heads=16, turned=False)
CASES = {
    "ragged": shaped(64, 32, 8, 1, lengths=(300, 0, -1, 130)),
    "all entries in parts": shaped(32, 32, 8, 3, lengths=(300, 0, -1, 130), entries="all"),
    "several tokens": shaped(32, 16, 8, 2, lengths=(140, 126, 0), tokens=2, kv_format="fp8_tile64"),
    "window alone": shaped(16, 32, 4, 2, lengths=(300, 5), entries=None),
    "another window": shaped(32, 32, 8, 2, lengths=(140, 126), **FRESH),
    "one entry a block": shaped(16, 32, 4, 2, lengths=(900, 127, 128), **HCA),
    "more parts than tiles": shaped(16, 32, 4, 9, lengths=(20, 3)),
    "bf16 queries, 128 heads": shaped(64, 64, 8, 1, lengths=(129, 64), heads=128, q_dtype=jnp.bfloat16),
    "as it chooses": Case(lengths=(900, 127), layout=None),
}


@pytest.mark.parametrize("name", first_of(CASES))
def test_attention(name, monkeypatch):
    monkeypatch.setattr(attention_cases, "run", run)
    attention_cases.check(CASES[name], simulate=False)


@pytest.mark.parametrize("parts", first_of([1, 3], count=0))
def test_no_pick_and_no_table(parts):
    """Picks of -1, blocks that do not exist, and ring rows with other positions do not count as keys."""
    case = shaped(32, 32, 8, parts, lengths=(200, 200), seed=3)
    inputs, _ = make(case)
    # The same number of tiles, so that sums run in the same order.
    no_picks = dataclasses.replace(inputs, picks=jnp.full_like(inputs.picks, -1))
    alone = run(case, no_picks)
    no_blocks = dataclasses.replace(inputs, block_table=jnp.full_like(inputs.block_table, -1))
    np.testing.assert_array_equal(run(case, no_blocks), alone)
    empty = dataclasses.replace(no_picks, pos=jnp.full_like(inputs.pos, -1))
    np.testing.assert_array_equal(run(case, empty), 0.0)


@pytest.mark.parametrize("parts", first_of([2, 1], count=0))
def test_nan_is_loud_and_stays_in_its_request(parts):
    case = shaped(32, 32, 8, parts, lengths=(150, 150), entries="all")
    inputs, _ = make(case)
    slot, layer = int(inputs.slots[1]), int(inputs.layer[0])
    rope = inputs.window.rope.at[layer, slot, 9, 0].set(jnp.nan)
    broken = dataclasses.replace(inputs, window=dataclasses.replace(inputs.window, rope=rope))
    found, before = run(case, broken), run(case, inputs)
    np.testing.assert_array_equal(found[0], before[0])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_format="f32"), "kv_format must be one of"),
        (dict(heads=24), "num_heads must be a multiple of 16, got 24"),
    ],
)
def test_what_it_does_not_serve(change, message):
    case = dataclasses.replace(Case(lengths=(3,), layout=None), **change)
    with pytest.raises(ValueError, match=message):
        run(case, make(case)[0])
