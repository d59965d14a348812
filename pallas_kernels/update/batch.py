"""What the bodies of a cache update are given, and what they first work out: which request, at which phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.language.lanes import Buffer, Row
from pallas_kernels.language.machine import Channels, Condition, Index, Machine, Value
from pallas_kernels.rows import Angles, hadamard, load_angles, norm, rope, store_key, store_kv


def max_entries(num_tokens: int, ratio: int) -> int:
    """Most entries that T tokens can complete."""
    return (num_tokens + ratio - 1) // ratio


def max_blocks(num_tokens: int, ratio: int) -> int:
    """Most blocks of ``ratio`` tokens that T consecutive tokens can touch."""
    return (num_tokens + 2 * ratio - 2) // ratio


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


def locate_entry(request: Request, leaf: Buffer, entry: Value, where: Condition) -> tuple[Value, Value, Condition]:
    """(block, row in the block, whether the block is there) of a request's entry in a pool with this leaf."""
    _, num_blocks, per_block = leaf.shape[:3]
    table, column = request.tokens.block_table, entry // per_block
    inside = where & (column < table.shape[1])
    block = table.load_int(request.slot, column, where=inside)
    return block, entry % per_block, inside & (block >= 0) & (block < num_blocks)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """All that finishing an entry needs besides its pooled row. Loaded early: none of it waits for the pooling."""

    weight: Channels  # of the norm
    angles: Angles
    block: Value
    at: Value  # row in the block
    stored: Condition  # the block is there


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EntryStore:
    """Where a compressor's entries go, and how they are finished: norm, rope, number format, bytes."""

    request: Request
    row: Row
    rows: Any  # buffers of the pool, [layers, num_blocks, entries_per_block, ...]
    weight: Buffer  # of the norm
    number_format: str
    eps: float
    is_key: bool

    def prepare(self, number: Index, ratio: int, where: Condition, *, known: bool = False) -> Destination:
        """For the ``number``-th entry of this call, where it is complete.

        known: ``number`` is in range whatever the request, so that what does not depend on the slot is loaded at once.
        """
        request, row = self.request, self.row
        leaf = self.rows.codes if self.is_key else self.rows.nope
        at_once = True if known else where
        return Destination(
            row.load(self.weight, where=at_once),
            load_angles(row, request.tokens.rope, request.batch, number, where=at_once),
            *locate_entry(request, leaf, request.start // ratio + number, where),
        )

    def finish(self, pooled: Channels, to: Destination) -> None:
        """Norm, rope, encode and store a pooled row."""
        row, lead = self.row, (self.request.layer, to.block, to.at)
        if self.is_key:
            y, _ = norm(row, pooled, to.weight, self.eps)
            y = hadamard(row, rope(y, to.angles))
            store_key(row, y, self.rows, *lead, key_format=self.number_format, where=to.stored)
        else:
            y, amax = norm(row, pooled, to.weight, self.eps, nope_dim=self.rows.nope.shape[-1])
            y = rope(y, to.angles)
            store_kv(row, y, self.rows, *lead, kv_format=self.number_format, where=to.stored, amax=amax)
