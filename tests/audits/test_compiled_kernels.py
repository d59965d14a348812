"""The kernels as a compiler leaves them: right architecture, nothing spilled, updated in place, one launch each."""

from typing import Any

import jax
import pytest

from tests.support.cases import first_of
from tests.support.compile_for_gpu import report_of
from tests.support.compiled_kernels import HOPPER_ONLY
from tests.support.kernel_report import blocks_per_sm, joined_zero_tests, strides_in_32_bits

ARCHITECTURES = {"h200": "sm_90a", "b200": "sm_100a"}
# Launches that are the same in both models, which store, allocate and score alike; and the others.
IN_FLASH = {
    "cache_step",
    "append_chunk",
    "stage_entries",
    "append_swa",
    "flush_entries",
    "rotate_csa",
    "reset_hca",
    "gather_compressed",
    "gather_all_compressed",
    "token_step",
    "indexer_queries",
    "indexer_scores",
    "grant_tokens",
}
IN_BOTH = {
    "attention_queries",
    "token_parts",
    "experts_down",
    "experts_down_and_shared",
    "experts_gate_up",
    "experts_gate_up_and_shared",
    "experts_rows",
    "product",
    "products",
    "product_gated",
    "product_of_many",
    "product_of_indexer_queries",
    "product_of_queries",
    "round_rows",
    "decode_attention",
    "widen_rows",
    "attend_in_order",
    "attend_to_widened",
    "top_k",
    "router",
    "router_picks",
    "router_tiles",
    "mix_streams",
}
MAX_REGISTERS = 255  # a lane's

# A sound report, and what each fault would turn it into.
SOUND = {
    "targets": ["sm_90a"],
    "architectures": ["sm_90a"],
    "entry points": 1,
    "custom calls": ["mosaic_gpu_v2"],
    "asks for registers": True,
    "setmaxnreg ignored": False,
    "products serialized": False,
    "stack and spills": [0, 0, 0],
    "registers": [128],
    "blocks per SM": 4,
    "strides in 32 bits": [],
    "joined zero tests": 0,
    "donated": 1 << 20,
    "aliased": 1 << 20,
    "smallest leaf": 4096,
    "temporaries": 1024,
    "copied": 0,
}
FAULTS = {
    "another architecture": dict(targets=["sm_100a"]),
    "ptxas for another architecture": dict(architectures=["sm_90"]),
    "two kernels": {"custom calls": ["mosaic_gpu_v2"] * 2},
    "another custom call": {"custom calls": ["mosaic_gpu_v2", "__cublas$gemm"]},
    "two entry points": {"entry points": 2},
    "a spill": {"stack and spills": [8, 8, 8]},
    "register counts ignored": {"setmaxnreg ignored": True},
    "serialized products": {"products serialized": True},
    "ptxas said nothing": dict(registers=[]),
    "a block that no SM holds": {"blocks per SM": 0},
    "a 32-bit offset": {"strides in 32 bits": [14336]},
    "a comparison that ptxas turns around": {"joined zero tests": 1},
    "a byte not aliased": dict(aliased=(1 << 20) - 1),
    "a copied leaf": dict(copied=4096),
    "a leaf among the temporaries": dict(temporaries=4096),
}
# Bytes of stack and spills that relocatable code costs, where a CUDA plugin makes it, of kernels that ask for no
# registers: 640 lanes have 96 each, and this one needs them all.
SPILLS_WHERE_IGNORED = {("flash indexer_scores mxfp4 [64, 1]", "sm_90a"): [8, 4, 4]}

# Bytes of stack and spills of attention whose blocks compute several queries, one after the other: a number that is
# used once a query. It is not touched in the loop over tiles.
KNOWN_SPILLS = {("pro decode_attention csa fp8_row [9, 4]", "sm_90a"): [8, 4, 4]}

# A report where the CUDA plugin ignores register counts: faults that are known there, and what must not go with them.
IGNORED = SOUND | {"setmaxnreg ignored": True, "products serialized": True, "stack and spills": [288, 716, 464]}
FAULTS_WHERE_IGNORED = {
    "a kernel that asks for no registers loses them": {"asks for registers": False},
    "a spill of a kernel that asks for none": {
        "asks for registers": False,
        "setmaxnreg ignored": False,
        "products serialized": False,
    },
    "serialized without cause": {
        "asks for registers": False,
        "setmaxnreg ignored": False,
        "stack and spills": [0, 0, 0],
    },
    "heeded after all, so that nothing needs an older plugin": {"setmaxnreg ignored": False},
}


# Launches whose products wait for each other where register counts are ignored: the code is relocatable there, and the
# reciprocals of norms, of scales and of sums of weights are calls in it. At most 64 rows are multiplied, whose products
# take little time.
CALLS = tuple(f"{model} {name}" for model in ("flash", "pro") for name in ("product_of_queries", "attend_in_order"))


def check(name: str, found: dict[str, Any], architecture: str, *, ignored: bool = False) -> None:
    """Raise AssertionError where a kernel is not as it should be.

    Args:
      found: its report.
      architecture: that it was compiled for.
      ignored: the CUDA plugin ignores register counts (``pallas_kernels.plugin``). Then kernels that ask for them lose
        them, and on Hopper they spill and their products are serialized. Nothing else may, but for
        ``SPILLS_WHERE_IGNORED`` and ``CALLS``.
    """
    # First: the one report of an undonated update is of a kernel compiled before, which leaves no dump a second time.
    assert found["aliased"] == found["donated"], f"{name}: a donated byte is not updated in place"
    assert found["targets"] == found["architectures"] == [architecture], f"{name}: compiled for {found['targets']}"
    assert found["entry points"] == 1, f"{name}: not one kernel"
    assert found["custom calls"] == ["mosaic_gpu_v2"], f"{name}: not one launch"
    lost = ignored and found["asks for registers"]
    assert found["setmaxnreg ignored"] == lost, f"{name}: register counts ignored: {found['setmaxnreg ignored']}"
    if not (lost and architecture == "sm_90a"):
        known = (SPILLS_WHERE_IGNORED if ignored else KNOWN_SPILLS).get((name, architecture))
        assert found["stack and spills"] == (known or [0, 0, 0]), f"{name}: bytes of stack and spills"
        if not (ignored and name.startswith(CALLS)):
            assert not found["products serialized"], f"{name}: products wait for each other"
    assert len(found["registers"]) == 1, f"{name}: no register count"
    assert 0 < found["registers"][0] <= MAX_REGISTERS
    assert found["blocks per SM"] >= 1, f"{name}: cannot be launched"
    assert not found["strides in 32 bits"], f"{name}: an offset into the pool may overflow"
    assert not found["joined zero tests"], f"{name}: a comparison that ptxas 13.0 may turn around"
    assert found["temporaries"] + found["copied"] < found["smallest leaf"], f"{name}: room for a copy of a leaf"


@pytest.mark.parametrize(
    ("model", "options"),
    first_of([("flash", ("--few",)), ("flash", ()), ("pro", ())], count=0),
    ids=["few of flash", "flash", "pro"],
)
@pytest.mark.parametrize("target", ARCHITECTURES)
def test_every_kernel_compiled_for(model, options, target):
    found = report_of("tests.support.compiled_kernels", target, "--only", f"^{model} ", *options)
    reports = found["kernels"]
    launches = IN_FLASH | IN_BOTH if model == "flash" else set(IN_BOTH)
    if target != "h200":
        launches -= set(HOPPER_ONLY)
    assert {name.split()[1] for name in reports} == launches
    for name, report in reports.items():
        check(name, report, ARCHITECTURES[target], ignored=found["register counts are ignored"])
    if model != "flash":
        return
    # Each launch that addresses CSA entries was seen on a pool that 32 bits do not address.
    large = {name.split()[1] for name, report in reports.items() if report["elements"] > 1 << 31}
    assert large >= {
        "cache_step",
        "append_chunk",
        "stage_entries",
        "token_step",
        "flush_entries",
        "gather_compressed",
        "gather_all_compressed",
    }
    with pytest.raises(AssertionError, match="not updated in place"):
        check("undonated", found["undonated"], ARCHITECTURES[target])


def test_a_sound_report_passes():
    check("sound", SOUND, "sm_90a")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_noticed(fault):
    with pytest.raises(AssertionError):
        check(fault, SOUND | FAULTS[fault], "sm_90a")


def test_a_sound_report_passes_where_register_counts_are_ignored():
    check("sound", IGNORED, "sm_90a", ignored=True)
    none = {"asks for registers": False, "setmaxnreg ignored": False}
    check("asks for none", SOUND | none, "sm_90a", ignored=True)
    on_blackwell = {"targets": ["sm_100a"], "architectures": ["sm_100a"], "setmaxnreg ignored": True}
    check("Blackwell", SOUND | on_blackwell, "sm_100a", ignored=True)


@pytest.mark.parametrize("fault", FAULTS_WHERE_IGNORED)
def test_a_fault_would_be_noticed_where_register_counts_are_ignored(fault):
    with pytest.raises(AssertionError):
        check(fault, IGNORED | FAULTS_WHERE_IGNORED[fault], "sm_90a", ignored=True)


def test_what_is_known_where_register_counts_are_ignored_is_a_fault_elsewhere():
    with pytest.raises(AssertionError, match="register counts ignored"):
        check("ignored", IGNORED, "sm_90a")
    spills_on_blackwell = IGNORED | {"targets": ["sm_100a"], "architectures": ["sm_100a"]}
    with pytest.raises(AssertionError, match="stack and spills"):
        check("Blackwell", spills_on_blackwell, "sm_100a", ignored=True)


def test_a_32_bit_offset_is_recognised():
    rows = jax.ShapeDtypeStruct((21, 160_000, 32, 448), "uint8")
    layer = "mad.lo.s64 \t%rd3, %rd1, 2293760000, %rd2;"
    assert strides_in_32_bits(f"{layer}\nmul.wide.s32 \t%rd2, %r1, 14336;", rows) == []
    assert strides_in_32_bits(f"{layer}\nmul.lo.s32 \t%r2, %r1, 14336;", rows) == [14336]
    assert strides_in_32_bits("", rows) == [2293760000, 14336]
    # In bytes, whatever the dtype.
    floats = jax.ShapeDtypeStruct((21, 40_000, 32, 448), "float32")
    assert strides_in_32_bits(f"{layer}\nmul.wide.s32 \t%rd2, %r1, 57344;", floats) == []


def test_a_comparison_that_ptxas_turns_around_is_recognised():
    chosen = "selp.b32 \t%r3, 2, 0, %p1;\nselp.b32 \t%r4, 1, 0, %p2;\n"
    test = "setp.eq.b32 \t%p3, %r5, 0;"
    assert joined_zero_tests(f"{chosen}or.b32 \t%r5, %r3, %r4;\n{test}") == 1
    assert joined_zero_tests(f"{chosen}add.s32 \t%r5, %r3, %r4;\n{test}") == 0
    assert joined_zero_tests(f"{chosen}or.b32 \t%r5, %r3, %r4;\nsetp.gt.s32 \t%p3, %r5, 0;") == 0


def test_blocks_per_sm():
    assert blocks_per_sm(registers=32, threads=128, shared=1024) == 16  # all threads
    assert blocks_per_sm(registers=129, threads=128, shared=1024) == 3  # 136 registers a lane
    assert blocks_per_sm(registers=32, threads=128, shared=100 << 10) == 2
