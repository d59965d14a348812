"""The k largest scores of each row: their positions, in ascending order.

A block keeps a part of a row in registers, as ordinals: i32 with the order of the f32 they stand for. It searches for
the k-th largest ordinal: each step divides the range in which it lies by two numbers, and counts how many ordinals
reach each of them. The range begins at the smallest of the maxima of k groups, which at least k ordinals reach. The
search ends early at a number that exactly k reach. Then a running count over the part gives each picked score its
place. A row that is a little longer than a part is kept as a part and a smaller rest.

If a row has several parts, each block lists the k largest of its own part with their ordinals, in the order of the row.
The next launch treats these lists as a shorter row.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.selection.call import checked_rows
from pallas_kernels.triton_gpu.launch import Config, launch
from pallas_kernels.triton_gpu.operands import next_power_of_2

MAX_PART = 16384  # counts of a part and its rest fit in 15 bits


@triton.jit
def _ordinals(scores):
    """Integers in the order of f32: that of -0 is 0, and that of NaN is above all others."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, -2147483648 - bits, bits)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800001, ordered)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKSizes:
    """Sizes of a launch."""

    size: int  # of a row
    part: int
    rest: int  # the power of two that holds what a single part leaves of the row, or 0
    k: int

    @property
    def places(self) -> int:
        """The power of two that holds ``k``."""
        return next_power_of_2(self.k)


@triton.jit
def _load(given, n, seen, size: tl.constexpr, listed: tl.constexpr):
    """The ordinals of a row at ``n``, and the lowest integer where none is."""
    none: tl.constexpr = -2147483648
    if listed:
        ordinal = tl.load(given + n, mask=n < size, other=none)
    else:
        # Whole vectors of four are loaded or not.
        score = tl.load(given + n, mask=(n // 4 * 4 < seen) & (n < size), other=0.0)
        ordinal = tl.where(n < seen, _ordinals(score), none)
    return ordinal


@triton.jit
def _counts(low, high):
    """How many are true in each of two masks, as low + 2^16 high."""
    return tl.sum(low.to(tl.int32) + high.to(tl.int32) * 65536, 0)


@triton.jit
def _store(ordinal, n, low, more, before, positions, picks, ordinals):
    """Store what is above ``low``, and of what equals it the first ``more``, behind ``before`` counts of such."""
    above, equal = ordinal > low, ordinal == low
    through = before + tl.cumsum(equal.to(tl.int32) + above.to(tl.int32) * 65536, 0)
    equals, aboves = through & 0xFFFF, through >> 16
    picked = above | (equal & (equals <= more))
    place = aboves + tl.minimum(equals, more) - 1
    position = tl.load(positions + n, mask=picked, other=-1) if positions is not None else n
    tl.store(picks + place, position, mask=picked)
    if ordinals is not None:
        tl.store(ordinals + place, ordinal, mask=picked)


@triton.jit
def top_k_kernel(
    given,  # f32 scores [R, size], or i32 [R, size] ordinals of listed scores, the lowest integer where none is
    positions,  # i32 [R, size] of listed scores; None: ``given`` are not listed
    visible,  # i32 [R]
    picks,  # i32 [R, parts, k] positions, then -1
    ordinals,  # i32 [R, parts, k] for another launch; None if none follows
    sizes: tl.constexpr,
):
    listed: tl.constexpr = positions is not None
    size: tl.constexpr = sizes.size
    part_size: tl.constexpr = sizes.part
    k: tl.constexpr = sizes.k
    places: tl.constexpr = sizes.places
    none: tl.constexpr = -2147483648
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lists = (row * tl.num_programs(1) + part) * k
    given, picks = given + row * size, picks + lists
    if listed:
        positions += row * size
    if ordinals is not None:
        ordinals += lists
    n = part * part_size + tl.arange(0, part_size)
    seen = tl.minimum(tl.load(visible + row), size)
    ordinal = _load(given, n, seen, size, listed)

    # ``reaching`` ordinals reach ``low``, and if these are k or more, fewer than k exceed ``high``.
    low, high = tl.full((), none + 1, tl.int32), tl.max(ordinal, 0)
    if 2 * places <= part_size:  # at least k ordinals reach the smallest of the largest of k groups
        groups = tl.reshape(ordinal, (places, part_size // places), can_reorder=True)
        low = tl.maximum(low, tl.min(tl.max(groups, 1), 0))
    both = _counts(ordinal >= low, ordinal > none)
    if sizes.rest > 0:
        n_rest = part_size + tl.arange(0, sizes.rest)
        rest = _load(given, n_rest, seen, size, listed)
        high = tl.maximum(high, tl.max(rest, 0))
        both += _counts(rest >= low, rest > none)
    reaching, total = both & 0xFFFF, both >> 16
    while (reaching > k) & (low < high):
        step = ((high.to(tl.int64) - low.to(tl.int64)) // 3 + 1).to(tl.int32)
        first = low + step
        second = first + step
        both = _counts(ordinal >= first, ordinal >= second)
        if sizes.rest > 0:
            both += _counts(rest >= first, rest >= second)
        reach_first, reach_second = both & 0xFFFF, both >> 16
        to_first, to_second = reach_first >= k, reach_second >= k
        high = tl.where(to_second, high, tl.where(to_first, second, first) - 1)
        low = tl.where(to_second, second, tl.where(to_first, first, low))
        reaching = tl.where(to_second, reach_second, tl.where(to_first, reach_first, reaching))

    # Of the ordinals equal to the k-th largest the first ones are picked.
    counts = _counts(ordinal == low, ordinal > low)
    if sizes.rest > 0:
        more = k - ((counts + _counts(rest == low, rest > low)) >> 16)
        _store(rest, n_rest, low, more, counts, positions, picks, ordinals)
    else:
        more = k - (counts >> 16)
    _store(ordinal, n, low, more, 0, positions, picks, ordinals)
    empty = tl.arange(0, places)
    is_empty = (empty >= total) & (empty < k)
    tl.store(picks + empty, tl.full((places,), -1, tl.int32), mask=is_empty)
    if ordinals is not None:
        tl.store(ordinals + empty, tl.full((places,), none, tl.int32), mask=is_empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """How a row is divided among blocks."""

    size: int = 8192  # scores of a block, a power of two
    warps: int = 16

    def __post_init__(self) -> None:
        if not 128 <= self.size <= MAX_PART or self.size & (self.size - 1):
            raise ValueError(f"size must be a power of two from 128 to {MAX_PART}, got {self.size}")


def top_k(scores: jax.Array, visible: jax.Array, *, k: int, parts: Parts | None = None) -> jax.Array:
    """Return the positions of the k largest visible scores of each row, in ascending order.

    Among scores equal to the k-th largest, the first of the row are picked, as in ``lax.top_k``. NaN ranks above all
    numbers, and -0 equals 0.

    Args:
      scores: f32 [R, N]. Scores from ``visible`` on are ignored.
      visible: int32 [R].
      k: how many.
      parts: how a row is divided. None chooses by its size.

    Returns:
      int32 [R, k] with min(k, visible) positions, then -1. The same scores always give the same result.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support this k or rows of this size.
    """
    rows, size = checked_rows(scores, visible, k)
    if not rows * size:
        return jnp.full((rows, k), -1, jnp.int32)
    parts = Parts() if parts is None else parts
    given, positions = scores, None
    while True:
        # At least half of a list goes at every launch.
        part_size = max(parts.size, 2 * next_power_of_2(k))
        part_size = min(part_size, max(128, next_power_of_2(size)))
        # A row a little longer than a part, such as 8,192 entries and those of new tokens, is one launch, too.
        rest = max(0, size - part_size)
        rest = max(128, next_power_of_2(rest)) if 0 < rest <= part_size // 4 else 0
        count = 1 if rest else -(-size // part_size)
        config = Config(
            grid=(rows, count),
            warps=max(1, min(parts.warps, part_size // 128)),
            constants=dict(sizes=TopKSizes(size=size, part=part_size, rest=rest, k=k)),
        )
        lists = jax.ShapeDtypeStruct((rows, count * k), jnp.int32)
        results = [lists, lists if count > 1 else None]
        positions, given = launch(top_k_kernel, config, [given, positions, visible], results)
        if count == 1:
            return positions
        size = count * k
