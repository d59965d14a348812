"""The call of a layer: which requests it is for, what it may do with each, and what their new tokens bring.

Made once, in ``LayerCall.begin``, and handed to everything that stores and attends. A grant that the call cannot use
is withdrawn there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.cache.tables import granted_tokens, withdraw_grants
from dsv4jax.derivatives import storable
from dsv4jax.formats import KVRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import CachePlan
from dsv4jax.tails import Streams

Normed = tuple[Streams, jax.Array]  # what new tokens contribute to entries, and the weight of the entries' norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """What T new tokens of each request bring to a layer's cache, before any rounding. What is None is not stored."""

    kv: jax.Array | None  # f32 [B, T, head_dim] window rows, normed and roped
    entry: Normed | None  # of the compressor: streams [B, T, ...] and norm weight; None for SWA
    key: Normed | None  # of the indexer's compressor; CSA only

    @property
    def num_tokens(self) -> int:
        """T."""
        leaves = [leaf for leaf in jax.tree.leaves(self) if leaf.ndim == 3]
        return leaves[0].shape[1]

    def first(self, num_tokens: int) -> TokenRows:
        """The rows of the first tokens."""

        def cut(normed: Normed | None) -> Normed | None:
            return normed and (jax.tree.map(lambda leaf: leaf[:, :num_tokens], normed[0]), normed[1])

        kv = None if self.kv is None else self.kv[:, :num_tokens]
        return TokenRows(kv=kv, entry=cut(self.entry), key=cut(self.key))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """The rows of one call in one layer."""

    stack: LayerStack  # all layers of the kind
    index: jax.Array | int  # the layer's place in the stack
    block_table: jax.Array  # int32 [requests, max_blocks], -1 = none
    batch: Batch  # slot -1 where a row is padding, or was not granted what it asks for
    kind: AttentionType = dataclasses.field(metadata={"static": True})
    plan: CachePlan = dataclasses.field(metadata={"static": True})

    @classmethod
    def begin(
        cls,
        cache: KVCache,
        kind: AttentionType,
        index: jax.Array | int,
        slots: jax.Array,
        num_new: jax.Array,
        num_tokens: int,
    ) -> tuple[KVCache, LayerCall]:
        """What each row may do in a call of T tokens.

        A row that names more tokens than T stores nothing. Its grant is withdrawn, so that neither another layer nor
        ``advance`` counts what was never stored.
        """
        tables = withdraw_grants(cache.tables, slots, num_new > num_tokens)
        start, count = granted_tokens(tables, slots, num_new)
        batch = Batch(slots=jnp.where(count > 0, slots, -1), start=start, num_new=count)
        cache = dataclasses.replace(cache, tables=tables)
        return cache, cls.of(cache, kind, index, batch)

    @classmethod
    def of(cls, cache: KVCache, kind: AttentionType, index: jax.Array | int, batch: Batch) -> LayerCall:
        """The call of a batch that is known to be granted."""
        return cls(
            stack=storable(cache.stack(kind), cache.plan.row_spec),  # what earlier calls stored
            index=index,
            block_table=cache.tables.block_table,
            batch=batch,
            kind=kind,
            plan=cache.plan,
        )

    @property
    def ratio(self) -> int:
        """Tokens of an entry."""
        return self.plan.cfg.ratio(self.kind)

    @property
    def phase(self) -> jax.Array:
        """int32 [B]: tokens that a request's unfinished block holds before the call."""
        return self.batch.start % self.ratio

    @property
    def first_entry(self) -> jax.Array:
        """int32 [B]: number of the first entry that the call can complete."""
        return self.batch.start // self.ratio

    def positions(self, num_tokens: int) -> jax.Array:
        """int32 [B, T] position of each token, -1 past a row's own."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[None]
        return jnp.where(token < self.batch.num_new[:, None], self.batch.start[:, None] + token, -1)

    def window(self, fresh: KVRows | None, exact: jax.Array | None = None) -> SlidingWindow:
        """The windows of the batch, with rows that are not stored yet beside them.

        ``exact`` f32 [B, T, head_dim] are the call's rows before rounding, from which derivatives are taken.
        """
        return SlidingWindow(
            state=self.stack.state,
            index=self.index,
            slots=self.batch.slots,
            start=self.batch.start,
            fresh=fresh,
            plan=self.plan,
            exact=exact,
        )

    @property
    def entries(self) -> PooledLayer | None:
        """The layer's entries as the batch sees them; None where the kind has none."""
        if self.stack.pool is None:
            return None
        return PooledLayer(
            pool=self.stack.pool,
            index=self.index,
            block_table=self.block_table,
            slots=self.batch.slots,
            plan=self.plan,
        )

    def with_stack(self, stack: LayerStack) -> LayerCall:
        return dataclasses.replace(self, stack=stack)
