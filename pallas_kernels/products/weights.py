"""A warpgroup's tile of a weight: copying it to shared memory ahead of time, and making left operands of products.

Parts of its inputs that a warpgroup multiplies in turns are added in one order, by kernels of few and of many rows.

A tile is processed in chunks of 128 bytes of each row, in two halves. Of each half a lane reads 16 bytes of rows r and
r + 8 (``product_row``), which are what it contributes to several steps of a product. Of codes they are adjacent ones,
from 16 c on, with c its place in its quad: so they have one scale. Of bf16 they are the words that it has of an operand
whose inputs are in order. A warp reads just what it copied itself, so that no warp waits for another one. Eight lanes
copy a row of a chunk, and so ask for whole lines of memory. If each lane copied what it reads, it would be twice as
many requests, which take turns with all other accesses of shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Condition, Index, Value

TILE = 64  # outputs of a warpgroup
ROWS = 64  # the most rows of x in a block that makes something of whole lines of its sums
MOST_ROWS = 128  # in any block of the kernel of few rows
CHUNK_BYTES, HALVES = 128, 2
QUAD = 4
_ROWS = TILE // (WARPGROUP // WARP)  # of a warp
_UNIT, _WORD = 16, 4  # bytes of one access
_UNITS = CHUNK_BYTES // _UNIT
STAGE_BYTES = TILE * CHUNK_BYTES  # a chunk of a tile
OPERAND_WORDS = 16  # of half a chunk that is widened, as a left operand; of a weight of bf16 half as many
_WARPS = WARPGROUP // WARP

SCALE_INPUTS = 32  # the fewest inputs that have a scale
SCALE_ROWS = 16  # the fewest outputs
_PLACES = CHUNK_BYTES // SCALE_INPUTS
_MOVED = 120  # E4M3 moved into the bits of a bf16 means the number times 2^-120
_KEPT = 0x87F087F0 - (1 << 32)  # of two such bf16: the sign, and the seven bits of exponent and fraction
SPREAD = 0x9180, 0xB3A2  # the first two bytes of a word, or the last two, each followed by a byte of its sign
_BIAS = 127


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Corner:
    """Where a warpgroup's tile begins in a weight.

    A gated tile has 32 outputs of the first half of the weight, and then those of the second half that belong to them.
    """

    output: Value
    input: Value
    half: int = 0  # outputs of a half of the weight, for a gated tile

    def output_of(self, warp: Value) -> Value:
        """Return the first output of a warp."""
        if not self.half:
            return self.output + warp * _ROWS
        return self.output + warp % 2 * _ROWS + warp // 2 * self.half


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """The scales of a block's part of an FP8 weight, each for 16 outputs and 32 inputs, as exponents with a bias."""

    machine: TensorCores
    bytes: Shared  # i32 [warpgroups, warps, chunks, places of a chunk]

    @classmethod
    def take(cls, machine: TensorCores, warpgroups: int, chunks: int) -> Scales:
        return cls(machine, Shared.take(machine, (warpgroups, _WARPS, chunks, _PLACES), "i32"))

    @staticmethod
    def shared_bytes(warpgroups: int, chunks: int) -> int:
        return warpgroups * _WARPS * chunks * _PLACES * 4

    def _places(self) -> Iterator[tuple[Value, Value, Value, Condition]]:
        """Yield what this lane stages: a warp, a chunk, a place in it, and whether it is inside."""
        chunks = self.bytes.shape[2]
        total = _WARPS * chunks * _PLACES
        for start in range(0, total, WARPGROUP):
            n = self.machine.thread % WARPGROUP + start
            inside: Condition = True if start + WARPGROUP <= total else n < total
            yield n // (_PLACES * chunks), n // _PLACES % chunks, n % _PLACES, inside

    def load(self, scales: Buffer, block: tuple[int, int], at: Corner) -> list[Value]:
        """Load this lane's share of the scales of its warpgroup's tile."""
        loaded = []
        for warp, chunk, place, inside in self._places():
            of_row = at.output_of(warp) // block[0]
            of_input = (at.input + chunk * CHUNK_BYTES + place * SCALE_INPUTS) // block[1]
            where = inside & (of_row < scales.shape[0])
            loaded.append(scales.load_bytes(of_row, of_input, count=1, where=where))
        return loaded

    def store(self, loaded: list[Value]) -> None:
        """Store what ``load`` returned. To be followed by a barrier of the warpgroup."""
        mine = self.bytes[self.machine.thread // WARPGROUP]
        for byte, (warp, chunk, place, inside) in zip(loaded, self._places(), strict=True):
            mine.store_int(byte, warp, chunk, place, where=inside)

    def _load(self, chunk: Index, place: Index) -> Value:
        lane = self.machine.thread
        return self.bytes.load_int(lane // WARPGROUP, lane % WARPGROUP // WARP, chunk, place)

    def of_half(self, chunk: Index, half: int) -> Value:
        """Return what ``widen`` multiplies by, for this lane's part of half a chunk: two equal bf16."""
        place = self.machine.thread % QUAD // 2 + half * HALVES
        return factor_of(self._load(chunk, place))

    def of_chunk(self, chunk: Index) -> Value:
        """Return the scale of a chunk whose parts all have the same, f32."""
        return scale_of(self._load(chunk, 0))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredTile:
    """A warp's rows of 64 outputs of a weight, and their room in shared memory for some chunks.

    Units of 16 bytes change places within a row, so that what lanes of other rows read together is in other banks.
    """

    machine: TensorCores
    weight: Buffer  # a view in bytes that begins at what this lane copies first
    row_bytes: int
    room: Shared  # u8 [stages, rows, bytes of a chunk]
    is_wide: bool  # whether the weight is bf16
    there: Condition

    @classmethod
    def of(cls, machine: TensorCores, weight: Buffer, at: Corner, there: Condition, rooms: Shared) -> StoredTile:
        """The tile that begins there."""
        size = weight.dtype.itemsize
        lane, warp = machine.thread % WARP, machine.thread % WARPGROUP // WARP
        room = rooms[machine.thread // WARPGROUP]
        room = dataclasses.replace(room, offset=warp * (_ROWS * CHUNK_BYTES) + room.offset)
        address = weight.address_of((at.output_of(warp) + lane // _UNITS, at.input + lane % _UNITS * (_UNIT // size)))
        row_bytes = weight.shape[1] * size
        shape = row_bytes // CHUNK_BYTES, CHUNK_BYTES
        view = dataclasses.replace(weight, address=address, shape=shape, dtype=jnp.dtype(jnp.uint8))
        return cls(machine, view, row_bytes, room, size > 1, there)

    @staticmethod
    def take_rooms(machine: TensorCores, warpgroups: int, stages: int) -> Shared:
        """Take shared memory for ``stages`` chunks of each warpgroup's tile."""
        return Shared.take(machine, (warpgroups, stages, TILE, CHUNK_BYTES), "u8")

    def copy(self, chunk: Index, stage: Index, where: Condition) -> None:
        """Start to copy a chunk. To be followed by ``close_copies``.

        A barrier of the warp is to be before it, so that no lane reads the stage any more, and before ``load``.
        """
        row, unit = self.machine.thread % WARP // _UNITS, self.machine.thread % _UNITS
        for first in range(0, _ROWS, WARP // _UNITS):
            source = self.weight.address_of((chunk, first * self.row_bytes))
            to = self.room.address_of(stage, row + first, self._swapped(unit, row, first) * _UNIT)
            self.machine.copy_async(to, source, where & self.there)

    def load(self, stage: Index, half: int) -> list[list[Value]]:
        """Return this lane's bytes of both rows, four words each."""
        row, lane = self.machine.thread % WARP // QUAD, self.machine.thread % QUAD
        rows = row, row + _ROWS // 2
        if not self.is_wide:
            at = self._swapped(lane + half * QUAD, row) * _UNIT
            return [self.room.load_words(stage, row, at, count=_UNIT) for row in rows]
        places = [self._swapped(half * QUAD + n, row) * _UNIT + lane * _WORD for n in range(QUAD)]
        return [[self.room.load_words(stage, row, at, count=_WORD)[0] for at in places] for row in rows]

    def _swapped(self, unit: Index, row: Value, further: int = 0) -> Value:
        """Return where a unit of a row is, or of the row ``further`` down, a multiple of 4."""
        return unit ^ ((row + further) % (_ROWS // 2) if self.is_wide else row % 2 * QUAD)


def widen(machine: TensorCores, codes: list[list[Value]], factor: Value) -> list[Value]:
    """Return E4M3 codes of two rows as the left operand of a product of bf16, four words for each step."""
    words: list[Value] = []
    for one, other in zip(*codes, strict=True):
        (a, b), (c, d) = _widen(machine, one, factor), _widen(machine, other, factor)
        words += [a, c, b, d]
    return words


def _widen(machine: TensorCores, word: Value, factor: Value) -> list[Value]:
    """Widen four codes to two words of two."""
    return [code_pair(machine, word, selector, factor) for selector in SPREAD]


def code_pair(machine: TensorCores, word: Value, selector: Index, factor: Value) -> Value:
    """Widen two of the four codes in a word to bf16: with ``SPREAD[0]`` the first two, with ``SPREAD[1]`` the last."""
    return machine.multiply_bf16(machine.permute_bytes(word, word, selector) << 4 & _KEPT, factor)


def factor_of(byte: Value) -> Value:
    """Return what ``code_pair`` multiplies by for a scale: two equal bf16."""
    bits = (byte + _MOVED).minimum(255) << 7  # infinite for scales above 2^7, so that the product is NaN
    return bits | bits << 16


def scale_of(byte: Value) -> Value:
    """Return a scale as f32."""
    return byte.machine.from_bits(byte.minimum(2 * _BIAS) << 23)


def add_in_turns[Carry](
    machine: TensorCores,
    parts: int,
    of_part: Callable[[Index, Carry], tuple[list[Value], Carry]],
    sums: int,
    carry: Carry,
) -> tuple[list[Value], Carry]:
    """Return the sums of parts of the inputs, which a warpgroup computes in turns, in their order; and the last carry.

    ``of_part(number, carry)`` returns so many sums of a part, and the next carry.
    """
    if parts == 1:
        return of_part(0, carry)

    def add(number: Value, state: tuple[list[Value], Carry]) -> tuple[list[Value], Carry]:
        found, carry = of_part(number, state[1])
        return [a + b for a, b in zip(state[0], found, strict=True)], carry

    # -0, because with it added the first part stays as it is.
    return machine.loop(parts, add, ([machine.constant(-0.0, "f32")] * sums, carry))
