"""The kernel that splits the products of new tokens into parts, compared with the formulas on both machines."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.formats import KV_FORMATS
from dsv4jax.layer.dense import rms_norm
from dsv4jax.rope import apply_rope, packed_angles, rope_frequencies
from tests.support.kernel_cases import same_bytes
from tests.support.machines import MACHINES

machines = pytest.mark.parametrize("simulate", MACHINES)
EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a call."""

    lead: tuple[int, int]  # B, T
    rank: int
    head_dim: int
    rope_dim: int
    ratio: int = 0
    entry: int = 0  # channels of a stream
    key: int = 0
    heads: int = 0

    @property
    def freqs(self) -> np.ndarray:
        return rope_frequencies(
            dataclasses.replace(d4.DSV4Config.flash(), rope_dim=self.rope_dim), d4.AttentionType.CSA
        )

    def draw(self, dtype: Any) -> Any:
        """Rows of all magnitudes, a row of zeros, padding that is NaN; weights of ``dtype``."""
        rng = np.random.default_rng(self.rank)

        def row(size: int) -> jax.Array:
            x = rng.standard_normal((*self.lead, size)) * 2.0 ** rng.integers(-20, 20, (*self.lead, 1))
            x[0, 0] = 0
            x[-1, -1] = np.nan
            return jnp.asarray(x, jnp.float32)

        def weight(*shape: int) -> Any:
            return jnp.asarray(rng.standard_normal(shape), dtype) if all(shape) else None

        positions = rng.integers(0, 1 << 20, self.lead)
        positions[-1, -1] = -1
        positions = jnp.asarray(positions, jnp.int32)
        return pk.TokenProducts(
            q_a_kv=row(self.rank + self.head_dim),
            compress=row(2 * (self.entry + self.key) + self.heads) if self.entry else None,
            q_norm=weight(self.rank),
            kv_norm=weight(self.head_dim),
            entry_ape=weight(self.ratio, self.entry),
            key_ape=weight(self.ratio, self.key),
            angles=packed_angles(positions, self.freqs),
            positions=positions,
        )


# The published models' sizes, then steps and rows that are not full, a rope that begins within a step, and streams
# whose columns are not aligned to four.
SIZES = {
    "csa": Size(lead=(3, 1), rank=1024, head_dim=512, rope_dim=64, ratio=4, entry=1024, key=256, heads=64),
    "hca": Size(lead=(1, 5), rank=1536, head_dim=512, rope_dim=64, ratio=128, entry=512),
    "swa": Size(lead=(2, 3), rank=1024, head_dim=512, rope_dim=64),
    "odd": Size(lead=(7, 2), rank=24, head_dim=136, rope_dim=20, ratio=3, entry=270, key=36, heads=2),
    "no key": Size(lead=(2, 2), rank=516, head_dim=260, rope_dim=8, ratio=1, entry=4, heads=6),
}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))


def formulas(products: pk.TokenProducts, rounding: pk.TokenRounding, freqs: np.ndarray) -> Any:
    """The parts in plain JAX, but for ``stored``."""
    return jax.jit(functools.partial(_formulas, rounding=rounding, freqs=freqs))(products)


def _formulas(products: Any, rounding: pk.TokenRounding, freqs: np.ndarray) -> pk.TokenParts:
    rank = products.q_norm.shape[0]
    latent = rms_norm(products.q_a_kv[..., :rank], products.q_norm, rounding.eps).astype(rounding.latent_dtype)
    kv = apply_rope(rms_norm(products.q_a_kv[..., rank:], products.kv_norm, rounding.eps), products.positions, freqs)
    entry, key, heads = products.widths

    def streams(first: int, ape: Any) -> Any:
        if ape is None:
            return None
        k, z = jnp.split(products.compress[..., first : first + 2 * ape.shape[1]], 2, -1)
        z = z + ape.astype(jnp.float32)[jnp.maximum(products.positions, 0) % ape.shape[0]]
        # Not casts there and back: XLA leaves those out on a GPU.
        bits = jnp.finfo(rounding.stream_dtype)
        return tuple(jax.lax.reduce_precision(x, bits.nexp, bits.nmant) for x in (k, z))

    parts = pk.TokenParts(
        latent=latent,
        kv=kv,
        stored=None,
        entry=streams(0, products.entry_ape),
        key=streams(2 * entry, products.key_ape),
        head_weights=products.compress[..., 2 * (entry + key) :] * rounding.head_factor if heads else None,
    )
    is_real = products.positions[..., None] >= 0
    return jax.tree.map(lambda part: jnp.where(is_real, part, jnp.zeros((), part.dtype)), parts)


def close(got: jax.Array, want: jax.Array) -> None:
    """Check that parts are equal but for the sum of squares, which runs in another order and is off by a few 2^-24.

    An element that its rope nearly cancels is off by as much of its row's largest. A bf16 may be the one beside it.
    """
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    step = 2.0**-7 if want.dtype == jnp.bfloat16 else 0.0
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    assert np.all(np.abs(a - b) <= 2.0**-21 * np.abs(b).max(-1, keepdims=True) + step * np.abs(b))


@machines
@pytest.mark.parametrize(
    ("size", "dtype"), list(zip(SIZES.values(), itertools.cycle([jnp.bfloat16, jnp.float32]))), ids=list(SIZES)
)
def test_parts_are_those_of_the_formulas(size, dtype, simulate):
    products = size.draw(dtype)
    rounding = pk.TokenRounding(eps=EPS, latent_dtype=jnp.float32, head_factor=0.25 * 3**-0.5)
    got = jax.jit(functools.partial(pk.token_parts, rounding=rounding, simulate=simulate))(products)
    want = formulas(products, rounding, size.freqs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    close(got.latent, want.latent)
    close(got.kv, want.kv)
    assert not np.asarray(got.latent)[0, 0].any()
    # No sum: one addition and one product an element, rounded alike everywhere.
    exact = [(part.entry, part.key, part.head_weights) for part in (got, want)]
    for a, b in zip(*map(jax.tree.leaves, exact), strict=True):
        same_bytes("streams and head weights", np.asarray(a), np.asarray(b))


@machines
@sizes
def test_a_latent_and_streams_of_bf16(size, simulate):
    """Streams are rounded where the formulas round them, after the bias, and returned as f32."""
    products = size.draw(jnp.float32)
    rounding = pk.TokenRounding(eps=EPS, stream_dtype=jnp.bfloat16)
    got = jax.jit(functools.partial(pk.token_parts, rounding=rounding, simulate=simulate))(products)
    want = formulas(products, rounding, size.freqs)
    close(got.latent, want.latent)
    for a, b in zip(*(jax.tree.leaves((part.entry, part.key)) for part in (got, want)), strict=True):
        same_bytes("streams", np.asarray(a), np.asarray(b))


@machines
@sizes
def test_padding_that_is_not_read_has_the_same_parts(size, simulate):
    products, row_spec = size.draw(jnp.float32), KV_FORMATS["bf16"].row(size.head_dim - size.rope_dim, size.rope_dim)
    positions = np.where(np.random.default_rng(0).random(size.lead) < 0.5, -1, products.positions)
    products = dataclasses.replace(products, positions=jnp.asarray(positions, jnp.int32))
    run = functools.partial(
        pk.token_parts, rounding=pk.TokenRounding(eps=EPS, kv_format="bf16"), row_spec=row_spec, simulate=simulate
    )
    some, everything = (jax.jit(functools.partial(run, reads_padding=reads))(products) for reads in (False, True))
    for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(everything), strict=True):
        same_bytes("parts", np.asarray(a), np.asarray(b))


@machines
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_window_rows_as_they_are_stored(kv_format, simulate):
    """They are the bytes of the same f32 rows, encoded operation by operation."""
    size, form = SIZES["hca"], KV_FORMATS[kv_format]
    products = size.draw(jnp.bfloat16)
    # A row of zeros stays one of +0: kernels store the E4M3 code of 0 for -0, too.
    products = dataclasses.replace(products, kv_norm=jnp.abs(products.kv_norm))
    row_spec = form.row(size.head_dim - size.rope_dim, size.rope_dim)
    rounding = pk.TokenRounding(eps=EPS, kv_format=kv_format)
    got = jax.jit(functools.partial(pk.token_parts, rounding=rounding, row_spec=row_spec, simulate=simulate))(products)
    want = form.encode(got.kv, size.rope_dim)
    assert jax.tree.structure(got.stored) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got.stored, want)), strict=True):
        same_bytes(kv_format, np.asarray(a), np.asarray(b))


def test_what_the_kernel_does_not_support_is_named():
    size, rounding = SIZES["odd"], pk.TokenRounding(eps=EPS)
    run = functools.partial(pk.token_parts, simulate=True)
    for field, name in {"rank": "q_lora_rank", "head_dim": "head_dim", "rope_dim": "rope_dim"}.items():
        wrong = 2 + getattr(size, field)
        with pytest.raises(ValueError, match=f"{name} must be a multiple of 4, got {wrong}"):
            run(dataclasses.replace(size, **{field: wrong}).draw(jnp.float32), rounding)
    with pytest.raises(ValueError, match="must be even in number, got 615"):
        run(dataclasses.replace(size, heads=3).draw(jnp.float32), rounding)
    with pytest.raises(ValueError, match="streams of even widths within 612 columns, got "):
        run(dataclasses.replace(size, entry=269, heads=2).draw(jnp.float32), rounding)
    products = size.draw(jnp.float32)
    with pytest.raises(ValueError, match="q_norm must be float32 or bfloat16, got float16"):
        run(dataclasses.replace(products, q_norm=products.q_norm.astype(jnp.float16)), rounding)
    with pytest.raises(ValueError, match="stream_dtype must be float32 or bfloat16, got float16"):
        run(products, dataclasses.replace(rounding, stream_dtype=jnp.float16))
    with pytest.raises(ValueError, match="give both or neither"):
        run(dataclasses.replace(products, compress=None), rounding)
    with pytest.raises(ValueError, match="kv_format and row_spec belong together"):
        run(products, dataclasses.replace(rounding, kv_format="bf16"))
    row_spec = KV_FORMATS["bf16"].row(size.head_dim - size.rope_dim, size.rope_dim)
    with pytest.raises(ValueError, match=r"kv_format must be one of .* got 'fp4'"):
        run(products, dataclasses.replace(rounding, kv_format="fp4"), row_spec=row_spec)
