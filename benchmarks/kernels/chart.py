"""Pictures of recorded lines, as SVG: time against the number of requests, a panel for each sort of work."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.kernels.lines import Line, read_lines

Mark = Literal["here", "public", "xla"]
MARKS: dict[Mark, str] = {"here": "this library", "public": "public CUDA", "xla": "XLA"}
COLORS = ("#1a66c2", "#d9541e", "#2e8b57", "#8145b5")
REQUESTS = (1, 8, 64, 256)
WIDTH, PLOT, LEFT, TOP, GAP = 1080, (270, 270), 62, 60, 350  # pixels; GAP from one panel to the next


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Times of one sort of work by one implementation."""

    label: str
    mark: Mark
    points: dict[int, float]  # requests -> us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    series: list[Series]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """An SVG of panels side by side, on one logarithmic scale of microseconds."""
    times = [us for panel in panels for series in panel.series for us in series.points.values()]
    low, high = _round_down(min(times)), -_round_down(-max(times))
    entries = max(len(_labels(panel)) for panel in panels)
    height = TOP + PLOT[1] + 70 + 18 * entries
    elements = [_text(WIDTH / 2, 22, title, size=15)]
    for number, panel in enumerate(panels):
        elements += _panel(panel, LEFT + number * GAP, low, high, is_first=number == 0)
    elements += _key({series.mark for panel in panels for series in panel.series}, height - 14)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *elements, "</svg>", ""])


def _round_down(us: float) -> float:
    """To 1, 2 or 5 times a power of ten; a negative number is rounded away from 0."""
    power = 10 ** math.floor(math.log10(abs(us)))
    steps = [step * power for step in (1, 2, 5, 10)]
    return max(step for step in steps if step <= us) if us > 0 else -min(step for step in steps if step >= -us)


def _labels(panel: Panel) -> list[str]:
    return list(dict.fromkeys(series.label for series in panel.series))


def _panel(panel: Panel, left: float, low: float, high: float, *, is_first: bool) -> list[str]:
    width, height = PLOT
    bottom = TOP + height

    def place(requests: float, us: float) -> tuple[float, float]:
        across = math.log(requests) / math.log(REQUESTS[-1]) * (width - 20) + 10
        up = math.log(us / low) / math.log(high / low) * height
        return left + across, bottom - up

    out = [_text(left + width / 2, TOP - 12, panel.title, size=14)]
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in (1, 2, 5):
            us = step * 10.0**exponent
            if low <= us <= high:
                y = place(1, us)[1]
                out.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="{"#bbb" if step == 1 else "#eee"}"/>')
                if is_first or step == 1:
                    out.append(_text(left - 6, y + 4, f"{us:g}", anchor="end"))
    for requests in REQUESTS:
        x = place(requests, low)[0]
        out.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#eee"/>')
        out.append(_text(x, bottom + 16, str(requests)))
    out.append(_text(left + width / 2, bottom + 33, "requests"))
    if is_first:
        middle = TOP + height / 2
        words = html.escape("kernel time, us")
        rotated = f'transform="rotate(-90 16 {middle:.1f})"'
        out.append(f'<text x="16" y="{middle:.1f}" text-anchor="middle" font-size="12" {rotated}>{words}</text>')
    labels = _labels(panel)
    for series in panel.series:
        points = [place(requests, us) for requests, us in sorted(series.points.items())]
        out += _curve(points, COLORS[labels.index(series.label)], series.mark)
    for number, label in enumerate(labels):
        y = bottom + 54 + 18 * number
        out.append(f'<path d="M{left} {y - 4}h18" stroke="{COLORS[number]}" stroke-width="3"/>')
        out.append(_text(left + 25, y, label, anchor="start"))
    return out


def _curve(points: list[tuple[float, float]], color: str, mark: Mark) -> list[str]:
    dash = {"here": "", "public": ' stroke-dasharray="6 4"', "xla": ' stroke-dasharray="2 3"'}[mark]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    out = [f'<path d="{path}" stroke="{color}" stroke-width="1.6" fill="none"{dash}/>']
    for x, y in points:
        if mark == "here":
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
        elif mark == "public":
            box = f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'
            out.append(f'<rect {box} fill="#fff" stroke="{color}" stroke-width="1.6"/>')
        else:
            cross = f"M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7"
            out.append(f'<path d="{cross}" stroke="{color}" stroke-width="1.6"/>')
    return out


def _key(marks: set[Mark], y: float) -> list[str]:
    out, x = [], WIDTH / 2 - 90 * len(marks)
    for mark, name in MARKS.items():
        if mark in marks:
            out += _curve([(x, y - 4), (x + 34, y - 4)], "#444", mark)
            out.append(_text(x + 44, y, name, anchor="start"))
            x += 180
    return out


def _text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'


UPDATES = {
    "CSA": ("csa", "ring", "one in 4 does"),
    "HCA, ring tail": ("hca", "ring", "one in 128 does"),
    "HCA, online tail": ("hca", "online", "one in 128 does"),
}


def draw_updates(lines: list[Line]) -> str:
    """What a layer writes for one token of each request, of lines of ``update``."""
    cases = [line for line in lines if line.get("tokens") == 1 and line["model"] == "flash"]
    panels = []
    for title, (kind, tail, some) in UPDATES.items():
        series, labels = [], {"all": "every request completes an entry", "mix": some, "none": "none does"}
        for flushing, label in labels.items():
            key = (kind, tail, flushing, "fp8_row")
            chosen = [c for c in cases if (c["kind"], c["hca_tail"], c["flushing"], c["kv_format"]) == key]
            series += _measured(label, chosen)
        panels.append(Panel(title=title, series=series))
    return draw(f"Cache update of one layer, one token per request, V4-Flash, cold L2 ({_device(lines)})", panels)


READS: dict[str, dict[str, dict[str, object]]] = {
    "decode attention": {
        "CSA, 64 heads, 128 + 512 keys": dict(op="attention", kind="csa", heads=64, kv_format="fp8_row", tokens=1),
        "CSA, 128 heads, 128 + 1024 keys": dict(op="attention", kind="csa", heads=128, tokens=1),
        "HCA, 64 heads, 128 + 1024 keys": dict(op="attention", kind="hca", tokens=1),
        "window alone, 64 heads": dict(op="attention", kind="swa", tokens=1),
    },
    "indexer scores of 32,768 entries": {
        form: dict(op="indexer", indexer_format=form, entries=32768, tokens=1) for form in ("mxfp4", "nvfp4")
    },
    "top-k": {
        f"{entries} to {picks}": dict(op="topk", entries=entries) for entries, picks in ((8192, 512), (32768, 1024))
    },
}


def draw_reads(lines: list[Line], public: list[Line]) -> str:
    """What a layer reads for one token of each request, of lines of ``reads``, with public CUDA beside it."""
    panels = []
    for title, curves in READS.items():
        series = []
        for label, wanted in curves.items():
            chosen = [line for line in lines if wanted.items() <= line.items()]
            beside = {
                line["batch"]: other["us"] for line in chosen for other in public if line["case"] in other["beside"]
            }
            series += _measured(label, chosen)
            series += [Series(label=label, mark="public", points=beside)] if beside else []
        panels.append(Panel(title=title, series=series))
    return draw(f"Reads of one layer for one token per request, cold L2 ({_device(lines)})", panels)


def _measured(label: str, lines: list[Line]) -> list[Series]:
    found, marks = [], dict[str, Mark](pallas="here", xla="xla")
    for backend, mark in marks.items():
        if points := {line["batch"]: line[backend]["median"] for line in lines if backend in line}:
            found.append(Series(label=label, mark=mark, points=points))
    return found


def _device(lines: list[Line]) -> str:
    return lines[-1]["device"]


def main(path: Path, out: Path) -> None:
    """Draw the picture of a file of lines, as a run of one's own writes it."""
    lines = read_lines(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(draw_reads(lines, []) if any("op" in line for line in lines) else draw_updates(lines))
