"""What happens to a row between a stream and its stored bytes, as formulas over ``lanes``.

    norm      y * w / sqrt(mean(y^2) + eps)
    rope      (e, o) -> (e cos - o sin, o cos + e sin) on the last channels
    hadamard  y H / sqrt(n), Sylvester order
    store_kv  f32, bf16, fp8_row, fp8_tile64: E4M3 NoPE bytes, bf16 RoPE, scale
    store_key f32, bf16, nvfp4, mxfp4: E2M1 pairs, scale bytes

Every formula rounds where the XLA form in ``dsv4jax`` rounds, so that stored bytes agree.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pallas_kernels.language.lanes import Buffer, Divisor, Row, add, fold, maximum
from pallas_kernels.language.machine import VECTOR, Channels, Condition, Index, Value, negate, select

KV_FORMATS = ("f32", "bf16", "fp8_row", "fp8_tile64")
KEY_FORMATS = ("f32", "bf16", "nvfp4", "mxfp4")
TILE = 64  # NoPE channels under one scale of fp8_tile64
KEY_GROUP = {"nvfp4": 16, "mxfp4": 32}
E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_AMAX = 1e-4
_INFINITY = 0x7F800000
_NAN = 0x7FFFFFFF


def magnitude_bits(x: Value) -> Value:
    """i32 whose order is that of |x|, with NaN on top: an integer maximum keeps NaN, and costs one instruction."""
    return x.machine.bits(x) & 0x7FFFFFFF


def _is_finite(bits: Value) -> Value:
    return bits < _INFINITY


def amax_bits(row: Row, values: Channels, below: int | None = None) -> Value:
    """Largest magnitude among this lane's channels (those below a bound), as bits."""
    peaks = []
    for step, channels in enumerate(values):
        inside = row.before(step, row.dim if below is None else below)
        if inside is not False:
            peaks.append(select(inside, fold(maximum, [magnitude_bits(value) for value in channels]), 0))
    return fold(maximum, peaks)


def norm(row: Row, y: Channels, weight: Channels, eps: float, nope_dim: int | None = None) -> tuple[Channels, Value]:
    """RMSNorm of a row. Also returns its largest NoPE magnitude, f32, in all lanes.

    (y * w) * r with one r >= 0 for the whole row: rounding is monotonic, so the largest magnitude of y * w becomes that
    of the result, and one reduction over the team finds both.
    """
    weighted = row.map(lambda a, b: a * b, y, weight)
    squares = [value * value for step in y for value in step]  # channels past the row's end are 0
    peak = amax_bits(row, weighted, nope_dim)
    total, peak = row.team.reduce((add, fold(add, squares)), (maximum, peak))
    inverse_rms = row.machine.inverse_sqrt(total * (1 / row.dim) + eps)
    return row.map(lambda a: a * inverse_rms, weighted), row.machine.from_bits(peak) * inverse_rms


def unit_norm(row: Row, y: Channels, eps: float) -> Channels:
    """RMSNorm of a row, without a weight."""
    (total,) = row.team.reduce((add, fold(add, [value * value for step in y for value in step])))
    inverse_rms = row.machine.inverse_sqrt(total * (1 / row.dim) + eps)
    return row.map(lambda a: a * inverse_rms, y)


Angles = list[tuple[Condition, list[Value]]]  # per step: whether its channels turn; two cosines, two sines


def load_angles(row: Row, table: Buffer, *lead: Index, where: Condition) -> Angles:
    """The angles of ``table[lead]``: cosines of all pairs, then sines."""
    rope_dim = table.shape[-1]
    nope_dim = row.dim - rope_dim
    angles = []
    for step, channel in enumerate(row.channel):
        is_rope = negate(row.before(step, nope_dim)) & row.before(step, row.dim)
        pair = (channel - nope_dim) >> 1
        cos = table.load_floats(*lead, pair, count=2, where=where & is_rope)
        sin = table.load_floats(*lead, pair + rope_dim // 2, count=2, where=where & is_rope)
        angles.append((is_rope, cos + sin))
    return angles


def rope(y: Channels, angles: Angles) -> Channels:
    """Turn the last channels."""
    turned = []
    for (a, b, c, d), (is_rope, (cos, cos_next, sin, sin_next)) in zip(y, angles, strict=True):
        new = [a * cos - b * sin, b * cos + a * sin, c * cos_next - d * sin_next, d * cos_next + c * sin_next]
        turned.append([select(is_rope, x, old) for x, old in zip(new, (a, b, c, d), strict=True)])
    return turned


def hadamard(row: Row, y: Channels) -> Channels:
    """The normalised Walsh-Hadamard transform of a row whose size is a power of two: one butterfly per index bit.

    Bits 0 and 1 of a channel's number are its place in the lane, the next ones the lane's, the last ones the step.
    """
    machine, lanes = row.machine, row.team.size
    a = [[p + q, p - q, r + s, r - s] for p, q, r, s in y]
    y = [[p + r, q + s, p - r, q - s] for p, q, r, s in a]
    distance = 1
    while distance < min(lanes, row.dim // VECTOR):
        is_upper = (row.team.lane & distance) > 0
        partner = row.map(lambda value, d=distance: machine.shuffle_xor(value, d), y)
        y = row.map(lambda mine, other, up=is_upper: select(up, other - mine, mine + other), y, partner)
        distance *= 2
    distance = 1
    while distance < row.steps:
        pairs = [(step, step | distance) for step in range(row.steps) if not step & distance]
        for low, high in pairs:
            y[low], y[high] = (
                [p + q for p, q in zip(y[low], y[high], strict=True)],
                [p - q for p, q in zip(y[low], y[high], strict=True)],
            )
        distance *= 2
    return row.map(lambda value: value * row.dim**-0.5, y)


def power_of_two_scale(amax: Value, largest: float) -> Value:
    """UE8M0 byte of the smallest power of two s with amax / s <= largest, from amax's bits; 255 where not finite.

    With largest = f * 2^e, f in [1, 2): s is amax's own power of two over 2^e, or its double where amax's fraction
    exceeds f.
    """
    exponent, fraction = divmod(int(np.float32(largest).view(np.int32)), 1 << 23)
    byte = ((amax + ((1 << 23) - 1 - fraction)) >> 23) - (exponent - 127)
    return select(_is_finite(amax), byte, 255)


def from_ue8m0(byte: Value) -> Value:
    return byte.machine.from_bits(select(byte.equals(255), byte.machine.constant(_NAN, "i32"), byte << 23))


def to_e2m1(x: Value) -> Value:
    """f32 -> E2M1 code with its sign in bit 3; ties to the even code, saturates at 6."""
    magnitude = x.machine.from_bits(magnitude_bits(x))
    code = (x.machine.bits(x) >> 28) & 8
    for low, (a, b) in enumerate(itertools.pairwise(E2M1_VALUES)):
        above = magnitude >= (a + b) / 2 if low % 2 else magnitude > (a + b) / 2
        code = code + select(above, x.machine.constant(1, "i32"), 0)
    return code


def store_kv(
    row: Row, values: Channels, rows: Any, *lead: Index, kv_format: str, where: Condition, amax: Value | None = None
) -> None:
    """Encode a row f32 [head_dim] and store it at rows' leading indices.

    Args:
      rows: buffers ``nope``, ``rope`` and ``scale`` (None for the plain formats).
      amax: f32, the row's largest NoPE magnitude, if known already.
    """
    machine, nope_dim = row.machine, rows.nope.shape[-1]
    divisors: list[Divisor] = []  # one per step
    if kv_format == "fp8_row":
        if amax is None:
            (bits,) = row.team.reduce((maximum, amax_bits(row, values, nope_dim)))
            amax = machine.from_bits(bits)
        scale = amax.maximum(MIN_AMAX) * float(np.float32(1 / E4M3_MAX))
        divisors = [Divisor(scale)] * row.steps
        rows.scale.store_floats([scale], *lead, where=where & row.team.lane.equals(0))
    elif kv_format == "fp8_tile64":
        floor = int(np.float32(MIN_AMAX).view(np.int32))
        for step, channels in enumerate(values):
            bits = fold(maximum, [magnitude_bits(value) for value in channels])
            bits = row.team.neighbours(maximum, bits, TILE // VECTOR)
            byte = power_of_two_scale(bits.maximum(floor), E4M3_MAX)
            divisors.append(Divisor(from_ue8m0(byte)))
            first = row.before(step, nope_dim)
            if first is not False:
                first = where & first & (row.channel[step] % TILE).equals(0)
                rows.scale.store_bytes(byte, *lead, row.channel[step] // TILE, count=1, where=first)
    for step, channels in enumerate(values):
        is_nope, channel = row.before(step, nope_dim), row.channel[step]
        if is_nope is not False:
            if divisors:
                codes = machine.to_e4m3([value / divisors[step] for value in channels])
                rows.nope.store_bytes(codes, *lead, channel, where=where & is_nope)
            else:
                rows.nope.store_floats(channels, *lead, channel, where=where & is_nope)
        is_rope = negate(is_nope) & row.before(step, row.dim)
        if is_rope is not False:
            rows.rope.store_floats(channels, *lead, channel - nope_dim, where=where & is_rope)


def store_key(row: Row, values: Channels, rows: Any, *lead: Index, key_format: str, where: Condition) -> None:
    """Encode an indexer key f32 [dim] and store it at rows' leading indices; buffers ``codes`` and ``scale``."""
    machine = row.machine
    for step, channels in enumerate(values):
        channel, stored = row.channel[step], where & row.before(step, row.dim)
        if key_format not in KEY_GROUP:
            rows.codes.store_floats(channels, *lead, channel, where=stored)
            continue
        group = KEY_GROUP[key_format]
        bits = fold(maximum, [magnitude_bits(value) for value in channels])
        bits = row.team.neighbours(maximum, bits, group // VECTOR)
        if key_format == "nvfp4":
            scale = machine.from_bits(bits) * float(np.float32(1 / E2M1_MAX))
            scale = scale.maximum(2.0**-9).minimum(E4M3_MAX)
            scale = select(_is_finite(bits), scale, float("nan"))
            byte = machine.to_e4m3([scale] * 4)
            scale, byte = machine.from_e4m3(byte)[0], byte & 0xFF
        else:
            floor = int(np.float32(E2M1_MAX * 2.0**-126).view(np.int32))
            byte = power_of_two_scale(bits.maximum(floor), E2M1_MAX)
            scale = from_ue8m0(byte)
        first = stored & (channel % group).equals(0)
        rows.scale.store_bytes(byte, *lead, channel // group, count=1, where=first)
        divisor = Divisor(scale)
        codes = [to_e2m1(value / divisor) for value in channels]
        packed = (codes[0] | (codes[1] << 4)) | ((codes[2] << 8) | (codes[3] << 12))
        rows.codes.store_bytes(packed, *lead, channel >> 1, count=2, where=stored)


def load_kv(row: Row, rows: Any, *lead: Index, kv_format: str, where: Condition) -> Channels:
    """Decode the row at rows' leading indices to f32; 0 where not."""
    machine, nope_dim = row.machine, rows.nope.shape[-1]
    row_scale = rows.scale.load_floats(*lead, count=1, where=where)[0] if kv_format == "fp8_row" else None
    decoded = []
    for step, channel in enumerate(row.channel):
        is_nope = row.before(step, nope_dim)
        is_rope = negate(is_nope) & row.before(step, row.dim)
        nope: Any = None
        if is_nope is not False and kv_format.startswith("fp8"):
            codes = rows.nope.load_bytes(*lead, channel, where=where & is_nope)
            scale = row_scale
            if scale is None:
                scale = from_ue8m0(rows.scale.load_bytes(*lead, channel // TILE, count=1, where=where & is_nope))
            nope = [value * scale for value in machine.from_e4m3(codes)]
        elif is_nope is not False:
            nope = rows.nope.load_floats(*lead, channel, where=where & is_nope)
        if is_rope is not False:
            tail = rows.rope.load_floats(*lead, channel - nope_dim, where=where & is_rope)
            nope = tail if nope is None else [select(is_nope, a, b) for a, b in zip(nope, tail, strict=True)]
        decoded.append(nope if nope is not None else [machine.constant(0, "f32")] * VECTOR)
    return decoded
