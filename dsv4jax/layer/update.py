"""What new tokens do to a layer's cache: window, entries, tails and pool in one step."""

from __future__ import annotations

import jax
from jax import lax

from dsv4jax.cache.cache import LayerStack
from dsv4jax.cache.state import HCAOnlineTail, HCATail, read_slots
from dsv4jax.checks import fitting
from dsv4jax.config import AttentionType
from dsv4jax.layer import kernels
from dsv4jax.layer.compressor import Streams, finish_entries, pool_csa, pool_hca, pool_hca_online, project_streams
from dsv4jax.layer.flush import append_swa, append_tail, flush_csa, flush_hca, reset_hca, rotate_csa
from dsv4jax.linear import hadamard
from dsv4jax.plan import CachePlan
from dsv4jax.weights.params import CompressorParams, IndexerParams

Normed = tuple[Streams, jax.Array]  # what new tokens contribute to entries, and the weight of the entries' norm


def store_tokens(
    compressor: CompressorParams | None,
    indexer: IndexerParams | None,
    x: jax.Array,
    kv: jax.Array | None,
    stack: LayerStack,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
    backend: str,
) -> LayerStack:
    """Write new tokens' window rows, complete the entries that they fill, and bring the tails up to date.

    Args:
      compressor, indexer: the layer's compressor and, for CSA, its indexer. None leaves tails and pool as they are.
      x: [B, T, hidden]; finite past num_new, for the projections of all T are computed.
      kv: window rows f32 [B, T, head_dim], normed and roped. None leaves the window as it is.
      index: layer's place in its stack.
      block_table: int32 [requests, max_blocks].
      slots, start, num_new: int32 [B]; request (-1 = no-op), tokens it holds, tokens it gets (above T: no-op).
      backend: from ``backend.choose``.
    """
    num_new = fitting(num_new, x.shape[1])
    entry, key = project_tokens(compressor, indexer, x, start, plan, kind)
    return store_streams(entry, key, kv, stack, index, block_table, slots, start, num_new, plan, kind, backend)


def project_tokens(
    compressor: CompressorParams | None,
    indexer: IndexerParams | None,
    x: jax.Array,
    start: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
) -> tuple[Normed | None, Normed | None]:
    """What new tokens x [B, T, hidden] from positions start [B] on contribute to entries, and to the indexer's."""
    if compressor is None:
        return None, None
    overlap, ratio = kind == AttentionType.CSA, plan.cfg.ratio(kind)
    entry = project_streams(compressor, x, start, ratio, plan.tail_dtype, overlap=overlap), compressor.norm
    if indexer is None:
        return entry, None
    params = indexer.compressor
    return entry, (project_streams(params, x, start, ratio, plan.tail_dtype, overlap=True), params.norm)


def store_streams(
    entry: Normed | None,
    key: Normed | None,
    kv: jax.Array | None,
    stack: LayerStack,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
    backend: str,
    *,
    keep_tails: bool = False,
) -> LayerStack:
    """As ``store_tokens``, from the projections on: what one kernel launch does.

    Args:
      entry, key: of the compressor and of the indexer's; num_new fits them.
      keep_tails: write the entries alone, and leave the tails as they are.
    """
    if entry is None and kv is None:
        return stack
    if backend != "xla":
        return kernels.update(
            stack, index, kv, entry, key, block_table, slots, start, num_new, plan, kind, backend, keep_tails=keep_tails
        )
    if entry is not None:
        stack = _compress(entry, key, stack, index, block_table, slots, start, num_new, plan, kind, keep_tails)
    if kv is not None:
        state = append_swa.__wrapped__(stack.state, index, kv, slots, start, num_new, plan=plan, backend="xla")
        stack = LayerStack(state=state, pool=stack.pool)
    return stack


def _compress(
    entry: Normed,
    key: Normed | None,
    stack: LayerStack,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
    keep_tails: bool,
) -> LayerStack:
    """Tails and pool, in XLA; with ``keep_tails`` the pool alone."""
    assert stack.pool is not None
    cfg, state, pool, ratio = plan.cfg, stack.state, stack.pool, plan.cfg.ratio(kind)
    phase, first = start % ratio, start // ratio
    completed = (phase + num_new) // ratio
    full = (num_new > 0) & ((phase + num_new) % ratio == 0)
    streams, norm = entry
    tail = read_slots(state.tail, index, slots)

    if key is not None:
        key_streams, key_norm = key
        key_tail = read_slots(state.indexer_tail, index, slots)
        entries = finish_entries(pool_csa(tail, streams, phase, num_new, ratio), norm, first, kind, cfg)
        keys = pool_csa(key_tail, key_streams, phase, num_new, ratio)
        keys = hadamard(finish_entries(keys, key_norm, first, kind, cfg))
        (entries, keys), state = lax.optimization_barrier(((entries, keys), state))  # tails are read, then written
        pool = flush_csa.__wrapped__(
            pool, index, entries, keys, block_table, slots, first, completed, plan=plan, backend="xla"
        )
        if keep_tails:
            return LayerStack(state=state, pool=pool)
        state = append_tail.__wrapped__(state, index, streams, key_streams, slots, start, num_new, plan=plan)
        return LayerStack(state=rotate_csa.__wrapped__(state, index, slots, full, backend="xla"), pool=pool)

    if isinstance(tail, HCATail):
        pooled = pool_hca(tail, streams, phase, num_new, ratio)
    else:
        pooled, _ = pool_hca_online(tail, streams, phase, num_new, ratio)
    entries = finish_entries(pooled, norm, first, kind, cfg)
    entries, state = lax.optimization_barrier((entries, state))
    pool = flush_hca.__wrapped__(pool, index, entries, block_table, slots, first, completed, plan=plan, backend="xla")
    if keep_tails:
        return LayerStack(state=state, pool=pool)
    state = append_tail.__wrapped__(state, index, streams, None, slots, start, num_new, plan=plan)
    if isinstance(tail, HCAOnlineTail):
        state = reset_hca.__wrapped__(state, index, slots, full, plan=plan, backend="xla")
    return LayerStack(state=state, pool=pool)
