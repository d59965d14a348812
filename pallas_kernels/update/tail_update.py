"""The interface between the cache update and a form of tails, and thereby a kind of layer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.machine import WARPGROUP, Machine
from pallas_kernels.language.values import Condition, Value
from pallas_kernels.update.batch import Block, Call, NewTokens, Request, Streams
from pallas_kernels.update.entries import EntryStore, RowStore
from pallas_kernels.update.work import Jobs, Split


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TailUpdate(abc.ABC):
    """The compressor of one request, with its tail. Subclasses are listed in ``tails.TAIL_UPDATES``.

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
    tail: Any  # buffers
    streams: Streams  # of buffers
    store: RowStore

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """Return the compressor of entries, which runs on a warpgroup."""
        entry, state, pool = block.tokens.entry, block.stack.state, block.stack.pool
        assert entry is not None
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
    def jobs(cls, call: Call, tokens: NewTokens) -> tuple[Jobs, ...]:
        """Return the additional work that is done by single warps."""
        return ()

    @abc.abstractmethod
    def run(self, unit: Value) -> None:
        """Do the work of a unit."""

    @classmethod
    @abc.abstractmethod
    def reset(cls, row: Row, tail: Any, lead: tuple[Value, Value], j: Value, where: Condition) -> None:
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
