"""The shapes and bytes of a cache, computed from a configuration: schemas, block budget and plan.

    per request and layer    window rows and positions, tails of the compressors         (StateCache)
    per block and layer      entry rows, indexer keys; a block is 128 tokens everywhere  (PagedPool)
    per request              length, row of the block table                              (Tables)

Planning is plain Python arithmetic on the host and does not touch a device. A plan is hashable, and is a static part of
the cache's pytree.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv4jax.checks import check_dtype, check_type, integer, real
from dsv4jax.config import DSV4Config, layer_kind, layer_schedule
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, KeyFormat, KeyRows, KVFormat, KVRows, row_bytes
from dsv4jax.kinds import AttentionType
from dsv4jax.tails import HCA_TAILS, CSATail, Tail, tail_specs

MAX_CONTEXT = 1 << 24  # rope angles are fp32, which represents every integer up to here exactly
TAIL_DTYPES = ("float32", "bfloat16")  # narrower dtypes cannot represent -1e9, the gate of an empty slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSchema:
    """Cache layout of one layer, counted in entries. The bytes also depend on the plan's formats."""

    layer_idx: int
    attn_type: AttentionType
    compression_ratio: int  # tokens per entry; 0 for SWA
    entries_per_block: int
    entry_head_dim: int
    rope_dim: int
    indexer_entries_per_block: int  # CSA only, else 0
    indexer_head_dim: int
    swa_window_size: int
    tail_buffer_size_a: int  # rows kept of the current block, per stream
    tail_buffer_size_b: int  # rows kept of the previous block's b-stream (CSA only)


def build_schema(cfg: DSV4Config, layer: int) -> LayerCacheSchema:
    """Return the schema of layer number ``layer``. Raises ValueError if the model has no such layer."""
    kind, layer = layer_kind(cfg, layer), integer("layer", layer)
    ratio = cfg.ratio(kind)
    per_block = cfg.block_tokens // ratio if ratio else 0
    return LayerCacheSchema(
        layer_idx=layer,
        attn_type=kind,
        compression_ratio=ratio,
        entries_per_block=per_block,
        entry_head_dim=cfg.head_dim,
        rope_dim=cfg.rope_dim,
        indexer_entries_per_block=per_block if kind.is_indexed else 0,
        indexer_head_dim=cfg.indexer_head_dim if kind.is_indexed else 0,
        swa_window_size=cfg.sliding_window,
        tail_buffer_size_a=ratio,
        tail_buffer_size_b=ratio if kind.overlaps else 0,
    )


def compute_block_budget(cfg: DSV4Config, max_context: int, max_requests: int, headroom: float = 1.10) -> int:
    """Blocks for ``max_requests`` requests of ``max_context`` tokens, times the headroom; both roundings go up.

    One number serves every layer, because one block table does. 0 where no layer is compressed.

    Raises:
      ValueError: max_context or max_requests is no integer, or negative; headroom is no positive finite number.
    """
    max_context, max_requests = integer("max_context", max_context, 0), integer("max_requests", max_requests, 0)
    if not 0 < real("headroom", headroom) < math.inf:
        raise ValueError(f"headroom must be finite and positive, got {headroom}")
    if not any(cfg.compress_ratios):
        return 0
    per_request = -(-max_context // cfg.block_tokens)
    # Exact arithmetic is needed: 10 * 1.1 in binary floats is 11.000000000000002, whose ceiling is 12.
    return math.ceil(max_requests * per_request * Fraction(str(headroom)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CachePlan:
    """What is known about a cache before it exists: sizes, formats and bytes. Build it with ``plan_cache``."""

    cfg: DSV4Config
    max_requests: int
    max_context: int
    kv_format: str
    indexer_format: str
    tail_dtype: np.dtype
    hca_tail: str
    num_blocks: int
    invariant: bool = False  # whether what a request gets does not depend on the batch, bit for bit

    @property
    def max_blocks(self) -> int:
        """The largest number of blocks that one request can hold, which is the width of the block table."""
        return -(-self.max_context // self.cfg.block_tokens)

    @property
    def rows(self) -> KVFormat:
        """The format named by ``kv_format``, in which window rows and entries are stored."""
        return KV_FORMATS[self.kv_format]

    @property
    def keys(self) -> KeyFormat:
        """The format named by ``indexer_format``, in which indexer keys are stored."""
        return INDEXER_FORMATS[self.indexer_format]

    @property
    def min_ratio(self) -> int:
        """Smallest nonzero compress ratio of the layers; 0 if no layer is compressed.

        Layers of this ratio fill their blocks with entries first.
        """
        return min((ratio for ratio in self.cfg.compress_ratios if ratio), default=0)

    def layers(self, kind: AttentionType) -> tuple[int, ...]:
        """Return the numbers of all layers of a kind, in order.

        A layer's index in this tuple is its index in the stack.
        """
        return tuple(spec.layer_idx for spec in layer_schedule(self.cfg) if spec.attn == kind)

    def entries_per_block(self, kind: AttentionType) -> int:
        """Return the number of entries per block in a layer of this kind; 0 for SWA."""
        ratio = self.cfg.ratio(kind)
        return self.cfg.block_tokens // ratio if ratio else 0

    def schema(self, layer: int) -> LayerCacheSchema:
        """Return the cache layout of layer number ``layer``, as ``build_schema`` does."""
        return build_schema(self.cfg, layer)

    @property
    def row_spec(self) -> KVRows:
        """One encoded row of a window or pool, as ``jax.ShapeDtypeStruct`` leaves."""
        return self.rows.row(self.cfg.head_dim - self.cfg.rope_dim, self.cfg.rope_dim)

    @property
    def key_spec(self) -> KeyRows:
        """One encoded indexer key, as ``jax.ShapeDtypeStruct`` leaves."""
        return self.keys.row(self.cfg.indexer_head_dim)

    def tail_specs(self, kind: AttentionType) -> tuple[Tail | None, CSATail | None]:
        """Return the shapes of one request's tails in a layer of this kind, as ``tails.tail_specs`` does."""
        return tail_specs(self.cfg, AttentionType(kind), self.tail_dtype, self.hca_tail)

    def state_bytes(self, kind: AttentionType) -> dict[str, int]:
        """Return the bytes of one request's state in one layer of this kind, by part."""
        parts = {"window": self.cfg.sliding_window * (row_bytes(self.row_spec) + 4)}
        for name, tail in zip(("tail", "indexer tail"), self.tail_specs(kind), strict=True):
            if tail is not None:
                parts[name] = row_bytes(tail)
        return parts

    def block_bytes(self, kind: AttentionType) -> dict[str, int]:
        """Return the bytes of one block in one layer of this kind, by part."""
        kind = AttentionType(kind)
        count, parts = self.entries_per_block(kind), {}
        if kind.compresses:
            parts["entries"] = count * row_bytes(self.row_spec)
        if kind.is_indexed:
            parts["indexer keys"] = count * row_bytes(self.key_spec)
        return parts

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in the pools of all layers together."""
        return sum(len(self.layers(kind)) * sum(self.block_bytes(kind).values()) for kind in AttentionType)

    @property
    def bytes_per_token(self) -> float:
        """Pool bytes per token of context in all layers together: the bytes of a block divided by its tokens (128)."""
        return self.bytes_per_block / self.cfg.block_tokens

    @property
    def _table_row_bytes(self) -> int:
        return 4 * self.max_blocks + 3 * 4 + 1  # block table row; length, granted length, block count; admitted

    @property
    def bytes_per_request(self) -> int:
        """Bytes that a slot takes whatever the request's length: its state in all layers and its row of the tables."""
        state = sum(len(self.layers(kind)) * sum(self.state_bytes(kind).values()) for kind in AttentionType)
        return state + self._table_row_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables: a row per slot, the readers of each block, the list of free blocks, and its length."""
        return self.max_requests * self._table_row_bytes + (2 * self.num_blocks + 1) * 4

    def memory_bytes(self) -> int:
        """Return the bytes of the whole cache, which is the sum over its leaves."""
        state = self.max_requests * (self.bytes_per_request - self._table_row_bytes)
        return state + self.num_blocks * self.bytes_per_block + self.table_bytes

    def largest_context(self, memory_bytes: int, max_requests: int | None = None, headroom: float = 1.10) -> int:
        """Return the longest context, in tokens, that all requests can have at once; 0 if not even one block fits.

        Args:
          memory_bytes: memory set aside for the cache.
          max_requests: number of concurrent requests; None means this plan's.
          headroom: factor on the number of blocks, as in ``compute_block_budget``.

        Raises:
          ValueError: ``max_requests`` is below 1.
        """
        requests = self.max_requests if max_requests is None else integer("max_requests", max_requests)
        if requests < 1:
            raise ValueError(f"max_requests must be at least 1, got {requests}")
        memory_bytes = integer("memory_bytes", memory_bytes)
        low, high = 0, MAX_CONTEXT // self.cfg.block_tokens
        while low < high:  # memory grows with context, so bisect on the number of blocks per request
            middle = (low + high + 1) // 2
            context = middle * self.cfg.block_tokens
            plan = dataclasses.replace(
                self,
                max_context=context,
                max_requests=requests,
                num_blocks=max(1, compute_block_budget(self.cfg, context, requests, headroom)),
            )
            low, high = (middle, high) if plan.memory_bytes() <= memory_bytes else (low, middle - 1)
        return low * self.cfg.block_tokens

    def __str__(self) -> str:
        return _table(self)

    def __repr__(self) -> str:
        return (
            f"CachePlan({self.max_requests} requests x {self.max_context:,} tokens, {self.num_blocks:,} blocks, "
            f"{self.cfg.num_layers} layers, {self.kv_format}, {self.indexer_format}, "
            f"{self.tail_dtype.name} {self.hca_tail} tails)"
        )


def plan_cache(
    cfg: DSV4Config,
    max_requests: int = 8,
    max_context: int = 131072,
    kv_format: str = "fp8_row",
    indexer_format: str = "nvfp4",
    tail_dtype: DTypeLike = jnp.float32,
    hca_tail: str = "ring",
    num_blocks: int | None = None,
    headroom: float = 1.10,
    *,
    invariant: bool = False,
) -> CachePlan:
    """Choose the formats and capacity of a cache, and compute its shapes and bytes.

    The default formats are those of the PyTorch cache that this library follows: E4M3 rows with one scale, NVFP4 keys,
    and tails whose rows can be read. They assume nothing about the model. ``dsv4jax.model.init_caches`` has other
    defaults, because it knows its model: the published weights were trained with ``kv_format="fp8_tile64"`` and
    ``indexer_format="mxfp4"``, and ``hca_tail="online"`` is smaller. Give these here for layers of a published model.

    Args:
      cfg: the model's sizes.
      max_requests: number of slots, which is the number of requests the cache can hold at once.
      max_context: longest sequence of one request, in tokens.
      kv_format: format of window rows and entries, a key of ``formats.KV_FORMATS``.
      indexer_format: format of indexer keys, a key of ``formats.INDEXER_FORMATS``.
      tail_dtype: dtype of the streams that compressors keep between steps. The model uses float32.
      hca_tail: "ring" keeps the 128 rows of a block; "online" keeps a running softmax, which takes 1/85 of the bytes
        and gives the same entries to 1e-6.
      num_blocks: number of blocks in the pool. The default is enough for every request at full length, times
        ``headroom``. Fewer are allowed; ``prepare_forward`` returns ``ok = False`` when they run out.
      headroom: factor on the default number of blocks, at least 1.
      invariant: whether all that runs over the cache must give a request the same bits whatever the batch: outputs,
        stored bytes, logits and drawn tokens. See ``docs/reproducibility.md`` for what is promised and what it costs.

    Raises:
      ValueError: an argument is not one of the allowed values, or out of range.
    """
    check_type("cfg", cfg, DSV4Config)
    for name, value, known in (
        ("kv_format", kv_format, KV_FORMATS),
        ("indexer_format", indexer_format, INDEXER_FORMATS),
        ("hca_tail", hca_tail, HCA_TAILS),
    ):
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} must be one of {list(known)}, got {value!r}")
    max_requests, max_context = integer("max_requests", max_requests), integer("max_context", max_context)
    num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks)
    if max_requests < 1:
        raise ValueError(f"max_requests must be at least 1, got {max_requests}")
    if not 1 <= max_context <= MAX_CONTEXT:
        raise ValueError(
            f"max_context must be in [1, {MAX_CONTEXT}] (fp32 angles hold no larger position), got {max_context}"
        )
    if not 1 <= real("headroom", headroom) < math.inf:
        raise ValueError(f"headroom must be finite and at least 1, got {headroom}")
    check_dtype("tail_dtype", tail_dtype, TAIL_DTYPES)
    check_type("invariant", invariant, bool)
    if num_blocks is None:
        # A cache without compressed layers needs no blocks. One unused block keeps every table non-empty.
        num_blocks = max(1, compute_block_budget(cfg, max_context, max_requests, headroom))
    if num_blocks >= 1 << 31:
        raise ValueError(f"num_blocks must be an int32, as block ids are, got {num_blocks}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    plan = CachePlan(
        cfg=cfg,
        max_requests=max_requests,
        max_context=max_context,
        kv_format=kv_format,
        indexer_format=indexer_format,
        tail_dtype=jnp.dtype(tail_dtype),
        hca_tail=hca_tail,
        num_blocks=num_blocks,
        invariant=invariant,
    )
    plan.memory_bytes()  # raises here, not at the first write, if a format cannot hold these sizes
    return plan


def shard_plan(plan: CachePlan, mesh: Mesh, axis: str) -> CachePlan:
    """Return the plan of one shard's cache: its share of slots and blocks. Raises ValueError if they do not divide."""
    shards = axis_size(mesh, axis)
    for name in ("max_requests", "num_blocks"):
        if (count := getattr(plan, name)) % shards:
            raise ValueError(
                f"{name}={count} must be divisible by the {shards} shards of mesh axis {axis!r}: "
                f"{-(-count // shards) * shards} would be"
            )
    return dataclasses.replace(plan, max_requests=plan.max_requests // shards, num_blocks=plan.num_blocks // shards)


def plan_of_heads(plan: CachePlan, axis: str | None) -> CachePlan:
    """Return the plan with one shard's share of the heads, inside ``jax.shard_map``.

    The cache's own shapes do not depend on the number of heads. ``axis`` None returns the plan unchanged.

    Raises:
      ValueError: ``axis`` is not an axis of an enclosing ``shard_map``, or the heads do not divide.
    """
    if axis is None:
        return plan
    if not isinstance(axis, str):
        raise ValueError(f"model_axis must be None or the name of a mesh axis, got {axis!r}")
    try:
        shards = lax.axis_size(axis)
    except NameError as error:
        raise ValueError(f"model_axis={axis!r} is no axis of an enclosing jax.shard_map") from error
    return dataclasses.replace(plan, cfg=split_heads(plan.cfg, shards, axis))


def split_heads(cfg: DSV4Config, shards: int, axis: str) -> DSV4Config:
    if cfg.o_groups % shards:  # a group's heads are multiplied by one block of W_oa, so a group cannot be split
        raise ValueError(
            f"o_groups={cfg.o_groups}, of {cfg.num_heads} heads, must be divisible by the {shards} shards of mesh axis "
            f"{axis!r}"
        )
    return dataclasses.replace(cfg, num_heads=cfg.num_heads // shards, o_groups=cfg.o_groups // shards)


def axis_size(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}, its axes are {dict(mesh.shape)}")
    return mesh.shape[axis]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.2f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def _table(plan: CachePlan) -> str:
    """Format the plan as the table that ``print`` shows."""
    cfg = plan.cfg
    head = (
        f"KV cache: {plan.max_requests} requests x {plan.max_context:,} tokens, {cfg.num_layers} layers, "
        f"{plan.kv_format} rows, {plan.indexer_format} indexer keys, {plan.tail_dtype.name} {plan.hca_tail} tails"
        f"{', invariant' if plan.invariant else ''}"
    )
    lines = [head, "", f"{'layers':<10}{'part':<14}{'one layer holds':>28}{'all such layers':>18}"]
    for kind in AttentionType:
        layers = len(plan.layers(kind))
        if not layers:
            continue
        parts = [(part, size, "request", plan.max_requests) for part, size in plan.state_bytes(kind).items()]
        parts += [(part, size, "block", plan.num_blocks) for part, size in plan.block_bytes(kind).items()]
        for i, (part, size, unit, count) in enumerate(parts):
            label = f"{layers} {kind.upper()}" if i == 0 else ""
            lines.append(f"{label:<10}{part:<14}{_size(size):>15} per {unit:<8}{_size(layers * size * count):>18}")
    lines += [
        f"{'tables':<52}{_size(plan.table_bytes):>18}",
        "",
        f"per request  {plan.bytes_per_request:>16,} B    (state in all layers and a row of the tables)",
        f"per token    {plan.bytes_per_token:>16,.1f} B    ({plan.num_blocks:,} blocks of {cfg.block_tokens} tokens)",
        f"total        {plan.memory_bytes():>16,} B    ({_size(plan.memory_bytes())})",
        "",
        f"largest context that fits, {plan.max_requests} requests, 10 % headroom (a model has its own limit):",
    ]
    for gib in (8, 24, 80, 141):
        context = plan.largest_context(gib << 30)
        lines.append(
            f"  in {gib:>3} GiB  {context:>12,} tokens{' (the limit of positions)' * (context == MAX_CONTEXT)}"
        )
    return "\n".join(lines)
