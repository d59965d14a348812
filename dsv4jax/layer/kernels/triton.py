"""Implementations of the ops that call ``pallas_kernels.triton_gpu``: kernels in Triton, for GPUs since Ampere.

They translate arguments as those of ``kernels`` do. Nothing of Triton is imported before one of them is used, because
it is in an extra of its own. What has no kernel here is left to XLA: queries, and moves of tails.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.state import StateCache
from dsv4jax.formats import KeyRows
from dsv4jax.layer.backend import TRITON, XLA
from dsv4jax.layer.kernels.base import Family
from dsv4jax.layer.kernels.cache import CacheUpdateKernels, GatherRowsKernels
from dsv4jax.layer.kernels.reads import DecodeAttentionKernels, IndexerScoresKernels, TopKKernels
from dsv4jax.layer.ops import CACHE_UPDATE, DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, TOP_K
from dsv4jax.plan import CachePlan
from pallas_kernels.language import target

OLDEST = 8.0  # compute capability
EXTRA = 'the extra "triton": pip install "jax-triton==0.3.1" "triton==3.6.0"'

_warned: set[str] = set()  # kinds of GPUs that were named in a warning


class MissingExtraWarning(UserWarning):
    """The GPU would run kernels in Triton, but their extra is not installed, so that XLA runs instead. Given once."""


def _is_interpreted() -> bool:
    """Whether Triton interprets its kernels on the host in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _missing() -> str | None:
    """Return which extra is missing, or None."""
    needed = ("triton",) if _is_interpreted() else ("triton", "jax_triton")
    return None if all(map(importlib.util.find_spec, needed)) else f"it needs {EXTRA}"


def _unsupported_device() -> str | None:
    """Return why the device that is compiled for cannot run Triton's kernels, or None if it can."""
    device = target.device()
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the target is {device.platform}"
    capability = str(getattr(device, "compute_capability", ""))
    try:
        is_served = float(capability) >= OLDEST
    except ValueError:
        is_served = False
    if is_served:
        return None
    return f"it needs compute capability {OLDEST} or newer, {device.device_kind} has {capability}"


def is_default() -> bool:
    """Whether ops choose Triton by themselves here: on GPUs that the kernels of ``kernels`` do not serve.

    Warns once if the extra is all that is missing.
    """
    if _unsupported_device() is not None or target.gpu() is not None:
        return False
    if _missing() is None:
        return True
    kind = str(target.device().device_kind)
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"on {kind} dsv4jax has kernels in Triton, but runs in plain JAX, which is slower: it lacks {EXTRA}",
            MissingExtraWarning,
            stacklevel=2,
        )
    return False


def _load() -> ModuleType:
    from pallas_kernels import triton_gpu  # its modules import Triton

    return triton_gpu


IN_TRITON = Family(
    backend=TRITON,
    load=_load,
    missing=_missing,
    unsupported=lambda: None if _is_interpreted() else _unsupported_device(),
)


class TritonCacheUpdate(CacheUpdateKernels):
    """The cache update in two launches, or one for SWA."""

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        return CACHE_UPDATE[XLA].rotate_csa(state, index, slots, complete)

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        return CACHE_UPDATE[XLA].reset_hca(state, index, slots, complete)


class TritonIndexerScores(IndexerScoresKernels):
    """The scores. XLA makes the queries."""

    def queries(
        self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | KeyRows:
        product = self.without_derivative(INDEXER_SCORES, product)
        return INDEXER_SCORES[XLA].queries(product, positions, freqs, plan)


class TritonDecodeAttention(DecodeAttentionKernels):
    """Attention. XLA makes the queries."""

    forms = ("plain",)

    def queries(
        self,
        product: jax.Array,
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        product = self.without_derivative(DECODE_ATTENTION, product)
        return DECODE_ATTENTION[XLA].queries(product, positions, freqs, plan, needed).astype(jnp.float16)


CACHE_UPDATE.register(TRITON, TritonCacheUpdate(IN_TRITON), if_unnamed=is_default)
GATHER_ROWS.register(TRITON, GatherRowsKernels(IN_TRITON), if_unnamed=is_default)
INDEXER_SCORES.register(TRITON, TritonIndexerScores(IN_TRITON), if_unnamed=is_default)
TOP_K.register(TRITON, TopKKernels(IN_TRITON), if_unnamed=is_default)
DECODE_ATTENTION.register(TRITON, TritonDecodeAttention(IN_TRITON), if_unnamed=is_default)
