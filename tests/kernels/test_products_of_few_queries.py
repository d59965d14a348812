"""Queries that are made in their product with up to 64 rows, compared with the product and its conversion."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dsv4jax.formats import INDEXER_FORMATS
from pallas_kernels.formats import KEY_FORMATS, Fp4Keys
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.launches import fastest_layout, launch_few, launch_product, layout_of_heads
from pallas_kernels.products.queries import AttentionHeads, IndexerHeads, QueryHeads
from tests.support.cases import first_of
from tests.support.kernel_cases import same_bytes
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product, random_angles

EPS = 1e-6
# GPUs for which a few blocks are enough. The first one's blocks do not share inputs, the other one's do.
FOR_ATTENTION = dataclasses.replace(HOPPER, multiprocessors=3, clusters={2: 1})
FOR_INDEXER = dataclasses.replace(HOPPER, multiprocessors=1)
FORM = pk.WeightForm(block=(128, 128))
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

    def __str__(self) -> str:
        of = self.key_format or "attention"
        return f"{of} {self.rows} rows {self.inputs} to {self.heads} x {self.dim} {self.activations}, {self.rope_dim}"

    @property
    def product(self) -> Product:
        outputs = self.dim * self.heads
        return Product(rows=self.rows, outputs=outputs, inputs=self.inputs, activations=self.activations)

    @property
    def made(self) -> QueryHeads:
        if self.key_format is None:
            return AttentionHeads(dim=self.dim, eps=EPS)
        keys = KEY_FORMATS[self.key_format]
        assert isinstance(keys, Fp4Keys)
        return IndexerHeads(dim=self.dim, keys=keys)

    @functools.cached_property
    def angles(self) -> np.ndarray:
        return random_angles(self.rows, self.rope_dim)

    @property
    def row(self) -> Any:
        """What is stored of a head."""
        if self.key_format is None:
            return jax.ShapeDtypeStruct((self.dim,), jnp.float16)
        return INDEXER_FORMATS[self.key_format].row(self.dim)

    def run(self, x: jax.Array | None = None, *, simulate: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the leaves [rows, heads, ...] of the queries, and of those of two launches with the same blocks."""
        shape, gpu = (self.dim * self.heads, self.inputs), FOR_INDEXER if self.key_format else FOR_ATTENTION
        layout = layout_of_heads(self.rows, shape, self.product.form, self.made, gpu)
        assert layout is not None
        split = dataclasses.replace(layout.split, blocks=layout.split.blocks * self.made.blocks)
        plain = dataclasses.replace(layout, heads=None, split=split)
        weight, scales = self.product.weight
        assert scales is not None
        given = ProductInputs(
            x=self.product.x if x is None else x, weight=weight.view(jnp.uint8), scales=scales.view(jnp.uint8)
        )
        lead = (self.rows * self.heads,) if self.key_format else (self.rows, self.heads)
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype), self.row)
        if self.key_format is None:
            state = jax.ShapeDtypeStruct((self.rows, self.heads * self.dim), jnp.float16)

        def in_product(given: ProductInputs) -> Any:
            return launch_few(
                layout, dataclasses.replace(given, angles=jnp.asarray(self.angles)), state, simulate=simulate
            )

        def two_launches(given: ProductInputs) -> Any:
            product = launch_product(plain, given, jnp.float32, simulate=simulate)
            product = product.reshape(1, self.rows, self.heads, self.dim)
            if self.key_format is None:
                return pk.attention_queries(product, jnp.asarray(self.angles)[None], eps=EPS, simulate=simulate)
            convert = functools.partial(pk.indexer_queries, key_format=self.key_format, simulate=simulate)
            return convert(product, jnp.asarray(self.angles)[None], self.row)

        def leaves(run: Any) -> list[np.ndarray]:
            made = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(run)(given))]
            return [leaf.reshape(self.rows, self.heads, -1) for leaf in made]

        return leaves(in_product), leaves(two_launches)

    def check(self, found: list[np.ndarray], want: list[np.ndarray]) -> None:
        """Compare the indexer's exactly, and those of attention as numbers that are rounded to f16.

        Attention's sums of squares run in another order and are off by a few 2^-24, so that an element may round to the
        f16 beside it. One that its rope nearly cancels is off by as much of its pair, which is below 23.
        """
        if self.key_format is not None:
            for name, one, other in zip(("codes", "scales"), found, want, strict=True):
                same_bytes(name, one, other)
            return
        (one,), (other,) = found, want
        assert one.dtype == np.float16
        ulp = np.spacing(np.abs(other)).astype(np.float32)
        assert np.all(np.abs(one.astype(np.float32) - other.astype(np.float32)) <= np.maximum(ulp, 2.0**-19))
        assert np.mean(one != other) < 2e-3  # some 2^-22 of an element over its f16's 2^-11


# Rows that do not fill the last lines, as many as a block has, and x copied chunk by chunk; blocks that share inputs,
# the second of which has no row; other ropes, number formats and sizes of heads.
CASES = [
    Queries(rows=3, heads=2, inputs=256),
    Queries(rows=64, heads=1, inputs=3072),
    Queries(rows=5, heads=2, inputs=256, dim=128, key_format="mxfp4"),
    Queries(rows=64, heads=1, inputs=1024, dim=128, key_format="nvfp4"),
    Queries(rows=21, heads=1, inputs=128, rope_dim=256),
    Queries(rows=17, heads=1, inputs=256, rope_dim=16, activations="fp8"),
    Queries(rows=19, heads=3, inputs=1024, dim=128, key_format="mxfp4", activations="fp8"),
    Queries(rows=9, heads=2, inputs=256, dim=64, rope_dim=20, key_format="mxfp4"),
    Queries(rows=40, heads=1, inputs=256, dim=256, rope_dim=64, key_format="mxfp4"),
]


@on_hopper
@pytest.mark.parametrize("case", first_of(CASES, count=4), ids=str)
def test_queries_are_those_of_two_launches(case, simulate):
    found, want = case.run(simulate=simulate)
    case.check(found, want)


@on_hopper
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_a_row_that_is_not_finite_spoils_no_other(case, simulate):
    spoilt, _ = case.run(case.product.x.at[1].set(jnp.nan), simulate=simulate)
    whole, _ = case.run(simulate=simulate)
    for one, other in zip(spoilt, whole, strict=True):
        np.testing.assert_array_equal(np.delete(one, 1, 0), np.delete(other, 1, 0))
        assert (one[1] != other[1]).any()


# The simulator's sums are NumPy's, whose order depends on the number of rows.
@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", [None, "mxfp4"])
def test_a_row_has_the_same_queries_alone_and_in_a_batch(key_format):
    """Bit for bit, at a model's sizes; the indexer's are those of two launches whatever their blocks are."""
    case = Queries(rows=64, heads=64, inputs=1024, dim=128 if key_format else 512, key_format=key_format)
    (weight, scales), x, angles = case.product.weight, case.product.x, jnp.asarray(case.angles)
    assert scales is not None

    @jax.jit
    def run(x: jax.Array, angles: jax.Array) -> Any:
        if key_format is None:
            return pk.product_of_queries(x, weight, scales, FORM, angles, eps=EPS)
        return pk.product_of_indexer_queries(x, weight, scales, FORM, angles, case.row, key_format=key_format)

    all_rows = jax.tree.leaves(run(x, angles))
    for first, count in ((0, 1), (5, 8), (40, 17)):
        some = slice(first, first + count)
        for alone, together in zip(jax.tree.leaves(run(x[some], angles[some])), all_rows, strict=True):
            np.testing.assert_array_equal(alone, together[some])
    product = jax.jit(lambda x: pk.product(x, weight, scales, FORM))(x).reshape(1, 64, 64, case.dim)
    if key_format is None:
        want = pk.attention_queries(product, angles[None], eps=EPS)
    else:
        want = pk.indexer_queries(product, angles[None], case.row, key_format=key_format)
    leaves = [np.asarray(leaf)[0] for leaf in jax.tree.leaves(want)]
    case.check([np.asarray(leaf) for leaf in all_rows], leaves)


@pytest.mark.parametrize("inputs", [512, 1024, 1536, 4096])
@pytest.mark.parametrize("made", [CASES[0].made, CASES[2].made], ids=["attention", "indexer"])
def test_whether_queries_are_made_does_not_depend_on_the_rows(made, inputs):
    for outputs in (4096, 8192, 32768, 65536):
        found = [layout_of_heads(rows, (outputs, inputs), FORM, made, HOPPER) for rows in range(1, 65)]
        assert {layout is None for layout in found} == {found[0] is None}
        for rows, layout in enumerate(found, 1):
            if layout is None:
                continue
            parts = fastest_layout(rows, (outputs, inputs), FORM, HOPPER).split.all_parts
            assert layout.split.all_parts == parts
            assert layout.split.chunks * parts * 128 == inputs
            assert layout.split.blocks * layout.split.tiles * made.blocks * 64 == outputs
            assert layout.grid.shared_bytes + 1024 <= HOPPER.shared_bytes


def test_the_sizes_of_a_model_are_served():
    attention, indexer = (32768, 1024), (8192, 1024)
    for rows in (1, 64):
        assert pk.unsupported_product_of_queries(attention, FORM, rows, 512, 64) is None
        assert pk.unsupported_product_of_indexer_queries(indexer, FORM, rows, 128, 64, "mxfp4") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=65), "queries of more than 64 rows are made in products with activations='fp8'"),
        (dict(shape=(8256, 1024)), r"heads of \(64, 128, 256\), got 8256 outputs and heads of 128"),
        (dict(key_dim=512), r"heads of \(64, 128, 256\), got 8192 outputs and heads of 512"),
        (dict(rope_dim=30), "a multiple of 4 up to 128, got 30"),
        (dict(key_format="bf16"), "a 4-bit format, got 'bf16'"),
        (dict(form=pk.WeightForm(block=(128, 128), groups=2)), "outputs must be heads"),
        (dict(shape=(512, 1024)), "too few blocks of whole heads"),
        (dict(shape=(96, 1024)), "a multiple of 64 outputs"),
    ],
)
def test_what_no_kernel_serves_is_named(change, message):
    sizes: dict[str, Any] = dict(shape=(8192, 1024), form=FORM, rows=1, key_dim=128, rope_dim=64, key_format="mxfp4")
    reason = pk.unsupported_product_of_indexer_queries(**(sizes | change))
    assert reason is not None
    assert re.search(message, reason)
