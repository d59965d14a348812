"""Two products of the same rows in one launch: each is bit for bit the product alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.language.target import HOPPER
from pallas_kernels.products.block import Layout, ProductInputs
from pallas_kernels.products.launches import fastest_layout, launch_product
from pallas_kernels.products.pair import launch_pair
from pallas_kernels.products.split import TILE, Split
from tests.support.machines import HOPPER_MACHINES
from tests.support.product_cases import Product

HCA = 1024  # outputs of a compressor of V4-Flash


def inputs_of(product: Product, x: jax.Array) -> ProductInputs:
    weight, scales = product.weight
    if scales is not None:
        weight, scales = (jax.lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in (weight, scales))
    return ProductInputs(x=x, weight=weight, scales=scales)


@pytest.mark.parametrize("simulate", HOPPER_MACHINES)
@pytest.mark.parametrize(("cluster", "parts", "tiles"), [(1, 2, 1), (2, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize(("rows", "activations"), [(1, "bf16"), (19, "fp8"), (64, "bf16")])
def test_a_pair_is_two_products(rows, activations, cluster, parts, tiles, simulate):
    products = (
        Product(rows=rows, outputs=192, inputs=512, block=None),
        Product(rows=rows, outputs=128, inputs=512, activations=activations),
    )
    given = tuple(inputs_of(product, products[0].x) for product in products)

    def layout(product: Product) -> Layout:
        alone = fastest_layout(rows, (product.outputs, product.inputs), product.form, HOPPER)
        blocks, chunks = -(-product.outputs // (tiles * TILE)), product.inputs // alone.inputs // (cluster * parts)
        split = Split(cluster=cluster, parts=parts, tiles=tiles, blocks=blocks, chunks=chunks)
        return dataclasses.replace(alone, split=split, streams=False)

    first, second = map(layout, products)
    pair = first, dataclasses.replace(second, first_block=first.grid.blocks[0])
    found = jax.jit(functools.partial(launch_pair, pair, dtype=jnp.float32, simulate=simulate))(given)
    for alone, inputs, result in zip((first, second), given, found, strict=True):
        product = functools.partial(launch_product, alone, dtype=jnp.float32, simulate=simulate)
        np.testing.assert_array_equal(result, jax.jit(product)(inputs))


@pytest.mark.gpu(major=9)
@pytest.mark.parametrize("outputs", [HCA, 2624])  # CSA's are no multiple of a tile of scales
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_pairs_of_a_model(rows, outputs):
    first = Product(rows=rows, outputs=outputs, inputs=4096, block=None)
    second = Product(rows=rows, outputs=1536, inputs=4096)
    given = tuple((*product.weight, product.form) for product in (first, second))
    found = jax.jit(lambda x: pk.product_pair(x, *given))(first.x)
    for one, result in zip(given, found, strict=True):
        np.testing.assert_array_equal(result, jax.jit(lambda x, one=one: pk.product(x, *one))(first.x))


def test_what_is_no_pair_is_named():
    stored, bf16 = pk.WeightForm(block=(128, 128)), pk.WeightForm()
    why = functools.partial(pk.unsupported_product_pair, ((HCA, 4096), (1536, 4096)))
    assert why((bf16, stored), 64) is None
    assert why((bf16, stored), 65) == "two products are one launch for at most 64 rows, got 65"
    assert "groups must have a multiple of 64 outputs" in str(why((pk.WeightForm(groups=3), stored), 1))
    reason = pk.unsupported_product_pair(((32768, 1024), (1536, 1024)), (stored, stored), 1)
    assert "is not expected to be faster than two" in str(reason)
    x = jnp.zeros((65, 4096), jnp.bfloat16)
    weight = Product(rows=1, outputs=HCA, inputs=4096, block=None).weight
    with pytest.raises(ValueError, match=r"^no kernel serves these products: two products are one launch for at most"):
        pk.product_pair(x, (*weight, bf16), (*weight, bf16), simulate=True)
