"""The loss of an indexer: its value, and whom it teaches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from dsv4jax.layer.sequence import attention_with_indexer_loss
from dsv4jax.rope import apply_rope, rope_frequencies
from tests.layer.test_layers_with_deltas import with_random_deltas
from tests.support.cases import first_of
from tests.support.driver import CFG, TRAINED, ids, random_params, sequence
from tests.support.stored import stored_params

LENGTH = 77  # 19 entries, of which the indexer picks 12; the longest window holds 16
CSA = 1
# f32 sums in another order: divergences of size 0.1 agree to 1e-6.
SAME = 1e-5


def tokens(length: int = LENGTH) -> jax.Array:
    return jnp.asarray(sequence(3, length, CFG.hidden_size))


def divergence_of_reference(params: Any, over: str) -> np.ndarray:
    """The definition in float64, of the reference's rows, entries, scores and picks. Queries are computed here."""
    x, cfg = tokens(), CFG
    reference = reference_layer(params, x, cfg, CSA)
    assert reference.entries is not None
    assert reference.scores is not None
    assert reference.seen is not None
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def normed(rows: np.ndarray) -> np.ndarray:
        return rows / np.sqrt(np.mean(rows * rows, -1, keepdims=True) + cfg.norm_eps)

    latent = normed(np.asarray(x, np.float64) @ params.q_a.T) * params.q_norm
    q = normed((latent @ params.q_b.T).reshape(LENGTH, cfg.num_heads, cfg.head_dim))
    freqs = rope_frequencies(cfg, d4.AttentionType.CSA)
    q = np.asarray(apply_rope(jnp.asarray(q, jnp.float32), jnp.arange(LENGTH, dtype=jnp.int32)[:, None], freqs))
    rows, entries = (np.asarray(each, np.float64) for each in (reference.rows, reference.entries))
    found = np.zeros(LENGTH)
    for t in range(LENGTH):
        seen = reference.seen[t]
        if over == "all":
            seen = np.arange(len(entries)) < (t + 1) // cfg.ratio(d4.AttentionType.CSA)
        if not seen.any():
            continue
        keys = np.concatenate([rows[max(0, t - cfg.sliding_window + 1) : t + 1], entries[seen]])
        logits = np.concatenate([q[t] @ keys.T * cfg.head_dim**-0.5, params.sinks[:, None]], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        p = weights[:, -1 - seen.sum() : -1].sum(axis=0)
        p /= p.sum()
        scores = np.asarray(reference.scores[t], np.float64)[seen]
        log_q = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        found[t] = np.sum(p * (np.log(p) - log_q))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("over", first_of(["picked", "all"]))
def test_it_is_the_divergence_from_attentions_own_weights(over):
    params = random_params()[CSA]
    y, loss = attention_with_indexer_loss(params, tokens()[None], CFG, CSA, over=over)
    np.testing.assert_allclose(loss[0], divergence_of_reference(params, over), rtol=0, atol=SAME)
    ratio = CFG.ratio(d4.AttentionType.CSA)
    assert loss[0, 2 * ratio :].min() > 1e-4  # of two entries or more
    assert not np.asarray(loss[0, : ratio - 1]).any()
    wanted = d4.attention(params, tokens()[None], CFG, CSA)
    is_same = np.allclose(y, wanted, rtol=0, atol=SAME)
    assert is_same == (over == "picked"), "attention reads what the loss is over"


@functools.cache
def grads(over: Any, weights: str = "f32") -> Any:
    params = random_params()[CSA]
    params = with_random_deltas(stored_params(params)) if weights == "stored" else params
    floats = jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, params)
    part = jax.tree.map(lambda leaf, trains: leaf if trains else None, params, floats)

    def loss(part: Any, x: jax.Array) -> jax.Array:
        whole = jax.tree.map(lambda a, b: b if a is None else a, part, params, is_leaf=lambda node: node is None)
        return jnp.mean(attention_with_indexer_loss(whole, x[None], CFG, CSA, over=over)[1])

    return jax.jit(jax.grad(loss, (0, 1)))(part, tokens())


@pytest.mark.slow
@pytest.mark.parametrize("over", first_of(["picked", "all"]))
def test_it_teaches_the_indexer_and_nobody_else(over):
    of_params, of_x = grads(over)
    assert not np.asarray(of_x).any()
    for name, grad in of_params.split().items():
        assert np.isfinite(grad).all(), name
        assert np.asarray(grad).any() == name.startswith("indexer."), name


@pytest.mark.slow
def test_a_stored_indexer_learns_by_its_delta():
    of_params, _ = grads("picked", "stored")
    for field in ("index_q_b", "compress"):
        for delta in getattr(of_params, field).deltas:
            is_indexers = field == "index_q_b" or delta.first > 0
            assert np.asarray(delta.up).any() == np.asarray(delta.down).any() == is_indexers
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((of_params.q_b, of_params.q_a_kv, of_params.o_b)))


def test_a_step_against_its_gradient_lowers_it_by_the_square():
    of_params, _ = grads("all")
    rate = 1e-3 / sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(of_params))
    params = random_params()[CSA]
    moved = jax.tree.map(
        lambda leaf, grad: jax.device_put(np.asarray(leaf) - rate * np.asarray(grad)), params, of_params
    )
    before, after = (
        float(jnp.mean(attention_with_indexer_loss(each, tokens()[None], CFG, CSA, over="all")[1]))
        for each in (params, moved)
    )
    # The second order of so short a step, of a loss of 0.1, is below a tenth of the first.
    np.testing.assert_allclose(before - after, 1e-3, rtol=0.1)


@pytest.mark.sweep(guard="test_it_is_the_divergence_from_attentions_own_weights")
def test_rounded_keys_and_padding():
    """Straight through the rounding; what is past a row's length reaches neither value nor derivative."""
    formats = {name: TRAINED[name] for name in ("kv_format", "indexer_format")}
    x = jnp.full((2, 40, CFG.hidden_size), jnp.nan).at[0, :40].set(tokens(40)).at[1, :30].set(tokens(30))

    def losses(params: Any, x: jax.Array, *lengths: int) -> jax.Array:
        return attention_with_indexer_loss(params, x, CFG, CSA, ids(*lengths), **formats)[1]

    def total(params: Any) -> jax.Array:
        return jnp.sum(losses(params, x, 40, 30))

    both = losses(random_params()[CSA], x, 40, 30)
    alone = losses(random_params()[CSA], tokens(30)[None], 30)
    np.testing.assert_allclose(both[1, :30], alone[0], rtol=0, atol=SAME)
    assert not np.asarray(both[1, 30:]).any()
    found = jax.jit(jax.grad(total))(random_params()[CSA]).split()
    assert all(np.isfinite(grad).all() for grad in found.values())
    assert all(np.asarray(grad).any() == name.startswith("indexer.") for name, grad in found.items())


def test_what_has_no_indexer_is_refused():
    with pytest.raises(ValueError, match="layer 2 is a HCA layer, which has no indexer"):
        attention_with_indexer_loss(random_params()[2], tokens()[None], CFG, 2)
    with pytest.raises(ValueError, match=r"over must be one of \['picked', 'all'\], got 'top'"):
        attention_with_indexer_loss(random_params()[CSA], tokens()[None], CFG, CSA, over="top")  # type: ignore[arg-type]


def test_nothing_gives_nothing():
    y, loss = attention_with_indexer_loss(random_params()[CSA], tokens()[None, :0], CFG, CSA)
    assert (y.shape, loss.shape) == ((1, 0, CFG.hidden_size), (1, 0))
    short = attention_with_indexer_loss(random_params()[CSA], tokens(3)[None], CFG, CSA)[1]
    assert not np.asarray(short).any()
