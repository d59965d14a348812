"""What the kernels of both architectures share: the place of a block in the product, its memory, and its last steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import VECTOR, Condition, Index, Value, select
from pallas_kernels.operand_rows import OperandRows, sources_of_unit
from pallas_kernels.products.activations import Activations
from pallas_kernels.products.exchange import Exchange, owned_eights, part_number, received_bytes
from pallas_kernels.products.queries import PADDING, Lanes, Lines, QueryHeads
from pallas_kernels.products.residual import LoadedResidual, Place, Residual
from pallas_kernels.products.split import ROWS, TILE, Split
from pallas_kernels.products.streamed import StreamedRows
from pallas_kernels.products.weights import (
    STAGE_BYTES,
    Scales,
    StoredTile,
    as_operand,
    widen,
)

_MOST_STAGES = 4  # of a tile's chunks that are in shared memory: with more, x waits for the memory behind them
# The same where x is copied chunk by chunk too, by so many warpgroups: as measured on an H200 with 64 rows.
_STREAMED = {1: 4, 2: 4, 3: 3, 4: 3, 5: 3}
_STREAMED_OPERAND = 32  # operand rows from which they are copied chunk by chunk
_LEAST_STAGES = 3
_EIGHT = 8  # columns of a product of which a lane has two rows and two columns
_ROW_PITCH = TILE * 4 + 16  # bytes from one row to the next, where outputs are gathered: in other banks
_ALIGNMENT = 1024  # of the tiles of x
_BARRIER = 16  # bytes of a barrier, with what aligns others after it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductInputs:
    """The arrays of a product, or their buffers."""

    x: Any  # bf16 [M, groups * inputs], or OperandRows
    weight: Any  # bf16 or uint8 [groups * outputs, inputs]
    scales: Any  # uint8 [groups * outputs / block, inputs / block], None for bf16
    angles: Any = None  # f32 [M, rope_dim], cosines and then sines, where the outputs become queries
    residual: Residual | None = None  # what the product is added to
    # The weight and the scales of a second product with the same rows, of which blocks have tiles, too.
    beside: tuple[Any, Any] | None = None

    def of_tile(self, is_beside: Value) -> tuple[Buffer, Buffer]:
        """Return weight and scales of the product whose tile a lane computes, as if both had the same shape."""
        assert self.beside is not None
        first = self.weight, self.scales
        alike = (dataclasses.replace(b, shape=a.shape) for a, b in zip(first, self.beside, strict=True))
        weight, scales = (a.instead(is_beside, b) for a, b in zip(first, alike, strict=True))
        return weight, scales


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """How a weight [groups * outputs, inputs] is stored, and how a product with it is meant."""

    block: tuple[int, int] | None = None  # outputs and inputs of a scale; None for bf16, which has none
    groups: int = 1  # outputs of group g are products with inputs [g * inputs, (g + 1) * inputs) of x
    # "bf16" takes x as it is. "fp8" first rounds each 128 inputs of a row to E4M3, by the smallest power of two of
    # which 448 times is at least 1e-4 and their largest magnitude. Sums over 128 inputs are then added up in f32.
    activations: str = "bf16"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The blocks of a launch, and the shared memory of each."""

    gpu: GPU
    split: Split
    form: WeightForm
    rows: int  # of x
    columns: int  # rows of x in a block, a multiple of 8
    inputs: int  # of a chunk
    operand_bytes: int = 0  # shared memory of a warpgroup for widened weights
    streams: bool = False  # whether x is copied chunk by chunk, beside the weight; only where a block has one part
    first_block: int = 0  # of a launch that the product begins with, along the grid's first axis
    heads: QueryHeads | None = None  # what the outputs become, of one group, if they are queries
    beside: int = 0  # tiles of a block, its last ones, that are of a second weight

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: they share the inputs of the same outputs, or the outputs of a head."""
        return self.split.cluster if self.heads is None else self.split.cluster * self.heads.blocks

    @property
    def owned(self) -> int:
        """How many eights of columns the warpgroup of each part of a tile adds up and stores."""
        return owned_eights(self.split, self.columns // _EIGHT)

    def received_bytes(self) -> int:
        """Return the bytes of the sums of all parts that a block adds up."""
        return received_bytes(self.split, self.columns // _EIGHT)

    def _fixed_bytes(self) -> int:
        scales = 0 if self.form.block is None else Scales.shared_bytes(self.split.warpgroups, self.split.chunks)
        queries = 0 if self.heads is None else self.heads.shared_bytes
        sent = _BARRIER if self.cluster > 1 else 0
        return scales + queries + sent + self.split.warpgroups * self.operand_bytes + 2 * _ALIGNMENT

    def _main_bytes(self, chunks: int, stages: int) -> int:
        """Return the bytes of x, in chunks of each part, and of stages of the weight."""
        x = Activations.shared_bytes(self.columns, self.inputs, self.split.parts * chunks, self.form.activations)
        return x + stages * STAGE_BYTES * self.split.warpgroups

    def _most(self) -> tuple[int, int]:
        """Return the chunks of x and the stages of weights that fit."""
        room = self.gpu.shared_bytes - SCRATCH_BYTES - self._fixed_bytes()
        total = self.split.chunks
        if self.streams:
            assert self.split.parts == 1
            stages = max(2, min(_STREAMED[self.split.warpgroups], total))
            return stages + 1, stages
        least, most = max(2, min(_LEAST_STAGES, total)), max(2, min(_MOST_STAGES, total))
        for segments in range(1, total + 1):
            chunks = -(-total // segments)
            for stages in range(most, least - 1, -1):
                if self._main_bytes(chunks, stages) <= room:
                    return chunks, stages
        raise AssertionError("a chunk and a few stages always fit")

    def should_stream(self, most_warpgroups: int, *, is_operand: bool = False) -> bool:
        """Return whether x should be copied chunk by chunk, which so many warpgroups can do.

        As measured on an H200 this is faster with 64 rows, with 32 operand rows, and where not all of x fits.
        """
        split = self.split
        if self.form.activations != "bf16" or split.parts > 1 or split.warpgroups > most_warpgroups:
            return False
        other = dataclasses.replace(self, streams=True)
        fits = other.grid.shared_bytes + SCRATCH_BYTES <= self.gpu.shared_bytes
        return (self.columns >= (_STREAMED_OPERAND if is_operand else ROWS) or self.segment < split.chunks) and fits

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
        last = self.received_bytes() + self.split.warpgroups * self.owned * _EIGHT * _ROW_PITCH
        return Grid(
            blocks=(self.form.groups * self.split.blocks, -(-self.rows // self.columns)),
            warpgroups=self.split.warpgroups,
            cluster=self.cluster,
            shared_bytes=self._fixed_bytes() + max(last, self._main_bytes(self.segment, self.stages)),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A block, from the view of one of its lanes."""

    machine: TensorCores
    layout: Layout
    activations: Activations | StreamedRows
    scales: Scales | None
    tile: StoredTile  # of the lane's warpgroup
    stored_scales: Buffer | None  # those of the weight
    row: Value  # first row of x
    place: Value  # the block's, among those of its group of outputs
    output: Value  # first output of the tile
    first: Value  # first input of the warpgroup's part
    part: Value  # the warpgroup's, among those of the block
    sent: Barrier | None  # for what other blocks of the cluster send
    arena: int  # where the shared memory begins that the last steps use again

    @classmethod
    def of(cls, machine: TensorCores, inputs: ProductInputs, layout: Layout) -> Block:
        """Take shared memory, after that for an architecture's own use."""
        split = layout.split
        outputs, width = inputs.weight.shape
        tiles = outputs // layout.form.groups // TILE
        number = machine.block(0) - layout.first_block if layout.first_block else machine.block(0)
        group, place = number // split.blocks, number % split.blocks
        if layout.heads is not None and layout.heads.blocks > 1:
            assert split.cluster == 1, "blocks share a head, or inputs"
            place = place * layout.heads.blocks + machine.rank
        warpgroup, own = machine.thread // WARPGROUP, split.tiles - layout.beside
        mine, part = place * own + warpgroup // split.parts, warpgroup % split.parts
        there = True if tiles % own == 0 else mine < tiles
        weight, of_weight = inputs.weight, inputs.scales
        if layout.beside:
            is_beside = warpgroup >= own
            weight, of_weight = inputs.of_tile(is_beside)
            mine = select(is_beside, place * layout.beside + (warpgroup - own), mine)
        part_inputs = split.chunks * layout.inputs
        rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
        of_block = rank * (split.parts * part_inputs)
        first = of_block + part * part_inputs
        output, row = (group * tiles + mine) * TILE, machine.block(1) * layout.columns
        sent = Barrier.take(machine, 1, scope="cluster") if layout.cluster > 1 else None
        scales = None if inputs.scales is None else Scales.take(machine, split.warpgroups, split.chunks)
        place_of_x = row, group * width + of_block
        if layout.streams:
            activations = StreamedRows.take(
                machine,
                inputs.x,
                place_of_x,
                columns=layout.columns,
                inputs=layout.inputs,
                slots=layout.segment,
                warpgroups=split.warpgroups,
            )
        else:
            activations = Activations.take(
                machine,
                inputs.x,
                place_of_x,
                columns=layout.columns,
                inputs=layout.inputs,
                segment=layout.segment,
                split=split,
                rounding=layout.form.activations,
            )
        rooms = StoredTile.take_rooms(machine, split.warpgroups, layout.stages)
        assert isinstance(activations.tiles.offset, int), "nothing is selected yet"
        return cls(
            machine=machine,
            layout=layout,
            activations=activations,
            scales=scales,
            tile=StoredTile.of(machine, weight, (output, first), there, rooms),
            stored_scales=of_weight,
            row=row,
            place=place,
            output=output,
            first=first,
            part=part,
            sent=sent,
            arena=activations.tiles.offset,
        )

    @property
    def staged(self) -> Activations:
        """The rows of x of a block that stores them before it multiplies."""
        assert isinstance(self.activations, Activations)
        return self.activations

    def multiply(
        self,
        step: Callable[[Value, Value, Index, Any], Any],
        carry: Any,
        settle: Callable[[int], None] = lambda chunks: None,
    ) -> Any:
        """Return the carry of ``step(number of a chunk, its number in x's memory, its stage, carry)`` over all chunks.

        Chunks of the weight are copied ahead, and x is stored, where ``step`` finds it. It must call ``advance`` when
        it has loaded the chunk of the weight. ``settle`` waits until the products with so many chunks no longer read x.
        """
        machine, split, activations = self.machine, self.layout.split, self.staged
        starts = range(0, split.chunks, self.layout.segment)
        sizes = [min(self.layout.segment, split.chunks - start) for start in starts]
        self._begin()
        for start, size in zip(starts, sizes, strict=True):
            if start:
                settle(start)
                machine.barrier("block")  # nobody reads the last segment any more
            activations.stage(start, size)
            machine.barrier("block")

            def one(i: Value, carry: Any, start: int = start, size: int = size) -> Any:
                machine.wait_copies(pending=self.layout.stages - 2)
                machine.barrier("warp")  # which copied what its lanes read
                return step(i + start, self.part * size + i, (i + start) % self.layout.stages, carry)

            carry = machine.loop(size, one, carry)
        return carry

    def stream(self, step: Callable[[Value, Tile, Index, Any], Any], carry: Any) -> Any:
        """Return the carry of ``step(number of a chunk, its x, its stage, carry)`` over all chunks.

        Chunks of the weight and of x are copied ahead. ``step`` must call ``advance`` when it has loaded the chunk of
        the weight, or has waited for the products of the chunk before. Those of its own may still run when it ends.
        """
        machine, x = self.machine, self.activations
        assert isinstance(x, StreamedRows)
        self._begin()

        def one(i: Value, carry: Any) -> Any:
            machine.wait_copies(pending=self.layout.stages - 2)
            machine.fence_shared()
            machine.barrier("block")
            return step(i, x.tile(i % self.layout.segment), i % self.layout.stages, carry)

        return machine.loop(self.layout.split.chunks, one, carry)

    def _begin(self) -> None:
        """Start to copy the first chunks, store the scales, and expect what other blocks will send.

        To be followed by a barrier of the block.
        """
        chunks, loaded = self.layout.split.chunks, []
        if self.scales is not None:  # first, because they are waited for first
            assert self.stored_scales is not None
            assert self.layout.form.block is not None
            loaded = self.scales.load(self.stored_scales, self.layout.form.block, (self.output, self.first))
        self._copy(0, True)
        if self.scales is not None:
            self.scales.store(loaded)
        # After the wait for the scales, because the first chunk is there later if all are asked for at once.
        for chunk in range(1, self.layout.stages - 1):
            self._copy(chunk, chunk < chunks)
        if self.sent is None:
            return
        machine, heads, shares_inputs = self.machine, self.layout.heads, self.layout.split.cluster > 1
        init_barriers(self.sent)
        with machine.when(machine.thread < WARP):
            if shares_inputs:
                self.sent.expect(self._exchange.expected_bytes())
            else:
                assert heads is not None, "blocks of a cluster share inputs, or a head"
                self.sent.expect(heads.sent_bytes(self.layout.columns))
        if not shares_inputs:  # ``finish`` waits for blocks that had not begun
            machine.cluster_arrive()

    def advance(self, chunk: Value) -> None:
        """Start to copy the chunk that takes the room of the one before this."""
        following = chunk + (self.layout.stages - 1)
        self._copy(following, following < self.layout.split.chunks)

    def _copy(self, chunk: Index, where: Condition) -> None:
        """Start to copy a chunk, as one group of copies."""
        self.tile.copy(chunk, chunk % self.layout.stages, where)
        if isinstance(self.activations, StreamedRows):
            self.activations.copy(chunk, chunk % self.layout.segment, where)
        self.machine.close_copies()

    def operand(self, chunk: Value, half: int, words: list[list[Value]]) -> list[Value]:
        """Return half a chunk of the weight, which ``tile.load`` gave, as a left operand."""
        if self.scales is None or self.layout.form.activations == "fp8":
            return as_operand(words)
        return widen(self.machine, words, self.scales.of_half(chunk, half))

    def scaled_sum(
        self, chunk: Value, i: Value, product: Callable[[int], list[Value]], sums: list[Value]
    ) -> list[Value]:
        """Add the product of a chunk of FP8 weights and x rounded to FP8, times both scales.

        ``product(n)`` are the four values of the n-th eight columns.
        """
        assert self.scales is not None
        assert self.staged.scales is not None
        of_weight, lane = self.scales.of_chunk(chunk), self.machine.thread
        added = list(sums)
        for n in range(self.layout.columns // _EIGHT):
            of_x = self.staged.scales.load_floats(i, lane % 4 * 2 + n * _EIGHT, count=2)
            factors = [scale * of_weight for scale in of_x]
            for j, value in enumerate(product(n)):
                added[VECTOR * n + j] = self.machine.fma(value, factors[j % 2], sums[VECTOR * n + j])
        return added

    def finish(self, out: Any, sums: list[Value], inputs: ProductInputs) -> None:
        """Add up the sums of all parts, and store them, or with angles the queries that they become."""
        machine, layout, heads = self.machine, self.layout, self.layout.heads
        queries = None if heads is None else heads.begin(machine, self._lines, inputs.angles, out)
        places = list(self._places(out)) if heads is None else []
        residual = None if inputs.residual is None else [inputs.residual.load(place) for place in places]
        machine.wait_copies()
        if layout.split.cluster == 1:  # nobody uses the arena any more
            machine.barrier("block")
        else:
            machine.cluster_arrive()
            machine.cluster_wait()
        eights = [sums[VECTOR * n : VECTOR * (n + 1)] for n in range(layout.columns // _EIGHT)]
        if layout.split.all_parts > 1:
            eights = self._exchange.add(eights, self.part)
        if heads is None or queries is None:
            self._store(out, eights, places, residual)
            return
        lines = self._gather(eights)
        if heads.blocks > 1:
            assert self.sent is not None
            machine.cluster_wait()
            queries.share(lines, self.sent)
            self.sent.wait(0)
        queries.make(lines)

    @property
    def _exchange(self) -> Exchange:
        return Exchange.at(self.machine, self.layout.split, self.layout.columns // _EIGHT, self.arena, self.sent)

    @property
    def _lines(self) -> Lines:
        """Rows of x whose outputs this block gathers: those of the columns of its parts."""
        split, machine = self.layout.split, self.machine
        count = self.layout.owned * _EIGHT * split.parts
        rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
        return Lines(
            count=count,
            rows=self.layout.rows,
            first=self.row + rank * count,
            past=self.row + self.layout.columns,
            output=self.place * ((split.tiles - self.layout.beside) * TILE),
            lanes=Lanes(number=machine.thread, count=split.warpgroups * WARPGROUP),
        )

    def _gather(self, eights: list[list[Value]]) -> Shared:
        """Store the sums of all warpgroups in lines of shared memory, one for each row of x."""
        machine, split = self.machine, self.layout.split
        count, width = len(eights) * _EIGHT, split.tiles * TILE
        shape = count * split.parts, width + PADDING
        lines = Shared(machine, self.arena + self.layout.received_bytes(), shape, "f32")
        warpgroup, column = machine.thread // WARPGROUP, machine.thread % 4 * 2 + self.part * count
        output = product_row(machine) + warpgroup // split.parts * TILE
        for n, values in enumerate(eights):
            for j, value in enumerate(values):
                lines.store_floats([value], column + (n * _EIGHT + j % 2), output + 8 * (j // 2))
        machine.barrier("block")
        return lines

    def _places(self, out: Buffer | OperandRows) -> Iterator[Place]:
        """Yield what this lane stores of the outputs of its part, several of a row at once."""
        lane, rows = self.machine.thread % WARPGROUP, self.layout.owned * _EIGHT
        count = 16 // out.dtype.itemsize  # outputs of one store
        per_row = TILE // count
        first = part_number(self.machine, self.layout.split, self.part) * rows
        for start in range(0, rows * per_row, WARPGROUP):
            n = lane + start
            inside: Condition = True if start + WARPGROUP <= rows * per_row else n < rows * per_row
            # Lanes beyond load what they do not store.
            mine = n if inside is True else select(inside, n, 0)
            line, unit = mine // per_row, mine % per_row
            column = first + line
            there = inside & (column < self.layout.columns) & (column + self.row < out.shape[0]) & self.tile.there
            yield Place(
                line=line,
                unit=unit * count,
                count=count,
                row=column + self.row,
                output=self.output + unit * count,
                there=there,
            )

    def _store(
        self,
        out: Buffer | OperandRows,
        eights: list[list[Value]],
        places: list[Place],
        residual: list[LoadedResidual] | None,
    ) -> None:
        """Store eights of columns, added to the residual, if there is one.

        A warpgroup gathers its outputs in shared memory, so that they are stored to device memory in whole lines.
        """
        machine, rows = self.machine, len(eights) * _EIGHT
        lane = machine.thread % WARPGROUP
        base = self.arena + self.layout.received_bytes()
        base = machine.thread // WARPGROUP * (rows * _ROW_PITCH) + base
        for n, values in enumerate(eights):
            for j, value in enumerate(values):
                column = lane % 4 * 2 + (n * _EIGHT + j % 2)
                at = column * _ROW_PITCH + (product_row(machine) + 8 * (j // 2)) * 4 + base
                machine.store_shared(at, [machine.bits(value)], 4, True)
        machine.barrier("warpgroup")
        for number, place in enumerate(places):
            line = place.line * _ROW_PITCH + base
            if isinstance(out, OperandRows):
                froms = [(first, 2) for first in sources_of_unit(place.unit // place.count)]
            else:
                froms = [(place.unit + i, VECTOR) for i in range(0, place.count, VECTOR)]
            words = [word for first, count in froms for word in machine.load_shared(line + first * 4, count * 4)]
            values = [machine.from_bits(word) for word in words]
            if residual is not None:
                values = residual[number].plus(values)
            to = out.values if isinstance(out, OperandRows) else out
            to.store_floats(values, place.row, place.output, where=place.there)
