"""Weights of one attention layer: their pytree, shapes and shards.

Linear weights have the orientation of the checkpoint, [out, in]. What one input feeds stands side by side in one array,
so that a layer multiplies each input once and no step copies weights together. Properties give the parts under the
names that they have in checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dsv4jax.checks import FLOATS, Tree, check_array
from dsv4jax.config import DSV4Config, layer_kind
from dsv4jax.derivatives import refuse_derivative
from dsv4jax.kinds import AttentionType
from dsv4jax.plan import axis_size, split_heads
from dsv4jax.weights.deltas import checked_base
from dsv4jax.weights.stored import (
    BLOCK,
    CODES,
    SCALES,
    Stored,
    StoredWeight,
    Weight,
    check_weight,
    is_stored,
    is_weight,
    join,
    num_blocks,
    rows_of,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolParams:
    """How a compressor makes an entry of its tokens, apart from its projections."""

    ape: jax.Array  # [ratio, width] bias of the gate, by position within the block
    norm: jax.Array  # [dim]

    @property
    def width(self) -> int:
        """Channels of a token's keys, and of its gates: 2 * dim for CSA, which has two streams, and dim for HCA."""
        return self.ape.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompressorParams:
    """Weights of a compressor. width is 2 * dim for CSA, which has two streams, and dim for HCA."""

    ape: jax.Array  # [ratio, width] bias of the gate, by position within the block
    kv: jax.Array  # [width, hidden]
    gate: jax.Array  # [width, hidden]
    norm: jax.Array  # [dim]

    @property
    def pool(self) -> PoolParams:
        return PoolParams(ape=self.ape, norm=self.norm)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexerParams:
    """Weights of the lightning indexer of a CSA layer."""

    q_b: Weight  # [indexer_heads * indexer_head_dim, q_lora_rank]
    head_weights: jax.Array  # [indexer_heads, hidden]
    compressor: CompressorParams  # dim = indexer_head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Weights of one attention layer. Those marked Weight are arrays, or FP8 with block scales (``StoredWeight``).

    Any linear weight may have low-rank deltas beside it (``WeightWithDelta``).

    ``q_a``, ``kv``, ``compressor`` and ``indexer`` are properties that cut the arrays; ``AttentionParams.join`` makes
    the arrays of such parts.
    """

    q_a_kv: Weight  # [q_lora_rank + head_dim, hidden], the rows of W_qa, then those of W_kv
    q_norm: jax.Array  # [q_lora_rank]
    kv_norm: jax.Array  # [head_dim]
    q_b: Weight  # [num_heads * head_dim, q_lora_rank]
    o_a: Weight  # [o_groups * o_lora_rank, num_heads * head_dim / o_groups]
    o_b: Weight  # [hidden, o_groups * o_lora_rank]
    sinks: jax.Array  # [num_heads]
    # [rows, hidden]: kv and gate of the compressor; for CSA then kv and gate of the indexer's compressor, and the
    # indexer's head weights. None for SWA.
    compress: jax.Array | None
    entry_pool: PoolParams | None  # of the compressor; None for SWA
    key_pool: PoolParams | None  # of the indexer's compressor; CSA only
    index_q_b: Weight | None  # [indexer_heads * indexer_head_dim, q_lora_rank]; CSA only

    @classmethod
    def join(cls, parts: Mapping[str, Tree]) -> AttentionParams:
        """Put weights side by side that come one by one.

        Args:
          parts: the name of a part, as in ``named_shapes``, -> array or StoredWeight.

        Raises:
          ValueError: of the weights that one input feeds, some are stored as FP8 and some are not.
        """

        def pool(name: str) -> PoolParams | None:
            return PoolParams(ape=parts[f"{name}.ape"], norm=parts[f"{name}.norm"]) if f"{name}.ape" in parts else None

        compress = [parts[name] for name in COMPRESS if name in parts]
        return cls(
            q_a_kv=join(parts["q_a"], parts["kv"]),
            q_norm=parts["q_norm"],
            kv_norm=parts["kv_norm"],
            q_b=parts["q_b"],
            o_a=parts["o_a"],
            o_b=parts["o_b"],
            sinks=parts["sinks"],
            compress=join(*compress) if compress else None,
            entry_pool=pool("compressor"),
            key_pool=pool("indexer.compressor"),
            index_q_b=parts.get("indexer.q_b"),
        )

    def split(self) -> dict[str, Weight]:
        """Return the weights one by one, by the name of their part: what ``join`` takes."""
        parts = {"q_a": self.q_a, "kv": self.kv}
        parts |= {name: getattr(self, name) for name in ("q_norm", "q_b", "kv_norm", "o_a", "o_b", "sinks")}
        for prefix, group in (("compressor", self.compressor), ("indexer", self.indexer)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(group, is_leaf=is_weight):
                parts[prefix + jax.tree_util.keystr(path)] = leaf
        return parts

    @property
    def q_a(self) -> Weight:
        """[q_lora_rank, hidden]."""
        return rows_of(self.q_a_kv, 0, self.q_norm.shape[0])

    @property
    def kv(self) -> Weight:
        """[head_dim, hidden]."""
        return rows_of(self.q_a_kv, self.q_norm.shape[0], self.q_a_kv.shape[0])

    @property
    def compressor(self) -> CompressorParams | None:
        """The compressor's weights; None for SWA."""
        return None if self.entry_pool is None else self._compressor(self.entry_pool, 0)

    @property
    def indexer(self) -> IndexerParams | None:
        """The indexer's weights; None for SWA and HCA."""
        if self.entry_pool is None or self.key_pool is None or self.compress is None:
            return None
        first = 2 * self.entry_pool.width
        heads = first + 2 * self.key_pool.width
        assert self.index_q_b is not None
        return IndexerParams(
            q_b=self.index_q_b,
            head_weights=rows_of(self.compress, heads, self.compress.shape[0]),
            compressor=self._compressor(self.key_pool, first),
        )

    def _compressor(self, pool: PoolParams, first: int) -> CompressorParams:
        """The compressor whose projections begin at a row of ``compress``."""
        middle, end = first + pool.width, first + 2 * pool.width
        kv, gate = rows_of(self.compress, first, middle), rows_of(self.compress, middle, end)
        return CompressorParams(ape=pool.ape, kv=kv, gate=gate, norm=pool.norm)


# What stands side by side in ``compress``, in order.
COMPRESS = (
    *("compressor.kv", "compressor.gate"),
    *("indexer.compressor.kv", "indexer.compressor.gate", "indexer.head_weights"),
)
# The weights that checkpoints store as FP8, one by one, and as leaves of AttentionParams.
QUANTISED = ("q_a", "q_b", "kv", "o_a", "o_b", "indexer.q_b")
ALWAYS_F32 = ("sinks", "ape")  # leaves that checkpoints store as float32
_WEIGHTS = ("q_a_kv", "q_b", "o_a", "o_b", "index_q_b")


def named_shapes(cfg: DSV4Config, kind: AttentionType) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a layer by the name of its part, in the order of checkpoints."""
    kind = AttentionType(kind)

    def compressor(name: str, dim: int) -> dict[str, tuple[int, ...]]:
        width = dim * (2 if kind.overlaps else 1)  # dim per stream
        linear = (width, cfg.hidden_size)
        return {
            f"{name}.ape": (cfg.ratio(kind), width),
            f"{name}.kv": linear,
            f"{name}.gate": linear,
            f"{name}.norm": (dim,),
        }

    heads = cfg.num_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a": (cfg.q_lora_rank, cfg.hidden_size),
        "q_norm": (cfg.q_lora_rank,),
        "q_b": (heads, cfg.q_lora_rank),
        "kv": (cfg.head_dim, cfg.hidden_size),
        "kv_norm": (cfg.head_dim,),
        "o_a": (cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups),
        "o_b": (cfg.hidden_size, cfg.o_groups * cfg.o_lora_rank),
        "sinks": (cfg.num_heads,),
    }
    if kind.compresses:
        shapes |= compressor("compressor", cfg.head_dim)
    if kind.is_indexed:
        shapes["indexer.q_b"] = (cfg.indexer_heads * cfg.indexer_head_dim, cfg.q_lora_rank)
        shapes["indexer.head_weights"] = (cfg.indexer_heads, cfg.hidden_size)
        shapes |= compressor("indexer.compressor", cfg.indexer_head_dim)
    return shapes


@functools.cache
def param_shapes(cfg: DSV4Config, kind: AttentionType, stored: Stored | None = None) -> AttentionParams:
    """Return the shapes of a layer's weights as ``ShapeDtypeStruct`` leaves, float32 where they are not stored FP8."""

    def part(name: str, shape: tuple[int, ...]) -> Tree:
        if stored is None or name not in QUANTISED:
            return jax.ShapeDtypeStruct(shape, jnp.float32)
        block = stored.block or BLOCK
        return StoredWeight(
            codes=jax.ShapeDtypeStruct(shape, CODES),  # type: ignore[arg-type]
            scales=jax.ShapeDtypeStruct(num_blocks(shape, block), SCALES),  # type: ignore[arg-type]
            block=block,
            activations=stored.of(name),
        )

    parts = {name: part(name, shape) for name, shape in named_shapes(cfg, kind).items()}
    return jax.eval_shape(AttentionParams.join, parts)


def params_specs(
    cfg: DSV4Config,
    layer: int,
    mesh: Mesh,
    axis: str = "model",
    weights: str = "wide",
    activations: str = "bf16",
    block: tuple[int, int] | None = None,
) -> AttentionParams:
    """Return a ``PartitionSpec`` for each weight of a layer whose heads are split over a mesh axis.

    Args:
      cfg: the model's sizes.
      layer: number of the layer in the model.
      mesh: the devices.
      axis: the mesh axis over which heads are split.
      weights: "wide" (or "bf16" or "f32", which is the same here), the default as for ``init_attention_params``; or
        "stored" for weights that are FP8 with block scales. Scales are split as their codes are.
      activations, block: of stored weights, as they were loaded. ``block`` is 128 x 128 if None.

    Raises:
      ValueError: the mesh does not have the axis, the heads do not divide by its size, a shard would cut a block, an
        option is unknown, or there is no such layer.
    """
    shards = axis_size(mesh, axis)
    split_heads(cfg, shards, axis)
    shapes = param_shapes(cfg, layer_kind(cfg, layer), Stored.choose(weights, activations, block))
    split = {"q_b": P(axis), "sinks": P(axis), "o_a": P(axis), "o_b": P(None, axis)}
    for name, spec in split.items():
        weight, along = getattr(shapes, name), len(spec) - 1
        if isinstance(weight, StoredWeight) and shards > 1 and weight.shape[along] // shards % weight.block[along]:
            raise ValueError(
                f"{name}: a shard of mesh axis {axis!r} would have {weight.shape[along] // shards} of "
                f"{weight.shape[along]} {('rows', 'columns')[along]}, which cuts blocks of {weight.block[along]}"
            )
    whole = jax.tree.map(lambda _: P(), shapes)
    specs = {name: jax.tree.map(lambda _, spec=spec: spec, getattr(shapes, name)) for name, spec in split.items()}
    return dataclasses.replace(whole, **specs)


def check_params(params: AttentionParams, cfg: DSV4Config, kind: AttentionType) -> None:
    """Check that these are the weights of a layer of this kind, wide or stored.

    Raises:
      ValueError: they belong to another kind of layer, or a stored weight has an unknown ``block`` or ``activations``.
      AssertionError: (chex) an array's shape or dtype is wrong.
    """
    of_kinds = {kind: param_shapes(cfg, kind) for kind in AttentionType}
    _check_weights("params", params, of_kinds, kind)


def check_compressors(
    params: CompressorParams, indexer: IndexerParams | None, cfg: DSV4Config, kind: AttentionType
) -> None:
    """As ``check_params``, for the compressor and the indexer of a layer."""
    shapes = {kind: param_shapes(cfg, kind) for kind in AttentionType}
    _check_weights("params", params, {kind: each.compressor for kind, each in shapes.items()}, kind)
    _check_weights("indexer", indexer, {kind: each.indexer for kind, each in shapes.items()}, kind)


def _check_weights(name: str, weights: object, of_kinds: Mapping[AttentionType, Tree], kind: AttentionType) -> None:
    """Check weights against the shapes of their kind. Those of the other kinds are for the message."""
    expected, tree = jax.tree_util.tree_flatten_with_path(of_kinds[kind])
    leaves, found = jax.tree.flatten(weights, is_leaf=is_weight)
    if found != tree:
        given = _said(weights, of_kinds, kind)
        raise ValueError(f"{name}: expected the weights of a {kind.upper()} layer, got {given}")
    for (path, spec), leaf in zip(expected, leaves, strict=True):
        full = f"{name}{jax.tree_util.keystr(path)}"
        if len(spec.shape) == 2:
            full, leaf = checked_base(full, leaf, spec.shape)
        if path[-1].name in _WEIGHTS:
            check_weight(full, leaf, spec.shape)
        else:
            check_array(full, leaf, {f"axis {i}": size for i, size in enumerate(spec.shape)}, FLOATS)


def _said(weights: object, of_kinds: Mapping[AttentionType, Tree], kind: AttentionType) -> str:
    """What weights are that have another form than those of a kind."""
    found = jax.tree.structure(weights, is_leaf=is_weight)
    for other, shapes in of_kinds.items():
        if jax.tree.structure(shapes) == found:
            return "none" if weights is None else f"those of a {other.upper()} layer"
    if type(weights) is not type(of_kinds[kind]):
        return f"a {type(weights).__name__}"

    def paths(tree: object) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_weight)
        return {jax.tree_util.keystr(path).removeprefix(".") for path, _ in leaves}

    wanted, given = paths(of_kinds[kind]), paths(weights)
    said = [("without", wanted - given), ("with", given - wanted)]
    return f"{type(weights).__name__} " + " and ".join(f"{word} {sorted(names)}" for word, names in said if names)


def frozen_where_stored(params: AttentionParams) -> AttentionParams:
    """The weights as they are; differentiating by one that is stored as FP8 is a ValueError that names it."""

    def refuse(path: jax.tree_util.KeyPath, weight: Weight) -> Weight:
        if not isinstance(weight, StoredWeight):
            return weight
        name = f"params{jax.tree_util.keystr(path)}"
        remedy = "differentiate by x or by what dsv4jax.model.partition calls trainable, or load weights='wide'"
        message = f"{name} is stored as FP8 and has no derivative: {remedy}"
        return refuse_derivative(message, weight)

    return jax.tree_util.tree_map_with_path(refuse, params, is_leaf=is_stored)
