"""Checks of the operands of instructions, which both machines make before they use one."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.language.machine import WARP, Scope
from pallas_kernels.language.tensor_cores import HALVES, DType, Operand
from pallas_kernels.language.values import Condition, Value, expect

REDUCTIONS = ("add", "max", "min")  # of an i32 over a warp
MAX_COLUMNS = 256  # columns of a product


def check_reduction(op: str) -> None:
    """Raise ValueError if a warp cannot reduce by this operation in one instruction."""
    if op not in REDUCTIONS:
        raise ValueError(f"a warp reduces by one of {', '.join(map(repr, REDUCTIONS))}, got {op!r}")


def check_moved(x: Value) -> None:
    """Raise TypeError if a shuffle cannot move this value between the lanes of a warp."""
    if x.kind not in ("i32", "f32"):
        expect("i32", x)


def check_shuffle(x: Value, distance: int) -> None:
    """Raise TypeError if a shuffle cannot move this value over this distance between the lanes of a warp."""
    check_moved(x)
    if not 0 < distance < WARP:
        raise TypeError(f"a shuffle over {distance} lanes: write a distance from 1 to {WARP - 1}")


def check_barrier(scope: Scope, leave: Condition) -> None:
    """Raise TypeError if lanes may not leave at a barrier of this scope."""
    if leave is not False and scope != "cluster":
        raise TypeError(f"a barrier of a {scope} cannot be left: leave= is for a cluster's")


def check_access(size: int, words: Sequence[Value] | None = None) -> None:
    """Raise TypeError if an access of this size, or with this number of words, does not exist."""
    if size not in (1, 2, 4, 8, 16):
        raise TypeError(f"{size} bytes at once: an access moves 1, 2, 4, 8 or 16")
    if words is not None and len(words) != max(1, size // 4):
        raise TypeError(f"{len(words)} words for a store of {size} bytes")


def check_copy(size: int) -> None:
    """Raise TypeError if an asynchronous copy of this size does not exist."""
    if size not in (4, 8, 16):
        raise TypeError(f"{size} bytes at once: an asynchronous copy moves 4, 8 or 16")


def check_send(words: Sequence[Value]) -> None:
    """Raise TypeError if so many words cannot be sent together."""
    if len(words) not in (1, 2, 4):
        raise TypeError(f"{len(words)} words at once: 1, 2 or 4 are sent together")


def check_product(a: Operand | list[Value], b: Operand, columns: int, dtype: DType) -> None:
    """Raise TypeError if a product does not support these operands."""
    if columns % 8 or not 8 <= columns <= MAX_COLUMNS:
        raise TypeError(f"a product of {columns} columns: write a multiple of 8, {MAX_COLUMNS} at most")
    if isinstance(a, Operand) and len(a.steps) != len(b.steps):
        raise TypeError(f"the left operand has {len(a.steps)} steps of K, the right one {len(b.steps)}")
    if not isinstance(a, Operand) and len(a) != 4 * len(b.steps):
        raise TypeError(f"{len(a)} words of a left operand: write four for each of the {len(b.steps)} steps of K")
    if dtype not in HALVES and any(isinstance(operand, Operand) and operand.transposed for operand in (a, b)):
        raise TypeError(f"an operand of {dtype} is K-major: write tile.k_major()")


def check_wgmma(
    start: list[Value] | None, a: Operand | list[Value], b: Operand, columns: int, dtype: DType, packed: bool
) -> None:
    """Raise TypeError if ``wgmma`` does not support these operands."""
    check_product(a, b, columns, dtype)
    if packed and dtype == "bf16":
        raise TypeError("a product of bf16 has sums in f32: write packed=False")
    if start is not None and packed:
        raise TypeError("a product with sums in f16 starts at zero: write start=None")
    if start is not None and len(start) != columns // 2:
        raise TypeError(f"a product of {columns} columns starts from {columns // 2} values, got {len(start)}")
