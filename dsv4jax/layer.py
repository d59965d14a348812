"""The attention layer over the cache: one path for prefill, decode and mixed batches.

    x -> key row -> window                        (append)
    x -> streams -> tails -> entries -> pool      (compress, flush, rotate)
    x -> queries -> window + entries -> y         (attend)

The entry that token p completes is visible to query p, and every query reads rows as stored (rounded), those of its own
chunk too. Queries run in tiles from W_qb to W_oa, so that a long chunk's heads and scores never all exist.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax import attention, indexer, kernels
from dsv4jax import backend as backend_lib
from dsv4jax.allocator import granted_tokens, withdraw_grant
from dsv4jax.cache import KVCache
from dsv4jax.cache_update import store_tokens
from dsv4jax.checks import FLOATS, check_array, check_batch, fitting
from dsv4jax.config import AttentionType, DSV4Config
from dsv4jax.linear import linear, product_dtype, rms_norm
from dsv4jax.paged_pool import PooledLayer
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.state_cache import gather_swa
from dsv4jax.weights import AttentionParams, check_params

QUERY_TILE_BYTES = 96 << 20  # temporaries of one tile of queries; sets how many tokens a tile holds


def attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Run one attention layer on new tokens and store what the cache keeps of them.

    Call it once per layer between ``prepare_forward`` and ``advance``. T = 1 is decode, T > 1 a prefill chunk; rows of
    one batch may do either.

    Args:
      params: the layer's weights, f32 or bf16.
      x: f32 or bf16 [B, T, hidden], already input-normed; what is past a row's num_new is ignored, NaN included.
      cache: the cache. Not donated here: the caller's jit decides.
      layer: static number of the layer in the model.
      slots: int32 [B], distinct; -1 = padding row.
      num_new: int32 [B], tokens of each row that are real, at most T. A row that ``prepare_forward`` did not grant so
        many is left alone: its output is 0 and its request unchanged. So is one that names more than T, and its grant
        is withdrawn: ``advance`` will not count what was not stored.
      backend: None for the fastest available, or a name from ``backends()``.

    Returns:
      (y in x's dtype [B, T, hidden], 0 past num_new; the updated cache, its lengths not yet advanced). Not
      differentiable in reverse mode: loops over a context end at its length, which is data.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer or backend, weights of another kind of layer.
    """
    kind, index = cache.locate(layer)
    return attention_layer_at(params, x, cache, kind, index, slots, num_new, backend)


def attention_layer_at(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    kind: AttentionType | str,
    index: jax.Array | int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """As ``attention_layer``, for the ``index``-th layer of a static kind; a traced index serves scans over layers."""
    kind = AttentionType(kind)
    cfg = cache.plan.cfg
    check_batch(slots=slots, num_new=num_new)
    check_array("x", x, {"B": slots.shape[0], "T": None, "hidden_size": cfg.hidden_size}, FLOATS)
    check_params(params, cfg, kind)
    cache.stack(kind)  # the model has such layers
    depth = len(cache.plan.layers(kind))
    if isinstance(index, int) and not 0 <= index < depth:
        raise ValueError(f"index must be in [0, {depth}) for {kind.upper()} layers, got {index}")
    backend_lib.check_name(backend)
    if x.size == 0:
        return jnp.zeros_like(x), cache
    chosen = backend_lib.choose("cache_update", backend, kernels.unsupported(cache.plan, kind))
    index = jnp.asarray(index, jnp.int32)
    return _attention_layer(params, x, cache, index, slots, num_new, kind=kind, backend=chosen)


# Jitted so that the layers of a kind are traced once; it donates nothing.
@functools.partial(jax.jit, static_argnames=("kind", "backend"))
def _attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    index: jax.Array,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    kind: AttentionType,
    backend: str,
) -> tuple[jax.Array, KVCache]:
    plan, cfg, tables = cache.plan, cache.plan.cfg, cache.tables
    batch, given_tokens, _ = x.shape
    tile = min(given_tokens, query_tile(plan, kind, batch))
    x = jnp.pad(x, ((0, 0), (0, -given_tokens % tile), (0, 0)))
    num_tokens = x.shape[1]
    freqs = rope_frequencies(cfg, kind)

    start, granted = granted_tokens(tables, slots, num_new)
    count = fitting(granted, given_tokens)
    # Nothing is stored of a row that names more tokens than x has. Its grant is withdrawn, so that neither another
    # layer nor advance counts what was never stored.
    tables = withdraw_grant(tables, slots, granted > given_tokens)
    slots = jnp.where(count > 0, slots, -1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    positions = start[:, None] + token
    real = token < count[:, None]
    x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))

    stack = cache.stack(kind)
    kv = apply_rope(rms_norm(linear(x, params.kv), params.kv_norm, cfg.norm_eps), positions, freqs)
    before = None
    if given_tokens > 1:
        # A chunk's early queries see rows that its late tokens overwrite: the old window is read before it is written.
        before = gather_swa(stack.state, index, slots, start, plan=plan)
        before, stack = lax.optimization_barrier((before, stack))
    stack = store_tokens(
        params.compressor,
        params.indexer,
        x,
        kv,
        stack,
        index,
        tables.block_table,
        slots,
        start,
        count,
        plan,
        kind,
        backend,
    )
    if before is None:
        window, window_pos = gather_swa(stack.state, index, slots, start + count, plan=plan)
        window_valid = window_pos >= 0
    else:
        new = jnp.where(real[..., None], plan.rows.decode(plan.rows.encode(kv, cfg.rope_dim)), 0.0)
        window = jnp.concatenate([before[0][:, 1:], new], axis=1)
        window_valid = jnp.concatenate([before[1][:, 1:] >= 0, real], axis=1)

    entries = None
    if stack.pool is not None:
        entries = PooledLayer(pool=stack.pool, index=index, block_table=tables.block_table, slots=slots, plan=plan)
    q_latent = rms_norm(linear(x, params.q_a), params.q_norm, cfg.norm_eps).astype(x.dtype)
    tokens = {"q_latent": q_latent, "positions": positions, "real": real}
    if params.indexer is not None:
        tokens["head_weights"] = indexer.head_weights(params.indexer, x, plan)

    def attend_tile(first: jax.Array | int) -> jax.Array:
        span = tile + cfg.sliding_window - 1
        queries = {name: lax.dynamic_slice_in_dim(leaf, first, tile, axis=1) for name, leaf in tokens.items()}
        keys = lax.dynamic_slice_in_dim(window, first, span, axis=1)
        valid = lax.dynamic_slice_in_dim(window_valid, first, span, axis=1)
        return _attend_tile(params, queries, keys, valid, entries, plan, kind)

    if num_tokens == tile:
        grouped = attend_tile(0)
    else:
        tiles = lax.map(attend_tile, jnp.arange(0, num_tokens, tile, dtype=jnp.int32))
        grouped = jnp.moveaxis(tiles, 0, 1).reshape(batch, num_tokens, -1)
    y = linear(grouped.astype(x.dtype), params.o_b)
    y = jnp.where(real[..., None], y, 0.0).astype(x.dtype)[:, :given_tokens]
    # The next write into these buffers waits for this layer's reads: without this, XLA may order a later layer's write
    # first and keep a copy of the pool for the read.
    y, stack = lax.optimization_barrier((y, stack))
    return y, dataclasses.replace(cache.with_stack(kind, stack), tables=tables)


def _attend_tile(
    params: AttentionParams,
    tile: dict[str, jax.Array],
    window: jax.Array,
    window_valid: jax.Array,
    entries: PooledLayer | None,
    plan: CachePlan,
    kind: AttentionType,
) -> jax.Array:
    """One tile of queries, from W_qb to W_oa: f32 [B, tokens, o_groups * o_lora_rank]."""
    cfg, freqs = plan.cfg, rope_frequencies(plan.cfg, kind)
    q_latent, positions = tile["q_latent"], tile["positions"]
    batch, tokens = positions.shape
    q = linear(q_latent, params.q_b).reshape(batch, tokens, cfg.num_heads, cfg.head_dim)
    q = apply_rope(rms_norm(q, None, cfg.norm_eps), positions[..., None], freqs)

    running = attention.start_at_sinks(params.sinks, q)
    running = attention.attend_window(running, q, window, window_valid)
    if entries is not None:
        # A padding query sees nothing: the entries it would see may not be written yet, and garbage times 0 is NaN.
        visible = jnp.where(tile["real"], (positions + 1) // cfg.ratio(kind), 0)
        if params.indexer is not None:
            key_queries = indexer.indexer_queries(params.indexer, q_latent, positions, freqs, plan)
            picks = indexer.select_entries(key_queries, tile["head_weights"], entries, visible)
            running = attention.attend_picked(running, q, entries, picks)
        else:
            running = attention.attend_all(running, q, entries, visible)
    out = apply_rope(running.output, positions[..., None], freqs, inverse=True)
    return _project_groups(out.astype(q_latent.dtype), params.o_a, cfg)


def _project_groups(out: jax.Array, o_a: jax.Array, cfg: DSV4Config) -> jax.Array:
    """W_oa: each group of heads of out [B, T, H, head_dim] by its own rows. f32 [B, T, o_groups * o_lora_rank]."""
    batch, tokens, _, _ = out.shape
    groups = out.reshape(batch, tokens, cfg.o_groups, -1)
    weight = o_a.reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    dtype = product_dtype(groups, weight)
    projected = jnp.einsum(
        "btgi,goi->btgo",
        groups.astype(dtype),
        weight.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return projected.reshape(batch, tokens, -1)


def query_tile(plan: CachePlan, kind: AttentionType, batch: int) -> int:
    """Tokens per query tile: as many as keep its temporaries near ``QUERY_TILE_BYTES``, a power of two."""
    cfg = plan.cfg
    per_token = 3 * cfg.num_heads * cfg.head_dim  # queries, running sum, output
    if kind == AttentionType.CSA:
        entries = plan.max_blocks * plan.entries_per_block(kind)
        picks = min(cfg.indexer_top_k, entries)
        per_token += picks * (cfg.head_dim + cfg.num_heads) + 2 * entries + cfg.indexer_heads * cfg.indexer_head_dim
    tokens = QUERY_TILE_BYTES // (4 * per_token * batch)
    return 1 << max(0, tokens.bit_length() - 1)
