"""How the blocks of a product of few rows use shared memory, and how they copy rows of x."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.target import GPU
from pallas_kernels.language.values import VECTOR
from pallas_kernels.products.epilogues.faces import TILE_PITCH
from pallas_kernels.products.few.split import EIGHT, Split
from pallas_kernels.products.few.staging import AsGiven, ByLanes, Order, RowTile, StagedRows
from pallas_kernels.products.problem import Epilogue, WeightSpec
from pallas_kernels.products.weights import ROWS, STAGE_BYTES, TILE, Scales
from pallas_kernels.tuned import h200

_MOST_STAGES = 4  # of a tile's chunks that are in shared memory: with more, x waits for the memory behind them
# Rows from which on x is copied chunk by chunk.
_STREAMED_FROM: dict[type[Order], int] = {ByLanes: h200.STREAMED_ROWS, AsGiven: h200.STREAMED_ROWS_AS_GIVEN}
_LEAST_STAGES = 3
EIGHT_BYTES = WARPGROUP * VECTOR * 4  # of a warpgroup's sums of eight columns
_ALIGNMENT = 1024  # of the tiles of x
_BARRIER = 16  # bytes of a barrier, with what aligns others after it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The blocks of a launch, and the shared memory of each."""

    gpu: GPU
    split: Split
    weight: WeightSpec
    epilogue: Epilogue
    rows: int  # of x
    columns: int  # rows of x in a block, a multiple of 8 up to MOST_ROWS
    inputs: int  # of a chunk
    operand_bytes: int = 0  # shared memory of a warpgroup for widened weights
    streams: bool = False  # whether x is copied chunk by chunk, beside the weight; only where a block has one part
    first_block: int = 0  # of a launch that the product begins with, along the grid's first axis
    order: type[Order] = ByLanes  # of rows of x

    @property
    def tile(self) -> RowTile:
        return RowTile(columns=self.columns, inputs=self.inputs, order=self.order)

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
        return -(-(self.columns // EIGHT) // self.split.meeting)

    def received_bytes(self) -> int:
        """Return the bytes of the sums of all parts that a block adds up."""
        split = self.split
        return 0 if split.meeting == 1 else split.meeting * split.warpgroups * self.owned * EIGHT_BYTES

    def _fixed_bytes(self) -> int:
        scales = 0 if self.weight.block is None else Scales.shared_bytes(self.split.warpgroups, self.split.of_warpgroup)
        sent = _BARRIER if self.cluster > 1 else 0
        operands = self.split.warpgroups * self.operand_bytes
        return scales + self.epilogue.shared_bytes(self.columns) + sent + operands + 2 * _ALIGNMENT

    def _main_bytes(self, chunks: int, stages: int) -> int:
        """Return the bytes of x, in chunks of each part, and of stages of the weight."""
        x = StagedRows.shared_bytes(self.columns, self.inputs, self.split.parts * chunks, self.weight.activations)
        return x + stages * STAGE_BYTES * self.split.warpgroups

    def _most(self) -> tuple[int, int]:
        """Return the chunks of x and the stages of weights that fit."""
        room = self.gpu.shared_bytes - SCRATCH_BYTES - self._fixed_bytes()
        total = self.split.of_warpgroup
        if self.streams:
            assert self.split.parts == 1
            stages = max(2, min(h200.STAGES_OF_STREAMED[self.split.warpgroups], total))
            while stages > 2 and self._main_bytes(stages + 1, stages) > room:
                stages -= 1
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

        As measured on an H200 this is faster with 64 rows, with 32 that are copied as they are, and where not all of x
        fits.
        """
        split = self.split
        if self.weight.activations != "bf16" or split.parts > 1 or split.warpgroups > most_warpgroups:
            return False
        if self.columns > ROWS or split.turns > 1:
            return True
        other = dataclasses.replace(self, streams=True)
        fits = other.grid.shared_bytes + SCRATCH_BYTES <= self.gpu.shared_bytes
        return (self.columns >= _STREAMED_FROM[self.order] or self.segment < split.of_warpgroup) and fits

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
    def barriers(self) -> int:
        """Barriers of the block that it meets at, where it has all parts of the inputs and stores x before."""
        assert not self.streams
        assert self.cluster == 1
        segments = -(-self.split.of_warpgroup // self.segment)
        return 2 * segments + (1 if self.split.parts > 1 else 0)

    @property
    def grid(self) -> Grid:
        last = self.received_bytes() + self.split.warpgroups * self.owned * EIGHT * TILE_PITCH
        return Grid(
            blocks=(self.weight.groups * self.split.blocks, -(-self.rows // self.columns)),
            warpgroups=self.split.warpgroups,
            cluster=self.cluster,
            shared_bytes=self._fixed_bytes() + max(last, self._main_bytes(self.segment, self.stages)),
        )
