"""Layers whose weights all take rounded inputs: kernels hand rounded rows on, and agree with XLA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from pallas_kernels import rounding
from pallas_kernels.products import call
from tests.support.driver import DEFAULT, ids, sequence
from tests.support.machines import BACKENDS

# 64 heads of 512 dims, and outputs of W_oa's groups as kernels take them.
CFG = d4.DSV4Config(hidden_size=128, q_lora_rank=128, o_lora_rank=128, compress_ratios=(0,))


def run(params: d4.AttentionParams, x: jax.Array, backend: str) -> np.ndarray:
    batch, tokens, _ = x.shape
    cache, slots, _ = d4.admit(d4.init_cache(d4.plan_cache(CFG, max_requests=batch, max_context=64, **DEFAULT)), batch)
    num_new = ids(*[tokens] * (batch - 1), tokens - 1)  # the last request has a token of padding
    cache, _ = d4.prepare_forward(cache, slots, num_new)
    layer = jax.jit(lambda *args: d4.attention_layer(*args, backend=backend)[0], static_argnums=3)
    return np.asarray(layer(params, x, cache, 0, slots, num_new), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounded_rows_go_from_attention_to_the_last_product(backend, monkeypatch):
    monkeypatch.setattr(rounding, "PADDED", 8)  # in place of 128: so few queries fill the scales
    monkeypatch.setattr(call, "ROWS", 4)  # in place of 64: up to which products round rows themselves
    taken, product = [], pk.product

    def noted(x: Any, *args: Any, dtype: Any = jnp.float32, **options: Any) -> Any:
        taken.append((isinstance(x, pk.RoundedRows), jnp.dtype(dtype)))
        return product(x, *args, dtype=dtype, **options)

    monkeypatch.setattr(pk, "product", noted)
    params = d4.init_attention_params(jax.random.key(0), CFG, 0, jnp.bfloat16, weights="stored", activations="fp8_all")
    x = jnp.asarray(sequence(0, 8, CFG.hidden_size), jnp.bfloat16).reshape(2, 4, -1)
    found = run(params, x, backend)
    of_o_a_and_o_b = [(True, jnp.dtype(jnp.float8_e4m3fn)), (True, jnp.dtype(jnp.bfloat16))]
    assert taken[-2:] == of_o_a_and_o_b
    want = run(params, x, "xla")
    assert not found[-1, -1].any()
    # Rounding by itself changes such a layer by 5 %. Here only the values differ that sums in another order, and those
    # of FP8 tensor cores, move over a boundary of rounding: on an H200 that is 3 %.
    assert np.linalg.norm(found - want) <= 0.05 * np.linalg.norm(want)
