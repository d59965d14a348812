"""Where one way to run a kernel becomes faster than another on an NVIDIA H200, by kernel, and what measures it again.

Only choices between programs that give the same results stand here. Costs of a model of a kernel that are part of a
formula stand beside it: ``products.many.tiling.Tiling.cost``.
"""

from __future__ import annotations

import dataclasses

# Attention. ``python -m benchmarks.kernels tune`` times both kernels by heads, clusters and tiles of a block.
# Heads per block in the kernel for few queries -> the smallest number of tiles per block with which it is used. A block
# has a warpgroup per tile; with fewer, this kernel was slower than the one for many queries. Timed for queries
# of 64 and of 128 heads.
FEW_HEADS = {8: 1, 16: 1, 32: 2}
# Tiles that a query may have from which on its work is spread over a cluster, if it must have the bits of one block.
# With fewer it was not timed.
SPREAD_TILES = 6
# ``python -m benchmarks.layer prefill`` times chunks whose rows are widened before.
READS_TO_WIDEN = 32  # of each row: so many conversions take longer than one conversion, a store and so many loads
MOST_WIDE_BYTES = 256 << 20  # of a workspace

# Scores and top-k. ``python -m benchmarks.kernels tune`` times them by blocks, warpgroups and stages.
SHORT_SCORES, LONG_SCORES = 8, 64  # tiles for each multiprocessor
SPLIT_SCORES = 8192  # scores of a row, from which on it has another block
MOST_BLOCKS, MOST_BLOCKS_OF_LONG_ROWS = 64, 128  # of a launch: clusters that fill the GPU start slowly
LONG_ROW = 65536  # scores, for which a pair of blocks pays off even so
MANY_BLOCKS = 128  # with which two blocks run on a multiprocessor, and so cannot have 16 bundles for each lane

# The cache update of HCA. ``python -m benchmarks.kernels cache``. CTAs of a unit, and warpgroups of each: in a decode
# step with few requests a group is spread over many multiprocessors; with many requests there are enough CTAs already,
# each that finds nothing to do costs time, and all of them should be resident at once.
HCA_CHUNK, HCA_STEP, HCA_STEP_OF_MANY = (4, 2), (8, 1), (2, 1)
HCA_MANY_REQUESTS = 64  # above which a step is one of many

# Products of few rows. ``python -m benchmarks.layer products`` times those of V4-Flash with 1 to 4096 rows.
# What a cluster takes, by its size, and what a launch takes: as much as reading so many bytes by a block.
CLUSTER_BYTES = {1: 0, 2: 24 << 10, 4: 48 << 10, 8: 72 << 10}
LAUNCH_BYTES = 100 << 10
# With more than 64 rows: what a column of a tile takes for a chunk, in the same unit, widening a tile's chunk as if it
# had so many columns more, and a cluster in each wave. From times on an H100 with 256 and 4096 rows, as H100 and H200
# compute alike.
COLUMN_BYTES, WIDENING_COLUMNS, MEETINGS = 96, 48, 2.75
# Clusters that an H200 ran at once beyond those that every one runs (``GPU.clusters``). A card that lacks them runs
# them after the others.
MORE_CLUSTERS = {8: 1}
STAGES_OF_STREAMED = {1: 4, 2: 4, 3: 3, 4: 3, 5: 3}  # by the warpgroups of a block, with 64 rows
STREAMED_ROWS, STREAMED_ROWS_AS_GIVEN = 64, 32  # from which on x is copied chunk by chunk
COLUMNS_TO_LOAD_AT_ONCE = 32  # from which on both halves of a chunk's codes are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one program of a product becomes faster than another. ``python -m benchmarks.layer products``."""

    few_rows: int = 128  # up to which the kernel of few rows is the fastest
    few_rounded_rows: int = 64  # the same where rows are rounded to FP8, if there is another kernel
    many_rows_in_order: int = 1024  # from which products in the order of few rows have the kernel of many
    many_rows: int = 1024  # from which products with a wide weight have a kernel that leaves out padding
    # Numbers of a wide weight up to which its kernel is faster than XLA: for one row, and for 2 to 128, where XLA takes
    # two launches. The latter was measured with the compressors of CSA, 4096 -> 2624.
    small_weight: int = 1 << 22
    medium_weight: int = 1 << 24

    def few(self, activations: str) -> int:
        """Return up to how many rows products have the kernel of few rows where there is another one."""
        return self.few_rounded_rows if activations == "fp8" else self.few_rows


THRESHOLDS = Thresholds()
