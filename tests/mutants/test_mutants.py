"""The simulator finds every fault of every kernel that has a pipeline."""

import subprocess
import sys

import pytest

from pallas_kernels.language.simulator.tensor_memory import TensorMemorySimulator
from tests.mutants.faults import (
    CommitAtOnce,
    FewerCopies,
    FewerProducts,
    LateStore,
    LateWait,
    Mutant,
    NoBarrier,
    NoFence,
    NoHold,
    NoMeeting,
    NoWait,
    WrongParity,
)
from tests.mutants.kernels import HARMLESS, KERNELS, NEVER_MADE, faults_of, found, result, sound

FILLED = WrongParity, NoWait, LateWait, FewerProducts  # by the hardware, for products on Hopper
STORED = LateStore, NoFence, NoBarrier  # by lanes
FEW = *STORED, FewerProducts, FewerCopies, NoHold
IN_TENSOR_MEMORY = *STORED, WrongParity, NoWait, CommitAtOnce
FAULTS: dict[str, tuple[type[Mutant], ...]] = {
    "products of many rows, bf16": (*FILLED, NoHold),
    "products of many rows, own parts": (*FILLED, NoHold),
    "products of many rows, shared tiles": (*FILLED, NoHold, LateStore, NoBarrier),
    "products of many rows, FP8": FILLED,
    "products of many rows, wide": FILLED,
    "products of many rows, wide, own parts": FILLED,
    "products of many rows, queries": (*FILLED, LateStore, NoBarrier),
    "products of few rows": FEW,
    "products of few rows, in segments": FEW,
    "products of few rows, FP8": FEW,
    "products of few rows, streamed": FEW,
    "products of few rows, in turns": FEW,
    "products of few rows, parts": (*FEW, WrongParity, NoWait),
    "products on Blackwell": (*IN_TENSOR_MEMORY, FewerCopies),
    "products on Blackwell, FP8": (*IN_TENSOR_MEMORY, FewerCopies),
    "experts": (*FILLED, *STORED, NoHold, FewerCopies),
    "experts, adjacent rows": (*FILLED, NoHold),
    "experts, rows in FP8": (WrongParity, NoWait, FewerProducts, *STORED, FewerCopies),
    "experts, adjacent rows in FP8": (WrongParity, NoWait, FewerProducts, LateStore, NoBarrier, FewerCopies),
    "mixed streams": (*STORED, WrongParity, NoWait, FewerProducts, FewerCopies, NoMeeting),
    "mixed streams of few tokens": (*STORED, WrongParity, NoWait, FewerProducts, FewerCopies, NoMeeting),
    "router": (*STORED, WrongParity, NoWait, FewerProducts, FewerCopies),
    "tiles of a router of many tokens": (LateStore, NoBarrier),
    "attention": (*FILLED, *STORED, NoHold, FewerCopies),
    "attention to widened picks": (*FILLED, *STORED, NoHold, FewerCopies),
    "attention to widened rows": (*FILLED, LateStore, NoBarrier, NoHold),
    "attention for few queries": (*STORED, FewerProducts),
    "attention spread over a cluster": (*STORED, WrongParity, NoWait, FewerProducts, NoHold),
    "attention on Blackwell": (WrongParity, NoWait, CommitAtOnce, LateStore, NoFence, FewerCopies),
    "scores in turn": (*STORED, FewerProducts),
    "scores overlapped": (*STORED, LateWait, FewerProducts, NoHold),
    "scores on Blackwell": IN_TENSOR_MEMORY,
}
FIRST = next(iter(KERNELS))
# Of each kernel's bodies and loops one case is in make check, and these others in sweeps.
VARIANTS = {
    "products of many rows, own parts",
    "products of many rows, shared tiles",
    "products of many rows, wide",
    "products of many rows, wide, own parts",
    "products of many rows, queries",
    "products of few rows, in segments",
    "products of few rows, FP8",
    "products of few rows, parts",
    "products of few rows, in turns",
    "products on Blackwell",
    "experts, adjacent rows",
    "experts, adjacent rows in FP8",
    "attention to widened picks",
    "scores in turn",
}
MARKS = {kernel: pytest.mark.sweep if kernel in VARIANTS else pytest.mark.slow for kernel in KERNELS}
each_kernel = pytest.mark.parametrize("kernel", [pytest.param(kernel, marks=mark) for kernel, mark in MARKS.items()])


def test_every_kernel_has_its_faults():
    assert set(FAULTS) == set(KERNELS)


@pytest.mark.parametrize(
    ("kernel", "machine"),
    [
        pytest.param(kernel, machine, id=f"{kernel}-{machine.__name__}", marks=() if kernel == FIRST else MARKS[kernel])
        for kernel, machines in FAULTS.items()
        for machine in machines
    ],
)
def test_a_fault_is_found(kernel, machine):
    faults = [fault for fault in faults_of(kernel) if fault.machine is machine]
    assert faults
    for fault in faults:
        assert found(kernel, fault) not in (None, NEVER_MADE), fault


@each_kernel
def test_other_faults_cannot_be_made(kernel):
    others = [fault for fault in faults_of(kernel) if fault.machine not in FAULTS[kernel]]
    assert all((kernel, fault.machine) in HARMLESS or found(kernel, fault) == NEVER_MADE for fault in others), others


@each_kernel
def test_a_kernel_without_faults_passes_in_any_order(kernel):
    """Whatever roles, copies and products do first, the results have the same bits."""
    want = sound(kernel)
    for seed in (1, 2):
        assert result(kernel, TensorMemorySimulator, seed).tobytes() == want.tobytes()


@pytest.mark.slow
def test_the_command_prints_each_fault():
    shown = subprocess.run(
        [sys.executable, "-m", "tests.mutants", FIRST], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert all(" | found: " in line for line in shown[:-1])
    assert shown[-1].endswith(" faults, 0 missed")
