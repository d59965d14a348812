"""What can be trained of a model, and gradients of whole models, through stored weights too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import (
    ModelConfig,
    ModelParams,
    combine,
    forward,
    forward_sequences,
    init_caches,
    partition,
    random_model,
)
from dsv4jax.model.params import StoredExperts, is_any_stored
from dsv4jax.weights.stored import StoredWeight
from tests.support.cases import first_of
from tests.support.driver import assert_same, ids
from tests.support.models import FULL, drawn_model

# A CSA layer, which picks experts by id, and an HCA layer, of whose blocks of 16 tokens three are complete.
CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(4, 16), hca_compression_ratio=16))
TOKENS = 50


@functools.cache
def stored_model() -> ModelParams:
    return drawn_model(CFG, 3)


def widened(params: ModelParams, dtype: Any = jnp.float32) -> ModelParams:
    everything = jnp.arange(CFG.num_experts, dtype=jnp.int32)

    def wide(node: Any) -> Any:
        if isinstance(node, StoredExperts):
            return node.widened(everything, dtype)
        return node.widened(dtype) if isinstance(node, StoredWeight) else node

    return jax.tree.map(wide, params, is_leaf=is_any_stored)


def as_f32(params: Any) -> Any:
    """Embedding, norms and the like in f32, so that the model computes in it."""
    trainable, rest = partition(params)
    return combine(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trainable), rest)


def loss(params: ModelParams, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of the next tokens of one sequence."""
    return cross_entropy(forward_sequences(params, tokens[None])[0], tokens)


def loss_of_cache(params: ModelParams, tokens: jax.Array) -> jax.Array:
    """The same from the cached forward pass."""
    cache, slots, _ = init_caches(CFG, 1, TOKENS, **FULL).admit(1)
    count = ids(TOKENS)
    cache, _ = d4.prepare_forward(cache.model, slots, count)
    logits, _, _ = forward(params, tokens[None], cache, slots, count, logits="all", backend="xla")
    assert logits is not None
    return cross_entropy(logits[0], tokens)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=-1))


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab_size, TOKENS), jnp.int32)


def test_a_leaf_is_in_one_of_the_two_and_combining_gives_the_model():
    params = stored_model()
    trainable, rest = partition(params)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trainable)}
    held = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(rest)}
    everything = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert (found.keys() | held.keys(), found.keys() & held.keys()) == (everything, set())
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    assert {path.rsplit(".", 1)[-1] for path in held} == {"codes", "scales", "table"}
    assert_same(combine(trainable, rest), params)


def test_f32_scales_of_experts_are_not_trained():
    codes = jnp.zeros((2, 128, 128), jnp.float8_e4m3fn)
    experts = StoredExperts(codes=codes, scales=jnp.ones((2, 1, 1)), block=(128, 128))
    trainable, rest = partition({"experts": experts, "norm": jnp.ones(3)})
    assert jax.tree.leaves(trainable) == [trainable["norm"]]
    assert_same(rest["experts"], experts)


@pytest.mark.parametrize("weights", ["wide", "stored"])
def test_one_layers_weights_are_divided_too(weights):
    params = d4.init_attention_params(jax.random.key(0), CFG.attention, 0, weights=weights)
    trainable, rest = partition(params)
    assert len(jax.tree.leaves(rest)) == (0 if weights == "wide" else 2 * 5)
    assert_same(combine(trainable, rest), params)


def test_shapes_are_divided_as_arrays_are():
    shapes = jax.eval_shape(lambda: random_model(CFG, jax.random.key(0)))
    for found, wanted in zip(partition(shapes), partition(stored_model()), strict=True):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_what_is_no_partition_is_refused():
    params = stored_model()
    trainable, rest = partition(params)
    with pytest.raises(ValueError, match=r"combine: .*codes is in both: give the two trees of one partition"):
        combine(params, rest)
    with pytest.raises(ValueError, match="combine: the two are trees of different forms"):
        combine(trainable, rest.blocks[0])
    for half in (trainable, rest):
        with pytest.raises(ValueError, match=r"one of the two trees of a partition: give combine\(trainable, rest\)"):
            forward_sequences(half, tokens()[None])
        assert "None" in repr(half)
    for half in partition(as_f32(widened(params))):  # whose tables of picks alone are not to be trained
        with pytest.raises(ValueError, match=r"one of the two trees of a partition: give combine\(trainable, rest\)"):
            forward_sequences(half, tokens()[None])


@functools.cache
def gradient_of_wide() -> tuple[jax.Array, ModelParams, ModelParams, ModelParams]:
    """The loss of a model whose weights are all wide, its gradient, and the two trees of its partition."""
    trainable, rest = partition(as_f32(widened(stored_model())))

    @jax.jit
    def gradient(trainable: ModelParams) -> Any:
        return jax.value_and_grad(lambda trainable: loss(combine(trainable, rest), tokens()))(trainable)

    return (*gradient(trainable), trainable, rest)


@pytest.mark.sweep(guard="test_they_are_those_that_were_recorded")
@pytest.mark.parametrize("through", first_of([loss_of_cache, loss], count=0))
def test_the_gradient_through_frozen_stored_weights_is_that_through_their_wide_form(through):
    """By the embedding, norms, streams' mixes, gates and compressors: all that is not stored."""
    trainable, rest = partition(as_f32(stored_model()))

    @jax.jit
    def gradient(trainable: ModelParams) -> Any:
        return jax.value_and_grad(lambda trainable: through(combine(trainable, rest), tokens()))(trainable)

    (value, found), (want, of_wide, _, _) = gradient(trainable), gradient_of_wide()
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(of_wide)}
    np.testing.assert_allclose(value, want, rtol=1e-5)
    zero = []
    for path, one in jax.tree_util.tree_leaves_with_path(found):
        name = jax.tree_util.keystr(path)
        other = wanted[name]
        size = float(jnp.linalg.norm(other))
        assert np.isfinite(one).all(), name
        if size == 0:
            zero.append(name)
        # f32 sums in another order, through two layers: 2e-6 was seen.
        assert float(jnp.linalg.norm(one - other)) <= 1e-4 * size, name
    # Picks have no derivative, and the loss makes no drafts.
    assert all(".bias" in name or ".key_pool" in name or name.startswith(".drafts") for name in zero), zero
    assert any(".bias" in name for name in zero)


@pytest.mark.sweep(guard="test_they_are_those_that_were_recorded")
def test_the_gradient_of_a_wide_model_reaches_all_that_computes():
    """Experts and attention's weights too; a step along it lowers the loss by its square."""
    value, grads, trainable, rest = gradient_of_wide()
    assert [leaf.dtype for leaf in jax.tree.leaves(rest)] == [jnp.int32]

    @jax.jit
    def step(trainable: ModelParams, grads: ModelParams) -> jax.Array:
        rate = 1e-3 / sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grads))
        return loss(combine(jax.tree.map(lambda leaf, grad: leaf - rate * grad, trainable, grads), rest), tokens())

    after = step(trainable, grads)
    block = grads.blocks[1]
    for weight in (block.experts.gate_up, block.experts.down, block.attention.q_b, block.attention.q_a_kv):
        assert np.asarray(weight).any()
    # Of a loss of 8: f32 keeps 1e-6 of it, and the step is so short that its second order is 1e-5 or less.
    np.testing.assert_allclose(value - after, 1e-3, atol=5e-5)


def test_differentiating_all_of_a_stored_model_names_what_helps():
    """JAX itself refuses the integers of tables, unless it is told to skip them."""
    with pytest.raises(ValueError, match=r"stored as FP. .*no derivative.*weights='wide'"):
        jax.grad(loss, allow_int=True)(stored_model(), tokens())
