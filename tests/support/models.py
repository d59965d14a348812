"""Recorded models: two tiny checkpoints, and what DeepSeek's code and transformers compute with them.

``tests/data/README.md`` describes the arrays.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.model import (
    ModelConfig,
    ModelParams,
    Sampling,
    forward,
    init_caches,
    inspect_forward,
    load_model,
    random_model,
)
from tests.support.paths import DATA

FULL: dict[str, Any] = {"kv_format": "f32", "indexer_format": "f32"}  # nothing is rounded
MODELS = DATA / "model"
MODEL_A, MODEL_Q = MODELS / "a", MODELS / "q"


# So few tokens that random drafts are often right.
SMALL = ModelConfig.tiny(
    attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(0, 4)),
    vocab_size=6,
    num_experts=4,
    experts_per_token=2,
    stop_tokens=(),
)


@functools.cache
def small_model() -> ModelParams:
    return random_model(SMALL, jax.random.key(1), weights="f32")


@functools.cache
def recorded(name: str) -> dict[str, np.ndarray]:
    """Return the arrays recorded of model "a", "d" or "q"."""
    with np.load(DATA / "model" / name / "recorded.npz") as archive:
        return dict(archive)


@functools.cache
def model_a() -> ModelParams:
    return load_model(MODEL_A, weights="f32")


def run_whole(params: ModelParams, ids: np.ndarray, **formats):
    """Run a sequence in one pass. Returns ``Inspection``, of one row."""
    cache, slots, _ = d4.admit(init_caches(params.cfg, 1, 512, **formats).model, 1)
    count = jnp.asarray([len(ids)], jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, count)
    assert ok
    seen, _ = inspect_forward(params, jnp.asarray(ids, jnp.int32)[None], cache, slots, count)
    return jax.tree.map(np.asarray, seen)


def pair_chances(params: ModelParams, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """The probabilities of all pairs of tokens after a prompt, f64 [V * V]."""
    size = params.cfg.vocab_size
    cache, slots, _ = d4.admit(init_caches(params.cfg, size, 256, **FULL).model, size)
    texts = jnp.asarray([[*prompt, token] for token in range(size)], jnp.int32)
    count = jnp.full(size, texts.shape[1], jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, count)
    logits, _, _ = forward(params, texts, cache, slots, count, logits="all")
    assert logits is not None
    chances = np.asarray(sampling.probabilities(logits), np.float64)
    return (chances[0, len(prompt) - 1][:, None] * chances[:, len(prompt)]).ravel()


def relative_rms(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))
