"""What products of many rows share on Hopper: a block's turns, its stages, its roles, and adding sums of a cluster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.machine import VECTOR, WARP, WARPGROUP, Condition, Value
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import Role, TensorCores
from pallas_kernels.products.tiling import LANES, LOADERS, WARPGROUPS, Place, Tiling

_MULTIPLIERS, _LOADERS = 240, 24  # registers per lane


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManyInputs:
    """The arrays of a product of many rows, or their buffers."""

    x: Any  # bf16 or, if rounded, uint8 [M, groups * inputs]
    x_scales: Any  # f32 [groups * inputs / 128, M rounded up to 128] of rounded rows, else None
    weight: Any  # uint8 [groups * outputs, inputs]
    scales: Any  # uint8 [groups * outputs / block, inputs / block]
    angles: Any = None  # f32 [M, rope_dim], cosines and then sines, for queries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The tiles of a block: every ``blocks``-th, from the block's own number on."""

    machine: TensorCores
    tiling: Tiling
    part: Value  # of the inputs

    @classmethod
    def of(cls, machine: TensorCores, tiling: Tiling) -> Turns:
        part = machine.rank if tiling.parts > 1 else machine.constant(0, "i32")
        return cls(machine=machine, tiling=tiling, part=part)

    @property
    def count(self) -> Value:
        tiling = self.tiling
        return (self.machine.block(0) * -1 + (tiling.tiles - 1)) // tiling.blocks + 1

    @property
    def total(self) -> Value:
        """Chunks of all tiles."""
        return self.count * self.tiling.chunks

    def place(self, turn: Value) -> Place:
        return self.tiling.place(turn * self.tiling.blocks + self.machine.block(0), self.machine.rank)

    def chunk(self, number: Value) -> tuple[Place, Value]:
        """Return the tile of a chunk, by its number among those of all tiles, and its first input."""
        chunks = self.tiling.chunks
        return self.place(number // chunks), (number % chunks + self.part * chunks) * self.tiling.chunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """The stages of a block: chunks of its tiles in shared memory, and who may read or overwrite them.

    The chunks of all tiles of a block are numbered in the order in which they are multiplied. Chunk n is in stage n %
    stages. A warp of its own starts the copies, each when both multiplying warpgroups have left the stage. So one of
    these may be ahead of the other by nearly all stages, and can multiply while the other one stores.
    """

    machine: TensorCores
    full: Barrier  # per stage: the chunk is there
    free: Barrier  # per stage: nobody reads it any more
    turns: Turns
    fill: Callable[[Value, Value, Barrier], None]  # starts the copies of a chunk, by its number and its stage

    @classmethod
    def take(cls, turns: Turns, fill: Callable[[Value, Value, Barrier], None]) -> Ring:
        """Take and initialise the barriers."""
        machine, stages = turns.machine, turns.tiling.stages
        full = Barrier.take(machine, 1, copies=stages)
        free = Barrier.take(machine, LANES // WARP, copies=stages)
        init_barriers(full, free)
        return cls(machine=machine, full=full, free=free, turns=turns, fill=fill)

    @property
    def stages(self) -> int:
        return self.turns.tiling.stages

    def load(self) -> None:
        """Start the copies of all chunks, as one warp."""

        def one(chunk: Value, _: None) -> None:
            stage = chunk % self.stages
            self.free.copy(stage).wait((chunk // self.stages & 1) ^ 1)
            self.fill(chunk, stage, self.full.copy(stage))

        self.machine.loop(self.turns.total, one, None)

    def wait(self, chunk: Value) -> Value:
        """Wait for a chunk, and return its stage."""
        stage = chunk % self.stages
        self.full.copy(stage).wait(chunk // self.stages & 1)
        return stage

    def leave(self, chunk: Value, where: Condition = True) -> None:
        """Say that this warp no longer reads a chunk."""
        self.free.copy(chunk % self.stages).arrive(where)


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


def for_each_tile(
    turns: Turns,
    ring: Ring,
    arena: int,
    scales: Callable[[Value], Any],
    sums: Callable[[Value, Any], tuple[list[Value], Any]],
    store: Callable[[Value, Value | int, list[Value]], None],
) -> None:
    """Compute and store the sums of each tile.

    Args:
      turns: the block's tiles.
      ring: the stages.
      arena: where the stages begin in shared memory, which parts of the inputs use to add their sums.
      scales: loads those of the weight for a chunk, by its number.
      sums: computes those of a tile, by the number of its first chunk and that chunk's scales. It returns the scales of
        the next tile's first chunk too, so that no tile begins with a wait for them.
      store: stores fours of a turn's tile, the first of which has a number.
    """
    machine, tiling = turns.machine, turns.tiling
    exchange = Exchange.take(machine, tiling, arena)

    def one(turn: Value, of_first: Any) -> Any:
        of_tile, following = sums(turn * tiling.chunks, of_first)
        store(turn, *(exchange.add(of_tile) if exchange else (0, of_tile)))
        return following

    def multiply() -> None:
        start = machine.constant(0, "i32")
        if tiling.tiles > tiling.blocks:
            machine.loop(turns.count, one, scales(start))
        else:
            one(start, scales(start))

    def load() -> None:
        with machine.when(machine.thread % WARPGROUP < WARP):
            ring.load()
            if exchange is not None:  # of the block's only tile
                for chunk in range(max(0, tiling.chunks - tiling.stages), tiling.chunks):
                    ring.wait(machine.constant(chunk, "i32"))
                exchange.leave()

    machine.roles(
        Role(warpgroups=WARPGROUPS, registers=_MULTIPLIERS, body=multiply),
        Role(warpgroups=LOADERS, registers=_LOADERS, body=load),
    )


def warp_rows(machine: TensorCores) -> Value:
    """Return the first of the 16 rows of a product that a warp has, with the block's warpgroups one after the other."""
    return machine.thread // WARPGROUP * 64 + machine.thread % WARPGROUP // 32 * 16
