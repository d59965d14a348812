"""Storing prompts: which rows a pass stores, and how many tokens of each, so that a few programs serve all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dsv4jax.cache.shards import OF_ROWS, on_host, placed
from dsv4jax.model.generation.held import Shards
from dsv4jax.model.generation.loop import EVERYTHING, pending, store
from dsv4jax.model.generation.state import Loop
from dsv4jax.model.params import ModelParams

# Tokens of a pass: of each row, or of a row alone that lacks more than those.
SHORT, LONG, LONGEST = 128, 1024, 4096


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Stores the prompts of the rows of a loop, as ``store`` does."""

    params: ModelParams
    shards: Shards
    stop_tokens: jax.Array  # int32 [any]

    def store_all(self, loop: Loop) -> tuple[Loop, bool]:
        """Store what all rows lack. Returns the loop, which is donated, and whether they lacked anything."""
        lacking = on_host(pending(loop)).reshape(self.shards.count, -1) - 1
        passes = self.passes(lacking.tolist())
        for rows, chunk in passes:
            loop = store(self.params, loop, *self.given(rows), chunk=chunk)
        return loop, bool(passes)

    def store_rows(self, loop: Loop, spans: Mapping[int, tuple[int, int]]) -> Loop:
        """Store tokens of the texts of some rows, from one place to another, side by side. The loop is donated.

        Rows are numbers among those of all shards, of each of which there is one at most.
        """
        rows, until = np.full((2, self.shards.count), -1, np.int32)
        for row, (_, end) in spans.items():
            shard = row // self.shards.rows
            rows[shard], until[shard] = row % self.shards.rows, end
        most = max(end - first for first, end in spans.values())
        chunk = self._chunk(most)
        for _ in range(0, most, chunk):
            loop = store(self.params, loop, *self.given(rows, until), chunk=chunk)
        return loop

    def given(
        self, rows: Sequence[int] | np.ndarray, until: np.ndarray | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what ``store`` takes besides, for rows of all shards."""
        until = np.full(len(rows), EVERYTHING) if until is None else until
        each = np.asarray(rows, np.int32), np.asarray(until, np.int32)
        return self.stop_tokens, *placed(each, self.params.mesh, OF_ROWS)

    def passes(self, lacking: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
        """Return the passes that store so many tokens of the rows of each shard.

        Each is (rows, as many of each shard and -1 for none; tokens of each).
        """
        chunk = self._chunk(max(itertools.chain(*lacking)))
        turns = [
            [row for row, count in enumerate(of_shard) if count > SHORT for _ in range(0, count, chunk)]
            for of_shard in lacking
        ]
        long = [(list(rows), chunk) for rows in itertools.zip_longest(*turns, fillvalue=-1)]
        is_short = any(0 < count <= SHORT for count in itertools.chain(*lacking))
        all_rows = list(range(self.shards.rows)) * self.shards.count
        return long + [(all_rows, min(SHORT, self.shards.plan.max_context))] * is_short

    def _chunk(self, most: int) -> int:
        """Tokens of a pass of a row alone, if rows lack up to so many."""
        return min(LONG if most <= LONG else LONGEST, self.shards.plan.max_context)
