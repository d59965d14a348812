"""What the host decides on: arguments that are static, values read on the host, and caches whose leaves are NumPy's."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.checks import real
from tests.support.driver import CFG, LAYERS, assert_same, ids, random_params, sequence, small_plan

BATCH, TOKENS = 2, 3
numpy: Any = np  # whose integers the type checker does not take for an int


@functools.cache
def filled() -> tuple[Any, jax.Array]:
    """(cache with two requests of a few tokens, their slots)."""
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), BATCH)
    cache, ok = d4.prepare_forward(cache, slots, ids(5, 4))
    assert ok
    x = inputs(8)
    for layer in LAYERS:
        _, cache = d4.attention_layer(random_params()[layer], x, cache, layer, slots, ids(5, 4))
    cache, ok = d4.prepare_forward(d4.advance(cache, slots, ids(5, 4)), slots, counts())
    assert ok
    return cache, slots


def inputs(tokens: int = TOKENS) -> jax.Array:
    return jnp.asarray(sequence(1, BATCH * tokens, CFG.hidden_size).reshape(BATCH, tokens, -1))


def counts() -> jax.Array:
    return ids(TOKENS, 1)


# ---- whole numbers of any kind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.asarray], ids=lambda kind: kind.__name__)
def test_a_configuration_takes_whole_numbers_of_any_kind_and_keeps_ints(kind):
    sizes = {field.name: getattr(CFG, field.name) for field in dataclasses.fields(CFG) if field.type == "int"}
    sizes = {name: kind(value) if value < 256 else np.int64(value) for name, value in sizes.items()}
    cfg = dataclasses.replace(CFG, **sizes, compress_ratios=np.asarray(CFG.compress_ratios), norm_eps=np.float64(1e-6))
    assert cfg == CFG
    assert hash(cfg) == hash(CFG)
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        assert type(value) is {"int": int, "float": float}.get(str(field.type), tuple), field.name
    assert {type(ratio) for ratio in cfg.compress_ratios} == {int}


def test_a_plan_keeps_ints_so_that_small_dtypes_do_not_overflow():
    wanted = d4.plan_cache(CFG, max_requests=3, max_context=100, num_blocks=200)
    plan = d4.plan_cache(CFG, max_requests=numpy.uint8(3), max_context=numpy.int8(100), num_blocks=numpy.uint8(200))
    assert plan == wanted
    assert [type(count) for count in (plan.max_requests, plan.max_context, plan.num_blocks)] == [int] * 3
    assert plan.memory_bytes() == wanted.memory_bytes()
    assert d4.porting.compute_block_budget(CFG, numpy.int8(100), numpy.uint8(200)) == d4.porting.compute_block_budget(
        CFG, 100, 200
    )
    assert plan.largest_context(numpy.int64(1 << 20), numpy.uint8(2)) == plan.largest_context(1 << 20, 2)


@pytest.mark.sweep(guard="test_every_call_takes_a_cache_of_numpy_leaves")
def test_layer_numbers_of_numpy_are_kept_as_ints():
    cache, slots = filled()
    handle = d4.acquire(cache, numpy.int64(1), slots, counts())
    assert type(handle.schema.layer_idx) is int
    _, _, staged = d4.stage(random_params()[1], inputs(), cache, numpy.uint8(1), slots, counts())
    assert type(staged.layer) is int
    assert type(d4.porting.build_schema(CFG, numpy.int32(2)).layer_idx) is int


def test_a_number_of_requests_may_be_any_whole_number_that_is_known():
    cache = d4.init_cache(small_plan())
    wanted = d4.admit(cache, BATCH)
    for number in (jnp.int32(BATCH), numpy.int64(BATCH), numpy.array(BATCH)):
        assert_same(d4.admit(cache, any_type(number)), wanted)
    with pytest.raises(ValueError, match="n must be an integer of at least 0 that is known when the call is traced"):
        jax.jit(lambda n: d4.admit(cache, n))(BATCH)


@pytest.mark.parametrize("kind", [jnp.float32, jnp.bfloat16, np.float32, np.asarray], ids=lambda kind: kind.__name__)
def test_a_real_number_may_be_one_of_any_kind_that_is_known(kind):
    found = real("top_p", kind(0.5))
    assert type(found) is float
    assert found == 0.5
    with pytest.raises(ValueError, match=r"top_p must be a number, got .*\[0\.5"):
        real("top_p", jnp.asarray([kind(0.5)]))
    with pytest.raises(ValueError, match="top_p must be a number that is known when the call is traced"):
        jax.jit(lambda value: real("top_p", value))(kind(0.5))


# ---- an error names its argument ------------------------------------------------------------------------------------


def any_type(value: Any) -> Any:
    """A value of the wrong type, which the type checker lets pass."""
    return value


def calls() -> dict[str, tuple[Any, str]]:
    cache, slots = filled()
    plan, x, params, key = cache.plan, inputs(), random_params(), jax.random.key(0)
    handle = d4.acquire(cache, 1, slots, counts())
    csa, entries = params[1], (cache.csa.pool, 0, cache.tables.block_table, slots)
    q, at = jnp.zeros((BATCH, 1, CFG.num_heads, CFG.head_dim)), ids(0, 0)[:, None]
    window = d4.acquire(cache, 0, slots, ids(1, 1)).window(jnp.zeros((BATCH, 1, CFG.head_dim)))
    layer, kinds = "layer must be an integer, got 0.5", "kind must be one of ['swa', 'csa', 'hca'], got 'mla'"
    dtypes = "dtype must be one of ['float32', 'bfloat16'], got"
    return {
        "admit -1": (lambda: d4.admit(cache, -1), "n must be an integer of at least 0, got -1"),
        "admit 1.5": (lambda: d4.admit(cache, any_type(1.5)), "n must be an integer of at least 0, got 1.5"),
        "layer": (lambda: d4.attention_layer(params[0], x, cache, any_type(0.5), slots, counts()), layer),
        "stage": (lambda: d4.stage(params[0], x, cache, any_type(0.5), slots, counts()), layer),
        "acquire": (lambda: d4.acquire(cache, any_type(0.5), slots, counts()), layer),
        "schema": (lambda: d4.porting.build_schema(CFG, any_type(0.5)), layer),
        "init": (lambda: d4.init_attention_params(key, CFG, any_type(0.5)), layer),
        "load": (lambda: d4.load_attention_params({}, CFG, any_type(0.5)), layer),
        "traced layer": (
            lambda: jax.jit(lambda i: d4.acquire(cache, i, slots, counts()).start)(0),
            "layer must be an integer that is known when the call is traced, got a traced value",
        ),
        "kind": (lambda: d4.attention_layer_at(params[0], x, cache, "mla", 0, slots, counts()), kinds),
        "kind of a stack": (lambda: cache.stack("mla"), kinds),
        "kind of a tail": (lambda: cache.tail_len("mla"), kinds),
        "index": (
            lambda: d4.attention_layer_at(params[0], x, cache, "swa", any_type(0.5), slots, counts()),
            "index must be an integer, got 0.5",
        ),
        "model_axis": (
            lambda: d4.attention_layer(params[0], x, cache, 0, slots, counts(), model_axis=any_type(1)),
            "model_axis must be None or the name of a mesh axis, got 1",
        ),
        "positions": (lambda: handle.positions(-1), "num_tokens must be an integer of at least 0, got -1"),
        "compressor": (
            lambda: handle.flush_compression(any_type(None), x, csa.indexer),
            "params: expected the weights of a CSA layer",
        ),
        "dtype of rows": (
            lambda: d4.pieces.gather_compressed(*entries, at, plan=plan, dtype=jnp.int8),
            f"{dtypes} 'int8'",
        ),
        "dtype of all rows": (
            lambda: d4.pieces.gather_all_compressed(*entries, slots, plan=plan, dtype="f4x"),
            f"{dtypes} 'f4x'",
        ),
        "dtype of attention": (
            lambda: d4.pieces.decode_attention(q, at, jnp.zeros(CFG.num_heads), window, kind="swa", dtype=jnp.int32),
            f"{dtypes} 'int32'",
        ),
        "dtype of weights": (lambda: d4.init_attention_params(key, CFG, 0, "half"), f"{dtypes} 'float16'"),
        "naming": (
            lambda: d4.load_attention_params({}, CFG, 0, any_type(["hf"])),
            "naming must be one of ['deepseek', 'hf', 'hf_saved'], got ['hf']",
        ),
        "num_heads": (lambda: d4.DSV4Config.tiny(num_heads="4"), "num_heads must be an integer, got '4'"),
        "norm_eps": (lambda: d4.DSV4Config.tiny(norm_eps=None), "norm_eps must be a number, got None"),
        "ratio": (
            lambda: d4.DSV4Config.tiny(compress_ratios=(0, 4.5)),
            "compress_ratios[1] must be an integer, got 4.5",
        ),
        "ratios": (
            lambda: d4.DSV4Config.tiny(compress_ratios=4),
            "compress_ratios must be integers, one per layer, got 4",
        ),
        "headroom": (lambda: d4.plan_cache(CFG, headroom=any_type("1.1")), "headroom must be a number, got '1.1'"),
        "tail_dtype": (
            lambda: d4.plan_cache(CFG, tail_dtype="f4x"),
            "tail_dtype must be one of ['float32', 'bfloat16'], got 'f4x'",
        ),
        "kv_format": (lambda: d4.plan_cache(CFG, kv_format=any_type(["f32"])), "kv_format must be one of ['f32', "),
        "budget": (
            lambda: d4.porting.compute_block_budget(CFG, -5, 2),
            "max_context must be an integer of at least 0, got -5",
        ),
        "requests": (lambda: plan.largest_context(1 << 30, any_type(1.5)), "max_requests must be an integer, got 1.5"),
    }


@pytest.mark.slow
def test_an_error_names_the_argument_at_fault():
    wrong = {}
    for name, (call, message) in calls().items():
        with pytest.raises(Exception) as error:  # noqa: PT011  which one, and its words, are looked at below
            call()
        if error.type is not ValueError or message not in str(error.value):
            wrong[name] = repr(error.value)[:200]
    assert not wrong


# ---- values read on the host ----------------------------------------------------------------------------------------


def test_calls_that_read_a_cache_on_the_host_say_so_under_jit(tmp_path: Path):
    cache, slots, _ = d4.admit(d4.init_cache(small_plan()), BATCH)  # they must not come to read what it holds
    for name, call in {
        "describe": d4.describe,
        "verify": d4.verify,
        "extract": lambda cache: d4.extract(cache, slots),
        "save": lambda cache: d4.requests.save(tmp_path / "cache", cache),
    }.items():
        if name == "save":
            pytest.importorskip("orbax.checkpoint")
        with pytest.raises(ValueError, match=f"{name} reads values on the host, so it cannot be traced by jit"):
            jax.jit(lambda cache, call=call: call(cache) and 0)(cache)
    assert not list(tmp_path.iterdir())


def test_a_cache_of_which_some_leaves_alone_are_traced_is_refused_too():
    cache = d4.init_cache(small_plan())
    swa = cache.stack("swa")

    def check(windows: Any) -> None:
        state = dataclasses.replace(swa.state, window=windows)
        d4.verify(cache.with_stack("swa", dataclasses.replace(swa, state=state)))

    with pytest.raises(ValueError, match="verify reads values on the host"):
        jax.jit(check)(swa.state.window)


# ---- leaves of NumPy ------------------------------------------------------------------------------------------------


def drive(cache: d4.KVCache, slots: Any, num_new: Any, x: Any) -> dict[str, Any]:
    """What every call that takes a cache makes of it."""
    params = random_params()
    _, admitted, _ = results = d4.admit(cache, 1)
    made: dict[str, Any] = {"admit": results, "fork": d4.fork(results[0], slots[0], admitted)}
    made["prepare_forward"] = d4.prepare_forward(cache, slots, num_new)
    made["release"], made["advance"] = d4.release(cache, slots[:1]), d4.advance(cache, slots, num_new)
    staged, drafted = [], cache
    for layer, weights in enumerate(params):
        made[f"layer {layer}"] = d4.attention_layer(weights, x, cache, layer, slots, num_new)
        made[f"no tokens {layer}"] = d4.attention_layer(weights, x[:, :0], cache, layer, slots, num_new)
        _, drafted, rows = d4.stage(weights, x, drafted, layer, slots, num_new)
        staged.append(rows)
        handle = d4.acquire(cache, layer, slots, num_new)
        made[f"handle {layer}"] = handle.write_swa(x[..., :1] * np.ones(CFG.head_dim, np.float32)[None, None]).cache
        made[f"reads {layer}"] = handle.gather_swa(), handle.read_swa_view(), handle.positions(TOKENS)
        if weights.compressor is not None:
            flushed = handle.flush_compression(weights.compressor, x, weights.indexer)
            made[f"entries {layer}"] = flushed.cache, flushed.gather_all_compressed(), handle.read_classical_view()
    made["commit"] = d4.commit(drafted, staged, num_new)
    made["snapshot"] = d4.extract(cache, slots)
    made["insert"] = d4.insert(cache, d4.extract(cache, slots[:1]))
    return made


@pytest.mark.slow
def test_every_call_takes_a_cache_of_numpy_leaves():
    cache, slots = filled()
    arguments = cache, slots, counts(), inputs()
    wanted = drive(*arguments)
    made = drive(*jax.tree.map(np.asarray, arguments))
    assert made.keys() == wanted.keys()
    for name, value in made.items():
        assert_same(value, wanted[name])
    on_host = jax.tree.map(np.asarray, cache)
    assert d4.verify(on_host) == d4.verify(cache)
    assert d4.describe(on_host) == d4.describe(cache)
