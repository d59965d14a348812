"""Plans that are invariant: what is made of a row is the same bit for bit whatever the number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
import pallas_kernels.products.plan as plans
from dsv4jax.formats import INDEXER_FORMATS
from pallas_kernels.activations import OperandRows
from pallas_kernels.language import target
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.few.launch import Few
from pallas_kernels.products.many.launch import Many
from tests.support import product_cases
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product, random_angles

ROWS = 140
# Rows of the call, and the first of them among ROWS: alone, in blocks that they do not fill and in several blocks.
CALLS = [(1, 0), (1, 139), (9, 60), (64, 7), (65, 70), (130, 10)]
# Cards so small that products of a few heads have whole heads in a block.
FOR_ATTENTION = dataclasses.replace(HOPPER, multiprocessors=3, clusters={2: 1})
FOR_INDEXER = dataclasses.replace(HOPPER, multiprocessors=1)

ATTENTION = pk.AttentionQueries(eps=1e-6, rope_dim=64)
INDEXER = pk.IndexerQueries(key_format="mxfp4", key_row=INDEXER_FORMATS["mxfp4"].row(128), rope_dim=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is made of the products with one weight or two."""

    products: tuple[Product, ...]
    made: tuple[pk.Epilogue, ...]
    takes_operand: bool = False
    gpu: target.GPU = HOPPER

    def __str__(self) -> str:
        made = ", ".join(type(one).__name__ for one in self.made)
        return f"{made}{' of operand rows' if self.takes_operand else ''}: {self.products[0]}"

    def plan(self, rows: int, *, invariant: bool = True) -> Any:
        width = self.products[0].groups * self.products[0].inputs
        kind = {"kind": OperandRows} if self.takes_operand else {}
        given = pk.RowsSpec(count=rows, width=width, **kind)
        weights = tuple(product.spec for product in self.products)
        problem = pk.Problem(rows=given, weights=weights, epilogues=self.made)
        found = pk.plan(problem, self.gpu, invariant=invariant)
        return found.plan if isinstance(found, pk.Unsupported) and found.plan else found

    @property
    def run(self) -> Callable[..., list[np.ndarray]]:
        """Make what is made of rows [n, width], with their numbers; beside no others, or with others of NaN."""
        arrays = [product.arrays for product in self.products]
        alone = (
            [self]
            if len(self.products) == 1
            else [
                dataclasses.replace(self, products=(product,), made=(made,))
                for product, made in zip(self.products, self.made, strict=True)
            ]
        )

        def run(x: np.ndarray, of: slice, *, simulate: bool, invariant: bool = True) -> list[np.ndarray]:
            plan, rows = self.plan(len(x), invariant=invariant), jnp.asarray(x)
            if isinstance(plan, pk.Unsupported):  # two products of many rows are two launches
                return [leaf for case in alone for leaf in case.run(x, of, simulate=simulate, invariant=invariant)]
            if self.takes_operand:
                rows = OperandRows.of(rows)
            named = dict(
                angles=jnp.asarray(random_angles(ROWS, 64))[of],
                onto=jnp.asarray(random_rows(7, self.products[0].spec.shape[0]))[of],
                positions=jnp.arange(ROWS, dtype=jnp.int32)[of] % 11 - 1,
            )
            extras = [named[name] for name in plan.problem.extras]
            made = jax.jit(lambda x, arrays, *extras: pk.run(plan, x, arrays, *extras, simulate=simulate))
            return [np.asarray(leaf) for leaf in jax.tree.leaves(made(rows, arrays, *extras))]

        return run


def random_rows(seed: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, width)) * 2.0 ** rng.integers(-8, 8, (ROWS, 1))
    return np.asarray(jnp.asarray(x, jnp.bfloat16))


def one(made: pk.Epilogue, *, takes_operand: bool = False, gpu: target.GPU = HOPPER, **sizes: Any) -> Case:
    return Case(products=(Product(rows=1, **sizes),), made=(made,), takes_operand=takes_operand, gpu=gpu)


CASES = [
    one(pk.Store(), outputs=128, inputs=2048),  # whose inputs several blocks share
    one(pk.Store(dtype=jnp.bfloat16), outputs=192, inputs=640, groups=2),
    one(pk.Store(), outputs=128, inputs=2048, activations="fp8"),
    one(pk.Store(), outputs=192, inputs=1024, block=None),
    one(pk.Store(kind=OperandRows), outputs=128, inputs=512),
    one(pk.Store(), outputs=128, inputs=2048, takes_operand=True),
    one(pk.AddTo(), outputs=128, inputs=1024),
    one(pk.AddTo(), outputs=128, inputs=1024, activations="fp8"),
    one(pk.SwiGLU(limit=2.0), outputs=256, inputs=1024),
    one(pk.SwiGLU(kind=OperandRows), outputs=128, inputs=512),
    one(ATTENTION, outputs=1024, inputs=256, gpu=FOR_ATTENTION),
    one(INDEXER, outputs=256, inputs=1024, gpu=FOR_INDEXER),
    Case(
        products=(Product(rows=1, outputs=1024, inputs=256), Product(rows=1, outputs=256, inputs=256)),
        made=(ATTENTION, INDEXER),
        gpu=FOR_ATTENTION,
    ),
]


def differing(case: Case, *, simulate: bool, invariant: bool = True) -> list[tuple[int, int]]:
    """Return for which calls some bit differs from those of all rows at once, of which every fifth is NaN there."""
    x = random_rows(3, case.products[0].groups * case.products[0].inputs)
    spoilt = x.copy()
    spoilt[2::5] = np.nan
    whole, found = case.run(spoilt, slice(ROWS), simulate=simulate, invariant=invariant), []
    for count, first in CALLS:
        of = slice(first, first + count)
        kept = (np.arange(ROWS)[of] - 2) % 5 != 0
        made = case.run(x[of], of, simulate=simulate, invariant=invariant)
        if any(ours[kept].tobytes() != theirs[of][kept].tobytes() for ours, theirs in zip(made, whole, strict=True)):
            found.append((count, first))
    return found


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("case", first_of(CASES), ids=str)
def test_a_row_has_the_same_bits_in_any_call(case, simulate):
    assert not differing(case, simulate=simulate)


@pytest.mark.simulated
def test_the_comparison_sees_sums_in_another_order():
    """Without ``invariant``, more than 64 rows have another kernel, whose blocks do not share these inputs alike."""
    assert differing(CASES[0], simulate=True, invariant=False)


# Several parts, of one tile or of two that a block computes one after the other; groups, whose operand rows are stored
# as such; wide weights, the second of which fills its last tile by half; one part; scales of few outputs and inputs.
OF_MANY = [
    one(pk.AddTo(), outputs=128, inputs=1024, takes_operand=True),
    one(pk.Store(kind=OperandRows), outputs=128, inputs=512, groups=2, takes_operand=True),
    one(pk.Store(), outputs=256, inputs=1024, takes_operand=True, gpu=FOR_ATTENTION),
    one(pk.Store(), outputs=256, inputs=512, block=None),
    one(pk.Store(dtype=jnp.bfloat16), outputs=192, inputs=1024, block=None),
    one(pk.Store(dtype=jnp.bfloat16), outputs=128, inputs=128, takes_operand=True),
    one(pk.Store(kind=OperandRows), outputs=128, inputs=768, block=(16, 32), takes_operand=True),
]


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("case", first_of(OF_MANY, count=4), ids=str)
def test_the_kernel_of_many_rows_has_the_sums_of_that_of_few(case, simulate, monkeypatch):
    monkeypatch.setattr(plans, "_INVARIANT", dataclasses.replace(plans._INVARIANT, many_rows_in_order=65))
    assert isinstance(case.plan(64).kernel, Few)
    assert isinstance(case.plan(65).kernel, Many)
    assert not differing(case, simulate=simulate)


@pytest.mark.simulated
@pytest.mark.parametrize("block", [(128, 128), None])
def test_the_kernel_of_many_rows_has_other_sums_with_other_parts(block):
    case = Product(rows=70, outputs=128, inputs=512, block=block)
    x = case.x if block is None else OperandRows.of(case.x)
    two, four = (
        dataclasses.replace(case, many=product_cases.Many(own_parts=parts)).run(x, simulate=True) for parts in (2, 4)
    )
    assert two.tobytes() != four.tobytes()


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
def test_parts_are_added_in_the_same_order_wherever_they_are(simulate):
    """In blocks of a cluster, in warpgroups of a block, or one after the other; for all rows at once or for some."""
    case = Product(rows=70, outputs=128, inputs=1024, streams=True)
    in_turns = dataclasses.replace(case, parts=(1, 1), turns=4)
    cases = [
        dataclasses.replace(case, parts=(4, 1), columns=40),
        dataclasses.replace(case, parts=(4, 1), tiles=2, columns=72),
        dataclasses.replace(in_turns, columns=24),
        dataclasses.replace(in_turns, tiles=2, columns=72),
        dataclasses.replace(case, streams=False, parts=(2, 2), columns=40),
        dataclasses.replace(case, streams=False, parts=(1, 4), columns=24),
    ]
    first, *others = (case.run(simulate=simulate).tobytes() for case in cases)
    assert all(other == first for other in others)
    assert dataclasses.replace(in_turns, turns=2).run(simulate=simulate).tobytes() != first


@pytest.mark.parametrize("outputs", [1024, 2624])  # of V4-Flash's compressors
def test_a_pair_divides_its_products_as_two_launches_do(outputs):
    """So that more rows, which are two launches, have the same sums."""
    wide, stored = Product(rows=1, outputs=outputs, inputs=4096, block=None), Product(rows=1, outputs=1536, inputs=4096)
    pair = Case(products=(wide, stored), made=(pk.Store(), pk.Store()))
    for rows in (1, 17, 64):
        for layout, product in zip(pair.plan(rows).kernel.layouts, (wide, stored), strict=True):
            for count in (1, 64, 65, 4096):
                alone = Case(products=(product,), made=(pk.Store(),)).plan(count)
                assert layout.split.all_parts == parts_of(alone)
    assert isinstance(pair.plan(65), pk.Unsupported)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_whether_there_is_a_plan_does_not_depend_on_the_rows(case, gpu):
    most = 128 if len(case.products) > 1 else 4096  # more are two launches
    found = [dataclasses.replace(case, gpu=gpu).plan(rows) for rows in (1, 8, 64, 65, 128, 129, 4096) if rows <= most]
    assert len({type(plan) for plan in found}) == 1
    if isinstance(found[0], pk.Plan):
        assert len({parts_of(plan) for plan in found}) == 1
        by_rows = {plan.problem.rows.count: type(plan.kernel) for plan in found}
        longest = by_rows.pop(4096, None)
        assert len(set(by_rows.values())) == 1
        is_stored = isinstance(case.made[0], pk.Store | pk.AddTo)
        is_many = gpu is HOPPER and is_stored and (case.takes_operand or case.products[0].block is None)
        assert longest in (None, Many if is_many else by_rows[1])


def parts_of(plan: pk.Plan) -> int:
    """The parts of the inputs whose sums are added."""
    kernel: Any = plan.kernel
    return kernel.tiling.own_parts if isinstance(kernel, Many) else kernel.layout.split.all_parts
