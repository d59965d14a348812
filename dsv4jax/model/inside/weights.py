"""The weights that a model's heads give to keys, of a pass that was captured."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from dsv4jax.cache.cache import KVCache
from dsv4jax.checks import Tree, check_type
from dsv4jax.layer.stages.weights import AttentionWeights
from dsv4jax.layer.stages.weights import attention_weights as of_layer
from dsv4jax.model.params import ModelParams


def attention_weights(
    params: ModelParams,
    captured: Mapping[str, Tree],
    cache: KVCache,
    layer: int,
    slots: jax.Array,
    num_new: jax.Array,
    queries: jax.Array,
) -> AttentionWeights:
    """Compute the weights that the heads of a layer give to keys, for some tokens of a pass.

    They are computed again in plain JAX, from the input of the layer and the cache before the pass; entries that were
    patched in the pass are those before the patch.

    Args:
      params: the model's weights.
      captured: of the pass, by ``forward``, with "inputs" or "inputs.attention"; and "picks" if it is a CSA layer.
      cache: as ``forward`` was given it, not as it came back.
      layer: static number of the layer.
      slots, num_new: as ``forward`` was given them.
      queries: int32 [B, Q], numbers of tokens among the new ones; -1 = none, as is one past its row's num_new. On the
        way a query takes up to 2 MB, at V4's sizes.

    Returns:
      The weights, 0 for a query that is none. They are NaN for a number that is of no token of the pass, and for all
      tokens of a row if the cache is not that before the pass: the row has no grant of its tokens there, or its window
      in this layer holds them already.

    Raises:
      AssertionError: (chex) an argument's rank, shape or dtype is wrong.
      ValueError: something was not captured, or there is no such layer.
    """
    check_type("params", params, ModelParams)
    kind, index = cache.locate(layer)
    if "inputs.attention" in captured:
        x = captured["inputs.attention"][layer]
    elif "inputs" in captured:
        x = captured["inputs"][layer, 0]
    else:
        raise ValueError(f"captured must have 'inputs', it has {sorted(captured)}")
    picks = None
    if kind.is_indexed:
        if "picks" not in captured:
            raise ValueError(f"captured must have 'picks', because layer {layer} is CSA, it has {sorted(captured)}")
        picks = captured["picks"][index]
    return of_layer(params.blocks[layer].attention, x, cache, layer, slots, num_new, queries, picks)
