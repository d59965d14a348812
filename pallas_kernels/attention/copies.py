"""How rows that were widened before (``wide``) get into the tiles of Hopper's kernel.

Without picks, the rows of a tile lie one after the other, and the hardware copies them, which one warpgroup asks for.
With picks there are two warpgroups, one for the first tiles of pairs and one for the second. Eight lanes together copy
a row, 128 bytes at a time.

Each half of a tile's channels has barriers of its own. The multiplying warpgroup that adds the half to its output gives
it back as soon as that is done, so that the next tile's half is under way while the other half is still in use.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.attention.block import STAGES, Block, Memory
from pallas_kernels.attention.inputs import HEAD_DIM
from pallas_kernels.attention.keys import KEYS, Query
from pallas_kernels.attention.wide import WideRows
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import ATOM_BYTES, UNIT, Tile, TileCopy
from pallas_kernels.language.values import Index, Value, negate, select

PARTS = 2  # of a tile's channels, with barriers of their own
PIECES = HEAD_DIM * 2 // ATOM_BYTES  # copies of ``Memory.keys`` that make a tile: 128 bytes of each row
_TEAM = ATOM_BYTES // UNIT  # lanes that copy a row
_OF_PART = PIECES // PARTS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ahead:
    """What a lane knows about its rows of the next two tiles when it is about to copy the first of them."""

    numbers: list[Value]  # of the first tile
    biases: list[Value]  # of the first tile
    later_numbers: list[Value]  # of the second tile


def _oldest(query: Query) -> Value:
    """Return the number of the row of a query's first position. Positions of queries are not below ``start``."""
    return query.first_position - query.start + query.inputs.pos.shape[2]


class _Copier:
    """A warpgroup that copies tiles. Each lane takes part in four rows of a tile."""

    def __init__(self, query: Query):
        self.query, self.machine = query, query.machine
        self.wide: WideRows = query.inputs.wide
        lane = self.machine.thread % WARPGROUP
        self._unit, row = lane % _TEAM, lane // _TEAM
        self._rows = [row + first for first in range(0, KEYS, WARPGROUP // _TEAM)]  # of a tile

    def find(self, tile: Value) -> list[Value]:
        """Return the number of each key's row among those of the request, -1 = none."""
        query, inputs, of_window = self.query, self.query.inputs, self.wide.of_window
        found = []
        for row in self._rows:
            place = tile * KEYS + row
            entry = place - query.window_tiles * KEYS
            inside = (entry >= 0) & (entry < inputs.picks.shape[2])
            address = inputs.picks.address_of((query.batch, query.token, entry))
            (entry,) = self.machine.load(address, 4, inside, constant=True, otherwise=-1)
            there = (entry >= 0) & (entry < query.visible) & (entry < self.wide.of_request - of_window)
            entry = select(there, entry + of_window, -1)
            known = place + _oldest(query)
            there = (place < query.window_keys) & (known >= 0) & (known < of_window)
            found.append(select(tile < query.window_tiles, select(there, known, -1), entry))
        return found

    def load_biases(self, numbers: list[Value]) -> list[Value]:
        """Load what is added to the logits of each key."""
        bias, batch = self.wide.bias, self.query.batch
        return [
            bias.load_floats(batch, number, count=1, where=number >= 0, otherwise=-math.inf)[0] for number in numbers
        ]

    def store_biases(self, biases: list[Value], to: Shared) -> None:
        """Store what is added to the logits of a tile's keys to f32 [KEYS]."""
        for row, bias in zip(self._rows, biases, strict=True):
            to.store_floats([bias], row, where=self._unit == 0)

    def copy(self, numbers: list[Value], keys: Tile, part: int) -> None:
        """Start to copy a part of the channels of each key. Rows of a tile without a key become zero."""
        for number, row in zip(numbers, self._rows, strict=True):
            to, in_all = keys.unit(row, self._unit), self.query.batch * self.wide.of_request + number
            source = self.wide.rows.address_of((in_all, self._unit * (UNIT // 2)))
            for piece in range(part * _OF_PART, (part + 1) * _OF_PART):
                self.machine.copy_async(to + piece * keys.size, source + piece * ATOM_BYTES, number >= 0)


def copy_runs(block: Block, memory: Memory) -> None:
    """Let the hardware copy the tiles of queries without picks, as one warpgroup.

    A tile's rows lie one after the other. Those that are no keys of the query have biases of -inf.
    """
    machine, query = block.machine, block.query
    wide: WideRows = query.inputs.wide
    lane = machine.thread % WARPGROUP
    row = lane // (WARPGROUP // KEYS)

    def step(i: Value, carry: Value) -> Value:
        stage = i % STAGES
        keys, bias = memory.keys.copy(stage * PIECES), memory.of_keys[stage]
        in_window, place = i < query.window_tiles, i * KEYS
        entry = place - query.window_tiles * KEYS
        first = select(in_window, place + _oldest(query), entry + wide.of_window)
        count = select(in_window, query.window_keys - place, query.visible - entry)  # of keys from the first on
        end = select(in_window, machine.constant(wide.of_window, "i32"), wide.of_request)
        there = (row < count) & (first + row >= 0) & (first + row < end)
        (found,) = wide.bias.load_floats(query.batch, first + row, count=1, where=there, otherwise=-math.inf)
        parity, fills = (block.uses(stage) + i // STAGES & 1) ^ 1, lane < WARP
        for part in range(PARTS):
            full = memory.full.copy(stage * PARTS + part)
            memory.free.copy(stage * PARTS + part).wait(parity)
            if part == PARTS - 1:  # both warpgroups have read the biases of the tile before
                bias.store_floats([found], row, where=lane % (WARPGROUP // KEYS) == 0)
            with machine.when(fills):
                full.fill(
                    *(
                        TileCopy(
                            source=wide.rows,
                            row=query.batch * wide.of_request + first.maximum(0),
                            column=piece * (ATOM_BYTES // 2),
                            to=keys.copy(piece).offset,
                            rows=KEYS,
                            row_bytes=ATOM_BYTES,
                        )
                        for piece in range(part * _OF_PART, (part + 1) * _OF_PART)
                    )
                )
            full.arrive(negate(fills))
        return carry

    machine.loop(block.tiles, step, machine.constant(0, "i32"))


def copy_picked(block: Block, memory: Memory, stage: int) -> None:
    """Copy those of a query's tiles that have the same stage, as one warpgroup."""
    machine, copier, bias = block.machine, _Copier(block.query), memory.of_keys[stage]
    keys, used = memory.keys.copy(stage * PIECES), block.before.seconds if stage else block.before.firsts

    def find(i: Index) -> list[Value]:
        return copier.find(machine.constant(stage, "i32") + i * STAGES)

    def step(i: Value, ahead: _Ahead) -> _Ahead:
        numbers = [select(bias == 0.0, number, -1) for number, bias in zip(ahead.numbers, ahead.biases, strict=True)]
        for part in range(PARTS):
            memory.free.copy(stage * PARTS + part).wait((used + i & 1) ^ 1)
            if part == PARTS - 1:  # both warpgroups have read the biases of the tile before
                copier.store_biases(ahead.biases, bias)
            copier.copy(numbers, keys, part)
            machine.close_copies()
        biases, later_numbers = copier.load_biases(ahead.later_numbers), find(i + 2)
        for part in range(PARTS):
            machine.wait_copies(pending=PARTS - 1 - part)
            machine.fence_shared()
            memory.full.copy(stage * PARTS + part).arrive()
        return _Ahead(numbers=ahead.later_numbers, biases=biases, later_numbers=later_numbers)

    first, second = find(0), find(1)
    ahead = _Ahead(numbers=first, biases=copier.load_biases(first), later_numbers=second)
    machine.loop((block.tiles + (STAGES - 1 - stage)) // STAGES, step, ahead)
