"""What a layer's compressors do to its cache with new tokens: entries, tails and pool in one step."""

from __future__ import annotations

import jax
from jax import lax

from dsv4jax.cache import LayerStack
from dsv4jax.checks import fitting
from dsv4jax.compressor import finish_entries, pool_csa, pool_hca, pool_hca_online, project_streams
from dsv4jax.config import AttentionType
from dsv4jax.flush import append_tail, flush_csa, flush_hca, reset_hca, rotate_csa
from dsv4jax.linear import hadamard
from dsv4jax.plan import CachePlan
from dsv4jax.state_cache import HCAOnlineTail, HCATail, read_slots
from dsv4jax.weights import CompressorParams, IndexerParams


def compress(
    params: CompressorParams,
    indexer: IndexerParams | None,
    x: jax.Array,
    stack: LayerStack,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
) -> LayerStack:
    """Complete the entries that new tokens fill, store them, and bring the tails up to date.

    Args:
      params, indexer: the layer's compressor and, for CSA, its indexer.
      x: [B, T, hidden]; finite past num_new, for the projections of all T are computed.
      index: layer's place in its stack.
      block_table: int32 [requests, max_blocks].
      slots, start, num_new: int32 [B]; request (-1 = no-op), tokens it holds, tokens it gets (above T: no-op).
    """
    assert stack.pool is not None
    num_new = fitting(num_new, x.shape[1])
    cfg, state, pool, ratio = plan.cfg, stack.state, stack.pool, plan.cfg.ratio(kind)
    phase, first = start % ratio, start // ratio
    completed = (phase + num_new) // ratio
    full = (num_new > 0) & ((phase + num_new) % ratio == 0)
    streams = project_streams(params, x, start, ratio, plan.tail_dtype, overlap=kind == AttentionType.CSA)
    tail = read_slots(state.tail, index, slots)

    if indexer is not None:
        key_params = indexer.compressor
        key_streams = project_streams(key_params, x, start, ratio, plan.tail_dtype, overlap=True)
        key_tail = read_slots(state.indexer_tail, index, slots)
        entries = finish_entries(pool_csa(tail, streams, phase, num_new, ratio), params.norm, first, kind, cfg)
        keys = pool_csa(key_tail, key_streams, phase, num_new, ratio)
        keys = hadamard(finish_entries(keys, key_params.norm, first, kind, cfg))
        (entries, keys), state = lax.optimization_barrier(((entries, keys), state))  # tails are read, then written
        pool = flush_csa.__wrapped__(pool, index, entries, keys, block_table, slots, first, completed, plan=plan)
        state = append_tail.__wrapped__(state, index, streams, key_streams, slots, start, num_new, plan=plan)
        return LayerStack(state=rotate_csa.__wrapped__(state, index, slots, full), pool=pool)

    if isinstance(tail, HCATail):
        pooled = pool_hca(tail, streams, phase, num_new, ratio)
    else:
        pooled, _ = pool_hca_online(tail, streams, phase, num_new, ratio)
    entries = finish_entries(pooled, params.norm, first, kind, cfg)
    entries, state = lax.optimization_barrier((entries, state))
    pool = flush_hca.__wrapped__(pool, index, entries, block_table, slots, first, completed, plan=plan)
    state = append_tail.__wrapped__(state, index, streams, None, slots, start, num_new, plan=plan)
    if isinstance(tail, HCAOnlineTail):
        state = reset_hca.__wrapped__(state, index, slots, full, plan=plan)
    return LayerStack(state=state, pool=pool)
