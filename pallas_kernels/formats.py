"""Number formats of stored rows, as kernels encode and decode them. A row is held by a team of lanes.

    key rows, of the window and of entries (448 NoPE + 64 RoPE channels at the models' sizes)
      f32, bf16    nope f32 or bf16 [448] | rope as nope [64]
      fp8_row      nope E4M3 [448] | rope bf16 [64] | scale f32 [], one multiplier                          = 580 B
      fp8_tile64   nope E4M3 [448] | rope bf16 [64] | scale UE8M0 [7], one exponent for every 64 channels   = 583 B
    indexer keys (128 channels)
      f32, bf16    codes f32 or bf16 [128]
      nvfp4        codes E2M1 pairs [64] | scale E4M3 [8], one for every 16 channels                        =  72 B
      mxfp4        codes E2M1 pairs [64] | scale UE8M0 [4], one for every 32 channels                       =  68 B

Codes and scale bytes are uint8. A pair of E2M1 codes has the even channel in its low nibble. Rounding is to nearest,
ties to even. Values are rounded where the XLA formats of the same names round, so that both store the same bytes.

Attention converts key rows to f16 for the tensor cores. It supports every format that is an ``AttendedFormat``.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Protocol

import numpy as np

from pallas_kernels.language.lanes import Buffer, Divisor, Row, Shaped, Team, fold, maximum
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Step, Value, negate, select
from pallas_kernels.rows import (
    E2M1_MAX,
    amax_bits,
    bf16_to_f16,
    from_ue8m0,
    is_finite,
    magnitude_bits,
    packed_e2m1,
    power_of_two_scale,
)

E4M3_MAX = 448.0
_EXPONENT, _FRACTION, _ONE = 0x7F800000, 0x007FFFFF, 0x3F800000  # bit masks of an f32
MIN_AMAX = 1e-4  # lower bound on a key row's (or tile's) largest magnitude, so that the scale of a zero row is not 0


class KVRows[Array: Shaped](Protocol):
    """Key rows. The leading axes are those of the array they are in, such as (layer, page, row)."""

    @property
    def nope(self) -> Array: ...  # [..., nope_dim]

    @property
    def rope(self) -> Array: ...  # [..., rope_dim]

    @property
    def scale(self) -> Array | None: ...  # [...] or [..., scales]; None if the format has no scale


class KeyRows[Array: Shaped](Protocol):
    """Indexer keys."""

    @property
    def codes(self) -> Array: ...  # [..., dim], or [..., dim / 2] if codes are stored as pairs

    @property
    def scale(self) -> Array | None: ...  # [..., scales]; None if the format has no scale


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowPlace:
    """Where a row is stored, and which lanes load or store there."""

    rows: KVRows[Buffer]
    lead: tuple[Index, ...]  # indices of the leading axes
    where: Condition


class KVFormat(abc.ABC):
    """A format of key rows. RoPE channels are floats in every format; formats differ in NoPE channels and scales."""

    itemsize: int
    """Bytes of a NoPE channel."""

    scale_is_power_of_two: ClassVar[bool] = True
    """Whether every scale is a power of two; True if there are no scales."""

    @abc.abstractmethod
    def num_scales(self, nope_dim: int) -> int:
        """Return the number of elements of a row's ``scale``; 0 if there is none."""

    def unsupported(self, nope_dim: int, rope_dim: int) -> str | None:
        """Return why rows of these sizes cannot be stored, or None if they can."""
        if nope_dim % VECTOR or rope_dim % VECTOR:
            return f"NoPE and RoPE dims must be divisible by {VECTOR}, got {nope_dim} and {rope_dim}"
        return None

    def store(
        self,
        row: Row,
        values: Channels,
        rows: KVRows[Buffer],
        *lead: Index,
        where: Condition,
        amax: Value | None = None,
    ) -> None:
        """Encode a row and store it at the leading indices of ``rows``.

        Args:
          row: how the row is spread over its team.
          values: f32 [nope_dim + rope_dim].
          rows: the buffers to store to.
          lead: indices of the leading axes.
          where: which lanes store; all lanes of a team must agree.
          amax: f32, the row's largest NoPE magnitude, if it is already known.
        """
        nope_dim = rows.nope.shape[-1]
        divisors = self._store_scale(row, values, RowPlace(rows, lead, where), amax)
        for step, channels in enumerate(values):
            is_nope, channel = row.before(step, nope_dim), row.channel[step]
            if is_nope is not False:
                scaled = [value / divisors[step] for value in channels] if divisors else channels
                self._store_nope(scaled, rows.nope, *lead, channel, where=where & is_nope)
            is_rope = negate(is_nope) & row.before(step, row.dim)
            if is_rope is not False:
                rows.rope.store_floats(channels, *lead, channel - nope_dim, where=where & is_rope)

    def load(self, row: Row, rows: KVRows[Buffer], *lead: Index, where: Condition) -> Channels:
        """Load and decode the row at the leading indices of ``rows``: f32 [nope_dim + rope_dim].

        Lanes where ``where`` is False get 0.
        """
        nope_dim = rows.nope.shape[-1]
        row_scale = self._load_row_scale(RowPlace(rows, lead, where))
        decoded = []
        for step, channel in enumerate(row.channel):
            is_nope = row.before(step, nope_dim)
            is_rope = negate(is_nope) & row.before(step, row.dim)
            values = [row.machine.constant(0, "f32")] * VECTOR
            if is_nope is not False:
                values = self._load_nope(RowPlace(rows, lead, where & is_nope), channel, row_scale)
            if is_rope is not False:
                rope = rows.rope.load_floats(*lead, channel - nope_dim, where=where & is_rope)
                values = [select(is_nope, a, b) for a, b in zip(values, rope, strict=True)]
            decoded.append(values)
        return decoded

    @abc.abstractmethod
    def _store_scale(self, row: Row, values: Channels, place: RowPlace, amax: Value | None) -> list[Divisor]:
        """Store the scales. Returns the divisor of each step's NoPE channels; an empty list if they are not divided."""

    @abc.abstractmethod
    def _store_nope(self, values: Step, nope: Buffer, *index: Index, where: Condition) -> None:
        """Store one step's NoPE channels, which are already divided by their scale."""

    def _load_row_scale(self, place: RowPlace) -> Value | None:
        """Load the scale of a whole row; None if the format has no such scale."""
        return None

    @abc.abstractmethod
    def _load_nope(self, place: RowPlace, channel: Value, row_scale: Value | None) -> Step:
        """Load one step's NoPE channels, from ``channel`` on, and multiply them by their scale."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Quad:
    """Four lanes of a warp that convert a row to f16 together. Of each 64 stored NoPE bytes, a lane takes 16."""

    machine: TensorCores
    quarter: Value  # which of the four lanes this is
    nope_dim: int

    LANES: ClassVar[int] = 4
    LOAD_BYTES: ClassVar[int] = 16  # that a lane loads at once


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SplitScale:
    """A row's scales, split into powers of two, by which codes are multiplied in f16, and a remaining factor."""

    powers: list[Value]  # for each load of a lane, as a pair of f16; empty if codes are not multiplied
    factor: Value | None  # f32 in [1, 2) by which the row must still be multiplied; None means 1


class AttendedFormat(KVFormat):
    """A format that attention can read: a quad of lanes converts each row to f16. RoPE channels are bf16.

    In f16 a code times a power of two is exact, but a code times an arbitrary scale is not. Therefore only the power of
    two of a row's scale is applied to the codes. The rest is the row's ``factor``, by which the row's logits and
    weights are multiplied.
    """

    def num_loads(self, quad: Quad) -> int:
        """Return how many loads each lane needs for a row's NoPE channels."""
        return quad.nope_dim * self.itemsize // (quad.LANES * quad.LOAD_BYTES)

    def load_scales(self, quad: Quad, address: Value, where: Condition) -> list[Value]:
        """Start to load this lane's share of a row's scales, at an i64 address; 0 where ``where`` is False."""
        return []

    def split_scale(self, quad: Quad, scales: list[Value]) -> SplitScale:
        """Compute a row's scales from what ``load_scales`` has loaded in the four lanes."""
        return SplitScale(powers=[], factor=None)

    @abc.abstractmethod
    def to_f16(self, quad: Quad, words: list[Value], scale: SplitScale, load: int) -> list[Value]:
        """Convert the 16 bytes of a lane's ``load``-th load to f16 and multiply by the power of two.

        Returns pairs of f16 in the order of the channels.
        """


class PlainRows(KVFormat):
    """Rows with every channel in one float dtype, f32 unless a subclass says otherwise."""

    itemsize = 4

    def num_scales(self, nope_dim: int) -> int:
        return 0

    def _store_scale(self, row: Row, values: Channels, place: RowPlace, amax: Value | None) -> list[Divisor]:
        return []

    def _store_nope(self, values: Step, nope: Buffer, *index: Index, where: Condition) -> None:
        nope.store_floats(values, *index, where=where)

    def _load_nope(self, place: RowPlace, channel: Value, row_scale: Value | None) -> Step:
        return place.rows.nope.load_floats(*place.lead, channel, where=place.where)


class Bf16Rows(PlainRows, AttendedFormat):
    """Rows with every channel in bf16."""

    itemsize = 2

    def to_f16(self, quad: Quad, words: list[Value], scale: SplitScale, load: int) -> list[Value]:
        return [bf16_to_f16(quad.machine, word) for word in words]


class E4M3Rows(AttendedFormat):
    """Rows with NoPE channels as E4M3 codes. Subclasses define the scales."""

    itemsize = 1

    def _store_nope(self, values: Step, nope: Buffer, *index: Index, where: Condition) -> None:
        nope.store_bytes(nope.machine.to_e4m3(values), *index, where=where)

    def to_f16(self, quad: Quad, words: list[Value], scale: SplitScale, load: int) -> list[Value]:
        halves = [half for word in words for half in quad.machine.e4m3_to_f16(word)]
        return [quad.machine.multiply_f16(half, scale.powers[load]) for half in halves]


class Fp8Rows(E4M3Rows):
    """E4M3 codes with one f32 multiplier per row, max(amax, 1e-4) / 448."""

    scale_is_power_of_two = False

    def num_scales(self, nope_dim: int) -> int:
        return 1

    def _store_scale(self, row: Row, values: Channels, place: RowPlace, amax: Value | None) -> list[Divisor]:
        assert place.rows.scale is not None
        if amax is None:
            (bits,) = row.team.reduce((maximum, amax_bits(row, values, place.rows.nope.shape[-1])))
            amax = row.machine.from_bits(bits)
        scale = amax.maximum(MIN_AMAX) * float(np.float32(1 / E4M3_MAX))
        divisor = Divisor(scale)
        place.rows.scale.store_floats([scale], *place.lead, where=place.where & (row.team.lane == 0))
        return [divisor] * row.steps

    def _load_row_scale(self, place: RowPlace) -> Value | None:
        assert place.rows.scale is not None
        return place.rows.scale.load_floats(*place.lead, count=1, where=place.where)[0]

    def _load_nope(self, place: RowPlace, channel: Value, row_scale: Value | None) -> Step:
        assert row_scale is not None
        codes = place.rows.nope.load_bytes(*place.lead, channel, where=place.where)
        return [value * row_scale for value in codes.machine.from_e4m3(codes)]

    def load_scales(self, quad: Quad, address: Value, where: Condition) -> list[Value]:
        return quad.machine.load(address, 4, where, constant=True)

    def split_scale(self, quad: Quad, scales: list[Value]) -> SplitScale:
        machine, (scale,) = quad.machine, scales
        power = machine.from_bits(scale & _EXPONENT)
        powers = [machine.to_f16(power, power)] * self.num_loads(quad)
        return SplitScale(powers, machine.from_bits(scale & _FRACTION | _ONE))


@dataclasses.dataclass(frozen=True)
class Fp8TileRows(E4M3Rows):
    """E4M3 codes with one UE8M0 scale per tile of channels, 2^ceil(log2(max(amax, 1e-4) / 448))."""

    tile: int

    def num_scales(self, nope_dim: int) -> int:
        return nope_dim // self.tile

    def unsupported(self, nope_dim: int, rope_dim: int) -> str | None:
        if nope_dim % self.tile:
            return f"the NoPE dim must be divisible by {self.tile}, got {nope_dim}"
        return super().unsupported(nope_dim, rope_dim)

    def _store_scale(self, row: Row, values: Channels, place: RowPlace, amax: Value | None) -> list[Divisor]:
        rows, lead = place.rows, place.lead
        assert rows.scale is not None
        floor, divisors = int(np.float32(MIN_AMAX).view(np.int32)), []
        for step, channels in enumerate(values):
            bits = fold(maximum, [magnitude_bits(value) for value in channels])
            bits = row.team.neighbours(maximum, bits, self.tile // VECTOR)
            byte = power_of_two_scale(bits.maximum(floor), E4M3_MAX)
            divisors.append(Divisor(from_ue8m0(byte)))
            is_nope = row.before(step, rows.nope.shape[-1])
            if is_nope is not False:
                first = place.where & is_nope & (row.channel[step] % self.tile == 0)
                rows.scale.store_bytes(byte, *lead, row.channel[step] // self.tile, count=1, where=first)
        return divisors

    def _load_nope(self, place: RowPlace, channel: Value, row_scale: Value | None) -> Step:
        rows, lead, where = place.rows, place.lead, place.where
        assert rows.scale is not None
        codes = rows.nope.load_bytes(*lead, channel, where=where)
        scale = from_ue8m0(rows.scale.load_bytes(*lead, channel // self.tile, count=1, where=where))
        return [value * scale for value in codes.machine.from_e4m3(codes)]

    def load_scales(self, quad: Quad, address: Value, where: Condition) -> list[Value]:
        """Each lane of the quad loads every fourth byte."""
        bytes, address = [], address + quad.machine.widen(quad.quarter)
        for first in range(0, self.num_scales(quad.nope_dim), quad.LANES):
            left = self.num_scales(quad.nope_dim) - first
            there = where if left >= quad.LANES else where & (quad.quarter < left)
            bytes += quad.machine.load(address + first, 1, there, constant=True)
        return bytes

    def split_scale(self, quad: Quad, scales: list[Value]) -> SplitScale:
        reach = quad.LANES * quad.LOAD_BYTES // self.itemsize  # number of channels that one load of the quad covers
        if self.tile % reach:
            raise ValueError(f"the channels of a load, {reach}, must lie in one tile, and tiles have {self.tile}")
        machine, team = quad.machine, Team(quad.machine, quad.LANES)
        packed = [byte << quad.quarter * 8 for byte in scales]
        packed = [team.neighbours(lambda a, b: a | b, word, quad.LANES) for word in packed]
        tiles = [i * quad.nope_dim // (self.num_loads(quad) * self.tile) for i in range(self.num_loads(quad))]
        powers = [from_ue8m0(packed[tile // 4] >> tile % 4 * 8 & 0xFF) for tile in tiles]
        return SplitScale([machine.to_f16(power, power) for power in powers], factor=None)


class KeyFormat(abc.ABC):
    """A format of indexer keys."""

    rounds_queries: ClassVar[bool] = False
    """Whether the indexer's queries are also rounded in this format."""

    @abc.abstractmethod
    def unsupported(self, dim: int) -> str | None:
        """Return why keys of this size cannot be stored, or None if they can."""

    @abc.abstractmethod
    def store(self, row: Row, values: Channels, rows: KeyRows[Buffer], *lead: Index, where: Condition) -> None:
        """Encode a key f32 [dim] and store it at the leading indices of ``rows``."""


class PlainKeys(KeyFormat):
    """Keys with every channel in one float dtype, f32 or bf16."""

    def unsupported(self, dim: int) -> str | None:
        return f"the key dim must be divisible by {VECTOR}, got {dim}" if dim % VECTOR else None

    def store(self, row: Row, values: Channels, rows: KeyRows[Buffer], *lead: Index, where: Condition) -> None:
        row.store(rows.codes, values, *lead, where=where)


class Fp4Keys(KeyFormat):
    """Keys as pairs of E2M1 codes, with one scale byte per group of channels. Subclasses define the scale's format."""

    rounds_queries = True
    per_scale: ClassVar[int]
    """Number of channels that share a scale."""
    is_clipped: ClassVar[bool]
    """Whether a group can have values too large for its scale."""

    def unsupported(self, dim: int) -> str | None:
        return f"the key dim must be divisible by {self.per_scale}, got {dim}" if dim % self.per_scale else None

    def store(self, row: Row, values: Channels, rows: KeyRows[Buffer], *lead: Index, where: Condition) -> None:
        assert rows.scale is not None
        for step, channels in enumerate(values):
            channel, stored = row.channel[step], where & row.before(step, row.dim)
            bits = fold(maximum, [magnitude_bits(value) for value in channels])
            byte, (codes,) = self.packed(row.team.neighbours(maximum, bits, self.per_scale // VECTOR), channels)
            first = stored & (channel % self.per_scale == 0)
            rows.scale.store_bytes(byte, *lead, channel // self.per_scale, count=1, where=first)
            rows.codes.store_bytes(codes, *lead, channel >> 1, count=2, where=stored)

    def packed(self, amax: Value, values: list[Value]) -> tuple[Value, list[Value]]:
        """Return the scale byte of a group, and words of four or eight codes of its values.

        Args:
          amax: ``magnitude_bits`` of the group's largest value.
          values: of the group, as many as are to be packed.

        Returns:
          The byte, and the words. The codes of a group with a value that is not finite are 0.
        """
        byte, units = self.units(amax, values)
        words = [packed_e2m1(units[n : n + 8], is_clipped=self.is_clipped) for n in range(0, len(units), 8)]
        return byte, [select(is_finite(amax), word, 0) for word in words]

    @abc.abstractmethod
    def units(self, amax: Value, values: list[Value]) -> tuple[Value, list[Value]]:
        """Return the scale byte of a group whose largest magnitude has bits ``amax``, and values of it by that scale.

        What is below the least normal number after the division is 0 in E2M1, however it is rounded.
        """


class Nvfp4Keys(Fp4Keys):
    """E4M3 scales, amax / 6 clipped to [2^-9, 448], one for every 16 channels.

    The global scale is 1 and is not stored.
    """

    per_scale = 16
    is_clipped = True

    def units(self, amax: Value, values: list[Value]) -> tuple[Value, list[Value]]:
        machine = amax.machine
        scale = machine.from_bits(amax) * float(np.float32(1 / E2M1_MAX))
        scale = scale.maximum(2.0**-9).minimum(E4M3_MAX)
        scale = select(is_finite(amax), scale, float("nan"))
        byte = machine.to_e4m3([scale] * VECTOR)
        divisor = Divisor(machine.from_e4m3(byte)[0])
        return byte & 0xFF, [value / divisor for value in values]


class Mxfp4Keys(Fp4Keys):
    """UE8M0 scales, the smallest power of two with which the group fits E2M1, one for every 32 channels."""

    per_scale = 32
    is_clipped = False

    def units(self, amax: Value, values: list[Value]) -> tuple[Value, list[Value]]:
        floor = int(np.float32(E2M1_MAX * 2.0**-126).view(np.int32))
        byte = power_of_two_scale(amax.maximum(floor), E2M1_MAX)  # 1 .. 253, or 255
        inverse = from_ue8m0(select(byte == 255, byte, byte * -1 + 254))
        return byte, [value * inverse for value in values]


KV_FORMATS: dict[str, KVFormat] = {
    "f32": PlainRows(),
    "bf16": Bf16Rows(),
    "fp8_row": Fp8Rows(),
    "fp8_tile64": Fp8TileRows(tile=64),
}
KEY_FORMATS: dict[str, KeyFormat] = {
    "f32": PlainKeys(),
    "bf16": PlainKeys(),
    "nvfp4": Nvfp4Keys(),
    "mxfp4": Mxfp4Keys(),
}
ATTENDED_FORMATS = {name: form for name, form in KV_FORMATS.items() if isinstance(form, AttendedFormat)}
