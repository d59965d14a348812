"""In which order a block has the numbers of a chunk of a row of x: in that in which lanes hold the weight.

A lane holds 16 adjacent codes of each half of a chunk (``weights``). They enter the steps of a product 8 bytes of the
operand at a time: 4 in the first half of the step's inputs and 4 in the second. So the inputs of a step are not
adjacent ones, and rows are stored in that order (``ByLanes``). Operand rows have it already. A weight without scales
needs no widening, and lanes hold it in the order of its inputs (``AsGiven``).
"""

from __future__ import annotations

import abc
from typing import ClassVar

from pallas_kernels.activations import OperandRows
from pallas_kernels.language.tensor_cores import UNIT, Tile
from pallas_kernels.language.values import Condition, Value
from pallas_kernels.products.problem import RowsSpec, WeightSpec
from pallas_kernels.products.weights import HALVES, QUAD

_WORD = 4  # bytes


class Order(abc.ABC):
    """An order of the numbers of a chunk of a row."""

    copied_bytes: ClassVar[int]  # that a lane copies to a tile at once

    @staticmethod
    @abc.abstractmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        """Return where a tile has the ``number``-th ``copied_bytes`` of a row's chunk."""

    @staticmethod
    @abc.abstractmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        """Store adjacent words of a row's chunk, by the number of such a unit. They may be of codes."""


class AsGiven(Order):
    """The order that the row has."""

    copied_bytes = UNIT

    @staticmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        return tile.unit(line, number)

    @staticmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        assert len(words) * _WORD == UNIT
        tile.machine.store_shared(tile.unit(line, unit), words, UNIT, where)


class ByLanes(Order):
    """The order for rows that have their own one, beside codes of which lanes hold 16 adjacent ones."""

    copied_bytes = _WORD  # adjacent words belong to different units of 16 bytes

    @staticmethod
    def place(tile: Tile, line: Value, number: Value) -> Value:
        # It is in one half of the chunk. There, each lane of a quad holds several adjacent words of the weight.
        per_half = tile.row_bytes // _WORD // HALVES
        of_lane = per_half // QUAD
        half, lane, j = number // per_half, number % per_half // of_lane, number % of_lane
        return tile.unit(line, half * of_lane + j) + lane * _WORD

    @staticmethod
    def put(tile: Tile, line: Value, unit: Value, words: list[Value], where: Condition) -> None:
        for e, word in enumerate(words):
            place = ByLanes.place(tile, line, unit * len(words) + e)
            tile.machine.store_shared(place, [word], _WORD, where)


def order_of(rows: RowsSpec, weight: WeightSpec) -> type[Order]:
    """Return the order of rows beside a weight."""
    return AsGiven if rows.kind is OperandRows or weight.block is None else ByLanes
