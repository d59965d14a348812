"""Products of many rows of which only some are needed: the same bits, and tiles without any are left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import OperandRows, PlainRows, RoundedRows
from pallas_kernels.language.launch import launch
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.products.many import tiles as many
from pallas_kernels.products.many.launch import Many as ManyLaunch
from pallas_kernels.products.many.tiles import NeededTiles, needed_tiles
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES, MACHINES
from tests.support.product_cases import Many, Product

machines = pytest.mark.parametrize("simulate", MACHINES)
on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Some:
    """A product of many rows, and which of them are needed: ranges."""

    product: Product
    ranges: tuple[tuple[int, int], ...]
    epilogue: pk.Epilogue = dataclasses.field(default_factory=pk.Store)
    which: pk.Needed = pk.Needed.MASK
    takes_operand: bool = False

    def __str__(self) -> str:
        made = f"{type(self.epilogue).__name__}{' of operand rows' if self.takes_operand else ''}"
        return f"{self.which.value} {self.ranges}, {made}: {self.product}"

    @property
    def needed(self) -> np.ndarray:
        needed = np.zeros(self.product.rows, bool)
        for first, past in self.ranges:
            needed[first:past] = True
        return needed

    def problem(self, which: pk.Needed) -> pk.Problem:
        return self.product.problem(self.epilogue, OperandRows if self.takes_operand else PlainRows, which)

    def run(self, which: pk.Needed, *extras: jax.Array, simulate: bool) -> list[np.ndarray]:
        """Return the arrays of the result, with an axis of rows in front."""
        case, rows = self.product, self.product.rows
        x, problem = OperandRows.of(case.x) if self.takes_operand else case.x, self.problem(which)
        given = {pk.Needed.ALL: (), pk.Needed.MASK: (self.needed,), pk.Needed.PREFIX: (self.needed[None],)}[which]
        found = case.made(case.plan(problem), x, *extras, *given, simulate=simulate)
        found = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, found)
        return [np.asarray(leaf if leaf.shape[0] == rows else leaf.T[:rows]) for leaf in jax.tree.leaves(found)]


def many_of(multiprocessors: int = 2, tile_rows: int = 128) -> Many:
    return Many(parts=1, tile_rows=tile_rows, multiprocessors=multiprocessors)


# Requests of which one is short and one is empty; needed rows in the last tile, which is not full; fewer tiles than
# blocks, so that some compute none; one row of many; all of them; none.
SOME = [
    Some(
        product=Product(rows=600, outputs=256, inputs=256, activations="fp8", many=many_of()),
        ranges=((0, 128), (300, 301)),
    ),
    Some(
        product=Product(rows=600, outputs=256, inputs=256, activations="fp8", many=many_of()),
        ranges=((599, 600),),
        epilogue=pk.Store(kind=RoundedRows),
    ),
    Some(product=Product(rows=520, outputs=128, inputs=128, many=many_of()), ranges=((0, 1), (257, 300), (513, 514))),
    Some(
        product=Product(rows=520, outputs=192, inputs=128, block=None, many=many_of()),
        ranges=((0, 1), (257, 300), (513, 514)),
    ),
    Some(product=Product(rows=700, outputs=128, inputs=128, groups=2, many=many_of(2, 64)), ranges=((0, 700),)),
    Some(product=Product(rows=520, outputs=128, inputs=128, many=many_of(3)), ranges=()),
    Some(
        product=Product(rows=520, outputs=128, inputs=256, many=dataclasses.replace(many_of(), own_parts=2)),
        ranges=((0, 1), (257, 300), (513, 514)),
        epilogue=pk.Store(kind=OperandRows),
        takes_operand=True,
    ),
    Some(product=Product(rows=520, outputs=128, inputs=256, many=many_of(8)), ranges=((130, 131),)),
    Some(
        product=Product(rows=600, outputs=256, inputs=256, activations="fp8", many=many_of()),
        ranges=((0, 257),),
        which=pk.Needed.PREFIX,
    ),
    Some(
        product=Product(rows=520, outputs=128, inputs=128, many=many_of()),
        ranges=((0, 9), (300, 384)),
        which=pk.Needed.PREFIX,
    ),
    Some(product=Product(rows=520, outputs=128, inputs=128, many=many_of()), ranges=(), which=pk.Needed.PREFIX),
]


def check_some(case: Some, *extras: jax.Array, simulate: bool) -> None:
    """Needed rows are the same bits, and tiles without any are left out. ``extras`` are those of the epilogue."""
    kernel = case.product.plan(case.problem(pk.Needed.ALL)).kernel
    assert isinstance(kernel, ManyLaunch)
    needed, size = case.needed, kernel.tiling.tile_rows
    given = jnp.asarray(needed[None] if case.which is pk.Needed.PREFIX else needed)
    assert needed_tiles(given, size, kernel.tiling.output_tiles) is not None
    of_tile = np.add.reduceat(needed, np.arange(0, needed.size, size)) > 0
    if case.which is pk.Needed.PREFIX:  # then those before the last needed one are computed, too
        of_tile = np.maximum.accumulate(of_tile[::-1])[::-1]
    computed = np.repeat(of_tile, size)[: needed.size]
    some, everything = (case.run(which, *extras, simulate=simulate) for which in (case.which, pk.Needed.ALL))
    for found, want in zip(some, everything, strict=True):
        np.testing.assert_array_equal(found[needed], want[needed])
        if simulate:  # what a kernel does not write is NaN there, or the largest whole number
            left = found[~computed]
            assert np.all(np.isnan(left) if left.dtype.kind == "f" else left == np.iinfo(left.dtype).max)


@on_hopper
@pytest.mark.parametrize("case", first_of(SOME, count=2), ids=str)
def test_needed_rows_are_the_same_bits_and_tiles_of_others_are_left_out(case, simulate):
    check_some(case, simulate=simulate)


@machines
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("tiles", "tiles_of_outputs"), first_of([(5, 256), (90, 512), (4, 1), (128, 255), (64, 1023), (700, 8)], count=2)
)
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
