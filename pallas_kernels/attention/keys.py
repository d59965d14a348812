"""The keys of a query: where its window rows and entries are stored, and how they become f16 tiles in shared memory.

The keys of a query form one list: first its window, oldest first, then its entries (the picked ones, or all that it
sees). The list is divided into tiles of 64 keys; no tile has both window rows and entries. One or two warpgroups load a
tile. Each quad of lanes loads two rows or one, 16 bytes at a time, converts them to f16 in registers, and stores them
to shared memory. These are the steps:

    find      the number of a key: its position in the window, or the number of the entry
    look_up   the page of an entry, from the block table; or the position that a ring row really has
    resolve   the row's place: in the ring, among the fresh rows, or in its page
    load      requests the row's bytes
    store     converts them to f16 and writes them into a tile

Each step needs what the one before has loaded. To hide the latency, they run for different tiles at the same time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from pallas_kernels.attention.inputs import NOPE_DIM, AttentionInputs
from pallas_kernels.formats import AttendedFormat, Quad, SplitScale
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, Tile
from pallas_kernels.language.values import Condition, Value, select
from pallas_kernels.rows import bf16_to_f16

KEYS = 64  # keys per tile
_PART = 64  # channels of a part of a row, which have one scale; those with rope are the last part
_ROPE = NOPE_DIM // _PART  # the number of that one
_LOAD = Quad.LOAD_BYTES
STAGED_LOADS = 14  # loads that a lane with two rows stages: both rows if a row takes 7 loads, one if it takes 14
_HELD_LOADS = 3  # loads of staged rows that a lane may hold in registers, where there is no room to stage all
_AT_ONCE = 3  # loads from shared memory at once: enough to hide latency, but not too many for the registers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One of a block's queries, and the number of its keys."""

    machine: TensorCores
    inputs: AttentionInputs[Buffer]
    number: Value  # among the queries of all requests
    batch: Value
    token: Value
    layer: Value
    slot: Value
    start: Value  # position of the first fresh row
    first_position: Value  # of the window
    window_keys: Value
    visible: Value
    entry_keys: Value  # length of the list of entries: picks, or entries below visible

    @classmethod
    def of(cls, machine: TensorCores, inputs: AttentionInputs[Buffer], number: Value) -> Query:
        tokens = inputs.positions.shape[1]
        batch, token = number // tokens, number % tokens
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
        return cls(machine, inputs, number, batch, token, layer, slot, start, first, window_keys, visible, entry_keys)

    @property
    def window_tiles(self) -> int:
        """Number of window tiles.

        Because it does not depend on the position, the place of a pick is known without waiting for the position to
        load.
        """
        return -(-self.inputs.pos.shape[2] // KEYS)

    @property
    def tiles(self) -> Value:
        of_window = select(self.window_keys > 0, self.machine.constant(self.window_tiles, "i32"), 0)
        return (self.entry_keys + (KEYS - 1)) // KEYS + of_window

    def share(self, cluster: int) -> tuple[Value, Value]:
        """Return the block's rank in its cluster, and its number of tiles.

        A block has at least one tile, but that tile may have no keys.
        """
        rank = self.machine.rank if cluster > 1 else self.machine.constant(0, "i32")
        return rank, ((self.tiles + (cluster - 1) - rank) // cluster).maximum(1)

    def head_words(self, head: Value, unit: Value, where: Condition = True) -> list[Value]:
        """Load eight channels of a head as f16, from channel ``unit`` * 8 on."""
        machine, q = self.machine, self.inputs.q
        words = q.load_words(self.batch, self.token, head, unit * 8, count=8, where=where)
        if q.dtype == "bfloat16":
            words = [bf16_to_f16(machine, word) for word in words]
        return words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredRow:
    """What a lane of a quad holds of a row that is being loaded."""

    nope: list[Value]  # words that are not staged in shared memory
    rope: list[Value]  # words
    scales: list[Value]  # from the format's ``load_scales``
    index: Value  # index of the row in its array, -1 = no key


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredPart:
    """What a lane of a quad holds of a part of a row that is being loaded."""

    loaded: list[list[Value]]  # words of each load
    scales: list[Value]


def take_staging(machine: TensorCores, loads: int = STAGED_LOADS, loaders: int = 1) -> Shared:
    """Allocate shared memory for the stored NoPE bytes of a tile: u8 [loads, lanes, 16].

    Each lane uses only its own part.
    """
    return Shared.take(machine, (loads, loaders * WARPGROUP, _LOAD), "u8")


def staging_bytes(loads: int = STAGED_LOADS, loaders: int = 1) -> int:
    """Return the bytes that ``take_staging`` takes."""
    return loads * loaders * WARPGROUP * _LOAD


class RowQuad:
    """Four lanes that convert a stored row to f16 together, in units of 16 bytes."""

    def __init__(self, machine: TensorCores, form: AttendedFormat, lane: Value):
        self.machine, self.form = machine, form
        self.quad = Quad(machine, lane % Quad.LANES, NOPE_DIM)
        self.loads = form.num_loads(self.quad)  # of NoPE bytes per row
        # If a lane's NoPE bytes become two adjacent units of f16, its two RoPE units are adjacent too.
        self._beside = form.itemsize == 1

    def nope_at(self, address: Value, load: int) -> Value:
        """Return where a lane's NoPE bytes of one load are, in a row whose NoPE bytes begin at an i64 address."""
        return address + self.machine.widen(self.quad.quarter * _LOAD) + load * _LOAD * Quad.LANES

    def load_rope(self, address: Value, there: Condition) -> list[Value]:
        """Start to load a lane's share of the RoPE channels at an i64 address."""
        first, step = self._rope_at(address)
        return [word for i in range(2) for word in self.machine.load(first + i * step, _LOAD, there, constant=True)]

    def _rope_at(self, address: Value) -> tuple[Value, int]:
        """Return where the first of a lane's two loads of RoPE channels is, and how far the second one is from it."""
        first = address + self.machine.widen(self.quad.quarter * (_LOAD * 2 if self._beside else _LOAD))
        return first, _LOAD * (1 if self._beside else Quad.LANES)

    def rope(self, words: list[Value], inverse: Value | None) -> Iterator[tuple[Value, list[Value]]]:
        """Yield the units that a lane's RoPE channels become, times the ``inverse`` of the row's factor."""
        for i in range(2):
            halves = [bf16_to_f16(self.machine, word, inverse) for word in words[4 * i : 4 * i + 4]]
            yield from self._units(halves, self.loads + i)

    def nope(self, words: list[Value], scale: SplitScale, load: int) -> Iterator[tuple[Value, list[Value]]]:
        """Yield the units that the bytes of one load become."""
        yield from self._units(self.form.to_f16(self.quad, words, scale, load), load)

    def load_part(self, nope: Value, rope: Value, part: Value, there: Condition) -> list[list[Value]]:
        """Start to load a lane's share of a part of a row, in two loads, of which an E4M3 part needs one."""
        of_nope = self.nope_at(nope, 0) + self.machine.widen(part * (_PART * self.form.itemsize))
        is_rope, (of_rope, step) = part == _ROPE, self._rope_at(rope)
        first, second = select(is_rope, of_rope, of_nope), there & is_rope if self._beside else there
        return [
            self.machine.load(first + step * n, _LOAD, where, constant=True) for n, where in enumerate((there, second))
        ]

    def part(
        self, loaded: list[list[Value]], scale: SplitScale, part: Value, inverse: Value | None
    ) -> Iterator[tuple[Value, list[Value]]]:
        """Yield the units of a part that its two loads become, as ``nope`` and ``rope`` do those of the whole row."""
        machine, powers = self.machine, scale.powers[:1]
        for n in range(1, _ROPE if powers else 0):
            if scale.powers[n] is not powers[0]:
                powers = [select(part == n, scale.powers[n], powers[0])]
        one, count = SplitScale(powers, scale.factor), 1 if self._beside else 2
        nope = [half for words in loaded[:count] for half in self.form.to_f16(self.quad, words, one, 0)]
        rope = [bf16_to_f16(machine, word, inverse) for words in loaded for word in words]
        halves = [select(part == _ROPE, a, b) for a, b in zip(rope, nope, strict=True)]
        for n in range(2):
            unit = self.quad.quarter * 2 + n if self._beside else self.quad.quarter + n * Quad.LANES
            yield unit, halves[4 * n : 4 * n + 4]

    def _units(self, halves: list[Value], load: int) -> Iterator[tuple[Value, list[Value]]]:
        """Yield (which unit of the row, its words)."""
        for part in range(len(halves) // 4):
            yield self._unit(load, part), halves[4 * part : 4 * part + 4]

    def _unit(self, load: int, part: int) -> Value:
        """Return which 16-byte unit of the f16 row this part of a load becomes."""
        quarter = self.quad.quarter
        if self.form.itemsize == 2:
            return quarter + load * Quad.LANES
        if load < self.loads:
            return quarter * 2 + (load * 2 * Quad.LANES + part)
        return quarter * 2 + (self.loads * 2 * Quad.LANES + load - self.loads)


class KeyFinder:
    """Finds where the keys of a query are stored. Each lane looks for the same rows of any tile."""

    def __init__(self, query: Query, rows: Sequence[Value]):
        self.query, self.machine, self.rows = query, query.machine, rows

    def _is_window(self, tile: Value) -> Value:
        return tile < self.query.window_tiles

    def find(self, tile: Value) -> list[Value]:
        """Return the number of each row's key, -1 = none."""
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
            position = select(place < query.window_keys, query.first_position + place, -1)
            found.append(select(in_window, position, number))
        return found

    def look_up(self, tile: Value, numbers: list[Value]) -> list[Value]:
        """Return what the tables say about each row's key; -1 = nothing.

        For an entry that is its page. For a row of the ring it is the position that the ring has there.
        """
        query, inputs = self.query, self.query.inputs
        n_win, in_window, found = inputs.pos.shape[2], self._is_window(tile), []
        for number in numbers:
            known = in_window & (number >= 0)
            address = inputs.pos.address_of((query.layer, query.slot, number % n_win))
            if inputs.entries is not None:
                per_page, table = inputs.entries.nope.shape[2], inputs.block_table
                assert table is not None
                has_page = (number >= 0) & (number < query.visible) & (number < table.shape[1] * per_page)
                known = select(in_window, known, has_page)
                address = select(in_window, address, table.address_of((query.slot, number // per_page)))
            found += self.machine.load(address, 4, known, constant=True, otherwise=-1)
        return found

    def resolve(self, tile: Value, numbers: list[Value], looked_up: list[Value]) -> list[Value]:
        """Return the index of each key's row in its whole array (rings, fresh rows, or entries); -1 = none."""
        query, inputs = self.query, self.query.inputs
        in_window, found = self._is_window(tile), []
        _, requests, n_win = inputs.pos.shape
        for number, known in zip(numbers, looked_up, strict=True):
            # A ring row with another position may hold anything, NaN too, and NaN times a weight of 0 is NaN.
            index = (query.layer * requests + query.slot) * n_win + number % n_win
            index = select(known == number, index, -1)
            if inputs.fresh is not None:
                length = inputs.fresh.nope.shape[1]
                ahead = number - query.start
                fresh = select(ahead < length, query.batch * length + ahead, -1)
                index = select(ahead >= 0, fresh, index)
            index = select(number >= 0, index, -1)
            if inputs.entries is not None:
                _, num_pages, per_page = inputs.entries.nope.shape[:3]
                entry = (query.layer * num_pages + known) * per_page + number % per_page
                there = (known >= 0) & (known < num_pages)
                index = select(in_window, index, select(there, entry, -1))
            found.append(index)
        return found


class KeyLoader(KeyFinder):
    """One or two warpgroups that load tiles of keys. Each lane takes part in two rows of a tile, or in one."""

    def __init__(self, query: Query, form: AttendedFormat, staging: Shared | None = None, loaders: int = 1):
        """Prepare to load.

        Args:
          query: the block's query.
          form: the format of all rows.
          staging: memory from ``take_staging`` for NoPE bytes that are being loaded. What does not fit stays in
            registers; with None that is all of them.
          loaders: number of warpgroups.
        """
        machine = query.machine
        self.form, self._lane = form, machine.thread % (loaders * WARPGROUP)
        self._quad = RowQuad(machine, form, self._lane)
        # Each quad takes one row of 8, or rows r and r + 8 of 16. With this, two rows, stored by a quarter of a warp's
        # lanes, use each bank of shared memory once.
        per_lane = KEYS * Quad.LANES // (loaders * WARPGROUP)
        row = self._lane // WARP * (8 * per_lane) + self._lane % WARP // Quad.LANES
        super().__init__(query, [row + 8 * n for n in range(per_lane)])
        self._loads = self._quad.loads
        self._staging, room = staging, 0 if staging is None else staging.shape[0]
        self.loads_ahead = per_lane * self._loads <= room + _HELD_LOADS
        # For each of a lane's rows: its first place in the staging memory, and how many of its loads are staged.
        self._first = [n * self._loads if self.loads_ahead else 0 for n in range(per_lane)]
        self._staged = [min(self._loads, room - first) for first in self._first]
        # Of a factor in [1, 2), so that both give the same bits. The kernel for few queries must be free of calls; the
        # loaders of the others, which multiply nothing, need fewer registers with one.
        self._reciprocal = self.machine.normal_reciprocal if staging is None else self.machine.reciprocal

    def _is_fresh(self, tile: Value, row: Value) -> Condition:
        """Return whether a window row is one of the new tokens' rows."""
        if self.query.inputs.fresh is None:
            return False
        position = self.query.first_position + (tile * KEYS + row)
        return self._is_window(tile) & (position >= self.query.start)

    def _address(self, name: str, tile: Value, row: Value, index: Value) -> Value:
        """Return the i64 address of a row's leaf."""
        inputs = self.query.inputs
        leaf: Buffer = getattr(inputs.window, name)
        start = leaf.address
        if inputs.fresh is not None:
            start = select(self._is_fresh(tile, row), getattr(inputs.fresh, name).address, start)
        if inputs.entries is not None:
            start = select(self._is_window(tile), start, getattr(inputs.entries, name).address)
        return start + self.machine.widen(index) * (math.prod(leaf.shape[3:]) * leaf.dtype.itemsize)

    def load(self, tile: Value, which: int, index: Value) -> StoredRow:
        """Start to load the first or second row of a tile. Rows without a key are zero."""
        query, machine, row = self.query, self.machine, self.rows[which]
        there, nope = index >= 0, self._address("nope", tile, row, index)
        in_registers: list[Value] = []
        for i in range(self._loads):
            address = self._quad.nope_at(nope, i)
            if i < self._staged[which]:
                assert self._staging is not None
                machine.copy_async(self._staging.address_of(self._first[which] + i, self._lane, 0), address, there)
            else:
                in_registers += machine.load(address, _LOAD, there, constant=True)
        words = self._quad.load_rope(self._address("rope", tile, row, index), there)
        scales: list[Value] = []
        if query.inputs.window.scale is not None:
            scales = self.form.load_scales(self._quad.quad, self._address("scale", tile, row, index), there)
        return StoredRow(in_registers, words, scales, index)

    def store(self, which: int, stored: StoredRow, keys: Tile, factors: Shared) -> None:
        """Write a loaded row as f16 into a tile of keys, and its factor into f32 [KEYS].

        The row is the stored f16 times its factor, which is the fraction of its scale, in [1, 2). Only the scale's
        power of two is applied to the codes, because that is exact in f16. If there is no key, the factor is negative.
        """
        machine, row, staged = self.machine, self.rows[which], self._staged[which]
        scale = self.form.split_scale(self._quad.quad, stored.scales)
        inverse = None if scale.factor is None else self._reciprocal(scale.factor)

        def put(units: Iterator[tuple[Value, list[Value]]]) -> None:
            for unit, words in units:
                machine.store_shared(keys.unit(row, unit), words, 16, True)

        # What is in registers first, because that frees them.
        put(self._quad.rope(stored.rope, inverse))
        for i in range(staged, self._loads):
            put(self._quad.nope(stored.nope[4 * (i - staged) : 4 * (i - staged) + 4], scale, i))
        # Issue a few loads at once, since no load from shared memory is moved before a store to it.
        for first in range(0, staged, _AT_ONCE):
            assert self._staging is not None
            several = range(first, min(first + _AT_ONCE, staged))
            waiting = [self._staging.load_words(self._first[which] + i, self._lane, 0, count=_LOAD) for i in several]
            for i, words in zip(several, waiting, strict=True):
                put(self._quad.nope(words, scale, i))
        factor = machine.constant(1.0, "f32") if scale.factor is None else scale.factor
        factors.store_floats([select(stored.index >= 0, factor, -1.0)], row, where=self._quad.quad.quarter == 0)

    # A part of it, for blocks that share a query's channels.
    def load_part(self, tile: Value, index: Value, part: Value) -> StoredPart:
        """Start to load a part of the one row of a tile that a lane takes part in. Without a key it is zero."""
        (row,), there = self.rows, index >= 0
        nope, rope = (self._address(name, tile, row, index) for name in ("nope", "rope"))
        scales: list[Value] = []
        if self.query.inputs.window.scale is not None:
            scales = self.form.load_scales(self._quad.quad, self._address("scale", tile, row, index), there)
        return StoredPart(self._quad.load_part(nope, rope, part, there), scales)

    def store_part(self, stored: StoredPart, part: Value, keys: Tile) -> None:
        """Write a part of a row into a tile of as many channels, as ``store`` writes the whole row."""
        scale = self.form.split_scale(self._quad.quad, stored.scales)
        inverse = None if scale.factor is None else self._reciprocal(scale.factor)
        for unit, words in self._quad.part(stored.loaded, scale, part, inverse):
            self.machine.store_shared(keys.unit(self.rows[0], unit), words, 16, True)
