"""The machine of ``lanes`` in NumPy: all blocks and lanes run at once, in lockstep.

It is used for tests, and for debugging without a GPU. It runs the same kernel bodies, and raises ``SimulationError``
for accesses out of bounds, for misaligned accesses, and if two lanes access the same bytes without a barrier between
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from pallas_kernels.language.checks import check_access, check_barrier, check_moved, check_reduction, check_shuffle
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Scope
from pallas_kernels.language.simulator.arithmetic import NumPyArithmetic, Word, dtype_of
from pallas_kernels.language.simulator.clocks import Clocks
from pallas_kernels.language.simulator.memory import UNWRITTEN, DeviceMemory, SimulationError
from pallas_kernels.language.simulator.shared import SharedMemory, number_of
from pallas_kernels.language.values import Condition, Index, Value, expect

SPACE = 1 << 40  # distance between the addresses of buffers; the first has this address, so that 0 is invalid
_OF_WARP = {"add": np.add, "max": np.maximum, "min": np.minimum}


class Simulator(NumPyArithmetic):
    """Runs one launch."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        blocks = int(np.prod(grid)) * cluster
        super().__init__(blocks, threads)
        self._threads, self._cluster = threads, cluster
        *numbers, rank = np.unravel_index(np.arange(blocks), (*grid, cluster))
        self._block_numbers, self._rank = numbers, rank
        self._lane = np.arange(blocks * threads, dtype=np.int64).reshape(self._shape)
        self._gone = np.zeros(self._shape, bool)  # lanes that have left at a barrier
        self._has_arrived = np.zeros(self._shape, bool)  # lanes that are to wait for their cluster
        self._memories: list[DeviceMemory] = []
        self._shared_size, self._clocks = shared_bytes, Clocks(blocks, threads, cluster)
        self._shared = SharedMemory(blocks, shared_bytes, self._clocks)
        self._has_waited: np.ndarray | None = None  # lanes, for the grid, at which they have arrived
        self._launches: DeviceMemory | None = None  # what each block adds to the number of the launch, by its mailbox

    def take_shared(self, size: int, alignment: int = 16) -> int:
        offset = super().take_shared(size, alignment)
        if self.shared_bytes > self._shared_size:
            raise ValueError(
                f"{self.shared_bytes} bytes of shared memory are taken so far, and the launch has {self._shared_size}"
            )
        return offset

    def buffer(self, name: str, array: np.ndarray, *, constant: bool) -> Buffer:
        """Return an array in device memory. It is written in place, so pass a contiguous copy."""
        data = array.reshape(-1).view(np.uint8)
        self._memories.append(DeviceMemory(name, data, constant=constant, dtype=array.dtype.name))
        address = self.constant(len(self._memories) * SPACE, "i64")
        return Buffer(self, address, array.shape, jnp.dtype(array.dtype), constant)

    @property
    def thread(self) -> Value:
        return self._wrap("i32", np.arange(self._threads, dtype=np.int32)[None])

    def block(self, axis: int) -> Value:
        return self._wrap("i32", self._block_numbers[axis][:, None])

    @property
    def rank(self) -> Value:
        return self._wrap("i32", self._rank[:, None])

    def shuffle_xor(self, x: Value, distance: int) -> Value:
        return self._shuffle(x, distance, np.arange(WARP) ^ distance)

    def shuffle_up(self, x: Value, distance: int) -> Value:
        lane = np.arange(WARP)
        return self._shuffle(x, distance, np.where(lane < distance, lane, lane - distance))

    def _shuffle(self, x: Value, distance: int, source: np.ndarray) -> Value:
        check_shuffle(x, distance)
        return self._moved(x, np.broadcast_to(source, (self._lane.size // WARP, WARP)))

    def shuffle(self, x: Value, lane: Value) -> Value:
        check_moved(x)
        self._trust(expect("i32", lane), self._mask, "the lane of a shuffle")
        source, active = self._of_warps(lane.raw), self._of_warps(self._mask)
        if wrong := source[active & ((source < 0) | (source >= WARP))].tolist():
            raise SimulationError(f"a shuffle from lane {wrong[0]} of a warp")
        return self._moved(x, source % WARP)

    def _moved(self, x: Value, source: np.ndarray) -> Value:
        """Return what the lanes [warps, lanes] of each warp have."""
        value = self._wrap(x.kind, np.take_along_axis(self._of_warps(x.raw), source, -1).reshape(self._shape))
        if x.fault is not None:
            value.fault = np.take_along_axis(self._of_warps(x.fault), source, -1).reshape(self._shape)
        return value

    def _of_warps(self, array: np.ndarray) -> np.ndarray:
        """Return the array as [warps, lanes], after checking that no warp is partly active."""
        self._refuse_part_of_a_warp("a shuffle in a warp of which only some lanes are active")
        return np.broadcast_to(array, self._shape).reshape(-1, WARP)

    def _refuse_part_of_a_warp(self, mistake: str) -> None:
        warps = np.broadcast_to(self._mask, self._shape).reshape(-1, WARP)
        if np.any(warps.any(-1) & ~warps.all(-1)):
            raise SimulationError(mistake)

    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        check_reduction(op)
        reduced = _OF_WARP[op].reduce(self._of_warps(expect("i32", x).raw), -1, np.int32)
        value = self._wrap("i32", np.repeat(reduced, WARP).reshape(self._shape))
        if x.fault is not None:
            value.fault = np.repeat(self._of_warps(x.fault).max(-1), WARP).reshape(self._shape)
        return value

    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        active = self._active(where)
        self._trust(expect("i32", x), active, "what is added")
        before = np.zeros(self._shape, np.int32)
        if active.any():
            at = self._shared_offset(address, active, rank)
            number = np.broadcast_to(x.raw, self._shape)[active]
            before[active] = self._shared.add(at, self._lane[active], number)
        return self._wrap("i32", before)

    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        check_barrier(scope, leave)
        self._order(scope)
        self._gone |= self._active(leave)

    def _order(self, scope: Scope, *, is_relaxed: bool = False) -> None:
        """Order what the active lanes did before what they do next; what they stored only for others that store."""
        of_cluster = self._threads * self._cluster
        sizes = {"warp": WARP, "warpgroup": WARPGROUP, "block": self._threads, "grid": self._lane.size}
        size = sizes.get(scope, of_cluster)
        groups = self._active(True).reshape(-1, size)
        if np.any(groups.any(-1) & ~groups.all(-1)):
            raise SimulationError(f"a {scope} barrier that only some of its lanes reach")
        arrived = groups.all(-1)
        for memory in self._memories:
            if not memory.constant:
                memory.order(arrived, size, is_relaxed=is_relaxed)
        if is_relaxed:
            self._clocks.meet_relaxed()
        else:
            arrived = np.repeat(arrived, max(1, size // of_cluster))
            self._clocks.meet(arrived, min(size, of_cluster))  # shared memory is a cluster's own

    def grid_arrive(self) -> None:
        if self._has_waited is not None and not self._has_waited.all():
            raise SimulationError("a lane that arrives again before it has waited for the grid")
        if not self._active(True).all():
            raise SimulationError("a grid barrier that only some of its lanes reach")
        self._order("block")
        self._has_waited = np.zeros(self._lane.size, bool)
        for memory in self._memories:
            if not memory.constant:
                memory.order_those_who_wait(self._threads, self._has_waited)

    def grid_wait(self) -> None:
        if self._has_waited is None:
            raise SimulationError("a lane that waits for the grid and has not arrived")
        self._order("warpgroup")
        self._has_waited[self._lane[self._active(True)]] = True

    def cluster_arrive(self) -> None:
        active = self._active(True)
        if np.any(active & self._has_arrived):
            raise SimulationError("a lane that arrives again before it has waited for its cluster")
        self._has_arrived |= active
        self._clocks.arrive_relaxed(np.flatnonzero(active.reshape(-1, WARP).any(-1)))

    def cluster_wait(self) -> None:
        if np.any(self._active(True) & ~self._has_arrived):
            raise SimulationError("a lane that waits for its cluster and has not arrived")
        self._has_arrived[:] = False
        self._order("cluster", is_relaxed=True)

    def _active(self, where: Condition) -> np.ndarray:
        active = super()._active(where)
        if np.any(active & self._gone):
            raise SimulationError("a lane that left at a barrier goes on")
        return active

    def _locate(self, address: Value, active: np.ndarray) -> tuple[DeviceMemory, np.ndarray]:
        self._trust(expect("i64", address), active, "an address")
        at = np.broadcast_to(address.raw, self._shape)[active]
        numbers = np.unique(at // SPACE)
        if numbers.size != 1 or not 1 <= numbers[0] <= len(self._memories):
            raise SimulationError("an address outside of all buffers")
        return self._memories[int(numbers[0]) - 1], at % SPACE

    def _arrays(self, address: Value, active: np.ndarray) -> Iterator[tuple[DeviceMemory, np.ndarray, np.ndarray]]:
        """Yield the arrays that lanes read at once, of which each can choose its own, with places and lanes."""
        number = np.broadcast_to(address.raw, self._shape) // SPACE
        for one in np.unique(number[active]):
            here = active & (number == one)
            yield *self._locate(address, here), here

    def _words(self, data: np.ndarray, fault: np.ndarray | None, active: np.ndarray) -> list[Value]:
        """Return the words that active lanes have loaded, [lanes, bytes], with their faults."""
        size = data.shape[1]
        loaded = np.zeros((*self._shape, max(size, 4)), np.uint8)
        loaded[active, :size] = data
        words = loaded.view(np.int32)
        values = [self._wrap("i32", words[..., i]) for i in range(words.shape[-1])]
        if fault is not None:
            fault = np.where(fault == UNWRITTEN, self._reason("shared memory that nobody has written"), fault)
            fault = fault.reshape(len(fault), len(values), -1).max(-1)
            for value, of_word in zip(values, fault.T, strict=True):
                if of_word.any():
                    value.fault = np.zeros(self._shape, np.int16)
                    value.fault[active] = of_word
        return values

    def _bytes(self, words: Sequence[Value], size: int, active: np.ndarray) -> np.ndarray:
        """Return what active lanes store, [lanes, size]."""
        values = [np.broadcast_to(expect("i32", word).raw, self._shape)[active] for word in words]
        return np.ascontiguousarray(np.stack(values, -1), np.int32).view(np.uint8)[:, :size]

    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        check_access(size)
        active = self._active(where)
        if not active.any():
            return [self.constant(otherwise, "i32")] * max(1, size // 4)
        words = [np.full(self._shape, otherwise, np.int32)] * max(1, size // 4)
        dtypes = set()
        for memory, at, here in self._arrays(address, active):
            dtypes.add(memory.dtype)
            if constant and not memory.constant:
                raise SimulationError(f"{memory.name}: a load through the read-only cache of what the kernel may write")
            found = self._words(*memory.read(at, size, self._lane[here]), here)
            words = [np.where(here, new.raw, old) for new, old in zip(found, words, strict=True)]
        values = [self._wrap("i32", word) for word in words]
        return [Word(value, *dtypes) for value in values] if len(dtypes) == 1 else values

    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None:
        check_access(size, words)
        active = self._active(where)
        if active.any():
            memory, at = self._locate(address, active)
            for word in words:
                self._trust(expect("i32", word), active, f"{memory.name}: what is stored")
            memory.write(at, size, self._lane[active], self._bytes(words, size, active))

    def open_mail(self, count: int) -> tuple[Value, Value]:
        if self._launches is not None:
            raise TypeError("a launch has one mailbox")
        # A word, and whether it was sent. Only ``send`` may write it.
        mail = self.buffer("mail", np.zeros((count, 2), np.int32), constant=True)
        self.buffer("launches", np.zeros(self._shape[0], np.int32), constant=False)
        self._launches = self._memories[-1]
        active = self._active(True)
        self._launches.read(self._lane[active] // self._threads * 4, 4, self._lane[active])
        return mail.address, self.constant(1, "i32")

    def close_mail(self) -> None:
        if self._launches is None:
            raise TypeError("a mailbox that was not opened")
        lanes = self._lane[self._active(True) & (self._lane % self._threads == 0)]
        at = lanes // self._threads * 4
        if self._launches.data[at].any():
            raise SimulationError("a block that closes its mailbox twice")
        self._launches.write(at, 4, lanes, np.ones((lanes.size, 1), np.int32).view(np.uint8))

    def send(self, address: Value, words: Sequence[Value], launch: Value, where: Condition) -> None:
        active = self._active(where)
        if not active.any():
            return
        letters, at = self._letters(address, len(words), launch, active)
        for word in words:
            self._trust(expect("i32", word), active, "mail: what is sent")
        if letters[at, 1].any() or np.unique(at).size < at.size:
            raise SimulationError("mail: a word that is sent twice in a launch")
        letters[at, 0] = np.stack([np.broadcast_to(word.raw, self._shape)[active] for word in words], -1)
        letters[at, 1] = 1

    def receive(
        self, addresses: Sequence[Value], count: int, launch: Value, where: Sequence[Condition]
    ) -> list[list[Value]]:
        self._refuse_part_of_a_warp("mail that only some lanes of a warp receive")
        found = []
        for address, condition in zip(addresses, where, strict=True):
            words, active = np.zeros((*self._shape, count), np.int32), self._active(condition)
            if active.any():
                letters, at = self._letters(address, count, launch, active)
                if not letters[at, 1].all():
                    raise SimulationError("mail: a word that nobody has sent, for which a GPU waits forever")
                words[active] = letters[at, 0]
            found.append([self._wrap("i32", words[..., n]) for n in range(count)])
        return found

    def _letters(self, address: Value, count: int, launch: Value, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return words that are sent, with whether they were, [n, 2], and which of them is meant, [lanes, count]."""
        self._trust(launch, active, "the number of a launch")
        memory, at = self._locate(address, active)
        memory.check(at, 8 * count)
        return memory.data.view(np.int32).reshape(-1, 2), at[:, None] // 8 + np.arange(count)

    def check_end(self) -> None:
        """Raise an error for what would go wrong after the launch."""
        if self._launches is not None and not self._launches.data.view(np.int32).all():
            raise SimulationError("a block that did not close its mailbox")

    def _shared_offset(self, address: Value, active: np.ndarray, rank: int | None = None) -> np.ndarray:
        self._trust(expect("i32", address), active, "an address")
        at = np.broadcast_to(address.raw, self._shape)[active]
        if np.any(at < 0) or np.any(at >= self._shared_size):
            raise SimulationError("an access past the block's shared memory")
        block = self._lane[active] // self._threads
        if rank is not None:
            block = block // self._cluster * self._cluster + rank
        return at + block * self._shared_size

    def load_shared(self, address: Value, size: int) -> list[Value]:
        check_access(size)
        active = self._active(True)
        if not active.any():
            return [self.constant(0, "i32")] * max(1, size // 4)
        return self._words(*self._shared.read(self._shared_offset(address, active), size, self._lane[active]), active)

    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        check_access(size, words)
        active = self._active(where)
        if active.any():
            at, data = self._shared_offset(address, active, rank), self._bytes(words, size, active)
            fault: np.ndarray | int = 0
            if any(word.fault is not None for word in words):
                faults = [0 if word.fault is None else word.fault for word in words]
                faults = [np.broadcast_to(of_word, self._shape)[active] for of_word in faults]
                fault = np.repeat(np.stack(faults, -1), max(1, size // len(words)), -1)
            self._shared.write(at, size, self._lane[active], data, fault, number_of(dtype_of(words)))

    def _hold(self, values: list[Value]) -> list[Value]:
        return values

    @contextlib.contextmanager
    def _when(self, condition: Condition) -> Iterator[None]:
        outer, self._mask = self._mask, super()._active(condition)
        yield
        self._mask = outer

    def _loop(self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        if isinstance(count, Value):
            self._trust(count, self._mask, "the count of a loop")
        counts = np.broadcast_to(count.raw if isinstance(count, Value) else np.asarray(count), self._shape)
        taken = self.shared_bytes, self.scratch_bytes
        for i in range(int(counts[self._mask].max(initial=0))):
            # A compiled loop has only one body, so all iterations use the same shared memory.
            self.shared_bytes, self.scratch_bytes = taken
            going = self._wrap("bool", i < counts)
            with self._when(going):
                new = body(self._constant(i, "i32"), carry)
            carry = [self.select(going, a, b) for a, b in zip(new, carry, strict=True)]
        return carry

    def _repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]:
        taken, going = (self.shared_bytes, self.scratch_bytes), self._wrap("bool", np.ones(self._shape, np.bool_))
        while (going.raw & self._mask).any():
            self.shared_bytes, self.scratch_bytes = taken
            with self._when(going):
                again, new = body(carry)
                self._trust(again, self._mask, "the end of a loop")
            carry = [self.select(going, a, b) for a, b in zip(new, carry, strict=True)]
            going = going & again
        return carry
