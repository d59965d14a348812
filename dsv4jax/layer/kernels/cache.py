"""The kernels that write to the cache, and those that gather rows from it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.cache.pool import PagedPool, PooledLayer, find_entries
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import StateCache
from dsv4jax.checks import Tree
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.kernels.base import Kernels, layer_number, register, register_invariant
from dsv4jax.layer.ops import CACHE_UPDATE, GATHER_ROWS, NewEntries
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.tails import num_touched_blocks


class CacheUpdateKernels(Kernels):
    """The kernels of ``pallas_kernels.update``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        cfg = plan.cfg
        return self.kernels.unsupported(
            kv_format=plan.kv_format,
            key_format=plan.indexer_format,
            nope_dim=cfg.head_dim - cfg.rope_dim,
            rope_dim=cfg.rope_dim,
            csa_ratio=cfg.csa_compression_ratio if kind.overlaps else None,
            key_dim=cfg.indexer_head_dim if kind.is_indexed else None,
        )

    def store(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        """Run the cache update of one layer as one launch."""
        call, rows = self.without_derivative(CACHE_UPDATE, (call, rows))
        plan, num_tokens = call.plan, rows.num_tokens
        streams = _streams(rows.entry), _streams(rows.key)
        tokens = self.new_tokens(call, num_tokens, rows.kv, streams)
        launch: Tree = functools.partial(self.kernels.append_chunk, keep_tails=keep_tails)
        if num_tokens == 1 and not keep_tails:
            launch = self.kernels.cache_step
        return launch(
            call.stack,
            tokens,
            kv_format=plan.kv_format,
            key_format=plan.indexer_format,
            ratio=None if rows.entry is None else call.ratio,
            eps=plan.cfg.norm_eps,
            **self.options,
        )

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        state, kv = self.without_derivative(CACHE_UPDATE, (state, kv))
        stack = LayerStack(state=dataclasses.replace(state, tail=None, indexer_tail=None), pool=None)
        rows = layer_number(index), kv, batch.slots, batch.start, batch.num_new
        stack = self.kernels.append_swa(stack, *rows, kv_format=plan.kv_format, **self.options)
        return dataclasses.replace(state, window=stack.state.window, pos=stack.state.pos)

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        pool, new = self.without_derivative(CACHE_UPDATE, (pool, new))
        given = pk.NewEntries(
            layer=layer_number(index),
            slots=new.slots,
            block_table=new.block_table,
            first=new.first,
            count=new.count,
            entries=new.entries,
            keys=new.keys,
        )
        return self.kernels.flush_entries(
            pool, given, kv_format=plan.kv_format, key_format=plan.indexer_format, **self.options
        )

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        state = self.without_derivative(CACHE_UPDATE, state)
        given = [state.tail, state.indexer_tail], layer_number(index), slots, complete.astype(jnp.int32)
        tail, indexer_tail = pk.rotate_csa(*given, **self.options)
        return dataclasses.replace(state, tail=tail, indexer_tail=indexer_tail)

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        state = self.without_derivative(CACHE_UPDATE, state)
        given = state.tail, layer_number(index), slots, complete.astype(jnp.int32)
        return dataclasses.replace(state, tail=pk.reset_hca(*given, **self.options))

    def new_tokens(
        self,
        call: LayerCall,
        num_tokens: int,
        kv: jax.Array | None,
        streams: tuple[pk.Streams | None, pk.Streams | None],
    ) -> pk.NewTokens:
        """Return tokens with these window rows and streams of both compressors, and where a call's tokens go."""
        (entry, key), batch, rope = streams, call.batch, None
        if entry is not None:
            touched = jnp.arange(num_touched_blocks(num_tokens, call.ratio), dtype=jnp.int32)[None]
            positions = call.ratio * (call.first_entry[:, None] + touched)
            rope = packed_angles(positions, rope_frequencies(call.plan.cfg, call.kind))
        return pk.NewTokens(
            layer=layer_number(call.index),
            slots=batch.slots,
            start=batch.start,
            num_new=batch.num_new,
            block_table=call.block_table,
            kv=kv,
            entry=entry,
            key=key,
            rope=rope,
            in_order=self.invariant,
        )


def _streams(given: Normed | None) -> pk.Streams | None:
    return given and pk.Streams(k=given[0].k, z=given[0].z, norm=given[1])


class GatherRowsKernels(Kernels):
    """The kernels of ``pallas_kernels.gather``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        return CacheUpdateKernels(self.family).unserved(plan, kind)

    def picked(self, layer: PooledLayer, picks: jax.Array, dtype: DTypeLike) -> jax.Array:
        layer = self.without_derivative(GATHER_ROWS, layer)
        block, row = find_entries(layer.pool.entries, layer.block_table, layer.slots, picks)
        place = layer_number(layer.index), block.reshape(-1), row.reshape(-1)
        flat = self.kernels.gather_rows(
            layer.pool.entries, *place, kv_format=layer.plan.kv_format, dtype=dtype, **self.options
        )
        return flat.reshape(*block.shape, flat.shape[-1])

    def complete(self, layer: PooledLayer, num_entries: jax.Array, dtype: DTypeLike) -> jax.Array:
        layer = self.without_derivative(GATHER_ROWS, layer)
        place = layer_number(layer.index), layer.block_table, layer.slots, num_entries
        return self.kernels.gather_request_rows(
            layer.pool.entries, *place, kv_format=layer.plan.kv_format, dtype=dtype, **self.options
        )


register(CACHE_UPDATE, CacheUpdateKernels)
register_invariant(CACHE_UPDATE, functools.partial(CacheUpdateKernels, invariant=True))
register(GATHER_ROWS, GatherRowsKernels)
