"""The router's product for few tokens, on Hopper: logits [tokens, experts] = x gate^T, bf16 with sums in f32.

A block multiplies 64 experts by up to 64 tokens, for its part of the inputs. The blocks of a cluster share the inputs.
All of a block's chunks are copied at once, since each is read once. Block n of the cluster adds up the parts of some
eights of the tokens, in the order of the parts, for which the others send it what they have. How inputs are divided
depends on the gate's shape alone, so a token's logits do not depend on how many tokens there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.fragment import product
from pallas_kernels.language.launch import SCRATCH_BYTES
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import HOPPER
from pallas_kernels.language.tensor_cores import TensorCores, product_row
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
    def of(cls, hidden: int, experts: int, tokens: int) -> Layout | None:
        """Return how to divide it; None where it cannot be."""
        if hidden % CHUNK:
            return None
        chunks = hidden // CHUNK
        cluster = next(size for size in (8, 4, 2, 1) if chunks % size == 0)
        most = min(MOST_TOKENS, -(-tokens // _EIGHT) * _EIGHT)
        for columns in range(most, 0, -_EIGHT):
            layout = cls(experts=experts, tokens=tokens, columns=columns, cluster=cluster, chunks=chunks // cluster)
            if layout.shared_bytes + SCRATCH_BYTES <= HOPPER.shared_bytes:
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
        return tiles + received + 8 * (self.chunks + 2) + _ALIGNMENT


def logits(machine: TensorCores, x: Any, gate: Any, layout: Layout) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Yield (logit, token, expert, whether they exist) of each that this lane adds up."""
    weight = TypedTile.take(machine, SIDE, CHUNK, "bf16", copies=layout.chunks)
    rows = TypedTile.take(machine, layout.columns, CHUNK, "bf16", copies=layout.chunks)
    shape = layout.cluster, layout.owned, WARPGROUP, VECTOR
    received = Shared.take(machine, shape, "f32") if layout.cluster > 1 else None
    full = Barrier.take(machine, 1, copies=layout.chunks)
    sent = Barrier.take(machine, 1, scope="cluster")
    init_barriers(full, sent)
    expert, token = machine.block(0) * SIDE, machine.block(1) * layout.columns
    rank = machine.rank if layout.cluster > 1 else machine.constant(0, "i32")
    eights = layout.columns // _EIGHT
    with machine.when(machine.thread < WARP):
        for chunk in range(layout.chunks):
            first = rank * (layout.chunks * CHUNK) + chunk * CHUNK
            full.copy(chunk).fill(weight[chunk].copy_from(gate, expert, first), rows[chunk].copy_from(x, token, first))
        if received is not None:
            mine = (rank * -1 + (eights + layout.cluster - 1)) // layout.cluster
            sent.expect(mine * (layout.cluster * WARPGROUP * VECTOR * 4))
    if received is not None:
        machine.cluster_arrive()
    sums = None
    for chunk in range(layout.chunks):
        full.copy(chunk).wait(0)
        sums = product(sums, weight[chunk], rows[chunk])
    assert sums is not None
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
            parts.append([_in_order(values) for values in zip(*of_blocks, strict=True)])
    for n, values in enumerate(parts):
        number = (rank + n * layout.cluster) * _EIGHT + machine.thread % 4 * 2
        for i, value in enumerate(values):
            at, of_expert = number + i % 2, product_row(machine) + (i // 2 * 8) + expert
            exists = (at < layout.columns) & (at + token < layout.tokens) & (of_expert < layout.experts)
            yield value, at + token, of_expert, exists


def _in_order(values: tuple[Value, ...]) -> Value:
    total, *others = values
    for value in others:
        total = total + value
    return total
