"""What a kernel that multiplies matrices needs besides ``machine``: roles, barriers between them, and tensor cores.

    Tile          a matrix in shared memory, laid out as tensor cores read it
    Operand       a part of a tile that enters a product
    Role          what some of a block's warpgroups do
    TensorCores   the machine: packed 16-bit arithmetic, warpgroups with roles of their own, mbarriers, ``wgmma``
    product_row   where a lane's part of a product lies

A product runs beside the lanes that asked for it: what it reads must not be overwritten, and its result not be used,
before ``wgmma_wait``. Shared memory that lanes wrote is seen by tensor cores after ``fence_shared``.

    left, right = Tile.take(machine, 64, 128), Tile.take(machine, 32, 128)  # f16 [64, 64] and [32, 64]
    ...  # all lanes store: machine.store_shared(left.unit(row, unit), words, 16, True)
    machine.fence_shared()
    machine.barrier("block")
    sums = machine.wgmma(None, left.k_major(), right.k_major(), columns=32)  # left right^T, f32 [64, 32]
    sums = machine.wgmma_wait(sums)
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Index, Machine, Value

ATOM_ROWS, ATOM_BYTES, UNIT = 8, 128, 16  # of the 128-byte swizzle
REGISTERS = 65536  # of a block, at most
STEP_BYTES = 32  # of K per instruction: 16 f16 or 32 e4m3
DType = Literal["f16", "e4m3", "e5m2"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What some of a block's warpgroups do, while others do something else."""

    warpgroups: int  # how many
    registers: int  # per lane while the role runs, a multiple of 8 from 24 to 256
    body: Callable[[], None]  # called once for all of them; in the simulator once for each

    def __post_init__(self) -> None:
        if self.registers % 8 or not 24 <= self.registers <= 256:
            raise ValueError(f"a role has a multiple of 8 registers from 24 to 256, got {self.registers}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Shared memory that enters a product: K steps of ``STEP_BYTES`` (K-major) or of 16 rows (transposed, f16 only).

    An atom is 8 rows of 128 bytes. K-major: rows are those of the operand, ``stride`` bytes lie between atoms along
    them. Transposed: rows are K; ``stride`` lies between atoms along K, ``leading`` between those along the operand.
    """

    address: Value  # i32 byte offset of the first element in the block's shared memory
    steps: tuple[int, ...]  # byte offset of each K step
    leading: int
    stride: int
    transposed: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A matrix [rows, columns] in shared memory: atoms of 8 rows x 128 bytes in row-major order.

    The 16-byte units of an atom's row are permuted: unit u of row r lies at u ^ r (the 128-byte swizzle). So a lane
    finds where to write by ``unit``, and a product reads through ``k_major`` or ``transposed``.
    """

    machine: Machine
    offset: Index  # bytes from the beginning of the block's shared memory, a multiple of 1024
    rows: int  # a multiple of 8
    row_bytes: int  # a multiple of 128

    @classmethod
    def take(cls, machine: Machine, rows: int, row_bytes: int, copies: int = 1) -> Tile:
        """Fresh shared memory for ``copies`` tiles, one behind the other: ``copy`` picks one."""
        return cls(
            machine=machine,
            offset=machine.take_shared(copies * rows * row_bytes, alignment=1024),
            rows=rows,
            row_bytes=row_bytes,
        )

    @property
    def size(self) -> int:
        """Bytes of one copy."""
        return self.rows * self.row_bytes

    def copy(self, number: Index) -> Tile:
        """The ``number``-th of the copies: ``ring.copy(i % stages)``."""
        return dataclasses.replace(self, offset=number * self.size + self.offset)

    def unit(self, row: Value, unit: Index) -> Value:
        """i32 byte offset of a row's 16-byte unit, for ``store_shared`` and ``load_shared``; the first one is 0."""
        atom_units = ATOM_BYTES // UNIT
        in_atom = row % ATOM_ROWS
        atom = row // ATOM_ROWS * (self.row_bytes // ATOM_BYTES)
        if isinstance(unit, int):
            atom, swizzled = atom + unit // atom_units, in_atom ^ unit % atom_units
        else:
            atom, swizzled = atom + unit // atom_units, unit % atom_units ^ in_atom
        return atom * (ATOM_ROWS * ATOM_BYTES) + in_atom * ATOM_BYTES + swizzled * UNIT + self.offset

    @property
    def _row_of_atoms(self) -> int:
        return self.row_bytes * ATOM_ROWS

    def k_major(self, first: int = 0, count: int | None = None) -> Operand:
        """The operand of all rows, with bytes [first, first + count) of each as K; multiples of ``STEP_BYTES``."""
        count = self.row_bytes - first if count is None else count
        steps = tuple(
            at // ATOM_BYTES * ATOM_BYTES * ATOM_ROWS + at % ATOM_BYTES
            for at in range(first, first + count, STEP_BYTES)
        )
        return Operand(address=self._address(0), steps=steps, leading=0, stride=self._row_of_atoms, transposed=False)

    def transposed(self, first: int) -> Operand:
        """The operand with all rows as K, a multiple of 16; f16 columns from byte ``first``, a multiple of 128."""
        steps = tuple(row // ATOM_ROWS * self._row_of_atoms for row in range(0, self.rows, 16))
        atom = ATOM_ROWS * ATOM_BYTES
        return Operand(
            address=self._address(first * ATOM_ROWS),
            steps=steps,
            leading=atom,
            stride=self._row_of_atoms,
            transposed=True,
        )

    def _address(self, at: int) -> Value:
        known = self.offset + at
        return known if isinstance(known, Value) else self.machine.constant(known, "i32")


class TensorCores(Machine):
    """A machine with Hopper's asynchronous tensor cores."""

    # Packed 16-bit arithmetic: two f16 in an i32, element 0 in the low half.
    @abc.abstractmethod
    def exp2(self, x: Value) -> Value:
        """2^x of an f32 with a relative error below 2^-22; 0 at -inf."""

    @abc.abstractmethod
    def normal_reciprocal(self, x: Value) -> Value:
        """1 / x of an f32 whose magnitude is in [2^-126, 2^126], within 1 ulp.

        For kernels whose products are to run beside their lanes. ``reciprocal`` branches to a call for numbers outside
        of this range, and some compilers serialize all products of a kernel that has a call. Here a magnitude above
        2^126 gives 0; 0, subnormal numbers, infinity and NaN give NaN.

        A GPU takes one step of Newton's method from an approximation within 1 ulp. What comes out is the correctly
        rounded reciprocal, for all but some 30 of the 2^23 fractions whatever the approximation is, and else its
        neighbour. The simulator always gives the correctly rounded one.
        """

    @abc.abstractmethod
    def to_f16(self, low: Value, high: Value) -> Value:
        """Two f32 -> two f16 in an i32, to nearest even; infinite above 65504."""

    @abc.abstractmethod
    def from_f16(self, word: Value) -> tuple[Value, Value]:
        """Two f16 in an i32 -> two f32, exactly."""

    @abc.abstractmethod
    def e4m3_to_f16(self, word: Value) -> tuple[Value, Value]:
        """Four E4M3 bytes in an i32 -> two i32 of two f16 each, exactly: elements 0, 1 and 2, 3."""

    @abc.abstractmethod
    def multiply_f16(self, a: Value, b: Value) -> Value:
        """Products of both f16 halves of two i32, to nearest even."""

    @abc.abstractmethod
    def relu_f16(self, x: Value) -> Value:
        """Both f16 halves of an i32, 0 below 0; keeps NaN."""

    @abc.abstractmethod
    def maximum_u16(self, a: Value, b: Value) -> Value:
        """The larger of both 16-bit halves of two i32, as unsigned numbers."""

    @abc.abstractmethod
    def permute_bytes(self, a: Value, b: Value, selector: Index) -> Value:
        """Any four of the eight bytes of two i32: ``permute_bytes(a, b, 0x5410)`` has the low half of each.

        Byte i is the one whose number is in bits 4i .. 4i + 2 of the selector: 0 .. 3 of a, 4 .. 7 of b. Where bit
        4i + 3 is set, all its bits are that byte's top bit. Bits from 16 on are not looked at.
        """

    # Copies from device memory to shared memory, that run beside the lane.
    @abc.abstractmethod
    def copy_async(self, to: Value, address: Value, where: Condition) -> None:
        """Start copying 16 bytes of device memory to the block's shared memory; zeros where not.

        Args:
          to: i32 byte offset, a multiple of 16.
          address: i64, a multiple of 16, of an array that nothing writes while the kernel runs.
        """

    @abc.abstractmethod
    def wait_copies(self) -> None:
        """Until all of this lane's copies are there. Other lanes see them after a barrier."""

    @abc.abstractmethod
    def keep_order(self) -> None:
        """What the program asks for from here on is issued after what it asked for before.

        A compiler may move arithmetic that is meant to run beside a product to where the product is waited for.
        """

    # Roles.
    @abc.abstractmethod
    def roles(self, *roles: Role) -> None:
        """Each role's warpgroups, in order, run its body; the block is done when all are. Roles tell each other by
        ``barriers.Barrier``.

        Together they have all of the block's warpgroups. Values made in a role end with it (TypeError).

        Raises:
          ValueError: more registers in all than a block has: the roles would wait for them for ever.
        """

    @staticmethod
    def registers_at_launch(roles: Sequence[Role]) -> int:
        """Per lane, before the roles change it. ValueError where they want more in all: they would wait for ever."""
        warpgroups = sum(role.warpgroups for role in roles)
        at_launch = REGISTERS // (warpgroups * WARPGROUP) // 8 * 8
        wanted = sum(role.warpgroups * role.registers for role in roles)
        if wanted > warpgroups * at_launch:
            raise ValueError(f"roles ask for {wanted} registers per lane in all, a launch has {warpgroups * at_launch}")
        return at_launch

    # Barriers in shared memory, by address: what ``barriers.Barrier`` is made of.
    @abc.abstractmethod
    def init_barriers(self, counts: Sequence[tuple[int, int]]) -> None:
        """(byte offset, warps that arrive per phase) of each barrier. All lanes of the block call it, before any role;
        write ``barriers.init_barriers``."""

    @abc.abstractmethod
    def arrive(self, barrier: Value, where: Condition = True) -> None:
        """All lanes of a warp arrive as one, at an i32 byte offset: write ``Barrier.arrive``."""

    @abc.abstractmethod
    def wait(self, barrier: Value, parity: Value) -> None:
        """Until the phase of this parity (an i32, 0 or 1) has ended, at an i32 byte offset: write ``Barrier.wait``."""

    # Products, asked for by all lanes of a warpgroup.
    @abc.abstractmethod
    def fence_shared(self) -> None:
        """What this lane wrote to shared memory is seen by products that are asked for after the next arrive."""

    @abc.abstractmethod
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
        """start + a b^T, f32 [64, columns], as one group of instructions; None starts at zero.

        The result is spread over the lanes: lane t of warp w holds rows 16 w + t // 4 (+ 8) and columns
        8 j + 2 (t % 4) (+ 1), in the order j, row, column: columns / 2 values. ``product_row`` is the first of the two
        rows. They are to be used after ``wgmma_wait`` only.

        Args:
          start: what an earlier product left, of the same shape.
          a: [64, K] in shared memory; or in registers, four words per K step: rows r and r + 8 of K bytes
            4 (t % 4) .. + 3, then of the K bytes 16 further.
          b: [columns, K] in shared memory.
          columns: a multiple of 8, 256 at most.
          dtype: of both operands. Only f16 may be transposed.
          packed: sums in f16, rounded at every step, from zero; columns / 4 words of two.

        Raises:
          TypeError: operands of different depth, or such as the instruction does not take.
        """

    @abc.abstractmethod
    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        """The values of a finished group: waits until at most ``pending`` newer groups of the warpgroup run."""


def product_row(machine: Machine) -> Value:
    """i32, the first of the two rows of a product that a lane holds; the other is 8 further."""
    lane = machine.thread % 128
    return lane // WARP * 16 + lane % WARP // 4
