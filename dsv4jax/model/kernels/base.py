"""What all implementations of the model's ops that call ``pallas_kernels`` have in common."""

from __future__ import annotations

import abc

import jax
from jax.typing import DTypeLike

from dsv4jax.checks import Tree
from dsv4jax.layer.kernels.base import OfFamily
from dsv4jax.model.config import ModelConfig
from dsv4jax.weights.deltas import has_delta


class ModelKernels(OfFamily):
    """The kernels of one op of a model, of one family. ``dsv4jax.layer.kernels.base.register`` registers them."""

    def unsupported(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        reason = self.family.missing()
        if reason is None and any(map(has_delta, jax.tree.leaves(weights, is_leaf=has_delta))):
            reason = "weights with low-rank deltas have no kernel"
        if reason is None:
            reason = self.unserved(cfg, weights, dtype)
        return self.family.unsupported() if reason is None else reason

    @abc.abstractmethod
    def unserved(self, cfg: ModelConfig, weights: Tree, dtype: DTypeLike) -> str | None:
        """Return why no kernel serves these weights, or None if one does; for the arguments see ``ModelOp``."""
