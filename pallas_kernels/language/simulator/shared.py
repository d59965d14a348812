"""The shared memory of all blocks, and who accessed what of it, from which the simulator detects races.

A lane's access races with another one's if the clocks (``clocks``) do not say that one came before the other. What runs
by itself is an access that lasts: nobody may touch what a copy will write before it has, or write what a product reads.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.language.machine import WARP
from pallas_kernels.language.simulator.clocks import FOLLOWS, SEES, Clocks
from pallas_kernels.language.simulator.memory import Memory, SimulationError

DTYPES = ("", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")  # of what memory holds, by number
_LANE_BITS = 6  # of a record of reads, for the lane that has read
_SEVERAL = WARP  # stands there for several lanes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """Who writes: lanes, or a copy."""

    number: np.ndarray  # of each access: a lane; of a copy ~ the column of the barrier that counts it
    epoch: np.ndarray  # the lane's warp's, or the barrier's phase from 1
    known: np.ndarray  # what the writers come after, [warps, agents]
    row: np.ndarray  # of each access, in ``known``


class SharedMemory(Memory):
    """The shared memory of all blocks, one after another."""

    def __init__(self, blocks: int, size: int, clocks: Clocks):
        super().__init__("shared memory", np.full(blocks * size, 0xFF, np.uint8), unwritten=True)
        self.clocks, self._size = clocks, size
        self._records = ("writer", "epoch", "reads", "fenced", "unfenced", "reading", "coming", "dtype")
        cells = self._cells
        self.writer = np.zeros(cells, np.int32)
        self.epoch = np.zeros(cells, np.int32)  # of the writer; 0 = nobody has written
        self.reads = np.zeros((cells, clocks.of_block), np.int32)  # epoch and lane of each warp that has read since
        self.fenced = np.zeros(cells, bool)  # tensor cores may read it
        self.unfenced = np.zeros(cells, bool)  # stored to since the last fence of the lane that did
        self.reading = np.zeros(cells, np.int16)  # number of running products that read it
        self.coming = np.zeros(cells, np.int16)  # number of running copies that write it
        self.dtype = np.zeros(cells, np.int8)  # of what was written, as a number
        self._is_running, self._is_coming = 0, 0  # products and copies, in all
        # The same as ``reads``, of those that few kernels have: additions by the warps of a cluster, and products in
        # tensor memory by the warps that started them.
        self.additions: np.ndarray | None = None
        self.products: np.ndarray | None = None

    def _have(self, record: str, columns: int) -> None:
        if getattr(self, record) is None:
            setattr(self, record, np.zeros((self._cells, columns), np.int32))
            self._records += (record,)

    # Lanes.
    def read(self, at: np.ndarray, size: int, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return bytes [accesses, size], and their faults if there are any."""
        self.check(at, size)
        cells = self.cells(at, size)
        self._refuse_coming(cells, "a lane reads")
        warps = lanes // WARP
        if np.any(self._unseen(cells, lanes, self.clocks.known[SEES], warps)):
            raise SimulationError(f"{self.name}: a lane reads what another one writes")
        if self.additions is not None:
            self._check_readers(cells, at, self.additions, lanes, self._by(lanes, SEES), "reads", "adds to")
        self._note(self.reads, cells, lanes, warps % self.clocks.of_block)
        return self._get(at, size)

    def add(self, at: np.ndarray, lanes: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add x to an i32 each, atomically and in the lanes' order. Returns the value before each addition."""
        self.check(at, 4)
        if self.fault is not None and self.fault.reshape(-1, 4)[at // 4].any():
            raise SimulationError(f"{self.name}: a lane adds to what nobody has written")
        self._have("additions", self.clocks.of_cluster)
        assert self.additions is not None
        cells = self.cells(at, 4)
        self._refuse_running(cells, "a lane adds to")
        if np.any(self._unseen(cells, lanes, self.clocks.known[SEES], lanes // WARP)):
            raise SimulationError(f"{self.name}: a lane adds to what another one wrote")
        self._check_readers(cells, at, self.reads, lanes, self._by(lanes, FOLLOWS), "adds to", "read")
        self._note(self.additions, cells, lanes, self.clocks.own[lanes // WARP])
        return self._add(at, x)

    def write(
        self,
        at: np.ndarray,
        size: int,
        lanes: np.ndarray,
        data: np.ndarray,
        fault: np.ndarray | int = 0,
        dtype: int = 0,
    ) -> None:
        """Write bytes [accesses, size] with their faults."""
        self.check(at, size)
        self._refuse_twice(at)
        self._refuse_running(self.cells(at, size), "a lane writes")
        self.arrive(at, size, self._by(lanes, FOLLOWS), data, fault, dtype=dtype, is_fenced=False)
        self.unfenced[self.cells(at, size)] = True

    def _by(self, lanes: np.ndarray, side: int) -> Writer:
        warps = lanes // WARP
        return Writer(lanes, self.clocks.epoch[warps], self.clocks.known[side], warps)

    # Copies.
    def expect(self, at: np.ndarray, size: int) -> None:
        """Note that a copy to bytes [accesses, size] begins."""
        self.check(at, size)
        cells = self.cells(at, size)
        self._refuse_running(cells, "a copy writes")
        self.coming[cells] += 1
        self._is_coming += 1

    def arrive(
        self,
        at: np.ndarray,
        size: int,
        writer: Writer,
        data: np.ndarray,
        fault: np.ndarray | int = 0,
        *,
        dtype: int = 0,
        is_fenced: bool,
        was_expected: bool = False,
    ) -> None:
        """Write what a lane stores, or what a copy brings."""
        cells = self.cells(at, size)
        if was_expected:
            self.coming[cells] -= 1
            self._is_coming -= 1
        who = "a copy" if was_expected else "a lane"
        if np.any(self._unseen(cells, writer.number, writer.known, writer.row)):
            raise SimulationError(f"{self.name}: {who} writes what another one wrote")
        self._check_readers(cells, at, self.reads, writer.number, writer, "writes", "read", who)
        if self.additions is not None:
            self._check_readers(cells, at, self.additions, writer.number, writer, "writes", "added to", who)
            self.additions[cells] = 0
        if self.products is not None:
            columns = self._columns(at) + self.clocks.of_cluster
            if np.any(self.products[cells] > writer.known[writer.row[:, None], columns][:, None]):
                raise SimulationError(f"{self.name}: {who} writes what a product read: a wait for it is missing")
            self.products[cells] = 0
        self.writer[cells], self.epoch[cells] = writer.number[:, None], writer.epoch[:, None]
        self.reads[cells], self.fenced[cells], self.unfenced[cells], self.dtype[cells] = 0, is_fenced, False, dtype
        self._put(at, size, data, fault)

    # Products.
    def begin(self, at: np.ndarray, size: int, known: np.ndarray, lane: int) -> None:
        """Note that a product begins to read bytes [accesses, size].

        ``known`` is what comes before it, [agents], and ``lane`` the one that starts it, -1 for a warpgroup.
        """
        cells = self.cells(at, size)
        self._refuse_coming(cells, "a product reads")
        none = np.zeros(len(at), int)
        if np.any(self._unseen(cells, none + lane if lane >= 0 else none - (1 << 30), known[None], none)):
            raise SimulationError(f"{self.name}: a product reads what a lane writes, or a copy")
        if not np.all(self.fenced[cells]):
            raise SimulationError("a product reads shared memory that was not fenced since it was written")
        self.reading[cells] += 1
        self._is_running += 1

    def end(self, at: np.ndarray, size: int, warps: np.ndarray, *, product: int = 0) -> None:
        """Note that a product has read: one that warps waited for, or the ``product``-th that a warp has started."""
        cells = self.cells(at, size)
        self.reading[cells] -= 1
        self._is_running -= 1
        if product:
            self._have("products", self.clocks.of_block)
            assert self.products is not None
            self.products[cells[..., None], warps % self.clocks.of_block] = product
        else:
            codes = self.clocks.epoch[warps] << _LANE_BITS | _SEVERAL
            self.reads[cells[..., None], warps % self.clocks.of_block] = codes

    # Checks.
    def _refuse_coming(self, cells: np.ndarray, who: str) -> None:
        if self._is_coming and np.any(self.coming[cells]):
            raise SimulationError(f"{self.name}: {who} what a running copy writes: a wait for it is missing")

    def _refuse_running(self, cells: np.ndarray, who: str) -> None:
        self._refuse_coming(cells, who)
        if self._is_running and np.any(self.reading[cells]):
            raise SimulationError(f"{self.name}: {who} what a running product reads: a wait for it is missing")

    def _unseen(self, cells: np.ndarray, number: np.ndarray, known: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return whether cells were last written by another one, who is not known to have come before."""
        writer, epoch = self.writer[cells], self.epoch[cells]
        others = (writer != number[:, None]) & (epoch > 0)
        if others.any():
            column = np.where(writer < 0, ~writer, writer // WARP % self.clocks.of_cluster)
            others &= known[row[:, None], column] < epoch
        return others

    def _columns(self, at: np.ndarray) -> np.ndarray:
        """Return the columns of the warps of the blocks whose memory is accessed, [accesses, warps]."""
        of_block = self.clocks.of_block
        return (at // self._size % self.clocks.cluster * of_block)[:, None] + np.arange(of_block)

    def _check_readers(
        self,
        cells: np.ndarray,
        at: np.ndarray,
        record: np.ndarray,
        lanes: np.ndarray,
        writer: Writer,
        verb: str,
        others: str,
        who: str = "a lane",
    ) -> None:
        """Raise an error if others, who are not known to have come before, have read these cells, or added to them."""
        found = record[cells]  # [accesses, cells, warps]
        if not found.any():
            return
        of_cluster = self.clocks.of_cluster
        columns = np.arange(of_cluster)[None] if record is self.additions else self._columns(at)
        late = found >> _LANE_BITS > writer.known[writer.row[:, None], columns][:, None]
        if late.any():  # a lane comes after itself
            own = (columns == (lanes // WARP % of_cluster)[:, None]) & (lanes >= 0)[:, None]
            late &= ~(own[:, None] & (found & (1 << _LANE_BITS) - 1 == (lanes % WARP)[:, None, None]))
            if late.any():
                raise SimulationError(f"{self.name}: {who} {verb} what another one {others}")

    def _note(self, record: np.ndarray, cells: np.ndarray, lanes: np.ndarray, column: np.ndarray) -> None:
        """Record that lanes read, or add."""
        flat, place = record.reshape(-1), cells * record.shape[1] + column[:, None]
        epoch = self.clocks.epoch[lanes // WARP]
        code = np.broadcast_to((epoch << _LANE_BITS | lanes % WARP).astype(np.int32)[:, None], place.shape)
        several = (epoch << _LANE_BITS | _SEVERAL)[:, None]
        before = flat[place]
        flat[place] = np.where((before != code) & (before >> _LANE_BITS == epoch[:, None]), several, code)
        shared = flat[place] != code  # by lanes that do it together
        if shared.any():
            flat[place[shared]] = np.broadcast_to(several, place.shape)[shared]


def number_of(dtype: str) -> int:
    """Return the number of a dtype among ``DTYPES``: 0 for one that no product takes."""
    return DTYPES.index(dtype) if dtype in DTYPES else 0
