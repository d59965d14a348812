"""Pytrees print their structure, a page at most, and read no value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.reprs import PAGE, compact
from tests.support.driver import CFG, ids, small_plan
from tests.support.paths import ROOT

FLASH = d4.DSV4Config.flash()


def lines(tree: Any) -> list[str]:
    """Return the lines of a repr that takes a page at most."""
    found = repr(tree).splitlines()
    assert len(found) <= PAGE
    assert max(map(len, found)) <= 120
    return found


def test_a_cache_prints_its_plan_its_lengths_and_the_shape_of_every_leaf():
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 2)
    cache = d4.advance(d4.prepare_forward(cache, slots, ids(7, 12))[0], slots, ids(7, 12))
    first, second, *rest = lines(cache)[1:]
    plan = "5 requests x 80 tokens, 14 blocks, 3 layers, f32, f32, float32 ring tails"
    assert first == f"  plan=CachePlan({plan}),"
    assert second == "  seq_lens=[ 7 12  0  0  0],"
    assert "".join(rest).count("[") == len(jax.tree.leaves(cache)), "each leaf is shown, and only its shape"
    assert "    admitted=bool[5], seq_lens=i32[5], prepared=i32[5], block_table=i32[5,5]," in "\n".join(rest)


def test_whatever_stands_in_for_a_cache_prints():
    cache = d4.init_cache(small_plan())
    whole = "\n".join(lines(cache))

    @jax.jit
    def inside(cache):
        traced.extend(lines(cache))
        return cache

    traced: list[str] = []
    inside.trace(cache)
    abstract = lines(jax.eval_shape(lambda: cache))
    assert traced == abstract == whole.replace(" seq_lens=[0 0 0 0 0],", "").splitlines()
    jax.block_until_ready(jax.jit(lambda cache: cache, donate_argnums=0)(cache))
    assert lines(cache) == abstract, "a donated one"
    assert "nope=None" in repr(jax.tree.map(lambda leaf: None, cache))
    assert "pos=3" in repr(jax.tree.map(lambda leaf: 3, cache))
    specs = d4.sharding.partition_specs(d4.plan_cache(FLASH), jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    assert "pos=P(None, 'data')" in repr(specs)


@pytest.mark.parametrize("cfg", [FLASH, d4.DSV4Config.pro()], ids=["flash", "pro"])
@pytest.mark.parametrize("hca_tail", ["ring", "online"])
def test_a_whole_cache_fits_on_a_page(cfg, hca_tail):
    cache = d4.cache.abstract_cache(d4.plan_cache(cfg, max_requests=1024, hca_tail=hca_tail))
    assert "(3 arrays)" not in "\n".join(lines(cache)), "no part is left out"
    assert len(repr(cache)) < 3000


@pytest.mark.parametrize("weights", ["wide", "stored"])
def test_the_weights_of_a_layer_print_whole(weights):
    params = d4.init_attention_params(jax.random.key(0), CFG, 1, weights=weights)
    text = "\n".join(lines(params))
    assert text.startswith("AttentionParams(\n  q_a_kv=")
    assert text.count("[") == len(jax.tree.leaves(params))
    assert ("q_b=f32[544,24]" in text) == (weights == "wide")
    if weights == "stored":
        assert "codes=f8_e4m3fn[" in text
        assert "block=(128, 128)" in text


def test_a_model_of_many_layers_shows_layers_that_are_alike_once():
    model = d4.model.load_model(ROOT / "tests" / "data" / "model" / "a")
    many = dataclasses.replace(model, blocks=model.blocks * 9)
    text = "\n".join(lines(many))
    assert "\n    2, 4, 7, 9, 12, 14," in text
    assert "attention=AttentionParams(" in text
    assert "cfg=ModelConfig(...)" in text
    assert len(text) < 3000


def test_small_pytrees_print_on_a_line():
    cache = d4.init_cache(small_plan())
    pool = cache.stack("csa").pool
    assert pool is not None
    assert repr(pool.indexer_keys) == "KeyRows(codes=f32[1,14,4,128], scale=None)"
    grants = d4.cache.explain_forward(cache, ids(0), ids(0))
    assert repr(grants) == "Grants(refusal=[1], missing_blocks=[0], free_blocks=14)"  # what one asks it for
    grants = jax.eval_shape(d4.cache.explain_forward, cache, ids(0), ids(0))
    assert repr(grants) == "Grants(refusal=i32[1], missing_blocks=i32[1], free_blocks=i32[])"
    assert compact({"a": np.zeros(3, np.int8), "b": (1, 2)}) == "{'a': i8[3], 'b': (1, 2)}"
    assert compact((jnp.zeros(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))) == "{0, 1: bf16[2]}"
    assert compact((1, 2)) == "(1, 2)"
    assert compact("x" * 300) == repr("x" * 300)[:113] + "..."


@pytest.mark.slow
def test_what_exceeds_a_page_is_shortened_from_the_inside():
    leaf = jnp.zeros(1)
    # By NumPy, for which no program is compiled for each size.
    deep: Any = {f"{i}": {f"{j}": jax.device_put(np.zeros(10 * i + j)) for j in range(30)} for i in range(40)}
    text = compact(deep)
    assert text.count("\n") < PAGE
    assert "'39': dict(30 arrays)" in text
    assert compact([deep, leaf]).count("\n") < PAGE
