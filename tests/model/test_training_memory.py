"""The memory of a training step: what XLA compiles stays within what ``plan_memory`` says, and near it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dsv4jax as d4
from dsv4jax.model import (
    ModelConfig,
    ModelParams,
    StepMemory,
    TrainingStep,
    combine,
    forward_sequences,
    partition,
    plan_memory,
    random_model,
    with_deltas,
)
from dsv4jax.model.memory import GIB
from dsv4jax.model.plain import experts
from tests.support.cases import first_of

RANKS = {"q_b": 8, "o_b": 8, "experts": 4}
TOKENS = 512


def config(*ratios: int, experts: int = 4, vocab: int = 512) -> ModelConfig:
    """Sizes between those of the tiny model and of real ones, so that what is constant does not count."""
    attention = d4.DSV4Config(
        hidden_size=512,
        num_heads=8,
        head_dim=128,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=128,
        indexer_heads=8,
        indexer_head_dim=64,
        indexer_top_k=64,
        compress_ratios=ratios,
    )
    return ModelConfig(
        attention=attention,
        vocab_size=vocab,
        expert_width=256,
        num_experts=experts,
        experts_per_token=2,
        num_hash_layers=0,
    )


def planned(cfg: ModelConfig, **sizes: Any) -> StepMemory:
    plan = plan_memory(cfg, drafts=0, training=TrainingStep(ranks=RANKS, **({"tokens": TOKENS} | sizes))).training
    assert plan is not None
    return plan


@functools.cache
def compiled(cfg: ModelConfig) -> Any:
    """What the compiled derivative by the deltas takes."""
    return lowered(cfg).compile().memory_analysis()


def lowered(cfg: ModelConfig) -> Any:
    """The derivative by the deltas."""

    def make() -> ModelParams:
        return with_deltas(random_model(cfg, jax.random.key(0), drafts=0), RANKS, jax.random.key(1))

    deltas, rest = partition(jax.eval_shape(make), "deltas")

    def loss(deltas: Any, rest: Any, ids: jax.Array) -> jax.Array:
        likely = jax.nn.log_softmax(forward_sequences(combine(deltas, rest), ids[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(likely, ids[:, 1:, None], -1))

    ids = jax.ShapeDtypeStruct((1, TOKENS + 1), jnp.int32)
    return jax.jit(jax.grad(loss)).lower(deltas, rest, ids)


@pytest.mark.sweep(guard="test_a_loop_over_experts_keeps_no_record_of_its_steps")
@pytest.mark.parametrize(
    "cfg",
    first_of(
        [
            pytest.param(config(4, 128), id="two layers"),
            pytest.param(config(0, 0, 0, 0, 0), id="five layers"),
            pytest.param(config(0, 4, experts=64), id="many experts"),
            pytest.param(config(0, vocab=65536), id="many words"),
        ],
        count=0,
    ),
)
def test_a_step_takes_what_was_planned_and_not_much_less(cfg):
    plan, found = planned(cfg), compiled(cfg)
    assert found.temp_size_in_bytes <= plan.temporaries
    assert plan.temporaries <= 2 * found.temp_size_in_bytes
    assert found.output_size_in_bytes == pytest.approx(plan.gradients, rel=0.01)  # and a few bytes of structure


@pytest.mark.slow
def test_a_loop_over_experts_keeps_no_record_of_its_steps(monkeypatch):
    """One tile at a time. A mask of all outputs for each step took 4 GiB at V4-Flash's sizes."""
    monkeypatch.setattr(experts, "WIDE", 1)
    cfg = config(0, experts=64)
    pairs = TOKENS * cfg.experts_per_token
    steps = cfg.num_experts + pairs // experts.TILE
    text = lowered(cfg).as_text()
    assert f"tensor<{steps}x1x{experts.TILE}x" in text, "numbers of pairs are kept by step"
    assert f"tensor<{steps}x{pairs}x{cfg.attention.hidden_size}x" not in text


def test_its_parts_grow_with_what_they_are_of():
    plan = planned(config(4, 128))
    assert planned(config(4, 128), tokens=2 * TOKENS).streams == 2 * plan.streams
    assert planned(config(4, 128), batch=2).temporaries == planned(config(4, 128), tokens=2 * TOKENS).temporaries
    wider = planned(config(4, 128, vocab=1024)).head - plan.head
    assert wider == 512 * 4 * (3 * TOKENS + 512)  # logits thrice, and the head
    assert planned(config(4, 128), moments=1).moments == plan.deltas == plan.gradients
    assert planned(config(4, 128)).total == plan.deltas + plan.gradients + plan.moments + plan.temporaries
    more = planned(config(4, 128, 4))
    assert (more.layer - 2 * more.deltas, more.head) == (plan.layer - 2 * plan.deltas, plan.head)


def test_the_printed_plan_has_the_step():
    """Of all of V4-Flash, for one sequence of 4,096 tokens."""
    text = str(plan_memory(ModelConfig.flash(), training=TrainingStep(ranks=RANKS)))
    step = plan_memory(ModelConfig.flash(), training=TrainingStep(ranks=RANKS)).training
    assert step is not None
    assert f"a training step      {step.total / GIB:8.1f} GiB" in text
    assert "training" not in str(plan_memory(ModelConfig.flash()))


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match="tokens must be an integer of at least 1, got 0"):
        TrainingStep(ranks=RANKS, tokens=0)
    with pytest.raises(ValueError, match="no weight of this model is named 'q'"):
        plan_memory(ModelConfig.tiny(), training=TrainingStep(ranks={"q": 1}))
