"""The library's pytrees: how they print, and how they are written in functions that ``jax.export`` has serialised.

An exported function carries the structure of its arguments and results: which pytrees they are, and the static fields
of each. Those are written here as JSON: a plan, a configuration, a layer's number, a kind, a backend. Importing
``dsv4jax`` is enough, where a function is serialised and where it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import jax.export
import jax.numpy as jnp
import numpy as np

from dsv4jax.cache.cache import KVCache
from dsv4jax.cache.grants import Grants
from dsv4jax.cache.pool import ExactEntries, PagedPool, PooledLayer
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import SlidingWindow, StateCache
from dsv4jax.cache.tables import Tables
from dsv4jax.config import DSV4Config, Json
from dsv4jax.formats import KeyRows, KVRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import OpBackends
from dsv4jax.layer.handle import ClassicalView, IndexerView, LayerCacheHandle, SWAView
from dsv4jax.plan import CachePlan, LayerCacheSchema
from dsv4jax.reprs import print_compactly
from dsv4jax.requests.snapshot import Snapshot
from dsv4jax.requests.speculate import StagedLayer
from dsv4jax.tails import CSATail, HCAOnlineTail, HCATail, Streams
from dsv4jax.weights.deltas import Delta, WeightWithDelta
from dsv4jax.weights.params import AttentionParams, CompressorParams, IndexerParams, PoolParams
from dsv4jax.weights.stored import StoredWeight

PYTREES: tuple[type, ...] = (
    *(AttentionParams, CompressorParams, IndexerParams, PoolParams, StoredWeight, WeightWithDelta, Delta),
    *(KVCache, LayerStack, StateCache, PagedPool, Tables, KVRows, KeyRows, CSATail, HCATail, HCAOnlineTail),
    *(LayerCacheHandle, SWAView, ClassicalView, IndexerView, SlidingWindow, PooledLayer, ExactEntries, Streams),
    *(Snapshot, StagedLayer, Grants, Batch),
)

# What static fields may hold besides JSON's own, by the name under which it is written.
_VALUES = {cls.__name__: cls for cls in (CachePlan, DSV4Config, LayerCacheSchema, OpBackends)}


def _to_json(value: Json) -> Json:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, AttentionType):
        return {"kind": value.value}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    return [_to_json(one) for one in value] if isinstance(value, tuple) else value


def _from_json(value: Json) -> Json:
    if isinstance(value, list):
        return tuple(_from_json(one) for one in value)
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "dtype":
        return jnp.dtype(content)
    if name == "kind":
        return AttentionType(content)
    return _VALUES[name](**{field: _from_json(one) for field, one in content.items()})


def _serialize(static: Sequence[Json]) -> bytes:
    return json.dumps([_to_json(value) for value in static], default=lambda number: number.item()).encode()


def _deserialize(written: bytes | bytearray) -> tuple[Json, ...]:
    return _from_json(json.loads(bytes(written)))


print_compactly(*PYTREES)
for _pytree in PYTREES:
    jax.export.register_pytree_node_serialization(
        _pytree,
        serialized_name=f"dsv4jax.{_pytree.__name__}",
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )
