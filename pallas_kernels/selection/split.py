"""How a row lies over the lanes of one or several blocks."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.launch import MAX_CLUSTER
from pallas_kernels.language.machine import VECTOR, WARPGROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a row lies over lanes.

    A trip is one vector for each of a lane's maxima. The n-th vectors of all trips are a bundle, and share a maximum.
    """

    warpgroups: int  # per block
    cluster: int  # blocks per row
    bundles: int  # per lane
    keep: bool = False  # a row of one trip stays in registers; else what may be among the largest is read again

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def trip(self) -> int:
        """Vectors."""
        return self.threads * self.cluster * self.bundles

    def is_single(self, size: int) -> bool:
        """Whether one trip is a whole row."""
        return size <= self.trip * VECTOR

    def groups(self, k: int) -> int:
        """Per lane. With twice as many in a row as are to be found, little more than those reaches the bound."""
        groups = 1
        while groups < self.bundles and groups * self.threads * self.cluster < 2 * k:
            groups *= 2
        return groups


def split_of(rows: int, size: int) -> Split:
    """What measured best on an H200."""
    cluster = 1
    # Clusters that fill the GPU are placed slowly: pairs of blocks are worth it for long rows only, more never.
    while cluster < MAX_CLUSTER and size > 8192 * cluster:
        if 2 * cluster * rows > (128 if cluster == 1 and size > 65536 else 64):
            break
        cluster *= 2
    share = -(-size // cluster)
    if share <= 8192:
        return Split(warpgroups=4, cluster=cluster, bundles=4, keep=True)
    # Of blocks with 16 bundles a lane only one fits on a multiprocessor.
    return Split(warpgroups=4, cluster=cluster, bundles=8 if share <= 16384 or rows * cluster > 128 else 16)
