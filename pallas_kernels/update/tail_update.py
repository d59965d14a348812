"""What a form of tails, and so a kind of layer, has to say to be part of the cache update."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.machine import WARPGROUP, Condition, Machine, Value
from pallas_kernels.update.batch import Block, Call, NewTokens, Request, Streams
from pallas_kernels.update.entries import EntryStore, RowStore
from pallas_kernels.update.work import Jobs, Split


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TailUpdate(abc.ABC):
    """One compressor of one request, with its tail. Subclasses are listed in ``tails.TAIL_UPDATES``.

    The class says which tails it serves and how its work is split, the instance does the share of one CTA.
    """

    leaves: ClassVar[tuple[str, ...]]
    """Names of the tail's leaves, [layers, requests, ...]."""

    num_streams: ClassVar[int] = 1
    """Streams side by side in the channels of k and z."""

    has_keys: ClassVar[bool] = False
    """Whether every entry comes with an indexer key, from a compressor of its own."""

    block: Block
    row: Row
    tail: Any  # buffers
    streams: Streams  # of buffers
    store: RowStore

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """The compressor of entries, on a warpgroup."""
        entry, state, pool = block.tokens.entry, block.stack.state, block.stack.pool
        assert entry is not None
        row = Row(Team(block.machine, WARPGROUP), entry.norm.shape[0])
        return cls(block, row, state.tail, entry, EntryStore(block, row, pool.entries, entry.norm))

    @classmethod
    def unsupported(cls, ratio: int, key_dim: int | None) -> str | None:
        """Why layers of these sizes are not served, or None where they are. key_dim: None where there are no keys."""
        return None

    @classmethod
    def tail_shape(cls, ratio: int, dim: int) -> tuple[int, ...]:
        """Shape of a request's part of each leaf: a row for each token of a group."""
        return ratio, dim

    @classmethod
    @abc.abstractmethod
    def num_units(cls, call: Call) -> int:
        """Units that ``run`` is called for."""

    @classmethod
    def split(cls, call: Call) -> Split:
        """The CTAs of a unit: one of one warpgroup, if no more is said."""
        return Split()

    @classmethod
    def jobs(cls, call: Call, tokens: NewTokens) -> tuple[Jobs, ...]:
        """What single warps do besides."""
        return ()

    @abc.abstractmethod
    def run(self, unit: Value) -> None:
        """Do a unit's share."""

    @classmethod
    @abc.abstractmethod
    def reset(cls, row: Row, tail: Any, lead: tuple[Value, Value], j: Value, where: Condition) -> None:
        """Leave a tail as it is after a complete group: its j-th row, of ``tail_shape``.

        lead: layer and slot.
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
        """Tokens of the group that was unfinished before this call."""
        return self.request.start % self.call.ratio

    @property
    def completed(self) -> Value:
        """Groups that this call completes."""
        return (self.phase + self.request.count) // self.call.ratio
