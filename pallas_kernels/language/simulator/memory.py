"""Bytes of memory, and which lanes accessed each of them last, from which the simulator detects races."""

from __future__ import annotations

from typing import Any

import numpy as np

_NOBODY, _MANY = -1, 1 << 60
LARGEST = 16  # bytes of the largest access
UNWRITTEN = 1  # the fault of bytes that were never written


class SimulationError(Exception):
    """A kernel body did something that would be undefined on a GPU."""


class Memory:
    """An array in device memory, or the shared memory of all blocks. In shared memory each byte can have a fault.

    Who accessed what is recorded for cells of ``grain`` bytes, the size of the smallest access so far. Accesses are
    aligned, so each has whole cells, and the records are those of the bytes.
    """

    _RECORDS: tuple[str, ...] = ("writer", "written", "settled", "low", "high", "was_read")
    _OF_ADDITIONS = ("add_low", "add_high", "was_added")

    def __init__(self, name: str, data: np.ndarray, *, constant: bool, unwritten: bool = False):
        self.name, self.data, self.constant = name, data, constant
        self.fault = np.full(data.size, UNWRITTEN, np.int16) if unwritten else None
        self.grain, self._records = LARGEST, self._RECORDS
        if not constant:
            cells = -(-data.size // LARGEST)
            # For each cell: the last writer; the lowest and highest lane that has read since; and for both, over how
            # many adjacent lanes a barrier has ordered the access since then (0 = none).
            self.writer, self.high = (np.full(cells, _NOBODY, np.int64) for _ in range(2))
            self.low = np.full(cells, _MANY, np.int64)
            self.written, self.was_read = (np.zeros(cells, np.int64) for _ in range(2))
            # The same for writes that others may overwrite, but perhaps not see.
            self.settled = self.written.copy()

    def _record_additions(self) -> None:
        """Have records of additions, which few memories have."""
        if self._records == self._RECORDS:
            # The lowest and highest lane that has added atomically since, and over how many lanes that is ordered.
            self.add_low, self.add_high = np.full_like(self.low, _MANY), np.full_like(self.high, _NOBODY)
            self.was_added = np.zeros_like(self.was_read)
            self._records = self._RECORDS + self._OF_ADDITIONS

    def cells(self, at: np.ndarray, size: int) -> np.ndarray:
        """Return the cells [accesses, cells of each] of aligned accesses, after making cells small enough."""
        if size < self.grain:
            for record in self._records:
                setattr(self, record, np.repeat(getattr(self, record), self.grain // size))
            self.grain = size
        return at[:, None] // self.grain + np.arange(size // self.grain)

    def _check(self, at: np.ndarray, size: int) -> None:
        if np.any(at < 0) or np.any(at + size > self.data.size):
            raise SimulationError(
                f"{self.name}: access of {size} bytes at {at.min()} .. {at.max()} of {self.data.size}"
            )
        if np.any(at % size):
            raise SimulationError(f"{self.name}: an access of {size} bytes is misaligned")

    def read(self, at: np.ndarray, size: int, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return bytes [accesses, size], and their faults if there are any."""
        self._check(at, size)
        if not self.constant:
            cells, owner = self.cells(at, size), lanes[:, None]
            writes, _, *additions = self.accesses()
            if np.any(self.unordered(cells, owner, *writes)):
                raise SimulationError(f"{self.name}: a lane reads what another one writes")
            if additions and np.any(self.unordered(cells, owner, *additions[0])):
                raise SimulationError(f"{self.name}: a lane reads what another one adds to")
            self._join(cells, owner, self.low, self.high, self.was_read)
        fault = None if self.fault is None else units_of(self.fault, size)[at // size]
        return units_of(self.data, size)[at // size], fault if fault is not None and fault.any() else None

    def add(self, at: np.ndarray, lanes: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add x to an i32 each, atomically and in the lanes' order. Returns the value before each addition."""
        self._check(at, 4)
        if self.fault is not None and units_of(self.fault, 4)[at // 4].any():
            raise SimulationError(f"{self.name}: a lane adds to what nobody has written")
        self._record_additions()
        cells, owner = self.cells(at, 4), lanes[:, None]
        writes, reads, _ = self.accesses()
        for others, verb in ((writes, "wrote"), (reads, "read")):
            if np.any(self.unordered(cells, owner, *others)):
                raise SimulationError(f"{self.name}: a lane adds to what another one {verb}")
        self._join(cells, owner, self.add_low, self.add_high, self.was_added)
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
        self._check(at, size)
        if self.constant:
            raise SimulationError(f"{self.name}: a constant input is written")
        in_order = np.sort(at)  # aligned accesses of one size have no byte in common, or all
        if np.any(in_order[1:] == in_order[:-1]):
            raise SimulationError(f"{self.name}: two lanes write the same bytes")
        cells, owner = self.cells(at, size), lanes[:, None]
        for others, verb in zip(self.accesses(), ("wrote", "read", "added to"), strict=False):
            found = self.unordered(cells, owner, *others)
            if verb == "wrote" and found.any():
                found &= self.unordered(cells, owner, self.writer, self.writer, self.settled)
            if np.any(found):
                raise SimulationError(f"{self.name}: a lane writes what another one {verb}")
        self.writer[cells], self.written[cells], self.settled[cells] = owner, 0, 0
        for low, high, _ in self.accesses()[1:]:
            low[cells], high[cells] = _MANY, _NOBODY
        units_of(self.data, size)[at // size] = data
        if self.fault is not None:
            units_of(self.fault, size)[at // size] = fault

    def _join(self, cells: np.ndarray, owner: np.ndarray, low: np.ndarray, high: np.ndarray, scope: np.ndarray) -> None:
        """Record more lanes that read or add.

        Earlier ones that a barrier has ordered need not be recorded any longer.
        """
        stale = cells[~self.unordered(cells, owner, low, high, scope)]
        low[stale], high[stale] = _MANY, _NOBODY
        scope[cells] = 0
        owners = np.broadcast_to(owner, cells.shape).reshape(-1)
        np.minimum.at(low, cells.reshape(-1), owners)
        np.maximum.at(high, cells.reshape(-1), owners)

    @staticmethod
    def unordered(cells: np.ndarray, owner: np.ndarray, low: Any, high: Any, scope: Any) -> np.ndarray:
        """Return whether another lane's access is ordered neither before nor after that of ``owner``."""
        low, high = low[cells], high[cells]
        others = (high != _NOBODY) & ((low != owner) | (high != owner))
        if others.any():
            scope = scope[cells]
            size = np.maximum(scope, 1)
            others &= (scope == 0) | (low // size != owner // size) | (high // size != owner // size)
        return others

    def accesses(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return lowest lane, highest lane and range of ordering, for writes, for reads, and for additions if any."""
        found = [(self.writer, self.writer, self.written), (self.low, self.high, self.was_read)]
        if self._records != self._RECORDS:
            found.append((self.add_low, self.add_high, self.was_added))
        return found

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


class SharedMemory(Memory):
    """Shared memory, of which tensor cores read what was fenced since it was written."""

    _RECORDS = (*Memory._RECORDS, "touched", "fenced", "unfenced", "reads")

    def __init__(self, size: int):
        super().__init__("shared memory", np.full(size, 0xFF, np.uint8), constant=False, unwritten=True)
        cells = self.writer.size
        self.touched = np.zeros(cells, bool)  # accessed since the last barrier of the warps that did
        self.fenced = np.zeros(cells, bool)  # tensor cores may read it
        self.unfenced = np.zeros(cells, bool)  # stored to since the last fence of the lane that did
        self.reads = np.zeros(cells, np.int16)  # number of running products that read it


def units_of(array: np.ndarray, size: int) -> np.ndarray:
    """Return a view [units, size] of an array with an element for each byte, without what is past the last unit."""
    return array[: array.size // size * size].reshape(-1, size)
