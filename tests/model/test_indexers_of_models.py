"""The loss of all indexers of a model: its shape, whom it teaches, and that training on it lowers it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import ModelConfig, combine, forward_sequences, forward_with_indexer_loss, partition, random_model
from tests.model.test_partition import cross_entropy
from tests.support.driver import ids

# Two CSA layers.
CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(4, 4)))
TOKENS = 60  # 15 entries, of which an indexer picks 12


def tokens(rows: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab_size, (rows, TOKENS)), jnp.int32)


@pytest.mark.sweep(guard="test_it_teaches_the_indexer_and_nobody_else")
def test_the_loss_of_indexers_beside_the_models_own():
    """Each weight learns from one of the two, so that both can be added up."""
    params = random_model(CFG, jax.random.key(3), weights="f32", drafts=0)
    part, rest = partition(params)
    logits, losses = forward_with_indexer_loss(params, tokens(), ids(TOKENS, 40))
    np.testing.assert_allclose(logits, forward_sequences(params, tokens(), ids(TOKENS, 40)), rtol=0, atol=2e-5)
    assert losses.shape == (2, 2, TOKENS)
    assert not np.asarray(losses[:, 1, 40:]).any()

    def both(part: Any) -> jax.Array:
        logits, losses = forward_with_indexer_loss(combine(part, rest), tokens())
        return cross_entropy(logits[0], tokens()[0]) + jnp.mean(losses)

    def own(part: Any) -> jax.Array:
        return cross_entropy(forward_sequences(combine(part, rest), tokens())[0], tokens()[0])

    found, wanted = (jax.jit(jax.grad(f))(part) for f in (both, own))
    for layer in range(2):
        given, alone = (tree.blocks[layer].attention.split() for tree in (found, wanted))
        for name, grad in given.items():
            if name.startswith("indexer."):
                assert np.asarray(grad).any(), (layer, name)
                assert not np.asarray(alone[name]).any(), (layer, name)
            else:  # f32 sums in another order, through two layers
                np.testing.assert_allclose(grad, alone[name], rtol=0, atol=1e-4 * float(jnp.linalg.norm(alone[name])))


@pytest.mark.sweep(guard="test_it_teaches_the_indexer_and_nobody_else")
def test_a_warm_up_teaches_indexers_what_attention_reads():
    """Gradient steps on the indexers alone, on one batch: 40 of them take away a third of the divergence."""
    params = random_model(CFG, jax.random.key(3), weights="f32", drafts=0)
    names = ("index_q_b", "key_pool")
    part, rest = partition(params, lambda name: any(part in name for part in names))

    def loss(part: Any) -> jax.Array:
        return jnp.mean(forward_with_indexer_loss(combine(part, rest), tokens(), over="all")[1])

    @jax.jit
    def step(part: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(part)
        return jax.tree.map(lambda leaf, grad: leaf - 3.0 * grad, part, grads), value

    values = []
    for _ in range(40):
        part, value = step(part)
        values.append(float(value))
    assert values[-1] < values[0] * 2 / 3, values


def test_a_model_without_indexers_is_refused():
    cfg = ModelConfig.tiny(attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(0,)))
    with pytest.raises(ValueError, match="the model has no CSA layer, and so no indexer"):
        forward_with_indexer_loss(random_model(cfg, jax.random.key(0), weights="f32", drafts=0), tokens())
