"""Pairs of a token and an expert, sorted by expert and cut into tiles: what the experts' products go through.

The pair of a token's pick has the number token * k + place, with k picks a token. A tile is up to ``rows`` pairs of one
expert, adjacent among the sorted pairs. Experts without tokens are in no tile, and padding, whose expert is the number
of no expert, is in none either; nor are the experts of other devices.

Small tiles, of at most ``SMALL`` pairs, come after the others, because a launch of their own computes them faster. They
are what is left of an expert's pairs after its full tiles; and two of them take the place of a full tile and what is
left after it, where they hold as much.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

SMALL = 64  # the most pairs of a small tile
_LARGEST = 112


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnExperts:
    """The experts that a device has of all: ``count`` adjacent ones. It counts them from 0."""

    first: Any  # int32 [1] the number of the first among all
    count: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTiles:
    """P pairs of a token and an expert in up to T tiles, or what describes them, or their buffers."""

    pairs: Any  # int32 [P] the numbers of pairs, sorted by expert, those of one expert ascending; padding comes last
    tiles: Any  # int32 [T, 3] of each tile the expert, its first place in ``pairs``, and its pairs, 1 to ``rows``
    count: Any  # int32 [2] how many tiles are not small, and how many there are; ``tiles`` from there on has no meaning
    rows: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def shapes(cls, pairs: int, num_experts: int, rows: int) -> RoutedTiles:
        """Return the shapes for so many pairs, with room for the most tiles that they can need."""
        most = min(pairs, num_experts + pairs // rows)
        return cls(
            pairs=jax.ShapeDtypeStruct((pairs,), jnp.int32),
            tiles=jax.ShapeDtypeStruct((most, 3), jnp.int32),
            count=jax.ShapeDtypeStruct((2,), jnp.int32),
            rows=rows,
        )


def tile_rows(tokens: int, picks: int, experts: int) -> int:
    """Return how many pairs a tile holds: 8, 16, 32, 64, 96 or 112.

    Most experts should need one tile, because each tile widens the expert's weights again. If tokens pick at random,
    an expert has ``mean`` pairs give or take the root of that.
    """
    mean = tokens * picks / experts
    likely = min(tokens, mean + 1.5 * math.sqrt(mean))
    return next((rows for rows in (8, 16, 32, 64, 96) if rows >= likely), _LARGEST)


def routed_tiles(experts: jax.Array, num_experts: int, rows: int) -> RoutedTiles:
    """Return the pairs of experts int32 [M, k] in tiles of up to ``rows``. This is the reference, in plain JAX.

    Args:
      experts: the numbers of the picked experts. One that is not below ``num_experts`` is padding.
      num_experts: how many experts there are.
      rows: the most pairs of a tile.
    """
    picked = experts.reshape(-1)
    shapes = RoutedTiles.shapes(picked.size, num_experts, rows)
    in_expert = jnp.zeros(num_experts, jnp.int32).at[picked].add(1, mode="drop")
    in_tiles, small = (in_expert + rows - 1) // rows, min(rows, SMALL)
    left = in_expert - (in_tiles - 1) * rows  # after full tiles
    smalls = jnp.where((in_tiles > 1) & (left <= 2 * SMALL - rows), 2, (left <= SMALL).astype(jnp.int32))
    larges = in_tiles - smalls if rows > SMALL else jnp.zeros_like(in_tiles)
    end, first = jnp.cumsum(in_tiles), jnp.cumsum(in_expert) - in_expert
    number = jnp.arange(shapes.tiles.shape[0], dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(end, number, side="right").astype(jnp.int32), num_experts - 1)
    of_expert = number - (end - in_tiles)[expert]
    # Pairs of the expert in its earlier tiles.
    before = of_expert * small + jnp.minimum(of_expert, larges[expert]) * (rows - small)
    is_tile, is_large = number < end[-1], of_expert < larges[expert]
    pairs = jnp.minimum(in_expert[expert] - before, jnp.where(is_large, rows, small))
    tiles = jnp.stack([expert, first[expert] + before, pairs], axis=-1)
    order = jnp.argsort(jnp.where(is_large, 0, jnp.where(is_tile, 1, 2)), stable=True)
    return RoutedTiles(
        pairs=jnp.argsort(jnp.minimum(picked, num_experts), stable=True).astype(jnp.int32),
        tiles=jnp.where(is_tile[:, None], tiles[order], 0),
        count=jnp.stack([jnp.sum(larges, dtype=jnp.int32), end[-1]]),
        rows=rows,
    )
