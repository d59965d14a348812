"""dsv4jax: DeepSeek-V4's hybrid KV cache (sliding window + CSA + HCA) as an immutable pytree.

What one writes daily is here. The rest is in groups, which this import brings along: ``cache``, ``config``,
``flashmla``, ``model``, ``pieces``, ``porting``, ``requests``, ``sharding`` and ``weights``.

The rooms, and the modules beneath them; each imports from those below it alone:

generate  the command that generates texts with a checkpoint
model     a whole model around the cache; import dsv4jax.model
requests  whole requests: forks, drafts, snapshots, files
pieces    the pieces of a layer, jitted and donating what they update
porting   names of the PyTorch design that this library follows
serialization  pytrees in functions that jax.export has serialised
layer     storing new tokens, picking entries, attending to them
sharding  how a cache and the weights of its layers are split over a mesh
cache     windows, entries, tables, and the calls that drive them
weights   the weights of a layer, and checkpoints

plan      the shapes and bytes of a cache, and what a shard's share of them is
tails     what compressors keep between steps, and how entries come of it
formats   how a row becomes bytes and comes back
flashmla  conversion to and from FlashMLA's pages
config    the sizes of a model, and the kind of each of its layers
kinds     what tells one kind of layer from another
derivatives  straight through rounding, or refused
indexing  reads and writes of stacked leaves by layer, request and row
rope      rotary positions and YaRN
checks    shapes and dtypes at trace time
reprs     how pytrees print
"""

import functools
import importlib.metadata
import sys
import warnings
from typing import TYPE_CHECKING, Any

import dsv4jax.layer.invariant.products as _invariant_products  # noqa: F401  imported to register them
import dsv4jax.layer.invariant.reads as _invariant_reads  # noqa: F401  the same
import dsv4jax.layer.invariant.update as _invariant_update  # noqa: F401  the same
import dsv4jax.layer.kernels.fused as _fused  # noqa: F401  imported to register the kernels
import dsv4jax.layer.kernels.reads as _read_kernels  # noqa: F401  the same
import dsv4jax.layer.kernels.triton as _triton  # noqa: F401  the same, in Triton
import dsv4jax.serialization as _serialization  # noqa: F401  registers the pytrees with jax.export
from dsv4jax import cache as cache
from dsv4jax import config as config
from dsv4jax import flashmla as flashmla
from dsv4jax import model as model
from dsv4jax import pieces as pieces
from dsv4jax import porting as porting
from dsv4jax import requests as requests
from dsv4jax import sharding as sharding
from dsv4jax import weights as weights
from dsv4jax.cache.cache import KVCache, admit, advance, prepare_forward, release
from dsv4jax.cache.checked import checked
from dsv4jax.cache.create import init_cache
from dsv4jax.cache.inspection import describe, verify
from dsv4jax.cache.pool import PagedPool
from dsv4jax.cache.state import StateCache
from dsv4jax.config import DSV4Config
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import OpBackends, backends
from dsv4jax.layer.handle import acquire
from dsv4jax.layer.layer import attention_layer, attention_layer_at
from dsv4jax.layer.projections import linear
from dsv4jax.layer.sequence import attention
from dsv4jax.plan import CachePlan, plan_cache
from dsv4jax.requests.fork import fork
from dsv4jax.requests.snapshot import extract, insert
from dsv4jax.requests.speculate import commit, stage
from dsv4jax.weights.initial import init_attention_params
from dsv4jax.weights.load import load_attention_params
from dsv4jax.weights.params import AttentionParams

try:
    __version__ = importlib.metadata.version("dsv4jax")
except importlib.metadata.PackageNotFoundError:  # run from a folder, not installed
    __version__ = "unknown"

__all__ = [
    "AttentionParams",
    "AttentionType",
    "CachePlan",
    "DSV4Config",
    "KVCache",
    "OpBackends",
    "PagedPool",
    "StateCache",
    "acquire",
    "admit",
    "advance",
    "attention",
    "attention_layer",
    "attention_layer_at",
    "backends",
    "checked",
    "commit",
    "describe",
    "extract",
    "fork",
    "init_attention_params",
    "init_cache",
    "insert",
    "linear",
    "load_attention_params",
    "plan_cache",
    "prepare_forward",
    "release",
    "stage",
    "verify",
]

_GROUPS = ("cache", "config", "flashmla", "model", "pieces", "porting", "requests", "sharding", "weights")

# Names that stood here before the groups, by their group. Version 0.1 still has them; version 0.2 will not.
_GROUPED = {
    "cache": "CacheReport Grants LayerStack PooledLayer Refusal SlidingWindow Tables "
    "abstract_cache explain_forward prepare_rows",
    "config": "LayerSpec layer_schedule",
    "flashmla": "from_flashmla_pages to_flashmla_pages",
    "pieces": "append_swa append_tail decode_attention flush_csa flush_hca gather_all_compressed gather_compressed "
    "gather_swa reset_hca reset_slots rotate_csa select_entries",
    "porting": "LayerCacheHandle LayerCacheSchema build_schema compute_block_budget",
    "requests": "Snapshot StagedLayer restore save",
    "sharding": "params_specs partition_specs shard_of shardings",
    "weights": "StoredWeight load_safetensors",
}
_MOVED = {name: f"{group}.{name}" for group, names in _GROUPED.items() for name in names.split()}
_MOVED |= {"memory_bytes": "cache.tree_bytes", "project": "linear"}

if not TYPE_CHECKING:  # a type checker reports old names as unknown

    def __getattr__(name: str) -> Any:
        if name not in _MOVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"dsv4jax.{name} is now dsv4jax.{_MOVED[name]}", DeprecationWarning, stacklevel=2)
        return functools.reduce(getattr, _MOVED[name].split("."), sys.modules[__name__])


def __dir__() -> list[str]:
    return [*__all__, *_GROUPS, "__version__"]
