"""The arithmetic on a row between a stream and its stored bytes, written with the types of ``lanes``.

    norm      y * w / sqrt(mean(y^2) + eps)
    rope      (e, o) -> (e cos - o sin, o cos + e sin) on the last channels
    hadamard  y H / sqrt(n), Sylvester order
    swiglu    silu(gate) * up, both clamped
    bf16      values rounded to it, as f32
    f16       bf16 times a factor, for the tensor cores
    scales    the power of two for a largest magnitude, as a UE8M0 byte, and back; E2M1 codes

The layouts of stored bytes are in ``formats``. Every function rounds where the XLA form in ``dsv4jax`` rounds, so that
both store the same bytes.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pallas_kernels.language.lanes import Buffer, Row, add, fold, maximum
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Step, Value, negate, select

E2M1_MAX = 6.0
_MOST_EXPONENT = 80.0  # silu of a gate below -80 is 0 but for 2^-108
_INFINITY, _NAN = 0x7F800000, 0x7FFFFFFF  # bits of f32


def magnitude_bits(x: Value) -> Value:
    """Return an i32 with the same order as |x|, and NaN above all others.

    An integer maximum of these keeps NaN, and takes one instruction.
    """
    return x.machine.bits(x) & 0x7FFFFFFF


def magnitude(x: Value) -> Value:
    """Return |x|."""
    return x.machine.from_bits(magnitude_bits(x))


def is_finite(bits: Value) -> Value:
    """Whether a number is finite, given ``magnitude_bits`` of it."""
    return bits < _INFINITY


def amax_bits(row: Row, values: Channels, below: int | None = None) -> Value:
    """Return the largest magnitude among this lane's channels, as bits. With ``below`` only channels below it count."""
    peaks = []
    for step, channels in enumerate(values):
        inside = row.before(step, row.dim if below is None else below)
        if inside is not False:
            peaks.append(select(inside, fold(maximum, [magnitude_bits(value) for value in channels]), 0))
    return fold(maximum, peaks)


def norm(row: Row, y: Channels, weight: Channels, eps: float, nope_dim: int | None = None) -> tuple[Channels, Value]:
    """Apply RMSNorm to a row. Also returns the result's largest NoPE magnitude, f32, in all lanes.

    Computed as (y * w) * r with one r >= 0 for the whole row. Rounding is monotonic, so the largest magnitude of the
    result is that of y * w times r, and one reduction over the team finds both the rms and the largest magnitude.
    """
    weighted = row.map(lambda a, b: a * b, y, weight)
    squares = [value * value for step in y for value in step]  # channels past the row's end are 0
    peak = amax_bits(row, weighted, nope_dim)
    total, peak = row.team.reduce((add, fold(add, squares)), (maximum, peak))
    inverse_rms = row.machine.inverse_sqrt(total * (1 / row.dim) + eps)
    return row.map(lambda a: a * inverse_rms, weighted), row.machine.from_bits(peak) * inverse_rms


def unit_norm(row: Row, y: Channels, eps: float) -> Channels:
    """Apply RMSNorm without a weight to a row."""
    (total,) = row.team.reduce((add, fold(add, [value * value for step in y for value in step])))
    inverse_rms = row.machine.inverse_sqrt(total * (1 / row.dim) + eps)
    return row.map(lambda a: a * inverse_rms, y)


Angles = list[tuple[Condition, list[Value]]]  # per step: whether its channels are rotated; two cosines, two sines


def load_angles(row: Row, table: Buffer, *lead: Index, where: Condition) -> Angles:
    """Load the angles ``table[lead]``: cosines of all pairs, then sines."""
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
    """Rotate the last channels of a row."""
    turned = []
    for (a, b, c, d), (is_rope, (cos, cos_next, sin, sin_next)) in zip(y, angles, strict=True):
        new = [a * cos - b * sin, b * cos + a * sin, c * cos_next - d * sin_next, d * cos_next + c * sin_next]
        turned.append([select(is_rope, x, old) for x, old in zip(new, (a, b, c, d), strict=True)])
    return turned


def hadamard(row: Row, y: Channels) -> Channels:
    """Apply the normalised Walsh-Hadamard transform to a row whose size is a power of two, a butterfly per index bit.

    Bits 0 and 1 of a channel's index are its place in the lane's step, the next bits are the lane, and the last bits
    the step.
    """
    machine, lanes = row.machine, row.team.size
    a = [[p + q, p - q, r + s, r - s] for p, q, r, s in y]
    y = [[p + r, q + s, p - r, q - s] for p, q, r, s in a]
    distance = 1
    while distance < min(lanes, row.dim // VECTOR):
        # Lower lanes get mine + other, and upper ones other - mine.
        sign = select((row.team.lane & distance) > 0, machine.constant(-1.0, "f32"), 1.0)
        partner = row.map(lambda value, d=distance: machine.shuffle_xor(value, d), y)
        y = row.map(lambda mine, other, sign=sign: machine.fma(mine, sign, other), y, partner)
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


def swiglu(machine: TensorCores, gate: Value, up: Value, limit: float) -> Value:
    """Return silu(gate) * up after clamps, if the limit is not 0: of the gate from above alone."""
    if limit > 0:
        gate, up = gate.minimum(limit), up.minimum(limit).maximum(-limit)
    power = machine.exp((gate * -1.0).minimum(_MOST_EXPONENT))
    return gate * machine.normal_reciprocal(power + 1.0) * up


def through_bf16(values: Step) -> Step:
    """Round an even number of values to bf16. Returns them as f32."""
    rounded = []
    for i in range(0, len(values), 2):
        machine = values[i].machine
        word = machine.to_bf16(values[i], values[i + 1])
        rounded += from_bf16(word)
    return rounded


def from_bf16(word: Value) -> list[Value]:
    """Return the two f32 of a word of bf16, the one in its low half first."""
    machine = word.machine
    return [machine.from_bits(word << 16), machine.from_bits(word & -65536)]


def bf16_to_f16(machine: TensorCores, word: Value, factor: Value | None = None) -> Value:
    """Convert two packed bf16 to two packed f16, after multiplying by the f32 ``factor`` if there is one."""
    pair = from_bf16(word)
    if factor is not None:
        pair = [value * factor for value in pair]
    return machine.to_f16(*pair)


def power_of_two_scale(amax: Value, largest: float) -> Value:
    """Return the UE8M0 byte of the smallest power of two s with amax / s <= largest; 255 if amax is not finite.

    ``amax`` is given as bits. With largest = f * 2^e and amax = g * 2^h, f and g in [1, 2), s is 2^(h-e), or twice that
    if g > f.
    """
    exponent, fraction = divmod(int(np.float32(largest).view(np.int32)), 1 << 23)
    byte = ((amax + ((1 << 23) - 1 - fraction)) >> 23) - (exponent - 127)
    return select(is_finite(amax), byte, 255)


def from_ue8m0(byte: Value) -> Value:
    """Return the f32 of a UE8M0 byte, 2^(byte - 127); NaN for 255."""
    return byte.machine.from_bits(select(byte == 255, byte.machine.constant(_NAN, "i32"), byte << 23))


def packed_e2m1(values: list[Value], *, is_clipped: bool) -> Value:
    """Pack the E2M1 codes of four or eight f32, each with the sign in bit 3 and the first one in the low bits.

    Ties go to the even code. Magnitudes above 6 are expected only with ``is_clipped``, and become 6. If a value is NaN,
    the codes of all may be anything.
    """
    machine, sums = values[0].machine, []
    for x in values:
        size = magnitude(x).minimum(E2M1_MAX) if is_clipped else magnitude(x)
        # With p the power of two below |x|, or 1 if that is less, codes are p / 2 apart, and begin at 0 for p = 1, at 2
        # for p = 2 and at 4 for p = 4. A sum with 2^22 p has its last bit there, and so is rounded to a code. To begin
        # where the codes do, it gets twice the exponent of 2^22 p, which is 298 for p = 1, as its last bits.
        power = machine.bits((size * 2.0**22).maximum(2.0**22)) & _INFINITY
        sums.append(machine.bits(size + machine.from_bits((power >> 22) + power)))
    signs = [machine.bits(x) for x in values]
    # A byte has an even code in its low half and the odd one after it in its high half.
    ones, highest = (0x01010101, 0x80808080 - (1 << 32)) if len(values) == 8 else (0x0101, 0x8080)
    codes = [_bytes(sums[n::2], 0) - ones * (298 & 0xFF) for n in range(2)]
    even = (codes[0] & (ones * 7)) | ((_bytes(signs[::2], 3) >> 4) & (ones * 8))
    odd = ((codes[1] << 4) & (ones * 0x70)) | (_bytes(signs[1::2], 3) & highest)
    return even | odd


def _bytes(words: list[Value], number: int) -> Value:
    """Return the bytes of this number of two or four words as one word, whose upper half is undefined for two."""
    machine = cast(TensorCores, words[0].machine)
    pairs = [
        machine.permute_bytes(a, b, number | number + 4 << 4) for a, b in zip(words[::2], words[1::2], strict=True)
    ]
    return machine.permute_bytes(pairs[0], pairs[-1], 0x5410)
