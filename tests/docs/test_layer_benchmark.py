"""The benchmark of layers runs on a CPU, at a small size: what it prints there are wall times."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.cases import first_of
from tests.support.paths import ROOT

PARTS = {"products": 6, "layers": 1, "drafts": 1}  # and how many cases each has; a draft is timed beside a step


@pytest.mark.sweep(guard="test_the_files_are_what_the_report_writes")
@pytest.mark.parametrize("part", first_of(PARTS, count=0))
def test_a_part_prints_and_records_its_cases(part, tmp_path):
    out = tmp_path / "lines.jsonl"
    options = ["--tiny", "--part", part, "--weights", "stored", "--activations", "bf16", "--kinds", "hca"]
    command = [sys.executable, "-m", "benchmarks.layer", *options, "--out", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == PARTS[part]
    for line in lines:
        assert line["case"] in result.stdout
        assert line["case"].startswith(part.rstrip("s"))
        assert line["device"] == "cpu"
