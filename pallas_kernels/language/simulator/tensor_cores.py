"""The machine of ``tensor_cores`` in NumPy.

At every barrier, the next warpgroup in a role to run is chosen at random, and so are the copies that are complete by
then (``barriers.SEED``). A product reads from when it is started until it is waited for, and nobody may write there in
the meantime.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import ml_dtypes
import numpy as np

from pallas_kernels.language.checks import check_copy, check_wgmma
from pallas_kernels.language.machine import WARP, WARPGROUP, Scope
from pallas_kernels.language.regions import Region
from pallas_kernels.language.simulator.arithmetic import dtype_of, elementwise, multiply_bf16, typed
from pallas_kernels.language.simulator.barriers import BarrierSimulator
from pallas_kernels.language.simulator.clocks import SEES
from pallas_kernels.language.simulator.memory import SimulationError, units_of
from pallas_kernels.language.simulator.shared import DTYPES, Writer, number_of
from pallas_kernels.language.tensor_cores import (
    ATOM_BYTES,
    ATOM_ROWS,
    STEP_BYTES,
    UNIT,
    DType,
    Operand,
    Role,
    TensorCores,
)
from pallas_kernels.language.values import Condition, Index, Raw, Value

_NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LaneCopy:
    """A copy that lanes have started for themselves."""

    at: np.ndarray  # byte offset in the shared memory of all blocks, for each lane
    data: np.ndarray  # uint8 [lanes, bytes]
    lanes: np.ndarray
    known: np.ndarray  # what the warps came after when they started it, [warps, agents]
    dtype: int


class _Ended(BaseException):
    """Ends the thread of a warpgroup whose launch has failed."""


class _Turn:
    """A warpgroup in its role. It runs in a thread of its own, but only one of these threads runs at a time."""

    def __init__(self, body: Callable[[], None], mask: np.ndarray, region: Region):
        self.mask, self.region = mask, region  # as they were when it stopped running
        self.groups: list[_Group] = []  # products that are running
        self.unheld: list[_Group] = []  # that were waited for, with operands in registers that were not held since
        self.copies: list[list[_LaneCopy]] = [[]]  # groups of copies that are running
        self.ready: Callable[[], bool] = lambda: True
        self.done, self.error, self._is_ended = False, None, False
        self._go, self._back = threading.Lock(), threading.Lock()  # held until it may run; until it has stopped
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)

    def _run(self, body: Callable[[], None]) -> None:
        try:
            self._wait()
            body()
        except BaseException as error:  # passed to the thread that runs the roles
            self.error = error
        self.done = True
        self._back.release()

    def take(self) -> None:
        """Run the role until it calls ``give_way``."""
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def give_way(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self._back.release()
        self._wait()

    def _wait(self) -> None:
        if not self._is_ended:
            self._go.acquire()
        if self._is_ended:
            raise _Ended

    def end(self) -> None:
        """End the role where it has given way, if it has not ended."""
        if self._thread.is_alive():
            self._is_ended = True
            self._go.release()
            self._thread.join()


@dataclasses.dataclass(eq=False)
class _Group:
    """A product that was started."""

    start: list[Raw] | None
    a: Operand | list[Raw]
    b: Operand
    columns: int
    dtype: DType
    packed: bool
    units: list[tuple[int, int, list[np.ndarray]]]  # block, first lane, and the units that each operand is read from
    place: str  # in the kernel
    result: list[np.ndarray] | None = None
    made: int = 0  # values that were made before it was started
    unheld: np.ndarray | None = None  # lanes that have not held the operand's registers since the wait


class _Pending:
    """A raw value that may only be read by ``wgmma_wait``: an element of a group's result, or a choice between two."""

    __slots__ = ("choice", "group", "index")

    def __init__(self, group: _Group | None, index: int = 0, choice: tuple[np.ndarray, Raw, Raw] | None = None):
        self.group, self.index, self.choice = group, index, choice

    def value(self) -> np.ndarray:
        if self.choice is not None:
            condition, a, b = self.choice
            return np.where(condition, _value(a), _value(b))
        assert self.group is not None
        if self.group.result is None:
            raise SimulationError("a product is used before it was waited for")
        return self.group.result[self.index]

    def refuse(self, *_: object, **__: object) -> NoReturn:
        raise SimulationError(
            "sums of a product are used that wgmma_wait has not returned: write sums = machine.wgmma_wait(sums)"
        )

    __array__ = __array_ufunc__ = __array_function__ = __getattr__ = refuse
    __add__ = __sub__ = __mul__ = __floordiv__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refuse


def _value(raw: Raw) -> np.ndarray:
    return raw.value() if isinstance(raw, _Pending) else raw


class TensorCoreSimulator(BarrierSimulator, TensorCores):
    """Runs one launch."""

    def __init__(self, grid: tuple[int, ...], threads: int, shared_bytes: int, cluster: int = 1):
        super().__init__(grid, threads, shared_bytes, cluster)
        self._turn = _Turn(lambda: None, self._mask, self.region)
        self._body = self._around_roles = self.region
        self._in_roles = False
        self._met, self._meetings = np.zeros(self._shape, bool), 0  # lanes at a block barrier; number of such barriers

    @elementwise("f32")
    def exp2(self, x: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._wrap("f32", np.exp2(x.raw))

    @elementwise("f32")
    def normal_reciprocal(self, x: Value) -> Value:
        magnitude = np.abs(x.raw)
        with np.errstate(all="ignore"):
            inverse = np.where(magnitude > np.float32(2.0**126), np.copysign(np.float32(0), x.raw), 1 / x.raw)
        is_normal = (magnitude >= np.finfo(np.float32).tiny) & (magnitude < np.inf)
        return self._wrap("f32", np.where(is_normal, inverse, np.nan))

    @elementwise("f32")
    def normal_inverse_sqrt(self, x: Value) -> Value:
        is_normal = (x.raw >= np.finfo(np.float32).tiny) & (x.raw < np.inf)
        root = np.sqrt(np.where(is_normal, x.raw, np.float32(1)).astype(np.float64))
        return self._wrap("f32", np.where(is_normal, (1 / root).astype(np.float32), np.float32(np.nan)))

    @typed("float16")
    @elementwise("f32", "f32")
    def to_f16(self, low: Value, high: Value) -> Value:
        pair = np.stack(np.broadcast_arrays(low.raw, high.raw), -1)
        with np.errstate(all="ignore"):
            return self._wrap("i32", np.ascontiguousarray(pair.astype(np.float16)).view(np.int32)[..., 0])

    @elementwise("i32")
    def from_f16(self, word: Value) -> tuple[Value, Value]:
        halves = np.ascontiguousarray(word.raw)[..., None].view(np.float16).astype(np.float32)
        return self._wrap("f32", halves[..., 0]), self._wrap("f32", halves[..., 1])

    @elementwise("i32")
    def e4m3_to_f16(self, word: Value) -> tuple[Value, Value]:
        codes = np.ascontiguousarray(word.raw)[..., None].view(ml_dtypes.float8_e4m3fn).astype(np.float16)
        words = np.ascontiguousarray(codes).view(np.int32)
        return self._wrap("i32", words[..., 0]), self._wrap("i32", words[..., 1])

    @typed("float16")
    @elementwise("i32", "i32")
    def multiply_f16(self, a: Value, b: Value) -> Value:
        halves = [np.ascontiguousarray(x.raw)[..., None].view(np.float16) for x in (a, b)]
        with np.errstate(all="ignore"):
            product = np.ascontiguousarray(halves[0] * halves[1])
        return self._wrap("i32", product.view(np.int32)[..., 0])

    @typed("bfloat16")
    @elementwise("i32", "i32")
    def multiply_bf16(self, a: Value, b: Value) -> Value:
        halves = [np.ascontiguousarray(x.raw)[..., None].view(np.uint16) for x in (a, b)]
        return self._wrap("i32", multiply_bf16(*halves).view(np.int32)[..., 0])

    @typed("float16")
    @elementwise("i32")
    def relu_f16(self, x: Value) -> Value:
        halves = np.ascontiguousarray(x.raw)[..., None].view(np.float16)
        return self._wrap("i32", np.maximum(halves, np.float16(0)).view(np.int32)[..., 0])

    @elementwise("i32")
    def high_f16(self, word: Value) -> Value:
        high = np.ascontiguousarray(word.raw)[..., None].view(np.uint16)[..., 1:]
        high = np.where((high & 0x7FFF) > 0x7C00, np.uint16(0x7FFF), high)
        return self._wrap("i32", np.repeat(high, 2, -1).view(np.int32)[..., 0])

    @elementwise("i32", "i32")
    def maximum_u16(self, a: Value, b: Value) -> Value:
        halves = [np.ascontiguousarray(x.raw)[..., None].view(np.uint16) for x in (a, b)]
        return self._wrap("i32", np.ascontiguousarray(np.maximum(*halves)).view(np.int32)[..., 0])

    def permute_bytes(self, a: Value, b: Value, selector: Index) -> Value:
        return self._permute_bytes(a, b, selector if isinstance(selector, Value) else self.constant(selector, "i32"))

    @elementwise("i32", "i32", "i32")
    def _permute_bytes(self, a: Value, b: Value, selector: Value) -> Value:
        chosen = selector.raw[..., None] >> np.arange(0, 16, 4)
        pair = np.stack(np.broadcast_arrays(a.raw, b.raw), -1).view(np.int8)
        shape = np.broadcast_shapes(pair.shape[:-1], chosen.shape[:-1])
        pair, chosen = (np.broadcast_to(x, (*shape, x.shape[-1])) for x in (pair, chosen))
        taken = np.take_along_axis(pair, chosen & 7, -1)
        taken = np.ascontiguousarray(np.where(chosen & 8, taken >> 7, taken))
        return self._wrap("i32", taken.view(np.int32)[..., 0])

    def copy_async(self, to: Value, address: Value, where: Condition, *, size: int = 16) -> None:
        check_copy(size)
        active, chosen = self._active(True).copy(), self._active(where)
        if not active.any():
            return
        at, dtype, data = self._shared_offset(to, active), 0, np.zeros((*self._shape, size), np.uint8)
        for memory, source, here in self._arrays(address, chosen):
            if not memory.constant:
                raise SimulationError(f"{memory.name}: a copy of what the kernel may write")
            data[here], _ = memory.read(source, size, self._lane[here])
            dtype = number_of(memory.dtype)
        self._shared.expect(at, size)
        copy = _LaneCopy(at, data[active], self._lane[active], self._clocks.follows(), dtype)
        self._turn.copies[-1].append(copy)

    def close_copies(self) -> None:
        self._turn.copies.append([])

    def wait_copies(self, *, pending: int = 0) -> None:
        groups = self._turn.copies
        while len(groups) > pending + 1 or (groups[0] and not pending):
            for copy in groups[0]:
                warps = copy.lanes // WARP
                writer = Writer(copy.lanes, self._clocks.epoch[warps], copy.known, warps)
                self._shared.arrive(
                    copy.at, copy.data.shape[1], writer, copy.data, dtype=copy.dtype, is_fenced=False, was_expected=True
                )
                self._shared.unfenced[self._shared.cells(copy.at, copy.data.shape[1])] = True
            groups[0] = []
            if len(groups) > 1:
                groups.pop(0)

    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        if not self._in_roles or scope in ("warp", "warpgroup"):
            super().barrier(scope, leave=leave)
            return
        if scope == "grid":
            raise SimulationError("a barrier of the grid in a role: it belongs before or after the roles")
        # All roles meet here. The last one to arrive carries out the barrier for all.
        self._met |= self._active(True)
        size = self._threads * (self._cluster if scope == "cluster" else 1)
        groups = self._met.reshape(-1, size)
        if np.array_equal(groups.any(-1), groups.all(-1)):
            mask, self._mask = self._mask, self._met.copy()
            super().barrier(scope, leave=leave)
            self._mask = mask
            self._met[:] = False
            self._meetings += 1
        else:
            meeting = self._meetings
            self._give_way(lambda: self._meetings > meeting)

    def keep_order(self) -> None:
        pass

    # Roles.
    def roles(self, *roles: Role) -> None:
        self.registers_at_launch(roles)
        outer, turns, first = self._mask, [], 0
        self._around_roles = self.region
        thread = np.arange(self._threads)[None]
        for role in roles:
            body = functools.partial(self._play, role.body)
            for _ in range(role.warpgroups):
                turns.append(_Turn(body, outer & (thread // WARPGROUP == first // WARPGROUP), self.region))
                first += WARPGROUP
        if first != self._threads:
            raise SimulationError(f"roles for {first} of {self._threads} lanes")
        before, self._in_roles = self._turn, True
        try:
            self._take_turns(turns)
        finally:
            for turn in turns:
                turn.end()
        self._mask, self.region, self._turn, self._in_roles = outer, self._around_roles, before, False

    def _take_turns(self, turns: list[_Turn]) -> None:
        """Let warpgroups run one after the other, until all have ended."""
        while going := [turn for turn in turns if not turn.done]:
            while self._random.integers(2) and self._go_on():
                pass
            ready = [turn for turn in going if turn.ready()]
            if not ready:
                if self._go_on():
                    continue
                raise SimulationError("every role waits for another one")
            self._turn = ready[self._random.integers(len(ready))]
            self._mask, self.region = self._turn.mask, self._turn.region
            self._turn.take()
            if self._turn.done:
                self._check_turn(self._turn)

    def _give_way(self, ready: Callable[[], bool]) -> None:
        if self._in_roles:
            turn = self._turn
            turn.mask, turn.region = self._mask, self.region
            turn.region.leave(self._around_roles)  # other roles cannot use its values
            turn.give_way(ready)
            turn.region.leave(self._around_roles, is_left=False)
            self._mask, self.region = turn.mask, turn.region
            return
        while not ready():
            if not self._go_on():
                raise SimulationError("a wait for a phase that can never end")

    # Products.
    def fence_shared(self) -> None:
        lanes, unfenced = self._active(True).reshape(-1), np.flatnonzero(self._shared.unfenced)
        mine = unfenced[lanes[self._shared.writer[unfenced]]]
        self._shared.fenced[mine], self._shared.unfenced[mine] = True, False

    def wgmma(
        self,
        start: list[Value] | None,
        a: Operand | list[Value],
        b: Operand,
        *,
        columns: int,
        dtype: DType = "f16",
        packed: bool = False,
    ) -> list[Value]:
        check_wgmma(start, a, b, columns, dtype, packed)
        active = self._active(True)
        for value in (*(start or []), *([] if isinstance(a, Operand) else a)):
            self._trust(value, active, "what enters a product")
        if not isinstance(a, Operand):
            self._check_dtype(dtype, number_of(dtype_of(a)))
        raw = None if start is None else [value.raw for value in start]
        left = a if isinstance(a, Operand) else [np.asarray(value.raw) for value in a]
        units = []
        for block, first in self._warpgroups(active):
            known = self._clocks.known[SEES, self._warps(block, first)].min(0)
            reads = [(b, columns), *([(a, 64)] if isinstance(a, Operand) else [])]
            at = [self._begin_read(one, block, first, rows, dtype, known) for one, rows in reads]
            units.append((block, first, at))
        group = _Group(raw, left, b, columns, dtype, packed, units, self._caller())
        self._turn.groups.append(group)
        kind, count = ("i32", columns // 4) if packed else ("f32", columns // 2)
        group.made = self._made
        return [Value(self, kind, _Pending(group, i)) for i in range(count)]

    def _warps(self, block: int, first: int) -> np.ndarray:
        """Return the numbers of a warpgroup's warps."""
        return self._lane[block, first] // WARP + np.arange(WARPGROUP // WARP)

    def _begin_read(
        self, operand: Operand, block: int, lane: int, rows: int, dtype: DType, known: np.ndarray, reader: int = -1
    ) -> np.ndarray:
        """Note that a product begins to read an operand. Returns the addresses of its units."""
        at = self._operand_units(operand, block, lane, rows)
        self._shared.begin(at.reshape(-1), UNIT, known, reader)
        self._check_dtype(dtype, int(self._shared.dtype[self._shared.cells(at.reshape(-1), UNIT)].max(initial=0)))
        return at

    @staticmethod
    def _check_dtype(dtype: DType, written: int) -> None:
        """Raise an error if an operand is known to have been written as another dtype, given by its number."""
        if written not in (0, number_of(np.dtype(_NUMPY[dtype]).name)):
            raise SimulationError(f"a product of {dtype} has an operand that was written as {DTYPES[written]}")

    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        groups = self._turn.groups
        while len(groups) > pending:
            self._multiply(groups.pop(0))
        return [self._wrap(value.kind, _value(value.raw)) for value in values]

    def _hold(self, values: list[Value]) -> list[Value]:
        raw = [value.raw for value in values]
        for group in self._turn.unheld:
            assert isinstance(group.a, list)
            assert group.unheld is not None
            for first in range(0, len(raw) - len(group.a) + 1, len(group.a)):
                same = [x == y for x, y in zip(group.a, raw[first : first + len(group.a)], strict=True)]
                group.unheld &= ~(functools.reduce(np.logical_and, same) & self._mask)
        self._turn.unheld = [group for group in self._turn.unheld if np.any(group.unheld)]
        return values

    def _check_turn(self, turn: _Turn) -> None:
        """Raise an error if a product still runs when a role ends, or if registers were not held that it read."""
        if turn.groups:
            raise SimulationError(f"a product that nobody waits for, from {turn.groups[0].place}")
        if turn.unheld:
            raise SimulationError(
                f"registers that a product reads, from {turn.unheld[0].place}, may be used again while it runs: "
                "machine.hold(words) is to follow the wait"
            )

    def check_end(self) -> None:
        super().check_end()
        self._check_turn(self._turn)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        if isinstance(a.raw, _Pending) or isinstance(b.raw, _Pending):  # this happens at the end of a loop's iteration
            return Value(self, a.kind, _Pending(None, choice=(condition.raw, a.raw, b.raw)))
        return super().select(condition, a, b)

    def _multiply(self, group: _Group) -> None:
        sums = np.zeros((group.columns // 2, *self._shape), np.float32)
        for i, raw in enumerate(group.start or []):
            sums[i] = _value(raw)
        for block, first, (of_b, *of_a) in group.units:
            lanes, warps = slice(first, first + WARPGROUP), self._warps(block, first)
            b = self._matrix(group.b, of_b, group.dtype)
            if isinstance(group.a, Operand):
                a = self._matrix(group.a, of_a[0], group.dtype)
            else:
                a = self._registers(group.a, block, lanes, group.dtype)
            for at in (of_b, *of_a):
                self._shared.end(at.reshape(-1), UNIT, warps)
            # Step by step, so that a product in several groups has the bits of one. Within a step of f64 the order of
            # NumPy's sums, which depends on the shape, is no matter: one of bf16 is nearly exact.
            steps = a.shape[1] * a.itemsize // STEP_BYTES
            with np.errstate(all="ignore"):
                left, right = (x.astype(np.float64).reshape(x.shape[0], steps, -1).swapaxes(0, 1) for x in (a, b))
                for product in (left @ right.swapaxes(1, 2)).astype(np.float32):
                    # Row: warp, value / 2 % 2, lane / 4. Column: value / 4, lane % 4, value % 2.
                    of_lanes = product.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
                    sums[:, block, lanes] += of_lanes.reshape(-1, WARPGROUP)
        if not isinstance(group.a, Operand) and group.made != self._made:
            group.unheld = np.zeros(self._shape, bool)
            for block, first, _ in group.units:
                group.unheld[block, first : first + WARPGROUP] = True
            self._turn.unheld.append(group)
        group.result = list(sums)
        if group.packed:
            values = [self._wrap("f32", one) for one in sums]
            group.result = [self.to_f16(*pair).raw for pair in zip(values[::2], values[1::2], strict=True)]

    def _warpgroups(self, active: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield (block, first lane) of each active warpgroup."""
        groups = active.reshape(self._shape[0], -1, WARPGROUP)
        if np.any(groups.any(-1) & ~groups.all(-1)):
            raise SimulationError("a product that only some lanes of a warpgroup ask for")
        for block, number in zip(*np.nonzero(groups.all(-1)), strict=True):
            yield int(block), int(number) * WARPGROUP

    def _matrix(self, operand: Operand, at: np.ndarray, dtype: DType) -> np.ndarray:
        matrix = units_of(self._shared.data, UNIT)[at // UNIT].reshape(len(at), -1).view(_NUMPY[dtype])
        return matrix.T if operand.transposed else matrix

    def _operand_units(self, operand: Operand, block: int, lane: int, rows: int) -> np.ndarray:
        """Return the addresses of an operand's 16-byte units, [rows, units of K] or, if transposed, [K, units]."""
        self._trust(operand.address, self._lane == self._lane[block, lane], "the address of an operand")
        address = int(np.broadcast_to(operand.address.raw, self._shape)[block, lane])
        start = address + np.asarray(operand.steps)
        if operand.transposed:
            k, n = np.arange(16)[:, None], np.arange(0, rows, UNIT // 2)[None]
            at = k // ATOM_ROWS * operand.stride + k % ATOM_ROWS * ATOM_BYTES
            at = at + n // 64 * operand.leading + n % 64 * 2
            at = (start[:, None, None] + at).reshape(-1, at.shape[1])
        else:
            row = np.arange(rows)[:, None]
            at = row // ATOM_ROWS * operand.stride + row % ATOM_ROWS * ATOM_BYTES + np.arange(0, STEP_BYTES, UNIT)
            at = (start[None, :, None] + at[:, None]).reshape(rows, -1)
        if np.any(at % UNIT):
            raise SimulationError("an operand at a misaligned address")
        at = at ^ (at >> 3 & 0x70)  # the swizzle, on addresses
        if np.any(at >= self._shared_size):
            raise SimulationError("an operand past the block's shared memory")
        at = at + block * self._shared_size
        if self._shared.fault is not None and np.any(units_of(self._shared.fault, UNIT)[at // UNIT]):
            raise SimulationError("a product reads shared memory that nobody has written")
        return at

    def _registers(self, words: list[Raw], block: int, lanes: slice, dtype: DType) -> np.ndarray:
        """Return [64, K] from a warpgroup's registers."""
        data = np.stack([np.broadcast_to(raw, self._shape)[block, lanes] for raw in words]).astype(np.int32, copy=False)
        # Word: step, half of its 32 bytes, row / 8 % 2. Lane: row / 16, row % 8, four bytes.
        of_lanes = data.view(np.uint8).reshape(-1, 2, 2, 4, 8, 4, 4).transpose(3, 2, 4, 0, 1, 5, 6)
        return of_lanes.reshape(64, -1).view(_NUMPY[dtype])
