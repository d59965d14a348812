"""Every notebook runs from top to bottom, and what is stored in it is what a run gives.

Outputs are compared as text, with timings masked. Figures are compared by their size and number of axes, not by pixels.
"""

import ast
import base64
import re
import struct
import textwrap

import pytest

import dsv4jax as d4
from tests.support.paths import ROOT

for needed in ("nbformat", "nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(needed, reason=f"{needed} is missing: install the extra dev")

import nbformat  # noqa: E402

from notebooks.run import executed  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS, "no notebooks found"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
RUN_IN_CHECK = ("01_quickstart",)  # the others run in sweeps; pages show the same calls

LIBRARY = ("dsv4jax", "pallas_kernels")
# What docs/api describes, by full name.
DOCUMENTED = {
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
TIMING = re.compile(r"\b\d[\d.,]* ?(?:ns|us|µs|ms|s)\b")


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def masked(text: str) -> str:
    """The text with every timing, such as "12.3 ms", replaced."""
    return TIMING.sub("<time>", text)


def figure_pixels(png: str) -> tuple[int, int]:
    """(width, height) of a PNG in base64, from its header."""
    header = base64.b64decode(png)[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


def shown(cell) -> list[str]:
    """What a reader sees below a cell: the text printed, and each displayed value as text.

    A figure's text names its size and its axes. What goes to stderr is not part of it: other libraries warn there.
    """
    printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    displayed = [output.data["text/plain"] for output in cell.outputs if "data" in output]
    return [masked(text) for text in (printed, *displayed)]


def pictures(cell) -> list[str]:
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in RUN_IN_CHECK else pytest.mark.sweep) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
# The kernel and its messages live in libraries whose warnings are not ours; errors inside a cell still fail the test.
@pytest.mark.filterwarnings("default")
def test_stored_outputs_are_those_of_a_run(path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of the notebook's process, to compile quickly
    stored = code_cells(nbformat.read(path, as_version=4))
    again = f"python notebooks/run.py {path.stem}  # stores what a run gives"
    for number, (old, new) in enumerate(zip(stored, code_cells(executed(path)), strict=True), start=1):
        assert shown(new) == shown(old), f"code cell {number} of {path.name} shows something else now: {again}"
        for old_picture, new_picture in zip(pictures(old), pictures(new), strict=True):
            # A figure is cut out along its labels, so its edges move with the fonts of a machine.
            assert figure_pixels(new_picture) == pytest.approx(figure_pixels(old_picture), rel=0.05), again


@each_notebook
def test_stored_outputs_are_of_one_clean_run(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any(pictures(cell) for cell in cells), "each notebook has a figure"
    assert path.stat().st_size < 250_000  # outputs are for reading: four figures at 150 dpi, in few colours


@each_notebook
def test_first_cell_says_what_is_needed(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert 'pip install ".[demo]"' in first.source


def private_names(source: str) -> list[str]:
    """The names in a cell that a reader should not rely on.

    They are: any name with a leading underscore; what is imported from the library and is neither at its top nor
    described in docs/api; and any attribute of ``d4`` that is not at the top, or of a group and not in docs/api.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in LIBRARY and name not in LIBRARY]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            public = DOCUMENTED | {f"dsv4jax.{name}" for name in dir(d4)}
            found += [name for name in names if name.split(".")[0] in LIBRARY and name not in public]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
            match ast.unparse(node).split("."):
                case ["d4", name] if name not in dir(d4):
                    found.append(f"d4.{name}")
                case ["d4", group, name] if group in d4._GROUPS and f"dsv4jax.{group}.{name}" not in DOCUMENTED:
                    found.append(f"d4.{group}.{name}")
        else:
            continue
        found += [name for name in names if any(part.startswith("_") for part in name.split("."))]
    return found


@each_notebook
def test_notebooks_use_public_names(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert not [name for cell in cells for name in private_names(cell.source)]


def test_private_names_are_found():
    source = """
        import jax._src.core
        import dsv4jax.layer.layer
        import dsv4jax as d4
        from dsv4jax import fork, rope
        from dsv4jax.layer.dense import product_dtype, wide_product
        from dsv4jax.cache.plots import plot_ownership
        d4.plan_cache(d4.kinds, cache._private).memory_bytes()
        d4.cache.tree_bytes(d4.cache.tables)
    """
    assert sorted(private_names(textwrap.dedent(source))) == [
        "_private",
        "d4.cache.tables",
        "d4.kinds",
        "dsv4jax.layer.dense.product_dtype",
        "dsv4jax.layer.layer",
        "dsv4jax.rope",
        "jax._src.core",
    ]


def test_timings_are_masked_and_nothing_else():
    assert masked("12.3 ms a token, 1,024us in all, 2 s") == "<time> a token, <time> in all, <time>"
    text = "2 slots, 512 B, 3 shards, 4.5 MiB, f32, lengths [136 23]"
    assert masked(text) == text
