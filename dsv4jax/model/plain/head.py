"""The product with the head: logits of tokens, in plain JAX."""

from __future__ import annotations

import jax

from dsv4jax.layer.backend import XLA, Anywhere
from dsv4jax.layer.projections import linear
from dsv4jax.model.ops import HEAD
from dsv4jax.weights.stored import Weight


class XLAHead(Anywhere):
    """Logits in plain JAX."""

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        return linear(x, head, backend=XLA)


HEAD.register(XLA, XLAHead())
