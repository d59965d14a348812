"""Barriers in shared memory, and the copies that they wait for, in NumPy."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pallas_kernels.language.checks import check_send
from pallas_kernels.language.machine import WARP, Scope
from pallas_kernels.language.simulator.lanes import Simulator
from pallas_kernels.language.simulator.memory import SimulationError
from pallas_kernels.language.tensor_cores import UNIT, TileCopy
from pallas_kernels.language.values import Condition, Index, Value, expect


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy that was started."""

    at: np.ndarray  # byte offset in shared memory of each unit
    data: np.ndarray  # uint8 [units, bytes]
    block: int
    thread: int  # the first of the warp
    number: int  # of the barrier


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What some lanes have sent to barriers of other blocks."""

    at: np.ndarray  # byte offset in the shared memory of all blocks, for each lane
    data: np.ndarray  # uint8 [lanes, bytes]
    lane: np.ndarray
    block: np.ndarray  # whose barrier it is
    number: np.ndarray  # of the barrier


class BarrierSimulator(Simulator):
    """The part of ``TensorCores`` that is about barriers in shared memory."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        super().__init__(grid, threads, shared_bytes, cluster)
        blocks = self._shape[0]
        self._random = np.random.default_rng(0)
        # For each 8 bytes of a block's shared memory, if there is a barrier: warps per phase (0 = no barrier), those
        # that have arrived, and the number of phases that have ended.
        self._expected, self._phase = (np.zeros((blocks, shared_bytes // 8), np.int64) for _ in range(2))
        self._arrived = np.zeros((blocks, shared_bytes // 8, cluster * threads // WARP), bool)  # of the cluster
        self._coming = np.zeros((blocks, shared_bytes // 8), np.int64)  # bytes of copies that a phase waits for
        self._copies: list[_Copy | _Sent] = []  # that are running
        # Block and number of a barrier, and where and how many bytes each are that it will show.
        self._sent: list[tuple[int, int, np.ndarray, int]] = []

    @abc.abstractmethod
    def _give_way(self, ready: Callable[[], bool]) -> None:
        """Let others go on until a condition holds."""

    def init_barriers(self, counts: Sequence[tuple[int, int]]) -> None:
        for address, count in counts:
            if address % 8:
                raise SimulationError("a misaligned barrier")
            self._expected[:, address // 8] = count
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
        in_cluster = self._cluster * self._threads // WARP
        cluster, place = warp // in_cluster, warp % in_cluster
        block = warp * WARP // self._threads if rank is None else cluster * self._cluster + rank
        if np.any(self._arrived[block, number, place]):
            raise SimulationError("a warp arrives twice in one phase")
        self._arrived[block, number, place] = True
        self._end_phases(block, number)

    def _end_phases(self, block: np.ndarray, number: np.ndarray) -> None:
        """End the phases of these barriers that wait for nothing any more."""
        block, number = np.unique(np.stack([block, number]), axis=1)
        ended = self._arrived[block, number].sum(-1) == self._expected[block, number]
        ended &= self._coming[block, number] == 0
        block, number = block[ended], number[ended]
        at, place = np.nonzero(self._arrived[block, number])
        self._order_warps(block[at] // self._cluster * (self._cluster * self._threads // WARP) + place, block[at])
        self._phase[block, number] += 1
        self._arrived[block, number] = False
        if self._sent:
            ending = set(zip(block.tolist(), number.tolist(), strict=True))
            for _, _, at, size in (one for one in self._sent if one[:2] in ending):
                self._shared.written[self._shared.cells(at, size)] = self._cluster * self._threads
            self._sent = [one for one in self._sent if one[:2] not in ending]

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
        self._copies.append(_Sent(at, data, self._lane[active], at // self._shared_size, number))

    def fill(self, barrier: Value, copies: Sequence[TileCopy]) -> None:
        """Note copies, which are made when somebody waits for them."""
        warp, number = self._barrier_of(barrier)
        np.add.at(self._coming, (warp * WARP // self._threads, number), sum(copy.size for copy in copies))
        self._count(warp, number)
        for copy in copies:
            self._copies += [self._noted(copy, int(one), int(at)) for one, at in zip(warp, number, strict=True)]

    def _noted(self, copy: TileCopy, warp: int, number: int) -> _Copy:
        block, thread = divmod(warp * WARP, self._threads)
        lane = self._lane == self._lane[block, thread]

        def known(index: Index) -> int:
            if not isinstance(index, Value):
                return index
            self._trust(index, lane, "the place of a copy")
            return int(np.broadcast_to(index.raw, self._shape)[block, thread])

        memory, offset = self._locate(copy.source.address, lane)
        row, column, to, itemsize = known(copy.row), known(copy.column), known(copy.to), copy.source.dtype.itemsize
        if to % (1024 if copy.swizzle else 128):
            raise SimulationError(f"a copy to a misaligned place {to}")
        (rows, columns), first = copy.source.shape, int(offset[0])
        source = memory.data[first : first + rows * columns * itemsize].reshape(rows, columns * itemsize)
        part = source[row : row + copy.rows, column * itemsize : column * itemsize + copy.row_bytes]
        data = np.zeros((copy.rows, copy.row_bytes), np.uint8)
        data[: part.shape[0], : part.shape[1]] = part
        at = np.arange(0, copy.size, UNIT) + to
        at ^= at >> 3 & max(copy.swizzle - UNIT, 0)
        return _Copy(at, data.reshape(-1, UNIT), block, thread, number)

    def _go_on(self) -> bool:
        """Complete something that runs asynchronously while all lanes wait. Returns whether there was anything."""
        if not self._copies:
            return False
        copy = self._copies.pop(0)
        if isinstance(copy, _Sent):
            self._arrive_sent(copy)
            return True
        place = copy.at + copy.block * self._shared_size
        self._shared.write(place, UNIT, np.full(place.shape, copy.block * self._threads + copy.thread), copy.data)
        written = self._shared.cells(place, UNIT)
        self._shared.fenced[written] = self._shared.touched[written] = True
        self._coming[copy.block, copy.number] -= copy.data.size
        self._end_phases(np.array([copy.block]), np.array([copy.number]))
        return True

    def check_end(self) -> None:
        """Raise an error if something was sent that nobody waited for: its block may have ended before it arrives."""
        if any(isinstance(copy, _Sent) for copy in self._copies):
            raise SimulationError("nobody waits for what was sent to a block")

    def _arrive_sent(self, sent: _Sent) -> None:
        size = sent.data.shape[1]
        self._shared.write(sent.at, size, sent.lane, sent.data)
        self._shared.fenced[self._shared.cells(sent.at, size)] = False
        for block, number in np.unique(np.stack([sent.block, sent.number]), axis=1).T:
            mine = (sent.block == block) & (sent.number == number)
            self._sent.append((int(block), int(number), sent.at[mine], size))
            self._coming[block, number] -= mine.sum() * size
            self._end_phases(np.array([block]), np.array([number]))

    def _order_warps(self, arrived: np.ndarray, block: np.ndarray) -> None:
        """Order what these warps did in shared memory before what the blocks at whose barriers they are do next."""
        came = np.zeros(self._shape[0] * self._threads // WARP + 1, bool)  # the last element stands for "nobody"
        came[arrived] = True
        if not arrived.size:
            return
        size = (
            self._threads if np.array_equal(arrived * WARP // self._threads, block) else self._threads * self._cluster
        )
        touched = np.flatnonzero(self._shared.touched)
        enough = self._threads * self._cluster  # other blocks of the cluster may access the same cells later
        open_ended = np.zeros(touched.size, bool)
        for low, high, scope in self._shared.accesses():
            low_lane, high_lane = low[touched], high[touched]
            somebody = high_lane >= 0
            inside = somebody & came[np.where(somebody, high_lane // WARP, -1)]
            inside &= came[np.where(somebody, low_lane // WARP, -1)]
            scope[touched[inside]] = np.maximum(scope[touched[inside]], size)
            open_ended |= somebody & (scope[touched] < enough)
        self._shared.touched[touched[~open_ended]] = False

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        del scope
        warp, number = self._barrier_of(barrier)
        block = warp * WARP // self._threads
        self._trust(expect("i32", parity), self._mask, "the parity of a barrier")
        wanted = np.broadcast_to(parity.raw, self._shape).reshape(-1, WARP)[warp, 0]
        self._give_way(lambda: bool(np.all(self._phase[block, number] % 2 != wanted)))
