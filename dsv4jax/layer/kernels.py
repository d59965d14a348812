"""The bridge to ``pallas_kernels``: this library's values in the kernels' terms."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dsv4jax.config import AttentionType
from dsv4jax.layer.compressor import Streams, num_touched_blocks
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles, rope_frequencies

if TYPE_CHECKING:
    import numpy as np

    from dsv4jax.cache.cache import LayerStack
    from dsv4jax.cache.pool import PagedPool, PooledLayer
    from dsv4jax.cache.state import SlidingWindow, StateCache
    from dsv4jax.formats import KeyRows, KVRows

SIMULATED = "pallas_simulated"
SCORED_TOGETHER = 8  # tokens of a request that a key is read for at a time: their queries fit in shared memory


def unsupported(plan: CachePlan, kind: AttentionType) -> str | None:
    """Why no kernel serves a plan's layers of a kind, or None where they do."""
    cfg = plan.cfg
    return pk.unsupported(
        kv_format=plan.kv_format,
        key_format=plan.indexer_format,
        nope_dim=cfg.head_dim - cfg.rope_dim,
        rope_dim=cfg.rope_dim,
        csa_ratio=cfg.csa_compression_ratio if kind == AttentionType.CSA else None,
        key_dim=cfg.indexer_head_dim if kind == AttentionType.CSA else None,
    )


def unsupported_rows(plan: CachePlan) -> str | None:
    """Why no kernel serves a plan's rows and keys, or None where they do."""
    return unsupported(plan, AttentionType.SWA)


def unsupported_scores(plan: CachePlan) -> str | None:
    """Why no kernel scores a plan's indexer keys, or None where one does."""
    cfg = plan.cfg
    return pk.unsupported_scores(
        key_format=plan.indexer_format,
        heads=cfg.indexer_heads,
        key_dim=cfg.indexer_head_dim,
        entries_per_block=plan.entries_per_block(AttentionType.CSA),
    )


def unsupported_top_k(plan: CachePlan) -> str | None:
    """Why no kernel picks as many entries as a plan's queries read out of so many, or None where one does."""
    return pk.unsupported_top_k(plan.cfg.indexer_top_k, plan.max_blocks * plan.entries_per_block(AttentionType.CSA))


def unsupported_attention(plan: CachePlan) -> str | None:
    """Why no kernel attends to a plan's rows, or None where one does."""
    cfg = plan.cfg
    return pk.unsupported_attention(
        kv_format=plan.kv_format,
        num_heads=cfg.num_heads,
        nope_dim=cfg.head_dim - cfg.rope_dim,
        rope_dim=cfg.rope_dim,
    )


def layer_number(index: jax.Array | int) -> jax.Array:
    """A layer's place in its stack as the kernels take it, int32 [1]."""
    return jnp.asarray(index, jnp.int32).reshape(1)


def update(
    stack: LayerStack,
    index: jax.Array | int,
    kv: jax.Array | None,
    entry: tuple[Streams, jax.Array] | None,
    key: tuple[Streams, jax.Array] | None,
    block_table: jax.Array | None,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    kind: AttentionType,
    backend: str,
    *,
    keep_tails: bool = False,
) -> LayerStack:
    """The cache update of one layer in one launch.

    Args:
      kv: window rows f32 [B, T, head_dim], normed and roped; None leaves the window as it is.
      entry, key: streams and norm weight of the compressor and of the indexer's; None leaves tails and pool.
      keep_tails: leave the tails as they are, entries are written.
    """
    cfg = plan.cfg
    rope = ratio = None
    if entry is not None:
        ratio = cfg.ratio(kind)
        touched = num_touched_blocks(entry[0].k.shape[1], ratio)
        number = (start // ratio)[:, None] + jnp.arange(touched, dtype=jnp.int32)[None]
        rope = packed_angles(ratio * number, rope_frequencies(cfg, kind))

    def streams(given: tuple[Streams, jax.Array] | None) -> pk.Streams | None:
        return given and pk.Streams(k=given[0].k, z=given[0].z, norm=given[1].astype(jnp.float32))

    tokens = pk.NewTokens(
        layer=layer_number(index),
        slots=slots,
        start=start,
        num_new=num_new,
        block_table=block_table,
        kv=kv,
        entry=streams(entry),
        key=streams(key),
        rope=rope,
    )
    num_tokens = (kv if entry is None else entry[0].k).shape[1]  # pyright: ignore[reportOptionalMemberAccess]
    launch: Any = functools.partial(pk.append_chunk, keep_tails=keep_tails)
    if num_tokens == 1 and not keep_tails:
        launch = pk.cache_step
    return launch(
        stack,
        tokens,
        kv_format=plan.kv_format,
        key_format=plan.indexer_format,
        ratio=ratio,
        eps=cfg.norm_eps,
        simulate=backend == SIMULATED,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StateAlone:
    """A stack that has no pool, for pieces that need none."""

    state: StateCache
    pool: None = None


def append_swa(
    state: StateCache,
    index: jax.Array | int,
    kv: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    num_new: jax.Array,
    plan: CachePlan,
    backend: str,
) -> StateCache:
    """``flush.append_swa``."""
    stack = _StateAlone(state=dataclasses.replace(state, tail=None, indexer_tail=None))
    simulate = backend == SIMULATED
    stack = pk.append_swa(
        stack, layer_number(index), kv, slots, start, num_new, kv_format=plan.kv_format, simulate=simulate
    )
    return dataclasses.replace(state, window=stack.state.window, pos=stack.state.pos)


def flush_entries(
    pool: PagedPool,
    index: jax.Array | int,
    entries: jax.Array,
    keys: jax.Array | None,
    block_table: jax.Array,
    slots: jax.Array,
    first: jax.Array,
    count: jax.Array,
    plan: CachePlan,
    backend: str,
) -> PagedPool:
    """``flush.flush_hca``, and with keys ``flush.flush_csa``."""
    return pk.flush_entries(
        pool,
        layer_number(index),
        entries,
        keys,
        block_table,
        slots,
        first,
        count,
        kv_format=plan.kv_format,
        key_format=plan.indexer_format,
        simulate=backend == SIMULATED,
    )


def rotate_csa(
    state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array, backend: str
) -> StateCache:
    """``flush.rotate_csa``."""
    complete, simulate = complete.astype(jnp.int32), backend == SIMULATED
    tails = pk.rotate_csa([state.tail, state.indexer_tail], layer_number(index), slots, complete, simulate=simulate)
    return dataclasses.replace(state, tail=tails[0], indexer_tail=tails[1])


def reset_hca(
    state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array, backend: str
) -> StateCache:
    """``flush.reset_hca``."""
    complete, simulate = complete.astype(jnp.int32), backend == SIMULATED
    tail = pk.reset_hca(state.tail, layer_number(index), slots, complete, simulate=simulate)
    return dataclasses.replace(state, tail=tail)


def gather_rows(
    rows: KVRows,
    index: jax.Array | int,
    block: jax.Array,
    row: jax.Array,
    plan: CachePlan,
    dtype: Any,
    backend: str,
) -> jax.Array:
    """Rows at int32 [...] blocks (-1 = none) and rows, as dtype [..., head_dim]."""
    flat = pk.gather_rows(
        rows,
        layer_number(index),
        block.reshape(-1),
        row.reshape(-1),
        kv_format=plan.kv_format,
        dtype=dtype,
        simulate=backend == SIMULATED,
    )
    return flat.reshape(*block.shape, flat.shape[-1])


def gather_request_rows(
    rows: KVRows,
    index: jax.Array | int,
    block_table: jax.Array,
    slots: jax.Array,
    num_entries: jax.Array,
    plan: CachePlan,
    dtype: Any,
    backend: str,
) -> jax.Array:
    """All entries of requests, as dtype [B, max_blocks * entries_per_block, head_dim]."""
    return pk.gather_request_rows(
        rows,
        layer_number(index),
        block_table,
        slots,
        num_entries,
        kv_format=plan.kv_format,
        dtype=dtype,
        simulate=backend == SIMULATED,
    )


def attention_queries(
    product: jax.Array, positions: jax.Array, freqs: np.ndarray, eps: float, backend: str
) -> jax.Array:
    """Products f32 [B, T, H, head_dim] normed, roped and rounded: f16."""
    angles = packed_angles(positions, freqs)
    return pk.attention_queries(product, angles, eps=eps, simulate=backend == SIMULATED)


def indexer_queries(
    product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan, backend: str
) -> KeyRows:
    """Products f32 [B, T, H, key_dim] roped, rotated and encoded as the keys are: [B, T, H, ...]."""
    return pk.indexer_queries(
        product,
        packed_angles(positions, freqs),
        plan.keys.row(product.shape[-1]),
        key_format=plan.indexer_format,
        simulate=backend == SIMULATED,
    )


def indexer_scores(
    queries: KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array, backend: str
) -> jax.Array:
    """Scores f32 [B, T, max_entries] of queries encoded as the keys are; anything at and past ``visible``.

    A long chunk goes in as more rows of fewer tokens.
    """
    (batch, tokens), together = visible.shape, min(visible.shape[1], SCORED_TOGETHER)
    groups = -(-tokens // together)

    def grouped(x: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, groups * together - tokens)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding).reshape(batch * groups, together, *x.shape[2:])

    scores = pk.indexer_scores(
        jax.tree.map(grouped, queries),
        grouped(weights),
        layer.pool.indexer_keys,
        layer_number(layer.index),
        layer.block_table,
        jnp.repeat(layer.slots, groups),
        grouped(visible),
        key_format=layer.plan.indexer_format,
        simulate=backend == SIMULATED,
    )
    return scores.reshape(batch, groups * together, layer.max_entries)[:, :tokens]


def top_k(scores: jax.Array, visible: jax.Array, k: int, backend: str) -> jax.Array:
    """``indexer.pick``. What stands past ``visible`` [B, T] in scores [B, T, N] is not read."""
    k = min(k, scores.shape[-1])
    picks = pk.top_k(scores.reshape(-1, scores.shape[-1]), visible.reshape(-1), k=k, simulate=backend == SIMULATED)
    return picks.reshape(*visible.shape, k)


def decode_attention(
    q: jax.Array,
    positions: jax.Array,
    sinks: jax.Array,
    window: SlidingWindow,
    entries: PooledLayer | None,
    picks: jax.Array | None,
    visible: jax.Array | None,
    freqs: np.ndarray,
    dtype: Any,
    backend: str,
) -> jax.Array:
    """``attention.decode_attention``. visible: int32 [B, T], None without entries."""
    plan, state = window.plan, window.state
    return pk.decode_attention(
        q.astype(jnp.float16),  # no-op where it is so already
        state.window,
        state.pos,
        window.fresh,
        None if entries is None else entries.pool.entries,
        picks,
        None if entries is None else entries.block_table,
        window.slots,
        window.start,
        positions,
        visible,
        sinks.astype(jnp.float32),
        packed_angles(positions, freqs),
        layer_number(window.index),
        kv_format=plan.kv_format,
        dtype=dtype,
        simulate=backend == SIMULATED,
    )
