"""How a product of few rows is divided over the blocks of a launch, and over the shared memory of a block.

A warpgroup computes 64 outputs, a tile, for all rows of x that its block has, from a part of the inputs. The parts of a
tile are those of the blocks of a cluster, of warpgroups of a block, or both. Their sums are added in the order of the
parts. How many parts there are depends on the weight's shape alone. So the order in which a sum is formed depends
neither on the number of rows nor on other rows.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.target import GPU
from pallas_kernels.language.values import VECTOR
from pallas_kernels.products.epilogues.faces import TILE_PITCH
from pallas_kernels.products.few.staging import StagedRows
from pallas_kernels.products.problem import Epilogue, WeightSpec
from pallas_kernels.products.weights import CHUNK_BYTES, ROWS, STAGE_BYTES, TILE, Scales
from pallas_kernels.tuned import h200

_MOST_STAGES = 4  # of a tile's chunks that are in shared memory: with more, x waits for the memory behind them
# Rows from which on x is copied chunk by chunk.
_STREAMED_FROM: dict[type[ActivationRows], int] = {
    PlainRows: h200.STREAMED_ROWS,
    OperandRows: h200.STREAMED_OPERAND_ROWS,
}
_LEAST_STAGES = 3
EIGHT = 8  # columns of a product of which a lane has two rows and two columns
EIGHT_BYTES = WARPGROUP * VECTOR * 4  # of a warpgroup's sums of eight columns
_ALIGNMENT = 1024  # of the tiles of x
_BARRIER = 16  # bytes of a barrier, with what aligns others after it


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The blocks of a launch, and the shared memory of each."""

    gpu: GPU
    split: Split
    weight: WeightSpec
    epilogue: Epilogue
    rows: int  # of x
    columns: int  # rows of x in a block, a multiple of 8
    inputs: int  # of a chunk
    operand_bytes: int = 0  # shared memory of a warpgroup for widened weights
    streams: bool = False  # whether x is copied chunk by chunk, beside the weight; only where a block has one part
    first_block: int = 0  # of a launch that the product begins with, along the grid's first axis
    kind: type[ActivationRows] = PlainRows  # of x

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: they share the inputs of the same outputs, or what the epilogue makes of outputs."""
        return self.split.cluster * self.epilogue.blocks

    @property
    def stored(self) -> int:
        """Outputs of a tile of which something is stored: the first ones."""
        return TILE // 2 if self.epilogue.is_gated else TILE

    @property
    def owned(self) -> int:
        """How many eights of columns the warpgroup of each part of a tile adds up and stores."""
        return -(-(self.columns // EIGHT) // self.split.all_parts)

    def received_bytes(self) -> int:
        """Return the bytes of the sums of all parts that a block adds up."""
        split = self.split
        return 0 if split.all_parts == 1 else split.all_parts * split.warpgroups * self.owned * EIGHT_BYTES

    def _fixed_bytes(self) -> int:
        scales = 0 if self.weight.block is None else Scales.shared_bytes(self.split.warpgroups, self.split.chunks)
        sent = _BARRIER if self.cluster > 1 else 0
        return scales + self.epilogue.shared_bytes + sent + self.split.warpgroups * self.operand_bytes + 2 * _ALIGNMENT

    def _main_bytes(self, chunks: int, stages: int) -> int:
        """Return the bytes of x, in chunks of each part, and of stages of the weight."""
        x = StagedRows.shared_bytes(self.columns, self.inputs, self.split.parts * chunks, self.weight.activations)
        return x + stages * STAGE_BYTES * self.split.warpgroups

    def _most(self) -> tuple[int, int]:
        """Return the chunks of x and the stages of weights that fit."""
        room = self.gpu.shared_bytes - SCRATCH_BYTES - self._fixed_bytes()
        total = self.split.chunks
        if self.streams:
            assert self.split.parts == 1
            stages = max(2, min(h200.STAGES_OF_STREAMED[self.split.warpgroups], total))
            return stages + 1, stages
        least, most = max(2, min(_LEAST_STAGES, total)), max(2, min(_MOST_STAGES, total))
        for segments in range(1, total + 1):
            chunks = -(-total // segments)
            for stages in range(most, least - 1, -1):
                if self._main_bytes(chunks, stages) <= room:
                    return chunks, stages
        raise AssertionError("a chunk and a few stages always fit")

    def should_stream(self, most_warpgroups: int) -> bool:
        """Return whether x should be copied chunk by chunk, which so many warpgroups can do.

        As measured on an H200 this is faster with 64 rows, with 32 operand rows, and where not all of x fits.
        """
        split = self.split
        if self.weight.activations != "bf16" or split.parts > 1 or split.warpgroups > most_warpgroups:
            return False
        other = dataclasses.replace(self, streams=True)
        fits = other.grid.shared_bytes + SCRATCH_BYTES <= self.gpu.shared_bytes
        return (self.columns >= _STREAMED_FROM[self.kind] or self.segment < split.chunks) and fits

    def streamed(self, most_warpgroups: int) -> Layout:
        """Return the same with x as it ``should_stream``."""
        staged = dataclasses.replace(self, streams=False)
        return dataclasses.replace(staged, streams=staged.should_stream(most_warpgroups))

    @property
    def segment(self) -> int:
        """Chunks of each part of x that are in shared memory together.

        Where x is copied chunk by chunk, they are one more than stages of the weight. So while some warpgroups still
        multiply by a chunk, others may begin the next one and copy the one that is furthest ahead.
        """
        return self._most()[0]

    @property
    def stages(self) -> int:
        """Chunks of a tile that are in shared memory, one of which is being read."""
        return self._most()[1]

    @property
    def grid(self) -> Grid:
        last = self.received_bytes() + self.split.warpgroups * self.owned * EIGHT * TILE_PITCH
        return Grid(
            blocks=(self.weight.groups * self.split.blocks, -(-self.rows // self.columns)),
            warpgroups=self.split.warpgroups,
            cluster=self.cluster,
            shared_bytes=self._fixed_bytes() + max(last, self._main_bytes(self.segment, self.stages)),
        )


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
    sizes = [size for size in h200.CLUSTER_BYTES if size == 1 or size in gpu.clusters]

    def cost(split: Split, columns: int) -> int:
        room = gpu.multiprocessors
        if split.cluster > 1:
            room = gpu.clusters[split.cluster] + h200.MORE_CLUSTERS.get(split.cluster, 0)
        waves = -(-split.blocks * groups // room)
        read = split.parts * split.chunks * CHUNK_BYTES * (split.tiles * TILE + columns)
        return waves * read + h200.CLUSTER_BYTES[split.cluster]

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
