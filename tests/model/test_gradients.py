"""Gradients of a whole model against finite differences in float64, of a form of its own."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.model import Choices, ModelParams, StoredExperts, combine, forward_sequences, partition
from dsv4jax.weights import StoredWeight
from tests.model.test_deltas import CFG, model, tokens, tuned
from tests.model.test_partition import cross_entropy
from tests.support.cases import first_of
from tests.support.float64_model import cross_entropy64, logits64, widened64
from tests.support.models import SMALL, drawn_model
from tests.support.second_derivatives import check_second_derivative

# Of a derivative along a random direction. f32 sums in another order, through three layers; 1e-4 was seen at most.
SAME = 1e-3
STEP = 1e-6  # of the weights' own size: in float64 that leaves 1e-9 of rounding, and 1e-12 of the second order


@functools.cache
def cases(name: str) -> ModelParams:
    """All weights in f32; or FP8 and FP4, frozen, with deltas on each."""
    return model("f32") if name == "wide" else tuned("stored")


def loss(part: Any, rest: Any) -> jax.Array:
    return cross_entropy(forward_sequences(combine(part, rest), tokens())[0], tokens()[0])


@pytest.mark.parametrize("name", first_of(["wide", "stored, with deltas"], count=0))
def test_logits_are_those_of_float64(name):
    """f32 through three layers, of logits of size 5."""
    found = forward_sequences(cases(name), tokens())[0]
    np.testing.assert_allclose(found, logits64(widened64(cases(name)), np.asarray(tokens()[0])), rtol=0, atol=3e-5)


@pytest.mark.sweep(guard="test_they_are_those_that_were_recorded")
@pytest.mark.parametrize("name", first_of(["stored, with deltas", "wide"], count=0))
def test_every_derivative_is_the_finite_difference_in_float64(name):
    """Along a random direction of each weight that trains, in all layers together: of deltas, norms, mixes, sinks."""
    part, rest = partition(cases(name))
    grads = jax.jit(jax.grad(loss))(part, rest)
    stored = StoredExperts, StoredWeight
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        jax.tree.map(
            lambda node: widened64(node) if isinstance(node, stored) else node,
            cases(name),
            is_leaf=lambda node: isinstance(node, stored),
        )
    )
    weights = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    ids, rng, is_zero, groups = np.asarray(tokens()[0]), np.random.default_rng(4), set(), collections.defaultdict(dict)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        full = jax.tree_util.keystr(path)
        groups[re.sub(r"blocks\[\d+\]", "blocks", full)][full] = np.asarray(grad, np.float64)

    def value(directions: dict[str, np.ndarray], step: float) -> float:
        moved = [leaf + step * directions[path] if path in directions else leaf for path, leaf in weights.items()]
        return cross_entropy64(widened64(jax.tree.unflatten(tree, moved)), ids)

    for group, of_layers in groups.items():
        directions, found, square = {}, 0.0, 0.0
        for full, grad in of_layers.items():
            size = max(float(np.std(np.float64(weights[full]))), 0.1)
            directions[full] = direction = rng.standard_normal(grad.shape) * size
            found += float(np.sum(grad * direction))
            usual = np.linalg.norm(grad) * np.linalg.norm(direction) / grad.size**0.5
            square += usual**2
            if usual == 0:
                is_zero.add(full)
        wanted = (value(directions, STEP) - value(directions, -STEP)) / (2 * STEP)
        assert abs(found - wanted) < SAME * square**0.5 + 1e-8, (group, found, wanted)
    # Picks have no derivative: the router's bias, and the indexer, which has three deltas on rows of ``compress``.
    no_derivative = (".bias", "key_pool", "index_q_b", *(f"compress.deltas[{number}]" for number in (2, 3, 4)))
    assert all(any(name in full for name in no_derivative) for full in is_zero), is_zero
    assert len(is_zero) >= 4


@pytest.mark.slow
def test_second_derivatives_by_the_embedding_are_differences_of_the_gradient_and_symmetric():
    """With experts that are chosen beforehand, all entries read, and no limit of SwiGLU: nothing jumps."""
    cfg = dataclasses.replace(SMALL, swiglu_limit=0.0)
    params, rng = drawn_model(cfg, 1, "f32"), np.random.default_rng(5)
    ids = jnp.asarray(rng.integers(0, cfg.vocab_size, (2, 24)), jnp.int32)
    experts = rng.random((cfg.num_layers, *ids.shape, cfg.num_experts)).argsort(-1)[..., : cfg.experts_per_token]
    choices = Choices(experts=jnp.asarray(experts, jnp.int8), entries=None)

    def loss(embedding: jax.Array) -> jax.Array:
        logits = forward_sequences(dataclasses.replace(params, embedding=embedding), ids, choices=choices)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    check_second_derivative(loss, params.embedding)


@pytest.mark.sweep(guard="test_they_are_those_that_were_recorded")
def test_weights_in_bf16_have_derivatives_too():
    """In bf16, and along those of the same weights in f32: rounding of 2^-8 may move tokens to other experts."""
    params = drawn_model(CFG, 3, "bf16", drafts=0)
    part, rest = partition(params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), part)
    found, wanted = (jax.jit(jax.grad(loss))(each, rest) for each in (part, wide))
    a, b = (np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)]) for tree in (found, wanted))
    assert {leaf.dtype for leaf in jax.tree.leaves(found.blocks[0].experts)} == {jnp.dtype(jnp.bfloat16)}
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert np.isfinite(a).all()
    assert cosine > 0.99
