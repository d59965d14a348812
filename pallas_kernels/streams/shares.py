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
    reciprocals of its factors from the reciprocals before. With p_j = 1 / c_j, and P the product of all p_j, s is 1 / P
    times the sum of a_ij P / p_j. So a step waits for a sum of products, beside which the only reciprocal is made.

    From a softmax with an eps of 1e-6 added, P and the sums stay between 1e-16 and 30, so nothing underflows.
    """
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    columns = [fold_tree(add, column) + eps for column in transposed]  # reciprocals of the factors
    rows = [machine.constant(1.0, "f32")] * len(matrix)

    def divided(lines: Matrix, own: list[Value], across: list[Value]) -> list[Value]:
        others, product = _products(across)
        inverse = machine.approximate_reciprocal(product)
        sums = [_dot(machine, line, others) for line in lines]
        return [machine.fma(s, inverse, one * eps) for s, one in zip(sums, own, strict=True)]

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


def _products(values: list[Value]) -> tuple[list[Value], Value]:
    """Return for each of four values the product of the others, and the product of all."""
    a, b, c, d = values
    left, right = a * b, c * d
    return [b * right, a * right, d * left, c * left], left * right


def _dot(machine: Machine, line: list[Value], factors: list[Value]) -> Value:
    """Return the sum of products."""
    (a, factor), *others = zip(line, factors, strict=True)
    total = a * factor
    for a, factor in others:
        total = machine.fma(a, factor, total)
    return total
