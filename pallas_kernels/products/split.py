"""How a product is divided over the blocks of a launch.

A warpgroup computes 64 outputs, a tile, for all rows of x that its block has, from a part of the inputs. Blocks of a
cluster have the same tiles and share the inputs in equal parts, and their sums are added in the order of the parts. So
the order in which a sum is formed depends on the weight's shape, and neither on the number of rows nor on other rows.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.target import GPU

TILE = 64  # outputs of a warpgroup
ROWS = 64  # the most rows of x in a block
_ROW_BYTES = 64  # what reading an input of all rows of x takes, as much as reading it of so many outputs
_CLUSTER_BYTES = 24 << 10  # what adding up the sums of a cluster takes, as much as reading so many bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The blocks of a launch for one group of outputs and one group of rows of x."""

    cluster: int  # blocks that share the inputs
    warpgroups: int  # tiles of a block
    blocks: int  # clusters
    chunks: int  # of the inputs, for each block of a cluster


@functools.cache
def fastest_split(tiles: int, groups: int, chunks: int, most_warpgroups: int, gpu: GPU) -> Split:
    """Return the split that is expected to be the fastest.

    The model: blocks run in waves, and a block takes as long as reading its part of the weight and of x. It agrees with
    the order of the times measured on an H200 for the shapes of DeepSeek-V4.

    Args:
      tiles: of a group.
      groups: of outputs, each with its own inputs.
      chunks: of a group's inputs.
      most_warpgroups: of a block, for which there are registers.
      gpu: that runs it.
    """
    best: tuple[float, Split] | None = None
    for cluster in (1, *sorted(gpu.clusters)):
        if chunks % cluster:
            continue
        room = gpu.multiprocessors if cluster == 1 else gpu.clusters[cluster]
        for warpgroups in range(1, most_warpgroups + 1):
            blocks = -(-tiles // warpgroups)
            waves = -(-blocks * groups // room)
            part = chunks // cluster
            cost = waves * part * 128 * (warpgroups * TILE + _ROW_BYTES) + (_CLUSTER_BYTES if cluster > 1 else 0)
            if best is None or cost < best[0]:
                best = cost, Split(cluster=cluster, warpgroups=warpgroups, blocks=blocks, chunks=part)
    assert best is not None, "a cluster of one block is always possible"
    return best[1]
