"""Products with stored weights: exact but for the order of sums, whatever the split, and the same for a row alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language.target import BLACKWELL, HOPPER
from pallas_kernels.products.launches import fastest_layout
from pallas_kernels.products.many.tiling import fastest_tiling
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES, MACHINES, no_gpu, requires_gpu
from tests.support.product_cases import Many, Product

machines = pytest.mark.parametrize("simulate", MACHINES)

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
FORMS = [
    Product(rows=9, outputs=64, inputs=512, block=(32, 32), parts=(2, 1)),
    Product(rows=3, outputs=128, inputs=256, block=(16, 64), dtype=jnp.bfloat16, parts=(1, 1), tiles=2),
    Product(rows=11, outputs=192, inputs=512, block=None, parts=(2, 1), tiles=2),
    Product(rows=3, outputs=64, inputs=192, block=None),
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
@pytest.mark.parametrize("case", first_of(STREAMED[:1] + SHAPES + PARTS + FORMS + STREAMED[1:], count=9), ids=str)
def test_products_are_exact_but_for_the_order_of_sums(case, simulate):
    case.check(case.run(simulate=simulate, gpu=HOPPER if simulate else _here()), simulate=simulate)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize("case", first_of(MANY, count=8), ids=str)
def test_products_of_many_rows_are_exact_but_for_the_order_of_sums(case, simulate):
    case.check(case.run(simulate=simulate, gpu=HOPPER), simulate=simulate)


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
def test_the_public_function_takes_many_rows(case, simulate):
    rows, activations = case.rows, case.activations
    weight, scales = case.weight
    assert pk.unsupported_product(weight.shape, case.form, rows) is None
    program = jax.jit(lambda x: pk.product(x, weight, scales, case.form, simulate=simulate))
    assert ("round_rows" in program.lower(case.x).as_text()) == (activations == "fp8" and not simulate)
    case.check(np.asarray(program(case.x)), simulate=simulate)


@pytest.mark.simulated
@pytest.mark.parametrize("case", first_of(PARTS[:3] + FORMS + SHAPES, count=5), ids=str)
def test_products_of_the_blackwell_kernel(case):
    case.check(case.run(simulate=True, gpu=BLACKWELL), simulate=True)


def _here():
    return BLACKWELL if no_gpu(10) is None else HOPPER


# The simulator's sums are NumPy's, whose order depends on the number of rows.
@requires_gpu
@pytest.mark.parametrize(
    "case",
    [
        Product(rows=64, outputs=128, inputs=1024),
        Product(rows=64, outputs=64, inputs=2048, groups=2, parts=(2, 1)),
        Product(rows=64, outputs=128, inputs=512, activations="fp8"),
        Product(rows=64, outputs=256, inputs=1024, parts=(1, 1), tiles=4, streams=True),
    ],
    ids=str,
)
def test_a_row_has_the_same_sums_alone_and_in_a_batch(case):
    """Bit for bit, whatever the split that its number of rows gets, and whether x is copied chunk by chunk."""
    all_rows = case.run(simulate=False, gpu=_here())
    for first, count in ((0, 1), (5, 8), (40, 17)):
        few = dataclasses.replace(case, rows=count, parts=None)
        if case.parts is not None:  # the same parts, in one block
            few = dataclasses.replace(few, parts=case.parts[::-1], streams=False)
        found = few.run(case.x[first : first + count], simulate=False, gpu=_here())
        np.testing.assert_array_equal(found, all_rows[first : first + count])


@machines
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "size", [dict(rows=9, outputs=64), dict(rows=66, outputs=128, many=Many())], ids=["few", "many"]
)
def test_other_rows_do_not_matter(size, activations, simulate):
    case, gpu = Product(inputs=256, activations=activations, **size), HOPPER if simulate else _here()
    others = case.x.at[1:].set(jnp.nan)
    found, want = (case.run(x, simulate=simulate, gpu=gpu) for x in (others, case.x))
    np.testing.assert_array_equal(found[0], want[0])
    assert np.isnan(found[1:]).all()


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("inputs", [128, 896, 1024, 4096, 7168])
@pytest.mark.parametrize("outputs", [64, 1536, 32768])
def test_the_parts_of_a_sum_do_not_depend_on_the_rows(outputs, inputs, gpu):
    form = pk.WeightForm(block=(128, 128))
    layouts = [fastest_layout(rows, (outputs, inputs), form, gpu) for rows in range(1, 65)]
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
    form = pk.WeightForm(block=(128, 128), groups=groups, activations=activations)
    tiling = fastest_tiling(rows, outputs, inputs, form, HOPPER)
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
    tiling = fastest_tiling(rows, outputs, inputs, pk.WeightForm(), HOPPER)
    assert 0 <= tiling.row_tiles * tiling.tile_rows - rows < tiling.tile_rows
    assert 0 <= tiling.output_tiles * tiling.tile_outputs - outputs < tiling.tile_outputs
    assert tiling.chunks * tiling.chunk * tiling.parts == inputs
    assert tiling.grid.shared_bytes + 1024 <= HOPPER.shared_bytes
    assert tiling.stages >= 3


# The simulator's sums are NumPy's.
@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("form", [dict(), dict(activations="fp8"), dict(block=None)], ids=str)
def test_a_row_has_the_same_sums_among_any_many_rows(form):
    """Bit for bit, unless blocks share its inputs."""
    case = Product(rows=300, outputs=256, inputs=2048, many=Many(parts=1), **form)
    all_rows = case.run(simulate=False)
    for first, count in ((0, 65), (7, 100), (200, 96)):
        few = dataclasses.replace(case, rows=count)
        found = few.run(case.x[first : first + count], simulate=False)
        np.testing.assert_array_equal(found, all_rows[first : first + count])


@machines
@pytest.mark.parametrize("rows", [2, 65])
def test_scales_that_the_kernel_cannot_hold_give_nan(rows, simulate):
    case = Product(rows=rows, outputs=128, inputs=128)
    weight, scales = case.weight
    assert scales is not None
    too_large = jnp.full(scales.shape, 2.0**8, jnp.float32).astype(scales.dtype)
    found = pk.product(case.x, weight, too_large, case.form, simulate=simulate)
    assert np.isnan(np.asarray(found)[0]).all()


@machines
@pytest.mark.parametrize("rows", [3, 67])
def test_rounded_rows_that_are_not_finite_give_nan_alone(rows, simulate):
    case = Product(rows=rows, outputs=128, inputs=256, activations="fp8")
    weight, scales = case.weight
    x = case.x.at[0, 3].set(jnp.nan).at[1, 200].set(jnp.inf)
    found = np.asarray(pk.product(x, weight, scales, case.form, simulate=simulate))
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2:]).all()
    assert not found[-1].any()  # a row of zeros


@pytest.mark.parametrize(
    ("form", "shape", "message"),
    [
        (dict(block=(128, 128)), (96, 128), r"a multiple of 64 outputs and 128 inputs, got \(96, 128\)"),
        (dict(block=(128, 128), groups=2), (192, 128), "each of 2 groups"),
        (dict(block=(128, 128)), (64, 192), "128 inputs"),
        (dict(), (64, 96), "64 inputs"),
        (dict(block=(8, 128)), (64, 128), r"multiples of 16 x 32 with activations='bf16', got \(8, 128\)"),
        (dict(block=(32, 32), activations="fp8"), (64, 128), "multiples of 16 x 128 with activations='fp8'"),
        (dict(activations="fp8"), (64, 128), "only for FP8 weights"),
        (dict(block=(128, 128), activations="int8"), (64, 128), "must be one of"),
    ],
)
def test_weights_that_no_kernel_serves_are_named(form, shape, message):
    form = pk.WeightForm(**form)
    reason = pk.unsupported_product(shape, form)
    assert reason is not None
    weight, scales = jax.ShapeDtypeStruct(shape, jnp.bfloat16), None
    if form.block is not None:
        weight = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        blocks = tuple(-(-size // by) for size, by in zip(shape, form.block, strict=True))
        scales = jax.ShapeDtypeStruct(blocks, jnp.float8_e8m0fnu)
    x = jax.ShapeDtypeStruct((2, form.groups * shape[1]), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x, weight, scales: pk.product(x, weight, scales, form, simulate=True), x, weight, scales)


@pytest.mark.parametrize(
    ("form", "shape", "message"),
    [
        (dict(groups=2), (384, 128), "a multiple of 128 outputs"),
        (dict(block=(128, 128)), (192, 128), "a multiple of 128 outputs"),
        (dict(block=(64, 128), activations="fp8"), (128, 128), "multiple of 128 outputs with activations='fp8'"),
    ],
)
def test_weights_that_only_the_kernel_of_few_rows_serves_are_named(form, shape, message):
    form = pk.WeightForm(**form)
    assert pk.unsupported_product(shape, form, 128) is None
    reason = pk.unsupported_product(shape, form, 129)
    assert reason is not None
    assert message in reason


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_the_kernel_of_many_rows_serves_any_number_of_them(activations):
    form = pk.WeightForm(block=(128, 128), activations=activations)
    assert pk.unsupported_product((128, 128), form, 1 << 20) is None
