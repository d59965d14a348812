"""A warpgroup's tiles of a request: which they are, where their keys lie, and where their scores go."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Condition, Index, Value, select
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.scores.fp4 import Fp4
from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.scores.keys import Keys
from pallas_kernels.scores.queries import Queries
from pallas_kernels.scores.share import TILE_ENTRIES

_LOWEST = float(np.finfo(np.float32).min)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What a block has for all requests that it serves."""

    machine: TensorCores
    inputs: ScoreInputs  # of buffers
    out: Buffer  # f32 [B, T, max_entries]
    queries: Queries
    keys: Keys
    warpgroups: int

    @classmethod
    def of(cls, inputs: ScoreInputs, out: Buffer, fp4: Fp4, warpgroups: int) -> Self:
        queries, keys = Queries(inputs, fp4, warpgroups), Keys(inputs, fp4)
        return cls(fp4.machine, inputs, out, queries, keys, warpgroups)

    def of_warpgroup(self, first: Value, end: Value) -> tuple[Value, Value]:
        """The first of tiles first .. end - 1 that this warpgroup takes, and how many: they take turns."""
        mine = first + self.machine.thread // WARPGROUP
        return mine, (end - mine + self.warpgroups - 1).maximum(0) // self.warpgroups


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Those of a warpgroup in one batch row. ``i`` counts them."""

    block: Block
    b: Value
    slot: Value
    first: Value
    end: Value  # of the block's
    count: Value

    @classmethod
    def of(cls, block: Block, b: Value, first: Value, end: Value) -> Self:
        """Of tiles first .. end - 1, which are the block's."""
        slot = block.inputs.slots.load_int(b)
        mine, count = block.of_warpgroup(first, end)
        return cls(block, b, slot, mine, end, count)

    def number(self, i: Index) -> Value:
        """Of a tile in its request."""
        return self.first + i * self.block.warpgroups

    def page(self, i: Index, where: Condition) -> Value:
        """The page that this lane reads its keys from."""
        return self.block.keys.page(self.slot, self.number(i), where)

    def store(self, t: int, i: Value, total: Value, key_scale: list[Value]) -> None:
        """Store a tile's scores for a token.

        Args:
          total: sums over heads; of a quad's first row in even lanes, of its second in odd ones.
          key_scale: what they are multiplied by besides the token's own scale.
        """
        out, machine = self.block.out, self.block.machine
        row = product_row(machine) + (machine.thread & 1) * 8
        entry, where = self.number(i) * TILE_ENTRIES + row, (machine.thread & 3) < 2
        if out.shape[2] % TILE_ENTRIES:
            where = where & (entry < out.shape[2])
        for factor in (self.block.queries.scale(t), *key_scale):
            total = total * factor
        # Finite or +inf, which stands for NaN too.
        score = select(total == total, total, float("inf")).maximum(_LOWEST)
        out.store_floats([score], self.b, t, entry, where=where)
