"""How a product of few rows is divided over blocks: over outputs, over parts of the inputs, and over rows of x.

A warpgroup computes 64 outputs, a tile, for all rows of x that its block has, from a part of the inputs. The parts of a
tile are those of the blocks of a cluster, of warpgroups of a block, or both. For more than ``ROWS`` rows a warpgroup
may compute all parts, in turns. Their sums are added in the order of the parts. How many parts there are depends on the
weight's shape and on what is made of the sums. So the order in which a sum is formed depends neither on the number of
rows nor on other rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pallas_kernels.language.target import GPU
from pallas_kernels.products.problem import WeightSpec
from pallas_kernels.products.weights import CHUNK_BYTES, MOST_ROWS, ROWS, TILE
from pallas_kernels.tuned import h200

EIGHT = 8  # columns of a product of which a lane has two rows and two columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The blocks of a launch for one group of outputs and some rows of x."""

    cluster: int  # blocks that share the inputs
    parts: int  # of a block's inputs, each with warpgroups of its own
    tiles: int  # of a block
    blocks: int  # clusters
    chunks: int  # of a part
    turns: int = 1  # parts that a warpgroup computes one after the other

    @property
    def warpgroups(self) -> int:
        return self.tiles * self.parts

    @property
    def meeting(self) -> int:
        """Parts that different warpgroups have, whose sums meet when all are there."""
        return self.cluster * self.parts

    @property
    def all_parts(self) -> int:
        return self.meeting * self.turns

    @property
    def of_warpgroup(self) -> int:
        """Chunks of all parts that a warpgroup computes."""
        return self.turns * self.chunks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the registers of an architecture have room for."""

    # The most warpgroups of a block by the sums of a lane, which are for half of its columns, and as many again where
    # there are turns.
    warpgroups: dict[int, int]

    def most_warpgroups(self, columns: int, turns: int = 1) -> int:
        """Return the most warpgroups of a block; 0 if there is no room even for one."""
        sums = columns // 2 * (1 if turns == 1 else 2)
        return next((most for limit, most in sorted(self.warpgroups.items()) if sums <= limit), 0)


type Shape = tuple[int, int, int, int]  # blocks of a cluster, parts of a block, turns, and rows of x in a block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A product that is divided."""

    weight: WeightSpec
    inputs: int  # of a chunk
    rows: int  # of x
    room: Room  # for sums
    gpu: GPU
    most_parts: int | None = None  # None for any number

    @property
    def tiles(self) -> int:
        """Of a group."""
        return self.weight.outputs // TILE

    @property
    def chunks(self) -> int:
        """Of a group's inputs."""
        return self.weight.inputs // self.inputs

    @property
    def all_parts(self) -> int:
        """How many parts there are: as many as is expected to be the fastest for ``ROWS`` rows.

        Of most rows of x, parts are best in blocks of their own, because each block then needs less of x.
        """
        of_rows, most = dataclasses.replace(self, rows=ROWS), self.most_parts or self.chunks
        sizes = (size for size in self._clusters() if self.chunks % size == 0 and size <= most)
        return of_rows._cheapest(of_rows._splits((size, 1, 1, ROWS) for size in sizes))[0].cluster

    def fastest(self) -> tuple[Split, int]:
        """Return the split that is expected to be the fastest, and the rows of x in a block."""
        return self._cheapest(self._splits(self._shapes(self.all_parts)))

    def fastest_of_heads(self, tiles: int, blocks: int) -> tuple[Split, int]:
        """Return the same where blocks have so many tiles, of heads that so many blocks share."""
        found = [
            (dataclasses.replace(split, blocks=self.tiles // (blocks * tiles)), columns)
            for split, columns in self._splits(self._shapes(self.all_parts))
            if split.tiles == tiles and split.parts == 1
        ]
        return self._cheapest(found, together=blocks)

    def _shapes(self, all_parts: int) -> list[Shape]:
        """Return in which ways blocks can have all parts."""
        few, most = columns_of(self.rows, ROWS), columns_of(self.rows, MOST_ROWS)
        if self.rows <= ROWS:
            return [(size, all_parts // size, 1, few) for size in self._clusters() if all_parts % size == 0]
        if self.weight.activations != "bf16":
            return [(all_parts, 1, 1, few)]
        # Parts take turns, and blocks have more rows, only where x is copied chunk by chunk. Some parts in turns and
        # others in other blocks would not be added one by one.
        return [(*parts, columns) for columns in (few, most) for parts in ((all_parts, 1, 1), (1, 1, all_parts))]

    def _clusters(self) -> list[int]:
        return [size for size in h200.CLUSTER_BYTES if size == 1 or size in self.gpu.clusters]

    def _splits(self, shapes: Iterable[Shape]) -> list[tuple[Split, int]]:
        """Return those with such shapes, by the tiles of a block, and the rows of x in a block."""
        return [
            (
                Split(
                    cluster=cluster,
                    parts=parts,
                    tiles=n,
                    blocks=-(-self.tiles // n),
                    chunks=self.chunks // (cluster * parts * turns),
                    turns=turns,
                ),
                columns,
            )
            for cluster, parts, turns, columns in shapes
            for n in range(1, self.room.most_warpgroups(columns, turns) // parts + 1)
        ]

    def _cheapest(self, found: list[tuple[Split, int]], together: int = 1) -> tuple[Split, int]:
        return min(found, key=lambda each: self._cost(*each, together))

    def _cost(self, split: Split, columns: int, together: int) -> float:
        """Return what a launch takes, as bytes that a block reads in that time.

        Blocks run in waves. With few rows a block takes as long as reading its part of the weight and of x; with more
        it may be its products that take longer, with what is widened for them. What a cluster takes was chosen by times
        on an H200, of V4-Flash's shapes with 1, 8 and 64 rows; with more rows it takes more, and takes it in each wave.
        """
        cluster, at_once = split.cluster * together, self.gpu.multiprocessors
        if cluster > 1:
            at_once = self.gpu.clusters[cluster] + h200.MORE_CLUSTERS.get(cluster, 0)
        waves = -(-split.blocks * self.weight.groups * -(-self.rows // columns) // at_once)
        chunks, meeting = split.parts * split.of_warpgroup, h200.CLUSTER_BYTES[split.cluster]
        read = CHUNK_BYTES * (split.tiles * TILE + columns)
        if self.rows <= ROWS:
            return waves * chunks * read + meeting
        computed = split.tiles * (columns + h200.WIDENING_COLUMNS) * h200.COLUMN_BYTES
        return waves * (chunks * max(read, computed) + h200.MEETINGS * meeting)


def columns_of(rows: int, most: int) -> int:
    """Return the rows of x in a block that has at most so many, where all blocks have about as many."""
    return -(-rows // (EIGHT * -(-rows // most))) * EIGHT
