"""Experts in the host's memory: the same tokens, and only what is picked is copied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.layer.backend import XLA
from dsv4jax.model import Generator, ModelConfig, ModelParams, generate, init_caches, load_model, random_model
from dsv4jax.model.inside.host_memory import FEW, bound_like, fetched, is_on_host, placed
from dsv4jax.model.ops import EXPERTS, Picks
from dsv4jax.model.plain.experts import mixed
from tests.support.cases import first_of
from tests.support.models import FULL, MODEL_A, MODEL_Q, drawn_model, recorded, small_model

CFG = ModelConfig.tiny()


def places(params: ModelParams) -> list[bool]:
    """Whether the experts of each layer are on the host, all leaves alike."""
    found = [set(map(is_on_host, jax.tree.leaves((b.experts.gate_up, b.experts.down)))) for b in params.blocks]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


@pytest.mark.parametrize("weights", first_of(["stored", "f32"]))
@pytest.mark.parametrize("tokens", [1, 3, FEW])
def test_experts_give_the_same_bits_wherever_they_are(weights, tokens):
    params = drawn_model(CFG, 0, weights, drafts=0)
    block = params.blocks[-1]
    moved = placed(block, on_host=True).experts
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, CFG.hidden_size)), params.embedding.dtype)
    numbers = np.sort([rng.permutation(CFG.num_experts)[: CFG.experts_per_token] for _ in range(tokens)])
    numbers[-1] = CFG.num_experts  # padding
    picks = Picks(experts=jnp.asarray(numbers, jnp.int32), weights=jnp.asarray(rng.random(numbers.shape), jnp.float32))

    @jax.jit
    def outputs(experts):
        given, chosen, cfg = fetched(experts, picks, CFG)
        assert not any(map(is_on_host, jax.tree.leaves(given)))
        return mixed(EXPERTS.of(XLA, cfg, given, x.dtype), x, chosen, given, cfg).sum()

    np.testing.assert_array_equal(outputs(moved), outputs(block.experts))


def test_a_few_picks_are_all_that_is_copied():
    experts = placed(drawn_model(CFG, 0, drafts=0).blocks[0], on_host=True).experts

    def sizes(tokens: int) -> set[int]:
        shape = tokens, CFG.experts_per_token
        picks = Picks(experts=jnp.zeros(shape, jnp.int32), weights=jnp.ones(shape))
        given = jax.eval_shape(lambda: fetched(experts, picks, CFG)[0])
        return {leaf.shape[0] for leaf in jax.tree.leaves((given.gate_up, given.down))}

    most = FEW // CFG.experts_per_token
    assert sizes(most) == {most * CFG.experts_per_token}
    assert sizes(most + 1) == {CFG.num_experts}


def test_a_layers_copy_waits_for_its_picks():
    """Several layers' copies at once would need memory that is not there: 10 GiB with V4-Flash."""
    experts = placed(drawn_model(CFG, 0, drafts=0).blocks[0], on_host=True).experts
    shape = FEW, CFG.experts_per_token

    def copied(numbers):
        picks = Picks(experts=numbers, weights=jnp.ones(shape))
        return jax.tree.leaves(fetched(experts, picks, CFG)[0])

    steps = jax.make_jaxpr(copied)(jnp.zeros(shape, jnp.int32)).jaxpr.eqns
    (wait,) = [step for step in steps if step.primitive.name == "optimization_barrier"]
    copies = [step for step in steps if step.primitive.name == "device_put"]
    assert copies
    assert {source for step in copies for source in step.invars} <= set(wait.outvars)


@pytest.mark.sweep(guard="test_experts_give_the_same_bits_wherever_they_are")
@pytest.mark.parametrize(("name", "folder"), first_of([("q", MODEL_Q), ("a", MODEL_A)], count=0))
def test_the_recorded_tokens_are_made_with_experts_on_the_host(name, folder):
    wanted, params = recorded(name), load_model(folder, dtype=jnp.float32, host_experts=2)
    assert places(params) == [layer < 2 for layer in range(params.cfg.num_layers)]
    first = int(wanted["prompt_len"])
    prompt, expected = wanted["ids"][:first].tolist(), wanted["ids"][first:].tolist()
    caches = init_caches(params.cfg, 1, 512, **FULL)
    assert generate(params, [prompt], len(expected), stop_tokens=(), caches=caches).tokens == [expected]


@pytest.mark.slow
def test_models_are_made_and_loaded_with_experts_on_the_host():
    made = random_model(CFG, jax.random.key(3), drafts=0)
    moved = random_model(CFG, jax.random.key(3), drafts=0, host_experts=1)
    assert places(moved) == [layer < 1 for layer in range(CFG.num_layers)]
    jax.tree.map(np.testing.assert_array_equal, made, moved)
    assert places(load_model(MODEL_Q, host_experts=1))[:2] == [True, False]


def test_weights_of_numpy_are_bound_to_no_device():
    params, count = drawn_model(CFG, 0, drafts=0), jnp.int32(1)
    of_numpy = jax.tree.map(np.asarray, params)
    assert bound_like(of_numpy, count) is count
    moved = dataclasses.replace(of_numpy, blocks=(placed(params.blocks[0], on_host=True), *of_numpy.blocks[1:]))
    assert bound_like(moved, count).committed


@pytest.mark.slow
def test_weights_of_numpy_make_the_texts_of_the_same_weights_on_a_device():
    of_numpy = jax.tree.map(np.asarray, small_model())
    found, wanted = (Generator(each, context=64).generate([[1]], 2).tokens for each in (of_numpy, small_model()))
    assert found == wanted


@pytest.mark.parametrize(
    ("layers", "message"),
    [(-1, "host_experts must be"), (CFG.num_layers + 1, f"the model has {CFG.num_layers} layers, got")],
)
def test_more_layers_than_there_are_cannot_move(layers, message):
    with pytest.raises(ValueError, match=message):
        random_model(CFG, jax.random.key(0), host_experts=layers)


def test_a_mesh_keeps_no_experts_on_the_host():
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices("cpu")[:2])
    with pytest.raises(ValueError, match="is for one device"):
        random_model(CFG, jax.random.key(0), host_experts=1, mesh=mesh)


@pytest.mark.sweep(guard="test_one_program_serves_any_prompts")
def test_programs_of_a_generator_are_compiled_once(caplog):
    """Weights in the host's memory are bound to their device, and so is what is computed with them.

    Threads compile the programs ahead. What is logged here is what the calls would compile once more.
    """
    generator = Generator(random_model(CFG, jax.random.key(0), drafts=0, host_experts=1), 1, 64)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for prompt in ([1, 2, 3], [4, 5, 6, 7]):
            generator.generate([prompt], 2, stop_tokens=[])
    for program in ("run", "store"):
        assert f"Finished XLA compilation of jit({program})" not in caplog.text
