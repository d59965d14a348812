"""Find a bound: a number that at least k scores of a row reach, but usually not many more.

Every lane has a few group maxima. If k of the maxima reach a number, so do at least k scores. The search for such a
number begins in the range in which it most likely is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pallas_kernels.language.lanes import fold, maximum
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.selection.kth_largest import INFINITY, LARGEST, SMALLEST, ordinal_of
from pallas_kernels.selection.memory import Memory
from pallas_kernels.selection.part import Candidate, Part


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Extremes:
    """Ordinals of a block's part of a row: the extremes of its finite group maxima, and the largest of all."""

    lowest: Value
    low: Value  # the largest of the warps' minima, which most maxima are above
    high: Value
    top: Value

    @classmethod
    def of_block(cls, part: Part, memory: Memory, maxima: Sequence[Value], edge: Candidate) -> Extremes:
        """Compute them from ``maxima``, the ordinals of a lane's groups. Contains a barrier."""
        machine, warps = part.machine, part.split.threads // WARP
        finite = [(ordinal < INFINITY) & (ordinal > -INFINITY) for ordinal in maxima]
        low = fold(Value.minimum, [select(is_finite, x, LARGEST) for is_finite, x in zip(finite, maxima, strict=True)])
        high = fold(maximum, [select(is_finite, x, SMALLEST) for is_finite, x in zip(finite, maxima, strict=True)])
        top = fold(maximum, [*maxima, select(edge.there, ordinal_of(edge.score), SMALLEST)])
        of_warp = [machine.reduce_warp("min", low), machine.reduce_warp("max", high), machine.reduce_warp("max", top)]
        memory.extremes[part.warp].store_words([*of_warp, top], 0, where=part.lane == 0)
        machine.barrier("block")
        low, high, top, _ = memory.extremes[part.lane % warps].load_words(0, count=4)
        return cls(
            lowest=machine.reduce_warp("min", low),
            low=machine.reduce_warp("max", select(low <= high, low, SMALLEST)),
            high=machine.reduce_warp("max", high),
            top=machine.reduce_warp("max", top),
        )


def find_bound(part: Part, memory: Memory, maxima: Sequence[Value], extremes: Extremes) -> tuple[Value, Value]:
    """Return two ordinals: one that at least k scores of the row reach, and the largest of the row."""
    machine, cluster = part.machine, part.split.cluster
    limit = max(16, memory.bound.k // 4)

    def visit(action: Callable[[Value, Condition], None]) -> None:
        for ordinal in maxima:
            action(ordinal.minimum(extremes.high), True)

    def search(_: Value, bound: Value) -> Value:
        found = memory.bound.find(visit, extremes.low, extremes.high, limit, lowest=extremes.lowest)
        return select(found.count > 0, found.low, SMALLEST).maximum(bound)

    # With fewer vectors than k there are not enough groups, so there is no search.
    times = select(part.count >= memory.kth.k, machine.constant(1, "i32"), 0)
    bound = machine.loop(times, search, machine.constant(-INFINITY, "i32"))
    if cluster == 1:
        return bound, extremes.top
    # In each block, its share of k scores reaches its own bound. So k scores of the row reach the lowest bound.
    own = memory.bounds[part.rank]
    for rank in range(cluster):
        own.store_words([bound, extremes.top], 0, where=part.thread == rank, rank=rank)
    machine.barrier("cluster")
    bounds, tops = zip(*[memory.bounds.load_words(rank, 0, count=2) for rank in range(cluster)], strict=True)
    return fold(Value.minimum, bounds), fold(maximum, tops)
