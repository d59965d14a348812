"""Products with stored weights: sums that are exact but for their order, whatever the split, and what is made of them.

What an epilogue makes of sums, and what rows of another class give, is compared bit for bit with the sums of plain rows
in bf16. Queries are in ``test_product_queries``, and which plans problems get in ``test_product_plans``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows, RoundedRows, round_rows
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.few.launch import Pair, fastest_layout, pair_of
from tests.support.cases import first_of, in_turns
from tests.support.machines import HOPPER_MACHINES, MACHINES, no_gpu
from tests.support.product_cases import Many, Product, any_plan

machines = pytest.mark.parametrize("simulate", MACHINES)
on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


def here() -> Any:
    return BLACKWELL if no_gpu(10) is None else HOPPER


# Few and many rows; more rows, inputs and outputs than a block holds; outputs that do not fill the last block; an
# odd number of chunks.
SHAPES = [
    Product(rows=1, outputs=128, inputs=256),
    Product(rows=13, outputs=192, inputs=640),
    Product(rows=64, outputs=64, inputs=2560, parts=(1, 1)),
    Product(rows=70, outputs=128, inputs=384),
    Product(rows=9, outputs=64, inputs=1024, groups=3),
    Product(rows=20, outputs=320, inputs=896, parts=(1, 1), tiles=3),
]
PARTS = [
    Product(rows=21, outputs=192, inputs=1024, parts=(4, 1), tiles=2),
    Product(rows=9, outputs=128, inputs=1024, parts=(1, 2)),
    Product(rows=30, outputs=192, inputs=2048, parts=(2, 2), tiles=2),
    Product(rows=64, outputs=64, inputs=1024, parts=(8, 1)),
]
# Blocks that copy x chunk by chunk: with fewer chunks than stages and more, with rows that are not there, and with
# numbers of warpgroups of which not all copy.
STREAMED = [
    Product(rows=64, outputs=256, inputs=768, parts=(1, 1), tiles=4, streams=True),
    Product(rows=13, outputs=64, inputs=640, parts=(1, 1), streams=True),
    Product(rows=20, outputs=320, inputs=1024, parts=(2, 1), tiles=3, streams=True),
    Product(rows=9, outputs=64, inputs=1024, groups=2, parts=(2, 1), streams=True, dtype=jnp.bfloat16),
    Product(rows=70, outputs=128, inputs=128, parts=(1, 1), tiles=2, streams=True),
    Product(rows=64, outputs=384, inputs=640, parts=(1, 1), tiles=5, streams=True),
    Product(rows=11, outputs=192, inputs=512, block=None, parts=(2, 1), tiles=2, streams=True),
]
# Parts in turns, and blocks of more rows than those of few rows have.
MORE_ROWS = [
    Product(rows=70, outputs=192, inputs=1024, parts=(1, 1), tiles=2, streams=True, turns=4),
    Product(rows=130, outputs=192, inputs=768, parts=(2, 1), tiles=3, streams=True, columns=128),
    Product(rows=140, outputs=128, inputs=1280, groups=2, parts=(1, 1), tiles=2, streams=True, turns=2, columns=72),
    Product(rows=100, outputs=64, inputs=512, block=None, parts=(1, 1), streams=True, turns=2, columns=104),
]
FORMS = [
    Product(rows=9, outputs=64, inputs=512, block=(32, 32), parts=(2, 1)),
    Product(rows=3, outputs=128, inputs=256, block=(16, 64), dtype=jnp.bfloat16, parts=(1, 1), tiles=2),
]
WIDE = [
    Product(rows=11, outputs=192, inputs=512, block=None, parts=(2, 1), tiles=2),
    Product(rows=3, outputs=64, inputs=192, block=None),
]
FP8 = [
    Product(rows=20, outputs=320, inputs=1024, activations="fp8", parts=(2, 1), tiles=2),
    Product(rows=9, outputs=128, inputs=1024, activations="fp8", parts=(2, 2)),
    Product(rows=1, outputs=64, inputs=128, groups=2, activations="fp8", dtype=jnp.bfloat16),
]

# The kernel of many rows: rows that do not fill tiles, and more rows than a tile has; blocks with several tiles, and
# fewer in the last turn; blocks that share a tile; few chunks and more than stages; both sizes of results.
MANY = [
    Product(rows=65, outputs=128, inputs=128, many=Many()),
    Product(rows=150, outputs=192, inputs=320, block=None, many=Many(tile_rows=72, multiprocessors=2, parts=1)),
    Product(rows=80, outputs=128, inputs=512, groups=2, many=Many(parts=2)),
    Product(rows=160, outputs=256, inputs=128, dtype=jnp.bfloat16, many=Many(tile_rows=80, multiprocessors=3, parts=1)),
    Product(rows=65, outputs=128, inputs=128, activations="fp8", many=Many()),
    Product(rows=100, outputs=256, inputs=256, activations="fp8", dtype=jnp.bfloat16, many=Many(parts=1)),
    Product(
        rows=200, outputs=256, inputs=128, activations="fp8", many=Many(tile_outputs=128, multiprocessors=3, parts=1)
    ),
    Product(rows=130, outputs=192, inputs=256, block=None, many=Many(tile_rows=144, parts=2)),
    Product(rows=300, outputs=128, inputs=640, block=None, groups=2, dtype=jnp.bfloat16, many=Many(parts=1)),
    Product(rows=72, outputs=128, inputs=256, block=(32, 32), many=Many(parts=1)),
    Product(rows=100, outputs=256, inputs=384, many=Many(multiprocessors=3, tile_rows=56, parts=1)),
    Product(rows=256, outputs=128, inputs=256, activations="fp8", groups=2, many=Many(parts=2)),
    Product(rows=256, outputs=128, inputs=640, many=Many(tile_rows=256, parts=1)),
    Product(rows=256, outputs=128, inputs=1024, dtype=jnp.bfloat16, many=Many(parts=4, tile_rows=128)),
    Product(rows=200, outputs=128, inputs=1024, many=Many(parts=2, tile_rows=256)),
    Product(rows=300, outputs=384, inputs=256, groups=2, many=Many(multiprocessors=5, parts=1)),
    Product(rows=300, outputs=128, inputs=1024, activations="fp8", many=Many(multiprocessors=2, parts=1)),
    Product(rows=130, outputs=512, inputs=512, activations="fp8", many=Many(tile_outputs=256, parts=2)),
    Product(rows=300, outputs=256, inputs=896, activations="fp8", many=Many(stages=3, tile_outputs=256, parts=1)),
    Product(rows=70, outputs=128, inputs=512, block=(16, 64), many=Many(stages=3, parts=1)),
]


@machines
@pytest.mark.parametrize(
    "case", first_of(in_turns(SHAPES, FP8, WIDE, PARTS, STREAMED, MORE_ROWS, FORMS), count=6), ids=str
)
def test_products_are_exact_but_for_the_order_of_sums(case, simulate):
    case.check(case.run(simulate=simulate, gpu=HOPPER if simulate else here()), simulate=simulate)


@on_hopper
@pytest.mark.parametrize("case", first_of(MANY, count=4), ids=str)
def test_products_of_many_rows_are_exact_but_for_the_order_of_sums(case, simulate):
    case.check(case.run(simulate=simulate, gpu=HOPPER), simulate=simulate)


@pytest.mark.simulated
@pytest.mark.parametrize("case", first_of(in_turns(PARTS[:3], FP8, WIDE, FORMS, SHAPES), count=3), ids=str)
def test_products_of_the_blackwell_kernel(case):
    case.check(case.run(simulate=True, gpu=BLACKWELL), simulate=True)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            Product(rows=64, outputs=128, inputs=1024),
            Product(rows=64, outputs=64, inputs=2048, groups=2, parts=(2, 1)),
            Product(rows=64, outputs=128, inputs=512, activations="fp8"),
            Product(rows=64, outputs=256, inputs=1024, parts=(1, 1), tiles=4, streams=True),
        ],
        count=2,
    ),
    ids=str,
)
def test_a_row_has_the_same_sums_alone_and_in_a_batch(case, simulate):
    """Bit for bit, whatever the split that its number of rows gets, and whether x is copied chunk by chunk."""
    gpu = HOPPER if simulate else here()
    all_rows = case.run(simulate=simulate, gpu=gpu)
    for first, count in ((0, 1), (5, 8), (40, 17)):
        few = dataclasses.replace(case, rows=count, parts=None)
        if case.parts is not None:  # the same parts, in one block
            few = dataclasses.replace(few, parts=case.parts[::-1], streams=False)
        found = few.run(case.x[first : first + count], simulate=simulate, gpu=gpu)
        np.testing.assert_array_equal(found, all_rows[first : first + count])


@machines
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "size", [dict(rows=9, outputs=64), dict(rows=66, outputs=128, many=Many())], ids=["few", "many"]
)
def test_other_rows_do_not_matter(size, activations, simulate):
    case, gpu = Product(inputs=256, activations=activations, **size), HOPPER if simulate else here()
    others = case.x.at[1:].set(jnp.nan)
    found, want = (case.run(x, simulate=simulate, gpu=gpu) for x in (others, case.x))
    np.testing.assert_array_equal(found[0], want[0])
    assert np.isnan(found[1:]).all()


@on_hopper
@pytest.mark.parametrize("form", first_of([dict(), dict(activations="fp8"), dict(block=None)]), ids=str)
def test_a_row_has_the_same_sums_among_any_many_rows(form, simulate):
    """Bit for bit, unless blocks share its inputs."""
    case = Product(rows=300, outputs=256, inputs=512 if simulate else 2048, many=Many(parts=1), **form)
    all_rows = case.run(simulate=simulate)
    for first, count in ((0, 65), (7, 100), (200, 96)):
        few = dataclasses.replace(case, rows=count)
        found = few.run(case.x[first : first + count], simulate=simulate)
        np.testing.assert_array_equal(found, all_rows[first : first + count])


@machines
@pytest.mark.parametrize("rows", [2, 65])
def test_scales_that_the_kernel_cannot_hold_give_nan(rows, simulate):
    case = Product(rows=rows, outputs=128, inputs=128)
    weight, scales = case.arrays
    too_large = jnp.full(scales.shape, 2.0**8, jnp.float32).astype(scales.dtype)
    (found,) = pk.run(any_plan(case.problem()), case.x, [(weight, too_large)], simulate=simulate)
    assert np.isnan(np.asarray(found)[0]).all()


@machines
@pytest.mark.parametrize("rows", [3, 67])
def test_rounded_rows_that_are_not_finite_give_nan_alone(rows, simulate):
    case = Product(rows=rows, outputs=128, inputs=256, activations="fp8")
    x = case.x.at[0, 3].set(jnp.nan).at[1, 200].set(jnp.inf)
    found = case.run(x, simulate=simulate, gpu=HOPPER if simulate else here())
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2:]).all()
    assert not found[-1].any()  # a row of zeros


# ---- what is made of sums, and of which rows ------------------------------------------------------------------------


def residual_of(case: Product) -> tuple[jax.Array, jax.Array]:
    """Rows of all magnitudes, of which the second and every seventh are padding, and their positions."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((case.rows, case.groups * case.outputs)) * 2.0 ** rng.integers(-12, 12, (case.rows, 1))
    positions = rng.integers(0, 1 << 20, case.rows)
    positions[1::7] = -1
    return jnp.asarray(rows, jnp.bfloat16), jnp.asarray(positions, jnp.int32)


def same(found: Any, want: Any) -> None:
    """Compare rows of any class bit for bit."""
    assert type(found) is type(want)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What is made of a product's sums, and of which rows of x."""

    product: Product
    kind: type[ActivationRows] = PlainRows  # of the result
    of: type[ActivationRows] = PlainRows  # of x
    added: bool = False  # to a residual; x's rows of padding are then NaN

    def __str__(self) -> str:
        made = "added" if self.added else self.kind.__name__
        return f"{made} of {self.of.__name__}: {self.product}"

    @property
    def gpu(self) -> Any:
        return HOPPER if RoundedRows in (self.kind, self.of) else here()

    def found(self, *, simulate: bool) -> Any:
        case, extras, needed = self.product, (), pk.Needed.ALL
        x: Any = case.x
        made: pk.Epilogue = pk.Store(dtype=jnp.bfloat16, kind=self.kind)
        if self.added:
            extras, needed, made = (*residual_of(case), self.is_real), pk.Needed.MASK, pk.AddTo()
            x = self.padded
        if self.of is RoundedRows:
            x = round_rows(x, simulate=simulate)
        if self.of is OperandRows:
            x = OperandRows.of(x)
        plan = case.plan(case.problem(made, self.of, needed), self.gpu)
        return case.made(plan, x, *extras, simulate=simulate)

    @property
    def is_real(self) -> jax.Array:
        return residual_of(self.product)[1] >= 0

    @property
    def padded(self) -> jax.Array:
        return jnp.where(self.is_real[:, None], self.product.x, jnp.nan)

    def expected(self, *, simulate: bool) -> Any:
        """The same made of the sums of plain rows, stored in bf16."""
        case, x, needed = self.product, self.product.x, pk.Needed.ALL
        extras = ()
        if self.added:
            x, extras, needed = self.padded, (self.is_real,), pk.Needed.MASK
        problem = case.problem(pk.Store(dtype=jnp.bfloat16), needed=needed)
        sums = case.made(case.plan(problem, self.gpu), x, *extras, simulate=simulate)
        if self.added:
            kept = jnp.where(self.is_real[:, None], sums, jnp.zeros((), jnp.bfloat16))
            return jax.jit(lambda: residual_of(case)[0] + kept)()
        if self.kind is RoundedRows:
            return round_rows(sums, simulate=simulate)
        return OperandRows.of(sums) if self.kind is OperandRows else sums


# Added: one row; rows and outputs that do not fill the last stores; as many as a block has, with x copied chunk by
# chunk; FP8 activations; groups; parts of the inputs in several blocks, as the output projection of a layer has them;
# then more rows, which are added to in place: tiles that rows do not fill, blocks that share a tile, rounded rows.
ADDED = [
    Product(rows=1, outputs=128, inputs=256),
    Product(rows=17, outputs=192, inputs=384, activations="fp8"),
    Product(rows=64, outputs=128, inputs=512, groups=2),
    Product(rows=40, outputs=64, inputs=256, block=None),
    Product(rows=9, outputs=128, inputs=2048),
    Product(rows=150, outputs=256, inputs=128, activations="fp8"),
    Product(rows=130, outputs=128, inputs=512),
    Product(rows=80, outputs=128, inputs=1024, activations="fp8"),
    Product(rows=600, outputs=128, inputs=128, activations="fp8"),
    Product(rows=600, outputs=128, inputs=128),
]
# Rounded: more rows than a tile has, and two groups of a tile's outputs; parts that add their sums; what its kernel
# does not round itself.
ROUNDED = [
    Product(rows=130, outputs=256, inputs=256, activations="fp8"),
    Product(rows=70, outputs=128, inputs=1024, groups=2, activations="fp8"),
    Product(rows=67, outputs=128, inputs=128, activations="bf16"),
    Product(rows=3, outputs=128, inputs=128, activations="fp8"),
]
WRITTEN = [
    Product(rows=1, outputs=128, inputs=256),
    Product(rows=13, outputs=192, inputs=640, groups=2),
    Product(rows=64, outputs=64, inputs=2048),
    Product(rows=9, outputs=128, inputs=512, block=None),
    Product(rows=20, outputs=128, inputs=256, activations="fp8"),
]
# Operand rows that are copied chunk by chunk and that are stored first; rows that are not there; groups; parts of the
# inputs in several blocks; several parts of a block, in segments.
TAKEN = [
    Product(rows=64, outputs=192, inputs=384),
    Product(rows=9, outputs=128, inputs=2048),
    Product(rows=57, outputs=64, inputs=512, groups=2),
    Product(rows=40, outputs=64, inputs=2048, block=(32, 64)),
    Product(rows=30, outputs=192, inputs=2048, parts=(2, 2), tiles=2),
]
MADE = in_turns(
    [Made(product=product, added=True) for product in ADDED],
    [Made(product=product, kind=OperandRows) for product in WRITTEN],
    [Made(product=product, of=OperandRows) for product in TAKEN],
)
MADE_ON_HOPPER = [
    *(Made(product=product, kind=RoundedRows) for product in ROUNDED),
    Made(product=Product(rows=130, outputs=128, inputs=256, groups=2, activations="fp8"), of=RoundedRows),
]


@machines
@pytest.mark.parametrize("case", first_of(MADE, count=4), ids=str)
def test_what_is_made_is_made_of_the_sums(case, simulate):
    same(case.found(simulate=simulate), case.expected(simulate=simulate))


@on_hopper
@pytest.mark.parametrize("case", first_of(MADE_ON_HOPPER, count=2), ids=str)
def test_what_is_made_of_many_rows_is_made_of_the_sums(case, simulate):
    same(case.found(simulate=simulate), case.expected(simulate=simulate))


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_a_case_has_parts_in_several_blocks(gpu):
    case = ADDED[4]
    rows = pk.RowsSpec(count=case.rows, width=case.inputs)
    assert fastest_layout(rows, case.spec, pk.AddTo(), gpu).split.cluster > 1


# ---- two products in one launch -------------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize(("cluster", "parts", "tiles"), first_of([(1, 2, 1), (2, 1, 2), (2, 2, 1)], count=2))
@pytest.mark.parametrize(("rows", "activations"), [(1, "bf16"), (19, "fp8"), (64, "bf16")])
def test_a_pair_is_two_products(rows, activations, cluster, parts, tiles, simulate):
    """Bit for bit, with the same split in a launch each."""
    split: dict[str, Any] = dict(parts=(cluster, parts), tiles=tiles)
    products = (
        Product(rows=rows, outputs=192, inputs=512, block=None, **split),
        Product(rows=rows, outputs=128, inputs=512, activations=activations, **split),
    )
    own = tuple(fastest_layout(product.problem().rows, product.spec, pk.Store(), HOPPER) for product in products)
    problem = pk.Problem(
        rows=products[0].problem().rows,
        weights=tuple(product.spec for product in products),
        epilogues=(pk.Store(), pk.Store()),
    )
    kernel = Pair(layouts=pair_of((own[0], own[1]), cluster=cluster, parts=parts, tiles=tiles))
    plan, x = pk.Plan(problem=problem, gpu=HOPPER, kernel=kernel), products[0].x
    arrays = [product.arrays for product in products]
    found = jax.jit(lambda x, arrays: pk.run(plan, x, arrays, simulate=simulate))(x, arrays)
    for product, result in zip(products, found, strict=True):
        np.testing.assert_array_equal(result, product.run(x, simulate=simulate))


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("outputs", [1024, 2624])  # of V4-Flash's compressors; CSA's fill no tile of scales
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_pairs_of_a_model(rows, outputs):
    first = Product(rows=rows, outputs=outputs, inputs=4096, block=None)
    second = Product(rows=rows, outputs=1536, inputs=4096)
    problem = dataclasses.replace(
        first.problem(), weights=(first.spec, second.spec), epilogues=(pk.Store(), pk.Store())
    )
    plan, arrays = pk.plan(problem), [first.arrays, second.arrays]
    assert isinstance(plan, pk.Plan)
    found = jax.jit(lambda x, arrays: pk.run(plan, x, arrays))(first.x, arrays)
    for product, result in zip((first, second), found, strict=True):
        np.testing.assert_array_equal(result, product.run(first.x, simulate=False))
