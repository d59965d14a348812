"""The kernels of a layer's products, and of what follows from those of its input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.indexer import head_factor
from dsv4jax.layer.kernels.base import Kernels, of_chunk, register
from dsv4jax.layer.ops import PROJECTIONS, InputProducts, RowForm, Rows, TokenParts
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
        x: jax.Array | pk.OperandRows,
        weight: Weight,
        dtype: DTypeLike = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        if isinstance(x, pk.OperandRows):
            assert isinstance(weight, StoredWeight), "only such weights take rows in another form"
            return self.product(x, weight, groups, needed=needed, dtype=dtype).reshape(*x.shape[:-1], -1)
        outputs, inputs = weight.shape
        rows = x.size // (groups * inputs)
        if isinstance(weight, StoredWeight):
            form, arrays, is_served = weight_form(weight, groups), (weight.codes, weight.scales), True
        else:
            form, arrays = pk.WeightForm(groups=groups), (weight, None)
            is_served = weight.dtype == jnp.bfloat16 and outputs * inputs <= _most_numbers(rows, of_chunk(needed))
        if not is_served or x.dtype != jnp.bfloat16 or pk.unsupported_product(weight.shape, form, rows) is not None:
            return PROJECTIONS[XLA].linear(x, weight, dtype=dtype, groups=groups)
        x, arrays = self.without_derivative(PROJECTIONS, (x, arrays))
        options: dict[str, Any] = dict(dtype=dtype, needed=needed_rows(needed), simulate=self.simulate)
        product = pk.product(x.reshape(rows, groups * inputs), *arrays, form, **options)
        return product.reshape(*x.shape[:-1], outputs // groups)

    def product(
        self, x: Rows, weight: StoredWeight, groups: int = 1, *, needed: jax.Array | None = None, **options: Any
    ) -> Any:
        """Multiply rows [..., groups * in] of any form by a stored weight, for which there is a kernel: [M, out].

        ``options`` are those of ``pk.product``.
        """
        x, codes, scales = self.without_derivative(PROJECTIONS, (x, weight.codes, weight.scales))
        options |= {"needed": needed_rows(needed), "simulate": self.simulate}
        return pk.product(flat(x), codes, scales, weight_form(weight, groups), **options)

    def parts(
        self, products: InputProducts, params: AttentionParams, call: LayerCall, dtype: DTypeLike, *, encode: bool
    ) -> TokenParts:
        plan, kind = call.plan, call.kind
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
    takes_operand = all(row_form(weight, rows) == "operand" for weight in weights)
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


def needed_rows(needed: jax.Array | None) -> jax.Array | None:
    """Do what ``of_chunk`` does, for rows of a product: bool [B T], or [1, T] of one request."""
    needed = of_chunk(needed)
    return needed if needed is None or needed.shape[0] == 1 else needed.reshape(-1)


def row_form(weight: Weight, rows: int, groups: int = 1) -> RowForm:
    """Return in which form a product takes so many rows of bf16 the fastest."""
    if not isinstance(weight, StoredWeight):
        return "plain"
    asked = weight.shape, weight_form(weight, groups), rows
    if pk.takes_operand(*asked):
        return "operand"
    return "rounded" if pk.takes_rounded(*asked) else "plain"


def flat[T: Rows](rows: T) -> T:
    """Return rows [..., width] as rows [M, width]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), rows)


def weight_form(weight: StoredWeight, groups: int = 1) -> pk.WeightForm:
    """Return how a stored weight is described to the kernels."""
    return pk.WeightForm(groups=groups, block=weight.block, activations=weight.activations)


register(PROJECTIONS, ProjectionsKernels)
