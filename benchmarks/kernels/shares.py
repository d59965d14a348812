"""The tables of docs/speed-limits.md: what a layer's time consists of, and how close kernels come to their bound."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.lines import Line, Results
from benchmarks.kernels.tables import ACTIVATIONS, CHUNK_PARTS, KINDS, number, part, percent, requests, table

SHORT = 2.0  # us: where bytes and operations need less, a launch and its first reads are what takes time

# Kernels and the beginnings of their names. A decode step's update also computes what its tokens contribute.
PARTS = {
    "products": CHUNK_PARTS["products, with rounding and widening"],
    "queries": CHUNK_PARTS["queries"],
    "update": ("token_step", "token_parts", "append_chunk"),
    "scores": CHUNK_PARTS["scores"],
    "top-k": CHUNK_PARTS["top-k"],
    "attention": CHUNK_PARTS["attention"],
}
LAYERS = {
    "layer csa B1 32768 stored bf16": "CSA, 1 request",
    "layer csa B64 32768 stored bf16": "CSA, 64 requests",
    "layer csa B256 16384 stored fp8_all": "CSA, 256 requests, " + ACTIVATIONS["fp8_all"],
    "layer hca B1 32768 stored bf16": "HCA, 1 request",
    "layer hca B64 32768 stored bf16": "HCA, 64 requests",
    "chunk of 4096 csa after 28672 stored bf16": "CSA, a chunk of 4,096",
    "chunk of 4096 csa after 28672 stored fp8_all": "CSA, a chunk of 4,096, " + ACTIVATIONS["fp8_all"],
    "chunk of 4096 hca after 28672 stored fp8_all": "HCA, a chunk of 4,096, " + ACTIVATIONS["fp8_all"],
}


def layer_parts(results: Results) -> str:
    """What the kernels of a layer take."""
    rows = []
    for case, words in LAYERS.items():
        line = results.case(case)
        taken = [part(line, names) for names in PARTS.values()]
        total = line["us"]["median"]
        # With spaces at which a line does not break.
        shares = (f"{number(us)} ({percent(us / total)})".replace(" ", "\u00a0") if us else "-" for us in taken)
        rows.append((words, number(total), *shares))
    return table(" | ".join(["us of a layer", "in all", *PARTS]), rows)


READS = {
    "attention csa B1 64 heads 128 + 512 fp8_row": "CSA attention, 1 request",
    "attention csa B64 64 heads 128 + 512 fp8_row": "CSA attention, 64 requests",
    "attention csa B256 64 heads 128 + 512 fp8_row": "CSA attention, 256 requests",
    "attention hca B128 64 heads 128 + 1024 fp8_row": "HCA attention, 128 requests",
    "attention csa B1 x 4096 tokens 64 heads 128 + 512 fp8_row": "CSA attention of a chunk",
    "attention hca B1 x 4096 tokens 64 heads 128 + 1024 fp8_row": "HCA attention of a chunk",
    "indexer mxfp4 B1 x 32768": "indexer scores, 1 request of 32,768 entries",
    "indexer mxfp4 B64 x 32768": "indexer scores, 64 requests of 32,768 entries",
    "topk B64 8192 to 512": "top-k, 64 requests, 8,192 to 512",
    "topk B256 32768 to 1024": "top-k, 256 requests, 32,768 to 1,024",
}


def _rows(results: Results) -> Iterator[tuple[str, float, float, str]]:
    """(words, us, least us, what bounds it)."""
    read = min(results.ceilings(results.reads, "read GB/s"))
    matmul = min(results.ceilings(results.reads, "matmul TFLOP/s"))
    copy = min(results.ceilings(results.updates, "copy GB/s"))
    for case, words in READS.items():
        line = results.case(case)
        bound = "memory" if line["bytes"] / read > line["flops"] / matmul / 1e3 else "tensor cores"
        yield words, line["pallas"]["median"], line["pallas"]["median"] * line["share of roofline"], bound
    for kind, batch in (("csa", 64), ("csa", 256), ("hca", 256)):
        line = results.case(f"flash {kind}{' ring' * (kind == 'hca')} B{batch} T1 all fp8_row")
        words = (
            f"cache update of {KINDS[kind]}{', ring tail' if kind == 'hca' else ''}, {requests(batch)}, all complete"
        )
        yield words, line["pallas"]["median"], line["bytes"] / copy / 1e3, "memory"
    for name, size in (("q_b 1024 -> 32768", 1024 * 32768), ("o_b 8192 -> 4096", 8192 * 4096)):
        for rows in (1, 64):
            line: Line = results.case(f"product {name} M{rows} stored bf16")
            least = {"memory": line["bytes"] / read / 1e3, "tensor cores": 2 * rows * size / matmul / 1e6}
            bound = max(least, key=lambda what: least[what])
            yield f"product {name}, {rows} row{'s' * (rows > 1)}", line["us"]["median"], least[bound], bound


def bounds(results: Results) -> str:
    """The least time that a kernel's bytes or operations need, and the share of its time that this is."""
    rows = [
        (words, number(us), "latency" if least < SHORT else bound, number(least), percent(least / us))
        for words, us, least, bound in _rows(results)
    ]
    return table("kernel | us | bound by | least us | share reached", rows)
