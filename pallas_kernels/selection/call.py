"""The k largest scores of each row: their positions, in ascending order.

    1  every lane reads its part of the row, and keeps a few maxima of it                            part
    2  these maxima give a bound that at least k scores reach                                        bound
    3  the scores that reach the bound, a few percent of the row, are listed in shared memory        lists
    4  the k-th largest of the list is found; larger scores are marked in a bitmap of the row,       kth_largest
       and of those equal to it the first ones                                                       largest
    5  marked positions are stored; the bitmap gives the place of each in the result                 marks

A row is read by a cluster of blocks, of which the first does steps 4 and 5. If a list overflows, as in a row of many
equal scores, steps 4 and 5 read the whole row instead. The order of a list depends on the order of atomic additions,
but the result does not.

    vector   four adjacent scores, which a lane loads at once
    trip     one vector for each maximum that a lane keeps; a long row takes several trips
    bundle   the n-th vectors of a lane in all trips: they share a maximum, and are read again if it reaches the bound
    group    several bundles of a lane, chosen so that a row still has more groups than scores are to be found
    ordinal  an i32 with the same order as the f32 it stands for, so that ranges can be split by bits (a sort key)
    bin      a range of 2^n ordinals, whose scores are counted together
"""

from __future__ import annotations

import itertools

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer, fold, maximum
from pallas_kernels.language.launch import Grid, launch
from pallas_kernels.language.machine import Machine
from pallas_kernels.language.values import negate, select
from pallas_kernels.selection.bound import Extremes, find_bound
from pallas_kernels.selection.kth_largest import INFINITY, number_of, ordinal_of
from pallas_kernels.selection.largest import Largest, store_all
from pallas_kernels.selection.lists import Lists
from pallas_kernels.selection.memory import Memory, Room
from pallas_kernels.selection.part import Part
from pallas_kernels.selection.split import Split, split_of

MAX_K = 2048
MAX_SIZE = 1 << 19  # scores in a row; beyond this the bitmap and the lists for MAX_K would not fit in shared memory


def unsupported_top_k(k: int, size: int) -> str | None:
    """Return why this kernel does not support finding the k largest of ``size`` scores, or None if it does."""
    if not 1 <= k <= MAX_K:
        return f"top-k takes a k from 1 to {MAX_K}, got {k}"
    return None if size <= MAX_SIZE else f"top-k takes rows of at most {MAX_SIZE} scores, got {size}"


def checked_rows(scores: jax.Array, visible: jax.Array, k: int) -> tuple[int, int]:
    """Return the number of rows and their size, as ``top_k`` takes them. Raises what it raises."""
    chex.assert_rank([scores, visible], [2, 1])
    chex.assert_equal_shape_prefix([scores, visible], 1)
    chex.assert_type([scores, visible], [jnp.float32, jnp.int32])
    rows, size = scores.shape
    if (reason := unsupported_top_k(k, size)) is not None:
        raise ValueError(reason)
    return rows, size


def top_k(
    scores: jax.Array, visible: jax.Array, *, k: int, simulate: bool = False, split: Split | None = None
) -> jax.Array:
    """Return the positions of the k largest visible scores of each row, in ascending order.

    Among scores equal to the k-th largest, the first of the row are picked, as in ``lax.top_k``. NaN ranks above all
    numbers, and -0 equals 0.

    Args:
      scores: f32 [R, N], N at most MAX_SIZE. Scores from ``visible`` on are ignored.
      visible: int32 [R].
      k: at most MAX_K.
      simulate: as for ``launch``.
      split: how a row is divided. None chooses by its size.

    Returns:
      int32 [R, k] with min(k, visible) positions, then -1. The same scores always give the same result.

    Raises:
      AssertionError: (chex) an array's shape or dtype is wrong.
      ValueError: the kernel does not support this k, these rows, this split or this target.
    """
    rows, size = checked_rows(scores, visible, k)
    if size == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    split = split_of(rows, size) if split is None else split
    if split.keep and not split.is_single(size):
        raise ValueError(f"a row of {size} scores does not stay in the registers of {split}")
    room = Room(k=k, size=size, split=split)

    def body(machine: Machine, inputs: tuple[Buffer, Buffer], out: Buffer) -> None:
        part, memory = Part(machine, *inputs, split), Memory(machine, room)
        _store_largest(part, memory, out)

    return launch(
        body,
        name="top_k",
        grid=Grid(blocks=(rows,), warpgroups=split.warpgroups, cluster=split.cluster, shared_bytes=room.shared_bytes),
        inputs=(scores, visible),
        state=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        simulate=simulate,
    )


def _store_largest(part: Part, memory: Memory, out: Buffer) -> None:
    machine, split, k = part.machine, part.split, out.shape[1]
    lists = Lists(part, memory)
    memory.clear()
    edge = part.load_edge()
    vectors, maxima = part.read()
    groups = split.groups(k)
    of_groups = [ordinal_of(fold(maximum, maxima[i::groups])) for i in range(groups)]
    extremes = Extremes.of_block(part, memory, of_groups, edge)  # its barrier also completes the clearing
    few = part.visible <= k
    with machine.when(few):
        store_all(part, out)
    with machine.when(negate(few)):
        bound, top = find_bound(part, memory, of_groups, extremes)
        if split.keep:
            kept = itertools.chain(*map(part.candidates, part.vectors, vectors))
            lists.add_scores([*kept, edge], number_of(bound))
        else:
            lists.add_bundles(maxima, number_of(bound))
            lists.add_scores_of_bundles(edge, number_of(bound))
        if split.cluster > 1:
            machine.barrier("cluster", leave=negate(part.is_first))
        else:
            machine.barrier("block")
        with machine.when(part.is_first):
            low = select(bound > -INFINITY, bound, extremes.lowest)
            Largest(part, memory, lists.listed(), out).store(bound, low, top)
