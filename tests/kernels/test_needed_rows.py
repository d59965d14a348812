"""Products of many rows of which only some are needed: those are the same bits, and tiles of others are left out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.heads import Heads
from pallas_kernels.products.keys import KeyHeads
from pallas_kernels.products.launches import launch_many
from pallas_kernels.products.many import tiles as many
from pallas_kernels.products.many.tiles import NeededTiles, needed_tiles
from pallas_kernels.products.many.tiling import Tiling, fastest_tiling, tiling_of_heads, tiling_of_key_heads
from tests.support.machines import HOPPER_MACHINES, MACHINES
from tests.support.product_cases import Product, random_angles

ROPE_DIM = 16
KEY_FORMAT = "mxfp4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A product, what it makes, and which of its rows are needed: ranges."""

    product: Product
    ranges: tuple[tuple[int, int], ...]
    makes: str = "sums"  # "sums", "codes", "queries", "key queries"
    multiprocessors: int = 2
    tile_rows: int = 128
    of_one_request: bool = False

    def __str__(self) -> str:
        of = " of one request" * self.of_one_request
        return f"{self.product.activations} {self.makes} of {self.ranges}{of} by {self.multiprocessors}"

    @property
    def needed(self) -> np.ndarray:
        needed = np.zeros(self.product.rows, bool)
        for first, past in self.ranges:
            needed[first:past] = True
        return needed

    @property
    def tiling(self) -> Tiling:
        gpu = dataclasses.replace(
            HOPPER, multiprocessors=self.multiprocessors, clusters={2: -(-self.multiprocessors // 2)}
        )
        size = self.product.rows, self.product.outputs, self.product.inputs, self.product.form
        if self.makes == "queries":
            return tiling_of_heads(*size, Heads(dim=512, eps=1e-6), gpu)
        if self.makes == "key queries":
            keys = KEY_FORMATS[KEY_FORMAT]
            assert isinstance(keys, Fp4Keys)
            return tiling_of_key_heads(*size, KeyHeads(keys=keys), gpu)
        tiling = fastest_tiling(*size, gpu)
        return dataclasses.replace(tiling, parts=1, tile_rows=self.tile_rows).with_most_stages()

    @property
    def options(self) -> dict[str, Any]:
        if self.makes == "key queries":
            return {"key_row": INDEXER_FORMATS[KEY_FORMAT].row(128)}
        return {"dtype": {"sums": jnp.float32, "codes": jnp.float8_e4m3fn, "queries": jnp.float16}[self.makes]}

    def run(self, needed: np.ndarray | None, *, simulate: bool) -> list[np.ndarray]:
        """Return the arrays of the result, with an axis of rows in front."""
        weight, scales = self.product.weight
        if scales is not None:
            weight, scales = (lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
        angles = jnp.asarray(random_angles(self.product.rows, ROPE_DIM)) if "queries" in self.makes else None
        given = ProductInputs(x=self.product.x, weight=weight, scales=scales, angles=angles)
        run = functools.partial(launch_many, self.tiling, simulate=simulate, **self.options)
        found = jax.jit(lambda given, needed: run(given, needed=needed))(given, needed)
        rows = self.product.rows
        return [np.asarray(leaf if leaf.shape[0] == rows else leaf.T[:rows]) for leaf in jax.tree.leaves(found)]


# Requests of which one is short and one is empty; needed rows in the last tile, which is not full; fewer tiles than
# blocks, so that some compute none; one row of many; all of them; none.
CASES = [
    Case(product=Product(rows=600, outputs=256, inputs=256, activations="fp8"), ranges=((0, 128), (300, 301))),
    Case(product=Product(rows=600, outputs=256, inputs=256, activations="fp8"), ranges=((599, 600),), makes="codes"),
    Case(product=Product(rows=520, outputs=128, inputs=128), ranges=((0, 1), (257, 300), (513, 514))),
    Case(product=Product(rows=520, outputs=192, inputs=128, block=None), ranges=((0, 1), (257, 300), (513, 514))),
    Case(product=Product(rows=700, outputs=128, inputs=128, groups=2), ranges=((0, 700),), tile_rows=64),
    Case(product=Product(rows=520, outputs=128, inputs=128), ranges=(), multiprocessors=3),
    Case(product=Product(rows=520, outputs=128, inputs=256), ranges=((130, 131),), multiprocessors=8),
    Case(
        product=Product(rows=520, outputs=1024, inputs=128, activations="fp8"),
        ranges=((0, 9), (400, 500)),
        makes="queries",
    ),
    Case(
        product=Product(rows=520, outputs=1024, inputs=128, activations="fp8"),
        ranges=((140, 141),),
        makes="queries",
        multiprocessors=12,
    ),
    Case(
        product=Product(rows=520, outputs=256, inputs=128, activations="fp8"),
        ranges=((0, 9), (400, 500)),
        makes="key queries",
    ),
    Case(
        product=Product(rows=600, outputs=256, inputs=256, activations="fp8"), ranges=((0, 257),), of_one_request=True
    ),
    Case(product=Product(rows=520, outputs=128, inputs=128), ranges=((0, 9), (300, 384)), of_one_request=True),
    Case(product=Product(rows=520, outputs=128, inputs=128), ranges=(), of_one_request=True),
]


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_needed_rows_are_the_same_bits_and_tiles_of_others_are_left_out(case, simulate):
    needed, size = case.needed, case.tiling.tile_rows
    given = needed[None] if case.of_one_request else needed
    assert needed_tiles(jnp.asarray(given), size, case.tiling.output_tiles) is not None
    of_tile = np.add.reduceat(needed, np.arange(0, needed.size, size)) > 0
    if case.of_one_request:  # then those before the last needed one are computed, too
        of_tile = np.maximum.accumulate(of_tile[::-1])[::-1]
    computed = np.repeat(of_tile, size)[: needed.size]
    for found, want in zip(case.run(given, simulate=simulate), case.run(None, simulate=simulate), strict=True):
        np.testing.assert_array_equal(found[needed], want[needed])
        if simulate:  # what a kernel does not write is NaN there, or the largest whole number
            left = found[~computed]
            assert np.all(np.isnan(left) if left.dtype.kind == "f" else left == np.iinfo(left.dtype).max)


@pytest.mark.parametrize("simulate", MACHINES)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("tiles", "tiles_of_outputs"), [(4, 1), (5, 256), (128, 255), (90, 512), (64, 1023), (700, 8)])
def test_tiles_are_divided_exactly(tiles, tiles_of_outputs, keeps, simulate):
    """At the ends of the numbers that ``needed_tiles`` accepts, whole multiples and the numbers beside them."""
    rng = np.random.default_rng(tiles)
    for count in sorted({1, 2, tiles // 2, tiles - 1, tiles}):
        needed = np.zeros(tiles, bool)
        needed[rng.choice(tiles, count, replace=False)] = True
        array = needed_tiles(jnp.asarray(needed), 1, tiles_of_outputs)
        assert array is not None
        multiples = rng.integers(1, tiles_of_outputs + 1, 40) * count
        numbers = np.concatenate([multiples - 1, np.minimum(multiples, tiles_of_outputs * count - 1), [0]])
        numbers = np.resize(numbers, WARPGROUP).astype(np.int32)

        def body(machine: Any, inputs: Any, out: Any) -> None:
            of_rows = NeededTiles.of(inputs[1], keeps=keeps)
            number = inputs[0].load_int(machine.thread)
            quotient = of_rows.divide(number)
            out.store_int(quotient, 0, machine.thread)
            out.store_int(of_rows.tile(number, quotient), 1, machine.thread)

        out = jax.ShapeDtypeStruct((2, WARPGROUP), jnp.int32)
        found = launch(
            body, name="divide", grid=(1,), inputs=(jnp.asarray(numbers), array), state=out, simulate=simulate
        )
        want = numbers // count, np.flatnonzero(needed)[numbers % count]
        np.testing.assert_array_equal(found, want)


def test_few_tiles_and_too_many_to_divide_are_all_computed():
    def is_used(tiles: int, tiles_of_outputs: int) -> bool:
        return needed_tiles(jnp.ones(tiles * 8, bool), 8, tiles_of_outputs) is not None

    assert not is_used(many._LEAST_TILES - 1, 1)
    assert is_used(many._LEAST_TILES, 1)
    assert is_used(90, 512)
    assert not is_used(91, 512)  # 512 * 91^2 > 2^22
    assert not is_used(4, 1024)
    assert needed_tiles(None, 8, 1) is None


@pytest.mark.parametrize(
    "needed", [np.ones(64, bool), np.ones((65, 1), bool), np.ones((2, 65), bool), np.ones(65, np.int32)]
)
def test_needed_rows_are_one_bool_for_each_row(needed):
    case = Product(rows=65, outputs=128, inputs=128)
    with pytest.raises(AssertionError):
        pk.product(case.x, *case.weight, case.form, needed=jnp.asarray(needed), simulate=True)
