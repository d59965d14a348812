"""What is captured, patched and chosen in passes whose layers and experts are kernels, against those in plain JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4jax as d4
from dsv4jax.model import Choices, ModelConfig, forward, init_caches, random_model
from dsv4jax.model.inside.captures import NAMES
from tests.support.driver import ids
from tests.support.machines import BACKENDS
from tests.support.models import relative_rms

# Sizes that all kernels serve.
CFG = ModelConfig.tiny(
    attention=d4.DSV4Config.tiny(
        hidden_size=512,
        head_dim=512,
        rope_dim=64,
        num_heads=64,
        o_groups=4,
        q_lora_rank=128,
        indexer_heads=64,
        indexer_top_k=6,
        compress_ratios=(4,),
    ),
    expert_width=512,
    num_experts=4,
    num_hash_layers=0,
)
STORED, NEW = 41, 4  # 10 entries, of which the indexer would pick 6; the new tokens complete another
SAME = 2**-6  # of bf16 sums in another order


@pytest.mark.sweep(guard="test_a_pass_uses_the_choices_that_it_is_given")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_show_what_they_do_and_use_what_is_chosen(backend):
    """Twice the output of attention, experts and entries drawn at random."""
    params, rng = random_model(CFG, jax.random.key(0), drafts=0), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, CFG.vocab_size, (2, STORED + NEW)), jnp.int32)
    caches, slots, _ = init_caches(CFG, 2, 128).admit(2)
    cache, _ = d4.prepare_forward(caches.model, slots, ids(STORED, STORED))
    _, _, cache = forward(params, tokens[:, :STORED], cache, slots, ids(STORED, STORED), "none", backend="xla")
    count = ids(NEW, NEW - 1)
    cache, _ = d4.prepare_forward(d4.advance(cache, slots, ids(STORED, STORED)), slots, count)
    order = np.argsort(rng.random((1, 2, NEW, CFG.num_experts)), -1)[..., : CFG.experts_per_token]
    choices = Choices(
        experts=jnp.asarray(np.where(order == 0, -1, order), jnp.int8),  # the first expert is used by none
        entries=jnp.asarray(rng.integers(-1, STORED // 4, (1, 2, NEW, 5)), jnp.int8),
    )

    def run(backend: str, **looking: Any) -> Any:
        intervene = {"outputs.attention": lambda value, layer: 2 * value}
        logits, _, after, seen = forward(
            params, tokens[:, STORED:], cache, slots, count, "all", backend=backend, intervene=intervene, **looking
        )
        return logits, seen, after

    wanted, in_jax, _ = run("xla", capture=NAMES, choices=choices)
    logits, seen, _ = run(backend, capture=NAMES, choices=choices)
    for name in ("picks", "choices", "entries"):
        for found, want in zip(*map(jax.tree.leaves, (seen[name], in_jax[name])), strict=True):
            if found.dtype.kind == "i":
                np.testing.assert_array_equal(found, want, err_msg=name)
    for token in range(NEW - 1):
        chosen = np.asarray(choices.entries)[0, :, token]
        for row, read in zip(chosen, np.asarray(seen["picks"])[0, :, token], strict=True):
            assert set(read) - {-1} == set(row) - {-1}
    real = np.arange(NEW) < np.asarray(count)[:, None]
    for found, want in zip(jax.tree.leaves(seen), jax.tree.leaves(in_jax), strict=True):
        if found.dtype.kind != "i":
            one, other = (np.nan_to_num(np.asarray(each, np.float32)) for each in (found, want))
            assert relative_rms(one, other) < SAME
    assert relative_rms(np.asarray(logits)[real], np.asarray(wanted)[real]) < SAME
    # Neither choices nor the patch are without effect.
    for other in (dataclasses.replace(choices, experts=None), dataclasses.replace(choices, entries=None)):
        own, _, _ = run("xla", choices=other, capture=())
        assert relative_rms(np.asarray(own)[real], np.asarray(wanted)[real]) > 4 * SAME
