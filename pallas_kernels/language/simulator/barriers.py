"""Barriers in shared memory, and the copies that they wait for, in NumPy."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pallas_kernels.language.checks import check_send
from pallas_kernels.language.machine import WARP, Scope
from pallas_kernels.language.simulator.clocks import FOLLOWS
from pallas_kernels.language.simulator.lanes import Simulator
from pallas_kernels.language.simulator.memory import SimulationError
from pallas_kernels.language.simulator.shared import Writer, number_of
from pallas_kernels.language.tensor_cores import UNIT, TileCopy
from pallas_kernels.language.values import Condition, Index, Value, expect

SEED = 0  # of the order in which roles, copies and products go on


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy that was started: by the hardware, or what some lanes have sent to barriers of other blocks."""

    at: np.ndarray  # byte offset in the shared memory of all blocks, for each access
    data: np.ndarray  # uint8 [accesses, bytes]
    block: np.ndarray  # whose barrier it is, for each access
    number: np.ndarray  # of the barrier
    known: np.ndarray  # what the warps that started it came after, [warps, agents]
    row: np.ndarray  # of each access, in ``known``
    dtype: int
    is_sent: bool


class BarrierSimulator(Simulator):
    """The part of ``TensorCores`` that is about barriers in shared memory."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        super().__init__(grid, threads, shared_bytes, cluster)
        blocks = self._shape[0]
        self._random = np.random.default_rng(SEED)
        # For each 8 bytes of a block's shared memory, if there is a barrier: warps per phase (0 = no barrier), those
        # that have arrived, and the number of phases that have ended.
        self._expected, self._phase = (np.zeros((blocks, shared_bytes // 8), np.int64) for _ in range(2))
        self._arrived = np.zeros((blocks, shared_bytes // 8, cluster * threads // WARP), bool)  # of the cluster
        self._coming = np.zeros((blocks, shared_bytes // 8), np.int64)  # bytes of copies that a phase waits for
        self._barriers = np.full(shared_bytes // 8, -1)  # their numbers in ``Clocks``
        self._initialised = np.zeros((blocks, shared_bytes // 8), np.int32)  # in which epoch of the block's first warp
        self._copies: list[_Copy] = []  # that are running

    @abc.abstractmethod
    def _give_way(self, ready: Callable[[], bool]) -> None:
        """Let others go on until a condition holds."""

    def init_barriers(self, counts: Sequence[tuple[int, int]]) -> None:
        for address, count in counts:
            if address % 8:
                raise SimulationError("a misaligned barrier")
            self._expected[:, address // 8] = count
            self._barriers[address // 8] = self._barriers.max() + 1
            self._initialised[:, address // 8] = self._clocks.epoch[:: self._clocks.of_block]
        self._clocks.add_barriers(len(counts))
        self.barrier("block")

    def _barrier_of(self, barrier: Value) -> tuple[np.ndarray, np.ndarray]:
        """Return warp number and barrier number for each active warp."""
        active = self._active(True)
        self._trust(expect("i32", barrier), active, "the address of a barrier")
        at = np.broadcast_to(barrier.raw, self._shape)
        warps = active.reshape(-1, WARP)
        if np.any(warps.any(-1) & ~warps.all(-1)):
            raise SimulationError("a barrier that only some lanes of a warp reach")
        warp = np.flatnonzero(warps.all(-1))
        number = at.reshape(-1, WARP)[warp, 0] // 8
        block = warp * WARP // self._threads
        if np.any(self._expected[block, number] == 0):
            raise SimulationError("no barrier stands there")
        return warp, number

    def arrive(self, barrier: Value, where: Condition = True) -> None:
        chosen = self._active(where)
        warp, number = self._barrier_of(barrier)
        going = chosen.reshape(-1, WARP)[warp]
        if np.any(going.any(-1) & ~going.all(-1)):
            raise SimulationError("a barrier that only some lanes of a warp reach")
        self._count(warp[going.all(-1)], number[going.all(-1)])
        if self._random.integers(2):
            self._give_way(lambda: True)

    def arrive_in_cluster(self, barrier: Value, blocks: int) -> None:
        if blocks != self._cluster:
            raise SimulationError(f"{blocks} blocks of a cluster that has {self._cluster}")
        for rank in range(blocks):
            self._count(*self._barrier_of(barrier), rank)
            if self._random.integers(2):
                self._give_way(lambda: True)

    def _count(self, warp: np.ndarray, number: np.ndarray, rank: int | None = None) -> None:
        """Count these warps as arrived at barriers of their blocks, or of those with a rank in their clusters."""
        block = warp * WARP // self._threads
        if rank is not None:
            block = block // self._cluster * self._cluster + rank
        self._count_of(warp, block, number, self._clocks.release(warp))

    def _count_of(self, warp: np.ndarray, block: np.ndarray, number: np.ndarray, known: np.ndarray) -> None:
        """Count warps as arrived at barriers of blocks, who show those that wait what they know."""
        if not warp.size:
            return
        place = self._clocks.own[warp]
        self._check_initialised(warp, block, number)
        if np.any(self._arrived[block, number, place]):
            raise SimulationError("a warp arrives twice in one phase")
        self._arrived[block, number, place] = True
        self._clocks.arrive(known, block, self._barriers[number])
        self._end_phases(block, number)

    def _check_initialised(self, warp: np.ndarray, block: np.ndarray, number: np.ndarray) -> None:
        """Raise an error if warps use barriers of other blocks that these may not have initialised yet."""
        first = self._clocks.own[block * self._clocks.of_block]
        if np.any(self._clocks.known[FOLLOWS, warp, first] < self._initialised[block, number]):
            raise SimulationError("a barrier of another block that may not be initialised: the cluster must meet")

    def _end_phases(self, block: np.ndarray, number: np.ndarray) -> None:
        """End the phases of these barriers that wait for nothing any more."""
        block, number = np.unique(np.stack([block, number]), axis=1)
        ended = self._arrived[block, number].sum(-1) == self._expected[block, number]
        ended &= self._coming[block, number] == 0
        block, number = block[ended], number[ended]
        self._phase[block, number] += 1
        self._arrived[block, number] = False
        self._clocks.end_phase(block, self._barriers[number], self._phase[block, number])

    def expect(self, barrier: Value, size: Value) -> None:
        warp, number = self._barrier_of(barrier)
        self._trust(expect("i32", size), self._mask, "how many bytes are expected")
        sizes = np.broadcast_to(size.raw, self._shape).reshape(-1, WARP)[warp, 0]
        np.add.at(self._coming, (warp * WARP // self._threads, number), sizes)
        self._count(warp, number)

    def send_shared(
        self, address: Value, words: Sequence[Value], barrier: Value, where: Condition, *, rank: int
    ) -> None:
        check_send(words)
        active = self._active(where)
        if not active.any():
            return
        at = self._shared_offset(address, active, rank)
        number = self._shared_offset(barrier, active, rank) % self._shared_size // 8
        for word in words:
            self._trust(word, active, "what is sent")
        values = [np.broadcast_to(word.raw, self._shape)[active] for word in words]
        data = np.ascontiguousarray(np.stack(values, -1), np.int32).view(np.uint8)
        known, warps = self._clocks.follows(), self._lane[active] // WARP
        self._check_initialised(warps, at // self._shared_size, number)
        self._begin(_Copy(at, data, at // self._shared_size, number, known, warps, 0, True))

    def fill(self, barrier: Value, copies: Sequence[TileCopy]) -> None:
        """Note copies, which are made at some time before those that wait for them go on."""
        warp, number = self._barrier_of(barrier)
        np.add.at(self._coming, (warp * WARP // self._threads, number), sum(copy.size for copy in copies))
        known = self._clocks.follows()
        self._count(warp, number)
        for copy in copies:
            for one, at in zip(warp, number, strict=True):
                self._begin(self._noted(copy, int(one), int(at), known))

    def _begin(self, copy: _Copy) -> None:
        self._shared.expect(copy.at, copy.data.shape[1])
        self._copies.append(copy)

    def _noted(self, copy: TileCopy, warp: int, number: int, known: np.ndarray) -> _Copy:
        block, thread = divmod(warp * WARP, self._threads)
        lane = self._lane == self._lane[block, thread]

        def place_of(index: Index) -> int:
            if not isinstance(index, Value):
                return index
            self._trust(index, lane, "the place of a copy")
            return int(np.broadcast_to(index.raw, self._shape)[block, thread])

        memory, offset = self._locate(copy.source.address, lane)
        row, column, to = (place_of(index) for index in (copy.row, copy.column, copy.to))
        itemsize = copy.source.dtype.itemsize
        if to % (1024 if copy.swizzle else 128):
            raise SimulationError(f"a copy to a misaligned place {to}")
        (rows, columns), first = copy.source.shape, int(offset[0])
        if not 0 <= column < columns:
            raise SimulationError(f"a copy from column {column} of {columns}: a column counts elements")
        if column * itemsize % UNIT:
            raise SimulationError(f"a copy from column {column}: it must begin at a multiple of {UNIT} bytes")
        source = memory.data[first : first + rows * columns * itemsize].reshape(rows, columns * itemsize)
        part = source[row : row + copy.rows, column * itemsize : column * itemsize + copy.row_bytes]
        data = np.zeros((copy.rows, copy.row_bytes), np.uint8)
        data[: part.shape[0], : part.shape[1]] = part
        at = np.arange(0, copy.size, UNIT) + to
        at ^= at >> 3 & max(copy.swizzle - UNIT, 0)
        same = np.zeros(at.size, int)
        at, dtype = at + block * self._shared_size, number_of(memory.dtype)
        return _Copy(at, data.reshape(-1, UNIT), same + block, same + number, known, same + warp, dtype, False)

    def _go_on(self) -> bool:
        """Complete something that runs asynchronously. Returns whether there was anything."""
        if not self._copies:
            return False
        copy = self._copies.pop(self._random.integers(len(self._copies)))
        size, barrier = copy.data.shape[1], self._barriers[copy.number]
        column, phase = self._clocks.column(copy.block, barrier), self._phase[copy.block, copy.number] + 1
        writer = Writer(~column, phase, copy.known, copy.row)
        self._shared.arrive(
            copy.at, size, writer, copy.data, dtype=copy.dtype, is_fenced=not copy.is_sent, was_expected=True
        )
        for block, number in np.unique(np.stack([copy.block, copy.number]), axis=1).T:
            self._coming[block, number] -= np.sum((copy.block == block) & (copy.number == number)) * size
            self._end_phases(np.array([block]), np.array([number]))
        return True

    def check_end(self) -> None:
        """Raise an error if nobody waited for a copy: its block may have ended before it arrives."""
        super().check_end()
        if any(copy.is_sent for copy in self._copies):
            raise SimulationError("nobody waits for what was sent to a block")
        if self._copies:
            raise SimulationError("nobody waits for what was copied to a block")

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        del scope
        warp, number = self._barrier_of(barrier)
        block = warp * WARP // self._threads
        self._trust(expect("i32", parity), self._mask, "the parity of a barrier")
        wanted = np.broadcast_to(parity.raw, self._shape).reshape(-1, WARP)[warp, 0]
        if np.any(wanted & -2):
            raise SimulationError(f"a phase has the parity 0 or 1, got {wanted.max()}: write barrier.wait(count & 1)")
        self._give_way(lambda: bool(np.all(self._phase[block, number] % 2 != wanted)))
        self._clocks.wait(warp, block, self._barriers[number])
