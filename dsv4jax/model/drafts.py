"""Drafts of the model's next tokens by its own extra block (multi-token prediction, MTP).

Row t of the block takes the model's streams after its last layer at token t, and token t + 1; its logits are a guess at
token t + 2. To guess further, the block is given its own streams and its own guess at the next position. The block has
a cache of its own, of one layer with a window alone, which holds row t when the model's cache holds token t.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.shards import OF_ROWS, cache_specs
from dsv4jax.checks import FLOATS, check_array
from dsv4jax.layer.backend import Backend, for_plan
from dsv4jax.layer.call import RunOptions
from dsv4jax.layer.dense import rms_norm
from dsv4jax.layer.projections import linear
from dsv4jax.model.forward_pass import attention
from dsv4jax.model.inside.blocks import Tokens, Way, all_logits, check_pass, embedded, run_blocks
from dsv4jax.model.inside.devices import run_on_devices, weight_specs
from dsv4jax.model.params import DraftParams, ModelParams


@functools.partial(jax.jit, static_argnames="backend")
def draft_forward(
    params: ModelParams,
    streams: jax.Array,
    next_ids: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    *,
    backend: Backend = None,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Run the draft block on new rows and store them in its cache.

    Call it between ``prepare_forward`` and ``advance`` of the draft block's cache.

    Args:
      params: the model's weights.
      streams: [B, T, num_streams, hidden], as ``forward`` returned them for tokens t; or, to guess further, as this
        function did.
      next_ids: int32 [B, T], tokens t + 1.
      cache: a cache for ``params.cfg.draft_attention``.
      slots, num_new: int32 [B], as for ``forward``.
      backend: as for ``forward``.

    Returns:
      (logits f32 [B, T, V] of tokens t + 2; streams [B, T, num_streams, hidden]; the updated cache, its lengths not yet
      advanced). Rows that were not taken have 0.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: the model has no such block, the cache is for something else, or the backend is unknown.
    """
    check_pass(params, "next_ids", next_ids, slots, num_new)
    cfg, drafts = params.cfg, params.drafts
    if not isinstance(drafts, DraftParams):
        raise ValueError("this model has no block for multi-token prediction: its checkpoint holds no MTP weights")
    axes = {"B": slots.shape[0], "T": next_ids.shape[1], "streams": cfg.num_streams, "hidden": cfg.hidden_size}
    check_array("streams", streams, axes, FLOATS)

    def specs() -> tuple[Any, Any]:
        of_cache = cache_specs(cache)
        return (weight_specs(params), of_cache, OF_ROWS), (OF_ROWS, OF_ROWS, of_cache)

    run = run_on_devices(functools.partial(_step, backend=backend), params.mesh, cache, slots.shape[0], specs)
    return run(params, cache, (streams, next_ids, slots, num_new))


def _step(
    params: ModelParams, cache: KVCache, rows: tuple[jax.Array, ...], *, backend: Backend
) -> tuple[jax.Array, jax.Array, KVCache]:
    (streams, next_ids, slots, num_new), cfg, drafts = rows, params.cfg, params.drafts
    backend = for_plan(backend, cache.plan)
    assert isinstance(drafts, DraftParams)
    tokens = Tokens.of(params, next_ids, cache, slots, num_new, cfg.draft_attention)
    token = embedded(params, tokens)
    token = rms_norm(token, drafts.token_norm, cfg.norm_eps).astype(token.dtype)
    old = rms_norm(streams, drafts.stream_norm, cfg.norm_eps).astype(streams.dtype)
    old = jnp.where(tokens.real[..., None, None], old, jnp.zeros((), old.dtype))
    dtype = streams.dtype
    given = linear(token, drafts.token_proj, dtype, backend=backend).astype(jnp.float32)
    kept = linear(old, drafts.stream_proj, dtype, backend=backend).astype(jnp.float32)

    way = Way(tokens=tokens, attend=attention(slots, num_new, RunOptions(backend=backend)), cfg=cfg, backend=backend)
    streams = (given[..., None, :] + kept).astype(dtype)
    ran = run_blocks((drafts.block,), drafts.final_mix, drafts.final_norm, streams, cache, way)
    return all_logits(ran.x, params.head, way), ran.streams, ran.cache
