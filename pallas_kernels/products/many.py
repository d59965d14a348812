"""What products of many rows share on Hopper: a block's place and memory, its turns, and adding and storing sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.language.machine import VECTOR, WARPGROUP, Value
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.products.ring import Ring
from pallas_kernels.products.tiling import LANES, Place, Tiling


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


def for_each_tile(
    turns: Turns,
    ring: Ring,
    arena: int,
    sums: Callable[[Value], list[Value]],
    store: Callable[[Value, Value | int, list[Value]], None],
) -> None:
    """Compute and store the sums of each tile.

    Args:
      turns: the block's tiles.
      ring: the stages.
      arena: where the stages begin in shared memory, which parts of the inputs use to add their sums.
      sums: computes those of a tile, by the number of its first chunk.
      store: stores fours of a turn's tile, the first of which has a number.
    """
    machine, tiling = turns.machine, turns.tiling
    ring.begin()

    def one(turn: Value, _: None) -> None:
        store(turn, *exchange(machine, tiling, arena, sums(turn * tiling.chunks)))

    if tiling.tiles > tiling.blocks:
        machine.loop(turns.count, one, None)
    else:
        one(machine.constant(0, "i32"), None)


def exchange(machine: TensorCores, tiling: Tiling, arena: int, sums: list[Value]) -> tuple[Value | int, list[Value]]:
    """Add the sums of all parts of the inputs, in their order, in the cluster's shared memory from ``arena`` on.

    Returns:
      The number of the first of the fours that this block has then, and those fours.
    """
    if tiling.parts == 1:
        return 0, sums
    owned = tiling.fours // tiling.parts
    received = Shared(machine, arena, (tiling.parts, owned, LANES, VECTOR), "f32")
    machine.barrier("cluster")  # nobody reads the stages any more
    for n in range(tiling.fours):
        to, place = divmod(n, owned)
        received.store_floats(sums[VECTOR * n : VECTOR * (n + 1)], machine.rank, place, machine.thread, 0, rank=to)
    machine.barrier("cluster")
    mine: list[Value] = []
    for n in range(owned):
        parts = [received.load_floats(part, n, machine.thread, 0) for part in range(tiling.parts)]
        mine += functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], parts)
    return machine.rank * owned, mine


def warp_rows(machine: TensorCores) -> Value:
    """Return the first of the 16 rows of a product that a warp has, with the block's warpgroups one after the other."""
    return machine.thread // WARPGROUP * 64 + machine.thread % WARPGROUP // 32 * 16
