"""Checks which precision each computation uses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from tests.support import recorded
from tests.support.cases import first_of
from tests.support.driver import CFG, LAYERS, TOKENS, even_split, feed, ids, random_params, sequence, small_plan


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@pytest.mark.sweep(guard="test_ring_and_online_tails_agree")
@pytest.mark.parametrize(
    ("inputs", "weights"), first_of([(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)], count=0)
)
def test_any_mix_of_input_and_weight_dtypes_is_near_the_recompute(inputs, weights):
    # bf16 rounds what goes into each linear layer to 8 bits, a relative 2^-9 a value; the recompute starts from the
    # same rounded inputs and weights and then stays in f32.
    tolerance = 2e-5 if inputs == jnp.float32 else 2e-2
    x = jnp.asarray(sequence(4, 40, CFG.hidden_size)).astype(inputs)
    params = cast(random_params(), weights)
    want = [reference_layer(params[layer], x.astype(jnp.float32), CFG, layer).out for layer in LAYERS]
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
    for first in range(0, 40, TOKENS):
        cache, ok = d4.prepare_forward(cache, slots, ids(TOKENS))
        assert ok
        for layer in LAYERS:
            y, cache = d4.attention_layer(
                params[layer], x[None, first : first + TOKENS], cache, layer, slots, ids(TOKENS)
            )
            assert y.dtype == inputs
            chunk = np.asarray(want[layer][first : first + TOKENS])
            np.testing.assert_allclose(np.asarray(y[0], np.float32), chunk, rtol=0, atol=tolerance)
        cache = d4.advance(cache, slots, ids(TOKENS))


@pytest.mark.parametrize("layer", LAYERS)
def test_every_fp32_product_asks_for_fp32(layer):
    """On a GPU the default for f32 operands is TF32, which has only 10 bits of mantissa.

    Tests on a CPU cannot notice.
    """
    cache = d4.cache.abstract_cache(small_plan())
    row, x = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, TOKENS, CFG.hidden_size), jnp.float32)
    traced = jax.jit(d4.attention_layer, static_argnums=3).trace(random_params()[layer], x, cache, layer, row, row)

    def products(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield equation
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from products(inner)

    found = list(products(traced.jaxpr.jaxpr))
    assert len(found) >= 6
    highest = jax.lax.Precision.HIGHEST
    assert all(equation.params["precision"] == (highest, highest) for equation in found)


@pytest.mark.slow
def test_ring_and_online_tails_agree():
    recording = recorded.load("hca")
    outputs = {}
    for tail in ("ring", "online"):
        plan = d4.plan_cache(
            recording.cfg, max_requests=1, max_context=512, kv_format="f32", indexer_format="f32", hca_tail=tail
        )
        admitted: Any = d4.admit(d4.init_cache(plan), 1)
        cache, slots, _ = admitted
        outputs[tail], cache = feed({0: recording.params}, [recording.x], cache, slots, [even_split(400, 50)])
        outputs[tail].append(
            d4.pieces.gather_all_compressed(
                cache.stack("hca").pool, 0, cache.tables.block_table, slots, ids(3), plan=plan
            )
        )
    # The same sums with another grouping: entries of magnitude 3 differ by a few units in the last place.
    for ring, online in zip(outputs["ring"], outputs["online"], strict=True):
        np.testing.assert_allclose(np.asarray(ring).squeeze(), np.asarray(online).squeeze(), rtol=1e-6, atol=1e-6)
