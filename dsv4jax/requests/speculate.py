"""Speculative decoding without rollback: a draft is staged, and what the model accepts of it is committed.

    cache, ok = prepare_forward(cache, slots, num_new)          room for the whole draft
    for layer in range(cfg.num_layers):
        y, cache, rows = stage(params[layer], x, cache, layer, slots, num_new)
        x, staged = x + y, [*staged, rows]                      norms and MLP of your model go here
    num_accepted = accept(x, draft)                             your sampler: int32 [B], 0 to num_new
    cache, ok = commit(cache, staged, num_accepted)             in place of ``advance``

A staged draft is nowhere that the request looks: its window rows and streams are kept beside the cache, and the entries
that it completes lie in the request's blocks past its length, where a row is overwritten before it counts. So there is
nothing to take back: a draft that is not committed is forgotten, and another one can be staged over it.

The number of a layer is static, in ``stage`` as in ``StagedLayer``: a model that scans over its layers cannot stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.tables import advance_lengths, granted_tokens, is_admitted, withdraw_grants
from dsv4jax.checks import FLOATS, check_array, check_batch
from dsv4jax.config import layer_kind
from dsv4jax.indexing import Batch
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.layer import RunOptions, run_layer
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.update import store
from dsv4jax.plan import CachePlan
from dsv4jax.weights.params import AttentionParams, param_shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayer:
    """What one layer keeps of a draft until it is committed: rows before the cache's formats.

    At V4's sizes 2 (SWA), 6 (HCA) or 12 (CSA) KiB a token.
    """

    kv: jax.Array  # f32 [B, T, head_dim] window rows, normed and roped
    entry: Normed | None  # of the compressor: streams [B, T, ...] and norm weight; None for SWA
    key: Normed | None  # of the indexer's compressor; CSA only
    slots: jax.Array  # int32 [B] request of each row, -1 where nothing was staged
    start: jax.Array  # int32 [B] tokens that the request held
    num_new: jax.Array  # int32 [B] tokens staged
    layer: int = dataclasses.field(metadata={"static": True})


def stage(
    params: AttentionParams,
    x: jax.Array,
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
    model_axis: str | None = None,
) -> tuple[jax.Array, KVCache, StagedLayer]:
    """Run one attention layer on draft tokens, and leave the requests as they are.

    Arguments are those of ``attention_layer``. The draft's tokens see the cache, each other, and the entries that they
    complete. A row that names more tokens than ``prepare_forward`` granted, or than x has, gives 0 and stages nothing;
    in the second case its grant is withdrawn.

    Returns:
      (y, as ``attention_layer`` gives it; the cache, with nothing changed that a request holds; what ``commit`` needs).

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: unknown layer or backend, weights of another kind of layer, no token at all.
    """
    kind, index = cache.locate(layer)
    options = RunOptions(backend=backend, model_axis=model_axis, is_draft=True)
    y, cache, draft = run_layer(params, x, cache, kind, index, slots, num_new, options)
    assert draft is not None
    batch, rows = draft
    assert rows.kv is not None
    return (
        y,
        cache,
        StagedLayer(
            kv=rows.kv,
            entry=rows.entry,
            key=rows.key,
            slots=batch.slots,
            start=batch.start,
            num_new=batch.num_new,
            layer=int(layer),
        ),
    )


@functools.partial(jax.jit, static_argnames="backend")
def commit(
    cache: KVCache, staged: Sequence[StagedLayer], num_accepted: jax.Array, backend: Backend = None
) -> tuple[KVCache, jax.Array]:
    """Store the first tokens of a staged draft and count them: as if they alone had been fed.

    Whatever was granted past the tokens stored is withdrawn, so each draft begins with ``prepare_forward``. Blocks stay
    with their request.

    Args:
      cache: as the last layer's ``stage`` gave it.
      staged: what ``stage`` gave for every layer of the model, in any order.
      num_accepted: int32 [B] tokens of each row to keep, 0 to as many as were staged.
      backend: of the cache update; as for ``stage``.

    Returns:
      (cache, ok bool []). ``ok`` is False, and the cache unchanged, where a row accepts a negative number of tokens or
      more than it staged, where a request no longer has the length that its draft began at, or no grant for it, and
      where the layers' drafts are not of one batch. A slot that was released and admitted anew counts as the same
      request where the lengths agree: forget drafts at ``release``.

    Raises:
      AssertionError: (chex) an argument's shape or dtype is wrong.
      ValueError: staged is not each layer of the model once, or not what such a layer stages; unknown backend.
    """
    plan, tables = cache.plan, cache.tables
    layers = sorted(one.layer for one in staged)
    if layers != list(range(plan.cfg.num_layers)):
        raise ValueError(f"staged must be each of the model's {plan.cfg.num_layers} layers once, got layers {layers}")
    slots, start, offered = staged[0].slots, staged[0].start, staged[0].num_new
    check_batch(slots=slots, num_accepted=num_accepted)
    for one in staged:
        _check_staged(one, {"B": slots.shape[0], "T": staged[0].kv.shape[1]}, plan)

    agree = jnp.ones(slots.shape, jnp.bool)
    for one in staged:
        agree &= (one.slots == slots) & (one.start == start) & (one.num_new == offered)
    length = tables.seq_lens.at[slots].get(mode="clip")
    current = (offered == 0) | (is_admitted(tables, slots) & (length == start))
    _, count = granted_tokens(tables, slots, num_accepted)
    ok = jnp.all(agree & current & (num_accepted <= offered) & (count == num_accepted))
    count = jnp.where(ok, count, 0)
    drafting, slots = jnp.where(ok & (offered > 0), slots, -1), jnp.where(count > 0, slots, -1)
    batch = Batch(slots=slots, start=start, num_new=count)
    for one in staged:
        kind, index = cache.locate(one.layer)
        call = LayerCall.of(cache, kind, jnp.asarray(index, jnp.int32), batch)
        rows = TokenRows(kv=one.kv, entry=one.entry, key=one.key)
        cache = cache.with_stack(kind, _store(call, rows, CACHE_UPDATE.choose(backend, plan, kind)))
    tables = advance_lengths(tables, slots, count)
    return dataclasses.replace(cache, tables=withdraw_grants(tables, drafting, drafting >= 0)), ok


def _check_staged(one: StagedLayer, tokens: dict[str, int | None], plan: CachePlan) -> None:
    """Require what ``stage`` gives for a layer of a kind, with axes B and T of these sizes."""
    cfg, kind, of = plan.cfg, layer_kind(plan.cfg, one.layer), f"of layer {one.layer}"
    rows = {"slots": one.slots, "start": one.start, "num_new": one.num_new}
    for name, row in rows.items():
        check_array(f"{name} {of}", row, {"B": tokens["B"]}, jnp.int32)
    check_array(f"kv {of}", one.kv, tokens | {"head_dim": cfg.head_dim}, jnp.float32)
    params = param_shapes(cfg, kind)
    of_key = params.indexer and params.indexer.compressor
    for name, normed, compressor in (("entry", one.entry, params.compressor), ("key", one.key, of_key)):
        if (normed is None) != (compressor is None):
            raise ValueError(f"entry and key {of} are not those of a {kind.upper()} layer")
        if normed is not None and compressor is not None:
            streams, norm = normed
            width = compressor.kv.shape[0]
            check_array(f"{name}.k {of}", streams.k, tokens | {"width": width}, jnp.float32)
            check_array(f"{name}.z {of}", streams.z, tokens | {"width": width}, jnp.float32)
            check_array(f"norm of {name} {of}", norm, {"dim": compressor.norm.shape[0]}, FLOATS)


# Jitted so that the layers of a kind are traced once.
_store = jax.jit(store, static_argnames="backend")
