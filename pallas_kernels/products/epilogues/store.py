"""The sums of a product as they are, rounded, or added to other rows.

A product of few rows that is added has another array as its result. That of many rows is added in place, so that the
tiles of padding need not be computed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.activations import ActivationRows, OperandRows, PlainRows, Words, fours_of_pairs, store_words
from pallas_kernels.language.lanes import Buffer, swapped
from pallas_kernels.language.machine import WARP
from pallas_kernels.language.values import VECTOR, Step, Value, select
from pallas_kernels.products.epilogues.faces import (
    TILE_PITCH,
    Begun,
    BlockSums,
    ColumnSums,
    Extras,
    LastSteps,
    Made,
    Place,
    RowSums,
)
from pallas_kernels.products.problem import Epilogue, Spec, Unsupported, WeightSpec
from pallas_kernels.products.weights import MOST_ROWS, ROWS
from pallas_kernels.rows import from_bf16, through_bf16

_TOGETHER = 8  # places for which a lane loads together what it adds to


class _Sums(Epilogue):
    """The sums of a product, before they are stored as rows."""

    def few(self, block: BlockSums, extras: Extras, out: Made) -> LastSteps:
        """A warpgroup gathers its outputs in shared memory, so that they are stored in whole lines."""
        machine = block.machine
        places = list(block.places(out.shape[0], 16 // out.dtype.itemsize))
        before = [self._load(place, extras) for place in places]

        def store(eights: list[list[Value]]) -> None:
            base = block.gather_tile(eights)
            for place, old in zip(places, before, strict=True):
                line = place.line * TILE_PITCH + base
                froms = out.sources(place.unit, place.count)
                words = [word for first, n in froms for word in machine.load_shared(line + first * 4, n * 4)]
                values = self._added([machine.from_bits(word) for word in words], old)
                out.values.store_floats(values, place.row, place.output, where=place.there)

        return store

    def many_columns(self, sums: ColumnSums, extras: Extras, out: Made) -> None:
        """Every store writes whole sectors of 32 bytes."""
        machine, lane, given = sums.machine, sums.machine.thread % WARP, sums.sums
        if out.dtype.itemsize == 4:
            # Sectors of 32 bytes are stored by eight lanes. Wider stores after exchanges took longer.
            for n, value in enumerate(given):
                at = sums.column + (n // VECTOR * 8 + n % 2)
                out.values.store_floats([value], at, sums.output + lane // 4 + n // 2 % 2 * 8, where=sums.there(at))
            return
        # A lane has outputs r and r + 8 of two rows of x. After two exchanges it has four adjacent outputs of one.
        is_odd, is_upper = lane // 4 % 2 == 1, lane // 8 % 2 == 1
        row = sums.column + lane // 4 % 2
        of_output = lane // 16 * 4 + select(is_upper, machine.constant(8, "i32"), 0) + sums.output

        def words_of(n: int) -> Words:
            low, high = (machine.to_bf16(*swapped(machine, is_odd, (given[at], given[at + 1]), 4)) for at in (n, n + 2))
            words = swapped(machine, is_upper, (low, high), 8)
            at = row + n // VECTOR * 8
            return Words(list(words), at, of_output, sums.there(at))

        self._store_words(out.values, (words_of(n) for n in range(0, len(given), VECTOR)), extras)

    def _load(self, place: Place, extras: Extras) -> tuple[Step, Value] | None:
        """Load what a lane adds to the sums of a place."""

    def _added(self, values: Step, before: tuple[Step, Value] | None) -> Step:
        """Return sums with what ``_load`` returned."""
        return values

    def _store_words(self, rows: Buffer, places: Iterable[Words], extras: Extras) -> None:
        """Store sums, rounded to bf16."""
        store_words(rows, places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store(_Sums):
    """The sums as rows: plain ones of f32 or bf16, or of a class that holds bf16 in another way."""

    dtype: DTypeLike = jnp.float32  # of plain rows
    kind: type[ActivationRows] = PlainRows

    def state(self, rows: int, outputs: int) -> ActivationRows:
        if self.kind is PlainRows:
            return PlainRows.shapes(rows, outputs, dtype=self.dtype)
        return self.kind.shapes(rows, outputs)

    @property
    def keeps_needed(self) -> bool:
        return self.kind is not PlainRows or jnp.dtype(self.dtype).itemsize < 4

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        if self.kind is OperandRows and rows > ROWS:
            return Unsupported(kind="no kernel", reason=f"operand rows are made of few rows, got {rows}")
        if self.kind is PlainRows and jnp.dtype(self.dtype) not in (jnp.float32, jnp.bfloat16):
            return Unsupported(kind="no kernel", reason=f"sums are stored as f32 or bf16, got {jnp.dtype(self.dtype)}")
        return None

    def many_rows(self, sums: RowSums, extras: Extras, out: Made, begun: Begun) -> None:
        for half, (_, at, where) in enumerate(sums.rows):
            out.store_pairs(sums.machine, sums.pairs(half), at, sums.output, where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddTo(_Sums):
    """Rows of bf16 to which the sums are added, after they were rounded to bf16 themselves.

    The rows of padding, whose position is below 0, stay as they are, whatever their product is.
    """

    def extras(self, rows: int, outputs: int) -> dict[str, Spec]:
        """``onto`` is added to in place where rows are many, if the caller's jit donates it or uses it no more."""
        return {"onto": Spec((rows, outputs), jnp.bfloat16), "positions": Spec((rows,), jnp.int32)}

    def state(self, rows: int, outputs: int) -> ActivationRows:
        return PlainRows.shapes(rows, outputs)

    def unsupported(self, rows: int, weight: WeightSpec) -> Unsupported | None:
        if rows > MOST_ROWS and weight.block is None:
            reason = f"the sums of more than {MOST_ROWS} rows are added by products with FP8 weights, got {rows}"
            return Unsupported(kind="no kernel", reason=reason)
        return None

    def _load(self, place: Place, extras: Extras) -> tuple[Step, Value]:
        values = [
            value
            for first in range(0, place.count, VECTOR)
            for value in extras["onto"].load_floats(place.row, place.output + first, where=place.there)
        ]
        return values, extras["positions"].load_int(place.row, where=place.there) >= 0

    def _added(self, values: Step, before: tuple[Step, Value] | None) -> Step:
        assert before is not None
        old, is_real = before
        rounded = [select(is_real, value, 0.0) for value in through_bf16(values)]
        return [one + other for one, other in zip(old, rounded, strict=True)]

    def many_rows(self, sums: RowSums, extras: Extras, out: Made, begun: Begun) -> None:
        machine = sums.machine
        for half, (_, at, where) in enumerate(sums.rows):
            words = [machine.to_bf16(*pair) for pair in sums.pairs(half)]
            self._store_words(out.values, fours_of_pairs(machine, words, at, sums.output, where), extras)

    def _store_words(self, rows: Buffer, places: Iterable[Words], extras: Extras) -> None:
        for some in itertools.batched(places, _TOGETHER):
            self._add(rows, some, extras["positions"])

    def _add(self, rows: Buffer, places: Sequence[Words], positions: Buffer) -> None:
        by_row = {id(place.row): place for place in places}  # each position is loaded once
        found = {key: positions.load_int(place.row, where=place.where, otherwise=-1) for key, place in by_row.items()}
        there = [found[id(place.row)] >= 0 for place in places]
        before = [
            rows.load_floats(place.row, place.column, count=2 * len(place.words), where=where)
            for place, where in zip(places, there, strict=True)
        ]
        for place, where, old in zip(places, there, before, strict=True):
            product = [value for word in place.words for value in from_bf16(word)]
            added = [a + b for a, b in zip(product, old, strict=True)]
            rows.store_floats(added, place.row, place.column, where=where)
