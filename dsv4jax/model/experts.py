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
import math

import jax
import jax.numpy as jnp
from jax import lax

from dsv4jax.derivatives import refuse_derivative, straight_through
from dsv4jax.formats import fp8_rounded
from dsv4jax.layer.backend import Backend
from dsv4jax.layer.projections import project
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.params import Experts, ExpertWeight, StoredExperts
from dsv4jax.model.routing import Picks

TILE = 128  # tokens of one expert that are multiplied at once
WIDE = 1 << 28  # numbers of experts' weights that are wide at a time
GROUP = 128  # inputs that are rounded to FP8 with one scale


def mix_experts(x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig, backend: Backend = None) -> jax.Array:
    """Return the weighted sum of the picked experts' outputs and the shared one's, in x's dtype.

    The sum is f32, in the order of the experts' numbers. Rows of padding give what the shared expert gives.

    Args:
      x: f32 or bf16 [..., h].
      picks: of experts, [..., k].
      experts: the weights.
      cfg: the model's sizes.
      backend: of the shared expert's products; see ``project``.
    """
    rows, flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), (x, picks))
    routed = _routed(rows, flat, experts, cfg)
    inner = _gated(project(x, experts.shared_gate_up, x.dtype, backend=backend), cfg).astype(x.dtype)
    shared = project(inner, experts.shared_down, x.dtype, backend=backend)
    return (routed.reshape(x.shape) + shared.astype(jnp.float32)).astype(x.dtype)


def _gated(product: jax.Array, cfg: ModelConfig) -> jax.Array:
    """SwiGLU with clamps, f32, of products [..., 2 I]. The gate is clamped from above alone, before silu."""
    gate, up = jnp.split(product.astype(jnp.float32), 2, axis=-1)
    if cfg.swiglu_limit > 0:
        gate = jnp.minimum(gate, cfg.swiglu_limit)
        up = jnp.clip(up, -cfg.swiglu_limit, cfg.swiglu_limit)
    return jax.nn.silu(gate) * up


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
        count = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
        return cls(
            pairs=jnp.argsort(experts, stable=True).astype(jnp.int32),
            first=jnp.cumsum(count) - count,
            count=count,
            end=jnp.cumsum((count + tile - 1) // tile),
        )

    def rows(self, number: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        """Return the expert [G] and pairs [G, tile] of tiles int32 [G]. A place without a pair has number N."""
        expert = jnp.searchsorted(self.end, number, side="right", method="compare_all").astype(jnp.int32)
        exists, expert = expert < self.end.size, jnp.minimum(expert, self.end.size - 1)
        tiles = (self.count[expert] + tile - 1) // tile
        within = (number - (self.end[expert] - tiles))[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
        is_pair = exists[:, None] & (within < self.count[expert][:, None])
        place = jnp.where(is_pair, self.first[expert][:, None] + within, self.pairs.size)
        return expert, self.pairs.at[place].get(mode="fill", fill_value=self.pairs.size)


def _routed(x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
    """The weighted sum of the picked experts' outputs, f32 [M, h], for x [M, h] and picks [M, k]."""
    tokens, per_token = picks.experts.shape
    pairs, tile = tokens * per_token, min(tokens, TILE)
    if pairs == 0:
        return jnp.zeros(x.shape, jnp.float32)
    most = min(pairs, cfg.num_experts + pairs // tile)  # tiles that there can be
    at_once = max(1, min(most, WIDE // (3 * cfg.expert_width * cfg.hidden_size)))
    tiles = _Tiles.of(picks.experts.reshape(-1), cfg.num_experts, tile)
    weights = picks.weights.reshape(-1)

    def multiply(step: jax.Array | int, out: jax.Array) -> jax.Array:
        number = step * at_once + jnp.arange(at_once, dtype=jnp.int32)
        expert, pair = tiles.rows(number, tile)
        rows = x.at[pair // per_token].get(mode="fill", fill_value=0)
        weight = weights.at[pair].get(mode="fill", fill_value=0)
        inner = _gated(_product(rows, experts.gate_up, expert), cfg) * weight[..., None]
        return out.at[pair].set(_product(inner.astype(x.dtype), experts.down, expert), mode="drop")

    out = jnp.zeros((pairs, x.shape[1]), x.dtype)
    steps = math.ceil(most / at_once)
    if steps == 1:
        out = multiply(0, out)
    else:
        is_stored = isinstance(experts.gate_up, StoredExperts)
        # A number of steps that is known has derivatives, and stored weights have none anyway.
        out = lax.fori_loop(0, (tiles.end[-1] + at_once - 1) // at_once if is_stored else steps, multiply, out)
    return jnp.sum(out.reshape(tokens, per_token, -1).astype(jnp.float32), axis=1)


def _product(x: jax.Array, weight: ExpertWeight, experts: jax.Array) -> jax.Array:
    """Multiply tiles x [G, tile, in] by the weights of experts int32 [G]: x's dtype [G, tile, out], with f32 sums."""
    if isinstance(weight, StoredExperts):
        return _stored_product(x, weight, experts)
    return _dot(x, weight[experts].astype(x.dtype))


def _stored_product(x: jax.Array, weight: StoredExperts, experts: jax.Array) -> jax.Array:
    weight = refuse_derivative("experts that are stored as FP8 or FP4 have no derivative: load them wide", weight)
    if weight.activations == "fp8":
        x = straight_through(fp8_rounded(lax.stop_gradient(x), GROUP), x)
    return _dot(x, weight.widened(experts, x.dtype))


def _dot(x: jax.Array, weights: jax.Array) -> jax.Array:
    product = jnp.einsum(
        "gti,goi->gto", x, weights, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return product.astype(x.dtype)
