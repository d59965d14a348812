"""The machine of ``tensor_memory`` in NumPy.

Products complete at any time before those that wait for them go on. Until then, nobody may write what they read or use
what they write. When a cell is used by another warp than the last one, both fences must come
in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from pallas_kernels.language.checks import check_product
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.simulator.clocks import SEES
from pallas_kernels.language.simulator.memory import SimulationError
from pallas_kernels.language.simulator.tensor_cores import TensorCoreSimulator
from pallas_kernels.language.tensor_cores import UNIT, DType, Operand
from pallas_kernels.language.tensor_memory import MAX_COLUMNS, ROWS, Accumulator, TensorMemory
from pallas_kernels.language.values import Condition, Index, Value, expect

_TENSOR_ROWS, _WARPS = 128, 4  # rows of tensor memory; warps of a warpgroup, each of which can access a part of them
_NEVER = 1 << 60
type _Cells = tuple[int, np.ndarray, np.ndarray]  # block, rows and columns


@dataclasses.dataclass(eq=False)
class _Product:
    """A product of one block that has not completed."""

    block: int
    cells: tuple[np.ndarray, np.ndarray]  # rows and columns, as an index
    sums: np.ndarray  # f32 [64, columns]
    accumulate: bool
    reads: list[np.ndarray]  # addresses of 16-byte units in all blocks' shared memory
    warp: int  # that has started it
    number: int  # among those of this warp, from 1


@dataclasses.dataclass(eq=False)
class _Commit:
    warps: np.ndarray
    blocks: np.ndarray
    barriers: np.ndarray
    known: np.ndarray  # what these warps knew, and that their products until then are complete


class TensorMemorySimulator(TensorCoreSimulator, TensorMemory):
    """Runs one launch."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        super().__init__(grid, threads, shared_bytes, cluster)
        self._columns = 0  # columns that every block has
        self._running: list[tuple[object, _Product | _Commit]] = []  # what is running, with the role that started it
        self._clock = 0
        self._started = np.zeros(self._shape[0] * threads // WARP, np.int32)  # products of each warp
        self._seen = np.zeros(self._shape[0] * threads // WARP, np.int64)  # the time of each warp's last "after" fence

    @contextlib.contextmanager
    def tensor_memory(self, columns: int) -> Iterator[None]:
        if self._columns:
            raise SimulationError("tensor memory is allocated twice")
        if columns & (columns - 1) or not 32 <= columns <= MAX_COLUMNS:
            raise SimulationError(f"columns must be a power of two from 32 to {MAX_COLUMNS}, got {columns}")
        shape = self._shape[0], _TENSOR_ROWS, columns
        self.take_shared(4)
        self.barrier("block")
        self._columns = columns
        self._cells = np.full(shape, -1, np.int32).view(np.float32)  # NaN
        # For each cell: the number of running products that write it; the warp that used it last, and whether by a
        # product; and from what time on other warps can know that this use is over.
        self._pending = np.zeros(shape, np.int16)
        self._user, self._by_product = np.full(shape, -1, np.int64), np.zeros(shape, bool)
        self._released = np.zeros(shape, np.int64)
        yield
        if any(isinstance(one, _Product) for _, one in self._running):
            raise SimulationError("tensor memory is freed while a product runs")
        self.barrier("block")
        self._columns = 0

    # Products.
    def one_lane(self) -> contextlib.AbstractContextManager[None]:
        return self.when(self.thread % WARP == 0)

    def mma(self, into: Accumulator, a: Operand, b: Operand, *, accumulate: Condition, dtype: DType = "f16") -> None:
        check_product(a, b, into.columns, dtype)
        active = self._active(True)
        if np.any(active.reshape(-1, WARP).sum(-1) > 1):
            raise SimulationError("a product that more than one lane asks for")
        sums = np.broadcast_to(np.asarray(accumulate if isinstance(accumulate, bool) else accumulate.raw), self._shape)
        for block, lane in zip(*np.nonzero(active), strict=True):
            self._ask(into, a, b, dtype, int(block), int(lane), bool(sums[block, lane]))

    def _ask(self, into: Accumulator, a: Operand, b: Operand, dtype: DType, block: int, lane: int, add: bool) -> None:
        reads, matrices, owner = [], [], self._lane[block, lane]
        for operand, rows in ((a, ROWS), (b, into.columns)):
            at = self._begin_read(operand, block, lane, rows, dtype, self._clocks.known[SEES, owner // WARP], owner)
            reads.append(at.reshape(-1))
            matrices.append(self._matrix(operand, at, dtype).astype(np.float32))
        row, (column, half) = np.arange(ROWS), (self._number(x, block, lane) for x in (into.column, into.half))
        cells = (row // 16 * 32 + row % 16 + 16 * half)[:, None], column + np.arange(into.columns)[None]
        self._check_cells(column, into.columns)
        warp = owner // WARP
        self._started[warp] += 1
        self._check_order((block, *cells), warp, by_product=True)
        self._pending[block, *cells] += 1
        self._user[block, *cells], self._by_product[block, *cells] = warp, True
        self._released[block, *cells] = _NEVER
        with np.errstate(all="ignore"):
            product = _Product(block, cells, matrices[0] @ matrices[1].T, add, reads, warp, int(self._started[warp]))
        self._running.append((self._turn, product))

    def _commit(self, barrier: Value) -> None:
        block, lane = np.nonzero(self._active(True))
        number = np.broadcast_to(barrier.raw, self._shape)[block, lane] // 8
        if np.any(self._expected[block, number] == 0):
            raise SimulationError("no barrier stands there")
        warps = self._lane[block, lane] // WARP
        known = self._clocks.release(warps).copy()
        known[:, np.arange(warps.size), self._clocks.of_cluster + self._clocks.own[warps]] = self._started[warps]
        self._running.append((self._turn, _Commit(warps, block, number, known)))

    def _go_on(self) -> bool:
        """Complete a copy, or the products of a role up to the first commit that waits for them."""
        turns = [turn for turn, one in self._running if isinstance(one, _Commit)]
        if not turns or (self._copies and self._random.integers(2)):
            return super()._go_on()
        turn = turns[self._random.integers(len(turns))]
        while True:
            i = next(i for i, (of, _) in enumerate(self._running) if of is turn)
            _, one = self._running.pop(i)
            if isinstance(one, _Commit):
                self._count_of(one.warps, one.blocks, one.barriers, one.known)
                return True
            self._end(one)

    def _end(self, product: _Product) -> None:
        cells = (product.block, *product.cells)
        for at in product.reads:
            self._shared.end(at, UNIT, np.array([product.warp]), product=product.number)
        with np.errstate(all="ignore"):
            self._cells[cells] = self._cells[cells] + product.sums if product.accumulate else product.sums
        self._pending[cells] -= 1
        self._clock += 1
        self._released[cells] = np.where(self._pending[cells] == 0, self._clock, _NEVER)

    # Cells.
    def _number(self, x: Index, block: int, lane: int) -> int:
        return x if isinstance(x, int) else int(np.broadcast_to(x.raw, self._shape)[block, lane])

    def _check_cells(self, first: int, count: int) -> None:
        if first < 0 or first + count > self._columns:
            raise SimulationError(f"columns {first} .. {first + count - 1} of {self._columns} in tensor memory")

    def _check_order(self, cells: _Cells, warp: int, *, by_product: bool) -> None:
        same = (self._user[cells] == warp) & (by_product | ~self._by_product[cells])
        if np.any(~same & (self._user[cells] >= 0) & (self._released[cells] > self._seen[warp])):
            raise SimulationError("tensor memory is used that another warp may still use: a fence or a wait is missing")

    def _transfers(self, accumulator: Accumulator) -> Iterator[tuple[int, slice, _Cells]]:
        """Yield block, lanes, and cells [values, lanes] of each active warp."""
        warps = self._active(True).reshape(-1, WARP)
        if np.any(warps.any(-1) & ~warps.all(-1)):
            raise SimulationError("a transfer by only some lanes of a warp")
        lane, value = np.arange(WARP), np.arange(accumulator.columns // 2)[:, None]
        for warp in np.flatnonzero(warps.all(-1)):
            block, first = divmod(int(warp) * WARP, self._threads)
            column, half = (self._number(x, block, first) for x in (accumulator.column, accumulator.half))
            self._check_cells(column, accumulator.columns)
            row = int(warp) % _WARPS * 32 + 16 * half + lane // 4 + value // 2 % 2 * 8
            cells = block, row, column + lane % 4 * 2 + value // 4 * 8 + value % 2
            if np.any(self._pending[cells]):
                raise SimulationError("tensor memory is used before a product into it was waited for")
            self._check_order(cells, int(warp), by_product=False)
            self._user[cells], self._by_product[cells], self._released[cells] = int(warp), False, _NEVER
            yield block, slice(first, first + WARP), cells

    def load_tensor(self, source: Accumulator) -> list[Value]:
        values = np.zeros((source.columns // 2, *self._shape), np.float32)
        for block, lanes, cells in self._transfers(source):
            values[:, block, lanes] = self._cells[cells]
        return [self._wrap("f32", value) for value in values]

    def store_tensor(self, into: Accumulator, values: list[Value]) -> None:
        assert len(values) == into.columns // 2, (len(values), into.columns)
        for value in values:
            self._trust(expect("f32", value), self._active(True), "what is stored in tensor memory")
        stacked = np.stack([np.broadcast_to(value.raw, self._shape) for value in values])
        for block, lanes, cells in self._transfers(into):
            self._cells[cells] = stacked[:, block, lanes]

    def fence_tensor(self, side: Literal["before", "after"]) -> None:
        active = np.flatnonzero(self._active(True).reshape(-1, WARP).any(-1))
        if side == "after":
            self._seen[active] = self._clock
            return
        self._clock += 1
        held = np.isin(self._user, active) & ~self._by_product & (self._released == _NEVER)
        self._released[held] = self._clock
