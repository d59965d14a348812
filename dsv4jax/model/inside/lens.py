"""What the head makes of the streams after any layer."""

from __future__ import annotations

import jax

from dsv4jax.checks import FLOATS, check_array, check_type
from dsv4jax.layer.backend import XLA
from dsv4jax.model.ops import HEAD
from dsv4jax.model.params import ModelParams
from dsv4jax.model.plain.hyper_connections import head_input


@jax.jit
def logit_lens(params: ModelParams, streams: jax.Array) -> jax.Array:
    """Return the logits f32 [..., V] that the head makes of streams, as if they were those after the last layer.

    Args:
      params: the model's weights.
      streams: float [..., n, hidden], such as ``captured["streams"]`` of a pass [L, B, T, n, hidden], or a part of it:
        of all tokens of all layers the logits take L * B * T * V * 4 bytes.

    Raises:
      AssertionError: (chex) the shape or dtype is wrong.
      ValueError: params are something else.
    """
    check_type("params", params, ModelParams)
    cfg = params.cfg
    check_array("streams", streams, {"...": ..., "n": cfg.num_streams, "hidden": cfg.hidden_size}, FLOATS)
    x = head_input(streams, params.final_mix, params.final_norm, cfg).x
    return HEAD.of(XLA, cfg, params.head, x.dtype).logits(x, params.head)
