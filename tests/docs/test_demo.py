"""The demo, run as a user runs it: exit code, table and picture."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="the demo prints with rich, of the extra 'demo'")
pytest.importorskip("matplotlib", reason="the demo draws with matplotlib, of the extra 'demo'")
import matplotlib.image

from tests.support.paths import ROOT


def demo(out, *args: str) -> subprocess.CompletedProcess[str]:
    # Compiled quickly: how fast the demo is does not matter here.
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | quick
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(out), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def table_rows(text: str) -> list[list[str]]:
    """Cells of the lines that start with a layer kind."""
    return [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in text.splitlines()
        if re.match(r"│ (SWA|CSA|HCA) ", line)
    ]


def assert_picture_shows_something(out, columns: int) -> None:
    image = matplotlib.image.imread(out / "occupancy.png")[..., :3]
    assert image.shape[1] > 400 * columns
    shown = (image.min(axis=-1) < 0.5).mean(axis=0)  # share of coloured pixels by picture column
    for part in range(columns):
        left, right = image.shape[1] * part // columns, image.shape[1] * (part + 1) // columns
        assert shown[left:right].mean() > 0.02


@pytest.mark.slow
def test_demo_agrees_with_the_recording(tmp_path):
    finished = demo(tmp_path, "--kinds", "csa")  # one kind of three: each compiles for ten seconds
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"1 CSA +window +[\d.]+ KiB per request", finished.stdout), "no byte table"
    rows = table_rows(finished.stdout)[-2:]
    assert [row[:3] for row in rows] == [["CSA", "f32", "f32"], ["CSA", "fp8_tile64", "mxfp4"]]
    for row in rows:
        tokens, entries, error, tolerance = row[3:7]
        assert int(tokens) == 150 + 150 + 42 + 129 + 132
        assert int(entries) == 37 + 37 + 10 + 32 + 33
        assert 0 < float(error) < float(tolerance)
        assert all(float(speed.replace(",", "")) > 0 for speed in row[8:])
    assert_picture_shows_something(tmp_path, columns=1)
    model = r"│ +5 │ +8 │ +[\d.]+ MiB │ 1 of 205 │ +64 │ +64 of 64 │ +\d+ │"
    assert re.search(model, finished.stdout), "no text like the recorded one"


@pytest.mark.sweep(guard="test_demo_agrees_with_the_recording")
def test_full_size_job_at_tiny_size(tmp_path):
    """The code that serves V4-Flash's sizes on a GPU, on layers that any machine can run."""
    finished = demo(tmp_path, "--size", "tiny")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = table_rows(finished.stdout)[-3:]
    assert [row[0] for row in rows] == ["SWA", "CSA", "HCA"]
    assert all(0 < float(row[5]) < float(row[6]) for row in rows)
    texts = r"│ +3 │ +8 │ +[\d.]+ MiB │ 4 of 64 │ +256 │ +[\d.]+ │ +[\d,]+ │"
    assert re.search(texts, finished.stdout), "no texts of a whole model"
    assert_picture_shows_something(tmp_path, columns=3)


@pytest.mark.slow
def test_without_a_gpu_the_demo_says_so(tmp_path):
    finished = demo(tmp_path, "--device", "gpu")  # JAX_PLATFORMS=cpu hides a GPU where there is one
    assert finished.returncode == 2
    assert "No GPU that JAX can use" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not list(tmp_path.iterdir())
