"""Choices as values: the experts and the entries that a pass uses for its tokens, to be used again in another pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv4jax.checks import check_array
from dsv4jax.config import layer_schedule
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.indexer import PICKS
from dsv4jax.model.config import ModelConfig
from dsv4jax.model.ops import Picks
from dsv4jax.plan import CachePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The experts that tokens go to, and the entries that their queries read in CSA layers; -1 = none.

    Either may be None: then a pass chooses these itself. What is recorded is in the smallest of int8, int16 and int32
    that holds it.
    """

    experts: jax.Array | None  # int [L, B, T, k] of each layer
    entries: jax.Array | None  # int [C, B, T, K] of each CSA layer, in their order

    def tokens(self, first: int, count: int) -> Choices:
        """Return those of ``count`` tokens from number ``first`` on."""
        return jax.tree.map(lambda leaf: leaf[:, :, first : first + count], self)

    @staticmethod
    def join(parts: Sequence[Choices]) -> Choices:
        """Return those of the tokens of several passes, one after another, each with the same rows."""
        most = max(0 if part.entries is None else part.entries.shape[-1] for part in parts)

        def padded(part: Choices) -> Choices:
            if part.entries is None:
                return part
            more = ((0, 0), (0, 0), (0, 0), (0, most - part.entries.shape[-1]))
            return dataclasses.replace(part, entries=jnp.pad(part.entries, more, constant_values=-1))

        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *map(padded, parts))


def record(experts: Picks, entries: jax.Array | None, max_entries: int, cfg: ModelConfig) -> Choices:
    """Return the choices of a pass that has used experts [L, B, T, k] and entries int32 [C, B, T, K]."""
    numbers = jnp.where(experts.experts < cfg.num_experts, experts.experts, -1)
    return Choices(
        experts=numbers.astype(_smallest(cfg.num_experts)),
        entries=None if entries is None else entries.astype(_smallest(max_entries)),
    )


def no_choices(rows: int, tokens: int, plan: CachePlan, cfg: ModelConfig) -> Choices:
    """Return room for the choices of passes over a cache: -1 for so many rows and tokens."""
    kind = AttentionType.CSA
    max_entries, indexed = plan.max_blocks * plan.entries_per_block(kind), len(plan.layers(kind))
    read = min(cfg.attention.indexer_top_k, max_entries)

    def room(layers: int, each: int, most: int) -> jax.Array:
        return jnp.full((layers, rows, tokens, each), -1, _smallest(most))

    return Choices(
        experts=room(cfg.num_layers, cfg.experts_per_token, cfg.num_experts),
        entries=room(indexed, read, max_entries) if indexed else None,
    )


def check_choices(choices: Choices, cfg: ModelConfig, batch: int, tokens: int) -> None:
    """Check that choices are for a pass of a model with so many rows and tokens.

    Raises:
      AssertionError: (chex) a shape or dtype is wrong.
    """
    of_pass: dict[str, int | None] = {"B": batch, "T": tokens}
    if choices.experts is not None:
        axes = {"L": cfg.num_layers, **of_pass, "k": cfg.experts_per_token}
        check_array("choices.experts", choices.experts, axes, PICKS)
    if choices.entries is not None:
        axes = {"CSA layers": len(_indexed_layers(cfg)), **of_pass, "K": None}
        check_array("choices.entries", choices.entries, axes, PICKS)


def choices_of_layer(choices: Choices, layer: int, cfg: ModelConfig) -> tuple[jax.Array | None, jax.Array | None]:
    """Return (experts [B, T, k], entries [B, T, K]) of a layer."""
    indexed = _indexed_layers(cfg)
    experts = None if choices.experts is None else choices.experts[layer]
    if choices.entries is None or layer not in indexed:
        return experts, None
    return experts, choices.entries[indexed.index(layer)]


def _indexed_layers(cfg: ModelConfig) -> list[int]:
    return [spec.layer_idx for spec in layer_schedule(cfg.attention) if spec.attn.is_indexed]


def _smallest(count: int) -> DTypeLike:
    """The smallest dtype that holds -1 and numbers below count."""
    return next(dtype for dtype in (jnp.int8, jnp.int16, jnp.int32) if count - 1 <= jnp.iinfo(dtype).max)
