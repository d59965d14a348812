"""The attention layer over the cache: one path for prefill, decode and mixed batches.

    x -> key row -> window                        (append)
    x -> streams -> tails -> entries -> pool      (compress, flush, rotate)
    x -> queries -> window + entries -> y         (attend)

The entry that token p completes is visible to query p, and every query reads rows as stored (rounded), those of its own
chunk too. A decode step's row is in the window before its query reads it; a chunk's rows are read beside the window and
appended last, because they overwrite what its early queries see. Queries run in tiles from W_qb to W_oa, so that a long
chunk's heads and scores never all exist. A draft (``speculate``) is a chunk that writes its entries alone.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.pool import PooledLayer
from dsv4jax.cache.sharding import plan_of_heads
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.cache.tables import granted_tokens, withdraw_grants
from dsv4jax.checks import FLOATS, check_array, check_batch
from dsv4jax.config import AttentionType, DSV4Config
from dsv4jax.layer import attention, indexer, kernels
from dsv4jax.layer import backend as backend_lib
from dsv4jax.layer.backend import Backend, OpBackends
from dsv4jax.layer.flush import append_swa
from dsv4jax.layer.update import project_tokens, store_streams
from dsv4jax.linear import linear, product_dtype, rms_norm
from dsv4jax.plan import CachePlan
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.params import AttentionParams, check_params

# Temporaries of one tile of queries, which set how many tokens a tile holds. Where kernels attend, a draft of a few
# tokens for many requests should be one tile: each reads the weights of the heads again.
QUERY_TILE_BYTES = {"xla": 96 << 20, "pallas": 256 << 20, "pallas_simulated": 256 << 20}


def attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
    model_axis: str | None = None,
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
      backend: None for the fastest available, a name from ``backends()``, or ``OpBackends``.
      model_axis: inside ``jax.shard_map``, the mesh axis over which heads are split: params are those of one shard
        (``params_specs``), and y is summed over all.

    Returns:
      (y in x's dtype [B, T, hidden], 0 past num_new; the updated cache, its lengths not yet advanced). Not
      differentiable in reverse mode: loops over a context end at its length, which is data.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer or backend, weights of another kind of layer, heads that do not divide.
    """
    kind, index = cache.locate(layer)
    return attention_layer_at(params, x, cache, kind, index, slots, num_new, backend, model_axis)


def attention_layer_at(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    kind: AttentionType | str,
    index: jax.Array | int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
    model_axis: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """As ``attention_layer``, for the ``index``-th layer of a static kind; a traced index serves scans over layers.

    An index out of range is a ValueError where it is known. Under a traced one every row is left alone, as a row is
    that names more tokens than x has: y is 0, nothing is stored here, and grants are withdrawn, so that ``advance``
    counts nothing. What other layers have stored of the pass is not undone: release its requests.
    """
    kind = AttentionType(kind)
    y, cache, _ = run_layer(params, x, cache, kind, index, slots, num_new, backend, model_axis, staged=False)
    return y, cache


def run_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    kind: AttentionType,
    index: jax.Array | int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend,
    model_axis: str | None = None,
    *,
    staged: bool,
) -> tuple[jax.Array, KVCache, dict[str, Any]]:
    """Check the arguments of a layer and run it.

    With ``staged`` the cache comes back with the same windows and tails, new entries behind each request's own, and
    what a commit needs beside it: the fields of ``speculate.StagedLayer`` but for the layer's number.
    """
    plan = plan_of_heads(cache.plan, model_axis)
    cfg = plan.cfg
    check_batch(slots=slots, num_new=num_new)
    check_array("x", x, {"B": slots.shape[0], "T": None, "hidden_size": cfg.hidden_size}, FLOATS)
    check_params(params, cfg, kind)
    cache.stack(kind)  # the model has such layers
    depth = len(cache.plan.layers(kind))
    if isinstance(index, Tracer):
        nearest = jnp.clip(index, 0, depth - 1)
        num_new = jnp.where(index == nearest, num_new, x.shape[1] + 1)
        index = nearest
    elif not 0 <= operator.index(index) < depth:
        raise ValueError(f"index must be in [0, {depth}) for {kind.upper()} layers, got {index}")
    backend_lib.check_name(backend)
    if x.size == 0:
        if staged:
            raise ValueError(f"a draft must have rows and tokens, got x of shape {x.shape}")
        tables = withdraw_grants(cache.tables, slots, num_new > x.shape[1])
        return jnp.zeros_like(x), dataclasses.replace(cache, tables=tables), {}
    reasons = {
        "cache_update": kernels.unsupported(plan, kind),
        "decode_attention": kernels.unsupported_attention(plan),
    }
    if kind == AttentionType.CSA:
        reasons["indexer_scores"] = kernels.unsupported_scores(plan)
        reasons["top_k"] = kernels.unsupported_top_k(plan)
    backends = backend_lib.choose_all(backend, reasons)
    index = jnp.asarray(index, jnp.int32)
    options: Any = dict(kind=kind, backends=backends, model_axis=model_axis, staged=staged)
    return _attention_layer(params, x, cache, index, slots, num_new, **options)


# Jitted so that the layers of a kind are traced once; it donates nothing.
@functools.partial(jax.jit, static_argnames=("kind", "backends", "model_axis", "staged"))
def _attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    index: jax.Array,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    kind: AttentionType,
    backends: OpBackends,
    model_axis: str | None,
    staged: bool,
) -> tuple[jax.Array, KVCache, dict[str, Any]]:
    plan = plan_of_heads(cache.plan, model_axis)
    cfg = plan.cfg
    batch, given_tokens, _ = x.shape
    tile = min(given_tokens, query_tile(plan, kind, batch, backends))
    x = jnp.pad(x, ((0, 0), (0, -given_tokens % tile), (0, 0)))
    num_tokens = x.shape[1]

    # Nothing is stored of a row that names more tokens than x has. Its grant is withdrawn, so that neither another
    # layer nor advance counts what was never stored.
    tables = withdraw_grants(cache.tables, slots, num_new > given_tokens)
    cache = dataclasses.replace(cache, tables=tables)
    start, count = granted_tokens(tables, slots, num_new)
    slots = jnp.where(count > 0, slots, -1)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    real = token < count[:, None]
    positions = jnp.where(real, start[:, None] + token, -1)
    x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))

    kv = rms_norm(linear(x, params.kv), params.kv_norm, cfg.norm_eps)
    kv = apply_rope(kv, positions, rope_frequencies(cfg, kind))
    fresh = plan.rows.encode(kv, cfg.rope_dim) if staged or given_tokens > 1 else None
    update = backends.cache_update
    assert update is not None
    entry, key = project_tokens(params.compressor, params.indexer, x, start, plan, kind)
    stack = store_streams(
        entry,
        key,
        kv if fresh is None else None,
        cache.stack(kind),
        index,
        tables.block_table,
        slots,
        start,
        count,
        plan,
        kind,
        update,
        keep_tails=staged,
    )
    window = SlidingWindow(state=stack.state, index=index, slots=slots, start=start, fresh=fresh, plan=plan)
    entries = None
    if stack.pool is not None:
        entries = PooledLayer(pool=stack.pool, index=index, block_table=tables.block_table, slots=slots, plan=plan)
    q_latent = rms_norm(linear(x, params.q_a), params.q_norm, cfg.norm_eps).astype(x.dtype)
    tokens = {"q_latent": q_latent, "positions": positions}
    if params.indexer is not None:
        tokens["head_weights"] = indexer.head_weights(params.indexer, x, plan)

    def attend_tile(first: jax.Array | int) -> jax.Array:
        queries = {name: lax.dynamic_slice_in_dim(leaf, first, tile, axis=1) for name, leaf in tokens.items()}
        return _attend_tile(params, queries, window, entries, kind, backends)

    if num_tokens == tile:
        grouped = attend_tile(0)
    else:
        tiles = lax.map(attend_tile, jnp.arange(0, num_tokens, tile, dtype=jnp.int32))
        grouped = jnp.moveaxis(tiles, 0, 1).reshape(batch, num_tokens, -1)
    y = linear(grouped.astype(x.dtype), params.o_b)
    if model_axis is not None:
        y = lax.psum(y, model_axis)
    y = jnp.where(real[..., None], y, 0.0).astype(x.dtype)[:, :given_tokens]
    # The next write into these buffers waits for this layer's reads: without this, XLA may order the write first and
    # keep a copy of the pool, or of the window, for the read.
    y, stack = lax.optimization_barrier((y, stack))
    if staged:
        rows = jax.tree.map(lambda leaf: leaf[:, :given_tokens] if leaf.ndim == 3 else leaf, (kv, entry, key))
        batch_rows = dict(slots=slots, start=start, num_new=count)
        return y, cache.with_stack(kind, stack), dict(zip(("kv", "entry", "key"), rows, strict=True)) | batch_rows
    if fresh is not None:
        state = append_swa.__wrapped__(stack.state, index, kv, slots, start, count, plan=plan, backend=update)
        stack = dataclasses.replace(stack, state=state)
    return y, cache.with_stack(kind, stack), {}


def _attend_tile(
    params: AttentionParams,
    tile: dict[str, jax.Array],
    window: SlidingWindow,
    entries: PooledLayer | None,
    kind: AttentionType,
    backends: OpBackends,
) -> jax.Array:
    """One tile of queries, from W_qb to W_oa: [B, tokens, o_groups * o_lora_rank], bf16 or f32."""
    plan, cfg = window.plan, window.plan.cfg
    q_latent, positions, freqs = tile["q_latent"], tile["positions"], rope_frequencies(cfg, kind)
    attends, scores = backends.decode_attention, backends.indexer_scores
    assert attends is not None
    q = linear(q_latent, params.q_b).reshape(*positions.shape, cfg.num_heads, cfg.head_dim)
    q = attention.attention_queries(q, positions, freqs, plan, attends)
    picks = None
    if entries is not None and params.indexer is not None:
        assert scores is not None
        key_queries = indexer.indexer_queries(params.indexer, q_latent, positions, freqs, plan, scores)
        visible = (positions + 1) // cfg.ratio(kind)
        picks = indexer.select_entries(key_queries, tile["head_weights"], entries, visible, backend=backends)
    out = attention.decode_attention(
        q, positions, params.sinks, window, entries, picks, kind=kind, dtype=q_latent.dtype, backend=backends
    )
    return _project_groups(out, params.o_a, cfg)


def _project_groups(out: jax.Array, o_a: jax.Array, cfg: DSV4Config) -> jax.Array:
    """W_oa: each group of heads of out [B, T, H, head_dim] by its own rows. [B, T, o_groups * o_lora_rank].

    Summed in f32, and rounded to bf16 where W_ob takes it so: one pass over it less than as f32.
    """
    batch, tokens, _, _ = out.shape
    groups = out.reshape(batch, tokens, cfg.o_groups, -1)
    weight = o_a.reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    dtype = product_dtype(groups, weight)
    projected = jnp.einsum(
        "btgi,goi->btgo",
        groups.astype(dtype),
        weight.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
    return projected.reshape(batch, tokens, -1)


def query_tile(plan: CachePlan, kind: AttentionType, batch: int, backends: OpBackends) -> int:
    """Tokens per query tile: as many as keep its temporaries near ``QUERY_TILE_BYTES``, a power of two."""
    cfg = plan.cfg
    attends = backends.decode_attention
    assert attends is not None
    gathers = attends == "xla"  # each query's picks as rows
    per_token = 3 * cfg.num_heads * cfg.head_dim  # queries, running sum, output
    if kind == AttentionType.CSA:
        entries = plan.max_blocks * plan.entries_per_block(kind)
        picks = min(cfg.indexer_top_k, entries)
        per_token += 2 * entries + cfg.indexer_heads * cfg.indexer_head_dim
        per_token += picks * (cfg.head_dim + cfg.num_heads if gathers else 1)
    tokens = QUERY_TILE_BYTES[attends] // (4 * per_token * batch)
    return 1 << max(0, tokens.bit_length() - 1)
