"""The kernels of a layer's products, and of what follows from those of its input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dsv4jax.formats import KeyRows
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import Normed, TokenRows
from dsv4jax.layer.indexer import head_factor
from dsv4jax.layer.kernels.base import Kernels, form_options, of_chunk, register
from dsv4jax.layer.ops import PROJECTIONS, InputProducts, RowForm, TokenParts
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.tails import Streams
from dsv4jax.weights.params import AttentionParams, PoolParams, param_shapes
from dsv4jax.weights.stored import StoredWeight, Weight

_FEW_ROWS = 64  # up to which products have the kernel of few rows
_SOME_ROWS = 128  # up to which it serves a wide weight, too
_MANY_ROWS = 1024  # from which those with a wide weight have a kernel that leaves out padding
# Numbers of a bf16 weight up to which its kernel is faster than XLA on an H200: for one row, and for 2 to 64, where XLA
# takes two launches. The latter was measured with the compressors of CSA, 4096 -> 2624.
_SMALL_WEIGHT, _MEDIUM_WEIGHT = 1 << 22, 1 << 24


class ProjectionsKernels(Kernels):
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
        result: RowForm = "plain",
    ) -> Any:
        options = form_options(result, dtype) | {"needed": _rows(needed), "simulate": self.simulate}
        if isinstance(x, pk.RoundedRows | pk.OperandRows):
            assert isinstance(weight, StoredWeight)
            x = _flat(x)
            codes, scales = self.without_derivative(PROJECTIONS, (weight.codes, weight.scales))
            return pk.product(x, codes, scales, _form(weight, groups), **options)
        outputs, inputs = weight.shape
        rows = x.size // (groups * inputs)
        if isinstance(weight, StoredWeight):
            form, arrays, is_served = _form(weight, groups), (weight.codes, weight.scales), True
        else:
            form, arrays = pk.WeightForm(groups=groups), (weight, None)
            is_served = weight.dtype == jnp.bfloat16 and outputs * inputs <= _most_numbers(rows, of_chunk(needed))
        if not is_served or x.dtype != jnp.bfloat16 or pk.unsupported_product(weight.shape, form, rows) is not None:
            return PROJECTIONS[XLA].linear(x, weight, dtype=dtype, groups=groups)
        x, arrays = self.without_derivative(PROJECTIONS, (x, arrays))
        product = pk.product(x.reshape(rows, groups * inputs), *arrays, form, **options)
        return product.reshape(*x.shape[:-1], outputs // groups)

    def row_form(self, weight: Weight, rows: int, groups: int = 1) -> RowForm:
        return _row_form(weight, rows, groups)

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

    def linear_onto(self, residual: jax.Array, x: Any, weight: Weight, positions: jax.Array) -> jax.Array | None:
        rows, bf16 = positions.size, jnp.bfloat16
        if not isinstance(weight, StoredWeight) or residual.dtype != bf16:
            return None
        if not isinstance(x, pk.RoundedRows) and x.dtype != bf16:
            return None
        if pk.unsupported_product(weight.shape, _form(weight), rows) is not None:
            return None
        residual, x, weight = self.without_derivative(PROJECTIONS, (residual, x, weight))
        before = pk.Residual(rows=residual.reshape(rows, -1), positions=positions.reshape(rows))
        arrays = _flat(x), weight.codes, weight.scales
        options: dict[str, Any] = dict(dtype=bf16, needed=_rows(positions >= 0), simulate=self.simulate)
        y = pk.product(*arrays, _form(weight), residual=before, **options)
        return y.reshape(residual.shape)

    def queries(
        self, latent: Any, weight: Weight, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> jax.Array | None:
        if not isinstance(weight, StoredWeight) or latent.dtype != jnp.bfloat16:
            return None
        form, rows, dims = _form(weight), positions.size, (plan.cfg.head_dim, plan.cfg.rope_dim)
        if pk.unsupported_product_of_queries(weight.shape, form, rows, *dims) is not None:
            return None
        latent, weight = self.without_derivative(PROJECTIONS, (latent, weight))
        queries = pk.product_of_queries(
            _flat(latent),
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
        self, latent: Any, weight: Weight, positions: jax.Array, freqs: np.ndarray, plan: CachePlan
    ) -> KeyRows | None:
        if not isinstance(weight, StoredWeight) or latent.dtype != jnp.bfloat16:
            return None
        form, rows, dims = _form(weight), positions.size, (plan.cfg.indexer_head_dim, plan.cfg.rope_dim)
        formats = dict(key_format=plan.indexer_format)
        if pk.unsupported_product_of_indexer_queries(weight.shape, form, rows, *dims, **formats) is not None:
            return None
        latent, weight = self.without_derivative(PROJECTIONS, (latent, weight))
        queries = pk.product_of_indexer_queries(
            _flat(latent),
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

    def query_pair(
        self,
        latent: Any,
        weights: tuple[Weight, Weight],
        positions: jax.Array,
        freqs: np.ndarray,
        plan: CachePlan,
    ) -> tuple[jax.Array, KeyRows] | None:
        first, second = weights
        if not isinstance(first, StoredWeight) or not isinstance(second, StoredWeight):
            return None
        if latent.dtype != jnp.bfloat16 or _form(first) != _form(second):
            return None
        form, rows, rope_dim = _query_form(first, plan), positions.size, plan.cfg.rope_dim
        if pk.unsupported_product_of_both_queries((first.shape, second.shape), form, rows, rope_dim) is not None:
            return None
        latent, (first, second) = self.without_derivative(PROJECTIONS, (latent, (first, second)))
        queries = pk.product_of_both_queries(
            _flat(latent),
            (first.codes, first.scales),
            (second.codes, second.scales),
            form,
            packed_angles(positions, freqs).reshape(rows, -1),
            simulate=self.simulate,
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
        given = token_products(products, params, plan, kind)
        rounding = token_rounding(params, products, plan, dtype, encode=encode)
        row_spec = plan.row_spec if encode else None
        options: dict[str, Any] = dict(reads_padding=of_chunk(products.positions >= 0) is None, simulate=self.simulate)
        parts = pk.token_parts(given, rounding, row_spec=row_spec, **options)

        def normed(streams: Any, pool: PoolParams | None) -> Normed | None:
            return pool and (Streams(k=streams[0], z=streams[1], overlap=kind.overlaps), pool.norm)

        rows = TokenRows(kv=parts.kv, entry=normed(parts.entry, entry), key=normed(parts.key, key))
        return TokenParts(latent=parts.latent, rows=rows, encoded=parts.stored, head_weights=parts.head_weights)


def token_products(
    products: InputProducts, params: AttentionParams, plan: CachePlan, kind: AttentionType
) -> pk.TokenProducts:
    entry, key = params.entry_pool, params.key_pool
    return pk.TokenProducts(
        q_a_kv=products.q_a_kv,
        compress=products.compress,
        q_norm=params.q_norm,
        kv_norm=params.kv_norm,
        entry_ape=entry and entry.ape,
        key_ape=key and key.ape,
        angles=packed_angles(products.positions, rope_frequencies(plan.cfg, kind)),
        positions=products.positions,
    )


def token_rounding(
    params: AttentionParams, products: InputProducts, plan: CachePlan, dtype: Any, *, encode: bool
) -> pk.TokenRounding:
    """Return how tokens of an x of ``dtype`` are rounded, and whether window rows are encoded."""
    weights, rows = [w for w in (params.q_b, params.index_q_b) if w is not None], products.positions.size
    takes_operand = all(_row_form(weight, rows) == "operand" for weight in weights)
    return pk.TokenRounding(
        eps=plan.cfg.norm_eps,
        latent_dtype=dtype,
        latent_is_operand=dtype == jnp.bfloat16 and takes_operand,
        stream_dtype=plan.tail_dtype,
        head_factor=head_factor(plan),
        kv_format=plan.kv_format if encode else None,
    )


def _most_numbers(rows: int, needed: jax.Array | None) -> int:
    """Return how large a weight of bf16 may be for a product of so many rows to be a kernel's, and not XLA's."""
    if rows >= _MANY_ROWS and needed is not None and needed.shape[0] > 1:
        return _MEDIUM_WEIGHT
    if rows > _SOME_ROWS:
        return 0
    return _MEDIUM_WEIGHT if 1 < rows <= _FEW_ROWS else _SMALL_WEIGHT


def _rows(needed: jax.Array | None) -> jax.Array | None:
    """Do what ``of_chunk`` does, for rows of a product: bool [B T], or [1, T] of one request."""
    needed = of_chunk(needed)
    return needed if needed is None or needed.shape[0] == 1 else needed.reshape(-1)


def _row_form(weight: Weight, rows: int, groups: int = 1) -> RowForm:
    """Do what ``Projections.row_form`` describes."""
    if not isinstance(weight, StoredWeight):
        return "plain"
    asked = weight.shape, _form(weight, groups), rows
    if pk.takes_operand(*asked):
        return "operand"
    return "rounded" if pk.takes_rounded(*asked) else "plain"


def _flat(rows: Any) -> Any:
    """Return rows [..., width] as rows [M, width]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), rows)


def _query_form(weight: StoredWeight, plan: CachePlan) -> pk.QueryForm:
    cfg = plan.cfg
    row, key_format = plan.keys.row(cfg.indexer_head_dim), plan.indexer_format
    return pk.QueryForm(weight=_form(weight), eps=cfg.norm_eps, key_row=row, key_format=key_format)


def _form(weight: StoredWeight, groups: int = 1) -> pk.WeightForm:
    return pk.WeightForm(groups=groups, block=weight.block, activations=weight.activations)


register(PROJECTIONS, ProjectionsKernels)
