"""The last steps of a pooled row: norm, rope, encoding, and its place in the pool.

entry   rope(norm(row))              in the format of key rows
key     hadamard(rope(norm(row)))    in the format of indexer keys
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from pallas_kernels.language.lanes import Buffer, Row
from pallas_kernels.language.values import Channels, Condition, Index, Value
from pallas_kernels.rows import Angles, hadamard, load_angles, norm, rope
from pallas_kernels.update.batch import Block


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Everything that finishing an entry needs except its pooled row.

    Loaded early, since none of it depends on pooling.
    """

    weight: Channels  # of the norm
    angles: Angles
    page: Value
    at: Value  # the row in the page
    stored: Condition  # whether the page exists


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowStore(abc.ABC):
    """Where a compressor's pooled rows go, and how they are finished."""

    block: Block
    row: Row
    rows: Any  # buffers of the pool, [layers, num_pages, entries_per_page, ...]
    weight: Buffer  # of the norm

    @property
    @abc.abstractmethod
    def _leaf(self) -> Buffer:
        """One of the pool's buffers."""

    def prepare(self, number: Index, where: Condition, *, known: bool = False) -> Destination:
        """Load what the ``number``-th entry of this call needs, where it is complete.

        Args:
          number: of the entry in this call.
          where: whether the entry is complete.
          known: whether ``number`` is in range for every request. If so, what does not depend on the slot is loaded
            without waiting for ``where``.
        """
        request, row, tokens = self.block.request, self.row, self.block.tokens
        at_once = True if known else where
        weight = row.load(self.weight, where=at_once)
        angles = load_angles(row, tokens.rope, request.batch, number, where=at_once)
        entry = request.start // self.block.call.ratio + number
        return Destination(weight, angles, *request.locate(tokens.block_table, self._leaf, entry, where))

    @abc.abstractmethod
    def finish(self, pooled: Channels, to: Destination) -> None:
        """Finish a pooled row and store it."""


class EntryStore(RowStore):
    """Stores entries."""

    __slots__ = ()

    @property
    def _leaf(self) -> Buffer:
        return self.rows.nope

    def finish(self, pooled: Channels, to: Destination) -> None:
        call, row = self.block.call, self.row
        y, amax = norm(row, pooled, to.weight, call.eps, nope_dim=self.rows.nope.shape[-1])
        lead = self.block.request.layer, to.page, to.at
        call.kv_format.store(row, rope(y, to.angles), self.rows, *lead, where=to.stored, amax=amax)


class KeyStore(RowStore):
    """Stores the indexer keys of entries."""

    __slots__ = ()

    @property
    def _leaf(self) -> Buffer:
        return self.rows.codes

    def finish(self, pooled: Channels, to: Destination) -> None:
        call, row = self.block.call, self.row
        y, _ = norm(row, pooled, to.weight, call.eps)
        lead = self.block.request.layer, to.page, to.at
        call.key_format.store(row, hadamard(row, rope(y, to.angles)), self.rows, *lead, where=to.stored)
