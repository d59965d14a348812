"""Operations for kernels that multiply matrices, besides ``machine``: roles, barriers between them, and tensor cores.

    Tile          a matrix in shared memory, in the layout that tensor cores read
    TileCopy      a part of an array that is copied to a tile, without any lane's help
    Operand       a part of a tile that enters a product
    Role          what some of a block's warpgroups do
    TensorCores   the machine: packed 16-bit arithmetic, warpgroups with different roles, mbarriers, ``wgmma``
    product_row   which part of a product a lane holds

A product runs asynchronously. Until ``wgmma_wait``, what it reads must not be overwritten, and its result must not be
used. Tensor cores see what lanes wrote to shared memory only after ``fence_shared``.

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

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine, Scope
from pallas_kernels.language.values import Condition, Index, Value

ATOM_ROWS, ATOM_BYTES, UNIT = 8, 128, 16  # of the 128-byte swizzle
REGISTERS = 65536  # the most registers that a block can have
STEP_BYTES = 32  # bytes of K per instruction: 16 f16 or bf16, or 32 of the 8-bit floats
DType = Literal["f16", "bf16", "e4m3", "e5m2"]
HALVES: tuple[DType, ...] = ("f16", "bf16")  # those of 16 bits, which may be transposed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What some of a block's warpgroups do, while others do something else."""

    warpgroups: int  # number of warpgroups
    registers: int  # per lane while the role runs, a multiple of 8 from 24 to 256
    body: Callable[[], None]  # called once for all of them; in the simulator once for each

    def __post_init__(self) -> None:
        if self.registers % 8 or not 24 <= self.registers <= 256:
            raise ValueError(f"a role has a multiple of 8 registers from 24 to 256, got {self.registers}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Shared memory that enters a product, in steps along K.

    A step is ``STEP_BYTES`` if the operand is K-major, or 16 rows if it is transposed, which only 16-bit floats may be.

    An atom is 8 rows of 128 bytes. If K-major, its rows are rows of the operand, and ``stride`` is the distance in
    bytes between atoms along the rows. If transposed, its rows are K, ``stride`` is the distance between atoms along K,
    and ``leading`` the distance between atoms along the operand.
    """

    address: Value  # i32 byte offset of the first element in the block's shared memory
    steps: tuple[int, ...]  # byte offset of each K step
    leading: int
    stride: int
    transposed: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A matrix [rows, columns] in shared memory, stored as atoms of 8 rows x 128 bytes in row-major order.

    The 16-byte units of an atom's row are permuted: unit u of row r is stored at u ^ r (the 128-byte swizzle). Lanes
    use ``unit`` to find where to write, and products read through ``k_major`` or ``transposed``.
    """

    machine: Machine
    offset: Index  # bytes from the beginning of the block's shared memory, a multiple of 1024
    rows: int  # a multiple of 8
    row_bytes: int  # a multiple of 128

    @classmethod
    def take(cls, machine: Machine, rows: int, row_bytes: int, copies: int = 1) -> Tile:
        """Allocate shared memory for ``copies`` adjacent tiles, of which ``copy`` selects one."""
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
        """Return the ``number``-th of the copies: ``ring.copy(i % stages)``."""
        return dataclasses.replace(self, offset=number * self.size + self.offset)

    def unit(self, row: Value, unit: Index) -> Value:
        """Return the i32 byte offset of a row's 16-byte unit, for ``store_shared`` and ``load_shared``.

        Units count from 0.
        """
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
        """Return all rows as an operand with bytes [first, first + count) of each as K; multiples of ``STEP_BYTES``."""
        count = self.row_bytes - first if count is None else count
        steps = tuple(
            at // ATOM_BYTES * ATOM_BYTES * ATOM_ROWS + at % ATOM_BYTES
            for at in range(first, first + count, STEP_BYTES)
        )
        return Operand(address=self._address(0), steps=steps, leading=0, stride=self._row_of_atoms, transposed=False)

    def transposed(self, first: Index) -> Operand:
        """Return an operand with all rows, a multiple of 16, as K.

        Its columns are 16-bit floats, and begin at byte ``first`` of each row: a multiple of 128, or for a product with
        at most 32 columns of 64.
        """
        atom = ATOM_ROWS * ATOM_BYTES
        return Operand(
            address=self._address(first // ATOM_BYTES * atom + first % ATOM_BYTES),
            steps=tuple(row // ATOM_ROWS * self._row_of_atoms for row in range(0, self.rows, 16)),
            leading=atom,
            stride=self._row_of_atoms,
            transposed=True,
        )

    def _address(self, at: Index) -> Value:
        known = self.offset + at
        return known if isinstance(known, Value) else self.machine.constant(known, "i32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileCopy:
    """A part of an array in device memory that is copied to shared memory, for ``Barrier.fill``.

    What of it is past the array's end becomes zeros. With ``swizzle`` 128 and rows of 128 bytes the result is a
    ``Tile``. With 64 and rows of 64 bytes, 16-byte unit u of row r is stored at u ^ (r / 2 % 4). With 0 the rows are
    stored as they are.
    """

    source: Buffer  # [rows, columns], an argument of the launch
    row: Index  # the first
    column: Index  # the first, counted in elements; it begins at a multiple of 16 bytes, or a GPU stops
    to: Index  # byte offset in shared memory, a multiple of 1024, or with ``swizzle`` 0 of 128
    rows: int  # at most 256
    row_bytes: int  # a multiple of 16, of at most 256 elements
    swizzle: int = 128

    def __post_init__(self) -> None:
        if self.swizzle not in (0, 64, 128) or (self.swizzle and self.row_bytes != self.swizzle):
            raise ValueError(f"rows of {self.row_bytes} bytes cannot have a swizzle of {self.swizzle}")
        if not self.source.constant:
            raise ValueError("a copy is made of an input of the launch, not of what the kernel may write")
        columns = self.row_bytes // self.source.dtype.itemsize
        if self.row_bytes % UNIT or not (1 <= self.rows <= 256 and columns <= 256):
            sizes = f"{self.rows} rows of {self.row_bytes} bytes, {columns} columns"
            raise ValueError(f"a copy has at most 256 rows and 256 columns, in whole times 16 bytes a row, got {sizes}")
        if len(self.source.shape) != 2 or self.source.shape[1] * self.source.dtype.itemsize % UNIT:
            raise ValueError(f"an array of two axes is meant, in whole times 16 bytes a row, got {self.source.shape}")
        if isinstance(self.column, int) and not 0 <= self.column < self.source.shape[1]:
            raise ValueError(f"a copy from column {self.column} of {self.source.shape[1]}: a column counts elements")
        if isinstance(self.column, int) and self.column * self.source.dtype.itemsize % UNIT:
            raise ValueError(f"a copy from column {self.column}: it must begin at a multiple of {UNIT} bytes")

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.row_bytes


class TensorCores(Machine):
    """A machine with Hopper's asynchronous tensor cores."""

    # Packed 16-bit arithmetic: two f16 in an i32, element 0 in the low half.
    @abc.abstractmethod
    def exp2(self, x: Value) -> Value:
        """Return 2^x of an f32, with a relative error below 2^-22; 0 for -inf."""

    @abc.abstractmethod
    def normal_reciprocal(self, x: Value) -> Value:
        """1 / x of an f32 whose magnitude is in [2^-126, 2^126], within 1 ulp.

        ``reciprocal`` branches to a call for numbers outside of this range. So one waits for the other, and in code
        that the CUDA plugin compiles relocatable, such a call also serializes all products of a kernel. This operation
        takes one step of Newton's method from an approximation within 1 ulp. Its result is the correctly rounded
        reciprocal for all but some 30 of the 2^23 fractions, and a neighbour of it for those. On the simulator it is
        the correctly rounded one.

        Outside of the range, a GPU's result is not defined. The simulator gives 0 for a magnitude above 2^126, and NaN
        for 0, subnormal numbers, infinity and NaN.
        """

    @abc.abstractmethod
    def normal_inverse_sqrt(self, x: Value) -> Value:
        """1 / sqrt(x) of an f32 that is a normal number above 0, within 2 ulp.

        ``inverse_sqrt`` has two such calls. This is one step of Newton's method from an approximation. Of other numbers
        a GPU's result is not defined, and the simulator's is NaN.
        """

    @abc.abstractmethod
    def to_f16(self, low: Value, high: Value) -> Value:
        """Convert two f32 to two f16 packed into an i32, rounding to nearest even.

        Above 65504 the result is infinite.
        """

    @abc.abstractmethod
    def from_f16(self, word: Value) -> tuple[Value, Value]:
        """Convert two f16 packed into an i32 to two f32, exactly."""

    @abc.abstractmethod
    def e4m3_to_f16(self, word: Value) -> tuple[Value, Value]:
        """Convert four E4M3 bytes in an i32 to two i32 of two f16 each, exactly: elements 0 and 1, then 2 and 3."""

    @abc.abstractmethod
    def multiply_f16(self, a: Value, b: Value) -> Value:
        """Multiply both f16 halves of two i32, rounding to nearest even."""

    @abc.abstractmethod
    def multiply_bf16(self, a: Value, b: Value) -> Value:
        """Multiply both bf16 halves of two i32, rounding to nearest even. Subnormal numbers are kept."""

    @abc.abstractmethod
    def relu_f16(self, x: Value) -> Value:
        """Replace negative f16 halves of an i32 by 0. NaN stays NaN."""

    @abc.abstractmethod
    def high_f16(self, word: Value) -> Value:
        """Return the high one of two f16 in both halves. Its bits stay as they are, but NaN becomes any NaN."""

    @abc.abstractmethod
    def maximum_u16(self, a: Value, b: Value) -> Value:
        """Return the larger of each of the two 16-bit halves of two i32, as unsigned numbers."""

    @abc.abstractmethod
    def permute_bytes(self, a: Value, b: Value, selector: Index) -> Value:
        """Select any four of the eight bytes of two i32: ``permute_bytes(a, b, 0x5410)`` has the low half of each.

        Bits 4i .. 4i + 2 of the selector give the number of the byte that becomes byte i: 0 .. 3 are bytes of a, and 4
        .. 7 of b. If bit 4i + 3 is set, all bits of byte i are the top bit of that byte. Bits of the selector from 16
        on are ignored.
        """

    # Asynchronous copies from device memory to shared memory.
    @abc.abstractmethod
    def copy_async(self, to: Value, address: Value, where: Condition, *, size: int = 16) -> None:
        """Start to copy ``size`` bytes of device memory to the block's shared memory.

        Lanes where ``where`` is False write zeros.

        Args:
          to: i32 byte offset, a multiple of ``size``.
          address: i64, a multiple of ``size``, in an array that nothing writes while the kernel runs.
          where: lanes that copy.
          size: 4, 8 or 16.
        """

    @abc.abstractmethod
    def close_copies(self) -> None:
        """Make a group of this lane's copies since the last group, which may be none, for ``wait_copies`` to count."""

    @abc.abstractmethod
    def wait_copies(self, *, pending: int = 0) -> None:
        """Wait until this lane's copies are complete, except for those of its last ``pending`` groups.

        With ``pending`` 0 copies that are in no group count too. Other lanes see the copies after a barrier.
        """

    @abc.abstractmethod
    def keep_order(self) -> None:
        """Issue everything that follows in the program after everything that precedes.

        Without it, a compiler may move arithmetic that should overlap with a product to where the product is waited
        for.
        """

    # Roles.
    @abc.abstractmethod
    def roles(self, *roles: Role) -> None:
        """Run a different body on each role's warpgroups, in order. Ends when all have ended.

        Roles communicate through ``barriers.Barrier``. Together they must have all of the block's warpgroups. Values
        made in a role cannot be used outside of it (TypeError). Raises what ``registers_at_launch`` raises.
        """

    @staticmethod
    def registers_at_launch(roles: Sequence[Role]) -> int:
        """Return the registers per lane before the roles change them.

        Raises:
          ValueError: the roles need more in total, so they would wait for registers for ever.
        """
        warpgroups = sum(role.warpgroups for role in roles)
        at_launch = REGISTERS // (warpgroups * WARPGROUP) // 8 * 8
        wanted = sum(role.warpgroups * role.registers for role in roles)
        if wanted > warpgroups * at_launch:
            raise ValueError(f"roles ask for {wanted} registers per lane in all, a launch has {warpgroups * at_launch}")
        return at_launch

    # Barriers in shared memory, by their i32 byte offsets. Bodies use ``barriers.Barrier``, which says what these do.
    @abc.abstractmethod
    def init_barriers(self, counts: Sequence[tuple[int, int]]) -> None:
        """Do what ``barriers.init_barriers`` does, for (byte offset, warps that arrive per phase) of each."""

    @abc.abstractmethod
    def arrive(self, barrier: Value, where: Condition = True) -> None:
        """Do what ``Barrier.arrive`` does."""

    @abc.abstractmethod
    def arrive_in_cluster(self, barrier: Value, blocks: int) -> None:
        """Do what ``Barrier.arrive_in_cluster`` does."""

    @abc.abstractmethod
    def expect(self, barrier: Value, size: Value) -> None:
        """Do what ``Barrier.expect`` does, for an i32 number of bytes."""

    @abc.abstractmethod
    def send_shared(
        self, address: Value, words: Sequence[Value], barrier: Value, where: Condition, *, rank: int
    ) -> None:
        """Do what ``Barrier.send_floats`` does, for i32 words and the byte offset where the first of them goes."""

    @abc.abstractmethod
    def fill(self, barrier: Value, copies: Sequence[TileCopy]) -> None:
        """Do what ``Barrier.fill`` does."""

    @abc.abstractmethod
    def wait(self, barrier: Value, parity: Value, scope: Scope = "block") -> None:
        """Do what ``Barrier.wait`` does, for an i32 parity.

        With the scope "cluster" this lane then sees what lanes of other blocks did before they arrived.
        """

    # Products, started by all lanes of a warpgroup.
    @abc.abstractmethod
    def fence_shared(self) -> None:
        """Make what this lane wrote to shared memory visible to products that are started after the next arrive."""

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
        """Start the product start + a b^T, f32 [64, columns], as one group of instructions. None starts at zero.

        The result is spread over the lanes. Lane t of warp w holds rows 16 w + t // 4 (+ 8) and columns 8 j + 2 (t % 4)
        (+ 1), in the order j, row, column: columns / 2 values. ``product_row`` is the first of the two rows. The values
        may only be used after ``wgmma_wait``.

        Args:
          start: the result of an earlier product of the same shape, or None.
          a: [64, K] in shared memory; or in registers, as four words per K step: of rows r and r + 8 the K bytes 4 (t %
            4) .. 4 (t % 4) + 3, then of both rows those 16 bytes further. Hold these words after the wait (``hold``).
          b: [columns, K] in shared memory.
          columns: a multiple of 8, at most 256.
          dtype: of both operands. Only those of 16 bits may be transposed.
          packed: whether sums are f16, rounded at every step, and start at zero; not for bf16. The result is then
            columns / 4 words of two.

        Raises:
          TypeError: the operands differ in K, or the instruction does not support them.
        """

    @abc.abstractmethod
    def wgmma_wait(self, values: list[Value], *, pending: int = 0) -> list[Value]:
        """Wait until at most ``pending`` newer groups of the warpgroup are running, and return the finished values."""


def product_row(machine: Machine) -> Value:
    """Return the i32 number of the first of the two rows of a product that a lane holds. The other is 8 higher."""
    lane = machine.thread % 128
    return lane // WARP * 16 + lane % WARP // 4
