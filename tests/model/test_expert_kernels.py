"""The kernels of experts give what the op in plain JAX gives, and say what they do not serve."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv4jax as d4
import pallas_kernels as pk
from dsv4jax.model import ModelConfig, Picks
from dsv4jax.model.ops import EXPERTS
from dsv4jax.model.params import Experts, StoredExperts
from dsv4jax.model.plain.experts import mixed, of_shared, projections_of
from dsv4jax.weights.stored import StoredWeight
from tests.support.cases import first_of
from tests.support.machines import BACKENDS
from tests.support.models import relative_rms

CFG = ModelConfig.tiny(attention=d4.DSV4Config.tiny(hidden_size=512), expert_width=512, num_experts=4)
KEY = jax.random.key(0)


def stored(outputs: int, inputs: int, seed: int, activations: str = "bf16") -> StoredExperts:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (CFG.num_experts, outputs, inputs // 2), np.uint8)
    scales = rng.integers(118, 122, (CFG.num_experts, outputs, inputs // 32), np.uint8)
    scales = jax.device_put(scales.view(ml_dtypes.float8_e8m0fnu))
    return StoredExperts(codes=jnp.asarray(codes), scales=scales, block=(1, 32), activations=activations)


def stored_shared(outputs: int, inputs: int, seed: int) -> StoredWeight:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 120, (outputs, inputs), np.uint8) | rng.integers(0, 2, (outputs, inputs), np.uint8) << 7
    scales = rng.integers(113, 117, (-(-outputs // 128), -(-inputs // 128)), np.uint8)
    codes, scales = codes.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)
    return StoredWeight(codes=jnp.asarray(codes), scales=jax.device_put(scales))


def experts(activations: str = "bf16", /, **changes: Any) -> Experts:
    width, hidden = CFG.expert_width, CFG.hidden_size
    shared = stored_shared(2 * width, hidden, 3), stored_shared(hidden, width, 4)
    found = Experts(
        gate_up=stored(2 * width, hidden, 1, activations),
        down=stored(hidden, width, 2, activations),
        shared_gate_up=shared[0],
        shared_down=shared[1],
    )
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", first_of(["bf16", "fp8"]))
def test_experts_in_kernels(backend, activations):
    """Both round what they hand on to bf16, after sums in another order: their outputs differ by some 2^-9.

    Of one weight, the kernels get interleaved codes.
    """
    rng = np.random.default_rng(0)
    picked = np.sort(np.argsort(rng.random((2, 3, CFG.num_experts)), -1)[..., : CFG.experts_per_token], -1)
    picked[1, 2] = CFG.num_experts
    picks = Picks(experts=jnp.asarray(picked, jnp.int32), weights=jnp.asarray(rng.random(picked.shape), jnp.float32))
    x = jax.random.normal(KEY, (2, 3, CFG.hidden_size), jnp.bfloat16).at[1, 2].set(jnp.nan)

    def mix(backend: str, experts: Experts) -> Any:
        run = jax.jit(lambda x, picks, experts: mixed(EXPERTS[backend], x, picks, experts, CFG))
        return run(x, picks, experts)

    given = experts(activations)
    assert isinstance(given.gate_up, StoredExperts)
    found, want = mix(backend, experts(activations, gate_up=given.gate_up.for_kernels())), mix("xla", given)
    assert found.routed.dtype == found.shared.dtype == jnp.bfloat16
    is_pick = np.asarray(want.experts) < CFG.num_experts
    one, other = (np.asarray(each.routed[0], np.float32)[is_pick] for each in (found, want))
    assert relative_rms(one, other) < 2**-7
    is_real = is_pick.any(-1)
    assert relative_rms(*(np.asarray(each.shared, np.float32)[is_real] for each in (found, want))) < 2**-7
    for token in np.argwhere(is_real):
        one, other = (np.asarray(each.sum(), np.float32)[tuple(token)] for each in (found, want))
        assert relative_rms(one, other) < 2**-7


@pytest.mark.sweep(guard="test_experts_in_kernels")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", first_of([1, 70], count=0))
def test_products_of_the_shared_expert_are_the_same_in_the_launches_of_the_others(backend, tokens, monkeypatch):
    """Bit for bit, and those of the others too. For more tokens they are launches of their own."""
    rng = np.random.default_rng(0)
    picked = np.sort(np.argsort(rng.random((tokens, CFG.num_experts)), -1)[..., : CFG.experts_per_token], -1)
    picks = Picks(experts=jnp.asarray(picked, jnp.int32), weights=jnp.asarray(rng.random(picked.shape), jnp.float32))
    x = jax.random.normal(KEY, (tokens, CFG.hidden_size), jnp.bfloat16)
    op, projections, launched = EXPERTS[backend], projections_of(backend), []
    run_together = pk.run_together
    monkeypatch.setattr(
        pk, "run_together", lambda *args, **options: launched.append(1) or run_together(*args, **options)
    )
    routed, shared = jax.jit(lambda x, picks, given: op.outputs(x, picks, given, CFG, projections))(x, picks, experts())
    assert len(launched) == (2 if tokens == 1 else 0)
    np.testing.assert_array_equal(shared, jax.jit(lambda x, given: of_shared(x, given, CFG, projections))(x, experts()))
    np.testing.assert_array_equal(
        routed, jax.jit(lambda x, picks, given: op.routed(x, picks, given, CFG))(x, picks, experts())
    )


@pytest.mark.parametrize("backend", first_of([*BACKENDS, "xla"], count=0))
def test_a_devices_own_experts_give_what_they_give_among_all(backend):
    """Bit for bit: what a device that has some of the experts makes of tokens that pick others, too."""
    rng = np.random.default_rng(1)
    picked = np.sort(np.argsort(rng.random((7, CFG.num_experts)), -1)[..., : CFG.experts_per_token], -1)
    picked[4] = CFG.num_experts
    numbers, gains = jnp.asarray(picked, jnp.int32), jnp.asarray(rng.random(picked.shape), jnp.float32)
    picks, x = Picks(experts=numbers, weights=gains), jax.random.normal(KEY, (7, 512), jnp.bfloat16)

    @jax.jit
    def routed(experts: Experts, picks: Picks) -> jax.Array:
        return EXPERTS[backend].routed(x, picks, experts, CFG)

    whole, count = np.asarray(routed(experts(), picks)), CFG.num_experts // 2
    for first in (0, count):
        cut = {
            name: dataclasses.replace(
                one, **{part: getattr(one, part)[first : first + count] for part in ("codes", "scales")}
            )
            for name, one in (("gate_up", experts().gate_up), ("down", experts().down))
            if isinstance(one, StoredExperts)
        }
        here = picks.among(pk.OwnExperts(first=jnp.asarray([first], jnp.int32), count=count))
        is_here = (picked >= first) & (picked < first + count)
        np.testing.assert_array_equal(here.experts, np.where(is_here, picked - first, count))
        found = np.asarray(routed(experts(**cut), here))
        assert is_here.any()
        np.testing.assert_array_equal(found[is_here], whole[is_here])


def test_what_kernels_of_experts_do_not_serve():
    unsupported = EXPERTS["pallas_simulated"].unsupported
    assert unsupported(CFG, experts(), jnp.bfloat16) is None
    assert "rows must be bfloat16, got float32" in str(unsupported(CFG, experts(), jnp.float32))
    wide = jnp.zeros((CFG.num_experts, CFG.hidden_size, CFG.expert_width), jnp.bfloat16)
    assert "must be stored in FP4" in str(unsupported(CFG, experts(down=wide), jnp.bfloat16))
    rounded = dataclasses.replace(stored(CFG.hidden_size, CFG.expert_width, 1), activations="fp8")
    assert "for activations='bf16', the weight has 'fp8'" in str(unsupported(CFG, experts(down=rounded), jnp.bfloat16))
    for_bf16 = stored(CFG.hidden_size, CFG.expert_width, 1).for_kernels()
    other = dataclasses.replace(for_bf16, activations="fp8")
    assert "interleaved for 'bf16', not for activations='fp8'" in str(
        unsupported(CFG, experts("fp8", down=other), jnp.bfloat16)
    )
    one, two = (each.widened(jnp.arange(2), jnp.float32) for each in (for_bf16, other))
    np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match="cannot serve experts: experts must be stored in FP4"):
        EXPERTS.choose("pallas_simulated", CFG, experts(down=wide), jnp.bfloat16)


def test_kernels_of_experts_have_no_derivative():
    picks = Picks(experts=jnp.zeros((1, 3), jnp.int32), weights=jnp.ones((1, 3)))

    def total(x: jax.Array) -> jax.Array:
        return mixed(EXPERTS["pallas_simulated"], x, picks, experts(), CFG).routed.astype(jnp.float32).sum()

    with pytest.raises(ValueError, match="cannot serve a derivative of experts"):
        jax.grad(total)(jnp.ones((1, CFG.hidden_size), jnp.bfloat16))
