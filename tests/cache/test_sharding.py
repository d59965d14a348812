"""A cache over several devices: each shard is a separate cache, and no step moves a part of it between devices."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dsv4jax as d4
from dsv4jax.cache.sharding import shard_plan
from dsv4jax.cache.shards import automatic
from dsv4jax.weights.params import param_shapes
from pallas_kernels.language import target
from tests.support.compile_for_gpu import report_of
from tests.support.driver import CFG, LAYERS, assert_same, ids, random_params, sequence, small_plan
from tests.support.in_place import copied_bytes, memory_of

SHARDS, ROWS = 4, 2  # of the data axis; slots and batch rows of each
ALL = SHARDS * ROWS
TOKENS = 8
DEVICES = jax.devices("cpu")[: 2 * SHARDS]
DATA = jax.make_mesh((SHARDS,), ("data",), devices=DEVICES[:SHARDS])
BOTH = jax.make_mesh((SHARDS, 2), ("data", "model"), devices=DEVICES)
SPLIT = P("data")


def plan_of(**options: Any) -> d4.CachePlan:
    """Return a plan with the default formats. A shard has 6 blocks, but two requests at full length would take 10."""
    sizes = dict(max_requests=ALL, num_blocks=SHARDS * 6, kv_format="fp8_row", indexer_format="nvfp4")
    return small_plan(**(sizes | options))


PLAN, LOCAL = plan_of(), shard_plan(plan_of(), DATA, "data")


def over(mesh, function, inputs, outputs, params=(), plan=PLAN):
    """Map one shard's function(*params, cache, *inputs) -> (*outputs, cache) over a mesh, and donate the cache.

    With a model axis, JAX's types check that all its shards hold the same cache.
    """
    specs = d4.sharding.partition_specs(plan, mesh)
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*params, specs, *[SPLIT] * inputs),
        out_specs=(*[SPLIT] * outputs, specs),
        check_vma="model" in mesh.shape,
    )
    return jax.jit(mapped, donate_argnums=len(params))


def forward(params, cache, x, slots, num_new, model_axis=None):
    """Run every layer on the same input, so that what is stored does not depend on attention's sums."""
    cache, ok = d4.prepare_forward(cache, slots, num_new)
    ys = []
    for layer in LAYERS:
        y, cache = d4.attention_layer(params[layer], x, cache, layer, slots, num_new, model_axis=model_axis)
        ys.append(y)
    return jnp.stack(ys, axis=1), ok[None], d4.advance(cache, slots, num_new)


def admit(cache, where):
    cache, slots, ok = d4.admit(cache, ROWS, where)
    return slots, ok[None], cache


def release(cache, slots):
    return (d4.release(cache, slots),)


def weight_specs(mesh):
    return tuple(d4.sharding.params_specs(CFG, layer, mesh) if "model" in mesh.shape else P() for layer in LAYERS)


def over_heads(mesh, plan=PLAN):
    """Map ``forward`` over a mesh, with heads split if it has a model axis."""
    step = functools.partial(forward, model_axis="model" if "model" in mesh.shape else None)
    return over(mesh, step, 3, 2, (weight_specs(mesh),), plan)


@functools.cache
def calls(mesh):
    """Return (forward, admit, release) over a mesh, or of one shard alone if it is None."""
    if mesh is None:
        return jax.jit(forward), admit, release
    return over_heads(mesh), over(mesh, admit, 1, 2), over(mesh, release, 1, 0)


def place(mesh, tree, specs: Any = SPLIT):
    """Put arrays where a mesh's explicit axes require them."""
    if mesh is None:
        return tree
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.device_put(tree, shardings)


def shard(cache: d4.KVCache, number: int) -> d4.KVCache:
    """Return one shard of a cache as a separate cache."""

    def part(leaf, spec):
        return np.split(np.asarray(leaf), SHARDS, axis=tuple(spec).index("data"))[number]

    return dataclasses.replace(jax.tree.map(part, cache, d4.sharding.partition_specs(PLAN, DATA)), plan=LOCAL)


MOVING = np.array([0, 1, 0, 0, 1, 1, 1, 0], bool)  # which rows change their request: of some shards one, both or none
EVENTS = (
    ("admit", np.arange(ALL) != 7),  # 7 rows do not divide by 4: the last one is padding
    ("feed", (8, 5, 8, 8, 0, 3, 7, 0)),
    ("feed", (8, 8, 8, 8, 8, 8, 8, 0)),
    ("release", MOVING),
    ("admit", MOVING),
    ("feed", (3, 8, 8, 1, 8, 8, 5, 0)),
    ("feed", (8, 8, 2, 8, 8, 8, 8, 0)),
)


@functools.cache
def served(mesh, number=None):
    """Run the events over a mesh, or one shard's part of them alone. Returns (cache, y of each forward pass).

    One shard alone runs on a CPU too: a GPU sums in another order, which can change a stored value.
    """
    with jax.default_device(DEVICES[0]):
        return serve(mesh, number)


def serve(mesh, number):
    """``served`` on the default device, not cached."""
    part = slice(None) if number is None else slice(number * ROWS, (number + 1) * ROWS)
    feed, take, leave = calls(mesh)
    params = random_params() if mesh is None else place(mesh, random_params(), weight_specs(mesh))
    cache = d4.init_cache(LOCAL) if mesh is None else d4.init_cache(PLAN, mesh)
    slots, outputs = np.full(ALL, -1, np.int32)[part], []
    for i, (event, rows) in enumerate(EVENTS):
        rows, ok = np.asarray(rows)[part], True
        if event == "admit":
            new, ok, cache = take(cache, place(mesh, rows))
            slots = np.where(rows, np.asarray(new), slots)
        elif event == "release":
            (cache,) = leave(cache, place(mesh, np.where(rows, slots, -1)))
        else:
            x = sequence(i, ALL * TOKENS, CFG.hidden_size).reshape(ALL, TOKENS, -1)[part]
            y, ok, cache = feed(params, cache, *place(mesh, (x, slots, rows.astype(np.int32))))
            outputs.append(np.asarray(y))
        assert np.all(ok)
    return cache, np.stack(outputs)


def assert_lies_as(cache, abstract):
    """Check that shapes, dtypes and shardings are those of an abstract cache."""
    for leaf, spec in zip(jax.tree.leaves(cache), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype)
        assert leaf.sharding.is_equivalent_to(spec.sharding, leaf.ndim)


def test_an_empty_cache_is_an_empty_cache_per_shard():
    cache = d4.init_cache(PLAN, BOTH)
    for number in range(SHARDS):
        assert_same(shard(cache, number), d4.init_cache(LOCAL))
    assert_lies_as(cache, d4.cache.abstract_cache(PLAN, BOTH))


@pytest.mark.slow
@pytest.mark.two_programs
def test_each_shard_does_bit_for_bit_what_it_would_do_alone():
    """Covers ragged chunks, an idle and a padding row, and requests that leave and arrive during the run."""
    cache, outputs = served(DATA)
    for number in range(SHARDS):
        alone, expected = served(None, number)
        assert_same(shard(cache, number), alone)
        np.testing.assert_array_equal(outputs[:, number * ROWS : (number + 1) * ROWS], expected)


@pytest.mark.sweep(guard="test_attention_of_each_shards_heads_by_kernels_sums_up_to_the_whole")
def test_heads_over_a_model_axis_store_the_same_and_sum_up_to_the_same():
    cache, outputs = served(BOTH)
    expected_cache, expected = served(DATA)
    assert_same(jax.tree.map(np.asarray, cache), jax.tree.map(np.asarray, expected_cache))
    # The groups' outputs are added up shard by shard: fp32 sums in another order, of values of rms below 1.
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=2e-6)
    for leaf in jax.tree.leaves(cache):  # each part is there twice, once per shard of the model axis
        copies: dict[str, list[bytes]] = {}
        for part in leaf.addressable_shards:
            copies.setdefault(str(part.index), []).append(np.asarray(part.data).tobytes())
        assert all(first == second for first, second in copies.values())


@pytest.mark.slow
def test_a_shard_without_blocks_left_does_not_disturb_the_others():
    feed, take, _ = calls(DATA)
    slots, _, cache = take(d4.init_cache(PLAN, DATA), place(DATA, np.ones(ALL, bool)))
    params = place(DATA, random_params(), weight_specs(DATA))
    x = sequence(1, ALL * TOKENS, CFG.hidden_size).reshape(ALL, TOKENS, -1)
    num_new = np.where(np.arange(ALL) // ROWS == 2, 8, 4).astype(np.int32)
    for _ in range(6):  # 48 tokens take 3 blocks of 16; shard 2 has 6 for two such requests
        _, ok, cache = feed(params, cache, *place(DATA, (x, slots, num_new)))
        assert ok.all()
    before = shard(cache, 2)
    y, ok, cache = feed(params, cache, *place(DATA, (x, slots, num_new)))
    assert ok.tolist() == [True, True, False, True]
    assert cache.seq_lens.tolist() == [28, 28, 28, 28, 48, 48, 28, 28]
    assert_same(shard(cache, 2), before)
    assert np.asarray(y).any(axis=(1, 2, 3)).tolist() == [True] * 4 + [False] * 2 + [True] * 2


def program(mesh, step, plan, tokens):
    """Return (what a compiled step allocates, its HLO)."""
    batch = np.zeros((ALL, tokens, CFG.hidden_size), np.float32), np.zeros(ALL, np.int32), np.zeros(ALL, np.int32)
    params, cache = place(mesh, random_params(), weight_specs(mesh)), d4.cache.abstract_cache(plan, mesh)
    compiled = step.lower(params, cache, *place(mesh, batch)).compile()
    return memory_of(compiled), compiled.as_text() or ""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DATA, BOTH], ids=["data", "data x model"])
def test_the_only_collective_is_the_sum_of_a_layers_output(mesh):
    memory, text = program(mesh, calls(mesh)[0], PLAN, TOKENS)
    assert memory.alias_size_in_bytes == LOCAL.memory_bytes()  # per device
    moved = re.findall(r"= (.*?) (?:all-|collective-|ragged-|reduce-scatter)[\w-]*\(", text)
    shapes = re.findall(r"\w+\[[\d,]*\]", " ".join(moved))
    assert shapes == ([f"f32[{ROWS},{TOKENS},{CFG.hidden_size}]"] * len(LAYERS) if mesh is BOTH else [])


@pytest.mark.slow
def test_a_step_copies_no_part_of_the_cache():
    plan = plan_of(num_blocks=SHARDS << 20)
    memory, text = program(BOTH, over_heads(BOTH, plan), plan, tokens=1)
    assert memory.alias_size_in_bytes == shard_plan(plan, BOTH, "data").memory_bytes()
    pools = jax.tree.leaves([d4.cache.abstract_cache(plan).stack(kind).pool for kind in ("csa", "hca")])
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in pools) // SHARDS
    assert copied_bytes(text) + memory.temp_size_in_bytes < smallest


@pytest.mark.sweep(guard="test_attention_of_each_shards_heads_by_kernels_sums_up_to_the_whole")
def test_kernels_run_under_shard_map_compiled_for_gpus():
    report = report_of("tests.support.compile_sharded", "h200")
    assert report["aliased"] == report["cache of a shard"]
    assert report["collectives"] == {"all-reduce": 3}  # one a layer
    # The grants; update, queries and attention of each layer; parts of tokens of HCA, whose tail is a ring; CSA's index
    # queries, scores and picks.
    # Products of 2 to 64 rows with wide weights of medium size have a kernel, too. With half of the heads that is all
    # of them: four of each layer, the compressors of CSA and HCA, and CSA's index queries.
    assert report["kernels"] == 1 + 3 + 6 + 4 + 4 * 3 + 2 + 1


def test_automatic_axes_take_arrays_from_anywhere():
    mesh = jax.make_mesh((SHARDS,), ("shards",), (AxisType.Auto,), devices=DEVICES[:SHARDS])
    specs = d4.sharding.partition_specs(PLAN, mesh, "shards")
    take = jax.shard_map(
        lambda c, n: admit(c, n)[::2], mesh=mesh, in_specs=(specs, P("shards")), out_specs=(P("shards"), specs)
    )
    slots, cache = jax.jit(take)(d4.init_cache(PLAN, mesh, "shards"), np.ones(ALL, bool))
    assert slots.tolist() == [0, 1] * SHARDS
    assert_lies_as(cache, d4.cache.abstract_cache(PLAN, mesh, "shards"))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "axis", "message"),
    [
        (dict(max_requests=6), "data", "max_requests=6 must be divisible by the 4 shards of mesh axis 'data'"),
        (
            dict(num_blocks=30),
            "data",
            "num_blocks=30 must be divisible by the 4 shards.*: 32 would be",
        ),
        ({}, "rows", "the mesh has no axis 'rows'"),
    ],
)
def test_a_plan_that_does_not_divide_is_refused(options, axis, message):
    for function in (d4.init_cache, d4.cache.abstract_cache, d4.sharding.partition_specs, d4.sharding.shardings):
        with pytest.raises(ValueError, match=message):
            function(plan_of(**options), DATA, axis)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"o_groups=2, of 4 heads, must be divisible by the 4 shards of mesh axis 'data'"
    ):
        d4.sharding.params_specs(CFG, 0, DATA, "data")
    with pytest.raises(ValueError, match="the mesh has no axis 'model'"):
        d4.sharding.params_specs(CFG, 0, DATA)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 3\)"):
        d4.sharding.params_specs(CFG, 3, BOTH)


def test_weights_of_all_heads_are_refused_where_a_shard_of_them_belongs():
    step = over(BOTH, functools.partial(forward, model_axis="model"), 3, 2, params=(P(),))
    batch = np.zeros((ALL, 1, CFG.hidden_size), np.float32), np.zeros(ALL, np.int32), np.zeros(ALL, np.int32)
    with pytest.raises(
        AssertionError, match=r"params.q_b: expected .* \[axis 0=272, axis 1=24\], got float32\[544, 24\]"
    ):
        step.lower(random_params(), d4.cache.abstract_cache(PLAN, BOTH), *place(BOTH, batch))


def test_kernels_that_cannot_serve_so_few_heads_say_so():
    cfg = dataclasses.replace(d4.DSV4Config.flash(), num_heads=8, compress_ratios=(0,))
    plan = d4.plan_cache(cfg, max_requests=ALL, max_context=128, num_blocks=SHARDS)
    row = jax.ShapeDtypeStruct((ALL,), jnp.int32, sharding=NamedSharding(BOTH, SPLIT))
    x = jax.ShapeDtypeStruct((ALL, 1, cfg.hidden_size), jnp.float32, sharding=NamedSharding(BOTH, SPLIT))
    specs, backend = d4.sharding.params_specs(cfg, 0, BOTH), d4.OpBackends(decode_attention="pallas")

    def layer(params, cache, x, slots, num_new):
        return d4.attention_layer(params, x, cache, 0, slots, num_new, backend=backend, model_axis="model")

    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(BOTH, spec)),
        param_shapes(cfg, d4.AttentionType.SWA),
        specs,
    )
    with pytest.raises(ValueError, match="cannot serve decode_attention: num_heads must be a multiple of 8, got 4"):
        over(BOTH, layer, 3, 1, (specs,), plan).lower(params, d4.cache.abstract_cache(plan, BOTH), x, row, row)


def test_attention_of_each_shards_heads_by_kernels_sums_up_to_the_whole():
    cfg = d4.DSV4Config.tiny(num_heads=16, head_dim=512, rope_dim=64, compress_ratios=(0,))
    plan = d4.plan_cache(cfg, max_requests=2, max_context=64, kv_format="fp8_row")
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=DEVICES[:2])
    params, specs = random_params(cfg)[0], d4.sharding.params_specs(cfg, 0, mesh)
    x, num_new = jnp.asarray(sequence(1, 2 * 3, cfg.hidden_size)).reshape(2, 3, -1), ids(3, 2)
    cache, slots, _ = d4.admit(d4.init_cache(plan), 2)

    def run(params, x, cache, slots, *, attention, axis=None):
        cache, _ = d4.prepare_forward(cache, slots, num_new)
        backend = d4.OpBackends(decode_attention=attention)
        return d4.attention_layer(params, x, cache, 0, slots, num_new, backend=backend, model_axis=axis)[0]

    alone = jax.jit(functools.partial(run, attention="xla"))(params, x, cache, slots)
    of_shard = functools.partial(run, attention="pallas_simulated", axis="model")
    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=(specs, P(), P(), P()), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(mapped)(params, x, cache, slots), alone, rtol=0, atol=1.5e-3)


def test_a_cache_of_several_shards_is_refused_outside_of_shard_map():
    cache, slots = d4.init_cache(PLAN, DATA), jnp.zeros(2, jnp.int32)
    for call in (
        lambda: d4.admit(cache, 1),
        lambda: d4.prepare_forward(cache, slots, slots),
        lambda: d4.cache.prepare_rows(cache, slots, slots),
        lambda: d4.attention_layer(random_params()[0], jnp.zeros((2, 1, CFG.hidden_size)), cache, 0, slots, slots),
        lambda: d4.advance(cache, slots, slots),
        lambda: d4.acquire(cache, 0, slots, slots),
        lambda: d4.release(cache, slots),
        lambda: d4.fork(cache, slots[0], slots),
    ):
        with pytest.raises(ValueError, match=r"this cache has 4 shards .*: use it inside jax.shard_map"):
            call()


def test_a_cache_with_a_mesh_grants_rows_on_each_shard():
    mesh = automatic(jax.make_mesh((2, 1), ("data", "model"), devices=DEVICES[:2]))
    cache = d4.init_cache(plan_of(max_requests=2 * ROWS, num_blocks=2 * 6), mesh)
    cache, slots, _ = d4.admit(dataclasses.replace(cache, mesh=mesh), 2 * ROWS)
    slots, num_new = np.asarray(slots), np.array([80, 80, 80, 1], np.int32)  # blocks: 5, 5, 5 and 0 of 6 on each shard
    grants = d4.cache.explain_forward(cache, slots, num_new)
    after, granted = d4.cache.prepare_rows(cache, slots, num_new)
    _, ok = d4.prepare_forward(cache, slots, num_new)
    assert (ok.tolist(), granted.tolist()) == ([False, True], [True, False, True, True])
    assert grants.ok.tolist() == ok.tolist()
    assert grants.free_blocks.tolist() == [6, 6]
    for shard in range(2):
        alone, rows = d4.sharding.shard_of(cache, shard), slice(shard * ROWS, (shard + 1) * ROWS)
        wanted = d4.cache.explain_forward(alone, slots[rows], num_new[rows])
        assert_same(grants.refusal[rows], wanted.refusal)
        assert_same(grants.missing_blocks[rows], wanted.missing_blocks)
        assert_same(d4.sharding.shard_of(after, shard), d4.cache.prepare_rows(alone, slots[rows], num_new[rows])[0])
    with pytest.raises(ValueError, match="a batch of 1 rows does not divide by the 2 shards"):
        d4.cache.prepare_rows(cache, slots[:1], num_new[:1])


def test_a_mesh_of_the_default_devices_kind_means_that_device():
    """In ``shard_map``, a mesh gives only its devices' kind. By that alone no kernel would be supported."""
    default = jax.devices()[0]
    for kind, expected in ((default.device_kind, default), ("another", None)):
        described = AbstractDevice(device_kind=kind, num_cores=None, platform=default.platform)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=described)):
            assert target.device() == (expected or described)
