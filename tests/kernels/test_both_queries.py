"""Queries of attention and of the indexer from one launch, compared with those of a launch each."""

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
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import ProductInputs
from pallas_kernels.products.both import layout_of_both
from pallas_kernels.products.launches import launch_few
from tests.kernels.test_products_of_few_queries import EPS, FOR_ATTENTION, FORM, Queries
from tests.support.cases import first_of
from tests.support.machines import HOPPER_MACHINES

MODEL = (32768, 1024), (8192, 1024)  # weights of V4-Flash
on_hopper = pytest.mark.parametrize("simulate", HOPPER_MACHINES)


def form_of(key_format: str = "mxfp4", weight: pk.WeightForm = FORM, key_dim: int = 128) -> pk.QueryForm:
    row = INDEXER_FORMATS[key_format].row(key_dim)
    return pk.QueryForm(weight=weight, eps=EPS, key_row=row, key_format=key_format)


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
        make = functools.partial(
            Queries,
            rows=self.rows,
            heads=self.heads,
            inputs=self.inputs,
            rope_dim=self.rope_dim,
            activations=self.activations,
        )
        return make(), make(dim=128, key_format=self.key_format)

    def run(self, x: jax.Array | None = None, *, simulate: bool) -> list[np.ndarray]:
        """Return the leaves [rows, heads, ...], with the blocks of a GPU for which a few are enough."""
        first, second = self.alone
        form = form_of(self.key_format, first.product.form)
        bytes_of = [jax.tree.map(lambda array: array.view(jnp.uint8), case.product.weight) for case in (first, second)]
        weight, scales = bytes_of[0]
        layout = layout_of_both(self.rows, (weight.shape, bytes_of[1][0].shape), form, FOR_ATTENTION)
        assert layout is not None
        given = ProductInputs(
            x=first.product.x if x is None else x,
            weight=weight,
            scales=scales,
            angles=jnp.asarray(first.angles),
            beside=(bytes_of[1][0], bytes_of[1][1]),
        )
        count = self.rows * self.heads
        state = (
            jax.ShapeDtypeStruct((self.rows, self.heads * 512), jnp.float16),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), form.key_row),
        )
        made = jax.jit(lambda given: launch_few(layout, given, state, simulate=simulate))(given)
        return [np.asarray(leaf).reshape(self.rows, self.heads, -1) for leaf in jax.tree.leaves(made)]


# Rows that do not fill the last lines, as many as a block has with x copied chunk by chunk, a number that two blocks
# divide into halves that are no eights; another format, another rope, rounded activations.
CASES = [
    Both(rows=3, heads=2, inputs=256),
    Both(rows=64, heads=1, inputs=1024, key_format="nvfp4"),
    Both(rows=17, heads=3, inputs=256, rope_dim=32),
    Both(rows=40, heads=1, inputs=256, rope_dim=128, activations="fp8"),
    Both(rows=8, heads=1, inputs=128, key_format="nvfp4"),
]


@on_hopper
@pytest.mark.parametrize("case", first_of(CASES, count=3), ids=str)
def test_queries_are_those_of_a_launch_each(case, simulate):
    """Attention's bit for bit, as its blocks are the same; the indexer's are, because x is the same in both cases."""
    first, second = case.alone
    x = first.product.x
    queries, *key_queries = case.run(x, simulate=simulate)
    (alone,), _ = first.run(x, simulate=simulate)
    if simulate:  # NumPy's sums depend on the number of outputs
        first.check([queries], [alone])
    else:
        np.testing.assert_array_equal(queries, alone)
    _, two_launches = second.run(x, simulate=simulate)
    for found, want in zip(key_queries, two_launches, strict=True):
        assert found.dtype == want.dtype
        # Sums of several parts may differ in their last bit, and a code that is near the middle of two with them.
        assert np.mean(found != want) < 1e-3


@on_hopper
def test_a_row_that_is_not_finite_spoils_no_other(simulate):
    case = CASES[0]
    x = case.alone[0].product.x
    spoilt, whole = case.run(x.at[1].set(jnp.nan), simulate=simulate), case.run(x, simulate=simulate)
    for one, other in zip(spoilt, whole, strict=True):
        np.testing.assert_array_equal(np.delete(one, 1, 0), np.delete(other, 1, 0))
        assert (one[1] != other[1]).any()


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("key_format", ["mxfp4", "nvfp4"])
def test_a_row_has_the_same_queries_alone_and_in_a_batch(key_format):
    """Bit for bit, at a model's sizes, and attention's are those of its own launch."""
    case = Both(rows=64, heads=64, inputs=1024, key_format=key_format)
    first, second = case.alone
    (weight, scales), (beside, beside_scales) = first.product.weight, second.product.weight
    assert scales is not None
    assert beside_scales is not None
    assert second.row is not None
    x, angles = first.product.x, jnp.asarray(first.angles)

    @jax.jit
    def run(x: jax.Array, angles: jax.Array) -> Any:
        return pk.product_of_both_queries(x, (weight, scales), (beside, beside_scales), form_of(key_format), angles)

    all_rows = jax.tree.leaves(run(x, angles))
    for start, count in ((0, 1), (5, 8), (40, 17)):
        some = slice(start, start + count)
        for alone, together in zip(jax.tree.leaves(run(x[some], angles[some])), all_rows, strict=True):
            np.testing.assert_array_equal(alone, together[some])
    np.testing.assert_array_equal(all_rows[0], pk.product_of_queries(x, weight, scales, FORM, angles, eps=EPS))
    product = jax.jit(lambda x: pk.product(x, beside, beside_scales, FORM))(x).reshape(1, 64, 64, 128)
    want = pk.indexer_queries(product, angles[None], second.row, key_format=key_format)
    for found, leaf in zip(all_rows[1:], jax.tree.leaves(want), strict=True):
        assert np.mean(np.asarray(found) != np.asarray(leaf)[0]) < 1e-3  # as above


@pytest.mark.parametrize("inputs", [512, 1024, 1536])
def test_whether_one_launch_makes_both_does_not_depend_on_the_rows(inputs):
    for heads in (8, 34, 64, 128):
        shapes = (heads * 512, inputs), (heads * 128, inputs)
        found = {pk.unsupported_product_of_both_queries(shapes, form_of(), rows, 64) is None for rows in range(1, 65)}
        assert len(found) == 1
        for rows in (1, 64) if True in found else ():
            layout = layout_of_both(rows, shapes, form_of(), HOPPER)
            assert layout is not None
            assert layout.grid.shared_bytes + 1024 <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=65), "one launch for at most 64 rows, got 65"),
        (dict(shapes=(MODEL[0], (4096, 1024))), "as many heads and inputs"),
        (dict(shapes=(MODEL[0], (8192, 512))), "as many heads and inputs"),
        (dict(shapes=(MODEL[0], (16384, 1024)), form=form_of(key_dim=256)), "must have 128 outputs, got 256"),
        (dict(shapes=((512, 1024), (128, 1024))), "too few blocks of whole heads"),
        (dict(rope_dim=40), "a multiple of 16 up to 256, got 40"),
    ],
)
def test_what_one_launch_does_not_make_is_named(change, message):
    sizes: dict[str, Any] = dict(shapes=MODEL, form=form_of(), rows=64, rope_dim=64)
    assert pk.unsupported_product_of_both_queries(**sizes) is None
    reason = pk.unsupported_product_of_both_queries(**(sizes | change))
    assert reason is not None
    assert re.search(message, reason)
