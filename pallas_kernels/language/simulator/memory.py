"""Bytes of memory, and which lanes accessed each of them last, from which the simulator detects races."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_NOBODY, _MANY = -1, 1 << 60
UNWRITTEN = 1  # the fault of bytes that were never written


class SimulationError(Exception):
    """A kernel body did something that would be undefined on a GPU."""


class Memory:
    """An array in device memory, or the shared memory of all blocks. In shared memory each byte can have a fault."""

    def __init__(self, name: str, data: np.ndarray, *, constant: bool, unwritten: bool = False):
        self.name, self.data, self.constant = name, data, constant
        self.fault = np.full(data.size, UNWRITTEN, np.int16) if unwritten else None
        if not constant:
            # For each byte: the last writer; the lowest and highest lane that has read since; and for both, over how
            # many adjacent lanes a barrier has ordered the access since then (0 = none).
            self.writer, self.high = (np.full(data.size, _NOBODY, np.int64) for _ in range(2))
            self.low = np.full(data.size, _MANY, np.int64)
            self.written, self.was_read = (np.zeros(data.size, np.int64) for _ in range(2))
            # The same for writes that others may overwrite, but perhaps not see.
            self.settled = self.written.copy()
            # The lowest and highest lane that has added atomically since, and over how many lanes that is ordered.
            self.add_low, self.add_high = self.low.copy(), self.high.copy()
            self.was_added = self.was_read.copy()

    def _check(self, at: np.ndarray, size: int) -> np.ndarray:
        if np.any(at < 0) or np.any(at + size > self.data.size):
            raise SimulationError(
                f"{self.name}: access of {size} bytes at {at.min()} .. {at.max()} of {self.data.size}"
            )
        if np.any(at % size):
            raise SimulationError(f"{self.name}: an access of {size} bytes is misaligned")
        return at[:, None] + np.arange(size)

    def read(self, at: np.ndarray, size: int, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return bytes [accesses, size], and their faults if there are any."""
        where = self._check(at, size)
        if not self.constant:
            owner = np.broadcast_to(lanes[:, None], where.shape)
            if np.any(self.unordered(where, owner, self.writer, self.writer, self.written)):
                raise SimulationError(f"{self.name}: a lane reads what another one writes")
            if np.any(self.unordered(where, owner, self.add_low, self.add_high, self.was_added)):
                raise SimulationError(f"{self.name}: a lane reads what another one adds to")
            self._join(where, owner, self.low, self.high, self.was_read)
        fault = None if self.fault is None else self.fault[where]
        return self.data[where], fault if fault is not None and fault.any() else None

    def add(self, at: np.ndarray, lanes: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add x to an i32 each, atomically and in the lanes' order. Returns the value before each addition."""
        where = self._check(at, 4)
        if self.fault is not None and self.fault[where].any():
            raise SimulationError(f"{self.name}: a lane adds to what nobody has written")
        owner = np.broadcast_to(lanes[:, None], where.shape)
        writes, reads, _ = self.accesses()
        for others, verb in ((writes, "wrote"), (reads, "read")):
            if np.any(self.unordered(where, owner, *others)):
                raise SimulationError(f"{self.name}: a lane adds to what another one {verb}")
        self._join(where, owner, self.add_low, self.add_high, self.was_added)
        words = self.data.view(np.int32)
        before = np.empty_like(x)
        with np.errstate(over="ignore"):
            for i, (word, number) in enumerate(zip(at // 4, x, strict=True)):
                before[i] = words[word]
                words[word] += number
        return before

    def write(
        self, at: np.ndarray, size: int, lanes: np.ndarray, data: np.ndarray, fault: np.ndarray | int = 0
    ) -> None:
        """Write bytes [accesses, size] with their faults."""
        where = self._check(at, size)
        if self.constant:
            raise SimulationError(f"{self.name}: a constant input is written")
        if np.unique(where).size != where.size:
            raise SimulationError(f"{self.name}: two lanes write the same bytes")
        owner = np.broadcast_to(lanes[:, None], where.shape)
        for others, verb in zip(self.accesses(), ("wrote", "read", "added to"), strict=True):
            found = self.unordered(where, owner, *others)
            if verb == "wrote":
                found &= self.unordered(where, owner, self.writer, self.writer, self.settled)
            if np.any(found):
                raise SimulationError(f"{self.name}: a lane writes what another one {verb}")
        self.writer[where], self.written[where], self.settled[where] = owner, 0, 0
        self.low[where], self.high[where] = _MANY, _NOBODY
        self.add_low[where], self.add_high[where] = _MANY, _NOBODY
        self.data[where] = data
        if self.fault is not None:
            self.fault[where] = fault

    def _join(self, where: np.ndarray, owner: np.ndarray, low: np.ndarray, high: np.ndarray, scope: np.ndarray) -> None:
        """Record more lanes that read or add.

        Earlier ones that a barrier has ordered need not be recorded any longer.
        """
        stale = where[~self.unordered(where, owner, low, high, scope)]
        low[stale], high[stale] = _MANY, _NOBODY
        scope[where] = 0
        np.minimum.at(low, where, owner)
        np.maximum.at(high, where, owner)

    @staticmethod
    def unordered(where: np.ndarray, owner: np.ndarray, low: Any, high: Any, scope: Any) -> np.ndarray:
        """Return whether another lane's access is ordered neither before nor after that of ``owner``."""
        low, high, scope = low[where], high[where], scope[where]
        size = np.maximum(scope, 1)
        ordered = (scope > 0) & (low // size == owner // size) & (high // size == owner // size)
        return (high != _NOBODY) & ((low != owner) | (high != owner)) & ~ordered

    def accesses(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield lowest lane, highest lane and range of ordering, for writes, for reads and for additions."""
        yield self.writer, self.writer, self.written
        yield self.low, self.high, self.was_read
        yield self.add_low, self.add_high, self.was_added

    def order(self, arrived: np.ndarray, size: int, *, is_relaxed: bool = False) -> None:
        """Apply a barrier over groups of ``size`` lanes: what their lanes did is ordered before what they do next.

        After a relaxed one lanes may overwrite what others wrote, but need not see it.
        """
        writes, *others = self.accesses()
        if is_relaxed:
            writes = self.writer, self.writer, self.settled
        for low, high, scope in (writes, *others):
            at = np.flatnonzero((high != _NOBODY) & (scope < size))
            group = high[at] // size
            scope[at[arrived[group] & (low[at] // size == group)]] = size
