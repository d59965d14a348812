"""Conversions between f32 and the 8-bit and 4-bit floats of stored rows, on their bits, as every GPU can run them.

    E4M3    sign, 4 bits of exponent (bias 7), 3 bits of fraction; largest 448; NaN is 0x7F
    UE8M0   8 bits of exponent, 2^(byte - 127); NaN is 255
    E2M1    sign, 2 bits of exponent (bias 1), 1 bit of fraction: 0 0.5 1 1.5 2 3 4 6

Rounding is to nearest, ties to even.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Integers in the order of |x|, with NaN above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_e4m3(x):
    """Codes of f32, in u8. Magnitudes above 448 become 448."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is what an f32 near 2^14 is rounded to.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (sign | tl.where(is_nan, 0x7F, code)).to(tl.uint8)


@triton.jit
def e4m3_to_f16(code):
    """Values times 2^-8 of u8 codes, in f16: the bits move to their places, and f16 has another bias."""
    wide = code.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def from_e4m3(code):
    """Values of u8 codes, in f32."""
    return e4m3_to_f16(code).to(tl.float32) * 256.0


@triton.jit
def from_ue8m0(byte):
    """Values of u8 exponents, in f32. Byte 0 counts as 0, because 2^-127 is below the normal numbers of f32."""
    wide = byte.to(tl.int32)
    return tl.where(wide == 255, 0x7FFFFFFF, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e2m1(x):
    """Codes of f32, in i32. Magnitudes above 6 become 6, and NaN becomes 0 with its sign."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    code = (bits >> 28) & 8
    # Halfway between two values the even code wins.
    code += (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32)


@triton.jit
def power_of_two_scale(amax, largest_bits: tl.constexpr):
    """Exponents, in i32, of the smallest powers of two s with amax / s <= largest; 255 where amax is not finite.

    ``amax`` and ``largest`` are given as bits of f32.
    """
    exponent: tl.constexpr = largest_bits // 8388608
    fraction: tl.constexpr = largest_bits % 8388608
    byte = ((amax + (8388607 - fraction)) >> 23) - (exponent - 127)
    return tl.where(amax < 0x7F800000, byte, 255)
