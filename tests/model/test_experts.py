"""Experts: the tiled products give what a loop over tokens and experts gives, and never widen all experts at once."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4jax.layer import stored_products
from dsv4jax.model import ModelConfig, Picks
from dsv4jax.model.ops import EXPERTS
from dsv4jax.model.params import Experts, StoredExperts, check_model
from dsv4jax.model.plain import experts as module
from dsv4jax.model.plain.experts import mixed
from tests.support.cases import first_of
from tests.support.models import drawn_model, relative_rms
from tests.support.second_derivatives import (
    SAME,
    assert_symmetric,
    check_second_derivative,
    plainly_through,
    relative_error,
    with_second,
)

CFG = ModelConfig.tiny(num_experts=8, experts_per_token=3)


def mix_experts(x: jax.Array, picks: Picks, experts: Experts, cfg: ModelConfig) -> jax.Array:
    return mixed(EXPERTS["xla"], x, picks, experts, cfg).sum()


def experts_of(weights: str, cfg: ModelConfig = CFG, activations: str = "bf16") -> Experts:
    return drawn_model(cfg, 0, weights, activations=activations, drafts=0).blocks[0].experts


def random_picks(rng: np.random.Generator, tokens: int, cfg: ModelConfig = CFG, favourite: int | None = None) -> Picks:
    """Distinct experts per token, in order; the last token is padding. All pick ``favourite``, if there is one."""
    chances = rng.random((tokens, cfg.num_experts))
    if favourite is not None:
        chances[:, favourite] = 2
    picked = np.sort(np.argsort(-chances, axis=1)[:, : cfg.experts_per_token], axis=1)
    weights = rng.random(picked.shape)
    picked[-1], weights[-1] = cfg.num_experts, 0
    return Picks(experts=jnp.asarray(picked, jnp.int32), weights=jnp.asarray(weights, jnp.float32))


def widened(weight, expert: int) -> np.ndarray:
    if isinstance(weight, StoredExperts):
        widen = jax.jit(StoredExperts.widened, static_argnames="dtype")
        return np.asarray(widen(weight, np.asarray([expert], np.int32), dtype=jnp.float32)[0], np.float64)
    return np.asarray(weight[expert], np.float64)


def one_by_one(x: np.ndarray, picks: Picks, experts: Experts, cfg: ModelConfig) -> np.ndarray:
    """The routed part, token by token, in f64."""

    def apply(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = np.split(gate_up @ x, 2)
        gate = np.minimum(gate, cfg.swiglu_limit)
        return down @ (gate / (1 + np.exp(-gate)) * np.clip(up, -cfg.swiglu_limit, cfg.swiglu_limit))

    out = np.zeros(x.shape)
    for token, (numbers, weights) in enumerate(zip(np.asarray(picks.experts), np.asarray(picks.weights), strict=True)):
        for expert, weight in zip(numbers, weights, strict=True):
            if expert < cfg.num_experts:
                part = apply(x[token], widened(experts.gate_up, expert), widened(experts.down, expert))
                out[token] += float(weight) * part
    return out


def mix(x, picks, experts):
    """``mix_experts``, traced anew, because tests change the size of tiles."""
    return jax.jit(lambda x, picks, experts: mix_experts(x, picks, experts, CFG))(x, picks, experts)


def routed(x, picks, experts):
    """``mix_experts`` without the shared expert."""
    return mix(x, picks, experts) - mix(x, padding(x), experts)


def padding(x) -> Picks:
    shape = (x.shape[0], CFG.experts_per_token)
    return Picks(experts=jnp.full(shape, CFG.num_experts, jnp.int32), weights=jnp.zeros(shape))


@pytest.mark.parametrize(
    ("tokens", "tile", "at_once", "favourite", "weights"),
    first_of(
        [
            pytest.param(19, 4, 3, None, "stored", id="in tiles, some at a time-stored"),
            pytest.param(19, 4, 3, None, "f32", id="in tiles, some at a time-f32"),
            pytest.param(1, 128, 8, None, "stored", id="one token"),
            pytest.param(19, 128, 64, None, "f32", id="in one go"),
            pytest.param(19, 4, 1, 5, "stored", id="one expert has every token"),
        ],
        count=0,
    ),
)
def test_tiles_give_what_a_loop_gives(monkeypatch, tokens, tile, at_once, favourite, weights):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "WIDE", at_once * 3 * CFG.expert_width * CFG.hidden_size)
    rng = np.random.default_rng(tokens + tile)
    experts, picks = experts_of(weights), random_picks(rng, tokens + 1, favourite=favourite)
    x = rng.standard_normal((tokens + 1, CFG.hidden_size)).astype(np.float32)
    found = np.asarray(routed(jnp.asarray(x), picks, experts))
    # Sums of 64 and 32 products in f32; outputs of rms 1. The shared expert's part is added and taken away again.
    np.testing.assert_allclose(found, one_by_one(x, picks, experts, CFG), rtol=0, atol=1e-5)
    assert np.abs(found[:-1]).max() > 0.1


def test_tokens_do_not_depend_on_each_other_and_nan_stays_in_its_row():
    rng = np.random.default_rng(3)
    experts, picks = experts_of("stored"), random_picks(rng, 6)
    x = jnp.asarray(rng.standard_normal((6, CFG.hidden_size)), jnp.float32)
    good, bad = mix(x, picks, experts), mix(x.at[2].set(jnp.nan), picks, experts)
    assert np.isnan(bad[2]).all()
    np.testing.assert_array_equal(np.delete(good, 2, 0), np.delete(bad, 2, 0))


def test_an_expert_that_no_token_picks_may_hold_anything():
    rng = np.random.default_rng(4)
    experts, picks = experts_of("f32"), random_picks(rng, 5)
    unused = sorted(set(range(CFG.num_experts)) - set(np.asarray(picks.experts).ravel().tolist()))
    if not unused:
        picks = Picks(experts=jnp.minimum(picks.experts, 6), weights=picks.weights)
        unused = [7]
    assert isinstance(experts.gate_up, jax.Array)
    spoiled = Experts(
        gate_up=experts.gate_up.at[jnp.asarray(unused)].set(jnp.nan),
        down=experts.down,
        shared_gate_up=experts.shared_gate_up,
        shared_down=experts.shared_down,
    )
    x = jnp.asarray(rng.standard_normal((5, CFG.hidden_size)), jnp.float32)
    np.testing.assert_array_equal(mix(x, picks, experts), mix(x, picks, spoiled))


@pytest.mark.slow
def test_rounded_activations_are_near_and_not_equal():
    rng = np.random.default_rng(5)
    x, picks = jnp.asarray(rng.standard_normal((9, CFG.hidden_size)), jnp.float32), random_picks(rng, 9)
    exact = np.asarray(mix(x, picks, experts_of("stored")))
    rounded = np.asarray(mix(x, picks, experts_of("stored", activations="fp8")))
    # E4M3 has three bits of mantissa, so an input is off by up to 2^-4, and by 0.025 in rms; two products follow.
    assert 0.01 < relative_rms(rounded, exact) < 0.06


@pytest.mark.parametrize("at_once", [64, 2])
def test_derivatives_of_wide_weights_are_those_of_the_dense_sum(monkeypatch, at_once):
    monkeypatch.setattr(module, "WIDE", at_once * 3 * CFG.expert_width * CFG.hidden_size)
    rng = np.random.default_rng(6)
    experts, picks = experts_of("f32"), random_picks(rng, 7)
    x = jnp.asarray(rng.standard_normal((7, CFG.hidden_size)), jnp.float32)
    direction = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)

    def tiled(x, experts):
        return jnp.sum(mix(x, picks, experts) * direction)

    def dense(x, experts):
        share = (
            jnp.zeros((7, CFG.num_experts)).at[jnp.arange(7)[:, None], picks.experts].add(picks.weights, mode="drop")
        )
        inner = module.swiglu(jnp.einsum("th,eoh->teo", x, experts.gate_up), CFG.swiglu_limit)
        mixed = jnp.einsum("te,tei,ehi->th", share, inner, experts.down)
        shared = module.swiglu(x @ experts.shared_gate_up.T, CFG.swiglu_limit) @ experts.shared_down.T
        return jnp.sum((mixed + shared) * direction)

    with jax.default_matmul_precision("float32"):  # of the dense sum; a GPU's default is TF32
        found, wanted = (jax.jit(jax.grad(function, (0, 1)))(x, experts) for function in (tiled, dense))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Sums of f32 in another order, in derivatives of rms about 1.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_interleaved_codes_mean_the_same_numbers():
    """They are what models are made of, in another order for each kind of activations."""
    made, rounded = (experts_of("stored", activations=activations).down for activations in ("bf16", "fp8"))
    assert isinstance(made, StoredExperts)
    assert isinstance(rounded, StoredExperts)
    assert (made.interleaved_for, rounded.interleaved_for) == ("bf16", "fp8")
    assert not np.array_equal(made.codes, rounded.codes)
    np.testing.assert_array_equal(made.in_order(made.codes), rounded.in_order(rounded.codes))
    for expert in range(CFG.num_experts):
        np.testing.assert_array_equal(widened(made, expert), widened(rounded, expert))
    for one, other in ((made, rounded), (rounded, made)):
        found = one.with_activations(other.activations)
        assert (found.interleaved_for, found.activations) == (other.interleaved_for, other.activations)
        np.testing.assert_array_equal(found.codes, other.codes)
    assert made.for_kernels() is made
    assert rounded.for_kernels() is rounded
    narrow = dataclasses.replace(rounded, codes=rounded.codes[..., :4], interleaved_for=None)
    assert narrow.for_kernels() is narrow  # 8 inputs are half of a group
    params = drawn_model(CFG, 0, drafts=0)
    block = params.blocks[0]
    wrong = dataclasses.replace(made, codes=jnp.zeros(made.shape, jnp.float8_e4m3fn))
    experts = dataclasses.replace(block.experts, down=wrong)
    params = dataclasses.replace(params, blocks=(dataclasses.replace(block, experts=experts), *params.blocks[1:]))
    with pytest.raises(ValueError, match=r"blocks\[0\].experts.down: interleaved codes are FP4"):
        check_model(params)
    for_none = dataclasses.replace(block.experts, down=dataclasses.replace(made, interleaved_for="f32"))
    params = dataclasses.replace(params, blocks=(dataclasses.replace(block, experts=for_none), *params.blocks[1:]))
    with pytest.raises(ValueError, match=r"experts.down.interleaved_for must be one of \['bf16', 'fp8'\], got 'f32'"):
        check_model(params)


@pytest.mark.parametrize(("activations", "at_once"), first_of([("bf16", 64), ("fp8", 64), ("bf16", 2)]))
def test_derivatives_by_x_go_through_stored_weights_and_those_by_the_weights_are_refused(
    monkeypatch, activations, at_once
):
    """In one go, and in a loop, as large models have it."""
    monkeypatch.setattr(module, "WIDE", at_once * 3 * CFG.expert_width * CFG.hidden_size)
    rng = np.random.default_rng(8)
    experts, picks = experts_of("stored", activations=activations), random_picks(rng, 5)
    x = jnp.asarray(rng.standard_normal((5, CFG.hidden_size)), jnp.float32)

    def total(x, experts):
        return jnp.sum(mix(x, picks, experts) ** 2)

    def wide(weight):
        everything = jnp.arange(CFG.num_experts, dtype=jnp.int32)
        return (
            weight.widened(everything, jnp.float32)
            if isinstance(weight, StoredExperts)
            else weight.widened(jnp.float32)
        )

    widened = jax.tree.map(jax.jit(wide), experts, is_leaf=lambda leaf: hasattr(leaf, "widened"))
    found, wanted = (jax.jit(jax.grad(total))(x, one) for one in (experts, widened))
    # With bf16 activations only the order of sums differs. Rounded inputs move the gates, by up to 2^-4 of an input.
    assert relative_rms(np.asarray(found), np.asarray(wanted)) < (1e-5 if activations == "bf16" else 0.1)
    with pytest.raises(ValueError, match="experts that are stored as FP8 or FP4 have no derivative"):
        jax.grad(total, 1, allow_int=True)(x, experts)


@pytest.mark.parametrize(
    ("weights", "at_once"), first_of([("stored", 2), ("f32", 2), ("f32", 64), ("stored", 64)], slow=1)
)
def test_second_derivatives_by_x_are_differences_of_the_gradient_and_symmetric(monkeypatch, weights, at_once):
    """In one go, and in a loop. Without the limit of SwiGLU, at which a derivative jumps."""
    monkeypatch.setattr(module, "WIDE", at_once * 3 * CFG.expert_width * CFG.hidden_size)
    rng, cfg = np.random.default_rng(9), dataclasses.replace(CFG, swiglu_limit=0.0)
    experts, picks = experts_of(weights), random_picks(rng, 4)
    x = jnp.asarray(rng.standard_normal((4, CFG.hidden_size)), jnp.float32)
    check_second_derivative(lambda x: jnp.sum(jnp.sin(mix_experts(x, picks, experts, cfg))), x)


@pytest.mark.slow
def test_second_derivatives_by_x_go_straight_through_the_rounding_of_inputs(monkeypatch):
    """As those of the same experts that round without ``straight_through``, but for its last bit."""
    rng, experts = np.random.default_rng(10), experts_of("stored", activations="fp8")
    picks = random_picks(rng, 4)
    x, along, other = (jnp.asarray(rng.standard_normal((4, CFG.hidden_size)), jnp.float32) for _ in range(3))

    def second() -> Any:
        return with_second(lambda x: jnp.sum(jnp.sin(mix(x, picks, experts))))

    found = second()
    (_, of_along), (_, of_other) = found(x, along), found(x, other)
    monkeypatch.setattr(module, "straight_through", plainly_through)
    monkeypatch.setattr(stored_products, "straight_through", plainly_through)
    assert relative_error(of_along, second()(x, along)[1]) < SAME
    assert_symmetric(along, of_along, other, of_other)


@pytest.mark.parametrize("tokens", [1, 40])
def test_no_program_widens_all_experts_at_once(monkeypatch, tokens):
    cfg = ModelConfig.tiny(num_experts=64, experts_per_token=4)
    monkeypatch.setattr(module, "WIDE", 4 * 3 * cfg.expert_width * cfg.hidden_size)
    experts = jax.eval_shape(lambda: experts_of("stored", cfg))
    picks = jax.eval_shape(lambda: random_picks(np.random.default_rng(0), tokens, cfg))
    x = jax.ShapeDtypeStruct((tokens, cfg.hidden_size), jnp.bfloat16)
    hlo = (
        jax.jit(lambda x, picks, experts: mix_experts(x, picks, experts, cfg))
        .lower(x, picks, experts)
        .compile()
        .as_text()
    )
    assert hlo is not None
    shapes = re.findall(r"(?:f32|bf16|f16)\[([\d,]+)\]", hlo)
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest <= 4 * 2 * cfg.expert_width * cfg.hidden_size < 64 * cfg.expert_width * cfg.hidden_size


def test_reverse_mode_keeps_no_wide_copy_of_all_experts(monkeypatch):
    cfg = ModelConfig.tiny(num_experts=64, experts_per_token=4)
    monkeypatch.setattr(module, "WIDE", 2 * 3 * cfg.expert_width * cfg.hidden_size)
    experts = jax.eval_shape(lambda: experts_of("stored", cfg))
    picks = jax.eval_shape(lambda: random_picks(np.random.default_rng(0), 8, cfg))
    x = jax.ShapeDtypeStruct((8, cfg.hidden_size), jnp.float32)
    grad = jax.jit(jax.grad(lambda x, picks, experts: jnp.sum(mix_experts(x, picks, experts, cfg) ** 2)))
    memory: Any = grad.lower(x, picks, experts).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 3 * cfg.num_experts * cfg.expert_width * cfg.hidden_size / 2
