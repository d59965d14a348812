"""Random weights that are stored as FP8: their distribution, and what is drawn to make them."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.weights.initial import random_params
from dsv4jax.weights.params import QUANTISED, named_shapes, param_shapes
from dsv4jax.weights.stored import Stored, StoredWeight, to_e8m0
from tests.support.cases import first_of
from tests.support.driver import assert_same
from tests.support.in_place import memory_of
from tests.support.stored import values_of

KEY = jax.random.key(5)
LARGE = d4.DSV4Config.tiny(hidden_size=1024, q_lora_rank=512, o_lora_rank=512)


@pytest.mark.parametrize(("layer", "block"), first_of([(2, (32, 32)), (1, None), (0, None), (1, (32, 32))]))
def test_stored_weights_have_the_form_of_their_kind(layer, block):
    cfg = d4.DSV4Config.tiny()
    params = d4.init_attention_params(KEY, cfg, layer, jnp.bfloat16, "stored", block=block)
    wanted = param_shapes(cfg, d4.config.layer_schedule(cfg)[layer].attn, Stored(block=block))
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert leaf.shape == spec.shape
        assert leaf.dtype == (jnp.bfloat16 if spec.dtype == jnp.float32 else spec.dtype)
    # What is not FP8 is drawn as it is beside wide weights.
    wide = d4.init_attention_params(KEY, cfg, layer, jnp.bfloat16).split()
    for name, part in params.split().items():
        if name not in QUANTISED:
            assert_same(part, wide[name])


def test_stored_weights_have_variance_1_by_in():
    params = d4.init_attention_params(KEY, LARGE, 1, weights="stored", block=(32, 32))
    for name, part in params.split().items():
        if name not in QUANTISED:
            continue
        assert isinstance(part, StoredWeight)
        to_e8m0(part.scales)  # raises if one is above what kernels serve
        values = values_of(part)
        assert np.isfinite(values).all()
        # There are 128 blocks and more, whose scale is one of two, so that the mean of squares is off by up to 3 times
        # (4 - 1) / 2 / sqrt(128) / 2.
        np.testing.assert_allclose(np.mean(values**2) * part.shape[1], 1, atol=0.2, err_msg=name)
        assert abs(np.mean(values)) < 4 * np.sqrt(np.mean(values**2) / values.size), name
        assert len(np.unique(np.asarray(part.codes).view(np.uint8))) == 64, name  # two signs, 4 exponents, 8 mantissas
        assert len(np.unique(np.asarray(part.scales).view(np.uint8))) == 2, name


def test_keys_and_layers_differ_and_repeat():
    draw: list[Any] = [d4.init_attention_params(jax.random.key(seed), LARGE, 0, weights="stored") for seed in (1, 1, 2)]
    codes = [np.asarray(params.q_b.codes).view(np.uint8) for params in draw]
    np.testing.assert_array_equal(codes[0], codes[1])
    assert np.mean(codes[0] == codes[2]) < 0.03  # of 64 codes, by chance: 1.6 %


def test_layers_of_a_kind_share_a_program():
    cfg = d4.DSV4Config.tiny(compress_ratios=(4, 4), hidden_size=72)
    program: Any = random_params
    before = program._cache_size()
    for layer in range(2):
        d4.init_attention_params(jax.random.key(layer), cfg, layer, weights="stored")
    assert program._cache_size() == before + 1


def test_what_is_no_key_is_named():
    no_key: Any = 0
    with pytest.raises(ValueError, match=r"key must be a random key, such as jax\.random\.key\(0\), got 0"):
        d4.init_attention_params(no_key, d4.DSV4Config.tiny(), 0)


def test_no_wider_copy_of_stored_weights_is_drawn():
    kind, dtype = d4.AttentionType.SWA, jnp.dtype(jnp.bfloat16)

    def compiled(stored: Stored | None) -> tuple[int, set[str]]:
        """(bytes of temporaries, the floats of which there is an array of W_oa's size or more)."""
        program = random_params.lower(KEY, LARGE, kind, dtype, stored).compile()
        found = re.findall(r"\b((?:bf|f)\d+\w*)\[([\d,]+)\]", program.as_text() or "")
        sizes = [(name, math.prod(int(size) for size in axes.split(","))) for name, axes in found]
        return memory_of(program).temp_size_in_bytes, {name for name, size in sizes if size >= numbers["o_a"]}

    shapes = named_shapes(LARGE, kind)
    numbers = {name: math.prod(shapes[name]) for name in shapes if name in QUANTISED}
    memory, floats = compiled(Stored())
    assert floats == {"f8e4m3fn"}
    # The generator works on two arrays of words, which hold four numbers each, and hands them from turn to turn.
    assert memory < 4.1 * sum(numbers.values())
    memory, floats = compiled(None)
    assert memory > 8 * sum(numbers.values())
    assert floats >= {"f32", "bf16"}
