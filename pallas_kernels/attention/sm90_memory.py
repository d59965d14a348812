"""The shared memory of Hopper's attention: the query, tiles of keys, and what its warpgroups hand each other."""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention import copies
from pallas_kernels.attention.block import CONSUMERS, HEADS, STAGES, WARPS, Memory
from pallas_kernels.attention.handover import Handover
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, take_staging
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import ATOM_BYTES, Operand, TensorCores, Tile, TileCopy
from pallas_kernels.language.values import Value

_Q_BYTES = 128  # of a row of the query that one copy takes
_Q_PARTS = HEAD_DIM * 2 // _Q_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopperMemory(Memory):
    """Shared memory of a block. Tiles come first, because they must be aligned.

    A tile of rows that were widened before is ``copies.PIECES`` copies of ``keys``, and has barriers for each part of
    its channels.
    """

    is_wide: bool
    q: Tile  # [HEADS, 64 channels]; copies: the parts of a query's channels
    loaded_q: Barrier
    handover: Handover

    @classmethod
    def take(cls, machine: TensorCores, *, is_wide: bool, staged_loads: int, loaders: int) -> HopperMemory:
        """Allocate the memory, for a number of loading warpgroups and of loads that each of their lanes stages."""
        q = Tile.take(machine, HEADS, _Q_BYTES, copies=_Q_PARTS)
        if is_wide:
            keys = Tile.take(machine, KEYS, ATOM_BYTES, copies=STAGES * copies.PIECES)
        else:
            keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES)
        parts = STAGES * (copies.PARTS if is_wide else 1)
        return cls(
            is_wide=is_wide,
            q=q,
            keys=keys,
            staging=None if is_wide else take_staging(machine, staged_loads, loaders),
            of_keys=Shared.take(machine, (STAGES, KEYS), "f32"),
            handover=Handover.take(machine),
            full=Barrier.take(machine, WARPS if is_wide else loaders * WARPS, copies=parts),
            free=Barrier.take(machine, WARPS if is_wide else CONSUMERS * WARPS, copies=parts),
            loaded_q=Barrier.take(machine, 1),
        )

    @property
    def pieces(self) -> int:
        """Number of copies of ``keys`` that make a tile."""
        return HEAD_DIM * 2 // self.keys.row_bytes

    @property
    def parts(self) -> int:
        """Number of parts of a tile's channels that have barriers of their own."""
        return self.full.copies // STAGES

    def parts_of(self, half: int) -> range:
        """Return the parts of a tile that have one half of its channels."""
        count = max(1, self.parts // CONSUMERS)
        first = half * self.parts // CONSUMERS
        return range(first, first + count)

    def k_major(self, stage: int, part: int) -> Operand:
        """Return a part of a tile's channels as K."""
        return self._part_of(self.keys.copy(stage * self.pieces), self.pieces, part)

    def columns(self, stage: int, first: int) -> Operand:
        """Return a tile's channels from ``first`` on as columns, with its keys as K."""
        piece, byte = divmod(first * 2, self.keys.row_bytes)
        found = self.keys.copy(stage * self.pieces + piece).transposed(byte)
        return dataclasses.replace(found, leading=self.keys.size) if self.pieces > 1 else found

    def load_query(self, inputs: AttentionInputs, number: Value) -> None:
        """Start to load the heads of a query, as a warpgroup together."""
        machine, heads = self.loaded_q.machine, inputs.sinks.shape[0]
        with machine.when(machine.thread % WARPGROUP < WARP):
            row = number * heads + machine.block(1) * HEADS
            self.loaded_q.fill(
                *(
                    TileCopy(
                        source=inputs.q,
                        row=row,
                        column=part * (_Q_BYTES // 2),
                        to=self.q.copy(part).offset,
                        rows=HEADS,
                        row_bytes=_Q_BYTES,
                    )
                    for part in range(_Q_PARTS)
                )
            )

    def query(self, part: int) -> Operand:
        """Return the heads of the query, [HEADS, channels], with the channels of a part of a tile."""
        return self._part_of(self.q, _Q_PARTS, part)

    def _part_of(self, piece: Tile, pieces: int, part: int) -> Operand:
        """Return a part of the channels as K, where adjacent pieces have some channels each."""
        first, count = piece.k_major(), pieces // self.parts
        each = range(part * count, (part + 1) * count)
        return dataclasses.replace(first, steps=tuple(n * piece.size + step for n in each for step in first.steps))
