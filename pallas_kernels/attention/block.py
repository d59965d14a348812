"""What the kernels for many queries share on Hopper and Blackwell: the layout of a block, and the roles that load.

A block computes 64 heads of a query. One or two warpgroups, the loaders, convert stored rows to f16 tiles of 64 keys,
in two stages. In two other warpgroups the output ends up, half of its channels in each. How queries are loaded, the
products, and the softmax in between are specific to the architecture.

If there are too few queries to fill the GPU, a cluster of blocks shares the tiles of one query and merges the results.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_kernels.attention.inputs import HEAD_DIM
from pallas_kernels.attention.keys import KEYS, STAGED_LOADS, KeyLoader, Query, StoredRow, staging_bytes
from pallas_kernels.attention.layout import AttentionLayout, Scratch
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Index, Value, select

HEADS = 64
STAGES = 2  # one tile of keys is multiplied while the next is loaded
CONSUMERS = 2  # warpgroups that at the end hold half of the output's channels each
HALF = HEAD_DIM // CONSUMERS
WARPS = WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(AttentionLayout):
    """A layout with heads in groups of 64, and any number of tiles."""

    heads: int = dataclasses.field(default=HEADS, init=False)
    cluster: int = 1

    reduces: ClassVar[bool] = False  # all shared memory is taken

    @property
    def loaders(self) -> int:
        """Number of warpgroups that load keys."""
        return 1

    @property
    def staged_loads(self) -> int:
        """Number of loads of stored rows per lane that have a place in shared memory."""
        return STAGED_LOADS

    @property
    def warpgroups(self) -> int:
        return CONSUMERS + self.loaders

    @property
    def common_bytes(self) -> int:
        """Shared memory that both kernels need, without barriers."""
        tiles = (HEADS + STAGES * KEYS) * HEAD_DIM * 2
        return tiles + staging_bytes(self.staged_loads, self.loaders) + STAGES * KEYS * 4

    def scratch(self, queries: int, groups: int) -> Scratch | None:
        if self.cluster == 1:
            return None
        lanes = CONSUMERS * WARPGROUP
        loads = HEADS * HEAD_DIM // (self.cluster * lanes * 8)
        return Scratch.of(self, queries, groups, part=(loads, lanes, 8))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Shared memory of a block, through which its roles communicate.

    Each kernel has a subclass with further fields, which also determines the order in memory.
    """

    keys: Tile  # [KEYS, HEAD_DIM]; copies: stages
    staging: Shared | None  # u8, from ``take_staging``; None if rows are only copied
    of_keys: Shared  # f32 [STAGES, KEYS]: factors from ``KeyLoader.store``, or biases if rows are only copied
    full: Barrier  # per stage: its keys are loaded
    free: Barrier  # per stage: all products with its keys are complete


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """How often a block has used what its queries share, before one of its queries."""

    queries: Value
    firsts: Value  # tiles in the first stage
    seconds: Value  # tiles in the second stage

    @classmethod
    def none(cls, machine: TensorCores) -> Before:
        zero = machine.constant(0, "i32")
        return cls(queries=zero, firsts=zero, seconds=zero)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The work of a block on one query, as seen by one of its roles."""

    machine: TensorCores
    memory: Memory
    query: Query
    first_head: Value
    cluster: int
    rank: Value  # the block's number in its cluster
    tiles: Value  # number of tiles for this block, at least one, which may have no keys
    before: Before

    @classmethod
    def of(
        cls,
        machine: TensorCores,
        memory: Memory,
        query: Query,
        cluster: int,
        before: Before,
        tiles: Value | None = None,
    ) -> Block:
        """Return the work on a query. ``tiles`` is given if its number is known from before."""
        rank, computed = query.share(cluster)
        tiles = computed if tiles is None else tiles
        return cls(
            machine=machine,
            memory=memory,
            query=query,
            first_head=machine.block(1) * HEADS,
            cluster=cluster,
            rank=rank,
            tiles=tiles,
            before=before,
        )

    @property
    def after(self) -> Before:
        """What was used before the block's next query."""
        before = self.before
        return Before(
            queries=before.queries + 1,
            firsts=before.firsts + (self.tiles + 1) // STAGES,
            seconds=before.seconds + self.tiles // STAGES,
        )

    def uses(self, stage: Value) -> Value:
        """Return how many tiles a stage has had before this query's."""
        return select(stage == 0, self.before.firsts, self.before.seconds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """What the loader knows about tiles i, i + 1 and i + 2 when it is about to store tile i.

    Each lane handles one or two rows of each tile.
    """

    numbers: list[Value]  # key numbers of tile i + 1
    looked_up: list[Value]  # of tile i + 1
    later_numbers: list[Value]  # key numbers of tile i + 2
    rows: list[StoredRow] | list[Value]  # tile i: rows being loaded, or, if there is no room for both, their indices


def load_tiles(block: Block, form: AttendedFormat, loaders: int = 1) -> None:
    """Load tile after tile. Bytes are requested one tile ahead, and their addresses two and three tiles ahead."""
    machine, memory = block.machine, block.memory
    loader = KeyLoader(block.query, form, memory.staging, loaders)

    def tile(i: Index) -> Value:
        """Return the number of the block's i-th tile.

        The blocks of a cluster take tiles in turn. Thus blocks that get two of ten tiles begin with those of the
        window.
        """
        return block.rank + i * block.cluster

    def load(tile: Value, indices: list[Value]) -> list[StoredRow] | list[Value]:
        return [loader.load(tile, n, indices[n]) for n in range(len(indices))] if loader.loads_ahead else indices

    numbers = [loader.find(tile(i)) for i in range(3)]
    rows = load(tile(0), loader.resolve(tile(0), numbers[0], loader.look_up(tile(0), numbers[0])))
    looked_up = loader.look_up(tile(1), numbers[1])

    def step(i: Value, ahead: _Ahead) -> _Ahead:
        stage = i % STAGES
        keys, factors = memory.keys.copy(stage), memory.of_keys[stage]
        memory.free.copy(stage).wait((block.uses(stage) + i // STAGES & 1) ^ 1)
        if loader.loads_ahead:
            machine.wait_copies()
        for which, row in enumerate(ahead.rows):
            if not isinstance(row, StoredRow):
                row = loader.load(tile(i), which, row)
                machine.wait_copies()
            loader.store(which, row, keys, factors)
            machine.keep_order()  # with the work on both rows interleaved, there are too few registers
        machine.fence_shared()
        memory.full.copy(stage).arrive()
        # Issue loads in the order in which their results are needed. That also uses the addresses first that were found
        # first.
        rows = load(tile(i + 1), loader.resolve(tile(i + 1), ahead.numbers, ahead.looked_up))
        looked_up = loader.look_up(tile(i + 2), ahead.later_numbers)
        later_numbers = loader.find(tile(i + 3))
        return _Ahead(numbers=ahead.later_numbers, looked_up=looked_up, later_numbers=later_numbers, rows=rows)

    machine.loop(
        block.tiles, step, _Ahead(numbers=numbers[1], looked_up=looked_up, later_numbers=numbers[2], rows=rows)
    )
    if block.cluster > 1:  # all lanes of the cluster must arrive at the barrier in ``_merge_parts``
        machine.barrier("cluster")
