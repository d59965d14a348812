"""Lightning-indexer scores over paged 4-bit keys.

    I_s = sum over heads h of w_h relu(q_h . k_s)

Queries are in the keys' own format: both enter the tensor cores as they are stored, without an error but that of an
mxfp4 group far below its row's largest (``fp4.Mxfp4``). The sum over a head's dims and its positive part are f16, the
sum over heads is f32: a few 1e-6 of sum_h |w_h| |q_h| |k_s| as a rule.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from pallas_kernels.language import target
from pallas_kernels.language.launch import launch
from pallas_kernels.scores import sm90, sm100
from pallas_kernels.scores.fp4 import DIM, FORMATS
from pallas_kernels.scores.parts import ENTRIES, HEADS, PER_BLOCK, Inputs

_KERNELS: dict[str, Any] = {"sm90": sm90, "sm100": sm100}
MAX_TOKENS = 8  # of a launch: their queries stand in shared memory


def unsupported_scores(*, key_format: str, heads: int, key_dim: int, entries_per_block: int) -> str | None:
    """Why the kernel cannot serve these formats and sizes, or None where it can."""
    if key_format not in FORMATS:
        return f"key_format must be one of {tuple(FORMATS)}, got {key_format!r}"
    sizes = {"heads": (heads, HEADS), "key_dim": (key_dim, DIM), "entries_per_block": (entries_per_block, PER_BLOCK)}
    for name, (size, needed) in sizes.items():
        if size != needed:
            return f"{name} must be {needed}, got {size}"
    return None


def indexer_scores(
    queries: Any,
    weights: jax.Array,
    keys: Any,
    layer: jax.Array,
    block_table: jax.Array,
    slots: jax.Array,
    visible: jax.Array,
    *,
    key_format: str,
    tuning: sm90.Tuning | sm100.Tuning | None = None,
    architecture: str | None = None,
    simulate: bool = False,
) -> jax.Array:
    """Scores of the entries that queries see.

    Args:
      queries: pytree ``codes scale``, u8 [B, T, 64, 64] and [B, T, 64, groups], encoded as the keys are.
      weights: f32 [B, T, 64], signed.
      keys: pytree ``codes scale``, u8 [layers, num_blocks, 32, 64] and [layers, num_blocks, 32, groups].
      layer: int32 [1].
      block_table: int32 [requests, max_blocks], -1 = none: the entries score 0.
      slots: int32 [B], -1 = none: nothing is read or written.
      visible: int32 [B, T], entries that a query sees.
      tuning: None for what the sizes ask for.
      architecture: "sm90" or "sm100", whose kernel it is; None for the device's.

    Returns:
      f32 [B, T, max_blocks * 32]; anything at and past ``visible``. A key that holds NaN scores +inf; with a query
      that does, or a weight that is not finite, all entries do. No score is below the lowest finite number.
    """
    chex.assert_rank([queries.codes, keys.codes, block_table], [4, 4, 2])
    batch, tokens, heads, width = queries.codes.shape
    layers, num_blocks, per_block, _ = keys.codes.shape
    reason = unsupported_scores(key_format=key_format, heads=heads, key_dim=2 * width, entries_per_block=per_block)
    if reason is not None:
        raise ValueError(reason)
    groups = FORMATS[key_format].scale_bytes
    chex.assert_shape([queries.scale, weights], [(batch, tokens, heads, groups), (batch, tokens, heads)])
    chex.assert_shape([keys.codes, keys.scale], [(layers, num_blocks, per_block, n) for n in (width, groups)])
    chex.assert_shape([layer, slots, visible], [(1,), (batch,), (batch, tokens)])
    chex.assert_type([queries.codes, queries.scale, keys.codes, keys.scale], jnp.uint8)
    chex.assert_type([weights, layer, block_table, slots, visible], [jnp.float32] + [jnp.int32] * 4)
    if not simulate and (capability := target.compute_capability()) not in ((9, 0), (10, 0)):
        raise ValueError(f"indexer_scores runs on compute capability 9.0 or 10.0, the target has {capability}")
    architecture = architecture or target.architecture()
    if architecture not in _KERNELS:
        raise ValueError(f"architecture must be one of {tuple(_KERNELS)}, got {architecture!r}")
    inputs = Inputs(
        queries=queries,
        weights=weights,
        keys=keys,
        layer=layer,
        block_table=block_table,
        slots=slots,
        visible=visible,
    )
    parts = []
    for first in range(0, tokens, MAX_TOKENS):
        some = inputs.of_tokens(first, min(first + MAX_TOKENS, tokens))
        parts.append(_launch(some, key_format, tuning, _KERNELS[architecture], simulate))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)


def _launch(inputs: Inputs, key_format: str, tuning: Any, kernel: Any, simulate: bool) -> jax.Array:
    batch, tokens = inputs.visible.shape
    max_entries = inputs.block_table.shape[1] * PER_BLOCK
    tiles = batch * -(-max_entries // ENTRIES)
    tuning = tuning or kernel.tuning_of(key_format, tokens, tiles)
    blocks = max(1, min(tuning.blocks, tiles))
    return launch(
        functools.partial(kernel.body, key_format=key_format, tuning=tuning, blocks=blocks),
        name="indexer_scores",
        grid=(blocks,),
        inputs=inputs,
        state=jax.ShapeDtypeStruct((batch, tokens, max_entries), jnp.float32),
        warpgroups=tuning.warpgroups,
        shared_bytes=kernel.shared_bytes(key_format, tokens, tuning),
        simulate=simulate,
    )
