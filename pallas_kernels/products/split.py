"""How a product is divided over the blocks of a launch.

A warpgroup computes 64 outputs for all rows of its block, from a part of the inputs. The blocks of a cluster have the
same outputs and share the inputs, in equal parts; their sums are added in the order of the parts. So the order in which
a sum is formed depends on the weight's shape, and not on the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.language.target import GPU

TILE = 64  # outputs of a warpgroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The blocks of a launch, for each group of outputs."""

    cluster: int  # parts of the inputs
    warpgroups: int  # tiles of a block
    blocks: int  # clusters per group of outputs
    chunks: int  # per part


@functools.cache
def fastest_split(outputs: int, inputs: int, groups: int, chunk: int, gpu: GPU) -> Split:
    """Return the split that reads a weight [groups * outputs, inputs] fastest, by a model of what limits a block.

    A block's time is that of the bytes that it reads: its part of the weight, and for each warpgroup less than all
    that share them, the rows of x again.
    """
    tiles, chunks = outputs // TILE, inputs // chunk
    best: tuple[float, Split] | None = None
    for cluster in (1, *sorted(gpu.clusters)):
        if chunks % cluster:
            continue
        room = gpu.clusters.get(cluster, gpu.multiprocessors)
        for warpgroups in range(1, 6):
            blocks = -(-tiles // warpgroups)
            waves = -(-blocks * groups // room)
            part = chunks // cluster * chunk
            cost = waves * (warpgroups * TILE * part + 64 * part) + (16384 if cluster > 1 else 0)
            if best is None or cost < best[0]:
                best = cost, Split(cluster=cluster, warpgroups=warpgroups, blocks=blocks, chunks=chunks // cluster)
    assert best is not None, "one block per cluster is always possible"
    return best[1]
