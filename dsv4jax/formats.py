"""Number formats of a stored row: how a key becomes bytes and comes back.

    rows of the window and of compressed entries (448 NoPE + 64 RoPE dims at the real sizes)
      f32, bf16    every dim in that dtype
      fp8_row      448 B E4M3 | 128 B bf16 RoPE | one f32 multiplier                      = 580 B
      fp8_tile64   448 B E4M3 | 128 B bf16 RoPE | 7 UE8M0 exponents, one per 64 dims      = 583 B (+1 pad in FlashMLA)
    indexer keys (128 dims)
      f32, bf16    every dim in that dtype
      nvfp4        64 B of E2M1 pairs | 8 E4M3 scales, one per 16 dims                    =  72 B
      mxfp4        64 B of E2M1 pairs | 4 UE8M0 exponents, one per 32 dims                =  68 B

Eight-bit and four-bit values are kept as uint8: XLA on CPU widens a whole float8 array to scatter one row into it.
Rounding is to nearest, ties to even. A row that holds NaN or infinity decodes to NaN or infinity, and no other.

``encode`` into bytes cannot be differentiated and says so; ``rounded`` and ``rounded_keys`` encode and decode at once,
with a derivative that goes straight through the rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dsv4jax.checks import Tree
from dsv4jax.derivatives import refuse_derivative, straight_through

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0 to 7; bit 3 is the sign
MIN_KV_AMAX = 1e-4  # lower bound on a row's (or tile's) largest magnitude, so that the scale of a zero row is not 0
# x / 448 and x / 6 are written as products: XLA on GPU turns such divisions into products anyway, and a scale must not
# depend on the backend.
_INV_E4M3_MAX = float(np.float32(1.0 / E4M3_MAX))
_INV_E2M1_MAX = float(np.float32(1.0 / E2M1_MAX))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVRows:
    """Encoded key rows.

    The leading axes ``...`` are those of the array that the rows are stored in, such as (layer, block, row).
    """

    nope: jax.Array  # [..., head_dim - rope_dim]
    rope: jax.Array  # [..., rope_dim]
    scale: jax.Array | None  # [...] f32 (fp8_row), [..., tiles] u8 (fp8_tile64), None (f32, bf16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyRows:
    """Encoded indexer keys."""

    codes: jax.Array  # [..., dim], or [..., dim / 2] u8 with the even dim in the low nibble
    scale: jax.Array | None  # [..., groups] u8, None (f32, bf16)


class KVFormat(Protocol):
    """The interface of a format for key rows. Register an instance in ``KV_FORMATS`` so that plans can name it."""

    def row(self, nope_dim: int, rope_dim: int) -> KVRows:
        """Return one encoded row as ``jax.ShapeDtypeStruct`` leaves.

        Raises ValueError for sizes the format cannot hold.
        """
        ...

    def encode(self, x: jax.Array, rope_dim: int) -> KVRows:
        """Encode f32 [..., head_dim], whose last ``rope_dim`` dims carry the rotary embedding."""
        ...

    def decode(self, rows: KVRows) -> jax.Array:
        """Decode rows to f32 [..., head_dim]."""
        ...


class KeyFormat(Protocol):
    """The interface of a format for indexer keys. Register an instance in ``INDEXER_FORMATS``."""

    @property
    def rounds_queries(self) -> bool:
        """Whether the indexer also rounds its queries in this format."""
        ...

    def row(self, dim: int) -> KeyRows:
        """Return one encoded key as ``jax.ShapeDtypeStruct`` leaves.

        Raises ValueError for sizes the format cannot hold.
        """
        ...

    def encode(self, x: jax.Array) -> KeyRows:
        """Encode keys f32 [..., dim]."""
        ...

    def decode(self, rows: KeyRows) -> jax.Array:
        """Decode keys to f32 [..., dim]."""
        ...


def row_bytes(row: object) -> int:
    """Return the bytes of a pytree of ``jax.ShapeDtypeStruct``, such as what ``KVFormat.row`` returns."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))


def _spec(shape: tuple[int, ...], dtype: DTypeLike) -> Tree:
    return jax.ShapeDtypeStruct(shape, dtype)


def rounded(x: jax.Array, rows: KVFormat, rope_dim: int) -> jax.Array:
    """Rows f32 [..., head_dim] as a reader of the cache sees them; the derivative is that of x itself."""
    return straight_through(rows.decode(rows.encode(lax.stop_gradient(x), rope_dim)), x)


def rounded_keys(x: jax.Array, keys: KeyFormat) -> jax.Array:
    """Indexer keys f32 [..., indexer_head_dim] as a reader sees them; the derivative is that of x itself."""
    return straight_through(keys.decode(keys.encode(lax.stop_gradient(x))), x)


_BYTES = (
    "a derivative cannot pass through rows that are encoded as bytes. Differentiate attention_layer, a "
    "LayerCacheHandle or formats.rounded, which go straight through the rounding; or give encode, and pieces that "
    "call it, jax.lax.stop_gradient of the rows; or plan with formats of floats ('f32', 'bf16')"
)


def _store[Rows](rows: Rows) -> Rows:
    # A reader must get the rounded row even if XLA fuses the reader with the rounding. XLA may drop f32 -> bf16 -> f32
    # and, on GPU, f32 -> e4m3 -> f32. With the barrier, readers can only decode the stored bytes.
    return lax.optimization_barrier(rows)


def _to_e4m3(x: jax.Array) -> jax.Array:
    """Convert f32 to E4M3 bytes.

    Values are clipped first, because above 464 the cast gives NaN on CPU but 448 on GPU.
    """
    return lax.bitcast_convert_type(jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3), jnp.uint8)


def _from_e4m3(byte: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(byte, E4M3).astype(jnp.float32)


def _amax(x: jax.Array) -> jax.Array:
    """Return the largest magnitude over the last axis; NaN if any value is NaN.

    Computed on the fp32 bit patterns, which have the same order as the magnitudes, with NaN above all others. XLA's
    float maximum loses NaN on CPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.max(bits, -1), jnp.float32)


def _ue8m0_for(amax: jax.Array, largest: float) -> jax.Array:
    """Return the exponent byte of the smallest power of two s with amax / s <= largest.

    The byte is 255 (NaN) if amax is not finite. Computed on the fp32 bits, because ``2 ** ceil(log2(x))`` doubles some
    exact powers of two on CPU. With largest = f * 2^e and amax = g * 2^h, f and g in [1, 2), s is 2^(h-e), or twice
    that if g > f.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    exponent, fraction = divmod(int(np.float32(largest).view(np.int32)), 1 << 23)
    byte = ((bits + ((1 << 23) - 1 - fraction)) >> 23) - (exponent - 127)
    return jnp.where(jnp.isfinite(amax), byte, 255).astype(jnp.uint8)


def _from_ue8m0(byte: jax.Array) -> jax.Array:
    scale = lax.bitcast_convert_type(byte.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(byte == 255, jnp.nan, scale)


def _to_fp8_tiles(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round f32 [..., tiles, n] to E4M3 bytes, with an exponent byte per tile [..., tiles]."""
    scale = _ue8m0_for(jnp.maximum(_amax(tiles), MIN_KV_AMAX), E4M3_MAX)
    return _to_e4m3(tiles / _from_ue8m0(scale)[..., None]), scale


def fp8_tiles(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round f32 [..., tiles, n] to E4M3 with a power-of-two scale per tile, 2^ceil(log2(max(amax, 1e-4) / 448)).

    Returns:
      (the codes, float8_e4m3fn of the shape of ``tiles``; their scales, f32 [..., tiles]).
    """
    codes, scale = _store(_to_fp8_tiles(tiles))
    return lax.bitcast_convert_type(codes, E4M3), _from_ue8m0(scale)


def fp8_rounded(x: jax.Array, group: int) -> jax.Array:
    """Round x [..., n] to E4M3 with a power-of-two scale per group of the last axis: x's dtype, which holds it exactly.

    See ``fp8_tiles``. The last group may be shorter.
    """
    n = x.shape[-1]
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -n % group)])
    codes, scale = fp8_tiles(padded.reshape(*x.shape[:-1], -1, group))
    values = codes.astype(jnp.float32) * scale[..., None]
    return values.reshape(padded.shape)[..., :n].astype(x.dtype)


def _to_e2m1(x: jax.Array) -> jax.Array:
    """Convert f32 [..., n] to packed E2M1 codes u8 [..., n / 2], even index in the low nibble. |x| > 6 becomes 6."""
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for low, (a, b) in enumerate(itertools.pairwise(E2M1_VALUES)):
        midpoint = (a + b) / 2  # a tie goes to the even code: up if the lower code is odd, down if it is even
        code += (magnitude >= midpoint if low % 2 else magnitude > midpoint).astype(jnp.uint8)
    code |= jnp.signbit(x).astype(jnp.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def e2m1_values(packed: jax.Array) -> jax.Array:
    """Return the values, f32 [..., 2 n], of pairs of E2M1 codes uint8 [..., n], even index in the low nibble."""
    codes = jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = jnp.asarray(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), jnp.float32)
    return values[codes]


def _split(x: jax.Array, rope_dim: int) -> tuple[jax.Array, jax.Array]:
    return x[..., :-rope_dim], x[..., -rope_dim:]


def _join(nope: jax.Array, rope: jax.Array) -> jax.Array:
    return jnp.concatenate([nope, rope.astype(jnp.float32)], -1)


@dataclasses.dataclass(frozen=True)
class PlainRows:
    """Rows with every dim in one float dtype, without a scale."""

    dtype: DTypeLike

    def row(self, nope_dim: int, rope_dim: int) -> KVRows:
        return KVRows(nope=_spec((nope_dim,), self.dtype), rope=_spec((rope_dim,), self.dtype), scale=None)

    def encode(self, x: jax.Array, rope_dim: int) -> KVRows:
        nope, rope = _split(x.astype(self.dtype), rope_dim)
        return _store(KVRows(nope=nope, rope=rope, scale=None))

    def decode(self, rows: KVRows) -> jax.Array:
        return _join(rows.nope.astype(jnp.float32), rows.rope)


@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """Rows with E4M3 NoPE dims, one fp32 multiplier per row, max(amax, 1e-4) / 448, and bf16 RoPE dims."""

    def row(self, nope_dim: int, rope_dim: int) -> KVRows:
        return KVRows(
            nope=_spec((nope_dim,), jnp.uint8), rope=_spec((rope_dim,), jnp.bfloat16), scale=_spec((), jnp.float32)
        )

    def encode(self, x: jax.Array, rope_dim: int) -> KVRows:
        nope, rope = _split(refuse_derivative(_BYTES, x), rope_dim)
        scale = jnp.maximum(_amax(nope), MIN_KV_AMAX) * _INV_E4M3_MAX
        return _store(KVRows(nope=_to_e4m3(nope / scale[..., None]), rope=rope.astype(jnp.bfloat16), scale=scale))

    def decode(self, rows: KVRows) -> jax.Array:
        assert rows.scale is not None
        return _join(_from_e4m3(rows.nope) * rows.scale[..., None], rows.rope)


@dataclasses.dataclass(frozen=True)
class Fp8TileRows:
    """Rows with E4M3 NoPE dims, one power-of-two scale per tile, and bf16 RoPE dims.

    A tile's scale is 2^ceil(log2(max(amax, 1e-4) / 448)). With tiles of 64 this is what DeepSeek, FlashMLA, vLLM and
    SGLang store, and what the model was trained with.
    """

    tile: int

    def row(self, nope_dim: int, rope_dim: int) -> KVRows:
        if nope_dim % self.tile:
            raise ValueError(f"fp8_tile{self.tile}: head_dim - rope_dim = {nope_dim} must be divisible by {self.tile}")
        return KVRows(
            nope=_spec((nope_dim,), jnp.uint8),
            rope=_spec((rope_dim,), jnp.bfloat16),
            scale=_spec((nope_dim // self.tile,), jnp.uint8),
        )

    def encode(self, x: jax.Array, rope_dim: int) -> KVRows:
        nope, rope = _split(refuse_derivative(_BYTES, x), rope_dim)
        tiles = nope.reshape(*nope.shape[:-1], -1, self.tile)
        quantised, scale = _to_fp8_tiles(tiles)
        return _store(KVRows(nope=quantised.reshape(nope.shape), rope=rope.astype(jnp.bfloat16), scale=scale))

    def decode(self, rows: KVRows) -> jax.Array:
        assert rows.scale is not None
        tiles = _from_e4m3(rows.nope).reshape(*rows.scale.shape, self.tile)
        return _join((tiles * _from_ue8m0(rows.scale)[..., None]).reshape(rows.nope.shape), rows.rope)


@dataclasses.dataclass(frozen=True)
class PlainKeys:
    """Indexer keys in one float dtype, without a scale."""

    dtype: DTypeLike
    rounds_queries: bool = False

    def row(self, dim: int) -> KeyRows:
        return KeyRows(codes=_spec((dim,), self.dtype), scale=None)

    def encode(self, x: jax.Array) -> KeyRows:
        return _store(KeyRows(codes=x.astype(self.dtype), scale=None))

    def decode(self, rows: KeyRows) -> jax.Array:
        return rows.codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Fp4Keys:
    """Indexer keys as pairs of E2M1 values, with a scale byte per group: E4M3 (nvfp4) or UE8M0 (mxfp4).

    Groups are 16 dims in nvfp4 and 32 in mxfp4. The global scale of nvfp4 is fixed at 1 and not stored. Entries arrive
    one at a time, so the largest magnitude in a block is not known when its first entry is written.
    """

    group: int
    e4m3_scale: bool
    rounds_queries: bool = True

    def row(self, dim: int) -> KeyRows:
        if dim % self.group:
            raise ValueError(f"4-bit keys: indexer_head_dim={dim} must be divisible by the group of {self.group}")
        return KeyRows(codes=_spec((dim // 2,), jnp.uint8), scale=_spec((dim // self.group,), jnp.uint8))

    def _decode_scale(self, byte: jax.Array) -> jax.Array:
        return _from_e4m3(byte) if self.e4m3_scale else _from_ue8m0(byte)

    def encode(self, x: jax.Array) -> KeyRows:
        groups = refuse_derivative(_BYTES, x).reshape(*x.shape[:-1], -1, self.group)
        amax = _amax(groups)
        if self.e4m3_scale:
            scale = jnp.clip(amax * _INV_E2M1_MAX, 2.0**-9, E4M3_MAX)
            scale = _to_e4m3(jnp.where(jnp.isfinite(amax), scale, jnp.nan))
        else:
            scale = _ue8m0_for(jnp.maximum(amax, E2M1_MAX * 2.0**-126), E2M1_MAX)
        scale = _store(scale)  # codes are computed with the scale as it is stored, not as it was before rounding
        codes = _to_e2m1((groups / self._decode_scale(scale)[..., None]).reshape(x.shape))
        return _store(KeyRows(codes=codes, scale=scale))

    def decode(self, rows: KeyRows) -> jax.Array:
        assert rows.scale is not None
        values = e2m1_values(rows.codes)
        groups = values.reshape(*rows.scale.shape, self.group) * self._decode_scale(rows.scale)[..., None]
        return groups.reshape(values.shape)


KV_FORMATS: dict[str, KVFormat] = {
    "f32": PlainRows(jnp.float32),
    "bf16": PlainRows(jnp.bfloat16),
    "fp8_row": Fp8Rows(),
    "fp8_tile64": Fp8TileRows(64),
}
INDEXER_FORMATS: dict[str, KeyFormat] = {
    "f32": PlainKeys(jnp.float32),
    "bf16": PlainKeys(jnp.bfloat16),
    "nvfp4": Fp4Keys(16, e4m3_scale=True),
    "mxfp4": Fp4Keys(32, e4m3_scale=False),
}
