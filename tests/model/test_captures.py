"""What is captured of a pass is what was recorded or is computed again by hand; patches and choices act as they say."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.layer.reference import reference_layer
from dsv4jax.model import Choices, forward, forward_sequences, init_caches, logit_lens, stage_forward
from dsv4jax.model.inside.captures import NAMES
from tests.support.cases import first_of
from tests.support.driver import even_split, random_split
from tests.support.models import FULL, MODEL_A, model_a, recorded, small_model

TOLERANCE = 5e-5  # f32 sums in another order: logits of rms 1.9 and streams up to 15 differ by 2.4e-5
WIDTH = 64  # tokens of a chunk


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


@functools.partial(jax.jit, static_argnames=("capture", "names"))
def call(params, tokens, cache, slots, count, choices=None, given=None, *, capture=NAMES, names=()):
    """Prepare, run with patches by name that get ``given``, and advance: (logits, captured, cache)."""
    intervene = {name: functools.partial(PATCHES[name], given) for name in names}
    cache, _ = d4.prepare_forward(cache, slots, count)
    logits, _, cache, seen = forward(
        params, tokens, cache, slots, count, "all", capture=capture, intervene=intervene, choices=choices
    )
    return logits, seen, d4.advance(cache, slots, count)


PATCHES = {
    "streams": lambda given, value, layer: jnp.where(layer == given[0], value[::-1], value),
}


def empty(params, rows=1, **formats):
    cache, slots, _ = d4.admit(init_caches(params.cfg, rows, 512, **(formats or FULL)).model, rows)
    return cache, slots


@functools.cache
def whole():
    """Logits and all that can be captured of model a and its recorded sequence, in one pass."""
    sequence = recorded("a")["ids"]
    cache, slots = empty(model_a())
    logits, seen, _ = call(model_a(), jnp.asarray(sequence, jnp.int32)[None], cache, slots, ids(len(sequence)))
    return jax.tree.map(np.asarray, (logits, seen))


@functools.cache
def inside():
    with np.load(MODEL_A / "inside.npz") as archive:
        return dict(archive)


def close(found, wanted, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_captured_quantities_equal_the_recorded_ones():
    (logits, seen), wanted, of_inside = whole(), recorded("a"), inside()
    at = of_inside["at"]
    assert seen.keys() == set(NAMES)
    close(logits[0], wanted["logits"])
    close(seen["streams"][:, 0], wanted["blocks"])
    np.testing.assert_array_equal(seen["experts"].experts[:, 0], wanted["experts"])
    close(seen["experts"].weights[:, 0], wanted["expert_weights"])
    close(seen["head"][0, at], of_inside["head_in"])
    for number, name in enumerate(("attn", "ffn")):
        close(seen["inputs"][:, number, 0][:, at], of_inside[f"{name}_in"])
        close(seen["outputs"][:, number, 0][:, at], of_inside[f"{name}_out"])
        close(seen["mixing"].post[:, number, 0][:, at], of_inside[f"{name}_post"])
        close(seen["mixing"].carry[:, number, 0][:, at], of_inside[f"{name}_comb"])


@pytest.mark.slow
def test_the_lens_of_the_last_layer_shows_the_logits():
    (logits, seen), params = whole(), model_a()
    of_layers = np.asarray(logit_lens(params, jnp.asarray(seen["streams"][:, :, ::17])))
    close(of_layers[-1], logits[:, ::17])
    assert (np.abs(of_layers[:-1] - logits[:, ::17]).max((1, 2, 3)) > 0.1).all()
    with pytest.raises(AssertionError, match=r"streams: expected .* \[..., n=4, hidden=64\], got float32\[1, 64, 4\]"):
        logit_lens(params, jnp.zeros((1, 64, 4)))


@pytest.mark.slow
def test_the_share_of_each_stream_in_an_input_equals_that_by_hand():
    """The streams before layer 0 are the embedding, before layer 3 the recorded ones."""
    _, seen = whole()
    params, wanted = model_a(), recorded("a")
    cfg, blocks = params.cfg, wanted["blocks"].astype(np.float64)
    for layer in (0, 3):
        old = blocks[layer - 1] if layer else np.repeat(np.asarray(params.embedding)[wanted["ids"], None], 4, 1)
        flat, mix = old.reshape(len(old), -1), params.blocks[layer].attention_mix
        flat = flat / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + cfg.norm_eps)
        weight, base, scale = (np.asarray(leaf, np.float64) for leaf in (mix.weight, mix.base, mix.scale))
        pre = 1 / (1 + np.exp(-((flat @ weight.T)[:, :4] * scale[0] + base[:4]))) + cfg.hyper_eps
        close(seen["mixing"].pre[layer, 0, 0], pre)
        x = np.einsum("tn,tnh->th", pre, old)
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + cfg.norm_eps)
        close(seen["inputs"][layer, 0, 0], x * np.asarray(params.blocks[layer].attention_norm))


@pytest.mark.slow
def test_picks_entries_and_heads_equal_those_computed_without_a_cache():
    _, seen = whole()
    params, of_inside = model_a(), inside()
    cfg, tokens = params.cfg.attention, seen["inputs"].shape[3]
    csa, hca = (2, 4), (3,)
    for kind, layers in (("csa", csa), ("hca", hca)):
        for i, layer in enumerate(layers):
            x = jnp.asarray(seen["inputs"][layer, 0, 0])
            wanted = reference_layer(params.blocks[layer].attention, x, cfg, layer)
            count = tokens // cfg.compress_ratios[layer]
            assert seen["entries"][kind].number[i, 0, :count].tolist() == list(range(count))
            assert np.all(seen["entries"][kind].number[i, 0, count:] == -1)
            close(seen["entries"][kind].rows[i, 0, :count], wanted.entries)
            close(seen["outputs"][layer, 0, 0], wanted.out)
            if kind == "csa" and wanted.seen is not None:
                for picks, read in zip(seen["picks"][i, 0], wanted.seen, strict=True):
                    assert picks[picks >= 0].tolist() == np.flatnonzero(read).tolist()
    # The recorded scores are of another program.
    for token, scores in zip(of_inside["at"], of_inside["index_scores_layer2"], strict=True):
        visible, picks = (token + 1) // 4, seen["picks"][0, 0, token]
        best = np.sort(np.argsort(-scores[:visible], kind="stable")[: cfg.indexer_top_k])
        assert picks[picks >= 0].tolist() == best.tolist()
    for layer, block in enumerate(params.blocks):
        groups = seen["attention"][layer, 0].reshape(tokens, cfg.o_groups, -1)
        o_a = np.asarray(block.attention.o_a).reshape(cfg.o_groups, cfg.o_lora_rank, -1)
        narrow = np.einsum("tgi,goi->tgo", groups, o_a).reshape(tokens, -1)
        close((narrow @ np.asarray(block.attention.o_b).T)[of_inside["at"]], of_inside["attn_out"][layer])


def test_choices_are_the_experts_and_picks_in_few_bytes():
    _, seen = whole()
    choices = seen["choices"]
    assert choices.experts.dtype == np.int8
    assert choices.entries.dtype == np.int8  # the cache has room for 128 entries of 4 tokens
    np.testing.assert_array_equal(choices.experts, seen["experts"].experts)
    np.testing.assert_array_equal(choices.entries, seen["picks"])


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
@pytest.mark.parametrize("size", first_of([7, pytest.param(0, id="random"), WIDTH, 1], count=0))
def test_choices_are_the_same_in_chunks_of_any_size(size):
    params, sequence = model_a(), recorded("a")["ids"]
    cache, slots = empty(params)
    length, width = len(sequence), 1 if size == 1 else WIDTH
    splits = even_split(length, size) if size else random_split(np.random.default_rng(3), length, WIDTH)
    parts, done = [], 0
    for count in splits:
        tokens = np.full((1, width), -5, np.int32)
        tokens[0, :count] = sequence[done : done + count]
        _, seen, cache = call(params, jnp.asarray(tokens), cache, slots, ids(count), capture=("choices",))
        parts.append(jax.tree.map(np.asarray, seen["choices"]).tokens(0, count))
        done += count
    wanted = whole()[1]["choices"]
    jax.tree.map(np.testing.assert_array_equal, Choices.join(parts), wanted)


@pytest.mark.slow
def test_a_pass_uses_the_choices_that_it_is_given():
    """Those of another text, so that few are what it would choose: the same come out, and they are what is computed."""
    params, sequence = model_a(), jnp.asarray(recorded("a")["ids"], jnp.int32)[None]
    choices = jax.tree.map(jnp.asarray, whole()[1]["choices"])
    other = (sequence + 13) % params.cfg.vocab_size
    count = ids(sequence.shape[1])
    logits, seen, _ = call(params, other, *empty(params), count, choices)
    jax.tree.map(np.testing.assert_array_equal, seen["choices"], choices)
    own, free, _ = call(params, other, *empty(params), count, None)
    assert np.mean(free["choices"].experts != choices.experts) > 0.3
    assert np.mean(free["choices"].entries != choices.entries) > 0.3
    assert np.abs(logits - own).max() > 0.1
    trained = forward_sequences(params, other, choices=choices)
    close(trained, logits)
    # Weights are the scores of the chosen ones, in proportion.
    x, gate = np.asarray(seen["inputs"][4, 1, 0], np.float64), np.asarray(params.blocks[4].router.gate, np.float64)
    scores = np.sqrt(np.log1p(np.exp(x @ gate.T)))
    picked = np.take_along_axis(scores, np.asarray(choices.experts[4, 0], np.int64), -1)
    close(seen["experts"].weights[4, 0], picked / picked.sum(-1, keepdims=True) * params.cfg.routed_scale)


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
def test_either_of_the_choices_may_be_left_to_the_pass_and_an_expert_may_be_none():
    params, rng, count = small_model(), np.random.default_rng(0), ids(60)
    sequence = jnp.asarray(rng.integers(0, params.cfg.vocab_size, (1, 60)), jnp.int32)
    logits, seen, _ = call(params, sequence, *empty(params), count)
    choices = jax.tree.map(jnp.asarray, seen["choices"])
    for part in (dataclasses.replace(choices, experts=None), dataclasses.replace(choices, entries=None)):
        again, _, _ = call(params, sequence, *empty(params), count, part, capture=())
        close(again, logits)
    without = jnp.where(choices.experts == 2, -1, choices.experts)
    _, other, _ = call(params, sequence, *empty(params), count, dataclasses.replace(choices, experts=without))
    assert not np.any(other["experts"].experts == 2)
    close(np.sum(other["experts"].weights, -1), params.cfg.routed_scale)
    nobody = dataclasses.replace(choices, experts=jnp.full_like(choices.experts, -1))
    _, other, _ = call(params, sequence, *empty(params), count, nobody)
    assert not np.any(other["experts"].weights)
    assert np.all(np.isfinite(other["streams"]))


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
def test_streams_that_change_places_after_the_last_layer_change_the_logits():
    params, rng = small_model(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, params.cfg.vocab_size, (2, 9)), jnp.int32)
    cache, slots = empty(params, rows=2)
    count, last = ids(9, 9), params.cfg.num_layers - 1
    swapped, seen, _ = call(params, tokens, cache, slots, count, None, ids(last), names=("streams",))
    # The layer's number is an argument of the same program: what the patch holds is not kept from the last call.
    never, other, _ = call(params, tokens, cache, slots, count, None, ids(-1), names=("streams",))
    close(swapped, never[::-1])
    assert not np.allclose(swapped, never, atol=0.1)
    close(seen["streams"][last], other["streams"][last][::-1])


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
@pytest.mark.parametrize(
    "name", first_of(["inputs.attention", "mixing.experts", "outputs", "experts", "head"], count=0)
)
def test_a_patch_is_what_the_pass_goes_on_with(name):
    """Twice or three times the value of a layer: what is captured, and what is computed of it."""
    params, rng = small_model(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, params.cfg.vocab_size, (1, 9)), jnp.int32)
    at = params.cfg.num_layers if name == "head" else 1

    def more(value, layer):
        if layer != at:
            return value
        if name == "experts":
            return dataclasses.replace(value, weights=3 * value.weights)
        return dataclasses.replace(value, carry=2 * value.carry) if name == "mixing.experts" else 2 * value

    def pass_of(**looking):
        cache, slots = empty(params)
        cache, _ = d4.prepare_forward(cache, slots, ids(9))
        logits, _, _, seen = forward(params, tokens, cache, slots, ids(9), "all", capture=NAMES, **looking)
        assert logits is not None
        return np.asarray(logits[0]), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), seen)

    (plain, before), (logits, after) = pass_of(), pass_of(intervene={name: more})
    if name == "head":
        close(logits, 2 * plain)
        return
    np.testing.assert_array_equal(after["streams"][0], before["streams"][0])
    assert np.abs(logits - plain).max() > 1e-3
    if name == "mixing.experts":
        close(after["mixing"].carry[1, 1], 2 * before["mixing"].carry[1, 1])
        close(after["inputs"][1, 1], before["inputs"][1, 1])
    elif name == "inputs.attention":
        close(after["inputs"][1, 0], 2 * before["inputs"][1, 0])
    elif name == "outputs":
        close(after["outputs"][1, 0], 2 * before["outputs"][1, 0])
    else:
        close(after["experts"].weights[1], 3 * before["experts"].weights[1])
    # From the streams before the layer's experts, by hand: those after its attention.
    old = before["streams"][0]
    for i in range(2):
        given = after["mixing"].post[1, i][..., None] * after["outputs"][1, i][..., None, :]
        old = given + np.einsum("btjl,btjh->btlh", after["mixing"].carry[1, i], old)
    close(after["streams"][1], old)


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
@pytest.mark.two_programs
def test_captures_and_patches_that_change_nothing_give_the_same_bits():
    params, rng = small_model(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, params.cfg.vocab_size, (2, 60)), jnp.int32)
    cache, slots = empty(params, rows=2)
    count = ids(60, 41)
    cache, _ = d4.prepare_forward(cache, slots, count)
    plain = forward(params, tokens, cache, slots, count, "all")
    captured = forward(params, tokens, cache, slots, count, "all", capture=NAMES)[:3]
    unchanged = {name: lambda value, layer: value for name in NAMES if name != "choices"}
    patched = forward(params, tokens, cache, slots, count, "all", intervene=unchanged)
    for each in captured, patched:
        jax.tree.map(np.testing.assert_array_equal, each, plain)


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
def test_the_derivative_by_a_vector_that_is_added_to_streams_is_right():
    params, rng = small_model(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, params.cfg.vocab_size, (1, 9)), jnp.int32)

    @jax.jit
    def loss(vector):
        def add(value, layer):
            return value + jnp.broadcast_to(vector, value.shape) if layer == 0 else value

        return jnp.mean(jax.nn.logsumexp(forward_sequences(params, tokens, intervene={"streams": add}), -1))

    vector = jnp.asarray(rng.standard_normal(params.cfg.hidden_size) * 0.1, jnp.float32)
    way = jnp.asarray(rng.standard_normal(params.cfg.hidden_size), jnp.float32)
    slope = jnp.vdot(jax.grad(loss)(vector), way)
    numeric = (loss(vector + 1e-2 * way) - loss(vector - 1e-2 * way)) / 2e-2
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(slope, numeric, rtol=0.02)  # f32, and steps that are not small


@pytest.mark.sweep(guard="test_captured_quantities_equal_the_recorded_ones")
def test_drafts_are_captured_as_other_tokens_are():
    params, sequence = model_a(), jnp.asarray(recorded("a")["ids"], jnp.int32)[None]
    cache, slots = empty(params)
    _, _, cache = call(params, sequence[:, :WIDTH], cache, slots, ids(WIDTH), capture=("choices",))
    cache, _ = d4.prepare_forward(cache, slots, ids(4))
    *_, seen = stage_forward(params, sequence[:, WIDTH : WIDTH + 4], cache, slots, ids(4), capture=NAMES)
    jax.tree.map(np.testing.assert_array_equal, seen["choices"], whole()[1]["choices"].tokens(WIDTH, 4))
    close(seen["streams"], whole()[1]["streams"][:, :, WIDTH : WIDTH + 4])


@pytest.mark.slow
def test_what_is_not_named_leaves_nothing_in_the_program():
    """The text of a pass with captures but without their results has no product more, and of others nothing is left."""
    params = small_model()
    cache, slots = empty(params)

    def lowered(**looking):
        def run(params, tokens, cache):
            return forward(params, tokens, cache, slots, ids(5), "all", **looking)[:3]

        return jax.jit(run).lower(params, jnp.zeros((1, 5), jnp.int32), cache).as_text()

    plain = lowered()
    assert lowered(capture=()) == plain == lowered(intervene={}, choices=None)
    assert lowered(capture=("streams", "mixing", "inputs", "outputs", "experts", "head")) == plain
    assert lowered(capture=NAMES).count("dot_general") == plain.count("dot_general")


@dataclasses.dataclass
class Unhashable:
    """A function with state that compares equal to another: such a dataclass has no hash."""

    factor: float = 2.0

    def __call__(self, value, layer):
        return value * self.factor


@pytest.mark.parametrize(
    ("looking", "message"),
    [
        (dict(capture=("stream",)), "capture: 'stream' is none of streams, mixing, inputs,"),
        (dict(capture=("streams.attention",)), "capture: 'streams.attention' is none of"),
        (dict(capture="streams"), r"capture must be names, such as \('streams',\), got 'streams'"),
        (dict(capture=3), r"capture must be names, such as \('streams',\), got 3"),
        (dict(capture=(3,)), "a name in capture: expected a str, got int"),
        (dict(intervene=[("streams", max)]), "intervene: expected a Mapping, got list"),
        (dict(intervene={"choices": lambda value, layer: value}), "choices are given as choices="),
        (dict(intervene={"streams": [max]}), r"intervene\['streams'\] must be a function of .*, got list"),
        (dict(intervene={"streams": np.ones(3)}), r"intervene\['streams'\] must be a function of .*, got ndarray"),
        (dict(intervene={"streams": Unhashable()}), r"intervene\['streams'\] must be hashable, .*; Unhashable is not"),
        (dict(intervene={"streams": lambda value, layer: value[0]}), r"intervene\['streams'\], of layer 0: expected"),
        (dict(choices=3), "choices must be Choices, got int"),
    ],
)
def test_bad_arguments_are_named(looking, message):
    params = small_model()
    cache, slots = empty(params)
    with pytest.raises(ValueError, match=message):
        forward(params, ids(0)[None], cache, slots, ids(1), **looking)


def test_choices_of_another_pass_are_named_and_training_has_no_cache_to_look_at():
    params = small_model()
    cache, slots = empty(params)
    choices = Choices(experts=jnp.zeros((2, 1, 3, 2), jnp.int8), entries=None)
    with pytest.raises(
        AssertionError, match=r"choices.experts: expected .* \[L=2, B=1, T=1, k=2\], got int8\[2, 1, 3, 2\]"
    ):
        forward(params, ids(0)[None], cache, slots, ids(1), choices=choices)
    with pytest.raises(ValueError, match="capture: 'picks' is of a pass over a cache, such as forward"):
        forward_sequences(params, ids(0)[None], capture=("picks",))
    with pytest.raises(ValueError, match="intervene: 'entries' is of a pass over a cache, such as forward"):
        forward_sequences(params, ids(0)[None], intervene={"entries": lambda value, layer: value})


@pytest.mark.parametrize("argument", ["captures", "has_cache"])
def test_an_argument_that_a_pass_does_not_have_is_named(argument):
    misspelt: Any = {argument: ("streams",)}
    message = f"unexpected keyword argument '{argument}': beside its own arguments a pass takes capture, intervene and"
    with pytest.raises(TypeError, match=message):
        forward_sequences(small_model(), ids(0)[None], **misspelt)
