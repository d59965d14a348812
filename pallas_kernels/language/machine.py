"""What a lane can do: a machine, which kernel bodies are given.

A body is a Python function that takes a ``Machine``. There are two: ``ptx.PTX`` emits the body into a Mosaic GPU
kernel, and ``simulator.Simulator`` runs it in NumPy, with checks of bounds, alignment and races. A mistake that a
machine can recognise raises TypeError with a message that says what to write instead. The simulator raises
SimulationError for anything that would be undefined on a GPU.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, overload

import jax

from pallas_kernels.language import carries
from pallas_kernels.language.regions import Part, Region
from pallas_kernels.language.values import Arithmetic, Condition, Index, Value, expect
from pallas_kernels.trees import Tree

Scope = Literal["warp", "warpgroup", "block", "cluster", "grid"]
WARP, WARPGROUP = 32, 128


class Machine(Arithmetic):
    """The operations of a lane: arithmetic, loads, stores, shuffles, barriers, branches and loops.

    With ``where``, an operation does nothing in lanes where the condition is False, and the address there may be
    invalid. Addresses are in bytes: i64 in device memory, and i32 offsets in the block's shared memory. Loads and
    stores move 32-bit words. A ``size`` of 1, 2 or 4 bytes is one word (zero-extended), 8 bytes are two words, and 16
    bytes four. An address must be a multiple of the size. ``lanes.Buffer`` and ``shared.Shared`` compute addresses from
    indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared_bytes = 0  # shared memory taken so far
        self.scratch_bytes = 0  # of that, for reductions of ``lanes.Team``

    def take_shared(self, size: int, alignment: int = 16) -> int:
        """Return the byte offset of ``size`` unused bytes of shared memory. ``shared.Shared.take`` makes an array.

        Each call takes new memory, up to what the launch has (``shared_bytes``). Every iteration of a loop takes the
        same memory again. The memory is uninitialised, and the simulator raises an error for results that depend on
        bytes that were never written.
        """
        offset = -(-self.shared_bytes // alignment) * alignment
        granule = min(alignment, 16)
        self.shared_bytes = offset + -(-size // granule) * granule
        return offset

    # The position of a lane.
    @property
    @abc.abstractmethod
    def thread(self) -> Value:
        """The lane's number in its block, an i32 from 0. ``machine.thread % WARP`` is its number in its warp."""

    @abc.abstractmethod
    def block(self, axis: int) -> Value:
        """Return the block's i32 number along an axis of the grid, 0 or 1.

        All blocks of a cluster have the same number.
        """

    @property
    @abc.abstractmethod
    def rank(self) -> Value:
        """The block's i32 number in its cluster.

        The blocks of a cluster run at the same time and can access each other's shared memory.
        """

    # Between lanes. All lanes of the warp must be active.
    @abc.abstractmethod
    def shuffle_xor(self, x: Value, distance: int) -> Value:
        """Return the i32 or f32 of the lane of this warp whose number is this lane's number ^ distance, 1 .. 31."""

    @abc.abstractmethod
    def shuffle_up(self, x: Value, distance: int) -> Value:
        """Return the i32 or f32 of the lane that is ``distance`` lanes lower in the warp, from 1 to 31 lanes.

        The first lanes, which have no such lane, keep their own value.
        """

    @abc.abstractmethod
    def shuffle(self, x: Value, lane: Value) -> Value:
        """Return the i32 or f32 that lane number ``lane`` of this warp has, 0 .. 31. Each lane may name another one."""

    @abc.abstractmethod
    def reduce_warp(self, op: Literal["add", "max", "min"], x: Value) -> Value:
        """Reduce an i32 over the warp, in one instruction; all lanes get the result.

        ``lanes.Team`` can reduce floats too.
        """

    @abc.abstractmethod
    def barrier(self, scope: Scope, *, leave: Condition = False) -> None:
        """Wait until all lanes of the scope have arrived.

        Afterwards each lane sees what the others did in shared and device memory before. All lanes of the scope must
        reach the barrier. If only some do, as in a ``when`` that only some enter, the simulator raises SimulationError,
        and a GPU hangs.

        A barrier of the grid takes about a microsecond, and outside of roles alone. All blocks must run at once: a
        launch with more of them than the GPU has room for hangs. Its counter is a variable of the kernel, so a device
        must not run two launches of one kernel at once. Its stream runs one after the other.

        Args:
          scope: "warp", "warpgroup", "block", "cluster" or "grid".
          leave: for clusters only, and the same in all lanes of a warp. These lanes arrive but do not wait. They must
            not load or store anything afterwards.
        """

    @abc.abstractmethod
    def grid_arrive(self) -> None:
        """Arrive at a barrier of the grid, for which ``grid_wait`` waits, as all lanes of all blocks.

        In between, lanes can do other things, but what others have stored they see only afterwards. Nothing need wait
        unless it arrives again: then all lanes must have waited before.
        """

    @abc.abstractmethod
    def grid_wait(self) -> None:
        """Wait, as all lanes of a warpgroup, until all blocks have arrived by ``grid_arrive``.

        Afterwards each of these lanes sees what others had stored in device memory when they arrived.
        """

    @abc.abstractmethod
    def cluster_arrive(self) -> None:
        """Arrive at a barrier of the cluster, for which ``cluster_wait`` waits. All lanes of the cluster call both.

        In between, lanes can do other things. And lanes do not wait until others see what they stored, which takes long
        in ``barrier("cluster")``. So afterwards no lane may read what a lane of another warp stored before. It may
        overwrite what others read or stored, and use the barriers that other blocks have initialised.
        """

    @abc.abstractmethod
    def cluster_wait(self) -> None:
        """Wait until all lanes of the cluster have arrived by ``cluster_arrive``."""

    # Memory.
    @abc.abstractmethod
    def load(self, address: Value, size: int, where: Condition, *, constant: bool, otherwise: int = 0) -> list[Value]:
        """Load words of device memory. ``lanes.Buffer`` loads by indices.

        Args:
          address: i64, a multiple of ``size``.
          size: bytes, 1, 2, 4, 8 or 16.
          where: lanes that load; the others get ``otherwise`` in each word.
          constant: whether nothing writes to this memory while the kernel runs, as for an input. This allows a cache
            that does not see writes.
          otherwise: the word in lanes that do not load.

        Returns:
          One i32 word (zero-extended), two or four.
        """

    @abc.abstractmethod
    def store(self, address: Value, words: Sequence[Value], size: int, where: Condition) -> None:
        """Store words to device memory: ``size`` bytes at an i64 address, a multiple of it.

        ``lanes.Buffer`` stores by indices.
        """

    # Between blocks of a grid. ``lanes.Mailbox`` computes addresses from indices.
    @abc.abstractmethod
    def open_mail(self, count: int) -> tuple[Value, Value]:
        """Return the i64 address of memory for so many words that blocks send, and the i32 number of this launch."""

    @abc.abstractmethod
    def close_mail(self) -> None:
        """Count this block as one that knows the number of the launch, after a barrier of the block."""

    @abc.abstractmethod
    def send(self, address: Value, words: Sequence[Value], launch: Value, where: Condition) -> None:
        """Send one word or two, of this launch."""

    @abc.abstractmethod
    def receive(
        self, addresses: Sequence[Value], count: int, launch: Value, where: Sequence[Condition]
    ) -> list[list[Value]]:
        """Return one word or two of each address, as soon as they were sent in this launch; 0 where not ``where``.

        All lanes of a warp call it.
        """

    @abc.abstractmethod
    def load_shared(self, address: Value, size: int) -> list[Value]:
        """Load i32 words of the block's own shared memory: ``size`` bytes at an i32 byte offset, a multiple of it.

        All active lanes load. A lane that has nothing to load needs a valid address too.
        """

    @abc.abstractmethod
    def store_shared(
        self, address: Value, words: Sequence[Value], size: int, where: Condition, *, rank: int | None = None
    ) -> None:
        """Store i32 words to the block's own shared memory, or that of the block with a given rank in its cluster."""

    @abc.abstractmethod
    def add_shared(self, address: Value, x: Value, where: Condition, *, rank: int | None = None) -> Value:
        """Add to an i32 in shared memory atomically. Returns its value before, or 0 where ``where`` is False.

        The memory is the block's own, or that of the block with a given rank in its cluster.
        """

    def hold[Tree](self, values: Tree) -> Tree:
        """Return the same values, any pytree of them, which are used only after everything issued so far.

        Without it, a compiler may wait for values that are being loaded before it issues the next loads. It may also
        use registers again that a product still reads: where words are an operand of ``wgmma``, hold them after the
        wait for the product. The simulator raises SimulationError where that is missing.
        """
        leaves, structure = carries.flatten(values, Value)
        return jax.tree.unflatten(structure, self._hold(leaves))

    @abc.abstractmethod
    def _hold(self, values: list[Value]) -> list[Value]: ...

    # Control.
    @contextlib.contextmanager
    def when(self, condition: Condition) -> Iterator[None]:
        """Run what is inside in the lanes where the condition holds: ``with machine.when(lane < 4): ...``

        This is a branch, unlike ``where`` and ``select``. What a whole warp or block does together, such as a shuffle
        or a barrier, may be inside only if all of its lanes enter. Values made inside cannot be used after it
        (TypeError).
        """
        known = condition if isinstance(condition, bool) else expect("bool", condition)
        with self._when(known), self._part("when"):
            yield

    @abc.abstractmethod
    def _when(self, condition: Condition) -> AbstractContextManager[None]: ...

    @overload
    def loop(self, count: Index, body: Callable[[Value, None], None], *, rolled: bool = False) -> None: ...

    @overload
    def loop[Carry](
        self, count: Index, body: Callable[[Value, Carry], Carry], carry: Carry, *, rolled: bool = False
    ) -> Carry: ...

    def loop(
        self, count: Index, body: Callable[[Value, Tree], Tree], carry: Tree = None, *, rolled: bool = False
    ) -> Tree:
        """Run ``carry = body(i, carry)`` for i in range(count), and return the last carry.

            total = machine.loop(count, lambda i, total: total + values.load_int(i), machine.constant(0, "i32"))

        On a GPU the body is called once, when the kernel is built, and in the simulator once per iteration. So only the
        carry may differ between iterations. A Python ``for`` over a range of ints is unrolled.

        Args:
          count: int or i32, the same in all lanes that share a barrier. If it is 0 or less, the body does not run.
          body: gets an i32 and the carry, and returns the next carry, with the same structure and kinds.
          carry: any pytree of Values: tuples, lists, dicts, dataclasses registered with JAX, None.
          rolled: whether compilers must not unroll it. In a short launch that reads its code once, the code of an
            unrolled loop takes longer to arrive than the loop saves.

        Raises:
          TypeError: a leaf is not a Value, or the body returns another structure or other kinds.
        """
        leaves, structure = carries.flatten(carry, Value)

        def turn(i: Value, values: list[Value]) -> list[Value]:
            outer = self.region
            with self._part("turn"):
                if rolled:
                    self._keep_rolled()
                i, *values = self._made_in(self.region, [i, *values])
                result = carries.alike(body(i, jax.tree.unflatten(structure, values)), carry, Value)
                return self._made_in(outer, result)

        count = count if isinstance(count, int) else expect("i32", count)
        if rolled:  # a count that compilers know would be enough for them
            count = self.hold(count if isinstance(count, Value) else self.constant(count, "i32"))
        return jax.tree.unflatten(structure, self._loop(count, turn, leaves))

    def _keep_rolled(self) -> None:
        """Say that the loop whose iteration begins here is not to be unrolled."""

    def repeat[Carry](self, body: Callable[[Carry], tuple[Value, Carry]], carry: Carry) -> Carry:
        """Run ``again, carry = body(carry)`` until ``again`` is False, and return the last carry.

        The body runs at least once.

            half = machine.repeat(lambda x: ((x >> 1) > 10, x >> 1), x)

        Args:
          body: returns a bool, the same in all lanes that share a barrier, and the next carry.
          carry: as for ``loop``.

        Raises:
          TypeError: as for ``loop``, or ``again`` is not a bool.
        """
        leaves, structure = carries.flatten(carry, Value)

        def turn(values: list[Value]) -> tuple[Value, list[Value]]:
            outer = self.region
            with self._part("turn"):
                again, result = body(jax.tree.unflatten(structure, self._made_in(self.region, values)))
                result = [expect("bool", again), *carries.alike(result, carry, Value)]
                again, *values = self._made_in(outer, result)
            return again, values

        return jax.tree.unflatten(structure, self._repeat(turn, leaves))

    def branch[Carry](self, condition: Condition, then: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """Return ``then(carry)`` where the condition holds, and ``carry`` elsewhere: an ``if`` that has a result.

            sums = machine.branch(i < count, lambda sums: [total + x for total, x in zip(sums, more)], sums)

        It is a branch, like ``when``. ``select`` is cheaper where both sides are a few operations.

        Args:
          condition: what a whole warp or block does together may be inside only if it is the same in all their lanes.
          then: gets the carry, and returns one of the same structure and kinds.
          carry: as for ``loop``.

        Raises:
          TypeError: as for ``loop``, or the condition is not a bool.
        """
        if isinstance(condition, bool):
            return then(carry) if condition else carry
        leaves, structure = carries.flatten(carry, Value)
        taken = self._inside_branch(then, carry)
        return jax.tree.unflatten(structure, self._branch(expect("bool", condition), taken, leaves))

    def branch_warp[Carry](self, condition: Value, then: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """Return ``then(carry)`` in all lanes of a warp if the condition holds in any of them, else ``carry``.

            peak = machine.branch_warp(top > peak, lambda peak: raised(peak), peak)

        So shuffles and products of the warp's own may be inside. Arguments and errors are those of ``branch``.
        """
        leaves, structure = carries.flatten(carry, Value)
        taken = self._inside_branch(then, carry)
        flag = self.select(expect("bool", condition), self.constant(1, "i32"), self.constant(0, "i32"))
        # A loop of at most one turn, which a compiler cannot know. As an if, attention's rescaling was spilled.
        turns = self.reduce_warp("max", flag)
        return jax.tree.unflatten(structure, self._loop(turns, lambda _, values: taken(values), leaves))

    def _inside_branch[Carry](
        self, then: Callable[[Carry], Carry], carry: Carry
    ) -> Callable[[list[Value]], list[Value]]:
        """Return the inside of a branch, as a part of the body, for the leaves of the carry."""

        def taken(values: list[Value]) -> list[Value]:
            outer = self.region
            with self._part("branch"):
                inside = jax.tree.unflatten(jax.tree.structure(carry), self._made_in(self.region, values))
                return self._made_in(outer, carries.alike(then(inside), carry, Value))

        return taken

    def _branch(self, condition: Value, body: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        turns = self.select(condition, self.constant(1, "i32"), self.constant(0, "i32"))
        return self._loop(turns, lambda _, values: body(values), carry)

    @abc.abstractmethod
    def _loop(
        self, count: Index, body: Callable[[Value, list[Value]], list[Value]], carry: list[Value]
    ) -> list[Value]: ...

    @abc.abstractmethod
    def _repeat(self, body: Callable[[list[Value]], tuple[Value, list[Value]]], carry: list[Value]) -> list[Value]: ...

    @contextlib.contextmanager
    def _part(self, part: Part) -> Iterator[None]:
        """Enter a part of the body, whose values cannot be used outside of it."""
        outer = self.region
        inside = Region(part, outer)
        self.region = inside
        try:
            yield
        finally:
            inside.is_left = True
            self.region = outer

    def _play(self, body: Callable[[], None]) -> None:
        """Run a role, as a separate part of the body."""
        with self._part("role"):
            body()

    def _made_in(self, region: Region, values: Sequence[Value]) -> list[Value]:
        """Return the same values as if they were made in another part of the body."""
        return [Value(self, value.kind, value.raw, value.fault, region) for value in values]
