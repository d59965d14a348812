"""The memory of the published models, against the census of their files and what follows from it."""

import re

import pytest

from dsv4jax.model import ModelConfig, plan_memory
from dsv4jax.model.memory import GIB

FLASH, PRO = ModelConfig.flash(), ModelConfig.pro()


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
    [(FLASH, 1, 148.65), (FLASH, 2, 78.52), (FLASH, 4, 43.46), (FLASH, 8, 25.93), (PRO, 8, 124.44)],
)
def test_gib_on_each_device_if_experts_are_spread(cfg, devices, gib):
    """Flash: 140.25 GiB of experts, drafts' included, and 8.40 of the rest. Pro: 778.15 and 27.17."""
    assert round(plan_memory(cfg).per_device(devices) / GIB, 2) == gib


def test_bytes_that_do_not_divide_are_rounded_up():
    plan = plan_memory(ModelConfig.tiny())
    spread = plan.experts + plan.draft_experts
    least = plan.per_device(spread)  # one byte of the experts
    assert plan.per_device(spread - 1) == least + 1
    assert plan.per_device(2 * spread) == least


def test_the_printed_plan_has_every_figure():
    text = str(plan_memory(FLASH))
    for label, gib in [
        *[("routed experts", "137.1"), ("embedding and head", "2.0"), ("other", "6.3"), ("drafts", "3.3")],
        *[("in all", "148.6"), ("on 1 device:", "148.6"), ("on 2 devices:", "78.5"), ("on 4 devices:", "43.5")],
    ]:
        assert re.search(rf"^{label} +{re.escape(gib)} GiB", text, re.MULTILINE), label
    assert "158,069,433,298 numbers in 69,187 tensors" in text


@pytest.mark.parametrize(("gib", "layers"), [(149, 0), (148, 1), (135, 5), (11.6, 43)])
def test_layers_whose_experts_stay_on_the_host(gib, layers):
    plan = plan_memory(FLASH)
    assert plan.host_layers(int(gib * GIB)) == layers
    assert plan.total - layers * plan.experts / FLASH.num_layers <= gib * GIB


def test_what_fits_no_device_even_so_is_refused():
    plan = plan_memory(FLASH)
    with pytest.raises(ValueError, match="device_bytes must be at least"):
        plan.host_layers(plan.total - plan.experts - 1)
