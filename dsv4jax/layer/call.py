"""The arguments of one call of a layer: what it is given, how much of it may be stored, and what the tokens contribute.

``LayerCall.begin`` makes one and withdraws grants that the call cannot use. All functions that store or attend take it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.checked import check_layer
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.cache.tables import granted_tokens, withdraw_grants
from dsv4jax.checks import FLOATS, check_array, check_batch
from dsv4jax.derivatives import storable
from dsv4jax.formats import KVRows
from dsv4jax.indexing import Batch, quotient, remainder
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import Backend
from dsv4jax.plan import CachePlan
from dsv4jax.tails import Streams

Normed = tuple[Streams, jax.Array]  # what new tokens contribute to entries, and the norm weight of the entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a layer is given of each request of a batch."""

    x: jax.Array  # f32 or bf16 [B, T, hidden]
    slots: jax.Array  # int32 [B], -1 = padding row
    num_new: jax.Array  # int32 [B], tokens of each row that are real
    residual: jax.Array | None = None  # rows like x to which the output is added

    def check(self, hidden_size: int) -> None:
        check_batch(slots=self.slots, num_new=self.num_new)
        check_array("x", self.x, {"B": self.slots.shape[0], "T": None, "hidden_size": hidden_size}, FLOATS)
        if self.residual is not None:
            axes: dict[str, int | None] = dict(zip(("B", "T", "hidden_size"), self.x.shape, strict=True))
            check_array("residual", self.residual, axes, self.x.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a layer's run."""

    backend: Backend = None
    model_axis: str | None = None  # the mesh axis over which heads are split
    # The mesh axis over which queries are split: each device stores all tokens, and returns y of its share of them.
    # Then there is no residual, and nothing is probed.
    token_axis: str | None = None
    is_draft: bool = False  # do not change windows and tails, and return what ``commit`` needs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """What T new tokens of each request contribute to a layer's cache, before rounding.

    Parts that are None are not stored.
    """

    kv: jax.Array | None  # f32 [B, T, head_dim] window rows, after norm and rope
    entry: Normed | None  # from the compressor: streams [B, T, ...] and norm weight; None for SWA
    key: Normed | None  # from the indexer's compressor; CSA only

    @property
    def num_tokens(self) -> int:
        """The number of tokens T."""
        leaves = [leaf for leaf in jax.tree.leaves(self) if leaf.ndim == 3]
        return leaves[0].shape[1]


Draft = tuple[Batch, TokenRows]  # the batch of a draft, and what its tokens contribute


def without_grants(cache: KVCache, slots: jax.Array, where: jax.Array) -> KVCache:
    """Return the cache without the grants of some rows of a batch, so that nobody counts tokens that are not stored."""
    return dataclasses.replace(cache, tables=withdraw_grants(cache.tables, slots, where))


def granted_batch(
    cache: KVCache, slots: jax.Array, num_new: jax.Array, num_tokens: int | None = None
) -> tuple[KVCache, Batch]:
    """Determine what each row may do with what ``prepare_forward`` granted. Returns the cache and the batch.

    Slots are -1 in rows that are padding, or were not granted their tokens. A row whose num_new exceeds ``num_tokens``,
    where that is known, stores nothing, and its grant is withdrawn in the returned cache.
    """
    if num_tokens is not None:
        cache = without_grants(cache, slots, num_new > num_tokens)
    # Where memory is short, XLA computes small things again instead of keeping them. By then it has decided what is
    # updated in place, and would read lengths that ``advance`` has overwritten. It does not go behind a barrier.
    start, count = lax.optimization_barrier(granted_tokens(cache.tables, slots, num_new))
    return cache, Batch(slots=jnp.where(count > 0, slots, -1), start=start, num_new=count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """The batch of one call, and the layer that it is for."""

    stack: LayerStack  # all layers of the kind
    index: jax.Array | int  # the layer's index in the stack
    block_table: jax.Array  # int32 [requests, max_blocks], -1 = none
    batch: Batch  # slot -1 if a row is padding, or was not granted its tokens
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
        """Determine what each row may do in a call with ``num_tokens`` tokens, by ``granted_batch``."""
        check_layer(cache.tables, cache.stack(kind), index, slots, num_new, num_tokens)
        cache, batch = granted_batch(cache, slots, num_new, num_tokens)
        return cache, cls.of(cache, kind, index, batch)

    @classmethod
    def of(cls, cache: KVCache, kind: AttentionType, index: jax.Array | int, batch: Batch) -> LayerCall:
        """Make the call for a batch whose tokens are known to be granted."""
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
        """Tokens per entry."""
        return self.plan.cfg.ratio(self.kind)

    @property
    def phase(self) -> jax.Array:
        """How many tokens each request's unfinished block has before the call, int32 [B]."""
        return remainder(self.batch.start, self.ratio)

    @property
    def first_entry(self) -> jax.Array:
        """The number of the first entry that the call can complete, int32 [B]."""
        return quotient(self.batch.start, self.ratio)

    def positions(self, num_tokens: int) -> jax.Array:
        """Return the position of each token, int32 [B, T]; -1 past a row's own tokens."""
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
        """The layer's entries as seen by the batch; None if the kind has no entries."""
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
