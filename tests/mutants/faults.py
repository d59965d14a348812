"""Faults of pipelines, as machines: a kernel that runs on one of them does what it would with a mistake in its body.

So no fault names a line of a kernel, and a kernel may be written anew without them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from pallas_kernels.language.kinds import Kind
from pallas_kernels.language.machine import Scope
from pallas_kernels.language.simulator.tensor_memory import TensorMemorySimulator
from pallas_kernels.language.tensor_cores import Operand
from pallas_kernels.language.values import Value

_BARRIER_ALIGNMENT = 8  # with which only barriers are taken


class Mutant(TensorMemorySimulator):
    """A machine that counts its barriers in shared memory, and how often it made its fault."""

    number: ClassVar[int | None] = None  # of the barriers, or of the place, that are meant
    made: ClassVar[set[Any]] = set()  # what was met where the fault can be made

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self._arrays_of_barriers: list[tuple[int, int]] = []  # offset and copies of barriers

    def _caller(self) -> str:
        frame: Any = sys._getframe(1)
        while f"pallas_kernels{os.sep}language" in (name := frame.f_code.co_filename) or name in (__file__, "<string>"):
            frame = frame.f_back
        return f"{os.path.relpath(name)}:{frame.f_lineno}"

    def _is_of_kernel(self) -> bool:
        """Return whether a barrier is a kernel's, and not a part of what another operation does."""
        return f"language{os.sep}simulator" not in sys._getframe(2).f_code.co_filename

    def take_shared(self, size: int, alignment: int = 16) -> int:
        offset = super().take_shared(size, alignment)
        if alignment == _BARRIER_ALIGNMENT:
            self._arrays_of_barriers.append((offset, size // _BARRIER_ALIGNMENT))
        return offset

    def is_meant(self, key: Any) -> bool:
        """Return whether the fault is to be made here, and note that it can."""
        type(self).made.add(key)
        return type(self).number in (None, key)

    def barriers_at(self, address: Value) -> int:
        """Return the number of the barriers among all that were taken."""
        at = int(np.broadcast_to(address.raw, self._shape)[self._mask].min(initial=1 << 30))
        return next(
            (n for n, (first, copies) in enumerate(self._arrays_of_barriers) if first <= at < first + 8 * copies), -1
        )


class WrongParity(Mutant):
    """waits for the other parity"""

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        if self._mask.any() and self.is_meant(self.barriers_at(barrier)):
            parity = parity ^ 1
        super().wait(barrier, parity, scope)


class NoWait(Mutant):
    """does not wait"""

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        if not (self._mask.any() and self.is_meant(self.barriers_at(barrier))):
            super().wait(barrier, parity, scope)


class CommitAtOnce(Mutant):
    """lets a barrier count products in tensor memory before they are complete"""

    def _commit(self, barrier: Value) -> None:
        if not (self._mask.any() and self.is_meant(self.barriers_at(barrier))):
            super()._commit(barrier)
            return
        block, lane = np.nonzero(self._active(True))
        number = np.broadcast_to(barrier.raw, self._shape)[block, lane] // 8
        warps = self._lane[block, lane] // 32
        self._count_of(warps, block, number, self._clocks.release(warps))


class FewerProducts(Mutant):
    """waits for one product too few"""

    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        self.is_meant(None)
        return super().wgmma_wait(values, pending=pending + 1)


class NoHold(Mutant):
    """does not hold an operand's registers"""

    def wgmma(self, start: Any, a: Operand | list[Value], *rest: Any, **options: Any) -> list[Value]:
        if not isinstance(a, Operand):
            self.is_meant(None)
        return super().wgmma(start, a, *rest, **options)

    def _hold(self, values: list[Value]) -> list[Value]:
        return values


class NoFence(Mutant):
    """does not fence what lanes store for products"""

    def fence_shared(self) -> None:
        self.is_meant(None)


class FewerCopies(Mutant):
    """waits for too few of a lane's copies"""

    def wait_copies(self, *, pending: int = 0) -> None:
        if any(self._turn.copies):
            self.is_meant(None)
        if pending:
            super().wait_copies(pending=pending + 1)


class NoBarrier(Mutant):
    """leaves out a barrier of lanes"""

    def barrier(self, scope: Any, **options: Any) -> None:
        if not (self._is_of_kernel() and self.is_meant(f"{scope} {self._caller()}")):
            super().barrier(scope, **options)


class NoMeeting(Mutant):
    """does not wait for the blocks of the grid"""

    def grid_wait(self) -> None:
        if self._mask.any():
            self.is_meant(None)


class _Late(Value):
    """A value that is made when it is first used, or by what the machine does late."""

    __slots__ = ("_find", "_n")

    def __init__(self, machine: Any, kind: Kind, find: Callable[[], list[Value]], n: int):
        self.machine, self.kind, self._region, self._find, self._n = machine, kind, machine.region, find, n

    @property
    def raw(self) -> Any:
        return self._find()[self._n]._raw

    @property
    def fault(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._find()[self._n].fault


class _Deferred:
    """Something that a machine does later."""

    def __init__(self, machine: TensorMemorySimulator, act: Callable[[], Any]):
        self._machine, self._act, self._mask = machine, act, machine._mask.copy()
        self._found: Any = None
        self.done = False

    def __call__(self) -> Any:
        if not self.done:
            self.done, machine = True, self._machine
            mask, machine._mask = machine._mask, self._mask
            self._found = self._act()
            machine._mask = mask
        return self._found


class _Later(Mutant):
    """Does something after the next arrive, barrier or copy of its role, and not before it."""

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self._deferred: dict[Any, list[_Deferred]] = {}

    def _defer(self, act: Callable[[], Any]) -> _Deferred:
        one = _Deferred(self, act)
        self._deferred.setdefault(self._turn, []).append(one)
        return one

    def _catch_up(self, *, is_late: bool = True) -> None:
        for one in self._deferred.pop(self._turn, []):
            if is_late and not one.done:
                self.is_meant(None)
            one()

    def arrive(self, *where: Any, **options: Any) -> None:
        super().arrive(*where, **options)
        self._catch_up()

    def arrive_in_cluster(self, barrier: Value, blocks: int) -> None:
        super().arrive_in_cluster(barrier, blocks)
        self._catch_up()

    def cluster_arrive(self) -> None:
        super().cluster_arrive()
        self._catch_up()

    def barrier(self, scope: Any, **options: Any) -> None:
        super().barrier(scope, **options)
        self._catch_up()

    def _check_turn(self, turn: Any) -> None:
        self._catch_up(is_late=False)
        turn.unheld = []  # registers were held before the wait that now comes late
        super()._check_turn(turn)


class LateWait(_Later):
    """gives memory back before a product was waited for"""

    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        self._catch_up(is_late=False)
        groups = self._turn.groups
        kinds: list[Kind] = [value.kind for value in values]
        raw = [value.raw for value in values]
        count = len(groups) - pending

        def act() -> list[Value]:
            for _ in range(count):
                self._multiply(groups.pop(0))
            made = [Value(self, kind, one) for kind, one in zip(kinds, raw, strict=True)]
            return super(LateWait, self).wgmma_wait(made, pending=len(groups))

        one = self._defer(act)
        return [_Late(self, kind, one, n) for n, kind in enumerate(kinds)]

    def copy_async(self, *where: Any, **options: Any) -> None:
        super().copy_async(*where, **options)
        self._catch_up()


class LateStore(_Later):
    """says that something is there before it has stored it"""

    def store_shared(self, address: Value, words: Sequence[Value], size: int, where: Any, **options: Any) -> None:
        chosen = self._active(where)
        address, *words = self._made_in(self._body, [address, *words])

        def act() -> None:
            self._mask = chosen
            super(LateStore, self).store_shared(address, words, size, True, **options)

        self._defer(act)

    def load_shared(self, address: Value, size: int) -> list[Value]:
        self._catch_up(is_late=False)
        return super().load_shared(address, size)

    def add_shared(self, *where: Any, **options: Any) -> Value:
        self._catch_up(is_late=False)
        return super().add_shared(*where, **options)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a kernel."""

    machine: type[Mutant]
    number: Any = None  # of the barriers in shared memory, or where lanes meet

    def __str__(self) -> str:
        assert self.machine.__doc__ is not None
        where = f"barriers {self.number}" if isinstance(self.number, int) else self.number
        return self.machine.__doc__ + (f": {where}" if where is not None else "")


class Probe(Mutant):
    """A machine without a fault, that notes which ones can be made."""

    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        if self._mask.any():
            type(self).made |= {Fault(machine, self.barriers_at(barrier)) for machine in (WrongParity, NoWait)}
        super().wait(barrier, parity, scope)

    def _commit(self, barrier: Value) -> None:
        if self._mask.any():
            type(self).made.add(Fault(CommitAtOnce, self.barriers_at(barrier)))
        super()._commit(barrier)

    def barrier(self, scope: Any, **options: Any) -> None:
        if self._is_of_kernel():
            type(self).made.add(Fault(NoBarrier, f"{scope} {self._caller()}"))
        super().barrier(scope, **options)

    def grid_wait(self) -> None:
        if self._mask.any():
            type(self).made.add(Fault(NoMeeting))
        super().grid_wait()

    def wgmma(self, start: Any, a: Operand | list[Value], *rest: Any, **options: Any) -> list[Value]:
        type(self).made |= {Fault(LateWait), Fault(FewerProducts)} | (
            set() if isinstance(a, Operand) else {Fault(NoHold)}
        )
        return super().wgmma(start, a, *rest, **options)

    def store_shared(self, *rest: Any, **options: Any) -> None:
        type(self).made.add(Fault(LateStore))
        super().store_shared(*rest, **options)

    def copy_async(self, *rest: Any, **options: Any) -> None:
        type(self).made.add(Fault(FewerCopies))
        super().copy_async(*rest, **options)

    def fence_shared(self) -> None:
        type(self).made.add(Fault(NoFence))
        super().fence_shared()
