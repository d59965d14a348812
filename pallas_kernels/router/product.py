"""The router's product for few tokens, on Hopper: logits [tokens, experts] = x gate^T, bf16 with sums in f32.

A block multiplies 64 experts by up to 64 tokens, for its part of the inputs. The blocks of a cluster share the inputs.
All of a block's chunks are copied at once, in two halves, since each is read once. Block n of the cluster adds up the
parts of some eights of the tokens, in the order of the parts, for which the others send it what they have. How inputs
are divided depends on the gate's shape alone, so a token's logits do not depend on how many tokens there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import Fragment, product
from pallas_kernels.language.lanes import add, fold
from pallas_kernels.language.launch import SCRATCH_BYTES
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import HOPPER
from pallas_kernels.language.tensor_cores import ATOM_BYTES, UNIT, TensorCores, product_row
from pallas_kernels.language.tiles import TypedTile
from pallas_kernels.language.values import VECTOR, Value

CHUNK = 64  # inputs that are copied together
SIDE = 64  # experts of a block
MOST_TOKENS = 64  # of a block
_EIGHT = 8  # tokens of a product of which a lane has two, with two experts
_ALIGNMENT = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the product is divided over blocks."""

    experts: int
    tokens: int
    columns: int  # tokens of a block, a multiple of eight
    cluster: int  # blocks that share the inputs
    chunks: int  # of a block

    @classmethod
    def of(cls, hidden: int, experts: int, tokens: int, beside: int) -> Layout | None:
        """Return how to divide it, with so many bytes of shared memory beside it; None where it cannot be."""
        if hidden % CHUNK:
            return None
        chunks = hidden // CHUNK
        cluster = next(size for size in (8, 4, 2, 1) if chunks % size == 0)
        most = min(MOST_TOKENS, -(-tokens // _EIGHT) * _EIGHT)
        for columns in range(most, 0, -_EIGHT):
            layout = cls(experts=experts, tokens=tokens, columns=columns, cluster=cluster, chunks=chunks // cluster)
            if layout.shared_bytes + beside + SCRATCH_BYTES <= HOPPER.shared_bytes:
                return layout
        return None

    @property
    def owned(self) -> int:
        """Eights of the tokens that a block adds up, at most."""
        return -(-(self.columns // _EIGHT) // self.cluster)

    @property
    def blocks(self) -> tuple[int, int]:
        return -(-self.experts // SIDE), -(-self.tokens // self.columns)

    @property
    def clusters(self) -> int:
        return self.blocks[0] * self.blocks[1]

    @property
    def shared_bytes(self) -> int:
        tiles = self.chunks * (SIDE + self.columns) * CHUNK * 2
        received = self.cluster * self.owned * WARPGROUP * VECTOR * 4 if self.cluster > 1 else 0
        return tiles + received + 16 + _ALIGNMENT


def logits(
    machine: TensorCores, x: Any, gate: Any, layout: Layout, barriers: Sequence[Barrier] = ()
) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Yield (logit, token, expert, whether they exist) of each that this lane adds up.

    If blocks share the inputs, ``barriers`` are initialised, too, before any logit is there.
    """
    weight = TypedTile.take(machine, SIDE, CHUNK, "bf16", copies=layout.chunks)
    rows = TypedTile.take(machine, layout.columns, CHUNK, "bf16", copies=layout.chunks)
    shape = layout.cluster, layout.owned, WARPGROUP, VECTOR
    received = Shared.take(machine, shape, "f32") if layout.cluster > 1 else None
    sent = Barrier.take(machine, 1, scope="cluster")
    expert, token = machine.block(0) * SIDE, machine.block(1) * layout.columns
    rank = machine.rank if layout.cluster > 1 else machine.constant(0, "i32")
    eights, first = layout.columns // _EIGHT, rank * (layout.chunks * CHUNK)
    halves = layout.chunks - layout.chunks // 2, layout.chunks // 2
    for begin, count in zip((0, halves[0]), halves, strict=True):
        for tile, array, row in ((weight, gate, expert), (rows, x, token)):
            _copy(tile, array, (row, first), (begin, count))
        machine.close_copies()
    if received is not None:
        init_barriers(sent, *barriers)
        with machine.when(machine.thread < WARP):
            mine = (rank * -1 + (eights + layout.cluster - 1)) // layout.cluster
            sent.expect(mine * (layout.cluster * WARPGROUP * VECTOR * 4))
        machine.cluster_arrive()
    sums = Fragment.zeros(machine, layout.columns)
    for n, (begin, count) in enumerate(zip((0, halves[0]), halves, strict=True)):
        machine.wait_copies(pending=1 - n)
        machine.fence_shared()
        machine.barrier("block")

        def multiply(i: Value, sums: Fragment, begin: int = begin) -> Fragment:
            return product(sums, weight[i + begin], rows[i + begin])

        sums = machine.loop(count, multiply, sums, rolled=True)
    parts = [part.values for part in sums.wait().parts(_EIGHT)]
    if received is not None:
        machine.cluster_wait()  # the others have initialised their barriers
        for n, values in enumerate(parts):
            to = n % layout.cluster
            place = rank, n // layout.cluster, machine.thread, 0
            sent.send_floats(values, received, *place, rank=to)
        sent.wait(0)
        parts = []
        for n in range(layout.owned):
            of_blocks = [received.load_floats(block, n, machine.thread, 0) for block in range(layout.cluster)]
            parts.append([fold(add, values) for values in zip(*of_blocks, strict=True)])
    for n, values in enumerate(parts):
        number = (rank + n * layout.cluster) * _EIGHT + machine.thread % 4 * 2
        for i, value in enumerate(values):
            at, of_expert = number + i % 2, product_row(machine) + (i // 2 * 8) + expert
            exists = (at < layout.columns) & (at + token < layout.tokens) & (of_expert < layout.experts)
            yield value, at + token, of_expert, exists


def _copy(tile: TypedTile, array: Any, place: tuple[Value, Value], chunks: tuple[int, int]) -> None:
    """Start to copy some chunks of an array to the copies of a tile, 16 bytes at a time.

    The hardware's copies would first fetch what describes the array, which takes as long again as the copies.
    """
    machine, (row, column), (begin, count) = tile.tile.machine, place, chunks
    assert isinstance(machine, TensorCores)
    units = ATOM_BYTES // UNIT
    together = WARPGROUP // units
    unit, line = machine.thread % units, machine.thread // units
    address = array.address_of((row + line, column + unit * (UNIT // 2)))

    def one(i: Value, _: None) -> None:
        chunk = i + begin
        for start in range(0, tile.rows, together):
            is_row = True if start + together <= tile.rows else line + start < tile.rows
            there = is_row & (row + line + start < array.shape[0])
            source = address + machine.widen(chunk) * ATOM_BYTES + start * (array.shape[1] * 2)
            to = tile[chunk].unit(line + start, unit)
            if is_row is True:
                machine.copy_async(to, source, there)
            else:
                with machine.when(is_row):
                    machine.copy_async(to, source, there)

    machine.loop(count, one, rolled=True)
