"""Gradients of a whole model against finite differences in float64, of a form of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.model import ModelParams, combine, forward_sequences, partition, random_model
from tests.model.test_deltas import CFG, model, tokens, tuned
from tests.model.test_partition import cross_entropy
from tests.support.float64_model import cross_entropy64, logits64, widened64

# Of a derivative along a random direction. f32 sums in another order, through three layers; 1e-4 was seen at most.
SAME = 1e-3
STEP = 1e-6  # of the weights' own size: in float64 that leaves 1e-9 of rounding, and 1e-12 of the second order


@functools.cache
def cases(name: str) -> ModelParams:
    """All weights in f32; or FP8 and FP4, frozen, with deltas on each."""
    return model("f32") if name == "wide" else tuned("stored")


def loss(part: Any, rest: Any) -> jax.Array:
    return cross_entropy(forward_sequences(combine(part, rest), tokens())[0], tokens()[0])


@pytest.mark.parametrize("name", ["wide", "stored, with deltas"])
def test_logits_are_those_of_float64(name):
    """f32 through three layers, of logits of size 5."""
    found = forward_sequences(cases(name), tokens())[0]
    np.testing.assert_allclose(found, logits64(widened64(cases(name)), np.asarray(tokens()[0])), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", [pytest.param("wide", marks=pytest.mark.slow), "stored, with deltas"])
def test_every_derivative_is_the_finite_difference_in_float64(name):
    """Of each leaf that trains, along a random direction: weights, deltas, norms, mixes of streams, sinks, gates."""
    part, rest = partition(cases(name))
    grads = jax.jit(jax.grad(loss))(part, rest)
    leaves, tree = jax.tree_util.tree_flatten_with_path(part)
    ids, rng, is_zero = np.asarray(tokens()[0]), np.random.default_rng(4), set()

    def value(number: int, leaf: np.ndarray) -> float:
        moved = [leaf if i == number else np.asarray(other) for i, (_, other) in enumerate(leaves)]
        return cross_entropy64(widened64(combine(jax.tree.unflatten(tree, moved), rest)), ids)

    for number, ((path, leaf), grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        full, given = jax.tree_util.keystr(path), np.asarray(leaf, np.float64)
        direction = rng.standard_normal(given.shape) * max(float(np.std(given)), 0.1)
        change = STEP * direction
        wanted = (value(number, given + change) - value(number, given - change)) / (2 * STEP)
        found = float(np.sum(np.asarray(grad, np.float64) * direction))
        usual = np.linalg.norm(np.asarray(grad, np.float64)) * np.linalg.norm(direction) / given.size**0.5
        assert abs(found - wanted) < SAME * usual + 1e-8, (full, found, wanted)
        if usual == 0:
            is_zero.add(full)
    # Picks have no derivative: the router's bias, and the indexer, which has three deltas on rows of ``compress``.
    no_derivative = (".bias", "key_pool", "index_q_b", *(f"compress.deltas[{number}]" for number in (2, 3, 4)))
    assert all(any(name in full for name in no_derivative) for full in is_zero), is_zero
    assert len(is_zero) >= 4


@pytest.mark.slow
def test_weights_in_bf16_have_derivatives_too():
    """In bf16, and along those of the same weights in f32: rounding of 2^-8 may move tokens to other experts."""
    params = random_model(CFG, jax.random.key(3), weights="bf16", drafts=0)
    part, rest = partition(params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), part)
    found, wanted = (jax.jit(jax.grad(loss))(each, rest) for each in (part, wide))
    a, b = (np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)]) for tree in (found, wanted))
    assert {leaf.dtype for leaf in jax.tree.leaves(found.blocks[0].experts)} == {jnp.dtype(jnp.bfloat16)}
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert np.isfinite(a).all()
    assert cosine > 0.99
