"""Which plans problems get: what is impossible, has no kernel or is faster without, and how launches are divided."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from pallas_kernels.activations import OperandRows, PlainRows, RoundedRows, round_rows
from pallas_kernels.language import target
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.few.launch import Few, Pair, fastest_layout
from pallas_kernels.products.many.launch import Many as ManyLaunch
from pallas_kernels.products.many.tiling import fastest_tiling
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product, any_plan, random_angles

BLOCK = 128, 128
MODEL = (32768, 1024), (8192, 1024)  # weights of V4-Flash whose outputs are queries
ATTENTION = pk.AttentionQueries(eps=1e-6, rope_dim=64)


def indexer(key_dim: int = 128, rope_dim: int = 64, key_format: str = "mxfp4") -> pk.IndexerQueries:
    row = INDEXER_FORMATS["mxfp4"].row(key_dim)
    return pk.IndexerQueries(key_format=key_format, key_row=row, rope_dim=rope_dim)


def problem(
    rows: int,
    *of: tuple[dict[str, Any], pk.Epilogue],
    needed: pk.Needed = pk.Needed.ALL,
    **of_rows: Any,
) -> pk.Problem:
    """A problem of so many rows, and for each weight its form and what is made."""
    weights, epilogues = tuple(pk.WeightSpec(**form) for form, _ in of), tuple(made for _, made in of)
    given = pk.RowsSpec(count=rows, width=weights[0].groups * weights[0].inputs, **of_rows)
    return pk.Problem(rows=given, weights=weights, epilogues=epilogues, needed=needed)


def refused(problem: pk.Problem, gpu: target.GPU = HOPPER) -> pk.Unsupported:
    found = pk.plan(problem, gpu)
    assert isinstance(found, pk.Unsupported)
    return found


def fp8(shape: tuple[int, int], **form: Any) -> dict[str, Any]:
    return dict(shape=shape, block=BLOCK, **form)


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("no kernel", fp8((96, 128)), r"a multiple of 64 outputs and 128 inputs, got \(96, 128\)"),
        ("no kernel", fp8((192, 128), groups=2), "each of 2 groups"),
        ("no kernel", fp8((64, 192)), "128 inputs"),
        ("no kernel", dict(shape=(64, 96)), "64 inputs"),
        (
            "no kernel",
            dict(shape=(64, 128), block=(8, 128)),
            r"multiples of 16 x 32 with activations='bf16', got \(8, 128\)",
        ),
        (
            "no kernel",
            dict(shape=(64, 128), block=(32, 32), activations="fp8"),
            "multiples of 16 x 128 with activations='fp8'",
        ),
        ("impossible", dict(shape=(64, 128), activations="fp8"), "only for FP8 weights"),
        ("impossible", fp8((64, 128), activations="int8"), "must be one of"),
        (
            "no kernel",
            dict(shape=(64, 128), dtype=jnp.float32),
            "a weight without scales must be bfloat16, got float32",
        ),
    ],
)
@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_weights_that_no_kernel_serves_are_named(kind, form, message, gpu):
    found = refused(problem(2, (form, pk.Store())), gpu)
    assert found.kind == kind
    assert found.plan is None
    assert re.search(message, found.reason)


def test_rows_and_sums_that_no_kernel_has_are_named():
    weight = fp8((128, 128))
    found = refused(problem(2, (weight, pk.Store()), dtype=jnp.float32))
    assert (found.kind, found.reason) == ("no kernel", "rows must be bfloat16, got float32")
    found = refused(problem(2, (weight, pk.Store(dtype=jnp.float16))))
    assert (found.kind, found.reason) == ("no kernel", "sums are stored as f32 or bf16, got float16")
    found = refused(problem(129, (weight, pk.Store(kind=OperandRows))))
    assert (found.kind, found.reason) == ("no kernel", "operand rows are made of few rows, got 129")
    found = refused(problem(2, (weight, pk.Store()), (weight, pk.Store()), (weight, pk.Store())))
    assert (found.kind, found.reason) == ("no kernel", "a launch multiplies by one or two weights, got 3")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (dict(shape=(384, 128), groups=2), "a multiple of 128 outputs"),
        (fp8((192, 128)), "a multiple of 128 outputs"),
        (dict(shape=(128, 128), block=(64, 128), activations="fp8"), "multiple of 128 outputs with activations='fp8'"),
    ],
)
def test_weights_that_only_the_kernel_of_few_rows_serves_are_slower_for_many(form, message):
    assert isinstance(pk.plan(problem(128, (form, pk.Store())), HOPPER), pk.Plan)
    found = refused(problem(129, (form, pk.Store())))
    assert found.kind == "slower"
    assert message in found.reason
    assert isinstance(found.plan.kernel, Few)


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_the_kernel_of_many_rows_serves_any_number_of_them(activations):
    found = pk.plan(problem(1 << 20, (fp8((128, 128), activations=activations), pk.Store())), HOPPER)
    assert isinstance(found, pk.Plan)
    assert isinstance(found.kernel, ManyLaunch)
    of_blackwell = refused(problem(129, (fp8((128, 128), activations=activations), pk.Store())), BLACKWELL)
    assert of_blackwell.kind == "slower"
    assert "the GPU is no Hopper" in of_blackwell.reason


@pytest.mark.parametrize(
    ("rows", "outputs", "needed", "is_served"),
    [
        (1, 1024, "all", True),  # 2^22 numbers
        (1, 1088, "all", False),
        (2, 4096, "all", True),
        (128, 4096, "all", True),
        (128, 4160, "all", False),
        (129, 64, "all", False),
        (4096, 64, "all", False),
        (4096, 4096, "mask", True),
        (4096, 4096, "prefix", False),
        (4096, 4160, "mask", False),
        (1023, 64, "mask", False),
    ],
)
def test_wide_weights_have_a_kernel_where_it_is_faster(rows, outputs, needed, is_served):
    found = pk.plan(problem(rows, (dict(shape=(outputs, 4096)), pk.Store()), needed=pk.Needed(needed)), HOPPER)
    assert isinstance(found, pk.Plan) == is_served
    if isinstance(found, pk.Unsupported):
        assert found.kind == "slower"
        assert isinstance(found.plan, pk.Plan)


def test_what_is_added_to_no_residual_is_named():
    wide = dict(shape=(128, 256))
    found = refused(problem(200, (wide, pk.AddTo())))
    assert found.kind == "no kernel"
    assert "the sums of more than 128 rows are added by products with FP8 weights, got 200" in found.reason
    found = refused(problem(40, (wide, pk.AddTo())))
    assert found.kind == "slower"
    assert isinstance(found.plan, pk.Plan)


# ---- rows of another class ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "form", "kind"),
    [
        (128, {}, OperandRows),
        (129, {}, PlainRows),
        (64, dict(activations="fp8"), PlainRows),
        (65, dict(activations="fp8"), RoundedRows),
        (130, dict(activations="fp8", block=(64, 128)), PlainRows),
        (64, dict(block=None), PlainRows),
    ],
)
def test_rows_that_a_product_takes_best(rows, form, kind):
    of_weight = dict(shape=(128, 512), block=BLOCK) | form
    asked = problem(rows, (of_weight, pk.Store()))
    assert pk.rows_taken(asked, HOPPER) == dataclasses.replace(asked.rows, kind=kind)
    for other in {OperandRows, RoundedRows} - {kind}:
        found = refused(problem(rows, (of_weight, pk.Store()), kind=other))
        assert found.kind == "no kernel"
        assert f"no kernel takes {rows} rows of {other.__name__}" in found.reason


# ---- queries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("slower", dict(rows=64), "too few blocks of whole heads"),
        ("no kernel", dict(shape=(768, 128)), "heads of 512, got 768 outputs and heads of 512"),
        ("no kernel", dict(head_dim=256), "heads of 512, got 512 outputs and heads of 256"),
        ("no kernel", dict(rope_dim=24), "a multiple of 16 up to 256, got 24"),
        ("no kernel", dict(activations="bf16", rows=129), "activations='fp8'"),
        ("no kernel", dict(block=(64, 128)), "blocks of a scale"),
        ("no kernel", dict(shape=(32, 128)), "a multiple of 64 outputs"),
        ("no kernel", dict(block=None, activations="bf16", rows=1), "FP8 weights"),
    ],
)
def test_queries_of_attention_that_no_kernel_makes_are_named(kind, change, message):
    sizes: dict[str, Any] = dict(shape=(512, 128), block=BLOCK, activations="fp8", rows=65, head_dim=512, rope_dim=64)

    def asked(rows: int, head_dim: int, rope_dim: int, **form: Any) -> pk.Problem:
        return problem(rows, (form, pk.AttentionQueries(eps=0.0, rope_dim=rope_dim, head_dim=head_dim)))

    assert isinstance(pk.plan(asked(**sizes), HOPPER), pk.Plan)
    found = refused(asked(**(sizes | change)))
    assert found.kind == kind
    assert message in found.reason


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("no kernel", dict(key_dim=64), "heads of 128 and a rope_dim that is a multiple of 16, got 64 and 64"),
        ("no kernel", dict(rope_dim=24), "heads of 128 and a rope_dim that is a multiple of 16, got 128 and 24"),
        ("no kernel", dict(rope_dim=132), "a multiple of 4 up to 128, got 132"),
        ("no kernel", dict(key_format="bf16"), "a 4-bit format, got 'bf16'"),
        ("no kernel", dict(activations="bf16", rows=129), "activations='fp8'"),
        ("no kernel", dict(shape=(64, 128)), "got 64 outputs and heads of 128"),
        ("no kernel", dict(block=(64, 128)), "blocks of a scale"),
        ("no kernel", dict(rows=1, shape=(8256, 1024)), "heads of (64, 128, 256), got 8256 outputs and heads of 128"),
        ("no kernel", dict(rows=1, shape=MODEL[1], key_dim=512), "(64, 128, 256), got 8192 outputs and heads of 512"),
        ("no kernel", dict(rows=1, shape=MODEL[1], rope_dim=30), "a multiple of 4 up to 128, got 30"),
        ("no kernel", dict(rows=1, shape=MODEL[1], groups=2), "outputs must be heads"),
        ("slower", dict(rows=1, shape=(512, 1024)), "too few blocks of whole heads"),
        ("no kernel", dict(rows=1, shape=(96, 1024)), "a multiple of 64 outputs"),
    ],
)
def test_queries_of_the_indexer_that_no_kernel_makes_are_named(kind, change, message):
    sizes: dict[str, Any] = dict(shape=(256, 128), block=BLOCK, activations="fp8", rows=65)
    sizes |= dict(key_dim=128, rope_dim=64, key_format="mxfp4")

    def asked(rows: int, key_dim: int, rope_dim: int, key_format: str, **form: Any) -> pk.Problem:
        return problem(rows, (form, indexer(key_dim, rope_dim, key_format)))

    assert isinstance(pk.plan(asked(**sizes), HOPPER), pk.Plan)
    found = refused(asked(**(sizes | change)))
    assert found.kind == kind
    assert message in found.reason


def both(
    rows: int = 64,
    shapes: tuple[tuple[int, int], tuple[int, int]] = MODEL,
    key_dim: int = 128,
    rope_dim: int = 64,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
) -> pk.Problem:
    one = fp8(shapes[0]) | (first or {}), pk.AttentionQueries(eps=1e-6, rope_dim=rope_dim)
    return problem(rows, one, (fp8(shapes[1]) | (second or {}), indexer(key_dim, rope_dim)))


@pytest.mark.parametrize("rows", [1, 64])
def test_the_sizes_of_a_model_are_served(rows):
    for asked in (
        problem(rows, (fp8(MODEL[0]), ATTENTION)),
        problem(rows, (fp8(MODEL[1]), indexer())),
        both(rows),
    ):
        found = pk.plan(asked, HOPPER)
        assert isinstance(found, pk.Plan)
        assert isinstance(found.kernel, Few)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("slower", dict(rows=129), "one launch for at most 128 rows, got 129"),
        ("no kernel", dict(shapes=(MODEL[0], (4096, 1024))), "as many heads and inputs"),
        ("no kernel", dict(shapes=(MODEL[0], (16384, 1024)), key_dim=256), "must have 128 outputs, got 256"),
        ("slower", dict(shapes=((512, 1024), (128, 1024))), "too few blocks of whole heads"),
        ("no kernel", dict(rope_dim=40), "a multiple of 16 up to 256, got 40"),
        ("no kernel", dict(second=dict(block=(64, 128))), "stored in the same way"),
        ("no kernel", dict(first=dict(block=None), second=dict(block=None)), "FP8 weights"),
    ],
)
def test_what_one_launch_does_not_make_is_named(kind, change, message):
    found = refused(both(**change))
    assert found.kind == kind
    assert message in found.reason


def test_two_products_have_rows_of_one_width():
    with pytest.raises(ValueError, match="rows of 1024 numbers do not fit 1 groups of 512 inputs"):
        both(shapes=(MODEL[0], (8192, 512)))
    with pytest.raises(ValueError, match="each weight has an epilogue, got 1 and 2"):
        dataclasses.replace(both(), weights=both().weights[:1])


def test_what_is_no_pair_is_named():
    wide, stored = dict(shape=(1024, 4096)), fp8((1536, 4096))
    found = pk.plan(problem(64, (wide, pk.Store()), (stored, pk.Store())), HOPPER)
    assert isinstance(found, pk.Plan)
    assert isinstance(found.kernel, Pair)

    def why(rows: int, first: dict[str, Any], second: dict[str, Any], gpu: target.GPU = HOPPER) -> tuple[str, str]:
        found = refused(problem(rows, (first, pk.Store()), (second, pk.Store())), gpu)
        return found.kind, found.reason

    assert why(65, wide, stored) == ("slower", "two products are one launch for at most 64 rows, got 65")
    assert why(1, wide, stored, BLACKWELL) == ("no kernel", "the GPU is no Hopper")
    assert why(1, wide | dict(groups=1), wide)[0] == "slower"
    kind, reason = why(1, dict(shape=(32768, 4096)), stored)
    assert kind == "slower"
    assert "is not expected to be faster than two" in reason


# ---- how launches are divided ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("inputs", [128, 896, 1024, 4096, 7168])
@pytest.mark.parametrize("outputs", [64, 1536, 32768])
def test_the_parts_of_a_sum_do_not_depend_on_the_rows(outputs, inputs, gpu):
    weight = pk.WeightSpec(shape=(outputs, inputs), block=BLOCK)
    layouts = [fastest_layout(pk.RowsSpec(count=rows, width=inputs), weight, pk.Store(), gpu) for rows in range(1, 65)]
    assert {layout.split.all_parts for layout in layouts} == {layouts[0].split.all_parts}
    for layout in layouts:
        split = layout.split
        assert split.chunks * split.all_parts * 128 == inputs
        assert split.blocks * split.tiles * 64 >= outputs
        assert layout.grid.shared_bytes <= gpu.shared_bytes


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [65, 128, 256, 300, 4096, 5000])
@pytest.mark.parametrize(
    ("outputs", "inputs", "groups"),
    [(128, 128, 1), (1536, 4096, 1), (32768, 1024, 1), (1024, 4096, 8), (4096, 8192, 1)],
)
def test_tilings_cover_a_product_once(outputs, inputs, groups, rows, activations):
    weight = pk.WeightSpec(shape=(groups * outputs, inputs), block=BLOCK, groups=groups, activations=activations)
    tiling = fastest_tiling(rows, weight, pk.Store(), HOPPER)
    assert 0 <= tiling.row_tiles * tiling.tile_rows - rows < tiling.tile_rows
    assert tiling.tiles * tiling.tile_outputs == tiling.row_tiles * groups * outputs
    assert tiling.chunks * tiling.chunk * tiling.parts == inputs
    assert tiling.is_possible
    assert tiling.blocks <= tiling.room
    assert tiling.grid.shared_bytes + 1024 <= HOPPER.shared_bytes
    assert tiling.stages >= 3


@pytest.mark.parametrize("rows", [65, 300, 4096, 8192])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (1024, 4096), (2624, 4096)])
def test_tilings_of_wide_weights_cover_a_product(outputs, inputs, rows):
    """The last tile may have more outputs than there are."""
    tiling = fastest_tiling(rows, pk.WeightSpec(shape=(outputs, inputs)), pk.Store(), HOPPER)
    assert 0 <= tiling.row_tiles * tiling.tile_rows - rows < tiling.tile_rows
    assert 0 <= tiling.output_tiles * tiling.tile_outputs - outputs < tiling.tile_outputs
    assert tiling.chunks * tiling.chunk * tiling.parts == inputs
    assert tiling.grid.shared_bytes + 1024 <= HOPPER.shared_bytes
    assert tiling.stages >= 3


# ---- arrays that are not the problem's ------------------------------------------------------------------------------


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize(
    "case",
    [
        Product(rows=65, outputs=128, inputs=128),
        Product(rows=65, outputs=128, inputs=128, activations="fp8"),
        Product(rows=129, outputs=128, inputs=128),
        Product(rows=129, outputs=64, inputs=64, block=None),
    ],
    ids=str,
)
def test_many_rows_are_rounded_by_a_launch_of_their_own(case, simulate):
    """And what is planned gives the product."""
    plan, x, arrays = any_plan(case.problem()), case.x, case.arrays
    program = jax.jit(lambda x: pk.run(plan, x, [arrays], simulate=simulate))
    assert ("round_rows" in program.lower(x).as_text()) == (case.activations == "fp8" and not simulate)
    (found,) = program(x)
    case.check(found, simulate=simulate)


def test_arrays_that_are_not_the_problems_are_refused():
    case = Product(rows=3, outputs=128, inputs=128)
    weight, scales = case.arrays

    def run(x: Any = case.x, arrays: Any = case.arrays, *extras: Any, made: Any = None) -> Any:
        return pk.run(any_plan(case.problem(made)), x, [arrays], *extras, simulate=True)

    for x in (case.x[:2], case.x.astype(jnp.float32), OperandRows.of(case.x)):
        with pytest.raises(AssertionError):
            run(x)
    wrong = (
        (weight[:64], scales),
        (weight, scales.astype(jnp.float32)),
        (weight,),
        (weight.astype(jnp.bfloat16), scales),
    )
    for arrays in wrong:
        with pytest.raises(AssertionError):
            run(arrays=arrays)
    with pytest.raises(ValueError, match="the problem has 1 weights, got 2"):
        pk.run(any_plan(case.problem()), case.x, [case.arrays] * 2, simulate=True)
    with pytest.raises(ValueError, match=r"takes \('onto', 'positions'\) beside its weights, got 1 arrays"):
        run(case.x, case.arrays, case.x, made=pk.AddTo())
    onto, positions = jnp.zeros((3, 128), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    in_f32 = onto.astype(jnp.float32)
    for name, one, other in (
        ("onto", onto[:2], positions),
        ("onto", in_f32, positions),
        ("positions", onto, positions[:2]),
    ):
        with pytest.raises(AssertionError, match=name):
            run(case.x, case.arrays, one, other, made=pk.AddTo())


@pytest.mark.parametrize(
    ("needed", "which"),
    [
        (jnp.ones(64, bool), pk.Needed.MASK),
        (jnp.ones((1, 65), bool), pk.Needed.MASK),
        (jnp.ones(65, bool), pk.Needed.PREFIX),
        (jnp.ones((2, 65), bool), pk.Needed.PREFIX),
        (jnp.ones(65, jnp.int32), pk.Needed.MASK),
    ],
)
def test_needed_rows_are_one_bool_for_each_row(needed, which):
    case = Product(rows=65, outputs=128, inputs=128)
    with pytest.raises(AssertionError):
        pk.run(any_plan(case.problem(needed=which)), case.x, [case.arrays], needed, simulate=True)


def test_rows_of_a_class_have_its_shapes():
    case = Product(rows=130, outputs=128, inputs=256, activations="fp8")
    x = round_rows(case.x, simulate=True)
    plan = any_plan(case.problem(kind=RoundedRows))
    with pytest.raises(AssertionError, match=r"\(2, 64\).*\(2, 256\)|\(2, 256\).*\(2, 64\)"):
        pk.run(plan, dataclasses.replace(x, scales=x.scales[:, :64]), [case.arrays], simulate=True)
    few = Product(rows=64, outputs=128, inputs=512)
    wide = OperandRows(values=OperandRows.of(few.x).values.astype(jnp.float32))
    with pytest.raises(AssertionError, match="float32"):
        pk.run(any_plan(few.problem(kind=OperandRows)), wide, [few.arrays], simulate=True)


def test_a_plan_is_run_on_its_gpu():
    case = Product(rows=3, outputs=128, inputs=128)
    other = BLACKWELL if target.gpu_or_first() is HOPPER else HOPPER
    with pytest.raises(ValueError, match=f"the plan is of {other.architecture}, the target is"):
        pk.run(any_plan(case.problem(), other), case.x, [case.arrays])


def test_angles_are_those_of_the_problem():
    case = Product(rows=65, outputs=512, inputs=128, activations="fp8")
    plan = any_plan(case.problem(ATTENTION))
    with pytest.raises(AssertionError):
        pk.run(plan, case.x, [case.arrays], jnp.asarray(random_angles(65, 24)), simulate=True)
