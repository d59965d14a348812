"""LayerCacheHandle: one layer's cache as one call of a model sees it.

For those who write their own layer: the same pieces that ``attention_layer`` is made of, with the indices of a batch
already resolved. A handle is a value: a write returns a new one, and ``.cache`` gives the cache back. Use it in a jit
that donates the cache: outside of one, every write copies what it changes. A handle remembers T once it has written:
out of a branch or a loop give its ``.cache``, and acquire again. It remembers what it has written, too: with
``backend="xla"`` what it reads has a derivative by that, straight through the rounding, as ``attention_layer`` has.

    handle = acquire(cache, layer, slots, num_new)
    handle = handle.flush_compression(compressor, x, indexer)
    picks = select_entries(queries, weights, handle.entries, handle.visible(tokens))    # CSA
    out = decode_attention(q, handle.positions(tokens), sinks, handle.window(kv), handle.entries, picks, kind="csa")
    cache = handle.write_swa(kv).cache
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.checked import check_fitting, check_granted
from dsv4jax.cache.pool import ExactEntries, PooledLayer
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.cache.tables import is_admitted
from dsv4jax.checks import FLOATS, check_array, check_batch, integer
from dsv4jax.derivatives import storable
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import Batch, read_slots
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import Anywhere, Backend, check_name
from dsv4jax.layer.call import LayerCall, TokenRows, granted_batch, without_grants
from dsv4jax.layer.compressor import project_tokens
from dsv4jax.layer.gather import complete_rows, picked_rows
from dsv4jax.layer.ops import CACHE_UPDATE, CacheUpdate
from dsv4jax.layer.update import exact_entries, store
from dsv4jax.plan import LayerCacheSchema
from dsv4jax.weights.params import CompressorParams, IndexerParams, check_compressors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SWAView:
    """The stored windows of a batch, still encoded."""

    rows: KVRows  # [B, n_win, ...]
    positions: jax.Array  # int32 [B, n_win], -1 = empty
    head: jax.Array  # int32 [B] the row that the next token goes to
    slots: jax.Array  # int32 [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassicalView:
    """One layer's compressed entries, still encoded, and which blocks belong to which request."""

    rows: KVRows  # [num_blocks, entries_per_block, ...]
    block_table: jax.Array  # int32 [B, max_blocks], -1 = none
    block_lens: jax.Array  # int32 [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexerView:
    """One CSA layer's indexer keys, still encoded."""

    keys: KeyRows  # [num_blocks, entries_per_block, ...]
    block_table: jax.Array  # int32 [B, max_blocks], -1 = none
    block_lens: jax.Array  # int32 [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheHandle:
    """Reads and writes one layer's cache for a batch. Make one with ``acquire``."""

    cache: KVCache
    index: jax.Array  # int32 [] the layer's index in its stack
    batch: Batch  # of this call; a slot is -1 if its row is padding, not admitted or not granted its tokens
    kind: AttentionType = dataclasses.field(metadata={"static": True})
    schema: LayerCacheSchema = dataclasses.field(metadata={"static": True})
    backend: Backend = dataclasses.field(metadata={"static": True})
    tokens: int | None = dataclasses.field(default=None, metadata={"static": True})  # T, known after the first write
    exact_kv: jax.Array | None = None  # f32 [B, T, head_dim] rows written, before rounding: for derivatives
    exact_entries: ExactEntries | None = None  # and the entries that were completed

    @property
    def slots(self) -> jax.Array:
        """The request of each row, int32 [B], -1 = none."""
        return self.batch.slots

    @property
    def start(self) -> jax.Array:
        """The tokens that each request had before this call, int32 [B]."""
        return self.batch.start

    @property
    def num_new(self) -> jax.Array:
        """The tokens that each row brings in this call, int32 [B]."""
        return self.batch.num_new

    @property
    def num_query_heads(self) -> int:
        return self.cache.plan.cfg.num_heads

    @property
    def head_dim(self) -> int:
        return self.schema.entry_head_dim

    @property
    def _call(self) -> LayerCall:
        return LayerCall.of(self.cache, self.kind, self.index, self.batch)

    @property
    def entries(self) -> PooledLayer:
        """The layer's entries as seen by the requests of this batch. Raises ValueError if the kind has none."""
        entries = self._call.entries
        if entries is None:
            raise ValueError(f"layer {self.schema.layer_idx} is {self.kind.upper()}: it has no compressed entries")
        return dataclasses.replace(entries, exact=self.exact_entries)

    @property
    def num_entries(self) -> jax.Array:
        """Number of entries that are complete once this call's tokens are stored, int32 [B], for num_new <= T."""
        ratio = self.schema.compression_ratio
        return (self.start + self.num_new) // ratio if ratio else jnp.zeros_like(self.start)

    def positions(self, num_tokens: int) -> jax.Array:
        """Return the position of each of this call's T tokens, int32 [B, T].

        It is -1 past num_new, and in the whole row if num_new exceeds T.
        """
        self._check_tokens(integer("num_tokens", num_tokens, least=0))
        call = self._call
        return dataclasses.replace(call, batch=call.batch.fitting(num_tokens)).positions(num_tokens)

    def visible(self, num_tokens: int) -> jax.Array:
        """Return how many entries each of this call's T tokens sees, int32 [B, T]; 0 past num_new.

        This includes the entry that the token itself completes.
        """
        self.entries  # noqa: B018  raises for an SWA layer
        return (self.positions(num_tokens) + 1) // self.schema.compression_ratio

    def window(self, kv: jax.Array | None = None) -> SlidingWindow:
        """Return the windows of this batch, for ``decode_attention``.

        Args:
          kv: f32 [B, T, head_dim], this call's key rows, if they are not written yet. After ``write_swa``, give None;
            this works only for T = 1, because with more tokens the late ones have overwritten rows that the early ones
            see.
        """
        cfg, fresh = self.cache.plan.cfg, None
        if kv is not None:
            check_array("kv", kv, {"B": self.slots.shape[0], "T": self.tokens, "head_dim": cfg.head_dim}, jnp.float32)
            fresh = self.cache.plan.rows.encode(storable(kv, self.cache.plan.row_spec), cfg.rope_dim)
        return self._call.window(fresh, self.exact_kv if kv is None else kv)

    def _check_tokens(self, num_tokens: int) -> None:
        if self.tokens not in (None, num_tokens):
            raise ValueError(f"expected T = {self.tokens} tokens as in what was written, got {num_tokens}")

    def _taking(self, num_tokens: int) -> LayerCacheHandle:
        """Return the handle for a call with T tokens.

        Rows that name more become no-ops, and their grants are withdrawn.
        """
        self._check_tokens(num_tokens)
        check_fitting(self.slots, self.num_new, num_tokens)
        cache = without_grants(self.cache, self.slots, self.num_new > num_tokens)
        slots = jnp.where(self.num_new > num_tokens, -1, self.slots)
        batch = dataclasses.replace(self.batch.fitting(num_tokens), slots=slots)
        return dataclasses.replace(self, cache=cache, batch=batch, tokens=num_tokens)

    def write_swa(self, kv: jax.Array) -> LayerCacheHandle:
        """Round key rows f32 [B, T, head_dim], which have norm and rope applied, and write them into the window."""
        cfg = self.cache.plan.cfg
        check_array("kv", kv, {"B": self.slots.shape[0], "T": None, "head_dim": cfg.head_dim}, jnp.float32)
        taking = self._taking(kv.shape[1])
        return dataclasses.replace(taking._stored(TokenRows(kv=kv, entry=None, key=None)), exact_kv=kv)

    def flush_compression(
        self, params: CompressorParams, x: jax.Array, indexer: IndexerParams | None = None
    ) -> LayerCacheHandle:
        """Feed x [B, T, hidden] to the compressors: store the entries that it completes, and update the tails.

        Tails and entries are written together, because T tokens may fill several blocks while a tail holds only one.

        Args:
          params: the weights of the compressor.
          x: f32 or bf16 [B, T, hidden], the input of the layer.
          indexer: the weights of the indexer; required for CSA layers, and not allowed for others.

        Raises:
          ValueError: the layer is SWA, or ``indexer`` is missing or not allowed.
        """
        if (indexer is not None) != self.kind.is_indexed:
            raise ValueError(
                f"flush_compression: indexer is for CSA layers and only for them; this one is {self.kind.upper()}"
            )
        hidden = self.cache.plan.cfg.hidden_size
        check_array("x", x, {"B": self.slots.shape[0], "T": None, "hidden_size": hidden}, FLOATS)
        self.entries  # noqa: B018  raises for an SWA layer
        check_compressors(params, indexer, self.cache.plan.cfg, self.kind)
        taking = self._taking(x.shape[1])
        rows = project_tokens(params, indexer, x, taking.start, taking.cache.plan, taking.kind, taking.backend)
        is_plain = isinstance(taking._cache_update, Anywhere)
        exact = exact_entries(taking._call, rows) if is_plain else None
        return dataclasses.replace(taking._stored(rows), exact_entries=exact)

    @property
    def _cache_update(self) -> CacheUpdate:
        """What stores what is written through the handle."""
        return CACHE_UPDATE.of(self.backend, self.cache.plan, self.kind)

    def _stored(self, rows: TokenRows) -> LayerCacheHandle:
        stack = store(self._call, rows, self._cache_update)
        return dataclasses.replace(self, cache=self.cache.with_stack(self.kind, stack))

    def gather_swa(self) -> tuple[jax.Array, jax.Array]:
        """Return the window, oldest first: rows f32 [B, n_win, head_dim], positions int32 [B, n_win], -1 = empty."""
        return self.window().newest(self.start + self.num_new)

    def gather_compressed(self, picks: jax.Array) -> jax.Array:
        """Gather entries int32 [B, ...] (-1 = none) as dense rows f32 [B, ..., head_dim], both K and V."""
        return picked_rows(self.entries, picks, jnp.float32, self.backend)

    def gather_all_compressed(self) -> jax.Array:
        """Gather all complete entries as dense rows f32 [B, max entries, head_dim], zero past ``num_entries``."""
        return complete_rows(self.entries, self.num_entries, jnp.float32, self.backend)

    def read_swa_view(self) -> SWAView:
        """Return the stored window rows of this batch. Those of slot -1 are meaningless."""
        state = self._call.stack.state
        rows, positions = read_slots((state.window, state.pos), self.index, self.slots)
        head = (self.start + self.num_new) % self.cache.plan.cfg.sliding_window
        return SWAView(rows=rows, positions=positions, head=head, slots=self.slots)

    def read_classical_view(self) -> ClassicalView:
        """Return the layer's stored entries, with this batch's rows of the block table."""
        table, lens = self._block_rows()
        rows = jax.tree.map(lambda leaf: leaf[self.index], self.entries.pool.entries)
        return ClassicalView(rows=rows, block_table=table, block_lens=lens)

    def read_indexer_view(self) -> IndexerView:
        """Return the layer's stored indexer keys, with this batch's rows of the block table. CSA only."""
        stored = self.entries.pool.indexer_keys
        if stored is None:
            raise ValueError(f"layer {self.schema.layer_idx} is {self.kind.upper()}: only CSA layers have indexer keys")
        table, lens = self._block_rows()
        keys = jax.tree.map(lambda leaf: leaf[self.index], stored)
        return IndexerView(keys=keys, block_table=table, block_lens=lens)

    def _block_rows(self) -> tuple[jax.Array, jax.Array]:
        tables = self.cache.tables
        table, lens = (
            tables.block_table.at[self.slots].get(mode="clip"),
            tables.block_lens.at[self.slots].get(mode="clip"),
        )
        there = self.slots >= 0
        return jnp.where(there[:, None], table, -1), jnp.where(there, lens, 0)


def acquire(
    cache: KVCache, layer: int, slots: jax.Array, num_new: jax.Array, *, backend: Backend = None
) -> LayerCacheHandle:
    """A handle on one layer for this call's batch.

    Args:
      layer: static number of the layer in the model.
      slots, num_new: int32 [B], as given to ``prepare_forward``. A row that was not granted becomes a no-op; one with
        num_new 0 only reads.
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.

    Raises:
      AssertionError: (chex) slots or num_new has another rank or dtype.
      ValueError: unknown layer or backend.
    """
    check_cache("acquire", cache)
    check_name(backend)
    check_batch(slots=slots, num_new=num_new)
    cache, slots, num_new = jax.tree.map(jnp.asarray, (cache, slots, num_new))  # of NumPy's too, as jit takes them
    kind, index = cache.locate(layer)
    check_granted(cache.tables, slots, num_new)
    cache, batch = granted_batch(cache, slots, num_new)
    reading = is_admitted(cache.tables, slots) & (num_new == 0)
    length = cache.seq_lens.at[slots].get(mode="clip")
    batch = dataclasses.replace(
        batch, slots=jnp.where(reading, slots, batch.slots), start=jnp.where(reading, length, batch.start)
    )
    return LayerCacheHandle(
        cache=cache,
        index=jnp.asarray(index, jnp.int32),
        batch=batch,
        kind=kind,
        schema=cache.plan.schema(layer),
        backend=backend,
    )
