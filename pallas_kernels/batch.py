"""What the bodies of a cache update are given, and what they first work out: which request, at which phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.lanes import Channels, Condition, Index, Machine, Row, Value
from pallas_kernels.rows import hadamard, norm, rope, store_key, store_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """A compressor's projections of the new tokens, as they leave the matrix product, and its norm's weight.

    CSA has two streams side by side: channels [0, dim) of k and z are the b-stream, [dim, 2 dim) the a-stream.
    """

    k: Any  # f32 [B, T, dim or 2 dim]
    z: Any  # f32 [B, T, dim or 2 dim] gate logits, position bias included
    norm: Any  # f32 [dim]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """T new tokens of each of B requests, and where they go. What is None is not written."""

    layer: Any  # int32 [1] place of the layer in its stack
    slots: Any  # int32 [B], -1 = no-op
    start: Any  # int32 [B] tokens the request holds
    num_new: Any  # int32 [B] tokens it gets; 0 or more than T: no-op
    block_table: Any  # int32 [requests, max_blocks], -1 = none; None for SWA
    kv: Any  # f32 [B, T, head_dim] window rows, normed and roped
    entry: Streams | None  # of the compressor; None for SWA
    key: Streams | None  # of the indexer's compressor; CSA only
    rope: Any  # f32 [B, N, rope_dim] cosines, then sines, at the position of entry start // ratio + n; None for SWA


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The request of a block."""

    machine: Machine
    tokens: NewTokens  # of buffers
    batch: Value
    layer: Value
    slot: Value
    start: Value
    count: Value
    live: Value  # it has a slot and tokens to store

    @classmethod
    def of_block(cls, machine: Machine, tokens: NewTokens, num_tokens: int, num_slots: int) -> Request:
        batch = machine.block(0)
        layer = tokens.layer.load_int(0)
        slot, start = tokens.slots.load_int(batch), tokens.start.load_int(batch)
        count = tokens.num_new.load_int(batch)
        live = (slot >= 0) & (slot < num_slots) & (start >= 0) & (count > 0) & (count <= num_tokens)
        return cls(machine, tokens, batch, layer, slot, start, count, live)


Place = tuple[Value, Value, Condition]  # block, row in the block, whether the entry is to be stored there


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EntryStore:
    """Where a compressor's entries go, and how they are finished: norm, rope, number format, bytes."""

    request: Request
    row: Row
    rows: Any  # buffers of the pool, [layers, num_blocks, entries_per_block, ...]
    number_format: str
    eps: float
    is_key: bool

    def locate(self, entry: Value, where: Condition) -> Place:
        """Where the request's entry goes."""
        request, table = self.request, self.request.tokens.block_table
        _, num_blocks, per_block = jax.tree.leaves(self.rows, is_leaf=_is_buffer)[0].shape[:3]
        column = entry // per_block
        inside = where & (column < table.shape[1])
        block = table.load_int(request.slot, column, where=inside)
        return block, entry % per_block, inside & (block >= 0) & (block < num_blocks)

    def finish(self, pooled: Channels, weight: Channels, number: Index, place: Place) -> None:
        """Norm, rope, encode and store the pooled row of the request's ``number``-th entry of this call."""
        request, row, (block, at, stored) = self.request, self.row, place
        table = request.tokens.rope
        lead = request.layer, block, at
        if self.is_key:
            y, _ = norm(row, pooled, weight, self.eps)
            y = hadamard(row, rope(row, y, table, request.batch, number, where=stored))
            store_key(row, y, self.rows, *lead, key_format=self.number_format, where=stored)
        else:
            y, amax = norm(row, pooled, weight, self.eps, nope_dim=row.dim - table.shape[-1])
            y = rope(row, y, table, request.batch, number, where=stored)
            store_kv(row, y, self.rows, *lead, kv_format=self.number_format, where=stored, amax=amax)


def _is_buffer(x: Any) -> bool:
    return hasattr(x, "load_floats")
