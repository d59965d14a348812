"""How a row is divided among the lanes of one or several blocks."""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.launch import MAX_CLUSTER
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.values import VECTOR
from pallas_kernels.tuned import h200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a row is divided among lanes.

    A trip reads one vector for each of a lane's maxima. The n-th vectors of all trips are a bundle, and share a
    maximum.
    """

    warpgroups: int  # warpgroups per block
    cluster: int  # number of blocks that share a row
    bundles: int  # bundles per lane
    keep: bool = False  # whether a row of one trip stays in registers, instead of being read again

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def trip(self) -> int:
        """Number of vectors in a trip."""
        return self.threads * self.cluster * self.bundles

    def is_single(self, size: int) -> bool:
        """Return whether one trip covers a whole row."""
        return size <= self.trip * VECTOR

    def groups(self, k: int) -> int:
        """Return the number of groups per lane. With 2 k groups in a row, few more than k scores reach the bound."""
        groups = 1
        while groups < self.bundles and groups * self.threads * self.cluster < 2 * k:
            groups *= 2
        return groups


def split_of(rows: int, size: int) -> Split:
    """Return the split that was fastest on an H200."""
    cluster = 1
    # Clusters that fill the GPU start slowly. In that case, pairs of blocks pay off only for long rows, and larger
    # clusters never.
    while cluster < MAX_CLUSTER and size > h200.SPLIT_SCORES * cluster:
        is_long = cluster == 1 and size > h200.LONG_ROW
        if 2 * cluster * rows > (h200.MOST_BLOCKS_OF_LONG_ROWS if is_long else h200.MOST_BLOCKS):
            break
        cluster *= 2
    share = -(-size // cluster)
    if share <= h200.SPLIT_SCORES:
        return Split(warpgroups=4, cluster=cluster, bundles=4, keep=True)
    is_many = share <= 2 * h200.SPLIT_SCORES or rows * cluster > h200.MANY_BLOCKS
    # With 16 bundles per lane, only one block fits on a multiprocessor.
    return Split(warpgroups=4, cluster=cluster, bundles=8 if is_many else 16)
