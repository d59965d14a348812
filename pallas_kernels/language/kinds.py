"""The kinds of numbers that a lane has: which operators and Python numbers each takes, and what to write otherwise."""

from __future__ import annotations

import math
import numbers
from typing import Literal

import numpy as np

Kind = Literal["i32", "i64", "f32", "bool"]

INTEGER_BITS = {"i32": 32, "i64": 64}
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
SIGNS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "//", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "max": "maximum", "min": "minimum"},
}
OPERATORS: dict[Kind, frozenset[str]] = {
    "i32": frozenset(SIGNS),
    "i64": frozenset(SIGNS),
    "f32": COMPARISONS | {"add", "sub", "mul", "max", "min"},
    "bool": frozenset(("and", "or", "xor", "eq", "ne")),
}
_TOO_LARGE = 2.0**128 - 2.0**103  # the smallest number that f32 rounds to infinity

INSTEAD_OF_TRUTH = """a condition is one bool per lane, and Python cannot decide by it. Write
  with machine.when(condition):    for  if condition:
  select(condition, a, b)          for  a if condition else b
  where=condition                  for a load or a store in some lanes
  (low <= x) & (x < high)          for  low <= x < high
  a & b,  a | b,  negate(a)        for  a and b,  a or b,  not a"""


def instead_of_operator(kind: Kind) -> str:
    """Return what to write instead of an operator that this kind does not have."""
    if kind == "bool":
        return "conditions take & | ^ == != and negate; write select(condition, a, b) for a number"
    return "f32 takes + - * and comparisons; write machine.divide(a, b), and machine.bits(x) for the bits as an i32"


def instead_of_mixing(a: Kind, b: Kind) -> str:
    """Return what to write instead of mixing two kinds in one operation."""
    if "bool" in (a, b):
        number = b if a == "bool" else a
        one, zero = ("1.0", "0.0") if number == "f32" else ("1", "0")
        return f'write select(condition, machine.constant({one}, "{number}"), {zero}) for a number from a bool'
    if "f32" in (a, b):
        return "kinds do not mix, and no word converts whole numbers to f32; machine.bits and from_bits keep the bits"
    return "write machine.widen(x) for the i64 of an i32"


def fitting(number: object, kind: Kind) -> float:
    """Return the number, converted to Python's type for this kind. Raises TypeError if the kind cannot represent it."""
    is_bool = isinstance(number, bool | np.bool_)
    if kind == "bool":
        if not is_bool:
            raise TypeError(f"{number!r} is no bool: write True or False, or a comparison")
        return bool(number)
    if is_bool:
        raise TypeError(f"{number!r} is no {kind}: write 1 or 0")
    if not isinstance(number, int | float | numbers.Real):  # a class of Python's is found faster than an abstract one
        raise TypeError(f"{number!r} is no number: an array that a kernel reads is one of launch's inputs")
    if kind == "f32":
        number = float(number)
        if abs(number) >= _TOO_LARGE and not math.isinf(number):
            raise TypeError(f"{number!r} is too large for an f32: write float('inf') where that is meant")
        return number
    if not isinstance(number, int | numbers.Integral):
        raise TypeError(f"{number!r} is no {kind}, which takes whole numbers: write an int, or compute with f32")
    number, half = int(number), 1 << INTEGER_BITS[kind] - 1
    if not -half <= number < half:
        instead = f": write {number - 2 * half} for the same bits" if half <= number < 2 * half else ""
        raise TypeError(f"{number} is no {kind}, which goes from {-half} to {half - 1}{instead}")
    return number
