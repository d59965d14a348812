"""What is no cache, and a cache that was given away, are refused in a sentence."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dsv4jax as d4
from tests.support.driver import CFG, ids, random_params, small_plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Holder:
    """Something of a user's that holds a cache."""

    step: jax.Array
    of_model: d4.KVCache


ONE, X = ids(0), jnp.zeros((1, 1, CFG.hidden_size))
CALLS: dict[str, Any] = {
    "admit": lambda cache: d4.admit(cache, 1),
    "prepare_forward": lambda cache: d4.prepare_forward(cache, ONE, ONE),
    "prepare_rows": lambda cache: d4.cache.prepare_rows(cache, ONE, ONE),
    "explain_forward": lambda cache: d4.cache.explain_forward(cache, ONE, ONE),
    "attention_layer": lambda cache: d4.attention_layer(random_params()[0], X, cache, 0, ONE, ONE),
    "attention_layer_at": lambda cache: d4.attention_layer_at(random_params()[0], X, cache, "swa", 0, ONE, ONE),
    "advance": lambda cache: d4.advance(cache, ONE, ONE),
    "release": lambda cache: d4.release(cache, ONE),
    "acquire": lambda cache: d4.acquire(cache, 0, ONE, ONE),
    "fork": lambda cache: d4.fork(cache, ONE[0], ONE),
    "stage": lambda cache: d4.stage(random_params()[0], X, cache, 0, ONE, ONE),
    "commit": lambda cache: d4.commit(cache, [], ONE),
    "extract": lambda cache: d4.extract(cache, [0]),
    "insert": lambda cache: d4.insert(cache, cache),
    "describe": d4.describe,
    "verify": d4.verify,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_cache_is_refused(name):
    cache = d4.init_cache(small_plan())
    message = re.escape(f"{name}: expected a KVCache, got Holder: give it .of_model")
    with pytest.raises(ValueError, match=rf"^{message}(\n|$)"):
        CALLS[name](Holder(jnp.zeros(()), cache))
    with pytest.raises(ValueError, match=rf"^{name}: expected a KVCache, got tuple(\n|$)"):
        CALLS[name]((cache, ONE))


@pytest.mark.parametrize("name", ["describe", "verify", "extract"])
def test_a_donated_cache_is_refused(name):
    cache = d4.init_cache(small_plan())
    jax.block_until_ready(jax.jit(lambda cache: cache, donate_argnums=0)(cache))
    with pytest.raises(ValueError, match=f"{name}: its arrays were donated to a jitted function and are gone"):
        CALLS[name](cache)
