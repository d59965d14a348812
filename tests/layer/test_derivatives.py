"""Derivatives go straight through rounding in XLA's form, end at bytes between calls, and are refused by kernels."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.cache import pool
from dsv4jax.formats import INDEXER_FORMATS, KV_FORMATS, rounded, rounded_keys
from dsv4jax.layer import attention
from dsv4jax.layer.dense import rms_norm, wide_product
from dsv4jax.layer.ops import CACHE_UPDATE, DECODE_ATTENTION, GATHER_ROWS, INDEXER_SCORES, NewEntries
from dsv4jax.layer.reference import reference_layer
from dsv4jax.rope import apply_rope, rope_frequencies
from dsv4jax.weights.params import param_shapes
from tests.support.cases import first_of
from tests.support.driver import CFG, DEFAULT, F32, TRAINED, ids, random_params, sequence, small_plan
from tests.support.second_derivatives import assert_symmetric, relative_error, round_plainly, with_second

BF16: dict[str, Any] = dict(kv_format="bf16", indexer_format="bf16", hca_tail="online")
LENGTH = 60  # 15 entries of CSA, of which the indexer picks 12; 3 of HCA; windows hold 16
# f32 sums in another order, through a handful of products of a few hundred terms each: 1e-6 is typical, 6e-6 was seen.
SAME = 5e-5
# E4M3 has 3 fraction bits, so a row's dims are off by at most 2^-4 of themselves, and y's derivatives are products of
# rows and smooth functions of them: to first order their error, as a vector, is that of the rows. bf16: 2^-9, and what
# a cotangent loses when it passes an array in bf16.
ROUNDED = {"fp8_row": 2**-4, "fp8_tile64": 2**-4, "bf16": 2**-7}


# Differentiated layers take seconds to compile, and no time to run.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def admitted(options: dict[str, Any]) -> tuple[Any, jax.Array]:
    """(an empty cache with one request, granted LENGTH tokens; its slot)."""
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(**options)), 1)
    cache, ok = d4.prepare_forward(cache, slots, ids(LENGTH))
    assert ok
    return cache, slots


def tokens() -> jax.Array:
    return jnp.asarray(sequence(3, LENGTH, CFG.hidden_size))


def weighted(y: jax.Array) -> jax.Array:
    """A scalar that looks at every output [T, hidden] with a weight of its own."""
    return jnp.sum(y * jnp.asarray(sequence(4, LENGTH, CFG.hidden_size))[-y.shape[0] :])


def in_calls(params: Any, x: jax.Array, layer: int, start: Any, split: tuple[int, ...]) -> list[jax.Array]:
    """y of each of some calls that bring the sequence x to what ``admitted`` gives, f32 [n, hidden] each."""
    (cache, slots), outputs, first = start, [], 0
    for count in split:
        given = x[None, first : first + count]
        y, cache = d4.attention_layer(params, given, cache, layer, slots, ids(count), backend="xla")
        # The grant of the whole sequence stands, so lengths can be counted without another one.
        cache, first = d4.advance(cache, slots, ids(count)), first + count
        outputs.append(y[0])
    return outputs


@functools.cache
def gradients(layer: int, split: tuple[int, ...] = (LENGTH,), **options: Any) -> Any:
    """d weighted(y) by (params, x)."""
    start = admitted(options)

    def loss(params, x):
        return weighted(jnp.concatenate(in_calls(params, x, layer, start, split)))

    return jit(jax.grad(loss, (0, 1)))(random_params()[layer], tokens())


def in_parts(tree: Any) -> Any:
    """The tree with weights one by one where it has weights that stand side by side."""

    def is_params(node: Any) -> bool:
        return isinstance(node, d4.AttentionParams)

    return jax.tree.map(lambda node: node.split() if is_params(node) else node, tree, is_leaf=is_params)


def relative_errors(found: Any, wanted: Any) -> dict[str, float]:
    """|found - wanted| / |wanted| of each part, as vectors; a part that must be 0 is checked and left out."""
    errors, (found, wanted) = {}, in_parts((found, wanted))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name, (a, b) = jax.tree_util.keystr(path), (np.asarray(a, np.float64), np.asarray(b, np.float64))
        assert np.isfinite(a).all(), name
        if "indexer" in name:  # picks have no derivative
            assert not a.any(), name
            continue
        errors[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return errors


# ---- through a layer ------------------------------------------------------------------------------------------------

CASES = {  # the format of keys has no part in them, because picks have no derivative
    "swa, fp8_row": (0, DEFAULT),
    "csa, fp8_tile64, mxfp4": (1, TRAINED),
    "hca, f32, ring": (2, F32),
    "hca, fp8_tile64, online": (2, TRAINED),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "options"), first_of(pytest.param(*case, id=name) for name, case in CASES.items()))
def test_gradients_are_those_of_the_reference_straight_through_its_rounding(layer, options):
    """The reference has no cache, no tiles and no chunks, and rounds in one place. It picks the same entries."""

    def loss(params, x):
        formats = options["kv_format"], options["indexer_format"]
        return weighted(reference_layer(params, x, CFG, layer, *formats).out)

    differentiate = jax.grad(loss, (0, 1))
    if layer != 1:  # the reference picks on the host
        differentiate = jit(differentiate)
    wanted = differentiate(random_params()[layer], tokens())
    errors = relative_errors(gradients(layer, **options), wanted)
    assert len(errors) >= 9
    assert max(errors.values()) < SAME, errors


@pytest.mark.sweep(guard="test_gradients_are_those_of_the_reference_straight_through_its_rounding")
@pytest.mark.parametrize(("layer", "kv_format"), first_of([(1, "fp8_row"), (1, "bf16"), (2, "fp8_tile64")], count=0))
def test_gradients_of_rounded_rows_differ_from_those_of_f32_by_the_rounding(layer, kv_format):
    """The indexer's keys stay f32, so that both pick the same entries; bf16 rows come with bf16 tails."""
    tails = dict(tail_dtype=jnp.dtype(jnp.bfloat16)) if kv_format == "bf16" else {}
    found = gradients(layer, **F32 | dict(kv_format=kv_format) | tails)
    errors = relative_errors(found, gradients(layer, **F32))
    assert max(errors.values()) < ROUNDED[kv_format], errors
    assert max(errors.values()) > 2**-12, "nothing was rounded"


@pytest.mark.slow
def test_forward_mode_agrees_with_reverse_mode():
    x, direction, start = tokens(), jnp.asarray(sequence(5, LENGTH, CFG.hidden_size)), admitted(DEFAULT)
    of_params, of_x = gradients(0, **DEFAULT)
    along = jax.tree.map(jnp.ones_like, of_params)

    def loss(params, x):
        return weighted(in_calls(params, x, 0, start, (LENGTH,))[0])

    _, found = jit(lambda p, x: jax.jvp(loss, (p, x), (along, direction)))(random_params()[0], x)
    terms = [jnp.sum(leaf) for leaf in jax.tree.leaves(of_params)] + [jnp.sum(of_x * direction)]
    # Terms cancel in their sum, so the error is relative to the sum of their sizes.
    np.testing.assert_allclose(found, sum(terms), rtol=0, atol=SAME * float(sum(jnp.abs(term) for term in terms)))


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "options"), first_of([(0, TRAINED), (1, TRAINED), (2, F32)]))
def test_second_derivatives_go_straight_through_rounding(layer, options, monkeypatch):
    """As the reference's do, which rounds without ``straight_through``."""
    round_plainly(monkeypatch)
    start, along, other = admitted(options), *(jnp.asarray(sequence(seed, LENGTH, CFG.hidden_size)) for seed in (5, 6))

    def loss(x):
        return weighted(jnp.sin(in_calls(random_params()[layer], x, layer, start, (LENGTH,))[0]))

    def reference(x):
        formats = options["kv_format"], options["indexer_format"]
        return weighted(jnp.sin(reference_layer(random_params()[layer], x, CFG, layer, *formats).out))

    found = with_second(loss)
    (_, second), (_, of_other) = found(tokens(), along), found(tokens(), other)
    _, wanted = jax.jvp(jax.grad(reference), (tokens(),), (along,))
    assert relative_error(second, wanted) < SAME
    assert_symmetric(along, second, other, of_other)


# ---- from one call to the next --------------------------------------------------------------------------------------

SPLIT = (30, 29, 1)  # blocks begin in one call and end in another; the last call is a decode step that ends one


@pytest.mark.parametrize(
    ("layer", "options", "tolerance"),
    first_of([(1, F32, SAME), (2, BF16, ROUNDED["bf16"])], count=0),
    ids=["csa, f32", "hca, bf16"],
)
def test_rows_of_floats_carry_derivatives_through_the_cache(layer, options, tolerance):
    in_one = gradients(layer, **F32)
    errors = relative_errors(gradients(layer, SPLIT, **options), in_one)
    assert max(errors.values()) < tolerance, errors


@pytest.mark.sweep(guard="test_a_piece_that_stores_has_a_derivative_in_floats_and_refuses_one_in_bytes")
def test_rows_of_bytes_are_constants_to_later_calls():
    """The last call's y, by tokens of its own and by earlier ones; a decode step whose token completes an entry."""
    layer, options = 2, TRAINED
    start = admitted(options)

    def last(x):
        return weighted(in_calls(random_params()[layer], x, layer, start, SPLIT)[-1])

    found = jit(jax.grad(last))(tokens())
    assert not found[:-1].any()
    formats = options["kv_format"], options["indexer_format"]

    def reference(token):  # the same token, after the same constants
        x = jnp.concatenate([tokens()[:-1], token])
        return weighted(reference_layer(random_params()[layer], x, CFG, layer, *formats).out[-1:])

    assert relative_errors(found[-1:], jit(jax.grad(reference))(tokens()[-1:]))[""] < SAME


# ---- pieces and formulas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_derivative_of_rounded_rows_is_that_of_the_rows(kv_format):
    x, along = jnp.asarray(sequence(1, 3, 136)), jnp.asarray(sequence(2, 3, 136))
    rows = KV_FORMATS[kv_format]
    value, tangent = jit(lambda x, along: jax.jvp(lambda x: rounded(x, rows, 8), (x,), (along,)))(x, along)
    np.testing.assert_array_equal(value, jit(lambda x: rows.decode(rows.encode(x, 8)))(x))
    np.testing.assert_array_equal(tangent, along)
    if rows.row(128, 8).nope.dtype == jnp.uint8:
        with pytest.raises(ValueError, match="a derivative cannot pass through rows that are encoded as bytes"):
            jax.jvp(lambda x: rows.decode(rows.encode(x, 8)), (x,), (along,))


@pytest.mark.parametrize("indexer_format", INDEXER_FORMATS)
def test_the_derivative_of_rounded_keys_is_that_of_the_keys(indexer_format):
    x, along = jnp.asarray(sequence(1, 3, 128)), jnp.asarray(sequence(2, 3, 128))
    keys = INDEXER_FORMATS[indexer_format]
    value, tangent = jit(lambda x, along: jax.jvp(lambda x: rounded_keys(x, keys), (x,), (along,)))(x, along)
    np.testing.assert_array_equal(value, jit(lambda x: keys.decode(keys.encode(x)))(x))
    np.testing.assert_array_equal(tangent, along)
    if keys.rounds_queries:
        with pytest.raises(ValueError, match="a derivative cannot pass through rows that are encoded as bytes"):
            jax.grad(lambda x: jnp.sum(keys.decode(keys.encode(x))))(x)


ROUNDINGS: dict[str, tuple[int, Any]] = {
    **{f"rows, {name}": (136, functools.partial(rounded, rows=rows, rope_dim=8)) for name, rows in KV_FORMATS.items()},
    **{f"keys, {name}": (128, functools.partial(rounded_keys, keys=keys)) for name, keys in INDEXER_FORMATS.items()},
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_the_second_derivative_of_what_is_rounded_is_the_formulas_at_the_rounded_value(name):
    """Of x sin(r), where r is x rounded and dr/dx = 1: 2 cos(r) - x sin(r), up to f32's rounding of terms up to 4."""
    dim, form = ROUNDINGS[name]
    x, along = (jnp.asarray(sequence(seed, 3, dim)) for seed in (1, 2))
    _, found = with_second(lambda x: jnp.sum(x * jnp.sin(form(x))))(x, along)
    r = jit(form)(x)
    np.testing.assert_allclose(found, (2 * jnp.cos(r) - x * jnp.sin(r)) * along, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [F32, DEFAULT], ids=["f32", "fp8_row"])
def test_a_piece_that_stores_has_a_derivative_in_floats_and_refuses_one_in_bytes(options):
    cache, slots = admitted(options)
    state, entries, plan = cache.swa.state, cache.hca.pool, cache.plan
    kv = jnp.asarray(sequence(1, 3, CFG.head_dim))[None]

    def windows(kv):
        stored = d4.pieces.append_swa.__wrapped__(state, 0, kv, slots, ids(0), ids(3), plan=plan, backend="xla")
        return jnp.sum(d4.pieces.gather_swa(stored, 0, slots, ids(3), plan=plan)[0])

    def first_entry(kv):
        place = cache.tables.block_table, slots
        new = d4.pieces.NewEntries(
            entries=kv[:, :1], keys=None, block_table=place[0], slots=slots, first=ids(0), count=ids(1)
        )
        stored = d4.pieces.flush_entries.__wrapped__(entries, 0, new, plan=plan, backend="xla")
        return jnp.sum(d4.pieces.gather_compressed(stored, 0, *place, ids(0)[:, None], plan=plan, backend="xla"))

    for call, stored in ((windows, 3), (first_entry, 1)):
        if options is F32:
            np.testing.assert_array_equal(jit(jax.grad(call))(kv)[0], (np.arange(3) < stored)[:, None] * np.ones(136))
        else:
            for differentiate in (jax.grad(call), lambda kv, call=call: jax.jvp(call, (kv,), (kv,))):
                with pytest.raises(ValueError, match=r"encoded as bytes.*LayerCacheHandle or formats\.rounded"):
                    jit(differentiate)(kv)


@pytest.mark.sweep(guard="test_rows_of_floats_carry_derivatives_through_the_cache")
@pytest.mark.parametrize(
    ("count", "options"),
    first_of([pytest.param(20, TRAINED, id="chunk, online"), pytest.param(1, DEFAULT, id="decode, ring")], count=0),
)
def test_a_layer_on_a_handle_has_the_gradient_of_attention_layer(count, options):
    """HCA, where a decode step at position 15 completes an entry. The handle gathers, too, what it has just written."""
    layer, first = 2, 15
    params, freqs = random_params()[layer], rope_frequencies(CFG, d4.AttentionType.HCA)
    cache, slots = admitted(options)
    x = tokens()[None]
    _, cache = d4.attention_layer(params, x[:, :first], cache, layer, slots, ids(first), backend="xla")
    cache = d4.advance(cache, slots, ids(first))
    x = x[:, first : first + count]

    def on_handle(x):
        handle = d4.acquire(cache, layer, slots, ids(count), backend="xla")
        at = handle.positions(count)
        handle = handle.flush_compression(params.compressor, x)
        kv = apply_rope(rms_norm(wide_product(x, params.kv), params.kv_norm, CFG.norm_eps), at, freqs)
        if count == 1:
            handle = handle.write_swa(kv)
        window = handle.window() if count == 1 else handle.window(kv)
        latent = rms_norm(wide_product(x, params.q_a), params.q_norm, CFG.norm_eps)
        q = wide_product(latent, params.q_b).reshape(1, count, CFG.num_heads, CFG.head_dim)
        q = attention.attention_queries(q, at, freqs, cache.plan)
        out = d4.pieces.decode_attention(q, at, params.sinks, window, handle.entries, kind="hca", backend="xla")
        groups = out.reshape(1, count, CFG.o_groups, -1)
        o_a = params.o_a.reshape(CFG.o_groups, CFG.o_lora_rank, -1)
        y = wide_product(
            jnp.einsum("btgi,goi->btgo", groups, o_a, precision="highest").reshape(1, count, -1), params.o_b
        )
        handle = handle if count == 1 else handle.write_swa(kv)
        return y, jnp.sum(handle.gather_swa()[0]) + jnp.sum(handle.gather_all_compressed())

    def in_layer(x):
        return d4.attention_layer(params, x, cache, layer, slots, ids(count), backend="xla")[0]

    def pulled_back(x):
        """The gradients of both, and of what the handle has gathered."""
        _, pull = jax.vjp(lambda x: (weighted(on_handle(x)[0][0]), on_handle(x)[1], weighted(in_layer(x)[0])), x)
        return [pull(tuple(jnp.float32(i == j) for j in range(3)))[0] for i in range(3)]

    found, gathered, wanted = jit(pulled_back)(x)
    assert relative_errors(found, wanted)[""] < SAME
    assert all(np.abs(gathered[0, t]).max() > 1e-3 for t in range(max(0, count - CFG.sliding_window), count))


@pytest.mark.slow
def test_reverse_mode_passes_the_loop_over_a_long_context(monkeypatch):
    """Tiles of one block each, in place of one tile: the same sums and the same gradient, past the visible ones too."""
    cache, slots = admitted(F32)
    _, cache = d4.attention_layer(random_params()[2], tokens()[None], cache, 2, slots, ids(LENGTH), backend="xla")
    handle = d4.acquire(d4.advance(cache, slots, ids(LENGTH)), 2, slots, ids(0))
    queries = jnp.asarray(sequence(1, 8, CFG.head_dim)).reshape(1, 2, 4, -1)
    visible = ids(2, 3)[None]
    assert handle.entries.max_entries > 3

    def loss(queries, entries):
        layer = dataclasses.replace(handle.entries, pool=dataclasses.replace(handle.entries.pool, entries=entries))
        start = attention.start_at_sinks(jnp.zeros(4), queries)
        return jnp.sum(attention.attend_all(start, queries, layer, visible).output ** 2)

    arguments = queries, handle.entries.pool.entries
    wanted = jax.value_and_grad(loss, (0, 1))(*arguments)
    monkeypatch.setattr(pool, "TILE_BYTES", 1)
    assert handle.entries.tile_size(1) == 1
    found = jax.value_and_grad(loss, (0, 1))(*arguments)
    assert max(relative_errors(found, wanted).values()) < SAME


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["swa", "csa", "hca"])
def test_simulated_kernels_refuse_to_be_differentiated(layer):
    cfg = d4.DSV4Config(
        hidden_size=64, q_lora_rank=32, o_lora_rank=8, compress_ratios=(0, 4, 128)
    )  # as kernels take it
    plan = d4.plan_cache(cfg, max_requests=1, max_context=4096)
    params = param_shapes(cfg, d4.config.layer_schedule(cfg)[layer].attn)
    row, x = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, 4, cfg.hidden_size), jnp.float32)

    def loss(x, params, cache, slots, num_new):
        y, _ = d4.attention_layer(params, x, cache, layer, slots, num_new, backend="pallas_simulated")
        return jnp.sum(y)

    arguments = params, d4.cache.abstract_cache(plan), row, row
    assert jax.eval_shape(loss, x, *arguments).shape == ()
    message = r"backend='pallas_simulated' cannot serve a derivative of \w+: kernels have none.*backend='xla'"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.grad(loss), x, *arguments)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x, *rest: jax.jvp(lambda x: loss(x, *rest), (x,), (x,)), x, *arguments)


@pytest.mark.parametrize("backend", ["pallas", "pallas_simulated"])
def test_every_kernel_refuses_by_its_backends_name(backend):
    """Asked of the implementations, which no GPU is needed for: the error comes before the kernel."""
    cache, slots = admitted(F32)
    plan, one, at = cache.plan, ids(1), ids(0)[:, None]
    handle = d4.acquire(cache, 1, slots, one)
    csa, layer = cache.csa, handle.entries
    rows, keys = jnp.ones((1, 1, CFG.head_dim)), jnp.ones((1, 1, CFG.indexer_head_dim))
    freqs, update = rope_frequencies(CFG, d4.AttentionType.CSA), CACHE_UPDATE[backend]

    def pooled(entries):
        return dataclasses.replace(layer, pool=dataclasses.replace(layer.pool, entries=entries))

    def flush(rows):
        new = NewEntries(
            entries=rows, keys=keys, block_table=cache.tables.block_table, slots=slots, first=at[:, 0], count=one
        )
        return update.flush_entries(csa.pool, 0, new, plan)

    def with_tail(tail):
        return dataclasses.replace(csa.state, tail=tail)

    entries, tail, complete = csa.pool.entries, csa.state.tail, jnp.ones(1, jnp.bool)
    calls: dict[str, list[tuple[Any, Any]]] = {
        "cache_update": [
            (lambda kv: update.append_swa(cache.swa.state, 0, kv, handle._call.batch, plan), rows),
            (flush, rows),
            (lambda tail: update.rotate_csa(with_tail(tail), 0, slots, complete), tail),
            (lambda tail: update.reset_hca(with_tail(tail), 0, slots, complete), tail),
        ],
        "gather_rows": [
            (lambda entries: GATHER_ROWS[backend].picked(pooled(entries), at, jnp.float32), entries),
            (lambda entries: GATHER_ROWS[backend].complete(pooled(entries), one, jnp.float32), entries),
        ],
        "indexer_scores": [(lambda q: INDEXER_SCORES[backend].queries(q, at, freqs, plan), keys[:, :, None])],
        "decode_attention": [(lambda q: DECODE_ATTENTION[backend].queries(q, at, freqs, plan, None), rows[:, :, None])],
    }
    for op, some in calls.items():
        for call, x in some:
            with pytest.raises(ValueError, match=f"backend='{backend}' cannot serve a derivative of {op}: "):
                jax.jvp(call, (x,), (x,))
