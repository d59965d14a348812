"""The table of a whole model's parts, made of the lines that ``python -m benchmarks.model --out`` wrote."""

from __future__ import annotations

import dataclasses

from benchmarks.kernels.lines import Line, Results
from benchmarks.kernels.tables import number, table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A row for each number of tokens."""

    words: str
    case: str  # with a place for the number of tokens
    tokens: tuple[int, ...]


PARTS = (
    Part(words="routed experts, bf16 activations", case="experts bf16 {} tokens", tokens=(1, 8, 64, 256, 1024, 4096)),
    Part(words="routed experts, FP8 activations", case="experts fp8 {} tokens", tokens=(64, 256, 1024, 4096)),
    Part(words="shared expert", case="shared expert {} tokens", tokens=(1, 64)),
    Part(words="router, with tiles of experts", case="router {} tokens, bias", tokens=(1, 64, 1024)),
    Part(words="between attention and experts", case="pallas after attention {} tokens", tokens=(1, 8, 64, 256, 4096)),
    Part(words="between experts and attention", case="pallas after experts {} tokens", tokens=(1, 8, 64)),
    Part(words="head", case="head {} tokens", tokens=(1, 8, 64)),
    Part(words="a CSA layer in a step, 4K tokens each", case="layer csa B{} 4096", tokens=(1, 64)),
    Part(words="an HCA layer in a step, 4K tokens each", case="layer hca B{} 4096", tokens=(1, 64)),
)


def model_parts(results: Results) -> str:
    """Kernel times of a model's parts, and public CUDA's on another card."""
    found = {line["case"]: line for line in results.model}
    cases = [(part.words, tokens, part.case.format(tokens)) for part in PARTS for tokens in part.tokens]
    rows = []
    for words, tokens, case in cases:
        beside = results.public_beside(case)
        public = "-" if beside is None else f"{beside['us']:,} ({beside['library']})"
        rows.append((words, f"{tokens:,}", number(_microseconds(found[case])), public))
    (device,) = {line["device"] for line in results.model}
    return table(f"part | tokens | us, {device} | public CUDA, us, NVIDIA H200", rows)


def _microseconds(line: Line) -> float:
    """The median of one launch, or of what a layer adds, or the sum of the medians of several launches."""
    if "us" in line:
        return line["us"]["median"]
    return line["median"] if "median" in line else line["microseconds"]
