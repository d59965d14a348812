"""How many launches a step has: what one more layer adds, apart from its products, and what is done once for all."""

import pytest

from tests.support.compile_for_gpu import report_of
from tests.support.step_launches import launches

# Cache update and attention; CSA has scores and top-k too. Products with stored weights make the queries and the sum.
BESIDES_STORED_PRODUCTS = {"swa": 2, "csa": 4, "hca": 2}
# With wide weights queries and the sum are launches too. A draft keeps the parts of its tokens, which another launch
# makes. What is staged is stored by one more; SWA stages no entries.
BESIDES_PRODUCTS_OF_DRAFTS = {"swa": 5, "csa": 9, "hca": 6}
# A chunk updates the tails, and after attention the window. Products make the sum.
BESIDES_PRODUCTS_OF_CHUNKS = {"swa": 4, "csa": 9, "hca": 6}
# The grants of prepare_forward and of layers, angles, advance.
ONCE = 8


@pytest.mark.sweep(guard="test_a_layer_of_a_model_adds_its_kernels_and_nothing_of_xla")
def test_a_layer_adds_its_kernels_and_no_launch_that_moves_or_masks():
    report = report_of("tests.support.step_launches", "h200", "--weights", "stored")
    assert report.pop("all kinds")["once"] <= ONCE
    for kind, found in report.items():
        assert found["once"] <= ONCE, kind
        assert found["products"] > 0, "the products are not recognised"
        assert found["layer"] - found["products"] == BESIDES_STORED_PRODUCTS[kind], kind


@pytest.mark.sweep(guard="test_a_layer_of_a_model_adds_its_kernels_and_nothing_of_xla")
def test_a_chunk_adds_its_output_in_place():
    """No launch of a layer adds to the residual or copies it."""
    report = report_of("tests.support.step_launches", "h200", "--weights", "stored", "--batch", "1", "--tokens", "4096")
    assert report.keys() == BESIDES_PRODUCTS_OF_CHUNKS.keys()
    for kind, found in report.items():
        assert found["layer"] - found["products"] == BESIDES_PRODUCTS_OF_CHUNKS[kind], kind


@pytest.mark.sweep(guard="test_a_layer_of_a_model_adds_its_kernels_and_nothing_of_xla")
def test_a_draft_adds_no_more_but_what_stores_it():
    report = report_of("tests.support.step_launches", "h200", "--draft", "--tokens", "4")
    assert report.keys() == BESIDES_PRODUCTS_OF_DRAFTS.keys()
    for kind, found in report.items():
        assert found["layer"] - found["products"] == BESIDES_PRODUCTS_OF_DRAFTS[kind], kind


# Attention's, as above; the router, and both products of experts, with those of the shared one in the same launches.
OF_MODEL = {"csa": 8 + 3, "hca": 6 + 3}


@pytest.mark.slow
def test_a_layer_of_a_model_adds_its_kernels_and_nothing_of_xla():
    report = report_of("tests.support.model_launches", "h200")
    assert report == {kind: {"kernels": count, "others": 0} for kind, count in OF_MODEL.items()}


@pytest.mark.sweep(guard="test_a_layer_of_a_model_adds_its_kernels_and_nothing_of_xla")
def test_over_a_mesh_a_layer_adds_one_launch_of_xla():
    """The gather of the outputs of picks."""
    report = report_of("tests.support.model_launches", "h200", "--devices", "2")
    assert report == {kind: {"kernels": count, "others": 1} for kind, count in OF_MODEL.items()}


@pytest.mark.slow
def test_a_stage_of_dspark_adds_a_product_and_the_sum_of_its_norm():
    """The rest of norm and rope, and the write to the windows, are done for all stages at once."""
    report = report_of("tests.support.model_launches", "h200", "--stages", "3", "--batch", "8")
    assert report["last stage"] == 2


PROGRAM = """
HloModule step

%fused (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %b = f32[4]{0} add(%a, %a)
}

%body (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %v = f32[4]{0} get-tuple-element(%x), index=1
  %loop_add_fusion.3 = f32[4]{0} fusion(%v), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/add"}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %loop_add_fusion.3)
}

%condition (y: (s32[], f32[4])) -> pred[] {
  %y = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] fusion(%y), kind=kLoop, calls=%fused
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %kernel.1 = (f32[4]{0}, /*index=1*/s32[]) custom-call(%p), custom_call_target="m", metadata={op_name="top_k/mpmd_map"}
  %g = f32[4]{0} get-tuple-element(%kernel.1), index=0
  %w = (s32[], f32[4]{0}) while(%g), condition=%condition, body=%body
  %copy.2 = f32[4]{0} copy(%g)
  ROOT %c = f32[4]{0} bitcast(%copy.2)
}
"""


def test_launches_are_counted_in_all_that_a_program_runs():
    """Of a fusion the call alone counts; results that are tuples, and comments in them, hide no launch."""
    assert sorted(one.what for one in launches(PROGRAM)) == [
        "copy copy",
        "custom-call m top_k/mpmd_map",
        "fusion kLoop jit(step)/add",
        "fusion kLoop less",
    ]
