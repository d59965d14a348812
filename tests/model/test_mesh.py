"""A model on several devices: the numbers of one device, every array where it belongs, and no other sums than named."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import dsv4jax as d4
from dsv4jax import generate as command
from dsv4jax.cache.shards import automatic, over_mesh
from dsv4jax.model import (
    Generator,
    ModelConfig,
    Sampling,
    draft_forward,
    forward,
    generate,
    init_caches,
    inspect_forward,
    load_model,
    random_model,
    stage_forward,
)
from dsv4jax.model.inside import blocks
from dsv4jax.model.inside.devices import SHARE, Devices, run_on_devices, weight_specs
from dsv4jax.model.ops import EXPERTS, ExpertOutputs, Picks
from dsv4jax.model.params import StoredExperts
from dsv4jax.model.plain.experts import mixed
from dsv4jax.requests.speculate import commit
from tests.support.cases import first_of
from tests.support.models import FULL, MODEL_A, MODEL_Q, SMALL, laid_over, mesh_of, recorded

TOLERANCE = 5e-5  # as of ``test_forward_pass``: f32 sums in another order, of logits of rms 1.9
CFG = dataclasses.replace(SMALL, vocab_size=8)  # divides by four devices, as the four experts do
OF_CHUNKS = dataclasses.replace(  # of one layer, because a program of a chunk takes long to compile
    CFG, attention=dataclasses.replace(CFG.attention, compress_ratios=(4,)), num_hash_layers=0
)
ALL_SHAPES = [(2, 4), (1, 8), (4, 2), (8, 1)]
FOUR = [(2, 2), (1, 4), (4, 1)]
DIVIDED = [(1, 2), (2, 2), (1, 4)]  # several devices have the same requests
ROWS, TOKENS = 4, 6
PROMPTS = [[1, 2, 3], [4], [5, 0, 2, 1, 4, 3, 3, 1] * 5, [2, 2], [0, 1, 5, 5, 5, 2, 0]]


@functools.cache
def small_model(shape: tuple[int, int] | None, weights: str = "f32", cfg: ModelConfig = CFG):
    """A random model on one device, or the same laid over a mesh."""
    if shape is None:
        return random_model(cfg, jax.random.key(1), weights=weights)
    return laid_over(shape, small_model(None, weights, cfg))


def batch() -> tuple[jax.Array, jax.Array]:
    """Ids [B, T], and a count of each row: one has no tokens, and ids past the counts are none."""
    ids = np.random.default_rng(3).integers(0, CFG.vocab_size, (ROWS, TOKENS)).astype(np.int32)
    counts = np.asarray([TOKENS, 1, 0, 4], np.int32)
    return jnp.asarray(np.where(np.arange(TOKENS) < counts[:, None], ids, -7)), jnp.asarray(counts)


def caches(shape: tuple[int, int] | None, drafts: int = 0, **options: Any):
    return init_caches(CFG, ROWS, 256, drafts, mesh=None if shape is None else mesh_of(shape), **(FULL | options))


def shapes(cases: list[tuple[int, int]], count: int = 1) -> list[Any]:
    return first_of((pytest.param(shape, id=f"{shape[0]}x{shape[1]}") for shape in cases), count)


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# ---- where arrays lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", first_of(["f32", "stored"], count=0))
def test_random_weights_do_not_depend_on_the_mesh_and_lie_where_the_table_says(weights):
    cfg = ModelConfig.tiny(attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(0,)))
    with jax.default_device(jax.devices("cpu")[0]):  # as the mesh: a GPU draws other last bits
        alone = small_model(None, weights, cfg)
    spread = random_model(cfg, jax.random.key(1), weights=weights, mesh=mesh_of((2, 2)))
    for path, leaf in jax.tree.leaves_with_path(spread):
        name = jax.tree_util.keystr(path)
        divided = re.search(r"\.embedding|\.head$|\.experts\.(gate_up|down)", name)
        shape = (leaf.shape[0] // 4, *leaf.shape[1:]) if divided else leaf.shape
        assert [part.data.shape for part in leaf.addressable_shards] == [shape] * 4, name
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("folder", first_of([MODEL_Q, MODEL_A]))
def test_a_checkpoint_is_loaded_on_to_a_mesh_with_the_same_numbers(folder):
    alone, spread = load_model(folder), load_model(folder, mesh=mesh_of((2, 2)))
    for (path, one), other in zip(jax.tree.leaves_with_path(alone), jax.tree.leaves(spread), strict=True):
        name = jax.tree_util.keystr(path)
        assert (other.dtype, len(other.sharding.device_set)) == (one.dtype, 4), name
        assert other.is_fully_replicated != bool(re.search(r"\.embedding|\.head$|\.experts\.(gate_up|down)", name))
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


def test_experts_get_the_kernels_order_on_the_device_that_keeps_them(monkeypatch):
    """To reorder codes takes the host far longer than to read them."""
    seen, real = collections.Counter(), StoredExperts.for_kernels

    def noted(experts: StoredExperts) -> StoredExperts:
        seen.update(experts.codes.devices())
        return real(experts)

    monkeypatch.setattr(StoredExperts, "for_kernels", noted)
    mesh = mesh_of((2, 2))
    load_model(MODEL_Q, mesh=mesh)
    assert set(seen) == set(mesh.devices.flat)
    assert len(set(seen.values())) == 1


def test_what_does_not_divide_is_refused_before_anything_is_placed():
    eight = mesh_of((1, 8))
    with pytest.raises(ValueError, match=r"num_experts=4 must be divisible by the 8 devices of the mesh"):
        load_model(MODEL_Q, mesh=eight)
    with pytest.raises(ValueError, match=r"vocab_size=6 must be divisible by the 4 devices"):
        random_model(SMALL, jax.random.key(0), mesh=mesh_of((2, 2)))
    with pytest.raises(ValueError, match="max_requests=3 must be divisible by the 2 shards of mesh axis 'data'"):
        init_caches(CFG, 3, 64, mesh=mesh_of((2, 2)))
    cache: Any = caches((2, 2)).model
    with pytest.raises(ValueError, match="a batch of 0 rows has nothing to divide over a mesh"):
        run_on_devices(lambda: None, cache.mesh, cache, 0, lambda: ((), ()))
    rows = jax.make_mesh((2,), ("rows",), devices=jax.devices("cpu")[:2])
    with pytest.raises(ValueError, match='mesh must have the axes "data" and "model"'):
        random_model(CFG, jax.random.key(0), mesh=rows)


@pytest.mark.slow
def test_weights_and_cache_of_different_meshes_are_refused():
    ids, counts = batch()
    with pytest.raises(ValueError, match=r"the weights lie over the mesh .*'model': 2}, the cache over one device"):
        forward(small_model((2, 2)), ids, caches(None).model, counts, counts)
    with pytest.raises(ValueError, match="the weights lie over one device, the cache over the mesh"):
        Generator(small_model(None), caches=caches((2, 2)))
    with pytest.raises(ValueError, match=r"a batch of 3 rows does not divide by the 2 shards .* slot -1 to 4"):
        forward(small_model((2, 2)), ids[:3], caches((2, 2)).model, counts[:3], counts[:3])


# ---- the same numbers -----------------------------------------------------------------------------------------------


@functools.cache
def passes(shape: tuple[int, int] | None) -> dict[str, Any]:
    """A chunk, drafts of which some are accepted, and the draft block: what each returns, on the host."""
    params, both = small_model(shape), caches(shape, drafts=2)
    ids, counts = batch()
    both, slots, ok = both.admit(ROWS)
    cache, granted = d4.prepare_forward(both.model, slots, counts)
    seen, cache = inspect_forward(params, ids, cache, slots, counts)
    _, streams, _ = forward(params, ids, cache, slots, counts, "none")
    cache = d4.advance(cache, slots, counts)
    drafts = jnp.abs(ids[:, ::-1][:, :3]) % CFG.vocab_size
    offered = jnp.asarray([3, 2, 0, 3], jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, offered)
    judged, _, cache, staged = stage_forward(params, drafts, cache, slots, offered)
    cache, committed = commit(cache, staged, jnp.asarray([2, 0, 0, 3], jnp.int32))
    assert both.drafts is not None
    of_drafts, _ = d4.prepare_forward(both.drafts, slots, counts)
    guessed, _, of_drafts = draft_forward(params, streams, ids, of_drafts, slots, counts)
    assert all(np.all(np.asarray(each)) for each in (ok, granted, committed))
    lengths = cache.seq_lens, d4.advance(of_drafts, slots, counts).seq_lens
    left = d4.release(cache, slots).seq_lens
    return as_numpy({"seen": seen, "judged": judged, "guessed": guessed, "lengths": lengths, "left": left})


@pytest.mark.sweep(guard="test_stored_weights_give_the_recorded_logits_on_four_devices")
@pytest.mark.parametrize("shape", shapes(FOUR[:2], count=0))
def test_a_step_of_one_layer_gives_the_logits_of_one_device(shape):
    cfg = dataclasses.replace(
        CFG, attention=dataclasses.replace(CFG.attention, compress_ratios=(0,)), num_hash_layers=0
    )
    found = []
    for each in (None, shape):
        mesh = None if each is None else mesh_of(each)
        cache, slots, _ = init_caches(cfg, ROWS, 64, mesh=mesh, **FULL).admit(ROWS)
        ids, counts = jnp.arange(ROWS, dtype=jnp.int32)[:, None], jnp.asarray([1, 1, 0, 1], jnp.int32)
        cache, _ = d4.prepare_forward(cache.model, slots, counts)
        logits, _, cache = forward(small_model(each, "f32", cfg), ids, cache, slots, counts)
        found.append(as_numpy(logits))
    shards = shape[0]
    cache = d4.advance(cache, slots, counts)
    assert d4.verify(cache) == []
    reports = [d4.describe(d4.sharding.shard_of(cache, shard)) for shard in range(shards)]
    assert [slot.length for report in reports for slot in report.slots] == counts.tolist()
    broken = dataclasses.replace(cache, tables=dataclasses.replace(cache.tables, seq_lens=cache.tables.seq_lens + 1))
    assert shards == 1 or all(re.match(r"shard [01]: ", fault) for fault in d4.verify(broken))
    assert len(d4.verify(broken)) >= ROWS
    with pytest.raises(ValueError, match=rf"number must be in \[0, {shards}\), the shards of the cache, got {shards}"):
        d4.sharding.shard_of(cache, shards)
    # The first request moves to the last shard: elsewhere nothing is inserted.
    taken = jax.device_get(d4.extract(d4.sharding.shard_of(cache, 0), [0] * shards))
    lengths = np.where(np.arange(shards) == shards - 1, taken.seq_lens, -1).astype(np.int32)
    cache = d4.release(cache, slots)
    moved, new, ok = d4.insert(cache, dataclasses.replace(taken, seq_lens=lengths))
    assert np.asarray(ok).tolist() == [shard == shards - 1 for shard in range(shards)]
    assert np.asarray(new)[-1] == 0
    assert d4.verify(moved) == []
    again = d4.extract(d4.sharding.shard_of(moved, shards - 1), [0])
    one = jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim == 1 else leaf[:, :1], taken)
    jax.tree.map(np.testing.assert_array_equal, as_numpy(again), one)
    np.testing.assert_allclose(*found, rtol=0, atol=TOLERANCE)


@pytest.mark.sweep(guard="test_two_processes_make_the_tokens_of_one_device")
@pytest.mark.parametrize("shape", shapes(FOUR, count=0))
def test_passes_give_the_numbers_of_one_device(shape):
    """Rows that are padding or have no tokens are among them, and shards with nothing to do."""
    alone, spread = passes(None), passes(shape)
    np.testing.assert_array_equal(alone["seen"].picks.experts, spread["seen"].picks.experts)
    assert not alone["left"].any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE), alone, spread)


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(DIVIDED))
def test_chunks_whose_tokens_are_divided_give_the_numbers_of_one_device(shape):
    """Rows end in each device's share, and at its borders; the second chunk reads what the first one stored."""
    most = shape[1] * SHARE
    counts = np.asarray([[most, SHARE + 1, 0, 1], [SHARE - 7, SHARE, 3, most]], np.int32)
    ids = np.random.default_rng(5).integers(0, CFG.vocab_size, (2, ROWS, most)).astype(np.int32)
    alone, spread = (chunks(each, ids, counts) for each in (None, shape))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE), alone, spread)


@functools.cache
def chunk_program(shape: tuple[int, int] | None, tokens: int) -> Any:
    """The compiled pass of a chunk, and a cache with its slots."""
    mesh = None if shape is None else mesh_of(shape)
    both, slots, _ = init_caches(OF_CHUNKS, ROWS, 2 * tokens, mesh=mesh, **FULL).admit(ROWS)
    ids, counts = jnp.zeros((ROWS, tokens), jnp.int32), jnp.zeros(ROWS, jnp.int32)
    run = jax.jit(lambda *given: forward(*given))
    return run.lower(small_model(shape, "f32", OF_CHUNKS), ids, both.model, slots, counts).compile(), both.model, slots


def chunks(shape: tuple[int, int] | None, ids: np.ndarray, counts: np.ndarray) -> Any:
    """Chunks of the same rows one after the other: their logits, and what drafts are made of, on the host."""
    run, cache, slots = chunk_program(shape, ids.shape[-1])
    found = []
    for new, count in zip(jnp.asarray(ids), jnp.asarray(counts), strict=True):
        cache, ok = d4.prepare_forward(cache, slots, count)
        assert np.all(np.asarray(ok))
        logits, streams, cache = run(small_model(shape, "f32", OF_CHUNKS), new, cache, slots, count)
        cache = d4.advance(cache, slots, count)
        found.append((logits, streams))
    return as_numpy(found)


def test_what_is_captured_of_a_chunk_is_of_all_its_tokens():
    """Devices compute all of them then, and none has a share."""
    shape, tokens = DIVIDED[0], DIVIDED[0][1] * SHARE
    cache = init_caches(OF_CHUNKS, ROWS, tokens, mesh=mesh_of(shape), **FULL).model
    rows = jnp.zeros((ROWS, tokens), jnp.int32), cache, jnp.arange(ROWS, dtype=jnp.int32), jnp.full(ROWS, tokens)
    look = functools.partial(forward, small_model(shape, "f32", OF_CHUNKS), capture=("head", "streams"))
    seen = jax.eval_shape(look, *rows)[3]
    size = OF_CHUNKS.hidden_size
    assert seen["head"].shape == (ROWS, tokens, size)
    assert seen["streams"].shape == (1, ROWS, tokens, OF_CHUNKS.num_streams, size)


@pytest.mark.sweep(guard="test_two_processes_make_the_tokens_of_one_device")
@pytest.mark.parametrize("shape", shapes(ALL_SHAPES, count=0))
def test_recorded_logits_and_tokens_on_eight_devices(shape):
    """Each shard has one request of another length; and with drafts, the tokens are the recorded ones."""
    wanted, params = recorded("a"), load_model(MODEL_A, weights="f32", mesh=mesh_of(shape))
    sequence, rows = wanted["ids"], shape[0]
    lengths = [len(sequence) - 9 * row for row in range(rows)]
    cache = init_caches(params.cfg, rows, 512, mesh=params.mesh, **FULL).model
    cache, slots, _ = d4.admit(cache, rows)
    counts = jnp.asarray(lengths, jnp.int32)
    cache, ok = d4.prepare_forward(cache, slots, counts)
    assert np.all(np.asarray(ok))
    ids = jnp.broadcast_to(jnp.asarray(sequence, jnp.int32), (rows, len(sequence)))
    seen, _ = inspect_forward(params, ids, cache, slots, counts)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(seen.logits[row, :length], wanted["logits"][:length], rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(seen.picks.experts[:, row, :length], wanted["experts"][:, :length])
    first = int(wanted["prompt_len"])
    prompt, expected = sequence[:first].tolist(), sequence[first:].tolist()
    both = init_caches(params.cfg, rows, 512, 2, mesh=params.mesh, **FULL)
    found = generate(params, [prompt, prompt[:5]], len(expected), drafts=2, stop_tokens=(), caches=both)
    assert found.tokens[0] == expected
    assert found.drafted > 0


@pytest.mark.parametrize("shape", shapes(FOUR, count=0))
def test_stored_weights_give_the_recorded_logits_on_four_devices(shape):
    """Experts in FP4, of which each device has one; products in f32."""
    wanted, params = recorded("q"), load_model(MODEL_Q, dtype=jnp.float32, mesh=mesh_of(shape))
    rows = shape[0]
    cache = init_caches(params.cfg, rows, 512, mesh=params.mesh, **FULL).model
    cache, slots, _ = d4.admit(cache, rows)
    counts = jnp.full(rows, len(wanted["ids"]), jnp.int32)
    cache, _ = d4.prepare_forward(cache, slots, counts)
    ids = jnp.broadcast_to(jnp.asarray(wanted["ids"], jnp.int32), (rows, len(wanted["ids"])))
    logits, _, _ = forward(params, ids, cache, slots, counts, "all")
    assert logits is not None
    for row in np.asarray(logits):
        np.testing.assert_allclose(row, wanted["logits_f32"], rtol=0, atol=TOLERANCE)


@pytest.mark.sweep(guard="test_two_processes_make_the_tokens_of_one_device")
@pytest.mark.parametrize("shape", shapes([(2, 2), (4, 1)], count=0))
def test_texts_are_those_of_one_device(shape):
    """Drawn with drafts; more texts than rows, so that they wait; and one that goes on from what its shard holds."""
    made = [texts(None), texts(shape)]
    assert made[0] == made[1]


@functools.cache
def texts(shape: tuple[int, int] | None) -> tuple[Any, ...]:
    generator = Generator(small_model(shape), caches=caches(shape, drafts=2), drafts=2)
    found = generator.generate(PROMPTS, 12, Sampling.of(0.8, seed=3), choices=True)
    longer = PROMPTS[4] + found.tokens[4] + [1, 2]
    again = generator.generate([longer], 8)
    assert again.stored == 2, "its beginning was not kept"
    choices = None if found.choices is None else as_numpy(found.choices)
    numbers = [[leaf.tolist() for leaf in jax.tree.leaves(of_text)] for of_text in choices or []]
    return found.tokens, found.stored, found.drafted, found.accepted, numbers, again.tokens


@pytest.mark.sweep(guard="test_two_processes_make_the_tokens_of_one_device")
def test_new_prompts_go_where_blocks_are_free_and_leave_kept_texts_alone():
    """The first shard keeps a text. Of three prompts it gets one, so that the text need not make room."""
    shape = 2, 2
    generator = Generator(small_model(shape), caches=caches(shape, drafts=2), drafts=2)
    kept = generator.generate(PROMPTS[2:3], 12).tokens[0]
    generator.generate([PROMPTS[0], PROMPTS[0], PROMPTS[0]], 12)
    generator.generate([PROMPTS[2] + kept + [1, 2]], 8)
    assert generator.result.stored == 2, "its beginning was not kept"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", first_of([3, 300]), ids=["few", "many"])
@pytest.mark.parametrize("shape", shapes([(1, 4), (2, 2), (4, 1)]))
def test_experts_give_what_they_give_on_one_device(shape, tokens):
    """Each pick's output is gathered, or the sum of a device's own is sent."""
    experts, mesh, spec = small_model(None).blocks[0].experts, automatic(mesh_of(shape)), PartitionSpec("data")
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((ROWS, tokens, CFG.hidden_size)), jnp.float32)
    numbers = np.argsort(rng.random((ROWS, tokens, CFG.num_experts)), -1)[..., : CFG.experts_per_token]
    numbers = np.where(rng.random((ROWS, tokens, 1)) < 0.8, np.sort(numbers, -1), CFG.num_experts)
    picks = Picks(experts=jnp.asarray(numbers, jnp.int32), weights=jnp.asarray(rng.random(numbers.shape), jnp.float32))
    is_gathered = shape[0] == 1 and tokens == 3
    op = EXPERTS.of("xla", CFG, experts, x.dtype)

    def mix(x, given, picks, experts):
        made = blocks._mix(x, given, picks, experts, op=op, cfg=CFG, devices=Devices.of(mesh), backend="xla")
        assert isinstance(made, ExpertOutputs) == is_gathered
        return made.sum() if is_gathered else made

    of_experts = weight_specs({"experts": experts})["experts"]
    everywhere = PartitionSpec()
    spread = over_mesh(mesh, mix, (spec, everywhere, everywhere, of_experts), spec)
    want = mixed(op, x, picks, experts, CFG).sum()
    np.testing.assert_allclose(jax.jit(spread)(x, x, picks, experts), want, rtol=0, atol=TOLERANCE)


# ---- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", shapes([(2, 2), (4, 1), (1, 4)], count=0))
def test_a_pass_sends_what_is_named_and_nothing_else(shape):
    data, model = shape[0] > 1, shape[1] > 1
    params, layers = small_model(shape), CFG.num_layers
    ids, counts = batch()
    given = params, ids, caches(shape).model, counts, counts
    text = jax.jit(forward, donate_argnums=2).lower(*given).compile().as_text()
    assert text is not None
    sent = re.findall(r" ((?:all-|collective-|ragged-|reduce-scatter)[\w-]*?)(?:-start)?\(", text)
    expected = {
        # gather_tokens, gather_inputs of each layer and of the head; gather_outputs of each layer; gather_logits
        "all-gather": data * (2 + layers) + (not data) * layers + model,
        "reduce-scatter": data * (1 + layers),  # sum_of_embedding, sum_of_experts of each layer
        "all-reduce": model * (1 + data * layers),  # the same
        "all-to-all": int(data),  # gather_logits
    }
    assert collections.Counter(sent) == {name: count for name, count in expected.items() if count}


@pytest.mark.parametrize("shape", shapes(DIVIDED))
def test_a_chunk_sends_what_is_named_and_nothing_else(shape):
    data, layers = shape[0] > 1, OF_CHUNKS.num_layers
    text = chunk_program(shape, shape[1] * SHARE)[0].as_text()
    sent = re.findall(r" ((?:all-|collective-|ragged-|reduce-scatter)[\w-]*?)(?:-start)?\(", text)
    expected = {
        # gather_tokens, gather_inputs as ever; gather_chunk of each sublayer, the head and for drafts; gather_logits
        "all-gather": data * (2 + layers) + (2 * layers + 2) + 1,
        "reduce-scatter": (1 + data) * (1 + layers),  # sum_of_embedding, sum_of_experts of each layer
        "all-to-all": int(data),  # gather_logits
    }
    assert collections.Counter(sent) == {name: count for name, count in expected.items() if count}


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_reads_a_mesh(capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", functools.partial(jax.devices, "cpu"))  # also where there is a GPU
    args = command.parse(["folder", "--ids", "1", "--mesh", "2x4"])
    assert dict(args.mesh.shape) == {"data": 2, "model": 4}
    for given, message in (("2", "such as 1x2"), ("0x2", "such as 1x2"), ("4x4", "takes 16 devices, and there are 8")):
        with pytest.raises(SystemExit):
            command.parse(["folder", "--ids", "1", "--mesh", given])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["folder", "--ids", "1", "--distributed"])
    assert "--distributed is for --mesh" in capsys.readouterr().err


@pytest.mark.sweep(guard="test_two_processes_make_the_tokens_of_one_device")
def test_the_command_generates_on_a_mesh(capsys):
    wanted = recorded("a")
    prompt, expected = np.split(wanted["ids"], [int(wanted["prompt_len"])])
    ids = ",".join(map(str, prompt))
    options = ["--temperature", "0", "--weights", "f32", "--max-new", str(len(expected)), "--ignore-eos", "--json"]
    assert command.main([str(MODEL_A), "--ids", ids, "--mesh", "1x2", *options]) == 0
    assert capsys.readouterr().out == f'{{"tokens": [{expected.tolist()}]}}\n'
