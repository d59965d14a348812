"""Speculative decoding without rollback: stage a draft first, then commit the tokens that the model accepts.

    cache, ok = prepare_forward(cache, slots, num_new)          room for the whole draft
    for layer in range(cfg.num_layers):
        y, cache, rows = stage(params[layer], x, cache, layer, slots, num_new)
        x, staged = x + y, [*staged, rows]                      norms and MLP of your model go here
    num_accepted = accept(x, draft)                             your sampler: int32 [B], 0 to num_new
    cache, ok = commit(cache, staged, num_accepted)             in place of ``advance``

A staged draft does not change anything that the request reads. Its window rows and streams are kept outside the cache.
The entries that it completes are written to the request's blocks, but past its length, where they are overwritten
before they become visible. So there is nothing to roll back: a draft that is not committed has no effect, and another
one can be staged over it.

``stage`` needs the layer's number as a static int, so a model that scans over its layers cannot stage drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dsv4jax.cache.cache import KVCache, check_cache
from dsv4jax.cache.shards import OF_ROWS, is_spread, on_shards
from dsv4jax.cache.tables import advance_lengths, granted_tokens, is_admitted, withdraw_grants
from dsv4jax.checks import FLOATS, check_array, check_batch, check_type
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.indexing import Batch
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.call import Draft, Given, LayerCall, Normed, RunOptions, TokenRows
from dsv4jax.layer.layer import run_layer
from dsv4jax.layer.ops import CACHE_UPDATE
from dsv4jax.layer.update import store
from dsv4jax.plan import CachePlan
from dsv4jax.weights.params import AttentionParams, param_shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayer:
    """What must be kept of one layer's draft until it is committed, before rounding to the cache's formats.

    At V4's sizes this takes 2 (SWA), 6 (HCA) or 12 (CSA) KiB per token.
    """

    kv: jax.Array  # f32 [B, T, head_dim] window rows, after norm and rope
    entry: Normed | None  # from the compressor: streams [B, T, ...] and norm weight; None for SWA
    key: Normed | None  # from the indexer's compressor; CSA only
    slots: jax.Array  # int32 [B] request of each row, -1 if nothing was staged
    start: jax.Array  # int32 [B] tokens stored before the draft
    num_new: jax.Array  # int32 [B] tokens staged
    layer: int = dataclasses.field(metadata={"static": True})


def staged_layer(draft: Draft, layer: int) -> StagedLayer:
    """Return what must be kept of the draft that a layer's run returned."""
    batch, rows = draft
    assert rows.kv is not None
    return StagedLayer(
        kv=rows.kv,
        entry=rows.entry,
        key=rows.key,
        slots=batch.slots,
        start=batch.start,
        num_new=batch.num_new,
        layer=int(layer),
    )


def staged_specs(cfg: DSV4Config, layer: int) -> StagedLayer:
    """Return the specs over a mesh of what a layer has staged, as a prefix of its tree."""
    kind = layer_kind(cfg, layer)
    normed: Any = OF_ROWS, P()  # norm weights are the same for all requests
    return StagedLayer(
        **dict.fromkeys(("kv", "slots", "start", "num_new"), OF_ROWS),  # type: ignore[arg-type]
        entry=normed if kind.compresses else None,
        key=normed if kind.is_indexed else None,
        layer=layer,
    )


def stage(
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
) -> tuple[jax.Array, KVCache, StagedLayer]:
    """Run one attention layer on draft tokens without changing what the requests hold.

    The arguments are those of ``attention_layer``. The draft's tokens see the cache, each other, and the entries that
    they complete. A row that names more tokens than ``prepare_forward`` granted, or than x has, gives 0 and stages
    nothing; in the second case its grant is withdrawn.

    Returns:
      (y as from ``attention_layer``; the cache, in which nothing that a request holds has changed; the ``StagedLayer``
      for ``commit``).

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the layer or backend is unknown, the weights belong to another kind of layer, or x has no rows or
        tokens.
    """
    check_cache("stage", cache)
    kind, index = cache.locate(layer)
    given = Given(x=x, slots=slots, num_new=num_new, residual=residual)
    options = RunOptions(backend=backend, model_axis=model_axis, is_draft=True)
    y, cache, draft, _ = run_layer(params, given, cache, kind, index, options)
    assert draft is not None
    return y, cache, staged_layer(draft, layer)


@functools.partial(jax.jit, static_argnames="backend")
def commit(
    cache: KVCache, staged: Sequence[StagedLayer], num_accepted: jax.Array, *, backend: Backend = None
) -> tuple[KVCache, jax.Array]:
    """Store the first tokens of a staged draft and add them to the lengths, as if only these had been fed.

    Grants past the stored tokens are withdrawn, so call ``prepare_forward`` before each draft. Blocks that were
    allocated stay with their requests.

    Args:
      cache: the cache that the last layer's ``stage`` returned.
      staged: what ``stage`` returned for every layer of the model, in any order.
      num_accepted: int32 [B], number of each row's tokens to keep, from 0 to the number staged.
      backend: used for the cache update; as for ``stage``.

    Returns:
      (cache, ok bool []). ``ok`` is False, and the cache unchanged, if a row accepts a negative number of tokens or
      more than it staged, if a request's length has changed since its draft began or it has no grant, or if the layers'
      drafts belong to different batches. A slot that was released and admitted again is taken for the same request if
      its length is the same, so discard drafts when you release a slot.

    Raises:
      AssertionError: (chex) an argument's shape or dtype is wrong.
      ValueError: ``staged`` does not hold each layer of the model once, or holds something that its kind of layer does
        not stage; or the backend is unknown.
    """
    check_cache("commit", cache)
    if not isinstance(staged, Sequence):
        raise ValueError(f"staged must be what stage returned for every layer, in a list, got {type(staged).__name__}")
    for i, one in enumerate(staged):
        check_type(f"staged[{i}]", one, StagedLayer)
    if is_spread(cache):
        specs = [staged_specs(cache.plan.cfg, one.layer) for one in staged], OF_ROWS
        of_shard = functools.partial(commit, backend=backend)
        return on_shards(of_shard, cache, (list(staged), num_accepted), 1, specs)
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
        cache = cache.with_stack(kind, _store(call, rows, CACHE_UPDATE.of(backend, plan, kind)))
    tables = advance_lengths(tables, slots, count)
    return dataclasses.replace(cache, tables=withdraw_grants(tables, drafting, drafting >= 0)), ok


def _check_staged(one: StagedLayer, tokens: dict[str, int | None], plan: CachePlan) -> None:
    """Check that this is what ``stage`` returns for its kind of layer, with axes B and T of these sizes."""
    cfg, kind, of = plan.cfg, layer_kind(plan.cfg, one.layer), f"of layer {one.layer}"
    rows = {"slots": one.slots, "start": one.start, "num_new": one.num_new}
    for name, row in rows.items():
        check_array(f"{name} {of}", row, {"B": tokens["B"]}, jnp.int32)
    check_array(f"kv {of}", one.kv, tokens | {"head_dim": cfg.head_dim}, jnp.float32)
    params = param_shapes(cfg, kind)
    for name, normed, pool in (("entry", one.entry, params.entry_pool), ("key", one.key, params.key_pool)):
        if (normed is None) != (pool is None):
            raise ValueError(f"entry and key {of} are not those of a {kind.upper()} layer")
        if normed is not None and pool is not None:
            streams, norm = normed
            check_array(f"{name}.k {of}", streams.k, tokens | {"width": pool.width}, jnp.float32)
            check_array(f"{name}.z {of}", streams.z, tokens | {"width": pool.width}, jnp.float32)
            check_array(f"norm of {name} {of}", norm, {"dim": pool.norm.shape[0]}, FLOATS)


# Jitted so that all layers of a kind are traced once.
_store = jax.jit(store, static_argnames="cache_update")
