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

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.checks import integer
from dsv4jax.derivatives import refuse_of_invariant
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.attention import attention_inputs
from dsv4jax.layer.backend import Backend, OpBackends, check_name
from dsv4jax.layer.call import Draft, Given, LayerCall, RunOptions
from dsv4jax.layer.ops import Rows, choose_backends, choose_for_any_batch
from dsv4jax.layer.stages.compose import Stages
from dsv4jax.layer.stages.entries import tap_entries
from dsv4jax.layer.stages.interface import Ending, Latents
from dsv4jax.layer.stages.probe import NOTHING, Probe, Seen
from dsv4jax.layer.tiles import map_tokens, own_share, pad_tokens
from dsv4jax.plan import plan_of_heads
from dsv4jax.weights.params import AttentionParams, check_params, frozen_where_stored


def attention_layer(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    *,
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
    check_cache("attention_layer", cache)
    kind, index = cache.locate(layer)
    given = Given(x=x, slots=slots, num_new=num_new, residual=residual)
    options = RunOptions(backend=backend, model_axis=model_axis)
    return run_layer(params, given, cache, kind, index, options)[:2]


def attention_layer_at(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    kind: AttentionType | str,
    index: jax.Array | int,
    slots: jax.Array,
    num_new: jax.Array,
    *,
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
    check_cache("attention_layer_at", cache)
    given = Given(x=x, slots=slots, num_new=num_new, residual=residual)
    options = RunOptions(backend=backend, model_axis=model_axis)
    return run_layer(params, given, cache, AttentionType(kind), index, options)[:2]


def run_layer(
    params: AttentionParams,
    given: Given,
    cache: KVCache,
    kind: AttentionType,
    index: jax.Array | int,
    options: RunOptions,
    probe: Probe = NOTHING,
) -> tuple[jax.Array, KVCache, Draft | None, Seen]:
    """Check the arguments of a layer and run it.

    For a draft, the returned cache has the same windows and tails, and new entries past the end of each request's own.
    The sites of the probe are "entries", as ``CompletedEntries``; "picks" int32 [B, T, K], -1 = none; and "attention",
    the heads' outputs in x's dtype [B, T, H, head_dim].
    """
    plan = plan_of_heads(cache.plan, options.model_axis)
    given.check(plan.cfg.hidden_size)
    check_params(params, plan.cfg, kind)
    cache.stack(kind)  # raises if the model has no such layers
    depth = len(cache.plan.layers(kind))
    if isinstance(index, Tracer):
        nearest = jnp.clip(index, 0, depth - 1)
        given = dataclasses.replace(given, num_new=jnp.where(index == nearest, given.num_new, given.x.shape[1] + 1))
        index = nearest
    elif not 0 <= integer("index", index) < depth:
        raise ValueError(f"index must be in [0, {depth}) for {kind.upper()} layers, got {index}")
    check_name(options.backend)
    if plan.invariant and options.model_axis is not None:
        raise ValueError(f"model_axis={options.model_axis!r}: a cache with invariant=True is for whole heads")
    x = given.x
    if not isinstance(x.shape[1], int):
        raise ValueError(f"x: T must be a number, got {x.shape}: export a function for each T; B may be symbolic")
    if not isinstance(x.shape[0], int):
        options = dataclasses.replace(options, backend=choose_for_any_batch(options.backend, plan, kind))
    if x.size == 0:
        if options.is_draft:
            raise ValueError(f"a draft must have rows and tokens, got x of shape {x.shape}")
        cache, given = jax.tree.map(jnp.asarray, (cache, given))  # nothing is jitted here
        cache, _ = LayerCall.begin(cache, kind, index, given.slots, given.num_new, x.shape[1])
        if probe != NOTHING:
            raise ValueError(f"what is captured, patched or chosen must have rows and tokens, got x of shape {x.shape}")
        return jnp.zeros_like(given.x) if given.residual is None else given.residual, cache, None, {}
    options = dataclasses.replace(options, backend=choose_backends(options.backend, plan, kind))
    index = jnp.asarray(index, jnp.int32)
    params = frozen_where_stored(params)
    if plan.invariant:
        params, given = refuse_of_invariant((params, given))
    probe.check_entries(x)
    return _run_layer(params, given, cache, index, probe, kind=kind, options=options)


# Jitted so that all layers of a kind are traced once. It donates nothing.
@functools.partial(jax.jit, static_argnames=("kind", "options"))
def _run_layer(
    params: AttentionParams,
    given: Given,
    cache: KVCache,
    index: jax.Array,
    probe: Probe,
    *,
    kind: AttentionType,
    options: RunOptions,
) -> tuple[jax.Array, KVCache, Draft | None, Seen]:
    """Run a layer whose arguments are checked. ``options.backend`` names a backend for every op that the kind uses."""
    assert isinstance(options.backend, OpBackends)
    plan = plan_of_heads(cache.plan, options.model_axis)
    stages, x = Stages.of(options.backend, plan, kind), given.x
    cache, call = LayerCall.begin(cache, kind, index, given.slots, given.num_new, x.shape[1])
    call = dataclasses.replace(call, plan=plan)
    taken = stages.intake.take(params, x, call, is_draft=options.is_draft)
    seen: Seen = {}
    if kind.compresses and probe.sees("entries"):
        taken = tap_entries(taken, x.shape[1], probe, seen)
    window, entries = taken.window, taken.entries
    latents = own_share(taken.latents, options.token_axis, 1)
    batch, num_tokens = latents.positions.shape
    # A patch is given all tokens at once.
    tile = num_tokens if probe.patched("picks", "attention") else stages.tile(params, batch, num_tokens)
    latents = latents.padded(-num_tokens % tile)
    tokens = latents.positions.size

    def narrow(part: tuple[Latents, jax.Array | None]) -> tuple[Rows, Seen]:
        latents, chosen = part
        probed, seen = dataclasses.replace(probe, entries=chosen), Seen()
        q, keys = stages.queries.make(params, latents)
        picks, positions = stages.pick(keys, latents, entries, probed, seen), latents.positions
        inputs = attention_inputs(q, positions, params.sinks, window, entries, picks, kind)
        form = stages.output.takes(params, latents)
        if probe.sees("attention"):
            rows = stages.attend(inputs, latents, "plain")
            assert isinstance(rows, jax.Array), "in the plain form"
            rows = probed.tap("attention", jnp.where((positions >= 0)[..., None, None], rows, 0), seen)
        else:
            rows = stages.attend(inputs, latents, form)
        return stages.output.narrow(params, rows, positions, tokens), seen

    chosen = pad_tokens(probe.entries, -num_tokens % tile, -1)
    rows, of_tokens = map_tokens(narrow, (latents, chosen), tile)
    seen |= {site: value[:, :num_tokens] for site, value in of_tokens.items()}
    # Make the next write into these buffers wait for this layer's reads. Otherwise XLA may schedule the write first and
    # keep a copy of the pool or window for the reads. What follows them is not tied, so that XLA can fuse the end of
    # this layer with what the caller does with y.
    rows, stack, seen = lax.optimization_barrier((rows, taken.call.stack, seen))
    ending = Ending(
        positions=latents.positions,
        num_tokens=num_tokens,
        dtype=x.dtype,
        residual=given.residual,
        axis=options.model_axis,
    )
    y = stages.output.finish(params, rows, ending)
    if options.is_draft:
        assert taken.rows is not None
        return y, cache.with_stack(kind, stack), (call.batch, taken.rows), seen
    return y, cache.with_stack(kind, stages.intake.close(taken, stack)), None, seen
