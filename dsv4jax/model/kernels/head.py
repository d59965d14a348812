"""The product with the head, by the kernels of a layer's products."""

from __future__ import annotations

import functools

import jax
from jax.typing import DTypeLike

from dsv4jax.checks import Tree
from dsv4jax.layer.kernels.base import OfFamily, register, register_invariant
from dsv4jax.layer.kernels.products import InvariantProjectionsKernels, ProjectionsKernels
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import HEAD
from dsv4jax.weights.stored import Weight


class HeadKernels(OfFamily):
    """The product as ``pk.plan`` says: XLA is faster with a wide head as large as that of V4."""

    def unsupported(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        del cfg, weights, dtype
        return self.family.missing() or self.family.unsupported() or self.unchecked_order()

    def logits(self, x: jax.Array, head: Weight) -> jax.Array:
        products = InvariantProjectionsKernels if self.invariant else ProjectionsKernels
        return products(self.family).linear(x, head)


register(HEAD, HeadKernels)
register_invariant(HEAD, functools.partial(HeadKernels, invariant=True))
