"""Queries of attention and of the indexer from few rows and two weights, whose tiles are in the same blocks.

V4-Flash has as many heads of the one as of the other. Two blocks that compute a head of attention compute one of the
indexer beside it, so that x is copied once for both, and the second launch does not take its time.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import jax

from pallas_kernels.formats import KeyRows
from pallas_kernels.language.barriers import Barrier
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.machine import WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, select
from pallas_kernels.products.epilogues.attention import HALVES, AttentionQueries
from pallas_kernels.products.epilogues.faces import PADDING, BlockSums, Extras, Finish, Lanes, LastSteps, Lines
from pallas_kernels.products.epilogues.indexer import IndexerQueries
from pallas_kernels.products.problem import Epilogue, Spec
from pallas_kernels.products.weights import TILE


@dataclasses.dataclass(frozen=True, kw_only=True)
class BothQueries(Epilogue):
    """A head of attention and one of the indexer, of two weights: each of the two blocks computes half of both.

    A block stores the lines of all rows of its half of the indexer's head. Then it gets the other half of half of the
    rows, of which it makes queries, and gives its own half of the others. The warpgroups that multiplied for the
    indexer do this while the others make queries of attention.
    """

    attention: AttentionQueries
    indexer: IndexerQueries

    name: ClassVar[str] = "product_of_queries"
    blocks: ClassVar[int] = HALVES

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        return self.attention.extras(rows, outputs)

    def state(self, rows: int, outputs: int) -> tuple[Spec, KeyRows[Spec]]:
        heads = outputs // self.attention.head_dim
        return self.attention.state(rows, outputs), self.indexer.state(rows, heads * self.indexer.dim)

    def finished(self, made: tuple[jax.Array, KeyRows[jax.Array]], rows: int) -> tuple[jax.Array, KeyRows[jax.Array]]:
        queries, key_queries = made
        return self.attention.finished(queries, rows), self.indexer.finished(key_queries, rows)

    @property
    def beside(self) -> int:
        """Tiles of a block that are of the indexer's weight."""
        return self.indexer.tiles // HALVES

    @property
    def tiles(self) -> int:
        return self.attention.tiles + self.beside

    def shared_bytes(self, lines: int) -> int:
        return self.attention.shared_bytes(lines) + lines // HALVES * (self.indexer.dim + PADDING) * 4

    def sent_bytes(self, lines: int) -> int:
        return self.attention.sent_bytes(lines) + lines // HALVES * self.indexer.dim * 4

    def few(self, block: BlockSums, extras: Extras, out: tuple[Buffer, KeyRows[Buffer]]) -> LastSteps:
        return block.with_lines(self._begin(block.machine, block.lines, extras["angles"], out))

    def _begin(self, machine: TensorCores, lines: Lines, table: Buffer, out: tuple[Buffer, KeyRows[Buffer]]) -> Finish:
        """Load angles, so that they are there when the queries are made."""
        queries, key_queries = out
        width, count, first = self.beside * TILE, lines.count // HALVES, self.attention.tiles * WARPGROUP
        is_attention, is_indexer = machine.thread < first, machine.thread >= first
        mine = dataclasses.replace(
            lines,
            count=count,
            first=lines.first + machine.rank * count,
            output=machine.block(0) * self.indexer.dim,
            lanes=Lanes(number=machine.thread - first, count=lines.lanes.count - first, here=is_indexer),
        )
        heads = Shared.take(machine, (count, self.indexer.dim + PADDING), "f32")
        lines = dataclasses.replace(lines, lanes=Lanes(number=machine.thread, count=first, here=is_attention))
        of_attention = self.attention.begin(machine, lines, table, queries)
        of_indexer = self.indexer.begin(machine, mine, table, key_queries)

        def exchange(sums: Shared, sent: Barrier) -> None:
            units = width // VECTOR
            for rank, start in itertools.product(range(HALVES), range(0, count * units, mine.lanes.count)):
                n = mine.lanes.number + start
                inside: Condition = True if start + mine.lanes.count <= count * units else n < count * units
                line, channel = (n if inside is True else select(inside, n, 0)) // units, n % units * VECTOR
                values = sums.load_floats(line + rank * count, channel + self.attention.tiles * TILE)
                sent.send_floats(values, heads, line, channel + machine.rank * width, rank=rank, where=inside)

        def share(sums: Shared, sent: Barrier) -> None:
            with machine.when(is_attention):
                of_attention.share(sums, sent)
            with machine.when(is_indexer):
                exchange(sums, sent)

        def make(sums: Shared) -> None:
            with machine.when(is_attention):
                of_attention.make(sums)
            with machine.when(is_indexer):
                of_indexer.make(heads)

        return Finish(share, make)
