"""Stored keys of the indexer on their way to a product: 64 at a time, a quarter of two rows in each lane."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Condition, Value
from pallas_kernels.language.tensor_cores import product_row
from pallas_kernels.scores.fp4 import CODE_BYTES, QUARTER_BYTES, Fp4
from pallas_kernels.scores.inputs import PAGE_ENTRIES, ScoreInputs
from pallas_kernels.scores.share import TILE_ENTRIES

_ROWS = (0, 8)  # a lane's rows of a tile, from its first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StoredKeys:
    """A lane's quarter of two rows, as it is stored."""

    codes: list[list[Value]]  # four words of each row
    scales: list[Value]  # a word of each row


class Keys:
    """A lane's part of the keys of its warpgroup's tiles."""

    def __init__(self, inputs: ScoreInputs, fp4: Fp4):
        self.inputs, self.fp4 = inputs, fp4
        machine = fp4.machine
        self.half = machine.thread % WARPGROUP // (WARPGROUP // 2)  # of a tile: one page each
        layer, row = inputs.layer.load_int(0), product_row(machine) % PAGE_ENTRIES
        self.codes = self._from(inputs.keys.codes, layer, row, fp4.quarter * QUARTER_BYTES)
        self.scales = self._from(inputs.keys.scale, layer, row, fp4.quarter * fp4.quarter_scales)

    @staticmethod
    def _from(stored: Buffer, layer: Value, row: Value, byte: Value) -> Buffer:
        """[num_blocks, bytes of a page] from this lane's first byte on, so that a tile costs one multiply-add."""
        _, pages, rows, width = stored.shape
        address = stored.address_of((layer, 0, row, byte))
        return dataclasses.replace(stored, address=address, shape=(pages, rows * width))

    def page(self, slot: Value, tile: Value, where: Condition) -> Value:
        """Number of this lane's page of a tile, -1 where there is none."""
        at = tile * (TILE_ENTRIES // PAGE_ENTRIES) + self.half
        max_blocks = self.inputs.block_table.shape[1]
        if max_blocks % 2:
            where = where & (at < max_blocks)
        return self.inputs.block_table.load_int(slot, at, where=where, otherwise=-1)

    def load(self, page: Value) -> StoredKeys:
        """Those of a page; 0 where there is no such page."""
        there = (page >= 0) & (page < self.inputs.keys.codes.shape[1])
        count = self.fp4.quarter_scales
        codes = [self.codes.load_words(page, row * CODE_BYTES, count=QUARTER_BYTES, where=there) for row in _ROWS]
        width = self.fp4.scale_bytes
        scales = [self.scales.load_words(page, row * width, count=count, where=there)[0] for row in _ROWS]
        return StoredKeys(codes, scales)

    def unpack(self, stored: StoredKeys) -> tuple[list[list[Value]], list[Value]]:
        """Each row for ``Fp4.finish``, and the rows' scale if there is one."""
        return self.fp4.unpack(stored.codes, stored.scales)
