"""The memory of the published models, against the census of their files and what follows from it."""

import functools
import re
from typing import Any

import pytest

from dsv4jax import model
from dsv4jax.model import ModelConfig
from dsv4jax.model.caches import TRAINED
from dsv4jax.model.memory import GIB
from dsv4jax.plan import plan_cache
from tests.support.cases import first_of

FLASH, PRO = ModelConfig.flash(), ModelConfig.pro()
plan_memory = functools.cache(model.plan_memory)  # it counts a hundred thousand tensors


def test_flash_has_the_tensors_numbers_and_bytes_of_its_published_files():
    """46 files with 69,187 tensors, 148.65 GiB of data."""
    plan = plan_memory(FLASH)
    assert (plan.tensors, plan.numbers) == (69_187, 158_069_433_298)
    assert f"{plan.total / GIB:.2f}" == "148.65"


def test_pro_has_the_tensors_of_the_same_layout():
    assert plan_memory(PRO).tensors == 145_116


@pytest.mark.parametrize(
    ("cfg", "experts", "tables", "other", "drafts", "total"),
    # To two digits, because 3.347 and 148.648 are easily taken for 3.4 and 148.7: they are rounded twice then.
    [(FLASH, 137.06, 1.97, 6.27, 3.35, 148.65), (PRO, 765.60, 3.45, 23.27, 13.00, 805.32)],
    ids=["flash", "pro"],
)
def test_the_parts_of_published_models(cfg, experts, tables, other, drafts, total):
    plan = plan_memory(cfg)
    sizes = {"experts": experts, "tables": tables, "other": other, "drafts": drafts, "total": total}
    assert {name: round(getattr(plan, name) / GIB, 2) for name in sizes} == sizes
    assert 0 < plan.draft_experts < plan.drafts


@pytest.mark.parametrize("cfg", [FLASH, PRO, ModelConfig.tiny()], ids=["flash", "pro", "tiny"])
def test_without_drafts_only_the_block_for_drafts_is_missing(cfg):
    plan, without = plan_memory(cfg), plan_memory(cfg, drafts=0)
    assert (without.drafts, without.draft_experts) == (0, 0)
    assert without.total == plan.total - plan.drafts
    assert (without.experts, without.tables, without.other) == (plan.experts, plan.tables, plan.other)
    assert 0 < without.tensors < plan.tensors
    assert 0 < without.numbers < plan.numbers


@pytest.mark.parametrize(
    ("cfg", "devices", "gib"),
    [(FLASH, 1, 148.65), (FLASH, 2, 77.54), (FLASH, 4, 41.98), (FLASH, 8, 24.20), (PRO, 8, 121.42)],
)
def test_gib_on_each_device_of_what_is_spread(cfg, devices, gib):
    """Flash: 142.22 GiB of experts (of drafts, too), embedding and head, and 6.43 of the rest. Pro: 781.6 and 23.72."""
    assert round(plan_memory(cfg).per_device(devices) / GIB, 2) == gib


def test_bytes_that_do_not_divide_are_rounded_up():
    plan = plan_memory(ModelConfig.tiny())
    spread = plan.experts + plan.draft_experts + plan.tables
    least = plan.per_device(spread)  # one byte of what is spread
    assert plan.per_device(spread - 1) == least + 1
    assert plan.per_device(2 * spread) == least


def test_the_printed_plan_has_every_figure():
    text = str(plan_memory(FLASH))
    for label, gib in [
        *[("routed experts", "137.1"), ("embedding and head", "2.0"), ("other", "6.3"), ("drafts", "3.3")],
        *[("in all", "148.6"), ("on 1 device:", "148.6"), ("on 2 devices:", "77.5"), ("on 4 devices:", "42.0")],
    ]:
        assert re.search(rf"^{label} +{re.escape(gib)} GiB", text, re.MULTILINE), label
    assert "158,069,433,298 numbers in 69,187 tensors" in text


def test_what_a_token_fetches_from_the_host():
    """Six of 256 experts of a layer, 80 MB: an H200 takes 1.87 ms for them."""
    plan = plan_memory(FLASH)
    assert plan.host_seconds(0) == 0
    assert plan.host_seconds(5) == pytest.approx(5 * 80.2e6 / 43e9, rel=1e-3)
    assert plan.host_seconds(1, bytes_per_second=80.2e6) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(("gib", "layers"), [(149, 0), (148, 1), (135, 5), (11.6, 43)])
def test_layers_whose_experts_stay_on_the_host(gib, layers):
    plan = plan_memory(FLASH)
    assert plan.host_layers(int(gib * GIB)) == layers
    assert plan.total - layers * plan.experts / FLASH.num_layers <= gib * GIB


def test_what_fits_no_device_even_so_is_refused():
    plan = plan_memory(FLASH)
    with pytest.raises(ValueError, match="device_bytes must be at least"):
        plan.host_layers(plan.total - plan.experts - 1)


@pytest.mark.parametrize(
    ("shape", "requests", "received"),
    first_of(
        [
            # All numbers of the other device, of sums its share twice: once as it adds up, once as it hands on.
            ((1, 1), 3, {}),
            (
                (1, 2),
                1,
                {"sum_of_embedding": 2 * 4096, "gather_outputs": 43 * 12 * 4096, "gather_logits": 4 * 129280 // 2},
            ),
            (
                (2, 1),
                64,
                {
                    "gather_tokens": 32 * 8,
                    "sum_of_embedding": 32 * 2 * 4096,
                    "gather_inputs": 44 * 32 * 2 * 4096,
                    "sum_of_experts": 43 * 32 * 4 * 4096,
                    "gather_logits": 32 * 4 * 129280 // 2,
                },
            ),
        ]
    ),
)
def test_bytes_that_a_device_of_a_mesh_receives_in_a_step(shape, requests, received):
    plan = plan_memory(FLASH, mesh=shape, requests=requests)
    assert plan.mesh is not None
    assert {name: size for name, (_, size) in plan.mesh.received.items() if size} == received
    assert {name for name, (times, _) in plan.mesh.received.items() if times} == set(received)
    assert plan.mesh.weights == plan.per_device(shape[0] * shape[1])
    assert "weights " in str(plan)
    assert "weights " not in str(plan_memory(FLASH))


def test_the_context_on_a_mesh_is_what_a_devices_requests_have_beside_the_weights():
    mesh = plan_memory(FLASH, mesh=(2, 1), requests=64).mesh
    assert mesh is not None
    room = 139 * GIB - mesh.weights
    context = mesh.context(139 * GIB)
    sizes: dict[str, Any] = {"max_requests": 32} | TRAINED
    assert plan_cache(FLASH.attention, max_context=context, **sizes).memory_bytes() <= room
    assert plan_cache(FLASH.attention, max_context=context + 128, **sizes).memory_bytes() > room
    assert mesh.context(GIB) == 0


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((2, 1), "requests=3 must be divisible by 2"),
        ((1, 3), "num_experts=256 must be divisible by 3, of the mesh 1x3"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(FLASH, mesh=mesh, requests=3)
