"""How experts' products are divided: units of work, the blocks that compute them, and the memory of a block.

A unit is a tile of rows and 256 outputs of its expert, in two boxes of 128 adjacent ones. Every warpgroup multiplies
all inputs of its 64 or 128 outputs, in the same order whatever the tile's size is. So the sums of a row do not depend
on the rows beside it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.activations import ActivationRows, PlainRows
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.target import GPU
from pallas_kernels.products.experts.epilogues import ExpertEpilogue
from pallas_kernels.products.problem import ExpertsSpec, Needed, Problem
from pallas_kernels.router.tiles import SMALL

BOXES, BOX = 2, 128  # boxes of a unit's outputs, and outputs of a box
OUTPUTS = BOXES * BOX
PART = 64  # outputs that a warpgroup multiplies at once
HALF = 128  # inputs of which a lane has 16 bytes of FP4
SCALE_INPUTS = 32
SCALE_BYTES = 16  # of an output, that are copied together
SCALED = SCALE_BYTES * SCALE_INPUTS  # inputs that have them
TILE_ROWS = (8, 16, 32, 64, 96, 112)
TILE_BYTES = 128  # of a row of x in a tile
# Numbers of a unit's gated row in shared memory. With eight more, lanes that store in adjacent rows use all banks.
GATED_NUMBERS = BOX + 8
GATHERERS = 2  # warps that find rows of x, and copy them
_ALIGNMENT, _BARRIER_BYTES = 1024, 16
# Rows of x that were copied are shown when the copy of the next chunk is started, and a chunk is left after the first
# product of the next one. So with two stages everybody would wait.
_LEAST_STAGES, _MOST_STAGES = 3, 4
_TABLE_BYTES = 12  # of a row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The division of a product."""

    gpu: GPU
    weight: ExpertsSpec
    epilogue: ExpertEpilogue
    stages: int  # chunks in shared memory
    blocks: int
    rows: int  # the most of a tile. Tiles are those that are not small, or the small ones: see ``router.tiles``

    @property
    def is_small(self) -> bool:
        """Whether the tiles of the launch are small ones."""
        return self.rows <= SMALL

    @property
    def is_rounded(self) -> bool:
        """Whether rows of x are in FP8."""
        return self.weight.activations == "fp8"

    @property
    def rounds(self) -> bool:
        """Whether what it makes is rounded to FP8."""
        return self.is_rounded and self.epilogue.is_gated

    @property
    def itemsize(self) -> int:
        """Bytes of a number of x."""
        return 1 if self.is_rounded else 2

    @property
    def warpgroups(self) -> int:
        """That multiply."""
        return 4 if self.is_small else 2

    @property
    def warps(self) -> int:
        """That multiply."""
        return self.warpgroups * WARPGROUP // WARP

    @property
    def parts(self) -> int:
        """Of a warpgroup, of 64 outputs each."""
        return OUTPUTS // PART // self.warpgroups

    @property
    def inputs(self) -> int:
        """Of a chunk."""
        return 2 * HALF if self.is_small else HALF

    @property
    def halves(self) -> int:
        """Of a chunk."""
        return self.inputs // HALF

    @property
    def quarters(self) -> int:
        """Tiles of x of a chunk."""
        return self.inputs // self.tile_inputs

    @property
    def tile_inputs(self) -> int:
        """Of a tile of x, and of a product."""
        return TILE_BYTES // self.itemsize

    @property
    def x_scale_bytes(self) -> int:
        """Of the scales of x in a chunk, with what aligns others after them."""
        return -(-self.halves * self.rows * 4 // TILE_BYTES) * TILE_BYTES if self.is_rounded else 0

    @property
    def gathers(self) -> bool:
        """Whether rows of a tile are anywhere in x. Otherwise they are adjacent."""
        return self.epilogue.takes_tokens and not self.sorts

    @property
    def sorts(self) -> bool:
        """Whether a launch makes rows of sorted pairs from those of tokens before."""
        return self.epilogue.takes_tokens and self.epilogue.routing.is_sorted

    @property
    def copies_itself(self) -> bool:
        """Whether warps copy rows of x, or their scales, themselves.

        Scales of adjacent rows begin anywhere in a row of scales. A bulk copy must begin at a multiple of 16 bytes.
        """
        return self.gathers or self.is_rounded

    @property
    def loads_early(self) -> bool:
        """Whether all lanes load the first tile. Those that multiply most rows in FP8 have no registers to keep it."""
        return not self.is_rounded or self.rows < SMALL

    @property
    def row_bytes(self) -> int:
        """Codes of an output in a chunk."""
        return self.inputs // 2

    @property
    def chunks(self) -> int:
        return self.weight.inputs // self.inputs

    @property
    def scaled_chunks(self) -> int:
        """Chunks whose scales are copied together."""
        return SCALED // self.inputs

    @property
    def units(self) -> int:
        """Of a tile."""
        return self.weight.outputs // OUTPUTS

    @property
    def most_units(self) -> int:
        """Of all tiles that there can be."""
        return self.epilogue.routing.shapes.tiles.shape[0] * self.units

    @property
    def second(self) -> int:
        """Distance of the outputs of the second box from those of the first."""
        return self.weight.outputs // 2 if self.epilogue.is_gated else BOX

    @property
    def unit_outputs(self) -> int:
        """Distance of the first outputs of adjacent units."""
        return BOX if self.epilogue.is_gated else OUTPUTS

    @property
    def scale_slots(self) -> int:
        """Places for scales.

        They are filled with the first of their chunks, when the chunk ``stages`` before it was left.
        """
        return _power(-(-(self.stages + self.scaled_chunks - 1) // self.scaled_chunks))

    @property
    def table_slots(self) -> int:
        """Places for what is known of a unit's rows.

        They are filled before the unit's first chunk, when the chunk ``stages`` + 1 before it was left at least. Those
        who multiply use them until they begin the next unit.
        """
        return _power(1 + -(-(self.stages + 1) // self.chunks))

    @property
    def shared_bytes(self) -> int:
        stage = OUTPUTS * self.row_bytes + self.rows * self.inputs * self.itemsize + _BARRIER_BYTES
        stage += self.x_scale_bytes
        scales = self.scale_slots * OUTPUTS * SCALE_BYTES
        gated = 2 * GATED_NUMBERS * self.rows if self.rounds else 0
        return self.stages * stage + scales + gated + self.table_slots * self.rows * _TABLE_BYTES + 2 * _ALIGNMENT

    @property
    def fits(self) -> bool:
        return self.shared_bytes + SCRATCH_BYTES <= self.gpu.shared_bytes

    @property
    def grid(self) -> Grid:
        return Grid(blocks=(self.blocks,), warpgroups=self.warpgroups + 1, shared_bytes=self.shared_bytes)


def _power(number: int) -> int:
    """Return the power of two from a number up: a remainder by it is one instruction."""
    return 1 << (number - 1).bit_length()


def kind_of(epilogue: ExpertEpilogue) -> type[ActivationRows]:
    """Return in which class a product takes rows of x."""
    return PlainRows if epilogue.takes_tokens else epilogue.routing.row_kind


def layouts_of(weight: ExpertsSpec, epilogue: ExpertEpilogue, gpu: GPU) -> tuple[Layout, ...]:
    """Return the divisions of a product's launches: of small tiles, and before it of others if there may be such."""
    routing = epilogue.routing
    sizes = [routing.rows, SMALL] if routing.has_large else [routing.rows]
    return tuple(_layout_of(weight, epilogue, gpu, rows) for rows in sizes)


def _layout_of(weight: ExpertsSpec, epilogue: ExpertEpilogue, gpu: GPU, rows: int) -> Layout:
    """Return the division for tiles of so many rows, with as many stages as fit."""
    for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
        found = Layout(gpu=gpu, weight=weight, epilogue=epilogue, stages=stages, blocks=gpu.multiprocessors, rows=rows)
        if found.fits:
            return dataclasses.replace(found, blocks=min(found.blocks, max(found.most_units, 1)))
    raise AssertionError(f"{_LEAST_STAGES} stages of tiles of {rows} rows fit into shared memory")


def unserved(problem: Problem, weight: ExpertsSpec, epilogue: ExpertEpilogue, gpu: GPU) -> str | None:
    """Return why the kernel does not serve a product, or None if it does."""
    (outputs, inputs), rows, routing = weight.shape, problem.rows, epilogue.routing
    if gpu.architecture != "sm90":
        return "the GPU is no Hopper"
    if weight.block != (1, SCALE_INPUTS):
        return f"experts must be FP4 with blocks of (1, {SCALE_INPUTS}), got {weight.block}"
    if weight.activations not in ("bf16", "fp8"):
        return f"experts multiply rows of bf16 or fp8, got activations={weight.activations!r}"
    if outputs % OUTPUTS or inputs % SCALED:
        return f"experts must have a multiple of {OUTPUTS} outputs and {SCALED} inputs, got {weight.shape}"
    if rows.kind is not (kind := kind_of(epilogue)):
        return f"rows must be {kind.__name__}, got {rows.kind.__name__}"
    if kind is PlainRows and jnp.dtype(rows.dtype) != jnp.bfloat16:
        return f"rows must be bfloat16, got {jnp.dtype(rows.dtype)}"
    if routing.rows not in TILE_ROWS:
        return f"tiles must have one of {TILE_ROWS} rows, got {routing.rows}"
    if routing.activations != weight.activations:
        return f"tiles are for activations={routing.activations!r}, the weight has {weight.activations!r}"
    if routing.experts != weight.experts:
        return f"tiles are of {routing.experts} experts, the weight has {weight.experts}"
    if problem.needed is not Needed.ALL:
        return "padding is in no tile, so needed must be Needed.ALL"
    return None
