"""Under ``checked`` a row that an ordinary program skips in silence is an error; without it nothing is checked."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dsv4jax as d4
from tests.support.cases import first_of
from tests.support.driver import (
    BATCH,
    CFG,
    LAYERS,
    TOKENS,
    assert_same,
    ids,
    random_params,
    sequence,
    small_plan,
    step,
)

GRANTED = ids(8, 3, 0, 1)


@functools.cache
def started():
    """Return an empty cache, four admitted slots, and tokens for them."""
    cache, slots, ok = d4.admit(d4.init_cache(small_plan()), BATCH)
    assert ok
    x = jnp.asarray(sequence(1, BATCH * TOKENS, CFG.hidden_size).reshape(BATCH, TOKENS, -1))
    return cache, slots, x


def layers_and_advance(x, cache, slots, num_new, layers=LAYERS):
    """Run layers without a call of ``prepare_forward``."""
    for layer in layers:
        _, cache = d4.attention_layer(random_params()[layer], x, cache, layer, slots, num_new)
    return d4.advance(cache, slots, num_new)


alone = d4.checked(jax.jit(layers_and_advance))


def fails(mistake, function, *args):
    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(mistake)):
        function(*args)


@pytest.mark.sweep(guard="test_a_forgotten_call_of_prepare_forward_is_an_error")
def test_a_right_step_gives_what_it_gives_without_checks():
    cache, slots, x = started()
    for _ in range(2):
        want = step(random_params(), x, cache, slots, GRANTED, layers=LAYERS)
        got = d4.checked(step)(random_params(), x, cache, slots, GRANTED, layers=LAYERS)
        assert_same(got[1].tables, want[1].tables)
        for y, wanted in zip(got[0], want[0], strict=True):
            np.testing.assert_allclose(y, wanted, atol=2e-5)  # fp32 sums in another order, as it is another program
        cache = got[1]
    assert cache.seq_lens.tolist()[:BATCH] == [16, 6, 0, 2]


@pytest.mark.slow
def test_a_forgotten_call_of_prepare_forward_is_an_error():
    cache, slots, x = started()
    silent = jax.jit(layers_and_advance)(x, cache, slots, GRANTED)
    assert silent.seq_lens.tolist() == cache.seq_lens.tolist(), "nothing is stored,"
    assert d4.verify(silent) == [], "and nothing shows it"
    mistake = "row 0 (slot 0): 0 of its 8 tokens are granted: call prepare_forward(cache, slots, num_new)"
    fails(mistake, alone, x, cache, slots, GRANTED)
    refused, ok = d4.prepare_forward(cache, slots, ids(8, 3, 999, 1))
    assert not ok
    fails(mistake, alone, x, refused, slots, GRANTED)
    alone(x, refused, slots, jnp.where(ok, GRANTED, 0))


@pytest.mark.parametrize(
    ("slots", "num_new", "mistake"),
    [
        ((0, 1, 2, 3), (8, 9, 0, 1), "row 1 (slot 1): of 9 tokens the call brings T = 8, so that it stores none"),
        ((0, 1, 2, 3), (8, 3, 0, 2), "row 3 (slot 3): 1 of its 2 tokens are granted: call prepare_forward"),
        ((0, 1, 2, 3), (8, -3, 0, 1), "row 1 (slot 1): num_new is -3"),
        ((0, 1, 2, 4), (8, 3, 0, 1), "row 3 (slot 4): the slot is not admitted: call admit first"),
        ((0, 1, 2, 99), (8, 3, 0, 1), "row 3 (slot 99): the slot is not admitted: call admit first"),
        ((0, 1, 2, 1), (8, 3, 0, 3), "row 1 (slot 1): another row of the batch names the same slot"),
    ],
)
def test_a_row_that_would_be_skipped_is_named(slots, num_new, mistake):
    cache, given, x = started()
    cache, ok = d4.prepare_forward(cache, given, jnp.where(GRANTED == 3, 9, GRANTED))
    assert ok
    fails(mistake, alone, x, cache, ids(*slots), ids(*num_new))


@pytest.mark.slow
def test_a_layer_that_runs_twice_or_never_is_an_error():
    cache, slots, x = started()
    cache, ok = d4.prepare_forward(cache, slots, GRANTED)
    assert ok
    twice = d4.checked(functools.partial(layers_and_advance, layers=(0, 0)))
    mistake = "row 0 (slot 0): this layer has stored token 0 already: run each layer once, then call advance"
    fails(mistake, twice, x, cache, slots, GRANTED)
    missing = d4.checked(functools.partial(layers_and_advance, layers=(0, 1)))
    mistake = "row 0 (slot 0): layer 0 of the HCA layers has not stored token 7: run every layer between"
    fails(mistake, missing, x, cache, slots, GRANTED)


@pytest.mark.parametrize(
    "form", first_of(["scan", "while_loop", "cond", "vmap", "shard_map", "donated", "checkify"], count=2)
)
def test_checks_reach_into(form):
    """Loops, branches, maps, donation. The second pass lacks ``advance``, which only the loop's body could know."""
    cache, slots, x = started()

    def twice(cache, num_new):
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        backend = "xla" if form == "vmap" else None  # kernels cannot be mapped
        return d4.attention_layer(random_params()[0], x, cache, 0, slots, num_new, backend=backend)[1]

    def run(cache, num_new):
        if form == "scan":
            return lax.scan(lambda cache, _: (twice(cache, num_new), None), cache, None, length=2)[0]
        if form == "while_loop":
            step = lambda carry: (carry[0] + 1, twice(carry[1], num_new))  # noqa: E731
            return lax.while_loop(lambda carry: carry[0] < 2, step, (0, cache))[1]
        cache = twice(cache, num_new)
        if form == "cond":
            return lax.cond(num_new[0] >= 0, twice, lambda cache, _: cache, cache, num_new)
        if form == "vmap":
            several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), cache)
            return jax.vmap(twice)(several, jnp.stack([jnp.zeros_like(num_new), num_new]))
        if form == "shard_map":
            mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
            return jax.shard_map(twice, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(cache, num_new)
        return twice(cache, num_new)

    mistake = "row 0 (slot 0): this layer has stored token 0 already"
    if form == "checkify":
        with_errors = checkify.checkify(jax.jit(d4.checked(run)))
        assert mistake in str(with_errors(cache, GRANTED)[0].get())
        return
    given = jax.tree.map(jnp.copy, cache)
    function = d4.checked(jax.jit(run, donate_argnums=0 if form == "donated" else ()))
    fails(mistake, function, given, GRANTED)
    assert given.tables.seq_lens.is_deleted() == (form == "donated")
    none = jnp.zeros_like(GRANTED)
    function(jax.tree.map(jnp.copy, cache), none)


@pytest.mark.parametrize("shards", first_of([1, 2], count=0))
def test_checks_reach_over_the_explicit_axes_of_a_mesh(shards):
    """The default axes of ``jax.make_mesh``, over which JAX sorts nothing that is sharded, mistakes included."""
    mesh = jax.make_mesh((shards,), ("data",), devices=jax.devices("cpu")[:shards])
    plan = small_plan(max_requests=2, num_blocks=2)
    specs, rows = d4.sharding.partition_specs(plan, mesh), P("data")
    x = jnp.ones((2, TOKENS, CFG.hidden_size))

    def both(cache, x, num_new):
        cache, slots, _ = d4.admit(cache, 2 // shards)
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        return d4.attention_layer(random_params()[0], x, cache, 0, slots, num_new)[0]

    function = jax.shard_map(both, mesh=mesh, in_specs=(specs, rows, rows), out_specs=rows, check_vma=False)
    given = jax.device_put((x, ids(TOKENS, TOKENS), ids(TOKENS, TOKENS + 1)), NamedSharding(mesh, rows))
    cache = d4.init_cache(plan, mesh)
    assert d4.checked(function)(cache, given[0], given[1]).shape == x.shape
    fails(f"the call brings T = {TOKENS}", d4.checked(function), cache, given[0], given[2])


def test_what_is_no_function_is_named():
    no_function: Any = 3
    with pytest.raises(ValueError, match=r"^checked: expected a function, got 3$"):
        d4.checked(no_function)


def test_a_handle_is_checked_too():
    cache, slots, _ = started()
    kv = jnp.zeros((BATCH, TOKENS, CFG.head_dim))

    @d4.checked
    @jax.jit
    def write(cache, num_new):
        return d4.acquire(cache, 0, slots, num_new).write_swa(kv).cache

    fails("row 0 (slot 0): 0 of its 8 tokens are granted", write, cache, GRANTED)
    cache, ok = d4.prepare_forward(cache, slots, ids(8, 9, 0, 1))
    assert ok
    write(cache, GRANTED)
    fails("row 1 (slot 1): of 9 tokens the call brings T = 8", write, cache, ids(8, 9, 0, 1))


def test_an_ordinary_program_holds_no_check():
    """Neither before nor after the same function has been traced under ``checked``."""
    cache, slots, x = started()

    def has_check(traced) -> bool:
        return any(type(effect).__name__ == "ErrorEffect" for effect in traced.jaxpr.effects)

    def program():
        traced = jax.jit(layers_and_advance).trace(x, cache, slots, GRANTED)
        assert not has_check(traced)
        return traced.lower().as_text()

    before = program()
    fails("row 0 (slot 0)", alone, x, cache, slots, GRANTED)
    assert program() == before

    def with_a_check(x, cache, slots, num_new):
        checkify.check(num_new[0] > 0, "what the test would see")
        return layers_and_advance(x, cache, slots, num_new)

    assert has_check(jax.jit(with_a_check).trace(x, cache, slots, GRANTED))


@pytest.mark.sweep(guard="test_a_forgotten_call_of_prepare_forward_is_an_error")
def test_drafts_are_checked_and_right_ones_pass():
    cache, slots, x = started()

    @d4.checked
    @jax.jit
    def draft(cache, num_new):
        staged = []
        for layer in LAYERS:
            _, cache, rows = d4.stage(random_params()[layer], x, cache, layer, slots, num_new)
            staged.append(rows)
        return d4.commit(cache, staged, num_new)

    fails("row 0 (slot 0): 0 of its 8 tokens are granted", draft, cache, GRANTED)
    granted, ok = d4.prepare_forward(cache, slots, GRANTED)
    assert ok
    after, ok = draft(granted, GRANTED)
    assert ok
    assert after.seq_lens.tolist()[:BATCH] == GRANTED.tolist()
