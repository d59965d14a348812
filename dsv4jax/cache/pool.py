"""PagedPool: the compressed entries of all requests, stored in blocks.

A block covers 128 tokens in every layer: 32 CSA entries with their indexer keys, or one HCA entry. One block table
serves all layers. Rows are addressed as (layer, block, row), because a single flat offset would overflow int32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.derivatives import through_new_rows
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import put, quotient, read_slots, remainder
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan

TILE_BYTES = 32 << 20  # memory for the temporaries of one tile of entries
type FoldTile[Carry] = Callable[[Carry, jax.Array | int, jax.Array, jax.Array], Carry]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedPool:
    """The entries of all layers of one kind."""

    entries: KVRows  # [layers, num_blocks, entries_per_block, ...]
    indexer_keys: KeyRows | None  # [layers, num_blocks, entries_per_block, ...], CSA only


def init_pool(plan: CachePlan, kind: AttentionType) -> PagedPool | None:
    """Return an empty pool; None for SWA, which compresses nothing."""
    if not kind.compresses:
        return None
    lead = len(plan.layers(kind)), plan.num_blocks, plan.entries_per_block(kind)

    def zeros[Rows: (KVRows, KeyRows)](row: Rows) -> Rows:
        return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), row)

    keys = zeros(plan.key_spec) if kind.is_indexed else None
    return PagedPool(entries=zeros(plan.row_spec), indexer_keys=keys)


def entries_per_block(store: KVRows | KeyRows) -> int:
    return jax.tree.leaves(store)[0].shape[2]


def scatter_entries[Rows: (KVRows, KeyRows)](
    store: Rows,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    rows: Rows,
) -> Rows:
    """Write entries first[b] .. first[b] + count[b] - 1 of each request.

    Leaves of ``rows`` are [B, E, ...], E >= count.

    An entry whose block is not allocated is dropped.
    """
    per_block = entries_per_block(store)
    k = jnp.arange(jax.tree.leaves(rows)[0].shape[1], dtype=jnp.int32)[None]
    entry = first[:, None] + k
    number, row = quotient(entry, per_block), remainder(entry, per_block)
    block = block_table.at[slots[:, None], number].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    valid = (k < count[:, None]) & (slots[:, None] >= 0) & (block >= 0)
    return put(store, index, block, valid, rows, row)


def find_entries(
    store: KVRows | KeyRows, block_table: jax.Array, slots: jax.Array, entry: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the block (-1 if there is none) and the row in it, int32 [B, ...] each, of entries int32 [B, ...]."""
    per_block = entries_per_block(store)
    rows = slots.reshape(slots.shape + (1,) * (entry.ndim - 1))
    is_none, entry = (entry < 0) | (rows < 0), jnp.maximum(entry, 0)
    number, row = quotient(entry, per_block), remainder(entry, per_block)
    block = block_table.at[rows, number].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    return jnp.where(is_none, -1, block), row


def gather_entries[Rows: (KVRows, KeyRows)](
    store: Rows, index: jax.Array | int, block_table: jax.Array, slots: jax.Array, entry: jax.Array
) -> tuple[Rows, jax.Array]:
    """Read encoded entries int32 [B, ...]: leaves [B, ..., *row], and bool [B, ...], which of them exist.

    An entry that does not exist (entry -1, slot -1, or block not allocated) reads an arbitrary row in range, so its
    values must be masked.
    """
    block, row = find_entries(store, block_table, slots, entry)
    return read_slots(store, index, block, row), block >= 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExactEntries:
    """The entries that a call completes, as they were before rounding: derivatives are taken from these."""

    rows: jax.Array  # f32 [B, E, head_dim]
    first: jax.Array  # int32 [B] number of the first one
    count: jax.Array  # int32 [B] entries that are real, at most E


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PooledLayer:
    """One layer's pool as seen by the requests of a batch, whose entries are numbered from 0."""

    pool: PagedPool
    index: jax.Array | int  # int32 [] the layer's index in its stack
    block_table: jax.Array  # int32 [requests, max_blocks]
    slots: jax.Array  # int32 [B]
    plan: CachePlan = dataclasses.field(metadata={"static": True})
    exact: ExactEntries | None = None  # for derivatives

    @property
    def max_entries(self) -> int:
        """The largest number of entries that a request can have."""
        return self.block_table.shape[1] * entries_per_block(self.pool.entries)

    def rows(self, entry: jax.Array) -> jax.Array:
        """Read entries int32 [B, ...] (-1 = none) as f32 [B, ..., head_dim], zero where there is none."""
        rows, valid = gather_entries(self.pool.entries, self.index, self.block_table, self.slots, entry)
        values = self.plan.rows.decode(rows)
        if (new := self.exact) is not None:
            lead = (slice(None), *(None,) * (entry.ndim - 1))  # [B] beside the axes of entry
            values = through_new_rows(values, new.rows, entry - new.first[lead], new.count[lead])
        return jnp.where(valid[..., None], values, 0.0)

    def keys(self, entry: jax.Array) -> jax.Array:
        """Read the indexer keys of entries int32 [B, ...] as f32 [B, ..., indexer_head_dim], zero where there is none.

        CSA only.
        """
        assert self.pool.indexer_keys is not None
        keys, valid = gather_entries(self.pool.indexer_keys, self.index, self.block_table, self.slots, entry)
        return jnp.where(valid[..., None], self.plan.keys.decode(keys), 0.0)

    def tile_size(self, bytes_per_entry: int) -> int:
        """Return the entries per tile, in whole blocks, that keep a tile's temporaries near ``TILE_BYTES``."""
        per_block, max_blocks = entries_per_block(self.pool.entries), self.block_table.shape[1]
        return min(max_blocks, max(1, TILE_BYTES // (bytes_per_entry * per_block))) * per_block

    def fold_tiles[Carry](
        self, visible: jax.Array, tile: int, fold: FoldTile[Carry], carry: Carry, *, to_the_end: bool = False
    ) -> Carry:
        """carry = fold(carry, first, entry, seen) over tiles of entries, up to the last one that any query sees.

        So a short context costs little in a cache planned for a long one.

        Args:
          visible: int32 [B, T] entries that each query sees.
          tile: from ``tile_size``. The last tile may stand out past ``max_entries``.
          fold: gets the tile's first entry number; entry int32 [B, tile], -1 for those that no query of the request
            sees; seen bool [B, T, tile].
          to_the_end: go over all tiles, seen or not. Their number is then static, which reverse mode needs.
        """

        def fold_tile(i: jax.Array | int, carry: Carry) -> Carry:
            entry = i * tile + jnp.arange(tile, dtype=jnp.int32)
            seen = entry[None, None] < visible[..., None]
            return fold(carry, i * tile, jnp.where(jnp.any(seen, axis=1), entry[None], -1), seen)

        if tile == self.max_entries:
            return fold_tile(0, carry)
        entries = self.max_entries if to_the_end else jnp.max(visible)
        return lax.fori_loop(0, (entries + tile - 1) // tile, fold_tile, carry)
