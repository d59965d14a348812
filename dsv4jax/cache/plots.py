"""Pictures of a cache, drawn with matplotlib (``pip install 'dsv4jax[demo]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from dsv4jax.cache.tables import Tables
from dsv4jax.checks import check_one_shard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FREE, SHARED = -1, -2
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#9c6b4e", "#3ca951", "#97bbf5")  # slots in turn
FREE_COLOUR, SHARED_COLOUR = "#eeeeee", "#333333"


def ownership(history: Tables | Sequence[Tables]) -> np.ndarray:
    """Return the slot that holds each block after each step, int [steps, num_blocks].

    An element is FREE if no slot holds the block, and SHARED if several do.

    Args:
      history: the tables after each step, either a sequence or one ``Tables`` whose leaves are stacked [steps, ...], as
        a scan returns them.

    Raises:
      ValueError: there are no tables, something else was given, or the tables are those of several shards.
    """
    if isinstance(history, Tables):
        tables = history
    elif history and all(isinstance(one, Tables) for one in history):
        tables = jax.tree.map(lambda *leaves: np.stack(leaves), *history)
    else:
        kinds = sorted({type(one).__name__ for one in history})
        raise ValueError(f"ownership: expected the Tables of one step at least, got a sequence of {kinds}")
    table, num_blocks = np.asarray(tables.block_table), tables.block_refs.shape[-1]
    if table.ndim != 3:
        raise ValueError("ownership: these are the tables of one step, unstacked: give [tables]")
    check_one_shard(tables.num_free, "ownership", on_host=True)
    owner = np.full((len(table), num_blocks), FREE)
    for step, slot, column in np.argwhere(table >= 0).tolist():
        block = table[step, slot, column]
        owner[step, block] = slot if owner[step, block] == FREE else SHARED
    return owner


def plot_ownership(history: Tables | Sequence[Tables], ax: Axes | None = None) -> Axes:
    """Draw which slot holds each block after each step. Each block is a line, coloured by slot.

    Args:
      history: as for ``ownership``.
      ax: where to draw. None makes a new figure, which is the ``.figure`` of the result.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    owner = ownership(history)
    ax = ax or Figure(figsize=(8, 4), layout="constrained").subplots()
    colours = draw_owners(ax, owner)
    slots = sorted(set(owner[owner >= 0].tolist()))
    names = {slot: f"slot {slot}" for slot in slots}
    if (owner == SHARED).any():
        names[SHARED] = "shared"
    ax.legend(
        handles=[Patch(color=colours[who], label=name) for who, name in names.items()],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    ax.xaxis.set_label_text("step")
    ax.yaxis.set_label_text("block")
    return ax


def draw_owners(ax: Axes, owner: np.ndarray) -> dict[int, str]:
    """Draw owner int [steps, blocks], a line per block. Returns the colours of FREE, of SHARED and of each slot."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.ticker import MaxNLocator

    colours = {SHARED: SHARED_COLOUR, FREE: FREE_COLOUR}
    colours |= {who: COLOURS[who % len(COLOURS)] for who in range(int(owner.max(initial=FREE)) + 1)}
    norm = BoundaryNorm(np.arange(SHARED - 0.5, len(colours) + SHARED), len(colours))
    cmap = ListedColormap(list(colours.values()))
    ax.imshow(owner.T, cmap=cmap, norm=norm, aspect="auto", interpolation="nearest", origin="lower")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title("pool: owner of each block, grey = free", fontsize="medium", loc="left")
    return colours
