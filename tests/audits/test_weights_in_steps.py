"""A decode step reads weights where they lie: it does not copy them side by side, nor widen stored ones."""

import jax
import jax.numpy as jnp
import pytest

import dsv4jax as d4
from tests.support.compile_for_gpu import report_of
from tests.support.weights_in_steps import decode_step, joined, widened

# Weights are far larger than anything that two requests have.
CFG = d4.DSV4Config.tiny(hidden_size=1024, q_lora_rank=512, o_lora_rank=256, indexer_head_dim=64)
SMALLEST = 2 * CFG.head_dim * CFG.hidden_size  # numbers in the weights of HCA's compressor: all others have more


def compiled(kind: str, weights: str) -> str:
    step, given = decode_step(CFG, kind, weights, 2, jnp.float32)
    return jax.jit(step, donate_argnums=2).lower(*given).compile().as_text() or ""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")  # HLO is the same, the code made of it is not
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_no_step_puts_weights_side_by_side(kind):
    for weights in ("wide", "stored"):
        assert joined(compiled(kind, weights), SMALLEST) == []


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_step_on_this_device_widens_no_stored_weight():
    assert widened(compiled("csa", "stored"), SMALLEST) == []


@pytest.mark.slow
def test_a_handle_multiplies_by_the_weights_where_they_lie():
    """``params.compressor`` and ``params.indexer`` cut one array; a handle puts the parts together as they were."""
    step, (params, x, cache, slots, num_new) = decode_step(CFG, "csa", "wide", 2, jnp.float32)
    del step

    def flush(params, x, cache, slots, num_new):
        handle = d4.acquire(cache, 0, slots, num_new)
        return handle.flush_compression(params.compressor, x, params.indexer).cache

    given = params, x, cache, slots, num_new
    hlo = jax.jit(flush, donate_argnums=2).lower(*given).compile().as_text() or ""
    assert joined(hlo, SMALLEST) == []


def test_the_audit_notices_what_it_looks_for():
    a, b = (jax.ShapeDtypeStruct((512, CFG.hidden_size), jnp.float32) for _ in range(2))
    hlo = jax.jit(lambda a, b: jnp.concatenate([a, b])).lower(a, b).compile().as_text() or ""
    assert joined(hlo, SMALLEST) == [f"f32[1024,{CFG.hidden_size}]"]
    stored = jax.ShapeDtypeStruct(a.shape, jnp.float8_e4m3fn)
    hlo = jax.jit(lambda w: w.astype(jnp.float32) * 2).lower(stored).compile().as_text() or ""
    assert widened(hlo, SMALLEST) == [f"f32[512,{CFG.hidden_size}]"]


@pytest.mark.sweep(guard="test_no_step_puts_weights_side_by_side")
def test_steps_of_v4_flash_compiled_for_h200_read_weights_where_they_lie():
    """Without the barrier between the two products of x, XLA joins [1536, 4096] and [2624, 4096] in wide steps."""
    report = report_of("tests.support.weights_in_steps", "h200")
    assert len(report) == 7
    for name, found in report.items():
        assert found["joined"] == [], name
        assert "stored" not in name or found["widened"] == [], name
