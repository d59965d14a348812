"""The arithmetic of one row in one block: norm, rope, Hadamard transform, and formats as in ``pallas_kernels.formats``.

A row of ``dim`` channels is a vector of a power of two of them, 0 past ``dim``. Every function rounds where the XLA
form in ``dsv4jax`` rounds, so that both store the same bytes.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_gpu.numbers import (
    from_e4m3,
    from_ue8m0,
    magnitude_bits,
    power_of_two_scale,
    to_e2m1,
    to_e4m3,
)
from pallas_kernels.triton_gpu.operands import Keys, Rows


@triton.jit
def norm_and_rope(y, norm, angles, dim: tl.constexpr, rope_dim: tl.constexpr, eps: tl.constexpr):
    """Apply RMSNorm with a weight, then rope to the last channels. ``angles``: the cosines, then the sines."""
    size: tl.constexpr = y.shape[0]
    channel = tl.arange(0, size)
    weight = tl.load(norm + channel, mask=channel < dim, other=0.0).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(y * y, 0) / dim + eps))
    y = (y * weight) * inverse
    even, odd = tl.split(tl.reshape(y, (size // 2, 2)))
    pair = tl.arange(0, size // 2) - (dim - rope_dim) // 2
    is_rope = (pair >= 0) & (pair < rope_dim // 2)
    cos = tl.load(angles + pair, mask=is_rope, other=1.0)
    sin = tl.load(angles + rope_dim // 2 + pair, mask=is_rope, other=0.0)
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    # Not the product with a sine of 0: infinity would become NaN.
    is_rope = (channel >= dim - rope_dim) & (channel < dim)
    return tl.where(is_rope, tl.reshape(turned, (size,)), y)


@triton.jit
def _butterfly(y, half: tl.constexpr):
    size: tl.constexpr = y.shape[0]
    a, b = tl.split(tl.trans(tl.reshape(y, (size // (2 * half), 2, half)), 0, 2, 1))
    return tl.reshape(tl.trans(tl.join(a + b, a - b), 0, 2, 1), (size,))


@triton.jit
def hadamard(y, bits: tl.constexpr):
    """Apply the normalised Walsh-Hadamard transform to 2^bits channels, a butterfly for each bit of their number."""
    for bit in tl.static_range(bits):
        y = _butterfly(y, 1 << bit)
    return y * (y.shape[0] ** -0.5)


@triton.jit
def store_row(y, rows: Rows, number, where, formats: tl.constexpr):
    """Encode a key row and store it as row ``number`` of ``rows``, if ``where``."""
    nope_dim: tl.constexpr = formats.nope_dim
    rope_dim: tl.constexpr = formats.rope_dim
    size: tl.constexpr = formats.size
    channel = tl.arange(0, size)
    is_nope = channel < nope_dim
    if formats.kv_format == "fp8_row":
        bits = tl.max(tl.where(is_nope, magnitude_bits(y), 0), 0)
        # At least 1e-4, so that the scale of a zero row is not 0.
        step = tl.maximum(bits, 0x38D1B717).to(tl.float32, bitcast=True) * 0.0022321429569274187
        tl.store(rows.scale + number, step, mask=where)
        stored = to_e4m3(tl.div_rn(y, step))
    elif formats.kv_format == "fp8_tile64":
        tiles: tl.constexpr = size // 64
        bits = tl.where(is_nope, magnitude_bits(y), 0)
        bits = tl.max(tl.reshape(bits, (tiles, 64)), 1)
        byte = power_of_two_scale(tl.maximum(bits, 0x38D1B717), 0x43E00000)
        tile = tl.arange(0, tiles)
        count: tl.constexpr = nope_dim // 64
        tl.store(rows.scale + number * count + tile, byte.to(tl.uint8), mask=where & (tile < count))
        step = tl.broadcast_to(from_ue8m0(byte)[:, None], (tiles, 64))
        stored = to_e4m3(tl.div_rn(y, tl.reshape(step, (size,))))
    else:
        stored = y.to(rows.nope.dtype.element_ty)
    tl.store(rows.nope + number * nope_dim + channel, stored, mask=where & is_nope)
    is_rope = where & (channel >= nope_dim) & (channel < formats.dim)
    tl.store(rows.rope + number * rope_dim + channel - nope_dim, y.to(rows.rope.dtype.element_ty), mask=is_rope)


@triton.jit
def load_row(rows: Rows, number, where, formats: tl.constexpr):
    """Load and decode row ``number``: f32 [size], 0 unless ``where``."""
    nope_dim: tl.constexpr = formats.nope_dim
    rope_dim: tl.constexpr = formats.rope_dim
    size: tl.constexpr = formats.size
    channel = tl.arange(0, size)
    is_nope = where & (channel < nope_dim)
    is_rope = where & (channel >= nope_dim) & (channel < formats.dim)
    stored = tl.load(rows.nope + number * nope_dim + channel, mask=is_nope, other=0)
    if formats.kv_format == "fp8_row":
        values = from_e4m3(stored) * tl.load(rows.scale + number, mask=where, other=0.0)
    elif formats.kv_format == "fp8_tile64":
        tiles: tl.constexpr = size // 64
        tile = tl.arange(0, tiles)
        count: tl.constexpr = nope_dim // 64
        byte = tl.load(rows.scale + number * count + tile, mask=where & (tile < count), other=0)
        step = tl.reshape(tl.broadcast_to(from_ue8m0(byte)[:, None], (tiles, 64)), (size,))
        values = from_e4m3(stored) * step
    else:
        values = stored.to(tl.float32)
    other = tl.load(rows.rope + number * rope_dim + channel - nope_dim, mask=is_rope, other=0.0).to(tl.float32)
    return tl.where(channel < nope_dim, values, other)


@triton.jit
def store_key(y, keys: Keys, number, where, formats: tl.constexpr):
    """Encode an indexer key of a power of two of channels and store it as row ``number`` of ``keys``, if ``where``."""
    dim: tl.constexpr = formats.key_dim
    if formats.key_format == "nvfp4" or formats.key_format == "mxfp4":
        group: tl.constexpr = 16 if formats.key_format == "nvfp4" else 32
        groups: tl.constexpr = dim // group
        bits = tl.max(tl.reshape(magnitude_bits(y), (groups, group)), 1)
        if formats.key_format == "nvfp4":
            step = bits.to(tl.float32, bitcast=True) * 0.1666666716337204
            step = tl.minimum(tl.maximum(step, 0.001953125), 448.0)
            byte = to_e4m3(tl.where(bits < 0x7F800000, step, float("nan")))
            step = from_e4m3(byte)
        else:
            # At least 6 * 2^-126, so that the scale is a normal number.
            byte = power_of_two_scale(tl.maximum(bits, 0x01C00000), 0x40C00000).to(tl.uint8)
            step = from_ue8m0(byte)
        tl.store(keys.scale + number * groups + tl.arange(0, groups), byte, mask=where)
        step = tl.reshape(tl.broadcast_to(step[:, None], (groups, group)), (dim,))
        low, high = tl.split(tl.reshape(to_e2m1(tl.div_rn(y, step)), (dim // 2, 2)))
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(keys.codes + number * (dim // 2) + tl.arange(0, dim // 2), packed, mask=where)
    else:
        tl.store(keys.codes + number * dim + tl.arange(0, dim), y.to(keys.codes.dtype.element_ty), mask=where)
