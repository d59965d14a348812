"""dsv4jax: DeepSeek-V4's hybrid KV cache (sliding window + CSA + HCA) as an immutable pytree.

The rooms, and the modules beneath them; each imports from those below it alone:

generate  the command that generates texts with a checkpoint
model     a whole model around the cache; import dsv4jax.model
requests  whole requests: forks, drafts, snapshots, files
pieces    the pieces of a layer, jitted and donating what they update
serialization  pytrees in functions that jax.export has serialised
layer     storing new tokens, picking entries, attending to them
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
linear    matrix product, norm and Hadamard transform
checks    shapes and dtypes at trace time
reprs     how pytrees print
"""

import importlib.metadata

import dsv4jax.layer.kernels.fused as _fused  # noqa: F401  imported to register the kernels
import dsv4jax.layer.kernels.reads as _read_kernels  # noqa: F401  the same
import dsv4jax.layer.kernels.triton as _triton  # noqa: F401  the same, in Triton
import dsv4jax.serialization as _serialization  # noqa: F401  registers the pytrees with jax.export
from dsv4jax import model as model
from dsv4jax.cache.cache import KVCache, admit, advance, memory_bytes, prepare_forward, release
from dsv4jax.cache.checked import checked
from dsv4jax.cache.create import abstract_cache, init_cache
from dsv4jax.cache.grants import Grants, Refusal, explain_forward, prepare_rows
from dsv4jax.cache.inspection import CacheReport, describe, verify
from dsv4jax.cache.pool import PagedPool, PooledLayer
from dsv4jax.cache.sharding import partition_specs, shardings
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow, StateCache
from dsv4jax.cache.tables import Tables
from dsv4jax.config import DSV4Config, LayerSpec, layer_schedule
from dsv4jax.flashmla import from_flashmla_pages, to_flashmla_pages
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import OpBackends, backends
from dsv4jax.layer.handle import LayerCacheHandle, acquire
from dsv4jax.layer.layer import attention_layer, attention_layer_at
from dsv4jax.layer.projections import project
from dsv4jax.layer.sequence import attention
from dsv4jax.pieces import (
    append_swa,
    append_tail,
    decode_attention,
    flush_csa,
    flush_hca,
    gather_all_compressed,
    gather_compressed,
    gather_swa,
    reset_hca,
    reset_slots,
    rotate_csa,
    select_entries,
)
from dsv4jax.plan import CachePlan, LayerCacheSchema, build_schema, compute_block_budget, plan_cache
from dsv4jax.requests.fork import fork
from dsv4jax.requests.snapshot import Snapshot, extract, insert
from dsv4jax.requests.speculate import StagedLayer, commit, stage
from dsv4jax.requests.storage import restore, save
from dsv4jax.weights.checkpoint import load_safetensors
from dsv4jax.weights.initial import init_attention_params
from dsv4jax.weights.load import load_attention_params
from dsv4jax.weights.params import AttentionParams, params_specs
from dsv4jax.weights.stored import StoredWeight

try:
    __version__ = importlib.metadata.version("dsv4jax")
except importlib.metadata.PackageNotFoundError:  # run from a folder, not installed
    __version__ = "unknown"

__all__ = [
    "AttentionParams",
    "AttentionType",
    "CachePlan",
    "CacheReport",
    "DSV4Config",
    "Grants",
    "KVCache",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "LayerStack",
    "OpBackends",
    "PagedPool",
    "PooledLayer",
    "Refusal",
    "SlidingWindow",
    "Snapshot",
    "StagedLayer",
    "StateCache",
    "StoredWeight",
    "Tables",
    "abstract_cache",
    "acquire",
    "admit",
    "advance",
    "append_swa",
    "append_tail",
    "attention",
    "attention_layer",
    "attention_layer_at",
    "backends",
    "build_schema",
    "checked",
    "commit",
    "compute_block_budget",
    "decode_attention",
    "describe",
    "explain_forward",
    "extract",
    "flush_csa",
    "flush_hca",
    "fork",
    "from_flashmla_pages",
    "gather_all_compressed",
    "gather_compressed",
    "gather_swa",
    "init_attention_params",
    "init_cache",
    "insert",
    "layer_schedule",
    "load_attention_params",
    "load_safetensors",
    "memory_bytes",
    "params_specs",
    "partition_specs",
    "plan_cache",
    "prepare_forward",
    "prepare_rows",
    "project",
    "release",
    "reset_hca",
    "reset_slots",
    "restore",
    "rotate_csa",
    "save",
    "select_entries",
    "shardings",
    "stage",
    "to_flashmla_pages",
    "verify",
]
