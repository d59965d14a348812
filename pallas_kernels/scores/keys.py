"""Loading the stored keys of the indexer for a product: 64 keys at a time. Each lane holds a quarter of two rows."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.tensor_cores import product_row
from pallas_kernels.language.values import Condition, Value
from pallas_kernels.scores.fp4 import CODE_BYTES, QUARTER_BYTES, Fp4
from pallas_kernels.scores.inputs import PAGE_ENTRIES, ScoreInputs
from pallas_kernels.scores.share import TILE_ENTRIES

_ROWS = (0, 8)  # the two rows of a tile that a lane has, relative to its first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StoredKeys:
    """A lane's quarter of two rows, still encoded."""

    codes: list[list[Value]]  # four words per row
    scales: list[Value]  # one word per row


class Keys:
    """A lane's part of the keys in its warpgroup's tiles."""

    def __init__(self, inputs: ScoreInputs[Buffer], fp4: Fp4):
        self.inputs, self.fp4 = inputs, fp4
        machine = fp4.machine
        self.half = machine.thread % WARPGROUP // (WARPGROUP // 2)  # this lane's half of a tile, which is a page
        layer, row = inputs.layer.load_int(0), product_row(machine) % PAGE_ENTRIES
        self.codes = self._from(inputs.keys.codes, layer, row, fp4.quarter * QUARTER_BYTES)
        assert inputs.keys.scale is not None
        self.scales = self._from(inputs.keys.scale, layer, row, fp4.quarter * fp4.quarter_scales)

    @staticmethod
    def _from(stored: Buffer, layer: Value, row: Value, byte: Value) -> Buffer:
        """Return a view [num_blocks, bytes of a page] that begins at this lane's first byte.

        With it, the address for a tile takes one multiply-add.
        """
        _, pages, rows, width = stored.shape
        address = stored.address_of((layer, 0, row, byte))
        return dataclasses.replace(stored, address=address, shape=(pages, rows * width))

    def page(self, slot: Value, tile: Value, where: Condition) -> Value:
        """Return the number of this lane's page of a tile; -1 if there is none."""
        at = tile * (TILE_ENTRIES // PAGE_ENTRIES) + self.half
        max_blocks = self.inputs.block_table.shape[1]
        if max_blocks % 2:
            where = where & (at < max_blocks)
        return self.inputs.block_table.load_int(slot, at, where=where, otherwise=-1)

    def load(self, page: Value) -> StoredKeys:
        """Load the keys of a page; 0 if there is no such page."""
        there = (page >= 0) & (page < self.inputs.keys.codes.shape[1])
        count = self.fp4.quarter_scales
        codes = [self.codes.load_words(page, row * CODE_BYTES, count=QUARTER_BYTES, where=there) for row in _ROWS]
        width = self.fp4.scale_bytes
        scales = [self.scales.load_words(page, row * width, count=count, where=there)[0] for row in _ROWS]
        return StoredKeys(codes, scales)

    def unpack(self, stored: StoredKeys) -> tuple[list[list[Value]], list[Value]]:
        """Return what ``Fp4.finish`` takes for each row, and the scale of the rows if there is one."""
        return self.fp4.unpack(stored.codes, stored.scales)
