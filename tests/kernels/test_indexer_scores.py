"""The indexer's score kernel against its XLA form, on both machines."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.formats import INDEXER_FORMATS, KeyRows, KVRows
from dsv4jax.layer.indexer import scores
from pallas_kernels.language.launch import launch
from pallas_kernels.language.target import compute_capability
from pallas_kernels.scores import sm90
from pallas_kernels.scores.call import indexer_scores, unsupported_scores
from pallas_kernels.scores.parts import Inputs
from tests.support.machines import MACHINES

HEADS, DIM, PER_BLOCK = 64, 128, 32
FORMATS = ("mxfp4", "nvfp4")
machines = pytest.mark.parametrize("simulate", MACHINES)
formats = pytest.mark.parametrize("key_format", FORMATS)
LOWEST = np.finfo(np.float32).min
# Of sum_h |w_h| |q_h| |k_s|. A head's dot is summed in f16, in up to 8 steps of 2^-12 each, and is mostly a tenth of
# |q_h| |k_s|; over 64 heads such errors mostly cancel.
TOLERANCE = 1e-4
NAN_SCALE = {"mxfp4": 0xFF, "nvfp4": 0x7F}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(kw_only=True)
class Rows:
    """Encoded rows that a test may change."""

    codes: Any
    scale: Any


@dataclasses.dataclass(kw_only=True)
class Case:
    """A batch whose requests hold ``max_blocks`` blocks each, scattered over a pool with free blocks of NaN."""

    key_format: str
    visible: np.ndarray  # [B, T]
    max_blocks: int
    seed: int = 0
    spread: int = 3  # binades up and down of the scales

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        batch, tokens = self.visible.shape
        requests = batch + 2
        num_blocks = requests * self.max_blocks + 3
        self.queries, self.keys = self.rows(batch, tokens, HEADS), self.rows(2, num_blocks, PER_BLOCK)
        self.weights = self.rng.standard_normal((batch, tokens, HEADS)).astype(np.float32)
        order = self.rng.permutation(num_blocks).astype(np.int32)
        self.block_table = order[3:].reshape(requests, self.max_blocks)
        self.keys.scale[:, order[:3]] = NAN_SCALE[self.key_format]
        self.keys.scale[0] = NAN_SCALE[self.key_format]  # the other layer
        self.slots = self.rng.permutation(requests)[:batch].astype(np.int32)

    def rows(self, *shape: int) -> Rows:
        """Codes of every kind; scales around 1."""
        one, binade, groups = (127, 1, 4) if self.key_format == "mxfp4" else (0x38, 8, 8)
        scale = one + self.rng.integers(-self.spread * binade, self.spread * binade + 1, (*shape, groups))
        codes = self.rng.integers(0, 256, (*shape, DIM // 2))
        return Rows(
            codes=codes.astype(np.uint8), scale=np.clip(scale, 1, 0x7E if groups == 8 else 254).astype(np.uint8)
        )

    def arrays(self) -> tuple[Any, ...]:
        layer = np.ones(1, np.int32)
        return self.queries, self.weights, self.keys, layer, self.block_table, self.slots, self.visible

    def run(self, simulate: bool, **options: Any) -> np.ndarray:
        call = functools.partial(indexer_scores, key_format=self.key_format, simulate=simulate, **options)
        return np.asarray(jax.jit(call)(*jax.tree.map(jnp.asarray, self.arrays())))

    @property
    def seen(self) -> np.ndarray:
        return np.arange(self.max_blocks * PER_BLOCK) < self.visible[..., None]

    def xla(self) -> np.ndarray:
        arrays = self.queries, self.weights, self.keys, self.block_table, self.slots, self.visible
        return np.array(_xla(self.key_format, *jax.tree.map(jnp.asarray, arrays)))

    def magnitude(self) -> np.ndarray:
        """sum_h |w_h| |q_h| |k_s|, f64 [B, T, max_entries]."""
        decode = jax.jit(INDEXER_FORMATS[self.key_format].decode)
        queries, keys = (np.asarray(decode(KeyRows(codes=x.codes, scale=x.scale))) for x in (self.queries, self.keys))
        norms = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in (queries, keys[1])]
        heads = np.sum(np.abs(self.weights) * norms[0], -1)
        return heads[..., None] * norms[1][self.block_table[self.slots]].reshape(len(heads), 1, -1)

    def check(self, got: np.ndarray) -> None:
        seen = self.seen  # what a GPU leaves unwritten may be anything
        error = np.abs(got[seen] - self.xla()[seen]) / self.magnitude()[seen]
        assert np.max(error, initial=0.0) < TOLERANCE


@functools.cache
def _plan(key_format: str) -> d4.CachePlan:
    return d4.plan_cache(
        d4.DSV4Config.flash(), max_requests=1, max_context=128, num_blocks=1, indexer_format=key_format
    )


@functools.partial(jax.jit, static_argnums=0)
def _xla(key_format: str, queries: Rows, weights: Any, keys: Rows, block_table: Any, slots: Any, visible: Any) -> Any:
    stored = KeyRows(codes=keys.codes, scale=keys.scale)
    # Of the entries themselves only the number per block is asked for.
    pool = PagedPool(entries=KVRows(nope=keys.codes, rope=keys.codes, scale=None), indexer_keys=stored)
    layer = PooledLayer(
        pool=pool, index=jnp.asarray(1, jnp.int32), block_table=block_table, slots=slots, plan=_plan(key_format)
    )
    decoded = INDEXER_FORMATS[key_format].decode(KeyRows(codes=queries.codes, scale=queries.scale))
    return scores(decoded, weights, layer, visible)


def visible(seed: int, batch: int, tokens: int, most: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most + 1, (batch, tokens)).astype(np.int32)


@machines
@formats
@pytest.mark.parametrize(("batch", "tokens", "max_blocks"), [(1, 1, 4), (3, 1, 5), (2, 3, 5)])
def test_scores(key_format, batch, tokens, max_blocks, simulate):
    seen = visible(batch, batch, tokens, max_blocks * PER_BLOCK)
    seen[0, -1] = max_blocks * PER_BLOCK
    case = Case(key_format=key_format, visible=seen, max_blocks=max_blocks, seed=tokens)
    case.check(case.run(simulate))


@machines
@formats
@pytest.mark.parametrize(
    "tuning",
    [
        sm90.Tuning(warpgroups=1, stages=2, blocks=7),
        sm90.Tuning(warpgroups=3, stages=1, blocks=2),
        sm90.Tuning(warpgroups=2, overlapped=True, blocks=3),
    ],
    ids=["1x7", "3x2", "2x3 overlapped"],
)
def test_any_split(key_format, tuning, simulate):
    """Blocks that take tiles of several requests, and requests that several blocks serve; more rows than a warp."""
    seen = visible(0, 37, 1, 3 * PER_BLOCK)
    seen[::3], seen[5:11] = 0, 0
    case = Case(key_format=key_format, visible=seen, max_blocks=3)
    case.check(case.run(simulate, tuning=tuning))


@machines
def test_many_tokens(simulate):
    case = Case(key_format="mxfp4", visible=visible(1, 2, 9, 64), max_blocks=2)
    case.check(case.run(simulate))


@machines
@formats
def test_groups_of_all_magnitudes(key_format, simulate):
    """Keys and queries whose groups are up to 2^24 apart (nvfp4: as far as its scales reach)."""
    case = Case(key_format=key_format, visible=np.full((2, 1), 64, np.int32), max_blocks=2, spread=12)
    case.check(case.run(simulate))


@machines
def test_the_ends_of_ue8m0(simulate):
    """Rows near both ends of f32. What overflows is infinite, and never -inf."""
    case = Case(key_format="mxfp4", visible=np.full((1, 1), 32, np.int32), max_blocks=1, spread=0)
    rows = case.keys.scale[1, case.block_table[case.slots[0], 0]]
    rows[:16] = 3
    rows[16:] = 253
    case.weights[:] = -4.0
    got = case.run(simulate)[0, 0]
    assert np.all(got[16:] == LOWEST)
    error, magnitude = np.abs(got - case.xla()[0, 0])[:16], case.magnitude()[0, 0, :16]
    np.testing.assert_array_less(error, TOLERANCE * magnitude + 1e-37)  # either may flush what is subnormal


@machines
@formats
def test_nan_stays_where_it_is(key_format, simulate):
    case = Case(key_format=key_format, visible=np.full((3, 2), 96, np.int32), max_blocks=3)
    want, magnitude = case.xla(), case.magnitude()
    bad = [0, 13, 31, 32, 77, 95]
    for n, entry in enumerate(bad):
        block = case.block_table[case.slots[0], entry // PER_BLOCK]
        case.keys.scale[1, block, entry % PER_BLOCK, n % case.keys.scale.shape[-1]] = NAN_SCALE[key_format]
    want[0][:, bad] = np.inf
    case.queries.scale[1, 0, 5, -1] = NAN_SCALE[key_format]
    case.weights[1, 1, 63] = np.nan
    case.weights[2, 0, 0] = -np.inf
    want[1], want[2, 0] = np.inf, np.inf
    got = case.run(simulate)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    assert np.all(got[np.isinf(want)] > 0)
    finite = np.isfinite(want)
    assert np.max(np.abs(got[finite] - want[finite]) / magnitude[finite]) < TOLERANCE


@machines
@formats
def test_blocks_that_are_not_there(key_format, simulate):
    """No block, and numbers that are none: their entries score 0, the others are not disturbed."""
    case = Case(key_format=key_format, visible=np.full((2, 1), 160, np.int32), max_blocks=5)
    want, magnitude = case.xla(), case.magnitude()
    for b, block, number in ((0, 1, -1), (0, 4, 1 << 30), (1, 0, -(1 << 30)), (1, 2, case.keys.codes.shape[1])):
        case.block_table[case.slots[b], block] = number
        want[b, 0, block * PER_BLOCK : (block + 1) * PER_BLOCK] = 0.0
    got = case.run(simulate)
    np.testing.assert_array_equal(got[want == 0], 0.0)
    assert np.max(np.abs(got - want) / magnitude) < TOLERANCE


@machines
@formats
def test_nothing_is_written_elsewhere(key_format, simulate):
    """Padding writes nothing, nor does a request past the last tile of its visible entries."""
    seen = np.array([[70], [90], [96], [0], [-5]], np.int32)
    case = Case(key_format=key_format, visible=seen, max_blocks=3)
    case.slots[1], case.slots[2] = -1, len(case.block_table)
    inputs = Inputs(**dict(zip([f.name for f in dataclasses.fields(Inputs)], case.arrays(), strict=True)))
    tuning = sm90.Tuning(warpgroups=1, stages=2, blocks=3)
    poisoned = np.full((5, 1, 96), np.nan, np.float32)
    call = functools.partial(
        launch,
        functools.partial(sm90.body, key_format=key_format, tuning=tuning, blocks=3),
        name="indexer_scores",
        grid=(3,),
        shared_bytes=sm90.shared_bytes(key_format, 1, tuning),
        simulate=simulate,
    )
    run = jax.jit(lambda inputs, out: call(inputs=inputs, state=out))
    got = np.asarray(run(jax.tree.map(jnp.asarray, inputs), jnp.asarray(poisoned)))
    assert np.all(np.isfinite(got[0, 0, :70]))
    assert np.all(np.isnan(got[1:]))


@machines
def test_no_entries(simulate):
    case = Case(key_format="mxfp4", visible=np.zeros((2, 1), np.int32), max_blocks=2)
    assert case.run(simulate).shape == (2, 1, 64)


def test_sizes_it_cannot_serve():
    sizes = dict(heads=64, key_dim=128, entries_per_block=32)
    assert all(unsupported_scores(key_format=name, **sizes) is None for name in FORMATS)
    for name, size in dict(heads=32, key_dim=64, entries_per_block=128).items():
        reason = unsupported_scores(key_format="mxfp4", **sizes | {name: size})
        assert name in (reason or "")
    assert "key_format" in (unsupported_scores(key_format="bf16", **sizes) or "")
    case = Case(key_format="mxfp4", visible=np.zeros((1, 1), np.int32), max_blocks=1)
    with pytest.raises(ValueError, match="key_format"):
        indexer_scores(*jax.tree.map(jnp.asarray, case.arrays()), key_format="bf16")
    case.key_format = "nvfp4"
    with pytest.raises(AssertionError, match="shape"):
        case.run(True)


def test_targets_without_a_kernel():
    if compute_capability() == (9, 0):
        pytest.skip("this device has a kernel")
    case = Case(key_format="mxfp4", visible=np.zeros((1, 1), np.int32), max_blocks=1)
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        case.run(False)
