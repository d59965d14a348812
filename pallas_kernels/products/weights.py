"""A warpgroup's tiles of a weight: copying them to shared memory ahead of time, and making the left operand of products.

Each lane copies just what it will read itself, so that no lane waits for another one. Of a tile and a chunk it has rows
r and r + 8 (``product_row``), and of each 16 bytes from 16 c and from 64 + 16 c on, with c its place in its quad.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARP, WARPGROUP, Condition, Index, Value
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores, product_row

CHUNK_BYTES = 128  # bytes of a row that a warpgroup multiplies at a time
HALVES = 2
_PIECE, _ROWS = 16, 2
_PIECES = _ROWS * HALVES
STAGE_BYTES = _PIECES * _PIECE * WARPGROUP  # a chunk of a tile
SCALE_INPUTS = 32  # the fewest inputs that have a scale
_PARTS = CHUNK_BYTES // SCALE_INPUTS
_LOWEST_EXPONENT = 120  # the bits of E4M3 moved into a bf16 mean the number times 2^-120
_KEPT = 0x87F087F0 - (1 << 32)  # of two bf16: the sign, and the seven bits of exponent and fraction
_SPREAD = 0x9180, 0xB3A2  # the first two or last two bytes of a word, each followed by a byte of its sign


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The scales of a block's part of the weight, as pairs of equal bf16, for every 16 rows and 32 inputs."""

    machine: TensorCores
    words: Shared  # i32 [tiles, warps, chunks, parts of a chunk]

    @classmethod
    def take(cls, machine: TensorCores, tiles: int, chunks: int) -> Factors:
        return cls(machine, Shared.take(machine, (tiles, WARPGROUP // WARP, chunks, _PARTS), "i32"))

    @staticmethod
    def shared_bytes(tiles: int, chunks: int) -> int:
        return tiles * WARPGROUP // WARP * chunks * _PARTS * 4

    def stage(self, scales: Buffer, block: tuple[int, int], row: Value, first: Value, lanes: int) -> None:
        """Load the scales of rows from ``row`` on and inputs from ``first`` on."""
        machine = self.machine
        tiles, warps, chunks, parts = self.words.shape
        total = tiles * warps * chunks * parts
        for start in range(0, total, lanes):
            n = machine.thread + start
            inside = True if start + lanes <= total else n < total
            part, chunk, sixteen = n % parts, n // parts % chunks, n // (parts * chunks)
            at = (row + sixteen * 16) // block[0], (first + chunk * CHUNK_BYTES + part * SCALE_INPUTS) // block[1]
            byte = scales.load_bytes(*at, count=1, where=inside & (at[0] < scales.shape[0]))
            # For scales above 2^7 this is infinity, and the product NaN.
            bits = (byte + _LOWEST_EXPONENT).minimum(255) << 7
            self.words.store_int(bits | bits << 16, sixteen // warps, sixteen % warps, chunk, part, where=inside)

    def load(self, tile: Index, chunk: Index, half: int) -> Value:
        """Return the factor of this lane's codes."""
        lane = self.machine.thread
        part = lane % 4 // 2 + half * HALVES
        return self.words.load_int(tile, lane % WARPGROUP // WARP, chunk, part)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredTile:
    """A lane's part of 64 rows of a weight, and its room in shared memory for some chunks."""

    machine: TensorCores
    weight: Buffer  # a view in bytes that begins at this lane's first one
    pitch: int  # bytes of a row
    room: Shared  # u8 [stages, pieces, 16]
    there: Condition

    @staticmethod
    def take_rooms(machine: TensorCores, warpgroups: int, stages: int) -> Shared:
        """Take shared memory for all warpgroups. Returns this lane's part."""
        room = Shared.take(machine, (warpgroups, stages, _PIECES, WARPGROUP, _PIECE), "u8")[machine.thread // WARPGROUP]
        return dataclasses.replace(room, offset=machine.thread % WARPGROUP * _PIECE + room.offset)

    @classmethod
    def of(cls, weight: Buffer, room: Shared, row: Value, first: Value, there: Condition) -> StoredTile:
        """The tile of rows from ``row`` on, from input ``first`` on."""
        machine = weight.machine
        quad = machine.thread % 4 * (_PIECE // weight.dtype.itemsize)
        address = weight.address_of((row + product_row(machine), first + quad))
        pitch = weight.shape[1] * weight.dtype.itemsize
        view = dataclasses.replace(weight, address=address, shape=(pitch // CHUNK_BYTES, CHUNK_BYTES), dtype=jnp.dtype("uint8"))
        return cls(machine, view, pitch, room, there)

    def copy(self, chunk: Index, stage: Index, where: Condition) -> None:
        """Start to copy a chunk."""
        for row in range(_ROWS):
            for half in range(HALVES):
                source = self.weight.address_of((chunk, row * 8 * self.pitch + half * (CHUNK_BYTES // HALVES)))
                to = self.room.address_of(stage, row * HALVES + half, 0, 0)
                self.machine.copy_async(to, source, where & self.there)
        self.machine.close_copies()

    def load(self, stage: Index, half: int) -> list[list[Value]]:
        """Return this lane's bytes of both rows, four words each."""
        return [self.room.load_words(stage, row * HALVES + half, 0, 0, count=_PIECE) for row in range(_ROWS)]


def widen(codes: list[list[Value]], factor: Value) -> list[Value]:
    """Return E4M3 codes of two rows as the left operand of a product of bf16, four words for each step."""
    words: list[Value] = []
    for one, other in zip(*codes, strict=True):
        (a, b), (c, d) = _bf16(one, factor), _bf16(other, factor)
        words += [a, c, b, d]
    return words


def as_operand(words: list[list[Value]]) -> list[Value]:
    """Return 16-bit or FP8 words of two rows as the left operand of a product of their own type."""
    one, other = words
    return [word for i in range(0, len(one), 2) for word in (one[i], other[i], one[i + 1], other[i + 1])]


def _bf16(word: Value, factor: Value) -> list[Value]:
    """Widen four codes to two words of two."""
    machine = word.machine
    spread = [machine.permute_bytes(word, word, selector) << 4 & _KEPT for selector in _SPREAD]
    return [machine.multiply_bf16(pair, factor) for pair in spread]
