"""Experts' products on Hopper with rows of x in FP8: codes of the weights become E4M3 in registers.

    sums [outputs, rows of x] = sum over 128 inputs each of (weight x^T) times the scales of x

A weight is a number of E2M1 times 2^(s - 127), with a scale s for each 32 inputs of an output. As E4M3 it is the number
times 2^(s - e), with an exponent e of the output, and the sums are times 2^(e - 127) in the end. Four codes become four
bytes by one permutation of the bytes of a table, which has the eight magnitudes times 2^(s - e). Their signs are where
``codes`` has put them; of codes in order, another permutation gives the bytes of their signs.

E4M3 has the eight magnitudes exactly times 2^-8 to 2^6, and tables are made in two instructions for 2^-5 to 2^6. So e
stays as it is while s - e is from -5 to 6. If it is not, e follows the largest scale of these 128 inputs whose 32
numbers are not all 0, and what has been summed is scaled by a power of two, which is exact. Then the weights of 128
inputs are exact if their scales span at most 2^14. If they span more, a weight is off by at most 2^-10 where the
largest scale of the 128 inputs counts as 2^6: that is 2^-15 of a weight with that scale. An output whose scales fall by
more than 2^40 loses those that are smaller still. A scale that is NaN makes its output NaN.

Tensor cores keep few bits of what they add. So the product of 128 inputs starts at zero, and is added in f32.

A unit of gate and up has 128 gated numbers of each of its rows, which have one scale. Lanes of all warps have some of
them. They meet in shared memory, from where teams of lanes round them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax

from pallas_kernels.activations import RoundedExpertRows
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.shared import Shared
from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import VECTOR, Condition, Index, Value, select
from pallas_kernels.products.experts.layout import BOX, BOXES, GATHERERS, PART, SCALE_INPUTS, Layout
from pallas_kernels.products.experts.sm90 import Block, ExpertInputs, Lane

_QUAD, _EIGHT = 4, 8
_UNIT = 16  # bytes
_AT_ONCE = 2  # rows of x that a lane copies units of before it begins with others
_PART_ROWS = PART // BOXES
_LOWEST, _HIGHEST = -5, 6  # exponents of tables that two instructions make
_USUAL = 3  # of the largest scale, when the exponent follows it, so that later ones may be larger
_SPREAD = _USUAL - _LOWEST  # of scales, up to which that is so
_MOST_EXPONENT = 254 - _HIGHEST  # so that the scale 255, NaN, is never in a table that two instructions make
_LEAST_EXPONENT = 1  # for which 2^(e - 127) is a normal number
_FALL = 40  # the most by which an exponent falls: sums are finite after it
_NONE = -1000  # the exponent of no weight
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5), (2.0, 3.0, 4.0, 6.0)  # of E2M1
_E4M3 = 0x3C383000, 0x4C484440  # the same in E4M3
_ONCE = 0x08080800, 0x08080808  # what doubles them
_MAGNITUDE_BITS, _SIGN_BITS = 0x77777777, 0x80808080 - (1 << 32)  # of eight codes; of four bytes
# The bytes of signs of the first four codes of a word in order, and of the others: those of even codes are the top bits
# of the word shifted left by four.
_SIGNS = 0xD9C8, 0xFBEA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What a lane has of two outputs, one of each box."""

    sums: list[Value]
    exponents: list[Value]  # e of each output, the same in the lanes of a quad


_Tables = list[list[Value]]  # of each output: the eight magnitudes times 2^(s - e) in E4M3, in two words


def body(machine: TensorCores, inputs: ExpertInputs, out: Any, *, layout: Layout) -> None:
    """Compute a block's units."""
    RoundedBlock.take(machine, inputs, layout).run(out)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedBlock(Block):
    """A block, from the view of one of its lanes."""

    def copy_rows(self, unit: Value, chunk: Value, stage: Index, gatherer: Value) -> None:
        """Start to copy a chunk of this warp's rows of x, if they are anywhere, and their scales."""
        if self.layout.gathers:
            self._copy_units(unit, chunk, stage, gatherer)
        self._copy_scales(unit, chunk, stage, gatherer)

    def _copy_units(self, unit: Value, chunk: Value, stage: Index, gatherer: Value) -> None:
        machine, layout, x = self.machine, self.layout, self.inputs.x
        of_row = layout.inputs // _UNIT  # units, and lanes
        lane, slot = machine.thread % WARP, unit % layout.table_slots
        number, mine, together = lane % of_row, layout.rows // GATHERERS, WARP // of_row
        at_once = min(_AT_ONCE, mine // together)
        tile = self.x.copy(stage * layout.halves + number // _EIGHT)
        address = x.address + machine.widen(chunk * layout.inputs + number * _UNIT)

        def some(i: Value, _: None) -> None:
            rows = [gatherer * mine + (i * at_once + n) * together + lane // of_row for n in range(at_once)]
            sources = [self.sources.load_int(slot, row) for row in rows]
            for row, source in zip(rows, sources, strict=True):
                at = address + machine.widen(source) * x.shape[1]
                machine.copy_async(tile.unit(row, number % _EIGHT), at, source >= 0)

        machine.loop(mine // (at_once * together), some, rolled=True)

    def _copy_scales(self, unit: Value, chunk: Value, stage: Index, gatherer: Value) -> None:
        machine, layout, scales = self.machine, self.layout, self.inputs.x_scales
        lane, mine = machine.thread % WARP, layout.rows // GATHERERS
        count = mine * layout.halves
        assert self.x_scales is not None
        for start in range(0, count, WARP):
            n = lane + start
            with machine.when(True if start + WARP <= count else n < count):
                half, row = n // mine, gatherer * mine + n % mine
                source = self.sources.load_int(unit % layout.table_slots, row)
                at = scales.address_of((chunk * layout.halves + half, source))
                machine.copy_async(self.x_scales.address_of(stage, half * layout.rows + row), at, source >= 0, size=4)

    def store(self, unit: Value, mine: Lane, sums: list[list[Value]], out: Any) -> None:
        """Store what is made of a unit's sums. Gated rows are rounded first, in shared memory."""
        if self.gated is None:
            Block.store(self, unit, mine, sums, out)
            return
        assert self.gated_by is not None
        slot, (_, group) = unit % self.layout.table_slots, self.place(unit)
        self.gated_by.arrive()
        self.gated_by.wait(0)  # nobody reads the unit before
        self.store_at(slot, self.machine.constant(0, "i32"), mine, sums, lambda row: row, _GatedRows(self.gated))
        self.gated_by.arrive()
        self.gated_by.wait(1)
        self._round(slot, group, self.gated, out)

    def _round(self, slot: Value, group: Value, gated: Shared, out: RoundedExpertRows) -> None:
        """Round the gated rows of a unit, each as a group of the row that it belongs to, if there is one."""
        machine, rows, teams = self.machine, self.layout.rows, self.layout.warps * WARP // RoundedExpertRows.TEAM
        team, lane = machine.thread // RoundedExpertRows.TEAM, machine.thread % RoundedExpertRows.TEAM
        for first in range(0, rows, teams):
            row = team + first
            is_row: Condition = True if first + teams <= rows else row < rows
            row = row.minimum(rows - 1)
            target = self.targets.load_int(slot, row)
            fours = [gated.load_words(row, place, count=VECTOR) for place in RoundedExpertRows.places(lane)]
            words = [word for four in fours for word in four]
            out.store_group(machine, words, target, group, (target >= 0) & is_row)

    def multiply(self, out: Any) -> None:
        """Multiply all units of the block."""
        machine, layout, pipe = self.machine, self.layout, self.pipe
        mine = self.lane(machine.thread)

        def codes_of(stage: Index, half: int, part: int) -> list[list[Value]]:
            """Load a part's codes of a half of a chunk, of each box."""
            start = self.codes.address_of(stage, 0, 0, 0) + (mine.at ^ half * 64 if half else mine.at)
            starts = [start + (box * BOX + part * _PART_ROWS) * layout.row_bytes for box in range(BOXES)]
            return [machine.load_shared(each, _UNIT) for each in starts]

        def scales_of(number: Value, half: int, part: int) -> list[Value]:
            slot = number // layout.scaled_chunks % layout.scale_slots
            byte = number % layout.scaled_chunks * (layout.inputs // SCALE_INPUTS) + mine.place + half * _QUAD
            return [self.scales.load_int(slot, box, mine.row + part * _PART_ROWS, byte) for box in range(BOXES)]

        def one(unit: Value, _: None) -> None:
            def of_chunk(chunk: Value, parts: list[_Part]) -> list[_Part]:
                number = unit * layout.chunks + chunk
                stage, parts = pipe.wait(number), list(parts)

                def operand(half: int, n: int) -> list[Value]:
                    """Make the left operand of a half of a chunk, after the part's exponents followed its scales."""
                    codes = codes_of(stage, half, n)
                    parts[n], tables = _fit(machine, parts[n], scales_of(number, half, n), codes)
                    return _operand(machine, codes, tables, interleaved=layout.weight.interleaved)

                turns = [(half, n) for half in range(layout.halves) for n in range(layout.parts)]
                words = operand(*turns[0])
                for (half, n), following in itertools.zip_longest(turns, turns[1:]):
                    x, next_words = self.x.copy(stage * layout.halves + half), None
                    product = machine.wgmma(None, words, x.k_major(), columns=layout.rows, dtype="e4m3")
                    # Another part's exponents may change while this part's product is running. Its operand is held so
                    # that it is made meanwhile.
                    if following is not None and following[1] != n:
                        next_words = machine.hold(operand(*following))
                    product = machine.wgmma_wait(product)
                    machine.hold(words)
                    sums = _added(self, stage, half * layout.rows, product, parts[n].sums)
                    parts[n] = dataclasses.replace(parts[n], sums=sums)
                    if following is not None:
                        words = operand(*following) if next_words is None else next_words
                pipe.release(number)
                return parts

            zero, none = machine.constant(0.0, "f32"), machine.constant(_NONE, "i32")
            nothing = _Part([zero] * (layout.rows // 2), [none] * BOXES)
            parts = machine.loop(layout.chunks, of_chunk, [nothing] * layout.parts)
            scaled = []
            for part in parts:
                factors = [_power_of(machine, exponent) for exponent in part.exponents]
                scaled.append([x * factors[n // 2 % BOXES] for n, x in enumerate(part.sums)])
            # Beside the sums there are no registers to keep what only this needs.
            self.store(unit, self.lane(machine.hold(machine.thread)), scaled, out)

        machine.loop(self.work().units, one)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _GatedRows:
    """Where ``Gated`` stores rows of a unit in order, so that they can be rounded."""

    values: Shared

    @staticmethod
    def column(number: Value) -> Value:
        return number


def widen(machine: TensorCores, word: Value, table: list[Value], *, interleaved: bool) -> list[Value]:
    """Return eight codes of FP4, in order or in that of ``codes``, as two words of a table's bytes with their signs."""
    # As f16 magnitudes are no NaN. To move them by 16 bits as such uses a pipe that permutations and masks leave idle.
    magnitudes, low = word & _MAGNITUDE_BITS, word << 4
    signs = [word, low] if interleaved else [machine.permute_bytes(low, word, places) for places in _SIGNS]
    return [
        machine.permute_bytes(table[0], table[1], selector) | sign & _SIGN_BITS
        for selector, sign in zip((magnitudes, machine.high_f16(magnitudes)), signs, strict=True)
    ]


def _operand(machine: TensorCores, codes: list[list[Value]], tables: _Tables, *, interleaved: bool) -> list[Value]:
    """Return 128 inputs of two outputs as the left operand of four steps."""
    words = []
    for step in range(len(codes[0])):
        one, other = (
            widen(machine, code[step], table, interleaved=interleaved)
            for code, table in zip(codes, tables, strict=True)
        )
        words += [one[0], other[0], one[1], other[1]]
    return words


def _added(block: Block, stage: Index, first: int, product: list[Value], sums: list[Value]) -> list[Value]:
    """Add a product times the scales of x, of which the first one has that number in the stage."""
    machine, column = block.machine, block.machine.thread % _QUAD * 2
    assert block.x_scales is not None
    added = []
    for start in range(0, len(sums), 4):
        scales = block.x_scales.load_floats(stage, column + (first + 2 * start), count=2)
        for n in range(start, start + 4):
            added.append(machine.fma(product[n], scales[n % 2], sums[n]))
    return added


def _fit(machine: TensorCores, part: _Part, scales: list[Value], codes: list[list[Value]]) -> tuple[_Part, _Tables]:
    """Return the part and the tables, after exponents have followed the scales if they must."""
    relative = [scale - exponent for scale, exponent in zip(scales, part.exponents, strict=True)]
    tables = [[each * once + base for once, base in zip(_ONCE, _E4M3, strict=True)] for each in relative]
    is_bad = [(each < _LOWEST) | (each > _HIGHEST) for each in relative]

    def follow(carry: tuple[_Part, _Tables]) -> tuple[_Part, _Tables]:
        part, _ = carry
        exponents, factors, tables = [], [], []
        for exponent, scale, words in zip(part.exponents, scales, codes, strict=True):
            new = _followed(machine, exponent, scale, words)
            exponents.append(new)
            factors.append(machine.from_bits((exponent - new + 127).maximum(1).minimum(254) << 23))
            tables.append(_table(machine, scale, scale - new))
        return _Part([value * factors[n // 2 % BOXES] for n, value in enumerate(part.sums)], exponents), tables

    return machine.branch_warp(is_bad[0] | is_bad[1], follow, (part, tables))


def _followed(machine: TensorCores, exponent: Value, scale: Value, words: list[Value]) -> Value:
    """Return the exponent of an output, which follows its scales if it must."""
    one, two, three, four = words
    is_some = ((one | two | three | four) & _MAGNITUDE_BITS) != 0
    top, low = select(is_some, scale, -1), select(is_some, scale, 255)
    for distance in (1, 2):
        top = top.maximum(machine.shuffle_xor(top, distance))
        low = low.minimum(machine.shuffle_xor(low, distance))
    wanted = top - select(top - low > _SPREAD, machine.constant(_HIGHEST, "i32"), _USUAL)
    wanted = wanted.minimum(_MOST_EXPONENT).maximum(exponent - _FALL).maximum(_LEAST_EXPONENT)
    must = (top >= 0) & ((top - exponent > _HIGHEST) | (low - exponent < _LOWEST))
    return select(must, wanted, exponent)


def _table(machine: TensorCores, scale: Value, relative: Value) -> list[Value]:
    """Return the table for any exponent, rounded to E4M3; of NaN for a scale that is NaN."""
    power = machine.from_bits((relative + 127).maximum(1).minimum(254) << 23)
    power = select(scale == 255, float("nan"), power)
    return [machine.to_e4m3([power * number for number in numbers]) for numbers in _MAGNITUDES]


def _power_of(machine: TensorCores, exponent: Value) -> Value:
    """Return 2^(exponent - 127); any number for no weight, whose sums are 0 or NaN."""
    return machine.from_bits(exponent.maximum(_LEAST_EXPONENT) << 23)
