"""The heads of a query that a block on Hopper multiplies: a tile of shared memory that the hardware fills."""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention.block import HEADS
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.tensor_cores import Operand, TensorCores, Tile
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import Value

_CHANNELS = 64  # of a head that one copy takes
_PIECES = HEAD_DIM // _CHANNELS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTile:
    """f16 [HEADS, HEAD_DIM]."""

    pieces: TypedTile  # [HEADS, 64 channels]; copies: all channels
    loaded: Barrier  # a phase for each query

    @staticmethod
    def take_pieces(machine: TensorCores) -> TypedTile:
        return TypedTile.take(machine, HEADS, _CHANNELS, "f16", copies=_PIECES)

    def load(self, inputs: AttentionInputs[Buffer], number: Value) -> None:
        """Start to load the heads of a query, as a warp together.

        Rows past its last head are those of the queries that follow, of any bits, or zeros past the last query. No
        head's result depends on them.
        """
        row = number * inputs.sinks.shape[0] + self.loaded.machine.block(1) * HEADS
        copies = (self.pieces[n].copy_from(inputs.q, row, n * _CHANNELS) for n in range(_PIECES))
        self.loaded.fill(*copies)

    def k_major(self, part: int = 0, parts: int = 1) -> Operand:
        """Return the heads as an operand, with one of ``parts`` equal parts of the channels as K."""
        return part_of(self.pieces.tile, _PIECES, part, parts)


def part_of(piece: Tile, pieces: int, part: int, parts: int) -> Operand:
    """Return one of ``parts`` equal parts of the channels as K, where adjacent pieces have some channels each."""
    first, count = piece.k_major(), pieces // parts
    each = range(part * count, (part + 1) * count)
    return dataclasses.replace(first, steps=tuple(n * piece.size + step for n in each for step in first.steps))
