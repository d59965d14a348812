"""The kernels of a layer's products, and of what follows from those of its input."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import pallas_kernels as pk
from dsv4jax.checks import Named, Tree
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA
from dsv4jax.layer.call import LayerCall, Normed, TokenRows
from dsv4jax.layer.dense import swiglu
from dsv4jax.layer.indexer import head_factor
from dsv4jax.layer.invariant.products import ROWS, InvariantProjections
from dsv4jax.layer.kernels.base import Kernels, of_chunk, register, register_invariant
from dsv4jax.layer.ops import PROJECTIONS, InputProducts, Projections, RowForm, Rows, TokenParts
from dsv4jax.layer.tiles import map_rows
from dsv4jax.plan import CachePlan
from dsv4jax.rope import packed_angles, rope_frequencies
from dsv4jax.tails import Streams
from dsv4jax.weights.deltas import WeightWithDelta, has_delta
from dsv4jax.weights.params import AttentionParams, PoolParams, param_shapes
from dsv4jax.weights.stored import StoredWeight, Weight

_OTHERS = pk.OperandRows, pk.RoundedRows  # rows in another form than an array
_FORMS: dict[type, RowForm] = {pk.OperandRows: "operand", pk.RoundedRows: "rounded"}


class ProjectionsKernels(Kernels):
    """The kernels of ``pallas_kernels.products`` and ``pallas_kernels.token_parts``.

    XLA computes what has no kernel, or is faster without: where ``pk.plan`` says so.
    """

    @property
    def otherwise(self) -> Projections:
        """What computes products without a kernel."""
        return PROJECTIONS[XLA]

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
        if isinstance(weight, WeightWithDelta):
            assert not isinstance(x, _OTHERS), "as row_form says"
            product = self.linear(x, weight.base, groups=groups, needed=needed)
            return weight.add_to(product, x, groups).astype(dtype)
        plan = self.plan(x, (weight,), (pk.Store(dtype=dtype),), groups, needed=needed)
        if isinstance(plan, pk.Unsupported):
            assert not isinstance(x, _OTHERS), "rows in another form have a kernel"
            return self.otherwise.linear(x, weight, dtype=dtype, groups=groups)
        (product,) = self.run(plan, x, (weight,), needed=needed)
        lead = (*x.shape[:-1], groups) if isinstance(x, _OTHERS) and groups > 1 else x.shape[:-1]
        return product.reshape(*lead, weight.shape[0] // groups)

    def swiglu(self, x: jax.Array, gate_up: Weight, down: Weight, limit: float) -> jax.Array:
        plans = self.swiglu_plans(x, gate_up, down, limit)
        if isinstance(plans, pk.Unsupported):
            return self.linear(self._gated(self.linear(x, gate_up, x.dtype), limit), down, x.dtype)
        (inner,) = self.run(plans[0], x, (gate_up,))
        (made,) = self.run(plans[1], inner, (down,))
        return made.reshape(*x.shape[:-1], down.shape[0])

    def swiglu_plans(
        self, x: jax.Array, gate_up: Weight, down: Weight, limit: float
    ) -> tuple[pk.Plan, pk.Plan] | pk.Unsupported:
        """Return how kernels compute both products of ``swiglu``, the first of which makes gated rows."""
        made, count = pk.SwiGLU(limit=limit), math.prod(x.shape[:-1])
        if self.row_form(down, count) == "operand":
            made = pk.SwiGLU(limit=limit, kind=pk.OperandRows)
        rows = pk.RowsSpec(count=count, width=down.shape[1], kind=made.kind, dtype=x.dtype)
        first = self.plan(x, (gate_up,), (made,))
        second = self._plan_of_rows(rows, (down,), (pk.Store(dtype=x.dtype),))
        if isinstance(first, pk.Unsupported):
            return first
        return second if isinstance(second, pk.Unsupported) else (first, second)

    def _gated(self, product: jax.Array, limit: float) -> jax.Array:
        """Make ``dense.swiglu`` of a product in memory, in its dtype."""
        return swiglu(product, limit).astype(product.dtype)

    def plan(
        self,
        x: Rows,
        weights: tuple[Weight, ...],
        epilogues: tuple[pk.Epilogue, ...],
        groups: int = 1,
        *,
        needed: jax.Array | None = None,
    ) -> pk.Plan | pk.Unsupported:
        """Return how kernels multiply rows [..., groups * in] by weights, of which bool [B, T] are needed."""
        width = groups * weights[0].shape[1]
        form: Named = {"kind": type(x)} if isinstance(x, _OTHERS) else {"dtype": x.dtype}
        rows = pk.RowsSpec(count=math.prod(x.shape) // width, width=width, **form)
        return self._plan_of_rows(rows, weights, epilogues, groups, needed)

    def _plan_of_rows(
        self,
        rows: pk.RowsSpec,
        weights: tuple[Weight, ...],
        epilogues: tuple[pk.Epilogue, ...],
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> pk.Plan | pk.Unsupported:
        if any(map(has_delta, weights)):
            return pk.Unsupported(kind="no kernel", reason="what a low-rank delta adds is computed beside the product")
        specs = tuple(weight_spec(weight, groups) for weight in weights)
        problem = pk.Problem(rows=rows, weights=specs, epilogues=epilogues, needed=which_are_needed(needed))
        return pk.plan(problem, invariant=self.invariant)

    def run(
        self,
        plan: pk.Plan | pk.Unsupported,
        x: Rows,
        weights: tuple[Weight, ...],
        *extras: jax.Array,
        needed: jax.Array | None = None,
    ) -> tuple[Tree, ...]:
        """Do what a plan of these says: rows are [M, ...]. ``extras`` are [M, ...], too."""
        if isinstance(plan, pk.Unsupported):
            raise ValueError(f"no kernel serves this product: {plan.reason}")
        x, arrays = self.without_derivative(PROJECTIONS, (x, tuple(map(weight_arrays, weights))))
        width = plan.problem.rows.width
        x = flat(x) if isinstance(x, _OTHERS) else x.reshape(-1, width)
        needed = of_chunk(needed)
        if needed is not None:
            extras = *extras, needed if needed.shape[0] == 1 else needed.reshape(-1)
        return pk.run(plan, x, arrays, *extras, **self.options)

    def parts(
        self, products: InputProducts, params: AttentionParams, call: LayerCall, dtype: DTypeLike, *, encode: bool
    ) -> TokenParts:
        plan, kind = call.plan, call.kind
        products, params = self.without_derivative(PROJECTIONS, (products, params))
        entry, key = params.entry_pool, params.key_pool
        given = token_products(products, params, plan, kind)
        rounding = self.rounding(params, products, plan, dtype, encode=encode)
        row_spec = plan.row_spec if encode else None
        reads_padding = of_chunk(products.positions >= 0) is None
        parts = pk.token_parts(given, rounding, row_spec=row_spec, reads_padding=reads_padding, **self.options)

        def normed(streams: tuple[jax.Array, jax.Array] | None, pool: PoolParams | None) -> Normed | None:
            if streams is None or pool is None:
                return None
            return Streams(k=streams[0], z=streams[1], overlap=kind.overlaps), pool.norm

        rows = TokenRows(kv=parts.kv, entry=normed(parts.entry, entry), key=normed(parts.key, key))
        return TokenParts(latent=parts.latent, rows=rows, encoded=parts.stored, head_weights=parts.head_weights)

    def rounding(
        self, params: AttentionParams, products: InputProducts, plan: CachePlan, dtype: DTypeLike, *, encode: bool
    ) -> pk.TokenRounding:
        """Return how tokens of an x of ``dtype`` are rounded, and whether window rows are encoded."""
        weights, rows = [w for w in (params.q_b, params.index_q_b) if w is not None], products.positions.size
        takes_operand = all(self.row_form(weight, rows) == "operand" for weight in weights)
        return pk.TokenRounding(
            eps=plan.cfg.norm_eps,
            latent_dtype=dtype,
            latent_is_operand=dtype == jnp.bfloat16 and takes_operand,
            stream_dtype=plan.tail_dtype,
            head_factor=head_factor(plan),
            kv_format=plan.kv_format if encode else None,
        )

    def row_form(self, weight: Weight, rows: int, groups: int = 1) -> RowForm:
        """Return in which form a product takes so many rows of bf16 the fastest. Deltas take them as they are."""
        if has_delta(weight):
            return "plain"
        spec = weight_spec(weight, groups)
        given = pk.RowsSpec(count=rows, width=groups * spec.inputs)
        problem = pk.Problem(rows=given, weights=(spec,), epilogues=(pk.Store(),))
        return _FORMS.get(pk.rows_taken(problem, invariant=self.invariant).kind, "plain")


@dataclasses.dataclass(frozen=True)
class InvariantProjectionsKernels(ProjectionsKernels):
    """The same with plans that are invariant, and in tiles what XLA computes."""

    invariant: bool = True

    @property
    def otherwise(self) -> Projections:
        return InvariantProjections()

    def linear(
        self,
        x: jax.Array | pk.OperandRows,
        weight: Weight,
        dtype: DTypeLike = jnp.float32,
        groups: int = 1,
        needed: jax.Array | None = None,
    ) -> jax.Array:
        if isinstance(weight, WeightWithDelta):
            return self.otherwise.linear(x, weight, dtype, groups)
        return super().linear(x, weight, dtype, groups, needed)

    def _gated(self, product: jax.Array, limit: float) -> jax.Array:
        plain = super()._gated
        return map_rows(lambda tile: plain(tile, limit), product, ROWS, axes=product.ndim - 1)


def of_kernels(projections: Projections) -> ProjectionsKernels:
    """Return the products of a stage that kernels fuse."""
    assert isinstance(projections, ProjectionsKernels), "kernels fuse stages of their own products"
    return projections


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


def which_are_needed(needed: jax.Array | None) -> pk.Needed:
    """Return which rows a product is told are needed, as ``of_chunk`` says: of one request, or of several."""
    needed = of_chunk(needed)
    if needed is None:
        return pk.Needed.ALL
    return pk.Needed.PREFIX if needed.shape[0] == 1 else pk.Needed.MASK


def flat[T: Rows](rows: T) -> T:
    """Return rows [..., width] as rows [M, width]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), rows)


def weight_spec(weight: Weight, groups: int = 1) -> pk.WeightSpec:
    """Return how a weight is described to the kernels."""
    outputs, inputs = weight.shape
    if isinstance(weight, StoredWeight):
        form: Named = dict(block=weight.block, activations=weight.activations)
    else:
        form = dict(dtype=weight.dtype)
    return pk.WeightSpec(shape=(outputs, inputs), groups=groups, **form)


def weight_arrays(weight: Weight) -> tuple[jax.Array, ...]:
    """Return the arrays of a weight, as kernels take them."""
    assert not isinstance(weight, WeightWithDelta), "it has no plan"
    return (weight.codes, weight.scales) if isinstance(weight, StoredWeight) else (weight,)


register(PROJECTIONS, ProjectionsKernels)
register_invariant(PROJECTIONS, InvariantProjectionsKernels)
