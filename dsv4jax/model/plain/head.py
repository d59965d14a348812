"""The product with the head: logits of tokens, in plain JAX."""

from __future__ import annotations

import jax

from dsv4jax.layer.backend import XLA, Anywhere
from dsv4jax.layer.dense import wide_product
from dsv4jax.model.ops import HEAD


class XLAHead(Anywhere):
    """Logits in plain JAX."""

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        return wide_product(x, head)


HEAD.register(XLA, XLAHead())
