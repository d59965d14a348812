"""Attention through tensor memory: Blackwell's kernel, and the descriptors of its instructions."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.attention import block, sm100
from tests.support.attention_cases import Case, check
from tests.support.cases import first_of
from tests.support.machines import BLACKWELL_MACHINES

machines = pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)


@machines
@pytest.mark.parametrize(
    "case",
    first_of(
        [
            Case(lengths=(300, 0, -1), layout=sm100.Layout()),
            Case(lengths=(140,), entries="all", tokens=2, kv_format="fp8_tile64", layout=sm100.Layout(cluster=4)),
            Case(lengths=(130,), entries=None, heads=128, kv_format="bf16", dtype=jnp.bfloat16, layout=sm100.Layout()),
            Case(lengths=(60, 5, 70), broken=1, entries=None, heads=16, n_win=64, layout=sm100.Layout()),
            Case(lengths=(60, 5, 9), broken=1, top_k=8, heads=8, n_win=64, layout=sm100.Layout(cluster=2)),
        ],
        count=3,
    ),
    ids=["ragged", "several tokens in clusters", "two groups of heads", "16 heads", "8 heads in clusters"],
)
def test_attention(simulate, case):
    check(case, simulate=simulate)


@machines
def test_an_output_may_be_scaled_for_every_growth(simulate, monkeypatch):
    monkeypatch.setattr(block, "GROWTH", 0.0)
    check(Case(lengths=(300,), layout=sm100.Layout()), simulate=simulate)


@pytest.mark.parametrize("dtype", ["f16", "e4m3", "e5m2"])
@pytest.mark.parametrize(("a_transposed", "b_transposed"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("columns", [8, 64, 256])
def test_instruction_descriptors_are_those_of_mosaic(columns, a_transposed, b_transposed, dtype):
    tcgen05 = pytest.importorskip("jax.experimental.mosaic.gpu.tcgen05", exc_type=ImportError)
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    from pallas_kernels.language.ptx.tensor_memory import instruction_descriptor

    with mlir.make_ir_context(), ir.Location.unknown():
        types = {"f16": ir.F16Type, "e4m3": ir.Float8E4M3FNType, "e5m2": ir.Float8E5M2Type}
        operand, module = types[dtype].get(), ir.Module.create()
        with ir.InsertionPoint(module.body):
            types = ir.F32Type.get(), operand, operand
            made = tcgen05.create_instr_descriptor(64, columns, *types, a_transposed, b_transposed)
            wanted = ir.IntegerAttr(made.owner.attributes["value"]).value
    assert instruction_descriptor(a_transposed, b_transposed, columns, dtype) == wanted
