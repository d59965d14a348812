"""The attention layer over the cache, with one code path for prefill, decode and mixed batches.

    x -> key row -> window                        (append)
    x -> streams -> tails -> entries -> pool      (compress, flush, rotate)
    x -> queries -> window + entries -> y         (attend)

The entry that token p completes is visible to query p. Every query reads rows as they are stored, that is rounded,
including rows of its own chunk. In a decode step the new row is written to the window before its query reads it. The
rows of a longer chunk are instead passed next to the window and appended last, because they overwrite rows that the
chunk's early queries see.

From W_qb to W_oa queries are processed in tiles, so that the heads and scores of a long chunk never exist all at once.
A draft (see ``speculate``) is a chunk whose entries are written but not its window rows and tails.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.pool import ExactEntries, PooledLayer
from dsv4jax.cache.state import SlidingWindow
from dsv4jax.checks import FLOATS, check_array, check_batch, integer, known_size
from dsv4jax.derivatives import refuse_derivative, storable
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer import attention, indexer
from dsv4jax.layer.backend import XLA, Anywhere, Backend, OpBackends, backends, check_name
from dsv4jax.layer.call import LayerCall, TokenRows
from dsv4jax.layer.ops import (
    CACHE_UPDATE,
    DECODE_ATTENTION,
    INDEXER_SCORES,
    PROJECTIONS,
    TOP_K,
    InputProducts,
    Projections,
    RowForm,
    choose_backends,
)
from dsv4jax.layer.tiles import map_tokens
from dsv4jax.layer.update import exact_entries, store
from dsv4jax.linear import product_dtype
from dsv4jax.plan import CachePlan, plan_of_heads
from dsv4jax.rope import rope_frequencies
from dsv4jax.weights.params import AttentionParams, check_params
from dsv4jax.weights.stored import StoredWeight, is_stored


def attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
    model_axis: str | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Run one attention layer on new tokens and store what the cache keeps of them.

    Call it once per layer between ``prepare_forward`` and ``advance``. T = 1 is decode, T > 1 a prefill chunk; rows of
    one batch may do either.

    Args:
      params: the layer's weights, f32 or bf16, or FP8 as checkpoints store them.
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
      residual: rows like x to which y is added. The result is that of ``residual + y``, but where weights are stored as
        FP8 the kernel that makes y adds it: in chunks in place, if the residual is not used again.

    Returns:
      (y in x's dtype [B, T, hidden], 0 past num_new, plus the residual; the updated cache, its lengths not yet
      advanced).

    Derivatives, forward and reverse, are those of ``backend="xla"``; kernels refuse. They go straight through the
    rounding of the rows, entries and tails that this call brings (the straight-through estimator): y has the derivative
    that it would have if the rounded rows were the exact ones. Picks have none, so that y's derivative by the indexer's
    weights is 0. Rows of floats (``kv_format`` "f32" and "bf16") carry derivatives from one call to the next through
    the cache. Those of bytes do not: what earlier calls stored is then a constant, so give a sequence in one call.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer or backend, weights of another kind of layer, heads that do not divide, or a derivative
        of a kernel.
    """
    kind, index = cache.locate(layer)
    return attention_layer_at(params, x, cache, kind, index, slots, num_new, backend, model_axis, residual)


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
    residual: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Run the ``index``-th layer of a static kind, as ``attention_layer`` does. A scan over layers can trace the index.

    If the index is known at trace time, an index out of range raises ValueError. If it is traced, an index out of range
    skips every row, as if it named more tokens than x has: y is 0, nothing is stored in this layer, and grants are
    withdrawn, so that ``advance`` counts nothing. What other layers have already stored in this pass is not undone;
    release the requests of the pass.

    Args:
      kind: static kind of the layer.
      index: the layer's index in its kind's stack, an int or int32 [].
      params, x, cache, slots, num_new, backend, model_axis, residual: as for ``attention_layer``.

    Returns:
      As ``attention_layer``.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: as for ``attention_layer``, or the index is out of range or the model has no layer of this kind.
    """
    options = RunOptions(backend=backend, model_axis=model_axis)
    y, cache, _ = run_layer(params, x, cache, AttentionType(kind), index, slots, num_new, options, residual)
    return y, cache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a layer's run."""

    backend: Backend = None
    model_axis: str | None = None  # the mesh axis over which heads are split
    is_draft: bool = False  # do not change windows and tails, and return what ``commit`` needs


Draft = tuple[Batch, TokenRows]  # the batch of a draft, and what its tokens contribute


def run_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    kind: AttentionType,
    index: jax.Array | int,
    slots: jax.Array,
    num_new: jax.Array,
    options: RunOptions,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, KVCache, Draft | None]:
    """Check the arguments of a layer and run it.

    For a draft, the returned cache has the same windows and tails, and new entries past the end of each request's own.
    """
    plan = plan_of_heads(cache.plan, options.model_axis)
    cfg = plan.cfg
    check_batch(slots=slots, num_new=num_new)
    check_array("x", x, {"B": slots.shape[0], "T": None, "hidden_size": cfg.hidden_size}, FLOATS)
    if residual is not None:
        check_array("residual", residual, dict(zip(("B", "T", "hidden_size"), x.shape, strict=True)), x.dtype)
    check_params(params, cfg, kind)
    cache.stack(kind)  # raises if the model has no such layers
    depth = len(cache.plan.layers(kind))
    if isinstance(index, Tracer):
        nearest = jnp.clip(index, 0, depth - 1)
        num_new = jnp.where(index == nearest, num_new, x.shape[1] + 1)
        index = nearest
    elif not 0 <= integer("index", index) < depth:
        raise ValueError(f"index must be in [0, {depth}) for {kind.upper()} layers, got {index}")
    check_name(options.backend)
    if not isinstance(x.shape[1], int):
        raise ValueError(f"x: T must be a number, got {x.shape}: export a function for each T; B may be symbolic")
    if not isinstance(x.shape[0], int):
        options = dataclasses.replace(options, backend=_for_any_batch(options.backend, plan, kind))
    if x.size == 0:
        if options.is_draft:
            raise ValueError(f"a draft must have rows and tokens, got x of shape {x.shape}")
        cache, slots, num_new = jax.tree.map(jnp.asarray, (cache, slots, num_new))  # nothing is jitted here
        cache, _ = LayerCall.begin(cache, kind, index, slots, num_new, x.shape[1])
        return jnp.zeros_like(x) if residual is None else jnp.asarray(residual), cache, None
    params = _without_derivative(params)
    chosen = dataclasses.replace(options, backend=choose_backends(options.backend, plan, kind))
    index = jnp.asarray(index, jnp.int32)
    return _run_layer(params, x, residual, cache, index, slots, num_new, kind=kind, options=chosen)


def _without_derivative(params: AttentionParams) -> AttentionParams:
    """The weights as they are; differentiating by one that is stored as FP8 is a ValueError that names it."""

    def refuse(path: Any, weight: Any) -> Any:
        if not isinstance(weight, StoredWeight):
            return weight
        name = f"params{jax.tree_util.keystr(path)}"
        message = f"{name} is stored as FP8 and has no derivative: differentiate by x, or load weights='wide'"
        return refuse_derivative(message, weight)

    return jax.tree_util.tree_map_with_path(refuse, params, is_leaf=is_stored)


def _for_any_batch(backend: Backend, plan: CachePlan, kind: AttentionType) -> OpBackends:
    """The backends of a batch of symbolic size: XLA where none is named, as a kernel needs a size."""
    if isinstance(backend, OpBackends):
        backend = OpBackends(**{op: getattr(backend, op) or XLA for op in backends()})
    chosen = choose_backends(backend or XLA, plan, kind)
    for op in (PROJECTIONS, CACHE_UPDATE, DECODE_ATTENTION, INDEXER_SCORES, TOP_K):
        name = getattr(chosen, op.name)
        if name is not None and not isinstance(op[name], Anywhere):
            raise ValueError(f"x: a batch of symbolic size needs backend='xla', {op.name} would run {name!r}")
    return chosen


# Jitted so that all layers of a kind are traced once. It donates nothing.
@functools.partial(jax.jit, static_argnames=("kind", "options"))
def _run_layer(
    params: AttentionParams,
    x: jax.Array,
    residual: jax.Array | None,
    cache: KVCache,
    index: jax.Array,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    kind: AttentionType,
    options: RunOptions,
) -> tuple[jax.Array, KVCache, Draft | None]:
    """Run a layer whose arguments are checked. ``options.backend`` names a backend for every op that the kind uses."""
    plan, backends = plan_of_heads(cache.plan, options.model_axis), _named(options.backend)
    batch, given_tokens, _ = x.shape
    projections = PROJECTIONS[_of(backends.projections)]
    # Products of many rounded rows make queries of their sums themselves.
    keeps_sums = projections.row_form(params.q_b, batch * given_tokens) != "rounded"
    tile = min(given_tokens, query_tile(plan, kind, batch, backends, keeps_sums=keeps_sums))
    x = jnp.pad(x, ((0, 0), (0, -given_tokens % tile), (0, 0)))
    num_tokens = x.shape[1]

    cache, call = LayerCall.begin(cache, kind, index, slots, num_new, given_tokens)
    call = dataclasses.replace(call, plan=plan)
    positions = call.positions(num_tokens)
    real = positions >= 0
    if isinstance(projections, Anywhere):  # NaN in padding would reach derivatives; a kernel has none, and drops it
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))

    products = _input_products(params, x, positions, call, projections)
    taken = _take_tokens(params, products, call, backends, x.dtype, given_tokens, is_draft=options.is_draft)
    call, latent, head_weights = taken.call, taken.latent, taken.head_weights
    window, entries = call.window(taken.fresh, taken.kv if taken.is_exact else None), call.entries
    if entries is not None:
        entries = dataclasses.replace(entries, exact=taken.entries)
    tokens = Queries(latent=latent, positions=positions, head_weights=head_weights)

    is_one_tile, is_bf16 = num_tokens == tile, x.dtype == jnp.bfloat16
    result = projections.row_form(params.o_b, batch * num_tokens) if is_one_tile and is_bf16 else "plain"

    def attend_tile(queries: Queries) -> Any:
        return _attend_tile(params, queries, window, entries, kind, backends, result)

    grouped = map_tokens(attend_tile, tokens, tile)
    # Make the next write into these buffers wait for this layer's reads. Otherwise XLA may schedule the write first and
    # keep a copy of the pool or window for the reads. What follows them is not tied, so that XLA can fuse the end of
    # this layer with what the caller does with y.
    grouped, stack = lax.optimization_barrier((grouped, call.stack))
    if isinstance(grouped, jax.Array):
        grouped = grouped.astype(x.dtype)
    y = None
    if residual is not None and options.model_axis is None and num_tokens == given_tokens:
        y = projections.linear_onto(residual, grouped, params.o_b, positions)
    if y is None:
        dtype = x.dtype if options.model_axis is None else jnp.float32
        y = projections.linear(grouped, params.o_b, dtype=dtype, needed=real).reshape(x.shape)
        if options.model_axis is not None:
            y = lax.psum(y, options.model_axis).astype(x.dtype)
        y = jnp.where(real[..., None], y, jnp.zeros((), x.dtype))[:, :given_tokens]
        y = y if residual is None else residual + y
    if options.is_draft:
        assert taken.rows is not None
        return y, cache.with_stack(kind, stack), (call.batch, taken.rows.first(given_tokens))
    if taken.fresh is not None:
        assert taken.kv is not None
        stored, cache_update = storable(taken.kv, plan.row_spec), CACHE_UPDATE[_of(backends.cache_update)]
        state = cache_update.append_swa(stack.state, index, stored, call.batch, plan)
        stack = dataclasses.replace(stack, state=state)
    return y, cache.with_stack(kind, stack), None


def _input_products(
    params: AttentionParams, x: jax.Array, positions: jax.Array, call: LayerCall, projections: Projections
) -> InputProducts:
    """Multiply x by the weights that it feeds."""
    pair = None if params.compress is None else projections.linear_pair(x, params.compress, params.q_a_kv)
    if pair is None:
        multiply = functools.partial(projections.linear, needed=positions >= 0)
        q_a_kv = multiply(x, params.q_a_kv)
        # The barrier keeps the products separate. XLA would otherwise concatenate the weights of both in every step.
        compress = None if params.compress is None else multiply(lax.optimization_barrier(x), params.compress)
    else:
        compress, q_a_kv = pair
    return InputProducts(q_a_kv=q_a_kv, compress=compress, start=call.batch.start, positions=positions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """New tokens whose entries are in the cache, and in decode their window rows."""

    call: LayerCall  # with the updated stack
    latent: Any  # as in ``TokenParts``
    head_weights: jax.Array | None
    kv: jax.Array | None = None  # window rows
    fresh: KVRows | None = None  # the same as they are stored, where they are not stored yet
    rows: TokenRows | None = None  # all that the tokens contribute, where it is in memory
    is_exact: bool = False  # whether attention is to see the rows before rounding too, for derivatives
    entries: ExactEntries | None = None  # before rounding, if so


def _take_tokens(
    params: AttentionParams,
    products: InputProducts,
    call: LayerCall,
    backends: OpBackends,
    dtype: Any,
    given_tokens: int,
    *,
    is_draft: bool,
) -> Taken:
    """Compute what the tokens contribute to the layer, and update the cache, but for the windows if T > 1."""
    is_plain = isinstance(DECODE_ATTENTION[_of(backends.decode_attention)], Anywhere)  # and so has derivatives
    cache_update, stores_window = _of(backends.cache_update), given_tokens == 1 and not is_draft
    if not is_draft and not is_plain and backends.projections == cache_update:
        stored = CACHE_UPDATE[cache_update].store_products(call, products, params, dtype)
        if stored is not None:
            return Taken(
                call=call.with_stack(stored.stack),
                latent=stored.latent,
                head_weights=stored.head_weights,
                kv=stored.kv,
                fresh=stored.encoded,
            )
    projections = PROJECTIONS[_of(backends.projections)]
    parts = projections.parts(products, params, call.plan, call.kind, dtype, encode=not stores_window)
    rows = parts.rows if stores_window else dataclasses.replace(parts.rows, kv=None)
    entries = exact_entries(call, rows) if is_plain else None
    stack = store(call, rows, cache_update, keep_tails=is_draft)
    return Taken(
        call=call.with_stack(stack),
        latent=parts.latent,
        head_weights=parts.head_weights,
        kv=parts.rows.kv,
        fresh=parts.encoded,
        rows=parts.rows,
        is_exact=is_plain,
        entries=entries,
    )


def _of(backend: str | None) -> str:
    assert backend is not None, "run_layer names a backend for each op"
    return backend


def _named(backend: Backend) -> OpBackends:
    assert isinstance(backend, OpBackends), "run_layer names a backend for each op"
    return backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """What the queries of all tokens are computed from."""

    latent: Any  # as in ``TokenParts``
    positions: jax.Array  # int32 [B, T], -1 = padding
    head_weights: jax.Array | None  # f32 [B, T, indexer_heads]; None without an indexer


def _attend_tile(
    params: AttentionParams,
    queries: Queries,
    window: SlidingWindow,
    entries: PooledLayer | None,
    kind: AttentionType,
    backends: OpBackends,
    result: RowForm,
) -> Any:
    """Process one tile of queries, from W_qb to W_oa: [B, tokens, o_groups * o_lora_rank], bf16 or f32.

    If W_oa takes attention's output in the form ``result``, they are rows in that form.
    """
    plan, cfg = window.plan, window.plan.cfg
    latent, positions, freqs = queries.latent, queries.positions, rope_frequencies(cfg, kind)
    projections, attends = PROJECTIONS[_of(backends.projections)], DECODE_ATTENTION[_of(backends.decode_attention)]
    needed = positions >= 0
    q, key_queries = _make_queries(params, queries, kind, plan, backends, is_indexed=entries is not None)
    picks = None
    if entries is not None and key_queries is not None:
        assert queries.head_weights is not None
        visible = (positions + 1) // cfg.ratio(kind)
        picks = indexer.select_entries(key_queries, queries.head_weights, entries, visible, backend=backends)
    inputs = attention.attention_inputs(q, positions, params.sinks, window, entries, picks, kind)
    form: RowForm = "plain"
    dtype = latent.dtype
    if attends.writes_forms and dtype == jnp.bfloat16:
        form = projections.row_form(params.o_a, positions.size, cfg.o_groups)
    groups = attends.attend(inputs, freqs, dtype, needed, form)
    if form == "plain":
        groups = groups.reshape(*positions.shape, cfg.o_groups, -1)
        # bf16 if W_ob takes bf16, which saves a pass over an f32 result.
        dtype = groups.dtype if isinstance(params.o_a, StoredWeight) else product_dtype(groups, params.o_a)
    result = result if result == form else "plain"
    projected = projections.linear(groups, params.o_a, groups=cfg.o_groups, dtype=dtype, needed=needed, result=result)
    return projected.reshape(*positions.shape, -1) if isinstance(projected, jax.Array) else projected


def _make_queries(
    params: AttentionParams,
    queries: Queries,
    kind: AttentionType,
    plan: CachePlan,
    backends: OpBackends,
    *,
    is_indexed: bool,
) -> tuple[jax.Array, jax.Array | KeyRows | None]:
    """Return the queries of attention [B, tokens, H, head_dim], and those of the indexer if the layer has one."""
    latent, positions, freqs, cfg = queries.latent, queries.positions, rope_frequencies(plan.cfg, kind), plan.cfg
    projections, attends = PROJECTIONS[_of(backends.projections)], DECODE_ATTENTION[_of(backends.decode_attention)]
    index_q_b = params.index_q_b if is_indexed else None
    rounds_queries = attends.rounds_queries
    if rounds_queries and index_q_b is not None and INDEXER_SCORES[_of(backends.indexer_scores)].rounds_queries:
        pair = projections.query_pair(latent, (params.q_b, index_q_b), positions, freqs, plan)
        if pair is not None:
            return pair
    q, needed = None, positions >= 0
    if rounds_queries:
        q = projections.queries(latent, params.q_b, positions, freqs, plan)
    if q is None:
        q = projections.linear(latent, params.q_b, needed=needed).reshape(*positions.shape, cfg.num_heads, cfg.head_dim)
        q = attention.attention_queries(q, positions, freqs, plan, _of(backends.decode_attention), needed)
    if index_q_b is None:
        return q, None
    given = lax.stop_gradient((index_q_b, latent))  # picks have no derivative
    return q, indexer.project_queries(*given, positions, freqs, plan, backends)


def query_tile(
    plan: CachePlan, kind: AttentionType, batch: int, backends: OpBackends, *, keeps_sums: bool = True
) -> int:
    """Return the tokens per query tile: the power of two that keeps temporaries within ``tile_bytes`` of attention.

    ``keeps_sums`` says whether the product that queries are made of is in memory, in f32.
    """
    cfg = plan.cfg
    batch = known_size(batch, plan.max_requests)  # rows name distinct slots
    attends = DECODE_ATTENTION[_of(backends.decode_attention)]
    numbers = cfg.num_heads * cfg.head_dim
    if attends.rounds_queries:
        # Queries in f16 beside their product in f32, and later the result in bf16.
        per_token = (2 + 4 if keeps_sums else 2 + 2) * numbers
    else:
        per_token = 4 * 3 * numbers  # queries, running sum, output
        if kind.is_indexed:
            entries = plan.max_blocks * plan.entries_per_block(kind)
            picks = min(cfg.indexer_top_k, entries)
            per_token += 4 * (2 * entries + cfg.indexer_heads * cfg.indexer_head_dim)
            per_token += 4 * picks * (cfg.head_dim + cfg.num_heads if attends.gathers_picks else 1)
    tokens = attends.tile_bytes // (per_token * batch)
    return 1 << max(0, tokens.bit_length() - 1)
