"""The machine of ``lanes`` in NumPy: all blocks and lanes at once, in lockstep.

For tests, and for finding a fault without a GPU: the same kernel bodies run, and an access out of bounds, a misaligned
one, or two lanes that touch the same bytes without a barrier between them raise ``SimulationError``.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Index, Kind, Machine, Scope, Step, Value

_DTYPES = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "bool": np.bool_}
_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.floordiv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "max": np.maximum,
    "min": np.minimum,
}
SPACE = 1 << 40  # distance between the addresses of two buffers; the first one starts there, so that 0 is no address
_NOBODY, _MANY = -1, 1 << 60


class SimulationError(Exception):
    """A kernel body did what would be undefined on a GPU."""


class _Memory:
    """Bytes, and who touched each of them last: for race checks."""

    def __init__(self, name: str, data: np.ndarray, *, constant: bool):
        self.name, self.data, self.constant = name, data, constant
        if not constant:
            # The last writer; the lowest and the highest lane that has read since; and over how many neighbouring lanes
            # a barrier has ordered either (0 = none).
            self.writer, self.high = (np.full(data.size, _NOBODY, np.int64) for _ in range(2))
            self.low = np.full(data.size, _MANY, np.int64)
            self.written, self.was_read = (np.zeros(data.size, np.int64) for _ in range(2))
            # The lowest and the highest lane that has added to it since, atomically, and the order's scope.
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

    def read(self, at: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        where = self._check(at, size)
        if not self.constant:
            owner = np.broadcast_to(lanes[:, None], where.shape)
            if np.any(self._unordered(where, owner, self.writer, self.writer, self.written)):
                raise SimulationError(f"{self.name}: a lane reads what another one writes")
            if np.any(self._unordered(where, owner, self.add_low, self.add_high, self.was_added)):
                raise SimulationError(f"{self.name}: a lane reads what another one adds to")
            self._join(where, owner, self.low, self.high, self.was_read)
        return self.data[where]

    def add(self, at: np.ndarray, lanes: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Atomically, to an i32 each, in the lanes' order; what was there before each."""
        where = self._check(at, 4)
        owner = np.broadcast_to(lanes[:, None], where.shape)
        writes, reads, _ = self.accesses()
        for others, verb in ((writes, "wrote"), (reads, "read")):
            if np.any(self._unordered(where, owner, *others)):
                raise SimulationError(f"{self.name}: a lane adds to what another one {verb}")
        self._join(where, owner, self.add_low, self.add_high, self.was_added)
        words = self.data.view(np.int32)
        before = np.empty_like(x)
        with np.errstate(over="ignore"):
            for i, (word, number) in enumerate(zip(at // 4, x, strict=True)):
                before[i] = words[word]
                words[word] += number
        return before

    def write(self, at: np.ndarray, size: int, lanes: np.ndarray, data: np.ndarray) -> None:
        where = self._check(at, size)
        if self.constant:
            raise SimulationError(f"{self.name}: a constant input is written")
        if np.unique(where).size != where.size:
            raise SimulationError(f"{self.name}: two lanes write the same bytes")
        owner = np.broadcast_to(lanes[:, None], where.shape)
        for others, verb in zip(self.accesses(), ("wrote", "read", "added to"), strict=True):
            if np.any(self._unordered(where, owner, *others)):
                raise SimulationError(f"{self.name}: a lane writes what another one {verb}")
        self.writer[where], self.written[where] = owner, 0
        self.low[where], self.high[where] = _MANY, _NOBODY
        self.add_low[where], self.add_high[where] = _MANY, _NOBODY
        self.data[where] = data

    def _join(self, where: np.ndarray, owner: np.ndarray, low: np.ndarray, high: np.ndarray, scope: np.ndarray) -> None:
        """More lanes that read or add: those before them that a barrier has ordered need no more watching."""
        stale = where[~self._unordered(where, owner, low, high, scope)]
        low[stale], high[stale] = _MANY, _NOBODY
        scope[where] = 0
        np.minimum.at(low, where, owner)
        np.maximum.at(high, where, owner)

    @staticmethod
    def _unordered(where: np.ndarray, owner: np.ndarray, low: Any, high: Any, scope: Any) -> np.ndarray:
        """Whether some other lane's access comes neither before nor after that of the owner."""
        low, high, scope = low[where], high[where], scope[where]
        size = np.maximum(scope, 1)
        ordered = (scope > 0) & (low // size == owner // size) & (high // size == owner // size)
        return (high != _NOBODY) & ((low != owner) | (high != owner)) & ~ordered

    def accesses(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Lowest lane, highest lane and scope of the order, of what wrote, of what has read and of what has added."""
        yield self.writer, self.writer, self.written
        yield self.low, self.high, self.was_read
        yield self.add_low, self.add_high, self.was_added

    def order(self, arrived: np.ndarray, size: int) -> None:
        """A barrier over groups of ``size`` lanes: what their lanes did comes before what they do next."""
        for low, high, scope in self.accesses():
            group = np.where(high >= 0, high // size, -1)
            inside = arrived[group] & (low // size == group)
            scope[inside] = np.maximum(scope[inside], size)


class Simulator(Machine):
    """Runs one launch. Values are arrays that broadcast to [blocks, threads]."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        super().__init__()
        self._threads, self._cluster = threads, cluster
        blocks = int(np.prod(grid)) * cluster
        self._shape = blocks, threads
        *numbers, rank = np.unravel_index(np.arange(blocks), (*grid, cluster))
        self._block_numbers, self._rank = numbers, rank
        self._lane = np.arange(blocks * threads, dtype=np.int64).reshape(self._shape)
        self._mask = np.ones(self._shape, bool)
        self._gone = np.zeros(self._shape, bool)  # lanes that left at a barrier
        self._memories: list[_Memory] = []
        # Shared memory of all blocks side by side.
        self._shared_size = shared_bytes
        self._shared = _Memory("shared memory", np.full(blocks * shared_bytes, 0xFF, np.uint8), constant=False)

    def buffer(self, name: str, array: np.ndarray, *, constant: bool) -> Buffer:
        """An array in device memory; written in place, so give a contiguous copy."""
        data = array.reshape(-1).view(np.uint8)
        self._memories.append(_Memory(name, data, constant=constant))
        address = self.constant(len(self._memories) * SPACE, "i64")
        return Buffer(self, address, array.shape, jnp.dtype(array.dtype), constant)

    def _wrap(self, kind: Kind, raw: Any) -> Value:
        return Value(self, kind, np.asarray(raw, _DTYPES[kind]))

    @property
    def thread(self) -> Value:
        return self._wrap("i32", np.arange(self._threads, dtype=np.int32)[None])

    def block(self, axis: int) -> Value:
        return self._wrap("i32", self._block_numbers[axis][:, None])

    @property
    def rank(self) -> Value:
        return self._wrap("i32", self._rank[:, None])

    def constant(self, number: float, kind: Kind) -> Value:
        return self._wrap(kind, np.asarray(number).astype(_DTYPES[kind]).reshape(1, 1))

    def binary(self, op: str, a: Value, b: Value) -> Value:
        assert a.kind == b.kind, (op, a.kind, b.kind)
        comparison = op in ("lt", "le", "gt", "ge", "eq")
        with np.errstate(all="ignore"):
            if op == "shr":  # logical
                unsigned = np.uint32 if a.kind == "i32" else np.uint64
                raw = (a.raw.view(unsigned) >> b.raw.view(unsigned)).view(a.raw.dtype)
            else:
                raw = _OPS[op](a.raw, b.raw)
        return self._wrap("bool" if comparison else a.kind, raw)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        assert a.kind == b.kind, (a.kind, b.kind)
        return self._wrap(a.kind, np.where(condition.raw, a.raw, b.raw))

    def widen(self, x: Value) -> Value:
        assert x.kind == "i32", x.kind
        return self._wrap("i64", x.raw)

    def bits(self, x: Value) -> Value:
        assert x.kind == "f32", x.kind
        return self._wrap("i32", x.raw.view(np.int32))

    def from_bits(self, x: Value) -> Value:
        assert x.kind == "i32", x.kind
        return self._wrap("f32", x.raw.view(np.float32))

    def exp(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.exp2(x.raw * np.float32(1 / np.log(2))))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        # The product of two f32 is exact in f64. The sum is rounded twice, which differs from once in 1 of 2^29 cases.
        with np.errstate(all="ignore"):
            return self._wrap("f32", a.raw.astype(np.float64) * b.raw + c.raw)

    def reciprocal(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.float32(1) / x.raw)

    def divide(self, a: Value, b: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", a.raw / b.raw)

    def inverse_sqrt(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.float32(1) / np.sqrt(x.raw))

    def to_e4m3(self, values: Step) -> Value:
        stacked = np.stack(np.broadcast_arrays(*[value.raw for value in values]), -1)
        with np.errstate(all="ignore"):
            codes = np.clip(stacked, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        codes = np.where(np.isnan(stacked), 0x7F, codes).astype(np.uint8)
        return self._wrap("i32", np.ascontiguousarray(codes).view(np.int32)[..., 0])

    def from_e4m3(self, word: Value) -> Step:
        codes = np.ascontiguousarray(word.raw)[..., None].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return [self._wrap("f32", codes[..., i]) for i in range(4)]

    def to_bf16(self, low: Value, high: Value) -> Value:
        pair = np.stack(np.broadcast_arrays(low.raw, high.raw), -1)
        with np.errstate(all="ignore"):
            rounded = np.ascontiguousarray(pair.astype(ml_dtypes.bfloat16)).view(np.uint16)
        rounded = np.where(np.isnan(pair), np.uint16(0x7FFF), rounded)  # PTX's canonical NaN
        return self._wrap("i32", np.ascontiguousarray(rounded).view(np.int32)[..., 0])

    def shuffle_xor(self, x: Value, distance: int) -> Value:
        assert 0 < distance < WARP, distance
        return self._wrap(x.kind, self._of_warps(x)[:, np.arange(WARP) ^ distance].reshape(self._shape))

    def _of_warps(self, x: Value) -> np.ndarray:
        """[warps, lanes]"""
        warps = np.broadcast_to(self._mask, self._shape).reshape(-1, WARP)
        if np.any(warps.any(-1) & ~warps.all(-1)):
            raise SimulationError("a shuffle in a warp of which only some lanes are active")
        return np.broadcast_to(x.raw, self._shape).reshape(-1, WARP)

    def shuffle_up(self, x: Value, distance: int) -> Value:
        assert 0 < distance < WARP, distance
        lane = np.arange(WARP)
        moved = self._of_warps(x)[:, np.where(lane < distance, lane, lane - distance)]
        return self._wrap(x.kind, moved.reshape(self._shape))

    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        assert x.kind == "i32", x.kind
        reduced = {"add": np.add, "max": np.maximum, "min": np.minimum}[op].reduce(self._of_warps(x), -1, np.int32)
        return self._wrap("i32", np.repeat(reduced, WARP).reshape(self._shape))

    def leading_zeros(self, x: Value) -> Value:
        assert x.kind == "i32", x.kind
        return self._wrap("i32", 32 - np.frexp(x.raw.view(np.uint32).astype(np.float64))[1])  # exact in f64

    def population_count(self, x: Value) -> Value:
        assert x.kind == "i32", x.kind
        return self._wrap("i32", np.bitwise_count(x.raw.view(np.uint32)))

    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        assert x.kind == "i32", x.kind
        active = self._active(where)
        before = np.zeros(self._shape, np.int32)
        if active.any():
            at = self._shared_offset(address, active, rank)
            number = np.broadcast_to(x.raw, self._shape)[active]
            before[active] = self._shared.add(at, self._lane[active], number)
        return self._wrap("i32", before)

    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        sizes = {"warp": WARP, "warpgroup": WARPGROUP, "block": self._threads}
        size = sizes.get(scope, self._threads * self._cluster)
        assert leave is False or scope == "cluster", "only a cluster's barrier may be left"
        groups = self._active(True).reshape(-1, size)
        if np.any(groups.any(-1) & ~groups.all(-1)):
            raise SimulationError(f"a {scope} barrier that only some of its lanes reach")
        arrived = np.append(groups.all(-1), False)  # the last one stands for "nobody"

        for memory in itertools.chain(self._memories, [self._shared]):
            if not memory.constant:
                memory.order(arrived, size)
        self._gone |= self._active(leave)

    def _active(self, where: Condition) -> np.ndarray:
        active = self._mask & (where if isinstance(where, bool) else where.raw)
        if np.any(active & self._gone):
            raise SimulationError("a lane that left at a barrier goes on")
        return active

    def _locate(self, address: Value, active: np.ndarray) -> tuple[_Memory, np.ndarray]:
        at = np.broadcast_to(address.raw, self._shape)[active]
        numbers = np.unique(at // SPACE)
        if numbers.size != 1 or not 1 <= numbers[0] <= len(self._memories):
            raise SimulationError("an address outside of all buffers")
        return self._memories[int(numbers[0]) - 1], at % SPACE

    def _gather(self, memory: _Memory, at: np.ndarray, size: int, active: np.ndarray) -> list[Value]:
        data = np.zeros((*self._shape, max(size, 4)), np.uint8)
        data[active, :size] = memory.read(at, size, self._lane[active])
        words = data.view(np.int32)
        return [self._wrap("i32", words[..., i]) for i in range(words.shape[-1])]

    def _scatter(self, memory: _Memory, at: np.ndarray, words: Sequence[Value], size: int, active: np.ndarray) -> None:
        assert len(words) == max(1, size // 4), (len(words), size)
        data = np.stack([np.broadcast_to(word.raw, self._shape)[active] for word in words], -1)
        data = np.ascontiguousarray(data, np.int32).view(np.uint8)[:, :size]
        memory.write(at, size, self._lane[active], data)

    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        active = self._active(where)
        if not active.any():
            return [self.constant(otherwise, "i32")] * max(1, size // 4)
        # One load may read several arrays: lanes choose theirs.
        number = np.broadcast_to(address.raw, self._shape) // SPACE
        words = [np.full(self._shape, otherwise, np.int32)] * max(1, size // 4)
        for one in np.unique(number[active]):
            here = active & (number == one)
            memory, at = self._locate(address, here)
            if constant and not memory.constant:
                raise SimulationError(f"{memory.name}: a load through the read-only cache of what the kernel may write")
            found = self._gather(memory, at, size, here)
            words = [np.where(here, new.raw, old) for new, old in zip(found, words, strict=True)]
        return [self._wrap("i32", word) for word in words]

    def hold(self, values: list[Value]) -> list[Value]:
        return values

    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None:
        active = self._active(where)
        if active.any():
            memory, at = self._locate(address, active)
            self._scatter(memory, at, words, size, active)

    def _shared_offset(self, address: Value, active: np.ndarray, rank: int | None = None) -> np.ndarray:
        at = np.broadcast_to(address.raw, self._shape)[active]
        if np.any(at < 0) or np.any(at >= self._shared_size):
            raise SimulationError("an access past the block's shared memory")
        block = self._lane[active] // self._threads
        if rank is not None:
            block = block // self._cluster * self._cluster + rank
        return at + block * self._shared_size

    def load_shared(self, address: Value, size: int) -> list[Value]:
        active = self._active(True)
        if not active.any():
            return [self.constant(0, "i32")] * max(1, size // 4)
        return self._gather(self._shared, self._shared_offset(address, active), size, active)

    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        active = self._active(where)
        if active.any():
            self._scatter(self._shared, self._shared_offset(address, active, rank), words, size, active)

    @contextlib.contextmanager
    def when(self, condition: Condition) -> Iterator[None]:
        outer = self._mask
        self._mask = outer & (condition if isinstance(condition, bool) else condition.raw)
        yield
        self._mask = outer

    def loop(self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        counts = np.broadcast_to(count.raw if isinstance(count, Value) else np.asarray(count), self._shape)
        taken = self.shared_bytes
        for i in range(int(counts[self._mask].max(initial=0))):
            self.shared_bytes = taken  # a compiled loop has one body, whose iterations share its memory
            going = self._wrap("bool", i < counts)
            with self.when(going):
                new = body(self.constant(i, "i32"), carry)
            carry = [self.select(going, a, b) for a, b in zip(new, carry, strict=True)]
        return carry

    def repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]:
        taken, going = self.shared_bytes, self._wrap("bool", np.ones(self._shape, np.bool_))
        while (going.raw & self._mask).any():
            self.shared_bytes = taken
            with self.when(going):
                again, new = body(carry)
            carry = [self.select(going, a, b) for a, b in zip(new, carry, strict=True)]
            going = going & again
        return carry
