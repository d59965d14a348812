"""Rows of activations, which products multiply: a class for each way in which they are stored.

PlainRows          bf16 or f32, in order; outside of kernels they are an array
RoundedRows        E4M3, with a scale for each 128 of a row
OperandRows        bf16 in the order in which products with FP8 weights take them that are widened
ExpertRows         bf16 in the order in which products with experts stored in FP4 take them
RoundedExpertRows  E4M3 in such an order, with a scale for each 128 of a row

Rounding to FP8 is

    scale = the power of two from max(amax, 1e-4) / 448 up,      code = e4m3(x / scale)

``round_rows`` does it in a launch of its own. Kernels whose results enter such a product write them like this
themselves, from what they hold after their own products (``round_group``). Both give the same bytes.

A product's lane holds 16 adjacent bytes of a weight's row, so that its right operand needs pairs of numbers in another
order than they have in x (``products.few.staging``). Of each 64 numbers of a row, four quarters of eight pairs,

    pair p of quarter q      is stored as pair 4 p + q.

Products copy such rows 16 bytes at a time. Rows of x as they are they copy 4 bytes at a time, or put in order
themselves. Kernels whose results enter a product write operand rows where its plan takes them.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.language.lanes import Buffer, Shaped, Team, fold, maximum, quad_transposed, swapped
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.tensor_cores import UNIT, TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Index, Step, Value
from pallas_kernels.rows import from_bf16, from_ue8m0, power_of_two_scale

GROUP = 128  # numbers of a row that share a scale
PADDED = 128  # rows of scales are padded to a multiple of this
SEGMENT = 64  # numbers of an operand row that change places with one another
EXPERT_SEGMENT = 128  # the same of a row for experts
_SMALLEST_AMAX = 0x38D1B717  # 1e-4, the bits of an f32
_LARGEST_E4M3 = 448.0
_LOADED = 8  # bf16 that a lane loads at once
_TEAM = GROUP // _LOADED  # lanes that hold a group
_TEAMS = WARPGROUP // _TEAM  # of a block, each with a row
_GROUPS_AT_ONCE = 4  # groups of a row that a team loads together
_QUAD = 4  # lanes that share a row of a product
_STORED_TOGETHER = 8  # places for which a lane computes words before it stores any
_QUARTERS, _PAIRS = 4, 8
_QUARTER = 2 * _PAIRS
_HALF_SEGMENT = SEGMENT // 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Adjacent numbers of a row, as words of two."""

    words: list[Value]
    row: Value
    column: Value  # the first of them
    where: Condition  # whether they exist


def fours_of_pairs(
    machine: TensorCores, words: list[Value], row: Value, column: Value, where: Condition
) -> Iterator[Words]:
    """Yield four adjacent numbers of a row at a time, given a lane's words of two of each eight after a product."""
    # Two adjacent lanes have four adjacent numbers of each eight. The even one takes those of the first of two eights,
    # and the odd one those of the second.
    lane = machine.thread % WARP
    for n in range(0, len(words), 2):
        pair = swapped(machine, lane % 2 == 1, (words[n], words[n + 1]), 1)
        yield Words(list(pair), row, lane // 2 % 2 * 4 + lane % 2 * 8 + column + n * 8, where)


def store_words(rows: Buffer, places: Iterable[Words]) -> None:
    """Store what a lane has, some at a time."""
    for some in itertools.batched(places, _STORED_TOGETHER):
        for place in some:
            rows.store_words(place.words, place.row, place.column, where=place.where)


class ActivationRows(abc.ABC):
    """What products know of a class of rows. Instances hold arrays, what describes them, or their buffers."""

    @classmethod
    @abc.abstractmethod
    def shapes(cls, *shape: int) -> Self:
        """Return the shapes for rows [..., width]. Raises ValueError for a width that has no such rows."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype: ...

    def rounded(self, *, needed: jax.Array | None, simulate: bool) -> RoundedRows[jax.Array]:
        """Return these rows in FP8. ``needed`` is as for ``round_rows``."""
        raise TypeError(f"{type(self).__name__} are not rounded")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloatRows[Array: Shaped](ActivationRows):
    """Rows whose numbers are floats, in some order."""

    values: Array  # [..., width]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows[Array: Shaped](FloatRows[Array]):
    """Rows in order, bf16 or f32, or their buffer."""

    @classmethod
    def shapes(cls, *shape: int, dtype: DTypeLike = jnp.bfloat16) -> PlainRows[jax.ShapeDtypeStruct]:
        return PlainRows(values=jax.ShapeDtypeStruct(shape, dtype))

    def rounded(self: PlainRows[jax.Array], *, needed: jax.Array | None, simulate: bool) -> RoundedRows[jax.Array]:
        return round_rows(self.values, needed=needed, simulate=simulate)

    @staticmethod
    def sources(unit: Value, count: int) -> list[tuple[Value, int]]:
        """Return where ``count`` numbers come from that are stored from number ``unit * count`` of a row on."""
        return [(unit * count + i, VECTOR) for i in range(0, count, VECTOR)]

    def store_line(self: PlainRows[Buffer], values: Step, row: Value, column: Value, where: Condition = True) -> None:
        """Store adjacent numbers of a row, f32."""
        self.values.store_floats(values, row, column, where=where)

    def store_pairs(
        self: PlainRows[Buffer],
        machine: TensorCores,
        pairs: list[list[Value]],
        row: Value,
        column: Value,
        where: Condition = True,
    ) -> None:
        """Store numbers of a row, f32, as they are spread over a quad of lanes after a product (``wgmma``).

        ``pairs`` are the two adjacent numbers of each eight that the lane has. Every store writes whole sectors.
        """
        if self.dtype.itemsize == 4:
            for n, pair in enumerate(pairs):
                self.values.store_floats(pair, row, column + machine.thread % _QUAD * 2 + n * 8, where=where)
            return
        words = [machine.to_bf16(*pair) for pair in pairs]
        store_words(self.values, fours_of_pairs(machine, words, row, column, where))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRows[Array: Shaped](ActivationRows):
    """M rows of activations in FP8, in some order."""

    codes: Array  # uint8 [M, width], E4M3
    scales: Array  # f32 [width / 128, M rounded up to a multiple of 128]

    @classmethod
    def shapes(cls, *shape: int) -> Self:
        rows, width = shape
        if width % GROUP:
            raise ValueError(f"rounded rows must have a multiple of {GROUP} numbers, got {width}")
        codes: Any = jax.ShapeDtypeStruct((rows, width), jnp.uint8)
        scales: Any = jax.ShapeDtypeStruct((width // GROUP, -(-rows // PADDED) * PADDED), jnp.float32)
        return cls(codes=codes, scales=scales)

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.codes.shape
        return rows, width

    @property
    def dtype(self) -> np.dtype:
        return self.codes.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows[Array: Shaped](ScaledRows[Array]):
    """M rows of activations in FP8 in order, or their buffers. Past the last row, scales are those of zeros."""

    def rounded(self: RoundedRows[jax.Array], *, needed: jax.Array | None, simulate: bool) -> RoundedRows[jax.Array]:
        return self

    def store_group(
        self: RoundedRows[Buffer],
        machine: TensorCores,
        pairs: list[list[Value]],
        row: Value,
        group: Index,
        where: Condition = True,
    ) -> None:
        """Round and store a group of a row, by its number in the row. For ``pairs`` see ``round_group``.

        The scale is also stored where the row does not exist, as ``where`` says.
        """
        halves, scale = round_group(machine, pairs)
        quarter = machine.thread % _QUAD
        for n, words in enumerate(halves):
            self.codes.store_words(words, row, group * GROUP + (quarter * 16 + GROUP // 2 * n), where=where)
        self.scales.store_floats([scale], group, row, where=quarter == 0)

    def store_pairs(
        self: RoundedRows[Buffer],
        machine: TensorCores,
        pairs: list[list[Value]],
        row: Value,
        column: Value,
        where: Condition = True,
    ) -> None:
        """Do what ``PlainRows.store_pairs`` does, for whole groups."""
        for n in range(0, len(pairs), GROUP // 8):
            self.store_group(machine, pairs[n : n + GROUP // 8], row, (column + n * 8) // GROUP, where)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuarteredRows[Array: Shaped](FloatRows[Array]):
    """Rows of bf16, of which each segment is four quarters: pair p of quarter q is stored as pair 4 p + q."""

    segment: ClassVar[int]  # numbers that change places with one another

    @classmethod
    def shapes(cls, *shape: int) -> Self:
        if shape[-1] % cls.segment:
            raise ValueError(f"{cls.__name__} must have a multiple of {cls.segment} numbers, got {shape[-1]}")
        values: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return cls(values=values)

    @classmethod
    def of(cls, x: jax.Array) -> Self:
        """Return rows of bf16 [..., width] in this order. Raises ValueError as ``shapes`` does."""
        shape, pairs = cls.shapes(*x.shape).shape, cls.segment // (2 * _QUARTERS)
        values: Any = x.reshape(-1, _QUARTERS, pairs, 2).swapaxes(1, 2).reshape(shape)
        return cls(values=values)

    def in_order(self: QuarteredRows[jax.Array]) -> jax.Array:
        """Return the rows bf16 [..., width] in the order that they had."""
        pairs = self.segment // (2 * _QUARTERS)
        return self.values.reshape(-1, pairs, _QUARTERS, 2).swapaxes(1, 2).reshape(self.values.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandRows[Array: Shaped](QuarteredRows[Array]):
    """Rows of activations in the order of a product's operand, or their buffer."""

    segment = SEGMENT

    @staticmethod
    def number(column: Value) -> Value:
        """Return which number of a row is stored as number ``column``."""
        pair = column % SEGMENT // 2
        return column // SEGMENT * SEGMENT + pair % _QUARTERS * _QUARTER + pair // _QUARTERS * 2 + column % 2

    @staticmethod
    def sources(unit: Value, count: int) -> list[tuple[Value, int]]:
        """Return where the ``count`` numbers of a unit of 16 bytes come from, and how many from each place.

        ``unit`` and the places count in a segment.
        """
        assert count == UNIT // 2
        return [(unit * 2 + quarter * _QUARTER, 2) for quarter in range(_QUARTERS)]

    def store_line(self: OperandRows[Buffer], values: Step, row: Value, column: Value, where: Condition = True) -> None:
        """Store adjacent numbers of a row, f32 and an even number of them, from an even column on."""
        for i in range(0, len(values), 2):
            number = column % SEGMENT + i
            pair = number % _QUARTER // 2 * _QUARTERS + number // _QUARTER
            word = values[i].machine.to_bf16(*values[i : i + 2])
            self.values.store_words([word], row, column // SEGMENT * SEGMENT + pair * 2, where=where)

    def store_product(
        self: OperandRows[Buffer], machine: TensorCores, words: list[Value], row: Value, column: Index
    ) -> None:
        """Store numbers of a row as they are spread over a quad of lanes after a product (``wgmma``).

        Args:
          machine: of the values.
          words: of bf16, the two adjacent numbers of each eight that the lane has: of 64 numbers, or of 32.
          row: of the result.
          column: the first of the numbers, in order.
        """
        # A lane has the pairs 4 n + lane. Of 64 numbers, those of even n are adjacent in the result, and so are the
        # others.
        first = machine.thread % _QUARTERS * _PAIRS + column
        if len(words) * _PAIRS == _HALF_SEGMENT:
            first = first - column % SEGMENT // _HALF_SEGMENT * (_HALF_SEGMENT - len(words))
        for odd in range(2):
            self.values.store_words(words[odd::2], row, first + _HALF_SEGMENT * odd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows[Array: Shaped](QuarteredRows[Array]):
    """Rows of activations in the order in which experts in FP4 are multiplied, or their buffer.

    A lane holds 16 adjacent bytes of a weight's row, which are a quarter of a segment.
    """

    segment = EXPERT_SEGMENT

    def store_group(
        self: ExpertRows[Buffer],
        machine: TensorCores,
        words: list[Value],
        row: Value,
        group: Value,
        where: Condition = True,
    ) -> None:
        """Store a segment of a row, by its number. ``words`` are bf16 at the places of a lane of ``RoundedExpertRows``.

        A lane has two pairs of each quarter, which are 32 adjacent bytes of the result. Two lanes store the halves of
        the first one's, then those of the second one's, since half a sector takes as long as a whole one.
        """
        lane = machine.thread % RoundedExpertRows.TEAM
        of_quarters = [
            swapped(machine, lane % 2 == 1, (first, second), 1) for first, second in itertools.batched(words, 2)
        ]
        for i, of_lane in enumerate(zip(*of_quarters, strict=True)):
            place = (lane // 2 * 2 + i) * (GROUP // RoundedExpertRows.TEAM) + lane % 2 * (UNIT // 2)
            self.values.store_words(of_lane, row, group * GROUP + place, where=where)

    @staticmethod
    def column(number: Value) -> Value:
        """Return where the even number ``number`` of a row is stored, with the next one beside it."""
        quarter = number % EXPERT_SEGMENT // (EXPERT_SEGMENT // _QUARTERS)
        pair = number % (EXPERT_SEGMENT // _QUARTERS) // 2
        return number // EXPERT_SEGMENT * EXPERT_SEGMENT + (pair * _QUARTERS + quarter) * 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedExpertRows[Array: Shaped](ScaledRows[Array]):
    """M rows of activations in FP8 in the order in which experts in FP4 are multiplied, or their buffers.

    Of each 128 numbers of a row, four quarters of eight words of four, word w of quarter q is stored as word 4 w + q.
    Past the last row, scales have no meaning.
    """

    TEAM: ClassVar[int] = 8  # lanes that hold a group, each the same word of all quarters

    def in_order(self: RoundedExpertRows[jax.Array]) -> jax.Array:
        """Return the rows f32 [M, width] in the order that they had."""
        (rows, width), words = self.shape, (self.TEAM, _QUARTERS, VECTOR)
        codes = lax.bitcast_convert_type(self.codes, jnp.float8_e4m3fn).astype(jnp.float32)
        groups = codes.reshape(rows, -1, *words).swapaxes(2, 3).reshape(rows, -1, GROUP)
        return (groups * self.scales[:, :rows].T[..., None]).reshape(rows, width)

    @staticmethod
    def places(lane: Value) -> list[Value]:
        """Return where in a group a lane of a team has its numbers, four adjacent ones at each place."""
        return [lane * VECTOR + quarter * (GROUP // _QUARTERS) for quarter in range(_QUARTERS)]

    def store_group(
        self: RoundedExpertRows[Buffer],
        machine: TensorCores,
        words: list[Value],
        row: Value,
        group: Value,
        where: Condition = True,
    ) -> None:
        """Round and store a group of a row, by its number in the row. ``words`` are bf16 at this lane's ``places``."""
        codes, scale = rounded(machine, self.TEAM, words)
        lane = machine.thread % self.TEAM
        self.codes.store_words(codes, row, group * GROUP + lane * (GROUP // self.TEAM), where=where)
        self.scales.store_floats([scale], group, row, where=(lane == 0) & where)


def rounded(machine: TensorCores, lanes: int, words: list[Value]) -> tuple[list[Value], Value]:
    """Round bf16 that a team of lanes holds to E4M3, with one scale.

    Returns this lane's codes, four to a word, and the scale.
    """
    # Magnitudes of bf16 have the order of their bits, and NaN is above all others.
    both = fold(machine.maximum_u16, [word & 0x7FFF7FFF for word in words])
    (peak,) = Team(machine, lanes).reduce((maximum, (both << 16).maximum(both & -65536)))
    byte = power_of_two_scale(peak.maximum(_SMALLEST_AMAX), _LARGEST_E4M3)
    inverse = machine.bits(from_ue8m0((254 - byte).maximum(0)))  # a power of two, which bf16 holds
    twice = (inverse >> 16) | inverse
    # Exact where the result is not subnormal, and those have the code 0.
    scaled = [machine.multiply_bf16(word, twice) for word in words]
    values = [value for word in scaled for value in from_bf16(word)]
    codes = [machine.to_e4m3(values[i : i + 4]) for i in range(0, len(values), 4)]
    return codes, from_ue8m0(byte)


def round_group(machine: TensorCores, pairs: list[list[Value]]) -> tuple[list[list[Value]], Value]:
    """Round 128 adjacent numbers of a row, as they are spread over a quad of lanes after a product (``wgmma``).

    Args:
      machine: of the values.
      pairs: f32, the two adjacent numbers of each eight that the lane has. They are rounded to bf16 first.

    Returns:
      For each half of the group four words: the codes of a quarter of it, of which the quad's n-th lane has the n-th.
      And the scale.
    """
    codes, scale = rounded(machine, _QUAD, [machine.to_bf16(*pair) for pair in pairs])
    halves = []
    for half in (codes[:4], codes[4:]):
        # A word has a lane's pairs of two eights. Now each lane gets those of two eights from all lanes.
        a, b, c, d = quad_transposed(machine, half)
        eights = (0x5410, 0x7632)  # the bytes of two words that belong to the first eight, or to the second
        halves.append([machine.permute_bytes(*two, eight) for eight in eights for two in ((a, b), (c, d))])
    return halves, scale


def round_rows(x: jax.Array, *, needed: jax.Array | None = None, simulate: bool = False) -> RoundedRows:
    """Round rows of bf16 [M, width], with a width that is a multiple of 128.

    ``needed`` bool [M] or [1, M] says which rows anyone reads, None for all; others may be anything.
    """
    rows, width = x.shape
    needed = None if needed is None else needed.reshape(-1)
    groups, state = width // GROUP, RoundedRows.shapes(rows, width)

    def body(machine: TensorCores, inputs: tuple[Buffer, Buffer | None], out: RoundedRows) -> None:
        x, needed = inputs
        row = machine.block(0) * _TEAMS + machine.thread // _TEAM
        there, unit = is_needed(needed, row, row < rows), machine.thread % _TEAM * _LOADED
        numbers = [machine.block(1) * _GROUPS_AT_ONCE + i for i in range(_GROUPS_AT_ONCE)]
        inside = [True if groups % _GROUPS_AT_ONCE == 0 else number < groups for number in numbers]
        loaded = [
            x.load_words(row, number * GROUP + unit, count=_LOADED, where=there & is_group)
            for number, is_group in zip(numbers, inside, strict=True)
        ]
        for number, is_group, words in zip(numbers, inside, loaded, strict=True):
            of_lane, scale = rounded(machine, _TEAM, words)
            out.codes.store_words(of_lane, row, number * GROUP + unit, where=there & is_group)
            out.scales.store_floats([scale], number, row, where=(machine.thread % _TEAM == 0) & is_group)

    return launch(
        body,
        name="round_rows",
        grid=(state.scales.shape[1] // _TEAMS, -(-groups // _GROUPS_AT_ONCE)),
        inputs=(x, needed),
        state=state,
        simulate=simulate,
    )


def is_needed(needed: Buffer | None, row: Index, there: Condition) -> Condition:
    """Return whether a row is there and needed: ``needed`` is bool [N], or None where all are."""
    return there if needed is None else there & (needed.load_bytes(row, count=1, where=there) > 0)
