"""What a kind of layer with entries needs for its cache update.

TailUpdate    the interface between the update and a form of tails, and thereby a kind of layer
EntryStore    the last steps of a pooled row: rope(norm(row)) in the format of key rows
KeyStore      hadamard(rope(norm(row))) in the format of indexer keys
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Self

from pallas_kernels.formats import KeyRows, KVRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import Channels, Condition, Index, Value
from pallas_kernels.rows import Angles, hadamard, load_angles, norm, rope
from pallas_kernels.update.batch import Block, Call, Jobs, NewTokens, Request, Split, Streams


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
class RowStore[Rows](abc.ABC):
    """Where a compressor's pooled rows go, and how they are finished."""

    block: Block
    row: Row
    rows: Rows  # of the pool, [layers, num_pages, entries_per_page, ...]
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
        assert tokens.rope is not None
        assert tokens.block_table is not None
        at_once = True if known else where
        weight = row.load(self.weight, where=at_once)
        angles = load_angles(row, tokens.rope, request.batch, number, where=at_once)
        entry = request.start // self.block.call.ratio + number
        return Destination(weight, angles, *request.locate(tokens.block_table, self._leaf, entry, where))

    @abc.abstractmethod
    def finish(self, pooled: Channels, to: Destination) -> None:
        """Finish a pooled row and store it."""


class EntryStore(RowStore[KVRows[Buffer]]):
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


class KeyStore(RowStore[KeyRows[Buffer]]):
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TailUpdate[Tail](abc.ABC):
    """The compressor of one request, with its tail. Subclasses are listed in ``call.TAIL_UPDATES``.

    The class methods say which tails are supported and how the work is split. An instance does the share of one CTA.
    """

    leaves: ClassVar[tuple[str, ...]]
    """Names of the tail's leaves, [layers, requests, ...]."""

    num_streams: ClassVar[int] = 1
    """Number of streams side by side in the channels of k and z."""

    is_one_warpgroup: ClassVar[bool] = True
    """Whether a warpgroup does all of one token's update, at every size."""

    has_keys: ClassVar[bool] = False
    """Whether every entry also has an indexer key, from a separate compressor."""

    block: Block
    row: Row
    tail: Tail  # of buffers
    streams: Streams[Buffer]
    store: RowStore

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """Return the compressor of entries, which runs on a warpgroup."""
        entry, state, pool = block.tokens.entry, block.stack.state, block.stack.pool
        assert entry is not None
        assert pool is not None
        row = Row(Team(block.machine, WARPGROUP), entry.norm.shape[0])
        return cls(block, row, state.tail, entry, EntryStore(block, row, pool.entries, entry.norm))

    @classmethod
    def unsupported(cls, ratio: int, key_dim: int | None) -> str | None:
        """Return why layers of these sizes are not supported, or None if they are.

        ``key_dim`` is None if there are no keys.
        """
        return None

    @classmethod
    def tail_shape(cls, ratio: int, dim: int) -> tuple[int, ...]:
        """Return the shape of a request's part of each leaf: by default a row for each token of a group."""
        return ratio, dim

    @classmethod
    @abc.abstractmethod
    def num_units(cls, call: Call) -> int:
        """Return the number of units that ``run`` is called for."""

    @classmethod
    def split(cls, call: Call) -> Split:
        """Return the CTAs of a unit: by default one CTA of one warpgroup."""
        return Split()

    @classmethod
    def jobs[Array: Shaped](cls, call: Call, tokens: NewTokens[Array]) -> tuple[Jobs, ...]:
        """Return the additional work that is done by single warps."""
        return ()

    @abc.abstractmethod
    def run(self, unit: Value) -> None:
        """Do the work of a unit."""

    @classmethod
    @abc.abstractmethod
    def reset(cls, row: Row, tail: Tail, lead: tuple[Value, Value], j: Value, where: Condition) -> None:
        """Set the j-th row of a tail, of shape ``tail_shape``, to what it is after a complete group.

        Args:
          row: how a row is spread over its team.
          tail: buffers.
          lead: layer and slot.
          j: number of the row.
          where: whether to do so.
        """

    @property
    def call(self) -> Call:
        return self.block.call

    @property
    def request(self) -> Request:
        return self.block.request

    @property
    def machine(self) -> Machine:
        return self.block.machine

    @property
    def phase(self) -> Value:
        """Number of tokens in the unfinished group before this call."""
        return self.request.start % self.call.ratio

    @property
    def completed(self) -> Value:
        """Number of groups that this call completes."""
        return (self.phase + self.request.count) // self.call.ratio
