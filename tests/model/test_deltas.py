"""Low-rank deltas: added, trained, merged, taken off; in every pass and beside every kind of weight."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.kernels.base import ON_SIMULATOR
from dsv4jax.model import (
    ModelConfig,
    ModelParams,
    combine,
    forward,
    forward_sequences,
    init_caches,
    load_deltas,
    merge_deltas,
    partition,
    save_deltas,
    save_model,
    with_deltas,
    without_deltas,
)
from dsv4jax.model.deltas import deltas_of, numbers_of, targets_of
from dsv4jax.model.kernels.base import ModelKernels
from dsv4jax.weights.deltas import Delta, WeightWithDelta
from tests.model.test_partition import as_f32, cross_entropy
from tests.support.cases import first_of
from tests.support.driver import assert_same, ids
from tests.support.models import FULL, drawn_model, laid_over

# A layer of each kind: SWA, which picks experts by id, CSA, whose indexer picks 12 of 15 entries, and HCA.
CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(0, 4, 16), hca_compression_ratio=16))
TOKENS = 60
EVERY = {
    **dict.fromkeys(("q_a", "kv", "q_b", "o_a", "o_b"), 3),
    **dict.fromkeys(("compressor", "indexer", "router", "shared_experts", "head"), 2),
    "experts": 2,
}
# f32 sums in another order, of logits of size 5.
SAME = 2e-5


@functools.cache
def model(weights: str, cfg: ModelConfig = CFG) -> ModelParams:
    params = drawn_model(cfg, 3, weights, drafts=0)
    return as_f32(params) if weights == "stored" else params


@functools.cache
def tuned(weights: str, cfg: ModelConfig = CFG) -> ModelParams:
    """A model whose deltas are not 0: a third of the size of the weights."""
    scale, params = 0.3, model(weights, cfg)
    shapes = jax.eval_shape(lambda: with_deltas(params, EVERY, jax.random.key(1), alpha=4.0))
    deltas, rest = partition(shapes, "deltas")
    leaves, tree = jax.tree.flatten(deltas)
    rng = np.random.default_rng(2)  # NumPy's, for which nothing is compiled
    drawn = [
        jax.device_put(rng.standard_normal(leaf.shape, np.float32) * np.float32(scale * leaf.shape[-1] ** -0.5))
        for leaf in leaves
    ]
    rest = jax.tree.unflatten(jax.tree.structure(rest), jax.tree.leaves(params))
    return combine(jax.tree.unflatten(tree, drawn), rest)


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, CFG.vocab_size, (1, TOKENS)), jnp.int32)


def logits_of(params: ModelParams) -> np.ndarray:
    return np.asarray(forward_sequences(params, tokens())[0])


@pytest.mark.slow
def test_names_stand_for_the_weights_of_every_layer():
    names = {target.name for target in targets_of(CFG)}
    assert {target.name.split(".")[0] for target in deltas_of(tuned("f32"))} == set(EVERY)
    assert {target.name for target in deltas_of(tuned("f32"))} == names
    of_layer = [target.layer for target in deltas_of(tuned("f32"))]
    assert [of_layer.count(layer) for layer in (0, 1, 2, None)] == [11, 17, 13, 1]
    numbers = sum(leaf.size for leaf in jax.tree.leaves(list(deltas_of(tuned("f32")).values())))
    assert numbers == numbers_of(CFG, EVERY)


@pytest.mark.sweep(guard="test_merged_is_applied")
@pytest.mark.parametrize("weights", ["stored"])
def test_new_deltas_add_nothing(weights):
    params = with_deltas(model(weights), EVERY, jax.random.key(1), alpha=4.0)
    np.testing.assert_allclose(logits_of(params), logits_of(model(weights)), rtol=0, atol=SAME)
    assert_same(without_deltas(params), model(weights))


@pytest.mark.parametrize("weights", first_of(["stored", "f32"], count=0))
def test_merged_is_applied(weights):
    """Through three layers of f32 sums in another order. FP8 and FP4 times their scales are exact in f32."""
    merged = merge_deltas(tuned(weights), widen=jnp.float32)
    assert not deltas_of(merged)
    found, wanted = logits_of(tuned(weights)), logits_of(merged)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=SAME)
    assert np.abs(found - logits_of(model(weights))).max() > 0.5, "the deltas add next to nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(sorted({target.name for target in targets_of(CFG)}), count=6))
def test_each_delta_alone_is_what_its_merged_weight_is(name):
    """In parts that stand side by side, the rows of the others stay as they are."""
    found = deltas_of(tuned("f32"))
    alone = {target: delta for target, delta in found.items() if target.name == name}
    params = model("f32")
    for target, delta in alone.items():
        merged = merge_deltas(tuned("f32"))
        before, after = (at(tree, target.path) for tree in (params, merged))
        rows = slice(target.first, target.first + target.shape[-2])
        exact = np.einsum("...or,...ri->...oi", *(np.asarray(x, np.float64) for x in (delta.up, delta.down)))
        wanted = np.asarray(before[..., rows, :], np.float64) + 4.0 / delta.rank * exact
        np.testing.assert_allclose(np.asarray(after)[..., rows, :], wanted, rtol=0, atol=1e-6)  # rounded to f32 once


def at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        tree = tree[step] if isinstance(step, int) else getattr(tree, step)
    return tree


@pytest.mark.sweep(guard="test_merged_is_applied")
@pytest.mark.parametrize("weights", ["stored"])
def test_the_cached_pass_has_them_too(weights):
    """In chunks and token by token; that of whole sequences is the reference."""
    wanted = logits_of(tuned(weights))
    caches, slots, _ = init_caches(CFG, 1, 64, **FULL).admit(1)
    cache, found, done = caches.model, [], 0
    for count, width in ((33, 33), (1, 1), (TOKENS - 34, 33)):  # the last one with padding
        cache, _ = d4.prepare_forward(cache, slots, ids(count))
        part = jnp.zeros((1, width), jnp.int32).at[:, :count].set(tokens()[:, done : done + count])
        logits, _, cache = forward(tuned(weights), part, cache, slots, ids(count), logits="all", backend="xla")
        cache, done = d4.advance(cache, slots, ids(count)), done + count
        assert logits is not None
        found.append(logits[0, :count])
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=0, atol=SAME)


# One layer, because a program of a mesh takes long to compile.
ON_A_MESH = dataclasses.replace(
    CFG, attention=dataclasses.replace(CFG.attention, compress_ratios=(4,)), num_hash_layers=0
)


@pytest.mark.sweep(guard="test_over_a_mesh_they_add_what_they_add_on_one_device")
def test_over_a_mesh_deltas_lie_where_their_weights_do(tmp_path):
    alone, base = tuned("stored", ON_A_MESH), laid_over((2, 2), model("stored", ON_A_MESH))
    save_deltas(alone, tmp_path / "deltas")
    for found, wanted in (
        (load_deltas(base, tmp_path / "deltas"), alone),
        (with_deltas(base, {"experts": 2, "head": 2, "q_a": 3}, jax.random.key(1)),) * 2,
    ):
        for (path, leaf), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
            name = jax.tree_util.keystr(path)
            np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), np.asarray(other).view(np.uint8))
            divided = re.search(r"\.embedding|\.head\.(base|deltas\[0\]\.up)|\.experts\.(gate_up|down)", name)
            assert (leaf.is_fully_replicated, len(leaf.sharding.device_set)) == (not divided, 4), name


@pytest.mark.parametrize(("shape", "width"), first_of([((1, 2), 5), ((2, 2), 5), ((4, 1), 1), ((1, 2), 256)], count=0))
def test_over_a_mesh_they_add_what_they_add_on_one_device(shape, width):
    """Of few tokens, and of a long chunk whose tokens are divided."""
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, CFG.vocab_size, (4, width)), jnp.int32)
    counts, found = jnp.asarray([width, 1, 0, width], jnp.int32), []
    for params in (tuned("stored", ON_A_MESH), laid_over(shape, tuned("stored", ON_A_MESH))):
        caches, slots, _ = init_caches(ON_A_MESH, 4, 256, mesh=params.mesh, **FULL).admit(4)
        cache, _ = d4.prepare_forward(caches.model, slots, counts)
        found.append(np.asarray(jax.jit(forward)(params, tokens, cache, slots, counts)[0]))
    np.testing.assert_allclose(*found, rtol=0, atol=SAME)


@pytest.mark.sweep(guard="test_they_are_those_that_were_recorded")
@pytest.mark.parametrize("weights", first_of(["f32", "stored"], count=0))  # test_gradients has those of stored weights
def test_the_gradient_of_every_delta_is_that_of_the_merged_weight(weights):
    """d/d up = scale * (d/d W) down', and the same of down. That of no delta is 0."""
    deltas, rest = partition(tuned(weights), "deltas")
    wide, tables = partition(merge_deltas(tuned(weights), widen=jnp.float32))

    def loss(part: ModelParams, rest: ModelParams) -> jax.Array:
        return cross_entropy(forward_sequences(combine(part, rest), tokens())[0], tokens()[0])

    found, of_wide = (jax.jit(jax.grad(loss))(part, rest) for part, rest in ((deltas, rest), (wide, tables)))
    grads = {target: at(found, target.path).deltas for target in deltas_of(tuned(weights))}
    for target, delta in deltas_of(tuned(weights)).items():
        (grad,) = (one for one in grads[target] if one.first == target.first)
        rows = slice(target.first, target.first + target.shape[-2])
        of_weight = np.asarray(at(of_wide, target.path)[..., rows, :], np.float64) * delta.scale
        up, down = (np.asarray(x, np.float64) for x in (delta.up, delta.down))
        for one, wanted in ((grad.up, of_weight @ down.swapaxes(-1, -2)), (grad.down, up.swapaxes(-1, -2) @ of_weight)):
            if target.name.startswith("indexer"):  # picks have no derivative; the indexer's loss has one
                assert not np.asarray(one).any()
                continue
            size = np.linalg.norm(wanted)
            assert size > 0, target
            # f32 sums in another order, through three layers: 3e-6 was seen.
            assert np.linalg.norm(np.asarray(one) - wanted) < 1e-4 * size, target


@pytest.mark.slow
def test_only_the_deltas_are_to_be_trained():
    deltas, rest = partition(tuned("stored"), "deltas")
    assert sum(leaf.size for leaf in jax.tree.leaves(deltas)) == numbers_of(CFG, EVERY)
    assert_same(combine(deltas, rest), tuned("stored"))
    chosen, _ = partition(tuned("stored"), lambda name: ".deltas[" in name or name.endswith("norm"))
    more = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(chosen)}
    fewer = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(deltas)}
    assert more > fewer
    assert all(name.endswith("norm") for name in more - fewer)


def test_a_stored_weight_is_not_merged_silently():
    message = r"blocks\[0\]\.attention\.q_a_kv is stored as FP8, which cannot hold the sum: give widen="
    with pytest.raises(ValueError, match=message):
        merge_deltas(tuned("stored"))
    params = with_deltas(model("stored"), {"experts": 1}, jax.random.key(0))
    with pytest.raises(ValueError, match=r"blocks\[0\]\.experts\.gate_up is stored as FP4"):
        merge_deltas(params)


def test_what_cannot_be_is_named():
    params, key = model("f32"), jax.random.key(0)
    small = with_deltas(params, {"q_b": 2}, key)
    factors = Delta(down=jnp.ones((2, 3)), up=jnp.ones((2, 2)), alpha=1.0)
    wrong = WeightWithDelta(base=params.blocks[0].attention.q_b, deltas=(factors,))
    attention = dataclasses.replace(small.blocks[0].attention, q_b=wrong)
    block = dataclasses.replace(small.blocks[0], attention=attention)
    swapped: Any = {"q_b": 2}, params
    no_key: Any = 0
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: with_deltas(params, {"q": 2}, key), ValueError, "no weight of this model is named 'q'; known are"),
        (lambda: with_deltas(swapped[0], swapped[1], key), ValueError, "params: expected a ModelParams, got dict"),
        (lambda: with_deltas(params, swapped[1], key), ValueError, "ranks: expected a Mapping, got ModelParams"),
        (lambda: with_deltas(params, {"q_b": 2}, no_key), ValueError, r"key must be a random key, .* got 0"),
        (lambda: with_deltas(params, {"q_b": 0}, key), ValueError, r"ranks\['q_b'\] must be an integer of at least 1"),
        (lambda: with_deltas(params, {"experts": 1, "experts.down": 2}, key), ValueError, "stands for 'experts.down'"),
        (
            lambda: with_deltas(small, {"q_b": 2}, key),
            ValueError,
            r"layers\.0\.self_attn\.q_b_proj has a delta already",
        ),
        (lambda: partition(params, "deltas"), ValueError, "nothing of these weights would be trained"),
        (lambda: partition(params, "all"), ValueError, "trains must be one of"),
        (lambda: save_model(small, "/nonexistent"), ValueError, "low-rank deltas: save_deltas has a file for them"),
        (
            lambda: forward_sequences(dataclasses.replace(small, blocks=(block, *small.blocks[1:])), tokens()),
            AssertionError,
            r"params\.q_b\.deltas\[0\]\.down: expected float32 or bfloat16 \[rank, in=",
        ),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()


def test_kernels_of_the_model_decline_weights_with_deltas():
    """No delta is left out silently: an op without a kernel for it is served by XLA, or refused by name."""

    class Kernels(ModelKernels):
        def unserved(self, cfg: ModelConfig, weights: Any, dtype: Any) -> str | None:
            return None

    simulated = Kernels(ON_SIMULATOR)
    for name, params, reason in (
        ("without", model("f32"), None),
        ("with", tuned("f32"), "weights with low-rank deltas have no kernel"),
    ):
        for weights in (params.head, params.blocks[0].experts, params.blocks[0].router):
            assert simulated.unsupported(CFG, weights, jnp.float32) == reason, name
