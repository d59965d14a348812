"""Decode attention on Hopper: two warpgroups multiply, and one or two others load the keys.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

The multiplying warpgroups process tiles of keys in pairs (``sm90_pairs``).

Shared memory admits one block per multiprocessor. If there are more queries than that, a block computes several, one
after the other: the hardware copies the next query, and the loading warpgroups load its first keys, while the output of
the last one is stored.

Rows are converted when they are loaded, by two warpgroups, or were widened before for all queries of a chunk
(``wide``). Those are only copied (``copies``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp

from pallas_kernels.attention import copies, handover
from pallas_kernels.attention.block import HEADS, STAGES, Before, Block, BlockLayout, load_tiles
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.attention.keys import Query
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.attention.sm90_memory import HopperMemory
from pallas_kernels.attention.sm90_pairs import First, LoadNext, Multiplier, Second
from pallas_kernels.attention.turns import QueryOrder, Turns
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language import target
from pallas_kernels.language.barriers import init_barriers
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import Role, TensorCores
from pallas_kernels.language.values import Value

_LOADERS = 2  # warpgroups, unless the hardware loads
# Registers per lane for each number of loading warpgroups: of those that multiply, and of those that load.
_REGISTERS = {1: (224, 56), 2: (208, 48)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout(BlockLayout):
    """The layout of the Hopper kernel. A block computes 64 heads of a query, over its share of the tiles."""

    blocks: int | None = None  # the most that run at once without clusters; None = one per multiprocessor
    is_wide: bool = False  # whether rows are widened before, and only copied
    is_picked: bool = True  # whether there are picks, so that widened rows do not lie one after the other

    gpu: ClassVar[GPU] = HOPPER

    @property
    def loaders(self) -> int:
        return 1 if self.is_wide and not self.is_picked else _LOADERS

    @property
    def staged_loads(self) -> int:
        return 0 if self.is_wide else 6  # what fits beside the handover

    def check(self, heads: int, tiles: int) -> None:
        BlockLayout.check(self, heads, tiles)
        if self.is_wide and self.cluster > 1:
            raise ValueError(f"{self}: with rows that are widened before, a cluster has 1 block")

    def arguments(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return queries as f16 [B * T * H, 512], because the hardware copies parts of arrays with two axes."""
        return dataclasses.replace(inputs, q=inputs.q.astype(jnp.float16).reshape(-1, HEAD_DIM))

    def order(self, inputs: AttentionInputs) -> QueryOrder | None:
        queries = math.prod(inputs.positions.shape)
        has_turns = queries > self._at_once(queries, inputs.sinks.shape[0] // HEADS)
        return QueryOrder.of(inputs.needed) if inputs.needed is not None and has_turns else None

    def grid(self, queries: int, groups: int) -> Grid:
        """Return a grid in which blocks without a cluster have several queries, one after the other."""
        return BlockLayout.grid(self, self._at_once(queries, groups), groups)

    def _at_once(self, queries: int, groups: int) -> int:
        """Return how many queries are computed at the same time."""
        blocks = target.multiprocessors() if self.blocks is None else self.blocks
        return queries if self.cluster > 1 else min(queries, max(1, blocks // groups))

    @property
    def shared_bytes(self) -> int:
        return self.common_bytes + handover.BYTES + 8 * (2 * STAGES * copies.PARTS + 1)

    def body(self, machine: TensorCores, inputs: AttentionInputs, outputs: Outputs, *, form: AttendedFormat) -> None:
        memory = HopperMemory.take(machine, is_wide=self.is_wide, staged_loads=self.staged_loads, loaders=self.loaders)
        init_barriers(memory.full, memory.free, memory.loaded_q, memory.handover.given)
        queries, heads = math.prod(inputs.positions.shape), inputs.sinks.shape[0]
        at_once = self._at_once(queries, heads // HEADS)
        turns = Turns(machine=machine, order=inputs.order, queries=queries, at_once=at_once)

        def for_each_query(work: Callable[[Block, LoadNext | None], None]) -> None:
            if queries == at_once:
                query = Query.of(machine, inputs, machine.block(0))
                work(Block.of(machine, memory, query, self.cluster, Before.none(machine)), None)
                return

            def one(number: Value, state: tuple[Before, Value, list[Value]]) -> tuple[Before, Value, list[Value]]:
                before, tiles, known = state
                before, turn = dataclasses.replace(before, queries=number), turns.turn(number, count, known)

                def load_next() -> None:
                    with machine.when(turn.has_following):
                        memory.load_query(inputs, turn.following)

                # Loaded while this query is computed, so that the next one need not wait.
                of_next = Query.of(machine, inputs, turn.following).tiles.maximum(1)
                query = Query.of(machine, inputs, turn.query)
                block = Block.of(machine, memory, query, self.cluster, before, tiles)
                work(block, load_next)
                return block.after, of_next, turn.known

            (first, known), count = turns.begin(), turns.count
            tiles = Query.of(machine, inputs, first).tiles.maximum(1)
            machine.loop(count, one, (Before.none(machine), tiles, known))

        def multiply(multiplier: type[Multiplier]) -> None:
            if multiplier is First:
                with machine.when(turns.has_any):
                    memory.load_query(inputs, turns.begin()[0])
            for_each_query(lambda block, load_next: multiplier(block, memory, form).run(outputs, load_next))

        def loader(load: Callable[[Block], None], warpgroups: int = 1) -> Role:
            return Role(warpgroups=warpgroups, registers=few, body=lambda: for_each_query(lambda block, _: load(block)))

        many, few = _REGISTERS[self.loaders]
        if not self.is_wide:
            loading = [loader(lambda block: load_tiles(block, form, self.loaders), self.loaders)]
        elif self.is_picked:
            loading = [loader(lambda block, n=n: copies.copy_picked(block, memory, n)) for n in range(STAGES)]
        else:
            loading = [loader(lambda block: copies.copy_runs(block, memory))]
        machine.roles(
            Role(warpgroups=1, registers=many, body=lambda: multiply(First)),
            Role(warpgroups=1, registers=many, body=lambda: multiply(Second)),
            *loading,
        )
