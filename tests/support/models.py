"""Recorded models: two tiny checkpoints, and what DeepSeek's code and transformers compute with them.

``tests/data/README.md`` describes the arrays.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv4jax as d4
from dsv4jax.cache.shards import automatic
from dsv4jax.formats import E2M1_VALUES
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
from dsv4jax.model.inside.devices import weight_specs
from dsv4jax.model.params import StoredExperts, is_any_stored
from dsv4jax.weights.stored import StoredWeight
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


def drawn_model(cfg: ModelConfig, seed: int, weights: str = "stored", **options: Any) -> ModelParams:
    """A model like those of ``random_model``, drawn by NumPy so that nothing is compiled, which takes seconds."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, node: Any) -> Any:
        if is_any_stored(node):
            return fp4(node) if isinstance(node, StoredExperts) else fp8(node)
        name, shape = jax.tree_util.keystr(path), node.shape
        if name.endswith(".table"):  # distinct experts
            numbers = rng.random((shape[0], cfg.num_experts)).argsort(1)[:, : shape[1]]
        elif len(shape) == 1:
            numbers = (0.5 if name.endswith("base") else 0.1) * rng.standard_normal(shape)
            numbers += name.endswith(("norm", ".scale"))
        else:
            numbers = rng.standard_normal(shape) * (1 if "embedding" in name else shape[-1] ** -0.5)
        return jax.device_put(numbers.astype(node.dtype))

    def fp8(node: StoredWeight) -> StoredWeight:
        """One scale for all, because weights that stand side by side keep the blocks of their own."""
        scale = 2.0 ** np.floor(np.log2(node.shape[1] ** -0.5) - 5)
        codes = rng.standard_normal(node.shape) * node.shape[1] ** -0.5 / scale
        return with_numbers(node, codes, np.full(node.scales.shape, scale))

    def fp4(node: StoredExperts) -> StoredExperts:
        """For each block one of two scales next to each other."""
        variance = 1 / (node.shape[2] * np.mean(np.square(E2M1_VALUES)))
        scale = 2.0 ** np.floor(np.log2(variance) / 2)
        is_larger = rng.random(node.scales.shape) < (variance / scale**2 - 1) / 3
        drawn = with_numbers(node, rng.integers(0, 256, node.codes.shape), scale * (1 + is_larger))
        return dataclasses.replace(drawn, interleaved_for=None).for_kernels()  # drawn as checkpoints have them

    def with_numbers(node: Any, codes: np.ndarray, scales: np.ndarray) -> Any:
        codes, scales = codes.astype(node.codes.dtype), scales.astype(node.scales.dtype)
        return dataclasses.replace(node, codes=jax.device_put(codes), scales=jax.device_put(scales))

    shapes = jax.eval_shape(lambda: random_model(cfg, jax.random.key(0), weights, **options))
    return jax.tree_util.tree_map_with_path(draw, shapes, is_leaf=is_any_stored)


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("data", "model"), devices=jax.devices("cpu")[: shape[0] * shape[1]])


def laid_over(shape: tuple[int, int], params: ModelParams) -> ModelParams:
    """Lay a model over a mesh. To draw it there compiles a program more."""
    mesh = automatic(mesh_of(shape))
    return dataclasses.replace(jax.device_put(params, weight_specs(params, mesh)), mesh=mesh)


@functools.cache
def small_model() -> ModelParams:
    return drawn_model(SMALL, 1, "f32")


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
