"""Bytes of memory, and which lanes accessed each byte of device memory last, from which the simulator detects races."""

from __future__ import annotations

import numpy as np

_NOBODY, _MANY = -1, 1 << 60
_FOR_THOSE_WHO_WAIT = 1 << 50  # in place of a number of lanes: ordered for lanes that have waited for the grid
LARGEST = 16  # bytes of the largest access
UNWRITTEN = 1  # the fault of bytes that were never written


class SimulationError(Exception):
    """A kernel body did something that would be undefined on a GPU."""


class Memory:
    """Bytes, of which each can have a fault.

    Who accessed what is recorded for cells of ``grain`` bytes, the size of the smallest access so far. Accesses are
    aligned, so each has whole cells, and the records are those of the bytes.
    """

    _records: tuple[str, ...] = ()  # names of arrays with a row for each cell

    def __init__(self, name: str, data: np.ndarray, *, unwritten: bool = False):
        self.name, self.data = name, data
        self.fault = np.full(data.size, UNWRITTEN, np.int16) if unwritten else None
        self.grain = LARGEST

    @property
    def _cells(self) -> int:
        return -(-self.data.size // self.grain)

    def cells(self, at: np.ndarray, size: int) -> np.ndarray:
        """Return the cells [accesses, cells of each] of aligned accesses, after making cells small enough."""
        if size < self.grain:
            for record in self._records:
                setattr(self, record, _repeated(getattr(self, record), self.grain // size))
            self.grain = size
        return at[:, None] // self.grain + np.arange(size // self.grain)

    def check(self, at: np.ndarray, size: int) -> None:
        if np.any(at < 0) or np.any(at + size > self.data.size):
            raise SimulationError(
                f"{self.name}: access of {size} bytes at {at.min()} .. {at.max()} of {self.data.size}"
            )
        if np.any(at % size):
            raise SimulationError(f"{self.name}: an access of {size} bytes is misaligned")

    def _get(self, at: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return bytes [accesses, size], and their faults if there are any."""
        fault = None if self.fault is None else units_of(self.fault, size)[at // size]
        return units_of(self.data, size)[at // size], fault if fault is not None and fault.any() else None

    def _put(self, at: np.ndarray, size: int, data: np.ndarray, fault: np.ndarray | int) -> None:
        units_of(self.data, size)[at // size] = data
        if self.fault is not None:
            units_of(self.fault, size)[at // size] = fault

    def _add(self, at: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add x to an i32 each, in order. Returns the value before each addition."""
        words, before = self.data.view(np.int32), np.empty_like(x)
        with np.errstate(over="ignore"):
            for i, (word, number) in enumerate(zip(at // 4, x, strict=True)):
                before[i] = words[word]
                words[word] += number
        return before

    def _refuse_twice(self, at: np.ndarray) -> None:
        in_order = np.sort(at)  # aligned accesses of one size have no byte in common, or all
        if np.any(in_order[1:] == in_order[:-1]):
            raise SimulationError(f"{self.name}: two lanes write the same bytes")


class DeviceMemory(Memory):
    """An array in device memory."""

    def __init__(self, name: str, data: np.ndarray, *, constant: bool, dtype: str = ""):
        super().__init__(name, data)
        self.constant, self.dtype = constant, dtype
        if constant:
            return
        self._records = ("writer", "written", "settled", "low", "high", "was_read")
        # For each cell: the last writer; the lowest and highest lane that has read since; and for both, over how
        # many adjacent lanes a barrier has ordered the access since then (0 = none).
        self.writer, self.high = (np.full(self._cells, _NOBODY, np.int64) for _ in range(2))
        self.low = np.full(self._cells, _MANY, np.int64)
        self.written, self.was_read = (np.zeros(self._cells, np.int64) for _ in range(2))
        # The same for writes that others may overwrite, but perhaps not see.
        self.settled = self.written.copy()
        self.has_waited: np.ndarray | None = None  # lanes, for the grid
        self.block = 0  # lanes of a block, once the grid's lanes have arrived

    def read(self, at: np.ndarray, size: int, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return bytes [accesses, size], and their faults if there are any."""
        self.check(at, size)
        if not self.constant:
            cells, owner = self.cells(at, size), lanes[:, None]
            if np.any(self._unordered(cells, owner, self.writer, self.writer, self.written)):
                raise SimulationError(f"{self.name}: a lane reads what another one writes")
            self._join(cells, owner)
        return self._get(at, size)

    def write(self, at: np.ndarray, size: int, lanes: np.ndarray, data: np.ndarray) -> None:
        """Write bytes [accesses, size]."""
        self.check(at, size)
        if self.constant:
            raise SimulationError(f"{self.name}: a constant input is written")
        self._refuse_twice(at)
        cells, owner = self.cells(at, size), lanes[:, None]
        found = self._unordered(cells, owner, self.writer, self.writer, self.written)
        if found.any() and np.any(found & self._unordered(cells, owner, self.writer, self.writer, self.settled)):
            raise SimulationError(f"{self.name}: a lane writes what another one wrote")
        if np.any(self._unordered(cells, owner, self.low, self.high, self.was_read)):
            raise SimulationError(f"{self.name}: a lane writes what another one read")
        self.writer[cells], self.written[cells], self.settled[cells] = owner, 0, 0
        self.low[cells], self.high[cells] = _MANY, _NOBODY
        self._put(at, size, data, 0)

    def _join(self, cells: np.ndarray, owner: np.ndarray) -> None:
        """Record more lanes that read. Earlier ones that a barrier has ordered need not be recorded any longer."""
        stale = cells[~self._unordered(cells, owner, self.low, self.high, self.was_read)]
        self.low[stale], self.high[stale] = _MANY, _NOBODY
        self.was_read[cells] = 0
        owners = np.broadcast_to(owner, cells.shape).reshape(-1)
        np.minimum.at(self.low, cells.reshape(-1), owners)
        np.maximum.at(self.high, cells.reshape(-1), owners)

    def _unordered(
        self, cells: np.ndarray, owner: np.ndarray, low: np.ndarray, high: np.ndarray, scope: np.ndarray
    ) -> np.ndarray:
        """Return whether another lane's access is ordered neither before nor after that of ``owner``."""
        low, high = low[cells], high[cells]
        others = (high != _NOBODY) & ((low != owner) | (high != owner))
        if others.any():
            scope = scope[cells]
            if self.has_waited is not None:
                scope = np.where((scope == _FOR_THOSE_WHO_WAIT) & ~self.has_waited[owner], self.block, scope)
            size = np.maximum(scope, 1)
            others &= (scope == 0) | (low // size != owner // size) | (high // size != owner // size)
        return others

    def order_those_who_wait(self, block: int, has_waited: np.ndarray) -> None:
        """Apply a barrier of the grid for lanes that will have waited, and one of the block, of so many, for others.

        All lanes have waited for the one before, which therefore holds for all of them from here on.
        """
        self.block, self.has_waited = block, has_waited
        everybody = has_waited.size
        for lanes, scope in ((self.writer, self.written), (self.writer, self.settled), (self.high, self.was_read)):
            scope[scope == _FOR_THOSE_WHO_WAIT] = everybody
            scope[(lanes != _NOBODY) & (scope < everybody)] = _FOR_THOSE_WHO_WAIT

    def order(self, arrived: np.ndarray, size: int, *, is_relaxed: bool = False) -> None:
        """Apply a barrier over groups of ``size`` lanes: what their lanes did is ordered before what they do next.

        After a relaxed one lanes may overwrite what others wrote, but need not see it.
        """
        written = self.settled if is_relaxed else self.written
        for low, high, scope in ((self.writer, self.writer, written), (self.low, self.high, self.was_read)):
            at = np.flatnonzero((high != _NOBODY) & (scope < size))
            group = high[at] // size
            scope[at[arrived[group] & (low[at] // size == group)]] = size


def units_of(array: np.ndarray, size: int) -> np.ndarray:
    """Return a view [units, size] of an array with an element for each byte, without what is past the last unit."""
    return array[: array.size // size * size].reshape(-1, size)


def _repeated(record: np.ndarray, times: int) -> np.ndarray:
    """Return a record with each row several times. Rows of zeros take no memory."""
    out = np.zeros((record.shape[0] * times, *record.shape[1:]), record.dtype)
    rows = np.flatnonzero(record if record.ndim == 1 else record.any(1))
    out.reshape(record.shape[0], times, *record.shape[1:])[rows] = record[rows, None]
    return out
