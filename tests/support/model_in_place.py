"""The loop that generates texts, with caches of many blocks, to be audited as ``in_place`` does."""

import inspect

import jax
import jax.numpy as jnp

from dsv4jax.model import ModelConfig, Sampling, init_caches, random_model
from dsv4jax.model.generation.loop import run, store
from dsv4jax.model.generation.sampling import of_texts
from dsv4jax.model.generation.state import Texts, begin
from tests.support.in_place import LARGE, Spec

CFG = ModelConfig.tiny()
ROWS, LONGEST = 4, 200


def programs(drafts: int):
    """Return (function, arguments, the donated one) by name. Nearly all of that one are the blocks of the cache."""

    def state():
        caches = init_caches(CFG, ROWS, LONGEST, drafts, num_blocks=LARGE)
        row = jnp.zeros(6, jnp.int32)
        texts = Texts.of(jnp.zeros((6, LONGEST), jnp.int32), row, row, of_texts(Sampling.of(1.0, 0.9), row))
        return begin(caches, texts, CFG.vocab_size, drafts)

    def prompts(params, state, stop_tokens, rows):
        # The options of ``store`` are for a program of its own.
        return inspect.unwrap(store)(params, state, stop_tokens, rows, chunk=16)

    params = jax.eval_shape(lambda: random_model(CFG, jax.random.key(0), weights="bf16"))
    given = params, jax.eval_shape(state), Spec((4,), jnp.int32)
    return {
        "loop": (run, (*given, Spec((), jnp.int32)), 1),
        "prompts": (prompts, (*given, Spec((1,), jnp.int32)), 1),
    }
