"""Pairs of a token and an expert in tiles, against lists made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router.tiles import RoutedTiles, routed_tiles, tile_rows
from tests.support.cases import first_of

# In one program: operation by operation, it would be some ten for each shape.
tiles_of = jax.jit(routed_tiles, static_argnums=(1, 2))


def by_hand(experts: np.ndarray, num_experts: int, rows: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The sorted pairs, and the tiles: those of more than 64 pairs, then the others."""
    picked = experts.reshape(-1)
    pairs, tiles = [], []
    for expert in range(num_experts):
        own = [pair for pair in range(picked.size) if picked[pair] == expert]
        sizes = [min(rows, len(own) - begin) for begin in range(0, len(own), rows)]
        if rows > 64 and len(sizes) > 1 and sum(sizes[-2:]) <= 128:
            sizes[-2:] = 64, sum(sizes[-2:]) - 64
        for size in sizes:
            tiles.append((expert, len(pairs), size))
            pairs += own[:size]
            own = own[size:]
    tiles.sort(key=lambda tile: tile[2] <= 64)
    return pairs + [pair for pair in range(picked.size) if picked[pair] >= num_experts], tiles


def random_picks(seed: int, tokens: int, picks: int, num_experts: int, real: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    experts = np.stack([np.sort(rng.permutation(num_experts)[:picks]) for _ in range(tokens)]).astype(np.int32)
    experts[rng.random(tokens) >= real] = num_experts
    return experts


# Up to 128 pairs, but for a full tile, are two small tiles; so are the last 128 of 240 in tiles of 112.
COUNTS = [64, 65, 112, 113, 128, 129, 177, 240, 3]
CASES = {
    "few": random_picks(0, 5, 6, 256, 1.0),
    "padding": random_picks(1, 90, 6, 16, 0.6),
    "all is padding": np.full((7, 2), 16, np.int32),
    "one token": random_picks(2, 1, 6, 16, 1.0),
    "one pick": random_picks(3, 33, 1, 16, 0.9),
    "all experts": random_picks(4, 20, 16, 16, 0.9),
    "one expert has all": np.full((40, 1), 3, np.int32),
    "the last expert has all": np.full((16, 1), 15, np.int32),
    "large and small tiles": np.repeat(np.arange(1, 10, dtype=np.int32), COUNTS)[:, None],
}


@pytest.mark.parametrize("rows", first_of([16, 8, 96, 112]))
@pytest.mark.parametrize("name", CASES)
def test_the_tiles_are_those_made_by_hand(name, rows):
    experts = CASES[name]
    num_experts = 256 if name == "few" else 16
    found = tiles_of(jnp.asarray(experts), num_experts, rows)
    pairs, tiles = by_hand(experts, num_experts, rows)
    np.testing.assert_array_equal(found.pairs, pairs)
    assert found.count.tolist() == [sum(tile[2] > 64 for tile in tiles), len(tiles)]
    assert len(tiles) <= found.tiles.shape[0]
    np.testing.assert_array_equal(found.tiles[: len(tiles)], np.array(tiles, np.int32).reshape(-1, 3))
    shapes = RoutedTiles.shapes(experts.size, num_experts, rows)
    for name in ("pairs", "tiles", "count"):
        array, shape = getattr(found, name), getattr(shapes, name)
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)


def test_there_is_room_for_the_most_tiles():
    """Every expert has a tile that is not full, and the rest is in full ones."""
    rows, num_experts = 8, 4
    experts = np.repeat(np.arange(num_experts, dtype=np.int32), [1, 1, 9, 17])[:, None]
    tiles = tiles_of(jnp.asarray(experts), num_experts, rows)
    assert tiles.count.tolist() == [0, 1 + 1 + 2 + 3] == [0, tiles.tiles.shape[0]]


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 8), (8, 8), (64, 8), (256, 16), (1024, 32), (4096, 112), (1_000_000, 112)]
)
def test_most_experts_of_v4_flash_need_one_tile(tokens, rows):
    assert tile_rows(tokens, 6, 256) == rows


def test_a_tile_has_no_more_rows_than_there_are_tokens():
    assert tile_rows(16, 6, 6) == 16
