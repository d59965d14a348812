"""Logits, drawn tokens and stored bytes of a whole model do not depend on the batch, bit for bit, if the caches ask."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax import generate as command
from dsv4jax.model import Generator, ModelConfig, Sampling, forward, init_caches, random_model
from tests.support.driver import TRAINED, ids
from tests.support.models import small_model
from tests.support.same_bits import Pass, compare, differ_from_alone, run_model

CFG = ModelConfig.tiny(
    attention=d4.DSV4Config.tiny(head_dim=72, compress_ratios=(0, 4, 16), hca_compression_ratio=16), vocab_size=40
)


@pytest.mark.slow
def test_a_request_gets_the_same_logits_in_any_batch():
    """Of chunks, single tokens and drafts, with hash-routed and scored experts."""
    params = random_model(CFG, jax.random.key(0), weights="f32")
    plan = d4.plan_cache(CFG.attention, max_requests=6, max_context=80, invariant=True, **TRAINED)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CFG.vocab_size, n, np.int32) for n in (23, 9, 5)]
    assert not compare(run_model(params, "xla"), plan, prompts, [(5, 6)])


@pytest.mark.sweep(guard="test_a_request_gets_the_same_logits_in_any_batch")
@pytest.mark.simulated
def test_kernels_around_attention():
    """Products, router, experts in FP4, hyper-connections and head, of chunks, single tokens and a draft."""
    attention = d4.DSV4Config.tiny(
        hidden_size=512,
        head_dim=128,
        rope_dim=64,
        q_lora_rank=128,
        num_heads=2,
        o_groups=2,
        o_lora_rank=128,
        compress_ratios=(0,),
    )
    cfg = ModelConfig.tiny(attention=attention, expert_width=512, num_hash_layers=0, vocab_size=64)
    params = random_model(cfg, jax.random.key(0), weights="stored", drafts=0)
    ops = "projections", "router", "experts", "hyper_connections", "head"
    named: dict[str, Any] = dict.fromkeys(d4.backends(), "xla") | dict.fromkeys(ops, "pallas_simulated")
    run = run_model(params, d4.OpBackends(**named))
    plan = d4.plan_cache(attention, max_requests=3, max_context=80, invariant=True, **TRAINED)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, n, np.int32) for n in (5, 4)]
    together = [Pass(rows=((1, 3), None, (0, 4)), width=5), Pass(rows=((0, 1), (1, 1)), width=3, is_draft=True)]
    assert not differ_from_alone(run, plan, prompts, together)


PROMPTS = [[1, 2, 3], [5, 0, 2, 1, 4, 3, 3, 1] * 5, [4]]


def texts(prompts: list[list[int]], rows: int, drafts: int, temperature: float) -> list[Any]:
    """Tokens and log-probabilities of each."""
    generator = Generator(small_model(), rows, drafts=drafts, invariant=True)
    made = generator.generate(prompts, 24, Sampling.of(temperature, 0.8, seed=3), stop_tokens=())
    return list(zip(made.tokens, made.log_probs, made.sampled_log_probs, strict=True))


@pytest.mark.sweep(guard="test_a_request_gets_the_same_logits_in_any_batch")
def test_what_is_drawn_does_not_depend_on_the_batch_nor_greedy_texts_on_drafts():
    drawn = texts(PROMPTS, 2, 0, 1.0)
    assert texts(PROMPTS[:1], 1, 0, 1.0) == drawn[:1]
    assert texts(PROMPTS, 2, 2, 0.0) == texts(PROMPTS, 2, 0, 0.0) != drawn


def test_the_caches_of_drafts_are_invariant_as_well():
    for invariant in (False, True):
        both = init_caches(small_model().cfg, 1, 16, 1, invariant=invariant)
        assert both.drafts is not None
        assert both.model.plan.invariant == both.drafts.plan.invariant == invariant


@pytest.mark.parametrize("enters", ["streams", "head", "experts", "linear"])
def test_a_derivative_is_refused_wherever_its_tangent_enters(enters):
    """After the last attention, too, where loops whose length is hidden have no reverse mode."""
    params, last = small_model(), small_model().blocks[-1]
    given, slots, _ = init_caches(params.cfg, 1, 16, invariant=True).admit(1)
    cache, _ = d4.prepare_forward(given.model, slots, ids(3))

    def run(params: Any = params, **looking: Any) -> Any:
        return forward(params, ids(1, 2, 3)[None], cache, slots, ids(3), **looking)

    def of_experts(down: jax.Array) -> Any:
        block = dataclasses.replace(last, experts=dataclasses.replace(last.experts, down=down))
        changed = dataclasses.replace(params, blocks=(*params.blocks[:-1], block))
        return run(changed, capture=("outputs.experts",))[3]["outputs.experts"]

    calls: dict[str, Any] = {
        "streams": (lambda x: run(intervene={"streams": lambda value, layer: value + x})[0], jnp.zeros(())),
        "head": (lambda head: run(dataclasses.replace(params, head=head))[0], params.head),
        "experts": (of_experts, last.experts.down),
        "linear": (lambda x: d4.linear(x, params.head, backend=d4.OpBackends(invariant=True)), jnp.ones((1, 64))),
    }
    call, at = calls[enters]
    for differentiate in (jax.grad(lambda x: jnp.sum(call(x))), lambda x: jax.jvp(call, (x,), (x,))):
        with pytest.raises(ValueError, match="a cache with invariant=True has no derivative"):
            jax.eval_shape(differentiate, at)


@pytest.mark.slow
def test_a_model_on_several_devices_is_refused():
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    params = random_model(small_model().cfg, jax.random.key(0), weights="f32", mesh=mesh)
    cache = init_caches(params.cfg, 1, 16, invariant=True, mesh=mesh).model
    with pytest.raises(ValueError, match="invariant=True is for a model on one device"):
        forward(params, ids(1)[None], cache, ids(0), ids(1))


def test_the_command_makes_invariant_caches_for_one_device():
    assert command.parse(["folder", "--ids", "1", "--invariant"]).invariant
    with pytest.raises(SystemExit):
        command.parse(["folder", "--ids", "1", "--invariant", "--mesh", "1x1"])
