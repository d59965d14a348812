"""Queries that are made in their product, compared with the product and its conversion one after the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from pallas_kernels.activations import OperandRows, PlainRows
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.products.epilogues.both import BothQueries
from pallas_kernels.products.few.launch import Few, fastest_layout, layout_of_both
from pallas_kernels.products.few.layout import Layout
from pallas_kernels.products.many.launch import Many as ManyLaunch
from tests.kernels.test_needed_rows import Some, check_some, many_of
from tests.support.cases import first_of
from tests.support.kernel_cases import same_bytes
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Many, Product, any_plan, random_angles

EPS = 1e-6
# GPUs for which a few blocks are enough. The first one's blocks do not share inputs, the other one's do.
FOR_ATTENTION = dataclasses.replace(HOPPER, multiprocessors=3, clusters={2: 1})
FOR_INDEXER = dataclasses.replace(HOPPER, multiprocessors=1)
on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """A product whose outputs are heads."""

    rows: int
    heads: int
    inputs: int
    key_format: str | None = None  # of the indexer's; None for those of attention
    dim: int = 512
    rope_dim: int = 64
    activations: str = "bf16"
    many: Many | None = None

    def __str__(self) -> str:
        of, many = self.key_format or "attention", "" if self.many is None else f", many{self.many}"
        sizes = f"{self.rows} rows {self.inputs} to {self.heads} x {self.dim}"
        return f"{of} {sizes} {self.activations}, {self.rope_dim}{many}"

    @property
    def product(self) -> Product:
        outputs = self.dim * self.heads
        options: dict[str, Any] = dict(activations=self.activations, many=self.many)
        return Product(rows=self.rows, outputs=outputs, inputs=self.inputs, **options)

    @property
    def epilogue(self) -> Any:
        if self.key_format is None:
            return pk.AttentionQueries(eps=EPS, rope_dim=self.rope_dim, head_dim=self.dim)
        row = INDEXER_FORMATS[self.key_format].row(self.dim)
        return pk.IndexerQueries(key_format=self.key_format, key_row=row, rope_dim=self.rope_dim)

    @functools.cached_property
    def angles(self) -> jax.Array:
        return jnp.asarray(random_angles(self.rows, self.rope_dim))

    @property
    def gpu(self) -> GPU:
        if self.rows > 64:
            return HOPPER
        return FOR_INDEXER if self.key_format else FOR_ATTENTION

    def plan(self, kind: Any = PlainRows, gpu: GPU | None = None) -> pk.Plan:
        return self.product.plan(self.product.problem(self.epilogue, kind), self.gpu if gpu is None else gpu)

    def leaves(self, made: Any) -> list[np.ndarray]:
        return [np.asarray(leaf).reshape(self.rows, self.heads, -1) for leaf in jax.tree.leaves(made)]

    def run(self, x: Any = None, *, simulate: bool, gpu: GPU | None = None) -> list[np.ndarray]:
        """Return the leaves of the queries, [rows, heads, ...]."""
        x = self.product.x if x is None else x
        plan = self.plan(OperandRows if isinstance(x, OperandRows) else PlainRows, gpu)
        return self.leaves(self.product.made(plan, x, self.angles, simulate=simulate))

    @property
    def plan_of_sums(self) -> pk.Plan:
        """A plan that stores the sums, divided in the same way."""
        plan, problem = self.plan(), self.product.problem()
        if isinstance(plan.kernel, Few):
            layout, made = plan.kernel.layout, self.epilogue
            split = dataclasses.replace(layout.split, blocks=layout.split.blocks * made.blocks)
            kernel: Any = Few(layout=dataclasses.replace(layout, epilogue=pk.Store(), split=split))
        elif self.key_format is None:
            return any_plan(problem)  # the blocks of a cluster have tiles of a head
        else:
            assert isinstance(plan.kernel, ManyLaunch)
            tiling = dataclasses.replace(plan.kernel.tiling, epilogue=pk.Store())
            kernel = dataclasses.replace(plan.kernel, tiling=tiling)
        return dataclasses.replace(plan, problem=problem, kernel=kernel)

    def converted(self, product: jax.Array, *, simulate: bool) -> Any:
        given = product.reshape(1, self.rows, self.heads, self.dim), self.angles[None]
        if self.key_format is None:
            return pk.attention_queries(*given, eps=EPS, simulate=simulate)
        row = self.epilogue.key_row
        return pk.indexer_queries(*given, row, key_format=self.key_format, simulate=simulate)

    def expected(self, x: jax.Array | None = None, *, simulate: bool) -> list[np.ndarray]:
        """Return those of two launches."""
        plan = self.plan_of_sums

        def two_launches(x: jax.Array, arrays: Any) -> Any:
            (product,) = pk.run(plan, x, [arrays], simulate=simulate)
            return self.converted(product, simulate=simulate)

        return self.leaves(jax.jit(two_launches)(self.product.x if x is None else x, self.product.arrays))

    def check(self, found: list[np.ndarray], want: list[np.ndarray]) -> None:
        """Compare the indexer's exactly, and those of attention as numbers that are rounded to f16.

        Attention's sums of squares run in another order and are off by a few 2^-24, so that an element may round to the
        f16 beside it. One that its rope nearly cancels is off by as much of its pair, which is below 23.
        """
        if self.key_format is not None:
            for name, one, other in zip(("codes", "scale"), found, want, strict=True):
                same_bytes(name, one, other)
            return
        (one,), (other,) = found, want
        assert one.dtype == np.float16
        ulp = np.spacing(np.abs(other)).astype(np.float32)
        assert np.all(np.abs(one.astype(np.float32) - other.astype(np.float32)) <= np.maximum(ulp, 2.0**-19))
        assert np.mean(one != other) < 2e-3  # some 2^-22 of an element over its f16's 2^-11


def of_indexer(**sizes: Any) -> Queries:
    return Queries(**{"dim": 128, "key_format": "mxfp4", **sizes})


# Rows that do not fill the last lines, as many as a block has, and x copied chunk by chunk; blocks that share inputs,
# the second of which has no row; other ropes, number formats and sizes of heads.
FEW = [
    Queries(rows=3, heads=2, inputs=256),
    of_indexer(rows=5, heads=2, inputs=256),
    Queries(rows=64, heads=1, inputs=3072),
    of_indexer(rows=64, heads=1, inputs=1024, key_format="nvfp4"),
    Queries(rows=21, heads=1, inputs=128, rope_dim=256),
    Queries(rows=17, heads=1, inputs=256, rope_dim=16, activations="fp8"),
    of_indexer(rows=19, heads=3, inputs=1024, activations="fp8"),
    of_indexer(rows=9, heads=2, inputs=256, dim=64, rope_dim=20),
    of_indexer(rows=40, heads=1, inputs=256, dim=256, rope_dim=64),
]
# Many rows: those that do not fill a tile; tiles of one head and of two; blocks with several tiles, with fewer in the
# last turn; several chunks; other ropes.
MANY = [
    Queries(rows=200, heads=3, inputs=128, activations="fp8", many=Many(multiprocessors=4)),
    of_indexer(rows=200, heads=2, inputs=256, activations="fp8", many=Many(multiprocessors=1)),
    Queries(rows=65, heads=1, inputs=256, activations="fp8"),
    of_indexer(rows=65, heads=3, inputs=128, activations="fp8", key_format="nvfp4"),
    Queries(rows=128, heads=2, inputs=128, rope_dim=256, activations="fp8"),
    Queries(rows=256, heads=2, inputs=384, rope_dim=16, activations="fp8", many=Many(multiprocessors=2)),
    of_indexer(
        rows=130,
        heads=4,
        inputs=128,
        key_format="nvfp4",
        rope_dim=128,
        activations="fp8",
        many=Many(multiprocessors=2),
    ),
    of_indexer(rows=128, heads=1, inputs=128, rope_dim=16, activations="fp8"),
]


@on_hopper
@pytest.mark.parametrize("case", [*first_of(FEW), *first_of(MANY)], ids=str)
def test_queries_are_those_of_two_launches(case, simulate):
    found = case.run(simulate=simulate)
    case.check(found, case.expected(simulate=simulate))
    if case.key_format is None:
        assert not found[0][-1].any()  # a row of zeros


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", [None, "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [100, 4096])
def test_queries_of_a_model_are_those_of_two_launches(rows, key_format):
    dim = 128 if key_format else 512
    case = Queries(rows=rows, heads=64, inputs=1024, dim=dim, key_format=key_format, activations="fp8")
    case.check(case.run(simulate=False), case.expected(simulate=False))


@on_hopper
@pytest.mark.parametrize("case", first_of([FEW[0], FEW[2], MANY[1], MANY[3]], count=2), ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(case, simulate):
    spoilt = case.run(case.product.x.at[1].set(jnp.nan), simulate=simulate)
    for one, other in zip(spoilt, case.run(simulate=simulate), strict=True):
        np.testing.assert_array_equal(np.delete(one, 1, 0), np.delete(other, 1, 0))
        assert (one[1] != other[1]).any()
    if case.key_format is None:
        assert np.isnan(spoilt[0][1]).all()
    elif case.rows > 64:
        row = jax.tree.unflatten(jax.tree.structure(case.epilogue.key_row), spoilt)
        assert np.isnan(np.asarray(INDEXER_FORMATS[case.key_format].decode(row))[1]).all()


@on_hopper
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            Some(
                product=Product(rows=520, outputs=1024, inputs=128, activations="fp8", many=many_of()),
                ranges=((0, 9), (400, 500)),
                epilogue=pk.AttentionQueries(eps=EPS, rope_dim=16),
            ),
            Some(
                product=Product(rows=520, outputs=1024, inputs=128, activations="fp8", many=many_of(12)),
                ranges=((140, 141),),
                epilogue=pk.AttentionQueries(eps=EPS, rope_dim=16),
            ),
            Some(
                product=Product(rows=520, outputs=256, inputs=128, activations="fp8", many=many_of()),
                ranges=((0, 9), (400, 500)),
                epilogue=of_indexer(rows=520, heads=2, inputs=128, rope_dim=16).epilogue,
            ),
        ]
    ),
    ids=str,
)
def test_queries_of_needed_rows_are_the_same_bits_and_tiles_of_others_are_left_out(case, simulate):
    angles = jnp.asarray(random_angles(case.product.rows, 16))
    check_some(case, angles, simulate=simulate)


# In smaller sizes also on the simulator: tests/kernels/test_invariant_products.py.
@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", [None, "mxfp4"])
def test_a_row_has_the_same_queries_alone_and_in_a_batch(key_format):
    """Bit for bit, at a model's sizes; the indexer's are those of two launches whatever their blocks are."""
    case = Queries(rows=64, heads=64, inputs=1024, dim=128 if key_format else 512, key_format=key_format)
    all_rows = case.run(simulate=False, gpu=HOPPER)
    for first, count in ((0, 1), (5, 8), (40, 17)):
        some = slice(first, first + count)
        plan = dataclasses.replace(case, rows=count).plan(gpu=HOPPER)
        made = case.product.made(plan, case.product.x[some], case.angles[some], simulate=False)
        for alone, together in zip(jax.tree.leaves(made), all_rows, strict=True):
            np.testing.assert_array_equal(np.asarray(alone).reshape(count, 64, -1), together[some])
    sums = case.product.made(any_plan(case.product.problem()), case.product.x, simulate=False)
    case.check(all_rows, case.leaves(jax.jit(lambda sums: case.converted(sums, simulate=False))(sums)))


@pytest.mark.parametrize("inputs", [512, 1024, 1536, 4096])
@pytest.mark.parametrize("case", [FEW[0], FEW[2]], ids=["attention", "indexer"])
def test_whether_queries_are_made_does_not_depend_on_the_rows(case, inputs):
    for outputs in (4096, 8192, 32768, 65536):
        weight = pk.WeightSpec(shape=(outputs, inputs), block=(128, 128))
        given = [pk.RowsSpec(count=rows, width=inputs) for rows in range(1, 65)]
        problems = [pk.Problem(rows=rows, weights=(weight,), epilogues=(case.epilogue,)) for rows in given]
        plans = [pk.plan(problem, HOPPER) for problem in problems]
        assert {isinstance(plan, pk.Plan) for plan in plans} == {isinstance(plans[0], pk.Plan)}
        for rows, plan in zip(given, plans, strict=True):
            if isinstance(plan, pk.Unsupported):
                assert plan.kind == "slower"
                continue
            assert isinstance(plan.kernel, Few)
            layout, parts = plan.kernel.layout, fastest_layout(rows, weight, pk.Store(), HOPPER).split.all_parts
            assert layout.split.all_parts == parts
            assert layout.split.chunks * parts * 128 == inputs
            assert layout.split.blocks * layout.split.tiles * case.epilogue.blocks * 64 == outputs
            assert layout.grid.shared_bytes + 1024 <= HOPPER.shared_bytes


# ---- queries of attention and of the indexer from one launch --------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Both:
    """Two products of the same rows."""

    rows: int
    heads: int
    inputs: int
    key_format: str = "mxfp4"
    rope_dim: int = 64
    activations: str = "bf16"

    def __str__(self) -> str:
        return f"{self.key_format} {self.rows} rows {self.inputs} to {self.heads} {self.activations}, {self.rope_dim}"

    @property
    def alone(self) -> tuple[Queries, Queries]:
        """Those of attention and of the indexer."""
        sizes = dict(rows=self.rows, heads=self.heads, inputs=self.inputs)
        options: dict[str, Any] = dict(rope_dim=self.rope_dim, activations=self.activations)
        return Queries(**sizes, **options), of_indexer(**sizes, **options, key_format=self.key_format)

    def problem(self, kind: Any = PlainRows) -> pk.Problem:
        first, second = self.alone
        one = first.product.problem(first.epilogue, kind)
        weights, epilogues = (first.product.spec, second.product.spec), (first.epilogue, second.epilogue)
        return dataclasses.replace(one, weights=weights, epilogues=epilogues)

    def run(self, x: Any = None, angles: Any = None, *, simulate: bool, gpu: GPU = FOR_ATTENTION) -> list[np.ndarray]:
        """Return the leaves [rows, heads, ...], with the blocks of a GPU for which a few are enough."""
        first, second = self.alone
        x, angles = first.product.x if x is None else x, first.angles if angles is None else angles
        problem = self.problem(OperandRows if isinstance(x, OperandRows) else PlainRows)
        both = BothQueries(attention=first.epilogue, indexer=second.epilogue)
        layout = layout_of_both(problem.rows, first.product.spec, both, gpu)
        assert isinstance(layout, Layout), layout
        plan = pk.Plan(problem=problem, gpu=gpu, kernel=Few(layout=layout))

        def run(x: Any, arrays: Any, angles: Any) -> Any:
            return pk.run(plan, x, arrays, angles, simulate=simulate)

        made = jax.jit(run)(x, [first.product.arrays, second.product.arrays], angles)
        return [np.asarray(leaf).reshape(self.rows, self.heads, -1) for leaf in jax.tree.leaves(made)]


# Rows that do not fill the last lines, as many as a block has with x copied chunk by chunk, a number that two blocks
# divide into halves that are no eights; another format, another rope, rounded activations.
BOTH = [
    Both(rows=3, heads=2, inputs=256),
    Both(rows=64, heads=1, inputs=1024, key_format="nvfp4"),
    Both(rows=17, heads=3, inputs=256, rope_dim=32),
    Both(rows=40, heads=1, inputs=256, rope_dim=128, activations="fp8"),
    Both(rows=8, heads=1, inputs=128, key_format="nvfp4"),
]


@on_hopper
@pytest.mark.parametrize("case", first_of(BOTH, count=2), ids=str)
def test_both_queries_are_those_of_a_launch_each(case, simulate):
    """Attention's bit for bit, as its blocks are the same; the indexer's are, because x is the same in both cases."""
    first, second = case.alone
    x = first.product.x
    queries, *key_queries = case.run(x, simulate=simulate)
    (alone,) = first.run(x, simulate=simulate)
    np.testing.assert_array_equal(queries, alone)
    for found, want in zip(key_queries, second.expected(x, simulate=simulate), strict=True):
        assert found.dtype == want.dtype
        # Sums of several parts may differ in their last bit, and a code that is near the middle of two with them.
        assert np.mean(found != want) < 1e-3


@on_hopper
def test_a_row_that_is_not_finite_spoils_neither_queries_of_others(simulate):
    case = BOTH[0]
    x = case.alone[0].product.x
    spoilt, whole = case.run(x.at[1].set(jnp.nan), simulate=simulate), case.run(x, simulate=simulate)
    for one, other in zip(spoilt, whole, strict=True):
        np.testing.assert_array_equal(np.delete(one, 1, 0), np.delete(other, 1, 0))
        assert (one[1] != other[1]).any()


@on_hopper
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            Both(rows=64, heads=1, inputs=512),
            Both(rows=9, heads=2, inputs=256, key_format="nvfp4"),
            Queries(rows=20, heads=2, inputs=256),
            of_indexer(rows=64, heads=1, inputs=384),
        ],
        count=2,
    ),
    ids=str,
)
def test_queries_of_operand_rows_have_the_same_bits(case, simulate):
    x = (case.alone[0] if isinstance(case, Both) else case).product.x
    found, want = case.run(OperandRows.of(x), simulate=simulate), case.run(x, simulate=simulate)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", ["mxfp4", "nvfp4"])
def test_a_row_has_the_same_queries_of_both_alone_and_in_a_batch(key_format):
    """Bit for bit, at a model's sizes, and attention's are those of its own launch."""
    case = Both(rows=64, heads=64, inputs=1024, key_format=key_format)
    first, second = case.alone
    x = first.product.x
    all_rows = case.run(x, simulate=False, gpu=HOPPER)
    for start, count in ((0, 1), (5, 8), (40, 17)):
        some = slice(start, start + count)
        found = dataclasses.replace(case, rows=count).run(x[some], first.angles[some], simulate=False, gpu=HOPPER)
        for alone, together in zip(found, all_rows, strict=True):
            np.testing.assert_array_equal(alone, together[some])
    np.testing.assert_array_equal(all_rows[0], first.run(x, simulate=False, gpu=HOPPER)[0])
    sums = second.product.made(any_plan(second.product.problem()), x, simulate=False)
    want = second.leaves(jax.jit(lambda sums: second.converted(sums, simulate=False))(sums))
    for found, leaf in zip(all_rows[1:], want, strict=True):
        assert np.mean(found != leaf) < 1e-3  # as above


@pytest.mark.parametrize("inputs", [512, 1024, 1536])
def test_whether_one_launch_makes_both_does_not_depend_on_the_rows(inputs):
    for heads in (8, 34, 64, 128):
        plans = [pk.plan(Both(rows=rows, heads=heads, inputs=inputs).problem(), HOPPER) for rows in range(1, 65)]
        assert len({isinstance(plan, pk.Plan) for plan in plans}) == 1
        for plan in plans:
            if isinstance(plan, pk.Plan):
                assert isinstance(plan.kernel, Few)
                assert plan.kernel.layout.grid.shared_bytes + 1024 <= HOPPER.shared_bytes
