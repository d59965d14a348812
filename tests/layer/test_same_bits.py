"""What a layer gives a request and stores of it is the same bit for bit in any batch, if the cache asks for that."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels.products.plan as plans
from dsv4jax.layer import tiles
from dsv4jax.layer.backend import backends
from dsv4jax.layer.invariant import products
from dsv4jax.layer.kernels.base import ON_SIMULATOR
from dsv4jax.layer.kernels.cache import CacheUpdateKernels
from dsv4jax.layer.ops import CACHE_UPDATE, choose_backends
from pallas_kernels.formats import KEY_FORMATS, KV_FORMATS
from pallas_kernels.language import target
from pallas_kernels.update.batch import Call
from pallas_kernels.update.hca import HCAOnlineUpdate, HCARingUpdate
from tests.support.cases import first_of
from tests.support.driver import BF16_TAILS, CFG, CONTEXT, F32, TRAINED, ids, random_params, sequence
from tests.support.same_bits import Pass, alone, compare, differ_from_alone, different_bits, feed, run_layers

LENGTHS = (37, 20, 5, 48, 33)  # several blocks of all kinds
CSA = d4.DSV4Config.tiny(compress_ratios=(4,))


def differing(cfg: d4.DSV4Config, options: dict[str, Any], batches: list[tuple[int, int]], **more: Any):
    plan = d4.plan_cache(cfg, max_requests=6, max_context=CONTEXT, invariant=True, **options)
    # Each token alone costs a pass of all rows.
    inputs = [sequence(i, n, cfg.hidden_size) for i, n in enumerate(LENGTHS if batches[0][0] < 256 else (20, 17))]
    return compare(run_layers(random_params(cfg), "xla"), plan, inputs, batches, **more)


@pytest.mark.slow
def test_a_request_gets_the_same_bits_in_a_batch():
    assert not differing(CSA, TRAINED, [(5, 8)], drafts=False)


@pytest.mark.sweep(guard="test_a_request_gets_the_same_bits_in_a_batch")
@pytest.mark.parametrize(
    ("options", "batch", "drafts"),
    first_of(
        [
            pytest.param(TRAINED, (5, 8), True, id="fp8_tile64, mxfp4, online"),
            pytest.param(BF16_TAILS, (256, 1), False, id="fp8_row, nvfp4, bf16 tails"),
            pytest.param(F32, (2, 37), False, id="f32"),
        ],
        count=0,
    ),
)
def test_a_request_gets_the_same_bits_in_any_batch(options, batch, drafts):
    assert not differing(CFG, options, [batch], drafts=drafts)


SIMULATED = "pallas_simulated"


@pytest.mark.sweep(guard="test_a_row_has_the_same_bits_in_any_call")
@pytest.mark.simulated
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param({"decode_attention": SIMULATED}, id="attention"),
        pytest.param({"indexer_scores": SIMULATED, "top_k": SIMULATED}, id="selection"),
    ],
)
def test_kernels_that_have_an_invariant_form(chosen):
    """With heads and blocks as theirs. Attention would divide the keys of 30 queries among blocks, and not of 90."""
    cfg = d4.DSV4Config.tiny(num_heads=64, head_dim=512, rope_dim=64, indexer_heads=64, compress_ratios=(4,))
    others: dict[str, str] = dict.fromkeys(backends(), "xla")
    backend = d4.OpBackends(**(others | chosen))
    plan = d4.plan_cache(cfg, max_requests=3, max_context=256, invariant=True, **TRAINED)
    run, inputs = run_layers(random_params(cfg), backend), [sequence(i, 61, cfg.hidden_size) for i in range(2)]
    single = feed(run, plan, inputs, [Pass(rows=((0, 30),), width=30)] * 2 + alone(0, 1), 0)
    together = [Pass(rows=((1, 9), None, (0, 30)), width=30)] * 2 + [Pass(rows=((1, 1), None, (0, 1)), width=1)]
    assert not different_bits(feed(run, plan, inputs, together, 1)[0], single[0])


# As products and updates have kernels for. Attention is in plain JAX, which takes fewer heads.
SERVED = d4.DSV4Config.tiny(
    hidden_size=256,
    q_lora_rank=128,
    num_heads=2,
    head_dim=128,
    rope_dim=64,
    o_groups=2,
    o_lora_rank=128,
    indexer_heads=64,
    indexer_head_dim=64,
    compress_ratios=(0, 4, 16),
    hca_compression_ratio=16,
)


def bf16(seed: int, length: int, width: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(jnp.asarray(sequence(seed, length, width), jnp.bfloat16))


def stored(cfg: d4.DSV4Config) -> list[Any]:
    """Random weights of all layers, in FP8 and bf16."""
    make = functools.partial(d4.init_attention_params, cfg=cfg, dtype=jnp.bfloat16, weights="stored")
    return [make(jax.random.key(layer), layer=layer) for layer in range(cfg.num_layers)]


def of_kernels(options: dict[str, Any]) -> dict[str, int]:
    """Which bits differ between one token after the other, and 90 rows of chunks, a draft, and few rows of chunks."""
    named: dict[str, Any] = dict.fromkeys(backends(), "xla") | dict(projections=SIMULATED, cache_update=SIMULATED)
    plan = d4.plan_cache(SERVED, max_requests=4, max_context=CONTEXT, invariant=True, **options)
    inputs = [bf16(i, n, SERVED.hidden_size) for i, n in enumerate((21, 18))]
    run = run_layers(stored(SERVED), d4.OpBackends(**named))
    together = [
        Pass(rows=((1, 13), None, (0, 10)), width=30),
        Pass(rows=((0, 3), (1, 1)), width=5, is_draft=True),
        Pass(rows=(None, (0, 8), (1, 4)), width=8),
    ]
    return differ_from_alone(run, plan, inputs, together)


@pytest.mark.sweep(guard="test_a_row_has_the_same_bits_in_any_call")
@pytest.mark.simulated
@pytest.mark.parametrize(
    "options",
    [pytest.param(TRAINED, id="fp8_tile64, online"), pytest.param(BF16_TAILS, id="fp8_row, ring, bf16 tails")],
)
def test_kernels_of_products_and_of_the_update(options):
    assert not of_kernels(options)


@pytest.mark.sweep(guard="test_the_check_sees_what_depends_on_the_batch")
@pytest.mark.simulated
def test_the_check_sees_an_update_whose_order_depends_on_the_call(monkeypatch):
    """The tokens of a chunk are then added four at a time to the running softmax of an entry."""
    monkeypatch.setitem(CACHE_UPDATE._invariant, SIMULATED, CacheUpdateKernels(ON_SIMULATOR))
    jax.clear_caches()  # of layers that were traced before
    found = of_kernels(TRAINED)
    jax.clear_caches()
    assert any("hca state" in where for where in found), found


@pytest.mark.sweep(guard="test_a_row_has_the_same_bits_in_any_call")
@pytest.mark.simulated
def test_all_kernels_of_a_layer_at_once(monkeypatch):
    """With heads as those of V4: queries are made in a launch of their products, of any number of rows.

    The 90 rows of chunks are as many as those of longer ones to the compressors, and to the products that end a layer.
    """
    many = dataclasses.replace(plans._INVARIANT, many_rows_in_order=65)
    monkeypatch.setattr(plans, "_INVARIANT", many)
    tilings = mock.Mock(wraps=plans.fastest_tiling_in_order)
    monkeypatch.setattr(plans, "fastest_tiling_in_order", tilings)
    cfg = d4.DSV4Config.tiny(
        hidden_size=128,
        q_lora_rank=128,
        num_heads=64,
        head_dim=512,
        rope_dim=64,
        o_groups=2,
        o_lora_rank=128,
        indexer_heads=64,
        indexer_head_dim=128,
        compress_ratios=(4,),
    )
    plan = d4.plan_cache(cfg, max_requests=3, max_context=256, invariant=True, **TRAINED)
    run, inputs = run_layers(stored(cfg), SIMULATED), [bf16(i, 34, cfg.hidden_size) for i in range(2)]
    single = feed(run, plan, inputs, [Pass(rows=((0, 30),), width=30), *alone(0, 3)], 0)
    together = [
        Pass(rows=((1, 9), None, (0, 30)), width=30),
        Pass(rows=((1, 1), None, (0, 1)), width=1),
        Pass(rows=((1, 1), (0, 2)), width=3, is_draft=True),
    ]
    assert not different_bits(feed(run, plan, inputs, together, 1)[0], single[0])
    assert {call.args[0] for call in tilings.call_args_list} == {90}
    assert {call.args[1].block is None for call in tilings.call_args_list} == {True, False}  # compressors, and o_b


@pytest.mark.parametrize("tail", [HCARingUpdate, HCAOnlineUpdate])
def test_how_an_entry_is_divided_does_not_depend_on_the_call(tail):
    """Among warpgroups, whose sums are merged. Otherwise it depends on the requests, or on their tokens."""

    def parts(requests: int, tokens: int, *, in_order: bool) -> int:
        call = Call(
            requests=requests,
            num_tokens=tokens,
            ratio=128,
            kv_format=KV_FORMATS["fp8_tile64"],
            key_format=KEY_FORMATS["mxfp4"],
            eps=1e-6,
            keep_tails=False,
            in_order=in_order,
        )
        return tail.split(call).parts

    calls = [(1, 1), (65, 1), (1, 2), (3, 30), (1, 4096)]
    assert len({parts(*call, in_order=True) for call in calls}) == 1
    assert len({parts(*call, in_order=False) for call in calls}) > 1


@pytest.mark.sweep(guard="test_a_request_gets_the_same_bits_in_a_batch")
@pytest.mark.two_programs
@pytest.mark.optimized
def test_also_where_xla_optimizes_all_that_it_can():
    assert not differing(CFG, TRAINED, [(5, 8)], drafts=False)


def test_the_check_sees_what_depends_on_the_batch(monkeypatch):
    """With products whose tiles have as many rows as there are: XLA multiplies one row in another way than several."""

    def of_all(function, inputs, size, axes):
        del size, axes
        return function(inputs)

    monkeypatch.setattr(products, "map_rows", of_all)
    with jax.ensure_compile_time_eval():
        rng = np.random.default_rng(0)
        x, weight = (jnp.asarray(rng.standard_normal((n, 256)), jnp.float32) for n in (64, 96))
    whole = products.InvariantProjections().linear(x, weight)
    parts = jnp.concatenate([products.InvariantProjections().linear(row[None], weight) for row in x])
    assert different_bits(parts, whole)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-3)  # sums of 256 products of about 1, in another order


def test_the_check_sees_a_bit_of_a_neighbour():
    """In an output, and in what is stored; each alone is found equal to itself."""
    plan = d4.plan_cache(d4.DSV4Config.tiny(compress_ratios=(0,)), max_requests=3, max_context=16, **F32)

    def run(x, cache, slots, fed, kept):
        del kept
        cache, _ = d4.prepare_forward(cache, slots, fed)
        y = np.array(x)
        if len(x) > 1:
            y.view(np.uint8)[..., 0] ^= 1
        return y, d4.advance(cache, slots, fed)

    inputs = [sequence(i, 3, 4) for i in range(2)]
    both = [Pass(rows=((1, 1), None, (0, 1)), width=2)] * 3
    single = {i: feed(run, plan, inputs, alone(i, 3), i)[i] for i in range(2)}
    together = feed(run, plan, inputs, both, 7)
    for i in range(2):
        assert not different_bits(feed(run, plan, inputs, alone(i, 3), 9)[i], single[i])
        assert different_bits(together[i], single[i]) == {"[0]": 3}


def test_rows_of_tiles_and_tokens_alone_are_put_back_in_order():
    x = jnp.arange(2 * 5 * 3, dtype=jnp.float32).reshape(10, 3)
    np.testing.assert_array_equal(tiles.map_rows(lambda tile: 2 * tile + tile.shape[0], x, 4), 2 * x + 4)
    of_tokens = x.reshape(2, 5, 3)
    made = tiles.map_alone(lambda token, request: token + request[:, None], of_tokens, of_tokens[:, 0])
    np.testing.assert_array_equal(made, of_tokens + of_tokens[:, :1])


def small(*, invariant: bool = True) -> d4.CachePlan:
    return d4.plan_cache(CSA, max_requests=1, max_context=16, invariant=invariant, **F32)


def test_what_is_not_invariant_is_refused_by_name(monkeypatch):
    cache, slots, _ = d4.admit(d4.init_cache(small()), 1)
    params, x = random_params(CSA)[0], jnp.ones((1, 1, CSA.hidden_size))
    with pytest.raises(ValueError, match=r"cannot serve cache_update: what it gives a request depends on the batch"):
        d4.attention_layer(params, x, cache, 0, slots, ids(1), backend="triton")
    blackwell = target.BLACKWELL
    with monkeypatch.context() as patch:
        patch.setattr(target, "gpu_or_first", lambda: blackwell)
        unchecked = r"cannot serve projections: the order of sums was not checked for kernels of sm100"
        with pytest.raises(ValueError, match=unchecked):
            d4.attention_layer(params, x, cache, 0, slots, ids(1), backend=d4.OpBackends(projections=SIMULATED))
        with pytest.raises(ValueError, match=unchecked):
            d4.linear(x, params.q_a_kv, backend=d4.OpBackends(projections=SIMULATED, invariant=True))

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(d4.attention_layer(params, x, cache, 0, slots, ids(1))[0])

    with pytest.raises(ValueError, match="invariant=True has no derivative"):
        jax.grad(loss)(x)
    chosen = choose_backends("xla", small(), d4.AttentionType.CSA)
    assert chosen == d4.OpBackends(
        projections="xla", cache_update="xla", indexer_scores="xla", top_k="xla", decode_attention="xla", invariant=True
    )


def test_the_plan_says_so():
    assert ", invariant" in str(small())
    assert small() != small(invariant=False)
