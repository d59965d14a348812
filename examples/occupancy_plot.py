"""A picture of a served schedule: what each request holds of the cache after each pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from batching import Served
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dsv4jax as d4
from dsv4jax.cache.plots import COLOURS, FREE, draw_owners

INK, SHADE = "#333333", "#e6e6ee"


def plot_occupancy(
    served: Mapping[d4.AttentionType, Served], configs: Mapping[d4.AttentionType, d4.DSV4Config], path: Path
) -> None:
    """Draw one column per layer kind and save it as PNG.

    The rows are: fill of the sliding window, fill of the tail, and blocks held, each with a lane per request; and the
    pool, which shows the owner of each block.
    """
    with mpl.rc_context({"font.size": 9, "axes.edgecolor": "#bbbbbb", "text.color": INK}):
        figure = Figure(figsize=(5.2 * len(served), 9.6), dpi=150, layout="constrained")
        axes = figure.subplots(4, len(served), squeeze=False, sharex="col", height_ratios=(5, 5, 5, 4))
        for column, (kind, run) in enumerate(served.items()):
            _draw_kind(axes[:, column], kind, run, configs[kind])
        figure.suptitle("What each request holds of the cache, pass by pass\n", fontsize=15, x=0.01, ha="left")
        figure.savefig(path)


def _draw_kind(axes: np.ndarray, kind: d4.AttentionType, run: Served, cfg: d4.DSV4Config) -> None:
    owner = np.array([p.request for p in run.passes])  # [passes, B]
    window, pool = axes[0], axes[3]
    window.text(0, 1.16, f"{kind.upper()} layer", transform=window.transAxes, fontsize=13, fontweight="bold")
    _lanes(window, owner, np.asarray(run.history.window), cfg.sliding_window, "sliding window", "rows")
    if kind == d4.AttentionType.SWA:
        for ax in axes[1:]:
            ax.set_axis_off()
        window.tick_params(labelbottom=True)
        window.set_xlabel("forward pass")
        _explain(axes[1])
    else:
        ratio, blocks = cfg.ratio(kind), np.asarray(run.history.blocks)
        _lanes(axes[1], owner, np.asarray(run.history.tail[kind]), ratio, "tail (unfinished entry)", "tokens")
        held = np.sum(blocks >= 0, axis=-1)
        _lanes(axes[2], owner, held, int(held.max()), "blocks held", "blocks")
        _ownership(pool, owner, blocks)
    for ax in axes:
        for i, p in enumerate(run.passes):
            if p.width > 1 and ax is not pool and ax.axison:
                ax.axvspan(i - 0.5, i + 0.5, color=SHADE, linewidth=0, zorder=0)
        ax.set_xlim(-0.5, len(run.passes) - 0.5)
        ax.spines[["top", "right"]].set_visible(False)


def _lanes(ax: Axes, owner: np.ndarray, value: np.ndarray, full: int, title: str, unit: str) -> None:
    """Draw one lane per request, of height ``full``, filled up to what the request holds after each pass."""
    passes = np.arange(len(owner))
    count = int(owner.max()) + 1
    for request in range(count):
        mine = owner == request  # [passes, B]; each request is in only one row
        alive = mine.any(axis=1)
        fill = np.where(alive, np.sum(np.where(mine, value, 0), axis=1) / full, 0)
        base = count - 1 - request
        first, last = passes[alive][[0, -1]]
        colour = COLOURS[request % len(COLOURS)]
        ax.hlines([base, base + 0.82], first - 0.5, last + 0.5, color=colour, linewidth=0.6, alpha=0.5)
        ax.fill_between(passes, base, base + 0.82 * fill, step="mid", where=alive, color=colour, linewidth=0)
    ax.set_yticks([count - 1 - r + 0.41 for r in range(count)], [f"request {r}" for r in range(count)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(-0.15, count)
    ax.set_title(f"{title}: a full lane is {full} {unit}", fontsize=9, loc="left")


def _ownership(ax: Axes, owner: np.ndarray, blocks: np.ndarray) -> None:
    """Draw the pool over time: a line per block that was ever held, in its owner's colour."""
    held_by = np.full((len(owner), int(blocks.max()) + 1), FREE)
    for i, rows in enumerate(blocks):
        for b, ids in enumerate(rows):
            held_by[i, ids[ids >= 0]] = owner[i, b]
    used = np.flatnonzero((held_by >= 0).any(axis=0))
    draw_owners(ax, held_by[:, used])
    ax.hlines(np.arange(1, len(used)) - 0.5, -0.5, len(owner) - 0.5, color="white", linewidth=1.5)
    ax.set_yticks(range(len(used)), [str(block) for block in used], fontsize=7 if len(used) > 12 else 9)
    ax.set_ylabel("block id")
    ax.set_xlabel("forward pass")


def _explain(ax: Axes) -> None:
    text = (
        "A window-only layer keeps nothing else.\n\n"
        "Shaded passes are wide: some row is being\nprefilled in chunks while the others decode.\n"
        "In white passes every row decodes one token.\n\n"
        "CSA completes an entry every 4 tokens, HCA\nevery 128; a block holds 128 tokens' entries."
    )
    ax.text(0.02, 0.85, text, transform=ax.transAxes, va="top", fontsize=10, linespacing=1.4)
