"""What the numbers of a token become, in one lane: shares of its streams in the input, and gains."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.language.lanes import add, fold, fold_tree, maximum
from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import Value

Matrix = list[list[Value]]  # [old stream][new stream]


def sigmoid(machine: Machine, x: Value) -> Value:
    """Return 1 / (1 + e^-x) of an f32, within 2^-22 + |x| 2^-24 of it."""
    return machine.approximate_reciprocal(machine.exp(x * -1.0) + 1.0)


def softmax(machine: Machine, numbers: Sequence[Value]) -> list[Value]:
    """Return e^x of each number over their sum."""
    peak = fold(maximum, numbers)
    weights = [machine.exp(x - peak) for x in numbers]
    inverse = machine.approximate_reciprocal(fold(add, weights))
    return [weight * inverse for weight in weights]


def sinkhorn(machine: Machine, matrix: Matrix, rounds: int, eps: float) -> Matrix:
    """Divide a positive matrix by its column sums + eps, then ``rounds`` - 1 times by row and by column sums + eps.

    The matrix itself stays, and the factors of its rows and columns are kept beside it. With the factor r of row i and
    s = sum_j a_ij c_j the row's sum is r s. Divided by r s + eps, its factor is 1 / (s + eps / r). So a step makes the
    reciprocals of its factors from the reciprocals before, and waits for one sum of products and one reciprocal.
    """
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    columns = [fold_tree(add, column) + eps for column in transposed]  # reciprocals of the factors
    rows = [machine.constant(1.0, "f32")] * len(matrix)

    def divided(lines: Matrix, own: list[Value], across: list[Value]) -> list[Value]:
        factors = [machine.approximate_reciprocal(x) for x in across]
        return [_dot(machine, line, factors, one * eps) for line, one in zip(lines, own, strict=True)]

    def turn(_: Value, carry: tuple[list[Value], list[Value]]) -> tuple[list[Value], list[Value]]:
        rows, columns = carry
        rows = divided(matrix, rows, columns)
        return rows, divided(transposed, columns, rows)

    if rounds > 1:
        rows, columns = machine.loop(rounds - 1, turn, (rows, columns), rolled=True)
    rows, columns = ([machine.approximate_reciprocal(x) for x in factors] for factors in (rows, columns))
    return [
        [a * row * column for a, column in zip(line, columns, strict=True)]
        for line, row in zip(matrix, rows, strict=True)
    ]


def _dot(machine: Machine, line: list[Value], factors: list[Value], start: Value) -> Value:
    """Return start + the sum of products, in two halves that do not wait for each other."""
    middle, pairs = len(line) // 2, list(zip(line, factors, strict=True))
    left, right = start, pairs[middle][0] * pairs[middle][1]
    for a, factor in pairs[:middle]:
        left = machine.fma(a, factor, left)
    for a, factor in pairs[middle + 1 :]:
        right = machine.fma(a, factor, right)
    return left + right
