"""How the work on one request is split: into units for its compressor, and jobs for single warps.

The grid is [B, units]. A unit is a cluster of CTAs. The first units of a request belong to the compressor. Jobs either
get units of their own after these, or are done by the warps of the compressor's units as well ("ride along").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pallas_kernels.language.lanes import Row, Team
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.values import Value
from pallas_kernels.update.batch import Block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The CTAs of a unit."""

    cluster: int = 1
    warpgroups: int = 1  # of each CTA
    shared_bytes: int = 0  # of each CTA

    @property
    def parts(self) -> int:
        """Number of warpgroups in a unit."""
        return self.cluster * self.warpgroups

    @property
    def warps(self) -> int:
        """Number of warps in a unit."""
        return self.parts * WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Rows that are each processed by one warp."""

    count: int  # per request
    dim: int  # channels of a row
    run: Callable[[Block, Row, Value], None]  # does the i-th job, on a row spread over the warp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All work on one request."""

    units: int  # of the compressor
    split: Split
    jobs: tuple[Jobs, ...]
    job_units: int  # units that only do jobs; if 0, jobs ride along with the compressor's units

    @classmethod
    def of(cls, units: int, split: Split, jobs: tuple[Jobs, ...], *, ride_along: bool) -> Work:
        job_units = 0 if ride_along else -(-sum(some.count for some in jobs) // split.warps)
        return cls(units=units, split=split, jobs=jobs, job_units=job_units)

    def grid(self, batch: int) -> Grid:
        split = self.split
        return Grid(
            blocks=(batch, self.units + self.job_units),
            warpgroups=split.warpgroups,
            cluster=split.cluster,
            shared_bytes=split.shared_bytes,
        )

    def run(self, block: Block, run_unit: Callable[[Value], None] | None) -> None:
        """Do the share of one CTA. ``run_unit`` does the compressor's part, given the number of the unit."""
        machine = block.machine
        unit, team, warps = machine.block(1), Team(machine, WARP), self.split.warps
        warp = machine.thread // WARP
        if self.split.cluster > 1:
            warp = machine.rank * (warps // self.split.cluster) + warp
        if not self.job_units:
            self._run_jobs(block, team, unit * warps + warp, self.units * warps)
            if run_unit is not None:
                run_unit(unit)
            return
        with machine.when(unit >= self.units):
            self._run_jobs(block, team, (unit - self.units) * warps + warp, self.job_units * warps)
        if run_unit is not None:
            with machine.when(unit < self.units):
                run_unit(unit)

    def _run_jobs(self, block: Block, team: Team, warp: Value, num_warps: int) -> None:
        """Distribute jobs in turn over warps 0 .. num_warps - 1.

        Each kind of jobs begins after the last warp of the one before.
        """
        machine, before = block.machine, 0
        for some in self.jobs:
            for i in range(-(-some.count // num_warps)):
                job = warp - before + i * num_warps
                with machine.when((job >= 0) & (job < some.count)):
                    some.run(block, Row(team, some.dim), job)
            before += some.count
