"""Stored keys of the indexer on their way to a product: 64 at a time, a quarter of two rows in each lane."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP, Value
from pallas_kernels.language.tensor_cores import TensorCores, product_row
from pallas_kernels.scores.fp4 import CODE_BYTES, QUARTER_BYTES, Fp4
from pallas_kernels.scores.parts import ENTRIES, PER_BLOCK, Inputs

_ROWS = (0, 8)  # a lane's rows of a tile, from its first


class Keys:
    """A lane's part of the keys of its warpgroup's tiles."""

    def __init__(self, machine: TensorCores, inputs: Inputs, fp4: Fp4):
        self.machine, self.inputs, self.fp4 = machine, inputs, fp4
        self.half = machine.thread % WARPGROUP // (WARPGROUP // 2)  # of a tile: one block each
        layer, row = inputs.layer.load_int(0), product_row(machine) % PER_BLOCK
        self.codes = self._from(inputs.keys.codes, layer, row, fp4.quarter * QUARTER_BYTES)
        self.scales = self._from(inputs.keys.scale, layer, row, fp4.quarter * fp4.quarter_scales)

    @staticmethod
    def _from(stored: Buffer, layer: Value, row: Value, byte: Value) -> Buffer:
        """[num_blocks, bytes of a block] from this lane's first byte on, so that a tile costs one multiply-add."""
        _, blocks, rows, width = stored.shape
        address = stored.address_of((layer, 0, row, byte))
        return dataclasses.replace(stored, address=address, shape=(blocks, rows * width))

    def block(self, slot: Value, tile: Value, where: Value) -> Value:
        """Number of this lane's block of a tile, -1 where there is none."""
        at = tile * (ENTRIES // PER_BLOCK) + self.half
        max_blocks = self.inputs.block_table.shape[1]
        if max_blocks % 2:
            where = where & (at < max_blocks)
        return self.inputs.block_table.load_int(slot, at, where=where, otherwise=-1)

    def load(self, block: Value) -> list[Value]:
        """Four words of codes of each row, then each row's scales; 0 where there is no such block."""
        there = (block >= 0) & (block < self.inputs.keys.codes.shape[1])
        count = self.fp4.quarter_scales
        words = []
        for row in _ROWS:
            words += self.codes.load_words(block, row * CODE_BYTES, count=QUARTER_BYTES, where=there)
        for row in _ROWS:
            words += self.scales.load_words(block, row * self.fp4.scale_bytes, count=count, where=there)
        return words

    def unpack(self, words: list[Value]) -> tuple[list[list[Value]], list[Value]]:
        """Each row for ``Fp4.finish``, and the rows' scale if there is one."""
        return self.fp4.unpack((words[:4], words[4:8]), words[8:])
