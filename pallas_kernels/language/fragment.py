"""Matrices in the registers of a warpgroup, as ``wgmma`` leaves them, and numbers for their rows and columns.

    Fragment    f32 [64, columns]
    PerRow      a number for each row
    PerColumn   a number for each column
    LeftOperand [64, K] of the dtype of a product that it enters
    product     starts a product, whose sums are a fragment
    packed      starts one whose sums are f16, and as they are the left operand of the next

Bodies compute with whole matrices, and need not know which elements a lane has:

    logits = product(None, queries, keys).wait()
    peak = logits.over_rows(maximum)
    weights = logits.map(lambda x, top: machine.exp2(x - top), peak)
    weights.scale_rows(weights.over_rows(add).map(machine.reciprocal)).store(out, 0, 0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from pallas_kernels.language.lanes import Buffer, Op, fold_tree
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import HALVES, DType, Operand, TensorCores, product_row
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Condition, Index, Value

QUAD = 4  # lanes that hold a row together: each has two adjacent columns of every eight
_ROWS = 2  # of a lane, which are eight apart


def _machine(values: Sequence[Value]) -> TensorCores:
    machine = values[0].machine
    assert isinstance(machine, TensorCores)
    return machine


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PerRow:
    """A number for each of the 64 rows of a fragment. A lane has those of its own two rows."""

    values: list[Value]

    @classmethod
    def numbers(cls, machine: TensorCores) -> PerRow:
        """Return the i32 number of each row, from 0."""
        row = product_row(machine)
        return cls([row, row + 8])

    @classmethod
    def load(cls, machine: TensorCores, array: Buffer | Shared, *index: Index) -> PerRow:
        """Load 64 neighbours along the last axis of an array of floats. The last index is that of the first of them."""
        *lead, first = index
        return cls([array.load_floats(*lead, row + first, count=1)[0] for row in cls.numbers(machine).values])

    def store(self, array: Buffer | Shared, *index: Index) -> None:
        """Store them to 64 neighbours along the last axis of an array of f32. The last index is that of the first."""
        machine, (*lead, first) = _machine(self.values), index
        for row, value in zip(PerRow.numbers(machine).values, self.values, strict=True):
            array.store_floats([value], *lead, row + first, where=machine.thread % QUAD == 0)

    def map(self, function: Callable[..., Value], *others: PerRow) -> PerRow:
        """Apply a function row by row: ``total.map(lambda a, b: a + b, other)``."""
        return PerRow([function(*each) for each in zip(self.values, *(other.values for other in others), strict=True)])

    def over_quad(self, op: Op) -> PerRow:
        """Reduce what the lanes of a quad have of each row. All of them get the result."""
        machine = _machine(self.values)

        def reduced(value: Value) -> Value:
            for distance in (1, 2):
                value = op(value, machine.shuffle_xor(value, distance))
            return value

        return self.map(reduced)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PerColumn:
    """A number for each column of a fragment. A lane has two adjacent ones of every eight."""

    values: list[Value]

    @classmethod
    def numbers(cls, machine: TensorCores, columns: int) -> PerColumn:
        """Return the i32 number of each column, from 0."""
        first = machine.thread % QUAD * 2
        return cls([first + (j + n) for j in range(0, columns, 8) for n in range(2)])

    @classmethod
    def load(cls, machine: TensorCores, columns: int, array: Buffer | Shared, *index: Index) -> PerColumn:
        """Load ``columns`` neighbours along the last axis of an array of floats.

        The last index is that of the first of them, a multiple of two.
        """
        *lead, first = index
        pairs = [machine.thread % QUAD * 2 + j + first for j in range(0, columns, 8)]
        return cls([value for at in pairs for value in array.load_floats(*lead, at, count=2)])

    def map(self, function: Callable[..., Value], *others: PerColumn) -> PerColumn:
        """Apply a function column by column."""
        each = zip(self.values, *(other.values for other in others), strict=True)
        return PerColumn([function(*values) for values in each])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LeftOperand:
    """A matrix [64, K] in the registers of a warpgroup, which enters a product from the left.

    A lane has words of two rows, r = ``product_row`` and r + 8. Of each step of 32 bytes of K it has four: bytes 4 c ..
    4 c + 3 of both rows, with c = ``thread % 4``, and those 16 bytes further of both. Until the product was waited for,
    no register of them may be used again: pass the operand to ``Fragment.wait``.
    """

    words: list[Value]  # packed elements, the first in the low bits
    dtype: DType = dataclasses.field(metadata=dict(static=True))

    def wait(self, *, pending: int = 0) -> LeftOperand:
        """Wait until at most ``pending`` newer products of the warpgroup run, of which none computes these words."""
        return LeftOperand(_machine(self.words).wgmma_wait(self.words, pending=pending), self.dtype)

    def map(self, function: Callable[..., Value], *others: PerRow) -> LeftOperand:
        """Apply a function word by word, with numbers of the word's row: ``dots.map(machine.relu_f16)``."""
        numbers = ([other.values[n % _ROWS] for other in others] for n in range(len(self.words)))
        return LeftOperand([function(word, *each) for word, each in zip(self.words, numbers, strict=True)], self.dtype)

    @classmethod
    def of_rows(cls, one: list[Value], other: list[Value], dtype: DType) -> LeftOperand:
        """Return the operand for the words of a lane's two rows. Word i of each has bytes 16 i + 4 c .. + 3 of K.

        The product does not change if K is permuted, as long as it is in the right operand too.
        """
        steps = range(0, len(one), 2)
        return cls([word for i in steps for word in (one[i], other[i], one[i + 1], other[i + 1])], dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """A matrix f32 [64, columns], spread over the lanes of a warpgroup. A loop can carry it.

    ``values`` are a lane's columns / 2 elements in the order of ``wgmma``, which takes them as they are. While the
    product that computes them runs, nothing but ``wait`` and another product may be called.
    """

    values: list[Value]

    @classmethod
    def zeros(cls, machine: TensorCores, columns: int) -> Fragment:
        """Return zeros, with which a loop over products begins."""
        return cls([machine.constant(0.0, "f32")] * (columns // 2))

    @classmethod
    def joined(cls, parts: Sequence[Fragment]) -> Fragment:
        """Return fragments beside each other, as one."""
        return cls([value for part in parts for value in part.values])

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.values) * 2

    def parts(self, columns: int) -> list[Fragment]:
        """Return the fragments of each so many columns, a multiple of eight."""
        return [Fragment(self.values[n : n + columns // 2]) for n in range(0, len(self.values), columns // 2)]

    def wait(self, *operands: LeftOperand, pending: int = 0) -> Fragment:
        """Wait until at most ``pending`` newer products of the warpgroup run, of which these sums are none.

        ``operands`` are those that entered the products waited for from registers. Their registers are free then.
        """
        machine = _machine(self.values)
        values = machine.wgmma_wait(self.values, pending=pending)
        for operand in operands:
            machine.hold(operand.words)
        return Fragment(values)

    def of_row(self, n: int) -> list[Value]:
        """Return what this lane has of the first (0) or second (1) of its two rows, in the order of the columns."""
        return [value for i, value in enumerate(self.values) if i // 2 % _ROWS == n]

    def map(self, function: Callable[..., Value], *others: Fragment | PerRow | PerColumn) -> Fragment:
        """Apply a function element by element, with the numbers of the element's row and column.

        logits.map(lambda x, peak: machine.exp2(x - peak), peak)   # ``peak`` is PerRow
        total.map(machine.fma, scale, other)                      # total * scale + other
        """

        def number(other: Fragment | PerRow | PerColumn, n: int) -> Value:
            if isinstance(other, PerRow):
                return other.values[n // 2 % _ROWS]
            return other.values[n // 4 * 2 + n % 2 if isinstance(other, PerColumn) else n]

        if any(2 * len(self.values) != 4 * len(o.values) for o in others if isinstance(o, PerColumn)):
            raise TypeError(f"numbers of other columns than a fragment's {self.columns}")
        return Fragment([function(x, *(number(other, n) for other in others)) for n, x in enumerate(self.values)])

    def scale_rows(self, factors: PerRow) -> Fragment:
        """Multiply each row by a number."""
        return self.map(lambda x, factor: x * factor, factors)

    def lane_over_rows(self, op: Op) -> PerRow:
        """Reduce what this lane has of each row, which ``PerRow.over_quad`` can reduce further."""
        return PerRow([fold_tree(op, self.of_row(n)) for n in range(_ROWS)])

    def over_rows(self, op: Op) -> PerRow:
        """Reduce each row: ``logits.over_rows(maximum)``. All lanes of a quad get the result."""
        return self.lane_over_rows(op).over_quad(op)

    def warp_over_columns(self, op: Op) -> PerColumn:
        """Reduce each column over the 16 rows of a warp. All its lanes get the result."""
        machine, reduced = _machine(self.values), []
        for part in self.parts(8):
            pair = [op(a, b) for a, b in zip(part.of_row(0), part.of_row(1), strict=True)]
            for distance in (QUAD, 2 * QUAD, 4 * QUAD):
                pair = [op(value, machine.shuffle_xor(value, distance)) for value in pair]
            reduced += pair
        return PerColumn(reduced)

    def operand(self, dtype: DType) -> LeftOperand:
        """Return the matrix rounded to f16 or bf16, as the left operand of a product, with its columns as K."""
        machine = _machine(self.values)
        if dtype not in HALVES:
            raise TypeError(f"a fragment becomes an operand of f16 or bf16, got {dtype!r}")
        rounded = machine.to_f16 if dtype == "f16" else machine.to_bf16
        return LeftOperand([rounded(*self.values[n : n + 2]) for n in range(0, len(self.values), 2)], dtype)

    def pairs(self) -> Iterator[tuple[Value, Value, list[Value]]]:
        """Yield (row, column, two elements) for each two adjacent elements that this lane has."""
        machine = _machine(self.values)
        rows, columns = PerRow.numbers(machine).values, PerColumn.numbers(machine, self.columns).values
        for n in range(0, len(self.values), 2):
            yield rows[n // 2 % _ROWS], columns[n // 4 * 2], self.values[n : n + 2]

    def store(self, array: Buffer | Shared, *index: Index, where: PerRow | Condition = True) -> None:
        """Store the matrix to an array of f32, or of bf16 in device memory, rounded to nearest even.

        Args:
          array: of at least two axes.
          index: where the first element goes. Its column is even.
          where: rows that are stored: ``where=PerRow.numbers(machine).map(lambda row: row < count)``.
        """
        *lead, first_row, first_column = index
        for n, (row, column, pair) in enumerate(self.pairs()):
            stored = where.values[n % _ROWS] if isinstance(where, PerRow) else where
            array.store_floats(pair, *lead, row + first_row, column + first_column, where=stored)


def product(total: Fragment | None, a: TypedTile | LeftOperand, b: TypedTile) -> Fragment:
    """Start the product total + a b^T, as one group of instructions. None starts at zero.

    Args:
      total: f32 [64, rows of b], perhaps sums of a product that runs; or None.
      a: [64, K].
      b: [rows, K], at most 256 rows.

    Returns:
      The sums, which are there after ``Fragment.wait``.

    Raises:
      TypeError: the operands differ in dtype or K, or ``total`` has other columns than b has rows.
    """
    machine, left = _multiplied(a, b)
    start = None if total is None else total.values
    return Fragment(machine.wgmma(start, left, b.k_major(), columns=b.rows, dtype=b.dtype))


def packed(a: TypedTile | LeftOperand, b: TypedTile) -> LeftOperand:
    """Start the product a b^T with sums in f16, rounded at every step. Operands are those of ``product``, but not bf16.

    The sums, which ``LeftOperand.wait`` waits for, are the left operand of a product in f16 with its columns as K.
    """
    machine, left = _multiplied(a, b)
    words = machine.wgmma(None, left, b.k_major(), columns=b.rows, dtype=b.dtype, packed=True)
    return LeftOperand(words, "f16")


def _multiplied(a: TypedTile | LeftOperand, b: TypedTile) -> tuple[TensorCores, Operand | list[Value]]:
    """Return the machine of a product, and its left operand."""
    if a.dtype != b.dtype:
        raise TypeError(f"a product of {a.dtype} and {b.dtype}: both operands have the same dtype")
    if isinstance(a, TypedTile) and a.rows != 64:
        raise TypeError(f"a left operand of {a.rows} rows: a warpgroup multiplies 64")
    machine = b.tile.machine
    assert isinstance(machine, TensorCores)
    return machine, a.k_major() if isinstance(a, TypedTile) else a.words
