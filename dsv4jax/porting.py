"""Names of the PyTorch design that this library follows, for those who port code from it; see docs/porting.md.

Its other names are where one uses them daily: ``AttentionType``, ``StateCache``, ``PagedPool``, ``prepare_forward`` and
``acquire`` at the top, ``LayerSpec`` and ``layer_schedule`` in ``config``, and its kernels in ``pieces``.
"""

from dsv4jax.layer.handle import ClassicalView, IndexerView, LayerCacheHandle, SWAView
from dsv4jax.plan import LayerCacheSchema, build_schema, compute_block_budget

__all__ = [
    "ClassicalView",
    "IndexerView",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "SWAView",
    "build_schema",
    "compute_block_budget",
]
