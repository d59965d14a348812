"""Conversion of rows of E2M1 codes to operands of tensor cores, in registers. It is exact up to a power of two.

    mxfp4   E2M1 with UE8M0 scales, per 32 dims   ->  E5M2, relative to the row's largest scale
    nvfp4   E2M1 with E4M3 scales, per 16 dims    ->  f16, keys relative to 2^14, a query to its largest scale

Four lanes share a row of 128 dims: lane j has the codes of dims 32 j .. 32 j + 31. Word i of what it unpacks becomes
bytes 16 i + 4 j .. 16 i + 4 j + 3 of the operand. This is a permutation of K which is the same for queries and keys, so
it does not change their product.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from pallas_kernels.language.lanes import fold, maximum
from pallas_kernels.language.tensor_cores import DType, TensorCores
from pallas_kernels.language.values import Value, select

DIM, QUARTERS = 128, 4
CODE_BYTES = DIM // 2
QUARTER_BYTES = CODE_BYTES // QUARTERS
_SIGNS = 0x80808080 - (1 << 32)
_EXPONENT = 23  # lowest bit of an f32's exponent


class Fp4(abc.ABC):
    """A 4-bit format. Below, ``scale`` is the scale byte of a group. If it encodes NaN, the results are NaN."""

    dtype: DType  # of the operand
    row_bytes: int  # of the operand
    scale_bytes: int  # bytes per row
    unit: float  # a key times a query is the product of their operands, of their scales, and of this

    def __init__(self, machine: TensorCores):
        self.machine = machine
        self.quarter = machine.thread % QUARTERS

    @property
    def quarter_scales(self) -> int:
        """Number of scale bytes in a quarter."""
        return self.scale_bytes // QUARTERS

    @abc.abstractmethod
    def unpack(self, codes: Sequence[list[Value]], scales: Sequence[Value]) -> tuple[list[list[Value]], list[Value]]:
        """Unpack a lane's quarter of two rows of keys, except for the last step.

        Args:
          codes: four words per row.
          scales: the quarter's scale bytes of each row.

        Returns:
          What ``finish`` takes, for each row; and the rows' f32 scale, in even quarters that of the first row and in
          odd quarters that of the second, or an empty list if it is 1.
        """

    @abc.abstractmethod
    def finish(self, parts: list[Value]) -> list[Value]:
        """Do the last step of unpacking. Returns the words of a row's operand."""

    @abc.abstractmethod
    def query(self, codes: list[Value], scales: list[Value]) -> list[Value]:
        """Unpack a lane's quarter of a query.

        Returns the words of its operand. ``scales`` are all scale bytes of the row, packed.
        """

    @abc.abstractmethod
    def query_scale(self, scales: list[Value]) -> Value:
        """Return the f32 scale of a query's row."""

    def _own(self, scales: list[Value]) -> Value:
        """Return this quarter's bytes of a row's scales."""
        count = self.quarter_scales
        selector = self.quarter * (0x11 * count) + 0x10 if count == 2 else self.quarter
        own = self.machine.permute_bytes(scales[0], scales[-1], selector)
        return own & ((1 << 8 * count) - 1)


def _largest(scales: list[Value]) -> Value:
    """Return the largest byte."""
    return fold(maximum, [(word >> 8 * i) & 0xFF for word in scales for i in range(4)])


class Mxfp4(Fp4):
    """E2M1 codes with UE8M0 scales, converted to E5M2.

    A table has the eight magnitudes times -2^(1 - d), where d = log2(largest scale / scale) and the largest scale is
    that of the row. This is exact for d <= 14. For d > 15, a group is treated as if d were 15, and there 0.5 becomes 0.
    The error is then less than 2^-15 of the largest magnitude possible with the row's largest scale.
    """

    dtype, row_bytes, scale_bytes, unit = "e5m2", 128, 4, 2.0**-2

    def unpack(self, codes: Sequence[list[Value]], scales: Sequence[Value]) -> tuple[list[list[Value]], list[Value]]:
        machine = self.machine
        pair = scales[0] | (scales[1] << 16)
        for distance in (1, 2):
            pair = machine.maximum_u16(pair, machine.shuffle_xor(pair, distance))
        largest = [pair & 0xFF, pair >> 16]
        rows = [self._unpack(*row) for row in zip(codes, scales, largest, strict=True)]
        return rows, [self._scale(select(self.quarter & 1 == 0, *largest))]

    def finish(self, parts: list[Value]) -> list[Value]:
        return [magnitudes + positive * 2 for magnitudes, positive in zip(parts[::2], parts[1::2], strict=True)]

    def query(self, codes: list[Value], scales: list[Value]) -> list[Value]:
        return self.finish(self._unpack(codes, self._own(scales), _largest(scales)))

    def query_scale(self, scales: list[Value]) -> Value:
        return self._scale(_largest(scales))

    def _scale(self, byte: Value) -> Value:
        # One ulp more than the power of two, so that 255 becomes NaN and not infinity.
        return self.machine.from_bits((byte << _EXPONENT) + 1)

    def _unpack(self, codes: list[Value], scale: Value, largest: Value) -> list[Value]:
        machine = self.machine
        # E5M2 codes of 0 .5 1 1.5 2 3 4 6, times 2. Dividing by 2 subtracts 4 from each byte, except from that of 0.
        difference = (largest - scale).minimum(15)
        low, high = 0x42403C00 - difference * 0x04040400, 0x4A484644 - difference * 0x04040404
        parts = []
        half = machine.constant(0x40404040, "i32")
        for word in codes:
            upper = word >> 16
            for signed, code in ((word, word & 0x7777), (upper, upper & 0x7777)):
                # If the top bit of a code is set, the permutation replicates the sign of byte 0x40, which gives 0.
                # Otherwise it gives 0x40, half of a sign bit, which marks codes that are not negative.
                parts += [machine.permute_bytes(low, high, code), machine.permute_bytes(half, half, signed)]
        return parts


class Nvfp4(Fp4):
    """E2M1 codes with E4M3 scales, converted to f16 by moving bits.

    The f16 s 000ee m000000000 is an E2M1 value times 2^-14, even if it is subnormal. This is exact for all scales: a
    key is a multiple of 2^-10 below 2^12 with six significant bits.
    """

    dtype, row_bytes, scale_bytes, unit = "f16", 256, 8, 2.0**14

    def unpack(self, codes: Sequence[list[Value]], scales: Sequence[Value]) -> tuple[list[list[Value]], list[Value]]:
        rows = []
        for row, pair in zip(codes, scales, strict=True):
            both = self.machine.e4m3_to_f16(pair)[0]
            rows.append(
                [self.machine.permute_bytes(both, both, order) for order in (0x1010, 0x3232)] + self._unpack(row)
            )
        return rows, []

    def finish(self, parts: list[Value]) -> list[Value]:
        scales, words = parts[:2], parts[2:]
        each = len(words) // len(scales)
        return [self.machine.multiply_f16(word, scales[i // each]) for i, word in enumerate(words)]

    def query(self, codes: list[Value], scales: list[Value]) -> list[Value]:
        # The largest scale times f is in [2^14, 2^15), and a query is below 2^11, so its product with a key is below
        # 2^15.
        machine = self.machine
        f = machine.from_bits((268 - self._exponent(scales)) << _EXPONENT)
        groups = [scale * f for scale in machine.from_e4m3(self._own(scales))[: self.quarter_scales]]
        words = self.finish([machine.to_f16(scale, scale) for scale in groups] + self._unpack(codes))
        up = machine.constant(0x58005800, "i32")  # 2^7
        return [machine.multiply_f16(word, up) for word in words]

    def query_scale(self, scales: list[Value]) -> Value:
        return self.machine.from_bits((self._exponent(scales) - 7) << _EXPONENT)

    def _exponent(self, scales: list[Value]) -> Value:
        """Return the biased f32 exponent of the largest scale, at least that of the smallest E4M3 value."""
        byte = _largest([word & 0x7F7F7F7F for word in scales])
        return (self.machine.bits(self.machine.from_e4m3(byte)[0]) >> _EXPONENT).maximum(127 - 9)

    def _unpack(self, codes: list[Value]) -> list[Value]:
        machine, words = self.machine, []
        zero = machine.constant(0, "i32")
        for word in codes:
            odd = (word >> 3) & 0x0E0E0E0E | word & _SIGNS
            even = (word << 1) & 0x0E0E0E0E | (word << 4) & _SIGNS
            for four in (even, odd):
                for order in (0x1404, 0x3424):  # two bytes, each as the high byte above a zero byte
                    words.append(machine.permute_bytes(four, zero, order))
        return words


FORMATS: dict[str, type[Fp4]] = {"mxfp4": Mxfp4, "nvfp4": Nvfp4}
