"""How a product of many rows is divided: tiles of rows of x and outputs, the blocks that compute them, their memory.

A block has two warpgroups that multiply, and computes tile after tile. Where there are many tiles, two blocks compute
adjacent ones, and each copies half of what both need to both. Where there are fewer tiles than multiprocessors, the
blocks of a cluster share a tile: each multiplies a part of the inputs, and their sums are added in the order of the
parts.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARPGROUP, Value
from pallas_kernels.language.target import GPU
from pallas_kernels.products.block import WeightForm

WARPGROUPS = 2
LANES = WARPGROUPS * WARPGROUP
CHUNK_BYTES = 128  # of a row of x: what is in shared memory of it together
OUTPUTS = 128  # of a tile, at least
_SCALED_ROWS = 128  # rows of x in a tile where they are rounded to FP8: the instruction's 64 for each warpgroup
_MOST_COLUMNS = 256  # rows of x in a tile where they are bf16: the most columns of an instruction
_ALIGNMENT = 1024
_LEAST_STAGES, _MOST_STAGES = 3, 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiles of a product, and the blocks of its launch."""

    gpu: GPU
    form: WeightForm
    rows: int  # of x
    outputs: int  # of a group
    inputs: int  # of a group
    tile_rows: int
    tile_outputs: int
    parts: int = 1  # blocks that share a tile
    pair: int = 1  # blocks that compute adjacent tiles: 2, or 1 where ``parts`` is not
    stages: int = 4  # chunks in shared memory
    slack: int = 1  # chunks of them whose stage is refilled only later, so that nobody waits for the slowest

    @property
    def is_rounded(self) -> bool:
        return self.form.activations == "fp8"

    @property
    def chunk(self) -> int:
        """Inputs of a chunk."""
        return CHUNK_BYTES if self.is_rounded else CHUNK_BYTES // 2

    @property
    def chunks(self) -> int:
        """Chunks of a tile that a block multiplies."""
        return self.inputs // (self.chunk * self.parts)

    @property
    def cluster(self) -> int:
        return self.parts * self.pair

    @property
    def fours(self) -> int:
        """Groups of four sums that a lane has: for each eight columns of its products, two rows and two columns."""
        return (self.tile_outputs if self.is_rounded else self.tile_rows) // 8

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def row_places(self) -> int:
        """Tiles of the same outputs, or pairs of them: those that are rounded share the weight, others share x."""
        return -(-self.row_tiles // self.pair) if self.is_rounded else self.row_tiles

    @property
    def places(self) -> int:
        """Tiles, or pairs."""
        output_tiles = self.form.groups * self.outputs // self.tile_outputs
        return self.row_places * (output_tiles if self.is_rounded else output_tiles // self.pair)

    @property
    def room(self) -> int:
        """Clusters that run at once."""
        return self.gpu.multiprocessors if self.cluster == 1 else self.gpu.clusters[self.cluster]

    @property
    def blocks(self) -> int:
        """Clusters of the launch."""
        return self.places if self.parts > 1 else min(self.places, self.room)

    @property
    def stage_bytes(self) -> int:
        scales = _SCALED_ROWS * 4 if self.is_rounded else 0
        return self.tile_rows * CHUNK_BYTES + self.tile_outputs * self.chunk + scales

    def _shared(self, stages: int) -> int:
        exchanged = 0 if self.parts == 1 else self.tile_rows * self.tile_outputs * 4
        return max(stages * self.stage_bytes, exchanged) + 2 * 8 * stages + 2 * _ALIGNMENT

    @property
    def grid(self) -> Grid:
        return Grid(
            blocks=(self.blocks,), warpgroups=WARPGROUPS, cluster=self.cluster, shared_bytes=self._shared(self.stages)
        )

    @property
    def is_possible(self) -> bool:
        """Whether parts are whole chunks and get whole fours, and halves of what a pair shares are whole atoms."""
        if self.inputs % (self.chunk * self.parts) or self.fours % self.parts:
            return False
        if self.pair == 1 or self.is_rounded:
            return True
        return self.tile_rows % (8 * self.pair) == 0 and self.outputs % (self.pair * self.tile_outputs) == 0

    def with_most_stages(self) -> Tiling:
        """Return the same with as many stages as fit."""
        room = self.gpu.shared_bytes - SCRATCH_BYTES
        stages = next(n for n in range(_MOST_STAGES, 0, -1) if n == _LEAST_STAGES or self._shared(n) <= room)
        return dataclasses.replace(self, stages=stages)

    def place(self, number: Value, rank: Value) -> Place:
        """Return where the tile of a block is, by the number of its place. Those of the same outputs are adjacent."""
        of_rows, of_outputs = number % self.row_places, number // self.row_places
        if self.pair > 1 and self.is_rounded:
            of_rows = of_rows * self.pair + rank
        elif self.pair > 1:
            of_outputs = of_outputs * self.pair + rank
        group = of_outputs // (self.outputs // self.tile_outputs)
        return Place(row=of_rows * self.tile_rows, output=of_outputs * self.tile_outputs, x=group * self.inputs)

    def cost(self) -> float:
        """Return about how many cycles of a multiprocessor the product takes."""
        turns = -(-self.places // self.room)
        rate = 4096 if self.is_rounded else 2048  # products a cycle
        multiplied = self.tile_rows * self.tile_outputs * self.chunk / rate / _ACHIEVED
        shared = self.tile_outputs if self.is_rounded else self.tile_rows
        shared *= CHUNK_BYTES * (self.pair - 1) / self.pair
        copied = (self.stage_bytes - shared) / _BYTES_PER_CYCLE
        exchanged = 0 if self.parts == 1 else self.tile_rows * self.tile_outputs * 4 / _BYTES_PER_CYCLE
        stored = self.tile_rows * self.tile_outputs * 4 / _STORED_PER_CYCLE / self.parts
        return turns * (self.chunks * max(multiplied, copied) + exchanged + stored) + _START


# What the model of a block's time assumes: a share of the peak, bytes a cycle, and cycles before the first product.
_ACHIEVED, _BYTES_PER_CYCLE, _STORED_PER_CYCLE, _START = 0.75, 36, 48, 3000


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a tile is."""

    row: Value  # first row of x
    output: Value  # first output, of all groups
    x: Value  # first input of its group, in a row of x


@functools.cache
def fastest_tiling(rows: int, outputs: int, inputs: int, form: WeightForm, gpu: GPU) -> Tiling:
    """Return the tiling that is expected to be the fastest for a weight of so many outputs and inputs of a group."""
    if form.activations == "fp8":
        tiles = [(_SCALED_ROWS, size) for size in (2 * OUTPUTS, OUTPUTS) if outputs % size == 0]
    else:
        counts = sorted({-(-rows // _MOST_COLUMNS), -(-rows // (_MOST_COLUMNS // 2))})
        tiles = [(-(-rows // (8 * count)) * 8, OUTPUTS) for count in counts]
    found = []
    for tile_rows, tile_outputs in tiles:
        for parts, pair in ((1, 1), (1, 2), *((size, 1) for size in sorted(gpu.clusters))):
            tiling = Tiling(
                gpu=gpu,
                form=form,
                rows=rows,
                outputs=outputs,
                inputs=inputs,
                tile_rows=tile_rows,
                tile_outputs=tile_outputs,
                parts=parts,
                pair=pair,
            )
            if tiling.is_possible and (parts == 1 or tiling.places <= tiling.room):
                found.append(tiling.with_most_stages())
    return min(found, key=Tiling.cost)
