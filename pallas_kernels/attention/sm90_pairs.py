"""How the two multiplying warpgroups of Hopper's attention share pairs of tiles.

The first one computes the logits and weights of a pair's first tile, the second one those of the second. Each hands its
weights to the other, because each holds half of the output's channels, to which both tiles are added:

    first                              second
    logits and weights of tile a       logits and weights of tile b, if it is there as early as a
    give weights of a          ->      take weights of a
    add a to channels 0 .. 255         add a to channels 256 .. 511
                                       logits and weights of tile b, if it comes after a
    take weights of b          <-      give weights of b
    add b to channels 0 .. 255         add b to channels 256 .. 511

So every logit is computed once, and one warpgroup's softmax overlaps with the other's products. Rows that only have to
be copied are there early. Those that are converted come one tile after the other, and so that the first tile's memory
is free for the next pair before the second tile has come, it is added first. The last pair may lack its second tile.

Each warpgroup subtracts a peak from its logits, which it raises only where they exceed it by far. So sums and weights
seldom have different peaks when they are added, and warps skip rescaling them. Peaks are whole numbers, of powers of
two, which makes rescaling exact. After each pair both warpgroups have the same peak: the higher one of its tiles.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from pallas_kernels.attention.block import HALF, Block
from pallas_kernels.attention.keys import KEYS
from pallas_kernels.attention.layout import Outputs
from pallas_kernels.attention.output import finish_output
from pallas_kernels.attention.sm90_memory import HopperMemory
from pallas_kernels.attention.softmax import (
    Softmax,
    any_of_warp,
    column_of,
    load_of_keys,
    raised,
    row_of,
    scale_logits,
    scale_without_factors,
    weigh,
)
from pallas_kernels.formats import AttendedFormat
from pallas_kernels.language.tensor_cores import Operand
from pallas_kernels.language.values import Value

FIRST, SECOND = 0, 1  # the multiplying warpgroups; also the stages of a pair's tiles, and the halves of the channels
# Channels of one product. In a launch of four warpgroups, which begins with 128 registers per lane, ptxas refuses 256.
_COLUMNS = 128

LoadNext = Callable[[], None]  # starts to load a block's next query


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What a warpgroup holds between pairs."""

    softmax: Softmax  # the total is of the sink and of this warpgroup's own tiles
    output: list[Value]  # [HEADS, HALF] sums of all tiles so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """A warpgroup's weights of a tile, times the factors of its keys."""

    softmax: Softmax  # the total is of this tile; 0 if the other warpgroup counts it
    words: list[Value]  # pairs of f16: the left operand of a product


class Multiplier(abc.ABC):
    """What both multiplying warpgroups do. Each has half of the channels, and computes the logits of its own tiles."""

    own: ClassVar[int]

    def __init__(self, block: Block, memory: HopperMemory, form: AttendedFormat):
        self.block, self.memory, self.form, self.machine = block, memory, form, block.machine
        self.before = block.before
        self.given_before = block.before.firsts + block.before.queries  # by each warpgroup

    def run(self, outputs: Outputs, load_next: LoadNext | None) -> None:
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

    def seconds(self, i: Value) -> Value:
        """Return 1 if the i-th pair has a second tile, else 0."""
        return (self.block.tiles - i * 2 - 1).minimum(1)

    def give(self, weights: _Weights) -> None:
        """Give weights to the other warpgroup."""
        self.memory.handover.give(self.own, weights.softmax.peak, weights.words)

    def found(self) -> _Weights:
        """Return the weights that the other warpgroup has given."""
        handed, none = self.memory.handover, [self.machine.constant(0.0, "f32")] * 2
        return _Weights(Softmax(handed.found_of_rows(), none), handed.found_weights())

    def weighed(self, i: Value, peak: list[Value]) -> _Weights:
        """Compute the weights of the warpgroup's own tile of a pair, relative to a peak or a higher one."""
        machine = self.machine
        logits, of_keys = self.logits(i)
        weights, softmax = weigh(machine, logits, raised(machine, peak, logits))
        if not (self.memory.is_wide or self.form.scale_is_power_of_two):
            weights = [weight * of_keys[column_of(n)] for n, weight in enumerate(weights)]
        return _Weights(softmax, [machine.to_f16(*weights[n : n + 2]) for n in range(0, len(weights), 2)])

    def logits(self, i: Value) -> tuple[list[Value], list[Value]]:
        """Compute the logits of the warpgroup's own tile of a pair, [HEADS, KEYS], in powers of two.

        Also returns the factors of a lane's columns; of widened rows, which have none, the biases.
        """
        sums = None
        for part in range(self.memory.parts):
            self.wait_full(self.own, i, part)
            query, keys = self.memory.query(part), self.memory.k_major(self.own, part)
            sums = self.machine.wgmma(sums, query, keys, columns=KEYS)
        assert sums is not None
        of_keys = load_of_keys(self.machine, self.memory.of_keys[self.own])  # while the product runs
        scale = scale_without_factors if self.memory.is_wide else scale_logits
        return scale(self.machine, self.machine.wgmma_wait(sums), of_keys), of_keys

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

    def added(self, sums: _Sums, weights: _Weights, stage: int) -> _Sums:
        """Add the weighted keys of a tile, and give the warpgroup's half of its memory back."""
        sums, weights = self.with_one_peak(sums, weights)
        output = self.finish_adding(self.start_adding(sums.output, weights.words, stage), weights.words, stage)
        totals = zip(sums.softmax.total, weights.softmax.total, strict=True)
        return _Sums(Softmax(sums.softmax.peak, [a + b for a, b in totals]), output)

    def with_one_peak(self, sums: _Sums, weights: _Weights) -> tuple[_Sums, _Weights]:
        """Return sums and weights relative to the higher one of their peaks."""
        machine, each = self.machine, (sums.softmax.peak, weights.softmax.peak)
        peak = [a.maximum(b) for a, b in zip(*each, strict=True)]

        def rescale(_: Value, state: tuple[_Sums, _Weights]) -> tuple[_Sums, _Weights]:
            sums, weights = state
            before, given = ([machine.exp2(a - b) for a, b in zip(old, peak, strict=True)] for old in each)
            output = [value * before[row_of(n)] for n, value in enumerate(sums.output)]
            pairs = [machine.to_f16(factor, factor) for factor in given]
            words = [machine.multiply_f16(word, pairs[n % 2]) for n, word in enumerate(weights.words)]
            return _Sums(sums.softmax.times(before), output), _Weights(weights.softmax.times(given), words)

        differs = (each[0][0] != each[1][0]) | (each[0][1] != each[1][1])
        sums, weights = machine.loop(any_of_warp(machine, differs), rescale, (sums, weights))
        return dataclasses.replace(sums, softmax=Softmax(peak, sums.softmax.total)), weights

    def start_adding(self, output: list[Value], words: list[Value], stage: int) -> list[Value]:
        """Start to add the weighted keys of a tile."""
        sums = []
        for n in range(0, HALF, _COLUMNS):
            part, keys = output[n // 2 : (n + _COLUMNS) // 2], self.channels(stage, n)
            sums += self.machine.wgmma(part, words, keys, columns=_COLUMNS)
        return sums

    def finish_adding(self, output: list[Value], words: list[Value], stage: int) -> list[Value]:
        """Wait for the sums, and give the tile's memory back."""
        parts, sums = self.memory.parts_of(self.own), []
        each = len(output) // len(parts)
        for n, part in enumerate(parts):
            sums += self.machine.wgmma_wait(output[n * each : (n + 1) * each], pending=len(parts) - 1 - n)
            if part == parts[-1]:
                self.machine.hold(words)  # no register of the operand is used again before
            self.memory.free.copy(stage * self.memory.parts + part).arrive()
        return sums

    def channels(self, stage: int, first: int) -> Operand:
        """Return a tile's keys with the channels from ``first`` on of this warpgroup's half."""
        return self.memory.columns(stage, self.own * HALF + first)


class First(Multiplier):
    """The warpgroup with the first tile of each pair."""

    own = FIRST

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        own = self.weighed(i, sums.softmax.peak)
        self.give(own)
        self.machine.keep_order()
        sums = self.added(sums, own, FIRST)
        self.wait_given(SECOND, i)

        def add_second(_: Value, sums: _Sums) -> _Sums:
            given = self.found()
            self.wait_half(SECOND, i)
            return self.added(sums, given, SECOND)

        return self.machine.loop(self.seconds(i), add_second, sums)

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        handed.give(FIRST, own, [])
        self.wait_given(SECOND, pairs)
        return [a + b for a, b in zip(own, handed.found_of_rows(), strict=True)]


class Second(Multiplier):
    """The warpgroup with the second tile of each pair."""

    own = SECOND

    def pair(self, i: Value, sums: _Sums) -> _Sums:
        own = self.weighed_if_there(i, sums) if self.memory.is_wide else None
        self.wait_given(FIRST, i)
        given = self.found()
        if own is not None:
            self.give(own)
        self.wait_half(FIRST, i)
        sums = self.added(sums, given, FIRST)
        if own is None:
            own = self.weighed_if_there(i, sums)
            self.give(own)
        return self.machine.loop(self.seconds(i), lambda _, sums: self.added(sums, own, SECOND), sums)

    def weighed_if_there(self, i: Value, sums: _Sums) -> _Weights:
        """Return the weights of the pair's second tile. Without one they are 0, and nobody uses them."""
        machine, peak = self.machine, sums.softmax.peak
        nothing = [machine.constant(0.0, "f32")] * 2, [machine.constant(0, "i32")] * (KEYS // 4)
        none = _Weights(Softmax(peak, nothing[0]), nothing[1])
        return machine.loop(self.seconds(i), lambda _, before: self.weighed(i, before.softmax.peak), none)

    def total_of_both(self, own: list[Value], pairs: Value) -> list[Value]:
        handed = self.memory.handover
        self.wait_given(FIRST, pairs)
        other = handed.found_of_rows()
        handed.give(SECOND, own, [])
        return [a + b for a, b in zip(own, other, strict=True)]
