"""Puts the recorded figures where they are read: python -m benchmarks.kernels report

A table stands in one of ``PAGES`` between ``<!-- report: NAME -->`` and ``<!-- end of report -->``, and is the one of
that name in ``TABLES``. Pictures are the files of docs/speed/. Nothing here needs a GPU or JAX, and the same lines give
the same bytes: a test compares them with the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.kernels import mesh_times, model_table, shares, tables
from benchmarks.kernels.chart import draw_reads, draw_updates
from benchmarks.kernels.lines import Results

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/speed.md",
    "docs/speed-limits.md",
    "docs/tried.md",
    "docs/generation.md",
    "docs/sharding.md",
)
TABLES: dict[str, Callable[[Results], str]] = {
    make.__name__: make
    for make in (
        tables.summary,
        tables.ceilings,
        tables.update_decode,
        tables.update_other,
        tables.update_chunk,
        tables.gather,
        tables.attention,
        tables.scores,
        tables.topk,
        tables.queries,
        tables.steps,
        tables.stored_layers,
        tables.products,
        tables.wide_layers,
        tables.prefill,
        tables.prefill_model,
        tables.h100,
        tables.padding,
        model_table.model_parts,
        model_table.mesh_steps,
        model_table.mesh_parts,
        mesh_times.mesh_times,
        tables.drafts,
        tables.programs,
        tables.public_cuda,
        shares.layer_parts,
        shares.bounds,
    )
}
MARKED = re.compile(r"<!-- report: (\w+) -->\n.*?<!-- end of report -->", re.DOTALL)


def with_tables(page: str, results: Results) -> str:
    """A page with its tables made anew.

    Raises:
      ValueError: a marker names a table that there is not.
    """

    def made(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {list(TABLES)}")
        return f"<!-- report: {name} -->\n\n{TABLES[name](results)}\n\n<!-- end of report -->"

    return MARKED.sub(made, page)


def files(root: Path = ROOT) -> dict[str, str]:
    """Path under the root -> what belongs there."""
    results = Results.load()
    found = {name: with_tables((root / name).read_text(), results) for name in PAGES}
    found["docs/speed/cache_update.svg"] = draw_updates(results.updates)
    found["docs/speed/reads.svg"] = draw_reads(results.reads, results.public)
    return found


def main() -> None:
    for name, content in files().items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            print(f"wrote {name}")
