"""Indexer scores on Hopper.

A warpgroup processes 64 keys at a time. They are loaded from device memory into registers, unpacked there, and enter
the first product from registers. Its positive part also enters the second product from registers. Shared memory only
holds the queries. Warpgroups wait for each other only between requests, when the queries are replaced.

Both the integer units (for unpacking) and the tensor cores are busy for about the same time. There are two ways to
overlap them:

    in turn      each warpgroup unpacks, multiplies and stores; several warpgroups are at different steps
    overlapped   while the product of one tile runs, the next is unpacked; for long products, with fewer warpgroups
"""

from __future__ import annotations

import dataclasses
from typing import Self

from pallas_kernels.language.fragment import Fragment, LeftOperand, packed, product
from pallas_kernels.language.lanes import Buffer, add
from pallas_kernels.language.target import HOPPER
from pallas_kernels.language.tensor_cores import ATOM_BYTES, TensorCores
from pallas_kernels.language.values import Index, Value, select
from pallas_kernels.scores import tuning
from pallas_kernels.scores.fp4 import Fp4
from pallas_kernels.scores.inputs import ScoreInputs
from pallas_kernels.scores.keys import StoredKeys
from pallas_kernels.scores.queries import Queries
from pallas_kernels.scores.share import Share
from pallas_kernels.scores.tiles import Block, Tiles
from pallas_kernels.tuned import h200

_BLOCKS = HOPPER.multiprocessors  # the largest number of blocks in a launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning(tuning.Tuning):
    """The tuning of the Hopper kernel."""

    blocks: int = _BLOCKS
    stages: int = 1  # tiles that are being loaded for a warpgroup, if not overlapped
    overlapped: bool = False

    @classmethod
    def fastest(cls, fp4: type[Fp4], tokens: int, tiles: int) -> Self:
        """Return the fastest tuning, as measured on an H200."""
        is_short, has_long_products = tiles <= h200.SHORT_SCORES * _BLOCKS, fp4.row_bytes > ATOM_BYTES
        if tokens > 1:
            return cls(warpgroups=2 if has_long_products else 3, overlapped=True)
        if has_long_products:
            return cls(warpgroups=2 if is_short else 3, overlapped=True)
        if is_short:
            return cls(warpgroups=4)
        return cls(warpgroups=4 if tiles <= h200.LONG_SCORES * _BLOCKS else 5, stages=2)

    def shared_bytes(self, fp4: type[Fp4], tokens: int) -> int:
        return Queries.shared_bytes(fp4, tokens)

    def body(
        self, machine: TensorCores, inputs: ScoreInputs[Buffer], out: Buffer, *, fp4: type[Fp4], blocks: int
    ) -> None:
        share = Share.of_block(machine, inputs, blocks)
        block = Block.of(inputs, out, fp4(machine), self.warpgroups)

        def request(b: Value, first: Value, end: Value, _: None) -> None:
            with machine.when(first < end):
                tiles = _Tiles.of(block, b, first, end)
                if self.overlapped:
                    tiles.score_overlapped()
                else:
                    tiles.score_in_turn(self.stages)
                machine.barrier("block")

        share.loop(request, None)


# The operand of a tile's product, the scale of its rows, and the product; the next tile; the page of the one after.
_Overlap = tuple[LeftOperand, list[Value], LeftOperand, StoredKeys, Value]


class _Tiles(Tiles):
    """How a warpgroup scores its tiles on Hopper."""

    __slots__ = ()

    def _page(self, i: Index) -> Value:
        return self.page(i, self.number(i) < self.end)

    def _start(self, loads: int, pages: int) -> tuple[list[StoredKeys], list[Value]]:
        """Load the first tiles' keys, find the pages of those that follow, and store the queries in shared memory."""
        queries, keys = self.block.queries, self.block.keys
        loaded = queries.load(self.b, self.block.machine.thread)
        found = [self._page(i) for i in range(loads + pages)]
        stored = [keys.load(page) for page in found[:loads]]
        queries.store(loaded)
        return stored, found[loads:]

    def score_in_turn(self, stages: int) -> None:
        machine, keys = self.block.machine, self.block.keys

        def some(i: Value, on_the_way: list[tuple[StoredKeys, Value]]) -> list[tuple[StoredKeys, Value]]:
            # A stage holds a tile that is being loaded, and the page of the stage's next tile. The body processes one
            # tile per stage, because words that are being loaded must not be moved to other registers.
            after = []
            for j, (stored, page) in enumerate(on_the_way):
                n = i * stages + j
                parts, scale = keys.unpack(stored)
                operand = self._operand(parts)
                after.append((keys.load(page), self._page(n + 2 * stages)))
                with machine.when(True if j == 0 else n < self.count):
                    for number in range(self.block.queries.tokens):
                        t = machine.constant(number, "i32")
                        sums, _ = self._sums(self._dots(operand, t).wait(), t)
                        self._put(t, n, sums.wait(), scale)
            return after

        start = list(zip(*self._start(stages, stages), strict=True))
        machine.loop((self.count + stages - 1) // stages, some, start)

    def score_overlapped(self) -> None:
        machine, keys, tokens = self.block.machine, self.block.keys, self.block.queries.tokens
        (now, later), (following,) = self._start(2, 1)
        parts, scale = keys.unpack(now)
        operand = self._operand(parts)
        first = machine.constant(0, "i32")
        dots = self._dots(operand, first)

        def one(i: Value, carry: _Overlap) -> _Overlap:
            operand, scale, dots, stored, page = carry
            # Registers that enter a product must not be written while a product runs, so the last step of unpacking is
            # postponed.
            parts, next_scale = keys.unpack(stored)
            stored, page = keys.load(page), self._page(i + 3)
            parts = [machine.hold(row) for row in parts]
            machine.keep_order()

            def token(t: Value, dots: LeftOperand) -> LeftOperand:
                sums, positive = self._sums(dots.wait(), t)
                dots = self._dots(operand, t + 1)
                self._put(t, i, sums.wait(positive, pending=1), scale)
                return dots

            # A loop, although tokens are few: each of them would otherwise have registers with addresses of its own.
            if tokens > 1:
                dots = machine.loop(tokens - 1, token, dots)
            last = machine.constant(tokens - 1, "i32")
            dots = dots.wait()
            machine.hold(operand)
            operand = self._operand([machine.hold(row) for row in parts])
            sums, positive = self._sums(dots, last)
            dots = self._dots(operand, first)
            self._put(last, i, sums.wait(positive, pending=1), scale)
            return operand, next_scale, dots, stored, page

        operand, _, dots, *_ = machine.loop(self.count, one, (operand, scale, dots, later, following))
        dots.wait()  # of a tile that does not exist
        machine.hold(operand)

    def _operand(self, parts: list[list[Value]]) -> LeftOperand:
        """Do the last step of unpacking. Returns the left operand of the first product."""
        fp4 = self.block.keys.fp4
        one, other = (fp4.finish(row) for row in parts)
        return LeftOperand.of_rows(one, other, fp4.dtype)

    def _dots(self, operand: LeftOperand, t: Value) -> LeftOperand:
        """Start the first product for a token, [64 keys, 64 heads]."""
        return packed(operand, self.block.queries.operand[t])

    def _sums(self, dots: LeftOperand, t: Value) -> tuple[Fragment, LeftOperand]:
        """Start the second product, of the positive part of the first and the heads' weights. Returns that part too."""
        positive = dots.map(self.block.machine.relu_f16)
        return product(None, positive, self.block.queries.weights[t]), positive

    def _put(self, t: Value, i: Value, sums: Fragment, key_scale: list[Value]) -> None:
        # Each lane has a pair of columns for both of its rows: the sums with rounded weights, and those with
        # remainders.
        is_first = self.block.machine.thread & 1 == 0
        self.store(t, i, select(is_first, *sums.lane_over_rows(add).values), key_scale)
