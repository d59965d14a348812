"""Every notebook runs from top to bottom, and the outputs stored in it are of a run without errors."""

import json
import os
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS, "no notebooks found"


@pytest.fixture
def kernel_name(tmp_path, monkeypatch):
    """A kernel of this very interpreter, whatever kernels are installed, that imports this checkout."""
    folder = tmp_path / "kernels" / "this_interpreter"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "tests", "language": "python"}))
    for name in ("JUPYTER_PATH", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))  # nobody's own start-up files
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return folder.name


def printed_plans(notebook) -> list[str]:
    """What cells print that show a plan: the same on every machine."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and "print(plan)" in cell.source]
    return ["".join(output.text for output in cell.outputs if output.get("name") == "stdout") for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel and its messages live in libraries whose warnings are not ours; errors inside a cell still fail the test.
@pytest.mark.filterwarnings("default")
def test_notebook_runs(path, kernel_name):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = printed_plans(notebook)
    client = NotebookClient(notebook, kernel_name=kernel_name, timeout=300)
    client.execute(cwd=str(path.parent))
    assert printed_plans(notebook) == stored, "run the notebook again and save it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_one_clean_run(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert path.stat().st_size < 100_000  # outputs are for reading
