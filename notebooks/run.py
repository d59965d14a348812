"""Run notebooks from top to bottom and store their outputs: ``python notebooks/run.py [name ...]``, all by default.

Needs the extra ``dev``. ``tests/docs/test_notebooks.py`` runs them in the same way and compares.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class ThisInterpreter(AsyncKernelManager):
    """A kernel of the Python that runs this, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this interpreter", language="python")


def executed(path: Path) -> NotebookNode:
    """The notebook as it comes out of a run in a new kernel, with this checkout of the library, on the CPU.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    with tempfile.TemporaryDirectory() as empty:
        places = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        environment = dict.fromkeys(places, empty)  # nobody's own start-up files
        python_path = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(python_path),
            "JAX_PLATFORMS": "cpu",
            # Nearly all the time goes into compilation, which this halves. It changes no printed digit.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        with mock.patch.dict(os.environ, environment):
            client = NotebookClient(
                notebook,
                kernel_manager_class=ThisInterpreter,
                timeout=300,  # seconds a cell
                record_timing=False,
                coalesce_streams=True,
            )
            client.execute(cwd=str(path.parent))
    notebook.metadata = nbformat.from_dict(METADATA)  # a kernel writes its versions there
    return notebook


def with_small_pictures(notebook: NotebookNode) -> NotebookNode:
    """The notebook with its figures in 128 colours: that takes a third of the bytes, and looks the same."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if (png := output.get("data", {}).get("image/png")) is not None:
                small = io.BytesIO()
                picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
                picture.quantize(128).save(small, "PNG", optimize=True)
                output.data["image/png"] = base64.b64encode(small.getvalue()).decode()
    return notebook


def main(names: Sequence[str]) -> None:
    paths = [FOLDER / f"{Path(name).stem}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        nbformat.write(with_small_pictures(executed(path)), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
