"""The recorded lines: what this project's programs measured, what was noted by hand, and what public CUDA takes.

A line is a JSON object. ``case`` names what was timed and ``device`` the hardware. Three sorts of files hold lines:

- ``h200*.jsonl``, ``h100*.jsonl`` and ``drafts.jsonl`` were written by the programs of this folder, by
  ``benchmarks.layer`` and ``benchmarks.model``. ``run`` marks a line of an earlier run.
- ``by_hand.jsonl`` holds figures that somebody copied from a program's output; ``program`` says which program that was.
- ``public_cuda.jsonl`` holds the times of other libraries' kernels, with ``library``, ``kernel`` and ``timed`` (how);
  ``version`` is null where it was not noted. ``beside`` names the cases of this project that do the same work.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """All recorded lines."""

    updates: list[Line]  # what writes the cache
    reads: list[Line]  # what reads it, and decode steps
    layers: list[Line]  # whole layers
    h100: list[Line]  # some of the last two on an H100
    model: list[Line]  # the parts of a whole model
    model_h100: list[Line]  # these, and whole layers, on an H100
    mesh: list[Line]  # a whole model over two H200
    drafts: list[Line]  # parts of passes with drafts, and whole passes
    by_hand: list[Line]
    public: list[Line]

    @classmethod
    def load(cls) -> Results:
        names = dict(updates="h200", reads="h200_reads", layers="h200_layers", h100="h100", model="h200_model")
        names |= dict(model_h100="h100_model", mesh="h200_mesh", drafts="drafts", by_hand="by_hand")
        names |= dict(public="public_cuda")
        return cls(**{field: read_lines(RESULTS / f"{name}.jsonl") for field, name in names.items()})

    def case(self, name: str) -> Line:
        """The one line of this project with this name, without those that an H100 repeats.

        Raises:
          KeyError: no line has it, or several have.
        """
        lines = *self.updates, *self.reads, *self.layers, *self.model, *self.by_hand
        found = [line for line in lines if line["case"] == name]
        if len(found) != 1:
            raise KeyError(f"{name!r} is the name of {len(found)} lines")
        return found[0]

    def public_beside(self, name: str) -> Line | None:
        """Public CUDA's line that is to be read beside a case of this project."""
        return next((line for line in self.public if name in line["beside"]), None)

    def ceilings(self, lines: list[Line], name: str) -> list[float]:
        """A measured limit of the hardware, such as "copy GB/s", in each run that a file holds."""
        return [line[name] for line in lines if line["case"] == "ceilings" and name in line]
