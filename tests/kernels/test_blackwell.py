"""Attention and indexer scores through tensor memory: the kernels of Blackwell, and what they are compiled into."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import sm100
from pallas_kernels.scores.sm100 import Tuning
from tests.kernels import test_indexer_scores as indexer
from tests.kernels.test_decode_attention import Case, check
from tests.support.machines import BLACKWELL_MACHINES

machines = pytest.mark.parametrize("simulate", BLACKWELL_MACHINES)
formats = pytest.mark.parametrize("key_format", indexer.FORMATS)


@machines
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(300, 0, -1), layout=sm100.Layout()),
        Case(lengths=(140,), entries="all", tokens=2, kv_format="fp8_tile64", layout=sm100.Layout(cluster=4)),
        Case(lengths=(130,), entries=None, heads=128, kv_format="bf16", dtype=jnp.bfloat16, layout=sm100.Layout()),
    ],
    ids=["ragged", "several tokens in clusters", "two groups of heads"],
)
def test_attention(simulate, case):
    check(case, simulate=simulate)


@machines
def test_an_output_may_be_scaled_for_every_growth(simulate, monkeypatch):
    monkeypatch.setattr(sm100, "_GROWTH", 0.0)
    check(Case(lengths=(300,), layout=sm100.Layout()), simulate=simulate)


@machines
@formats
@pytest.mark.parametrize(("batch", "tokens", "warpgroups"), [(3, 1, 3), (2, 3, 2), (1, 2, 1)])
def test_scores(key_format, batch, tokens, warpgroups, simulate):
    """Several requests per block, and several blocks per request."""
    seen = indexer.visible(batch, batch, tokens, 5 * indexer.PER_BLOCK)
    seen[0, -1] = 5 * indexer.PER_BLOCK
    case = indexer.Case(key_format=key_format, visible=seen, max_blocks=5, seed=tokens)
    got = case.run(simulate, architecture="sm100", tuning=Tuning(warpgroups=warpgroups, blocks=2))
    # Sums are f32: 64 heads of 128 dims, and the two products that a weight and the scales are.
    error = np.abs(got - case.xla())[case.seen] / case.magnitude()[case.seen]
    assert np.max(error) < 1e-6


@machines
@formats
def test_scores_of_nan(key_format, simulate):
    case = indexer.Case(key_format=key_format, visible=np.full((1, 1), 64, np.int32), max_blocks=2)
    block = case.block_table[case.slots[0], 1]
    case.keys.scale[1, block, 7] = indexer.NAN_SCALE[key_format]
    got = case.run(simulate, architecture="sm100")[0, 0]
    assert np.flatnonzero(np.isinf(got)).tolist() == [32 + 7]
    assert np.isfinite(np.delete(got, 32 + 7)).all()


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
