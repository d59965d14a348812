"""What products of many rows share on Hopper: a block's turns, stages and roles, and what becomes of its sums.

The chunks of a batch are padded to the longest one, and a prompt's last chunk to the length of the others. Tiles whose
rows are all padding are not computed (``needed_tiles``), and blocks divide the others among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import Buffer, Shaped
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.pipeline import Pipeline
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Role, TensorCores, Tile, TileCopy
from pallas_kernels.language.values import VECTOR, Condition, Index, Value
from pallas_kernels.needed import needed_first, past_last_needed
from pallas_kernels.products.epilogues.faces import ColumnSums, Extras, Made
from pallas_kernels.products.many.tiling import CHUNK_BYTES, LANES, LOADERS, WARPGROUPS, Place, Tiling
from pallas_kernels.products.weights import add_in_turns

_MULTIPLIERS, _LOADERS = 240, 24  # registers per lane
_HEADER = 2  # numbers before the tiles, in what ``needed_tiles`` returns
_SHIFT = 22  # bits of the fraction by which ``NeededTiles`` divides
_LEAST_TILES = 4  # of rows: finding those that are needed takes as long as can be saved with fewer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManyInputs[Array: Shaped]:
    """The arrays of a product of many rows, or their buffers."""

    x: Array  # bf16 or, if rounded, uint8 [M, groups * inputs]
    x_scales: Array | None  # f32 [groups * inputs / 128, M rounded up to 128] of rounded rows, else None
    weight: Array  # uint8 [groups * outputs, inputs]
    scales: Array | None  # uint8 [groups * outputs / block, inputs / block]
    extras: dict[str, Array]  # what the epilogue takes beside the sums
    needed: Array | None = None  # what ``needed_tiles`` returns


def needed_tiles(needed: jax.Array, tile_rows: int, tiles_of_outputs: int) -> jax.Array | None:
    """Return which tiles of rows are needed, as ``NeededTiles`` reads them.

    Args:
      needed: what ``Needed.spec`` describes.
      tile_rows: rows of a tile.
      tiles_of_outputs: tiles that each tile of rows has.

    Returns:
      int32 [2 + tiles of rows]: how many are needed, what to divide by that with, and the tiles, those that are needed
      first. None where all are to be computed, because there are few, or too many to divide like that.
    """
    tiles = -(-needed.size // tile_rows)
    divides = tiles_of_outputs < 1 << 32 - _SHIFT and tiles_of_outputs * tiles**2 < 1 << _SHIFT
    if tiles < _LEAST_TILES or not divides:
        return None
    if needed.ndim == 2:  # ``Needed.PREFIX``: all rows up to the last one
        count, numbers = -(-past_last_needed(needed)[0] // tile_rows), jnp.arange(tiles, dtype=jnp.int32)
    else:
        is_needed = jnp.pad(needed, (0, tiles * tile_rows - needed.size)).reshape(tiles, tile_rows).any(axis=1)
        count, numbers = needed_first(is_needed)
    return jnp.concatenate([jnp.stack([count, (1 << _SHIFT) // jnp.maximum(count, 1) + 1]), numbers])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NeededTiles:
    """The tiles of rows that are needed, in a kernel."""

    array: Buffer  # what ``needed_tiles`` returns
    kept: tuple[Value, Value] | None  # how many there are, and what to divide by that with; None: loaded for each use

    @classmethod
    def of(cls, array: Buffer, *, keeps: bool) -> NeededTiles:
        return cls(array, (array.load_int(0), array.load_int(1)) if keeps else None)

    @property
    def count(self) -> Value:
        return self.array.load_int(0) if self.kept is None else self.kept[0]

    def divide(self, number: Value) -> Value:
        """Return number // count, for numbers of tiles.

        With inverse = 2^22 // count + 1, number inverse / 2^22 is above number / count by at most number / 2^22. That
        is less than 1 / count, the least by which number / count is below the next whole number. And number inverse is
        below 2^32, since it is at most tiles_of_outputs 2^22 + number.
        """
        inverse = self.array.load_int(1) if self.kept is None else self.kept[1]
        return number * inverse >> _SHIFT

    def tile(self, number: Value, quotient: Value) -> Value:
        """Return the tile of rows that is number % count among those that are needed."""
        return self.array.load_int(number - quotient * self.count + _HEADER)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The tiles of a block: every ``blocks``-th from the block's number on. Tiles of the same outputs are adjacent."""

    machine: TensorCores
    tiling: Tiling
    part: Value  # of the inputs
    needed: NeededTiles | None  # None: all

    @classmethod
    def of(cls, machine: TensorCores, tiling: Tiling, needed: Buffer | None, *, keeps: bool = True) -> Turns:
        """The tiles of this block. ``keeps`` says whether registers are free to keep what ``needed`` says."""
        part = machine.rank if tiling.parts > 1 else machine.constant(0, "i32")
        of_rows = None if needed is None else NeededTiles.of(needed, keeps=keeps)
        return cls(machine=machine, tiling=tiling, part=part, needed=of_rows)

    @property
    def is_one(self) -> bool:
        """Whether every block has exactly one."""
        return self.needed is None and self.tiling.tiles <= self.tiling.blocks

    @property
    def count(self) -> Value:
        tiling = self.tiling
        tiles = tiling.tiles if self.needed is None else self.needed.count * tiling.output_tiles
        return (self.machine.block(0) * -1 + (tiling.blocks - 1) + tiles) // tiling.blocks

    @property
    def total(self) -> Value:
        """Chunks of all tiles."""
        return self.count * self.tiling.chunks

    def place(self, turn: Value) -> Place:
        number = turn * self.tiling.blocks + self.machine.block(0)
        of_outputs = number // self.tiling.row_tiles if self.needed is None else self.needed.divide(number)
        return self.tiling.place(number, of_outputs, self.machine.rank)

    def exists(self, place: Place) -> Value:
        """Return whether there is such a place. Past a block's last tile it may be any: nobody uses what is there."""
        return place.output < self.tiling.weight.groups * self.tiling.weight.outputs

    def row(self, place: Place) -> Value:
        """Return the first row of x of a tile."""
        if self.needed is None:
            return place.number % self.tiling.row_tiles * self.tiling.tile_rows
        return self.needed.tile(place.number, place.of_outputs) * self.tiling.tile_rows

    def chunk(self, number: Value) -> tuple[Place, Value]:
        """Return the tile of a chunk, by its number among those of all tiles, and its first input."""
        chunks = self.tiling.chunks
        return self.place(number // chunks), (number % chunks + self.part * chunks) * self.tiling.chunk

    def copies(
        self, inputs: ManyInputs[Buffer], chunk: tuple[Place, Value], row: Value, to: tuple[Index, Index]
    ) -> tuple[TileCopy, TileCopy]:
        """Return the copies of a chunk of x, whose tile begins at a row, and of the weight, to shared memory."""
        (place, first), (to_x, to_weight), tiling = chunk, to, self.tiling
        size = tiling.weight_chunk_bytes
        return (
            TileCopy(
                source=inputs.x,
                row=row,
                column=place.x + first,
                to=to_x,
                rows=tiling.tile_rows,
                row_bytes=CHUNK_BYTES,
            ),
            TileCopy(
                source=inputs.weight,
                row=place.output,
                column=first,
                to=to_weight,
                rows=tiling.tile_outputs,
                row_bytes=size,
                swizzle=size,
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """Adds the sums of all parts of the inputs, in their order. A block has a tile, whose sums it shares."""

    machine: TensorCores
    tiling: Tiling
    received: Shared  # f32 [parts, fours, lanes, 4], where the stages are
    left: Barrier  # nobody in the cluster reads the stages any more
    there: Barrier  # everybody's sums

    @classmethod
    def take(cls, machine: TensorCores, tiling: Tiling, arena: int) -> Exchange | None:
        """Take and initialise the barriers; None with one part. All lanes of the cluster call it."""
        if tiling.parts == 1:
            return None
        received = Shared(machine, arena, (tiling.parts, tiling.fours // tiling.parts, LANES, VECTOR), "f32")
        multiplying = tiling.parts * LANES // WARP
        left = Barrier.take(machine, multiplying + tiling.parts, scope="cluster")  # the warps that copy arrive too
        there = Barrier.take(machine, multiplying, scope="cluster")
        init_barriers(left, there)
        machine.barrier("cluster")
        return cls(machine=machine, tiling=tiling, received=received, left=left, there=there)

    def add(self, sums: list[Value]) -> tuple[Value, list[Value]]:
        """Return the number of the first of the fours that this block has then, and those fours."""
        machine, (parts, owned, *_) = self.machine, self.received.shape
        self.leave()
        self.left.wait(0)
        for n in range(self.tiling.fours):
            to, place = divmod(n, owned)
            four = sums[VECTOR * n : VECTOR * (n + 1)]
            self.received.store_floats(four, machine.rank, place, machine.thread, 0, rank=to)
        self.there.arrive_in_cluster(parts)
        self.there.wait(0)
        mine: list[Value] = []
        for n in range(owned):
            of_parts = [self.received.load_floats(part, n, machine.thread, 0) for part in range(parts)]
            mine += functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], of_parts)
        return machine.rank * owned, mine

    def leave(self) -> None:
        """Say that this warp neither reads a stage any more nor has copies that run."""
        self.left.arrive_in_cluster(self.tiling.parts)


def take_pipeline(turns: Turns) -> Pipeline:
    """Take and initialise the barriers of a block's stages, which both multiplying warpgroups release."""
    return Pipeline.take(turns.machine, turns.tiling.stages, consumers=LANES // WARP)


def for_each_tile[Scales](
    turns: Turns,
    pipe: Pipeline,
    x: Tile,
    copies: Callable[[Value, Index], Sequence[TileCopy]],
    scales: Callable[[Value], Scales],
    sums: Callable[[Value, Scales], tuple[list[Value], Scales]],
    store: Callable[[Value, Value | int, list[Value]], None],
) -> None:
    """Compute and store the sums of each tile.

    The chunks of all tiles of a block are numbered in the order in which they are multiplied. A warp of its own starts
    the copies, each when both multiplying warpgroups have left the stage. So one of these may be ahead of the other by
    nearly all stages, and can multiply while the other one stores.

    Args:
      turns: the block's tiles.
      pipe: the stages, of which chunk n is the n-th use.
      x: tiles of x, a copy per stage. Parts of the inputs add their sums in this memory, from its begin on.
      copies: makes the copies of a chunk, by its number and its stage.
      scales: loads those of the weight for a chunk, by its number.
      sums: computes those of a part of a tile, by the number of its first chunk and that chunk's scales. It returns the
        scales of the next part's first chunk too, so that no part begins with a wait for them.
      store: stores fours of a turn's tile, the first of which has a number.
    """
    machine, tiling = turns.machine, turns.tiling
    assert isinstance(x.offset, int), "nothing is selected yet"
    exchange = Exchange.take(machine, tiling, x.offset)

    def one(turn: Value, of_first: Scales) -> Scales:
        def of_part(part: Index, scales: Scales) -> tuple[list[Value], Scales]:
            return sums(turn * tiling.chunks + part * tiling.of_part, scales)

        of_tile, following = add_in_turns(machine, tiling.own_parts, of_part, tiling.fours * VECTOR, of_first)
        store(turn, *(exchange.add(of_tile) if exchange else (0, of_tile)))
        return following

    def multiply() -> None:
        start = machine.constant(0, "i32")
        if turns.is_one:
            one(start, scales(start))
        else:
            machine.loop(turns.count, one, scales(start))

    def fill(chunk: Value, _: None) -> None:
        use = pipe.use(chunk)
        use.acquire()
        use.commit(*copies(chunk, use.stage))

    def load() -> None:
        with machine.when(machine.thread % WARPGROUP < WARP):
            machine.loop(turns.total, fill)
            if exchange is not None:  # of the block's only tile
                for chunk in range(max(0, tiling.chunks - tiling.stages), tiling.chunks):
                    pipe.wait(machine.constant(chunk, "i32"))
                exchange.leave()

    machine.roles(
        Role(warpgroups=WARPGROUPS, registers=_MULTIPLIERS, body=multiply),
        Role(warpgroups=LOADERS, registers=_LOADERS, body=load),
    )


def warp_rows(machine: TensorCores) -> Value:
    """Return the first of the 16 rows of a product that a warp has, with the block's warpgroups one after the other."""
    return machine.thread // WARPGROUP * 64 + machine.thread % WARPGROUP // 32 * 16


def store_columns(turns: Turns, extras: Extras, out: Made, turn: Value, first: Value | int, sums: list[Value]) -> None:
    """Give the epilogue fours [outputs, rows of x], the first of which is number ``first`` of the tile."""
    machine, tiling, place = turns.machine, turns.tiling, turns.place(turn)
    lane = machine.thread % WARP
    output = place.output + warp_rows(machine)
    rows, all_outputs = tiling.rows, tiling.weight.groups * tiling.weight.outputs
    is_whole = rows % tiling.tile_rows == 0
    # A warp's 16 outputs exist, or none of them does.
    exists: Condition = True if tiling.weight.outputs % tiling.tile_outputs == 0 else output < all_outputs
    column = lane % 4 * 2 + turns.row(place) + first * 8

    def there(at: Value) -> Condition:
        return exists if is_whole else exists & (at < rows)

    columns = ColumnSums(machine=machine, output=output, column=column, there=there, sums=sums)
    tiling.epilogue.many_columns(columns, extras, out)
