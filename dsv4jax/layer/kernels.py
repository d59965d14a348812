"""Implementations of the ops that call ``pallas_kernels``, translating this library's types to the kernels' arguments.

Every class is registered twice: as ``pallas``, which requires a supported GPU, and as ``pallas_simulated``, which runs
the kernels in NumPy on any device.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dsv4jax.cache.pool import PagedPool, PooledLayer, find_entries
from dsv4jax.cache.stack import LayerStack
from dsv4jax.cache.state import StateCache
from dsv4jax.derivatives import refuse_derivative
from dsv4jax.formats import KeyRows
from dsv4jax.indexing import Batch
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import PALLAS, SIMULATED, XLA, Op
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.indexer import head_factor
from dsv4jax.layer.ops import (
    CACHE_UPDATE,
    DECODE_ATTENTION,
    GATHER_ROWS,
    INDEXER_SCORES,
    PROJECTIONS,
    TOP_K,
    AttentionInputs,
    InputProducts,
    NewEntries,
    TokenParts,
)
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.tails import Streams, num_touched_blocks
from dsv4jax.weights.params import AttentionParams, PoolParams, param_shapes
from dsv4jax.weights.stored import StoredWeight, Weight
from pallas_kernels.language import target

_FEW_TOKENS = 8  # of a request, up to which nobody looks for padding
_FEW_ROWS = 64  # up to which products have the kernel of few rows
_SOME_ROWS = 128  # up to which it serves a wide weight, too
_MANY_ROWS = 1024  # from which those with a wide weight have a kernel that leaves out padding
# Numbers of a bf16 weight up to which its kernel is faster than XLA on an H200: for one row, and for 2 to 64, where XLA
# takes two launches. The latter was measured with the compressors of CSA, 4096 -> 2624.
_SMALL_WEIGHT, _MEDIUM_WEIGHT = 1 << 22, 1 << 24
SCORED_TOGETHER = 8  # tokens of a request for which a key is read once: the number whose queries fit in shared memory


def layer_number(index: jax.Array | int) -> jax.Array:
    """Return a layer's index in its stack as the kernels expect it, int32 [1]."""
    return jnp.asarray(index, jnp.int32).reshape(1)


@dataclasses.dataclass(frozen=True)
class _Kernels(abc.ABC):
    """The kernels of one op, on a GPU or simulated."""

    simulate: bool

    @property
    def backend(self) -> str:
        return SIMULATED if self.simulate else PALLAS

    @property
    def kernels(self) -> Any:
        """The module that has the kernels."""
        return pk

    @property
    def options(self) -> dict[str, Any]:
        """What its functions are told beside their arguments."""
        return {"simulate": self.simulate}

    def unsupported(self, plan: CachePlan | None, kind: AttentionType) -> str | None:
        reason = None if plan is None else self.unserved(plan, kind)
        return reason if reason is not None or self.simulate else target.unsupported()

    def without_derivative[T](self, op: Op, tree: T) -> T:
        """The tree as it is; differentiating by any part of it is a ValueError."""
        return refuse_derivative(
            f"backend={self.backend!r} cannot serve a derivative of {op.name}: kernels have none. Differentiate with "
            f"backend='xla'",
            tree,
        )

    @abc.abstractmethod
    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        """Return why no kernel serves a plan's formats and sizes, or None if one does."""


class ProjectionsKernels(_Kernels):
    """The kernels of ``pallas_kernels.products`` and ``pallas_kernels.token_parts``.

    XLA computes what has no kernel, or is faster without: products of f32, with larger wide weights, and of many tokens
    where ``pk.unsupported_product`` says so.
    """

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        cfg, compress = plan.cfg, param_shapes(plan.cfg, kind).compress
        return pk.unsupported_token_parts(
            q_lora_rank=cfg.q_lora_rank,
            head_dim=cfg.head_dim,
            rope_dim=cfg.rope_dim,
            rows=0 if compress is None else compress.shape[0],
        )

    def linear(
        self,
        x: Any,
        weight: Weight,
        dtype: Any = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> Any:
        options: dict[str, Any] = {"dtype": dtype, "needed": _rows(needed), "simulate": self.simulate}
        if isinstance(x, pk.RoundedRows):
            assert isinstance(weight, StoredWeight)
            codes, scales = self.without_derivative(PROJECTIONS, (weight.codes, weight.scales))
            return pk.product(x, codes, scales, _form(weight, groups), **options)
        outputs, inputs = weight.shape
        rows = x.size // (groups * inputs)
        if isinstance(weight, StoredWeight):
            form, arrays, is_served = _form(weight, groups), (weight.codes, weight.scales), True
        else:
            form, arrays = pk.WeightForm(groups=groups), (weight, None)
            is_served = weight.dtype == jnp.bfloat16 and outputs * inputs <= _most_numbers(rows, _of_chunk(needed))
        if not is_served or x.dtype != jnp.bfloat16 or pk.unsupported_product(weight.shape, form, rows) is not None:
            return PROJECTIONS[XLA].linear(x, weight, dtype=dtype, groups=groups)
        x, arrays = self.without_derivative(PROJECTIONS, (x, arrays))
        product = pk.product(x.reshape(rows, groups * inputs), *arrays, form, **options)
        return product.reshape(*x.shape[:-1], outputs // groups)

    def takes_rounded(self, weight: Weight, rows: int, groups: int = 1) -> bool:
        return isinstance(weight, StoredWeight) and pk.takes_rounded(weight.shape, _form(weight, groups), rows)

    def linear_pair(self, x: jax.Array, first: Weight, second: Weight) -> tuple[jax.Array, jax.Array] | None:
        if isinstance(first, StoredWeight) or not isinstance(second, StoredWeight):
            return None
        rows, forms = x.size // x.shape[-1], (pk.WeightForm(), _form(second))
        if not x.dtype == first.dtype == jnp.bfloat16:
            return None
        if pk.unsupported_product_pair((first.shape, second.shape), forms, rows) is not None:
            return None
        x, first, second = self.without_derivative(PROJECTIONS, (x, first, second))
        given = (first, None, forms[0]), (second.codes, second.scales, forms[1])
        one, other = pk.product_pair(x.reshape(rows, -1), *given, simulate=self.simulate)
        return one.reshape(*x.shape[:-1], -1), other.reshape(*x.shape[:-1], -1)

    def queries(
        self, latent: jax.Array, weight: Weight, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | None:
        if not isinstance(weight, StoredWeight) or latent.dtype != jnp.bfloat16:
            return None
        form, rows, dims = _form(weight), positions.size, (plan.cfg.head_dim, plan.cfg.rope_dim)
        if pk.unsupported_product_of_queries(weight.shape, form, rows, *dims) is not None:
            return None
        latent, weight = self.without_derivative(PROJECTIONS, (latent, weight))
        queries = pk.product_of_queries(
            latent.reshape(rows, -1),
            weight.codes,
            weight.scales,
            form,
            packed_angles(positions, freqs).reshape(rows, -1),
            eps=plan.cfg.norm_eps,
            needed=_rows(positions >= 0),
            simulate=self.simulate,
        )
        return queries.reshape(*positions.shape, -1, dims[0])

    def key_queries(
        self, latent: jax.Array, weight: Weight, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> KeyRows | None:
        if not isinstance(weight, StoredWeight) or latent.dtype != jnp.bfloat16:
            return None
        form, rows, dims = _form(weight), positions.size, (plan.cfg.indexer_head_dim, plan.cfg.rope_dim)
        formats = dict(key_format=plan.indexer_format)
        if pk.unsupported_product_of_indexer_queries(weight.shape, form, rows, *dims, **formats) is not None:
            return None
        latent, weight = self.without_derivative(PROJECTIONS, (latent, weight))
        queries = pk.product_of_indexer_queries(
            latent.reshape(rows, -1),
            weight.codes,
            weight.scales,
            form,
            packed_angles(positions, freqs).reshape(rows, -1),
            plan.keys.row(dims[0]),
            needed=_rows(positions >= 0),
            simulate=self.simulate,
            **formats,
        )
        return jax.tree.map(lambda leaf: leaf.reshape(*positions.shape, *leaf.shape[1:]), queries)

    def parts(
        self,
        products: InputProducts,
        params: AttentionParams,
        plan: CachePlan,
        kind: AttentionType,
        dtype: Any,
        *,
        encode: bool,
    ) -> TokenParts:
        products, params = self.without_derivative(PROJECTIONS, (products, params))
        entry, key = params.entry_pool, params.key_pool
        given = pk.TokenProducts(
            q_a_kv=products.q_a_kv,
            compress=products.compress,
            q_norm=params.q_norm,
            kv_norm=params.kv_norm,
            entry_ape=entry and entry.ape,
            key_ape=key and key.ape,
            angles=packed_angles(products.positions, rope_frequencies(plan.cfg, kind)),
            positions=products.positions,
        )
        rounding = pk.TokenRounding(
            eps=plan.cfg.norm_eps,
            latent_dtype=dtype,
            stream_dtype=plan.tail_dtype,
            head_factor=head_factor(plan),
            kv_format=plan.kv_format if encode else None,
        )
        row_spec = plan.row_spec if encode else None
        options: dict[str, Any] = dict(reads_padding=_of_chunk(products.positions >= 0) is None, simulate=self.simulate)
        parts = pk.token_parts(given, rounding, row_spec=row_spec, **options)

        def normed(streams: Any, pool: PoolParams | None) -> Normed | None:
            return pool and (Streams(k=streams[0], z=streams[1], overlap=kind.overlaps), pool.norm)

        rows = TokenRows(kv=parts.kv, entry=normed(parts.entry, entry), key=normed(parts.key, key))
        return TokenParts(latent=parts.latent, rows=rows, encoded=parts.stored, head_weights=parts.head_weights)


def _most_numbers(rows: int, needed: jax.Array | None) -> int:
    """Return how large a weight of bf16 may be for a product of so many rows to be a kernel's, and not XLA's."""
    if rows >= _MANY_ROWS and needed is not None and needed.shape[0] > 1:
        return _MEDIUM_WEIGHT
    if rows > _SOME_ROWS:
        return 0
    return _MEDIUM_WEIGHT if 1 < rows <= _FEW_ROWS else _SMALL_WEIGHT


def _of_chunk(needed: jax.Array | None) -> jax.Array | None:
    """Return which tokens [B, T] are needed, as kernels are told it, or None.

    In decode and in drafts there is little padding, and looking for it takes longer than computing it.
    """
    return None if needed is None or needed.shape[1] <= _FEW_TOKENS else needed


def _rows(needed: jax.Array | None) -> jax.Array | None:
    """Do what ``_of_chunk`` does, for rows of a product."""
    needed = _of_chunk(needed)
    return None if needed is None else needed.reshape(-1)


def _form(weight: StoredWeight, groups: int = 1) -> pk.WeightForm:
    return pk.WeightForm(groups=groups, block=weight.block, activations=weight.activations)


class CacheUpdateKernels(_Kernels):
    """The kernels of ``pallas_kernels.update``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        cfg = plan.cfg
        return self.kernels.unsupported(
            kv_format=plan.kv_format,
            key_format=plan.indexer_format,
            nope_dim=cfg.head_dim - cfg.rope_dim,
            rope_dim=cfg.rope_dim,
            csa_ratio=cfg.csa_compression_ratio if kind.overlaps else None,
            key_dim=cfg.indexer_head_dim if kind.is_indexed else None,
        )

    def store(self, call: LayerCall, rows: TokenRows, *, keep_tails: bool) -> LayerStack:
        """Run the cache update of one layer as one launch."""
        call, rows = self.without_derivative(CACHE_UPDATE, (call, rows))
        cfg, plan, batch, num_tokens = call.plan.cfg, call.plan, call.batch, rows.num_tokens
        rope = ratio = None
        if rows.entry is not None:
            ratio = call.ratio
            touched = jnp.arange(num_touched_blocks(num_tokens, ratio), dtype=jnp.int32)[None]
            rope = packed_angles(ratio * (call.first_entry[:, None] + touched), rope_frequencies(cfg, call.kind))
        tokens = pk.NewTokens(
            layer=layer_number(call.index),
            slots=batch.slots,
            start=batch.start,
            num_new=batch.num_new,
            block_table=call.block_table,
            kv=rows.kv,
            entry=_streams(rows.entry),
            key=_streams(rows.key),
            rope=rope,
        )
        launch: Any = functools.partial(self.kernels.append_chunk, keep_tails=keep_tails)
        if num_tokens == 1 and not keep_tails:
            launch = self.kernels.cache_step
        return launch(
            call.stack,
            tokens,
            kv_format=plan.kv_format,
            key_format=plan.indexer_format,
            ratio=ratio,
            eps=cfg.norm_eps,
            **self.options,
        )

    def append_swa(
        self, state: StateCache, index: jax.Array | int, kv: jax.Array, batch: Batch, plan: CachePlan
    ) -> StateCache:
        state, kv = self.without_derivative(CACHE_UPDATE, (state, kv))
        stack = LayerStack(state=dataclasses.replace(state, tail=None, indexer_tail=None), pool=None)
        rows = layer_number(index), kv, batch.slots, batch.start, batch.num_new
        stack = self.kernels.append_swa(stack, *rows, kv_format=plan.kv_format, **self.options)
        return dataclasses.replace(state, window=stack.state.window, pos=stack.state.pos)

    def flush_entries(self, pool: PagedPool, index: jax.Array | int, new: NewEntries, plan: CachePlan) -> PagedPool:
        pool, new = self.without_derivative(CACHE_UPDATE, (pool, new))
        given = pk.NewEntries(
            layer=layer_number(index),
            slots=new.slots,
            block_table=new.block_table,
            first=new.first,
            count=new.count,
            entries=new.entries,
            keys=new.keys,
        )
        return self.kernels.flush_entries(
            pool, given, kv_format=plan.kv_format, key_format=plan.indexer_format, **self.options
        )

    def rotate_csa(
        self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array
    ) -> StateCache:
        state = self.without_derivative(CACHE_UPDATE, state)
        given = [state.tail, state.indexer_tail], layer_number(index), slots, complete.astype(jnp.int32)
        tail, indexer_tail = pk.rotate_csa(*given, simulate=self.simulate)
        return dataclasses.replace(state, tail=tail, indexer_tail=indexer_tail)

    def reset_hca(self, state: StateCache, index: jax.Array | int, slots: jax.Array, complete: jax.Array) -> StateCache:
        state = self.without_derivative(CACHE_UPDATE, state)
        given = state.tail, layer_number(index), slots, complete.astype(jnp.int32)
        return dataclasses.replace(state, tail=pk.reset_hca(*given, simulate=self.simulate))


def _streams(given: Normed | None) -> pk.Streams | None:
    return given and pk.Streams(k=given[0].k, z=given[0].z, norm=given[1])


class GatherRowsKernels(_Kernels):
    """The kernels of ``pallas_kernels.gather``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        return CacheUpdateKernels(self.simulate).unserved(plan, kind)

    def picked(self, layer: PooledLayer, picks: jax.Array, dtype: Any) -> jax.Array:
        layer = self.without_derivative(GATHER_ROWS, layer)
        block, row = find_entries(layer.pool.entries, layer.block_table, layer.slots, picks)
        place = layer_number(layer.index), block.reshape(-1), row.reshape(-1)
        flat = self.kernels.gather_rows(
            layer.pool.entries, *place, kv_format=layer.plan.kv_format, dtype=dtype, **self.options
        )
        return flat.reshape(*block.shape, flat.shape[-1])

    def complete(self, layer: PooledLayer, num_entries: jax.Array, dtype: Any) -> jax.Array:
        layer = self.without_derivative(GATHER_ROWS, layer)
        place = layer_number(layer.index), layer.block_table, layer.slots, num_entries
        return self.kernels.gather_request_rows(
            layer.pool.entries, *place, kv_format=layer.plan.kv_format, dtype=dtype, **self.options
        )


class IndexerScoresKernels(_Kernels):
    """The kernels of ``pallas_kernels.scores``, and the kernel that makes their queries."""

    rounds_queries = True

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        cfg = plan.cfg
        return self.kernels.unsupported_scores(
            key_format=plan.indexer_format,
            heads=cfg.indexer_heads,
            key_dim=cfg.indexer_head_dim,
            entries_per_block=plan.entries_per_block(kind),
        )

    def queries(self, product: jax.Array, positions: jax.Array, freqs: np.ndarray, plan: CachePlan) -> KeyRows:
        product = self.without_derivative(INDEXER_SCORES, product)
        angles, row = packed_angles(positions, freqs), plan.keys.row(product.shape[-1])
        options: dict[str, Any] = dict(needed=_of_chunk(positions >= 0), simulate=self.simulate)
        return pk.indexer_queries(product, angles, row, key_format=plan.indexer_format, **options)

    def scores(
        self, queries: jax.Array | KeyRows, weights: jax.Array, layer: PooledLayer, visible: jax.Array
    ) -> jax.Array:
        """Score all entries. A chunk of many tokens is passed to the kernel as more rows with fewer tokens each."""
        assert isinstance(queries, KeyRows), "a kernel scores formats that round queries"
        weights, layer = self.without_derivative(INDEXER_SCORES, (weights, layer))
        (batch, tokens), together = visible.shape, min(visible.shape[1], SCORED_TOGETHER)
        groups = -(-tokens // together)

        def grouped(x: jax.Array) -> jax.Array:
            padding = [(0, 0), (0, groups * together - tokens)] + [(0, 0)] * (x.ndim - 2)
            return jnp.pad(x, padding).reshape(batch * groups, together, *x.shape[2:])

        inputs = pk.ScoreInputs(
            queries=jax.tree.map(grouped, queries),
            weights=grouped(weights),
            keys=layer.pool.indexer_keys,
            layer=layer_number(layer.index),
            block_table=layer.block_table,
            slots=jnp.repeat(layer.slots, groups),
            visible=grouped(visible),
        )
        scores = self.kernels.indexer_scores(inputs, key_format=layer.plan.indexer_format, **self.options)
        return scores.reshape(batch, groups * together, layer.max_entries)[:, :tokens]


class TopKKernels(_Kernels):
    """The kernels of ``pallas_kernels.selection``."""

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        return self.kernels.unsupported_top_k(plan.cfg.indexer_top_k, plan.max_blocks * plan.entries_per_block(kind))

    def pick(self, score: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
        k = min(top_k, score.shape[-1])
        rows = score.reshape(-1, score.shape[-1]), visible.reshape(-1)
        picks = self.kernels.top_k(*rows, k=k, **self.options)
        return picks.reshape(*visible.shape, k)


class DecodeAttentionKernels(_Kernels):
    """The kernels of ``pallas_kernels.attention``, and the kernel that makes their queries."""

    # A chunk of 4096 tokens is one tile at V4-Flash's sizes. Several tiles read the heads' weights again, and their
    # slices and results are copied.
    tile_bytes = 1 << 30
    gathers_picks = False
    rounds_queries = True
    rounds_output = True

    def unserved(self, plan: CachePlan, kind: AttentionType) -> str | None:
        del kind
        cfg = plan.cfg
        return self.kernels.unsupported_attention(
            kv_format=plan.kv_format,
            num_heads=cfg.num_heads,
            nope_dim=cfg.head_dim - cfg.rope_dim,
            rope_dim=cfg.rope_dim,
        )

    def queries(
        self,
        product: jax.Array,
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        product = self.without_derivative(DECODE_ATTENTION, product)
        options: dict[str, Any] = dict(needed=_of_chunk(needed), simulate=self.simulate)
        return pk.attention_queries(product, packed_angles(positions, freqs), eps=plan.cfg.norm_eps, **options)

    def attend(
        self, inputs: AttentionInputs, freqs: np.ndarray, dtype: Any, needed: jax.Array | None = None
    ) -> jax.Array | pk.RoundedRows:
        inputs = self.without_derivative(DECODE_ATTENTION, inputs)
        window, entries = inputs.window, inputs.entries
        given = pk.AttentionInputs(
            q=inputs.q.astype(jnp.float16) if inputs.q.dtype == jnp.float32 else inputs.q,
            window=window.state.window,
            pos=window.state.pos,
            fresh=window.fresh,
            entries=None if entries is None else entries.pool.entries,
            picks=inputs.picks,
            block_table=None if entries is None else entries.block_table,
            slots=window.slots,
            start=window.start,
            positions=inputs.positions,
            visible=inputs.visible,
            sinks=inputs.sinks,
            angles=packed_angles(inputs.positions, freqs),
            layer=layer_number(window.index),
            needed=_of_chunk(needed),
        )
        return self.kernels.decode_attention(given, kv_format=window.plan.kv_format, dtype=dtype, **self.options)


for _name, _simulate in ((PALLAS, False), (SIMULATED, True)):
    PROJECTIONS.register(_name, ProjectionsKernels(_simulate))
    CACHE_UPDATE.register(_name, CacheUpdateKernels(_simulate))
    INDEXER_SCORES.register(_name, IndexerScoresKernels(_simulate))
    TOP_K.register(_name, TopKKernels(_simulate))
    DECODE_ATTENTION.register(_name, DecodeAttentionKernels(_simulate))
    GATHER_ROWS.register(_name, GatherRowsKernels(_simulate))
