"""How a product is divided over the blocks of a launch.

A warpgroup computes 64 outputs, a tile, for all rows of x that its block has, from a part of the inputs. The parts of a
tile are those of the blocks of a cluster, of warpgroups of a block, or both. Their sums are added in the order of the
parts. How many parts there are depends on the weight's shape alone. So the order in which a sum is formed depends
neither on the number of rows nor on other rows.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.target import GPU

TILE = 64  # outputs of a warpgroup
ROWS = 64  # the most rows of x in a block
_CHUNK_BYTES = 128  # of an output, and as many of x for each row
CLUSTER_BYTES = {1: 0, 2: 24 << 10, 4: 48 << 10, 8: 72 << 10}  # what a cluster takes, as much as reading so many bytes
# Clusters that an H200 ran at once beyond those that every one runs (``GPU.clusters``). A card that lacks them runs
# them after the others.
MORE_CLUSTERS = {8: 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The blocks of a launch for one group of outputs and some rows of x."""

    cluster: int  # blocks that share the inputs
    parts: int  # of a block's inputs, each with warpgroups of its own
    tiles: int  # of a block
    blocks: int  # clusters
    chunks: int  # of a part

    @property
    def warpgroups(self) -> int:
        return self.tiles * self.parts

    @property
    def all_parts(self) -> int:
        return self.cluster * self.parts


@functools.cache
def fastest_split(tiles: int, groups: int, chunks: int, columns: int, most_warpgroups: int, gpu: GPU) -> Split:
    """Return the split that is expected to be the fastest for ``columns`` rows.

    The model: blocks run in waves, and a block takes as long as reading its part of the weight and of x. What a cluster
    takes was chosen by times on an H200, of V4-Flash's shapes with 1, 8 and 64 rows.

    Args:
      tiles: of a group.
      groups: of outputs, each with its own inputs.
      chunks: of a group's inputs.
      columns: rows of x in a block.
      most_warpgroups: of a block, for which there are registers.
      gpu: that runs it.
    """
    sizes = [size for size in CLUSTER_BYTES if size == 1 or size in gpu.clusters]

    def cost(split: Split, columns: int) -> int:
        room = gpu.multiprocessors
        if split.cluster > 1:
            room = gpu.clusters[split.cluster] + MORE_CLUSTERS.get(split.cluster, 0)
        waves = -(-split.blocks * groups // room)
        read = split.parts * split.chunks * _CHUNK_BYTES * (split.tiles * TILE + columns)
        return waves * read + CLUSTER_BYTES[split.cluster]

    def fastest(shapes: list[tuple[int, int]], columns: int) -> Split:
        """Return the best of these (cluster, parts of a block)."""
        splits = [
            Split(cluster=cluster, parts=parts, tiles=n, blocks=-(-tiles // n), chunks=chunks // (cluster * parts))
            for cluster, parts in shapes
            for n in range(1, most_warpgroups // parts + 1)
        ]
        return min(splits, key=lambda split: cost(split, columns))

    # For most rows of x, parts are best in blocks of their own, because each block then needs less of x.
    all_parts = fastest([(size, 1) for size in sizes if chunks % size == 0], ROWS).cluster
    return fastest([(size, all_parts // size) for size in sizes if all_parts % size == 0], columns)
