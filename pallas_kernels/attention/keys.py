"""The keys of a query: where its window rows and entries lie, and how they become f16 tiles in shared memory.

The keys of a query stand in one list: its window, oldest first, then its entries (picked ones, or all that it sees).
The list is cut into tiles of 64 keys, window and entries apart. One warpgroup brings a tile from the stored rows
through registers to shared memory: a quad of lanes per row, two rows per quad, 16 stored bytes at a time, widened to
f16 on the way.

    find     entry number of a key, from the picks
    resolve  where the row lies: through the ring, or through the block table
    load     its bytes, to where they can wait
    store    as f16, into a tile

Each step loads what the next one needs, so they run tiles ahead of each other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from pallas_kernels.language.lanes import Buffer, Team
from pallas_kernels.language.machine import WARPGROUP, Condition, Index, Value, negate, select
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.rows import from_ue8m0

KEYS = 64  # of a tile
HEAD_DIM, NOPE_DIM, ROPE_DIM = 512, 448, 64
_QUAD = 4
_UNIT = 16  # bytes of a load
_EXPONENT = 0x7F800000
_AT_ONCE = 3  # loads from shared memory: enough to wait for them together, few enough for the registers
ROOM = 7 * WARPGROUP * _UNIT * 2  # bytes that a tile's rows wait in: both of a quad, of bf16 one
FORMATS = ("fp8_row", "fp8_tile64", "bf16")
LOG2E = 1 / math.log(2)
LOWEST = -1e30  # in place of -inf, of which a difference would be NaN
SCALED_ROWS = ("fp8_row",)  # formats whose scale is no power of two


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What decode attention reads."""

    q: Any  # f16 or bf16 [B, T, H, 512]
    window: Any  # rows [layers, requests, n_win, ...], rings
    pos: Any  # int32 [layers, requests, n_win] position of a ring's row, -1 = empty
    fresh: Any  # rows [B, F, ...] of positions start, start + 1, ..., which the ring does not hold yet; or None
    entries: Any  # rows [layers, num_blocks, entries_per_block, ...], or None
    picks: Any  # int32 [B, T, K] entry numbers, -1 = none; None = all below visible
    block_table: Any  # int32 [requests, max_blocks], -1 = none
    slots: Any  # int32 [B], -1 = none
    start: Any  # int32 [B] position of the first fresh row
    positions: Any  # int32 [B, T] of the queries, -1 = none
    visible: Any  # int32 [B, T] entries that a query sees; None without entries
    sinks: Any  # f32 [H]
    angles: Any  # f32 [B, T, 64] cosines, then sines, that the output is turned back by; or None
    layer: Any  # int32 [1]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Query:
    """The query of a block, and how many keys it has."""

    machine: TensorCores
    inputs: Inputs  # of buffers
    batch: Value
    token: Value
    layer: Value
    slot: Value
    start: Value
    first: Value  # position of the oldest window key
    window_keys: Value
    visible: Value
    entry_keys: Value  # places in the list: picks, or entries below visible

    @classmethod
    def of_block(cls, machine: TensorCores, inputs: Inputs) -> Query:
        tokens = inputs.q.shape[1]
        batch, token = machine.block(0) // tokens, machine.block(0) % tokens
        slot, layer = inputs.slots.load_int(batch), inputs.layer.load_int(0)
        position, start = inputs.positions.load_int(batch, token), inputs.start.load_int(batch)
        requests, n_win = inputs.pos.shape[1:]
        live = (slot >= 0) & (slot < requests) & (position >= 0)
        first = (position - (n_win - 1)).maximum(0)
        none = machine.constant(0, "i32")
        visible = none if inputs.visible is None else inputs.visible.load_int(batch, token)
        visible = select(live, visible, none)
        entry_keys = visible
        if inputs.picks is not None:
            entry_keys = select(visible > 0, machine.constant(inputs.picks.shape[2], "i32"), none)
        window_keys = select(live, position - first + 1, none)
        return cls(machine, inputs, batch, token, layer, slot, start, first, window_keys, visible, entry_keys)

    @property
    def window_tiles(self) -> int:
        """Known before the position is: where a pick stands waits for no load."""
        return -(-self.inputs.pos.shape[2] // KEYS)

    @property
    def tiles(self) -> Value:
        return (self.entry_keys + (KEYS - 1)) // KEYS + self.window_tiles

    def share(self, cluster: int) -> tuple[Value, Value]:
        """The block's rank in its cluster, and the tiles that it serves: one at least, which may have no key."""
        rank = self.machine.rank if cluster > 1 else self.machine.constant(0, "i32")
        return rank, ((self.tiles + (cluster - 1) - rank) // cluster).maximum(1)

    def head_words(self, head: Value, unit: Value, where: Condition = True) -> list[Value]:
        """Eight channels of a head, from ``unit`` * 8 on, as f16."""
        machine, q = self.machine, self.inputs.q
        words = q.load_words(self.batch, self.token, head, unit * 8, count=8, where=where)
        if q.dtype == "bfloat16":
            pairs = [(machine.from_bits(word << 16), machine.from_bits(word & -65536)) for word in words]
            words = [machine.to_f16(*pair) for pair in pairs]
        return words


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredRow:
    """What a lane of a quad holds of a row on its way."""

    nope: list[Value]  # words, where they do not wait in shared memory
    rope: list[Value]  # words
    scale: list[Value]  # i32, what the format needs
    position: Value  # that the ring says the row has
    place: Value  # -1 = there is no key

    def flat(self) -> list[Value]:
        return [*self.nope, *self.rope, *self.scale, self.position, self.place]

    def like(self, flat: list[Value]) -> StoredRow:
        """From what ``flat`` gave, elsewhere."""
        *words, position, place = flat
        rope, scale = len(self.nope), len(self.nope) + len(self.rope)
        return StoredRow(words[:rope], words[rope:scale], words[scale:], position, place)


class KeyLoader:
    """A warpgroup that brings tiles of keys. A key's number is its position in the window, or that of an entry."""

    def __init__(self, query: Query, kv_format: str):
        self.query, self.machine, self.kv_format = query, query.machine, kv_format
        lane = self.machine.thread % WARPGROUP
        self.quarter = lane % _QUAD
        # Rows r and r + 8 of 16: a quarter of a warp's lanes, two rows, writes all banks of shared memory once.
        row = lane // 32 * 16 + lane % 32 // _QUAD
        self.rows = [row, row + 8]
        self.itemsize = query.inputs.window.nope.dtype.itemsize
        self.nope_loads = NOPE_DIM * self.itemsize // (_UNIT * _QUAD)  # per row

    # Where a key is.
    def _is_window(self, tile: Value) -> Value:
        return tile < self.query.window_tiles

    def find(self, tile: Value) -> list[Value]:
        """The number of each row's key, -1 = none."""
        query, found = self.query, []
        in_window = self._is_window(tile)
        for row in self.rows:
            place = tile * KEYS + row
            entry = place - query.window_tiles * KEYS
            if query.inputs.entries is None:
                number = self.machine.constant(-1, "i32")
            elif query.inputs.picks is None:
                number = select((entry >= 0) & (entry < query.visible), entry, -1)
            else:
                picks = query.inputs.picks
                inside = (entry >= 0) & (entry < picks.shape[2])
                (number,) = self.machine.load(
                    picks.address_of((query.batch, query.token, entry)), 4, inside, constant=True, otherwise=-1
                )
            found.append(select(in_window, select(place < query.window_keys, query.first + place, -1), number))
        return found

    def find_blocks(self, tile: Value, numbers: list[Value]) -> list[Value]:
        """Entries: the block of each row's key, -1 = none."""
        query = self.query
        if query.inputs.entries is None:
            return [self.machine.constant(-1, "i32")] * 2
        per_block, table = query.inputs.entries.nope.shape[2], query.inputs.block_table
        blocks = []
        for number in numbers:
            known = (number >= 0) & (number < query.visible) & negate(self._is_window(tile))
            known = known & (number < table.shape[1] * per_block)
            address = table.address_of((query.slot, number // per_block))
            blocks += self.machine.load(address, 4, known, constant=True, otherwise=-1)
        return blocks

    def resolve(self, tile: Value, numbers: list[Value], blocks: list[Value]) -> list[Value]:
        """The row number of each key in the whole of its array (rings, fresh rows, or entries), -1 = none."""
        query, inputs = self.query, self.query.inputs
        in_window, places = self._is_window(tile), []
        _, requests, n_win = inputs.pos.shape
        for number, block in zip(numbers, blocks, strict=True):
            place = (query.layer * requests + query.slot) * n_win + number % n_win
            if inputs.fresh is not None:
                length = inputs.fresh.nope.shape[1]
                ahead = number - query.start
                row = select(ahead < length, query.batch * length + ahead, -1)
                place = select(ahead >= 0, row, place)
            place = select(number >= 0, place, -1)
            if inputs.entries is not None:
                _, num_blocks, per_block = inputs.entries.nope.shape[:3]
                row = (query.layer * num_blocks + block) * per_block + number % per_block
                there = (block >= 0) & (block < num_blocks)
                place = select(in_window, place, select(there, row, -1))
            places.append(place)
        return places

    # Its bytes.
    def _is_fresh(self, tile: Value, row: Value) -> Condition:
        """Whether a window row is one of the new tokens'."""
        if self.query.inputs.fresh is None:
            return False
        number = self.query.first + (tile * KEYS + row)
        return self._is_window(tile) & (number >= self.query.start)

    def _address(self, name: str, tile: Value, row: Value, place: Value, first: Index) -> Value:
        """i64 address of a row's leaf, from element ``first``."""
        inputs = self.query.inputs
        leaf: Buffer = getattr(inputs.window, name)
        start = leaf.address
        if inputs.fresh is not None:
            start = select(self._is_fresh(tile, row), getattr(inputs.fresh, name).address, start)
        if inputs.entries is not None:
            start = select(self._is_window(tile), start, getattr(inputs.entries, name).address)
        width = leaf.shape[3] if len(leaf.shape) == 4 else 1
        start = start + self.machine.widen(place) * (width * leaf.dtype.itemsize)
        return start + self.machine.widen(first * leaf.dtype.itemsize) if isinstance(first, Value) else start

    def load(self, tile: Value, which: int, place: Value, room: int | None) -> StoredRow:
        """Start to bring the first or second row of a tile: zeros where there is no key.

        Its NoPE bytes come to shared memory, ``ROOM`` bytes at ``room``, each lane's to a place of its own; or, where
        that is None, to registers.
        """
        query, machine, row = self.query, self.machine, self.rows[which]
        there, unit = place >= 0, _UNIT // self.itemsize
        nope = self._address("nope", tile, row, place, self.quarter * unit)
        in_registers: list[Value] = []
        for i in range(self.nope_loads):
            if room is None:
                in_registers += machine.load(nope + i * _UNIT * _QUAD, _UNIT, there, constant=True)
            else:
                machine.copy_async(self._lane_room(room, i), nope + i * _UNIT * _QUAD, there)
        # Both RoPE units of a lane lie beside each other where they widen to two units, as NoPE bytes do.
        beside = self.itemsize == 1
        rope = self._address("rope", tile, row, place, self.quarter * (_UNIT if beside else _UNIT // 2))
        words: list[Value] = []
        for i in range(2):
            words += machine.load(rope + i * _UNIT * (1 if beside else _QUAD), 16, there, constant=True)
        scale: list[Value] = []
        if self.kv_format == "fp8_row":
            scale = machine.load(self._address("scale", tile, row, place, 0), 4, there, constant=True)
        elif self.kv_format == "fp8_tile64":  # of seven bytes this lane's, and the one four further
            address = self._address("scale", tile, row, place, self.quarter)
            scale = machine.load(address, 1, there, constant=True)
            scale += machine.load(address + _QUAD, 1, there & (self.quarter < 3), constant=True)
        ring = query.inputs.pos.address + machine.widen(place) * 4
        from_ring = there & self._is_window(tile) & negate(self._is_fresh(tile, row))
        (position,) = machine.load(ring, 4, from_ring, constant=True)
        return StoredRow(in_registers, words, scale, position, place)

    def _lane_room(self, room: int, load: int) -> Value:
        return self.machine.thread % WARPGROUP * _UNIT + (room + load * WARPGROUP * _UNIT)

    def store(self, tile: Value, which: int, stored: StoredRow, room: int | None, to: Tile, key: Value) -> None:
        """Write a row that has come to a tile as f16, and to ``key`` (f32 [KEYS, 2]) what its logits are multiplied by
        and what is added.

        A row is its f16 times a factor in [1, 2): the fraction of its scale, so that a code times the scale's power of
        two is exact in f16. What is added is 0, or -inf where there is no key.
        """
        machine, row = self.machine, self.rows[which]
        number = self.query.first + (tile * KEYS + row)
        has_no_ring = negate(self._is_window(tile) & negate(self._is_fresh(tile, row)))
        valid = (stored.place >= 0) & (stored.position.equals(number) | has_no_ring)
        mask = select(valid, machine.constant(-1, "i32"), 0)
        # What a ring's row of another position holds is masked as well: NaN times a weight of 0 would be NaN.
        powers, factor, inverse = self._powers(stored.scale), machine.constant(1.0, "f32"), None
        if self.kv_format in SCALED_ROWS:
            factor = machine.from_bits(stored.scale[0] & 0x7FFFFF | 0x3F800000)
            inverse = machine.reciprocal(factor)
        # A few loads at once: none from shared memory is moved in front of a store to it.
        waiting = [stored.nope[n : n + 4] for n in range(0, len(stored.nope), 4)]
        for i in range(self.nope_loads):
            if not waiting:
                assert room is not None
                several = range(i, min(i + _AT_ONCE, self.nope_loads))
                waiting = [machine.load_shared(self._lane_room(room, n), 16) for n in several]
            words = [word & mask for word in waiting.pop(0)]
            if self.itemsize == 2:
                halves = [self._bf16_to_f16(word, None) for word in words]
            else:
                halves = [half for word in words for half in machine.e4m3_to_f16(word)]
                halves = [machine.multiply_f16(half, powers[i]) for half in halves]
            self._store_units(halves, to, row, i)
        for i in range(2):
            words = [word & mask for word in stored.rope[4 * i : 4 * i + 4]]
            self._store_units([self._bf16_to_f16(word, inverse) for word in words], to, row, self.nope_loads + i)
        added = select(valid, machine.constant(0.0, "f32"), -math.inf)
        pair = [machine.bits(factor), machine.bits(added)]
        machine.store_shared(key + row * 8, pair, 8, self.quarter.equals(0))

    def _store_units(self, halves: list[Value], to: Tile, row: Value, load: int) -> None:
        for part in range(len(halves) // 4):
            self.machine.store_shared(to.unit(row, self._unit(load, part)), halves[4 * part : 4 * part + 4], 16, True)

    def _unit(self, load: int, part: int) -> Value:
        """Which 16-byte unit of the f16 row a load's part becomes."""
        if self.itemsize == 2:
            return self.quarter + load * _QUAD
        if load < self.nope_loads:
            return self.quarter * 2 + (load * 2 * _QUAD + part)
        return self.quarter * 2 + (self.nope_loads * 2 * _QUAD + load - self.nope_loads)

    def _bf16_to_f16(self, word: Value, factor: Value | None) -> Value:
        pair = [self.machine.from_bits(word << 16), self.machine.from_bits(word & -65536)]
        if factor is not None:
            pair = [value * factor for value in pair]
        return self.machine.to_f16(*pair)

    def _powers(self, scale: list[Value]) -> list[Value]:
        """Per NoPE load, the power of two that its codes are multiplied by, as a pair of f16."""
        machine = self.machine
        if self.kv_format == "fp8_row":
            power = machine.from_bits(scale[0] & _EXPONENT)
            return [machine.to_f16(power, power)] * self.nope_loads
        if self.kv_format != "fp8_tile64":
            return []
        packed = [byte << self.quarter * 8 for byte in scale]
        packed = [Team(machine, WARPGROUP).neighbours(lambda a, b: a | b, word, _QUAD) for word in packed]
        powers = [from_ue8m0(packed[i // _QUAD] >> i % _QUAD * 8 & 0xFF) for i in range(self.nope_loads)]
        return [machine.to_f16(power, power) for power in powers]
