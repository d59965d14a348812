"""The tables of a whole model, made of the lines that ``python -m benchmarks.model --out`` wrote."""

from __future__ import annotations

import dataclasses
import statistics

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
    Part(words="shared expert, in launches of its own", case="shared expert {} tokens", tokens=(1, 64)),
    Part(words="router, with tiles of experts", case="router {} tokens, bias", tokens=(1, 64, 1024)),
    Part(words="between attention and experts", case="pallas after attention {} tokens", tokens=(1, 8, 64, 256, 4096)),
    Part(words="between experts and attention", case="pallas after experts {} tokens", tokens=(1, 8, 64)),
    Part(words="head", case="head {} tokens", tokens=(1, 8, 64)),
    Part(words="a CSA layer in a step, 4K tokens each", case="layer csa B{} 4096", tokens=(1, 64)),
    Part(words="an HCA layer in a step, 4K tokens each", case="layer hca B{} 4096", tokens=(1, 64)),
)

# What was timed over two H200: in words, how many tokens it makes, and the case without the mesh.
ON_MESH = (
    ("a token of one text, 4K before it", 1, "token of one text, 43 layers"),
    ("a prompt of 4,096 tokens, FP8 activations", 4096, "prompt of 4096 tokens, fp8, 43 layers"),
    ("a step of 64 requests, 32K each", 64, "step B64 32768, 43 layers"),
    ("a step of 256 requests, 8K each", 256, "step B256 8192, 43 layers"),
)

# Parts of a step over two H200, and how the names of their kernels begin. What is left is XLA's.
ON_DEVICE = {
    "routed experts": ("experts",),
    "products of attention and of the shared expert": ("product",),
    "attention, the indexer, updates of the cache": ("decode", "indexer", "top_k", "token_step", "grant_tokens"),
    "between sublayers": ("mix_streams",),
    "router": ("router",),
    "sums and gathers over devices, waiting included": ("psum", "_Z31nccl"),
    "XLA's other kernels, the head among them": ("",),
}


def model_parts(results: Results) -> str:
    """Kernel times of a model's parts on two cards, and public CUDA's on the first of them."""
    cards = results.model, results.model_h100
    found = [{line["case"]: line for line in lines} for lines in cards]
    cases = [(part.words, tokens, part.case.format(tokens)) for part in PARTS for tokens in part.tokens]
    rows = []
    for words, tokens, case in cases:
        beside = results.public_beside(case)
        public = "-" if beside is None else f"{beside['us']:,} ({beside['library']})"
        own = (number(_microseconds(of_card[case])) if case in of_card else "-" for of_card in found)
        rows.append((words, f"{tokens:,}", *own, public))
    first, second = (next(iter({line["device"] for line in lines})) for lines in cards)
    return table(f"part | tokens | us, {first} | us, {second} | public CUDA, us, {first}", rows)


def mesh_steps(results: Results) -> str:
    """Wall times of all layers of V4-Flash over two H200."""
    rows = []
    for words, tokens, case in ON_MESH:
        for mesh in ("1x2", "2x1"):
            found = [line["ms"] for line in results.mesh if line["case"] == f"{case}, {mesh}"]
            if not found:
                continue
            if isinstance(found[0], dict):
                ((middle, low, high),) = ((of["median"], of["low"], of["high"]) for of in found)
            else:
                middle, low, high = statistics.median(found), min(found), max(found)
            rows.append((words, mesh, f"{middle:.1f}", f"{low:.1f}-{high:.1f}", f"{tokens / middle * 1e3:,.0f}"))
    return table("what | mesh, data x model | ms | range | tokens per second", rows)


def mesh_parts(results: Results) -> str:
    """What kernels of a step take on each of two H200, by part."""
    cases = {"1 request, 4K": "kernels B1 4096", "64 requests, 32K each": "kernels B64 32768"}
    columns = []
    for case in cases.values():
        (line,) = (line for line in results.mesh if line["case"].startswith(case))
        sums = dict.fromkeys(ON_DEVICE, 0.0)
        for kernel, ms in line["ms"].items():
            sums[next(part for part, begins in ON_DEVICE.items() if kernel.startswith(begins))] += ms
        columns.append([*sums.values(), sum(sums.values())])
    names = *ON_DEVICE, "in all"
    rows = [(name, *(f"{ms:.2f}" for ms in row)) for name, row in zip(names, zip(*columns, strict=True), strict=True)]
    return table(" | ".join(("ms on a device, over 1x2", *cases)), rows)


def _microseconds(line: Line) -> float:
    """The median of one launch, or of what a layer adds, or the sum of the medians of several launches."""
    if "us" in line:
        return line["us"]["median"]
    return line["median"] if "median" in line else line["microseconds"]
