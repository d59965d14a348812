"""The picture of a file of JSON lines: kernel time of the cache update against batch size, XLA's above it."""

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


def main(lines: Path, out: Path) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in lines.read_text().splitlines()]
    device = found[-1]["device"]
    cases = [case for case in found if case.get("tokens") == 1 and case["model"] == "flash"]
    mpl.use("Agg")
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
        axis.set(title=title, xlabel="requests", xscale="log", yscale="log")
        axis.set_xticks([1, 8, 64, 256], ["1", "8", "64", "256"])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    axes[0].set_ylabel("kernel time of one layer, us")
    figure.suptitle(f"Cache update of one layer, one token per request, V4-Flash sizes, cold L2 ({device})")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
