"""Decode attention on Hopper: two warpgroups multiply, and one or two others load the keys.

    out = sum over keys of exp(l) k / (sum of exp(l) + exp(sink)),      l = q . k / sqrt(512)

Tiles of keys are processed in pairs. The first multiplying warpgroup computes the logits and weights of the first tile
of a pair, the second those of the second tile. Each hands its weights to the other, because each holds half of the
output's channels, to which both tiles are added:

    first                              second
    logits and weights of tile a       logits of tile b
    give weights of a          ->      take weights of a
    add a to channels 0 .. 255         add a to channels 256 .. 511; meanwhile weights of b
    take weights of b          <-      give weights of b
    add b to channels 0 .. 255         add b to channels 256 .. 511

So every logit is computed once, and one warpgroup's softmax overlaps with the other's products. Weights of a are
relative to the largest logit up to a, and those of b to the largest up to b. The last pair may lack its second tile.

Shared memory admits one block per multiprocessor. If there are more queries than that, a block computes several, one
after the other: the hardware copies the next query, and the loading warpgroups load its first keys, while the output of
the last one is stored.

Rows are converted when they are loaded, by two warpgroups, or were widened before for all queries of a chunk
(``wide``). Those are only copied (``copies``).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention import copies, handover
from pallas_kernels.attention.block import (
    CONSUMERS,
    HALF,
    HEADS,
    STAGES,
    WARPS,
    Before,
    Block,
    BlockLayout,
    Memory,
    load_tiles,
)
from pallas_kernels.attention.handover import Handover
from pallas_kernels.attention.inputs import HEAD_DIM, AttentionInputs
from pallas_kernels.attention.keys import KEYS, Query, take_staging
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.attention.output import finish_output
from pallas_kernels.attention.softmax import (
    Softmax,
    load_factors,
    over_quad,
    row_of,
    scale_logits,
    scale_without_factors,
)
from pallas_kernels.attention.turns import QueryOrder, Turns
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language import target
from pallas_kernels.language.barriers import Barrier, init_barriers
from pallas_kernels.language.lanes import add, fold_tree, maximum
from pallas_kernels.language.launch import Grid
from pallas_kernels.language.machine import WARP, WARPGROUP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.target import GPU, HOPPER
from pallas_kernels.language.tensor_cores import ATOM_BYTES, Operand, Role, TensorCores, Tile, TileCopy
from pallas_kernels.language.values import Value, select

FIRST, SECOND = 0, 1  # the multiplying warpgroups; also the stages of a pair's tiles, and the halves of the channels
_Q_BYTES = 128  # of a row of the query that one copy takes
_Q_PARTS = HEAD_DIM * 2 // _Q_BYTES
_LOADERS = 2  # warpgroups, unless the hardware loads
# Registers per lane for each number of loading warpgroups: of those that multiply, and of those that load.
_REGISTERS = {1: (224, 56), 2: (208, 48)}
# Channels of one product. In a launch of four warpgroups, which begins with 128 registers per lane, ptxas refuses 256.
_COLUMNS = 128

_LoadNext = Callable[[], None]  # starts to load a block's next query


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
        memory = _Memory.take(machine, self)
        init_barriers(memory.full, memory.free, memory.loaded_q, memory.handover.given)
        queries, heads = math.prod(inputs.positions.shape), inputs.sinks.shape[0]
        at_once = self._at_once(queries, heads // HEADS)
        turns = Turns(machine=machine, order=inputs.order, queries=queries, at_once=at_once)

        def for_each_query(work: Callable[[Block, _LoadNext | None], None]) -> None:
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

        def multiply(multiplier: type[_Multiplier]) -> None:
            if multiplier is _First:
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
            Role(warpgroups=1, registers=many, body=lambda: multiply(_First)),
            Role(warpgroups=1, registers=many, body=lambda: multiply(_Second)),
            *loading,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Memory(Memory):
    """Shared memory of a block. Tiles come first, because they must be aligned.

    A tile of rows that were widened before is ``copies.PIECES`` copies of ``keys``, and has barriers for each part of
    its channels. Its keys have no factors.
    """

    is_wide: bool
    q: Tile  # [HEADS, 64 channels]; copies: the parts of a query's channels
    loaded_q: Barrier
    handover: Handover

    @classmethod
    def take(cls, machine: TensorCores, layout: Layout) -> _Memory:
        is_wide, q = layout.is_wide, Tile.take(machine, HEADS, _Q_BYTES, copies=_Q_PARTS)
        if is_wide:
            keys = Tile.take(machine, KEYS, ATOM_BYTES, copies=STAGES * copies.PIECES)
        else:
            keys = Tile.take(machine, KEYS, HEAD_DIM * 2, copies=STAGES)
        parts = STAGES * (copies.PARTS if is_wide else 1)
        return cls(
            is_wide=is_wide,
            q=q,
            keys=keys,
            staging=None if is_wide else take_staging(machine, layout.staged_loads, layout.loaders),
            factor_and_bias=Shared.take(machine, (STAGES, KEYS) if is_wide else (STAGES, KEYS, 2), "f32"),
            handover=Handover.take(machine),
            full=Barrier.take(machine, WARPS if is_wide else layout.loaders * WARPS, copies=parts),
            free=Barrier.take(machine, WARPS if is_wide else CONSUMERS * WARPS, copies=parts),
            loaded_q=Barrier.take(machine, 1),
        )

    @property
    def pieces(self) -> int:
        """Number of copies of ``keys`` that make a tile."""
        return HEAD_DIM * 2 // self.keys.row_bytes

    @property
    def parts(self) -> int:
        """Number of parts of a tile's channels that have barriers of their own."""
        return self.full.copies // STAGES

    def parts_of(self, half: int) -> range:
        """Return the parts of a tile that have one half of its channels."""
        count = max(1, self.parts // CONSUMERS)
        first = half * self.parts // CONSUMERS
        return range(first, first + count)

    def k_major(self, stage: int, part: int) -> Operand:
        """Return a part of a tile's channels as K."""
        count = self.pieces // self.parts
        first, each = self.keys.copy(stage * self.pieces).k_major(), range(part * count, (part + 1) * count)
        return dataclasses.replace(first, steps=tuple(n * self.keys.size + step for n in each for step in first.steps))

    def columns(self, stage: int, first: int) -> Operand:
        """Return a tile's channels from ``first`` on as columns, with its keys as K."""
        piece, byte = divmod(first * 2, self.keys.row_bytes)
        found = self.keys.copy(stage * self.pieces + piece).transposed(byte)
        return dataclasses.replace(found, leading=self.keys.size) if self.pieces > 1 else found

    def load_query(self, inputs: AttentionInputs, number: Value) -> None:
        """Start to load the heads of a query, as a warpgroup together."""
        machine, heads = self.loaded_q.machine, inputs.sinks.shape[0]
        with machine.when(machine.thread % WARPGROUP < WARP):
            row = number * heads + machine.block(1) * HEADS
            self.loaded_q.fill(
                *(
                    TileCopy(
                        source=inputs.q,
                        row=row,
                        column=part * (_Q_BYTES // 2),
                        to=self.q.copy(part).offset,
                        rows=HEADS,
                        row_bytes=_Q_BYTES,
                    )
                    for part in range(_Q_PARTS)
                )
            )

    def query(self, part: int) -> Operand:
        """Return the heads of the query, [HEADS, channels], with the channels of a part of a tile."""
        first, count = self.q.k_major(), _Q_PARTS // self.parts
        each = range(part * count, (part + 1) * count)
        return dataclasses.replace(first, steps=tuple(n * self.q.size + step for n in each for step in first.steps))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What a warpgroup holds between pairs."""

    softmax: Softmax  # the peak of all tiles so far; the sum of the weights of this warpgroup's own tiles
    output: list[Value]  # [HEADS, HALF] sums of all tiles so far


class _Multiplier(abc.ABC):
    """What both multiplying warpgroups do. Each has half of the channels, and computes the logits of its own tiles."""

    own: ClassVar[int]

    def __init__(self, block: Block, memory: _Memory, form: AttendedFormat):
        self.block, self.memory, self.form, self.machine = block, memory, form, block.machine
        self.before = block.before
        self.given_before = block.before.firsts + block.before.queries  # by each warpgroup

    def run(self, outputs: Outputs, load_next: _LoadNext | None) -> None:
        """Compute and store the output of the block's query."""
        machine, tiles = self.machine, self.block.tiles
        self.memory.loaded_q.wait(self.before.queries & 1)
        softmax = Softmax.of_sinks(self.block)
        if self.own != FIRST:  # sinks count once
            softmax = Softmax(softmax.peak, [machine.constant(0.0, "f32")] * 2)
        output = [machine.constant(0.0, "f32")] * (HALF // 2)
        pairs = (tiles + 1) // 2
        sums = machine.loop(pairs, self.pair, _Sums(softmax, output))
        if load_next is not None and self.own == FIRST:
            # Both warpgroups have computed their last logits: the second one's weights came after them.
            load_next()
        softmax = sums.softmax.over_quads(machine)
        softmax = Softmax(softmax.peak, self.total_of_both(softmax.total, pairs))
        half = machine.constant(self.own, "i32")
        finish_output(self.block, outputs, sums.output, softmax, half)

    @abc.abstractmethod
    def pair(self, i: Value, sums: _Sums) -> _Sums:
        """Process the i-th pair of tiles."""

    @abc.abstractmethod
    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        """Return the sums of the weights of all tiles, given those of the own tiles, after all pairs."""

    def has_second(self, i: Value) -> Value:
        """Return whether the i-th pair has a second tile."""
        return i * 2 + 1 < self.block.tiles

    def logits(self, i: Value) -> list[Value]:
        """Compute the logits of the warpgroup's own tile of a pair, [HEADS, KEYS]."""
        sums = None
        for part in range(self.memory.parts):
            self.wait_full(self.own, i, part)
            query, keys = self.memory.query(part), self.memory.k_major(self.own, part)
            sums = self.machine.wgmma(sums, query, keys, columns=KEYS)
        assert sums is not None
        return self.machine.wgmma_wait(sums)

    def wait_full(self, stage: int, i: Value, part: int) -> None:
        """Wait for a part of a tile of a pair."""
        used = self.before.firsts if stage == FIRST else self.before.seconds
        self.memory.full.copy(stage * self.memory.parts + part).wait(used + i & 1)

    def wait_half(self, stage: int, i: Value) -> None:
        """Wait for the warpgroup's half of a tile of a pair."""
        for part in self.memory.parts_of(self.own):
            self.wait_full(stage, i, part)

    def wait_given(self, source: int, count: Value) -> None:
        """Wait until a warpgroup has given ``count`` + 1 times for this query."""
        self.memory.handover.wait(source, self.given_before + count)

    def scaled(self, logits: list[Value], factor_and_bias: Shared) -> list[Value]:
        """Return logits in powers of two."""
        if self.memory.is_wide:
            return scale_without_factors(self.machine, logits, factor_and_bias)
        return scale_logits(self.machine, logits, factor_and_bias)[0]

    def packed(self, weights: list[Value], factor_and_bias: Shared) -> list[Value]:
        """Return weights times their keys' factors as the left operand of a product."""
        if not (self.memory.is_wide or self.form.scale_is_power_of_two):
            # Loaded again, because there are no registers to keep them in.
            self.machine.keep_order()
            factors = load_factors(self.machine, factor_and_bias)
            weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        return [self.machine.to_f16(*weights[n : n + 2]) for n in range(0, len(weights), 2)]

    def start_adding(self, output: list[Value], carried: list[Value], weights: list[Value], stage: int) -> list[Value]:
        """Scale the output, and start to add the weighted keys of a tile."""
        output = [value * carried[row_of(n)] for n, value in enumerate(output)]
        sums = []
        for n in range(0, HALF, _COLUMNS):
            part, keys = output[n // 2 : (n + _COLUMNS) // 2], self.channels(stage, n)
            sums += self.machine.wgmma(part, weights, keys, columns=_COLUMNS)
        return sums

    def finish_adding(self, output: list[Value], weights: list[Value], stage: int) -> list[Value]:
        """Wait for the sums, and give the tile's memory back."""
        parts, sums = self.memory.parts_of(self.own), []
        each = len(output) // len(parts)
        for n, part in enumerate(parts):
            sums += self.machine.wgmma_wait(output[n * each : (n + 1) * each], pending=len(parts) - 1 - n)
            if part == parts[-1]:
                self.machine.hold(weights)  # no register of the operand is used again before
            self.memory.free.copy(stage * self.memory.parts + part).arrive()
        return sums

    def channels(self, stage: int, first: int) -> Operand:
        """Return a tile's keys with the channels from ``first`` on of this warpgroup's half."""
        return self.memory.columns(stage, self.own * HALF + first)


class _First(_Multiplier):
    """The warpgroup with the first tile of each pair."""

    own = FIRST

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        machine, handed = self.machine, self.memory.handover
        factor_and_bias = self.memory.factor_and_bias[FIRST]
        scaled = self.scaled(self.logits(i), factor_and_bias)
        weights, softmax, carried = _fold(machine, scaled, sums.softmax)
        weights = self.packed(weights, factor_and_bias)
        handed.give(FIRST, softmax.peak, weights)
        machine.keep_order()
        output = self.finish_adding(self.start_adding(sums.output, carried, weights, FIRST), weights, FIRST)
        self.wait_given(SECOND, i)

        def add_second(_: Value, sums: _Sums) -> _Sums:
            weights, peak = handed.found_weights(), handed.found_of_rows()
            self.wait_half(SECOND, i)
            carried = [machine.exp2(before - now) for before, now in zip(sums.softmax.peak, peak, strict=True)]
            output = self.finish_adding(self.start_adding(sums.output, carried, weights, SECOND), weights, SECOND)
            total = [a * b for a, b in zip(sums.softmax.total, carried, strict=True)]
            return _Sums(Softmax(peak, total), output)

        more = select(self.has_second(i), machine.constant(1, "i32"), 0)
        return machine.loop(more, add_second, _Sums(softmax, output))

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        handed.give(FIRST, own, [])
        self.wait_given(SECOND, pairs)
        return [a + b for a, b in zip(own, handed.found_of_rows(), strict=True)]


class _Second(_Multiplier):
    """The warpgroup with the second tile of each pair."""

    own = SECOND

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        machine, handed, has_second = self.machine, self.memory.handover, self.has_second(i)
        # Without a second tile this computes weights of 0, which nobody uses. A branch around them would be one while
        # a product runs.
        more = select(has_second, machine.constant(1, "i32"), 0)
        none = [machine.constant(0.0, "f32")] * (KEYS // 2)
        logits = machine.loop(more, lambda _, __: self.logits(i), none)
        self.wait_given(FIRST, i)
        given, peak = handed.found_weights(), handed.found_of_rows()
        carried = [machine.exp2(before - now) for before, now in zip(sums.softmax.peak, peak, strict=True)]
        total = [a * b for a, b in zip(sums.softmax.total, carried, strict=True)]
        self.wait_half(FIRST, i)
        output = self.start_adding(sums.output, carried, given, FIRST)
        factor_and_bias = self.memory.factor_and_bias[select(has_second, machine.constant(SECOND, "i32"), FIRST)]
        scaled = self.scaled(logits, factor_and_bias)
        scaled = [select(has_second, logit, -math.inf) for logit in scaled]
        weights, softmax, carried = _fold(machine, scaled, Softmax(peak, total))
        weights = self.packed(weights, factor_and_bias)
        handed.give(SECOND, softmax.peak, weights)
        output = self.finish_adding(output, given, FIRST)

        def add_second(_: Value, output: list[Value]) -> list[Value]:
            return self.finish_adding(self.start_adding(output, carried, weights, SECOND), weights, SECOND)

        return _Sums(softmax, machine.loop(more, add_second, output))

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        self.wait_given(FIRST, pairs)
        other = handed.found_of_rows()
        handed.give(SECOND, own, [])
        return [a + b for a, b in zip(own, other, strict=True)]


def _fold(machine: TensorCores, scaled: list[Value], softmax: Softmax) -> tuple[list[Value], Softmax, list[Value]]:
    """Add a tile's logits, from ``scale_logits``, to the softmax.

    Returns:
      The weights; the new softmax; the factors by which older sums must be scaled.
    """
    peaks, totals, carried, weights = [], [], [], list(scaled)
    for i, (peak, total) in enumerate(zip(softmax.peak, softmax.total, strict=True)):
        row = [n for n in range(len(scaled)) if row_of(n) == i]
        top = over_quad(machine, maximum, fold_tree(maximum, [scaled[n] for n in row])).maximum(peak)
        scale = machine.exp2(peak - top)
        for n in row:
            weights[n] = machine.exp2(scaled[n] - top)
        peaks.append(top)
        totals.append(machine.fma(total, scale, fold_tree(add, [weights[n] for n in row])))
        carried.append(scale)
    return weights, Softmax(peaks, totals), carried
