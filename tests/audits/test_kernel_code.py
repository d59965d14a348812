"""The command that compares what kernels are compiled to with what they were."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

KERNEL = r"flash top_k \[1, 32768\]"


def command(*options: str) -> tuple[int, list[str]]:
    """Run it for one kernel. Returns its status and the lines that it prints."""
    run = [sys.executable, "-m", "tests.support.kernel_code", "h200", *options, "--only", KERNEL]
    result = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    return result.returncode, result.stdout.splitlines()


@pytest.mark.sweep(guard="test_every_kernel_compiled_for")
def test_a_kernel_that_takes_more_is_seen(tmp_path: Path):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("compiling for a GPU without one needs the extra 'cross'")
    before, after = tmp_path / "before", tmp_path / "after"
    assert command(str(before)) == (0, ["1 kernels"])
    status, lines = command(str(after), "--beside", str(before))
    assert (status, lines[0]) == (0, "flash top_k [1, 32768]: same PTX")

    facts, (ptx,) = before / "code.json", before.glob("*.ptx")
    ((name, found),) = json.loads(facts.read_text()).items()
    assert found["registers"] > 0
    assert found["bytes"] > 1000
    ptx.write_text(ptx.read_text() + "\n// other PTX")
    status, lines = command(str(after), "--beside", str(before))
    assert (status, lines[0]) == (0, f"{name}: same machine code")
    facts.write_text(json.dumps({name: found | {"registers": 8, "code": "other"}}))
    status, lines = command(str(after), "--beside", str(before))
    assert status == 1
    assert f"registers 8 -> {found['registers']}" in lines[0]
