"""What the kernels of few rows on both architectures share: a block's place, its memory, its chunks and its last steps.

The parts of a tile are warpgroups of a block, or of the blocks of a cluster. In the last steps the warpgroup of each
part adds up some eights of the columns, in the order of the parts, and gets the sums of these from the others
(``Exchange``). Then the epilogue makes of them what is stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax

from pallas_kernels.activations import OperandRows, PlainRows
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import LeftOperand
from pallas_kernels.language.lanes import Buffer, Shaped
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile, product_row
from pallas_kernels.language.values import VECTOR, Condition, Index, Value, select
from pallas_kernels.products.epilogues.faces import PADDING, TILE_PITCH, Finish, Lanes, LastSteps, Lines, Made, Place
from pallas_kernels.products.few.layout import EIGHT_BYTES, Layout
from pallas_kernels.products.few.split import EIGHT, Split
from pallas_kernels.products.few.staging import StagedRows, StreamedRows
from pallas_kernels.products.weights import TILE, Corner, Scales, StoredTile, widen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FewInputs[Array: Shaped]:
    """The arrays of a product, or their buffers."""

    x: PlainRows[Array] | OperandRows[Array]  # PlainRows or OperandRows, bf16 [M, groups * inputs]
    weight: Array  # bf16 or uint8 [groups * outputs, inputs]
    scales: Array | None  # uint8 [groups * outputs / block, inputs / block], None for bf16
    extras: dict[str, Array]  # what the epilogue takes beside the sums
    # The weight and the scales of a second product with the same rows, of which blocks have tiles, too.
    beside: tuple[Array, Array | None] | None = None

    def of_tile(self: FewInputs[Buffer], is_beside: Value) -> tuple[Buffer, Buffer]:
        """Return weight and scales of the product whose tile a lane computes, as if both had the same shape."""
        assert self.beside is not None

        def chosen(a: Buffer | None, b: Buffer | None) -> Buffer:
            assert a is not None
            assert b is not None
            return a.instead(is_beside, dataclasses.replace(b, shape=a.shape))

        return chosen(self.weight, self.beside[0]), chosen(self.scales, self.beside[1])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """The sums that a block receives, for all of its tiles."""

    machine: TensorCores
    layout: Layout
    received: Shared  # f32 [parts, warpgroups, eights, lanes, 4]
    sent: Barrier | None  # by other blocks of the cluster, if there are any

    @classmethod
    def at(cls, machine: TensorCores, layout: Layout, arena: int, sent: Barrier | None) -> Exchange:
        """The exchange in shared memory from ``arena`` on."""
        shape = layout.split.meeting, layout.split.warpgroups, layout.owned, WARPGROUP, VECTOR
        return cls(machine=machine, layout=layout, received=Shared(machine, arena, shape, "f32"), sent=sent)

    @property
    def eights(self) -> int:
        """Of columns."""
        return self.layout.columns // EIGHT

    def expected_bytes(self) -> Value:
        """Return how much the other blocks send to this one."""
        split, of_block = self.layout.split, self.layout.owned * self.layout.split.parts
        mine = (self.machine.rank * -of_block + self.eights).maximum(0).minimum(of_block)
        return mine * ((split.cluster - 1) * split.warpgroups * EIGHT_BYTES)

    def add(self, sums: list[list[Value]], part: Value) -> list[list[Value]]:
        """Return the sums of all parts for the eights of this warpgroup, which has those of a part of its block."""
        machine, split, owned = self.machine, self.layout.split, self.layout.owned
        warpgroup, lane = machine.thread // WARPGROUP, machine.thread % WARPGROUP
        number = _part_number(machine, split, part)

        def give(to_rank: int, *, is_mine: bool) -> None:
            of_rank = owned * split.parts
            for n, values in enumerate(sums[to_rank * of_rank : (to_rank + 1) * of_rank]):
                place = number, warpgroup - part + n // owned, n % owned, lane, 0
                if is_mine or self.sent is None:
                    self.received.store_floats(values, *place)
                else:
                    self.sent.send_floats(values, self.received, *place, rank=to_rank)

        # Every block begins with its successor, so that no block gets the sums of all others at once.
        for mine in range(split.cluster):
            with machine.when(True if split.cluster == 1 else machine.rank == mine):
                for further in range(1, split.cluster + 1):
                    to_rank = (mine + further) % split.cluster
                    give(to_rank, is_mine=to_rank == mine)
        if split.parts > 1 or self.eights < owned * split.meeting:
            machine.barrier("block")  # for sums of other warpgroups, or for whatever is there where there are none
        if self.sent is not None:
            self.sent.wait(0)
        added = []
        for n in range(owned):
            parts = [self.received.load_floats(each, warpgroup, n, lane, 0) for each in range(split.meeting)]
            added.append(functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], parts))
        return added


def _part_number(machine: TensorCores, split: Split, part: Value) -> Value:
    """Return the number of a block's part of the inputs among those of the cluster."""
    rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
    return rank * split.parts + part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A block, from the view of one of its lanes."""

    machine: TensorCores
    layout: Layout
    activations: StagedRows | StreamedRows
    scales: Scales | None
    tile: StoredTile  # of the lane's warpgroup
    stored_scales: Buffer | None  # those of the weight
    row: Value  # first row of x
    place: Value  # the block's, among those of its group of outputs
    corner: Corner  # of the tile of the warpgroup's part
    part: Value  # the warpgroup's, among those of the block
    sent: Barrier | None  # for what other blocks of the cluster send
    arena: int  # where the shared memory begins that the last steps use again

    @classmethod
    def of(cls, machine: TensorCores, inputs: FewInputs[Buffer], layout: Layout) -> Block:
        """Take shared memory, after that for an architecture's own use."""
        split = layout.split
        outputs, width = inputs.weight.shape
        tiles = outputs // layout.weight.groups // TILE
        number = machine.block(0) - layout.first_block if layout.first_block else machine.block(0)
        group, place = number // split.blocks, number % split.blocks
        epilogue = layout.epilogue
        if epilogue.blocks > 1:
            assert split.cluster == 1, "blocks share what the epilogue makes, or inputs"
            place = place * epilogue.blocks + machine.rank
        warpgroup, own = machine.thread // WARPGROUP, split.tiles - epilogue.beside
        mine, part = place * own + warpgroup // split.parts, warpgroup % split.parts
        there = True if tiles % own == 0 else mine < tiles
        weight, of_weight = inputs.weight, inputs.scales
        if epilogue.beside:
            is_beside = warpgroup >= own
            weight, of_weight = inputs.of_tile(is_beside)
            mine = select(is_beside, place * epilogue.beside + (warpgroup - own), mine)
        part_inputs = split.of_warpgroup * layout.inputs
        rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
        of_block = rank * (split.parts * part_inputs)
        first = of_block + part * part_inputs
        row = machine.block(1) * layout.columns
        half = outputs // 2 if epilogue.is_gated else 0
        corner = Corner((group * tiles + mine) * layout.stored, first, half)
        sent = Barrier.take(machine, 1, scope="cluster") if layout.cluster > 1 else None
        scales = None if inputs.scales is None else Scales.take(machine, split.warpgroups, split.of_warpgroup)
        place_of_x = row, group * width + of_block
        if layout.streams:
            activations = StreamedRows.take(
                machine,
                inputs.x,
                place_of_x,
                tile=layout.tile,
                slots=layout.segment,
                warpgroups=split.warpgroups,
            )
        else:
            activations = StagedRows.take(
                machine,
                inputs.x,
                place_of_x,
                tile=layout.tile,
                segment=layout.segment,
                parts=(split.parts, split.chunks),
                warpgroups=split.warpgroups,
                rounding=layout.weight.activations,
            )
        rooms = StoredTile.take_rooms(machine, split.warpgroups, layout.stages)
        assert isinstance(activations.tiles.offset, int), "nothing is selected yet"
        return cls(
            machine=machine,
            layout=layout,
            activations=activations,
            scales=scales,
            tile=StoredTile.of(machine, weight, corner, there, rooms),
            stored_scales=of_weight,
            row=row,
            place=place,
            corner=corner,
            part=part,
            sent=sent,
            arena=activations.tiles.offset,
        )

    @property
    def staged(self) -> StagedRows:
        """The rows of x of a block that stores them before it multiplies."""
        assert isinstance(self.activations, StagedRows)
        return self.activations

    def multiply[Carry](
        self,
        step: Callable[[Value, Value, Index, Carry], Carry],
        carry: Carry,
        settle: Callable[[int], None] = lambda chunks: None,
    ) -> Carry:
        """Return the carry of ``step(number of a chunk, its number in x's memory, its stage, carry)`` over all chunks.

        Chunks of the weight are copied ahead, and x is stored, where ``step`` finds it. It must call ``advance`` when
        it has loaded the chunk of the weight. ``settle`` waits until the products with so many chunks no longer read x.
        """
        machine, split, activations = self.machine, self.layout.split, self.staged
        starts = range(0, split.chunks, self.layout.segment)
        sizes = [min(self.layout.segment, split.chunks - start) for start in starts]
        self.begin()
        for start, size in zip(starts, sizes, strict=True):
            if start:
                settle(start)
                machine.barrier("block")  # nobody reads the last segment any more
            activations.stage(start, size)
            machine.barrier("block")

            def one(i: Value, carry: Carry, start: int = start, size: int = size) -> Carry:
                machine.wait_copies(pending=self.layout.stages - 2)
                machine.barrier("warp")  # which copied what its lanes read
                return step(i + start, self.part * size + i, (i + start) % self.layout.stages, carry)

            carry = machine.loop(size, one, carry)
        return carry

    def stream[Carry](self, turn: Index, step: Callable[[Value, Tile, Index, Carry], Carry], carry: Carry) -> Carry:
        """Return the carry of ``step(number of a chunk, its x, its stage, carry)`` over the chunks of a turn.

        Call ``begin`` before. Chunks of the weight and of x are copied ahead. ``step`` must call ``advance`` when
        it has loaded the chunk of the weight, or has waited for the products of the chunk before. Those of its own may
        still run when it ends.
        """
        machine, x = self.machine, self.activations
        assert isinstance(x, StreamedRows)

        def one(i: Value, carry: Carry) -> Carry:
            i = i + turn * self.layout.split.chunks
            machine.wait_copies(pending=self.layout.stages - 2)
            machine.fence_shared()
            machine.barrier("block")
            return step(i, x.tile(i % self.layout.segment), i % self.layout.stages, carry)

        return machine.loop(self.layout.split.chunks, one, carry)

    def begin(self) -> None:
        """Start to copy the first chunks, store the scales, and expect what other blocks will send.

        To be followed by a barrier of the block.
        """
        chunks, loaded = self.layout.split.of_warpgroup, []
        if self.scales is not None:  # first, because they are waited for first
            assert self.stored_scales is not None
            assert self.layout.weight.block is not None
            loaded = self.scales.load(self.stored_scales, self.layout.weight.block, self.corner)
        self._copy(0, True)
        if self.scales is not None:
            self.scales.store(loaded)
        # After the wait for the scales, because the first chunk is there later if all are asked for at once.
        for chunk in range(1, self.layout.stages - 1):
            self._copy(chunk, chunk < chunks)
        if self.sent is None:
            return
        machine, shares_inputs = self.machine, self.layout.split.cluster > 1
        init_barriers(self.sent)
        with machine.when(machine.thread < WARP):
            if shares_inputs:
                self.sent.expect(self._exchange.expected_bytes())
            else:
                self.sent.expect(self.layout.epilogue.sent_bytes(self.layout.columns))
        if not shares_inputs:  # ``with_lines`` waits for blocks that had not begun
            machine.cluster_arrive()

    def advance(self, chunk: Value) -> None:
        """Start to copy the chunk that takes the room of the one before this."""
        following = chunk + (self.layout.stages - 1)
        self._copy(following, following < self.layout.split.of_warpgroup)

    def _copy(self, chunk: Index, where: Condition) -> None:
        """Start to copy a chunk, as one group of copies."""
        self.tile.copy(chunk, chunk % self.layout.stages, where)
        if isinstance(self.activations, StreamedRows):
            self.activations.copy(chunk, chunk % self.layout.segment, where)
        self.machine.close_copies()

    def operand(self, chunk: Value, half: int, words: list[list[Value]]) -> list[Value]:
        """Return half a chunk of the weight, which ``tile.load`` gave, as a left operand."""
        if self.scales is None or self.layout.weight.activations == "fp8":
            one, other = words
            return LeftOperand.of_rows(one, other, "bf16" if self.scales is None else "e4m3").words
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
        for n in range(self.layout.columns // EIGHT):
            of_x = self.staged.scales.load_floats(i, lane % 4 * 2 + n * EIGHT, count=2)
            factors = [scale * of_weight for scale in of_x]
            for j, value in enumerate(product(n)):
                added[VECTOR * n + j] = self.machine.fma(value, factors[j % 2], sums[VECTOR * n + j])
        return added

    def finish(self, out: Made, sums: list[Value], inputs: FewInputs[Buffer]) -> None:
        """Add up the sums of all parts, and store what the epilogue makes of them."""
        machine, layout = self.machine, self.layout
        last = layout.epilogue.few(self, inputs.extras, out)
        machine.wait_copies()
        if layout.split.cluster == 1:  # nobody uses the arena any more
            machine.barrier("block")
        else:
            machine.cluster_arrive()
            machine.cluster_wait()
        eights = [sums[VECTOR * n : VECTOR * (n + 1)] for n in range(layout.columns // EIGHT)]
        if layout.split.meeting > 1:
            eights = self._exchange.add(eights, self.part)
        last(eights)

    def with_lines(self, finish: Finish) -> LastSteps:
        """Do what ``BlockSums`` says."""

        def last(eights: list[list[Value]]) -> None:
            lines = self._gather(eights)
            if self.layout.epilogue.blocks > 1:
                assert self.sent is not None
                self.machine.cluster_wait()
                finish.share(lines, self.sent)
                self.sent.wait(0)
            finish.make(lines)

        return last

    @property
    def _exchange(self) -> Exchange:
        return Exchange.at(self.machine, self.layout, self.arena, self.sent)

    @property
    def lines(self) -> Lines:
        """Do what ``BlockSums`` says: rows of x are those of the columns of the block's parts."""
        split, machine = self.layout.split, self.machine
        count = self.layout.owned * EIGHT * split.parts
        rank = machine.rank if split.cluster > 1 else machine.constant(0, "i32")
        return Lines(
            count=count,
            rows=self.layout.rows,
            first=self.row + rank * count,
            past=self.row + self.layout.columns,
            output=self.place * ((split.tiles - self.layout.epilogue.beside) * TILE),
            lanes=Lanes(number=machine.thread, count=split.warpgroups * WARPGROUP),
        )

    def _gather(self, eights: list[list[Value]]) -> Shared:
        """Store the sums of all warpgroups in lines of shared memory, one for each row of x."""
        machine, split = self.machine, self.layout.split
        count, width = len(eights) * EIGHT, split.tiles * TILE
        shape = count * split.parts, width + PADDING
        lines = Shared(machine, self.arena + self.layout.received_bytes(), shape, "f32")
        warpgroup, column = machine.thread // WARPGROUP, machine.thread % 4 * 2 + self.part * count
        output = product_row(machine) + warpgroup // split.parts * TILE
        for n, values in enumerate(eights):
            for j, value in enumerate(values):
                lines.store_floats([value], column + (n * EIGHT + j % 2), output + 8 * (j // 2))
        machine.barrier("block")
        return lines

    def places(self, rows_of_x: int, count: int) -> Iterator[Place]:
        """Do what ``BlockSums`` says, for the rows of this lane's part."""
        lane, rows = self.machine.thread % WARPGROUP, self.layout.owned * EIGHT
        per_row = self.layout.stored // count
        first = _part_number(self.machine, self.layout.split, self.part) * rows
        for start in range(0, rows * per_row, WARPGROUP):
            n = lane + start
            inside: Condition = True if start + WARPGROUP <= rows * per_row else n < rows * per_row
            # Lanes beyond load what they do not store.
            mine = n if inside is True else select(inside, n, 0)
            line, unit = mine // per_row, mine % per_row
            column = first + line
            there = inside & (column < self.layout.columns) & (column + self.row < rows_of_x) & self.tile.there
            yield Place(
                line=line,
                unit=unit,
                count=count,
                row=column + self.row,
                output=self.corner.output + unit * count,
                there=there,
            )

    def gather_tile(self, eights: list[list[Value]]) -> Value:
        """Do what ``BlockSums`` says."""
        machine, rows = self.machine, len(eights) * EIGHT
        lane = machine.thread % WARPGROUP
        base = self.arena + self.layout.received_bytes()
        begin = machine.thread // WARPGROUP * (rows * TILE_PITCH) + base
        for n, values in enumerate(eights):
            for j, value in enumerate(values):
                column = lane % 4 * 2 + (n * EIGHT + j % 2)
                at = column * TILE_PITCH + (product_row(machine) + 8 * (j // 2)) * 4 + begin
                machine.store_shared(at, [machine.bits(value)], 4, True)
        machine.barrier("warpgroup")
        return begin
