"""``jax.export``: batches of symbolic size, and functions over the pytrees of this library written and read again."""

import dataclasses
import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.requests.snapshot import abstract_snapshot
from dsv4jax.serialization import PYTREES
from dsv4jax.weights.deltas import Delta, WeightWithDelta
from dsv4jax.weights.params import param_shapes
from dsv4jax.weights.stored import Stored
from tests.support.driver import (
    BF16_TAILS,
    CFG,
    DEFAULT,
    F32,
    LAYERS,
    TRAINED,
    assert_same,
    ids,
    moved_values,
    random_params,
    sequence,
    small_plan,
    step,
)

pytest.importorskip("flatbuffers", reason="jax.export writes functions with flatbuffers")
SHAPE = jax.ShapeDtypeStruct


def symbolic_arguments(cache: Any, tokens: Any = 2) -> tuple[Any, ...]:
    """Shapes of x, cache, slots and num_new for a batch of any size; tokens None is any number of tokens."""
    batch, any_tokens = jax.export.symbolic_shape("b, t")
    tokens = tokens or any_tokens
    rows = SHAPE((batch,), jnp.int32)
    return SHAPE((batch, tokens, CFG.hidden_size), jnp.float32), cache, rows, rows


def rewritten(exported: jax.export.Exported) -> jax.export.Exported:
    return jax.export.deserialize(exported.serialize())


@pytest.mark.sweep(guard="test_a_step_of_stored_weights_can_be_exported")
def test_a_step_of_any_batch_is_exported_written_read_and_called():
    """All three kinds, with an indexer that picks; batches of 3 and of 1. Values are those of the jitted step."""
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(max_context=64)), 3)
    undonated: Any = step  # jitted, and exported without that
    run = functools.partial(undonated.__wrapped__, random_params(), layers=LAYERS, backend="xla")
    exported = rewritten(jax.export.export(jax.jit(run))(*symbolic_arguments(jax.eval_shape(lambda: cache))))
    assert exported.in_avals[0].shape[0] == exported.out_avals[0].shape[0]
    assert not isinstance(exported.out_avals[0].shape[0], int)
    x = jnp.asarray(sequence(2, 6, CFG.hidden_size).reshape(3, 2, -1))
    ours = theirs = cache
    for rows, counts in ((slots, ids(2, 1, 2)), (slots[1:2], ids(2)), (ids(2, -1, 0), ids(2, 2, 2))):
        given = x[: len(rows)]
        ys, ours, ok = step(random_params(), given, ours, rows, counts, layers=LAYERS, backend="xla")
        assert ok
        found, theirs, ok = exported.call(given, theirs, rows, counts)
        assert ok
        assert isinstance(theirs, d4.KVCache)
        assert theirs.plan == cache.plan
        # f32 sums in another order: values of size 1 agree to a few 1e-7.
        for a, b in zip(found, ys, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        assert_same(theirs.tables, ours.tables)
        assert moved_values(theirs, ours, tolerance=1e-5)[0] == 0
    assert ours.seq_lens.tolist() == [4, 3, 4, 0, 0]


def test_a_symbolic_number_of_tokens_and_kernels_for_a_symbolic_batch_are_refused():
    cache = d4.cache.abstract_cache(small_plan(**DEFAULT))

    def export(tokens: Any, backend: Any) -> None:
        def run(x, cache, slots, num_new):
            return d4.attention_layer(random_params()[1], x, cache, 1, slots, num_new, backend=backend)[0]

        jax.export.export(jax.jit(run))(*symbolic_arguments(cache, tokens))

    with pytest.raises(ValueError, match=r"x: T must be a number, got .*export a function for each T; B may be"):
        export(None, None)
    for backend in (d4.OpBackends(cache_update="pallas_simulated"), d4.OpBackends(top_k="pallas_simulated")):
        with pytest.raises(ValueError, match=r"x: a batch of symbolic size needs backend='xla', .* would run"):
            export(2, backend)


def handles(cache: d4.KVCache) -> Any:
    """What a handle hands out, and itself, before and after a write; and what else calls return."""
    slots = ids(0, 1)
    handle = d4.acquire(cache, 1, slots, ids(2, 2), backend="xla")
    params, x = random_params()[1], jnp.zeros((2, 2, CFG.hidden_size))
    kv = jnp.zeros((2, 2, CFG.head_dim))
    written = handle.write_swa(kv).flush_compression(params.compressor, x, params.indexer)
    views = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
    staged = [d4.stage(params, x, cache, i, slots, ids(2, 2))[2] for i, params in enumerate(random_params())]
    grants = d4.cache.explain_forward(cache, slots, ids(2, 2))
    return handle, written, views, handle.window(kv), written.entries, staged, grants


def node_types(tree: Any) -> set[type]:
    """Types of a pytree's nodes, in it and below."""
    found: set[type] = set()

    def note(node: Any) -> bool:
        found.add(type(node))
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return found


@pytest.mark.slow
def test_every_pytree_keeps_its_structure_and_static_fields_when_written_and_read():
    csa = random_params()[1]
    trees: list[Any] = [random_params(), csa.compressor, csa.indexer]
    delta = Delta(down=jnp.ones((2, csa.q_b.shape[1])), up=jnp.ones((4, 2)), first=3, alpha=1.5)
    trees.append(dataclasses.replace(csa, q_b=WeightWithDelta(base=csa.q_b, deltas=(delta,))))
    trees += [param_shapes(CFG, kind, Stored(activations="fp8")) for kind in d4.AttentionType]
    for options in (F32, DEFAULT, TRAINED, BF16_TAILS):
        cache = d4.cache.abstract_cache(small_plan(**options))
        trees += [cache, abstract_snapshot(cache.plan, 2, 1)]
    trees.append(jax.eval_shape(handles, d4.cache.abstract_cache(small_plan())))
    for tree in trees:
        exported = rewritten(jax.export.export(jax.jit(lambda tree: tree))(tree))
        (given,), _ = jax.tree.unflatten(exported.in_tree, [0] * exported.in_tree.num_leaves)
        assert jax.tree.structure(given) == jax.tree.structure(tree) == exported.out_tree
    assert set(PYTREES) <= set().union(*(node_types(tree) for tree in trees))
