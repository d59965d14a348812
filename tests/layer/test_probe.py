"""What a probe captures in a layer, what it patches and chooses there, and the weights that heads give to keys."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.kinds import AttentionType
from dsv4jax.layer.call import Given, RunOptions
from dsv4jax.layer.layer import run_layer
from dsv4jax.layer.ops import DECODE_ATTENTION
from dsv4jax.layer.reference import reference_layer
from dsv4jax.layer.stages.probe import Probe
from dsv4jax.layer.stages.weights import attention_weights
from dsv4jax.rope import rope_frequencies
from tests.support.cases import first_of
from tests.support.driver import CFG, CSA_FIRST, F32, THREE_FORMATS, ids, random_params, small_plan

TOLERANCE = 2e-5  # f32 sums in another order
KINDS = {0: "swa", 1: "csa", 2: "hca"}
FIRST, LENGTH = 33, 75  # tokens of the first call, and in all; more entries than the indexer picks
SITES = ("entries", "picks", "attention")
each_layer = pytest.mark.parametrize("layer", first_of(CSA_FIRST), ids=KINDS.get)


@functools.cache
def inputs() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((LENGTH, CFG.hidden_size), np.float32)


@functools.partial(jax.jit, static_argnames="layer")
def call(params, x, cache, slots, num_new, probe, *, layer):
    kind, index = cache.locate(layer)
    cache, _ = d4.prepare_forward(cache, slots, num_new)
    given = Given(x=x, slots=slots, num_new=num_new)
    y, after, _, seen = run_layer(params, given, cache, kind, index, RunOptions(backend="xla"), probe)
    return y, cache, d4.advance(after, slots, num_new), seen


def run(layer, probe, *, splits=(FIRST, LENGTH - FIRST), formats=F32) -> Any:
    """Run a layer, with the probe in the last call. Returns (y, the cache before that call and after it, seen).

    The last split is the longest: calls before it have padding, so that they are one program.
    """
    cache, slots, _ = d4.admit(d4.init_cache(small_plan(**formats)), 1)
    done, params, before, y, seen = 0, random_params()[layer], cache, jnp.zeros(()), {}
    for i, count in enumerate(splits):
        x = np.zeros((1, splits[-1], CFG.hidden_size), np.float32)
        x[0, :count] = inputs()[done : done + count]
        given = probe if i + 1 == len(splits) else Probe()
        y, before, cache, seen = call(params, x, cache, slots, ids(count), given, layer=layer)
        done += count
    return y, before, cache, seen


def patched(**patches) -> Probe:
    return Probe(patches=tuple(patches.items()), layer=0)


def turned(x: np.ndarray, positions: np.ndarray, layer: int, sign: int) -> np.ndarray:
    """Rotate the last dims of x [n, H, dim], pair by pair."""
    freqs = rope_frequencies(CFG, AttentionType(KINDS[layer]))
    pairs = x[..., -CFG.rope_dim :].astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    spun = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * sign * positions[:, None, None] * freqs)
    rope = np.stack([spun.real, spun.imag], -1).reshape(*x.shape[:-1], -1)
    return np.concatenate([x[..., : -CFG.rope_dim].astype(np.float64), rope], -1)


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + CFG.norm_eps)


def weights_by_hand(layer: int, keys: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights f64 [T, H, K] of keys [K, dim] where mask bool [T, K] is set, and those of the sinks [T, H]."""
    params, x = random_params()[layer], inputs().astype(np.float64)
    wide = functools.partial(np.asarray, dtype=np.float64)
    latent = normed(x @ wide(params.q_a).T) * wide(params.q_norm)
    q = normed((latent @ wide(params.q_b).T).reshape(LENGTH, CFG.num_heads, CFG.head_dim))
    q = turned(q, np.arange(LENGTH), layer, 1)
    logits = np.einsum("thd,kd->thk", q, keys) * CFG.head_dim**-0.5
    shares = np.where(mask[:, None], np.exp(logits), 0)
    sinks = np.broadcast_to(np.exp(wide(params.sinks)), shares.shape[:2])
    total = shares.sum(-1) + sinks
    return shares / total[..., None], sinks / total


@functools.cache
def reference(layer: int, formats: str = "f32"):
    options = THREE_FORMATS[formats]
    return reference_layer(
        random_params()[layer], jnp.asarray(inputs()), CFG, layer, options["kv_format"], options["indexer_format"]
    )


def read_by(layer: int, formats: str = "f32") -> tuple[np.ndarray, np.ndarray]:
    """The keys of a whole sequence, rows and then entries, and which of them each token reads."""
    wanted, at = reference(layer, formats), np.arange(LENGTH)
    mask, keys = (at[:, None] >= at) & (at[:, None] - at < CFG.sliding_window), np.asarray(wanted.rows)
    if wanted.entries is not None and wanted.seen is not None:
        keys = np.concatenate([keys, wanted.entries])
        mask = np.concatenate([mask, wanted.seen], 1)
    return keys.astype(np.float64), mask


@pytest.mark.slow
@pytest.mark.parametrize("formats", first_of(["f32", "fp8_tile64, mxfp4, online"]))
@each_layer
def test_weights_of_keys_equal_those_by_hand(layer, formats):
    _, before, _, _ = run(layer, Probe(), formats=THREE_FORMATS[formats])
    x = jnp.full((1, LENGTH - FIRST + 3, CFG.hidden_size), jnp.nan).at[0, :-3].set(inputs()[FIRST:])
    asked = [0, 41, 17, -1, 43, 5]  # in any order; the fourth is none, the fifth past num_new
    count = ids(LENGTH - FIRST)
    found = attention_weights(random_params()[layer], x, before, layer, ids(0), count, ids(*asked)[None])
    shares, sinks = weights_by_hand(layer, *read_by(layer, formats))
    # Rounded keys: a query of the indexer may round to a neighbour, and so may an entry; none does here.
    for i, token in enumerate(asked):
        if not 0 <= token < LENGTH - FIRST:
            assert not np.any(found.window[0, i])
            assert not np.any(found.sink[0, i])
            continue
        at, dense = token + FIRST, np.zeros((CFG.num_heads, shares.shape[-1]))
        dense[:, found.window_positions[0, i]] += np.where(found.window_positions[0, i] >= 0, found.window[0, i], 0)
        assert found.window_positions[0, i, -1] == at
        if found.entries is not None:
            number = np.asarray(found.entry_numbers[0, i])
            dense[:, LENGTH + number[number >= 0]] += found.entries[0, i][:, number >= 0]
            assert not np.any(found.entries[0, i][:, number < 0])
            first = np.asarray(found.entry_positions[0, i])
            np.testing.assert_array_equal(
                first, np.where(number < 0, -1, number * CFG.ratio(AttentionType(KINDS[layer])))
            )
        np.testing.assert_allclose(dense, shares[at], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found.sink[0, i], sinks[at], rtol=0, atol=TOLERANCE)


def test_weights_are_nan_where_the_cache_is_not_that_before_the_call_and_for_tokens_that_are_none_of_it():
    x, count, params = jnp.asarray(inputs()[None, :3]), ids(2), random_params()[0]
    empty, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
    before, _ = d4.prepare_forward(empty, slots, count)
    _, after = d4.attention_layer(params, x, before, 0, slots, count, backend="xla")
    asked, nan = ids(0, 1, 2, -1, 3, -2)[None], np.nan  # the third is padding, the fourth none
    wanted = {
        "before": (before, [1, 1, 0, 0, nan, nan]),
        "after": (after, [nan, nan, 0, 0, nan, nan]),
        "counted": (d4.advance(after, slots, count), [nan, nan, 0, 0, nan, nan]),
        "not granted": (empty, [nan, nan, 0, 0, nan, nan]),
    }
    for name, (cache, totals) in wanted.items():
        found = attention_weights(params, x, cache, 0, slots, count, asked)
        total = np.asarray(found.window).sum(-1) + np.asarray(found.sink)
        np.testing.assert_allclose(total[0], np.asarray(totals)[:, None] + np.zeros(4), atol=TOLERANCE, err_msg=name)


@each_layer
def test_what_is_captured_is_what_the_layer_without_a_cache_computes(layer):
    y, _, _, seen = run(layer, Probe(captures=frozenset(SITES)))
    wanted, (keys, mask) = reference(layer), read_by(layer)
    np.testing.assert_allclose(y[0], wanted.out[FIRST:], rtol=0, atol=TOLERANCE)
    assert set(seen) == {"attention"} | ({"entries"} if layer else set()) | ({"picks"} if layer == 1 else set())
    if wanted.entries is not None:
        number = np.asarray(seen["entries"].number[0])
        ratio = CFG.ratio(AttentionType(KINDS[layer]))
        assert number[number >= 0].tolist() == list(range(FIRST // ratio, LENGTH // ratio))
        np.testing.assert_allclose(
            seen["entries"].rows[0][number >= 0], wanted.entries[number[number >= 0]], rtol=0, atol=TOLERANCE
        )
    if layer == 1 and wanted.seen is not None:
        for picks, read in zip(np.asarray(seen["picks"][0]), wanted.seen[FIRST:], strict=True):
            assert picks[picks >= 0].tolist() == np.flatnonzero(read).tolist()
    shares, _ = weights_by_hand(layer, keys, mask)
    heads = turned(np.einsum("thk,kd->thd", shares, keys), np.arange(LENGTH), layer, -1)
    np.testing.assert_allclose(seen["attention"][0], heads[FIRST:], rtol=0, atol=TOLERANCE)


@pytest.mark.two_programs
@pytest.mark.parametrize(("layer", "formats"), first_of([(2, "f32"), (1, "fp8_tile64, mxfp4, online")], count=0))
def test_captures_and_patches_that_change_nothing_give_the_same_bits(layer, formats):
    options = THREE_FORMATS[formats]
    plain = run(layer, Probe(), formats=options)
    same = patched(**{site: lambda value, layer: value for site in SITES})
    for probe in (Probe(captures=frozenset(SITES)), same):
        found = run(layer, probe, formats=options)
        jax.tree.map(np.testing.assert_array_equal, found[:3], plain[:3])


@pytest.mark.slow
@pytest.mark.parametrize("formats", first_of(THREE_FORMATS))
def test_a_patch_of_entries_is_stored_and_read(formats):
    """The second entry that the call completes becomes another; its neighbours keep their bytes."""
    options = THREE_FORMATS[formats]

    def other(entries, layer):
        assert layer == 0
        return dataclasses.replace(entries, rows=entries.rows.at[:, 1].set(0.25))

    y, _, after, _ = run(1, patched(entries=other), formats=options)
    plain_y, _, plain, _ = run(1, Probe(), formats=options)
    number = FIRST // CFG.ratio(AttentionType.CSA) + 1
    pools = [
        d4.pieces.gather_all_compressed(
            cache.csa.pool, 0, cache.tables.block_table, ids(0), ids(LENGTH // 4), plan=cache.plan
        )[0]
        for cache in (after, plain)
    ]
    np.testing.assert_array_equal(pools[0][number], 0.25)  # which all formats hold exactly
    others = np.arange(len(pools[0])) != number
    np.testing.assert_array_equal(pools[0][others], pools[1][others])
    token = number * 4 + 3 - FIRST  # the first that sees it
    np.testing.assert_array_equal(y[:, :token], plain_y[:, :token])
    assert np.any(y[:, token:] != plain_y[:, token:])


@pytest.mark.sweep(guard="test_patches_of_heads_and_picks_are_given_all_tokens_and_change_what_follows")
def test_chosen_entries_are_read_in_place_of_those_that_the_indexer_picks():
    """Others than it would pick; some of them twice, not yet complete, or no entries at all."""
    rng = np.random.default_rng(3)
    chosen = rng.integers(-2, LENGTH // 4 + 3, (1, LENGTH - FIRST, 9)).astype(np.int8)
    y, before, _, seen = run(1, Probe(captures=frozenset(("picks", "attention")), entries=jnp.asarray(chosen)))
    keys, mask = read_by(1)
    visible = (np.arange(LENGTH)[:, None] + 1) // 4 > np.arange(LENGTH // 4)
    mask[FIRST:, LENGTH:] = [np.isin(np.arange(LENGTH // 4), row) for row in chosen[0]]
    mask[:, LENGTH:] &= visible
    shares, _ = weights_by_hand(1, keys, mask)
    heads = turned(np.einsum("thk,kd->thd", shares, keys), np.arange(LENGTH), 1, -1)
    np.testing.assert_allclose(seen["attention"][0], heads[FIRST:], rtol=0, atol=TOLERANCE)
    again = run(1, Probe(entries=seen["picks"]))
    np.testing.assert_array_equal(again[0], y)

    x, count = jnp.asarray(inputs()[None, FIRST:]), ids(LENGTH - FIRST)
    found = attention_weights(
        random_params()[1], x, before, 1, ids(0), count, jnp.arange(LENGTH - FIRST)[None], jnp.asarray(chosen)
    )
    for i, number in enumerate(np.asarray(found.entry_numbers[0])):
        np.testing.assert_allclose(
            found.entries[0, i][:, number >= 0],
            shares[FIRST + i][:, LENGTH + number[number >= 0]],
            rtol=0,
            atol=TOLERANCE,
        )


@pytest.mark.slow
def test_a_layer_without_a_cache_reads_chosen_entries_too():
    rng = np.random.default_rng(3)
    chosen = jnp.asarray(rng.integers(-2, LENGTH // 4 + 3, (1, LENGTH, 9)), jnp.int16)
    x = jnp.asarray(inputs()[None])
    y, *_ = run(1, Probe(entries=chosen), splits=(LENGTH,))
    found = d4.attention(random_params()[1], x, CFG, 1, picks=chosen)
    np.testing.assert_allclose(found, y, rtol=0, atol=TOLERANCE)
    assert not np.allclose(found, d4.attention(random_params()[1], x, CFG, 1), rtol=0, atol=0.01)
    with pytest.raises(ValueError, match="picks are for layers with an indexer, layer 2 is HCA"):
        d4.attention(random_params()[2], x, CFG, 2, picks=chosen)


def test_patches_of_heads_and_picks_are_given_all_tokens_and_change_what_follows():
    shapes = {}

    def no_head(value, layer):
        shapes["attention"] = value.shape
        return value.at[:, :, 2].set(0.0)

    def none(value, layer):
        shapes["picks"] = value.shape
        return jnp.full_like(value, -1)

    y, _, _, seen = run(1, dataclasses.replace(patched(attention=no_head, picks=none), captures=frozenset(SITES)))
    assert shapes == {"attention": (1, LENGTH - FIRST, 4, 136), "picks": (1, LENGTH - FIRST, 12)}
    assert not np.any(seen["attention"][:, :, 2])
    assert np.all(seen["picks"] == -1)
    keys, mask = read_by(1)
    mask[:, LENGTH:] = False
    shares, _ = weights_by_hand(1, keys, mask)
    heads = turned(np.einsum("thk,kd->thd", shares, keys), np.arange(LENGTH), 1, -1)[FIRST:]
    np.testing.assert_allclose(seen["attention"][0][:, [0, 1, 3]], heads[:, [0, 1, 3]], rtol=0, atol=TOLERANCE)
    heads[:, 2] = 0
    params = random_params()[1]
    groups = heads.reshape(len(heads), CFG.o_groups, -1)
    o_a = np.asarray(params.o_a, np.float64).reshape(CFG.o_groups, CFG.o_lora_rank, -1)
    wanted = np.einsum("tgi,goi->tgo", groups, o_a).reshape(len(heads), -1) @ np.asarray(params.o_b, np.float64).T
    np.testing.assert_allclose(y[0], wanted, rtol=0, atol=TOLERANCE)


def test_what_cannot_be_done_is_named():
    with pytest.raises(
        ValueError, match=r"intervene\['picks'\], of layer 0: expected a value like the one it is given"
    ):
        run(1, patched(picks=lambda value, layer: value[..., 1:]))
    with pytest.raises(AssertionError, match=r"chosen entries: expected int32 or int16 or int8 \[B=1, T=75, K\], got"):
        run(1, Probe(entries=jnp.zeros((1, 2, 3), jnp.int32)), splits=(LENGTH,))
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), 1)
    x, capture = jnp.zeros((1, 0, CFG.hidden_size)), Probe(captures=frozenset(SITES))
    given = Given(x=x, slots=slots, num_new=ids(0))
    with pytest.raises(ValueError, match=r"must have rows and tokens, got x of shape \(1, 0, 64\)"):
        run_layer(random_params()[1], given, cache, AttentionType.CSA, 0, RunOptions(), capture)
    x = jnp.zeros((1, 1, CFG.hidden_size))
    with pytest.raises(ValueError, match="picks are for layers with an indexer, layer 0 is SWA"):
        attention_weights(random_params()[0], x, cache, 0, slots, ids(1), ids(0)[None], jnp.zeros((1, 1, 1), jnp.int32))


@pytest.mark.sweep(guard="test_a_patch_of_entries_is_stored_and_read")
def test_captures_of_tiles_are_those_of_all_tokens(monkeypatch):
    capture = Probe(captures=frozenset(SITES))
    _, _, _, whole = run(1, capture)
    monkeypatch.setattr(type(DECODE_ATTENTION["xla"]), "tile_bytes", 1 << 18)
    jax.clear_caches()
    _, _, _, parts = run(1, capture)
    jax.clear_caches()
    np.testing.assert_array_equal(parts["picks"], whole["picks"])
    np.testing.assert_allclose(parts["attention"], whole["attention"], rtol=0, atol=TOLERANCE)
