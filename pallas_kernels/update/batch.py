"""The arguments of a cache update, what each CTA derives from them first, and how the work on a request is split.

A request's tokens are divided into groups of ``ratio`` tokens, each of which becomes one entry. The phase of a request
is the number of tokens in its unfinished group.

The grid is [B, units]. A unit is a cluster of CTAs. The first units of a request belong to the compressor. Jobs, of
single warps, either get units of their own after these, or are done by the warps of the compressor's units as well
("ride along").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.formats import KeyFormat, KeyRows, KVFormat, KVRows
from pallas_kernels.language.lanes import Buffer, Row, Shaped, Team
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.machine import WARP, WARPGROUP, Machine
from pallas_kernels.language.values import VECTOR, Channels, Condition, Index, Value
from pallas_kernels.rows import through_bf16
from pallas_kernels.trees import Tree

Pair = tuple[Channels, Channels]  # a row of keys and the row of its gate logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streams[Array: Shaped]:
    """A compressor's projections of the new tokens, straight from the matrix product, and the weight of its norm.

    CSA has two streams side by side: channels [0, dim) of k and z are the b-stream, [dim, 2 dim) the a-stream.
    """

    k: Array | None  # f32 [B, T, dim or 2 dim]
    z: Array | None  # f32 [B, T, dim or 2 dim] gate logits, including the position bias
    norm: Array  # f32 or bf16 [dim]

    @property
    def lead(self) -> tuple[int, int]:
        """B and T."""
        assert self.k is not None
        batch, tokens, _ = self.k.shape
        return batch, tokens

    def check(self, width: int, ratio: int) -> None:
        """Raise AssertionError (chex) if k and z are not so wide."""
        del ratio
        chex.assert_shape([self.k, self.z], (*self.lead, width))
        chex.assert_type([self.k, self.z], jnp.float32)

    def load(
        self: Streams[Buffer],
        row: Row,
        request: Request,
        token: Index,
        *,
        first: int = 0,
        where: Condition = True,
        empty_gate: float = 0.0,
    ) -> Pair:
        """Load k and z of a new token from channel ``first`` on; 0 and ``empty_gate`` where ``where`` is False."""
        (k, of_k), (z, of_z) = self._columns
        lead = request.batch, token
        pair = (
            row.load(k, *lead, first=of_k + first, where=where),
            row.load(z, *lead, first=of_z + first, where=where, otherwise=empty_gate),
        )
        return self._finished(row, request, token, pair, first, where)

    def load_or_kept(
        self: Streams[Buffer],
        row: Row,
        request: Request,
        token: Value,
        kept: Kept,
        *,
        first: int = 0,
        where: Condition = True,
        empty_gate: float = 0.0,
    ) -> Pair:
        """Do what ``load`` does, but load what a tail has kept of a token before the call, which is below 0."""
        k, z = (
            row.load_either(
                token < 0,
                (old, kept.at),
                (new, (request.batch, token)),
                first=(0, begin + first),
                where=where,
                otherwise=otherwise,
            )
            for old, (new, begin), otherwise in zip(kept.buffers, self._columns, (0.0, empty_gate), strict=True)
        )
        return self._finished(row, request, token, (k, z), first, where & (token >= 0))

    @property
    def _columns(self) -> tuple[tuple[Array, int], tuple[Array, int]]:
        """The buffer of k and its first column there, and those of z."""
        assert self.k is not None
        assert self.z is not None
        return (self.k, 0), (self.z, 0)

    def _finished(self, row: Row, request: Request, token: Index, pair: Pair, first: int, where: Condition) -> Pair:
        """Complete what was loaded from channel ``first`` on, of tokens that are new where ``where`` holds."""
        del row, request, token, first, where
        return pair


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A row of a tail."""

    buffers: tuple[Buffer, Buffer]  # k and z
    at: tuple[Index, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductStreams[Array: Shaped](Streams[Array]):
    """Streams that are columns of a product: [first, first + width) are k, the next ``width`` are z without its bias.

    Both are rounded to bf16 if ``is_bf16`` says so.
    """

    k: None = None
    z: None = None
    product: Array  # f32 [B, T, columns]
    ape: Array  # f32 or bf16 [ratio, width]: the bias of z, by the position's place in its group
    first: int = dataclasses.field(metadata={"static": True})
    is_bf16: bool = dataclasses.field(metadata={"static": True})

    @property
    def lead(self) -> tuple[int, int]:
        batch, tokens, _ = self.product.shape
        return batch, tokens

    def check(self, width: int, ratio: int) -> None:
        chex.assert_shape([self.product, self.ape], [(*self.lead, None), (ratio, width)])
        chex.assert_type(self.product, jnp.float32)
        columns = self.product.shape[-1]
        if any(size % VECTOR for size in (self.first, width, columns)) or self.first + 2 * width > columns:
            raise ValueError(
                f"expected streams of multiples of {VECTOR} columns, got {width} from {self.first} of {columns}"
            )

    @property
    def _columns(self) -> tuple[tuple[Array, int], tuple[Array, int]]:
        return (self.product, self.first), (self.product, self.first + self.ape.shape[1])

    def _finished(
        self: ProductStreams[Buffer],
        row: Row,
        request: Request,
        token: Index,
        pair: Pair,
        first: int,
        where: Condition,
    ) -> Pair:
        """Add the bias of z where a token is new, and round both. What a tail has kept is rounded already."""
        place = (request.start + token).maximum(0) % self.ape.shape[0]
        bias = row.load(self.ape, place, first=first, where=where)
        k, z = pair[0], row.map(lambda gate, more: gate + more, pair[1], bias)
        return ([through_bf16(step) for step in k], [through_bf16(step) for step in z]) if self.is_bf16 else (k, z)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens[Array: Shaped]:
    """T new tokens of each of B requests, and where they go. Parts that are None are not written."""

    layer: Array  # int32 [1] place of the layer in its stack
    slots: Array  # int32 [B], -1 = no-op
    start: Array  # int32 [B] tokens already stored
    num_new: Array  # int32 [B] new tokens; 0 or more than T: no-op
    block_table: Array | None  # int32 [requests, max_blocks] pages of each request, -1 = none; None for SWA
    kv: Array | None  # f32 [B, T, head_dim] window rows, after norm and rope
    entry: Streams[Array] | None  # from the compressor; None for SWA
    key: Streams[Array] | None  # from the indexer's compressor; CSA only
    rope: Array | None  # f32 [B, N, rope_dim] cosines, then sines, for entry start // ratio + n; None for SWA
    # Whether an entry's tokens are added in an order in which neither calls nor other requests change anything.
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of_window(cls, layer: Array, kv: Array, slots: Array, start: Array, num_new: Array) -> NewTokens[Array]:
        """Return tokens of which only the window rows are written."""
        nothing = dict.fromkeys(("block_table", "entry", "key", "rope"))
        return cls(layer=layer, slots=slots, start=start, num_new=num_new, kv=kv, **nothing)


class State[Array: Shaped](Protocol):
    """What requests have in all layers of a kind, beside their entries: [layers, requests, ...]."""

    @property
    def window(self) -> KVRows[Array]: ...  # rings of n_win rows

    @property
    def pos(self) -> Array: ...  # int32 [layers, requests, n_win] position of each ring row

    @property
    def tail(self) -> Tree: ...  # one of ``update.call.TAIL_UPDATES`` knows it by the names of its leaves; or None

    @property
    def indexer_tail(self) -> Tree: ...  # likewise


class Pool[Array: Shaped](Protocol):
    """The entries of all layers of a kind: [layers, num_pages, entries_per_page, ...]."""

    @property
    def entries(self) -> KVRows[Array]: ...

    @property
    def indexer_keys(self) -> KeyRows[Array] | None: ...  # CSA only


class Stack[Array: Shaped](Protocol):
    """All layers of a kind."""

    @property
    def state(self) -> State[Array]: ...

    @property
    def pool(self) -> Pool[Array] | None: ...  # None for SWA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewEntries[Array: Shaped]:
    """Up to E finished entries of each of B requests, and where they go. Entries without a page are dropped."""

    layer: Array  # int32 [1] place of the layer in its stack
    slots: Array  # int32 [B], -1 = no-op
    first: Array  # int32 [B] the number of the request's entry in row 0
    count: Array  # int32 [B] number of entries; 0 or more than E: no-op
    block_table: Array  # int32 [requests, max_blocks] pages of each request, -1 = none
    entries: Array  # f32 [B, E, head_dim], after norm and rope
    keys: (
        Array | None
    )  # f32 [B, E, indexer_head_dim] indexer keys, after norm, rope and Hadamard transform; None for HCA


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known about a cache update when its kernel is built."""

    requests: int  # B
    num_tokens: int  # T, per request
    ratio: int  # tokens per group; 0 for SWA
    kv_format: KVFormat
    key_format: KeyFormat
    eps: float  # of the norms
    keep_tails: bool  # write entries, but do not change the tails
    in_order: bool = False  # as in ``NewTokens``

    @property
    def max_entries(self) -> int:
        """The largest number of entries that a request's tokens can complete."""
        return (self.num_tokens + self.ratio - 1) // self.ratio

    @property
    def max_groups(self) -> int:
        """The largest number of groups that a request's tokens can touch."""
        return (self.num_tokens + 2 * self.ratio - 2) // self.ratio


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The request that a CTA works on."""

    machine: Machine
    batch: Value  # its row in the batch
    layer: Value
    slot: Value
    start: Value
    count: Value
    live: Value  # whether it has a slot, and something to store

    @classmethod
    def load(
        cls, machine: Machine, *, layer: Buffer, slots: Buffer, start: Buffer, count: Buffer, most: int, num_slots: int
    ) -> Request:
        """Load the CTA's request. Its row in the batch is the CTA's index along the first axis of the grid.

        ``most`` is the largest valid count.
        """
        batch = machine.block(0)
        layer_number = layer.load_int(0)
        slot, begin, length = slots.load_int(batch), start.load_int(batch), count.load_int(batch)
        live = (slot >= 0) & (slot < num_slots) & (begin >= 0) & (length > 0) & (length <= most)
        return cls(machine, batch, layer_number, slot, begin, length, live)

    def locate(self, block_table: Buffer, leaf: Buffer, entry: Value, where: Condition) -> tuple[Value, Value, Value]:
        """Find an entry in a pool that has this leaf: (its page, its row in the page, whether the page exists)."""
        _, num_pages, per_page = leaf.shape[:3]
        column = entry // per_page
        inside = where & (column < block_table.shape[1])
        page = block_table.load_int(self.slot, column, where=inside)
        return page, entry % per_page, inside & (page >= 0) & (page < num_pages)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What a CTA of a cache update works with: its request, all new tokens, and the arrays that they go to."""

    call: Call
    request: Request
    tokens: NewTokens[Buffer]
    stack: Stack[Buffer]  # the ``stack`` of ``append_chunk``

    @classmethod
    def load(cls, machine: Machine, call: Call, tokens: NewTokens[Buffer], stack: Stack[Buffer]) -> Block:
        request = Request.load(
            machine,
            layer=tokens.layer,
            slots=tokens.slots,
            start=tokens.start,
            count=tokens.num_new,
            most=call.num_tokens,
            num_slots=stack.state.pos.shape[1],
        )
        return cls(call, request, tokens, stack)

    @property
    def machine(self) -> Machine:
        return self.request.machine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The CTAs of a unit."""

    cluster: int = 1
    warpgroups: int = 1  # of each CTA
    shared_bytes: int = 0  # of each CTA

    @property
    def parts(self) -> int:
        """Number of warpgroups in a unit."""
        return self.cluster * self.warpgroups

    @property
    def warps(self) -> int:
        """Number of warps in a unit."""
        return self.parts * WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Rows that are each processed by one warp."""

    count: int  # per request
    dim: int  # channels of a row
    run: Callable[[Block, Row, Value], None]  # does the i-th job, on a row spread over the warp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All work on one request."""

    units: int  # of the compressor
    split: Split
    jobs: tuple[Jobs, ...]
    job_units: int  # units that only do jobs; if 0, jobs ride along with the compressor's units

    @classmethod
    def of(cls, units: int, split: Split, jobs: tuple[Jobs, ...], *, ride_along: bool) -> Work:
        job_units = 0 if ride_along else -(-sum(some.count for some in jobs) // split.warps)
        return cls(units=units, split=split, jobs=jobs, job_units=job_units)

    def grid(self, batch: int) -> Grid:
        split = self.split
        return Grid(
            blocks=(batch, self.units + self.job_units),
            warpgroups=split.warpgroups,
            cluster=split.cluster,
            shared_bytes=split.shared_bytes,
        )

    def run(self, block: Block, run_unit: Callable[[Value], None] | None) -> None:
        """Do the share of one CTA. ``run_unit`` does the compressor's part, given the number of the unit."""
        machine = block.machine
        unit, team, warps = machine.block(1), Team(machine, WARP), self.split.warps
        warp = machine.thread // WARP
        if self.split.cluster > 1:
            warp = machine.rank * (warps // self.split.cluster) + warp
        if not self.job_units:
            self._run_jobs(block, team, unit * warps + warp, self.units * warps)
            if run_unit is not None:
                run_unit(unit)
            return
        with machine.when(unit >= self.units):
            self._run_jobs(block, team, (unit - self.units) * warps + warp, self.job_units * warps)
        if run_unit is not None:
            with machine.when(unit < self.units):
                run_unit(unit)

    def _run_jobs(self, block: Block, team: Team, warp: Value, num_warps: int) -> None:
        """Distribute jobs in turn over warps 0 .. num_warps - 1.

        Each kind of jobs begins after the last warp of the one before.
        """
        machine, before = block.machine, 0
        for some in self.jobs:
            for i in range(-(-some.count // num_warps)):
                job = warp - before + i * num_warps
                with machine.when((job >= 0) & (job < some.count)):
                    some.run(block, Row(team, some.dim), job)
            before += some.count
