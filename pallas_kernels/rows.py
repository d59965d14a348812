"""What happens to a row between a stream and its stored bytes, as formulas over ``lanes``.

    norm      y * w / sqrt(mean(y^2) + eps)
    rope      (e, o) -> (e cos - o sin, o cos + e sin) on the last channels
    hadamard  y H / sqrt(n), Sylvester order
    f16       bf16 times a factor, as tensor cores read it
    scales    a power of two for the largest magnitude, as a UE8M0 byte, and back; codes of E2M1

The layouts of stored bytes are in ``formats``. Every formula rounds where the XLA form in ``dsv4jax`` rounds, so that
the bytes agree.
"""

from __future__ import annotations

import itertools

import numpy as np

from pallas_kernels.language.lanes import Buffer, Row, add, fold, maximum
from pallas_kernels.language.machine import VECTOR, Channels, Condition, Index, Value, negate, select
from pallas_kernels.language.tensor_cores import TensorCores

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INFINITY = 0x7F800000
_NAN = 0x7FFFFFFF


def magnitude_bits(x: Value) -> Value:
    """i32 whose order is that of |x|, with NaN on top: an integer maximum keeps NaN, and costs one instruction."""
    return x.machine.bits(x) & 0x7FFFFFFF


def is_finite(bits: Value) -> Value:
    """Of the number whose magnitude has these bits."""
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


def bf16_to_f16(machine: TensorCores, word: Value, factor: Value | None = None) -> Value:
    """Two bf16 -> two f16: of their products with an f32 factor, where there is one."""
    pair = [machine.from_bits(word << 16), machine.from_bits(word & -65536)]
    if factor is not None:
        pair = [value * factor for value in pair]
    return machine.to_f16(*pair)


def power_of_two_scale(amax: Value, largest: float) -> Value:
    """UE8M0 byte of the smallest power of two s with amax / s <= largest, from amax's bits; 255 where not finite.

    With largest = f * 2^e, f in [1, 2): s is amax's own power of two over 2^e, or its double where amax's fraction
    exceeds f.
    """
    exponent, fraction = divmod(int(np.float32(largest).view(np.int32)), 1 << 23)
    byte = ((amax + ((1 << 23) - 1 - fraction)) >> 23) - (exponent - 127)
    return select(is_finite(amax), byte, 255)


def from_ue8m0(byte: Value) -> Value:
    """f32 of a UE8M0 byte, 2^(byte - 127); NaN of 255."""
    return byte.machine.from_bits(select(byte == 255, byte.machine.constant(_NAN, "i32"), byte << 23))


def to_e2m1(x: Value) -> Value:
    """f32 -> E2M1 code with its sign in bit 3; ties to the even code, saturates at 6."""
    magnitude = x.machine.from_bits(magnitude_bits(x))
    code = (x.machine.bits(x) >> 28) & 8
    for low, (a, b) in enumerate(itertools.pairwise(E2M1_VALUES)):
        above = magnitude >= (a + b) / 2 if low % 2 else magnitude > (a + b) / 2
        code = code + select(above, x.machine.constant(1, "i32"), 0)
    return code
