"""dsv4jax: DeepSeek-V4's hybrid KV cache (sliding window + CSA + HCA) as an immutable pytree."""

from dsv4jax.cache.cache import (
    KVCache,
    LayerStack,
    abstract_cache,
    admit,
    advance,
    init_cache,
    memory_bytes,
    prepare_forward,
    release,
)
from dsv4jax.cache.inspection import CacheReport, describe, verify
from dsv4jax.cache.pool import PagedPool, PooledLayer, gather_all_compressed, gather_compressed
from dsv4jax.cache.sharding import params_specs, partition_specs, shardings
from dsv4jax.cache.state import SlidingWindow, StateCache, gather_swa, reset_slots
from dsv4jax.cache.tables import Tables
from dsv4jax.config import AttentionType, DSV4Config, LayerSpec, layer_schedule
from dsv4jax.flashmla import from_flashmla_pages, to_flashmla_pages
from dsv4jax.layer.attention import decode_attention
from dsv4jax.layer.backend import OpBackends, backends
from dsv4jax.layer.flush import append_swa, append_tail, flush_csa, flush_hca, reset_hca, rotate_csa
from dsv4jax.layer.handle import LayerCacheHandle, acquire
from dsv4jax.layer.indexer import select_entries
from dsv4jax.layer.layer import attention_layer, attention_layer_at
from dsv4jax.plan import CachePlan, LayerCacheSchema, build_schema, compute_block_budget, plan_cache
from dsv4jax.requests.fork import fork
from dsv4jax.requests.snapshot import Snapshot, extract, insert
from dsv4jax.requests.speculate import StagedLayer, commit, stage
from dsv4jax.requests.storage import restore, save
from dsv4jax.weights.checkpoint import load_safetensors
from dsv4jax.weights.params import AttentionParams, init_attention_params, load_attention_params

__all__ = [
    "AttentionParams",
    "AttentionType",
    "CachePlan",
    "CacheReport",
    "DSV4Config",
    "KVCache",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerSpec",
    "LayerStack",
    "OpBackends",
    "PagedPool",
    "PooledLayer",
    "SlidingWindow",
    "Snapshot",
    "StagedLayer",
    "StateCache",
    "Tables",
    "abstract_cache",
    "acquire",
    "admit",
    "advance",
    "append_swa",
    "append_tail",
    "attention_layer",
    "attention_layer_at",
    "backends",
    "build_schema",
    "commit",
    "compute_block_budget",
    "decode_attention",
    "describe",
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
