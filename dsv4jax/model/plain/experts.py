"""The experts' products, in plain JAX: each picked expert is widened, multiplied and forgotten.

    expert(x) = (silu(min(x W_1, limit)) * clip(x W_3, -limit, limit)) W_2
    y         = sum over picks of weight * expert(x) + shared(x)

Pairs of a token and an expert are sorted by expert and cut into tiles of at most ``TILE`` tokens of one expert. Some
tiles at a time are multiplied with the weights of their experts, which are widened for that. So the wide copy has at
most ``WIDE`` numbers, and experts that no token picks are not read. ``lax.ragged_dot`` does the same product, but away
from TPUs XLA writes every row once per expert for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.checks import Tree
from dsv4jax.derivatives import refuse_derivative, straight_through
from dsv4jax.formats import fp8_rounded
from dsv4jax.indexing import quotient
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.backend import XLA, Anywhere, Backend
from dsv4jax.layer.dense import swiglu
from dsv4jax.layer.ops import PROJECTIONS, Projections
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import EXPERTS, ExpertOutputs, ExpertsOp, Picks
from dsv4jax.model.params import Experts, ExpertWeight, StoredExperts, is_any_stored
from dsv4jax.weights.deltas import WeightWithDelta

TILE = 128  # tokens of one expert that are multiplied at once
WIDE = 1 << 28  # numbers of experts' weights that are wide at a time
GROUP = 128  # inputs that are rounded to FP8 with one scale


class XLAExperts(Anywhere):
    """The experts in plain JAX."""

    def outputs(
        self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, projections: Projections
    ) -> tuple[jax.Array, jax.Array]:
        return self.routed(x, picks, experts, cfg), of_shared(x, experts, cfg, projections)

    def routed(self, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
        return routed_in_tiles(x, picks, experts, cfg)


def routed_in_tiles(
    x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, rows: int | None = None
) -> jax.Array:
    """Return the weighted outputs of the picked experts, x's dtype [..., k, h].

    With ``rows``, a tile has so many tokens, and one is multiplied at a time: the same program for any number of them.
    """
    given = x, dataclasses.replace(picks, tiles=None)
    tokens, flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), given)
    return _routed(tokens, flat, experts, cfg, rows).reshape(*picks.experts.shape, x.shape[-1])


def mixed(
    op: ExpertsOp, x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, backend: Backend = None
) -> ExpertOutputs:
    """Return what the picked experts, by an implementation, and the shared one make of x [..., h], in x's dtype."""
    routed, shared = op.outputs(x, picks, experts, cfg, projections_of(backend))
    return ExpertOutputs(routed=routed[None], shared=shared, experts=picks.experts, num_experts=experts.count)


def of_shared(x: jax.Array, experts: Experts, cfg: ModelConfig, projections: Projections) -> jax.Array:
    """Return what the shared expert makes of x [..., h], in x's dtype."""
    return projections.swiglu(x, experts.shared_gate_up, experts.shared_down, cfg.swiglu_limit)


def projections_of(backend: Backend) -> Projections:
    """Return what computes the shared expert's products, which do not depend on the kind of a layer."""
    return PROJECTIONS.of(backend, None, AttentionType.SWA)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Pairs of a token and an expert, cut into tiles."""

    pairs: jax.Array  # int32 [N] numbers of pairs, sorted by expert
    first: jax.Array  # int32 [E] first sorted pair of each expert
    count: jax.Array  # int32 [E] pairs of each expert
    end: jax.Array  # int32 [E] number of tiles up to and with each expert's

    @classmethod
    def of(cls, experts: jax.Array, num_experts: int, tile: int) -> _Tiles:
        """Sort pairs by their experts, int32 [N]. A pair whose expert is not below num_experts is in no tile."""
        count = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop", wrap_negative_indices=False)
        return cls(
            pairs=jnp.argsort(experts, stable=True).astype(jnp.int32),
            first=jnp.cumsum(count) - count,
            count=count,
            end=jnp.cumsum(quotient(count + tile - 1, tile)),
        )

    def rows(self, number: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        """Return the expert [G] and pairs [G, tile] of tiles int32 [G]. Places without a pair have numbers from N on.

        No number comes twice: so the derivative of a scatter to them needs no record of who wrote a place last.
        """
        expert = jnp.searchsorted(self.end, number, side="right", method="compare_all").astype(jnp.int32)
        exists, expert = expert < self.end.size, jnp.minimum(expert, self.end.size - 1)
        first, count, end = (
            leaf.at[expert].get(mode="promise_in_bounds", wrap_negative_indices=False)
            for leaf in (self.first, self.count, self.end)
        )
        tiles = quotient(count + tile - 1, tile)
        within = (number - (end - tiles))[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
        is_pair = exists[:, None] & (within < count[:, None])
        pairs = self.pairs.at[first[:, None] + within].get(mode="clip", wrap_negative_indices=False)
        nobody = self.pairs.size + jnp.arange(is_pair.size, dtype=jnp.int32).reshape(is_pair.shape)
        return expert, jnp.where(is_pair, pairs, nobody)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is known of the products before they run."""

    cfg: ModelConfig
    tile: int  # tokens of an expert
    is_fixed: bool  # whether a tile's program must not depend on how many there are


def _routed(x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, rows: int | None) -> jax.Array:
    """The weighted outputs of the picked experts, in x's dtype [M k, h], for x [M, h] and picks [M, k]."""
    tokens, per_token = picks.experts.shape
    if tokens * per_token == 0:
        return jnp.zeros((tokens * per_token, x.shape[1]), x.dtype)
    work = _Work(cfg=cfg, tile=rows or min(tokens, TILE), is_fixed=rows is not None)
    tiles = _Tiles.of(picks.experts.reshape(-1), experts.count, work.tile)
    linear = _constant(experts.gate_up), _constant(experts.down)
    return _outputs(work, x, picks.weights.reshape(-1), linear, tiles)


def _constant(weight: ExpertWeight) -> ExpertWeight:
    """The weight as it is. What of it is stored has no derivative: asking for it is a ValueError."""
    message = "experts that are stored as FP8 or FP4 have no derivative: freeze them, or load weights='wide'"
    return _frozen(weight, functools.partial(refuse_derivative, message))


def _frozen(weight: ExpertWeight, also: Callable[[Tree], Tree] = lambda stored: stored) -> ExpertWeight:
    """The weight, with no tangent for what of it is stored. ``also`` is done to that first."""

    def freeze(node: Tree) -> Tree:
        return lax.stop_gradient(also(node)) if isinstance(node, StoredExperts) else node

    return jax.tree.map(freeze, weight, is_leaf=is_any_stored)


def _all_outputs(
    work: _Work,
    x: jax.Array,
    weights: jax.Array,
    linear: tuple[ExpertWeight, ExpertWeight],
    tiles: _Tiles,
    *,
    to_the_end: bool = False,
) -> jax.Array:
    """The weighted output of each pair's expert, in x's dtype [N, h], for x [M, h] and weights f32 [N]."""
    # A rule of derivatives gives every argument a tangent, and these have none.
    gate_up, down = map(_frozen, linear)
    tokens, pairs, cfg, tile = x.shape[0], weights.size, work.cfg, work.tile
    most = min(pairs, tiles.count.size + pairs // tile)  # tiles that there can be
    at_once = 1 if work.is_fixed else max(1, min(most, WIDE // (3 * cfg.expert_width * cfg.hidden_size)))

    @jax.checkpoint  # reverse mode would keep the wide copies of all experts
    def outputs(pair: jax.Array, expert: jax.Array) -> jax.Array:
        of_token = quotient(pair, pairs // tokens)
        rows = x.at[of_token].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        weight = weights.at[pair].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        inner = swiglu(_product(rows, gate_up, expert), cfg.swiglu_limit) * weight[..., None]
        return _product(inner.astype(x.dtype), down, expert)

    def multiply(step: jax.Array | int, out: jax.Array) -> jax.Array:
        expert, pair = tiles.rows(step * at_once + jnp.arange(at_once, dtype=jnp.int32), tile)
        found = outputs(pair, expert)
        return out.at[pair].set(found, mode="drop", unique_indices=True, wrap_negative_indices=False)

    out = jnp.zeros((pairs, x.shape[1]), x.dtype)
    steps = math.ceil(most / at_once)
    if steps == 1 and not work.is_fixed:
        return multiply(0, out)
    return lax.fori_loop(0, steps if to_the_end else (tiles.end[-1] + at_once - 1) // at_once, multiply, out)


_outputs = jax.custom_jvp(_all_outputs, nondiff_argnums=(0,))


@_outputs.defjvp
def _(work: _Work, primals: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> Tree:
    """Over all tiles that there can be: reverse mode must know their number."""
    return jax.jvp(functools.partial(_all_outputs, work, to_the_end=True), primals, tangents)


def _product(x: jax.Array, weight: ExpertWeight, experts: jax.Array) -> jax.Array:
    """Multiply tiles x [G, tile, in] by the weights of experts int32 [G]: x's dtype [G, tile, out], with f32 sums."""
    if isinstance(weight, WeightWithDelta):
        product = _product(x, weight.base, experts).astype(jnp.float32)
        return weight.add_to_experts(product, x, experts).astype(x.dtype)
    if isinstance(weight, StoredExperts):
        return _stored_product(x, weight, experts)
    return _dot(x, weight[experts].astype(x.dtype))


def _stored_product(x: jax.Array, weight: StoredExperts, experts: jax.Array) -> jax.Array:
    if weight.activations == "fp8":
        x = straight_through(fp8_rounded(lax.stop_gradient(x), GROUP), x)
    return _dot(x, weight.widened(experts, x.dtype))


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    product = jnp.einsum(
        "gti,goi->gto", x, weights, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return product.astype(x.dtype)


EXPERTS.register(XLA, XLAExperts())
