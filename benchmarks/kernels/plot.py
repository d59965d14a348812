"""Draws a file of JSON lines as a picture: kernel time against batch size, with XLA's time for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

PANELS = {
    "CSA": ("csa", "ring", {"all": "every request completes an entry", "mix": "one in 4", "none": "none"}),
    "HCA, ring tail": ("hca", "ring", {"all": "every request completes an entry", "mix": "one in 128", "none": "none"}),
    "HCA, online tail": ("hca", "online", {"all": "every request completes an entry", "none": "none"}),
}


READS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "decode attention": (
        "attention",
        {
            "CSA, 64 heads, 128 + 512 keys": dict(kind="csa", heads=64, kv_format="fp8_row", tokens=1),
            "HCA, 64 heads, 128 + 1024 keys": dict(kind="hca"),
            "CSA, 128 heads, 128 + 1024 keys": dict(kind="csa", heads=128),
            "window only, 64 heads": dict(kind="swa"),
        },
    ),
    "indexer scores of 32768 entries": (
        "indexer",
        {form: dict(indexer_format=form, entries=32768, tokens=1) for form in ("mxfp4", "nvfp4")},
    ),
    "top-k": (
        "topk",
        {f"{entries} to {picks}": dict(entries=entries) for entries, picks in ((8192, 512), (32768, 1024))},
    ),
}


def main(lines: Path, out: Path) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in lines.read_text().splitlines()]
    device = found[-1]["device"]
    mpl.use("Agg")
    figure = draw_reads(found, device) if any("op" in line for line in found) else draw_updates(found, device)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def draw_reads(found: list[dict[str, Any]], device: str) -> Any:
    figure, axes = plt.subplots(1, len(READS), figsize=(13, 5))
    for axis, (title, (op, curves)) in zip(axes, READS.items(), strict=True):
        for number, (label, wanted) in enumerate(curves.items()):
            chosen = [line for line in found if line.get("op") == op and wanted.items() <= line.items()]
            chosen.sort(key=lambda line: line["batch"])
            for backend, style in (("pallas", "o-"), ("xla", "x")):
                timed = {line["batch"]: line[backend]["median"] for line in chosen if backend in line}
                if timed:
                    axis.plot(
                        list(timed), list(timed.values()), style, color=f"C{number}", label=f"{label} ({backend})"
                    )
        _finish(axis, title)
    axes[0].set_ylabel("kernel time, us")
    figure.suptitle(f"What one layer reads for one token per request, cold L2 ({device})")
    return figure


def _finish(axis: Any, title: str) -> None:
    axis.set(title=title, xlabel="requests", xscale="log", yscale="log")
    axis.set_xticks([1, 8, 64, 256], ["1", "8", "64", "256"])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def draw_updates(found: list[dict[str, Any]], device: str) -> Any:
    cases = [case for case in found if case.get("tokens") == 1 and case["model"] == "flash"]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 5), sharey=True)
    for axis, (title, (kind, tail, labels)) in zip(axes, PANELS.items(), strict=True):
        for (flushing, label), color in zip(labels.items(), ("C3", "C1", "C0"), strict=False):
            chosen = [
                case
                for case in cases
                if (case["kind"], case["flushing"], case["hca_tail"], case["kv_format"])
                == (kind, flushing, tail, "fp8_row")
            ]
            chosen.sort(key=lambda case: case["batch"])
            for backend, style in (("pallas", "o-"), ("xla", "x:")):
                timed = [case for case in chosen if backend in case]
                batches, times = [case["batch"] for case in timed], [case[backend]["median"] for case in timed]
                axis.plot(batches, times, style, color=color, label=f"{label} ({backend})")
        _finish(axis, title)
    axes[0].set_ylabel("kernel time of one layer, us")
    figure.suptitle(f"Cache update of one layer, one token per request, V4-Flash sizes, cold L2 ({device})")
    return figure
