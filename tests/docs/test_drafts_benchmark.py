"""The benchmark of drafts calls the programs as they are: what it times is traced here, for small models."""

import jax
import pytest

from benchmarks.model_parts import drafts
from benchmarks.model_parts.whole import Bench
from dsv4jax.model import ModelConfig
from tests.support.models import drawn_model


@pytest.mark.slow
def test_it_traces_its_parts_and_its_passes():
    cfg = drafts.with_block(ModelConfig.tiny())
    params, bench = drawn_model(cfg, 1), Bench(cfg=cfg, requests=(2,), context=128, out=None)
    of_a_pass = drafts.lowered_passes(bench, params, requests=2, drafts=2)
    assert "while" in of_a_pass.as_text()
    for function, given in drafts.parts_of(bench, params, requests=2).values():
        jax.jit(function).trace(*given)
