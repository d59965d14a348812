"""Drafts by DSpark: one run of a block guesses several tokens at once.

The block is some layers that run once, on as many rows as it guesses tokens: the newest token of the text, which the
model has not run yet, and a noise token in place of each one after it. A row sees the rows of the whole block, later
ones too, and key rows of the newest tokens that the model has run, in a window. Those are made of the model's own
streams:

    taps(t)     = mean over the streams after each tapped layer, side by side          [taps h]
    main_x(t)   = norm(taps(t) W_taps)                                                 [h]
    key_s(t)    = rope(norm(main_x(t) W_kv), t), of stage s                            [head_dim]

A small head then draws the tokens one by one. With x_i the sum of the streams of row i, and d_(i-1) the token before:

    e_i         = markov_in[d_(i-1)]                                                   [r]
    logits_i    = norm(x_i) W_head + e_i markov_out                                    [V]
    confidence_i = (x_i, e_i) W_confidence

The sigmoid of a confidence estimates how probably d_i is accepted if all before it were. The cache holds key rows
alone, of the same tokens as the model's cache. Nothing that is made from a guess is stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv4jax.cache.cache import KVCache
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.call import LayerCall
from dsv4jax.layer.dense import rms_norm, wide_product
from dsv4jax.layer.ops import CACHE_UPDATE, AttentionInputs, choose_backends
from dsv4jax.layer.projections import linear
from dsv4jax.layer.stages.compose import Stages
from dsv4jax.layer.stages.interface import Ending
from dsv4jax.layer.stages.probe import Probe, Seen
from dsv4jax.layer.update import append_to_all_layers
from dsv4jax.model.inside.blocks import Tokens, Way, first_streams, run_blocks
from dsv4jax.model.ops import HEAD
from dsv4jax.model.params import DSparkParams, ModelParams
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.params import AttentionParams

_KIND = AttentionType.SWA


def main_rows(drafts: DSparkParams, taps: jax.Array, eps: float, backend: Backend = None) -> jax.Array:
    """Return main_x [B, T, h] of taps [B, T, taps h], in their dtype."""
    product = linear(taps, drafts.taps_proj, taps.dtype, backend=backend)
    return rms_norm(product, drafts.taps_norm, eps).astype(taps.dtype)


def store_keys(
    params: ModelParams,
    taps: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    num_new: jax.Array,
    backend: Backend = None,
) -> KVCache:
    """Store the key rows of tokens that the model has run.

    Call it between ``prepare_forward`` and ``advance`` of the cache for drafts.

    Args:
      params: the model's weights.
      taps: [B, T, taps h] of the tokens, as ``forward`` returned them.
      cache: a cache for ``params.cfg.draft_attention``.
      slots, num_new: int32 [B], as for ``forward``.
      backend: as for ``forward``.
    """
    drafts, cfg = _drafts(params), params.cfg.attention
    real = jnp.arange(taps.shape[1])[None] < num_new[:, None]
    x = main_rows(drafts, jnp.where(real[..., None], taps, jnp.zeros((), taps.dtype)), cfg.norm_eps, backend)
    cache, call = LayerCall.begin(cache, _KIND, 0, slots, num_new, taps.shape[1])
    rows = []
    for stage in (block.attention for block in drafts.blocks):
        # The product with W_qa beside it is not used: cutting W_kv off would copy it.
        product = linear(x, stage.q_a_kv, backend=backend)[..., cfg.q_lora_rank :]
        rows.append(rms_norm(product, stage.kv_norm, cfg.norm_eps))
    kv = apply_rope(jnp.stack(rows), call.positions(taps.shape[1])[None], rope_frequencies(cfg, _KIND))
    state = append_to_all_layers(call, kv, CACHE_UPDATE.of(backend, cache.plan, _KIND))
    return cache.with_stack(_KIND, dataclasses.replace(call.stack, state=state))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """What a run of the block gives for each of its rows."""

    x: jax.Array  # [B, block, h] the sum of a row's streams
    normed: jax.Array  # [B, block, h] x after the final norm
    streams: jax.Array  # [B, block, num_streams, h] after each stage: [stages, ...]


def run_block(
    params: ModelParams,
    newest: jax.Array,
    cache: KVCache,
    slots: jax.Array,
    active: jax.Array,
    backend: Backend = None,
) -> BlockRows:
    """Run the block after the tokens that the cache holds.

    Args:
      params: the model's weights.
      newest: int32 [B], the token after them, which the model has not run.
      cache: the cache for drafts, after ``advance``. It is not changed.
      slots: int32 [B].
      active: bool [B], False for rows that are to be left out, whose result may be anything finite.
      backend: as for ``forward``.
    """
    drafts, sizes = _drafts(params), params.cfg.dspark
    assert sizes is not None
    size = sizes.block_size
    active &= slots >= 0
    noise = jnp.full((newest.shape[0], size - 1), sizes.noise_token, jnp.int32)
    tokens = Tokens(
        ids=jnp.concatenate([newest[:, None], noise], axis=1),
        real=jnp.broadcast_to(active[:, None], (newest.shape[0], size)),
        count=jnp.where(active, size, 0),
        devices=params.devices,
    )
    start = cache.seq_lens.at[slots].get(mode="clip")
    batch = Batch(slots=jnp.where(active, slots, -1), start=start, num_new=tokens.count)
    way = Way(tokens=tokens, attend=_Attention(batch=batch, backend=backend), cfg=params.cfg, backend=backend)
    streams = first_streams(params, tokens)
    ran = run_blocks(drafts.blocks, drafts.final_mix, drafts.final_norm, streams, cache, way)
    return BlockRows(x=ran.mixed, normed=ran.x, streams=jnp.stack(ran.after))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The attention of a stage: all rows of the block see the same keys, and nothing is stored."""

    batch: Batch
    backend: Backend

    def __call__(
        self, params: AttentionParams, x: jax.Array, cache: KVCache, stage: int, probe: Probe
    ) -> tuple[jax.Array, KVCache, Seen]:
        del probe
        plan = cache.plan
        stages = Stages.of(choose_backends(self.backend, plan, _KIND), plan, _KIND)
        call = LayerCall.of(cache, _KIND, stage, self.batch)
        taken = stages.intake.take(params, x, call, is_draft=True)  # a window alone has nothing that a draft stores
        latents = taken.latents
        inputs = AttentionInputs(
            q=stages.queries.make(params, latents).q,
            positions=latents.positions,
            sinks=params.sinks,
            window=call.window(None),
            entries=None,
            picks=None,
            visible=None,
            block=taken.fresh,
        )
        rows = stages.attend(inputs, latents, stages.output.takes(params, latents))
        rows = stages.output.narrow(params, rows, latents.positions, latents.positions.size)
        ending = Ending(positions=latents.positions, num_tokens=x.shape[1], dtype=x.dtype, residual=None, axis=None)
        return stages.output.finish(params, rows, ending), cache, {}


def base_logits(params: ModelParams, normed: jax.Array, backend: Backend = None) -> jax.Array:
    """Return the logits of rows of the block but for the tokens before them: f32 [B, m, V].

    ``normed`` [B, m, h] is what ``run_block`` gives of these rows after the final norm.
    """
    devices, op = params.devices, HEAD.of(backend, params.cfg, params.head, normed.dtype)
    return devices.gather_logits(op.logits(devices.gather_inputs(normed), params.head))


def token_head(drafts: DSparkParams, base: jax.Array, x: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (logits f32 [B, V], confidence f32 [B]) of a draft.

    Args:
      drafts: the weights.
      base: f32 [B, V] of ``base_logits``.
      x: [B, h] of the block.
      before: int32 [B], the token before the draft.
    """
    e = drafts.markov_in[before]
    logits = base + wide_product(e, drafts.markov_out)
    both = jnp.concatenate([x.astype(jnp.float32), e.astype(jnp.float32)], axis=-1)
    return logits, wide_product(both, drafts.confidence.astype(jnp.float32))[:, 0]


def _drafts(params: ModelParams) -> DSparkParams:
    if not isinstance(params.drafts, DSparkParams):
        raise ValueError("this model has no DSpark block")
    return params.drafts
