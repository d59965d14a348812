"""How a product of many rows is divided: tiles of rows of x and outputs, the blocks that compute them, their memory.

A block has two warpgroups that multiply and one that loads, and computes tile after tile. Where there are fewer tiles
than multiprocessors, the blocks of a cluster share a tile: each multiplies a part of the inputs, and their sums are
added in the order of the parts. Where outputs are heads, the blocks of a cluster have the adjacent tiles of a head.
Where sums must have the order of a product of few rows, a block has all of that one's parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.target import GPU
from pallas_kernels.language.values import Value
from pallas_kernels.products.epilogues.faces import TileShape
from pallas_kernels.products.problem import Epilogue, WeightSpec

WARPGROUPS, LOADERS = 2, 1  # that multiply, and of which a warp starts copies
LANES = WARPGROUPS * WARPGROUP
CHUNK_BYTES = 128  # of a row of x: what is in shared memory of it together
OUTPUTS = 128  # of a tile, at least
_SCALED_ROWS = 128  # rows of x in a tile where they are rounded to FP8: the instruction's 64 for each warpgroup
_MOST_ROWS, _FEW_ROWS = (256, 192, 128), 64  # of a tile where rows are bf16: an instruction has at most 256 columns
_MOST_ROWS_OF_PARTS = 192, 128  # of a tile whose totals are in registers, too
_ALIGNMENT = 1024
_LEAST_STAGES, _MOST_STAGES = 3, 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiles of a product, and the blocks of its launch."""

    gpu: GPU
    weight: WeightSpec
    epilogue: Epilogue
    rows: int  # of x
    tile_rows: int
    tile_outputs: int
    parts: int = 1  # blocks that share a tile
    own_parts: int = 1  # that a block multiplies one after the other, and adds their sums
    stages: int = 4  # chunks in shared memory
    kind: type[ActivationRows] = PlainRows  # of x, before it is rounded

    @property
    def is_rounded(self) -> bool:
        return self.weight.activations == "fp8"

    @property
    def is_wide(self) -> bool:
        """Whether the weight is bf16."""
        return self.weight.block is None

    @property
    def chunk(self) -> int:
        """Inputs of a chunk."""
        return CHUNK_BYTES if self.is_rounded else CHUNK_BYTES // 2

    @property
    def weight_chunk_bytes(self) -> int:
        """Bytes of a chunk of an output."""
        return self.chunk * (2 if self.is_wide else 1)

    @property
    def chunks(self) -> int:
        """Chunks of a tile that a block multiplies."""
        return self.weight.inputs // (self.chunk * self.parts)

    @property
    def of_part(self) -> int:
        """Chunks of them whose sums are added up before they are added to those of other parts."""
        return self.chunks // self.own_parts

    @property
    def fours(self) -> int:
        """Groups of four sums that a lane has: for each eight columns of its products, two rows and two columns."""
        return (self.tile_outputs if self.is_rounded else self.tile_rows) // 8

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def neighbours(self) -> int:
        """Blocks of a cluster that have adjacent tiles."""
        return self.epilogue.neighbours(self.tile_outputs)

    @property
    def tile_shape(self) -> TileShape:
        return TileShape(neighbours=self.neighbours, rows=self.tile_rows, warpgroups=WARPGROUPS)

    @property
    def output_tiles(self) -> int:
        """Tiles, or groups of neighbours, of the same rows."""
        return self.weight.groups * self._tiles_of_group

    @property
    def _tiles_of_group(self) -> int:
        return -(-self.weight.outputs // (self.tile_outputs * self.neighbours))

    @property
    def tiles(self) -> int:
        """Tiles, or groups of neighbours."""
        return self.row_tiles * self.output_tiles

    @property
    def cluster(self) -> int:
        return self.parts * self.neighbours

    @property
    def room(self) -> int:
        """Blocks, or clusters, that run at once."""
        return self.gpu.multiprocessors if self.cluster == 1 else self.gpu.clusters[self.cluster]

    @property
    def blocks(self) -> int:
        """Blocks, or clusters, of the launch."""
        return min(self.tiles, self.room) if self.parts == 1 else self.tiles

    @property
    def stage_bytes(self) -> int:
        scales = _SCALED_ROWS * 4 if self.is_rounded else 0
        return self.tile_rows * CHUNK_BYTES + self.tile_outputs * self.weight_chunk_bytes + scales

    def _shared(self, stages: int) -> int:
        exchanged = 0 if self.parts == 1 else self.tile_rows * self.tile_outputs * 4
        epilogue = self.epilogue.shared_bytes_of_many(self.tile_shape)
        return max(stages * self.stage_bytes, exchanged) + 2 * 8 * (stages + 1) + 2 * _ALIGNMENT + epilogue

    @property
    def grid(self) -> Grid:
        return Grid(
            blocks=(self.blocks,),
            warpgroups=WARPGROUPS + LOADERS,
            cluster=self.cluster,
            shared_bytes=self._shared(self.stages),
        )

    @property
    def is_possible(self) -> bool:
        """Whether parts are whole chunks, blocks add up whole fours, and all clusters run at once."""
        if self.weight.inputs % (self.chunk * self.parts * self.own_parts) or self.fours % self.parts:
            return False
        return self.parts == 1 or self.tiles <= self.room

    def with_most_stages(self) -> Tiling:
        """Return the same with as many stages as fit."""
        room = self.gpu.shared_bytes - SCRATCH_BYTES
        stages = next(n for n in range(_MOST_STAGES, 0, -1) if n == _LEAST_STAGES or self._shared(n) <= room)
        return dataclasses.replace(self, stages=stages)

    def place(self, number: Value, of_outputs: Value, rank: Value) -> Place:
        """Return where a tile is, by its number, that of its outputs, and the block's rank."""
        outputs = self.tile_outputs * self.neighbours
        output, group = of_outputs * outputs, of_outputs // self._tiles_of_group
        if self.neighbours > 1:
            output = rank * self.tile_outputs + output
        return Place(number=number, of_outputs=of_outputs, output=output, x=group * self.weight.inputs)

    def cost(self) -> float:
        """Return about how many cycles of a multiprocessor the product takes, by times of V4-Flash's shapes on an H200.

        They have an error of up to a fifth.
        """
        size = self.tile_rows * self.tile_outputs * 4
        if self.is_wide:
            chunk = 4.0 * self.tile_rows  # what tensor cores take
        else:
            chunk = 330 + 5 * self.tile_outputs if self.is_rounded else 640 + 2.5 * self.tile_rows
        exchanged = 0 if self.parts == 1 else size / _EXCHANGED_PER_CYCLE[self.parts]
        stored = size / _STORED_PER_CYCLE / self.parts
        return -(-self.tiles // self.room) * (self.chunks * chunk + exchanged + stored) + _START


_EXCHANGED_PER_CYCLE, _STORED_PER_CYCLE = {2: 24, 4: 13, 8: 9}, 33  # bytes; the first by the number of parts
_START = 3000  # cycles before the first product


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a tile is."""

    number: Value
    of_outputs: Value  # its number among tiles of the same rows
    output: Value  # first output, of all groups
    x: Value  # first input of its group, in a row of x


@functools.cache
def tiling_of_heads(rows: int, weight: WeightSpec, epilogue: Epilogue, gpu: GPU) -> Tiling:
    """Return the tiling of a product with rows that are rounded to FP8, whose outputs are heads.

    Where the blocks of a cluster share heads, tiles are the largest. The others are of one part.
    """
    tilings = _scaled_tilings(rows, weight, epilogue, gpu)
    shares = tilings[0].neighbours > 1
    return (tilings[0] if shares else min(tilings, key=Tiling.cost)).with_most_stages()


def _scaled_tilings(rows: int, weight: WeightSpec, epilogue: Epilogue, gpu: GPU) -> list[Tiling]:
    """Return the tilings of one part with rows that are rounded to FP8, those of large tiles first."""
    return [
        Tiling(gpu=gpu, weight=weight, epilogue=epilogue, rows=rows, tile_rows=_SCALED_ROWS, tile_outputs=size)
        for size in (2 * OUTPUTS, OUTPUTS)
        if weight.outputs % size == 0
    ]


@functools.cache
def fastest_tiling(rows: int, weight: WeightSpec, epilogue: Epilogue, gpu: GPU) -> Tiling:
    """Return the tiling of a product whose sums are stored that is expected to be the fastest."""
    if weight.activations == "fp8":
        alone = _scaled_tilings(rows, weight, epilogue, gpu)
    else:
        counts = {-(-rows // most) for most in _MOST_ROWS}
        if weight.block is None:
            counts |= set(range(min(counts), max(counts)))
        elif rows <= 2 * _FEW_ROWS:  # then one tile of all rows may give too few blocks
            counts.add(-(-rows // _FEW_ROWS))
        of_all = Tiling(gpu=gpu, weight=weight, epilogue=epilogue, rows=rows, tile_rows=rows, tile_outputs=OUTPUTS)
        alone = _tilings(of_all, counts)
    in_parts = [dataclasses.replace(tiling, parts=parts) for tiling in alone for parts in sorted(gpu.clusters)]
    return _cheapest([*alone, *in_parts])


@functools.cache
def fastest_tiling_in_order(rows: int, weight: WeightSpec, epilogue: Epilogue, gpu: GPU, parts: int) -> Tiling:
    """Return the tiling whose sums have the order of a product of few rows with so many parts.

    Rows are operand rows, or, where the weight is wide, in order.
    """
    of_all = Tiling(
        gpu=gpu,
        weight=weight,
        epilogue=epilogue,
        rows=rows,
        tile_rows=rows,
        tile_outputs=OUTPUTS,
        own_parts=parts,
        kind=PlainRows if weight.block is None else OperandRows,
    )
    least, *_, most = (-(-rows // size) for size in (_MOST_ROWS if parts == 1 else _MOST_ROWS_OF_PARTS))
    return _cheapest(_tilings(of_all, range(least, most + 1)))


def _tilings(of_all: Tiling, counts: Iterable[int]) -> list[Tiling]:
    """Return the tilings with so many tiles of rows, those of few rows first."""
    # Some have more rows than they need, so that parts of a cluster can share their sums.
    sizes = {-(-of_all.rows // (atom * count)) * atom for count in counts for atom in (8, 16, 32, 64)}
    return [dataclasses.replace(of_all, tile_rows=size) for size in sorted(sizes)]


def _cheapest(tilings: list[Tiling]) -> Tiling:
    return min((tiling.with_most_stages() for tiling in tilings if tiling.is_possible), key=Tiling.cost)
