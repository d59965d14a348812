"""The tiles of a request that a warpgroup scores: their numbers, where their keys are, and where their scores go."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.language.values import Condition, Index, Value, select
from pallas_kernels.scores.fp4 import Fp4
from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.scores.keys import Keys
from pallas_kernels.scores.queries import Queries
from pallas_kernels.scores.share import TILE_ENTRIES

_LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What a block uses for all requests that it works on."""

    machine: TensorCores
    inputs: ScoreInputs[Buffer]
    out: Buffer  # f32 [B, T, max_entries]
    queries: Queries
    keys: Keys
    warpgroups: int

    @classmethod
    def of(cls, inputs: ScoreInputs[Buffer], out: Buffer, fp4: Fp4, warpgroups: int) -> Self:
        queries, keys = Queries(inputs, fp4, warpgroups), Keys(inputs, fp4)
        return cls(fp4.machine, inputs, out, queries, keys, warpgroups)

    def of_warpgroup(self, first: Value, end: Value) -> tuple[Value, Value]:
        """Return this warpgroup's first tile of first .. end - 1, and the number of its tiles.

        Warpgroups take tiles in turn.
        """
        mine = first + self.machine.thread // WARPGROUP
        return mine, (end - mine + self.warpgroups - 1).maximum(0) // self.warpgroups


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The tiles of a warpgroup in one batch row, counted by ``i``."""

    block: Block
    b: Value
    slot: Value
    first: Value
    end: Value  # end of the block's tiles
    count: Value

    @classmethod
    def of(cls, block: Block, b: Value, first: Value, end: Value) -> Self:
        """Return this warpgroup's tiles, given that the block's are first .. end - 1."""
        slot = block.inputs.slots.load_int(b)
        mine, count = block.of_warpgroup(first, end)
        return cls(block, b, slot, mine, end, count)

    def number(self, i: Index) -> Value:
        """Return the number of a tile in its request."""
        return self.first + i * self.block.warpgroups

    def page(self, i: Index, where: Condition) -> Value:
        """Return the page from which this lane reads its keys."""
        return self.block.keys.page(self.slot, self.number(i), where)

    def store(self, t: Index, i: Value, total: Value, key_scale: list[Value]) -> None:
        """Store a tile's scores for a token.

        Args:
          t: the token.
          i: the tile.
          total: sums over heads. In a quad, even lanes hold that of the first row, and odd lanes that of the second.
          key_scale: factors by which they are multiplied, besides the token's own scale.
        """
        out, machine = self.block.out, self.block.machine
        row = product_row(machine) + (machine.thread & 1) * 8
        entry, where = self.number(i) * TILE_ENTRIES + row, (machine.thread & 3) < 2
        if out.shape[2] % TILE_ENTRIES:
            where = where & (entry < out.shape[2])
        for factor in (self.block.queries.scale(t), *key_scale):
            total = total * factor
        # Scores are finite or +inf, which NaN becomes too.
        score = select(total == total, total, float("inf")).maximum(_LOWEST)
        out.store_floats([score], self.b, t, entry, where=where)
