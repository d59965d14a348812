"""The k largest scores of each row: their positions, in ascending order.

A block keeps a part of a row in registers, as ordinals: i32 with the order of the f32 they stand for. It searches for
the k-th largest ordinal: each step divides the range in which it lies by two numbers, and counts how many ordinals
reach each of them. The search ends early at a number that exactly k reach. Then a running count over the part gives
each picked score its place.

If a row has several parts, each block lists the k largest of its own part with their ordinals, in the order of the row.
The next launch treats these lists as a shorter row.
"""

# Bodies of kernels are in Triton's language, whose types a checker of Python does not know.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.selection.call import unsupported_top_k
from pallas_kernels.triton_gpu.launch import Config, launch


@triton.jit
def _ordinals(scores):
    """Integers in the order of f32: that of -0 is 0, and that of NaN is above all others."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, -2147483648 - bits, bits)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800001, ordered)


@triton.jit
def top_k_kernel(
    given,  # f32 scores [R, size], or i32 [R, size] ordinals of listed scores, the lowest integer where none is
    positions,  # i32 [R, size] of listed scores
    visible,  # i32 [R]
    picks,  # i32 [R, parts, k] positions, then -1
    ordinals,  # i32 [R, parts, k]; for another launch
    size: tl.constexpr,
    part_size: tl.constexpr,
    k: tl.constexpr,
    places: tl.constexpr,  # the power of two that is not below ``k``
    listed: tl.constexpr,  # whether ``given`` are lists
    is_last: tl.constexpr,  # whether nothing follows this launch
):
    none: tl.constexpr = -2147483648
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = part * part_size + tl.arange(0, part_size)
    if listed:
        ordinal = tl.load(given + row * size + n, mask=n < size, other=none)
    else:
        seen = tl.minimum(tl.load(visible + row), size)
        # Whole vectors of four are loaded or not.
        score = tl.load(given + row * size + n, mask=(n // 4 * 4 < seen) & (n < size), other=0.0)
        ordinal = tl.where(n < seen, _ordinals(score), none)

    # At least ``reaching`` ordinals reach ``low``, and if these are k or more, fewer than k exceed ``high``.
    low, high = tl.full((), none + 1, tl.int32), tl.max(ordinal, 0)
    reaching = tl.sum((ordinal > none).to(tl.int32), 0)
    total = reaching
    while (reaching > k) & (low < high):
        step = ((high.to(tl.int64) - low.to(tl.int64)) // 3 + 1).to(tl.int32)
        first = low + step
        second = first + step
        both = tl.sum((ordinal >= first).to(tl.int32) + (ordinal >= second).to(tl.int32) * 65536, 0)
        reach_first, reach_second = both & 0xFFFF, both >> 16
        to_first, to_second = reach_first >= k, reach_second >= k
        high = tl.where(to_second, high, tl.where(to_first, second, first) - 1)
        low = tl.where(to_second, second, tl.where(to_first, first, low))
        reaching = tl.where(to_second, reach_second, tl.where(to_first, reach_first, reaching))

    # Of the ordinals equal to the k-th largest the first ones are picked.
    above, equal = ordinal > low, ordinal == low
    before = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 0)
    more = k - tl.sum(above.to(tl.int32), 0)
    above_before, equal_before = before >> 16, before & 0xFFFF
    picked = above | (equal & (equal_before <= more))
    place = above_before + tl.minimum(equal_before, more) - 1
    lists = (row * tl.num_programs(1) + part) * k
    position = tl.load(positions + row * size + n, mask=picked, other=-1) if listed else n
    tl.store(picks + lists + place, position, mask=picked)
    empty = tl.arange(0, places)
    is_empty = (empty >= total) & (empty < k)
    tl.store(picks + lists + empty, tl.full((places,), -1, tl.int32), mask=is_empty)
    if not is_last:
        tl.store(ordinals + lists + place, ordinal, mask=picked)
        tl.store(ordinals + lists + empty, tl.full((places,), none, tl.int32), mask=is_empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """How a row is divided among blocks."""

    size: int = 8192  # scores of a block, a power of two of at most 16384
    warps: int = 16


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
    chex.assert_rank([scores, visible], [2, 1])
    chex.assert_equal_shape_prefix([scores, visible], 1)
    chex.assert_type([scores, visible], [jnp.float32, jnp.int32])
    rows, size = scores.shape
    if (reason := unsupported_top_k(k, size)) is not None:
        raise ValueError(reason)
    if not rows * size:
        return jnp.full((rows, k), -1, jnp.int32)
    parts = Parts() if parts is None else parts
    given, positions = scores, visible  # positions are not read in the first launch
    while True:
        # At least half of a list goes at every launch.
        part_size = max(parts.size, 2 * triton.next_power_of_2(k))
        part_size = min(part_size, max(128, triton.next_power_of_2(size)))
        count = -(-size // part_size)
        config = Config(
            grid=(rows, count),
            warps=max(1, min(parts.warps, part_size // 128)),
            constants=dict(
                size=size,
                part_size=part_size,
                k=k,
                places=triton.next_power_of_2(k),
                listed=given is not scores,
                is_last=count == 1,
            ),
        )
        lists = jax.ShapeDtypeStruct((rows, count * k), jnp.int32)
        results = [lists, lists if count > 1 else jax.ShapeDtypeStruct((1,), jnp.int32)]
        positions, given = launch(top_k_kernel, config, [given, positions, visible], results)
        if count == 1:
            return positions
        size = count * k
