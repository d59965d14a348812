"""The kernels that convert queries, compared with the formulas on both machines, and readers that use their results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS, KeyRows
from dsv4jax.layer.attention import attention_queries
from dsv4jax.layer.dense import hadamard
from dsv4jax.layer.ops import INDEXER_SCORES
from dsv4jax.rope import apply_rope, packed_angles, rope_frequencies
from tests.support.cases import first_of
from tests.support.driver import ids
from tests.support.kernel_cases import same_bytes
from tests.support.machines import BACKENDS, MACHINES

FORMATS = "mxfp4", "nvfp4"
backends = pytest.mark.parametrize("backend", BACKENDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a call."""

    lead: tuple[int, int, int]  # B, T, H
    head_dim: int = 512
    key_dim: int = 128
    rope_dim: int = 64

    @property
    def freqs(self) -> np.ndarray:
        cfg = dataclasses.replace(d4.DSV4Config.flash(), rope_dim=self.rope_dim)
        return rope_frequencies(cfg, d4.AttentionType.CSA)

    def draw(self, dim: int) -> tuple[jax.Array, jax.Array]:
        """Return (product, positions) with rows of all magnitudes, a row of zeros and a token of padding."""
        rng = np.random.default_rng(dim)
        product = rng.standard_normal((*self.lead, dim)) * 2.0 ** rng.integers(-20, 20, (*self.lead, 1))
        product[0, 0, 1] = 0
        positions = rng.integers(0, 1 << 20, self.lead[:2])
        positions[-1, -1] = -1
        return jnp.asarray(product, jnp.float32), jnp.asarray(positions, jnp.int32)


SIZES = [
    Size(lead=(3, 1, 64)),
    Size(lead=(1, 8, 128)),
    # Rows that do not fill their last block, a head that does not fill its last step, a rope that begins inside one.
    Size(lead=(7, 1, 3), head_dim=204, key_dim=64, rope_dim=20),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size.lead))


@functools.cache
def plan(key_format: str) -> d4.CachePlan:
    return d4.plan_cache(d4.DSV4Config.flash(), max_requests=1, max_context=256, indexer_format=key_format)


@backends
@sizes
def test_attention_queries_are_normed_roped_and_rounded(size, backend):
    product, positions = size.draw(size.head_dim)
    call = functools.partial(attention_queries, freqs=size.freqs, plan=plan("mxfp4"))
    got = np.asarray(jax.jit(functools.partial(call, backend=backend))(product, positions))
    want = np.asarray(call(product, positions))
    assert got.dtype == np.float16
    # The sum of squares runs in another order and is off by a few 2^-24, so that an element may round to the f16 beside
    # it. One that its rope nearly cancels is off by as much of its pair, which is below 23.
    ulp = np.spacing(np.abs(want).astype(np.float16)).astype(np.float32)
    assert np.all(np.abs(got.astype(np.float32) - want) <= np.maximum(ulp, 2.0**-19))
    assert np.mean(got != want.astype(np.float16)) < 2e-3  # some 2^-22 of an element over its f16's 2^-11
    assert not got[0, 0, 1].any()


@backends
@pytest.mark.parametrize("key_format", first_of(FORMATS))
@sizes
def test_indexer_queries_are_the_bytes_of_the_formulas(size, key_format, backend):
    """The formulas are computed operation by operation, because a program that fuses them may round differently."""
    product, positions = size.draw(size.key_dim)
    call = functools.partial(INDEXER_SCORES[backend].queries, freqs=size.freqs, plan=plan(key_format))
    got = jax.jit(call)(product, positions)
    rotated = hadamard(apply_rope(product, positions[..., None], size.freqs))
    want, read = INDEXER_FORMATS[key_format].encode(rotated), np.asarray(positions) >= 0
    for name in ("codes", "scale"):
        same_bytes(name, np.asarray(getattr(got, name))[read], np.asarray(getattr(want, name))[read])


@pytest.mark.parametrize("simulate", MACHINES)
@sizes
def test_queries_of_padding_are_left_out(size, simulate):
    """Those that are needed are the same bytes. On the simulator the others are NaN, or the largest whole number."""
    needed = np.random.default_rng(0).random(size.lead[:2]) < 0.5

    def run(dim: int, convert: Any) -> list[np.ndarray]:
        product, positions = size.draw(dim)
        angles = packed_angles(positions, size.freqs)
        some, everything = (
            jax.tree.leaves(jax.jit(functools.partial(convert, simulate=simulate, needed=which))(product, angles))
            for which in (jnp.asarray(needed), None)
        )
        for found, want in zip(some, everything, strict=True):
            same_bytes("needed", np.asarray(found)[needed], np.asarray(want)[needed])
        return [np.asarray(leaf)[~needed] for leaf in some]

    row = plan("mxfp4").keys.row(size.key_dim)
    left = run(size.head_dim, functools.partial(pk.attention_queries, eps=1e-6))
    left += run(size.key_dim, functools.partial(pk.indexer_queries, key_row=row, key_format="mxfp4"))
    if simulate:
        for leaf in left:
            assert np.all(np.isnan(leaf) if leaf.dtype.kind == "f" else leaf == np.iinfo(leaf.dtype).max)


@backends
def test_a_row_that_is_not_finite_spoils_no_other(backend):
    size, keys = SIZES[0], plan("nvfp4").keys
    for bad in (np.nan, np.inf):
        spoilt = [(x.at[1, 0, 5, 100].set(bad), positions) for x, positions in map(size.draw, (512, 128))]
        attention = attention_queries(*spoilt[0], size.freqs, plan("nvfp4"), backend)
        rounded = INDEXER_SCORES[backend].queries(*spoilt[1], size.freqs, plan("nvfp4"))
        assert isinstance(rounded, KeyRows)
        indexer = keys.decode(rounded)
        for queries in (attention, indexer):
            finite = np.isfinite(np.asarray(queries)).all(-1)
            assert np.argwhere(~finite).tolist() == [[1, 0, 5]]


def test_sizes_that_no_kernel_serves_are_named():
    def run(call: Any, dim: int, rope_dim: int, *rest: Any, **options: Any) -> None:
        product, angles = jnp.ones((1, 1, 2, dim)), jnp.ones((1, 1, rope_dim))
        call(product, angles, *rest, **options, simulate=True)

    for dim, rope_dim in ((30, 8), (32, 6), (32, 64)):
        with pytest.raises(ValueError, match=f"multiples of 4, got {dim} and {rope_dim}"):
            run(pk.attention_queries, dim, rope_dim, eps=1e-6)
    for dim in (48, 16):
        with pytest.raises(ValueError, match=f"key_dim must be a power of two from 32 on, got {dim}"):
            run(pk.indexer_queries, dim, 8, plan("mxfp4").keys.row(32), key_format="mxfp4")
    with pytest.raises(ValueError, match=r"key_format must be one of .*got 'bf16'"):
        run(pk.indexer_queries, 32, 8, plan("mxfp4").keys.row(32), key_format="bf16")


@pytest.mark.parametrize("key_format", first_of([*FORMATS, "f32"], count=0))
def test_readers_take_queries_that_are_rounded_already(key_format):
    cfg, tokens, rng = d4.DSV4Config.tiny(compress_ratios=(4,), indexer_top_k=3), 4, np.random.default_rng(0)
    cache = d4.init_cache(d4.plan_cache(cfg, max_requests=2, max_context=64, indexer_format=key_format))
    cache, slots, _ = d4.admit(cache, 2)
    num_new = ids(tokens, tokens)
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    assert ok
    handle, keys = d4.acquire(cache, 0, slots, num_new), cache.plan.keys

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pool, heads = handle.entries.pool, cfg.indexer_heads
    assert pool.indexer_keys is not None
    stored = keys.encode(draw(*pool.indexer_keys.codes.shape[:3], cfg.indexer_head_dim))
    entries = dataclasses.replace(handle.entries, pool=dataclasses.replace(pool, indexer_keys=stored))
    queries, weights = draw(2, tokens, heads, cfg.indexer_head_dim), draw(2, tokens, heads)
    visible = jnp.full((2, tokens), 9, jnp.int32)
    select = functools.partial(d4.pieces.select_entries, weights=weights, layer=entries, visible=visible, backend="xla")
    np.testing.assert_array_equal(select(keys.encode(queries)), select(queries))

    q = draw(2, tokens, cfg.num_heads, cfg.head_dim).astype(jnp.float16)
    rest = handle.positions(tokens), jnp.zeros(cfg.num_heads), handle.window(draw(2, tokens, cfg.head_dim)), entries
    attend = functools.partial(d4.pieces.decode_attention, kind="csa", backend="xla")
    np.testing.assert_array_equal(attend(q, *rest), attend(q.astype(jnp.float32), *rest))
