"""Which accesses to shared memory come before which: vector clocks.

An agent is whoever accesses shared memory: a warp; the products in tensor memory that a warp has started; or a barrier,
which stands for the copies that count there. What an agent does between two of its releases is an epoch. Each warp
knows, of every agent of its cluster, the last epoch that comes before what the warp does next. It learns that at
barriers, from those that arrived there. So an order is found to be missing whatever the warps happened to do first.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.language.machine import WARP

SEES, FOLLOWS = 0, 1  # what a warp sees; and what it comes after, though it may not see it


class Clocks:
    """The clocks of all warps of a launch, and of their barriers in shared memory."""

    def __init__(self, blocks: int, threads: int, cluster: int):
        self.of_block, self.cluster = threads // WARP, cluster
        self.of_cluster = self.of_block * cluster  # warps; also the first column of products, after those of warps
        warps = blocks * self.of_block
        self.own = np.arange(warps) % self.of_cluster  # each warp's column
        self.epoch = np.ones(warps, np.int32)
        self.known = np.zeros((2, warps, 2 * self.of_cluster), np.int32)
        self._gathered = np.zeros((2, blocks, 0, 2 * self.of_cluster), np.int32)  # from those that have arrived
        self._shown = self._gathered.copy()  # to those that wait for the last phase
        self._left = np.zeros_like(self.known[0])  # what each warp knew when it arrived for ``cluster_wait``
        self._snapshot: np.ndarray | None = None

    def follows(self) -> np.ndarray:
        """Return what each warp comes after now, [warps, agents]. It does not change later."""
        snapshot = self.known[FOLLOWS].copy() if self._snapshot is None else self._snapshot
        self._snapshot = snapshot
        return snapshot

    def add_barriers(self, count: int) -> None:
        """Have so many more barriers in each block."""
        more, columns = [(0, 0)] * 2, (0, count * self.cluster)
        self.known = np.pad(self.known, [*more, columns])
        self._left = np.pad(self._left, [(0, 0), columns])
        self._gathered, self._shown = (np.pad(x, [*more, (0, count), columns]) for x in (self._gathered, self._shown))
        self._snapshot = None

    def column(self, block: np.ndarray, barrier: np.ndarray) -> np.ndarray:
        """Return the columns of barriers, by their numbers among those of a block."""
        return 2 * self.of_cluster + barrier * self.cluster + block % self.cluster

    def release(self, warps: np.ndarray) -> np.ndarray:
        """End the epochs of warps, whose lanes then know what their own warp did. Returns what each of them knows."""
        self.known[:, warps, self.own[warps]] = self.epoch[warps]
        self.epoch[warps] += 1
        self._snapshot = None
        return self.known[:, warps]

    def meet(self, arrived: np.ndarray, size: int) -> None:
        """Let the warps of groups of ``size`` lanes meet, of those groups that have arrived."""
        of_group = size // WARP
        self.release(np.flatnonzero(np.repeat(arrived, of_group)))
        if of_group > 1:
            groups = self.known.reshape(2, -1, of_group, self.known.shape[-1])
            groups[:, arrived] = groups[:, arrived].max(2, keepdims=True)

    def arrive_relaxed(self, warps: np.ndarray) -> None:
        """Note what warps come after, for ``meet_relaxed``."""
        self.known[FOLLOWS, warps, self.own[warps]] = self.epoch[warps]
        self.epoch[warps] += 1
        self._left[warps] = self.known[FOLLOWS, warps]

    def meet_relaxed(self) -> None:
        """Let all warps come after what those of their cluster had done when they arrived, without seeing it."""
        groups = self._left.reshape(-1, self.of_cluster, self._left.shape[-1])
        known = self.known[FOLLOWS].reshape(groups.shape)
        np.maximum(known, groups.max(1, keepdims=True), out=known)
        self._snapshot = None

    def arrive(self, rows: np.ndarray, block: np.ndarray, barrier: np.ndarray) -> None:
        """Add what arriving warps know, [2, arrivals, agents], to what barriers will show."""
        place = block * self._gathered.shape[2] + barrier
        order = np.argsort(place, kind="stable")
        place, first = np.unique(place[order], return_index=True)
        gathered = self._gathered.reshape(2, -1, self._gathered.shape[-1])
        gathered[:, place] = np.maximum(gathered[:, place], np.maximum.reduceat(rows[:, order], first, axis=1))

    def end_phase(self, block: np.ndarray, barrier: np.ndarray, phase: np.ndarray) -> None:
        """Show those who wait what has been gathered, and copies that counted in this phase, numbered from 1."""
        self._gathered[:, block, barrier, self.column(block, barrier)] = phase
        self._shown[:, block, barrier] = self._gathered[:, block, barrier]

    def wait(self, warps: np.ndarray, block: np.ndarray, barrier: np.ndarray) -> None:
        """Let warps come after what their barriers show, and see it."""
        self.known[:, warps] = np.maximum(self.known[:, warps], self._shown[:, block, barrier])
        self._snapshot = None
